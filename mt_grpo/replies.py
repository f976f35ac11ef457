"""What an environment says, checked: its first observation, and its replies."""

from __future__ import annotations

import numbers
from typing import Any

from mt_grpo.rollout import Message, Reply, StopReason

REPLIES = ("messages", "continuation", "history", "stop")  # a reply has at most one of them


class EnvironmentFailure(Exception):
    """An environment raised, hung, or returned what it may not: the end of its rollout, which is not trained on."""

    reason = StopReason.ENVIRONMENT_ERROR


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
    for key in ("messages", "history"):
        if not isinstance(getattr(reply, key) or [], list):
            raise EnvironmentFailure(f"{name}.respond: {key} is {getattr(reply, key)!r:.100}, expected messages.")
        for message in getattr(reply, key) or []:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise EnvironmentFailure(f"{name}.respond: {key} has {message!r}, expected role and content.")
    if reply.history and reply.history[-1]["role"] == "assistant":
        raise EnvironmentFailure(f"{name}.respond: history ends with the model's own message, expected another's.")
    return reply


def is_number(value: Any) -> bool:
    """Whether a value is a finite number of single precision, in which rewards are kept."""
    return isinstance(value, numbers.Real) and abs(value) <= 3.4e38  # NaN is not


def joined(prompt: list[Message], observation: str | list | None) -> list[Message]:
    """The prompt with what `reset` returned: text goes to its last message, messages replace it.

    >>> joined([{"role": "user", "content": "Play. "}], "A board.")
    [{'role': 'user', 'content': 'Play. A board.'}]
    >>> joined([{"role": "user", "content": "Play."}], [{"role": "user", "content": "Guess."}])
    [{'role': 'user', 'content': 'Guess.'}]
    """
    if not observation:
        if not any(message["content"] for message in prompt):
            raise EnvironmentFailure("reset returned nothing, and the row has no prompt: expected one of them.")
        return prompt
    if isinstance(observation, list) and all(isinstance(m, dict) and "role" in m for m in observation):
        return observation
    prompt = prompt or [{"role": "user", "content": ""}]
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):  # content parts
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    if type(observation) is not type(content):
        raise EnvironmentFailure(f"reset returned {type(observation).__name__}, expected text, messages or None.")
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
