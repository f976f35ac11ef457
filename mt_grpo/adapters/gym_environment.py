"""`environment: gym`: a game of gymnasium is the other side of the conversation. A turn is an action.

gym_env: FrozenLake-v1                            # an id, or path.py:Class
gym_kwargs: {is_slippery: false, render_mode: ansi}
gym_actions: [left, down, right, up]              # names of a Discrete space's actions
gym_text: path.py:MyText                          # a `GymText` of one's own
gym_unfinished_reward: -1                         # of an episode that the policy left
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from mt_grpo.adapters.gym_text import GymText, plain
from mt_grpo.plugins import load_class
from mt_grpo.rollout import Reply, Rollout, Turn
from mt_grpo.tool_results import error_text

logger = logging.getLogger(__name__)


class GymEnvironment:
    """One episode. Each step's reward is its turn's; their sum is the outcome reward.

    INVARIANT: what ends an episode is the game's to say. The policy can leave it, by texts that are no actions or have
    no end; `unfinished_reward` is what that costs. Where returns are negative and it is 0, leaving is learned.

    Attributes:
        env: The game.
        text: How it reads.
        terminated, truncated: As the last step said; both False where the conversation ended before the episode.
        rewards: One per step. A turn whose text is no action has none.
    """

    _make: Callable[[], gymnasium.Env]
    text_class: type[GymText] = GymText
    actions: Sequence[str] = ()
    unfinished_reward: float = 0.0
    tools: list = []

    def __init__(self):
        self.env = type(self)._make()
        self.text = self.text_class(self.env, self.actions)
        self.rewards: list[float] = []
        self.terminated = self.truncated = False
        self.shown = ""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None, **row: Any) -> str:
        """Begin an episode. Rollouts of a row with `seed` have the same game, as far as it draws its own numbers."""
        self.rewards, self.terminated, self.truncated = [], False, False
        observation, info = self.env.reset(seed=seed, options=options)
        self.shown = self.text.observation(observation, info)
        return ("\n" if row.get("prompt") else "") + self.text.rules() + self.shown

    def respond(self, rollout: Rollout, turn: Turn) -> Reply | None:
        """One step. A text that is no action is answered with what was expected; nothing moves.

        A turn that a budget cut off is no step, whatever it holds: nothing is replied, and the conversation ends.
        """
        if turn.finish_reason == "length":
            return None
        try:
            action = self.text.action(said(turn))
        except ValueError as error:
            return Reply(messages=[{"role": "user", "content": f"Error: {error}"}], info={"action": None})
        observation, reward, self.terminated, self.truncated, info = self.env.step(action)
        self.terminated, self.truncated = bool(self.terminated), bool(self.truncated)
        self.rewards.append(float(reward))
        self.shown = self.text.observation(observation, info)
        over = self.terminated or self.truncated
        return Reply(
            messages=[] if over else [{"role": "user", "content": self.shown}], stop=over, reward=self.rewards[-1],
            info={"action": plain(action), "terminated": self.terminated, "truncated": self.truncated,
                  "gym": plain(info)},
        )  # fmt: skip

    async def state_key(self) -> str:
        """What is seen, for `gigpo`."""
        return self.shown

    def get_reward(self) -> float:
        """The sum of the rewards, and `unfinished_reward` where the conversation ended before the episode."""
        over = self.terminated or self.truncated
        return sum(self.rewards) + (0.0 if over else self.unfinished_reward)

    def close(self) -> None:
        """Close the game."""
        self.env.close()


def said(turn: Turn) -> str:
    """A turn's text without its thinking.

    >>> said(Turn([], None, "<think>left?</think> right", "stop"))
    ' right'
    """
    if turn.open_thinking:
        return ""
    return turn.answer if turn.answer is not None else turn.text.rpartition("</think>")[2]


def gym_environment(
    make: Callable[[], gymnasium.Env],
    name: str,
    text_class: type[GymText] = GymText,
    actions: Sequence[str] = (),
    unfinished_reward: float = 0.0,
) -> type[GymEnvironment]:
    """The class of the environments of a game. Its return is logged as `rewards/<name>/mean`."""
    settings = {"text_class": text_class, "actions": tuple(actions), "unfinished_reward": unfinished_reward}
    return type(name, (GymEnvironment,), {"_make": staticmethod(make), **settings})


# -- what a recipe says --


def load_gym_environment(script_args: Any, args: Any) -> type[GymEnvironment]:
    """The class of a recipe's environments. It was made, reset and closed once. Raises `ValueError`."""
    if script_args.gym_env is None:
        raise ValueError("environment: gym without gym_env. Expected an id of gymnasium, or path.py:Class.")
    kwargs = read_kwargs(script_args.gym_kwargs)
    make = maker(script_args.gym_env, kwargs)
    text_class = load_class(script_args.gym_text, "gym_text") if script_args.gym_text else GymText
    if not issubclass(text_class, GymText):
        raise ValueError(f"gym_text: {script_args.gym_text!r} is no subclass of mt_grpo.adapters.gym_text.GymText.")
    name = script_args.gym_env.rpartition(":")[2].rpartition("/")[2]
    cls = gym_environment(make, name, text_class, script_args.gym_actions or (), script_args.gym_unfinished_reward)
    check_game(cls, script_args.gym_env, args.max_env_steps + 1)
    return cls


def read_kwargs(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """`gym_kwargs`, a mapping or its JSON. Raises `ValueError`."""
    try:
        kwargs = json.loads(given) if isinstance(given, str) else given or {}
    except ValueError as error:
        raise ValueError(f"gym_kwargs={given!r} is not JSON ({error}). Expected a mapping.") from None
    if not isinstance(kwargs, dict):
        raise ValueError(f"gym_kwargs={given!r} is {type(kwargs).__name__}, expected a mapping.")
    return kwargs


def maker(reference: str, kwargs: dict[str, Any]) -> Callable[[], gymnasium.Env]:
    """What makes the game of an id, or of `path.py:Class`. Raises `ValueError` for a class that is no game."""
    if ".py:" not in reference:
        return lambda: gymnasium.make(reference, **kwargs)
    cls = load_class(reference, "gym_env")
    if not issubclass(cls, gymnasium.Env):
        raise ValueError(f"gym_env: {reference!r} is {cls.__name__}, expected a subclass of gymnasium.Env.")
    return lambda: cls(**kwargs)


def check_game(cls: type[GymEnvironment], reference: str, most: int) -> None:
    """Raise `ValueError` unless an episode can begin. Warn where the conversation has fewer turns than the episode."""
    try:
        episode = cls()
        try:
            observation = episode.reset(seed=0)
        finally:
            episode.close()
    except Exception as error:  # whatever the game raises
        why = f"{type(error).__name__}: {error_text(error)}"
        raise ValueError(f"gym_env: {reference!r} cannot begin: {why}") from error
    if not isinstance(observation, str):
        raise ValueError(f"gym_text: an observation is {type(observation).__name__}, expected text.")
    longest = getattr(episode.env.spec, "max_episode_steps", None)
    if longest is not None and longest > most:
        logger.warning(
            "%s has up to %d steps, and the conversation %d turns. Set max_env_steps to %d to play it to its end.",
            reference, longest, most, longest - 1,
        )  # fmt: skip
