"""Build the bundled models of the chain task: Qwen3 models of 0.4M parameters that call a calculator step by step.

    PYTHONPATH=. python scripts/build/chain.py --output_dir hf_recipes/tiny

First the model imitates conversations without mistakes; then two copies of it go on with mistakes mixed in, so that
they know the right behaviour and sample it only some of the time: `chain-model` answers about one problem in nine
right, `chain-sparse-model` fewer than one in fifty. About three minutes on 2 cores.
"""

import copy
import random
import re
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from build import common
from build.common import CHAT_TEMPLATE, Example, build_model, change_one, encode, opening, warm_start
from mt_grpo.conversation.formats.base import result_message
from mt_grpo.conversation.formats.choose import TOOL_FORMATS, parse_tags
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.recipe.data import make_chain
from mt_grpo.recipe.plugins import load_tools

SYSTEM = "Use the calculator for each step, then answer."
MAX_CALLS = 6
MAX_RESULT = 60  # characters; longer errors are cut
(CALCULATOR,) = load_tools(str(common.ROOT / "tools/step_calculator.py"))
TOOLS = {"calculator": CALCULATOR}

# Shares of what a turn does while operations are left, and once none is. FORK: change what the policy gets wrong.
STEP_MISTAKES = ("other operation", "wrong digit", "broken JSON", "wrong tool", "early answer", "no tag")
ANSWER_MISTAKES = ("wrong digit", "further call", "no tag")
MODELS = {  # name -> (share of good steps, share of good answers)
    "chain-model": (0.72, 0.65),
    "chain-sparse-model": (0.45, 0.45),
}


def make_conversation(row: dict, good_step: float, good_answer: float, rng: random.Random) -> list[dict[str, str]]:
    """One conversation; after a wrong step it goes on from where that step led, as the policy has to."""
    value, *rest = re.findall(r"\d+", row["question"])[:1] + re.findall(r"[-+*] \d", row["question"])
    messages = opening(row["question"], SYSTEM)
    at = 0  # the next operation
    for _ in range(MAX_CALLS):
        if at < len(rest):
            kind = "good" if rng.random() < good_step else rng.choice(STEP_MISTAKES)
            chosen = at
            if kind == "other operation":
                chosen = rng.choice([i for i in range(len(rest)) if i != at])
            number = change_one(value, "0123456789", rng) if kind == "wrong digit" else value
            name = rng.choice(("calc", "math")) if kind == "wrong tool" else "calculator"
            text = common.call(name, expression=f"{number} {rest[chosen]}")
            if kind == "broken JSON":
                text = common.broken(text, rng)
            elif kind == "early answer":
                text = f"<answer>{value}</answer>"
            elif kind == "no tag":
                text = f"{value} {rest[at]}"
        else:
            kind = "good" if rng.random() < good_answer else rng.choice(ANSWER_MISTAKES)
            chosen = at - 1
            text = f"<answer>{change_one(value, '0123456789', rng) if kind == 'wrong digit' else value}</answer>"
            if kind == "further call":
                text = common.call("calculator", expression=f"{value} {rest[-1]}")
            elif kind == "no tag":
                text = value
        messages.append({"role": "assistant", "content": text})
        parsed, _ = parse_tags(text)
        if parsed is None:
            break
        if mistake := check_call(parsed, TOOLS):
            messages.append({"role": "user", "content": result_message(f"Error: {mistake}"[:MAX_RESULT])})
        else:
            value, at = CALCULATOR(**parsed.arguments), chosen + 1
            messages.append({"role": "user", "content": result_message(value)})
            if value.startswith("-"):  # not seen in the right chains; what follows would be noise
                break
    return messages


def main() -> None:
    mixed = {"type": int, "default": 150, "help": "with mistakes, for each model"}
    args = common.read_arguments(__doc__, Path("hf_recipes/tiny"), steps=600, mixed_steps=mixed)
    rng = args.rng
    rows = make_chain(50_000, args.seed)
    drawn = [make_conversation(row, 0.7, 0.7, rng) for row in rows[:3000]]
    # Byte-level BPE of 512 tokens. Digits stand alone; merges cross words, so that a call is about ten tokens.
    tokenizer = common.train_tokenizer(common.pieces(drawn), 512, CHAT_TEMPLATE)
    base = build_model(tokenizer, num_layers=3, num_heads=3)
    print(f"{base.num_parameters():,} parameters, {len(tokenizer)} tokens")
    tool_format = TOOL_FORMATS["xml"](tokenizer)

    def example(good_step: float, good_answer: float) -> Example:
        return encode(make_conversation(rng.choice(rows), good_step, good_answer, rng), tool_format, TOOLS)

    warm_start(base, tokenizer.pad_token_id, partial(example, 1.0, 1.0), args.steps)
    for name, shares in MODELS.items():
        model = copy.deepcopy(base)
        warm_start(model, tokenizer.pad_token_id, partial(example, *shares), args.mixed_steps, peak_lr=1e-3)
        recipe = f"hf_recipes/tiny/{name.removesuffix('-model')}.yaml"
        common.save(model.to(torch.bfloat16), tokenizer, args.output_dir / name, recipe)


if __name__ == "__main__":
    main()
