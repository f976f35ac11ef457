"""What the golden batches are recorded of: a recipe and what is changed in it, by the name of the case.

Together the cases cover each estimator, several losses, how rows and passes are made, the tool formats and the
integrations. Each one is as short as its feature allows.
"""

# Each setting that decides a number is written out, so that a golden stays as it is where only a default changes.
BASE = {
    "seed": 42,
    "max_steps": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "num_iterations": 1,
    "shuffle_dataset": True,
    "optim": "sgd",  # Adam divides by the gradient's size, which makes noise of rounding as large as anything
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "scale_rewards": "group",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "share_prompts": True,
    "mask_truncated_completions": False,
    "refill_groups": 0,
    "log_rollouts": 64,
    "log_rollout_tokens": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "dtype": "float32",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
COEF = {"turn_advantage_coef": 1.0}  # rejected by the estimators that do not read it
RETURNS = {**COEF, "turn_discount": 0.9, "scale_rewards": "none"}
CALCULATOR = {
    "dataset_size": 64, "max_env_steps": 2, "max_completion_length": 256, "max_turn_tokens": 64,
    "max_tool_response_tokens": 48, "credit_assignment": "mt_grpo", **COEF,
}  # fmt: skip
CHAIN = {
    **CALCULATOR, "max_env_steps": 5, "max_completion_length": 256, "max_turn_tokens": 20,
    "max_tool_response_tokens": 24,
}  # fmt: skip
TWO_BATCHES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
TWO_PASSES = {"max_steps": 2, "num_iterations": 2, "learning_rate": 1.0}
LORA = {
    "use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj", "down_proj"],
}  # fmt: skip


def qwen(expression: str) -> str:
    """A call as Qwen 3.5 writes it."""
    parameter = f"<parameter=expression>\n{expression}\n</parameter>"
    return f"I compute.\n<tool_call>\n<function=calculator>\n{parameter}\n</function>\n</tool_call>"


def moves(text: str) -> list[str]:
    """Moves in a game, a turn each."""
    return [f"<action>{move}</action>" for move in text.split()]


def case(
    recipe: str,
    *changes: dict,
    served: dict | None = None,
    texts: list[list[str]] | None = None,
    template: str | None = None,
    **more,
) -> dict:
    """A case.

    Args:
        recipe: In `hf_recipes/tiny`.
        changes, more: Settings on top of those of `BASE`.
        served: Attributes of the trainer and its `args` after a vLLM server sampled; the golden has its logprobs.
        texts: Turns of rollouts 0, 1, ... where samples of the model would show little; the last one repeats.
        template: One of TRL's chat templates instead of the model's own.
    """
    settings = dict(BASE)
    for change in (*changes, more):
        settings |= change
    recipe = f"hf_recipes/tiny/{recipe}"
    return {"recipe": recipe, "settings": settings, "served": served or {}, "texts": texts, "template": template}


CASES = {
    "calculator": case("calculator.yaml", CALCULATOR, eval_strategy="steps", eval_steps=1, eval_dataset_size=2,
                       per_device_eval_batch_size=8),
    "merged_grpo": case("calculator.yaml", CALCULATOR, TWO_BATCHES, max_steps=2, credit_assignment="merged",
                        loss_type="grpo", lr_scheduler_type="constant_with_warmup", warmup_steps=4),
    "zero_sum_dr_grpo": case("chain.yaml", CHAIN, credit_assignment="zero_sum", loss_type="dr_grpo",
                             turn_advantage_coef=0.5),
    "turn_return_twice": case("chain.yaml", CHAIN, RETURNS, TWO_PASSES, credit_assignment="turn_return", beta=0.1,
                              turn_advantage_coef=0.5),
    "gigpo": case("chain.yaml", CHAIN, RETURNS, credit_assignment="gigpo", outcome_in_return=True,
                  state_baseline="leave_one_out"),
    "progress_credit": case("chain.yaml", CHAIN, credit_assignment="progress_credit", turn_discount=0.5,
                            scale_rewards="batch"),
    "outcome_trl_rows": case("chain-sparse.yaml", CHAIN, TWO_BATCHES, credit_assignment="outcome",
                             share_prompts=False),
    "lora": case("calculator.yaml", CALCULATOR, LORA, TWO_PASSES, beta=0.1),
    "refill": case("calculator.yaml", CALCULATOR, refill_groups=2, num_generations=2, credit_assignment="outcome",
                   outcome_reward_weights=[1.0, 0.0]),
    "truncated": case("calculator.yaml", CALCULATOR, max_turn_tokens=27, mask_truncated_completions=True),
    "passes_bnpo": case("chain.yaml", CHAIN, loss_type="bnpo", max_tokens_per_pass=300),
    "environment": case("calculator.yaml", dataset_size=64, tools_script="tests/golden/environment.py",
                        max_env_steps=3, max_completion_length=256, max_turn_tokens=64,
                        credit_assignment="mt_grpo", turn_advantage_coef=0.5,
                        texts=[["I go on", " more", "stop"], ["more", "more", "more", "more"], ["stop"], ["fail"],
                               ["forget", "forget it", "stop"], ["more", "nothing"], ["go on", "go on", "stop"],
                               ["more", "forget", "go on", "stop"]]),
    "edited": case("chain.yaml", CHAIN, TWO_BATCHES, loss_type="grpo",
                   environment="tools/short_memory.py:ShortMemory"),
    "edited_trl_rows": case("chain.yaml", CHAIN, TWO_PASSES, share_prompts=False,
                            environment="tools/short_memory.py:ShortMemory"),
    "served": case("calculator.yaml", CALCULATOR, TWO_BATCHES,
                   served={"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
                           "vllm_importance_sampling_clip_max": 1.05, "vllm_importance_sampling_clip_min": 0.97}),
    "served_clipped": case("chain.yaml", CHAIN, TWO_PASSES,
                           served={"use_vllm": True, "vllm_importance_sampling_mode": "token_mask",
                                   "old_logps": "sampled",
                                   "vllm_importance_sampling_clip_max": 1.1,
                                   "vllm_importance_sampling_clip_min": 0.9}),
    "encyclopedia": case("encyclopedia.yaml", CALCULATOR, max_env_steps=3, max_turn_tokens=24),
    "hermes": case("calculator-hermes.yaml", CALCULATOR, scale_rewards="mean"),
    "sandbox": case("sandbox.yaml", CALCULATOR, max_completion_length=384, max_tool_response_tokens=64),
    "verl_tool": case("tools-yaml.yaml", CALCULATOR),
    "verl_check": case("gsm8k-check.yaml", CALCULATOR, max_completion_length=384, max_tool_response_tokens=64),
    "native": case("tools-yaml.yaml", CALCULATOR, tool_format="native", template="qwen3_5_nothink.jinja",
                   per_device_train_batch_size=4, max_completion_length=424, max_turn_tokens=200,
                   texts=[[f"{qwen('2 * 3')}\n{qwen('7 - ')}", "6"], [qwen("1 / 0"), qwen("5 + 5"), "10"], ["4"],
                          [qwen("8"), "<tool_call>\n<function=calculator"]]),
    "scheduler": case("scheduler.yaml", dataset_size=64, max_turns=4, max_completion_length=256, max_turn_tokens=64,
                      credit_assignment="outcome"),
    "agent": case("agent.yaml", COEF, dataset_size=64, max_model_calls=4, max_completion_length=256,
                  max_turn_tokens=64, credit_assignment="mt_grpo"),
    "mcp": case("mcp.yaml", CALCULATOR),
    "blackjack": case("blackjack.yaml", RETURNS, dataset_size=64, max_env_steps=3, max_completion_length=400,
                      max_turn_tokens=40, credit_assignment="turn_return", beta=0.3,
                      texts=[moves("hit stick stick"), moves("stick"), moves("hit"), ["I stay."]]),
    "frozen_lake": case("frozen_lake.yaml", RETURNS, max_env_steps=6, max_completion_length=600, max_turn_tokens=40,
                        credit_assignment="gigpo", outcome_in_return=True, state_baseline="mean", num_generations=4,
                        per_device_train_batch_size=4, turn_advantage_coef=0.5,
                        texts=[moves("right right down down down right"), moves("down right"),
                               moves("down up down up down up down"), moves("right left swim down down right down")]),
    "zoom": case("zoom.yaml", CALCULATOR, dataset_size=16, max_completion_length=160, max_turn_tokens=32),
}  # fmt: skip
