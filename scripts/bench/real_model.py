"""The study of a real language model: SmolLM2-135M learns to search SQuAD's sentences, by three credit assignments.

    python scripts/build/smollm2.py runs/SmolLM2-135M-Instruct
    python scripts/build/squad_search.py runs/squad --sentences 1 --source FOLDER     # or from the Hub, with --titles
    python scripts/bench/real_model.py                            # what is missing
    python scripts/bench/real_model.py --methods mt_grpo --seeds 1 --steps 60 --results runs/longer.json
    python scripts/bench/real_model.py --recipe hf_recipes/SmolLM2/parcel/recipe.yaml --results runs/parcel.json
    python scripts/bench/real_model.py --report                   # write the page's tables and the picture

A run trains hf_recipes/SmolLM2/squad-search.yaml, or another recipe, next to a vLLM server that samples. The held-out
questions are answered before it and after it, sampled as in training and greedily. A seed is that of the order of the
prompts and of the server's samples.

Resumable: a finished run is at once a row of docs/results/real_model.json, with the commit that made it, and is not
run again: delete its row for that. A run that was stopped goes on from its last checkpoint in runs/real_model/.
"""

import argparse
import json
import math
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

RECIPE = "hf_recipes/SmolLM2/squad-search.yaml"
MODEL, DATA = "runs/SmolLM2-135M-Instruct", "runs/squad"
METHODS, SEEDS = ("outcome", "merged", "mt_grpo"), range(1, 9)  # the recipe's settings were chosen by runs of seed 0
RUNS = Path("runs/real_model")  # of checkpoints and trained models
RESULTS, PICTURE, PAGE = (
    Path(f"docs/{name}") for name in ("results/real_model.json", "real_model.png", "real_model.md")
)
NUM_PASSAGES = 40  # whose perplexity is taken
NUM_TOPICS, TOPIC = 20, 1000  # of Python's documentation, and so many characters of each
# The engine in one process, with both cores: while it samples the trainer waits, and the other way round.
SERVER = (*IN_THE_ENGINE, "--max-model-len", "1024", "--logprobs-mode", "processed_logprobs")
SERVER_ENV = {**IN_THE_ENGINE_ENV, "OMP_NUM_THREADS": "2"}

FIGURES = {  # label -> its value in what evaluate.evaluate returns
    "tool executed": lambda found: found["tool_executed"],
    "answer among the results": lambda found: found["result_found"],
    "exact match": lambda found: found["exact_match"],
    "F1": lambda found: (f1 := found["rewards"]["outcome"].get("f1_reward_func")) and 2 * f1,
    "turns": lambda found: found["mean_turns"],
    "words of an answer": lambda found: answer_words(found["conversations"]),
}
PERPLEXITIES = ("perplexity, articles", "perplexity, Python's documentation")
COMPARED = ("answer among the results", "exact match")  # with tests, and shown by seed
LEARNED = 0.5  # of the sampled held-out rollouts have the answer among their results (about 0.1 before)
CURVES = {  # title -> metric, what makes it a share, the top of the axis
    "answer found, of rollouts with a result": ("rewards/answer_in_search_results_reward_func/mean", 2.0, 1.0),
    "exact match": ("rewards/exact_match_reward_func/mean", 1.0, 0.4),
}

# -- One run --


def run(recipe: str, method: str, seed: int, steps: int, num_problems: int) -> dict[str, Any]:
    """Train, or go on where a run was stopped, and evaluate. Returns its row of the results."""
    output, began = RUNS / Path(recipe).parent.name / name_of(method, seed, steps), time.perf_counter()
    resume = ("--resume_from_checkpoint", "true") if list(output.glob("checkpoint-*/trainer_state.json")) else ()
    # Without a seed of its own each run's server would sample from the same state.
    with VLLMServer(MODEL, *SERVER, "--seed", str(seed), env=SERVER_ENV) as server:
        settings = {
            "credit_assignment": method, "seed": seed, "max_steps": steps, "use_vllm": "true", "vllm_mode": "server",
            "vllm_server_base_url": server.url, "vllm_importance_sampling_mode": "token_truncate",
        }  # fmt: skip
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        logs = common.train(recipe, output, *words, *resume)
    seconds = time.perf_counter() - began
    row = {
        "method": method, "seed": seed, "steps": steps, "commit": commit(), "machine": common.machine(),
        "seconds": None if resume else seconds, "num_tokens": logs[-1]["num_tokens"],
        "no_signal": statistics.fmean(log["credit/frac_groups_without_signal"] for log in logs),
        **evaluated(output, recipe, num_problems),
        "curve": {name: [log.get(name) or 0.0 for log in logs] for name, _, _ in CURVES.values()},
    }  # fmt: skip
    return rounded(row, 4)


def evaluated(model: str | Path, recipe: str, num_problems: int) -> dict[str, Any]:
    """The figures of the held-out questions, `sampled` and `greedy`; of the study's own recipe also two perplexities.

    All models are asked in the same way, by the recipe's settings.
    """
    import evaluate
    from transformers import AutoTokenizer

    import mt_grpo_trainer as mt

    row: dict[str, Any] = {}
    tokenizer = AutoTokenizer.from_pretrained(model)
    with VLLMServer(model, *SERVER, env=SERVER_ENV) as server:
        for how in ("sampled", "greedy"):
            client = mt.VLLMServerClient(base_url=server.url, tokenizer=tokenizer)
            settings = {"tokenizer": tokenizer, "progress": False, "batch_size": 128, "show": num_problems}
            try:
                found = evaluate.evaluate(client, recipe, num_problems, greedy=how == "greedy", **settings)
            finally:
                client.close()
            row[how] = {label: figure(found) for label, figure in FIGURES.items()}
    if recipe != RECIPE:
        return row
    with open(f"{DATA}/passages.jsonl", encoding="utf-8") as lines:
        passages = [json.loads(line)["text"] for _, line in zip(range(NUM_PASSAGES), lines)]
    elsewhere = [text[:TOPIC] for _, text in sorted(topics.topics.items())[:NUM_TOPICS]]  # no run reads these
    return row | dict(zip(PERPLEXITIES, perplexities(model, [passages, elsewhere])))


def answer_words(conversations: list[dict[str, Any]]) -> float | None:
    """The mean length of the answers in words; None if there are none.

    >>> answer_words([{"answer": "the Viking Rollo"}, {"answer": None}])
    3.0
    """
    lengths = [len(each["answer"].split()) for each in conversations if each["answer"]]
    return statistics.fmean(lengths) if lengths else None


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


def name_of(method: str, seed: int, steps: int) -> str:
    """The name of a run and its folder, such as `mt_grpo-steps20-seed1`."""
    return f"{method}-steps{steps}-seed{seed}"


def results_in(path: Path) -> dict[str, Any]:
    """The results file: `before`, a row without a method, and `runs`."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def run_all(recipe: str, methods: list[str], seeds: list[int], steps: int, path: Path, num_problems: int) -> None:
    """Run what is not finished, seed by seed; each result is kept at once."""
    if "before" not in results_in(path):
        write_json(path, {"before": rounded(evaluated(MODEL, recipe, num_problems)), "runs": []})
    for seed in seeds:
        for method in methods:
            results = results_in(path)
            if name_of(method, seed, steps) in {name_of(r["method"], r["seed"], r["steps"]) for r in results["runs"]}:
                continue
            row = run(recipe, method, seed, steps, num_problems)
            order = {name: number for number, name in enumerate(METHODS)}
            rows = sorted([*results["runs"], row], key=lambda row: (order[row["method"]], row["seed"], row["steps"]))
            write_json(path, {**results, "runs": rows})
            figures = ", ".join(f"{label} {row['sampled'][label]:.2f}" for label in COMPARED)
            print(f"{name_of(method, seed, steps)}: {figures}, {row['seconds'] or math.nan:.0f} s", flush=True)


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


def learned(runs: list[dict[str, Any]]) -> int:
    return sum(run["sampled"]["answer among the results"] >= LEARNED for run in runs)


def section(results: dict[str, Any]) -> str:
    """Tables of the held-out questions: means over seeds, tests against `mt_grpo`, and each seed."""
    before = results["before"]
    methods = {name: [run for run in results["runs"] if run["method"] == name] for name in METHODS}
    methods = {name: runs for name, runs in methods.items() if runs}
    lines = [f"| | before |{''.join(f' `{name}` |' for name in methods)}", "|---|---|" + "---|" * len(methods)]
    shares = [f"{learned(runs)} of {len(runs)}" for runs in methods.values()]
    lines.append(f"| seeds that learn | | {' | '.join(shares)} |")
    for how in ("sampled", "greedy"):
        for label in [label for label in FIGURES if before["sampled"][label] is not None]:
            cells = [cell([run[how][label] for run in runs]) for runs in methods.values()]
            lines.append(f"| {label}, {how} | {cell([before[how][label]])} | {' | '.join(cells)} |")
    for label in PERPLEXITIES if PERPLEXITIES[0] in before else ():
        cells = [cell([run[label] for run in runs]) for runs in methods.values()]
        lines.append(f"| {label} | {cell([before[label]])} | {' | '.join(cells)} |")
    signal = [cell([run["no_signal"] for run in runs]) for runs in methods.values()]
    lines += [f"| groups without signal | | {' | '.join(signal)} |", ""]
    lines += ["Answer among the results / exact match, sampled, of each seed:", ""]
    seeds = sorted({run["seed"] for run in results["runs"]})
    lines += [f"| seed |{''.join(f' {seed} |' for seed in seeds)}", "|---|" + "---|" * len(seeds)]
    for name, runs in methods.items():
        of = {run["seed"]: " / ".join(f"{run['sampled'][label]:.2f}" for label in COMPARED) for run in runs}
        lines.append(f"| `{name}` | {' | '.join(of.get(seed, '') for seed in seeds)} |")
    lines += ["", *compared(methods), *costs(results["runs"])]
    return "\n".join(lines)


def compared(methods: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A sentence for each method that has a test against `mt_grpo`."""
    lines = []
    for name, runs in methods.items():
        against = methods.get("mt_grpo", [])
        if name == "mt_grpo" or min(len(runs), len(against)) < 3:
            continue
        table = [[learned(each), len(each) - learned(each)] for each in (against, runs)]
        found = [f"{stats.fisher_exact(table).pvalue:.2g} for the share of seeds that learn (Fisher)"]
        for label in COMPARED:
            pair = [[run["sampled"][label] for run in each] for each in (against, runs)]
            found.append(f"{stats.mannwhitneyu(*pair).pvalue:.2g} for {label}, sampled (Mann and Whitney)")
        lines += [f"`mt_grpo` against `{name}`: p = {', '.join(found)}.", ""]
    return lines


def costs(runs: list[dict[str, Any]]) -> list[str]:
    """What was run, in how many minutes, and by which commits."""
    minutes, tokens = [row["seconds"] / 60 for row in runs if row["seconds"]], [row["num_tokens"] for row in runs]
    machines = {f"{run['machine']['cores']} cores ({run['machine']['cpu']})": None for run in runs}
    return [
        f"{', '.join(str(n) for n in sorted({run['steps'] for run in runs}))} steps, {span(tokens)} tokens, "
        f"{span(minutes)} minutes a run with the server's start, on {' and '.join(machines)}; "
        f"commit {', '.join(sorted({run['commit'] for run in runs}))}."
    ]


def span(values: list[float]) -> str:
    """The smallest and the largest; one number if both are written alike.

    >>> span([19.2, 19.4]), span([1000.0, 2500.0]), span([])
    ('19', '1,000 to 2,500', 'unknown')
    """
    return " to ".join(dict.fromkeys(f"{f(values):,.0f}" for f in (min, max))) if values else "unknown"


def plot(results: dict[str, Any], path: Path) -> None:
    """A panel for each curve (down) and method (across), a line for each seed, means of five steps."""
    size = (2.9 * len(METHODS), 2.3 * len(CURVES) + 0.3)
    shape = {"sharex": True, "sharey": "row", "squeeze": False}
    figure, axes = common.pyplot().subplots(len(CURVES), len(METHODS), figsize=size, **shape)
    for across, (method, colour) in enumerate(zip(METHODS, ("#777777", "#E69F00", "#0072B2"), strict=True)):
        runs = [run for run in results["runs"] if run["method"] == method]
        for axis, (metric, factor, top) in zip(axes[:, across], CURVES.values()):
            for run_ in runs:
                values = smoothed([factor * value for value in run_["curve"][metric]])
                axis.plot(range(1, len(values) + 1), values, color=colour, linewidth=1.2, alpha=0.8)
            axis.set_ylim(0, top)
        axes[0][across].set_title(f"{method}: {learned(runs)} of {len(runs)} seeds learn", fontsize=9)
        axes[-1][across].set_xlabel("optimizer step")
    for axis, title in zip(axes[:, 0], CURVES):
        axis.set_ylabel(title.replace(", ", ",\n"), fontsize=9)
    common.save_picture(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a run")
    parser.add_argument("--problems", type=int, default=100, help="held-out questions")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help=f"only write the tables of {PAGE} and the picture")
    options = parser.parse_args(argv)
    common.prepare()
    if not options.report:
        run_all(options.recipe, options.methods, options.seeds, options.steps, options.results, options.problems)
    results = results_in(options.results)
    if not results.get("runs"):
        sys.exit(f"error: no runs in {options.results}. Run without --report first.")
    print(section(results))
    if options.report:
        write_section("real_model", section(results), PAGE)
        plot(results, PICTURE)


if __name__ == "__main__":
    main()
