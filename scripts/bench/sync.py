"""Weight sync: seconds for `weight_sync: disk`, and where they go, on a CPU with a real vLLM server.

    python scripts/bench/sync.py             # in float32, in bfloat16, and a LoRA; the report
    python scripts/bench/sync.py --short     # fewer repetitions, float32 only, at most ten minutes; the page stays
    python scripts/bench/sync.py --report    # only the section of docs/speed.md, from docs/results/sync.json

The model has the shape of Qwen3-0.6B (scripts/bench/Qwen3-0.6B/config.json); its weights are random.

The trainer's own push and check are measured, after a weight was changed; the first push of a server is not counted.
One repetition: `gather` (walk over the parameters, copy), `write` (the safetensors file), `load` (pause, reload, reset
of the cache, resume) and `check` (comparison of logprobs, by default after every tenth push). Then the same number of
bytes is written to a plain file in the same directory and read back, and to the ordinary disk with fsync. With LoRA
(rank 16, all linear layers) the adapter alone is pushed, to a server with room for it. Other rows send all weights.
"""

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.common import ROOT, Frame, VLLMServer, machine, memory, prepare, rounded, spread, start_of_peak, table

TINY = ROOT / "hf_recipes/tiny/calculator-model"
QWEN = json.loads((ROOT / "scripts/bench/Qwen3-0.6B/config.json").read_text(encoding="utf-8"))
SHAPE = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size"
SIZES = {"0.6B": {key: QWEN[key] for key in SHAPE.split()}}  # what its Qwen3 configuration has
PHASES = ("gather", "write", "load", "check")
REPETITIONS, SHORT_REPETITIONS = 5, 3
LORA_RANK = 16
CHUNK = 2**26  # bytes of one plain write or read
SYNC_DIR = "/dev/shm"  # where the weights pass, as by default

# -- One model --


def build_model(size: str, folder: Path, dtype: str) -> Path:
    """Path of the model of that size, with random weights, which is saved into `folder`."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    # The bundled tokenizer's ids are the first of the vocabulary, the rest are never in a prompt.
    sizes = {**SIZES[size], "tie_word_embeddings": True, "max_position_embeddings": 1024}
    config = Qwen3Config(**sizes, eos_token_id=2, pad_token_id=0, dtype=getattr(torch, dtype))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        Qwen3ForCausalLM(config).to(config.dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def build_trainer(model: Path, port: int, dtype: str, output_dir: str, lora: bool = False) -> Any:
    """A trainer on the server at that port that is ready to push; it has taken no step."""
    from datasets import Dataset
    from peft import LoraConfig

    import mt_grpo_trainer as mt
    from mt_grpo.recipe.plugins import load_tools

    def outcome(completions, **columns):
        return [0.0] * len(completions)

    rows = [{"prompt": [{"role": "user", "content": f"What is {a} * 77?"}]} for a in range(11, 27)]
    args = mt.MTGRPOConfig(**{
        "output_dir": output_dir, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
        "per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 120, "max_turn_tokens": 48,
        "max_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_vllm": True, "vllm_mode": "server",
        "vllm_importance_sampling_mode": "token_truncate", "weight_sync": "adapter" if lora else "disk",
        "weight_sync_dir": SYNC_DIR, "model_init_kwargs": {"dtype": dtype},
    })  # fmt: skip
    tools = load_tools(str(ROOT / "tools/calculator.py"))
    env = mt.MultiTurnToolEnv(tools, "Use the calculator, then answer.", max_turn_tokens=48)
    how = {"vllm_server_host": "127.0.0.1", "vllm_server_port": port, "train_dataset": Dataset.from_list(rows)}
    adapter = LoraConfig(r=LORA_RANK, target_modules="all-linear") if lora else None
    return mt.MTGRPOEnvTrainer(str(model), env, [], [outcome], args=args, peft_config=adapter, **how)


def measure_pushes(trainer: Any, repetitions: int) -> list[dict[str, float]]:
    """Change a weight, push, check, `repetitions` times, after a first push that is not counted.

    Returns the seconds of each repetition: what `update_weights` returned by phase, `check`, `total` (push and check
    by the wall clock); and `peak`, the bytes that this process's memory grew by during the push at the most.
    """
    *_, norm = (p for name, p in trainer.model.named_parameters() if "norm" in name)  # the final one
    added = next((p for name, p in trainer.model.named_parameters() if ".lora_B." in name), None)
    trainer._sync_weights()
    pushes = []
    for number in range(repetitions):
        # Moves logprobs by far more than the check allows, and comes back, so that many repetitions change nothing.
        if added is None:
            norm.data.mul_(1.25 if number % 2 == 0 else 0.8)
        else:
            added.data.add_(0.5 if number % 2 == 0 else -0.5)
        before, started = start_of_peak(), time.perf_counter()
        phases = trainer.weight_sync._push(f"{trainer.client.instance}-bench-{number}")
        pushed, peak = time.perf_counter() - started, memory("VmHWM") - before
        checking = time.perf_counter()
        trainer.weight_sync._check_logprobs()
        check = time.perf_counter() - checking
        pushes.append({**phases, "check": check, "total": pushed + check, "peak": peak})
    return pushes


def plain_seconds(folder: str, num_bytes: int, disk: bool = False) -> dict[str, float]:
    """Seconds to `write` a file of as many bytes into `folder`, and to `read` it back.

    `disk`: whether its bytes must reach the disk (fsync) and come from there, not from the page cache.
    """
    chunk = bytearray(os.urandom(2**20)) * min(CHUNK // 2**20, -(-num_bytes // 2**20))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        for start in range(0, num_bytes, len(chunk)):
            file.write(memoryview(chunk)[: num_bytes - start])
        if disk:
            os.fsync(file.fileno())
        written = time.perf_counter()
        if disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        reading = time.perf_counter()
        while file.readinto(chunk):
            pass
        return {"write": written - started, "read": time.perf_counter() - reading}


def summary(size: str, dtype: str, model: dict[str, int], pushes: list[dict], plain: list[dict], disk: list[dict]):
    """One row of the results: spreads of seconds, of GB/s, and of multiples.

    `model` has `parameters`, `tensors` and the `bytes` of one push, tied copies too. `plain`: in the sync directory.
    """
    gigabytes = model["bytes"] / 1e9
    keys = [key for key in (*PHASES, "total") if all(key in push for push in pushes)]
    seconds = {key: spread([push[key] for push in pushes]) for key in keys}
    row: dict[str, Any] = {"size": size, "dtype": dtype, **model, "repetitions": len(pushes), "seconds": seconds}
    for name, runs in (("plain", plain), ("disk", disk)):
        row[name] = {key: spread([run[key] for run in runs]) for key in ("write", "read")}
        row[f"{name}_gb_per_s"] = {key: gigabytes / row[name][key]["median"] for key in ("write", "read")}
    # The check moves no weights: a push against the plain file is without it.
    push = seconds["total"]["median"] - seconds["check"]["median"]
    row["times_plain"] = push / (row["plain"]["write"]["median"] + row["plain"]["read"]["median"])
    row["peak_multiple"] = max(push["peak"] for push in pushes) / model["bytes"]
    return rounded(row)


def measure(dtype: str, repetitions: int, lora: bool = False) -> dict[str, Any]:
    """Start a server for the model, push to it, or an adapter alone, and return the row of results."""
    from mt_grpo.generation.weights import adapter_weights

    flags, env = ("--max-model-len", "512", "--logprobs-mode", "processed_logprobs", "--dtype", dtype), {}
    if lora:
        flags += ("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(LORA_RANK))
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = build_model("0.6B", Path(folder) / "model", dtype)
        with VLLMServer(model, *flags, env=env, log=Path(folder) / "vllm.log", timeout=400) as server:
            trainer = build_trainer(model, server.port, dtype, folder, lora)
            weights = adapter_weights(trainer.model) if lora else trainer.vllm_generation.named_weights()
            tensors = {name: t.numel() * t.element_size() for name, t in weights}
            counts = {"parameters": trainer.model.num_parameters(), "tensors": len(tensors)}
            counts |= {"bytes": sum(tensors.values())}
            pushes = measure_pushes(trainer, repetitions)
            trainer.client.close()
        del trainer
        gc.collect()
        plain = [plain_seconds(SYNC_DIR, counts["bytes"]) for _ in range(repetitions)]
        disk = [plain_seconds(folder, counts["bytes"], disk=True) for _ in range(min(repetitions, 3))]
    return summary("0.6B", f"{dtype}, LoRA" if lora else dtype, counts, pushes, plain, disk)


# -- The report --


def short(seconds: float) -> str:
    """One or two digits, without an exponent.

    >>> [short(s) for s in (0.00051, 0.00412, 0.0812, 0.456, 4.13, 12.6)]
    ['0.0005', '0.004', '0.08', '0.46', '4.1', '13']
    """
    digits = 4 if seconds < 0.001 else 3 if seconds < 0.01 else 2 if seconds < 1 else 1 if seconds < 10 else 0
    return f"{seconds:.{digits}f}"


def markdown(results: dict[str, Any]) -> str:
    """The section of docs/speed.md."""
    where, largest = results["machine"], max(results["rows"], key=lambda row: row["bytes"])
    rows = [row for row in results["rows"] if row["size"] == largest["size"]]
    speed, disk = largest["plain_gb_per_s"], largest["disk_gb_per_s"]
    about = (
        f"Seconds of a push of {largest['size']} parameters with `weight_sync: disk`. Trainer and vLLM server share "
        f"{where['cores']} cores ({where['cpu']}). Cells are medians of {min(r['repetitions'] for r in rows)} or "
        "more; the total also has its smallest and largest, and includes the check, which runs after every tenth "
        "push. *MB*: what one push sends, with a tied embedding counted twice. *Of a plain file*: a push without its "
        f"check, divided by the time to write and read a file of as many bytes in `{results['sync_dir']}` (here "
        f"{speed['write']:.1f} and {speed['read']:.1f} GB/s; the ordinary disk with fsync: {disk['write']:.2f} and "
        f"{disk['read']:.2f})."
    )
    table_rows = []
    for row in rows:
        seconds, total = row["seconds"], row["seconds"]["total"]
        cells = [short(seconds[key]["median"]) if key in seconds else "in gather" for key in PHASES]
        cells.append(f"{short(total['median'])} ({short(total['min'])} to {short(total['max'])})")
        cells = [row["dtype"], f"{row['bytes'] / 1e6:,.0f}", *cells, f"{row['times_plain']:.1f} times"]
        table_rows.append(" | ".join(cells))
    head = f"weights | MB | {' | '.join(PHASES)} | total | of a plain file"
    return "\n".join([about, "", *table(head, table_rows)])


FRAME = Frame("sync", markdown)


def main(argv: list[str] | None = None) -> None:
    options = FRAME.parse(__doc__, argv, "a quick run; docs/speed.md stays as it is")
    if options is None:
        return
    repetitions = SHORT_REPETITIONS if options.short else REPETITIONS
    prepare(threads=1)
    jobs = [("float32", False), *([] if options.short else [("bfloat16", False)]), ("float32", True)]
    results: dict[str, Any] = {"machine": machine(), "sync_dir": SYNC_DIR, "short": options.short, "rows": []}
    for dtype, lora in jobs:
        row = measure(dtype, repetitions, lora)
        results["rows"].append(row)
        FRAME.keep(results, options.short)
        print(f"{row['dtype']}: {row['bytes'] / 1e6:.0f} MB: {row['seconds']}", flush=True)
    FRAME.finish(results, options.short)


if __name__ == "__main__":
    main()
