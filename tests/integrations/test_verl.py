"""verl's tools by YAML, function tools and interactions, written by others and unmodified."""

import importlib
import json
import shutil
import subprocess
import sys
import time
import types

import pytest
import requests
import vision_model
from bench.common import free_port
from conftest import data_file
from datasets import Dataset
from processes import wait_for_port
from project import ROOT
from scripted import ANSWER, CHATML_TOKENIZER, Scripted, call, ids
from test_environments import verify_records

import mt_grpo_trainer as mt
from mt_grpo.conversation.tools.signature import describe_tools, tool_schema
from mt_grpo.images.pictures import pictures_in, readable
from mt_grpo.integrations.verl import paths as verl_paths, search as verl_search
from mt_grpo.integrations.verl.base import BaseTool
from mt_grpo.integrations.verl.builtin import Gsm8kTool, score_of
from mt_grpo.integrations.verl.config import load_interactions
from mt_grpo.recipe.checks import check_dataset
from mt_grpo.recipe.data import load_rows
from mt_grpo.recipe.plugins import load_conversation, load_recipe_tools
from mt_grpo.rollout import StopReason

TOOL = "calc_gsm8k_reward"
BUILT_IN = "mt_grpo.integrations.verl.builtin"


@pytest.fixture(autouse=True)
def fresh_verl(monkeypatch):
    """Modules of verl, and of files beside a YAML, are those of one test."""

    def forget():
        for name in list(sys.modules):
            if name.split(".")[0] in ("verl", "ray") or name.startswith("written_"):
                del sys.modules[name]
        for finder in sys.meta_path:
            if isinstance(finder, verl_paths.VerlPaths):
                finder.beside.clear()

    forget()
    monkeypatch.setattr("mt_grpo.base.errors._told", set())
    yield
    forget()


def settings(**keys):
    return mt.recipe_classes()[0](**keys)


def build(**keys):
    """A conversation's class, made with the tools and the environment of a recipe."""
    script_args = settings(**keys)
    cls, environment = load_conversation(script_args, mt.MTGRPOConfig(output_dir="x", use_cpu=True, bf16=False),
                                         mt.MultiTurnToolEnv)  # fmt: skip
    return lambda **more: cls(
        load_recipe_tools(script_args), None, 4, tokenizer=CHATML_TOKENIZER, environment=environment, **more
    )


def converse(env, scripts, rows, prompt="How many?"):
    backend = Scripted(scripts)
    prompts = [[{"role": "user", "content": prompt}]] * len(scripts)
    rollouts = env.generate(prompts, backend, rows=rows)["rollouts"]
    verify_records([rollout for rollout in rollouts if rollout.error is None], backend)
    return rollouts


def write_yaml(folder, text):
    (folder / "tools.yaml").write_text(text)
    return str(folder / "tools.yaml")


@pytest.mark.contract("GSM8K tool and interaction")
@pytest.mark.parametrize("unmodified", [True, False])
def test_the_gsm8k_tool_with_its_yaml(tmp_path, unmodified):
    """verl's own file next to its YAML; without the file what is built in does the same."""
    config = data_file("plugins/verl/gsm8k_tool_config.yaml")
    if not unmodified:
        config = shutil.copy(config, tmp_path)
    env = build(tools_config_file=str(config))()
    wrong, right = call(TOOL, answer="5"), call(TOOL, answer="72")
    row = {"extra_info": {"tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": "72"}}}}}
    rollouts = converse(env, [[wrong, right, ANSWER], [right, wrong, ANSWER]], [row, row])
    tool = env.environments.by_name[None].verl_tools[TOOL]
    assert type(tool).__module__ == ("verl.tools.gsm8k_tool" if unmodified else BUILT_IN)
    assert [turn.observation for turn in rollouts[0].turns[:2]] == [
        "Current parsed answer='5' reward=0.0", "Current parsed answer='72' reward=1.0",
    ]  # fmt: skip
    rewards = [[turn.results[0].reward for turn in rollout.turns[:2]] for rollout in rollouts]
    assert rewards == [[-0.05, 0.0], [0.0, -0.05]]
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]  # calc_reward: what the last answer is worth
    assert tool._instance_dict == {}  # all were released


COUNTER = '''
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SCHEMA = {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": {
    "type": "object", "properties": {"by": {"type": "integer", "default": 1}}, "required": []}}}
log = []


class Counter(BaseTool):
    """Keeps a number per conversation, and writes down what happens."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.values = {}

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema(**SCHEMA)

    async def create(self, instance_id=None, start=0, **kwargs):
        log.append(("create", start, kwargs.get("create_kwargs")))
        self.values[instance_id] = start
        return CREATED

    async def execute(self, instance_id, parameters, **kwargs):
        self.values[instance_id] += parameters.get("by", 1)
        log.append(("execute", parameters, kwargs))
        return RETURNED

    async def calc_reward(self, instance_id, **kwargs):
        log.append(("calc_reward", kwargs))
        return self.values[instance_id] / 10

    async def release(self, instance_id, **kwargs):
        log.append(("release", self.values.pop(instance_id), kwargs))
'''
NATIVE = "tools: [{class_name: written_tools.Counter, config: {type: native}, tool_schema: null}]"
NEW = {
    "CREATED": "instance_id, ToolResponse()",
    "RETURNED": "ToolResponse(text=str(self.values[instance_id])), 0.5, {}",
}
OLD = {"CREATED": "instance_id", "RETURNED": "str(self.values[instance_id]), 0.5, {}"}
AGENT_LOOP = {
    **NEW,
    "start=0, **kwargs": "create_kwargs=None",
    'start, kwargs.get("create_kwargs")': '(start := create_kwargs["start"]), create_kwargs',
}


def counter(folder, shape=NEW, text=NATIVE, **replaced):
    source = COUNTER
    for name, code in {**shape, **replaced}.items():
        assert source.count(name) == 1
        source = source.replace(name, code)
    (folder / "written_tools.py").write_text(source)
    return write_yaml(folder, text)


def count(folder, *scripts, rows=({},), **keys):
    """Conversations with the tools of a folder: (rollouts, the counter's log)."""
    env = build(tools_config_file=str(folder / "tools.yaml"), **keys)()
    return converse(env, scripts, list(rows)), importlib.import_module("written_tools").log


def all_kwargs(**kwargs):
    return {"tools_kwargs": {"count": {f"{step}_kwargs": {name: 1} for step, name in kwargs.items()}}}


@pytest.mark.contract("BaseTool", "tools_kwargs")
@pytest.mark.parametrize("shape", [NEW, OLD, AGENT_LOOP], ids=["0.6", "0.4", "agent loop"])
def test_the_life_of_a_tool_and_the_rows_arguments(tmp_path, shape):
    """create, execute, calc_reward, release: each once per conversation but `execute`, with its own arguments."""
    counter(tmp_path, shape)
    row = all_kwargs(create="start", execute="x", calc_reward="y", release="z")
    (rollout,), log = count(tmp_path, [call("count", by=2), call("count"), ANSWER], rows=[row])
    agent_data = rollout.environment.agent_data
    assert log == [
        ("create", 1, {"start": 1}),
        ("execute", {"by": 2}, {"x": 1, "agent_data": agent_data}),
        ("execute", {}, {"x": 1, "agent_data": agent_data}),
        ("calc_reward", {"y": 1}),
        ("release", 4, {"z": 1}),
    ]
    assert [turn.observation for turn in rollout.turns] == ["3", "4", None]
    assert [turn.results[0].reward for turn in rollout.turns[:2]] == [0.5, 0.5] and rollout.reward == 0.4
    assert agent_data.tool_rewards == [0.5, 0.5] and agent_data.metrics == {"count": [{}, {}]}


def test_arguments_of_create_from_the_rows_columns(tmp_path):
    """What a row gives itself goes before. A row that has neither is refused before a model is loaded."""
    text = NATIVE.replace("config:", "create_kwargs_from: {start: answer}, config:")
    env = build(tools_config_file=counter(tmp_path, NEW, text))()
    own = {"tools_kwargs": {"count": {"create_kwargs": {"start": 40}, "execute_kwargs": {"x": 1}}}, "answer": 3}
    rollouts = converse(env, [[call("count"), ANSWER]] * 2, [{"answer": 3}, own])
    assert [rollout.turns[0].observation for rollout in rollouts] == ["4", "41"]
    prompt = [{"role": "user", "content": "?"}]
    with pytest.raises(ValueError, match="Row 0: create_kwargs_from names the column 'answer'"):
        check_dataset(Dataset.from_list([{"prompt": prompt, "other": 3}]), "train_dataset", env)
    check_dataset(Dataset.from_list([{"prompt": prompt, "answer": 3}]), "train_dataset", env)
    check_dataset(Dataset.from_list([{"prompt": prompt, "tool_selection": []}]), "train_dataset", env)


@pytest.mark.parametrize("answer", ["1002", "7 #### of it\n#### 1,002 "])
def test_the_ground_truth_of_a_worked_solution_is_its_number(answer):
    """GSM8K's rows as they are, and rows whose answer is the number, by the YAML of the recipes."""
    env = build(tools_config_file=str(ROOT / "tools/verl/gsm8k.yaml"))()
    (rollout,) = converse(env, [[call("calc_gsm8k_reward", answer="1002"), ANSWER]], [{"answer": answer}])
    assert "1.0" in rollout.turns[0].observation and rollout.reward == 1.0


def test_what_a_create_says_is_read_behind_the_prompt(tmp_path):
    own = {"CREATED": '"own", ToolResponse(text="It is 0.")', "values[instance_id] = start": "values['own'] = start"}
    counter(tmp_path, {**NEW, **own})
    (rollout,), _ = count(tmp_path, [call("count"), ANSWER])
    assert rollout.prompt_ids == ids("<|im_start|>user\nHow many?\nIt is 0.<|im_end|>\n<|im_start|>assistant\n")
    assert rollout.turns[0].observation == "1"  # under the id that `create` gave


def test_results_and_failures_of_tools(tmp_path):
    """What raises is an error that the model reads; a failed `create` ends its conversation."""
    counter(tmp_path, {"CREATED": "instance_id, None", "RETURNED": "ToolResponse(text=parameters['text']), None"})
    calls = [call("count", by="a"), call("counter"), call("count", more=1), ANSWER]
    twice = {"tools_kwargs": {"count": {"create_kwargs": {"instance_id": "twice"}}}}
    (first, second), log = count(tmp_path, calls, [], rows=[{}, twice])
    assert [turn.error for turn in first.turns] == ["tool", "call", "call", None]
    assert "unsupported operand" in first.turns[0].observation  # arguments reach the tool as they were written
    assert first.turns[1].observation == "Error: unknown tool 'counter'. Known tools: count"
    assert "unexpected keyword argument 'more'. Usage: count(by: int" in first.turns[2].observation
    assert second.stop_reason == StopReason.ENVIRONMENT_ERROR and "multiple values" in str(second.error)
    assert [step for step, *_ in log].count("release") == 1


HANGS = """\
        import asyncio, threading, time
        log.append(("thread", threading.current_thread().name))
        await asyncio.sleep(3600) if parameters["by"] == 1 else time.sleep(1.5)
"""


def test_a_tool_that_hangs_or_blocks_delays_no_conversation(tmp_path):
    """The time limit of a call is told to the model. A tool that blocks its loop delays tools, and nothing else."""
    counter(tmp_path, {**NEW, '        log.append(("execute"': HANGS + '        log.append(("execute"'})
    env = build(tools_config_file=str(tmp_path / "tools.yaml"))(tool_timeout=0.5)
    hangs, blocks = converse(env, [[call("count", by=1), ANSWER], [call("count", by=2), ANSWER]], [{}, {}])
    assert [r.turns[0].error for r in (hangs, blocks)] == ["timeout", "timeout"]
    assert [r.stop_reason for r in (hangs, blocks)] == [StopReason.ANSWERED] * 2
    log = importlib.import_module("written_tools").log
    assert {name for step, name, *_ in log if step == "thread"} == {"mt-grpo-verl"}
    assert [step for step, *_ in log].count("release") == 2  # always


def test_a_row_selects_tools(tmp_path):
    counter(tmp_path, NEW)
    other = (tmp_path / "written_tools.py").read_text().replace('"name": "count"', '"name": "other"')
    (tmp_path / "written_other.py").write_text(other)
    path = write_yaml(tmp_path, "tools: [{class_name: written_tools.Counter}, {class_name: written_other.Counter}]")
    (tmp_path / "written_functions.py").write_text(FUNCTIONS)
    env = build(tools_config_file=path, function_tool_path=str(tmp_path / "written_functions.py"))()
    rows = [{"tool_selection": ["other", "double"]}, {"extra_info": {"tool_selection": ["count"]}}, {}]
    scripts = [[call("count"), call("double", x=4), ANSWER], [call("other"), ANSWER], [call("count"), ANSWER]]
    first, second, third = converse(env, scripts, rows)
    assert [list(rollout.tools) for rollout in (first, second, third)] == [
        ["other", "double"], ["count"], ["double", "rewarded", "described", "waits", "count", "other"],
    ]  # fmt: skip
    assert [turn.error for turn in first.turns[:2]] == ["call", None] and first.turns[1].observation == "8"
    made = [step for step, *_ in importlib.import_module("written_tools").log].count("create")
    assert made == 2  # of three conversations two have it


FUNCTIONS = '''
import asyncio

from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool
def double(x: int) -> dict:
    """Doubles.

    Args:
        x: A number.
    """
    return x * 2


@function_tool("rewarded")
def gives(x: int = 1):
    """Gives a reward."""
    return ToolResponse(text="so"), 0.25, {"calls": 1}


@function_tool("described", schema={"name": "described", "description": "As written.", "parameters": {
    "type": "object", "properties": {"y": {"type": "string"}}, "required": ["y"]}})
def by_schema(y):
    return y[::-1]


@function_tool
async def waits(text: str) -> str:
    """Waits."""
    await asyncio.sleep(0)
    return (text,)
'''


@pytest.mark.contract("function tools")
def test_function_tools(tmp_path):
    (tmp_path / "written_functions.py").write_text(FUNCTIONS)
    tools = load_recipe_tools(settings(function_tool_path=str(tmp_path / "written_functions.py")))
    env = mt.MultiTurnToolEnv(tools, None, 6, tokenizer=CHATML_TOKENIZER)
    calls = [call("double", x=4), call("rewarded"), call("described", y="abc"), call("waits", text="12345"),
             call("double", x="4"), ANSWER]  # fmt: skip
    (rollout,) = env.generate(["?"], Scripted([calls]))["rollouts"]
    assert [turn.observation for turn in rollout.turns[:4]] == ["8", "so", "cba", "12345"]
    assert rollout.turns[4].error == "call"  # the types of a function are checked, as those of any other tool
    assert [turn.results[0].reward for turn in rollout.turns[:4]] == [None, 0.25, None, None]


INTERACTION = """
from verl.interactions.base import BaseInteraction

log = []


class GuessInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        log.append(("start", kwargs))
        return "own"

    async def generate_response(self, instance_id, messages, **kwargs):
        log.append(("generate", instance_id, messages, kwargs))
        said = messages[-1]["content"]
        return said == "7", "No, more." if said < "7" else "No, less.", float(said == "7"), {"said": said}

    async def calculate_score(self, instance_id, **kwargs):
        return 0.25

    async def finalize_interaction(self, instance_id, **kwargs):
        log.append(("finalize", instance_id))
"""


def interaction(folder, source=INTERACTION, text="interaction: [{class_name: written_talk.GuessInteraction}]"):
    (folder / "written_talk.py").write_text(source)
    (folder / "talk.yaml").write_text(text)
    return str(folder / "talk.yaml")


@pytest.mark.contract("interaction_config_file")
def test_an_interaction_answers_turns_without_a_call(tmp_path):
    """Its arguments are the row's, all of them; scores are rewards of turns; it is finalized."""
    env = build(interaction_config_file=interaction(tmp_path))()
    kwargs = {"name": "guess", "number": 7}
    (rollout,) = converse(env, [["3", "9", "7"]], [{"interaction_kwargs": kwargs}])
    log = importlib.import_module("written_talk").log
    user = {"role": "user", "content": "How many?"}
    said = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "No, more."}]
    assert log[0] == ("start", kwargs)
    assert log[1] == ("generate", "own", [user, said[0]], kwargs)
    assert log[2] == ("generate", "own", [user, *said, {"role": "assistant", "content": "9"}], kwargs)
    assert (len(log), log[4]) == (5, ("finalize", "own"))
    assert [turn.reward for turn in rollout.turns] == [0.0, 0.0, 1.0]
    assert (rollout.reward, rollout.stop_reason) == (0.25, StopReason.ENVIRONMENT_STOP)  # calculate_score
    assert rollout.turns[1].info == {"said": "9"}
    assert rollout.completion_ids == ids(
        "3<|im_end|>\n<|im_start|>user\nNo, more.<|im_end|>\n<|im_start|>assistant\n"
        "9<|im_end|>\n<|im_start|>user\nNo, less.<|im_end|>\n<|im_start|>assistant\n7"
    )


def test_an_interaction_and_a_tool_read_results_of_role_tool(tmp_path):
    """As in verl, also in the format in which the model reads them as the user's."""
    counter(tmp_path, {**NEW, "RETURNED": NEW["RETURNED"].replace("{}", "{'seen': kwargs['agent_data'].messages}")})
    env = build(tools_config_file=str(tmp_path / "tools.yaml"), interaction_config_file=interaction(tmp_path))()
    calls = [call("count"), call("count", by=2)]
    (rollout,) = converse(env, [[*calls, "7"]], [{"interaction_kwargs": {"x": 1}}])
    assert rollout.turns[0].messages == [{"role": "user", "content": "<result>\n1\n</result>"}]  # `xml`
    begin = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": calls[0]},
             {"role": "tool", "content": "1"}, {"role": "assistant", "content": calls[1]}]  # fmt: skip
    end = [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "7"}]
    log = importlib.import_module("written_talk").log
    assert [step for step, *_ in log] == ["start", "generate", "finalize"] and log[1][2] == begin + end
    assert rollout.environment.outcome_rewards == {"count": 0.3, "guess": 0.25} and rollout.reward == 0.55
    seen = [metrics["seen"] for metrics in rollout.environment.agent_data.metrics["count"]]
    assert seen == [begin[:2], begin]


def test_an_interaction_that_fails_ends_its_conversation(tmp_path):
    source = INTERACTION.replace("float(said", "float(1 / 0 + said")
    env = build(interaction_config_file=interaction(tmp_path, source))()
    first, without = converse(env, [["3"], ["3"]], [{"interaction_kwargs": {"x": 1}}, {}])
    assert first.stop_reason == StopReason.ENVIRONMENT_ERROR and "division by zero" in str(first.error)
    assert importlib.import_module("written_talk").log[-1] == ("finalize", "own")
    assert without.turns[0].reward is None  # a row without arguments has no interaction


@pytest.mark.contract("GSM8K tool and interaction")
@pytest.mark.parametrize("unmodified", [True, False])
def test_the_gsm8k_interaction_with_its_yaml(tmp_path, unmodified):
    """verl's own file next to its YAML, and what is built in."""
    config = data_file("plugins/verl/gsm8k_interaction_config.yaml")
    if not unmodified:
        config = shutil.copy(config, tmp_path)
    env = build(interaction_config_file=str(config))()
    kwargs = {"name": "gsm8k", "query": "How many?", "ground_truth": "72"}
    (rollout,) = converse(env, [["#### 71", "So #### 72"]], [{"extra_info": {"interaction_kwargs": kwargs}}])
    wrong = "Your response is incorrect! You need to reflect on your answer and try again."
    assert [turn.observation for turn in rollout.turns] == [wrong, None]
    assert [turn.reward for turn in rollout.turns] == [0.0, 1.0] and rollout.reward == 1.0
    assert rollout.environment.agent_data.turn_scores == [0.0, 1.0]
    (talk,) = env.environments.by_name[None].interactions.values()
    assert type(talk).__module__ == ("verl.interactions.gsm8k_interaction" if unmodified else BUILT_IN)
    assert talk._instance_dict == {}


CLASHES = "interaction: [{class_name: written_talk.GuessInteraction, name: count}]"
OTHER = "class Other:\n    def reset(self, **row):\n        pass\n"


@pytest.mark.parametrize("text, more, message", [
    ("tools: [{class_name: written_tools.Counter, create_kwarg_from: {a: b}}]", {},
     "^tools_config_file: .*argument 'create_kwarg_from'"),
    ("tools: [{class_name: written_tools.Counter}, {class_name: written_tools.Counter}]", {}, "are called 'count'"),
    (NATIVE, {"environment": "other.py:Other"}, "another one"),
    (NATIVE, {"interaction_config_file": "talk.yaml"}, "A tool is called 'count'"),
])  # fmt: skip
def test_what_does_not_fit_is_rejected(tmp_path, text, more, message):
    """A YAML, another environment, and names that clash."""
    (tmp_path / "other.py").write_text(OTHER)
    interaction(tmp_path, text=CLASHES)
    keys = {key: f"{tmp_path}/{name}" for key, name in more.items()}
    with pytest.raises(ValueError, match=message):
        build(tools_config_file=counter(tmp_path, NEW, text), **keys)()


BAD_ROWS = {
    "an unknown tool": ({"tools_kwargs": {"other": {}}}, "names the unknown tool 'other'. Known tools: count"),
    "an unknown step": ({"tools_kwargs": {"count": {"make_kwargs": {}}}}, "has \\['make_kwargs'\\]"),
    "an unknown interaction": ({"interaction_kwargs": {"name": "x"}}, "name='x', expected one of guess"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_rejected(tmp_path, name):
    row, message = BAD_ROWS[name]
    env = build(tools_config_file=counter(tmp_path, NEW), interaction_config_file=interaction(tmp_path))()
    prompt = [{"role": "user", "content": "?"}]
    good = {"prompt": prompt, "tools_kwargs": None, "tool_selection": None, "interaction_kwargs": None}
    with pytest.raises(ValueError, match="Row 0: .*" + message):
        check_dataset(Dataset.from_list([{**good, **row}]), "train_dataset", env)
    check_dataset(Dataset.from_list([{**good, **all_kwargs(create="start")}]), "train_dataset", env)


def test_a_null_that_a_row_of_json_says_is_an_argument(tmp_path):
    """A table's null, where another row has the key, is none."""
    own = {"create_kwargs": {"start": 5, "of": {"x": None}}, "execute_kwargs": {"z": None}, "release_kwargs": None}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "?", "tools_kwargs": {"count": own}}))
    of_rows = {"start": 2}, {"y": 2}
    table = Dataset.from_list([{"tools_kwargs": {"count": {"create_kwargs": kwargs}}} for kwargs in of_rows])
    data = [*load_rows(str(tmp_path / "rows.jsonl"), "train"), table[1]]
    counter(tmp_path, NEW)
    rollouts, log = count(tmp_path, *[[call("count"), ANSWER]] * 2, rows=data)
    created = sorted((kwargs for step, *_, kwargs in log if step == "create"), key=str)
    assert created == [{"start": 5, "of": {"x": None}}, {"y": 2}]
    assert ("execute", {}, {"z": None, "agent_data": rollouts[0].environment.agent_data}) in log


def test_a_class_by_its_path_and_files_beside_a_yaml(tmp_path):
    """No module of verl is looked for beside the YAML but the one that is named."""
    (tmp_path / "schemas.py").write_text("ToolResponse = None")
    (tmp_path / "utils.py").write_text("1 / 0")
    path = counter(tmp_path, NEW, "tools: [{class_name: 'written_tools.py:Counter'}]")
    build(tools_config_file=path)
    (tmp_path / "my_tool.py").write_text((tmp_path / "written_tools.py").read_text())
    write_yaml(tmp_path, "tools: [{class_name: verl.tools.my_tool.Counter}]")
    (rollout,), _ = count(tmp_path, [call("count"), ANSWER])
    assert rollout.turns[0].observation == "1"


def test_a_create_that_is_abandoned_is_released(tmp_path):
    counter(tmp_path, {**NEW, "return instance_id, ToolResponse()": "import asyncio; await asyncio.sleep(600)"})
    env = build(tools_config_file=str(tmp_path / "tools.yaml"))(environment_timeout=0.5)
    (rollout,) = converse(env, [[ANSWER]], [{}])
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR
    log = importlib.import_module("written_tools").log
    while log[-1][0] != "release":
        time.sleep(0.05)
    assert [step for step, *_ in log] == ["create", "release"]


@pytest.mark.parametrize("returned", [
    "(1, 2, 3, 4)", "('x', float('nan'))", "ToolResponse(text='x', image=[1])", "ToolResponse(text='x', video=[1])",
])  # fmt: skip
def test_what_no_tool_returns_is_an_error(tmp_path, returned):
    counter(tmp_path, {**NEW, "RETURNED": returned})
    (rollout,), _ = count(tmp_path, [call("count"), ANSWER])
    assert rollout.turns[0].error == "tool" and rollout.turns[0].results[0].reward is None


@pytest.mark.parametrize("returned, reward", [("'7', '7', {}", None), ("{'text': '7'}, 0.5, {}", 0.5)])
def test_a_result_whose_reward_is_text_and_a_dict_as_of_verl_0_5(tmp_path, returned, reward):
    counter(tmp_path, {**NEW, "RETURNED": returned})
    (rollout,), _ = count(tmp_path, [call("count"), ANSWER])
    assert [(each.text, each.error, each.reward) for each in rollout.turns[0].results] == [("7", None, reward)]


@pytest.mark.contract("verl images")
def test_images_of_a_tool_by_yaml(tmp_path):
    """Before the text, as in verl. What a tool reads of the conversation has them, too."""
    returned = "ToolResponse(text='0123456789', image=[drawn(1), None, drawn(2)]), 0.5, {'seen': kwargs['agent_data']}"
    shape = {"CREATED": "instance_id, ToolResponse(text='Board:', image=[drawn(0)])", "RETURNED": returned}
    path = counter(tmp_path, shape)
    source = (tmp_path / "written_tools.py").read_text()
    (tmp_path / "written_tools.py").write_text(f"from vision_model import picture as drawn\n{source}")
    env = build(tools_config_file=path)()
    tokenizer = env.tokenizer = vision_model.reading(vision_model.save(tmp_path / "model"))
    script = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in (call("count"), ANSWER)]
    with vision_model.read_off_the_loop(tokenizer, at_least=0):
        (rollout,) = converse(env, [script], [{}])
    board, one, two = (tokenizer.pictures.read(vision_model.picture(k), "") for k in range(3))
    begin = f"How many?\n<image {board.name}>Board:"
    assert readable(rollout.prompt_messages[-1]["content"]) == begin
    assert readable(rollout.turns[0].results[0].text) == f"<image {one.name}><image {two.name}>0123456789"
    assert rollout.turns[0].results[0].reward == 0.5 and rollout.turns[0].error is None
    assert pictures_in(rollout.prompt_ids + rollout.completion_ids) == [board, one, two]
    (seen,) = (metrics["seen"] for metrics in rollout.environment.agent_data.metrics["count"])
    assert [image.tobytes() for image in seen.image_data] == [each.image.tobytes() for each in (board, one, two)]
    assert seen.messages[0]["content"] == begin


@pytest.mark.contract("tools_config_file")
def test_what_the_model_reads_of_a_tool(tmp_path):
    """Its schema as the file has it, also what verl's classes would drop."""
    schema = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {
        "type": "object", "required": ["queries"],
        "properties": {"queries": {"type": "array", "items": {"type": "string"}, "description": "What for."}},
    }}}  # fmt: skip
    text = NATIVE.replace("type: native", "a: 1e-4, b: 7").replace("null", json.dumps(schema))
    env = build(tools_config_file=counter(tmp_path, NEW, text))()
    assert env.environments.by_name[None].verl_tools["find"].config == {"a": 1e-4, "b": 7}  # as OmegaConf reads it
    (tool,) = env.environments.tools_of_class({}).values()
    assert tool_schema("find", tool) == schema
    assert describe_tools({"find": tool}) == (
        "find(queries: list[str]) -> str\nFinds.\n\nArgs:\n    queries: What for."
    )


@pytest.fixture(scope="module")
def search_server(tmp_path_factory):
    """scripts/serve_search.py on the corpus of SQuAD; gives its URL."""
    corpus = data_file("squad/corpus.jsonl")
    port = free_port()
    command = [sys.executable, str(ROOT / "scripts/serve_search.py"), "--corpus", str(corpus), "--port", str(port)]
    index = tmp_path_factory.mktemp("index") / "squad.fts5"
    process = subprocess.Popen([*command, "--index", str(index)], stdout=subprocess.PIPE, text=True)
    try:
        assert "is served on" in process.stdout.readline()
        wait_for_port(port)  # the line is printed before it is open
        yield f"http://127.0.0.1:{port}/retrieve"
    finally:
        process.terminate()
        process.wait(timeout=30)


def asked(url, **body):
    return requests.post(url, json=body, timeout=30)


def test_the_search_server_speaks_search_r1s_protocol(search_server):
    answer = asked(search_server, queries=["Norman conquest of England", "zxqv"], topk=2, return_scores=True).json()
    (first, second), nothing = answer["result"]
    assert nothing == [] and set(first) == {"document", "score"} and first["score"] >= second["score"] > 0
    assert first["document"]["contents"].split("\n")[0] == "Normans"
    (plain,) = asked(search_server, queries=["Norman conquest of England"], topk=1).json()["result"]
    assert plain == [first["document"]]
    assert len(asked(search_server, queries=["Normans"]).json()["result"][0]) == 3
    for wrong in (dict(), dict(queries=[1]), dict(queries=["x"], topk=0), dict(queries=["x"] * 257)):
        assert asked(search_server, **wrong).status_code == 400
    assert requests.post(search_server, data=b" " * (2**20 + 1), timeout=30).status_code == 413
    assert requests.get(search_server.replace("/retrieve", "/health"), timeout=30).status_code == 200


class Result:
    def __init__(self, value):
        self.value = value

    def __await__(self):
        yield from ()
        return self.value


class Remote:
    """What verl's tools need of ray's actors: `.remote(...)` calls at once, and other names are of the class."""

    def __init__(self, function, made=None):
        self.function, self.made, self.options = function, made, lambda **kwargs: self

    def remote(self, *args, **kwargs):
        value = self.function(*args, **kwargs)
        return Remote(None, value) if isinstance(self.function, type) else Result(value)

    def __getattr__(self, name):
        return Remote(getattr(self.made, name))


@pytest.mark.contract("verl search tool")
@pytest.mark.parametrize("unmodified", [True, False])
def test_the_search_tool_against_the_server(search_server, tmp_path, monkeypatch, unmodified):
    """verl's own file, with a stand-in for ray, and what is built in; both with verl's YAML but for the port."""
    if unmodified:
        ray = types.ModuleType("ray")
        ray.remote = lambda *args, **kwargs: Remote(*args) if args else Remote
        ray.method, ray.get = lambda **kwargs: lambda function: function, lambda result: result.value
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.actor", types.ModuleType("ray.actor"))
        shutil.copy(data_file("plugins/verl/search_tool.py"), tmp_path)
    config = data_file("plugins/verl/search_tool_config.yaml").read_text()
    assert config.count("http://127.0.0.1:8000/retrieve") == 1
    config = config.replace("http://127.0.0.1:8000/retrieve", search_server)
    env = build(tools_config_file=write_yaml(tmp_path, config))(max_completion_length=4000,
                                                               max_tool_response_tokens=3000)  # fmt: skip
    queries = ["Norman conquest of England"]
    (rollout,) = converse(env, [[call("search", query_list=queries), call("search", query_list="x"), ANSWER]], [{}])
    (tool,) = env.environments.by_name[None].verl_tools.values()
    assert type(tool).__module__ == ("verl.tools.search_tool" if unmodified else BUILT_IN)
    found = json.loads(rollout.turns[0].results[0].text)["result"]
    assert found.startswith("Doc 1 (Title: Normans)\n") and "Doc 3 (Title: " in found
    assert "missing" in rollout.turns[1].observation and rollout.reward is None
    assert [turn.error for turn in rollout.turns] == [None, None, None]
    assert rollout.environment.agent_data.metrics["search"][0]["total_results"] == 3


REFUSED, BUSY = requests.ConnectionError("refused"), (503, b"")


@pytest.mark.parametrize("answers, text, status", [
    ([REFUSED, BUSY, (200, b'{"result": [[]]}')], "No search results found.", "no_results"),
    ([(404, b"")], "Search error: the search service failed (HTTPError)", "api_error"),
    ([(200, b'{"found": []}')], "Search error: the search service failed (KeyError)", "api_error"),
    ([BUSY] * 10, "Search error: the search service failed (HTTPError)", "api_error"),
])  # fmt: skip
def test_a_search_service_that_fails(monkeypatch, caplog, answers, text, status):
    """A busy one is asked ten times; another error, or an answer of another form, ends it."""
    answers, slept = list(answers), []
    monkeypatch.setattr(verl_search.time, "sleep", slept.append)

    def post(url, json, timeout):
        response, answer = requests.Response(), answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        response.status_code, response._content = answer
        return response

    monkeypatch.setattr(requests, "post", post)
    num_answers = len(answers)
    result, metrics = verl_search.perform_single_search_batch("http://x", ["q"])
    assert json.loads(result)["result"].startswith(text) and metrics["status"] == status
    assert slept == list(range(1, num_answers)) and answers == []
    assert (status == "api_error") == ("A search failed, and the model reads the error" in caplog.text)


def test_scores_of_gsm8k(caplog):
    """A number of a JSON row is as good as its text; without one all answers are wrong, which is told once."""
    answers, truths = ["#### 72", "#### 72", "#### 0.5", "#### 7", None, "", ""], [72, "72", 0.5, 72, "72", None, None]
    states = [{"response": said, "ground_truth": truth} for said, truth in zip(answers, truths, strict=True)]
    assert [score_of(state, "strict") for state in states] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert ["There is no ground_truth" in text for text in caplog.messages] == [True]


def test_interactions_have_names_of_their_own_which_they_are_told(tmp_path):
    entry = "class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    path = write_yaml(tmp_path, f"interaction: [{{name: first, {entry}, config: {{level: 2}}}}, {{{entry}}}]")
    assert {name: (each.name, each.config) for name, each in load_interactions(path).items()} == {
        "first": ("first", {"level": 2, "name": "first"}), "gsm8k": ("gsm8k", {"name": "gsm8k"}),
    }  # fmt: skip
    write_yaml(tmp_path, f"interaction: [{{name: gsm8k, {entry}}}, {{{entry}}}]")
    with pytest.raises(ValueError, match="two interactions are called 'gsm8k'"):
        load_interactions(path)


def test_a_folder_that_is_called_verl_is_not_verl(tmp_path, monkeypatch):
    """tools/ has one: it may stand on the path, as the folder of a recipe's file, and may have been imported."""
    (tmp_path / "verl").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("verl").__spec__.origin is None  # a namespace package: nothing of verl is in it
    verl_paths.install()
    assert importlib.import_module("verl.tools.base_tool").BaseTool is BaseTool


def test_an_installed_verl_is_found_first(tmp_path, monkeypatch):
    """Except for functions, which it does not know."""
    for name in ("", "tools/", "tools/base_tool", "tools/function_tool", "utils/"):
        path = tmp_path / "verl" / (f"{name}__init__.py" if name.endswith("/") or not name else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text("installed = True")
    monkeypatch.syspath_prepend(tmp_path)
    verl_paths.install()
    assert importlib.import_module("verl.tools.base_tool").installed
    assert not hasattr(importlib.import_module("verl.tools.function_tool"), "installed")
    assert importlib.import_module("verl.tools.gsm8k_tool").Gsm8kTool is Gsm8kTool  # which this release lacks
