"""The way of a rollout's tokens from prompt to loss: how many definitions of ours they pass."""

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

# Definitions that no token passes through. They are entered on the way, and a reader of the tokens can leave them out.
LIMITS = {"_room", "result_limit", "_context", "cut_messages", "cut_far_beyond", "tokens", "new_tokens"}
LIMITS |= {"longest_turn"}
LAYOUT = {  # which rows go together, what a segment reads, and the proof of it before the first pass
    "cost", "fill", "units_of", "skips_first_pass", "_tensor", "mask", "kernel_of", "__len__",
    "common_length", "forget_masks", "num_trained", "prove", "pass_of_two",
    "to_pass", "fit", "without_autocast", "most_of_ranks",
}  # fmt: skip
LOGGING = {
    "conversation_columns",
    "conversation_metrics",
    "credit_metrics",
    "_log_metrics",
    "_log_step",
    "add",
    "mean_per_rollout",
    "_write",
    "staleness_metrics",
    "versions_of",
    "_mode",
    "tokens_read_again",
}
ALTERED = {
    "converse_whole",
    "keep_whole",
    "check_turns",
    "first_unknown",
    "num_ids",
    "greatest_id",
    "place",
    "__setattr__",
}  # by an environment
FAULTS_AND_STOPPING = {
    "_on_all_ranks", "raise_on_all_ranks", "_stop_if_asked", "start_in_background",
    "gather_all", "__init__", "_sync_weights", "check_conversations",
    "compare_ranks", "failed", "complete", "rows_of_step", "start_next",
    "_in_its_place", "is_cut_off",
}  # fmt: skip
TOKEN_CHECKS = {
    "check_rollouts", "check_batch", "check_ids", "check_text", "compare", "variants", "without_end",
    "squeezed", "pieces", "text_of_turn", "add", "id_hash",
}  # fmt: skip
TEXTS = {  # calls, results and control tokens as text
    "read_call", "parts_of_schema", "signature_of", "type_name", "hints_of", "shown_result", "read",
    "call_tool", "run_tool", "as_text", "start_thread",
    "parse_call", "result_message",
    "messages", "_state_key", "_tokenizer", "with_system_prompt", "neutralise", "neutralise_json",
    "neutralise_messages", "clean", "forbidden_in", "cut_to_tokens", "control_pattern", "is_control",
    "pattern_of", "message_tokens", "around_messages", "added_tokens", "digest_of",
}  # fmt: skip
TEXTS |= {  # where a turn ends, and what it says
    "cut", "next_stops", "stopped_early", "text", "parse", "parse_text", "parse_tags", "thinking_length", "load_json",
    "is_nested", "prefill", "_opened_in",
    "_before", "_end_of_turn", "results", "with_turns", "has_observation", "tool_seconds",
    "is_json_type", "clean_text", "as_result", "completion", "tool_calls", "messages_with_results",
}  # fmt: skip
TEMPLATE = {
    "format_of",
    "prompt",
    "with_reasoning",
    "suffix",
    "_render",
    "text_ids",
    "_decode",
}
ENVIRONMENT = {"failures_end", "run_calls", "shares_state", "ask", "end", "close"}
LISTS = {
    "per_token",
    "join",
    "owners",
    "loss_mask",
    "logprobs",
    "trained_records",
    "compare_ranks",
    "trained_rollouts",
    "zeros_where_untrained",
}  # as completion_ids, which is on the way
ROWS = {"data_of", "column_lists", "prompts_of", "rows_for_trl"}
PICTURES = {  # of which this run has none
    "read_pictures", "read_row", "images_of", "image_parts", "reader_of", "results_of", "readable_messages",
    "is_picture",
    "pictures_in", "shown", "features_of", "inputs_of_rows", "positions_of",
    "placeholders_of", "with_places", "placed", "of_columns", "own_results", "with_marks_of",
    "is_image",
}  # fmt: skip
MAIN_THREAD = {"call_in_time"}  # where synchronous rewards run
NUMBERS = {  # rewards and advantages per turn
    "run_rewards", "own_copy", "reward_tensors", "check_reward_values", "turn_flags", "_calculate_rewards",
    "numbers_that_move", "count_used", "reward", "reward_metrics", "pass_inputs", "__post_init__",
    "nansum", "check_advantages", "norm", "nanstd", "turn_total", "rollout_turn_advantages",
    "pad_rows", "turn_advantages", "mt_grpo_advantages", "score", "score_all_ranks", "choose_records",
    "own", "_advantages", "_group_size", "weighted", "logged",
    "noise_apart", "is_finite", "asked_of", "scores_of_trainer", "_score", "_before_credit",
    "log_rewards", "warn_of_uncounted",
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
    """At most 20 definitions of ours to TRL's loss, and 9 for rows that share prompts, in at most 520 lines.

    In the script the conversation stands above the step.
    """
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
    names = set(entered.values())
    aside = LIMITS | LOGGING | FAULTS_AND_STOPPING | TOKEN_CHECKS | TEXTS | TEMPLATE | ENVIRONMENT | LISTS | NUMBERS
    aside |= ROWS | MAIN_THREAD | PICTURES | ALTERED | LAYOUT
    assert aside <= names, f"never entered: {sorted(aside - names)}"
    aside |= {"finished"}  # an async tool of an earlier test may end on the loop meanwhile
    way = {place: name for place, name in entered.items() if name not in aside}
    assert {"take_turn", "suffix_ids", "token_advantages", "pad_turn_ids", "_generate"} <= set(way.values())
    assert len(way) <= 29, " ".join(sorted(way.values()))
    assert sum(length_of(*place) for place in way) <= 520
    script = {name: line for (file, line), name in way.items() if file == "mt_grpo_trainer.py"}
    assert script["start"] < script["take_turn"] < script["append"] < script["token_advantages"]
    assert script["token_advantages"] < script["_generate_and_score_completions"] < script["_generate"]
    assert script["_generate"] < script["_roll_out"]
