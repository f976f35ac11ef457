"""Reads a recipe (YAML) and the command line into the dataclasses of the settings, and checks them."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import json
import logging
import os
import re
import sys
import textwrap
import typing
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from mt_grpo.base.errors import error_line, sentence
from mt_grpo.base.fields import keys_that
from mt_grpo.base.files import RecipeLoader, absolute
from mt_grpo.base.json_types import fits_type
from mt_grpo.recipe.data import GENERATED_DATASETS
from mt_grpo.recipe.integrations import no_integrations
from mt_grpo.recipe.keys import (
    Classes,
    ModelKeys,
    check_one_of,
    check_ranges,
    default_of,
    fact_of,
    field_of,
    known_keys,
    make_absolute,
)
from mt_grpo.recipe.refusals import REFUSED_KEYS, check_supported
from mt_grpo.rollout import join

logger = logging.getLogger(__name__)


class RecipeParser(TrlParser):
    """`TrlParser` that raises `ValueError` where `argparse` would print its help and exit.

    `--key null` unsets what a recipe says, as `key: null` does in a recipe, where the key may be None.

    INVARIANT: what counts is the recipe as it was checked. `TrlParser` reads the file again, as YAML 1.1: 1:30 as 90.

    Args:
        classes: Of the settings.
        recipe: As `read_recipe` gives it.
    """

    def __init__(self, classes: Classes, recipe: dict[str, Any]):
        super().__init__(classes)
        self.recipe = {key: value for key, value in recipe.items() if key != "env"}
        self.variables: dict[str, str] = recipe.get("env", {})

    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(f"{message[:1].upper()}{message[1:].rstrip('.')}.")

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        os.environ.update(self.variables)
        return super().set_defaults_with_config(**self.recipe)

    def parse_known_args(self, args: list[str], namespace: Any = None) -> tuple:
        types = known_keys(tuple(self.dataclass_types))
        rest, unset = without_null(args, {key for key, kind in types.items() if type(None) in typing.get_args(kind)})
        namespace, rest = super().parse_known_args(rest, namespace)
        vars(namespace).update(dict.fromkeys(unset))  # before the dataclasses are made, which check their fields
        return namespace, rest


def without_null(argv: list[str], may_be_none: set[str]) -> tuple[list[str], set[str]]:
    """(the command line without `--key null`, the keys that it unsets). A later value of a key goes before.

    >>> without_null(["--agent", "null", "--beta=null", "--seed", "3"], {"agent"})
    (['--beta=null', '--seed', '3'], {'agent'})
    """
    rest, unset, place = [], set(), 0
    while place < len(argv):
        option, equals, value = argv[place].partition("=")
        key = option.removeprefix("--").replace("-", "_")
        length = 1 if equals else 2
        value = [value] if equals else argv[place + 1 : place + 2]
        if option.startswith("--") and key in may_be_none and value == ["null"]:
            unset, place = unset | {key}, place + length
            continue
        if option.startswith("--"):
            unset = unset - {key}
        rest, place = [*rest, argv[place]], place + 1
    return rest, unset


def read_recipe(path: str, classes: Classes) -> dict[str, Any]:
    """The YAML mapping of a recipe file; values of `env` are texts, as they are written.

    Raises `ValueError` for an unknown key or a value of a wrong type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        recipe = yaml.load(text, RecipeLoader)
    except OSError as error:
        raise ValueError(
            f"The recipe {path!r} cannot be read: {error.strerror}. See hf_recipes/ for examples."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"The recipe {path!r} is not UTF-8 text ({error}). Expected lines of `key: value`.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"The recipe {path!r} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path!r} holds {type(recipe).__name__}, expected lines of `key: value`.")
    known = known_keys(classes)
    check_known(recipe, {*known, "env"}, f"in {path}")
    for key, value in recipe.items():
        if key == "env":
            check_variables(value, path)
            written = yaml.load(text, yaml.BaseLoader).get("env") or {}  # 010, true and 1e3 stay what they are
            recipe[key] = {name: str(written.get(name, each)) for name, each in value.items()}
            continue
        if not fits_type(value, known[key], from_yaml=True):
            name = getattr(known[key], "__name__", None) if isinstance(known[key], type) else str(known[key])
            hint = (
                " YAML reads no, off, yes and on as booleans. Put the word in quotes."
                if isinstance(value, bool)
                else ""
            )
            raise ValueError(f"{key}: {value!r:.200} in {path} is {type(value).__name__}, expected {name}.{hint}")
        # transformers checks only the command line by its choices, not the recipe.
        allowed = fact_of(field_of(key, classes), "one_of") or field_of(key, classes).metadata.get("choices")
        if allowed and value not in (*allowed, default_of(key, classes)):
            raise ValueError(f"{key}: {value!r:.200} in {path} is not known. Expected one of: {', '.join(allowed)}.")
        if key in REFUSED_KEYS and value != default_of(key, classes):
            raise ValueError(f"{key}: {value!r:.200} in {path} is not supported: {REFUSED_KEYS[key]}.")
    return recipe


# What huggingface_hub, datasets and transformers read as they are imported, which is before a recipe is read.
READ_AT_IMPORT = {"HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_DATASETS_CACHE",
                  "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE"}  # fmt: skip


def check_variables(variables: Any, path: str) -> None:
    """Raise `ValueError` unless the `env` of a recipe can be set as environment variables."""
    if not isinstance(variables, dict):
        raise ValueError(
            f"env: {variables!r:.200} in {path} is {type(variables).__name__}, expected lines of `NAME: value`."
        )
    for name, value in variables.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^=\0]+", name):
            raise ValueError(
                f"env: {name!r:.200} in {path} is no name of an environment variable. Expected text without =."
            )
        if name in READ_AT_IMPORT:
            raise ValueError(
                f"env: {name} in {path} has no effect in the trainer: the Hub's library reads it before a recipe is "
                "read. Set it in the shell."
            )
        if not isinstance(value, (str, int, float)) or "\0" in str(value):
            raise ValueError(
                f'env: {name}: {value!r:.200} in {path}, expected text or a number (quote what is empty: "").'
            )


MEANT = {  # where the most similar key would be a wrong hint
    "reward_func": "reward_fn", "reward_functions": "reward_fn", "model": "model_name_or_path",
    "dataset": "dataset_name", "tools": "tools_script", "lora_rank": "lora_r", "async_generate": "max_staleness",
}  # fmt: skip


def check_known(keys: Iterable[str], known: Collection[str], where: str) -> None:
    """Raise `ValueError` for unknown keys: all of them, each with a known key that is much alike."""
    said = []
    for key in dict.fromkeys(str(key) for key in keys if key not in known):
        near = [MEANT[key]] if key in MEANT else difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        said.append(f"{key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if said:
        raise ValueError(
            f"Unknown key{'s' * (len(said) > 1)} {where}: {', '.join(said)}. docs/recipes.md has all keys, and "
            f"docs/moving.md those of ms-swift, verl and older versions of TRL.{no_integrations()}"
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
    return "\n".join(
        [*lines, *([] if everything else ["", "--help all prints all keys; docs/recipes.md explains them."])]
    )


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
    (with the most similar known one), wrong types, unknown choices, and settings that do not fit each other.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & {*argv}:
        print(help_text(classes, "all" in argv))
        sys.exit()
    if not argv:
        raise ValueError("No recipe is given. Expected --config RECIPE, such as hf_recipes/tiny/calculator.yaml.")
    if not any(re.match(r"--config(=|$)", word) for word in argv) and re.search(r"\.ya?ml$", argv[0]):
        raise ValueError(f"No --config is given. Expected --config {argv[0]}.")
    argv, recipe = join(a.split("=", 1) if a.startswith("--config=") else [a] for a in argv), {}
    if "--config" in argv:
        position = argv.index("--config") + 1
        if argv.count("--config") > 1:
            raise ValueError("--config is given twice. Expected one recipe, with the keys of both files.")
        if position == len(argv) or argv[position].startswith("--") or not argv[position]:
            raise ValueError("--config needs a recipe, such as --config hf_recipes/tiny/calculator.yaml.")
        recipe = read_recipe(argv[position], classes)
    given = [a[2:].split("=")[0].replace("-", "_") for a in argv if a.startswith("--")]
    options = {"config", *known_keys(classes)}
    check_known([key for key in given if key.removeprefix("no_") not in options], options, "on the command line")
    for key, count in collections.Counter(key.removeprefix("no_") for key in given).items():
        if count > 1:
            logger.warning(f"--{key} is given {count} times on the command line. The last value is used.")
    if re.search(r"--vllm[_-]mode[ =]colocate", " ".join(argv)):  # then no server is used
        address = {"vllm_server_host", "vllm_server_port"} - set(given)
        argv += [f"--{key}={default_of(key, classes)}" for key in address]
    parser = RecipeParser(classes, recipe)
    try:
        script_args, args, model_args, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    except ValueError as error:
        if "support bf16" not in str(error):
            raise
        raise ValueError(
            f"bf16: {sentence(error)} Without such a GPU write `use_cpu: true` and `bf16: false`."
        ) from None
    except (TypeError, AttributeError, LookupError, OSError, ImportError, NotImplementedError) as error:
        raise ValueError(f"The settings cannot be used: {error_line(error)}") from error
    if rest:
        raise ValueError(f"Unknown arguments {rest}. Expected `--key value`, and a recipe after --config.")
    for settings in (script_args, model_args):
        check_one_of(settings)
        check_ranges(settings)
        check_supported(settings)
    for key in (
        f.name for f in dataclasses.fields(ModelKeys) if f.name.startswith(("lora_", "use_rslora", "use_dora"))
    ):
        if not model_args.use_peft and getattr(model_args, key) != default_of(key, classes):
            raise ValueError(f"{key}={getattr(model_args, key)!r} has no effect without use_peft: true.")
    for key, value in (
        ("dataset_name", script_args.dataset_name or args.max_steps > 0),  # an environment may bring the prompts
        ("tools_script", any(getattr(script_args, each) for each in keys_that(script_args, "opens"))),
        ("model_name_or_path", model_args.model_name_or_path),
    ):
        if not value:
            raise ValueError(f"{key} is not set. Add a line `{key}: ...` to the recipe; hf_recipes/ has examples.")
    make_paths_absolute(script_args, model_args)
    return script_args, args, model_args


def make_paths_absolute(script_args: Any, model_args: Any) -> None:
    """Make relative paths absolute. Those of `GRPOConfig`'s settings are absolute already."""
    make_absolute(script_args)
    for config, key in ((script_args, "dataset_name"), (model_args, "model_name_or_path")):  # or a Hub name
        value = getattr(config, key)
        if value and value not in GENERATED_DATASETS and os.path.exists(os.path.expanduser(value)):
            setattr(config, key, absolute(value))
    if folder := os.environ.get("TENSORBOARD_LOGGING_DIR"):
        os.environ["TENSORBOARD_LOGGING_DIR"] = absolute(folder)
