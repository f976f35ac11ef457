"""Texts that begin alike, each beginning tokenised once: the prompts of the further records of a conversation.

A long agent edits what was said, and each edit begins a record with tens of thousands of tokens, most of which an
earlier record begins with, too.
"""

from __future__ import annotations

import bisect
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
MOST_KEPT = 4  # texts


@dataclass(frozen=True)
class Tokenised:
    """A text and its ids.

    Attributes:
        starts, ends: Where its special tokens begin and end, in characters. A token may take white space beside it.
        places: The indices of these tokens in `ids`.
    """

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]
    places: list[int]


class SharedPrefixes:
    """The ids of texts, of which the last ones are kept.

    INVARIANT: the ids are those that the tokenizer gives for the whole text. A tokenizer splits a text at its special
    tokens before anything else. So what stands before one has the same ids whatever stands behind it, and a text is
    tokenised anew from the last special token on with which both texts go on alike. Whether a tokenizer keeps to this
    is tried at the first text that shares a beginning; one that does not tokenises each text whole.

    Args:
        tokenizer: A fast one. With another one each text is tokenised whole.

    Attributes:
        num_characters: Of texts that were tokenised so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.num_characters = tokenizer, 0
        # What stands for unknown characters is no token that a text is split at.
        known = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens)
        self._special = {number for number, token in known if token != tokenizer.unk_token}
        self.kept: deque[Tokenised] = deque(maxlen=MOST_KEPT)  # the last one is the newest

    def ids(self, text: str) -> list[int]:
        """The ids of `tokenizer(text, add_special_tokens=False)`, (P,)."""
        if not self.tokenizer.is_fast or id(self.tokenizer) in unfit:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        shared = [(self._shared(known, text), known) for known in self.kept]
        number, known = max(shared, key=lambda each: each[0] and each[1].starts[each[0] - 1], default=(0, None))
        if not number:
            found = self._tokenise(text)
        else:
            start, place = known.starts[number - 1], known.places[number - 1]
            rest = self._tokenise(text[start:])
            found = Tokenised(
                text,
                known.ids[:place] + rest.ids,
                known.starts[: number - 1] + [start + each for each in rest.starts],
                known.ends[: number - 1] + [start + each for each in rest.ends],
                known.places[: number - 1] + [place + each for each in rest.places],
            )
            if id(self.tokenizer) not in tried:
                tried[id(self.tokenizer)] = self.tokenizer
                whole = self._tokenise(text)
                if whole.ids != found.ids:
                    unfit[id(self.tokenizer)] = self.tokenizer
                    logger.warning(
                        "This tokenizer does not split texts at special tokens first, so prompts with a common prefix "
                        "are tokenised completely each time."
                    )
                    return whole.ids
        self.kept.append(found)
        return list(found.ids)

    def _shared(self, known: Tokenised, text: str) -> int:
        """How many special tokens of a known text stand in what another one begins with alike."""
        return bisect.bisect_right(known.ends, same_length(known.text, text))

    def _tokenise(self, text: str) -> Tokenised:
        self.num_characters += len(text)
        written = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = written["input_ids"], written["offset_mapping"]
        places = [k for k, token in enumerate(ids) if token in self._special and spans[k][0] < spans[k][1]]
        return Tokenised(text, ids, [spans[k][0] for k in places], [spans[k][1] for k in places], places)


# Tokenizers by id, which hold them, so that no other one gets the id: those that were tried, and those that are unfit.
tried: dict[int, PreTrainedTokenizerBase] = {}
unfit: dict[int, PreTrainedTokenizerBase] = {}


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
