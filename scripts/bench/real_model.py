"""The study of a real language model: SmolLM2-135M learns to search SQuAD's passages, by several credit assignments.

    python scripts/build/smollm2.py runs/SmolLM2-135M-Instruct
    python scripts/build/squad_search.py runs/squad --source FOLDER        # or from the Hub
    python scripts/bench/real_model.py                                     # what is missing; then the report
    python scripts/bench/real_model.py --methods mt_grpo --seeds 0
    python scripts/bench/real_model.py --report

A run trains hf_recipes/SmolLM2/squad-search.yaml beside a vLLM server that samples. The held-out questions are
answered before it and after it, sampled and greedy. Runs differ in `credit_assignment` and `seed` alone.

Resumable: a finished run is a file in runs/real_model/; one that was stopped goes on from its last checkpoint.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.common import (
    IN_THE_ENGINE,
    IN_THE_ENGINE_ENV,
    Frame,
    VLLMServer,
    machine,
    prepare,
    pyplot,
    rounded,
    save_picture,
    train,
)
from bench.credit import interval, smoothed

RECIPE = "hf_recipes/SmolLM2/squad-search.yaml"
MODEL = "runs/SmolLM2-135M-Instruct"
METHODS, SEEDS = ("outcome", "mt_grpo"), (0, 1, 2)
RUNS = Path("runs/real_model")
NUM_PROBLEMS, SAMPLES = 100, 1  # held out; samples of each
# The engine in one process, with both cores: while it samples the trainer waits, and the other way round.
SERVER = (*IN_THE_ENGINE, "--max-model-len", "1024", "--logprobs-mode", "processed_logprobs")
SERVER_ENV = {**IN_THE_ENGINE_ENV, "OMP_NUM_THREADS": "2"}
KEPT = (
    "reward", "rewards/exact_match_reward_func/mean", "rewards/f1_reward_func/mean",
    "rewards/answer_in_search_results_reward_func/mean", "tools/call_frequency", "tools/failure_frequency",
    "turns/mean", "completions/mean_length", "num_tokens", "step_time", "rollout/seconds",
    "sampling/sampling_logp_difference/mean", "entropy", "grad_norm",
)  # fmt: skip


def evaluated(model: str | Path) -> dict[str, Any]:
    """Of the held-out questions: `sampled` and `greedy`, as scripts/evaluate.py gives them."""
    import evaluate
    from transformers import AutoTokenizer

    import mt_grpo_trainer as mt

    found = {}
    with VLLMServer(model, *SERVER, env=SERVER_ENV) as server:
        for name, samples in (("sampled", SAMPLES), ("greedy", 1)):
            tokenizer = AutoTokenizer.from_pretrained(model)
            client = mt.VLLMServerClient(base_url=server.url, tokenizer=tokenizer)
            try:
                found[name] = evaluate.evaluate(
                    client, RECIPE, NUM_PROBLEMS, k=samples, tokenizer=tokenizer, progress=False, batch_size=128,
                    greedy=name == "greedy",
                )  # fmt: skip
            finally:
                client.close()
    return found


def name_of(method: str, seed: int, steps: int) -> str:
    """The name of a run's folder, and of its result.

    >>> name_of("mt_grpo", 0, 45)
    'mt_grpo-steps45-seed0'
    """
    return f"{method}-steps{steps}-seed{seed}"


def run(method: str, seed: int, steps: int) -> dict[str, Any]:
    """Train, or go on where a run was stopped, and evaluate. Returns the result, and leaves it in RUNS."""
    name = name_of(method, seed, steps)
    output, result = RUNS / name, RUNS / f"{name}.json"
    if result.is_file():
        return json.loads(result.read_text(encoding="utf-8"))
    began = time.perf_counter()
    resume = ("--resume_from_checkpoint", "true") if list(output.glob("checkpoint-*/trainer_state.json")) else ()
    with VLLMServer(MODEL, *SERVER, env=SERVER_ENV) as server:
        rows = train(
            RECIPE, output, "--credit_assignment", method, "--seed", seed, "--max_steps", steps, "--use_vllm", "true",
            "--vllm_mode", "server", "--vllm_server_base_url", server.url, "--vllm_importance_sampling_mode",
            "token_truncate", "--log_rollout_tokens", "true", *resume,
        )  # fmt: skip
    trained = time.perf_counter() - began
    found = {
        "method": method, "seed": seed, "steps": steps, "after": evaluated(output), "seconds": trained,
        "resumed": bool(resume),
        "curve": [{key: row[key] for key in ("step", *KEPT) if key in row} for row in rows], "machine": machine(),
    }  # fmt: skip
    result.write_text(json.dumps(rounded(found, 5)) + "\n", encoding="utf-8")
    return found


def before() -> dict[str, Any]:
    """Of the model as it comes, once."""
    path = RUNS / "before.json"
    if not path.is_file():
        RUNS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rounded(evaluated(MODEL), 5)) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------

FIGURES = {
    "tool executed": lambda found: found["tool_executed"],
    "answer among the results": lambda found: found["result_found"],
    "exact match": lambda found: found["exact_match"],
    "F1": lambda found: 2 * found["rewards"]["outcome"]["f1_reward_func"],
    "turns": lambda found: found["mean_turns"],
}
CURVES = {
    "answer among the results, of rollouts that have some": ("rewards/answer_in_search_results_reward_func/mean", 2.0),
    "exact match": ("rewards/exact_match_reward_func/mean", 1.0),
}
OVER = 5  # steps that a point of a curve is the mean of


def cell(values: list[float]) -> str:
    """A mean over seeds with its 95% interval; of one seed the value alone."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return "{:.2f} ± {:.2f}".format(*interval(values))


def span(values: list[float]) -> str:
    """The smallest and the largest; one number where both are written alike.

    >>> span([19.2, 19.4]), span([1000.0, 2500.0])
    ('19', '1,000 to 2,500')
    """
    return " to ".join(dict.fromkeys(f"{value:,.0f}" for value in (min(values), max(values))))


def section(results: dict[str, Any]) -> str:
    """A table of the held-out questions, sampled and greedy, and what a run costs."""
    runs, lines = results["runs"], []
    for how in ("sampled", "greedy"):
        methods = list(dict.fromkeys(run["method"] for run in runs))
        lines += [f"| {how} | before |{''.join(f' `{method}` |' for method in methods)}"]
        lines += ["|---|---|" + "---|" * len(methods)]
        for label, figure in FIGURES.items():
            after = [[figure(run["after"][how]) for run in runs if run["method"] == method] for method in methods]
            cells = [f"{figure(results['before'][how]):.2f}", *map(cell, after)]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        lines.append("")
    seeds = sorted({run["seed"] for run in runs})
    steps, minutes = runs[0]["steps"], [run["seconds"] / 60 for run in runs if not run["resumed"]] or [0.0]
    tokens = [run["curve"][-1].get("num_tokens", 0) for run in runs]
    over = f"{len(seeds)} seeds, mean ± 95% interval" if len(seeds) > 1 else "1 seed"
    lines.append(
        f"{NUM_PROBLEMS} held-out questions, {SAMPLES} sample of each; {over}; {steps} steps of 32 rollouts in "
        f"{span(minutes)} minutes, the server's start included, and {span(tokens)} tokens, on "
        f"{results['machine']['cores']} cores ({results['machine']['cpu']})."
    )
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """Training curves: a line per run, means of `OVER` steps."""
    figure, axes = pyplot().subplots(1, len(CURVES), figsize=(10, 3.6))
    colours = dict(zip(METHODS, ("#777777", "#0072B2")))
    for axis, (title, (name, factor)) in zip(axes, CURVES.items(), strict=True):
        for method in dict.fromkeys(run["method"] for run in results["runs"]):
            for number, run in enumerate(run for run in results["runs"] if run["method"] == method):
                curve = smoothed([factor * (row.get(name) or 0.0) for row in run["curve"]], OVER)
                axis.plot(
                    [row["step"] for row in run["curve"]], curve, color=colours.get(method, "#D55E00"),
                    label=method if not number else None,
                )  # fmt: skip
        axis.set(title=title, xlabel="optimizer step", ylim=(0, 1))
        axis.legend(frameon=False)
    save_picture(figure, path)


FRAME = Frame("real_model", section, plot)
FRAME.page = FRAME.page.with_name("real_model.md")


def main(argv: list[str] | None = None) -> None:
    options = FRAME.parse(
        __doc__, argv, None, methods={"nargs": "+", "default": list(METHODS)},
        seeds={"nargs": "+", "type": int, "default": list(SEEDS)},
        steps={"type": int, "default": 45, "help": "optimizer steps of a run"},
    )  # fmt: skip
    if options is None:
        return
    prepare()
    results = {"machine": machine(), "before": before(), "runs": []}
    for seed in options.seeds:
        for method in options.methods:
            began = time.perf_counter()
            results["runs"].append(run(method, seed, options.steps))
            print(f"{name_of(method, seed, options.steps)}: {time.perf_counter() - began:.0f} s", flush=True)
            FRAME.finish(results, short=False)


if __name__ == "__main__":
    main()
