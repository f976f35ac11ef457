"""`environment: openenv`: sessions of OpenEnv servers over HTTP and WebSockets. The policy is scripted."""

import asyncio
import contextlib
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from accelerate import Accelerator
from openenv_server import CALL_ACTION, Adds, Count, Served
from scripted import QWEN3, make_tokenizer

import mt_grpo_trainer as mt
from mt_grpo.base.event_loop import run_async
from mt_grpo.conversation.tools.results import ResultInParts
from mt_grpo.integrations.openenv.load import ask_server
from mt_grpo.integrations.openenv.server import OpenEnvFailure, OpenEnvServer, on_openenv_loop
from mt_grpo.integrations.openenv.text import CallFailed, OpenEnvText
from mt_grpo.recipe import integrations as choose
from mt_grpo.reports.metrics import conversation_columns, conversation_metrics
from mt_grpo.rollout import Generation, StopReason, Turn

pytestmark = pytest.mark.faults  # a group of scripts/test.sh

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = make_tokenizer(QWEN3)
END = [TOKENIZER.eos_token_id]
COLUMN_ACTION = {
    "type": "object", "required": ["column"],
    "properties": {"metadata": {"type": "object"}, "column": {"type": "integer", "title": "Column"}},
}  # fmt: skip


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Backend:
    """Writes these texts in each conversation, with an end of turn. One in a tuple is cut off."""

    def __init__(self, *turns, max_model_len=4096):
        self.turns, self.begun, self.asked, self.num_aside, self.max_model_len = turns, {}, [], 0, max_model_len

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        k = self.begun[index] = self.begun.get(index, -1) + 1
        turn = self.turns[k]
        sampled = ids(turn) + END if isinstance(turn, str) else ids(turn[0])
        self.asked.append((index, list(prompt_ids), sampled))
        return Generation(sampled, [-0.5] * len(sampled), "stop" if isinstance(turn, str) else "length")

    async def aside(self, awaitable):
        self.num_aside += 1
        return await awaitable


def load(*served, batch=4, args=None, **keys):
    """The class of environments of a recipe."""
    urls = [each if isinstance(each, str) else each.url for each in served]
    script = mt.recipe_classes()[0](environment="openenv", openenv_url=urls[0] if len(urls) == 1 else urls, **keys)
    config = {"output_dir": "x", "use_cpu": True, "bf16": False, "per_device_train_batch_size": batch,
              "num_generations": 2, "tool_format": "hermes", "max_env_steps": 9} | (args or {})  # fmt: skip
    return choose.load_conversation(script, mt.MTGRPOConfig(**config), mt.MultiTurnToolEnv)[1]


def play(cls, *turns, rows=({},), prompt="", max_model_len=4096, **settings):
    backend = Backend(*turns, max_model_len=max_model_len)
    settings = {"tokenizer": TOKENIZER, "tool_format": "hermes", "max_steps": 9, **settings}
    env = mt.MultiTurnToolEnv([], None, environment=cls, **settings)
    prompts = [[{"role": "user", "content": prompt}] if prompt else [] for _ in rows]
    rows = [{**row, "prompt": each} if each else row for row, each in zip(rows, prompts)]
    return env.generate(prompts, backend, rows=rows)["rollouts"], backend


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def rewards(rollout):
    return [turn.reward for turn in rollout.turns]


@pytest.fixture
def counting():
    with Served(Count) as served:
        yield served


# --- a text environment ----------------------------------------------------------------------------------------------


@pytest.mark.contract("OpenEnv")
def test_an_episode_by_hand(counting):
    """What is read, token for token, what each turn is worth, and what reward functions get of the state."""
    (rollout,), backend = play(load(counting), "1", "two", " 5", "<think>Three.</think>3")
    seen = ids("<|im_start|>user\nSay 1.<|im_end|>\n<|im_start|>assistant\n")
    said = ["1", "two", " 5", "<think>Three.</think>3"]
    for text, shown, (_, prompt, _) in zip(
        said, ["Say 2.", "Say a number.", "Say 3.", ""], backend.asked, strict=True
    ):
        assert prompt == seen
        seen = seen + ids(text) + END + ids(f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n")
    assert rewards(rollout) == [1.0, None, 0.0, 1.0] and rollout.reward == 2.0
    assert rollout.error is None and rollout.stop_reason == StopReason.ANSWERED
    sent = [data["message"] for kind, data in counting.received if kind == "step"]
    assert sent == ["1", "two", "5", "3"]  # thinking is not sent
    assert rollout.environment.state == {"episode_id": None, "step_count": 3}
    assert rollout.environment.step_rewards == [1.0, None, 0.0, 1.0] and rollout.environment.episode_done
    assert rollout.turns[-1].info == {"action": {"message": "3"}, "done": True, "observation": {"text": "Say 4."}}
    assert counting.closed.wait(60) and counting.open == 0
    (record,) = rollout.records
    assert sum(record.loss_mask) == sum(len(turn.token_ids) for turn in rollout.turns)


def test_each_conversation_has_a_session_of_its_own(counting):
    rows = [{"reset_kwargs": {"start": start}} for start in (0, 1, 2)]
    rollouts, _ = play(load(counting), "2", "2", "3", rows=rows)
    assert [rewards(rollout) for rollout in rollouts] == [[0.0, 1.0, 1.0], [1.0, 0.0], [0.0]]
    assert [rollout.environment.state["step_count"] for rollout in rollouts] == [3, 3, 3]
    assert len({id(rollout.environment) for rollout in rollouts}) == 3


def test_a_rows_columns_are_arguments_of_reset(counting):
    """Before those of the recipe. A column that is neither is not sent."""
    cls = load(counting, openenv_reset={"seed": 5, "goal": 1, "start": 1})
    rows = [{"seed": 3, "episode_id": "e", "reset_kwargs": {"goal": 2}, "answer": "x"}, {}]
    rollouts, _ = play(cls, "2", "3", rows=rows)
    sent = [data for kind, data in counting.received if kind == "reset"]
    assert sorted(sent, key=len) == [
        {"seed": 5, "goal": 1, "start": 1}, {"seed": 3, "goal": 2, "start": 1, "episode_id": "e"}
    ]  # fmt: skip
    assert rollouts[0].environment.state["episode_id"] == "e"


@pytest.mark.parametrize("row, error", [
    ({"seed": -1}, "seed is -1, expected"),
    ({"episode_id": 7}, "episode_id is 7, expected"),
    ({"reset_kwargs": [1]}, r"reset_kwargs is \[1\], expected"),
    ({"seed": 1, "reset_kwargs": {"seed": 2}}, "The row has 'seed' as a column and in reset_kwargs"),
])  # fmt: skip
def test_a_row_that_is_no_reset_is_refused_before_training(counting, row, error):
    with pytest.raises(ValueError, match=error):
        load(counting).check_row(row)


def test_an_action_that_the_server_refuses_moves_nothing(counting):
    (rollout,), backend = play(load(counting), " ", "1", "2", "3")
    error = "Error: the action does not fit: message: String should have at least 1 character"
    assert rollout.turns[0].observation_ids == ids(f"\n<|im_start|>user\n{error}<|im_end|>\n<|im_start|>assistant\n")
    assert rewards(rollout) == [None, 1.0, 1.0, 1.0]


CALL = call("x")


@pytest.mark.parametrize(
    "turns, most, stop, expected",
    [
        (["1", "2"], 1, StopReason.MAX_TURNS, [1.0, 1.0 - 4.0]),
        (["1", " "], 1, StopReason.MAX_TURNS, [1.0, -4.0]),
        (["1", ("2",)], 9, StopReason.MAX_TOKENS, [1.0, -4.0]),
        (["1", "2", "3"], 9, StopReason.ANSWERED, [1.0, 1.0, 1.0]),
    ],
)
def test_an_episode_that_the_policy_left(counting, turns, most, stop, expected):
    """What it costs is in the outcome and in the last turn. A turn that was cut off is no step."""
    cls = load(counting, openenv_unfinished_reward=-4.0, args={"max_env_steps": most})
    (rollout,), _ = play(cls, *turns, max_steps=most)
    assert (rollout.stop_reason, rewards(rollout), rollout.reward) == (stop, expected, sum(expected))
    assert len([1 for kind, _ in counting.received if kind == "step"]) == len(turns) - (stop == StopReason.MAX_TOKENS)


def test_a_turn_behind_which_nothing_fits_is_one_by_which_the_policy_left(counting):
    (rollout,), _ = play(load(counting, openenv_unfinished_reward=-4.0), "1", max_completion_length=4)
    assert rollout.stop_reason == StopReason.MAX_TOKENS and rollout.turns[-1].finish_reason == "stop"
    assert rewards(rollout) == [1.0 - 4.0] and rollout.reward == -3.0


def test_what_looks_like_a_call_is_text(counting):
    (rollout,), _ = play(load(counting), CALL, "1", "2", "3")
    assert rollout.turns[0].observation_ids == ids(
        "\n<|im_start|>user\nSay a number.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_state_of_a_turn_is_what_was_seen_before_it(counting):
    (rollout,), _ = play(load(counting), "x", "1", "2", "3")
    assert [turn.state_key for turn in rollout.turns] == ["Say 1.", "Say a number.", "Say 2.", "Say 3."]


class Columns(Count):
    def step(self, action):
        return {"board": [action["column"]], "winner": None}, 0.0, action["column"] == 3


def test_actions_of_numbers_are_written_as_json():
    with Served(Columns, COLUMN_ACTION) as served:
        turns = ["<action>1</action>", '<action>{"column": 2}</action>', "two", "3"]
        (rollout,), backend = play(load(served), *turns)
    rules = (
        "Answer with an action as <action>...</action>: JSON of "
        '{"type": "object", "properties": {"column": {"type": "integer"}}, "required": ["column"]}.\n'
    )
    assert rollout.prompt_ids == ids(f"<|im_start|>user\n{rules}Say 1.<|im_end|>\n<|im_start|>assistant\n")
    assert [turn.info["action"] for turn in rollout.turns] == [{"column": 1}, {"column": 2}, None, {"column": 3}]
    assert rollout.turns[0].observation == '{"board": [1]}'
    assert rollout.turns[2].observation.startswith("Error: expected an action as <action>...</action>: JSON of")
    assert rewards(rollout) == [0.0, 0.0, None, 0.0]


def test_a_text_of_ones_own(counting, tmp_path):
    path = tmp_path / "texts.py"
    path.write_text(
        "from mt_grpo.integrations.openenv.text import OpenEnvText\n\n\n"
        "class Loud(OpenEnvText):\n"
        "    def rules(self):\n        return 'Count!\\n'\n\n"
        "    def observation(self, observation):\n        return observation['text'].upper()\n\n"
        "    def action(self, text):\n        return {'message': text.removeprefix('I say ')}\n"
    )
    (rollout,), _ = play(load(counting, openenv_text=f"{path}:Loud"), "I say 1", "2", "3", prompt="Begin.")
    assert rollout.prompt_messages[0]["content"] == "Begin.\nCount!\nSAY 1." and rewards(rollout) == [1.0] * 3
    path.write_text("class Loud:\n    pass\n")
    with pytest.raises(ValueError, match="openenv_text: .* is not a subclass"):
        load(counting, openenv_text=f"{path}:Loud")


IMAGE = "data:image/png;base64,eA=="


def test_images_are_parts_or_are_named():
    shows, names = OpenEnvText({}, images=True), OpenEnvText({})
    seen = {"text": f"Look: {IMAGE} there."}
    assert names.observation(seen) == "Look: [image: not shown] there."
    assert shows.observation(seen) == [
        {"type": "text", "text": "Look: "}, {"type": "image", "image": IMAGE}, {"type": "text", "text": " there."}
    ]  # fmt: skip
    content = [{"type": "text", "text": "A"}, {"type": "image", "data": "eA==", "mimeType": "image/png"}]
    given = {"tool_name": "t", "result": {"content": content, "is_error": False}, "error": None}
    assert names.result(given) == "A\n[image: not shown]"
    assert shows.result(given) == ResultInParts(["A\n", {"type": "image", "image": IMAGE}])


@pytest.mark.parametrize("observation, shown", [
    ({"tool_name": "t", "result": 7, "error": None}, "7"), ({"tool_name": "t", "result": {"a": "ß"}}, '{"a": "ß"}'),
    ({"tool_name": "t", "result": None}, "null"), ({"board": [1], "text": None}, '{"board": [1]}'), ({}, ""),
    ({"tool_name": "t", "result": {"content": [], "is_error": False}}, ""),
    ({"tool_name": "t", "result": {"content": [], "structured_content": {"sum": 7}, "is_error": False}}, '{"sum": 7}'),
])  # fmt: skip
def test_results_read(observation, shown):
    assert OpenEnvText(CALL_ACTION).result(observation) == shown


def test_errors_of_tools_are_errors():
    failed = {"content": [{"type": "text", "text": "no such file"}], "is_error": True}
    for given in ({"result": failed}, {"result": None, "error": {"message": "no such file"}}):
        with pytest.raises(CallFailed, match="^no such file$"):
            OpenEnvText(CALL_ACTION).result(given)


# --- tools -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def adding():
    with Served(Adds, CALL_ACTION, name="Adds") as served:
        yield served


@pytest.mark.contract("OpenEnv")
def test_tools_of_the_server_are_the_models(adding):
    """With their schemas. The rewards of a turn's calls are its reward, in whichever order they were answered."""
    turns = [call("add", n=1), call("add", n=2) + "\n" + call("add", n=3), call("fail"), call("add", n=4)]
    (rollout,), backend = play(load(adding), *turns, prompt="Reach ten.")
    text = TOKENIZER.decode(rollout.prompt_ids)
    for tool in Adds.TOOLS:
        shown = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
        assert json.dumps({"type": "function", "function": shown}) in text
    assert "Reach ten." in text
    assert [[(r.text, r.error) for r in turn.results] for turn in rollout.turns] == [
        [("The sum is 1.", None)], [("The sum is 3.", None), ("The sum is 6.", None)],
        [("Error: Error calling tool 'fail': no", "tool")], [("The sum is 10.", None)],
    ]  # fmt: skip
    assert rewards(rollout) == [0.5, 1.0, None, 0.5] and rollout.reward == 2.0
    assert rollout.stop_reason == StopReason.ENVIRONMENT_STOP and rollout.environment.state == {"sum": 10}


def test_a_turn_without_a_call_ends_the_conversation(adding):
    cls = load(adding, openenv_unfinished_reward=-1.0)
    (rollout,), _ = play(cls, call("add", n=1), "It is one.", prompt="Reach ten.")
    assert rollout.stop_reason == StopReason.ANSWERED and rewards(rollout) == [0.5, -1.0] and rollout.reward == -0.5


def test_a_call_behind_the_end_of_the_episode_is_not_made(adding):
    turn = call("add", n=10) + "\n" + call("add", n=5)
    (rollout,), _ = play(load(adding), turn, prompt="Reach ten.")
    assert [result.text for result in rollout.turns[0].results] == [
        "The sum is 10.", "Error: the episode is over: this call was not made"
    ]  # fmt: skip
    assert rewards(rollout) == [0.5] and rollout.environment.state == {"sum": 10}


def test_what_no_tool_takes_is_the_policys_mistake(adding):
    turns = [call("sub", n=1), call("add", m=1), "Enough."]
    (rollout,), _ = play(load(adding), *turns, prompt="Reach ten.")
    texts = [turn.results[0].text for turn in rollout.turns[:2]]
    assert texts[0].startswith("Error: unknown tool 'sub'. Known tools: add, fail") and "argument: 'n'" in texts[1]
    assert rewards(rollout) == [None, None, None] and rollout.reward == 0.0 and rollout.error is None


class Slow(Adds):
    """A call of -1 waits."""

    begun, release = threading.Event(), threading.Event()

    def step(self, action):
        if action.get("arguments", {}).get("n") == -1:
            self.begun.set()
            assert self.release.wait(60)
        return super().step(action)


def test_a_call_that_is_given_up_counts_and_answers_no_other_one(monkeypatch):
    """At `tool_timeout` a call's task is cancelled. Its answer comes later, and is not that of the next call."""
    for name in ("begun", "release"):
        monkeypatch.setattr(Slow, name, threading.Event())

    async def give_up(env):
        first = asyncio.create_task(env.add(n=-1))
        while not Slow.begun.is_set():
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        reply = asyncio.create_task(env.respond(rollout, turn))  # it waits for the call
        done, _ = await asyncio.wait([reply], timeout=0.1)
        Slow.release.set()
        assert not done and (await reply).reward == 0.5
        second = await env.add(n=6)
        assert second.text == "The sum is 5." and (await env.respond(rollout, turn)).reward == 0.5

    rollout, turn = mt.Rollout([], [], turns=[]), Turn([], None, "", "stop", calls=[None])
    with Served(Slow, CALL_ACTION, name="Slow") as served:
        env = load(served)()
        run_async(env.reset())
        run_async(give_up(env))
        assert env.step_rewards == [0.5, 0.5] and run_async(env.get_reward()) == 1.0
        run_async(env.close())


# --- sessions, and servers that fail ---------------------------------------------------------------------------------


def test_a_server_of_one_session_plays_conversations_one_after_another(caplog):
    """Which is said at the start. Those that wait hold up no batch of tokens."""
    with Served(Count, most=1) as served:
        with caplog.at_level(logging.WARNING):
            cls = load(served)
        assert f"{served.url} opened 1, for 4 of them" in caplog.text
        rollouts, backend = play(cls, "1", "2", "3", rows=[{}] * 4)
        assert served.most_open == 1 and [rewards(rollout) for rollout in rollouts] == [[1.0] * 3] * 4
    assert backend.num_aside == 3


def test_several_servers_share_the_conversations(caplog):
    with Served(Count, most=1) as one, Served(Count, most=1) as other:
        cls = load(one, other, batch=2)
        rollouts, _ = play(cls, "1", "2", "3", rows=[{}] * 4)
        assert len(one.games) > 1 and len(other.games) > 1
    assert "fewer sessions" not in caplog.text and all(rollout.reward == 3.0 for rollout in rollouts)


def test_conversations_go_where_the_largest_share_is_free():
    """A server of one place and one of three: of four conversations three are on the larger one."""
    with Served(Count, most=1) as small, Served(Count, most=3) as large:
        cls = load(small, large, openenv_sessions=3)
        assert [server.places for server in cls.servers] == [1, 3] and cls.most_conversations == 4

        async def taken():
            found = [cls() for _ in range(4)]
            for each in found:
                await each.reset()
            open_now = [len(server.sessions) for server in cls.servers]
            for each in found:
                await each.close()
            return open_now

        before = len(small.headers) + len(large.headers)
        assert run_async(taken()) == [1, 3]
        assert len(small.headers) + len(large.headers) == before + 4  # nobody was refused


def test_a_larger_server_is_asked_for_the_places_that_a_smaller_one_lacks(caplog):
    with Served(Count, most=1) as small, Served(Count, most=9) as large, caplog.at_level(logging.WARNING):
        cls = load(small, large, batch=6)
        assert [server.places for server in cls.servers] == [1, 5] and cls.most_conversations == 6
    assert "fewer sessions" not in caplog.text


def test_a_server_without_room_is_passed_over():
    """At once, and not when the time for a place is over."""
    with Served(Count, most=1) as full, Served(Count, most=1) as free:
        cls = load(full, free, batch=2)
        held = run_async(on_openenv_loop(OpenEnvServer(full.url).open()))  # of another run
        run_async(on_openenv_loop(held.state()))
        cls.seconds_for_a_session = 0.0
        (rollout,), _ = play(cls, "1", "2", "3")
        run_async(on_openenv_loop(held.close()))
    assert (rollout.reward, rollout.error) == (3.0, None)


def test_the_key_bounds_the_sessions(counting, caplog):
    cls = load(counting, openenv_sessions=2)
    assert counting.most_open == 2 and cls.most_conversations == 2
    rollouts, _ = play(cls, "1", "2", "3", rows=[{}] * 6)
    assert counting.most_open == 2 and all(rollout.reward == 3.0 for rollout in rollouts)
    assert "fewer sessions" not in caplog.text


def test_a_place_that_another_run_holds_is_waited_for():
    """And where it is not given back, the rollout fails by name."""
    with Served(Count, most=1) as served:
        cls = load(served, batch=2, openenv_sessions=1)
        server = OpenEnvServer(served.url)
        held = run_async(on_openenv_loop(server.open()))
        run_async(on_openenv_loop(held.state()))
        cls.seconds_for_a_session = 0.0
        (rollout,), _ = play(cls, "1")
        assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR
        assert "at capacity: 1/1" in str(rollout.error)
        cls.seconds_for_a_session = 60.0
        received, refused = served.received, len(served.headers)
        give_back = threading.Thread(target=lambda: (wait_until(lambda: len(served.headers) > refused),
                                                     run_async(on_openenv_loop(held.close()))))  # fmt: skip
        give_back.start()
        (rollout,), _ = play(cls, "1", "2", "3")
        give_back.join(60)
        assert rollout.reward == 3.0 and received


def wait_until(happened):
    while not happened():
        threading.Event().wait(0.01)


def test_a_conversation_that_fails_gives_its_place_back():
    """As one whose prompt fills the context, which asks for no reward, and one whose server's environment raises."""

    class Long(Count):
        def reset(self, start=0, **arguments):
            if start == 2:
                raise ValueError("no such level")
            _, *rest = super().reset(start=start, **arguments)
            return {"text": "x" * 3000 if start == 1 else "Say 1."}, *rest

    with Served(Long, most=1) as served:
        rows = [{"reset_kwargs": {"start": start}} for start in (1, 2, 0)]
        rollouts, _ = play(load(served), "1", "2", "3", rows=rows, max_model_len=1000)
    assert [rollout.stop_reason for rollout in rollouts] == [
        StopReason.CONTEXT_LENGTH, StopReason.ENVIRONMENT_ERROR, StopReason.ANSWERED
    ]  # fmt: skip
    assert "EXECUTION_ERROR): no such level" in str(rollouts[1].error) and rollouts[2].reward == 3.0


def failed_behind(rollouts):
    columns = conversation_columns(rollouts, Accelerator(cpu=True))
    return conversation_metrics(columns)[0]["turns/frac_failed_behind"]


def test_a_server_that_dies_fails_its_rollouts_alone(counting):
    """By name. Those of another server go on."""

    class Dies(Count):
        def step(self, action):
            dying.loop.call_soon_threadsafe(dying.abort)
            threading.Event().wait(0.01)
            return super().step(action)

    with Served(Dies) as dying:
        dying.abort = lambda: [socket._writer.transport.abort() for socket in list(dying.sockets)]
        classes = {"dies": load(dying), "lives": load(counting)}
        rollouts, _ = play(classes, "1", "2", "3", rows=[{"environment": "dies"}, {"environment": "lives"}])
    assert rollouts[0].stop_reason == StopReason.ENVIRONMENT_ERROR and rollouts[0].failed
    assert f"step of {dying.url} was not answered: the session was closed" in str(rollouts[0].error)
    assert rollouts[1].reward == 3.0
    assert failed_behind(rollouts) == 0.5  # the policy's action may be why


def test_a_server_that_is_gone_fails_by_name():
    with Served(Count) as served:
        cls = load(served)
    (rollout,), _ = play(cls, "1")
    assert f"{served.url} does not answer" in str(rollout.error) and rollout.failed


def test_a_call_that_loses_the_server_is_no_error_of_a_tool():
    """The model would read it, and the turns behind it would be trained on."""

    class Lost(Adds):
        def step(self, action):
            return super().step(action) if action["type"] == "list_tools" else "{"

    with Served(Lost, CALL_ACTION, name="Lost") as served:
        (rollout,), _ = play(load(served), call("add", n=1), "Enough.", prompt="Reach ten.")
    assert rollout.failed and "was answered with '{', expected a message 'observation'" in str(rollout.error)
    assert len(rollout.turns) == 1


def message(**data):
    return json.dumps({"type": "observation", "data": data})


NONSENSE = {
    "Say 2.": "was answered with 'Say 2.', expected a message 'observation'",
    "[" * 5000: "was answered with '",
    '"observation"': "expected a message 'observation'",
    '{"type": "state", "data": {}}': "expected a message 'observation'",
    '{"type": "observation"}': "expected a message 'observation'",
    message(observation="Say 2.", done=False): "gave the observation 'Say 2.', expected an object",
    message(observation={}, reward="1", done=False): "gave the reward '1', expected a finite number or null",
    '{"type": "observation", "data": {"observation": {}, "reward": NaN}}': "gave the reward nan",
    message(observation={}, reward=1e300, done=False): "gave the reward 1e[+]300",
    message(observation={}, done="no"): "gave done='no', expected true or false",
    '{"type": "error", "data": {"code": "SESSION_ERROR", "message": "out of memory"}}': "[(]SESSION_ERROR[)]: out of",
}  # fmt: skip


@pytest.mark.parametrize("answer", NONSENSE)
def test_nonsense_ends_its_rollout(answer):
    """And no other one: the second row's server says nothing wrong."""

    class Odd(Count):
        def step(self, action):
            return answer if self.arguments.get("odd") else super().step(action)

    with Served(Odd) as served:
        rows = [{"reset_kwargs": {"odd": True}}, {}]
        rollouts, _ = play(load(served), "1", "2", "3", rows=rows)
        assert served.closed.wait(60)
    assert rollouts[0].stop_reason == StopReason.ENVIRONMENT_ERROR and rollouts[1].reward == 3.0
    assert re.search(NONSENSE[answer], str(rollouts[0].error))


@pytest.mark.parametrize("answer, error", [
    (message(observation={"text": "x"}, done=True), "says done at reset: there is no turn to take"),
    (message(observation=3), "gave the observation 3"),
])  # fmt: skip
def test_a_reset_that_begins_nothing(answer, error):
    with Served(type("Odd", (Count,), {"reset": lambda self, **arguments: answer})) as served:
        (rollout,), _ = play(load(served), "1")
    assert rollout.failed and error in str(rollout.error)
    assert failed_behind([rollout]) == 0.0  # no action of the policy's is why


class Falls(Count):
    """Its environment raises at some texts."""

    def step(self, action):
        if action["message"].startswith("fall"):
            raise OSError("the board fell")
        return super().step(action)


def test_a_step_that_raises_is_an_error_that_the_policy_reads(caplog):
    """Nothing has moved, and the episode goes on. A policy that only has it raise is not rid of its rollout."""
    with Served(Falls) as served:
        cls = load(served, openenv_unfinished_reward=-4.0, args={"max_env_steps": 3})
        with caplog.at_level(logging.WARNING):
            (rollout,), _ = play(cls, "1", "fall", "2", "3", max_steps=3)
        error = "Error: the environment failed at this action: the board fell"
        assert rollout.turns[1].observation_ids == ids(
            f"\n<|im_start|>user\n{error}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert (rewards(rollout), rollout.reward, rollout.error) == ([1.0, None, 1.0, 1.0], 3.0, None)
        (rollout,), _ = play(cls, "fall", "fall", "fall", "fall", max_steps=3)
        assert (rewards(rollout), rollout.reward, rollout.error) == ([None, None, None, -4.0], -4.0, None)
    (told,) = [each.getMessage() for each in caplog.records if "failed on the server" in each.getMessage()]
    assert "the board fell" in told


def test_a_call_that_has_the_environment_raise_is_an_error_of_the_tool():
    class Breaks(Adds):
        def step(self, action):
            if action.get("arguments") == {"n": 13}:
                raise OSError("the abacus broke")
            return super().step(action)

    with Served(Breaks, CALL_ACTION, name="Breaks") as served:
        (rollout,), _ = play(load(served), call("add", n=13), call("add", n=10), prompt="Reach ten.")
    assert "the environment failed at this action: the abacus broke" in rollout.turns[0].observation
    assert rollout.error is None and rollout.environment.episode_done


def test_a_state_that_raises_is_none(caplog):
    def raises(self):
        raise OSError("no state")

    with Served(type("Stateless", (Count,), {"state": property(raises)})) as served:
        (rollout,), _ = play(load(served), "1", "2", "3")
    assert rollout.reward == 3.0 and rollout.environment.state is None
    assert "(EXECUTION_ERROR): no state" in caplog.text


def test_a_step_that_takes_too_long_ends_its_rollout(monkeypatch):
    release = threading.Event()

    class Hangs(Count):
        def step(self, action):
            assert release.wait(60)
            return super().step(action)

    with Served(Hangs) as served:
        (rollout,), _ = play(load(served), "1", environment_timeout=1.0)
        release.set()
    # On a busy machine the time may be over before.
    assert rollout.failed and re.search("(reset|respond) took longer than environment_timeout=1 s", str(rollout.error))


def test_what_no_server_reads_is_no_failure_of_the_server():
    """The policy would be rid of a rollout by it."""
    deep = []
    for _ in range(100_000):
        deep = [deep]

    async def step():
        with pytest.raises(ValueError, match="it is nested too deeply"):
            await session.step({"column": deep})
        with pytest.raises(ValueError, match="it has half of a character"):
            await session.step({"column": json.loads('"\\ud800"')})
        assert not [kind for kind, _ in served.received if kind == "step"]
        await session.close()

    with Served(Columns, COLUMN_ACTION) as served:
        session = run_async(on_openenv_loop(OpenEnvServer(served.url).open()))
        run_async(on_openenv_loop(step()))


# --- before a model is loaded ----------------------------------------------------------------------------------------


def nobody():
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_an_address_where_nobody_answers():
    url = nobody()
    with pytest.raises(ValueError, match=f"^openenv_url: {url} does not answer [(]ClientConnectorError"):
        load(url)


PAGES = [
    ({"/health": (404, "")}, r"is not an OpenEnv server: GET /health returned HTTP 404 and no JSON, expected"),
    ({"/health": (200, '{"status": "degraded"}')}, r"reports the status 'degraded', expected healthy"),
    ({"/schema": (404, "")}, r"runs OpenEnv 0\.1, .* Expected 0\.2 or later: run it with openenv-core>=0\.2\.$"),
    ({"/schema": (200, '{"action": 3}')}, r"GET /schema returned HTTP 200 and .*expected the JSON schemas"),
    ({"/ws": (404, "")}, r"has no sessions: its WebSocket /ws returned HTTP 404\. Use openenv-core>=0\.2"),
]  # fmt: skip


@pytest.mark.parametrize("pages, error", PAGES)
def test_what_is_no_server_of_openenv(pages, error):
    with Served(Count, pages=pages) as served, pytest.raises(ValueError, match=error):
        load(served)


def listing(*tools):
    """An environment that lists other tools."""

    def step(self, action):
        return ({"tools": list(tools)}, None, False) if action["type"] == "list_tools" else Adds.step(self, action)

    return type("Lists", (Adds,), {"step": step})


@pytest.mark.parametrize("tools, error", [
    ([{"description": "Adds."}], 'lists the tool {"description": "Adds."}'),
    (["add"], "which has no name"),
    ([Adds.TOOLS[0]] * 2, "lists two tools 'add'"),
    ([{"name": "respond", "input_schema": {"type": "object"}}], "lists a tool 'respond'"),
    ([{"name": "a", "input_schema": {"type": 5}}], "has the schema .*got a schema of type 5"),
    ([], "lists no tools, but its actions are tool calls"),
])  # fmt: skip
def test_tools_that_no_model_could_call(tools, error):
    with Served(listing(*tools), CALL_ACTION) as served, pytest.raises(ValueError, match=error):
        load(served)


def test_a_tool_without_a_schema_is_said(caplog):
    with Served(listing({"name": "go", "description": "Go."}), CALL_ACTION) as served:
        load(served)
    assert "lists the tool 'go' without a schema" in caplog.text


def test_a_server_whose_sessions_are_all_taken():
    with Served(Count, most=1) as served:
        held = run_async(on_openenv_loop(OpenEnvServer(served.url).open()))
        run_async(on_openenv_loop(held.state()))
        with pytest.raises(
            OpenEnvFailure, match=r"at capacity: 1/1 sessions active\.\. None was free for 0 s, so other"
        ):
            run_async(on_openenv_loop(ask_server(OpenEnvServer(served.url), 4, 0.0)))
        run_async(on_openenv_loop(held.close()))


def test_servers_of_two_environments(counting, adding):
    with pytest.raises(ValueError, match=r"\(Counting\) and .* \(Adds\) take different actions"):
        load(counting, adding)


@pytest.mark.parametrize("keys, error", [
    ({"openenv_url": None}, "environment: openenv needs openenv_url"),
    ({"openenv_url": "127.0.0.1:8000"}, "openenv_url: '127.0.0.1:8000' is not an address"),
    ({"openenv_url": "http://a/?x=1"}, "is not an address"),
    ({"openenv_url": ["http://a", "ws://a/ws"]}, "openenv_url lists http://a twice"),
    ({"openenv_headers": '{"a"'}, "openenv_headers=.* is not JSON"),
    ({"openenv_headers": "[1]"}, r"openenv_headers='\[1\]' is list, expected"),
    ({"openenv_headers": {"a": "$NO_SUCH_VARIABLE"}}, r"openenv_headers uses \$NO_SUCH_VARIABLE"),
    ({"openenv_reset": {"seed": "x"}}, "openenv_reset: seed is 'x', expected"),
    ({"openenv_text": "nothing.py:A"}, "openenv_text: .* names no file"),
])  # fmt: skip
def test_keys_that_cannot_work_are_refused_before_a_server_is_asked(keys, error):
    script = mt.recipe_classes()[0](**{"environment": "openenv", "openenv_url": "http://127.0.0.1:9"} | keys)
    args = mt.MTGRPOConfig(output_dir="x", use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=error):
        choose.load_conversation(script, args, mt.MultiTurnToolEnv)


@pytest.mark.parametrize("keys, args, error", [
    ({}, {"tool_format": "xml"}, "tool_format='xml' does not fit environment: openenv where the server lists"),
    ({"tools_script": "tools/calculator.py"}, {}, "tools_script has no effect with environment: openenv where the"),
])  # fmt: skip
def test_what_does_not_go_with_turns_that_are_actions(counting, keys, args, error):
    with pytest.raises(ValueError, match=error):
        load(counting, args=args, **keys)


def test_headers_reach_the_server_with_their_variables(counting, monkeypatch):
    monkeypatch.setenv("LAKE_TOKEN", "secret")
    play(load(counting, openenv_headers={"Authorization": "Bearer $LAKE_TOKEN"}), "1", "2", "3")
    assert len(counting.headers) > 4
    assert {each.get("Authorization") for each in counting.headers} == {"Bearer secret"}


def test_the_start_leaves_no_session_open(counting):
    load(counting, batch=8)
    assert counting.most_open == 8 and counting.closed.wait(60)
    assert {kind for kind, _ in counting.received} == {"state"}  # nothing was begun


def test_a_session_that_is_asked_twice_at_once_answers_in_order(counting):
    async def both():
        session = await OpenEnvServer(counting.url).open()
        await session.reset({})
        steps = await asyncio.gather(*[session.step({"message": text}) for text in ("1", "2", "x")])
        await session.close()
        return [step.reward for step in steps]

    assert run_async(on_openenv_loop(both())) == [1.0, 1.0, None]


def test_a_turn_of_open_thinking_says_nothing(counting):
    cls = load(counting)
    env = cls()
    run_async(env.reset())
    reply = run_async(
        env.respond(mt.Rollout([], [], turns=[]), Turn([], None, "<think>1", "stop", open_thinking=True))
    )
    assert reply.messages[0]["content"].startswith("Error: the action does not fit") and env.step_rewards == []
    run_async(env.close())


# --- OpenEnv's own package -------------------------------------------------------------------------------------------


REAL_SERVERS = '''
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Adds(MCPEnvironment):
    """Tools of FastMCP."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.sum, mcp = 0, FastMCP("adds")

        @mcp.tool
        def add(n: int) -> str:
            "Add a number to the sum."
            self.sum += n
            return f"The sum is {self.sum}."

        @mcp.tool
        def fail() -> str:
            "Raise."
            raise ValueError("no")

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.sum = 0
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise TypeError("calls alone")

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and seen.error is None:
            seen.reward, seen.done = 0.5, self.sum >= 10
        return seen

    @property
    def state(self):
        return State(sum=self.sum)


class Drop(Action):
    column: int


class Board(Observation):
    board: list[int]


class Columns(Environment):
    """Actions of numbers, and one session."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.episode_id = episode_id
        return Board(board=[seed or 0])

    def step(self, action, timeout_s=None, **kwargs):
        return Board(board=[action.column], reward=True if action.column == 3 else None, done=action.column == 3)

    @property
    def state(self):
        return State(episode_id=self.episode_id, step_count=1)


if sys.argv[1] == "adds":
    app = create_fastapi_app(Adds, CallToolAction, CallToolObservation, max_concurrent_envs=4)
else:
    app = create_fastapi_app(Columns, Drop, Board)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
'''


@contextlib.contextmanager
def started(*command):
    """The address of a server that runs as a process, once it answers."""
    url = nobody()
    process = subprocess.Popen([*map(str, command), url.rpartition(":")[2]], cwd=ROOT, env={"PATH": "/usr/bin:/bin"})
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=60):
                break
            threading.Event().wait(0.05)
        assert process.poll() is None
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.contract_slow("OpenEnv")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["0.2.0", "0.3.0"])
def test_real_servers(version, tmp_path, caplog, monkeypatch):
    """Tools, texts and numbers; and the sample's recipe trains two steps."""
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", f"openenv-core=={version}", "fastmcp"], check=True)
    monkeypatch.chdir(ROOT)
    with started(python, "tools/openenv/frozen_lake.py", "--port") as url:
        path = ["down", "down", "right", "right", "down", "right"]
        rollouts, _ = play(load(url), *[f"<action>{move}</action>" for move in path], rows=[{"episode_id": "e"}] * 3)
        assert [rewards(rollout) for rollout in rollouts] == [[0.0] * 5 + [1.0]] * 3
        assert rollouts[0].environment.state == {"episode_id": "e", "step_count": 6, "place": [3, 3]}
        assert type(rollouts[0].environment).__name__ == "FrozenLake"
        mt.main(["--config", "hf_recipes/tiny/openenv.yaml", "--openenv_url", url, "--max_steps", "2",
                 "--output_dir", str(tmp_path / "out"), "--disable_tqdm", "true"])  # fmt: skip
        history = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
        steps = [row for row in history if "reward" in row]
        assert len(steps) == 2 and all(row["stop/environment_error"] == 0.0 for row in steps)
        assert all(row["rewards/FrozenLake/mean"] < 0.3 for row in steps)
    if version == "0.2.0":  # which has no tools
        return
    (tmp_path / "servers.py").write_text(REAL_SERVERS)
    with started(python, tmp_path / "servers.py", "adds") as url:
        turns = [call("add", n=1), call("add", n=2) + "\n" + call("fail"), call("add", n="x"), call("add", n=7)]
        rollouts, _ = play(load(url), *turns, rows=[{}] * 6, prompt="Reach ten.")
        for rollout in rollouts:
            assert rewards(rollout) == [0.5, 0.5, None, 0.5] and rollout.environment.state["sum"] == 10
            assert rollout.turns[0].results[0].text == "The sum is 1." and rollout.turns[1].results[1].error == "tool"
            assert "valid integer" in rollout.turns[2].results[0].text
    with started(python, tmp_path / "servers.py", "columns") as url:
        rollouts, _ = play(load(url), "<action>9</action>", "<action>no</action>", "3", rows=[{"seed": 4}] * 3)
        assert "opened 1, for 4 of them" in caplog.text
        for rollout in rollouts:
            assert rollout.prompt_messages[0]["content"].endswith('{"board": [4]}')
            assert rewards(rollout) == [None, None, 1.0] and rollout.turns[0].observation == '{"board": [9]}'
