"""ms-swift's reward classes, and the registry `orms` in which its plug-ins put theirs."""

from __future__ import annotations

import math
import re
from typing import Any

from mt_grpo.integrations.plugin_imports import not_offered


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
    """1.0 where the answer equals `solution` as mathematics, by math-verify.

    The answer is in `<answer>`, else LaTeX in the text. Raises `ImportError` without math-verify.
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
        """One reward per completion; 0.0 where the solution cannot be read."""
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
    """1.0 where a completion is `<think>...</think><answer>...</answer>`."""

    PATTERN = r"<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])"

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        """One reward per completion."""
        return [float(re.match(self.PATTERN, text, re.DOTALL) is not None) for text in completions]


class ReActFormat(Format):
    """1.0 where a completion is `<think>...</think>` with `Action:` and `Action Input:` behind."""

    PATTERN = r"<think>.*?</think>\s*Action:.*?Action Input:.*?$"


def setting(args: Any, name: str, default: Any) -> Any:
    """A setting of the run, ms-swift's default where it has none."""
    value = getattr(args, name, None)
    return default if value is None else value


def num_ids(response_token_ids: list) -> int:
    """How many ids a rollout's responses have: a flat list, or one list per response."""
    return sum(len(each) if isinstance(each, (list, tuple)) else 1 for each in response_token_ids)


class CosineReward(ORM):
    """Reward by accuracy and length on half a cosine: a right answer loses with its length, a wrong one loses less.

    Settings: `cosine_min_len_value_correct` (1.0) to `cosine_max_len_value_correct` (0.5),
    `cosine_min_len_value_wrong` (-0.5) to `cosine_max_len_value_wrong` (0.0), and `cosine_max_len`, by default
    `max_completion_length`. Source: arXiv 2502.03373.
    """

    def __init__(self, args: Any = None, accuracy_orm: Any = None):
        super().__init__(args)
        self.min_len_value_wrong = setting(args, "cosine_min_len_value_wrong", -0.5)
        self.max_len_value_wrong = setting(args, "cosine_max_len_value_wrong", 0.0)
        self.min_len_value_correct = setting(args, "cosine_min_len_value_correct", 1.0)
        self.max_len_value_correct = setting(args, "cosine_max_len_value_correct", 0.5)
        self.max_len = setting(args, "cosine_max_len", getattr(args, "max_completion_length", None))
        self.accuracy_orm = accuracy_orm or MathAccuracy()

    @staticmethod
    def cosfn(t: float, T: float, min_value: float, max_value: float) -> float:
        """`max_value` at 0, `min_value` at T."""
        return max_value - (max_value - min_value) * (1 - math.cos(t * math.pi / T)) / 2

    def __call__(
        self, completions: list[str], solution: list[str], response_token_ids: list, **kwargs: Any
    ) -> list[float]:
        """One reward per completion."""
        rewards = []
        for ids, right in zip(response_token_ids, self.accuracy_orm(completions, solution, **kwargs)):
            ends = (self.max_len_value_wrong, self.min_len_value_wrong)
            if right >= 1.0:
                ends = (self.max_len_value_correct, self.min_len_value_correct)
            rewards.append(self.cosfn(num_ids(ids), self.max_len, *ends))
        return rewards


class RepetitionPenalty(ORM):
    """`repetition_max_penalty` (-1.0) times the share of repeated n-grams of `repetition_n_grams` (3) words."""

    def __init__(self, args: Any = None, **kwargs: Any):
        super().__init__(args, **kwargs)
        self.ngram_size = setting(args, "repetition_n_grams", 3)
        self.max_penalty = setting(args, "repetition_max_penalty", -1.0)

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        """One reward per completion; 0.0 for one of fewer words."""
        return [self.penalty(text.lower().split()) for text in completions]

    def penalty(self, words: list[str]) -> float:
        """The penalty of a text: the scaled share of repeated n-grams of words."""
        grams = list(zip(*(words[k:] for k in range(self.ngram_size))))
        return (1 - len(set(grams)) / len(grams)) * self.max_penalty if grams else 0.0


class SoftOverlong(ORM):
    """0 up to `soft_max_length - soft_cache_length` ids, from there down to -1 at `soft_max_length`, and on below.

    `soft_max_length` is `max_completion_length` by default. Raises `ValueError` without `soft_cache_length`.
    """

    def __init__(self, args: Any = None, **kwargs: Any):
        super().__init__(args, **kwargs)
        self.soft_max_length = setting(args, "soft_max_length", getattr(args, "max_completion_length", None))
        self.soft_cache_length = setting(args, "soft_cache_length", None)
        if self.soft_cache_length is None or not self.soft_cache_length < self.soft_max_length:
            raise ValueError(
                f"soft_cache_length={self.soft_cache_length}, expected a number below soft_max_length="
                f"{self.soft_max_length}. A subclass can set args.soft_cache_length before super().__init__(args)."
            )

    def __call__(self, completions: list[str], response_token_ids: list, **kwargs: Any) -> list[float]:
        """One reward per completion."""
        allowed = self.soft_max_length - self.soft_cache_length
        return [min((allowed - num_ids(ids)) / self.soft_cache_length, 0) for ids in response_token_ids]


ReactORM, MathORM = not_offered("ReactORM", "ms-swift"), not_offered("MathORM", "ms-swift")
orms: dict[str, type] = {
    "accuracy": MathAccuracy, "format": Format, "react_format": ReActFormat, "cosine": CosineReward,
    "repetition": RepetitionPenalty, "soft_overlong": SoftOverlong, "toolbench": ReactORM, "math": MathORM,
}  # fmt: skip
rm_plugins: dict[str, type] = {}
