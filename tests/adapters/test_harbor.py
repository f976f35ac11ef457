"""Task folders of Harbor: what is read, where commands run, what tests say. Only the policy is scripted."""

import asyncio
import functools
import io
import json
import logging
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from scripted import Scripted, call, make_env, within

import mt_grpo_trainer as mt
from mt_grpo.adapters.harbor import check, commands, docker, environment, sandbox as sandbox_module
from mt_grpo.adapters.harbor.archives import TaskArchive, tree_archive
from mt_grpo.adapters.harbor.bubblewrap import BubblewrapSandbox, remove_left_over
from mt_grpo.adapters.harbor.commands import Outcome, SandboxError, exchange
from mt_grpo.adapters.harbor.dockerfile import DockerfileReader, needed_commands
from mt_grpo.adapters.harbor.environment import (
    HarborEnvironment,
    check_namespaces,
    load_harbor_conversation,
    try_sandbox,
)
from mt_grpo.adapters.harbor.images import NamespaceImages
from mt_grpo.adapters.harbor.sandbox import NamespaceSandbox, SandboxLimits, numbers_of_users
from mt_grpo.adapters.harbor.tasks import Allowed, read_task, read_tasks, task_folders
from mt_grpo.adapters.harbor.toml_tables import BrokenTask, NeedsMore
from mt_grpo.adapters.harbor.users import UserNumbers
from mt_grpo.adapters.harbor.verdict import TestsSaid, outcome_of_steps, read_reward_files, rewards_of
from mt_grpo.rollout import StopReason

pytestmark = pytest.mark.faults  # a group of scripts/test.sh

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "hf_recipes/tiny/harbor"
TOML = 'schema_version = "1.4"\n[task]\nname = "own/{name}"\n[verifier]\ntimeout_sec = 20.0\n'
STRAY = "mt-grpo-harbor-test"  # a file that an attempt makes where nobody may: harmless where it can
OVER = "over"  # as soon as a command prints it, the time of all time limits is over: see `clock`
LONG = 5000.0
PASSES = '[ "$(cat /app/out)" = right ]\necho $(($? == 0)) > /logs/verifier/reward.txt\n'


@functools.cache
def no_namespaces() -> str:
    try:
        check_namespaces()
    except ValueError as error:
        return str(error)
    return ""


needs_namespaces = pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces() or "there are some")
# With root as users of their own, without it in namespaces of users, and by bubblewrap.
MODES = [pytest.param(True, id="user", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")), False]
no_bubblewrap = try_sandbox(BubblewrapSandbox)[0]
needs_bubblewrap = pytest.mark.skipif(bool(no_bubblewrap), reason=no_bubblewrap or "it is there")
WAYS = [*MODES, pytest.param("bubblewrap", marks=[needs_bubblewrap, pytest.mark.slow])]


def sandbox_of(way, limits, **more):
    """A sandbox by one of `WAYS`."""
    if way == "bubblewrap":
        return BubblewrapSandbox(limits, **more)
    return NamespaceSandbox(limits, as_user=way, **more)


def write_task(folder, name="one", toml="", dockerfile="FROM debian:12\nWORKDIR /app\n", tests=PASSES, **files):
    """A task folder. `files` are texts by path, None: without this file."""
    task = folder / name
    whole = {
        "task.toml": TOML.format(name=name) + toml, "instruction.md": "Write right into out.",
        "environment/Dockerfile": dockerfile, "tests/test.sh": tests, **files,
    }  # fmt: skip
    for path, text in whole.items():
        if text is not None:
            (task / path).parent.mkdir(parents=True, exist_ok=True)
            (task / path).write_text(text)
    return task


STEPS = '[[steps]]\nname = "first"\n[[steps]]\nname = "second"\n'


def write_steps(folder, name="steps", toml=STEPS, **files):
    """A task of two steps: `first` wants /app/a, `second` wants /app/b."""
    wants = "test -e /app/{}\necho $(($? == 0)) > /logs/verifier/reward.txt\n"
    whole = {
        "instruction.md": None, "tests/test.sh": None, "steps/first/instruction.md": "Make a.",
        "steps/second/instruction.md": "Make b.", "steps/first/tests/test.sh": wants.format("a"),
        "steps/second/tests/test.sh": wants.format("b"), **files,
    }  # fmt: skip
    return write_task(folder, name, toml, **whole)


def harbor(images=None, **settings):
    """A class of environments, as a recipe makes one."""
    own = {"images": images or NamespaceImages(), "known": {}, "told": set(), **settings}
    return type("harbor", (HarborEnvironment,), own)


def play(folder, *turns, cls=None, max_steps=5, rollouts=1, close=True, **settings):
    """Conversations about the tasks of a folder, one for each row and rollout."""
    cls = cls or harbor(most_turns=max_steps + 1)
    rows = [row for row in cls.read_folder(folder, "train") for _ in range(rollouts)]
    env = make_env([], max_steps=max_steps, environment=cls, **{"max_completion_length": 20_000, **settings})
    scripts = [list(turns)] * len(rows)
    found = within(lambda: env.generate([row["prompt"] for row in rows], Scripted(scripts), rows=rows), 120)[
        "rollouts"
    ]
    if close:
        asyncio.run(env.environments.close(found))
    return found


def bash(command):
    return call("bash", command=command)


@pytest.fixture
def clock(monkeypatch):
    """Time limits end with an event, however slow the machine is: with the word `OVER` in what a command prints."""
    later, ends = [0.0], commands.kept_ends

    def kept(head, tail, part, *most):
        later[0] += 2 * LONG * (OVER.encode() in part)
        return ends(head, tail, part, *most)

    monkeypatch.setattr(commands, "kept_ends", kept)
    monkeypatch.setattr(commands, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later[0]))


@pytest.fixture(params=WAYS)
def sandbox(request):
    if no_namespaces():
        pytest.skip(no_namespaces())
    made = sandbox_of(request.param, SandboxLimits(memory_mb=1024, storage_mb=64))
    yield made
    made.close()


def run(sandbox, command, folder="/", seconds=60.0):
    """(exit code, what it printed)."""
    outcome = sandbox.shell(command, folder, "/", {}, seconds)
    assert not outcome.why, outcome
    return outcome.code, outcome.text(100_000)


def archive_of(**files):
    """An archive of files, whose names have _ for a dot."""
    archive = TaskArchive()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = Path(folder) / name.replace("_", ".")
            path.write_text(text)
            archive.add_file(path.name, path)
    return archive.tar()


# -- the sandbox ------------------------------------------------------------------------------------------------------


def test_a_sandbox_shows_nothing_of_the_machine_but_its_programs(sandbox, tmp_path):
    """No file of the machine outside the system's folders, no process, no network, no privilege, no variable."""
    (tmp_path / "secret").write_text("x")
    code, said = run(sandbox, f"ls -A / | tr '\\n' ' '; echo; cat {tmp_path}/secret {ROOT}/README.md; id -u")
    top = set(said.splitlines()[0].split())
    system = {name for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32") if Path("/", name).exists()}
    assert top == system | set("usr etc proc dev tests solution logs root home opt srv mnt run tmp var".split())
    assert said.count("No such file or directory") == 2 and code == 0
    assert int(said.splitlines()[-1]) != 0
    _, said = run(sandbox, "ls /proc | grep -c '^[0-9]'; env; echo; tail -n +3 /proc/net/dev")
    processes, devices = int(said.split()[0]), said.split("\n\n")[1].splitlines()
    assert processes < 8 and "PYTHONPATH" not in said and "PYTEST_CURRENT_TEST" not in said and "HOME=/root" in said
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]
    _, said = run(sandbox, "grep -E '^(CapEff|CapPrm|CapBnd|NoNewPrivs)' /proc/self/status")
    caps = dict(line.split(":\t") for line in said.splitlines())
    assert caps["CapEff"] == caps["CapPrm"] == "0" * 16 and caps["NoNewPrivs"] == "1"


@pytest.mark.parametrize("attempt", [
    "mv /tests /t || rm -rf /tests || rmdir /tests", "mv /logs /l", "mv /logs/verifier /logs/v",
    "echo 1 > /logs/verifier/reward.txt", "mkdir -p /tests/x", "mv /usr /u",
    f"touch /usr/bin/{STRAY}", f"touch /etc/{STRAY}", "umount /tests", "mount -t tmpfs x /tests",
    "ln -sfn /app /tests && test -L /tests",
    "unshare --mount true && umount /usr", "nsenter --target 1 --mount true && umount /usr", "rm -rf /dev/null /dev/*",
])  # fmt: skip
def test_what_the_tests_stand_on_cannot_be_replaced(sandbox, attempt):
    """Whatever is tried, the tests find themselves, an empty folder for their reward, and the machine's programs."""
    run(sandbox, f"mkdir -p /app; cd /app; {attempt}")
    strays = [path for path in (Path("/usr/bin") / STRAY, Path("/etc") / STRAY) if path.exists()]
    for path in strays:
        path.unlink()
    assert not strays
    tests = 'ls -A /tests /logs/verifier | tr "\\n" " "; command -v python3 bash; echo 0.5 > /logs/verifier/reward.txt'
    outcome = sandbox.judge(archive_of(test_sh=tests), "/app", {}, 60.0)
    assert outcome.text(999).split() == "/logs/verifier: /tests: test.sh /usr/bin/python3 /usr/bin/bash".split()
    assert rewards_of(read_reward_files(outcome.control)) == ({"reward": 0.5}, "")


def test_a_tasks_variables_are_those_of_its_commands_alone(sandbox):
    """With PATH or BASH_ENV of the task, the policy's programs would run in place of those that root runs."""
    env = {"PATH": "/app/bin:/usr/bin:/bin", "BASH_ENV": "/app/said"}
    fakes = "for name in nsenter unshare setpriv mount env bash; do cp /app/fake /app/bin/$name; done"
    run(
        sandbox,
        f"mkdir -p /app/bin; printf '#!/bin/sh\necho fake $(id -u)\n' > /app/fake; chmod +x /app/fake; {fakes}",
    )
    outcome = sandbox.shell('echo "$PATH"', "/", "/", env, 60.0)
    assert outcome.code == 0 and outcome.text(999).strip().splitlines()[-1] == env["PATH"]
    assert "fake" not in outcome.text(999) and b"fake" not in bytes(outcome.control)


@pytest.fixture(params=WAYS)
def desk(request, tmp_path):
    """The desk of a task, whose files are there."""
    if no_namespaces():
        pytest.skip(no_namespaces())
    files = {"environment/x": "x\n", "environment/one.sh": "echo one\n"}
    task = read_task(write_task(tmp_path, dockerfile="FROM debian\nWORKDIR /app\nCOPY x /data\n", **files), Allowed())
    made = NamespaceImages(functools.partial(sandbox_of, request.param)).open(task)
    yield made
    made.sandbox.close()


def test_what_stands_in_the_root_cannot_be_replaced(desk):
    """A test would find the policy's `conftest.py`, or its programs in `/bin`."""
    stands = "find / /dev -maxdepth 1 -printf '%p %y %l %#m\\n' | sort"
    before = run(desk.sandbox, stands)[1]
    for attempt in (
        "touch /conftest.py || mkdir /new || chmod 777 /", "rm -f /bin || mv /bin /tmp || ln -sfn /app /bin",
        "rm -f /lib64 || mv /lib64 /tmp", "rm -f /dev/fd || ln -sfn /app /dev/fd", "mv /app /tmp || rmdir /app",
        "mount -o remount,rw / || umount /", "mkdir /logs/home/x || mv /logs/home /tmp",
    ):  # fmt: skip
        code, said = run(desk.sandbox, attempt, "/app")
        assert code != 0, (attempt, said)
    assert run(desk.sandbox, stands)[1] == before and "/conftest.py" not in before


def test_what_a_task_brings_can_be_written(desk):
    """Files directly in the root, too."""
    assert run(desk.sandbox, "echo y > /data; cat /data; for f in /app /root /tmp /srv; do echo > $f/f; done") == (
        0, "y\n",
    )  # fmt: skip


EVIL = """
for name in reward.txt reward.json; do echo '{"reward": 1}' > /logs/verifier/$name; done
cat /tests/test.sh /logs/home/*
umount /logs/verifier && echo 1 > /logs/verifier/reward.txt
unshare --user --map-root-user --mount umount /logs/verifier && echo 1 > /logs/verifier/reward.txt
ls /proc | grep -c '^[0-9]'
echo "$HOME $PYTHONSAFEPATH. $(pwd)"
read line; echo "$line"
kill -KILL 0
kill -KILL -1
"""
TESTS_OF_EVIL = """
exec 2> /dev/null  # bash says there which of its jobs was killed
cd /app; echo given | $AS_AGENT bash /app/evil 2> /dev/null; echo "code $?"
cd /tests; $AS_AGENT ls -A . /logs/verifier
cd /app; timeout 0.2 $AS_AGENT sleep 1000; echo "code $?"
runs() { ps -e -o args | grep -q "^sleep 4242"; }
$AS_AGENT sleep 4242 & until runs; do sleep 0.01; done; kill -KILL $!; while runs; do sleep 0.01; done
PATH=/app/fake:$PATH BASH_ENV=/app/evil $AS_AGENT sh -c 'exit 3' < /dev/null > /dev/null 2>&1; echo "code $?"
$AS_AGENT nothing 2> /dev/null; echo "code $?"
echo 0.25 > /logs/verifier/reward.txt
"""


def test_a_program_of_the_policys_that_tests_start_cannot_judge_itself(desk):
    """It writes no reward, reads no tests, and ends nothing but itself. Its input, output and exit code are kept."""
    fakes = "for name in mount setsid setpriv env; do printf '#!/bin/sh\\nexec bash /app/evil' > fake/$name; done"
    if sandbox_module.no_nested_namespaces(type(desk.sandbox), desk.sandbox.as_user):
        pytest.skip("this way allows a command no namespaces, and a warning says so")
    run(desk.sandbox, f"cat > evil <<'END'\n{EVIL}END\nmkdir fake; {fakes}; chmod +x fake/*", "/app")
    outcome = desk.sandbox.judge(archive_of(test_sh=TESTS_OF_EVIL), "/app", {}, 60.0)
    *_, processes, where, line, killed = outcome.text(9999).partition("\n.:")[0].splitlines()
    assert int(processes) <= 6 and (where, line, killed) == ("/root . /app", "given", "code 137")
    assert outcome.text(9999).partition("code 137\n")[2] == (".:\n\n/logs/verifier:\ncode 124\ncode 3\ncode 127\n")
    assert "TESTS" not in outcome.text(9999) and "AS_AGENT" not in outcome.text(9999)
    assert (outcome.code, rewards_of(read_reward_files(outcome.control))) == (0, ({"reward": 0.25}, ""))


OF_ANOTHER_USER = """
import os, sys
from mt_grpo.adapters.harbor.sandbox import NamespaceSandbox, SandboxLimits
user = int(sys.argv[1])
os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
sandbox = NamespaceSandbox(SandboxLimits())
assert not sandbox.as_user
sandbox.seal()
outcome = sandbox.judge(sys.stdin.buffer.read(), "/", {}, 60.0)
sandbox.close()
print(outcome.text(9999), outcome.control)
os.rmdir(f"/tmp/harbor-sandbox-{user}")
"""


@pytest.mark.skipif(os.geteuid() != 0 or bool(no_namespaces()), reason="needs root, which becomes another user")
def test_a_trainer_of_another_user_than_root_judges():
    """In a namespace of users where its number is 0. Of root's own number, which is 0 outside, more is allowed."""
    tests = (
        "touch /tests/x /x\n$AS_AGENT touch /logs/verifier/x\n$AS_AGENT id -u\necho 0.5 > /logs/verifier/reward.txt\n"
    )
    users = numbers_of_users()
    user = users.take()
    try:
        program = [sys.executable, "-c", OF_ANOTHER_USER, str(user)]
        env = {**os.environ, "TMPDIR": "/tmp"}
        said = subprocess.run(program, cwd=ROOT, env=env, input=archive_of(test_sh=tests), capture_output=True)
    finally:
        users.give_back(user)
    printed = said.stdout.decode()
    assert said.returncode == 0, said.stderr.decode()
    assert printed.count("Read-only file system") == 3 and "\n0\n" in printed
    assert printed.endswith(" b'reward.txt 4\\nMC41Cg==\\n'\n")


def test_where_no_namespaces_can_be_nested_tests_are_told_so(sandbox, monkeypatch, caplog):
    monkeypatch.setattr(sandbox_module, "NEW_SPACES", "echo not permitted; false")
    sandbox_module.no_nested_namespaces.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            outcome = sandbox.judge(archive_of(test_sh='echo "<$AS_AGENT>"; $AS_AGENT echo on'), "/", {}, 60.0)
    finally:
        sandbox_module.no_nested_namespaces.cache_clear()
    assert outcome.text(99) == "<>\non\n" and "no namespaces of users (not permitted)" in caplog.text


def test_tests_of_many_small_files_have_room(sandbox):
    """Each has a page of memory, however small."""
    archive = TaskArchive()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "one").write_text("1")
        (Path(folder) / "test.sh").write_text("cat /tests/many/* | wc -c > /logs/verifier/reward.txt\n")
        archive.add_file("test.sh", Path(folder) / "test.sh")
        for number in range(600):
            archive.add_file(f"many/{number}", Path(folder) / "one")
    outcome = sandbox.judge(archive.tar(), "/", {}, 60.0)
    assert rewards_of(read_reward_files(outcome.control)) == ({"reward": 600.0}, "")


def test_tests_that_cannot_begin_are_an_error_of_the_sandbox(sandbox, monkeypatch):
    """And no reward of 0."""
    if isinstance(sandbox, BubblewrapSandbox):
        with pytest.raises(SandboxError, match="a command could not begin: tar: "):
            sandbox.judge(b"no archive", "/", {}, 60.0)
        return
    monkeypatch.setattr(sandbox_module, "kilobytes_of", lambda archive: 4)
    with pytest.raises(SandboxError, match="a command could not begin: tar: test.sh: "):
        sandbox.judge(archive_of(test_sh="#" * 9000), "/", {}, 60.0)
    monkeypatch.setattr(sandbox_module, "JUDGE", "sleep 1000\n" + sandbox_module.JUDGE)
    monkeypatch.setattr(commands, "START_SECONDS", 0.1)
    with pytest.raises(SandboxError, match="a command could not begin: it took longer than 0.1 s"):
        sandbox.judge(archive_of(test_sh="true"), "/", {}, 60.0)


@pytest.mark.skipif(os.geteuid() != 0 or bool(no_namespaces()), reason="needs root")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_mounted_within_the_systems_folders_cannot_be_written(way):
    """A file system within `/usr`, in a namespace of mounts that ends with this test."""
    by_bubblewrap = way == "bubblewrap"
    made = "BubblewrapSandbox(SandboxLimits())" if by_bubblewrap else f"NamespaceSandbox(SandboxLimits(), {way})"
    program = (
        "from mt_grpo.adapters.harbor.bubblewrap import BubblewrapSandbox\n"
        "from mt_grpo.adapters.harbor.sandbox import NamespaceSandbox, SandboxLimits\n"
        f"sandbox = {made}\n"
        f"print(sandbox.shell('touch /usr/local/share/{STRAY}', '/', '/', {{}}, 60.0).text(300))\nsandbox.close()\n"
    )
    mounts = 'mount -n -t tmpfs -o mode=1777 tmpfs /usr/local/share && exec "$@"'
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "bash",
        "-c",
        mounts,
        "-",
        sys.executable,
        "-c",
        program,
    ]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "Read-only file system" in said.stdout, said
    assert not (Path("/usr/local/share") / STRAY).exists()


def test_nothing_of_a_command_runs_behind_it(sandbox):
    """Neither in the background, nor as a daemon, nor in the tests; nor does anything of the tests run behind them."""
    own = secrets.token_hex(8)
    stays = f": {own}; echo $$ >> /tmp/started; while true; do sleep 0.01; done"
    started = "until [ $(cat /tmp/started | wc -l) = 2 ]; do sleep 0.01; done"
    code, _ = run(sandbox, f"(setsid bash -c '{stays}' > /dev/null 2>&1 &) ; nohup bash -c '{stays}' & {started}")
    assert code == 0
    assert not [each.pid for each in psutil.process_iter(["cmdline"]) if own in " ".join(each.info["cmdline"] or ())]
    forger = (
        "(while true; do echo 1 > /logs/verifier/reward.txt; done) & until [ -e /logs/verifier/reward.txt ]; do "
        "sleep 0.01; done; echo 0 > /logs/verifier/reward.json"
    )
    outcome = sandbox.judge(archive_of(test_sh=f"{forger}\nps -e | grep -c date"), "/", {}, 60.0)
    assert set(read_reward_files(outcome.control)) == {"reward.json", "reward.txt"}
    run(sandbox, "true")  # the namespace of the tests has ended, or this would see its files
    assert run(sandbox, "ls -A /logs/verifier /tests")[1].split() == ["/logs/verifier:", "/tests:"]


def test_tests_run_alone(sandbox):
    """A call that was given up may still run when its conversation is over, or be about to begin."""
    outcomes = []

    def given_up(command):
        thread = threading.Thread(target=lambda: outcomes.append(sandbox.shell(command, "/", "/", {}, 900.0)))
        thread.start()
        return thread

    first = given_up("touch /tmp/on; sleep 100000")
    assert run(sandbox, "until [ -e /tmp/on ]; do sleep 0.01; done; rm /tmp/on")[0] == 0
    tests = "until [ -e /tmp/end ]; do sleep 0.01; done; echo 1 > /logs/verifier/reward.txt"
    judged = []
    judge = threading.Thread(target=lambda: judged.append(sandbox.judge(archive_of(test_sh=tests), "/", {}, 1.0)))
    judge.start()
    first.join(60)
    assert outcomes.pop().code != 0  # it was ended
    second = given_up("touch /tmp/end")
    judge.join(60)
    second.join(60)
    assert judged[0].why == "time" and outcomes.pop().code == 0  # nobody made /tmp/end while the tests ran
    assert run(sandbox, "ls /tmp")[1] == "end\n"


def test_the_folder_is_kept_and_nothing_else_of_a_shell(sandbox):
    outcome = sandbox.shell("mkdir -p '/tmp/a b'; cd '/tmp/a b'; X=1; export Y=1; false", "/", "/", {}, 60.0)
    assert (outcome.code, environment.folder_of(outcome.control)) == (1, "/tmp/a b")
    assert run(sandbox, "pwd; echo $X$Y", "/tmp/a b") == (0, "/tmp/a b\n\n")
    outcome = sandbox.shell("cd /usr; exit 7", "/tmp/a b", "/", {}, 60.0)
    assert (outcome.code, environment.folder_of(outcome.control)) == (7, "/usr")
    outcome = sandbox.shell("rmdir '/tmp/a b'; pwd", "/tmp/gone", "/tmp", {}, 60.0)  # what is gone: the task's folder
    assert outcome.text(99) == "/tmp\n"


def test_limits_of_time_output_memory_and_files(sandbox, clock):
    outcome = sandbox.shell("sleep 100000", "/", "/", {}, 0.1)
    assert (outcome.code, outcome.why, outcome.text(99)) == (None, "time", "")
    outcome = sandbox.shell(f"echo {OVER}; sleep 100000", "/", "/", {}, LONG)
    assert (outcome.code, outcome.why, outcome.text(99)) == (None, "time", f"{OVER}\n") and outcome.seconds > LONG
    outcome = sandbox.shell("echo first; yes", "/", "/", {}, 60.0)
    assert outcome.why == "output" and outcome.text(40).startswith("first\ny\n... [") is False
    assert outcome.text(1000).startswith("first\n") and len(outcome.text(1000)) < 1100
    code, said = run(sandbox, "python3 -c 'b = bytes(2 * 2**30)'")
    assert code == 1 and "MemoryError" in said
    code, said = run(sandbox, "head -c 100M /dev/zero > /tmp/large; stat -c %s /tmp/large")
    assert re.search("No space left|File size limit exceeded", said) and int(said.split()[-1]) <= 64 * 2**20
    run(sandbox, "rm /tmp/large")
    if sandbox.as_user:  # the kernel counts no processes of the machine's root, which this is else
        forks = (
            "import os\nn = 0\ntry:\n  while os.fork() or n > 999: n += 1\n"
            "except OSError: print(n, flush=True)\nos._exit(0)"
        )
        assert 200 < int(run(sandbox, f"python3 -c '{forks}'")[1].split()[0]) < 256


def test_what_has_always_more_to_say_has_a_time_limit():
    """Also beside its output. All is there to be read here, when the time is over."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(["bash", "-c", "echo begun >&2; echo more >&2"], **pipes) as process:
        process.wait()
        outcome = Outcome(None)
        assert exchange(process, b"", -1.0, outcome, False) == "time" and outcome.began is not None


def test_what_is_asked_from_a_terminal_ends(sandbox):
    assert run(sandbox, 'read line; echo "$? $line"; cat') == (0, "1 \n")


def test_a_closed_sandbox_has_ended_and_says_so(sandbox):
    """Also while a command runs, in another thread."""
    seen = []

    def long():
        try:
            sandbox.shell("echo; sleep 1000", "/", "/", {}, 900.0)
        except SandboxError as error:
            seen.append(str(error))

    thread = threading.Thread(target=long, daemon=True)
    thread.start()
    while not sandbox._commands.running:
        time.sleep(0.01)
    held = [] if isinstance(sandbox, BubblewrapSandbox) else [psutil.Process(sandbox._holder.pid)]
    sandbox.close()
    thread.join(60)
    assert not thread.is_alive() and seen == ["it was closed meanwhile"]
    assert not any(holder.is_running() for holder in held)
    with pytest.raises(SandboxError, match="it was closed"):
        sandbox.shell("true", "/", "/", {}, 60.0)
    sandbox.close()


def test_a_holder_that_was_killed_is_no_fault_of_a_command(sandbox):
    """Nor a folder of files that was deleted."""
    if isinstance(sandbox, BubblewrapSandbox):
        shutil.rmtree(sandbox._folder)
    else:
        sandbox._holder.kill()
        sandbox._holder.wait()
    with pytest.raises(SandboxError, match="has ended|was closed|is gone"):
        sandbox.shell("true", "/", "/", {}, 60.0)


@needs_namespaces
def test_nothing_is_left_where_the_trainer_is_killed(tmp_path):
    program = (
        "import sys, threading\nfrom mt_grpo.adapters.harbor.sandbox import NamespaceSandbox\n"
        "s = NamespaceSandbox()\n"
        "threading.Thread(target=s.shell, args=('sleep 1000', '/', '/', {}, 900.0)).start()\n"
        "while not s._commands.running: pass\n"
        "print(s._holder.pid, [p.pid for p in s._commands.running][0], flush=True)\nthreading.Event().wait()\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    holder, command = (psutil.Process(int(pid)) for pid in trainer.stdout.readline().split())
    while not any(p.name() == "sleep" for p in command.children(recursive=True)):
        time.sleep(0.02)
    below = [holder, command, *command.children(recursive=True)]
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    gone, alive = psutil.wait_procs(below, timeout=60)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(os.geteuid() != 0 or bool(no_namespaces()), reason="needs root")
def test_each_sandbox_has_a_user_and_files_of_its_own():
    one, two = NamespaceSandbox(), NamespaceSandbox()
    try:
        users = [int(run(each, "id -u; touch /tmp/mine")[1]) for each in (one, two)]
        assert len(set(users)) == 2 and min(users) >= 64000
        run(one, "touch /root/one")
        assert run(two, "ls -A /root")[1] == ""
    finally:
        one.close()
        two.close()


@pytest.mark.skipif(os.geteuid() != 0 or bool(no_namespaces()), reason="needs root")
def test_a_closed_sandbox_gives_its_user_back():
    sandbox = NamespaceSandbox()
    number = sandbox._user
    assert number in numbers_of_users()._held
    sandbox.close()
    assert number not in numbers_of_users()._held


@needs_namespaces
def test_a_trainer_with_many_open_files_runs_commands():
    """Connections of a server and data files are some thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        sandbox = NamespaceSandbox()
        assert run(sandbox, "echo here") == (0, "here\n")
        sandbox.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_numbers_of_users_are_held_until_they_are_given_back(tmp_path):
    one, two = UserNumbers(tmp_path), UserNumbers(tmp_path)
    one._next = two._next = 0
    numbers = [one.take(), two.take(), one.take()]
    assert len(set(numbers)) == 3
    one.give_back(numbers[0])
    two._next = 0
    assert two.take() == numbers[0]
    for _ in range(1000 - 3):
        one.take()
    with pytest.raises(RuntimeError, match="All 1000 users"):
        one.take()
    for each in (one, two):
        for number in list(each._held):
            each.give_back(number)


def test_a_machine_without_namespaces_is_told_what_to_do(monkeypatch):
    """`unshare` that may not: as in a container of Docker's default."""
    monkeypatch.setattr("mt_grpo.adapters.harbor.sandbox.SET_UP", "echo unshare failed: not permitted >&2; exit 1")
    monkeypatch.setattr("mt_grpo.adapters.harbor.bubblewrap.TOOLS", ("no-bwrap",))
    with pytest.raises(
        ValueError, match="cannot run a sandbox: unshare failed: not permitted. Expected Docker, or nam"
    ):
        check_namespaces()
    monkeypatch.setattr("mt_grpo.adapters.harbor.sandbox.PATH", "/nowhere")
    with pytest.raises(ValueError, match="unshare, nsenter, .* cannot be found in /nowhere"):
        check_namespaces()


# -- by bubblewrap ----------------------------------------------------------------------------------------------------


@needs_bubblewrap
def test_bubblewrap_is_taken_where_no_namespaces_of_our_own_can_be_made(tmp_path, monkeypatch, caplog, capsys):
    """A line says so. A program of the user's cannot work there."""
    monkeypatch.setattr("mt_grpo.adapters.harbor.sandbox.SET_UP", "echo unshare failed: not permitted >&2; exit 1")
    with caplog.at_level(logging.WARNING):
        assert check_namespaces() is BubblewrapSandbox
    assert "Task folders run by bubblewrap (bwrap): this machine allows no namespaces" in caplog.text
    assert "(unshare failed: not permitted)" in caplog.text
    with pytest.raises(ValueError, match="cannot run a sandbox: unshare failed"):
        check_namespaces(program="bash")
    write_task(tmp_path, "a", **{"solution/solve.sh": "echo right > out\n"})
    assert check.main([str(tmp_path), "--docker", "never"]) == 0
    assert capsys.readouterr().out.splitlines() == ["by bubblewrap:", "   0 a: untouched 0, solved 1"]


BY_BUBBLEWRAP = """
import os, sys
from mt_grpo.adapters.harbor.bubblewrap import BubblewrapSandbox
user = int(sys.argv[1])
os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
sandbox = BubblewrapSandbox()
assert sandbox.shell("echo no > /tests/x || mkdir /own; touch /app; mkdir /tmp/a", "/", "/", {}, 60.0).code == 0
sandbox.seal()
said = sandbox.shell("id -u; touch /x /usr/x /tests/x; cat /proc/self/status | grep CapEff; touch /tmp/a/b", "/", "/",
                     {}, 60.0).text(9999)
outcome = sandbox.judge(sys.stdin.buffer.read(), "/", {}, 60.0)
sandbox.close()
print(said, outcome.text(9999), outcome.control, os.listdir(f"/tmp/harbor-bubblewrap-{user}"))
os.rmdir(f"/tmp/harbor-bubblewrap-{user}")
"""


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which becomes another user")
def test_by_bubblewrap_a_trainer_of_another_user_than_root_judges():
    tests = "ls -A /tests /logs/verifier; touch /tests/x /x; echo 0.5 > /logs/verifier/reward.txt\n"
    users = numbers_of_users()
    user = users.take()
    try:
        program = [sys.executable, "-c", BY_BUBBLEWRAP, str(user)]
        env = {**os.environ, "TMPDIR": "/tmp"}
        said = subprocess.run(program, cwd=ROOT, env=env, input=archive_of(test_sh=tests), capture_output=True)
    finally:
        users.give_back(user)
    printed = said.stdout.decode()
    assert said.returncode == 0, said.stderr.decode()
    assert printed.startswith(f"{user}\n") and "CapEff:\t0000000000000000" in printed
    assert printed.count("Read-only file system") == 5 and "/logs/verifier:\n\n/tests:\ntest.sh\n" in printed
    assert printed.endswith(r" b'reward.txt 4\nMC41Cg==\n' []" + "\n")


@needs_bubblewrap
def test_by_bubblewrap_links_of_a_task_lead_nowhere(tmp_path):
    """A RUN makes a link in place of a folder: nothing of the machine's is bound by it."""
    (tmp_path / "secret").write_text("x")
    sandbox = BubblewrapSandbox(SandboxLimits(1024, 64))
    try:
        assert run(sandbox, f"rmdir /srv && ln -s {tmp_path} /srv && ln -s {tmp_path} /own")[0] == 0
        sandbox.seal()
        code, said = run(sandbox, "cat /srv/secret; cat /own/secret; touch /srv/x")
    finally:
        sandbox.close()
    assert said.count("No such file or directory") == 3 and os.listdir(tmp_path) == ["secret"]


@needs_bubblewrap
def test_by_bubblewrap_nothing_is_left_on_the_disk(tmp_path):
    """Also what the policy made unreadable, and what a trainer left that was killed."""
    sandbox = BubblewrapSandbox(SandboxLimits(1024, 64))
    run(sandbox, "mkdir -p /tmp/a/b; touch /tmp/a/b/c; chmod 000 /tmp/a/b /tmp/a")
    assert sandbox._folder.is_dir()
    sandbox.close()
    assert not sandbox._folder.exists()
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for name in (f"{gone.pid}-a", f"{os.getpid()}-b", "other"):
        (tmp_path / name).mkdir()
    remove_left_over(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([f"{os.getpid()}-b", "other"])


# -- what is read -----------------------------------------------------------------------------------------------------


def test_a_task_is_read_as_harbor_writes_it(tmp_path):
    """Settings of schema 1.4, those of before, and keys that nobody knows."""
    toml = (
        '[agent]\ntimeout_sec = 90\n[environment]\nmemory = "1G"\nstorage_mb = 100\ncpus = 2\nworkdir = "/work"\n'
        'color = "red"\n[environment.env]\nMODE = "${MODE:-fast}"\n[verifier.env]\nDEEP = "1"\n'
        '[solution.env]\nA = "b"\n'
    )
    task = read_task(write_task(tmp_path, toml=toml), Allowed())
    assert (task.name, task.workdir, task.cpus, task.env) == ("own/one", "/work", 2, {"MODE": "fast"})
    assert (task.limits.memory_mb, task.limits.storage_mb, task.solution_env) == (1024, 100, {"A": "b"})
    (step,) = task.steps
    assert (step.name, step.agent_seconds, step.verifier_seconds, step.env) == ("", 90, 20, {"DEEP": "1"})


def test_steps_have_the_tasks_settings_where_they_have_none(tmp_path):
    toml = (
        'multi_step_reward_strategy = "final"\n[[steps]]\nname = "first"\nmin_reward = 0.5\n[steps.agent]\n'
        'timeout_sec = 5\n[[steps]]\nname = "second"\nmin_reward = {style = 1}\n[steps.verifier]\ntimeout_sec = 7\n'
        'env = {B = "2"}\n'
    )
    folder = write_steps(tmp_path, toml="")
    (folder / "task.toml").write_text(
        toml + '[verifier]\ntimeout_sec = 20\nenv = {A = "1"}\n[agent]\ntimeout_sec = 60\n'
    )
    task = read_task(folder, Allowed())
    first, second = task.steps
    assert task.strategy == "final" and [first.agent_seconds, second.agent_seconds] == [5, 60]
    assert [first.verifier_seconds, second.verifier_seconds] == [20, 7]
    assert [first.env, second.env] == [{"A": "1"}, {"A": "1", "B": "2"}]
    assert [first.min_reward, second.min_reward] == [0.5, {"style": 1.0}]


def test_tests_of_a_step_stand_over_those_of_the_task(tmp_path):
    files = {"tests/test.sh": "echo task\n", "tests/help.sh": "echo help\n", "steps/second/tests/test.sh": None}
    task = read_task(write_steps(tmp_path, **files), Allowed())

    def texts(step):
        with tarfile.open(fileobj=io.BytesIO(task.tests(step))) as tar:
            return {m.name: tar.extractfile(m).read().decode() for m in tar if m.isfile()}

    assert texts(task.steps[1]) == {"test.sh": "echo task\n", "help.sh": "echo help\n"}
    assert texts(task.steps[0])["test.sh"].startswith("test -e /app/a") and "help.sh" in texts(task.steps[0])


BROKEN = {
    "tests/test.sh is missing: nothing would say": {"tests": None},
    "instruction.md is missing": {"instruction.md": None},
    "instruction.md is empty": {"instruction.md": " \n"},
    "task.toml is missing": {"task.toml": None},
    "task.toml is no TOML: ": {"task.toml": "[task\n"},
    "task.toml: [agent] timeout_sec is 'long', expected a number above 0": {"toml": '[agent]\ntimeout_sec = "long"\n'},
    "task.toml: [agent] timeout_sec is -1, expected a number": {"toml": "[agent]\ntimeout_sec = -1\n"},
    "task.toml: [agent] is 3, expected a table": {"toml": "", "task.toml": "agent = 3\n"},
    "task.toml: [environment] memory is '2 gigs', expected a size": {"toml": '[environment]\nmemory = "2 gigs"\n'},
    "task.toml: [environment] env.A is 1, expected a text": {"toml": "[environment]\nenv = {A = 1}\n"},
    "task.toml: [environment] workdir is 'app', expected an absolute": {"toml": '[environment]\nworkdir = "app"\n'},
    "task.toml: the name of step 0 is '../x', expected": {"toml": '[[steps]]\nname = "../x"\n'},
    "steps/a/tests/test.sh is missing": {"tests": None, "toml": '[[steps]]\nname = "a"\n'},
    "steps/a/instruction.md is missing": {"toml": '[[steps]]\nname = "a"\n'},
    "task.toml: the file multi_step_reward_strategy is 'max', expected one of mean, final":
        {"task.toml": 'multi_step_reward_strategy = "max"\n'},
    "tests/test.sh is no script of bash": {"tests": "if true; then\n"},
    "environment/Dockerfile is missing": {"dockerfile": None},
    "environment/Dockerfile has no FROM": {"dockerfile": "WORKDIR /app\n"},
    "environment/Dockerfile: COPY 'x.py': there is no such file": {"dockerfile": "FROM debian\nCOPY x.py /app/\n"},
    "task.toml: [environment.healthcheck] has no command": {"toml": "[environment.healthcheck]\nretries = 1\n"},
    "task.toml: [environment] allow_internet is 'no', expected true":
        {"toml": '[environment]\nallow_internet = "no"\n'},
    "task.toml: [agent] network_mode is 'some', expected one of": {"toml": '[agent]\nnetwork_mode = "some"\n'},
    "leads out of environment/": {"dockerfile": "FROM debian\nCOPY ../instruction.md /app/\n"},
}  # fmt: skip


@pytest.mark.parametrize("words", BROKEN)
def test_a_broken_task_is_named_with_its_row(tmp_path, words):
    write_task(tmp_path, "fine")
    write_task(tmp_path, "two", **BROKEN[words])
    with pytest.raises(ValueError) as error:
        read_tasks(task_folders(tmp_path, "train"), Allowed())
    assert str(error.value).startswith("1 of 2 task folders are broken. row 1, two: ") and words in str(error.value)


def test_at_most_five_broken_tasks_are_named(tmp_path):
    for number in range(7):
        write_task(tmp_path, f"t{number}", tests=None)
    with pytest.raises(ValueError, match=r"7 of 7 .* row 4, t4: .* And 2 more\. Mend them"):
        read_tasks(task_folders(tmp_path, "train"), Allowed())


LEFT_OUT = {
    "GPUs": {"toml": "[environment]\ngpus = 1\n"},
    "MCP servers": {"toml": '[[environment.mcp_servers]]\nname = "x"\n'},
    "a hook that collects files": {"toml": "", "task.toml": '[[verifier.collect]]\ncommand = "true"\n'},
    "schema_version 2.0": {"task.toml": 'schema_version = "2.0"\n'},
    "the link /usr/bin/no-python to /usr/bin/python3":
        {"dockerfile": "FROM debian\nRUN mkdir x && ln -s /usr/bin/python3 /usr/bin/no-python\n"},
    "Windows": {"toml": '[environment]\nos = "windows"\n'},
    "[agent] user": {"toml": '[agent]\nuser = "bob"\n'},
    "a separate environment of the verifier": {"toml": "", "task.toml": '[verifier]\nenvironment_mode = "separate"\n'},
    "the machine's variable OPENAI_API_KEY in [environment] env":
        {"toml": '[environment]\nenv = {KEY = "${OPENAI_API_KEY}"}\n'},
    "memory_mb above harbor_memory_mb=4096": {"toml": "[environment]\nmemory_mb = 8192\n"},
    "docker_image": {"toml": '[environment]\ndocker_image = "a/b:1"\n', "dockerfile": None},
    "docker-compose": {"environment/docker-compose.yaml": "services: {}\n"},
    "the network for its tests (curl)": {"tests": "set -e\ncurl -LsSf https://x.org | sh\n" + PASSES},
    "the network for its tests (apt-get)": {"tests": "apt-get -qq update && true\n" + PASSES},
    "the network for its tests (pip)": {"tests": "if true; then pip install x; fi\n" + PASSES},
    "FROM nginx:1": {"dockerfile": "FROM nginx:1\n"},
    "a Dockerfile of several stages": {"dockerfile": "FROM debian AS a\nFROM debian\n"},
    "COPY --from in the Dockerfile": {"dockerfile": "FROM debian\nCOPY --from=a /x /y\n"},
    "COPY to /usr": {"dockerfile": "FROM debian\nCOPY Dockerfile /usr/local/bin/x\n"},
    "WORKDIR to /etc": {"dockerfile": "FROM debian\nWORKDIR /opt/../etc/x\n"},
    "USER in the Dockerfile": {"dockerfile": "FROM debian\nUSER bob\n"},
    "ENTRYPOINT in the Dockerfile": {"dockerfile": "FROM debian\nENTRYPOINT x\n"},
    "ADD from the network": {"dockerfile": "FROM debian\nADD https://x.org/y /y\n"},
    "RUN with a text in the Dockerfile": {"dockerfile": "FROM debian\nRUN <<EOF\nls\nEOF\n"},
    "RUN make in the Dockerfile": {"dockerfile": "FROM debian\nRUN cd /app && make all\n"},
    "RUN curl in the Dockerfile": {"dockerfile": "FROM debian\nRUN echo x | curl -d @- x.org\n"},
    "RUN git clone in the Dockerfile": {"dockerfile": "FROM debian\nRUN git clone https://x.org/y\n"},
    "the package no-such-package of Debian": {"dockerfile": "FROM debian\nRUN apt-get install -y no-such-package\n"},
    "the package no-such==1.0 of Python": {"dockerfile": "FROM python:3\nRUN pip install no-such==1.0\n"},
}  # fmt: skip


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_what_needs_more_is_left_out_and_counted(tmp_path, reason):
    write_task(tmp_path, "fine")
    write_task(tmp_path, "two", **LEFT_OUT[reason])
    tasks, left_out = read_tasks(task_folders(tmp_path, "train"), Allowed())
    assert ([task.name for task in tasks], left_out) == (["own/fine"], {reason: 1})


def test_docker_reads_no_dockerfile(tmp_path):
    """What it needs is Docker's to say. Tests may fetch where tasks have a network."""
    folder = write_task(tmp_path, dockerfile="FROM nginx:1\nRUN make\n", tests="curl x.org\n" + PASSES)
    assert read_task(folder, Allowed(docker=True, network=True)).build is None
    with pytest.raises(NeedsMore, match="the network for its tests"):
        read_task(folder, Allowed(docker=True))
    with pytest.raises(NeedsMore, match="separate"):
        read_task(write_task(tmp_path, "b", toml="[verifier.environment]\ncpus = 1\n"), Allowed(docker=True))


def build_of(folder, dockerfile, **files):
    task = write_task(folder, dockerfile=dockerfile, **files)
    return DockerfileReader(task / "environment", task).read()


def members_of(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {m.name: (oct(m.mode)[2:], tar.extractfile(m).read().decode()) for m in tar if m.isfile()}


def test_a_dockerfile_by_hand(tmp_path):
    """Names, modes, variables, patterns, and the folder in which each command runs."""
    dockerfile = (
        "# syntax=docker/dockerfile:1\nARG BASE=debian\nFROM --platform=linux/amd64 ${BASE}:12\nARG WHERE=app\n"
        'ENV A=1 B="two words"\nENV PATH=/app/bin:$PATH\nENV OLD value of $A\nWORKDIR /$WHERE\n'
        "COPY --chown=x:y data/ .\nCOPY one.py two.py lib/\nCOPY --chmod=755 one.py /srv/run\n"
        'COPY ["one.py", "../b c"]\n'
        "RUN apt-get update && apt-get install -y bash \\\n  # a remark\n  && rm -rf /var/lib/apt/lists/*\n"
        'RUN set -e; mkdir -p made && echo $A > made/a\nCOPY *.py later/\nEXPOSE 80\nCMD ["bash"]\n'
    )
    files = {"environment/data/sub/x": "x", "environment/one.py": "1", "environment/two.py": "2"}
    build = build_of(tmp_path, dockerfile, **files)
    first, command, last = build.steps
    assert build.workdir == "/app" and build.env["B"] == "two words" and build.env["OLD"] == "value of 1"
    assert build.env["PATH"].startswith("/app/bin:/usr/local/sbin:")
    assert {name: text for name, (_, text) in members_of(first).items()} == {
        "app/sub/x": "x", "app/lib/one.py": "1", "app/lib/two.py": "2", "srv/run": "1", "b c": "1",
    }  # fmt: skip
    assert members_of(first)["srv/run"][0] == "755"
    assert command[:2] == ("mkdir -p made && echo $A > made/a", "/app") and command[2]["A"] == "1"
    assert sorted(members_of(last)) == ["app/later/one.py", "app/later/two.py"]


@pytest.mark.parametrize("lines, expected", [
    ("WORKDIR /app\nCOPY x /app\nCOPY y /app", {"app/x", "app/y"}),
    ("COPY x /tmp\nCOPY y /root/../srv", {"tmp/x", "srv/y"}),
    ("COPY x /data/in/x\nCOPY y /data", {"data/in/x", "data/y"}),  # a folder by the file in it
    ("WORKDIR /app\nRUN mkdir -p -m 755 data /logs2\nCOPY x data\nCOPY y /logs2", {"app/data/x", "logs2/y"}),
    ("COPY x /data\nRUN mkdir /usr/share/x", {"data"}),  # nothing was there
    ("ENV D=/srv/app\nRUN mkdir -p $D/in && cd /data && mkdir sub\nCOPY x /srv/app\nCOPY y /data/sub\nCOPY y sub",
     {"srv/app/x", "data/sub/y", "sub"}),
    ('RUN echo "export PATH=/opt/bin:\\$PATH" >> /root/.bashrc\nCOPY x /root', {"root/x"}),  # no quote that is open
])  # fmt: skip
def test_a_file_goes_into_a_folder_that_is_there(lines, expected, tmp_path):
    """As Docker does it. A file in the folder's place was deleted when the working directory was made."""
    build = build_of(tmp_path, f"FROM debian\n{lines}\n", **{"environment/x": "x", "environment/y": "y"})
    assert set().union(*(members_of(step) for step in build.steps if isinstance(step, bytes))) == expected


def test_links_of_a_task_are_kept_and_lead_nowhere_here(tmp_path):
    task = write_task(tmp_path, dockerfile="FROM debian\nCOPY data /app\n", **{"environment/data/x": "x"})
    (task / "environment/data/link").symlink_to("/etc/passwd")
    build = DockerfileReader(task / "environment", task).read()
    assert set(members_of(build.steps[0])) == {"app/x"}  # the link is a link in the archive
    (task / "environment/other").mkdir()
    (task / "environment/other/link").mkdir()
    (task / "environment/other/link/passwd").write_text("x")
    (task / "environment/Dockerfile").write_text("FROM debian\nCOPY data /app\nCOPY other /app\n")
    with pytest.raises(BrokenTask, match="stands beneath app/link, which is no folder"):
        DockerfileReader(task / "environment", task).read()


@pytest.mark.parametrize("line, kept", [
    ("echo 'a && b' > x", "echo 'a && b' > x"), ("sudo mkdir x", None), ("useradd bob && mkdir x", "mkdir x"),
    ("V='1 2' && echo $V > x", "V='1 2' && echo $V > x"), ("echo $(curl -s x) > y", None),
    ("awk '{print $(NF-1)}' x > y", "awk '{print $(NF-1)}' x > y"), ("echo a `date` by > y", "echo a `date` by > y"),
    ('ARCH="$(dpkg -l)" && apt-get install -y bash', ""), ("echo `curl x` > y", None),
    ("V=1 && export V && python3 x.py", "V=1 && export V && python3 x.py"),
    ("N=3 && echo $((N+1)) > x", "N=3 && echo $((N+1)) > x"),
    ('awk "{print \\$(NF-1)}" x', 'awk "{print \\$(NF-1)}" x'),
    ("echo \"it's $(curl x)\" > y", None),
    ("pip install --upgrade pip", ""), ("MODE=x apt-get install -y --no-install-recommends bash; apt-get clean", ""),
])  # fmt: skip
def test_what_is_run_of_a_run(line, kept):
    if kept is None:
        with pytest.raises(NeedsMore, match="RUN (sudo|curl)"):
            needed_commands(line)
    else:
        assert needed_commands(line) == kept


def test_folders_of_splits(tmp_path):
    write_task(tmp_path / "train", "a")
    write_task(tmp_path / "test", "b")
    assert [task_folders(tmp_path, split)[0].name for split in ("train", "test")] == ["a", "b"]
    alone = tmp_path / "alone"
    write_task(alone, "c")
    (alone / "notes").mkdir()
    assert [folder.name for folder in task_folders(alone, "train")] == ["c"]
    with pytest.raises(
        ValueError, match="has no tasks for the split 'test'. Expected folders with a task.toml in .*test"
    ):
        task_folders(alone, "test")


@pytest.mark.parametrize("files, rewards, problem", [
    ({"reward.txt": b"0.5\n"}, {"reward": 0.5}, ""),
    ({"reward.json": b'{"a": 1, "b": 0.5, "c": true, "d": "x"}'}, {"a": 1.0, "b": 0.5}, ""),
    ({"reward.json": b'{"reward": 0.25}', "reward.txt": b"1"}, {"reward": 0.25}, ""),
    ({"reward.json": b'{"detail": 3}', "reward.txt": b"1"}, {"detail": 3.0, "reward": 1.0}, ""),
    ({"reward.txt": b""}, {}, "reward.txt is '', expected a number"),
    ({"reward.txt": b"nan"}, {}, "reward.txt is 'nan', expected a number"),
    ({"reward.txt": b"inf"}, {}, "reward.txt is 'inf'"),
    ({"reward.txt": b"\xff"}, {}, "reward.txt is "),
    ({"reward.json": b"{"}, {}, "reward.json is no JSON"),
    ({"reward.json": b"[1]"}, {}, "expected an object"),
    ({"reward.json": b'{"a": "x"}'}, {}, "has no number"),
    ({}, {}, "they wrote neither"),
])  # fmt: skip
def test_reward_files(files, rewards, problem):
    found, why = rewards_of({name: (len(content), content) for name, content in files.items()})
    assert found == rewards and problem in why and bool(why) == bool(problem)


def test_a_reward_file_that_is_too_long_is_none():
    assert rewards_of({"reward.txt": (10**6, b"1" * 65536)}) == ({}, "reward.txt has 1000000 bytes")


def test_which_of_several_rewards_counts():
    assert TestsSaid({"a": 0.5}).reward("reward") == 0.5 and TestsSaid().reward("reward") == 0.0
    said = TestsSaid({"a": 0.5, "b": 1.0})
    assert said.reward("b") == 1.0
    with pytest.raises(ValueError, match="the rewards a, b, and none is called 'reward'. Set harbor_reward"):
        said.reward("reward")
    assert said.misses({"a": 0.6}, "b") and not said.misses({"a": 0.5, "b": 1}, "b") and said.misses({"c": 0}, "b")
    assert said.misses(0.6, "a") and not said.misses(0.6, "b") and not said.misses(None, "b")
    assert not TestsSaid({"score": 1.0}).misses(1.0, "reward")  # the only one is the reward
    assert TestsSaid().misses(0.0, "reward") and not TestsSaid().misses(None, "reward")
    assert outcome_of_steps([0.5], 2, "mean") == 0.25


# -- conversations ----------------------------------------------------------------------------------------------------


@needs_namespaces
def test_a_conversation_about_a_task(tmp_path):
    """What the policy reads, in which folder, and what the tests say."""
    write_task(
        tmp_path, dockerfile="FROM debian\nENV MODE=fast\nWORKDIR /app\nCOPY x .\n", **{"environment/x": "hello\n"}
    )
    turns = [bash("pwd; cat x; echo $MODE; ls /tests /solution; cd /tmp"), bash("pwd; echo right > /app/out; false"),
             "<answer>done</answer>"]  # fmt: skip
    (rollout,) = play(tmp_path, *turns)
    assert "Write right into out." in rollout.prompt_messages[-1]["content"]
    assert rollout.turns[0].observation == "/app\nhello\nfast\n/solution:\n\n/tests:"
    assert rollout.turns[1].observation == "/tmp\n[exit code 1]"
    assert (rollout.reward, rollout.stop_reason, rollout.error) == (1.0, StopReason.ANSWERED, None)
    assert rollout.turns[2].info["harbor"]["rewards"] == {"reward": 1.0}
    assert [turn.reward for turn in rollout.turns] == [None] * 3


@needs_namespaces
def test_rollouts_of_a_task_share_nothing(tmp_path):
    """Each begins with the task's files, whatever another one did: 6 at the same time."""
    write_task(tmp_path)
    cls = harbor(most_turns=3)
    rows = cls.read_folder(tmp_path, "train") * 6
    scripts = [[bash(f"ls; echo {'right' if k % 2 else 'wrong'} > out"), "<answer>x</answer>"] for k in range(6)]
    env = make_env([], environment=cls, max_completion_length=2000)
    rollouts = within(lambda: env.generate([r["prompt"] for r in rows], Scripted(scripts), rows=rows), 120)["rollouts"]
    holders = [rollout.environment._desk.sandbox._holder for rollout in rollouts]
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0] * 3 and len({each.pid for each in holders}) == 6
    assert {rollout.turns[0].observation for rollout in rollouts} == {"[no output]"}
    assert all(holder.returncode is not None for holder in holders)  # what is over has ended


FORGERIES = [
    "echo 1 > /logs/verifier/reward.txt",
    "(setsid bash -c 'while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done' > /dev/null 2>&1 &)",
    "mkdir -p /app/bin; printf '#!/bin/sh\\necho right' > /app/cat; chmod +x /app/cat; export PATH=/app:$PATH",
    "echo 'export PATH=/app:$PATH; cat() { echo right; }' > /root/.bashrc; cp /root/.bashrc /root/.profile",
    "export BASH_ENV=/app/env; echo 'cat() { echo right; }' > /app/env",
    "printf 'cat() { echo right; }; export -f cat' > /app/.env; . /app/.env",
    "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "ln -s /usr/bin/true /app/bash; cd /; mkdir logs2; mv logs2 logs",
]


@needs_namespaces
@pytest.mark.parametrize("attempt", FORGERIES)
def test_a_reward_cannot_be_forged(tmp_path, attempt):
    write_task(tmp_path)
    (rollout,) = play(tmp_path, bash(f"echo wrong > out; {attempt}"), "<answer>done</answer>")
    assert (rollout.reward, rollout.error) == (0.0, None)


@needs_namespaces
def test_python_of_the_tests_imports_nothing_of_the_policys_home(tmp_path):
    """A `usercustomize` in the home is imported by each Python of that user, and could write the reward at its end."""
    tests = "HOME=/root python3 -c 1\ncd /logs/verifier\n[ -e reward.txt ] || echo 0 > reward.txt\n"
    write_task(tmp_path, tests=tests)
    forge = (
        'd=$(python3 -c "import site; print(site.getusersitepackages())"); mkdir -p $d; '
        'echo \'open("/logs/verifier/reward.txt", "w").write("1")\' > $d/usercustomize.py; python3 -c 1'
    )
    (rollout,) = play(tmp_path, bash(forge), "<answer>done</answer>")
    assert "reward.txt" in rollout.turns[0].observation  # it is imported in the policy's own command, and fails there
    assert (rollout.reward, rollout.error) == (0.0, None)


@needs_namespaces
@pytest.mark.parametrize("toml, reward", [("", 0.0), ('[verifier.env]\nPYTHONSAFEPATH = ""\nHOME = "/root"\n', 1.0)])
def test_tests_begin_in_a_home_of_their_own_and_import_nothing_of_the_working_directory(tmp_path, toml, reward):
    """A task may say otherwise, where what it tests is to be imported from there."""
    tests = "cat /root/said ~/said | wc -l; python3 -c 'import json'\ncd /logs/verifier\n"
    tests += "[ -e reward.txt ] || echo 0 > reward.txt\n"
    write_task(tmp_path, toml=toml, tests=tests)
    forge = 'echo home > /root/said; echo \'open("/logs/verifier/reward.txt", "w").write("1")\' > json.py'
    (rollout,) = play(tmp_path, bash(forge), "<answer>done</answer>")
    assert (rollout.reward, rollout.error) == (reward, None)
    assert rollout.environment.said[0].output.splitlines()[-1] == ("2" if reward else "1")


@needs_namespaces
def test_a_module_that_the_tests_do_not_find_is_told(tmp_path, caplog):
    """The policy's program of two files is right, and runs by `$AS_AGENT`."""
    tests = "{} python3 /app/main.py\necho $(($? == 0)) > /logs/verifier/reward.txt\n"
    write_task(tmp_path, "bare", tests=tests.format(""))
    write_task(tmp_path, "parted", tests=tests.format("$AS_AGENT"))
    with caplog.at_level(logging.WARNING):
        rollouts = play(tmp_path, bash("echo 'import other' > main.py; touch other.py"), "<answer>done</answer>")
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0]
    (told,) = [each.getMessage() for each in caplog.records if "found no module" in each.getMessage()]
    assert told.startswith("The task own/bare: a program of its tests found no module. They run with PYTHONSAFEPATH=1")
    said = TestsSaid({"reward": 0.0}, output="ModuleNotFoundError: No module named 'other'")
    assert check.TaskTrial([said], [said]).problems("reward")[1] == environment.HINT_OF_MODULES


@needs_namespaces
def test_a_reward_below_0_is_told_since_tests_that_are_stopped_count_as_0(tmp_path, caplog):
    write_task(tmp_path, tests="echo -1 > /logs/verifier/reward.txt\n")
    with caplog.at_level(logging.WARNING):
        (rollout,) = play(tmp_path, "<answer>done</answer>")
    assert rollout.reward == -1.0 and "The task own/one: its tests gave the reward -1." in caplog.text


@needs_namespaces
@pytest.mark.parametrize("tests, words", [
    ("exit 3\n", "they wrote neither .*, and ended with exit code 3"),
    ("echo nan > /logs/verifier/reward.txt\n", "reward.txt is 'nan', expected a number"),
    ("ln -s /etc/hostname /logs/verifier/reward.txt\n", "they wrote neither"),
    ("bash /app/out\n", "they took longer than 1 s"),
    ("echo 1 > /logs/verifier/reward.txt; kill -KILL $$\n", r"they were ended by a signal \(exit code 137\)"),
])  # fmt: skip
def test_tests_without_a_reward_give_nothing_and_are_told_once(tmp_path, caplog, tests, words):
    """Nothing is 0, and trained on: a policy that stops its tests has not escaped its loss."""
    write_task(tmp_path, tests=tests)
    cls = harbor(most_turns=3, verifier_seconds=1.0 if "longer" in words else 60.0)
    with caplog.at_level(logging.WARNING):
        rollouts = play(tmp_path, bash("echo 'sleep 1000' > out"), "<answer>x</answer>", cls=cls, rollouts=2)
    assert [(r.reward, r.error) for r in rollouts] == [(0.0, None)] * 2
    (told,) = [record.getMessage() for record in caplog.records if "gave no reward" in record.getMessage()]
    assert re.search(words, told) and "own/one" in told
    assert re.search(words, rollouts[0].turns[1].info["harbor"]["problem"])


@needs_namespaces
def test_several_rewards_without_a_choice_are_the_operators_to_decide(tmp_path):
    write_task(tmp_path, tests='echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n')
    (rollout,) = play(tmp_path, "<answer>x</answer>")
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR and "Set harbor_reward to one" in str(rollout.error)
    (rollout,) = play(tmp_path, "<answer>x</answer>", cls=harbor(most_turns=3, reward_name="a"))
    assert rollout.reward == 1.0


@needs_namespaces
def test_each_steps_tests_are_its_turns_reward(tmp_path):
    """The second instruction stands behind the first answer, and files stay."""
    files = {"steps/second/workdir/setup.sh": 'echo set > up\nrm -- "$0"\n', "steps/second/workdir/more": "m\n"}
    write_steps(tmp_path, **files)
    turns = [bash("touch a; ls"), "<answer>1</answer>", bash("ls; cat up; touch b"), "<answer>2</answer>"]
    (rollout,) = play(tmp_path, *turns)
    assert rollout.turns[1].messages[-1]["content"] == "Make b."
    assert rollout.turns[2].observation == "a\nmore\nup\nset"
    assert [turn.reward for turn in rollout.turns] == [None, 1.0, None, 1.0] and rollout.reward == 1.0
    assert [turn.info["harbor"]["step"] for turn in rollout.turns[1::2]] == ["first", "second"]
    (rollout,) = play(tmp_path, "<answer>1</answer>", bash("touch b"), "<answer>2</answer>")
    assert [turn.reward for turn in rollout.turns] == [0.0, None, 1.0] and rollout.reward == 0.5


@needs_namespaces
def test_a_call_that_was_cut_off_ends_no_step(tmp_path):
    """The policy reads that it was, and goes on: its tests run when it is done."""
    write_steps(tmp_path)
    turns = [bash("echo " + "x" * 90), bash("touch a"), "<answer>1</answer>", bash("touch b"), "<answer>2</answer>"]
    (rollout,) = play(tmp_path, *turns, max_turn_tokens=80)
    assert rollout.turns[0].finish_reason == "length" and "not closed" in rollout.turns[0].observation
    assert [turn.reward for turn in rollout.turns] == [None, None, 1.0, None, 1.0] and rollout.reward == 1.0


@needs_namespaces
def test_a_step_behind_whose_turn_nothing_fits_is_judged(tmp_path):
    write_steps(tmp_path)
    turns = [bash("touch a"), "<answer>1</answer>", bash("touch b")]
    (whole,) = play(tmp_path, *turns, "<answer>2</answer>")
    used = sum(len(turn.token_ids) + len(turn.observation_ids) for turn in whole.turns[:3])
    room = used - len(whole.turns[2].observation_ids) + 10
    (rollout,) = play(tmp_path, *turns, max_completion_length=room)
    assert len(rollout.turns) == 3 and rollout.stop_reason == StopReason.MAX_TOKENS
    assert [turn.reward for turn in rollout.turns] == [None, 1.0, 1.0] and rollout.reward == 1.0
    assert rollout.turns[2].info["harbor"]["step"] == "second"


@needs_namespaces
def test_a_step_that_is_missed_ends_the_task_and_the_others_count_as_nothing(tmp_path):
    write_steps(tmp_path, toml=STEPS.replace('"first"\n', '"first"\nmin_reward = 1.0\n'))
    (rollout,) = play(tmp_path, "<answer>1</answer>", "<answer>2</answer>")
    assert len(rollout.turns) == 1 and (rollout.turns[0].reward, rollout.reward) == (0.0, 0.0)
    (rollout,) = play(tmp_path, bash("touch a"), bash("touch a"), max_steps=1)  # its budget ends in the first step
    assert [turn.reward for turn in rollout.turns] == [None, 1.0] and rollout.reward == 0.5
    assert rollout.stop_reason is not None and rollout.error is None


@needs_namespaces
@pytest.mark.parametrize("command, words", [
    ("touch a; chmod 555 /app", "files cannot be put into /app: .*Permission denied"),
    (f"echo 'echo {OVER}; sleep 100000' > a", r"setup.sh of step second failed \(time\)"),
    ("echo exit 3 > a", r"setup.sh of step second failed \(exit code 3: \)"),
])  # fmt: skip
def test_a_step_that_the_policy_keeps_from_beginning_is_missed(tmp_path, caplog, clock, command, words):
    """It has not escaped its loss. Once a step has begun, what fails there is the tests' to say."""
    write_steps(tmp_path, **{"steps/second/workdir/setup.sh": "bash a\n"})
    cls = harbor(most_turns=6, verifier_seconds=LONG)
    with caplog.at_level(logging.WARNING):
        (rollout,) = play(tmp_path, bash(command), "<answer>1</answer>", "<answer>2</answer>", cls=cls)
    assert len(rollout.turns) == 2 and (rollout.reward, rollout.error) == (0.5, None)
    assert (rollout.turns[1].reward, rollout.stop_reason) == (1.0, StopReason.ANSWERED)
    missed = rollout.turns[1].info["harbor"]["missed"]
    assert re.fullmatch(f"step second did not begin: {words}.*", missed, re.DOTALL) and missed in caplog.text


@needs_namespaces
def test_the_tests_of_a_step_and_the_files_of_the_next_have_one_time_limit(tmp_path, monkeypatch):
    """Else a policy whose tests are slow would have the error of an environment that is too slow."""
    write_steps(tmp_path, **{"steps/first/tests/test.sh": "sleep 0.2\necho 1 > /logs/verifier/reward.txt\n"})
    given, put = [], environment.put_step_files
    monkeypatch.setattr(environment, "put_step_files", lambda *words: (given.append(words[-1]), put(*words)) and None)
    play(tmp_path, "<answer>1</answer>", "<answer>2</answer>", cls=harbor(most_turns=6, verifier_seconds=60.0))
    assert given[0] == 60.0 and 0 < given[1] < 59.8


@needs_namespaces
def test_a_setup_that_fails_is_no_fault_of_the_policys(tmp_path):
    write_steps(tmp_path, **{"steps/first/workdir/setup.sh": "echo no space >&2; exit 4\n"})
    (rollout,) = play(tmp_path, "<answer>1</answer>")
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR
    assert "setup.sh of step first failed (exit code 4: no space)" in str(rollout.error)


@needs_namespaces
def test_the_tasks_time_is_that_of_its_commands(tmp_path, clock):
    """Behind it no command runs, and the tests say what was reached."""
    write_task(tmp_path, toml=f"[agent]\ntimeout_sec = {LONG}\n")
    cls = harbor(most_turns=6, command_seconds=2 * LONG)
    turns = bash(f"echo right > out; echo {OVER}; sleep 100000"), "<answer>x</answer>"
    (rollout,) = play(tmp_path, *turns, cls=cls, tool_timeout=600.0)
    assert len(rollout.turns) == 1 and rollout.turns[0].results[0].text == f"{OVER}\n[stopped after {LONG:g} seconds]"
    assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.ENVIRONMENT_STOP)


@needs_namespaces
def test_a_command_has_a_time_of_its_own(tmp_path, clock):
    write_task(tmp_path)
    cls = harbor(most_turns=6, command_seconds=LONG)
    turns = bash(f"echo {OVER}; sleep 100000"), bash("echo right > out"), "<answer>x</answer>"
    (rollout,) = play(tmp_path, *turns, cls=cls)
    assert rollout.turns[0].observation == f"{OVER}\n[stopped after {LONG:g} seconds]" and rollout.reward == 1.0


@needs_namespaces
def test_a_sandbox_that_is_lost_is_no_fault_of_the_policys(tmp_path):
    """Its rollout is not trained on, though the tool's error could be read."""
    write_task(tmp_path)

    class Lost(HarborEnvironment):
        def bash(self, command: str) -> str:
            """Run."""
            self._desk.sandbox._holder.kill()
            self._desk.sandbox._holder.wait()
            return super().bash(command)

    cls = type("harbor", (Lost,), vars(harbor(most_turns=4)) | {"known": {}})
    (rollout,) = play(tmp_path, bash("echo right > out"), "<answer>x</answer>", cls=cls)
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR and "has ended" in str(rollout.error)
    assert len(rollout.turns) == 1  # the policy is not asked to go on


@needs_namespaces
@pytest.mark.parametrize("base, shell, by", [
    ("debian", "", "sh"), ("debian", 'SHELL ["/bin/bash", "-c"]\n', "bash"), ("alpine:3", "", "bash"),
])  # fmt: skip
def test_a_run_is_of_sh_unless_a_shell_is_named(base, shell, by, tmp_path):
    """Of Debian's, whose echo reads ends of lines. What Alpine has is more like bash."""
    command = r'echo "a\nb"'
    said = subprocess.run([by, "-c", command], capture_output=True, text=True, check=True).stdout.rstrip()
    write_task(tmp_path, "a", dockerfile=f"FROM {base}\n{shell}RUN {command} > /out\n")
    (rollout,) = play(tmp_path, bash("cat /out"), "<answer>x</answer>", cls=harbor(most_turns=3), rollouts=1)
    assert rollout.turns[0].observation == said


def test_what_is_copied_keeps_its_time_and_a_link_is_what_it_leads_to(tmp_path):
    task = write_task(tmp_path, dockerfile="FROM debian\nCOPY latest.csv data /app/\n", **{"environment/data/x": "x"})
    (task / "environment/v2.csv").write_text("2")
    (task / "environment/latest.csv").symlink_to("v2.csv")
    os.utime(task / "environment/data/x", (1.7e9, 1.7e9))
    (step,) = DockerfileReader(task / "environment", task).read().steps
    with tarfile.open(fileobj=io.BytesIO(step)) as archive:
        assert archive.extractfile("app/latest.csv").read() == b"2"
        assert archive.getmember("app/x").mtime == 1.7e9 and archive.getmember("app").mtime >= 1.7e9


@needs_namespaces
def test_a_run_of_a_dockerfile_runs_once_and_what_fails_is_left_out(tmp_path, caplog):
    write_task(
        tmp_path, "a", dockerfile="FROM debian\nWORKDIR /app\nRUN date +%N > when && ln -s when link && mkdir /data\n"
    )
    write_task(tmp_path, "b", dockerfile="FROM debian\nRUN cat /nothing\n")
    cls = harbor(most_turns=3)
    with caplog.at_level(logging.WARNING):
        rollouts = play(tmp_path, bash("cat link; ls -d /data"), "<answer>x</answer>", cls=cls, rollouts=2)
    assert len({rollout.turns[0].observation for rollout in rollouts}) == 1 and len(rollouts) == 2
    assert rollouts[0].turns[0].observation.endswith("\n/data")
    assert "1 of 2 tasks of" in caplog.text and "1 a RUN that fails here (cat: /nothing: No such file" in caplog.text


# -- samples, and what a recipe says ----------------------------------------------------------------------------------


@needs_namespaces
@pytest.mark.parametrize("folder", task_folders(SAMPLES, "train"), ids=lambda folder: folder.name)
def test_a_sample_is_solved_by_its_own_solution(folder):
    """And an untouched machine gets nothing."""
    task = read_task(folder, Allowed())
    trial = check.try_task(NamespaceImages(), task)
    assert [said.reward("reward") for said in trial.solved] == [1.0] * len(task.steps)
    assert [said.reward("reward") for said in trial.untouched] == [0.0] and trial.problems("reward") == []


def test_there_are_ten_samples():
    assert len(task_folders(SAMPLES, "train")) == 10


@needs_namespaces
def test_the_check_of_a_folder_says_what_is_wrong(tmp_path, capsys):
    write_task(tmp_path, "a", **{"solution/solve.sh": "echo right > out\n"})
    write_task(tmp_path, "b", **{"solution/solve.sh": "echo wrong > out\n"})
    write_task(tmp_path, "c", toml="[environment]\ngpus = 2\n")
    write_task(tmp_path, "d", tests="true\n")
    write_task(tmp_path, "e", tests=None)
    write_task(tmp_path, "f", **{"solution/solve.sh": "echo oh; exit 9\n"})
    assert check.main([str(tmp_path), "--docker", "never"]) == 1
    way, *lines = capsys.readouterr().out.splitlines()
    lines = [line.split(maxsplit=1)[1] for line in lines]
    assert way == "by namespaces:" and lines[0] == "a: untouched 0, solved 1"
    assert lines[1] == "b: untouched 0, solved 0. its solution gets 0, an untouched machine 0"
    assert lines[2] == "c: left out, it needs GPUs"
    assert lines[3].startswith("d: untouched 0, solved (no solution). its tests gave no reward: they wrote neither")
    assert lines[4].startswith("e: tests/test.sh is missing")
    assert lines[5] == "f: its solution ended with exit code 9: oh"


def recipe(folder, **keys):
    """The words of a command line that names a recipe."""
    settings = {
        "model_name_or_path": f"{ROOT}/hf_recipes/tiny/calculator-hermes-model", "dataset_name": str(folder),
        "environment": "harbor", "harbor_docker": "never", "tool_format": "hermes", "output_dir": f"{folder}/out",
        "num_generations": 2, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False, "report_to": "none",
        **keys,
    }  # fmt: skip
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return ["--config", str(path)]


@needs_namespaces
@pytest.mark.parametrize("preflight", [(), ("--preflight",)])
def test_a_broken_task_ends_the_run_before_a_model_is_loaded(tmp_path, monkeypatch, preflight):
    monkeypatch.setattr(mt.MTGRPOEnvTrainer, "__init__", lambda *args, **kwargs: pytest.fail("a model is loaded"))
    write_task(tmp_path, "fine")
    write_task(tmp_path, "two", tests=None)
    with pytest.raises(SystemExit) as error:
        mt.main([*recipe(tmp_path), *preflight])
    assert "error: 1 of 2 task folders are broken. row 1, two: tests/test.sh is missing" in str(error.value)


@pytest.mark.parametrize("keys, words", [
    ({"dataset_name": "arithmetic"}, "dataset_name is 'arithmetic', expected a folder of task folders"),
    ({"harbor_command_timeout": 30, "tool_timeout": 30}, "harbor_command_timeout=30 is not below tool_timeout=30"),
    ({"environment_timeout": 15}, "environment_timeout=15 leaves tests no time"),
    ({"tools_script": f"{ROOT}/tools/calculator.py"}, "tools_script has no effect with environment: harbor"),
    ({"harbor_network": True}, "harbor_network: true needs Docker"),
    ({"harbor_docker": "always"}, "harbor_docker: always, and Docker cannot be used: there is no program docker"),
    ({"harbor_docker": "perhaps"}, "harbor_docker: 'perhaps' in"),
    ({"environment": "gym", "harbor_docker": None, "harbor_reward": "a"},
     "harbor_reward has no effect without the line environment: harbor"),
])  # fmt: skip
def test_a_recipe_that_cannot_work_says_so(tmp_path, monkeypatch, keys, words):
    monkeypatch.setattr(docker.shutil, "which", lambda name, **_: None if name == "docker" else f"/usr/bin/{name}")
    write_task(tmp_path)
    with pytest.raises((SystemExit, ValueError)) as error:
        mt.main(recipe(tmp_path, **keys))
    assert words in str(error.value)


@needs_namespaces
def test_all_tasks_left_out_is_an_error_and_some_are_told(tmp_path, caplog):
    write_task(tmp_path, "a", toml="[environment]\ngpus = 2\n")
    with pytest.raises(ValueError, match="1 of 1 tasks of .* need what is not here: 1 GPUs. Docker runs more of them"):
        harbor().read_folder(tmp_path, "train")
    write_task(tmp_path, "b")
    with caplog.at_level(logging.WARNING):
        (row,) = harbor().read_folder(tmp_path, "train")
    assert "1 of 2 tasks of" in caplog.text and "They are left out" in caplog.text
    assert row["task"] == "own/b" and row["task_folder"] == str(tmp_path / "b")


@needs_namespaces
def test_rows_of_another_kind_are_refused(tmp_path):
    cls = harbor()
    with pytest.raises(
        ValueError, match="it has no task_folder. Expected dataset_name to be a folder of task folders"
    ):
        cls.check_row({"prompt": []})
    with pytest.raises(ValueError, match="the task /nowhere: task.toml is missing"):
        cls.check_row({"task_folder": "/nowhere"})


def test_what_a_recipe_says_reaches_the_class(tmp_path):
    if no_namespaces():
        pytest.skip(no_namespaces())
    words = recipe(tmp_path, harbor_command_timeout=7, harbor_memory_mb=128, harbor_storage_mb=32, harbor_reward="b",
                   environment_timeout=50, max_env_steps=4)  # fmt: skip
    script_args, args, _ = mt.parse_arguments(words)
    base, cls = load_harbor_conversation(script_args, args, mt.MultiTurnToolEnv)
    assert base is mt.MultiTurnToolEnv and (cls.command_seconds, cls.verifier_seconds) == (7, 40)
    assert (cls.reward_name, cls.most_turns, cls.allowed) == ("b", 5, Allowed(128, 32, False, False))
    assert read_task(write_task(tmp_path), cls.allowed).limits == SandboxLimits(128, 32)


def test_archives_of_folders(tmp_path):
    (tmp_path / "a/sub").mkdir(parents=True)
    (tmp_path / "a/x").write_text("1")
    (tmp_path / "a/sub/y").write_text("2")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/x").write_text("3")
    found = members_of(tree_archive(tmp_path / "a", tmp_path / "b", tmp_path / "none"))
    assert {name: text for name, (_, text) in found.items()} == {"x": "3", "sub/y": "2"}
    os.mkfifo(tmp_path / "b/pipe")
    with pytest.raises(BrokenTask, match="pipe is neither a file"):
        tree_archive(tmp_path / "b")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_namespaces
def test_the_tiny_model_learns_the_samples(tmp_path, monkeypatch):
    """And not where its rewards are shuffled."""
    monkeypatch.chdir(ROOT)
    words = ["--config", "hf_recipes/tiny/harbor.yaml", "--disable_tqdm", "true"]
    shuffled = tmp_path / "shuffled.py"
    shuffled.write_text(
        "import random\nrng = random.Random(0)\n\n\ndef shuffled(environment_rewards, **kwargs):\n"
        '    """Rewards of other rollouts."""\n'
        "    return rng.sample(environment_rewards, len(environment_rewards))\n\n\nOUTCOME_REWARD_FUNCS = [shuffled]\n"
    )
    control = ["--reward_fn", str(shuffled), "--environment_reward_weight", "0"]
    ends = []
    for name, more in (("own", []), ("shuffled", control)):
        mt.main([*words, "--output_dir", str(tmp_path / name), *more])
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        means = [row["rewards/harbor/mean"] for row in history if "rewards/harbor/mean" in row]
        ends.append((sum(means[:5]) / 5, sum(means[-5:]) / 5))
        print(name, ends[-1])
    assert ends[0][1] > ends[0][0] + 0.3 and ends[1][1] < ends[1][0] + 0.2
