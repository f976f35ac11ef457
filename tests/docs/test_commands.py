"""Every fenced block of the README and of docs/ that is a command or a file: each is run, or its arguments are read.

A block of commands stands in one of three tables, by its first line. `RUN`: it is run here, as it stands; a training
takes one small step in place of minutes. `ELSEWHERE`: a test of another file runs it. `ARGUMENTS`: it needs what no
test has, GPUs, other machines or minutes, and the table says what; then the programs' own parsers read the arguments.
They read those of all other blocks too. Blocks of Python: tests/docs/test_docs.py, tests/docs/test_tour.py and below.
"""

import argparse
import contextlib
import doctest
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import evaluate
import pytest
import yaml
from scripted import CHATML_TOKENIZER
from test_docs import AGENTS, ENVIRONMENTS, FORKING, PAGES, ROOT, accepts, block, blocks, module_of, section, words_of

import mt_grpo_trainer as mt
from mt_grpo.adapters.mcp.files import read_servers
from mt_grpo.adapters.verl.config import read_entries
from mt_grpo.conversation.prompt_examples import read_prompt_examples
from mt_grpo.recipe.keys import known_keys
from mt_grpo.recipe.plugins import import_file
from mt_grpo.training import further_credit

SMALL = ["--max_steps", "1", "--per_device_train_batch_size", "8", "--disable_tqdm", "true"]
GSM8K = "hf_recipes/Qwen/Qwen3-1.7B--gsm8k.yaml"
RUN = {
    "README.md": ["bash scripts/quickstart.sh"],
    "docs/credit.md": ["python scripts/explain_credit.py --config hf_recipes/tiny/chain.yaml"],
    "docs/environments.md": ['WIKI_SEARCH_CORPUS=corpus.jsonl python tools/wiki_search.py "any words"'],
    "docs/forking.md": ["python scripts/one_file.py > my_idea.py"],
    "docs/preflight.md": ["python mt_grpo_trainer.py --config hf_recipes/tiny/calculator.yaml --preflight"],
    "docs/rented_gpus.md": [
        'WIKI_SEARCH_CORPUS=data/wiki.jsonl python tools/wiki_search.py "history of the world"',
    ],
    "docs/verl.md": ["python mt_grpo_trainer.py --config hf_recipes/tiny/tools-yaml.yaml"],
}
TOUR = "test_tour.py::test_the_commands_of_the_page_run"
ELSEWHERE = {
    "README.md": {
        "VLLM_SERVER_DEV_MODE=1 CUDA_VISIBLE_DEVICES=3 vllm serve Qwen/Qwen3-1.7B":
            "test_docs.py::test_vllm_takes_the_flags_of_the_server_by_hand",
    },
    "docs/environments.md": {
    },
    "docs/agents.md": {
    },
    "docs/ms_swift.md": {
        "python mt_grpo_trainer.py --config hf_recipes/tiny/scheduler.yaml":
            "test_ms_swift.py::test_a_recipe_trains_by_a_plugin",
    },
    "docs/tour.md": dict.fromkeys([
        "source .venv/bin/activate", "python mt_grpo_trainer.py --config my_task/recipe.yaml --preflight",
        "python mt_grpo_trainer.py --config my_task/recipe.yaml --max_steps 2",
        "python mt_grpo_trainer.py --config my_task/recipe.yaml",
        "python scripts/view_rollouts.py runs/my_task --html runs/my_task/rollouts.html",
    ], TOUR),
    "docs/rollouts.md": {
        "python scripts/view_rollouts.py runs/chain-sparse": "test_view_rollouts.py::test_it_follows_a_running_job",
    },
    "docs/rented_gpus.md": {
        "mkdir -p runs\nnohup": "test_rented_gpus.py::test_a_run_in_the_background_is_stopped_by_its_number",
        'kill -TERM "$(cat runs/train.pid)"':
            "test_rented_gpus.py::test_a_run_in_the_background_is_stopped_by_its_number",
        "tmux new -s train": "test_rented_gpus.py::test_tmux_takes_its_arguments",
    },
}  # fmt: skip
ARGUMENTS = {
    "README.md": {
        "bash scripts/setup.sh --gpu": "installs gigabytes, and trains on GPUs",
        "CUDA_VISIBLE_DEVICES=0,1,2 accelerate launch": "three GPUs",
        "bash scripts/test.sh": "is the suite that this test is in",
    },
    "docs/cluster.md": {
        "python -m pytest tests/generation/test_sharded.py": "this suite, and a slow test of ten minutes",
        "python -m pytest tests/generation/test_colocate.py": "minutes, as a slow test",
        "VLLM_SERVERS=2 bash scripts/train.sh": "two servers; test_servers.py trains by two",
        "bash scripts/setup.sh --sglang": "3.3 GB; slow tests of test_sglang.py train with what it installs",
        "bash scripts/serve.sh": "serves until it is stopped; test_slurm.py starts it by the job",
        "accelerate launch": "three terminals; test_nodes.py starts such launchers, test_slurm.py all three",
        "mkdir -p runs\nRECIPE=": "Slurm; test_slurm.py runs the script that it is given",
    },
    "docs/agents.md": {
        "python mt_grpo_trainer.py --config hf_recipes/tiny/agent.yaml":
            "minutes; tests/adapters/test_agents_learn.py trains by both agents",
    },
    "docs/environments.md": {
        "python tools/openenv/frozen_lake.py":
            "serves until it is stopped, by a package of its own; test_openenv_servers.py starts it, as a slow test",
        "python scripts/serve_search.py": "serves until it is stopped; tests/adapters/test_verl.py starts one",
    },
    "docs/faults.md": {"bash scripts/train.sh": "GPUs, and a run that was stopped"},
    "docs/forking.md": {
        "cp mt_grpo_trainer.py my_idea.py": "a vLLM server; tests/method/test_fork.py runs such a copy without one",
        "python my_idea.py": "a copy with the page's diff; tests/method/test_fork.py trains by one",
    },
    "docs/real_model.md": {
        "bash scripts/quickstart.sh smollm2":
            "half an hour; tests/scripts/test_scripts.py::test_the_quickstart_of_a_real_model reads it",
        "python scripts/build/smollm2.py": "93 MB, and an hour; test_smollm2.py takes five steps, as a slow test",
    },
    "docs/recipes.md": {
        "python scripts/evaluate.py": "2,048 conversations of a model of `quickstart.sh`",
        "python mt_grpo_trainer.py --config hf_recipes/tiny/chain-sparse.yaml":
            "minutes; test_export_sft.py trains two steps, and makes data of them",
    },
    "docs/versions.md": {
        "bash scripts/test.sh --newest": "installs 3 GB, and runs this suite; test_bench_versions.py runs a small one",
    },
    "docs/rented_gpus.md": {
        'git clone "$REPOSITORY" mt-grpo': "a network, GPUs, and an installation of gigabytes",
        'export HF_HOME="$PWD/.hub"': "the Hub",
        "bash scripts/train.sh": "GPUs; test_server.py does the first with a server on the CPU",
        "mkdir -p runs\nsbatch": "Slurm; test_rented_gpus.py runs the script that it is given",
        "tail -f runs/train.log": "files that grow; test_plot_run.py draws a run that goes on",
        "ssh -L 8020:127.0.0.1:8020 HOST": "another machine",
        "rsync -av": "another machine",
    },
}  # fmt: skip
# Blocks of other languages, by a word in them: the test that reads or runs each.
FILES = {
    "yaml": {
        "agent: my_agent.py:solve": "test_keys_of_a_page_make_a_recipe",
        "gym_env: FrozenLake-v1": "test_keys_of_a_page_make_a_recipe",
        "openenv_reset: {level: 3}": "test_keys_of_a_page_make_a_recipe",
        "max_parallel_calls: 4": "test_keys_of_a_page_make_a_recipe",

        "tools/short_memory.py:ShortMemory": "test_keys_of_a_page_make_a_recipe",
        "Which river flows": "test_the_examples_of_the_page_are_some",
        "my_plugin.py": "test_docs.py::test_the_plugin_of_ms_swift_runs",
        "runs/smallest": "test_docs.py::test_the_smallest_recipe_is_one",
        "my_tools.Adder": "test_docs.py::test_the_tools_of_verl_run",
        "Gsm8kInteraction": "test_docs.py::test_the_tools_of_verl_run",
        "MCPSearchTool": "test_the_entry_of_a_server_of_verl_is_one",
        "my_task/tools.py": TOUR,
    },
    "json": {"mcpServers": "test_the_file_of_servers_is_one"},
    "diff": {"best_turn": "test_docs.py::test_the_fork_runs"},
    "sh": {
        "#SBATCH": "test_rented_gpus.py::test_the_batch_job_starts_and_resumes",
        "codex exec": "test_agent_programs.py::test_codex",
        "model_provider=trainer": "test_agent_programs.py::test_codex_compacts_its_history",
        "pi --provider": "test_agent_programs.py::test_pi",
        "curl --silent": "test_agent_programs.py::test_curl",
    },
}  # fmt: skip
OF_OTHERS = {"source", "tail", "mkdir", "git", "cd", "nvidia-smi", "export", "tmux", "echo", "sbatch", "kill", "ssh",
             "rsync", "vllm"}  # fmt: skip
bash_blocks = [(page, body) for page, text in PAGES.items() for body in blocks(text, "bash")]


def homes(page: str, body: str) -> list[str]:
    """The tables in which a block stands."""
    tables = {"run": RUN, "elsewhere": ELSEWHERE, "arguments": ARGUMENTS}
    if page == "docs/tour.md":  # its first lines are whole commands, one the beginning of another
        return ["elsewhere"] if body.split("\n")[0].partition("  #")[0] in ELSEWHERE[page] else []
    return [name for name, table in tables.items() for first in table.get(page, ()) if body.startswith(first)]


@pytest.mark.parametrize("page, body", bash_blocks)
def test_a_block_of_commands_is_accounted_for(page, body):
    assert len(homes(page, body)) == 1, f"{page}: run it, or say why not\n{body}"
    subprocess.run(["bash", "-n"], input=body, text=True, check=True)


def test_no_entry_is_of_a_block_that_is_gone():
    for table in (RUN, ELSEWHERE, ARGUMENTS):
        for page, entries in table.items():
            for first in entries:
                found = [body for other, body in bash_blocks if other == page and body.startswith(first)]
                assert found, f"{page}: {first}"


def test_every_other_block_is_accounted_for():
    for page, text in PAGES.items():
        languages = {name for name, _ in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)}
        assert languages <= {"", "math", "python", "bash", *FILES}, page
        for language, known in FILES.items():
            for body in blocks(text, language):
                assert sum(word in body for word in known) == 1, f"{page}: no test reads\n{body}"


def test_the_examples_of_the_page_are_some(tmp_path):
    (tmp_path / "examples.yaml").write_text(block(PAGES["docs/environments.md"], "yaml", "Which river flows"))
    tools = [vars(import_file(str(ROOT / "tools/wiki_search.py"), "tools_script"))["wiki_search"]]
    env = mt.MultiTurnToolEnv(tools, None, tokenizer=CHATML_TOKENIZER,
                              prompt_examples=read_prompt_examples(str(tmp_path / "examples.yaml")))  # fmt: skip
    assert [message["role"] for message in env.examples_of(CHATML_TOKENIZER)] == ["user", "assistant"] * 2


def test_the_tests_that_are_named_exist():
    named = [test for table in ELSEWHERE.values() for test in table.values()]
    for test in named + [test for known in FILES.values() for test in known.values()]:
        file, _, name = test.rpartition("::")
        assert f"def {name}(" in next((ROOT / "tests").rglob(file or Path(__file__).name)).read_text(), test
    for reason in (reason for table in ARGUMENTS.values() for reason in table.values()):
        for file in re.findall(r"test_\w+\.py", reason):
            assert list((ROOT / "tests").rglob(file)), reason


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like the clone, in which runs may write."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git", "data"):
            (folder / path.name).symlink_to(path)
    return folder


def first_of(page: str, word: str) -> str:
    (first,) = [first for first in RUN[page] if word in first]
    (body,) = [body for other, body in bash_blocks if other == page and body.startswith(first)]
    assert body.strip() == first  # all of it is run
    return first


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
    assert first_of("README.md", "quickstart") == "bash scripts/quickstart.sh"
    monkeypatch.setattr(importlib.import_module("quickstart"), "NUM_PROBLEMS", 16)
    said = in_this_process("python scripts/quickstart.py", clone, monkeypatch, *SMALL)
    shown = block(PAGES["README.md"], "", "1/3 evaluating")
    for line in shown.splitlines():
        if line.strip(" .") and not re.match(r" +\d+/60 ", line):
            begin = re.split(r"[\d.]+;?(?:$|\s)", line.replace("512", "16").replace("for 60", "for 1"))[0].rstrip()
            assert begin.strip() in said, line
    assert (clone / "runs/chain-sparse/model.safetensors").is_file()


def test_the_credit_of_a_group_is_shown(clone, monkeypatch):
    said = in_this_process(first_of("docs/credit.md", "chain.yaml"), clone, monkeypatch)
    header = next(line for line in PAGES["docs/credit.md"].splitlines() if line.startswith("turn  reward"))
    assert "gold answer" in said and header in said.splitlines()
    assert (clone / "runs/credit.html").is_file()


def test_the_tool_by_yaml_trains(clone, monkeypatch):
    said = in_this_process(first_of("docs/verl.md", "tools-yaml"), clone, monkeypatch, *SMALL)
    assert re.search(r"^1/1  reward \d", said, re.M)


def test_the_preflight_prints_what_its_page_shows(clone, monkeypatch):
    """But for numbers and versions, which differ by machine."""
    page = PAGES["docs/preflight.md"]
    shown = block(page, "", "Rolling out the first batch")
    said = in_this_process(first_of("docs/preflight.md", "--preflight"), clone, monkeypatch, "--max_turn_tokens", "12")
    assert "(`--max_turn_tokens 12`)" in page

    def shapes(text):
        lines = [re.sub(r"\d[\d.,+cpu]*", "N", line) for line in text.splitlines() if line.strip()]
        return [line for line in lines if not line.startswith(("What is", "seconds:", "the run:", "versions"))]

    assert [re.sub(r"N [-+*].*", "N", line) for line in shapes(said)] == [
        re.sub(r"N [-+*].*", "N", line) for line in shapes(shown)
    ]


@pytest.mark.parametrize("page", ["docs/environments.md", "docs/rented_gpus.md"])
def test_a_corpus_is_indexed_by_hand(page, clone):
    command = first_of(page, "WIKI_SEARCH_CORPUS")
    corpus = clone / re.match(r"WIKI_SEARCH_CORPUS=(\S+)", command)[1]
    corpus.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "hf_recipes/tiny/towns/corpus.jsonl", corpus)
    assert in_a_shell(command, clone).strip()
    assert corpus.with_name(f"{corpus.name}.fts5").is_file()


def test_one_file_is_written(clone):
    in_a_shell(first_of("docs/forking.md", "one_file"), clone)
    text = (clone / "my_idea.py").read_text()
    compile(text, "my_idea.py", "exec")
    assert "class MTGRPOEnvTrainer" in text and "class ToolCall" in text  # of the script, and of the package


def test_the_method_page_computes_what_it_shows():
    """Its blocks go on from each other."""
    body = "\n".join(blocks(PAGES["docs/method.md"], "python"))
    test = doctest.DocTestParser().get_doctest(body, {}, "docs/method.md", None, 0)
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0 and result.attempted > 10


def test_the_method_page_names_functions_of_the_script():
    page = PAGES["docs/method.md"]
    names = re.findall(r"`((?:MultiTurnToolEnv|MTGRPOEnvTrainer|RewardTable)\.\w+|\w+_advantages|norm)`", page)
    assert len(names) > 12
    for name in names:
        owner = further_credit if hasattr(further_credit, name) else mt
        for part in name.split("."):
            owner = getattr(owner, part)
    rows = re.findall(r"^\| `(\w+)` \| .* \| `(\w+)` \|$", section(page, "The advantage of a turn"), re.M)
    assert rows == [(name, function.__name__) for name, function in mt.CREDIT_ASSIGNMENTS.items()]


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


@pytest.mark.parametrize("page, body", bash_blocks)
def test_the_programs_read_the_arguments(page, body, clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    if page == "docs/tour.md" and not (clone / "my_task").is_dir():
        files = re.findall(r"^`(my_task/[\w.]+)`:\n\n```\w+\n(.*?)^```$", PAGES[page], re.M | re.S)
        (clone / "my_task").mkdir()
        for path, text in files:
            (clone / path).write_text(text)
    added = "best_turn" if "best_turn" in body else None
    try:
        if added:  # what the page's diff registers
            lines = block(FORKING, "diff", "credit_estimator").splitlines()
            exec("\n".join(line[1:] for line in lines if line.startswith("+")), dict(vars(mt)))
        for line in body.replace("\\\n", " ").splitlines():
            if words := words_of(line):
                read_arguments(words, monkeypatch, capsys)
    finally:
        mt.CREDIT_ASSIGNMENTS.pop(added, None)


@pytest.mark.parametrize("line", [
    f"bash scripts/train.sh {GSM8K} --max_step 4", "python scripts/plot_run.py runs/a --outptu b.png",
    "CUDA_VISIBLE_DEVICES=0 accelerate launch --confg_file x.yaml mt_grpo_trainer.py --config x.yaml",
    "python -m pip install --no-build-isolaton deepspeed", "hf download Qwen/Qwen3-1.7B --repo-typ dataset",
    "unknown --flag",
])  # fmt: skip
def test_wrong_arguments_are_noticed(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises((SystemExit, Exception)):  # each parser has its own
        read_arguments(words_of(line), monkeypatch, capsys)


# --- files -----------------------------------------------------------------------------------------------------------


def test_keys_of_a_page_make_a_recipe(tmp_path, monkeypatch):
    """Blocks of a few keys, as lines of a recipe of a tiny model."""
    monkeypatch.chdir(ROOT)
    words = [word for word, test in FILES["yaml"].items() if test == "test_keys_of_a_page_make_a_recipe"]
    assert len(words) == 5
    for word in words:
        text = AGENTS + ENVIRONMENTS + FORKING + PAGES["docs/credit.md"]
        keys = yaml.safe_load(block(text, "yaml", word))
        assert keys.keys() <= set(known_keys(mt.RECIPE_CLASSES))
        recipe = yaml.safe_load((ROOT / "hf_recipes/tiny/calculator-hermes.yaml").read_text())
        if "environment" in keys and "tools_script" not in keys:  # an agent or a game brings its own
            recipe = {key: value for key, value in recipe.items() if key not in ("tools_script", "reward_fn")}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | keys))
        script_args, args, _ = mt.parse_arguments(["--config", str(tmp_path / "recipe.yaml")])
        for key, value in keys.items():
            owner = args if hasattr(args, key) else script_args
            read, named = ([each] if not isinstance(each, list) else each for each in (getattr(owner, key), value))
            assert all(str(one).endswith(str(other)) for one, other in zip(read, named, strict=True)), key  # absolute


def test_the_file_of_servers_is_one(tmp_path, monkeypatch):
    """The reader of `mcp_config_file` takes it; tests/adapters/test_mcp.py starts such servers."""
    path = tmp_path / "servers.json"
    path.write_text(block(ENVIRONMENTS, "json", "mcpServers"))
    monkeypatch.setenv("WIKI_TOKEN", "secret")
    servers = read_servers(str(path), "mcp_config_file")
    assert servers.keys() == json.loads(path.read_text())["mcpServers"].keys() == {"time", "wiki"}


def test_the_entry_of_a_server_of_verl_is_one(tmp_path):
    """The reader of `tools_config_file` takes it; tests/adapters/test_verl.py runs entries of this type."""
    path = tmp_path / "tools.yaml"
    path.write_text(block(PAGES["docs/verl.md"], "yaml", "MCPSearchTool"))
    (entry,) = read_entries(str(path), "tools_config_file", "tools")
    assert entry["config"]["type"] == "mcp" and set(entry["mcp"]) == {"mcp_servers_config_path", "tool_selected_list"}


def test_extras_that_pages_install_exist():
    """`pip install -e '.[name]'` of all pages."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"pip install -e '?\.\[(\w+)\]", "".join(PAGES.values()))
    assert named and set(named) <= set(extras)
