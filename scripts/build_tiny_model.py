"""Build the bundled tiny model: a 0.9M-parameter Qwen3 that can call a calculator and often does it badly.

    PYTHONPATH=. python scripts/build_tiny_model.py --output_dir hf_recipes/tiny/calculator-model

The warm start is supervised: the model imitates synthetic conversations in which every turn is right or has one known
mistake. It then knows the right behaviour (greedy) and samples it only some of the time (temperature 1): that gap is
what reinforcement learning closes.
"""

import argparse
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mt_grpo.data import make_arithmetic
from mt_grpo.formats import parse_turn
from mt_grpo.plugins import load_tools
from mt_grpo.tool_results import cut_to_tokens
from mt_grpo.tools import check_call

SYSTEM = "Use the calculator, then answer."
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A turn ends after the first of these; whatever the model says next is not part of it.
STOP = re.compile(r"</tool>|</answer>|<\|im_end\|>|<\|endoftext\|>")
MAX_CALLS = 3  # calls in one warm-start conversation
MAX_RESULT_TOKENS = 48  # longer errors are cut, as in the recipe
(CALCULATOR,) = load_tools(str(Path(__file__).parents[1] / "tools/calculator.py"))

# Shares of what a turn does. FORK: change what the sampled policy gets wrong.
CALL_SHARES = {"good": 38, "wrong expression": 21, "broken JSON": 13, "wrong tool": 11, "no call": 10, "no tag": 7}
ANSWER_SHARES = {"good": 64, "wrong digit": 26, "no tag": 10}

# ---------------------------------------------------------------------------------------------------------------------
# Data: conversations with known mistakes
# ---------------------------------------------------------------------------------------------------------------------


def change_one(text: str, alphabet: str, rng: random.Random) -> str:
    """`text` with one of its characters from `alphabet` replaced by another one; no leading zero is made."""
    position = rng.choice([i for i, character in enumerate(text) if character in alphabet])
    leading = position == 0 or not text[position - 1].isdigit()
    choices = [c for c in alphabet if c != text[position] and not (c == "0" and leading)]
    return text[:position] + rng.choice(choices) + text[position + 1 :]


def call_turn(kind: str, expression: str, rng: random.Random) -> str:
    """What the assistant says before it has a result."""
    if kind == "no call":
        return f"<answer>{rng.randint(2, 10 ** rng.randint(2, 4))}</answer>"
    if kind == "no tag":
        return rng.choice((f"{expression}", f"The answer is {rng.randint(2, 9999)}.", "I will use the calculator."))
    if kind == "wrong expression":
        expression = change_one(expression, rng.choice(("0123456789", "0123456789", "+-*")), rng)
    name = rng.choice(("calc", "math", "search")) if kind == "wrong tool" else "calculator"
    call = json.dumps({"name": name, "args": {"expression": expression}})
    if kind == "broken JSON":
        call = rng.choice((call[:-1], call[:-2], call.replace('"}}', "}}"), call.replace(", ", " ", 1)))
    return f"<tool>{call}</tool>"


def answer_turn(kind: str, result: str, rng: random.Random) -> str:
    """What the assistant says once it has a result."""
    if kind == "wrong digit":
        result = change_one(result, "0123456789", rng)
    return result if kind == "no tag" else f"<answer>{result}</answer>"


def observe(turn: str, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """What the environment makes of a turn: `("result", "1889")`, `("error", "Error: ...")` or `("end", "")`."""
    call, _ = parse_turn(turn)
    if call is None:
        return "end", ""
    mistake = check_call(call, {"calculator": CALCULATOR})
    try:
        kind, text = ("error", f"Error: {mistake}") if mistake else ("result", CALCULATOR(**call.arguments))
    except Exception as error:
        kind, text = "error", f"Error: {error}"
    return kind, cut_to_tokens(text, MAX_RESULT_TOKENS, tokenizer)


def draw(shares: dict[str, int], rng: random.Random) -> str:
    return rng.choices(list(shares), weights=list(shares.values()))[0]


def opening(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def make_conversation(question: str, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[dict[str, str]]:
    """One conversation; a failed call is followed by another attempt drawn from the same shares."""
    expression = question.removeprefix("What is ").removesuffix("?")
    messages = opening(question)
    for _ in range(MAX_CALLS):
        turn = call_turn(draw(CALL_SHARES, rng), expression, rng)
        messages.append({"role": "assistant", "content": turn})
        kind, text = observe(turn, tokenizer)
        if kind == "end":
            break
        if kind == "error" and rng.random() < 0.3:  # a retry must not hang on the words of today's errors
            text = "Error: the call failed"
        messages.append({"role": "user", "content": f"<result>\n{text}\n</result>"})
        if kind == "result":
            turn = answer_turn(draw(ANSWER_SHARES, rng), text, rng)
            messages.append({"role": "assistant", "content": turn})
            break
    return messages


# ---------------------------------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------------------------------


def build_tokenizer(questions: list[str], rng: random.Random) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 400 tokens; every digit is its own token, so that copying a number is copying its digits."""
    texts = ["system\n", "user\n", "assistant\n", "<result>\n", "</result>", SYSTEM] * len(questions)
    for question in questions:
        call = call_turn(draw(CALL_SHARES, rng), question[len("What is ") : -1], rng)
        texts += [question, call, answer_turn(draw(ANSWER_SHARES, rng), str(rng.randint(-999, 9999)), rng)]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], model_max_length=1024
    )
    fast.chat_template = CHAT_TEMPLATE
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


def encode(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Ids and labels of one conversation; labels are -100 except on what the assistant says and its `<|im_end|>`."""
    ids, labels = [], []
    for message in messages:
        said = message["role"] == "assistant"
        for text, has_loss in (
            (f"<|im_start|>{message['role']}\n", False),
            (f"{message['content']}<|im_end|>", said),
            ("\n", False),
        ):
            piece = tokenizer.encode(text)
            ids += piece
            labels += piece if has_loss else [-100] * len(piece)
    return ids, labels


def pad_right(batch: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, (B, T) each. Causal attention never looks right, so no attention mask is needed."""
    length = max(len(ids) for ids, _ in batch)
    input_ids = [ids + [pad] * (length - len(ids)) for ids, _ in batch]
    labels = [labels + [-100] * (length - len(labels)) for _, labels in batch]
    return torch.tensor(input_ids), torch.tensor(labels)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    next_conversation: Callable[[], list[dict[str, str]]],
    steps: int,
    batch_size: int = 32,
    peak_lr: float = 3e-3,
) -> None:
    """AdamW on assistant tokens only: 5% linear warm-up, then a cosine down to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 20)
    start = time.time()
    for step in range(steps):
        drawn = [next_conversation() for _ in range(batch_size)]
        batch = [encode(conversation, tokenizer) for conversation in drawn]
        batch.sort(key=lambda pair: len(pair[0]))  # two padded parts of like length: fewer tokens than one
        num_said = sum(label != -100 for _, labels in batch for label in labels)
        decay = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
        optimizer.param_groups[0]["lr"] = peak_lr * min((step + 1) / warmup, decay)
        loss = 0.0
        for part in (batch[i : i + batch_size // 2] for i in range(0, batch_size, batch_size // 2)):
            input_ids, labels = pad_right(part, tokenizer.pad_token_id)
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
def next_turns(model, tokenizer, conversations: list[list[dict[str, str]]], do_sample: bool) -> list[str]:
    """One assistant turn for each conversation, cut after its first `</tool>`, `</answer>` or `<|im_end|>`."""
    tokenizer.padding_side = "left"
    prompts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
    output = model.generate(**inputs, do_sample=do_sample, max_new_tokens=64, **sampling)
    turns = []
    for text in tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :]):
        stop = STOP.search(text)
        turns.append(text if stop is None else text[: stop.start()] + (stop[0] if stop[0][1] == "/" else ""))
    return turns


def first_turn_kind(turn: str, kind: str, expression: str) -> str:
    """Which of the kinds in `CALL_SHARES` a sampled first turn is, given what `observe` says of it."""
    call, answered = parse_turn(turn)
    if call is None:
        return "no call" if answered else "no tag"
    if kind == "result":
        return "good" if call.arguments["expression"] == expression else "wrong expression"
    return "wrong tool" if call.name not in (None, "calculator") else "broken JSON" if call.error else "other failure"


def measure(model, tokenizer, rows: list[dict[str, str]], do_sample: bool, max_turns: int = 3) -> dict[str, float]:
    """Shares over `rows`, each from 0 to 1, and the mean number of assistant turns."""
    model.eval()
    conversations = [opening(row["question"]) for row in rows]
    active, totals, kinds = list(range(len(rows))), Counter(), Counter()
    for turn_number in range(max_turns):
        turns = next_turns(model, tokenizer, [conversations[i] for i in active], do_sample) if active else []
        still_active = []
        for i, turn in zip(active, turns, strict=True):
            conversations[i].append({"role": "assistant", "content": turn})
            kind, text = observe(turn, tokenizer)
            totals["mean turns"] += 1
            if turn_number == 0:
                totals["first calls executed"] += kind == "result"
                kinds[first_turn_kind(turn, kind, rows[i]["question"][len("What is ") : -1])] += 1
            if kind != "end":
                conversations[i].append({"role": "user", "content": f"<result>\n{text}\n</result>"})
                still_active.append(i)
            answer = re.fullmatch(r"\s*<answer>(.*?)</answer>", turn, re.DOTALL)
            totals["exact match"] += answer is not None and answer[1].strip() == rows[i]["answer"]
        active = still_active
    for row, conversation in zip(rows, conversations, strict=True):
        target = f"<result>\n{row['answer']}\n</result>"
        totals["right result found"] += any(m["content"] == target for m in conversation)
    names = ("first calls executed", "right result found", "exact match", "mean turns")
    first = {f"first turn: {kind}": kinds[kind] / len(rows) for kind in (*CALL_SHARES, "other failure")}
    return {name: totals[name] / len(rows) for name in names} | first


def print_table(title: str, sampled: dict[str, float], greedy: dict[str, float]) -> None:
    print(f"\n| {title} | temperature 1 | greedy |\n|---|---|---|")
    for name, value in sampled.items():
        print(f"| {name} | {value:.3f} | {greedy[name]:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("hf_recipes/tiny/calculator-model"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    held_out = make_arithmetic(512, seed=1, split="test")
    questions = [row["question"] for row in make_arithmetic(20_000, args.seed, split="train")]
    tokenizer = build_tokenizer(questions[:2000], rng)
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    warm_start(model, tokenizer, lambda: make_conversation(rng.choice(questions), tokenizer, rng), args.steps)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)

    sampled, greedy = (measure(model, tokenizer, held_out, do_sample) for do_sample in (True, False))
    print_table(f"{len(held_out)} held-out problems", sampled, greedy)


if __name__ == "__main__":
    main()
