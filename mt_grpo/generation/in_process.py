"""The backend that generates in this process, with TRL's own generation."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from mt_grpo.base.event_loop import LOOP_THREAD, background_loop, gather_all, start_in_background
from mt_grpo.rollout import Generation, hash_of_ids


@contextmanager
def neutral_generation(model: torch.nn.Module) -> Iterator[None]:
    """Context manager in which `generate` takes nothing, such as `typical_p`, from the model's generation config."""
    configs = {each: each.generation_config for each in model.modules() if "generation_config" in vars(each)}
    try:
        for each in configs:
            each.generation_config = GenerationConfig()
        yield
    finally:
        for each, config in configs.items():
            each.generation_config = config


class ServeSession:
    """The requests of one call of `InProcessBackend.serve`. A batch is generated when all open conversations wait."""

    def __init__(self, num_conversations: int):
        self.open = num_conversations  # without those that wait in `aside`
        self.waiting: list[tuple] = []  # (rollout index, prompt ids, max_tokens, future)
        self.batches: queue.Queue = queue.Queue()

    def flush(self) -> None:
        """Put all waiting requests into `batches`, in rollout order, if every open conversation waits."""
        self.waiting = [request for request in self.waiting if not request[3].done()]  # one may be abandoned
        if self.waiting and len({request[0] for request in self.waiting}) == self.open:
            self.batches.put(sorted(self.waiting, key=lambda request: request[0]))
            self.waiting = []

    async def converse(self, conversation: Coroutine) -> Any:
        """Run a conversation to its end, after which no batch waits for it."""
        try:
            return await conversation
        finally:
            self.open -= 1
            self.flush()


class ServedByCaller(concurrent.futures.Future):
    """A future whose work runs in the thread that calls `result`, because collectives are allowed there."""

    def __init__(self, serve: Callable[[], list]):
        super().__init__()
        self._serve = serve

    def result(self, timeout: float | None = None) -> list:
        if not self.done():
            try:
                self.set_result(self._serve())
            except BaseException as error:
                self.set_exception(error)
        return super().result()


class InProcessBackend:
    """A backend on TRL's own generation (transformers, continuous batching, colocated vLLM).

    A batch is generated as soon as all open conversations wait for tokens. Its requests are in rollout order, so that
    samples do not depend on how long a tool took. `generate_batch` returns lists of token ids and logprobs (or None);
    `any_rank` says whether a flag is set on any rank, and is None unless generation is collective (ZeRO-3, FSDP). Then
    every rank generates in every round; a rank without requests uses a dummy prompt.
    """

    def __init__(
        self,
        generate_batch: Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float]] | None]],
        is_end: Callable[[int], bool],
        any_rank: Callable[[bool], bool] | None = None,
    ):
        self._generate_batch, self._is_end, self._any_rank = generate_batch, is_end, any_rank or bool
        self.collective = any_rank is not None  # if true, no rank may stop while other ranks generate
        self._session: ServeSession | None = None

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, sampling_params: dict[str, Any] | None = None, index: int = 0
    ) -> Generation:
        """Sample one continuation. `sampling_params` is not read: the backend already has the trainer's."""
        future = asyncio.get_running_loop().create_future()
        self._session.waiting.append((index, prompt_ids, max_tokens, future))
        self._session.flush()
        return await future

    async def aside(self, awaitable: Awaitable) -> Any:
        """Await something that another conversation will do. Meanwhile batches are generated without this one."""
        session = self._session
        session.open -= 1
        session.flush()
        try:
            return await awaitable
        finally:
            session.open += 1

    def start_conversations(self, conversations: list[Coroutine], *_: Any) -> ServedByCaller:
        """A future of the conversations' results. They run in the thread that calls its `result`."""
        return ServedByCaller(lambda: self.serve(conversations))

    def serve(self, conversations: list[Coroutine]) -> list:
        """Run all conversations to their end and return their results in order. Raises the first error."""
        session = self._session = ServeSession(len(conversations))
        running = start_in_background(gather_all([session.converse(c) for c in conversations]))
        running.add_done_callback(lambda _: session.batches.put(None))
        batch: list[tuple] | None = []
        try:
            while True:
                batch = session.batches.get() if batch is not None else None
                if not self._any_rank(batch is not None):
                    return running.result()
                generations = self._run(batch or [(0, [0], 1, None)])  # dummy: other ranks still generate
                if batch:
                    background_loop(LOOP_THREAD).call_soon_threadsafe(self._deliver, batch, generations)
        finally:
            running.cancel()

    def _run(self, batch: list[tuple]) -> list[Generation]:
        # TRL's backends take one `max_tokens` per batch: the largest. Each sample is then truncated to its own limit.
        token_ids, logprobs = self._generate_batch([request[1] for request in batch], max(r[2] for r in batch))
        generations = []
        for i, (_, prompt_ids, max_tokens, _) in enumerate(batch):
            ids = list(token_ids[i][:max_tokens])
            # A colocated engine also stops at texts: what is shorter than its limit was not cut off.
            finish_reason = "stop" if ids and (self._is_end(ids[-1]) or len(ids) < max_tokens) else "length"
            own = logprobs and list(logprobs[i][:max_tokens])
            generations.append(Generation(ids, own, finish_reason, hash_of_ids(prompt_ids)))
        return generations

    @staticmethod
    def _deliver(batch: list[tuple], generations: list[Generation]) -> None:
        for (_, _, _, future), generation in zip(batch, generations, strict=True):
            if not future.done():
                future.set_result(generation)
