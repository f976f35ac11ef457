"""The tiny model learns the games of gymnasium, and not if its rewards are shuffled."""

from pathlib import Path

import evaluate
import pytest

import mt_grpo_trainer as mt

ROOT = Path(__file__).resolve().parents[2]
SHUFFLED = """
import random

rng = random.Random(0)


def shuffled_return(environments, **kwargs):
    \"\"\"The games' returns, each given to another rollout.\"\"\"
    returns = [game.get_reward() for game in environments]
    rng.shuffle(returns)
    return returns


OUTCOME_REWARD_FUNCS = [shuffled_return]
"""


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("recipe, name, episodes, before, after, shuffled", [
    ("blackjack", "Blackjack-v1", 5000, -0.3, -0.15, -0.25),  # 5,000 hands have a standard error of 0.014
    ("frozen_lake", "FrozenLake-v1", 1000, 0.05, 0.8, 0.1),  # docs/credit.md has five other seeds
])  # fmt: skip
def test_the_model_learns(tmp_path, monkeypatch, recipe, name, episodes, before, after, shuffled):
    """`before` and `shuffled` are the most, `after` the least mean return."""
    monkeypatch.chdir(ROOT)
    path = f"hf_recipes/tiny/{recipe}.yaml"
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    control = ["--reward_fn", str(tmp_path / "shuffled.py")]
    returns = []
    for folder, arguments in (("", None), ("out", []), ("shuffled", control)):
        model = tmp_path / folder if folder else "hf_recipes/tiny/gym-model"
        if arguments is not None:
            with monkeypatch.context() as patch:
                if arguments:  # the games' own rewards do not count
                    patch.setattr("mt_grpo.training.rewards.environment_rewards", lambda *_: ([], []))
                mt.main(["--config", path, "--output_dir", str(model), "--disable_tqdm", "true", *arguments])
        result = evaluate.evaluate(str(model), path, episodes, progress=False)
        returns.append(result["rewards"]["outcome"][name])
    print("before, after, with shuffled rewards:", *returns)
    assert returns[0] < before and returns[1] > after and returns[2] < shuffled
