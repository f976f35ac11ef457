"""How a model writes tool calls and answers (the paper's XML tags), and how a long result is cut."""

from __future__ import annotations

import bisect
import json

from transformers import PreTrainedTokenizerBase

from mt_grpo.rollout import ToolCall

CLOSING_TAGS = ("</tool>", "</answer>")
CALL_FORMAT = '<tool>{"name": "tool name", "args": {"argument": "value"}}</tool>'


def end_of_turn(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> int:
    """The number of sampled ids that form the turn, including the token that completes `</tool>` or `</answer>`.

    The first such tag ends the turn. Without a tag all ids form the turn. The tag is searched in the decoded ids, so
    that the result is the same for every backend: a server's `stop` cuts its text, but not its ids. A prefix of a
    sample is still on-policy.
    """

    def closed(length: int) -> bool:
        text = tokenizer.decode(token_ids[:length])
        return any(tag in text for tag in CLOSING_TAGS)

    if not closed(len(token_ids)) or not closed(len(token_ids) - 1):  # no tag, or the last id completes it
        return len(token_ids)
    return 1 + bisect.bisect_left(range(1, len(token_ids) + 1), True, key=closed)


def parse_turn(text: str) -> tuple[ToolCall | None, bool]:
    """(tool call or None, whether the turn is an answer) of one turn's text. The first closing tag decides.

    >>> parse_turn('<tool>{"name": "calculator", "args": {"expression": "6*7"}}</tool>')
    (ToolCall(name='calculator', arguments={'expression': '6*7'}, error=None), False)
    >>> parse_turn("<reasoning>easy</reasoning><answer>42</answer>")
    (None, True)
    >>> parse_turn('<tool>{"name": "calculator", <answer>42</answer>')[0].error  # an answer inside a call is no answer
    'the call is not closed by </tool>'
    """
    end = min((text.find(tag) for tag in CLOSING_TAGS if tag in text), default=len(text))
    # Tags in the model's reasoning are not read: the model may only mention them there.
    start = max(
        (text.rfind(tag, 0, end) + len(tag) for tag in ("</think>", "</reasoning>") if tag in text[:end]), default=0
    )
    body, closing = text[start:end], text[end:]
    opened, answer = body.find("<tool>"), body.find("<answer>")
    if closing.startswith("</answer>") and answer >= 0 and not 0 <= opened < answer:
        return None, True
    if closing.startswith("</tool>"):
        if opened < 0:
            return ToolCall(None, {}, "</tool> without <tool> before it"), False
        return parse_call(body[opened + len("<tool>") :]), False
    return (ToolCall(None, {}, "the call is not closed by </tool>") if opened >= 0 else None), False


def parse_call(body: str) -> ToolCall:
    """The tool call from the JSON between the tool tags.

    The policy reads the error texts. So they are short and say how to correct the call.
    """
    try:
        call = json.loads(body)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and body[error.pos :].lstrip().startswith("{"):
            return ToolCall(None, {}, "several calls in one turn; write one call, read its result, then the next")
        return ToolCall(None, {}, f"the call is not valid JSON ({error.msg} at character {error.pos})")
    except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of brackets
        return ToolCall(None, {}, "the call holds a number that is too long, or is nested too deeply")
    if isinstance(call, list):
        return ToolCall(None, {}, "several calls in one turn; write one call, read its result, then the next")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(None, {}, 'the call must be a JSON object with "name" (a string) and "args" (an object)')
    arguments = call.get("args", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, f'"args" must be a JSON object, got {type(arguments).__name__}')
    if unknown := set(call) - {"name", "args"}:
        return ToolCall(call["name"], {}, f'unknown key "{sorted(unknown)[0]}" in the call; use "name" and "args"')
    return ToolCall(call["name"], arguments)


def cut_to_tokens(text: str, limit: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """`text` cut to at most `limit` tokens, a visible marker included. None if no text fits beside the marker."""
    if limit <= 0:
        return None
    shortened = text[: 64 * limit]  # the tokenizer need not read megabytes that are cut off anyway
    ids = tokenizer(shortened, add_special_tokens=False)["input_ids"]
    if len(ids) <= limit and shortened == text:
        return text
    marker = "... [cut]"
    room = limit - len(tokenizer(marker, add_special_tokens=False)["input_ids"])
    while room > 0:
        cut = tokenizer.decode(ids[:room]).rstrip("\ufffd") + marker  # no incomplete character
        if len(tokenizer(cut, add_special_tokens=False)["input_ids"]) <= limit:
            return cut
        room -= 1
    return None
