"""`environment: gym`: a game of gymnasium is the other side of the conversation. A turn is an action.

gym_env: FrozenLake-v1                            # an id, or path.py:Class
gym_kwargs: {is_slippery: false, render_mode: ansi}
gym_actions: [left, down, right, up]              # names of a Discrete space's actions
gym_text: path.py:MyText                          # a `GymText` of one's own
gym_unfinished_reward: -1                         # of an episode that the policy left
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import gymnasium

from mt_grpo.base.errors import error_line
from mt_grpo.base.event_loop import run_async
from mt_grpo.base.fields import keys_that
from mt_grpo.conversation.environments import is_number
from mt_grpo.conversation.tools.threads import ToolTimeout, run_tool
from mt_grpo.integrations.acting import CLOSE, OPEN, said
from mt_grpo.integrations.checks import check_tool_format, check_unset
from mt_grpo.integrations.gym.text import GymText, contains, plain
from mt_grpo.recipe.plugins import load_class
from mt_grpo.rollout import Reply, Rollout, Turn

logger = logging.getLogger(__name__)


class GymEnvironment:
    """An environment that plays one episode of a game. Turn rewards are the steps' rewards, and their sum the outcome.

    INVARIANT: only the game ends an episode. The policy can leave it unfinished with invalid or endless texts.
    `unfinished_reward` is the price, added to the outcome and to the last turn's reward.
    If returns are negative and it is 0, the policy learns to leave.

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
    most_turns: int | None = None  # of the conversation
    tools: list = []
    keyword_columns = ("options",)

    def __init__(self):
        self.env = type(self)._make()
        try:
            self.text = self.text_class(self.env, self.actions)
        except BaseException:
            self.env.close()
            raise
        self.rewards: list[float] = []
        self.terminated = self.truncated = False
        self.shown = ""
        self._uncharged: Turn | None = None  # the last turn, where it has not paid `unfinished_reward`

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None, **row: Any) -> str:
        """Begin an episode. Rollouts of a row with `seed` play the same game, if it uses its own random numbers."""
        self.rewards, self.terminated, self.truncated, self._uncharged = [], False, False, None
        self.shown = checked(self.text.observation(*self.env.reset(seed=seed, options=options)), "observation")
        return ("\n" if row.get("prompt") else "") + checked(self.text.rules(), "rules") + self.shown

    def respond(self, rollout: Rollout, turn: Turn) -> Reply:
        """Take one step. Text without a valid action is answered with an error, and the game does not move.

        A turn that a token limit truncated is not a step: it gets no answer, and the conversation ends.
        """
        turn.calls, turn.results = [], []  # a game has no tools: what looks like a call is text
        self._uncharged = None
        if turn.finish_reason == "length":
            return Reply(reward=self.unfinished_reward or None, info={"action": None})
        last = self.most_turns is not None and len(rollout.turns) >= self.most_turns
        leaving = self.unfinished_reward if last else 0.0
        self._uncharged = None if last else turn
        try:
            action = self.text.action(said(turn))
        except ValueError as error:
            message = {"role": "user", "content": f"Error: {error}"}
            return Reply(messages=[message], reward=leaving or None, info={"action": None})
        observation, reward, self.terminated, self.truncated, info = self.env.step(action)
        self.terminated, self.truncated = flag(self.terminated, "terminated"), flag(self.truncated, "truncated")
        self.rewards.append(number_of_step(reward))
        self.shown = checked(self.text.observation(observation, info), "observation")
        over = self.terminated or self.truncated
        return Reply(
            messages=[] if over else [{"role": "user", "content": self.shown}],
            stop=over,
            reward=self.rewards[-1] + (0.0 if over else leaving),
            info={
                "action": plain(action),
                "terminated": self.terminated,
                "truncated": self.truncated,
                "gym": plain(info, strict=False),
            },
        )

    async def state_key(self) -> str:
        """The text of the current observation, as the state for `gigpo`."""
        return self.shown

    def get_reward(self) -> float:
        """The sum of the rewards, plus `unfinished_reward` if the conversation ended before the episode."""
        if self.terminated or self.truncated:
            return sum(self.rewards)
        if self._uncharged is not None and self.unfinished_reward:  # nothing more fitted behind this turn
            self._uncharged.reward = (self._uncharged.reward or 0.0) + self.unfinished_reward
            self._uncharged = None
        return sum(self.rewards) + self.unfinished_reward

    def close(self) -> None:
        """Close the game."""
        self.env.close()


def flag(value: Any, name: str) -> bool:
    """Validate a flag of a step (`terminated` or `truncated`). Raises `TypeError` unless it is a bool."""
    if value not in (True, False):
        raise TypeError(f"step returned {name}={value!r:.100}, expected True or False")
    return bool(value)


def number_of_step(reward: Any) -> float:
    """The reward of a step, which may be an array of one number. Raises `TypeError` unless it is finite.

    >>> number_of_step(0.5), number_of_step(gymnasium.spaces.Box(1.0, 1.0, (1,)).sample())
    (0.5, 1.0)
    """
    try:
        value = reward.item() if hasattr(reward, "item") else reward
    except (ValueError, RuntimeError):  # an array of several
        value = None
    if not is_number(value):
        raise TypeError(f"step gave the reward {reward!r:.100}, expected a finite number")
    return float(value)


def checked(text: Any, method: str) -> str:
    """Validate the return value of a `GymText` method. Raises `TypeError` unless it is text."""
    if not isinstance(text, str):
        raise TypeError(f"gym_text: {method} gave {type(text).__name__}, expected text")
    return text


def gym_environment(
    make: Callable[[], gymnasium.Env],
    name: str,
    text_class: type[GymText] = GymText,
    actions: Sequence[str] = (),
    unfinished_reward: float = 0.0,
    most_turns: int | None = None,
) -> type[GymEnvironment]:
    """The class of the environments of a game. Its return is logged as `rewards/<name>/mean`."""
    settings = {"text_class": text_class, "actions": tuple(actions)}
    limits = {"unfinished_reward": unfinished_reward, "most_turns": most_turns}
    return type(name, (GymEnvironment,), {"_make": staticmethod(make), **settings, **limits})


# -- what a recipe says --


def load_gym_conversation(script_args: Any, args: Any, base: type) -> tuple[type, type[GymEnvironment]]:
    """(class of conversations, class of environments) of a recipe. Raises `ValueError` for one that cannot work."""
    where = "environment: gym"
    check_tool_format(args.tool_format, where)
    if script_args.tools_script is not None:
        raise ValueError(f"tools_script has no effect with {where}: a turn is an action. Remove it.")
    check_unset(keys_that(args, "of_tools"), f"{where}: a turn is an action", args)
    return base, load_gym_environment(script_args, args)


def load_gym_environment(script_args: Any, args: Any) -> type[GymEnvironment]:
    """The class of a recipe's environments. It was made, reset and closed once. Raises `ValueError`."""
    if script_args.gym_env is None:
        raise ValueError("environment: gym without gym_env. Expected an id of gymnasium, or path.py:Class.")
    kwargs = read_kwargs(script_args.gym_kwargs)
    make = maker(script_args.gym_env, kwargs)
    text_class = load_class(script_args.gym_text, "gym_text") if script_args.gym_text else GymText
    if not issubclass(text_class, GymText):
        raise ValueError(
            f"gym_text: {script_args.gym_text!r} is no subclass of mt_grpo.integrations.gym.text.GymText."
        )
    name = script_args.gym_env.rpartition(":")[2].rpartition("/")[2]
    cls = gym_environment(
        make,
        name,
        text_class,
        script_args.gym_actions or (),
        script_args.gym_unfinished_reward,
        args.max_env_steps + 1,
    )
    check_game(cls, script_args.gym_env, args.environment_timeout)
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
    """A function that creates the game of an id, or of `path.py:Class`. Raises `ValueError` for another class."""
    if ".py:" not in reference:
        return lambda: gymnasium.make(reference, **copy.deepcopy(kwargs))  # a game may change what it gets
    cls = load_class(reference, "gym_env")
    if not issubclass(cls, gymnasium.Env):
        raise ValueError(f"gym_env: {reference!r} is {cls.__name__}, expected a subclass of gymnasium.Env.")
    return lambda: cls(**copy.deepcopy(kwargs))


def check_game(cls: type[GymEnvironment], reference: str, timeout: float) -> None:
    """Raise `ValueError` unless an episode can begin and take a step. Warn where the conversation is shorter.

    Args:
        cls: Of the episodes.
        reference: What the recipe says.
        timeout: Seconds of each method, as in training.
    """
    try:
        episode = in_time("__init__", cls, timeout)
        try:
            in_time("reset", lambda: episode.reset(seed=0), timeout)
            in_time("step", lambda: take_a_step(episode), timeout)
        except BaseException:
            with suppress(Exception):  # the first one is told
                in_time("close", episode.close, timeout)
            raise
        in_time("close", lambda: closed(episode), timeout)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the game raises, SystemExit with it
        why = error_line(error)
        raise ValueError(f"gym_env: {reference!r} cannot begin: {why}") from error
    longest = getattr(episode.env.spec, "max_episode_steps", None)
    if longest is not None and longest > cls.most_turns:
        logger.warning(
            "%s has up to %d steps, and the conversation %d turns. Set max_env_steps to %d to play it to its end.",
            reference,
            longest,
            cls.most_turns,
            longest - 1,
        )


def closed(episode: GymEnvironment) -> None:
    """Close an episode. Raises `RuntimeError` that says that this is what raised."""
    try:
        episode.close()
    except Exception as error:
        raise RuntimeError(f"close raised {error_line(error)}") from error


def in_time(method: str, function: Callable[[], Any], timeout: float) -> Any:
    """Call a game's method in a thread, as in training. Raises its errors, and `TimeoutError`."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:  # SystemExit with it, as itself
            outcome.append((None, error))

    try:
        run_async(run_tool(run, {}, timeout))
    except ToolTimeout:
        raise TimeoutError(
            f"{method} took longer than environment_timeout={timeout:g} s. Raise environment_timeout if it is slow"
        ) from None
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def take_a_step(episode: GymEnvironment) -> None:
    """Take one random action of a running episode. Raises `TypeError` if the policy could not write it."""
    space = episode.env.action_space
    space.seed(0)
    action = space.sample()
    own = type(episode.text).action is not GymText.action
    if not own and not episode.actions and not can_be_written(episode, action):
        raise TypeError(f"{action!r:.80} of {space} cannot be read from JSON. Give a gym_text with `action`")
    observation, reward, terminated, truncated, info = episode.env.step(action)
    number_of_step(reward), flag(terminated, "terminated"), flag(truncated, "truncated")
    checked(episode.text.observation(observation, info), "observation")


def can_be_written(episode: GymEnvironment, action: Any) -> bool:
    """Whether a policy can write this action of the game's space as text."""
    written = action if isinstance(action, str) else json.dumps(plain(action))
    try:
        return contains(episode.env.action_space, episode.text.action(f"{OPEN}{written}{CLOSE}"))
    except ValueError:
        return False
