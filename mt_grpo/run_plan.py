"""What a run will do, as text: model, data, prompt, tools, batches, context, memory, backend, versions."""

from __future__ import annotations

import importlib.metadata
import math
import tomllib
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from mt_grpo.preflight import longest_prompt
from mt_grpo.refusals import backend_of

PROMPT_SHOWN = 2000  # characters of the first prompt: its beginning and its end
GIB = 2**30


def plan(trainer: Any) -> list[tuple[str, str]]:
    """(what, text) of the lines of the screen, without the first prompt."""
    args, env = trainer.args, trainer.env
    return [
        ("model", model_line(trainer)), ("data", data_line(trainer)), ("tools", tools_line(env)),
        ("a batch", batch_line(args)), ("an epoch", epoch_line(len(trainer.train_dataset), args)),
        ("credit", f"{args.credit_assignment}, normalised by {args.scale_rewards}; rewards: "
                   f"{', '.join(trainer.reward_func_names) or 'none'}"),
        ("context", context_line(trainer)), ("memory", memory_line(trainer)), ("backend", backend_line(trainer)),
        ("versions", versions_line()),
    ]  # fmt: skip


def model_line(trainer: Any) -> str:
    """Name, size and dtypes of the model."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad, p.dtype) for p in trainer.model.parameters()]
    total, trained = sum(size for size, _, _ in sizes), sum(size for size, trains, _ in sizes if trains)
    dtypes = ", ".join(sorted({str(dtype).removeprefix("torch.") for _, _, dtype in sizes}))
    kind = "bfloat16" if trainer.args.bf16 else "float16" if trainer.args.fp16 else dtypes
    name = trainer.model.config._name_or_path.removeprefix(f"{Path.cwd()}/")
    return f"{name}: {total:,} parameters, {trained:,} of them trained, kept as {dtypes}, computed in {kind}"


def data_line(trainer: Any) -> str:
    """Rows and columns."""
    train, test = trainer.train_dataset, trainer.eval_dataset
    tests = sum(map(len, test.values())) if isinstance(test, dict) else len(test) if test is not None else 0
    return f"{len(train):,} training rows, {tests:,} test rows; columns {', '.join(train.column_names)}"


def tools_line(env: Any) -> str:
    """Names of the tools and classes."""
    classes = [] if env.environments is None else [cls.__name__ for cls in env.environments.by_name.values()]
    return (
        f"{', '.join(env.tools) or 'none of a file'}, in the format {env.tool_format}"
        + (f"; environment {', '.join(classes)}" if classes else "")
    )  # fmt: skip


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
    batches = num_rows // (args.generation_batch_size // args.num_generations)
    steps = batches * args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
    whole = args.max_steps if args.max_steps > 0 else math.ceil(steps * args.num_train_epochs)
    rollouts = batches * args.generation_batch_size
    counts = f"{batches} batch{'es' * (batches != 1)} = {rollouts} rollouts = {steps} optimizer steps"
    return f"{counts}; the run: {whole} optimizer steps"


def context_line(trainer: Any) -> str:
    """What of the context the longest prompt and a completion take."""
    args, env = trainer.args, trainer.env
    prompt = longest_prompt(env, trainer.train_dataset)
    context = f" of {env.max_model_len}" if env.max_model_len else ""
    return (
        f"{prompt} (longest prompt) + {args.max_completion_length} (max_completion_length) = "
        f"{prompt + args.max_completion_length} tokens{context}; a turn has at most "
        f"{args.max_turn_tokens or args.max_completion_length}, a result {args.max_tool_response_tokens}, a "
        f"conversation {args.max_env_steps} observations"
    )


def memory_line(trainer: Any) -> str:
    """Bytes of a rank's weights, gradients and optimizer, and of a pass's logits: what no activation can be below."""
    args, config = trainer.args, trainer.model.config.get_text_config()
    weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trainer.model.parameters())
    trained = sum(
        getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trainer.model.parameters() if p.requires_grad
    )
    reference = weights if args.beta and getattr(trainer, "ref_model", None) is not None else 0
    logits = 4 * args.per_device_train_batch_size * args.max_completion_length * config.vocab_size
    sharded = ", before it is divided among the ranks" if trainer._is_sharded else ""
    parts = f"weights {size(weights)}, gradients {size(trained)}, Adam {size(2 * trained)}"
    parts += f", reference model {size(reference)}" if reference else ""
    return (
        f"{size(weights + 3 * trained + reference)} per rank ({parts}){sharded}, and activations: the logits of a "
        f"pass alone are {size(logits)} at most"
    )


def size(num_bytes: float) -> str:
    """Bytes for people.

    >>> size(3_600_000), size(7 * 2**30)
    ('3.4 MiB', '7.0 GiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def backend_line(trainer: Any) -> str:
    """Where tokens are sampled, and how the weights get there."""
    backend, device = backend_of(trainer.args), trainer.accelerator.device
    if backend == "server":
        client = trainer.client
        return f"vLLM server at {client.base_url}, weights by {client.transfer.transport}; training on {device}"
    name = "vLLM in this process (colocate)" if backend == "colocate" else "this process (transformers)"
    return f"{name}, on {device}"


def versions_line() -> str:
    """The installed versions of what the package depends on, and which of them were not tested."""
    try:
        requirements = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
        found = [Requirement(text) for text in requirements["dependencies"]]
    except (OSError, KeyError):  # the script and the package without the clone
        found = [Requirement(text) for text in ("torch", "trl", "transformers", "accelerate")]
    versions = {each.name: importlib.metadata.version(each.name) for each in found}
    untested = [f"{each.name} {versions[each.name]} (tested: {each.specifier})" for each in found
                if not each.specifier.contains(versions[each.name], prereleases=True)]  # fmt: skip
    known = ", ".join(f"{name} {versions[name]}" for name in ("torch", "trl", "transformers", "accelerate"))
    return known + (f"; not tested: {'; '.join(untested)}" if untested else "; all within the tested ranges")


def prompt_text(rollout: Any, tokenizer: Any) -> str:
    """The prompt of a rollout as the model read it."""
    text = tokenizer.decode(rollout.prompt_ids)
    half, left_out = PROMPT_SHOWN // 2, len(text) - PROMPT_SHOWN
    return text if left_out <= 0 else f"{text[:half]}\n... [{left_out} characters] ...\n{text[-half:]}"


def seconds_of_run(trainer: Any, batch_seconds: float, step_seconds: float) -> float:
    """Seconds of the whole run, where every batch and every optimizer step takes as long as the first."""
    args, steps = trainer.args, trainer.state.max_steps
    batches = steps * args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
    return batches * batch_seconds + steps * step_seconds


def peak_memory() -> str | None:
    """What was allocated on the GPU at most; None without one."""
    if not torch.cuda.is_available():
        return None
    return size(torch.cuda.max_memory_allocated())
