"""The contract: what users rely on, one row each. A change that makes the code smaller may not lose a row.

`python -m pytest -m contract` runs the rows that need no server, `-m contract_server` those that need a real one, and
`-m contract_slow` those that learn for minutes (`bash scripts/test.sh --all`). A row is one or more tests that carry
its name: `@pytest.mark.contract("merged")`.
"""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent
MARKERS = ("contract", "contract_server", "contract_slow")

ROWS = {
    "method": (
        "script classes", "accelerate launch", "MultiTurnToolEnv.generate", "MultiTurnToolEnv.step",
        "VLLMServerClient.chat", "VLLMServerClient.generate", "VLLMServerClient.update_weights", "MTGRPOEnvTrainer",
        "xml", "hermes", "native", "triviaqa rewards", "wiki_search", "tools file", "recipe keys", "serving GPU",
        "outcome", "merged", "mt_grpo", "turn_return", "gigpo", "zero_sum", "progress_credit", "outcome_in_return",
        "state_baseline", "scale_rewards", "TRL gradients", "edited histories", "continuations", "images in rows",
        "images in results", "LoRA merged", "LoRA adapter", "old_logps", "refill_groups", "information gain",
        "LLM judge", "evaluation during training", "resuming", "kill",
    ),
    "engines": (
        "in process", "vLLM server", "several servers", "a server dies", "colocate", "SGLang by disk",
        "proof of weights", "max_staleness", "late_groups",
    ),
    "processes": ("DDP", "FSDP2", "ZeRO-3", "train.sh", "serve.sh", "Slurm"),
    "ms-swift": (
        "scheduler step", "check_finished", "scheduler run", "step returns dict", "step returns a pair",
        "response_choice or result", "protocol objects", "external_plugins", "math_tip_trick",
        "math_tip_trick_multi_turn", "thinking_tips_scheduler", "response_token_ids", "response_loss_mask",
        "loss_scale", "rollout_infos", "trajectory_inputs", "data_dict", "media in rollout_infos", "ms-swift rewards",
        "max_turns", "completion_length_limit_scope", "ms-swift plug-ins",
    ),
    "verl": (
        "tools_config_file", "BaseTool", "tools_kwargs", "function tools", "interaction_config_file",
        "delta tokenization", "use_inference_chat_template", "GSM8K tool and interaction", "verl search tool",
        "verl images",
    ),
    "beyond": (
        "TRL environment classes", "OpenAI chat API", "OpenAI Responses API", "Anthropic API", "streaming",
        "agent by function", "agent by command", "token for token", "MCP", "gymnasium", "OpenEnv", "Harbor",
        "Python sandbox", "preflight", "viewer", "explain_credit", "evaluate", "export_sft", "one_file", "quickstart",
        "tour", "SmolLM2", "train_from_rollouts", "an integration in another package",
    ),
}  # fmt: skip


def marked() -> Counter:
    """How many tests carry each row's name, by reading the test files."""
    rows = Counter()
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("pytest.mark.") in MARKERS:
                rows.update(argument.value for argument in node.args)
    return rows


def test_each_row_has_a_test():
    rows = {row for group in ROWS.values() for row in group}
    assert sum(map(len, ROWS.values())) == len(rows)
    assert set(marked()) == rows
