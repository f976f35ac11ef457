"""/v1/responses: requests read, answers written, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mt_grpo.integrations.agents.anthropic_api import named_event
from mt_grpo.integrations.agents.messages import (
    Answer,
    ApiError,
    ModelRequest,
    expect,
    read_limit,
    read_stops,
    read_tool_choice,
    refuse,
)
from mt_grpo.integrations.agents.response_items import output_items, read_items, read_response_tools, response_id

LOGPROBS = "message.output_text.logprobs"  # of `include`: what an answer would have to show
TEXT_OF_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}


def read(body: dict[str, Any], session: Any) -> ModelRequest:
    """A request as it is sampled. Raises `ApiError`."""
    if LOGPROBS in (body.get("include") or []):
        raise refuse("include", f"{LOGPROBS} is not supported. Remove it.", "unsupported_parameter")
    text = expect(body.get("instructions") or "", str, "instructions")
    instructions = [{"role": "system", "content": text}] if text else []  # of this request only
    before = session.responses.before(body)
    messages = [*before, *read_items(body.get("input"), session.contents, session.responses, before)]
    if not instructions and not messages:
        raise refuse("input", "got nothing, expected text or items.")
    return ModelRequest(
        [*instructions, *messages],
        read_response_tools(body.get("tools")),
        read_stops(body.get("stop"), "stop"),
        read_limit(body.get("max_output_tokens"), "max_output_tokens"),
        read_tool_choice(body.get("tool_choice")),
    )


def response(answer: Answer, body: dict[str, Any], items: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """The response object of /v1/responses."""
    tokens = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
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


def write(answers: list[Answer], body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that is no stream. This endpoint has one answer to each."""
    (answer,) = answers
    return response(answer, body, output_items(answer, body), final_status(answer))


def events(answers: list[Answer], body: dict[str, Any]) -> Iterator[str]:
    """The answer as the events of a stream, once it is whole."""
    (answer,) = answers
    items, status, number = output_items(answer, body), final_status(answer), 0

    def event(kind: str, **values: Any) -> str:
        nonlocal number
        number += 1
        return named_event(kind, sequence_number=number - 1, **values)

    for kind in ("created", "in_progress"):
        yield event(f"response.{kind}", response=response(answer, body, [], "in_progress"))
    for k, item in enumerate(items):
        place = {"item_id": item["id"], "output_index": k}
        written = TEXT_OF_CALLS.get(item["type"])  # the text of a call; other items have a content of one part
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


def error(raised: ApiError) -> Iterator[str]:
    """An error after the beginning of a stream."""
    yield named_event("error", code=raised.code, message=str(raised), param=raised.param, sequence_number=0)
