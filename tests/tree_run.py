"""A run of trees on one rank or two: used by distributed_worker.py. What a rollout samples depends on its index."""

import re

import torch
from datasets import Dataset

from mt_grpo.rollout import Generation
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv


def note(text: str) -> str:
    """Note a text.

    Args:
        text: The text.
    """
    return f"noted {text}"


class Scripted:
    """Calls as often as the rollout's index says, and answers then. A branch goes on from what its trunk has noted."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        noted = self.tokenizer.decode(prompt_ids).count("<result>")
        calls = (7 * index + index // 6) % 4
        text = f'<tool>{{"name": "note", "args": {{"text": "{index}"}}}}</tool>'
        text = text if noted < calls else f"<answer>{noted} {index}</answer>"
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Generation(ids, [-0.5] * len(ids), "stop")


def worth(completions, **kwargs):
    """Of what was noted and answered."""
    said = ["".join(message["content"] for message in completion) for completion in completions]
    return [sum(int(number) * (k + 1) for k, number in enumerate(re.findall(r"\d+", text))) % 11 / 10 for text in said]


def weights(trainer):
    """All of the policy's, one behind the other."""
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def make(model, out, world):
    """Four steps of three groups of two trees; with two ranks the second group is on both."""
    args = MTGRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=18 // world, num_generations=6, max_completion_length=800, max_steps=4,
        logging_steps=1, credit_assignment="tree", scale_rewards="none", disable_tqdm=True, save_strategy="steps",
        save_steps=2, learning_rate=1e-4, max_env_steps=3, seed=3, num_branches=2,
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"Note {n}."}]} for n in range(24)]
    trainer = MTGRPOEnvTrainer(
        model, MultiTurnToolEnv([note], None, 3), [], [worth], args=args, train_dataset=Dataset.from_list(rows)
    )
    trainer.llm = Scripted(trainer.processing_class)
    return trainer


def run_on_ranks(model, out, world):
    """What each step was trained on, and whether a run that is resumed in the middle comes to the same weights."""
    trainer = make(model, out, world)
    steps, log_step = [], trainer._log_step

    def noted(output, advantages):
        steps.append((torch.tensor(trainer.batch.num_copied), trainer.batch.rewards.outcome, advantages))
        log_step(output, advantages)

    trainer._log_step = noted
    trainer.train()
    points = (out / "checkpoint-2/branch_points.json").read_text()
    names = ("tree/", "reward", "num_tokens", "credit/", "turns/mean", "grad_norm")
    logs = [
        {name: value for name, value in row.items() if name.startswith(names)}
        for row in trainer.state.log_history if "reward" in row
    ]  # fmt: skip
    resumed = make(model, out, world)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return {"steps": steps, "logs": logs, "points": points, "weights": weights(trainer), "resumed": weights(resumed)}
