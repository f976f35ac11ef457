"""Programs that people run, unchanged, on a scripted policy: records are exact, and credit is on the right turns."""

import os
import re
import shutil
import subprocess

import pytest
from project import ROOT
from scripted import hermes_call
from test_agents import TOKENIZER, ids, run
from vllm_prompts import VllmPrompts

from mt_grpo.rollout import StopReason

PAGE = (ROOT / "docs/agents.md").read_text()
ROW = {"question": "How much is 17 * 23?", "answer": "391"}
THINKS = "<think>I compute.</think>Let me see.\n"
VERSIONS = {
    "@openai/codex": "0.171.0", "@mariozechner/pi-coding-agent": "0.73.1", "@qwen-code/qwen-code": "0.15.10",
}  # fmt: skip
# Qwen Code has no example on the page.
QWEN_CODE = """
export HOME="$(mktemp -d)"
row=$(cat)
cd "$HOME"
question=$(python3 -c 'import json, sys; print(json.loads(sys.argv[1])["question"])' "$row")
qwen --auth-type {api} -m policy -y "$question" </dev/null >said
python3 -c 'import json, sys; print(float(open("said").read().strip() == json.loads(sys.argv[1])["answer"]))' "$row"
"""
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow, pytest.mark.program]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The folder into which npm has installed all of them."""
    missing = [command for command in ("node", "npm") if shutil.which(command) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not there: these programs need Node.js")
    folder = tmp_path_factory.mktemp("npm")
    folder.chmod(0o755)  # as root's trainer, programs in sandboxes run as other users
    names = [f"{name}@{version}" for name, version in VERSIONS.items()]
    command = ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=1", "--prefix", str(folder), *names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm cannot install them: {done.stderr.strip()[-300:]}")
    return folder


def block(word):
    """A program of the page."""
    (found,) = [body for body in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) if word in body]
    return found


def rollout_of(command, *turns, records=None):
    """The rollout of a command whose policy calls, and answers in its last turn, token for token.

    Args:
        turns: What the policy writes.
        records: Numbers of the turns of each record; None: all are of one.
    """
    limits = {"max_completion_length": 100_000, "max_model_len": 120_000, "max_model_calls": len(turns)}
    rollout, _ = run(command, *turns, row=ROW, timeout=600.0, **limits)
    assert rollout.error is None and rollout.stop_reason == StopReason.AGENT_DONE, rollout.error
    assert [record.numbers for record in rollout.records] == (records or [list(range(len(turns)))])
    sampled = [[*ids(turn), TOKENIZER.eos_token_id] for turn in turns]
    assert [turn.token_ids for turn in rollout.turns] == sampled
    assert all(turn.trained and turn.error is None for turn in rollout.turns)
    assert sum(sum(record.loss_mask) for record in rollout.records) == sum(map(len, sampled))
    assert rollout.reward == 1.0 and "refused" not in rollout.turns[-1].info, rollout.turns[-1].info
    assert [turn.has_observation for turn in rollout.turns] == [True] * (len(turns) - 1) + [False]
    theirs = VllmPrompts(TOKENIZER.chat_template)  # what vLLM renders for the request that began a record
    known = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content", "name")
    for record in rollout.records:
        first = record.turns[0]
        messages = rollout.prompt_messages if first.context is None else first.context.messages
        asked = {"messages": [{key: each[key] for key in known if key in each} for each in messages]}
        asked |= {"tools": first.tools} if first.tools else {}
        assert record.prompt_ids == theirs.ids("chat/completions", asked)
    return rollout


def by_shell(tmp_path, monkeypatch, packages, body):
    """The command of a program of the page."""
    monkeypatch.setenv("PATH", f"{packages}/node_modules/.bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "agent.sh").write_text(body)
    return f"sh {tmp_path}/agent.sh"


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_qwen_code(packages, tmp_path, monkeypatch, api):
    command = by_shell(tmp_path, monkeypatch, packages, QWEN_CODE.replace("{api}", api))
    turn = THINKS + hermes_call("run_shell_command", command="echo $((17 * 23))", is_background=False)
    rollout = rollout_of(command, turn, "391")
    assert "Output: 391" in rollout.turns[0].results[0].text


def test_codex(packages, tmp_path, monkeypatch):
    """By its defaults: a WebSocket first, tools in namespaces, a web search, reasoning that it cannot encrypt."""
    command = by_shell(tmp_path, monkeypatch, packages, block("codex exec"))
    turn = THINKS + hermes_call("exec_command", cmd="echo $((17 * 23))")
    rollout = rollout_of(command, turn, turn, "391")
    for called in rollout.turns[:2]:
        (result,) = called.results
        assert "exited with code 0" in result.text and result.text.rstrip().endswith("391"), result.text
    read = TOKENIZER.decode(rollout.prompt_ids)
    assert "multi_agent_v1__spawn_agent" in read and "web_search" not in read and ROW["question"] in read


def test_pi(packages, tmp_path, monkeypatch):
    command = by_shell(tmp_path, monkeypatch, packages, block("pi --provider"))
    turn = THINKS + hermes_call("bash", command="echo $((17 * 23))")
    rollout = rollout_of(command, turn, turn, "391")
    assert [[each.text for each in turn.results] for turn in rollout.turns] == [["391\n"], ["391\n"], []]


def test_codex_compacts_its_history(packages, tmp_path, monkeypatch):
    """With a provider of its own, as the page says: by its defaults it asks OpenAI's server to do it."""
    (settings,) = re.findall(r"^    (--config model_provider=.*) \\$", PAGE, re.M)
    body = block("codex exec").replace('--config "openai_base_url=\\"$OPENAI_BASE_URL\\""', settings)
    body = body.replace(settings, f"{settings} --config model_auto_compact_token_limit=7000")
    command = by_shell(tmp_path, monkeypatch, packages, body)
    called = THINKS + hermes_call("exec_command", cmd="echo $((17 * 23))")
    rollout = rollout_of(command, called, "I have computed 391.", "391", records=[[0], [1], [2]])
    asked, behind = (TOKENIZER.decode(record.prompt_ids) for record in rollout.records[1:])
    assert "CONTEXT CHECKPOINT COMPACTION" in asked and "<tools>" not in asked
    assert "I have computed 391." in behind and "Let me see." not in behind
