"""Show what every token of one group of rollouts would be trained with: turn by turn here, token by token as a page.

    python scripts/explain_credit.py --config hf_recipes/tiny/calculator.yaml
    python scripts/explain_credit.py --config hf_recipes/tiny/calculator.yaml --row 5 --credit_assignment merged
    python scripts/explain_credit.py --config hf_recipes/tiny/calculator.yaml --seed 7 --output runs/other.html

One prompt of the training set is rolled out `num_generations` times with the recipe's model, tools, rewards and
backend, by the trainer's own step: the advantages shown are those that its loss would read. Nothing is trained and
nothing is written but the page, one file of HTML without scripts or links. Any further argument overrides the recipe,
as in training. It runs in one process: `python`, not `accelerate launch`.

A recipe with `vllm_mode: server` needs its server, which then holds the recipe's weights: do not point this at the
server of a run that is training.
"""

import argparse
import html
import itertools
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

import torch
from evaluate import Recipe, load_recipe, number, option
from transformers.utils.logging import disable_progress_bar

import mt_grpo_trainer as mt
from mt_grpo.rollout import Rollout
from mt_grpo.server_errors import ServerError

# INVARIANT: nothing of the recipe's is overwritten, and one group is one batch. `group_recipe` adds the batch sizes.
FIXED = {
    "report_to": "none", "log_rollouts": 0, "log_completions": False, "push_to_hub": False, "save_strategy": "no",
    "load_best_model_at_end": False, "eval_strategy": "no", "gradient_accumulation_steps": 1,
}  # fmt: skip
SIZES = ("per_device_train_batch_size", "generation_batch_size", "steps_per_generation")
ENVIRONMENT = -1  # in place of a turn's number, as in `Rollout.turn_ids`


# ---------------------------------------------------------------------------------------------------------------------
# What is shown
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Token:
    """One token of a completion, with what the loss does with it."""

    token_id: int
    text: str  # decoded alone: part of a character is U+FFFD
    turn: int  # which turn sampled it; -1: the environment
    advantage: float
    trained: bool  # False: out of the loss
    logprob: float | None = None  # as sampled; None: the backend does not tell
    special: bool = False


@dataclass(frozen=True)
class TurnCredit:
    """One model turn and what it got."""

    text: str
    num_tokens: int
    reward: float | None  # r_k, weighted; None: no turn function gave this turn a number of its own
    advantage: float | None  # mean over its trained tokens; None: it has none
    observation: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class RolloutCredit:
    """One conversation. `tokens` is the whole completion, in order."""

    stop_reason: str
    outcome: float | None  # R^O, weighted; None: every outcome function gave None, and nothing is trained
    turn_reward: float | None  # weighted sum of the turn rewards that were given for the whole rollout
    outcome_rewards: list[tuple[str, float | None]]  # per function, not weighted
    turn_rewards: list[tuple[str, float | None]]  # the same; those given per turn summed over turns
    turns: list[TurnCredit]
    tokens: list[Token]


@dataclass(frozen=True)
class GroupCredit:
    """All rollouts of one prompt."""

    question: str
    answer: str
    credit: dict[str, str]  # settings that turn rewards into advantages
    sampling: dict[str, str]  # where the rollouts come from
    rollouts: list[RolloutCredit]
    notes: list[str]  # what a reader could otherwise misread

    @property
    def scale(self) -> float:
        """The largest absolute advantage of a trained token, the end of the colour scale; 0 without any signal."""
        return max((abs(t.advantage) for r in self.rollouts for t in r.tokens if t.trained), default=0.0)


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
        output = trainer._generate_and_score_completions(inputs)
        return collect(trainer, inputs[0], output, row)


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
    fixed = [text for key, value in fixed.items() for text in (f"--{key}", str(value))]
    script_args, args, model_args = load_recipe(config, overrides + fixed)  # which adds per_device_train_batch_size
    script_args.eval_dataset_size = None  # has no effect, and is refused, without an eval_strategy
    return script_args, args, model_args


def group_inputs(trainer: mt.MTGRPOEnvTrainer, row: int) -> list[dict[str, Any]]:
    """`num_generations` times one row of the training set."""
    rows = trainer.train_dataset
    if not 0 <= row < len(rows):
        raise ValueError(f"--row {row}: the training set has {len(rows)} rows. Expected 0 to {len(rows) - 1}.")
    return [rows[row] for _ in range(trainer.num_generations)]


def collect(trainer: mt.MTGRPOEnvTrainer, row: dict, output: dict[str, Any], number_of_row: int) -> GroupCredit:
    """What the trainer holds after a step, as plain values. Advantages and masks are those of `output`."""
    args = trainer.args
    credit = {
        "credit_assignment": args.credit_assignment, "turn_advantage_coef": f"{trainer.turn_advantage_coef:g}",
        "scale_rewards": str(trainer.scale_rewards),
    }  # fmt: skip
    if args.turn_discount != 1.0:
        credit["turn_discount"] = f"{args.turn_discount:g}"
    sampling = {
        "model": trainer.model.config._name_or_path, "training row": str(number_of_row),
        "rollouts": str(len(trainer._rollouts)), "temperature": f"{args.temperature:g}", "seed": str(args.seed),
    }  # fmt: skip
    rollouts = [collect_rollout(trainer, output, i) for i in range(len(trainer._rollouts))]
    answer = row.get("answer", "")
    answer = " | ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
    return GroupCredit(question(row["prompt"]), answer, credit, sampling, rollouts, notes(rollouts, credit))


def collect_rollout(trainer: mt.MTGRPOEnvTrainer, output: dict[str, Any], i: int) -> RolloutCredit:
    """Rollout `i` of the batch."""
    rollout, rewards = trainer._rollouts[i], trainer._reward_table
    tokens = collect_tokens(rollout, output, i, trainer.processing_class)
    turns = []
    for k, turn in enumerate(rollout.turns):
        trained = [t.advantage for t in tokens if t.turn == k and t.trained]
        turns.append(
            TurnCredit(
                text=turn.text,
                num_tokens=len(turn.token_ids),
                reward=value(rewards.turn[i, k]),
                advantage=sum(trained) / len(trained) if trained else None,
                observation=turn.observation,
                error=turn.error,
            )
        )
    functions = [
        (name if weight == 1 else f"{name} (weight {weight:g})", value(reward))
        for name, weight, reward in zip(
            trainer.reward_func_names, trainer.reward_weights.tolist(), trainer._logged_rewards[i], strict=True
        )
    ]
    return RolloutCredit(
        stop_reason=str(rollout.stop_reason),
        outcome=value(rewards.outcome[i]),
        turn_reward=value(rewards.rollout_turn[i]),
        outcome_rewards=functions[trainer.num_turn_funcs :],
        turn_rewards=functions[: trainer.num_turn_funcs],
        turns=turns,
        tokens=tokens,
    )


def collect_tokens(rollout: Rollout, output: dict[str, Any], i: int, tokenizer: Any) -> list[Token]:
    """Row `i` of the trainer's tensors (B, C), without padding."""
    real = output["completion_mask"][i].bool()
    ids = output["completion_ids"][i][real].tolist()
    advantages = output["advantages"][i][real].tolist()
    trained = output["tool_mask"][i][real].bool().tolist()
    logprobs = rollout.logprobs or [None] * len(ids)
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(token for token in added if added[token].special)}
    return [
        Token(token, token_text(tokenizer, token), turn, advantage, in_loss,
              None if turn == ENVIRONMENT or logprob is None or logprob != logprob else logprob, token in special)
        for token, turn, advantage, in_loss, logprob in zip(
            ids, rollout.turn_ids, advantages, trained, logprobs, strict=True
        )
    ]  # fmt: skip


def token_text(tokenizer: Any, token_id: int) -> str:
    """The text of one token alone, with the space that some tokenizers drop at the start of a text."""
    text = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    piece = tokenizer.convert_ids_to_tokens(token_id) or ""
    return f" {text}" if piece.startswith("\u2581") and not text.startswith((" ", "\u2581")) else text


def value(number: torch.Tensor) -> float | None:
    """An entry of the reward table; None where a reward did not apply."""
    return None if number.isnan() else number.item()


def question(messages: list[dict[str, Any]]) -> str:
    """The last user message of a prompt.

    >>> question([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Well,"}])
    '2+2?'
    """
    asked = [m["content"] for m in messages if m["role"] == "user"] or [messages[-1]["content"]]
    return str(asked[-1])


def notes(rollouts: list[RolloutCredit], credit: dict[str, str]) -> list[str]:
    """Sentences about a group whose numbers would otherwise be misread."""
    found = []
    trained = [token.advantage for rollout in rollouts for token in rollout.tokens if token.trained]
    if trained and not any(trained):
        found.append("Every advantage is 0: these rewards tell the rollouts apart in nothing, so nothing is learned.")
    if credit["scale_rewards"] == "batch":
        found.append("scale_rewards batch: here the batch is this group; in training it is all prompts of a batch.")
    if any(t.turn != ENVIRONMENT and not t.trained for r in rollouts for t in r.tokens):
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


def visible(text: str) -> str:
    """A token's text with its white space made visible; a newline also breaks the line.

    >>> visible(" the"), visible("  "), visible("\\n"), visible("")
    (' the', '··', '↵\\n', '∅')
    """
    if text and not text.strip(" "):
        return "·" * len(text)
    return "".join("↵\n" if char == "\n" else seen(char) for char in text) or "∅"


def escaped(text: str) -> str:
    """INVARIANT: the only way of foreign text into the page.

    >>> escaped("<b>\\n'1' & \\x00")
    '&lt;b&gt;\\n&#x27;1&#x27; &amp; ␀'
    """
    return html.escape("".join(char if char == "\n" else seen(char) for char in text))


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
    >>> reward_lines(RolloutCredit("answered", 1.1, 0.2, [("exact", 1.1)], [("ran", 0.2), ("step", 0.4)], turns, []))
    [('outcome', '1.10 = exact 1.10'), ('turn rewards', 'ran 0.20, step 0.40; 0.20 to the rollout, 0.40 to its turns')]
    """
    outcome, turn = (
        ", ".join(f"{name} {number(reward, 2)}" for name, reward in functions)
        for functions in (rollout.outcome_rewards, rollout.turn_rewards)
    )
    lines = [("outcome", f"{number(rollout.outcome, 2)} = {outcome}" if outcome else number(rollout.outcome, 2))]
    per_turn = [turn.reward for turn in rollout.turns if turn.reward is not None]
    shares = [f"{rollout.turn_reward:.2f} to the rollout"] if rollout.turn_reward is not None else []
    shares += [f"{sum(per_turn):.2f} to its turns"] if per_turn else []
    return lines + ([("turn rewards", f"{turn}; {', '.join(shares) or 'none applies'}")] if turn else [])


# ---------------------------------------------------------------------------------------------------------------------
# Terminal
# ---------------------------------------------------------------------------------------------------------------------

INK = {"positive": "1;38;5;32", "negative": "1;38;5;166", "dim": "2", "bold": "1"}


def render_text(group: GroupCredit, width: int = 119, colour: bool = False) -> str:
    """The group for a terminal of `width` columns."""
    head = [("question", group.question), *settings(group), *(("note", note) for note in group.notes)]
    lines = [f"{label:<15}" + hanging(one_line(text), width, 15) for label, text in head]
    lines += ["", ink("turn  reward  advantage  text, and what the environment answered", "dim", colour)]
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
        lines.append(f"{k:>4}  {number(turn.reward, 2):>6}  {advantage}  {one_line(turn.text, width - 25)}")
        if turn.observation is not None or turn.error is not None:
            label = f"{turn.error} error: " if turn.error else ""
            answered = one_line(f"-> {label}{turn.observation or 'no room for the observation'}", width - 25)
            lines.append(" " * 25 + ink(answered, "dim", colour))
    return lines


def hanging(text: str, width: int, indent: int) -> str:
    """Text in lines of `width` columns, those after the first indented."""
    return f"\n{' ' * indent}".join(textwrap.wrap(text, max(width - indent, 20)) or [""])


def ink(text: str, kind: str, colour: bool) -> str:
    return f"\x1b[{INK[kind]}m{text}\x1b[0m" if colour else text


# ---------------------------------------------------------------------------------------------------------------------
# Page
# ---------------------------------------------------------------------------------------------------------------------

# Blue and vermilion stay apart for all common kinds of colour blindness; both carry black text at more than 6 to 1.
POSITIVE, NEGATIVE = (69, 150, 209), (232, 116, 59)


def colour_of(advantage: float, scale: float) -> str:
    """White at 0, blue at `scale`, vermilion at `-scale`, linear between; white if `scale` is 0.

    >>> colour_of(2.0, 2.0), colour_of(-2.0, 2.0), colour_of(0.0, 2.0), colour_of(0.0, 0.0)
    ('#4596d1', '#e8743b', '#ffffff', '#ffffff')
    """
    share = min(abs(advantage) / scale, 1.0) if scale else 0.0
    end = POSITIVE if advantage > 0 else NEGATIVE
    return "#" + "".join(f"{round(255 + share * (channel - 255)):02x}" for channel in end)


STYLE = """
:root { color-scheme: light dark; --ground: #f6f6f4; --card: #fff; --ink: #1c1c1c; --soft: #5c5c5c; --line: #dcdcd8; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #17181a; --card: #202225; --ink: #e8e8e6; --soft: #a5a5a2; --line: #3a3c40; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 72rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0 0 .3rem; font-size: 1.35rem; font-weight: 600; white-space: pre-wrap; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 1.05rem; font-weight: 600; }
p { margin: .3rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: .8rem 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.note { padding: .5rem .8rem; border-left: 3px solid #e8743b; background: var(--card); }
.legend { display: flex; flex-wrap: wrap; gap: .6rem 2rem; align-items: center; margin: 1.2rem 0; }
.scale { display: grid; grid-template-columns: 1fr auto 1fr; width: 20rem; font-variant-numeric: tabular-nums; }
.scale i { grid-column: 1 / -1; height: 1rem; border: 1px solid var(--line); border-radius: 2px; }
.scale b { font-weight: 400; font-size: .85rem; }
.scale b:last-child { text-align: right; }
article { margin: 1.4rem 0; padding: 1.2rem 1.4rem 1.4rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; }
article header { display: flex; gap: .8rem; align-items: baseline; }
.stop { padding: 0 .55rem; border: 1px solid var(--line); border-radius: 1rem; color: var(--soft); font-size: .85rem; }
table { border-collapse: collapse; margin: .8rem 0 1rem; font-variant-numeric: tabular-nums; }
th { font-weight: 400; color: var(--soft); font-size: .85rem; }
th, td { padding: .2rem 1.6rem .2rem 0; text-align: right; }
td { border-top: 1px solid var(--line); }
th:last-child, td:last-child { padding-right: 0; text-align: left; }
.chip { display: inline-block; min-width: 4.2rem; padding: 0 .45rem; border-radius: 2px; color: #111; }
.tokens { padding: .7rem .9rem; background: #fff; color: #111; border: 1px solid var(--line); border-radius: 4px; }
.part { display: grid; grid-template-columns: 6.5rem 1fr; gap: .8rem; padding: .25rem 0; }
.part > small { color: #5c5c5c; font-size: .8rem; line-height: 1.75rem; }
.part > div { font: 13px/1.75rem ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; min-width: 0; }
.t { padding: .15em 0; box-shadow: inset -1px 0 rgba(0, 0, 0, .13); unicode-bidi: isolate; color: #111; }
.t:hover { outline: 2px solid #111; }
.out { background: #f1f1f1; color: #696969; text-decoration: line-through #9a9a9a; }
.special { font-style: italic; font-weight: 600; }
@media (max-width: 40rem) {
  body { padding: 1.2rem .8rem; } article { padding: 1rem; } th, td { padding-right: .7rem; }
  dl, .part { grid-template-columns: 1fr; gap: 0; } .scale { width: 100%; }
}
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; \
form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Credit of {count} rollouts</title>
<style>{style}</style>
</head>
<body>
<header>
<p class="soft">What every token of {count} rollouts would be trained with</p>
<h1>{question}</h1>
{settings}
{notes}
{legend}
</header>
<main>
{cards}
</main>
</body>
</html>
"""


def render_html(group: GroupCredit) -> str:
    """The group as one page that loads nothing and runs nothing."""
    return PAGE.format(
        count=len(group.rollouts),
        style=STYLE,
        question=escaped(group.question),
        settings=definitions(settings(group)),
        notes="\n".join(f'<p class="note">{escaped(note)}</p>' for note in group.notes),
        legend=legend(group.scale),
        cards="\n".join(card(i, rollout, group.scale) for i, rollout in enumerate(group.rollouts)),
    )


def definitions(entries: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escaped(k)}</dt><dd>{escaped(v)}</dd>" for k, v in entries) + "</dl>"


def legend(scale: float) -> str:
    """The colour scale, its ends as numbers, and the two marks of a token."""
    colours = ", ".join(colour_of(share, 1.0) for share in (-1.0, 0.0, 1.0))
    ends = "".join(f"<b>{signed(end)}</b>" for end in (-scale, 0.0, scale))
    return (
        f'<div class="legend"><div class="scale"><i style="background: linear-gradient(90deg, {colours})"></i>{ends}'
        '</div><p class="soft">advantage of a token; hold the pointer over one for its numbers<br>grey and struck: '
        "not sampled by the policy, or masked, and so out of the loss<br>bold italics: a special token</p></div>"
    )


def card(index: int, rollout: RolloutCredit, scale: float) -> str:
    """One rollout: its rewards, its turns, its tokens."""
    rows = "".join(turn_row(k, turn, scale) for k, turn in enumerate(rollout.turns))
    owners = itertools.groupby(rollout.tokens, key=lambda token: token.turn)
    parts = "".join(part(turn, tokens, scale) for turn, tokens in owners)
    return (
        f'<article><header><h2>Rollout {index}</h2><span class="stop">{escaped(rollout.stop_reason)}</span></header>'
        f"{definitions(reward_lines(rollout))}<table><tr><th>turn</th><th>tokens</th><th>turn reward</th>"
        f'<th>advantage</th><th>error</th></tr>{rows}</table><div class="tokens">{parts}</div></article>'
    )


def turn_row(k: int, turn: TurnCredit, scale: float) -> str:
    background = "#ffffff" if turn.advantage is None else colour_of(turn.advantage, scale)
    return (
        f"<tr><td>{k}</td><td>{turn.num_tokens}</td><td>{number(turn.reward, 2)}</td>"
        f'<td><span class="chip" style="background: {background}">{signed(turn.advantage)}</span></td>'
        f"<td>{escaped(turn.error or '')}</td></tr>"
    )


def part(turn: int, tokens: Iterable[Token], scale: float) -> str:
    """The tokens of one turn, or of one answer of the environment."""
    label = "environment" if turn == ENVIRONMENT else f"turn {turn}"
    spans = "".join(token_span(token, scale) for token in tokens)
    return f'<div class="part"><small>{label}</small><div>{spans}</div></div>'


def token_span(token: Token, scale: float) -> str:
    """INVARIANT: one span of class `t` per token, and of class `out` if and only if it is out of the loss."""
    classes = "t" + " out" * (not token.trained) + " special" * token.special
    title = f"token {token.token_id}, " + ("environment" if token.turn == ENVIRONMENT else f"turn {token.turn}")
    title += f", advantage {signed(token.advantage, 4)}" if token.trained else ", out of the loss"
    title += "" if token.logprob is None else f", logprob {token.logprob:.4f}"
    style = f' style="background: {colour_of(token.advantage, scale)}"' if token.trained else ""
    return f'<span class="{classes}"{style} title="{title}">{escaped(visible(token.text))}</span>'


# ---------------------------------------------------------------------------------------------------------------------
# main
# ---------------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="recipe")
    parser.add_argument("--output", default="runs/credit.html", help="the page (default: %(default)s)")
    parser.add_argument("--row", type=int, default=0, help="row of the training set, from 0 (default: %(default)s)")
    options, overrides = parser.parse_known_args(argv)
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
