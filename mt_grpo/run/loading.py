"""Reading a checkpoint into a trainer: what cannot be used ends all ranks together, in one line with its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mt_grpo.run.checkpoints import load_as_saved, load_first_adapter
from mt_grpo.run.saved_states import check_optimizer, load_on_all_ranks


@contextmanager
def whole_reference(args: Any) -> Iterator[None]:
    """Within it every rank reads the checkpoint of a run that has a reference model (`beta` above 0).

    With `fsdp_cpu_ram_efficient_loading` transformers reads it on rank 0 alone. accelerate hands the policy's weights
    out from there. TRL 1.16 shards the reference without handing anything out: the other ranks' shards would be of
    memory that nobody wrote, and the KL term would pull to noise (at the first step it was 7.7 in place of 0).
    """
    key = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.get(key)
    if before is not None and getattr(args, "beta", 0.0) != 0.0:
        os.environ[key] = "false"
    try:
        yield
    finally:
        if before is not None:
            os.environ[key] = before


def load_model(trainer: Any, load: Callable, checkpoint: str, model: Any) -> None:
    """`Trainer`'s `load`, for models, too, whose weights are saved under other names. Raises `CheckpointError`."""

    def load_whole() -> None:
        load(checkpoint, model)
        if not trainer._is_sharded:
            load_as_saved(Path(checkpoint), trainer.model)
            load_first_adapter(Path(checkpoint), trainer.model)

    load_on_all_ranks(checkpoint, "the model", load_whole)


def load_best(trainer: Any, load: Callable) -> None:
    """`Trainer`'s `load` of the best checkpoint, for models, too, whose weights are saved under other names."""
    load()
    if trainer.state.best_model_checkpoint and not trainer._is_sharded:
        load_as_saved(Path(trainer.state.best_model_checkpoint), trainer.model)


def load_optimizer(trainer: Any, load: Callable, checkpoint: str | None) -> None:
    """`Trainer`'s `load`, for states that fit the parameters. Raises `CheckpointError`."""

    def load_fitting() -> None:
        load(checkpoint)
        if not trainer._is_sharded:
            check_optimizer(trainer.optimizer)

    if checkpoint is not None:
        what = "the state of the optimizer (optimizer.pt) or of what goes with it"
        load_on_all_ranks(checkpoint, what, load_fitting)


def load_random_numbers(load: Callable, checkpoint: str | None) -> None:
    """`Trainer`'s `load`. Raises `CheckpointError`."""
    if checkpoint is not None:
        load_on_all_ranks(checkpoint, "the state of the random numbers (rng_state*.pth)", lambda: load(checkpoint))
