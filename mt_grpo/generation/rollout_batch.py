"""A batch of running conversations, and an iterator that can return a later batch early."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from mt_grpo.base.event_loop import gather_all, start_in_background
from mt_grpo.rollout import Rollout


class RolloutBatch:
    """The running conversations of this rank, which all started with the same weights.

    Args:
        rollouts: They are filled by the conversations.
        converse: Creates a rollout's conversation with its backend.
        llm: The backend, a `ServerPool` or an `InProcessBackend`. `routes` of a pool gives each conversation a backend
            of its own, and its `start_conversations` proves which weights sampled. `InProcessBackend` generates in
            the thread that waits. Any other backend needs only `generate`.
        version: The version of the weights that the server holds at the start. Later ones may be pushed meanwhile.
        group_size: Rollouts per prompt. Rollouts with indices in the same block of so many are a group.

    Attributes:
        prompts: The prompts of a batch that was started before its step. None for any other batch.
        seconds: Time from the start to the end of the last conversation.
        waited: Seconds that training waited before it took these conversations.
    """

    def __init__(
        self,
        rollouts: list[Rollout],
        converse: Callable[[Rollout, Any], Coroutine],
        llm: Any,
        version: str | None,
        group_size: int,
    ):
        self.rollouts, self.prompts = rollouts, None
        self.seconds = self.waited = 0.0
        self._began, self._ended = time.perf_counter(), threading.Event()
        groups = [rollout.index // group_size for rollout in rollouts]
        backends = llm.routes(groups) if hasattr(llm, "routes") else [llm] * len(rollouts)
        conversations = [converse(rollout, backend) for rollout, backend in zip(rollouts, backends)]
        if hasattr(llm, "start_conversations"):
            self._future = llm.start_conversations(conversations, version, backends)
        else:
            self._future = start_in_background(gather_all(conversations))
        self._future.add_done_callback(self._note_end)

    @property
    def over(self) -> bool:
        """Whether the last conversation has ended."""
        return self._ended.is_set()

    def _note_end(self, _: concurrent.futures.Future) -> None:
        self.seconds = time.perf_counter() - self._began
        self._ended.set()

    def wait(self) -> list[Rollout | None]:
        """Wait for the rollouts and return them in order, None for each that is not proven to come from `version`.

        Call it in the thread that may run collectives. Raises the first error of a conversation.
        """
        try:
            rollouts = self._future.result()
            self._ended.wait()  # `result` may return before `_note_end` has run
            return rollouts
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        self._future.cancel()
