"""Saves checkpoints and the trained model to disks that may be full. A failed checkpoint does not end the run."""

from __future__ import annotations

import functools
import json
import logging
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from trl import GRPOTrainer

from mt_grpo.checkpoints import RUN_RECORD, check_tensors, checkpoint_damage, load_as_saved, read_json
from mt_grpo.disk_room import bytes_to_save, check_room
from mt_grpo.nodes import apply_ddp_timeout, check_output_on_nodes, save_weights_on_each_node
from mt_grpo.ranks import RunError
from mt_grpo.run_record import LORA_KEYS, NOT_TRAINED, changed_settings, dataset_sha256, sha256, source_sha256
from mt_grpo.snapshots import StepEndSnapshot

logger = logging.getLogger(__name__)


class SaveError(RunError):
    """A rank could not write a file. All ranks raise this error together."""


class NotFinite(RunError):
    """A gradient or a weight is NaN or infinite. All ranks raise this error together, before it is saved."""


def weights_not_finite(model: Any) -> list[str]:
    """The names of the parameters that hold a NaN or an infinite number. Of a sharded model, in this rank's shards.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> layer.bias.data[0] = float("nan")
    >>> weights_not_finite(layer)
    ['bias']
    """
    names = []
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "ds_tensor", parameter).detach()
        shard = shard.to_local() if hasattr(shard, "to_local") else shard
        whole = (
            shard.is_floating_point() and shard.element_size() > 1
        )  # numbers of 8 bits are frozen, of a quantised base
        if whole and not bool(shard.isfinite().all()):
            names.append(name)
    return names


class SavingTrainer(GRPOTrainer):
    """`GRPOTrainer` that loses no weights when a disk is full, and warns if a resumed run has other settings.

    A subclass sets `backend`, `env`, `reward_weights` and `turn_advantage_coef`.
    """

    SAVE_ATTEMPTS, SAVE_PAUSE = 30, 60.0  # attempts to save the trained model; seconds between them

    def __init__(self, model: Any, *args, peft_config: Any = None, callbacks: list | None = None, **kwargs):
        self._snapshot = StepEndSnapshot()
        self._saved: dict[int, Path] = {}  # step -> checkpoint that this run wrote or was resumed from
        self._save_errors: list[str] = []  # of this rank, not yet raised on all ranks
        self._model_name = model if isinstance(model, str) else model.config._name_or_path
        self._peft_config = peft_config
        self._stop_signal: int | None = None
        if config := kwargs.get("args"):  # before weights are loaded
            apply_ddp_timeout(config.ddp_timeout)
            check_output_on_nodes(config.output_dir, config.save_on_each_node)
        super().__init__(
            model, *args, peft_config=peft_config, callbacks=[self._snapshot, *(callbacks or [])], **kwargs
        )
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
        """What determines the results of a run: the settings, and hashes of the files and texts that they name."""
        settings = {k: v for k, v in self.args.to_dict().items() if not k.startswith(NOT_TRAINED)}
        lora = self._peft_config
        columns = {
            "model_name_or_path": self._model_name,
            "lora": lora and {k: getattr(lora, k, None) for k in LORA_KEYS},
            "world_size": self.args.world_size, "save_on_each_node": self.args.save_on_each_node,
            "turn_advantage_coef": self.turn_advantage_coef,
            "reward_weights": [round(weight, 6) for weight in self.reward_weights.tolist()],
            "rewards_sha256": {n: source_sha256(f) for n, f in zip(self.reward_func_names, self.reward_funcs)},
            "environment_sha256": source_sha256(type(self.env)),
            "tools_sha256": {name: source_sha256(tool) for name, tool in self.env.tools.items()},
            "system_prompt_sha256": sha256(str(self.env.system_prompt)),
            "chat_template_sha256": sha256(str(self.processing_class.chat_template)),
            "dataset_rows": len(self.train_dataset), "dataset_sha256": self._dataset_sha256,
        }  # fmt: skip
        plain = json.dumps(settings | columns, default=lambda value: sorted(value) if isinstance(value, set) else "?")
        return json.loads(plain)

    @functools.cached_property
    def _dataset_sha256(self) -> str:
        return dataset_sha256(self.train_dataset)

    def _warn_of_changes(self, checkpoint: Path) -> None:
        """Warn once of all settings that differ from the checkpoint's."""
        if not self.accelerator.is_main_process:
            return
        record = read_json(checkpoint / RUN_RECORD)
        if record is None:
            self._warn(f"{checkpoint} has no {RUN_RECORD}: whether it was trained with these settings is unknown.")
        elif changed := changed_settings(record, self._run_record()):
            self._warn(
                f"{checkpoint} was trained with other settings. The run goes on with these:\n  " + "\n  ".join(changed)
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """`Trainer`'s, for models, too, whose weights are saved under other names."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self._is_sharded:
            load_as_saved(Path(resume_from_checkpoint), self.model)

    # -- numbers that are none --

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """`Trainer`'s, which is asked for before each optimizer step. Raises `NotFinite` on all ranks.

        INVARIANT: no optimizer step is taken with a gradient that is not finite: one such step leaves no weight that
        is a number. With fp16 the scaler of the gradients skips these steps. DeepSpeed takes its step within the
        backward pass, before this is asked for: there `_check_weights` keeps such weights out of checkpoints.
        """
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if grad_norm is not None and not self.args.fp16 and not math.isfinite(float(grad_norm)):
            step = self.state.global_step
            taken = "no step is taken with it, and the weights are as before"
            if self.is_deepspeed_enabled:
                taken = "DeepSpeed has taken the step, and weights that are not finite are not saved"
            raise NotFinite(
                f"Step {step}: the norm of the gradient is {float(grad_norm)}: {taken}. Look at the rollouts of step "
                f"{step} in {self.args.output_dir} (rewards, "
                "advantages, logprobs); lower learning_rate, turn_advantage_coef or the weights of rewards."
            )
        return grad_norm

    def _check_weights(self) -> None:
        """Raise `NotFinite` on all ranks if any weight is not finite. Collective."""
        if names := [name for rank in gather_object([weights_not_finite(self.model)]) for name in rank]:
            raise NotFinite(
                f"Step {self.state.global_step}: {len(set(names))} weights are not finite, such as {names[0]}. They "
                "are not saved. Lower learning_rate."
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
                    f"The trained model could not be saved in output_dir: {error}. It is in {folder}: move it from "
                    "there, before the temporary directory is cleaned."
                )
            if attempt + 1 == self.SAVE_ATTEMPTS or self._is_stopped_within(self.SAVE_PAUSE):
                break
            self._warn(
                f"The trained model could not be saved: {error}. Make room in {self.args.output_dir} or "
                f"{tempfile.gettempdir()}: trying again, {attempt + 2} of {self.SAVE_ATTEMPTS}."
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
        """The message that tells the user from which checkpoint the run can be resumed."""
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
            self._save_errors.append(f"{where}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

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
                f"No checkpoint of step {self.state.global_step}: {error}. Make room there. Training goes on, and "
                f"the next checkpoint is tried again. {self._last_saved()}"
            )

    def _write_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a whole checkpoint, or remove the incomplete one and raise `SaveError` on all ranks.

        Raises `NotFinite` on all ranks where a weight is not finite.
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
            self._warn(f"{path} is whole, but after it: {error}.")  # removal of older ones, push to the Hub
        if not self.args.save_only_model:
            self._saved[self.state.global_step] = path

    def create_model_card(self, *args, **kwargs) -> None:
        """TRL's model card, written before each checkpoint. A failure must not prevent the checkpoint."""
        try:
            super().create_model_card(*args, **kwargs)
        except OSError as error:
            self._warn(f"No model card in {self.args.output_dir}: {error}.")

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
            super()._save_rng_state(output_dir)
            if self.args.should_save:
                (Path(output_dir) / RUN_RECORD).write_text(json.dumps(self._run_record(), indent=1), encoding="utf-8")
        self._raise_save_errors()  # INVARIANT: ranks meet; trainer_state.json is written after this, as the last file

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's `log`. A log that cannot be written does not end the run."""
        try:
            super().log(logs, start_time)
        except OSError as error:
            logger.warning(f"Step {self.state.global_step}: a log could not be written: {error}. Training goes on.")
            self._metrics["train" if self.model.training else "eval"].clear()  # TRL does this after the failed call
