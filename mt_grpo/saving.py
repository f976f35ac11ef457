"""Checkpoints and the trained model on disks that may be full: a failed save costs nothing but itself."""

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

from mt_grpo.checkpoints import RUN_RECORD, checkpoint_damage, read_json
from mt_grpo.disk_room import bytes_to_save, check_room
from mt_grpo.ranks import RunError
from mt_grpo.run_record import LORA_KEYS, NOT_TRAINED, changed_settings, dataset_sha256, sha256, source_sha256
from mt_grpo.snapshots import StepEndSnapshot

logger = logging.getLogger(__name__)


class SaveError(RunError):
    """What some rank could not write: raised by all ranks together."""


class SavingTrainer(GRPOTrainer):
    """`GRPOTrainer` that loses no weights to a full disk, and says what a resumed run has otherwise.

    A subclass sets `backend`, `env`, `reward_weights` and `turn_advantage_coef`, which belong to the record of a run.
    """

    SAVE_ATTEMPTS, SAVE_PAUSE = 30, 60.0  # of the trained model, and seconds between two of them

    def __init__(self, model: Any, *args, peft_config: Any = None, callbacks: list | None = None, **kwargs):
        self._snapshot = StepEndSnapshot()
        self._saved: dict[int, Path] = {}  # by step: the checkpoints that this run wrote, and the one it began from
        self._save_errors: list[str] = []  # of this rank, since ranks met last
        self._model_name = model if isinstance(model, str) else model.config._name_or_path
        self._peft_config = peft_config
        self._stop_signal: int | None = None
        super().__init__(
            model, *args, peft_config=peft_config, callbacks=[self._snapshot, *(callbacks or [])], **kwargs
        )

    # -- room, and what a resumed run has otherwise --

    def _check_room(self) -> None:
        """Raises `SaveError` on all ranks where the first checkpoint, or a push of the weights, has no room."""
        args, error = self.args, None
        model, checkpoint = bytes_to_save(self.model, args.optim, self._is_sharded)
        saves = args.save_strategy != "no"
        weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.model.parameters())
        pushes = self.backend == "server" and args.weight_sync_dir and args.weight_sync != "nccl"
        try:
            if args.should_save:
                one = model if args.save_only_model else checkpoint
                by_steps = args.save_strategy == "steps" and args.save_steps >= 1 and args.max_steps > 0
                count = math.ceil(args.max_steps / args.save_steps) if by_steps else 1
                count = min(count, (args.save_total_limit or count) + 1)
                what = "a checkpoint and the trained model" if saves else "the trained model"
                least = model + (one if saves else 0)
                check_room(args.output_dir, least, model + max(checkpoint, one * count), what, "output_dir")
            if pushes and self.accelerator.is_main_process:
                check_room(args.weight_sync_dir, weights, weights, "a push of the weights", "weight_sync_dir")
        except ValueError as raised:
            error = str(raised)
        if errors := gather_object([error] if error else []):
            raise SaveError(errors[0])

    @property
    def _is_sharded(self) -> bool:
        return self._dist.is_fsdp or self.is_deepspeed_enabled

    def _run_record(self) -> dict[str, Any]:
        """What decides the numbers of a run: the settings, and the contents of what they name."""
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
        """One warning with all settings that are others than those of the checkpoint."""
        if not self.accelerator.is_main_process:
            return
        record = read_json(checkpoint / RUN_RECORD)
        if record is None:
            self._warn(f"{checkpoint} has no {RUN_RECORD}: whether it was trained with these settings is unknown.")
        elif changed := changed_settings(record, self._run_record()):
            self._warn(
                f"{checkpoint} was trained with other settings. The run goes on with these:\n  " + "\n  ".join(changed)
            )

    # -- the trained model --

    def save_trained_model(self) -> None:
        """Save the model and `trainer_state.json` into `output_dir`. Collective.

        Without room there the model goes into the temporary directory; without room in both this waits for some.
        Raises `SaveError` where the model is not in `output_dir`, with the place where it is.
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
        """Collective: wait, and tell whether a signal came to any rank."""
        for begun in range(math.ceil(seconds)):
            if any(gather_object([self._stop_signal is not None])):
                return True
            time.sleep(min(1.0, seconds - begun))
        return False

    def _save_somewhere(self, save: Callable[[], None]) -> tuple[str, SaveError | None]:
        """Call `save`, which writes into `args.output_dir`; if that fails, again for a new folder among the temporary.

        Collective. Returns the folder that took it, and the first error. Raises `SaveError` if both failed.
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
        folder = self.args.output_dir
        try:
            self.save_model(folder)
            with self._writing(folder):
                self.save_state()
            self._raise_save_errors()
        except SaveError:
            if self.args.should_save:  # an older model's shards beside new ones: not to be taken for a model
                for index in Path(folder).glob("*.index.json"):
                    index.unlink(missing_ok=True)
            raise

    def _warn(self, text: str) -> None:
        """Once, of what all ranks know."""
        if self.accelerator.is_main_process:
            logger.warning(text)

    def _last_saved(self) -> str:
        """Where the run can go on from, to be told to the user."""
        whole = [path for _, path in sorted(self._saved.items()) if (path / "trainer_state.json").is_file()]
        return f"Continue with --resume_from_checkpoint {whole[-1]}" if whole else "There is no earlier checkpoint."

    # -- checkpoints --

    @contextmanager
    def _writing(self, where: str | Path) -> Iterator[None]:
        """Around what a rank writes by itself: it keeps an error for the place where the ranks meet next.

        INVARIANT: no rank leaves the others in a collective call because its disk is full.
        """
        try:
            yield
        except RunError:
            raise
        except Exception as error:  # tokenizers raises Exception, torch RuntimeError for a full disk
            logger.info(f"could not write to {where}", exc_info=error)
            self._save_errors.append(f"{where}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _raise_save_errors(self) -> None:
        """Collective: raises `SaveError` on all ranks with what any of them could not write."""
        errors, self._save_errors = gather_object(self._save_errors), []
        if errors:
            raise SaveError("; ".join(errors))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that cannot be saved costs nothing but itself: training goes on, and the next is tried."""
        try:
            self._write_checkpoint(model, trial)
        except SaveError as error:
            self._snapshot.forget_best(self.state)
            self._warn(
                f"No checkpoint of step {self.state.global_step}: {error}. Make room there. Training goes on, and "
                f"the next checkpoint is tried again. {self._last_saved()}"
            )

    def _write_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a whole checkpoint, or remove what there is of it and raise `SaveError` on all ranks."""
        path = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        whole = False
        try:
            with self._writing(path):
                if self.args.should_save:  # an older run's: it says that all of it is there
                    (path / "trainer_state.json").unlink(missing_ok=True)
                    if self._is_sharded:  # in the middle of which no rank can leave
                        needed = bytes_to_save(self.model, self.args.optim, True)[1]
                        check_room(self.args.output_dir, needed, needed, "a checkpoint", "output_dir")
            if self._is_sharded:
                self._raise_save_errors()
            with nullcontext() if self._is_sharded else self._writing(path):
                super()._save_checkpoint(model, trial)
            whole = True  # unless trainer_state.json is torn
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
            self._warn(f"{path} is whole, but after it: {error}.")  # older ones removed, a push to the Hub
        if not self.args.save_only_model:
            self._saved[self.state.global_step] = path

    def create_model_card(self, *args, **kwargs) -> None:
        """TRL's, written before each checkpoint into `output_dir`, where it is nothing to lose a checkpoint for."""
        try:
            super().create_model_card(*args, **kwargs)
        except OSError as error:
            self._warn(f"No model card in {self.args.output_dir}: {error}.")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
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
        self._raise_save_errors()  # INVARIANT: ranks meet; trainer_state.json, written next, is the last file of all

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's; a log that cannot be written does not end the run."""
        try:
            super().log(logs, start_time)
        except OSError as error:
            logger.warning(f"Step {self.state.global_step}: a log could not be written: {error}. Training goes on.")
            self._metrics["train" if self.model.training else "eval"].clear()  # as TRL does behind what failed
