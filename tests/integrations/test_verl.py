"""verl's tools by YAML, function tools and interactions, written by others and unmodified."""

import asyncio
import importlib
import json
import shutil
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import vision_model
from conftest import data_file
from datasets import Dataset
from scripted import CHATML_TOKENIZER, Scripted, call, ids
from test_environments import ANSWER, verify_records

import mt_grpo_trainer as mt
from mt_grpo.base.pictures import pictures_in
from mt_grpo.conversation.environments import EnvironmentFailure
from mt_grpo.conversation.pictures import readable
from mt_grpo.conversation.tools.signature import describe_tools, tool_schema
from mt_grpo.integrations.verl import (
    paths as verl_paths,
    search as verl_search,
)
from mt_grpo.integrations.verl.base import BaseTool
from mt_grpo.integrations.verl.builtin import (
    Gsm8kInteraction,
    Gsm8kTool,
    SearchTool,
)
from mt_grpo.integrations.verl.config import load_interactions, load_tools_config
from mt_grpo.integrations.verl.schemas import OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.recipe.checks import check_dataset
from mt_grpo.recipe.data import load_rows
from mt_grpo.recipe.integrations import load_conversation, load_integration_tools
from mt_grpo.rollout import StopReason

ROOT = Path(__file__).resolve().parents[2]
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
    monkeypatch.setattr(sys, "path", list(sys.path))
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
        load_integration_tools(script_args), None, 4, tokenizer=CHATML_TOKENIZER, environment=environment, **more
    )


def converse(env, scripts, rows, prompt="How many?"):
    backend = Scripted(scripts)
    prompts = [[{"role": "user", "content": prompt}]] * len(scripts)
    rollouts = env.generate(prompts, backend, rows=rows)["rollouts"]
    verify_records([rollout for rollout in rollouts if rollout.error is None], backend)
    return rollouts


def write_yaml(folder, text, source=None, name="written_tools"):
    (folder / "tools.yaml").write_text(text)
    if source is not None:
        (folder / f"{name}.py").write_text(source)
    return str(folder / "tools.yaml")


def truth(value):
    return {"extra_info": {"tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": value}}}}}


@pytest.mark.contract("GSM8K tool and interaction")
@pytest.mark.parametrize("unmodified", [True, False])
def test_the_gsm8k_tool_with_its_yaml(tmp_path, unmodified):
    """verl's own file beside its YAML; without the file what is built in does the same."""
    config = data_file("plugins/verl/gsm8k_tool_config.yaml")
    if not unmodified:
        config = tmp_path / "tools.yaml"
        config.write_text(data_file("plugins/verl/gsm8k_tool_config.yaml").read_text())
    env = build(tools_config_file=str(config))()
    wrong, right = call(TOOL, answer="5"), call(TOOL, answer="72")
    rollouts = converse(env, [[wrong, right, ANSWER], [right, wrong, ANSWER]], [truth("72"), truth("72")])
    tool = env.environments.by_name[None].verl_tools[TOOL]
    assert type(tool).__module__ == ("verl.tools.gsm8k_tool" if unmodified else BUILT_IN)
    first, second = rollouts
    assert [turn.observation for turn in first.turns[:2]] == [
        "Current parsed answer='5' reward=0.0",
        "Current parsed answer='72' reward=1.0",
    ]
    assert [turn.results[0].reward for turn in first.turns[:2]] == [-0.05, 0.0]
    assert [turn.results[0].reward for turn in second.turns[:2]] == [0.0, -0.05]
    assert (first.reward, second.reward) == (1.0, 0.0)  # calc_reward: what the last answer is worth
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


def counter(folder, shape=NEW, text=NATIVE, **replaced):
    source = COUNTER
    for name, code in {**shape, **replaced}.items():
        assert source.count(name) == 1
        source = source.replace(name, code)
    return write_yaml(folder, text, source)


def all_kwargs(**kwargs):
    return {"tools_kwargs": {"count": {f"{step}_kwargs": {name: 1} for step, name in kwargs.items()}}}


@pytest.mark.contract("BaseTool", "tools_kwargs")
@pytest.mark.parametrize("shape", [NEW, OLD], ids=["a ToolResponse and a pair", "text and an id"])
def test_the_life_of_a_tool_and_the_rows_arguments(tmp_path, shape):
    """create, execute, calc_reward, release: each once per conversation but `execute`, with its own arguments."""
    env = build(tools_config_file=counter(tmp_path, shape))()
    row = all_kwargs(create="start", execute="x", calc_reward="y", release="z")
    (rollout,) = converse(env, [[call("count", by=2), call("count"), ANSWER]], [row])
    log = importlib.import_module("written_tools").log
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


def test_arguments_of_create_under_one_name(tmp_path):
    """verl 0.6 and later pass `create_kwargs=`, earlier ones each by its name."""
    source = COUNTER.replace("start=0, **kwargs", "create_kwargs=None").replace('kwargs.get("create_kwargs")', "0")
    source = source.replace('("create", start,', '("create", (start := create_kwargs["start"]),')
    for name, code in NEW.items():
        source = source.replace(name, code)
    env = build(tools_config_file=write_yaml(tmp_path, NATIVE, source))()
    (rollout,) = converse(env, [[call("count"), ANSWER]], [all_kwargs(create="start")])
    assert rollout.turns[0].observation == "2"


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


@pytest.mark.parametrize("answer", ["1002", "2 of 501 are 1,002.\n#### 1,002", "7 #### of it\n#### 1002 "])
def test_the_ground_truth_of_a_worked_solution_is_its_number(answer):
    """GSM8K's rows as they are, and rows whose answer is the number, by the YAML of the recipes."""
    env = build(tools_config_file=str(ROOT / "tools/verl/gsm8k.yaml"))()
    (rollout,) = converse(env, [[call("calc_gsm8k_reward", answer="1002"), ANSWER]], [{"answer": answer}])
    assert "1.0" in rollout.turns[0].observation and rollout.reward == 1.0


def test_what_a_create_says_is_read_behind_the_prompt(tmp_path):
    counter(tmp_path, CREATED='"own", ToolResponse(text="It is 0.")')
    rewrite(tmp_path, "self.values[instance_id] = start", "self.values['own'] = start")
    env = build(tools_config_file=str(tmp_path / "tools.yaml"))()
    (rollout,) = converse(env, [[call("count"), ANSWER]], [{}])
    assert rollout.prompt_ids == ids("<|im_start|>user\nHow many?\nIt is 0.<|im_end|>\n<|im_start|>assistant\n")
    assert rollout.turns[0].observation == "1"  # under the id that `create` gave


def test_results_and_failures_of_tools(tmp_path):
    """What raises is an error that the model reads; a failed `create` ends its conversation."""
    counter(tmp_path, {"CREATED": "instance_id, None", "RETURNED": "ToolResponse(text=parameters['text']), None"})
    env = build(tools_config_file=str(tmp_path / "tools.yaml"), max_tool_response_length=6)()
    first, second = converse(
        env,
        [[call("count", by="a"), call("counter"), call("count", more=1), ANSWER], []],
        [{}, {"tools_kwargs": {"count": {"create_kwargs": {"instance_id": "twice"}}}}],
    )
    assert [(turn.error, turn.observation) for turn in first.turns] == [
        ("tool", first.turns[0].observation),  # arguments reach the tool as they were written
        ("call", "Error: unknown tool 'counter'. Known tools: count"),
        ("call", first.turns[2].observation),
        (None, None),
    ]
    assert "unsupported operand" in first.turns[0].observation
    assert first.turns[2].observation.startswith(
        "Error: got an unexpected keyword argument 'more'. Usage: count(by: int"
    )
    assert second.stop_reason == StopReason.ENVIRONMENT_ERROR and "multiple values" in str(second.error)
    assert [step for step, *_ in importlib.import_module("written_tools").log].count("release") == 1


def rewrite(folder, old, new):
    """Another line in the counter's file."""
    source = (folder / "written_tools.py").read_text()
    assert source.count(old) == 1
    (folder / "written_tools.py").write_text(source.replace(old, new))


HANGS = """\
        import asyncio, threading, time
        log.append(("thread", threading.current_thread().name))
        await asyncio.sleep(3600) if parameters["by"] == 1 else time.sleep(1.5)
"""


def test_a_tool_that_hangs_or_blocks_delays_no_conversation(tmp_path):
    """The time limit of a call is told to the model. A tool that blocks its loop delays tools, and nothing else."""
    counter(tmp_path, NEW)
    rewrite(tmp_path, '        log.append(("execute"', HANGS + '        log.append(("execute"')
    env = build(tools_config_file=str(tmp_path / "tools.yaml"))(tool_timeout=0.5)
    hangs, blocks = converse(env, [[call("count", by=1), ANSWER], [call("count", by=2), ANSWER]], [{}, {}])
    assert [r.turns[0].error for r in (hangs, blocks)] == ["timeout", "timeout"]
    assert [r.stop_reason for r in (hangs, blocks)] == [StopReason.ANSWERED] * 2
    log = importlib.import_module("written_tools").log
    assert {name for step, name, *_ in log if step == "thread"} == {"mt-grpo-verl"}
    assert [step for step, *_ in log].count("release") == 2  # always


def test_a_release_that_raises_stops_no_other(tmp_path, caplog):
    counter(tmp_path, NEW)
    source = (tmp_path / "written_tools.py").read_text()
    other = source.replace("self.values.pop(instance_id)", "1 / 0").replace('"name": "count"', '"name": "bad"')
    (tmp_path / "written_other.py").write_text(other)
    text = "tools: [{class_name: written_other.Counter}, {class_name: written_tools.Counter}]"
    env = build(tools_config_file=write_yaml(tmp_path, text))()
    (rollout,) = converse(env, [[ANSWER]], [{}])
    assert rollout.error is None and "ZeroDivisionError: division by zero" in caplog.text
    assert importlib.import_module("written_tools").log[-1][0] == "release"
    assert asyncio.run(env.environments.close([rollout])) == []  # and none is released twice


def test_a_reward_that_is_no_number_is_told_once(tmp_path, caplog):
    counter(tmp_path, NEW)
    rewrite(tmp_path, "self.values[instance_id] / 10", "['a text']")
    env = build(tools_config_file=str(tmp_path / "tools.yaml"))()
    rollouts = converse(env, [[ANSWER], [ANSWER]], [{}, {}])
    assert [rollout.reward for rollout in rollouts] == [None, None]
    assert sum("count returned the reward ['a text']" in message for message in caplog.messages) == 1


def test_a_row_selects_tools(tmp_path):
    counter(tmp_path, NEW)
    (tmp_path / "written_other.py").write_text(
        (tmp_path / "written_tools.py").read_text().replace('"name": "count"', '"name": "other"')
    )
    path = write_yaml(tmp_path, "tools: [{class_name: written_tools.Counter}, {class_name: written_other.Counter}]")
    (tmp_path / "written_functions.py").write_text(FUNCTIONS)
    env = build(tools_config_file=path, function_tool_path=str(tmp_path / "written_functions.py"))()
    rows = [{"tool_selection": ["other", "double"]}, {"extra_info": {"tool_selection": ["count"]}}, {}]
    scripts = [[call("count"), call("double", x=4), ANSWER], [call("other"), ANSWER], [call("count"), ANSWER]]
    first, second, third = converse(env, scripts, rows)
    assert [list(rollout.tools) for rollout in (first, second, third)] == [
        ["other", "double"], ["count"], ["double", "rewarded", "described", "waits", "count", "other"],
    ]  # fmt: skip
    assert [turn.observation for turn in first.turns[:2]] == [
        "Error: unknown tool 'count'. Known tools: other, double",
        "8",
    ]
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
    tools = load_integration_tools(settings(function_tool_path=str(tmp_path / "written_functions.py"),
                                        max_tool_response_length=4, tool_response_truncate_side="right"))  # fmt: skip
    env = mt.MultiTurnToolEnv(tools, None, 6, tokenizer=CHATML_TOKENIZER)
    calls = [call("double", x=4), call("rewarded"), call("described", y="abc"), call("waits", text="12345"),
             call("double", x="4"), ANSWER]  # fmt: skip
    (rollout,) = env.generate(["?"], Scripted([calls]))["rollouts"]
    assert [turn.observation for turn in rollout.turns[:4]] == ["8", "so", "cba", "1234...(truncated)"]
    assert rollout.turns[4].error == "call"  # the types of a function are checked, as those of any other tool
    assert [turn.results[0].reward for turn in rollout.turns[:4]] == [None, 0.25, None, None]


# -- interactions --

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


def test_a_row_without_arguments_has_no_interaction(tmp_path):
    env = build(interaction_config_file=interaction(tmp_path))()
    first, second = converse(env, [["3"], ["7"]], [{}, {"extra_info": {"interaction_kwargs": {"number": 1}}}])
    assert [turn.reward for turn in first.turns + second.turns] == [None, 1.0]
    assert [step for step, *_ in importlib.import_module("written_talk").log] == ["start", "generate", "finalize"]


def test_tools_go_before_the_interaction(tmp_path):
    counter(tmp_path, NEW)
    env = build(tools_config_file=str(tmp_path / "tools.yaml"), interaction_config_file=interaction(tmp_path))()
    (rollout,) = converse(env, [[call("count"), "7"]], [{"interaction_kwargs": {"x": 1}}])
    log = importlib.import_module("written_talk").log
    assert [step for step, *_ in log] == ["start", "generate", "finalize"] and rollout.turns[0].observation == "1"
    assert rollout.environment.outcome_rewards == {"count": 0.1, "guess": 0.25} and rollout.reward == 0.35


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
    assert importlib.import_module("written_talk").log[1][2] == begin + end
    seen = [metrics["seen"] for metrics in rollout.environment.agent_data.metrics["count"]]
    assert seen == [begin[:2], begin]


@pytest.mark.parametrize(
    "old, new, error",
    [
        ('said == "7", "No', '1, said == "7", "No', "too many values to unpack"),
        ("float(said", "float(1 / 0 + said", "division by zero"),
    ],
)
def test_an_interaction_that_fails_ends_its_conversation(tmp_path, old, new, error):
    env = build(interaction_config_file=interaction(tmp_path, INTERACTION.replace(old, new)))()
    (rollout,) = converse(env, [["3"]], [{"interaction_kwargs": {"x": 1}}])
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR
    with pytest.raises(EnvironmentFailure, match=error):
        raise rollout.error
    assert importlib.import_module("written_talk").log[-1] == ("finalize", "own")


@pytest.mark.contract("GSM8K tool and interaction")
@pytest.mark.parametrize("unmodified", [True, False])
def test_the_gsm8k_interaction_with_its_yaml(tmp_path, unmodified):
    """verl's own file beside its YAML, and what is built in."""
    config = data_file("plugins/verl/gsm8k_interaction_config.yaml")
    if not unmodified:
        (tmp_path / "talk.yaml").write_text(config.read_text())
        config = tmp_path / "talk.yaml"
    env = build(interaction_config_file=str(config))()
    kwargs = {"name": "gsm8k", "query": "How many?", "ground_truth": "72"}
    (rollout,) = converse(env, [["#### 71", "So #### 72"]], [{"extra_info": {"interaction_kwargs": kwargs}}])
    wrong = "Your response is incorrect! You need to reflect on your answer and try again."
    assert [turn.observation for turn in rollout.turns] == [wrong, None]
    assert [turn.reward for turn in rollout.turns] == [0.0, 1.0] and rollout.reward == 1.0
    assert rollout.environment.agent_data.turn_scores == [0.0, 1.0]  # what tools and rewards of verl read
    (found,) = env.environments.by_name[None].interactions.values()
    assert type(found).__module__ == ("verl.interactions.gsm8k_interaction" if unmodified else BUILT_IN)
    assert vars(found).get("_instance_dict", getattr(found, "states", None)) == {}


# -- what bad input gets, before a model is loaded --


BAD_YAML = {
    "x: 1": "KeyError: 'tools'",
    "tools: [{config: {}}]": "KeyError: 'class_name'",
    "tools: []": "no entry",
    "tools: [{class_name: a.B}]\ntools: [{class_name: a.C}]": "'tools' is set on line 1 and again on line 2",
    "tools: [{class_name: not_there.Tool}]": "No module named 'not_there'",
    "tools: [{class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool}]": "No module named 'verl.tools.sandbox",
    "tools: [{class_name: written_tools.Missing}]": "no attribute 'Missing'",
    "tools: [{class_name: pathlib.Path}]": "'pathlib.Path' of .* no attribute 'tool_schema'",
    "tools: [{class_name: written_tools.Counter, create_kwarg_from: {a: b}}]": "argument 'create_kwarg_from'",
    "tools: [{class_name: written_tools.Counter, tool_schema: {type: function}}]": "function: Field required",
    "tools: [{class_name: written_tools.Counter}, {class_name: written_tools.Counter}]": "are called 'count'",
}


@pytest.mark.parametrize("text", BAD_YAML)
def test_a_bad_yaml_is_rejected(tmp_path, text):
    with pytest.raises(ValueError, match=f"^tools_config_file: .*{BAD_YAML[text]}"):
        build(tools_config_file=counter(tmp_path, NEW, text))


BAD_KEYS = {
    "no file": (dict(tools_config_file="not/there.yaml"), "'not/there.yaml' cannot be read"),
    "a side": (dict(tools_config_file="@", tool_response_truncate_side="top"), "expected one of left, middle, right"),
    "another environment": (dict(tools_config_file="@", environment="@:Other"), "another one"),
    "a game": (dict(tools_config_file="@", environment="gym"), "no effect without"),
    "functions that are none": (dict(function_tool_path="@"), "declares no tool"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_bad_keys_are_rejected(tmp_path, name):
    keys, message = BAD_KEYS[name]
    path, python = counter(tmp_path, NEW), tmp_path / "written_env.py"
    python.write_text("class Other:\n    def reset(self, **row):\n        pass\n")
    found = {"tools_config_file": path, "environment": f"{python}:Other", "function_tool_path": str(python)}
    keys = {key: found[key] if value in ("@", "@:Other") else value for key, value in keys.items()}
    with pytest.raises(ValueError, match=message):
        build(**keys)()


BAD_ROWS = {
    "an unknown tool": ({"tools_kwargs": {"other": {}}}, "names the unknown tool 'other'. Known tools: count"),
    "an unknown step": ({"tools_kwargs": {"count": {"make_kwargs": {}}}}, "has \\['make_kwargs'\\]"),
    "an unknown selection": ({"tool_selection": ["count", "other"]}, "names the unknown tool 'other'"),
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


def test_rows_of_a_table(tmp_path):
    """A table has None where a row lacks what another one has."""
    env = build(tools_config_file=counter(tmp_path, NEW))()
    kwargs = ({"start": 5}, {"other": 1})
    table = Dataset.from_list([{"tools_kwargs": {"count": {"create_kwargs": each}}} for each in kwargs])
    assert table[1]["tools_kwargs"]["count"]["create_kwargs"] == {"start": None, "other": 1}
    rollouts = converse(env, [[call("count"), ANSWER]] * 2, list(table))
    assert [rollout.turns[0].observation for rollout in rollouts] == ["6", "1"]


def test_a_null_that_a_row_of_json_says_is_an_argument(tmp_path):
    """Of tools and of the interaction. A tool, or a step of one, whose arguments are null has none."""
    own = {"create_kwargs": {"start": 5, "of": {"x": None}}, "execute_kwargs": {"z": None}, "release_kwargs": None}
    rows = [
        {"tools_kwargs": {"count": own}, "interaction_kwargs": {"number": 7, "name": None}},
        {"extra_info": {"tools_kwargs": {"count": None}, "interaction_kwargs": {"other": None}}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"prompt": "?"}) + "\n" for row in rows))
    data = load_rows(str(tmp_path / "rows.jsonl"), "train")
    env = build(tools_config_file=counter(tmp_path, NEW), interaction_config_file=interaction(tmp_path))()
    check_dataset(data, "train_dataset", env)
    rollouts = converse(env, [[call("count"), "7"]] * 2, list(data))
    log, talk = (importlib.import_module(name).log for name in ("written_tools", "written_talk"))
    first, second = ({"agent_data": rollout.environment.agent_data} for rollout in rollouts)

    def entries(kind):
        return sorted((entry for entry in [*log, *talk] if entry[0] == kind), key=lambda entry: -len(entry[-1]))

    assert entries("create") == [("create", 5, {"start": 5, "of": {"x": None}}), ("create", 0, {})]
    assert entries("execute") == [("execute", {}, {"z": None, **first}), ("execute", {}, second)]
    assert entries("start") == [("start", {"number": 7, "name": None}), ("start", {"other": None})]


def test_a_class_by_its_path_and_files_beside_a_yaml(tmp_path):
    """No module of verl is looked for beside the YAML but the one that is named."""
    (tmp_path / "schemas.py").write_text("ToolResponse = None")
    (tmp_path / "utils.py").write_text("1 / 0")
    path = counter(tmp_path, NEW, "tools: [{class_name: 'written_tools.py:Counter'}]")
    build(tools_config_file=path)
    (tmp_path / "my_tool.py").write_text((tmp_path / "written_tools.py").read_text())
    env = build(tools_config_file=write_yaml(tmp_path, "tools: [{class_name: verl.tools.my_tool.Counter}]"))()
    (rollout,) = converse(env, [[call("count"), ANSWER]], [{}])
    assert rollout.turns[0].observation == "1"


def test_rows_select_function_tools_without_a_yaml(tmp_path):
    (tmp_path / "written_functions.py").write_text(FUNCTIONS)
    env = build(function_tool_path=str(tmp_path / "written_functions.py"))()
    rows = [{"tool_selection": ["double"]}, {"tools_kwargs": {"waits": {}}}]
    first, second = converse(env, [[call("waits", text="a"), ANSWER], [call("waits", text="a"), ANSWER]], rows)
    assert [rollout.turns[0].error for rollout in (first, second)] == ["call", None]
    # Nobody gives a reward, but what functions return.
    assert not hasattr(first.environment, "get_reward") and not hasattr(first.environment, "respond")
    with pytest.raises(ValueError, match="Row 1: The row names the unknown tool 'triple'"):
        prompt = [{"role": "user", "content": "?"}]
        rows = [{"prompt": prompt, "tool_selection": [name]} for name in ("double", "triple")]
        check_dataset(Dataset.from_list(rows), "train_dataset", env)


def test_a_create_that_is_abandoned_is_released(tmp_path):
    counter(tmp_path, NEW)
    rewrite(
        tmp_path,
        "        return instance_id, ToolResponse()",
        "        import asyncio\n        await asyncio.sleep(3600)",
    )
    env = build(tools_config_file=str(tmp_path / "tools.yaml"))(environment_timeout=0.5)
    (rollout,) = converse(env, [[ANSWER]], [{}])
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR
    log = importlib.import_module("written_tools").log
    for _ in range(100):
        if log[-1][0] == "release":
            break
        time.sleep(0.05)
    assert [step for step, *_ in log] == ["create", "release"]


def test_names_that_clash_are_rejected(tmp_path):
    talk = interaction(tmp_path, text="interaction: [{class_name: written_talk.GuessInteraction, name: count}]")
    with pytest.raises(ValueError, match="A tool is called 'count'"):
        build(tools_config_file=counter(tmp_path, NEW), interaction_config_file=talk)
    rewrite(tmp_path, '"name": "count"', '"name": "agent_data"')
    del sys.modules["written_tools"]
    with pytest.raises(ValueError, match="A tool is called 'agent_data'"):
        build(tools_config_file=str(tmp_path / "tools.yaml"))


def test_a_number_with_an_exponent(tmp_path):
    """As OmegaConf reads it."""
    text = "tools: [{class_name: written_tools.Counter, config: {a: 1e-4, b: 1.5, c: 7}}]"
    (tool,) = load_tools_config(counter(tmp_path, NEW, text)).values()
    assert tool.config == {"a": 1e-4, "b": 1.5, "c": 7}


@pytest.mark.parametrize(
    "returned",
    ["(1, 2, 3, 4)", "('x', float('nan'))", "('x', 'y')", "()", "ToolResponse(text='x', image=[1])", "object()"],
)
def test_what_no_tool_returns_is_an_error(tmp_path, returned):
    counter(tmp_path, {**NEW, "RETURNED": returned})
    env = build(tools_config_file=str(tmp_path / "tools.yaml"))()
    (rollout,) = converse(env, [[call("count"), ANSWER]], [{}])
    assert rollout.turns[0].error == "tool" and rollout.turns[0].results[0].reward is None


DRAWS = """
import random
from PIL import Image


def drawn(seed):
    rng, image = random.Random(seed), Image.new("RGB", (4, 4))
    image.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range(16)])
    return image.resize((56, 56), Image.Resampling.NEAREST)
"""


def with_vision(env, tmp_path, turns, row):
    """A conversation of a model that reads images: (the rollout, its tokenizer)."""
    tokenizer = env.tokenizer = vision_model.reading(vision_model.save(tmp_path / "model"))
    script = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
    with vision_model.read_off_the_loop(tokenizer, at_least=0):  # a video is refused
        return converse(env, [script], [row])[0], tokenizer


@pytest.mark.contract("verl images")
def test_images_of_a_tool_by_yaml(tmp_path):
    """Before the text, as in verl; the text alone is cut. What a tool reads of the conversation has them, too."""
    returned = "ToolResponse(text='0123456789', image=[drawn(1), None, drawn(2)]), 0.5, {'seen': kwargs['agent_data']}"
    shape = {"CREATED": "instance_id, ToolResponse(text='Board:', image=[drawn(0)])", "RETURNED": returned}
    keys = {"max_tool_response_length": 4, "tool_response_truncate_side": "right"}
    path = counter(tmp_path, shape)
    (tmp_path / "written_tools.py").write_text(DRAWS + (tmp_path / "written_tools.py").read_text())
    rollout, tokenizer = with_vision(build(tools_config_file=path, **keys)(), tmp_path, [call("count"), ANSWER], {})
    board, one, two = (tokenizer.pictures.read(vision_model.picture(k), "") for k in range(3))
    begin = f"How many?\n<image {board.name}>Board:"
    assert readable(rollout.prompt_messages[-1]["content"]) == begin
    assert readable(rollout.turns[0].results[0].text) == f"<image {one.name}><image {two.name}>0123...(truncated)"
    assert rollout.turns[0].results[0].reward == 0.5 and rollout.turns[0].error is None
    assert pictures_in(rollout.prompt_ids + rollout.completion_ids) == [board, one, two]
    (seen,) = (metrics["seen"] for metrics in rollout.environment.agent_data.metrics["count"])
    assert [image.tobytes() for image in seen.image_data] == [each.image.tobytes() for each in (board, one, two)]
    assert seen.messages[0]["content"] == begin


def test_images_of_a_function_tool(tmp_path):
    source = (
        DRAWS
        + """
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

@function_tool
def draw(seed: int):
    '''Draws.

    Args:
        seed: Any.
    '''
    return ToolResponse(image=[drawn(seed)]), 0.25
"""
    )
    (tmp_path / "written_functions.py").write_text(source)
    tools = load_integration_tools(settings(function_tool_path=str(tmp_path / "written_functions.py")))
    env = mt.MultiTurnToolEnv(tools, None, 4, tokenizer=CHATML_TOKENIZER)
    refused = env.generate(["?"], Scripted([[call("draw", seed=3), ANSWER]]))["rollouts"][0].turns[0]
    assert refused.error == "tool"
    assert refused.observation == "Error: the tool returned an image, and this run's model reads text alone"
    rollout, tokenizer = with_vision(env, tmp_path, [call("draw", seed=3), ANSWER], {})
    picture = tokenizer.pictures.read(vision_model.picture(3), "")
    assert pictures_in(rollout.completion_ids) == [picture] and rollout.turns[0].results[0].reward == 0.25


@pytest.mark.parametrize("media", ["video=[1]", "image=[drawn(1)], video=[1]"])
def test_videos_of_a_tool_are_refused(tmp_path, media):
    counter(tmp_path, {**NEW, "RETURNED": f"ToolResponse(text='x', {media})"})
    (tmp_path / "written_tools.py").write_text(DRAWS + (tmp_path / "written_tools.py").read_text())
    env = build(tools_config_file=str(tmp_path / "tools.yaml"))()
    rollout, _ = with_vision(env, tmp_path, [call("count"), ANSWER], {})
    assert rollout.turns[0].observation.startswith("Error: the tool returned a video")


@pytest.mark.contract("tools_config_file")
def test_what_the_model_reads_of_a_tool(tmp_path):
    """Its schema as the file has it, also what verl's classes would drop."""
    schema = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {
        "type": "object", "required": ["queries"],
        "properties": {"queries": {"type": "array", "items": {"type": "string"}, "description": "What for."}},
    }}}  # fmt: skip
    text = f"tools: [{{class_name: written_tools.Counter, tool_schema: {json.dumps(schema)}}}]"
    env = build(tools_config_file=counter(tmp_path, NEW, text))()
    (tool,) = env.environments.tools_of_class({}).values()
    assert tool_schema("find", tool) == schema
    assert describe_tools({"find": tool}) == (
        "find(queries: list[str]) -> str\nFinds.\n\nArgs:\n    queries: What for."
    )


# -- search --


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
        yield f"http://127.0.0.1:{port}/retrieve"
    finally:
        process.terminate()
        process.wait(timeout=30)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def asked(url, **body):
    for _ in range(100):  # the line is printed before the port is open
        try:
            return requests.post(url, json=body, timeout=30)
        except requests.exceptions.ConnectionError:
            time.sleep(0.1)
    raise AssertionError("the server does not come up")


def test_the_search_server_speaks_search_r1s_protocol(search_server):
    answer = asked(search_server, queries=["Norman conquest of England", "zxqv"], topk=2, return_scores=True).json()
    (first, second), nothing = answer["result"]
    assert nothing == [] and set(first) == {"document", "score"} and first["score"] >= second["score"] > 0
    assert first["document"]["contents"].split("\n")[0] == "Normans"
    (plain,) = asked(search_server, queries=["Norman conquest of England"], topk=1).json()["result"]
    assert plain == [first["document"]]
    assert len(asked(search_server, queries=["Normans"]).json()["result"][0]) == 3
    for wrong in (dict(), dict(queries="x"), dict(queries=[1]), dict(queries=["x"], topk=0),
                  dict(queries=["x"], topk=101), dict(queries=["x"] * 257)):  # fmt: skip
        response = asked(search_server, **wrong)
        assert response.status_code == 400 and "expected" in response.json()["error"]
    assert requests.post(search_server, data=b"{", timeout=30).status_code == 400
    assert requests.post(search_server, data=b" " * (2**20 + 1), timeout=30).status_code == 413
    assert requests.get(search_server.replace("/retrieve", "/health"), timeout=30).status_code == 200


def test_the_search_server_says_what_is_missing(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/serve_search.py"), "--corpus", str(tmp_path / "none.jsonl")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and "which is not a file" in ended.stderr and "Traceback" not in ended.stderr


class Ray(types.ModuleType):
    """What verl's search tool needs of ray: actors whose methods run in threads."""

    class Handle:
        def __init__(self, cls, args, kwargs, workers):
            self.made, self.pool = cls(*args, **kwargs), ThreadPoolExecutor(workers)

        def __getattr__(self, name):
            def remote(*args, **kwargs):
                return Ray.Result(self.pool.submit(getattr(self.made, name), *args, **kwargs))

            return types.SimpleNamespace(remote=remote)

    class Result:
        def __init__(self, future):
            self.future = future

        def __await__(self):
            return asyncio.wrap_future(self.future).__await__()

    class Actor:
        def __init__(self, cls, workers=8):
            self.cls, self.workers = cls, workers

        def options(self, max_concurrency=8, **kwargs):
            return Ray.Actor(self.cls, max_concurrency)

        def remote(self, *args, **kwargs):
            return Ray.Handle(self.cls, args, kwargs, self.workers)

    @staticmethod
    def remote(*args, **kwargs):
        return Ray.Actor(*args) if args else Ray.Actor

    @staticmethod
    def method(**kwargs):
        return lambda function: function

    @staticmethod
    def get(result):
        return result.future.result()


@pytest.mark.contract("verl search tool")
@pytest.mark.parametrize("unmodified", [True, False])
def test_the_search_tool_against_the_server(search_server, tmp_path, monkeypatch, unmodified):
    """verl's own file, with a stand-in for ray, and what is built in; both with verl's YAML but for the port."""
    if unmodified:
        monkeypatch.setitem(sys.modules, "ray", Ray("ray"))
        monkeypatch.setitem(sys.modules, "ray.actor", types.ModuleType("ray.actor"))
        shutil.copy(data_file("plugins/verl/search_tool.py"), tmp_path)
    config = data_file("plugins/verl/search_tool_config.yaml").read_text()
    assert config.count("http://127.0.0.1:8000/retrieve") == 1
    config = config.replace("http://127.0.0.1:8000/retrieve", search_server)
    asked(search_server, queries=["up"])
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


def test_a_search_asks_for_as_many_passages_and_at_the_same_time_as_its_config_says(search_server):
    config = {"retrieval_service_url": search_server, "topk": 1, "rate_limit": 2}
    tool = SearchTool(config, OpenAIFunctionToolSchema(**SCHEMA_OF_CHECK))
    asked(search_server, queries=["up"])

    async def story():
        response, reward, metrics = await tool.execute("a", {"query_list": ["Norman conquest of England"]})
        assert metrics["total_results"] == 1 and "Doc 1 (" in response.text and "Doc 2 (" not in response.text
        async with tool.slots, tool.slots:  # two requests wait for their answers
            third = asyncio.ensure_future(tool.execute("b", {"query_list": ["Normans"]}))
            await asyncio.sleep(0)
            assert tool.slots.locked() and not third.done()
        assert (await third)[2]["status"] == "success"

    asyncio.run(story())


def test_a_search_service_that_fails(tmp_path, monkeypatch, caplog):
    """A busy one is asked ten times; another error, or an answer of another form, ends it."""
    monkeypatch.setattr("mt_grpo.base.errors._told", set())
    answers, slept = [], []
    monkeypatch.setattr(verl_search.time, "sleep", slept.append)

    def post(url, **kwargs):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        response = requests.Response()
        response.status_code, response._content = answer
        return response

    monkeypatch.setattr(requests, "post", post)
    search = verl_search.perform_single_search_batch
    answers[:] = [requests.ConnectionError("refused"), (503, b""), (200, b'{"result": [[]]}')]
    text, metrics = search("http://x", ["q"])
    assert (text, metrics["status"], slept) == ('{"result": "No search results found."}', "no_results", [1, 2])
    answers[:] = [(404, b"")]
    text, metrics = search("http://x", ["q"])
    assert "404" in text and (metrics["status"], answers) == ("api_error", [])
    assert "A search failed, and the model reads the error" in caplog.text
    answers[:] = [(200, b"<html>")]
    assert "JSON" in search("http://x", ["q"])[1]["api_request_error"]
    answers[:] = [(200, b'{"found": []}')]
    text, metrics = search("http://x", ["q"])
    assert (text, metrics["status"]) == ('{"result": "Search error: http://x: KeyError: \'result\'"}', "api_error")
    answers[:] = [(503, b"")] * 10
    assert "503" in search("http://x", ["q"])[0] and answers == []


# -- tools behind MCP servers --


class EchoServer:
    """Stands for a server that runs: it answers with what it was asked."""

    name = "echoes"

    async def call(self, tool, arguments):
        parts = [types.SimpleNamespace(type="text", text=f"{tool} {arguments}")]
        return types.SimpleNamespace(content=parts, structured_content=None, is_error="bad" in arguments)


def test_a_class_of_ones_own_reads_what_a_server_answers(tmp_path, monkeypatch):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "bad": {"type": "integer"}}}
    tool = types.SimpleNamespace(name="echo", description="Echoes.", input_schema=schema)
    monkeypatch.setattr("mt_grpo.integrations.mcp.tools.start_servers", lambda *given: [(EchoServer(), [tool])])
    text = "tools: [{class_name: written_tools.Own, config: {type: mcp}, mcp: {mcp_servers_config_path: x.json}}]"
    source = """
from verl.tools.mcp_base_tool import MCPBaseTool

class Own(MCPBaseTool):
    def _parse_tool_result(self, content):
        return "own: " + content[0].text, {"parts": len(content)}
"""
    env = build(tools_config_file=write_yaml(tmp_path, text, source))()
    (rollout,) = converse(env, [[call("echo", a=1), call("echo", bad=1), ANSWER]], [{}])
    good, bad, _ = rollout.turns
    assert good.observation == "own: echo {'a': 1}"
    assert bad.error == "tool" and bad.observation == "Error: echo {'bad': 1}"  # which its class does not read
    assert rollout.environment.agent_data.metrics == {"echo": [{"parts": 1}]}


# -- what subclasses of verl's own classes rely on --


def test_the_gsm8k_tool_keeps_verls_state_for_subclasses():
    class Strict(Gsm8kTool):
        async def calc_reward(self, instance_id, **kwargs):
            state = self._instance_dict[instance_id]
            return 1.0 if state["response"] == f"#### {state['ground_truth']}" else 0.0

    async def story():
        tool = Strict({}, OpenAIFunctionToolSchema(**SCHEMA_OF_CHECK))
        own_id, response = await tool.create(ground_truth="72")
        assert len(own_id) == 36 and response.text is None
        assert tool._instance_dict == {own_id: {"response": "", "ground_truth": "72", "reward": 0.0}}
        assert await tool.create("mine", create_kwargs={"ground_truth": "5"}) == ("mine", ToolResponse())
        assert tool._instance_dict["mine"]["ground_truth"] == "5"
        response, reward, metrics = await tool.execute(own_id, {"answer": 72})
        assert (response.text, reward, metrics) == ("Current parsed answer='72' reward=1.0", 0.0, {})
        assert tool._instance_dict[own_id] == {"response": "#### 72", "ground_truth": "72", "reward": 1.0}
        again, reward, _ = await tool.execute(own_id, {"answer": "#### 72"})  # right again, with its mark: no better
        assert (again.text, reward) == ("Current parsed answer='#### 72' reward=1.0", -0.05)
        await tool.release(own_id)
        assert list(tool._instance_dict) == ["mine"]

    asyncio.run(story())


SCHEMA_OF_CHECK = {"type": "function", "function": {"name": "check", "description": "Checks it.", "parameters": {
    "type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}}}  # fmt: skip


def test_the_gsm8k_interaction_keeps_verls_state_for_subclasses(caplog):
    async def story():
        interaction = Gsm8kInteraction({})
        assert await interaction.start_interaction("a", ground_truth=42) == "a"  # of a JSON row
        assert interaction._instance_dict == {"a": {"response": "", "ground_truth": 42, "reward": 0.0}}
        said = [{"role": "assistant", "content": text} for text in ("#### 7", "#### 42")]
        asked = {"role": "user", "content": "#### 42"}
        for messages, response, score in (
            ([said[0], asked, said[1]], "#### 42", 1.0), (said[:1], "#### 7", 0.0), ([asked], "", 0.0),
            ([{"role": "assistant"}], None, 0.0),
        ):  # fmt: skip
            over, text, given, info = await interaction.generate_response("a", messages)
            assert (over, given, info) == (score == 1.0, score, {})
            assert interaction._instance_dict["a"]["response"] == response
        await interaction.finalize_interaction("a", further="ignored")
        assert interaction._instance_dict == {}
        own_id = await interaction.start_interaction()
        assert (await interaction.generate_response(own_id, said))[2] == 0.0

    asyncio.run(story())
    assert ["There is no ground_truth" in text for text in caplog.messages] == [True]


INTERACTIONS = """
interaction:
  - {name: first, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {level: 2}}
  - {name: NAME, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction}
"""


def test_interactions_have_names_of_their_own_which_they_are_told(tmp_path):
    path = tmp_path / "interactions.yaml"
    path.write_text(INTERACTIONS.replace("NAME", "second"))
    found = load_interactions(str(path))
    assert {name: (each.name, each.config) for name, each in found.items()} == {
        "first": ("first", {"level": 2, "name": "first"}), "second": ("second", {"name": "second"}),
    }  # fmt: skip
    path.write_text(INTERACTIONS.replace("NAME", "first"))
    with pytest.raises(ValueError, match="two interactions are called 'first'"):
        load_interactions(str(path))


def test_a_folder_that_is_called_verl_is_not_verl(tmp_path, monkeypatch):
    """tools/ has one: it may stand on the path, as the folder of a recipe's file, and may have been imported."""
    (tmp_path / "verl").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("verl").__spec__.origin is None  # a namespace package: nothing of verl is in it
    verl_paths.install()
    assert importlib.import_module("verl.tools.base_tool").BaseTool is BaseTool


def test_an_installed_verl_is_found_first(tmp_path, monkeypatch):
    """Except for functions and MCP servers, which it does not know."""
    for name in ("", "tools/", "tools/base_tool", "tools/function_tool", "utils/"):
        path = tmp_path / "verl" / (f"{name}__init__.py" if name.endswith("/") or not name else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text("installed = True")
    monkeypatch.syspath_prepend(tmp_path)
    verl_paths.install()
    assert importlib.import_module("verl.tools.base_tool").installed
    assert not hasattr(importlib.import_module("verl.tools.function_tool"), "installed")
    assert importlib.import_module("verl.tools.gsm8k_tool").Gsm8kTool is Gsm8kTool  # which this release lacks


NAMES = """
from verl.interactions.base import BaseInteraction
from verl.interactions.gsm8k_interaction import Gsm8kInteraction
from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from verl.tools.function_tool import function_tool
from verl.tools.gsm8k_tool import Gsm8kTool
from verl.tools.mcp_base_tool import MCPBaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.search_tool import SearchTool
from verl.tools.utils.search_r1_like_utils import perform_single_search_batch
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op
"""


@pytest.mark.parametrize("line", NAMES.strip().splitlines())
def test_a_name_that_official_files_import_is_there(line):
    verl_paths.install()
    exec(line, {})
