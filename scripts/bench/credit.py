"""Compare the credit assignments: generated tasks and a game, every method, several seeds, on a CPU.

    python scripts/bench/credit.py                     # what is missing, two runs at a time; then the report
    python scripts/bench/credit.py --tasks chain --methods outcome mt_grpo --seeds 0 1
    python scripts/bench/credit.py --report            # only docs/results/credit.json, docs/credit.png, the tables

Tasks: (a) `calculator`, one call and an answer; (b) `chain`, three or four calls, each on the last result; (c)
`sparse`, the same chain from a model that answers fewer than one problem in fifty right, with exact match as its only
outcome; (d) `encyclopedia`, one or two searches and an answer, with the rewards for TriviaQA; (e) `frozen_lake`, a
game of gymnasium, up to 20 turns, one reward at its goal; the board is the state of `gigpo`. `unscaled`: (b) again
without dividing rewards by their spread. `turn_return` has `scale_rewards: none` in (d) and (e). (f) `alone`: the task
of (c) where nobody pays turns, by ways to make more of the outcome (WAYS), all of them whatever --methods says, at
the recipe's learning rate. Two of them replace groups without signal, and `outcome_thrice` trains on three times as
many groups: compare these by their tokens.
(g) `hops`: the task of (d) where nobody pays turns, by some of these ways; by `gain` and `gain_zero_sum`, which are
`mt_grpo` and `zero_sum` with the information gain of each search as the turn's reward (rewards/information_gain.py).
`outcome_ten` has ten groups in a step instead of eight, for the tokens of `outcome_refill`.

Fair: all methods of a task have the same model, rewards, seeds, optimizer steps and, except for those ways, number
of rollouts, and c = 1 (the shift of `zero_sum` is a raw reward, the other own terms are z-scores). The learning rate
of a method was the best of 3e-4, 6e-4 and 1.2e-3 on task (b) by the area under the training curve, on one seed that is
not reported: a noisy choice. (d) to (g) have their recipe's for all.

Resumable: a finished run is a file in runs/credit/ with the commit that made it, and is not run again: delete its file
for that. The report puts what the runs of a method on a task come to into docs/results/credit.json; what has no new
runs stays there.
"""

import argparse
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import common
from bench.common import end_with_parent, rounded, write_json, write_section

METHODS = ("outcome", "merged", "mt_grpo", "turn_return", "gigpo", "zero_sum")
WAYS = {  # of task (f): what each sets
    "outcome": ["--credit_assignment", "outcome"],
    "outcome_by_mean": ["--credit_assignment", "outcome", "--scale_rewards", "mean"],
    "gigpo_return": ["--credit_assignment", "gigpo", "--outcome_in_return", "true"],
    "gigpo_others": [
        "--credit_assignment", "gigpo", "--outcome_in_return", "true", "--state_baseline", "leave_one_out"
    ],
    # Up to three batches a step, of which one is trained; and three batches a step, all of which are trained.
    "outcome_refill": ["--credit_assignment", "outcome", "--refill_groups", "2"],
    "gigpo_refill": ["--credit_assignment", "gigpo", "--outcome_in_return", "true", "--refill_groups", "2"],
    "outcome_thrice": ["--credit_assignment", "outcome", "--per_device_train_batch_size", "192"],
}  # fmt: skip
UNPAID = {  # of task (g), by exact match alone
    **{name: WAYS[name] for name in ("outcome", "outcome_by_mean", "gigpo_return", "outcome_refill")},
    "outcome_ten": [*WAYS["outcome"], "--per_device_train_batch_size", "80"],  # as many tokens as `outcome_refill`
}
HOPS = {  # of task (g); the last two are also paid what each search gained
    **{name: [*arguments, "--turn_reward_weights", "0"] for name, arguments in UNPAID.items()},
    "gain": ["--credit_assignment", "mt_grpo"],
    "gain_zero_sum": ["--credit_assignment", "zero_sum"],
}
# In the order of the tables. `tree`, `tree_refill`, `tree_nine` and `echo` were measured by commit 342dc01, the last
# one with trees of rollouts and a loss of observations: their figures stay in the results.
NAMES = [*METHODS, *list(WAYS)[1:], "tree", "tree_refill", "outcome_ten", "tree_nine", "echo", *list(HOPS)[-2:]]
LEARNING_RATES = {"turn_return": 3e-4, "gigpo": 1.2e-3}  # of (a) to (c); of the others
LEARNING_RATE = 6e-4
NUM_SEEDS = 5  # fewer are not quoted, but where a task says another number
SMOOTHED_OVER = 5  # steps
SEEDS_SHOWN = [("sparse", "outcome"), ("sparse", "merged"), ("sparse", "mt_grpo")]  # each seed a line
THRESHOLD = 0.8
NUM_PROBLEMS = 256  # held out
TASKS: dict[str, dict[str, Any]] = {
    "calculator": {
        "steps": 25, "title": "(a) calculator, one call", "arguments": [
            "--config", "hf_recipes/tiny/calculator.yaml", "--reward_fn", "rewards/chain_reward.py",
            "--lr_scheduler_type", "constant",
        ],
    },
    "chain": {
        "steps": 40, "title": "(b) chain of three or four calls",
        "arguments": ["--config", "hf_recipes/tiny/chain.yaml"],
    },
    "sparse": {
        "steps": 40, "title": "(c) the same chain, sparse outcome",
        "arguments": ["--config", "hf_recipes/tiny/chain-sparse.yaml"],
    },
    "unscaled": {
        "steps": 40, "title": "(b) again, with scale_rewards: none",
        "arguments": ["--config", "hf_recipes/tiny/chain.yaml", "--scale_rewards", "none"],
    },
    "encyclopedia": {
        "steps": 40, "title": "(d) search in an encyclopedia, one and two hops", "learning_rate": LEARNING_RATE,
        "arguments": ["--config", "hf_recipes/tiny/encyclopedia.yaml", "--lr_scheduler_type", "constant"],
        "scale_rewards": {method: "none" if method == "turn_return" else "group" for method in METHODS},
    },
    "frozen_lake": {
        "steps": 30, "title": "(e) FrozenLake, 4x4", "outcome": "FrozenLake-v1", "learning_rate": LEARNING_RATE,
        "arguments": ["--config", "hf_recipes/tiny/frozen_lake.yaml"],
        "scale_rewards": {"outcome": "group", "mt_grpo": "group", "turn_return": "none", "gigpo": "group"},
    },
    "alone": {
        "steps": 40, "title": "(f) the chain of (c), nobody pays turns", "learning_rate": LEARNING_RATE, "ways": WAYS,
        "arguments": ["--config", "hf_recipes/tiny/chain-sparse.yaml", "--turn_reward_weights", "0", "0"],
    },
    "hops": {
        "steps": 40, "title": "(g) the searches of (d), nobody pays turns", "ways": HOPS, "seeds": 3,
        "learning_rate": LEARNING_RATE,
        "arguments": [
            "--config", "hf_recipes/tiny/encyclopedia.yaml", "--lr_scheduler_type", "constant",
            "--reward_fn", "rewards/information_gain.py",
        ],
    },
}  # fmt: skip
RESULTS, PICTURE, PAGE = Path("docs/results/credit.json"), Path("docs/credit.png"), Path("docs/credit.md")
RUNS = Path("runs/credit")
FIGURES = (
    "tool_executed",
    "result_found",
    "mean_turns",
    "exact_match",
    "area",
    "steps_to_threshold",
    "without_signal",
)

Job = dict[str, Any]  # task, method, learning_rate, seed, steps

# -- One run --


def run(job: Job) -> dict[str, Any]:
    """Train and evaluate; returns the job with its figures and the training curve."""
    import evaluate
    from transformers import PrinterCallback
    from transformers.utils.logging import disable_progress_bar

    import mt_grpo_trainer as mt

    disable_progress_bar()
    started = time.perf_counter()
    task = TASKS[job["task"]]
    outcome = task.get("outcome", "exact_match_reward_func")
    scale = ["--scale_rewards", task["scale_rewards"][job["method"]]] if "scale_rewards" in task else []
    way = task["ways"][job["method"]] if "ways" in task else ["--credit_assignment", job["method"]]
    recipe = mt.parse_arguments([
        *task["arguments"], *scale, *way, "--seed", str(job["seed"]),
        "--learning_rate", str(job["learning_rate"]), "--max_steps", str(job["steps"]), "--log_rollouts", "0",
        "--disable_tqdm", "true", "--output_dir", str(RUNS / "scratch" / name_of(job)),
    ])  # fmt: skip
    trainer = mt.build_trainer(*recipe)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trained = time.perf_counter()
    steps = [log for log in trainer.state.log_history if "reward" in log]
    row = {
        **job,
        "commit": commit(),
        # Of all that was sampled: what a refill trains is near the middle, whatever the policy does.
        "train_exact_match": [
            log.get("refill/outcome_of_all_sampled", log[f"rewards/{outcome}/mean"]) for log in steps
        ],
        "tokens": steps[-1]["num_tokens"],
        "without_signal": mean([log["credit/frac_groups_without_signal"] for log in steps]),
    }
    row |= curve_figures(row["train_exact_match"])
    trainer.model.eval()
    how = {"tokenizer": trainer.processing_class, "progress": False, "batch_size": NUM_PROBLEMS}
    result = evaluate.evaluate(trainer.model, recipe, NUM_PROBLEMS, **how)
    row |= {key: result[key] for key in ("tool_executed", "result_found", "mean_turns")}
    row["exact_match"] = result["rewards"]["outcome"][outcome]
    row |= {"train_seconds": round(trained - started, 1), "seconds": round(time.perf_counter() - started, 1)}
    return rounded(row, 6)


def curve_figures(exact_match: list[float]) -> dict[str, float | None]:
    """The area under the smoothed curve of a run (its mean) and the first step at which it passes the threshold.

    >>> curve_figures([0.0] * 5 + [1.0] * 5)
    {'area': 0.3, 'steps_to_threshold': 10}
    >>> curve_figures([0.0, 1.0, 0.5])["steps_to_threshold"] is None
    True
    """
    smooth = smoothed(exact_match)
    passed = next((step for step, value in enumerate(smooth, 1) if value > THRESHOLD), None)
    return {"area": mean(smooth), "steps_to_threshold": passed}


def smoothed(values: list[float], over: int = SMOOTHED_OVER) -> list[float]:
    """The mean of the last `over` values, of fewer at the beginning.

    >>> smoothed([1.0, 2.0, 3.0], over=2)
    [1.0, 1.5, 2.5]
    """
    return [mean(values[max(0, i + 1 - over) : i + 1]) for i in range(len(values))]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# -- All runs --


def name_of(job: Job) -> str:
    """The name of a run's file.

    >>> name_of({"task": "chain", "method": "mt_grpo", "learning_rate": 6e-4, "seed": 1, "steps": 50})
    'chain-mt_grpo-lr0.0006-steps50-seed1'
    """
    return f"{job['task']}-{job['method']}-lr{job['learning_rate']:g}-steps{job['steps']}-seed{job['seed']}"


def commit() -> str:
    """The commit of this clone, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def finished() -> dict[str, dict[str, Any]]:
    """All finished runs by name."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*.json"))]
    return {name_of(row): row for row in rows}


def num_seeds(task: str) -> int:
    """The seeds of a task, of which fewer are not quoted."""
    return TASKS[task].get("seeds", NUM_SEEDS)


def make_jobs(tasks: list[str], methods: list[str], seeds: list[int] | None) -> list[Job]:
    """Seed by seed, so that a benchmark that is stopped has compared all methods on the same seeds.

    `seeds` None: the first ones, as many as each task has.
    """
    return [
        {"task": task, "method": m, "learning_rate": rate, "seed": seed, "steps": TASKS[task]["steps"]}
        for task in tasks
        for seed in (range(num_seeds(task)) if seeds is None else seeds)
        for m in TASKS[task].get("ways", methods)
        if (rate := rate_of(task, m))
    ]


def rate_of(task: str, method: str) -> float | None:
    """The learning rate of a method on a task. None: the task is without the method."""
    if method not in TASKS[task].get("ways", TASKS[task].get("scale_rewards", METHODS)):
        return None
    return TASKS[task].get("learning_rate", LEARNING_RATES.get(method, LEARNING_RATE))


def begin() -> None:
    """Prepare a worker process: it ends with its parent, and torch has one thread."""
    end_with_parent(signal.SIGKILL)
    import torch

    torch.set_num_threads(1)


def run_all(jobs: list[Job], num_workers: int) -> None:
    """Run what is not finished; each result goes into its own file at once. Raises what a run raises."""
    RUNS.mkdir(parents=True, exist_ok=True)
    there = finished()
    jobs = [job for job in jobs if name_of(job) not in there]
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    started = time.perf_counter()
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), begin) as pool:
        runs = {pool.submit(run, job): job for job in jobs}
        try:
            for number, done in enumerate(as_completed(runs), 1):
                job, row = runs[done], done.result()
                path = RUNS / f"{name_of(job)}.json"
                path.with_suffix(".tmp").write_text(json.dumps(row) + "\n", encoding="utf-8")
                path.with_suffix(".tmp").replace(path)
                left = (time.perf_counter() - started) / number * (len(jobs) - number)
                print(
                    f"{number:>3}/{len(jobs)}  {name_of(job):<52} exact match {row['exact_match']:.2f}  area "
                    f"{row['area']:.2f}  {row['seconds']:.0f} s  ({left / 60:.0f} min left)",
                    flush=True,
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# -- The report --

# Student's t, 97.5%, by degrees of freedom; beyond 15 the last, which is a little too wide.
T_975 = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
                        2.145, 2.131), 1))  # fmt: skip


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95% interval over seeds (Student's t).

    >>> interval([1.0, 2.0, 3.0])
    (2.0, 2.48433820832296)
    """
    half = T_975[min(len(values) - 1, max(T_975))] * statistics.stdev(values) / math.sqrt(len(values))
    return mean(values), half


def spread(values: list[float | None]) -> str:
    """The mean over seeds and its interval, or a dash where nothing gave such figures: nobody pays turns, say.

    >>> spread([1.0, 2.0, 3.0]), spread([None, None, None])
    ('2.00 ± 2.48', '-')
    """
    return "-" if None in values else "{:.2f} ± {:.2f}".format(*interval(values))


def median_steps(values: list[int | None], steps: int) -> str:
    """The median of the steps to the threshold; runs that never passed it are later than every other.

    >>> median_steps([10, 30, 20], 50), median_steps([10, None, None], 50), median_steps([10, 20, 25, None], 50)
    ('20', '> 50', '22.5')
    """
    middle = statistics.median(math.inf if v is None else v for v in values)
    return f"> {steps}" if middle == math.inf else f"{middle:g}"


def reported(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The runs that may be quoted: task and method to runs, on at least `num_seeds` of the task, the same for all its
    methods.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if (row["steps"], row["learning_rate"]) == (TASKS[row["task"]]["steps"], rate_of(row["task"], row["method"])):
            groups.setdefault((row["task"], row["method"]), []).append(row)
    groups = {key: found for key, found in groups.items() if len(found) >= num_seeds(key[0])}
    seeds = {
        task: set.intersection(*({row["seed"] for row in found} for key, found in groups.items() if key[0] == task))
        for task in {key[0] for key in groups}
    }
    return {
        key: [row for row in found if row["seed"] in seeds[key[0]]]
        for key, found in groups.items()
        if len(seeds[key[0]]) >= num_seeds(key[0])
    }


def aggregated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of each task and method: its figures by seed, and `curve`, (mean, half width) by step.

    Those of SEEDS_SHOWN also have `curves`, the smoothed exact match of each seed by step.
    """
    found = []
    for (task, method), runs in reported(rows).items():
        runs = sorted(runs, key=lambda row: row["seed"])
        curves = [smoothed(row["train_exact_match"]) for row in runs]
        found.append(
            {
                "task": task,
                "method": method,
                "learning_rate": runs[0]["learning_rate"],
                **{key: [row[key] for row in runs] for key in ("seed", *FIGURES)},
                "tokens": [row["tokens"] for row in runs if "tokens" in row],
                **({"curves": [[round(v, 3) for v in c] for c in curves]} if (task, method) in SEEDS_SHOWN else {}),
                "curve": [[round(number, 2) for number in interval(list(values))] for values in zip(*curves)],
            }
        )
    return found


def columns(task: str) -> dict[str, Callable[[dict[str, Any]], str]]:
    """The columns of a task's table: title -> the text of a result. A game's outcome is that a goal is reached."""
    settings = TASKS[task]

    def mean_of(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: spread(row[key])

    found: dict[str, Callable[[dict[str, Any]], str]] = {}
    if "scale_rewards" in settings:
        found["scaled by"] = lambda row: f"`{settings['scale_rewards'][row['method']]}`"
    found["goal reached" if "outcome" in settings else "exact match"] = mean_of("exact_match")
    if "outcome" in settings or "ways" in settings:
        found["each seed"] = lambda row: " ".join(f"{value:.2f}" for value in row["exact_match"])
    if "ways" in settings:  # prompts, and what was sampled
        found["tokens"] = lambda row: f"{mean(row['tokens']) / 1e3:.0f}k" if row["tokens"] else "-"
    found["area"] = mean_of("area")
    found["steps to 0.8"] = lambda row: median_steps(row["steps_to_threshold"], settings["steps"])
    if "outcome" in settings:
        return {**found, "turns": mean_of("mean_turns"), "no signal": mean_of("without_signal")}
    further = {"right result": "result_found", "tool executed": "tool_executed", "turns": "mean_turns"}
    found |= {title: mean_of(key) for title, key in {**further, "no signal": "without_signal"}.items()}
    return {**found, "learning rate": lambda row: f"{row['learning_rate']:g}"}


def markdown(results: list[dict[str, Any]]) -> str:
    """One table per task that has results to quote."""
    groups, lines = {(row["task"], row["method"]): row for row in results}, []
    for task, settings in TASKS.items():
        rows = [groups[task, method] for method in NAMES if (task, method) in groups]
        if not rows:
            continue
        game, texts = "outcome" in settings, columns(task)
        rate = f"learning rate {settings['learning_rate']:g}, " if game else ""
        lines += [
            f"**{settings['title']}**: {settings['steps']} steps of 64 rollouts, {rate}{NUM_PROBLEMS} "
            f"{'further episodes' if game else 'held-out problems'}, {min(len(row['seed']) for row in rows)} seeds, "
            "mean ± 95% interval",
            "",
            f"| `credit_assignment` | {' | '.join(texts)} |",
            "|" + "---|" * (1 + len(texts)),
            *(f"| `{row['method']}` | {' | '.join(text(row) for text in texts.values())} |" for row in rows),
            "",
        ]
    return "\n".join(lines).rstrip("\n")


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """The training curves of all tasks: mean over seeds of the smoothed exact match, and its 95% interval."""
    pyplot = common.pyplot()
    groups = {(row["task"], row["method"]): row for row in results}
    tasks = [task for task in TASKS if any(key[0] == task for key in groups)]
    okabe_and_ito = (
        "#777777 #E69F00 #0072B2 #009E73 #CC79A7 #D55E00 #F0E442 #56B4E9 #000000 #882255 "
        "#44AA99 #999933 #117733 #88CCEE #DDCC77 #AA4499 #661100 #6699CC #CCBB44"
    ).split()
    colours = dict(zip(NAMES, okabe_and_ito, strict=True))
    columns = min(2, len(tasks))
    height = math.ceil(len(tasks) / columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(5.2 * columns, 3.7 * height), squeeze=False, sharey=True)
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    for axis, task in zip(axes.flat, tasks):
        for method in NAMES:
            if (task, method) not in groups:
                continue
            means, half_widths = zip(*groups[task, method]["curve"])
            low, high = zip(*((max(0, m - h), min(1, m + h)) for m, h in zip(means, half_widths)))
            steps = range(1, len(means) + 1)
            axis.plot(steps, means, color=colours[method], label=method, linewidth=1.8)
            axis.fill_between(steps, low, high, color=colours[method], alpha=0.13, linewidth=0)
        axis.set(title=TASKS[task]["title"], xlabel="optimizer step", ylim=(0, 1), xlim=(1, TASKS[task]["steps"]))
        if axis is axes[0][0] or "ways" in TASKS[task]:  # the others have the methods of the first one
            axis.legend(frameon=False, fontsize=9)
    for row_of_axes in axes:
        row_of_axes[0].set_ylabel(f"exact match of the batch,\nmean over {SMOOTHED_OVER} steps")
    common.save_picture(figure, path)


def plot_seeds(results: list[dict[str, Any]], path: Path) -> None:
    """One panel per method of SEEDS_SHOWN, one line per seed: the smoothed exact match of the training batches."""
    rows = [row for shown in SEEDS_SHOWN for row in results if (row["task"], row["method"]) == shown]
    figure, axes = common.pyplot().subplots(1, max(2, len(rows)), figsize=(9, 2.7), sharey=True)
    for axis, row, colour in zip(axes, rows, ("#777777", "#E69F00", "#0072B2")):
        for curve in row["curves"]:
            axis.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=1.6)
        learned = sum(value > 0.5 for value in row["exact_match"])
        axis.set(title=f"{row['method']}: {learned} of {len(row['seed'])} seeds learn", xlabel="optimizer step")
    axes[0].set(ylabel="exact match", ylim=(0, 1))
    common.save_picture(figure, path)


def report() -> None:
    """Write the results file, the plots and the page's tables from all finished runs."""
    old = json.loads(RESULTS.read_text(encoding="utf-8"))["results"] if RESULTS.is_file() else []
    runs = finished()
    results = {(row["task"], row["method"]): row for row in [*old, *aggregated(list(runs.values()))]}
    rows = sorted(results.values(), key=lambda row: (list(TASKS).index(row["task"]), NAMES.index(row["method"])))
    if not rows:
        sys.exit(f"error: {len(runs)} finished runs in {RUNS}, and no method has the seeds of its task.")
    write_json(RESULTS, {"results": rows})
    table = markdown(rows)
    plot(rows, PICTURE)
    plot_seeds(rows, PICTURE.with_name("credit_seeds.png"))
    write_section("credit", table, PAGE)
    print(f"{RESULTS}: {len(runs)} runs, {len(rows)} results; {PICTURE} and the tables in {PAGE}\n\n{table}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: the first ones, as many as a task has")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--report", action="store_true", help="only write the results file, the plot and the table")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        sys.exit(f"error: --jobs {options.jobs}, expected 1 or more.")
    if not options.report:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM; finished runs are kept"))
        run_all(make_jobs(options.tasks, options.methods, options.seeds), options.jobs)
    report()


if __name__ == "__main__":
    main()
