"""The rollouts of a log are trained again: with the same gradient."""

import json
import math
from types import SimpleNamespace

import pytest
import records_batch as batch
import torch
from project import SMALL
from scripted import make_tokenizer

from mt_grpo.integrations.replay import logged
from mt_grpo.integrations.replay.rollouts import data_rows, replaying, rollout_of
from mt_grpo.reports.rollout_log import json_or_text, rollout_rows
from mt_grpo.rollout import Context, Rollout, StopReason, ToolCall, ToolResult, Turn
from mt_grpo.training.batch import Batch
from mt_grpo_trainer import MTGRPOConfig, MultiTurnToolEnv, RewardTable

LOGGED = logged.TURN_REWARD_FUNCS, logged.OUTCOME_REWARD_FUNCS
LOGGED_NUMBERS = (
    "loss reward num_tokens records/mean stop/environment_error turns/mean sampling/importance_sampling_ratio/mean "
    "sampling/sampling_logp_difference/max"
)
SETTINGS = dict(log_rollout_tokens=True, failed=(3,), at_once=(5,))


def train_again(model, out, source, with_rewards=False, **changes):
    """Train the rollouts of a log. Fails if anything is sampled."""
    script_args = SimpleNamespace(train_from_rollouts=str(source), reward_fn=with_rewards and logged.__file__)
    changes |= dict(funcs=LOGGED) if with_rewards else {}
    changes |= dict(rows=lambda: data_rows(str(source)), wrapped=lambda *settings: replaying(script_args, *settings))
    return batch.train(model, out, ratios=lambda tokenizer: SimpleNamespace(), **changes)


@pytest.mark.contract("train_from_rollouts")
@pytest.mark.differs  # the edited history is none that the template writes
@pytest.mark.parametrize("with_rewards", [False, True])
@pytest.mark.parametrize("edit", [None, batch.edit_one])
def test_the_gradient_is_that_of_the_step(edit, with_rewards, random_model, tmp_path):
    """The functions check each column that they get. One environment failed, one before anything was said."""
    first = batch.train(random_model, tmp_path / "first", edit, batch.Near, **SETTINGS)
    again = train_again(random_model, tmp_path / "again", tmp_path / "first", with_rewards)
    assert batch.distance(first["gradients"], again["gradients"]) < 1e-6
    for name in LOGGED_NUMBERS.split():
        assert again["log"][name] == pytest.approx(first["log"][name], rel=1e-6), name


def test_another_credit_on_the_same_conversations(random_model, tmp_path):
    first = batch.train(random_model, tmp_path / "first", None, batch.Near, **SETTINGS)
    other = batch.train(random_model, tmp_path / "other", None, batch.Near, credit_assignment="zero_sum", **SETTINGS)
    again = train_again(random_model, tmp_path / "again", tmp_path / "first", credit_assignment="zero_sum")
    assert batch.distance(other["gradients"], again["gradients"]) < 1e-6
    assert batch.distance(first["gradients"], again["gradients"]) > 0.01


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2, "steps_per_generation": 1}])
def test_one_step_or_all(changes, random_model, tmp_path):
    """In the order of the log. The first of two steps that are trained again changes what the second one computes.

    A step may sample several batches.
    """
    of_run = SETTINGS | changes | dict(max_steps=2, rows=lambda: batch.golden.ROWS[:2] * 2)
    first = batch.train(random_model, tmp_path / "first", None, batch.Near, **of_run)
    for source, expected in (("first", 2), ("first:0", 1)):
        again = train_again(random_model, tmp_path / f"{expected} again", tmp_path / source, max_steps=5, **changes)
        assert len(again["gradients"]) == expected  # the log ends before max_steps
        assert batch.distance(first["gradients"][:expected], again["gradients"]) < 1e-6


def test_each_rank_takes_its_own_rollouts(random_model, tmp_path, monkeypatch):
    """Four ranks with two rollouts each of groups of four. States that the run did not ask for are asked now."""
    batch.train(random_model, tmp_path / "first", None, batch.Near, log_rollout_tokens=True)
    config = MTGRPOConfig(**SMALL, output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4)
    script_args = SimpleNamespace(train_from_rollouts=str(tmp_path / "first"), reward_fn=None)
    env = replaying(script_args, config, MultiTurnToolEnv)([], None, state_key=len)  # the log has no keys
    rows, found = data_rows(str(tmp_path / "first")), []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        found += env.start([], rows=[rows[rank // 2]] * 2)
    texts = [each.turns[0].text for each in found]
    assert [f"rollout {i} of" in text for i, text in enumerate(texts)] == [True] * 8
    assert all([turn.state_key for turn in each.turns] == [*range(len(each.turns))] for each in found)


def test_a_turn_comes_back_as_it_was():
    """Every field of a rollout that a loss, a reward or an estimator reads."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    context = Context([{"role": "user", "content": "edited"}], [3, 4], 2)
    turns = [
        Turn([1, 2], [-0.5, -0.25], "a", "stop", [ToolCall("f", {"x": [1]}), ToolCall(None, {}, "no name")],
             [ToolResult("r", "tool", 0.5, 1.0)], None, [{"role": "tool", "content": "r"}], "so", [7], None, None,
             True, [1, 0], True, 0.5, {"k": {"n": 1}}, "state", False, 1.5, [], tools),
        Turn([5], [-1.0], "b", "length", answer="42", context=context, after=0, trained=False, open_thinking=True),
    ]  # fmt: skip
    first = [{"role": "user", "content": "first"}]
    rollout = Rollout([{"role": "user", "content": "q"}], [9, 8], 0, turns, StopReason.MAX_TOKENS, 0, {"answer": "42"})
    rollout.first_messages, rollout.reward = first, 0.75
    one, table = torch.tensor([0.25]), torch.tensor([[0.5, math.nan]])
    rewards = RewardTable(one, one, table, table > 0, table > 0, table.long())
    of_batch = Batch([rollout.row], 1, rollouts=[rollout], logged=torch.zeros(1, 0), rewards=rewards)
    columns = [{"loss_mask": [1, 0], "advantages": [0.0] * 2, "trainer_logprobs": None}] * 2
    (row,) = rollout_rows(of_batch, [0], [], table, one, [columns], make_tokenizer(""))
    row = json.loads(json_or_text(row))
    assert rollout_of(row, rollout.row) == rollout
    found = rollout_of(row, rollout.row, with_rewards=True).turns
    assert found[0].info == {"k": {"n": 1}, "logged": {"turn": 0.5, "rollout_turn": 0.25, "outcome": 0.25}}
    assert found[0].reward is None and found[0].results[0].reward is None
    assert logged.logged_turn([found]) == [[0.5, None]]
    assert logged.logged_rollout_turn([found]) == logged.logged_outcome([found]) == [0.25]


REFUSED = [
    (dict(num_generations=2), {}, "num_generations is 2, expected 4"),
    (dict(refill_groups=1), {}, "refill_groups is 1, expected 0"),
    (dict(eval_strategy="steps"), {}, "eval_strategy is steps, expected no"),
    (dict(per_device_train_batch_size=16), {}, "a batch of this run has 16 rollouts, and one of the log 8"),
    (dict(output_dir="first"), {}, "output_dir is the log's"),
    ({}, dict(log_rollout_tokens=False), "no tokens. Write it with log_rollout_tokens: true"),
    ({}, dict(log_rollouts=3), "has 3 of 8 rollouts. Write it with log_rollouts: 8"),
    ({}, dict(step=7), "has no rollouts of training of step 7"),
]


def test_batches_of_several_sizes_are_refused(random_model, tmp_path):
    """As of a run that was resumed with another `num_generations`."""
    for folder, changes in (("first", {}), ("other", {"num_generations": 2, "max_steps": 2})):
        changes |= {"log_rollout_tokens": True, "rows": lambda: batch.golden.ROWS * 2}
        batch.train(random_model, tmp_path / folder, None, batch.Near, **changes)
    later = [row for row in (tmp_path / "other/rollouts.rank0.jsonl").open() if json.loads(row)["step"] == 1]
    with open(tmp_path / "first/rollouts.rank0.jsonl", "a") as log:
        log.writelines(later)
    with pytest.raises(ValueError, match="differ in size"):
        train_again(random_model, tmp_path / "again", tmp_path / "first")


@pytest.mark.parametrize(("change", "of_log", "message"), REFUSED)
def test_what_is_refused(change, of_log, message, random_model, tmp_path):
    step = of_log.pop("step", None)
    batch.train(random_model, tmp_path / "first", None, batch.Near, **{"log_rollout_tokens": True, **of_log})
    source, out = tmp_path / ("first" if step is None else f"first:{step}"), change.pop("output_dir", "again")
    with pytest.raises(ValueError, match=message):
        train_again(random_model, tmp_path / out, source, **change)
