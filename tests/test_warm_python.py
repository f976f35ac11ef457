"""The Python with libraries that are there already: what it starts is as what `python` starts."""

import signal
import subprocess

import pytest
import warm_python
from processes import ends


def run(*arguments, **options):
    return subprocess.run(
        [warm_python.executable(), *arguments], capture_output=True, text=True, timeout=60, **options
    )


@pytest.mark.parametrize("code, expected", [
    ("print('said')", (0, "said\n", "")),
    ("import sys; sys.exit(7)", (7, "", "")),
    ("import sys; sys.exit('why')", (1, "", "why\n")),
    ("import os; os.kill(os.getpid(), 9)", (-9, "", "")),
    ("1 / 0", (1, "", None)),
    ("import atexit; atexit.register(print, 'last'); print('first')", (0, "first\nlast\n", "")),
    ("import sys; print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'trl', 'mt_grpo'}))",
     (0, "torch trl\n", "")),
])  # fmt: skip
def test_what_a_program_says_and_ends_with(code, expected):
    done = run("-u", "-c", code)
    assert (done.returncode, done.stdout) == expected[:2]
    assert done.stderr == expected[2] or expected[2] is None and "ZeroDivisionError: division by zero\n" in done.stderr


def test_a_script_has_its_own_folder_arguments_and_environment(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, beside, elsewhere\n"
        "print(sys.argv, beside.NAME, elsewhere.NAME, os.getcwd(), sys.modules['__main__'].__file__, sep='\\n')\n"
    )
    further = tmp_path / "further"
    further.mkdir()
    (further / "elsewhere.py").write_text("NAME = 'elsewhere'")
    done = run(str(script), "--key", "x y", cwd="/", env={"PYTHONPATH": str(further)})
    assert done.stdout.splitlines() == [f"['{script}', '--key', 'x y']", "beside", "elsewhere", "/", str(script)]


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
for _ in range(6000):  # a signal that comes right before a sleep is handled behind it
    time.sleep(0.1)
"""


@pytest.mark.parametrize("ignored", [False, True])  # as in the background of a shell
@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, -15), (signal.SIGINT, 5), (signal.SIGKILL, -9)])
def test_signals_reach_the_program(signum, code, ignored):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else signal.getsignal(signal.SIGINT)
    try:
        process = subprocess.Popen([warm_python.executable(), "-c", WAITS], stdout=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        pid = int(process.stdout.readline())
        process.send_signal(signum)
        assert process.wait(20) == code
        assert ends(pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
