"""ms-swift's `loss_scale` as a mask: which responses are trained, and which parts of their text are not.

A weight of 0 masks; all others count as 1, as in ms-swift's GRPO. Patterns: `swift/loss_scale/config` of ms-swift 4.6.
"""

from __future__ import annotations

import bisect
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure
from mt_grpo.rollout import Turn

BASES = ("default", "last_round", "all")
Span = tuple[int, int]  # of characters


class LossScale:
    """The base of a plug-in's own: `get_loss_scale` splits a response, and gives each part a weight."""

    def __init__(self, base_strategy: str = "default"):
        self.base_strategy = base_strategy

    def get_loss_scale(self, context: str, *args: Any, **kwargs: Any) -> tuple[list[str], list[float]]:
        """(parts of the text, their weights)."""
        return [context], [1.0]


class Masks(LossScale):
    """Protocol of a loss scale that masks parts of a text."""

    def spans(self, text: str) -> list[Span]:
        """Return the masked spans of a text, as (start, end) in characters."""
        return []

    def get_loss_scale(self, context: str, *args: Any, **kwargs: Any) -> tuple[list[str], list[float]]:
        """(parts of the text, 0 for what is masked)."""
        parts, weights, place = [], [], 0
        for start, end in self.spans(context):
            parts += [context[place:start], context[start:end]]
            weights += [1.0, 0.0]
            place = end
        return [*parts, context[place:]], [*weights, 1.0]


def opening(*patterns: str) -> type[Masks]:
    """A class that masks what a text begins with."""

    def spans(self: Any, text: str) -> list[Span]:
        found = next((match for pattern in patterns if (match := re.match(pattern, text))), None)
        return [found.span()] if found else []

    return type("IgnoresOpening", (Masks,), {"spans": spans})


def behind(word: str, *others: str) -> type[Masks]:
    """A class that masks what stands behind a word, up to the next of these words."""

    def spans(self: Any, text: str) -> list[Span]:
        words = sorted((word, *others), key=len, reverse=True)
        found = list(re.finditer("|".join(map(re.escape, words)), text))
        ends = [match.start() for match in found[1:]] + [len(text)]
        return [(match.end(), end) for match, end in zip(found, ends) if match[0] == word]

    return type("IgnoresResults", (Masks,), {"spans": spans})


EMPTY_THINKING = (
    r"<think>\s*</think>\s*", r"</think>\s*", r"<\|channel>thought\n<channel\|>", r"</mm:think>\s*",
)  # fmt: skip
REACT = ("Action:", "Action Input:", "Thought:", "Final Answer:")
FLAN = ("Name:", "ACTION:", "Tool:", "Command", "Arguments:", "action input", "ACTION_INPUT:")
loss_scale_map: dict[str, type] = {
    "base": LossScale,
    "ignore_empty_think": opening(*EMPTY_THINKING),
    "ignore_think_prefix": opening(r"<think>\n?"),
    "react": behind("Observation:", *REACT),
    "alpha_umi": behind("Observation:", *REACT, "Next:"),
    "agentflan": behind("Observation:", *REACT, *FLAN),
    "qwen": behind("✿RESULT✿:", "✿FUNCTION✿:", "✿ARGS✿:", "✿RETURN✿:"),
    "hermes": LossScale,  # its weights are 1 and 2
}


@dataclass(frozen=True)
class LossMask:
    """The parsed `loss_scale` of a recipe.

    Attributes:
        base: Which messages are trained: `default`, `last_round`, `all`.
        scales: The loss scales that mask parts of them, applied in order.
    """

    base: str
    scales: tuple[Any, ...] = ()

    def mask(self, turn: Turn, query: str | None, is_last: bool, written: Any) -> list[int]:
        """The mask of a turn's ids. Raises `SchedulerFailure`.

        An id is masked where all of its text is. An end of turn is not: it is no text.

        Args:
            turn: What was sampled.
            query: The last message of others.
            is_last: Whether it is of the last message.
            written: The tool format.
        """
        mask = [1] * len(turn.token_ids)
        for scale in self.scales:
            for start, end in zero_spans(scale, turn.text, query, is_last):
                sizes = Sizes(turn.token_ids, written.text)
                first = bisect.bisect_right(sizes, start) - 1  # ids of one character have one size
                first += sizes[first] < start  # the part begins inside its text
                last = bisect.bisect_right(sizes, end) - 1
                mask[first:last] = [0] * max(0, last - first)
        if turn.token_ids and turn.token_ids[-1] in written.ends:
            mask[-1] = 1
        return mask


class Sizes:
    """How long the text of the first k ids is, for each k: what `bisect` looks up, in place of all of them."""

    def __init__(self, ids: list[int], text_of: Callable[[list[int]], str]):
        self.ids, self.text_of = ids, text_of

    def __len__(self) -> int:
        return len(self.ids) + 1

    def __getitem__(self, size: int) -> int:
        return len(self.text_of(self.ids[:size]))


def zero_spans(scale: Any, text: str, query: str | None, is_last: bool) -> list[Span]:
    """The spans to which a loss scale gives the weight 0. Raises `SchedulerFailure` for parts that are not the text.

    >>> zero_spans(loss_scale_map["react"](), "Action: a Observation: b Thought: c", None, True)
    [(22, 25)]
    >>> zero_spans(loss_scale_map["ignore_empty_think"](), "<think>\\n\\n</think>\\n\\nc", None, True)
    [(0, 19)]
    """
    given = ("response", is_last) if "context_type" in inspect.signature(scale.get_loss_scale).parameters else ()
    name = f"{type(scale).__name__}.get_loss_scale"
    try:
        parts, weights = scale.get_loss_scale(text, *given, query=query)
        fits = len(parts) == len(weights) and "".join(parts) == text
    except Exception as error:
        raise SchedulerFailure(f"{name} failed: {error_line(error)}") from error
    if not fits:
        raise SchedulerFailure(
            f"{name} returned {len(parts)} parts and {len(weights)} weights for {text!r:.80}, expected the whole text "
            "in parts, each with a weight."
        )
    spans, place = [], 0
    for part, weight in zip(parts, weights):
        if not weight and part:
            spans.append((place, place + len(part)))
        place += len(part)
    return spans


def read_loss_scale(text: str, known: dict[str, type]) -> LossMask:
    """Parse a `loss_scale` such as `[base+]type[+type...]`. Raises `ValueError`.

    >>> read_loss_scale("last_round", {}).base, read_loss_scale("react", loss_scale_map).base
    ('last_round', 'default')
    """
    base, *names = text.split("+")
    if base not in BASES:
        base, names = "default", [base, *names]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"loss_scale={text!r}: {unknown[0]!r} is unknown. Expected [base+]type[+type...] with a base of "
            f"{', '.join(BASES)}, and types of {', '.join(sorted(known))}."
        )
    return LossMask(base, tuple(known[name]() for name in names))
