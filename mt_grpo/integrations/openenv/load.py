"""A recipe's environment behind OpenEnv servers: they are asked what they are before a model is loaded."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from dataclasses import dataclass
from typing import Any

from mt_grpo.base.errors import sentence
from mt_grpo.base.event_loop import gather_all, run_async
from mt_grpo.base.fields import keys_that
from mt_grpo.conversation.environments import METHODS, check_environment
from mt_grpo.conversation.tools.signature import as_method
from mt_grpo.integrations.checks import check_tool_format, check_unset
from mt_grpo.integrations.openenv.environment import (
    SECONDS_BETWEEN_TRIES,
    ActingEnvironment,
    CallingEnvironment,
    OpenEnvEnvironment,
    arguments_of_reset,
    call_of,
)
from mt_grpo.integrations.openenv.server import (
    ActionRefused,
    Described,
    ErrorAnswer,
    NoRoom,
    OpenEnvFailure,
    OpenEnvServer,
    OpenEnvSession,
    StepRaised,
    on_openenv_loop,
)
from mt_grpo.integrations.openenv.text import OpenEnvText, takes_calls
from mt_grpo.recipe.plugins import load_class

logger = logging.getLogger(__name__)
WHERE = "environment: openenv"


def load_openenv_conversation(script_args: Any, args: Any, base: type) -> tuple[type, type[OpenEnvEnvironment]]:
    """(class of conversations, class of environments) of a recipe. Raises `ValueError` for one that cannot work."""
    cls = load_openenv_environment(script_args, args)
    if issubclass(cls, ActingEnvironment):
        where = f"{WHERE} where the server lists no tools: a turn is an action"
        check_tool_format(args.tool_format, where)
        if script_args.tools_script is not None:
            raise ValueError(f"tools_script has no effect with {where}. Remove it.")
        check_unset(keys_that(args, "of_tools"), where, args)
    return base, cls


def load_openenv_environment(script_args: Any, args: Any) -> type[OpenEnvEnvironment]:
    """The class of a recipe's environments. Its servers were asked what they are. Raises `ValueError`."""
    urls = script_args.openenv_url or []
    urls = [urls] if isinstance(urls, str) else urls
    if not urls:
        raise ValueError(f"{WHERE} needs openenv_url. Set it to the address of a server: http://127.0.0.1:8000.")
    headers = headers_of(mapping(script_args.openenv_headers, "openenv_headers"))
    defaults = mapping(script_args.openenv_reset, "openenv_reset")
    try:
        arguments_of_reset(defaults)
    except ValueError as error:
        raise ValueError(f"openenv_reset: {error}") from None
    text_class = load_class(script_args.openenv_text, "openenv_text") if script_args.openenv_text else OpenEnvText
    if not issubclass(text_class, OpenEnvText):
        raise ValueError(
            f"openenv_text: {script_args.openenv_text!r} is not a subclass of `openenv.text.OpenEnvText`."
        )
    try:
        servers = [OpenEnvServer(url, headers) for url in urls]
    except ValueError as error:
        raise ValueError(f"openenv_url: {error}") from None
    if twice := [server.url for k, server in enumerate(servers) if server.url in [each.url for each in servers[:k]]]:
        raise ValueError(f"openenv_url lists {twice[0]} twice. Remove one.")
    conversations = max(1, args.generation_batch_size // max(1, args.world_size))
    most = script_args.openenv_sessions
    if most is None:
        found = ask_for_places(servers, conversations, args.environment_timeout)
    else:
        found = ask_servers(servers, most, args.environment_timeout)
    check_same(found)
    for server, each in zip(servers, found):
        server.places = each.places
    places = sum(each.places for each in found)
    if places < min(conversations, conversations if most is None else most * len(servers)):
        logger.warning(few_sessions(found, conversations))
    settings = {
        "servers": tuple(servers),
        "reset_arguments": defaults,
        "most_turns": args.max_env_steps + 1,
        "unfinished_reward": script_args.openenv_unfinished_reward,
        "most_conversations": places,
        "seconds_for_a_session": args.environment_timeout / 2,
        "text": text_of(text_class, found[0].described, script_args.openenv_images),
    }
    return environment_of(found[0], settings)


def environment_of(found: Asked, settings: dict[str, Any]) -> type[OpenEnvEnvironment]:
    """The class of environments: with a method for each tool of the server, or one whose turns are actions.

    Its return is logged as `rewards/<name of the server's environment>/mean`. Raises `ValueError`.
    """
    url, name = found.url, found.described.name
    if found.tools is None:
        return type(name, (ActingEnvironment,), settings)
    methods = {}
    for tool in found.tools:
        tool_name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(tool_name, str) or not tool_name:
            raise ValueError(
                f"openenv_url: {url} lists the tool {json.dumps(tool)[:100]}, which has no name. No model could "
                "call it."
            )
        if tool_name in methods:
            raise ValueError(f"openenv_url: {url} lists two tools {tool_name!r}. The model could not tell them apart.")
        if hasattr(CallingEnvironment(), tool_name) or tool_name in METHODS or tool_name.startswith("_"):
            raise ValueError(
                f"openenv_url: {url} lists a tool {tool_name!r}, a name that the trainer reserves. Rename the tool "
                "on the server."
            )
        schema = tool.get("input_schema", tool.get("inputSchema")) or {}
        if not schema:
            logger.warning(f"{url} lists the tool {tool_name!r} without a schema. The model sees no arguments.")
        described = {
            "name": tool_name,
            "description": tool.get("description") or f"{tool_name} of {name}.",
            "parameters": {"type": "object", "properties": {}, **schema} if isinstance(schema, dict) else schema,
        }
        try:
            methods[tool_name] = as_method(tool_name, described, call_of)
        except ValueError as error:
            raise ValueError(f"openenv_url: {url}: {error}") from None
    cls = type(name, (CallingEnvironment,), {**methods, **settings})
    check_environment(cls, f"openenv_url: {url}")
    return cls


def text_of(text_class: type[OpenEnvText], described: Described, images: bool) -> OpenEnvText:
    """Create the `OpenEnvText` of a recipe. Raises `ValueError` if the user's class raises."""
    try:
        return text_class(described.action, images)
    except Exception as error:
        raise ValueError(f"openenv_text: {text_class.__name__} cannot be created: {error}") from error


def mapping(given: dict[str, Any] | str | None, key: str) -> dict[str, Any]:
    """Read a key's mapping, which may be JSON text. Raises `ValueError`."""
    try:
        found = json.loads(given) if isinstance(given, str) else given or {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}={given!r:.200} is not JSON ({error}). Expected a mapping.") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{key}={given!r:.200} is {type(found).__name__}, expected a mapping of names.")
    return found


def headers_of(given: dict[str, Any]) -> dict[str, str]:
    """Fill in the environment variables of headers. Raises `ValueError` for one that is not set."""

    def value(found: re.Match) -> str:
        if found[1] not in os.environ:
            raise ValueError(f"openenv_headers uses ${found[1]}, which is not set. Set this environment variable.")
        return os.environ[found[1]]

    return {name: re.sub(r"\$([A-Za-z_]\w*)", value, str(text)) for name, text in given.items()}


# What servers say of themselves.


@dataclass(frozen=True)
class Asked:
    """What came of asking one server.

    Attributes:
        url: Its address.
        described: What it says of itself.
        tools: Those that it lists; None for one whose actions are no calls.
        places: Sessions that it opened at the same time.
        most: How many sessions it says that it has, None where it refused none.
    """

    url: str
    described: Described
    tools: list[Any] | None
    places: int
    most: int | None


def ask_servers(servers: list[OpenEnvServer], most: int, timeout: float) -> list[Asked]:
    """Ask servers what they are, all at the same time. Raises `ValueError`.

    Args:
        servers: They open up to `most` sessions each, which are closed again.
        most: At least 1.
        timeout: Seconds that this may take, half of them until a session is free.
    """

    async def ask_all() -> list[Asked]:
        async with asyncio.timeout(timeout):
            return await gather_all([ask_server(server, most, timeout / 2) for server in servers])

    urls = ", ".join(server.url for server in servers)
    try:
        return run_async(on_openenv_loop(ask_all()))
    except TimeoutError:
        raise ValueError(
            f"openenv_url: {urls} did not answer within environment_timeout={timeout:g} s. Raise environment_timeout "
            "if it is slow to start sessions, or lower openenv_sessions."
        ) from None
    except OpenEnvFailure as error:
        raise ValueError(f"openenv_url: {sentence(error)}") from error


def ask_for_places(servers: list[OpenEnvServer], conversations: int, timeout: float) -> list[Asked]:
    """Ask servers what they are, and for a place for each conversation. Raises `ValueError`.

    Servers that had as many as they were asked for are asked for those that others have not.
    """
    most = -(-conversations // len(servers))
    found = ask_servers(servers, most, timeout)
    while (lacking := conversations - sum(each.places for each in found)) > 0:
        roomy = [server for server, each in zip(servers, found) if each.places == most]
        if not roomy:
            break
        most += -(-lacking // len(roomy))
        again = dict(zip(roomy, ask_servers(roomy, most, timeout)))
        found = [again.get(server, each) for server, each in zip(servers, found)]
    return found


async def ask_server(server: OpenEnvServer, most: int, seconds: float) -> Asked:
    """Ask one server for its description, tools and sessions. Raises `OpenEnvFailure`."""
    described = await server.describe()
    sessions: list[OpenEnvSession] = []
    try:
        sessions.append(await first_session(server, seconds))
        tools = await listed(sessions[0], described) if takes_calls(described.action) else None
        # A failure to start beside others is a limit, as of memory: the run has the sessions that there are.
        outcomes = await asyncio.gather(*[one_more(server, sessions) for _ in range(most - 1)], return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, BaseException)]
        if failed := [each for each in refused if not isinstance(each, OpenEnvFailure)]:
            raise failed[0]
        said = [each.most for each in refused if isinstance(each, NoRoom) and each.most is not None]
        return Asked(server.url, described, tools, most - len(refused), min(said, default=None))
    finally:
        await asyncio.gather(*[session.close() for session in list(sessions)])


async def first_session(server: OpenEnvServer, seconds: float) -> OpenEnvSession:
    """A session that has answered. Raises `OpenEnvFailure`, also where none was free for so many seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        sessions: list[OpenEnvSession] = []
        try:
            await one_more(server, sessions)
            return sessions[0]
        except NoRoom as full:
            await sessions[0].close()
            if loop.time() > deadline:
                raise OpenEnvFailure(
                    f"{full}. None was free for {seconds:g} s, so other runs may hold them. End those, start the "
                    "server with a larger max_concurrent_envs, or set another address"
                ) from full
            await asyncio.sleep(SECONDS_BETWEEN_TRIES)


async def one_more(server: OpenEnvServer, sessions: list[OpenEnvSession]) -> None:
    """Open a session, put it into the list, and have it answer. Raises `OpenEnvFailure` where it does not begin."""
    session = await server.open()
    sessions.append(session)
    try:
        await session.state()
    except ErrorAnswer as error:  # some have a state behind `reset` alone
        if error.code != "EXECUTION_ERROR":
            raise


async def listed(session: OpenEnvSession, described: Described) -> list[Any]:
    """The tools that a server lists. Raises `OpenEnvFailure` where it lists none: then there is no way to act."""
    try:
        step = await session.step({"type": "list_tools"})
    except (ActionRefused, StepRaised) as error:
        raise OpenEnvFailure(
            f"{session.server.url} supports neither the action list_tools ({error}) nor actions with other "
            f"fields, so {described.name} is not supported"
        ) from error
    tools = step.observation.get("tools")
    if not isinstance(tools, list) or not tools:
        raise OpenEnvFailure(
            f"{session.server.url} lists no tools, but its actions are tool calls: list_tools returned "
            f"{json.dumps(step.observation)[:200]}. See its log"
        )
    return tools


def check_same(found: list[Asked]) -> None:
    """Raise `ValueError` unless all servers have the same actions."""
    first = found[0]
    for other in found[1:]:
        if (other.described.action, other.tools) != (first.described.action, first.tools):
            raise ValueError(
                f"openenv_url: {first.url} ({first.described.name}) and {other.url} ({other.described.name}) take "
                "different actions. Expected servers of the same environment."
            )


def few_sessions(found: list[Asked], conversations: int) -> str:
    """The warning if servers have fewer sessions than conversations, with what to do."""
    places = sum(each.places for each in found)
    said = ", ".join(f"{each.url} opened {each.places}" for each in found)
    one = (
        " Its environment must support it (SUPPORTS_CONCURRENT_SESSIONS)."
        if any(each.most == 1 for each in found)
        else ""
    )
    return (
        f"The OpenEnv server has fewer sessions than a step has conversations: {said}, for {conversations} of them. "
        f"Only {places} run at a time, and the others wait. Start it with max_concurrent_envs={conversations}."
        f"{one} Or start several servers, and list their addresses in openenv_url."
    )
