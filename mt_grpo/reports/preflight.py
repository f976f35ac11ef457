"""What is printed of a run's first batch: a line and warnings in every run, the whole screen with `--preflight`."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from mt_grpo.base.errors import ServerError, error_line
from mt_grpo.base.ranks import RunError, on_main_process
from mt_grpo.base.tested_versions import installed, outside
from mt_grpo.conversation.pictures import TOWER, drawn_image, readable, reader_of
from mt_grpo.recipe.checks import longest_prompt
from mt_grpo.recipe.refusals import backend_of
from mt_grpo.reports.facts import facts_of_batches, facts_of_settings, steps_of
from mt_grpo.reports.progress import MetricsLog, ProgressLine, duration
from mt_grpo.reports.troubles import Facts, Trouble, Watch, troubles
from mt_grpo.run.checkpoints import get_rng_state, set_rng_state
from mt_grpo.run.trainer import ResumableTrainer
from mt_grpo.training.batch import Batch

logger = logging.getLogger(__name__)


def run_reports(trainer: ResumableTrainer) -> list[TrainerCallback]:
    """The callbacks that report on a run: the first batch, a line per log, warnings, the file of metrics."""
    return [FirstBatch(trainer), ProgressLine(trainer), Watch(trainer.reward_functions.main_outcome), MetricsLog()]


# What a run will do, as text: model, data, prompt, tools, batches, context, memory, backend, versions.


PROMPT_SHOWN = 2000  # characters of the first prompt: its beginning and its end
GIB = 2**30


def plan(trainer: ResumableTrainer) -> list[tuple[str, str]]:
    """(what, text) of the lines of the screen, without the first prompt."""
    args, env, model, train = trainer.args, trainer.env, trainer.model, trainer.train_dataset
    reference = bool(args.beta) and getattr(trainer, "ref_model", None) is not None
    client = trainer.client if trainer.backend == "server" else None
    return [
        ("model", model_line(model, args)), ("data", data_line(train, trainer.eval_dataset)),
        ("tools", tools_line(env)), ("a batch", batch_line(args)), ("an epoch", epoch_line(len(train), args)),
        *[("", said) for said in [left_out(len(train), args)] if said],
        ("credit", f"{args.credit_assignment}, normalised by {args.scale_rewards}; rewards: "
                   f"{', '.join(trainer.reward_func_names) or 'none'}"),
        ("context", context_line(env, train, args)), ("rows", str(trainer.layout)),
        *images_line(model, env),
        ("memory", memory_line(model, args, longest_prompt(env, train), reference, trainer._is_sharded)),
        ("backend", backend_line(args, client, trainer.accelerator.device)), ("versions", versions_line(client)),
    ]  # fmt: skip


def model_line(model: Any, args: Any) -> str:
    """Name, size and dtypes of the model."""
    total, trained = count(model.parameters())
    dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    kind = "bfloat16" if args.bf16 else "float16" if args.fp16 else dtypes
    name = model.config._name_or_path.removeprefix(f"{Path.cwd()}/")
    return f"{name}: {total:,} parameters, {trained:,} of them trained, kept as {dtypes}, computed in {kind}"


def count(parameters: Iterable[torch.nn.Parameter], in_bytes: bool = False) -> tuple[int, int]:
    """(all, those that are trained): how many numbers the parameters of a model hold, or bytes."""
    sizes = [(getattr(p, "ds_numel", p.numel()) * p.element_size() ** in_bytes, p.requires_grad) for p in parameters]
    return sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)


def images_line(model: Any, env: Any) -> list[tuple[str, str]]:
    """Say what images cost and whether the vision tower is trained; empty for a model that reads text alone."""
    if (reader := reader_of(env.tokenizer)) is None:
        return []
    total, trained = count(parameter for name, parameter in model.named_parameters() if TOWER.search(name))
    costs = [
        f"{side} x {side} pixels are {reader.read(drawn_image(side), 'a drawn image').num_tokens} tokens"
        for side in (224, 1024)
    ]
    whole = f"{trained:,} of the {total:,} parameters that read them are trained"
    return [("images", f"{' and '.join(costs)}; {whole}")]


def data_line(train: Any, test: Any) -> str:
    """Rows and columns of the training and the test data; `test` may be None or a dict of several."""
    tests = "no test rows are read (eval_strategy: no)"
    if test is not None:
        tests = f"{sum(map(len, test.values())) if isinstance(test, dict) else len(test):,} test rows"
    return f"{len(train):,} training rows, {tests}; columns {', '.join(train.column_names)}"


def tools_line(env: Any) -> str:
    """Names of the tools and classes."""
    classes = [] if env.environments is None else [cls.__name__ for cls in env.environments.by_name.values()]
    return f"{', '.join(env.tools) or 'none of a file'}, in the format {env.tool_format}" + (
        f"; environment {', '.join(classes)}" if classes else ""
    )


def batch_line(args: Any) -> str:
    """The arithmetic of a batch of rollouts.

    >>> from types import SimpleNamespace as S
    >>> batch_line(S(generation_batch_size=96, num_generations=8, per_device_train_batch_size=8, world_size=3,
    ...              gradient_accumulation_steps=4, steps_per_generation=4, num_iterations=2))
    '12 prompts x 8 rollouts = 96 = 8 per device x 3 ranks x 4; 2 optimizer steps from each'
    """
    prompts = args.generation_batch_size // args.num_generations
    steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    ranks = f"{args.world_size} rank{'s' * (args.world_size > 1)}"
    return (
        f"{prompts} prompts x {args.num_generations} rollouts = {args.generation_batch_size} = "
        f"{args.per_device_train_batch_size} per device x {ranks} x {args.steps_per_generation}; {steps:g} optimizer "
        f"step{'s' * (steps != 1)} from each"
    )


def epoch_line(num_rows: int, args: Any) -> str:
    """Rollouts and optimizer steps of an epoch and of the run.

    >>> from types import SimpleNamespace as S
    >>> epoch_line(100, S(generation_batch_size=96, num_generations=8, gradient_accumulation_steps=4,
    ...                   steps_per_generation=4, num_iterations=2, max_steps=300, num_train_epochs=3))
    '8 batches = 768 rollouts = 16 optimizer steps; the run: 300 optimizer steps'
    """
    batches, steps, whole = steps_of(num_rows, args)
    rollouts = batches * args.generation_batch_size
    counts = f"{batches:,} batch{'es' * (batches != 1)} = {rollouts:,} rollouts = {steps:,} optimizer steps"
    return f"{counts}; the run: {whole:,} optimizer steps"


def left_out(num_rows: int, args: Any) -> str:
    """Say which rows an epoch leaves out; empty where it has all.

    >>> from types import SimpleNamespace as S
    >>> left_out(100, S(generation_batch_size=96, num_generations=8, shuffle_dataset=True))
    'an epoch leaves out 4 of 100 rows, others each time: they fill no batch of 12 prompts'
    """
    prompts = args.generation_batch_size // args.num_generations
    which = "others each time" if args.shuffle_dataset else "the last ones"
    text = f"{num_rows % prompts} of {num_rows:,} rows, {which}: they fill no batch of {prompts} prompts"
    return f"an epoch leaves out {text}" if num_rows % prompts else ""


def context_line(env: Any, train: Any, args: Any) -> str:
    """Say how much of the context the longest prompt and a completion take."""
    prompt = longest_prompt(env, train)
    context = f" of {env.max_model_len}" if env.max_model_len else ""
    return (
        f"{prompt} (longest prompt) + {args.max_completion_length} (max_completion_length) = "
        f"{prompt + args.max_completion_length} tokens{context}; a turn has at most "
        f"{args.longest_turn}, a result {env.result_limit}, a "
        f"conversation {args.max_env_steps} observations"
    )


def memory_line(model: Any, args: Any, prompt: int, reference: bool, sharded: bool) -> str:
    """Bytes of a rank's weights, gradients and optimizer, and the tokens and logits of one forward pass.

    The logits are a lower limit of what activations take.

    Args:
        model, args: Of the run.
        prompt: Tokens of the longest prompt.
        reference: Whether there is a reference model.
        sharded: Whether ranks divide the weights.
    """
    weights, trained = count(model.parameters(), in_bytes=True)
    copies = weights if reference else 0
    rows = args.per_device_train_batch_size
    tokens = args.max_tokens_per_pass or rows * (prompt + args.max_completion_length)
    logits = 4 * min(tokens, rows * args.max_completion_length)
    logits *= model.config.get_text_config().vocab_size
    parts = f"weights {size(weights)}, gradients {size(trained)}, Adam {size(2 * trained)}"
    parts += f", reference model {size(copies)}" if copies else ""
    return (
        f"{size(weights + 3 * trained + copies)} per rank ({parts})"
        f"{', before it is divided among the ranks' if sharded else ''}, and activations of a pass of "
        f"at most {tokens:,} tokens (max_tokens_per_pass): the logits of one pass take up to {size(logits)}"
    )


def size(num_bytes: float) -> str:
    """Format a number of bytes for people.

    >>> size(3_600_000), size(7 * 2**30)
    ('3.4 MiB', '7.0 GiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def backend_line(args: Any, client: Any, device: torch.device) -> str:
    """Where tokens are sampled, and how the weights get there. `client` is None without a server."""
    if client is not None:
        return (
            f"{client.title} server at {client.base_url}, weights by {client.transfer.transport}; training on {device}"
        )
    in_vllm = backend_of(args) == "colocate"
    name = "vLLM in this process (colocate)" if in_vllm else "this process (transformers)"
    return f"{name}, on {device}"


def versions_line(client: Any) -> str:
    """The versions of what the package depends on and of the servers, and which of them were not tested."""
    versions = installed()
    servers = getattr(client, "servers", [])
    served = sorted({(s.engine.name, s.engine.title, version) for s in servers if (version := s.engine_version)})
    known = [f"{name} {versions.get(name)}" for name in ("torch", "trl", "transformers", "accelerate")]
    known += [f"{title} {version} of the server" for _, title, version in served]
    untested = outside(versions) + [text for name, _, version in served for text in outside({name: version})]
    return ", ".join(known) + (
        f"; not tested: {'; '.join(untested)}" if untested else "; all within the tested ranges"
    )


def prompt_text(rollout: Any, tokenizer: Any) -> str:
    """The prompt of a rollout as the model read it."""
    text = readable(tokenizer.decode(rollout.prompt_ids))
    half, left_out = PROMPT_SHOWN // 2, len(text) - PROMPT_SHOWN
    return text if left_out <= 0 else f"{text[:half]}\n... [{left_out} characters] ...\n{text[-half:]}"


# A preflight rolls out further batches until a group has signal: one rollout of a hundred may be rewarded.
MOST_BATCHES = 4
PHASES = {
    "_generate_and_score_completions": "batch", "_sync_weights": "sync", "_roll_out": "rollouts",
    "_score": "rewards", "training_step": "training",
}  # fmt: skip


class PreflightOver(Exception):
    """The facts of the first batch are there, and no optimizer step is to be taken."""


class FirstBatch(TrainerCallback):
    """Reports on the first batch of rollouts before the first optimizer step. It draws no random number.

    Attributes:
        facts: Those of the first batch, once it was rolled out.
        ends_run: Whether `PreflightOver` is raised then, in place of a report.
    """

    def __init__(self, trainer: ResumableTrainer):
        self.trainer, self.seen, self.ends_run = trainer, False, False
        self.facts: Facts = {}

    @property
    def progress(self) -> ProgressLine:
        return next(c for c in self.trainer.callback_handler.callbacks if isinstance(c, ProgressLine))

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and not self.ends_run:  # a preflight has said it
            self.progress.say(f"rows: {self.trainer.layout}")
            if said := left_out(len(self.trainer.train_dataset), args):
                self.progress.say(said)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.seen:
            return
        self.seen = True
        if self.ends_run:
            self.gather_facts()
            raise PreflightOver
        try:
            self.gather_facts()
            if self.trainer.accelerator.is_main_process:
                self.progress.say(f"first batch: {summary(self.facts)}")
                for trouble in troubles(self.facts):
                    logger.warning(f"{trouble.name}: {trouble.text}")
        except Exception as error:  # of a fork's environment or tokenizer: what only reports must not end a run
            logger.warning(f"The report on the first batch failed: {error_line(error)}")

    def gather_facts(self) -> None:
        """Set `facts`. Collective, before anything that may raise on one rank."""
        of_batch = facts_so_far(self.trainer, [self.trainer.batch])
        self.facts = {**facts_of_settings(self.trainer), **of_batch}


def facts_so_far(trainer: ResumableTrainer, batches: list[Batch]) -> Facts:
    """`facts_of_batches` of a trainer that has rolled out these."""
    # A step may have had batches before these.
    metrics = {name: values[-len(batches) :] for name, values in trainer._metrics["train"].items()}
    return facts_of_batches(trainer.args, metrics, trainer.reward_functions, batches)


def percent(share: float) -> str:
    """A share as text; a question mark for NaN, which is not known.

    >>> percent(0.25), percent(float("nan"))
    ('25%', '?')
    """
    return "?" if math.isnan(share) else f"{share:.0%}"


def summary(facts: Facts) -> str:
    """A line about a batch of rollouts."""
    cut = facts["completions/clipped_ratio"]
    functions = ", ".join(
        f"{name.split('/')[1]} {value:.2f} ± {facts[name.removesuffix('mean') + 'std']:.2f}"
        for name, value in facts.items()
        if name.startswith("rewards/") and name.endswith("/mean") and value == value
    )
    return (
        f"{facts['num_rollouts']} rollouts, {facts['turns/mean']:.1f} turns, {facts['rollouts/called']:.0%} call a "
        f"tool, {percent(facts['tools/failure_frequency'])} of the calls fail "
        f"({percent(facts['tools/malformed_frequency'])} cannot be run), {facts['rollouts/ended']:.0%} come to an "
        f"end, {cut:.0%} are truncated; reward {facts['reward']:.2f} ({functions}); "
        f"{facts['credit/frac_groups_without_signal']:.0%} of the groups without signal"
    )


# --- --preflight -----------------------------------------------------------------------------------------------------


@contextmanager
def preflight_settings(args: Any) -> Iterator[None]:
    """A run that writes nothing, tracks nothing and does not wait for long for a server. Raises `ValueError`."""
    if args.resume_from_checkpoint:
        raise ValueError(
            "--preflight checks the model of model_name_or_path and not a checkpoint. Remove "
            f"resume_from_checkpoint, or set model_name_or_path to {args.resume_from_checkpoint!r}."
        )
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        args.output_dir, args.report_to, args.disable_tqdm, args.save_strategy = folder, [], True, "no"
        args.log_rollouts, args.push_to_hub, args.load_best_model_at_end = 0, False, False
        args.save_on_each_node = None  # nothing is saved, and each node has this folder for itself
        args.max_staleness, args.refill_groups, args.eval_on_start = 0, 0, False  # nothing else is sampled
        args.vllm_server_timeout = min(args.vllm_server_timeout, 20.0)
        yield


def run_preflight(trainer: ResumableTrainer) -> int:
    """Print what a run will do, roll out its first batch, and say what that means. Returns the exit code.

    The random state is restored, and no optimizer step is taken. 1: training would be pointless, or it failed.
    """
    first_batch = next(c for c in trainer.callback_handler.callbacks if isinstance(c, FirstBatch))
    first_batch.ends_run = True
    rng, seconds = get_rng_state(), dict.fromkeys([*PHASES.values(), "batches"], 0.0)
    say(trainer, *(f"{what:>9}  {text}" for what, text in plan(trainer)), "", "Sampling the first batch ...")
    found = troubles(facts_of_settings(trainer))
    try:
        with timed(trainer, seconds):
            trainer.train()
    except PreflightOver:
        pass
    except (RunError, ServerError) as error:
        say(trainer, *(trouble_lines(found) if found else []))
        sys.exit(f"error: {error}")
    finally:
        set_rng_state(rng)
    step_seconds = seconds["training"] - seconds["batch"]  # where two batches are rolled out before the first step
    batch_seconds = {phase: value / max(seconds["batches"], 1) for phase, value in seconds.items()}
    facts = first_batch.facts | facts_of_more_batches(trainer, first_batch.facts)
    trainer.optimizer.zero_grad()
    set_rng_state(rng)
    found = on_main_process(lambda: troubles(facts))
    prompt = prompt_text(trainer.batch.rollouts[0], trainer.env.tokenizer)
    lines = phases(trainer.args, trainer.state.max_steps, facts, batch_seconds, step_seconds)
    lines += trouble_lines(found)
    say(trainer, "", "The first prompt, as the model reads it:", prompt, "", summary(facts), *lines)
    return int(any(trouble.pointless for trouble in found))


def say(trainer: ResumableTrainer, *lines: str) -> None:
    """Print on rank 0."""
    if trainer.accelerator.is_main_process:
        print("\n".join(lines), flush=True)


@contextmanager
def timed(trainer: ResumableTrainer, seconds: dict[str, float]) -> Iterator[None]:
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


def facts_of_more_batches(trainer: ResumableTrainer, facts: Facts) -> Facts:
    """Facts of up to three more batches, until one has a group with signal. Collective; empty where the first has."""
    repeated = trainer.args.steps_per_generation * trainer.args.num_iterations  # TRL's sampler gives each so often
    further = itertools.islice(trainer.get_train_dataloader(), repeated, None, repeated)
    batches = [trainer.batch]
    for number in range(2, MOST_BATCHES + 1):
        if facts["credit/frac_groups_without_signal"] < 1.0:
            return facts if number > 2 else {}
        rows = next(further, None)
        if rows is None:
            break
        say(trainer, f"No group has signal. Sampling batch {number} ...")
        trainer._generate_and_score_completions(rows)
        batches.append(trainer.batch)
        facts = {**facts, **facts_so_far(trainer, batches)}
    return facts


def phases(args: Any, steps: int, facts: Facts, seconds: dict[str, float], step_seconds: float) -> list[str]:
    """Lines about the time of a batch, and of a run of so many optimizer steps."""
    batches = steps * args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
    whole = duration(batches * seconds["batch"] + steps * step_seconds)
    num_calls = facts["tools/call_frequency"] * args.generation_batch_size
    tools = 0.0 if math.isnan(facts["tools/mean_seconds"]) else facts["tools/mean_seconds"] * num_calls
    memory = f"; {size(torch.cuda.max_memory_allocated())} of GPU memory" if torch.cuda.is_available() else ""
    return [
        f"seconds: rollouts {seconds['rollouts'] - seconds['sync']:.1f} (tools {tools:.1f} in all, at the same time), "
        f"sync {seconds['sync']:.1f}, rewards {seconds['rewards']:.1f}, training {step_seconds:.1f} per optimizer "
        f"step; {facts['completions/mean_total_length']:.0f} tokens per rollout{memory}",
        f"the run: about {whole} if every batch takes as long as the first one",
    ]


def trouble_lines(found: list[Trouble]) -> list[str]:
    """The lines of the screen about the troubles, causes first."""
    if not found:
        return ["", "No problem was found."]
    lines = [f"  {number}. {trouble.name}: {trouble.text}" for number, trouble in enumerate(found, 1)]
    end = ["Training would be pointless."] if any(trouble.pointless for trouble in found) else []
    return ["", "Problems, causes first:", *lines, *end]
