"""How much of the prompts servers had in their prefix caches, by the counters of their /metrics."""

from __future__ import annotations

import re
from typing import Any

from mt_grpo.base.errors import ServerError
from mt_grpo.base.event_loop import at_once

HIT_RATE = "sampling/prefix_cache_hit_rate"


def read_counters(text: str, names: tuple[str, str]) -> tuple[float, float] | None:
    """(tokens that were looked up, tokens that were there) since a server began, over its engines.

    None where it does not count them. A counter of hits may be missing before the first one.

    >>> read_counters('vllm:prefix_cache_queries_total{engine="0"} 8.0\\n'
    ...               'vllm:prefix_cache_queries_total{engine="1"} 2.0\\nvllm:prefix_cache_hits_total{engine="0"} 4.0',
    ...               ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"))
    (10.0, 4.0)
    """
    found = [re.findall(rf"^{name}(?:_total)?(?:{{[^}}]*}})? (\S+)$", text, re.M) for name in names]
    return tuple(sum(map(float, values)) for values in found) if found[0] else None


class PrefixCacheCounts:
    """The counters of a backend's servers, and what was added to them since they were last read."""

    def __init__(self):
        self._before: dict[str, tuple[float, float]] = {}  # by address

    def metrics(self, llm: Any) -> dict[str, float]:
        """The share of the prompts' tokens that the servers had computed before, since this was last asked.

        Empty the first time, and where no server counts. One that restarted begins at 0.

        Args:
            llm: The backend. One without servers has no metric.
        """
        servers = list(getattr(llm, "servers", ()))
        now = dict(zip([server.base_url for server in servers], at_once(counters_of, servers) if servers else []))
        looked_up, hits = 0.0, 0.0
        for url, counts in now.items():
            if counts is None or (before := self._before.get(url)) is None:
                continue
            begun = (0.0, 0.0) if counts[0] < before[0] else before
            looked_up, hits = looked_up + counts[0] - begun[0], hits + counts[1] - begun[1]
        self._before = {url: counts for url, counts in now.items() if counts is not None}
        return {HIT_RATE: hits / looked_up} if looked_up else {}


def counters_of(server: Any) -> tuple[float, float] | None:
    """The counters of a server, None where it does not say them. That a server is lost is for others to find out."""
    try:
        text = server.request("GET", "/metrics", timeout=10.0, read=None)
        return read_counters(text, server.engine.PREFIX_COUNTERS)
    except ServerError:
        return None
