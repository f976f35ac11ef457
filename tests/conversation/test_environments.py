"""One environment per conversation: its tools, its replies, its end, and what happens when it fails."""

import asyncio
import json
import threading

import pytest
import torch
from datasets import Dataset
from project import json_lines
from scripted import (
    ANSWER,
    CHATML_TOKENIZER,
    END,
    QWEN3_TOKENIZER,
    Scripted,
    call,
    echo,
    hermes_call,
    ids,
    make_tokenizer,
    of_turns,
    result,
)
from test_trainer import settings as of_trainer
from tokenizers import pre_tokenizers

from mt_grpo.base.rows import Rows
from mt_grpo.conversation.environments import EnvironmentFailure, Environments, first_unknown, num_ids, read_reply
from mt_grpo.conversation.tools.signature import as_tool, describe_tools, tool_schema
from mt_grpo.recipe.data import load_rows
from mt_grpo.rollout import Reply, Rollout, StopReason, ToolCall, ToolResult, Turn
from mt_grpo.training.rewards import turn_flags
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv


class Opens:
    """Says nothing."""

    def reset(self, **row):
        pass


class Counter:
    """TRL's shape: `reset`, public methods as tools, `get_reward`."""

    def __init__(self):
        self.resets = 0

    def reset(self, start: int = 0, **kwargs) -> str:
        self.value, self.resets = start, self.resets + 1
        return f" The counter is at {start}."

    def add(self, amount: int) -> str:
        """Add to the counter."""
        self.value += amount
        return str(self.value)

    def get_reward(self) -> float:
        return float(self.value)


def verify_records(rollouts, backend):
    """Each record is what the backend saw and sampled, and every sampled token that was kept is trained once."""
    for rollout in rollouts:
        requests = of_turns(backend.of(rollout.index))
        turns = [turn for record in rollout.records for turn in record.turns]
        assert len(requests) == len(rollout.turns) == len(turns) and all(a is b for a, b in zip(turns, rollout.turns))
        left = iter(requests)
        for record in rollout.records:
            seen, mask = list(record.prompt_ids), []
            for turn, request in zip(record.turns, left):
                assert request.prompt == seen and turn.token_ids == request.sampled[: len(turn.token_ids)]
                seen += turn.token_ids + turn.observation_ids
                mask += [1] * len(turn.token_ids) + [0] * len(turn.observation_ids)
            assert (record.prompt_ids + record.completion_ids, record.loss_mask) == (seen, mask)


def run(cls, scripts, rows=None, tools=(), prompt="Count.", **settings):
    settings = {"system_prompt": None, "tokenizer": CHATML_TOKENIZER, "environment": cls, **settings}
    env = MultiTurnToolEnv(tools, settings.pop("system_prompt"), **settings)
    backend = Scripted(scripts)
    rows = rows or [{}] * len(scripts)
    rollouts = env.generate([[{"role": "user", "content": prompt}]] * len(scripts), backend, rows=rows)["rollouts"]
    verify_records([rollout for rollout in rollouts if rollout.error is None], backend)
    return env, rollouts, backend


@pytest.mark.contract("TRL environment classes")
def test_state_is_of_one_conversation_and_the_prompt_is_joined():
    add = call("add", amount=2)
    _, rollouts, backend = run(Counter, [[add, add, ANSWER], [add, ANSWER]], [{"start": 10}, {"start": 20}])
    assert [[t.observation for t in r.turns] for r in rollouts] == [["12", "14", None], ["22", None]]
    assert [r.reward for r in rollouts] == [14.0, 22.0]
    assert rollouts[0].prompt_ids == ids(
        "<|im_start|>user\nCount. The counter is at 10.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert backend.of(0)[1].prompt == rollouts[0].prompt_ids + ids(add) + ids(result("12"))
    assert rollouts[0].stop_reason == StopReason.ANSWERED


def test_what_is_observed_of_a_turn():
    """A result, an error message, a message, a continuation, another history; not: an answer, silence, a stop.

    Nobody reads the result of the move that ends a game, and it is observed and has its reward all the same.
    """
    replies = {
        "say": Reply(messages=[{"role": "user", "content": "Go on."}]), "more": Reply(continuation=" and"),
        "forget": Reply(history=[{"role": "user", "content": "Anew."}]), "end": Reply(stop=True, reward=1.0),
    }  # fmt: skip

    class Replies(Opens):
        def respond(self, rollout, turn):
            return next((reply for word, reply in replies.items() if word in turn.text), None)

    bad, ends = call("nobody"), [call("echo", text="end")]
    scripts = [["say", "more", "forget", "end"], [call("echo", text="x"), bad, ANSWER], ["nothing"], ends]
    _, rollouts, _ = run(Replies, scripts, tools=[echo], max_steps=5)
    assert [[turn.has_observation for turn in rollout.turns] for rollout in rollouts] == [
        [True, True, True, False], [True, True, False], [False], [True]
    ]  # fmt: skip
    assert rollouts[3].stop_reason == StopReason.ENVIRONMENT_STOP and rollouts[3].turns[0].reward == 1.0
    not_run = Rollout([], [1], turns=[Turn([2], None, "", "stop", calls=[ToolCall("echo", {})])])  # max_env_steps
    observed, sampled = turn_flags([*rollouts, not_run], 4)
    assert observed.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0] * 4, [1, 0, 0, 0], [0] * 4]
    assert sampled.int().tolist() == [[1] * 4, [1, 1, 1, 0], *[[1, 0, 0, 0]] * 3]


def test_instances_are_used_again_unless_a_call_was_given_up():
    """The call may still change it."""
    env, first, _ = run(Counter, [[ANSWER], [ANSWER]])
    backend = Scripted([[ANSWER], [ANSWER], [ANSWER]])
    again = env.generate([[{"role": "user", "content": "Count."}]] * 3, backend, rows=[{}] * 3)["rollouts"]
    assert {id(r.environment) for r in first} < {id(r.environment) for r in again}
    assert sorted(r.environment.resets for r in again) == [1, 2, 2]

    class Closes(Counter):
        def close(self):
            self.value = None

    env, (first,), _ = run(Closes, [[ANSWER]])
    (second,) = env.generate(["Count."], Scripted([[ANSWER]]), rows=[{}])["rollouts"]
    assert first.environment is not second.environment and first.environment.value is None

    class Hangs(Counter):
        def wait(self) -> str:
            """Wait."""
            threading.Event().wait(1)

    env, (first,), _ = run(Hangs, [[call("wait"), ANSWER]], tool_timeout=0.1)
    assert first.turns[0].error == "timeout" and first.stop_reason == StopReason.ANSWERED
    (second,) = env.generate(["Count."], Scripted([[ANSWER]]), rows=[{}])["rollouts"]
    (third,) = env.generate(["Count."], Scripted([[ANSWER]]), rows=[{}])["rollouts"]
    assert second.environment is not first.environment and second.environment.resets == 2
    assert third.environment is second.environment


def test_tools_of_the_file_and_of_the_environment_stand_in_the_prompt():
    def shout(text: str) -> str:
        """Shout."""
        return text.upper()

    turns = [call("shout", text="a"), call("add", amount=1), ANSWER]
    _, (rollout,), _ = run(Counter, [turns], tools=[shout], system_prompt="{tool_descriptions}")
    system = rollout.prompt_messages[0]["content"]
    assert system.startswith("shout(text: str) -> str\nShout.\n\nadd(amount: int) -> str\nAdd to the counter.")
    assert [t.observation for t in rollout.turns] == ["A", "1", None]

    def add(a: int) -> int:
        """Add."""

    class Lists(Counter):
        def __init__(self):
            super().__init__()
            self.tools = [add]

    with pytest.raises(ValueError, match="Two tools are called 'add', one of them in Counter"):
        MultiTurnToolEnv([add], None, environment=Counter)
    with pytest.raises(ValueError, match="Two tools are called 'add', one of them in Lists"):
        run(Lists, [[ANSWER]])  # known only when there is an instance


class Board:
    def reset(self, **row):
        return [{"role": "system", "content": "Rules."}, {"role": "user", "content": f"Row {row['n']}."}]

    tools = ()


def test_reset_brings_the_messages_that_a_row_has_not():
    _, (rollout,), _ = run(Board, [[ANSWER]], [{"n": 3}], system_prompt="Not mine.")
    assert rollout.prompt_ids == ids(
        "<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\nRow 3.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rollout.first_messages == rollout.prompt_messages
    env = MultiTurnToolEnv([], None, tokenizer=CHATML_TOKENIZER, environment=Opens)
    (rollout,) = env.generate([[]], Scripted([[ANSWER]]), rows=[{}])["rollouts"]
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR
    assert "reset returned nothing, and the row has no prompt" in str(rollout.error)


def talks(replies):
    """An environment that replies in order."""

    class Talks:
        def reset(self, **row):
            self.left = list(replies)

        def respond(self, rollout, turn):
            return self.left.pop(0) if self.left else None

        def look(self) -> str:
            """Look."""
            return "grass"

    return Talks


USER = [{"role": "user", "content": "Sure?"}]


def test_messages_go_behind_an_answer_and_behind_results():
    replies = [Reply(messages=USER, reward=0.5, info={"a": 1}), Reply(messages=USER), None]
    _, (rollout,), backend = run(talks(replies), [[ANSWER, call("look"), ANSWER]], max_steps=3)
    assert rollout.stop_reason == StopReason.ANSWERED and len(rollout.turns) == 3
    sure = ids("<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")
    assert rollout.turns[0].observation_ids == sure
    both = ids(
        "<|im_end|>\n<|im_start|>user\n<result>\ngrass\n</result><|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert rollout.turns[1].observation_ids == both
    assert backend.of(0)[2].prompt == rollout.prompt_ids + ids(ANSWER) + sure + ids(call("look")) + both
    assert rollout.turns[0].reward == 0.5 and rollout.turns[0].info == {"a": 1}
    assert len(rollout.records) == 1


@pytest.mark.contract("continuations")
def test_a_continuation_behind_a_sampled_end_of_turn_begins_a_record():
    """The end of turn leaves the context of what follows. It is trained where it was sampled."""
    replies = [Reply(continuation=" Wait,")]
    _, (rollout,), backend = run(talks(replies), [["So<|im_end|>", ANSWER]])
    assert backend.of(0)[1].prompt == rollout.prompt_ids + ids("So Wait,")
    first, second = rollout.records
    assert (first.completion_ids, first.turn_ids) == (ids("So<|im_end|>"), [0, 0, 0])
    assert second.prompt_ids == rollout.prompt_ids + ids("So Wait,")
    assert (second.completion_ids, second.turn_ids) == (ids(ANSWER), [1] * len(ids(ANSWER)))
    assert rollout.messages == [{"role": "assistant", "content": "So Wait," + ANSWER}]
    assert rollout.new_tokens == 3 + 6 + len(ids(ANSWER))


@pytest.mark.contract("continuations")
@pytest.mark.parametrize("turn, text", [(ids(ANSWER), " No:"), ([], "So")])
def test_a_continuation_without_one_is_appended(turn, text):
    """xml ends a turn at its closing tag, and some servers leave out the id that ended one."""
    _, (rollout,), backend = run(talks([Reply(continuation=text)]), [[turn, ANSWER]])
    assert backend.of(0)[1].prompt == rollout.prompt_ids + turn + ids(text)
    (record,) = rollout.records
    assert record.loss_mask == [1] * len(turn) + [0] * len(ids(text)) + [1] * len(ids(ANSWER))
    content = CHATML_TOKENIZER.decode(turn) + text + ANSWER
    assert rollout.messages == [{"role": "assistant", "content": content}]


ADDS = hermes_call("add", amount=3)


@pytest.mark.parametrize("tool_format, lead, turn, answer, amount", [
    ("xml", "So: <answer>", "5</answer>", "5", None),
    ("xml", "<answer>1</answer> No: ", "<answer>5</answer>", "5", None),  # what it closes is not the turn's
    ("xml", '<tool>{"name": "add", ', '"args": {"amount": 3}}</tool>', None, 3),
    ("xml", "<answer>a </b>", "5</answer>", "a </b>5", None),
    ("hermes", "So: <answer>It is ", "5</answer><|im_end|>", "It is 5", None),
    ("hermes", ADDS[:22], ADDS[22:] + "<|im_end|>", None, 3),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"amount": "', '<answer>5</answer>"}}</tool_call><|im_end|>',
     None, "<answer>5</answer>"),
    ("hermes", "So: ", "5<|im_end|>", "5", None),  # a text that opens nothing is not the turn's
    ("hermes", "<answer>", "<think>6</think>5<|im_end|>", "<think>6</think>5", None),
    ("xml", "I use <tool> tags. Now: ", "<answer>5</answer>", "5", None),
    ("xml", "I put it in <answer> tags. Now: ", "<answer>5</answer>", "5", None),  # the model opens its own
    ("hermes", "<answer>6 Are you sure? ", "No. <answer>5</answer><|im_end|>", "5", None),
])  # fmt: skip
def test_a_continuation_may_open_an_answer_or_a_call(tool_format, lead, turn, answer, amount):
    """The model goes on inside it, so what it closes is its own. Its ids are those that it sampled."""
    tokenizer = QWEN3_TOKENIZER if tool_format == "hermes" else CHATML_TOKENIZER
    environment, turns = talks([Reply(continuation=lead)]), ["Hm.<|im_end|>", turn, ANSWER]
    _, (rollout,), _ = run(environment, [turns], tool_format=tool_format, tokenizer=tokenizer)
    second = rollout.turns[1]
    assert second.answer == answer and second.token_ids == ids(turn)
    assert [call.arguments for call in second.calls] == ([] if amount is None else [{"amount": amount}])
    assert second.text == turn.removesuffix("<|im_end|>")


@pytest.mark.parametrize("tool_format", ["xml", "hermes"])
def test_an_answer_of_which_an_environment_wrote_parts(tool_format):
    """Several texts in one message: what it opened, be it the model's, is closed in a later turn."""
    tokenizer = QWEN3_TOKENIZER if tool_format == "hermes" else CHATML_TOKENIZER
    environment = talks([Reply(continuation=" of"), Reply(continuation=" the")])
    turns = ["<think><answer>no</think><answer>Rollo", " and", " North</answer>"]
    _, (rollout,), _ = run(environment, [turns], tool_format=tool_format, tokenizer=tokenizer)
    assert rollout.turns[-1].answer == "Rollo of and the North" and not rollout.turns[-1].calls


def test_what_stands_before_a_continuation():
    """A call that was not closed says so, and the text begins another one. Results are cut as others are: a reward
    must not see more of them than the model would have."""
    written = '<tool>{"name": "add"'
    environment = talks([Reply(continuation=" Again: ")])
    good = '<tool>{"name": "add", "args": {"amount": 3}}</tool>'
    _, (rollout,), _ = run(environment, [[written + "<|im_end|>", good, ANSWER]])
    assert "not closed" in rollout.turns[0].calls[0].error
    (second,) = rollout.turns[1].calls
    assert (second.error, second.arguments) == (None, {"amount": 3})

    class Searches(talks([Reply(continuation=" Hm, ")])):
        def look(self) -> str:
            """Look."""
            return "x" * 100 + " gold"

    _, (rollout,), _ = run(Searches, [[call("look"), ANSWER]], max_tool_response_tokens=40)
    (result,) = rollout.turns[0].results
    assert rollout.turns[0].continuation == " Hm, " and "gold" not in result.text and len(ids(result.text)) <= 40
    tokenizer = make_tokenizer(CHATML_TOKENIZER.chat_template)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    assert tokenizer("No:", add_special_tokens=False)["input_ids"] == ids(" No:")
    replies = [Reply(continuation="No:")]
    _, (rollout,), _ = run(talks(replies), [[ANSWER, ANSWER]], tokenizer=tokenizer)
    assert rollout.turns[0].observation_ids == ids("No:")


@pytest.mark.parametrize("turn", [ANSWER, "So<|im_end|>"])
@pytest.mark.parametrize(
    "limits, reason",
    [({"max_completion_length": 60}, StopReason.MAX_TOKENS), ({"max_model_len": 100}, StopReason.CONTEXT_LENGTH)],
)
def test_a_continuation_without_room_ends_the_conversation(turn, limits, reason):
    """It is not in the completion: its tokens would be computed, and nothing would be trained on behind them."""
    _, (rollout,), _ = run(talks([Reply(continuation="x" * 100)]), [[turn]], **limits)
    assert rollout.stop_reason == reason and rollout.completion_ids == ids(turn)
    assert len(rollout.records) == 1 and rollout.messages == [{"role": "assistant", "content": rollout.turns[0].text}]


@pytest.mark.contract("edited histories")
def test_an_edited_history_begins_a_record():
    history = [{"role": "user", "content": "In short: grass."}]
    _, (rollout,), backend = run(talks([Reply(history=history)]), [[call("look"), ANSWER]])
    edited = ids("<|im_start|>user\nIn short: grass.<|im_end|>\n<|im_start|>assistant\n")
    assert backend.of(0)[1].prompt == edited
    assert [(r.prompt_ids, r.completion_ids) for r in rollout.records] == [
        (rollout.prompt_ids, ids(call("look"))), (edited, ids(ANSWER))
    ]  # fmt: skip
    assert rollout.turns[0].observation == "grass" and rollout.turns[0].observation_ids == []
    assert rollout.history == [*history, {"role": "assistant", "content": ANSWER}]
    assert rollout.new_tokens == len(ids(call("look"))) + len(ids(ANSWER))  # a history is no new text


@pytest.mark.parametrize(
    "reply, message",
    [
        ("hello", "returned 'hello', expected"),
        (Reply(messages=USER, stop=True), "a reply with messages and stop. Set only one"),
        (Reply(messages=["hi"]), "messages has 'hi', expected"),
        (Reply(history=[{"role": "assistant", "content": "a"}]), "history ends with an assistant message"),
        ({"mesages": USER}, "E.respond returned .*unexpected keyword argument 'mesages'"),
        (Reply(reward=float("nan")), "reward is nan, expected"),
    ],
)
def test_what_is_no_reply_ends_the_rollout(reply, message):
    with pytest.raises(EnvironmentFailure, match=message):
        read_reply(reply, "E")
    _, (rollout,), _ = run(talks([reply]), [[ANSWER]])
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR


def test_ids_of_a_vocabulary_may_have_gaps():
    """By hand: three tokens, the greatest id is 7. A length of 3 would call 7 unknown. What is added later counts."""

    class Vocabulary(dict):
        __hash__, get_vocab = object.__hash__, dict.copy

    tokenizer = Vocabulary({"a": 0, "b": 1, "<end>": 7})
    assert num_ids(tokenizer, 3) == 8 and first_unknown([0, 7, 1], 8) is None and first_unknown([0, 8], 8) == 8
    tokenizer["<tool>"] = 11
    assert num_ids(tokenizer, 4) == 12


class Slow:
    """Its first call goes on behind its time limit until a second one begins, or for a second and a half."""

    def reset(self, **row):
        self.calls, self.second, self.overlap = 0, threading.Event(), False

    def look(self) -> str:
        """Look."""
        self.calls += 1
        if self.calls == 1:
            self.overlap = self.second.wait(1.5)
        else:
            self.second.set()
        return f"look {self.calls}"


@pytest.mark.parametrize("turns", [[call("look"), call("look"), ANSWER], [call("look") * 2, ANSWER]])
def test_a_call_that_was_given_up_is_over_before_the_next_one_begins(turns):
    """In the next turn, and in the same one."""
    tool_format = {"tool_format": "hermes", "tokenizer": QWEN3_TOKENIZER} if len(turns) == 2 else {}
    if tool_format:
        turns = [hermes(("look", {}), ("look", {})), "5<|im_end|>"]
    _, (rollout,), _ = run(Slow, [turns], tool_timeout=0.1, **tool_format)
    results = [result for turn in rollout.turns for result in turn.results]
    assert [result.error for result in results] == ["timeout", None] and results[1].text == "look 2"
    assert rollout.environment.overlap is False and rollout.error is None


@pytest.mark.parametrize("asked_by", ["tool", "respond", "get_reward", "reward functions"])
def test_a_call_that_stays_busy_behind_its_time_limit_ends_its_rollout(asked_by):
    """Reward functions get the live instance, so none that is busy."""
    over = threading.Event()

    class Busy(Opens):
        def look(self) -> str:
            """Look."""
            over.wait()
            return "seen"

    if asked_by == "respond":
        Busy.respond = lambda self, rollout, turn: None
    if asked_by == "get_reward":
        Busy.get_reward = lambda self: 1.0
    try:
        script = [call("look"), call("look") if asked_by == "tool" else ANSWER, ANSWER]
        _, (rollout,), _ = run(Busy, [script], tool_timeout=0.1, environment_timeout=0.2)
    finally:
        over.set()
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR and rollout.reward is None
    assert "Busy: a call abandoned at tool_timeout still runs" in str(rollout.error)


def failing(where, hang=False):
    def fail(self=None, *args, **kwargs):
        if hang:
            threading.Event().wait(5)
        raise OSError("no disk")

    class Fails(Counter):
        closed = []

        def close(self):
            Fails.closed.append(self)

    setattr(Fails, where, fail)
    return Fails


@pytest.mark.parametrize(
    "where, hang",
    [("__init__", False), ("reset", False), ("respond", False), ("get_reward", False), ("respond", True)],
)
def test_a_failing_environment_ends_its_rollout(where, hang):
    cls = failing(where, hang)
    _, (rollout,), _ = run(cls, [[ANSWER]], environment_timeout=1.5)  # enough for what does not hang
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR
    named = "Fails" if where == "__init__" else f"Fails.{where}"
    said = f"{named} took longer than environment_timeout=1.5 s" if hang else f"{named} raised OSError: no disk"
    assert said in str(rollout.error)
    assert len(cls.closed) == (where != "__init__")  # closed whatever happened


def test_close_runs_where_the_server_dies():
    class Closes(Counter):
        closed = []

        def close(self):
            Closes.closed.append(self.value)

    class Dies(Scripted):
        both = asyncio.Event()

        async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
            if index == 1:
                await self.both.wait()
                raise ConnectionError("gone")
            self.both.set()
            await asyncio.sleep(30)

    env = MultiTurnToolEnv([], None, tokenizer=CHATML_TOKENIZER, environment=Closes)
    with pytest.raises(ConnectionError):
        env.generate(["a", "b"], Dies([[], []]), rows=[{"start": 1}, {"start": 2}])
    assert sorted(Closes.closed) == [1, 2]


def test_an_environment_that_nobody_waits_for_is_closed():
    """Its conversation is cancelled while it is made."""
    ready, go, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Counter):
        def __init__(self):
            super().__init__()
            ready.set()
            assert go.wait(30)

        async def close(self):
            closed.set()

    env = MultiTurnToolEnv([], None, tokenizer=CHATML_TOKENIZER, environment=Slow)
    (rollout,) = env.start(["a"], rows=[{}])

    async def cancelled():
        task = asyncio.create_task(env.converse(rollout, Scripted([[]])))
        await asyncio.to_thread(ready.wait, 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    env.close([rollout])
    go.set()
    assert closed.wait(20)


def test_a_row_that_reset_would_not_take_is_refused_before_training():
    """By the names of the argument and of the columns; so is a key that only one row lacks, or has."""

    class Board(Counter):
        def reset(self, board: str, **row) -> str:
            return board

    class Strict(Counter):
        def reset(self, start: int = 0) -> None:
            super().reset(start)

    def refused(cls, rows):
        with pytest.raises(ValueError) as error:
            Environments(cls, 1.0, {}).check_rows(rows)
        return str(error.value)

    needs = "Board.reset does not accept the columns start: missing a required argument: 'board'. Rename"
    assert needs in refused(Board, Dataset.from_dict({"start": [4]}))
    assert refused(Board, Rows([{"board": "x"}, {"start": 4}])).startswith(f"Row 1: {needs}")
    assert "unexpected keyword argument 'end'" in refused(Strict, Rows([{"start": 1}, {"end": 2}]))
    Environments({"a": Board, "b": Strict}, 1.0, {}).check_rows(
        Rows([{"environment": "a", "board": "x"}, {"environment": "b"}])
    )


def hermes(*calls):
    """A turn with these calls, (name, arguments) each, as Qwen3 writes it."""
    return "\n".join(hermes_call(name, **arguments) for name, arguments in calls) + "<|im_end|>"


def run_hermes(cls, *turns, **settings):
    _, (rollout,), backend = run(cls, [list(turns)], tokenizer=QWEN3_TOKENIZER, tool_format="hermes", **settings)
    return rollout, backend


def test_the_methods_of_an_environment_run_one_after_another_and_other_tools_at_the_same_time():
    def pair(seconds):
        barrier = threading.Barrier(2)

        def meet() -> str:
            try:
                barrier.wait(seconds)
            except threading.BrokenBarrierError:
                return "alone"
            return "together"

        return meet

    def listed() -> str:
        """Meet another call of the environment, too."""
        return own()

    class Meets(Counter):
        def __init__(self):
            super().__init__()
            self.tools = [listed]  # over the state, as a closure may be

        def own(self) -> str:
            """Meet another call of the environment."""
            return own()

    def shared() -> str:
        """Meet another call of the file's tool."""
        return other()

    for second in ("own", "listed"):
        own, other = pair(0.3), pair(10)  # the second only bounds a hang
        calls = [("own", {}), ("shared", {}), (second, {}), ("shared", {})]
        rollout, _ = run_hermes(Meets, hermes(*calls), "Done.<|im_end|>", tools=[shared])
        assert [result.text for result in rollout.turns[0].results] == ["alone", "together", "alone", "together"]


def test_calls_beyond_the_limit_are_answered_with_an_error(monkeypatch):
    monkeypatch.setattr(MultiTurnToolEnv, "MAX_PARALLEL_CALLS", 2)

    class Slow(Counter):
        async def late(self) -> str:
            """Come late."""
            await asyncio.sleep(0.05)
            return "late"

    turn = hermes(("late", {}), ("add", {"amount": 2}), ("add", {"amount": 3}))
    rollout, backend = run_hermes(Slow, turn, "Done.<|im_end|>")
    error = "Error: not run, since a turn may have at most 2 calls. Call it again."
    assert [(r.text, r.error) for r in rollout.turns[0].results] == [("late", None), ("2", None), (error, "call")]
    assert rollout.reward == 2.0  # the third was not run
    results = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in ("late", "2", error))
    read = f"\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n"
    assert backend.of(0)[1].prompt == rollout.prompt_ids + ids(turn) + ids(read)


def test_what_is_read_and_is_no_answer():
    """A text that the budget cut off, and an environment's tool message without a name."""
    rollout, _ = run_hermes(Counter, "It is five.<|im_end|>", max_turn_tokens=5)
    assert (rollout.turns[0].text, rollout.turns[0].answer) == ("It is", None)
    assert rollout.stop_reason == StopReason.MAX_TOKENS
    replies = [Reply(messages=[{"role": "tool", "content": "later"}]), None]
    rollout, _ = run_hermes(talks(replies), "It is 5.", "It is 5.", max_steps=2)
    assert rollout.error is None and rollout.turns[0].observation == "later"


def test_a_row_chooses_its_environment():
    """Which is not passed to `reset` where it chooses."""
    env = MultiTurnToolEnv([], None, tokenizer=CHATML_TOKENIZER, environment={"count": Counter, "board": Board})
    rows = [{"environment": "board", "n": 1}, {"environment": "count", "start": 4}]
    rollouts = env.generate(["x", "x"], Scripted([[ANSWER], [ANSWER]]), rows=rows)["rollouts"]
    assert [type(r.environment) for r in rollouts] == [Board, Counter]
    with pytest.raises(ValueError, match="environment='chess', expected"):
        env.environments.class_of({"environment": "chess"})

    class Strict(Counter):
        def reset(self, start: int) -> None:
            super().reset(start)

    rows = [{"environment": "strict", "start": 4}]
    _, (rollout,), _ = run({"strict": Strict}, [[ANSWER]], rows)
    assert rollout.error is None and rollout.reward == 4.0

    class Reads(Counter):
        def reset(self, environment: str, method: str, rollout: str) -> str:  # names that functions of ours have too
            super().reset()
            return f"{environment} {method}, {rollout}"

    row = {"environment": "forest", "method": "by hand", "rollout": "third"}
    _, (rollout,), _ = run(Reads, [[ANSWER]], [row], prompt="In the ")  # it chooses nothing
    assert rollout.first_messages == [{"role": "user", "content": "In the forest by hand, third"}]


def test_what_a_turn_was_told_stays_as_it_was():
    """A board that is changed in place: each turn keeps its own state and what its reply said."""

    class Game:
        def reset(self, **row):
            self.board = [0, 0]

        def state_key(self):
            return self.board

        def respond(self, rollout, turn):
            self.board[len(rollout.turns) - 1] += 1
            return Reply(messages=USER if len(rollout.turns) < 2 else [], info={"board": self.board})

    _, (rollout,), _ = run(Game, [[ANSWER, ANSWER]], max_steps=2)
    assert [turn.state_key for turn in rollout.turns] == [[0, 0], [1, 0]]
    assert [turn.info for turn in rollout.turns] == [{"board": [1, 0]}, {"board": [1, 1]}]


def says(kind, text):
    """An environment that says a text: at first, or behind the first turn."""

    class Says:
        def reset(self, **row):
            return f" {text}" if kind == "reset" else None

        def respond(self, rollout, turn):
            if len(rollout.turns) > 1 or kind == "reset":
                return None
            message = {"role": "user", "content": text}
            return Reply(**{kind: text if kind == "continuation" else [message]})

    return Says


@pytest.mark.parametrize("kind", ["reset", "messages", "continuation", "history"])
def test_what_may_fit_is_read_as_it_was(kind, monkeypatch):
    """Around every limit: the same ids, turns and ends as where each text is tokenised whole."""
    limits = {"max_model_len": 400, "max_completion_length": 300, "max_steps": 3}

    def ends():
        told = []
        for size in (10, 250, 290, 300, 330, 350, 370, 390, 400, 410, 900, 2900, 3100, 4000):
            _, (rollout,), _ = run(says(kind, "x" * size), [["one<|im_end|>", ANSWER]], **limits)
            told.append((rollout.stop_reason, rollout.history_ids if rollout.error is None else None))
        return told

    found = ends()
    for place in ("mt_grpo.conversation.conversations", "mt_grpo.conversation.formats.base"):
        monkeypatch.setattr(f"{place}.cut_messages", lambda messages, *_: messages)
    monkeypatch.setattr("mt_grpo.conversation.formats.base.cut_far_beyond", lambda text, *_: text)
    expected = ends()
    assert [each[0] for each in found] == [each[0] for each in expected]
    read = [k for k, each in enumerate(expected) if each[0] not in (StopReason.CONTEXT_LENGTH, StopReason.MAX_TOKENS)]
    assert read and all(found[k] == expected[k] for k in read)


PROPERTIES = {
    "limit": {"type": "integer", "default": 3},
    "word": {"type": "string", "description": "What to look up."},
    "lang": {"enum": ["en", "de"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["word"]}
SCHEMA = {
    "type": "function",
    "function": {"name": "lookup", "description": "Look a word up.", "parameters": PARAMETERS},
}


class Lookup:
    name, schema = "lookup", SCHEMA

    def __init__(self, found="grass"):
        self.found = found

    async def run(self, word, limit=3, lang="en"):
        return f"{word} {limit} {lang}: {self.found}"


class Plain(Lookup):
    """Its schema is a method, and that of a function alone."""

    name = "plain"

    def schema(self):
        return {**SCHEMA["function"], "name": "plain"}

    def run(self, **arguments) -> ToolResult:
        return ToolResult(json.dumps(arguments), reward=0.5)


def test_a_tool_may_be_an_object():
    assert describe_tools({"lookup": as_tool(Lookup())}) == (
        "lookup(word: str, limit: int = 3, lang: Literal['en', 'de'] = ...) -> str\n"
        "Look a word up.\n\nArgs:\n    word: What to look up."
    )
    assert tool_schema("lookup", as_tool(Lookup())) == SCHEMA
    first = [call("lookup", word="a"), call("lookup", word="a", limit=5), ANSWER]
    env = MultiTurnToolEnv([Lookup(), Plain()], None, 3, tokenizer=CHATML_TOKENIZER)
    scripts = [first, [call("plain", word="b", lang="de"), ANSWER]]
    one, two = env.generate(["?", "?"], Scripted(scripts))["rollouts"]
    assert [turn.observation for turn in one.turns] == ["a 3 en: grass", "a 5 en: grass", None]
    assert two.turns[0].results == [
        ToolResult('{"word": "b", "lang": "de"}', seconds=two.turns[0].tool_seconds, reward=0.5)
    ]


def test_a_tool_may_have_parameters_whose_names_python_does_not_take():
    """Of JSON they are ordinary names; a call that lacks one is told so. Further ones are what the schema says."""
    tool, usage = Plain(), "plain(word: str, from: str, max-n: Any = ..., **others: None) -> str"
    properties = {"word": {"type": "string"}, "from": {"type": "string", "description": "Whose."}, "max-n": {}}
    parameters = {"type": "object", "properties": properties, "required": ["word", "from"]}
    parameters["additionalProperties"] = {"type": "null"}
    tool.schema = {"name": "plain", "description": "Find.", "parameters": parameters}
    named = {"plain": as_tool(tool)}
    assert describe_tools(named) == f"{usage}\nFind.\n\nArgs:\n    from: Whose."
    assert tool_schema("plain", named["plain"])["function"] == tool.schema
    calls = [{"word": "a", "from": "b", "max-n": 3}, {"word": "a"}, {"word": "a", "from": "b", "title": None}]
    env = MultiTurnToolEnv([tool], None, 4, tokenizer=CHATML_TOKENIZER)
    scripts = [[*(call("plain", **arguments) for arguments in calls), ANSWER]]
    (rollout,) = env.generate(["?"], Scripted(scripts))["rollouts"]
    assert [turn.observation for turn in rollout.turns[:3]] == [
        '{"word": "a", "from": "b", "max-n": 3}',
        f"Error: missing a required argument: 'from'. Usage: {usage}",
        '{"word": "a", "from": "b", "title": null}',
    ]


def settings(folder, **changes):
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 64}
    return MTGRPOConfig(**of_trainer(folder, **{**sizes, **changes}))


def one_step(model, folder, environment, rows, rewards=(), **changes):
    """A trainer, and its batch of one group of four short conversations."""
    rows = [{"prompt": [{"role": "user", "content": "go"}], **row} for row in rows]
    trainer = MTGRPOEnvTrainer(
        model, MultiTurnToolEnv([], None, environment=environment), [], list(rewards),
        args=settings(folder, num_generations=4, max_steps=1, **changes), train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    trainer.llm = Scripted([[[65, END]]] * 4, tokenizer=trainer.processing_class)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer, trainer._generate_and_score_completions(rows)


@pytest.mark.contract("TRL environment classes")
def test_a_step_with_environments(random_model, tmp_path):
    """Their rewards are columns, a failed one is in nobody's statistics, and all are closed behind the rewards."""
    seen, numbers = {}, iter([1, 2, 3, 4])

    class Numbered:
        closed = []

        async def reset(self, **row) -> str:
            self.n = next(numbers)
            if self.n == 3:
                raise OSError("no board")
            return " on."

        def respond(self, rollout, turn):
            return Reply(reward=self.n / 10)

        def get_reward(self) -> float:
            return float(self.n)

        def close(self) -> None:
            Numbered.closed.append(self.n)

    def custom(environments, rollout_turns, prompts, **kwargs):
        seen["environments"], seen["closed"] = [e.n for e in environments], list(Numbered.closed)
        assert [prompt[0]["content"] for prompt in prompts] == ["go on."] * 3
        return [1.0] * len(environments)

    trainer, batch = one_step(random_model, tmp_path, Numbered, [{}] * 4, [custom])
    assert sorted(Numbered.closed) == [1, 2, 3, 4]
    assert len(seen["environments"]) == 3 and seen["closed"] == []
    assert trainer.reward_func_names == ["environment", "tool", "custom", "Numbered"]
    failed = [r.stop_reason == StopReason.ENVIRONMENT_ERROR for r in trainer.batch.rollouts]
    assert sum(failed) == 1
    row = failed.index(True)
    assert batch["advantages"][row].abs().sum() == 0
    assert (batch["tool_mask"] * batch["completion_mask"])[row].sum() == 0
    assert batch["advantages"].abs().sum() > 0
    rewards = trainer.batch.logged
    assert rewards[row].isnan().all()
    kept = [i for i in range(4) if i != row]
    assert sorted(rewards[kept, 3].tolist()) == [1.0, 2.0, 4.0]
    assert sorted(round(v, 4) for v in rewards[kept, 0].tolist()) == [0.1, 0.2, 0.4]


def alters(change):
    """An environment that alters its second conversation."""

    class Alters:
        def reset(self, n, **row):
            self.n = n

        def respond(self, rollout, turn):
            if self.n == 1:
                change(rollout, turn)

        def get_reward(self):
            return float(self.n)

    return Alters


ALTERED = [
    (lambda r, t: setattr(t, "mask", [1]), r"turn 0: mask is \[1\], expected None, or a 0 or 1"),
    (lambda r, t: t.token_ids.append(65), "turn 0 has 2 logprobs, expected one for each of 3 tokens"),
    (lambda r, t: r.turns.append("a turn"), "turns\\[1\\] is 'a turn', expected a Turn"),
    (lambda r, t: t.observation_ids.append(10**6), "observation_ids has the id 1000000, expected numbers below"),
    (lambda r, t: r.turns.append(Turn([65], [-1.0], "", "stop", after=7)), "its turns form no valid records"),
    (lambda r, t: setattr(r, "index", 0), "rollout.index is set by the trainer and cannot be changed from 1 to 0"),
]


@pytest.mark.parametrize("change, message", ALTERED)
def test_an_environment_that_alters_its_rollout_fails_and_ends_no_run(random_model, tmp_path, change, message):
    """Whether tokens are logged or not. The three others are trained as if it had not been there."""
    rows = [{"n": n} for n in range(4)]
    trainer, batch = one_step(random_model, tmp_path, alters(change), rows, log_rollouts=4, log_rollout_tokens=True)
    assert [rollout.failed for rollout in trainer.batch.rollouts] == [False, True, False, False]
    with pytest.raises(EnvironmentFailure, match=message):
        raise trainer.batch.rollouts[1].error
    trained = (batch["tool_mask"] * batch["completion_mask"]).sum(1)
    assert trained.tolist() == [2, 0, 2, 2] and trainer.batch.logged[1].isnan().all()
    rewards = torch.tensor([0.0, 2.0, 3.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert torch.allclose(batch["advantages"][[0, 2, 3], 0], expected)
    assert "rollout" in json_lines(tmp_path / "rollouts.rank0.jsonl")[1]["error"]


class Asks:
    """It brings the whole prompt."""

    asked = 0

    def reset(self, **row) -> list:
        Asks.asked += 1
        return [{"role": "user", "content": f"Row {row.get('n')}."}]

    def get_reward(self) -> float:
        return float(Asks.asked)


@pytest.mark.parametrize("rows", [None, [{"n": n} for n in range(4)], [{"n": n, "prompt": None} for n in range(4)]])
def test_an_environment_may_bring_the_prompts(random_model, tmp_path, rows):
    """Without a dataset `max_steps` says where the run ends, as in TRL. An epoch of four rows has two batches."""
    data = None
    if rows is not None:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = load_rows(str(tmp_path / "rows.jsonl"), "train", needs_prompt=False)
        assert set(data.column_names) == set(rows[0])
    env = MultiTurnToolEnv([], None, environment=Asks)
    trainer = MTGRPOEnvTrainer(random_model, env, args=settings(tmp_path / "out"), train_dataset=data)
    assert len(trainer.train_dataset) == (4 if rows else 2)  # prompts of a batch
    Asks.asked = 0
    trainer.train()
    assert (trainer.state.global_step, Asks.asked) == (2, 8)
    read = {rollout.prompt_messages[0]["content"] for rollout in trainer.batch.rollouts}
    assert read == {"Row None."} if rows is None else len(read) == 2 and read < {f"Row {n}." for n in range(4)}
