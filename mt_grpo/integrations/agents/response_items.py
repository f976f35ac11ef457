"""Items of /v1/responses: those of an answer, and those of a request as messages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mt_grpo.integrations.agents.chat_api import ROLES, read_name
from mt_grpo.integrations.agents.messages import (
    TEXT,
    Answer,
    ApiError,
    Contents,
    expect,
    refuse,
    tool_call,
    without_bill,
)
from mt_grpo.integrations.agents.response_tools import CallItems, arguments_of, joined_name
from mt_grpo.rollout import Message

OWN = re.compile(r"(?:rs|msg|fc|ctc)_(\w+?)_(\d+)(?:_\d+)?")  # the id of an item: its conversation, its answer
CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")


# -- of an answer --


def response_id(answer: Answer) -> str:
    """The id of a response, which a later request of the conversation may name."""
    return f"resp_{answer.conversation}_{answer.number}"


def output_items(answer: Answer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of an answer: its reasoning, its text, its calls."""
    items: list[dict[str, Any]] = []
    ending = f"{answer.conversation}_{answer.number}"
    if answer.reasoning:
        text = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{ending}", "summary": [], "content": text})
    if answer.content or not answer.tool_calls:
        text = [{"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}]
        about = {"type": "message", "id": f"msg_{ending}", "role": "assistant", "status": "completed"}
        items.append({**about, "content": text})
    calls = CallItems(body.get("tools") or [])
    return items + [calls.item(call, f"{ending}_{k}") for k, call in enumerate(answer.tool_calls)]


# -- what a conversation was answered --


class Answered(NamedTuple):
    """A conversation up to a response, without instructions."""

    messages: list[Message]
    ids: frozenset[str]  # of the items that were answered in it


@dataclass
class Responses:
    """What one conversation was answered over /v1/responses.

    INVARIANT: an id names the conversation. A reference to what another one was answered is refused, and never taken
    for what this one was answered at the same place.
    """

    conversation: str = ""
    responses: dict[str, Answered] = field(default_factory=dict)  # by id
    items: dict[str, dict[str, Any]] = field(default_factory=dict)  # by id
    written: dict[str, tuple[Any, str]] = field(default_factory=dict)  # (text, arguments) of a custom call, by its id
    numbers: dict[str, str] = field(default_factory=dict)  # of the answer of a call, by the call's id

    def add(self, answer: Answer, body: dict[str, Any], messages: list[Message]) -> None:
        """Keep an answer to a request.

        Args:
            answer, body: Of the request.
            messages: Of the request, as they were read.
        """
        items = output_items(answer, body)
        self.items |= {item["id"]: item for item in items}
        for item, call in zip([each for each in items if each["type"] in CALLS], answer.tool_calls, strict=True):
            self.written[call["id"]] = item.get("input"), call["function"]["arguments"]
            self.numbers[call["id"]] = str(answer.number)
        reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        said = {**answer.message, **reasoning, "signature": answer.signature}
        given = body.get("input") if isinstance(body.get("input"), list) else []
        own = {item["id"] for item in given if isinstance(item.get("id"), str) and item["id"] in self.items}
        own |= self.before(body).ids | {item["id"] for item in items}
        before = messages[1:] if body.get("instructions") else messages  # which are of one request only
        self.responses[response_id(answer)] = Answered([*before, said], frozenset(own))

    def before(self, body: dict[str, Any]) -> Answered:
        """The messages before a request, by its `previous_response_id`. Raises `ApiError`."""
        name = body.get("previous_response_id")
        if name is None:
            return Answered([], frozenset())
        if expect(name, str, "previous_response_id", "text") not in self.responses:
            raise ApiError(
                400,
                f"Previous response with id {name!r:.100} not found. Expected one of this conversation: what "
                "another one was answered cannot be gone on from.",
                "previous_response_not_found",
                "previous_response_id",
            )
        return self.responses[name]

    def has_said(self, number: str, message: Message) -> bool:
        """Whether a message of the assistant says the beginning of an answer: items that came without their ids."""
        answered = self.responses.get(f"resp_{self.conversation}_{number}")
        if answered is None or "signature" in message:
            return False
        said = answered.messages[-1]
        calls, known = ([call["id"] for call in each.get("tool_calls") or []] for each in (message, said))
        texts = ("content", "reasoning_content")
        given, whole = ([" ".join(each.get(key, "").split()) for key in texts] for each in (message, said))
        return calls == known[: len(calls)] and all(text in ("", other) for text, other in zip(given, whole))

    def item(self, item_id: Any, param: str) -> dict[str, Any]:
        """The answered item with an id. Raises `ApiError`."""
        if expect(item_id, str, f"{param}.id", "the id of an item") not in self.items:
            raise ApiError(
                404,
                f"Item with id {item_id!r:.100} not found. Expected one that this conversation was answered: "
                "those of others, and those that an agent made itself, are to be sent whole.",
                "item_not_found",
                param,
            )
        return self.items[item_id]


# -- of a request --


def read_items(
    items: Any, contents: Contents = TEXT, stored: Responses | None = None, known: frozenset[str] = frozenset()
) -> list[Message]:
    """Items as messages. Raises `ApiError`.

    Args:
        items: Text, or a list of items.
        contents: What reads contents.
        stored: What the conversation was answered, to which items may refer.
        known: Ids of items that were said before.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": contents.text(items, "input")}]
    reader = ItemReader(contents, stored or Responses(), known)
    for k, item in enumerate(expect(items or [], list, "input", "text or a list of items")):
        reader.add(expect(item, dict, f"input[{k}]", "an object"), f"input[{k}]")
    return reader.messages


class ItemReader:
    """Reads items as messages. Reasoning, text and calls of one answer are one message of the assistant.

    Items that were given here say by their ids which answer they are of. Others are of one where they are neighbours,
    and where it has none of their kind, as for vLLM. A program may send back the ids of some items only. A call is
    known by its own id, so that it is of its answer where results stand between.

    Args:
        contents: What reads contents.
        stored: What the conversation was answered.
        known: Ids of items that were said before.
    """

    def __init__(self, contents: Contents, stored: Responses, known: frozenset[str]):
        self._contents, self._stored = contents, stored
        self.messages: list[Message] = []
        self._numbered: dict[str, Message] = {}  # the assistant's messages, by the number of the answer
        self._given: set[str] = set()  # parts that the last message was given, be they empty
        self._seen: set[str] = set(known)

    def add(self, item: dict[str, Any], param: str) -> None:
        """Read one input item and add its messages. Raises `ApiError`."""
        kind = item.get("type") or ("message" if "role" in item or "id" not in item else "item_reference")
        if kind == "item_reference":
            item = self._stored.item(item.get("id"), param)
            kind = item["type"]
        self._check_once(item.get("id"), param)
        if kind == "reasoning":
            self._add_reasoning(item, param)
        elif kind in CALLS:
            call = self._call(item, kind, param)
            self._assistant(item, "tool_calls").setdefault("tool_calls", []).append(call)
        elif kind in RESULTS:
            call_id = expect(item.get("call_id"), str, f"{param}.call_id", "the call's id")
            given = expect(item.get("output"), (str, list), f"{param}.output", "text, or a list of parts")
            content = self._contents.text(given, f"{param}.output", "\n")
            self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        elif kind == "message":
            self._add_message(item, param)
        else:
            raise refuse(
                param,
                f"got an item of type {kind!r:.100}, which is not served: nothing of that kind was answered "
                "here. Switch off what makes it in the agent, or remove it.",
                "unsupported_item",
            )

    def _check_once(self, item_id: Any, param: str) -> None:
        """Raise `ApiError` for an item of this conversation that was there before: the model would read it twice."""
        if isinstance(item_id, str) and item_id in self._stored.items:
            if item_id in self._seen:
                raise refuse(
                    param,
                    f"Duplicate item found with id {item_id!r}. Remove it: it is in the input, or before the "
                    "response that previous_response_id names.",
                    "duplicate_item",
                )
            self._seen.add(item_id)

    def _assistant(self, item: dict[str, Any], part: str) -> Message:
        """The message of the assistant that an item is of.

        Args:
            item: Which has an id, or none.
            part: What the item is of the message.
        """
        found = OWN.fullmatch(str(item.get("id")))
        number = found[2] if found and found[1] == self._stored.conversation else None
        last = self.messages[-1] if self.messages else {}
        answer = number or (self._stored.numbers.get(item["call_id"]) if part == "tool_calls" else None)
        message = self._numbered.get(answer, {})
        again = part == "tool_calls" and any(call["id"] == item["call_id"] for call in message.get("tool_calls") or [])
        if not message or again:
            if number is None:
                goes_on = part == "tool_calls" or part not in self._given
            else:
                goes_on = self._stored.has_said(number, last)
            if last.get("role") != "assistant" or not goes_on:
                self.messages.append({"role": "assistant", "content": ""})
                self._given = set()
            message = self.messages[-1]
        if message is self.messages[-1]:
            self._given.add(part)
        if number is not None or (answer is not None and not again):
            self._numbered[answer] = message
        if number is not None:
            message["signature"] = f"policy-{self._stored.conversation}-{number}"
        return message

    def _add_reasoning(self, item: dict[str, Any], param: str) -> None:
        if item.get("encrypted_content"):
            raise refuse(
                f"{param}.encrypted_content",
                "got reasoning that is encrypted, which its writer alone can read. Send "
                "it as content, or leave it out.",
                "unsupported_content",
            )
        lists = [expect(item.get(key) or [], list, f"{param}.{key}", "a list") for key in ("content", "summary")]
        parts = [expect(part, dict, param, "parts with a text").get("text") for part in lists[0] or lists[1]]
        text = self._contents.text("\n".join(expect(each, str, param, "parts with a text") for each in parts), param)
        message = self._assistant(item, "reasoning_content")
        if text:
            message["reasoning_content"] = text

    def _call(self, item: dict[str, Any], kind: str, param: str) -> dict[str, Any]:
        """A call as in /v1/chat/completions."""
        text = "input" if kind == "custom_tool_call" else "arguments"
        keys = ("call_id", "name", text)
        call_id, name, given = (expect(item.get(key), str, f"{param}.{key}", "text") for key in keys)
        if kind == "custom_tool_call":  # what was written as something else comes back as that
            before, arguments = self._stored.written.get(call_id, (None, ""))
            return tool_call(call_id, name, arguments if before == given else arguments_of(given))
        space = item.get("namespace")
        space = None if space is None else expect(space, str, f"{param}.namespace", "text")
        return tool_call(call_id, joined_name(space, name), given)

    def _add_message(self, item: dict[str, Any], param: str) -> None:
        role = item.get("role")
        if role not in [each for each in ROLES if each != "tool"]:
            raise refuse(f"{param}.role", f"got {role!r:.100}, expected system, developer, user or assistant.")
        given = without_bill(item.get("content")) if role == "system" else item.get("content")
        content = self._contents.text(given, f"{param}.content")
        if role == "assistant":
            message = self._assistant(item, "content")
            message["content"] += content
            message.update(read_name(item, param))
        else:
            self.messages.append({"role": role, "content": content, **read_name(item, param)})
