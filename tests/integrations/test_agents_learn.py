"""The tiny model learns through the agents in tools/agents."""

from statistics import mean

import pytest
from project import ROOT, trained

RECIPE = "hf_recipes/tiny/agent.yaml"
STEPS = 25
AGENTS = {
    "openai": "tools/agents/calculator.py:solve",
    "langgraph": "tools/agents/calculator_langgraph.py:solve",
    "openai-agents": "tools/agents/calculator_openai_agents.py:solve",
    "openai-agents, responses": "tools/agents/calculator_openai_agents.py:respond",
}


def exact_match(agent, folder, seed):
    """The share of right answers, per step."""
    steps = trained(RECIPE, folder, "--agent", agent, "--seed", seed, "--max_steps", STEPS)
    assert len(steps) == STEPS and all(row["stop/agent_error"] == row["stop/agent_timeout"] == 0.0 for row in steps)
    assert all(row["records/mean"] == 1.0 for row in steps)  # every history was repeated as it was sampled
    return [row[f"rewards/{agent.rpartition(':')[2]}/mean"] for row in steps]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", AGENTS)
def test_the_model_learns_through(name, tmp_path, monkeypatch):
    """Over three seeds, from the first three steps to the last five."""
    monkeypatch.chdir(ROOT)
    exact = [exact_match(AGENTS[name], tmp_path / str(seed), seed) for seed in (42, 43, 44)]
    gains = [mean(each[-5:]) - mean(each[:3]) for each in exact]
    assert mean(gains) > 0.2, gains
