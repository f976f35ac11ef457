"""Texts with common prefixes, which are tokenised once: the prompts of the records of a long agent's conversation."""

from __future__ import annotations

import bisect
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
TRIED: dict[int, tuple[PreTrainedTokenizerBase, bool]] = {}  # id -> (tokenizer, whether its texts may share prefixes)


class Tokenised(NamedTuple):
    """A text, its ids, and (first character, end, index in ids) of each of its special tokens."""

    text: str
    ids: list[int]
    special: list[tuple[int, int, int]]


NOTHING = Tokenised("", [], [])


class SharedPrefixes:
    """The ids of texts. The last four are kept, and a new one is tokenised only from where it differs from them.

    INVARIANT: the ids are those that the tokenizer gives for the whole text. A tokenizer splits a text at its special
    tokens before anything else, so what stands before one has the same ids whatever follows it. Whether a tokenizer
    keeps to this is tried at the first text that shares a prefix; one that does not tokenises each text completely.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        # What stands for unknown characters is no token that a text is split at.
        known = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens)
        self._special = {number for number, token in known if token != tokenizer.unk_token}
        self.kept: deque[Tokenised] = deque(maxlen=4)

    def ids(self, text: str) -> list[int]:
        """The ids of `tokenizer(text, add_special_tokens=False)`, (P,)."""
        is_fit = TRIED.get(id(self.tokenizer), (None, None))[1]
        if not self.tokenizer.is_fast or is_fit is False:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        before = max((self._shared(known, text) for known in self.kept), key=lambda each: len(each.text), default=None)
        if before is None or not before.text:
            tokenised = self._tokenise(text)
        else:
            tokenised = self._tokenise(text, before)
            if is_fit is None:
                whole = self._tokenise(text)
                TRIED[id(self.tokenizer)] = self.tokenizer, whole.ids == tokenised.ids
                if whole.ids != tokenised.ids:
                    logger.warning(
                        "This tokenizer does not split texts at special tokens first, so prompts with a common prefix "
                        "are tokenised completely each time."
                    )
                    return whole.ids
        self.kept.append(tokenised)
        return list(tokenised.ids)

    def _shared(self, known: Tokenised, text: str) -> Tokenised:
        """A known text up to the last special token that another text also has."""
        number = bisect.bisect_right(known.special, same_length(known.text, text), key=lambda each: each[1])
        if not number:
            return NOTHING
        start, _, place = known.special[number - 1]
        return Tokenised(text[:start], known.ids[:place], known.special[: number - 1])

    def _tokenise(self, text: str, before: Tokenised = NOTHING) -> Tokenised:
        start, place = len(before.text), len(before.ids)
        encoded = self.tokenizer(text[start:], add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = encoded["input_ids"], encoded["offset_mapping"]
        special = [
            (start + first, start + end, place + k)
            for k, (token, (first, end)) in enumerate(zip(ids, spans))
            if token in self._special and first < end
        ]
        return Tokenised(text, before.ids + ids, before.special + special)


class Newest:
    """Values by key, of which those are kept that were used last.

    INVARIANT: a key says all that its value is made of. The sizes of all values add up to at most `most`, so that what
    a program sends does not fill the memory.

    Args:
        most: The size of all values together.
        size: Of a value.

    >>> kept = Newest(8, len)
    >>> [kept.of(key, lambda: key * 2) for key in ("ab", "c", "ab", "def", "c")]
    ['abab', 'cc', 'abab', 'defdef', 'cc']
    >>> list(kept.values)
    ['def', 'c']
    """

    def __init__(self, most: int, size: Callable[[Any], int]):
        self.most, self._size, self._total = most, size, 0
        self.values: OrderedDict[Hashable, Any] = OrderedDict()  # the last one was used last

    def get(self, key: Hashable) -> Any:
        """The value of a key; None where it is not there."""
        if key in self.values:
            self.values.move_to_end(key)
        return self.values.get(key)

    def of(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key, which is made where it is not there."""
        value = self.get(key)
        if value is None:
            value = make()
            self.keep(key, value)
        return value

    def keep(self, key: Hashable, value: Any) -> None:
        """Keep the value of a key that is not there."""
        self.values[key] = value
        self._total += self._size(value)
        while self._total > self.most:
            _, oldest = self.values.popitem(last=False)
            self._total -= self._size(oldest)


def keep_newest(kept: dict[Any, Any], key: Hashable, value: Any, most: int = 32) -> None:
    """Put a value into a dict, of which the newest ones are kept: rollouts of a group begin at about the same time.

    >>> kept = dict.fromkeys("ab")
    >>> keep_newest(kept, "c", None, most=2)
    >>> list(kept)
    ['b', 'c']
    """
    kept[key] = value
    while len(kept) > most:
        del kept[next(iter(kept))]


def same_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike.

    >>> same_length("abcd", "abxd"), same_length("ab", "abc"), same_length("", "a")
    (2, 2, 0)
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
