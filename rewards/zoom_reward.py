"""Rewards for reading a digit in a corner of an image (`tools/zoom.py`).

The rows have `corner`, the corner in the question, and `answer`, the digit in that corner, as text. The turn
rewards are lists, one entry per turn: each turn is rewarded for its own calls.

The outcome rewards are those of chain_reward.py. Copy the file together with it and calculator_reward.py.

>>> from types import SimpleNamespace as Of
>>> call, result = Of(name="zoom", arguments={"corner": "top left"}), Of(error=None)
>>> turns = [[Of(calls=[call], results=[result], answer=None), Of(calls=[], results=[], answer="7")]]
>>> right_corner_reward_func(turns, corner=["top left"]), right_corner_reward_func(turns, corner=["top right"])
([[0.5, None]], [[0.0, None]])
"""

from typing import Any

from chain_reward import OUTCOME_REWARD_FUNCS  # noqa: F401  the recipe's loader reads the list


def right_corner_reward_func(
    rollout_turns: list[list[Any]], corner: list[str], **kwargs: Any
) -> list[list[float | None]]:
    """Reward the first turn that zooms into the right corner: 0.5 if its calls run and all name the row's corner.

    0.0 for another corner, for a call that fails, and for the same corner again; None for a turn that got no result. A
    turn that names several corners has not chosen, and earns 0.0.
    """
    rewards = []
    for turns, asked in zip(rollout_turns, corner, strict=True):
        found, row = False, []
        for turn in turns:
            here = bool(turn.results) and all(
                call.arguments.get("corner") == asked and result.error is None
                for call, result in zip(turn.calls, turn.results, strict=False)
            )
            row.append(0.5 * (here and not found) if turn.results else None)
            found = found or here
        rewards.append(row)
    return rewards


TURN_REWARD_FUNCS = [right_corner_reward_func]
