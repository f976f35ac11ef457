"""/v1/responses: requests read, answers written, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.base.json_types import json_text
from mt_grpo.integrations.agents.chat_api import check_template_arguments
from mt_grpo.integrations.agents.messages import (
    TEXT,
    Answer,
    ApiError,
    Contents,
    ModelRequest,
    expect,
    read_effort,
    read_limit,
    read_model,
    read_stops,
    read_tool_choice,
    refuse,
    tell_of_parallel_calls,
    without_bill,
)
from mt_grpo.integrations.agents.response_items import Responses, output_items, read_items, response_id
from mt_grpo.integrations.agents.response_tools import read_response_tools
from mt_grpo.rollout import Message

REFUSED_OF_RESPONSES = ("background", "conversation", "prompt", "top_logprobs")
LOGPROBS = "message.output_text.logprobs"  # of `include`: what an answer would have to show
TEXT_OF_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}


def read_responses_request(
    body: dict[str, Any],
    stored: Responses,
    contents: Contents = TEXT,
    template_arguments: dict[str, Any] | None = None,
) -> ModelRequest:
    """A request as it is sampled.

    Args:
        body: The request.
        stored: What the conversation was answered here.
        contents: What reads contents.
        template_arguments: The recipe's `chat_template_kwargs`, with which everything is rendered.

    Raises:
        ApiError: what the API refuses.
    """
    trained = read_model(body.get("model"))
    check_template_arguments(body, template_arguments or {})
    for key in REFUSED_OF_RESPONSES:
        if body.get(key):
            raise refuse(key, "not supported. Remove it.", "unsupported_parameter")
    if LOGPROBS in expect(body.get("include") or [], list, "include", "a list"):
        raise refuse("include", f"{LOGPROBS} is not supported. Remove it.", "unsupported_parameter")
    text = expect(body.get("text") or {}, dict, "text", "an object")
    if expect(text.get("format") or {}, dict, "text.format", "an object").get("type", "text") != "text":
        tell_once("An agent sent text.format. It is accepted and not enforced: the policy writes what it writes.")
    reasoning = expect(body.get("reasoning") or {}, dict, "reasoning", "an object")
    tell_of_parallel_calls(body)
    if body.get("truncation") == "auto":
        tell_once("An agent sent truncation: auto. It is accepted but has no effect: a full context is an error 400.")
    return ModelRequest(
        instructed(body, conversation_of(body, stored, contents)),
        read_response_tools(body.get("tools")),
        read_stops(body.get("stop"), "stop"),
        read_limit(body.get("max_output_tokens"), "max_output_tokens"),
        trained,
        read_tool_choice(body.get("tool_choice")),
        bool(body.get("stream")),
        effort=read_effort(reasoning.get("effort"), "reasoning.effort"),
    )


def instructed(body: dict[str, Any], messages: list[Message]) -> list[Message]:
    """The messages behind the instructions, which are of one request only."""
    text = expect(body.get("instructions") or "", str, "instructions", "text")
    messages = [{"role": "system", "content": without_bill(text)}, *messages] if text else messages
    if not messages:
        raise refuse("input", "got nothing, expected text or items.")
    return messages


def is_said(item: dict[str, Any]) -> bool:
    """Whether an item is a message or reasoning, which vLLM would go on inside."""
    return item.get("type", "message") in ("message", "reasoning")


def conversation_of(body: dict[str, Any], stored: Responses, contents: Contents = TEXT) -> list[Message]:
    """The messages of a request without its instructions. Raises `ApiError`."""
    before = stored.before(body)
    last = body["input"][-1] if isinstance(body.get("input"), list) and body["input"] else None
    if isinstance(last, dict) and last.get("status") in ("in_progress", "incomplete") and is_said(last):
        raise refuse(
            "input",
            f"the last item has the status {last['status']}, and an answer does not go on inside it. Leave "
            "its status out, or let the conversation end with a user's message.",
        )
    return [*before.messages, *read_items(body.get("input"), contents, stored, before.ids)]


def response(answer: Answer, body: dict[str, Any], items: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """The response object of /v1/responses."""
    total = answer.prompt_tokens + answer.completion_tokens
    tokens = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": total,
    }
    return {
        "id": response_id(answer), "object": "response", "created_at": answer.created, "model": body["model"],
        "status": status, "error": None, "instructions": body.get("instructions"), "output": items,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto", "tools": body.get("tools") or [],
        "previous_response_id": body.get("previous_response_id"), "usage": None if status == "in_progress" else tokens,
    }  # fmt: skip


def final_status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def responses_answer(answers: list[Answer], body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that is no stream. This endpoint has one answer to each."""
    (answer,) = answers
    return response(answer, body, output_items(answer, body), final_status(answer))


def responses_events(answers: list[Answer], body: dict[str, Any]) -> Iterator[str]:
    """The answer as the events of a stream, once it is whole."""
    (answer,) = answers
    items, status, number = output_items(answer, body), final_status(answer), 0

    def event(kind: str, **values: Any) -> str:
        nonlocal number
        number += 1
        return f"event: {kind}\ndata: {json_text({'type': kind, 'sequence_number': number - 1, **values})}\n\n"

    yield event("response.created", response=response(answer, body, [], "in_progress"))
    yield event("response.in_progress", response=response(answer, body, [], "in_progress"))
    for k, item in enumerate(items):
        place = {"item_id": item["id"], "output_index": k}
        written = TEXT_OF_CALLS.get(item["type"])  # what a call says; else the item has a content of one part
        opened = {**item, "status": "in_progress", **({"content": []} if written is None else {written: ""})}
        yield event("response.output_item.added", output_index=k, item=opened)
        if written is not None:
            kind = f"response.{'custom_tool_call_input' if written == 'input' else 'function_call_arguments'}"
            name = {} if written == "input" else {"name": item["name"]}
            yield event(f"{kind}.delta", **place, delta=item[written])
            yield event(f"{kind}.done", **place, **{written: item[written]}, **name)
        else:
            (part,) = item["content"]
            place, kind = {**place, "content_index": 0}, f"response.{part['type']}"
            more = {"logprobs": []} if part["type"] == "output_text" else {}
            yield event("response.content_part.added", **place, part={**part, "text": ""})
            yield event(f"{kind}.delta", **place, delta=part["text"], **more)
            yield event(f"{kind}.done", **place, text=part["text"], **more)
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=k, item=item)
    yield event(f"response.{status}", response=response(answer, body, items, status))


def responses_error(error: ApiError) -> Iterator[str]:
    """An error behind the beginning of a stream."""
    values = {"type": "error", "code": error.code, "message": str(error), "param": error.param, "sequence_number": 0}
    yield f"event: error\ndata: {json_text(values)}\n\n"
