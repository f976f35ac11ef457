"""The log of rollouts: its columns, its segments, and what reads it."""

import json
import math
import re
from types import SimpleNamespace

import pandas
import pytest
import torch
from datasets import Dataset, load_dataset
from project import ROOT, json_lines
from test_first_batch import recipe_file

import mt_grpo_trainer as mt
from mt_grpo.reports import rollout_log
from mt_grpo.reports.rollout_log import read_rollouts, rollout_rows, turn_columns, turn_row, write_rollouts
from mt_grpo.rollout import Context, Generation, Record, Rollout, ToolCall, Turn
from mt_grpo.training.batch import Batch

PAGE = (ROOT / "docs/rollouts.md").read_text()
TURN = {"text", "answer", "finish_reason", "seconds", "calls", "results", "observation", "num_tokens", "num_read",
        "num_trained", "reward", "policy_versions", "mean_logprob", "min_logprob", "record", "after", "context",
        "tools"}  # fmt: skip
TOKENS = {"token_ids", "token_texts", "logprobs", "loss_mask", "advantages", "trainer_logprobs", "read_ids",
          "read_texts", "prompt_ids", "replay"}  # fmt: skip


def test_a_resumed_run_keeps_what_stood_there(tmp_path):
    """The rollouts and metrics of before its stop stay; a new run in the same folder begins both anew.

    Metrics are those of Trainer's history, NaN apart.
    """
    out = tmp_path / "out"
    arguments = ["--config", recipe_file(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, log_rollouts=3)]
    mt.main(arguments)
    first, logged = list(read_rollouts(out)), json_lines(out / "metrics.jsonl")
    assert set(first[0]["turns"][0]) == TURN
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in logged] == [1, 1] and logged[0]["reward"] == history[0]["reward"]
    for row, old in zip(logged, history):
        by_depth = {name for name in row if name.startswith("by_")}
        assert "NaN" not in json.dumps(row) and set(row) - by_depth == set(old) | {"epoch"}
    mt.main([*arguments, "--max_steps", "2", "--resume_from_checkpoint", str(out / "checkpoint-1")])
    both = list(read_rollouts(out))
    assert both[:3] == first and [row["step"] for row in both] == [0, 0, 0, 1, 1, 1]
    rows = json_lines(out / "metrics.jsonl")
    assert rows[:2] == logged and [row["step"] for row in rows] == [1, 1, 2, 2]
    for name in ("rollouts.rank0.00001.jsonl", "rollouts.rank1.00001.jsonl", "rollouts.rank1.jsonl", "notes.jsonl"):
        (out / name).write_text('{"step": 7}\n')  # of ranks that the new run does not have, too
    mt.main(arguments)
    assert [row["step"] for row in read_rollouts(out)] == [0, 0, 0]
    assert [row["step"] for row in json_lines(out / "metrics.jsonl")] == [1, 1]
    assert (out / "notes.jsonl").exists()


def test_an_answer_is_logged_as_it_is_in_the_data(tmp_path):
    """Of several types, too."""
    answers = [{"value": "a", "aliases": ["b"]}, {"other": None}, [1, "x"], "text", 3, None]
    path = tmp_path / "rollouts.rank0.jsonl"
    write_rollouts(path, [{"step": 0, "answer": each} for each in answers])
    assert [each["answer"] for each in read_rollouts(tmp_path)] == answers
    rows = Dataset.from_list(list(read_rollouts(tmp_path)), on_mixed_types="use_json")
    assert list(rows["answer"]) == answers


def test_the_columns_are_those_of_the_page(tmp_path, monkeypatch):
    """The segments load together by datasets and pandas, the closed and the open ones: every row once."""
    monkeypatch.setattr(rollout_log, "SEGMENT_BYTES", 20_000)
    mt.main(["--config", recipe_file(tmp_path, max_steps=3, save_strategy="no", log_rollout_tokens=True)])
    out = tmp_path / "out"
    rows = list(read_rollouts(out))
    closed = sorted(out.glob("rollouts.rank0.0*.jsonl"))
    assert [path.name for path in closed] == [f"rollouts.rank0.0000{n}.jsonl" for n in range(1, len(closed) + 1)]
    places = [(row["step"], row["index"]) for row in rows]
    assert len(closed) >= 2 and places == [(s, i) for s in range(3) for i in range(16)]
    table = load_dataset("json", data_files=str(out / "rollouts.rank*.jsonl"), split="train",
                         cache_dir=str(tmp_path / "cache"))  # fmt: skip
    assert sorted(zip(table["step"], table["index"])) == places
    frame = pandas.concat([pandas.read_json(path, lines=True) for path in closed])
    assert list(frame["index"][:16]) == list(range(16))
    first_cells = [line.split("|")[1] for line in PAGE.splitlines() if line[:3] == "| `"]
    named = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert all(set(row) == set(named) and (row["schema"], row["rank"]) == (1, 0) for row in rows)
    turns = [turn for row in rows for turn in row["turns"]]
    assert all(set(turn) == TURN | TOKENS for turn in turns)
    assert all(name in PAGE for turn in turns for name in turn)
    for row in rows:
        assert len(row["turns"]) == len(row["turn_rewards"]) == len(row["turn_advantages"])
        assert row["num_tokens"] == sum(turn["num_tokens"] + turn["num_read"] for turn in row["turns"])
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert said == [turn["text"] for turn in row["turns"]]
        assert row["policy_version"] - rows[0]["policy_version"] == row["step"]
    assert all(len(turn[name]) == turn["num_tokens"] == turn["num_trained"] for turn in turns
               for name in ("token_ids", "token_texts", "loss_mask", "advantages"))  # fmt: skip
    assert all(len(turn["read_ids"]) == len(turn["read_texts"]) == turn["num_read"] for turn in turns)
    assert all("".join(turn["token_texts"]).removesuffix("<|im_end|>") == turn["text"] for turn in turns)
    assert [row["group"] for row in rows[:16]] == [i // 8 for i in range(16)]
    weighted = [sum(value for value in row["rewards"].values() if value is not None) for row in rows]
    assert [row["reward"] for row in rows] == pytest.approx(weighted)
    called = next(turn for turn in turns if turn["results"] and not turn["results"][0]["error"])
    assert called["calls"][0]["name"] == "calculator" and called["calls"][0]["error"] is None
    assert set(json.loads(called["calls"][0]["arguments"])) == {"expression"}
    assert set(called["results"][0]) == {"text", "error", "seconds", "reward"}


def test_tokens_have_what_the_loss_reads_of_them():
    """Two rollouts of a batch of three; the history of the first was edited before its last turn.

    Row 0: prompt 1, turn 0 = 10 11, read 20, turn 1 = 30. Row 1: the second rollout failed. Row 2 is not logged.
    Row 3: prompt 7, turn 2 of the first rollout = 40, of which nothing is trained.
    """
    turns = [Turn([10, 11], None, "", "stop", observation_ids=[20]), Turn([30], None, "", "stop"),
             Turn([40], None, "", "stop", context=Context([], [7]))]  # fmt: skip
    edited, failed = Rollout([], [1], turns=turns), Rollout([], [1], turns=[Turn([50, 51], None, "", "stop")])
    records = [edited.records[0], Record([], []), Record([1], [Turn([60], None, "", "stop")]), edited.records[1]]
    output = {
        "tool_mask": torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]),
        "advantages": torch.tensor([[2.0, 2.0, 0.0, 3.0], [0.0] * 4, [9.0] * 4, [4.0, 0.0, 0.0, 0.0]]),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0, 0.0, -3.0], [0.0] * 4, [-9.0] * 4, [-4.0, 0.0, 0.0, 0.0]]),
    }
    assert turn_columns(output, records, [0, 1, 2, 0], [edited, failed]) == [
        [
            {"loss_mask": [1, 0], "advantages": [2.0, 2.0], "trainer_logprobs": [-1.0, -2.0]},
            {"loss_mask": [1], "advantages": [3.0], "trainer_logprobs": [-3.0]},
            {"loss_mask": [0], "advantages": [4.0], "trainer_logprobs": [-4.0]},
        ],
        [{"loss_mask": [0, 0], "advantages": [0.0, 0.0], "trainer_logprobs": None}],
    ]


def test_a_row_holds_what_every_record_read():
    """A main loop (turns 0 and 2), a sub-agent (1) and a branch behind turn 0 (3)."""
    call = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": NaN}'}}]
    side = [
        {"role": "system", "content": "Sum up.", "name": None},
        {"role": "assistant", "content": "", "tool_calls": call},
    ]
    branch = [{"role": "user", "content": [{"type": "text", "text": "Branch."}], "name": "bob"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": math.nan}}}]
    turns = [Turn([10], None, "zero", "stop", observation_ids=[20], tools=tools),
             Turn([11], None, "one", "stop", context=Context(side, [7]), info={"x": math.inf}),
             Turn([12], None, "two", "stop", after=0),
             Turn([13], None, "three", "stop", context=Context(branch, [8]))]  # fmt: skip
    turns[0].calls = [ToolCall("f", {"x": math.nan})]
    rollout = Rollout([{"role": "user", "content": "Main."}], [1], turns=turns)
    none, table = torch.zeros(1), torch.zeros(1, 4)
    rewards = SimpleNamespace(outcome=none, turn_total=none, rollout_turn=none, turn=table)
    batch = Batch([{}], 1, rollouts=[rollout], logged=torch.zeros(1, 0), rewards=rewards)
    columns = [{"loss_mask": [1], "advantages": [0.0], "trainer_logprobs": None} for _ in turns]
    (row,) = rollout_rows(batch, [0], [], table, none, [columns])
    assert row["messages"][: row["num_prompt_messages"]] == [{"role": "user", "content": "Main."}]
    found = row["turns"]
    assert [(turn["record"], turn["after"]) for turn in found] == [(0, None), (1, None), (0, 0), (2, None)]
    assert [turn["context"] for turn in found] == [
        None,
        [
            {"role": "system", "content": "Sum up.", "more": None},
            {"role": "assistant", "content": "", "more": json.dumps({"tool_calls": call})},
        ],
        None,
        [{"role": "user", "content": '[{"type": "text", "text": "Branch."}]', "more": '{"name": "bob"}'}],
    ]
    null = json.dumps(tools).replace("NaN", "null")  # JSON has no NaN: not every reader of the log takes it
    assert [turn["tools"] for turn in found] == [null, None, None, None]
    assert found[0]["calls"][0]["arguments"] == '{"x": null}' and row["info"][1] == '{"x": null}'


def test_a_turn_has_the_weights_and_logprobs_of_its_requests():
    """Of two requests: the first was sent with the weights of version 4, and 7 was pushed during the second."""

    def logged(logprobs=None, *of_requests):
        generations = [Generation([1], [0.0], "stop", None, versions) for versions in of_requests]
        row = turn_row(Turn([1, 2, 3], logprobs, "", "stop", generations=generations), {"loss_mask": [1, 1, 0]})
        return row["policy_versions"], row["mean_logprob"], row["min_logprob"], row["num_trained"]

    assert logged([-1.0, -3.0, -0.5], (4, 5), (6, 7)) == ([4, 7], -1.5, -3.0, 2)
    assert logged([-1.0, float("nan"), float("-inf")], (3, 3)) == ([3, 3], -1.0, -1.0, 2)
    assert logged(None, None) == (None, None, None, 2)  # a backend to which nothing is pushed while it generates


def fill(path, numbers):
    for number in numbers:
        write_rollouts(path, [{"step": number, "text": "x" * 100}])


def test_no_row_is_lost_where_a_segment_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_log, "SEGMENT_BYTES", 500)
    path, first = tmp_path / "rollouts.rank0.jsonl", tmp_path / "rollouts.rank0.00001.jsonl"
    fill(path, range(3))
    path.rename(first)  # killed before the next segment was opened
    assert [row["step"] for row in read_rollouts(tmp_path)] == [0, 1, 2]
    fill(path, range(3, 12))
    assert [row["step"] for row in read_rollouts(tmp_path)] == list(range(12))


def test_what_a_kill_or_a_model_leaves_takes_no_other_line_with_it(tmp_path, caplog):
    """Half of a line, half of a character in a call's JSON, and what an environment's info may hold."""
    path = tmp_path / "rollouts.rank0.jsonl"
    for name, text in (("10", '{"step": 10}\n'), ("2", '{"step": 2}\n{"ste')):
        (tmp_path / f"rollouts.rank{name}.jsonl").write_text(text)
    path.write_text('{"step": 0}\n{"step": 1, "te')
    write_rollouts(path, [{"step": 2, "text": "\ud83d", "reward": math.nan}])
    write_rollouts(path, [{"step": 3, "info": {(1, 2): 3}}])
    assert "Step 3: the rollouts could not be written" in caplog.text and "Training continues" in caplog.text
    assert path.read_text() == '{"step": 0}\n{"step": 2, "text": "\\ud83d", "reward": null}\n'
    assert [row["step"] for row in read_rollouts(tmp_path)] == [0, 2, 2, 10]
    assert f"{tmp_path}: 1 lines are not JSON" in caplog.text
