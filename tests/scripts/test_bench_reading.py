"""The benchmark of what a model reads behind a perfect search, without a model."""

import asyncio
import sys
from pathlib import Path

import mt_grpo_trainer as mt
from mt_grpo.rollout import Generation

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from bench import reading as bench  # noqa: E402


class Letters:
    """A tokenizer of characters."""

    def decode(self, ids):
        return "".join(map(chr, ids))

    def __call__(self, text, add_special_tokens):
        return type("Ids", (), {"input_ids": list(map(ord, text))})


def test_the_first_turn_is_the_question_and_the_second_the_models(monkeypatch):
    """The last message counts: the examples before it have questions and results, too."""

    async def asked(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        return Generation([1], [-0.5], "stop")

    monkeypatch.setattr(mt.VLLMServerClient, "generate", asked)
    client = bench.PerfectSearch(tokenizer=Letters())
    said = (
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>user\n<result>x</result><|im_end|>\n<|im_start|>assistant\nHe."
    )
    prompt = f'{said}<|im_end|>\n<|im_start|>user\nWho led "them"?<|im_end|>\n<|im_start|>assistant\n'
    first = asyncio.run(client.generate(list(map(ord, prompt)), 48))
    assert Letters().decode(first.token_ids) == (
        '<tool>{"name": "wiki_search", "args": {"query": "Who led \\"them\\""}}</tool><|im_end|>'
    )
    assert first.logprobs == [0.0] * len(first.token_ids)
    prompt += (
        "<tool>x</tool><|im_end|>\n<|im_start|>user\n<result>\nRollo.\n</result><|im_end|>\n<|im_start|>assistant\n"
    )
    assert asyncio.run(client.generate(list(map(ord, prompt)), 48)).token_ids == [1]


def test_a_row_of_the_table():
    result = {"result_found": 0.8, "exact_match": 0.04, "rewards": {"outcome": {"f1_reward_func": 0.06}}}
    assert bench.line("as it is", result, {"exact_match": 0.02, "pass_at_k": 0.06}) == (
        "| as it is | 0.80 | 0.04 | 0.12 | 0.02 | 0.06 |"
    )
