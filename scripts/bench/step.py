"""Compare the trainer's step, with and without generation, with the step of TRL's `GRPOTrainer`, on a CPU.

    python scripts/bench/step.py                  # all shapes; docs/results/step.json and the section of docs/speed.md
    python scripts/bench/step.py --short          # smaller, about 10 minutes; runs/bench_step_short.json
    python scripts/bench/step.py --shapes real    # only this one, into the results that are there
    python scripts/bench/step.py --report         # only the section of docs/speed.md, from docs/results/step.json

Two processes, each with one trainer that is built once: the same model, optimizer, seed, dataset, batch and number of
threads. They take turns: one step here, then one step there, never at once, and the order changes from pair to pair.
Memory is measured after that, in two more processes, because it needs other settings of the C library.
What is judged is ours / TRL's, in wall seconds and in CPU seconds (of the whole process). The order within a pair
matters: with the tiny recipe the first step took 1.67 s and the second 1.95 s, whichever side took them. So two
neighbouring pairs, of opposite orders, give one ratio, the geometric mean of theirs, and the median is over these.

A step lasts from one `on_step_begin` of `train()` to the next: rewards, tensors, credit, forward passes, loss,
backward, optimizer, metrics, logging, the next rows of the dataset. Generation is replaced in both by the same canned
conversations, prepared while nothing is timed and anew for each step. Both correct for importance sampling.

What is fair here, in both directions:
- TRL gets them through `rollout_func`, as ready lists of ids, masks and logprobs. The trainer here gets `Rollout`
  objects, so that deriving those lists from the turns is in its time only.
- TRL decodes completions after it has generated; the trainer here is made to decode each turn once in its step.
- Not in either time: rendering prompts, parsing calls, running tools, pushing weights.
- Both have two reward functions of the same arithmetic; a turn function gives one number per turn here, and one per
  rollout to TRL. Both log at every step; rollouts.jsonl (`log_rollouts: 16`, the default) is in our time only.

The shapes with generation are the whole step: TRL's trainer with `tools=` against the trainer here with `tool_format:
hermes`, the same model, prompts, tool and reward function. Both generate with `transformers` in this process, twice: a
turn with a call, which runs, and the answer. `generate` computes as ever. What it samples is forced to ids that were
chosen before, as many in each turn, so that both sides sample, read and train on equally many tokens.
"""

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.common import ROOT, Frame, end_with_parent, machine, memory, rounded, spread, stopwatch
from bench.sync import SIZES

MODEL = ROOT / "hf_recipes/tiny/calculator-model"
HERMES_MODEL = ROOT / "hf_recipes/tiny/calculator-hermes-model"
SIDES = ("trl", "ours")
CONTEXT = 4096  # tokens
# `tokens`: on average per rollout, tool results included. `lengths`: `even` from 0.6 to 1.4 times that; `normal` as in
# a step of the recipe, with a standard deviation of 25 and the longest 154; `log-normal` with a 99th percentile of ten
# times the mean, cut at five times. `prompt`: its tokens; 0: as it is. `rows`: `per_device_train_batch_size`, the rows
# of one of TRL's passes; 0: all. `model`: see `build_model`. `goal`: how many times as fast as TRL's the step is to
# be. `warm_up`: pairs that are not counted. `short`: of --short. With `generates` tokens are sampled. `G`: rollouts of
# a prompt. `settle`: steps of a side before the one that counts: in training a step follows another of its own, and
# behind one of the other process a short step takes up to half as long again.
DEFAULTS = {"prompt": 0, "lengths": "even", "rows": 0, "model": "tiny", "goal": None, "generates": False, "G": 8,
            "warm_up": 1, "settle": 0}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "recipe": {"title": "tiny recipe", "rollouts": 64, "tokens": 58, "lengths": "normal", "goal": 2.5, "pairs": 16,
               "warm_up": 2, "settle": 1, "short": {"pairs": 8}},
    "prompt": {"title": "long prompt", "rollouts": 64, "tokens": 256, "prompt": 1024, "rows": 8, "goal": 3.0,
               "pairs": 4, "short": {"rollouts": 16, "pairs": 2}},
    "spread": {"title": "log-normal lengths", "rollouts": 32, "tokens": 400, "prompt": 300, "lengths": "log-normal",
               "rows": 8, "goal": 6.0, "pairs": 4, "short": {"rollouts": 16, "pairs": 2}},
    "real": {"title": "a model of 135M", "rollouts": 16, "tokens": 90, "prompt": 330, "model": "135M", "rows": 4,
             "goal": 2.5, "pairs": 2, "short": None},
    "generation": {"title": "with generation", "rollouts": 64, "tokens": 80, "pairs": 8, "generates": True,
                   "warm_up": 2, "settle": 1, "short": {"pairs": 4}},
    "real_generation": {"title": "135M with generation", "rollouts": 8, "tokens": 90, "prompt": 330, "model": "135M",
                        "rows": 4, "pairs": 2, "generates": True, "short": None},
}  # fmt: skip

# How the C library treats the memory of tensors. Left to itself it gives some back to the system and takes it again,
# more or less often by chance: page faults that made a step up to a tenth slower in one process than in the other.
KEEP = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**36)}  # where seconds count
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # where memory counts: what is resident is what is in use

Shape = dict[str, Any]
Conversation = dict[str, Any]  # prompt (messages), prompt_ids, turns: token_ids, logprobs, text, call, result, ...

# -- Canned conversations, made once in the parent --


def make_conversations(shape: Shape) -> list[Conversation]:
    """Conversations with what a shape takes."""
    return make_forced(shape) if shape["generates"] else make_canned(shape)


def make_canned(shape: Shape, seed: int = 0) -> list[Conversation]:
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
        before = make_filler(rng, tokenizer, shape["prompt"] - len(env.prompt_ids(prompt, tokenizer)))
        prompt[-1]["content"] = f"{before} {prompt[-1]['content']}".strip()
        for _ in range(shape["G"]):
            num_turns = rng.choice((2, 3))
            length = draw_length(rng, shape, first=not conversations) // num_turns
            turns = [make_turn(env, tokenizer, rng, length, last=k + 1 == num_turns) for k in range(num_turns)]
            ids = env.prompt_ids(prompt, tokenizer)
            conversations.append({"prompt": prompt, "prompt_ids": ids, "turns": turns, "answer": row["answer"]})
    return conversations


def make_filler(rng: random.Random, tokenizer: Any, tokens: int) -> str:
    """Sums of so many tokens, as many as examples and schemas would be before a question; none: an empty text."""
    text = " ".join(f"{rng.randint(2, 99)} + {rng.randint(2, 99)}" for _ in range(tokens))
    return tokenizer.decode(tokenizer(text)["input_ids"][: max(0, tokens)])


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


def make_forced(shape: Shape, seed: int = 0) -> list[Conversation]:
    """One conversation per rollout, of a call and an answer, whose ids are equally many: those that are sampled."""
    from transformers import AutoTokenizer

    from mt_grpo.recipe.data import make_arithmetic

    rng, tokenizer, conversations = random.Random(seed), AutoTokenizer.from_pretrained(HERMES_MODEL), []
    for row in make_arithmetic(shape["rollouts"] // shape["G"], seed):
        system = {"role": "system", "content": "Use the calculator, then answer."}
        before = make_filler(rng, tokenizer, shape["prompt"])
        prompt = [system, {"role": "user", "content": f"{before} {row['question']}".strip()}]
        for _ in range(shape["G"]):
            expression = f"{rng.randint(2, 99)} * {rng.randint(2, 99)}"
            call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
            turns = []
            for text in (f"<tool_call>\n{call}\n</tool_call>", f"The answer is {rng.randint(2, 9999)}."):
                ending = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
                thoughts = " ".join(f"{rng.randint(2, 99)} + {rng.randint(2, 99)}" for _ in range(shape["tokens"]))
                room = shape["tokens"] // 2 - len(ending)
                ids = tokenizer(thoughts, add_special_tokens=False)["input_ids"][:room] + ending
                turns.append({"token_ids": ids, "observation_ids": []})
            conversations.append({"prompt": prompt, "turns": turns, "answer": row["answer"]})
    return conversations


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
    thoughts = " ".join(f"{rng.randint(2, 99)} + {rng.randint(2, 99)}" for _ in range(length // 3))
    room = max(0, length - len(ending) - len(observation_ids))
    token_ids = tokenizer(thoughts)["input_ids"][:room] + ending
    return {
        "token_ids": token_ids,
        "logprobs": [round(rng.uniform(-3, 0), 6) for _ in token_ids],
        "text": tokenizer.decode(token_ids),
        "call": None if last else {"expression": expression},
        "result": None if last else results[0].text,
        "messages": messages,
        "observation_ids": observation_ids,
    }


def as_lists(conversations: list[Conversation]) -> dict[str, list]:
    """Convert conversations to the return value of TRL's `rollout_func`, in fresh lists."""
    lists: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for conversation in conversations:
        turns = [(t["token_ids"], t["logprobs"], t["observation_ids"]) for t in conversation["turns"]]
        lists["prompt_ids"].append(list(conversation["prompt_ids"]))
        lists["completion_ids"].append([i for ids, _, observation in turns for i in ids + observation])
        lists["logprobs"].append([p for _, logprobs, seen in turns for p in logprobs + [0.0] * len(seen)])
        lists["env_mask"].append([m for ids, _, seen in turns for m in [1] * len(ids) + [0] * len(seen)])
    return lists


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


# -- One side: a process with one trainer --


def turn_reward(rollout_turns: list[list], **kwargs) -> list[list[float | None]]:
    """One number per turn that called."""
    return [[len(t.token_ids) % 5 / 5 if t.observation_ids else None for t in turns] for turns in rollout_turns]


def rollout_reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """One number per rollout, TRL's turn reward."""
    return [len(ids) % 5 / 5 for ids in completion_ids]


def outcome_reward(completion_ids: list[list[int]], answer: list[str], **kwargs) -> list[float]:
    return [float((len(ids) + len(gold)) % 2) for ids, gold in zip(completion_ids, answer)]


def calculator_reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """The one reward function of both sides where they generate."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def force(model: Any, conversations: list[Conversation], meter: Any) -> None:
    """Have `model.generate` compute as ever, and sample the ids of all calls, then those of all answers, and so on."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    original, number = model.generate, itertools.count()

    class Forced(LogitsProcessor):
        def __init__(self, ids: Any, prompt_length: int):
            self.ids, self.prompt_length = ids, prompt_length

        def __call__(self, seen: Any, scores: Any) -> Any:
            place = seen.shape[1] - self.prompt_length
            return torch.full_like(scores, -torch.inf).scatter(1, self.ids[:, place : place + 1], 0.0)

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        turn, length = next(number) % 2, input_ids.shape[1]
        ids = torch.tensor([conversation["turns"][turn]["token_ids"] for conversation in conversations])
        forced = LogitsProcessorList([Forced(ids, length)])
        output = original(input_ids=input_ids, logits_processor=forced, **kwargs)
        if not torch.equal(output[:, length:], ids):
            raise RuntimeError(f"generate sampled {tuple(output[:, length:].shape)} ids, expected {tuple(ids.shape)}.")
        meter.sampled += ids.numel()
        return output

    model.generate = generate


def build_model(shape: Shape) -> Any:
    """In float32, with room for the longest conversation: `tiny`, a bundled model; else random weights.

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
    model = HERMES_MODEL if shape["generates"] else MODEL
    config = AutoConfig.from_pretrained(model, max_position_embeddings=CONTEXT)
    return AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32)


def build_trainer(
    side: str,
    shape: Shape,
    conversations: list[Conversation],
    folder: str,
    meter: Any,
    adapter: Any = None,
    **changes: Any,
) -> Any:
    """TRL's trainer or ours, with `changes` of their settings, and an adapter's configuration if there is one.

    Without generation it is as if vLLM had sampled: importance sampling is corrected for.
    """
    from types import SimpleNamespace

    from datasets import Dataset
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    from mt_grpo.recipe.plugins import load_tools

    generates, rows_per_pass = shape["generates"], shape["rows"] or shape["rollouts"]
    tokenizer = AutoTokenizer.from_pretrained(HERMES_MODEL if generates else MODEL)
    rows = [{"prompt": c["prompt"], "answer": c["answer"]} for c in conversations[:: shape["G"]]]
    longest = max(sum(len(t["token_ids"]) + len(t["observation_ids"]) for t in c["turns"]) for c in conversations)
    settings = {
        "output_dir": folder, "num_generations": shape["G"], "per_device_train_batch_size": rows_per_pass,
        "gradient_accumulation_steps": shape["rollouts"] // rows_per_pass, "max_steps": 1000, "learning_rate": 1e-6,
        "lr_scheduler_type": "constant", "loss_type": "dapo", "beta": 0.0, "scale_rewards": "group",
        "max_completion_length": longest, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 42,
        "shuffle_dataset": False, **changes,
    }  # fmt: skip
    data = Dataset.from_list(rows * 200)
    common = {"model": build_model(shape), "train_dataset": data, "processing_class": tokenizer}
    common |= {"callbacks": [meter], "peft_config": adapter}
    tools = load_tools(str(ROOT / "tools/calculator.py"))
    if generates:
        settings["max_completion_length"] = 2 * longest
    if side == "trl":
        from trl import GRPOConfig, GRPOTrainer
        from trl.chat_template_utils import qwen3_template

        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        own = {"reward_funcs": [rollout_reward, outcome_reward], "rollout_func": lambda prompts, trainer: meter.batch}
        if generates:
            # TRL knows how to read calls by the bytes of the template. The bundled model writes calls as Qwen 3 does.
            tokenizer.response_template = qwen3_template
            own = {"reward_funcs": [calculator_reward], "tools": tools}
        trainer = GRPOTrainer(args=GRPOConfig(**settings), **own, **common)
    else:
        import mt_grpo_trainer as mt

        env = mt.MultiTurnToolEnv(tools, None, **({"tool_format": "hermes"} if generates else {}))
        own = {"turn_reward_funcs": [turn_reward], "outcome_reward_funcs": [outcome_reward]}
        if generates:
            own = {"outcome_reward_funcs": [calculator_reward]}
        trainer = mt.MTGRPOEnvTrainer(args=mt.MTGRPOConfig(**settings), env=env, **own, **common)
    trainer.remove_callback(PrinterCallback)
    if generates:
        meter.prepare = lambda: None
        force(trainer.model, conversations, meter)
        return trainer
    trainer.use_vllm, trainer.vllm_importance_sampling_mode = True, "token_truncate"
    if side == "trl":
        meter.prepare = lambda: as_lists(conversations)
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer._last_loaded_step = -1
        return trainer

    def roll_out(prompts: list) -> list:
        turns = [turn for rollout in meter.batch for turn in rollout.turns]
        texts = tokenizer.batch_decode([turn.token_ids for turn in turns], skip_special_tokens=True)
        for turn, text in zip(turns, texts, strict=True):
            turn.text = text
        return meter.batch

    meter.prepare = lambda: as_rollouts(conversations)
    trainer._roll_out = roll_out
    return trainer


class Finished(Exception):
    """The parent asks for no further step."""


def make_meter(connection: Any) -> Any:
    """A callback that takes a step when the parent says so, and answers with what it cost.

    The parent sends "step" or "report", and closes the connection at the end.
    """
    import gc

    from transformers import TrainerCallback

    class Meter(TrainerCallback):
        def __init__(self):
            self.prepare, self.batch, self.trainer = None, None, None
            self.timing, self.seconds = None, {}
            self.sampled = 0  # tokens, where the step generates

        def on_step_begin(self, args, state, control, **kwargs):
            if self.timing is not None:
                connection.send(self.stop())
            self.batch = self.prepare()
            gc.collect()  # what preparing left behind is not the step's
            while True:
                try:
                    command = connection.recv()
                except EOFError:
                    raise Finished from None
                if command == "step":
                    return self.start()
                connection.send({"peak_mib": memory("VmHWM") / 2**20})

        def computed(self) -> int:
            """Tokens that the passes of the last step read; 0 where they are TRL's."""
            buffered = getattr(self.trainer, "_buffered_inputs", None) or []
            return sum(one.num_tokens for each in buffered for one in each.get("passes", []))

        def start(self) -> None:
            self.timing, self.sampled = contextlib.ExitStack(), 0
            self.seconds = self.timing.enter_context(stopwatch())

        def stop(self) -> dict[str, float]:
            self.timing.close()
            return {**self.seconds, "sampled": self.sampled, "computed": self.computed()}

    return Meter()


def serve(side: str, shape: Shape, conversations: list[Conversation], threads: int, connection: Any) -> None:
    """The child's whole life: build, then step by step until the parent closes the connection."""
    end_with_parent(signal.SIGKILL)
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(threads)
    folder = tempfile.mkdtemp(prefix="bench-step-")
    try:
        meter = make_meter(connection)
        meter.trainer = build_trainer(side, shape, conversations, folder, meter)
        meter.trainer.train()
    except Finished:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Side:
    """The parent's end of one child: `with Side("ours", shape, conversations, threads) as side: side.ask("step")`.

    Raises `RuntimeError` where the child has ended; what it said about it is on stderr.
    """

    def __init__(
        self, side: str, shape: Shape, conversations: list[Conversation], threads: int, memory: dict[str, str] = KEEP
    ):
        context = multiprocessing.get_context("spawn")
        self.name = side
        self.connection, theirs = context.Pipe()
        arguments = (side, shape, conversations, threads, theirs)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        with patch.dict(os.environ, memory):  # read when the process starts
            self.process.start()
        theirs.close()

    def ask(self, command: str) -> dict[str, Any]:
        """The answer to "step", of which `wall` and `cpu` seconds and tokens `sampled` and `computed`, or "report"."""
        try:
            self.connection.send(command)
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(10)
            raise RuntimeError(f"The process of {self.name} ended with exit code {self.process.exitcode}.") from None

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *error) -> None:
        self.connection.close()
        self.process.join(20)
        self.process.terminate()
        self.process.join()


# -- Pairs --


@contextlib.contextmanager
def both_sides(shape: Shape, conversations: list[Conversation], threads: int, memory: dict[str, str]) -> Iterator:
    """A process for each side."""
    with contextlib.ExitStack() as stack:
        yield {side: stack.enter_context(Side(side, shape, conversations, threads, memory)) for side in SIDES}


def chosen(names: list[str] | None, short: bool) -> dict[str, Shape]:
    """The shapes to run: those that were asked for, at their short sizes if so.

    >>> shapes = chosen(None, short=True)
    >>> list(shapes), shapes["spread"]["rollouts"]
    (['recipe', 'prompt', 'spread', 'generation'], 16)
    """
    names = names or [name for name, shape in SHAPES.items() if not short or shape["short"]]
    return {name: {**DEFAULTS, **SHAPES[name], **(short and SHAPES[name]["short"] or {})} for name in names}


def run_shape(shape: Shape, threads: int) -> dict[str, Any]:
    """Take all pairs of one shape; returns its row of the results file."""
    conversations = make_conversations(shape)
    lengths = [sum(len(t["token_ids"]) + len(t["observation_ids"]) for t in c["turns"]) for c in conversations]
    prompts = [0 if shape["generates"] else len(c["prompt_ids"]) for c in conversations]
    with both_sides(shape, conversations, threads, KEEP) as sides:
        taken: list[dict[str, dict[str, float]]] = []
        for number in range(shape["warm_up"] + shape["pairs"]):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            steps = {name: [sides[name].ask("step") for _ in range(1 + shape["settle"])][-1] for name in order}
            taken += [steps] if number >= shape["warm_up"] else []
            if steps["ours"]["sampled"] != steps["trl"]["sampled"]:
                raise RuntimeError(f"The sides sampled {steps} tokens, expected equally many.")
            ratio = steps["ours"]["wall"] / steps["trl"]["wall"]
            pairs = shape["warm_up"] + shape["pairs"]
            print(f"{shape['title']}: pair {number + 1} of {pairs}, TRL / ours {1 / ratio:.2f}", flush=True)
    with both_sides(shape, conversations, threads, GIVE_BACK) as sides:
        for side in [*sides.values()] * 2:
            side.ask("step")
        memory = {"peak_mib": {name: side.ask("report")["peak_mib"] for name, side in sides.items()}}
    trained = sum(len(t["token_ids"]) for c in conversations for t in c["turns"])
    computed = {"trl": len(lengths) * (max(prompts) + max(lengths)), "ours": taken[-1]["ours"]["computed"]}
    return {
        **{key: shape[key] for key in ("title", "rollouts", "model", "generates", "goal", "rows", "G")},
        "prompt": max(prompts),
        "tokens": round(statistics.mean(lengths)),
        "longest": max(lengths),
        "per_trained": {side: tokens / trained for side, tokens in computed.items()},
        **figures_of(taken, memory),
    }


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
        "**The step**, against TRL's `GRPOTrainer` on the same conversations, without generation but for rows that "
        "say so (there TRL's has `tools=`, and both sample in their process). *Times as fast*: TRL's seconds over "
        "ours, median (smallest to largest) of pairs of alternating steps, two of opposite orders as one. *Computed*: "
        "tokens that the passes of a step read per token that is trained, TRL's and ours. "
        f"{where['cpu']}, {threads} {'thread' if threads == 1 else 'threads'}, torch {where['torch']}, TRL "
        f"{where['trl']}.",
        "",
        "| batch | prompt | completions: mean, longest | TRL's step | times as fast | in CPU seconds | goal | peak "
        "memory | computed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["shapes"].values():
        ratio, peak, each = row["ratio"], row["memory"]["peak_mib"], row["per_trained"]
        wall, cpu = (
            f"{1 / ratio[kind]['median']:.2f} ({1 / ratio[kind]['max']:.2f} to {1 / ratio[kind]['min']:.2f})"
            for kind in ("wall", "cpu")
        )
        computed = "-" if row["generates"] else f"{each['trl']:.1f}, {each['ours']:.1f}"
        lines.append(
            f"| {row['title']}: {row['rollouts']} rollouts | {row['prompt'] or '-'} | {row['tokens']:,}, "
            f"{row['longest']:,} | {row['median_seconds']['trl']['wall']:.2f} s | {wall} | {cpu} | "
            f"{row['goal'] or '-'} | {peak['ours']:,.0f} of {peak['trl']:,.0f} MiB | {computed} |"
        )
    return "\n".join(lines)


FRAME = Frame("step", section)


def main(argv: list[str] | None = None) -> None:
    shapes = {"nargs": "+", "choices": SHAPES, "help": "default: all, with --short the quick ones"}
    options = FRAME.parse(__doc__, argv, "smaller, under 10 minutes; docs/speed.md is left alone", shapes=shapes)
    if options is None:
        return
    threads = min(2, len(os.sched_getaffinity(0)))  # of each process
    # Read by the children when they load OpenMP: threads that wait must not burn the CPU seconds that are compared.
    os.environ |= {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "20000", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    shapes = chosen(options.shapes, options.short)
    joins = options.shapes and not options.short and FRAME.results.is_file()
    found = json.loads(FRAME.results.read_text(encoding="utf-8")) if joins else None
    if found and (found["threads"], found["machine"]) != (threads, machine()):
        sys.exit(f"error: {FRAME.results} has rows of other threads or of another machine. Take all shapes anew.")
    started, rows = time.perf_counter(), {}
    for name, shape in shapes.items():
        rows[name] = run_shape(shape, threads)
    if found:
        results = {**found, "shapes": {**found["shapes"], **rounded(rows, 5)}}
    else:
        minutes = (time.perf_counter() - started) / 60
        results = rounded({"machine": machine(), "threads": threads, "minutes": minutes, "shapes": rows}, 5)
    FRAME.finish(results, options.short)


if __name__ == "__main__":
    main()
