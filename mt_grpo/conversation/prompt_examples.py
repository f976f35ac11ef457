"""Examples before the question (`prompt_examples`): conversations that the model reads and is not trained on."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, Json, JsonValue, TypeAdapter

from mt_grpo.base.errors import error_line
from mt_grpo.base.files import RecipeLoader
from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.control_tokens import forbidden_in
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.rollout import Message, Origin, ToolCall, ToolResult

SHAPE = (
    "Expected a list of conversations, each one a list of messages with role (user, assistant, tool) and content, "
    "that begins with a user's message and ends with an assistant's. A system message belongs into system_prompt."
)


class ExampleCall(BaseModel, extra="forbid"):
    """A call with a name and arguments, as an object or as JSON; or in the form of OpenAI's API."""

    name: str = ""
    arguments: dict[str, JsonValue] | Json[dict[str, JsonValue]] = {}
    function: ExampleCall | None = None
    id: str | None = None
    type: Literal["function"] = "function"


class ExampleMessage(BaseModel, extra="forbid"):
    """A message of an example."""

    role: Literal["user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[ExampleCall] = []
    tool_call_id: str | None = None
    name: str | None = None


# The user's message, the calls, the turn, a text per result.
ExampleTurn = tuple[list[Message], list[ToolCall], Message, list[str]]


def read_prompt_examples(examples: str | list | None) -> list[list[Message]]:
    """Validate conversations, a list of them or a YAML, JSON or JSON lines file. Raises `ValueError`.

    >>> read_prompt_examples([[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]])
    [[{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]]
    """
    where, checked = "prompt_examples", []
    try:
        if isinstance(examples, str):
            where = f"{where}: {examples}"
            text = Path(examples).read_text(encoding="utf-8-sig")
            if examples.endswith(".jsonl"):
                examples = [json.loads(line) for line in text.split("\n") if line.strip()]
            else:
                examples = json.loads(text) if examples.endswith(".json") else yaml.load(text, RecipeLoader)
            if not examples:
                raise ValueError("the file is empty")
        shown = [each.get("messages") if isinstance(each, dict) else each for each in examples or []]
        for messages in TypeAdapter(list[list[ExampleMessage]]).validate_python(shown):
            roles = "".join(message.role[0] for message in messages)
            complete = all(m.role == "tool" or m.tool_calls or (m.content or "").strip() for m in messages)
            calling = {message.role for message in messages if message.tool_calls}
            if not complete or not calling <= {"assistant"} or not re.fullmatch("ua(t+a|ua)*", roles):
                raise ValueError(f"example {len(checked) + 1} has an empty message, or roles out of order: {roles}")
            dumped = [message.model_dump(exclude_unset=True) for message in messages]
            # YAML's blocks end with a line break.
            checked.append([{**each, "content": (each.get("content") or "").strip()} for each in dumped])
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{where}: {error_line(error)}. {SHAPE}") from error
    return checked


def written_examples(
    examples: list[list[Message]], tool_format: ChatFormat, tools: dict[str, Callable], all_known: bool
) -> list[Message]:
    """Convert examples to messages for the chat template, with calls and results as in a conversation of this format.

    `all_known`: whether no conversation has other tools than `tools`. Raises `ValueError` for a call that this format
    cannot read or that no tool takes, a call without a result, a control token, a text that the chat template leaves
    out, and results that it writes differently in a conversation.
    """
    turns: list[ExampleTurn] = []
    for number, example in enumerate(examples, 1):
        try:
            turns += read_example(example, tool_format, tools, all_known)
            check_rendered(turns, tool_format)
        except ValueError as error:
            raise ValueError(f"prompt_examples, example {number}: {error}") from error
    # As a conversation has them: what a tool returns can hold no control token.
    clean = [list(map(tool_format.clean_text, results)) for *_, results in turns]
    return messages_of(turns, clean, tool_format)


def messages_of(turns: list[ExampleTurn], results: list[list[str]], tool_format: ChatFormat) -> list[Message]:
    """The messages of turns for the chat template, with these texts as results."""
    written = [tool_format.results(turn[1], list(map(ToolResult, texts))) for turn, texts in zip(turns, results)]
    return [each for (asked, _, turn, _), answers in zip(turns, written) for each in (*asked, turn, *answers)]


def read_example(
    example: list[Message], tool_format: ChatFormat, tools: dict[str, Callable], all_known: bool
) -> list[ExampleTurn]:
    """Read the turns of one example. Raises `ValueError` for what `tool_format` would not read or write so."""
    turns, asked = [], []
    for k, message in enumerate(example):
        text, written = message["content"], message.get("tool_calls", [])
        forbidden = forbidden_in(Origin.DATA, "user", tool_format.tokenizer, tool_format.ends)
        if message["role"] == "tool":
            continue
        if found := forbidden.search(f"{text}\n{json.dumps(written, ensure_ascii=False)}"):
            raise ValueError(f"{text!r:.100} has the token {found[0]!r}, which begins or ends a message. Remove it.")
        if message["role"] == "user":
            asked = [{"role": "user", "content": text}]
            continue
        functions = [call.get("function") or call for call in written]
        calls = [ToolCall(each.get("name", ""), each.get("arguments", {})) for each in functions]
        turn = tool_format.written_turn(text, calls)
        if "tool_calls" not in turn:
            ids = tool_format.text_ids(turn["content"])
            length, read = tool_format.cut(ids, [])[0], tool_format.parse(ids, [], tools).calls
            if length < len(ids) or (calls and read != calls):
                rest = tool_format.text(ids[length:])
                raise ValueError(f"{text!r:.100} goes on after the end of the turn, or has two calls: {rest!r:.100}.")
            calls = read
        for call in calls:
            if mistake := check_call(call, tools) if all_known or call.name in tools else call.error:
                raise ValueError(f"{text!r:.100} has a call that cannot run: {mistake}")
        results = list(itertools.takewhile(lambda each: each["role"] == "tool", example[k + 1 :]))
        ids = [(call.get("id"), each.get("tool_call_id")) for call, each in zip(written, results)]
        if any(None not in pair and pair[0] != pair[1] for pair in ids):
            raise ValueError(f"{text!r:.100}: the ids of the results are not those of the calls, in their order.")
        if len(results) != len(calls):
            raise ValueError(
                f"{text!r:.100} has {len(calls)} calls that this tool_format reads, and {len(results)} results. "
                f"Expected calls such as {tool_format.call_format}, and a message of role tool after it for each."
            )
        turns.append((asked, calls, turn, [each["content"] for each in results]))
        asked = []
    return turns


def check_rendered(turns: list[ExampleTurn], tool_format: ChatFormat) -> None:
    """Raise `ValueError` unless the chat template writes all texts, and results as it does after a sampled turn.

    All examples are rendered together, as in a prompt: some templates write the first call of a prompt differently
    from later ones. Results are replaced by random texts, since some templates write them as JSON.
    """
    replaced = [[f"result-{secrets.token_hex(8)}" for _ in results] for *_, results in turns]
    end, at = f"question-{secrets.token_hex(8)}", 0
    asked = [*messages_of(turns, replaced, tool_format), {"role": "user", "content": end}]
    rendered = tool_format.tokenizer.apply_chat_template(**{**tool_format.prompt(asked, {}), "tokenize": False})
    rendered = rendered.partition(end)[0]
    for (asked, calls, turn, _), results in zip(turns, replaced):
        texts = [line.strip() for message in (*asked, turn) for line in message["content"].splitlines()]
        texts += [call.name for call in calls if "tool_calls" in turn]
        if results:
            after = tool_format.suffix(calls, tool_format.results(calls, list(map(ToolResult, results))))
            texts.append(after[: after.rindex(results[-1]) + len(results[-1])])
        for text in texts:
            if (start := rendered.find(text, at)) < 0:
                raise ValueError(
                    f"the chat template leaves out {text!r:.200}, or writes these results differently from a "
                    "conversation. Remove it (many templates drop the thinking of earlier turns), or use fewer calls."
                )
            at = start + len(text)
