"""From the rows of a log to rollouts, and the conversations that they are."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from typing import Any

from mt_grpo.integrations.replay import logged
from mt_grpo.reports.rollout_log import read_rollouts
from mt_grpo.rollout import Context, Rollout, StopReason, ToolCall, ToolResult, Turn

GROUP = "logged_group"  # the column of the training rows that has the number of the group in the log
Group = list[dict[str, Any]]  # rows of the log, in the order of the rollouts


@functools.cache
def groups_of(source: str) -> list[Group]:
    """The groups that a log's steps, or the one of `directory:STEP`, were trained on, in their order.

    Raises `ValueError` for a log that lacks rollouts, or what is needed of them.
    """
    folder, wanted = split(source)
    batches: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}  # (step, micro-batch) -> index -> row
    for row in read_rollouts(folder):
        if row["mode"] == "train" and wanted in (None, row["step"]):
            batch = batches.setdefault((row["step"], row.get("micro_batch", 0)), {})
            batch[row["index"]] = row  # a resumed run rolls out again: the last one counts
    if not batches:
        of_step = "" if wanted is None else f" of step {wanted}"
        raise ValueError(f"train_from_rollouts: {folder} has no rollouts of training{of_step}.")
    groups: list[Group] = []
    for (step, _), rows in sorted(batches.items()):
        check_step(folder, step, rows)
        size = rows[0]["group_size"]
        groups += [[rows[i] for i in range(first, first + size)] for first in range(0, len(rows), size)]
    if len({(rows[0]["group_size"], len(rows)) for rows in batches.values()}) > 1:
        raise ValueError(f"train_from_rollouts: the batches of {folder} differ in size. Name one step: {folder}:STEP.")
    return groups


def split(source: str) -> tuple[str, int | None]:
    """The folder, and the number of the step, if there is one."""
    match = re.fullmatch(r"(.*):(\d+)", source)
    return (match[1], int(match[2])) if match else (source, None)


def check_step(folder: str, step: int, rows: dict[int, dict[str, Any]]) -> None:
    """Raise `ValueError` if a step's rows cannot be trained as they were."""
    first, where = next(iter(rows.values())), f"train_from_rollouts: {folder}, step {step}"
    if "replay" not in first:
        raise ValueError(f"{where}: the log has no tokens. Write it with log_rollout_tokens: true.")
    if rows.keys() != set(range(first["batch_size"])):
        size = first["batch_size"]
        raise ValueError(f"{where}: the log has {len(rows)} of {size} rollouts. Write it with log_rollouts: {size}.")
    if any(row["images"] for row in rows.values()):
        raise ValueError(f"{where}: the rollouts have images, which the log holds only as files.")


def data_rows(source: str) -> list[dict[str, Any]]:
    """A row of data per group, as the functions got it, with its prompt and the number of the group."""
    firsts = [group[0] for group in groups_of(source)]
    prompts = [of_log["messages"][: of_log["num_prompt_messages"]] for of_log in firsts]
    rows = zip(prompts, [json.loads(of_log["replay"])["row"] for of_log in firsts])
    return [{"prompt": prompt, **row, GROUP: k} for k, (prompt, row) in enumerate(rows)]


def replaying(script_args: Any, args: Any, conversation: type) -> type:
    """The class of conversations whose rollouts are those of the log. The settings follow the log's batches."""
    source, rewards = script_args.train_from_rollouts, script_args.reward_fn == os.path.abspath(logged.__file__)
    groups, uses = groups_of(source), args.steps_per_generation * args.num_iterations
    size, batch_size = groups[0][0]["group_size"], groups[0][0]["batch_size"]
    wanted = {"num_generations": size, "max_staleness": 0, "refill_groups": 0, "eval_strategy": "no"}
    for key, expected in wanted.items():
        if (value := getattr(args, key)) != expected:
            value = getattr(value, "value", value)
            raise ValueError(f"train_from_rollouts: {key} is {value}, expected {expected}. Nothing is sampled.")
    if os.path.realpath(args.output_dir) == os.path.realpath(split(source)[0]):
        raise ValueError(f"train_from_rollouts: output_dir is the log's, {args.output_dir}. Its log would begin anew.")
    if batch_size % args.generation_batch_size:
        raise ValueError(
            f"train_from_rollouts: a batch of this run has {args.generation_batch_size} rollouts, and one of the log "
            f"{batch_size}. Change per_device_train_batch_size or gradient_accumulation_steps."
        )
    args.shuffle_dataset = False  # groups come in the order of the log, so that a batch is one of the log's
    batches = len(groups) * size // args.generation_batch_size
    steps = math.ceil(batches * uses / args.gradient_accumulation_steps)
    args.max_steps = min(args.max_steps, steps) if args.max_steps > 0 else steps
    # Where the sampling logprobs are known, the loss has an importance ratio, as in the run that wrote the log.
    turns = (turn for group in groups for row in group for turn in row["turns"])
    args.use_vllm, args.vllm_mode = all(turn["logprobs"] is not None for turn in turns), "log"
    if rewards:  # what is logged is weighted
        args.turn_reward_weights = args.outcome_reward_weights = None

    class Replayed(conversation):
        """The conversations of a log."""

        def __init__(self, *settings: Any, environment: Any = None, **further: Any):
            # Environments bring reward functions of their own.
            super().__init__(*settings, environment=None if rewards else environment, **further)

        def start(self, prompts: list, llm: Any = None, rows: list[dict[str, Any]] | None = None) -> list[Rollout]:
            first = int(os.environ.get("RANK", 0)) * len(rows)  # of this rank, whose first group may have begun before
            places = [(row, groups[row[GROUP]][(first + i) % size]) for i, row in enumerate(rows)]
            return [self.again(row, of_log) for row, of_log in places]

        def again(self, row: dict[str, Any], of_log: dict[str, Any]) -> Rollout:
            """The rollout of a row of the log. `environment` is an instance that was never reset."""
            rollout = rollout_of(of_log, row, rewards)
            for k, turn in enumerate(rollout.turns):  # the run that wrote the log may have asked for no states
                if turn.state_key is None and self.state_key is not None:
                    turn.state_key = self.state_key(rollout.turns[:k])
            if self.environments is not None:
                rollout.environment = object.__new__(self.environments.class_of(row))
            return rollout

        async def converse_whole(self, rollout: Rollout, llm: Any, sampling_params: Any = None) -> Rollout:
            return rollout

        def close(self, states: list[Rollout] | None = None) -> None:
            """Nothing was opened."""

    return Replayed


def rollout_of(of_log: dict[str, Any], row: dict[str, Any], with_rewards: bool = False) -> Rollout:
    """The rollout of a row of the log. `with_rewards`: turns have the logged rewards, and no others."""
    more, count = json.loads(of_log["replay"]), of_log["num_prompt_messages"]
    rollout = Rollout(of_log["messages"][:count], more["prompt_ids"], row=row, reward=more["reward"])
    rollout.first_messages, rollout.stop_reason = more["first_messages"], StopReason(of_log["stop_reason"])
    rollout.error = of_log["error"] and RuntimeError(of_log["error"])
    rollout.turns = [turn_of(*each) for each in zip(of_log["turns"], of_log["info"])]
    for turn, reward in zip(rollout.turns, of_log["turn_rewards"]) if with_rewards else ():
        numbers = {"turn": reward, "rollout_turn": more["rollout_turn"], "outcome": more["outcome"]}
        turn.info, turn.reward = {**turn.info, "logged": numbers}, None
        turn.results = [ToolResult(each.text, each.error, each.seconds) for each in turn.results]
    return rollout


def turn_of(of_log: dict[str, Any], info: str) -> Turn:
    """The turn of a row of the log."""
    rest, logprobs = json.loads(of_log["replay"]), of_log["logprobs"]
    rest["context"] = rest["context"] and Context(*rest["context"])
    return Turn(
        **{name: of_log[name] for name in ("token_ids", "text", "finish_reason", "answer", "seconds", "reward")},
        logprobs=logprobs and [math.nan if value is None else value for value in logprobs],  # unknown ones are null
        calls=[ToolCall(each["name"], json.loads(each["arguments"]), each["error"]) for each in of_log["calls"]],
        results=[
            ToolResult(*(each[key] for key in ("text", "error", "seconds", "reward"))) for each in of_log["results"]
        ],
        observation_ids=of_log["read_ids"],
        info=json.loads(info),
        tools=of_log["tools"] and json.loads(of_log["tools"]),
        **rest,
    )
