"""What reward functions give, as numbers: what is refused, what stays apart, and what float32 cannot compare."""

import pytest
import torch
from torch.testing import assert_close

from mt_grpo.base.errors import RunError
from mt_grpo.rollout import Rollout, Turn
from mt_grpo.training.further_credit import check_advantages
from mt_grpo.training.rewards import Scores, check_reward_values, reward_tensors
from mt_grpo_trainer import RewardTable

NAN = float("nan")


def weighted_rewards(whole, per_turn, weights):
    table = Scores(whole, per_turn).weighted(weights)
    return table["outcome"], table["rollout_turn"], table["turn"]


def rollout(*observations):
    """A turn per observation, all of the same token."""
    return Rollout([], [1], turns=[Turn([5], None, "", "stop", observation_ids=ids) for ids in observations])


@pytest.mark.parametrize("value", [[1.0], [1.0] * 3])
def test_a_list_has_one_value_per_turn(value):
    check_reward_values([[1.0, None]], "paid", [rollout([7], [])], per_turn=True)
    with pytest.raises(ValueError, match=f"paid returned {len(value)} values for rollout 1"):
        check_reward_values([0.5, value], "paid", [rollout([7]), rollout([7], [])], per_turn=True)


def test_a_function_may_give_lists_numbers_and_nothing():
    whole, per_turn = reward_tensors([[[0.5, None], 2.0, None, []]], 2, 1)
    assert_close(whole, torch.tensor([[NAN], [2.0], [NAN], [NAN]]), equal_nan=True)
    assert_close(per_turn[:, :, 0], torch.tensor([[0.5, NAN], *[[NAN, NAN]] * 3]), equal_nan=True)


def test_without_outcome_functions_the_outcome_is_0():
    outcome, _, turn = weighted_rewards(torch.tensor([[NAN]]), torch.tensor([[[0.5]]]), torch.tensor([2.0]))
    assert (outcome.tolist(), turn.tolist()) == ([0.0], [[1.0]])


@pytest.mark.parametrize(
    "turn, rollout_turn, says",
    [([0.6e18, 0.6e18], NAN, "add up to 1.2e"), ([NAN, NAN], 2e18, "add up to 2e")],
)
def test_a_small_coefficient_makes_no_sum_small(turn, rollout_turn, says):
    """Other estimators add rewards up before they are weighed."""
    flags, states = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.long)
    table = RewardTable(torch.zeros(1), torch.tensor([rollout_turn]), torch.tensor([turn]), flags, flags, states)
    with pytest.raises(RunError, match=says):
        check_advantages(table, torch.zeros(1, 2), 3, 0.01)
