r"""Build a bundled tiny model: a 0.9M-parameter Qwen3 that can call a calculator and often does it badly.

    PYTHONPATH=. python scripts/build/tiny.py --output_dir hf_recipes/tiny/calculator-model
    PYTHONPATH=. python scripts/build/tiny.py --tool_format hermes --steps 150 \
        --initial_model hf_recipes/tiny/calculator-model --output_dir hf_recipes/tiny/calculator-hermes-model
    PYTHONPATH=. python scripts/build/tiny.py --tool_format hermes --steps 900 --agents \
        --initial_model hf_recipes/tiny/calculator-hermes-model --output_dir hf_recipes/tiny/calculator-agent-model

The warm start is supervised: the model imitates synthetic conversations in which every turn is right or has one known
mistake. It then knows the right behaviour (greedy) and samples it only some of the time (temperature 1): that gap is
what reinforcement learning closes.
"""

import argparse
import json
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.xml import make_format
from mt_grpo.conversation.tools.signature import check_call, tool_schema
from mt_grpo.recipe.data import make_arithmetic
from mt_grpo.recipe.plugins import load_tools
from mt_grpo.rollout import Message, ToolCall, ToolResult, Turn

SYSTEM = "Use the calculator, then answer."
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen's, without its explanations: a model of this size reads every token of them in every turn.
HERMES_TEMPLATE = """\
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system' }}
    {%- if messages[0].role == 'system' %}
        {{- '\\n' + messages[0].content }}
    {%- endif %}
    {%- if tools %}
        {{- '\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' }}{{ tool | tojson }}
        {%- endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MAX_CALLS = 3  # turns with calls in one warm-start conversation
MAX_RESULT_TOKENS = 48  # longer errors are cut, as in the recipe
(CALCULATOR,) = load_tools(str(Path(__file__).parents[2] / "tools/calculator.py"))
TOOLS = {"calculator": CALCULATOR}

# How programs that speak OpenAI's API describe the calculator and begin their conversations: one of each is drawn.
SYSTEMS = (
    SYSTEM, "", "You are a helpful assistant.", "Use the calculator. Answer with the number alone.",
    "You solve problems step by step with tools.", "Call the calculator, read its result, and answer.",
)  # fmt: skip
DESCRIPTIONS = (
    "Compute the value of an arithmetic expression.", "Compute an arithmetic expression.", "A calculator.",
    "Evaluate an expression of numbers.",
)  # fmt: skip
ARGUMENTS = ("", "Numbers, brackets and + - * /, such as 3 * (4 + 5).", "An arithmetic expression.", "The expression")

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

# ---------------------------------------------------------------------------------------------------------------------
# Data: conversations with known mistakes
# ---------------------------------------------------------------------------------------------------------------------


def change_one(text: str, alphabet: str, rng: random.Random) -> str:
    """`text` with one of its characters from `alphabet` replaced by another one; no leading zero is made."""
    position = rng.choice([i for i, character in enumerate(text) if character in alphabet])
    leading = position == 0 or not text[position - 1].isdigit()
    choices = [c for c in alphabet if c != text[position] and not (c == "0" and leading)]
    return text[:position] + rng.choice(choices) + text[position + 1 :]


def call_turn(kind: str, expression: str, writing: Writing, rng: random.Random) -> str:
    """What the assistant says before it has a result."""
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
    """A turn without a result before it. Where it has a second call, that one computes another thing.

    The second call is the rest of an expression of three numbers, or the two numbers of a shorter one in reverse.
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


def run_call(call: ToolCall) -> ToolResult:
    """The result of a call, or an error as the trainer's environment words it."""
    mistake = check_call(call, TOOLS)
    try:
        return ToolResult(f"Error: {mistake}", error="call") if mistake else ToolResult(CALCULATOR(**call.arguments))
    except Exception as error:
        return ToolResult(f"Error: {error}", error="tool")


def observe(text: str, tool_format: ChatFormat) -> Turn:
    """A turn of this text: its calls and their results, or its answer."""
    ids = tool_format.tokenizer.encode(text)
    parsed = tool_format.parse(ids, [], TOOLS)
    return Turn(ids, None, text, "stop", parsed.calls, [run_call(c) for c in parsed.calls], parsed.answer)


def result_messages(turn: Turn, tool_format: ChatFormat) -> list[Message]:
    """The results of a turn as the model reads them."""
    return tool_format.fit(turn, [], math.inf, MAX_RESULT_TOKENS)[1]


def draw(shares: dict[str, int], rng: random.Random) -> str:
    return rng.choices(list(shares), weights=list(shares.values()))[0]


def opening(question: str, system: str = SYSTEM) -> list[Message]:
    return [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]


def agents_tools(rng: random.Random) -> dict[str, Any]:
    """The calculator as one of the programs describes it: more keys or fewer, in any order."""

    def shuffled(always: dict[str, Any], sometimes: dict[str, Any]) -> dict[str, Any]:
        items = [*always.items(), *(item for item in sometimes.items() if item[1] != "" and rng.random() < 0.5)]
        rng.shuffle(items)
        return dict(items)

    expression = shuffled({"type": "string"}, {"description": rng.choice(ARGUMENTS), "title": "Expression"})
    parameters = shuffled(
        {"type": "object", "properties": {"expression": expression}, "required": ["expression"]},
        {"additionalProperties": False, "title": rng.choice(("calculator_args", "calculator"))},
    )
    function = {"name": "calculator", "description": rng.choice(DESCRIPTIONS), "parameters": parameters}
    strict = rng.choice(({}, {"strict": True}, {"strict": False}))
    return {"calculator": SimpleNamespace(json_schema={**function, **strict})}


def make_conversation(
    question: str, tool_format: ChatFormat, writing: Writing, rng: random.Random, system: str = SYSTEM
) -> list[Message]:
    """One conversation; a failed call is followed by another attempt drawn from the same shares."""
    expression = question.removeprefix("What is ").removesuffix("?")
    messages = opening(question, system)
    for _ in range(MAX_CALLS):
        turn = observe(first_turn(expression, writing, rng), tool_format)
        messages.append({"role": "assistant", "content": turn.text})
        if not turn.calls:
            break
        failed = turn.results[0].error
        if failed and rng.random() < 0.3:  # a retry must not hang on the words of today's errors
            turn.results = [replace(r, text="Error: the call failed") if r.error else r for r in turn.results]
        messages += result_messages(turn, tool_format)
        if not failed:
            results = [result.text for result in turn.results if not result.error]
            answer = answer_turn(draw(ANSWER_SHARES, rng), results, writing, rng)
            messages.append({"role": "assistant", "content": answer})
            break
    return messages


# ---------------------------------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------------------------------


def build_tokenizer(
    questions: list[str], tool_format: str, rng: random.Random, agents: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 400 tokens; every digit is its own token, so that copying a number is copying its digits.

    Hermes has 512, which cross words: the JSON schema of the tool stands in every prompt, and takes about 30 tokens.
    For agents, who describe the tool in many ways, there are 768.
    """
    hermes, writing = tool_format == "hermes", WRITINGS[tool_format]
    schema = json.dumps(tool_schema("calculator", CALCULATOR))
    system = [f"system\n{SYSTEM}\n<tools>\n{schema}\n</tools>"] if hermes else ["<result>\n", "</result>", SYSTEM]
    texts = ["system\n", "user\n", "assistant\n", *system] * len(questions)
    for _ in range(len(questions) * agents):
        schema = json.dumps(tool_schema("calculator", agents_tools(rng)["calculator"]))
        texts += re.split(r"(?<=[,{}])", f"system\n{rng.choice(SYSTEMS)}\n<tools>\n{schema}\n</tools>")
    for question in questions:
        call = call_turn(draw(CALL_SHARES, rng), question[len("What is ") : -1], writing, rng)
        answer = answer_turn(draw(ANSWER_SHARES, rng), [str(rng.randint(-999, 9999))], writing, rng)
        texts += [question, *re.split("</?tool_call>", call) * (1 + hermes), answer]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"] if hermes else []
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not hermes),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = (768 if agents else 512 if hermes else 400) - len(tags)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])  # as Qwen's: tokens, and text too
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], model_max_length=1024
    )
    fast.chat_template = HERMES_TEMPLATE if hermes else CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, num_layers: int = 4, num_heads: int = 4) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32 * num_heads,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=32,
        intermediate_size=96 * num_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.06,  # at this width the default 0.02 learns to copy digits several times more slowly
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def take_weights(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """The weights of a model of the same shape, with the embeddings of tokens that both vocabularies have."""
    known = AutoTokenizer.from_pretrained(path).get_vocab()
    weights = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    name = "model.embed_tokens.weight"
    old, weights[name] = weights[name], model.state_dict()[name].clone()
    for token, i in tokenizer.get_vocab().items():
        if token in known:
            weights[name][i] = old[known[token]]
    weights["lm_head.weight"] = weights[name]  # tied
    model.load_state_dict(weights)


def encode(
    messages: list[Message], tool_format: ChatFormat, tools: dict[str, Any] = TOOLS
) -> tuple[list[int], list[int]]:
    """Ids and labels of one conversation; labels are -100 except on what the assistant says and its `<|im_end|>`.

    INVARIANT: the ids are those of a rollout; the tool format gives them as it does there.
    """
    tokenizer = tool_format.tokenizer
    ids, labels = [], []
    for said, group in groupby(messages, lambda message: message["role"] == "assistant"):
        group = list(group)
        if said:
            piece = [*tokenizer.encode(group[0]["content"]), tokenizer.eos_token_id]
        elif ids:
            piece = tool_format.suffix_ids([], group, ids)
        else:
            piece = tokenizer.apply_chat_template(**tool_format.prompt(group, tools))
        ids += piece
        labels += piece if said else [-100] * len(piece)
    return ids, labels


def pad_right(batch: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, (B, T) each. Causal attention never looks right, so no attention mask is needed."""
    length = max(len(ids) for ids, _ in batch)
    input_ids = [ids + [pad] * (length - len(ids)) for ids, _ in batch]
    labels = [labels + [-100] * (length - len(labels)) for _, labels in batch]
    return torch.tensor(input_ids), torch.tensor(labels)


def warm_start(
    model: Qwen3ForCausalLM,
    pad_id: int,
    next_example: Callable[[], tuple[list[int], list[int]]],
    steps: int,
    batch_size: int = 32,
    peak_lr: float = 3e-3,
) -> None:
    """AdamW on assistant tokens only, of what `encode` gives: 5% linear warm-up, then a cosine down to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 20)
    start = time.time()
    for step in range(steps):
        batch = [next_example() for _ in range(batch_size)]
        batch.sort(key=lambda pair: len(pair[0]))  # padded parts of like length: fewer tokens than one
        num_said = sum(label != -100 for _, labels in batch for label in labels)
        decay = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
        optimizer.param_groups[0]["lr"] = peak_lr * min((step + 1) / warmup, decay)
        loss = 0.0
        for part in (batch[i : i + 8] for i in range(0, batch_size, 8)):
            input_ids, labels = pad_right(part, pad_id)
            part_loss = model(input_ids=input_ids, labels=labels, num_items_in_batch=num_said, use_cache=False).loss
            part_loss.backward()
            loss += part_loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1:4d}/{steps}  loss {loss:.3f}  {time.time() - start:.0f} s", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Measurement
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def next_turns(
    model, tool_format: ChatFormat, conversations: list[list[Message]], do_sample: bool, tools: dict[str, Any] = TOOLS
) -> list[str]:
    """One assistant turn for each conversation, cut where the tool format ends it."""
    tokenizer = tool_format.tokenizer
    prompts = [encode(conversation, tool_format, tools)[0] for conversation in conversations]
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
    output = model.generate(**inputs, do_sample=do_sample, max_new_tokens=64, **sampling)
    turns = []
    for prompt, ids in zip(prompts, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        turns.append(tool_format.text(ids[: tool_format.cut(ids, prompt)[0]]))
    return turns


def first_turn_kind(turn: Turn, expression: str) -> str:
    """Which of the kinds in `CALL_SHARES` a sampled first turn is, by its first call."""
    if not turn.calls:
        return "no call" if re.fullmatch(r"-?\d+", turn.answer or "") else "no tag"
    call, error = turn.calls[0], turn.results[0].error
    if not error:
        return "good" if call.arguments["expression"] == expression else "wrong expression"
    return "wrong tool" if call.name not in (None, "calculator") else "broken JSON" if call.error else "other failure"


def measure(
    model, tool_format: ChatFormat, rows: list[dict[str, str]], do_sample: bool, max_turns: int = 3
) -> dict[str, float]:
    """Shares over `rows`, each from 0 to 1, and the mean number of assistant turns."""
    model.eval()
    conversations = [opening(row["question"]) for row in rows]
    active, totals, kinds, found = list(range(len(rows))), Counter(), Counter(), set()
    for turn_number in range(max_turns):
        texts = next_turns(model, tool_format, [conversations[i] for i in active], do_sample) if active else []
        still_active = []
        for i, text in zip(active, texts, strict=True):
            turn = observe(text, tool_format)
            conversations[i].append({"role": "assistant", "content": text})
            totals["mean turns"] += 1
            if turn_number == 0:
                totals["first calls executed"] += bool(turn.results) and not turn.results[0].error
                totals["first turn: several calls"] += len(turn.calls) > 1
                kinds[first_turn_kind(turn, rows[i]["question"][len("What is ") : -1])] += 1
            if turn.calls:
                conversations[i] += result_messages(turn, tool_format)
                still_active.append(i)
            totals["exact match"] += turn.answer == rows[i]["answer"]
            if any(result.text == rows[i]["answer"] for result in turn.results):
                found.add(i)
        active = still_active
    totals["right result found"] = len(found)
    names = ("first calls executed", "right result found", "exact match", "mean turns", "first turn: several calls")
    first = {f"first turn: {kind}": kinds[kind] / len(rows) for kind in (*CALL_SHARES, "other failure")}
    return {name: totals[name] / len(rows) for name in names} | first


def print_table(title: str, sampled: dict[str, float], greedy: dict[str, float]) -> None:
    print(f"\n| {title} | temperature 1 | greedy |\n|---|---|---|")
    for name, value in sampled.items():
        print(f"| {name} | {value:.3f} | {greedy[name]:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("hf_recipes/tiny/calculator-model"))
    parser.add_argument("--tool_format", choices=WRITINGS, default="xml")
    parser.add_argument("--initial_model", type=Path, help="start from its weights: then 150 steps are enough")
    parser.add_argument(
        "--agents", action="store_true", help="prompts and tools as programs of OpenAI's API send them"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    held_out = make_arithmetic(512, seed=1, split="test")
    questions = [row["question"] for row in make_arithmetic(20_000, args.seed, split="train")]
    tokenizer = build_tokenizer(questions[:2000], args.tool_format, rng, args.agents)
    writing = WRITINGS[args.tool_format]
    tool_format = make_format(args.tool_format, tokenizer)
    model = build_model(tokenizer)
    if args.initial_model:
        take_weights(model, tokenizer, args.initial_model)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")

    def next_example() -> tuple[list[int], list[int]]:
        if not args.agents:
            return encode(make_conversation(rng.choice(questions), tool_format, writing, rng), tool_format)
        messages = make_conversation(rng.choice(questions), tool_format, writing, rng, rng.choice(SYSTEMS))
        return encode(messages, tool_format, agents_tools(rng))

    warm_start(model, tokenizer.pad_token_id, next_example, args.steps)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)

    sampled, greedy = (measure(model, tool_format, held_out, do_sample) for do_sample in (True, False))
    print_table(f"{len(held_out)} held-out problems", sampled, greedy)


if __name__ == "__main__":
    main()
