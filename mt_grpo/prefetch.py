"""Conversations on their way, and a look at the batches to come."""

from __future__ import annotations

import collections.abc
import concurrent.futures
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from mt_grpo.event_loop import gather_all, start_in_background
from mt_grpo.in_process import ServedByCaller
from mt_grpo.rollout import Rollout


class RolloutBatch:
    """This rank's conversations on their way, all from the same weights.

    Args:
        conversations: One coroutine per rollout.
        llm: The backend. One with `start_conversations` starts them itself: `VLLMServerClient` watches the version of
            the weights meanwhile, `InProcessBackend` generates in the thread that waits.
        version: The weights' version that the server must hold throughout.

    Attributes:
        prompts: That it was started with, ahead of their time; None otherwise.
        seconds: From the start to the end of the last conversation.
    """

    def __init__(self, conversations: list[Coroutine], llm: Any, version: str | None):
        self.prompts: list | None = None
        self.seconds = 0.0
        self._began, self._ended = time.perf_counter(), threading.Event()
        if hasattr(llm, "start_conversations"):
            self._future = llm.start_conversations(conversations, version)
        else:
            self._future = start_in_background(gather_all(conversations))
        self._future.add_done_callback(self._note_end)

    def _note_end(self, _: concurrent.futures.Future) -> None:
        self.seconds = time.perf_counter() - self._began
        self._ended.set()

    def wait(self) -> list[Rollout | None]:
        """The rollouts in order, None in place of each that cannot be proven to come from the version's weights.

        In the thread that may start collectives. Raises what a conversation raised.
        """
        try:
            rollouts = self._future.result()
            self._ended.wait()  # callbacks run behind the result
            return rollouts
        except BaseException:
            self.cancel()
            raise

    def wait_until_over(self) -> None:
        """Until no conversation is open, whatever became of them: `wait` tells."""
        if not isinstance(self._future, ServedByCaller):
            concurrent.futures.wait([self._future])

    def cancel(self) -> None:
        self._future.cancel()


class LookAhead:
    """An epoch's batches for `Trainer`, of which the ones to come can be seen before they are handed out.

    >>> epoch = LookAhead(iter("aabbcc"), every=2)  # a batch of rollouts lasts two forward passes
    >>> next(epoch), epoch.next_rollouts(), next(epoch), next(epoch), epoch.next_rollouts(), next(epoch)
    ('a', 'b', 'a', 'b', 'c', 'b')
    >>> epoch.next_rollouts() is None, list(epoch)
    (True, ['c', 'c'])
    """

    def __init__(self, batches: Iterator, every: int):
        self.source, self._every = batches, every
        self._ahead: collections.deque = collections.deque()
        self._taken = self._rollouts = 0

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        batch = self._ahead.popleft() if self._ahead else next(self.source)
        self._taken += 1
        return batch

    def next_rollouts(self) -> Any | None:
        """To be called once per batch of rollouts: the inputs of the next one, None at the epoch's end."""
        self._rollouts += 1
        place = self._rollouts * self._every - self._taken
        while len(self._ahead) <= place:
            try:
                self._ahead.append(next(self.source))
            except StopIteration:
                return None
        return self._ahead[place]
