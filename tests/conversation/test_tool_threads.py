"""Tools that take time: threads, timeouts, hangs."""

import asyncio
import sys
import threading
import time
from multiprocessing.pool import ThreadPool

import pytest
from scripted import ADD, ANSWER, Scripted, add, call, make_env, run_many, verify, within

from mt_grpo.base import errors
from mt_grpo.base.event_loop import background_loop
from mt_grpo.conversation.tools.running import HUNG, ToolsUnavailable, run_tool


def test_calls_share_a_loop_and_run_at_the_same_time():
    """More of them than asyncio's own pool has threads here."""
    everyone = threading.Barrier(8)

    def first(_):
        everyone.wait(30)
        return background_loop("asked-for-first")

    with ThreadPool(8) as threads:
        assert len(set(threads.map(first, range(8), chunksize=1))) == 1
    everyone = threading.Barrier(32)

    def work() -> str:
        """Works until all others work."""
        everyone.wait(30)
        return "done"

    rollouts = run_many([work], [[call("work"), ANSWER]] * 32)
    assert all(r.turns[0].observation == "done" for r in rollouts)


@pytest.mark.parametrize("limit", [1, 3])
def test_max_concurrent_tools_is_honoured(limit):
    running, most, lock = set(), [], threading.Lock()

    def note(name: str, begins: bool) -> None:
        with lock:
            (running.add if begins else running.discard)(name)
            most.append(len(running))

    def work() -> str:
        """Works."""
        note(name := threading.current_thread().name + str(threading.get_ident()), True)
        time.sleep(0.05)
        note(name, False)
        return "done"

    async def work_async() -> str:
        """Works."""
        note(name := str(id(asyncio.current_task())), True)
        await asyncio.sleep(0.05)
        note(name, False)
        return "done"

    scripts = [[call("work"), ANSWER], [call("work_async"), ANSWER]] * 6
    rollouts = run_many([work, work_async], scripts, max_concurrent_tools=limit)
    assert all(r.turns[0].observation == "done" for r in rollouts)
    assert max(most) == limit


def test_hung_tools_neither_block_the_others_nor_keep_the_process_alive(caplog):
    """One slot, and calls that never return in it: their time limit frees the slot, and no other call's limit runs."""
    errors._told.discard("hung hang")
    release = threading.Event()

    def hang() -> str:
        """Hangs."""
        release.wait(120)
        return "late"

    scripts = [[call("hang"), ANSWER]] * 2 + [[ADD, ANSWER]]
    rollouts = run_many([hang, add], scripts, max_concurrent_tools=1, tool_timeout=2.0)
    assert [r.turns[0].error for r in rollouts] == ["timeout", "timeout", None]
    assert rollouts[2].turns[0].observation == "5"
    said = [r.getMessage() for r in caplog.records if "goes on in its thread" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("hang took longer than 2 s. The call goes on in its thread")
    left = [t for t in threading.enumerate() if t.name == f"{HUNG}hang"]
    assert len(left) == 2 and all(t.daemon for t in left)  # Python does not wait for these at exit
    release.set()
    for thread in left:
        thread.join(20)
    assert not any(t.name.startswith(f"{HUNG}hang") for t in threading.enumerate())


def test_a_slow_tool_holds_up_no_other_conversation():
    """No barrier between conversations: the others are through while one tool works."""
    finished, all_through = [], threading.Event()

    def slow() -> str:
        """Waits for the others."""
        all_through.wait(60)
        return f"{len(finished)} were through"

    class Noting(Scripted):
        async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
            generation = await super().generate(prompt_ids, max_tokens, sampling_params, index)
            if len(self.of(index)) == 3:
                finished.append(index)
            if len(finished) == 3:
                all_through.set()
            return generation

    env, backend = make_env([slow, add]), Noting([[call("slow"), ANSWER]] + [[ADD, ADD, ANSWER]] * 3)
    rollouts = within(lambda: env.generate(["go"] * 4, backend), 90)["rollouts"]
    verify(env, rollouts, backend)
    assert rollouts[0].turns[0].observation == "3 were through"


def test_sys_exit_ends_no_loop_and_a_thread_that_cannot_start_ends_the_run():
    """asyncio hands it to the thread of the loop. It is no mistake of the policy, which must not read it."""

    async def leave() -> str:
        """Leaves."""

        async def part():
            sys.exit(0)

        await asyncio.gather(part(), asyncio.sleep(0))

    (rollout,) = run_many([leave, add], [[call("leave"), ADD, ANSWER]])
    assert [turn.observation for turn in rollout.turns[:2]] == ["Error: SystemExit: 0", "5"]
    before = threading.stack_size(1 << 47)  # more than a process can address
    try:
        with pytest.raises(ToolsUnavailable, match="can't start new thread"):
            asyncio.run(run_tool(add, {"a": 2, "b": 3}, 5))
    finally:
        threading.stack_size(before)
