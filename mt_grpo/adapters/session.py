"""What the sessions of agents and of schedulers share."""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from mt_grpo.conversation.formats.control_tokens import Origin


class StopsAt:
    """A backend whose samples end at texts, too. A prefix of a sample is still on-policy."""

    def __init__(self, llm: Any, stops: tuple[str, ...], text_of: Callable[[list[int]], str]):
        self._llm, self._stops, self._text_of = llm, stops, text_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(self, prompt_ids: list[int], max_tokens: int, sampling_params: dict, index: int = 0) -> Any:
        """Sample one continuation, cut behind the token that completes the first stop text."""
        params = {**sampling_params, "stop": [*sampling_params.get("stop", []), *self._stops]}
        sampled = await self._llm.generate(prompt_ids, max_tokens, params, index)
        ids = sampled.token_ids
        if not self._ends(ids):
            return sampled
        size = 1 + bisect.bisect_left(range(1, len(ids) + 1), True, key=lambda size: self._ends(ids[:size]))
        logprobs = sampled.logprobs and sampled.logprobs[:size]
        return dataclasses.replace(
            sampled, token_ids=sampled.token_ids[:size], logprobs=logprobs, finish_reason="stop"
        )

    def _ends(self, ids: list[int]) -> bool:
        text = self._text_of(ids)
        return any(stop in text for stop in self._stops)


def tools_by_name(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """An agent's tools as a tool format takes them: their schemas, as they were sent."""
    return {
        tool["function"]["name"]: SimpleNamespace(json_schema=tool["function"], origin=Origin.AGENT) for tool in tools
    }


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
