"""Examples before the question (`prompt_examples`): conversations that the model reads and is not trained on."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, JsonValue, TypeAdapter

from mt_grpo.base.errors import error_line
from mt_grpo.base.files import RecipeLoader
from mt_grpo.conversation.formats.base import ASK, ChatFormat
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.rollout import Message, Origin, ToolCall, ToolResult


class ExampleCall(BaseModel, extra="forbid"):
    """A call in an example."""

    name: str
    arguments: dict[str, JsonValue] = {}


class ExampleMessage(BaseModel, extra="forbid", str_strip_whitespace=True):
    """A message of an example. Blanks around its text are left out: YAML's blocks end with a line break."""

    role: Literal["user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(lambda content: content or "")] = ""  # null beside calls
    tool_calls: list[ExampleCall] = []


def read_prompt_examples(examples: str | list | None) -> list[list[ExampleMessage]]:
    """Validate conversations, a list of them or a YAML, JSON or JSON lines file. Raises `ValueError`."""
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
        raise ValueError(f"prompt_examples: {error_line(error)}. Expected a list of lists of messages") from error


def written_examples(
    examples: list[list[ExampleMessage]], tool_format: ChatFormat, tools: dict[str, Callable], all_known: bool
) -> list[Message]:
    """Convert examples to messages for the chat template, with calls and results as in a conversation of this format.

    `all_known`: whether conversations have only `tools`. Raises `ValueError` for what no conversation has.
    """
    messages, texts = [], []
    for number, example in enumerate(examples, 1):
        try:
            for k, message in [(k, m) for k, m in enumerate(example) if m.role != "tool"]:
                turn = {"role": "user", "content": message.content}
                calls = [ToolCall(call.name, call.arguments) for call in message.tool_calls]
                if message.role == "assistant":
                    turn = tool_format.turn_message(calls, message.content)
                if message.role == "assistant" and "tool_calls" not in turn:
                    ids = tool_format.text_ids(turn["content"])
                    found = tool_format.parse(ids, [], tools).calls
                    if tool_format.cut(ids, [])[0] < len(ids) or (calls and found != calls):
                        text = turn["content"]
                        raise ValueError(f"{text!r:.300} goes on after the end of the turn, or has other calls")
                    calls = found
                if tool_format.clean([turn], Origin.DATA) != [turn]:
                    raise ValueError(f"{message.content!r:.100} has a token that begins or ends a message")
                following = itertools.takewhile(lambda each: each.role == "tool", example[k + 1 :])
                results = [ToolResult(tool_format.clean_text(each.content)) for each in following]
                checks = (check_call(c, tools) if all_known or c.name in tools else c.error for c in calls)
                mistakes = " ".join(filter(None, checks))
                if mistakes or len(results) != len(calls):
                    raise ValueError(
                        f"{turn['content']!r:.200}: {len(calls)} calls, {len(results)} results. {mistakes}"
                    )
                read = tool_format.results(calls, results)
                messages += [turn, *read]
                texts += [*turn["content"].splitlines(), *(call.name for call in calls if "tool_calls" in turn)]
                # As after a sampled turn, of which the generation prompt may open the thinking.
                texts += [tool_format.suffix(calls, read).partition(tool_format.thinking[0])[0]] if read else []
            shown = {**tool_format.prompt([*messages, ASK], {}), "tokenize": False}
            rendered = tool_format.tokenizer.apply_chat_template(**shown)
            for text in filter(None, map(str.strip, texts)):
                _, found, rendered = rendered.partition(text)
                if not found:
                    raise ValueError(f"the chat template leaves out {text!r:.300}, or writes it differently later")
        except Exception as error:  # whatever a template raises
            raise ValueError(f"prompt_examples, example {number}: {error}") from error
    return messages
