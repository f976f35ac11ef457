"""The study of a real language model: SmolLM2-135M learns to use tools, by three credit assignments.

    python scripts/build/smollm2.py runs/SmolLM2-135M-Instruct
    python hf_recipes/SmolLM2/parcel/data.py runs/parcel
    python scripts/build/squad_search.py runs/squad --sentences 1 --source FOLDER     # or from the Hub, with --titles
    python scripts/bench/real_model.py                            # what is missing
    python scripts/bench/real_model.py --tasks squad-search-gpu   # on a GPU; --methods, --seeds: only some runs
    python scripts/bench/real_model.py --report                   # write the page's tables and the picture

A run trains the task's recipe next to a vLLM server that samples. The held-out questions are answered before it and
after it, sampled as in training and greedily. A seed is that of the order of the prompts and of the server's samples.

Resumable: a finished run is at once a row of docs/results/real_model.json, with the commit that made it, and is not
run again: delete its row for that. A run that was stopped goes on from its last checkpoint in runs/real_model/.
"""

import argparse
import itertools
import json
import math
import resource
import statistics
import sys
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scipy import stats

from bench import common
from bench.common import IN_THE_ENGINE, IN_THE_ENGINE_ENV, VLLMServer, rounded, write_json, write_section
from bench.credit import bootstrap, commit, smoothed

MODEL, DATA = "runs/SmolLM2-135M-Instruct", "runs/squad"
# The Hub's Qwen/Qwen2.5-Coder-0.5B-Instruct.
CODER = {"model": "runs/Qwen2.5-Coder-0.5B-Instruct", "steps": 24, "problems": 100, "seeds": 3}
QWEN = "hf_recipes/Qwen/Qwen2.5-Coder-0.5B--"
TASKS: dict[str, dict[str, Any]] = {
    "parcel": {
        "title": "Two tools of one's own", "recipe": "hf_recipes/SmolLM2/parcel/recipe.yaml", "steps": 15,
        "problems": 96, "seeds": 3,
    },
    "squad-search": {
        "title": "Search", "recipe": "hf_recipes/SmolLM2/squad-search.yaml", "steps": 20, "problems": 100, "seeds": 8,
    },
    "squad-search-0.5B": CODER | {"title": "Search, half a billion parameters", "recipe": f"{QWEN}squad-search.yaml"},
    "hops-0.5B": CODER | {"title": "One search or two, half a billion parameters", "recipe": f"{QWEN}hops.yaml"},
    "gsm8k-0.5B": CODER | {"title": "GSM8K, half a billion parameters", "recipe": f"{QWEN}gsm8k.yaml"},
    "squad-search-gpu": {
        "title": "Search, on a GPU", "recipe": "hf_recipes/SmolLM2/squad-search.yaml", "steps": 200, "problems": 100,
        "seeds": 1, "rollouts": 128,
    },
}  # fmt: skip
METHODS = ("outcome", "merged", "mt_grpo")
RUNS = Path("runs/real_model")  # of checkpoints and trained models
RESULTS, PICTURE, PAGE = (Path(f"docs/{n}") for n in ("results/real_model.json", "real_model.png", "real_model.md"))
NUM_PASSAGES = 40  # whose perplexity is taken
NUM_TOPICS, TOPIC = 20, 1000  # of Python's documentation, and so many characters of each
# The engine in one process, with both cores: while it samples the trainer waits, and the other way round.
SERVER = (*IN_THE_ENGINE, "--max-model-len", "2048", "--logprobs-mode", "processed_logprobs")
SERVER_ENV = IN_THE_ENGINE_ENV | {"OMP_NUM_THREADS": "2"}
ON_GPU = ("--dtype", "bfloat16", "--no-enforce-eager", "--gpu-memory-utilization", "0.3")

FIGURES = {  # label -> its value in what evaluate.evaluate returns
    "tool executed": lambda found: found["tool_executed"],
    "answer among the results": lambda found: found["result_found"],
    "exact match": lambda found: found["exact_match"],
}
PERPLEXITIES = ("perplexity, articles", "perplexity, Python's documentation")
HOWS = ("sampled", "greedy")
COMPARED = ("answer among the results", "exact match")  # with tests, and shown by seed
FOUND = 0.5  # of the sampled held-out rollouts have the answer among their results (0.1 and less before)

# -- One run --


def run(task: str, method: str, seed: int, steps: int, num_problems: int) -> dict[str, Any]:
    """Train, or go on where a run was stopped, and evaluate. Returns its row of the results."""
    recipe, began = TASKS[task]["recipe"], time.perf_counter()
    output, model = RUNS / f"{task}-{method}-steps{steps}-seed{seed}", TASKS[task].get("model", MODEL)
    resume = ("--resume_from_checkpoint", "true") if list(output.glob("checkpoint-*/trainer_state.json")) else ()
    # Without a seed of its own each run's server would sample from the same state.
    with server_of(task, model, "--seed", str(seed)) as server:
        settings = {"model_name_or_path": model, "credit_assignment": method, "seed": seed, "max_steps": steps}
        settings |= {"use_vllm": "true", "vllm_mode": "server", "vllm_server_base_url": server.url}
        settings |= {"vllm_importance_sampling_mode": "token_truncate"}
        if rollouts := TASKS[task].get("rollouts"):  # of a step; checkpoints would take longer than the steps
            settings |= {"per_device_train_batch_size": rollouts, "save_steps": steps}
            settings |= {"use_cpu": "false", "bf16": "true"} if gpu(task) else {}
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        logs = common.train(recipe, output, *words, *resume)
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # KiB, of the largest process that has ended
    row = {
        "task": task, "method": method, "seed": seed, "steps": steps, "commit": commit(),
        "machine": gpu(task) or "{cores} cores ({cpu})".format(**common.machine()),
        "seconds": None if resume else seconds, "gib": memory / 2**20, "num_tokens": logs[-1]["num_tokens"],
        "no_signal": statistics.fmean(log["credit/frac_groups_without_signal"] for log in logs),
        **evaluated(whole(output), task, num_problems),
        "curve": [round(100 * (log.get("rewards/exact_match_reward_func/mean") or 0.0)) for log in logs],  # percent
    }  # fmt: skip
    return rounded(row, 4)


def gpu(task: str) -> str | None:
    """The name of the GPU that the trainer and the server share, if the task is one for a GPU and there is one."""
    import torch

    return torch.cuda.get_device_name() if "rollouts" in TASKS[task] and torch.cuda.is_available() else None


def server_of(task: str, model: str | Path, *flags: str) -> VLLMServer:
    if gpu(task):
        return VLLMServer(model, *SERVER, *ON_GPU, *flags, timeout=600.0)
    return VLLMServer(model, *SERVER, *flags, env=SERVER_ENV)


def evaluated(model: str | Path, task: str, num_problems: int) -> dict[str, Any]:
    """The figures of the held-out questions, `sampled` and `greedy`; of the search also two perplexities.

    All models are asked in the same way, by the recipe's settings.
    """
    import evaluate
    from transformers import AutoTokenizer

    import mt_grpo_trainer as mt

    row: dict[str, Any] = {}
    tokenizer = AutoTokenizer.from_pretrained(model)
    with server_of(task, model) as server:
        for how in HOWS:
            client = mt.VLLMServerClient(base_url=server.url, tokenizer=tokenizer)
            settings = {"tokenizer": tokenizer, "progress": False, "batch_size": 128, "greedy": how == "greedy"}
            try:
                found = evaluate.evaluate(client, TASKS[task]["recipe"], num_problems, **settings)
            finally:
                client.close()
            row[how] = {label: figure(found) for label, figure in FIGURES.items()}
    if "squad" not in task:
        return row
    with open(f"{DATA}/passages.jsonl", encoding="utf-8") as lines:
        passages = [json.loads(line)["text"] for _, line in zip(range(NUM_PASSAGES), lines)]
    elsewhere = [text[:TOPIC] for _, text in sorted(topics.topics.items())[:NUM_TOPICS]]  # no run reads these
    return row | dict(zip(PERPLEXITIES, perplexities(model, [passages, elsewhere])))


def whole(folder: Path) -> Path:
    """The folder of a trained model with whole weights: of a LoRA a folder in it, with the adapter merged."""
    if not (folder / "adapter_config.json").is_file():
        return folder
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.merge_and_unload().save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder / "merged")
    return folder / "merged"


def perplexities(model: str | Path, texts_of: list[list[str]]) -> list[float]:
    """Of each list of texts: exp of the mean negative logprob of a token, each text read by itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    values = []
    for texts in texts_of:
        total = count = 0.0
        for text in texts:
            ids = torch.tensor([tokenizer(text).input_ids])
            with torch.no_grad():
                total += network(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
        values.append(math.exp(total / count))
    return values


def results_in(path: Path) -> dict[str, Any]:
    """The results file: `before`, an evaluation by task, and `runs`."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"before": {}, "runs": []}


def run_all(options: argparse.Namespace) -> None:
    """Run what is not finished, seed by seed; each result is kept at once."""
    for task in options.tasks:
        steps, problems = options.steps or TASKS[task]["steps"], options.problems or TASKS[task]["problems"]
        results = results_in(options.results)
        if task not in results["before"]:
            results["before"][task] = rounded(evaluated(TASKS[task].get("model", MODEL), task, problems))
            write_json(options.results, results)
        seeds = options.seeds or range(1, TASKS[task]["seeds"] + 1)
        for seed, method in itertools.product(seeds, options.methods):
            name = {"task": task, "method": method, "seed": seed, "steps": steps}
            if any(name.items() <= row.items() for row in results_in(options.results)["runs"]):
                continue
            row = run(**name, num_problems=problems)
            results = results_in(options.results)
            results["runs"].append(row)
            results["runs"].sort(key=lambda r: (r["task"], METHODS.index(r["method"]), r["seed"], r["steps"]))
            write_json(options.results, results)
            figures = ", ".join(f"{label} {row['sampled'][label]:.2f}" for label in COMPARED)
            print(f"{task}, {method}, seed {seed}: {figures}, {row['seconds'] or math.nan:.0f} s", flush=True)


# -- The report --


def cell(values: list[float | None]) -> str:
    """A mean over seeds with the 95% interval of its bootstrap; of fewer than three seeds only the mean.

    >>> cell([0.25]), cell([0.25, 0.25, 0.25]), cell([None])
    ('0.25', '0.25 [0.25, 0.25]', '-')
    """
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    interval = " [{:.2f}, {:.2f}]".format(*bootstrap(there)) if len(there) > 2 else ""
    return f"{statistics.fmean(there):.2f}{interval}"


def finding(runs: list[dict[str, Any]]) -> int:
    return sum(run["sampled"]["answer among the results"] >= FOUND for run in runs)


def section(results: dict[str, Any]) -> str:
    """Of each task every run; with more than three seeds the means over them, and tests against `mt_grpo`."""
    lines: list[str] = []
    for task, settings in TASKS.items():
        before, again = results["before"].get(task), results.get("again", {}).get(task, {})
        if runs := [run for run in results["runs"] if run["task"] == task]:
            found = tables(before, runs, again) if settings["seeds"] > 3 else by_run(before, runs)
            lines += [f"**{settings['title']}** (`{task}`)", "", *found, ""]
    return "\n".join(lines).rstrip()


def by_run(before: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    """A row for the runs of a method and of so many steps, and a sentence. Cells have the figures of each seed."""
    rest = [label for label in PERPLEXITIES if label in before]
    groups, rows = {"before": [before]}, []
    for run in runs:
        groups.setdefault(f"`{run['method']}`, {run['steps']} steps", []).append(run)
    for name, of in groups.items():
        cells = ["; ".join(" ".join(f"{run[how][label]:.2f}" for run in of) for how in HOWS) for label in FIGURES]
        cells += [" ".join(f"{run[label]:.2f}" for run in of) for label in rest]
        name += f", seed {' '.join(str(run['seed']) for run in of)}" if "seed" in of[0] else ""
        minutes = [run["seconds"] / 60 for run in of if run.get("seconds")]
        rows.append(f"{name} | {' | '.join(cells)} | {span(minutes) if minutes else ''}")
    return [*common.table(f"sampled; greedily | {' | '.join([*FIGURES, *rest])} | minutes", rows), "", costs(runs)]


def tables(before: dict[str, Any], runs: list[dict[str, Any]], again: dict[str, Any]) -> list[str]:
    """The table, the tests and the costs of one task, as lines. `again`: method -> how -> label -> values by seed."""
    methods = {name: [run for run in runs if run["method"] == name] for name in METHODS}
    methods = {name: of for name, of in methods.items() if of}
    lines = [f"| | before |{''.join(f' `{name}` |' for name in methods)}", "|---|---|" + "---|" * len(methods)]
    shares = [f"{finding(of)} of {len(of)}" for of in methods.values()]
    lines.append(f"| seeds that find answers | | {' | '.join(shares)} |")
    for label in FIGURES:
        columns = [[before], *methods.values()]
        cells = [", ".join(cell([run[how][label] for run in of]) for how in HOWS) for of in columns]
        lines.append(f"| {label}: sampled, greedy | {' | '.join(cells)} |")
    for label in PERPLEXITIES if PERPLEXITIES[0] in before else ():
        cells = [cell([run[label] for run in of]) for of in methods.values()]
        lines.append(f"| {label} | {cell([before[label]])} | {' | '.join(cells)} |")
    for label in COMPARED if again else ():
        cells = [", ".join(cell(again[name][how][label]) for how in HOWS) if name in again else "" for name in methods]
        lines.append(f"| {label}, run again | | {' | '.join(cells)} |")
    signal = [cell([run["no_signal"] for run in of]) for of in methods.values()]
    lines.append(f"| groups without signal | | {' | '.join(signal)} |")
    for label in COMPARED:
        cells = [", ".join(f"{run['sampled'][label]:.2f}" for run in of) for of in methods.values()]
        lines.append(f"| {label}, sampled, by seed | | {' | '.join(cells)} |")
    return [*lines, "", *compared(methods, again), costs(runs)]


def compared(methods: dict[str, list[dict[str, Any]]], again: dict[str, Any]) -> list[str]:
    """A sentence for each method that has a test against `mt_grpo`."""
    lines = []
    for name, runs in methods.items():
        against = methods.get("mt_grpo", [])
        if name == "mt_grpo" or min(len(runs), len(against)) < 3:
            continue
        table = [[finding(each), len(each) - finding(each)] for each in (against, runs)]
        found = [f"{stats.fisher_exact(table).pvalue:.2g} for the share of seeds that find answers (Fisher)"]
        for label in COMPARED:
            pair = [[run["sampled"][label] for run in each] for each in (against, runs)]
            found.append(f"{stats.mannwhitneyu(*pair).pvalue:.2g} for {label}, sampled (Mann and Whitney)")
            if name in again:
                pair = [again[each]["sampled"][label] for each in ("mt_grpo", name)]
                found[-1] += f" and {stats.mannwhitneyu(*pair).pvalue:.2g} when run again"
        lines += [f"`mt_grpo` against `{name}`: p = {', '.join(found)}.", ""]
    return lines


def costs(runs: list[dict[str, Any]]) -> str:
    """The steps, tokens and minutes of the runs, the machines and the commits, as a sentence."""
    timed, tokens = [row for row in runs if row.get("seconds")], [row["num_tokens"] for row in runs]
    machines = dict.fromkeys(run["machine"] for run in runs)
    memory = [row["gib"] for row in runs if "gib" in row]
    of_memory = f" and at most {max(memory):.1f} GiB in a process" if memory else ""
    steps = " and ".join(str(n) for n in sorted({run["steps"] for run in timed}))
    minutes = span([row["seconds"] / 60 for row in timed])
    return (
        f"{span(tokens)} tokens a run, {steps} steps in {minutes} minutes with the server's start{of_memory}, "
        f"on {' and '.join(machines)}; commit {', '.join(sorted({run['commit'] for run in runs}))}."
    )


def span(values: list[float]) -> str:
    """The smallest and the largest; one number if both are written alike.

    >>> span([19.2, 19.4]), span([1000.0, 2500.0]), span([])
    ('19', '1,000 to 2,500', 'unknown')
    """
    return " to ".join(dict.fromkeys(f"{f(values):,.0f}" for f in (min, max))) if values else "unknown"


def plot(results: dict[str, Any], path: Path) -> None:
    """A panel for each task (down) and method (across), a line for each seed, means of five steps."""
    tasks = [task for task in TASKS if any(run["task"] == task for run in results["runs"])]
    size = (2.9 * len(METHODS), 2.3 * len(tasks) + 0.3)
    shape = {"figsize": size, "squeeze": False, "sharex": "row", "sharey": "row"}
    figure, axes = common.pyplot().subplots(len(tasks), len(METHODS), **shape)
    for down, task in enumerate(tasks):
        for axis, method, colour in zip(axes[down], METHODS, ("#777777", "#E69F00", "#0072B2"), strict=True):
            of = {"task": task, "method": method, "steps": TASKS[task]["steps"]}
            runs = [run for run in results["runs"] if of.items() <= run.items()]
            for values in (smoothed(run["curve"]) for run in runs):
                axis.plot(range(1, len(values) + 1), values, color=colour, linewidth=1.2, alpha=0.8)
            axis.set_visible(bool(runs))
            axis.set_title(f"{method}: {finding(runs)} of {len(runs)} seeds find answers", fontsize=9)
        first = next(axis for axis in axes[down] if axis.get_visible())
        first.tick_params(labelleft=True)  # others share them
        first.set_ylim(bottom=0)
        first.set_ylabel(f"{task}\n\nexact match, %", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step")
    common.save_picture(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["parcel", "squad-search"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 1 to 3, of the search 1 to 8")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run; default: the task's")
    parser.add_argument("--problems", type=int, help="held-out questions; default: the task's")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help=f"only write the tables of {PAGE} and the picture")
    options = parser.parse_args(argv)
    common.prepare()
    if not options.report:
        run_all(options)
    results = results_in(options.results)
    if not results["runs"]:
        sys.exit(f"error: no runs in {options.results}. Run without --report first.")
    print(section(results))
    if options.report:
        write_section("real_model", section(results), PAGE)
        plot(results, PICTURE)


if __name__ == "__main__":
    main()
