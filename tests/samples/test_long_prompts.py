"""Prompts that an environment makes longer than the context: no doing of the policy's."""

import json
import re

import pytest
from datasets import Dataset
from scripted import ANSWER, CHATML_TOKENIZER, Scripted
from test_trainer import settings

from mt_grpo.base.ranks import RunError
from mt_grpo.recipe.checks import limit_context, prepare_env
from mt_grpo.rollout import StopReason
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv


class Long:
    """Its prompt has as many letters more as its row says. Every rollout that it is asked about has a reward."""

    def reset(self, n=0, **row):
        return "x" * n

    def get_reward(self) -> float:
        return 1.0


def test_a_prompt_that_reset_makes_too_long_is_no_doing_of_the_policy():
    """No turn and no reward; the limit is named. A prompt that leaves room for one token is the policy's to use."""
    env = MultiTurnToolEnv([], None, tokenizer=CHATML_TOKENIZER, environment=Long, max_model_len=200)
    backend = Scripted([[], [], [ANSWER]])
    length = len(env.prompt_ids([{"role": "user", "content": ""}], CHATML_TOKENIZER))
    rows = [{"n": 200 - length + beyond} for beyond in (7, 0, -1)]
    beyond, full, one = env.generate([""] * 3, backend, rows=rows)["rollouts"]
    for rollout, got in ((beyond, 207), (full, 200)):
        assert rollout.stop_reason == StopReason.CONTEXT_LENGTH and rollout.turns == []
        assert rollout.failed and rollout.reward is None
        assert f"at least {got} tokens after reset, and the context has 200" in str(rollout.error)
    assert one.stop_reason == StopReason.CONTEXT_LENGTH and len(one.turns) == 1
    assert not one.failed and one.reward == 1.0 and one.error is None


@pytest.mark.parametrize("lengths", [[0, 9000, 0], [9000] * 3])
def test_prompts_that_reset_makes_too_long_are_not_trained(random_model, tmp_path, lengths):
    """One group of three has no reward, and is logged as it ended. Where all have none the run says what to raise."""

    def reward(completions, n, **kwargs):
        assert n == [0] * 8
        return [float(i % 2) for i in range(len(n))]

    rows = [{"prompt": [{"role": "user", "content": "go"}], "n": n} for n in lengths]
    args = settings(tmp_path, per_device_train_batch_size=12, num_generations=4, max_completion_length=8, max_steps=1)
    env = MultiTurnToolEnv([], None, environment=Long)
    trainer = MTGRPOEnvTrainer(
        random_model, env, [], [reward], args=MTGRPOConfig(**{**args, "log_rollouts": 12}),
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    if 0 not in lengths:
        with pytest.raises(RunError, match="all 12 rollouts.*PromptTooLong"):
            trainer.train()
        return
    trainer.train()
    log = [json.loads(line) for line in (tmp_path / "rollouts.rank0.jsonl").read_text().splitlines()]
    ended = [row for row in log if not row["turns"]]
    assert len(ended) == 4 and {row["stop_reason"] for row in ended} == {"context_length"}
    assert all("raise the context" in row["error"] and set(row["rewards"].values()) == {None} for row in ended)
    metrics = trainer.state.log_history[0]
    assert metrics["rewards/Long/mean"] == 1.0 and metrics["rewards/reward/mean"] == 0.5
    assert metrics["stop/context_length"] == pytest.approx(4 / 12) and metrics["reward"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    "args, given, limit",
    [
        ({}, None, r"model with a longer one \(max_position_embeddings\)"),
        ({}, 9000, r"model with a longer one \(max_position_embeddings\)"),
        ({}, 100, "max_model_len"),
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 4000}, None, "vllm_max_model_length"),
    ],
)
def test_the_limit_to_raise_is_the_one_that_binds(random_model, tmp_path, args, given, limit):
    env = MultiTurnToolEnv([], None, environment=Long, max_model_len=given)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "go"}]}] * 2)
    args = MTGRPOConfig(**settings(tmp_path, max_completion_length=8, **args))
    prepare_env(env, args, random_model, data, None, None)
    assert re.search(f"{limit}$", env.context_limit)
    limit_context(env, 50, "--max-model-len of the server at http://here")
    assert (env.max_model_len, env.context_limit) == (50, "--max-model-len of the server at http://here")
    limit_context(env, 60, "another")
    assert env.max_model_len == 50 and env.context_limit.endswith("http://here")
