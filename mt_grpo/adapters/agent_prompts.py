"""An agent's messages and tools as the chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.adapters.chat_messages import tool_call
from mt_grpo.control_tokens import Origin, find_control, neutralise
from mt_grpo.hermes import HermesFormat, call_id, plain_name
from mt_grpo.rollout import Message, ToolCall


class AgentPrompts:
    """Control tokens are broken in all texts, whoever wrote them: no agent can open or close a turn by words."""

    def __init__(self, tool_format: HermesFormat, tokenizer: PreTrainedTokenizerBase):
        self.format, self.tokenizer = tool_format, tokenizer

    def rendered(self, known: list[Message], messages: list[Message]) -> list[Message]:
        """Messages for the chat template.

        Args:
            known: Messages with the calls to which results belong.
            messages: What is rendered.
        """
        names, numbers = {}, {}  # of calls, by id
        for message in known:
            for k, call in enumerate(message.get("tool_calls") or []):
                names[call["id"]], numbers[call["id"]] = call["function"]["name"], k
        if not any(message["role"] == "assistant" for message in messages):  # the stand-in has a call for each result
            results = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
            numbers = {each: k for k, each in enumerate(results)}
        rendered = []
        for message in messages:
            kept = ("role", "content", "reasoning_content")
            each = {key: self.broken(message[key]) for key in kept if key in message}
            if message["role"] == "tool":
                name = plain_name(ToolCall(names.get(message["tool_call_id"]), {}))
                each |= {"name": name, "tool_call_id": call_id(numbers.get(message["tool_call_id"], 0))}
            elif "tool_calls" in message:
                each["tool_calls"] = [self._call(k, call) for k, call in enumerate(message["tool_calls"])]
            rendered.append(each)
        return rendered

    def _call(self, number: int, call: dict[str, Any]) -> dict[str, Any]:
        """A call with its arguments as the chat template takes them."""
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"arguments": function["arguments"]}
        arguments = self.format.arguments(self.broken(arguments))
        return tool_call(call_id(number), plain_name(ToolCall(function["name"], {})), arguments)

    def broken(self, value: Any) -> Any:
        """A JSON value in whose texts control tokens are broken."""
        if isinstance(value, str):
            return neutralise(value, self.tokenizer)
        if find_control("\n".join(texts_of(value)), self.tokenizer) is None:  # one look in place of many
            return value
        if isinstance(value, list):
            return [self.broken(each) for each in value]
        if isinstance(value, dict):
            return {self.broken(key): self.broken(each) for key, each in value.items()}
        return value


def texts_of(value: Any) -> Iterator[str]:
    """All texts of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from texts_of(each)
    elif isinstance(value, dict):
        yield from texts_of(list(value))
        yield from texts_of(list(value.values()))


def tools_by_name(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """An agent's tools as a tool format takes them: their schemas, as they were sent."""
    return {
        tool["function"]["name"]: SimpleNamespace(json_schema=tool["function"], origin=Origin.AGENT) for tool in tools
    }
