"""Tools in processes of their own."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from processes import ends
from scripted import ADD, ANSWER, call, make_env, observe, run_many

import mt_grpo_trainer as mt
from mt_grpo.conversation.tools.running import ToolsUnavailable
from mt_grpo.recipe.checks import check_isolated
from mt_grpo.recipe.plugins import load_tools, module_name


def test_a_call_of_sys_exit_ends_neither_the_run_nor_the_loop(isolated):
    """Not even in a task of the tool's own, where asyncio hands it to the thread of the loop."""

    def leave_thread() -> str:
        """Leaves."""
        sys.exit(0)

    async def leave_task() -> str:
        """Leaves."""

        async def part():
            sys.exit(0)

        await asyncio.gather(part(), asyncio.sleep(0))

    calls = [call("leave_thread"), call("leave_task"), call("leave", how="sys.exit(0)"), ADD]
    rollouts = run_many([leave_thread, leave_task, *isolated[:2]], [[*calls, ANSWER]] * 2, max_steps=4)
    for rollout in rollouts:
        assert [turn.observation for turn in rollout.turns[:4]] == [*["Error: SystemExit: 0"] * 3, "5"]
        assert [turn.error for turn in rollout.turns[:4]] == ["tool"] * 3 + [None]


IN_PROCESSES = """
import ctypes, os, re, subprocess, sys, time
from mt_grpo.rollout import ToolResult

time.sleep(float(os.environ.get("IMPORT_SECONDS", 0)))

def add(a: int, b: int) -> str:
    '''Adds.'''
    print("not the answer")
    return str(a + b)

def leave(how: str) -> str:
    '''Ends its process.'''
    if how == "segfault":
        ctypes.string_at(0)
    if how == "sys.exit(0)":
        sys.exit(0)
    os._exit(3)

def lock() -> str:
    '''Backtracks for years, with the interpreter lock held.'''
    if "MARK" in os.environ:
        open(os.environ["MARK"] + "/locked", "w").close()
    return str(re.match(r"(a+)+$", "a" * 60 + "b"))

def give(what: str) -> str:
    '''Returns something.'''
    return {"none": None, "bytes": b"caf\\xc3\\xa9 \\xff", "half": "\\ud800", "dict": {"\u00e9": (1, 2)},
            "huge": "y" * 20_000_000, "pid": os.getpid(), "stdin": sys.stdin.read()}[what]

def fail() -> str:
    '''Raises.'''
    raise LookupError("nothing there")

def start_another() -> str:
    '''Waits for a process of its own.'''
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["MARK"] + "/child", "w").write(str(child.pid))
    child.wait()

async def in_the_loop() -> str:
    '''Runs in the trainer's loop.'''
    return str(os.getpid())

def fork_and_leave() -> str:
    '''Crashes, and leaves a child that has its pipes.'''
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    open(os.environ["MARK"] + "/child", "w").write(str(pid))
    os._exit(3)

def paid(reward: float, error: str | None = None) -> ToolResult:
    '''Gives its turn a reward.'''
    return ToolResult({"a": 5}, reward=reward, error=error)

class Double:
    name = "double"
    schema = {"description": "Doubles.", "parameters": {"properties": {"number": {"type": "integer"}}}}

    def run(self, number):
        return f"{os.getpid()} {2 * number}"

TOOL_FUNCTIONS = [add, leave, lock, give, fail, in_the_loop, start_another, fork_and_leave, paid, Double()]
"""


@pytest.fixture
def isolated(tmp_path) -> list:
    path = tmp_path / "tools.py"
    path.write_text(IN_PROCESSES, encoding="utf-8")
    return load_tools(str(path), isolate=True)


def children(pid: int | None = None) -> set[int]:
    """Processes of this one, or of another one, that run tools."""
    found = ((each.pid, each.info) for each in psutil.process_iter(["ppid", "cmdline"]))
    parent = pid or os.getpid()
    return {k for k, of in found if of["ppid"] == parent and "import serve" in " ".join(of["cmdline"] or ())}


@pytest.mark.parametrize(
    "how, text",
    [
        ("os._exit", "Error: the tool's process ended with exit code 3"),
        ("segfault", "Error: the tool's process ended with exit code -11"),
    ],
)
def test_an_isolated_tool_may_end_its_process(isolated, how, text):
    rollouts = run_many(isolated, [[call("leave", how=how), ADD, ANSWER], [ADD, ADD, ANSWER]])
    assert [turn.observation for turn in rollouts[0].turns] == [text, "5", None]
    assert [turn.observation for turn in rollouts[1].turns] == ["5", "5", None]
    assert rollouts[0].turns[0].error == "tool"


def test_an_isolated_tool_that_holds_the_interpreter_lock_is_killed(isolated):
    """In a thread this call would stop the whole process, its time limit included."""
    before = children()
    rollouts = run_many(isolated, [[call("lock"), ADD, ANSWER]] + [[ADD, ANSWER]] * 3, tool_timeout=3)
    assert [turn.observation for turn in rollouts[0].turns] == ["Error: lock took longer than 3 s", "5", None]
    assert [rollout.turns[0].observation for rollout in rollouts[1:]] == ["5"] * 3
    deadline = time.monotonic() + 5
    while len(children() - before) > 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 1 <= len(children() - before) <= 3  # those that were idle, not the one that hung


@pytest.mark.parametrize(
    "what, result",
    [("none", "null"), ("bytes", "caf\u00e9 \ufffd"), ("dict", '{"\u00e9": [1, 2]}'), ("stdin", ""), ("half", "?"),
     ("huge", "Error: the result is longer than 16 MiB")],
)  # fmt: skip
def test_what_an_isolated_tool_returns(isolated, what, result):
    assert observe(isolated[3], call("give", what=what)).observation == result


@pytest.mark.parametrize("apart", [False, True])
def test_a_tool_may_say_that_it_failed(isolated, apart):
    """For rewards of calls that ran, and for metrics. A word that they do not know is the tool's own failure."""
    tool = isolated[8] if apart else isolated[8].__wrapped__
    (result,) = observe(tool, call("paid", reward=0.5, error="call")).results
    assert (result.text, result.reward, result.error) == ('{"a": 5}', 0.5, "call")
    (result,) = observe(tool, call("paid", reward=0.5, error="timeout")).results
    assert "the tool's ToolResult has error='timeout', expected 'call' or 'tool'" in result.text
    assert (result.error, result.reward) == ("tool", None)
    assert observe(isolated[0], ADD).results[0].reward is None


def test_isolated_tools_use_their_processes_again(isolated):
    number = observe(isolated[9], call("double", number=4)).observation.split()  # a tool that is an object
    assert number[1] == "8" and number[0] != str(os.getpid())
    pid = call("give", what="pid")
    rollouts = run_many(isolated, [[pid, pid, pid, ANSWER], [pid, call("fail"), pid, ANSWER]])
    seen = [turn.observation for rollout in rollouts for turn in rollout.turns if turn.observation]
    assert "Error: nothing there" in seen and len(set(seen) - {"Error: nothing there"}) == 2
    assert str(os.getpid()) not in seen
    here = observe(isolated[5], call("in_the_loop")).observation
    assert here == str(os.getpid())


def test_the_start_of_a_process_is_not_the_calls_time(isolated, monkeypatch):
    monkeypatch.setenv("IMPORT_SECONDS", "1.5")
    rollouts = run_many(isolated, [[ADD, ADD, ANSWER]] * 2, tool_timeout=1.0)
    assert [turn.observation for rollout in rollouts for turn in rollout.turns] == ["5", "5", None] * 2


@pytest.mark.parametrize("number, name", [(6, "start_another"), (7, "fork_and_leave")])
def test_with_an_isolated_tool_goes_what_it_started(isolated, monkeypatch, tmp_path, number, name):
    """Also if the tool crashes: its child has inherited the pipe for answers, and nobody else would end it."""
    monkeypatch.setenv("MARK", str(tmp_path))
    assert observe(isolated[number], call(name), tool_timeout=2).error == "timeout"
    assert ends(int((tmp_path / "child").read_text()))


def test_a_tools_file_that_cannot_start_in_a_process_is_told(tmp_path, capfd):
    """As where it locks a database, which the trainer has imported and so locked already."""
    path = tmp_path / "tools.py"
    lock = "import fcntl\nheld = open(__file__)\nfcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    path.write_text(lock + IN_PROCESSES, encoding="utf-8")
    with pytest.raises(RuntimeError, match="exit code 1"):
        load_tools(str(path), isolate=True)
    assert "BlockingIOError" in capfd.readouterr().err
    path.write_text("import subprocess\nhelper = subprocess.Popen(['sleep', '600'])\n" + IN_PROCESSES)
    assert observe(load_tools(str(path), isolate=True)[0], ADD).observation == "5"  # it holds the pipes, too
    sys.modules[module_name(str(path), "tools_script")].helper.kill()


def test_isolated_tools_do_not_outlive_their_trainer(tmp_path):
    """Killed while one of its tools hangs, with no chance to tidy up."""
    path = tmp_path / "tools.py"
    path.write_text(IN_PROCESSES, encoding="utf-8")
    code = (
        "import asyncio\n"
        "from mt_grpo.recipe.plugins import load_tools\n"
        "from mt_grpo.conversation.tools.running import run_tool\n"
        f"tool = load_tools({str(path)!r}, isolate=True)[2]\n"
        "asyncio.run(run_tool(tool, {}, 60))\n"
    )
    environ, folder = {**os.environ, "MARK": str(tmp_path)}, Path(mt.__file__).parent
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environ)
    while not (tmp_path / "locked").exists():
        time.sleep(0.05)
    pids = children(trainer.pid)
    assert pids
    trainer.kill()
    trainer.wait()
    assert all(map(ends, pids))


def test_a_tools_file_that_no_longer_imports_ends_the_run(isolated, tmp_path, capfd):
    assert observe(isolated[0], ADD).observation == "5"  # this process stays, and goes on to be used
    (tmp_path / "tools.py").write_text("import nowhere\n")
    with pytest.raises(ToolsUnavailable, match="the tool's process ended with exit code 1. See above"):
        run_many(isolated, [[call("leave", how="os._exit"), ADD, ANSWER]])
    assert "No module named 'nowhere'" in capfd.readouterr().err


def test_isolate_tools_needs_tools_that_were_loaded_so(isolated):
    args = SimpleNamespace(isolate_tools=True)
    check_isolated(args, make_env(isolated))
    with pytest.raises(ValueError, match="isolate_tools: the tools run in threads"):
        check_isolated(args, make_env([isolated[0].__wrapped__]))
