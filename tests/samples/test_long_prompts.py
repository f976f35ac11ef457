"""Prompts that an environment makes longer than the context: no doing of the policy's."""

from scripted import ANSWER, CHATML_TOKENIZER, Scripted

from mt_grpo.rollout import StopReason
from mt_grpo_trainer import MultiTurnToolEnv


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
