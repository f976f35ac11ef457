"""Validation of the values of reward functions, as numbers per rollout and per turn, and hashes of turns' states."""

from __future__ import annotations

import array
import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from mt_grpo.base.ranks import RunError
from mt_grpo.rollout import Rollout
from mt_grpo.training.tensors import NAN, nansum, pad_rows


def check_reward_values(values: Any, name: str, rollouts: list[Rollout], per_turn: bool) -> None:
    """Raise `ValueError` unless a function returned one value per rollout, which may be a list if `per_turn` is true.

    Such a list has one value per turn. Every value is a finite number or None.
    """
    if not isinstance(values, (list, tuple)) or len(values) != len(rollouts):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"Reward {name} returned {got}, expected a list of {len(rollouts)}, one per rollout.")
    for number_of_rollout, (value, rollout) in enumerate(zip(values, rollouts, strict=True)):
        if isinstance(value, (list, tuple)) and not per_turn:
            raise ValueError(f"Reward {name} returned a list per rollout. Move it from OUTCOME_ to TURN_REWARD_FUNCS.")
        if isinstance(value, (list, tuple)) and len(value) != len(rollout.turns):
            raise ValueError(
                f"Reward {name} returned {len(value)} values for rollout {number_of_rollout}, which has "
                f"{len(rollout.turns)} turns. Expected a number or None for each turn, also for one without a call."
            )
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if number is not None and not is_finite(number):
                raise ValueError(
                    f"Reward {name} returned {number!r:.100}, expected a finite number of at most 3.4e+38, or None "
                    "for 'does not apply'."
                )


def is_finite(number: Any) -> bool:
    """Whether a value is a number that is finite in float32. Texts and tensors of several numbers are not.

    >>> [is_finite(number) for number in (1, True, "1", 1j, 10**400, float("nan"), torch.ones(2), torch.ones(1))]
    [True, True, False, False, False, False, False, True]
    """
    try:
        return not isinstance(number, (str, bytes)) and abs(float(number)) <= torch.finfo(torch.float32).max
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def is_plain(key: Any) -> bool:
    """Whether the `repr` of a key is the same in every process, which rules out sets and objects with an address."""
    if isinstance(key, (tuple, list)):
        return all(is_plain(part) for part in key)
    return key is None or isinstance(key, (str, int, float))


def state_numbers(rollout: Rollout) -> list[int]:
    """One hash per turn that identifies its state: of its `state_key`, or of the tokens that it reads without one.

    The hash is the same in every process; Python's own `hash` of a text is not. Raises `ValueError` for a key whose
    `repr` may differ between processes.
    """
    numbers = {}  # turn -> number
    for record in rollout.records:
        history = hashlib.blake2b(digest_size=8)  # of the tokens that the turn reads, 8 bytes per id
        history.update(array.array("q", record.prompt_ids))
        for k, turn in zip(record.numbers, record.turns):
            state = history
            if turn.state_key is not None:
                if not is_plain(turn.state_key):
                    raise ValueError(
                        f"state_key returned {turn.state_key!r}, expected a string, a number or a tuple of them."
                    )
                state = hashlib.blake2b(repr(turn.state_key).encode(), digest_size=8)
            numbers[k] = int.from_bytes(state.digest(), "big") >> 1  # never -1, which means "no turn"
            history.update(array.array("q", turn.token_ids + turn.observation_ids))
    return [numbers[k] for k in sorted(numbers)]


def reward_tensors(values: list[list], num_turns: int, num_turn_funcs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert the lists that `RewardFunctions.score` returns to tensors, with NaN for None.

    Args:
        values: One list of B values per function, (F, B), turn functions first.
        num_turns: K, the same on all ranks.
        num_turn_funcs: F_turn, the number of turn functions.

    Returns:
        (B, F), the values that are one number per rollout, and (B, K, F_turn), the values that are one per turn.
    """
    whole = torch.full((len(values[0]), len(values)), NAN)
    per_turn = torch.full((len(values[0]), num_turns, num_turn_funcs), NAN)
    for f, column in enumerate(values):
        rows = [value if isinstance(value, (list, tuple)) else [] for value in column]
        if any(rows):
            numbers = [[NAN if v is None else float(v) for v in row] for row in rows]
            per_turn[:, :, f] = pad_rows(numbers, num_turns, NAN)
        missing = (list, tuple, type(None))
        whole[:, f] = torch.tensor([NAN if isinstance(v, missing) else float(v) for v in column])
    return whole, per_turn


class Scores(NamedTuple):
    """What the F reward functions gave for all N rollouts, on the CPU, with K turns in the longest; NaN for None."""

    whole: torch.Tensor  # (N, F) the numbers per rollout, those of the F_turn turn functions first
    per_turn: torch.Tensor  # (N, K, F_turn) the numbers per turn
    has_observation: torch.Tensor  # (N, K) bool
    sampled: torch.Tensor  # (N, K) bool: the rollout has this turn
    state: torch.Tensor  # (N, K) int64: the hash of the turn's state, -1 without a turn
    num_tokens: torch.Tensor  # (N, K) int64: the turn's trained tokens


def merge_scores(old: Scores, new: Scores, fresh: torch.Tensor) -> Scores:
    """Merge two scores of a batch: the new ones where `fresh` (N,) is true. K becomes the larger one of both.

    >>> x = Scores(torch.tensor([[1.0], [2.0]]), torch.ones(2, 1, 1), *[torch.tensor([[1], [2]])] * 4)
    >>> y = Scores(torch.tensor([[5.0], [6.0]]), torch.ones(2, 2, 1), *[torch.tensor([[5, 7], [6, 8]])] * 4)
    >>> merge_scores(x, y, torch.tensor([False, True])).state
    tensor([[ 1, -1],
            [ 6,  8]])
    """
    missing = Scores(None, NAN, False, False, -1, 0)
    num_turns, merged = max(old.sampled.shape[1], new.sampled.shape[1]), []
    for before, after, fill in zip(old, new, missing, strict=True):
        if fill is not None:
            before, after = (
                torch.cat([x, x.new_full((len(x), num_turns - x.shape[1], *x.shape[2:]), fill)], 1)
                for x in (before, after)
            )
        merged.append(torch.where(fresh.view(-1, *[1] * (before.dim() - 1)), after, before))
    return Scores(*merged)


def turn_flags(rollouts: list[Rollout], num_turns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bool tensors (B, K): whether a turn has an observation, and whether the rollout has the turn."""
    flags = [[turn.has_observation for turn in rollout.turns] for rollout in rollouts]
    observed = pad_rows(flags, num_turns, False, torch.bool)
    sampled = pad_rows([[True] * len(row) for row in flags], num_turns, False, torch.bool)
    return observed, sampled


def weighted_rewards(whole: torch.Tensor, per_turn: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(outcome, turn rewards per rollout, turn rewards per turn): (N,), (N,), (N, K), NaN where none was given.

    Args:
        whole: (N, F) numbers per rollout, those of the turn functions first.
        per_turn: (N, K, F_turn) numbers per turn.
        weights: (F,). A function of weight 0 is only logged: its numbers count no more than None does.

    >>> nan = float("nan")
    >>> weighted_rewards(torch.tensor([[nan, 1.0]]), torch.tensor([[[0.5], [nan]]]), torch.tensor([2.0, 3.0]))
    (tensor([3.]), tensor([nan]), tensor([[1., nan]]))
    >>> weighted_rewards(torch.tensor([[1.0, nan]]), torch.tensor([[[0.5], [nan]]]), torch.tensor([0.0, 3.0]))
    (tensor([nan]), tensor([nan]), tensor([[nan, nan]]))
    """
    num_turn_funcs = per_turn.shape[2]
    of_turns, outcomes = whole[:, :num_turn_funcs], whole[:, num_turn_funcs:]
    turn_weights, outcome_weights = weights[:num_turn_funcs], weights[num_turn_funcs:]
    # INVARIANT: weight 0 gives no number. With None, 0 times a number would be the reward 0, which is compared.
    turn_weights, outcome_weights = (torch.where(each == 0, NAN, each) for each in (turn_weights, outcome_weights))
    # Without outcome functions R^O is 0; NaN would mean that every one of them gave None.
    has_outcome = not outcome_weights.isnan().all()
    outcome = nansum(outcomes * outcome_weights, 1) if has_outcome else whole.new_zeros(len(whole))
    return outcome, nansum(of_turns * turn_weights, 1), nansum(per_turn * turn_weights, 2)


def logged_rewards(whole: torch.Tensor, per_turn: torch.Tensor) -> torch.Tensor:
    """(N, F) for TRL's logs: a turn function's sum over the turns, where it gave a list.

    >>> nan = float("nan")
    >>> logged_rewards(torch.tensor([[nan, 1.0]]), torch.tensor([[[0.5], [0.25]]]))
    tensor([[0.7500, 1.0000]])
    """
    logged, sums = whole.clone(), nansum(per_turn, 1)
    own = logged[:, : per_turn.shape[2]]
    logged[:, : per_turn.shape[2]] = torch.where(sums.isnan(), own, sums)
    return logged


MOST = 1e18  # that float32 can square and add up


def check_advantages(rewards: Any, advantages: torch.Tensor, step: int, coef: float) -> None:
    """Raise `RunError` where float32 cannot compare the rewards: what overflows can vanish, or poison every weight.

    The square of a value beyond `MOST` is infinite in float32.

    Args:
        rewards: The `RewardTable` of all ranks, so that all of them raise.
        advantages: Of its turns, (N, K).
        step: The optimizer step, for the message.
        coef: `turn_advantage_coef`, for the message.
    """
    for name, x in (("outcome", rewards.outcome), ("turn", rewards.turn), ("turn", rewards.rollout_turn)):
        if (x.nan_to_num(0.0).abs() > MOST).any():
            raise RunError(
                f"Step {step}: a weighted {name} reward is {x.nan_to_num(0.0).abs().max():.3g}. At most {MOST:g} can "
                f"be compared in float32. This batch is not trained on. Lower {name}_reward_weights, or the values of "
                "the reward functions."
            )
    if not advantages.isfinite().all():
        raise RunError(
            f"Step {step}: an advantage is not finite, with turn_advantage_coef={coef:g}. This batch is not trained "
            "on. Lower turn_advantage_coef, or the values of the reward functions."
        )
    of_turns = rewards.turn.double().abs().nansum(1) + rewards.rollout_turn.double().abs().nan_to_num(0.0)
    sums = rewards.outcome.double().abs().nan_to_num(0.0) + max(abs(coef), 1.0) * of_turns  # (N,)
    if (sums > MOST).any():
        raise RunError(
            f"Step {step}: the rewards of a rollout add up to {sums.max():.3g}, with turn_advantage_coef={coef:g}. At "
            f"most {MOST:g} can be compared in float32. This batch is not trained on. Lower turn_advantage_coef, "
            "or the values of the reward functions."
        )


def numbers_that_move(rewards: Any, advantages_of: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Which numbers of a table move an advantage: bool masks of `outcome` (N,), `rollout_turn` (N,), `turn` (N, K).

    A number moves one if the advantages have a gradient with respect to it. The gradient is taken at random numbers in
    the places of the given ones, so that two that happen to be equal still count. Only gradients are seen: a number of
    which an estimator uses the sign or the rank seems to move nothing. One without any gradient uses all numbers.

    Args:
        rewards: The `RewardTable` of the N rollouts.
        advantages_of: From a table to its advantages, (N, K), without scaling.
    """
    generator = torch.Generator().manual_seed(0)  # its own: training's random numbers stay as they are
    drawn = {name: getattr(rewards, name).cpu() for name in ("outcome", "rollout_turn", "turn")}
    for name, numbers in drawn.items():
        random = torch.rand(numbers.shape, generator=generator, dtype=torch.float64)
        drawn[name] = random.where(~numbers.isnan(), NAN).requires_grad_()
    moves = {name: ~numbers.isnan() for name, numbers in drawn.items()}
    with torch.enable_grad(), suppress(Exception):  # a fork's estimator may take no float64, or no gradients
        advantages = advantages_of(dataclasses.replace(rewards, **drawn)).where(rewards.sampled.cpu(), 0.0)
        probe = torch.rand(advantages.shape, generator=generator, dtype=torch.float64)  # in whose sum nothing cancels
        gradients = torch.autograd.grad((advantages * probe).sum(), list(drawn.values()), allow_unused=True)
        for name, gradient in zip(drawn, gradients):
            moves[name] = torch.zeros_like(moves[name]) if gradient is None else gradient.abs() > 1e-12
    return moves


def count_used_rewards(
    scores: Scores, weights: torch.Tensor, moves: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many numbers each reward function gave, and how many of these move an advantage, (F,) both.

    Functions of weight 0 give nothing here.

    Args:
        scores: Of the functions.
        weights: (F,), of the functions.
        moves: Which numbers move an advantage, from `numbers_that_move`.
    """
    whole, per_turn = ~scores.whole.isnan(), ~scores.per_turn.isnan()
    num_turn = per_turn.shape[2]
    kinds = ["rollout_turn" if f < num_turn else "outcome" for f in range(whole.shape[1])]
    given, moved = whole.sum(0), torch.stack([whole[:, f] & moves[kind] for f, kind in enumerate(kinds)], 1).sum(0)
    given[:num_turn] += per_turn.sum((0, 1))
    moved[:num_turn] += (per_turn & moves["turn"][:, :, None]).sum((0, 1))
    counts = weights.cpu() != 0
    return given * counts, moved * counts
