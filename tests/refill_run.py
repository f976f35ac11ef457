"""A run whose groups without signal are known: used by test_refill.py, and by distributed_worker.py on two ranks."""

import re
import signal

import torch
from datasets import Dataset
from project import SMALL

from mt_grpo.rollout import Generation
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv


def weights(trainer):
    """All of the policy's, one behind the other."""
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


DEAD = {1, 2, 3, 8}  # the prompts whose rollouts are all worth the same


class Scripted:
    """Answers with the prompt's number and whether the rollout's place in its group is even."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        number = re.search(r"What is (\d+)", self.tokenizer.decode(prompt_ids))[1]
        text = f"<answer>{number} {index % 2}</answer>"
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Generation(ids, [-0.5] * len(ids), "stop")


class Noted(MTGRPOEnvTrainer):
    """Keeps which prompts were asked for, those of each batch as it was trained, and what was sent to rewards."""

    stops_before = None  # this step

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.llm = Scripted(self.processing_class)
        self.asked, self.trained = [], {}

    def _start_rollouts(self, rows, which):
        self.asked += [int(rows[i]["number"]) for i in which[::2]]
        return super()._start_rollouts(rows, which)

    def training_step(self, *args, **kwargs):
        step = self.state.global_step
        if step == self.stops_before:
            self._stop_signal = signal.SIGTERM
            self._stop_if_asked()
        loss = super().training_step(*args, **kwargs)
        self.trained[step] = [int(row["number"]) for row in self.batch.rows[::2]]
        return loss


def make(model, out, dead=DEAD, prompts=12, environment=None, huge=None, **changes):
    seen = []

    def outcome(completions, number, rollout_turns, log_extra, log_metric, **kwargs):
        seen.append([int(n) for n in number[::2]])
        said = [completion[-1]["content"] for completion in completions]
        assert all(text.startswith(f"<answer>{n} ") for text, n in zip(said, number, strict=True))
        log_extra("said", said)
        if len(seen) == 1:
            log_extra("first", said)
        log_metric("calls", 1.0)
        return [1e25 if n == huge else 0.25 if n in dead else float(text[-10]) for n, text in zip(number, said)]

    args = dict(
        output_dir=str(out), per_device_train_batch_size=4, num_generations=2, max_completion_length=64, max_steps=5,
        shuffle_dataset=False, credit_assignment="outcome", refill_groups=2, learning_rate=1e-4, log_rollouts=8,
        lr_scheduler_type="linear", warmup_steps=0,
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"What is {n}?"}], "number": n} for n in range(prompts)]
    trainer = Noted(
        model, MultiTurnToolEnv([], system_prompt=None, environment=environment), [],
        [outcome], args=MTGRPOConfig(**{**SMALL, **args, **changes}), train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    trainer.seen = seen
    return trainer


def run_on_ranks(model, out, world):
    """Three groups of two on each step, of which the second is on both ranks where there are two."""
    settings = dict(per_device_train_batch_size=6 // world, max_steps=4, logging_steps=1)
    settings |= dict(save_strategy="steps", save_steps=2)
    trainer = make(model, out, **settings)
    steps = []
    log_step = trainer._log_step

    def noted(output, advantages):
        steps.append((torch.tensor([row["number"] for row in trainer.batch.rows]), advantages))
        log_step(output, advantages)

    trainer._log_step = noted
    trainer.train()
    names = ("refill/", "reward", "num_tokens", "credit/", "turns/mean")
    logs = [
        {name: value for name, value in row.items() if name.startswith(names) and "seconds" not in name}
        for row in trainer.state.log_history if "reward" in row
    ]  # fmt: skip
    resumed = make(model, out, **settings)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return {
        "steps": steps, "logs": logs, "seen": trainer.seen, "said": list(trainer._logs["extra"]["said"]),
        "trained": resumed.trained, "weights": weights(trainer), "resumed": weights(resumed),
    }  # fmt: skip
