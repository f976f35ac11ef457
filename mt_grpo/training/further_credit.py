"""Estimators of credit besides MT-GRPO, the script's own, checks of advantages, and `refill_groups`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from mt_grpo.base.errors import RunError, tell_once
from mt_grpo.training.batch import NAN, Batch

MOST = 1e18  # that float32 can square and add up
CREDIT_ASSIGNMENTS: dict[str, Callable] = {}  # name -> function of (rewards, coef, discount), which gives (N, K)


def credit_estimator(name: str, function: Callable, *, reads: tuple[str, ...] = (), per_turn: bool = True) -> None:
    """Register an estimator. The choices of `credit_assignment` and the checks of its settings derive from this call.

    `reads` names what it reads of `turn_advantage_coef`, `turn_discount`, `outcome_in_return`, `state_baseline` and
    `state`: a setting that it does not read is refused, and state keys are filled for those that read them. `per_turn`
    says whether the turns of a rollout can get different advantages.
    """
    before = CREDIT_ASSIGNMENTS.get(name, function)
    if before.__module__ != function.__module__:
        tell_once(f"credit_assignment: {name} is {function.__module__}'s from now on, not {before.__module__}'s.")
    function.reads, function.per_turn = frozenset(reads), per_turn
    CREDIT_ASSIGNMENTS[name] = function


def outcome_advantages(rewards: Any, coef: float, discount: float) -> torch.Tensor:
    """GRPO-OR: every turn gets `norm(R^O)`. It ignores turn rewards. It is 0 where a group's outcomes are all equal.

    >>> from mt_grpo_trainer import doctest_batch
    >>> outcome_advantages(doctest_batch(), 1.0, 1.0)
    tensor([[ 0.5000,  0.5000,  0.5000],
            [-0.5000, -0.5000, -0.5000]])
    """
    return rewards.norm(rewards.outcome)[:, None].expand(rewards.turn.shape)


def merged_advantages(rewards: Any, coef: float, discount: float) -> torch.Tensor:
    """GRPO-MR: every turn gets `norm(R^O + R^T)`, here 1.8 against 0.4. It pays for each further turn with a reward.

    >>> from mt_grpo_trainer import doctest_batch
    >>> merged_advantages(doctest_batch(), 1.0, 1.0)
    tensor([[ 0.7000,  0.7000,  0.7000],
            [-0.7000, -0.7000, -0.7000]])
    """
    return rewards.norm(rewards.outcome + rewards.turn_total)[:, None].expand(rewards.turn.shape)


def turn_return_advantages(rewards: Any, coef: float, discount: float) -> torch.Tensor:
    """Return to go (REINFORCE's, Sutton and Barto, section 13.3), then a baseline over all who sampled turn k.

    Going on is credited with what comes of it. Use `scale_rewards: none` (docs/choosing_credit.md). In the example
    turn 0 is 0.8 against 0.4, turn 1 is 0.6 against 0, and in turn 2 A is alone.

    >>> from mt_grpo_trainer import doctest_batch
    >>> turn_return_advantages(doctest_batch(), 1.0, 1.0)
    tensor([[ 0.7000,  0.8000,  0.5000],
            [-0.7000, -0.8000, -0.5000]])
    """
    own = rewards.norm(rewards.returns_to_go(discount))
    return rewards.norm(rewards.outcome)[:, None] + coef * (own + rewards.rollout_turn_advantages())


def gigpo_advantages(rewards: Any, coef: float, discount: float) -> torch.Tensor:
    """GiGPO's grouping by state (arXiv 2505.10978): the return to go compared with turns that began in the same one.

    The paper's omega is `turn_advantage_coef`, its gamma `turn_discount`, and its returns hold the outcome
    (`outcome_in_return: true`). Its episode term is of all rewards, and here of the outcome. It is biased if a state
    comes back within a rollout (docs/choosing_credit.md). In the example A calls again in state 1 (0.6), B answers.

    >>> from mt_grpo_trainer import doctest_batch
    >>> gigpo_advantages(doctest_batch(), 1.0, 1.0)
    tensor([[ 0.7000,  0.8000,  0.5000],
            [-0.7000, -0.8000, -0.5000]])
    """
    own = norm_by_state(rewards, rewards.returns_to_go(discount))
    return rewards.norm(rewards.outcome)[:, None] + coef * (own + rewards.rollout_turn_advantages())


def norm_by_state(rewards: Any, x: torch.Tensor) -> torch.Tensor:
    """`rewards.norm` of x (N, K) over the turns of a group that began in the same state. Memory: about N G K^2.

    >>> from mt_grpo_trainer import doctest_batch
    >>> table = dataclasses.replace(doctest_batch(), state=torch.tensor([[7, 8, 9], [7, 7, 9]]))
    >>> norm_by_state(table, torch.tensor([[1., 5., 2.], [3., 9., 2.]]))
    tensor([[-3.3333,  0.0000,  0.0000],
            [-1.3333,  4.6667,  0.0000]])
    """
    size = rewards.group_size * x.shape[1]
    flat, keys = x.reshape(-1, size), rewards.state.reshape(-1, size)  # (N/G, GK)
    # For every turn, the index of the group's first turn in the same state. Each such first turn has its own column.
    first = (keys[:, :, None] == keys[:, None, :]).int().argmax(2, keepdim=True)  # (N/G, GK, 1)
    sets = torch.where(first == torch.arange(size, device=x.device), flat[:, :, None], NAN)
    compared = dataclasses.replace(rewards, group_size=size).norm(sets.view(-1, size))
    own = compared.view(sets.shape).gather(2, first)
    if rewards.state_baseline == "leave_one_out":
        number = (~sets.isnan()).sum(1, keepdim=True).expand(sets.shape).gather(2, first)
        own = own * number / (number - 1).clamp(min=1)
    return own.view(x.shape)


def zero_sum_advantages(rewards: Any, coef: float, discount: float) -> torch.Tensor:
    """The outcome's advantage, shifted from a rollout's poorer turns to its better ones: the shifts sum to zero.

    It is biased: a turn's baseline contains the turns after it (docs/choosing_credit.md). Neither `scale_rewards` nor
    a turn reward per rollout applies to the shift. In the example A has 0.2 and 0.6, mean 0.4; B has one reward.

    >>> from mt_grpo_trainer import doctest_batch
    >>> zero_sum_advantages(doctest_batch(), 1.0, 1.0)
    tensor([[ 0.3000,  0.7000,  0.5000],
            [-0.5000, -0.5000, -0.5000]])
    """
    shift = rewards.turn - rewards.turn.nanmean(1, keepdim=True)
    return rewards.norm(rewards.outcome)[:, None] + coef * shift.nan_to_num(0.0)


def progress_credit_advantages(rewards: Any, coef: float, discount: float) -> torch.Tensor:
    """prime-rl's `turn_credit` (its pull request 3282, as described in August 2026; later versions may differ).

    A turn's reward is the score of the state after it, and its progress the difference from the last score. The turns
    up to k share it with weights discount^(k - j) that sum to 1, minus the mean over the rollout's tokens. Like
    `zero_sum` it is biased. In the example A's second call makes the progress 0.4, of which each call gets half.

    >>> from mt_grpo_trainer import doctest_batch
    >>> progress_credit_advantages(doctest_batch(), 1.0, 1.0)
    tensor([[ 0.5667,  0.5667,  0.3667],
            [-0.5000, -0.5000, -0.5000]])
    """
    credit = torch.zeros_like(rewards.turn)
    last = torch.full_like(rewards.outcome, NAN)
    weights = torch.zeros_like(rewards.turn)  # discount^(k - j) of turn j, once k is reached
    for k in range(credit.shape[1]):
        score = rewards.turn[:, k]
        weights = weights * discount
        weights[:, k] = 1.0
        credit = credit + (score - last).nan_to_num(0.0)[:, None] * weights / weights.sum(1, keepdim=True)
        last = score.where(~score.isnan(), last)
    tokens = rewards.sampled * rewards.num_tokens
    mean = (credit * tokens).sum(1, keepdim=True) / tokens.sum(1, keepdim=True).clamp(min=1)
    return rewards.norm(rewards.outcome)[:, None] + coef * (credit - mean) * rewards.sampled


credit_estimator("outcome", outcome_advantages, per_turn=False)
credit_estimator("merged", merged_advantages, per_turn=False)
RETURNS = ("turn_advantage_coef", "turn_discount", "outcome_in_return")
credit_estimator("turn_return", turn_return_advantages, reads=RETURNS)
credit_estimator("gigpo", gigpo_advantages, reads=(*RETURNS, "state_baseline", "state"))
credit_estimator("zero_sum", zero_sum_advantages, reads=("turn_advantage_coef",))
credit_estimator("progress_credit", progress_credit_advantages, reads=("turn_advantage_coef", "turn_discount"))


def check_advantages(rewards: Any, advantages: torch.Tensor, step: int, coef: float) -> None:
    """Raise `RunError` where float32 cannot compare the rewards: what overflows can vanish, or poison every weight.

    The square of a value beyond `MOST` is infinite in float32. All ranks have the same table, and raise.
    """
    of_turns = rewards.turn.double().abs().nansum(1) + rewards.rollout_turn.double().abs().nan_to_num(0.0)
    sums = rewards.outcome.double().abs().nan_to_num(0.0) + max(abs(coef), 1.0) * of_turns  # (N,)
    if (sums > MOST).any() or not advantages.isfinite().all():
        raise RunError(
            f"Step {step}: the weighted rewards of a rollout add up to {sums.max():.3g} and an advantage to "
            f"{advantages.abs().max():.3g}, with turn_advantage_coef={coef:g}. At most {MOST:g} can be compared in "
            "float32. This batch is not trained on. Lower turn_reward_weights and the like, or turn_advantage_coef."
        )


def numbers_that_move(rewards: Any, advantages_of: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Which numbers of a table move an advantage: bool masks of `outcome` (N,), `rollout_turn` (N,), `turn` (N, K).

    A number moves one if the advantages have a gradient with respect to it, at random numbers in place of the given
    ones. An estimator without any gradient uses all numbers. `advantages_of` gives a table's advantages, (N, K).
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


def log_unused(trainer: Any, batch: Batch) -> None:
    """Log the share of a batch's rewards that move no advantage, and keep the counts per function in `batch.used`."""
    moves = numbers_that_move(batch.rewards, lambda table: trainer._advantages(table, "none"))
    batch.used = batch.scores.count_used(trainer.reward_weights.cpu(), moves)
    given, moved = (counts.sum().item() for counts in batch.used)
    trainer._log_metrics({"credit/frac_rewards_unused": 1 - moved / given if given else 0.0})


def refill(trainer: Any, batch: Batch, without_signal: Callable[[Batch], torch.Tensor]) -> None:
    """Replace groups of a batch without signal, and score the new ones, until all have signal. Collective.

    At most `refill_groups` batches' worth of groups are sampled in addition; a group that has no signal then is
    trained as it is. `without_signal` returns which groups are to be replaced, (N/G,) bool, the same on all ranks.
    """
    size = len(batch.rewards.outcome) // batch.group_size
    left, dropped, seconds = trainer.args.refill_groups * size, [], 0.0
    while True:
        advantages = trainer._advantages(batch.rewards, trainer.args.scale_rewards)
        # Rewards that cannot be compared must not pass for groups without signal.
        check_advantages(batch.rewards, advantages, trainer.state.global_step, trainer.turn_advantage_coef)
        lacking = without_signal(batch)
        if not (slots := lacking.nonzero().flatten().tolist()[:left]):
            break
        chosen = torch.zeros(size, dtype=torch.bool)
        chosen[slots] = True
        fresh = chosen.repeat_interleave(batch.group_size)  # (N,)
        own = batch.own(fresh).nonzero().flatten().tolist()
        dropped.append(batch.rewards.outcome[fresh])
        trainer._rollout_log.add_dropped(batch, own, trainer.state.global_step)
        trainer.env.close([batch.rollouts[i] for i in own])
        rows, rollouts, metrics = trainer.in_flight.refill(batch.rows, slots)
        batch.replace(own, rows, rollouts)
        trainer._score(batch, fresh)
        left, seconds = left - len(slots), seconds + metrics["rollout/wait_seconds"]
        for name, value in metrics.items():  # `rollout/*` are of all that the step waited for
            trainer._metrics["train"][name][-1] += value
    num_dropped, prompts = sum(map(len, dropped)) // batch.group_size, trainer.in_flight.prompts
    metrics = {
        "refill/groups_dropped": num_dropped / (num_dropped + size),
        "refill/rounds": batch.num_rounds,
        "refill/seconds": seconds,
        "refill/outcome_of_all_sampled": torch.cat([*dropped, batch.rewards.outcome]).nanmean().item(),
        "refill/data_passes": prompts.epoch + prompts.place / len(prompts.order),
    }
    trainer._log_metrics(metrics)
    if lacking.all() and trainer.accelerator.is_main_process:
        tell_once(
            f"Step {trainer.state.global_step}: refill_groups: none of {num_dropped + size} groups has a signal. Look "
            "at the rollouts: are all rewards equal, all tasks too hard or already solved? This is logged once.",
            "refill in vain",
        )
