"""Compare the trainer's step without generation with the step of TRL's `GRPOTrainer`, on a CPU.

    python scripts/bench/step.py             # all shapes; docs/results/step.json and the section of docs/speed.md
    python scripts/bench/step.py --short     # smaller, under 10 minutes; runs/bench_step_short.json
    python scripts/bench/step.py --report    # only the section of docs/speed.md, from docs/results/step.json
    python scripts/bench/step.py --shapes agents    # one shape; the results of the others are kept

Two processes have one trainer each, built once from the same model, optimizer, seed, dataset, batch and number of
threads. They take turns, never at once, and the order changes from pair to pair. Memory is measured after that, in two
more processes, because it needs other settings of the C library. The result is ours / TRL's, in wall seconds and in
CPU seconds of the whole process: of two neighbouring pairs, of opposite orders, the geometric mean.

A step lasts from one `on_step_begin` of `train()` to the next. Generation is replaced in both by the same canned
conversations, prepared anew for each step while nothing is timed. What is fair here, in both directions:
- TRL gets them through `rollout_func`, as ready lists of ids, masks and logprobs. The trainer here gets `Rollout`
  objects, so that deriving those lists from the turns is in its time only.
- TRL decodes completions after it has generated; the trainer here is made to decode each turn once in its step.
- Rendering prompts, parsing calls, running tools and pushing weights are in neither time.
- Both have two reward functions of the same arithmetic; a turn function gives one number per turn here, and one per
  rollout to TRL. Both log at every step; rollouts.jsonl (`log_rollouts: 16`, the default) is in our time only.

Shape `agents`: TRL's trainer has no rows for several records, so shared rows are compared with a row per turn and one
per record, computed one by one without padding. No side has a pass for old logprobs. Our first step is left out.
"""

import contextlib
import gc
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import common
from bench.common import ROOT, Frame, end_with_parent, machine, memory, rounded, spread, stopwatch, table
from bench.sync import SIZES

MODEL = ROOT / "hf_recipes/tiny/calculator-model"
SIDES = ("trl", "ours")
CONTEXT = 2**15  # tokens
# `tokens`: on average per rollout, tool results included. `lengths`: `even` from 0.6 to 1.4 times that; `normal` as in
# a step of the recipe, with a standard deviation of 25 and the longest 154; `log-normal` with a 99th percentile of ten
# times the mean, cut at five times. `prompt`: its tokens; 0: as it is. `rows`: `per_device_train_batch_size`, the rows
# of one of TRL's passes; 0: all. `model`: see `build_model`. `G`: rollouts of a prompt. `warm_up`: pairs that are not
# counted. `short`: changes by --short, None: it is left out. `settle`: steps of a side before the one that counts,
# since after one of the other process a short step takes up to half as long again. `results`: tokens of a result.
DEFAULTS = {"prompt": 0, "lengths": "even", "rows": 0, "model": "tiny", "G": 8, "warm_up": 1, "settle": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "recipe": {"title": "tiny recipe", "rollouts": 64, "tokens": 58, "lengths": "normal", "pairs": 16,
               "warm_up": 2, "settle": 1, "short": {"pairs": 8}},
    "prompt": {"title": "long prompt", "rollouts": 64, "tokens": 256, "prompt": 1024, "rows": 8,
               "pairs": 4, "short": {"rollouts": 16, "pairs": 2}},
    "spread": {"title": "log-normal lengths", "rollouts": 32, "tokens": 400, "prompt": 300, "lengths": "log-normal",
               "rows": 8, "pairs": 4, "short": {"rollouts": 16, "pairs": 2}},
    "real": {"title": "a model of 135M", "rollouts": 16, "tokens": 90, "prompt": 330, "model": "135M", "rows": 4,
             "pairs": 2, "short": None},
    "agents": {"title": "long agents", "rollouts": 8, "prompt": 1500, "results": (200, 2000), "turns": (30, 20, 10),
               "model": "like 4B", "short": {"prompt": 200, "results": (20, 100), "turns": (10,)}},
}  # fmt: skip

AGENTS = {"turns": "one per turn", "records": "one per record", "ours": "shared"}  # sides of `agents`: their rows

# How the C library treats the memory of tensors. Left to itself it gives some back to the system and takes it again,
# more or less often by chance: page faults that made a step up to a tenth slower in one process than in the other.
KEEP = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**36)}  # where seconds count
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # where memory counts: what is resident is what is in use

Shape = dict[str, Any]
Conversation = dict[str, Any]  # prompt (messages), prompt_ids, turns: token_ids, logprobs, call, result, ...

# -- Canned conversations, made once in the parent --


def make_conversations(shape: Shape, seed: int = 0) -> list[Conversation]:
    """One conversation per rollout, of plain lists and texts: two or three turns, of which all but the last call."""
    from transformers import AutoTokenizer

    import mt_grpo_trainer as mt
    from mt_grpo.recipe.data import make_arithmetic
    from mt_grpo.recipe.plugins import load_tools

    rng, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(MODEL)
    env = mt.MultiTurnToolEnv(load_tools(str(ROOT / "tools/calculator.py")), "Use the calculator, then answer.")
    conversations = []
    for row in make_arithmetic(shape["rollouts"] // shape["G"], seed):
        prompt = env.with_system_prompt([{"role": "user", "content": row["question"]}])
        room = shape["prompt"] - len(env.prompt_ids(prompt, tokenizer))
        before = tokenizer.decode(sums(rng, tokenizer, room, room))  # as much as examples and schemas would be
        prompt[-1]["content"] = f"{before} {prompt[-1]['content']}".strip()
        for _ in range(shape["G"]):
            num_turns = rng.choice((2, 3))
            length = draw_length(rng, shape, first=not conversations) // num_turns
            turns = [make_turn(env, tokenizer, rng, length, last=k + 1 == num_turns) for k in range(num_turns)]
            ids = env.prompt_ids(prompt, tokenizer)
            conversations.append({"prompt": prompt, "prompt_ids": ids, "turns": turns, "answer": row["answer"]})
    return conversations


def sums(rng: random.Random, tokenizer: Any, count: int, tokens: int) -> list[int]:
    """At most so many tokens of a text of `count` sums."""
    text = " ".join(f"{rng.randint(2, 99)} + {rng.randint(2, 99)}" for _ in range(count))
    return tokenizer(text)["input_ids"][: max(0, tokens)]


def draw_length(rng: random.Random, shape: Shape, first: bool) -> int:
    """Tokens of a rollout."""
    mean = shape["tokens"]
    if shape["lengths"] == "even":
        return round(mean * rng.uniform(0.6, 1.4))
    if shape["lengths"] == "normal":
        return 154 if first else round(max(rng.gauss(mean, 25), 20))
    # Log-normal: exp(mu + sigma^2 / 2) is the mean, exp(mu + 2.326 sigma) the 99th percentile, ten times as much.
    sigma = 2.326 - math.sqrt(2.326**2 - 2 * math.log(10))
    return round(min(max(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma), 20), 5 * mean))


def make_turn(env: Any, tokenizer: Any, rng: random.Random, length: int, last: bool) -> dict[str, Any]:
    """A turn whose ids and observation's ids are `length` together, or as few as a call or an answer needs."""
    from mt_grpo.rollout import ToolResult

    expression = f"{rng.randint(2, 99)} * {rng.randint(2, 99)}"
    call = f"<tool>{json.dumps({'name': 'calculator', 'args': {'expression': expression}})}</tool>"
    ending = tokenizer(f"<answer>{rng.randint(2, 9999)}</answer>" if last else call)["input_ids"]
    results = [] if last else [ToolResult(str(rng.randint(2, 9999)) * max(1, length // 80))]
    written = env.format_of(tokenizer)
    messages = written.results([], results)
    observation_ids = [] if last else written.suffix_ids([], messages, ending)
    token_ids = sums(rng, tokenizer, length // 3, length - len(ending) - len(observation_ids)) + ending
    return {
        "token_ids": token_ids,
        "logprobs": [round(rng.uniform(-3, 0), 6) for _ in token_ids],
        "call": None if last else {"expression": expression},
        "result": None if last else results[0].text,
        "messages": messages,
        "observation_ids": observation_ids,
    }


def make_agents(shape: Shape, num_turns: int) -> list[Conversation]:
    """A group of an agent's rollouts, in random ids. All share the first quarter of their turns.

    Half of them share a third. There, and after two thirds, a history becomes the prompt, a summary and two results.
    """
    rng = random.Random(num_turns)

    def ids(least: int, most: int) -> list[int]:
        return [rng.randrange(3, 399) for _ in range(rng.randint(least, most))]

    def turn() -> dict[str, Any]:
        sampled, seen = ids(40, 80), ids(*shape["results"])
        made = {"token_ids": sampled, "logprobs": [-6.0] * len(sampled), "observation_ids": seen}
        return made | {"call": {"expression": "1"}, "result": "1", "messages": [{"role": "tool", "content": "1"}]}

    prompt, first, conversations = ids(*[shape["prompt"]] * 2), [turn() for _ in range(num_turns // 3)], []
    for index in range(shape["rollouts"]):
        turns = [dict(each) for each in first[: None if index % 2 else num_turns // 4]]
        turns += [turn() for _ in range(num_turns - len(turns))]
        turns[-1] |= {"call": None, "messages": [], "observation_ids": []}
        for k in (num_turns // 3, num_turns * 2 // 3):
            turns[k]["context"] = prompt + ids(300, 300) + sum((t["observation_ids"] for t in turns[k - 2 : k]), [])
        messages = [{"role": "user", "content": "?"}]
        conversations.append({"prompt": messages, "prompt_ids": prompt, "turns": turns, "answer": "1"})
    return conversations


def give_turns_records(conversations: list[Conversation]) -> None:
    """Have each turn begin a record of its own, with all that it read."""
    for conversation in conversations:
        read = conversation["prompt_ids"]
        for turn in conversation["turns"]:
            turn["context"] = turn.get("context", read)
            read = turn["context"] + turn["token_ids"] + turn["observation_ids"]
            turn["observation_ids"] = []


def as_rollouts(conversations: list[Conversation]) -> list:
    """Fresh `Rollout` objects of the same conversations; their texts are decoded within the step.

    A turn may have `context`: ids of an edited history that it reads.
    """
    from mt_grpo.rollout import Context, Rollout, StopReason, ToolCall, ToolResult, Turn

    def turn_of(turn: dict[str, Any]) -> Turn:
        return Turn(
            list(turn["token_ids"]),
            list(turn["logprobs"]),
            "",
            "stop",
            [ToolCall("calculator", turn["call"])] if turn["call"] else [],
            [ToolResult(turn["result"])] if turn["call"] else [],
            messages=[dict(message) for message in turn["messages"]],
            observation_ids=list(turn["observation_ids"]),
            context=Context([], list(turn["context"])) if "context" in turn else None,
        )

    return [
        Rollout(list(c["prompt"]), list(c["prompt_ids"]), i, [*map(turn_of, c["turns"])], StopReason.ANSWERED)
        for i, c in enumerate(conversations)
    ]


def as_lists(conversations: list[Conversation]) -> dict[str, list]:
    """Convert conversations to the return value of TRL's `rollout_func`, in fresh lists."""
    rollouts = as_rollouts(conversations)
    keys = ("prompt_ids", "completion_ids", "logprobs", "loss_mask")
    return {key.replace("loss", "env"): [getattr(rollout, key) for rollout in rollouts] for key in keys}


# -- One side: a process with one trainer --


def turn_reward(rollout_turns: list[list], **kwargs) -> list[list[float | None]]:
    """One number per turn that called."""
    return [[len(t.token_ids) % 5 / 5 if t.calls else None for t in turns] for turns in rollout_turns]


def rollout_reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """One number per rollout, TRL's turn reward."""
    return [len(ids) % 5 / 5 for ids in completion_ids]


def outcome_reward(completion_ids: list[list[int]], answer: list[str], **kwargs) -> list[float]:
    return [float((sum(ids[-8:]) + len(gold)) % 2) for ids, gold in zip(completion_ids, answer)]


def build_model(shape: Shape) -> Any:
    """A model in float32 with room for the longest conversation: `tiny` is bundled, others have random weights.

    135M has the sizes of SmolLM2-135M, a Llama (30 layers of 576, a vocabulary of 49,152), 0.6B those of Qwen3-0.6B.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

    torch.manual_seed(0)
    if shape["model"] == "0.6B":
        config = Qwen3Config(**SIZES["0.6B"], tie_word_embeddings=True, max_position_embeddings=CONTEXT)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if shape["model"] == "135M":
        sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
        config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, max_position_embeddings=CONTEXT)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if shape["model"] == "like 4B":  # attention over 10,000 tokens has 0.8 times the operations of the rest
        sizes = {"vocab_size": 400, "hidden_size": 512, "intermediate_size": 1944, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
        config = Qwen3Config(**sizes, **heads, tie_word_embeddings=True, max_position_embeddings=CONTEXT)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config = AutoConfig.from_pretrained(MODEL, max_position_embeddings=CONTEXT)
    return AutoModelForCausalLM.from_pretrained(MODEL, config=config, dtype=torch.float32)


def build_trainer(side: str, shape: Shape, conversations: list, folder: str, meter: Any, **changes: Any) -> Any:
    """TRL's trainer or ours, with `changes` of their settings; `adapter` is the configuration of one.

    It is as if vLLM had sampled: importance sampling is corrected for.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    adapter, rows_per_pass = changes.pop("adapter", None), shape["rows"] or shape["rollouts"]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = [{"prompt": c["prompt"], "answer": c["answer"]} for c in conversations[:: shape["G"]]]
    settings = {
        "output_dir": folder, "num_generations": shape["G"], "per_device_train_batch_size": rows_per_pass,
        "gradient_accumulation_steps": shape["rollouts"] // rows_per_pass, "max_steps": 1000, "learning_rate": 1e-6,
        "lr_scheduler_type": "constant", "loss_type": "dapo", "beta": 0.0, "scale_rewards": "group",
        "max_completion_length": max(lengths_of(conversations)), "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "seed": 42, "shuffle_dataset": False, **changes,
    }  # fmt: skip
    common = {"model": build_model(shape), "train_dataset": Dataset.from_list(rows * 200), "callbacks": [meter]}
    common |= {"processing_class": tokenizer, "peft_config": adapter}
    if side == "trl":
        from trl import GRPOConfig, GRPOTrainer

        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        own = {"reward_funcs": [rollout_reward, outcome_reward], "rollout_func": lambda prompts, trainer: meter.batch}
        trainer = GRPOTrainer(args=GRPOConfig(**settings), **own, **common)
        meter.prepare = lambda: as_lists(conversations)
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer._last_loaded_step = -1
    else:
        import mt_grpo_trainer as mt
        from mt_grpo.recipe.plugins import load_tools

        def roll_out(prompts: list) -> list:
            turns = [turn for rollout in meter.batch for turn in rollout.turns]
            texts = tokenizer.batch_decode([turn.token_ids for turn in turns], skip_special_tokens=True)
            for turn, text in zip(turns, texts, strict=True):
                turn.text = text
            return meter.batch

        env = mt.MultiTurnToolEnv(load_tools(str(ROOT / "tools/calculator.py")), None)
        own = {"turn_reward_funcs": [turn_reward], "outcome_reward_funcs": [outcome_reward]}
        trainer = mt.MTGRPOEnvTrainer(args=mt.MTGRPOConfig(**settings), env=env, **own, **common)
        meter.prepare = lambda: as_rollouts(conversations)
        trainer._roll_out = roll_out
    trainer.remove_callback(PrinterCallback)
    trainer.use_vllm, trainer.vllm_importance_sampling_mode = True, "token_truncate"
    return trainer


def make_meter(side: str, connection: Any, keeps_gradient: bool) -> Any:
    """A callback that takes a step when the parent sends "step", and answers with what it cost.

    To "report" it answers with the memory and, if kept, the first gradient. The parent closes it at the end.
    """
    import numpy as np
    from transformers import TrainerCallback

    class Meter(TrainerCallback):
        prepare = batch = trainer = timing = gradient = None

        def on_step_begin(self, args, state, control, **kwargs):
            if self.timing is not None:
                self.timing.close()
                connection.send({**self.seconds, "computed": self.computed()})
            self.batch = self.prepare()
            gc.collect()  # what preparing left behind is not the step's
            while connection.recv() != "step":
                connection.send({"peak_mib": memory("VmHWM") / 2**20, "gradient": self.gradient})
            if keeps_gradient:
                common.start_of_peak()  # what the first step needs to prove its rows is not counted
            self.timing = contextlib.ExitStack()
            self.seconds = self.timing.enter_context(stopwatch())

        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            if keeps_gradient and self.gradient is None:
                self.gradient = np.concatenate([parameter.grad.flatten() for parameter in model.parameters()])

        def computed(self) -> int:
            """Tokens that the passes of the last step read; 0 where they are TRL's."""
            if side in ("turns", "records"):  # which are computed one by one
                records = [record for rollout in self.batch for record in rollout.records]
                return sum(len(record.prompt_ids) + len(record.completion_ids) for record in records)
            buffered = getattr(self.trainer, "_buffered_inputs", None) or []
            return sum(one.num_tokens for each in buffered for one in each.get("passes", []))

    return Meter()


def serve(side: str, shape: Shape, conversations: list[Conversation], threads: int, connection: Any) -> None:
    """The child's whole life: build, then step by step until the parent closes the connection."""
    end_with_parent(signal.SIGKILL)
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(threads)
    if side == "turns":
        give_turns_records(conversations)
    with tempfile.TemporaryDirectory(prefix="bench-step-", ignore_cleanup_errors=True) as folder:
        meter = make_meter(side, connection, keeps_gradient="turns" in shape)
        changes = {"share_prompts": side == "ours", "vllm_importance_sampling_correction": False}
        changes = {**changes, "max_tokens_per_pass": 2**15 if side == "ours" else 1} if "turns" in shape else {}
        meter.trainer = shape.get("build", build_trainer)(side, shape, conversations, folder, meter, **changes)
        with contextlib.suppress(EOFError):  # the parent asks for no further step
            meter.trainer.train()


@contextlib.contextmanager
def both_sides(
    shape: Shape, conversations: list[Conversation], threads: int, memory: dict[str, str]
) -> Iterator[dict[str, Callable[[str], dict[str, Any]]]]:
    """A process for each side, as a function of "step" (`wall` and `cpu` seconds, tokens `computed`) or "report".

    It raises `RuntimeError` where the process has ended; what that said about it is on stderr.
    """
    context = multiprocessing.get_context("spawn")

    def start(name: str) -> Callable[[str], dict[str, Any]]:
        connection, theirs = context.Pipe()
        process = context.Process(target=serve, args=(name, shape, conversations, threads, theirs), daemon=True)
        with patch.dict(os.environ, memory):  # read when the process starts
            process.start()
        theirs.close()

        def ask(command: str) -> dict[str, Any]:
            try:
                connection.send(command)
                return connection.recv()
            except (EOFError, OSError):
                process.join(10)
                raise RuntimeError(f"The process of {name} ended with exit code {process.exitcode}.") from None

        for end in (process.join, process.terminate, lambda: process.join(20), connection.close):
            stack.callback(end)  # the last one is called first
        return ask

    with contextlib.ExitStack() as stack:
        yield {name: start(name) for name in shape.get("sides") or (AGENTS if "turns" in shape else SIDES)}


# -- Pairs --


def lengths_of(conversations: list[Conversation]) -> list[int]:
    """Tokens of each conversation after its prompt."""
    return [sum(len(t["token_ids"]) + len(t["observation_ids"]) for t in c["turns"]) for c in conversations]


def run_shape(shape: Shape, threads: int) -> dict[str, Any]:
    """Take all pairs of one shape; returns its row of the results file."""
    conversations = make_conversations(shape)
    lengths, longest = lengths_of(conversations), max(len(c["prompt_ids"]) for c in conversations)
    with both_sides(shape, conversations, threads, KEEP) as sides:
        taken: list[dict[str, dict[str, float]]] = []
        for number in range(shape["warm_up"] + shape["pairs"]):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            steps = {name: [sides[name]("step") for _ in range(1 + shape["settle"])][-1] for name in order}
            taken += [steps] if number >= shape["warm_up"] else []
            ratio = steps["ours"]["wall"] / steps["trl"]["wall"]
            pairs = shape["warm_up"] + shape["pairs"]
            print(f"{shape['title']}: pair {number + 1} of {pairs}, TRL / ours {1 / ratio:.2f}", flush=True)
    with both_sides(shape, conversations, threads, GIVE_BACK) as sides:
        for ask in [*sides.values()] * 2:
            ask("step")
        memory = {"peak_mib": {name: ask("report")["peak_mib"] for name, ask in sides.items()}}
    trained = sum(len(t["token_ids"]) for c in conversations for t in c["turns"])
    computed = {"trl": len(lengths) * (longest + max(lengths)), "ours": taken[-1]["ours"]["computed"]}
    return {
        **{key: shape[key] for key in ("title", "rollouts", "model", "rows", "G")},
        "prompt": longest,
        "tokens": round(statistics.mean(lengths)),
        "longest": max(lengths),
        "per_trained": {side: tokens / trained for side, tokens in computed.items()},
        **figures_of(taken, memory),
    }


def run_agents(shape: Shape, threads: int) -> Iterator[dict[str, Any]]:
    """A row of figures for each number of turns."""
    for num_turns in shape["turns"]:
        conversations = make_agents(shape, num_turns)
        with both_sides(shape, conversations, threads, GIVE_BACK) as sides:
            sides["ours"]("step")  # the one that proves its rows
            taken = [(name, sides[name]("step")) for name in [*AGENTS][::-1] + [*AGENTS][1:]]
            reports = {name: ask("report") for name, ask in sides.items()}
        ours, dense = (reports[name]["gradient"] for name in ("ours", "turns"))
        trained = sum(len(turn["token_ids"]) for each in conversations for turn in each["turns"])
        yield rounded({
            "turns": num_turns,
            "per_trained": {name: step["computed"] / trained for name, step in taken},
            **{kind: {name: statistics.mean(step[kind] for side, step in taken if side == name) for name in AGENTS}
               for kind in ("wall", "cpu")},
            "peak_mib": {name: report["peak_mib"] for name, report in reports.items()},
            "difference": float(abs(ours - dense).max() / abs(dense).max()),
        }, 5)  # fmt: skip


def figures_of(pairs: list[dict[str, dict[str, float]]], memory: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The figures of a shape from its pairs of steps (seconds), an even number, and its memory (MiB)."""
    ratios, seconds = {}, {side: {} for side in SIDES}
    for kind in ("wall", "cpu"):
        each = [pair["ours"][kind] / pair["trl"][kind] for pair in pairs]
        ratios[kind] = spread([math.sqrt(a * b) for a, b in zip(each[::2], each[1::2], strict=True)])
        for side in SIDES:
            seconds[side][kind] = statistics.median(pair[side][kind] for pair in pairs)
    peak = memory["peak_mib"]
    ratios["memory"] = peak["ours"] / peak["trl"]
    return {"pairs": len(pairs), "ratio": ratios, "median_seconds": seconds, "memory": memory}


# -- The report --


def section(results: dict[str, Any]) -> str:
    """The section of docs/speed.md: one row per shape."""
    where, threads = results["machine"], results["threads"]
    lines = [
        "**The step**, against TRL's `GRPOTrainer` on the same conversations, without generation. *Times as fast*: "
        "TRL's seconds over ours, median (smallest to largest) of pairs of alternating steps, two of opposite orders "
        "as one. *Computed*: tokens that the passes of a step read per token that is trained, TRL's and ours. "
        f"{where['cpu']}, {threads} {'thread' if threads == 1 else 'threads'}, torch {where['torch']}, TRL "
        f"{where['trl']}.",
        "",
    ]
    head = "batch | prompt | completions: mean, longest | TRL's step | times as fast | in CPU seconds"
    rows = []
    for row in results["shapes"].values():
        ratio, peak, each = row["ratio"], row["memory"]["peak_mib"], row["per_trained"]
        wall, cpu = (
            f"{1 / ratio[kind]['median']:.2f} ({1 / ratio[kind]['max']:.2f} to {1 / ratio[kind]['min']:.2f})"
            for kind in ("wall", "cpu")
        )
        rows.append(
            f"{row['title']}: {row['rollouts']} rollouts | {row['prompt'] or '-'} | {row['tokens']:,}, "
            f"{row['longest']:,} | {row['median_seconds']['trl']['wall']:.2f} s | {wall} | {cpu} | "
            f"{peak['ours']:,.0f} of {peak['trl']:,.0f} MiB | {each['trl']:.1f}, {each['ours']:.1f}"
        )
    lines += table(f"{head} | peak memory | computed", rows)
    if agents := results.get("agents"):
        lines += [
            "\n**Long agents**: 8 rollouts of a prompt of 1,500 tokens, results of 200 to 2,000 tokens, first turns "
            "in common, histories compacted twice; a model of one layer (3.4M parameters) in which attention over "
            "10,000 tokens has 0.8 times the operations of the rest, as in Qwen3-4B. Figures are of rows per turn, "
            "with all that it read, per record (one by one, not padded; TRL has none), and of shared rows. "
            "*Computed*: tokens per trained token. The gradients of shared rows and of rows per turn differ by "
            f"{max(row['difference'] for row in agents):.0e} of the largest entry at most.\n",
            "![Tokens computed per trained token, and CPU seconds of a step, over a rollout's turns](step_agents.png)",
            "",
        ]
        columns = ("per_trained", 1), ("wall", 0), ("cpu", 0), ("peak_mib", 0)
        cells = (
            f"{row['turns']} | "
            + " | ".join(", ".join(f"{row[key][name]:,.{digits}f}" for name in AGENTS) for key, digits in columns)
            for row in agents
        )
        lines += table("turns | computed | seconds | CPU seconds | peak memory, MiB", cells)
    return "\n".join(lines)


def plot_agents(rows: list[dict[str, Any]], path: Path) -> None:
    """Two panels over the number of turns, a line for each side."""
    figure, axes = common.pyplot().subplots(1, 2, figsize=(7, 2.6))
    for axis, key, title in zip(axes, ("per_trained", "cpu"), ("tokens computed per trained token", "CPU seconds")):
        for name, label in AGENTS.items():
            axis.plot([row["turns"] for row in rows], [row[key][name] for row in rows], marker="o", label=label)
        axis.set(title=title, xlabel="turns of a rollout", ylim=(0, None))
    axes[0].legend(fontsize=8)
    common.save_picture(figure, path)


FRAME = Frame("step", section)


def main(argv: list[str] | None = None) -> None:
    chosen = {"nargs": "+", "choices": SHAPES, "help": "default: all"}
    options = FRAME.parse(__doc__, argv, "smaller, under 10 minutes; docs/speed.md is left alone", shapes=chosen)
    if options is None:
        return
    threads = min(2, len(os.sched_getaffinity(0)))  # of each process
    # Read by the children when they load OpenMP: threads that wait must not burn the CPU seconds that are compared.
    os.environ |= {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "20000", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    shapes = {name: {**DEFAULTS, **SHAPES[name]} for name in options.shapes or SHAPES}
    if options.short:
        shapes = {name: {**shape, **shape["short"]} for name, shape in shapes.items() if shape["short"]}
    kept = json.loads(FRAME.results.read_text(encoding="utf-8")) if options.shapes and not options.short else {}
    results = {**kept, "machine": machine(), "threads": threads}
    if agents := shapes.pop("agents", None):
        results["agents"] = []
        for row in run_agents(agents, threads):
            results["agents"].append(row)
            FRAME.keep(results, options.short)
    results["shapes"] = kept.get("shapes", {}) | {name: run_shape(shape, threads) for name, shape in shapes.items()}
    FRAME.finish(rounded(results, 5), options.short)
    if agents:
        plot_agents(results["agents"], ROOT / ("runs" if options.short else "docs") / "step_agents.png")


if __name__ == "__main__":
    main()
