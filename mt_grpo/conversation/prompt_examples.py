"""Examples before the question (`prompt_examples`): conversations that the model reads and is not trained on."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, JsonValue, TypeAdapter

from mt_grpo.base.errors import error_line
from mt_grpo.base.files import RecipeLoader
from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.control_tokens import forbidden_in
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.rollout import Message, Origin, ToolCall, ToolResult, join

SHAPE = "Expected lists of messages of user, assistant and tool. A system message belongs into system_prompt."


class ExampleCall(BaseModel, extra="forbid"):
    """A call in an example."""

    name: str
    arguments: dict[str, JsonValue] = {}


class ExampleMessage(BaseModel, extra="forbid", str_strip_whitespace=True):
    """A message of an example. Blanks around its text are left out: YAML's blocks end with a line break."""

    role: Literal["user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(lambda content: content or "")] = ""  # null beside calls
    tool_calls: list[ExampleCall] = []


ExampleTurn = tuple[list[Message], list[ToolCall], list[str]]  # (a question or none and the turn, calls, results)


def read_prompt_examples(examples: str | list | None) -> list[list[ExampleMessage]]:
    """Validate conversations, a list of them or a YAML, JSON or JSON lines file. Raises `ValueError`."""
    where = f"prompt_examples: {examples}" if isinstance(examples, str) else "prompt_examples"
    try:
        if isinstance(examples, str):
            text = Path(examples).read_text(encoding="utf-8-sig")
            if examples.endswith(".jsonl"):
                examples = [json.loads(line) for line in text.split("\n") if line.strip()]
            else:
                examples = json.loads(text) if examples.endswith(".json") else yaml.load(text, RecipeLoader)
            examples = examples or [[]]  # which is no conversation
        shown = [each.get("messages") if isinstance(each, dict) else each for each in examples or []]
        checked = TypeAdapter(list[list[ExampleMessage]]).validate_python(shown)
        for number, messages in enumerate(checked, 1):
            roles = "".join(m.role[0] if m.content or m.tool_calls or m.role == "tool" else "_" for m in messages)
            calling = {message.role for message in messages if message.tool_calls}
            if not calling <= {"assistant"} or not re.fullmatch("ua(t+a|ua)*", roles):
                raise ValueError(f"example {number} has an empty message (_), or roles out of order: {roles}")
        return checked
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{where}: {error_line(error)}. {SHAPE}") from error


def written_examples(
    examples: list[list[ExampleMessage]], tool_format: ChatFormat, tools: dict[str, Callable], all_known: bool
) -> list[Message]:
    """Convert examples to messages for the chat template, with calls and results as in a conversation of this format.

    `all_known`: whether conversations have only `tools`. Raises `ValueError` for what no conversation has.
    """
    turns: list[ExampleTurn] = []
    for number, example in enumerate(examples, 1):
        try:
            turns += read_example(example, tool_format, tools, all_known)
            check_rendered(turns, tool_format)
        except ValueError as error:
            raise ValueError(f"prompt_examples, example {number}: {error}") from error
    # As what tools return, results can hold no control token.
    return messages_of([(*turn, list(map(tool_format.clean_text, results))) for *turn, results in turns], tool_format)


def messages_of(turns: list[ExampleTurn], tool_format: ChatFormat) -> list[Message]:
    """The messages of turns for the chat template."""
    return join([*said, *tool_format.results(calls, list(map(ToolResult, texts)))] for said, calls, texts in turns)


def read_example(
    example: list[ExampleMessage], tool_format: ChatFormat, tools: dict[str, Callable], all_known: bool
) -> list[ExampleTurn]:
    """Read the turns of one example. Raises `ValueError` for what `tool_format` would not read or write so."""
    turns, said = [], []
    forbidden = forbidden_in(Origin.DATA, "user", tool_format.tokenizer, tool_format.ends)
    for k, message in enumerate(example):
        text, calls = message.content, [ToolCall(call.name, call.arguments) for call in message.tool_calls]
        if message.role != "tool" and (
            found := forbidden.search(f"{text}\n{json.dumps([vars(call) for call in calls])}")
        ):
            raise ValueError(f"{text!r:.100} has the token {found[0]!r}, which begins or ends a message. Remove it.")
        if message.role == "user":
            said = [{"role": "user", "content": text}]
        if message.role != "assistant":
            continue
        turn = tool_format.written_turn(text, calls)
        if "tool_calls" not in turn:
            ids = tool_format.text_ids(turn["content"])
            read = tool_format.parse(ids, [], tools).calls
            if tool_format.cut(ids, [])[0] < len(ids) or (calls and read != calls):
                raise ValueError(f"{turn['content']!r:.300} goes on after the end of the turn, or has two calls.")
            calls = read
        for call in calls:
            if mistake := check_call(call, tools) if all_known or call.name in tools else call.error:
                raise ValueError(f"{text!r:.100} has a call that cannot run: {mistake}")
        results = [each.content for each in itertools.takewhile(lambda each: each.role == "tool", example[k + 1 :])]
        if len(results) != len(calls):
            raise ValueError(
                f"{text!r:.100} has {len(calls)} calls that this tool_format reads, and {len(results)} results. "
                f"Expected calls such as {tool_format.call_format}, and a message of role tool after it for each."
            )
        turns.append(([*said, turn], calls, results))
        said = []
    return turns


def check_rendered(turns: list[ExampleTurn], tool_format: ChatFormat) -> None:
    """Raise `ValueError` unless the chat template writes all texts, and results as it does after a sampled turn.

    All examples are rendered together: some templates write the first call of a prompt differently from later ones.
    """
    # Random texts stand for results, which some templates write as JSON.
    turns = [(*turn, [f"result-{secrets.token_hex(8)}" for _ in results]) for *turn, results in turns]
    end, at = f"question-{secrets.token_hex(8)}", 0
    messages = [*messages_of(turns, tool_format), {"role": "user", "content": end}]
    rendered = tool_format.tokenizer.apply_chat_template(**{**tool_format.prompt(messages, {}), "tokenize": False})
    for said, calls, results in turns:
        texts = [line.strip() for message in said for line in message["content"].splitlines()]
        texts += [call.name for call in calls if "tool_calls" in said[-1]]
        if results:
            after = tool_format.suffix(calls, tool_format.results(calls, list(map(ToolResult, results))))
            texts.append(after[: after.rindex(results[-1]) + len(results[-1])])
        for text in texts:
            if (start := rendered.find(text, at, rendered.find(end))) < 0:
                raise ValueError(
                    f"the chat template leaves out {text!r:.200}, or writes these results differently from a "
                    "conversation. Remove it (many templates drop the thinking of earlier turns), or use fewer calls."
                )
            at = start + len(text)
