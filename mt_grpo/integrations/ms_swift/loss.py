"""ms-swift's `loss_scale` as a mask: which responses are trained, and which parts of their text are not.

A weight of 0 masks; all others count as 1, as in ms-swift's GRPO.
"""

from __future__ import annotations

import bisect
import inspect
import re
from dataclasses import dataclass
from typing import Any

from mt_grpo.integrations.ms_swift.loop import SchedulerFailure, failing
from mt_grpo.rollout import Turn

BASES = ("default", "last_round")


class LossScale:
    """The base class of a plug-in's own: `get_loss_scale` splits a response, and gives each part a weight."""

    def __init__(self, base_strategy: str = "default"):
        self.base_strategy = base_strategy

    def get_loss_scale(self, context: str, *args: Any, **kwargs: Any) -> tuple[list[str], list[float]]:
        """(parts of the text, their weights)."""
        return [context], [1.0]


class IgnoreEmptyThink(LossScale):
    """Masks the thinking without content with which a response begins."""

    def get_loss_scale(self, context: str, *args: Any, **kwargs: Any) -> tuple[list[str], list[float]]:
        """(parts of the text, 0 for the empty thinking)."""
        found = re.match(r"(<think>\s*)?</think>\s*", context)  # the prompt may have opened it
        size = found.end() if found else 0
        return [context[:size], context[size:]], [0.0, 1.0]


loss_scale_map: dict[str, type] = {"base": LossScale, "ignore_empty_think": IgnoreEmptyThink}


@dataclass(frozen=True)
class LossMask:
    """The parsed `loss_scale` of a recipe."""

    base: str  # which messages are trained: `default` (all) or `last_round`
    scales: tuple[Any, ...] = ()  # loss scales that mask parts of them

    def mask(self, turn: Turn, query: str | None, is_last: bool, written: Any) -> list[int]:
        """The mask of a turn's ids: an id is masked if all of its text is. An end of turn has no text.

        `query` is the last message of others, `is_last` whether the turn belongs to the last message.
        """
        ids = turn.token_ids
        places = range(len(ids) + 1)

        def size(count: int) -> int:
            return len(written.text(ids[:count]))

        mask = [1] * len(ids)
        for scale in self.scales:
            for start, end in zero_spans(scale, turn.text, query, is_last):
                first = bisect.bisect_right(places, start, key=size) - 1  # ids of one character have one size
                first += size(first) < start  # the part begins inside its text
                last = bisect.bisect_right(places, end, key=size) - 1
                mask[first:last] = [0] * max(0, last - first)
        if ids and ids[-1] in written.ends:
            mask[-1] = 1
        return mask


def zero_spans(scale: Any, text: str, query: str | None, is_last: bool) -> list[tuple[int, int]]:
    """The spans, in characters, to which a loss scale gives the weight 0.

    >>> zero_spans(IgnoreEmptyThink(), "<think>\\n\\n</think>\\n\\nc", None, True)
    [(0, 19)]
    """
    old = ("response", is_last) if "context_type" in inspect.signature(scale.get_loss_scale).parameters else ()
    name = f"{type(scale).__name__}.get_loss_scale"
    with failing(f"{name} failed"):
        parts, weights = scale.get_loss_scale(text, *old, query=query)
        is_whole = len(parts) == len(weights) and "".join(parts) == text
    if not is_whole:
        raise SchedulerFailure(
            f"{name} returned {len(parts)} parts and {len(weights)} weights for {text!r:.80}, expected the whole text "
            "in parts, each with a weight."
        )
    spans, place = [], 0
    for part, weight in zip(parts, weights):
        if part and not weight:
            spans.append((place, place + len(part)))
        place += len(part)
    return spans


def read_loss_scale(text: str, known: dict[str, type]) -> LossMask:
    """Parse a `loss_scale` such as `[base+]type[+type...]`. Raises `ValueError`."""
    base, *names = text.split("+")
    if base not in BASES:
        base, names = "default", [base, *names]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"loss_scale={text!r}: {unknown[0]!r} is unknown. Expected [base+]type[+type...] with a base of "
            f"{', '.join(BASES)}, and types of {', '.join(sorted(known))}. A plug-in adds its own to loss_scale_map."
        )
    return LossMask(base, tuple(known[name]() for name in names))
