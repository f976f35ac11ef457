"""A trainer's backend, and runs that stop on a signal or an error, save a checkpoint and continue from it exactly."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model, set_seed
from torch.utils.data import Sampler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerCallback, TrainerState
from trl import GRPOTrainer

from mt_grpo.base.errors import RunError, RunStopped, ServerError, error_line, tell_once
from mt_grpo.base.files import read_json
from mt_grpo.base.ranks import on_main_process, raise_on_all_ranks
from mt_grpo.base.rows import prompts_of, row_text
from mt_grpo.generation.in_process import InProcessBackend, neutral_generation
from mt_grpo.generation.server_pool import ServerPool
from mt_grpo.generation.weight_sync import WeightSync
from mt_grpo.generation.weights import PolicyWeights, slots_of
from mt_grpo.images.pictures import TOWER, is_picture, reader_of, share_marks
from mt_grpo.rollout import Rollout, StopReason
from mt_grpo.run.checkpoints import (
    RUN_RECORD,
    CheckpointError,
    changed_settings,
    checkpoint_to_resume,
    dataset_sha256,
    get_rng_state,
    load_first_adapter,
    load_missing,
    loading,
    run_record,
    set_rng_state,
    weights_not_finite,
)
from mt_grpo.run.in_flight import EpochOrder, InFlight, RolloutBatch, RowList
from mt_grpo.training.policy_scores import asked_of

logger = logging.getLogger(__name__)

LOWER = "Lower learning_rate or the weights of rewards, and start with the last checkpoint as model_name_or_path."


class NotFinite(RunError):
    """A gradient or a weight is NaN or infinite. All ranks raise this error together, before it is saved."""


# accelerate names the device of several processes on a CPU `cpu:0`, from which `torch.load` restores no optimizer.
torch.serialization.register_package(30, lambda storage: None, lambda data, where: data if where == "cpu:0" else None)


class WeightCounter(TrainerCallback):
    """Counts weight changes. `global_step` cannot: loading a checkpoint changes the weights at the same step."""

    version = loads = 0

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.version += 1

    def on_train_begin(self, args, state, control, **kwargs):  # after resume_from_checkpoint has loaded
        state.compute_steps(args, state.max_steps)  # else save_steps and others are the checkpoint's
        self.version += 1
        self.loads += 1

    on_train_end = on_train_begin  # after load_best_model_at_end has loaded


class ResumableTrainer(GRPOTrainer):
    """`GRPOTrainer` that can be stopped at any time, and trains on exactly as without the stop when it is resumed."""

    reads_more_than_advantages = False  # whether the loss has a term that is not 0 where advantages are 0
    FP16_SKIPS = 50  # steps in a row, which fp16's scaler skips; from 65,536 a scale is 1 after 16 of them

    def __init__(self, model: Any, *args, peft_config: Any = None, callbacks: list | None = None, **kwargs):
        self.in_flight = InFlight(self)
        self._weight_counter = WeightCounter()
        self.weight_sync: WeightSync | None = None  # with a server
        self._saved: dict[int, Path] = {}  # step -> checkpoint that this run wrote or was resumed from
        self._loading: str | None = None  # the checkpoint to resume from, while its weights are loaded
        self._model_name = model if isinstance(model, str) else model.config._name_or_path
        self._peft_config = peft_config
        self._stop_signal, self._interruptible = None, False  # its number; whether it raises at once
        self._num_skipped = 0  # steps in a row whose gradient was not finite
        self._of_data = ""  # the name of the dataset that is evaluated, if there are several
        config = kwargs["args"]
        check_output_on_nodes(config.output_dir, config.save_on_each_node)
        if config.beta != 0.0 and "FSDP_CPU_RAM_EFFICIENT_LOADING" in os.environ:
            # Else rank 0 alone reads them, and TRL 1.16 does not hand out the reference's: its KL would be noise.
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        callbacks = [self._weight_counter, *(callbacks or [])]
        super().__init__(model, *args, peft_config=peft_config, callbacks=callbacks, **kwargs)
        self.reward_func_names = self.reward_functions.names  # TRL's own may be equal, and mix their metrics
        self.add_callback(self.in_flight)
        if config.save_on_each_node:  # transformers 5.17 writes weights on rank 0 only
            self.model.should_save_on_this_rank = lambda is_main_process: is_main_process

    def create_accelerator_and_postprocess(self) -> None:
        """With bf16, accelerate would add up the gradients of passes in it, and FSDP2 round logprobs to it."""
        super().create_accelerator_and_postprocess()
        self.accelerator.ddp_handler.gradient_as_bucket_view = True  # else DDP keeps a second copy of every gradient
        state = self.accelerator.state
        if fsdp := state.fsdp_plugin if self.is_fsdp_enabled else None:
            self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True  # into sharded float32 gradients
            if is_peft_model(self.model) and (fsdp.activation_checkpointing or not fsdp.reshard_after_forward):
                # Modules of the one have other names: an adapter is saved empty. Without the other `beta` freezes it.
                raise ValueError("fsdp_config: a LoRA needs reshard_after_forward and no activation_checkpointing.")
            if fsdp.fsdp_version == 2 and (policy := fsdp.mixed_precision_policy):
                fsdp.mixed_precision_policy = replace(policy, output_dtype=None, reduce_dtype=torch.float32)
        if self.is_deepspeed_enabled:
            state.deepspeed_plugin.deepspeed_config.setdefault("data_types", {"grad_accum_dtype": "fp32"})

    @property
    def _is_sharded(self) -> bool:
        return self._dist.is_fsdp or self.is_deepspeed_enabled

    @functools.cached_property
    def _dataset_sha256(self) -> str:
        return dataset_sha256(self.train_dataset)

    def _go_on_from(self, path: Path) -> TrainerState:
        """Say from which step the run goes on, and what it changes. Returns the checkpoint's state."""
        state = TrainerState.load_from_json(path / TRAINER_STATE_NAME)
        self._saved[state.global_step] = path
        if self.accelerator.is_main_process:
            print(f"resumed from {path}, after step {state.global_step}", flush=True)
            if changed := "\n  ".join(changed_settings(read_json(path / RUN_RECORD) or {}, run_record(self))):
                logger.warning(f"{path} was trained with other settings. This run changes:\n  {changed}")
            if self.args.sync_ref_model:
                logger.warning("sync_ref_model: checkpoints lack the reference model. It restarts as the base model.")
        return state

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._loading = resume_from_checkpoint
        with loading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if not self._is_sharded:
                load_first_adapter(resume_from_checkpoint, self.model)
        self._loading = None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """`Trainer`'s method, which only warns of weights that a checkpoint lacks. Raises `CheckpointError`."""
        super()._issue_warnings_after_load(load_result)
        if not self._is_sharded:
            load_missing(self._loading or self.state.best_model_checkpoint, self.model, load_result.missing_keys)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with loading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None and not self.is_deepspeed_enabled and Path(checkpoint, "latest").is_file():
                raise ValueError("its optimizer is DeepSpeed's. Launch with hf_recipes/accelerate/zero3.yaml")
            if checkpoint is not None and not self._is_sharded:
                expected = self.optimizer.defaults.keys() - {"differentiable"}  # which torch adds as it loads
                for group in self.optimizer.param_groups:  # torch compares only the numbers of parameters
                    if lacking := sorted(expected - group.keys()):
                        raise ValueError(f"optim is another one, whose state lacks {', '.join(lacking)}")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with loading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The gradient norm before an optimizer step, or with DeepSpeed behind it. Raises `NotFinite` on all ranks."""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        finite = grad_norm is None or math.isfinite(float(grad_norm))
        self._num_skipped = 0 if finite else self._num_skipped + 1
        if not finite and (not self.args.fp16 or self._num_skipped >= self.FP16_SKIPS):
            what = f"the norm of the gradient is {float(grad_norm)}. The step is not taken, or not saved"
            raise NotFinite(f"Step {self.state.global_step}: {what}. {LOWER}")
        return grad_norm

    def _check_weights(self) -> None:
        """Raise `NotFinite` on all ranks if any weight is not finite. Collective."""
        if names := [name for rank in gather_object([weights_not_finite(self.model)]) for name in rank]:
            what = f"{len(set(names))} weights are not finite, such as {names[0]}. They are not saved"
            raise NotFinite(f"Step {self.state.global_step}: {what}. {LOWER}")

    def save_trained_model(self) -> None:
        """Save the model and `trainer_state.json` into `output_dir`. Collective."""
        self._check_weights()
        if self.is_fsdp_enabled:  # of shards, which FSDP2 saves by default, `save_model` writes nothing
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        self.save_model()
        self.save_state()
        self._write_record(self.args.output_dir)

    def _write_record(self, folder: str) -> None:
        if self.args.should_save:
            Path(folder, RUN_RECORD).write_text(json.dumps(run_record(self), indent=1), encoding="utf-8")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """`Trainer`'s method, with the prompts in flight. Raises `NotFinite` on all ranks instead of saving NaN."""
        self._check_weights()
        path = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save:  # of an older run: the file means that all of the checkpoint is there
            (path / TRAINER_STATE_NAME).unlink(missing_ok=True)
        self.state.stateful_callbacks["in_flight"] = self.in_flight.state
        super()._save_checkpoint(model, trial)
        if not self.args.save_only_model:
            self._saved[self.state.global_step] = path

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self._write_record(output_dir)
        self.accelerator.wait_for_everyone()  # INVARIANT: trainer_state.json is written after the files of all ranks

    def _last_saved(self) -> str:
        """The message that says from which checkpoint the run can be resumed."""
        if not self._saved:
            return "There is no earlier checkpoint."
        return f"Continue with --resume_from_checkpoint {self._saved[max(self._saved)]}"

    def save_where_it_stopped(self) -> str:
        """Save a checkpoint after an error between two steps, and return the message for the user. Collective."""
        step = self.state.global_step
        if step == 0:
            return "No step was completed, so there is nothing to save."
        if step not in self._saved:
            rng, self.state.num_input_tokens_seen = self.in_flight.step_end
            set_rng_state(rng)  # the resumed run samples the failed batch again, unchanged
            self.args.save_only_model = False  # of which nothing could be continued
            try:
                self._save_checkpoint(self.model, trial=None)
            except Exception as error:  # NotFinite, or the disk is full: why the run stopped has to be said
                return f"{error} {self._last_saved()}"
        self.accelerator.wait_for_everyone()  # a launcher ends all ranks soon after the first one ends
        return f"The run is saved at step {step}. {self._last_saved()}"

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """A context in which SIGTERM, SIGHUP and Ctrl-C raise `RunStopped`, in rollouts or after an optimizer step."""

        def handle(signum, frame):
            if os.getpid() != process:  # a child that a tool forked, and ends
                os._exit(128 + signum)
            if self._stop_signal is None:  # launchers send the first one twice
                self._stop_signal = signum
                logger.warning(f"Got {signal.Signals(signum).name}: the run stops before the next optimizer step.")
                if self._interruptible:
                    raise KeyboardInterrupt  # many rewards catch any `Exception`

        process, signals = os.getpid(), [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        previous = {s: signal.signal(s, handle) for s in signals if signal.getsignal(s) is not signal.SIG_IGN}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _stop_if_asked(self) -> None:
        """Raise `RunStopped` on all ranks if any rank got a signal. Collective."""
        raise_on_all_ranks(None, "", self.state.global_step, self._stop_signal)

    def _on_all_ranks(self, function: Callable[[], tuple[int, ...] | None], what: str) -> list[int]:
        """Run `function`, which may fail on any rank, and return the sums of its numbers over the ranks. Collective.

        All ranks raise an error of any rank. A signal interrupts `function`, unless generation is a collective call.
        """
        error, stopped, counts = None, None, ()
        try:
            try:
                self._interruptible = not getattr(self.llm, "collective", False)
                if self._stop_signal is None or not self._interruptible:
                    counts = function() or ()
                if self._interruptible and self._stop_signal is not None:  # `function` may have caught the error
                    raise KeyboardInterrupt
            finally:
                self._interruptible = False
        except KeyboardInterrupt:
            if self._stop_signal is None:
                raise
            stopped = self._stop_signal
        except Exception as raised:  # raised on all ranks below: the others would wait for ever
            error, stopped = raised, self._stop_signal
        return raise_on_all_ranks(error, what, self.state.global_step, stopped, counts)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> Any:
        """`Trainer.train` that leaves no conversation open. Raises `ValueError` for an incomplete checkpoint."""
        checkpoint = checkpoint_of_all_ranks(resume_from_checkpoint, self.args.output_dir)
        self._saved = {}
        check_same_on_nodes(lambda: run_record(self))
        begun = self._go_on_from(Path(checkpoint)) if checkpoint else None
        saved = begun.stateful_callbacks if begun is not None else {}
        self.in_flight.begin(None if self.args.ignore_data_skip else saved.get("in_flight"))
        try:
            result = super().train(checkpoint, *args, **kwargs)
        finally:
            self.in_flight.cancel()
            self.env.close()
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, "end_of_run"):  # of ours, also where `on_train_end` is not reached
                    callback.end_of_run()
        step = self.state.global_step
        if begun is not None and begun.global_step == step and self.accelerator.is_main_process:
            what = f"{checkpoint} is of step {step}, and the run ends at step {self.state.max_steps}"
            logger.warning(f"Nothing was trained: {what}. Set a larger max_steps or num_train_epochs.")
        if step == 0:
            raise RunError(f"No optimizer step was taken, with {len(self.train_dataset)} prompts.")
        return result

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """`Trainer`'s method, without the extra step that it takes if a run is resumed at its end."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        if self._step % self.in_flight.num_micro_batches:  # between two of a batch: else `in_flight` asks
            self._stop_if_asked()
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochOrder(super()._get_train_sampler(dataset), lambda: self.in_flight.epoch)

    def evaluate(self, eval_dataset: Any = None, *args, **kwargs) -> dict[str, float]:
        """`Trainer.evaluate` that does not change training: random numbers, and the mode that `log` goes by."""
        if eval_dataset and not isinstance(eval_dataset, str | dict) and self.env.environments is None:
            if "prompt" not in eval_dataset[0]:  # which would be an empty one
                raise ValueError("evaluate: the first row has no prompt. The constructor alone makes one of question.")
        before, training = get_rng_state(), self.model.training
        self._of_data = str(kwargs.get("metric_key_prefix", "eval")).removeprefix("eval").removeprefix("_")
        self._metrics["eval"].clear()  # one that was broken off, or a prediction, may have left some
        try:
            return super().evaluate(eval_dataset, *args, **kwargs)
        except BaseException:
            logger.warning(f"The evaluation of step {self.state.global_step} ends here. A resumed run skips it.")
            self.in_flight.cancel()
            self.env.close()
            raise
        finally:
            set_rng_state(before)
            self.model.train(training)

    def close_client(self) -> None:
        """Close a server's client now: as the interpreter ends no host's name is found, and adapters would stay."""
        if getattr(self, "client", None) is not None:
            self.client.close()

    def _determine_best_metric(self, metrics: dict[str, Any], trial: Any) -> bool:
        """`Trainer`'s method; an evaluation without any score is not the best one."""
        name = f"eval_{(self.args.metric_for_best_model or '').removeprefix('eval_')}"
        if self.args.metric_for_best_model and name not in metrics:
            raise RunError(f"metric_for_best_model: {name} is not one of {', '.join(sorted(metrics))}.")
        return metrics.get(name, 0.0) is not None and super()._determine_best_metric(metrics, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's `log`. Of several evaluation datasets each has metrics of its own: `eval_NAME_reward`."""
        if self._of_data and not self.model.training:
            named = {f"{self._of_data}_{key}": values for key, values in self._metrics["eval"].items()}
            self._metrics["eval"].clear()
            self._metrics["eval"].update(named)
        super().log(logs, start_time)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _log_metrics(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)

    def _start_rollouts(self, rows: RowList, indices: list[int]) -> RolloutBatch:
        """Start the conversations of these rows of this rank. A test row that cannot be asked is a failed rollout."""
        own = [rows[i] for i in indices]
        rollouts = self._opened(own) if self.model.training else [self._opened_test_row(row) for row in own]
        for i, rollout in zip(indices, rollouts):
            rollout.place(self.accelerator.process_index * len(rows) + i)
            rollout.policy_version = self._weight_counter.version
        converse = functools.partial(self.env.converse_whole, sampling_params=self._sampling_params)
        version = self.weight_sync and self.weight_sync.pushed
        return RolloutBatch(rollouts, converse, self.llm, version, self._group_size)

    def _opened(self, rows: RowList) -> list[Rollout]:
        rollouts = self.env.start(prompts_of(rows), rows=rows)
        for rollout in rollouts:
            if len(rollout.prompt_ids) >= (self.env.max_model_len or math.inf):
                raise ValueError(f"A prompt has {len(rollout.prompt_ids)} tokens, which fills the model's context.")
        return rollouts

    def _opened_test_row(self, row: dict[str, Any]) -> Rollout:
        try:
            return self._opened([row])[0]
        except Exception as error:
            tell_once(f"Evaluation: the row {row_text(row)} cannot be asked ({error_line(error)}). Its rollouts fail.")
            prompt, ids = [{"role": "user", "content": row_text(row)}], [self.env.tokenizer.eos_token_id or 0]
            return Rollout(prompt, ids, row=row, stop_reason=StopReason.ENVIRONMENT_ERROR, error=error)

    def _sync_weights(self) -> None:
        """Push the weights if they changed since the last push. All ranks enter together; all raise the same error."""
        sync = self.weight_sync
        version = sync and f"{self.client.instance}-{self._weight_counter.version}"
        if sync is None or (sync.pushed == version and not sync.doubted):
            return
        if self._dist.is_fsdp:  # `Trainer` wraps the model anew when training starts
            sync.model = self.vllm_generation.model = self.model
        try:
            self._log_metrics(sync.sync(version, lambda: self._stop_signal, self._stop_if_asked))
        except ServerError as error:
            raise type(error)(f"Step {self.state.global_step}: {error}") from error.__cause__


def train_or_save(trainer: ResumableTrainer) -> None:
    """Train to the end and save the model. After a failure or a signal, save a checkpoint and exit."""
    failed = None
    with trainer.stop_on_signals(), ExitStack() as behind:
        behind.callback(trainer.close_client)
        try:
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        except RunStopped as stopped:
            print(f"{stopped}. {trainer.save_where_it_stopped()}", file=sys.stderr, flush=True)
            sys.exit(128 + stopped.signum)
        except (RunError, ServerError) as error:
            logger.error(f"training stopped: {error}", exc_info=error.__cause__)
            failed, trained = f"error: {error}", not isinstance(error, CheckpointError)
        if failed:  # here, where no frame of the error holds the activations of a pass that did not fit
            sys.exit(f"{failed}\n{trainer.save_where_it_stopped()}" if trained else failed)
        try:
            trainer.save_trained_model()  # a signal does not interrupt this
        except NotFinite as error:
            sys.exit(f"error: {error} {trainer._last_saved()}")


def pool_of(
    args: Any, client_class: type, tokenizer: Any, host: str | None = None, port: int | None = None
) -> ServerPool:
    """The servers that `args` name, one or several, or the one at this host or port."""
    listed = [] if host or port else args.vllm_server_base_url or []
    urls = [url.strip() for url in (listed.split(",") if isinstance(listed, str) else listed)]
    address = host or args.vllm_server_host, port or args.vllm_server_port
    times = {"timeout": args.vllm_server_timeout, "request_timeout": args.vllm_request_timeout}
    how = {"transport": args.weight_sync, "sync_dir": args.weight_sync_dir, "engine": args.rollout_engine, **times}
    clients = [
        client_class(*address, tokenizer, base_url=url, group_port=args.vllm_group_port + number, **how)
        for number, url in enumerate(urls or [None])
    ]
    # INVARIANT: a push pauses each server once, until all of its weights are there.
    if "" in urls or len({client.base_url for client in clients}) < len(clients):
        raise ServerError("vllm_server_base_url has an empty address, or one that is listed twice.")
    if args.vllm_server_base_url:  # `args` are logged and saved with the model; a password must not be
        args.vllm_server_base_url = ",".join(client.base_url for client in clients)
    return ServerPool(clients)


def connect_backend(trainer: Any, first_ids: Callable[[], list[int]]) -> Any:
    """Create a trainer's generation backend, and `weight_sync`, which checks pushes with the ids of a first prompt."""
    args, ends, model, accelerator = trainer.args, trainer.eos_token_ids, trainer.model, trainer.accelerator
    if (reader := reader_of(trainer.env.tokenizer)) is not None:
        from mt_grpo.images.forward import forbid

        forbid(reader, model, trainer.ref_model)
    if accelerator.num_processes > 1:
        share_marks(on_main_process)
    for name, parameter in model.named_parameters() if args.freeze_vision_tower else ():
        parameter.requires_grad_(parameter.requires_grad and not TOWER.search(name))
    if trainer.backend == "server":
        client = trainer.client
        client.instance = on_main_process(lambda: client.instance)  # all ranks expect the same version
        weights = trainer.vllm_generation = PolicyWeights(model, accelerator, trainer.processing_class, mode="none")
        weights.in_files = client.servers[0].engine.in_files
        _ = weights.expected  # raises for what an engine cannot get
        probe, num_adapters = probe_ids(first_ids(), trainer.env.tokenizer), slots_of(args.max_staleness)
        scores = "policy" in asked_of(trainer.reward_functions.functions) - set(trainer.train_dataset.column_names)
        trainer.weight_sync = WeightSync(client, model, weights, accelerator, probe, num_adapters, scores)
        return client
    if trainer.backend == "colocate":
        set_seed(args.seed, device_specific=True)  # the engine has set its own, the same in all runs
        stops = {"stop": list(trainer.env.format_of(trainer.env.tokenizer).stops), "stop_token_ids": ends}
        stops |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
        trainer.vllm_generation.generation_kwargs = {**(args.generation_kwargs or {}), **stops}
        if is_peft_model(model) and trainer.vllm_generation._dist.fsdp_version != 1:
            # TRL merges the adapter into the frozen weights and takes it out again: in half precision they drift.
            merged = PolicyWeights(model, accelerator, trainer.processing_class, mode="none")
            trainer.vllm_generation._iter_named_params = merged.named_weights
    else:
        trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = ends
    loads_seen = 0

    def generate(prompt_ids: list[list[int]], max_tokens: int) -> tuple[list, list | None]:
        nonlocal loads_seen
        if trainer.backend == "colocate":
            trainer.vllm_generation.max_completion_length = max_tokens
            if loads_seen != trainer._weight_counter.loads:  # a checkpoint was loaded at the same global_step
                loads_seen, trainer._last_loaded_step = trainer._weight_counter.loads, -1
        else:
            trainer.generation_config.max_new_tokens = trainer.generation_kwargs["max_new_tokens"] = max_tokens
        training = trainer.model.training
        shown: dict[str, Any] = {}
        if reader is not None:
            from mt_grpo.images.forward import inputs_of_requests

            prompt_ids, shown = inputs_of_requests(prompt_ids)
        try:
            with neutral_generation(trainer.model):
                return trainer._generate_single_turn(prompt_ids, None, shown, 1)
        finally:
            trainer.model.train(training)  # TRL's continuous batching leaves the model in training mode

    def any_rank(flag: bool) -> bool:
        return bool(accelerator.reduce(torch.tensor(int(flag), device=accelerator.device)).item())

    # TRL's generation is collective if the model is sharded.
    return InProcessBackend(generate, lambda i: i in trainer.eos_token_ids, any_rank if trainer._is_sharded else None)


def probe_ids(ids: list[int], tokenizer: Any) -> list[int]:
    """The ids whose logprobs prove a push: at most 256 of a prompt without images, after one that proves the tower."""
    text = [token for token in ids if not is_picture(token)][:256]
    return (tokenizer.drawn_ids() if reader_of(tokenizer) is not None else []) + text


# A run on several nodes: each sees the same checkpoint, and trains with the same settings and data.


def has_several_nodes() -> bool:
    """Whether the ranks of this run are on several nodes, according to torchrun's environment variables."""
    local, world = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return local < world and torch.distributed.is_initialized()


def raise_for_all(error: str | None, kind: type[Exception] = ValueError) -> None:
    """Raise `kind` on all ranks if any rank has an error. Collective."""
    where = f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}"
    if errors := [text for text in gather_object([error and f"{where}: {error}"]) if text]:
        raise kind(errors[0])


def checkpoint_of_all_ranks(wanted: str | bool | None, output_dir: str) -> str | None:
    """The checkpoint to resume. Collective on several nodes: `ValueError` unless all ranks find the one of rank 0."""
    if not wanted or not has_several_nodes():
        return checkpoint_to_resume(wanted, output_dir)
    error = found = name = None
    try:
        found = checkpoint_to_resume(wanted, output_dir)
        # Two runs that sampled otherwise have seen another number of tokens.
        tokens = (read_json(Path(found, TRAINER_STATE_NAME)) or {}).get("num_input_tokens_seen")
        name = f"{Path(found).name} after {tokens} tokens"
    except ValueError as raised:
        error = f"{raised} Every node needs the checkpoint, in an output_dir that all share or one of its own."
    raise_for_all(error)
    first = gather_object([name])[0]
    raise_for_all(None if name == first else f"resume_from_checkpoint={wanted!r} is {name}, but {first} on rank 0.")
    return found


def check_output_on_nodes(output_dir: str, save_on_each_node: bool | None) -> None:
    """Raise `ValueError` unless nodes share `output_dir`, or each saves all in its own. None: nothing is saved."""
    if not has_several_nodes() or save_on_each_node is None:
        return
    folder = Path(output_dir, f".rank-{secrets.token_hex(6)}")  # a new name, which no node has asked for
    folder.mkdir(parents=True)
    names, error = gather_object([folder.name]), None
    seen = sum(Path(output_dir, name).exists() for name in names)
    gather_object([seen])  # nobody removes a folder that another rank still looks for
    folder.rmdir()
    is_sharded = any(os.environ.get(f"ACCELERATE_USE_{key}", "").lower() == "true" for key in ("FSDP", "DEEPSPEED"))
    if save_on_each_node and is_sharded:
        error = "save_on_each_node is not supported with FSDP or DeepSpeed, where only rank 0 gets complete weights."
    elif save_on_each_node and seen > int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        error = f"save_on_each_node: true, but nodes share output_dir={output_dir!r}."
    elif not save_on_each_node and seen < len(names):
        what = f"output_dir={output_dir!r} is shared by {seen} of {len(names)} ranks"
        error = f"{what}. Put it on a file system of all nodes, or set save_on_each_node: true."
    raise_for_all(error)


def check_same_on_nodes(record: Callable[[], dict[str, Any]]) -> None:
    """Raise `RunError` if a rank on another node would train with other settings or data. Collective."""
    if has_several_nodes():
        own = record() | {"model_name_or_path": None}  # a path on each node; the weights are those of rank 0
        changed = [line.partition(" (")[0] for line in changed_settings(gather_object([own])[0], own)]
        text = "\n  ".join(["this node differs from the node of rank 0:", *changed])
        raise_for_all(f"{text}\nStart all nodes with the same files and arguments." if changed else None, RunError)
