"""What the README and the pages under docs/ say is so.

Keys exist and have these defaults, metrics are logged, examples run, commands name scripts and options that exist,
files and links lead somewhere, and the tables of the benchmarks are those of their result files. What runs
commands: tests/docs/test_commands.py.
"""

import argparse
import dataclasses
import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vision_model
import yaml
from bench.common import with_section
from build import configuration
from fault_proxy import Fault, FaultProxy
from project import ROOT, json_lines, steps_of
from scripted import CHATML_TOKENIZER, Scripted, call, echo
from test_agents import run as run_agent
from test_size import sizes
from test_trainer import make_trainer
from test_verl import build as verl_build, converse as verl_converse
from transformers import AutoTokenizer
from trl import GRPOConfig, ScriptArguments
from trl.chat_template_utils import qwen3_template

import mt_grpo_trainer as mt
from mt_grpo.conversation.environments import METHODS
from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.images.pictures import pictures_in
from mt_grpo.recipe.parse import known_keys
from mt_grpo.recipe.plugins import load_environment, load_rewards, load_tools
from mt_grpo.rollout import Reply

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
RECIPES, METRICS, FORKING, CONVERSATION, ENVIRONMENTS, AGENTS = (
    PAGES[f"docs/{name}.md"] for name in ("recipes", "metrics", "forking", "conversation", "environments", "agents")
)
each_page = pytest.mark.parametrize("page", PAGES)


def section(text: str, title: str) -> str:
    return re.search(rf"^## {title}$(.*?)(?=^## |\Z)", text, re.M | re.S)[1]


def first_column(text: str) -> list[str]:
    """The names in backticks of the first columns of a text's tables."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def blocks(text: str, language: str = "") -> list[str]:
    """The fenced blocks of one language, "" for those of none."""
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if name == language]


def block(text: str, language: str, word: str) -> str:
    """The only fenced block of a language that has a word in it."""
    (found,) = [body for body in blocks(text, language) if word in body]
    return found


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder that has the recipes, tools and rewards, in which the example runs."""
    monkeypatch.chdir(tmp_path)
    for folder in ("hf_recipes", "tools", "rewards"):
        Path(folder).symlink_to(ROOT / folder)


def run(code: str, space: dict | None = None) -> dict:
    space = {} if space is None else space
    exec(compile(code, "documentation", "exec"), space)
    return space


# --- keys and metrics ------------------------------------------------------------------------------------------------


def test_every_key_is_documented_as_its_field_says():
    """`python scripts/build/configuration.py` writes the tables."""
    page = PAGES["docs/configuration.md"]
    assert configuration.with_tables(page) == page
    for ours, trls in ((mt.MTGRPOConfig, GRPOConfig), (mt.recipe_classes()[0], ScriptArguments)):
        own = {each.name for each in dataclasses.fields(ours)} - {each.name for each in dataclasses.fields(trls)}
        assert own <= set(first_column(page))


def test_every_documented_metric_is_logged_and_every_own_metric_documented(random_model, tmp_path):
    trainer = make_trainer(random_model, tmp_path, max_steps=1, refill_groups=1)
    trainer.train()
    logged = set(trainer.state.log_history[0])
    documented = set(first_column(METRICS)) | set(re.findall(r"`((?:sync|completions)/\w+)`", METRICS))
    with_server = {name for name in documented if name.startswith(("sync/", "sampling/"))}
    of_others = {name for name in documented if name.startswith("information_gain/")}
    of_functions = {name for name in documented if name.startswith("rewards/<function>/")}
    assert documented - with_server - of_others - of_functions <= logged
    assert {name.replace("<function>", "length_reward") for name in of_functions} <= logged
    files = (ROOT / "mt_grpo_trainer.py", *ROOT.glob("mt_grpo/**/*.py"), ROOT / "rewards/information_gain.py")
    source = "\n".join(path.read_text() for path in files)
    assert len(of_others) == 1 and all(f'"{name}"' in source for name in of_others)
    phases = {f"sync/{phase}_seconds" for phase in ("gather", "write", "load", "check")}
    for name in with_server - {"sampling/sampling_logp_difference/mean"} - phases:
        assert f'"{name}"' in source, name
    groups = ("turns/", "tools/", "stop/", "credit/", "rollout/", "records/", "refill/", "observation/")
    own = {name for name in logged if name.startswith(groups)}
    assert own <= documented
    rows = section(CONVERSATION, "One conversation").splitlines()
    ends = re.findall(r"`(\w+)`", " ".join(row.split("|")[-2] for row in rows if row.startswith("| ")))
    stops = {name for name in logged if name.startswith("stop/") and not name.startswith("stop/agent_")}
    assert {f"stop/{name}" for name in ends} == stops


# --- examples --------------------------------------------------------------------------------------------------------


def test_the_example_of_the_rollout_log_runs(tmp_path, monkeypatch):
    """In a folder with a log of that name."""
    monkeypatch.chdir(tmp_path)
    Path("runs/chain-sparse").mkdir(parents=True)
    rows = [{"step": step, "rewards": {"exact_match_reward_func": float(step)}} for step in (1, 0)]
    Path("runs/chain-sparse/rollouts.rank0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    space = run(block(PAGES["docs/rollouts.md"], "python", "import read_rollouts"))
    assert list(space["rows"]["step"]) == [1, 0] and list(space["best"]["step"]) == [1]


def test_the_example_of_a_warm_start_trains(clone):
    row = {"input_ids": [5, 6, 7, 8], "assistant_masks": [0, 0, 1, 1]}
    Path("data.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    run(block(PAGES["docs/recipes.md"], "python", "SFTTrainer("))
    assert list(Path("runs/warm").glob("checkpoint-*/model.safetensors"))


def test_the_example_of_programs_runs(capsys):
    run(block(PAGES["docs/tools.md"], "python", "import ProgramError"))
    first, *others = capsys.readouterr().out.splitlines()
    assert (first, others[0], others[-1]) == ("144", "Traceback (most recent call last):", "[exit code 1]")


def test_the_reward_examples_run(tmp_path):
    space = run(block(RECIPES, "python", "def one_call_is_enough"))
    called, answered = (SimpleNamespace(observation=text, error=None) for text in ("4", None))
    (values,) = space["TURN_REWARD_FUNCS"][0](rollout_turns=[[called, called, answered]])
    assert values == [0.1, 0.0, None]
    right, wrong, none = (SimpleNamespace(answer=answer) for answer in ("4", "5", None))
    rollout_turns = [[called, right], [right, wrong], [none], []]
    assert space["OUTCOME_REWARD_FUNCS"][0](rollout_turns=rollout_turns, answer=["4"] * 4) == [1.0, 0.0, 0.0, 0.0]
    path = tmp_path / "rewards.py"
    path.write_text(block(PAGES["docs/trl.md"], "python", "import think_format_reward"))
    _, (reward,) = load_rewards(str(path))
    assert reward([[{"role": "assistant", "content": text}] for text in ("<think>a</think>b", "b")]) == [1.0, 0.0]


def test_the_example_of_readme_trains(clone):
    """With three small steps instead of twenty."""
    code = block(PAGES["README.md"], "python", "MTGRPOConfig")
    assert len(code.splitlines()) <= 26
    run(code.replace("max_steps=20, per_device_train_batch_size=64", "max_steps=3, per_device_train_batch_size=16"))
    rows = json_lines("runs/rollouts.rank0.jsonl")
    assert rows[-1]["step"] == 2 and {*rows[0]["rewards"]} == {"call_works", "right_answer"}


def test_readme_says_how_large_this_is():
    """To two per cent of what tests/test_size.py counts: the script, and what else importing it loads."""
    said = re.search(r"in ([\d,]+) lines. It imports ([\d,]+) lines of\s+support code", PAGES["README.md"])
    numbers = [int(number.replace(",", "")) for number in said.groups()]
    real = sizes()
    assert numbers == pytest.approx([real["script"], real["core"] - real["script"]], rel=0.02)
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_the_smallest_recipe_is_one(tmp_path):
    (tmp_path / "smallest.yaml").write_text(block(RECIPES, "yaml", "smallest"))
    mt.parse_arguments(["--config", str(tmp_path / "smallest.yaml")])


def test_the_trainer_that_is_built_in_python_trains(clone):
    space = run(block(RECIPES, "python", "MTGRPOEnvTrainer("))
    assert space["trainer"].state.global_step == 2


def with_qwens_calls(tokenizer):
    tokenizer.response_template = qwen3_template
    return tokenizer


@pytest.mark.parametrize("sign, name", [("-", "GRPOTrainer"), ("+", "MTGRPOEnvTrainer")])
def test_both_sides_of_the_diff_to_trl_train(sign, name, clone, monkeypatch):
    # TRL reads calls by the text of the template. The bundled model's is Qwen's, made short.
    monkeypatch.setattr("trl.trainer.grpo_trainer.add_response_schema", with_qwens_calls)
    lines = block(PAGES["docs/trl.md"], "diff", "GRPOTrainer(").splitlines()
    code = "\n".join(line[1:] for line in lines if line[:1] in (sign, " "))
    trainer = run(code)["trainer"]
    assert type(trainer).__name__ == name and trainer.state.global_step == 2


def test_the_environment_example_runs():
    space = run(block(ENVIRONMENTS, "python", "class TerseErrors"))
    env = space["TerseErrors"]([echo], None, tokenizer=CHATML_TOKENIZER)
    script = [call("echo", text="hi"), call("nothing", text="hi"), "<answer>1</answer>"]
    out = env.generate(["Say hi."], Scripted([script]))
    said = [message["content"] for message in out["messages"][0] if message["role"] == "user"]
    assert said == ["Say hi.", "<result>\nhi\n</result>", "<result>\nError: the call failed.\n</result>"]


# Of docs/environments.md: what stands in the block -> (row, what the model says, what it reads, reason, rewards).
EXAMPLES = {
    "class Door": ({"seed": 1}, [call("enter", digit=1), call("enter", digit=2), "<answer>2</answer>"],
                   ["higher", "open"], "answered", (0.5, [None] * 3)),
    "class LastOnly": ({}, [call("echo", text="a"), call("echo", text="b"), "<answer>b</answer>"],
                       ["a", "b"], "answered", (None, [None] * 3)),
    "class Countdown": ({"start": 3}, [call("take", number=2), call("take", number=1)],
                        ["1 left"], "environment_stop", (None, [0.1, 1.0])),
}  # fmt: skip


def test_the_example_of_images_runs(tmp_path):
    """In the prompt, in a tool's result and in a reply, each as it is drawn."""
    (tmp_path / "example.py").write_text(block(PAGES["docs/images.md"], "python", "class Board"))
    _, cls = load_environment(f"{tmp_path}/example.py:Board", None, mt.MultiTurnToolEnv)
    tokenizer = vision_model.reading(vision_model.save(tmp_path / "model"))
    turns = [call("move"), "<answer>again</answer>", "<answer>1</answer>"]
    script = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
    env = mt.MultiTurnToolEnv([], None, 3, tokenizer=tokenizer, environment=cls)
    (rollout,) = env.generate(["Begin."], Scripted([script]), rows=[{}])["rollouts"]
    boards = pictures_in(rollout.prompt_ids + rollout.completion_ids)
    assert [board.image.getpixel((30, 9))[1] for board in boards] == [255, 0, 0] and rollout.error is None


@pytest.mark.parametrize("word", EXAMPLES)
def test_an_example_of_an_environment_runs(word, tmp_path):
    """As a tools file, or by `environment: path.py:Class`, with the conversation that the page describes."""
    row, turns, read, reason, rewards = EXAMPLES[word]
    path = str(tmp_path / "example.py")
    Path(path).write_text(block(ENVIRONMENTS, "python", word))
    if word == "class Door":
        tools, (_, cls) = load_tools(path), load_environment(None, path, mt.MultiTurnToolEnv)
    else:
        tools, (_, cls) = [], load_environment(f"{path}:{word.split()[1]}", None, mt.MultiTurnToolEnv)
    tools = [*tools, *([echo] if word == "class LastOnly" else [])]
    env = mt.MultiTurnToolEnv(tools, None, 3, tokenizer=CHATML_TOKENIZER, environment=cls)
    llm = Scripted([turns])
    (rollout,) = env.generate(["Begin."], llm, rows=[row])["rollouts"]
    assert [turn.observation for turn in rollout.turns if turn.observation] == read
    assert rollout.stop_reason == reason
    assert (rollout.reward, [turn.reward for turn in rollout.turns]) == rewards
    if word == "class LastOnly":
        last = CHATML_TOKENIZER.decode(llm.requests[2].prompt)
        assert last.count("<result>") == 1 and "Begin." in last and '"a"' not in last and len(rollout.records) == 3
    else:
        assert rollout.prompt_messages[0]["content"].startswith("Begin. T")


def test_the_agent_examples_run(tmp_path):
    """Against a scripted policy, over real HTTP."""
    space = run(block(AGENTS, "python", "async def solve"))
    rollout, _ = run_agent(space["solve"], "It is 4.", "4", row={"question": "2 + 2?", "answer": "4"})
    assert rollout.reward == 1.0 and [turn.reward for turn in rollout.turns] == [0.1, None]
    assert len(rollout.records) == 1
    space = run(block(AGENTS, "python", "async def by_messages"))
    turn = '<think>Hm.</think>I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    rollout, _ = run_agent(space["by_messages"], turn, "2", row={"question": "1 + 1?", "answer": "2"})
    assert rollout.error is None and rollout.reward == 1.0, rollout.error
    assert [turn.reward for turn in rollout.turns] == [0.1, None] and len(rollout.records) == 1
    (tmp_path / "my_agent.py").write_text(block(AGENTS, "python", "sys.stdin.read()"))
    row = {"question": "2 + 2?", "answer": "4"}
    rollout, _ = run_agent(f"{sys.executable} {tmp_path}/my_agent.py", "4", row=row, timeout=60.0)
    assert rollout.reward == 1.0, rollout.error


@pytest.mark.contract("external_plugins")
def test_the_plugin_of_ms_swift_runs(tmp_path, monkeypatch):
    """One step, with the recipe's lines as the page has them."""
    page = PAGES["docs/ms_swift.md"]
    (tmp_path / "my_plugin.py").write_text(block(page, "python", "class Again"))
    keys = yaml.safe_load(block(page, "yaml", "my_plugin.py"))
    recipe = yaml.safe_load((ROOT / "hf_recipes/tiny/scheduler.yaml").read_text())
    recipe |= {**keys, "model_name_or_path": str(ROOT / recipe["model_name_or_path"]), "disable_tqdm": True}
    recipe |= {"max_steps": 1, "per_device_train_batch_size": 8, "output_dir": str(tmp_path / "out")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    mt.main(["--config", "recipe.yaml"])
    (row,) = steps_of(tmp_path / "out")
    assert row["turns/mean"] == 2.0 and row["stop/max_turns"] == 1.0 and row["records/mean"] == 1.0
    assert row["reward"] == row["rewards/right/mean"] and row["stop/environment_error"] == 0.0


def test_the_tools_of_verl_run(tmp_path, monkeypatch):
    """Both examples of tools in one conversation; the YAML of the interaction can be read."""
    page = PAGES["docs/verl.md"]
    (tmp_path / "my_tools.py").write_text(block(page, "python", "class Adder"))
    (tmp_path / "my_tools.yaml").write_text(block(page, "yaml", "my_tools.Adder"))
    (tmp_path / "talk.yaml").write_text(block(page, "yaml", "interaction:"))
    (tmp_path / "my_functions.py").write_text(block(page, "python", "@function_tool"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    keys = {"tools_config_file": "my_tools.yaml", "function_tool_path": "my_functions.py",
            "interaction_config_file": "talk.yaml"}  # fmt: skip
    (rollout,) = verl_converse(
        verl_build(**{key: str(tmp_path / name) for key, name in keys.items()})(),
        [[call("add", number=3), call("double", number=2), call("add", number=4), "<answer>10</answer>"]],
        [{"tools_kwargs": {"add": {"create_kwargs": {"start": 3}}}}],
    )
    assert [turn.observation for turn in rollout.turns] == ["6", "4", "10", None] and rollout.reward == 1.0
    assert [turn.results[0].reward for turn in rollout.turns[:3]] == [0.1, None, 0.1]


def test_pages_say_what_the_protocol_and_a_tool_format_have():
    """tests/method/test_forks.py trains by the one of the page."""
    rows = section(ENVIRONMENTS, "An environment for each conversation")
    assert set(METHODS) <= set(re.findall(r"^\| `(\w+)\(", rows, re.M))
    assert set(re.findall(r"^\| `(\w+)=", rows, re.M)) == {field.name for field in dataclasses.fields(Reply)}
    assert first_column(section(CONVERSATION, "The tool format"))[1:] == list(TOOL_FORMATS)
    names, known = re.findall(r"^\| `(\w+)", section(FORKING, "A tool format"), re.M), vars(ChatFormat)
    assert names == ["call_format", "stops", "parse_text"] and {*names} <= {*known, *known["__annotations__"]}


def test_the_notebook_example_runs(random_model, capsys):
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    turns = [call("calculator", expression="37 * 51 + 2"), "<answer>1889</answer>"]

    def says(request):
        answer = {"data": [{"id": "scripted", "max_model_len": 8192}]}
        if request.method == "POST":
            prompt = request.payload["prompt"]
            text = turns[tokenizer.decode(prompt).count("<result>\n1889")]
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": [0.0] * len(ids)}, "finish_reason": "stop"}
            answer = {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}
        return Fault("said", status=200, body=json.dumps(answer).encode())

    code = block(CONVERSATION, "python", "VLLMServerClient(")
    with FaultProxy("http://127.0.0.1:9", says) as server:
        for old, new in {"8000": str(server.port), "Qwen/Qwen3-1.7B": random_model}.items():
            assert code.count(old) == 1
            code = code.replace(old, new)
        run(code)["llm"].close()
    assert "<answer>1889</answer>" in capsys.readouterr().out


# --- the fork --------------------------------------------------------------------------------------------------------


def test_the_batch_to_try_an_estimator_on_and_what_a_plug_in_imports(capsys):
    run(block(FORKING, "python", "doctest_batch()"))
    assert "[ 0.4000,  0.5000,  0.5000]" in capsys.readouterr().out
    space = run(block(FORKING, "python", "import Turn"))
    assert space["Turn"] is mt.Turn and space["MultiTurnToolEnv"] is mt.MultiTurnToolEnv


# --- commands --------------------------------------------------------------------------------------------------------

TRAINERS = ("mt_grpo_trainer.py", "my_idea.py")  # the second is what a reader's copy is called
FORWARD = ("quickstart.sh", "train.sh", "evaluate.py", "explain_credit.py", *TRAINERS)  # to the trainer
KNOWN_COMMANDS = ("bash", "python", "accelerate", "cp", "source", "tail", "pip", "vllm", "mkdir", "git", "cd",
                  "nvidia-smi", "export", "hf", "tmux", "nohup", "echo", "sbatch", "kill", "ssh", "rsync",
                  "docker", "python3.12")  # fmt: skip


def words_of(line: str) -> list[str]:
    """A command without the variables in front of it and the comment behind it."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return words


def block_commands(text: str) -> list[list[str]]:
    """Every line of the bash blocks, and what a diff of commands adds."""
    diffs = [re.findall(r"^\+(.*\n)", body, re.M) for body in blocks(text, "diff")]
    added = ["".join(body) for body in diffs if body and re.match(r"([A-Z_]+=\S+ )*bash ", body[0])]
    lines = [line for body in blocks(text, "bash") + added for line in body.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := words_of(line))]


def span_commands(text: str) -> list[list[str]]:
    """What begins with the name of a command between backticks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    starts = [span for span in spans if re.match(rf"([A-Z_]+=\S+ )*({'|'.join(KNOWN_COMMANDS)}) ", span)]
    return [words_of(span) for span in starts]


def module_of(script: str) -> str:
    """The name by which a script of the clone is imported: `bench.step` for scripts/bench/step.py."""
    return script.removeprefix("scripts/").removesuffix(".py").replace("/", ".")


def help_of(script: str, capsys) -> str:
    module = importlib.import_module(module_of(script))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, "--help"])
        with pytest.raises(SystemExit) as ended:
            module.main()
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def accepts(script: str, option: str, capsys) -> bool:
    """Whether a script takes an option: one of the trainer's, or one in its own help or text."""
    if Path(script).name in FORWARD and option[2:].replace("-", "_") in {"config", *known_keys(mt.recipe_classes())}:
        return True
    if Path(script).name in (*TRAINERS, "quickstart.sh", "train.sh"):
        return False
    text = (ROOT / script).read_text() if script.endswith(".sh") else help_of(script, capsys)
    return re.search(rf"(?<![\w-]){option}(?![\w-])", text) is not None


@each_page
def test_every_command_has_a_script_and_options_that_it_accepts(page, capsys):
    in_blocks = block_commands(PAGES[page])
    assert {words[0] for words in in_blocks} <= set(KNOWN_COMMANDS)
    for words in in_blocks + span_commands(PAGES[page]):
        if words[0] == "cp":
            assert (ROOT / words[1]).is_file()
        if "--config_file" in words:
            assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        script = next((word for word in words if word.endswith((".py", ".sh"))), None)
        if words[0] not in ("bash", "python", "accelerate") or script is None:
            continue
        assert script == "my_idea.py" or (ROOT / script).is_file(), words
        for option in (word.split("=")[0] for word in words[words.index(script) :] if word.startswith("--")):
            assert accepts(script, option, capsys), f"{script} does not take {option}: {words}"


def test_vllm_takes_the_flags_of_the_server_by_hand():
    parser_of = pytest.importorskip("vllm.entrypoints.launchers.cli_args").make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    commands = block_commands(PAGES["docs/scaling.md"])
    (serve,) = [words for words in commands if words[:3] == ["vllm", "serve", "Qwen/Qwen3-1.7B"]]
    parsed = parser_of(FlexibleArgumentParser(exit_on_error=False)).parse_args(serve[2:])
    assert isinstance(parsed, argparse.Namespace)
    assert (parsed.model_tag, parsed.logprobs_mode) == ("Qwen/Qwen3-1.7B", "processed_logprobs")


# --- files and links -------------------------------------------------------------------------------------------------

FOLDERS = "mt_grpo|hf_recipes|scripts|tools|rewards|docs|tests"


@each_page
def test_files_and_links_of_a_page_are_there(page):
    named = set(re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]+\.\w+", re.sub(r"\]\([^)]*\)", "", PAGES[page])))
    missing = {path for path in named if not (ROOT / path).is_file()}
    assert not missing
    assert broken_links(page, PAGES[page]) == []


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: str, text: str) -> list[str]:
    broken, prose = [], re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)  # a program's `a[b](c)` is no link
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not file.is_file() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    return broken


def test_each_page_has_a_place_in_the_site():
    nav = re.findall(r"\w+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert len(nav) == len(set(nav)) and {path.name for path in ROOT.glob("docs/*.md")} <= {*nav}


# --- the benchmarks' tables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rollout", "step", "sync", "gpu", "versions", "real_model"])
def test_the_page_has_the_table_of_the_results_file(name):
    results = json.loads((ROOT / f"docs/results/{name}.json").read_text())
    bench = importlib.import_module(f"bench.{name}")
    made = bench.markdown(results) if name == "sync" else bench.section(results)
    page = PAGES[f"docs/{name if name in ('versions', 'real_model') else 'speed'}.md"]
    assert with_section(page, name, made) == page
