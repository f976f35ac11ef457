"""Forks: a plug-in that subclasses, launched by the script, by a copy and by one file; the page's own estimator."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from project import ROOT, json_lines

SCRIPT = ROOT / "mt_grpo_trainer.py"
RECIPE = ROOT / "hf_recipes/tiny/calculator.yaml"
WITHOUT_PATH = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
WITH_PATH = {**WITHOUT_PATH, "PYTHONPATH": str(ROOT)}

PLUGIN = '''
"""A tools file with an environment of its own."""
import json
import sys
from pathlib import Path

import mt_grpo.rollout
import mt_grpo_trainer
from mt_grpo.rollout import Turn
from mt_grpo_trainer import MultiTurnToolEnv


def calculator(expression: str) -> str:
    """Evaluate a product.

    Args:
        expression: Such as `6 * 7`.
    """
    return "42"


class RecordingEnv(MultiTurnToolEnv):
    async def take_turn(self, rollout, llm, sampling_params=None):
        await super().take_turn(rollout, llm, sampling_params)
        main = sys.modules["__main__"]
        facts = {
            "turn": isinstance(rollout.turns[-1], Turn),
            "script": mt_grpo_trainer is main,
            "env": main.MultiTurnToolEnv is MultiTurnToolEnv,
            "main": main.__file__,
            "package": mt_grpo.rollout.__file__,
        }
        Path(__file__).with_name("facts.json").write_text(json.dumps(facts))


TOOL_FUNCTIONS = [calculator]
'''

# Rollouts 0 to 3 of each group of 4 are worth 0 to 3 by their best turn, which is their first.
REWARDS = """
def place_in_the_group(rollout_turns, **kwargs):
    return [[float(i % 4)] + [-1.0] * (len(turns) - 1) for i, turns in enumerate(rollout_turns)]


TURN_REWARD_FUNCS = [place_in_the_group]
"""


def launch(folder: Path, script: Path, environment: dict[str, str], *further: str,
           recipe: Path = RECIPE, python: str = sys.executable) -> subprocess.Popen:  # fmt: skip
    """Train one small step by the tiny recipe, with the plug-in of `folder` and in that folder."""
    (folder / "plugin.py").write_text(PLUGIN)
    command = [
        python, str(script), "--config", str(recipe), "--max_steps", "1",
        "--model_name_or_path", str(RECIPE.parent / "calculator-model"), "--tools_script", str(folder / "plugin.py"),
        "--reward_fn", str(ROOT / "rewards/calculator_reward.py"), "--environment", f"{folder}/plugin.py:RecordingEnv",
        "--output_dir", str(folder / "out"), "--per_device_train_batch_size", "8", "--num_generations", "4",
        "--gradient_accumulation_steps", "1", "--save_strategy", "no", "--eval_strategy", "no",
        "--max_completion_length", "64", "--report_to", "none", *further,
    ]  # fmt: skip
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plug_in_finds_the_same_classes_however_it_is_launched(tmp_path):
    """As the script, as a copy of it, and as one file in an empty folder."""
    folders = {name: tmp_path / name for name in ("script", "copy", "alone")}
    for folder in folders.values():
        folder.mkdir()
    copy, alone = folders["copy"] / "my_idea.py", folders["alone"] / "my_idea.py"
    copy.write_text(SCRIPT.read_text())
    one_file = [sys.executable, str(ROOT / "scripts/one_file.py")]
    alone.write_text(subprocess.run(one_file, capture_output=True, text=True, check=True).stdout)
    scripts = {"script": SCRIPT, "copy": copy, "alone": alone}
    paths = {"script": WITHOUT_PATH, "copy": WITH_PATH, "alone": WITHOUT_PATH}
    warm = warm_python.executable()  # has the libraries, and nothing of the project
    pythons = {"script": warm, "copy": warm, "alone": sys.executable}
    runs = {name: launch(folders[name], scripts[name], paths[name], python=pythons[name]) for name in folders}
    for name, run in runs.items():
        output, _ = run.communicate(timeout=500)
        assert run.returncode == 0, f"{name}: {output[-3000:]}"
        facts = json.loads((folders[name] / "facts.json").read_text())
        assert facts["turn"] and facts["script"] and facts["env"], (name, facts)
        assert Path(facts["main"]) == scripts[name]
        assert Path(facts["package"]) == (alone if name == "alone" else ROOT / "mt_grpo/rollout.py")
        assert (folders[name] / "out/model.safetensors").is_file()


def with_the_page_s_estimator() -> str:
    """The script after the diff of docs/forking.md: one place, where its context lines stand, and at most 12 lines."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs/forking.md").read_text(), re.M | re.S)
    lines, source = diff.splitlines(keepends=True), SCRIPT.read_text()
    assert len(lines) <= 12 and {line[0] for line in lines} == {"+", " "}
    context = "".join(line[1:] for line in lines if line[0] == " ")
    assert source.count(context) == 1
    return source.replace(context, "".join(line[1:] for line in lines))


@pytest.mark.timeout(600)
def test_the_estimator_of_the_page_trains(tmp_path):
    """A recipe names it, and so does the command line.

    Advantages by hand: 0 to 3 are -1.5, -0.5, 0.5 and 1.5 around their mean, over 1.2910 + 0.0001.
    """
    copy, rewards, recipe = (tmp_path / name for name in ("my_idea.py", "rewards.py", "recipe.yaml"))
    copy.write_text(with_the_page_s_estimator())
    rewards.write_text(REWARDS)
    key, text = "credit_assignment: ", RECIPE.read_text()
    assert text.count(f"{key}mt_grpo\n") == 1
    recipe.write_text(text.replace(f"{key}mt_grpo\n", f"{key}best_turn\n"))
    further = ("--reward_fn", str(rewards), "--credit_assignment", "best_turn")
    run = launch(tmp_path, copy, WITH_PATH, *further, recipe=recipe, python=warm_python.executable())
    output, _ = run.communicate(timeout=500)
    assert run.returncode == 0, output[-3000:]
    rows = json_lines(tmp_path / "out/rollouts.rank0.jsonl")
    expected = {0: -1.1618, 1: -0.3873, 2: 0.3873, 3: 1.1618}
    assert [row["index"] for row in rows] == list(range(8))
    assert max(len(row["turn_advantages"]) for row in rows) > 1  # all turns of a rollout get the same
    for row in rows:
        of_turns = row["turn_advantages"]
        assert of_turns == pytest.approx([expected[row["index"] % 4]] * len(of_turns), abs=1e-4), row
