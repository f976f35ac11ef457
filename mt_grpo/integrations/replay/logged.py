"""The rewards of a log as reward functions, for `train_from_rollouts`. Weights are 1: what is logged is weighted."""


def logged_turn(rollout_turns: list, **kwargs) -> list[list[float | None]]:
    """The log's weighted sum of the turn functions that return a number per turn."""
    return [[turn.info["logged"]["turn"] for turn in turns] for turns in rollout_turns]


def logged_rollout_turn(rollout_turns: list, **kwargs) -> list[float | None]:
    """The log's weighted sum of the turn functions that return one number per rollout."""
    return [turns[0].info["logged"]["rollout_turn"] for turns in rollout_turns]


def logged_outcome(rollout_turns: list, **kwargs) -> list[float | None]:
    """The log's weighted sum of the outcome functions."""
    return [turns[0].info["logged"]["outcome"] for turns in rollout_turns]


TURN_REWARD_FUNCS = [logged_turn, logged_rollout_turn]
OUTCOME_REWARD_FUNCS = [logged_outcome]
