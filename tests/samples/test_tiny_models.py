"""The bundled calculator models: what warmed them up are rollouts, in both tool formats, and the Hermes one learns."""

import json
import random
from collections import Counter
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
from build import tiny as build
from evaluate import evaluate, load_recipe
from transformers import AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.recipe.data import make_arithmetic
from mt_grpo.recipe.plugins import load_tools

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {"xml": "hf_recipes/tiny/calculator.yaml", "hermes": "hf_recipes/tiny/calculator-hermes.yaml"}


def make_env(tool_format: str) -> tuple[mt.MultiTurnToolEnv, build.ChatFormat]:
    """The environment of a recipe, with room for the longest conversation, and its tool format."""
    script_args, args, model_args = load_recipe(str(ROOT / RECIPES[tool_format]), ["--max_completion_length", "900"])
    tokenizer = AutoTokenizer.from_pretrained(ROOT / model_args.model_name_or_path)
    env = mt.build_env(script_args, args, load_tools(str(ROOT / script_args.tools_script)), tokenizer)
    return env, env.format_of(tokenizer)


def rollout_of(env: mt.MultiTurnToolEnv, question: str, turns: list[list[int]]) -> tuple[list[int], list[int]]:
    """Ids and loss mask of a conversation in which the model samples these turns."""
    said = iter(turns)

    async def generate(prompt_ids, max_tokens, sampling_params=None, index=0):
        ids = next(said)
        return SimpleNamespace(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason="stop")

    out = env.generate(
        [env.with_system_prompt([{"role": "user", "content": question}])], SimpleNamespace(generate=generate)
    )
    return out["prompt_ids"][0] + out["ids"][0], [0] * len(out["prompt_ids"][0]) + out["mask"][0]


@pytest.mark.parametrize("tool_format", RECIPES)
def test_what_is_imitated_is_a_rollout(tool_format):
    """The same ids, and all that a rollout would train on is imitated; in the recipe's environment."""
    env, form = make_env(tool_format)
    rng, compared = random.Random(0), Counter()
    for row in make_arithmetic(150, seed=3):
        messages = build.make_conversation(row["question"], form, build.WRITINGS[tool_format], rng)
        if "the call failed" in str(messages):  # words that no tool says
            continue
        ids, labels = build.encode(messages, form, build.TOOLS)
        said = [form.tokenizer.encode(m["content"]) for m in messages if m["role"] == "assistant"]
        rolled, mask = rollout_of(env, row["question"], [[*turn, form.tokenizer.eos_token_id] for turn in said])
        assert rolled == ids[: len(rolled)]
        assert all(label == i for i, label, trained in zip(rolled, labels, mask, strict=False) if trained)
        compared[len(said)] += len(rolled) >= len(ids) - 1  # xml ends before the end of turn
        if tool_format == "hermes" and len(rolled) == len(ids):
            assert mask == [int(label != -100) for label in labels]
    assert compared[1] > 10 and compared[2] > 30 and compared[3] > 3


def test_the_hermes_model_calls_its_tool_and_has_room_to_learn():
    model = str(ROOT / "hf_recipes/tiny/calculator-hermes-model")
    result = evaluate(model, str(ROOT / RECIPES["hermes"]), num_problems=64, progress=False)
    assert 0.1 < result["exact_match"] < 0.6 and 0.5 < result["tool_executed"] < 0.9


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_hermes_model_learns(tmp_path, monkeypatch):
    """The whole recipe: minutes on two cores."""
    monkeypatch.chdir(ROOT)
    mt.main(["--config", RECIPES["hermes"], "--output_dir", str(tmp_path), "--disable_tqdm", "true"])
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    steps = [row for row in history if "reward" in row]
    exact = [row["rewards/exact_match_reward_func/mean"] for row in steps]
    assert len(exact) == 75 and mean(exact[:3]) < 0.6 and mean(exact[-10:]) > 0.8
    failures = [row["tools/failure_frequency"] for row in steps]
    assert mean(failures[:3]) > 0.1 and mean(failures[-10:]) < 0.05


IN_TRLS_SHAPE = """
from tools.calculator import calculator as compute


class CalculatorEnv:
    def __init__(self):
        self.reward = 0.0

    def reset(self, answer: str, **kwargs) -> str | None:
        self.answer, self.reward = answer, 0.0
        return None

    def calculator(self, expression: str) -> str:
        value = compute(expression)
        self.reward = max(self.reward, float(value == self.answer))
        return value

    calculator.__doc__ = compute.__doc__


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


ENVIRONMENT = CalculatorEnv
OUTCOME_REWARD_FUNCS = [reward_func]
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [42, 43, 44])
def test_the_hermes_model_learns_with_a_class_in_trls_shape(tmp_path, monkeypatch, seed):
    """The reward is read from the environment's state: whether a call computed the answer."""
    monkeypatch.chdir(ROOT)
    path = tmp_path / "theirs.py"
    path.write_text(IN_TRLS_SHAPE)
    mt.main([
        "--config", RECIPES["hermes"], "--tools_script", str(path), "--reward_fn", str(path),
        "--output_dir", str(tmp_path / "out"), "--disable_tqdm", "true", "--seed", str(seed),
    ])  # fmt: skip
    history = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    found = [row["rewards/reward_func/mean"] for row in history if "reward" in row]
    assert len(found) == 75 and mean(found[:3]) < 0.7 and mean(found[-10:]) > 0.85
    assert mean(found[-10:]) - mean(found[:3]) > 0.2
