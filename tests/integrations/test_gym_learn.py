"""The tiny model learns the games of gymnasium."""

import evaluate
import pytest
from project import ROOT, trained


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("recipe, name, episodes, before, after", [
    ("blackjack", "Blackjack-v1", 5000, -0.3, -0.15),  # 5,000 hands have a standard error of 0.014
    ("frozen_lake", "FrozenLake-v1", 1000, 0.05, 0.8),  # docs/credit.md has five other seeds
])  # fmt: skip
def test_the_model_learns(tmp_path, monkeypatch, recipe, name, episodes, before, after):
    """`before` is the most and `after` the least mean return."""
    monkeypatch.chdir(ROOT)
    path = f"hf_recipes/tiny/{recipe}.yaml"
    trained(path, tmp_path)
    models = "hf_recipes/tiny/gym-model", str(tmp_path)
    results = [evaluate.evaluate(model, path, episodes, progress=False) for model in models]
    returns = [result["rewards"]["outcome"][name] for result in results]
    print("before, after:", *returns)
    assert returns[0] < before and returns[1] > after
