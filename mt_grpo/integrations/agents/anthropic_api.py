"""/v1/messages of Anthropic's API: requests read, answers written, whole or as a stream, and its errors.

INVARIANT: a request becomes the messages that vLLM's /v1/messages makes of it, so that a policy is trained on the
prompts that it is deployed with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.base.rows import json_text
from mt_grpo.integrations.agents.messages import (
    TEXT,
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

SIGNED = re.compile(r"policy-\w*-\d+")  # by an answer
# Claude Code's system prompt has a line with a hash of the request, which vLLM does not show to the model. If it were
# read, no request would continue an earlier one.
BILLING = "x-anthropic-billing-header"
KINDS_OF_ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "api_error"}


# -- requests --


def read(body: dict[str, Any], session: Any) -> ModelRequest:
    """A request as it is sampled. Raises `ApiError`."""
    choice = expect(body.get("tool_choice") or {}, dict, "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        tell_once("An agent sent disable_parallel_tool_use. It is accepted and has no effect.")
    return ModelRequest(
        read_conversation(
            body.get("system"), body.get("messages"), session.contents, session.prompts.takes_later_systems
        ),
        read_tools(read_schemas(body.get("tools"))),
        read_stops(body.get("stop_sequences"), "stop_sequences"),
        read_limit(body.get("max_tokens"), "max_tokens"),
        read_tool_choice(choice),
    )


def read_conversation(
    system: Any, messages: Any, contents: Contents = TEXT, later_systems: bool = True
) -> list[Message]:
    """The system's text and the messages in one form. Raises `ApiError`.

    >>> read_conversation("Be brief.", [{"role": "user", "content": [
    ...     {"type": "text", "text": "And now?"}, {"type": "tool_result", "tool_use_id": "a", "content": "2"}]}])
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'tool', 'content': '2', 'tool_call_id': 'a'}, \
{'role': 'user', 'content': 'And now?'}]
    """
    first = system_text(system, "system")
    read: list[Message] = []
    for k, message in enumerate(expect(messages, list, "messages")):
        param = f"messages[{k}].content"
        role, content = expect(message, dict, f"messages[{k}]").get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise refuse(f"messages[{k}].role", f"got {role!r:.100}, expected user, assistant or system.")
        if role == "system":
            text = system_text(content, param)
            if not later_systems:
                first += text
            elif text:
                read.append({"role": "system", "content": text})
        elif isinstance(content, str):
            read.append({"role": role, "content": contents.text(content, param)})
        else:
            blocks = expect(content, list, param)
            read += (user_messages if role == "user" else assistant_messages)(blocks, param, contents)
    if not read:
        raise refuse("messages", "got none with a content, expected at least one message.")
    if read[-1]["role"] == "assistant":  # also where the content after it is empty
        raise refuse("messages", "the last one is the assistant's. Let the conversation end with a user's message.")
    return [{"role": "system", "content": first}, *read] if first else read


def system_text(system: Any, param: str) -> str:
    """The text of a system's blocks, one after the other, without Claude Code's line of billing."""
    if isinstance(system, str):
        return TEXT.text(system.partition("\n")[2] if system.startswith(BILLING) else system, param)
    texts = [TEXT.text([block], param) for block in expect([] if system is None else system, list, param)]
    return "".join(text for text in texts if not text.startswith(BILLING))


def parts_of(block: Any, param: str) -> list[dict[str, Any]]:
    """A block of text or an image as parts of a content. An empty text is none. Raises `ApiError`."""
    kind = expect(block, dict, param).get("type")
    if kind == "text":
        text = expect(block.get("text"), str, f"{param}.text")
        return [{"type": "text", "text": text}] if text else []
    if kind != "image":
        raise refuse(param, f"got a block of type {kind!r:.100}, which is not supported here. Remove it.")
    source = expect(block.get("source"), dict, f"{param}.source")
    if source.get("type") != "base64":
        raise refuse(f"{param}.source", f"got type {source.get('type')!r:.100}, expected base64: nothing is fetched.")
    media, data_ = (expect(source.get(key), str, f"{param}.source.{key}") for key in ("media_type", "data"))
    return [{"type": "input_image", "image_url": f"data:{media};base64,{data_}"}]


def user_messages(blocks: list[Any], param: str, contents: Contents) -> list[Message]:
    """Results of tools, and after them a user's message of all else. Raises `ApiError`."""
    read, parts = [], []
    for k, block in enumerate(blocks):
        if expect(block, dict, f"{param}[{k}]").get("type") == "tool_result":
            read += result_messages(block, f"{param}[{k}]", contents)
        else:
            parts += parts_of(block, f"{param}[{k}]")
    return [*read, {"role": "user", "content": contents.text(parts, param)}] if parts else read


def result_messages(block: dict[str, Any], param: str, contents: Contents) -> list[Message]:
    """A result as a tool's message. Its images are a user's message after it. Raises `ApiError`."""
    call_id, content = expect(block.get("tool_use_id"), str, f"{param}.tool_use_id"), block.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    texts, images = [], []
    for k, each in enumerate(expect(blocks, list, f"{param}.content")):
        if expect(each, dict, param).get("type") == "text":
            texts.append(expect(each.get("text"), str, f"{param}.content[{k}].text"))
        else:
            images += parts_of(each, f"{param}.content[{k}]")
    failed = {"failed": True} if expect(block.get("is_error") or False, bool, f"{param}.is_error") else {}
    text = contents.text("\n".join(texts), param)
    read: list[Message] = [{"role": "tool", "content": text, "tool_call_id": call_id, **failed}]
    return [*read, {"role": "user", "content": contents.text(images, param)}] if images else read


def assistant_messages(blocks: list[Any], param: str, contents: Contents) -> list[Message]:
    """The text, the thinking and the calls of an answer as one message. Raises `ApiError`."""
    parts, thinking, signature, calls = [], "", None, []
    for k, block in enumerate(blocks):
        param_of_block = f"{param}[{k}]"
        kind = expect(block, dict, param_of_block).get("type")
        if kind == "thinking":
            thinking += expect(block.get("thinking"), str, f"{param_of_block}.thinking")
            signature = block.get("signature")
        elif kind == "tool_use":
            call_id, name = (expect(block.get(key), str, f"{param_of_block}.{key}") for key in ("id", "name"))
            arguments = expect(block.get("input"), dict, f"{param_of_block}.input")
            calls.append(tool_call(call_id, name, json.dumps(arguments)))
        elif kind != "redacted_thinking":
            parts += parts_of(block, param_of_block)
    message: Message = {"role": "assistant", "content": contents.text(parts, param)}
    if thinking:
        message["reasoning_content"] = thinking
    if isinstance(signature, str) and SIGNED.fullmatch(signature):
        message["signature"] = signature
    return [message | ({"tool_calls": calls} if calls else {})]


def read_schemas(tools: Any) -> list[dict[str, Any]]:
    """Tools in the form of /v1/chat/completions, before their schemas are checked. Raises `ApiError`."""
    read = []
    for k, tool in enumerate(expect(tools or [], list, "tools")):
        if expect(tool, dict, f"tools[{k}]").get("type") not in (None, "custom"):
            raise refuse(f"tools[{k}]", f"got type {tool['type']!r:.100}, expected a tool of the agent's own.")
        schema = expect(tool.get("input_schema"), dict, f"tools[{k}].input_schema")
        function = {"name": tool.get("name"), "description": tool.get("description")}
        function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
        function |= {key: tool[key] for key in ("strict", "defer_loading") if tool.get(key) is not None}
        read.append({"type": "function", "function": function})
    return read


# -- answers --


def content_blocks(answer: Answer) -> list[dict[str, Any]]:
    """The blocks of an answer: its thinking, its text, its calls. There is always one, so that a program finds it."""
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": answer.signature})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.tool_calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks


def stop_of(answer: Answer) -> dict[str, str | None]:
    """Why an answer ended. A call that is whole counts more than the text that ended the turn."""
    reason, text = "end_turn", None
    if answer.finish_reason == "length":
        reason = "max_tokens"
    elif answer.tool_calls:
        reason = "tool_use"
    elif answer.stop is not None:
        reason, text = "stop_sequence", answer.stop
    return {"stop_reason": reason, "stop_sequence": text, "stop_details": None}


def usage_of(answer: Answer, output_tokens: int) -> dict[str, int]:
    """The `usage` object of an answer: numbers of tokens."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": answer.prompt_tokens, **cached, "output_tokens": output_tokens}


def write(answers: list[Answer], body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that is no stream. This endpoint has one answer to each."""
    (answer,) = answers
    about = {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": body["model"]}
    tokens = usage_of(answer, answer.completion_tokens)
    return {**about, "content": content_blocks(answer), **stop_of(answer), "usage": tokens}


def named_event(kind: str, **values: Any) -> str:
    """Format one server-sent event with a name."""
    return f"event: {kind}\ndata: {json_text({'type': kind, **values})}\n\n"


def events(answers: list[Answer], body: dict[str, Any]) -> Iterator[str]:
    """The answer as the events of a stream, once it is whole."""
    (answer,) = answers
    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_of(answer, 0)}
    yield named_event("message_start", message={**write(answers, body), **begun})
    yield named_event("ping")
    for k, block in enumerate(content_blocks(answer)):
        if block["type"] == "tool_use":
            opened = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json_text(block["input"])}]
        else:
            texts = [key for key in ("thinking", "signature", "text") if key in block]
            opened = {**block, **dict.fromkeys(texts, "")}
            deltas = [{"type": f"{key}_delta", key: block[key]} for key in texts]
        yield named_event("content_block_start", index=k, content_block=opened)
        for delta in deltas:
            yield named_event("content_block_delta", index=k, delta=delta)
        yield named_event("content_block_stop", index=k)
    yield named_event("message_delta", delta=stop_of(answer), usage=usage_of(answer, answer.completion_tokens))
    yield named_event("message_stop")


def error(raised: ApiError) -> Iterator[str]:
    """An error after the beginning of a stream."""
    yield named_event("error", error=refusal(raised)["error"])


def refusal(raised: ApiError) -> dict[str, Any]:
    """An error as the body of an answer."""
    kind = KINDS_OF_ERRORS.get(raised.status, "invalid_request_error")
    too_long = "prompt is too long: " if raised.code == "context_length_exceeded" else ""  # by which programs know it
    error = {"type": kind, "message": f"{too_long}{raised}"}
    if raised.param == "thread":  # the client's tool runner then sends the whole history with each request
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error}
