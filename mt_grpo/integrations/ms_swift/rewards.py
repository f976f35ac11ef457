"""ms-swift's reward classes, and the registry `orms` in which its plug-ins put theirs."""

from __future__ import annotations

import re
from typing import Any


class ORM:
    """A reward class: an instance is called with `completions`, texts, and the batch's columns."""

    def __init__(self, args: Any = None, **kwargs: Any):
        self.args = args

    def __call__(self, **kwargs: Any) -> list[float | None]:
        """One reward per completion."""
        raise NotImplementedError


class AsyncORM(ORM):
    """A reward class whose call is async."""

    async def __call__(self, **kwargs: Any) -> list[float | None]:
        """One reward per completion."""
        raise NotImplementedError


def answer_in(text: str) -> str | None:
    """The contents of the first `<answer>` in a text."""
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[1].strip() if found else None


class MathAccuracy(ORM):
    """1.0 if the answer equals `solution` as mathematics, by math-verify.

    The answer is in `<answer>`, otherwise LaTeX in the text. Raises `ImportError` without math-verify.
    """

    def __init__(self, args: Any = None, **kwargs: Any):
        super().__init__(args, **kwargs)
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise ImportError(
                "MathAccuracy needs math-verify. Run `pip install -e '.[swift]'` in the clone."
            ) from None

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        """One reward per completion; 0.0 if the solution cannot be read."""
        return [self.accuracy(text, right) for text, right in zip(completions, solution)]

    def accuracy(self, text: str, solution: str) -> float:
        """1.0 or 0.0. math-verify's own time limits are signals, which only the main thread may have."""
        from math_verify import LatexExtractionConfig, parse, verify

        of_text = {"extraction_mode": "first_match", "parsing_timeout": None}
        gold = parse(answer_in(solution) or solution, **of_text)
        if not gold:
            return 0.0
        answer = answer_in(text)
        if answer is None:
            latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
            found = parse(text, extraction_config=[latex], **of_text)
        else:
            found = parse(answer, **of_text)
        return float(verify(gold, found, timeout_seconds=None))


class Format(ORM):
    """1.0 if a completion is `<think>...</think><answer>...</answer>`."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        """One reward per completion."""
        pattern = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
        return [float(pattern.fullmatch(text) is not None) for text in completions]


orms: dict[str, type] = {"accuracy": MathAccuracy, "format": Format}
