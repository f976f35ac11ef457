"""A recipe as the scripts beside the trainer read it: batches and devices need not fit this machine.

With `TRAINER=my_idea.py` in the environment a copy of the trainer takes its place, in all scripts that import this.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

if os.environ.get("TRAINER"):  # a copy of mt_grpo_trainer.py, which knows other methods and keys
    sys.path.insert(0, str(Path(os.environ["TRAINER"]).resolve().parent))
    sys.modules["mt_grpo_trainer"] = importlib.import_module(Path(os.environ["TRAINER"]).stem)
import mt_grpo_trainer as mt  # noqa: E402
from mt_grpo.recipe.parse import default_of, read_recipe

Recipe = tuple[mt.MTGRPOScriptArguments, mt.MTGRPOConfig, mt.ModelKeys]


def load_recipe(path: str, overrides: list[str] | None = None) -> Recipe:
    """The recipe's dataclasses, for use outside training: batches and devices need not fit this machine.

    Raises:
        ValueError: no such file, unknown keys, wrong types, impossible combinations.
    """
    argv = ["--config", path, *(overrides or [])]
    group = option(argv, "num_generations")
    argv += ["--per_device_train_batch_size", str(group)]  # one group always fits
    argv += ["--eval_strategy", "no", "--load_best_model_at_end", "false"]
    if not torch.cuda.is_available():
        argv += ["--use_cpu", "true", "--bf16", "false", "--fp16", "false"]
    return mt.parse_arguments(argv)


def option(argv: list[str], key: str) -> Any:
    """One setting as training would see it: the command line's, else the recipe's, else the default.

    >>> option(["--num_generations", "4", "--num_generations=6"], "num_generations")
    '6'
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument(f"--{key}", f"--{key.replace('_', '-')}", dest="value", nargs="?", const="true")
    known, _ = parser.parse_known_args(argv)
    if known.value is not None:
        return known.value
    recipe = read_recipe(known.config, mt.recipe_classes()) if known.config else {}
    return recipe.get(key, default_of(key, mt.recipe_classes()))


def accepted_answers(answer: Any) -> list[str]:
    """The texts that a row's `answer` accepts, in whichever of the known forms it is, for people and `evaluate`.

    >>> accepted_answers("It is 2 and 2.\\n#### 1,004"), accepted_answers({"value": "Ada", "aliases": ["Lovelace"]})
    (['1004'], ['Ada', 'Lovelace'])
    """
    if isinstance(answer, dict) and "value" in answer:  # TriviaQA
        aliases = answer.get("aliases") or []
        answer = [answer["value"], *([aliases] if isinstance(aliases, str) else aliases)]
    if isinstance(answer, str) and "####" in answer:  # GSM8K
        answer = answer.rpartition("####")[2].strip().replace(",", "")
    answers = answer if isinstance(answer, list) else [answer]
    return [str(each) for each in answers if each is not None]
