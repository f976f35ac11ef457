"""The values of reward functions: their checks, and their numbers per rollout and per turn as tensors."""

from __future__ import annotations

import array
import hashlib
from typing import Any, NamedTuple

import torch

from mt_grpo.rollout import Rollout
from mt_grpo.training.batch import NAN, nansum, pad_rows


class Scores(NamedTuple):
    """What the F reward functions gave for all N rollouts, on the CPU, with K turns in the longest; NaN for None."""

    whole: torch.Tensor  # (N, F) the numbers per rollout, those of the F_turn turn functions first
    per_turn: torch.Tensor  # (N, K, F_turn) the numbers per turn
    has_observation: torch.Tensor | None = None  # (N, K) bool
    sampled: torch.Tensor | None = None  # (N, K) bool: the rollout has this turn
    state: torch.Tensor | None = None  # (N, K) int64: the hash of the turn's state, -1 without a turn
    num_tokens: torch.Tensor | None = None  # (N, K) int64: the turn's trained tokens

    def weighted(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of a `RewardTable`: the weighted `outcome`, `rollout_turn` (N,), `turn` (N, K), and the flags.

        They are NaN where no number was given. A function of weight 0 is only logged.

        >>> scores = Scores(torch.tensor([[NAN, 1.0]]), torch.tensor([[[0.5], [NAN]]]))
        >>> list(scores.weighted(torch.tensor([2.0, 3.0])).values())[:3]
        [tensor([3.]), tensor([nan]), tensor([[1., nan]])]
        """
        first, flags = self.per_turn.shape[2], self._asdict()  # the first outcome function
        # INVARIANT: weight 0 gives no number. With None, 0 times a number would be the reward 0, which is compared.
        weights = torch.where(weights == 0, NAN, weights)
        numbers, per_turn = flags.pop("whole") * weights, flags.pop("per_turn") * weights[:first]
        # Without outcome functions R^O is 0; NaN would mean that every one of them gave None.
        has_outcome = not weights[first:].isnan().all()
        outcome = nansum(numbers[:, first:], 1) if has_outcome else numbers.new_zeros(len(numbers))
        return {
            "outcome": outcome,
            "rollout_turn": nansum(numbers[:, :first], 1),
            "turn": nansum(per_turn, 2),
            **flags,
        }

    def logged(self) -> torch.Tensor:
        """(N, F) for TRL's logs: a turn function's sum over the turns, where it gave a list.

        >>> Scores(torch.tensor([[NAN, 1.0]]), torch.tensor([[[0.5], [0.25]]])).logged()
        tensor([[0.7500, 1.0000]])
        """
        sums, logged = nansum(self.per_turn, 1), self.whole.clone()
        first = sums.shape[1]
        logged[:, :first] = torch.where(sums.isnan(), logged[:, :first], sums)
        return logged

    def count_used(self, weights: torch.Tensor, moves: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """How many numbers each function gave, and how many of these move an advantage, (F,) both; 0 with weight 0.

        `moves` says which numbers move one (`numbers_that_move`).
        """
        whole, per_turn, first = ~self.whole.isnan(), ~self.per_turn.isnan(), self.per_turn.shape[2]
        kinds = ["rollout_turn"] * first + ["outcome"] * (whole.shape[1] - first)
        used = whole & torch.stack([moves[kind] for kind in kinds], 1)
        given, moved = whole.sum(0), used.sum(0)
        given[:first] += per_turn.sum((0, 1))
        moved[:first] += (per_turn & moves["turn"][:, :, None]).sum((0, 1))
        return given * (weights != 0), moved * (weights != 0)


def check_reward_values(values: Any, name: str, rollouts: list[Rollout], per_turn: bool) -> None:
    """Raise `ValueError` unless a function returned one value per rollout, which may be a list if `per_turn` is true.

    Such a list has one value per turn. Every value is a finite number or None.
    """
    if not isinstance(values, (list, tuple)) or len(values) != len(rollouts):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"Reward {name} returned {got}, expected a list of {len(rollouts)}, one per rollout.")
    for i, (value, rollout) in enumerate(zip(values, rollouts, strict=True)):
        is_list = isinstance(value, (list, tuple))
        if is_list and not per_turn:
            raise ValueError(f"Reward {name} returned a list per rollout. Move it from OUTCOME_ to TURN_REWARD_FUNCS.")
        if is_list and len(value) != len(rollout.turns):
            raise ValueError(
                f"Reward {name} returned {len(value)} values for rollout {i}, which has {len(rollout.turns)} turns. "
                "Expected a number or None for each turn, also for one without a call."
            )
        for number in value if is_list else [value]:
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


def reward_tensors(values: list[list], num_turns: int, num_turn_funcs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`Scores.whole` and `Scores.per_turn` of this rank's B rollouts, from what `RewardFunctions.score` returns.

    `num_turns` is K, the same on all ranks.
    """
    whole = torch.full((len(values[0]), len(values)), NAN)
    per_turn = torch.full((len(values[0]), num_turns, num_turn_funcs), NAN)
    for f, column in enumerate(values):
        for i, value in enumerate(column):
            if isinstance(value, (list, tuple)):
                per_turn[i, : len(value), f] = torch.tensor([NAN if v is None else float(v) for v in value])
            elif value is not None:
                whole[i, f] = float(value)
    return whole, per_turn


def turn_flags(rollouts: list[Rollout], num_turns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bool tensors (B, K): whether a turn has an observation, and whether the rollout has the turn."""
    flags = [[turn.has_observation for turn in rollout.turns] for rollout in rollouts]
    sampled = [[True] * len(row) for row in flags]
    return pad_rows(flags, num_turns, False, torch.bool), pad_rows(sampled, num_turns, False, torch.bool)


def state_numbers(rollout: Rollout) -> list[int]:
    """One hash per turn that identifies its state: of its `state_key`, or of the tokens that it reads without one.

    The hash is the same in every process; Python's own `hash` of a text is not. Raises `ValueError` for a key whose
    `repr` may differ between processes, such as a set, or an object with an address.
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


def is_plain(key: Any) -> bool:
    """Whether the `repr` of a key is the same in every process."""
    return (
        all(map(is_plain, key)) if isinstance(key, (tuple, list)) else isinstance(key, (str, int, float, type(None)))
    )
