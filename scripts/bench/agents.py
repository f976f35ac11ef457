"""Measure what an agent behind OpenAI's API costs against the trainer's own conversation, on one real vLLM server.

    python scripts/bench/agents.py            # about 8 minutes on two cores; then the section of docs/speed.md
    python scripts/bench/agents.py --short    # one repetition, into runs/bench_agents_short.json
    python scripts/bench/agents.py --report   # only the section of docs/speed.md

Both run 256 conversations of the calculator's task, at most three completions each, on the bundled Hermes model. The
tool waits 0.2 s or 1 s (`asyncio.sleep`). *own*: the conversation of `MultiTurnToolEnv`. *agent*: an async function
with the `openai` package, in this process, over HTTP to the endpoint. They alternate, and the first of a pair changes.
The report has conversations per second, and the CPU seconds of this process per completion. Client and server share
the cores.
"""

import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.common import ROOT, Frame, VLLMServer, machine, median_text, prepare, stopwatch

MODEL = "hf_recipes/tiny/calculator-hermes-model"
CONVERSATIONS, GROUP, CALLS = 256, 8, 3
WAITS = (0.2, 1.0)
SYSTEM = "Use the calculator, then answer."
SHAPES = ("own", "agent")

Row = dict[str, Any]


class Bench:
    """The two kinds of conversations, for all runs."""

    def __init__(self, server: VLLMServer):
        from transformers import AutoTokenizer

        import mt_grpo_trainer as mt
        from mt_grpo.adapters.agents.conversation import agent_conversation, agent_environment
        from mt_grpo.adapters.agents.programs import FunctionAgent
        from mt_grpo.conversation.tools.signature import tool_schema
        from mt_grpo.recipe.data import load_rows
        from mt_grpo.recipe.plugins import load_tools

        self.mt, self.server = mt, server
        self.tokenizer = AutoTokenizer.from_pretrained(ROOT / MODEL)
        (tool,) = load_tools(str(ROOT / "tools/calculator.py"))
        schema = tool_schema("calculator", tool)
        self.rows = [row for row in load_rows("arithmetic", "train", CONVERSATIONS // GROUP) for _ in range(GROUP)]
        self.sampling = {"temperature": 1.0}
        options = {
            "tokenizer": self.tokenizer,
            "tool_format": "hermes",
            "max_completion_length": 256,
            "max_turn_tokens": 64,
            "max_model_len": 1024,
        }

        def own(wait: float) -> Any:
            async def calculator(expression: str) -> str:
                """Compute the value of an arithmetic expression."""
                await asyncio.sleep(wait)
                return tool(expression)

            calculator.json_schema = schema["function"]
            return mt.MultiTurnToolEnv([calculator], SYSTEM, CALLS - 1, max_tool_response_tokens=48, **options)

        def agent(wait: float) -> Any:
            async def solve(row: dict[str, Any], client: Any) -> float:
                messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
                for k in range(CALLS):
                    answer = await client.chat.completions.create(model="policy", messages=messages, tools=[schema])
                    message = answer.choices[0].message
                    if not message.tool_calls or k == CALLS - 1:
                        break
                    messages.append(message.model_dump(exclude_none=True))
                    await asyncio.sleep(wait)
                    for call in message.tool_calls:
                        try:
                            result = tool(**json.loads(call.function.arguments))
                        except Exception as error:  # as the trainer's own: the policy reads it
                            result = f"Error: {error}"
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": result[:150]})
                return 0.0

            program = FunctionAgent(solve)
            cls = agent_conversation(mt.MultiTurnToolEnv, program, 120.0, CALLS)
            return cls([], None, environment=agent_environment(program), **options)

        self.envs = {(name, wait): make(wait) for name, make in (("own", own), ("agent", agent)) for wait in WAITS}

    def run(self, shape: str, wait: float) -> Row:
        """One measured run."""
        client = self.mt.VLLMServerClient(base_url=self.server.url, tokenizer=self.tokenizer)
        client.request("POST", "/reset_prefix_cache", timeout=60)
        assert client.model_card["id"]  # fetched before the clock starts
        env = self.envs[shape, wait]
        prompts = [[{"role": "user", "content": row["question"]}] for row in self.rows]
        with stopwatch() as seconds:
            rollouts = env.generate(prompts, client, self.sampling, rows=self.rows)["rollouts"]
        client.close()
        failed = [rollout.error for rollout in rollouts if rollout.error is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} agents failed, the first one: {failed[0]}")
        completions = sum(len(rollout.turns) for rollout in rollouts)
        return {
            "shape": shape, "wait": wait, "conversations": len(rollouts), "completions": completions,
            "records": sum(len(rollout.records) for rollout in rollouts),
            "tokens": sum(len(turn.token_ids) for rollout in rollouts for turn in rollout.turns),
            "seconds": seconds["wall"], "client_cpu": seconds["cpu"],
        }  # fmt: skip


def measure(bench: Bench, repetitions: int) -> list[Row]:
    """All runs, with a line for each. The first run of each kind, which imports and connects, is not counted."""
    for shape in SHAPES:
        bench.run(shape, WAITS[0])
    rows = []
    for repetition in range(repetitions):
        for wait in WAITS:
            for shape in SHAPES if repetition % 2 == 0 else SHAPES[::-1]:
                row = {**bench.run(shape, wait), "repetition": repetition}
                rows.append(row)
                print(
                    f"wait {wait:g} s  {shape:<6} {row['seconds']:6.2f} s  {row['completions']:>4} completions  "
                    f"client's CPU {row['client_cpu']:5.2f} s",
                    flush=True,
                )
    return rows


def per_call(row: Row) -> float:
    """Milliseconds of this process's CPU per completion."""
    return 1000 * row["client_cpu"] / row["completions"]


def pairs(rows: list[Row], wait: float) -> list[tuple[Row, Row]]:
    """(own, agent) of the same repetition."""
    found = {(row["shape"], row["repetition"]): row for row in rows if row["wait"] == wait}
    return [(found["own", k], found["agent", k]) for k in sorted({k for _, k in found})]


def section(results: dict[str, Any]) -> str:
    """The section of docs/speed.md."""
    rows, place = results["runs"], results["machine"]
    lines = [
        f"**Agents behind OpenAI's API** against the trainer's own conversations of the same task: {CONVERSATIONS} "
        f"at a time, one vLLM server and this client on {place['cores']} cores ({place['cpu']}), medians (minimum to "
        "maximum). The agent is an async function with the `openai` package. Its requests, their parsing on both "
        "sides and the endpoint are in the CPU time; a program of `agent_command` has a process of its own.",
        "",
        "| the tool waits | own conversations/s | agents/s | agents / own | own CPU per completion | agent's | more |",
        "|---|---|---|---|---|---|---|",
    ]
    for wait in WAITS:
        both = pairs(rows, wait)
        rates = [[row["conversations"] / row["seconds"] for row in side] for side in zip(*both)]
        costs = [[per_call(row) for row in side] for side in zip(*both)]
        more = [agent - own for own, agent in zip(*costs)]
        cells = (
            f"{wait:g} s",
            *(median_text(side, ".1f") for side in rates),
            median_text([agent / own for own, agent in zip(*rates)], ".2f"),
            *(f"{median_text(side, '.1f')} ms" for side in costs),
            f"{median_text(more, '.1f')} ms",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def headline(rows: list[Row]) -> str:
    """The last line: what a completion costs more, the median over all pairs."""
    more = [per_call(agent) - per_call(own) for wait in WAITS for own, agent in pairs(rows, wait)]
    return f"an agent's completion costs {statistics.median(more):.1f} ms of CPU more"


FRAME = Frame("agents", section)


def main(argv: list[str] | None = None) -> None:
    if (options := FRAME.parse(__doc__, argv, "one repetition; docs/speed.md stays as it is")) is None:
        return
    prepare()
    with VLLMServer(MODEL, "--logprobs-mode", "processed_logprobs", "--max-model-len", "1024") as server:
        rows = measure(Bench(server), 1 if options.short else 5)
    results = {"machine": machine(), "settings": {"form": "short" if options.short else "full"}, "runs": rows}
    FRAME.finish(results, options.short)
    if options.short:
        print(f"\n{section(results)}")
    print(headline(rows))


if __name__ == "__main__":
    main()
