"""Programs that people run, unchanged, inside sandboxes of task folders: the tests judge, and records are exact."""

import shutil
import sys
from pathlib import Path

import pytest
from test_agent_programs import THINKS, bash, block, check_beginnings
from test_agents import TOKENIZER, ids
from test_harbor import MODES, needs_namespaces, write_task
from test_harbor_agents import play

from mt_grpo.rollout import StopReason

pytestmark = [pytest.mark.timeout(1800), needs_namespaces]
slow, tries = pytest.mark.slow, pytest.mark.program
# The task wants a file of another one's lines, sorted.
FILES = {"dockerfile": "FROM debian\nWORKDIR /app\nCOPY names .\n", "environment/names": "pear\nfig\napple\n"}
TESTS = "printf 'apple\\nfig\\npear\\n' | cmp - /app/sorted\necho $(($? == 0)) > /logs/verifier/reward.txt\n"
LIMITS = {"max_completion_length": 100_000, "max_model_len": 120_000}


def work(folder, body, *turns, path, shown, as_user, **limits):
    """The rollout of a program of the page on the task, whose records, credit and reward are right.

    Args:
        body: Lines of shell.
        turns: What the policy writes.
        path: The folder of the program.
        shown: Folders of this machine that it reads.
    """
    write_task(folder / "tasks", tests=TESTS, **FILES, **{"instruction.md": "Sort names into sorted."})
    program = f"export PATH={path}:$PATH\n{body}"
    rollout = play(folder / "tasks", program, *turns, as_user=as_user, shown=shown, **LIMITS, **limits)
    assert (rollout.error, rollout.stop_reason) == (None, StopReason.AGENT_DONE), rollout.error
    info = rollout.turns[-1].info
    assert "agent" not in info["harbor"] and "refused" not in info, info
    assert rollout.reward == 1.0, rollout.environment.said
    assert [record.numbers for record in rollout.records] == [list(range(len(turns)))]
    assert [turn.token_ids for turn in rollout.turns] == [[*ids(turn), TOKENIZER.eos_token_id] for turn in turns]
    assert sum(rollout.loss_mask) == sum(len(turn.token_ids) for turn in rollout.turns)
    assert all(turn.trained and turn.error is None for turn in rollout.turns)
    # The tests pay the last turn, and the others are observed.
    assert [turn.info.get("harbor", {}).get("rewards") for turn in rollout.turns[-2:]] == [None, {"reward": 1.0}]
    assert [turn.observed for turn in rollout.turns] == [True] * (len(turns) - 1) + [False]
    assert "Sort names into sorted." in TOKENIZER.decode(rollout.prompt_ids)
    check_beginnings(rollout)
    return rollout


def of_npm(packages):
    """Where programs of npm are, and what a sandbox must show of this machine that it has not in any case."""
    node = Path(shutil.which("node")).resolve()
    beside = [] if node.is_relative_to("/usr") else [str(node.parents[1])]
    return {
        "path": ":".join([f"{packages}/node_modules/.bin", *(f"{each}/bin" for each in beside)]),
        "shown": [str(packages), *beside],
    }


@tries("mini-swe-agent")
@slow
@pytest.mark.parametrize("as_user", MODES)
def test_mini_swe_agent_in_a_sandbox(python, tmp_path, as_user):
    folder = python("mini-swe-agent").parents[1]
    turns = [
        THINKS + bash("bash", {"command": "sort names > sorted; cat sorted"}),
        bash("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    ]
    found = {"path": f"{folder}/bin", "shown": sorted({str(folder), sys.base_prefix})}
    rollout = work(tmp_path, block("mini -m"), *turns, as_user=as_user, **found)
    assert "apple\\nfig\\npear\\n" in rollout.turns[0].results[0].text


@tries("@mariozechner/pi-coding-agent")
@slow
@pytest.mark.parametrize("as_user", MODES)
def test_pi_in_a_sandbox(packages, tmp_path, as_user):
    turns = [THINKS + bash("bash", {"command": "sort names > sorted; cat sorted"}), "Done."]
    rollout = work(tmp_path, block("pi --print"), *turns, as_user=as_user, **of_npm(packages))
    assert rollout.turns[0].results[0].text == "apple\nfig\npear\n"


@tries("@openai/codex")
@slow
@pytest.mark.parametrize("as_user", MODES)
def test_codex_in_a_sandbox(packages, tmp_path, as_user):
    turns = [THINKS + bash("exec_command", {"cmd": "sort names > sorted; cat sorted"}), "Done."]
    rollout = work(tmp_path, block("codex --dangerously"), *turns, as_user=as_user, **of_npm(packages))
    assert "apple\nfig\npear\n" in rollout.turns[0].results[0].text
