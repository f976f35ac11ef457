"""Compare a whole step, generation included, with that of TRL's `GRPOTrainer`: tools, and four turns, on a CPU.

    python scripts/build/smollm2.py runs/SmolLM2-135M-Instruct    # for its tokenizer and its shape
    python scripts/bench/whole.py             # docs/results/whole.json and the section of docs/speed.md
    python scripts/bench/whole.py --servers   # TRL's trainer and ours, each next to a vLLM server of its own
    python scripts/bench/whole.py --short     # one pair of steps; runs/bench_whole_short.json

Three processes have a trainer each, and take turns as in scripts/bench/step.py: TRL's trainer with tools, which
samples in its process; ours, which does the same; and ours with pushes to a vLLM server on the same cores. The model
has random weights, so that it hardly ever ends a turn: each has as many tokens on all sides. It writes no call
either: both parsers find the same one in every turn. TRL's loop and ours run it, append its result and sample again.

With `--servers` TRL's trainer has a server, too. Both push weights by NCCL; without a GPU TRL's pushes none, and ours
by files. All share the first GPU: set NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL has known since 2.30.
"""

import contextlib
import json
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
SERVERS = {"trl server": "TRL, with a vLLM server", "server": "with a vLLM server"}
TURNS, TOKENS, PROMPT, CALL = 4, 48, 330, {"name": "calculator", "arguments": {"expression": "12 * 34"}}
SERVER = (*IN_THE_ENGINE, "--max-model-len", "1024", "--logprobs-mode", "processed_logprobs")
ON_GPU = ("--dtype", "bfloat16", "--no-enforce-eager", "--gpu-memory-utilization", "0.2")
NCCL = ("--weight-transfer-config", '{"backend": "nccl"}')


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
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_client import VLLMClient
    from trl.trainer import grpo_trainer

    import mt_grpo_trainer as mt
    from mt_grpo.conversation.formats.choose import HermesFormat
    from mt_grpo.recipe.plugins import load_tools
    from mt_grpo.rollout import ToolCall

    class Check(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            key, expected = ("tools/call_frequency", TURNS - 1) if "trl" in side else ("turns/mean", TURNS)
            if logs.get(key, expected) != expected:
                raise RuntimeError(f"{side}: {key} is {logs[key]}, expected {expected}.")

    tools, on_gpu = load_tools(str(ROOT / "tools/calculator.py")), torch.cuda.is_available()
    settings = {
        "output_dir": folder, "num_generations": shape["G"], "per_device_train_batch_size": shape["rows"],
        "gradient_accumulation_steps": shape["rollouts"] // shape["rows"], "max_steps": 1000, "learning_rate": 1e-6,
        "loss_type": "dapo", "beta": 0.0, "max_completion_length": TURNS * (TOKENS + 64), "use_cpu": not on_gpu,
        "bf16": on_gpu, "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    common = {"model": str(MODEL), "train_dataset": Dataset.from_list(rows), "callbacks": [meter, Check()]}
    meter.prepare = lambda: None  # everything is sampled
    if "server" in side:
        settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": shape["urls"][side]}
        settings["vllm_group_port"] = 51216 + ("trl" in side)
    if "trl" in side:
        if not on_gpu:  # NCCL has no CPUs
            VLLMClient.init_communicator = VLLMClient.update_named_params = lambda *args, **kwargs: None
        call = [{"type": "function", "function": CALL}]
        grpo_trainer.parse_response = lambda *args, **kwargs: {"role": "assistant", "content": "", "tool_calls": call}
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        tokenizer.response_template = "of this benchmark"  # with one TRL parses calls
        args = GRPOConfig(max_tool_calling_iterations=TURNS - 1, **settings)
        trainer = GRPOTrainer(args=args, reward_funcs=[reward], tools=tools, processing_class=tokenizer, **common)
        if side == "trl":
            trainer.generation_config.max_new_tokens = TOKENS
        else:
            trainer.vllm_generation.max_completion_length = TOKENS
        return trainer
    HermesFormat.parse_text = lambda self, text, tools: ([ToolCall(*CALL.values())], None)
    limits = {"max_env_steps": TURNS - 1, "max_turn_tokens": TOKENS, "tool_format": "hermes"}
    env = mt.MultiTurnToolEnv(tools, None, TURNS - 1, max_turn_tokens=TOKENS, tool_format="hermes")
    args = mt.MTGRPOConfig(**limits, **settings)
    return mt.MTGRPOEnvTrainer(env=env, args=args, outcome_reward_funcs=[reward], **common)


def run(short: bool, sides: dict[str, str] = SIDES) -> dict[str, Any]:
    """Take all rounds, in alternating order; the first is not counted. Ratios are to the first of the sides."""
    import random

    import torch
    from transformers import AutoTokenizer

    if not (MODEL / "chat_template.jinja").is_file():
        build_model()
    tokenizer, rng = AutoTokenizer.from_pretrained(MODEL), random.Random(0)
    prompts = [tokenizer.decode(sums(rng, tokenizer, PROMPT, PROMPT)) for _ in range(64)]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    with contextlib.ExitStack() as servers:
        urls = {}
        for name in sides.keys() & SERVERS:
            flags = [*SERVER, *(ON_GPU if gpu else ()), *(NCCL if gpu else ())]
            env = {} if gpu else {**IN_THE_ENGINE_ENV, "OMP_NUM_THREADS": "2"}
            urls[name] = servers.enter_context(VLLMServer(MODEL, *flags, env=env)).url
        shape = {**DEFAULTS, "rollouts": 16, "rows": 4, "sides": sides, "build": build_trainer, "urls": urls}
        taken = []
        with both_sides(shape, prompts, 2, GIVE_BACK) as ask:
            for number in range(2 if short else 3):
                order = [*sides] if number % 2 == 0 else [*sides][::-1]
                taken.append({name: ask[name]("step")["wall"] for name in order})
                print(f"round {number}: {taken[-1]}", flush=True)
    first, rows = next(iter(sides)), {}
    for name, title in sides.items():
        ratios = [times[first] / times[name] for times in taken[1:]]
        rows[title] = {"seconds": spread([times[name] for times in taken[1:]]), "times": spread(ratios)}
    place = machine() | ({"gpu": gpu} if gpu else {})
    return rounded({"machine": place, "rounds": len(taken) - 1, "rows": rows}, 4)


def section(results: dict[str, Any]) -> str:
    """A row per side, behind a sentence about those that have a server each."""
    of = results["machine"]
    cells = (f"{name} | " + " | ".join(map(spread_text, row.values())) for name, row in results["rows"].items())
    text = (
        f"**A whole step, generation included**: 16 rollouts in groups of 8 with {TURNS} turns of {TOKENS} tokens, a "
        f"prompt of about {PROMPT}, a model with the shape of SmolLM2-135M and random weights. {of['cpu']}, 2 cores, "
        f"which the server shares; TRL {of['trl']}. Median (smallest to largest) of {results['rounds']} rounds."
    )
    if each := results.get("servers"):
        place = each["machine"].get("gpu") or "the same cores (TRL's trainer pushes no weights there, ours does)"
        theirs, ours = each["rows"].values()
        text += (
            f" With a vLLM server for each, on {place}: TRL {spread_text(theirs['seconds'])} s, ours "
            f"{spread_text(ours['seconds'])} s, {spread_text(ours['times'])} times as fast."
        )
    return "\n".join([text, "", *table("rollouts | seconds | times as fast", cells)])


def spread_text(of: dict[str, float]) -> str:
    return f"{of['median']:.2f} ({of['min']:.2f} to {of['max']:.2f})"


FRAME = Frame("whole", section)


def main(argv: list[str] | None = None) -> None:
    servers = {"action": "store_true", "help": "TRL's trainer and ours, each with a vLLM server"}
    options = FRAME.parse(__doc__, argv, "one pair of steps; docs/speed.md is left alone", servers=servers)
    if options is None:
        return
    os.environ |= {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    os.environ |= {} if options.servers else {"CUDA_VISIBLE_DEVICES": ""}  # the table's machine has none
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    results = run(options.short, SERVERS if options.servers else SIDES)
    if options.servers and not options.short:
        results = {**json.loads(FRAME.results.read_text(encoding="utf-8")), "servers": results}
    FRAME.finish(results, options.short)


if __name__ == "__main__":
    main()
