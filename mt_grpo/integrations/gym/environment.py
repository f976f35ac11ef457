"""`environment: gym`: a game of gymnasium is the other side of the conversation. A turn is an action."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from mt_grpo.base.errors import error_line
from mt_grpo.base.fields import keys_that
from mt_grpo.integrations.acting import said
from mt_grpo.integrations.checks import check_tool_format, check_unset
from mt_grpo.integrations.gym.text import GymText, plain
from mt_grpo.recipe.plugins import load_class
from mt_grpo.rollout import Reply, Rollout, Turn


class GymEnvironment:
    """An environment that plays one episode of a game. Turn rewards are the steps' rewards, and their sum the outcome.

    INVARIANT: only the game ends an episode. The policy can leave it unfinished with invalid or endless texts, for the
    price of `unfinished_reward`. If returns are negative and it is 0, the policy learns to leave.

    Attributes:
        env: The game (`gymnasium.Env`).
        text: The `GymText` that converts observations and actions.
        terminated, truncated: The flags of the last step; both False if the conversation ended before the episode.
        rewards: One number per step. A turn without a valid action adds none.
    """

    _make: Callable[[], gymnasium.Env]
    text_class: type[GymText] = GymText
    actions: Sequence[str] = ()
    unfinished_reward: float = 0.0
    tools: list = []
    keyword_columns = ("options",)

    def __init__(self):
        self.env = type(self)._make()
        self.text = self.text_class(self.env, self.actions)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None, **row: Any) -> str:
        """Begin an episode. Rollouts of a row with `seed` play the same game, if it uses its own random numbers."""
        self.rewards: list[float] = []
        self.terminated = self.truncated = False
        self._last_turn: Turn | None = None  # None, too, when it has paid `unfinished_reward`
        self.shown = self.text.observation(*self.env.reset(seed=seed, options=options))
        return ("\n" if row.get("prompt") else "") + self.text.rules() + self.shown

    def respond(self, rollout: Rollout, turn: Turn) -> Reply:
        """Take one step. The game does not move for text without a valid action, nor for a truncated turn."""
        turn.calls, turn.results = [], []  # a game has no tools: what looks like a call is text
        self._last_turn = turn
        if turn.finish_reason == "length":
            return Reply(info={"action": None})
        try:
            action = self.text.action(said(turn))
        except ValueError as error:
            return Reply(messages=[{"role": "user", "content": f"Error: {error}"}], info={"action": None})
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        self.rewards.append(float(np.asarray(reward).item()))  # which may be an array of one number
        self.shown = self.text.observation(observation, info)
        ends = {"terminated": self.terminated, "truncated": self.truncated}
        over = any(ends.values())
        return Reply(
            messages=[] if over else [{"role": "user", "content": self.shown}],
            stop=over,
            reward=self.rewards[-1],
            info={"action": plain(action), **ends, "gym": plain(info)},
        )

    async def state_key(self) -> str:
        """The text of the current observation, as the state for `gigpo`."""
        return self.shown

    def get_reward(self) -> float:
        """The sum of the rewards, plus `unfinished_reward` if the conversation ended before the episode."""
        if self.terminated or self.truncated or not self.unfinished_reward:
            return sum(self.rewards)
        if self._last_turn is not None:
            self._last_turn.reward = (self._last_turn.reward or 0.0) + self.unfinished_reward
            self._last_turn = None
        return sum(self.rewards) + self.unfinished_reward

    def close(self) -> None:
        """Close the game."""
        self.env.close()


def gym_environment(make: Callable[[], gymnasium.Env], name: str, **settings: Any) -> type[GymEnvironment]:
    """The class of a game's environments, with `settings` as attributes. Its return is `rewards/<name>/mean`."""
    return type(name, (GymEnvironment,), {"_make": staticmethod(make), **settings})


def load_gym_conversation(script_args: Any, args: Any, base: type) -> tuple[type, type[GymEnvironment]]:
    """(class of conversations, class of environments) of a recipe. Raises `ValueError` if no episode can begin."""
    where = "environment: gym"
    check_tool_format(args.tool_format, where)
    if script_args.tools_script is not None:
        raise ValueError(f"tools_script has no effect with {where}: a turn is an action. Remove it.")
    check_unset(keys_that(args, "of_tools"), f"{where}: a turn is an action", args)
    if script_args.gym_env is None:
        raise ValueError(f"{where} without gym_env. Expected an id of gymnasium, or path.py:Class.")
    text_class = load_class(script_args.gym_text, "gym_text") if script_args.gym_text else GymText
    make = functools.partial(gymnasium.make, script_args.gym_env)
    if ".py:" in script_args.gym_env:
        make = load_class(script_args.gym_env, "gym_env")
    try:
        kwargs = script_args.gym_kwargs or {}
        kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
        cls = gym_environment(
            lambda: make(**copy.deepcopy(kwargs)),  # a game may change what it gets
            script_args.gym_env.rpartition(":")[2].rpartition("/")[2],
            text_class=text_class,
            actions=script_args.gym_actions or (),
            unfinished_reward=text_class.unfinished_reward,
        )
        play_one_turn(cls)
    except Exception as error:
        raise ValueError(f"gym_env: {script_args.gym_env!r} cannot begin: {error_line(error)}") from error
    return base, cls


def play_one_turn(cls: type[GymEnvironment]) -> None:
    """Begin an episode and take one step. Raises `TypeError` if a policy could not write the action."""
    game = cls()
    try:
        game.reset(seed=0)
        space = game.env.action_space
        space.seed(0)
        sample = space.sample()
        text = next(iter(game.text.actions), sample if isinstance(sample, str) else json.dumps(plain(sample)))
        reply = game.respond(None, Turn([], None, f"<action>{text}</action>", "stop"))
        if reply.info["action"] is None and type(game.text).action is GymText.action:
            raise TypeError(f"an action of {space} cannot be read from JSON. Set a gym_text with its own action()")
    finally:
        game.close()
