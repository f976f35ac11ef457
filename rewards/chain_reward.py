"""Rewards for a chain of calculations, one operation per call (`dataset_name: chain`, `tools/step_calculator.py`).

The turn rewards are lists, one entry per turn: each turn is rewarded for its own results. The rows have `steps`, the
values after each operation as text, the last of which is `answer`; without `steps` one call has to find the answer.

Copy the file together with calculator_reward.py.
"""

from typing import Any

from calculator_reward import _answer, answer_given_reward_func

# --- Turn rewards ----------------------------------------------------------------------------------------------------


def call_executed_reward_func(rollout_turns: list[list[Any]], **kwargs: Any) -> list[list[float | None]]:
    """Reward each turn whose calls run: 0.1, 0.0 if one fails. None for a turn that got no result."""
    return [[0.1 * (turn.error is None) if turn.results else None for turn in turns] for turns in rollout_turns]


def right_step_reward_func(
    rollout_turns: list[list[Any]], answer: list[str], steps: list[list[str]] | None = None, **kwargs: Any
) -> list[list[float | None]]:
    """Reward each call that takes the chain one step further: 0.3 if its result is the value after the next operation.

    The next operation is the one after the last right result, so a wrong step has to be repeated. 0.0 for other calls,
    failed ones included; None for a turn that got no result.
    """
    rewards = []
    for turns, values in zip(rollout_turns, steps or [[gold] for gold in answer], strict=True):
        done, row = 0, []
        for turn in turns:
            before = done
            for result in turn.results:
                done += done < len(values) and result.error is None and result.text == values[done]
            row.append(0.3 * (done - before) if turn.results else None)
        rewards.append(row)
    return rewards


# --- Outcome rewards -------------------------------------------------------------------------------------------------


def exact_match_reward_func(rollout_turns: list[list[Any]], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward the right answer: 1.0 if the last turn's answer is the chain's last value."""
    given = zip(map(_answer, rollout_turns), answer, strict=True)
    return [float((text or "").strip() == str(gold)) for text, gold in given]


TURN_REWARD_FUNCS = [call_executed_reward_func, right_step_reward_func]
OUTCOME_REWARD_FUNCS = [exact_match_reward_func, answer_given_reward_func]
