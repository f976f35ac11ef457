"""The credit of trees: tables by hand, and a game whose gradient is known exactly."""

import pytest
import torch

from mt_grpo.training.tensors import NAN
from mt_grpo_trainer import RewardTable, turn_advantages

# --- by hand ---------------------------------------------------------------------------------------------------------


def table(outcome, copied, num_turns=3, turn=None, rollout_turn=None):
    size = len(outcome)
    none = torch.full((size, num_turns), NAN)
    per_rollout = torch.full((size,), NAN) if rollout_turn is None else torch.tensor(rollout_turn)
    return RewardTable(
        torch.tensor(outcome), per_rollout, none if turn is None else torch.tensor(turn),
        observed=torch.ones(size, num_turns, dtype=torch.bool), sampled=torch.ones(size, num_turns, dtype=torch.bool),
        state=torch.zeros(size, num_turns, dtype=torch.long), num_copied=torch.tensor(copied),
    )  # fmt: skip


def advantages(rewards, group_size, tree_size, coef=1.0):
    return turn_advantages(rewards, "tree", group_size, coef, "none", tree_size=tree_size)


def test_two_trees_of_three():
    """The first trunk is worth 1, its branches from before turn 1 are 0 and 0.5; the second ends with 0.2 before its
    branches' state, so that they begin anew and give 0.8 and 0.6."""
    found = advantages(table([1.0, 0.0, 0.5, 0.2, 0.8, 0.6], [0, 1, 1, 0, 0, 0]), 6, 3)
    # The state of the first is worth (1 + 0 + 0.5) / 3 = 0.5; the second tree's three give (0.2 + 0.8 + 0.6) / 3.
    prompt = 1.6 / 3
    third = 1 / 3
    by_hand = [
        [0.5 - prompt, *[third * (1.0 - (0.0 + 0.5 + prompt) / 3)] * 2],
        [0.0, *[third * (0.0 - (1.0 + 0.5 + prompt) / 3)] * 2],
        [0.0, *[third * (0.5 - (1.0 + 0.0 + prompt) / 3)] * 2],
        [0.2 - 0.5] * 3,  # against the first tree alone: how many began anew depends on the own trunk
        [0.8 - (0.5 + 0.2 + 0.6) / 3] * 3,
        [0.6 - (0.5 + 0.2 + 0.8) / 3] * 3,
    ]
    torch.testing.assert_close(found, torch.tensor(by_hand), atol=1e-6, rtol=0)


def test_two_states_of_a_trunk():
    """One branch from before turn 1 (0.4), one from before turn 2 (0.8), the trunk gives 0.2; the other trunk 0.1, and
    its branches 0.3 and 0.7 go on from before turn 2 and before turn 1."""
    found = advantages(table([0.2, 0.4, 0.8, 0.1, 0.3, 0.7], [0, 1, 2, 0, 2, 1], num_turns=4), 6, 3)
    later = (0.2 + 0.8) / 2  # of the state before turn 2, with the trunk
    first = (later + 0.4) / 2
    other = ((0.1 + 0.3) / 2 + 0.7) / 2
    at_first, at_other = (0.4 + other) / 2, (0.7 + first) / 2  # the trunks' baselines before turn 1
    by_hand = [
        [first - other, 0.5 * (later - at_first), *[0.25 * (0.2 - (0.8 + at_first) / 2)] * 2],
        [0.0, *[0.5 * (0.4 - (later + other) / 2)] * 3],
        [0.0, 0.0, *[0.25 * (0.8 - (0.2 + at_first) / 2)] * 2],
        [other - first, 0.5 * (0.2 - at_other), *[0.25 * (0.1 - (0.3 + at_other) / 2)] * 2],
        [0.0, 0.0, *[0.25 * (0.3 - (0.1 + at_other) / 2)] * 2],
        [0.0, *[0.5 * (0.7 - (0.2 + first) / 2)] * 3],
    ]
    torch.testing.assert_close(found, torch.tensor(by_hand), atol=1e-6, rtol=0)


def test_turn_rewards_belong_to_the_values():
    """Two trees of two. Each rollout is worth its outcome and half of its turn rewards."""
    turn = [[0.2, 0.4], [0.2, NAN], [0.6, NAN], [NAN, NAN]]
    rewards = table([1.0, 0.0, 0.0, 0.0], [0, 1, 0, 0], num_turns=2, turn=turn, rollout_turn=[NAN, NAN, NAN, 0.8])
    worth = [1.0 + 0.3, 0.1, 0.3, 0.4]
    state, prompt = (worth[0] + worth[1]) / 2, (worth[2] + worth[3]) / 2
    by_hand = [
        [state - prompt, 0.5 * (worth[0] - (worth[1] + prompt) / 2)],
        [0.0, 0.5 * (worth[1] - (worth[0] + prompt) / 2)],
        [worth[2] - state] * 2,
        [worth[3] - (state + worth[2]) / 2] * 2,
    ]
    torch.testing.assert_close(advantages(rewards, 4, 2, coef=0.5), torch.tensor(by_hand), atol=1e-6, rtol=0)
    without = advantages(rewards, 4, 2, coef=0.0)
    assert without[0].tolist() == pytest.approx([0.5 - 0.0, 0.5 * (1.0 - 0.0)])


def test_rollouts_that_failed_are_in_no_value():
    """The first tree's second branch failed: its first one and the trunk are left. The second tree's trunk failed:
    its branches are compared with each other. Of the third nothing is left but the trunk."""
    outcome = [1.0, 0.0, NAN, NAN, 0.9, 0.5, 0.3, NAN, NAN]
    found = advantages(table(outcome, [0, 1, 1, 0, 1, 1, 0, 1, 1], num_turns=2), 9, 3)
    second = (0.9 + 0.5) / 2
    prompts = (second + 0.3) / 2, (0.5 + 0.3) / 2, (0.5 + second) / 2
    by_hand = [
        [0.5 - prompts[0], 0.5 * (1.0 - (0.0 + prompts[0]) / 2)],
        [0.0, 0.5 * (0.0 - (1.0 + prompts[0]) / 2)],
        [0.0, 0.0],
        [0.0, 0.0],
        [0.0, 0.5 * (0.9 - (0.5 + prompts[1]) / 2)],
        [0.0, 0.5 * (0.5 - (0.9 + prompts[1]) / 2)],
        [0.3 - prompts[2]] * 2,
        [0.0, 0.0],
        [0.0, 0.0],
    ]
    torch.testing.assert_close(found, torch.tensor(by_hand), atol=1e-6, rtol=0)


def test_a_tree_of_which_all_failed_is_in_no_baseline():
    """Of three trees of two the last failed; of two trees the last: the first is alone then."""
    outcome = [1.0, 0.0, 0.3, 0.5, NAN, NAN]  # the second trunk ended before its branch's state
    found = advantages(table(outcome, [0, 1, 0, 0, 0, 1], num_turns=2), 6, 2)
    by_hand = [
        [0.5 - 0.4, 0.5 * (1.0 - (0.0 + 0.4) / 2)],
        [0.0, 0.5 * (0.0 - (1.0 + 0.4) / 2)],
        [0.3 - 0.5] * 2,
        [0.5 - (0.5 + 0.3) / 2] * 2,
        [0.0, 0.0],
        [0.0, 0.0],
    ]
    torch.testing.assert_close(found, torch.tensor(by_hand), atol=1e-6, rtol=0)
    alone = advantages(table([1.0, 0.0, NAN, NAN], [0, 1, 0, 1], num_turns=2), 4, 2)
    assert alone.tolist() == [[0.0, 0.5], [0.0, -0.5], [0.0, 0.0], [0.0, 0.0]]


def test_groups_are_apart_and_an_evaluation_has_no_trees():
    """Each rollout is then compared with the mean of the group's others."""
    found = advantages(table([1.0, 0.0, 0.5, 9.0, 9.0, 9.0], [0] * 6, num_turns=1), 3, 1)
    assert found[:, 0].tolist() == pytest.approx([0.75, -0.75, 0.0, 0.0, 0.0, 0.0])
    alone = advantages(table([1.0, NAN, NAN], [0] * 3, num_turns=1), 3, 1)
    assert alone[:, 0].tolist() == [0.0, 0.0, 0.0]


# --- a game that is solved by enumeration ----------------------------------------------------------------------------

TURNS, ACTIONS = 3, 3  # the last action ends the game
generator = torch.Generator().manual_seed(7)
NODES = sum(
    ACTIONS**k for k in range(TURNS)
)  # before each turn, by the actions so far; those behind an end stay unused
LOGITS = torch.randn(NODES, ACTIONS, generator=generator, dtype=torch.float64)
FIRST = torch.tensor([sum(ACTIONS**k for k in range(t)) for t in range(TURNS + 1)])  # node number of a turn's first
WORTH = torch.rand(ACTIONS**TURNS * (TURNS + 1), generator=generator, dtype=torch.float64)


def outcome_of(node, length):
    """What a finished game gives, by its actions so far and its length."""
    return WORTH[node + length * ACTIONS**TURNS]


def play(policy, node, turn, draws):
    """Games from the actions so far, `node` (n,) at `turn` (n,): actions (n, TURNS), -1 before and behind the game."""
    node, over = node.clone(), torch.zeros(len(node), dtype=torch.bool)
    actions, nodes, length = torch.full((len(node), TURNS), -1), torch.zeros(len(node), TURNS).long(), turn.clone()
    for t in range(TURNS):
        now = ~over & (turn <= t)
        chance = policy[FIRST[t] + node.clamp(max=ACTIONS**t - 1)].cumsum(1)
        action = (draws[:, t, None] > chance).sum(1).clamp(max=ACTIONS - 1)
        actions[:, t], nodes[:, t] = torch.where(now, action, -1), FIRST[t] + node.clamp(max=ACTIONS**t - 1)
        node, length = torch.where(now, node * ACTIONS + action, node), length + now
        over = over | (now & (action == ACTIONS - 1))
    return actions, nodes, outcome_of(node, length), length


def exact():
    """(the gradient of the expected outcome, the chances of each length), by enumeration."""
    logits = LOGITS.clone().requires_grad_()
    policy, lengths = logits.softmax(1), torch.zeros(TURNS + 1, dtype=torch.float64)

    def value(turn, node, chance):
        if turn == TURNS:
            lengths[TURNS] += chance.detach()
            return outcome_of(torch.tensor(node), TURNS)
        total = 0.0
        for action in range(ACTIONS):
            probability, then = policy[FIRST[turn] + node, action], node * ACTIONS + action
            if action == ACTIONS - 1 and turn + 1 < TURNS:
                lengths[turn + 1] += (chance * probability).detach()
                total = total + probability * outcome_of(torch.tensor(then), turn + 1)
            else:
                total = total + probability * value(turn + 1, then, chance * probability)
        return total

    value(0, 0, torch.tensor(1.0, dtype=torch.float64)).backward()
    return logits.grad, lengths


def gradients(groups, num_branches, states, trees=2, seed=1):
    """The sum over a group's rollouts of advantage times score, (groups, NODES, ACTIONS): trees as the trainer's."""
    draws = torch.Generator().manual_seed(seed)
    policy, size = LOGITS.softmax(1), 1 + num_branches * states
    count = groups * trees
    zero = torch.zeros(count, dtype=torch.long)

    def numbers(n):
        return torch.rand(n, TURNS, generator=draws, dtype=torch.float64)

    trunk = play(policy, zero, zero, numbers(count))
    # The states, drawn before the trunk is played: of the TURNS - 1 that a game may pass.
    order = torch.rand(count, TURNS - 1, generator=draws).argsort(1)[:, :states] + 1
    rollouts, copied = [trunk], [zero]
    for s in range(states):
        at = order[:, s]
        passed = trunk[3] > at
        start = torch.where(passed, at, 0)
        node = torch.where(passed, trunk[1].gather(1, at[:, None])[:, 0] - FIRST[at], 0)
        for _ in range(num_branches):
            rollouts.append(play(policy, node, start, numbers(count)))
            copied.append(start)
    actions, nodes, outcome = (torch.stack([each[k] for each in rollouts], 1).flatten(0, 1) for k in range(3))
    copied = torch.stack(copied, 1).flatten()
    none, played = torch.full((count * size, TURNS), NAN, dtype=torch.float64), actions >= 0
    rewards = RewardTable(outcome, none[:, 0], none, played, played, torch.zeros_like(actions), num_copied=copied)
    credit = turn_advantages(rewards, "tree", trees * size, 1.0, "none", tree_size=size)
    score = torch.nn.functional.one_hot(actions.clamp(min=0), ACTIONS) - policy[nodes]
    own = played & (torch.arange(TURNS) >= copied[:, None])  # copies are another rollout's
    weighted = score * (credit * own)[:, :, None]
    index = torch.arange(groups).repeat_interleave(trees * size)[:, None].expand(-1, TURNS) * NODES + nodes
    flat = torch.zeros(groups * NODES, ACTIONS, dtype=torch.float64)
    return flat.index_add(0, index.flatten(), weighted.flatten(0, 1)).view(groups, NODES, ACTIONS)


@pytest.mark.parametrize("num_branches, states", [(2, 1), (1, 1), (1, 2), (3, 2)])
def test_the_gradient_is_that_of_the_outcome(num_branches, states):
    """Its direction, and the mean of 2,000 groups within three standard errors, times how many games began anew."""
    gradient, lengths = exact()
    many = gradients(60_000, num_branches, states).mean(0)
    cosine = torch.nn.functional.cosine_similarity(many.flatten(), gradient.flatten(), dim=0)
    assert cosine > 0.999
    ended = [lengths[: at + 1].sum() for at in range(1, TURNS)]  # before the state `at` turns in
    times = 2 * (1 + num_branches * states * sum(ended) / (TURNS - 1))  # two trees: each trunk, and what began anew
    few = gradients(2000, num_branches, states, seed=2)
    error = few.std(0) / 2000**0.5
    used = error > 0
    assert used.sum() > 20
    distance = ((few.mean(0) - times * gradient).abs() / error.clamp(min=1e-12))[used]
    assert distance.max() < 3.5 and distance.square().mean() < 1.5, distance
