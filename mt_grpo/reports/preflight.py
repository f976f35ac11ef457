"""Troubles of a run: one table, which `--preflight`, the first batch of every run and a running job read.

Facts are settings by their keys, metrics by their names, and what rollouts add; of a running job, means of logs.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import resource
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

import psutil
import torch
from accelerate.utils import gather_object, is_peft_model
from torch.autograd.graph import saved_tensors_hooks
from transformers import TrainerCallback

from mt_grpo.base.errors import RunError, ServerError, error_line
from mt_grpo.conversation.conversations import limits_of
from mt_grpo.images.pictures import readable
from mt_grpo.recipe.checks import longest_prompt, prompt_ids_of, text_of_cuts
from mt_grpo.reports.progress import MetricsLog, ProgressLine, is_shown
from mt_grpo.rollout import FAILURES, Rollout, StopReason, join
from mt_grpo.run.trainer import ResumableTrainer
from mt_grpo.training.batch import Batch, unused_rewards
from mt_grpo.training.pass_metrics import EFFECTIVE_SHARE, FIRST_TURNS, LAST_TURNS
from mt_grpo.training.passes import window_of
from mt_grpo.training.rewards import RewardFunctions
from mt_grpo.training.token_checks import squeezed

logger = logging.getLogger(__name__)

WINDOW, LEAST_LOGS = 20, 5  # logs of a running job that are judged together, and of a short one at its end
MIN_CALLS = 8  # fewer are no share to judge by: half of four calls fail by chance in one of three first batches
MOST_BATCHES = 4  # of a preflight without signal: one rollout of a hundred may be rewarded
MOST_WEIGHTS = 2**16  # of a parameter that are looked at, evenly spread
COMPLETE = (StopReason.ANSWERED, StopReason.ENVIRONMENT_STOP, StopReason.AGENT_DONE)
NO_SIGNAL = "credit/frac_groups_without_signal"


class Reading(NamedTuple):
    """One line of the table: `when` it means trouble, and when that makes training pointless, by the facts.

    A fact that is not known is NaN, of which no comparison is true. The facts are filled in into the text.
    """

    name: str
    when: Callable[[dict], bool]
    text: str
    pointless: Callable[[dict], bool] | bool = lambda f: False  # a bool of those that `troubles` returns


# Causes stand before their consequences. docs/troubleshooting.md says more about each.
READINGS = (
    Reading("system prompt", lambda f: f["prompt/lacks_system"] > 0,
        "The model does not read the system prompt. Use a chat template with a system role, or put the text into the "
        "prompts and set system_prompt: ''.", lambda f: f["has_tools"]),
    Reading("tools", lambda f: f["prompt/num_lacking"] > 0,
        "The prompt does not mention the tool {prompt/lacks_tools}. Write its name as it is, or {{tool_descriptions}},"
        " into system_prompt.", lambda f: f["prompt/lacks_all_tools"] and not f["rollouts/called"] > 0.01),
    Reading("last message", lambda f: f["prompt/ends_with_assistant"] > 0,
        "{prompt/ends_with_assistant:.0%} of the prompts end with a message of the assistant. Is it the answer?"),
    Reading("learning rate", lambda f: f["learning_rate"] >= 0.01 and str(f["optim"]).startswith("adam"),
        "learning_rate is {learning_rate:g}. Adam moves every weight by about as much, which destroys the model. Set "
        "learning_rate to 1e-6, 1e-5 to 1e-4 (LoRA), or 1e-3 at most (tiny).", lambda f: True),
    Reading("learning rate", lambda f: f["learning_rate"] == 0,
        "learning_rate is 0. No weight changes. Set it to 1e-6, or 1e-5 to 1e-4 (LoRA).", lambda f: True),
    Reading("learning rate", lambda f: f["lora"] > 0 and 0 < f["learning_rate"] < 5e-6,
        "learning_rate is {learning_rate:g}, at which a LoRA hardly changes. Set learning_rate to 1e-5 to 1e-4."),
    Reading("rounding", lambda f: f["weights/stuck"] >= 0.5 and f["learning_rate"] and str(f["optim"])[:4] == "adam",
        "A step of learning_rate={learning_rate:g} is lost to rounding for {weights/stuck:.0%} of the weights. Set "
        "dtype: float32, with bf16: true to compute in bfloat16, or train with ZeRO-3 or FSDP2."),
    Reading("temperature", lambda f: f["temperature"] >= 1.5,
        "temperature is {temperature:g}. Above 1 calls and answers break. Set temperature: 1.0."),
    Reading("failures", lambda f: f["rollouts/failed"] >= 0.2,
        "In {rollouts/failed:.0%} of the rollouts{since} the environment or the agent failed{frequent/failure}. Fix "
        "the environment or the agent, or raise environment_timeout.", lambda f: f["rollouts/failed"] >= 0.95),
    Reading("cut sampling", lambda f: bool(f.get("sampling/cuts")),
        "{sampling/cuts}: rollouts are sampled from another distribution than the policy's, which biases the gradient "
        "(mean importance ratio of a token: {sampling/token_ratio_mean:.3f}; nan without a correction). Remove it."),
    Reading("failing tools", lambda f: f["tools/broken"] >= 0.5,
        "{tools/broken:.0%} of the calls that reach the tool {tools/broken_name} fail: {frequent/tool_error}. Fix the"
        " tool or what it needs, or raise tool_timeout.", lambda f: f["tools/all_broken"] >= 0.98),
    Reading("cut off by max_turn_tokens", lambda f: f["cut/by_turn"] >= 0.5,
        "{cut/by_turn:.0%} of the rollouts have a turn that is cut off at max_turn_tokens={max_turn_tokens}. Raise "
        "max_turn_tokens, or ask for shorter turns in system_prompt.", lambda f: f["cut/by_turn"] >= 0.95),
    Reading("cut off",  # at a third, if a model must learn to be short: a running job has had the time
        lambda f: f["completions/clipped_ratio"] >= (0.3 if f["window"] > 0 else 0.5) and not f["cut/by_turn"] >= 0.5,
        "{completions/clipped_ratio:.0%} of the rollouts{since} are cut off (by the context: {stop/context_length:.0%}"
        ", at agent_timeout: {stop/agent_timeout:.0%}). Raise max_completion_length, max_turn_tokens or "
        "agent_timeout, or ask for shorter turns.", lambda f: f["completions/clipped_ratio"] >= 0.95),
    Reading("malformed calls", lambda f: f["calls/malformed"] >= 0.8,  # untrained models: one in three
        "{calls/malformed:.0%} of the calls in complete turns cannot be run: {frequent/call_error}. Set the model's "
        "own tool_format, or show a whole call in system_prompt.", lambda f: f["calls/failed"] >= 0.98),
    Reading("no calls", lambda f: f["has_tools"] and f["rollouts/called"] <= 0.01,
        "{rollouts/called:.0%} of the rollouts call a tool. Show a whole call in system_prompt, or set tool_format."),
    Reading("no answers", lambda f: f["rollouts/ended"] <= 0.01,
        "{rollouts/ended:.0%} of the rollouts come to an end of their own. Say in system_prompt how to answer."),
    Reading("turns at the limit", lambda f: f["stop/max_turns"] >= 0.8,
        "{stop/max_turns:.0%} of the rollouts{since} still call tools in their last turn. Raise max_env_steps."),
    Reading("unused rewards", lambda f: bool(f.get("rewards/unused")),
        "No number of {rewards/unused} moves an advantage with credit_assignment={credit_assignment}. Choose another "
        "credit_assignment, move it to OUTCOME_REWARD_FUNCS, or set its weight to 0.",
        lambda f: f[NO_SIGNAL] >= 1 and f["rewards/num_varied_and_used"] == 0),
    Reading("silent rewards", lambda f: bool(f.get("rewards/silent")) and f["rewards/num_given"] > 0,
        "{rewards/silent} gave None to all rollouts. Check whether the columns that it reads are empty."),
    Reading("no rewards", lambda f: f["rewards/num_given"] == 0,
        "No reward is a number. Are the columns that they read empty, or does an agent return none?", lambda f: True),
    Reading("constant rewards",
        lambda f: f[NO_SIGNAL] >= 1 and f["rewards/num_varied"] == 0 and not f["rewards/num_given"] == 0,
        "The rewards are the same for all rollouts: {rewards/constant}. Look how the functions compare answers: "
        "'952' is not 952. Then take an easier task or another model.", lambda f: True),
    Reading("main outcome", lambda f: f["outcome/constant"] > 0 and f["rewards/num_varied"] > 0,
        "The main outcome {outcome/name} is {outcome/mean:.3g} for all {outcome/scored} rollouts that were given it. "
        "Only other rewards move the policy. Look how it compares answers, or take an easier task."),
    Reading("no signal", lambda f: f[NO_SIGNAL] >= 1 and not f["rewards/num_varied_and_used"] == 0,
        "No group{since} has trained rollouts whose rewards differ, as credit_assignment counts them. Take prompts "
        "that are sometimes solved, raise num_generations or the temperature.", lambda f: True),
    Reading("tokens", lambda f: f["tokens/differ"] > 0,
        "{tokens/differ:.0%} of the records{since} are not what the model read and wrote. See docs/conversation.md."),
    Reading("logprobs", lambda f: f["sampling/sampling_logp_difference/mean"] > 0.1,  # bf16 gives a few 1e-2
        "The server's logprobs and the trainer's differ by {sampling/sampling_logp_difference/mean:.2g} on "
        "average{since}. Compare the dtype, the chat template and the model of both; see docs/troubleshooting.md."),
    Reading("logprobs of late turns",  # small differences vary with what is written
        lambda f: f[LAST_TURNS] > max(2 * f[FIRST_TURNS], 0.05),
        "The server's logprobs and the trainer's differ by {sampling/logp_difference_last_turns:.2g} in the last turns"
        "{since}, and by {sampling/logp_difference_first_turns:.2g} in the first ones. Compare the positions (RoPE), "
        "the length of the context and the sliding window of both; see docs/troubleshooting.md."),
    Reading("effective share", lambda f: f[EFFECTIVE_SHARE] < 0.5,
        "The importance ratio leaves {sampling/effective_share:.0%} of the tokens{since} in effect. Set "
        "vllm_importance_sampling_mode: token_truncate, or lower max_staleness."),
    Reading("kl", lambda f: f["kl/first"] >= 0.05,  # the same model in bf16: 1e-4; weights that are noise: 7.7
        "The policy is {kl/first:.2g} nats per token away from the reference model before its first step. Look how "
        "the reference is loaded and sharded, set disable_dropout: true, or beta: 0."),
    Reading("reward",
        lambda f: f["reward"] > f["before/reward"] + max(0.05 * abs(f["before/reward"]), 0.01)
        and f["outcome"] < f["before/outcome"] - max(0.1 * abs(f["before/outcome"]), 0.01),
        "The reward rises ({before/reward:.2f} to {reward:.2f}) while its main outcome falls: the policy is paid for "
        "something else. Lower the weight of the reward function that rises in the metrics."),
    Reading("outcome", lambda f: f["best/outcome"] - f["outcome"] >= max(0.5 * abs(f["best/outcome"]), 0.1),
        "The main outcome has fallen from {best/outcome:.2f} to {outcome:.2f}. Go back to an earlier checkpoint."),
    Reading("entropy",
        lambda f: f["window"] > 0 and f["entropy"] < 0.01 and not f["outcome"] >= 0.9 and f[NO_SIGNAL] >= 0.5,
        "The entropy has collapsed ({entropy:.2g}) and the task is not solved. Go back to an earlier checkpoint."),
)  # fmt: skip


def known(facts: dict[str, Any]) -> defaultdict[str, Any]:
    """Facts, with NaN for each that is None or missing."""
    return defaultdict(lambda: math.nan, {name: fact for name, fact in facts.items() if fact is not None})


def troubles(facts: dict[str, Any]) -> list[Reading]:
    """The readings that mean trouble, causes first: their texts have the facts, and `pointless` is True or False."""
    f = known({"since": "", "frequent/failure": "", **facts})
    f["rollouts/failed"] = sum(f[f"stop/{reason}"] for reason in FAILURES)
    f["tokens/differ"] = sum(facts.get(f"tokens/{check}_differ") or 0.0 for check in ("ids", "text"))
    found = [reading for reading in READINGS if reading.when(f)]
    return [each._replace(text=each.text.format_map(f), pointless=bool(each.pointless(f))) for each in found]


def facts_of_settings(trainer: ResumableTrainer) -> dict[str, Any]:
    """Settings of the recipe, and whether the first prompt has what the model must read."""
    args, env, row = trainer.args, trainer.env, trainer.train_dataset[0]
    tools = dict(env.tools) if env.environments is None else {**env.tools, **env.environments.tools_of_class(row)}
    messages = env.with_system_prompt(row.get("prompt") or [{"role": "user", "content": ""}], tools)
    system = "".join(m["content"] for m in messages if m["role"] == "system" and isinstance(m["content"], str))
    read = env.tokenizer.decode(prompt_ids_of(env, row))
    lacking = [name for name in tools if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", read)]
    return {
        **limits_of(args), "max_completion_length": args.max_completion_length, "learning_rate": args.learning_rate,
        "optim": str(getattr(args.optim, "value", args.optim)), "lora": is_peft_model(trainer.model),
        "temperature": trainer._sampling_params["temperature"], "sampling/cuts": text_of_cuts(args),
        "credit_assignment": args.credit_assignment,
        # Shards have no whole weights here, and ZeRO-3 and FSDP2 keep float32 ones beside them.
        "weights/stuck": None if trainer._is_sharded else share_stuck(trainer.model.parameters(), args.learning_rate),
        "has_tools": bool(tools), "prompt/lacks_system": bool(system) and squeezed(system)[:200] not in squeezed(read),
        "prompt/lacks_tools": ", ".join(lacking), "prompt/num_lacking": len(lacking),
        "prompt/lacks_all_tools": len(lacking) == len(tools),
    }  # fmt: skip


@torch.no_grad()
def share_stuck(parameters: Iterable[torch.nn.Parameter], step: float) -> float:
    """The share of the trained weights that rounding leaves the same after a step of this size, up or down."""
    stuck, total = 0.0, 0
    for weights in (p.flatten() for p in parameters if p.requires_grad and p.numel()):
        some = weights[:: -(-weights.numel() // MOST_WEIGHTS)]
        up, down = ((some.float() + move).to(some.dtype) for move in (step, -step))
        stuck += ((up == some) & (down == some)).float().mean().item() * weights.numel()
        total += weights.numel()
    return stuck / max(total, 1)


def facts_of_batches(trainer: ResumableTrainer, batches: list[Batch]) -> dict[str, Any]:
    """The metrics of the batches that a trainer has rolled out last, and what their rollouts add. Collective."""
    args, functions = trainer.args, trainer.reward_functions
    last = {name: values[-len(batches) :] for name, values in trainer._metrics["train"].items() if values}
    metrics = {name: mean(list(filter(is_shown, values)) or values) for name, values in last.items()}
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]

    def of_all_ranks(fact: Callable[[Rollout], Any]) -> list:  # of plain values, which every rank can send
        return gather_object(list(map(fact, rollouts)))

    def cut_by_turn(r: Rollout) -> bool:  # at max_turn_tokens: the completion had room left
        cut = [t for t in r.turns if t.finish_reason == "length" and len(t.token_ids) >= args.longest_turn]
        return bool(cut) and (cut[-1] is not r.turns[-1] or r.new_tokens < args.max_completion_length)

    def calls_of(r: Rollout) -> list[tuple]:
        calls = [(turn, *each) for turn in r.turns for each in zip(turn.calls, turn.results)]
        return [(str(call.name), res.error, res.error and res.text[:500], t.finish_reason) for t, call, res in calls]

    called, tools = of_all_ranks(lambda r: any(turn.calls for turn in r.turns)), defaultdict(list)
    calls = join(of_all_ranks(calls_of))
    for name, error, text, _ in calls:
        tools[name] += [] if error == "call" else [error and text]
    complete = [error for _, error, _, end in calls if end != "length"]
    complete = complete if len(complete) >= MIN_CALLS else []
    broken = {name: share(errors) for name, errors in tools.items() if len(errors) >= MIN_CALLS}
    worst = max(broken, key=broken.get, default=None)
    means = {name: metrics.get(f"rewards/{name}/mean") for name, w in zip(functions.names, functions.weights) if w}
    given = {name: value for name, value in means.items() if is_shown(value)}
    varied = [name for name in given if metrics[f"rewards/{name}/std"] > 1e-6]
    outcome, unused = functions.main_outcome, unused_rewards(functions.names, batches)
    failure = most_frequent(of_all_ranks(lambda r: str(r.error or "") if r.stop_reason in FAILURES else None))
    return {
        **metrics, **trainer.layout.metrics.depth.metrics(trainer.accelerator),
        "rollouts/ended": sum(metrics.get(f"stop/{reason}", math.nan) for reason in COMPLETE),
        "rollouts/called": share(called),
        "cut/by_turn": share(of_all_ranks(cut_by_turn)),
        "prompt/ends_with_assistant": share(
            of_all_ranks(lambda r: bool(r.prompt_messages) and r.prompt_messages[-1]["role"] == "assistant")),
        "num_rollouts": len(called), "frequent/failure": failure and f": {failure}",
        "calls/malformed": share(error == "call" for error in complete), "calls/failed": share(complete),
        "frequent/call_error": most_frequent(text for _, error, text, _ in calls if error == "call"),
        "tools/broken": broken.get(worst), "tools/all_broken": min(broken.values(), default=0),
        "tools/broken_name": worst, "frequent/tool_error": most_frequent(tools[worst]),
        "outcome/name": outcome, "outcome/mean": given.get(outcome),
        "outcome/scored": round(len(called) * metrics.get(f"rewards/{outcome}/frac_scored", 0.0)),
        "outcome/constant": outcome in given and outcome not in varied,
        "rewards/constant": ", ".join(f"{name} {given[name]:.3g}" for name in given) or "no weight is above 0",
        "rewards/silent": ", ".join(
            func.__name__ for func in functions.functions  # those of environments and tools may have nothing to say
            if func.__name__ in means.keys() - given.keys() and func.__module__ != RewardFunctions.__module__
        ),
        "rewards/num_given": len(given) if means else None, "rewards/num_varied": len(varied),
        "rewards/unused": ", ".join(unused), "rewards/num_varied_and_used": len(set(varied) - set(unused)),
    }  # fmt: skip


def share(flags: Iterable[Any]) -> float | None:
    """The share of the flags that are true, None if there are none."""
    flags = list(map(bool, flags))
    return mean(flags) if flags else None


def most_frequent(errors: Iterable[str | None]) -> str:
    """The most frequent error in one line, with how many there are of it; empty if there is none."""
    counts = Counter(" ".join(error.split())[:160].rstrip(".") for error in errors if error)
    return "".join(f"{text} ({number} of {counts.total()} errors)" for text, number in counts.most_common(1))


def facts_of_logs(logs: list[dict[str, Any]], outcome: str | None, window: int) -> dict[str, Any]:
    """Means over the last logs of a job, as `before/...` over as many before them, and the best main outcome."""

    def mean_of(name: str, of: list[dict[str, Any]]) -> float | None:
        values = [log.get(name) for log in of]
        return mean(values) if all(map(is_shown, values)) else None

    windows = [logs[end - window : end] for end in range(len(logs), window - 1, -window)]  # the last one first
    outcomes = [mean_of(f"rewards/{outcome}/mean", of) for of in windows]
    facts = {"window": window, "since": f" in the last {window} logs"}
    for prefix, of, value in zip(("", "before/"), windows, outcomes):
        facts |= {f"{prefix}{name}": mean_of(name, of) for name in of[-1]} | {f"{prefix}outcome": value}
    return facts | {"best/outcome": max(filter(is_shown, outcomes[1:]), default=None)}


class PreflightOver(Exception):
    """The facts of the first batch are known, and no optimizer step is to be taken."""


class Watch(TrainerCallback):
    """Reports on the first batch before the first optimizer step, and warns once of each trouble of a running job."""

    def __init__(self, trainer: ResumableTrainer, say: Callable[[str], None]):
        self.trainer, self.say, self.is_preflight, self.facts = trainer, say, False, None
        self.warned: set[str] = set()

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.say(f"rows: {self.trainer.layout}")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.facts is not None or self.trainer.batch is None:  # None: a subclass brings batches of its own
            return
        self.facts = facts_of_batches(self.trainer, [self.trainer.batch])  # collective
        try:
            self.facts = facts_of_settings(self.trainer) | self.facts
        except Exception as error:  # of a plug-in: no report may end a run
            if self.is_preflight:
                raise
            logger.warning(f"The report on the first batch failed: {error_line(error)}")
            return
        if state.global_step == 0:  # a resumed policy may be far from its reference
            self.facts["kl/first"] = self.facts.get("kl")
        if self.is_preflight:
            raise PreflightOver
        if state.is_world_process_zero:
            self.say(f"first batch: {summary(self.facts)}")
            for trouble in troubles(self.facts):
                logger.warning(f"{trouble.name}: {trouble.text}")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            self._warn(state, WINDOW)

    def on_train_end(self, args, state, control, **kwargs):
        self.warned = set()  # what is still so is said again
        self._warn(state, LEAST_LOGS)

    def _warn(self, state: Any, least: int) -> None:
        logs = [log for log in state.log_history if "reward" in log]
        outcome = self.trainer.reward_functions.main_outcome
        facts = facts_of_logs(logs, outcome, min(WINDOW, max(len(logs), least)))
        for trouble in troubles(facts) if state.is_world_process_zero else ():
            if trouble.name not in self.warned:
                self.warned.add(trouble.name)
                logger.warning(f"Step {state.global_step}, {trouble.name}: {trouble.text}")


def run_reports(trainer: ResumableTrainer) -> list[TrainerCallback]:
    """The callbacks that report on a run: troubles, a line per log, the file of metrics."""
    progress = ProgressLine(trainer)
    return [Watch(trainer, progress.say), progress, MetricsLog(trainer)]


def summary(facts: dict[str, Any]) -> str:
    """A line about a batch of rollouts. A share of no calls is `nan%`."""
    f = known(facts)
    functions = [key.split("/")[1] for key in facts if re.fullmatch("rewards/.*/mean", key) and is_shown(facts[key])]
    rewards = [f"{name} {f[f'rewards/{name}/mean']:.2f} ± {f[f'rewards/{name}/std']:.2f}" for name in functions]
    return (
        f"{f['num_rollouts']} rollouts, {f['turns/mean']:.1f} turns, {f['rollouts/called']:.0%} call a tool, "
        f"{f['tools/failure_frequency']:.0%} of the calls fail ({f['tools/malformed_frequency']:.0%} cannot be run), "
        f"{f['rollouts/ended']:.0%} come to an end, {f['completions/clipped_ratio']:.0%} are truncated; reward "
        f"{f['reward']:.2f} ({', '.join(rewards)}); {f[NO_SIGNAL]:.0%} of the groups without signal"
    )


def plan(trainer: ResumableTrainer) -> list[str]:
    """The lines about the room that a run needs. Collective."""
    args, model = trainer.args, trainer.model
    prompt, completion = longest_prompt(trainer.env, trainer.train_dataset), args.max_completion_length
    rows = args.per_device_train_batch_size * window_of(args, trainer.loss_type)
    num_prompts = rows // args.num_generations or 1 if trainer.layout.kind == "shared" else rows
    budget = args.max_tokens_per_pass or args.per_device_train_batch_size * (prompt + completion)
    tokens = max(min(num_prompts * prompt + rows * completion, budget), prompt + completion)
    in_half, sharded = trainer.accelerator.mixed_precision != "no", trainer._is_sharded
    sizes = [(getattr(p, "ds_numel", p.numel()), p.element_size(), p.requires_grad) for p in model.parameters()]
    each = [(number * (4 if in_half and sharded and trains else size), trains) for number, size, trains in sizes]
    weights, trained = sum(size for size, _ in each), sum(size for size, trains in each if trains)
    if args.beta and getattr(trainer, "ref_model", None) is not None:
        weights += sum(number * size for number, size, _ in sizes)
    # Of each trained weight autocast keeps one during a forward pass, and ZeRO-3 always; FSDP2 only of a layer.
    copies = trained // 2 if in_half and not trainer._dist.is_fsdp else 0
    kept = 0 if sharded else bytes_per_token(trainer)
    of_tokens = f" ({gib(kept * tokens)})" if kept else ""
    free = torch.cuda.mem_get_info()[0] if model.device.type == "cuda" else psutil.virtual_memory().available
    return [
        f"context  {prompt} (longest prompt) + {completion} (max_completion_length) = {prompt + completion} tokens of "
        f"{trainer.env.max_model_len or 'any number'}",
        f"memory   {gib(weights + 3 * trained + copies)} per rank before it is sharded (weights {gib(weights)}, "
        f"gradients {gib(trained)}, Adam {gib(2 * trained)}, half-precision copies {gib(copies)}), and what the "
        f"layers keep of a pass of at most {tokens:,} tokens"
        f"{of_tokens}; beside the weights {gib(free)} are free (see max_tokens_per_pass)",
    ]


def bytes_per_token(trainer: ResumableTrainer) -> int:
    """Bytes that the layers keep of a token for the backward pass: what one row of 128 keeps more than one of 64."""
    model = trainer.accelerator.unwrap_model(trainer.model).train()
    if trainer.args.gradient_checkpointing:
        model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    layers, totals = (model.get_base_model() if is_peft_model(model) else model).base_model, []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for length in (64, 128):
        kept, ids = {}, torch.zeros(1, length, dtype=torch.long, device=model.device)
        with saved_tensors_hooks(keep, lambda tensor: tensor), trainer.accelerator.autocast():
            _graph = layers(input_ids=ids, use_cache=False)
        totals.append(sum(kept.values()))
    return (totals[1] - totals[0]) // 64


def gib(num_bytes: float) -> str:
    """Format a number of bytes for people."""
    return f"{num_bytes / 2**30:.3g} GiB"


@contextmanager
def preflight_settings(args: Any) -> Iterator[None]:
    """A run that writes nothing, tracks nothing and does not wait for long for a server. Raises `ValueError`."""
    if args.resume_from_checkpoint:
        raise ValueError("--preflight checks the model of model_name_or_path. Remove resume_from_checkpoint.")
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        args.output_dir, args.report_to, args.disable_tqdm, args.save_strategy = folder, [], True, "no"
        args.log_rollouts, args.push_to_hub, args.load_best_model_at_end = 0, False, False
        args.save_on_each_node = None  # nothing is saved, and each node has this folder for itself
        args.max_staleness, args.refill_groups, args.eval_on_start = 0, 0, False  # nothing else is sampled
        args.vllm_server_timeout = min(args.vllm_server_timeout, 20.0)
        yield


def run_preflight(trainer: ResumableTrainer) -> int:
    """Print what a run will do, roll out its first batch, and say what that means. Returns 1 if it is pointless."""
    say = partial(print, sep="\n", flush=True) if trainer.accelerator.is_main_process else lambda *lines: None
    watch = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Watch))
    watch.is_preflight = True
    say(*plan(trainer), "", "Sampling the first batch ...")
    try:
        with suppress(PreflightOver):
            trainer.train()
    except (RunError, ServerError) as error:
        say(*(f"{trouble.name}: {trouble.text}" for trouble in troubles(facts_of_settings(trainer))))
        logger.error("the preflight stopped", exc_info=error.__cause__)
        sys.exit(f"error: {error}")
    facts, batches = watch.facts, [trainer.batch]
    uses = trainer.args.steps_per_generation * trainer.args.num_iterations
    # TRL's sampler gives each batch as often as it is used.
    for rows in itertools.islice(trainer.get_train_dataloader(), uses, MOST_BATCHES * uses, uses):
        if facts[NO_SIGNAL] < 1:
            break
        say(f"No group has signal. Sampling batch {len(batches) + 1} ...")
        trainer._generate_and_score_completions(rows)
        batches.append(trainer.batch)
        facts = {**facts, **facts_of_batches(trainer, batches)}
    found = troubles(facts)
    most_resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    adam = "with" if trainer.is_deepspeed_enabled else "without"  # its backward takes the step
    memory = torch.cuda.max_memory_allocated() if trainer.model.device.type == "cuda" else most_resident
    prompt = readable(trainer.env.tokenizer.decode(batches[0].rollouts[0].prompt_ids))
    prompt = prompt if len(prompt) <= 2000 else f"{prompt[:1000]}\n...\n{prompt[-1000:]}"
    say("", "The first prompt, as the model reads it:", prompt, "")
    say(f"{summary(facts)}; {gib(memory)} of memory {adam} Adam", "")
    say("Problems, causes first:" if found else "No problem was found.")
    for number, trouble in enumerate(found, 1):
        say(f"  {number}. {trouble.name}: {trouble.text}")
    if pointless := any(trouble.pointless for trouble in found):
        say("Training would be pointless.")
    return int(pointless)
