"""What a checkpoint holds beside the weights, read before it is used: counts, schedule, random numbers.

A file may be whole and hold something else: of another program, of another run, edited by hand.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.utils import gather_object
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals
from trl.trainer.utils import RepeatSampler

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


def get_rng_state() -> tuple:
    """The state of every generator that sampling may draw from on this rank."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda


def set_rng_state(state: tuple) -> None:
    """Restore the generators to a state from `get_rng_state`."""
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3])


class StepEndSnapshot(TrainerCallback):
    """Keeps the state at the end of the last step, which a checkpoint must hold so that a run can be resumed.

    The state at the beginning of the next step would be wrong. A new epoch draws a random number before its first
    batch, and a resumed run draws this number again.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self.num_tokens, self.rng = state.num_input_tokens_seen, get_rng_state()
        self.best = state.best_metric, state.best_global_step, state.best_model_checkpoint

    on_step_end = on_train_begin

    def restore(self, state: Any) -> None:
        """Restore the generators and the token count of the end of the last step."""
        set_rng_state(self.rng)
        state.num_input_tokens_seen = self.num_tokens

    def forget_best(self, state: Any) -> None:
        """Make the best checkpoint the one from before this step, whose own checkpoint could not be saved."""
        state.best_metric, state.best_global_step, state.best_model_checkpoint = self.best


class EpochOrder(Sampler):
    """TRL's sampler, with an order of the prompts that depends only on the seed and the number of the epoch.

    The order of TRL's own sampler depends on how many epochs this process has run. A run that is resumed in the second
    epoch would use the order of the first epoch again.
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self.sampler, self.epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + self.epoch())
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)
