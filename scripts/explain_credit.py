"""Show what every token of one group of rollouts would be trained with: turn by turn here, token by token as a page.

    python scripts/explain_credit.py --config hf_recipes/tiny/calculator.yaml
    python scripts/explain_credit.py --config hf_recipes/tiny/calculator.yaml --row 5 --credit_assignment merged
    python scripts/explain_credit.py --config hf_recipes/tiny/calculator.yaml --seed 7 --output runs/other.html

One prompt of the training set is rolled out `num_generations` times with the recipe's model, tools, rewards and
backend, by the trainer's own step: the advantages shown are those that its loss would read. Nothing is trained and
nothing is written but the page, one file of HTML that loads nothing: the view of a group of scripts/view_rollouts.py.
Any further argument overrides the recipe, as in training. It runs in one process: `python`, not `accelerate launch`.

A recipe with `vllm_mode: server` needs its server, which then holds the recipe's weights: do not point this at the
server of a run that is training.
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

import torch
import view_rollouts
from evaluate import number, without_unused
from recipes import Recipe, accepted_answers, load_recipe, option
from transformers.utils.logging import disable_progress_bar
from viewer.rows import as_item, question

import mt_grpo_trainer as mt
from mt_grpo.base.errors import ServerError
from mt_grpo.images.pictures import readable
from mt_grpo.recipe.keys import default_of
from mt_grpo.recipe.parse import recipe_text
from mt_grpo.reports.rollout_log import read_rollouts
from mt_grpo.training.batch import unused_rewards

# INVARIANT: nothing of the recipe's is overwritten, and one group is one batch. `group_recipe` adds the batch sizes.
FIXED = {
    "report_to": "none", "log_rollouts": 10**6, "log_rollout_tokens": True, "log_completions": False,
    "push_to_hub": False, "save_strategy": "no", "load_best_model_at_end": False, "eval_strategy": "no",
    "gradient_accumulation_steps": 1, "refill_groups": 0,
}  # fmt: skip
SIZES = ("per_device_train_batch_size", "generation_batch_size", "steps_per_generation")


# ---------------------------------------------------------------------------------------------------------------------
# What is shown
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnCredit:
    """One model turn and what it got."""

    text: str
    num_tokens: int
    reward: float | None  # r_k, weighted; None: no turn function gave this turn a number of its own
    advantage: float | None  # mean over its trained tokens; None: it has none
    observation: str | None = None
    error: str | None = None
    outcome_part: float | None = None  # what the outcome alone gives of the advantage; the rest is the turn's


@dataclass(frozen=True)
class RolloutCredit:
    """One conversation."""

    stop_reason: str
    outcome: float | None  # R^O, weighted; None: every outcome function gave None, and nothing is trained
    turn_reward: float | None  # weighted sum of the turn rewards that were given for the whole rollout
    outcome_rewards: list[tuple[str, float | None]]  # per function, not weighted
    turn_rewards: list[tuple[str, float | None]]  # the same; those given per turn summed over turns
    turns: list[TurnCredit]


@dataclass(frozen=True)
class GroupCredit:
    """All rollouts of one prompt."""

    question: str
    answer: str
    credit: dict[str, str]  # settings that turn rewards into advantages
    sampling: dict[str, str]  # where the rollouts come from
    rollouts: list[RolloutCredit]
    notes: list[str]  # what a reader could otherwise misread
    rows: list[dict[str, Any]]  # of the log of rollouts, with tokens


# ---------------------------------------------------------------------------------------------------------------------
# Roll out one group
# ---------------------------------------------------------------------------------------------------------------------


def explain(config: str, row: int = 0, overrides: Iterable[str] = ()) -> GroupCredit:
    """Roll out one group as the recipe says and take apart what the trainer would train on.

    Raises:
        ValueError: what training would refuse too, a row that does not exist, several processes, and an override of
            a setting that is fixed here.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, expected one process: a group would be spread over several. "
            "Start this with `python`, not with `accelerate launch`."
        )
    with tempfile.TemporaryDirectory(prefix="explain-credit-") as folder:
        trainer = mt.build_trainer(*group_recipe(config, list(overrides), folder))
        inputs = group_inputs(trainer, row)
        trainer.model.train()  # the trainer asks the model whether it is training or evaluating
        trainer._generate_and_score_completions(inputs)
        return collect(trainer, inputs[0], list(read_rollouts(folder)), row)


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


def group_inputs(trainer: mt.MTGRPOEnvTrainer, row: int) -> list[dict[str, Any]]:
    """`num_generations` times one row of the training set."""
    rows = trainer.train_dataset
    if not 0 <= row < len(rows):
        raise ValueError(f"--row {row}: the training set has {len(rows)} rows. Expected 0 to {len(rows) - 1}.")
    return [rows[row] for _ in range(trainer.num_generations)]


def collect(trainer: mt.MTGRPOEnvTrainer, row: dict, logged: list[dict[str, Any]], number_of_row: int) -> GroupCredit:
    """What the trainer holds after a step, as plain values. Advantages and masks are those that it logged."""
    args = trainer.args
    credit = {
        "credit_assignment": args.credit_assignment,
        "turn_advantage_coef": f"{trainer.turn_advantage_coef:g}",
        "scale_rewards": str(trainer.args.scale_rewards),
    }
    for key in ("turn_discount", "outcome_in_return", "state_baseline"):
        if getattr(args, key) != default_of(key, mt.recipe_classes()):
            credit[key] = recipe_text(getattr(args, key))
    sampling = {
        "model": trainer.model.config._name_or_path.removeprefix(f"{Path.cwd()}/"),
        "training row": str(number_of_row),
        "rollouts": str(len(logged)),
        "temperature": f"{args.temperature:g}",
        "seed": str(args.seed),
    }
    rollouts = [collect_rollout(trainer, logged[i], i) for i in range(len(logged))]
    table = trainer.batch.rewards
    numbers = torch.cat([table.outcome[:, None], table.rollout_turn[:, None], table.turn], 1)  # (G, 2 + K)
    differ = not torch.allclose(numbers, numbers[:1].expand_as(numbers), equal_nan=True)
    unused = unused_rewards(trainer.reward_func_names, [trainer.batch])
    answer = " | ".join(accepted_answers(row.get("answer")))
    asked = question(logged[0])
    return GroupCredit(asked, answer, credit, sampling, rollouts, notes(logged, credit, unused, differ), logged)


def collect_rollout(trainer: mt.MTGRPOEnvTrainer, row: dict[str, Any], i: int) -> RolloutCredit:
    """Rollout `i` of the batch, which is this row of the log."""
    rollout, rewards = trainer.batch.rollouts[i], trainer.batch.rewards
    turns = []
    for k, (turn, logged) in enumerate(zip(rollout.turns, row["turns"], strict=True)):
        trained = trained_advantages(logged)
        turns.append(
            TurnCredit(
                text=turn.text,
                num_tokens=len(turn.token_ids),
                reward=value(rewards.turn[i, k]),
                advantage=sum(trained) / len(trained) if trained else None,
                outcome_part=row.get("outcome_advantage") if trained else None,
                observation=None if turn.observation is None else readable(turn.observation),
                error=turn.error,
            )
        )
    functions = [
        (name if weight == 1 else f"{name} (weight {weight:g})", value(reward))
        for name, weight, reward in zip(
            trainer.reward_func_names, trainer.reward_weights.tolist(), trainer.batch.logged[i], strict=True
        )
    ]
    return RolloutCredit(
        stop_reason=str(rollout.stop_reason),
        outcome=value(rewards.outcome[i]),
        turn_reward=value(rewards.rollout_turn[i]),
        outcome_rewards=functions[trainer.reward_functions.num_turn_funcs :],
        turn_rewards=functions[: trainer.reward_functions.num_turn_funcs],
        turns=turns,
    )


def trained_advantages(turn: dict[str, Any]) -> list[float]:
    """The advantages of a turn's tokens that are in the loss.

    >>> trained_advantages({"advantages": [0.5, 0.5, 0.5], "loss_mask": [1, 1, 0]})
    [0.5, 0.5]
    """
    return [advantage for advantage, mask in zip(turn["advantages"], turn["loss_mask"], strict=True) if mask]


def value(number: torch.Tensor) -> float | None:
    """An entry of the reward table; None where a reward did not apply."""
    return None if number.isnan() else number.item()


def notes(rows: list[dict[str, Any]], credit: dict[str, str], unused: list[str], differ: bool) -> list[str]:
    """Sentences about a group whose numbers would otherwise be misread.

    Args:
        rows: Of the log of rollouts.
        credit: What the advantages were computed with.
        unused: The reward functions whose numbers move no advantage.
        differ: Whether the rewards of the rollouts differ.
    """
    found, turns = [], [turn for row in rows for turn in row["turns"]]
    trained = [advantage for turn in turns for advantage in trained_advantages(turn)]
    if unused:
        found.append(f"Nothing that {', '.join(unused)} gave moves an advantage with {credit['credit_assignment']}.")
    if trained and not any(trained):
        why = (
            "though the rewards differ: what is compared with each other is the same"
            if differ
            else ("since the rewards are the same for all rollouts")
        )
        found.append(f"Every advantage is 0, {why}. Nothing is learned.")
    if credit["scale_rewards"] == "batch":
        found.append("scale_rewards batch: here the batch is this group; in training it is all prompts of a batch.")
    ends = {row["stop_reason"] for row in rows if not any(turn["num_trained"] for turn in row["turns"])}
    if ends & {"max_tokens", "context_length"}:
        found.append("Truncated rollouts are out of the loss: mask_truncated_completions is set.")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Text that a model wrote
# ---------------------------------------------------------------------------------------------------------------------


def seen(char: str) -> str:
    """A character as something that can be seen and does nothing: no control, no direction mark, no half surrogate.

    >>> [seen(c) for c in "a \\n\\t\\x1b\\u202e\\u00a0"]
    ['a', ' ', '↵', '⇥', '␛', '⟨U+202E⟩', '␣']
    """
    if char.isprintable():
        return char
    if char in "\n\t":
        return {"\n": "↵", "\t": "⇥"}[char]
    if ord(char) < 0x20:
        return chr(0x2400 + ord(char))  # Unicode's pictures of control characters
    return "␣" if unicodedata.category(char) == "Zs" else f"⟨U+{ord(char):04X}⟩"


def one_line(text: str, width: int | None = None) -> str:
    """Text for one line of a terminal, cut to `width` characters.

    >>> one_line("two\\nlines", 7)
    'two↵li…'
    """
    line = "".join(map(seen, text))
    return line if width is None or len(line) <= width else line[: max(width - 1, 0)] + "…"


def signed(advantage: float | None, digits: int = 2) -> str:
    """An advantage with its sign.

    >>> signed(1.224), signed(-0.5), signed(-0.001), signed(None)
    ('+1.22', '-0.50', '0.00', '-')
    """
    if advantage is None:
        return "-"
    rounded = round(advantage, digits)
    return f"{rounded:+.{digits}f}" if rounded else f"{0:.{digits}f}"


def settings(group: GroupCredit) -> list[tuple[str, str]]:
    """What is to be known before the rollouts, as (label, text)."""
    credit, sampling = (", ".join(f"{k} {v}" for k, v in e.items()) for e in (group.credit, group.sampling))
    return [("gold answer", group.answer), ("credit", credit), ("rollouts from", sampling)]


def reward_lines(rollout: RolloutCredit) -> list[tuple[str, str]]:
    """A rollout's rewards: the outcome's weighted sum, the functions, and to what the turn functions gave theirs.

    >>> turns = [TurnCredit("", 1, 0.4, 0.0), TurnCredit("", 1, None, 0.0)]
    >>> reward_lines(RolloutCredit("answered", 1.1, 0.2, [("exact", 1.1)], [("ran", 0.2), ("step", 0.4)], turns))
    [('outcome', '1.10 = exact 1.10'), ('turn rewards', 'ran 0.20, step 0.40; 0.20 to the rollout, 0.40 to its turns')]
    """
    outcome, turn = (
        ", ".join(f"{name} {number(reward, 2)}" for name, reward in functions)
        for functions in (rollout.outcome_rewards, without_unused(dict(rollout.turn_rewards)).items())
    )
    lines = [("outcome", f"{number(rollout.outcome, 2)} = {outcome}" if outcome else number(rollout.outcome, 2))]
    per_turn = [turn.reward for turn in rollout.turns if turn.reward is not None]
    shares = [f"{rollout.turn_reward:.2f} to the rollout"] if rollout.turn_reward is not None else []
    shares += [f"{sum(per_turn):.2f} to its turns"] if per_turn else []
    return lines + ([("turn rewards", f"{turn}; {', '.join(shares) or 'none applies'}")] if turn else [])


# ---------------------------------------------------------------------------------------------------------------------
# Terminal
# ---------------------------------------------------------------------------------------------------------------------

BEFORE = 42  # columns before the text of a turn
INK = {"positive": "1;38;5;32", "negative": "1;38;5;166", "dim": "2", "bold": "1"}


def render_text(group: GroupCredit, width: int = 119, colour: bool = False) -> str:
    """The group for a terminal of `width` columns."""
    head = [("question", group.question), *settings(group), *(("note", note) for note in group.notes)]
    lines = [f"{label:<15}" + hanging(one_line(text), width, 15) for label, text in head]
    titles = "turn  reward  advantage  outcome    turn  text, and what the environment said"
    lines += ["", ink(titles, "dim", colour)]
    for index, rollout in enumerate(group.rollouts):
        lines += ["", *rollout_lines(index, rollout, width, colour)]
    return "\n".join(lines)


def rollout_lines(index: int, rollout: RolloutCredit, width: int, colour: bool) -> list[str]:
    """A rollout's own lines, then one or two per turn."""
    lines = [ink(f"rollout {index}", "bold", colour) + f"  {one_line(rollout.stop_reason)}"]
    for label, text in reward_lines(rollout):
        lines.append(f"      {label:<13}" + hanging(one_line(text), width, 19))
    for k, turn in enumerate(rollout.turns):
        kind = "dim" if not turn.advantage else "positive" if turn.advantage > 0 else "negative"
        advantage = ink(f"{signed(turn.advantage):>9}", kind, colour)
        rest = None if None in (turn.advantage, turn.outcome_part) else turn.advantage - turn.outcome_part
        parts = f"{signed(turn.outcome_part):>7}  {signed(rest):>6}"
        lines.append(
            f"{k:>4}  {number(turn.reward, 2):>6}  {advantage}  {parts}  {one_line(turn.text, width - BEFORE)}"
        )
        if turn.observation is not None or turn.error is not None:
            label = f"{turn.error} error: " if turn.error else ""
            answered = one_line(f"-> {label}{turn.observation or 'no room for the observation'}", width - BEFORE)
            lines.append(" " * BEFORE + ink(answered, "dim", colour))
    return lines


def hanging(text: str, width: int, indent: int) -> str:
    """Text in lines of `width` columns, those after the first indented."""
    return f"\n{' ' * indent}".join(textwrap.wrap(text, max(width - indent, 20)) or [""])


def ink(text: str, kind: str, colour: bool) -> str:
    return f"\x1b[{INK[kind]}m{text}\x1b[0m" if colour else text


# ---------------------------------------------------------------------------------------------------------------------
# Page
# ---------------------------------------------------------------------------------------------------------------------


def render_html(group: GroupCredit) -> str:
    """The group side by side, every token coloured by its advantage: one page that loads nothing."""
    run = {
        "name": "group", "count": len(group.rows), "last": 0, "metrics": 0, "steps": [1, 1], "notes": [], "modes": [],
        "stops": [], "tools": [], "errors": [], "rewards": [],
        "which": f"what every token of {len(group.rows)} rollouts would be trained with",
    }  # fmt: skip
    data = {
        "served": False, "only": True, "start": "group/0/0", "title": group.question,
        "about": settings(group), "notes": group.notes, "runs": [run], "panels": {"panels": [], "note": None},
        "rollouts": [{**as_item(row, number), "run": 0} for number, row in enumerate(group.rows)],
    }  # fmt: skip
    return view_rollouts.page(data, f"Credit of {len(group.rows)} rollouts")


# ---------------------------------------------------------------------------------------------------------------------
# main
# ---------------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    options, overrides = PARSER.parse_known_args(argv)
    disable_progress_bar()  # of loading weights
    try:
        group = explain(options.config, options.row, overrides)
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        Path(options.output).write_text(render_html(group), encoding="utf-8")
    except (ValueError, OSError, ServerError) as error:
        sys.exit(f"error: {error}")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show an arrow shows a question mark
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(render_text(group, max(shutil.get_terminal_size((119, 24)).columns, 60), colour))
    print(f"\nevery token is in {options.output}")


if __name__ == "__main__":
    main()
