"""Facts of a recipe and of its first rollouts, which the readings are about."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import Any

import torch

from mt_grpo.off_policy import text_of_cuts
from mt_grpo.preflight import prompt_ids_of
from mt_grpo.readings import MIN_CALLS, Facts
from mt_grpo.rollout import FAILURES, Rollout, StopReason, ToolResult
from mt_grpo.text_check import squeezed

MOST_SHOWN = 160  # characters of an error
MOST_WEIGHTS = 2**16  # of a parameter, evenly spread, are looked at


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
        "temperature": trainer._sampling_params["temperature"], "sampling/cuts": text_of_cuts(args),
        # Shards have no whole weights here, and ZeRO-3 and FSDP2 keep float32 ones beside them.
        "weights/stuck": None if trainer._is_sharded else share_stuck(trainer.model.parameters(), args.learning_rate),
        "has_tools": bool(tools), "prompt/lacks_system": bool(system) and squeezed(system)[:200] not in squeezed(read),
        "prompt/lacks_tools": ", ".join(lacking), "prompt/lacks_all_tools": len(lacking) == len(tools),
    }  # fmt: skip


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


def facts_of_batches(trainer: Any, batches: list[list[Rollout]]) -> Facts:
    """The metrics of these batches, over all ranks, and what this rank's rollouts add to them.

    INVARIANT: `batches` are all that were rolled out since training began, as the trainer's metrics are.
    """
    args, rollouts = trainer.args, [rollout for batch in batches for rollout in batch]
    facts = {name: mean(values) for name, values in trainer._metrics["train"].items() if values}
    by_turn = [r for r in rollouts if cut_by_turn(r, args.max_turn_tokens, args.max_completion_length)]
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
    ends = (StopReason.ANSWERED, StopReason.ENVIRONMENT_STOP, StopReason.AGENT_DONE)
    groups = [group for batch in batches for group in whole_groups(batch, args.num_generations)]
    weights = dict(zip(trainer.reward_func_names, trainer.reward_weights.tolist()))
    means = {name: facts.get(f"rewards/{name}/mean", float("nan")) for name, weight in weights.items() if weight}
    given = {name: value for name, value in means.items() if value == value}
    varied = [name for name in given if facts[f"rewards/{name}/std"] > 1e-6]
    unused = trainer._reward_use.unused
    return {
        **facts, "num_rollouts": len(batches) * int(args.generation_batch_size),
        "rollouts/called": share(any(turn.calls for turn in r.turns) for r in rollouts),
        "rollouts/ended": share(r.stop_reason in ends for r in rollouts),
        "groups/identical": share(len({tuple(sampled_ids(r)) for r in group}) == 1 for group in groups)
        if groups else None,
        "calls/malformed": share(result.error == "call" for result in uncut) if len(uncut) >= MIN_CALLS else None,
        "credit_assignment": args.credit_assignment,
        "cut/by_turn": len(by_turn) / len(rollouts), "cut/by_completion": len(cut) / len(rollouts),
        "tokens/read": share(owner < 0 for r in cut or rollouts for owner in r.turn_ids),
        "tools/broken": failed.get(worst), "tools/all_broken": min(failed.values(), default=0.0),
        "tools/broken_name": f"the tool {worst}",
        "first/tool_error": shown(result for result in reached.get(worst, ()) if result.error is not None),
        "first/call_error": shown(r for r in results if r.error == "call"),
        "first/environment_error": next(
            (str(r.error)[:MOST_SHOWN] for r in rollouts if r.stop_reason in FAILURES and r.error is not None), ""
        ),
        "rewards/constant": ", ".join(f"{name} {given[name]:.3g}" for name in given) or "there are none",
        "rewards/varied": varied, "rewards/unused": ", ".join(unused),
        "rewards/varied_and_used": [name for name in varied if name not in unused],
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
