"""Control tokens: text from outside never becomes structure (docs/tokenization.md).

Whose a text is decides which control tokens it may hold. Those that it may not hold get a space inside.

| whose text | no token that begins or ends a message | no other control token |
|---|---|---|
| tools' results, names and descriptions; what environments say | broken | broken |
| system, developer and assistant messages of environments | broken | kept |
| the prompt of a data set, all roles | broken | kept |
| user and tool messages of an agent | broken | kept |
| system, developer and assistant messages of an agent | kept | kept |
| `prompt_examples` of the recipe, but for results, which are a tool's | refused | kept |
| `system_prompt` of the recipe, what the policy wrote | kept | kept |

A model that reads images has tokens that stand for them. In what an agent or a scheduler sends they are broken
everywhere (`placeholders_of`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any

from transformers import PreTrainedTokenizerBase

TURN_TAGS = ("think", "reasoning", "tool", "result", "answer")  # a tag that is an added token is a control token
AUTHORS = ("system", "developer", "assistant")  # roles that speak for the operator or the model


class Origin(StrEnum):
    """The origin of a message. Together with its role it decides which tokens its texts may contain."""

    OUTSIDE = "outside"  # said while the run goes: an environment's replies, a tool's description and results
    DATA = "data"  # the prompt of a data set: the operator's, who may show tags of formats
    AGENT = "agent"  # an agent's request: read as an inference server would read it


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


def pattern_of(tokens: set[str]) -> re.Pattern:
    """A pattern that matches any of these texts, and nothing if there are none."""
    # Sorted (longest first, then alphabetically), so that the result is the same in every process.
    return re.compile("|".join(re.escape(t) for t in sorted(tokens, key=lambda t: (-len(t), t))) or r"(?!)")


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Added token of a tokenizer -> whether it is special."""
    tokens = {str(t): t.special for t in tokenizer.added_tokens_decoder.values()}
    return tokens | dict.fromkeys(tokenizer.all_special_tokens, True)


@functools.lru_cache(maxsize=8)
def control_pattern(tokenizer: PreTrainedTokenizerBase, size: int, template: str) -> re.Pattern:
    """A pattern that matches all control tokens. `size` and `template` are cache keys: a tokenizer may change."""
    tokens = added_tokens(tokenizer).items()
    control = {t for t, special in tokens if is_control(t, special, template)}
    return pattern_of({"</result>", *control, *message_tokens(tokenizer)})


@functools.lru_cache(maxsize=8)
def message_pattern(
    tokenizer: PreTrainedTokenizerBase, size: int, template: str, ends: frozenset[int] = frozenset()
) -> re.Pattern:
    """A pattern that matches the tokens that begin or end a message, and the ids `ends`."""
    further = map(str, tokenizer.convert_ids_to_tokens(sorted(ends)))
    return pattern_of({*message_tokens(tokenizer), *(t for t in further if not t.isspace())})


def message_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The tokens that begin or end a message: those that the chat template writes around messages."""
    known = pattern_of({token for token in added_tokens(tokenizer) if not token.isspace()})
    found = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token} - {None}
    for text, has_result in around_messages(tokenizer):
        for token in known.findall(text):
            tag = re.fullmatch(r"</?(\w+)>", token)
            # The tags around thinking and around a result stand inside a message, where the template writes them.
            if tag is None or not (has_result or tag[1] in TURN_TAGS):
                found.add(token)
    found |= placeholders_of(tokenizer)  # in a text it has no picture
    return {token for token in found if not token.isspace()}


def around_messages(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """The texts that the chat template writes around messages of short conversations, and whether one is a result."""
    texts = [f"text-{k}-of-a-message" for k in range(3)]
    system, user, assistant = ({"role": r, "content": t} for r, t in zip(("system", "user", "assistant"), texts))
    result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": texts[0]}
    conversations = (
        [system, user, assistant, user],
        [user, assistant, user],
        [user, assistant],
        [user, assistant, result],
    )
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates] if templates else []:
        for messages in conversations:
            asked = {"chat_template": template, "add_generation_prompt": messages[-1] != assistant, "tokenize": False}
            try:
                rendered = tokenizer.apply_chat_template(messages, **asked)
            except Exception:  # whatever a template raises: not all take all roles
                continue
            yield re.sub("|".join(texts), " ", rendered), messages[-1] == result


def forbidden_in(
    origin: Origin, role: str, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int] = frozenset()
) -> re.Pattern | None:
    """A pattern of the tokens that a message of this origin and role may not contain. None: it may contain all."""
    key = tokenizer, len(tokenizer), str(tokenizer.chat_template)
    if origin == Origin.OUTSIDE and role not in AUTHORS:
        return control_pattern(*key)
    if origin == Origin.AGENT and role in AUTHORS:
        found = placeholders_of(tokenizer)
        return pattern_of(found) if found else None
    # What a message may not contain is more once the tokenizer has an image reader.
    return message_pattern(*key, frozenset(ends).union(getattr(getattr(tokenizer, "pictures", None), "unsampled", ())))


def placeholders_of(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The tokens that stand for images, videos and sounds; none for a text-only model.

    INVARIANT: no text of a program holds one: the model would look for the pixels of a picture that nobody gave.
    """
    reader = getattr(tokenizer, "pictures", None)
    return set() if reader is None else set(tokenizer.convert_ids_to_tokens(reader.unsampled))


def neutralise(text: str, tokenizer: PreTrainedTokenizerBase, forbidden: re.Pattern | None = None) -> str:
    """Insert a space into every control token of a text, so that it cannot open or close a turn or end its result.

    INVARIANT: the tokenizer finds no control token in the returned text. A text without control tokens is unchanged.

    Args:
        text: Any text.
        tokenizer: Whose control tokens.
        forbidden: The tokens that are broken, as `forbidden_in` gives them. None: all control tokens.
    """

    def broken(match: re.Match) -> str:
        token = match[0].lstrip()
        return f"{token[0]} {token[1:]}" if len(token) > 1 else " "

    pattern = forbidden or control_pattern(tokenizer, len(tokenizer), str(tokenizer.chat_template))
    text = text.encode("utf-8", "replace").decode("utf-8")  # no tokenizer accepts lone surrogates
    while pattern.search(text) is not None:  # repeated: two tokens may overlap
        text = pattern.sub(broken, text)
    return text


def neutralise_json(value: Any, tokenizer: PreTrainedTokenizerBase, forbidden: re.Pattern | None = None) -> Any:
    """Break the control tokens in all texts of a JSON value, including keys (see `neutralise`)."""
    if isinstance(value, str):
        return neutralise(value, tokenizer, forbidden)
    if isinstance(value, dict):
        return {
            neutralise_json(k, tokenizer, forbidden): neutralise_json(v, tokenizer, forbidden)
            for k, v in value.items()
        }
    return [neutralise_json(v, tokenizer, forbidden) for v in value] if isinstance(value, (list, tuple)) else value


def clean_schema(schema: dict[str, Any], tokenizer: PreTrainedTokenizerBase, origin: Origin) -> dict[str, Any]:
    """Break the control tokens in a tool's JSON schema that its origin may not contain.

    Raises:
        ValueError: the name of the tool or of a parameter holds one: the model could not write it in a call.
    """
    forbidden = forbidden_in(origin, "tool", tokenizer)
    function = schema["function"]
    parameters = function.get("parameters") or {}
    check_names([function["name"], *(parameters.get("properties") or {})], forbidden)
    return neutralise_json(schema, tokenizer, forbidden)


def check_names(names: Iterable[str], forbidden: re.Pattern) -> None:
    """Raise `ValueError` if the name of a tool (the first name) or of its parameters contains a control token."""
    names = list(names)
    for name in names:
        if found := forbidden.search(name):
            what = f"Tool {name!r}" if name is names[0] else f"Tool {names[0]!r}: the parameter {name!r}"
            raise ValueError(
                f"{what} holds the control token {found[0]!r} of the model in its name. The model would read it as "
                "one, and a call cannot hold it. Expected another name."
            )


def neutralise_messages(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    origin: Origin,
    ends: frozenset[int] = frozenset(),
) -> list[dict[str, Any]]:
    """Break the tokens in all texts of messages that their origin and their roles may not contain.

    Args:
        messages: Of the chat template. Content may be text or parts; roles, names and calls are texts as well.
        tokenizer: Whose control tokens.
        origin: Whose the messages are.
        ends: Further ids that end a turn.
    """
    read = []
    for message in messages:
        forbidden = forbidden_in(origin, message["role"], tokenizer, ends)
        read.append(message if forbidden is None else neutralise_json(message, tokenizer, forbidden))
    return read
