"""What `max_staleness` and `late_groups` gain where a tool has a long tail, and from where on they cost learning.

Both with the loss's clip around the policy before the step, and around the logprobs as sampled (`old_logps`).

    python scripts/bench/tails.py            # one timed seed and four more, about 2 hours
    python scripts/bench/tails.py --short    # the timed seed only, about 30 minutes
    python scripts/bench/tails.py --long     # then: five seeds of 60 steps without and with 4, about 30 minutes
    python scripts/bench/tails.py --resume   # what docs/results/tails.json (written after each run) does not hold yet
    python scripts/bench/tails.py --report   # only the section of docs/speed.md, from docs/results/tails.json

The tiny server recipe with its calculator, which waits before it answers: a median of 0.1 s, and 20 s in 1 of 100
calls. So nearly every batch of 64 rollouts has a call that waits for 20 s. The timed seed has the machine for itself:
one vLLM server on a core of its own, one training process on another. The other seeds say what is learned; two run at
the same time, each with its server on one core, and those that wait for late groups do so for a tenth of the time:
they are k batches stale however long that is. This file is also the recipe's tool: `TOOL_FUNCTIONS`.
"""

import asyncio
import json
import os
import queue
import random
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import common
from bench.common import IN_THE_ENGINE, IN_THE_ENGINE_ENV, ROOT, Frame, VLLMServer, machine, two_cores

RECIPE = "hf_recipes/tiny/calculator-vllm.yaml"
MODEL = ROOT / "hf_recipes/tiny/calculator-model"
MATCH = "rewards/exact_match_reward_func/mean"
KEPT = ("step_time", "rollout/staleness", "rollout/staleness_p99", "rollout/staleness_max", MATCH)  # of each step
ROLLOUTS = 64
CASES = {  # name -> max_staleness, late_groups, old_logps
    "0": (0, "wait", "policy"), "1": (1, "wait", "policy"), "2": (2, "wait", "policy"), "4": (4, "wait", "policy"),
    "4 sampled": (4, "wait", "sampled"), "1 admit": (1, "admit", "policy"), "2 admit": (2, "admit", "policy"),
    "4 admit": (4, "admit", "policy"), "4 admit sampled": (4, "admit", "sampled"),
}  # fmt: skip
LONG = ("0", "4 sampled")  # cases of --long, and their steps
LONG_STEPS = 60
AT_ONCE = 2  # runs that are not timed
LAST = 10  # steps whose mean says what was learned
GOAL = 0.8  # exact match that all cases come to
WAITS = random.Random(int(os.environ.get("BENCH_TAILS_SEED", 0)))
SCALE = float(os.environ.get("BENCH_TAILS_SCALE", 1.0))  # of the waits


def wait() -> float:
    """Seconds before the next answer: 20 in 1 of 100 calls, else log-normal with a median of 0.1.

    >>> sorted(round(wait(), 1) for _ in range(1000))[::499], 0.005 < sum(wait() == 20.0 for _ in range(9000)) / 9000
    ([0.0, 0.1, 20.0], True)
    """
    return SCALE * (20.0 if WAITS.random() < 0.01 else WAITS.lognormvariate(-2.3026, 0.5))


async def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Such as `6 * 7`.
    """
    from tools.calculator import calculator

    await asyncio.sleep(wait())
    return calculator(expression)


TOOL_FUNCTIONS = [calculator]


def train(server: VLLMServer, case: str, seed: int, steps: int, core: int, timed: bool) -> dict[str, Any]:
    """One run: its case, seed and log, a row per step. Raises `RuntimeError` with its last output if it fails."""
    limit, late, old_logps = CASES[case]
    output = ROOT / f"runs/tails/{case.replace(' ', '-')}-{seed}"
    rows = common.train(
        RECIPE,
        output,
        "--per_device_train_batch_size",
        ROLLOUTS,
        "--max_steps",
        steps,
        "--seed",
        seed,
        "--vllm_server_port",
        server.port,
        "--max_staleness",
        limit,
        "--late_groups",
        late,
        "--old_logps",
        old_logps,
        "--tools_script",
        "scripts/bench/tails.py",
        "--tool_timeout",
        30,
        core=core,
        OMP_NUM_THREADS="1",
        BENCH_TAILS_SEED=str(seed),
        PYTHONPATH=str(ROOT / "scripts"),
        BENCH_TAILS_SCALE="1" if timed or late == "admit" else "0.1",
    )
    columns = {key: [round(row[key], 6) for row in rows] for key in KEPT}
    run = {"case": case, "seed": seed, "timed": timed, "columns": columns}
    of = summary([run])[case]
    print(
        f"max_staleness {case} seed {seed}: {of['seconds'] or of['untimed']:.2f} s per step, staleness "
        f"{of['staleness'][0]:.2f}, exact match {of['exact_match'][0]:.2f}",
        flush=True,
    )
    return run


def steps_to_goal(exact_match: list[float]) -> int | None:
    """Steps until the mean of the last `LAST` is `GOAL`; None if it never is.

    >>> steps_to_goal([0.0] * 5 + [1.0] * 9), steps_to_goal([0.0] * 20)
    (13, None)
    """
    ends = range(LAST, len(exact_match) + 1)
    return next((end for end in ends if statistics.mean(exact_match[end - LAST : end]) >= GOAL), None)


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By case: seconds per step of the timed run, staleness and, of the last steps, exact match of each seed.

    >>> columns = {**dict.fromkeys(KEPT, [1.0, 2.0]), MATCH: [0.5, 0.5], "step_time": [2.0, 4.0]}
    >>> of = summary([{"case": "2", "seed": 0, "timed": True, "columns": columns}])["2"]
    >>> of.pop("to_goal"), of
    ([None], {'seconds': 3.0, 'untimed': None, 'exact_match': [0.5], 'staleness': [1.5], 'p99': 2.0, 'max': 2.0})
    """
    by: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):  # seeds of a case may end in another order
        empty = {"seconds": None, "untimed": None, "exact_match": [], "to_goal": [], "staleness": []}
        of, columns = by.setdefault(run["case"], empty), run["columns"]
        of["seconds" if run["timed"] else "untimed"] = statistics.mean(columns["step_time"])
        of["exact_match"].append(statistics.mean(columns[MATCH][-LAST:]))
        of["to_goal"].append(steps_to_goal(columns[MATCH]))
        of["staleness"].append(statistics.mean(columns["rollout/staleness"]))
        for name in ("p99", "max"):
            of[name] = max(of.get(name, 0.0), *columns[f"rollout/staleness_{name}"])
    return by


def mean_or_none(values: list[float | None]) -> float | None:
    """The mean; None if any value is None."""
    return None if None in values else statistics.mean(values)


def cost(exact_match: list[float], without: list[float]) -> str:
    """Mean difference of the same seeds from `max_staleness: 0`, and its standard error.

    >>> cost([0.9, 0.7, 0.8], [0.9, 0.9, 0.9])
    '-0.10 ± 0.06'
    """
    differences = [mine - other for mine, other in zip(exact_match, without)]
    if len(differences) < 2:
        return ""
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.mean(differences):+.2f} ± {error:.2f}"


def section(results: dict[str, Any]) -> str:
    """The page's paragraph and table."""
    total, place = summary(results["runs"]), results["machine"]
    seeds = len(total["0"]["exact_match"])
    lines = [
        f"**`max_staleness`**: {ROLLOUTS} rollouts per step, {results['steps']} steps, {place['cores']} cores "
        f"({place['cpu']}), the server on one and the trainer on the other. A call waits 0.1 s in the median, and "
        "20 s in 1 of 100. `admit`: with `late_groups: admit`; `sampled`: with `old_logps: sampled`.",
        "",
        "| `max_staleness` | a step | steps per minute | as fast as with 0 | staleness: mean, largest p99, largest | "
        f"exact match by seed | its mean | from that of 0 | {GOAL:.2f} after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, of in ((case, total[case]) for case in CASES if case in total):
        seconds = of["seconds"]
        lines.append(
            f"| {case} | {seconds:.1f} s | {60 / seconds:.1f} | {total['0']['seconds'] / seconds:.2f} times | "
            f"{statistics.mean(of['staleness']):.1f}, {of['p99']:.0f}, {of['max']:.0f} | "
            f"{', '.join(f'{value:.2f}' for value in of['exact_match'])} | {statistics.mean(of['exact_match']):.2f} | "
            f"{cost(of['exact_match'], total['0']['exact_match']) if case != '0' else ''} | "
            + (
                f"{steps:.0f} steps, {steps * seconds:.0f} s |"
                if (steps := mean_or_none(of["to_goal"]))
                else "not by each seed |"
            )
        )
    end = f"Exact match: mean of the last {LAST} steps of {'each of ' * (seeds > 1)}{seeds} seed{'s' * (seeds > 1)}, "
    end += "at temperature 1; from that of 0: mean difference of the same seeds ± its standard error; "
    end += f"{GOAL:.2f} after: mean number of steps until the mean of {LAST} steps is that, at the seconds of a step; "
    lines += ["", f"{end}the seconds are those of the first seed."]
    if long := results.get("long"):
        of = {case: summary(long["runs"])[case]["exact_match"] for case in LONG}
        without, ahead = (
            f"{statistics.mean(of[case]):.2f} ({', '.join(f'{x:.2f}' for x in of[case])})" for case in LONG
        )
        lines += [
            "",
            f"With {long['steps']} steps: {without} with 0, {ahead} with `{LONG[1]}`, a difference of "
            f"{cost(of[LONG[1]], of[LONG[0]])}.",
        ]
    return "\n".join(lines)


FRAME = Frame("tails", section)


def main(argv: list[str] | None = None) -> None:
    on, number = {"action": "store_true"}, {"type": int}
    steps = {"type": int, "default": 40}
    options = FRAME.parse(__doc__, argv, "the timed seed only", seeds=number, steps=steps, resume=on, long=on)
    if options is None:
        return
    cores = two_cores()
    flags = ("--max-model-len", "512", "--logprobs-mode", "processed_logprobs")
    results = {"machine": machine(), "steps": options.steps, "minutes": 0.0, "runs": []}
    if options.resume or options.long:
        path = FRAME.short_results if options.short else FRAME.results
        results = json.loads(path.read_text(encoding="utf-8"))
    of = results.setdefault("long", {"steps": LONG_STEPS, "runs": []}) if options.long else results
    there = {(run["case"], run["seed"]) for run in of["runs"]}
    seeds = range(options.seeds or (1 if options.short else 5))
    wanted = [
        (case, seed) for seed in seeds for case in (LONG if options.long else CASES) if (case, seed) not in there
    ]
    timed = [] if options.long else [case for case, seed in wanted if seed == 0]
    began, lock = time.monotonic(), threading.Lock()

    def keep(run: dict[str, Any]) -> None:
        nonlocal began
        with lock:
            of["runs"].append(run)
            results["minutes"], began = results["minutes"] + (time.monotonic() - began) / 60, time.monotonic()
            FRAME.keep({**results, "summary": summary(results["runs"])}, options.short)

    with ExitStack() as stack:
        server = stack.enter_context(VLLMServer(MODEL, *flags, cores={cores[1]})) if timed else None
        for case in timed:
            keep(train(server, case, 0, of["steps"], cores[0], True))
    wanted = [(case, seed) for case, seed in wanted if seed or options.long]
    with ExitStack() as stack:
        free: queue.Queue = queue.Queue()
        for core in cores[: min(AT_ONCE, len(wanted))]:  # more threads than cores would wait for each other
            server = VLLMServer(MODEL, *flags, *IN_THE_ENGINE, cores={core}, env=IN_THE_ENGINE_ENV)
            free.put((stack.enter_context(server), core))

        def learn(case: str, seed: int) -> None:
            server, core = free.get()
            try:
                keep(train(server, case, seed, of["steps"], core, False))
            finally:
                free.put((server, core))

        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(learn, *zip(*wanted)) if wanted else [])  # raises what a run raised
    print(section(results))


if __name__ == "__main__":
    main()
