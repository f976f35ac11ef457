"""/v1/chat/completions: requests read, answers written, whole or as a stream.

A module of an API has `read`, `write`, `events` (of a stream) and `error` (after the beginning of a stream).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mt_grpo.base.rows import json_text
from mt_grpo.integrations.agents.messages import (
    MOST_ANSWERS,
    Answer,
    ApiError,
    Contents,
    ModelRequest,
    expect,
    read_limit,
    read_stops,
    read_tool_choice,
    read_tools,
    refuse,
    tool_call,
)
from mt_grpo.rollout import Message

ROLES = ("system", "developer", "user", "assistant", "tool")


def read(body: dict[str, Any], session: Any) -> ModelRequest:
    """A request as it is sampled. Raises `ApiError`."""
    expect(body.get("stream_options") or {}, dict, "stream_options")
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return ModelRequest(
        read_messages(body.get("messages"), session.contents),
        read_tools(body.get("tools")),
        read_stops(body.get("stop"), "stop"),
        read_limit(body.get(limit), limit),
        read_tool_choice(body.get("tool_choice")),
        read_limit(body.get("n"), "n", MOST_ANSWERS) or 1,
    )


def read_messages(messages: Any, contents: Contents) -> list[Message]:
    """Messages in one form, with texts as content. Raises `ApiError`."""
    if not expect(messages, list, "messages"):
        raise refuse("messages", "got none, expected at least one message.")
    messages_read = []
    for k, message in enumerate(messages):
        param = f"messages[{k}]"
        role = expect(message, dict, param).get("role")
        if role not in ROLES:
            raise refuse(f"{param}.role", f"got {role!r:.100}, expected one of {', '.join(ROLES)}.")
        if message.get("content") is None and role not in ("assistant", "tool"):
            raise refuse(f"{param}.content", "got null, expected text.")
        content = contents.text(message.get("content"), f"{param}.content", "\n" if role == "tool" else None)
        each: Message = {"role": role, "content": content, **read_name(message, param)}
        if role == "tool":
            each["tool_call_id"] = expect(message.get("tool_call_id"), str, f"{param}.tool_call_id")
        elif role == "assistant":
            each |= read_assistant(message, param)
        messages_read.append(each)
    return messages_read


def read_name(message: dict[str, Any], param: str) -> Message:
    """The name of the speaker, if a message has one."""
    name = message.get("name")
    return {} if name is None else {"name": expect(name, str, f"{param}.name")}


def read_assistant(message: dict[str, Any], param: str) -> Message:
    """The calls and the reasoning of an assistant's message. Raises `ApiError`."""
    read: Message = {}
    for key in ("function_call", "audio"):
        if message.get(key):
            raise refuse(f"{param}.{key}", "not supported. Remove it.", "unsupported_parameter")
    for call in expect(message.get("tool_calls") or [], list, f"{param}.tool_calls"):
        function = expect(call.get("function"), dict, f"{param}.tool_calls")
        fields = (call.get("id"), function.get("name"), function.get("arguments"))
        call_id, name, arguments = (expect(each, str, f"{param}.tool_calls") for each in fields)
        read.setdefault("tool_calls", []).append(tool_call(call_id, name, arguments))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return read | ({"reasoning_content": reasoning} if isinstance(reasoning, str) else {})


def head(answer: Answer, body: dict[str, Any], kind: str) -> dict[str, Any]:
    """The common first fields of an answer and of each of its chunks."""
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": answer.created, "model": body["model"]}


def usage(answers: list[Answer]) -> dict[str, int]:
    """The tokens of a request. All of its answers read the same prompt, which counts once."""
    read, written = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def message_of(answer: Answer) -> dict[str, Any]:
    """The message object of an answer, in the form of /v1/chat/completions."""
    content = answer.content or (None if answer.tool_calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message | ({"tool_calls": answer.tool_calls} if answer.tool_calls else {})


def write(answers: list[Answer], body: dict[str, Any]) -> dict[str, Any]:
    """The answers to a request that is no stream: a choice of each."""
    choices = [
        {"index": k, "message": message_of(answer), "logprobs": None, "finish_reason": answer.finish_reason}
        for k, answer in enumerate(answers)
    ]
    return {**head(answers[0], body, "chat.completion"), "choices": choices, "usage": usage(answers)}


def events(answers: list[Answer], body: dict[str, Any]) -> Iterator[str]:
    """The answers as the events of a stream, once they are whole: one choice after the other."""
    start = head(answers[0], body, "chat.completion.chunk")

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return data({**start, "choices": [choice]})

    for index, answer in enumerate(answers):
        message = message_of(answer)
        calls = message.pop("tool_calls", [])
        yield chunk(index, message)
        for k, call in enumerate(calls):
            yield chunk(index, {"tool_calls": [{"index": k, **call}]})
        yield chunk(index, {}, answer.finish_reason)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield data({**start, "choices": [], "usage": usage(answers)})
    yield "data: [DONE]\n\n"


def error(raised: ApiError) -> Iterator[str]:
    """An error after the beginning of a stream."""
    yield data(raised.body)


def data(value: dict[str, Any]) -> str:
    """Format one server-sent event without a name."""
    return f"data: {json_text(value)}\n\n"
