"""The moment from which a run can be resumed: random numbers and counts at the end of a step."""

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
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3])


class StepEndSnapshot(TrainerCallback):
    """Keeps what a checkpoint must hold, of the last moment from which a run can be resumed: between two steps.

    The state at the end of a step, not at the beginning of the next: a new epoch's first batch draws a random number
    before it, and draws it again when the run is resumed there.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self.num_tokens, self.rng = state.num_input_tokens_seen, get_rng_state()
        self.best = state.best_metric, state.best_global_step, state.best_model_checkpoint

    on_step_end = on_train_begin

    def restore(self, state: Any) -> None:
        set_rng_state(self.rng)
        state.num_input_tokens_seen = self.num_tokens

    def forget_best(self, state: Any) -> None:
        """Of this step, whose checkpoint could not be saved: the best one is that of an earlier step again."""
        state.best_metric, state.best_global_step, state.best_model_checkpoint = self.best


class EpochOrder(Sampler):
    """TRL's order of the prompts, a different one in each epoch, which depends on nothing but the epoch's number.

    TRL's own depends on how many epochs came before in this process, so that a run resumed in the second epoch would
    go through the first one's order again.
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self.sampler, self.epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + self.epoch())
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)
