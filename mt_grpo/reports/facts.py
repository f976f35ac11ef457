"""Facts of a recipe and of its first rollouts, for `troubles`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import pickle
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from statistics import mean
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model

from mt_grpo.base.json_types import image_or_str
from mt_grpo.base.rows import IMAGE_COLUMNS
from mt_grpo.conversation.conversations import limits_of
from mt_grpo.recipe.checks import prompt_ids_of
from mt_grpo.recipe.refusals import text_of_cuts
from mt_grpo.reports.troubles import MIN_CALLS, REPEATED, Facts, tokens_that_differ
from mt_grpo.rollout import FAILURES, Rollout, StopReason, ToolResult, join
from mt_grpo.run.trainer import ResumableTrainer
from mt_grpo.training.batch import Batch, unused_rewards
from mt_grpo.training.rewards import RewardFunctions
from mt_grpo.training.token_checks import squeezed

MOST_SHOWN, MOST_SENT = 160, 500  # characters of an error, on the screen and between ranks
MOST_WEIGHTS = 2**16  # so many weights of a parameter are looked at, evenly spread
WORD = r"[\w-]+"  # a tool's name is one
# The questions that the models of hf_recipes/tiny were trained on, each after the first word of a model's folder.
TINY = (
    r"calculator: What is \d|chain: Start with \d|search: What is the|zoom: .*Which digit is|"
    r"tools: (What is \d|How many people|\w+ has \d)"
)


def steps_of(num_rows: int, args: Any) -> tuple[int, int, int]:
    """(batches of an epoch, its optimizer steps, those of the run)."""
    batches = num_rows // (args.generation_batch_size // args.num_generations)
    steps = math.ceil(batches * args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps)
    return batches, steps, args.max_steps if args.max_steps > 0 else math.ceil(steps * args.num_train_epochs)


def facts_of_settings(trainer: ResumableTrainer) -> Facts:
    """Settings of the recipe, and whether the first prompt holds what the model must read."""
    args, env = trainer.args, trainer.env
    row = trainer.train_dataset[0]
    tools = dict(env.tools) if env.environments is None else {**env.tools, **env.environments.tools_of_class(row)}
    messages = env.with_system_prompt(row.get("prompt") or [{"role": "user", "content": ""}], tools)
    system = "".join(m["content"] for m in messages if m["role"] == "system" and isinstance(m["content"], str))
    read = env.tokenizer.decode(prompt_ids_of(env, row))
    lacking = [name for name in tools if not stands_in(name, read)]
    return {
        **facts_of_data(trainer.train_dataset, args, env.environments is not None),
        **limits_of(args), "max_tool_response_tokens": env.result_limit,
        "max_completion_length": args.max_completion_length, "learning_rate": args.learning_rate,
        "lora": is_peft_model(trainer.model),
        "groups_per_step": args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
        / args.num_generations,
        "optim": str(getattr(args.optim, "value", args.optim)),
        "temperature": trainer._sampling_params["temperature"], "sampling/cuts": text_of_cuts(args),
        # Shards have no whole weights here, and ZeRO-3 and FSDP2 keep float32 ones beside them.
        "weights/stuck": None if trainer._is_sharded else share_stuck(trainer.model.parameters(), args.learning_rate),
        "model/other_task": is_other_task(trainer.model.config._name_or_path, str(messages[-1]["content"])),
        "has_tools": bool(tools), "prompt/lacks_system": bool(system) and squeezed(system)[:200] not in squeezed(read),
        "prompt/lacks_tools": ", ".join(lacking), "prompt/lacks_all_tools": len(lacking) == len(tools),
        "prompt/nearest": "".join(nearest(name, re.findall(WORD, read)) for name in lacking[:1]),
    }  # fmt: skip


def is_other_task(model: str, question: str) -> bool:
    """Whether a bundled tiny model is asked a question that it was not trained for.

    >>> [is_other_task("hf_recipes/tiny/chain-model", question) for question in ("Start with 2.", "What is 2 + 3?")]
    [False, True]
    """
    name = re.search(r"hf_recipes/tiny/([a-z]+)-", model)
    return bool(name and question) and not re.match(TINY, f"{name[1]}: {question}")


def stands_in(name: str, text: str) -> bool:
    """Whether a tool's name stands in a text as a word of its own.

    >>> stands_in("search", "Call wiki_search or web-search."), stands_in("search", "Call `search(query)`.")
    (False, True)
    """
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def nearest(name: str, words: Iterable[str]) -> str:
    """A sentence about the word that is most like a tool's name; empty where none is.

    >>> nearest("search", ["Call", "wiki_search"]), nearest("search", ["Call", "add"])
    (" It says 'wiki_search'.", '')
    """
    close = difflib.get_close_matches(name, sorted(set(words)), n=1)
    return f" It says {close[0]!r}." if close else ""


def facts_of_data(train: Any, args: Any, has_environment: bool) -> Facts:
    """How many rows are different, and how often the run goes through them; nothing where no row says anything.

    Rows are counted until there are so many that a run goes through them fewer than `REPEATED` times.
    """
    batches = steps_of(len(train), args)[2] * args.gradient_accumulation_steps
    prompts = batches / (args.steps_per_generation * args.num_iterations)
    prompts *= args.generation_batch_size // args.num_generations
    columns = list(train.column_names)
    if not has_environment:
        columns = [name for name in ("prompt", *IMAGE_COLUMNS) if name in columns]
    seen = set()
    for row in train.select_columns(columns) if columns else []:
        if not set(columns) - {"prompt", *IMAGE_COLUMNS} and not any(
            message["content"] for message in row.get("prompt") or []
        ):
            return {}  # the environment brings the prompts
        seen.add(hash(json.dumps(row, sort_keys=True, default=image_or_str)))
        if len(seen) * REPEATED > prompts:
            break
    return {"data/different": len(seen), "data/passes": prompts / max(len(seen), 1)}


@torch.no_grad()
def share_stuck(parameters: Iterable[torch.nn.Parameter], step: float) -> float:
    """The share of the trained weights that are the same after a step of this size, up or down: rounding undoes it.

    bfloat16 has 8 significant bits: beside 0.02 its numbers are 1.2e-4 apart, beside 1e-4 they are 4.8e-7 apart.

    >>> weights = torch.nn.Parameter(torch.tensor([1e-4, 0.02], dtype=torch.bfloat16))
    >>> share_stuck([weights], 1e-6), share_stuck([weights.float()], 1e-6)
    (0.5, 0.0)
    """
    stuck, total = 0.0, 0
    for weights in (p.flatten() for p in parameters if p.requires_grad and p.numel()):
        some = weights[:: -(-weights.numel() // MOST_WEIGHTS)]
        up, down = ((some.float() + move).to(some.dtype) for move in (step, -step))
        stuck += ((up == some) & (down == some)).float().mean().item() * weights.numel()
        total += weights.numel()
    return stuck / max(total, 1)


def facts_of_batches(
    args: Any, metrics: dict[str, list[float]], functions: RewardFunctions, batches: list[Batch]
) -> Facts:
    """The metrics of these batches, and what their rollouts add to them, over all ranks. Collective.

    INVARIANT: the metrics are of these batches, and of no other.

    Args:
        args: The settings of the run.
        metrics: The trainer's, a value per batch.
        functions: The reward functions.
        batches: Of this rank, with their rollouts.
    """
    of_batches = of_all_ranks([batch.rollouts for batch in batches])
    rollouts, num_rollouts = join(of_batches), len(batches) * int(args.generation_batch_size)
    facts = {name: mean(values) for name, values in metrics.items() if values}
    by_turn = [r for r in rollouts if cut_by_turn(r, args)]
    cut = [r for r in rollouts if r.stop_reason == StopReason.MAX_TOKENS and all(r is not other for other in by_turn)]
    results = [result for r in rollouts for turn in r.turns for result in turn.results]
    reached: dict[str, list[ToolResult]] = {}  # by the tool
    for call, result in ((c, s) for r in rollouts for turn in r.turns for c, s in zip(turn.calls, turn.results)):
        if result.error != "call":
            reached.setdefault(str(call.name), []).append(result)
    enough = {name: of_tool for name, of_tool in reached.items() if len(of_tool) >= MIN_CALLS}
    failed = {name: share(result.error is not None for result in of_tool) for name, of_tool in enough.items()}
    worst = max(failed, key=failed.get, default=None)
    uncut = [result for r in rollouts for turn in r.turns if turn.finish_reason != "length" for result in turn.results]
    failure = most_frequent(str(r.error) for r in rollouts if r.stop_reason in FAILURES and r.error is not None)
    ends = (StopReason.ANSWERED, StopReason.ENVIRONMENT_STOP, StopReason.AGENT_DONE)
    groups = [group for batch in of_batches for group in whole_groups(batch, args.num_generations)]
    weights = dict(zip(functions.names, functions.weights))
    means = {name: facts.get(f"rewards/{name}/mean", float("nan")) for name, weight in weights.items() if weight}
    given = {name: value for name, value in means.items() if value == value}
    varied = [name for name in given if facts[f"rewards/{name}/std"] > 1e-6]
    outcome, unused = functions.main_outcome, unused_rewards(functions.names, batches)
    return {
        **facts, "num_rollouts": num_rollouts,
        "rollouts/called": share(any(turn.calls for turn in r.turns) for r in rollouts),
        "rollouts/ended": share(r.stop_reason in ends for r in rollouts),
        "groups/identical": share(
            len({str(sum((turn.token_ids for turn in r.turns), [])) for r in group}) == 1 for group in groups
        )
        if groups else None,
        "calls/malformed": share(result.error == "call" for result in uncut) if len(uncut) >= MIN_CALLS else None,
        "calls/failed": share(result.error is not None for result in uncut) if len(uncut) >= MIN_CALLS else None,
        "prompt/ends_with_assistant": share(
            bool(r.prompt_messages) and r.prompt_messages[-1]["role"] == "assistant" for r in rollouts
        ),
        "credit_assignment": args.credit_assignment,
        "cut/by_turn": len(by_turn) / len(rollouts), "cut/by_completion": len(cut) / len(rollouts),
        "tokens/read": share(owner < 0 for r in cut or rollouts for owner in r.turn_ids),
        "tools/broken": failed.get(worst), "tools/all_broken": min(failed.values(), default=0.0),
        "tools/broken_name": f"the tool {worst}",
        "frequent/tool_error": most_frequent(r.text for r in reached.get(worst, ()) if r.error is not None),
        "frequent/call_error": most_frequent(r.text for r in results if r.error == "call"),
        "frequent/failure": failure and f": {failure.rstrip('.')}",
        "outcome/name": outcome, "outcome/mean": given.get(outcome),
        "outcome/scored": round(num_rollouts * facts.get(f"rewards/{outcome}/frac_scored", 0.0)),
        "outcome/constant": outcome in given and outcome not in varied,
        "rewards/constant": ", ".join(f"{name} {given[name]:.3g}" for name in given) or "no weight is above 0",
        "rewards/given": list(given) if means else None,
        "rewards/varied": varied, "rewards/unused": ", ".join(unused),
        "rewards/varied_and_used": [name for name in varied if name not in unused],
        "tokens/differ": tokens_that_differ(facts),
    }  # fmt: skip


def of_all_ranks(batches: list[list[Rollout]]) -> list[list[Rollout]]:
    """The rollouts of these batches on all ranks. Collective.

    INVARIANT: nothing here raises on one rank alone. A rank whose rollouts cannot be sent, because of a fork's own
    classes, sends none.
    """
    if not torch.distributed.is_initialized():
        return batches
    packed: list[Any] = [None]
    with suppress(Exception):
        packed = [pickle.dumps([[for_report(rollout) for rollout in batch] for batch in batches])]
    of_ranks = [pickle.loads(each) for each in gather_object(packed) if each is not None] or [batches]
    return [join(parts) for parts in zip(*of_ranks)]


def for_report(rollout: Rollout) -> Rollout:
    """A copy of a rollout without what a report does not read: its environment, texts, logprobs and images."""
    nothing = dict(logprobs=None, text="", messages=[], info={}, state_key=None, generations=[], tools=None)
    turns = [dataclasses.replace(turn, **nothing) for turn in rollout.turns]
    for turn in turns:
        turn.context = turn.context and turn.context._replace(messages=[], ids=[])
        turn.results = [ToolResult(result.text[:MOST_SENT], result.error) for result in turn.results]
    error = rollout.error and RuntimeError(str(rollout.error)[:MOST_SENT])
    last = [{"role": message["role"]} for message in rollout.prompt_messages[-1:]]
    return Rollout(last, [], rollout.index, turns, rollout.stop_reason, error=error)


def cut_by_turn(rollout: Rollout, args: Any) -> bool:
    """Whether a turn was cut off, in its call or before it, where the completion had room left."""
    cut = [t for t in rollout.turns if t.finish_reason == "length" and len(t.token_ids) >= args.longest_turn]
    return bool(cut) and (cut[-1] is not rollout.turns[-1] or rollout.new_tokens < args.max_completion_length)


def whole_groups(rollouts: list[Rollout], size: int) -> list[list[Rollout]]:
    """The groups that are there as a whole: the rollouts of a rank may begin or end within one."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.index // size, []).append(rollout)
    return [group for group in groups.values() if len(group) == size]


def share(flags: Any) -> float:
    """The share of the flags that are true; 0 if there are none.

    >>> share([True, False, False, False]), share([])
    (0.25, 0.0)
    """
    flags = list(flags)
    return sum(flags) / len(flags) if flags else 0.0


def most_frequent(errors: Iterable[str]) -> str:
    """The error of the most frequent kind, in one line, with how many are of its kind.

    >>> most_frequent(["the call is no JSON (char 3)", "unknown tool 'a'. Known tools: b", "unknown tool 'c'"])
    "unknown tool 'a'. Known tools: b (2 of 3 errors)"
    >>> most_frequent(["Error: no room."]), most_frequent([])
    ('Error: no room.', '')
    """
    lines = [" ".join(text.split()) for text in errors]
    if not lines:
        return ""
    kind, count = Counter(map(kind_of_error, lines)).most_common(1)[0]
    text = next(line for line in lines if kind_of_error(line) == kind)[:MOST_SHOWN]
    return text if len(lines) == 1 else f"{text.rstrip('.')} ({count} of {len(lines)} errors)"


def kind_of_error(text: str) -> str:
    """What an error says before its details: without quoted words and numbers, up to its first sentence's end.

    >>> kind_of_error("Error: argument 'a' must be str, got int. Usage: f(a: str)")
    'argument * must be str, got int'
    """
    blank = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\d+", "*", text.removeprefix("Error: "))
    return re.split(r"[(:;]|\.(?:\s|$)", blank, maxsplit=1)[0].strip() or blank
