"""What a recipe says of a game."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_grpo.base.fields import key

GYM = "gym"  # a value of `environment`
LINE = "the line environment: gym"


@dataclass
class GymKeys:
    """A game of gymnasium, with `environment: gym`."""

    gym_env: str | None = key(
        None, "environment: gym: an id of gymnasium, or path.py:Class. Else ms-swift's: a name in envs",
        path=".py:", opens=True,
    )  # fmt: skip
    gym_kwargs: dict[str, Any] | str | None = key(
        None, "Arguments of the game of environment: gym, a mapping", needs=LINE
    )
    gym_actions: list[str] | None = key(None, "Names of the game's actions, in the order of their numbers", needs=LINE)
    gym_text: str | None = key(
        None, "path.py:Class, a GymText: how the game reads, and what is an action", path=".py:", needs=LINE
    )
    gym_unfinished_reward: float = key(
        0.0, "Added to the return of an episode that the conversation ended, not the game",
        within="(-inf, inf)", needs=LINE,
    )  # fmt: skip
