"""An agent's messages and tools as the chat template takes them.

INVARIANT: the model reads what vLLM's /v1/chat/completions would give it, except that in texts of users and tools
tokens that begin or end a message are broken. Else the policy is trained on another prompt than it is deployed with.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.conversation.formats.choose import HermesFormat, call_id, plain_name
from mt_grpo.conversation.formats.control_tokens import check_names, forbidden_in, neutralise_json
from mt_grpo.integrations.agents.messages import refuse, tool_call
from mt_grpo.integrations.session import tools_by_name
from mt_grpo.rollout import Message, Origin, ToolCall

OF_A_TOOL = ("name", "description", "parameters")  # what vLLM shows of one, in this order, null if it is missing
IF_GIVEN = ("strict", "defer_loading")
FIRST, SECOND = "first-part-of-it", "second-part-of-it"  # texts that no chat template has


class AgentPrompts:
    """How a tokenizer's chat template shows the messages and tools of agents."""

    def __init__(self, tool_format: HermesFormat, tokenizer: PreTrainedTokenizerBase):
        self.format, self.tokenizer = tool_format, tokenizer

    def rendered(self, before: list[Message], messages: list[Message]) -> list[Message]:
        """Messages for the chat template, after others, which may have the calls to which results belong.

        A result is that of the nearest call before it with its id.
        """
        names, numbers = {}, {}  # of the calls so far, by id
        for message in before:
            note_calls(message, names, numbers)
        if not any(message["role"] == "assistant" for message in messages):  # the stand-in has a call for each result
            results = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
            numbers = {each: k for k, each in enumerate(results)}
        rendered = []
        for message in messages:
            note_calls(message, names, numbers)
            each = {key: message[key] for key in ("role", "content", "name") if key in message}
            if message["role"] == "tool":
                name = each.get("name") or plain_name(ToolCall(names.get(message["tool_call_id"]), {}))
                each |= {"name": name, "tool_call_id": call_id(numbers.get(message["tool_call_id"], 0))}
            if "reasoning_content" in message:
                each |= dict.fromkeys(("reasoning", "reasoning_content"), message["reasoning_content"])
            if "tool_calls" in message:
                each["tool_calls"] = [self._call(k, call) for k, call in enumerate(message["tool_calls"])]
            rendered.append({"role": each.pop("role"), **self.broken(each, message["role"])})
        rendered = rendered if self.knows_developers else developers_first(rendered)
        return [{**each, "content": self._content(each["role"], each["content"])} for each in rendered]

    def _content(self, role: str, text: str) -> str | list[dict[str, str]]:
        """A message's content: a part if the template takes parts, since some write something after each."""
        parts = role in ("system", "developer", "user") and self._takes_parts(role)
        return [{"type": "text", "text": text}] if parts else text

    @functools.lru_cache(maxsize=8)  # noqa: B019  an agent's session is short
    def _takes_parts(self, role: str) -> bool:
        """Whether the chat template reads content of parts, and shows no list of Python's."""
        content = [{"type": "text", "text": FIRST}]
        after = [{"role": "user", "content": content}] if role == "system" else []
        text = self.format._rendered([{"role": role, "content": content}, *after])
        return text.count(FIRST) == 1 + len(after) and not re.search("""['"]text['"]""", text)

    @functools.cached_property
    def joint(self) -> str:
        """What stands between the parts of a message's content: what a template that knows parts writes there.

        Another one gets the parts as one text of lines, as from vLLM.
        """
        parts = [{"type": "text", "text": text} for text in (FIRST, SECOND)]
        text = self.format._rendered([{"role": "user", "content": parts}])
        between, found, _ = text.partition(FIRST)[2].partition(SECOND)
        return between if found and not between.strip() else "\n"

    @functools.cached_property
    def knows_developers(self) -> bool:
        """Whether the chat template knows the role `developer`."""
        return re.search("""['"]developer['"]""", str(self.format.template)) is not None

    @functools.cached_property
    def takes_later_systems(self) -> bool:
        """Whether the chat template takes a message of the system that is not the first one."""
        roles = ("system", "user", "system", "user")
        return bool(self.format._rendered([{"role": role, "content": "Text."} for role in roles]))

    def _call(self, number: int, call: dict[str, Any]) -> dict[str, Any]:
        """A call with its arguments as the chat template takes them. What is no JSON object is an empty one."""
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            arguments = {}
        arguments = self.format.arguments(arguments if isinstance(arguments, dict) else {})
        return tool_call(call_id(number), function["name"], arguments)

    def tools(self, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """A request's tools as a tool format takes them, with what the chat template shows of them.

        Raises `ApiError` for a name with a token that no call can hold.
        """
        forbidden = forbidden_in(Origin.AGENT, "tool", self.tokenizer, self.format.ends)
        shown = []
        for tool in tools:
            function = tool["function"]
            try:
                check_names(function, forbidden)
            except ValueError as error:
                raise refuse("tools", str(error)) from None
            given = {key: function[key] for key in IF_GIVEN if function.get(key) is not None}
            shown.append({"function": {**{key: function.get(key) for key in OF_A_TOOL}, **given}})
        return tools_by_name(self.broken(shown, "tool"))

    def broken(self, value: Any, role: str) -> Any:
        """A JSON value in whose texts the tokens are broken that a message of this role may not hold.

        No text keeps half of a character: no tokenizer takes it, and a policy writes it.
        """
        forbidden = forbidden_in(Origin.AGENT, role, self.tokenizer, self.format.ends)
        return neutralise_json(value, self.tokenizer, forbidden)


def note_calls(message: Message, names: dict[str, str], numbers: dict[str, int]) -> None:
    """Note the name of each call of a message and its number in it, by its id: another message's may have the same."""
    for k, call in enumerate(message.get("tool_calls") or []):
        names[call["id"]], numbers[call["id"]] = call["function"]["name"], k


def developers_first(messages: list[Message]) -> list[Message]:
    """Messages of developers as the system's, for a template that does not know the role: all of them in one, first.

    >>> developers_first([{"role": "system", "content": "a"}, {"role": "user", "content": "b"},
    ...                   {"role": "developer", "content": "c"}])
    [{'role': 'system', 'content': 'a\\n\\nc'}, {'role': 'user', 'content': 'b'}]
    """
    if not any(message["role"] == "developer" for message in messages):
        return messages
    leading = [message for message in messages if message["role"] in ("system", "developer")]
    if len(leading) == 1 and messages[0] is leading[0]:
        return [{**messages[0], "role": "system"}, *messages[1:]]
    content = "\n\n".join(message["content"] for message in leading if message["content"])
    return [{"role": "system", "content": content}, *(each for each in messages if each not in leading)]
