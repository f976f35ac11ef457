"""Prompts that an environment makes longer than the context: no doing of the policy's."""

import pytest
from datasets import Dataset
from project import json_lines
from scripted import ANSWER, CHATML_TOKENIZER, Scripted
from test_trainer import settings

from mt_grpo.base.errors import RunError
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
    log = json_lines(tmp_path / "rollouts.rank0.jsonl")
    ended = [row for row in log if not row["turns"]]
    assert len(ended) == 4 and {row["stop_reason"] for row in ended} == {"context_length"}
    assert all("raise the context" in row["error"] and set(row["rewards"].values()) == {None} for row in ended)
    metrics = trainer.state.log_history[0]
    assert metrics["rewards/Long/mean"] == 1.0 and metrics["rewards/reward/mean"] == 0.5
    assert metrics["stop/context_length"] == pytest.approx(4 / 12) and metrics["reward"] == pytest.approx(1.5)
