"""The state at the end of a step, from which a run can be resumed: random number generators and counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler


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
