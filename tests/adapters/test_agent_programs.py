"""Programs that people run, unchanged, on a scripted policy: records are exact, and credit is on the right turns.

They are installed from npm and by pip, into folders of their own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_agents import CALL, RECIPE, TOKENIZER, ids, run

import mt_grpo_trainer as mt
from mt_grpo.rollout import StopReason

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/agents.md").read_text()
VERSIONS = {
    "@openai/codex": "0.171.0", "@mariozechner/pi-coding-agent": "0.73.1", "@qwen-code/qwen-code": "0.15.10",
    "ai": "7.0.173", "@ai-sdk/openai": "4.0.118", "@ai-sdk/anthropic": "4.0.105",
}  # fmt: skip
OF_PYTHON = {"mini-swe-agent": "2.4.6", "qwen-agent": "0.0.34"}
ROW = {"question": "How much is 17 * 23?", "answer": "391"}
THINKS = "<think>I compute.</think>Let me see.\n"
slow = pytest.mark.slow
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
    names = [f"{name}@{version}" for name, version in VERSIONS.items()]
    installed(
        ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=1", "--prefix", str(folder), *names], folder
    )
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Python of an environment with those of Python."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    names = [f"{name}=={version}" for name, version in OF_PYTHON.items()]
    # What Qwen-Agent imports and does not require.
    installed(
        [folder / "bin/python", "-m", "pip", "install", "--quiet", *names, "soundfile", "python-dateutil"], folder
    )
    return folder / "bin/python"


def bash(name, command, **more):
    """A call of a tool that runs a line of shell."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {**command, **more}})}\n</tool_call>"


def block(word):
    """A program of the page."""
    (found,) = [body for body in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) if word in body]
    return found


def rollout_of(command, *turns, row=ROW):
    """The rollout of a command whose policy calls, and answers in its last turn: one record, token for token."""
    limits = {"max_completion_length": 100_000, "max_model_len": 120_000, "max_model_calls": len(turns)}
    rollout, llm = run(command, *turns, row=row, timeout=600.0, **limits)
    assert rollout.error is None and rollout.stop_reason == StopReason.AGENT_DONE, rollout.error
    assert [record.numbers for record in rollout.records] == [list(range(len(turns)))]
    sampled = [[*ids(turn), TOKENIZER.eos_token_id] for turn in turns]
    assert [turn.token_ids for turn in rollout.turns] == sampled
    assert sum(rollout.loss_mask) == sum(map(len, sampled)) and all(turn.trained for turn in rollout.turns)
    assert rollout.reward == 1.0 and "refused" not in rollout.turns[-1].info, rollout.turns[-1].info
    assert all(turn.observed for turn in rollout.turns[:-1])
    assert all(turn.error is None for turn in rollout.turns)
    return rollout


def by_shell(tmp_path, monkeypatch, packages, body):
    """The command of a program of the page."""
    monkeypatch.setenv("PATH", f"{packages}/node_modules/.bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "agent.sh").write_text(body)
    return f"sh {tmp_path}/agent.sh"


def test_the_page_names_the_versions():
    """And a test for each program that is installed."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "`test_" in line]
    for name in [*VERSIONS, *OF_PYTHON]:
        of_name = [line for line in rows if name.lower() in line.lower()]
        assert any({**VERSIONS, **OF_PYTHON}[name] in line for line in of_name), name
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_agent_*.py"))
    for line in rows:
        (test,) = re.findall(r"`(test_\w+)`", line)
        assert f"def {test}(" in tests, test


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


@slow
def test_pi(packages, tmp_path, monkeypatch):
    command = by_shell(tmp_path, monkeypatch, packages, block("pi --provider"))
    turn = THINKS + bash("bash", {"command": "echo $((17 * 23))"})
    rollout = rollout_of(command, turn, turn, "391")
    assert [[each.text for each in turn.results] for turn in rollout.turns] == [["391\n"], ["391\n"], []]


@slow
def test_pi_tells_of_a_command_that_fails(packages, tmp_path, monkeypatch):
    """By `is_error`: the turn that called has failed, and the one behind it has not."""
    command = by_shell(tmp_path, monkeypatch, packages, block("pi --provider"))
    wrong, right = (bash("bash", {"command": line}) for line in ("exit 7", "echo 391"))
    limits = {"max_completion_length": 100_000, "max_model_len": 120_000}
    rollout, _ = run(command, wrong, right, "391", row=ROW, timeout=600.0, **limits)
    assert rollout.error is None and [record.numbers for record in rollout.records] == [[0, 1, 2]], rollout.error
    assert [turn.error for turn in rollout.turns] == ["tool", None, None]


@slow
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_qwen_code(packages, tmp_path, monkeypatch, api):
    body = f"""
export HOME="$(mktemp -d)"
row=$(cat)
cd "$HOME"
question=$(python3 -c 'import json, sys; print(json.loads(sys.argv[1])["question"])' "$row")
qwen --auth-type {api} -m policy -y "$question" </dev/null >said
python3 -c 'import json, sys; print(float(open("said").read().strip() == json.loads(sys.argv[1])["answer"]))' "$row"
"""
    turn = THINKS + bash("run_shell_command", {"command": "echo $((17 * 23))"}, is_background=False)
    rollout = rollout_of(by_shell(tmp_path, monkeypatch, packages, body), turn, "391")
    assert "Output: 391" in rollout.turns[0].results[0].text


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
  execute: async ({ a, b }) => `${a} and ${b}`,
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


@slow
def test_a_recipe_trains_the_ai_sdk(packages, hermes_model, tmp_path):
    """A step by the command line's way, whatever the model says."""
    (packages / "agent.mjs").write_text(SDK)
    recipe = {
        **RECIPE, "model_name_or_path": hermes_model, "agent": None, "dataset_size": 4, "num_generations": 4,
        "agent_command": f"node {packages}/agent.mjs default whole", "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 4, "max_steps": 1, "dtype": "float32", "report_to": "none",
        "gradient_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "max_completion_length": 256,
        "max_model_calls": 3,
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({key: value for key, value in recipe.items() if value is not None}))
    trainer = mt.build_trainer(*mt.parse_arguments(["--config", str(path)]))
    trainer.train()
    (row, *_) = trainer.state.log_history
    assert row["turns/mean"] >= 1.0 and row["stop/agent_error"] == 0.0, row


def test_curl(tmp_path):
    """A shell script, which needs no package: two turns by `previous_response_id`, and the header's reward."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not there")
    (tmp_path / "agent.sh").write_text(block("curl --silent"))
    rollout = rollout_of(f"sh {tmp_path}/agent.sh", "<think>So.</think>It is 391.", "391")
    assert [turn.reward for turn in rollout.turns] == [0.5, None]


MINI = """
import json, os, subprocess, sys, tempfile
from pathlib import Path

row, programs = json.loads(sys.stdin.read()), Path(sys.executable).parent
with tempfile.TemporaryDirectory() as folder:
    env = {**os.environ, "HOME": folder, "MSWEA_GLOBAL_CONFIG_DIR": folder, "MSWEA_CONFIGURED": "true",
           "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    arguments = ["-m", "openai/policy", "-t", row["question"], "-y", "--exit-immediately", "-o", f"{folder}/said.json"]
    done = subprocess.run([programs / "mini", *arguments], env=env, cwd=folder, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout} {done.stderr}"[-1500:])
    said = json.loads(Path(folder, "said.json").read_text())["info"]["submission"]
    print(json.dumps({"reward": float(said.strip() == row["answer"])}))
"""


@slow
def test_mini_swe_agent(python, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "agent.py").write_text(MINI)
    first = THINKS + bash("bash", {"command": "echo $((17 * 23)) > said; cat said"})
    last = bash("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat said"})
    rollout = rollout_of(f"{python} {tmp_path}/agent.py", first, last)
    assert json.loads(rollout.turns[0].results[0].text) == {"returncode": 0, "output": "391\n"}


QWEN = """
import json, os, sys
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool

@register_tool("add")
class Add(BaseTool):
    description = "Add."
    properties = {"a": {"type": "number"}, "b": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}

    def call(self, params, **kwargs):
        given = json.loads(params)
        return f"{given['a']} and {given['b']}"

row = json.loads(sys.stdin.read())
llm = {"model": "policy", "model_server": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
*_, said = Assistant(llm=llm, function_list=["add"]).run([{"role": "user", "content": row["question"]}])
print(json.dumps({"reward": float(said[-1]["content"] == row["answer"])}))
"""


@slow
def test_qwen_agent(python, tmp_path, monkeypatch):
    """It writes its tools into the prompt, and reads its calls itself."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "agent.py").write_text(QWEN)
    rollout = rollout_of(f"{python} {tmp_path}/agent.py", f"<think>So.</think>{CALL}", f"{CALL}\n{CALL}", "391")
    assert [turn.observation.count("1 and x y") for turn in rollout.turns[:2]] == [1, 2]
