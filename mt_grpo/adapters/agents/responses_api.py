"""/v1/responses: requests read, answers written, whole or as a stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mt_grpo.adapters.agents.chat_api import ROLES, read_name
from mt_grpo.adapters.agents.messages import (
    TEXT,
    Answer,
    ApiError,
    Contents,
    ModelRequest,
    expect,
    read_limit,
    read_model,
    read_tool_choice,
    read_tools,
    refuse,
    tell_once,
    tool_call,
)
from mt_grpo.base.json_types import json_text
from mt_grpo.rollout import Message

REFUSED_OF_RESPONSES = ("background", "conversation", "prompt", "top_logprobs")


def read_responses_request(
    body: dict[str, Any], stored: dict[str, list[Message]], contents: Contents = TEXT
) -> ModelRequest:
    """A request as it is sampled.

    Args:
        body: The request.
        stored: The messages up to and including each earlier response, by its id; without instructions.
        contents: What reads contents.

    Raises:
        ApiError: what the API refuses.
    """
    trained = read_model(body.get("model"))
    for key in REFUSED_OF_RESPONSES:
        if body.get(key):
            raise refuse(key, "not supported. Remove it.", "unsupported_parameter")
    text = expect(body.get("text") or {}, dict, "text", "an object")
    if expect(text.get("format") or {}, dict, "text.format", "an object").get("type", "text") != "text":
        tell_once("An agent sent text.format. It is accepted and not enforced: the policy writes what it writes.")
    return ModelRequest(
        instructed(body, conversation_of(body, stored, contents)),
        read_tools(body.get("tools")),
        (),
        read_limit(body.get("max_output_tokens"), "max_output_tokens"),
        trained,
        read_tool_choice(body.get("tool_choice")),
        bool(body.get("stream")),
    )


def instructed(body: dict[str, Any], messages: list[Message]) -> list[Message]:
    """The messages behind the instructions, which are of one request only."""
    text = expect(body.get("instructions") or "", str, "instructions", "text")
    messages = [{"role": "system", "content": text}, *messages] if text else messages
    if not messages:
        raise refuse("input", "got nothing, expected text or items.")
    return messages


def conversation_of(
    body: dict[str, Any], stored: dict[str, list[Message]], contents: Contents = TEXT
) -> list[Message]:
    """The messages of a request without its instructions."""
    previous = body.get("previous_response_id")
    previous = None if previous is None else expect(previous, str, "previous_response_id", "text")
    if previous is not None and previous not in stored:
        raise ApiError(
            400, f"Previous response with id {previous!r} not found.", "previous_response_not_found",
            "previous_response_id",
        )  # fmt: skip
    return [*stored.get(previous, []), *read_items(body.get("input"), contents)]


def read_items(items: Any, contents: Contents = TEXT) -> list[Message]:
    """Items as messages. Reasoning, text and calls of one answer are one message of the assistant.

    Items that were given here say by their ids which answer they are of; others are of one where they are neighbours.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": contents.text(items, "input")}]
    messages: list[Message] = []
    numbered: dict[str, Message] = {}  # the assistant's messages, by the number of the answer

    def assistant() -> Message:
        found = re.fullmatch(r"(?:rs|msg|fc)_(\d+)(?:_\d+)?", str(item.get("id")))
        if found and found[1] in numbered:
            return numbered[found[1]]
        if found or not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        if found:
            numbered[found[1]] = messages[-1]
        return messages[-1]

    for k, item in enumerate(expect(items or [], list, "input", "text or a list of items")):
        param = f"input[{k}]"
        kind = expect(item, dict, param, "objects").get("type", "message")
        if kind == "reasoning":
            parts = [*(item.get("summary") or []), *(item.get("content") or [])]
            text = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            if text:
                assistant()["reasoning_content"] = text
            else:
                assistant()
        elif kind == "function_call":
            values = [expect(item.get(key), str, f"{param}.{key}", "text") for key in ("call_id", "name", "arguments")]
            assistant().setdefault("tool_calls", []).append(tool_call(*values))
        elif kind == "function_call_output":
            content = contents.text(item.get("output"), f"{param}.output", "\n")
            call_id = expect(item.get("call_id"), str, f"{param}.call_id", "the call's id")
            messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        elif kind == "message" and item.get("role") in [role for role in ROLES if role != "tool"]:
            role, content = item["role"], contents.text(item.get("content"), f"{param}.content")
            if role == "assistant":
                assistant()["content"] += content
                assistant().update(read_name(item, param))
            else:
                messages.append({"role": role, "content": content, **read_name(item, param)})
        else:
            raise refuse(param, f"got type {kind!r} with role {item.get('role')!r}, which is not supported.")
    return messages


def response_id(answer: Answer) -> str:
    """The id of a response, which a later request may name."""
    return f"resp_{answer.number}"


def output_items(answer: Answer) -> list[dict[str, Any]]:
    """The items of an answer: its reasoning, its text, its calls."""
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        text = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{answer.number}", "summary": [], "content": text})
    if answer.content or not answer.tool_calls:
        text = [{"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}]
        about = {"type": "message", "id": f"msg_{answer.number}", "role": "assistant", "status": "completed"}
        items.append({**about, "content": text})
    for k, call in enumerate(answer.tool_calls):
        about = {"type": "function_call", "id": f"fc_{answer.number}_{k}", "call_id": call["id"]}
        items.append({**about, **call["function"], "status": "completed"})
    return items


def response(answer: Answer, body: dict[str, Any], items: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """The object of a response."""
    total = answer.prompt_tokens + answer.completion_tokens
    tokens = {
        "input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": total,
    }  # fmt: skip
    return {
        "id": response_id(answer), "object": "response", "created_at": answer.created, "model": body["model"],
        "status": status, "error": None, "instructions": body.get("instructions"), "output": items,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "parallel_tool_calls": True, "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "previous_response_id": body.get("previous_response_id"), "usage": None if status == "in_progress" else tokens,
    }  # fmt: skip


def final_status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def responses_answer(answers: list[Answer], body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that is no stream. This endpoint has one answer to each."""
    (answer,) = answers
    return response(answer, body, output_items(answer), final_status(answer))


def responses_events(answers: list[Answer], body: dict[str, Any]) -> Iterator[str]:
    """The answer as the events of a stream, once it is whole."""
    (answer,) = answers
    items, status, number = output_items(answer), final_status(answer), 0

    def event(kind: str, **values: Any) -> str:
        nonlocal number
        number += 1
        return f"event: {kind}\ndata: {json_text({'type': kind, 'sequence_number': number - 1, **values})}\n\n"

    yield event("response.created", response=response(answer, body, [], "in_progress"))
    yield event("response.in_progress", response=response(answer, body, [], "in_progress"))
    for k, item in enumerate(items):
        place = {"item_id": item["id"], "output_index": k}
        open_item = {**item, "status": "in_progress", **{key: [] for key in ("content",) if key in item}}
        if item["type"] == "function_call":
            open_item["arguments"] = ""
        yield event("response.output_item.added", output_index=k, item=open_item)
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            yield event("response.function_call_arguments.delta", **place, delta=arguments)
            yield event("response.function_call_arguments.done", **place, arguments=arguments, name=name)
        elif item["type"] == "message":
            part = item["content"][0]
            place |= {"content_index": 0}
            yield event("response.content_part.added", **place, part={**part, "text": ""})
            yield event("response.output_text.delta", **place, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=k, item=item)
    yield event(f"response.{status}", response=response(answer, body, items, status))


def responses_error(error: ApiError) -> Iterator[str]:
    """An error behind the beginning of a stream."""
    values = {"type": "error", "code": error.code, "message": str(error), "param": error.param, "sequence_number": 0}
    yield f"event: error\ndata: {json_text(values)}\n\n"
