"""Text from tools and data that can neither open nor close a turn."""

from __future__ import annotations

import functools
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

TURN_TAGS = ("think", "reasoning", "tool", "result", "answer")  # as tokens of their own they are control tokens
AUTHORS = ("system", "developer", "assistant")  # roles whose messages are left as they are written


def is_control(token: str, special: bool, template: str) -> bool:
    """Whether an added token opens or closes something in a conversation.

    Not every added token does: some tokenizers have runs of blanks, rulers or HTML as tokens, and those are text.

    >>> [is_control(t, False, "{{ '<call>' }}") for t in ("<|sep|>", "</call>", "<think>", "<table>", "    ")]
    [True, True, True, False, False]
    """
    if special or re.fullmatch(r"<[|｜].*[|｜]>", token, re.DOTALL):
        return not token.isspace()
    tag = re.fullmatch(r"([<\[])/?(.+)([>\]])", token, re.DOTALL)
    return tag is not None and (
        tag[2] in TURN_TAGS or any(f"{tag[1]}{slash}{tag[2]}{tag[3]}" in template for slash in ("", "/"))
    )


@functools.lru_cache(maxsize=8)
def control_pattern(tokenizer: PreTrainedTokenizerBase, size: int, template: str) -> re.Pattern:
    """What `neutralise` breaks. `size` and `template` are the tokenizer's, so that a changed one is read again."""
    tokens = {str(t): t.special for t in tokenizer.added_tokens_decoder.values()}
    tokens |= dict.fromkeys(tokenizer.all_special_tokens, True)
    control = {"</result>", *(t for t, special in tokens.items() if is_control(t, special, template))}
    # Sorted, so that the result is the same in every process: longest first, then by the alphabet.
    return re.compile("|".join(re.escape(t) for t in sorted(control, key=lambda t: (-len(t), t))))


def find_control(text: str, tokenizer: PreTrainedTokenizerBase) -> re.Match | None:
    """The first control token that stands in a text, or `</result>`."""
    return control_pattern(tokenizer, len(tokenizer), str(tokenizer.chat_template)).search(text)


def neutralise(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text that can neither open or close a turn nor close its own result: a space breaks control tokens.

    INVARIANT: the tokenizer finds no control token in what comes out, and text without any comes out as it is.
    """

    def broken(match: re.Match) -> str:
        token = match[0].lstrip()
        return f"{token[0]} {token[1:]}" if len(token) > 1 else " "

    text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates, which no tokenizer takes
    while (found := find_control(text, tokenizer)) is not None:  # again, since one can begin inside another
        text = found.re.sub(broken, text)
    return text


def neutralise_prompt(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """A prompt whose user and tool messages are neutralised. What the author writes is not: system and assistant."""
    return [
        {**m, "content": neutralise(m["content"], tokenizer)}
        if isinstance(m["content"], str) and m["role"] not in AUTHORS else m
        for m in messages
    ]  # fmt: skip
