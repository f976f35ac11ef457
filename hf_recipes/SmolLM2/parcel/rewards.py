"""Rewards for parcels: for each call that does its part, and for the right answer."""


def right_call(rollout_turns, weight, answer, **kwargs):
    """Per turn: 0.2 for the first right weight, 0.4 for the first right postage after it, 0 for other calls."""
    rewards = []
    for turns, *expected in zip(rollout_turns, weight, answer):
        values, pays = iter(expected), iter((0.2, 0.4))
        wanted, row = next(values), []
        for turn in turns:
            right = bool(turn.results) and turn.results[0].text == wanted
            row.append(next(pays) if right else 0.0 if turn.results else None)
            wanted = next(values, None) if right else wanted
        rewards.append(row)
    return rewards


def exact_match_reward_func(rollout_turns, answer, **kwargs):
    """Per rollout: 1 if the last turn answers with the right postage."""
    return [float(bool(turns) and turns[-1].answer == gold) for turns, gold in zip(rollout_turns, answer)]


TURN_REWARD_FUNCS = [right_call]
OUTCOME_REWARD_FUNCS = [exact_match_reward_func]
