"""One table of readings that mean trouble: of a run's first rollouts, and of the last logs of a running job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from transformers import TrainerCallback

from mt_grpo.reports.progress import is_shown

logger = logging.getLogger(__name__)

# Metrics by their names, settings by their keys, and what `facts_of_batches` adds; or those of `facts_of_logs`.
Facts = dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """One line of the table. The facts are filled in into its texts.

    Attributes:
        name: What a warning begins with, and what docs/preflight.md calls it; of a running job it is the metric.
        needs: Names of facts. Where one of them is not known, the reading says nothing.
        when: A function of the facts: whether they mean trouble.
        text: The trouble with its numbers, why it matters, and which setting to change.
        ends: A function of the facts: whether training would be pointless.
    """

    name: str
    needs: tuple[str, ...]
    when: Callable[[Facts], bool]
    text: str
    ends: Callable[[Facts], bool] = lambda facts: False


@dataclass(frozen=True)
class Trouble:
    """A reading that means trouble.

    Attributes:
        name: The reading's.
        text: The reading's, with the facts filled in.
        pointless: Whether training would be pointless.
    """

    name: str
    text: str
    pointless: bool


LR = 0.01  # AdamW moves every weight by about the learning rate in a step; the highest that a recipe here uses is 6e-4
ROUNDED = 0.5  # of the weights; in bfloat16 1e-6 moves 0.5% of the tiny model's, 1e-5 4%, 3e-4 91% (docs/speed.md)
CUT = 0.5  # a model that must learn to be short is cut off in a third of the rollouts; half of them teach nothing else
CUT_ALL = 0.95  # what is left gives no group two whole rollouts
FAILS = 0.8  # of the calls; untrained models write one malformed call in three
FAILS_ALL = 0.98
FAILS_TOOL = 0.5  # of the calls that reach one tool; arguments on which a tool that is well raises are fewer
MIN_CALLS = 8  # fewer are no share to judge by: half of four calls fail by chance in one of three first batches
NEVER = 0.01  # one rollout of a hundred that calls, or answers, is what reinforcement learning can begin with
SAME = 0.5  # of the groups; eight samples of one action of two are the same in one group of 128
HOT = 1.5  # at such a temperature a model of 0.6B and more writes what is no language
ENV_ERRORS = 0.2  # rollouts that are not trained on
AT_LIMIT = 0.8  # of the rollouts end because max_env_steps is reached
REPEATED = 20  # times that a run goes through its data; epochs over a data set of its usual size are fewer
GAP = 0.1  # mean difference of logprobs; bf16 gives a few 1e-2
FAR_REFERENCE = 0.05  # nats per token at the first step; the same model in bf16: 1e-4, weights that are noise: 7.7
WINDOW = 20  # logs of a running job: a batch of a hundred rollouts is too few to judge by
LEAST_LOGS = 5  # at the end of a short run; fewer would be chance
LOST = 0.5  # of the best mean of the main outcome over a window, and 0.1 at least
CLIPPED, CLIPPED_UP = 0.3, 0.1  # of the rollouts are cut off, and so many more than before
ENTROPY, UNSOLVED, STUCK = 0.01, 0.9, 0.5  # entropy below it is gone; an outcome below; groups without signal above
UP, DOWN, FLOOR = 0.05, 0.1, 0.01  # of its value, and at least: what the reward gains while the outcome loses


def outcome_falls(facts: Facts) -> bool:
    """Whether the reward rises while its main outcome falls."""
    reward, outcome = facts["before/reward"], facts["before/outcome"]
    rises = facts["reward"] > reward + max(UP * abs(reward), FLOOR)
    return rises and facts["outcome"] < outcome - max(DOWN * abs(outcome), FLOOR)


READINGS = (  # of the first rollouts
    Reading(
        "bundled model", ("model/other_task",), lambda f: f["model/other_task"],
        "This bundled tiny model was trained for the format and the task of its own recipe alone. It cannot "
        "learn yours. Take a model that can write, such as SmolLM2 (hf_recipes/SmolLM2) or Qwen3 (hf_recipes/Qwen).",
        lambda f: True,
    ),
    Reading(
        "system prompt", ("prompt/lacks_system",), lambda f: f["prompt/lacks_system"],
        "The model does not read the system prompt: the chat template leaves it out. It says what tools there are "
        "and how to answer. Use a chat template with a system role, or put the text into the prompts and set "
        "system_prompt: ''.",
        lambda f: f["has_tools"],
    ),
    Reading(
        "tools", ("prompt/lacks_tools",), lambda f: bool(f["prompt/lacks_tools"]),
        "The prompt does not mention the tool {prompt/lacks_tools}.{prompt/nearest} A model does not call a tool "
        "that its prompt does not mention. Write its name as it is, or {{tool_descriptions}}, into system_prompt, or "
        "set tool_format to hermes or native, which show the tools by the chat template.",
        lambda f: f["prompt/lacks_all_tools"] and f.get("rollouts/called", 0.0) <= NEVER,
    ),
    Reading(
        "last message", ("prompt/ends_with_assistant",), lambda f: f["prompt/ends_with_assistant"] > 0,
        "{prompt/ends_with_assistant:.0%} of the prompts end with a message of the assistant. The model reads this "
        "message as its own finished turn and starts another one. It may contain the answer. Remove this message "
        "from the column prompt, or add a user message after it.",
    ),
    Reading(
        "few rows", ("data/different", "data/passes"), lambda f: f["data/passes"] >= REPEATED,
        "The training data has {data/different} different rows, and the run goes through them {data/passes:.0f} "
        "times. The policy can learn the answers by heart, and no reward of training shows it. Take more rows, lower "
        "max_steps or num_train_epochs, or evaluate on other rows by eval_strategy.",
    ),
    Reading(
        "learning rate", ("learning_rate", "optim"),
        lambda f: f["learning_rate"] >= LR and f["optim"].startswith("adam"),
        "learning_rate is {learning_rate:g}. Adam moves every weight by about the learning rate in one step, which "
        "destroys the model in the first step. Set learning_rate to 1e-6 (all weights of a pretrained model), 1e-5 "
        "to 1e-4 (LoRA), or 1e-3 at most (tiny).",
        lambda f: True,
    ),
    Reading(
        "learning rate", ("learning_rate",), lambda f: f["learning_rate"] == 0,
        "learning_rate is 0. No weight changes. Set learning_rate to 1e-6 (all weights of a pretrained model), or "
        "1e-5 to 1e-4 (LoRA).",
        lambda f: True,
    ),
    Reading(
        "rounding", ("weights/stuck",),
        lambda f: f["weights/stuck"] >= ROUNDED and f["learning_rate"] > 0 and f["optim"].startswith("adam"),
        "A step of learning_rate={learning_rate:g} is lost to rounding for {weights/stuck:.0%} of the weights. Adam "
        "moves a weight by about the learning rate, so these bfloat16 weights never change. Set dtype: float32, with "
        "bf16: true to compute in bfloat16, or train with ZeRO-3 or FSDP2, which keep float32 weights, too.",
    ),
    Reading(
        "temperature", ("temperature",), lambda f: f["temperature"] >= HOT,
        "temperature is {temperature:g}. Above 1 unlikely tokens become likely: calls and answers break, and more so "
        "the longer they are. Set temperature: 1.0.",
    ),
    Reading(
        "cut sampling", ("sampling/cuts", "sampling/token_ratio_mean"), lambda f: bool(f["sampling/cuts"]),
        "{sampling/cuts} changes the distribution that is sampled from. The importance ratio of a token is "
        "{sampling/token_ratio_mean:.3f} on average, with the same weights on both sides. It should be 1: the loss "
        "is biased, and scaled down where the ratio is below 1. Remove {sampling/cuts}, or set "
        "vllm_importance_sampling_correction: false where the weights are never older.",
    ),
    Reading(
        "environment errors", ("stop/environment_error",), lambda f: f["stop/environment_error"] >= ENV_ERRORS,
        "In {stop/environment_error:.0%} of the rollouts the environment failed: {frequent/environment_error} These "
        "rollouts are not trained on. Fix the environment, or raise environment_timeout.",
        lambda f: f["stop/environment_error"] >= CUT_ALL,
    ),
    Reading(
        "identical rollouts", ("groups/identical",), lambda f: f["groups/identical"] >= SAME,
        "In {groups/identical:.0%} of the groups all rollouts are the same, at temperature={temperature:g}. A group "
        "learns from the difference between its rollouts. Set temperature: 1.0 if it is lower. Otherwise look "
        "whether top_k, top_p or min_p leave one choice, or raise the temperature if the model already solves this "
        "task every time.",
        lambda f: f["credit/frac_groups_without_signal"] >= 1.0,
    ),
    Reading(
        "failing tools", ("tools/broken",), lambda f: f["tools/broken"] >= FAILS_TOOL,
        "{tools/broken:.0%} of the calls that reach {tools/broken_name} fail: {frequent/tool_error} The model learns "
        "not to call it. Fix the tool or what it needs (a key, a server, a file). If the error says so, raise "
        "tool_timeout.",
        lambda f: f["tools/all_broken"] >= FAILS_ALL,
    ),
    Reading(
        "cut off by max_turn_tokens", ("cut/by_turn",), lambda f: f["cut/by_turn"] >= CUT,
        "{cut/by_turn:.0%} of the rollouts have a turn that is cut off at max_turn_tokens={max_turn_tokens}. A "
        "truncated turn is neither a whole call nor an answer, so it gets no reward. Raise max_turn_tokens, or ask "
        "for shorter turns in system_prompt.",
        lambda f: f["cut/by_turn"] >= CUT_ALL,
    ),
    Reading(
        "cut off", ("cut/by_completion",), lambda f: f["cut/by_completion"] >= CUT,
        "{cut/by_completion:.0%} of the rollouts are cut off at max_completion_length={max_completion_length}. "
        "{tokens/read:.0%} of their tokens are results and replies. What is cut off has no answer, so it gets no "
        "reward for one. Raise max_completion_length. If most tokens are results, lower max_tool_response_tokens "
        "({max_tool_response_tokens} now); otherwise set max_turn_tokens and ask for shorter turns.",
        lambda f: f["cut/by_completion"] >= CUT_ALL,
    ),
    Reading(
        "context", ("stop/context_length",), lambda f: f["stop/context_length"] >= CUT,
        "{stop/context_length:.0%} of the rollouts fill the model's context. What is cut off has no answer, so it "
        "gets no reward for one. Lower max_completion_length or shorten the prompts; on a server raise "
        "--max-model-len.",
        lambda f: f["stop/context_length"] >= CUT_ALL,
    ),
    Reading(
        "malformed calls", ("calls/malformed",), lambda f: f["calls/malformed"] >= FAILS,
        "{calls/malformed:.0%} of the calls in complete turns cannot be run: {frequent/call_error} The model does "
        "not know this way of writing calls, or these tools. Set the tool_format that the model was trained on "
        "(native, hermes), show a whole call in system_prompt, or lower the temperature ({temperature:g} now) if it "
        "is above 1.",
        lambda f: f["calls/failed"] >= FAILS_ALL,
    ),
    Reading(
        "no calls", ("rollouts/called",), lambda f: f["has_tools"] and f["rollouts/called"] <= NEVER,
        "{rollouts/called:.0%} of the rollouts call a tool. A call that is never tried is never rewarded. Show a "
        "whole call in system_prompt, set the model's own tool_format, or raise the temperature.",
    ),
    Reading(
        "no answers", ("rollouts/ended",), lambda f: f["rollouts/ended"] <= NEVER,
        "{rollouts/ended:.0%} of the rollouts come to an end of their own, such as an answer. A reward for the "
        "answer is then 0 for all. Say in system_prompt how to answer, with an example; raise max_env_steps, "
        "max_completion_length.",
    ),
    Reading(
        "turns at the limit", ("stop/max_turns",), lambda f: f["stop/max_turns"] >= AT_LIMIT,
        "{stop/max_turns:.0%} of the rollouts still call tools in the last turn that max_env_steps={max_env_steps} "
        "allows. They have no answer. Raise max_env_steps, or tell the model how many calls it has.",
    ),
    Reading(
        "unused rewards", ("rewards/unused", "credit/frac_groups_without_signal"), lambda f: bool(f["rewards/unused"]),
        "No number of {rewards/unused} moves an advantage with credit_assignment={credit_assignment}. What it "
        "rewards is not trained. Choose another credit_assignment, move it to OUTCOME_REWARD_FUNCS, or set its "
        "weight to 0.",
        lambda f: not f["rewards/varied_and_used"] and f["credit/frac_groups_without_signal"] >= 1.0,
    ),
    Reading(
        "no rewards", ("rewards/given",), lambda f: not f["rewards/given"],
        "No reward function gave a number to any rollout. All of them gave None. There is nothing to compare. A "
        "function gives None if it does not apply, for example if a row has no answer to compare with. Check whether "
        "the columns that the functions read are empty.",
        lambda f: True,
    ),
    Reading(
        "constant rewards", ("rewards/constant", "credit/frac_groups_without_signal"),
        lambda f: (
            f["rewards/given"] != [] and not f["rewards/varied"] and f["credit/frac_groups_without_signal"] >= 1.0
        ),
        "The rewards are the same for all rollouts: {rewards/constant}. Advantages are differences within a group: "
        "all of them are 0. Read some conversations (scripts/evaluate.py --show 5): does each tool return what you "
        "expect? Look how the functions compare answers: a turn's answer is text, and '952' is not 952. Then take an "
        "easier task, give a part of the reward for a part of the way, or take another model.",
        lambda f: True,
    ),
    Reading(
        "main outcome", ("outcome/constant", "outcome/mean"),
        lambda f: f["outcome/constant"] and bool(f["rewards/varied"]),
        "The main outcome {outcome/name} is {outcome/mean:.3g} for all {outcome/scored} rollouts that were given it. "
        "Only other rewards "
        "move the policy, and it may learn these alone. Look whether the function can give anything else: how it "
        "compares answers, and what the data has as answer. Then take an easier task, or a model that solves some of "
        "it.",
    ),
    Reading(
        "nothing trained", ("credit/frac_rollouts_trained",), lambda f: f["credit/frac_rollouts_trained"] == 0,
        "No rollout has a token in the loss. Each of them failed, has no outcome, or is truncated and left out by "
        "mask_truncated_completions. Look at the stop reasons in rollouts.*.jsonl. Raise max_completion_length, or "
        "look why no outcome function gives a number.",
        lambda f: True,
    ),
    Reading(
        "no signal", ("credit/frac_groups_without_signal",),
        lambda f: f["credit/frac_groups_without_signal"] >= 1.0 and bool(f["rewards/varied_and_used"]),
        "No group of {num_generations} rollouts has rewards that differ, as credit_assignment={credit_assignment} "
        "counts them. Advantages are differences within a group: all of them are 0. Raise num_generations or the "
        "temperature, or take prompts that are neither always nor never solved.",
        lambda f: True,
    ),
    Reading(
        "tokens", ("tokens/differ",), lambda f: f["tokens/differ"] > 0,
        "{tokens/differ:.0%} of the records are not what the model read and wrote. A warning above shows where. "
        "Training then reads other tokens than inference did, which no other metric shows. See docs/tokenization.md.",
    ),
    Reading(
        "logprobs", ("sampling/sampling_logp_difference/mean",),
        lambda f: f["sampling/sampling_logp_difference/mean"] > GAP,
        "The server's logprobs and the trainer's differ by {sampling/sampling_logp_difference/mean:.2g} on average. "
        "The server does not sample from the distribution that is trained. Compare the dtype, the chat template and "
        "the model of both; see docs/faults.md.",
    ),
)  # fmt: skip
OF_LOGS = (  # readings of the last logs of a running job, whose facts are those of `facts_of_logs`
    Reading(
        "kl", ("kl/first",), lambda f: f["kl/first"] >= FAR_REFERENCE,
        "The policy is {kl/first:.2g} nats per token away from the reference model before its first step. It should "
        "be 0. Look how the reference is loaded and sharded. A dropout, which the reference does not draw, is left "
        "out by disable_dropout: true. Without a reference, set beta: 0.",
    ),
    Reading(
        "credit/frac_groups_without_signal", ("credit/frac_groups_without_signal",),
        lambda f: f["credit/frac_groups_without_signal"] >= 1.0,
        "No group has had rewards that differ in the last {window} logs, so nothing is learned. Look at "
        "rollouts.*.jsonl: is the task always or never solved? Take other prompts, raise num_generations or the "
        "temperature.",
    ),
    Reading(
        "reward", ("reward", "before/reward", "outcome", "before/outcome"), outcome_falls,
        "The reward rises ({before/reward:.2f} to {reward:.2f}) while its main outcome falls: the policy is paid for "
        "something else. Compare the reward functions in the metrics, and lower the weight of the one that rises.",
    ),
    Reading(
        "outcome", ("outcome", "best/outcome"),  # the best is known at the end of a run alone
        lambda f: f["best/outcome"] - f["outcome"] >= max(LOST * abs(f["best/outcome"]), 0.1),
        "The main outcome has fallen from {best/outcome:.2f} to {outcome:.2f}: what was learned is lost. Go back to "
        "an earlier checkpoint, with a beta above 0. For a lower learning_rate: as model_name_or_path.",
    ),
    Reading(
        "stop/max_turns", ("stop/max_turns",), lambda f: f["stop/max_turns"] >= AT_LIMIT,
        "{stop/max_turns:.0%} of the rollouts still call tools in their last turn and give no answer. Raise "
        "max_env_steps, or tell the model how many calls it has.",
    ),
    Reading(
        "completions/clipped_ratio", ("completions/clipped_ratio", "before/completions/clipped_ratio"),
        lambda f: f["completions/clipped_ratio"] >= max(CLIPPED, f["before/completions/clipped_ratio"] + CLIPPED_UP),
        "More rollouts are cut off ({before/completions/clipped_ratio:.0%} before, {completions/clipped_ratio:.0%} "
        "now): the policy writes longer and longer turns. Raise max_completion_length, set max_turn_tokens, or give "
        "a reward that falls with the length.",
    ),
    Reading(
        "entropy", ("entropy",),
        lambda f: f["entropy"] < ENTROPY and (f["outcome"] or 0.0) < UNSOLVED
        and (f.get("credit/frac_groups_without_signal") or 0.0) >= STUCK,
        "The entropy has collapsed ({entropy:.2g}) and the task is not solved: all rollouts of a group are the same. "
        "Go back to an earlier checkpoint, with a beta above 0, or a higher temperature. For a lower learning_rate: "
        "as model_name_or_path.",
    ),
)  # fmt: skip


def troubles(facts: Facts, readings: tuple[Reading, ...] = READINGS) -> list[Trouble]:
    """The readings that mean trouble, causes first.

    >>> facts = {"learning_rate": 1.0, "optim": "adamw_torch"}
    >>> [(trouble.name, trouble.pointless) for trouble in troubles(facts)]
    [('learning rate', True)]
    """
    found = []
    for reading in readings:
        known = all(facts.get(name) is not None for name in reading.needs)
        if known and reading.when(facts):
            found.append(Trouble(reading.name, reading.text.format_map(facts), reading.ends(facts)))
    return found


def troubles_at_end(logs: list[dict[str, Any]], outcome: str | None) -> list[Trouble]:
    """Problems in the last logs of a run that is over. It may have fewer logs than a running job needs.

    Args:
        logs: All logs of the run, oldest first; those of evaluations are passed over.
        outcome: The name of the outcome reward that counts most.
    """
    logs = [log for log in logs if "reward" in log]
    window = min(WINDOW, len(logs))
    if window < LEAST_LOGS:
        return []
    facts = facts_of_logs(logs, outcome, window)
    earlier = [logs[at : at + window] for at in range(len(logs) - window, -1, -window)][1:]
    means = [facts_of_logs(each, outcome, window)["outcome"] for each in earlier]
    facts["best/outcome"] = max(filter(is_shown, means), default=None)
    return troubles(facts, OF_LOGS)


def facts_of_logs(logs: list[dict[str, Any]], outcome: str | None, window: int = WINDOW) -> Facts:
    """Means over the last `window` logs, and as `before/...` over as many logs before them.

    A mean is None where there are fewer logs, or where one of them lacks the metric.

    Args:
        logs: The metrics of a job, oldest first.
        outcome: The name of the outcome reward whose mean is the fact `outcome`.
    """

    def window_mean(name: str, of: list[dict[str, Any]]) -> float | None:
        values = [log.get(name) for log in of]
        return mean(values) if len(values) == window and all(map(is_shown, values)) else None

    facts: Facts = {"window": window}
    for prefix, of in (("", logs[-window:]), ("before/", logs[-2 * window : -window])):
        facts |= {f"{prefix}{name}": window_mean(name, of) for name in logs[-1]}
        facts[f"{prefix}outcome"] = window_mean(f"rewards/{outcome}/mean", of)
    return facts


class Watch(TrainerCallback):
    """Warns on rank 0 of a running job in trouble, once for each reading.

    Args:
        outcome: The name of the outcome reward that counts most; None where there is none.
    """

    def __init__(self, outcome: str | None):
        self.outcome, self.logs, self.warned = outcome, [], set()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "reward" not in logs or not state.is_world_process_zero:
            return
        self.logs = [*self.logs, logs][-2 * WINDOW :]
        facts = facts_of_logs(self.logs, self.outcome)
        if state.global_step == 1:  # computed before the first step of the optimizer
            facts["kl/first"] = logs.get("kl")
        for trouble in troubles(facts, OF_LOGS):
            if trouble.name not in self.warned:
                self.warned.add(trouble.name)
                logger.warning(f"Step {state.global_step}, {trouble.name}: {trouble.text}")
