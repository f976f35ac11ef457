"""The tiny model learns through programs that speak each API, and not where its rewards are shuffled."""

import json
from pathlib import Path
from statistics import mean

import pytest

import mt_grpo_trainer as mt

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "hf_recipes/tiny/agent.yaml"
STEPS = 25
SHUFFLED = """
import random

rng = random.Random(0)


def shuffled_reward(environments, **kwargs):
    \"\"\"The agents' rewards, each given to another rollout of the same prompt.\"\"\"
    rewards = [agent.result.get("reward") for agent in environments]
    for first in range(0, len(rewards), 8):
        group = rewards[first : first + 8]
        rng.shuffle(group)
        rewards[first : first + 8] = group
    return rewards


OUTCOME_REWARD_FUNCS = [shuffled_reward]
"""
AGENTS = {
    "openai": "tools/agents/calculator.py:solve",
    "langgraph": "tools/agents/calculator_langgraph.py:solve",
    "openai-agents": "tools/agents/calculator_openai_agents.py:solve",
    "openai-agents, responses": "tools/agents/calculator_openai_agents.py:respond",
}


def exact_match(agent, folder, seed, shuffled=False):
    """The share of right answers, per step."""
    (folder / "shuffled.py").write_text(SHUFFLED)
    control = ["--reward_fn", str(folder / "shuffled.py"), "--environment_reward_weight", "0"] if shuffled else []
    mt.main([
        "--config", RECIPE, "--agent", agent, "--seed", str(seed),
        "--max_steps", str(STEPS), "--output_dir", str(folder / "out"), "--disable_tqdm", "true", *control,
    ])  # fmt: skip
    history = json.loads((folder / "out/trainer_state.json").read_text())["log_history"]
    steps = [row for row in history if "reward" in row]
    assert len(steps) == STEPS and all(row["stop/agent_error"] == row["stop/agent_timeout"] == 0.0 for row in steps)
    assert all(row["records/mean"] == 1.0 for row in steps)  # every history was repeated as it was sampled
    column = f"rewards/{agent.rpartition(':')[2]}/mean"
    return [row[column] for row in steps]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", AGENTS)
def test_the_model_learns_through(name, tmp_path, monkeypatch):
    """Over three seeds, against a control whose rewards are shuffled in each group."""
    monkeypatch.chdir(ROOT)
    gains = {False: [], True: []}
    for seed in (42, 43, 44):
        for shuffled in gains:
            folder = tmp_path / f"{seed}-{shuffled}"
            folder.mkdir()
            exact = exact_match(AGENTS[name], folder, seed, shuffled)
            gains[shuffled].append(mean(exact[-5:]) - mean(exact[:3]))
            print(f"{name}, seed {seed}, shuffled {shuffled}: {mean(exact[:3]):.2f} -> {mean(exact[-5:]):.2f}")
    assert mean(gains[False]) - mean(gains[True]) > 0.2, gains
