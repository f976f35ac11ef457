"""ms-swift's reward classes, and the registry `orms` in which its plug-ins put theirs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from mt_grpo.base.errors import tell_once

SECONDS = 5  # of the CPU, for one comparison by math-verify
WORKERS: list[subprocess.Popen] = []  # the process that compares, once there is one
LOCK = threading.Lock()


class ORM:
    """A reward class: an instance is called with `completions`, texts, and the batch's columns."""

    def __init__(self, args: Any = None, **kwargs: Any):
        self.args = args

    def __call__(self, **kwargs: Any) -> list[float | None]:
        """One reward per completion."""
        raise NotImplementedError


class AsyncORM(ORM):
    """A reward class whose call is async."""

    async def __call__(self, **kwargs: Any) -> list[float | None]:
        """One reward per completion."""
        raise NotImplementedError


def answer_in(text: str) -> str | None:
    """The contents of the first `<answer>` in a text."""
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[1].strip() if found else None


class MathAccuracy(ORM):
    """1.0 if the answer equals `solution` as mathematics, by math-verify.

    The answer is in `<answer>`, otherwise LaTeX in the text. Raises `ImportError` without math-verify.
    """

    def __init__(self, args: Any = None, **kwargs: Any):
        super().__init__(args, **kwargs)
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise ImportError("MathAccuracy needs math-verify: pip install -e '.[swift]' in the clone.") from None

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        """One reward per completion; 0.0 if the solution cannot be read."""
        return list(map(self.accuracy, completions, solution))

    def accuracy(self, text: str, solution: str) -> float:
        """1.0 or 0.0, which is also the reward where the comparison takes more than `SECONDS`, as of 9^9^9."""
        with LOCK:
            if not WORKERS or WORKERS[-1].poll() is not None:
                command = [sys.executable, Path(__file__).with_name("math_worker.py"), str(SECONDS)]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                WORKERS[:] = [subprocess.Popen(command, text=True, **pipes)]
            (worker,) = WORKERS
            worker.stdin.write(json.dumps([answer_in(solution) or solution, answer_in(text), text]) + "\n")
            worker.stdin.flush()
            if not (line := worker.stdout.readline()) and worker.wait() > 0:  # not by the limit
                tell_once("The process of math-verify failed, as it says above: that answer gets 0.0.", "math-verify")
            return float(line or 0)


class Format(ORM):
    """1.0 if a completion is `<think>...</think><answer>...</answer>`."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        """One reward per completion."""
        pattern = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
        return [float(text.endswith("</answer>") and pattern.fullmatch(text) is not None) for text in completions]


orms: dict[str, type] = {"accuracy": MathAccuracy, "format": Format}
