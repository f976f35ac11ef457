"""/v1/chat/completions: requests read, answers written, whole or as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.base.json_types import json_text
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
    read_number,
    read_stops,
    read_tool_choice,
    read_tools,
    refuse,
    tell_of_parallel_calls,
    tool_call,
    without_bill,
)
from mt_grpo.rollout import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
# What an answer would have to show, or what changes what the model reads, so that it cannot be ignored. Other unknown
# parameters are: the policy's sampling is the trainer's.
REFUSED = ("logprobs", "top_logprobs", "audio", "functions", "function_call", "web_search_options", "chat_template",
           "documents", "continue_final_message", "echo", "prompt_logprobs", "return_token_ids",
           "truncate_prompt_tokens", "add_special_tokens", "mm_processor_kwargs")  # fmt: skip


def read_chat_request(
    body: dict[str, Any], contents: Contents = TEXT, template_arguments: dict[str, Any] | None = None
) -> ModelRequest:
    """A request as it is sampled.

    Args:
        body: The request.
        contents: What reads contents.
        template_arguments: The recipe's `chat_template_kwargs`, with which everything is rendered.

    Raises:
        ApiError: what the API refuses.
    """
    trained = read_model(body.get("model"))
    check_template_arguments(body, template_arguments or {})
    for key in REFUSED:
        if body.get(key):
            raise refuse(key, "not supported. Remove it.", "unsupported_parameter")
    expect(body.get("stream_options") or {}, dict, "stream_options", "an object")
    if expect(body.get("response_format") or {}, dict, "response_format", "an object").get("type", "text") != "text":
        tell_once("An agent sent response_format. It is accepted and not enforced: the policy writes what it writes.")
    tell_of_parallel_calls(body)
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return ModelRequest(
        read_messages(body.get("messages"), contents),
        read_tools(body.get("tools")),
        read_stops(body.get("stop"), "stop"),
        read_limit(body.get(limit), limit),
        trained,
        read_tool_choice(body.get("tool_choice")),
        bool(body.get("stream")),
        read_number(body.get("n")),
        effort=read_effort(body.get("reasoning_effort"), "reasoning_effort"),
    )


def check_template_arguments(body: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise `ApiError` for arguments of the chat template that are not the recipe's, as vLLM takes them."""
    asked = expect(body.get("chat_template_kwargs") or {}, dict, "chat_template_kwargs", "an object")
    for key, value in asked.items():
        if key not in ours or ours[key] != value:
            raise refuse(
                f"chat_template_kwargs.{key}",
                f"got {value!r:.100}. The model reads what the recipe says: write "
                f"chat_template_kwargs: {{{key}: {json.dumps(value)}}} there, and it may stay in the request.",
            )
    if body.get("add_generation_prompt") is False:
        raise refuse("add_generation_prompt", "got false. The policy always answers.")


def read_messages(messages: Any, contents: Contents = TEXT) -> list[Message]:
    """Messages in one form, with texts as content. Raises `ApiError`."""
    if not expect(messages, list, "messages", "a list of messages"):
        raise refuse("messages", "got none, expected at least one message.")
    read = []
    for k, message in enumerate(messages):
        param = f"messages[{k}]"
        expect(message, dict, param, "an object with role and content")
        if not isinstance(message.get("role"), str) or message["role"] not in ROLES:
            raise refuse(f"{param}.role", f"got {message.get('role')!r}, expected one of {', '.join(ROLES)}.")
        role = message["role"]
        given = without_bill(message.get("content")) if role == "system" else message.get("content")
        content = contents.text(given, f"{param}.content", "\n" if role == "tool" else None)
        each: Message = {"role": role, "content": content, **read_name(message, param)}
        if role == "tool":
            each["tool_call_id"] = expect(message.get("tool_call_id"), str, f"{param}.tool_call_id", "the call's id")
        elif role == "assistant":
            each |= read_assistant(message, param)
        elif message.get("content") is None:
            raise refuse(f"{param}.content", "got null, expected text.")
        read.append(each)
    return read


def read_name(message: dict[str, Any], param: str) -> Message:
    """The name of who speaks, where a message has one."""
    name = message.get("name")
    return {} if name is None else {"name": expect(name, str, f"{param}.name", "text")}


def read_assistant(message: dict[str, Any], param: str) -> Message:
    """The calls and the reasoning of an assistant's message."""
    read: Message = {}
    for key in ("function_call", "audio"):
        if message.get(key):
            raise refuse(f"{param}.{key}", "not supported. Write calls as tool_calls.", "unsupported_parameter")
    calls = expect(message.get("tool_calls") or [], list, f"{param}.tool_calls", "a list of calls")
    for call in calls:
        function = expect(call, dict, f"{param}.tool_calls", "objects").get("function")
        if not isinstance(function, dict) or not all(isinstance(function.get(k), str) for k in ("name", "arguments")):
            raise refuse(
                f"{param}.tool_calls", f"got {call!r:.200}, expected a function's name, and arguments as text."
            )
        call_id = expect(call.get("id"), str, f"{param}.tool_calls", "an id of each call")
        read.setdefault("tool_calls", []).append(tool_call(call_id, function["name"], function["arguments"]))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        read["reasoning_content"] = reasoning
    return read


def head(answer: Answer, body: dict[str, Any], kind: str) -> dict[str, Any]:
    """The common first fields of an answer and of each of its chunks."""
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": answer.created, "model": body["model"]}


def usage(answers: list[Answer]) -> dict[str, int]:
    """The tokens of a request. All of its answers read the same prompt, which counts once."""
    read, written = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def message_of(answer: Answer) -> dict[str, Any]:
    """The message object of an answer, in the form of /v1/chat/completions."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
    if not answer.tool_calls:
        message["content"] = answer.content
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message | ({"tool_calls": answer.tool_calls} if answer.tool_calls else {})


def chat_answer(answers: list[Answer], body: dict[str, Any]) -> dict[str, Any]:
    """The answers to a request that is no stream: a choice of each."""
    choices = [
        {"index": k, "message": message_of(answer), "logprobs": None, "finish_reason": answer.finish_reason}
        for k, answer in enumerate(answers)
    ]
    return {**head(answers[0], body, "chat.completion"), "choices": choices, "usage": usage(answers)}


def chat_events(answers: list[Answer], body: dict[str, Any]) -> Iterator[str]:
    """The answers as the events of a stream, once they are whole: one choice behind the other."""
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


def chat_error(error: ApiError) -> Iterator[str]:
    """An error behind the beginning of a stream."""
    yield data(error.body)


def data(value: dict[str, Any]) -> str:
    """Format one server-sent event without a name."""
    return f"data: {json_text(value)}\n\n"
