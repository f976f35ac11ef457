"""Reads a recipe (YAML) and the command line into the dataclasses of the settings, and checks them."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from mt_grpo.base.fields import keys_that
from mt_grpo.base.files import RecipeLoader, absolute
from mt_grpo.base.json_types import fits_type
from mt_grpo.conversation.tools.arguments import type_name
from mt_grpo.recipe.data import GENERATED_DATASETS
from mt_grpo.recipe.keys import Classes, check_values, default_of, field_of, known_keys, make_absolute
from mt_grpo.recipe.plugins import no_integrations


class RecipeParser(TrlParser):
    """`TrlParser` that raises `ValueError` instead of exiting, and in which `--key null` means None if it may."""

    def __init__(self, classes: Classes):
        super().__init__(classes, allow_abbrev=False)
        self.known = known_keys(classes)
        for action in self._actions:
            if action.type and type(None) in typing.get_args(self.known.get(action.dest)):
                action.type = or_none(action.type)

    def error(self, message: str) -> typing.NoReturn:
        """Raise `ValueError` with argparse's message."""
        raise ValueError(f"{message}.")

    def parse_known_args(self, args: list[str], namespace: Any = None) -> tuple:
        """Parse a command line. Raises `ValueError` for what is no key, with the nearest known one."""
        namespace, rest = super().parse_known_args(args, namespace)
        options = [word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")]
        check_known(options, self.known, "on the command line")
        if rest:
            raise ValueError(f"Unknown arguments {rest}. Expected `--key value`, and a recipe after --config.")
        lists_of_null = {key: None for key, value in vars(namespace).items() if value == [None]}
        vars(namespace).update(lists_of_null)
        return namespace, rest


def or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type of argparse that also reads null, as None."""
    return functools.wraps(kind)(lambda text: None if text == "null" else kind(text))


def read_recipe(path: str, classes: Classes) -> dict[str, Any]:
    """The YAML mapping of a recipe. The values of its `env` are texts, as they are written.

    Raises `ValueError` for an unknown key or a value of a wrong type.
    """
    text, known = Path(path).read_text(encoding="utf-8"), known_keys(classes) | {"env": dict[str, str | int | float]}
    try:
        recipe = yaml.load(text, RecipeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"The recipe {path!r} cannot be read: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path!r} holds {type(recipe).__name__}, expected lines of `key: value`.")
    check_known(recipe, known, f"in {path}")
    if early := [name for name in recipe.get("env") or {} if str(name) in READ_AT_IMPORT]:
        raise ValueError(f"env: {early[0]} in {path} is read before a recipe is. Set it in the shell.")
    for key, value in recipe.items():
        if not fits_type(value, known[key], from_yaml=True):
            hint = " YAML reads no, off, yes and on as booleans: quote them." if isinstance(value, bool) else ""
            raise ValueError(
                f"{key}: {value!r:.200} in {path} is {type(value).__name__}, expected {type_name(known[key])}.{hint}"
            )
    if not all(isinstance(value, str | int | float) for value in (recipe.get("env") or {}).values()):
        raise ValueError(f"env: {recipe['env']!r:.200} in {path}, expected lines of `NAME: text`.")
    return recipe | {key: value for key, value in yaml.load(text, yaml.BaseLoader).items() if key == "env"}


READ_AT_IMPORT = {"HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_DATASETS_CACHE",
                  "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE"}  # fmt: skip


def check_known(keys: Iterable[Any], known: Collection[str], where: str) -> None:
    """Raise `ValueError` for unknown keys: all of them, each with the nearest known key."""
    unknown = []
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.75)
            unknown.append(f"{key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if unknown:
        raise ValueError(
            f"Unknown keys {where}: {', '.join(unknown)}. docs/recipes.md has all keys, and docs/moving.md those of "
            f"ms-swift, verl and older versions of TRL.{no_integrations()}"
        )


USAGE = """\
usage: python mt_grpo_trainer.py --config RECIPE [--key value ...]

  python mt_grpo_trainer.py --config hf_recipes/tiny/calculator.yaml  # train on a CPU, 2 to 3 minutes
  python mt_grpo_trainer.py --config RECIPE --preflight               # check a recipe, sample a batch, do not train
  bash scripts/train.sh RECIPE                                        # train on GPUs, with the server that it needs

`--key value` replaces the recipe's value, and `--key null` unsets it. The second column has the defaults."""
SHOWN = {  # the keys that `--help` shows, which are those that a user sets first
    "Model, data and rewards": "model_name_or_path dataset_name dataset_size tools_script environment reward_fn",
    "Conversation": "tool_format system_prompt max_env_steps max_completion_length temperature tool_timeout",
    "Credit": "credit_assignment turn_advantage_coef turn_reward_weights outcome_reward_weights scale_rewards",
    "Training": "num_generations per_device_train_batch_size learning_rate num_train_epochs max_steps beta",
    "Server": "use_vllm vllm_mode vllm_server_host vllm_server_port max_staleness",
    "LoRA": "use_peft lora_r lora_alpha",
    "Output and checkpoints": "output_dir log_rollouts eval_strategy save_steps resume_from_checkpoint",
}


def help_text(classes: Classes, everything: bool = False) -> str:
    """What `--help` prints: the keys of `SHOWN` with a sentence of TRL's texts each, or all keys with their texts."""
    groups = {"All keys": " ".join(known_keys(classes))} if everything else SHOWN
    lines = [USAGE]
    for title, names in groups.items():
        lines += ["", title]
        for name in names.split():
            about = field_of(name, classes).metadata
            text = " ".join(about["help"].replace("%%", "%").split())
            if not everything and "within" not in about:  # not of ours
                text = re.split(r"\. (?=[^a-z])", text)[0].rstrip(".")
            line = f"  --{name:<28} {recipe_text(default_of(name, classes)):<9} {text}"
            lines += textwrap.wrap(line, 119, subsequent_indent=" " * 43, break_long_words=False)
    if not everything:
        lines += ["", "--help all prints all keys; docs/recipes.md explains them."]
    return "\n".join(lines)


def recipe_text(value: Any) -> str:
    """A value as a recipe has it.

    >>> recipe_text(True), recipe_text(240.0), recipe_text(1e-6), recipe_text(None)
    ('true', '240', '1e-06', 'null')
    """
    value = getattr(value, "value", value)  # of an Enum
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def parse_recipe(argv: list[str] | None, classes: Classes) -> tuple:
    """(script_args, args, model_args) from a recipe (`--config x.yaml`) and the command line (`--max_steps 5`).

    A value on the command line replaces the recipe's. Nothing is loaded here. Raises `ValueError` for unknown keys
    (with the nearest known one), wrong types, unknown choices, and settings that would train something else.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & {*argv}:
        print(help_text(classes, "all" in argv))
        sys.exit()
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--config", action="append", default=[])
    known, argv = options.parse_known_args(argv)
    if len(known.config) > 1 or (not known.config and not argv):
        number = "Several recipes are" if known.config else "No recipe is"
        raise ValueError(f"{number} given. Expected one --config RECIPE, such as hf_recipes/tiny/calculator.yaml.")
    recipe = read_recipe(known.config[0], classes) if known.config else {}
    os.environ.update(recipe.pop("env", {}))
    parser = RecipeParser(classes)
    parser.set_defaults_with_config(**recipe)
    script_args, args, model_args = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    for settings in (script_args, model_args):  # `args` has checked itself
        check_values(settings)
    lora = [key for key in vars(model_args) if key.startswith(("lora_", "use_rslora", "use_dora"))]
    for key in () if model_args.use_peft else lora:
        if (value := getattr(model_args, key)) != default_of(key, classes):
            raise ValueError(f"{key}={value!r} has no effect without use_peft: true.")
    starts = {"tools_script": any(getattr(script_args, key) for key in keys_that(script_args, "opens"))}
    for key, found in {"model_name_or_path": model_args.model_name_or_path, **starts}.items():
        if not found:
            raise ValueError(f"{key} is not set. Add it to the recipe; hf_recipes/ has examples.")
    make_absolute(script_args)
    for settings, key in ((script_args, "dataset_name"), (model_args, "model_name_or_path")):  # or names on the Hub
        path = os.path.expanduser(getattr(settings, key) or "")
        if path not in GENERATED_DATASETS and os.path.exists(path):
            setattr(settings, key, absolute(path))
    return script_args, args, model_args
