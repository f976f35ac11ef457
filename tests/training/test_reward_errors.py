"""A reward that raises says which function raised, and in which file and line."""

import functools
import importlib.util
import re

import pytest
from test_trainer import settings

from mt_grpo.base.errors import RunError
from mt_grpo.training.rewards import named_apart, run_rewards
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv

REWARDS = """
import json

def gold(answer):
    return answer["value"]  # line 4

def by_key(completions, answer, **kwargs):
    return [float(len(gold(each))) for each in answer]

def reads(completions, answer, **kwargs):
    return [float(len(json.loads(each))) for each in answer]  # line 10

async def awaited(completions, answer, **kwargs):
    return [1.0 / each for each in answer]  # line 13

class Callable:
    def __call__(self, completions, answer, **kwargs):
        raise ValueError("no number")  # line 17
"""


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS.lstrip("\n"))
    spec = importlib.util.spec_from_file_location("my_rewards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name, answers, said",
    [
        ("by_key", [{"value": "x"}, {}], "KeyError: 'value' .*my_rewards.py, line 4"),
        ("reads", ["[1]", "{"], r"JSONDecodeError.*my_rewards.py, line 10, which called .*json/decoder.py, line \d+"),
        ("awaited", [2, 0], "ZeroDivisionError.*my_rewards.py, line 13"),
        ("bound", [{}], "KeyError.*my_rewards.py, line 4"),
        ("Callable", ["a"], "ValueError: no number .*my_rewards.py, line 17"),
    ],
)
def test_the_line_is_of_the_rewards_own_file(rewards, name, answers, said):
    rewards.bound = functools.partial(rewards.by_key, log_metric=None)
    func = getattr(rewards, name)
    ((func,),) = named_apart([func() if name == "Callable" else func])
    columns = {"prompts": [[]] * len(answers), "completions": [[]] * len(answers), "answer": answers}
    with pytest.raises(RuntimeError) as raised:
        run_rewards([func], columns, 30.0)
    assert re.search(f"^Reward {func.__name__} raised {said}", str(raised.value)), raised.value


def test_a_run_that_ends_by_a_reward_says_so(random_model, tmp_path, rewards):
    args = settings(tmp_path / "out", per_device_train_batch_size=4, num_generations=2)
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "answer": {}} for i in range(2)]
    trainer = MTGRPOEnvTrainer(
        random_model, MultiTurnToolEnv([], None), [], [rewards.reads], args=MTGRPOConfig(**args), train_dataset=rows
    )
    with pytest.raises(RunError, match=r"Reward reads raised TypeError.*my_rewards.py, line 10"):
        trainer.train()
