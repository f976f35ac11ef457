"""A cache for the prompts of a batch: rollouts with the same prompt have it rendered and tokenised once."""

from __future__ import annotations

import datetime
import hashlib
import marshal
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

BY_CHANCE = ("random", "lipsum")  # Jinja filters with which a chat template writes another prompt each time


def digest_of(value: Any) -> bytes | None:
    """A hash of plain values that tells apart whatever a chat template may write differently; None for other values.

    Python's `==` does not: 1 equals True and 1.0, and two dicts are equal whose keys stand in another order.

    >>> len({digest_of([v]) for v in (1, True, 1.0, "1", b"1")}), digest_of([1, "a"]) == digest_of([1, "a"])
    (5, True)
    >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}), digest_of([object()])
    (False, None)
    """
    try:
        written = marshal.dumps(value, 2)  # later formats tell a text from a copy of it
    except ValueError:  # a class of someone's own, or too deep
        return None
    return hashlib.blake2b(written, digest_size=16).digest()


def clock_of(template: str) -> list[str] | None:
    """The clock values that a chat template reads now, such as today's date. None if a later rendering may differ.

    >>> clock_of("{{ messages }}"), clock_of("{{ strftime_now(format) }}"), clock_of("{{ messages | random }}")
    ([], None, None)
    >>> [int(year) > 2000 for year in clock_of("{{ strftime_now('%Y') }}")]
    [True]
    """
    formats = [found[1] for found in re.findall(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", template)]
    # Each mention must be a call with a text, or the test whether there is a clock at all.
    mentions = template.count("strftime_now") - len(re.findall(r"strftime_now\s+is\s+(?:not\s+)?defined", template))
    if len(formats) != mentions or any(word in template for word in BY_CHANCE):
        return None
    now = datetime.datetime.now()
    return [now.strftime(each) for each in formats]


class PromptCache:
    """The ids of prompts that were rendered for a batch. Its rollouts hold the cache, which goes with them.

    INVARIANT: the ids are those that a rendering of its own would give, and each rollout gets a list of its own.
    """

    def __init__(self):
        self._ids: dict[tuple, list[int]] = {}

    def ids(self, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]) -> list[int]:
        """The ids of `tokenizer.apply_chat_template(**arguments)`, (P,), rendered once per batch if possible."""
        template, asked = str(tokenizer.chat_template), digest_of(arguments)
        clock = clock_of(f"{template} {arguments.get('chat_template')}")
        if asked is None or clock is None:
            return tokenizer.apply_chat_template(**arguments)
        key = id(tokenizer), len(tokenizer), template, *clock, asked
        if key not in self._ids:
            self._ids[key] = tokenizer.apply_chat_template(**arguments)
        return list(self._ids[key])
