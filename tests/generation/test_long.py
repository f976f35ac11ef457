"""Thirty turns with a vLLM server: the numbers of a late turn are as right as those of the first one."""

import dataclasses
import statistics

import pytest
from project import ROOT, json_lines
from server_run import FLAGS
from warm_vllm import WarmVLLMServer

from mt_grpo_trainer import VLLMServerClient, main

pytest.importorskip("vllm")
# As a chat template that drops the thinking of earlier turns: of their texts the last characters remain.
FORGETS = """
import sys
sys.path.append({tools!r})
from running_total import RunningTotal

class Forgets(RunningTotal):
    def respond(self, rollout, turn):
        reply = super().respond(rollout, turn)
        first, last = len(rollout.prompt_messages), len(rollout.history) - len(turn.results)
        old = [{{**m, "content": m["content"][-12:]}} for m in rollout.history[first:last]]
        history = rollout.history[:first] + old + rollout.history[last:] + reply["messages"]
        return {{"history": history, "reward": reply["reward"]}}
"""


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    flags = [flag if flag != FLAGS[1] else "1024" for flag in FLAGS]
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with WarmVLLMServer(ROOT / "hf_recipes/tiny/chain-model", *flags, log=log) as server:
        yield server.port


@pytest.fixture
def train(port, tmp_path):
    """A function that trains the recipe, and returns the logs of its steps."""

    def run(*arguments):
        words = ["--vllm_server_port", port, "--output_dir", tmp_path / "out", *arguments]
        main(["--config", str(ROOT / "hf_recipes/tiny/long.yaml"), *map(str, words)])
        return [row for row in json_lines(tmp_path / "out/metrics.jsonl") if "reward" in row]

    return run


def assert_flat(rows, num_records=1.0):
    """Each turn from 1 to 30, and each depth, is within a factor of two of the mean of all."""
    assert all(row["turns/mean"] > 29.5 and row["records/mean"] > num_records - 0.5 for row in rows)
    for axis, least in (("turn", 30), ("depth", 4)):
        means, ratios = (
            [
                statistics.mean(values)
                for values in zip(*(row[f"by_{axis}/{name}"] for row in rows))
                if None not in values
            ]
            for name in ("logp_difference", "importance_ratio")
        )
        assert len(means) >= least and max(means) < 1e-5
        assert statistics.mean(means) / 2 < min(means) < max(means) < 2 * statistics.mean(means)
        assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-5)
    for row in rows:
        first, last = (row[f"sampling/logp_difference_{which}_turns"] for which in ("first", "last"))
        assert 0.5 < last / first < 2 and len(row["by_turn/entropy"]) == 30


def test_late_turns_are_as_right_as_the_first(train):
    assert_flat(train("--max_steps", 1))


def test_preflight_says_where_late_turns_are_wrong(train, monkeypatch, capsys):
    """A server whose logprobs are off by as much as it has read: in the last turns by 0.1."""
    generate = VLLMServerClient.generate

    async def off(self, prompt_ids, *arguments, **settings):
        found = await generate(self, prompt_ids, *arguments, **settings)
        return dataclasses.replace(found, logprobs=[value - len(prompt_ids) / 8000 for value in found.logprobs])

    monkeypatch.setattr(VLLMServerClient, "generate", off)
    with pytest.raises(SystemExit):
        train("--preflight")
    assert "logprobs of late turns: The server's logprobs and the trainer's differ by 0.0" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_recipe_stays_flat_and_learns(train):
    rows = train()
    assert_flat(rows)
    assert rows[-1]["reward"] > rows[0]["reward"] + 2


@pytest.mark.slow
def test_edited_histories_stay_flat(train, tmp_path):
    """Each turn is a record of its own."""
    (tmp_path / "forgets.py").write_text(FORGETS.format(tools=str(ROOT / "tools")))
    assert_flat(train("--max_steps", 2, "--environment", f"{tmp_path}/forgets.py:Forgets"), 30.0)


@pytest.mark.slow
def test_pushes_between_turns_stay_flat(train):
    """The next batch is sampled while this one is trained, with steps that hardly move the weights."""
    rows = train("--max_steps", 4, "--max_staleness", 1, "--learning_rate", 1e-9)
    assert_flat(rows)
    assert rows[-1]["rollout/staleness_max"] >= 1
