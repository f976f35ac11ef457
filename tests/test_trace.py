"""The way of a rollout's tokens from prompt to loss: which definitions of ours they pass, and how long these are."""

import ast
import sys
import threading
from pathlib import Path

import torch
from datasets import Dataset

from mt_grpo.base.event_loop import run_async
from mt_grpo.rollout import Generation
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv

ROOT = Path(__file__).resolve().parents[1]
CALL = '<tool>{"name": "echo", "args": {"text": "hi"}}</tool>'

WAY = {  # the definitions of ours that tokens pass on their way to TRL's loss, except for those of rows and layouts
    "start", "prompt_ids", "converse", "take_turn", "sample_turn", "append", "suffix_ids", "completion_ids", "records",
    "history_ids", "_start_rollouts", "_roll_out", "_generate", "token_advantages", "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
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


def length_of(file: str, line: int) -> int:
    """Lines of the definition that begins there, its decorators included."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == line:
                return node.end_lineno - first + 1
    raise AssertionError(f"no definition begins at {file}:{line}")


def outcome(completions, **kwargs):
    return [float(i) for i in range(len(completions))]


def test_a_rollouts_tokens_pass_few_definitions(random_model, tmp_path):
    """They are short, and in the script the conversation stands above the step."""
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
    trainer.current_gradient_accumulation_steps = 1  # as `Trainer.train` sets it
    entered: dict[tuple[str, int], str] = {}  # (file, line) -> name

    def note(frame, event, argument):
        code = frame.f_code
        file = Path(code.co_filename)
        ours = file == ROOT / "mt_grpo_trainer.py" or file.is_relative_to(ROOT / "mt_grpo")
        if event == "call" and ours and "<" not in code.co_qualname:  # what is nested belongs to what it stands in
            entered[(str(file.relative_to(ROOT)), code.co_firstlineno)] = code.co_name

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
    way = {place: name for place, name in entered.items() if name in WAY}
    assert set(way.values()) == WAY and len(way) == len(WAY)
    assert sum(length_of(*place) for place in way) <= 290
    script = {name: line for (file, line), name in way.items() if file == "mt_grpo_trainer.py"}
    assert script["start"] < script["take_turn"] < script["append"] < script["token_advantages"]
    assert script["token_advantages"] < script["_generate_and_score_completions"] < script["_generate"]
    assert script["_generate"] < script["_roll_out"]
