r"""Build a bundled tiny model: a 0.9M-parameter Qwen3 that can call a calculator and often does it badly.

    PYTHONPATH=. python scripts/build/tiny.py --output_dir hf_recipes/tiny/calculator-model
    PYTHONPATH=. python scripts/build/tiny.py --tool_format hermes --steps 150 \
        --initial_model hf_recipes/tiny/calculator-model --output_dir hf_recipes/tiny/calculator-hermes-model

The warm start is supervised: the model imitates synthetic conversations in which every turn is right or has one known
mistake. It then knows the right behaviour (greedy) and samples it only some of the time (temperature 1): that gap is
what reinforcement learning closes.
"""

import json
import random
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from transformers import PreTrainedTokenizerFast

from build import common
from build.common import CHAT_TEMPLATE, HERMES_TEMPLATE, Example, build_model, change_one, draw, encode
from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.recipe.data import make_arithmetic
from mt_grpo.recipe.plugins import load_tools
from mt_grpo.rollout import Message

RECIPES = {"xml": "hf_recipes/tiny/calculator.yaml", "hermes": "hf_recipes/tiny/calculator-hermes.yaml"}
SYSTEM = "Use the calculator, then answer."
MAX_CALLS = 3  # turns with calls in one warm-start conversation
MAX_RESULT_TOKENS = 48  # longer errors are cut, as in the recipe
(CALCULATOR,) = load_tools(str(common.ROOT / "tools/calculator.py"))
TOOLS = {"calculator": CALCULATOR}

# Shares of what a turn does. FORK: change what the sampled policy gets wrong.
CALL_SHARES = {"good": 38, "wrong expression": 21, "broken JSON": 13, "wrong tool": 11, "no call": 10, "no tag": 7}
SECOND_CALL_SHARES = {"good": 6, "broken JSON": 2, "wrong tool": 2}  # where a turn has a second call
ANSWER_SHARES = {"good": 64, "wrong digit": 26, "no tag": 10}


@dataclass(frozen=True)
class Writing:
    """What the assistant of one tool format writes; `%s` is the JSON of a call, or the number of an answer."""

    call: str
    arguments: str  # the key of a call's arguments
    answer: str
    bad_answer: str  # an answer that no reward reads
    second_call: float  # share of the turns with a call that have a second one


WRITINGS = {
    "xml": Writing("<tool>%s</tool>", "args", "<answer>%s</answer>", "%s", second_call=0.0),
    "hermes": Writing("<tool_call>\n%s\n</tool_call>", "arguments", "%s", "The answer is %s.", second_call=0.25),
}

# -- Data: conversations with known mistakes --


def call_turn(kind: str, expression: str, writing: Writing, rng: random.Random) -> str:
    """Write the assistant's turn before a result, with a mistake of this kind."""
    if kind == "no call":
        return writing.answer % rng.randint(2, 10 ** rng.randint(2, 4))
    if kind == "no tag":
        return rng.choice((f"{expression}", f"The answer is {rng.randint(2, 9999)}.", "I will use the calculator."))
    if kind == "wrong expression":
        expression = change_one(expression, rng.choice(("0123456789", "0123456789", "+-*")), rng)
    name = rng.choice(("calc", "math", "search")) if kind == "wrong tool" else "calculator"
    call = json.dumps({"name": name, writing.arguments: {"expression": expression}})
    if kind == "broken JSON":
        call = rng.choice((call[:-1], call[:-2], call.replace('"}}', "}}"), call.replace(", ", " ", 1)))
    return writing.call % call


def first_turn(expression: str, writing: Writing, rng: random.Random) -> str:
    """A turn without a result before it, maybe with a second call that computes another thing.

    It is the rest of an expression of three numbers, or the two numbers of a shorter one in reverse.
    """
    kind = draw(CALL_SHARES, rng)
    turn = call_turn(kind, expression, writing, rng)
    if writing.second_call and kind not in ("no call", "no tag") and rng.random() < writing.second_call:
        words = expression.split()
        other = words[2:] if len(words) > 3 else words[::-1]
        turn += "\n" + call_turn(draw(SECOND_CALL_SHARES, rng), " ".join(other), writing, rng)
    return turn


def answer_turn(kind: str, results: list[str], writing: Writing, rng: random.Random) -> str:
    """What the assistant says once it has results, of which the first one is the answer."""
    result = results[0]
    if kind == "wrong digit" and results[1:] and rng.random() < 0.5:
        result = results[1]
    elif kind == "wrong digit":
        result = change_one(result, "0123456789", rng)
    return (writing.bad_answer if kind == "no tag" else writing.answer) % result


def make_conversation(question: str, tool_format: ChatFormat, writing: Writing, rng: random.Random) -> list[Message]:
    """One conversation; a failed call is followed by another attempt drawn from the same shares."""
    expression = question.removeprefix("What is ").removesuffix("?")
    messages = common.opening(question, SYSTEM)
    for _ in range(MAX_CALLS):
        text = first_turn(expression, writing, rng)
        turn = common.observe(text, tool_format, TOOLS, lambda call: CALCULATOR(**call.arguments))
        messages.append({"role": "assistant", "content": turn.text})
        if not turn.calls:
            break
        failed = turn.results[0].error
        if failed and rng.random() < 0.3:  # a retry must not hang on the words of today's errors
            turn.results = [replace(r, text="Error: the call failed") if r.error else r for r in turn.results]
        messages += common.result_messages(turn, tool_format, MAX_RESULT_TOKENS)
        if not failed:
            results = [result.text for result in turn.results if not result.error]
            answer = answer_turn(draw(ANSWER_SHARES, rng), results, writing, rng)
            messages.append({"role": "assistant", "content": answer})
            break
    return messages


# -- Model --


def build_tokenizer(questions: list[str], tool_format: str, rng: random.Random) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 400 tokens; every digit is its own token, so that copying a number is copying its digits.

    Hermes has 512, which cross words: the JSON schema of the tool stands in every prompt, and takes about 30 tokens.
    """
    hermes, writing = tool_format == "hermes", WRITINGS[tool_format]
    schema = json.dumps(tool_schema("calculator", CALCULATOR))
    system = [f"system\n{SYSTEM}\n<tools>\n{schema}\n</tools>"] if hermes else ["<result>\n", "</result>", SYSTEM]
    texts = ["system\n", "user\n", "assistant\n", *system] * len(questions)
    for question in questions:
        call = call_turn(draw(CALL_SHARES, rng), question[len("What is ") : -1], writing, rng)
        answer = answer_turn(draw(ANSWER_SHARES, rng), [str(rng.randint(-999, 9999))], writing, rng)
        texts += [question, *re.split("</?tool_call>", call) * (1 + hermes), answer]
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"] if hermes else []
    size = (512 if hermes else 400) - len(tags)
    template = HERMES_TEMPLATE if hermes else CHAT_TEMPLATE
    return common.train_tokenizer(texts, size, template, use_regex=not hermes, added=tags)


def main() -> None:
    form = {"choices": WRITINGS, "default": "xml"}
    initial = {"type": Path, "help": "start from its weights: then 150 steps are enough"}
    further = {"tool_format": form, "initial_model": initial}
    args = common.read_arguments(__doc__, common.TINY / "calculator-model", steps=600, **further)
    rng = args.rng
    questions = [row["question"] for row in make_arithmetic(20_000, args.seed, split="train")]
    tokenizer = build_tokenizer(questions[:2000], args.tool_format, rng)
    writing = WRITINGS[args.tool_format]
    tool_format = TOOL_FORMATS[args.tool_format](tokenizer)
    model = build_model(tokenizer)
    if args.initial_model:
        common.take_weights(model, tokenizer, args.initial_model)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")

    def next_example() -> Example:
        return encode(make_conversation(rng.choice(questions), tool_format, writing, rng), tool_format, TOOLS)

    common.warm_start(model, tokenizer.pad_token_id, next_example, args.steps)
    common.save(model, tokenizer, args.output_dir, RECIPES[args.tool_format])


if __name__ == "__main__":
    main()
