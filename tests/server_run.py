"""A run against a real server, whose weights and rollouts are kept: used by tests of faults and of staleness."""

import asyncio
import functools
import re
import threading
import time
from collections import Counter, defaultdict
from importlib.util import find_spec

import pytest
import requests
import torch
from datasets import Dataset
from project import ROOT, SMALL
from transformers import AutoModelForCausalLM

from mt_grpo.generation.samples import versions_of
from mt_grpo.rollout import StopReason
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv

MODEL = ROOT / "hf_recipes/tiny/calculator-model"
CONTEXT = 640
FLAGS = ("--max-model-len", str(CONTEXT), "--logprobs-mode", "processed_logprobs")
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: bash scripts/setup.sh --test")


def replace_server(server):
    """Kill the server now, and have another one on its port in about half a minute; returns the thread."""
    server.kill()
    thread = threading.Thread(target=lambda: server.start().wait(), daemon=True)
    thread.start()
    return thread


def calculator(expression: str) -> str:
    """Evaluate a product of two integers.

    Args:
        expression: Such as `6 * 7`.
    """
    left, _, right = expression.partition("*")
    return str(int(left) * int(right))


def slow_calculator(seconds):
    """The calculator with a delay: `seconds(expression)`."""

    @functools.wraps(calculator)
    def slow(expression):
        time.sleep(seconds(expression))
        return calculator(expression)

    return slow


def answered(completions, answer, **kwargs):
    return [
        float(f"<answer>{gold}</answer>" in c[-1]["content"]) + len(c[-1]["content"]) / 100
        for c, gold in zip(completions, answer)
    ]


class Watched(MTGRPOEnvTrainer):
    """Keeps each batch's rollouts, the weights of every version, and which rollouts were set off when."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.weights, self.set_off, self.synced_with_prefetched = [], {}, [], []
        self.evaluated, self.begun, self.numbers, self.env.trainer = [], defaultdict(list), {}, self

    def _start_rollouts(self, prompts, which):
        flight, begun = super()._start_rollouts(prompts, which), sum(map(len, self.begun.values()))
        number = begun // len(prompts) if self.model.training else -1
        self.numbers |= {id(rollout): number for rollout in flight.rollouts}
        if self.model.training:
            self.set_off.append((self.state.global_step, list(which)))
            self.begun[number] += flight.rollouts
        return flight

    def _sync_weights(self):
        self.synced_with_prefetched.append((self.model.training, bool(self.in_flight.groups)))
        if self._weight_counter.version not in self.weights:
            state = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
            self.weights[self._weight_counter.version] = state
        super()._sync_weights()

    def _roll_out(self, prompts):
        rollouts = super()._roll_out(prompts)
        (self.batches if self.model.training else self.evaluated).append(rollouts)
        return rollouts

    def rows(self, key):
        return [row[key] for row in self.state.log_history if key in row]

    @property
    def held_version(self):
        """The version of the last push that has ended."""
        return self.client.servers[0].policy_version


def holding(is_held):
    """Conversations wait after a turn while `is_held(trainer, rollout, number)`, whatever the policy says in them.

    `number` is the place of their batch among those that were begun, and -1 in an evaluation.
    """

    class Holding(MultiTurnToolEnv):
        async def take_turn(self, rollout, llm, sampling_params=None):
            numbers, key = self.trainer.numbers, id(rollout)
            while rollout.turns and (key not in numbers or is_held(self.trainer, rollout, numbers[key])):
                await asyncio.sleep(0.02)
            await super().take_turn(rollout, llm, sampling_params)

    return Holding


def first_number(rollout):
    """Of its prompt, such as 12 of `What is 12 * 34?`."""
    return int(re.search(r"\d+", rollout.row["prompt"][-1]["content"])[0])


def make_trainer(
    port, tmp_path, tool=calculator, reward=answered, evaluates=False, trainer_class=Watched,
    env_class=MultiTurnToolEnv, prompts=30, model=MODEL, peft_config=None, check_every=1, **changes,
):  # fmt: skip
    values = SMALL | dict(
        output_dir=str(tmp_path), per_device_train_batch_size=16, num_generations=8, max_completion_length=120,
        max_turn_tokens=48, max_steps=3, learning_rate=1e-3, lr_scheduler_type="constant",
        use_vllm=True, vllm_mode="server", vllm_importance_sampling_mode="token_truncate",
        weight_sync_dir=str(tmp_path),
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"What is {a} * {b}?"}], "answer": str(a * b)}
            for a, b in zip(range(11, 11 + prompts), range(77, 20, -1))]  # fmt: skip
    tmp_path.mkdir(exist_ok=True)
    trainer = trainer_class(
        str(model), env_class([tool], "Use the calculator, then answer.", max_turn_tokens=48), [], [reward],
        vllm_server_host=port and "127.0.0.1", vllm_server_port=port, args=MTGRPOConfig(**values | changes),
        train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows[:2]) if evaluates else None,
        peft_config=peft_config,
    )  # fmt: skip
    trainer.weight_sync.CHECK_EVERY = check_every
    return trainer


@torch.no_grad()
def logprobs_under(state, rollout):
    """What a model with these weights gives the rollout's sampled tokens."""
    if not hasattr(logprobs_under, "model"):
        logprobs_under.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model = logprobs_under.model
    model.load_state_dict(state)
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(rollout.prompt_ids) - 1 :][torch.tensor(rollout.loss_mask, dtype=torch.bool)]


def assert_from_the_weights_of_its_version(trainer):
    """Every sampled token has the logprob that the weights of its turn's version give it, and no other's.

    A turn during which weights were pushed has a first part from the old ones, and the rest from the new ones. Returns
    how many turns were sent with the weights that the rollout began with (`first`) and how many with later ones, and
    of how many the tokens are from `two` weights: a push may come upon any turn, so that no test can say upon which.
    """
    kinds = Counter()
    first_weights = AutoModelForCausalLM.from_pretrained(MODEL).state_dict()
    apart = 0.0
    for rollout in (rollout for batch in trainer.batches + trainer.evaluated for rollout in batch):
        sampled = torch.tensor([p for p, m in zip(rollout.logprobs, rollout.loss_mask) if m])
        at = 0
        for turn in rollout.turns:
            here = slice(at, at + len(turn.token_ids))
            at = here.stop
            asked, came = versions_of(turn)
            fits = [(sampled - logprobs_under(trainer.weights[v], rollout)).abs()[here] < 1e-3
                    for v in range(asked, came + 1)]  # fmt: skip
            version, used = 0, set()  # the oldest that the next token can be from, and those of the tokens before
            for token in range(len(turn.token_ids)):
                while version < len(fits) and not fits[version][token]:
                    version += 1
                used.add(version)
            kinds["first" if asked == rollout.policy_version else "later"] += 1
            kinds["two"] += len(used) > 1
            assert version < len(fits), (rollout.policy_version, asked, came, token, turn)
        if rollout in trainer.batches[-1]:
            apart = max(apart, (sampled - logprobs_under(first_weights, rollout)).abs().max().item())
    assert apart > 0.01  # tokens of the first weights would have shown
    return kinds


def assert_whole(rollouts, limit=CONTEXT):
    """Records whose parts fit each other."""
    for rollout in rollouts:
        completion = rollout.completion_ids
        assert len(completion) == len(rollout.loss_mask) == len(rollout.turn_ids) == len(rollout.logprobs)
        assert rollout.stop_reason in set(StopReason)
        assert all(len(turn.token_ids) == len(turn.logprobs) for turn in rollout.turns)
        assert len(rollout.prompt_ids) + len(completion) <= limit


def paused(server) -> bool:
    return requests.get(f"{server.url}/is_paused", timeout=10).json()["is_paused"]
