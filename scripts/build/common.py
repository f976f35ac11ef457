"""What the builders of the bundled models share: a tokenizer, a model, conversations as examples, the warm start."""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.tools.running import as_result
from mt_grpo.conversation.tools.signature import check_call
from mt_grpo.images.pictures import reader_of
from mt_grpo.images.reader import inputs_of_rows
from mt_grpo.rollout import Message, ToolCall, ToolResult, Turn

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "hf_recipes/tiny"
CHAT_TEMPLATE = (TINY / "calculator-model/chat_template.jinja").read_text(encoding="utf-8")
DIGITS = pre_tokenizers.Digits(individual_digits=True)  # so that copying a number is copying its digits
Example = tuple[list[int], list[int]]  # ids and labels

# -- A builder's frame --


def read_arguments(doc: str, output_dir: Path, steps: int, threads: int = 2, **further: dict[str, Any]) -> Any:
    """The options of a builder, and `rng`; torch is seeded. `further`: name -> what `add_argument` takes."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=output_dir)
    parser.add_argument("--steps", type=int, default=steps, help="of the warm start; of two, the one without mistakes")
    parser.add_argument("--seed", type=int, default=0)
    for name, options in further.items():
        parser.add_argument(f"--{name}", **options)
    args = parser.parse_args()
    torch.set_num_threads(threads)
    torch.manual_seed(args.seed)
    args.rng = random.Random(args.seed)
    return args


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path, *recipes: str) -> None:
    """Save both, and print what the model can do by these recipes, sampled and greedily."""
    from evaluate import evaluate, table  # which imports the trainer

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for recipe in recipes:
        for greedy in (False, True):
            print(f"\n{table(evaluate(str(folder), recipe, greedy=greedy, progress=False))}", flush=True)


# -- Conversations --


def change_one(text: str, alphabet: str, rng: random.Random) -> str:
    """`text` with one of its characters from `alphabet` replaced by another one; no leading zero is made."""
    position = rng.choice([i for i, character in enumerate(text) if character in alphabet])
    leading = position == 0 or not text[position - 1].isdigit()
    choices = [c for c in alphabet if c != text[position] and not (c == "0" and leading)]
    return text[:position] + rng.choice(choices) + text[position + 1 :]


def draw(shares: dict[str, int], rng: random.Random) -> str:
    return rng.choices(list(shares), weights=list(shares.values()))[0]


def call(name: str, **arguments: str) -> str:
    """A call as the format xml has it."""
    return f"<tool>{json.dumps({'name': name, 'args': arguments})}</tool>"


def broken(text: str, rng: random.Random) -> str:
    """A call whose JSON cannot be read."""
    return rng.choice((text.replace('"}}', '"}'), text.replace('"}}', "}}"), text.replace(": {", " {")))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def opening(question: str, system: str) -> list[Message]:
    return [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]


def pieces(conversations: Iterable[list[Message]]) -> list[str]:
    """The roles and texts of conversations, on which a tokenizer is trained."""
    return [piece for c in conversations for m in c for piece in (f"{m['role']}\n", m["content"])]


def observe(text: str, tool_format: ChatFormat, tools: dict[str, Any], run: Callable[[ToolCall], Any]) -> Turn:
    """A turn of this text: its calls and their results, or its answer.

    Errors are worded as in the trainer's environment.
    """

    def result_of(call: ToolCall) -> ToolResult:
        mistake = check_call(call, tools)
        try:
            return ToolResult(f"Error: {mistake}", error="call") if mistake else as_result(run(call), reader)
        except Exception as error:
            return ToolResult(f"Error: {error}", error="tool")

    reader = reader_of(tool_format.tokenizer)
    ids = tool_format.tokenizer.encode(text)
    parsed = tool_format.parse(ids, [], tools)
    return Turn(ids, None, text, "stop", parsed.calls, [result_of(call) for call in parsed.calls], parsed.answer)


def result_messages(turn: Turn, tool_format: ChatFormat, max_tokens: int) -> list[Message]:
    """The results of a turn as the model reads them; longer ones are cut."""
    return tool_format.fit(turn, [], math.inf, max_tokens)[1]


# -- The model --


def train_tokenizer(
    texts: Iterable[str],
    size: int,
    chat_template: str,
    split: Any = DIGITS,
    added: Iterable[str] = (),
    further_special: Iterable[str] = (),
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `size` tokens, after what `split` keeps apart.

    Its merges cross words. What is `added` comes on top: tokens that are text too. `further_special` are never text.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *further_special]
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if split else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], model_max_length=1024
    )
    fast.chat_template = chat_template
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, num_layers: int, num_heads: int) -> Qwen3ForCausalLM:
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32 * num_heads, "intermediate_size": 96 * num_heads}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "head_dim": 32}
    further = {"num_hidden_layers": num_layers, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    # At this width the default range of 0.02 learns to copy digits several times more slowly.
    config = Qwen3Config(**sizes, **heads, **further, **ends, bos_token_id=None, initializer_range=0.06)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **ends)
    return model


def encode(messages: list[Message], tool_format: ChatFormat, tools: dict[str, Any]) -> tuple[list[int], list[int]]:
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


def pad_right(batch: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, (B, T) each. Causal attention never looks right, so no attention mask is needed."""
    length = max(len(ids) for ids, _ in batch)
    input_ids = [ids + [pad] * (length - len(ids)) for ids, _ in batch]
    labels = [labels + [-100] * (length - len(labels)) for _, labels in batch]
    return torch.tensor(input_ids), torch.tensor(labels)


def warm_start(model: Any, pad_id: int, next_example: Callable, steps: int, peak_lr: float = 3e-3) -> None:
    """AdamW on assistant tokens only, of what `encode` gives: 5% linear warm-up, then a cosine down to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 20)
    start = time.time()
    for step in range(steps):
        batch = [next_example() for _ in range(32)]
        batch.sort(key=lambda pair: len(pair[0]))  # padded parts of like length: fewer tokens than one
        num_said = sum(label != -100 for _, labels in batch for label in labels)
        decay = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
        optimizer.param_groups[0]["lr"] = peak_lr * min((step + 1) / warmup, decay)
        loss = 0.0
        for part in (batch[i : i + 8] for i in range(0, len(batch), 8)):
            input_ids, labels = pad_right(part, pad_id)
            input_ids, shown = inputs_of_rows(input_ids)
            shown.pop("num_images", None)  # of TRL
            inputs = {"input_ids": input_ids, "labels": labels, "use_cache": False, **shown}
            part_loss = model(**inputs, num_items_in_batch=num_said).loss
            part_loss.backward()
            loss += part_loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1:4d}/{steps}  loss {loss:.3f}  {time.time() - start:.0f} s", flush=True)


def warm_start_twice(model: Any, tokenizer: Any, right: Callable, mixed: Callable, args: Any, recipe: str) -> None:
    """The warm start on conversations without mistakes, then on mixed ones. Save it and print what it can do."""
    warm_start(model, tokenizer.pad_token_id, right, args.steps)
    warm_start(model, tokenizer.pad_token_id, mixed, args.mixed_steps, peak_lr=1e-3)
    save(model.to(torch.bfloat16), tokenizer, args.output_dir, recipe)
