"""Tools in processes of their own, for what a thread does not survive."""

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

from mt_grpo.tool_arguments import arguments_source
from mt_grpo.tool_results import RESULT_SOURCE, error_text
from mt_grpo.tool_threads import ToolsUnavailable

# What a tool's process runs. Not this module, whose imports take seconds: a killed process is replaced by a new one.
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
for tool in module.TOOL_FUNCTIONS:
    readers_of(tool)  # pydantic's work is not the first call's time
answers.write(b"ready\\n")
answers.flush()
for call in calls:
    try:
        index, arguments = json.loads(call)
        tool = module.TOOL_FUNCTIONS[index]
        result = tool(**{name: read_argument(tool, name, value) for name, value in arguments.items()})
        if inspect.isawaitable(result):  # an async function behind a plain decorator
            result = asyncio.run(awaited(result))
        answer = json.dumps({"result": as_text(result)})
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
    """A file's synchronous tools in processes: as many as there are calls at the same time, used again afterwards.

    For what a thread does not survive: `os._exit`, a crash, and C code that hangs and holds Python's interpreter lock
    (a regular expression can), which stops every thread. A process whose call runs out of time is killed. Each one
    imports the file anew, so what a tool keeps in global variables is not shared between calls.
    """

    START_SECONDS = 600.0  # to import the tools file, which is not the call's time
    IDLE_SECONDS = 60.0  # until a process without work ends
    START_ATTEMPTS = 10  # where the machine refuses a process, and no other one could take the call

    def __init__(self, path: str, tools: list[Callable]):
        folders = [str(folder) for folder in sys.path]
        isolated = [tool for tool in tools if not inspect.iscoroutinefunction(tool)]
        program = RESULT_SOURCE + arguments_source(isolated) + TOOL_PROCESS
        self._command = [sys.executable, "-c", program, json.dumps([path, folders])]
        # Those that wait, each with what will end it; the last in is the first out, so that too many stay idle.
        self._idle: dict[asyncio.AbstractEventLoop, list[tuple]] = collections.defaultdict(list)
        # Those that start or work, which may become idle, and the calls that wait for one of them.
        self._busy: dict[asyncio.AbstractEventLoop, int] = collections.Counter()
        self._waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future]] = collections.defaultdict(list)
        self._path = path

    async def try_one(self) -> None:
        """Raise where a process cannot import the file: it may lock what this process, too, has imported."""
        process = await self._start()
        self._end(process)
        await process.wait()

    @staticmethod
    def _end(process: asyncio.subprocess.Process) -> None:
        """With the process goes what it started, which is of its group even where the process is dead."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def isolated(self, index: int, tool: Callable) -> Callable:
        """`tool`, the file's `TOOL_FUNCTIONS[index]`, as an async function that runs it in one of the processes."""

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
        """One that waits for a call, else a new one, else the next one that is done with its call.

        Raises:
            ToolsUnavailable: none can be started, and there is none to wait for.
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
            if idle:  # meanwhile one is done
                continue
            if self._busy[loop]:
                waiting.append(free := loop.create_future())
                try:
                    await free
                except asyncio.CancelledError:
                    self._wake_one(loop)  # it may have been this one's turn
                    raise
            elif isinstance(problem, OSError) and attempts < self.START_ATTEMPTS:
                await asyncio.sleep(0.1)
            else:
                raise ToolsUnavailable(
                    f"no process for the tools of {self._path!r} can be started: {error_text(problem)}. See above; "
                    "check the limits of open files and processes (ulimit -n, -u), the memory, and that the file "
                    "still imports."
                ) from problem

    def _one_less(self, loop: asyncio.AbstractEventLoop) -> None:
        """A process is no longer busy: one of those that wait may look again."""
        self._busy[loop] -= 1
        self._wake_one(loop)

    def _wake_one(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting[loop]:
            free = self._waiting[loop].pop(0)
            if not free.done():
                free.set_result(None)
                return

    async def _start(self) -> asyncio.subprocess.Process:
        """A new process that has imported the file."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(  # in a session of its own: Ctrl-C is the trainer's to handle
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
        return answer["result"]

    @asynccontextmanager
    async def _killed_on_error(self, process: asyncio.subprocess.Process) -> AsyncIterator[None]:
        """Above all where the call is cancelled since it ran out of time: with the process goes what it started."""
        try:
            yield
        except BaseException as error:
            ended = isinstance(error, asyncio.IncompleteReadError)
            try:
                with suppress(TimeoutError):
                    if ended:  # first its own exit code
                        await asyncio.wait_for(process.wait(), 1.0)
            finally:
                self._end(process)
                with suppress(TimeoutError):  # until its pipes are free again
                    await asyncio.wait_for(process.wait(), 5.0)
            if ended:
                raise RuntimeError(f"the tool's process ended with exit code {await process.wait()}") from None
            raise
