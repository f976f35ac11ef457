"""Compare a whole step, generation included, with that of TRL's `GRPOTrainer`: tools, and four turns, on a CPU.

    python scripts/build/smollm2.py runs/SmolLM2-135M-Instruct    # for its tokenizer and its shape
    python scripts/bench/whole.py             # docs/results/whole.json and the section of docs/speed.md
    python scripts/bench/whole.py --short     # one pair of steps; runs/bench_whole_short.json
    python scripts/bench/whole.py --report    # only the section, from docs/results/whole.json

Three processes have a trainer each, and take turns as in scripts/bench/step.py: TRL's trainer with tools, which
samples in its process; ours, which does the same; and ours next to a vLLM server on the same cores, with its pushes
of weights. TRL's own server needs GPUs, for NCCL. The model has random weights, so that it hardly ever ends a turn:
each turn has as many tokens on all sides. It writes no call either: both parsers are made to find the same one in
every turn. TRL's loop and ours run it, append its result and sample the next turn.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.common import IN_THE_ENGINE, IN_THE_ENGINE_ENV, ROOT, Frame, VLLMServer, machine, rounded, spread, table
from bench.step import DEFAULTS, GIVE_BACK, both_sides, sums

SOURCE, MODEL = ROOT / "runs/SmolLM2-135M-Instruct", ROOT / "runs/bench_whole/model"
TEMPLATE = ROOT / "hf_recipes/tiny/calculator-hermes-model/chat_template.jinja"  # with tools, of the same tokens
SIDES = {"trl": "TRL, in process", "in process": "in process", "server": "with a vLLM server"}
TURNS, TOKENS, PROMPT, CALL = 4, 48, 330, {"name": "calculator", "arguments": {"expression": "12 * 34"}}
SERVER = (*IN_THE_ENGINE, "--dtype", "float32", "--max-model-len", "1024", "--logprobs-mode", "processed_logprobs")


def build_model() -> None:
    """Save a model with the shape of SmolLM2-135M, its tokenizer, and random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SOURCE), dtype=torch.float32)
    model.save_pretrained(MODEL)
    AutoTokenizer.from_pretrained(SOURCE).save_pretrained(MODEL)
    shutil.copy(TEMPLATE, MODEL / "chat_template.jinja")


def reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def build_trainer(side: str, shape: dict[str, Any], prompts: list[str], folder: str, meter: Any) -> Any:
    """The trainer of a side. It raises `RuntimeError` for a step whose conversations do not have all turns."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    import mt_grpo_trainer as mt
    from mt_grpo.conversation.formats.choose import HermesFormat
    from mt_grpo.recipe.plugins import load_tools
    from mt_grpo.rollout import ToolCall

    class Check(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            key, expected = ("tools/call_frequency", TURNS - 1) if side == "trl" else ("turns/mean", TURNS)
            if logs.get(key, expected) != expected:
                raise RuntimeError(f"{side}: {key} is {logs[key]}, expected {expected}.")

    tools = load_tools(str(ROOT / "tools/calculator.py"))
    settings = {
        "output_dir": folder, "num_generations": shape["G"], "per_device_train_batch_size": shape["rows"],
        "gradient_accumulation_steps": shape["rollouts"] // shape["rows"], "max_steps": 1000, "learning_rate": 1e-6,
        "loss_type": "dapo", "beta": 0.0, "max_completion_length": TURNS * (TOKENS + 64), "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    common = {"model": str(MODEL), "train_dataset": Dataset.from_list(rows), "callbacks": [meter, Check()]}
    meter.prepare = lambda: None  # everything is sampled
    if side == "trl":
        call = [{"type": "function", "function": CALL}]
        grpo_trainer.parse_response = lambda *args, **kwargs: {"role": "assistant", "content": "", "tool_calls": call}
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        tokenizer.response_template = "of this benchmark"  # with one TRL parses calls
        args = GRPOConfig(max_tool_calling_iterations=TURNS - 1, **settings)
        trainer = GRPOTrainer(args=args, reward_funcs=[reward], tools=tools, processing_class=tokenizer, **common)
        trainer.generation_config.max_new_tokens = TOKENS
        return trainer
    HermesFormat.parse_text = lambda self, text, tools: ([ToolCall(*CALL.values())], None)
    if side == "server":
        settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": shape["url"]}
    limits = {"max_env_steps": TURNS - 1, "max_turn_tokens": TOKENS, "tool_format": "hermes"}
    env = mt.MultiTurnToolEnv(tools, None, TURNS - 1, max_turn_tokens=TOKENS, tool_format="hermes")
    args = mt.MTGRPOConfig(**limits, **settings)
    return mt.MTGRPOEnvTrainer(env=env, args=args, outcome_reward_funcs=[reward], **common)


def run(short: bool) -> dict[str, Any]:
    """Take all rounds, in alternating order; the first is not counted."""
    import random

    from transformers import AutoTokenizer

    if not (MODEL / "chat_template.jinja").is_file():
        build_model()
    tokenizer, rng = AutoTokenizer.from_pretrained(MODEL), random.Random(0)
    prompts = [tokenizer.decode(sums(rng, tokenizer, PROMPT, PROMPT)) for _ in range(64)]
    with VLLMServer(MODEL, *SERVER, env={**IN_THE_ENGINE_ENV, "OMP_NUM_THREADS": "2"}) as server:
        shape = {**DEFAULTS, "rollouts": 16, "rows": 4, "sides": SIDES, "build": build_trainer, "url": server.url}
        taken = []
        with both_sides(shape, prompts, 2, GIVE_BACK) as sides:
            for number in range(2 if short else 3):
                order = [*SIDES] if number % 2 == 0 else [*SIDES][::-1]
                taken.append({name: sides[name]("step")["wall"] for name in order})
                print(f"round {number}: {taken[-1]}", flush=True)
    rows = {
        SIDES[name]: {
            "seconds": spread([round[name] for round in taken[1:]]),
            "times": spread([round["trl"] / round[name] for round in taken[1:]]),
        }
        for name in SIDES
    }
    return rounded({"machine": machine(), "rounds": len(taken) - 1, "rows": rows}, 4)


def section(results: dict[str, Any]) -> str:
    """A row per side."""
    of = results["machine"]
    lines = [
        f"**A whole step, generation included**: 16 rollouts in groups of 8 with {TURNS} turns of {TOKENS} tokens, a "
        f"prompt of about {PROMPT}, a model with the shape of SmolLM2-135M and random weights. {of['cpu']}, 2 cores, "
        f"which the server shares; TRL {of['trl']}. Median (smallest to largest) of {results['rounds']} rounds.",
        "",
    ]
    cells = (
        f"{name} | " + " | ".join(f"{v['median']:.2f} ({v['min']:.2f} to {v['max']:.2f})" for v in row.values())
        for name, row in results["rows"].items()
    )
    return "\n".join([*lines, *table("rollouts | seconds | times as fast", cells)])


FRAME = Frame("whole", section)


def main(argv: list[str] | None = None) -> None:
    options = FRAME.parse(__doc__, argv, "one pair of steps; docs/speed.md is left alone")
    if options is None:
        return
    os.environ |= {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    FRAME.finish(run(options.short), options.short)


if __name__ == "__main__":
    main()
