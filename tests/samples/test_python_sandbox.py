"""tools/python_sandbox.py: what programs can do, and what they cannot, on a machine that allows more or less."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from processes import alive, ends
from project import ROOT
from scripted import ANSWER, CHATML_TOKENIZER, Scripted, call

from mt_grpo.recipe.plugins import load_tools
from mt_grpo_trainer import MultiTurnToolEnv

FILE = ROOT / "tools/python_sandbox.py"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: programs run as users of their own")
pytestmark = pytest.mark.skipif(not shutil.which("setpriv"), reason="needs util-linux")
AS_USER = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]


def load(allowed=True):
    """The file as a module, or with namespaces that are not allowed (a command that fails)."""
    spec = importlib.util.spec_from_file_location("python_sandbox", FILE)
    module = importlib.util.module_from_spec(spec)
    source = FILE.read_text() if allowed else re.sub(r"(?s)NAMESPACES = \{.*?\n\}", NOT_ALLOWED, FILE.read_text())
    exec(compile(source, str(FILE), "exec"), vars(module))
    return module


@pytest.fixture
def sandbox(monkeypatch):
    """The file loaded with other settings."""

    def load_with(allowed=True, **values):
        for name, value in values.items():
            monkeypatch.setenv(f"PYTHON_SANDBOX_{name}", str(value))
        return load(allowed)

    return load_with


NOT_ALLOWED = 'NAMESPACES = {("network", "processes"): [["--no-such-namespace"]]}'


def said(module, code):
    """What the model reads."""
    try:
        return module.code_interpreter(code)
    except module.ProgramError as error:
        return str(error)


PROGRAMS = {
    "the value of a last line": ("a = 6\na * 7", "42"),
    "printed text and no value": ("for i in range(3):\n    print(i)\nNone", "0\n1\n2"),
    "nothing": ("x = 1", "The program printed nothing."),
    "an error": (
        "print('before')\n\n1 / 0",
        'before\nTraceback (most recent call last):\n  File "program.py", line 3, in <module>\n    1 / 0\n    ~~^~~\n'
        "ZeroDivisionError: division by zero\n[exit code 1]",
    ),
    "a null byte": ("print(1)\0", re.compile(r"\w+Error: source code .* null bytes\n\[exit code 1\]")),
    "its exit code": ("import sys\nprint('a')\nsys.exit(3)", "a\n[exit code 3]"),
    "a signal": ("import os\nos.kill(os.getpid(), 11)", re.compile(r"(Segmentation fault\n)?\[killed by SIGSEGV\]")),
    "no input": ("import sys\nsys.stdin.read()", "''"),
    "no environment variables": ("import os\nsorted(set(os.environ) & {'SECRET', 'HF_TOKEN'})", "[]"),
    "its folder is its home": ("import os\nos.path.samefile(os.path.expanduser('~'), '.')", "True"),
    "no core dumps": ("import resource\nresource.getrlimit(resource.RLIMIT_CORE)", "(0, 0)"),
    "a pool": (
        "from multiprocessing import Pool\ndef square(x):\n    return x * x\nwith Pool(2) as p:\n"
        "    print(p.map(square, [1, 2, 3]))", "[1, 4, 9]"
    ),
    "the kernel ends it first": ("open('/proc/self/oom_score_adj').read()", "'1000\\n'"),
    "no new privileges": ("'NoNewPrivs:\\t1' in open('/proc/self/status').read()", "True"),
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    os.environ["SECRET"] = "hidden"
    yield load()
    del os.environ["SECRET"]


@pytest.mark.contract("Python sandbox")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_prints(loaded, name):
    code, expected = PROGRAMS[name]
    text = said(loaded, code)
    assert expected.fullmatch(text) if isinstance(expected, re.Pattern) else text == expected


def test_a_call_keeps_nothing_and_leaves_nothing(loaded, tmp_path):
    folder = said(loaded, "import os\nopen('kept.txt', 'w').write('1')\nos.getcwd()").strip("'")
    assert not Path(folder).exists()
    assert said(loaded, "import os\nsorted(os.listdir())") == "['program.py', 'runner.py']"
    deep = "import os\nfor i in range(1200):\n    os.mkdir('a')\n    os.chdir('a')\nprint('deep')"
    assert said(loaded, deep) == "deep"
    user = int(said(loaded, "import os\nos.getuid()"))
    assert not (loaded.SANDBOX.folder / str(user)).exists()


def own_users(module):
    """The numbers that the module holds. Others on this machine run programs too."""
    return set(module.SANDBOX.users._held)


def left_over(users):
    """The processes of some users."""
    return [p for p in psutil.process_iter(["uids"]) if p.info["uids"] and p.info["uids"].real in users]


LEAVES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("begun", flush=True)
time.sleep({seconds})
"""


@as_root
def test_folders_of_all_are_its_own(loaded):
    """So what one program writes there no other one reads, and the machine's are not filled."""
    for folder in ("/tmp", "/dev/shm"):
        write = f"open('{folder}/of_a_program', 'w').write('x')\nimport os\nos.statvfs('{folder}').f_blocks * 4096"
        assert said(loaded, write) == str(64 * 2**20)
        assert not Path(folder, "of_a_program").exists()
        assert said(loaded, f"import os\nos.listdir('{folder}')") == "[]"


@as_root
def test_neither_trainers_nor_forks_share_a_user(loaded):
    """Both have what the first one had locked."""
    mine = loaded.SANDBOX.users.take()
    loaded.SANDBOX.users.give_back(mine)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, str(loaded.SANDBOX.users.take()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reading, 99)) != mine
    os.close(reading), os.close(writing)
    one, two = loaded.Users(loaded.SANDBOX.folder), loaded.Users(loaded.SANDBOX.folder)
    one._next = two._next = 900
    numbers = [one.take(), two.take(), one.take()]
    assert len(set(numbers)) == 3 and min(numbers) >= loaded.FIRST_USER + 900
    two._next = loaded.USERS - 1
    assert two.take() and loaded.FIRST_USER <= two.take() < loaded.FIRST_USER + 900  # it begins again


@as_root
def test_what_a_killed_trainer_has_left_is_killed_by_the_next(sandbox, monkeypatch):
    """Before its program begins, whose processes are counted with what is left."""
    module, found = sandbox(allowed=False), []
    wait = module.SANDBOX.wait
    monkeypatch.setattr(module.SANDBOX, "wait", lambda folder, user, *given: found.append(
        [process.pid for process in module.processes_of(user) if alive(process.pid)]) or wait(folder, user, *given)
    )  # fmt: skip
    user = module.FIRST_USER + module.SANDBOX.users._next  # the next that it has not held yet
    module.SANDBOX.users._free.clear()
    (module.SANDBOX.folder / str(user)).mkdir(exist_ok=True)
    left = subprocess.Popen(["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "sleep", "600"])
    while not module.processes_of(user):
        time.sleep(0.05)
    assert said(module, "1 + 1") == "2" and found == [[]]
    assert left.wait(10) == -signal.SIGKILL


def test_its_folder_is_nobody_elses(sandbox, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda *given: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"python-sandbox-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="as a folder that only it writes to. Delete it"):
        sandbox()


@as_root
@pytest.mark.parametrize("allowed", [True, False], ids=["namespaces", "no namespaces"])
def test_nothing_stays_behind(sandbox, allowed):
    module = sandbox(allowed, SECONDS=6)
    assert said(module, LEAVES.format(seconds=0)) == "begun"
    assert said(module, LEAVES.format(seconds=600)) == "begun\n[stopped after 6 seconds]"
    assert all(ends(process.pid, 5) for process in left_over(own_users(module)))


@pytest.mark.parametrize("allowed", [True, False], ids=["namespaces", "no namespaces"])
def test_limits(sandbox, allowed):
    module = sandbox(allowed, SECONDS=20, CPU_SECONDS=1, MEMORY_MB=300, OUTPUT=100)
    assert said(module, "while True: pass").endswith("[stopped after 1 seconds of computing]")
    assert said(module, "bytearray(400 * 2**20)").endswith("MemoryError\n[exit code 1]")
    assert said(module, "len(bytearray(100 * 2**20))") == "104857600"
    assert said(module, "print('a' * 60 + 'b' * 60)") == f"{'a' * 50}\n... [21 characters left out] ...\n{'b' * 49}"
    endless = said(module, "while True: print('x' * 1000)")
    assert endless.startswith("x" * 50) and len(endless) < 300
    assert "[stopped: more than 1048576 bytes of output]" in endless
    too_large = "OSError: [Errno 27] File too large\n[exit code 1]"
    assert said(module, "with open('large', 'w') as f: f.write('x' * 2**21)").endswith(too_large)
    assert said(module, "files = [open('/dev/null') for _ in range(100)]").endswith("'/dev/null'\n[exit code 1]")


BOMB = """
import os, time
count = 0
try:
    while count < 500:
        if os.fork() == 0:
            time.sleep(600)
        count += 1
except BlockingIOError:
    pass
print(count)
"""


@as_root
@pytest.mark.parametrize("allowed", [True, False], ids=["namespaces", "no namespaces"])
def test_processes_are_bounded(sandbox, allowed):
    """32 in all: the program, and in a namespace of processes the shell that is its first."""
    assert said(sandbox(allowed), BOMB) == ("30" if allowed else "31")


@as_root
def test_a_program_is_a_user_without_rights(loaded):
    first = loaded.FIRST_USER
    if loaded.SANDBOX.has != {"user", "network", "processes"}:
        pytest.skip("this machine allows no namespaces")
    user = int(said(loaded, "import os\nos.getuid()"))
    assert first <= user < first + loaded.USERS
    groups = os.getgroups()
    os.setgroups([0, 4])
    try:
        ids = said(loaded, "import os\nos.getresuid(), os.getresgid(), os.getgroups()")
    finally:
        os.setgroups(groups)
    assert ids == str(((user,) * 3, (user,) * 3, []))
    assert "Permission denied: '/etc/shadow'" in said(loaded, "open('/etc/shadow')")
    assert "Operation not permitted" in said(loaded, "import os\nos.setuid(0)")
    assert said(loaded, "import os\nlen([p for p in os.listdir('/proc') if p.isdigit()])") == "2"  # a shell and itself
    assert "Network is unreachable" in said(loaded, "import socket\nsocket.create_connection(('127.0.0.1', 22))")


@as_root
def test_the_first_process_of_its_namespace_is_out_of_its_reach(loaded):
    """One that it may trace could be made to outlive the trainer. There is another namespace around that one."""
    if "processes" not in loaded.SANDBOX.has:
        pytest.skip("this machine allows no namespaces")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(said, loaded, "import time\ntime.sleep(2)")
        numbers = []
        while not numbers and not running.done():
            for process in left_over(own_users(loaded)):
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    numbers += re.findall(r"^NSpid:(.*)$", status, re.M)
        running.result()
    own = re.search(r"^NSpid:(.*)$", Path("/proc/self/status").read_text(), re.M)[1]
    assert len(numbers[0].split()) == len(own.split()) + 2


@as_root
def test_what_is_not_allowed_is_said_or_refused(sandbox, caplog, monkeypatch):
    module = sandbox(allowed=False, PYTHON="/usr/bin/python3")
    assert module.SANDBOX.has == {"user"}
    network, processes = (record.getMessage() for record in caplog.records)
    assert "without 'network'" in network and "without 'processes'" in processes
    assert "Connection refused" in said(module, "import socket\nsocket.create_connection(('127.0.0.1', 9))")
    with pytest.raises(RuntimeError, match=r"PYTHON_SANDBOX_REQUIRE: network is not available \(exit code 1: unshare"):
        sandbox(allowed=False, REQUIRE="user, network")
    with pytest.raises(ValueError, match=r"has \['net'\], expected"):
        sandbox(REQUIRE="net")
    monkeypatch.delenv("PYTHON_SANDBOX_REQUIRE")
    with pytest.raises(RuntimeError, match="cannot run a program as another user, and never runs one as root: "):
        sandbox(PYTHON="/root/no/python")


ORDINARY = """
import json, logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
import python_sandbox as p
def said(code):
    try:
        return p.code_interpreter(code)
    except p.ProgramError as error:
        return str(error)
print(json.dumps([sorted(p.SANDBOX.has), *map(said, json.loads(sys.argv[1]))]))
"""


@pytest.fixture
def open_folder():
    """A folder that other users can read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@as_root
def test_as_an_ordinary_user(open_folder):
    """Namespaces without being root. What programs then can do is said."""
    python, packages = Path("/usr/bin/python3"), open_folder
    shutil.copytree(Path(psutil.__file__).parent, packages / "psutil")
    shutil.copy(FILE, packages)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not python.exists() or version not in subprocess.run([python, "-V"], capture_output=True, text=True).stdout:
        pytest.skip(f"needs {python} of version {version}, which another user can run")
    if subprocess.run([*AS_USER, "unshare", "--user", "--net", "true"]).returncode:
        pytest.skip("this machine lets no ordinary user make namespaces")
    programs = ["1 + 1", BOMB, "import os\nos.getuid()", LEAVES.format(seconds=600)]
    env = {"PYTHONPATH": str(packages), "PATH": os.environ["PATH"], "PYTHON_SANDBOX_SECONDS": "6"}
    command = [*AS_USER, python, "-c", ORDINARY, json.dumps(programs)]
    lines = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith("The Python sandbox runs without 'user'")
    has, two, forks, user, left = json.loads(lines[1])
    assert (has, two, user) == (["network", "processes"], "2", "12345")
    assert left == "begun\n[stopped after 6 seconds]"
    assert 0 < int(forks) < 32
    of_user = [p for p in psutil.process_iter(["uids"]) if p.info["uids"] and p.info["uids"].real == 12345]
    assert all(ends(process.pid, 5) for process in of_user)


TRAINER = """
import sys
sys.path.insert(0, {folder!r})
import python_sandbox
code = "import ctypes, time\\nctypes.CDLL(None).prctl(1, 0)\\nopen({name!r}, 'w').close()\\ntime.sleep(600)"
python_sandbox.code_interpreter(code)
"""


@as_root
def test_a_program_ends_with_a_trainer_that_is_killed(sandbox):
    module = sandbox()
    name = f"begun-{os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, "PYTHON_SANDBOX_SECONDS": "600"}
    code = TRAINER.format(folder=str(FILE.parent), name=name)
    trainer = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (begun := list(module.SANDBOX.folder.glob(f"*/{name}"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [process.pid for process in left_over({int(begun[0].parent.name)})]
        assert found
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert all(ends(pid, 10) for pid in found)


@pytest.mark.contract("Python sandbox")
def test_as_a_tool_of_a_conversation():
    """A program that fails is an error for the metrics, and the model reads what it printed."""
    env = MultiTurnToolEnv(load_tools(str(FILE)), None, 4, tokenizer=CHATML_TOKENIZER, tool_timeout=60)
    texts = [call("code_interpreter", code="print(6 * 7)"), call("code_interpreter", code="[][0]"), ANSWER]
    backend = Scripted([texts])
    (rollout,) = env.generate([[{"role": "user", "content": "?"}]], backend)["rollouts"]
    assert [turn.results[0].error for turn in rollout.turns[:2]] == [None, "tool"]
    assert rollout.turns[0].observation == "42"
    assert rollout.turns[1].observation == (
        'Error: Traceback (most recent call last):\n  File "program.py", line 1, in <module>\n    [][0]\n    ~~^^^\n'
        "IndexError: list index out of range\n[exit code 1]"
    )
