"""Runs tools in processes, for faults that would end or block a thread's whole process."""

from __future__ import annotations

import asyncio
import collections
import ctypes
import functools
import importlib.util
import inspect
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.conversation.tools.arguments import (
    ArgumentReader,
    cached_by_function,
    hints_of,
    is_json_type,
    read_argument,
    readers_of,
    strict_schema,
    takes_none,
)
from mt_grpo.conversation.tools.results import ADDRESS, as_received, as_sent, as_text, json_form, with_data
from mt_grpo.conversation.tools.threads import ToolsUnavailable

LONGEST_ANSWER = 1 << 24  # characters: it is read by the loop that all conversations share


async def awaited(result: Awaitable) -> Any:
    """The result of an async function behind a plain decorator."""
    return await result


def serve(path: str, folders: list[str], typed: bool) -> None:
    """Import a tools file and answer calls, one JSON line each. `typed`: a parameter's type is none of JSON's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: no hanging call outlives the trainer
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a tool prints is no answer
    sys.path[:] = folders
    spec = importlib.util.spec_from_file_location("tools_script", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tools = [tool.run if hasattr(tool, "run") and hasattr(tool, "schema") else tool for tool in module.TOOL_FUNCTIONS]
    if typed:
        for tool in tools:
            readers_of(tool)  # pydantic's work is not the first call's time
    answers.write(b"ready\n")
    answers.flush()
    for call in calls:
        try:
            index, arguments = json.loads(call)
            if typed:
                arguments = {name: read_argument(tools[index], name, value) for name, value in arguments.items()}
            result, reward, kind = tools[index](**arguments), None, None
            if inspect.isawaitable(result):
                result = asyncio.run(awaited(result))
            if type(result).__name__ == "ToolResult":
                result, reward, kind = result.text, result.reward, result.error
            answer = json.dumps({**as_sent(result), "reward": None if reward is None else float(reward), "kind": kind})
        except BaseException as error:
            name = type(error).__name__
            answer = json.dumps(
                {"error": name, "text": str(error) if isinstance(error, Exception) else f"{name}: {error}"}
            )
        if len(answer) > LONGEST_ANSWER:
            answer = json.dumps({"error": "ValueError", "text": "the result is longer than 16 MiB"})
        answers.write(answer.encode() + b"\n")
        answers.flush()


# INVARIANT: these functions also run in a tool's process, which does not import this package, and use what is imported
# here alone. The import of pydantic takes tenths of a second: a process whose tools have JSON types does without it.
SERVING = f"""
import asyncio, base64, collections.abc, ctypes, dataclasses, enum, functools, importlib.util, inspect, io, json, os
import re, sys, types, typing, weakref
from collections.abc import Awaitable, Callable
from typing import Any, Literal
ADDRESS, LONGEST_ANSWER, UNIONS = {ADDRESS!r}, {LONGEST_ANSWER}, (typing.Union, types.UnionType)
{"".join(map(inspect.getsource, (json_form, as_text, with_data, as_sent, awaited, serve)))}
"""
READING = "".join(
    [
        "from pydantic import TypeAdapter\n",
        "from pydantic_core import PydanticKnownError, SchemaValidator, core_schema\n",
        *map(inspect.getsource, (is_json_type, takes_none, hints_of, strict_schema, ArgumentReader)),
        *map(inspect.getsource, (cached_by_function, readers_of, read_argument)),
    ]
)


class ToolProcesses:
    """Processes for a file's synchronous tools: one per concurrent call, reused for later calls.

    A process is killed when its call exceeds its time. Each imports the file itself.
    """

    START_SECONDS = 600.0  # to import the tools file; a call's time limit does not include it
    IDLE_SECONDS = 60.0  # an idle process is ended after this time

    def __init__(self, path: str, tools: list[Callable]):
        readers = [readers_of(tool)[0] for tool in tools if not inspect.iscoroutinefunction(tool)]
        typed = any(not reader.plain for each in readers for reader in each.values())
        program = f"{SERVING}{READING if typed else ''}serve(*json.loads(sys.argv[1]))"
        self._command = [sys.executable, "-c", program, json.dumps([path, [str(each) for each in sys.path], typed])]
        # Idle processes with their shutdown timers: the last in is used first, so that surplus ones time out.
        self._idle: dict[asyncio.AbstractEventLoop, list[tuple]] = collections.defaultdict(list)
        self._path = path

    async def try_one(self) -> None:
        """Raise `RuntimeError` or `OSError` if a process cannot import the file, such as one that locks a resource."""
        process = await self._start()
        self._end(process)
        await process.wait()

    def isolated(self, index: int, tool: Callable) -> Callable:
        """An async function that runs `TOOL_FUNCTIONS[index]` in a process. An async tool is returned unchanged."""

        async def prepare() -> Callable:
            return functools.partial(self._call, await self._process(), index)

        @functools.wraps(tool)
        async def prepare_and_call(**arguments):
            return await (await prepare())(**arguments)

        prepare_and_call.prepare = prepare
        return tool if inspect.iscoroutinefunction(tool) else prepare_and_call

    async def _process(self) -> asyncio.subprocess.Process:
        """An idle process, else a new one. Raises `ToolsUnavailable` if none can be started."""
        idle = self._idle[asyncio.get_running_loop()]
        while idle:
            process, timer = idle.pop()
            timer.cancel()
            if process.returncode is None:
                return process
        try:
            return await self._start()
        except (OSError, RuntimeError) as error:
            words = f"no process for the tools of {self._path!r} could be started: {error_line(error)}"
            raise ToolsUnavailable(
                f"{words}. See above; check that the file still imports, and ulimit -n, -u."
            ) from error

    async def _start(self) -> asyncio.subprocess.Process:
        """Start a process and wait until it has imported the file."""
        pipes = dict.fromkeys(("stdin", "stdout"), asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(  # own session: Ctrl-C must reach only the trainer
            *self._command, **pipes, limit=2 * LONGEST_ANSWER, start_new_session=True
        )
        async with asyncio.timeout(self.START_SECONDS):
            while await self._line(process) != b"ready\n":  # a hook of the interpreter may print before
                pass
        return process

    async def _call(self, process: asyncio.subprocess.Process, index: int, /, **arguments: Any) -> Any:
        process.stdin.write(json.dumps([index, arguments]).encode() + b"\n")
        answer = json.loads(await self._line(process))
        loop = asyncio.get_running_loop()

        def end() -> None:
            self._idle[loop].remove((process, timer))
            self._end(process)

        timer = loop.call_later(self.IDLE_SECONDS, end)
        self._idle[loop].append((process, timer))
        if "error" in answer:
            raise type(answer["error"], (Exception,), {})(answer["text"])
        return as_received(answer)

    async def _line(self, process: asyncio.subprocess.Process) -> bytes:
        """The next line of a process. It is killed if it has ended itself, or if the wait is cancelled."""
        line = b""
        try:
            line = await process.stdout.readline()
            if line.endswith(b"\n"):
                return line
            with suppress(TimeoutError):  # it has an exit code of its own
                await asyncio.wait_for(process.wait(), 1.0)
        finally:
            if not line.endswith(b"\n"):
                self._end(process)
                with suppress(TimeoutError):  # until its pipes are closed
                    await asyncio.wait_for(process.wait(), 5.0)
        raise RuntimeError(f"the tool's process ended with exit code {process.returncode}")

    @staticmethod
    def _end(process: asyncio.subprocess.Process) -> None:
        """Kill the process and all processes that it started. They are in its group even after its own end."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
