"""Soak: the tiny server recipe for 200 steps while the server is killed, tools hang and the network fails at random.

    python scripts/bench/soak.py                       # 200 steps, about 17 minutes on 2 cores
    python scripts/bench/soak.py --steps 40 --kills 1  # a short one
    python scripts/bench/soak.py --servers 3           # three servers, of which one at a time is killed
    python scripts/bench/soak.py --max-staleness 2     # batches in flight all the time; --late-groups admit, too

A vLLM server, a proxy in front of it that answers 429, 500 and 503 and closes connections in mid-answer, a tool that
now and then hangs for longer than its time limit, and `kill -9` for the server, which is then started again on the
same port. Two training processes, as the recipe has them. The run must finish, have every step once, answer held-out
problems, and show no growth in memory, threads, sockets or files. Exit code 1 and a list of what failed otherwise.

What it measured goes to docs/results/soak.json and docs/soak.png (runs/ with fewer than 200 steps); with several
servers to docs/results/soak_servers.json and docs/soak_servers.png (runs/ with fewer than 80), and with batches in
flight to docs/results/soak_staleness.json and docs/soak_staleness.png (runs/ with fewer than 80).
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import common
from bench.common import ROOT, VLLMServer, machine
from fault_proxy import Fault, FaultProxy, Request

RECIPE = "hf_recipes/tiny/calculator-vllm.yaml"
MODEL = ROOT / "hf_recipes/tiny/calculator-model"
FAULTS = {  # name -> (share of the generation requests, what happens)
    "429": (0.004, Fault("429", status=429)),
    "500": (0.004, Fault("500", status=500)),
    "503": (0.004, Fault("503", status=503)),
    "cut": (0.004, Fault("cut", cut=True)),
    "slow": (0.002, Fault("slow", delay=2.0)),
}
# Of each process -> (the figure of a quarter of the run that is compared, how many fold it may grow). A conversation
# has a socket while it samples and none between the rollouts, so that a median of them says when it was looked.
MAY_GROW = {
    "rss": (statistics.median, 1.1),
    "threads": (statistics.median, 1.2),
    "sockets": (max, 1.2),
    "files": (statistics.median, 1.2),
}
HANGING_TOOL = '''
"""The calculator, one call in {every} of which hangs for {seconds} s; the time limit is below that."""

import random
import sys
import time

sys.path.insert(0, {tools!r})
import calculator as original

chance = random.Random()


def calculator(expression: str) -> str:
    if chance.random() < 1 / {every}:
        time.sleep({seconds})
    return original.calculator(expression)


calculator.__doc__ = original.calculator.__doc__
TOOL_FUNCTIONS = [calculator]
'''


def sample(pid: int) -> dict[str, int] | None:
    """Resident memory in KiB, threads, sockets and other open files of a process; None if it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        links = []
        for entry in (folder / "fd").iterdir():
            try:
                links.append(os.readlink(entry))
            except FileNotFoundError:
                continue  # closed meanwhile
        sockets = sum(link.startswith("socket:") for link in links)
        return {
            "rss": int(status["VmRSS"].split()[0]),
            "threads": int(status["Threads"]),
            "sockets": sockets,
            "files": len(links) - sockets,
        }
    except (FileNotFoundError, ProcessLookupError, KeyError, PermissionError):
        return None


def trainers(launcher: int) -> list[int]:
    """Process ids of the training processes below the launcher, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        rank = next((int(e[5:]) for e in environment if e.startswith(b"RANK=")), None)
        if parent == launcher and rank is not None:
            found[rank] = int(folder.name)
    return [pid for _, pid in sorted(found.items())]


def growth(values: list[float], figure: Callable = statistics.median) -> float:
    """A figure of the last quarter over that of the second, since the first one warms up.

    >>> growth([1, 1, 2, 2, 2, 2, 3, 3])
    1.5
    >>> growth([0, 0, 8, 40, 8, 8, 40, 40], max), growth([0, 4, 4, 5], max)
    (1.0, 1.25)
    """
    quarter = len(values) // 4
    return figure(values[-quarter:]) / max(figure(values[quarter : 2 * quarter]), 1)


def rule(seed: int):
    """Faults at random for generation requests; everything else passes."""
    chance = random.Random(seed)

    def faults(request: Request) -> Fault | None:
        if request.path != "/v1/completions":
            return None
        draw = chance.random()
        for share, fault in FAULTS.values():
            draw -= share
            if draw < 0:
                return fault
        return None

    return faults


def steps_done(output: Path) -> int:
    """Steps whose rollouts were written."""
    try:
        return json.loads((output / "rollouts.rank0.jsonl").read_text().splitlines()[-1])["step"]
    except (FileNotFoundError, IndexError, ValueError):
        return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole soak; returns what was measured, with `problems`: what was not as it must be."""
    output = ROOT / "runs/soak"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    tool = HANGING_TOOL.format(every=options.hang_every, seconds=6, tools=str(ROOT / "tools"))
    (output / "tools.py").write_text(tool)
    chance = random.Random(options.seed)
    span = options.steps / (options.kills + 1)
    kills = [round(span * (i + 1) + chance.uniform(-0.2, 0.2) * span) for i in range(options.kills)]
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    samples: list[dict[str, Any]] = []
    downs: list[dict[str, float]] = []
    servers = [
        VLLMServer(
            MODEL,
            "--max-model-len",
            "512",
            "--logprobs-mode",
            "processed_logprobs",
            log=output / f"vllm_server.{number}.log",
            timeout=300,
        ).start()
        for number in range(options.servers)
    ]
    started, launcher, returns = time.monotonic(), None, []
    with contextlib.ExitStack() as stack:
        proxies = [
            stack.enter_context(FaultProxy(server.url, rule(options.seed + number)))
            for number, server in enumerate(servers)
        ]
        command = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", "hf_recipes/accelerate/cpu.yaml",
            "mt_grpo_trainer.py", "--config", RECIPE, "--output_dir", str(output), "--max_steps", str(options.steps),
            "--vllm_server_base_url", ",".join(proxy.url for proxy in proxies),
            "--tools_script", str(output / "tools.py"), "--tool_timeout", "2",
            "--lr_scheduler_type", "linear", "--disable_tqdm", "true",
            "--max_staleness", str(options.max_staleness), "--late_groups", options.late_groups,
        ]  # fmt: skip
        try:
            for server in servers:
                server.wait()
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            with open(output / "train.log", "w") as log:
                launcher = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            told = 0
            while launcher.poll() is None:
                time.sleep(1)
                step = steps_done(output)
                if kills and step >= kills[0]:
                    kills.pop(0)
                    time.sleep(chance.uniform(0, 2))  # anywhere in a step
                    server = chance.choice([s for s in servers if s.healthy()] or servers)
                    server.kill()
                    returns.append(threading.Thread(target=bring_back, args=(server, step, downs)))
                    returns[-1].start()
                    if len(servers) == 1:  # the run waits as well
                        returns[-1].join()
                elif step != told:
                    told = step
                    samples.append(
                        {"step": step, "ranks": [s for pid in trainers(launcher.pid) if (s := sample(pid))]}
                    )
                    if step % 10 == 0:
                        print(f"step {step} of {options.steps}, {time.monotonic() - started:.0f} s", flush=True)
        finally:
            if launcher is not None and launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(common.STOP_SECONDS)
                with contextlib.suppress(ProcessLookupError):  # else the servers would stay, too
                    os.killpg(launcher.pid, signal.SIGKILL)
            for thread in returns:
                thread.join()
            for server in servers:
                server.stop()
        faults = dict(sum((proxy.counts for proxy in proxies), Counter()))
    left = set(os.listdir("/dev/shm")) - shared if os.path.isdir("/dev/shm") else set()
    result = {
        "machine": machine(), "steps": options.steps, "seed": options.seed,
        "max_staleness": options.max_staleness, "late_groups": options.late_groups, "kills": options.kills,
        "hang_every": options.hang_every, "exit_code": launcher.returncode,
        "minutes": (time.monotonic() - started) / 60, "server_kills": downs, "proxy_faults": faults,
        "left_in_shared_memory": sorted(name for name in left if name.startswith(("mt-grpo", ".mt-grpo"))),
    }  # fmt: skip
    result |= summary(output, samples, options.steps)
    result["problems"] = problems(result, options)
    return result


def bring_back(server: VLLMServer, step: int, downs: list[dict[str, float]]) -> None:
    """Start a killed server again, and note how long it was away."""
    down = time.monotonic()
    server.start().wait()
    downs.append({"step": step, "seconds": time.monotonic() - down})
    print(f"step {step}: server killed, back after {downs[-1]['seconds']:.0f} s", flush=True)


def summary(output: Path, samples: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """What the run's own files and the samples of its processes say."""
    try:
        history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    except FileNotFoundError:
        history = []
    rows = [row for row in history if "reward" in row]
    exact = [row["rewards/exact_match_reward_func/mean"] for row in rows]
    ranks = max((len(s["ranks"]) for s in samples), default=0)
    whole = [s for s in samples if len(s["ranks"]) == ranks]
    return {
        "logged_steps": [row["step"] for row in rows] == list(range(1, steps + 1)),
        "exact_match": exact,
        "exact_match_last": statistics.mean(exact[-20:]) if exact else None,
        "conversations_restarted": sum(row["rollout/restarted"] for row in rows),
        "servers": sorted({row["sync/servers"] for row in rows if "sync/servers" in row}),
        "requests_retried": sum(row["rollout/retries"] for row in rows),
        "tool_timeouts": sum(
            (row["tools/timeout_frequency"] or 0.0) * row["tools/call_frequency"] * 64 for row in rows
        ),
        "sampling_logp_difference": max((row["sampling/sampling_logp_difference/mean"] for row in rows), default=None),
        "push_logp_difference": max((row["sync/logprob_difference"] for row in rows
                                     if "sync/logprob_difference" in row), default=None),
        "staleness": statistics.mean(row["rollout/staleness"] for row in rows) if rows else None,
        "staleness_max": max((row["rollout/staleness_max"] for row in rows), default=None),
        "step_seconds": statistics.median(row["step_time"] for row in rows) if rows else None,
        "growth": {
            name: [growth([s["ranks"][rank][name] for s in whole], figure) for rank in range(ranks)]
            for name, (figure, _) in MAY_GROW.items()
        } if len(whole) >= 8 else None,
        "samples": [{"step": s["step"], **{name: [r[name] for r in s["ranks"]] for name in MAY_GROW}} for s in whole],
    }  # fmt: skip


def problems(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """What is not as it must be, in words."""
    found = []
    if result["exit_code"] != 0:
        found.append(f"the run ended with exit code {result['exit_code']}: see runs/soak/train.log")
    if not result["logged_steps"]:
        found.append("a step is missing from trainer_state.json, or is there twice")
    if options.steps >= 200 and not (result["exact_match_last"] or 0) > 0.9:
        found.append(f"exact match of the last 20 steps is {result['exact_match_last']}, expected above 0.9")
    if options.servers > 1 and result["servers"][-1:] != [options.servers]:
        found.append(f"servers that held the weights: {result['servers']}, expected up to {options.servers}")
    # What older weights sampled has other logprobs: there the comparison behind a push says whether it arrived.
    difference = result["push_logp_difference" if options.max_staleness else "sampling_logp_difference"]
    if not (difference or 1) < 1e-4:
        found.append(f"trainer and server disagreed by {difference} in a step")
    if options.late_groups == "wait" and not 0 <= (result["staleness_max"] or 0) <= options.max_staleness:
        found.append(f"staleness was {result['staleness_max']}, expected at most {options.max_staleness}")
    if options.max_staleness and not (result["staleness"] or 0) > options.max_staleness / 2:
        found.append(f"staleness was {result['staleness']} in the mean: hardly anything was in flight")
    if len(result["server_kills"]) < options.kills:
        found.append(f"the server was killed {len(result['server_kills'])} times, not {options.kills}")
    for name, (_, limit) in MAY_GROW.items():
        for rank, value in enumerate((result["growth"] or {}).get(name, [])):
            if value > limit:
                found.append(f"{name} of rank {rank} grew {value:.2f} fold between the second and the last quarter")
    if result["left_in_shared_memory"]:
        found.append(f"left in /dev/shm: {result['left_in_shared_memory']}")
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """Exact match and memory over the steps, the server's kills marked."""
    pyplot = common.pyplot()
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 4.6), sharex=True, height_ratios=(3, 2))
    exact = result["exact_match"]
    above.plot(range(1, len(exact) + 1), exact, color="#0072B2", linewidth=1.2)
    above.set(ylabel="exact match of the batch", ylim=(0, 1))
    steps = [s["step"] for s in result["samples"]]
    for rank in range(len(result["samples"][0]["rss"])):
        memory = [s["rss"][rank] / 2**20 for s in result["samples"]]
        below.plot(steps, memory, linewidth=1.2, label=f"rank {rank}", color=("#E69F00", "#009E73")[rank % 2])
    below.set(xlabel="optimizer step", ylabel="resident memory, GiB", xlim=(1, result["steps"]))
    below.set_ylim(bottom=0)
    below.legend(frameon=False, fontsize=9, loc="lower right")
    for axis in (above, below):
        for i, down in enumerate(result["server_kills"]):
            axis.axvline(down["step"], color="#D55E00", linestyle=":", label=None if i else "server killed")
    above.legend(frameon=False, fontsize=9, loc="lower right")
    common.save_picture(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=4, help="how often the server is killed")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--max-staleness", type=int, default=0, help="batches in flight")
    parser.add_argument("--late-groups", choices=("wait", "admit"), default="wait")
    parser.add_argument("--hang-every", type=int, default=2000, help="one tool call in so many hangs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.steps < 8 or options.kills < 0 or options.hang_every < 1 or options.servers < 1:
        sys.exit(
            "error: expected --steps of at least 8, --kills of at least 0, --hang-every and --servers of at least 1."
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    result = run(options)
    name, whole = ("soak", 200) if options.servers == 1 else ("soak_servers", 80)
    if options.max_staleness:
        name, whole = "soak_staleness", 80
    # The pages have one soak of each kind. One of two kinds at once would take its place without a word.
    mixed = options.late_groups != "wait" or (options.max_staleness and options.servers > 1)
    folder = ROOT / ("docs" if options.steps >= whole and not mixed else "runs")
    common.write_json(folder / f"results/{name}.json", result)
    if result["samples"]:
        plot(result, folder / f"{name}.png")
    shown = {k: v for k, v in result.items() if k not in ("samples", "exact_match", "machine", "problems")}
    print(json.dumps(shown, indent=1))
    if result["problems"]:
        sys.exit("soak failed:\n" + "\n".join(f"- {problem}" for problem in result["problems"]))
    print(f"soak passed: {options.steps} steps, exact match {result['exact_match_last']:.2f} over the last 20")


if __name__ == "__main__":
    main()
