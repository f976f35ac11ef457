"""Commands of the README, the tour and the quickstart: they are run, or their programs read their arguments.

A training takes one small step instead of minutes. Blocks of Python: tests/docs/test_docs.py, tests/docs/test_tour.py.
"""

import argparse
import contextlib
import doctest
import importlib
import io
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import evaluate
import pytest
from test_docs import FORKING, PAGES, ROOT, accepts, block, blocks, module_of, words_of

SMALL = ["--max_steps", "1", "--per_device_train_batch_size", "8", "--disable_tqdm", "true"]
OF_OTHERS = {"source", "tail", "mkdir", "git", "cd", "nvidia-smi", "export", "tmux", "echo", "sbatch", "kill", "ssh",
             "rsync", "vllm"}  # fmt: skip
COMMANDS = [(page, body) for page in ("README.md", "docs/tour.md") for body in blocks(PAGES[page], "bash")]


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like the clone, in which runs may write."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git", "data"):
            (folder / path.name).symlink_to(path)
    return folder


def in_this_process(command: str, clone: Path, monkeypatch, *more: str) -> str:
    """What `python SCRIPT ARGUMENTS` prints."""
    monkeypatch.chdir(clone)
    _, script, *arguments = words_of(command)
    monkeypatch.setattr(sys, "argv", [script, *arguments, *more])
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            importlib.import_module(module_of(script)).main()
        except SystemExit as ended:
            assert not ended.code, ended.code
    return text.getvalue()


def in_a_shell(command: str, clone: Path) -> str:
    """What a command prints in the clone, whose Python is this one's."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quickstart_runs(clone, monkeypatch):
    """What quickstart.sh starts behind the installation, with fewer problems and one step."""
    assert 'exec .venv/bin/python scripts/quickstart.py "$@"' in (ROOT / "scripts/quickstart.sh").read_text()
    assert block(PAGES["README.md"], "bash", "quickstart.sh") == "bash scripts/quickstart.sh\n"
    monkeypatch.setattr(importlib.import_module("quickstart"), "NUM_PROBLEMS", 16)
    said = in_this_process("python scripts/quickstart.py", clone, monkeypatch, *SMALL)
    shown = block(PAGES["README.md"], "", "1/3 evaluating")
    for line in shown.splitlines():
        if line.strip(" .") and not re.match(r" +\d+/60 ", line):
            begin = re.split(r"[\d.]+;?(?:$|\s)", line.replace("512", "16").replace("for 60", "for 1"))[0].rstrip()
            assert begin.strip() in said, line
    assert (clone / "runs/chain-sparse/model.safetensors").is_file()


def test_the_credit_of_a_group_is_shown(clone, monkeypatch):
    said = in_this_process(block(PAGES["docs/credit.md"], "bash", "chain.yaml"), clone, monkeypatch)
    header = next(line for line in PAGES["docs/credit.md"].splitlines() if line.startswith("turn  reward"))
    assert "gold answer" in said and header in said.splitlines()
    assert (clone / "runs/credit.html").is_file()


def test_one_file_is_written(clone):
    in_a_shell(block(FORKING, "bash", "one_file"), clone)
    text = (clone / "my_idea.py").read_text()
    compile(text, "my_idea.py", "exec")
    assert "class MTGRPOEnvTrainer" in text and "class ToolCall" in text  # of the script, and of the package


def test_the_method_page_computes_what_it_shows():
    """Its blocks go on from each other."""
    body = "\n".join(blocks(PAGES["docs/method.md"], "python"))
    test = doctest.DocTestParser().get_doctest(body, {}, "docs/method.md", None, 0)
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0 and result.attempted > 10


# --- arguments -------------------------------------------------------------------------------------------------------


class Parsed(Exception):
    """The arguments were read, and nothing was begun."""


def read_by_argparse(module: str, arguments: list[str], monkeypatch) -> None:
    """Have a script's own parser read its arguments. Raises SystemExit where it refuses them."""

    def parse_args(self, *args, **kwargs):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", known)
        raise Parsed(whole(self, *args, **kwargs), [])

    def parse_known_args(self, *args, **kwargs):  # of a script that hands the rest to the trainer
        raise Parsed(*known(self, *args, **kwargs))

    whole, known = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args
    program = importlib.import_module(module)
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(Parsed) as parsed:
            program.main()
    options, rest = parsed.value.args
    if rest:
        read_recipe(["--config", options.config, *rest])


def read_recipe(arguments: list[str]) -> None:
    """Have the trainer's parser read a recipe and what overrides it."""
    assert arguments[0] == "--config"
    recipe, rest = arguments[1], arguments[2:]
    if rest[-2:] == ["--resume_from_checkpoint", "last"]:  # of which there is none here
        rest = rest[:-2]
    evaluate.load_recipe(recipe, rest)


def read_arguments(words: list[str], monkeypatch, capsys) -> None:
    """Have the program that a line starts read its arguments."""
    if words[0] == "nohup":
        words = words[1:]
    end = next((i for i, word in enumerate(words) if word in (">", "&", "|")), len(words))
    program, *arguments = words[:end]
    script = arguments[0] if program in ("bash", "python") and arguments[0].endswith((".py", ".sh")) else ""
    if program == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        launched = launch_command_parser().parse_args(arguments[1:])
        assert Path(launched.config_file).is_file()
        read_recipe(launched.training_script_args)
    elif script == "scripts/train.sh":
        train = importlib.import_module("launch.train")
        monkeypatch.setattr(train, "ROOT", ROOT)
        recipe, rest = train.read_command_line(arguments[1:])
        read_recipe(["--config", recipe, *rest])
    elif script == "scripts/serve.sh":
        serve = importlib.import_module("launch.serve")
        recipe, options, rest = serve.read_arguments(arguments[1:])
        assert options.port
        read_recipe(["--config", recipe, *rest])
    elif script in ("mt_grpo_trainer.py", "my_idea.py"):
        read_recipe(arguments[1:])
    elif script in ("tools/wiki_search.py", "scripts/one_file.py", "scripts/quickstart.sh", "scripts/test.sh"):
        pass  # all but the last are run above, or read by tests that the tables name
    elif script == "scripts/setup.sh":
        assert all(accepts(script, option, capsys) for option in arguments[1:])
    elif script:
        read_by_argparse(module_of(script), arguments[1:], monkeypatch)
    elif program == "python" and arguments[:3] == ["-m", "pip", "install"]:
        from pip._internal.commands import create_command

        options, packages = create_command("install").parse_args(arguments[3:])
        assert packages
    elif program == "python" and arguments[:2] == ["-m", "pytest"]:
        file, *options = arguments[2:]
        assert (ROOT / file).is_file() and options in ([], ["-m", ""])
    elif program == "hf":
        with tempfile.TemporaryDirectory() as folder:
            offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": folder}
            command = [sys.executable, "-m", "huggingface_hub.cli.hf", *arguments]
            done = subprocess.run(command, env=offline, capture_output=True, text=True)
        assert done.returncode == 1 and "offline" in done.stderr, done.stderr  # 2: wrong arguments
    elif program == "cp":
        assert (ROOT / arguments[0]).is_file()
    else:
        assert program in OF_OTHERS, words


@pytest.mark.parametrize("page, body", COMMANDS)
def test_the_programs_read_the_arguments(page, body, clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    if page == "docs/tour.md" and not (clone / "my_task").is_dir():
        files = re.findall(r"^`(my_task/[\w.]+)`:\n\n```\w+\n(.*?)^```$", PAGES[page], re.M | re.S)
        (clone / "my_task").mkdir()
        for path, text in files:
            (clone / path).write_text(text)
    for line in body.replace("\\\n", " ").splitlines():
        if words := words_of(line):
            read_arguments(words, monkeypatch, capsys)


@pytest.mark.parametrize("line", [
    "bash scripts/train.sh hf_recipes/tiny/calculator.yaml --max_step 4",
    "python scripts/view_rollouts.py runs/a --htlm b.html",
    "CUDA_VISIBLE_DEVICES=0 accelerate launch --confg_file x.yaml mt_grpo_trainer.py --config x.yaml",
    "python -m pip install --no-build-isolaton deepspeed", "hf download Qwen/Qwen3-1.7B --repo-typ dataset",
    "unknown --flag",
])  # fmt: skip
def test_wrong_arguments_are_noticed(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises((SystemExit, Exception)):  # each parser has its own
        read_arguments(words_of(line), monkeypatch, capsys)


def test_extras_that_pages_install_exist():
    """`pip install -e '.[name]'` of all pages."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"pip install -e '?\.\[(\w+)\]", "".join(PAGES.values()))
    assert named and set(named) <= set(extras)
