"""The base class of tool formats: the end of a turn, its thinking, and the ids that follow it."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.base.errors import tell_once
from mt_grpo.base.rows import is_nested
from mt_grpo.conversation.formats.control_tokens import (
    cut_far_beyond,
    cut_messages,
    cut_to_tokens,
    neutralise,
    neutralise_messages,
)
from mt_grpo.rollout import Message, Origin, Parsed, ToolCall, ToolResult, Turn

THINKING_TAGS = {  # what opens and closes it, by family of models, as a `CallSyntax` names it
    "Gemma 4": ("<|channel>thought\n", "<channel|>"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|>"),
    "most": ("<think>", "</think>"),
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # where chat templates read a message's thinking
SEVERAL_CALLS = "several calls in one turn; write one call, read its result, then the next"
TOO_DEEP = "the call holds a number that is too long, or is nested too deeply"
ASK = {"role": "user", "content": "."}  # the first message of a conversation that is rendered to see the template


def load_json(text: str, several: str = SEVERAL_CALLS) -> tuple[Any, str | None]:
    """Parse the JSON of a call. Returns (value, error)."""
    try:
        value = json.loads(text)
        return (None, TOO_DEEP) if is_nested(value) else (value, None)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text[error.pos :].lstrip().startswith("{"):
            return None, several
        return None, f"the call is not valid JSON ({error.msg} at character {error.pos})"
    except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of brackets
        return None, TOO_DEEP


def parse_call(body: str, key: str = "args", several: str = SEVERAL_CALLS, others: tuple[str, ...] = ()) -> ToolCall:
    """Parse the JSON of one call, with its arguments under `key`. The policy reads the errors, which are short."""
    call, error = load_json(body, several)
    if error or isinstance(call, list):
        return ToolCall(None, {}, error or several)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(None, {}, f'the call must be a JSON object with "name" (a string) and "{key}" (an object)')
    name, arguments = call["name"], call.get(key, {})
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f'"{key}" must be a JSON object, got {type(arguments).__name__}')
    if unknown := sorted(set(call) - {"name", key, *others}):
        return ToolCall(name, {}, f'unknown key "{unknown[0]}" in the call; use "name" and "{key}"')
    return ToolCall(name, arguments)


def thinking_length(text: str, before: str, opening: str = "<think>", closing: str = "</think>") -> int | None:
    """The number of characters of a turn's text that are thinking. None if the thinking is still open at its end.

    `before` is the part of the same message that is in the prompt, such as what the generation prompt writes.

    >>> thinking_length("<think>a</think>b", ""), thinking_length("a</think>b", "<think>\\n")
    (16, 9)
    >>> thinking_length("so <think>a", ""), thinking_length("<think>a", "<think>\\n\\n</think>\\n")  # text; thinking
    (0, None)
    """
    if before.lstrip().startswith(opening) and closing not in before:
        end = text.find(closing)
    elif text.lstrip().startswith(opening) and not before.rpartition(closing)[2].strip():
        end = text.find(closing, text.index(opening) + len(opening))
    else:
        return 0
    return end + len(closing) if end >= 0 else None


def result_message(observation: str) -> str:
    """Wrap an observation in the tags of the paper, as the content of a message of role `user`."""
    return f"<result>\n{observation}\n</result>"


class ChatFormat:
    """Base class of tool formats. A subclass defines how calls and answers are written: `call_format`, `parse_text`.

    The chat template of the tokenizer renders conversations with `chat_template_kwargs`. `extra_ends` are further ids
    that end a turn. Raises `ValueError` if the template leaves out a result, or does not append it.
    """

    call_format: str  # an example of a call, for a policy that wrote it wrong
    calls_by_template = False  # whether the chat template shows the tools, and has messages of role `tool`
    family = ""  # of models, if it is known: a key of `THINKING_TAGS`
    stops: tuple[str, ...] = ()  # after its thinking, a turn ends at the end of the first of these texts
    begins, closes = "<answer>", "</answer>"  # patterns that open and close a call or an answer
    thinking: tuple[str, str] = THINKING_TAGS["most"]
    headers: tuple[str, ...] = ()  # texts after which the model writes, in addition to the generation prompt
    probes: tuple[ToolCall, ...] = (ToolCall("add", {"a": 2}),)  # calls of a turn whose results are rendered at once

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict | None = None,
        extra_ends: Iterable[int] = (),
    ):
        self.tokenizer = tokenizer
        self.chat_template_kwargs = chat_template_kwargs or {}
        self._sentinel = f"assistant-{secrets.token_hex(8)}"  # unguessable, so that no tool can echo it
        # A turn's text is read several times in a row. The length is a key: a tokenizer may get further tokens.
        self._text_of = functools.lru_cache(maxsize=32)(lambda ids, length: tokenizer.decode(list(ids)))
        try:
            self.setup()
            after_text, after_calls = self.text_ids(self.suffix([], [ASK])), self.text_ids(self._suffix_of_results())
            asked = self._render([{"role": "user", "content": self._sentinel}])
        except Exception as error:  # whatever a template raises
            raise self.refusal(str(error)) from error
        # What the template may write as the end of a turn.
        end, of_calls = self._end_of_turn(after_text), self._end_of_turn(after_calls)
        self._closing = frozenset(end[-1:] + of_calls[-1:])
        # INVARIANT: one of these that opens the next message stands there, whatever token ended the turn. Where the
        # first does, as in GLM 4, the template has no other end of turn. What only ends a turn is followed by an added
        # token, such as that of a role.
        opens = bool(end) and self._opens_a_message(end[-1])
        behind_calls = of_calls != end and not self._end_of_turn(after_calls[len(of_calls) :])
        self._opening = self._closing if opens else frozenset(of_calls[-1:] if behind_calls else [])
        # gpt-oss ends its thinking with what ends older turns too.
        inside = {i for i in self._closing if self._decode([i]) == self.thinking[1]}
        self.ends = frozenset({*extra_ends, tokenizer.eos_token_id, *(self._closing - inside)} - {None})
        behind, opening, thought = asked.rpartition(self._sentinel)[2].partition(self.thinking[0])
        self.lead = opening + thought  # the thinking that the generation prompt opens
        ids = self.text_ids(behind)
        header = self._decode(ids[len(self._end_of_turn(ids)) :] or ids).strip()
        self._headers = list(filter(None, (header, *self.headers)))
        words = re.findall(r"\w+", f"{tokenizer.chat_template}{self.template}")
        known = {*inspect.signature(tokenizer.apply_chat_template).parameters, *words}
        for name in self.chat_template_kwargs.keys() - known:  # which rendering ignores
            tell_once(
                f"chat_template_kwargs sets {name!r}, which the chat template does not read, so that it has no "
                "effect. Check its spelling against the chat template."
            )

    def setup(self) -> None:
        """Prepare the format before the template is inspected: choose the thinking tags of the model's family."""
        known = (tags for tags in THINKING_TAGS.values() if tags[0][: tags[0].index(">") + 1] in self.template)
        self.thinking = THINKING_TAGS.get(self.family) or next(known, self.thinking)

    @property
    def template(self) -> str:
        """The chat template. Some tokenizers have one of their own for conversations with tools."""
        own = self.chat_template_kwargs.get("chat_template")
        return self.tokenizer.get_chat_template(own, tools=[] if self.calls_by_template else None)

    def _opens_a_message(self, token: int) -> bool:
        """Whether a token opens a user's message, also where no turn of the model stands before it, as in GLM 4."""
        asked, following = ({"role": "user", "content": content} for content in (self._sentinel, "the next message"))
        texts = [self._rendered(m, add_generation_prompt=False) for m in ([asked], [asked, following])]
        behind = [text.rpartition(self._sentinel)[2] for text in texts]
        own_end = len(os.path.commonprefix(behind))
        return self._decode([token]) in behind[1][own_end:].partition(following["content"])[0]

    # -- what the model reads --

    def prompt(self, messages: list[Message], tools: dict[str, Callable]) -> dict[str, Any]:
        """Arguments of `apply_chat_template`, which returns ids, for messages that the model answers next."""
        conversation = [self.with_reasoning(m) if m["role"] == "assistant" else m for m in messages]
        fixed = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return {**self.chat_template_kwargs, "conversation": conversation, **fixed}

    @functools.cached_property
    def _reads_reasoning(self) -> bool:
        """Whether the chat template writes thinking that a message has apart from its text, once and in its tags."""
        opening, closing = (tag.strip() for tag in self.thinking)
        message = {"role": "assistant", "content": "A turn.", **dict.fromkeys(REASONING_KEYS, "so")}
        block = rf"{re.escape(opening)}\s*so\s*{re.escape(closing)}"
        called = {**message, **self.turn_message(self.probes)}
        chats = [ASK, message], [ASK, called, *self.results(self.probes, [ToolResult("4")])]
        texts = (self._rendered(chat, add_generation_prompt=False) for chat in chats)
        return any(len(re.findall(block, text)) == text.count(opening) == 1 for text in texts)

    def with_reasoning(self, message: Message) -> Message:
        """Move the thinking in the text of an assistant's message to where the chat template reads it, in its tags."""
        text, (opening, closing) = message.get("content"), self.thinking
        if any(message.get(key) for key in REASONING_KEYS) or not isinstance(text, str):
            return message
        length = thinking_length(text, self.lead, opening, closing)
        if not length:
            return message
        if not self._reads_reasoning:
            opened = text.lstrip().startswith(opening) or closing in self.lead
            return message if opened else {**message, "content": self.lead + text}
        thought = text[:length].removesuffix(closing).strip().removeprefix(opening.strip()).strip()
        return {**message, "content": text[length:].lstrip("\n"), **dict.fromkeys(REASONING_KEYS, thought)}

    @functools.cached_property
    def arguments(self) -> Callable[[dict], Any]:
        """Converts a call's arguments for the chat template: `dict`, or `json.dumps` if it takes them as text."""
        call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
        text = self._rendered([ASK, {"role": "assistant", "content": "", "tool_calls": [call]}])
        return dict if text and str({"a": 2}) not in text else json.dumps

    def _with_arguments(self, call: Any) -> Any:
        """Convert a call's arguments, which are text in OpenAI's API, to the form that the chat template takes."""
        function = (call.get("function") or call) if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        read = load_json(arguments)[0] if isinstance(arguments, str) else arguments
        if not isinstance(read, dict):
            return call
        function = {**function, "arguments": self.arguments(read)}
        return {**call, "function": function} if call.get("function") else function

    def clean(self, messages: list[Message], origin: Origin) -> list[Message]:
        """Break control tokens in messages, also inside arguments, that messages of this origin may not contain."""
        # JSON text can hide a token by an escape.
        calls = [list(map(self._with_arguments, m.get("tool_calls") or [])) for m in messages]
        read = [{**m, "tool_calls": each} if each else m for m, each in zip(messages, calls)]
        return neutralise_messages(read, self.tokenizer, origin, self.ends)

    def clean_text(self, text: str) -> str:
        """Break all control tokens in a text from outside."""
        return neutralise(text, self.tokenizer)

    def results(self, calls: list[ToolCall], results: list[ToolResult]) -> list[Message]:
        """Convert the results of a turn's calls to messages for the chat template."""
        return [{"role": "user", "content": result_message(result.text)} for result in results]

    def suffix_ids(
        self, calls: list[ToolCall], messages: list[Message], sampled: list[int], most: float = float("inf")
    ) -> list[int]:
        """Ids from the end of the model's turn to the next generation prompt. `most` is that of `text_ids`."""
        ids = self.text_ids(self.suffix(calls, messages), most)
        # The end of turn is there already if the model sampled one, be it another than the template's.
        closing = self._end_of_turn(ids)
        there = sampled and sampled[-1] in self.ends and closing and closing[-1] in self.ends | self._closing
        if there and closing[-1] in self._opening:
            there = sampled[-1] == closing[-1]
        return ids[len(closing) :] if there else ids

    def fit(
        self, turn: Turn, further: list[Message], most: float, limit: int
    ) -> tuple[list[ToolResult], list[Message], list[int]] | None:
        """(results, messages, ids) after a turn in `most` tokens, each result truncated to `limit`; None: no room."""
        if cut_messages(further, most, self.tokenizer) != further:
            return None
        # One character more than `cut_to_tokens` reads at most, so that it sees what is cut off here.
        texts = [self.clean_text(result.text[: 64 * limit + 1]) for result in turn.results]
        while None not in (cuts := [cut_to_tokens(text, limit, self.tokenizer) for text in texts]):
            results = [dataclasses.replace(result, text=cut) for result, cut in zip(turn.results, cuts)]
            messages = self.results(turn.calls, results) + further
            ids = self.suffix_ids(turn.calls, messages, turn.token_ids)
            if len(ids) <= most:
                return results, messages, ids
            if not texts:
                return None
            # What is too much goes; the chat template's ids are in it too. Smaller each time, so that the loop ends.
            limit = min(limit - 1, limit - int(len(ids) - most) // len(texts), len(ids))
        return None

    def suffix(self, calls: list[ToolCall], messages: list[Message]) -> str:
        """The text from the end of a turn, over the messages after it, to the next generation prompt."""
        # Never the difference of two renders: Qwen3's template drops the thinking of a turn that is no longer last.
        rendered = self._render([ASK, {"role": "assistant", "content": self._sentinel}, *messages])
        if self._sentinel not in rendered:
            raise ValueError(f"the assistant's message is not in {rendered!r}")
        return rendered.rpartition(self._sentinel)[2]

    def _suffix_of_results(self) -> str:
        """The text after a turn with results. Raises `ValueError` unless they are all in it, as after other turns."""
        texts = [f"result-{secrets.token_hex(4)}" for _ in self.probes]
        messages = self.results(self.probes, [ToolResult(text) for text in texts])
        suffix = self.suffix(self.probes, messages)
        whole = self._render([ASK, self.turn_message(self.probes), *messages])
        if not all(text in suffix for text in texts):
            raise ValueError(f"it leaves out a result of {len(texts)}, and writes {suffix!r}")
        if not whole.endswith(suffix):
            raise ValueError(f"results differ after turns with calls: {suffix!r} is not the end of {whole!r}")
        return suffix

    def turn_message(self, calls: list[ToolCall], text: str = "A turn.") -> Message:
        """A turn that was not sampled, as a message for the chat template. A format may know no way to write calls."""
        return {"role": "assistant", "content": text}

    def refusal(self, what: str) -> ValueError:
        """The error for a chat template that does not work with this format."""
        name = self.tokenizer.name_or_path or "this tokenizer"
        advice = "Use another tool_format, or a chat template that supports such conversations."
        return ValueError(f"The chat template of {name} does not work with this tool_format: {what}. {advice}")

    # -- what the model writes --

    def next_stops(self, ids: list[int], prompt_ids: list[int]) -> tuple[str, ...]:
        """The texts at which the next request of a turn stops, of which `ids` have been sampled so far."""
        open_thinking = bool(self.stops and ids) and self.length_of_thinking(ids, prompt_ids) is None
        return self.thinking[1:] if open_thinking else self.stops

    def stopped_early(self, ids: list[int], prompt_ids: list[int]) -> bool:
        """Whether a request stopped at a stop text inside thinking, or at its end, so that the turn goes on."""
        if not self.stops or not ids or self.cut(ids, prompt_ids)[1]:
            return False
        # The request that stops at the end of the thinking is over, and the turn is not.
        return any(self.length_of_thinking(part, prompt_ids) is None for part in (ids, ids[:-1]))

    def cut(self, ids: list[int], prompt_ids: list[int]) -> tuple[int, bool]:
        """How many ids make the turn, and whether they end it: by decoded ids, as a server's `stop` cuts only text."""
        end = next((k for k, token in enumerate(ids) if token in self.ends), None)
        length, ended = (len(ids), False) if end is None else (end + 1, True)
        before = self._before(prompt_ids) if self.stops else ""

        def closed(size: int) -> bool:
            text = self._decode(ids[:size])
            start = thinking_length(text, before, *self.thinking)
            return start is not None and any(stop in text[start:] for stop in self.stops)

        if not self.stops or not closed(length):
            return length, ended
        if not closed(length - 1):  # where a server's `stop` ended it
            return length, True
        return bisect.bisect_left(range(length), True, key=closed), True

    def parse(
        self, ids: list[int], prompt_ids: list[int], tools: dict[str, Callable] | None = None, lead: str = ""
    ) -> Parsed:
        """Parse a whole turn: its text, calls and answer. Never raises, whatever the model wrote.

        `lead` is the text that the turn continues: a call or an answer that it opens belongs to the turn.
        """
        text, tools = self.text(ids), tools or {}
        start = thinking_length(text, self._before(prompt_ids), *self.thinking)
        if start is None:
            return Parsed(text, [], None, open_thinking=True)
        opened = "" if start else self._opened_in(lead.rpartition(self.thinking[1])[2], text)
        if opened and any(not call.error for call in self.parse_text(opened, tools)[0]):  # it is whole
            opened = ""
        return Parsed(text, *self.parse_text(opened + text[start:], tools))

    def _opened_in(self, lead: str, text: str) -> str:
        """The end of a lead that opens a call or an answer which the text after it closes; empty if there is none."""
        # Where only a turn's end closes a call, `closes` matches nothing, and a call may begin without a tag.
        begun = [found.start() for found in re.finditer(self.begins, lead, re.DOTALL)]
        opened = lead[begun[-1] :] if begun else ""
        closed = any(found[0] for found in re.finditer(self.closes, opened, re.DOTALL))
        if closed or re.match(r"<tool>\s*[^\s{]", opened):  # as in "I use <tool> tags"
            return ""
        first = re.search(f"(?P<begins>{self.begins})|{self.closes}", text, re.DOTALL)
        return "" if opened.startswith("<answer>") and first and first.lastgroup == "begins" else opened

    def parse_text(self, text: str, tools: dict[str, Callable]) -> tuple[list[ToolCall], str | None]:
        """Parse the calls and the answer in a turn's text after its thinking. Implemented by subclasses."""
        raise NotImplementedError

    def text(self, ids: list[int]) -> str:
        """A turn's text, without the token that ended it, unless that is one of `stops`."""
        last = ids[-1] if ids else None
        ended = last in self.ends or (self.stops and last in self.tokenizer.all_special_ids)
        return self._decode(ids[:-1] if ended and self._decode([last]) not in self.stops else ids)

    def length_of_thinking(self, ids: list[int], prompt_ids: list[int]) -> int | None:
        """The number of characters of sampled ids that are thinking. None if it is still open at their end."""
        return thinking_length(self._decode(ids), self._before(prompt_ids), *self.thinking)

    def _before(self, prompt_ids: list[int]) -> str:
        """What stands behind the last generation prompt: its opened thinking, or a turn that goes on."""
        start = next((k for k in reversed(range(len(prompt_ids))) if prompt_ids[k] in self.ends), -1) + 1
        text = self._decode(prompt_ids[start:])
        found = max((text.rfind(header) + len(header) for header in self._headers if header in text), default=0)
        return text[found:]

    # -- rendering and tokenising --

    def _render(self, messages: list[Message], **kwargs: Any) -> str:
        own = {**self.chat_template_kwargs, **kwargs, "chat_template": self.template, "tokenize": False}
        return self.tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, **own})

    def _rendered(self, messages: list[Message], **kwargs: Any) -> str:
        """The text of messages, empty if the chat template does not take them."""
        with contextlib.suppress(Exception):  # whatever a template raises
            return self._render(messages, **kwargs)
        return ""

    def _end_of_turn(self, ids: list[int]) -> list[int]:
        """The ids of a suffix up to its end of turn, blanks before it included. Not all templates have one."""
        end = next((k for k, i in enumerate(ids) if not self._decode([i]).isspace()), None)
        return [] if end is None or ids[end] not in self.tokenizer.added_tokens_decoder else ids[: end + 1]

    def text_ids(self, suffix: str, most: float = float("inf")) -> list[int]:
        """Token ids of a text that follows other text, or those of a beginning that surely has more than `most`."""
        suffix = cut_far_beyond(suffix, most, self.tokenizer)
        # Some tokenizers begin a text with a blank of their own, and keep a letter apart from what follows.
        before = "x"
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(before + suffix, add_special_tokens=False, return_offsets_mapping=True)
            starts = [start for start, _ in encoded["offset_mapping"]]
            if len(before) in starts:
                return encoded["input_ids"][starts.index(len(before)) :]
        return self.tokenizer(suffix, add_special_tokens=False)["input_ids"]

    def _decode(self, ids: list[int]) -> str:
        return self._text_of(tuple(ids), len(self.tokenizer))
