"""The tiny models learn tools of every kind, and not by shuffled rewards; games of gymnasium; and through agents."""

import subprocess
import sys
from statistics import mean

import evaluate
import pytest
import yaml
from processes import wait_for_port
from project import ROOT, trained

# Each value goes to another rollout of the batch, so their mean, which is logged, is that of the real rewards.
SHUFFLED = """
import functools, importlib.util, random

spec = importlib.util.spec_from_file_location("original", {path!r})
original = importlib.util.module_from_spec(spec)
spec.loader.exec_module(original)
rng = random.Random(0)


def shuffled(function):
    @functools.wraps(function)
    def given(**kwargs):
        values = function(**kwargs)
        rng.shuffle(values)
        return values

    return given


TURN_REWARD_FUNCS = [shuffled(function) for function in original.TURN_REWARD_FUNCS]
OUTCOME_REWARD_FUNCS = [shuffled(function) for function in original.OUTCOME_REWARD_FUNCS]
"""


@pytest.fixture
def search_server():
    """That of hf_recipes/tiny/search.yaml."""
    command = [sys.executable, "scripts/serve_search.py", "--corpus", "hf_recipes/tiny/towns/corpus.jsonl"]
    process = subprocess.Popen([*command, "--port", "8010"], cwd=ROOT)
    try:
        wait_for_port(8010)
        yield
    finally:
        process.terminate()
        process.wait()


def exact_match(recipe, folder, *arguments):
    """Per step."""
    return [row["rewards/exact_match_reward_func/mean"] for row in trained(recipe, folder, *arguments)]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["tools-yaml", "mcp", "sandbox", "gsm8k-check", "search"])
def test_the_model_learns_a_tool(name, tmp_path, monkeypatch, request):
    """Up by 0.2 in what the recipe trains; with shuffled rewards it stays where it was."""
    if name == "search":
        request.getfixturevalue("search_server")
    recipe = f"hf_recipes/tiny/{name}.yaml"
    values = exact_match(recipe, tmp_path / "out")
    path = str(ROOT / yaml.safe_load((ROOT / recipe).read_text())["reward_fn"])
    (tmp_path / "shuffled.py").write_text(SHUFFLED.format(path=path))
    control = ["--reward_fn", str(tmp_path / "shuffled.py"), "--max_steps", "40"]
    with monkeypatch.context() as patch:  # nor do the rewards count that gsm8k-check's tool itself gives
        patch.setattr("mt_grpo.training.rewards.environment_rewards", lambda *_: ([], []))
        shuffled = exact_match(recipe, tmp_path / "shuffled", *control)
    first, last, flat = mean(values[:5]), mean(values[-10:]), mean(shuffled[-10:])
    print(f"{name}: {first:.2f} -> {last:.2f} in {len(values)} steps; shuffled {mean(shuffled[:5]):.2f} -> {flat:.2f}")
    assert last > first + 0.2 and flat < first + 0.1


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("recipe, name, episodes, before, after", [
    ("blackjack", "Blackjack-v1", 5000, -0.3, -0.15),  # 5,000 hands have a standard error of 0.014
    ("frozen_lake", "FrozenLake-v1", 1000, 0.05, 0.8),  # docs/credit.md has five other seeds
])  # fmt: skip
def test_the_model_learns_a_game(tmp_path, recipe, name, episodes, before, after):
    """`before` is the most and `after` the least mean return."""
    path = f"hf_recipes/tiny/{recipe}.yaml"
    trained(path, tmp_path)
    models = "hf_recipes/tiny/gym-model", str(tmp_path)
    results = [evaluate.evaluate(model, path, episodes, progress=False) for model in models]
    returns = [result["rewards"]["outcome"][name] for result in results]
    print("before, after:", *returns)
    assert returns[0] < before and returns[1] > after


AGENT_RECIPE = "hf_recipes/tiny/agent.yaml"
STEPS = 25
AGENTS = {
    "openai": "tools/agents/calculator.py:solve",
    "langgraph": "tools/agents/calculator_langgraph.py:solve",
    "openai-agents": "tools/agents/calculator_openai_agents.py:solve",
    "openai-agents, responses": "tools/agents/calculator_openai_agents.py:respond",
}


def exact_match_through(agent, folder, seed):
    """The share of right answers, per step."""
    steps = trained(AGENT_RECIPE, folder, "--agent", agent, "--seed", seed, "--max_steps", STEPS)
    assert len(steps) == STEPS and all(row["stop/agent_error"] == row["stop/agent_timeout"] == 0.0 for row in steps)
    assert all(row["records/mean"] == 1.0 for row in steps)  # every history was repeated as it was sampled
    return [row[f"rewards/{agent.rpartition(':')[2]}/mean"] for row in steps]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", AGENTS)
def test_the_model_learns_through_an_agent(name, tmp_path):
    """Over three seeds, from the first three steps to the last five."""
    exact = [exact_match_through(AGENTS[name], tmp_path / str(seed), seed) for seed in (42, 43, 44)]
    gains = [mean(each[-5:]) - mean(each[:3]) for each in exact]
    assert mean(gains) > 0.2, gains
