"""Runs that stop on a signal or an error, save a checkpoint, and continue from it exactly."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import Sampler
from transformers.trainer_callback import TrainerState

from mt_grpo.checkpoints import check_tensors
from mt_grpo.nodes import check_same_on_nodes, checkpoint_of_all_ranks, is_lost_peer
from mt_grpo.prefetch import RolloutBatch
from mt_grpo.progress import ProgressLine
from mt_grpo.ranks import RunError, RunStopped, raise_on_all_ranks
from mt_grpo.saving import NotFinite, SaveError, SavingTrainer
from mt_grpo.server_errors import ServerError
from mt_grpo.snapshots import EpochOrder, get_rng_state, set_rng_state

logger = logging.getLogger(__name__)

# accelerate names the device of several processes on a CPU `cpu:0`, from which `torch.load` restores no optimizer.
torch.serialization.register_package(30, lambda storage: None, lambda data, where: data if where == "cpu:0" else None)


class ResumableTrainer(SavingTrainer):
    """`GRPOTrainer` whose runs can be stopped at any time. A resumed run trains exactly as one without a stop.

    A subclass sets `llm`, the backend. If `llm.collective` is true, no rank may stop while other ranks generate. A
    subclass also sets `_batch`, the running conversations for this step.
    """

    def __init__(self, *args, **kwargs):
        self._interruptible = False
        self._batch: RolloutBatch | None = None
        super().__init__(*args, **kwargs)

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """A context in which SIGTERM and Ctrl-C raise `RunStopped`, after which the run can be saved and resumed.

        A signal interrupts rollouts. An optimizer step is finished first. A second Ctrl-C, sent more than a second
        after the first signal, raises `KeyboardInterrupt` at once.
        """
        asked = 0.0

        def handle(signum, frame):
            nonlocal asked
            if self._stop_signal is None:
                asked, self._stop_signal = time.monotonic(), signum
                logger.warning(f"{signal.Signals(signum).name}: stopping before the next optimizer step.")
                if self._interruptible:
                    raise RunStopped(signum)
            elif signum == signal.SIGINT and time.monotonic() > asked + 1:  # launchers send the first twice
                raise KeyboardInterrupt

        previous = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    @contextmanager
    def _interruptions(self) -> Iterator[None]:
        """A context in which a signal raises `RunStopped` at once, unless generation is a collective call."""
        self._interruptible = not getattr(self.llm, "collective", False)
        try:
            if self._interruptible and self._stop_signal is not None:
                raise RunStopped(self._stop_signal)
            yield
        finally:
            self._interruptible = False

    def _stop_if_asked(self) -> None:
        """Raise `RunStopped` on all ranks if any rank got a signal. Collective."""
        if signals := [signum for signum in gather_object([self._stop_signal]) if signum]:
            raise RunStopped(signals[0], f" at step {self.state.global_step}")

    def _any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Collective."""
        return bool(self.accelerator.reduce(torch.tensor(int(flag), device=self.accelerator.device)).item())

    def _on_all_ranks(self, function: Callable[[], tuple[int, ...] | None], what: str) -> list[int]:
        """Run `function`, which may fail or be interrupted on any rank. Then all ranks raise the error. Collective.

        Returns the numbers that `function` returned, summed over the ranks.
        """
        error, stopped, counts = None, None, ()
        try:
            with self._interruptions():
                counts = function() or ()
        except RunStopped as raised:
            stopped = raised.signum
        except Exception as raised:  # raised on all ranks below: the others would wait for ever
            error = raised
        return raise_on_all_ranks(error, what, self.state.global_step, stopped, counts)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> Any:
        """`Trainer.train` that leaves no conversation open, however it ends.

        Raises:
            ValueError: `resume_from_checkpoint` is no whole checkpoint.
            SaveError: The disk has no room for a checkpoint, or for a push of the weights.
            RunError: The nodes differ, no optimizer step was taken, a rank failed, or a signal asked the run to stop
                (`RunStopped`).
            ServerError: The server failed.
        """
        resume_from_checkpoint = checkpoint_of_all_ranks(resume_from_checkpoint, self.args.output_dir)
        self._saved, step = {}, 0
        check_same_on_nodes(self._run_record)
        self._check_room()
        if resume_from_checkpoint:
            path = Path(resume_from_checkpoint)
            check_tensors(path, self.model)
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
            self._cancel_rollouts()
            self.env.close()
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ProgressLine):
                    callback.stop()
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

    def _cancel_rollouts(self) -> None:
        """End all running conversations."""
        if self._batch is not None:
            self._batch.cancel()
        self._batch = None

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """As `Trainer`'s, which does not notice that a run was resumed at its end before it took a step more."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def save_where_it_stopped(self) -> str:
        """Save a checkpoint after a `RunError` or `ServerError`. Both are raised between two optimizer steps.

        Collective. Returns the message for the user.
        """
        step = self.state.global_step
        if step == 0:
            return "No step was finished, so there is nothing to save."
        if step not in self._saved:  # a folder of this step may exist: of another run, or incomplete
            self._snapshot.restore(self.state)  # the resumed run samples the failed batch again, unchanged
            self.args.save_only_model = False  # of which nothing could be continued
            try:
                self._save_somewhere(lambda: self._write_checkpoint(self.model, trial=None))
            except SaveError as error:
                return f"Step {step} could not be saved: {error}. {self._last_saved()}"
            except NotFinite as error:
                return f"{error} {self._last_saved()}"
        self.accelerator.wait_for_everyone()  # a launcher ends all ranks soon after the first one ends
        return f"The run is saved up to step {step}. Continue with --resume_from_checkpoint {self._saved[step]}"

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochOrder(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """`Trainer.evaluate` that restores the random number generators, so that it does not change training."""
        before = get_rng_state()
        self._metrics["eval"].clear()  # one that was broken off, or a prediction, may have left some
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            set_rng_state(before)


def train_or_save(trainer: ResumableTrainer) -> None:
    """Train to the end and save the model. After a failure or a signal, save a checkpoint and exit.

    The exit code is 1 after a failure, and 128 plus the number of the signal after a signal.
    """
    with trainer.stop_on_signals():
        try:
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        except RunStopped as stopped:
            print(f"{stopped}. {trainer.save_where_it_stopped()}", file=sys.stderr, flush=True)
            sys.exit(128 + stopped.signum)
        except (RunError, ServerError) as error:
            logger.error("training stopped", exc_info=error if error.__cause__ else None)
            sys.exit(f"error: {error}\n{trainer.save_where_it_stopped()}")
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            logger.error("training stopped", exc_info=error)
            sys.exit(f"error: step {trainer.state.global_step}: another process of this run is gone, or does not "
                     f"answer: {error}\nWithout it nothing can be saved. Start all nodes again with "
                     "--resume_from_checkpoint last, which takes the last whole checkpoint.")  # fmt: skip
        try:
            trainer.save_trained_model()  # a signal does not interrupt this
        except NotFinite as error:
            sys.exit(f"error: {error} {trainer._last_saved()}")
        except SaveError as error:
            sys.exit(f"error: {error}")
