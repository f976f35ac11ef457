"""`environment: openenv`: a session of an OpenEnv server (0.2 and later) is the environment of one conversation."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from contextlib import suppress
from typing import Any

import aiohttp

from mt_grpo.base.errors import error_line, tell_once
from mt_grpo.base.event_loop import run_async, run_on_thread
from mt_grpo.base.ranks import on_main_process
from mt_grpo.conversation.environments import EnvironmentFailure, is_number
from mt_grpo.conversation.tools.running import as_text
from mt_grpo.integrations.acting import as_method, said, tagged
from mt_grpo.integrations.checks import check_tool_format
from mt_grpo.rollout import Reply, Rollout, ToolResult, Turn

LOOP = "mt-grpo-openenv"  # the thread of all sessions: a server may send megabytes of JSON


class ActionRefused(ValueError):
    """The server did not take an action, or its environment raised. The policy reads why."""


class OpenEnvSession:
    """An episode over a WebSocket, which opens with the first request. After its end `failure` says why it ended.

    INVARIANT: a request that its caller gave up ends the session. Otherwise its answer would be read as that of the
    next request. There is never a second connection: it would be another episode.
    """

    def __init__(self, url: str):
        self.url, self.done, self.failure, self._client, self._socket = url, False, None, None, None
        self.rewards, self._of_turn = [], []  # one per step, None if the server sent no number; numbers of the turn
        self._order = asyncio.Lock()  # a request waits for the answer to the one before it

    async def ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        """The observation of a `reset` or `step`, or a `state`. Raises `ActionRefused` or `EnvironmentFailure`."""
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except (ValueError, RecursionError):  # the server would close the session, and no policy may end its rollout
            raise ActionRefused("the action is nested too deeply, or has half of a character") from None
        async with self._order:
            if kind == "step" and self.done:
                raise ActionRefused("the episode is over: this step was not taken")
            if self.failure is not None:
                raise self.failure
            try:
                return await self._ask(kind, {"type": kind} if data is None else {"type": kind, "data": data})
            except ActionRefused:
                raise
            except BaseException as error:
                why = error_line(error) if isinstance(error, Exception) else "CancelledError: its time is over"
                await self.close(f"{kind} of {self.url} failed ({why})")
                if isinstance(error, Exception):
                    raise self.failure from error
                raise

    async def _ask(self, kind: str, request: dict[str, Any]) -> dict[str, Any]:
        if self._socket is None:  # without time limits: the caller has one
            self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
            close = aiohttp.ClientWSTimeout(ws_close=1.0)
            self._socket = await self._client.ws_connect(f"{self.url}/ws", max_msg_size=100 * 2**20, timeout=close)
        await self._socket.send_json(request)
        data = (answer := await self._socket.receive_json())["data"]
        if answer["type"] == "error":
            errors = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in data.get("errors") or []]
            words, code = "; ".join(errors) or data["message"], data["code"]
            if code == "EXECUTION_ERROR":  # perhaps at every action
                tell_once(f"{kind} of {self.url} raised on the server: {words}", about=f"{self.url} {kind}")
            known = kind != "reset" and code in ("VALIDATION_ERROR", "EXECUTION_ERROR")
            raise ActionRefused(words) if known else EnvironmentFailure(f"{code}: {words}")
        if kind == "state":
            return data
        observation, reward, done = data["observation"], data.get("reward"), data.get("done", False)
        fits = isinstance(observation, dict) and (reward is None or is_number(reward)) and isinstance(done, bool)
        if not fits or (done and kind == "reset"):
            raise ValueError(f"the answer is {data!r:.200}, expected an object, a finite number or null, and a bool")
        self.done = done
        if kind == "step":
            self.rewards.append(None if reward is None else float(reward))
            self._of_turn += [] if reward is None else [float(reward)]
        return observation

    async def turn_reward(self) -> float | None:
        """The sum of the rewards since the last call, None without one. Raises the failure that ended the session."""
        async with self._order:  # behind the requests in flight
            if self.failure is not None:
                raise self.failure
            rewards, self._of_turn = self._of_turn, []
            return sum(rewards) if rewards else None

    async def close(self, why: str = "the session is over") -> None:
        """End the session, so that its place on the server becomes free. It may be called again."""
        self.failure = self.failure or EnvironmentFailure(why)
        client, self._client = self._client, None
        if client is not None:
            await (self._socket or client).close()
            await client.close()


class OpenEnvEnvironment:
    """One episode. Tools of the server are methods of the class. Without any, the text of a turn is an action."""

    servers: Any  # iterates over addresses: each conversation takes the next one
    keyword_columns = ("reset_kwargs",)
    rules: str | None = None  # of actions; None: the server has tools
    field: str | None = None  # the only text that an action needs; None: a turn writes JSON

    def __init__(self):
        self.session, self._shown = OpenEnvSession(""), ""
        self.state: dict[str, Any] | None = None  # the server's, at the end of the conversation, for reward functions

    step_rewards = property(lambda self: self.session.rewards)
    episode_done = property(lambda self: self.session.done)

    async def reset(self, reset_kwargs: dict | None = None, **row: Any) -> str:
        """Begin an episode with the row's arguments. If a server is full, wait."""
        given = (reset_kwargs or {}) | {key: row[key] for key in ("seed", "episode_id") if row.get(key) is not None}
        while True:
            self.session = OpenEnvSession(next(self.servers))
            try:
                self._shown = shown(await run_on_thread(self.session.ask("reset", given), LOOP))
                break
            except EnvironmentFailure as error:
                if "CAPACITY_REACHED" not in str(error):
                    raise
                await asyncio.sleep(0.2)  # others have taken the places that were counted
        text = (self.rules or "") + self._shown
        return "\n" * bool(text and row.get("prompt")) + text

    async def respond(self, rollout: Rollout, turn: Turn) -> Reply:
        """Take one step, or add up the rewards of the turn's calls. A truncated turn is no step, and the last one."""
        reply = Reply(info={"action": None})
        if self.rules is not None:
            turn.calls, turn.results, turn.state_key = [], [], self._shown  # what looks like a call is text
            if turn.finish_reason == "length":
                return reply
            try:
                action = {self.field: said(turn)} if self.field is not None else json.loads(tagged(said(turn)))
                observation = await run_on_thread(self.session.ask("step", action), LOOP)
            except (ValueError, RecursionError) as error:  # nothing moves, and the policy reads why
                content = f"Error: {error}" + (f"\n{self.rules.strip()}" if self.rules else "")
                return Reply([{"role": "user", "content": content}], info={"action": None})
            self._shown, reply.info = shown(observation), {"action": action, "observation": observation}
            reply.messages = [] if self.episode_done else [{"role": "user", "content": self._shown or "{}"}]
        reply.reward, reply.stop = await run_on_thread(self.session.turn_reward(), LOOP), self.episode_done
        return reply

    async def _call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        action = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        answer = await run_on_thread(self.session.ask("step", action), LOOP)
        result, error = answer.get("result", shown(answer)), answer.get("error")
        if isinstance(result, dict) and isinstance(result.get("content"), list):  # as MCP has it
            parts = [(each["type"], each.get("text")) for each in result["content"]]
            text = "\n".join(f"[{kind}: not shown]" if words is None else words for kind, words in parts)
            text = text if parts else as_text(result.get("structured_content"))
            result, error = text, error or (result.get("is_error") and text)
        if error:
            raise ActionRefused(error["message"] if isinstance(error, dict) else error)
        return ToolResult(as_text(result))

    async def get_reward(self) -> float:
        """The sum of the steps' rewards."""
        with suppress(ActionRefused):
            self.state = await run_on_thread(self.session.ask("state"), LOOP)
        return sum(reward for reward in self.step_rewards if reward is not None)

    async def close(self) -> None:
        """End the session."""
        await run_on_thread(self.session.close(), LOOP)

    conversation_over = close  # another conversation may wait for its place


def shown(observation: dict[str, Any]) -> str:
    """The text of an observation: its only text, otherwise JSON. Image data is left out.

    >>> shown({"text": "Won.", "metadata": {}}), shown({"board": [1], "winner": None}), shown({"metadata": {}})
    ('Won.', '{"board": [1]}', '')
    """
    kept = {key: each for key, each in observation.items() if each is not None and (key, each) != ("metadata", {})}
    first = next(iter(kept.values()), "")
    text = first if len(kept) < 2 and isinstance(first, str) else as_text(kept)
    return re.sub(r"data:image/[\w.+-]+;base64,[A-Za-z0-9+/=]+", "[image: not shown]", text)


async def ask(url: str, seconds: float) -> tuple[str, dict[str, Any], list[dict] | None]:
    """(name, schema of actions, tools or None) of a server. Raises `ValueError` if it is not there."""
    session = OpenEnvSession(url)
    try:
        async with asyncio.timeout(seconds), aiohttp.ClientSession(raise_for_status=True) as client:
            action, about = [await (await client.get(url + page)).json() for page in ("/schema", "/metadata")]
            action = {key: each for key, each in action["action"].items() if key not in ("title", "description")}
            action["properties"].pop("metadata", None)
            if action["properties"] and not {"tool_name", "arguments"} <= action["properties"].keys():
                return about["name"], action, None
            return about["name"], action, (await session.ask("step", {"type": "list_tools"}))["tools"]
    except Exception as error:
        why = f"does not answer as an OpenEnv server of 0.2 or later ({error_line(error)})"
        raise ValueError(f"openenv_url: {url} {why}.") from error
    finally:
        await session.close()


async def num_places(urls: tuple[str, ...], most: int) -> int:
    """How many of `most` sessions the servers open at the same time."""
    sessions = [OpenEnvSession(url) for url, _ in zip(itertools.cycle(urls), range(most))]
    asked = await asyncio.gather(*[each.ask("state") for each in sessions], return_exceptions=True)
    await asyncio.gather(*[each.close() for each in sessions])
    return sum(not isinstance(each, EnvironmentFailure) for each in asked)


def load_openenv_conversation(script_args: Any, args: Any, base: type) -> tuple[type, type[OpenEnvEnvironment]]:
    """(`base`, the class of a recipe's environments, with a method for each tool). Raises `ValueError`."""
    urls = script_args.openenv_url or "http://127.0.0.1:8000"
    urls = tuple(url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls))

    def probe() -> Any:
        try:
            answers = [run_async(run_on_thread(ask(url, args.environment_timeout), LOOP)) for url in urls]
            return answers, run_async(run_on_thread(num_places(urls, args.generation_batch_size), LOOP))
        except ValueError as error:
            return error

    if isinstance(probed := on_main_process(probe), ValueError):  # all ranks at once would take each other's places
        raise probed
    found, places = probed
    if different := [url for url, each in zip(urls, found) if each != found[0]]:
        raise ValueError(f"openenv_url: {different[0]} has other actions or tools than {urls[0]}.")
    name, action, tools = found[0]
    settings = {"servers": itertools.cycle(urls), "most_conversations": max(1, places // args.world_size)}
    if places < args.generation_batch_size:
        tell_once(f"OpenEnv: {places} sessions for a step: others wait. Raise the server's max_concurrent_envs.")
    if tools is None:
        check_tool_format(args.tool_format, "environment: openenv if the server has no tools")
        if script_args.tools_script is not None:
            raise ValueError("tools_script: the OpenEnv server has no tools, so each turn is an action. Remove it.")
        fields = action["properties"]
        needed = list(fields) if len(fields) == 1 else action.get("required", [])
        is_text = len(needed) == 1 and fields[needed[0]].get("type") == "string" and "enum" not in fields[needed[0]]
        settings["field"] = needed[0] if is_text else None
        settings["rules"] = "" if is_text else f"Answer with <action>...</action>: JSON of {json.dumps(action)}.\n"
    for tool in tools or []:
        parameters = {"type": "object", "properties": {}, **(tool.get("input_schema") or {})}
        schema = {"description": tool.get("description") or tool["name"], "parameters": parameters}
        settings[tool["name"]] = as_method(tool["name"], schema, OpenEnvEnvironment._call)
    return base, type(re.sub(r"\W+", "_", name), (OpenEnvEnvironment,), settings)
