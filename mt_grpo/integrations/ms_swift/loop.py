"""The turns of an ms-swift scheduler that has no `run` of its own: its methods, in the documented order.

After each response: `on_turn_end`, `check_finished`, the limit of turns, `step`. Methods are called by position, may
be synchronous or async, and see text: the ids of what was sampled are the engine's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mt_grpo.conversation.environments import EnvironmentFailure, is_number
from mt_grpo.conversation.tools.threads import run_tool
from mt_grpo.integrations.ms_swift.protocol import RolloutOutput, is_ids, remove_response


class SchedulerFailure(EnvironmentFailure):
    """A scheduler raised, hung, or returned what it may not: its rollout is not trained on."""


class RolloutOver(SchedulerFailure):
    """A request behind the end of its rollout."""


async def called(function: Callable, *args: Any) -> Any:
    """Call a method and return its result. A synchronous one runs in a thread, to not block other conversations."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    work = functools.partial(function, *args)
    work.__name__ = getattr(function, "__name__", "scheduler")
    return await run_tool(work, {}, float("inf"))


def read_step(returned: Any) -> dict[str, Any]:
    """Normalise the return value of `step`, in any form of ms-swift 3.6 to 4.6, to a dict with `infer_request`.

    >>> read_step(({"infer_request": 1}, {}))
    Traceback (most recent call last):
    ...SchedulerFailure: step returned ({'infer_request': 1}, {}), expected a dict with ...
    """
    answer = returned
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        answer = {"infer_request": returned[0], "rollout_infos": returned[1]}
    elif hasattr(returned, "messages"):
        answer = {"infer_request": returned}
    if not isinstance(answer, dict) or not hasattr(answer.get("infer_request"), "messages"):
        raise SchedulerFailure(
            f"step returned {returned!r:.200}, expected a dict with infer_request, a RolloutInferRequest, or a pair "
            "of one and a dict."
        )
    return answer


def flat_ids(given: dict[str, Any], key: str, kind: type | tuple = int) -> list | None:
    """A flat list that a method returned; None where there is none. Raises `SchedulerFailure` for anything else."""
    values = given.get(key)
    if values is None or (isinstance(values, (list, tuple)) and not values):
        return None
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, kind) for value in values):
        raise SchedulerFailure(f"{key} is {values!r:.200}, expected a flat list of numbers for this turn.")
    return list(values)


def segment_of(given: dict[str, Any], sampled: list[int]) -> tuple[list[int], list[int], list[float] | None] | None:
    """(ids, mask, logprobs) that a method returned for its turn, checked; None where it returned none.

    Ids without a mask: those behind what was sampled are the scheduler's own, with mask 0.

    Args:
        given: What it returned.
        sampled: The ids of the response.

    >>> segment_of({"response_token_ids": [5, 6, 9]}, [5, 6, 7])
    ([5, 6, 9], [1, 1, 0], None)
    >>> segment_of({"response_token_ids": [5, 6, 9], "response_loss_mask": [0, 1, 0]}, [5, 6])
    ([5, 6, 9], [0, 1, 0], None)
    """
    ids, mask = flat_ids(given, "response_token_ids"), flat_ids(given, "response_loss_mask")
    logprobs = flat_ids(given, "rollout_logprobs", (int, float))
    if ids is None and mask is not None:
        raise SchedulerFailure("response_loss_mask was returned without response_token_ids. Return both.")
    if ids is None:
        return None
    if mask is None:
        same = num_same(ids, sampled)
        mask = [1] * same + [0] * (len(ids) - same)
    if len(mask) != len(ids) or not set(mask) <= {0, 1}:
        raise SchedulerFailure(
            f"response_loss_mask has {len(mask)} values, {sorted(set(mask))}. Expected a 0 or a 1 for each of the "
            f"{len(ids)} response_token_ids."
        )
    if wrong := [value for value in logprobs or [] if not is_number(value)]:
        raise SchedulerFailure(f"rollout_logprobs has {wrong[0]!r}, expected finite numbers.")
    if logprobs is not None and len(logprobs) != sum(mask):
        raise SchedulerFailure(
            f"rollout_logprobs has {len(logprobs)} values, expected {sum(mask)}: one for each id with mask 1."
        )
    return ids, mask, logprobs


def infos_of(returned: dict[str, Any], method: str) -> dict[str, Any]:
    """The `rollout_infos` of what a method returned. Raises `SchedulerFailure` unless they are a dict."""
    infos = returned.get("rollout_infos") or {}
    if not isinstance(infos, dict):
        raise SchedulerFailure(f"{method} returned rollout_infos={infos!r:.100}, expected a dict.")
    return infos


def check_messages(messages: Any) -> None:
    """Raise `SchedulerFailure` unless a request's messages are dicts with a role, which is text, and a content."""
    if not isinstance(messages, list):
        raise SchedulerFailure(f"A request's messages is {messages!r:.100}, expected a list of dicts.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise SchedulerFailure(f"A message is {message!r:.200}, expected a dict with role and content.")


def num_same(first: list[int], second: list[int]) -> int:
    """The number of equal values at the beginning of two lists."""
    return next((k for k, pair in enumerate(zip(first, second)) if pair[0] != pair[1]), min(len(first), len(second)))


def add_response(messages: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """Put what was sampled behind the messages: behind the assistant's last one, if they end with it. Returns it.

    ms-swift 3.6 to 4.1 let plug-ins end with an assistant's message without content, for that.
    """
    if messages and messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
        messages.pop()
    if messages and messages[-1]["role"] == "assistant":
        messages[-1]["content"] += text
    else:
        messages.append({"role": "assistant", "content": text})
    return messages[-1]


async def drive(scheduler: Any, request: Any, config: Any, **kwargs: Any) -> RolloutOutput:
    """The conversation of a scheduler's methods, until it is finished.

    Args:
        scheduler: With `step`, and what else it has of `on_trajectory_start`, `on_turn_end`, `check_finished`.
        request: The first request; a last message of the assistant is taken away from it.
        config: Of each request.

    Raises:
        SchedulerFailure: a method returned what it may not.
    """
    engine, infos, choices, said, last = scheduler.infer_engine, {}, [], [], None
    if hasattr(scheduler, "on_trajectory_start"):
        await called(scheduler.on_trajectory_start, [request])
    check_messages(request.messages)
    remove_response(request.messages)
    while True:
        response = await engine.infer_async(request, config, **kwargs)
        choice, turn = response.choices[0], len(choices) + 1
        messages = request.messages
        if getattr(choice, "is_over", False):  # no room for a response: the one before it ends the conversation
            said = said or [*messages, {"role": "assistant", "content": ""}]
            return await output_of(engine, last or response, said, choices, infos)
        last, sampled = response, list(choice.token_ids or [])
        choices.append(choice)
        for each in messages:
            if is_ids(each["content"]):
                each["content"] = engine.text(each["content"])
        message = add_response(messages, choice.message.content)
        said = [*messages[:-1], dict(message)]
        ended = await called(scheduler.on_turn_end, request, choice, turn) if hasattr(scheduler, "on_turn_end") else {}
        if not isinstance(ended or {}, dict):
            raise SchedulerFailure(f"on_turn_end returned {ended!r:.200}, expected a dict or None.")
        ended = ended or {}
        infos |= infos_of(ended, "on_turn_end")
        stop = await called(scheduler.check_finished, request, choice, turn)
        if "done" in ended:  # a turn that was cut off is the last one, whatever `on_turn_end` says
            stop = ended["done"] or choice.finish_reason == "length"
        most = getattr(scheduler, "max_turns", None)
        is_last = bool(stop) or bool(most and turn >= most)
        step = ended
        if not is_last:
            step = read_step(await called(scheduler.step, request, choice, turn))
            request = step["infer_request"]
            infos |= infos_of(step, "step")
            check_messages(request.messages)
        segment, masked = segment_of(step, sampled), bool(step.get("response_loss_mask"))
        same_message = bool(request.messages) and request.messages[-1].get("role") == "assistant"
        text = text_at(request.messages, said)
        await engine.drove(choice, text, same_message, segment, masked, weight_of(message))
        if is_last:
            return await output_of(engine, last, messages, choices, infos)


async def output_of(
    engine: Any, response: Any, messages: list[dict[str, Any]], choices: list[Any], infos: dict[str, Any]
) -> RolloutOutput:
    """The output of a conversation with these responses."""
    infos = {**infos, "num_turns": len(choices)}
    return RolloutOutput(response=response, messages=messages, rollout_infos=infos, **await engine.ended(choices))


def text_at(messages: list[dict[str, Any]], said: list[dict[str, Any]]) -> Any:
    """What the last of the messages `said` says now; None where the history before it was edited.

    >>> user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    >>> text_at([user, {**said, "content": "bc"}, user], [user, said]), text_at([said, user], [user, said])
    ('bc', None)
    """
    place = len(said) - 1
    before = [(message["role"], message["content"]) for message in said[:place]]
    if len(messages) <= place or messages[place]["role"] != "assistant":
        return None
    now = [(message["role"], message["content"]) for message in messages[:place]]
    return messages[place]["content"] if now == before else None


def weight_of(message: Any) -> bool | None:
    """Whether a message's own keys `loss` and `loss_scale` make it trained, None without these keys.

    >>> weight_of({"loss": False}), weight_of({"loss_scale": 0.5}), weight_of({"content": ""})
    (False, True, None)
    """
    if not isinstance(message, dict):
        return None
    if message.get("loss_scale") is not None:
        return bool(message["loss_scale"])
    return None if message.get("loss") is None else bool(message["loss"])
