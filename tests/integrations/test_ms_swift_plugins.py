"""ms-swift's example plug-ins: their rewards as they are, and all names that its example files import."""

import ast
import asyncio
import http.server
import inspect
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_ms_swift import TOKENIZER, run

from mt_grpo.integrations.ms_swift import paths as swift_paths, rewards as swift_rewards
from mt_grpo.integrations.ms_swift.conversation import ScheduledConversation
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure, weight_of
from mt_grpo.integrations.ms_swift.loss import LossMask, LossScale
from mt_grpo.integrations.ms_swift.recipe import as_reward, check_scheduler, columns_of, completions_of, load_plugin
from mt_grpo.integrations.ms_swift.schedulers import MultiTurnScheduler, RolloutScheduler
from mt_grpo.integrations.plugin_imports import imports_of
from mt_grpo.recipe.plugins import import_file
from mt_grpo.rollout import Turn
from mt_grpo.training.reward_calls import run_rewards

PLUGINS = Path(__file__).resolve().parents[2] / "../shared/data/plugins/ms_swift"
needs_plugins = pytest.mark.skipif(not PLUGINS.is_dir(), reason="ms-swift's example plug-ins are not there")
swift_paths.install()


@pytest.fixture(autouse=True)
def registries():
    """What plug-ins register is of their test."""
    found = [swift_paths.ALL[name] for name in ("orms", "multi_turns", "rm_plugins")]
    before = [dict(each) for each in found]
    yield
    for registry, entries in zip(found, before):
        registry.clear()
        registry.update(entries)


def said(*texts):
    """Conversations that ended with these texts."""
    conversations = []
    for text in texts:
        conversation = ScheduledConversation()
        conversation.reset(prompt=[{"role": "user", "content": "What?"}])
        messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": text}]
        conversation.outputs = [{
            "messages": messages, "finish_reason": "stop", "is_truncated": False, "rollout_infos": {},
            "multi_turn_infos": {}, "response_token_ids": [[1]],
        }]  # fmt: skip
        conversations.append(conversation)
    return conversations


@pytest.fixture()
def services(monkeypatch):
    """A judge of code that accepts what is asked with the input 1, and a judge model that gives seven of ten."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"object": "list", "data": [{"id": "judge", "object": "model", "created": 0, "owned_by": ""}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.startswith("/submissions"):
                verdict = "Accepted" if asked["stdin"] == "1" and "print" in asked["source_code"] else "Wrong Answer"
                self.answer({"status": {"description": verdict}})
            else:
                score = "[[7]]" if "good" in asked["messages"][-1]["content"] else "[[0]]"
                self.answer({"choices": [{"message": {"content": f"Well: {score}"}}]})

        def answer(self, body):
            sent = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("JUDGE0_ENDPOINT", url)
    monkeypatch.setenv("GENRM_API_BASE", f"{url}/v1")
    yield
    server.shutdown()
    server.server_close()


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


@needs_plugins
@pytest.mark.parametrize("name", BY_HAND)
def test_every_example_reward_gives_what_it_gives_in_the_main_thread(name, services):
    """By hand, by the plug-in called here, and as the trainer calls it."""
    for file in ("plugin.py", "gsm8k_plugin.py"):
        import_file(str(PLUGINS / file), "external_plugins")
    texts, columns, right = BY_HAND[name]
    state, settings = SimpleNamespace(global_step=1), SimpleNamespace()
    conversations = said(*texts)
    for conversation, solution in zip(conversations, columns.get("solution", [])):
        conversation.row["solution"] = solution
    reward = swift_paths.registry("orms")[name](args=settings)
    here = reward(completions_of(conversations), **columns_of(conversations), **columns, trainer_state=state)
    here = asyncio.run(here) if inspect.isawaitable(here) else here
    given = {"prompts": [[], []], "environments": conversations, "trainer_state": state, **columns}
    (trained,) = run_rewards([as_reward(name, settings, settings)], given, 60.0, torch.device("cpu"))
    assert here == trained == right


@needs_plugins
def test_no_example_reward_is_left_out():
    """The sandbox of E2B is a service with a key: its reward says what it needs."""
    files = "".join((PLUGINS / file).read_text() for file in ("plugin.py", "gsm8k_plugin.py"))
    registered = {line.split("'")[1] for line in files.splitlines() if line.startswith("orms['")}
    assert registered - set(BY_HAND) == {"external_code_reward"}
    import_file(str(PLUGINS / "plugin.py"), "external_plugins")
    with pytest.raises(ValueError, match="reward_funcs: 'external_code_reward' raised AssertionError"):
        as_reward("external_code_reward", SimpleNamespace(), SimpleNamespace())


# -- what schedulers get, and what they may not have --

SQUARE = {"type": "function", "function": {"name": "square", "description": "Squares a number.", "parameters": {
    "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}}}  # fmt: skip


@pytest.mark.contract("protocol objects")
@pytest.mark.parametrize(
    "column", [[SQUARE], json.dumps([SQUARE]), [json.dumps(SQUARE)]], ids=["list", "text", "texts"]
)
def test_calls_are_objects_and_tools_may_be_json_text(column):
    """The documented forms: a call's attributes, as of ms-swift, and a column of JSON text."""
    seen = []

    class Squares(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            (call,) = response_choice.message.tool_calls
            seen.append((call.type, call.function.name, call.function.arguments, bool(call.id)))
            squared = json.loads(call.function.arguments)["number"] ** 2
            infer_request.messages.append({"role": "tool", "content": str(squared)})
            return {"infer_request": infer_request}

    call = '<tool_call>\n{"name": "square", "arguments": {"number": 7}}\n</tool_call>'
    rollout, llm = run(Squares, call, "It is 49.", row={"tools": column}, max_turns=2)
    assert seen == [("function", "square", '{"number": 7}', True)]
    first, second = (TOKENIZER.decode(read) for read, _ in llm.asked)
    assert '"name": "square"' in first and "Squares a number." in first  # the model read the tool
    assert "49" in second.removeprefix(first) and len(rollout.turns) == 2


@pytest.mark.parametrize("column", ["no JSON", [7]])
def test_tools_that_are_none_are_said(column):
    class Stops(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            raise AssertionError

    with pytest.raises(SchedulerFailure, match="The row's tools is .*expected"):
        run(Stops, "1", row={"tools": column}, max_turns=1)


def test_a_scheduler_with_its_own_async_infer_is_refused_by_name():
    """A tree for the whole batch would never be called, and another conversation would be trained."""

    class Tree(MultiTurnScheduler):
        async def async_infer(self, infer_requests, request_config, *, use_tqdm=None, **kwargs):
            return await super().async_infer(infer_requests[:1], request_config, **kwargs)

        async def run(self, infer_request, request_config, **kwargs):
            raise AssertionError

    class Inherits(Tree):
        pass

    for cls in (Tree, Inherits):
        with pytest.raises(ValueError, match=f"'tree': {cls.__name__} has an async_infer of its own"):
            check_scheduler(cls, "tree")

    class Plain(RolloutScheduler):
        pass

    check_scheduler(Plain, "plain")  # the base's own is no reason


@pytest.mark.contract("rollout_infos", "data_dict")
def test_the_infos_of_all_turns_are_kept_and_the_rows_data_dict_goes_before_its_columns():
    """`num_turns` is counted, whatever the scheduler says."""

    class Notes(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            seen.append(dict(infer_request.data_dict))
            infer_request.messages.append({"role": "user", "content": "Again."})
            infos = {f"turn_{current_turn}": current_turn, "last": current_turn, "num_turns": 70}
            return {"infer_request": infer_request, "rollout_infos": infos}

    seen = []
    row = {"level": 1, "goal": "a column", "data_dict": {"goal": "the row's own"}}
    rollout, _ = run(Notes, "1", "2", "3", row=row, max_turns=3)
    assert rollout.environment.infos == {"turn_1": 1, "turn_2": 2, "last": 2, "num_turns": 3}
    columns = columns_of([rollout.environment])
    assert columns["rollout_infos"] == columns["multi_turn_infos"] == [rollout.environment.infos]
    assert seen[0]["goal"] == "the row's own" and seen[0]["level"] == 1


def test_a_messages_loss_scale_goes_before_its_loss():
    assert weight_of({"loss": True, "loss_scale": 0.0}) is False
    assert weight_of({"loss": False, "loss_scale": 2.0}) is True


# -- the mask of a part of a text --

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


# -- names that plug-ins import --

IMPORTS = """
from swift.llm import ChatCompletionResponseChoice, Messages, PtEngine, RequestConfig, RolloutInferRequest, Template
from swift.llm import TrainArguments, deep_getattr, get_model_arch, get_multimodal_target_regex, to_device
from swift.llm.infer.protocol import ChatCompletionResponse, ChatCompletionResponseChoice, RolloutOutput
from swift.llm.template import RolloutInferRequest
from swift.plugin import ORM, AsyncORM, Metric, MultiTurnScheduler, Tuner, extra_tuners, multi_turns, orms, prms
from swift.plugin import rm_plugins
from swift.plugin.context_manager import ContextManager, context_managers
from swift.plugin.env import Env, envs
from swift.plugin.multi_turn import MultiTurnScheduler, multi_turns
from swift.plugin.orm import ORM, CosineReward, Format, MathAccuracy, MathORM, ReActFormat, ReactORM, orms
from swift.plugin.orm import RepetitionPenalty, SoftOverlong
from swift.plugin.rm_plugin import DefaultRMPlugin
from swift.infer_engine import ChatCompletionResponse, InferRequest, RequestConfig, TransformersEngine
from swift.infer_engine.protocol import ChatCompletionMessageToolCall, Function, RolloutInferRequest, RolloutOutput
from swift.metrics import InferStats, MeanMetric, Metric
from swift.rewards import ORM, AsyncORM, MultiTurnScheduler, multi_turns, orms, rm_plugins
from swift.rewards.orm import MathAccuracy
from swift.rewards.rm_plugin import DefaultRMPlugin
from swift.rollout.gym_env import ContextManager, Env, context_managers, envs
from swift.rollout.multi_turn import Messages, MultiTurnScheduler, OpenEnvScheduler, RolloutScheduler, multi_turns
from swift.template import Messages, Template
from swift.tuners import LoraConfig, Swift
from swift.dataset import DatasetMeta, RowPreprocessor, register_dataset
from swift.utils import get_env_args, get_logger, remove_response, to_device
"""


@pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
def test_a_name_that_official_files_import_is_there(line):
    exec(line, {})


def plugin_of(tmp_path, text):
    path = tmp_path / "a_plugin.py"
    path.write_text(text)
    return str(path)


def test_a_plugin_may_import_a_file_that_stands_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "beside_the_plugin.py").write_text("VALUE = 7\n")
    load_plugin(plugin_of(tmp_path, "from beside_the_plugin import VALUE\nassert VALUE == 7\n"))


def test_what_is_not_offered_is_told_when_the_file_is_loaded_and_raises_where_it_is_used(tmp_path, caplog):
    text = """
from swift.llm import PtEngine, to_device
def reward():
    from swift.plugin import Metric
    return PtEngine
class Own(PtEngine):
    pass
"""
    path = plugin_of(tmp_path, text)
    load_plugin(path)
    (told,) = caplog.messages
    assert "line 2: swift.llm.PtEngine, line 4: swift.plugin.Metric" in told
    from swift.llm import PtEngine

    for make in (PtEngine, type("Own", (PtEngine,), {})):
        with pytest.raises(NotImplementedError, match="PtEngine of ms-swift is not supported here"):
            make("model")


@pytest.mark.parametrize(
    "line, unknown",
    [
        ("from swift.rollout.multi_turn import nothing_such", "line 3: swift.rollout.multi_turn.nothing_such"),
        ("from swift.nothing import such", "line 3: swift.nothing.such"),
    ],
)
def test_an_unknown_import_inside_a_function_is_refused_and_not_in_the_middle_of_a_rollout(tmp_path, line, unknown):
    with pytest.raises(ValueError, match=f"external_plugins: .* imports names that do not exist: {unknown}"):
        load_plugin(plugin_of(tmp_path, f"def step():\n    if True:\n        {line}\n"))


@pytest.mark.parametrize("caught", ["(ImportError, OSError)", ""])
def test_an_import_that_the_plugin_itself_tries_is_its_own_affair(tmp_path, caught):
    text = f"""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from swift.nothing import such
def step():
    try:
        from swift.nothing import such
    except {caught}:
        from swift.rollout.multi_turn import MultiTurnScheduler as such
    return such
"""
    load_plugin(plugin_of(tmp_path, text))
    with pytest.raises(ValueError, match="line 5: swift.nothing.such"):
        load_plugin(plugin_of(tmp_path, "\ntry:\n    pass\nexcept OSError:\n    from swift.nothing import such"))


def test_what_is_registered_for_other_kinds_of_training_is_told(tmp_path, caplog):
    load_plugin(plugin_of(tmp_path, "import swift.plugin\nswift.plugin.extra_tuners['mine'] = object\n"))
    assert caplog.messages[0].startswith("extra_tuners['mine'] of ms-swift has no effect here")


# -- the rewards of ms-swift by name --


def test_the_eight_rewards_of_ms_swift_by_hand():
    """cosine: half a cosine from 1.0 to 0.5 for right answers, from -0.5 to 0.0 for wrong ones."""
    orms = swift_rewards.orms
    assert list(orms)[:8] == [  # plug-ins put theirs behind
        "accuracy", "format", "react_format", "cosine", "repetition", "soft_overlong", "toolbench", "math",
    ]  # fmt: skip
    react = orms["react_format"]()
    assert react(["<think>a</think> Action: f Action Input: {}", "Action: f Action Input: {}"]) == [1.0, 0.0]

    def right(completions, solution, **kwargs):
        return [float(text == gold) for text, gold in zip(completions, solution)]

    cosine = orms["cosine"](SimpleNamespace(max_completion_length=8), accuracy_orm=right)
    texts, gold = ["7", "7", "7", "8", "8"], ["7"] * 5
    ids = [[], [[1, 2], [3, 4]], [1] * 8, [[]], [[1] * 8]]  # 0, 4, 8, 0 and 8 ids
    given = cosine(texts, solution=gold, response_token_ids=ids)
    assert given == pytest.approx([1.0, 0.75, 0.5, -0.5, 0.0])
    repetition = orms["repetition"](SimpleNamespace(repetition_n_grams=2, repetition_max_penalty=-2.0))
    assert repetition(["a b a B", "a b c", "a", ""]) == pytest.approx([-2.0 / 3, 0.0, 0.0, 0.0])
    default = orms["repetition"](SimpleNamespace())
    assert default(["a a a a"]) == [-0.5]  # the same three words twice
    overlong = orms["soft_overlong"](SimpleNamespace(max_completion_length=10, soft_cache_length=4))
    assert overlong([""] * 4, response_token_ids=[[1] * n for n in (6, 8, 10, 14)]) == [0, -0.5, -1.0, -2.0]
    with pytest.raises(ValueError, match="soft_cache_length=None, expected"):
        orms["soft_overlong"](SimpleNamespace(max_completion_length=10))
    for name in ("toolbench", "math"):
        with pytest.raises(ValueError, match=f"reward_funcs: '{name}' raised NotImplementedError: .* not supported"):
            as_reward(name, SimpleNamespace(), SimpleNamespace())


def test_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_LIMIT", "3")
    monkeypatch.setenv("MY_FLAG", "false")
    get = swift_paths.get_env_args
    assert (get("my_limit", int, 7), get("my_flag", bool, True), get("my_other", str, "x")) == (3, False, "x")


TRIES = """
try:
    import verl.tried
except ImportError:
    from verl import otherwise
else:
    import verl.then
finally:
    import verl.always
if TYPE_CHECKING:
    from verl import checked
def later():
    try:
        import verl.wrong_kind, other.module
    except ValueError:
        pass
    with open("x"):
        from verl.inner import one, two
    from .verl import own
"""


def test_all_imports_of_a_file_are_found_but_for_those_that_it_tries():
    """Each part of a `try` but the body, if what may fail there is caught."""
    assert list(map(str, imports_of(ast.parse(TRIES), "verl"))) == [
        "line 5: verl.otherwise", "line 7: verl.then", "line 9: verl.always", "line 14: verl.wrong_kind",
        "line 18: verl.inner.one", "line 18: verl.inner.two",
    ]  # fmt: skip
