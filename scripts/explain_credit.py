"""Show what every token of one group of rollouts would be trained with: turn by turn here, token by token as a page.

    python scripts/explain_credit.py --config hf_recipes/tiny/calculator.yaml
    python scripts/explain_credit.py --config hf_recipes/tiny/calculator.yaml --row 5 --credit_assignment merged
    python scripts/explain_credit.py --config hf_recipes/tiny/calculator.yaml --seed 7 --output runs/other.html

One prompt of the training set is rolled out `num_generations` times with the recipe's model, tools, rewards and
backend, by the trainer's own step: the advantages shown are those that its loss would read. Nothing is trained and
nothing is written but the page, one file of HTML that loads nothing: the view of a group of scripts/view_rollouts.py.
Any further argument overrides the recipe, as in training. It runs in one process: `python`, not `accelerate launch`.

With `vllm_mode: server` the server gets the recipe's weights: do not take that of a run that is training.
"""

# ruff: noqa: E402
import argparse
import os
import shutil
import sys
import tempfile
import textwrap
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARSER = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
)
PARSER.add_argument("--config", required=True, help="recipe")
PARSER.add_argument("--output", default="runs/credit.html", help="the page (default: %(default)s)")
PARSER.add_argument("--row", type=int, default=0, help="row of the training set, from 0 (default: %(default)s)")
if __name__ == "__main__":  # --help is answered before what takes seconds to import
    PARSER.parse_known_args()

import view_rollouts
from evaluate import number, without_unused
from recipes import Recipe, accepted_answers, load_recipe, option
from transformers.utils.logging import disable_progress_bar
from viewer.rows import question, table_line

import mt_grpo_trainer as mt
from mt_grpo.recipe.parse import default_of
from mt_grpo.reports.rollout_log import read_rollouts
from mt_grpo.training.batch import unused_rewards

# INVARIANT: nothing of the recipe's is overwritten, and one group is one batch. `group_recipe` adds the batch sizes.
FIXED = {
    "report_to": "none", "log_rollouts": 10**6, "log_rollout_tokens": True, "log_completions": False,
    "push_to_hub": False, "save_strategy": "no", "load_best_model_at_end": False, "eval_strategy": "no",
    "gradient_accumulation_steps": 1, "refill_groups": 0,
}  # fmt: skip
SIZES = ("per_device_train_batch_size", "generation_batch_size", "steps_per_generation")


@dataclass(frozen=True)
class GroupCredit:
    """All rollouts of one prompt."""

    question: str
    settings: list[tuple[str, str]]  # (label, text): what is to be known before the rollouts
    weights: dict[str, float]  # of the reward functions, outcome functions first
    rows: list[dict[str, Any]]  # of the log of rollouts, with tokens
    notes: list[str]  # what a reader could otherwise misread


# -- Roll out one group --


def explain(config: str, row: int = 0, overrides: Iterable[str] = ()) -> GroupCredit:
    """Roll out one group as the recipe says and take apart what the trainer would train on.

    Raises:
        ValueError: what training would refuse too, a row that does not exist, several processes, and an override of
            a setting that is fixed here.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: start this with `python`, in one process.")
    with tempfile.TemporaryDirectory(prefix="explain-credit-") as folder:
        recipe = group_recipe(config, list(overrides), folder)
        trainer = mt.build_trainer(*recipe)
        rows = trainer.train_dataset
        if not 0 <= row < len(rows):
            raise ValueError(f"--row {row}: the training set has {len(rows)} rows. Expected 0 to {len(rows) - 1}.")
        inputs = [rows[row]] * trainer.num_generations
        trainer.model.train()  # the trainer asks the model whether it is training or evaluating
        try:
            trainer._generate_and_score_completions(inputs)
        finally:
            trainer.close_client()
        return collect(trainer, list(read_rollouts(folder)), row, getattr(recipe[0], "train_from_rollouts", None))


def group_recipe(config: str, overrides: list[str], output_dir: str) -> Recipe:
    """The recipe with one group per batch, all checks of training included, and `output_dir` in place of its own."""
    fixed = {**FIXED, "output_dir": output_dir}
    for flag in (a for a in overrides if a.startswith("--")):
        key = flag[2:].split("=")[0].replace("-", "_").removeprefix("no_")
        if key in fixed or key in SIZES:
            raise ValueError(f"--{key} has no effect here: one group is one batch, and only the page is written.")
    argv = ["--config", config, *overrides]
    if option(argv, "generation_batch_size") is not None:
        fixed["generation_batch_size"] = option(argv, "num_generations")
    if option(argv, "steps_per_generation") is not None:
        fixed["steps_per_generation"] = 1
    del fixed["eval_strategy"]  # `load_recipe` sets it
    fixed = [text for key, value in fixed.items() for text in (f"--{key}", str(value))]
    script_args, args, model_args = load_recipe(config, overrides + fixed)  # which adds per_device_train_batch_size
    args.max_staleness, args.refill_groups = 0, 0  # nothing is rolled out that is not looked at
    return script_args, args, model_args


def collect(trainer: mt.MTGRPOEnvTrainer, logged: list[dict], number: int, source: str | None) -> GroupCredit:
    """The group as the trainer logged it in a step, and how it came about."""
    args = trainer.args
    credit = {
        "credit_assignment": args.credit_assignment,
        "turn_advantage_coef": f"{trainer.turn_advantage_coef:g}",
        "scale_rewards": str(args.scale_rewards),
    }
    for key in ("turn_discount", "outcome_in_return", "state_baseline"):
        if getattr(args, key) != default_of(key, mt.recipe_classes()):
            credit[key] = str(getattr(args, key)).lower()  # as a recipe has it
    model = trainer.model.config._name_or_path.removeprefix(f"{Path.cwd()}/")
    sampling = {"model": model, "training row": number, "rollouts": len(logged)}
    sampling |= {"temperature": f"{args.temperature:g}", "seed": args.seed}
    if source:
        sampling = {"log": source, "group": number, "rollouts": len(logged)}
    settings = [("gold answer", " | ".join(accepted_answers(trainer.batch.rows[0].get("answer"))))]
    for label, values in (("credit", credit), ("rollouts from", sampling)):
        settings.append((label, ", ".join(f"{name} {value}" for name, value in values.items())))
    weights = list(zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True))
    turn_funcs = trainer.reward_functions.num_turn_funcs
    found = notes(logged, credit, unused_rewards(trainer.reward_func_names, [trainer.batch]))
    return GroupCredit(question(logged[0]), settings, dict(weights[turn_funcs:] + weights[:turn_funcs]), logged, found)


def trained_advantages(turn: dict[str, Any]) -> list[float]:
    """The advantages of a turn's tokens that are in the loss."""
    return [advantage for advantage, mask in zip(turn["advantages"], turn["loss_mask"], strict=True) if mask]


def notes(rows: list[dict[str, Any]], credit: dict[str, str], unused: list[str]) -> list[str]:
    """Sentences about a group of rows of the log whose numbers would otherwise be misread.

    `credit` is what the advantages were computed with, `unused` the reward functions whose numbers move no advantage.
    """
    found, turns = [], [turn for row in rows for turn in row["turns"]]
    trained = [advantage for turn in turns for advantage in trained_advantages(turn)]
    if unused:
        found.append(f"Nothing that {', '.join(unused)} gave moves an advantage with {credit['credit_assignment']}.")
    if trained and not any(trained):
        rewards = [(row["rewards"], [number for number in row["turn_rewards"] if number is not None]) for row in rows]
        why = "since the rewards are the same for all rollouts"
        if any(each != rewards[0] for each in rewards):
            why = "though the rewards differ: what is compared with each other is the same"
        found.append(f"Every advantage is 0, {why}. Nothing is learned.")
    if credit["scale_rewards"] == "batch":
        found.append("scale_rewards batch: here the batch is this group; in training it is all prompts of a batch.")
    ends = {row["stop_reason"] for row in rows if not any(turn["num_trained"] for turn in row["turns"])}
    if ends & {"max_tokens", "context_length"}:
        found.append("Truncated rollouts are out of the loss: mask_truncated_completions is set.")
    return found


# -- Text that a model wrote --


def seen(char: str) -> str:
    """A character as something that can be seen and does nothing: no control, no direction mark, no half surrogate.

    >>> [seen(c) for c in "a \\n\\t\\x1b\\u202e\\u00a0"]
    ['a', ' ', '↵', '⇥', '␛', '⟨U+202E⟩', '␣']
    """
    if char.isprintable() or char in "\n\t":
        return {"\n": "↵", "\t": "⇥"}.get(char, char)
    if ord(char) < 0x20:
        return chr(0x2400 + ord(char))  # Unicode's pictures of control characters
    return "␣" if unicodedata.category(char) == "Zs" else f"⟨U+{ord(char):04X}⟩"


def one_line(text: str, width: int | None = None) -> str:
    """Text for one line of a terminal, cut to `width` characters."""
    line = "".join(map(seen, text))
    return line if width is None or len(line) <= width else line[: max(width - 1, 0)] + "…"


def signed(advantage: float | None) -> str:
    """An advantage with its sign.

    >>> signed(1.224), signed(-0.5), signed(-0.001), signed(None)
    ('+1.22', '-0.50', '0.00', '-')
    """
    rounded = None if advantage is None else round(advantage, 2)
    return "-" if rounded is None else f"{rounded:+.2f}" if rounded else "0.00"


# -- Terminal --

BEFORE = 42  # columns before the text of a turn


def render_text(group: GroupCredit, width: int = 119) -> str:
    """The group for a terminal of `width` columns: a rollout's own lines, then one or two per turn."""

    def hanging(label: str, text: str, indent: int) -> str:
        """Text after a label, in lines of `width` columns, those after the first indented."""
        lines = textwrap.wrap(text, max(width - indent, 20)) or [""]
        return f"{label:<{indent}}" + f"\n{' ' * indent}".join(lines)

    head = [("question", group.question), *group.settings, *(("note", note) for note in group.notes)]
    lines = [hanging(label, one_line(text), 15) for label, text in head]
    lines += ["", "turn  reward  advantage  outcome    turn  text, and what the environment said"]
    for index, row in enumerate(group.rows):
        given = without_unused({name: row["rewards"].get(name) for name in group.weights})
        weights = {name: f" (weight {weight:g})" if weight != 1 else "" for name, weight in group.weights.items()}
        functions = ", ".join(f"{name}{weights[name]} {number(value, 2)}" for name, value in given.items())
        lines += ["", f"rollout {index}  {one_line(row['stop_reason'])}"]
        lines.append(hanging("      reward", one_line(f"{number(row['reward'], 2)} = {functions}"), 14))
        for k, (turn, reward) in enumerate(zip(row["turns"], row["turn_rewards"], strict=True)):
            trained = trained_advantages(turn)
            whole = sum(trained) / len(trained) if trained else None
            outcome = row.get("outcome_advantage") if trained else None
            rest = None if None in (whole, outcome) else whole - outcome
            parts = f"{signed(whole):>9}  {signed(outcome):>7}  {signed(rest):>6}"
            lines.append(f"{k:>4}  {number(reward, 2):>6}  {parts}  {one_line(turn['text'], width - BEFORE)}")
            for error, text in [*((r["error"], r["text"]) for r in turn["results"]), (None, turn["observation"])]:
                if text is not None:
                    answered = f"-> {f'{error} error: ' if error else ''}{text}"
                    lines.append(" " * BEFORE + one_line(answered, width - BEFORE))
    return "\n".join(lines)


# -- Page --


def render_html(group: GroupCredit) -> str:
    """The group side by side, every token coloured by its advantage: one page that loads nothing."""
    run = {"notes": [], "which": f"what every token of {len(group.rows)} rollouts would be trained with"}
    data = {
        "served": False, "only": True, "start": "group/0/0", "title": group.question,
        "about": group.settings, "notes": group.notes, "runs": [run],
        "rollouts": [{**table_line(r), "id": k, "attempt": 0, "row": r, "run": 0} for k, r in enumerate(group.rows)],
    }  # fmt: skip
    return view_rollouts.page(data, f"Credit of {len(group.rows)} rollouts")


# -- main --


def main(argv: list[str] | None = None) -> None:
    options, overrides = PARSER.parse_known_args(argv)
    disable_progress_bar()  # of loading weights
    try:
        group = explain(options.config, options.row, overrides)
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        Path(options.output).write_text(render_html(group), encoding="utf-8")
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: of a server, a run or a reward
        sys.exit(f"error: {error}")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show an arrow shows a question mark
    print(render_text(group, max(shutil.get_terminal_size((119, 24)).columns, 60)))
    print(f"\nevery token is in {options.output}")


if __name__ == "__main__":
    main()
