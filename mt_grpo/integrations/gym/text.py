"""Converts gymnasium observations to text, and a policy's text to actions. Subclass `GymText` for a game."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from mt_grpo.integrations.acting import tagged

HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]+m([^\x1b]*)\x1b\[0m")  # as gymnasium's text games mark a place
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class GymText:
    """Converts one game's observations to text and a turn's text to an action.

    `actions` are the names of the actions of a `Discrete` space, in their order. Without them actions are JSON.
    """

    unfinished_reward = 0.0  # added to the return of an episode that the conversation ended, not the game

    def __init__(self, env: gymnasium.Env, actions: Sequence[str] = ()):
        self.env, self.actions = env, {}
        if actions:
            space = env.action_space
            names = {name.strip().casefold() for name in actions}
            if not isinstance(space, spaces.Discrete) or not len(names) == len(actions) == space.n:
                raise ValueError(
                    f"gym_actions is {list(actions)}, and the action space is {space}. Expected one name per action "
                    "of a Discrete space; names differ by more than their case."
                )
            self.actions = {name.strip(): int(space.start) + i for i, name in enumerate(actions)}
        self._by_text = {name.casefold(): action for name, action in self.actions.items()}

    def rules(self) -> str:
        """Return the text before the first observation, such as the rules. An empty text adds nothing."""
        return f"Answer with an action as <action>...</action>: {self.choices()}.\n"

    def choices(self) -> str:
        """Describe the valid actions in words, for the policy."""
        space = self.env.action_space
        if self.actions:
            *first, last = self.actions
            return f"{', '.join(first)} or {last}" if first else last
        if isinstance(space, spaces.Discrete):
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        if isinstance(space, spaces.Text):
            characters = "".join(sorted(space.character_set))
            return f"a text of {space.min_length} to {space.max_length} of the characters {characters}"
        return f"JSON of {space}"

    def observation(self, observation: Any, info: dict[str, Any]) -> str:
        """Convert an observation to text: text unchanged, the rendering with `render_mode: ansi`, otherwise JSON.

        In a rendering, highlighted characters are put in brackets, whatever their colour.
        """
        if isinstance(observation, str):
            return observation
        if self.env.render_mode == "ansi":
            return COLOUR.sub("", HIGHLIGHTED.sub(r"[\1]", self.env.render())).strip("\n")
        return json.dumps(plain(observation), ensure_ascii=False)

    def action(self, text: str) -> Any:
        """The action of a text: its last <action>, or all of it. The policy reads the `ValueError` without one."""
        written, space = tagged(text), self.env.action_space
        with suppress(KeyError, TypeError, ValueError, OverflowError, RecursionError):
            if self.actions:
                action = self._by_text[written.casefold()]
            else:
                action = written if isinstance(space, spaces.Text) else from_json(written, space)
            if space.contains(action):
                return action
        raise ValueError(f"expected an action as <action>...</action>: {self.choices()}. Got {written[:60]!r}.")


def plain(value: Any) -> Any:
    """Convert a value to JSON data: arrays become lists, other objects text. Floats are rounded to six digits.

    >>> plain({"a": np.array([1.0, 1 / 3]), 3: (np.int64(4), True), "b": float("nan")})
    {'a': [1.0, 0.333333], '3': [4, True], 'b': 'nan'}
    """
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, int) else str(value)


def from_json(text: str, space: spaces.Space) -> Any:
    """Parse JSON as a member of a space. Raises `ValueError` or `TypeError` if it does not fit."""
    value = json.loads(text)
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        array = np.asarray(value)
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large is rejected below
            converted = array.astype(space.dtype)
        if array.dtype.kind not in ("b" if space.dtype == bool else "iuf") or not np.isfinite(converted).all():
            raise ValueError("no numbers")
        if not np.issubdtype(space.dtype, np.floating) and not np.array_equal(array, converted):
            raise ValueError("not whole numbers")
        return converted
    if not isinstance(space, spaces.Discrete) or isinstance(value, bool):
        raise ValueError("no number, or a space whose members JSON does not say")
    return value
