"""The study of a real language model: SmolLM2-135M learns to search SQuAD's passages, by several credit assignments.

    python scripts/build/smollm2.py runs/SmolLM2-135M-Instruct
    python scripts/build/squad_search.py runs/squad --sentences 1 --source FOLDER     # or from the Hub, with --titles
    python scripts/bench/real_model.py                                     # what is missing; then the report
    python scripts/bench/real_model.py --methods mt_grpo mt_grpo,beta=0 --seeds 1
    python scripts/bench/real_model.py --methods mt_grpo,use_peft=true,lora_dropout=0,learning_rate=3e-4 --seeds 1
    python scripts/bench/real_model.py --methods mt_grpo --seeds 1 --steps 60 --only_print    # the next report has it
    python scripts/bench/real_model.py --report

A run trains hf_recipes/SmolLM2/squad-search.yaml beside a vLLM server that samples. The held-out questions are
answered before it and after it, sampled as in training and greedily. A seed is that of the order of the prompts and of
the server's samples. A method is a credit assignment, and what else
differs from the recipe: `mt_grpo,beta=0.04,learning_rate=1e-5`.

Resumable: a finished run is a file in runs/real_model/ with the commit that made it, and is not run again. One that
was stopped goes on from its last checkpoint. Move both away after a change of recipe, rewards or data. The report
has these runs, and those of the last written report that are not in the folder; docs/results/real_model.json has of
each what the page's tables and picture show.
"""

import json
import math
import re
import statistics
import sys
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scipy import stats

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
from bench.credit import commit, smoothed

RECIPE = "hf_recipes/SmolLM2/squad-search.yaml"
MODEL = "runs/SmolLM2-135M-Instruct"
DATA = "runs/squad"
METHODS, SEEDS = ("outcome", "mt_grpo"), (1, 2, 3)  # the recipe's settings were chosen by runs of seed 0
RUNS = Path("runs/real_model")
NUM_PROBLEMS, SAMPLES = 100, 1  # held out; samples of each
SHOWN = 5  # conversations that the results keep
EXCERPT = 48  # characters of a result that the report has; half of a short one
NUM_PASSAGES = 40  # whose perplexity is taken
NUM_TOPICS, TOPIC = 20, 1000  # of Python's documentation, so many characters of each
# The engine in one process, with both cores: while it samples the trainer waits, and the other way round.
SERVER = (*IN_THE_ENGINE, "--max-model-len", "1024", "--logprobs-mode", "processed_logprobs")
SERVER_ENV = {**IN_THE_ENGINE_ENV, "OMP_NUM_THREADS": "2"}
# Keys that a method cannot change.
FIXED = ("seed", "max_steps", "output_dir", "use_vllm", "vllm_mode", "vllm_server_base_url", "log_rollouts",
         "log_rollout_tokens", "credit_assignment", "vllm_importance_sampling_mode",
         "vllm_importance_sampling_correction")  # fmt: skip


def options_of(method: str) -> list[str]:
    """The words of the command line of a method.

    >>> options_of("mt_grpo,beta=0.04")
    ['--credit_assignment', 'mt_grpo', '--beta', '0.04']
    >>> options_of("mt_grpo,outcome_reward_weights=1 0")[2:]
    ['--outcome_reward_weights', '1', '0']
    """
    words = ["--credit_assignment", method.split(",")[0]]
    for setting in method.split(",")[1:]:
        key, equals, value = setting.partition("=")
        if not (key and equals and value) or "/" in value:
            sys.exit(f"error: {setting!r} of --methods, expected key=value behind a credit assignment, without /.")
        if key in FIXED:
            sys.exit(
                f"error: {setting!r} of --methods: {key} is the study's own. Expected none of {', '.join(FIXED)}."
            )
        words += [f"--{key}", *value.split()]
    return words


def evaluated(model: str | Path, recipe: str | Path = RECIPE) -> dict[str, Any]:
    """Of the held-out questions: `sampled` and `greedy`, as scripts/evaluate.py gives them, and two perplexities.

    All models are asked alike, by the recipe's settings: a method that samples colder would look better otherwise.
    """
    import evaluate
    from transformers import AutoTokenizer

    import mt_grpo_trainer as mt

    found: dict[str, Any] = {}
    with VLLMServer(model, *SERVER, env=SERVER_ENV) as server:
        for name, samples in (("sampled", SAMPLES), ("greedy", 1)):
            tokenizer = AutoTokenizer.from_pretrained(model)
            client = mt.VLLMServerClient(base_url=server.url, tokenizer=tokenizer)
            try:
                found[name] = evaluate.evaluate(
                    client,
                    str(recipe),
                    NUM_PROBLEMS,
                    k=samples,
                    tokenizer=tokenizer,
                    progress=False,
                    batch_size=128,
                    greedy=name == "greedy",
                    show=NUM_PROBLEMS * samples,
                )
            finally:
                client.close()
            said = found[name].pop("conversations")
            found[name] |= {"behaviour": behaviour(said), "conversations": said[:SHOWN]}
    return found | dict(
        zip(("perplexity", "perplexity_elsewhere"), perplexities(model, [first_passages(), elsewhere()]))
    )


def behaviour(conversations: list[dict[str, Any]]) -> dict[str, float | None]:
    """The mean overlap of first queries with their questions, and the mean length of answers in words.

    Returns:
        `question_in_query`: of a conversation's first query, the share of the question's words that stand in it; None
        without a query. `answer_words`: of an answer; None without one.

    >>> said = [{"role": "user", "content": "Who led the Normans?"}, {"role": "assistant", "content": "x"}]
    >>> call = {"name": "wiki_search", "arguments": {"query": "normans led"}}
    >>> behaviour([{"messages": said, "calls": [call], "answer": "the Viking Rollo"}])
    {'question_in_query': 0.5, 'answer_words': 3}
    """
    shares, lengths = [], []
    for conversation in conversations:
        asked = words(conversation["messages"][0]["content"])
        queries = [str(call["arguments"]["query"]) for call in conversation["calls"] if "query" in call["arguments"]]
        shares += [len(asked & words(query)) / len(asked) for query in queries[:1] if asked]
        lengths += [len(conversation["answer"].split())] if conversation["answer"] else []
    return {
        "question_in_query": statistics.mean(shares) if shares else None,
        "answer_words": statistics.mean(lengths) if lengths else None,
    }


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def merged(trained: Path) -> Path:
    """The folder of a whole model: of a run with LoRA one with its adapter merged, else what the run saved."""
    if not (trained / "adapter_config.json").is_file():
        return trained
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    target = trained / "merged"
    model = AutoPeftModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    model.merge_and_unload().save_pretrained(target)
    AutoTokenizer.from_pretrained(trained).save_pretrained(target)
    return target


def first_passages() -> list[str]:
    """The first passages. A run reads their sentences as results, and trains their tokens where an answer has them."""
    with open(f"{DATA}/passages.jsonl", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for _, line in zip(range(NUM_PASSAGES), lines)]


def elsewhere() -> list[str]:
    """English that no run has to do with, and that is on every machine: how Python describes its statements."""
    return [text[:TOPIC] for _, text in sorted(topics.topics.items())[:NUM_TOPICS]]


def perplexities(model: str | Path, of: list[list[str]]) -> list[float]:
    """Of each list of texts: exp of the mean negative logprob of a token, each text read by itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for texts in of:
        total = count = 0.0
        for text in texts:
            ids = torch.tensor([tokenizer(text).input_ids])
            with torch.no_grad():
                total += network(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
        found.append(math.exp(total / count))
    return found


def name_of(method: str, seed: int, steps: int) -> str:
    """The name of a run's folder, and of its result.

    >>> name_of("mt_grpo,beta=0.04", 0, 40)
    'mt_grpo,beta=0.04-steps40-seed0'
    """
    return f"{method}-steps{steps}-seed{seed}"


def result_in(path: Path) -> dict[str, Any] | None:
    """The result in a file of this study; None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def run(method: str, seed: int, steps: int) -> dict[str, Any]:
    """Train, or go on where a run was stopped, and evaluate. Returns the result, and leaves it in RUNS."""
    name = name_of(method, seed, steps)
    output, path = RUNS / name, RUNS / f"{name}.json"
    if (found := result_in(path)) is not None:
        return found
    began, options = time.perf_counter(), options_of(method)
    resume = ("--resume_from_checkpoint", "true") if list(output.glob("checkpoint-*/trainer_state.json")) else ()
    # Without a seed of its own each run's server would sample from the same state.
    with VLLMServer(MODEL, *SERVER, "--seed", str(seed), env=SERVER_ENV) as server:
        words = {
            "seed": seed, "max_steps": steps, "use_vllm": "true", "vllm_mode": "server",
            "vllm_server_base_url": server.url, "vllm_importance_sampling_mode": "token_truncate", "log_rollouts": 32,
            "log_rollout_tokens": "true",
        }  # fmt: skip
        pairs = [word for key, value in words.items() for word in (f"--{key}", value)]
        rows = train(RECIPE, output, *options, *pairs, *resume)
    trained = time.perf_counter() - began
    found = {
        "method": method, "seed": seed, "steps": steps, "commit": commit(), "after": evaluated(merged(output)),
        "seconds": trained, "resumed": bool(resume),
        "curve": [{key: row[key] for key in ("step", "num_tokens", *METRICS) if key in row} for row in rows],
        "machine": machine(),
    }  # fmt: skip
    write(path, found)
    return found


def before() -> dict[str, Any]:
    """Evaluate the model before any training, once."""
    path = RUNS / "before.json"
    if (found := result_in(path)) is None:
        RUNS.mkdir(parents=True, exist_ok=True)
        found = evaluated(MODEL)
        write(path, found)
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """A file that is whole or is not there."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rounded(found, 7)) + "\n", encoding="utf-8")
    partial.replace(path)


# -- The report --

FIGURES = {
    "tool executed": lambda found: found["tool_executed"],
    "answer among the results": lambda found: found["result_found"],
    "exact match": lambda found: found["exact_match"],
    "F1": lambda found: 2 * found["rewards"]["outcome"]["f1_reward_func"],
    "turns": lambda found: found["mean_turns"],
    "question's words in the query": lambda found: found["behaviour"]["question_in_query"],
    "words of an answer": lambda found: found["behaviour"]["answer_words"],
}
COMPARED = ("answer among the results", "exact match", "F1")
CURVES = {  # title -> metric, what makes it a share, the top of the axis
    "answer found, of rollouts with a result": ("rewards/answer_in_search_results_reward_func/mean", 2.0, 1.0),
    "F1 of the answer": ("rewards/f1_reward_func/mean", 2.0, 0.4),
    "exact match": ("rewards/exact_match_reward_func/mean", 1.0, 0.4),
}
METRICS = [name for name, _, _ in CURVES.values()]
COLOURS = ("#777777", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
OVER = 5  # steps that a point of a curve is the mean of


def aggregated(evaluation: dict[str, Any]) -> dict[str, Any]:
    """What the report shows of an evaluation: figures by their labels, perplexities, and excerpts of conversations."""
    found = {
        how: {label: figure(evaluation[how]) for label, figure in FIGURES.items()} for how in ("sampled", "greedy")
    }
    found |= {key: evaluation[key] for key in ("perplexity", "perplexity_elsewhere") if key in evaluation}
    found["num_problems"] = evaluation["sampled"]["num_problems"]
    return found | {"conversations": excerpts(evaluation["sampled"]["conversations"])}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95% interval over seeds (Student's t).

    >>> [round(value, 4) for value in interval([1.0, 2.0, 3.0])]
    [2.0, 2.4841]
    """
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def cell(values: list[float | None]) -> str:
    """A mean over seeds with its 95% interval. Of one or two seeds, which have none worth the name, the values.

    >>> cell([0.25]), cell([0.25, 0.5]), cell([0.25, 0.5, 0.75]), cell([None])
    ('0.25', '0.25, 0.50', '0.50 ± 0.62', '-')
    >>> cell([None, 0.25, None])  # two runs have no such figure
    '0.25 (1 of 3 runs)'
    """
    there = [value for value in values if value is not None]
    left = f" ({len(there)} of {len(values)} runs)" if 0 < len(there) < len(values) else ""
    if len(there) < 3:
        return ", ".join(f"{value:.2f}" for value in there) + left or "-"
    return "{:.2f} ± {:.2f}".format(*interval(there)) + left


def span(values: list[float]) -> str:
    """The smallest and the largest; one number where both are written alike.

    >>> span([19.2, 19.4]), span([1000.0, 2500.0])
    ('19', '1,000 to 2,500')
    """
    return " to ".join(dict.fromkeys(f"{value:,.0f}" for value in (min(values), max(values))))


def methods_of(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each method."""
    return {name: [run for run in runs if run["method"] == name] for name in dict.fromkeys(r["method"] for r in runs)}


def with_columns(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that have a column of the table: those without settings of their own, if there are any."""
    runs = [run for run in results["runs"] if run["steps"] == results["steps"]]
    return [run for run in runs if "," not in run["method"]] or runs


def section(results: dict[str, Any]) -> str:
    """Tables of the held-out questions, the difference of two methods, what a run costs, and conversations.

    A method with settings of its own (`mt_grpo,beta=0.04`) is a further run, with a row and no column.
    """
    import evaluate

    runs, lines = with_columns(results), []
    methods = methods_of(runs)
    for how in ("sampled", "greedy"):
        lines += [f"| {how} | before |{''.join(f' `{method}` |' for method in methods)}"]
        lines += ["|---|---|" + "---|" * len(methods)]
        for label in FIGURES:
            after = [cell([run["after"][how][label] for run in of]) for of in methods.values()]
            lines.append(f"| {label} | {' | '.join([cell([results['before'][how][label]]), *after])} |")
        lines.append("")
    for what, key in (
        (f"{NUM_PASSAGES} passages of the articles", "perplexity"),
        (f"{NUM_TOPICS} texts that no run reads (Python's documentation)", "perplexity_elsewhere"),
    ):
        if key in results["before"]:
            after = [
                f"{cell([run['after'].get(key) for run in of])} after `{method}`" for method, of in methods.items()
            ]
            lines += [f"Perplexity of {what}: {cell([results['before'][key]])} before, {', '.join(after)}.", ""]
    seeds = "; ".join(
        f"`{method}`: seed{'s' * (len(of) > 1)} {', '.join(str(run['seed']) for run in of)}"
        for method, of in methods.items()
    )
    steps, minutes = runs[0]["steps"], [run["seconds"] / 60 for run in runs if not run["resumed"]]
    costs = f"in {span(minutes)} minutes with the server's start" if minutes else "(resumed, so not timed)"
    machines = {f"{run['machine']['cores']} cores ({run['machine']['cpu']})": None for run in runs}
    tokens = [run["num_tokens"] for run in runs]
    lines.append(
        f"{results['before']['num_problems']} held-out questions, {SAMPLES} sample of each; mean ± 95% "
        "interval over seeds, of two the values (of the runs: the questions are the same). "
        f"{seeds}. {steps} steps of 32 rollouts {costs}, {span(tokens)} tokens, on {' and '.join(machines)}."
    )
    lines += compared(runs)
    lines += of_further(runs, [run for run in results["runs"] if run not in runs])
    last = runs[-1]
    after = f"after `{last['method']}`, seed {last['seed']}"
    for title, found in (("before training", results["before"]), (after, last["after"])):
        said = "\n\n".join(evaluate.transcript(each) for each in found.get("conversations", []))
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", said)), default=0))  # what is said may have fences
        lines += ["", f"<details><summary>{SHOWN} held-out questions {title}, sampled</summary>", "", fence]
        lines += [said, fence, "", "</details>"]
    return "\n".join(lines)


def compared(runs: list[dict[str, Any]]) -> list[str]:
    """The difference of the second method and the first, over the seeds that both have; nothing of less than three."""
    first, second = ({run["seed"]: run["after"] for run in runs if run["method"] == method} for method in METHODS)
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 3:
        return []
    lines = ["", f"`{METHODS[1]}` minus `{METHODS[0]}`, in pairs of {len(seeds)} seeds:", ""]
    lines += ["| | sampled | greedy |", "|---|---|---|"]
    for label in COMPARED:
        cells = [
            "{:+.2f} ± {:.2f}".format(*interval([second[s][how][label] - first[s][how][label] for s in seeds]))
            for how in ("sampled", "greedy")
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def of_further(runs: list[dict[str, Any]], further: list[dict[str, Any]]) -> list[str]:
    """A table of runs with other settings or more steps, each behind the shorter one of its method and seed."""
    if not further:
        return []
    lines = ["", "Further runs, with other settings or more steps, sampled / greedy:", ""]
    lines += [
        "| method, seed | steps | " + " | ".join(COMPARED) + " | words of an answer | perplexity |",
        "|---|---|---|---|---|---|---|",
    ]
    rows: list[dict[str, Any]] = []
    for run in further:
        same = [each for each in runs if (each["method"], each["seed"]) == (run["method"], run["seed"])]
        rows += [each for each in [*same, run] if each not in rows]
    names = [(row["method"], row["seed"]) for row in rows]
    for each in sorted(rows, key=lambda row: names.index((row["method"], row["seed"]))):
        pairs = [
            [each["after"][how][label] for how in ("sampled", "greedy")] for label in (*COMPARED, "words of an answer")
        ]
        cells = [" / ".join(cell([value]) for value in pair) for pair in pairs]
        lines.append(
            f"| `{each['method']}`, {each['seed']} | {each['steps']} | {' | '.join(cells)} | "
            f"{each['after']['perplexity']:.1f} |"
        )
    return lines


def plot(results: dict[str, Any], path: Path) -> None:
    """Training curves: a line per run, means of `OVER` steps."""
    figure, axes = pyplot().subplots(1, len(CURVES), figsize=(12, 3.4))
    methods = methods_of(with_columns(results))
    colours = dict(zip(dict.fromkeys([*METHODS, *methods]), COLOURS))
    for axis, (title, (name, factor, top)) in zip(axes, CURVES.items(), strict=True):
        for method, runs in methods.items():
            for number, run in enumerate(runs):
                axis.plot(
                    run["curve"]["step"],
                    smoothed([factor * value for value in run["curve"][name]], OVER),
                    color=colours.get(method, "black"),
                    label=method if not number else None,
                )
        axis.set(title=title, xlabel="optimizer step", ylim=(0, top))
        axis.legend(frameon=False)
    save_picture(figure, path)


FRAME = Frame("real_model", section, plot)
FRAME.page = FRAME.page.with_name("real_model.md")


def main(argv: list[str] | None = None) -> None:
    options = FRAME.parse(
        __doc__,
        argv,
        None,
        methods={"nargs": "+", "default": list(METHODS)},
        seeds={"nargs": "+", "type": int, "default": list(SEEDS)},
        steps={"type": int, "default": 20, "help": "optimizer steps of a run"},
        only_print={"action": "store_true", "help": "print the tables, and leave docs/ as it is"},
    )
    if options is None:
        return
    prepare()
    for method in options.methods:
        options_of(method)
    before()
    for seed in options.seeds:
        for method in options.methods:
            began = time.perf_counter()
            run(method, seed, options.steps)
            print(f"{name_of(method, seed, options.steps)}: {time.perf_counter() - began:.0f} s", flush=True)
            runs = collected(reported=not options.only_print)
            results = {"before": aggregated(before()), "steps": options.steps, "runs": runs}
            if options.only_print:
                print("\n" + section(results), flush=True)
                continue
            for each in runs:  # the page has the conversations of one run
                if each is not with_columns(results)[-1]:
                    each["after"].pop("conversations", None)
            FRAME.finish(rounded(results, 6), short=False)


def excerpts(found: Any) -> Any:
    """A copy whose conversations have only the beginnings of results, and of answers, which may be copied of them.

    The passages are SQuAD's, under CC BY-SA 4.0.

    >>> cut = excerpts({"role": "user", "content": "<result>\\nRollo led them.\\n</result>"})
    >>> cut["content"], excerpts(cut) == cut
    ('<result>\\nRollo l ...\\n</result>', True)
    >>> excerpts({"content": f"<answer>{'Rollo ' * 20}</answer>", "answer": "Rollo " * 20})["answer"]
    'Rollo Rollo Rollo Rollo Rollo Rollo Rollo Rollo  ...'
    """
    if isinstance(found, list):
        return [excerpts(each) for each in found]
    if not isinstance(found, dict):
        return found
    changes, text, end = {}, found.get("content"), " ...\n</result>"
    if isinstance(text, str) and text.startswith("<result>\n") and not text.endswith(end):
        result = text.removeprefix("<result>\n").removesuffix("\n</result>")
        changes["content"] = f"<result>\n{result[: min(EXCERPT, len(result) // 2)]}{end}"
    elif isinstance(text, str) and "<answer>" in text:
        changes["content"] = re.sub(r"(?s)(?<=<answer>)(.*?)(?=</answer>|\Z)", lambda said: beginning(said[0]), text)
    if isinstance(found.get("answer"), str):
        changes["answer"] = beginning(found["answer"])
    return {key: excerpts(value) for key, value in {**found, **changes}.items()}


def beginning(text: str) -> str:
    """A text, or its first characters."""
    return text if len(text) <= EXCERPT + len(" ...") else f"{text[:EXCERPT]} ..."


def collected(reported: bool) -> list[dict[str, Any]]:
    """The runs in RUNS and, with `reported`, those of the last report that are not there."""
    found = [one_of(result_in(path)) for path in sorted(RUNS.glob("*-steps*-seed*.json"))]
    old = result_in(FRAME.results) if reported else None
    runs = {name_of(run["method"], run["seed"], run["steps"]): run for run in [*(old or {"runs": []})["runs"], *found]}
    order = {method: number for number, method in enumerate(METHODS)}
    return sorted(
        runs.values(), key=lambda run: (order.get(run["method"], len(order)), run["method"], run["seed"], run["steps"])
    )


def one_of(run: dict[str, Any]) -> dict[str, Any]:
    """A run as the report has it: `curve` has the steps and the plotted metrics, a list each."""
    rows = run["curve"]
    curve = {key: [row.get(key) or 0.0 for row in rows] for key in ("step", *METRICS)}
    return {**run, "after": aggregated(run["after"]), "curve": curve, "num_tokens": rows[-1].get("num_tokens", 0)}


if __name__ == "__main__":
    main()
