"""The tiny models learn tools that come by YAML, from an MCP server and as programs, and not by shuffled rewards."""

import subprocess
import sys
from statistics import mean

import pytest
import requests
import yaml
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
        for _ in range(300):
            try:
                requests.get("http://127.0.0.1:8010/health", timeout=1).raise_for_status()
                break
            except requests.RequestException:
                assert process.poll() is None
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
    monkeypatch.chdir(ROOT)
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
