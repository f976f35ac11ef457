"""The keys of a recipe, and how YAML and a command line become checked dataclasses of settings."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import inspect
import json
import os
import sys
import typing
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from transformers import SchedulerType
from trl import ModelConfig, TrlParser

from mt_grpo.base.fields import key, keys_that
from mt_grpo.base.files import RecipeLoader, absolute
from mt_grpo.recipe.data import GENERATED_DATASETS


@dataclass
class ServerAndLogKeys:
    """Keys of `MTGRPOConfig` that are not of the method: a server's, checks, logs, and defaults other than TRL's."""

    rollout_engine: str = key("vllm", "What the server runs: vllm or sglang", one_of=("vllm", "sglang"), trained=False)
    vllm_server_base_url: list[str] | str | None = key(None, "Address of the server, or several", trained=False)
    weight_sync: str = key(
        "auto", "How weights reach the server: nccl (GPUs), disk (shared directory), adapter (LoRA) or auto",
        one_of=("auto", "nccl", "disk", "adapter"), trained=False,
    )  # fmt: skip
    weight_sync_dir: str | None = key(
        None, "Shared directory of the disk transport. None: /dev/shm, else the temp dir", path=True, trained=False
    )
    vllm_request_timeout: float = key(600.0, "Seconds for one generation request", within="(0, inf)", trained=False)
    tokenization_sanity_check_mode: str = key(
        "strict",
        "How strictly tokens are compared with a whole rendering",
        one_of=("strict", "ignore_strippable", "off", "disable"),
    )
    log_rollouts: int = key(16, "Rollouts per rank and batch in rollouts.*.jsonl", within="[0, inf)", trained=False)
    log_rollout_tokens: bool = key(False, "Log every token of these rollouts, too", trained=False)
    # Other defaults than TRL's, which do not fit conversations.
    max_completion_length: int = key(4096, "Tokens of a conversation after its prompt, results too", within="[1, inf)")
    lr_scheduler_type: SchedulerType | str = key("constant_with_warmup", "Schedule of the learning rate")
    warmup_steps: float = key(10, "Steps in which the learning rate rises from 0; below 1 a share of all steps")


@dataclass
class ModelKeys(ModelConfig):
    """TRL's `ModelConfig`. Dropout is 0: with it no row shares its prompt, and importance ratios are noise."""

    lora_dropout: float = key(0.0, "Dropout of a LoRA", within="[0, 1)")


# What is known of the keys of TRL and transformers, whose fields do not say it.
OF_TRL = {
    what: {name: fact for fact, names in rows.items() for name in names}
    for what, rows in {
        "within": {
            "(0, inf)": (
                "temperature", "adam_epsilon", "delta", "sapo_temperature_neg", "sapo_temperature_pos",
                "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap",
                "num_train_epochs", "save_steps", "eval_steps", "logging_steps",
            ),
            "[1, inf)": ("max_steps", "num_iterations", "per_device_train_batch_size", "steps_per_generation",
                         "gradient_accumulation_steps", "generation_batch_size", "lora_alpha", "save_total_limit"),
            "[2, inf)": ("num_generations",),
            "[0, 1]": ("min_p", "ref_model_mixup_alpha", "top_entropy_quantile"),
            "(0, 1]": ("top_p",),
        },
        "one_of": {
            ("group", "batch", "mean", "none", True, False): ("scale_rewards",),
            ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"): ("loss_type",),
            ("token", "sequence"): ("importance_sampling_level",),
            ("server", "colocate"): ("vllm_mode",),
            ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"): ("vllm_importance_sampling_mode",),
        },
        "path": {True: ("output_dir",)},
        "refused": {  # keys that have no effect on multi-turn training, or another one
            "use turn_reward_weights and outcome_reward_weights": ("reward_weights",),
            "use max_env_steps": ("max_tool_calling_iterations",),
            "rewards, tools and environments read a row's columns": ("remove_unused_columns",),
            "credit_assignment says how rewards become advantages": ("multi_objective_aggregation",),
            "one pattern cannot fit tool turns and answer turns alike": ("vllm_structured_outputs_regex",),
            "its noise is drawn anew in the loss, which takes it for the policy's": ("neftune_noise_alpha",),
            "batches in the order of their readiness would mix prompts in a group": ("dataloader_in_order",),
            "TRL's sampler reads only seed": ("data_seed", "train_sampling_strategy"),
            "TRL's loss does not read it": ("label_smoothing_factor",),
            "rows are read whole": ("dataset_streaming",),
            "train a LoRA on bf16 weights": ("load_in_8bit", "load_in_4bit"),
        },
    }.items()
}  # fmt: skip


def fact_of(each: dataclasses.Field, what: str) -> Any:
    """A fact about a key, such as `within` or `one_of`, from its field or the table of TRL's keys; None if unknown."""
    return each.metadata.get(what) or OF_TRL[what].get(each.name)


Classes = tuple[type, ...]  # dataclasses; a key may be a field of any of them


@functools.cache
def known_keys(classes: Classes) -> dict[str, Any]:
    """Every recipe key with its annotated type."""
    return {k: v for cls in classes for k, v in typing.get_type_hints(cls).items() if k in cls.__dataclass_fields__}


def field_of(key: str, classes: Classes) -> dataclasses.Field:
    """The field of a recipe key, from the first dataclass that has it. Raises `KeyError` if none has it."""
    return {k: f for cls in reversed(classes) for k, f in cls.__dataclass_fields__.items()}[key]


def default_of(key: str, classes: Classes) -> Any:
    """The default of a recipe key. Raises `KeyError` for an unknown key."""
    f = field_of(key, classes)
    return f.default_factory() if f.default is dataclasses.MISSING else f.default


def fits_type(value: Any, expected: Any) -> bool:
    """Whether a recipe's value is of an annotated type. Nothing is converted: 7.0 is no int, and 7 is no text.

    >>> fits_type(7.0, int), fits_type(7, float), fits_type("7", float), fits_type(None, int | None)
    (False, True, False, True)
    """
    try:
        TypeAdapter(expected, config={"arbitrary_types_allowed": True}).validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError):  # TypeError: a date, which JSON does not have
        return False
    return True


def in_range(number: float, interval: str) -> bool:
    """Whether a number is in an interval. NaN is in none, nor is 1e39, which float32 makes infinite.

    >>> in_range(1, "(0, 1]"), in_range(0, "(0, 1]"), in_range(float("nan"), "(-inf, inf)")
    (True, False, False)
    """
    low, high = map(float, interval[1:-1].split(", "))
    at_a_bound = (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    return abs(number) < 3.4028234663852886e38 and (low < number < high or at_a_bound)


def check_values(config: Any) -> None:
    """Raise `ValueError` for a setting that is refused, is not one of its choices, or is a number out of its range.

    The range of a number is `[0, inf)` unless its field or the table says another one. Defaults are always allowed.
    """
    for each in dataclasses.fields(config):
        value, allowed = getattr(config, each.name), fact_of(each, "one_of")
        if value == default_of(each.name, (type(config),)):
            continue
        if reason := fact_of(each, "refused"):
            raise ValueError(f"{each.name}={value!r} is not supported: {reason}.")
        if allowed and value not in allowed:
            raise ValueError(f"{each.name}={value!r} is not known. Expected one of: {', '.join(map(str, allowed))}.")
        interval = fact_of(each, "within") or "[0, inf)"
        for number in value if isinstance(value, list) else [value]:
            if type(number) in (int, float) and not in_range(number, interval):
                raise ValueError(f"{each.name}={value!r}, expected a finite number in {interval}.")


def make_absolute(config: Any) -> None:
    """Make the paths of a dataclass of settings absolute, as seen from the folder where the run starts."""
    for each in dataclasses.fields(config):
        kind, value = fact_of(each, "path"), getattr(config, each.name)
        if value and (kind is True or (kind and kind in value)):  # a path, or path.py:Name
            value = [absolute(path) for path in value] if isinstance(value, list) else absolute(value)
        setattr(config, each.name, value)


class RecipeParser(TrlParser):
    """`TrlParser` that raises `ValueError` instead of exiting, and in which `--key null` means None if it may."""

    def __init__(self, classes: Classes):
        super().__init__(classes, allow_abbrev=False, usage="%(prog)s --config RECIPE [--key value ...]")
        self.known = known_keys(classes)
        for action in self._actions:
            if action.type and type(None) in typing.get_args(self.known.get(action.dest)):
                kind = functools.wraps(action.type)  # argparse names it in errors
                action.type = kind(lambda text, read=action.type: None if text == "null" else read(text))

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
        vars(namespace).update({key: None for key, value in vars(namespace).items() if value == [None]})
        return namespace, rest


def read_recipe(path: str, classes: Classes) -> dict[str, Any]:
    """A recipe's keys, and others of its `include`; `env` has texts. Raises `ValueError` for a wrong key or type."""
    text = Path(path).read_text(encoding="utf-8")
    own = {"env": dict[str, str | int | float | bool], "include": str, "scale_rewards": str | bool}
    known = known_keys(classes) | own
    try:
        recipe = yaml.load(text, RecipeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"The recipe {path!r} cannot be read: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path!r} holds {type(recipe).__name__}, expected lines of `key: value`.")
    check_known(recipe, known, f"in {path}")
    if early := [name for name in recipe.get("env") or {} if str(name).startswith(("HF_", "TRANSFORMERS_"))]:
        raise ValueError(f"env: {early[0]} in {path} is read before a recipe is. Set it in the shell.")
    for name, value in recipe.items():
        if not fits_type(value, known[name]):
            hint = " YAML reads no, off, yes and on as booleans: quote them." if isinstance(value, bool) else ""
            expected = inspect.formatannotation(known[name])
            raise ValueError(f"{name}: {value!r:.200} in {path} is {type(value).__name__}, expected {expected}.{hint}")
    recipe |= {name: value for name, value in yaml.load(text, yaml.BaseLoader).items() if name == "env"}
    base = recipe.pop("include", None)
    return (read_recipe(str(Path(path).parent / base), classes) if base else {}) | recipe


def check_known(names: Iterable[Any], known: Collection[str], where: str) -> None:
    """Raise `ValueError` for unknown keys: all of them, each with the nearest known key."""
    unknown = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.75)
            unknown.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if unknown:
        raise ValueError(
            f"Unknown keys {where}: {', '.join(unknown)}. docs/configuration.md has the keys, and docs/trl.md, "
            "docs/ms_swift.md and docs/verl.md those of other trainers."
        )


def parse_recipe(argv: list[str] | None, classes: Classes) -> tuple:
    """(script_args, args, model_args) from a recipe (`--config x.yaml`) and the command line (`--max_steps 5`).

    A value on the command line replaces the recipe's. Nothing is loaded here. Raises `ValueError` for unknown keys
    (with the nearest known one), wrong types, unknown choices, and settings that would train something else.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
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
    lora = [name for name in vars(model_args) if name.startswith(("lora_", "use_rslora", "use_dora"))]
    for name in () if model_args.use_peft else lora:
        if (value := getattr(model_args, name)) != default_of(name, classes):
            raise ValueError(f"{name}={value!r} has no effect without use_peft: true.")
    opened = any(getattr(script_args, name) for name in keys_that(script_args, "opens"))
    for name, found in (("model_name_or_path", model_args.model_name_or_path), ("tools_script", opened)):
        if not found:
            raise ValueError(f"{name} is not set. Add it to the recipe; hf_recipes/ has examples.")
    make_absolute(script_args)
    for settings, name in ((script_args, "dataset_name"), (model_args, "model_name_or_path")):  # or names on the Hub
        path = os.path.expanduser(getattr(settings, name) or "")
        if path not in GENERATED_DATASETS and os.path.exists(path):
            setattr(settings, name, absolute(path))
    return script_args, args, model_args
