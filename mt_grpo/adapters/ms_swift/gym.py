"""ms-swift's environments, the context managers of 3.7, and the scheduler that plays them."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from typing import Any

from mt_grpo.adapters.ms_swift.loop import called
from mt_grpo.adapters.ms_swift.rewards import MathAccuracy
from mt_grpo.adapters.ms_swift.schedulers import NEW_TURN_TIP, MultiTurnScheduler


class Env:
    """An environment of `gym_scheduler`, one per conversation, registered in `envs`."""

    def __init__(self, env_config: dict[str, Any]):
        self.env_config = env_config

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        """(the first observation, information, the system message), for a `RolloutInferRequest`."""
        raise NotImplementedError

    async def step(self, action: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        """(the next observation, the reward, whether it is over, information), for all messages so far."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give back what it holds."""


class SimpleMathEnv(Env):
    """`math_env`: asks the row's `problem` until the answer equals its `solution`, which pays 1.

    `env_config` may have a `system_message`.
    """

    def __init__(self, env_config: dict[str, Any]):
        super().__init__(env_config)
        self.acc_func = MathAccuracy()

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        """The problem."""
        self.solution = config.data_dict["solution"]
        system = (
            "Solve the problem. Write <think>, how you found it, </think>, and then <answer>, the answer, </answer>."
        )
        return config.data_dict["problem"], {}, self.env_config.get("system_message", system)

    async def step(self, action: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        """The tip of `math_tip_trick_multi_turn` after a wrong answer."""
        right = self.acc_func([action[-1]["content"]], [self.solution])[0] == 1
        return NEW_TURN_TIP, float(right), right, {"math_reward": float(right)}


envs: dict[str, type] = {"math_env": SimpleMathEnv}


class ContextManager:
    """Edits the messages that the model reads next."""

    def __init__(self, ctx_config: dict[str, Any]):
        self.ctx_config = ctx_config

    def manage_context(self, history: list[dict[str, Any]], trajectory_id: str) -> list[dict[str, Any]]:
        """The messages in place of `history`, of the conversation with this id."""
        raise NotImplementedError


class DummyContextManager(ContextManager):
    """Edits nothing."""

    def manage_context(self, history: list[dict[str, Any]], trajectory_id: str) -> list[dict[str, Any]]:
        """The messages as they are."""
        return history


context_managers: dict[str, type] = {"dummyContextManager": DummyContextManager}


def registered(registry: dict[str, type], name: str | None, key: str) -> type:
    """The class of this name. Raises `ValueError`."""
    if name not in registry:
        raise ValueError(f"{key}: {name!r} is not registered. Expected one of: {', '.join(registry) or 'none is'}.")
    return registry[name]


class GYMScheduler(MultiTurnScheduler):
    """`gym_scheduler`: an `Env` per conversation; `rollout_infos` has `total_reward` and `step_rewards`.

    The environment is named by the row's `env_config: {name: ...}`, else by the recipe's `gym_env`; a context manager
    by the row's `ctx_config`, else by `context_manager`. It edits what the model reads before each turn.
    """

    def __init__(self, *args: Any, gym_env: str | None = None, context_manager: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.gym_env_name, self.context_manager_name = gym_env, context_manager
        self._contexts: dict[str, ContextManager] = {}  # by uuid
        self._envs: dict[str, Any] = {}  # by uuid
        self._step_rewards: dict[str, list[float]] = {}
        self._total_rewards: dict[str, float] = {}
        self._pending_obs: dict[str, str | None] = {}

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return registered(envs, env_config.get("name") or self.gym_env_name, "gym_env")(env_config)

    def _create_context_manager(self, ctx_config: dict[str, Any]) -> ContextManager:
        name = ctx_config.get("name") or self.context_manager_name or "dummyContextManager"
        return registered(context_managers, name, "context_manager")(ctx_config)

    async def on_trajectory_start(self, requests: list) -> None:
        """Make and reset an environment for each request, whose messages become its observation."""
        await asyncio.gather(*map(self._begin, requests))

    async def _begin(self, request: Any) -> None:
        uuid, row = request.uuid, request.data_dict or {}
        self._contexts[uuid] = self._create_context_manager(row.get("ctx_config") or {})
        self._step_rewards[uuid], self._total_rewards[uuid] = [], 0.0
        observation, system = await self._open(request, row)
        request.messages = self._contexts[uuid].manage_context(self._messages(observation, system), uuid)

    async def _open(self, request: Any, row: dict[str, Any]) -> tuple[str, str | None]:
        env = self._create_env(row.get("env_config") or {})
        env = await env if inspect.isawaitable(env) else env  # async in 3.8
        self._envs[request.uuid] = env
        observation, _, system = await env.reset(request)
        return observation, system

    def _messages(self, observation: str, system: str | None) -> list[dict[str, Any]]:
        first = [{"role": "system", "content": system}] if system else []
        return [*first, {"role": "user", "content": observation}]

    async def _act(self, env: Any, request: Any, choice: Any) -> tuple[str, float, bool]:
        observation, reward, done, _ = await env.step(copy.deepcopy(request.messages))
        return observation, float(reward), bool(done)

    async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """One step of the environment."""
        uuid = infer_request.uuid
        observation, reward, done = await self._act(self._envs[uuid], infer_request, response_choice)
        self._step_rewards[uuid].append(reward)
        self._total_rewards[uuid] += reward
        self._pending_obs[uuid] = observation
        infos = {"total_reward": self._total_rewards[uuid], "step_rewards": list(self._step_rewards[uuid])}
        return {"done": done, "rollout_infos": {**infos, "gym_done": done}}

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        """The observation as the user's next message."""
        uuid = infer_request.uuid
        infer_request.messages.append({"role": "user", "content": self._pending_obs.pop(uuid)})
        if uuid in self._contexts:  # a plug-in's own on_trajectory_start makes none
            infer_request.messages = self._contexts[uuid].manage_context(infer_request.messages, uuid)
        return {"infer_request": infer_request}

    async def _close_and_remove(self, uuid: str) -> None:
        """Close the environment of a conversation that is over, however it ended."""
        env = self._envs.pop(uuid, None)
        for held in (self._step_rewards, self._total_rewards, self._pending_obs, self._contexts):
            held.pop(uuid, None)
        if env is not None:
            await self._close(env)

    async def _close(self, env: Any) -> None:
        await env.close()


# ms-swift's scheduler for environments behind an OpenEnv server. What blocks runs in threads.


class OpenEnvWrapper:
    """One session of an OpenEnv server, by OpenEnv's own client. `env_config` has `base_url` and `reset_kwargs`.

    INVARIANT: a step is never sent again. A server has one game per connection, so that a step behind a new connection
    would be played in another game.
    """

    def __init__(self, env_config: dict[str, Any]):
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ImportError as error:
            raise ImportError(
                f"openenv_scheduler needs OpenEnv's client ({error}). Run `pip install openenv-core>=0.3`."
            ) from None
        self.reset_kwargs = env_config.get("reset_kwargs") or {}
        self._client = GenericEnvClient(base_url=env_config.get("base_url") or "http://localhost:8000").sync()

    def reset(self) -> tuple[Any, Any]:
        """(the observation, metadata)."""
        result = self._client.reset(**self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def step(self, action: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        """(the observation, the reward, whether it is over, metadata). No reward counts as 0."""
        result = self._client.step(action)
        return result.observation, float(result.reward or 0.0), bool(result.done), getattr(result, "metadata", None)

    def close(self) -> None:
        """End the session."""
        self._client.close()


class OpenEnvScheduler(GYMScheduler):
    """`openenv_scheduler`: a session of an OpenEnv server per conversation, of the row's `env_config`.

    Attributes:
        env_config_defaults: What a row's `env_config` does not say: `base_url`, `reset_kwargs`, `system_message`.
        max_concurrent_envs: Sessions that are opened at a time.
    """

    env_config_defaults: dict[str, Any] = {}
    max_concurrent_envs = 4
    keyword_columns = ("env_config",)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._opening: asyncio.Semaphore | None = None  # made when a subclass has set `max_concurrent_envs`

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return OpenEnvWrapper(env_config)

    async def _open(self, request: Any, row: dict[str, Any]) -> tuple[str, str | None]:
        env_config = {**self.env_config_defaults, **(row.get("env_config") or {})}
        self._opening = self._opening or asyncio.Semaphore(self.max_concurrent_envs)
        async with self._opening:
            observation = await called(self._begin_session, request.uuid, env_config)
        return self.format_observation(observation), env_config.get("system_message")

    def _begin_session(self, uuid: str, env_config: dict[str, Any]) -> Any:
        env = self._envs[uuid] = self._create_env(env_config)
        try:
            return env.reset()[0]
        finally:
            if uuid not in self._contexts:  # its conversation was given up meanwhile, and nobody else closes it
                self._envs.pop(uuid, None)
                env.close()

    async def _act(self, env: Any, request: Any, choice: Any) -> tuple[str, float, bool]:
        action = self.parse_action(choice.message.content)
        observation, reward, done, _ = await called(env.step, action)
        return self.format_observation(observation), float(reward), bool(done)

    async def _close(self, env: Any) -> None:
        await called(env.close)

    def parse_action(self, text: str) -> dict[str, Any]:
        """The action of a response: its JSON, in a code fence or without; else `{"message": text}`.

        >>> scheduler = OpenEnvScheduler()
        >>> scheduler.parse_action('```json\\n{"answer": 7}\\n```'), scheduler.parse_action(" 7 "), (
        ...     scheduler.parse_action("seven"))
        ({'answer': 7}, {'message': '7'}, {'message': 'seven'})
        """
        text = text.strip()
        lines = text.splitlines()
        if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].strip().startswith("```"):
            text = "\n".join(lines[1:-1]).strip()
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return {"message": text}
        return parsed if isinstance(parsed, dict) else {"message": str(parsed)}

    def format_observation(self, observation: Any) -> str:
        """An observation as text: its JSON.

        >>> OpenEnvScheduler().format_observation({"question": "6 · 7?"})
        '{"question": "6 · 7?"}'
        """
        return json.dumps(observation, ensure_ascii=False, default=str)
