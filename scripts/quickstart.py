"""Train a bundled tiny model to use a tool on the CPU, and show what it could do before and after.

    python scripts/quickstart.py [chain|calculator|search|zoom] [trainer arguments...]

The model starts warm: it knows how a call looks and samples a good one only some of the time. The column "greedy,
before" says what it could do before any training if it took the most probable token each time. Where that is near 1,
training only makes it do so more often. The models of the chain and of the pictures cannot solve their tasks greedily.
"""

import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "--help" in sys.argv:  # before what takes seconds to import
    sys.exit(print(__doc__))

from evaluate import evaluate, mean, number
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

import mt_grpo_trainer as mt
from mt_grpo.base.errors import ServerError
from mt_grpo.base.files import output_lock
from mt_grpo.reports.preflight import Watch
from mt_grpo.reports.progress import ProgressLine

# What can be trained: its recipe, arguments beside it, and what the table calls a result that holds the answer. The
# first is what a newcomer sees: its rewards are per turn, and greedy decoding does not solve it.
TASKS = {
    "chain": ("hf_recipes/tiny/chain-sparse.yaml", ["--max_steps", "60"], "right result found"),
    "calculator": ("hf_recipes/tiny/calculator.yaml", [], "right result found"),
    "search": ("hf_recipes/tiny/encyclopedia.yaml", [], "answer in results"),
    "zoom": ("hf_recipes/tiny/zoom.yaml", [], "right corner asked"),
}
NUM_PROBLEMS = 512  # held out: none of them is ever trained on


class ReadableProgress(TrainerCallback):
    """One line per `EVERY` steps, their means, in place of TRL's dictionary of everything."""

    EVERY = 5
    COLUMNS = ("reward", "rewards/exact_match_reward_func/mean", "turns/mean")

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, self.steps = time.perf_counter(), []
        print(f"{'step':>9}{'reward':>9}{'exact match':>13}{'tool success':>14}{'turns':>7}{'seconds':>9}", flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "reward" not in logs:  # the summary at the end of training
            return
        self.steps.append(logs)
        if state.global_step % self.EVERY and state.global_step < state.max_steps:
            return
        reward, exact, turns = (mean([s.get(column) for s in self.steps]) for column in self.COLUMNS)
        called = [s for s in self.steps if s.get("tools/call_frequency")]
        failed = [s["tools/failure_frequency"] for s in called]
        success = mean([1 - share for share in failed if share is not None])  # None: nobody saw what came of the calls
        step, seconds = f"{state.global_step}/{state.max_steps}", time.perf_counter() - self.started
        print(
            f"{step:>9}{number(reward, 2):>9}{number(exact, 2):>13}{number(success, 2):>14}{number(turns, 2):>7}"
            f"{seconds:>9.0f}",
            flush=True,
        )
        self.steps = []


def compare(greedy: dict[str, Any], before: dict[str, Any], after: dict[str, Any], found: str) -> str:
    """The table before and after; `found` is the label of the results that hold the answer.

    >>> result = {"tool_executed": 0.5, "result_found": None, "exact_match": 0.25, "mean_turns": 2.0}
    >>> print(compare({**result, "exact_match": 0.75}, result, {**result, "exact_match": 1.0}, "right result found"))
                          greedy, before  before  after
    tool executed                   0.50    0.50   0.50
    right result found                 -       -      -
    exact match                     0.75    0.25   1.00
    mean turns                      2.00    2.00   2.00
    """
    lines = [f"{'':<20}{'greedy, before':>16}{'before':>8}{'after':>7}"]
    for label in ("tool executed", found, "exact match", "mean turns"):
        key = "result_found" if label == found else label.replace(" ", "_")
        values = [number(result[key], 2) for result in (greedy, before, after)]
        lines.append("{:<20}{:>16}{:>8}{:>7}".format(label, *values))
    return "\n".join(lines)


def choose_task(argv: list[str]) -> tuple[list[str], str]:
    """The trainer's arguments with the recipe of the task that stands first, and what the task calls a found answer.

    Raises `ValueError` for a task that is not there.

    >>> choose_task(["--max_steps", "20"])  # the last of two counts
    (['--config', 'hf_recipes/tiny/chain-sparse.yaml', '--max_steps', '60', '--max_steps', '20'], 'right result found')
    """
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (next(iter(TASKS)), argv)
    if name not in TASKS:
        raise ValueError(f"no task is called {name!r}. Expected one of: {', '.join(TASKS)}.")
    recipe, options, found = TASKS[name]
    return [*([] if "--config" in rest else ["--config", recipe, *options]), *rest], found


def main(argv: list[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    started = time.perf_counter()
    try:
        argv, found = choose_task(argv)
        recipe = mt.parse_arguments(argv)
        if recipe[0].preflight:
            raise ValueError("--preflight trains nothing. Give it to mt_grpo_trainer.py, with the same --config.")
        here = str(Path.cwd()) + "/"  # paths below it are shown as the recipe has them
        model = recipe[2].model_name_or_path.removeprefix(here)
        output = Path(recipe[1].output_dir.removeprefix(here))
        lock = output_lock(recipe[1].output_dir)
        lock.__enter__()  # until this function ends
        print(f"1/3 evaluating {model} on {NUM_PROBLEMS} held-out problems, sampled as in training", flush=True)
        before = evaluate(model, recipe, NUM_PROBLEMS)
        greedy = evaluate(model, recipe, NUM_PROBLEMS, greedy=True)
        exact = [number(result["exact_match"], 2) for result in (before, greedy)]
        print(f"    exact match {exact[0]}; greedy {exact[1]}\n", flush=True)
        trainer = mt.build_trainer(*recipe)
    except (ValueError, OSError, ServerError) as error:
        sys.exit(f"error: {error}")

    print(f"2/3 training for {recipe[1].max_steps} steps: {recipe[1].credit_assignment}", flush=True)
    for callback in (PrinterCallback, ProgressCallback, ProgressLine, Watch):
        trainer.remove_callback(callback)
    trainer.add_callback(ReadableProgress())
    trainer.train(resume_from_checkpoint=recipe[1].resume_from_checkpoint)
    trainer.save_trained_model()

    print(f"\n3/3 evaluating {output} on the same problems", flush=True)
    after = evaluate(recipe[1].output_dir, recipe, NUM_PROBLEMS)
    print(f"\n{compare(greedy, before, after, found)}\n")
    print(f"trained model   {output}")
    print(f"view the run    .venv/bin/python scripts/view_rollouts.py {output}")
    print(f"rollouts        {output / 'rollouts.rank0.jsonl'}")
    print(f"time            {time.perf_counter() - started:.0f} s\n")
    print(f"exact match: {number(before['exact_match'], 2)} -> {number(after['exact_match'], 2)}", flush=True)


if __name__ == "__main__":
    disable_progress_bar()  # of loading and writing weights
    main()
