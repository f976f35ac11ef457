"""The first batch of rollouts, looked at: a few lines when a run begins, and the whole screen of `--preflight`."""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

from transformers import TrainerCallback

from mt_grpo.preflight import prompt_ids_of
from mt_grpo.progress import ProgressLine, duration
from mt_grpo.ranks import RunError, on_main_process
from mt_grpo.readings import Facts, Trouble, troubles
from mt_grpo.rollout import Rollout, StopReason
from mt_grpo.run_plan import peak_memory, plan, prompt_text, seconds_of_run
from mt_grpo.server_errors import ServerError
from mt_grpo.snapshots import get_rng_state, set_rng_state
from mt_grpo.text_check import squeezed

logger = logging.getLogger(__name__)
MOST_BATCHES = 4  # of a preflight in which no group has signal, as with a reward that one rollout of a hundred gets
MOST_SHOWN = 160  # characters of an error
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
        self.facts = {**facts_of_settings(self.trainer), **facts_of_batch(self.trainer)}


def facts_of_settings(trainer: Any) -> Facts:
    """What the recipe says, and whether the first prompt holds what the model must read."""
    args, env = trainer.args, trainer.env
    row = trainer.train_dataset[0]
    tools = dict(env.tools) if env.environments is None else {**env.tools, **env.environments.tools_of_class(row)}
    messages = env.with_system_prompt(row.get("prompt") or [{"role": "user", "content": ""}], tools)
    system = "".join(m["content"] for m in messages if m["role"] == "system")
    read = env.tokenizer.decode(prompt_ids_of(env, row))
    lacking = [name for name in tools if name not in read]
    names = ("learning_rate", "max_completion_length", "max_turn_tokens", "max_tool_response_tokens", "max_env_steps",
             "num_generations")  # fmt: skip
    return {
        **{name: getattr(args, name) for name in names}, "optim": str(getattr(args.optim, "value", args.optim)),
        "temperature": trainer._sampling_params["temperature"],
        "has_tools": bool(tools), "prompt/lacks_system": bool(system) and squeezed(system)[:200] not in squeezed(read),
        "prompt/lacks_tools": ", ".join(lacking), "prompt/lacks_all_tools": len(lacking) == len(tools),
    }  # fmt: skip


def facts_of_batch(trainer: Any) -> Facts:
    """The metrics of the batch, over all ranks, and what this rank's rollouts add to them."""
    args, rollouts = trainer.args, trainer._rollouts
    facts = {name: mean(values) for name, values in trainer._metrics["train"].items() if values}
    by_turn = [r for r in rollouts if cut_by_turn(r, args.max_turn_tokens, args.max_completion_length)]
    cut = [r for r in rollouts if r.stop_reason == StopReason.MAX_TOKENS and all(r is not other for other in by_turn)]
    results = [result for r in rollouts for turn in r.turns for result in turn.results]
    reached = [result for result in results if result.error != "call"]
    uncut = [result for r in rollouts for turn in r.turns if turn.finish_reason != "length" for result in turn.results]
    broken = [result for result in reached if result.error is not None]
    ends = (StopReason.ANSWERED, StopReason.ENVIRONMENT_STOP, StopReason.AGENT_DONE)
    groups = whole_groups(rollouts, args.num_generations)
    weights = dict(zip(trainer.reward_func_names, trainer.reward_weights.tolist()))
    means = {name: facts.get(f"rewards/{name}/mean", float("nan")) for name, weight in weights.items() if weight}
    given = {name: value for name, value in means.items() if value == value}
    varied = [name for name in given if facts[f"rewards/{name}/std"] > 1e-6]
    return {
        **facts, "num_rollouts": int(args.generation_batch_size),
        "rollouts/called": share(any(turn.calls for turn in r.turns) for r in rollouts),
        "rollouts/ended": share(r.stop_reason in ends for r in rollouts),
        "groups/identical": share(len({tuple(sampled_ids(r)) for r in group}) == 1 for group in groups)
        if groups else None,
        "calls/malformed": share(result.error == "call" for result in uncut),
        "credit_assignment": args.credit_assignment,
        "cut/by_turn": len(by_turn) / len(rollouts), "cut/by_completion": len(cut) / len(rollouts),
        "tokens/read": share(owner < 0 for r in cut or rollouts for owner in r.turn_ids),
        "tools/broken": len(broken) / len(reached) if reached else 0.0,
        "first/tool_error": shown(broken), "first/call_error": shown(r for r in results if r.error == "call"),
        "first/environment_error": next((str(r.error)[:MOST_SHOWN] for r in rollouts if r.error is not None), ""),
        "rewards/constant": ", ".join(f"{name} {given[name]:.3g}" for name in given) or "there are none",
        "rewards/varied": varied,
        "tokens/differ": sum(facts.get(f"tokens/{check}_differ", 0.0) for check in ("ids", "mask", "text")),
    }  # fmt: skip


def cut_by_turn(rollout: Rollout, max_turn_tokens: int | None, max_completion_length: int) -> bool:
    """Whether a turn was cut off, in its call or before it, where the completion had room left."""
    cut = [t for t in rollout.turns if t.finish_reason == "length" and len(t.token_ids) >= (max_turn_tokens or 0) > 0]
    return bool(cut) and (cut[-1] is not rollout.turns[-1] or rollout.new_tokens < max_completion_length)


def whole_groups(rollouts: list[Rollout], size: int) -> list[list[Rollout]]:
    """The groups that are on this rank as a whole: a rank's rollouts may begin or end within one."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.index // size, []).append(rollout)
    return [group for group in groups.values() if len(group) == size]


def sampled_ids(rollout: Rollout) -> list[int]:
    """All ids that the model sampled."""
    return [token for turn in rollout.turns for token in turn.token_ids]


def share(flags: Any) -> float:
    """Of what is true; 0 of nothing.

    >>> share([True, False, False, False]), share([])
    (0.25, 0.0)
    """
    flags = list(flags)
    return sum(flags) / len(flags) if flags else 0.0


def shown(results: Any) -> str:
    """The text of the first of some results, in one line."""
    first = next(iter(results), None)
    return "" if first is None else " ".join(first.text.split())[:MOST_SHOWN]


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
        args.overlap_rollouts = args.eval_on_start = False  # nothing is rolled out that is not looked at
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
    batches = itertools.islice(trainer.get_train_dataloader(), repeated, None, repeated)
    for number in range(2, MOST_BATCHES + 1):
        if facts["credit/frac_groups_without_signal"] < 1.0:
            return facts if number > 2 else {}
        rows = next(batches, None)
        if rows is None:
            break
        say(trainer, f"No group has signal. Rolling out batch {number} ...")
        trainer._generate_and_score_completions(rows)
        facts = {**facts, **facts_of_batch(trainer), "num_rollouts": number * trainer.args.generation_batch_size}
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
