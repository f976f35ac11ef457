"""Converts gymnasium observations to text, and a policy's text to actions. Subclass `GymText` for a game."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from mt_grpo.conversation.tools.results import ADDRESS
from mt_grpo.integrations.acting import CLOSE, OPEN, tagged

HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]+m([^\x1b]*)\x1b\[0m")  # as gymnasium's text games mark a place
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class GymText:
    """Converts one game's observations to text and a turn's text to an action.

    Args:
        env: The game (`gymnasium.Env`), with its wrappers.
        actions: Names of the actions of a `Discrete` space, in their order. Empty: actions are numbers.

    Raises:
        ValueError: The space is not discrete, the number of names is wrong, or names are not distinct.
    """

    def __init__(self, env: gymnasium.Env, actions: Sequence[str] = ()):
        self.env = env
        space, written = env.action_space, {name.strip().casefold() for name in actions} - {""}
        if actions and (not isinstance(space, spaces.Discrete) or len(actions) != space.n):
            raise ValueError(
                f"gym_actions has {len(actions)} names, and the action space is {space}. Expected one name "
                "per action of a Discrete space."
            )
        if len(written) != len(actions) or any(tag in name for name in written for tag in (OPEN, CLOSE)):
            raise ValueError(f"gym_actions is {list(actions)}. Expected names that differ by more than their case.")
        self.actions = {name.strip(): int(space.start) + i for i, name in enumerate(actions)} if actions else {}
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
            drawn = self.env.render()
            if not isinstance(drawn, str):
                raise TypeError(f"render() gave {type(drawn).__name__}, expected text with render_mode: ansi")
            return COLOUR.sub("", HIGHLIGHTED.sub(r"[\1]", drawn)).strip("\n")
        return json.dumps(plain(observation), ensure_ascii=False)

    def action(self, text: str) -> Any:
        """Read the action in a turn's text without thinking: its last <action>, or the whole text.

        Raises `ValueError` without a valid action. The policy reads the message.
        """
        said = tagged(text)
        space = self.env.action_space
        if self.actions:
            action = self._by_text.get(said.casefold())
        elif isinstance(space, spaces.Text):
            action = said
        else:
            action = from_json(said, space)
        if action is None or not contains(space, action):
            raise ValueError(f"expected an action as <action>...</action>: {self.choices()}. Got {said[:60]!r}.")
        return action


def contains(space: spaces.Space, action: Any) -> bool:
    """Whether a space contains an action. False also if the space raises for a value of another type."""
    try:
        return bool(space.contains(action))
    except (TypeError, ValueError, AttributeError, IndexError):
        return False


def plain(value: Any, strict: bool = True) -> Any:
    """Convert a value to JSON data: arrays become lists, other objects text. Floats are rounded to six digits.

    An object without a text of its own raises `TypeError`, or, if not `strict`, becomes the name of its type.

    >>> plain({"a": np.array([1.0, 1 / 3]), 3: (np.int64(4), True), "b": float("nan")})
    {'a': [1.0, 0.333333], '3': [4, True], 'b': 'nan'}
    """
    if isinstance(value, np.floating):
        value = float(value)
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist(), strict)
    if isinstance(value, dict):
        return {str(key): plain(each, strict) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, strict) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if value is None or isinstance(value, int):
        return value
    if re.search(ADDRESS, str(value)):
        if not strict:
            return type(value).__name__
        raise TypeError(
            f"{type(value).__name__} cannot be shown to a model. Set a gym_text that implements `observation`"
        )
    return str(value).encode("utf-8", "replace").decode("utf-8")


def from_json(text: str, space: spaces.Space) -> Any:
    """Parse JSON as a member of a space, None if it is not one.

    >>> from_json("3", spaces.Discrete(4)), from_json("[1, 0]", spaces.MultiDiscrete([2, 2])), from_json("x", None)
    (3, array([1, 0]), None)
    >>> from_json('{"move": 1, "to": [2, 3]}', spaces.Dict(move=spaces.Discrete(2), to=spaces.Tuple(
    ...     [spaces.Discrete(9), spaces.Discrete(9)])))
    {'move': 1, 'to': (2, 3)}
    """
    try:
        return member(json.loads(text), space)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def member(value: Any, space: spaces.Space) -> Any:
    """Convert a JSON value to the form of a space's members. Raises `ValueError` if it does not fit."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            raise ValueError("other keys")
        return {key: member(value[key], each) for key, each in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(member(one, each) for one, each in zip(value, space.spaces, strict=True))
    if isinstance(space, spaces.Sequence) and not space.stack:
        return tuple(member(one, space.feature_space) for one in value) if isinstance(value, list) else None
    if isinstance(space, spaces.OneOf):
        index, one = value
        return index, member(one, space.spaces[index])
    if isinstance(space, spaces.Discrete):
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        array = np.asarray(value)
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large is refused below
            wanted = array.astype(space.dtype)
        if array.dtype.kind not in ("b" if space.dtype == bool else "iuf") or not np.isfinite(wanted).all():
            raise ValueError("no numbers")
        if not np.issubdtype(space.dtype, np.floating) and not np.array_equal(array, wanted):
            raise ValueError("not whole numbers")
        return wanted
    return value
