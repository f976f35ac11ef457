"""verl's reward functions of a solution's text, under their names, and which of them are not offered."""

from __future__ import annotations

import importlib
import importlib.util
import re
import string
from typing import Any

from mt_grpo.integrations.plugin_imports import not_offered

MAX_ANSWER_TAGS = 10  # a solution with more of them gets a quarter of its score


def absent_of_verl(*names: str) -> dict[str, Any]:
    """Placeholders for names that are not supported."""
    return {name: not_offered(name, "verl") for name in names}


# -- Search-R1's answers: `verl.utils.reward_score.search_r1_like_qa_em` --


def normalize_answer(s: str) -> str:
    """Remove case, punctuation, articles and repeated spaces.

    >>> normalize_answer("The  Eiffel Tower, Paris.")
    'eiffel tower paris'
    """
    plain = "".join(letter for letter in s.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def em_check(prediction: str, golden_answers: str | list[str]) -> int:
    """1 where a prediction is one of the answers."""
    return int(normalize_answer(prediction) in map(normalize_answer, listed(golden_answers)))


def subem_check(prediction: str, golden_answers: str | list[str]) -> int:
    """1 where a prediction has one of the answers in it."""
    said = normalize_answer(prediction)
    return int(any(normalize_answer(answer) in said for answer in listed(golden_answers)))


def listed(answers: str | list[str]) -> list[str]:
    """A list of one or several answers."""
    return [answers] if isinstance(answers, str) else list(answers)


def extract_answer(solution_str: str) -> str | None:
    """The contents of the last `<answer>` in a text."""
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    return found[-1].strip() if found else None


def score_exactly(
    solution_str: str, ground_truth: dict, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for an answer of `ground_truth["target"]`, `format_score` for another one, 0 for none.

    >>> score_exactly("<answer>Paris.</answer>", {"target": ["paris"]}), score_exactly("Paris", {"target": "Paris"})
    (1.0, 0)
    """
    answer = extract_answer(solution_str)
    if answer is None:
        return 0
    if not em_check(answer, ground_truth["target"]):
        return format_score
    many = max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MAX_ANSWER_TAGS
    return score / 4 if many else score


def score_within(
    solution_str: str, ground_truth: dict, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Score an answer that contains one of `ground_truth["target"]`."""
    answer = extract_answer(solution_str)
    if answer is None:
        return 0
    return score if subem_check(answer, ground_truth["target"]) else format_score


SEARCH_R1 = {
    "normalize_answer": normalize_answer, "em_check": em_check, "subem_check": subem_check,
    "extract_solution": extract_answer, "compute_score": score_exactly, "compute_score_subem": score_within,
}  # fmt: skip

# -- by data source --


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *args: Any, **kwargs: Any
) -> float:
    """Score by a row's data source. Raises `NotImplementedError` for one whose function is not supported."""
    name = "gsm8k" if data_source == "openai/gsm8k" else None
    name = "search_r1_like_qa_em" if data_source.startswith("searchR1_") else name
    if name is None:
        raise NotImplementedError(
            f"verl's reward function for data_source={data_source!r} is not supported here. Supported: "
            "openai/gsm8k, searchR1_*."
        )
    return float(importlib.import_module(f"verl.utils.reward_score.{name}").compute_score(solution_str, ground_truth))


PACKAGE = "verl.utils.reward_score"
SCORE_MODULES: dict[str, dict[str, Any]] = {
    PACKAGE: {"default_compute_score": default_compute_score, "_default_compute_score": default_compute_score},
    f"{PACKAGE}.search_r1_like_qa_em": SEARCH_R1,
    f"{PACKAGE}.geo3k": absent_of_verl("format_reward", "acc_reward", "compute_score"),
    f"{PACKAGE}.math": absent_of_verl("compute_score", "is_equiv", "remove_boxed", "last_boxed_only_string"),
    f"{PACKAGE}.math_reward": absent_of_verl("compute_score", "is_equiv", "remove_boxed", "last_boxed_only_string"),
    f"{PACKAGE}.math_dapo": absent_of_verl(
        "compute_score", "verify", "remove_boxed", "last_boxed_only_string", "normalize_final_answer",
        "is_correct_minerva", "is_correct_strict_box"),
    f"{PACKAGE}.math_verify": absent_of_verl("compute_score"),
    f"{PACKAGE}.math_batch": absent_of_verl("compute_score_batched"),
    f"{PACKAGE}.prime_math": absent_of_verl("compute_score", "grade_answer", "match_answer"),
    f"{PACKAGE}.prime_code": absent_of_verl("compute_score", "apps_check_correctness"),
    f"{PACKAGE}.sandbox_fusion": absent_of_verl("compute_score"),
    f"{PACKAGE}.sandbox_fusion.utils": absent_of_verl("check_correctness", "call_sandbox_api", "_process_single_case"),
}  # fmt: skip
