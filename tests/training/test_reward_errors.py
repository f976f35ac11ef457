"""A reward that raises says file, line, rollout and row."""

import importlib.util
import re

import pytest
from test_rows import written
from test_trainer import settings

from mt_grpo.base.errors import RunError
from mt_grpo.recipe.data import load_rows
from mt_grpo.training.rewards import run_rewards
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv

REWARDS = """
import functools, json, time
calls, logged = [], []

def gold(answer):
    return answer["value"]  # line 6

def by_key(completions, answer, log_metric=None, **kwargs):
    calls.append(len(answer))
    log_metric and log_metric("seen", len(answer))
    return [float(len(gold(each))) for each in answer]  # line 11

def reads(completions, answer, **kwargs):
    return [float(len(json.loads(each))) for each in answer]  # line 14

async def awaited(completions, answer, **kwargs):
    return [1.0 / each for each in answer]  # line 17

def together(completions, answer, **kwargs):
    if len(answer) > 1:
        raise ValueError("the batch")  # line 21
    raise ValueError("a rollout")  # line 22

def once(completions, answer, **kwargs):
    calls.append(len(answer))
    if len(calls) == 1:
        raise ConnectionError("down")  # line 27
    return [0.0] * len(answer)

def slow(completions, answer, **kwargs):
    calls.append(len(answer))
    if len(answer) == 1:
        time.sleep(60)
    raise ValueError("all")

class Callable:
    __name__ = "callable_object"
    def __call__(self, completions, answer, **kwargs):
        raise ValueError("no number")  # line 39

bound = functools.partial(by_key, log_metric=None)
bound.__name__ = "bound"
"""


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS.lstrip("\n"))
    spec = importlib.util.spec_from_file_location("my_rewards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_of(func, answers, **columns):
    count = len(answers)
    columns = {"prompts": [[]] * count, "completions": [[]] * count, "answer": answers, **columns}
    with pytest.raises(RuntimeError) as raised:
        run_rewards([func], columns, 30.0)
    return str(raised.value)


def test_the_line_is_of_the_rewards_own_file_and_the_row_of_the_data(rewards, tmp_path):
    said = error_of(rewards.by_key, [{"value": "x"}, {"value": "y"}, {"text": "z"}, {"text": "z"}])
    assert f"({tmp_path}/my_rewards.py, line 5)" in said
    assert said.endswith('It raises this for rollout 2 alone, whose row is {"answer": {"text": "z"}}')


@pytest.mark.parametrize(
    "name, answers, place, rollout",
    [
        ("reads", ["[1]", "{", "[]"], r"my_rewards.py, line 13, which called .*json/decoder.py, line \d+", 1),
        ("awaited", [2, 1, 0], "my_rewards.py, line 16", 2),
        ("bound", [{}], "my_rewards.py, line 5", 0),
        ("Callable", ["a", "b"], "my_rewards.py, line 38", 0),
    ],
)
def test_functions_of_every_kind(rewards, name, answers, place, rollout):
    func = getattr(rewards, name)
    said = error_of(func() if name == "Callable" else func, answers)
    assert re.search(place, said) and f"for rollout {rollout} alone, whose row is" in said


@pytest.mark.parametrize("name, line", [("together", 20), ("once", 26)])
def test_a_row_is_named_only_where_it_alone_raises_the_same(rewards, name, line):
    """An error of the whole batch, at another line, and one that does not come back are of no row."""
    said = error_of(getattr(rewards, name), ["a", "b"])
    assert f"my_rewards.py, line {line}). It does not raise this" in said


def test_the_search_logs_nothing_and_has_an_end(rewards, monkeypatch):
    """Its calls are of single rollouts with the others' share of no metric. A slow one ends it."""
    metrics = []
    error_of(rewards.by_key, [{"value": "x"}, {}], log_metric=lambda name, value: metrics.append(value))
    assert rewards.calls == [2, 1, 1] and metrics == [2]
    rewards.calls.clear()
    monkeypatch.setattr("mt_grpo.training.rewards.SEARCH_SECONDS", 1.0)
    assert "It does not raise this for any single rollout" in error_of(rewards.slow, ["a", "b", "c"])
    assert rewards.calls == [3, 1]


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_names_the_number_of_the_row(random_model, tmp_path, rewards, evaluates):
    """In the data as it was given, whatever order the batch has; a rollout without a reward shifts nothing."""

    class Fails:
        def reset(self, fails=False, **row):
            if fails:
                raise ValueError("this row has no start")

    rows = [{"prompt": str(i), "answer": {"value": str(i)}, "fails": i < 2} for i in range(8)]
    rows[5]["answer"] = {"text": "five"}
    data = load_rows(written(tmp_path / "rows.jsonl", rows), "train")
    args = settings(tmp_path / "out", per_device_train_batch_size=16, num_generations=2, per_device_eval_batch_size=16)
    trainer = MTGRPOEnvTrainer(
        random_model, MultiTurnToolEnv([], None, environment=Fails), [], [rewards.by_key], args=MTGRPOConfig(**args),
        train_dataset=data, eval_dataset=data if evaluates else None,
    )  # fmt: skip
    kind = "test" if evaluates else "training"
    row = rf"\(row 5 of the {kind} data, counted from 0\)"
    with pytest.raises(RunError, match=rf"line 5\).*for rollout \d+ alone, whose row is .*five.* {row}"):
        trainer.evaluate() if evaluates else trainer.train()
