"""Compare the credit assignments: four generated tasks, six methods, several seeds, at equal sampled tokens, on a CPU.

    python scripts/bench/credit.py                     # what is missing, two runs at a time; then the report
    python scripts/bench/credit.py --tasks sparse --methods outcome mt_grpo --seeds 0 1
    python scripts/bench/credit.py --report            # only the pictures and the tables, from the results file

All methods of a task have the same model, rewards, seeds, learning rate, batches and sampled tokens. Resumable: each
finished run is at once a row of docs/results/credit.json, with the commit that made it, and is not run again: delete
its row for that. `sparse`, `unpaid` and `bifurcation` compare methods on 15 seeds; everything else has five.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scipy import stats

from bench import common
from bench.common import end_with_parent, rounded, write_json, write_section

METHODS = {  # what each sets beside `credit_assignment`
    "outcome": [],
    "merged": [],
    "mt_grpo": [],
    "turn_return": ["--scale_rewards", "none"],
    "gigpo": ["--outcome_in_return", "true"],
    "zero_sum": [],
}
HEADLINE, HEADLINE_SEEDS, NUM_SEEDS = ("outcome", "merged", "mt_grpo"), 15, 5
SPARSE = ["--config", "hf_recipes/tiny/chain-sparse.yaml"]
HOPS = ["--config", "hf_recipes/tiny/encyclopedia.yaml", "--lr_scheduler_type", "constant"]
CHAIN = ["--config", "hf_recipes/tiny/chain.yaml"]
TASKS: dict[str, dict[str, Any]] = {
    "chain": {"title": "Chain, outcome within reach", "tokens": 60_000, "arguments": CHAIN},
    "sparse": {"title": "Chain, rare outcome", "tokens": 80_000, "arguments": SPARSE, "seeds": HEADLINE_SEEDS},
    "unpaid": {
        "title": "Chain, calls unpaid: rare outcome, nothing for a call that runs", "tokens": 80_000,
        "seeds": HEADLINE_SEEDS, "arguments": [*SPARSE, "--turn_reward_weights", "0", "1"],
        "methods": METHODS.keys() - {"outcome"},
    },
    "bifurcation": {
        "title": "Bifurcation: call 1 of 0 to 3 decides", "tokens": 30_000, "seeds": HEADLINE_SEEDS,
        "outcome": "Bifurcation", "decisive": 1, "decoys": 3, "arguments": [
            *SPARSE, "--tools_script", "scripts/bench/bifurcation.py", "--reward_fn", "null",
            "--outcome_reward_weights", "null",
        ],
    },
    "hops": {"title": "Search, one or two hops", "tokens": 35_000, "arguments": HOPS},
}  # fmt: skip
THRESHOLD, LEARNED = 0.8, 0.5  # of the smoothed training curve; of the held-out exact match
POINTS = 25  # of a run's curve, at equal distances in sampled tokens
NUM_PROBLEMS = 256  # held out
RESULTS, PICTURE, PAGE = Path("docs/results/credit.json"), Path("docs/credit.png"), Path("docs/credit.md")
RUNS = Path("runs/credit")

Job = dict[str, Any]  # task, method, seed

# -- One run --


def run(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Train until the task's sampled tokens and evaluate. Returns the job with its figures and its curve."""
    import evaluate
    from transformers import PrinterCallback
    from transformers.utils.logging import disable_progress_bar

    import mt_grpo_trainer as mt
    from mt_grpo.reports.preflight import Watch
    from mt_grpo.reports.progress import ProgressLine

    disable_progress_bar()
    outcome = settings.get("outcome", "exact_match_reward_func")
    way = ["--credit_assignment", job["method"], *METHODS[job["method"]]]
    if "decisive" in settings:
        way += ["--dataset_name", str(bifurcation_rows(settings["decisive"], settings["decoys"]))]
    recipe = mt.parse_arguments([
        *settings["arguments"], *way, "--seed", str(job["seed"]), "--max_steps", "1000", "--log_rollouts", "0",
        "--disable_tqdm", "true", "--output_dir", str(RUNS / "scratch" / name_of(job)),
    ])  # fmt: skip
    trainer = mt.build_trainer(*recipe)
    for each in (PrinterCallback, ProgressLine, Watch):  # the study has a line for each run
        trainer.remove_callback(each)
    trainer.add_callback(end_at(settings["tokens"], recipe[1].per_device_train_batch_size))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    size = recipe[1].per_device_train_batch_size
    tokens = list(itertools.accumulate(log["completions/mean_length"] * size for log in logs))
    values = smoothed([log[f"rewards/{outcome}/mean"] for log in logs])
    trainer.model.eval()
    how = {"tokenizer": trainer.processing_class, "progress": False, "batch_size": NUM_PROBLEMS}
    result = evaluate.evaluate(trainer.model, recipe, NUM_PROBLEMS, **how)
    row = {
        **job,
        "commit": commit(),
        "exact_match": result["rewards"]["outcome"][outcome],
        "turns": result["mean_turns"],
        "no_signal": statistics.fmean(log["credit/frac_groups_without_signal"] for log in logs),
        "to_threshold": next((t for t, value in zip(tokens, values) if value > THRESHOLD), None),
        "curve": [round(100 * value) for value in resampled(tokens, values, settings["tokens"])],  # percent
    }
    return rounded(row, 3)


def bifurcation_rows(decisive: int, decoys: int) -> Path:
    """A folder with chains of `decoys` + 1 operations, whose call `decisive` (from 0) decides."""
    from mt_grpo.recipe.data import make_chain

    folder = RUNS / f"bifurcation-{decisive}-{decoys}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    for split, seed in (("train", 0), ("test", 1)):
        rows = [row for row in make_chain(8192, seed, split) if len(row["steps"]) == decoys + 1]
        lines = [json.dumps({**row, "decisive": decisive}) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def end_at(tokens: int, batch_size: int) -> Any:
    """A callback that ends the training with the step that reaches so many sampled tokens."""
    from transformers import TrainerCallback

    class EndAtTokens(TrainerCallback):
        sampled = 0.0

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs) -> None:
            self.sampled += (logs or {}).get("completions/mean_length", 0.0) * batch_size
            control.should_training_stop = control.should_training_stop or self.sampled >= tokens

    return EndAtTokens()


def smoothed(values: list[float]) -> list[float]:
    """The mean of the last five values, of fewer at the beginning."""
    return [statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]


def resampled(tokens: list[float], values: list[float], end: float, points: int = POINTS) -> list[float]:
    """The value of the last step before each of `points` equal parts of `end` tokens; before the first, the first.

    >>> resampled([10.0, 20.0, 45.0], [0.1, 0.2, 0.3], 40.0, points=4)
    [0.1, 0.2, 0.2, 0.2]
    """
    ends = [end * (k + 1) / points for k in range(points)]
    return [([values[0]] + [v for t, v in zip(tokens, values) if t <= place])[-1] for place in ends]


# -- All runs --


def name_of(job: Job) -> str:
    """The name of a run, such as `chain-mt_grpo-1`."""
    return f"{job['task']}-{job['method']}-{job['seed']}"


def commit() -> str:
    """The commit of this clone, with a mark if files that a run reads differ from it."""
    code = ["mt_grpo_trainer.py", "mt_grpo", "scripts", "hf_recipes", "rewards", "tools"]
    names = ["git describe --always --exclude=*".split(), ["git", "status", "--porcelain", "--", *code]]
    name, changed = (subprocess.run(each, capture_output=True, text=True).stdout.strip() for each in names)
    return f"{name}-dirty" if changed else name


def finished() -> list[dict[str, Any]]:
    """The rows of all finished runs."""
    return json.loads(RESULTS.read_text(encoding="utf-8")).get("runs", []) if RESULTS.is_file() else []


def keep(row: dict[str, Any]) -> None:
    """Add a row to the results file, in which a run stands once."""
    rows = {name_of(each): each for each in [*finished(), row]}
    order = list(TASKS)
    known = sorted(rows.values(), key=lambda r: order.index(r["task"]) if r["task"] in order else len(order))
    write_json(RESULTS, {"runs": known})


def make_jobs(tasks: list[str], methods: list[str], seeds: list[int] | None) -> list[Job]:
    """Seed by seed, so that a study that is stopped has compared all methods on the same seeds.

    `seeds` None: the first ones, as many as each task has.
    """
    return [
        {"task": task, "method": method, "seed": seed}
        for task in tasks
        for seed in (range(HEADLINE_SEEDS) if seeds is None else seeds)
        for method in methods
        if method in TASKS[task].get("methods", METHODS)
        if seeds is not None or seed < (TASKS[task].get("seeds", NUM_SEEDS) if method in HEADLINE else NUM_SEEDS)
    ]


def run_all(jobs: list[Job], num_workers: int) -> None:
    """Run what is not finished; each result is kept at once. Raises what a run raises."""
    RUNS.mkdir(parents=True, exist_ok=True)
    there = set(map(name_of, finished()))
    jobs = [job for job in jobs if name_of(job) not in there]
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    started, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, end_with_parent, (signal.SIGKILL,)) as pool:
        runs = [pool.submit(run, job, TASKS[job["task"]]) for job in jobs]
        try:
            for number, done in enumerate(as_completed(runs), 1):
                row = done.result()
                keep(row)
                left = (time.perf_counter() - started) / number * (len(jobs) - number)
                print(
                    f"{number:>3}/{len(jobs)}  {name_of(row):<28} exact match {row['exact_match']:.2f}  "
                    f"({left / 60:.0f} min left)",
                    flush=True,
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# -- Statistics over seeds --


def bootstrap(values: list[float]) -> tuple[float, float]:
    """The 95% interval of the mean, by percentiles of 9,999 samples with replacement.

    >>> bootstrap([0.0] * 5)
    (0.0, 0.0)
    """
    interval = stats.bootstrap((values,), statistics.fmean, vectorized=False, method="percentile", rng=0)
    return tuple(map(float, interval.confidence_interval))


# -- The report --

Groups = dict[tuple[str, str], list[dict[str, Any]]]


def reported(rows: list[dict[str, Any]]) -> Groups:
    """Task and method to runs, where there are at least `NUM_SEEDS`."""
    groups: Groups = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        if row["task"] in TASKS:
            groups.setdefault((row["task"], row["method"]), []).append(row)
    return {key: runs for key, runs in groups.items() if len(runs) >= NUM_SEEDS}


def learned(runs: list[dict[str, Any]]) -> int:
    return sum(run["exact_match"] >= LEARNED for run in runs)


def thousands(values: list[float | None]) -> str:
    """The median in thousands; a run that never got there is later than every other.

    >>> thousands([10_000, 30_000, 20_400]), thousands([10_000, None, None])
    ('20k', '-')
    """
    middle = statistics.median(math.inf if v is None else v for v in values)
    return "-" if middle == math.inf else f"{middle / 1000:.0f}k"


def line(runs: list[dict[str, Any]], against: list[dict[str, Any]] | None) -> str:
    """A line of a task's table. The tests compare with the runs `against`."""
    exact = [run["exact_match"] for run in runs]
    low, high = bootstrap(exact)
    tests = ["", ""]
    if against is not None:
        table = [[learned(each), len(each) - learned(each)] for each in (runs, against)]
        tests[0] = f"{stats.fisher_exact(table).pvalue:.2g}"
        tests[1] = f"{stats.mannwhitneyu(exact, [run['exact_match'] for run in against]).pvalue:.2g}"
    cells = [
        f"`{runs[0]['method']}`", f"{learned(runs)} of {len(runs)}", tests[0],
        f"{statistics.fmean(exact):.2f} [{low:.2f}, {high:.2f}]", tests[1],
        thousands([run["to_threshold"] for run in runs]), f"{statistics.fmean(run['turns'] for run in runs):.1f}",
        f"{statistics.fmean(run['no_signal'] for run in runs):.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table for each task."""
    groups, lines = reported(rows), []
    titles = ["", "seeds that learn", "p", "exact match [95%]", "p", "tokens to 0.8", "turns", "no signal"]
    for task, settings in TASKS.items():
        runs = {m: groups[task, m] for m in METHODS if (task, m) in groups}
        if not runs:
            continue
        lines += [f"**{settings['title']}**, {settings['tokens'] // 1000}k sampled tokens", ""]
        lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        lines += [line(of, runs.get("mt_grpo") if name != "mt_grpo" else None) for name, of in runs.items()]
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def plot(rows: list[dict[str, Any]], path: Path, tasks: list[str], methods: list[str]) -> None:
    """A panel for each task (down) and method (across), a line for each seed, over the sampled tokens."""
    groups, pyplot = reported(rows), common.pyplot()
    tasks = [task for task in tasks if any((task, method) in groups for method in methods)]
    size = (2.6 * len(methods), 2.2 * len(tasks) + 0.3)
    figure, axes = pyplot.subplots(len(tasks), len(methods), figsize=size, sharex=True, sharey=True, squeeze=False)
    colours = ("#777777", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00")
    for down, task in enumerate(tasks):
        for axis, method, colour in zip(axes[down], methods, colours):
            runs = groups.get((task, method), [])
            for run_ in runs:
                places = [TASKS[task]["tokens"] / 1000 * (k + 1) / len(run_["curve"]) for k in range(POINTS)]
                axis.plot(places, run_["curve"], color=colour, linewidth=1.2, alpha=0.8)
            axis.set_visible(bool(runs))
            axis.set_title(f"{method}: {learned(runs)} of {len(runs)} seeds learn", fontsize=9)
        first = next(axis for axis in axes[down] if axis.get_visible())
        first.tick_params(labelleft=True)  # others share them
        first.set_ylabel(f"{TASKS[task]['title'].partition(':')[0]}\n\noutcome, %", fontsize=9)
    for axis in axes[-1]:
        axis.set(xlabel="sampled tokens, thousands", ylim=(0, 100))
    common.save_picture(figure, path)


def report() -> None:
    """Write the pictures and the page's tables from the results file."""
    rows = finished()
    if not reported(rows):
        sys.exit(f"error: {len(rows)} runs in {RESULTS}, and no method has {NUM_SEEDS} seeds.")
    table = markdown(rows)
    plot(rows, PICTURE, list(TASKS), list(METHODS))
    plot(rows, PICTURE.with_name("credit_seeds.png"), ["sparse", "unpaid"], list(HEADLINE))
    write_section("credit", table, PAGE)
    print(f"{RESULTS}: {len(rows)} runs; {PICTURE} and the tables in {PAGE}\n\n{table}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: the first ones, as many as a task has")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--report", action="store_true", help="only write the pictures and the tables")
    options = parser.parse_args(argv)
    if not options.report:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # workers end with it; finished runs are kept
        run_all(make_jobs(options.tasks, options.methods, options.seeds), options.jobs)
    report()


if __name__ == "__main__":
    main()
