"""Runs that stop on a signal or an error, save a checkpoint, and continue from it exactly."""

from __future__ import annotations

import functools
import json
import logging
import math
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import Sampler
from transformers.trainer_callback import TrainerState
from trl import GRPOTrainer

from mt_grpo.base.errors import ServerError, error_line, root_cause
from mt_grpo.base.files import read_json
from mt_grpo.base.ranks import RunError, RunStopped, raise_on_all_ranks
from mt_grpo.run.checkpoints import (
    RUN_RECORD,
    bytes_to_save,
    changed_settings,
    check_room,
    check_tensors,
    checkpoint_damage,
    dataset_sha256,
    load_best,
    load_model,
    load_optimizer,
    load_random_numbers,
    run_record,
    weights_not_finite,
    whole_reference,
)
from mt_grpo.run.connect import start_rollouts, sync_weights
from mt_grpo.run.in_flight import BetweenBatches, InFlight, RolloutBatch
from mt_grpo.run.nodes import (
    apply_ddp_timeout,
    check_output_on_nodes,
    check_same_on_nodes,
    checkpoint_of_all_ranks,
    is_lost_peer,
    save_weights_on_each_node,
)
from mt_grpo.run.saved_states import CheckpointError, EpochOrder, StepEndSnapshot, get_rng_state, set_rng_state

logger = logging.getLogger(__name__)


# Saves checkpoints and the trained model to disks that may be full. A failed checkpoint does not end the run.


class SaveError(RunError):
    """A rank could not write a file. All ranks raise this error together."""


class NotFinite(RunError):
    """A gradient or a weight is NaN or infinite. All ranks raise this error together, before it is saved."""


# accelerate names the device of several processes on a CPU `cpu:0`, from which `torch.load` restores no optimizer.
torch.serialization.register_package(30, lambda storage: None, lambda data, where: data if where == "cpu:0" else None)


class ResumableTrainer(GRPOTrainer):
    """`GRPOTrainer` that saves, resumes and stops: no weights are lost, whenever and however a run ends.

    A run can be stopped at any time, and trains exactly as one without a stop when it is resumed. Disks may be full. A
    resumed run warns where it has other settings. A subclass sets `backend`, `env`, `reward_weights`,
    `turn_advantage_coef`, and `llm`, the backend: if `llm.collective` is true, no rank may stop while others generate.
    """

    FP16_SKIPS = 50  # steps in a row; from 65,536 a scale is 1 after 16 of them
    SAVE_ATTEMPTS, SAVE_PAUSE = 30, 60.0  # attempts to save the trained model; seconds between them

    def __init__(self, model: Any, *args, peft_config: Any = None, callbacks: list | None = None, **kwargs):
        self.in_flight = InFlight(self)
        self._interruptible, self._snapshot = False, StepEndSnapshot()
        self._saved: dict[int, Path] = {}  # step -> checkpoint that this run wrote or was resumed from
        self._save_errors: list[str] = []  # of this rank, not yet raised on all ranks
        self._model_name = model if isinstance(model, str) else model.config._name_or_path
        self._peft_config = peft_config
        self._stop_signal, self._num_skipped = None, 0  # its number; steps in a row whose gradient was not finite
        self._evaluation_due = False  # whether an evaluation was interrupted, which a resumed run makes up for
        self._of_data = ""  # the name of the dataset that is evaluated, where there are several
        if config := kwargs.get("args"):  # before weights are loaded
            apply_ddp_timeout(config.ddp_timeout)
            check_output_on_nodes(config.output_dir, config.save_on_each_node)
        callbacks = [self._snapshot, *(callbacks or [])]
        with whole_reference(config):
            super().__init__(model, *args, peft_config=peft_config, callbacks=callbacks, **kwargs)
        self.add_callback(BetweenBatches(self))
        save_weights_on_each_node(self.model, self.args)
        if self.args.resume_from_checkpoint:
            check_tensors(Path(self.args.resume_from_checkpoint), self.model)

    # -- disk space, and changed settings of a resumed run --

    def _check_room(self) -> None:
        """Raise `SaveError` on all ranks if a disk has no room for the first save or a weight push. Collective."""
        args, error = self.args, None
        model, checkpoint = bytes_to_save(self.model, args.optim, self._is_sharded)
        saves = args.save_strategy != "no"
        weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.model.parameters())
        pushes = self.backend == "server" and args.weight_sync_dir and self.accelerator.is_main_process
        try:
            if args.should_save:
                one = model if args.save_only_model else checkpoint
                by_steps = args.save_strategy == "steps" and args.save_steps >= 1 and args.max_steps > 0
                count = math.ceil(args.max_steps / args.save_steps) if by_steps else 1
                count = min(count, (args.save_total_limit or count) + 1)
                what = "a checkpoint and the trained model" if saves else "the trained model"
                least = model + (one if saves else 0)
                check_room(args.output_dir, least, model + max(checkpoint, one * count), what, "output_dir")
            if pushes and self.client.transfer.resolve_or_error(self.accelerator.device) == "disk":
                check_room(args.weight_sync_dir, weights, weights, "a push of the weights", "weight_sync_dir")
        except ValueError as raised:
            error = str(raised)
        if errors := gather_object([error] if error else []):
            raise SaveError(errors[0])

    @property
    def _is_sharded(self) -> bool:
        return self._dist.is_fsdp or self.is_deepspeed_enabled

    def _run_record(self) -> dict[str, Any]:
        return run_record(self)

    @functools.cached_property
    def _dataset_sha256(self) -> str:
        return dataset_sha256(self.train_dataset)

    def _warn_of_changes(self, checkpoint: Path) -> None:
        """Warn once of all settings that differ from the checkpoint's."""
        if not self.accelerator.is_main_process:
            return
        record = read_json(checkpoint / RUN_RECORD)
        if record is None:
            self._warn(f"{checkpoint} has no {RUN_RECORD}, so its settings cannot be compared with those of this run.")
        elif changed := changed_settings(record, self._run_record()):
            self._warn(f"{checkpoint} was trained with other settings. This run changes:\n  " + "\n  ".join(changed))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_model(self, super()._load_from_checkpoint, resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        load_best(self, super()._load_best_model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        load_optimizer(self, super()._load_optimizer_and_scheduler, checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        load_random_numbers(super()._load_rng_state, checkpoint)

    # -- numbers that are not finite --

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The gradient norm, which `Trainer` reads before each optimizer step. Raises `NotFinite` on all ranks.

        INVARIANT: no optimizer step is taken with a gradient that is not finite: one such step leaves no weight that
        is a number. With fp16 the scaler of the gradients skips these steps, and halves its scale each time: what is
        not finite `FP16_SKIPS` times in a row will never be. DeepSpeed takes its step within the
        backward pass, before this is asked for: there `_check_weights` keeps such weights out of checkpoints.
        """
        grad_norm = super()._get_grad_norm(model, grad_norm)
        finite = grad_norm is None or math.isfinite(float(grad_norm))
        self._num_skipped = 0 if finite else self._num_skipped + 1
        if not finite and (not self.args.fp16 or self._num_skipped >= self.FP16_SKIPS):
            step = self.state.global_step
            taken = "The step was not taken, and the weights are unchanged"
            if self.is_deepspeed_enabled:
                taken = "DeepSpeed has taken the step, and weights that are not finite are not saved"
            raise NotFinite(
                f"Step {step}: the norm of the gradient is {float(grad_norm)}. {taken}. Look at the rollouts of step "
                f"{step} in {self.args.output_dir} (rewards, advantages, logprobs). Lower turn_advantage_coef, the "
                "reward weights or learning_rate, and start with the last checkpoint as model_name_or_path, since a "
                "resumed run keeps the learning rate of its optimizer."
            )
        return grad_norm

    def _check_weights(self) -> None:
        """Raise `NotFinite` on all ranks if any weight is not finite. Collective."""
        if names := [name for rank in gather_object([weights_not_finite(self.model)]) for name in rank]:
            raise NotFinite(
                f"Step {self.state.global_step}: {len(set(names))} weights are not finite, such as {names[0]}. They "
                "are not saved. Lower learning_rate, and start with the last checkpoint as model_name_or_path."
            )

    # -- the trained model --

    def save_trained_model(self) -> None:
        """Save the model and `trainer_state.json` into `output_dir`. Collective.

        If `output_dir` has no room, the model is saved in the temporary directory. If neither has room, the save is
        tried again later. Raises `SaveError` unless the model is in `output_dir`; the message says where it is.
        """
        for attempt in range(self.SAVE_ATTEMPTS):
            try:
                folder, error = self._save_somewhere(self._write_trained_model)
            except SaveError as raised:
                error = raised
            else:
                if error is None:
                    return
                raise SaveError(
                    f"The trained model could not be saved in output_dir: {error}. It was saved in {folder}. Move it "
                    "before the temporary directory is cleaned."
                )
            if attempt + 1 == self.SAVE_ATTEMPTS or self._is_stopped_within(self.SAVE_PAUSE):
                break
            self._warn(
                f"The trained model could not be saved: {error}. Free space in {self.args.output_dir} or "
                f"{tempfile.gettempdir()}. Attempt {attempt + 2} of {self.SAVE_ATTEMPTS} follows."
            )
        raise SaveError(f"The trained model could not be saved: {error}. {self._last_saved()}")

    def _is_stopped_within(self, seconds: float) -> bool:
        """Wait for `seconds`. Returns True at once when any rank got a signal. Collective."""
        for begun in range(math.ceil(seconds)):
            if any(gather_object([self._stop_signal is not None])):
                return True
            time.sleep(min(1.0, seconds - begun))
        return False

    def _save_somewhere(self, save: Callable[[], None]) -> tuple[str, SaveError | None]:
        """Call `save`, which writes into `args.output_dir`. If it fails, call it again for a new temporary folder.

        Collective. Returns the folder with the files, and the first error. Raises `SaveError` if both calls fail.
        """
        asked, failed = self.args.output_dir, None
        name = f"mt-grpo-{Path(asked).name}-{secrets.token_hex(4)}"
        other = gather_object([str(Path(tempfile.gettempdir()) / name)])[0]
        for folder in (asked, other):
            self.args.output_dir = folder
            try:
                save()
                return folder, failed
            except SaveError as error:
                failed = SaveError(f"{failed}; {error}") if failed else error
            finally:
                self.args.output_dir = asked
        if self.args.should_save:
            shutil.rmtree(other, ignore_errors=True)
        raise failed

    def _write_trained_model(self) -> None:
        self._check_weights()
        folder = self.args.output_dir
        try:
            self.save_model(folder)
            with self._writing(folder):
                self.save_state()
                if self.args.should_save:  # the viewer compares the settings of two runs
                    self._write_record(Path(folder))
            self._raise_save_errors()
        except SaveError:
            if self.args.should_save:  # an index would make old and new shards look like one model
                for index in Path(folder).glob("*.index.json"):
                    index.unlink(missing_ok=True)
            raise

    def _warn(self, text: str) -> None:
        """Log a warning on rank 0 only."""
        if self.accelerator.is_main_process:
            logger.warning(text)

    def _last_saved(self) -> str:
        """The message that says from which checkpoint the run can be resumed."""
        whole = [path for _, path in sorted(self._saved.items()) if (path / "trainer_state.json").is_file()]
        return f"Continue with --resume_from_checkpoint {whole[-1]}" if whole else "There is no earlier checkpoint."

    # -- checkpoints --

    @contextmanager
    def _writing(self, where: str | Path) -> Iterator[None]:
        """A context for what one rank writes by itself. Its error is kept until `_raise_save_errors` is called.

        INVARIANT: a rank whose disk is full does not let the other ranks wait in a collective call.
        """
        try:
            yield
        except RunError:
            raise
        except Exception as error:  # for a full disk tokenizers raises Exception, torch RuntimeError
            logger.info(f"could not write to {where}", exc_info=error)
            self._save_errors.append(f"{where}: {error_line(error)[:300]}")

    def _raise_save_errors(self) -> None:
        """Raise `SaveError` on all ranks if any rank has kept an error; it holds all of them. Collective."""
        errors, self._save_errors = gather_object(self._save_errors), []
        if errors:
            raise SaveError("; ".join(errors))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint. If this fails, training goes on, and the next checkpoint is tried again."""
        try:
            self._write_checkpoint(model, trial)
        except SaveError as error:
            self._snapshot.forget_best(self.state)
            self._warn(
                f"The checkpoint of step {self.state.global_step} could not be saved: {error}. Free space there. "
                f"Training goes on, and the next checkpoint is tried again. {self._last_saved()}"
            )

    def _write_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a complete checkpoint, or remove the incomplete one and raise `SaveError` on all ranks.

        Raises `NotFinite` on all ranks if a weight is not finite.
        """
        self._check_weights()
        path = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        whole = False
        try:
            with self._writing(path):
                if self.args.should_save:  # of an older run: the file means that all of it is there
                    (path / "trainer_state.json").unlink(missing_ok=True)
                    if self._is_sharded:  # no rank can stop in the middle of the save
                        needed = bytes_to_save(self.model, self.args.optim, True)[1]
                        check_room(self.args.output_dir, needed, needed, "a checkpoint", "output_dir")
            if self._is_sharded:
                self._raise_save_errors()
            with nullcontext() if self._is_sharded else self._writing(path):
                super()._save_checkpoint(model, trial)
            whole = True  # unless trainer_state.json is incomplete
            self._raise_save_errors()
        except SaveError as error:
            only_model = self.args.save_only_model
            whole = whole and self.args.should_save and bool(read_json(path / "trainer_state.json"))
            whole = whole and (only_model or not checkpoint_damage(path))
            if not any(gather_object([whole])):
                if self.args.should_save:
                    with suppress(OSError):
                        (path / "trainer_state.json").unlink(missing_ok=True)
                    shutil.rmtree(path, ignore_errors=True)
                raise
            self._warn(f"{path} is complete, but a later operation failed: {error}.")  # removal of older ones, the Hub
        if not self.args.save_only_model:
            self._saved[self.state.global_step] = path

    def create_model_card(self, *args, **kwargs) -> None:
        """TRL's model card, written before each checkpoint. A failure must not prevent the checkpoint."""
        try:
            super().create_model_card(*args, **kwargs)
        except OSError as error:
            self._warn(f"The model card in {self.args.output_dir} could not be written: {error_line(error)}.")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's `save_model`. Raises `SaveError` on all ranks if any rank could not write. Collective."""
        super().save_model(output_dir, _internal_call)
        self._raise_save_errors()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with self._writing(output_dir or self.args.output_dir):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with nullcontext() if self._is_sharded else self._writing(output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with self._writing(output_dir):
            if self.args.should_save:
                self.in_flight.save(Path(output_dir))
            super()._save_rng_state(output_dir)
            if self.args.should_save:
                self._write_record(Path(output_dir))
        self._raise_save_errors()  # INVARIANT: ranks meet; trainer_state.json is written after this, as the last file

    def _write_record(self, folder: Path) -> None:
        record = self._run_record() | ({"evaluation_due": True} if self._evaluation_due else {})
        (folder / RUN_RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's `log`. A log that cannot be written does not end the run.

        Of several evaluation datasets each has metrics of its own: `eval_NAME_reward`.
        """
        if self._of_data and not self.model.training:
            named = {f"{self._of_data}_{key}": values for key, values in self._metrics["eval"].items()}
            self._metrics["eval"].clear()
            self._metrics["eval"].update(named)
        try:
            super().log(logs, start_time)
        except OSError as error:
            logger.warning(f"Step {self.state.global_step}: a log could not be written: {error}. Training goes on.")
            self._metrics["train" if self.model.training else "eval"].clear()  # TRL does this after the failed call

    # -- stopping and going on --

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
                logger.warning(f"Got {signal.Signals(signum).name}: the run stops before the next optimizer step.")
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
            ValueError: `resume_from_checkpoint` is not a complete checkpoint.
            SaveError: The disk has no room for a checkpoint, or for a push of the weights.
            RunError: The nodes differ, no optimizer step was taken, a rank failed, or a signal asked the run to stop
                (`RunStopped`).
            ServerError: The server failed.
        """
        resume_from_checkpoint = checkpoint_of_all_ranks(resume_from_checkpoint, self.args.output_dir)
        self._saved, self._evaluation_due, step = {}, False, 0
        self.in_flight.begin(resume_from_checkpoint)
        check_same_on_nodes(self._run_record)
        self._check_room()
        if resume_from_checkpoint:
            path = Path(resume_from_checkpoint)
            check_tensors(path, self.model)
            step = TrainerState.load_from_json(path / "trainer_state.json").global_step
            self._saved[step] = path
            self._evaluation_due = bool((read_json(path / RUN_RECORD) or {}).get("evaluation_due"))
            self._warn_of_changes(path)
            if self.accelerator.is_main_process:
                print(f"resumed from {path}, after step {step}", flush=True)
            if self.args.sync_ref_model:
                logger.warning(
                    "sync_ref_model: checkpoints do not contain the reference model. It restarts from the base model."
                )
        eval_on_start = self.args.eval_on_start
        self._evaluation_due = self._evaluation_due and self.args.eval_strategy != "no"
        self.args.eval_on_start = eval_on_start or self._evaluation_due
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.eval_on_start = eval_on_start
            self.in_flight.cancel()
            self.env.close()
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, "end_of_run"):  # of ours, also where `on_train_end` is not reached
                    callback.end_of_run()
        if step and step == self.state.global_step:
            self._warn(
                f"Nothing was trained: {resume_from_checkpoint} is of step {step}, and the run ends at step "
                f"{self.state.max_steps}. Set a larger max_steps or num_train_epochs to continue training."
            )
        if self.state.global_step == 0:
            raise RunError(
                f"No optimizer step was taken, with {len(self.train_dataset)} prompts. The model is unchanged. "
                f"Expected at least {self.args.generation_batch_size // self.args.num_generations} prompts."
            )
        return result

    # -- conversations: what `in_flight` calls --

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _log_metrics(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)

    def _start_rollouts(self, rows: list[dict[str, Any]], indices: list[int]) -> RolloutBatch:
        """Start the conversations of these rows of this rank. Raises `ValueError` for a prompt without room."""
        return start_rollouts(self, rows, indices)

    def _sync_weights(self) -> None:
        """Push the weights if they changed since the last push. All ranks enter together; all raise the same error."""
        self._log_metrics(sync_weights(self))

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """`Trainer`'s method, without the extra step that it takes if a run is resumed at its end."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        if self._step % self.in_flight.num_passes:  # between two passes of a batch: else `in_flight` asks
            self._stop_if_asked()
        return super().get_batch_samples(self.in_flight.shown(epoch_iterator), num_batches, device)

    def save_where_it_stopped(self) -> str:
        """Save a checkpoint after a `RunError` or `ServerError`. Both are raised between two optimizer steps.

        Collective. Returns the message for the user.
        """
        step = self.state.global_step
        if step == 0:
            return "No step was completed, so there is nothing to save."
        due = f" The evaluation of step {step} was interrupted; it is made first of all." * self._evaluation_due
        if step not in self._saved:  # a folder of this step may exist: of another run, or incomplete
            self._snapshot.restore(self.state)  # the resumed run samples the failed batch again, unchanged
            self.args.save_only_model = False  # of which nothing could be continued
            try:
                self._save_somewhere(lambda: self._write_checkpoint(self.model, trial=None))
            except SaveError as error:
                return f"Step {step} could not be saved: {error}. {self._last_saved()}"
            except NotFinite as error:
                return f"{error} {self._last_saved()}"
        elif self._evaluation_due and self.args.should_save:
            with suppress(OSError):  # then the evaluation is not made up for
                self._write_record(self._saved[step])
        self.accelerator.wait_for_everyone()  # a launcher ends all ranks soon after the first one ends
        return f"The run is saved at step {step}. Continue with --resume_from_checkpoint {self._saved[step]}{due}"

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochOrder(super()._get_train_sampler(dataset), lambda: self.in_flight.epoch)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """`Trainer.evaluate` that does not change training: random numbers, and the mode that `log` goes by."""
        before, training = get_rng_state(), self.model.training
        self._of_data = str(kwargs.get("metric_key_prefix", "eval")).removeprefix("eval").removeprefix("_")
        self._metrics["eval"].clear()  # one that was broken off, or a prediction, may have left some
        try:
            return super().evaluate(*args, **kwargs)
        except (RunError, ServerError):
            self._evaluation_due = True
            raise
        finally:
            set_rng_state(before)
            self.model.train(training)

    def _determine_best_metric(self, metrics: dict[str, Any], trial: Any) -> bool:
        """`Trainer`'s method; an evaluation without any score is not the best one."""
        name = f"eval_{(self.args.metric_for_best_model or '').removeprefix('eval_')}"
        return metrics.get(name, 0.0) is not None and super()._determine_best_metric(metrics, trial)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False) -> dict:
        """`Trainer._evaluate`. An evaluation that is made up for counts for the schedule and the best checkpoint."""
        if not self._evaluation_due:
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        before, saved = get_rng_state(), str(self._saved[self.state.global_step])
        self._load_rng_state(saved)  # `Trainer` does so later, where training goes on
        metrics = super()._evaluate(trial, ignore_keys_for_eval)
        set_rng_state(before)
        self._evaluation_due = False
        if self._determine_best_metric(metrics, trial) and self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = saved
        return metrics


def train_or_save(trainer: ResumableTrainer) -> None:
    """Train to the end and save the model. After a failure or a signal, save a checkpoint and exit.

    The exit code is 1 after a failure, and 128 plus the number of the signal after a signal.
    """
    with trainer.stop_on_signals():
        try:
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        except CheckpointError as error:  # nothing was trained, and what is there is no state to save
            logger.error("the run cannot be resumed", exc_info=root_cause(error))
            sys.exit(f"error: {error}")
        except RunStopped as stopped:
            print(f"{stopped}. {trainer.save_where_it_stopped()}", file=sys.stderr, flush=True)
            sys.exit(128 + stopped.signum)
        except (RunError, ServerError) as error:
            logger.error("training stopped", exc_info=root_cause(error))
            sys.exit(f"error: {error}\n{trainer.save_where_it_stopped()}")
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            logger.error("training stopped", exc_info=error)
            sys.exit(
                f"error: step {trainer.state.global_step}: another process of this run is gone, or does not "
                f"answer: {error}\nNothing can be saved without it. Start all nodes again with "
                "--resume_from_checkpoint last, which uses the last complete checkpoint."
            )
        finally:  # not as the interpreter ends: it looks up no host's name any more, and adapters would stay
            if getattr(trainer, "client", None) is not None:
                trainer.client.close()
        try:
            trainer.save_trained_model()  # a signal does not interrupt this
        except NotFinite as error:
            sys.exit(f"error: {error} {trainer._last_saved()}")
        except SaveError as error:
            sys.exit(f"error: {error}")
