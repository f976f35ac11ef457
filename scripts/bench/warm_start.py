"""A warm start from a run's log: is the model better for what its own good rollouts taught it, without examples?

    python scripts/bench/real_model.py --methods mt_grpo --seeds 1 --only_print
    python scripts/bench/warm_start.py --run runs/real_model/mt_grpo-steps20-seed1     # --only_print keeps docs/
    python scripts/bench/warm_start.py --report

Of the run's log those rollouts are taken that found the answer, two of each question at most
(scripts/export_sft.py), without the examples that stood before each question. TRL's `SFTTrainer` trains the model as
it comes on them, once through. Asked are the held-out questions of scripts/bench/real_model.py, without examples: the
model as it comes, the trained one, and the run's own model with the examples that it was trained behind.

Resumable: a model that is trained, and one that was asked, is in runs/warm_start.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import export_sft

from bench.common import ROOT, Frame, machine, prepare
from bench.real_model import FIGURES, MODEL, RECIPE, cell, evaluated, excerpts, inputs, result_in, transcript, write

OUT = Path("runs/warm_start")
REWARD, LEAST, PER_PROMPT = "answer_in_search_results_reward_func", 0.5, 2
LEARNING_RATE, BATCH_SIZE = 2e-5, 8


def without_examples(path: Path) -> Path:
    """The recipe with nothing before the question, in the file of that path."""
    lines = Path(RECIPE).read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("prompt_examples:")), encoding="utf-8")
    return path


def made_of(run: Path, data: Path) -> str:
    """A digest of what a round is made of: the study's inputs, the run's model, the rows, how they are trained."""
    digest = hashlib.sha256(repr((inputs(), LEARNING_RATE, BATCH_SIZE)).encode())
    for path in (*sorted(run.glob("*.safetensors")), data):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def kept(path: Path, read: str) -> dict[str, Any] | None:
    """What a file holds that was made of the same; None: it is made anew."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if found.get("inputs") == read else None


def trained(data: Path, model: Path, read: str) -> dict[str, Any]:
    """Train the model as it comes on the rows of a file, once through, into a new folder. Returns what it took."""
    path = model.with_suffix(".json")
    if (found := kept(path, read)) is not None:
        return found
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    rows = load_dataset("json", data_files=str(data), split="train")
    args = SFTConfig(
        str(model),
        max_length=None,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        num_train_epochs=1,
        per_device_train_batch_size=BATCH_SIZE,
        use_cpu=True,
        bf16=False,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    began = time.perf_counter()
    trainer = SFTTrainer(MODEL, args, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    found = {
        "inputs": read,
        "learning_rate": LEARNING_RATE,
        "rows": len(rows),
        "tokens": sum(map(len, rows["input_ids"])),
        "trained_tokens": sum(map(sum, rows["assistant_masks"])),
        "seconds": time.perf_counter() - began,
    }
    write(path, found)
    return found


def asked(path: Path, read: str, model: str | Path, recipe: str | Path) -> dict[str, Any]:
    """`evaluated`, once, and kept in the file of that path."""
    if (found := kept(path, read)) is None:
        found = {"inputs": read, **evaluated(model, recipe)}
        write(path, found)
    return found


def section(results: dict[str, Any]) -> str:
    """A table of the three models, and conversations of the trained one."""
    took, models = results["training"], results["models"]
    heads = ("before", "after the supervised training", f"the run, {results['steps']} steps, with examples")
    lines = []
    for how in ("sampled", "greedy"):
        lines += [f"| {how} | {' | '.join(heads)} |", "|---|---|---|---|"]
        for label, figure in FIGURES.items():
            cells = (cell([figure(models[name][how])]) for name in ("before", "after", "run"))
            lines.append(f"| {label} | {' | '.join(cells)} |")
        lines.append("")
    lines += [
        "Perplexity of the passages: " + ", ".join(f"{models[name]['perplexity']:.1f}" for name in models)
        + f". {took['rows']} rollouts, {took['trained_tokens']:,} trained of {took['tokens']:,} tokens, learning rate "
        f"{took['learning_rate']:g}, {took['seconds'] / 60:.0f} minutes on {results['machine']['cores']} cores "
        f"({results['machine']['cpu']}). 100 held-out questions, one run.",
        "", "<details><summary>Two held-out questions, without examples, sampled</summary>", "", "```",
        "\n\n".join(transcript(said) for said in models["after"]["sampled"]["conversations"][:2]), "```", "",
        "</details>",
    ]  # fmt: skip
    return "\n".join(lines)


FRAME = Frame("warm_start", section)
FRAME.page = ROOT / "docs/real_model.md"


def main(argv: list[str] | None = None) -> None:
    options = FRAME.parse(
        __doc__,
        argv,
        None,
        run={"help": "the folder of a run whose log has tokens"},
        only_print={"action": "store_true", "help": "print the tables, and leave docs/ as it is"},
    )
    if options is None:
        return
    prepare()
    if options.run is None or not (run := Path(options.run)).is_dir():
        sys.exit(f"error: --run {options.run}. Expected the folder of a run, with its rollouts.rank*.jsonl.")
    if result_in(run / "inputs.json", inputs()) is None:  # one of another recipe or model is refused there
        sys.exit(f"error: {run} has no inputs.json. Expected a run of scripts/bench/real_model.py.")
    out = OUT / run.name
    out.mkdir(parents=True, exist_ok=True)
    export_sft.main(
        [
            str(run),
            str(out / "rows.jsonl"),
            "--min",
            f"{REWARD}={LEAST}",
            "--per_prompt",
            str(PER_PROMPT),
            "--without_examples",
            "--config",
            RECIPE,
        ]
    )
    short, model = without_examples(out / "recipe.yaml"), out / "model"
    read = made_of(run, out / "rows.jsonl")
    models = {"before": asked(OUT / "before.json", inputs(), MODEL, short)}
    training = trained(out / "rows.jsonl", model, read)
    models["after"] = asked(out / "after.json", read, model, short)
    models["run"] = asked(out / "run.json", read, run, RECIPE)
    steps = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    results = {"machine": machine(), "steps": steps, "training": training, "models": models}
    if options.only_print:
        print("\n" + section(results), flush=True)
    else:
        FRAME.finish(excerpts(results), short=False)


if __name__ == "__main__":
    main()
