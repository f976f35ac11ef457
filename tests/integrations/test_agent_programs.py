"""Programs that people run, unchanged, on a scripted policy: records are exact, and credit is on the right turns."""

import json
import os
import re
import shutil
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
before = json.load(sys.stdin)["id"]
print(json.dumps({"model": "policy", "input": "Only the number.", "previous_response_id": before}))' |
    ask --data @- --header "X-Turn-Reward: 0.5" |
    python3 -c 'import json, sys
said = json.load(sys.stdin)["output"][-1]["content"][0]["text"]
print(float(said == json.loads(sys.argv[1])["answer"]))' "$row"
"""
slow, tries = pytest.mark.slow, pytest.mark.program
pytestmark = pytest.mark.timeout(1800)


def bash(name, command, **more):
    """A call of a tool that runs a line of shell."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {**command, **more}})}\n</tool_call>"


def block(word):
    """A program of the page."""
    (found,) = [body for body in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) if word in body]
    return found


def rollout_of(command, *turns, row=ROW, records=None, observed=None, llm=None, **limits):
    """The rollout of a command whose policy calls, and answers in its last turn, token for token.

    Args:
        turns: What the policy writes.
        records: Numbers of the turns of each record; None: all are of one.
        observed: Of each turn; None: all but the last are.
        llm: The policy, where it does not write these turns in this order.
    """
    limits = {"max_completion_length": 100_000, "max_model_len": 120_000, "max_model_calls": len(turns), **limits}
    rollout, llm = run(command, *turns, row=row, timeout=600.0, llm=llm, **limits)
    assert rollout.error is None and rollout.stop_reason == StopReason.AGENT_DONE, rollout.error
    assert [record.numbers for record in rollout.records] == (records or [list(range(len(turns)))])
    sampled = [[*ids(turn), TOKENIZER.eos_token_id] for turn in turns]
    assert [turn.token_ids for turn in rollout.turns] == sampled
    trained = [token for record in rollout.records for turn in record.turns for token in turn.token_ids]
    assert len(trained) == sum(map(len, sampled)) and all(turn.trained for turn in rollout.turns)
    if records is None:
        assert sum(rollout.loss_mask) == sum(map(len, sampled))
    assert rollout.reward == 1.0 and "refused" not in rollout.turns[-1].info, rollout.turns[-1].info
    observed = [True] * (len(turns) - 1) + [False] if observed is None else observed
    assert [turn.has_observation for turn in rollout.turns] == observed
    assert all(turn.error is None for turn in rollout.turns)
    check_beginnings(rollout)
    return rollout


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


def by_shell(tmp_path, monkeypatch, packages, body):
    """The command of a program of the page."""
    monkeypatch.setenv("PATH", f"{packages}/node_modules/.bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "agent.sh").write_text(body)
    return f"sh {tmp_path}/agent.sh"


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


@tries("mini-swe-agent")
@slow
def test_mini_swe_agent(python, tmp_path):
    (tmp_path / "agent.py").write_text(MINI)
    first = THINKS + bash("bash", {"command": "echo $((17 * 23)) > said; cat said"})
    last = bash("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat said"})
    rollout = rollout_of(f"{python('mini-swe-agent')} {tmp_path}/agent.py", first, last)
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


@tries("qwen-agent")
@slow
def test_qwen_agent(python, tmp_path):
    """It writes its tools into the prompt, and reads its calls itself."""
    (tmp_path / "agent.py").write_text(QWEN)
    command = f"{python('qwen-agent')} {tmp_path}/agent.py"
    rollout = rollout_of(command, f"<think>So.</think>{CALL}", f"{CALL}\n{CALL}", "391")
    assert [turn.observation.count("1 and x y") for turn in rollout.turns[:2]] == [1, 2]


CREW = """
import json, os, sys
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

@tool("add")
def add(a: float, b: str) -> str:
    \"\"\"Add.\"\"\"
    return f"{a:g} and {b}"

row = json.loads(sys.stdin.read())
llm = LLM(model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
helper = Agent(role="Helper", goal="Answer.", backstory="You add.", llm=llm, tools=[add])
task = Task(description=row["question"], expected_output="A number.", agent=helper)
said = Crew(agents=[helper], tasks=[task]).kickoff()
print(json.dumps({"reward": float(said.raw.strip() == row["answer"])}))
"""


@pytest.fixture
def quiet(monkeypatch):
    """No reports to the makers of a program."""
    for name in ("CREWAI_DISABLE_TELEMETRY", "OTEL_SDK_DISABLED", "CREWAI_TESTING"):
        monkeypatch.setenv(name, "true")


@tries("crewai")
@slow
def test_crewai(python, tmp_path, quiet):
    """It sends a call back without the text beside it: that is another answer, and begins a record."""
    (tmp_path / "agent.py").write_text(CREW)
    command = f"{python('crewai')} {tmp_path}/agent.py"
    rollout = rollout_of(command, f"<think>So.</think>{CALL}", CALL, "391")
    assert [[each.text for each in turn.results] for turn in rollout.turns[:2]] == [["1 and x y"]] * 2
    rollout = rollout_of(command, f"{THINKS}{CALL}", CALL, "391", records=[[0], [1, 2]])
    assert "Let me see." not in TOKENIZER.decode(rollout.records[1].prompt_ids)


DSPY = """
import json, os, sys
import dspy

def add(a: float, b: str) -> str:
    \"\"\"Add.\"\"\"
    return f"{a:g} and {b}"

row, key = json.loads(sys.stdin.read()), os.environ["OPENAI_API_KEY"]
lm = dspy.LM("openai/policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=key, cache=False)
try:
    with dspy.context(lm=lm):
        said = dspy.ReAct("question -> answer", tools=[add], max_iters=4)(question=row["question"]).answer
except dspy.utils.exceptions.AdapterParseError:  # the policy wrote what its adapter does not read
    said = ""
print(json.dumps({"reward": float(said.strip() == row["answer"])}))
"""


def fields(**values):
    """An answer as DSPy's adapter reads it."""
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in values.items()) + "[[ ## completed ## ]]"


@tries("dspy")
@slow
def test_dspy(python, tmp_path, monkeypatch):
    """Each step is a prompt of its own, which tells the steps before in other words. Equal rows are sampled anew."""
    monkeypatch.setenv("DSPY_CACHEDIR", str(tmp_path / "cache"))
    (tmp_path / "agent.py").write_text(DSPY)
    steps = [
        fields(next_thought="I add.", next_tool_name="add", next_tool_args='{"a": 1, "b": "x y"}'),
        fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}"),
        fields(reasoning="So.", answer="391"),
    ]
    for _ in range(2):  # with its cache the second rollout would ask nothing, and fail
        rollout = rollout_of(
            f"{python('dspy')} {tmp_path}/agent.py", *steps, records=[[0], [1], [2]], observed=[False] * 3
        )
    read = [TOKENIZER.decode(record.prompt_ids) for record in rollout.records]
    assert "1 and x y" not in read[0] and all("[[ ## observation_0 ## ]]\n1 and x y" in each for each in read[1:])


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
    command = f"{python('langchain')} {tmp_path}/agent.py {summariser}"
    if summariser == "policy":
        rollout = rollout_of(command, *turns, records=[[0, 1], [2], [3]])
    else:
        rollout, _ = run(command, *turns, row=ROW, timeout=600.0, max_completion_length=100_000, max_model_len=120_000)
        assert rollout.error is None and rollout.reward == 1.0, rollout.error
        assert [record.numbers for record in trained_records(rollout)] == [[0, 1], [3]]
        check_beginnings(rollout)
    behind = TOKENIZER.decode(rollout.records[-1].prompt_ids)
    assert "I have added 1 and x y." in behind and "Let me see." not in behind and behind.count("1 and x y") == 2


TASKSET = """
import os
import verifiers.v1 as vf
from sums.tool import SumToolset

class SumData(vf.TaskData):
    answer: str = ""

class SumTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()

class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [SumToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(str(trace.messages[-1].content).strip() == self.data.answer)

class SumConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()

class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        data = SumData(prompt=os.environ["QUESTION"], answer=os.environ["ANSWER"])
        return [SumTask(data, self.config.task)]
"""
TOOLSET = """
import verifiers.v1 as vf

class SumToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: str) -> str:
        \"\"\"Add.\"\"\"
        return f"{a} and {b}"

if __name__ == "__main__":
    SumToolset.run()
"""
EVALUATE = """
import json, os, subprocess, sys, tempfile
from pathlib import Path

row, programs = json.loads(sys.stdin.read()), Path(sys.executable).parent
env = {**os.environ, "QUESTION": row["question"], "ANSWER": row["answer"],
       "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parent)}
with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
        [programs / "vf-eval", "sums", "-m", "policy", "--client.type", "eval", "--client.base-url",
         os.environ["OPENAI_BASE_URL"], "--client.api-key-var", "OPENAI_API_KEY", "--no-push", "-o", folder,
         "--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess",
         "--env.taskset.task.tools.runtime.type", "subprocess"],
        env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout} {done.stderr}"[-1500:])
    (episode,) = [json.loads(line) for path in Path(folder).rglob("traces.jsonl") for line in open(path)]
    (trace,) = episode["traces"]
    if trace["errors"]:
        sys.exit(str(trace["errors"])[:1500])
    print(json.dumps({"reward": trace["rewards"]["exact"]["score"]}))
"""


@tries("verifiers")
@slow
def test_a_verifiers_taskset_by_its_command_line(python, tmp_path):
    """Installs verifiers, whose requirements exclude those here, and its harness by uv."""
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums/__init__.py").write_text('from sums.taskset import SumTaskset\n\n__all__ = ["SumTaskset"]\n')
    (tmp_path / "sums/taskset.py").write_text(TASKSET)
    (tmp_path / "sums/tool.py").write_text(TOOLSET)
    (tmp_path / "evaluate.py").write_text(EVALUATE)
    call = CALL.replace('"add"', '"sums_add"')
    settings = {"max_completion_length": 2000, "max_model_len": 8000, "timeout": 600.0}
    row = {"question": "Add 1 and x y.", "answer": "3"}
    rollout, _ = run(f"{python('verifiers')} {tmp_path}/evaluate.py", call, "3", row=row, **settings)
    assert rollout.error is None, rollout.error
    assert rollout.reward == 1.0 and [record.numbers for record in rollout.records] == [[0, 1]]
    assert rollout.turns[0].observation == "1 and x y"


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
