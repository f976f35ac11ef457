"""The table of integrations: each has its keys and says which recipes it runs."""

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import warm_python
from project import ROOT, steps_of

import mt_grpo_trainer as mt
from mt_grpo.recipe import plugins as choose
from mt_grpo.recipe.parse import make_absolute


@pytest.mark.parametrize("keys, message", [
    ({"gym_text": "a.py:B"}, "gym_text has no effect without the line environment: gym"),
    ({"environment": "openai_agent", "mcp_config_file": "a.json"},
     "mcp_config_file has no effect without the trainer's own conversation"),
    ({"environment": "gym"}, "environment: gym without gym_env"),
    ({"environment": "gym", "tools_script": "a.py"}, "tools_script has no effect with environment: gym"),
    ({"environment": "openai_agent", "agent": "a.py:b", "agent_command": "c"}, "both of agent and agent_command"),
    ({"environment": "openai_agent", "agent": "a.py:b", "tool_format": "xml"}, "tool_format='xml' does not fit"),
    ({"environment": "openai_agent", "agent": "a.py:b", "max_env_steps": 5}, "max_env_steps has no effect"),
])  # fmt: skip
def test_a_key_that_does_not_fit_is_refused_before_a_model_is_loaded(keys, message):
    """Of an integration, or a setting of the trainer's own conversation."""
    own = {key: keys.pop(key) for key in ("tool_format", "max_env_steps") if key in keys}
    args = mt.MTGRPOConfig(**{"output_dir": "x", "use_cpu": True, "bf16": False, "tool_format": "hermes", **own})
    with pytest.raises(ValueError, match=message):
        choose.load_conversation(mt.recipe_classes()[0](**keys), args, mt.MultiTurnToolEnv)


def test_keys_have_absolute_paths_and_names_of_their_own(monkeypatch, tmp_path):
    """A list of files, `file:Class`, and what may be a name instead. The later one would hide the other, with its
    default and its range."""
    monkeypatch.chdir(tmp_path)
    files = dict(external_plugins=["a.py", "~/b.py"], environment="c.py:D", gym_text="e.py:F", gym_env="Blackjack-v1")
    args = mt.recipe_classes()[0](**files, mcp_config_file="g.json")
    make_absolute(args)
    assert args.external_plugins == [f"{tmp_path}/a.py", os.path.expanduser("~/b.py")]
    assert (args.environment, args.gym_text) == (f"{tmp_path}/c.py:D", f"{tmp_path}/e.py:F")
    assert (args.gym_env, args.mcp_config_file) == ("Blackjack-v1", f"{tmp_path}/g.json")
    names = [each.name for integration in choose.integrations() for each in dataclasses.fields(integration.keys)]
    names += [each.name for each in dataclasses.fields(mt.MTGRPOConfig)]
    assert len(names) == len(set(names))


@pytest.mark.contract("an integration in another package")
def test_another_package_is_installed_and_trained(tmp_path):
    """The package of docs/forking.md, by pip: its environment runs a step with its key, and its key is checked."""
    page = (ROOT / "docs/forking.md").read_text()
    section = page[page.index("## An integration\n") :]
    toml, module = re.findall(r"```(?:toml|python)\n(.*?)```", section, re.DOTALL)[:2]
    assert len(module.splitlines()) <= 40
    (tmp_path / "source").mkdir()
    (tmp_path / "source/pyproject.toml").write_text(toml + '\n[tool.setuptools]\npy-modules = ["mt_grpo_guess"]\n')
    (tmp_path / "source/mt_grpo_guess.py").write_text(module)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(tmp_path / "site"), str(tmp_path / "source")], check=True, cwd=tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [warm_python.executable(), str(ROOT / "mt_grpo_trainer.py"), "--environment", "guess",
               "--max_steps", "1",
               "--model_name_or_path", str(ROOT / "hf_recipes/tiny/calculator-model"), "--num_generations", "4",
               "--per_device_train_batch_size", "4", "--use_cpu", "true", "--bf16", "false", "--report_to", "none",
               "--max_completion_length", "32", "--output_dir", str(tmp_path / "out")]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    refused = subprocess.Popen([*command, "--guess_highest", "0"], env=env, **pipes)  # beside the other one
    run = subprocess.run([*command, "--guess_highest", "7"], env=env, capture_output=True, text=True, check=False)
    _, said = refused.communicate(timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    (log,) = (tmp_path / "out").glob("rollouts*.jsonl")
    assert "Guess a number from 1 to 7." in log.read_text()
    assert "rewards/Guess/mean" in steps_of(tmp_path / "out")[0]
    assert refused.returncode == 1 and "guess_highest=0, expected a finite number in [1, inf)" in said
