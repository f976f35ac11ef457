"""Examples before the question (`prompt_examples`): conversations that the model reads and is not trained on."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.base.errors import error_line
from mt_grpo.base.files import RecipeLoader
from mt_grpo.conversation.formats.base import ChatFormat, load_json
from mt_grpo.conversation.formats.control_tokens import Origin, forbidden_in, neutralise
from mt_grpo.conversation.sampling import content_of
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.rollout import Message, ToolCall, ToolResult

KEY = "prompt_examples"
SHAPE = "Expected a list of conversations, each one a list of messages with role and content."
BEGINNING, END = "the beginning", "its end"
FOLLOWING = {  # role -> the roles that may follow it
    BEGINNING: ("user",),
    "user": ("assistant",),
    "assistant": ("tool", "user", END),
    "tool": ("tool", "assistant"),
}
FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name"}  # of a message
# What opens or closes a call in some format. In a text without a call it was written for another format.
CALLS = re.compile(
    r"</?(?:tool|tool_calls?|function_calls?|function|invoke)\b|\[TOOL_CALLS\]|<\|tool|<\|python_tag\|>"
    r'|\{\s*"(?:name|function|tool)"\s*:'
)


def read_prompt_examples(path: str | None) -> list[list[Message]]:
    """Read conversations from a YAML, JSON or JSON lines file; an empty list without a path. Raises `ValueError`.

    A conversation is a list of messages, or an object with the key `messages`.
    """
    if path is None:
        return []
    if not Path(path).is_file():
        raise ValueError(f"{KEY}: {path!r} is not a file. {SHAPE}")
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
        messages = example.get("messages") if isinstance(example, dict) else example
        if not isinstance(messages, (list, tuple)) or not all(isinstance(each, dict) for each in messages):
            hint = " Write a single conversation as a list in a list." if isinstance(example, dict) else ""
            raise ValueError(f"{where}, example {number} is {example!r:.80}. {SHAPE}{hint}")
        before, copies = BEGINNING, []
        for place, message in enumerate([*messages, None], 1):
            role, expected = END if message is None else message.get("role"), FOLLOWING[before]
            if role not in expected or (role == END and message is not None):
                got = END if message is None else f"the role {role!r}"
                raise ValueError(
                    f"{where}, example {number}: expected {' or '.join(expected)} after {before}, got {got} (message "
                    f"{place}). Put a system message into the recipe's system_prompt, and end an example with an "
                    "assistant's message."
                )
            if message is None:
                break
            if unknown := sorted(map(str, message.keys() - FIELDS)):
                raise ValueError(
                    f"{where}, example {number}, message {place} has the unknown field {unknown[0]!r}. Expected "
                    f"only {', '.join(sorted(FIELDS))}."
                )
            if message.get("tool_calls") is not None and (
                role != "assistant" or not isinstance(message["tool_calls"], list)
            ):
                raise ValueError(
                    f"{where}, example {number}, message {place} has tool_calls {message['tool_calls']!r:.80}. "
                    "Expected a list, in an assistant's message."
                )
            content = content_of(message, f"{where}, example {number}, message {place}")
            says_nothing = not content and role != "tool" and not message.get("tool_calls")
            if not isinstance(content, str) or says_nothing or (content and not content.strip()):
                raise ValueError(
                    f"{where}, example {number}, message {place} has the content {content!r:.80}, expected text."
                )
            copies.append({**message, "content": content.strip()})  # YAML's blocks end with a line break
            before = role
        checked.append(copies)
    return checked


def behind_system(messages: list[Message], examples: list[Message]) -> list[Message]:
    """Insert examples after the system messages.

    >>> behind_system([{"role": "system"}, {"role": "user"}], [{"role": "assistant"}])
    [{'role': 'system'}, {'role': 'assistant'}, {'role': 'user'}]
    """
    start = next((k for k, each in enumerate(messages) if each["role"] not in ("system", "developer")), len(messages))
    return [*messages[:start], *examples, *messages[start:]]


@dataclass
class ExampleTurn:
    """A turn of the model in an example, with the message before it and the results after it.

    Attributes:
        asked: The user's message before it, None after results.
        calls: The calls of the turn.
        message: The turn as a message for the chat template.
        results: One result text per call.
    """

    asked: Message | None
    calls: list[ToolCall]
    message: Message
    results: list[str]

    def messages(self, tool_format: ChatFormat, results: list[str]) -> list[Message]:
        """The turn's messages for the chat template, with these texts as results."""
        read = tool_format.results(self.calls, [ToolResult(text) for text in results])
        return [*([self.asked] if self.asked else []), self.message, *read]


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
    turns = [
        (number, turn)
        for number, example in enumerate(examples, 1)
        for turn in turns_of(example, tool_format, tools, all_known, f"{KEY}, example {number}")
    ]
    check_rendered(turns, tool_format)
    # As a conversation has them: what a tool returns can hold no control token.
    return [
        message
        for _, turn in turns
        for message in turn.messages(tool_format, [neutralise(text, tool_format.tokenizer) for text in turn.results])
    ]


def check_control(text: str, tool_format: ChatFormat, said: str) -> None:
    """Raise `ValueError` for a text that would begin or end a message."""
    forbidden = forbidden_in(Origin.DATA, "user", tool_format.tokenizer, tool_format.ends)
    if found := forbidden.search(text):
        raise ValueError(
            f"{said} has the token {found[0]!r}, which begins or ends a message. Remove it: the chat template "
            "writes it."
        )


def turns_of(
    example: list[Message], tool_format: ChatFormat, tools: dict[str, Callable], all_known: bool, where: str
) -> Iterator[ExampleTurn]:
    """Yield the turns of one example. Raises `ValueError` for calls that do not match their results."""
    rest, asked = list(example), None
    while rest:
        message = rest.pop(0)
        said = f"{where}: {message['content'] or message.get('tool_calls')!r:.100}"
        if message["role"] != "assistant":
            check_control(message["content"], tool_format, said)
            asked = {"role": "user", "content": message["content"]}
            continue
        calls, turn = read_turn(message, tool_format, tools, said)
        for call in calls:
            mistake = check_call(call, tools) if all_known or call.name in tools else call.error
            if mistake:
                raise ValueError(f"{said} has a call that cannot run: {mistake}")
        found: list[tuple[str | None, str]] = []  # id of the call, text
        while rest and len(found) < len(calls) and (text := result_text(rest[0], tool_format)) is not None:
            found.append((rest.pop(0).get("tool_call_id"), text))
        if len(found) < len(calls) or (rest and rest[0]["role"] == "tool"):
            further = sum(1 for _ in itertools.takewhile(lambda each: each["role"] == "tool", rest))
            raise ValueError(
                f"{said} has {len(calls)} calls that this tool_format reads, and {len(found) + further} results. "
                "Expected one message of role tool after it for each call."
            )
        yield ExampleTurn(asked, calls, turn, in_order_of_calls(message, found, said))
        asked = None


def in_order_of_calls(message: Message, found: list[tuple[str | None, str]], said: str) -> list[str]:
    """The result texts in the order of their calls, matched by id if there are ids. Raises `ValueError`."""
    ids = [call.get("id") for call in message.get("tool_calls") or []]
    if all(id_of is None for id_of, _ in found) or not any(ids):
        return [text for _, text in found]
    if sorted(map(str, ids)) != sorted(str(id_of) for id_of, _ in found) or len(set(ids)) < len(ids):
        raise ValueError(
            f"{said} has calls with the ids {ids}, and results with {[id_of for id_of, _ in found]}. Expected one "
            "result per id, or no ids."
        )
    texts = dict(found)
    return [texts[each] for each in ids]


def read_turn(
    message: Message, tool_format: ChatFormat, tools: dict[str, Callable], said: str
) -> tuple[list[ToolCall], Message]:
    """Read an assistant's message. Returns (calls, the message for the chat template). Raises `ValueError`."""
    check_control(message["content"], tool_format, said)
    if message.get("tool_calls"):
        calls = [read_tool_call(call, tool_format, said) for call in message["tool_calls"]]
        try:
            turn = tool_format.written_turn(message["content"], calls)
        except ValueError as error:
            raise ValueError(f"{said}: {error}") from error
        if "tool_calls" in turn:
            return calls, turn
        read = tool_format.parse(tool_format.text_ids(turn["content"]), [], tools).calls
        if read != calls:
            raise ValueError(
                f"{said}: this tool_format would read the calls as {read!r:.200}. Expected the same calls."
            )
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


def read_tool_call(call: Any, tool_format: ChatFormat, said: str) -> ToolCall:
    """Read a call in the form of OpenAI's API, or with only `name` and `arguments`. Raises `ValueError`."""
    outer = call if isinstance(call, dict) else {}
    function = outer.get("function", {k: v for k, v in outer.items() if k not in ("id", "type")})
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    if isinstance(arguments, str):
        arguments = load_json(arguments)[0]
    whole = isinstance(function, dict) and function.keys() <= {"name", "arguments"}
    whole = whole and outer.keys() <= {"id", "type", "function", *([] if "function" in outer else function)}
    if not whole or not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError(
            f"{said}: a call is {call!r:.100}, expected an object with `name` (a string) and `arguments` (an object) "
            "and no other keys."
        )
    try:
        text = json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError) as error:  # YAML reads 2024-05-01 as a date
        raise ValueError(f"{said}: arguments are {arguments!r:.100}: {error}. Put texts in quotes.") from error
    check_control(f"{function['name']} {text}", tool_format, said)
    return ToolCall(function["name"], arguments)


def result_text(message: Message, tool_format: ChatFormat) -> str | None:
    """The result text in a message, None if it has none. Some formats write results as messages of the user."""
    if message["role"] == "tool":
        return message["content"]
    (written,) = tool_format.results([ToolCall("add", {})], [ToolResult("")])
    opening, _, closing = written["content"].strip().partition("\n")
    text = message["content"].strip()
    if written["role"] != message["role"] or not text.startswith(opening) or not text.endswith(closing.strip()):
        return None
    return text.removeprefix(opening).removesuffix(closing.strip()).strip("\n")


def check_rendered(turns: list[tuple[int, ExampleTurn]], tool_format: ChatFormat) -> None:
    """Raise `ValueError` unless the chat template writes all texts, and results as it does after a sampled turn.

    All examples are rendered together, as in a prompt: some templates write the first call of a prompt differently
    from later ones. Results are replaced by random texts, since some templates write them as JSON.
    """
    stand_ins = iter(f"result-{secrets.token_hex(8)}" for _ in itertools.count())
    given = [(number, turn, [next(stand_ins) for _ in turn.results]) for number, turn in turns]
    asked, end = [], f"question-{secrets.token_hex(8)}"
    for _, turn, results in given:
        asked += turn.messages(tool_format, results)
    arguments = tool_format.prompt([*asked, {"role": "user", "content": end}], {})
    rendered = tool_format.tokenizer.apply_chat_template(**{**arguments, "tokenize": False}).partition(end)[0]
    at = 0
    for number, turn, results in given:
        lines = [line.strip() for text in (turn.asked, turn.message) if text for line in text["content"].splitlines()]
        lines += [call.name for call in turn.calls if "tool_calls" in turn.message]
        for text in lines:
            if (found := rendered.find(text, at)) < 0:
                raise ValueError(
                    f"{KEY}, example {number}: the model's chat template leaves out {text!r:.100}, so the model would "
                    "not read it. Remove this text. (Many templates drop the thinking of earlier turns.)"
                )
            at = found + len(text)
        if results:
            messages = tool_format.results(turn.calls, [ToolResult(text) for text in results])
            lived = tool_format.suffix(turn.calls, messages)
            lived = lived[: lived.rindex(results[-1]) + len(results[-1])]
            if (found := rendered.find(lived, at)) < 0:
                raise ValueError(
                    f"{KEY}, example {number}: the model's chat template writes the results after "
                    f"{turn.message['content'] or turn.calls!r:.100} differently from a conversation, so the example "
                    "would not match training. Use fewer calls per turn in the examples, or another tool_format."
                )
            at = found + len(lived)
