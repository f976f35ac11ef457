"""Examples before the question (`prompt_examples`): conversations that the model reads and is not trained on."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Json, JsonValue, TypeAdapter, ValidationError, model_validator

from mt_grpo.base.errors import error_line
from mt_grpo.base.files import RecipeLoader
from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.control_tokens import Origin, forbidden_in, neutralise
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.rollout import Message, ToolCall, ToolResult

KEY = "prompt_examples"
SHAPE = (
    "Expected a list of conversations, each one a list of messages with role (user, assistant, tool) and content, "
    "that begins with a user's message and ends with an assistant's. A system message belongs into system_prompt."
)
# What opens or closes a call in some format. In a text without a call it was written for another format.
CALLS = re.compile(
    r"</?(?:tool|tool_calls?|function_calls?|function|invoke)\b|\[TOOL_CALLS\]|<\|tool|<\|python_tag\|>"
    r'|\{\s*"(?:name|function|tool)"\s*:'
)


class ExampleCall(BaseModel, extra="forbid"):
    """A call with a name and arguments, as an object or as JSON; also in the form of OpenAI's API."""

    name: str
    arguments: dict[str, JsonValue] | Json[dict[str, JsonValue]] = {}
    id: str | None = None
    type: Literal["function"] = "function"

    @model_validator(mode="before")
    @classmethod
    def flat(cls, call: Any) -> Any:
        """Take `name` and `arguments` out of `function`."""
        if (
            isinstance(call, dict)
            and isinstance(call.get("function"), dict)
            and not {"name", "arguments"} & call.keys()
        ):
            return {**{key: value for key, value in call.items() if key != "function"}, **call["function"]}
        return call


class ExampleMessage(BaseModel, extra="forbid"):
    """A message of an example."""

    role: Literal["user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[ExampleCall] = []
    tool_call_id: str | None = None
    name: str | None = None


def read_prompt_examples(path: str | None) -> list[list[Message]]:
    """Read conversations from a YAML, JSON or JSON lines file; an empty list without a path. Raises `ValueError`.

    A conversation is a list of messages, or an object with the key `messages`.
    """
    if path is None:
        return []
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if path.endswith(".jsonl"):
            found = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            found = json.loads(text) if path.endswith(".json") else yaml.load(text, RecipeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{KEY}: {path!r} cannot be read: {error_line(error)}. {SHAPE}") from error
    return check_examples(found, f"{KEY}: {path}")


def check_examples(examples: Any, where: str = KEY) -> list[list[Message]]:
    """Validate conversations and copy them. Raises `ValueError` for a wrong shape, and for roles out of order.

    >>> check_examples([[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]])
    [[{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]]
    """
    if not isinstance(examples, (list, tuple)) or not examples:
        raise ValueError(f"{where} holds {examples!r:.80}. {SHAPE}")
    checked = []
    for number, example in enumerate(examples, 1):
        try:
            given = example.get("messages") if isinstance(example, dict) else example
            messages = TypeAdapter(list[ExampleMessage]).validate_python(given)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            got = f"{first['msg']}, got {first['input']!r:.80}"
            raise ValueError(f"{where}, example {number}, {place}: {got}. {SHAPE}") from error
        wrong = [m for m in messages if not fits_role(m)]
        if not re.fullmatch("ua(t+a|ua)*", "".join(message.role[0] for message in messages)) or wrong:
            got = ", ".join(f"{m.role}{' (empty, or with tool_calls)' * (m in wrong)}" for m in messages)
            raise ValueError(f"{where}, example {number} has messages of {got or 'nobody'}. {SHAPE}")
        dumped = [message.model_dump(exclude_unset=True) for message in messages]
        # YAML's blocks end with a line break.
        checked.append([{**each, "content": (each.get("content") or "").strip()} for each in dumped])
    return checked


def fits_role(message: ExampleMessage) -> bool:
    """Whether a message has what its role needs: a result its content, an assistant text or calls, a user text."""
    if message.role == "tool":
        return message.content is not None and not message.tool_calls
    return (
        bool((message.content or "").strip())
        and not message.tool_calls
        or (message.role == "assistant" and bool(message.tool_calls))
    )


def behind_system(messages: list[Message], examples: list[Message]) -> list[Message]:
    """Insert examples after the system messages.

    >>> behind_system([{"role": "system"}, {"role": "user"}], [{"role": "assistant"}])
    [{'role': 'system'}, {'role': 'assistant'}, {'role': 'user'}]
    """
    start = next((k for k, each in enumerate(messages) if each["role"] not in ("system", "developer")), len(messages))
    return [*messages[:start], *examples, *messages[start:]]


@dataclass
class ExampleTurn:
    """A turn of the model in the example `number`, with the user's message before it and a result text per call."""

    number: int
    asked: list[Message]
    calls: list[ToolCall]
    message: Message
    results: list[str]

    def messages(self, tool_format: ChatFormat, results: list[str]) -> list[Message]:
        """The turn's messages for the chat template, with these texts as results."""
        return [*self.asked, self.message, *tool_format.results(self.calls, [ToolResult(text) for text in results])]


def written_examples(
    examples: list[list[Message]], tool_format: ChatFormat, tools: dict[str, Callable], all_known: bool
) -> list[Message]:
    """Convert examples to messages for the chat template, with calls and results as in a conversation of this format.

    Args:
        examples: The output of `check_examples`. Calls are in `tool_calls`, or in the text as the model writes them.
        tool_format: The tool format of the recipe.
        tools: The tools of the recipe, name -> function.
        all_known: Whether no conversation has other tools.

    Raises:
        ValueError: A call that this format cannot read or that no tool takes, a call without a result, a control
            token, a text that the chat template leaves out, or results that it writes differently in a conversation.
    """
    turns = []
    for number, example in enumerate(examples, 1):
        rest, asked = list(example), []
        while rest:
            message = rest.pop(0)
            said = f"{KEY}, example {number}: {message['content'] or message.get('tool_calls')!r:.100}"
            written = [message["content"], *(json.dumps(c, ensure_ascii=False) for c in message.get("tool_calls", []))]
            forbidden = forbidden_in(Origin.DATA, "user", tool_format.tokenizer, tool_format.ends)
            if found := forbidden.search("\n".join(written)):
                raise ValueError(f"{said} has the token {found[0]!r}, which begins or ends a message. Remove it.")
            if message["role"] == "user":
                asked = [{"role": "user", "content": message["content"]}]
                continue
            calls, turn = read_turn(message, tool_format, tools, said)
            for call in calls:
                mistake = check_call(call, tools) if all_known or call.name in tools else call.error
                if mistake:
                    raise ValueError(f"{said} has a call that cannot run: {mistake}")
            results = list(itertools.takewhile(lambda each: each["role"] == "tool", rest))
            ids = [call.get("id") for call in message.get("tool_calls", [])]
            if any(ids) and any(each.get("tool_call_id") for each in results):
                by_id = {each.get("tool_call_id"): each for each in results}
                fit = by_id.keys() == set(ids) and len(by_id) == len(results) == len(ids)
                results = [by_id[each] for each in ids] if fit else []
            if len(results) != len(calls):
                raise ValueError(
                    f"{said} has {len(calls)} calls that this tool_format reads, and {len(results)} results of them. "
                    "Expected one message of role tool after it for each call, with the id of its call or without ids."
                )
            del rest[: len(results)]
            turns.append(ExampleTurn(number, asked, calls, turn, [each["content"] for each in results]))
            asked = []
    check_rendered(turns, tool_format)
    # As a conversation has them: what a tool returns can hold no control token.
    return [
        message
        for turn in turns
        for message in turn.messages(tool_format, [neutralise(text, tool_format.tokenizer) for text in turn.results])
    ]


def read_turn(
    message: Message, tool_format: ChatFormat, tools: dict[str, Callable], said: str
) -> tuple[list[ToolCall], Message]:
    """Read an assistant's message. Returns (calls, the message for the chat template). Raises `ValueError`."""
    if message.get("tool_calls"):
        calls = [ToolCall(call["name"], call.get("arguments", {})) for call in message["tool_calls"]]
        turn = tool_format.written_turn(message["content"], calls)
        if "tool_calls" not in turn:
            read = tool_format.parse(tool_format.text_ids(turn["content"]), [], tools).calls
            if read != calls:
                raise ValueError(f"{said}: this tool_format would read the calls as {read!r:.200}.")
        return calls, turn
    ids = tool_format.text_ids(message["content"])
    calls = tool_format.parse(ids, [], tools).calls
    length, _ = tool_format.cut(ids, [])
    if length < len(ids):
        raise ValueError(f"{said} goes on after the end of the turn. Remove {tool_format.text(ids[length:])!r:.100}.")
    if not calls and (found := CALLS.search(message["content"])):
        raise ValueError(
            f"{said} has {found[0]!r}, but no call that this tool_format reads. Write calls as "
            f"{tool_format.call_format}, or in `tool_calls`, which works with every tool_format."
        )
    return calls, {"role": "assistant", "content": message["content"]}


def check_rendered(turns: list[ExampleTurn], tool_format: ChatFormat) -> None:
    """Raise `ValueError` unless the chat template writes all texts, and results as it does after a sampled turn.

    All examples are rendered together, as in a prompt: some templates write the first call of a prompt differently
    from later ones. Results are replaced by random texts, since some templates write them as JSON.
    """
    given = [(turn, [f"result-{secrets.token_hex(8)}" for _ in turn.results]) for turn in turns]
    asked = [message for turn, results in given for message in turn.messages(tool_format, results)]
    end, at = f"question-{secrets.token_hex(8)}", 0
    arguments = tool_format.prompt([*asked, {"role": "user", "content": end}], {})
    rendered = tool_format.tokenizer.apply_chat_template(**{**arguments, "tokenize": False}).partition(end)[0]
    for turn, results in given:
        lines = [line.strip() for message in (*turn.asked, turn.message) for line in message["content"].splitlines()]
        lines += [call.name for call in turn.calls if "tool_calls" in turn.message]
        for text in lines:
            if (found := rendered.find(text, at)) < 0:
                raise ValueError(
                    f"{KEY}, example {turn.number}: the model's chat template leaves out {text!r:.100}, so the model "
                    "would not read it. Remove this text. (Many templates drop the thinking of earlier turns.)"
                )
            at = found + len(text)
        if results:
            messages = tool_format.results(turn.calls, [ToolResult(text) for text in results])
            lived = tool_format.suffix(turn.calls, messages)
            lived = lived[: lived.rindex(results[-1]) + len(results[-1])]
            if (found := rendered.find(lived, at)) < 0:
                raise ValueError(
                    f"{KEY}, example {turn.number}: the model's chat template writes the results after "
                    f"{turn.message['content'] or turn.calls!r:.100} differently from a conversation, so the example "
                    "would not match training. Use fewer calls per turn in the examples, or another tool_format."
                )
            at = found + len(lived)
