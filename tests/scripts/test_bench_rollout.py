"""The rollout benchmark: its shapes on a scripted backend, and a figure by hand (its table: docs/test_docs.py)."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from bench import rollout as bench
from scripted import add
from transformers import AutoTokenizer

from mt_grpo.rollout import Generation, StopReason
from mt_grpo_trainer import MultiTurnToolEnv

TINY = bench.common.ROOT / "hf_recipes/tiny/calculator-model"


class Scripted:
    """Calls the tool in the first turn and answers in the second; notes when it was asked."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []
        self.texts = ['<tool>{"name": "add", "args": {"a": 1, "b": 1}}</tool>', "<answer>2</answer>"]

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        self.asked.append((time.perf_counter(), len(prompt_ids)))
        await asyncio.sleep(0)
        second = "<result>" in self.tokenizer.decode(prompt_ids)
        ids = self.tokenizer(self.texts[second], add_special_tokens=False)["input_ids"]
        return Generation(ids, [0.0] * len(ids), "stop")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def scripted(tokenizer, waits):
    env = MultiTurnToolEnv([bench.delayed(add, waits)], None, tokenizer=tokenizer, max_turn_tokens=64)
    return env, bench.recorder(Scripted(tokenizer))


@pytest.mark.parametrize("shape, slow", [(bench.engine, 2.0), (bench.lockstep, 0.2)])  # room for a busy machine
def test_both_shapes_run_the_same_conversations(shape, slow, tokenizer):
    env, client = scripted(tokenizer, (0.1, slow))
    rollouts = shape(env, client, ["one", "two", "three", "four"], {})
    assert [r.stop_reason for r in rollouts] == [StopReason.ANSWERED] * 4
    assert [[t.observation for t in r.turns] for r in rollouts] == [["2", None]] * 4
    assert len(client.recorded) == 8
    for prompt_ids, sampled in client.recorded[-4:]:  # everybody's second turn comes after everybody's first
        assert "<result>" in tokenizer.decode(prompt_ids) and sampled > 5
    assert bench.longest_chain(rollouts, (0.1, slow)) == slow
    first_of_turn_two = client.asked[4][0] - client.asked[0][0]
    if shape is bench.lockstep:
        assert first_of_turn_two >= 0.6  # two waits of 0.1 s and two of 0.2 s, one after another
        assert client.asked[7][0] - client.asked[4][0] < 0.6  # then all at once
    else:
        assert 0.1 <= first_of_turn_two < slow  # before the slow tools are done


def test_the_chain_is_what_the_tools_slept():
    def turn(seconds):
        return SimpleNamespace(tool_seconds=seconds)

    rollouts = [
        SimpleNamespace(turns=[turn(0.06), turn(0.9), turn(0.0)]),  # 0.05 + 0.8
        SimpleNamespace(turns=[turn(0.7), turn(0.79)]),  # slow threads: 0.05 twice
    ]
    assert bench.longest_chain(rollouts, bench.WAITS[0.2]) == pytest.approx(0.85)
    assert bench.longest_chain(rollouts, bench.WAITS[0.0]) == 0.0 == bench.longest_chain([], (1.0,))
