"""Build the bundled model that works on the sample tasks of Harbor: a Qwen3 of 0.4M parameters that types commands.

    PYTHONPATH=. python scripts/build/harbor.py --output_dir hf_recipes/tiny/harbor-model

It imitates conversations about the tasks in hf_recipes/tiny/harbor. The commands are those of all solutions, and some
with a mistake. Behind an instruction stands a right command in one of four cases, else any other: so the model knows
how commands are written, and hardly which of them solves what. Results are what the sandbox gave. Two minutes.
"""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import PreTrainedTokenizerFast

from build import common
from build.common import HERMES_TEMPLATE, Example, build_model, encode, opening
from mt_grpo.adapters.harbor.environment import HarborEnvironment, told_output
from mt_grpo.adapters.harbor.images import NamespaceImages, put_step_files
from mt_grpo.adapters.harbor.tasks import Allowed, HarborTask, TaskStep, read_tasks, task_folders
from mt_grpo.conversation.environments import class_tools
from mt_grpo.conversation.formats.choose import make_format
from mt_grpo.conversation.tools.signature import tool_schema
from mt_grpo.rollout import Message

FOLDER = Path(__file__).parents[2] / "hf_recipes/tiny/harbor"
SYSTEM = "Use bash."  # as in the recipe
DONE = "Done."
RIGHT, GOES_ON = 0.25, 0.15  # shares of right commands, and of results behind which another command stands
MISTAKES = (
    "sort -r events.log > sorted.log", "grep -c INFO app.log > errors.txt", "sed -i 's/ - 1/ - 2/' total.py",
    "awk -F, '{s += $1} END {print s}' sales.csv > sum.txt", "mv notes/*.txt notes.md", "tar -cf parts.tar",
    "chmod -x run.sh", "sort -u names.txt > unique.txt", "cat part-1.txt > all.txt", "wc -c < all.txt > count.txt",
    "echo 'grep $2 $1' > value.sh",
)  # fmt: skip
TOOLS = class_tools(HarborEnvironment)


@dataclass(frozen=True)
class Place:
    """A step of a task, and what stands before it: the commands that solved the steps before."""

    task: HarborTask
    number: int

    @property
    def step(self) -> TaskStep:
        return self.task.steps[self.number]

    @property
    def right(self) -> str:
        """The command of the step's solution."""
        return (self.step.folder / "solution/solve.sh").read_text().splitlines()[1]


def places() -> list[Place]:
    """All steps of the sample tasks."""
    tasks, left_out = read_tasks(task_folders(FOLDER, "train"), Allowed())
    if left_out:
        sys.exit(f"error: tasks are left out on this machine: {left_out}")
    return [Place(task, number) for task in tasks for number in range(len(task.steps))]


def result_of(images: NamespaceImages, place: Place, command: str) -> str:
    """What the policy reads behind a command, on a machine of its own."""
    desk = images.open(place.task)
    put_step_files(desk, place.task, 0, 60.0)
    for before in range(place.number):
        desk.sandbox.shell(Place(place.task, before).right, desk.workdir, desk.workdir, desk.env, 60.0)
    outcome = desk.sandbox.shell(command, desk.workdir, desk.workdir, desk.env, 60.0)
    desk.sandbox.close()
    return told_output(outcome, 60.0)


def call_of(command: str) -> Message:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}


def drawn_step(place: Place, results: dict[str, str], rng: random.Random) -> list[Message]:
    """What is said in a step, behind its instruction."""
    messages = []
    while True:
        command = place.right if rng.random() < RIGHT else rng.choice(list(results))
        messages += [call_of(command), {"role": "tool", "name": "bash", "content": results[command]}]
        if rng.random() >= GOES_ON:
            return [*messages, {"role": "assistant", "content": DONE}]


def conversation(steps: list[Place], results: dict[Place, dict[str, str]], rng: random.Random) -> list[Message]:
    """One conversation about the steps of a task."""
    messages = opening(steps[0].step.instruction, SYSTEM)
    for number, place in enumerate(steps):
        messages += [{"role": "user", "content": place.step.instruction}] if number else []
        messages += drawn_step(place, results[place], rng)
    return messages


def build_tokenizer(conversations: list[list[Message]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 640 tokens that cross words. The tool's JSON, which each prompt has, is a few of them."""
    tags = [f"<{slash}{tag}>" for tag in ("tool_call", "tool_response") for slash in ("", "/")]
    texts = [f"system\n{SYSTEM}\n<tools>\n", json.dumps(tool_schema("bash", TOOLS["bash"])), "\n</tools>"] * 1000
    for piece in common.pieces(conversations):
        for tag in tags:
            piece = piece.replace(tag, "\0")
        texts += piece.split("\0")
    return common.train_tokenizer(texts, 640 - len(tags), HERMES_TEMPLATE, added=tags)


def main() -> None:
    args = common.read_arguments(__doc__, Path("hf_recipes/tiny/harbor-model"), steps=160)
    rng, images, every = args.rng, NamespaceImages(), places()
    commands = sorted({place.right for place in every} | set(MISTAKES))
    pairs = [(place, command) for place in every for command in commands]
    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(lambda pair: result_of(images, *pair), pairs))
    results = {place: {c: text for (p, c), text in zip(pairs, told, strict=True) if p is place} for place in every}
    print(f"{len(every)} steps, {len(commands)} commands", flush=True)
    of_task: dict[str, list[Place]] = {}
    for place in every:
        of_task.setdefault(place.task.name, []).append(place)

    def drawn() -> list[Message]:
        return conversation(rng.choice(list(of_task.values())), results, rng)

    tokenizer = build_tokenizer([drawn() for _ in range(1000)])
    model = build_model(tokenizer, num_layers=3, num_heads=3)
    tool_format = make_format("hermes", tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")

    def example() -> Example:
        return encode(drawn(), tool_format, TOOLS)

    common.warm_start(model, tokenizer.pad_token_id, example, args.steps, batch_size=8)
    model = common.save(model.to(torch.bfloat16), tokenizer, args.output_dir)  # half the size
    prompts = [opening(place.step.instruction, SYSTEM) for place in every if not place.number]
    for do_sample in (True, False):
        right = known = 0
        for _ in range(40 if do_sample else 1):
            texts = common.next_turns(model, tool_format, prompts, do_sample, TOOLS)
            firsts = [place for place in every if not place.number]
            right += sum(text == call_of(place.right)["content"] for text, place in zip(texts, firsts, strict=True))
            known += sum(text in [call_of(command)["content"] for command in commands] for text in texts)
        num = len(prompts) * (40 if do_sample else 1)
        how = "sampled" if do_sample else "greedy"
        print(f"{how}: right {right / num:.3f}, one of the commands {known / num:.3f}")


if __name__ == "__main__":
    main()
