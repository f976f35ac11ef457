"""Hashes of token ids, the same in every process."""

from __future__ import annotations

import array
import hashlib
from typing import Any


class IdHash:
    """A hash of token ids, to which further ids can be added.

    >>> IdHash([1, 2]).add([3]).digest() == IdHash([1, 2, 3]).digest() != IdHash([3, 2, 1]).digest()
    True
    """

    def __init__(self, ids: list[int] = (), state: Any = None):
        self.state = hashlib.blake2b(digest_size=16) if state is None else state
        self.add(ids)

    def add(self, ids: list[int]) -> IdHash:
        """Add token ids to the hash, 8 bytes each."""
        self.state.update(array.array("q", ids))
        return self

    def copy(self) -> IdHash:
        """A hash of the same ids. Ids that are added to it do not change this one."""
        return IdHash((), self.state.copy())

    def digest(self) -> bytes:
        """The hash of all ids so far, 16 bytes."""
        return self.state.digest()


def hash_of_ids(ids: list[int]) -> bytes:
    """The hash of a list of ids."""
    return IdHash(ids).digest()
