"""Runs that lose nothing: signals, ranks that stop together, and going on as if nothing had happened."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch.utils.data import Sampler
from transformers.trainer_callback import TrainerState

from mt_grpo.checkpoints import checkpoint_to_resume
from mt_grpo.prefetch import RolloutBatch
from mt_grpo.ranks import RunError, RunStopped, raise_on_all_ranks
from mt_grpo.saving import SaveError, SavingTrainer
from mt_grpo.server_errors import ServerError
from mt_grpo.snapshots import EpochOrder, get_rng_state, set_rng_state

logger = logging.getLogger(__name__)


class ResumableTrainer(SavingTrainer):
    """`GRPOTrainer` whose runs can be stopped anywhere and go on exactly as they would have.

    A subclass sets `llm`, the backend, whose `collective` says that no rank may leave while others generate, and
    `_batch` and `_prefetched`, the conversations that are under way for this step and for the next.
    """

    def __init__(self, *args, **kwargs):
        self._interruptible = False
        self._batch: RolloutBatch | None = None
        self._prefetched: RolloutBatch | None = None
        super().__init__(*args, **kwargs)

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """While training: SIGTERM and Ctrl-C end the run by `RunStopped`, from which it can be saved and resumed.

        Rollouts are interrupted; an optimizer step is finished first. A Ctrl-C more than a second later ends at once.
        """
        asked = 0.0

        def handle(signum, frame):
            nonlocal asked
            if self._stop_signal is None:
                asked, self._stop_signal = time.monotonic(), signum
                logger.warning(f"{signal.Signals(signum).name}: stopping before the next optimizer step.")
                if self._interruptible:
                    raise RunStopped(signum)
            elif signum == signal.SIGINT and time.monotonic() > asked + 1:  # launchers send the first one twice
                raise KeyboardInterrupt

        previous = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    @contextmanager
    def _interruptions(self) -> Iterator[None]:
        """Where a signal may raise `RunStopped`; not in a generation that other ranks take part in."""
        self._interruptible = not getattr(self.llm, "collective", False)
        try:
            if self._interruptible and self._stop_signal is not None:
                raise RunStopped(self._stop_signal)
            yield
        finally:
            self._interruptible = False

    def _stop_if_asked(self) -> None:
        """Collective: raises `RunStopped` on all ranks if a signal came to any."""
        if signals := [signum for signum in gather_object([self._stop_signal]) if signum]:
            raise RunStopped(signals[0], f" at step {self.state.global_step}")

    def _on_all_ranks(self, function: Callable[[], tuple[int, ...] | None], what: str) -> list[int]:
        """Run what can fail, or be interrupted by a signal, on any rank; then all ranks raise alike. Collective.

        Returns the numbers that `function` returned, added up over ranks.
        """
        error, stopped, counts = None, None, ()
        try:
            with self._interruptions():
                counts = function() or ()
        except RunStopped as raised:
            stopped = raised.signum
        except Exception as raised:  # told to the other ranks, which would wait for this one for ever
            error = raised
        return raise_on_all_ranks(error, what, self.state.global_step, stopped, counts)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> Any:
        """`Trainer.train`; whatever ends it, no conversation stays open behind it."""
        resume_from_checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)
        self._saved, step = {}, 0
        self._check_room()
        if resume_from_checkpoint:
            path = Path(resume_from_checkpoint)
            step = TrainerState.load_from_json(path / "trainer_state.json").global_step
            self._saved[step] = path
            self._warn_of_changes(path)
            if self.args.sync_ref_model:
                logger.warning(
                    "sync_ref_model: no checkpoint holds the reference model, which starts anew from the base."
                )
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            for batch in filter(None, (self._batch, self._prefetched)):
                batch.cancel()
            self._batch = self._prefetched = None
        if step and step == self.state.global_step:
            self._warn(
                f"Nothing was trained: {resume_from_checkpoint} is of step {step}, and the run ends at step "
                f"{self.state.max_steps}. To train on, set max_steps or num_train_epochs above it."
            )
        if self.state.global_step == 0:
            raise RunError(
                f"No optimizer step was taken, with {len(self.train_dataset)} prompts: the model is what it was. "
                f"Expected at least {self.args.generation_batch_size // self.args.num_generations} prompts."
            )
        return result

    def save_where_it_stopped(self) -> str:
        """Save a checkpoint after a `RunError` or `ServerError`, which find the model between two optimizer steps.

        Collective. Returns what to tell the user.
        """
        step = self.state.global_step
        if step == 0:
            return "No step was finished, so there is nothing to save."
        if step not in self._saved:  # a folder of this step may be there all the same: another run's, or torn
            self._snapshot.restore(self.state)  # the batch that failed is sampled again, and the same way
            self.args.save_only_model = False  # of which nothing could be continued
            try:
                self._save_somewhere(lambda: self._write_checkpoint(self.model, trial=None))
            except SaveError as error:
                return f"Step {step} could not be saved: {error}. {self._last_saved()}"
        self.accelerator.wait_for_everyone()  # a launcher ends all ranks soon after the first of them
        return f"The run is saved up to step {step}. Continue with --resume_from_checkpoint {self._saved[step]}"

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochOrder(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """`Trainer.evaluate`, which changes nothing in training: its samples draw no random numbers from it."""
        before = get_rng_state()
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            set_rng_state(before)


def train_or_save(trainer: ResumableTrainer) -> None:
    """Train to the end, or save what there is and exit: 1 after a failure, 128 + its number after a signal."""
    with trainer.stop_on_signals():
        try:
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        except RunStopped as stopped:
            print(f"{stopped}. {trainer.save_where_it_stopped()}", file=sys.stderr, flush=True)
            sys.exit(128 + stopped.signum)
        except (RunError, ServerError) as error:
            logger.error("training stopped", exc_info=error if error.__cause__ else None)
            sys.exit(f"error: {error}\n{trainer.save_where_it_stopped()}")
        try:
            trainer.save_trained_model()  # a signal that comes now changes nothing
        except SaveError as error:
            sys.exit(f"error: {error}")
