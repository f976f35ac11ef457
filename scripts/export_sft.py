"""Make data for supervised training of the good rollouts of a run, for TRL's `SFTTrainer`.

    python scripts/export_sft.py runs/squad-search data.jsonl --min_reward 1.0
    python scripts/export_sft.py runs/squad-search data.jsonl --min exact_match_reward_func=1 --per_prompt 2
    python scripts/export_sft.py runs/squad-search data.jsonl --form messages --config recipe.yaml

A model that seldom calls learns little by RL. Trained on what few rollouts did right, it begins further on.

- `--form ids` (the default) writes `input_ids` and `assistant_masks`: the very ids that were read and sampled, and 1
  for each that the policy sampled and the loss had. `SFTTrainer` takes them as they are. It needs the log of a run
  with `log_rollout_tokens: true`. A rollout whose history was edited gives a row per record.
- `--form messages` writes `messages`, and with `--config` what else the chat template gets by the recipe: `tools` (in
  the format xml the system message has them) and `chat_template_kwargs`. With `assistant_only_loss: true` `SFTTrainer`
  trains every assistant's message, those of examples too.
- `--without_examples`, with `--config`: leave the recipe's `prompt_examples` out. The model learns to do without them.

Left out are rollouts that failed or were cut off by a budget, and those of an evaluation. Of a prompt the best stand
first, then the latest; of equal conversations one stays.
"""

# ruff: noqa: E402
import argparse
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def minimum(text: str) -> tuple[str, float]:
    """`name=number` of `--min`."""
    name, equals, number = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}, expected reward_function=number")
    return name, float(number)


PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("run", help="the output_dir of a run, with its rollouts.rank*.jsonl")
PARSER.add_argument("output", type=Path, help="the file to write, JSON lines")
PARSER.add_argument("--min_reward", type=float, help="of the weighted sum of all functions")
PARSER.add_argument("--min", type=minimum, action="append", default=[], help="reward_function=number; may be repeated")
PARSER.add_argument("--per_prompt", type=int, help="at most so many rollouts of one prompt")
PARSER.add_argument("--form", choices=("ids", "messages"), default="ids")
PARSER.add_argument("--config", help="the run's recipe: its tools, and its examples")
PARSER.add_argument("--without_examples", action="store_true", help="leave the recipe's prompt_examples out")
if __name__ == "__main__":  # --help is answered before what takes seconds to import
    PARSER.parse_args()

from recipes import load_recipe
from transformers import AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.conversation.formats.hermes import HermesFormat
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.recipe.plugins import load_recipe_tools
from mt_grpo.reports.rollout_log import read_rollouts

CUT_OFF = ("max_tokens", "context_length", "max_turns")  # stop reasons: the conversation has no end of its own

Row = dict[str, Any]


def chosen(
    rows: Iterable[Row], min_reward: float | None, minima: dict[str, float], per_prompt: int | None
) -> list[Row]:
    """The rollouts to train on: of each prompt the best first, then the latest, each conversation once."""

    def is_good(row: Row) -> bool:
        whole = row["turns"] and row["error"] is None and row["stop_reason"] not in CUT_OFF
        cut = whole and row["turns"][-1].get("finish_reason") == "length" and row["stop_reason"] != "agent_done"
        values = [(row["rewards"].get(name), least) for name, least in minima.items()]
        values += [] if min_reward is None else [(row["reward"], min_reward)]
        reaches = all(value is not None and value >= least for value, least in values)
        return bool(whole and not cut and row["mode"] == "train" and reaches)

    good = list(filter(is_good, rows))
    good.sort(key=lambda row: (math.inf if row["reward"] is None else -row["reward"], -row["step"]))
    kept, seen, counts = [], set(), Counter()
    for row in good:
        whole, prompt = (json.dumps(part) for part in (row["messages"], row["messages"][: row["num_prompt_messages"]]))
        if whole not in seen and (per_prompt is None or counts[prompt] < per_prompt):
            kept.append(row)
            counts[prompt] += 1
            seen.add(whole)
    return kept


def ids_of(row: Row, prompt_ids: list[int] | None = None) -> Iterator[dict[str, list[int]]]:
    """A row of training for each record of a rollout. `prompt_ids` take the place of the first record's prompt."""
    if "prompt_ids" not in row["turns"][0]:
        raise ValueError("the log has no ids. Expected a run with `log_rollout_tokens: true`, or --form messages.")
    for number in range(row["records"]):
        turns = [turn for turn in row["turns"] if turn["record"] == number]
        before = turns[0]["prompt_ids"] if number or prompt_ids is None else prompt_ids
        ids, mask = list(before), [0] * len(before)
        for turn in turns:
            ids += turn["token_ids"] + turn["read_ids"]
            mask += turn["loss_mask"] + [0] * len(turn["read_ids"])
        if any(mask):
            yield {"input_ids": ids, "assistant_masks": mask}


class RecipeOfRun:
    """What is read of a run's recipe: its tools, and prompts without its examples."""

    def __init__(self, path: str, without_examples: bool):
        script_args, args, model_args = load_recipe(path)
        tools = load_recipe_tools(script_args, args)
        how = {"revision": model_args.model_revision, "trust_remote_code": args.trust_remote_code}
        self.tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, **how)
        self.env = mt.build_env(script_args, args, tools, self.tokenizer)
        # In the format xml the system prompt tells of the tools. A chat template would tell of them again, otherwise.
        by_template = isinstance(self.env.format_of(self.tokenizer), HermesFormat)
        self.tools = [tool_schema(name, tool) for name, tool in self.env.tools.items()] if by_template else []
        self.template = self.env.chat_template_kwargs
        if self.env.environments is not None:  # what one adds to a prompt is known only in a conversation
            raise ValueError(f"--config {path}: the tools of its environment are not in it. Leave --config out.")
        if without_examples and not self.env.prompt_examples:
            raise ValueError(f"--without_examples: {path} has no prompt_examples. Expected the run's recipe.")
        self.examples = self.env.examples_of(self.tokenizer) if without_examples else []

    def without_examples(self, row: Row) -> list[Row]:
        """The messages of a rollout's prompt without the examples. `ValueError` where it is not the recipe's."""
        messages, read = row["messages"][: row["num_prompt_messages"]], row["turns"][0].get("prompt_ids")
        start = sum(1 for _ in itertools.takewhile(lambda m: m["role"] in ("system", "developer"), messages))
        short = messages[:start] + messages[start + len(self.examples) :]
        whole = self.env.with_examples(short, self.tokenizer)
        same = [message["content"] for message in whole] == [message["content"] for message in messages]
        if not same or (read and read != self.env.prompt_ids(whole, self.tokenizer)):
            raise ValueError("--without_examples: a prompt is not what the recipe makes. Expected the run's recipe.")
        return short


def exported(rows: list[Row], form: str, recipe: RecipeOfRun | None, without_examples: bool) -> Iterator[Row]:
    """The rows of training of these rollouts."""
    for row in rows:
        if row["records"] > 1 and (form == "messages" or without_examples):
            continue  # several records are no one conversation, and each has examples of its own
        messages = recipe.without_examples(row) if without_examples else None
        if form == "ids":
            yield from ids_of(row, None if messages is None else recipe.env.prompt_ids(messages, recipe.tokenizer))
        else:
            first = row["messages"][: row["num_prompt_messages"]] if messages is None else messages
            offered = row["turns"][0].get("tools")  # by an agent's program
            found = {
                "messages": [*first, *row["messages"][row["num_prompt_messages"] :]],
                "tools": json.loads(offered) if offered else recipe and recipe.tools,
                "chat_template_kwargs": recipe and recipe.template,
            }
            yield {key: value for key, value in found.items() if value}


def main(argv: list[str] | None = None) -> None:
    args = PARSER.parse_args(argv)
    try:
        if args.without_examples and not args.config:
            raise ValueError("--without_examples needs --config, whose prompt_examples they are.")
        rows = list(read_rollouts(args.run))
        if not rows:
            raise ValueError(f"{args.run} has no rollouts: it is no output_dir of a run with log_rollouts above 0.")
        minima = dict(args.min)
        if unknown := set(minima) - set(rows[0]["rewards"]):
            raise ValueError(f"--min {sorted(unknown)[0]}: expected one of {', '.join(rows[0]['rewards'])}.")
        kept = chosen(rows, args.min_reward, minima, args.per_prompt)
        if any(row.get("images") for row in kept):
            raise ValueError("A rollout read images, which the log has by name alone: images are not exported.")
        recipe = RecipeOfRun(args.config, args.without_examples) if args.config else None
        rows_of_training = exported(kept, args.form, recipe, args.without_examples)
        lines = [json.dumps(row, ensure_ascii=False) for row in rows_of_training]
        if not lines:
            raise ValueError(f"None of the {len(rows)} rollouts is as good as that. Lower --min_reward or --min.")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    prompts = len({json.dumps(row["messages"][: row["num_prompt_messages"]]) for row in kept})
    if left_out := sum(row["records"] > 1 for row in kept) if args.form == "messages" or args.without_examples else 0:
        print(f"{left_out} rollouts of several records are left out")
    print(f"{len(lines)} rows of {len(kept)} rollouts of {prompts} prompts, of {len(rows)}; written to {args.output}")


if __name__ == "__main__":
    main()
