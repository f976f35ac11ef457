"""Tools that take time: threads, timeouts, hangs."""

import asyncio
import contextvars
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from scripted import ADD, ANSWER, Scripted, add, call, make_env, run_many, verify, within

import mt_grpo_trainer as mt
from mt_grpo.conversation.tools.threads import ToolThreads, ToolTimeout, run_tool, warn_of_hung


class Busy:
    """Counts how many calls run at once."""

    def __init__(self):
        self.now = self.most = 0
        self.lock = threading.Lock()

    def __enter__(self):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_):
        with self.lock:
            self.now -= 1


def busy_tools(seconds: float):
    busy = Busy()

    def work() -> str:
        """Works."""
        with busy:
            time.sleep(seconds)
        return "done"

    async def work_async() -> str:
        """Works."""
        with busy:
            await asyncio.sleep(seconds)
        return "done"

    return busy, work, work_async


def test_sync_tools_run_at_the_same_time():
    """More of them than asyncio's own pool has threads here."""
    everyone = threading.Barrier(32)

    def work() -> str:
        """Works until all others work."""
        everyone.wait(30)
        return "done"

    rollouts = run_many([work], [[call("work"), ANSWER]] * 32)
    assert all(r.turns[0].observation == "done" for r in rollouts)


@pytest.mark.parametrize("limit", [1, 3])
def test_max_concurrent_tools_is_honoured(limit):
    busy, work, work_async = busy_tools(0.05)
    rollouts = run_many(
        [work, work_async], [[call("work"), ANSWER], [call("work_async"), ANSWER]] * 6, max_concurrent_tools=limit
    )
    assert all(r.turns[0].observation == "done" for r in rollouts)
    assert busy.most == limit


def test_a_hung_tool_neither_blocks_nor_starves_the_others(caplog):
    """One slot, and a call that never returns in it: its time limit frees the slot, and no other call's limit runs."""
    warn_of_hung.cache_clear()
    release = threading.Event()

    def hang() -> str:
        """Hangs."""
        release.wait(120)
        return "late"

    rollouts = run_many(
        [hang, add],
        [[call("hang"), ANSWER], [call("hang"), ANSWER], [ADD, ANSWER]],
        max_concurrent_tools=1,
        tool_timeout=2.0,
    )
    release.set()
    assert [r.turns[0].error for r in rollouts] == ["timeout", "timeout", None]
    assert rollouts[2].turns[0].observation == "5"
    said = [r.getMessage() for r in caplog.records if "goes on in its thread" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("hang took longer than 2 s. The call goes on in its thread")


def test_many_hung_tools_do_not_keep_the_process_alive():
    release = threading.Event()

    def hang() -> str:
        """Hangs."""
        release.wait(120)
        return "late"

    rollouts = run_many([hang, add], [[call("hang"), ANSWER]] * 20 + [[ADD, ANSWER]], tool_timeout=2.0)
    assert [r.turns[0].error for r in rollouts] == ["timeout"] * 20 + [None]
    left = [t for t in threading.enumerate() if t.name == "hung-tool-hang"]
    assert len(left) == 20 and all(t.daemon for t in left)  # Python does not wait for these at exit
    release.set()
    deadline = time.monotonic() + 10
    while any(t.name == "hung-tool-hang" for t in left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {t.name for t in left} == {"tool-idle"}  # they have come back, and are used again


def test_a_slow_tool_holds_up_no_other_conversation():
    """No barrier between conversations: the others are through while one tool works."""
    finished = []

    def slow() -> str:
        """Waits for the others."""
        deadline = time.monotonic() + 60
        while len(finished) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        return f"{len(finished)} were through"

    class Noting(Scripted):
        async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
            generation = await super().generate(prompt_ids, max_tokens, sampling_params, index)
            if len(self.of(index)) == 3:
                finished.append(index)
            return generation

    env, backend = make_env([slow, add]), Noting([[call("slow"), ANSWER]] + [[ADD, ADD, ANSWER]] * 3)
    rollouts = within(lambda: env.generate(["go"] * 4, backend), 90)["rollouts"]
    verify(env, rollouts, backend)
    assert rollouts[0].turns[0].observation == "3 were through"


@pytest.mark.parametrize("limit", [-1, 0, 9])
def test_a_limit_that_holds_no_marker_is_refused(limit):
    with pytest.raises(ValueError, match="expected at least 10"):
        make_env(max_tool_response_tokens=limit)


def test_run_tool():
    assert asyncio.run(run_tool(add, {"a": 2, "b": 3}, 5)) == "5"
    names = asyncio.run(run_tool(lambda: threading.current_thread().name, {}, 5))
    assert names != threading.main_thread().name
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_tool(lambda: 1 / 0, {}, 5))
    release = threading.Event()
    with pytest.raises(ToolTimeout):
        asyncio.run(run_tool(release.wait, {"timeout": 3600}, 0.1))  # and the loop closes without waiting
    release.set()


def test_tool_threads_are_used_again_and_those_too_many_end():
    stay: set[int] | None = None  # the threads that stay idle for an hour; None means all

    class Threads(ToolThreads):
        @property
        def IDLE_SECONDS(self) -> float:  # each thread asks when it becomes idle
            return 3600.0 if stay is None or threading.get_ident() in stay else 0.2

    threads = Threads()

    def together(count: int) -> set[int]:
        """Run so many pieces of work at the same time; in which threads they ran."""
        barrier, used = threading.Barrier(count), queue.SimpleQueue()

        def work() -> int:
            barrier.wait(10)
            return threading.get_ident()

        async def submit_all():
            await asyncio.gather(*[threads.submit(work, used.put) for _ in range(count)])

        asyncio.run(submit_all())
        return {used.get(timeout=10) for _ in range(count)}

    def alive_once_only(expected: set[int]) -> set[int]:
        """Those of the first threads that are alive as soon as it is the expected ones, or after 20 s."""
        deadline = time.monotonic() + 20
        while (alive := first & {thread.ident for thread in threading.enumerate()}) != expected:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return alive

    first = together(8)
    assert len(first) == 8 and all(together(8) == first for _ in range(20))  # a result is known: its thread is free
    two = together(2)
    assert two < first and all(together(2) == two for _ in range(20))  # the same two: the other six stay idle
    stay = two
    assert together(8) == first and alive_once_only(two) == two and together(2) == two  # six end, two stay
    stay = set()
    together(2)  # they, or others where both have just ended
    assert alive_once_only(set()) == set() and together(1)  # all ended, and a new one starts


def test_the_event_loop_goes_on_while_a_thread_starts(monkeypatch):
    """A start takes until the new thread runs, and 128 conversations call tools at the same time."""
    went_on, done, start = threading.Event(), queue.SimpleQueue(), threading.Thread.start

    def start_later(thread):
        if thread.name == "tool-idle" and not went_on.wait(5):
            done.put("the loop waits for the start")
        start(thread)

    async def submit():
        asyncio.get_running_loop().call_later(0.01, went_on.set)
        await ToolThreads().submit(lambda: "done", done.put)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    asyncio.run(submit())
    assert done.get(timeout=10) == "done"


def test_a_tool_in_a_thread_has_its_callers_context_variables_to_itself():
    caller = contextvars.ContextVar("caller")

    def change(to: str) -> tuple[str, int]:
        before = caller.get()
        caller.set(to)
        return before, threading.get_ident()

    async def calls():
        caller.set("first")
        first, thread = await run_tool(change, {"to": "changed"}, 5)
        assert caller.get() == "first"
        caller.set("second")
        second, same_thread = await run_tool(change, {"to": "changed"}, 5)
        assert thread == same_thread
        return first, second

    assert asyncio.run(calls()) == ("first", "second")


def test_a_hung_tool_on_the_callers_own_loop_does_not_keep_the_process_alive():
    code = (
        "import asyncio, threading\n"
        "from mt_grpo.conversation.tools.threads import ToolTimeout, run_tool\n"
        "try:\n"
        "    asyncio.run(run_tool(threading.Event().wait, {}, 0.1))\n"
        "except ToolTimeout:\n"
        "    print('on time')\n"
    )
    root = Path(mt.__file__).parent
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root, timeout=20)
    assert (ended.returncode, ended.stdout) == (0, "on time\n")


@pytest.mark.parametrize("result", [["a part", "another"], {"a": 1}, "x" * 100_000, mt.ToolResult(["a part"])])
def test_what_an_async_tool_gave_is_finished_off_the_loop(result):
    """As that of a tool without `async`. A large image would hold up all other conversations."""
    began, went_on = threading.Event(), threading.Event()

    async def give() -> str:
        """Gives."""
        return result

    def finish(given):
        began.set()
        assert went_on.wait(20), "the loop stands still"
        return len(str(given))

    async def beside():
        running = asyncio.create_task(run_tool(give, {}, 60.0, finish))
        while not began.is_set():
            await asyncio.sleep(0.01)
        went_on.set()
        return await running

    assert asyncio.run(beside()) == len(str(result))


def test_what_an_async_tool_gave_may_not_be_finished():
    """The error is the tool's; a short text needs no thread."""
    threads = []

    def finish(given):
        threads.append(threading.current_thread() is threading.main_thread())
        raise SystemExit("no") if given else ValueError("nothing was given")

    for result, error in ((["x"], "SystemExit: no"), ([], "nothing was given"), ("", "nothing was given")):

        async def give(result=result) -> str:
            """Gives."""
            return result

        with pytest.raises((ValueError, RuntimeError), match=error):
            asyncio.run(run_tool(give, {}, 60.0, finish))
    assert threads == [False, False, True]
