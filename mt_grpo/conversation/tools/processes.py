"""Runs tools in processes, for faults that would end or block a thread's whole process."""

from __future__ import annotations

import asyncio
import collections
import functools
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.conversation.tools import worker
from mt_grpo.conversation.tools.arguments import readers_of
from mt_grpo.conversation.tools.results import as_received
from mt_grpo.conversation.tools.threads import ToolsUnavailable


class ToolProcesses:
    """Processes for a file's synchronous tools: one per concurrent call, reused for later calls.

    A process is killed when its call exceeds its time. Each imports the file itself.
    """

    START_SECONDS = 600.0  # to import the tools file; a call's time limit does not include it
    IDLE_SECONDS = 60.0  # an idle process is ended after this time

    def __init__(self, path: str, tools: list[Callable]):
        readers = [readers_of(tool)[0] for tool in tools if not inspect.iscoroutinefunction(tool)]
        typed = any(not reader.plain for each in readers for reader in each.values())
        self._command = [sys.executable, worker.__file__, json.dumps([path, [str(each) for each in sys.path], typed])]
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
            *self._command, **pipes, limit=2 * worker.LONGEST, start_new_session=True
        )
        async with asyncio.timeout(self.START_SECONDS):
            await self._line(process)
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
