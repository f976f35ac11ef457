"""Build the bundled models of the chain task: Qwen3 models of 0.4M parameters that call a calculator step by step.

    PYTHONPATH=. python scripts/build/chain.py --output_dir hf_recipes/tiny

First the model imitates conversations without mistakes; then two copies of it go on with mistakes mixed in, so that
they know the right behaviour and sample it only some of the time: `chain-model` answers about one problem in nine
right, `chain-sparse-model` fewer than one in fifty. About three minutes on 2 cores.
"""

import argparse
import copy
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from build.tiny import CHAT_TEMPLATE, build_model, change_one, encode, next_turns, print_table, warm_start
from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.xml import make_format, parse_turn, result_message
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.recipe.data import make_chain
from mt_grpo.recipe.plugins import load_tools

SYSTEM = "Use the calculator for each step, then answer."
MAX_CALLS = 6
(CALCULATOR,) = load_tools(str(Path(__file__).parents[2] / "tools/step_calculator.py"))

# Shares of what a turn does while operations are left, and once none is. FORK: change what the policy gets wrong.
STEP_MISTAKES = ("other operation", "wrong digit", "broken JSON", "wrong tool", "early answer", "no tag")
ANSWER_MISTAKES = ("wrong digit", "further call", "no tag")
MODELS = {  # name -> (share of good steps, share of good answers)
    "chain-model": (0.72, 0.65),
    "chain-sparse-model": (0.45, 0.45),
}


def call(expression: str, name: str = "calculator") -> str:
    return f"<tool>{json.dumps({'name': name, 'args': {'expression': expression}})}</tool>"


def make_conversation(row: dict, good_step: float, good_answer: float, rng: random.Random) -> list[dict[str, str]]:
    """One conversation; after a wrong step it goes on from where that step led, as the policy has to."""
    value, *rest = re.findall(r"\d+", row["question"])[:1] + re.findall(r"[-+*] \d", row["question"])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    at = 0  # the next operation
    for _ in range(MAX_CALLS):
        if at < len(rest):
            kind = "good" if rng.random() < good_step else rng.choice(STEP_MISTAKES)
            chosen = at
            if kind == "other operation":
                chosen = rng.choice([i for i in range(len(rest)) if i != at])
            number = change_one(value, "0123456789", rng) if kind == "wrong digit" else value
            text = call(
                f"{number} {rest[chosen]}", rng.choice(("calc", "math")) if kind == "wrong tool" else "calculator"
            )
            if kind == "broken JSON":
                text = rng.choice((text.replace('"}}', '"}'), text.replace('"}}', "}}"), text.replace(": {", " {")))
            elif kind == "early answer":
                text = f"<answer>{value}</answer>"
            elif kind == "no tag":
                text = f"{value} {rest[at]}"
        else:
            kind = "good" if rng.random() < good_answer else rng.choice(ANSWER_MISTAKES)
            chosen = at - 1
            text = f"<answer>{change_one(value, '0123456789', rng) if kind == 'wrong digit' else value}</answer>"
            if kind == "further call":
                text = call(f"{value} {rest[-1]}")
            elif kind == "no tag":
                text = value
        messages.append({"role": "assistant", "content": text})
        parsed, _ = parse_turn(text)
        if parsed is None:
            break
        if mistake := check_call(parsed, {"calculator": CALCULATOR}):
            messages.append({"role": "user", "content": result_message(f"Error: {mistake}"[:60])})
        else:
            value, at = CALCULATOR(**parsed.arguments), chosen + 1
            messages.append({"role": "user", "content": result_message(value)})
            if value.startswith("-"):  # not seen in the right chains; what follows would be noise
                break
    return messages


def drawing(
    rows: list[dict], good_step: float, good_answer: float, rng: random.Random, tool_format: ChatFormat
) -> Callable[[], tuple[list[int], list[int]]]:
    """Ids and labels of conversations about random rows, one per call."""
    return lambda: encode(make_conversation(rng.choice(rows), good_step, good_answer, rng), tool_format)


def build_tokenizer(conversations: list[list[dict[str, str]]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens. Digits stand alone; merges cross words, so that a call is about ten tokens."""
    texts = [piece for c in conversations for m in c for piece in (f"{m['role']}\n", m["content"])]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], model_max_length=1024
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def measure(model, tool_format: ChatFormat, rows: list[dict], do_sample: bool, max_turns: int = 7) -> dict[str, float]:
    """Shares over `rows`, each from 0 to 1, and the mean number of assistant turns."""
    model.eval()
    conversations = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}] for row in rows
    ]
    active, totals = list(range(len(rows))), Counter()
    right = [0] * len(rows)
    for _ in range(max_turns):
        turns = next_turns(model, tool_format, [conversations[i] for i in active], do_sample) if active else []
        still_active = []
        for i, turn in zip(active, turns, strict=True):
            conversations[i].append({"role": "assistant", "content": turn})
            totals["mean turns"] += 1
            parsed, _ = parse_turn(turn)
            if parsed is None:
                totals["exact match"] += turn == f"<answer>{rows[i]['answer']}</answer>"
                continue
            totals["calls"] += 1
            try:
                mistake = check_call(parsed, {"calculator": CALCULATOR})
                text = f"Error: {mistake}"[:60] if mistake else CALCULATOR(**parsed.arguments)
            except ValueError as error:
                text = f"Error: {error}"[:60]
            totals["calls executed"] += not text.startswith("Error")
            steps = rows[i]["steps"]
            right[i] += right[i] < len(steps) and text == steps[right[i]]
            conversations[i].append({"role": "user", "content": result_message(text)})
            still_active.append(i)
        active = still_active
    found = sum(r == len(row["steps"]) for r, row in zip(right, rows, strict=True))
    first = sum(r > 0 for r in right)
    n = len(rows)
    return {
        "calls executed": totals["calls executed"] / max(1, totals["calls"]), "first step right": first / n,
        "right result found": found / n, "exact match": totals["exact match"] / n,
        "mean turns": totals["mean turns"] / n,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("hf_recipes/tiny"))
    parser.add_argument("--steps", type=int, default=600, help="without mistakes")
    parser.add_argument("--mixed_steps", type=int, default=150, help="with mistakes, for each model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    held_out = make_chain(512, seed=1, split="test")
    rows = make_chain(50_000, args.seed)
    tokenizer = build_tokenizer([make_conversation(row, 0.7, 0.7, rng) for row in rows[:3000]])
    base = build_model(tokenizer, num_layers=3, num_heads=3)
    print(f"{base.num_parameters():,} parameters, {len(tokenizer)} tokens; {tokenizer.tokenize(call('17 + 3'))}")
    tool_format = make_format("xml", tokenizer)
    warm_start(base, tokenizer.pad_token_id, drawing(rows, 1.0, 1.0, rng, tool_format), args.steps)
    print(measure(base, tool_format, held_out, do_sample=False))
    for name, (good_step, good_answer) in MODELS.items():
        model = copy.deepcopy(base)
        draw = drawing(rows, good_step, good_answer, rng, tool_format)
        warm_start(model, tokenizer.pad_token_id, draw, args.mixed_steps, peak_lr=1e-3)
        model = model.to(torch.bfloat16)  # half the size; measured, and trained on, as rounded
        model.save_pretrained(args.output_dir / name)
        tokenizer.save_pretrained(args.output_dir / name)
        sampled, greedy = (measure(model.float(), tool_format, held_out, do_sample) for do_sample in (True, False))
        print_table(f"{name}, {len(held_out)} held-out problems", sampled, greedy)


if __name__ == "__main__":
    main()
