"""Control tokens: text from outside never becomes structure (the table in docs/conversation.md)."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.rollout import Message, Origin

TURN_TAGS = ("think", "reasoning", "tool", "result", "answer")  # a tag that is an added token is a control token
AUTHORS = ("system", "developer", "assistant")  # roles that speak for the operator or the model


def is_control(token: str, template: str) -> bool:
    """Whether an added token opens or closes a part of a conversation. Some tokenizers have blanks or HTML as tokens.

    >>> [is_control(token, "{{ '<call>' }}") for token in ("<|sep|>", "</call>", "<think>", "<table>", "    ")]
    [True, True, True, False, False]
    """
    if re.fullmatch(r"<[|｜].*[|｜]>", token, re.DOTALL):
        return True
    tag = re.fullmatch(r"([<\[])/?(.+)([>\]])", token, re.DOTALL)
    return tag is not None and (
        tag[2] in TURN_TAGS or any(f"{tag[1]}{slash}{tag[2]}{tag[3]}" in template for slash in ("", "/"))
    )


def pattern_of(tokens: Iterable[str]) -> re.Pattern:
    """A pattern that matches any of these texts, blank ones excepted, and nothing if there are none."""
    # The longest first, then by alphabet, so that the result is the same in every process.
    texts = sorted({t for t in tokens if not t.isspace()}, key=lambda t: (-len(t), t))
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


@functools.lru_cache(maxsize=16)
def token_pattern(
    tokenizer: PreTrainedTokenizerBase, size: int, template: str, ends: frozenset[int] | None = None
) -> re.Pattern:
    """A pattern of tokens that begin or end a message, and of `ends`; None: of all. Others are cache keys."""
    if ends is None:
        added = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special or is_control(str(t), template)}
        return pattern_of({"</result>", *added, *tokenizer.all_special_tokens, *message_tokens(tokenizer)})
    return pattern_of({*message_tokens(tokenizer), *map(str, tokenizer.convert_ids_to_tokens(sorted(ends)))})


def message_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The tokens that begin or end a message: those that the chat template writes around messages."""
    texts = [f"text-{k}-of-a-message" for k in range(3)]
    system, user, assistant = ({"role": r, "content": t} for r, t in zip(("system", "user", "assistant"), texts))
    result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": texts[0]}
    chats = [system, user, assistant, user], [user, assistant, user], [user, assistant], [user, assistant, result]
    known = pattern_of([*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens])
    templates = tokenizer.chat_template
    found = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token} - {None}
    for template in templates.values() if isinstance(templates, dict) else filter(None, [templates]):
        for messages in chats:
            asked = {"chat_template": template, "add_generation_prompt": messages[-1] != assistant, "tokenize": False}
            with contextlib.suppress(Exception):  # whatever a template raises: not all take all roles
                around = re.sub("|".join(texts), " ", tokenizer.apply_chat_template(messages, **asked))
                # The tags around thinking and around a result stand inside a message.
                inside = r"</?\w+>" if result in messages else f"</?({'|'.join(TURN_TAGS)})>"
                found |= {token for token in known.findall(around) if not re.fullmatch(inside, token)}
    return found | placeholders_of(tokenizer)  # in a text such a token has no picture


def forbidden_in(
    origin: Origin, role: str, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int] = frozenset()
) -> re.Pattern:
    """A pattern of the tokens that a message of this origin and role may not contain."""
    key = tokenizer, len(tokenizer), str(tokenizer.chat_template)
    if origin == Origin.OUTSIDE and role not in AUTHORS:
        return token_pattern(*key)
    if origin == Origin.AGENT and role in AUTHORS:
        return pattern_of(placeholders_of(tokenizer))
    # What a message may not contain is more once the tokenizer has an image reader.
    return token_pattern(*key, frozenset(ends).union(getattr(getattr(tokenizer, "pictures", None), "unsampled", ())))


def placeholders_of(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The tokens that stand for images, videos and sounds; none for a text-only model."""
    # INVARIANT: no text of a program holds one: the model would look for the pixels of a picture that nobody gave.
    reader = getattr(tokenizer, "pictures", None)
    return set() if reader is None else set(tokenizer.convert_ids_to_tokens(reader.unsampled))


def neutralise(text: str, tokenizer: PreTrainedTokenizerBase, forbidden: re.Pattern | None = None) -> str:
    """Insert a space into every control token of a text, so that it cannot open or close a turn or end its result.

    INVARIANT: the tokenizer finds no control token in the returned text. `forbidden` matches the tokens that are
    broken, as `forbidden_in` gives them; None: all control tokens.
    """

    def broken(match: re.Match) -> str:
        token = match[0].lstrip()
        return f"{token[0]} {token[1:]}" if len(token) > 1 else " "

    pattern = forbidden or forbidden_in(Origin.OUTSIDE, "tool", tokenizer)
    text = text.encode("utf-8", "replace").decode("utf-8")  # no tokenizer accepts lone surrogates
    while pattern.search(text) is not None:  # repeated: two tokens may overlap
        text = pattern.sub(broken, text)
    return text


def neutralise_json(value: Any, tokenizer: PreTrainedTokenizerBase, forbidden: re.Pattern | None = None) -> Any:
    """Break the control tokens in all texts of a JSON value, including keys (see `neutralise`)."""
    clean = functools.partial(neutralise_json, tokenizer=tokenizer, forbidden=forbidden)
    if isinstance(value, str):
        return neutralise(value, tokenizer, forbidden)
    if isinstance(value, dict):
        return {clean(key): clean(each) for key, each in value.items()}
    return list(map(clean, value)) if isinstance(value, (list, tuple)) else value


def check_names(function: dict[str, Any], forbidden: re.Pattern) -> None:
    """Raise `ValueError` if the name of a tool (as its schema says it) or of a parameter contains a control token."""
    tool, parameters = function["name"], function.get("parameters") or {}
    for name in (tool, *(parameters.get("properties") or {})):
        if found := forbidden.search(name):
            raise ValueError(
                f"Tool {tool!r}: the name {name!r} holds the control token {found[0]!r} of the model, which would "
                "read it as one, and a call cannot hold it. Expected another name."
            )


def neutralise_messages(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, origin: Origin, ends: frozenset = frozenset()
) -> list[dict[str, Any]]:
    """Break the tokens in all texts of messages, names and calls too, that their origin and roles may not contain."""
    return [neutralise_json(m, tokenizer, forbidden_in(origin, m["role"], tokenizer, ends)) for m in messages]


def cut_to_tokens(text: str, limit: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Truncate a text to at most `limit` tokens, with a visible marker at the end. None if nothing fits."""
    if limit <= 0:
        return None
    shortened = cut_far_beyond(text[: 64 * limit], limit, tokenizer)  # the tokenizer takes long for megabytes
    ids = tokenizer(shortened, add_special_tokens=False)["input_ids"]
    if len(ids) <= limit and shortened == text:
        return text
    marker = "... [cut]"
    for room in range(limit - len(tokenizer(marker, add_special_tokens=False)["input_ids"]), 0, -1):
        cut = tokenizer.decode(ids[:room]).rstrip("\ufffd") + marker  # not half a character
        if len(tokenizer(cut, add_special_tokens=False)["input_ids"]) <= limit:
            return cut
    return None


def cut_far_beyond(text: str, limit: float, tokenizer: PreTrainedTokenizerBase) -> str:
    """Shorten a text of certainly more than `limit` tokens to a beginning that has more: megabytes take long."""
    size = len(text) if limit == float("inf") else 5 * max(int(limit), 0) + 1024
    while size < len(text):
        if len(tokenizer(text[:size], add_special_tokens=False)["input_ids"]) > max(int(limit), 0) + 8:  # 8 may change
            return text[:size]
        size *= 4
    return text


def cut_messages(messages: list[Message], limit: float, tokenizer: PreTrainedTokenizerBase) -> list[Message]:
    """Shorten the texts of messages with `cut_far_beyond`, except assistants', whose parts a template may drop."""
    return [
        {**message, "content": cut_far_beyond(message["content"], limit, tokenizer)}
        if message["role"] != "assistant" and isinstance(message["content"], str)
        else message
        for message in messages
    ]
