"""Runs tools within their time limit: on the event loop, in a daemon thread each, or in processes of their own.

A tool's process imports this module, so it starts fast: what is slow to import is imported where it is used.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextvars
import ctypes
import functools
import importlib.util
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from mt_grpo.base.errors import error_line, tell_once
from mt_grpo.conversation.tools.results import as_received, as_result, as_sent
from mt_grpo.conversation.tools.signature import as_tool, read_arguments
from mt_grpo.rollout import ToolResult

HUNG = "hung-tool-"  # prefix of the names of threads whose call was abandoned
SHORT = 2**16  # characters of a text that an event loop finishes itself
LONGEST_ANSWER = 1 << 24  # characters of a process's answer: it is read by the loop that all conversations share

# A call that is given up at its time limit appends a future to this list, if there is one. Until the future is done,
# the call's thread works on, since it cannot be stopped, and what it works on is in use.
GIVEN_UP: contextvars.ContextVar[list[asyncio.Future] | None] = contextvars.ContextVar("GIVEN_UP", default=None)


class ToolTimeout(Exception):
    """A tool call exceeded its time limit. It is not a `TimeoutError`, because the tool itself may raise that."""


class ToolsUnavailable(RuntimeError):
    """No tool can run, for lack of threads or processes. The policy must not read this, since it made no mistake."""


def start_thread(name: str, work: Callable[[], Any]) -> tuple[threading.Thread, asyncio.Future]:
    """Run `work` in a daemon thread, which nothing waits for at exit. The future's result is (result, error)."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    context.run(GIVEN_UP.set, None)  # what the tool calls on a loop of its own is no future of this loop
    done: asyncio.Future = loop.create_future()  # it cannot hold StopIteration as its exception

    def run() -> None:
        try:
            outcome = context.run(work), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed: no call waits any more
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(outcome))

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ToolsUnavailable(f"no thread for a tool could be started: {error}.") from error
    return thread, done


async def finished(awaitable: Awaitable, finish: Callable[[Any], Any]) -> tuple[Any, BaseException | None]:
    """(result of an async tool, error). SystemExit would end the loop if it reached it.

    INVARIANT: no image is decoded on the event loop, so `finish` runs in a thread unless the result is a short text.
    """
    try:
        result = await awaitable
        text = result.text if isinstance(result, ToolResult) else result  # a `ToolResult` may hold an image as well
        if isinstance(text, str) and len(text) <= SHORT:
            return finish(result), None
        return await start_thread("tool-result", lambda: finish(result))[1]
    except BaseException as error:
        return None, error


async def run_tool(
    tool: Callable, arguments: dict[str, Any], timeout: float, finish: Callable[[Any], Any] = lambda result: result
) -> Any:
    """Run one tool: an async one as a task, a synchronous one in a daemon thread, or in a process (`ToolProcesses`).

    `finish` converts the result, in a thread as well. The start of a process does not count for `timeout` (seconds).

    Raises:
        ToolTimeout: The call exceeded `timeout`. Its task is cancelled, or its thread is abandoned.
        ToolsUnavailable: There is neither a thread nor a process for the call, or it needs signals in a thread.
        Exception: The error of the tool. `SystemExit` and the like become `RuntimeError`.
    """
    name, loop, thread = tool.__name__, asyncio.get_running_loop(), None
    call = await tool.prepare() if hasattr(tool, "prepare") else tool  # starts a process before the time limit begins
    deadline = loop.time() + timeout

    def work() -> Any:
        result = call(**arguments)
        return result if inspect.isawaitable(result) else finish(result)

    done: asyncio.Future | None = None
    try:
        if inspect.iscoroutinefunction(call):
            done = loop.create_task(finished(call(**arguments), finish))
        else:
            thread, done = start_thread(f"tool-{name}", work)
        await asyncio.wait({done}, timeout=timeout)
        if done.done() and inspect.isawaitable(done.result()[0]):  # an async function behind a plain decorator
            done = loop.create_task(finished(done.result()[0], finish))
            await asyncio.wait({done}, timeout=deadline - loop.time())
        in_time = done.done()
    finally:
        if isinstance(done, asyncio.Task):
            done.cancel()
    if not in_time:
        if thread is not None and thread.is_alive():
            thread.name = f"{HUNG}{name}"
            words = (
                "The call goes on in its thread, which cannot be stopped (metric tools/hung_threads). Give the tool"
            )
            words += " a time limit, or set isolate_tools: true to run TOOL_FUNCTIONS in processes, which are killed."
            tell_once(f"{name} took longer than {timeout:g} s. {words}", f"hung {name}")
        if (given_up := GIVEN_UP.get()) is not None:
            given_up.append(done)
        raise ToolTimeout(f"{name} took longer than {timeout:g} s")
    result, error = done.result()
    said = error if isinstance(error, ValueError) else getattr(result, "text", result)
    if "signal only works in main thread" in str(said)[:1000]:  # so each call would fail
        words = (
            f"{name} sets a signal handler, which Python allows only in the main thread. Set isolate_tools: true to "
            "run TOOL_FUNCTIONS in the main thread of a process, or use tool_timeout and environment_timeout instead."
        )
        if error is not None:
            raise ToolsUnavailable(words) from error
        tell_once(words)  # the tool caught the error, and the model reads it
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(error_line(error))
    return result


def results_of(env: Any) -> Callable[[Any], ToolResult]:
    """The function `as_result` with the image reader of an environment's model."""
    from mt_grpo.images.pictures import reader_of

    return functools.partial(as_result, reader=reader_of(env.tokenizer))


def error_text(error: BaseException) -> str:
    """The text of a tool's error that the model reads; the name of the class if the error has no text.

    >>> error_text(ValueError("no city 'Oslo'")), error_text(KeyError("Oslo")), error_text(KeyError())
    ("no city 'Oslo'", "KeyError: 'Oslo'", 'KeyError')
    """
    name = type(error).__name__
    try:
        # The text of a KeyError is the key alone.
        return f"{name}: {error}" if isinstance(error, KeyError) and error.args else str(error) or name
    except Exception:  # an exception whose own __str__ fails
        return name


async def awaited(result: Awaitable) -> Any:
    """The result of an awaitable, which need not be a coroutine."""
    return await result


def serve(path: str) -> None:
    """Import a tools file and answer calls, one JSON line each, until the input ends: the work of a tool's process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: no hanging call outlives the trainer
    calls, answers = open(os.dup(0)), open(os.dup(1), "w", closefd=False)  # open until there is an exit code
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a tool prints is no answer
    spec = importlib.util.spec_from_file_location("tools_script", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tools = list(map(as_tool, module.TOOL_FUNCTIONS))
    print("ready", file=answers, flush=True)
    for line in calls:
        try:
            index, arguments = json.loads(line)
            result = tools[index](**read_arguments(tools[index], arguments))
            result = asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
            result = result if isinstance(result, ToolResult) else ToolResult(result)
            reward = None if result.reward is None else float(result.reward)
            sent = {"text": result.text, "reward": reward, "error": result.error}
            if len(answer := json.dumps(sent, default=as_sent)) > LONGEST_ANSWER:
                raise ValueError("the result is longer than 16 MiB")
        except BaseException as error:
            text = error_text(error) if isinstance(error, Exception) else error_line(error)
            answer = json.dumps({"raised": text[: LONGEST_ANSWER // 8]})
        print(answer, file=answers, flush=True)


class ToolProcesses:
    """Processes for a file's synchronous tools: one per concurrent call, reused for later calls.

    A process is killed when its call exceeds its time. Each imports the file itself.
    """

    def __init__(self, path: str):
        program = "import json, sys\npath, sys.path[:] = json.loads(sys.argv[1])\n"
        program += f"from {serve.__module__} import serve\nserve(path)"
        self._command = [sys.executable, "-c", program, json.dumps([path, [str(each) for each in sys.path]])]
        self._idle: dict[asyncio.AbstractEventLoop, list] = collections.defaultdict(list)
        self._path = path
        atexit.register(self.end_idle)

    def end_idle(self) -> None:
        """End the idle processes, with all that calls have started in them."""
        for process in [each for idle in self._idle.values() for each in idle if each.returncode is None]:
            self._end(process)
        self._idle.clear()

    def isolated(self, index: int, tool: Callable) -> Callable:
        """An async function that runs `TOOL_FUNCTIONS[index]` in a process. An async tool is returned unchanged."""

        async def prepare() -> Callable:
            return functools.partial(self._call, await self._process(), index)

        @functools.wraps(tool)
        async def prepare_and_call(**arguments):
            return await (await prepare())(**arguments)

        prepare_and_call.prepare = prepare
        return tool if inspect.iscoroutinefunction(tool) else prepare_and_call

    async def try_one(self) -> None:
        """Raise `ToolsUnavailable` if a process cannot import the file, such as one that locks a resource."""
        self._end(process := await self._process())
        await process.wait()

    async def _process(self) -> asyncio.subprocess.Process:
        """An idle process, else a new one that has imported the file. Raises `ToolsUnavailable`."""
        idle = self._idle[asyncio.get_running_loop()]
        while idle:
            if (process := idle.pop()).returncode is None:
                return process
        pipes = dict.fromkeys(("stdin", "stdout"), asyncio.subprocess.PIPE)
        try:
            process = await asyncio.create_subprocess_exec(  # own session: Ctrl-C must reach only the trainer
                *self._command, **pipes, limit=2 * LONGEST_ANSWER, start_new_session=True
            )
            async with asyncio.timeout(600):
                while await self._line(process) != b"ready\n":  # a hook of the interpreter may print before
                    pass
            return process
        except (OSError, RuntimeError) as error:
            raise ToolsUnavailable(
                f"no process for the tools of {self._path!r} could be started: {error_line(error)}. See above; check "
                "that the file still imports, and ulimit -n, -u."
            ) from error

    async def _call(self, process: asyncio.subprocess.Process, index: int, /, **arguments: Any) -> Any:
        process.stdin.write(json.dumps([index, arguments]).encode() + b"\n")
        line = await self._line(process)
        self._idle[asyncio.get_running_loop()].append(process)
        # In a thread: a long result, or an image, takes a second.
        answer = await asyncio.to_thread(json.loads, line, object_hook=as_received)
        if "raised" in answer:
            raise RuntimeError(answer["raised"])
        return ToolResult(**answer)

    async def _line(self, process: asyncio.subprocess.Process) -> bytes:
        """The next line of a process, which is killed if it has ended itself, or if the wait is cancelled."""
        line = b""
        try:
            line = await process.stdout.readline()
        finally:
            if not line.endswith(b"\n"):
                self._end(process)
        if line.endswith(b"\n"):
            return line
        raise RuntimeError(f"the tool's process ended with exit code {await process.wait()}")

    @staticmethod
    def _end(process: asyncio.subprocess.Process) -> None:
        """Kill the process and all processes that it started. They are in its group even after its own end."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
