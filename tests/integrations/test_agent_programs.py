"""Programs that people run, unchanged, on a scripted policy: records are exact, and credit is on the right turns."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_agents import CALL, TOKENIZER, ids, run
from vllm_prompts import VllmPrompts

from mt_grpo.rollout import StopReason
from mt_grpo.training.batch import trained_records

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/agents.md").read_text()
SDKS = ("ai", "@ai-sdk/openai", "@ai-sdk/anthropic")
ROW = {"question": "How much is 17 * 23?", "answer": "391"}
THINKS = "<think>I compute.</think>Let me see.\n"
VERSIONS = {
    "@openai/codex": "0.171.0", "@mariozechner/pi-coding-agent": "0.73.1", "@qwen-code/qwen-code": "0.15.10",
    "ai": "7.0.173", "@ai-sdk/openai": "4.0.118", "@ai-sdk/anthropic": "4.0.105",
}  # fmt: skip
LANGCHAIN = ["langchain==1.5.2", "langchain-openai==1.7.4"]
# Qwen Code has no example on the page.
QWEN_CODE = """
export HOME="$(mktemp -d)"
row=$(cat)
cd "$HOME"
question=$(python3 -c 'import json, sys; print(json.loads(sys.argv[1])["question"])' "$row")
qwen --auth-type {api} -m policy -y "$question" </dev/null >said
python3 -c 'import json, sys; print(float(open("said").read().strip() == json.loads(sys.argv[1])["answer"]))' "$row"
"""
# Two turns by `previous_response_id`, and a reward for the first.
CURL = r"""
set -e
row=$(cat)
ask() {
    curl --silent --fail-with-body "$OPENAI_BASE_URL/responses" --header "Authorization: Bearer $OPENAI_API_KEY" "$@"
}
python3 -c 'import json, sys
print(json.dumps({"model": "policy", "input": json.loads(sys.argv[1])["question"]}))' "$row" |
    ask --data @- |
    python3 -c 'import json, sys
said = json.load(sys.stdin)["id"]
print(json.dumps({"model": "policy", "input": "Only the number.", "previous_response_id": said}))' |
    ask --data @- --header "X-Turn-Reward: 0.5" |
    python3 -c 'import json, sys
said = json.load(sys.stdin)["output"][-1]["content"][0]["text"]
print(float(said == json.loads(sys.argv[1])["answer"]))' "$row"
"""
slow, tries = pytest.mark.slow, pytest.mark.program
pytestmark = pytest.mark.timeout(1800)


def installed(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{command[0]} cannot install them: {done.stderr.strip()[-300:]}")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The folder into which npm has installed all of them."""
    missing = [command for command in ("node", "npm") if shutil.which(command) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not there: these programs need Node.js")
    folder = tmp_path_factory.mktemp("npm")
    folder.chmod(0o755)  # as root's trainer, programs in sandboxes run as other users
    names = [f"{name}@{version}" for name, version in VERSIONS.items()]
    installed(
        ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=1", "--prefix", str(folder), *names], folder
    )
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment of its own, with LangChain."""
    folder = tmp_path_factory.mktemp("venv")
    folder.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    installed([folder / "bin/python", "-m", "pip", "install", "--quiet", *LANGCHAIN], folder)
    with pytest.MonkeyPatch.context() as patch:  # what LangChain imports is its own
        patch.delenv("PYTHONPATH", raising=False)
        yield folder / "bin/python"


def bash(name, command, **more):
    """A call of a tool that runs a line of shell."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {**command, **more}})}\n</tool_call>"


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
    check_beginnings(rollout)
    return rollout


def by_shell(tmp_path, monkeypatch, packages, body):
    """The command of a program of the page."""
    monkeypatch.setenv("PATH", f"{packages}/node_modules/.bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "agent.sh").write_text(body)
    return f"sh {tmp_path}/agent.sh"


def check_beginnings(rollout):
    """Each record begins with the ids that vLLM renders for the request that began it."""
    theirs = VllmPrompts(TOKENIZER.chat_template)
    for record in rollout.records:
        first = record.turns[0]
        messages = rollout.prompt_messages if first.context is None else first.context.messages
        asked = {"messages": as_sent(messages), **({"tools": first.tools} if first.tools else {})}
        assert record.prompt_ids == theirs.ids("chat/completions", asked)


def as_sent(messages):
    """Messages as a client of /v1/chat/completions sends them."""
    known = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content", "name")
    return [{key: message[key] for key in known if key in message} for message in messages]


@tries("@qwen-code/qwen-code")
@slow
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_qwen_code(packages, tmp_path, monkeypatch, api):
    command = by_shell(tmp_path, monkeypatch, packages, QWEN_CODE.replace("{api}", api))
    turn = THINKS + bash("run_shell_command", {"command": "echo $((17 * 23))"}, is_background=False)
    rollout = rollout_of(command, turn, "391")
    assert "Output: 391" in rollout.turns[0].results[0].text


@tries("@openai/codex")
@slow
def test_codex(packages, tmp_path, monkeypatch):
    """By its defaults: a WebSocket first, tools in namespaces, a web search, reasoning that it cannot encrypt."""
    command = by_shell(tmp_path, monkeypatch, packages, block("codex exec"))
    turn = THINKS + bash("exec_command", {"cmd": "echo $((17 * 23))"})
    rollout = rollout_of(command, turn, turn, "391")
    for called in rollout.turns[:2]:
        (result,) = called.results
        assert "exited with code 0" in result.text and result.text.rstrip().endswith("391"), result.text
    read = TOKENIZER.decode(rollout.prompt_ids)
    assert "multi_agent_v1__spawn_agent" in read and "web_search" not in read and ROW["question"] in read


@tries("@mariozechner/pi-coding-agent")
@slow
def test_pi(packages, tmp_path, monkeypatch):
    command = by_shell(tmp_path, monkeypatch, packages, block("pi --provider"))
    turn = THINKS + bash("bash", {"command": "echo $((17 * 23))"})
    rollout = rollout_of(command, turn, turn, "391")
    assert [[each.text for each in turn.results] for turn in rollout.turns] == [["391\n"], ["391\n"], []]


SDK = """
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const parts = [];
for await (const part of process.stdin) parts.push(part);
const row = JSON.parse(Buffer.concat(parts));
const [api, streams] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const anthropic = createAnthropic({
  baseURL: process.env.ANTHROPIC_BASE_URL + "/v1", apiKey: process.env.ANTHROPIC_API_KEY,
});
const models = { default: openai("policy"), chat: openai.chat("policy"), anthropic: anthropic("policy") };
const properties = { a: { type: "number" }, b: { type: "string" } };
const add = tool({
  description: "Add.", inputSchema: jsonSchema({ type: "object", properties }),
  execute: async ({ a, b }) => `${a} and ${b}` + "x".repeat(process.env.MORE ?? 0),
});
const asked = {
  model: models[api], prompt: row.question, tools: { add }, stopWhen: stepCountIs(5), maxOutputTokens: 500,
};
let text;
if (streams === "streams") {
  text = "";
  for await (const piece of streamText(asked).textStream) text += piece;
} else {
  text = (await generateText(asked)).text;
}
console.log(JSON.stringify({ reward: text.endsWith(row.answer) ? 1.0 : 0.0 }));
"""


@tries(*SDKS)
@slow
@pytest.mark.parametrize("streams", ["whole", "streams"])
@pytest.mark.parametrize("api", ["default", "chat", "anthropic"])
def test_the_ai_sdk(packages, api, streams):
    """Its default provider refers to items of the turn before; the others tell the conversation again."""
    (packages / "agent.mjs").write_text(SDK)
    turns = [f"{THINKS}{CALL}", f"<think>Again.</think>{CALL}\n{CALL}", "391"]
    rollout = rollout_of(f"node {packages}/agent.mjs {api} {streams}", *turns)
    assert [[each.text for each in turn.results] for turn in rollout.turns] == [
        ["1 and x y"], ["1 and x y", "1 and x y"], [],
    ]  # fmt: skip


@tries("curl")
def test_curl(tmp_path):
    """A shell script, which needs no package: two turns by `previous_response_id`, and the header's reward."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not there")
    (tmp_path / "agent.sh").write_text(CURL)
    rollout = rollout_of(f"sh {tmp_path}/agent.sh", "<think>So.</think>It is 391.", "391")
    assert [turn.reward for turn in rollout.turns] == [0.5, None]


SUMMARY = """
import json, sys
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def add(a: float, b: str) -> str:
    \"\"\"Add.\"\"\"
    return f"{a:g} and {b}"

row, (summariser,) = json.loads(sys.stdin.read()), sys.argv[1:]
summary = SummarizationMiddleware(model=ChatOpenAI(model=summariser), trigger=("messages", 5), keep=("messages", 2))
agent = create_agent(ChatOpenAI(model="policy"), [add], middleware=[summary], system_prompt="Be brief.")
said = agent.invoke({"messages": [("user", row["question"])]})["messages"][-1].text
print(json.dumps({"reward": float(said.strip() == row["answer"])}))
"""


@tries("langchain")
@slow
@pytest.mark.parametrize("summariser", ["policy", "policy-frozen"])
def test_langchain_summarises_its_history(python, tmp_path, summariser):
    """The summary is a record, and so is the conversation behind it. The frozen policy's summary is not trained."""
    (tmp_path / "agent.py").write_text(SUMMARY)
    turns = [THINKS + CALL, CALL, "I have added 1 and x y.", "391"]
    command = f"{python} {tmp_path}/agent.py {summariser}"
    if summariser == "policy":
        rollout = rollout_of(command, *turns, records=[[0, 1], [2], [3]])
    else:
        rollout, _ = run(command, *turns, row=ROW, timeout=600.0, max_completion_length=100_000, max_model_len=120_000)
        assert rollout.error is None and rollout.reward == 1.0, rollout.error
        assert [record.numbers for record in trained_records(rollout)] == [[0, 1], [3]]
        check_beginnings(rollout)
    behind = TOKENIZER.decode(rollout.records[-1].prompt_ids)
    assert "I have added 1 and x y." in behind and "Let me see." not in behind and behind.count("1 and x y") == 2


@tries("@openai/codex")
@slow
def test_codex_compacts_its_history(packages, tmp_path, monkeypatch):
    """With a provider of its own, as the page says: by its defaults it asks OpenAI's server to do it."""
    (settings,) = re.findall(r"^    (--config model_provider=.*) \\$", PAGE, re.M)
    body = block("codex exec").replace('--config "openai_base_url=\\"$OPENAI_BASE_URL\\""', settings)
    body = body.replace(settings, f"{settings} --config model_auto_compact_token_limit=7000")
    command = by_shell(tmp_path, monkeypatch, packages, body)
    called = THINKS + bash("exec_command", {"cmd": "echo $((17 * 23))"})
    rollout = rollout_of(command, called, "I have computed 391.", "391", records=[[0], [1], [2]])
    asked, behind = (TOKENIZER.decode(record.prompt_ids) for record in rollout.records[1:])
    assert "CONTEXT CHECKPOINT COMPACTION" in asked and "<tools>" not in asked
    assert "I have computed 391." in behind and "Let me see." not in behind
