"""`vllm_mode: colocate` on a CPU: everything but the last call that hands a weight to the engine is what GPUs run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.common import ROOT
from test_first_batch import recipe_file
from transformers import AutoTokenizer

from mt_grpo.generation.in_process import InProcessBackend
from mt_grpo.reports.rollout_log import read_rollouts
from mt_grpo_trainer import MultiTurnToolEnv

SERVED = ROOT / "hf_recipes/tiny/calculator-vllm.yaml"
TINY = ROOT / "hf_recipes/tiny/calculator-model"
WORKER = ROOT / "tests/colocated_worker.py"
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", "hf_recipes/accelerate/cpu.yaml"]
# The prompt ends inside the model's thinking, where a closing tag ends no turn.
BEGUN = "assistant\n<think>{% endif %}"
IN_THINKING = (TINY / "chat_template.jinja").read_text().replace("assistant\n{% endif %}", BEGUN)


def colocated(tmp_path, part, *arguments, launch=(), **changes):
    """What the worker says of a run of the calculator recipe with its engine in the training process."""
    pytest.importorskip("vllm")
    keys = {"vllm_mode": "colocate", "vllm_max_model_length": 640, "log_rollouts": 16, "log_rollout_tokens": True,
            "vllm_server_host": None, "vllm_server_port": None, "weight_sync": None, "max_steps": 6,
            **changes}  # fmt: skip
    recipe, out = recipe_file(tmp_path, SERVED, **keys), tmp_path / f"{part}.json"
    command = [sys.executable, *launch, str(WORKER), str(out), part, "--config", recipe, "--disable_tqdm", "true"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, text=True, timeout=280,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(out.read_text())


def turns_of(folder):
    """The logged turns. One that was cut off filled max_turn_tokens, or what remained of max_completion_length."""
    rows = list(read_rollouts(Path(folder) / "out"))
    cut = [(turn["num_tokens"], row["num_tokens"]) for row in rows for turn in row["turns"]
           if turn["finish_reason"] == "length"]  # fmt: skip
    assert all(of_turn == 64 or of_rollout == 160 for of_turn, of_rollout in cut), cut
    return [turn for row in rows for turn in row["turns"]]


@pytest.mark.contract_slow("colocate")
@pytest.mark.slow
def test_a_colocated_engine_samples_from_the_weights_that_are_trained(tmp_path):
    """With TRL's syncs, with none, and with them again: the logprobs of both sides tell which.

    How far right weights differ depends on the policy and on the processor, so it is measured on the same tokens: what
    bfloat16 makes of the trainer's own weights. Of 12 batches the engine's were 0.5 to 1.3 times as far, and 14 to 94
    times with weights that are one to six steps old.
    """
    told = colocated(tmp_path, "train", learning_rate=1e-3)
    rows = told["steps"]
    assert told["dtype"] == "torch.bfloat16"  # vLLM's choice for a model that is stored in float32
    right = [row["sampling/sampling_logp_difference/mean"] for row in rows]
    differences = [*right, *told["without_sync"], *told["with_sync_again"]]
    times = [each / rounding for each, rounding in zip(differences, told["rounding"], strict=True)]
    with_sync, without_sync, again = times[:6], times[6:12], times[12:]
    assert len(again) == 6 and max(with_sync + again) < 3, times
    assert told["head_moved"] > 1e-3  # tied to the embedding: TRL names it once
    assert min(without_sync[2:]) > 10, times
    assert told["syncs"] == [47] * 12  # once before each batch: 46 weights of TRL and the head
    assert all(row["turns/mean"] > 1.5 for row in rows)


@pytest.mark.slow
def test_its_turns_end_as_those_of_a_server(tmp_path):
    """At the first closing tag or at the end of turn, which are among the sampled ids; results are only read."""
    told = colocated(tmp_path, "plain", max_steps=2)
    turns, end = turns_of(tmp_path), AutoTokenizer.from_pretrained(TINY).eos_token_id
    assert len(turns) > 40 and {turn["finish_reason"] for turn in turns} <= {"stop", "length"}
    stopped = [turn for turn in turns if turn["finish_reason"] == "stop"]
    closed = [turn for turn in stopped if turn["token_ids"][-1] != end]
    assert len(stopped) > 0.8 * len(turns) and len(closed) > 0.5 * len(turns)
    for turn in closed:
        text = "".join(turn["token_texts"])
        assert text.endswith(("</tool>", "</answer>")) and text.count("</tool>") + text.count("</answer>") == 1
    assert all(len(turn["logprobs"]) == len(turn["token_ids"]) == turn["num_trained"] for turn in turns)
    assert any(turn["read_ids"] for turn in turns) and told["beyond"] == []
    assert all(row["tokens/ids_differ"] == row["tokens/text_differ"] == 0 for row in told["steps"])


@pytest.mark.slow
def test_weights_of_a_checkpoint_reach_the_engine(tmp_path):
    """Loaded at the step of the last sync, so that the step does not tell. Then another process goes on from it."""
    keys = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3}
    told = colocated(tmp_path, "checkpoint", **keys)
    assert told["step"] == told["last_sync"] == 2
    assert told["differences"][0] < 5e-3, told  # the engine held a final norm that was scaled by 1.5
    told = colocated(tmp_path, "plain", "--resume_from_checkpoint", str(tmp_path / "out/checkpoint-2"),
                     **{**keys, "max_steps": 4})  # fmt: skip
    new = [row for row in told["steps"] if row["step"] > 2]
    assert [row["step"] for row in new] == [3, 4] and told["syncs"] == [47, 47]
    assert all(row["sampling/sampling_logp_difference/mean"] < 5e-3 for row in new)


@pytest.mark.slow
def test_an_adapter_reaches_the_engine_and_leaves_the_frozen_weights_as_they_are(tmp_path):
    """Merged into weights of half precision and taken out again, it would change them a little at each push."""
    told = colocated(tmp_path, "plain", max_steps=3, learning_rate=1e-2, use_peft=True, lora_dropout=0.0, lora_r=4,
                     lora_target_modules=["all-linear"], dtype="bfloat16")  # fmt: skip
    assert told["frozen"] > 30 and told["frozen_moved"] == [] and len(told["syncs"]) == 3
    right = [row["sampling/sampling_logp_difference/mean"] for row in told["steps"]]
    assert len(right) == 3 and max(right) < 0.05, right


@pytest.mark.slow
def test_two_ranks_have_an_engine_each(tmp_path):
    told = colocated(tmp_path, "plain", launch=LAUNCH, per_device_train_batch_size=8, max_steps=2, seed=7)
    assert told["syncs"] == [47, 47] and told["seed"] == 7
    assert all(row["sampling/sampling_logp_difference/max"] < 0.5 for row in told["steps"])
    assert {row["rank"] for row in read_rollouts(tmp_path / "out")} == {0, 1}


@pytest.mark.contract("colocate")
def test_a_batch_that_stops_at_a_text_was_not_cut_off():
    """As a colocated engine answers: shorter than the limit, with no end of turn behind the closing tag."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = IN_THINKING
    said = ["<tool>no</tool>", " is no call</think><answer>408</answer>"]
    asked = []

    def generate_batch(prompts, max_tokens):
        asked.append(max_tokens)
        return [tokenizer(said[len(asked) - 1])["input_ids"] for _ in prompts], None

    backend = InProcessBackend(generate_batch, lambda token: token == tokenizer.eos_token_id)
    env = MultiTurnToolEnv([], "Answer.", tokenizer=tokenizer, max_completion_length=100)
    (rollout,) = backend.serve([env.converse(rollout, backend) for rollout in env.start(["What is 12 * 34?"])])
    (turn,) = rollout.turns
    assert (turn.text, turn.answer, turn.finish_reason) == ("".join(said), "408", "stop")
    assert asked == [100, 100 - len(tokenizer(said[0])["input_ids"])] and rollout.stop_reason == "answered"
