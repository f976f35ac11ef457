"""The way of a rollout's tokens from prompt to loss: how many definitions of ours they pass."""

import sys
import threading
from pathlib import Path

import torch
from datasets import Dataset

from mt_grpo.event_loop import run_async
from mt_grpo.rollout import Generation
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv

ROOT = Path(__file__).resolve().parents[1]
CALL = '<tool>{"name": "echo", "args": {"text": "hi"}}</tool>'

# Definitions that no token passes through. They are entered on the way, and a reader of the tokens can leave them out.
LOGGING = {
    "conversation_metrics", "credit_metrics", "rollout_rows", "append_rollouts", "without_nan", "_log_metrics",
    "_log_step", "_write_rollouts", "_mode", "_note_end",
}  # fmt: skip
FAULTS_AND_STOPPING = {
    "_on_all_ranks", "raise_on_all_ranks", "_interruptions", "_stop_if_asked", "start_in_background", "run_async",
    "background_loop", "gather_all", "wait", "_take_prefetched", "get_batch_samples",
}  # fmt: skip
TOOLS_AND_REWARDS = {  # texts and numbers, no tokens
    "check_call", "signature_of", "call_tool", "run_tool", "as_text", "submit", "_run", "work", "deliver",
    "parse_turn",
    "parse_call", "run_rewards", "run", "run_in_turn", "on_device", "finish", "reward_tensors", "check_reward_values",
    "result_message", "messages", "fits_type", "turn_flags", "_state_key", "_tokenizer", "_sync_weights",
    "with_system_prompt", "_calculate_rewards", "nansum", "norm", "nanstd", "turn_total", "rollout_turn_advantages",
    "pad_rows",
}  # fmt: skip


def echo(text: str) -> str:
    """Return the text.

    Args:
        text: What to return.
    """
    return text


class Scripted:
    """A backend that calls the tool once and then answers."""

    def __init__(self, tokenizer):
        self.tokenizer, self.seen = tokenizer, {}

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        turn = self.seen[index] = self.seen.get(index, -1) + 1
        text = [CALL, f"<answer>{index}</answer>"][turn]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Generation(ids, [-1.0] * len(ids), "stop")


def outcome(completions, **kwargs):
    return [float(i) for i in range(len(completions))]


def test_a_rollouts_tokens_pass_few_definitions(random_model, tmp_path):
    """At most 20 definitions of ours, in about 400 lines; in the script they stand in the order of its sections."""
    args = MTGRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=4, num_generations=4, max_completion_length=256, max_steps=1, disable_tqdm=True,
        save_strategy="no", log_rollouts=0,
    )  # fmt: skip
    prompt = [{"role": "user", "content": "say hi"}]
    trainer = MTGRPOEnvTrainer(
        random_model, MultiTurnToolEnv([echo], system_prompt=None), [], [outcome], args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 4),
    )  # fmt: skip
    trainer.llm = Scripted(trainer.processing_class)
    trainer.model.train()
    entered: dict[tuple[str, int], str] = {}  # (file, line) -> name

    def note(frame, event, argument):
        code = frame.f_code
        file = Path(code.co_filename)
        ours = file == ROOT / "mt_grpo_trainer.py" or file.parent == ROOT / "mt_grpo"
        if event == "call" and ours and not code.co_name.startswith("<"):
            entered[(str(file), code.co_firstlineno)] = code.co_name

    async def note_here():  # the thread of the background loop is there already
        sys.setprofile(note)

    async def stop_noting():
        sys.setprofile(None)

    run_async(note_here())
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        batch = trainer._generate_and_score_completions([{"prompt": prompt}] * 4)
        loss = trainer._compute_loss(trainer.model, {**batch, "num_items_in_batch": torch.tensor(4.0)})
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        run_async(stop_noting())
    assert torch.isfinite(loss) and batch["tool_mask"].sum() > 0
    names = set(entered.values())
    unused = (LOGGING | FAULTS_AND_STOPPING | TOOLS_AND_REWARDS) - names
    on_the_way = {
        place: name for place, name in entered.items() if name not in LOGGING | FAULTS_AND_STOPPING | TOOLS_AND_REWARDS
    }
    assert {"take_turn", "message_ids", "turn_advantages", "token_advantages", "pad_turn_ids", "_generate"} <= names
    print(sorted(on_the_way.items()), sorted(unused))
    assert len(on_the_way) <= 20, sorted(on_the_way.values())
