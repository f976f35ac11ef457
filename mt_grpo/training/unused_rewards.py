"""Which numbers of the reward functions move an advantage. What an estimator does not use is said by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from mt_grpo.training.tensors import NAN


def numbers_that_count(rewards: Any, advantages_of: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Which numbers of a table move an advantage: bool masks of `outcome` (N,), `rollout_turn` (N,), `turn` (N, K).

    The estimator itself is asked, by the gradients of its advantages, so a new one has nothing to declare. It is asked
    at random numbers in the places of those that were given: that two numbers happen to be equal does not count. Where
    no number of a kind has a gradient (ranks, `.item()`), all of them count if others give other advantages. Of an
    estimator that raises here all count.

    Args:
        rewards: The `RewardTable` of the whole batch.
        advantages_of: From a table to its advantages, (N, K), without scaling: a group of two that is scaled has no
            more than a sign.
    """
    generator = torch.Generator().manual_seed(0)  # its own: training's random numbers stay as they are

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape, generator=generator, dtype=torch.float64).where(~x.isnan(), NAN)

    def asked_with(numbers: dict[str, torch.Tensor]) -> torch.Tensor:
        facts = {name: getattr(rewards, name).cpu().clone() for name in ("observed", "sampled", "state")}
        table = dataclasses.replace(rewards, **{name: x.clone() for name, x in numbers.items()}, **facts)
        return advantages_of(table).where(rewards.sampled.cpu(), 0.0)

    names = ("outcome", "rollout_turn", "turn")
    asked, moves = {name: drawn(getattr(rewards, name).cpu()) for name in names}, [None] * 3
    with torch.enable_grad(), suppress(Exception):  # a fork's may take no float64, or no gradients
        advantages = asked_with({name: x.requires_grad_() for name, x in asked.items()})
        probe = (advantages * drawn(advantages.detach())).sum()  # a random sum, in which nothing cancels
        if probe.requires_grad:
            moves = torch.autograd.grad(probe, list(asked.values()), allow_unused=True)
    numbers, masks = {name: x.detach().float() for name, x in asked.items()}, {}
    for (name, x), move in zip(numbers.items(), moves):
        masks[name] = torch.zeros_like(x, dtype=torch.bool) if move is None else move.abs() > 1e-12
        if masks[name].any() or x.isnan().all():
            continue
        same = False  # also where it raises: it does so again where it is used, or takes the rewards as they are
        with suppress(Exception):
            same = torch.equal(*(asked_with(numbers | {name: y}).nan_to_num() for y in (x, drawn(x).float())))
        masks[name] = ~x.isnan() & (not same)
    return {name: mask.to(rewards.outcome.device) for name, mask in masks.items()}


class RewardUse:
    """How many numbers each reward function gave in training, and how many of them moved no advantage.

    What an estimator does not use is said once per function, so that no reward is dropped in silence.

    Args:
        names: Of the F functions, turn functions first.
        weights: Of them. A function of weight 0 is left out: somebody chose that.
        setting: What the advantages are computed with, for the message.

    >>> use = RewardUse(["tool", "match"], [1.0, 1.0], "credit_assignment=outcome")
    >>> whole = torch.tensor([[0.5, 1.0], [0.1, 0.0]])  # (N, F): both functions gave one number per rollout
    >>> counts = {"outcome": torch.tensor([True, True]), "rollout_turn": torch.tensor([False, False])}
    >>> counts["turn"] = torch.zeros(2, 3, dtype=torch.bool)
    >>> metrics, [text] = use.add(whole, torch.full((2, 3, 1), float("nan")), counts)
    >>> metrics, text[:53], use.unused
    ({'credit/frac_rewards_unused': 0.5}, 'Reward tool: none of the 2 numbers that it gave moves', ['tool'])
    """

    def __init__(self, names: list[str], weights: list[float], setting: str):
        self.names, self.weights, self.setting = names, weights, setting
        self.given, self.moved = [0] * len(names), [0] * len(names)
        self._said: set[tuple[int, bool]] = set()

    @property
    def unused(self) -> list[str]:
        """The functions that gave numbers of which none has moved an advantage so far."""
        return [name for name, given, moved in zip(self.names, self.given, self.moved) if given and not moved]

    def add(
        self, whole: torch.Tensor, per_turn: torch.Tensor, counts: dict[str, torch.Tensor]
    ) -> tuple[dict[str, float], list[str]]:
        """(metrics of this batch, what is to be said for the first time).

        Args:
            whole: (N, F), the numbers per rollout, NaN where there is none.
            per_turn: (N, K, F_turn), the numbers per turn.
            counts: Which numbers move an advantage: `outcome` and `rollout_turn` (N,), `turn` (N, K).
        """
        num_turn_funcs, texts, all_given, all_moved = per_turn.shape[2], [], 0, 0
        for f, (name, weight) in enumerate(zip(self.names, self.weights)):
            if weight == 0:
                continue
            there = ~whole[:, f].isnan()  # (N,)
            moves = there & counts["rollout_turn" if f < num_turn_funcs else "outcome"]
            given, moved = int(there.sum()), int(moves.sum())
            if f < num_turn_funcs:
                there = ~per_turn[:, :, f].isnan()  # (N, K)
                given, moved = given + int(there.sum()), moved + int((there & counts["turn"]).sum())
            self.given[f], self.moved[f] = self.given[f] + given, self.moved[f] + moved
            all_given, all_moved = all_given + given, all_moved + moved
            if moved < given and (f, moved == 0) not in self._said:
                self._said.add((f, moved == 0))
                texts.append(self._text(name, given, moved, f < num_turn_funcs))
        return {"credit/frac_rewards_unused": 1 - all_moved / all_given if all_given else 0.0}, texts

    def _text(self, name: str, given: int, moved: int, of_turns: bool) -> str:
        if moved:
            return (
                f"Reward {name}: {given - moved} of the {given} numbers that it gave move no advantage with "
                f"{self.setting}: they are compared with no other number of their group, or their rollout has no "
                "outcome. It is said once; "
                "credit/frac_rewards_unused counts such numbers."
            )
        move = "move it to OUTCOME_REWARD_FUNCS, " if of_turns else ""
        return (
            f"Reward {name}: none of the {given} numbers that it gave moves an advantage with {self.setting}. What it "
            "rewards is not trained so. Where it stays so (credit/frac_rewards_unused; numbers that are compared with "
            "no other count, too, and those of rollouts without an outcome: give these one, 0 will do), choose "
            f"another credit_assignment, {move}or set its weight to 0."
        )
