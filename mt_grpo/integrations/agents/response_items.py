"""Items and tools of /v1/responses: those of an answer, and those of a request as messages and functions.

INVARIANT: the model is shown the functions that vLLM's /v1/responses makes of the same tools, so that a policy is
trained on the prompts that it is deployed with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.base.rows import json_text
from mt_grpo.integrations.agents.chat_api import ROLES, read_name
from mt_grpo.integrations.agents.messages import Answer, ApiError, Contents, expect, read_tools, refuse, tool_call
from mt_grpo.rollout import Message

OWN = re.compile(r"(?:rs|msg|fc|ctc)_(\w+?)_(\d+)(?:_\d+)?")  # the id of an item: its conversation, its answer
CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
INPUT = "input"  # the only parameter of the function that a tool of type custom is shown as


# -- tools --


def read_response_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools in the form of /v1/chat/completions: functions, those of namespaces, and custom tools.

    Raises:
        ApiError: a tool is invalid, or its type is not known.

    >>> tool = {"type": "function", "name": "say"}
    >>> spaces = [{"type": "namespace", "name": "team", "tools": [tool]}, {"type": "file_search"}]
    >>> [each["function"]["name"] for each in read_response_tools([tool, *spaces])]
    ['say', 'team__say']
    """
    return read_tools([function for tool in expect(tools or [], list, "tools") for function in functions_of(tool)])


def functions_of(tool: Any, space: str | None = None) -> Iterator[dict[str, Any]]:
    """The functions that a tool, of a namespace or of none, is shown as. Raises `ApiError`."""
    kind = expect(expect(tool, dict, "tools").get("type"), str, "tools")
    if kind == "function":
        yield {**tool, "name": joined_name(space, expect(tool.get("name"), str, "tools"))}
    elif kind == "namespace" and space is None:
        for each in expect(tool.get("tools"), list, "tools"):
            yield from functions_of(each, expect(tool.get("name"), str, "tools"))
    elif kind == "custom" and space is None:
        if (tool.get("format") or {}).get("type", "text") != "text":
            raise refuse(
                "tools", f"the tool {tool.get('name')!r:.100} has a grammar, which the policy does not follow."
            )
        shown = {"type": "string", "description": "The freeform text payload for this tool."}
        schema = {"type": "object", "properties": {INPUT: shown}, "required": [INPUT], "additionalProperties": False}
        about = {"name": tool.get("name"), "description": tool.get("description")}
        yield {"type": "function", **about, "parameters": schema}
    else:  # such as the web search that Codex offers by default. vLLM leaves it out, too
        tell_once(f"An agent offered a tool of type {kind!r:.100}, which is not served. The policy does not see it.")


def joined_name(space: str | None, name: str) -> str:
    """The name by which a model calls a function of a namespace, None: of none."""
    return name if space is None else f"{space}__{name}"


def input_of(arguments: str) -> str:
    """The text for a custom tool. Arguments that are something else are that text, as from vLLM.

    >>> input_of('{"input": "ls"}'), input_of('{"command": "ls"}')
    ('ls', '{"command": "ls"}')
    """
    text = json.loads(arguments).get(INPUT)
    return text if isinstance(text, str) else arguments


# -- of an answer --


def response_id(answer: Answer) -> str:
    """The id of a response, which a later request of the conversation may name."""
    return f"resp_{answer.conversation}_{answer.number}"


def output_items(answer: Answer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of an answer to a request: its reasoning, its text, its calls."""
    items: list[dict[str, Any]] = []
    ending = f"{answer.conversation}_{answer.number}"
    if answer.reasoning:
        text = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{ending}", "summary": [], "content": text})
    if answer.content or not answer.tool_calls:
        text = [{"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}]
        about = {"type": "message", "id": f"msg_{ending}", "role": "assistant", "status": "completed"}
        items.append({**about, "content": text})
    tools = body.get("tools") or []
    custom = {tool["name"] for tool in tools if tool["type"] == "custom"}
    spaces = {
        joined_name(tool["name"], each["name"]): {"name": each["name"], "namespace": tool["name"]}
        for tool in tools
        if tool["type"] == "namespace"
        for each in tool["tools"]
        if each["type"] == "function"
    }
    for k, call in enumerate(answer.tool_calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        about = {"call_id": call["id"], "status": "completed", "name": name}
        if name in custom:
            item = {"type": CALLS[1], "id": f"ctc_{ending}_{k}", "input": input_of(arguments)}
        else:
            item = {"type": CALLS[0], "id": f"fc_{ending}_{k}", "arguments": arguments}
        items.append({**item, **about, **spaces.get(name, {})})
    return items


@dataclass
class Responses:
    """The answers of one conversation over /v1/responses.

    INVARIANT: an id names the conversation. A reference to an answer of another one is refused, and never taken for
    the answer of this one at the same place.
    """

    conversation: str = ""
    responses: dict[str, list[Message]] = field(default_factory=dict)  # by id; without instructions
    items: dict[str, dict[str, Any]] = field(default_factory=dict)  # by id
    calls: dict[str, tuple[str, str]] = field(default_factory=dict)  # (number of the answer, arguments), by call id

    def add(self, answer: Answer, body: dict[str, Any], messages: list[Message]) -> None:
        """Keep the answer to a request with these messages."""
        self.items |= {item["id"]: item for item in output_items(answer, body)}
        self.calls |= {call["id"]: (str(answer.number), call["function"]["arguments"]) for call in answer.tool_calls}
        reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        message = {**answer.message, **reasoning, "signature": answer.signature}
        self.responses[response_id(answer)] = [*messages[bool(body.get("instructions")) :], message]

    def before(self, body: dict[str, Any]) -> list[Message]:
        """The messages before a request, by its `previous_response_id`. Raises `ApiError`."""
        name = body.get("previous_response_id")
        if name is None:
            return []
        if expect(name, str, "previous_response_id") not in self.responses:
            message = f"Previous response with id {name!r:.100} not found. Expected one of this conversation."
            raise ApiError(400, message, "previous_response_not_found", "previous_response_id")
        return self.responses[name]

    def item(self, item_id: Any, param: str) -> dict[str, Any]:
        """The answered item with an id. Raises `ApiError`."""
        if expect(item_id, str, f"{param}.id") not in self.items:
            message = f"Item with id {item_id!r:.100} not found. Expected one of an answer of this conversation."
            raise ApiError(404, message, "item_not_found", param)
        return self.items[item_id]


# -- of a request --


def read_items(items: Any, contents: Contents, stored: Responses, before: list[Message]) -> list[Message]:
    """The messages of a text or of items. Items of an answer that is in `before` are duplicates. Raises `ApiError`."""
    if isinstance(items, str):
        return [{"role": "user", "content": contents.text(items, "input")}]
    reader = ItemReader(contents, stored, before)
    for k, item in enumerate(expect(items or [], list, "input")):
        reader.add(expect(item, dict, f"input[{k}]"), f"input[{k}]")
    return reader.messages


class ItemReader:
    """Reads items as messages. Reasoning, text and calls of one answer are one message of the assistant.

    Items with ids of answers of this conversation say by them which answer they are of. Others are of one answer if
    they are neighbours and it has none of their kind, as for vLLM. A call is known by its own id, too, so that it is
    of its answer if results stand between.
    """

    def __init__(self, contents: Contents, stored: Responses, before: list[Message]):
        self._contents, self._stored = contents, stored
        self.messages: list[Message] = []
        self._numbered: dict[str, Message] = {}  # the assistant's messages, by the number of the answer
        self._number: str | None = None  # of the last message, if it is known
        self._kinds: set[str] = set()  # of the items of the last message
        read = {message.get("signature") for message in before}
        of = f"policy-{stored.conversation}-"
        self._seen = {each for each in stored.items if of + OWN.fullmatch(each)[2] in read}  # ids of items

    def add(self, item: dict[str, Any], param: str) -> None:
        """Read one input item and add its messages. Raises `ApiError`."""
        kind = item.get("type") or ("message" if "role" in item or "id" not in item else "item_reference")
        if kind == "item_reference":
            item = self._stored.item(item.get("id"), param)
            kind = item["type"]
        if (item_id := item.get("id")) in self._seen:
            raise refuse(param, f"Duplicate item found with id {item_id!r:.100}. Remove it.", "duplicate_item")
        self._seen |= {item_id} if isinstance(item_id, str) else set()
        if kind == "reasoning":
            self._add_reasoning(item, param)
        elif kind in CALLS:
            self._assistant(item, "tool_calls").setdefault("tool_calls", []).append(self._call(item, kind, param))
        elif kind in RESULTS:
            call_id = expect(item.get("call_id"), str, f"{param}.call_id")
            if item.get("output") is None:
                raise refuse(f"{param}.output", "got null, expected text, or a list of parts.")
            content = self._contents.text(item["output"], f"{param}.output", "\n")
            self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        elif kind == "message":
            self._add_message(item, param)
        else:
            message = f"got an item of type {kind!r:.100}, which is not served. Switch off what makes it in the agent."
            raise refuse(param, message, "unsupported_item")

    def _assistant(self, item: dict[str, Any], kind: str) -> Message:
        """The message of the assistant that an item is a part of, by the item's kind in a message."""
        found = OWN.fullmatch(str(item.get("id")))
        number = found[2] if found and found[1] == self._stored.conversation else None
        if kind == "tool_calls":
            number = number or self._stored.calls.get(item["call_id"], (None,))[0]
        message = self._numbered.get(number)
        if not message or any(call["id"] == item.get("call_id") for call in message.get("tool_calls") or []):
            is_other_answer = None not in (number, self._number) and number != self._number
            follows = bool(self.messages) and self.messages[-1]["role"] == "assistant"
            if message or is_other_answer or not follows or (kind != "tool_calls" and kind in self._kinds):
                self.messages.append({"role": "assistant", "content": ""})
                self._number, self._kinds = None, set()
            message = self.messages[-1]
            if number is not None:
                self._number, self._numbered[number] = number, message
                message["signature"] = f"policy-{self._stored.conversation}-{number}"
        if message is self.messages[-1]:
            self._kinds.add(kind)
        return message

    def _add_reasoning(self, item: dict[str, Any], param: str) -> None:
        if item.get("encrypted_content"):
            message = "got reasoning that only its writer can read. Send it as content, or leave it out."
            raise refuse(f"{param}.encrypted_content", message, "unsupported_content")
        parts = item.get("content") or item.get("summary") or []
        texts = [expect(expect(part, dict, param).get("text"), str, param) for part in expect(parts, list, param)]
        message, text = self._assistant(item, "reasoning_content"), self._contents.text("\n".join(texts), param)
        if text:
            message["reasoning_content"] = text

    def _call(self, item: dict[str, Any], kind: str, param: str) -> dict[str, Any]:
        """A call as in /v1/chat/completions. Raises `ApiError`."""
        keys = ("call_id", "name", "input" if kind == "custom_tool_call" else "arguments")
        call_id, name, text = (expect(item.get(key), str, f"{param}.{key}") for key in keys)
        if kind == "custom_tool_call":  # arguments that the policy wrote in another way come back as they were
            _, arguments = self._stored.calls.get(call_id, (None, None))
            same = arguments is not None and input_of(arguments) == text
            return tool_call(call_id, name, arguments if same else json_text({INPUT: text}, ensure_ascii=False))
        space = item.get("namespace")
        return tool_call(call_id, joined_name(space and expect(space, str, f"{param}.namespace"), name), text)

    def _add_message(self, item: dict[str, Any], param: str) -> None:
        role = item.get("role")
        if role not in [each for each in ROLES if each != "tool"]:
            raise refuse(f"{param}.role", f"got {role!r:.100}, expected system, developer, user or assistant.")
        content = self._contents.text(item.get("content"), f"{param}.content")
        if role == "assistant":
            message = self._assistant(item, "content")
            message["content"] += content
            message.update(read_name(item, param))
        else:
            self.messages.append({"role": role, "content": content, **read_name(item, param)})
