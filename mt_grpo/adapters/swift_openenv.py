"""ms-swift's scheduler for environments behind an OpenEnv server. What blocks runs in threads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from mt_grpo.adapters.swift_gym import GYMScheduler
from mt_grpo.adapters.swift_loop import called


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
