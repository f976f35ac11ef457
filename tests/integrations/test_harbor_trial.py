"""tools/agents/harbor_trial.py: Harbor's trials as an agent. The policy is scripted; CI has a stand-in for Harbor."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from project import ROOT
from scripted import QWEN3, Scripted, ids, make_tokenizer

import mt_grpo_trainer as mt
from mt_grpo.recipe import plugins as choose
from mt_grpo.recipe.plugins import import_file
from mt_grpo.rollout import StopReason

SAMPLE = ROOT / "tools/agents/harbor_trial.py"
TOKENIZER = make_tokenizer(QWEN3)


@pytest.fixture
def stub(monkeypatch):
    """The worker's Harbor is tests/harbor_stub."""
    monkeypatch.setenv("HARBOR_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/harbor_stub"))


def play(task, *texts, sample=SAMPLE):
    """The rollout of a task, whose policy writes these texts."""
    keys = {"environment": "openai_agent", "agent": f"{sample}:solve", "agent_timeout": 600.0}
    config = {"output_dir": "x", "use_cpu": True, "bf16": False, "tool_format": "hermes"}
    script = mt.recipe_classes()[0](**keys)
    conversation, environment = choose.load_conversation(script, mt.MTGRPOConfig(**config), mt.MultiTurnToolEnv)
    backend = Scripted([[f"{text}<|im_end|>" for text in texts]], tokenizer=TOKENIZER)
    env = conversation([], None, environment=environment, tokenizer=TOKENIZER, tool_format="hermes")
    (rollout,) = env.generate([[]], backend, rows=[{"task": str(task)}])["rollouts"]
    assert [turn.token_ids for turn in rollout.turns] == [ids(f"{text}<|im_end|>") for text in texts]
    return rollout


def planned(tmp_path, **plan):
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return tmp_path


@pytest.mark.contract("Harbor")
def test_results_of_steps_are_turn_rewards_and_the_verifiers_is_the_outcome(stub, tmp_path):
    """What the policy did to the verifier is 0."""
    steps = [{"rewards": {"reward": 1.0, "style": 0.0}}, {"rewards": {"a": 0.5, "b": 0.0}}]
    rollout = play(planned(tmp_path, steps=steps, trial={"rewards": {"reward": 0.5}}), "ls", "ls")
    assert [turn.reward for turn in rollout.turns] == [1.0, 0.25] and rollout.reward == 0.5 and rollout.error is None
    rollout = play(planned(tmp_path, trial={"rewards": {"reward": 1}}), "ls")
    assert [turn.reward for turn in rollout.turns] == [None] and rollout.reward == 1.0
    for name in ("RewardFileNotFound", "RewardFileEmpty", "VerifierOutputParse", "VerifierTimeout"):
        rollout = play(planned(tmp_path, trial={"error": f"{name}Error"}), "ls")
        assert rollout.reward == 0.0 and rollout.error is None, name
    steps = [{"rewards": {"reward": 1.0}}, {"error": f"{name}Error"}]  # Harbor's mean leaves the second one out
    rollout = play(planned(tmp_path, steps=steps, trial={"rewards": {"reward": 1.0}}), "ls", "ls")
    assert [turn.reward for turn in rollout.turns] == [1.0, 0.0] and rollout.reward == 0.5


@pytest.mark.parametrize("plan, words", [
    ({"trial": {"error": "DockerError"}}, "DockerError: it failed"), ({"trial": {"crash": True}}, "what Harbor"),
    ({"steps": [{"error": "DockerError"}], "trial": {}}, "DockerError: it failed"), ({"no trial": 1}, "KeyError"),
])  # fmt: skip
def test_what_the_machine_did_ends_the_rollout_untrained(stub, tmp_path, plan, words):
    rollout = play(planned(tmp_path, **plan), *["ls"] * ("error" in str(plan)))
    assert rollout.stop_reason == StopReason.AGENT_ERROR and rollout.failed and words in str(rollout.error)


def test_a_trial_that_is_given_up_is_cancelled(stub, tmp_path):
    """So that its container is removed. The end of the worker's input says so, also if the trainer was killed."""
    task = planned(tmp_path, trial={"hang": True})
    client = SimpleNamespace(base_url="http://127.0.0.1:9/v1", api_key="key")

    async def give_up():
        running = asyncio.create_task(import_file(str(SAMPLE), "agent").solve({"task": str(task)}, client))
        while not (task / "begun").exists():
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait([running])
        while not (task / "ended").exists():
            await asyncio.sleep(0.05)

    asyncio.run(give_up())


def bash(command):
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


ANALYSIS = '{"analysis": "a", "plan": "p", "commands": %s, "task_complete": %s}'
COUNT = '[{"keystrokes": "grep -c ERROR app.log > errors.txt\\n", "duration": 1.0}]'.replace("\n", "\\n")


@pytest.mark.contract_slow("Harbor")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_real_trials_in_docker(tmp_path, monkeypatch):
    """The sample tasks, without a network of their own. It needs HARBOR_PYTHON, and debian:bookworm-slim in Docker."""
    asked = ["docker", "info"], ["docker", "compose", "ls"]
    if any(subprocess.run(command, capture_output=True).returncode for command in asked):
        pytest.skip("Docker with Compose does not answer: `docker info`, `docker compose ls`")
    if subprocess.run([os.environ.get("HARBOR_PYTHON", sys.executable), "-c", "import harbor"]).returncode:
        pytest.skip("HARBOR_PYTHON has no harbor")
    shutil.copy(ROOT / "tools/agents/harbor_bash.py", tmp_path)
    shutil.copytree(ROOT / "hf_recipes/tiny/harbor", tmp_path / "tasks")
    for path in tmp_path.glob("tasks/*/task.toml"):  # Harbor's own way to have no network needs an image of the Hub
        path.write_text(path.read_text().replace('network_mode = "no-network"\n', ""))
    sample = tmp_path / "harbor_trial.py"
    sample.write_text(SAMPLE.read_text().replace("SIGKILL\\n", "SIGKILL\\n    network_mode: none\\n"))
    monkeypatch.setenv("HARBOR_AGENT", "harbor_bash:BashAgent")
    texts = [bash("grep -c ERROR app.log | tee errors.txt"), "Done."]
    rollout = play(tmp_path / "tasks/count-errors", *texts, sample=sample)
    assert (rollout.reward, rollout.error) == (1.0, None)
    texts = [bash("cat part-*.txt > all.txt"), "Done.", bash("echo 77 > count.txt"), "Done."]
    rollout = play(tmp_path / "tasks/join-and-count", *texts, sample=sample)
    assert rollout.reward == 0.5 and [turn.reward for turn in rollout.turns] == [None, 1.0, None, 0.0]
    rollout = play(tmp_path / "tasks/count-errors", bash("kill -9 -1"), "Done.", sample=sample)
    assert (rollout.reward, rollout.error) == (0.0, None)
    monkeypatch.setenv("HARBOR_AGENT", "terminus-2")
    texts = [ANALYSIS % (COUNT, "false"), ANALYSIS % ("[]", "true"), ANALYSIS % ("[]", "true")]
    rollout = play(tmp_path / "tasks/count-errors", *texts, sample=sample)
    assert (rollout.reward, rollout.error) == (1.0, None)
    left = subprocess.run(["docker", "ps", "--all", "--quiet"], capture_output=True, text=True, check=True)
    assert left.stdout == ""
