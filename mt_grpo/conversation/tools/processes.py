"""Runs tools in processes, for faults that would end or block a thread's whole process."""

from __future__ import annotations

import asyncio
import collections.abc
import functools
import inspect
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from mt_grpo.base.errors import sentence
from mt_grpo.conversation.tools.arguments import arguments_source
from mt_grpo.conversation.tools.results import RESULT_SOURCE, as_received, error_text
from mt_grpo.conversation.tools.threads import ToolsUnavailable

# The program of a tool process. It must not import this module, which takes seconds: killed processes are replaced.
TOOL_PROCESS = """
import asyncio, ctypes, importlib.util, inspect, json, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: no hanging call outlives the trainer
calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)  # what a tool prints is no answer
path, sys.path[:] = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("tools_script", path)
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
async def awaited(result):
    return await result
tools = [tool.run if hasattr(tool, "run") and hasattr(tool, "schema") else tool for tool in module.TOOL_FUNCTIONS]
for tool in tools:
    readers_of(tool)  # pydantic's work is not the first call's time
answers.write(b"ready\\n")
answers.flush()
for call in calls:
    try:
        index, arguments = json.loads(call)
        tool = tools[index]
        result = tool(**{name: read_argument(tool, name, value) for name, value in arguments.items()})
        if inspect.isawaitable(result):  # an async function behind a plain decorator
            result = asyncio.run(awaited(result))
        reward = kind = None
        if type(result).__name__ == "ToolResult":  # importing the class would cost every process
            result, reward, kind = result.text, result.reward, result.error
        answer = json.dumps({**as_sent(result), "reward": None if reward is None else float(reward), "kind": kind})
    except BaseException as error:
        name = type(error).__name__
        text = str(error) if isinstance(error, Exception) else f"{name}: {error}"
        answer = json.dumps({"error": name, "text": text})
    if len(answer) > 1 << 24:  # it is read by the loop that all conversations share
        answer = json.dumps({"error": "ValueError", "text": "the result is longer than 16 MiB"})
    answers.write(b"%d\\n%s" % (len(answer), answer.encode()))
    answers.flush()
"""


class ToolProcesses:
    """Processes for a file's synchronous tools: one per concurrent call, reused for later calls.

    The trainer survives what a thread would not: `os._exit`, a crash, and C code that hangs and holds Python's global
    interpreter lock (a regular expression can). A process is killed when its call exceeds its time. Each process
    imports the file itself. So calls in different processes share no global variables.
    """

    START_SECONDS = 600.0  # to import the tools file; a call's time limit does not include it
    IDLE_SECONDS = 60.0  # an idle process is ended after this time
    START_ATTEMPTS = 10  # if the system refuses a process, and no other process can take the call

    def __init__(self, path: str, tools: list[Callable]):
        folders = [str(folder) for folder in sys.path]
        isolated = [tool for tool in tools if not inspect.iscoroutinefunction(tool)]
        program = RESULT_SOURCE + arguments_source(isolated) + TOOL_PROCESS
        self._command = [sys.executable, "-c", program, json.dumps([path, folders])]
        # Idle processes with their shutdown timers: the last in is used first, so that surplus ones time out.
        self._idle: dict[asyncio.AbstractEventLoop, list[tuple]] = collections.defaultdict(list)
        # The number of processes that start or work, and the calls that wait until one of them is idle.
        self._busy: dict[asyncio.AbstractEventLoop, int] = collections.Counter()
        self._waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future]] = collections.defaultdict(list)
        self._path = path

    async def try_one(self) -> None:
        """Raise `RuntimeError` or `OSError` if a process cannot import the file.

        The import may fail there and succeed here, if the file locks a resource at its import.
        """
        process = await self._start()
        self._end(process)
        await process.wait()

    @staticmethod
    def _end(process: asyncio.subprocess.Process) -> None:
        """Kill the process and all processes that it started. They are in its group even after its own end."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def isolated(self, index: int, tool: Callable) -> Callable:
        """An async function that runs `tool`, the file's `TOOL_FUNCTIONS[index]`, in one of the processes.

        An async tool is returned unchanged.
        """

        async def prepare() -> Callable:
            process = await self._process()

            async def call(**arguments):
                return await self._call(process, index, arguments)

            return call

        @functools.wraps(tool)
        async def prepare_and_call(**arguments):
            return await (await prepare())(**arguments)

        prepare_and_call.prepare = prepare
        return tool if inspect.iscoroutinefunction(tool) else prepare_and_call

    async def _process(self) -> asyncio.subprocess.Process:
        """An idle process, else a new one; if no process can be started, the next one that finishes its call.

        Raises:
            ToolsUnavailable: No process can be started, and none is busy.
        """
        loop = asyncio.get_running_loop()
        idle, waiting, attempts = self._idle[loop], self._waiting[loop], 0
        while True:
            while idle:
                process, end = idle.pop()
                end.cancel()
                if process.returncode is None:
                    self._busy[loop] += 1
                    return process
            self._busy[loop] += 1
            try:
                return await self._start()
            except BaseException as error:
                self._one_less(loop)
                if not isinstance(error, (OSError, RuntimeError)):
                    raise
                problem, attempts = error, attempts + 1
            if idle:  # a process became idle meanwhile
                continue
            if self._busy[loop]:
                waiting.append(free := loop.create_future())
                try:
                    await free
                except asyncio.CancelledError:
                    self._wake_one(loop)  # this call may have been woken: wake another
                    raise
            elif isinstance(problem, OSError) and attempts < self.START_ATTEMPTS:
                await asyncio.sleep(0.1)
            else:
                raise ToolsUnavailable(
                    f"no process for the tools of {self._path!r} could be started: "
                    f"{sentence(error_text(problem))} See above; check the limits of open files and processes "
                    "(ulimit -n, -u), the memory, and that the file still imports."
                ) from problem

    def _one_less(self, loop: asyncio.AbstractEventLoop) -> None:
        """Record that a process is no longer busy, and wake a waiting call."""
        self._busy[loop] -= 1
        self._wake_one(loop)

    def _wake_one(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting[loop]:
            free = self._waiting[loop].pop(0)
            if not free.done():
                free.set_result(None)
                return

    async def _start(self) -> asyncio.subprocess.Process:
        """Start a process and wait until it has imported the file."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(  # own session: Ctrl-C must reach only the trainer
            *self._command, stdin=pipe, stdout=pipe, start_new_session=True
        )
        async with self._killed_on_error(process), asyncio.timeout(self.START_SECONDS):
            await process.stdout.readuntil(b"ready\n")
        return process

    async def _call(self, process: asyncio.subprocess.Process, index: int, arguments: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        waits = self._idle[loop]

        def end() -> None:
            waits.remove((process, timer))
            self._end(process)

        try:
            async with self._killed_on_error(process):
                process.stdin.write(json.dumps([index, arguments]).encode() + b"\n")
                size = await process.stdout.readuntil(b"\n")
                answer = json.loads(await process.stdout.readexactly(int(size)))
            timer = loop.call_later(self.IDLE_SECONDS, end)
            waits.append((process, timer))
        finally:
            self._one_less(loop)
        if "error" in answer:
            raise type(answer["error"], (Exception,), {})(answer["text"])
        return as_received(answer)

    @asynccontextmanager
    async def _killed_on_error(self, process: asyncio.subprocess.Process) -> AsyncIterator[None]:
        """A context that kills the process after an error, above all when its call is cancelled at its time limit."""
        try:
            yield
        except BaseException as error:
            ended = isinstance(error, asyncio.IncompleteReadError)
            try:
                with suppress(TimeoutError):
                    if ended:  # read its own exit code before the kill
                        await asyncio.wait_for(process.wait(), 1.0)
            finally:
                self._end(process)
                with suppress(TimeoutError):  # until its pipes are closed
                    await asyncio.wait_for(process.wait(), 5.0)
            if ended:
                raise RuntimeError(f"the tool's process ended with exit code {await process.wait()}") from None
            raise
