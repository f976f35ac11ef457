"""Texts that begin alike: their ids are those of the whole text, and the beginning is tokenised once."""

import random
from pathlib import Path

import pytest
from scripted import QWEN3, make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mt_grpo.integrations import prefixes
from mt_grpo.integrations.prefixes import Newest, SharedPrefixes

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "tea",
    " water",
    "\n",
    "  ",
    "ß",
    '{"a": 1}',
    "<|im",
    "_end|>",
    "<tool_call>",
    "</think>",
    "é",
    " a",
    "7",
    ".",
]


def metaspace() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral write: a mark stands before the first word of a text, and of no later part."""
    vocab = {"\u2581": 0, "<unk>": 1, "<|im_end|>": 2, "<|im_start|>": 3}
    vocab |= {letter: 4 + k for k, letter in enumerate('abcdefghijklmnopqrstuvwxyz.{}:"1 7')}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"], "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def stripping() -> PreTrainedTokenizerFast:
    """One whose special tokens take the white space beside them."""
    tokenizer = make_tokenizer(QWEN3)
    tokenizer.add_tokens(
        [AddedToken(token, special=True, lstrip=True, rstrip=True) for token in ("<|im_end|>", "<|im_start|>")],
        special_tokens=True,
    )
    return tokenizer


TOKENIZERS = {
    "bytes": lambda: make_tokenizer(QWEN3), "metaspace": metaspace, "stripping": stripping,
    **{path.name: lambda path=path: AutoTokenizer.from_pretrained(path)
       for path in sorted((ROOT / "hf_recipes/tiny").glob("*-model"))},
}  # fmt: skip


def written(rng, turns):
    return "".join(
        f"<|im_start|>{rng.choice(['user', 'assistant', 'tool'])}\n{''.join(rng.choices(WORDS, k=rng.randrange(9)))}"
        "<|im_end|>\n"
        for _ in range(turns)
    )


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_the_whole_text(name):
    tokenizer, rng = TOKENIZERS[name](), random.Random(0)
    for _ in range(40):
        shared = SharedPrefixes(tokenizer)
        texts = [written(rng, rng.randrange(1, 9))]
        for _ in range(8):
            known = rng.choice(texts)
            texts.append(known[: rng.randrange(len(known) + 1)] + written(rng, rng.randrange(3)) + rng.choice(WORDS))
        for text in texts:
            assert shared.ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"], text
    assert id(tokenizer) not in prefixes.unfit


def test_a_beginning_is_tokenised_once():
    """Of three records of 4,000 characters that begin alike, as an agent's that edits its last message."""
    tokenizer, rng = make_tokenizer(QWEN3), random.Random(1)
    prefixes.tried[id(tokenizer)] = tokenizer  # the first one is tokenised completely, to see whether it may be shared
    begin = written(rng, 200)
    shared = SharedPrefixes(tokenizer)
    for k in range(3):
        shared.ids(f"{begin}<|im_start|>user\nThe {k}th question.<|im_end|>\n")
    assert len(begin) > 4000 and shared.num_characters < len(begin) + 400
    again = SharedPrefixes(tokenizer)
    for text in (begin, f"{begin}a", begin):
        again.ids(text).clear()  # who gets a list may change it
        assert again.ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_tokenizer_that_looks_behind_its_special_tokens_is_found_out(caplog):
    tokenizer = make_tokenizer(QWEN3)

    class Odd:
        is_fast, all_special_ids, all_special_tokens = True, tokenizer.all_special_ids, tokenizer.all_special_tokens
        unk_token = None

        def __call__(self, text, **settings):
            found = dict(tokenizer(text, **settings))
            return found | {"input_ids": [*found["input_ids"][:-1], len(text)]}  # it counts from the beginning

    odd = Odd()
    shared = SharedPrefixes(odd)
    for text in ("<|im_start|>a<|im_end|>b<|im_end|>c", "<|im_start|>a<|im_end|>b<|im_end|>d"):
        assert shared.ids(text) == odd(text, add_special_tokens=False)["input_ids"]
    assert "tokenised completely" in caplog.text and id(odd) in prefixes.unfit


def test_the_newest_are_kept_in_their_room():
    rng, kept, held = random.Random(0), Newest(50, len), []
    for _ in range(400):
        key = rng.randrange(12)
        assert kept.of(key, lambda size=key: "x" * (size * 2)) == "x" * (key * 2)
        held = [key, *(each for each in held if each != key)]
        room = [each for k, each in enumerate(held) if 2 * sum(held[: k + 1]) <= 50]
        held = held[: len(room)]
        assert list(kept.values) == held[::-1] and kept._total == 2 * sum(held) <= 50
