"""An agent's messages and tools as the chat template takes them.

INVARIANT: what the model reads is what vLLM's /v1/chat/completions would give it, but for tokens that begin or end a
message in texts of users and tools. Else the policy is trained on another prompt than it is deployed with.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.conversation.formats.control_tokens import Origin, check_names, forbidden_in, neutralise_json
from mt_grpo.conversation.formats.hermes import HermesFormat, call_id, plain_name
from mt_grpo.integrations.agents.messages import NO_THINKING, refuse, tool_call
from mt_grpo.integrations.prefixes import Newest
from mt_grpo.integrations.session import tools_by_name
from mt_grpo.rollout import Message, ToolCall

OF_A_TOOL = ("name", "description", "parameters")  # what vLLM shows of one, in this order, null where it is missing
IF_GIVEN = ("strict", "defer_loading")
MOST_CHARACTERS, BESIDE_ONE = 2**21, 200  # of a rollout's texts that are kept; what each costs beside its own
EFFORTS = ("none", "low", "medium", "high", "xhigh", "max")  # of /v1/messages; `none` is how one says: disabled


class AgentPrompts:
    """How a tokenizer's chat template shows what agents send."""

    def __init__(self, tool_format: HermesFormat, tokenizer: PreTrainedTokenizerBase):
        self.format, self.tokenizer = tool_format, tokenizer
        # A program sends its texts again with each request. By what is broken in them, and the text.
        self._broken: Newest = Newest(MOST_CHARACTERS, lambda text: len(text) + BESIDE_ONE)

    def rendered(self, before: list[Message], messages: list[Message]) -> list[Message]:
        """Messages for the chat template. A result is that of the nearest call before it with its id.

        Args:
            before: The messages before them. They may have the calls to which results belong.
            messages: What is rendered.

        Raises:
            ApiError: a name that the chat template does not show.
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
                called = names.get(message["tool_call_id"])
                self._check_name(each, called)
                name = each.get("name") or plain_name(ToolCall(called, {}))
                each |= {"name": name, "tool_call_id": call_id(numbers.get(message["tool_call_id"], 0))}
            else:
                self._check_name(each, None)
            if "reasoning_content" in message:
                each |= dict.fromkeys(("reasoning", "reasoning_content"), message["reasoning_content"])
            if "tool_calls" in message:
                each["tool_calls"] = [self._call(k, call) for k, call in enumerate(message["tool_calls"])]
            content = self._broken_text(each.pop("content"), message["role"])
            rendered.append({"role": each.pop("role"), "content": content, **self.broken(each, message["role"])})
        rendered = rendered if self.knows_developers else developers_first(rendered)
        return [{**each, "content": self._content(each["role"], each["content"])} for each in rendered]

    def _content(self, role: str, text: str) -> str | list[dict[str, str]]:
        """A message's content: a part where the template takes parts, since some write something behind each."""
        parts = role in ("system", "developer", "user") and self._takes_parts(role)
        return [{"type": "text", "text": text}] if parts else text

    def _check_name(self, message: Message, called: str | None) -> None:
        """Raise `ApiError` where a message's name would be dropped; a result may say the name of its call."""
        if "name" in message and message["name"] != called and not self._shows_name(message["role"]):
            raise refuse(
                "messages",
                f"a message of role {message['role']!r} has the name {message['name']!r:.100}, which this "
                "model's chat template does not show. Remove it, or write it into the content.",
            )

    @functools.lru_cache(maxsize=8)  # noqa: B019  an agent's session is short
    def _shows_name(self, role: str) -> bool:
        """Whether the chat template shows the names of messages of this role."""
        name = "name-of-a-speaker"
        message = {"role": role, "content": "Text.", "name": name}
        before = [] if role == "system" else [{"role": "user", "content": "."}]
        if role == "tool":
            calls = self.format.turn_message([ToolCall("add", {})])
            before, message = [*before, calls], {**message, "tool_call_id": call_id(0)}
        try:
            return name in self._render([*before, message])
        except Exception:  # whatever a template raises
            return False

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def _takes_parts(self, role: str) -> bool:
        """Whether the chat template reads content of parts, and shows no list of Python's."""
        content = [{"type": "text", "text": "first-part-of-it"}]
        after = [{"role": "user", "content": content}] if role == "system" else []
        try:
            text = self._render([{"role": role, "content": content}, *after])
        except Exception:  # whatever a template raises
            return False
        return text.count("first-part-of-it") == 1 + len(after) and not re.search("""['"]text['"]""", text)

    @functools.cached_property
    def joint(self) -> str:
        """What stands between the parts of a message's content: what a template that knows parts writes there.

        Another one gets the parts as one text of lines, as from vLLM.
        """
        first, second = "first-part-of-it", "second-part-of-it"
        parts = [{"type": "text", "text": text} for text in (first, second)]
        try:
            between = self._render([{"role": "user", "content": parts}]).partition(first)[2].partition(second)
        except Exception:  # whatever a template raises
            return "\n"
        return between[0] if between[1] and not between[0].strip() else "\n"

    @functools.cached_property
    def knows_developers(self) -> bool:
        """Whether the chat template knows the role `developer`."""
        template = str(self._template())
        return '"developer"' in template or "'developer'" in template

    @functools.cached_property
    def takes_later_systems(self) -> bool:
        """Whether the chat template takes a message of the system that is not the first one."""
        roles = ("system", "user", "system", "user")
        try:
            return bool(self._render([{"role": role, "content": "Text."} for role in roles]))
        except Exception:  # whatever a template raises
            return False

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def arguments_of_effort(self, effort: str | None, given: tuple[str, ...] = ()) -> dict[str, Any]:
        """The chat template's arguments that vLLM makes of a request's effort; none where they change no prompt.

        Args:
            effort: Of the request.
            given: Names of the arguments that the request has itself, which are the recipe's.
        """
        if effort is None:
            return {}
        word = self._effort_of_disabled() if effort == NO_THINKING else effort
        made = {"reasoning_effort": word, "enable_thinking": word != "none"}
        made = {key: value for key, value in made.items() if key != "enable_thinking" or key not in given}
        return {} if self._prompt_with(made) == self._prompt_with({}) else made

    def _effort_of_disabled(self) -> str:
        """What vLLM makes of thinking that is disabled: `none`, or `low` where the template does not know it."""
        shown = [self._prompt_with({"reasoning_effort": each, "enable_thinking": each != "none"}) for each in EFFORTS]
        return "none" if shown[0] is not None and shown[0] not in shown[1:] else "low"

    def _prompt_with(self, arguments: dict[str, Any]) -> str | None:
        """How a prompt is shown with further arguments of the chat template; None where it refuses them."""
        message = [{"role": "user", "content": "Text."}]
        try:
            return self._render(message, add_generation_prompt=True, **arguments)
        except Exception:  # whatever a template raises
            return None

    def _template(self) -> str:
        return self.tokenizer.get_chat_template(self.format.chat_template_kwargs.get("chat_template"), tools=[])

    def _render(self, messages: list[Message], **more: Any) -> str:
        arguments = {**self.format.chat_template_kwargs, "tokenize": False, "chat_template": self._template(), **more}
        return self.tokenizer.apply_chat_template(messages, **arguments)

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

        Raises:
            ApiError: a name holds a token that no call can hold.
        """
        forbidden = forbidden_in(Origin.AGENT, "tool", self.tokenizer, self.format.ends)
        shown = []
        for tool in tools:
            function = tool["function"]
            try:
                parameters = function.get("parameters") or {}
                check_names([function["name"], *(parameters.get("properties") or {})], forbidden)
            except ValueError as error:
                raise refuse("tools", str(error)) from None
            given = {key: function[key] for key in IF_GIVEN if function.get(key) is not None}
            shown.append({"function": {**{key: function.get(key) for key in OF_A_TOOL}, **given}})
        return tools_by_name(self.broken(shown, "tool"))

    def _broken_text(self, text: str, role: str) -> str:
        """Apply `broken` to the text of a message, and keep the result."""
        pattern = forbidden_in(Origin.AGENT, role, self.tokenizer, self.format.ends)
        return self._broken.of((pattern and pattern.pattern, text), lambda: self.broken(text, role))

    def broken(self, value: Any, role: str) -> Any:
        """A JSON value in whose texts the tokens are broken that a message of this role may not hold.

        No text keeps half of a character: no tokenizer takes it, and a policy writes it.
        """
        forbidden = forbidden_in(Origin.AGENT, role, self.tokenizer, self.format.ends)
        return whole_characters(value) if forbidden is None else neutralise_json(value, self.tokenizer, forbidden)


def whole_characters(value: Any) -> Any:
    """A JSON value without halves of characters.

    >>> whole_characters({"a": ["\\ud800!"]})
    {'a': ['?!']}
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {whole_characters(key): whole_characters(each) for key, each in value.items()}
    return [whole_characters(each) for each in value] if isinstance(value, list) else value


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
