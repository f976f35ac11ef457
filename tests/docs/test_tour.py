"""docs/tour.md as a reader follows it: its files are written, its programs run, and its commands train."""

import contextlib
import importlib
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from project import ROOT

import mt_grpo_trainer as mt

PAGE = (ROOT / "docs/tour.md").read_text()
FILES = dict(re.findall(r"^`(my_task/[\w.]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))
# Programs that try a file, with what they print.
TRY = r"^```python\n((?:(?!^```).)*?)^```$(?:(?!^```|^## ).)*?^```\n(.*?)^```$"
TRIED = [(code, out) for code, out in re.findall(TRY, PAGE, re.M | re.S) if code not in FILES.values()]
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [shlex.split(line, comments=True) for body in BLOCKS for line in body.splitlines()]
PROGRAMS = {"mt_grpo_trainer.py": "mt_grpo_trainer", "scripts/view_rollouts.py": "view_rollouts",
            "scripts/explain_credit.py": "explain_credit", "scripts/evaluate.py": "evaluate"}  # fmt: skip


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like the clone, with the files of the page in it."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "hf_recipes").symlink_to(ROOT / "hf_recipes")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    for path, text in FILES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text.replace("batch_size: 64", "batch_size: 16"))  # fewer rollouts
    return folder


def shape(line: str) -> str:
    """A line of output without its numbers, and without the time that is left.

    >>> shape("1/40  reward 0.51  2.3 s  2 min left")
    'N/N  reward N  N s'
    """
    return re.sub(r"\d[\d.]*", "N", re.sub(r"  \S+ \w+ left$", "", line))


@pytest.mark.contract("tour")
@pytest.mark.parametrize("number", range(2))
def test_what_a_file_does_is_what_the_page_says(number, clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    code, output = TRIED[number]
    exec(compile(code, "docs/tour.md", "exec"), {"__name__": "tour"})
    assert capsys.readouterr().out == output


def outputs(program: str) -> list[str]:
    """The lines that the page shows behind the commands of a program."""
    (found,) = re.findall(
        rf"^```bash\npython {re.escape(program)}\n```$(?:(?!^```).)*?^```\n(.*?)^```$", PAGE, re.M | re.S
    )
    return found.splitlines()  # fmt: skip


def run(command: list[str], monkeypatch) -> tuple[int, str]:
    """What a program of the page does in this process: exit code and output."""
    module, text = importlib.import_module(PROGRAMS[command[1]]), io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            if module is mt:
                mt.main(command[2:])
            else:
                monkeypatch.setattr(sys, "argv", command[1:])
                module.main()
        except SystemExit as ended:
            return ended.code or 0, text.getvalue()
    return 0, text.getvalue()


@pytest.mark.contract("tour")
def test_the_commands_of_the_page_run(clone, monkeypatch):
    """Each as it stands there and in its order, but for the whole run, of which two steps are taken before."""
    monkeypatch.chdir(clone)
    whole = ["python", "mt_grpo_trainer.py", "--config", "my_task/recipe.yaml"]
    assert COMMANDS[:2] == [["source", ".venv/bin/activate"], ["mkdir", "my_task"]]
    said, ran = {}, []
    for command in COMMANDS[2:]:
        if command[0] == "tail":
            row = json.loads(Path(command[-1]).read_text().splitlines()[-1])
            assert row["rewards"].keys() >= {"right_call", "right_answer"} and row["turns"] and row["turn_advantages"]
        elif command != whole:
            code, text = run([{"64": "16"}.get(word, word) for word in command], monkeypatch)  # fewer problems
            assert code == 0, text
            said[" ".join(command[1:])] = text
        ran.append(command)
    assert whole in ran and [*whole, "--max_steps", "2"] in ran

    summary, _, last = outputs("mt_grpo_trainer.py --config my_task/recipe.yaml --preflight")
    preflight = said["mt_grpo_trainer.py --config my_task/recipe.yaml --preflight"].splitlines()
    assert shape(summary) in map(shape, preflight) and preflight[-1] == last
    steps = outputs("mt_grpo_trainer.py --config my_task/recipe.yaml")
    trained = said["mt_grpo_trainer.py --config my_task/recipe.yaml --max_steps 2"].splitlines()
    assert {shape(line) for line in steps if line != "..."} <= set(map(shape, trained))
    evaluated = next(text for name, text in said.items() if name.startswith("scripts/evaluate.py"))
    for label in ("tool executed", "right result found", "mean turns", "turn reward: right_call",
                  "outcome reward: right_answer"):  # fmt: skip
        assert label in PAGE and re.search(rf"^{label} ", evaluated, re.M), label
    assert Path("runs/my_task/credit.html").is_file()
    assert "<title>my_task</title>" in Path("runs/my_task/rollouts.html").read_text()
