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
from mt_grpo.base.json_types import json_text
from mt_grpo.integrations.agents.chat_api import check_template_arguments
from mt_grpo.integrations.agents.messages import (
    BILLING,
    FROZEN,
    NO_THINKING,
    POLICY,
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
    read_tools,
    refuse,
    tool_call,
    without_bill,
)
from mt_grpo.rollout import Message

REFUSED_OF_ANTHROPIC = ("mcp_servers", "container")
NOT_ENFORCED = ("thinking", "output_config", "output_format", "context_management")
CHOICES = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}
SIGNED = re.compile(r"policy-\w*-\d+")  # by an answer
KINDS_OF_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 529: "overloaded_error",
}  # fmt: skip


# -- requests --


def read_anthropic_request(
    body: dict[str, Any],
    contents: Contents = TEXT,
    template_arguments: dict[str, Any] | None = None,
    later_systems: bool = True,
    counts: bool = False,
) -> ModelRequest:
    """A request as it is sampled.

    Args:
        body: The request.
        contents: What reads contents.
        template_arguments: The recipe's `chat_template_kwargs`, with which everything is rendered.
        later_systems: Whether the chat template takes a system's message that is not the first one.
        counts: Whether the request only asks how many tokens it has: then it needs no `max_tokens`.

    Raises:
        ApiError: what the API refuses.
    """
    trained = read_model(body.get("model"))
    check_template_arguments(body, template_arguments or {})
    for key in REFUSED_OF_ANTHROPIC:
        if body.get(key):
            raise refuse(key, "not supported. Remove it.")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        tell_once(
            "An agent sent disable_parallel_tool_use. It is accepted but not enforced: answers may have more calls."
        )
    for key in NOT_ENFORCED:
        if body.get(key):
            tell_once(f"An agent sent {key}. It is accepted and not enforced: the policy writes what it writes.")
    if body.get("max_tokens") is None and not counts:
        raise refuse("max_tokens", "got none, expected a positive number, which Anthropic's API requires.")
    return ModelRequest(
        read_conversation(body.get("system"), body.get("messages"), contents, later_systems),
        read_tools(read_schemas(body.get("tools"))),
        read_stops(body.get("stop_sequences"), "stop_sequences"),
        read_limit(body.get("max_tokens"), "max_tokens"),
        trained,
        read_choice(body.get("tool_choice")),
        bool(body.get("stream")),
        effort=effort_of(body),
    )


def effort_of(body: dict[str, Any]) -> str | None:
    """How much a request's answer is to reason. Raises `ApiError`."""
    thinking = expect(body.get("thinking") or {}, dict, "thinking", "an object")
    config = expect(body.get("output_config") or {}, dict, "output_config", "an object")
    effort = read_effort(config.get("effort"), "output_config.effort")
    return NO_THINKING if thinking.get("type") == "disabled" else effort


def read_conversation(
    system: Any, messages: Any, contents: Contents = TEXT, later_systems: bool = True
) -> list[Message]:
    """The system's text and the messages in one form. Raises `ApiError`.

    >>> read_conversation("Be brief.", [{"role": "user", "content": [
    ...     {"type": "text", "text": "And now?"}, {"type": "tool_result", "tool_use_id": "a", "content": "2"}]}])
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'tool', 'content': '2', 'tool_call_id': 'a'}, \
{'role': 'user', 'content': 'And now?'}]
    """
    text = isinstance(system, str)
    first = contents.text(without_bill(system), "system") if text else system_text(system, "system")
    read: list[Message] = []
    for k, message in enumerate(expect(messages, list, "messages", "a list of messages")):
        param = f"messages[{k}]"
        role = expect(message, dict, param, "an object with role and content").get("role")
        given = message.get("content")
        if role == "system":
            text = system_text(given, f"{param}.content")
            if text and later_systems:
                read.append({"role": "system", "content": text})
            elif text:
                first += text
        elif role not in ("user", "assistant"):
            raise refuse(f"{param}.role", f"got {role!r:.100}, expected user or assistant, or system.")
        elif isinstance(given, str):
            read.append({"role": role, "content": contents.text(given, f"{param}.content")})
        else:
            blocks = expect(given, list, f"{param}.content", "text, or a list of blocks")
            read += (user_messages if role == "user" else assistant_messages)(blocks, f"{param}.content", contents)
    if not read:
        raise refuse("messages", "got none with a content, expected at least one message.")
    if read[-1]["role"] == "assistant":  # also where what is behind it is empty
        raise refuse(
            "messages",
            "the last one is the assistant's, and an answer does not go on inside it. Let the "
            "conversation end with a user's message.",
        )
    return [{"role": "system", "content": first}, *read] if first else read


def system_text(given: Any, param: str) -> str:
    """The text of a system's blocks, one behind the other, without what Claude Code says of its bill."""
    given = [{"type": "text", "text": given}] if isinstance(given, str) else given
    texts = []
    for k, block in enumerate(expect([] if given is None else given, list, param, "text, or a list of text blocks")):
        if kind_of(block, f"{param}[{k}]") != "text":
            raise refuse(f"{param}[{k}]", f"got a block of type {block['type']!r:.100}, expected text.")
        texts.append(expect(block.get("text"), str, f"{param}[{k}].text", "text"))
    return TEXT.text("".join(text for text in texts if not text.startswith(BILLING)), param)


def kind_of(block: Any, param: str) -> str:
    """The type of a block. Raises `ApiError`."""
    return expect(expect(block, dict, param, "an object with a type").get("type"), str, f"{param}.type", "text")


def parts_of(block: dict[str, Any], param: str, contents: Contents) -> list[dict[str, Any]]:
    """A block of text or an image as parts of a content. An empty text is none. Raises `ApiError`."""
    if block["type"] == "text":
        text = expect(block.get("text"), str, f"{param}.text", "text")
        return [{"type": "text", "text": text}] if text else []
    if block["type"] != "image":
        raise refuse(param, f"got a block of type {block['type']!r:.100}, which is not supported here. Remove it.")
    if contents.reader is None:
        raise refuse(param, f"got an image, and the policy reads text only ({contents.why}).")
    source = expect(block.get("source"), dict, f"{param}.source", "an object")
    if source.get("type") != "base64":
        raise refuse(
            f"{param}.source",
            f"got type {source.get('type')!r:.100}, expected base64: no address is fetched, and no "
            "file is kept. Send the image itself, as media_type and data.",
        )
    kind, data = (expect(source.get(key), str, f"{param}.source.{key}", "text") for key in ("media_type", "data"))
    return [{"type": "input_image", "image_url": f"data:{kind};base64,{data}"}]


def user_messages(blocks: list[Any], param: str, contents: Contents) -> list[Message]:
    """Results of tools, and behind them a user's message of all else. Raises `ApiError`."""
    read, parts = [], []
    for k, block in enumerate(blocks):
        if kind_of(block, f"{param}[{k}]") == "tool_result":
            read += result_messages(block, f"{param}[{k}]", contents)
        else:
            parts += parts_of(block, f"{param}[{k}]", contents)
    return [*read, {"role": "user", "content": contents.text(parts, param)}] if parts else read


def result_messages(block: dict[str, Any], param: str, contents: Contents) -> list[Message]:
    """A result as a tool's message. Its images are a user's message behind it."""
    call_id = expect(block.get("tool_use_id"), str, f"{param}.tool_use_id", "the id of a tool_use block")
    given = block.get("content")
    texts, images = [given] if isinstance(given, str) else [], []
    if not isinstance(given, str):
        for k, each in enumerate(expect([] if given is None else given, list, f"{param}.content", "text, or blocks")):
            where = f"{param}.content[{k}]"
            if kind_of(each, where) == "text":
                texts.append(expect(each.get("text"), str, f"{where}.text", "text"))
            else:
                images += parts_of(each, where, contents)
    text = contents.text("\n".join(texts), param)
    failed = {"failed": True} if read_flag(block.get("is_error"), f"{param}.is_error") else {}
    read: list[Message] = [{"role": "tool", "content": text, "tool_call_id": own_id(call_id), **failed}]
    return [*read, {"role": "user", "content": contents.text(images, param)}] if images else read


def read_flag(value: Any, param: str) -> bool:
    """True or false; null is false. Raises `ApiError`."""
    return bool(value is not None and expect(value, bool, param, "true or false"))


def assistant_messages(blocks: list[Any], param: str, contents: Contents) -> list[Message]:
    """The text, the thinking and the calls of an answer as one message. Raises `ApiError`."""
    parts, thinking, signature, calls = [], "", None, []
    for k, block in enumerate(blocks):
        where, kind = f"{param}[{k}]", kind_of(block, f"{param}[{k}]")
        if kind == "thinking":
            thinking += expect(block.get("thinking"), str, f"{where}.thinking", "text")
            signature = block.get("signature")
        elif kind == "tool_use":
            call_id, name = (expect(block.get(key), str, f"{where}.{key}", "text") for key in ("id", "name"))
            given = expect(block.get("input"), dict, f"{where}.input", "an object")
            calls.append(tool_call(own_id(call_id), name, json.dumps(given)))
        elif kind == "text":
            parts += parts_of(block, where, contents)
        elif kind != "redacted_thinking":
            raise refuse(where, f"got a block of type {kind!r:.100}, which is not supported here. Remove it.")
    message: Message = {"role": "assistant", "content": contents.text(parts, param)}
    if thinking:
        message["reasoning_content"] = thinking
    if isinstance(signature, str) and SIGNED.fullmatch(signature):
        message["signature"] = signature
    return [message | ({"tool_calls": calls} if calls else {})]


def own_id(tool_use_id: str) -> str:
    """A call's id as the other endpoints know it.

    >>> own_id("toolu_00000003"), own_id("toolu_01A09q90qw90lq91")
    ('call_00000003', 'toolu_01A09q90qw90lq91')
    """
    return re.sub(r"\Atoolu_(\d{8,12})\Z", r"call_\1", tool_use_id)


def read_schemas(tools: Any) -> list[dict[str, Any]]:
    """Tools in the form of /v1/chat/completions, before their schemas are checked. Raises `ApiError`."""
    read = []
    for k, tool in enumerate(expect(tools or [], list, "tools", "a list")):
        kind = expect(tool, dict, f"tools[{k}]", "an object").get("type")
        if kind not in (None, "custom"):
            raise refuse(
                f"tools[{k}]", f"got type {kind!r:.100}, expected a tool of the agent's own, with input_schema."
            )
        schema = expect(tool.get("input_schema"), dict, f"tools[{k}].input_schema", "a JSON schema")
        schema = schema if "type" in schema else {**schema, "type": "object"}
        given = {key: tool[key] for key in ("strict", "defer_loading") if tool.get(key) is not None}
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema, **given}
        read.append({"type": "function", "function": function})
    return read


def read_choice(choice: Any) -> bool:
    """Whether the policy may call tools, by `tool_choice`. Raises `ApiError`."""
    kind = expect({"type": "auto"} if choice is None else choice, dict, "tool_choice", "an object").get("type")
    if not isinstance(kind, str) or kind not in CHOICES:
        raise refuse("tool_choice", f"got type {kind!r:.100}, expected one of {', '.join(CHOICES)}.")
    return read_tool_choice(CHOICES[kind])


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
        call_id = call["id"].replace("call_", "toolu_", 1)
        blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": arguments})
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


def anthropic_answer(answers: list[Answer], body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that is no stream. This endpoint has one answer to each."""
    (answer,) = answers
    return {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": content_blocks(answer),
        **stop_of(answer),
        "usage": usage_of(answer, answer.completion_tokens),
    }


def named_event(kind: str, **values: Any) -> str:
    """Format one server-sent event of a stream."""
    return f"event: {kind}\ndata: {json_text({'type': kind, **values})}\n\n"


def anthropic_events(answers: list[Answer], body: dict[str, Any]) -> Iterator[str]:
    """The answer as the events of a stream, once it is whole."""
    (answer,) = answers
    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_of(answer, 0)}
    yield named_event("message_start", message={**anthropic_answer(answers, body), **begun})
    yield named_event("ping")
    for k, block in enumerate(content_blocks(answer)):
        if block["type"] == "tool_use":
            opened, deltas = (
                {**block, "input": {}},
                [{"type": "input_json_delta", "partial_json": json_text(block["input"])}],
            )
        elif block["type"] == "thinking":
            opened = {**block, "thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        else:
            opened, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        yield named_event("content_block_start", index=k, content_block=opened)
        for delta in deltas:
            yield named_event("content_block_delta", index=k, delta=delta)
        yield named_event("content_block_stop", index=k)
    yield named_event("message_delta", delta=stop_of(answer), usage=usage_of(answer, answer.completion_tokens))
    yield named_event("message_stop")


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """An error as Anthropic's API has it."""
    kind = KINDS_OF_ERRORS.get(error.status, "api_error" if error.status > 500 else "invalid_request_error")
    too_long = "prompt is too long: " if error.code == "context_length_exceeded" else ""  # by which programs know it
    return {"type": "error", "error": {"type": kind, "message": f"{too_long}{error}"}}


def anthropic_error_event(error: ApiError) -> Iterator[str]:
    """An error behind the beginning of a stream."""
    yield named_event("error", error=anthropic_error(error)["error"])


def anthropic_models(name: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The list of models with these names, or one of them. Raises `ApiError` for an unknown one."""
    about = {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
    known = {each: {"id": each, "display_name": each, **about} for each in names if each}
    if name and name not in known:
        read_model(name)
    return (
        known[name]
        if name
        else {
            "data": list(known.values()),
            "has_more": False,
            "first_id": POLICY,
            "last_id": FROZEN,
        }
    )
