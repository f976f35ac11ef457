"""Seconds in which a program of somebody's waits for the policy: its own time limits do not count them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PolicyTime:
    """A clock that runs while at least one request of a rollout is in flight."""

    def __init__(self):
        self._waited, self._in_flight, self._since, self._began = 0.0, 0, 0.0, time.monotonic()

    @property
    def policy_seconds(self) -> float:
        """Seconds in which at least one request was in flight."""
        return self._waited + (time.monotonic() - self._since if self._in_flight else 0.0)

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last answer, or since the beginning; 0 while a request is in flight."""
        return 0.0 if self._in_flight else time.monotonic() - self._began

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """While a request is."""
        if not self._in_flight:
            self._since = time.monotonic()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._began = time.monotonic()
                self._waited += self._began - self._since
