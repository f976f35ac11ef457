"""Build the bundled model that uses three tools: a Qwen3 of 0.9M parameters that calls them and often does it badly.

    PYTHONPATH=. python scripts/build/tools.py --output_dir hf_recipes/tiny/tools-model

The tools are Python (`tools/python_sandbox.py`), verl's check of answers (`tools/verl/gsm8k.yaml`) and its search
(`tools/verl/search.yaml`). As in scripts/build/tiny.py the model imitates conversations in which every turn is
right or has one known mistake. `--data` writes the rows and the corpus of the recipes. Ten minutes on two cores.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import yaml
from transformers import PreTrainedTokenizerFast

from build import common
from build.common import HERMES_TEMPLATE, Example, build_model, change_one, draw, encode, opening
from build.tiny import ANSWER_SHARES, CALL_SHARES, MAX_CALLS
from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.choose import make_format
from mt_grpo.conversation.tools.signature import as_tool, tool_schema
from mt_grpo.integrations.verl.search import as_json, passages
from mt_grpo.recipe.data import make_arithmetic
from mt_grpo.recipe.plugins import load_tools
from mt_grpo.rollout import Message

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "hf_recipes/tiny"
SYLLABLES = "bel dor fa gan kin le mo nir pa ras sel tu va wen zor lim".split()
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn")
THINGS = ("apples", "books", "coins", "pens", "shells")
RESULT_TOKENS = 64  # as in the recipes


@dataclass(frozen=True)
class Task:
    """One tool and the questions that it helps with.

    `arguments` and `mistake` give the arguments of a call, right and wrong; `run` the text that the model reads.
    """

    name: str
    system: str
    tool: Callable
    rows: list[dict[str, Any]]
    arguments: Callable[[dict[str, Any], random.Random], dict[str, Any]]
    mistake: Callable[[dict[str, Any], random.Random], dict[str, Any]]
    run: Callable[[dict[str, Any], dict[str, Any]], str]

    @property
    def tools(self) -> dict[str, Any]:
        return {self.name: self.tool}


def towns(num_rows: int, seed: int) -> list[dict[str, str]]:
    """Towns that do not exist, each with a number of people: `name`, `people`."""
    rng = random.Random(seed)
    names = [(a + b + c).capitalize() for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES]
    return [{"name": name, "people": str(rng.randint(100, 9999))} for name in rng.sample(names, num_rows)]


def passage(town: dict[str, str]) -> dict[str, str]:
    return {"id": town["name"], "title": town["name"], "text": f"{town['name']} has {town['people']} people."}


def town_row(town: dict[str, str]) -> dict[str, str]:
    return {"question": f"How many people live in {town['name']}?", "answer": town["people"]}


def make_sums(rng: random.Random, num_rows: int) -> list[dict[str, str]]:
    """Word problems with a sum or a difference of two numbers from 1 to 5: so many that the model knows by heart."""
    rows = []
    for _ in range(num_rows):
        name, thing, first, second = rng.choice(NAMES), rng.choice(THINGS), rng.randint(1, 5), rng.randint(1, 5)
        gets = first <= second or rng.random() < 0.5
        happens = f"gets {second} more" if gets else f"gives away {second}"
        answer = str(first + second if gets else first - second)
        rows.append({"question": f"{name} has {first} {thing} and {happens}. How many now?", "answer": answer})
    return rows


def described(file: str) -> Callable:
    """The only tool of a YAML in verl's format: what the model reads of it."""
    (entry,) = yaml.safe_load((ROOT / "tools/verl" / file).read_text())["tools"]
    name = entry["tool_schema"]["function"]["name"]
    return as_tool(SimpleNamespace(name=name, schema=entry["tool_schema"], run=lambda **arguments: None))


def expression(row: dict[str, Any]) -> str:
    return row["question"].removeprefix("What is ").removesuffix("?")


def program(text: str, rng: random.Random) -> dict[str, str]:
    return {"code": rng.choice((text, f"print({text})"))}


def town_name(row: dict[str, Any]) -> str:
    return row["question"].removeprefix("How many people live in ").removesuffix("?")


def other_name(name: str, rng: random.Random) -> str:
    """A name with one syllable replaced."""
    old = rng.choice([syllable for syllable in SYLLABLES if syllable in name.lower()])
    return name.lower().replace(old, rng.choice(SYLLABLES), 1).capitalize()


def make_tasks(rng: random.Random) -> list[Task]:
    """The three tasks. What a tool answers is computed here, as the tool words it."""
    (python,) = load_tools(str(ROOT / "tools/python_sandbox.py"))
    (calculator,) = load_tools(str(ROOT / "tools/calculator.py"))
    all_towns = towns(3000, seed=0)
    found = {
        town["name"]: passages([{"document": {"contents": f"{town['name']}\n{passage(town)['text']}"}}])
        for town in all_towns
    }

    def search(arguments: dict[str, Any], row: dict[str, Any]) -> str:
        return as_json(found.get(arguments["query_list"][0], "No search results found."))

    def check(arguments: dict[str, Any], row: dict[str, Any]) -> str:
        answer = arguments["answer"]
        return f"Current parsed {answer=} reward={float(answer == row['answer'])}"

    def compute(arguments: dict[str, Any], row: dict[str, Any]) -> str:
        return calculator(arguments["code"].removeprefix("print(").removesuffix(")"))  # faster than a process

    return [
        Task(
            "code_interpreter",
            "Use Python, then answer.",
            python,
            make_arithmetic(20_000, 0),
            lambda row, rng: program(expression(row), rng),
            lambda row, rng: program(change_one(expression(row), rng.choice(("0123456789", "+-*")), rng), rng),
            compute,
        ),
        Task(
            "calc_gsm8k_reward",
            "Check your answer, then give it.",
            described("gsm8k.yaml"),
            make_sums(rng, 4000),
            lambda row, rng: {"answer": row["answer"]},
            lambda row, rng: {"answer": str(rng.randint(1, 10))},
            check,
        ),
        Task(
            "search",
            "Search, then answer.",
            described("search.yaml"),
            [town_row(town) for town in all_towns[256:]],
            lambda row, rng: {"query_list": [town_name(row)]},
            lambda row, rng: {"query_list": [other_name(town_name(row), rng)]},
            search,
        ),
    ]


def call_turn(kind: str, task: Task, row: dict[str, Any], rng: random.Random) -> str:
    """Write the assistant's turn before a good result, with a mistake of this kind."""
    if kind == "no call":
        return str(rng.randint(1, 10 ** rng.randint(1, 4)))
    if kind == "no tag":
        return f"The answer is {rng.randint(2, 9999)}."
    arguments = (task.mistake if kind == "wrong expression" else task.arguments)(row, rng)
    name = rng.choice(("tool", "math", "lookup")) if kind == "wrong tool" else task.name
    call = json.dumps({"name": name, "arguments": arguments})
    if kind == "broken JSON":
        call = rng.choice((call[:-1], call[:-2], call.replace("}}", "}")))
    return f"<tool_call>\n{call}\n</tool_call>"


def answer_turn(task: Task, row: dict[str, Any], arguments: dict[str, Any], result: str, rng: random.Random) -> str:
    """Write the assistant's turn after a result: the answer, or a mistake."""
    value = {"code_interpreter": result, "calc_gsm8k_reward": arguments.get("answer")}.get(task.name)
    value = value or result.rpartition(" has ")[2].partition(" ")[0]
    kind = draw(ANSWER_SHARES, rng)
    if kind == "wrong digit":
        return change_one(value, "0123456789", rng)
    return f"The answer is {value}." if kind == "no tag" else value


def make_conversation(task: Task, tool_format: ChatFormat, rng: random.Random) -> list[Message]:
    """One conversation. A call that failed, or found nothing, is followed by another one."""
    row = rng.choice(task.rows)
    messages = opening(row["question"], task.system)
    for _ in range(MAX_CALLS):
        text = call_turn(draw(CALL_SHARES, rng), task, row, rng)
        turn = common.observe(text, tool_format, task.tools, lambda call: task.run(call.arguments, row))
        messages.append({"role": "assistant", "content": turn.text})
        if not turn.calls:
            break
        messages += common.result_messages(turn, tool_format, RESULT_TOKENS)
        (result,) = turn.results
        if not result.error and "No search results" not in result.text and "reward=0.0" not in result.text:
            said = answer_turn(task, row, turn.calls[0].arguments, result.text, rng)
            messages.append({"role": "assistant", "content": said})
            break
    return messages


def build_tokenizer(conversations: list[tuple[Task, list[Message]]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 768 tokens that cross words: the tools' JSON stands in every prompt. A digit is one token."""
    tags = [f"<{slash}{tag}>" for tag in ("tool_call", "tool_response") for slash in ("", "/")]
    texts = []
    for task, messages in conversations:
        schema = json.dumps(tool_schema(task.name, task.tool))
        texts += [f"system\n{task.system}\n<tools>\n", schema, "\n</tools>"]
        for message in messages:
            text = message["content"]
            for tag in tags:
                text = text.replace(tag, "\0")
            texts += [f"{message['role']}\n", *text.split("\0")]
    return common.train_tokenizer(texts, 768 - len(tags), HERMES_TEMPLATE, added=tags)


def write_data(rng: random.Random) -> None:
    """The rows and the corpus of the recipes. The towns of the test rows are in no conversation of the warm start."""
    all_towns = towns(3000, seed=0)
    files = {
        "towns/corpus.jsonl": [passage(town) for town in all_towns[:1024]],
        "towns/test.jsonl": [town_row(town) for town in all_towns[:256]],
        "towns/train.jsonl": [town_row(town) for town in all_towns[256:1024]],
        "sums/train.jsonl": make_sums(rng, 1024),
        "sums/test.jsonl": make_sums(rng, 256),
    }
    for name, rows in files.items():
        common.write_lines(RECIPES / name, rows)


def main() -> None:
    data = {"action": "store_true", "help": "write hf_recipes/tiny/towns and sums, and end"}
    args = common.read_arguments(__doc__, RECIPES / "tools-model", steps=900, data=data)
    rng = args.rng
    if args.data:
        return write_data(rng)
    tasks = make_tasks(rng)
    first = make_format("hermes", build_tokenizer([(task, opening("What is it?", task.system)) for task in tasks]))
    drawn = [(task, make_conversation(task, first, rng)) for task in tasks for _ in range(700)]
    tokenizer = build_tokenizer(drawn)
    tool_format, model = make_format("hermes", tokenizer), build_model(tokenizer)
    common.take_weights(model, tokenizer, RECIPES / "calculator-agent-model")
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")

    def example() -> Example:
        task = rng.choice(tasks)
        return encode(make_conversation(task, tool_format, rng), tool_format, task.tools)

    common.warm_start(model, tokenizer.pad_token_id, example, args.steps)
    recipes = (f"{RECIPES}/sandbox.yaml", f"{RECIPES}/gsm8k-check.yaml")  # that of the search needs its server
    common.save(model.to(torch.bfloat16), tokenizer, args.output_dir, *recipes)


if __name__ == "__main__":
    main()
