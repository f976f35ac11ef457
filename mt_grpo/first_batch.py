"""The first batch of rollouts, looked at: a few lines when a run begins, and the whole screen of `--preflight`."""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from mt_grpo.batch_facts import facts_of_batches, facts_of_settings
from mt_grpo.progress import ProgressLine, duration
from mt_grpo.ranks import RunError, on_main_process
from mt_grpo.readings import Facts, Trouble, troubles
from mt_grpo.run_plan import peak_memory, plan, prompt_text, seconds_of_run
from mt_grpo.server_errors import ServerError
from mt_grpo.snapshots import get_rng_state, set_rng_state

logger = logging.getLogger(__name__)
MOST_BATCHES = 4  # of a preflight in which no group has signal, as with a reward that one rollout of a hundred gets
PHASES = {
    "_generate_and_score_completions": "batch", "_sync_weights": "sync", "_roll_out": "rollouts",
    "_calculate_rewards": "rewards", "training_step": "training",
}  # fmt: skip


class PreflightOver(Exception):
    """The first batch was seen, and no optimizer step is to be taken."""


class FirstBatch(TrainerCallback):
    """Reports on the first batch of rollouts before the first optimizer step. It draws no random number."""

    def __init__(self, trainer: Any):
        self.trainer, self.seen, self.preflight = trainer, False, False
        self.facts: Facts = {}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.seen:
            return
        self.seen = True
        if self.preflight:
            self.look()
            raise PreflightOver
        try:
            self.look()
            if self.trainer.accelerator.is_main_process:
                progress = next(c for c in self.trainer.callback_handler.callbacks if isinstance(c, ProgressLine))
                progress.say(f"first batch: {summary(self.facts)}")
                for trouble in troubles(self.facts):
                    logger.warning(f"{trouble.name}: {trouble.text}")
        except Exception as error:  # of a fork's environment or tokenizer: what only reports must not end a run
            logger.warning(f"The first batch cannot be reported on: {type(error).__name__}: {error}")

    def look(self) -> None:
        """Gather the facts. It calls no collective."""
        self.facts = {**facts_of_settings(self.trainer), **facts_of_batches(self.trainer, [self.trainer._rollouts])}


def summary(facts: Facts) -> str:
    """A line about a batch of rollouts."""
    cut = facts["completions/clipped_ratio"]
    functions = ", ".join(
        f"{name.split('/')[1]} {value:.2f} ± {facts[name.removesuffix('mean') + 'std']:.2f}"
        for name, value in facts.items() if name.startswith("rewards/") and name.endswith("/mean") and value == value
    )  # fmt: skip
    return (
        f"{facts['num_rollouts']} rollouts, {facts['turns/mean']:.1f} turns, {facts['rollouts/called']:.0%} call a "
        f"tool, {facts['tools/failure_frequency']:.0%} of the calls fail ({facts['tools/malformed_frequency']:.0%} "
        f"cannot be run), {facts['rollouts/ended']:.0%} come to an "
        f"end, {cut:.0%} are cut off; reward {facts['reward']:.2f} ({functions}); "
        f"{facts['credit/frac_groups_without_signal']:.0%} of the groups without signal"
    )


# --- --preflight -----------------------------------------------------------------------------------------------------


@contextmanager
def preflight_settings(args: Any) -> Iterator[None]:
    """A run that writes nothing, tracks nothing and does not wait for long for a server. Raises `ValueError`."""
    if args.resume_from_checkpoint:
        raise ValueError(
            "--preflight looks at the model of model_name_or_path, and not at a checkpoint. Remove "
            f"resume_from_checkpoint, or set model_name_or_path to {args.resume_from_checkpoint!r}."
        )
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        args.output_dir, args.report_to, args.disable_tqdm, args.save_strategy = folder, [], True, "no"
        args.log_rollouts, args.push_to_hub, args.load_best_model_at_end = 0, False, False
        args.save_on_each_node = None  # nothing is saved, and each node has this folder for itself
        args.max_staleness, args.eval_on_start = 0, False  # nothing is rolled out that is not looked at
        args.vllm_server_timeout = min(args.vllm_server_timeout, 20.0)
        yield


def run_preflight(trainer: Any) -> int:
    """Print what a run will do, roll out its first batch, and say what that means. Returns the exit code.

    The random state is restored, and no optimizer step is taken. 1: training would be pointless, or it failed.
    """
    look = next(c for c in trainer.callback_handler.callbacks if isinstance(c, FirstBatch))
    rng, look.preflight, seconds = get_rng_state(), True, dict.fromkeys([*PHASES.values(), "batches"], 0.0)
    say(trainer, *(f"{what:>9}  {text}" for what, text in plan(trainer)), "", "Rolling out the first batch ...")
    found = troubles(facts_of_settings(trainer))
    try:
        with timed(trainer, seconds):
            trainer.train()
    except PreflightOver:
        pass
    except (RunError, ServerError) as error:
        say(trainer, *(verdict(found) if found else []))
        sys.exit(f"error: {error}")
    finally:
        set_rng_state(rng)
    step_seconds = seconds["training"] - seconds["batch"]  # where two batches are rolled out before the first step
    batch_seconds = {phase: value / max(seconds["batches"], 1) for phase, value in seconds.items()}
    facts = look.facts | facts_of_more_batches(trainer, look.facts)
    trainer.optimizer.zero_grad()
    set_rng_state(rng)
    found = on_main_process(lambda: troubles(facts))
    prompt = prompt_text(trainer._rollouts[0], trainer.env.tokenizer)
    lines = phases(trainer, facts, batch_seconds, step_seconds)
    say(trainer, "", "The first prompt, as the model reads it:", prompt, "", summary(facts), *lines, *verdict(found))
    return int(any(trouble.pointless for trouble in found))


def say(trainer: Any, *lines: str) -> None:
    """Print on rank 0."""
    if trainer.accelerator.is_main_process:
        print("\n".join(lines), flush=True)


@contextmanager
def timed(trainer: Any, seconds: dict[str, float]) -> Iterator[None]:
    """A context in which the time of the trainer's methods is added up."""

    def with_time(method: Any, phase: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds[phase] += time.perf_counter() - began
                seconds["batches"] += phase == "batch"

        return run

    for name, phase in PHASES.items():
        setattr(trainer, name, with_time(getattr(trainer, name), phase))
    try:
        yield
    finally:
        for name in PHASES:
            delattr(trainer, name)


def facts_of_more_batches(trainer: Any, facts: Facts) -> Facts:
    """Facts of up to three more batches, until one has a group with signal. Collective; empty where the first has."""
    repeated = trainer.args.steps_per_generation * trainer.args.num_iterations  # TRL's sampler gives each so often
    further = itertools.islice(trainer.get_train_dataloader(), repeated, None, repeated)
    batches = [trainer._rollouts]
    for number in range(2, MOST_BATCHES + 1):
        if facts["credit/frac_groups_without_signal"] < 1.0:
            return facts if number > 2 else {}
        rows = next(further, None)
        if rows is None:
            break
        say(trainer, f"No group has signal. Rolling out batch {number} ...")
        trainer._generate_and_score_completions(rows)
        batches.append(trainer._rollouts)
        facts = {**facts, **facts_of_batches(trainer, batches)}
    return facts


def phases(trainer: Any, facts: Facts, seconds: dict[str, float], step_seconds: float) -> list[str]:
    """Lines about the time of a batch and of the run."""
    whole = duration(seconds_of_run(trainer, seconds["batch"], step_seconds))
    num_calls = facts["tools/call_frequency"] * trainer.args.generation_batch_size
    tools = facts["tools/mean_seconds"] * num_calls
    memory = peak_memory()
    return [
        f"seconds: rollouts {seconds['rollouts'] - seconds['sync']:.1f} (tools {tools:.1f} in all, at the same time), "
        f"sync {seconds['sync']:.1f}, rewards {seconds['rewards']:.1f}, training {step_seconds:.1f} per optimizer "
        f"step; {facts['completions/mean_total_length']:.0f} tokens per rollout"
        + (f"; {memory} of GPU memory at most" if memory else ""),
        f"the run: about {whole}, where every batch takes as long as this first one",
    ]


def verdict(found: list[Trouble]) -> list[str]:
    """The troubles, causes first."""
    if not found:
        return ["", "Nothing here means trouble."]
    lines = [f"  {number}. {trouble.name}: {trouble.text}" for number, trouble in enumerate(found, 1)]
    end = ["Training would be pointless."] if any(trouble.pointless for trouble in found) else []
    return ["", "What means trouble, causes first:", *lines, *end]
