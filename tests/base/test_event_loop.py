"""The end of a process whose tools have left threads behind."""

import subprocess
import sys

import pytest

CODE = """
import concurrent.futures, sys, time
from mt_grpo.base import event_loop
event_loop.EXIT_SECONDS = 0.2
event_loop.run_to_exit(lambda: [concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 3600), sys.exit({})])
"""


@pytest.mark.parametrize("code, expected", [("143", 143), ("'error: full'", 1), ("", 0)])
def test_a_thread_that_hangs_does_not_keep_the_process(code, expected):
    """A tool that limits its time by a pool's `result(timeout)` leaves one, and Python joins it at the end."""
    ended = subprocess.run([sys.executable, "-c", CODE.format(code)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == expected and "left: ThreadPoolExecutor-0_0" in ended.stderr
