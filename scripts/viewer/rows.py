"""What the viewer reads of a row of the rollout log: its line of the list, and the text to search in."""

from __future__ import annotations

import json
import math
import re
from typing import Any


def table_line(row: dict[str, Any]) -> dict[str, Any]:
    """The line of the list, with the names that viewer.js reads. Raises `ValueError` if the row is no rollout."""
    turns, messages = (row.get("turns"), row.get("messages")) if isinstance(row, dict) else (None, None)
    if not isinstance(turns, list) or not isinstance(messages, list) or not all(isinstance(t, dict) for t in turns):
        raise ValueError("expected turns and messages")
    whole = ("rank", "step", "index", "num_tokens", "policy_version", "batch_size")
    if not all(isinstance(row.get(k, 0), int) for k in whole) or not isinstance(row.get("num_prompt_messages"), int):
        raise ValueError("expected whole numbers")
    results = [result for turn in turns for result in turn.get("results") or []]
    errors = [result.get("error") for result in results] + (["rollout"] if row.get("error") else [])
    rewards = {clean(name): number_or_none(value) for name, value in (row.get("rewards") or {}).items()}
    prompt, mode = question(row), clean(row.get("mode") or "train")
    return {
        "rank": row.get("rank", 0), "step": row.get("step", 0), "mode": mode, "number": row.get("index", 0),
        "prompt": prompt[:2000], "prompt_messages": row.get("num_prompt_messages", 0),
        "team": clean(row.get("group")), "stop": clean(row.get("stop_reason")), "rewards": rewards,
        "reward": number_or_none(row.get("reward")), "turns": len(turns), "tokens": row.get("num_tokens", 0),
        "seconds": sum(number_or_none(each.get("seconds")) or 0.0 for each in [*turns, *results]),
        "tools": names(call.get("name") for turn in turns for call in turn.get("calls") or []),
        "errors": names(errors), "version": row.get("policy_version", 0), "batch": row.get("batch_size", 0),
    }  # fmt: skip


def text_to_search(row: dict[str, Any]) -> str:
    """The texts of policy, calls, results, the answer and the error, in lines."""
    turns = row["turns"]
    contexts = [turn.get("context") for turn in turns]  # before further records
    read = [message for context in contexts if isinstance(context, list) for message in context]
    texts = [message.get("content") for message in [*row["messages"], *read] if isinstance(message, dict)]
    texts += [call.get("arguments") for turn in turns for call in turn.get("calls") or []]
    texts += [result.get("text") for turn in turns for result in turn.get("results") or []]
    return "\n".join(map(text_of, [*texts, row.get("answer"), row.get("error")]))


def clean(value: Any) -> str:
    """Text that can be encoded as UTF-8: a model may write half of a character in JSON."""
    return str(value).encode("utf-8", "replace").decode()


def text_of(content: Any) -> str:
    """A message's content, or a call's arguments, as text."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "\n".join(text_of(part.get("text") or f"[{part.get('type')}]") for part in content)
    if content is None or isinstance(content, str):
        return clean(content or "")
    return clean(json.dumps(content, ensure_ascii=False, default=str))


def number_or_none(value: Any) -> float | None:
    """A finite number, or else None."""
    number = float("nan") if value is None else float(value)
    return number if math.isfinite(number) else None


def names(values: Any) -> list[str]:
    """Different names, without line breaks."""
    return [re.sub(r"\s+", " ", clean(value)) for value in dict.fromkeys(values) if value]


def question(row: dict[str, Any]) -> str:
    """The last user message of a row's prompt."""
    given = [m for m in row["messages"][: row.get("num_prompt_messages", 0)] if isinstance(m, dict)]
    asked = [message for message in given if message.get("role") == "user"] or given[:1]
    return text_of(asked[-1].get("content")) if asked else ""
