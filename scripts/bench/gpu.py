"""On a GPU: a step's seconds by phase and its memory, for each way to sample and to push weights, and TRL's trainer.

    python scripts/bench/gpu.py                       # all cases; docs/results/gpu.json, a section of docs/speed.md
    python scripts/bench/gpu.py --case "server, disk" # one case (again); the others stay as they are in the file
    python scripts/bench/gpu.py --tiny                # the bundled model, 2 steps: does each case run? also on a CPU
    python scripts/bench/gpu.py --report              # only the section of docs/speed.md, from docs/results/gpu.json

The model has the shape of Qwen3-0.6B (scripts/bench/Qwen3-0.6B/config.json), random weights in float32 and bf16
autocast. A random model hardly ever ends a turn, so each rollout has one turn of `--tokens` tokens on both sides.
`step` is the rest of a step, on conversations of two or three turns that were made before (scripts/bench/step.py): the
prompt of a group computed once or for each of its rollouts, and TRL's trainer. `gradients` compares what they come to,
also of edited histories, with gradient checkpointing, and with a LoRA. Logs and outputs are in runs/bench_gpu.

Each case is a process of its own. A vLLM server has the last GPU. Where there is one GPU in all, trainer and server
share it, and the cases of `nccl` are left out unless NCCL_MULTI_RANK_GPU_ENABLE=1: NCCL has had groups of two
processes on one GPU since 2.30 (VLLM_NCCL_SO_PATH chooses the library). A case that fails is noted with its error, and
the exit code is then 1. Colocated vLLM needs a GPU: on a CPU it takes no weights from TRL.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import common
from bench.common import ROOT, Frame, VLLMServer, machine
from bench.step import DEFAULTS, SHAPES, Conversation, build_trainer, make_conversations
from bench.sync import TINY, build_model

COLOCATE, SERVER = ({"use_vllm": True, "vllm_mode": mode} for mode in ("colocate", "server"))
# Name -> (whose trainer, what it sets beside the settings of all).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "in process": ("ours", {}),
    "TRL, in process": ("trl", {}),
    "colocate": ("ours", COLOCATE),
    "TRL, colocate": ("trl", COLOCATE),
    "colocate, sleep": ("ours", {**COLOCATE, "vllm_enable_sleep_mode": True}),
    "colocate, LoRA": ("ours", {**COLOCATE, "lora": True}),
    "server, disk": ("ours", {**SERVER, "weight_sync": "disk"}),
    "server, nccl": ("ours", {**SERVER, "weight_sync": "nccl"}),
    "server, nccl, ahead": ("ours", {**SERVER, "weight_sync": "nccl", "max_staleness": 1}),
    "step": ("step", {}),
    "gradients": ("gradients", {}),
}
SHARE = 0.3  # of a GPU's memory for vLLM where the trainer is on it, too
# Shapes as in scripts/bench/step.py, in passes of eight rows. `edited`: whether histories are; `compared`: further
# settings of the sides whose gradients are compared with that of a row per rollout.
LONG = {key: SHAPES["prompt"][key] for key in ("tokens", "prompt", "rows")}
BATCHES: dict[str, dict[str, Any]] = {
    "prompt": SHAPES["prompt"],
    "spread": SHAPES["spread"],
    "records": {"title": "edited histories", "tokens": 400, "prompt": 300, "rows": 8, "edited": True},
    "checkpointing": {"title": "long prompt, gradient checkpointing", **LONG,
                      "compared": {"gradient_checkpointing": True}},
    "LoRA": {"title": "long prompt, LoRA", **LONG, "lora": True},
}  # fmt: skip
SHAPES_OF = {"step": ("prompt", "spread", "records"), "gradients": tuple(BATCHES)}
GRADIENT_ROWS = 4  # of a pass: float32 needs twice the memory
STEP_TITLE = "32 rollouts in groups of 8, with two or three turns that were made before, eight rows a pass"
STEP_SIDES = {
    "TRL": ("trl", {}),
    "shared prompts": ("ours", {}),
    "a row per rollout": ("ours", {"share_prompts": False}),
    "shared, checkpointing": ("ours", {"gradient_checkpointing": True}),
}
GROUP_SIZE, WARM_UP = 8, 2  # WARM_UP: steps that are not counted
CASE_SECONDS = 1800  # after which a case has failed
# Of the trainer's log; what remains of a step is the training itself.
PHASES = {"rollouts": "rollout/wait_seconds", "sync": "sync/seconds"}


# -- One case: a process of its own --


def calculator_reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """The one reward function of both sides where they generate."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def meter() -> Any:
    """A callback that keeps the seconds of each step, the most memory of a GPU after it, and the first gradients.

    `prepare`, where it is set, makes the conversations of each step, `batch`, while nothing is timed.
    """
    import torch
    from transformers import TrainerCallback

    class Meter(TrainerCallback):
        prepare = batch = gradients = None
        keeps_gradients, used = False, 0

        def on_train_begin(self, args, state, control, **kwargs):
            self.seconds = []

        def on_step_begin(self, args, state, control, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if state.global_step:
                self.seconds.append(time.perf_counter() - self.began)
            self.batch = self.prepare() if self.prepare else None
            self.began = time.perf_counter()

        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            if self.keeps_gradients:
                self.gradients = torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])
                control.should_training_stop = True

        def on_step_end(self, args, state, control, **kwargs):
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                self.used = max(self.used, total - free)

    return Meter()


def run_case(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train, and return `seconds` per step, `log` (a row per step), `allocated` and `used` (bytes of the GPU, or 0).

    `allocated` is this process's by torch at the most; `used` is of the whole GPU, with whatever else is on it.
    """
    import torch
    from datasets import Dataset

    import mt_grpo_trainer as mt
    from mt_grpo.recipe.data import make_arithmetic
    from mt_grpo.recipe.plugins import load_tools

    side, changes = CASES[options.run]
    changes, on_gpu = dict(changes), torch.cuda.is_available()
    adapter = lora(changes.pop("lora", False))
    settings = {
        "output_dir": folder, "num_generations": GROUP_SIZE, "per_device_train_batch_size": options.rollouts,
        "gradient_accumulation_steps": 1, "max_steps": options.steps + WARM_UP + 1, "learning_rate": 1e-6,
        "lr_scheduler_type": "constant", "max_completion_length": options.tokens, "use_cpu": not on_gpu, "bf16": True,
        "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "model_init_kwargs": {"dtype": "float32"}, "loss_type": "dapo", **changes,
    }  # fmt: skip
    if changes:
        settings["vllm_importance_sampling_mode"] = "token_truncate"
    if changes.get("vllm_mode") == "colocate":
        settings |= {"vllm_gpu_memory_utilization": SHARE, "vllm_max_model_length": 512 + options.tokens}
    rows = [{"prompt": [{"role": "user", "content": row["question"]}]} for row in make_arithmetic(512, 0)]
    watch = meter()
    common = {"model": options.model, "train_dataset": Dataset.from_list(rows), "callbacks": [watch]}
    if side == "trl":
        from trl import GRPOConfig, GRPOTrainer

        trainer = GRPOTrainer(args=GRPOConfig(**settings), reward_funcs=[calculator_reward], **common)
    else:
        env = mt.MultiTurnToolEnv(load_tools(str(ROOT / "tools/calculator.py")), None, max_turn_tokens=options.tokens)
        server = {"vllm_server_host": "127.0.0.1", "vllm_server_port": options.port} if options.port else {}
        args = mt.MTGRPOConfig(max_turn_tokens=options.tokens, **settings)
        own = {"turn_reward_funcs": [], "outcome_reward_funcs": [calculator_reward], "peft_config": adapter}
        trainer = mt.MTGRPOEnvTrainer(env=env, args=args, **own, **server, **common)
    trainer.train()
    return {
        "seconds": watch.seconds,
        "log": [row for row in trainer.state.log_history if "reward" in row],
        "used": watch.used,
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }


def train_canned(side: str, shape: dict, folder: str, watch: Any, **changes: Any) -> list[dict[str, float]]:
    """Train on the conversations of a shape. Returns the log.

    Raises `RuntimeError` where prompts were to be shared and were not: then it is not what is to be measured.
    """
    import gc

    import torch

    gc.collect()  # the last trainer
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    conversations = make_conversations(shape)
    if shape.get("edited"):
        conversations = edited(conversations)
    adapter = lora(shape.get("lora", False))
    trainer = build_trainer(side, shape, conversations, folder, watch, adapter=adapter, **changes)
    trainer.train()
    if side == "ours" and changes.get("share_prompts", True) and trainer.layout.kind != "shared":
        raise RuntimeError(f"{shape['title']}: the rows are {trainer.layout}. Expected rows that share prompts.")
    return trainer.state.log_history


def edited(conversations: list[Conversation]) -> list[Conversation]:
    """Cut the last result in half before each further turn, which so begins a record of its own."""
    for conversation in conversations:
        read = list(conversation["prompt_ids"])
        for turn, following in zip(conversation["turns"], conversation["turns"][1:]):
            seen = turn["observation_ids"]
            read += turn["token_ids"] + seen[: len(seen) // 2]
            following["context"] = list(read)
    return conversations


def lora(wanted: bool) -> Any:
    """An adapter with random weights, if one is wanted."""
    from peft import LoraConfig

    how = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "init_lora_weights": False}
    return LoraConfig(target_modules="all-linear", **how) if wanted else None


def shapes_of(case: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The shapes of a case, with 32 rollouts of the large model."""
    kind = {"rollouts": 32, "model": "0.6B"}
    if options.tiny:
        kind = {"rollouts": 16, "tokens": 60, "prompt": 64, "model": "tiny"}
    return {name: {**DEFAULTS, **BATCHES[name], **kind} for name in SHAPES_OF[case]}


def run_step(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """`steps`: shape -> side -> seconds per step, and `allocated`, bytes of the GPU by torch at the most.

    What it has so far is written after each side, and stays if the rest fails.
    """
    import torch

    on_gpu, found = torch.cuda.is_available(), {}
    changes = {"use_cpu": not on_gpu, "bf16": True, "max_steps": options.steps + WARM_UP + 1}
    for name, shape in shapes_of("step", options).items():
        for title, (side, own) in STEP_SIDES.items():
            if side == "trl" and "edited" in shape:  # it has no rows for them
                continue
            watch = meter()
            train_canned(side, shape, folder, watch, **{**changes, **own})
            peak = torch.cuda.max_memory_allocated() if on_gpu else 0
            found.setdefault(name, {})[title] = {"seconds": watch.seconds[WARM_UP:], "allocated": peak}
            print(name, title, found[name][title], flush=True)
            Path(options.out).write_text(json.dumps({"steps": found}))
    return {"steps": found}


def run_gradients(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """`gradients`: shape -> precision and layout -> distance from a row per rollout in float32, relative.

    The same model, conversations and rewards: what differs is how passes are laid out, and in which precision. What it
    has so far is written after each shape, and stays if the rest fails.
    """
    import torch

    found: dict[str, dict[str, float]] = {}
    for name, shape in shapes_of("gradients", options).items():
        shape["rows"], exact, found[name] = GRADIENT_ROWS, None, {}
        for precision in ("float32", "bf16"):
            for title in ("a row per rollout", "shared prompts"):
                side, own = STEP_SIDES[title]
                watch = meter()
                watch.keeps_gradients = True
                changes = {"use_cpu": not torch.cuda.is_available(), "bf16": precision == "bf16", "max_steps": 1}
                changes |= own | (shape.get("compared", {}) if exact is not None else {})
                train_canned(side, shape, folder, watch, max_grad_norm=0.0, **changes)
                exact = watch.gradients if exact is None else exact
                away = ((watch.gradients - exact).norm() / exact.norm()).item()
                found[name][f"{title}, {precision}"] = away
                print(name, title, precision, away, "norm", watch.gradients.norm().item(), flush=True)
        Path(options.out).write_text(json.dumps({"gradients": found}))
    return {"gradients": found}


# -- All cases --


def measure(case: str, model: Path, options: argparse.Namespace, gpus: list[str], folder: Path) -> dict[str, Any]:
    """A case's row: what its process returned, or `error`.

    A bf16 server has the last GPU, which is the trainer's if there is one only; without any it is on the CPU.
    """
    output, log = folder / f"{case}.json", folder / f"{case}.log"
    output.unlink(missing_ok=True)
    job = {**vars(options), "run": case, "model": str(model), "out": str(output), "port": None}
    place = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[0] if gpus else "", "PYTHONPATH": str(ROOT)}
    flags = ["--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs"]
    flags += ["--max-model-len", str(512 + options.tokens)]
    if gpus:
        flags += ["--no-enforce-eager", "--gpu-memory-utilization", str(0.9 if len(gpus) > 1 else SHARE)]
    if case.startswith("server, nccl"):
        flags += ["--weight-transfer-config", '{"backend": "nccl"}']
    try:
        with ExitStack() as stack:
            if case.startswith("server"):
                of_server = {"CUDA_VISIBLE_DEVICES": gpus[-1] if gpus else ""}
                job["port"] = stack.enter_context(VLLMServer(model, *flags, timeout=600.0, env=of_server)).port
            said = stack.enter_context(open(log, "w"))
            ends = {"stdout": said, "stderr": said, "timeout": CASE_SECONDS}
            done = subprocess.run([sys.executable, __file__, "--job", json.dumps(job)], cwd=ROOT, env=place, **ends)
    except (RuntimeError, subprocess.TimeoutExpired) as error:  # of the server's start, or of the case
        return {"error": str(error)}
    found = aggregate(json.loads(output.read_text())) if output.is_file() else {}
    return found if done.returncode == 0 else {**found, "error": log.read_text()[-2000:]}


def aggregate(row: dict[str, Any]) -> dict[str, Any]:
    """What the page's tables show of what a case's process has returned."""
    found: dict[str, Any] = {}
    if "log" in row:
        found["summary"] = summary(row)
    if "steps" in row:
        found["steps"] = {
            BATCHES[name]["title"]: {
                side: {"seconds": statistics.median(of["seconds"]), "GiB": of["allocated"] / 2**30}
                for side, of in sides.items()
            }
            for name, sides in row["steps"].items()
        }
    if "gradients" in row:
        found["gradients"] = {BATCHES[name]["title"]: of for name, of in row["gradients"].items()}
    return common.rounded(found, 6)


def summary(row: dict[str, Any]) -> dict[str, float | None]:
    """Medians over the steps that are counted; None for what the log does not have."""
    found = {"step": statistics.median(row["seconds"][WARM_UP:] or row["seconds"])}
    for name, key in PHASES.items():
        values = [entry[key] for entry in row["log"][WARM_UP : len(row["seconds"])] if key in entry]
        found[name] = statistics.median(values) if values else None
    known = [found[name] for name in PHASES if found[name] is not None]
    found["training"] = found["step"] - sum(known) if known else None
    found["allocated"], found["used"] = row["allocated"] / 2**30, row["used"] / 2**30
    key = "sampling/sampling_logp_difference/mean"
    values = [entry[key] for entry in row["log"] if key in entry]
    found["difference"] = statistics.mean(values) if values else None
    return found


def section(results: dict[str, Any]) -> str:
    """A table of all cases, the run that was added last first, and sentences on steps, gradients and failures."""
    rows, runs, steps, distances, ended = [], [], [], {}, []
    forms = dict.fromkeys(("step", "rollouts", "sync", "training"), "{:.2f} s")
    forms |= {"allocated": "{:.1f}", "used": "{:.1f}", "difference": "{:.1e}"}
    for run in reversed(results["runs"]):
        place, of, gpus = run["machine"], run["settings"], run["gpus"].replace("NVIDIA ", "") or "CPU"
        setting = f"{gpus}, {of['tokens']} tokens"
        runs.append(
            f"{setting}: {of['steps']} steps of {of['rollouts']} rollouts (torch {place['torch']}, "
            f"TRL {place['trl']}, vLLM {place.get('vllm', 'none')})"
        )
        for case, row in run["cases"].items():
            if got := row.get("summary"):
                cells = ["-" if got[key] is None else form.format(got[key]) for key, form in forms.items()]
                rows.append(" | ".join([setting, case, *cells]))
            if reason := row.get("skipped") or row.get("error"):
                ended.append(f"`{case}` on {gpus} ({reason.strip().splitlines()[-1][:200]})")
            for title, sides in row.get("steps", {}).items():
                if {"TRL", "shared prompts"} <= sides.keys():  # both came to their end
                    each = [f"{side} {got['seconds']:.2f} s, {got['GiB']:.0f} GiB" for side, got in sides.items()]
                    steps.append(f"**{gpus}, {title}**: {'; '.join(each)}.")
            for found in row.get("gradients", {}).values():
                distances |= {name: max(distance, distances.get(name, 0.0)) for name, distance in found.items()}
    about = (
        f"A model of {run['parameters'] / 1e9:.1f}B parameters with random weights, in float32 with bf16 autocast. A "
        f"rollout is one turn. Cells are medians. {'; '.join(runs)}."
        + (f" Not measured to the end: {', '.join(ended)}." if ended else "")
    )
    head = "GPU | case | a step | rollouts | sync | the rest | GiB by torch | GiB of the GPU | logprob difference"
    lines = [about, "", *common.table(head, rows)]
    notes = [" ".join([f"Steps without generation, {STEP_TITLE}.", *steps])] if steps else []
    if distances:
        each = "; ".join(f"{name}: {distance:.1e}" for name, distance in list(distances.items())[1:])
        notes.append(f"Largest relative distance from the gradient of a row per rollout in float32: {each}.")
    return "\n".join([*lines, "", *notes] if notes else lines)


FRAME = Frame("gpu", section)


def main(argv: list[str] | None = None) -> int:
    tiny, number = {"action": "store_true", "help": "two steps of the bundled model"}, {"type": int}
    case, job = {"choices": CASES, "action": "append"}, {"help": argparse.SUPPRESS, "type": json.loads}
    further = {"tiny": tiny, "case": case, "steps": number, "rollouts": number, "tokens": number, "job": job}
    options = FRAME.parse(__doc__, argv, None, **further)
    if options is None:
        return 0
    for name, tiny, full in (("steps", 2, 10), ("rollouts", 16, 32), ("tokens", 48, 256)):
        setattr(options, name, getattr(options, name) or (tiny if options.tiny else full))
    if options.job:  # the process of a case
        options = argparse.Namespace(**options.job)
        run = {"step": run_step, "gradients": run_gradients}.get(CASES[options.run][0], run_case)
        Path(options.out).write_text(json.dumps(run(options, str(Path(options.out).with_suffix("")))))
        return 0
    from launch.launch_plan import visible_gpus

    gpus = visible_gpus()
    if not gpus and not options.tiny:
        sys.exit("error: no GPU is visible. Expected one or more: set CUDA_VISIBLE_DEVICES, or try --tiny on a CPU.")
    return measure_all(gpus, options)


def measure_all(gpus: list[str], options: argparse.Namespace) -> int:
    """Run the cases one after the other, keep each as it ends, and write the page's section. Returns the exit code."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path, folder = FRAME.short_results if options.tiny else FRAME.results, ROOT / "runs/bench_gpu"
    folder.mkdir(parents=True, exist_ok=True)
    model = TINY if options.tiny else folder / "model"
    if not (model / "tokenizer.json").is_file():  # which is saved last
        build_model("0.6B", model, "float32")
    with torch.device("meta"):
        number = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).num_parameters()
    place = {
        "machine": machine(),
        "gpus": ", ".join(torch.cuda.get_device_name(i) for i in range(len(gpus))),
        "parameters": number,
        "settings": {name: getattr(options, name) for name in ("steps", "rollouts", "tokens")},
    }
    results = json.loads(path.read_text()) if path.is_file() else {"runs": []}
    same = (run for run in results["runs"] if all(run[key] == value for key, value in place.items()))
    if (run := next(same, None)) is None:
        run = {**place, "cases": {}}
        results["runs"].append(run)
    if not options.case:
        run["cases"] = {}
    for case in options.case or CASES:
        shared = len(gpus) == 1 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        needed = (2 - shared) if case.startswith("server, nccl") else int("colocate" in case)
        reason = f"needs {'a GPU' if needed == 1 else f'{needed} GPUs'}" if len(gpus) < needed else None
        row = run["cases"][case] = {"skipped": reason} if reason else measure(case, model, options, gpus, folder)
        FRAME.keep(results, options.tiny)
        said = f"{row['summary']['step']:.2f} s a step" if "summary" in row else json.dumps(row)
        print(f"{case}: " + (reason or row.get("error") or said), flush=True)
    FRAME.finish(results, options.tiny)
    return int(any("error" in row for row in run["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
