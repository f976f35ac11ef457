"""What each estimator does to the decision to stop, in worlds where the truth is known.

60,000 groups of 8 rollouts of at most 3 turns, and 15,000 for some tests of gigpo; every turn is the last with
probability 1/2. An estimator is unbiased if the mean advantage of turn k over the rollouts that stopped there, minus
that over those that went on, is what stopping is worth: 0 in worlds 1 and 2, where rewards are drawn independently of
it, and minus the return of going on in world 3.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from mt_grpo.training.batch import NAN
from mt_grpo_trainer import RewardTable, turn_advantages

GROUPS, G, K = 60_000, 8, 3
UNBIASED = ["outcome", "merged", "turn_return", "gigpo"]  # gigpo with states that do not recur
SCALES = ["group", "batch", "none"]


@cache
def world(number: int, groups: int = GROUPS) -> RewardTable:
    """Rollouts of 1, 2 or 3 turns; a turn that is not the last called a tool."""
    generator = torch.Generator().manual_seed(1000 * number)
    n = groups * G
    coins = torch.rand(n, K - 1, generator=generator) < 0.5
    length = 1 + (~coins).int().cumprod(1).sum(1)  # (N,) turns, 1 to 3
    turns = torch.arange(K)
    sampled, observed = turns < length[:, None], turns < length[:, None] - 1
    outcome = (torch.rand(n, generator=generator) < 0.3).float()
    x = (torch.rand(n, 1, generator=generator) < 0.3).float()
    if number == 1:  # X at the last turn
        turn = torch.where(observed, 0.0, x)
    elif number == 2:  # half of what is left at each tool turn, the rest at the last: the return to go is X / 2^k
        left = x * 0.5**turns
        turn = torch.where(observed, left / 2, left)
    else:  # each tool turn pays for itself
        turn = observed * (torch.rand(n, K, generator=generator) < 0.3).float()
    state = turns * 2 + (torch.rand(n, K, generator=generator) < 0.5)  # two states a turn, which never come back
    return RewardTable(
        outcome, torch.full((n,), NAN), turn.where(sampled, NAN), observed, sampled, state.where(sampled, -1)
    )


def stop_minus_go(advantages: torch.Tensor, rewards: RewardTable, k: int) -> tuple[float, float]:
    """The difference of the means at turn k, and its standard error over groups (a group's rollouts depend)."""
    at_k = advantages[:, k].double()
    stops, goes = rewards.sampled[:, k] & ~rewards.has_observation[:, k], rewards.has_observation[:, k]
    means = at_k[stops].mean(), at_k[goes].mean()
    influence = (at_k - means[0]) * stops / stops.sum() - (at_k - means[1]) * goes / goes.sum()
    return (means[0] - means[1]).item(), influence.view(-1, G).sum(1).square().sum().sqrt().item()


def estimate(name: str, rewards: RewardTable, scale: str) -> torch.Tensor:
    return turn_advantages(rewards, name, G, 1.0, scale)


NOTHING = [*((name, number) for name in UNBIASED for number in (1, 2)), ("mt_grpo", 1)]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name, number", NOTHING)
def test_says_nothing_about_stopping_where_stopping_is_worth_nothing(name, number, scale):
    """For mt_grpo only calls are paid, 0.0 whatever comes: a turn's number never depends on how the rollout ended."""
    rewards = world(number, 15_000 if name == "gigpo" else GROUPS)  # gigpo takes 20 times as long as the others
    rewards = only_calls_are_paid(rewards) if name == "mt_grpo" else rewards
    assert_says_nothing(estimate(name, rewards, scale), rewards)


def assert_says_nothing(advantages, rewards):
    for k in (0, 1):
        difference, error = stop_minus_go(advantages, rewards, k)
        assert 0 < error < 0.02  # there is something to compare, and it is measured well
        assert abs(difference) < 4 * error, k


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("name", ["turn_return", "gigpo"])
def test_an_outcome_in_the_return_says_nothing_about_stopping(name, baseline):
    """The outcome does not depend on it; nobody pays turns."""
    rewards = world(1, 15_000)
    rewards = replace(rewards, turn=torch.full_like(rewards.turn, NAN))
    more = {"outcome_in_return": True, "state_baseline": baseline}
    assert_says_nothing(turn_advantages(rewards, name, G, 1.0, "none", **more), rewards)


@pytest.mark.parametrize("name", ["merged", "turn_return"])
def test_says_what_going_on_is_worth(name):
    """World 3: going on from turn 0 pays 0.3, and 0.3 again with probability 1/2, where stopping pays nothing."""
    rewards = world(3)
    difference, error = stop_minus_go(estimate(name, rewards, "none"), rewards, 0)
    assert abs(difference - -(0.3 + 0.5 * 0.3) * (G - 1) / G) < 4 * error


def only_calls_are_paid(rewards: RewardTable) -> RewardTable:
    """The same world with None for a turn that called nothing, as the paper's rewards say it."""
    return replace(rewards, turn=rewards.turn.where(rewards.has_observation, NAN))


@pytest.mark.parametrize("is_paid, expected", [(False, -0.197), (True, -0.327)])
def test_mt_grpo_says_it_times_the_share_that_calls(is_paid, expected):
    """Callers are compared with callers, only rollouts that never called with all: here half of the 0.45 is lost.

    More of it is said where a turn without a call is given a zero: a number is compared with all numbers of its turn.
    """
    rewards = world(3) if is_paid else only_calls_are_paid(world(3))
    difference, error = stop_minus_go(estimate("mt_grpo", rewards, "none"), rewards, 0)
    assert difference == pytest.approx(expected, abs=0.007 if is_paid else 0.006) and error < 0.002


def trade_off() -> RewardTable:
    """World 4: stopping at turn 0 pays an outcome of Bernoulli(0.6), going on Bernoulli(0.3) and 0.3 for turn 0."""
    rewards = world(1)
    generator = torch.Generator().manual_seed(4)
    goes = rewards.has_observation[:, 0]
    outcome = (torch.rand(GROUPS * G, generator=generator) < torch.where(goes, 0.3, 0.6)).float()
    turn = torch.zeros_like(rewards.turn).where(rewards.sampled, NAN)
    turn[:, 0] = 0.3 * goes
    # One state a turn: a set of n damps by (n - 1) / n, and the two terms balance only if both are damped alike.
    return replace(rewards, outcome=outcome, turn=turn, state=torch.arange(K).where(rewards.sampled, -1))


@pytest.mark.parametrize("name", ["merged", "turn_return", "gigpo"])
def test_unscaled_rewards_are_exchanged_one_to_one(name):
    rewards = trade_off()
    difference, error = stop_minus_go(estimate(name, rewards, "none"), rewards, 0)
    assert abs(difference) < 4 * error < 0.02


BIASES = [  # estimator, world, scaling, the bias at turns 0 and 1, and how many standard errors it is from 0
    ("mt_grpo", 1, "none", (0.129, 0.228), 10),  # to stop pays now and to go on later, and a turn's number is
    ("mt_grpo", 2, "none", (0.065, 0.055), 10),  # compared with those of the same turn alone
    ("zero_sum", 1, "none", (0.124, 0.250), 10),
    ("zero_sum", 2, "none", (-0.024, 0.024), 10),
    ("progress_credit", 1, "none", (0.052, 0.067), 0),
    ("progress_credit", 2, "none", (0.0005, 0.024), 0),
    ("gigpo", 1, "group", (0.047, 0.026), 4),  # where a state comes back
    ("gigpo", 2, "none", (-0.012, -0.012), 4),
]


@pytest.mark.parametrize("name, number, scale, bias, apart", BIASES)
def test_the_bias_of(name, number, scale, bias, apart):
    rewards = world(number)
    if name == "gigpo":
        rewards = replace(rewards, state=torch.zeros_like(rewards.state).where(rewards.sampled, -1))
    discount = 0.5 if name == "progress_credit" else 1.0
    advantages = turn_advantages(rewards, name, G, 1.0, scale, discount)
    for k in (0, 1):
        difference, error = stop_minus_go(advantages, rewards, k)
        assert difference == pytest.approx(bias[k], abs=4 * error)
        assert abs(difference) >= apart * error


def test_the_bias_of_a_z_score_under_skewed_rewards():
    """Stopping pays Bernoulli(0.3) and going on always 0.3: worth the same, until divided by the group's std."""
    rewards = world(1)
    generator = torch.Generator().manual_seed(7)
    lottery = (torch.rand(GROUPS * G, generator=generator) < 0.3).float()
    skewed = replace(rewards, outcome=torch.where(rewards.has_observation[:, 0], 0.3, lottery))
    for scale, bias in (("group", -0.28), ("batch", 0.0), ("none", 0.0)):
        difference, error = stop_minus_go(estimate("outcome", skewed, scale), skewed, 0)
        assert difference == pytest.approx(bias, abs=0.01), scale
        assert (abs(difference) > 20 * error) == (scale == "group")
