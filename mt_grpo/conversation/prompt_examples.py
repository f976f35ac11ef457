"""Examples before the question (`prompt_examples`): conversations that the model reads, and that are never trained."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.base.bounded_yaml import BoundedLoader
from mt_grpo.base.errors import error_line
from mt_grpo.conversation.formats.base import ChatFormat, load_json
from mt_grpo.conversation.formats.control_tokens import Origin, forbidden_in, neutralise
from mt_grpo.conversation.sampling import content_of
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.rollout import Message, ToolCall, ToolResult

KEY = "prompt_examples"
SHAPE = "Expected a list of conversations, each one a list of messages with role and content."
BEGINNING, END = "the beginning", "its end"
FOLLOWING = {  # role -> which may come behind it
    BEGINNING: ("user",),
    "user": ("assistant",),
    "assistant": ("tool", "user", END),
    "tool": ("tool", "assistant"),
}
# What opens or closes a call in some format. In a text without a call it was written for another format.
CALLS = re.compile(
    r"</?(?:tool|tool_calls?|function_calls?|function|invoke)\b|\[TOOL_CALLS\]|<\|tool|<\|python_tag\|>"
)


def read_prompt_examples(path: str | None) -> list[list[Message]]:
    """The conversations of a file of YAML, JSON or JSON lines; none without a path. Raises `ValueError`.

    A conversation is a list of messages, or an object whose `messages` they are.
    """
    if path is None:
        return []
    if not Path(path).is_file():
        raise ValueError(f"{KEY}: {path!r} is not a file. {SHAPE}")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if path.endswith(".jsonl"):
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            found = json.loads(text) if path.endswith(".json") else yaml.load(text, BoundedLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{KEY}: {path!r} cannot be read: {error_line(error)}. {SHAPE}") from error
    return check_examples(found, f"{KEY}: {path}")


def check_examples(examples: Any, where: str = KEY) -> list[list[Message]]:
    """The conversations, as copies. Raises `ValueError` for what is none, and for roles out of order.

    >>> check_examples([[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]])
    [[{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]]
    """
    if not isinstance(examples, (list, tuple)) or not examples:
        raise ValueError(f"{where} holds {examples!r:.80}. {SHAPE}")
    checked = []
    for number, example in enumerate(examples, 1):
        messages = example.get("messages") if isinstance(example, dict) else example
        if not isinstance(messages, (list, tuple)) or not all(isinstance(each, dict) for each in messages):
            hint = " For one conversation, write it as a list in a list." if isinstance(example, dict) else ""
            raise ValueError(f"{where}, example {number} is {example!r:.80}. {SHAPE}{hint}")
        before, copies = BEGINNING, []
        for place, message in enumerate([*messages, None], 1):
            role, expected = END if message is None else message.get("role"), FOLLOWING[before]
            if role not in expected or (role == END and message is not None):
                got = END if message is None else f"the role {role!r}"
                raise ValueError(
                    f"{where}, example {number}: expected {' or '.join(expected)} behind {before}, got {got} (message "
                    f"{place}). A system message is the recipe's system_prompt, and an example ends with an "
                    "assistant's message."
                )
            if message is None:
                break
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
    """The messages with others behind those of the system.

    >>> behind_system([{"role": "system"}, {"role": "user"}], [{"role": "assistant"}])
    [{'role': 'system'}, {'role': 'assistant'}, {'role': 'user'}]
    """
    start = next((k for k, each in enumerate(messages) if each["role"] not in ("system", "developer")), len(messages))
    return [*messages[:start], *examples, *messages[start:]]


def written_examples(
    examples: list[list[Message]], tool_format: ChatFormat, tools: dict[str, Callable], all_known: bool
) -> list[Message]:
    """The examples as the chat template takes them: calls and results as this format has them in a conversation.

    Args:
        examples: As `check_examples` gives them. Calls stand in `tool_calls`, or in the text as the model writes them.
        tool_format: Of the recipe.
        tools: Of the recipe.
        all_known: Whether no conversation has others.

    Raises:
        ValueError: A call that this format cannot read or that no tool takes, a call without a result, a control
            token, a text that the chat template leaves out.
    """
    written = []
    for number, example in enumerate(examples, 1):
        where = f"{KEY}, example {number}"
        for place, message in enumerate(example, 1):
            check_control(message, tool_format, f"{where}, message {place}")
        messages = list(turns_of(example, tool_format, tools, all_known, where))
        check_rendered(messages, tool_format, where)
        written += messages
    return written


def check_control(message: Message, tool_format: ChatFormat, where: str) -> None:
    """Raise `ValueError` for a text that would begin or end a message."""
    forbidden = forbidden_in(Origin.DATA, "user", tool_format.tokenizer, tool_format.ends)
    if found := forbidden.search(f"{message['content']} {json.dumps(message.get('tool_calls'), ensure_ascii=False)}"):
        raise ValueError(
            f"{where} holds the token {found[0]!r}, which begins or ends a message. Remove it: the chat template "
            "writes it."
        )


def turns_of(
    example: list[Message], tool_format: ChatFormat, tools: dict[str, Callable], all_known: bool, where: str
) -> Iterator[Message]:
    """The messages of one example as the chat template takes them. Raises `ValueError`."""
    rest = list(example)
    while rest:
        message = rest.pop(0)
        if message["role"] != "assistant":
            yield {"role": "user", "content": message["content"]}
            continue
        said = f"{where}: {message['content'] or message.get('tool_calls')!r:.100}"
        calls, turn = read_turn(message, tool_format, tools, said)
        for call in calls:
            mistake = check_call(call, tools) if all_known or call.name in tools else call.error
            if mistake:
                raise ValueError(f"{said} has a call that cannot run: {mistake}")
        texts = []
        while rest and len(texts) < len(calls) and (text := result_text(rest[0], tool_format)) is not None:
            texts.append(text)
            rest.pop(0)
        if len(texts) < len(calls) or (rest and rest[0]["role"] == "tool"):
            further = sum(1 for _ in itertools.takewhile(lambda each: each["role"] == "tool", rest))
            raise ValueError(
                f"{said} has {len(calls)} calls that this tool_format reads, and {len(texts) + further} results. "
                "Expected a message of role tool behind it for each call."
            )
        yield turn
        # As a conversation has them: what a tool returns can hold no control token.
        yield from tool_format.results(calls, [ToolResult(neutralise(text, tool_format.tokenizer)) for text in texts])


def read_turn(
    message: Message, tool_format: ChatFormat, tools: dict[str, Callable], said: str
) -> tuple[list[ToolCall], Message]:
    """(calls, the message as the chat template takes it) of an assistant's message. Raises `ValueError`."""
    if message.get("tool_calls"):
        calls = [read_tool_call(call, said) for call in message["tool_calls"]]
        turn = tool_format.written_turn(message["content"], calls)
        if "tool_calls" in turn:
            return calls, turn
        read = tool_format.parse(tool_format.text_ids(turn["content"]), [], tools).calls
        if read != calls:
            raise ValueError(
                f"{said}: the calls would be read as {read!r:.200}. Expected what this tool_format reads."
            )
        return calls, turn
    ids = tool_format.text_ids(message["content"])
    calls = tool_format.parse(ids, [], tools).calls
    length, _ = tool_format.cut(ids, [])
    if length < len(ids):
        raise ValueError(f"{said} goes on behind the end of the turn. Remove {tool_format.text(ids[length:])!r:.100}.")
    if not calls and (found := CALLS.search(message["content"])):
        raise ValueError(
            f"{said} holds {found[0]!r}, and no call that this tool_format reads. Write calls as "
            f"{tool_format.call_format}, or in `tool_calls`, which fits every tool_format."
        )
    return calls, {"role": "assistant", "content": message["content"]}


def read_tool_call(call: Any, said: str) -> ToolCall:
    """A call as in OpenAI's API, or its name and arguments alone. Raises `ValueError`."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    name, arguments = function.get("name"), function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = load_json(arguments)[0]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"{said}: a call is {call!r:.100}, expected its name, a text, and its arguments, an object.")
    return ToolCall(name, arguments)


def result_text(message: Message, tool_format: ChatFormat) -> str | None:
    """The result in a message; None if it has none. Some formats have results in a user's message."""
    if message["role"] == "tool":
        return message["content"]
    (written,) = tool_format.results([ToolCall("add", {})], [ToolResult("")])
    opening, _, closing = written["content"].strip().partition("\n")
    text = message["content"].strip()
    if written["role"] != message["role"] or not text.startswith(opening) or not text.endswith(closing.strip()):
        return None
    return text.removeprefix(opening).removesuffix(closing.strip()).strip("\n")


def check_rendered(messages: list[Message], tool_format: ChatFormat, where: str) -> None:
    """Raise `ValueError` unless the chat template writes all texts of an example."""
    arguments = tool_format.prompt([*messages, {"role": "user", "content": "A question."}], {})
    rendered = tool_format.tokenizer.apply_chat_template(**{**arguments, "tokenize": False})
    for message in messages:
        names = [call["function"]["name"] for call in message.get("tool_calls") or []]
        for text in (*message["content"].splitlines(), *names):
            if text.strip() not in rendered:
                raise ValueError(
                    f"{where}: the model's chat template leaves out {text.strip()!r:.100}, so the model would not "
                    "read it. Remove it. (Many templates drop the thinking of earlier turns.)"
                )
