"""One environment per conversation, and validation of its replies and of what it may have changed by mistake."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import numbers
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.base.errors import error_line
from mt_grpo.base.rows import DataRow, Rows, is_image, with_own_keys
from mt_grpo.conversation.tools.running import ToolsUnavailable, ToolTimeout, run_tool
from mt_grpo.conversation.tools.signature import check_tool, merged, named_tools
from mt_grpo.images.pictures import (
    KNOWN,
    PictureId,
    SaidPictures,
    images_of,
    is_image_part,
    is_picture,
    picture_of,
    reader_of,
    runs_of,
    with_marks_of,
)
from mt_grpo.images.reader import said_text
from mt_grpo.rollout import ROLES, Message, Origin, Reply, Rollout, StopReason, ToolCall, Turn, join

logger = logging.getLogger(__name__)
Clean = Callable[[list[Message], Origin], list[Message]]  # breaks control tokens: `ChatFormat.clean`
REPLIES = ("messages", "continuation", "history", "stop")  # a reply has at most one of them


class EnvironmentFailure(Exception):
    """An environment raised, hung, or returned an invalid value. Its rollout ends and is not trained on."""

    reason = StopReason.ENVIRONMENT_ERROR


class PromptTooLong(Exception):
    """The prompt after `reset` leaves no room for a turn. Its rollout ends and is not trained on."""

    def __init__(self, length: int, beyond: int, limit: str):
        tokens = f"the prompt has at least {length} tokens after reset, and the context has {length - beyond}"
        super().__init__(f"{tokens}: there is no room for a turn. Shorten what reset returns, or raise {limit}.")


def read_reply(reply: Any, name: str, said: SaidPictures | None = None) -> Reply:
    """Validate what `respond` of the class `name` returned: a `Reply`, a dict with its keys, or None (no reply)."""
    where = f"{name}.respond"
    if reply is None:
        return Reply()
    try:
        fields = Reply.__dataclass_fields__
        reply = Reply(**(reply if isinstance(reply, dict) else {key: getattr(reply, key) for key in fields}))
        several = [key for key in REPLIES if getattr(reply, key)]
    except (TypeError, AttributeError, ValueError) as error:
        raise EnvironmentFailure(f"{where} returned {reply!r:.100}, expected a Reply or None: {error}.") from None
    if len(several) > 1:
        raise EnvironmentFailure(f"{where} returned a reply with {' and '.join(several)}. Set only one of them.")
    for key, kind in (("continuation", str), ("info", dict), ("stop", bool)):  # any text is true: "no" would end it
        if not isinstance(value := getattr(reply, key) or kind(), kind):
            raise EnvironmentFailure(f"{where}: {key} is {value!r:.100}, expected {kind.__name__} or None.")
    if reply.reward is not None and not is_number(reply.reward):
        raise EnvironmentFailure(f"{where}: reward is {reply.reward!r}, expected a finite number or None.")
    reply.messages = reply.messages and read_messages(reply.messages, f"{where}: messages", said)
    reply.history = reply.history and read_messages(reply.history, f"{where}: history", said)
    if reply.history and reply.history[-1]["role"] == "assistant":
        raise EnvironmentFailure(f"{where}: history ends with an assistant message, expected another role.")
    if reply.continuation:  # text only: the model's own message has no image
        reply.continuation = with_marks_of(reply.continuation, [])
    return reply


def read_messages(messages: Any, where: str, said: SaidPictures | None = None) -> list[Message]:
    """Validate an environment's messages and convert their contents to text. Raises `EnvironmentFailure`."""
    if not isinstance(messages, list):
        raise EnvironmentFailure(f"{where} is {messages!r:.100}, expected a list of messages.")
    read = []
    for message in messages:
        if not isinstance(message, dict) or "content" not in message or message.get("role") not in [*ROLES]:
            known = f"expected role and content, with a role of {', '.join(sorted(ROLES))}"
            raise EnvironmentFailure(f"{where} has {message!r:.200}, {known}.")
        # As in OpenAI's API, a message that only calls says nothing.
        content = "" if message["content"] is None and message.get("tool_calls") else message["content"]
        try:  # parts are joined, images become marks
            read.append({**message, "content": said_text(said or SaidPictures(), content, where)})
        except ValueError as error:
            raise EnvironmentFailure(str(error)) from error
    return read


def is_number(value: Any) -> bool:
    """Whether a value is a number that is finite in float32, the precision of rewards."""
    return isinstance(value, numbers.Real) and abs(value) <= 3.4e38  # NaN is not


def joined(
    prompt: list[Message], observation: str | list | None, clean: Clean | None = None, said: SaidPictures | None = None
) -> list[Message]:
    """Join a prompt and the return value of `reset`: text and parts extend the last message, messages replace all.

    `clean` breaks control tokens that an origin may not write; None: they are cleaned later. `said` reads the images.

    >>> joined([{"role": "user", "content": "Play. "}], "A board.")
    [{'role': 'user', 'content': 'Play. A board.'}]
    """
    clean = clean or (lambda messages, origin: messages)
    if not observation and not isinstance(observation, (int, float)):
        if not any(message["content"] for message in prompt):
            raise EnvironmentFailure("reset returned nothing, and the row has no prompt. Expected one of them.")
        return clean(prompt, Origin.DATA)
    if isinstance(observation, list) and all(isinstance(m, dict) and "role" in m for m in observation):
        return clean(read_messages(observation, "reset", said), Origin.OUTSIDE)
    observation = [observation] if is_image_part(observation) or is_image(observation) else observation
    if not isinstance(observation, (str, list)):
        raise EnvironmentFailure(f"reset returned {type(observation).__name__}, expected text, messages or None.")
    *before, last = clean(prompt or [{"role": "user", "content": ""}], Origin.DATA)

    def as_outside(text: str) -> str:
        return clean([{"role": "user", "content": text}], Origin.OUTSIDE)[0]["content"]

    text = as_outside(read_messages([{"role": "user", "content": observation}], "reset", said)[0]["content"])
    # INVARIANT: a control token of which the row has one half and `reset` has the other is broken, too.
    meet = as_outside(last["content"] + text) == as_outside(last["content"]) + text
    return clean([*before, {**last, "content": last["content"] + ("" if meet else " ") + text}], Origin.DATA)


# From a class to one environment per conversation: its tools, and its methods within their time.


# Methods of the protocol, which are no tools -> how many arguments the trainer passes, None for a dataset row.
METHODS = {"reset": None, "respond": 2, "get_reward": 0, "close": 0, "conversation_over": 0, "state_key": 0}


def tool_methods(cls: type) -> list[str]:
    """The names of a class's tools: its public methods, looked up on the class, as in TRL."""
    names = (name for name, _ in inspect.getmembers(cls, inspect.isfunction))
    return [name for name in names if not name.startswith("_") and name not in METHODS]


def class_tools(cls: type) -> dict[str, Callable]:
    """A class's tools, name -> method, for their descriptions. They must not be called."""
    return {name: types.MethodType(getattr(cls, name), cls) for name in tool_methods(cls)}


def check_environment(cls: Any, where: str) -> None:
    """Raise `ValueError` unless a class can serve as an environment. It is not instantiated."""
    if not isinstance(cls, type) or not callable(getattr(cls, "reset", None)):
        raise ValueError(f"{where} is {cls!r}, expected a class with a method reset(self, **row), or a dict of them.")
    for name, count in METHODS.items():
        try:
            if count is not None and (method := getattr(cls, name, None)) is not None:
                inspect.signature(types.MethodType(method, cls)).bind(*[None] * count)
        except TypeError as error:
            words = f"the trainer calls {cls.__name__}.{name} with {count} arguments: {error}"
            raise ValueError(f"{where}: {words}. Give a tool another name, such as {name}_it.") from None
    for tool in class_tools(cls).values():
        check_tool(tool)
    if isinstance(getattr(cls, "tools", None), (list, tuple)):  # else they are an instance's, or a tool of this name
        merged(cls.__name__, class_tools(cls).values(), named_tools(cls.tools).values())


def tools_of(environment: Any, others: dict[str, Callable]) -> dict[str, Callable]:
    """The tools of a conversation: `others`, an instance's public methods, and those in its list `tools`.

    `tool_selection` of an instance, a list of names, says which of them this conversation has; None: all.
    """
    listed = getattr(environment, "tools", None) or []
    if not callable(listed) and not isinstance(listed, (list, tuple)):
        raise EnvironmentFailure(f"{type(environment).__name__}.tools is {listed!r:.100}, expected a list of tools.")
    methods = [getattr(environment, each) for each in tool_methods(type(environment))]
    # Checked here, as they may be an instance's own; the others were, once: it takes milliseconds.
    named = named_tools([] if callable(listed) else listed)
    tools = merged(type(environment).__name__, others.values(), methods, named.values())
    selection = getattr(environment, "tool_selection", None)
    return tools if selection is None else selected(tools, selection)


def selected(tools: dict[str, Callable], names: list[str]) -> dict[str, Callable]:
    """The tools with these names. Raises `ValueError` for an unknown name."""
    if unknown := [name for name in names if name not in tools]:
        raise ValueError(f"The row names the unknown tool {unknown[0]!r}. Known tools: {', '.join(tools) or 'none'}.")
    return {name: tools[name] for name in names}


def shares_state(call: ToolCall, rollout: Rollout, of_all: dict[str, Callable]) -> bool:
    """Whether a call goes to a synchronous tool of the rollout's own environment, and not to one of `of_all`."""
    tool = (rollout.tools or {}).get(call.name)
    own = rollout.environment is not None and tool is not None and tool is not of_all.get(call.name)
    return own and not inspect.iscoroutinefunction(tool)


@contextmanager
def failures_end(rollout: Rollout) -> Iterator[None]:
    """Context manager in which an environment's failure ends this rollout, and no other one."""
    try:
        yield
    except EnvironmentFailure as error:
        rollout.stop_reason, rollout.error = error.reason, error
    except BaseException:  # the conversation is cancelled, perhaps inside a call that still runs
        rollout.abandoned = True
        raise


class Environments:
    """Creates, calls and closes one environment per conversation.

    As in TRL, instances are reset and used again, but not those with `close` or an abandoned call.

    Args:
        factories: A class, or a dict from the values of the column `environment` to classes.
        timeout: Seconds that one call of a method of the protocol may take.
        tools: The tools of all conversations, in addition to those of their environments.
    """

    def __init__(self, factories: type | dict[str, type], timeout: float, tools: dict[str, Callable]):
        self.by_name = factories if isinstance(factories, dict) else {None: factories}
        for name, cls in self.by_name.items():
            check_environment(cls, f"environment {name!r}" if name else "environment")
            merged(cls.__name__, tools.values(), self.tools_of_class({"environment": name}).values())
        self.timeout, self.tools = timeout, tools
        self.tokenizer: Any = None  # of the model, known when a conversation opens; it reads the images
        self.places_images = True  # of a row, at the places in what `reset` returns; a scheduler uses tags
        self._free: dict[type, list] = {cls: [] for cls in self.by_name.values()}
        self._rooms: dict[tuple, asyncio.Semaphore] = {}  # by event loop and class
        self._open: dict[int, Rollout] = {}  # by id: those whose environment is not given back

    def class_of(self, row: dict[str, Any]) -> type:
        """The environment class of a row. Raises `ValueError` for an unknown name."""
        if None in self.by_name:
            return self.by_name[None]
        name = row.get("environment")
        if name not in self.by_name:
            raise ValueError(f"A row has environment={name!r}, expected one of {', '.join(self.by_name)}.")
        return self.by_name[name]

    def check_rows(self, dataset: Any) -> None:
        """Raise `ValueError` for a row whose environment is unknown, or whose class or `reset` does not take it.

        A class method `check_row(row)` rejects rows. It returns the names of tools that the row has, or None.
        """
        is_table = not isinstance(dataset, Rows)  # its rows all have its columns; to read them may decode images
        checks = any(hasattr(cls, "check_row") for cls in self.by_name.values())
        read = [name for name in dataset.column_names if name == "environment" or checks]
        seen = set()
        for number, row in enumerate(dataset if not is_table else dataset.select_columns(read) if read else [{}]):
            try:
                cls = self.class_of(row)
                columns = self.arguments_of({**dict.fromkeys(dataset.column_names), **row} if is_table else row)
                if (cls, *columns) not in seen:  # a decorated `reset` may take anything
                    seen.add((cls, *columns))
                    inspect.signature(types.MethodType(cls.reset, cls), follow_wrapped=False).bind(**columns)
                if names := hasattr(cls, "check_row") and cls.check_row(self.own_row(row)):
                    selected({**self.tools, **self.tools_of_class(row)}, names)
            except TypeError as error:
                words = f"{cls.__name__}.reset does not accept the columns {', '.join(columns)}: {error}"
                raise ValueError(f"Row {number}: {words}. Rename one, or add **row for other columns.") from None
            except ValueError as error:
                raise ValueError(f"Row {number}: {error}") from None

    def arguments_of(self, row: DataRow) -> dict[str, Any]:
        """The keyword arguments of `reset`: all columns of a row, except the one that selects the class."""
        return {k: v for k, v in self.own_row(row).items() if k != "environment" or None in self.by_name}

    def own_row(self, row: DataRow) -> DataRow:
        """A row as its environment takes it: its `keyword_columns` hold arguments, without a table's padding."""
        return with_own_keys(row, getattr(self.class_of(row), "keyword_columns", ()))

    def tools_of_class(self, row: dict[str, Any]) -> dict[str, Callable]:
        """The tools of a row's environment before there is an instance, to estimate the length of the prompt."""
        return class_tools(self.class_of(row))

    async def open(self, rollout: Rollout, clean: Clean | None = None, tokenizer: Any = None) -> list[Message]:
        """Give a rollout its environment and call `reset`. Returns the prompt, cleaned of control tokens."""
        cls, self.tokenizer = self.class_of(rollout.row), tokenizer
        if self._free[cls]:
            rollout.environment = self._free[cls].pop()
            self._open[id(rollout)] = rollout
        else:
            await self._run(rollout, cls.__name__, functools.partial(self._make, rollout, cls))
        of_row = rollout.pictures[: len(images_of(rollout.row))]  # before `reset`, which may change the row
        observation = await self.call(rollout, "reset", **self.arguments_of(rollout.row))
        said = SaidPictures(tokenizer, rollout.pictures, places=True)
        messages = joined(rollout.prompt_messages, observation, clean, said)
        if reader_of(tokenizer) is None or not self.places_images:
            return messages
        from mt_grpo.images.messages import placed

        try:
            return placed(messages, of_row, f"{cls.__name__}.reset")
        except ValueError as error:
            raise EnvironmentFailure(str(error)) from error

    def _make(self, rollout: Rollout, cls: type) -> None:
        """Create a rollout's environment. It is closed at once if the rollout was abandoned meanwhile."""
        environment = rollout.environment = cls()
        self._open[id(rollout)] = rollout
        if rollout.abandoned and self._open.pop(id(rollout), None) is not None and hasattr(environment, "close"):
            with suppress(Exception):  # in a thread without a loop: nobody is left to hear of errors
                if inspect.iscoroutine(closing := environment.close()):
                    asyncio.run(closing)

    async def idle(self, rollout: Rollout) -> None:
        """Wait at most `environment_timeout` for abandoned calls: an instance has one call at a time."""
        running = [future for future in rollout.given_up if not future.done()]
        rollout.given_up.clear()
        if running and (await asyncio.wait(running, timeout=self.timeout))[1]:
            name, waited = type(rollout.environment).__name__, f"environment_timeout={self.timeout:g} s"
            raise EnvironmentFailure(f"{name}: a call abandoned at tool_timeout still runs after another {waited}.")

    async def call(self, rollout: Rollout, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, synchronous or async. Returns None if it does not exist. Raises `EnvironmentFailure`."""
        function = getattr(rollout.environment, method, None)
        if function is None:
            return None
        name = f"{type(rollout.environment).__name__}.{method}"
        if method != "close":  # which may be what ends a call that hangs
            await self.idle(rollout)
        return await self._run(rollout, name, functools.partial(function, *args, **kwargs))

    async def respond(self, rollout: Rollout, turn: Turn) -> Reply:
        """The environment's reply to a turn, empty if it has none. Raises `EnvironmentFailure`."""
        answer = await self.call(rollout, "respond", rollout, turn)
        return read_reply(answer, type(rollout.environment).__name__, SaidPictures(self.tokenizer, rollout.pictures))

    async def _run(self, rollout: Rollout, name: str, function: functools.partial) -> Any:
        function.__name__, read = name, lambda said: said
        if (reader := reader_of(self.tokenizer)) is not None:
            from mt_grpo.images.messages import read_ahead

            read = functools.partial(read_ahead, reader=reader)
        try:
            return await run_tool(function, {}, self.timeout, read)
        except ToolsUnavailable:
            raise
        except ToolTimeout as error:
            rollout.abandoned = True
            raise EnvironmentFailure(f"{name} took longer than environment_timeout={self.timeout:g} s.") from error
        except Exception as error:
            raise EnvironmentFailure(f"{name} raised {error_line(error)}") from error

    async def reward(self, rollout: Rollout) -> float | None:
        """The result of `get_reward`, None without it. Raises `EnvironmentFailure`, also if it is not a number."""
        await self.idle(rollout)  # reward functions get the instance, too
        value = await self.call(rollout, "get_reward")
        if value is not None and not is_number(value):
            name = type(rollout.environment).__name__
            raise EnvironmentFailure(f"{name}.get_reward returned {value!r}, expected a finite number.")
        return None if value is None else float(value)

    def room(self, rollout: Rollout) -> asyncio.Semaphore | None:
        """A semaphore for `most_conversations` of a rollout's environment class, per event loop; None: no limit."""
        cls = self.class_of(rollout.row)
        if (most := getattr(cls, "most_conversations", None)) is None:
            return None
        return self._rooms.setdefault((asyncio.get_running_loop(), cls), asyncio.Semaphore(most))

    async def over(self, rollout: Rollout) -> None:
        """Notify an environment that its conversation is over. A failure of that is only logged."""
        try:
            await self.call(rollout, "conversation_over")
        except EnvironmentFailure as error:
            logger.warning(f"Notifying an environment of the end of its conversation failed: {error}")

    async def close(self, rollouts: list[Rollout] | None = None) -> list[EnvironmentFailure]:
        """Close the environments of these rollouts, or of all; keep those of further use. Returns the errors."""
        rollouts = list(self._open.values()) if rollouts is None else rollouts
        rollouts = [rollout for rollout in rollouts if self._open.pop(id(rollout), None) is not None]
        results = await asyncio.gather(*map(self._close_one, rollouts), return_exceptions=True)
        return [error for error in results if error is not None]

    async def _close_one(self, rollout: Rollout) -> None:
        if hasattr(rollout.environment, "close"):
            await self.call(rollout, "close")
        elif not rollout.abandoned and rollout.error is None:
            self._free[type(rollout.environment)].append(rollout.environment)


# The lists of a rollout's turns, as the loss reads them. An environment may change the rollout by mistake.


@functools.lru_cache(maxsize=8)
def num_ids(tokenizer: PreTrainedTokenizerBase, length: int) -> int:
    """The tokenizer's largest id plus one, cached: ids may have gaps. `length` is a key, since tokens may be added."""
    return max(tokenizer.get_vocab().values(), default=length - 1) + 1


def keep_whole(rollout: Rollout, vocab_size: int) -> None:
    """Mark a rollout as its environment's failure, and drop its turns, if `check_turns` raises."""
    if not rollout.failed:
        with failures_end(rollout):
            check_turns(rollout, vocab_size)
        if rollout.failed:
            rollout.turns, rollout.edited = [], None


def check_turns(rollout: Rollout, vocab_size: int) -> None:
    """Raise `EnvironmentFailure` unless a rollout's tokens have masks and logprobs, and those read are known ids."""
    for number, turn in enumerate(rollout.turns):
        if not isinstance(turn, Turn):
            raise altered(f"rollout.turns[{number}] is {turn!r:.100}, expected a Turn")
        size, where = len(turn.token_ids), f"turn {number}"
        if turn.mask is not None and (len(turn.mask) != size or not set(turn.mask) <= {0, 1}):
            raise altered(f"{where}: mask is {turn.mask!r:.100}, expected None, or a 0 or 1 for each of {size} tokens")
        if turn.logprobs is not None and len(turn.logprobs) != size:
            raise altered(f"{where} has {len(turn.logprobs)} logprobs, expected one for each of {size} tokens")
        if turn.reward is not None and not is_number(turn.reward):
            raise altered(f"{where}: reward is {turn.reward!r:.100}, expected a finite number or None")
        context = [] if turn.context is None else turn.context.ids
        for name, ids in (("observation_ids", turn.observation_ids), ("context", context)):
            if (wrong := first_unknown(ids, vocab_size)) is not None:
                raise altered(f"{where}: {name} has the id {wrong!r:.100}, expected numbers below {vocab_size}")
    try:
        found = join(record.turns for record in rollout.records)
    except (LookupError, TypeError, AttributeError) as error:
        raise altered(f"its turns form no valid records ({type(error).__name__}: {error})") from error
    if len(found) != len(rollout.turns):
        raise altered(f"its records contain {len(found)} turns, expected {len(rollout.turns)}")


def first_unknown(ids: list[int], vocab_size: int) -> Any:
    """The first id that is neither below `vocab_size` nor part of a complete image, None if there is none.

    >>> first_unknown([0, 7], 8), first_unknown([0, 8, -1], 8), first_unknown([1, -1], 8), first_unknown([1.5], 8)
    (None, 8, -1, 1.5)
    """
    # In C, for whole batches: the first one is looked for only where there is one.
    if not ids or (set(map(type, ids)) == {int} and 0 <= min(ids) and max(ids) < vocab_size):
        return None
    if any(type(each) is PictureId for each in ids):
        if (lost := next((each for each in ids if is_picture(each) and each not in KNOWN), None)) is not None:
            return lost
        runs = runs_of(ids, partial=True)
        ids = join(run for run in runs if not is_picture(run[0]) or len(run) != picture_of(run[0]).num_tokens)
    return next((each for each in ids if type(each) is not int or not 0 <= each < vocab_size), None)


def altered(what: str) -> EnvironmentFailure:
    """The error for a rollout that its environment has changed."""
    advice = "An environment must not change the rollout. Return a reply instead."
    return EnvironmentFailure(f"The rollout cannot be trained: {what}. {advice}")
