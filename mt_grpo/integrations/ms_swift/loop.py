"""The turns of an ms-swift scheduler that has no `run` of its own: its methods, in the documented order.

After each response: `on_turn_end`, `check_finished`, the limit of turns, `step`. Methods are called by position, may
be synchronous or async, and see text: the ids of what was sampled are the engine's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.conversation.environments import EnvironmentFailure
from mt_grpo.conversation.tools.running import run_tool
from mt_grpo.integrations.ms_swift.protocol import RolloutOutput, remove_response


class SchedulerFailure(EnvironmentFailure):
    """A scheduler raised, hung, or returned what it may not: its rollout is not trained on."""


class RolloutOver(SchedulerFailure):
    """A request after the end of its rollout."""


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Context manager that puts words in front of an error and raises it as a `SchedulerFailure`, unless it is one."""
    try:
        yield
    except SchedulerFailure:
        raise
    except Exception as error:
        raise SchedulerFailure(f"{what}: {error_line(error)}") from error


async def called(function: Callable, *args: Any) -> Any:
    """Call a method and return its result. A synchronous one runs in a thread, to not block other conversations."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    work = functools.partial(function, *args)
    work.__name__ = getattr(function, "__name__", "scheduler")
    return await run_tool(work, {}, float("inf"))


def read_step(returned: Any) -> dict[str, Any]:
    """Normalise the return value of `step`, in any form of ms-swift 3.6 to 4.6, to a dict with `infer_request`.

    >>> from types import SimpleNamespace
    >>> request = SimpleNamespace(messages=[])
    >>> read_step(request) == read_step({"infer_request": request}), read_step((request, {"a": 1}))["rollout_infos"]
    (True, {'a': 1})
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        returned = {"infer_request": returned[0], "rollout_infos": returned[1]}
    elif hasattr(returned, "messages"):
        returned = {"infer_request": returned}
    if not isinstance(returned, dict) or "infer_request" not in returned:
        raise SchedulerFailure(
            f"step returned {returned!r:.200}, expected a dict with infer_request, a RolloutInferRequest, or a pair "
            "of one and a dict."
        )
    return returned


def add_response(messages: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """Add what was sampled to the messages: to the assistant's last one, if they end with it. Returns it.

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
    """The conversation of a scheduler's methods, until it is finished."""
    engine, infos, choices, snapshot, last = scheduler.infer_engine, {}, [], [], None
    if hasattr(scheduler, "on_trajectory_start"):
        await called(scheduler.on_trajectory_start, [request])
    remove_response(request.messages)
    while True:
        response = await engine.infer_async(request, config, **kwargs)
        choice, messages = response.choices[0], request.messages
        if getattr(choice, "is_over", False):  # no room for a response: the one before it ends the conversation
            snapshot = snapshot or [*messages, {"role": "assistant", "content": ""}]
            break
        last, turn = response, len(choices) + 1
        choices.append(choice)
        message = add_response(messages, choice.message.content)
        snapshot = [*messages[:-1], dict(message)]
        step = {}
        if hasattr(scheduler, "on_turn_end"):
            step = await called(scheduler.on_turn_end, request, choice, turn) or {}
        infos |= step.get("rollout_infos") or {}
        is_last = await called(scheduler.check_finished, request, choice, turn)
        if "done" in step:  # a truncated turn is the last one, whatever `on_turn_end` says
            is_last = step["done"] or choice.finish_reason == "length"
        is_last = is_last or bool(scheduler.max_turns and turn >= scheduler.max_turns)
        if not is_last:
            step = read_step(await called(scheduler.step, request, choice, turn))
            request = step["infer_request"]
            infos |= step.get("rollout_infos") or {}
        segment = step.get("response_token_ids"), step.get("response_loss_mask")
        same_message = len(request.messages) == len(snapshot) and request.messages[-1]["role"] == "assistant"
        await engine.call("end_turn", choice, text_at(request.messages, snapshot), same_message, *segment)
        if is_last:
            snapshot = messages
            break
    infos["num_turns"] = len(choices)
    return RolloutOutput(
        response=last or response, messages=snapshot, rollout_infos=infos, **await engine.call("end_drive", choices)
    )


def text_at(messages: list[dict[str, Any]], snapshot: list[dict[str, Any]]) -> str | None:
    """What the last of the messages `snapshot` says now; None if the history before it was edited.

    >>> user, said, more = [{"role": role, "content": text} for role, text in zip(["user", *["assistant"] * 2], "abc")]
    >>> text_at([user, more, user], [user, said]), text_at([more, said], [user, said])
    ('c', None)
    """
    place = len(snapshot) - 1
    if len(messages) <= place or messages[place]["role"] != "assistant":
        return None
    pairs = zip(messages[:place], snapshot[:place])
    is_same = all(now["role"] == then["role"] and now["content"] == then["content"] for now, then in pairs)
    return messages[place]["content"] if is_same else None
