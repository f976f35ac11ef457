"""What a recipe says of a game."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_grpo.base.fields import key
from mt_grpo.recipe.plugins import Integration

GYM = "the line environment: gym"


@dataclass
class GymKeys:
    """A game of gymnasium, with `environment: gym`."""

    gym_env: str | None = key(None, "The game: an id of gymnasium, or path.py:Class", path=".py:", needs=GYM)
    gym_kwargs: dict[str, Any] | str | None = key(None, "Arguments of the game, a mapping", needs=GYM)
    gym_actions: list[str] | None = key(None, "Names of the game's actions, in the order of their numbers", needs=GYM)
    gym_text: str | None = key(
        None, "path.py:Class, a GymText: how the game reads, and what is an action", path=".py:", needs=GYM
    )


class GymIntegration(Integration):
    """A game is the environment of a conversation of the trainer's class."""

    keys = GymKeys
    line = "environment: gym"
    loads = "mt_grpo.integrations.gym.environment:load_gym_conversation"
