"""Run by test_distributed.py on one and on two ranks: a scripted backend, the advantages before TRL shuffles them.

python tests/distributed_worker.py MODEL OUT [golden|records|passes|splits|refill|images]

With `golden` it runs the batch of golden_batch.py, whose values are written by hand; with `records` that of
records_batch.py, whose histories are edited; with `passes` the batches of random_batches.py, in TRL's layout
and ours; with `splits` some of these split in several ways; with `refill` that of refill_run.py, whose groups without
signal are replaced; with `images` that of vision_run.py.
"""

import os
import sys
import zlib
from pathlib import Path

import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import golden_batch as golden
import random_batches
import records_batch
import refill_run
import vision_run

from mt_grpo.rollout import Generation
from mt_grpo_trainer import CREDIT_ASSIGNMENTS, MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv

ROLLOUTS = 16
CASES = [(group_size, credit) for group_size in (16, 4) for credit in CREDIT_ASSIGNMENTS]


def echo(text: str) -> str:
    """Return the text.

    Args:
        text: What to return.
    """
    return text


class Scripted:
    """What it writes depends on the prompt and on the rollout's place in its group, never on the rank."""

    def __init__(self, tokenizer, group_size):
        self.tokenizer, self.group_size, self.turns = tokenizer, group_size, {}

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        turn = self.turns[index] = self.turns.get(index, -1) + 1
        asked = self.tokenizer.decode(prompt_ids).partition("user\n")[2][0]
        place = index % self.group_size + zlib.crc32(asked.encode()) % 3
        calls = place % (4 if index < ROLLOUTS // 2 else 2)  # up to 3 or up to 1: fewer turns on the second rank
        text = f'<tool>{{"name": "echo", "args": {{"text": "{asked}{place}"}}}}</tool>'
        text = text if turn < calls else f"<answer>{asked}{place * 7 % 5}</answer>"
        return Generation(self.tokenizer(text, add_special_tokens=False)["input_ids"], None, "stop")


def state_key(turns):
    """Two turns of a rollout can be in the same state; a text, whose hash differs between processes."""
    return f"after {min(len(turns), 2)}"


def per_turn(rollout_turns, **kwargs):
    return [[None if k == 1 else (len(t.text) + k + len(turns)) % 3 / 3 for k, t in enumerate(turns)]
            for turns in rollout_turns]  # fmt: skip


def per_rollout(rollout_turns, **kwargs):
    return [len(turns) / 4 for turns in rollout_turns]


def outcome(completions, answer, **kwargs):
    texts = [c[-1]["content"] for c in completions]
    if wrong := [(text, gold) for text, gold in zip(texts, answer, strict=True) if f"<answer>{gold}" not in text]:
        raise ValueError(f"graded by another row's answer: {wrong}")
    digits = [text[len("<answer>a")] for text in texts]
    return [None if digit == "3" else float(ord(digit) % 4) for digit in digits]


def run_case(model, out, group_size, credit):
    world = int(os.environ.get("WORLD_SIZE", 1))
    args = MTGRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=ROLLOUTS // world, num_generations=group_size, max_completion_length=512,
        credit_assignment=credit, max_env_steps=3, num_generations_eval=1 if group_size == 16 else 4,
        per_device_eval_batch_size=4, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": text} for text in "abcdefghijklm"]
    env = MultiTurnToolEnv([echo], system_prompt=None, max_steps=3, state_key=state_key)
    trainer = MTGRPOEnvTrainer(
        model, env, [per_turn, per_rollout], [outcome],
        turn_reward_weights=[1.0, 0.5], args=args, train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    trainer.llm = Scripted(trainer.processing_class, group_size)
    batch = [rows[i // group_size] for i in range(ROLLOUTS)]
    rank, share = trainer.accelerator.process_index, ROLLOUTS // world
    trainer.model.train()
    output = trainer._generate_and_score_completions(batch[rank * share : (rank + 1) * share])
    advantages = [row[: len(r.completion_ids)] for row, r in zip(output["advantages"], trainer.batch.rollouts)]
    metrics = {k: v[-1] for k, v in trainer._metrics["train"].items() if "seconds" not in k}

    trainer.llm = Scripted(trainer.processing_class, args.num_generations_eval)
    evaluation = trainer.evaluate()  # 13 prompts: no multiple of what the ranks take at a time
    return {"advantages": advantages, "metrics": metrics, "evaluation": evaluation}


def main():
    # Two threads of a loaded machine add in an order of their own: then a resumed run is not the same to the last bit.
    torch.set_num_threads(1)
    model, out = sys.argv[1], Path(sys.argv[2])
    world, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    if sys.argv[3:] == ["golden"]:
        results = {name: golden.run_case(model, out, name, world) for name in golden.CASES}
    elif sys.argv[3:] == ["records"]:
        results = records_batch.run_on_ranks(model, out, world)
    elif sys.argv[3:] == ["passes"]:
        results = random_batches.run_on_ranks(model, out)
    elif sys.argv[3:] == ["splits"]:
        results = random_batches.run_splits(model, out)
    elif sys.argv[3:] == ["refill"]:
        results = refill_run.run_on_ranks(model, out, world)
    elif sys.argv[3:] == ["images"]:
        results = vision_run.run_on_ranks(out, world)
    elif sys.argv[3:4] == ["images-by-server"]:
        results = vision_run.run_by_server(model, out, int(sys.argv[4]), world)
    else:
        results = {f"{size}-{credit}": run_case(model, out, size, credit) for size, credit in CASES}
    torch.save(results, out / f"{world}-{rank}.pt")


if __name__ == "__main__":
    main()
