"""What an environment says, checked: its first observation, and its replies."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from mt_grpo.control_tokens import Origin
from mt_grpo.rollout import Message, Reply, StopReason

Clean = Callable[[list[Message], Origin], list[Message]]  # breaks control tokens: `ChatFormat.clean`
REPLIES = ("messages", "continuation", "history", "stop")  # a reply has at most one of them


class EnvironmentFailure(Exception):
    """An environment raised, hung, or returned what it may not: the end of its rollout, which is not trained on."""

    reason = StopReason.ENVIRONMENT_ERROR


class PromptTooLong(Exception):
    """The prompt after `reset` leaves no room for a turn: the end of its rollout, which is not trained on.

    Args:
        length: Of the prompt, in tokens.
        beyond: How many of them are beyond the context, 0 where they fill it.
        limit: What to raise, in words.
    """

    def __init__(self, length: int, beyond: int, limit: str):
        super().__init__(
            f"the prompt has {length} tokens after reset, and the context {length - beyond}: there is no room for a "
            f"turn. Shorten what reset says, or raise {limit}."
        )


def read_reply(reply: Any, name: str) -> Reply | None:
    """What `respond` returned. Raises `EnvironmentFailure` for what is no reply."""
    if isinstance(reply, dict) and reply.keys() <= Reply.__dataclass_fields__.keys():
        reply = Reply(**reply)
    if reply is None:
        return None
    if not all(hasattr(reply, key) for key in Reply.__dataclass_fields__):
        raise EnvironmentFailure(f"{name}.respond returned {type(reply).__name__}, expected a Reply or None.")
    given = [key for key in REPLIES if getattr(reply, key)]
    if len(given) > 1:
        raise EnvironmentFailure(f"{name}.respond returned a reply with {' and '.join(given)}, expected one of them.")
    for key, kind in (("continuation", str), ("info", dict)):
        if not isinstance(getattr(reply, key) or kind(), kind):
            got = type(getattr(reply, key)).__name__
            raise EnvironmentFailure(f"{name}.respond: {key} is {got}, expected {kind.__name__} or None.")
    if reply.reward is not None and not is_number(reply.reward):
        raise EnvironmentFailure(f"{name}.respond: reward is {reply.reward!r}, expected a finite number or None.")
    read = {key: read_messages(getattr(reply, key), f"{name}.respond: {key}") for key in ("messages", "history")}
    if read["history"] and read["history"][-1]["role"] == "assistant":
        raise EnvironmentFailure(f"{name}.respond: history ends with the model's own message, expected another's.")
    return Reply(**{**{key: getattr(reply, key) for key in Reply.__dataclass_fields__}, **read})


def read_messages(messages: Any, where: str) -> list[Message] | None:
    """An environment's messages, each with a text as content. Raises `EnvironmentFailure`."""
    if not isinstance(messages or [], list):
        raise EnvironmentFailure(f"{where} is {messages!r:.100}, expected messages.")
    read = []
    for message in messages or []:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise EnvironmentFailure(f"{where} has {message!r:.200}, expected role and content.")
        if not isinstance(message["role"], str):
            raise EnvironmentFailure(f"{where} has the role {message['role']!r:.100}, expected a text such as user.")
        # As in OpenAI's API: a message that only calls says nothing.
        content = "" if message["content"] is None and message.get("tool_calls") else message["content"]
        read.append({**message, "content": read_content(content, where)})
    return None if messages is None else read


def read_content(content: Any, where: str) -> str:
    """Content as text: parts of text are joined. Raises `EnvironmentFailure` for anything else."""
    parts = content if isinstance(content, list) else [{"text": content}]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type", "text") != "text":
            shown = part if isinstance(content, list) else content
            raise EnvironmentFailure(f"{where} has the content {shown!r:.100}, expected text, or parts of type text.")
    return "".join(part["text"] for part in parts)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number of single precision, in which rewards are kept."""
    return isinstance(value, numbers.Real) and abs(value) <= 3.4e38  # NaN is not


def as_written(messages: list[Message], origin: Origin) -> list[Message]:
    """The messages themselves: for programs whose requests are cleaned later."""
    return messages


def joined(prompt: list[Message], observation: str | list | None, clean: Clean = as_written) -> list[Message]:
    """The prompt with what `reset` returned: text goes to its last message, messages replace it.

    Args:
        prompt: Of the row, the operator's.
        observation: What `reset` returned.
        clean: Breaks the control tokens that messages of an origin may not hold.

    Raises:
        EnvironmentFailure: there is no prompt, or the observation is none.

    >>> joined([{"role": "user", "content": "Play. "}], "A board.")
    [{'role': 'user', 'content': 'Play. A board.'}]
    >>> joined([{"role": "user", "content": "Play."}], [{"role": "user", "content": "Guess."}])
    [{'role': 'user', 'content': 'Guess.'}]
    """
    if not observation and not isinstance(observation, (int, float)):
        if not any(message["content"] for message in prompt):
            raise EnvironmentFailure("reset returned nothing, and the row has no prompt: expected one of them.")
        return clean(prompt, Origin.DATA)
    if isinstance(observation, list) and all(isinstance(m, dict) and "role" in m for m in observation):
        return clean(read_messages(observation, "reset"), Origin.OUTSIDE)
    if not isinstance(observation, (str, list)):
        raise EnvironmentFailure(f"reset returned {type(observation).__name__}, expected text, messages or None.")
    *before, last = clean(prompt or [{"role": "user", "content": ""}], Origin.DATA)

    def as_outside(text: str) -> str:
        return clean([{"role": "user", "content": text}], Origin.OUTSIDE)[0]["content"]

    said = as_outside(read_content(observation, "reset"))
    # INVARIANT: a control token of which the row has one half and `reset` the other is broken, too.
    meet = as_outside(last["content"] + said) == as_outside(last["content"]) + said
    return clean([*before, {**last, "content": last["content"] + ("" if meet else " ") + said}], Origin.DATA)
