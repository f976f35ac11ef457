"""Make data for supervised training of the good rollouts of a run, for TRL's `SFTTrainer`.

    python scripts/export_sft.py runs/squad-search data.jsonl --min_reward 1.0
    python scripts/export_sft.py runs/squad-search data.jsonl --min exact_match_reward_func=1 --per_prompt 2

A model that seldom calls learns little by RL. Trained on what few rollouts did right, it begins further on.

A row has `input_ids`, the very ids that were read and sampled, and `assistant_masks`, 1 for each id that the policy
sampled and the loss had. `SFTTrainer` takes the rows as they are. The run needs `log_rollout_tokens: true`. A rollout
whose history was edited gives a row per record.

Left out are rollouts that failed or were cut off by a budget, and those of an evaluation. Of a prompt the best stand
first, then the latest; of equal conversations one stays.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mt_grpo.reports.rollout_log import read_rollouts

# Stop reasons: the conversation has no end of its own.
CUT_OFF = ("max_tokens", "context_length", "max_turns", "agent_timeout")

Row = dict[str, Any]


def minimum(text: str) -> tuple[str, float]:
    """`name=number` of `--min`."""
    name, equals, number = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}, expected reward_function=number")
    return name, float(number)


def chosen(rows: list[Row], min_reward: float | None, minima: dict[str, float], per_prompt: int | None) -> list[Row]:
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


def ids_of(row: Row) -> Iterator[dict[str, list[int]]]:
    """A row of training for each record of a rollout."""
    if "prompt_ids" not in row["turns"][0]:
        raise ValueError("the log has no ids. Expected a run with `log_rollout_tokens: true`.")
    for number in range(row["records"]):
        turns = [turn for turn in row["turns"] if turn["record"] == number]
        ids = list(turns[0]["prompt_ids"])
        mask = [0] * len(ids)
        for turn in turns:
            ids += turn["token_ids"] + turn["read_ids"]
            mask += turn["loss_mask"] + [0] * len(turn["read_ids"])
        if any(mask):
            yield {"input_ids": ids, "assistant_masks": mask}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the output_dir of a run, with its rollouts.rank*.jsonl")
    parser.add_argument("output", type=Path, help="the file to write, JSON lines")
    parser.add_argument("--min_reward", type=float, help="of the weighted sum of all functions")
    parser.add_argument("--min", type=minimum, action="append", default=[], help="reward_function=number; repeatable")
    parser.add_argument("--per_prompt", type=int, help="at most so many rollouts of one prompt")
    args = parser.parse_args(argv)
    try:
        rows = list(read_rollouts(args.run))
        if not rows:
            raise ValueError(f"{args.run} has no rollouts: it is no output_dir of a run with log_rollouts above 0.")
        minima = dict(args.min)
        if unknown := set(minima) - set(rows[0]["rewards"]):
            raise ValueError(f"--min {sorted(unknown)[0]}: expected one of {', '.join(rows[0]['rewards'])}.")
        kept = chosen(rows, args.min_reward, minima, args.per_prompt)
        if any(row.get("images") for row in kept):
            raise ValueError("A rollout read images, which the log has by name alone: images are not exported.")
        lines = [json.dumps(record) for row in kept for record in ids_of(row)]
        if not lines:
            raise ValueError(f"None of the {len(rows)} rollouts is as good as that. Lower --min_reward or --min.")
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    prompts = len({json.dumps(row["messages"][: row["num_prompt_messages"]]) for row in kept})
    print(f"{len(lines)} rows of {len(kept)} rollouts of {prompts} prompts, of {len(rows)}; written to {args.output}")
    if not minima and args.min_reward is None:
        print("Without --min or --min_reward rollouts with wrong answers are among them.")


if __name__ == "__main__":
    main()
