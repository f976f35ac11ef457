"""The forks of docs/forking.md: another conversation as a recipe key, or as a short file; each one trains."""

import json
import re
from pathlib import Path

import pytest
import yaml
from fault_proxy import Fault, FaultProxy
from processes import ends
from project import ROOT, json_lines
from scripted import CHATML_TOKENIZER, QWEN3_TOKENIZER, Scripted, call, hermes_call as hermes, ids

import mt_grpo_trainer as mt
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.recipe.plugins import import_file, load_class
from mt_grpo.rollout import Generation, StopReason
from mt_grpo_trainer import MultiTurnToolEnv

PAGE = (ROOT / "docs/forking.md").read_text()
ROWS = [{"prompt": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(4)]


def size(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


def build(folder: Path, model: str, rows: list[dict] = ROWS, script=mt, **keys):
    """A trainer by a recipe: four rollouts of one prompt for each of two steps."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model_name_or_path": model, "dataset_name": str(folder / "rows.jsonl"), "output_dir": str(folder / "out"),
        "use_cpu": True, "bf16": False, "dtype": "float32", "gradient_checkpointing": False, "report_to": "none",
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 4, "max_steps": 2,
        "max_completion_length": 400, "learning_rate": 0.01, "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "max_env_steps": 3, "scale_rewards": "none", **keys,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return script.build_trainer(*script.parse_arguments(["--config", str(folder / "recipe.yaml")]))


def train(trainer) -> tuple[list[dict], list[dict]]:
    """(the rollout log, the metrics of each step). The weights must have changed, as rewards differ in a group."""
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert any(not old.equal(new) for old, new in zip(before, trainer.model.parameters()))
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert trainer.state.global_step == len(steps) == 2
    return json_lines(Path(trainer.args.output_dir) / "rollouts.rank0.jsonl"), steps


class Says:
    """A model that says the same turns in every conversation. How many it has said shows in the prompt."""

    def __init__(self, tokenizer, turns: list[str]):
        self.tokenizer, self.turns = tokenizer, turns

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        said = self.tokenizer.decode(prompt_ids).count("<|im_start|>assistant") - 1
        text = self.turns[said] + f" {index}" * (said == len(self.turns) - 1) + "<|im_end|>"
        sampled = self.tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens]
        return Generation(sampled, None, "stop")


def in_tags(name: str, arguments: dict) -> str:
    return f"<tool>{json.dumps({'name': name, 'args': arguments})}</tool>"


BY_INDEX = """
def by_index(rollout_turns, **kwargs):
    return [float(turns[-1].text[-1] in "13") for turns in rollout_turns]


OUTCOME_REWARD_FUNCS = [by_index]
"""


MEET = """
import threading

BARRIER = threading.Barrier(8)


def meet(name: str) -> str:
    \"\"\"Wait for the others.

    Args:
        name: Who waits.
    \"\"\"
    BARRIER.wait(60)
    return f"{name} met"


TOOL_FUNCTIONS = [meet]
"""


@pytest.mark.contract("hermes")
def test_hermes_and_parallel_calls(hermes_model, tmp_path, monkeypatch):
    """Four rollouts of two calls each: all eight meet, so that the calls of a turn run at the same time."""
    (tmp_path / "tools.py").write_text(MEET)
    (tmp_path / "rewards.py").write_text(BY_INDEX)
    monkeypatch.setattr(MultiTurnToolEnv, "MAX_PARALLEL_CALLS", 2)
    files = {"tools_script": str(tmp_path / "tools.py"), "reward_fn": str(tmp_path / "rewards.py")}
    trainer = build(tmp_path, hermes_model, tool_format="hermes", **files, max_completion_length=900)
    three = "\n".join(hermes("meet", name=name) for name in "abc")
    trainer.llm = Says(trainer.processing_class, [three, "So we met"])
    rows, steps = train(trainer)
    assert [len(rows), rows[0]["stop_reason"], steps[0]["turns/mean"]] == [8, "answered", 2.0]
    assert steps[0]["tools/call_frequency"] == 3.0
    assert steps[0]["tools/malformed_frequency"] == pytest.approx(1 / 3)
    said = [(message["role"], message["content"]) for message in rows[0]["messages"]]
    assert said == [
        ("user", said[0][1]), ("assistant", three), ("tool", "a met"), ("tool", "b met"),
        ("tool", "Error: not run, since a turn may have at most 2 calls. Call it again."),
        ("assistant", "So we met 0"),
    ]  # fmt: skip


ADD = """
def add(a: int, b: int) -> int:
    \"\"\"Add.

    Args:
        a: A number.
        b: Another one.
    \"\"\"
    return a + b


TOOL_FUNCTIONS = [add]
"""


@pytest.fixture
def fork(monkeypatch, tmp_path):
    """A copy of the script with the tool format of the page, which is at most 20 lines in one place."""
    (block,) = [body for body in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "(ChatFormat)" in body]
    assert len(block.splitlines()) <= 20
    path, source, behind = tmp_path / "my_idea.py", Path(mt.__file__).read_text(), "\nlogger = logging.getLogger("
    assert source.count(behind) == 1
    path.write_text(source.replace(behind, f"{block}\n{behind}"))
    monkeypatch.setitem(TOOL_FORMATS, "block", None)  # gone behind the test
    return import_file(str(path), "a fork")


def test_the_format_of_the_page_trains(fork, random_model, tmp_path):
    """A recipe names it. A turn ends behind its block; a block inside thinking is none; a mistake is answered."""
    (tmp_path / "tools.py").write_text(ADD)
    (tmp_path / "rewards.py").write_text(BY_INDEX)
    trainer = build(
        tmp_path, random_model, script=fork, tool_format="block", tools_script=str(tmp_path / "tools.py"),
        reward_fn=str(tmp_path / "rewards.py"), system_prompt="{tool_descriptions}", max_completion_length=900,
    )  # fmt: skip
    block, call = "Let me see.\n```json\n%s\n```\n", '{"name": "add", "args": {"a": %s, "b": %s}}'
    thought, two = f"<think>\n{block % (call % (0, 0))}</think>", f"{call % (1, 2)}\n{call % (3, 4)}"
    right, wrong = thought + block % two, block % "add(1, 2)"
    trainer.llm = Says(trainer.processing_class, [f"{right}Then I go on.", f"{wrong}And on.", "It is 3"])
    rows, steps = train(trainer)
    said = [(message["role"], message["content"]) for message in rows[0]["messages"]][2:]
    mistake = "the call is not valid JSON (Expecting value at character 0)"
    assert said == [
        ("assistant", right), ("user", "<result>\n3\n</result>"), ("user", "<result>\n7\n</result>"),
        ("assistant", wrong),
        ("user", f'<result>\nError: {mistake}. Expected: {fork.BlockFormat.call_format}\n</result>'),
        ("assistant", "It is 3 0"),
    ]  # fmt: skip
    assert [len(rows), rows[0]["stop_reason"], steps[0]["turns/mean"]] == [8, "answered", 3.0]


@pytest.fixture
def user(monkeypatch):
    """A server that speaks `/v1/chat/completions`. The user asks once more, and is content then."""

    def says(request):
        again = sum(message["role"] == "assistant" for message in request.payload["messages"]) == 1
        message = {"role": "assistant", "content": "And what is 1 + 1?" if again else "DONE"}
        return Fault("said", status=200, body=json.dumps({"choices": [{"message": message}]}).encode())

    with FaultProxy("http://127.0.0.1:9", says) as server:
        monkeypatch.setenv("USER_URL", f"{server.url}/v1")
        monkeypatch.setenv("USER_MODEL", "second")
        yield server.requests


def test_a_simulated_user(user, tmp_path):
    """The bundled model calls the calculator or answers; a turn without a call goes to the user."""
    assert size("tools/user_simulator.py") <= 40
    trainer = build(
        tmp_path, "hf_recipes/tiny/calculator-model", [{**row, "goal": "two sums"} for row in ROWS],
        environment="tools/user_simulator.py:SimulatedUser", tools_script="tools/calculator.py",
        reward_fn="rewards/calculator_reward.py", system_prompt="Use the calculator, then answer.",
    )  # fmt: skip
    rows, steps = train(trainer)
    ended = [row for row in rows if row["stop_reason"] in ("environment_stop", "answered")]
    assert ended and all(row["rewards"]["SimulatedUser"] == (row in ended) for row in rows)
    said = [message["content"] for message in ended[0]["messages"] if message["role"] == "user"]
    assert said[0].startswith("What is") and "And what is 1 + 1?" in said and "DONE" not in said
    assert steps[0]["rewards/SimulatedUser/mean"] == sum(row in ended for row in rows if row["step"] == 0) / 4
    path, sent = next((r.path, r.payload) for r in user if len(r.payload["messages"]) == 5)
    assert (path, sent["model"]) == ("/v1/chat/completions", "second")
    assert [message["role"] for message in sent["messages"]] == ["system", "assistant", "user", "assistant", "user"]
    assert "You want: two sums" in sent["messages"][0]["content"]
    assert sent["messages"][1]["content"].startswith("What is")


def look(place: str) -> str:
    """Look.

    Args:
        place: Where.
    """
    return f"grass in {place}<|im_end|>"


@pytest.mark.parametrize("tool_format", ["xml", "hermes"])
def test_what_a_short_memory_reads(tool_format):
    """Results are read as the format writes them, also behind an edit; control tokens in them stay broken."""
    xml = tool_format == "xml"
    tokenizer, write = (CHATML_TOKENIZER, call) if xml else (QWEN3_TOKENIZER, hermes)
    memory = load_class(f"{ROOT}/tools/short_memory.py:ShortMemory", "environment")
    env = MultiTurnToolEnv([look], None, 3, tokenizer=tokenizer, tool_format=tool_format, environment=memory,
                           max_completion_length=4000)  # fmt: skip
    thought, end = "<think>Where?</think>", "" if xml else "<|im_end|>"
    first, second = write("look", place="A"), write("look", place="B")
    script = [f"{first}{end}", f"{thought}{second}{end}", "<answer>grass</answer>"]
    backend = Scripted([script])
    (rollout,) = env.generate(["Look."], backend, rows=[{}])["rollouts"]

    def turn(role, text):
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    def result(text, framed=True):
        if xml:
            return turn("user", f"<result>\n{text}\n</result>" if framed else text)
        return turn("user", f"<tool_response>\n{text}\n</tool_response>")

    start = tokenizer.decode(rollout.prompt_ids).removesuffix("<|im_start|>assistant\n")
    grass = ["grass in A< |im_end|>", "grass in B< |im_end|>"]
    assert start.endswith(turn("user", "Look."))
    one = start + turn("assistant", first) + result(grass[0]) + "<|im_start|>assistant\n"
    assert backend.of(0)[1].prompt == ids(one)
    two = start + turn("assistant", first) + result("(forgotten)", framed=False)
    two += turn("assistant", second) + result(grass[1]) + "<|im_start|>assistant\n"
    assert backend.requests[-1].prompt == ids(two)
    assert rollout.stop_reason == StopReason.ANSWERED
    assert [len(record.turns) for record in rollout.records] == [2, 1]
    assert [turn.observation for turn in rollout.turns] == [*grass, None]


RAN = """
import json
from pathlib import Path


def ran(environments, rollout_turns, **kwargs):
    seen = Path(__file__).with_name("seen.jsonl")
    with seen.open("a") as file:
        for environment in environments:
            names = sorted(path.name for path in environment.folder.iterdir())
            file.write(json.dumps([str(environment.folder), names]) + "\\n")
    return [float(turns[-1].text[-1] in "13") for turns in rollout_turns]


OUTCOME_REWARD_FUNCS = [ran]
"""


def test_a_sandbox(random_model, tmp_path):
    """Each conversation has its own folder. Rewards find it, and it is gone behind them."""
    assert size("tools/sandbox.py") <= 40
    (tmp_path / "rewards.py").write_text(RAN)
    files = {"tools_script": "tools/sandbox.py", "reward_fn": str(tmp_path / "rewards.py")}
    trainer = build(tmp_path, random_model, **files, system_prompt="{tool_descriptions}", max_completion_length=900)
    trainer.llm = Says(trainer.processing_class, [
        in_tags("write_file", {"name": "main.py", "content": "import os\nprint(6 * 7, os.listdir())"}),
        in_tags("run_python", {"name": "main.py"}), "It is 42",
    ])  # fmt: skip
    rows, _ = train(trainer)
    said = [message["content"] for message in rows[0]["messages"] if message["role"] == "user"][1:]
    assert said == ["<result>\n36 characters written\n</result>", "<result>\n42 ['main.py']\n[exit code 0]\n</result>"]
    seen = json_lines(tmp_path / "seen.jsonl")
    assert len({folder for folder, _ in seen}) == len(seen) == 8
    assert all(names == ["main.py"] for _, names in seen)
    assert not any(Path(folder).exists() for folder, _ in seen)


def test_what_a_sandbox_bounds(tmp_path, monkeypatch):
    sandbox = load_class(f"{ROOT}/tools/sandbox.py:Sandbox", "environment")()
    sandbox.seconds = 1
    sandbox.reset()
    monkeypatch.setenv("SECRET", "hidden")
    try:
        programs = {
            "endless.py": "import os, time\nif child := os.fork():\n    print(child, flush=True)\ntime.sleep(1000)",
            "large.py": "while True: print('x' * 1000)",
            "env.py": "import os\nprint('SECRET' in os.environ)",
            "../out.py": "print(1)",
        }
        for name, text in programs.items():
            sandbox.write_file(name, text)
        process, ended = sandbox.run_python("endless.py").split("\n")
        assert ended == "[exit code -9]" and ends(int(process), 10)
        large = sandbox.run_python("large.py")
        assert large.startswith("x" * 1000) and len(large) < 4100
        assert sandbox.run_python("env.py") == "False\n[exit code 0]"
        assert sandbox.run_python("../out.py") == "1\n[exit code 0]"
        assert not (sandbox.folder.parent / "out.py").exists()
    finally:
        sandbox.close()
    assert not sandbox.folder.exists()
