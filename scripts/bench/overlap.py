"""What `overlap_rollouts` gains, and whether it costs learning: the tiny server recipe with it and without.

    python scripts/bench/overlap.py            # 3 seeds of 40 steps each way, about 15 minutes on 2 cores
    python scripts/bench/overlap.py --short    # 1 seed of 12 steps: the timings only
    python scripts/bench/overlap.py --report   # only the section of docs/speed.md, from docs/results/overlap.json

One vLLM server on a core of its own, one training process on another, so that the two halves of a step do not wait for
each other's core. Without overlap a step is the sum of its halves: rollouts (`rollout/wait_seconds`) and everything
else. With it, it can be no shorter than the longer of them; the ratio to that is what is measured, with both ways
taking turns in one run. The last line reads `overlap 1.08x the longer half, 1.7x faster`.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import common
from bench.common import ROOT, Frame, VLLMServer, machine, spread, two_cores
from bench.tails import LAST, MATCH, MODEL, RECIPE, ROLLOUTS

WARM_UP = 3  # steps at the beginning that are not timed
KEPT = ("step", "step_time", "rollout/seconds", "rollout/wait_seconds", "rollout/staleness", "reward", MATCH,
        "sampling/importance_sampling_ratio/mean")  # fmt: skip


def train(server: VLLMServer, overlap: bool, seed: int, steps: int, core: int) -> dict[str, Any]:
    """One run: `overlap`, `seed`, and the `rows` of its log."""
    rows = common.train(
        RECIPE,
        ROOT / f"runs/overlap/{'on' if overlap else 'off'}-{seed}",
        "--per_device_train_batch_size",
        ROLLOUTS,
        "--max_steps",
        steps,
        "--seed",
        seed,
        "--vllm_server_port",
        server.port,
        "--overlap_rollouts",
        str(overlap).lower(),
        core=core,
        OMP_NUM_THREADS="1",
    )
    rows = [{key: row[key] for key in KEPT if key in row} for row in rows]
    print(
        f"overlap {'on ' if overlap else 'off'} seed {seed}: "
        f"{statistics.median(r['step_time'] for r in rows[WARM_UP:]):.2f} s per step, exact match "
        f"{statistics.mean(r[MATCH] for r in rows[-LAST:]):.2f}",
        flush=True,
    )
    return {"overlap": overlap, "seed": seed, "rows": rows}


def halves(rows: list[dict[str, float]]) -> tuple[float, float, float]:
    """Median seconds of a step, of its rollouts and of the rest, without overlap.

    >>> halves([{"step_time": 3.0, "rollout/wait_seconds": 1.0}] * 4)
    (3.0, 1.0, 2.0)
    """
    rows = rows[WARM_UP:]
    step, rollouts = [r["step_time"] for r in rows], [r["rollout/wait_seconds"] for r in rows]
    return (
        statistics.median(step),
        statistics.median(rollouts),
        statistics.median(s - r for s, r in zip(step, rollouts)),
    )


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios by seed, and what each way learned."""
    by = {(run["overlap"], run["seed"]): run["rows"] for run in runs}
    seeds = sorted({seed for _, seed in by})
    ratios, gains, parts = [], [], []
    for seed in seeds:
        step, rollouts, rest = halves(by[False, seed])
        overlapped = statistics.median(r["step_time"] for r in by[True, seed][WARM_UP:])
        parts.append({"step": step, "rollouts": rollouts, "rest": rest, "overlapped": overlapped})
        ratios.append(overlapped / max(rollouts, rest))
        gains.append(step / overlapped)

    def learned(overlap: bool, key: str) -> list[float]:
        return [statistics.mean(r[key] for r in by[overlap, seed][-LAST:]) for seed in seeds]

    staleness = sorted({r["rollout/staleness"] for seed in seeds for r in by[True, seed]})
    return {
        "ratio": spread(ratios),
        "gain": spread(gains),
        "seconds": parts,
        "staleness": staleness,
        "exact_match": {"on": learned(True, MATCH), "off": learned(False, MATCH)},
        "reward": {"on": learned(True, "reward"), "off": learned(False, "reward")},
    }


def section(results: dict[str, Any]) -> str:
    """The page's paragraph and table."""
    total, place, steps = results["summary"], results["machine"], results["steps"]
    lines = [
        f"**`overlap_rollouts: true`**: {ROLLOUTS} rollouts per step, {place['cores']} cores ({place['cpu']}), the "
        f"server on one and the trainer on the other, {steps} steps, {len(total['seconds'])} seeds. A step takes "
        f"{total['ratio']['median']:.2f} times the longer of its halves ({total['ratio']['min']:.2f} to "
        f"{total['ratio']['max']:.2f}), and is {total['gain']['median']:.2f} times as fast as without.",
        "",
        "| seed | rollouts | the rest | step without | step with | exact match without | with |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed, part in enumerate(total["seconds"]):
        lines.append(
            f"| {seed} | {part['rollouts']:.2f} s | {part['rest']:.2f} s | {part['step']:.2f} s | "
            f"{part['overlapped']:.2f} s | {total['exact_match']['off'][seed]:.2f} | "
            f"{total['exact_match']['on'][seed]:.2f} |"
        )
    return "\n".join([*lines, "", f"Exact match: mean of the last {LAST} steps, sampled at temperature 1."])


FRAME = Frame("overlap", section)


def main(argv: list[str] | None = None) -> None:
    if (options := FRAME.parse(__doc__, argv, "one seed of 12 steps", steps={"type": int})) is None:
        return
    trainers, servers = two_cores()
    seeds, steps = (1, 12) if options.short else (3, options.steps or 40)
    began, flags = time.monotonic(), ("--max-model-len", "512", "--logprobs-mode", "processed_logprobs")
    with VLLMServer(MODEL, *flags, cores={servers}) as server:
        runs = [
            train(server, overlap, seed, steps, trainers)
            for seed in range(seeds)
            for overlap in ((False, True) if seed % 2 == 0 else (True, False))
        ]
    total = summary(runs)
    minutes = (time.monotonic() - began) / 60
    results = {"machine": machine(), "steps": steps, "minutes": minutes, "summary": total, "runs": runs}
    FRAME.keep(results, options.short)
    print(json.dumps(total, indent=1))
    print(f"overlap {total['ratio']['median']:.2f}x the longer half, {total['gain']['median']:.2f}x faster")


if __name__ == "__main__":
    main()
