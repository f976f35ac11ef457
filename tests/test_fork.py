"""Forks: a plug-in that subclasses, launched by the script, by a copy of it, and by one self-contained file."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

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


def launch(folder: Path, script: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Train one small step by the tiny recipe, with the plug-in of `folder` and in that folder."""
    (folder / "plugin.py").write_text(PLUGIN)
    tiny = ROOT / "hf_recipes/tiny"
    command = [
        sys.executable, str(script), "--config", str(tiny / "calculator.yaml"), "--max_steps", "1",
        "--model_name_or_path", str(tiny / "calculator-model"), "--tools_script", str(folder / "plugin.py"),
        "--reward_fn", str(ROOT / "rewards/calculator_reward.py"), "--environment", f"{folder}/plugin.py:RecordingEnv",
        "--output_dir", str(folder / "out"), "--per_device_train_batch_size", "8", "--num_generations", "4",
        "--gradient_accumulation_steps", "1", "--save_strategy", "no", "--eval_strategy", "no",
        "--max_completion_length", "64", "--report_to", "none",
    ]  # fmt: skip
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)  # fmt: skip


@pytest.mark.timeout(600)
def test_a_plug_in_finds_the_same_classes_however_it_is_launched(tmp_path):
    """As the script, as a copy of it, and as one file in an empty folder."""
    import json
    import os

    without = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    folders = {name: tmp_path / name for name in ("script", "copy", "alone")}
    for folder in folders.values():
        folder.mkdir()
    copy, alone = folders["copy"] / "my_idea.py", folders["alone"] / "my_idea.py"
    copy.write_text((ROOT / "mt_grpo_trainer.py").read_text())
    one_file = [sys.executable, str(ROOT / "scripts/one_file.py")]
    alone.write_text(subprocess.run(one_file, capture_output=True, text=True, check=True).stdout)
    scripts = {"script": ROOT / "mt_grpo_trainer.py", "copy": copy, "alone": alone}
    paths = {"script": without, "copy": {**without, "PYTHONPATH": str(ROOT)}, "alone": without}
    runs = {name: launch(folders[name], scripts[name], paths[name]) for name in folders}
    for name, run in runs.items():
        output, _ = run.communicate(timeout=500)
        assert run.returncode == 0, f"{name}: {output[-3000:]}"
        facts = json.loads((folders[name] / "facts.json").read_text())
        assert facts["turn"] and facts["script"] and facts["env"], (name, facts)
        assert Path(facts["main"]) == scripts[name]
        assert Path(facts["package"]) == (alone if name == "alone" else ROOT / "mt_grpo/rollout.py")
        assert (folders[name] / "out/model.safetensors").is_file()
