"""What a checkpoint holds beside the weights, read before it is used: counts, schedule, random numbers.

A file may be whole and hold something else: of another program, of another run, edited by hand.
"""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals

from mt_grpo.base.errors import error_line
from mt_grpo.base.files import read_json
from mt_grpo.base.ranks import RunError
from mt_grpo.conversation.environments import is_number

STATE = "trainer_state.json"
RNG_KEYS = {"python", "numpy", "cpu"}
WHAT_TO_DO = "Resume from another checkpoint, or with this one's model, lora_* settings and optimizer."


class CheckpointError(RunError, ValueError):
    """A checkpoint cannot be resumed. All ranks raise this error together, before the first step."""


def load_on_all_ranks(checkpoint: str, name: str, function: Callable[[], Any]) -> Any:
    """Run a function that reads a file of a checkpoint. Collective. Raises `CheckpointError` on all ranks.

    INVARIANT: a rank whose own file cannot be read does not let the others wait for its first gradient.
    """
    result, error, cause = None, [], None
    try:
        result = function()
    except RunError:
        raise
    except Exception as raised:  # torch, pickle, PEFT and the states' own classes raise anything
        cause = raised
        error = [f"resume_from_checkpoint={checkpoint!r}: {name} cannot be loaded: {error_line(raised):.500}"]
    if errors := gather_object(error):
        raise CheckpointError(f"{errors[0].rstrip('.')}. {WHAT_TO_DO}") from cause
    return result


def state_damage(folder: Path) -> str | None:
    """The problem of a checkpoint's `trainer_state.json`, as text. None if `Trainer` can read it."""
    state = read_json(folder / STATE)
    if state is None or type(state.get("global_step")) is not int or state["global_step"] < 0:
        return f"{STATE} cannot be read"
    fields = {field.name for field in dataclasses.fields(TrainerState)}
    if unknown := sorted(state.keys() - fields):
        return f"{STATE} has the key {unknown[0]!r:.100}, which is unknown to transformers"
    for name, value in state.items():
        kind = {"log_history": list, "stateful_callbacks": dict}.get(name)
        if kind is None and TrainerState.__dataclass_fields__[name].type in (int, float):
            fits, expected = value is None or is_number(value), "a number"
        elif kind is not None:
            fits, expected = isinstance(value, kind) or (value is None and kind is dict), f"a {kind.__name__}"
        else:
            fits, expected = True, ""
        if not fits:
            return f"{STATE} has {name}: {value!r:.100}, expected {expected}"
    wrong = [each for each in state.get("log_history", []) if not isinstance(each, dict)]
    return f"{STATE} has {wrong[0]!r:.100} in log_history, expected objects" if wrong else None


def small_file_damage(path: Path) -> str | None:
    """The problem of a saved state of the schedule or of the random numbers, as text. None if it can be loaded."""
    is_schedule = path.name == "scheduler.pt"
    if not is_schedule and not path.name.startswith("rng_state"):
        return None
    try:
        with safe_globals(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, weights_only=True, map_location="cpu")
    except (
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        return f"cannot be loaded: {error_line(error):.200}"
    if not isinstance(state, dict):
        return f"contains {type(state).__name__}, expected a dict"
    if is_schedule and type(state.get("last_epoch")) is not int:
        return f"has last_epoch: {state.get('last_epoch')!r:.50}, expected the number of completed steps"
    if not is_schedule and (missing := sorted(RNG_KEYS - state.keys())):
        return f"lacks {', '.join(missing)}, so it is not a state of random numbers"
    return None


def check_optimizer(optimizer: Any) -> None:
    """Raise `ValueError` if a loaded optimizer state is of another optimizer, or not of the shapes of its parameters.

    torch compares only the numbers of parameters. The first step would fail, or take numbers of another tensor.
    """
    for group in optimizer.param_groups:
        if lacking := sorted(optimizer.defaults.keys() - group.keys()):
            raise ValueError(
                f"it is of another optimizer and lacks {', '.join(lacking)}. Expected one of the same optim"
            )
        for parameter in group["params"]:
            for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                found = optimizer.state.get(parameter, {}).get(name)
                if torch.is_tensor(found) and found.numel() != parameter.numel():
                    raise ValueError(
                        f"{name} has the shape {list(found.shape)}, expected {list(parameter.shape)}: it belongs to "
                        "another model, or to other parameters"
                    )
