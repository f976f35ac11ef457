"""From a class to one environment per conversation: its tools, and its methods within their time."""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mt_grpo.replies import Clean, EnvironmentFailure, as_written, is_number, joined
from mt_grpo.rollout import Message, Rollout, ToolCall, join
from mt_grpo.rows import DataRow, with_own_keys
from mt_grpo.tool_results import error_text
from mt_grpo.tool_threads import ToolsUnavailable, ToolTimeout, run_tool
from mt_grpo.tools import check_tool, named_tools

# Methods of the protocol, which are no tools -> how many arguments the trainer passes, None for a dataset row.
METHODS = {"reset": None, "respond": 2, "get_reward": 0, "close": 0, "state_key": 0}


def tool_methods(cls: type) -> list[str]:
    """The names of a class's tools: its public methods, looked up on the class as in TRL."""
    names = (name for name, _ in inspect.getmembers(cls, inspect.isfunction))
    return [name for name in names if not name.startswith("_") and name not in METHODS]


def class_tools(cls: type) -> dict[str, Callable]:
    """A class's tools by name, as an instance would have them: for their descriptions, not to be called."""
    return {name: types.MethodType(getattr(cls, name), cls) for name in tool_methods(cls)}


def check_environment(cls: Any, where: str) -> None:
    """Raise `ValueError` unless a class can be one side of a conversation. It is not instantiated."""
    if not isinstance(cls, type):
        raise ValueError(f"{where} is {cls!r}, expected a class, or a dict of classes.")
    if not callable(getattr(cls, "reset", None)):
        raise ValueError(f"{where}: {cls.__name__} has no method reset(self, **row), which begins a conversation.")
    for name, count in METHODS.items():
        method = getattr(cls, name, None)
        if method is None or count is None:
            continue
        try:
            inspect.signature(types.MethodType(method, cls)).bind(*[None] * count)
        except TypeError as error:
            takes = ", ".join(("self", "rollout", "turn")[: count + 1])
            raise ValueError(
                f"{where}: {cls.__name__}.{name}{inspect.signature(method)} clashes with the trainer's method "
                f"{name}({takes}): {error}. Give the tool another name, such as {name}_it."
            ) from None
    for tool in class_tools(cls).values():
        check_tool(tool)
    if isinstance(getattr(cls, "tools", None), (list, tuple)):  # else they are an instance's, or a tool of this name
        merged(cls.__name__, class_tools(cls).values(), named_tools(cls.tools).values())


def tools_of(environment: Any, others: dict[str, Callable]) -> dict[str, Callable]:
    """The tools of a conversation: the others, an instance's public methods, and those in its list `tools`.

    `tool_selection` of an instance, a list of names, says which of them this conversation has; None: all. Raises
    `ValueError` for two of one name, and for an unknown one in the selection.
    """
    methods = [getattr(environment, name) for name in tool_methods(type(environment))]
    listed = getattr(environment, "tools", [])
    # Checked here, as they may be an instance's own; the others were, once: it takes milliseconds.
    listed = named_tools([] if callable(listed) else listed).values()
    tools = merged(type(environment).__name__, others.values(), methods, listed)
    selection = getattr(environment, "tool_selection", None)
    return tools if selection is None else selected(tools, selection)


def selected(tools: dict[str, Callable], names: list[str]) -> dict[str, Callable]:
    """The tools of these names. Raises `ValueError` for a name that none has."""
    if unknown := [name for name in names if name not in tools]:
        raise ValueError(f"The row names the tool {unknown[0]!r}, expected some of {', '.join(tools) or 'none'}.")
    return {name: tools[name] for name in names}


def merged(name: str, *groups: Iterable[Callable]) -> dict[str, Callable]:
    """Tools by their names. Raises `ValueError` for two of one name."""
    tools: dict[str, Callable] = {}
    for tool in join(groups):
        if tool.__name__ in tools:
            raise ValueError(
                f"Two tools are called {tool.__name__!r}, one of them of {name}: the model could not tell them apart. "
                "Give one another name."
            )
        tools[tool.__name__] = tool
    return tools


def is_own_method(call: ToolCall, rollout: Rollout) -> bool:
    """Whether a call goes to a synchronous method of the rollout's own environment."""
    tool = (rollout.tools or {}).get(call.name)
    own = rollout.environment is not None and getattr(tool, "__self__", None) is rollout.environment
    return own and not inspect.iscoroutinefunction(tool)


@contextmanager
def failures_end(rollout: Rollout) -> Iterator[None]:
    """An environment's failure ends its rollout, and no other one."""
    try:
        yield
    except EnvironmentFailure as error:
        rollout.stop_reason, rollout.error = error.reason, error
    except BaseException:  # the conversation is cancelled, perhaps inside a call that still runs
        rollout.abandoned = True
        raise


class Environments:
    """One environment per conversation.

    Instances are used again for later conversations, after `reset`, as in TRL. Those with `close`, and those with a
    call that was given up, are not.

    Args:
        factories: A class, or classes by the row's column `environment`.
        timeout: Seconds that one call of a method of the protocol may take.
        tools: Those that conversations have beside their environments' own.

    Raises:
        ValueError: a class that is no environment, no class at all, two tools of one name.
    """

    def __init__(self, factories: type | dict[str, type], timeout: float, tools: dict[str, Callable]):
        self.by_name = factories if isinstance(factories, dict) else {None: factories}
        if not self.by_name:
            raise ValueError("environment is an empty dict, expected a class for each name in the column environment.")
        for name, cls in self.by_name.items():
            check_environment(cls, f"environment {name!r}" if name else "environment")
            merged(cls.__name__, tools.values(), self.tools_of_class({"environment": name}).values())
        self.timeout, self.tools = timeout, tools
        self._free: dict[type, list] = {cls: [] for cls in self.by_name.values()}
        self._open: dict[int, Rollout] = {}  # by id: those whose environment is not given back
        atexit.register(self._close_at_exit)

    def class_of(self, row: dict[str, Any]) -> type:
        """The class of a row's environment. Raises `ValueError` for an unknown name."""
        if None in self.by_name:
            return self.by_name[None]
        if row.get("environment") not in self.by_name:
            raise ValueError(
                f"A row has environment={row.get('environment')!r}, expected one of {', '.join(self.by_name)}."
            )
        return self.by_name[row["environment"]]

    def check_rows(self, dataset: Any) -> None:
        """Raise `ValueError` for a row whose environment is not there, or refuses it before it is made.

        A class method `check_row(row)` refuses rows. It returns the names of tools that the row has, or None.
        """
        checks = any(hasattr(cls, "check_row") for cls in self.by_name.values())
        columns = [c for c in dataset.column_names if c == "environment" or (checks and c != "prompt")]
        for number, row in enumerate(dataset.select_columns(columns) if columns else [{}]):
            check = getattr(self.class_of(row), "check_row", lambda row: None)
            try:
                names = check(self.own_row(row))
                if names is not None:
                    selected({**self.tools, **self.tools_of_class(row)}, names)
            except ValueError as error:
                raise ValueError(f"Row {number}: {error}") from None

    def own_row(self, row: DataRow) -> DataRow:
        """A row as its environment takes it (`with_own_keys`).

        `keyword_columns` of a class are those whose keys are arguments of what it plays, which a key of another row
        may break. Other classes get a table's row as it is.
        """
        return with_own_keys(row, getattr(self.class_of(row), "keyword_columns", ()))

    def tools_of_class(self, row: dict[str, Any]) -> dict[str, Callable]:
        """The tools of a row's environment, before there is an instance: for the length of the prompt."""
        return class_tools(self.class_of(row))

    async def open(self, rollout: Rollout, clean: Clean = as_written) -> list[Message]:
        """Give a rollout its environment, and begin. Returns the prompt, its control tokens broken by `clean`.

        Raises `EnvironmentFailure`.
        """
        cls = self.class_of(rollout.row)
        if self._free[cls]:
            rollout.environment = self._free[cls].pop()
            self._open[id(rollout)] = rollout
        else:
            await self._run(rollout, cls.__name__, functools.partial(self._make, rollout, cls))
        row = self.own_row(rollout.row)
        row = {k: v for k, v in row.items() if k != "environment" or None in self.by_name}
        observation = await self.call(rollout, "reset", **row)
        return joined(rollout.prompt_messages, observation, clean)

    def _make(self, rollout: Rollout, cls: type) -> None:
        """Make a rollout's environment. It is closed where nobody waits for it any more."""
        rollout.environment = cls()
        self._open[id(rollout)] = rollout
        if rollout.abandoned:
            self._close_now(rollout)

    async def idle(self, rollout: Rollout) -> None:
        """Wait for calls that were given up at their time limit: an instance has one call at a time.

        Raises `EnvironmentFailure` if one still runs after `environment_timeout`.
        """
        running = [future for future in rollout.given_up if not future.done()]
        rollout.given_up.clear()
        if running and (await asyncio.wait(running, timeout=self.timeout))[1]:
            raise EnvironmentFailure(
                f"{type(rollout.environment).__name__}: a call that was given up at tool_timeout still runs after "
                f"environment_timeout={self.timeout:g} s more. Its instance cannot be used meanwhile: give the method "
                "a time limit of its own, or raise tool_timeout."
            )

    async def call(self, rollout: Rollout, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, synchronous or async. None if the environment has none. Raises `EnvironmentFailure`."""
        function = getattr(rollout.environment, method, None)
        if function is None:
            return None
        name = f"{type(rollout.environment).__name__}.{method}"
        if method != "close":  # which may be what ends a call that hangs
            await self.idle(rollout)
        return await self._run(rollout, name, functools.partial(function, *args, **kwargs))

    async def _run(self, rollout: Rollout, name: str, function: Callable) -> Any:
        if inspect.iscoroutinefunction(getattr(function, "func", function)):

            async def run():
                return await function()
        else:

            def run():
                return function()

        run.__name__ = name
        try:
            return await run_tool(run, {}, self.timeout)
        except ToolsUnavailable:
            raise
        except ToolTimeout as error:
            rollout.abandoned = True
            raise EnvironmentFailure(f"{name} took longer than environment_timeout={self.timeout:g} s.") from error
        except Exception as error:
            raise EnvironmentFailure(f"{name} raised {type(error).__name__}: {error_text(error)}") from error

    async def reward(self, rollout: Rollout) -> float | None:
        """What `get_reward` gives; None without it. Raises `EnvironmentFailure`, also for what is no number."""
        await self.idle(rollout)  # reward functions get the instance, too
        value = await self.call(rollout, "get_reward")
        if value is None:
            return None
        if not is_number(value):
            name = type(rollout.environment).__name__
            raise EnvironmentFailure(f"{name}.get_reward returned {value!r}, expected a finite number.")
        return float(value)

    async def close(self, rollouts: list[Rollout] | None = None) -> list[EnvironmentFailure]:
        """Close the environments of these rollouts, None: of all; keep those that can be used again.

        Returns what failed: a conversation that is over loses nothing by it.
        """
        rollouts = list(self._open.values()) if rollouts is None else rollouts
        rollouts = [rollout for rollout in rollouts if self._open.pop(id(rollout), None) is not None]
        results = await asyncio.gather(*map(self._close_one, rollouts), return_exceptions=True)
        return [error for error in results if isinstance(error, BaseException)]

    async def _close_one(self, rollout: Rollout) -> None:
        if hasattr(rollout.environment, "close"):
            await self.call(rollout, "close")
        elif not rollout.abandoned and rollout.error is None:
            self._free[type(rollout.environment)].append(rollout.environment)

    def _close_now(self, rollout: Rollout) -> None:
        """Close an environment, unless that was done, in a thread without a loop. Nobody is left to hear of errors."""
        if self._open.pop(id(rollout), None) is not None:
            with suppress(Exception):
                closing = getattr(rollout.environment, "close", lambda: None)()
                if inspect.isawaitable(closing):
                    asyncio.run(_awaited(closing))

    def _close_at_exit(self) -> None:
        """What an error or a signal left open, each in a thread: one that hangs leaves no other one open."""
        threads = [threading.Thread(target=self._close_now, args=(r,), daemon=True) for r in self._open.values()]
        for thread in threads:
            thread.start()
        end = time.monotonic() + self.timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
