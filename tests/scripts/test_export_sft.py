"""Data for supervised training of a run's rollouts: the very ids, and 1 for what the loss had; what TRL trains."""

import json

import export_sft
import pytest
import yaml
from datasets import load_dataset
from project import ROOT, json_lines
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import mt_grpo_trainer as mt
from mt_grpo.reports.rollout_log import read_rollouts, write_rollouts

MODEL = ROOT / "hf_recipes/tiny/calculator-model"
EXAMPLE = [
    {"role": "user", "content": "What is 2 * 3?"},
    {"role": "assistant", "tool_calls": [{"name": "calculator", "arguments": {"expression": "2 * 3"}}]},
    {"role": "tool", "content": "6"}, {"role": "assistant", "content": "<answer>6</answer>"},
]  # fmt: skip

REWARDS = """
def exact_match_reward_func(rollout_turns, **kwargs):
    return [float(k % 3 > 0) for k in range(len(rollout_turns))]  # the bundled model learnt without examples

OUTCOME_REWARD_FUNCS = [exact_match_reward_func]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder of a run of two steps with examples before the question, the rollouts that it trained)."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "examples.json").write_text(json.dumps([EXAMPLE]))
    recipe = yaml.safe_load((ROOT / "hf_recipes/tiny/calculator.yaml").read_text())
    recipe |= {
        "model_name_or_path": str(MODEL), "tools_script": str(ROOT / "tools/calculator.py"), "max_steps": 2,
        "reward_fn": str(folder / "rewards.py"), "prompt_examples": str(folder / "examples.json"),
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 16, "log_rollout_tokens": True,
        "disable_tqdm": True,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "rewards.py").write_text(REWARDS)
    rollouts = []

    class Kept(mt.MTGRPOEnvTrainer):
        def _roll_out(self, rows):
            found = super()._roll_out(rows)
            rollouts.extend(found)
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mt, "MTGRPOEnvTrainer", Kept)
        mt.main(["--config", str(folder / "recipe.yaml")])
    return folder / "out", rollouts


def exported(run, path, *options):
    export_sft.main([str(run[0]), str(path), *map(str, options)])
    return json_lines(path)


@pytest.mark.contract("export_sft")
def test_ids_are_those_that_were_read_and_sampled(run, tmp_path):
    """Of each good rollout the row that the loss read: its ids, and 1 where its mask has 1."""
    rows = exported(run, tmp_path / "data.jsonl", "--min", "exact_match_reward_func=1")
    logged = [row for row in read_rollouts(run[0]) if row["rewards"]["exact_match_reward_func"] == 1.0]
    good = [run[1][row["step"] * 16 + row["index"]] for row in logged]
    expected = {
        json.dumps(r.prompt_ids + r.completion_ids): [0] * len(r.prompt_ids) + r.loss_mask
        for r in good if str(r.stop_reason) not in ("max_tokens", "max_turns", "context_length")
    }  # fmt: skip
    assert rows and {json.dumps(row["input_ids"]): row["assistant_masks"] for row in rows} == expected
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for row in rows:
        trained = tokenizer.decode([i for i, m in zip(row["input_ids"], row["assistant_masks"]) if m])
        assert trained and "<result>" not in trained and "What is" not in trained


def test_trl_trains_what_has_a_one(run, tmp_path):
    """`SFTTrainer` takes the rows as they are, and its loss has the tokens with 1 and no other."""
    rows = exported(run, tmp_path / "data.jsonl", "--min_reward", "1.0")
    trainer = SFTTrainer(
        str(MODEL), train_dataset=load_dataset("json", data_files=str(tmp_path / "data.jsonl"), split="train"),
        args=SFTConfig(str(tmp_path / "sft"), max_steps=1, per_device_train_batch_size=len(rows), use_cpu=True,
                       bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, max_length=None),
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    wanted = sorted([i for i, m in zip(row["input_ids"], row["assistant_masks"]) if m] for row in rows)
    assert sorted(labels[labels != -100].tolist() for labels in batch["labels"]) == wanted
    trainer.train()
    assert trainer.state.global_step == 1


def row_of(text, reward, step=0, **changes):
    return {
        "mode": "train", "error": None, "stop_reason": "answered", "turns": [{}], "reward": reward, "step": step,
        "rewards": {"right": reward}, "num_prompt_messages": 1,
        "messages": [{"role": "user", "content": text[0]}, {"role": "assistant", "content": text}], **changes,
    }  # fmt: skip


def test_which_rollouts_are_taken_and_their_records():
    """The best of a prompt first, then the latest; once each; none that failed, was cut off or was an evaluation's. A
    history that was edited: two records, each with the ids that it began with."""
    rows = [
        row_of("a1", 0.5), row_of("a2", 1.0, 1), row_of("a3", 1.0, 2), row_of("a3", 1.0, 3), row_of("b1", 0.2),
        row_of("b2", None), row_of("c1", 1.0, mode="eval"), row_of("c2", 1.0, error="died"),
        row_of("c3", 1.0, stop_reason="max_tokens"), row_of("c4", 1.0, turns=[]),
        row_of("c6", 1.0, stop_reason="agent_timeout"),
        row_of("c5", 1.0, stop_reason="environment_stop", turns=[{"finish_reason": "length"}]),
    ]  # fmt: skip

    def texts(*args):
        return [row["messages"][1]["content"] for row in export_sft.chosen(rows, *args)]

    assert texts(None, {}, None) == ["a3", "a2", "a1", "b1", "b2"]
    assert texts(0.5, {}, None) == ["a3", "a2", "a1"]
    assert texts(None, {"right": 0.2}, 1) == ["a3", "b1"]
    rows = [row_of("b1", None), row_of("b2", -0.5)]  # no number is not 0
    assert texts(None, {}, None) == ["b2", "b1"] and texts(None, {"right": -1.0}, None) == ["b2"]
    turns = [
        {"record": 0, "prompt_ids": [1, 2], "token_ids": [3, 4], "loss_mask": [1, 1], "read_ids": [5]},
        {"record": 0, "prompt_ids": None, "token_ids": [6], "loss_mask": [0], "read_ids": []},
        {"record": 1, "prompt_ids": [1, 7], "token_ids": [8], "loss_mask": [1], "read_ids": []},
        {"record": 2, "prompt_ids": [1, 9], "token_ids": [8], "loss_mask": [0], "read_ids": []},
    ]
    assert list(export_sft.ids_of({"turns": turns, "records": 3})) == [
        {"input_ids": [1, 2, 3, 4, 5, 6], "assistant_masks": [0, 0, 1, 1, 0, 0]},
        {"input_ids": [1, 7, 8], "assistant_masks": [0, 0, 1]},
    ]  # a record of which nothing is trained gives no row


def test_rollouts_with_images_are_refused(run, tmp_path, capsys):
    """Their ids stand for pictures, which no file of text has."""
    rows = list(read_rollouts(run[0]))
    assert all(row["images"] == [] for row in rows)
    rows[0]["images"] = [{"name": "3f2a0c9d11e4", "width": 56, "height": 56, "tokens": 4}]
    write_rollouts(tmp_path / "rollouts.rank0.jsonl", rows)
    with pytest.raises(SystemExit, match="read images, which the log has by name alone"):
        export_sft.main([str(tmp_path), str(tmp_path / "data.jsonl")])
