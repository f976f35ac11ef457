"""Credit assignment: golden numbers worked out by hand, the formula of TRL, and what must hold for any rewards."""

import doctest
import itertools
from dataclasses import replace

import pytest
import torch

from mt_grpo.base.errors import RunError
from mt_grpo.training.batch import NAN
from mt_grpo.training.further_credit import check_advantages, numbers_that_move
from mt_grpo_trainer import CREDIT_ASSIGNMENTS, RewardTable, norm, token_advantages, turn_advantages

NAMES = ["outcome", "merged", "mt_grpo", "turn_return", "gigpo", "zero_sum", "progress_credit"]
WITHIN = ("zero_sum", "progress_credit")  # which compare the turns of one rollout
SCALES = ["group", "batch", "none"]


def moving_numbers(rewards, name, group_size, coef):
    """As the trainer asks: by an estimator's name, without scaling."""
    return numbers_that_move(rewards, lambda t: turn_advantages(t, name, group_size, coef, "none"))


def table(
    outcome: list,
    observed: list[list[int]],
    turn: list[list] | None = None,
    rollout_turn: list | None = None,
    state: list[list[int]] | None = None,
) -> RewardTable:
    """Python lists to a `RewardTable`: None for "no value", rows of unequal length, one entry per turn.

    Without `state` two turns are in the same state if they are the same turn of a group.
    """

    def value(number):
        return NAN if number is None else float(number)

    num_turns = max(len(row) for row in observed)
    values = torch.full((len(outcome), num_turns), NAN)
    got_one = torch.zeros(len(outcome), num_turns, dtype=torch.bool)
    sampled, states = torch.zeros_like(got_one), torch.full(got_one.shape, -1)
    for i, row in enumerate(observed):
        sampled[i, : len(row)] = True
        states[i, : len(row)] = torch.tensor(range(len(row)) if state is None else state[i])
        got_one[i, : len(row)] = torch.tensor(row, dtype=torch.bool)
        if turn is not None:
            assert len(turn[i]) == len(row)
            values[i, : len(row)] = torch.tensor([value(v) for v in turn[i]])
    per_rollout = [None] * len(outcome) if rollout_turn is None else rollout_turn
    return RewardTable(
        torch.tensor([value(v) for v in outcome]), torch.tensor([value(v) for v in per_rollout]), values, got_one,
        sampled, states,
    )  # fmt: skip


def assert_rows(advantages: torch.Tensor, expected: list[list[float]]) -> None:
    """The advantages of the turns that exist; columns beyond a rollout's last turn belong to no token."""
    assert advantages.shape == (len(expected), max(len(row) for row in expected))
    assert not advantages.isnan().any()
    for i, row in enumerate(expected):
        assert advantages[i, : len(row)].tolist() == pytest.approx(row, abs=2e-6), f"rollout {i}"


def test_an_estimator_of_one_number_per_rollout_is_refused(monkeypatch):
    monkeypatch.setitem(CREDIT_ASSIGNMENTS, "mine", lambda rewards, coef, discount: rewards.outcome)  # (N,)
    with pytest.raises(IndexError):
        turn_advantages(table([1, 0], [[True, False]] * 2), "mine", 2, 1.0, "none")


@pytest.mark.contract("scale_rewards")
def test_norm_by_the_mean():
    """MaxRL: (r - mean) / mean. 1 of 4 is right: 0.75 / 0.25 and -0.25 / 0.25."""
    x = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 1.0, NAN, NAN])
    assert norm(x, 4, "mean").tolist() == pytest.approx([3, -1, -1, -1, 0, 0, 0, 0, 0.5, -0.5, 0, 0])
    with pytest.raises(RunError, match="scale_rewards: mean, got a reward of -0.5"):
        norm(torch.tensor([1.0, -0.5]), 2, "mean")


@pytest.mark.contract("scale_rewards")
@pytest.mark.parametrize(
    "values, group_size, scale, expected",
    [
        # Mean 0.5, unbiased std sqrt(1/3) = 0.577350: 0.5 / 0.577450.
        ([1, 0, 1, 0], 4, "group", [0.865875, -0.865875, 0.865875, -0.865875]),
        ([1, 0, 1, 0], 4, "none", [0.5, -0.5, 0.5, -0.5]),
        # Mean 3, std 1: 1 / 1.0001.
        ([2, 3, 4], 3, "group", [-0.999900, 0.0, 0.999900]),
        # The std of two values is |a - b| / sqrt(2) = 0.141421: 0.1 / 0.141521.
        ([0.2, 0.4], 2, "group", [-0.706607, 0.706607]),
        # Two groups are two worlds: the second is shifted by 100 and ten times wider.
        ([2, 3, 4, 90, 100, 110], 3, "group", [-0.999900, 0.0, 0.999900, -0.999990, 0.0, 0.999990]),
        # batch: centred 0.5 -0.5 1 -1, std sqrt(2.5 / 3) = 0.912871; over 0.912971.
        ([1, 0, 4, 2], 2, "batch", [0.547663, -0.547663, 1.095325, -1.095325]),
        ([1, 0, 4, 2], 2, "none", [0.5, -0.5, 1.0, -1.0]),
        # None is left out: mean and std are those of 1 and 0, 0.5 / 0.707207.
        ([1, None, 0], 3, "group", [0.707007, 0.0, -0.707007]),
        ([None, 4, None, 8], 4, "none", [0.0, -2.0, 0.0, 2.0]),
        # batch without the None: centred 0.5 -0.5 3 -3, std sqrt(18.5 / 3) = 2.483277; over 2.483377.
        ([1, None, 0, 7, 1, None], 3, "batch", [0.201339, 0.0, -0.201339, 1.208032, -1.208032, 0.0]),
    ],
)
def test_norm_golden(values, group_size, scale, expected):
    x = torch.tensor([NAN if v is None else float(v) for v in values])
    assert norm(x, group_size, scale).tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_equal_values_give_exactly_zero(scale):
    """Not the rounding error of their mean, divided by 1e-4; nor do fewer than two values give anything."""
    for value in (0.0, 0.1, 1 / 3, -7.3, 0.7 + 0.1, 1e6, 123456.789):
        for size in (2, 3, 7, 64):
            x = torch.full((2 * size,), value)
            assert norm(x, size, scale).tolist() == [0.0] * (2 * size), (value, size)
            x[0] = NAN
            assert norm(x, size, scale).tolist() == [0.0] * (2 * size), (value, size)
    assert norm(torch.tensor([5.0, NAN, NAN, NAN, NAN, NAN]), 3, scale).tolist() == [0.0] * 6
    assert norm(torch.tensor([5.0, -1.0, 2.0]), 1, scale).tolist() == [0.0] * 3
    mixed = norm(torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 2.0]), 3, scale)
    assert mixed[:3].tolist() == [0.0, 0.0, 0.0] and mixed[5] > 0


# Three calls and an answer, two calls and an answer, one call and an answer, an answer at once.
CHAIN = dict(
    outcome=[1, 0, 0.5, 0.5],
    observed=[[1, 1, 1, 0], [1, 1, 0], [1, 0], [0]],
    turn=[[0.2, 0.4, 0.6, None], [0.6, 0.0, None], [0.4, None], [None]],
)
PAPER = dict(outcome=[1, 0, 0.5], observed=[[1, 0]] * 3, rollout_turn=[0.2, 0.2, 0.8])
NO_CALLS = dict(outcome=[1, 0, 1, 0], observed=[[0]] * 4, turn=[[0.5], [0.5], [0], [1]])
LONG = dict(outcome=[1, 0], observed=[[1, 1, 0], [1, 0]], turn=[[0.2, 0.6, None], [0.4, None]])
SILENT = dict(outcome=[1, 0, 0.5, 0.5], observed=[[1, 0], [1, 0], [0], [0]], rollout_turn=[0.2, 0.6, 0.8, 0])
LEAVE_ONE_OUT = {"state_baseline": "leave_one_out"}
UP, TOP = 0.865875, 1.224445

BY_HAND = {  # estimator -> what is shown -> (rewards, group size, scaling, advantages, coefficient and others)
    "outcome": {
        "every turn gets the same, whatever its own reward": (
            dict(outcome=[1, 0, 1, 0], observed=[[1, 0], [1, 0], [0], [1, 1, 0]],
                 turn=[[9, 9], [0, 0], [3], [1, 2, 3]]), 4, "group",
            [[UP] * 2, [-UP] * 2, [UP], [-UP] * 3]),
    },
    "merged": {
        # Totals: 1 + 0.2 + 0.4 = 1.6, 0 + 0.6 = 0.6, 0.5 + 0.5 = 1, 0 + 0 = 0; mean 0.8.
        # Squares 0.64 + 0.04 + 0.04 + 0.64 = 1.36, std sqrt(1.36 / 3) = 0.673300; over 0.673400.
        **{f"all turn rewards are added to the outcome, {scale}": (
            dict(outcome=[1, 0, 0.5, 0], observed=[[1, 1, 0], [1, 0], [0], [1, 0]],
                 turn=[[0.2, None, 0.4], [None, 0.6], [0.5], [None, None]]),
            4, scale, [[a] * 3, [-b] * 2, [b], [-a] * 2]) for scale, a, b in (
                ("none", 0.8, 0.2), ("group", 1.187999, 0.297))},
        "a reward per rollout counts once": (
            dict(outcome=[1, 0], observed=[[1, 1, 0], [0]], rollout_turn=[0.2, 0.6]), 2, "none", [[0.3] * 3, [-0.3]]),
    },
    "mt_grpo": {
        # norm(R^O) = 0.5 -0.5 0; norm(R^T) = -0.2 -0.2 0.4. The call gets both, the answer the outcome's only.
        "the paper's two turns": (PAPER, 3, "none", [[0.3, 0.5], [-0.7, -0.5], [0.4, 0.0]]),
        "half of the turn's": (PAPER, 3, "none", [[0.4, 0.5], [-0.6, -0.5], [0.2, 0.0]], 0.5),
        # Std of the outcomes 0.5: 0.5 / 0.5001 = 0.999800. Of the turn rewards sqrt(0.12): -0.577184, 1.154368.
        "scaled": (PAPER, 3, "group", [[0.422616, 0.999800], [-1.576984, -0.999800], [1.154368, 0.0]]),
        # Outcomes centred 0.5 -0.5 | 1.5 -1.5, std sqrt(5 / 3), over 1.291094: 0.387269, 1.161806.
        # Turn rewards centred -0.2 0.2 | 0 0, std sqrt(0.08 / 3) = 0.163299, over 0.163399: 1.223995.
        "scaled by the batch": (
            dict(outcome=[1, 0, 3, 0], observed=[[1, 0]] * 4, rollout_turn=[0.2, 0.6, 0.4, 0.4]), 2, "batch",
            [[-0.836726, 0.387269], [0.836726, -0.387269], [1.161806, 1.161806], [-1.161806, -1.161806]]),
        "a reward per rollout goes to the first observed turn only": (
            dict(outcome=[1, 0], observed=[[1, 1, 1, 0], [1, 0]], rollout_turn=[0.2, 0.6]), 2, "none",
            [[0.3, 0.5, 0.5, 0.5], [-0.3, -0.5]]),
        "it covers the turns up to the first observation": (
            dict(outcome=[1, 0], observed=[[0, 1, 0], [1, 0]], rollout_turn=[0.2, 0.6]), 2, "none",
            [[0.3, 0.3, 0.5], [-0.3, -0.5]]),
        # Per rollout: norm(R^O) = 0.5 -0.5 0 0; norm(R^T) over all four, mean 0.4: -0.2 0.2 0.4 -0.4.
        # Silent rollouts: R^O + R^T = 1.2 0.6 1.3 0.5, mean 0.9: the last two 0.4 and -0.4.
        # With c = 0.5: R^O + R^T / 2 = 1.1 0.3 0.9 0.5, mean 0.7.
        "without a call the sums are compared": (SILENT, 4, "none", [[0.3, 0.5], [-0.3, -0.5], [0.4], [-0.4]]),
        "with half of the turn's": (SILENT, 4, "none", [[0.4, 0.5], [-0.4, -0.5], [0.2], [-0.2]], 0.5),
        # Turn rewards of the first two only: mean 0.4, -0.2 and 0.2. The third keeps its outcome's advantage.
        "None per rollout is left out": (
            {**PAPER, "rollout_turn": [0.2, 0.6, None]}, 3, "none", [[0.3, 0.5], [-0.3, -0.5], [0.0, 0.0]]),
        # norm(R^O) = 0.5 -0.5 0 0. Turn 0 of three rollouts, mean 0.4: -0.2 0.2 0. Turn 1 of two, mean 0.2: 0.2 -0.2.
        # Turn 2 of one survivor: 0. The silent one: R^O + R^T = 2.2 0.6 0.9 0.5, mean 1.05: -0.55.
        "unequal rollouts": (CHAIN, 4, "none", [[0.3, 0.7, 0.5, 0.5], [-0.3, -0.7, -0.5], [0.0, 0.0], [-0.55]]),
        # c = 2: the silent one: R^O + 2 R^T = 3.4 1.2 1.3 0.5, mean 1.6: -1.1.
        "twice the turn's": (CHAIN, 4, "none", [[0.1, 0.9, 0.5, 0.5], [-0.1, -0.9, -0.5], [0.0, 0.0], [-1.1]], 2.0),
        # Outcomes: std sqrt(0.5 / 3), 0.5 / 0.408348 = 1.224445. Turn 0: std 0.2, 0.2 / 0.2001 = 0.999500. Turn 1: std
        # 0.282843, 0.2 / 0.282943 = 0.706857. The silent one: std sqrt(1.85 / 3) = 0.785281, -0.55 / 0.785381.
        "unequal and scaled": (
            CHAIN, 4, "group",
            [[0.224945, 1.931302, TOP, TOP], [-0.224945, -1.931302, -TOP], [0.0, 0.0], [-0.700297]]),
        # Turn rewards of both turns form one set: centred -0.2 0.2 | 0.5 (alone: compared with none, and no spread),
        # two values, std 0.282843; 0.2 / 0.282943 = 0.706857. Outcomes 0.5 -0.5: 0.5 / 0.707207 = 0.707007.
        "unequal and scaled by the batch": (
            {**LONG, "turn": [[0.2, 0.5, None], [0.6, None]]}, 2, "batch",
            [[0.000150, 0.707007, 0.707007], [-0.000150, -0.707007]]),
        # norm(R^O) = 2/3 -1/3 -1/3. Turn 0, mean 0.4: -0.2 -0.2 0.4. Turn 1, mean 2: 3 -3 0. Turn 2: 7 is alone.
        "a number counts whether or not something was read behind its turn": (
            dict(outcome=[1, 0, 0], observed=[[1, 0], [1, 0], [1, 1, 0]], turn=[[0.2, 5], [0.2, -1], [0.8, 2, 7]]),
            3, "none", [[2 / 3 - 0.2, 2 / 3 + 3], [-1 / 3 - 0.2, -1 / 3 - 3], [-1 / 3 + 0.4, -1 / 3, -1 / 3]]),
        # A game pays 0.1 for its first move and 1 or -1 when it is over. Turn 1: mean 0, std sqrt(2): 1 / 1.414314.
        "the turn that ends a game counts": (
            dict(outcome=[0, 0], observed=[[1, 1], [1, 1]], turn=[[0.1, 1.0], [0.1, -1.0]]), 2, "group",
            [[0.0, 0.707057], [0.0, -0.707057]]),
        # norm(R^O) = 0. Turn 0 of all three, mean 0.2: 0.1 0.1 -0.2. The silent one: R^T = 0.3 0.3 0, mean 0.2: -0.2.
        "without observation a rollout is compared and gets no second term": (
            dict(outcome=[1, 1, 1], observed=[[1, 0], [1, 0], [0]], turn=[[0.3, None], [0.3, None], [0.0]]), 3, "none",
            [[0.1, 0.0], [0.1, 0.0], [-0.2]]),
        "a turn without reward keeps the outcome's advantage": (
            dict(outcome=[1, 0, 0.5], observed=[[1, 0]] * 3, turn=[[0.2, None], [None, None], [0.6, None]]), 3, "none",
            [[0.3, 0.5], [-0.5, -0.5], [0.2, 0.0]]),
        # Per rollout, mean 0.5: 0.5 -0.5 on turn 0. Per turn: turn 0 -0.2 0.2, turn 1 0.1 -0.1.
        "both forms of turn reward add up": (
            dict(outcome=[1, 1], observed=[[1, 1, 0], [1, 1, 0]], turn=[[0.2, 0.4, None], [0.6, 0.2, None]],
                 rollout_turn=[1.0, 0.0]), 2, "none", [[0.3, 0.1, 0.0], [-0.3, -0.1, 0.0]]),
        # R^O + R^T = 1.5 0.5 1 1, mean 1; std sqrt(0.5 / 3), 0.5 / 0.408348.
        "nobody called a tool": (NO_CALLS, 4, "none", [[0.5], [-0.5], [0.0], [0.0]]),
        "nobody called a tool, scaled": (NO_CALLS, 4, "group", [[TOP], [-TOP], [0.0], [0.0]]),
        "groups do not touch each other": (
            dict(outcome=CHAIN["outcome"] + [5, 5, 3, 3], observed=CHAIN["observed"] + [[1, 0]] * 4,
                 turn=CHAIN["turn"] + [[8, None], [6, None], [7, None], [7, None]]), 4, "none",
            [[0.3, 0.7, 0.5, 0.5], [-0.3, -0.7, -0.5], [0.0, 0.0], [-0.55], [2, 1], [0, 1], [-1, -1], [-1, -1]]),
    },
    "turn_return": {
        # Returns to go: 1.2 1.0 0.6 0 | 0.6 0 0 | 0.4 0 | 0. Turn 0, mean 0.55; turn 1, mean 1/3; turn 2, mean 0.3;
        # turn 3 is one survivor. norm(R^O) = 0.5 -0.5 0 0.
        "unequal rollouts": (
            CHAIN, 4, "none",
            [[0.5 + 0.65, 0.5 + 2 / 3, 0.5 + 0.3, 0.5], [-0.45, -0.5 - 1 / 3, -0.8], [-0.15, -1 / 3], [-0.55]]),
        # gamma 0.5: 0.55 0.7 0.6 0 | 0.6 0 0 | 0.4 0 | 0. Turn 0, mean 0.3875; turn 1, mean 0.7 / 3; turn 2, mean 0.3.
        "a discount and a coefficient": (
            CHAIN, 4, "none",
            [[0.825, 0.5 + 1.4 * 2 / 3, 1.1, 0.5], [-0.075, -0.5 - 1.4 / 3, -1.1], [0.025, -1.4 / 3], [-0.775]],
            2.0, 0.5),
        # gamma 0 leaves a turn its own reward, compared with everyone who stood there, callers or not.
        # Turn 0: 0.2 0.6 0.4 0, mean 0.3. Turn 1: 0.4 0 0, mean 0.4 / 3. Turn 2: 0.6 0.
        "without future": (
            CHAIN, 4, "none", [[0.4, 0.5 + 0.8 / 3, 0.8, 0.5], [-0.2, -0.5 - 0.4 / 3, -0.8], [0.1, -0.4 / 3], [-0.3]],
            1.0, 0.0),
        # Turn 0: 0.65 0.05 -0.15 -0.55, squares 0.75, std sqrt(0.25) = 0.5, over 0.5001. Turn 1: 2/3 -1/3 -1/3, std
        # 0.577350, over 0.577450. Turn 2: 0.3 -0.3, std 0.424264, over 0.424364.
        "scaled": (
            CHAIN, 4, "group",
            [[TOP + 1.299740, TOP + 1.154501, TOP + 0.706940, TOP],
             [-TOP + 0.099980, -TOP - 0.577250, -TOP - 0.706940], [-0.299940, -0.577250], [-1.099780]]),
        # Returns 0.4 0.4 0 | 0.6 0. Turn 0, mean 0.5; turn 1, mean 0.2.
        "None counts as zero": (
            dict(outcome=[1, 1], observed=[[1, 1, 0], [1, 0]], turn=[[None, 0.4, None], [0.6, None]]), 2, "none",
            [[-0.1, 0.2, 0.0], [0.1, -0.2]]),
        # Returns 0.2 + 0.1 + 1 = 1.3, 0.1 + 1 = 1.1 | 0.4. Turn 0: mean 0.85; turn 1 is alone. A rollout without an
        # outcome is in no comparison.
        "an outcome in the return stands beside the turn's own reward": (
            dict(outcome=[1, 0, None], observed=[[1, 0], [0], [0]], turn=[[0.2, 0.1], [0.4], [9]]), 3, "none",
            [[0.95, 0.5], [-0.95], [0.0]], 1.0, 1.0, {"outcome_in_return": True}),
    },
    "gigpo": {
        # Returns as for turn_return. State 0: mean 0.55. State 1: 1.0 (turn 1), 0 (turn 2), 0 (turn 1), mean 1/3.
        # State 2: 0.6 (turn 2), 0 (turn 1), mean 0.3. State 3: one visit.
        "turns in the same state": (
            {**CHAIN, "state": [[0, 1, 2, 3], [0, 2, 1], [0, 1], [0]]}, 4, "none",
            [[1.15, 0.5 + 2 / 3, 0.8, 0.5], [-0.45, -0.8, -0.5 - 1 / 3], [-0.15, -1 / 3], [-0.55]]),
        # Returns 0.6 0.2 | 0.1, all in state 5: mean 0.3.
        "a state that comes back": (
            dict(outcome=[1, 1], observed=[[1, 1], [1]], turn=[[0.4, 0.2], [0.1]], state=[[5, 5], [5]]), 2, "none",
            [[0.3, -0.1], [-0.2]]),
        # As above, times 3 / 2: 0.6 against 0.15, 0.2 against 0.35, 0.1 against 0.4. In the second group a state that
        # one turn was in, and one that two were in: 0.5 against 0.1.
        "a value is left out of its own baseline": (
            dict(outcome=[1] * 4, observed=[[1, 1], [1], [1, 1], [1]], turn=[[0.4, 0.2], [0.1], [0.2, 0.3], [0.1]],
                 state=[[5, 5], [5], [5, 6], [5]]), 2, "none", [[0.45, -0.15], [-0.3], [0.4, 0.0], [-0.4]],
            1.0, 1.0, LEAVE_ONE_OUT),
        # The same state in two groups is two sets: (0.4, 0.2) and (1.0, 0.0).
        "groups are apart": (
            dict(outcome=[0] * 4, observed=[[1]] * 4, turn=[[0.4], [0.2], [1.0], [0.0]], state=[[5]] * 4), 2, "none",
            [[0.1], [-0.1], [0.5], [-0.5]]),
    },
    "zero_sum": {
        # 0.2 0.4 0.6 around 0.4; 0.6 0 around 0.3; one reward and none: no shift.
        "within a rollout": (CHAIN, 4, "none", [[0.3, 0.5, 0.7, 0.5], [-0.2, -0.8, -0.5], [0.0, 0.0], [0.0]]),
        "twice": (CHAIN, 4, "none", [[0.1, 0.5, 0.9, 0.5], [0.1, -1.1, -0.5], [0.0, 0.0], [0.0]], 2.0),
        "no place for a reward per rollout": (
            dict(outcome=[1, 0], observed=[[1, 0], [1, 0]], rollout_turn=[0.2, 0.6]), 2, "none",
            [[0.5, 0.5], [-0.5, -0.5]]),
    },
}  # fmt: skip
OF_RETURNS = {
    # Returns 0.8 0.6 0 | 0.4 0: centred 0.2 -0.2, 0.3 -0.3 and one alone; four values, std sqrt(0.26 / 3) = 0.294392,
    # over 0.294492: 0.679136 and 1.018703. Outcomes 0.707007.
    "returns scaled by the batch": (
        LONG, 2, "batch", [[1.386143, 1.725710, 0.707007], [-1.386143, -1.725710]]),
    # norm(R^O) = 0.5 -0.5 0.5 -0.5; returns 0.5 0.5 0 1, mean 0.5.
    "returns of nobody who called a tool": (NO_CALLS, 4, "none", [[0.5], [-0.5], [0.0], [0.0]]),
    # Mean 0.4: -0.2 on the first's turns up to its first observation, 0.2 on all turns of the one that never called.
    "a reward per rollout beside returns": (
        dict(outcome=[1, 0], observed=[[1, 1, 0], [0]], rollout_turn=[0.2, 0.6]), 2, "none",
        [[0.3, 0.5, 0.5], [-0.3]]),
}  # fmt: skip
BY_HAND["turn_return"] |= OF_RETURNS
BY_HAND["gigpo"] |= OF_RETURNS


@pytest.mark.contract("outcome", "merged", "mt_grpo", "turn_return", "gigpo", "state_baseline", "zero_sum")
@pytest.mark.parametrize("name, shown", [(name, shown) for name in BY_HAND for shown in BY_HAND[name]])
def test_advantages_by_hand(name, shown):
    rewards, group_size, scale, expected, *more = BY_HAND[name][shown]
    coef, discount, others = (*more, *(1.0, 1.0, {})[len(more) :])
    assert_rows(turn_advantages(table(**rewards), name, group_size, coef, scale, discount, **others), expected)


@pytest.mark.parametrize("rewards", [(0.1, 0.2, 0.3, 0.4), (10.0, -10.0, 0.1, 0.7), (1e5, 0.3, -1e5)])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("name", ["merged", "turn_return", "gigpo"])
def test_equal_returns_in_another_order_are_no_signal(name, scale, rewards):
    """In float32 the sums of the same numbers differ with their order, and a difference is divided by 1e-4."""
    orders = list(itertools.permutations(rewards))
    turn = torch.tensor(orders[:: len(orders) // 6])
    every = torch.ones_like(turn, dtype=torch.bool)
    table = RewardTable(
        torch.zeros(6), torch.full((6,), NAN), turn, every, every, torch.arange(turn.shape[1]).repeat(6, 1)
    )
    assert turn_advantages(table, name, 6, 1.0, scale)[:, 0].tolist() == [0.0] * 6
    table.turn[0, 0] += 0.01
    assert turn_advantages(table, name, 6, 1.0, scale)[0, 0] > 0


@pytest.mark.parametrize("value", [1.0, 1000.0, -12345.0])
def test_values_that_differ_by_a_hundred_thousandth_differ(value):
    assert norm(torch.tensor([value, value * (1 + 1e-5)]), 2).abs().min() > 1e-4


@pytest.mark.contract("outcome", "merged", "mt_grpo", "turn_return", "gigpo", "zero_sum", "progress_credit")
@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_an_estimator(name):
    """What its docstring shows is what it gives; turn rewards and the outcome stand in one batch for all."""
    (example,) = doctest.DocTestFinder(recurse=False).find(CREDIT_ASSIGNMENTS[name], name)
    assert len([each for each in example.examples if each.want]) >= 1
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.contract("gigpo", "outcome_in_return")
def test_gigpo_gives_credit_from_an_outcome_alone():
    # The last turns have 1 and 0: returns 0.25 0.5 1 | 0 0. State 0: 0.25, 0; state 1: 0.5, 0; state 2: one visit.
    rewards = table([1, 0], [[1, 1, 0], [1, 0]], state=[[0, 1, 2], [0, 1]])
    assert_rows(turn_advantages(rewards, "gigpo", 2, 1.0, "none", 0.5), [[0.5, 0.5, 0.5], [-0.5, -0.5]])
    for name in ("gigpo", "turn_return"):  # here a state is a turn's index
        advantages = turn_advantages(rewards, name, 2, 1.0, "none", 0.5, outcome_in_return=True)
        assert_rows(advantages, [[0.625, 0.75, 0.5], [-0.625, -0.75]])


@pytest.mark.contract("progress_credit")
def test_progress_by_hand():
    """Over the tokens of a rollout the shift sums to zero, whatever the scores."""
    # Scores 0.2 None 0.8 0.5. Turn 2 makes 0.6: turns 0 to 2 get 0.25, 0.5, 1 over 1.75 of it. Turn 3 makes -0.3:
    # 0.125, 0.25, 0.5, 1 over 1.875. Credits 0.065714 0.131429 0.262857 -0.16, by 10, 20, 10, 10 tokens 0.086286.
    rewards = table([0, 0], [[1, 1, 1, 0], [1, 0, 0, 0]], turn=[[0.2, None, 0.8, 0.5], [0.7, None, None, None]])
    rewards.num_tokens = torch.tensor([[10, 20, 10, 10], [5, 5, 5, 5]])
    expected = [[-0.020571, 0.045143, 0.176571, -0.246286], [0.0] * 4]
    assert_rows(turn_advantages(rewards, "progress_credit", 2, 1.0, "none", 0.5), expected)
    halved = [[value / 2 for value in row] for row in expected]
    assert_rows(turn_advantages(rewards, "progress_credit", 2, 0.5, "group", 0.5), halved)
    # discount 0: each turn its own: 0, 0.3, -0.1, less their mean 0.2 / 3 over tokens (all turns have one).
    rewards = table([1, 0], [[1, 1, 0], [0]], turn=[[0.1, 0.4, 0.3], [None]])
    expected = [[0.5 - 0.2 / 3, 0.5 + 0.3 - 0.2 / 3, 0.5 - 0.1 - 0.2 / 3], [-0.5]]
    assert_rows(turn_advantages(rewards, "progress_credit", 2, 1.0, "none", 0.0), expected)
    # Progress 0.4, of which each turn gets 0.2; turn 0 is not trained, so that the mean is that of turn 1's one token.
    rewards = table([0, 0], [[1, 0], [1, 0]], turn=[[0.2, 0.6], [None, None]])
    rewards.num_tokens = torch.tensor([[0, 1], [0, 0]])
    assert_rows(turn_advantages(rewards, "progress_credit", 2, 1.0, "none"), [[0.0, 0.0], [0.0, 0.0]])
    for seed in range(5):
        rewards = random_table(seed)
        tokens = torch.randint(1, 50, rewards.turn.shape, generator=torch.Generator().manual_seed(seed))
        rewards.num_tokens = tokens * rewards.sampled
        shift = turn_advantages(rewards, "progress_credit", 6, 0.7, "none", 0.9)
        shift = shift - turn_advantages(rewards, "outcome", 6, 1.0, "none")
        assert (shift * rewards.num_tokens).sum(1).abs().max() < 1e-4 and shift.abs().max() > 0.1


OUTCOMES = torch.tensor([[0.4, 0.4], [0.9, 0.1], [0.2, 1.0]]).double()  # [first action, second action] -> R^O
CALL_REWARDS = torch.tensor([0.0, 0.7, 0.2]).double()  # first action (0: no call, its second action is not taken)


def expected_reward(parameters: torch.Tensor) -> torch.Tensor:
    """E[R^O + R^T] of a tabular policy: 3 logits for the first turn, 2 for the second turn after each call."""
    first, second = parameters[:3].softmax(0), parameters[3:].view(2, 2).softmax(1)
    after = torch.cat([OUTCOMES[:1, 0], (second * OUTCOMES[1:]).sum(1)])  # (3,) E[R^O | first action]
    return (first * (after + CALL_REWARDS)).sum()


@pytest.mark.parametrize("name, per_turn", [("mt_grpo", False), ("turn_return", True), ("merged", True)])
def test_the_gradient_of_a_toy_policy(name, per_turn):
    """Unscaled and at c = 1 the policy gradient is (G - 1) / G of the true one: the baseline includes the rollout."""
    groups, size = 60_000, 4
    parameters = torch.tensor([0.1, 0.4, -0.3, 0.5, -0.2, -0.4, 0.3]).double()
    step = 1e-5 * torch.eye(7).double()
    true = torch.stack([expected_reward(parameters + h) - expected_reward(parameters - h) for h in step]) / 2e-5

    generator = torch.Generator().manual_seed(11)
    n = groups * size
    p_first, p_second = parameters[:3].softmax(0), parameters[3:].view(2, 2).softmax(1)
    first = torch.multinomial(p_first.expand(n, 3), 1, generator=generator)[:, 0]
    called = first > 0
    second = torch.multinomial(p_second[(first - 1).clamp(min=0)], 1, generator=generator)[:, 0]
    calls = CALL_REWARDS[first].float()
    turn = torch.full((n, 2), NAN)
    if per_turn:
        turn[:, 0] = calls
    rewards = RewardTable(
        OUTCOMES[first, second].float(), torch.full((n,), NAN) if per_turn else calls, turn,
        torch.stack([called, torch.zeros_like(called)], 1), torch.stack([torch.ones_like(called), called], 1),
        torch.stack([torch.zeros_like(first), first], 1),
    )  # fmt: skip
    advantages = turn_advantages(rewards, name, size, 1.0, "none").double()

    score_first = torch.nn.functional.one_hot(first, 3) - p_first  # (N, 3) gradient of log pi
    row = torch.nn.functional.one_hot((first - 1).clamp(min=0), 2)  # (N, 2) which call
    score_second = torch.nn.functional.one_hot(second, 2) - p_second[(first - 1).clamp(min=0)]
    score_second = (row[:, :, None] * score_second[:, None] * called[:, None, None]).view(n, 4)
    samples = torch.cat([advantages[:, :1] * score_first, advantages[:, 1:] * score_second], 1)
    per_group = samples.view(groups, size, 7).mean(1)
    error = per_group.std(0) / groups**0.5
    assert (true.abs() > 20 * error).sum() >= 5  # there is a gradient to find
    assert ((per_group.mean(0) - true * (size - 1) / size).abs() < 4 * error).all()


def random_table(seed: int, num_groups: int = 5, group_size: int = 6, num_turns: int = 4) -> RewardTable:
    generator = torch.Generator().manual_seed(seed)
    n = num_groups * group_size
    observations = torch.randint(0, num_turns, (n, 1), generator=generator)
    turn = torch.randn(n, num_turns, generator=generator)
    turn[torch.rand(n, num_turns, generator=generator) < 0.2] = NAN
    turn[torch.arange(num_turns) > observations] = NAN
    rollout_turn = torch.randn(n, generator=generator)
    rollout_turn[torch.rand(n, generator=generator) < 0.2] = NAN
    observed = torch.arange(num_turns) < observations
    sampled = torch.arange(num_turns) <= observations
    state = torch.randint(0, 3, (n, num_turns), generator=generator).where(sampled, -1)
    return RewardTable(torch.randn(n, generator=generator), rollout_turn, turn, observed, sampled, state)


def permuted(rewards: RewardTable, order: torch.Tensor) -> RewardTable:
    return RewardTable(**{name: v[order] if torch.is_tensor(v) else v for name, v in vars(rewards).items()})


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_the_order_within_a_group_and_of_groups_does_not_matter(name, scale):
    rewards = random_table(3)
    generator = torch.Generator().manual_seed(4)
    within = torch.cat([6 * g + torch.randperm(6, generator=generator) for g in range(5)])
    between = (torch.tensor([3, 0, 4, 1, 2])[:, None] * 6 + torch.arange(6)).flatten()
    before = turn_advantages(rewards, name, 6, 0.7, scale)
    for order in (within, between):
        after = turn_advantages(permuted(rewards, order), name, 6, 0.7, scale)
        torch.testing.assert_close(after, before[order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
def test_mean_zero_in_every_group(scale):
    rewards = random_table(5)
    for name in ("outcome", "merged"):
        advantages = turn_advantages(rewards, name, 6, 1.0, scale)
        torch.testing.assert_close(advantages.view(5, 6, 4).sum(1), torch.zeros(5, 4), atol=2e-5, rtol=0)
    # mt_grpo: the turn's own term sums to zero over rollouts with a number at that turn, where all observed something.
    calling = torch.cat([torch.ones(30, 1, dtype=torch.bool), rewards.has_observation[:, 1:]], 1)
    with_turns = replace(rewards, rollout_turn=torch.full((30,), NAN), has_observation=calling)
    own = turn_advantages(with_turns, "mt_grpo", 6, 1.0, scale) - turn_advantages(rewards, "outcome", 6, 1.0, scale)
    torch.testing.assert_close(own.view(5, 6, 4).sum(1), torch.zeros(5, 4), atol=2e-5, rtol=0)
    assert own.abs().max() > 0.1


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_can_be_compared_the_advantage_is_exactly_zero(name, scale):
    """For equal rewards, in a group of one, and without any outcome."""
    turn = [1 / 3, 1 / 3 if name in WITHIN else 0.7, None]  # none of them exact in binary
    equal = table([0.1] * 7, [[1, 1, 0]] * 7, turn=[turn] * 7, rollout_turn=[0.3] * 7)
    alone = random_table(7, num_groups=4, group_size=1)
    if name in WITHIN:
        alone.turn[:] = NAN
    alone.state[:] = torch.arange(4)  # nor does gigpo compare turns of one rollout that are in different states
    none = table([None] * 4, [[1, 0], [1, 0], [0], [0]], turn=[[1, 2], [3, 4], [5], [6]], rollout_turn=[1, 2, 3, 4])
    for rewards, group_size, coef in ((equal, 7, 1.3), (alone, 1, 1.0), (none, 4, 1.0)):
        assert turn_advantages(rewards, name, group_size, coef, scale).eq(0).all(), group_size


@pytest.mark.parametrize("name", NAMES)
def test_without_turn_rewards_all_are_outcome(name):
    """A rollout without outcome gets zero, and the others are compared without it."""
    rewards = table([1, 0, 0.5, 0.5], CHAIN["observed"])
    assert_rows(turn_advantages(rewards, name, 4, 1.0, "none"), [[0.5] * 4, [-0.5] * 3, [0.0] * 2, [0.0]])
    rewards = table([1, None, 0], [[1, 0]] * 3)
    assert_rows(turn_advantages(rewards, name, 3, 1.0, "none"), [[0.5, 0.5], [0.0, 0.0], [-0.5, -0.5]])


@pytest.mark.parametrize("name", ["mt_grpo", "turn_return", "gigpo", "merged"])
def test_turn_rewards_of_a_rollout_without_outcome_are_in_no_baseline(name):
    """0.2 and 0.6, mean 0.4; the 10 is in no baseline."""
    last, values = 0.2 * (name == "merged"), [0.2, 10, 0.6]
    for given in ({"rollout_turn": values}, {"turn": [[value, None] for value in values]}):
        rewards = table([1, None, 1], [[1, 0]] * 3, **given)
        assert_rows(turn_advantages(rewards, name, 3, 1.0, "none"), [[-0.2, -last], [0.0, 0.0], [0.2, last]])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_finite_whatever_is_missing(name, scale):
    for seed in range(10):
        rewards = random_table(seed)
        rewards.outcome[torch.rand(30, generator=torch.Generator().manual_seed(seed)) < 0.5] = NAN
        advantages = turn_advantages(rewards, name, 6, 1.0, scale)
        assert advantages.shape == (30, 4) and advantages.isfinite().all()
        assert advantages[rewards.outcome.isnan()].eq(0).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_number_changes_an_advantage_or_is_known_not_to(name, scale):
    """Over random tables: nothing that a reward gave is dropped without a word, and what counts is not called dropped.

    With `batch` a number can change what other groups are divided by, and count in no comparison.
    """
    counted = 0
    for seed in range(6):
        rewards = random_table(seed, num_groups=2, group_size=4, num_turns=3)
        rewards.outcome[::5] = NAN
        masks = moving_numbers(rewards, name, 4, 0.7)
        before = turn_advantages(rewards, name, 4, 0.7, scale)[rewards.sampled]
        for part in ("outcome", "rollout_turn", "turn"):
            for place in (~getattr(rewards, part).isnan()).nonzero().tolist():
                values = getattr(rewards, part).clone()
                # By two amounts: where only the sign of a group's difference counts, one of them changes it.
                changed = []
                for by in (-9.0, 9.0):
                    values[tuple(place)] += by
                    after = turn_advantages(replace(rewards, **{part: values}), name, 4, 0.7, scale)
                    changed.append(not torch.allclose(after[rewards.sampled], before, atol=1e-6, rtol=0))
                    values[tuple(place)] -= by
                counts = masks[part][tuple(place)].item()
                assert any(changed) == counts or (scale == "batch" and not counts), (seed, part, place)
                counted += any(changed)
            assert not masks[part][getattr(rewards, part).isnan()].any()
    assert counted > 30


def test_what_moves_is_found_without_chance_and_for_any_function():
    assert not moving_numbers(random_table(1), "mt_grpo", 6, 0.0)["turn"].any()  # turn_advantage_coef: 0
    state = torch.get_rng_state()
    moving_numbers(random_table(1), "gigpo", 6, 1.0)
    assert torch.equal(torch.get_rng_state(), state)
    rewards = table([1, 0], [[1, 0], [1]], turn=[[0.2, 5], [0.4]])
    masks = numbers_that_move(rewards, lambda t: (t.outcome.numpy() - 0.5)[:, None] * t.sampled)
    assert masks["outcome"].all() and masks["turn"].tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("coef, reward", [(1e20, 1.0), (1.0, 9e17)])
def test_sums_that_float32_cannot_compare_end_the_run(coef, reward):
    """Their squares are infinite, so a comparison gives 0 to all: rollouts without observation lose their rewards."""
    rewards = table([1, 0], [[0, 0], [0, 0]], turn=[[reward, reward], [0, 0]])
    with pytest.raises(RunError, match="Step 3: the weighted rewards .* add up to .*e.*Lower turn_reward_weights"):
        check_advantages(rewards, turn_advantages(rewards, "mt_grpo", 2, coef, "group"), 3, coef)
    rewards.turn /= 10
    check_advantages(rewards, turn_advantages(rewards, "mt_grpo", 2, 1.0, "group"), 3, 1.0)


def test_token_advantages_of_rollouts_of_unequal_length():
    advantages = torch.tensor([[1.0, 2.0, 3.0], [-4.0, 99.0, 99.0], [NAN, NAN, NAN]])
    turn_ids = torch.tensor([[0, -1, 1, 1, -1, 2], [0, 0, 0, -1, -1, -1], [-1, -1, -1, -1, -1, -1]])
    expected = torch.tensor(
        [[1.0, 0.0, 2.0, 2.0, 0.0, 3.0], [-4.0, -4.0, -4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    )
    assert torch.equal(token_advantages(advantages, turn_ids), expected)
