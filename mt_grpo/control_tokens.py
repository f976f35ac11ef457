"""Control tokens are broken in text from tools and data, so that such text cannot open or close a turn."""

from __future__ import annotations

import functools
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

TURN_TAGS = ("think", "reasoning", "tool", "result", "answer")  # a tag that is an added token is a control token
AUTHORS = ("system", "developer", "assistant")  # trusted roles: their messages are not changed


def is_control(token: str, special: bool, template: str) -> bool:
    """Whether an added token of a tokenizer opens or closes a part of a conversation.

    A token does so if the tokenizer calls it special, or if it is a tag of `TURN_TAGS` or of the chat template. Other
    added tokens are text: some tokenizers have runs of blanks, rulers or HTML as tokens.

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
    """A pattern of all control tokens. `size` and `template` are cache keys: a tokenizer may change."""
    tokens = {str(t): t.special for t in tokenizer.added_tokens_decoder.values()}
    tokens |= dict.fromkeys(tokenizer.all_special_tokens, True)
    control = {"</result>", *(t for t, special in tokens.items() if is_control(t, special, template))}
    # Sorted (longest first, then alphabetically), so that the result is the same in every process.
    return re.compile("|".join(re.escape(t) for t in sorted(control, key=lambda t: (-len(t), t))))


def find_control(text: str, tokenizer: PreTrainedTokenizerBase) -> re.Match | None:
    """The match of the first control token or `</result>` in a text; None if there is none."""
    return control_pattern(tokenizer, len(tokenizer), str(tokenizer.chat_template)).search(text)


def neutralise(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text with a space inside every control token, so that it cannot open or close a turn or end its result.

    INVARIANT: the tokenizer finds no control token in the returned text. A text without control tokens is unchanged.
    """

    def broken(match: re.Match) -> str:
        token = match[0].lstrip()
        return f"{token[0]} {token[1:]}" if len(token) > 1 else " "

    text = text.encode("utf-8", "replace").decode("utf-8")  # no tokenizer accepts lone surrogates
    while (found := find_control(text, tokenizer)) is not None:  # repeated: two tokens may overlap
        text = found.re.sub(broken, text)
    return text


def neutralise_prompt(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The prompt with all its messages neutralised, except those of the trusted roles in `AUTHORS`."""
    return [
        {**m, "content": neutralise(m["content"], tokenizer)}
        if isinstance(m["content"], str) and m["role"] not in AUTHORS else m
        for m in messages
    ]  # fmt: skip
