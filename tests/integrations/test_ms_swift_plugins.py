"""ms-swift's example plug-ins: their rewards as they are; what schedulers get; the mask of a part of a text."""

import asyncio
import inspect
import json
from types import SimpleNamespace

import pytest
from fault_proxy import Fault, FaultProxy
from scripted_schedulers import PLUGINS, TOKENIZER, answer, run, step_by, user

from mt_grpo.integrations.ms_swift import paths as swift_paths
from mt_grpo.integrations.ms_swift.conversation import ScheduledConversation
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure
from mt_grpo.integrations.ms_swift.loss import LossMask, LossScale
from mt_grpo.integrations.ms_swift.recipe import as_reward, columns_of, completions_of
from mt_grpo.recipe.plugins import import_file
from mt_grpo.rollout import Turn
from mt_grpo.training.rewards import run_rewards


@pytest.fixture(autouse=True)
def registries():
    """What plug-ins register is of their test."""
    before = {name: dict(entries) for name, entries in swift_paths.REGISTRIES.items()}
    yield
    for name, entries in before.items():
        swift_paths.REGISTRIES[name].clear()
        swift_paths.REGISTRIES[name].update(entries)


def ended(text):
    """A conversation that ended with this text."""
    conversation = ScheduledConversation()
    conversation.reset(prompt=[user("What?")])
    infos = {"rollout_infos": {}, "multi_turn_infos": {}, "finish_reason": "stop", "is_truncated": False}
    conversation.outputs = [{"messages": [user("What?"), answer(text)], "response_token_ids": [[1]], **infos}]
    return conversation


@pytest.fixture()
def services(monkeypatch):
    """A judge of code that accepts what is asked with the input 1, and a judge model that gives seven of ten."""

    def answers(request):
        asked = request.payload
        if request.method == "GET":
            body = {"object": "list", "data": [{"id": "judge", "object": "model", "created": 0, "owned_by": ""}]}
        elif request.path.startswith("/submissions"):
            accepted = asked["stdin"] == "1" and "print" in asked["source_code"]
            body = {"status": {"description": "Accepted" if accepted else "Wrong Answer"}}
        else:
            score = "[[7]]" if "good" in asked["messages"][-1]["content"] else "[[0]]"
            body = {"choices": [{"message": {"content": f"Well: {score}"}}]}
        return Fault("answer", status=200, body=json.dumps(body).encode())

    with FaultProxy("http://127.0.0.1:9", answers) as server:
        monkeypatch.setenv("JUDGE0_ENDPOINT", server.url)
        monkeypatch.setenv("GENRM_API_BASE", f"{server.url}/v1")
        yield


CALL = '<tool_call>\n{"name": "f", "parameters": {"x": 1}}\n</tool_call>'
CODE = "<think>a</think><answer>```python\nprint(1)\n```</answer>"
TESTS = {"language": "python", "test_cases": [{"input": "1", "output": "1"}, {"input": "2", "output": "2"}]}
BY_HAND = {  # name -> (what was said, columns, rewards)
    "external_countdown": (
        ["<answer>(1+2)*3</answer>", "<answer>9</answer>"], {"target": [9, 9], "nums": [[1, 2, 3]] * 2}, [1.0, 0.0]),
    "external_r1v_acc": (
        [r"It is \boxed{1/2}", r"It is \boxed{1/3}"], {"solution": ["$0.5$", "$0.5$"]}, [1.0, 0.0]),
    "external_code_format": ([CODE, "print(1)"], {"verification_info": [TESTS] * 2}, [1.0, 0.0]),
    "external_code_reward_by_judge0": ([CODE, "print(1)"], {"verification_info": [TESTS] * 2}, [0.5, 0.0]),
    "async_genrm": (["good", "bad"], {}, [0.7, 0.0]),
    "external_tooluse_format_reward": (
        ["<think>a</think><response>b</response>", "b"], {"solution": ["<response>b</response>"] * 2}, [1.0, 0.0]),
    "external_tooluse_length_reward": (
        [f"<think>{'a ' * 256}</think>b", "b"], {"solution": ["b", "b"]}, [0.5, 0.0]),
    "external_tooluse_correct_reward": ([CALL, "b"], {"solution": [CALL, CALL]}, [3.0, -3.0]),
    "gsm8k_accuracy": (["3 + 4 is 7.\n#### 7", "8"], {"solution": ["so\n#### 7"] * 2}, [1.0, 0.0]),
    "gsm8k_format": (["3 + 4 is 7.\n#### 7", "8"], {}, [1.0, 0.0]),
    "thinking_tips": (["<answer>9</answer>", "<answer>8</answer>"], {"solution": ["9", "9"]}, [1.0, 0.0]),
}  # fmt: skip


@pytest.mark.skipif(not PLUGINS.is_dir(), reason="ms-swift's example plug-ins are not there")
def test_every_example_reward_gives_what_it_gives_in_the_main_thread(services):
    """By hand, by the plug-in called here, and as the trainer calls it."""
    for file in ("plugin.py", "gsm8k_plugin.py"):
        import_file(str(PLUGINS / file), "external_plugins")
    state, settings = SimpleNamespace(global_step=1), SimpleNamespace()
    for name, (texts, columns, right) in BY_HAND.items():
        conversations = list(map(ended, texts))
        for conversation, solution in zip(conversations, columns.get("solution", [])):
            conversation.row["solution"] = solution
        reward = swift_paths.registry("orms")[name](args=settings)
        here = reward(completions_of(conversations), **columns_of(conversations), **columns, trainer_state=state)
        here = asyncio.run(here) if inspect.isawaitable(here) else here
        given = {"prompts": [[], []], "environments": conversations, "trainer_state": state, **columns}
        (trained,) = run_rewards([as_reward(name, settings, settings)], given, 60.0)
        assert (name, here, trained) == (name, right, right)


SQUARE = {"type": "function", "function": {"name": "square", "description": "Squares a number.", "parameters": {
    "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}}}  # fmt: skip


@pytest.mark.contract("protocol objects")
@pytest.mark.parametrize("column", [[SQUARE], json.dumps([SQUARE])], ids=["list", "text"])
def test_calls_are_objects_and_tools_may_be_json_text(column):
    """The documented forms: a call's attributes, as of ms-swift, and a column of JSON text."""
    seen = []

    def step(self, request, choice, turn):
        (call,) = choice.message.tool_calls
        seen.append((call.type, call.function.name, call.function.arguments, bool(call.id)))
        squared = json.loads(call.function.arguments)["number"] ** 2
        request.messages.append({"role": "tool", "content": str(squared)})
        return {"infer_request": request}

    call = '<tool_call>\n{"name": "square", "arguments": {"number": 7}}\n</tool_call>'
    rollout, llm = run(step_by(step), call, "It is 49.", row={"tools": column}, max_turns=2)
    assert seen == [("function", "square", '{"number": 7}', True)]
    first, second = (TOKENIZER.decode(read) for read, _ in llm.asked)
    assert '"name": "square"' in first and "Squares a number." in first  # the model read the tool
    assert "49" in second.removeprefix(first) and len(rollout.turns) == 2
    with pytest.raises(SchedulerFailure, match="The row cannot be a request"):
        run(step_by(step), call, row={"tools": "no JSON"}, max_turns=1)


@pytest.mark.contract("rollout_infos", "data_dict")
@pytest.mark.parametrize("passes", [True, False])
def test_the_infos_of_all_turns_are_kept_and_the_rows_data_dict_goes_before_its_columns(passes):
    """`num_turns` is counted, whatever the scheduler says."""
    seen = []

    def step(self, request, choice, turn):
        seen.append(dict(request.data_dict))
        request.messages.append(user("Again."))
        return request, {f"turn_{turn}": turn, "last": turn, "num_turns": 70}

    row = {"level": 1, "goal": "a column", "data_dict": {"goal": "the row's own"}}
    rollout, _ = run(step_by(step), "1", row=row, max_turns=3, passes=passes)
    assert rollout.environment.infos == {"turn_1": 1, "turn_2": 2, "last": 2, "num_turns": 3}
    columns = columns_of([rollout.environment])
    assert columns["rollout_infos"] == columns["multi_turn_infos"] == [rollout.environment.infos]
    assert seen == [{"goal": "the row's own", "level": 1} if passes else {}] * 2


TEXTS = {1: "abc", 2: "def", 3: "g"}
BYTES = {10: "\N{REPLACEMENT CHARACTER}", 11: "é"}  # two ids of one character: the first alone is no text yet


class Part(LossScale):
    def __init__(self, start, end):
        super().__init__()
        self.start, self.end = start, end

    def get_loss_scale(self, context, *args, **kwargs):
        start, end = self.start, self.end
        return [context[:start], context[start:end], context[end:]], [1.0, 0.0, 1.0]


class Written:
    ends = frozenset({99})

    def text(self, ids):
        text = "".join(TEXTS.get(token, "") for token in ids if token < 10)
        whole = sum(token in BYTES for token in ids)
        return text + ("é" * (whole // 2) + "\N{REPLACEMENT CHARACTER}" * (whole % 2))


@pytest.mark.parametrize(
    "ids, part, mask",
    [
        ([1, 2], (0, 6), [0, 0]), ([1, 2], (0, 3), [0, 1]), ([1, 2], (3, 6), [1, 0]),
        ([1, 2], (1, 6), [1, 0]), ([1, 2], (1, 3), [1, 1]), ([1, 2], (0, 5), [0, 1]), ([1, 2], (2, 4), [1, 1]),
        ([1, 2, 3], (1, 7), [1, 0, 0]), ([1, 2, 3], (2, 6), [1, 0, 1]), ([1, 3, 2], (3, 4), [1, 0, 1]),
        ([1, 10, 11], (3, 4), [1, 0, 0]), ([1, 10, 11], (0, 3), [0, 1, 1]), ([1, 10, 11], (2, 4), [1, 0, 0]),
        ([1, 2, 99], (0, 6), [0, 0, 1]),  # an end of turn is no text
    ],
)  # fmt: skip
def test_an_id_is_masked_where_all_of_its_text_is(ids, part, mask):
    written = Written()
    turn = Turn(ids, None, written.text(ids), "stop")
    assert LossMask("default", (Part(*part),)).mask(turn, None, True, written) == mask
