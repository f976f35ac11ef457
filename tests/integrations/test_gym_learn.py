"""The tiny model learns the games of gymnasium, and not where its rewards are shuffled."""

import json
from pathlib import Path
from statistics import mean

import evaluate
import pytest

import mt_grpo_trainer as mt

ROOT = Path(__file__).resolve().parents[2]
MODEL = "hf_recipes/tiny/gym-model"
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


def train(recipe, name, folder, *arguments):
    """The game's return per step."""
    mt.main(["--config", recipe, "--output_dir", str(folder), "--disable_tqdm", "true", *arguments])
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [row[f"rewards/{name}/mean"] for row in history if "reward" in row]


def played(recipe, name, model, episodes):
    """The mean return of a model over so many episodes."""
    result = evaluate.evaluate(str(model), recipe, episodes, progress=False)
    return result["rewards"]["outcome"][name]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_model_learns_blackjack(tmp_path, monkeypatch):
    """5,000 hands have a standard error of 0.014."""
    monkeypatch.chdir(ROOT)
    recipe, name = "hf_recipes/tiny/blackjack.yaml", "Blackjack-v1"
    before = played(recipe, name, MODEL, 5000)
    train(recipe, name, tmp_path / "out")
    after = played(recipe, name, tmp_path / "out", 5000)
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    control = ["--reward_fn", str(tmp_path / "shuffled.py"), "--environment_reward_weight", "0"]
    train(recipe, name, tmp_path / "shuffled", *control)
    shuffled = played(recipe, name, tmp_path / "shuffled", 5000)
    print(f"{before:.3f} -> {after:.3f}; with shuffled rewards {shuffled:.3f}")
    assert before < -0.3 and after > -0.15 and shuffled < -0.25


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_model_learns_frozen_lake(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe, name = "hf_recipes/tiny/frozen_lake.yaml", "FrozenLake-v1"
    before = played(recipe, name, MODEL, 1000)
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    control = ["--reward_fn", str(tmp_path / "shuffled.py"), "--environment_reward_weight", "0"]
    for seed in ("42",):  # docs/credit.md has five others
        goal = train(recipe, name, tmp_path / seed, "--seed", seed)
        after = played(recipe, name, tmp_path / seed, 1000)
        shuffled = train(recipe, name, tmp_path / f"{seed}-shuffled", "--seed", seed, *control)
        print(f"seed {seed}: {before:.3f} -> {after:.3f} in {len(goal)} steps; shuffled: {mean(shuffled[-5:]):.3f}")
        assert before <= 0.05 and after >= 0.8 and mean(shuffled[-5:]) <= 0.1
