"""Random batches of TRL's, trained in one layout or another. Run in one process and by two ranks."""

import copy
import random

import torch
from datasets import Dataset
from project import SMALL
from transformers import TrainerCallback

from mt_grpo.training.batch import FURTHER_RECORDS
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv

GROUP_SIZE = 4
PROMPTS = (1, 2, 9, 23)  # tokens; one of a single token has nothing to share
ROW = {"prompt": [{"role": "user", "content": "x"}]}


def nothing(completions, **kwargs):
    return [0.0] * len(completions)


def random_rows(
    seed: int,
    count: int,
    further: bool,
    uneven: bool = False,
    some_scored: bool = False,
    cut: bool = False,
    quiet: bool = False,
) -> list[dict]:
    """Rows of TRL's batch without padding. Some have no trained token, some one token, and prompts come back.

    Args:
        seed: Of all of it.
        count: Of rollouts.
        further: Whether some have further records.
        uneven: Whether the first half is much longer than the second one. A group of four may lie in both.
        some_scored: Whether some rollouts have no score, and so no trained token.
        cut: Whether the end of each first record is one of its own.
        quiet: Whether the advantages of every second group are 0.
    """
    rng = random.Random(seed)
    prompts = [[rng.randrange(200) for _ in range(rng.choice(PROMPTS))] for _ in range(count // GROUP_SIZE)]

    def row(prompt, lengths=(1, 2, 7, 30, 45)):
        length = rng.choice(lengths)
        trained = [int(rng.random() < 0.7) for _ in range(length)] if rng.random() < 0.85 else [0] * length
        numbers = {name: [rng.gauss(0, size) for _ in range(length)]
                   for name, size in (("advantages", 1.0), ("old", 0.3), ("ref", 0.5), ("ratio", 0.2))}  # fmt: skip
        return {"prompt": prompt, "ids": [rng.randrange(200) for _ in range(length)], "trained": trained, **numbers}

    rows = []
    of_scores, of_cuts = random.Random(seed + 1), random.Random(seed + 2)
    for i in range(count):
        lengths = () if not uneven else ((30, 45),) if i < count // 2 else ((1, 2, 7),)
        first = row(prompts[i // GROUP_SIZE], *lengths)
        first["further"] = [row([5] * rng.choice(PROMPTS)) for _ in range(rng.choice((0, 0, 1, 2)))] if further else []
        if some_scored and of_scores.random() < 0.3:
            for each in (first, *first["further"]):
                each["trained"] = [0] * len(each["trained"])
            first["scored"] = False
        for each in (first, *first["further"]) if quiet and i // GROUP_SIZE % 2 else ():
            each["advantages"] = [0.0] * len(each["advantages"])
        if cut:
            first["further"] = [*cut_row(first, of_cuts), *first["further"]]
        rows.append(first)
    return rows


def cut_row(row: dict, rng: random.Random) -> list[dict]:
    """Move the end of a row to a record of its own, in which it reads the same. Empty for a row of one token."""
    ids, prompt = row["ids"], row["prompt"]
    if len(ids) < 2:
        return []
    at, further = rng.randrange(1, len(ids)), {"prompt": None}
    for name in ("ids", "trained", "advantages", "old", "ref", "ratio"):
        row[name], further[name] = row[name][:at], row[name][at:]
    return [{**further, "prompt": prompt + row["ids"]}]


def tensors(rows: list[dict], settings: dict, near: float) -> dict:
    """As TRL pads them. Old logprobs lie around `near`, that of a token of the random model."""
    of_all = [each for row in rows for each in (row, *row["further"])]
    before = max(len(row["prompt"]) for row in of_all)
    behind = max(len(row["ids"]) for row in of_all)

    def padded(row):
        left, right = [0] * (before - len(row["prompt"])), [0] * (behind - len(row["ids"]))
        advantages = row["advantages"]
        if settings.get("credit_assignment") == "outcome":
            advantages = advantages[:1] * len(advantages)
        found = {
            "prompt_ids": left + row["prompt"], "prompt_mask": left + [1] * len(row["prompt"]),
            "completion_ids": row["ids"] + right, "completion_mask": [1] * len(row["ids"]) + right,
            "tool_mask": row["trained"] + [1] * len(right), "advantages": advantages + [0.0] * len(right),
        }  # fmt: skip
        if settings.get("num_iterations", 1) > 1 or settings.get("vllm"):
            found["old_per_token_logps"] = [near + value for value in row["old"]] + [0.0] * len(right)
        if settings.get("vllm") == "token":
            found["importance_sampling_ratio"] = [1 + abs(value) for value in row["ratio"]] + [1.0] * len(right)
        elif settings.get("vllm") == "sequence":
            found["importance_sampling_ratio"] = [1 + abs(row["ratio"][0])]
        if settings.get("vllm"):
            found["sampling_per_token_logps"] = [near + 2 * value for value in row["old"]] + [0.0] * len(right)
        if settings.get("beta"):
            found["ref_per_token_logps"] = [near + value for value in row["ref"]] + [0.0] * len(right)
        return {key: torch.tensor(value) for key, value in found.items()}

    single = [padded(row) for row in rows]
    batch = {key: torch.stack([each[key] for each in single]) for key in single[0]}
    if any(row["further"] for row in rows):
        batch[FURTHER_RECORDS] = [[padded({**each, "further": []}) for each in row["further"]] for row in rows]
    return batch


class Gradients(TrainerCallback):
    """The gradient of each step of the optimizer, as one vector."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]).clone())


class OfBatches(MTGRPOEnvTrainer):
    """Trains random batches in place of what was rolled out."""

    settings, near = {}, -5.4

    def _generate_and_score_completions(self, inputs):
        count, ranks = len(inputs), self.accelerator.num_processes
        seed, names = self.settings.get("seed", 0) + self._step, ("further", "uneven", "some_scored", "cut", "quiet")
        whole = self.settings.get("only_scored", count * ranks)
        rows = random_rows(seed, whole, *(self.settings.get(name, False) for name in names))
        if "only_scored" in self.settings:
            rows = [row for row in rows if row.get("scored", True)]
        trained = sum(sum(each["trained"]) for row in rows for each in (row, *row["further"]))
        first = self.accelerator.process_index * count
        own = tensors(rows, self.settings, self.near)
        batch = {key: value[first : first + count] for key, value in own.items()}
        scored = [row for row in rows if row.get("scored", True)]
        number = len(scored) + (self.loss_type == "sapo") * sum(len(row["further"]) for row in scored)
        return batch | {"num_items_in_batch": torch.tensor(trained), "num_rows_in_batch": torch.tensor(number)}


def make_trainer(model, out, layout, settings, **changes):
    """A trainer of `OfBatches` in a layout: `trl`, `shared` or `padded`."""
    args = dict(
        **SMALL, output_dir=str(out), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2,
        max_completion_length=64, max_env_steps=2, num_generations=GROUP_SIZE, optim="sgd", learning_rate=0.1,
        lr_scheduler_type="constant", max_grad_norm=0.0, shuffle_dataset=False, share_prompts=layout != "trl",
    )  # fmt: skip
    own = {"vllm", "further", "seed", "peft", "uneven", "some_scored", "only_scored", "cut", "quiet"}
    args |= {key: value for key, value in settings.items() if key not in own} | changes
    trainer = OfBatches(
        model, MultiTurnToolEnv([], system_prompt=None), [], [nothing], args=MTGRPOConfig(**args),
        callbacks=[gradients := Gradients()], train_dataset=Dataset.from_list([ROW] * 64),
        peft_config=copy.deepcopy(settings.get("peft")),
    )  # fmt: skip
    trainer.settings, trainer.gradients = settings, gradients.steps
    trainer.use_vllm = bool(settings.get("vllm"))
    assert trainer.layout.kind == ("trl" if layout == "trl" else "shared"), trainer.layout.reason
    trainer.layout.kind = layout
    return trainer


def train(model, out, layout, settings, **changes):
    """Gradients of the steps, and the log of the first."""
    trainer = make_trainer(model, out, layout, settings, **changes)
    trainer.train()
    assert trainer.layout.kind == layout
    return {"gradients": torch.stack(trainer.gradients), "log": trainer.state.log_history}


ON_RANKS = {
    **{name: dict(loss_type=name) for name in ("dapo", "grpo", "dr_grpo", "luspo", "sapo", "bnpo")},
    "cispo": dict(loss_type="cispo", epsilon_high=5.0),
    "vespo": dict(loss_type="vespo", credit_assignment="outcome", vllm="token"),
    "uneven": dict(loss_type="grpo", uneven=True, beta=0.1, vllm="token"),
    "a group on two ranks": dict(loss_type="dapo", uneven=True, per_device_train_batch_size=2,
                                 gradient_accumulation_steps=1, seed=1),
    "sequences": dict(loss_type="dapo", uneven=True, importance_sampling_level="sequence", vllm="sequence"),
    "further records": dict(loss_type="grpo", further=True, uneven=True),
    "groups without signal": dict(loss_type="dapo", quiet=True, seed=11, vllm="token", max_tokens_per_pass=80),
}  # fmt: skip


LOSSES = {  # each with what its rows need, and whether the tokens of a rollout can be in any records
    **{name: (dict(beta=0.1, vllm="token"), True) for name in ("dapo", "grpo", "dr_grpo", "luspo", "bnpo")},
    "cispo": (dict(beta=0.1, vllm="token", epsilon_high=1.5), True),
    "sapo": (dict(beta=0.1, vllm="token"), False),
    "vespo": (dict(vllm="token", credit_assignment="outcome"), False),
}
SPLITS = {  # of one batch of 16 rollouts over ranks: rows at a time, accumulated, per batch
    1: {"whole": (16, 1, 1), "accumulated": (4, 4, 4), "two steps": (4, 2, 4)},
    2: {"ranks": (8, 1, 1), "accumulated ranks": (2, 4, 4), "steps of ranks": (2, 1, 4)},
}


def train_split(model, out, layout, split, loss_type, seed=0, **changes):
    """The mean gradient of the steps of one batch, at weights that stay, and the log of all of them."""
    rows, accumulated, per_batch = split
    steps = per_batch // accumulated
    settings = dict(loss_type=loss_type, further=True, some_scored=True, seed=seed) | LOSSES[loss_type][0] | changes
    settings |= dict(per_device_train_batch_size=rows, gradient_accumulation_steps=accumulated, learning_rate=0.0)
    settings |= dict(steps_per_generation=per_batch, max_steps=steps, logging_steps=steps)
    found = train(model, out, layout, settings)
    names = ("loss", "entropy", "kl", "clip_ratio", "cispo", "vespo")
    log = {key: value for key, value in found["log"][0].items() if key.startswith(names)}
    return found["gradients"].mean(0, keepdim=True), log


def run_splits(model, out):
    """By loss and split of two ranks."""
    found = {}
    for loss_type in LOSSES:
        for name, split in SPLITS[2].items():
            limit = {"max_tokens_per_pass": 80} if name == "ranks" else {}
            found[f"{loss_type} {name}"] = train_split(
                model, out / f"{loss_type} {name}", "shared", split, loss_type, **limit
            )
    return found


def run_on_ranks(model, out):
    """Gradients, logs, and the tokens of this rank's passes, by setting and layout."""
    results = {}
    for name, settings in ON_RANKS.items():
        for layout, limit in (("trl", None), ("shared", None), ("shared", 80), ("padded", 120)):
            folder = out / f"{name} {layout} {limit}"
            trainer = make_trainer(model, folder, layout, settings, max_tokens_per_pass=limit)
            trainer.train()
            passes = [one for each in trainer._buffered_inputs for one in each.get("passes", [])]
            results[f"{name}-{layout}-{limit}"] = (
                torch.stack(trainer.gradients), trainer.state.log_history[0], [one.num_tokens for one in passes],
                [one["completion_mask"].shape[0] for one in passes],
            )  # fmt: skip
    return results
