"""Every recipe parses, trains a step and has no key that nothing reads; every TRL key works here or is refused."""

import functools
import inspect
import json
import math
import operator
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import urlsplit

import accelerate.commands.launch
import pytest
import torch
import transformers
import trl
import vision_model
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from conftest import data_file
from datasets import Dataset
from launch.launch_plan import share_gpus
from openenv_server import Served
from transformers import AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.base.errors import RunError
from mt_grpo.base.event_loop import run_async
from mt_grpo.base.rows import Rows
from mt_grpo.conversation.conversations import read_prompt_examples, sampling_params
from mt_grpo.conversation.tools.signature import fill_in_tools
from mt_grpo.generation.in_process import InProcessBackend
from mt_grpo.generation.server_pool import ServerPool
from mt_grpo.integrations.mcp import servers as mcp_servers
from mt_grpo.integrations.mcp.servers import read_servers
from mt_grpo.recipe.checks import backend_of, check_dataset, longest_prompt, text_of_cuts
from mt_grpo.recipe.data import load_rows, make_arithmetic, with_prompts
from mt_grpo.recipe.parse import OF_TRL, check_values, default_of, known_keys, read_recipe
from mt_grpo.recipe.plugins import import_file, load_splits, module_name
from mt_grpo.reports.preflight import facts_of_settings, troubles
from mt_grpo.rollout import ToolCall
from mt_grpo.training.rewards import weights_of
from mt_grpo_trainer import CREDIT_ASSIGNMENTS

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path for path in ROOT.glob("hf_recipes/*/*.yaml") if path.parent.name != "accelerate")
LAUNCHERS = sorted(ROOT.glob("hf_recipes/accelerate/*.yaml"))
CPU_FLAGS = ["--use_cpu", "true", "--bf16", "false"]  # without a GPU, transformers refuses `bf16: true`


@pytest.fixture(autouse=True)
def environment_of_before():
    """A recipe's `env:` is set in this process: undone after a test."""
    with mock.patch.dict(os.environ):
        yield


def read(path: Path) -> dict:
    """The recipe's keys, with those of the recipe that it includes."""
    return read_recipe(str(path), mt.recipe_classes())


def write(folder: Path, recipe: dict) -> str:
    """Path of a new recipe file."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return str(path)


def header(path: Path) -> str:
    """The comment that a recipe begins with."""
    return re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))[0]


def num_processes(path: Path) -> int:
    """Of the training command in the header, or the GPUs that train with `train.sh`; one for `python` itself."""
    found = re.search(r"--num_processes (\d+)|(\d+) for training", header(path))
    return int(found[1] or found[2]) if found else 1


# --- the recipes as files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses_for_its_number_of_processes(path, monkeypatch):
    """Also TRL's own arithmetic, as each of the processes that the header starts would do it."""
    processes = num_processes(path)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    # In place of the process group that WORLD_SIZE would make accelerate wait for.
    state = SimpleNamespace(num_processes=processes, distributed_type=DistributedType.NO, device=torch.device("cpu"))
    monkeypatch.setattr(transformers.training_args, "PartialState", lambda **kwargs: state)
    monkeypatch.setattr(transformers.training_args.AcceleratorState, "_reset_state", lambda **kwargs: None)

    _, args, _ = mt.parse_arguments(["--config", str(path), *CPU_FLAGS])

    steps = args.gradient_accumulation_steps
    assert args.generation_batch_size == args.per_device_train_batch_size * processes * steps
    assert args.generation_batch_size % args.num_generations == 0
    if args.save_strategy == "steps":
        # A resumed run starts with new rollouts: only where an unbroken one does too is it the same run.
        assert args.save_steps % args.num_iterations == 0 and args.steps_per_generation == steps


@pytest.mark.parametrize("path", [p for p in RECIPES if read(p).get("vllm_mode") == "server"], ids=lambda p: p.stem)
def test_header_starts_a_server_that_fits(path):
    """What the trainer's own check of a server does not ask for."""
    text, recipe = header(path), read(path)
    if "NUM_SERVERS" not in text:  # else train.sh starts them as the recipe needs them
        assert f" {recipe['model_name_or_path']} " in text and f"--host {recipe['vllm_server_host']}" in text
    if recipe.get("rollout_engine") == "sglang":
        assert "images" not in text or ("SGLANG_VLM_CACHE_SIZE_MB=0" in text and "MM_AVOID_RETOKENIZE=1" in text)
    for length in re.findall(r"--(?:max-model-len|context-length) (\d+)", text):
        assert int(length) >= recipe["max_completion_length"] + 1024  # room for the prompt
    for group in re.findall(r"CUDA_VISIBLE_DEVICES=([\d,]+) accelerate", text):
        assert group.split(",") == [str(i) for i in range(num_processes(path))]
        assert f"CUDA_VISIBLE_DEVICES={num_processes(path)} " in text


# The paper's run (arXiv 2505.11821).
PAPER = {
    "model_name_or_path": "Qwen/Qwen2.5-7B", "dataset_name": "trivia_qa", "learning_rate": 1e-6, "warmup_steps": 20,
    "lr_scheduler_type": "constant_with_warmup", "adam_beta1": 0.9, "adam_beta2": 0.99, "max_grad_norm": 0.1,
    "bf16": True, "num_generations": 21, "per_device_train_batch_size": 12, "gradient_accumulation_steps": 4,
    "num_iterations": 2, "beta": 0.0, "max_steps": 300, "max_completion_length": 1024, "max_env_steps": 2,
    "turn_advantage_coef": 1.0, "credit_assignment": "mt_grpo", "loss_type": "bnpo", "temperature": 0.9,
}  # fmt: skip


def test_the_papers_recipe_and_the_launchers_files():
    recipe = read(ROOT / "hf_recipes/Qwen/Qwen2.5-7B--paper.yaml")
    assert {key: recipe[key] for key in PAPER} == PAPER
    files = {path.stem: load_config_from_file(str(path)) for path in LAUNCHERS}
    assert {name: file.distributed_type.value for name, file in files.items()} == {
        "cpu": "MULTI_GPU", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "one": "NO", "zero3": "DEEPSPEED",
    }  # fmt: skip
    assert files["zero3"].deepspeed_config["zero_stage"] == 3 and files["fsdp2"].fsdp_config["fsdp_version"] == 2
    assert files["cpu"].use_cpu and files["cpu"].num_processes == 2
    # accelerate refuses unknown keys, but not inside these two.
    known = {action.dest for action in accelerate.commands.launch.launch_command_parser()._actions}
    assert not [name for name, file in files.items() if {*file.deepspeed_config, *file.fsdp_config} - known]


OF_EIGHT_GPUS = [p for p in RECIPES if p.parent.name == "Qwen" and p.stem.startswith(("Qwen3", "Qwen2.5-V"))]


@pytest.mark.parametrize("path", OF_EIGHT_GPUS, ids=lambda path: path.stem)
def test_arithmetic_of_the_recipes_for_eight_gpus(path):
    """Servers for half of the GPUs, held-out rows of whole batches, room for every turn; and the header's numbers."""
    recipe, text, processes = read(path), header(path), num_processes(path)
    device, steps, group = (
        recipe[key] for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    )
    rollouts = device * processes * steps
    groups = f"{rollouts} rollouts = {rollouts // group} questions with {group} each."
    assert rollouts >= 256 and f"# One batch: {device} per device x {processes} x {steps} = {groups}\n" in text
    if recipe["vllm_mode"] == "server":
        servers = int(re.search(r"NUM_SERVERS=(\d+) ", text)[1])
        trainers, serving = share_gpus([str(i) for i in range(8)], servers, 1)
        assert len(trainers) == processes and (len(serving) >= 4 or recipe["max_staleness"])
    asked = recipe["per_device_eval_batch_size"] * processes
    held = int(re.fullmatch(r"test\[:(\d+)\]", recipe["dataset_test_split"])[1])
    assert held % asked == asked % recipe["num_generations_eval"] == recipe["save_steps"] % recipe["eval_steps"] == 0
    turns, results = recipe["max_env_steps"] + 1, recipe["max_env_steps"] * recipe["max_tool_response_tokens"]
    assert turns * recipe["max_turn_tokens"] + results <= recipe["max_completion_length"]  # no limit ends a turn early
    longest = recipe["max_completion_length"] + 512  # a prompt with its tools
    assert longest <= recipe.get("vllm_max_model_length", 32768) and recipe["max_tokens_per_pass"] >= longest
    corpus = recipe.get("env", {}).get("WIKI_SEARCH_CORPUS")
    assert corpus is None or f"python scripts/build/wiki_corpus.py {corpus} " in text


def test_a_recipe_includes_another_one(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("seed: 1\nmax_steps: 5\nenv: {A: 1, B: 010}\n")
    (tmp_path / "sub/middle.yaml").write_text("include: ../base.yaml\nmax_steps: 6\n")
    (tmp_path / "recipe.yaml").write_text("include: sub/middle.yaml\nseed: 2\nenv: {A: 1e-3}\n")
    assert read(tmp_path / "sub/middle.yaml") == {"seed": 1, "max_steps": 6, "env": {"A": "1", "B": "010"}}
    assert read(tmp_path / "recipe.yaml") == {"seed": 2, "max_steps": 6, "env": {"A": "1e-3"}}
    (tmp_path / "base.yaml").write_text("sed: 1\n")
    with pytest.raises(ValueError, match="Unknown keys in .*base.yaml: 'sed'"):
        read(tmp_path / "sub/middle.yaml")


# --- one optimizer step of every recipe, on the CPU ------------------------------------------------------------------

# The keys that a step on the CPU replaces: a random model of two layers computes in float32 on a local file of a few
# rows, one group, one step. `env` becomes WIKI_SEARCH_CORPUS and HARBOR_PYTHON, `openenv_url` is of a test's server.
REPLACED = {
    "model_name_or_path", "dtype", "attn_implementation", "bf16", "use_cpu", "dataset_name", "dataset_config",
    "dataset_size", "per_device_train_batch_size", "gradient_accumulation_steps", "output_dir", "max_steps", "env",
    "openenv_url",
}  # fmt: skip


def game_of(trainer) -> type | None:
    """The class of a game's environments."""
    environments = trainer.env.environments
    classes = [] if environments is None else environments.by_name.values()
    return next((cls for cls in classes if hasattr(cls, "text_class")), None)


def class_of(trainer) -> type:
    """The class of all environments."""
    return trainer.env.environments.by_name[None]


def source_of(function) -> str:
    return os.path.relpath(function.__code__.co_filename, ROOT)


# Where a key's value is when it is used. A recipe key without an entry fails the test: show here what reads it.
def kind_of_environments(trainer):
    if hasattr(trainer.env, "agent"):
        return "openai_agent"
    cls = class_of(trainer)
    if cls.__name__ == "RunningTotal":
        return "tools/running_total.py:RunningTotal"
    return "gym" if game_of(trainer) else "openenv" if hasattr(cls, "servers") else None


def yaml_of_tool(trainer):
    """The file whose schema a tool of verl's format has."""
    (tool,) = trainer.env.environments.by_name[None].verl_tools.values()
    for path in ROOT.glob("tools/verl/*.yaml"):
        if yaml.safe_load(path.read_text())["tools"][0]["tool_schema"] == tool.json_schema:
            return str(path.relative_to(ROOT))


def file_of_rewards(trainer):
    """The file whose lists have the functions, some of which may be of a file that it imports."""
    for path in [*ROOT.glob("rewards/*.py"), *ROOT.glob("hf_recipes/**/*.py")]:
        if module := sys.modules.get(module_name(str(path), "reward_fn")):
            if {*module.TURN_REWARD_FUNCS, *module.OUTCOME_REWARD_FUNCS} <= {*trainer.reward_funcs}:
                return str(path.relative_to(ROOT))


def json_of_server(trainer):
    """The file that has the server of the trainer's tool."""
    path = f"tools/mcp/{mcp_servers.servers_to_close[-1].name}.json"
    (entry,) = read_servers(str(ROOT / path), "mcp_config_file").values()
    asked = next(iter(trainer.env.tools.values())).json_schema
    return path if asked and mcp_servers.servers_to_close[-1].entry == entry else None


READ_BACK = {
    "tools_config_file": yaml_of_tool,
    "mcp_config_file": json_of_server,
    "tools_script": lambda t: source_of(next(iter(t.env.tools.values()), t.env.environments and class_of(t).reset)),
    "reward_fn": file_of_rewards,
    "system_prompt": lambda t: t.env.with_system_prompt(t.train_dataset[0]["prompt"])[0]["content"],
    "prompt_examples": lambda t: next(
        str(path.relative_to(ROOT))
        for path in ROOT.glob("hf_recipes/*/examples/*.yaml")
        if read_prompt_examples(str(path)) == t.env.prompt_examples
    ),
    "environment": kind_of_environments,
    "gym_env": lambda t: game_of(t)().env.spec.id,
    "gym_kwargs": lambda t: (
        {k: v for k, v in game_of(t)().env.spec.kwargs.items() if k in ("is_slippery", "sab")}
        | ({"render_mode": mode} if (mode := game_of(t)().env.render_mode) else {})
    ),
    "gym_actions": lambda t: list(game_of(t).actions),
    "gym_text": lambda t: (
        f"{os.path.relpath(inspect.getfile(game_of(t).text_class), ROOT)}:{game_of(t).text_class.__name__}"
    ),
    "agent": lambda t: f"tools/agents/{Path(inspect.getfile(t.env.agent.function)).name}:{t.env.agent.name}",
    "multi_turn_scheduler": lambda t: t.env.scheduler_class.__name__.lower(),
    "external_plugins": lambda t: [os.path.relpath(inspect.getfile(t.env.scheduler_class), ROOT)],
    "max_turns": lambda t: t.env.scheduler_kwargs["max_turns"],
    "reward_funcs": lambda t: [func.__name__ for func in t.reward_funcs],
    "completion_length_limit_scope": lambda t: t.env.length_scope,
    "max_env_steps": lambda t: t.env.max_steps,
    "outcome_reward_weights": lambda t: t.reward_weights[t.reward_functions.num_turn_funcs :].tolist(),
    "learning_rate": lambda t: t.optimizer.param_groups[0]["initial_lr"],
    "lr_scheduler_type": lambda t: t.args.lr_scheduler_type.value,
    "warmup_steps": lambda t: t.args.get_warmup_steps(100),
    "adam_beta1": lambda t: t.optimizer.param_groups[0]["betas"][0],
    "adam_beta2": lambda t: t.optimizer.param_groups[0]["betas"][1],
    "temperature": lambda t: t._sampling_params["temperature"],
    "gradient_checkpointing": lambda t: t.accelerator.unwrap_model(t.model).is_gradient_checkpointing,
    "save_strategy": lambda t: t.args.save_strategy.value,
    "report_to": lambda t: t.args.report_to or "none",
    "eval_strategy": lambda t: t.args.eval_strategy.value,
    "dataset_test_split": lambda t: f"test[:{256 * len(t.eval_dataset) // len(t.train_dataset)}]",  # of as many rows
    "chat_template_kwargs": lambda t: t.env.chat_template_kwargs or None,
    "use_peft": lambda t: hasattr(t.model, "peft_config"),
    "lora_r": lambda t: t.model.peft_config["default"].r,
    "lora_alpha": lambda t: t.model.peft_config["default"].lora_alpha,
    "lora_target_modules": lambda t: (
        ["all-linear"] * ("mlp.up_proj" in str(t.model.peft_config["default"].target_modules))
    ),
}
UNDER_ITS_NAME = {  # an attribute of the conversation's environment, of the trainer, its arguments or its state
    "env": "tool_format agent_timeout environment_timeout max_model_calls max_completion_length max_turn_tokens "
    "max_tool_response_tokens tool_timeout max_concurrent_tools",
    "": "turn_advantage_coef scale_rewards num_generations num_generations_eval num_iterations beta loss_type",
    "args": "credit_assignment max_grad_norm save_total_limit seed max_tokens_per_pass per_device_eval_batch_size "
    "eval_on_start",
    "state": "logging_steps save_steps eval_steps",
}
READ_BACK |= {
    key: operator.attrgetter(f"{place}.{key}".lstrip("."))
    for place, keys in UNDER_ITS_NAME.items()
    for key in keys.split()
}
READ_BACK_VLLM = {  # replaced where there is no server and the model itself generates
    "use_vllm": lambda t: t.use_vllm,
    "vllm_mode": lambda t: t.backend,
    "vllm_server_host": lambda t: urlsplit(t.client.base_url).hostname,
    "vllm_server_port": lambda t: urlsplit(t.client.base_url).port,
    "vllm_server_timeout": lambda t: t.client.servers[0].timeout,
    "vllm_group_port": lambda t: t.client.transfer.group_port,
    "vllm_gpu_memory_utilization": lambda t: t.vllm_generation.settings["gpu_memory_utilization"],
    "vllm_max_model_length": lambda t: t.vllm_generation.settings["max_model_length"],
    "vllm_importance_sampling_mode": lambda t: t.vllm_importance_sampling_mode,
    "weight_sync": lambda t: t.client.transfer.transport,
    "rollout_engine": lambda t: t.client.servers[0].engine.name,
    "max_staleness": lambda t: t.args.max_staleness,
}
VLLM_KEYS = READ_BACK_VLLM.keys()


@functools.cache
def lake_server() -> Served:
    """The server of hf_recipes/tiny/openenv.yaml, by the tests' own: OpenEnv's package is not here."""
    sample = import_file(str(ROOT / "tools/openenv/frozen_lake.py"), "openenv_url")

    class FrozenLake:
        def reset(self, **arguments):
            self.lake = sample.Lake()
            return {"text": sample.RULES + self.lake.board()}, None, False

        def step(self, action):
            text, reward, done = self.lake.act(action["message"])
            return {"text": text}, reward, done

        @property
        def state(self):
            return {"step_count": self.lake.steps if hasattr(self, "lake") else 0}

    return Served(FrozenLake, name="FrozenLake").__enter__()  # its threads are daemons


FAMILIES = {"Qwen3-VL": "qwen3_vl", "Qwen2.5-VL": "qwen2_5_vl", "Qwen2.5": "qwen2"}


def family_of(name: str) -> str | None:
    """The architecture of a model of the Hub."""
    return next((family for begin, family in FAMILIES.items() if name.startswith(f"Qwen/{begin}-")), None)


def on_this_machine(recipe: dict, model: str, folder: Path) -> dict:
    """The recipe with the keys of `REPLACED` replaced."""
    original, name = recipe.get("reward_fn") or "", recipe["model_name_or_path"]
    if "zoom" in original:
        saved = vision_model.save(folder / "vision", family_of(name) or "qwen2_5_vl")
        config = json.loads((saved / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = 4096  # as large as the recipes' own
        (folder / "vision/config.json").write_text(json.dumps(config))
        model = str(folder / "vision")
    elif family_of(name) == "qwen2":  # with biases, as Qwen3 has none, and fewer heads for keys
        config = transformers.Qwen2Config.from_pretrained(model, num_key_value_heads=1)
        model = str(shutil.copytree(model, folder / "qwen2"))
        transformers.Qwen2ForCausalLM(config).save_pretrained(model)
    if recipe.get("tool_format", "xml") != "xml":  # the random model's own chat template knows no tools
        template = ROOT / recipe["model_name_or_path"] / "chat_template.jinja"
        if not template.exists():  # a model of the Hub
            name = "qwen3_vl" if "zoom" in original else "qwen3"
            template = Path(trl.__file__).parent / f"chat_templates/{name}.jinja"
        model = change_model(folder, model, "chat_template.jinja", template.read_text(encoding="utf-8"))
    served = {"openenv_url": lake_server().url} if "openenv_url" in recipe else {}
    recipe = {key: value for key, value in recipe.items() if key not in REPLACED} | {"env": recipe.get("env", {})}
    data = folder / "train.jsonl"
    if "triviaqa" in original or "squad" in original:
        rows = data_file("squad/qa.jsonl").read_text(encoding="utf-8").splitlines()[:8]
        corpus = data_file("squad/corpus.jsonl").read_text(encoding="utf-8").splitlines()[:20]
        (folder / "corpus.jsonl").write_text("\n".join(corpus), encoding="utf-8")
        recipe["env"] = recipe["env"] | {"WIKI_SEARCH_CORPUS": str(folder / "corpus.jsonl")}
    elif "harbor" in recipe.get("agent", ""):  # whose Harbor is a stand-in
        (folder / "plan.json").write_text('{"trial": {"rewards": {"reward": 1}}}')
        (folder / "python").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}/tests/harbor_stub exec {sys.executable} "$@"\n')
        (folder / "python").chmod(0o755)
        recipe["env"] = recipe["env"] | {"HARBOR_PYTHON": str(folder / "python")}
        rows = [json.dumps({"task": str(folder)})] * 8
    elif "zoom" in original:
        rows = (ROOT / "hf_recipes/tiny/zoom/train.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    elif "gsm8k" in original or "program" in original:
        rows = data_file("gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    else:
        rows = [json.dumps(row) for row in make_arithmetic(8, seed=0)]
    data.write_text("\n".join(rows), encoding="utf-8")
    return recipe | served | {
        "model_name_or_path": model, "dtype": "float32", "bf16": False, "use_cpu": True, "dataset_name": str(data),
        "dataset_size": 8, "per_device_train_batch_size": recipe["num_generations"], "gradient_accumulation_steps": 1,
        "output_dir": str(folder / "output"), "max_steps": 1,
    }  # fmt: skip


def check_read_back(trainer, recipe: dict, readers: dict) -> None:
    for key, value in recipe.items():
        if key == "system_prompt":
            value = fill_in_tools(value, trainer.env.tools)
        if key in readers:
            assert readers[key](trainer) == value, key
        else:
            pytest.fail(f"No entry says where the recipe's key {key!r} is read.")


def what_is_used(path: Path) -> tuple:
    """The keys of a recipe that reach a step without a server, and the files that it names."""
    recipe = read(path)
    named = [recipe.get(key) for key in ("tools_script", "reward_fn", "environment", "agent", "gym_env")]
    return (*named, *sorted(recipe.keys() - REPLACED - VLLM_KEYS))


# Of recipes that differ in numbers alone one trains, and all of those for large models.
TRAINED = list({what_is_used(path) + (path.stem,) * (path.parent.name == "Qwen"): path for path in RECIPES}.values())


@pytest.mark.contract("recipe keys")
@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_recipe_trains_a_step_and_every_key_is_read(path, random_model, tmp_path):
    original = read(path)
    recipe = {k: v for k, v in on_this_machine(original, random_model, tmp_path).items() if k not in VLLM_KEYS}

    trainer = mt.build_trainer(*mt.parse_arguments(["--config", write(tmp_path, recipe)]))
    assert trainer.accelerator.ddp_handler.gradient_as_bucket_view
    assert troubles(facts_of_settings(trainer)) == []  # (what a preflight says of rollouts is about a random model)
    trainer.train()

    assert trainer.state.global_step == 1
    (logged,) = [log for log in trainer.state.log_history if "completions/mean_length" in log]
    assert logged["completions/mean_length"] > 0
    modes = [json.loads(line)["mode"] for line in open(tmp_path / "output/rollouts.rank0.jsonl", encoding="utf-8")]
    tests = ["eval"] * 8 * original.get("eval_on_start", False)  # and at the end
    assert modes == [*tests, *["train"] * min(16, original["num_generations"]), *tests]
    assert len(trainer.train_dataset) == 8
    config = trainer.model.config
    assert config.model_type == (family_of(original["model_name_or_path"]) or config.model_type)
    assert config.get_text_config().num_hidden_layers == 2
    check_read_back(trainer, {k: original[k] for k in original.keys() - REPLACED - VLLM_KEYS}, READ_BACK)
    for variable, value in recipe["env"].items():
        assert os.environ[variable] == str(value)
    if "wiki_search" in trainer.env.tools:
        result = run_async(trainer.env.call_tool(ToolCall("wiki_search", {"query": "Normans in Normandy"})))
        assert result.error is None and "Normandy" in result.text
        assert len(re.findall(r"^\[\d+\] ", result.text, re.MULTILINE)) == int(recipe["env"]["WIKI_SEARCH_TOPK"])


@pytest.mark.parametrize("name", ["agent", "scheduler"])
def test_settings_may_be_used_twice(name, tmp_path):
    """As by a program that trains and then evaluates: no default has become a setting meanwhile."""
    recipe = mt.parse_arguments(["--config", f"hf_recipes/tiny/{name}.yaml", "--output_dir", str(tmp_path)])
    for _ in range(2):
        trainer = mt.build_trainer(*recipe)
        assert trainer.env.result_limit == max(10, recipe[1].max_completion_length // 4)


# Of recipes with the same keys of vLLM one.
WITH_VLLM = list({tuple(sorted(read(p).keys() & VLLM_KEYS)): p for p in RECIPES if read(p).get("use_vllm")}.values())


@pytest.mark.parametrize("path", WITH_VLLM, ids=lambda path: path.stem)
def test_recipe_reaches_vllm(path, random_model, tmp_path, monkeypatch):
    """The keys that a step without a server leaves out, up to the objects that use them."""
    monkeypatch.setattr(mt, "check_server", lambda *args, **kwargs: None)  # there is none to ask
    original, dist = read(path), SimpleNamespace(fsdp_version=0)
    original |= {"vllm_server_host": "10.1.2.3"} if "vllm_server_host" in original else {}  # not the default
    # In place of TRL's engine, which needs a GPU: it keeps what it was told.
    told = lambda **settings: SimpleNamespace(settings=settings, _dist=dist)  # noqa: E731
    monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", told)
    recipe = on_this_machine(original, random_model, tmp_path)

    trainer = mt.build_trainer(*mt.parse_arguments(["--config", write(tmp_path, recipe)]))

    check_read_back(trainer, {k: v for k, v in original.items() if k in VLLM_KEYS}, READ_BACK_VLLM)
    assert isinstance(trainer.llm, ServerPool if original["vllm_mode"] == "server" else InProcessBackend)


# --- keys without an effect, and pairs that would train something else -----------------------------------------------

# TRL's keys that do nothing in a multi-turn rollout, or something else, with a value that is not the default.
REFUSED = {
    "remove_unused_columns": True, "reward_weights": [1.0, 1.0], "max_tool_calling_iterations": 3,
    "multi_objective_aggregation": "normalize_then_sum", "vllm_structured_outputs_regex": "[0-9]+",
    "neftune_noise_alpha": 5.0, "dataloader_in_order": False, "data_seed": 7, "load_in_8bit": True,
    "load_in_4bit": True, "dataset_streaming": True, "label_smoothing_factor": 0.1,
    "train_sampling_strategy": "sequential",
}  # fmt: skip


@pytest.fixture
def parse(tmp_path):
    """Parses the calculator's recipe with changes."""

    def parse_changes(*flags, recipe="calculator", **changes):
        recipe = read(ROOT / f"hf_recipes/tiny/{recipe}.yaml") | {"output_dir": str(tmp_path)} | changes
        return mt.parse_arguments(["--config", write(tmp_path, recipe), *flags])

    return parse_changes


def test_refused_keys(parse):
    assert REFUSED.keys() == OF_TRL["refused"].keys()
    for key, value in REFUSED.items():
        with pytest.raises(ValueError, match=f"^{key}=.* not supported: "):
            parse(**{key: value})
    with pytest.raises(ValueError, match="^load_in_8bit=True is not supported"):
        parse("--load_in_8bit")


def test_a_rate_falls_where_the_reward_no_longer_rises(parse):
    _, args, _ = parse(lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="reward", eval_strategy="steps")
    assert args.lr_scheduler_kwargs == {"mode": "max"}


@pytest.mark.parametrize(("changes", "words"), [
    ({"loss_type": "cispo"}, "multiplies gradients by a cap of 0.2"),
    ({"loss_type": "cispo", "epsilon_high": 0.28}, "a cap of 0.28, below 1"),
    ({"use_vllm": True, "vllm_mode": "server", "loss_type": "vespo", "credit_assignment": "outcome",
      "vllm_importance_sampling_mode": "sequence_mask"}, "Set vllm_importance_sampling_mode: token_mask"),
    ({"use_transformers_continuous_batching": True, "fp16": True, "use_cpu": False}, "continuous_batching.* casts"),
    ({"lora_r": 8}, "lora_r=8 has no effect without use_peft"),
    ({"use_dora": True}, "use_dora=True has no effect without use_peft"),
    ({"max_staleness": 2}, "max_staleness=2 has no effect without a server"),
    ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all"}, "steps inside each backward pass"),
    ({"optim": "adalomo"}, "steps inside each backward pass"),
    ({"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}, "loss does not fall"),
    ({"save_strategy": "best", "metric_for_best_model": "reward"}, "eval_strategy: no: nothing is evaluated"),
    ({"generation_kwargs": {"top_k": None}}, "generation_kwargs: 'top_k'"),
    ({"optim": "schedule_free_adamw", "use_vllm": True, "vllm_mode": "server", "eval_strategy": "epoch"}, "averages"),
    ({"report_to": "neptune"}, "^report_to: neptune: not installed"), ({"report_to": ["wanb"]}, "wanb: not installed"),
    ({"optim": "paged_lion_8bit"}, "^optim='paged_lion_8bit': .*bitsandbytes"),
    ({"accelerator_config": {"split_batches": True}}, "some prompts would never be trained"),
    ({"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size"),
    *(({"generation_kwargs": {key: value}}, f"generation_kwargs: '{key}'") for key, value in
      (("num_beams", 4), ("do_sample", False), ("presence_penalty", 0.5), ("temperature", 0.5))),
])  # fmt: skip
def test_settings_that_would_train_something_else(changes, words, parse):
    with pytest.raises(ValueError, match=words):
        parse(**changes)


@pytest.mark.parametrize(
    ("key", "value", "readers"),
    [
        ("turn_advantage_coef", 0.5, set(CREDIT_ASSIGNMENTS) - {"outcome", "merged"}),
        ("turn_discount", 0.9, {"turn_return", "gigpo", "progress_credit"}),
        ("outcome_in_return", True, {"turn_return", "gigpo"}),
        ("state_baseline", "leave_one_out", {"gigpo"}),
        ("off_policy_mask_threshold", 0.5, {"outcome", "merged"}),
    ],
)
def test_keys_that_only_some_estimators_read(key, value, readers, parse):
    for credit in CREDIT_ASSIGNMENTS:
        changes = {"scale_rewards": "none", "credit_assignment": credit, key: value}
        if credit in readers:
            assert getattr(parse(**changes)[1], key) == value
            continue
        with pytest.raises(ValueError, match=f"{key}.*credit_assignment='{credit}'"):
            parse(**changes)


def test_one_gpu_is_two_arguments():
    """What `train.sh` answers where it finds one GPU."""
    with pytest.raises(ValueError, match="With one GPU add: --vllm_mode colocate --max_staleness 0") as error:
        share_gpus(["0"], 1, 1)
    recipe = str(ROOT / "hf_recipes/Qwen/Qwen3-1.7B--triviaqa.yaml")
    flags = str(error.value).partition("With one GPU add: ")[2].split()
    _, args, _ = mt.parse_arguments(["--config", recipe, *flags, *CPU_FLAGS])
    assert backend_of(args) == "colocate"


def test_sampling_keys_reach_the_backend(random_model, tmp_path):
    """`generation_kwargs` come last. The same dictionary goes into a server's request (tests/run/test_faults.py)."""
    keys = {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.05, "repetition_penalty": 1.1}
    expected = {**keys, "top_k": 5}
    recipe = on_this_machine(read(ROOT / "hf_recipes/tiny/calculator.yaml"), random_model, tmp_path)
    recipe |= keys | {"generation_kwargs": {"top_k": 5}}
    trainer = mt.build_trainer(*mt.parse_arguments(["--config", write(tmp_path, recipe)]))
    for given in (trainer._sampling_params, trainer.generation_config.to_dict(), trainer.generation_kwargs):
        assert expected.items() <= given.items()
    args = SimpleNamespace(**keys, generation_kwargs={"top_k": None})  # a server would take the model's own for null
    assert sampling_params(args) == {**keys, "top_k": 0}


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def build(random_model, tmp_path, monkeypatch):
    """Builds a trainer from the calculator's recipe with changes (`...` removes a key). It loads no weights."""
    loaded = mock.Mock(side_effect=AssertionError("weights were loaded before the configuration was checked"))
    monkeypatch.setattr(trl.trainer.grpo_trainer, "create_model_from_path", loaded)

    def build_trainer(*flags, **changes):
        recipe = on_this_machine(read(ROOT / "hf_recipes/tiny/calculator.yaml"), random_model, tmp_path) | changes
        recipe = {key: value for key, value in recipe.items() if value is not ...}
        return mt.build_trainer(*mt.parse_arguments(["--config", write(tmp_path, recipe), *flags]))

    return build_trainer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_completion_length": None}, "^max_completion_length: None .*expected int"),
        ({"env": {"HF_HUB_OFFLINE": 1}}, "^env: HF_HUB_OFFLINE in .* is read before"),
        ({"turn_reward_weights": [1.0]}, "turn_reward_weights has 1 values, expected"),
        ({"system_prompt": 'Write {"name": 1}.'}, "system_prompt has a placeholder"),
        ({"reward_fn": ...}, "No reward functions. Expected"),
        ({"tool_format": "hermes"}, "The chat template of .* has no tool support: it leaves calls out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_value(changes, message, build):
    with pytest.raises(ValueError, match=message):
        build(**changes)


NUMBERS_OUT_OF_RANGE = {
    **dict.fromkeys(
        ("lora_alpha", "dataset_size", "per_device_train_batch_size", "num_iterations",
         "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "max_completion_length",
         "max_turn_tokens", "max_tokens_per_pass", "max_concurrent_tools", "max_steps",
         "max_model_calls", "max_turns"),
        (0,),
    ),
    **dict.fromkeys(
        ("adam_epsilon", "temperature", "delta", "sapo_temperature_neg", "sapo_temperature_pos", "tool_timeout",
         "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", "reward_timeout",
         "vllm_request_timeout", "environment_timeout", "agent_timeout"),
        (0.0, math.inf, math.nan),
    ),
    **dict.fromkeys(("min_p", "ref_model_mixup_alpha", "turn_discount"), (-1, 1.1, math.nan)),
    **dict.fromkeys(
        ("turn_reward_weights", "outcome_reward_weights"), ([1.0, math.nan], [-math.inf, 1.0], [1.0, -1e39])
    ),
    "turn_advantage_coef": (-1.5, 1e39),
    "lora_dropout": (-0.1, 1.0, math.nan), "top_p": (0.0, 1.1, math.nan), "num_generations": (1, 0),
    "max_tool_response_tokens": (9,), "max_env_steps": (-1,), "refill_groups": (-1,),
}  # fmt: skip


def test_every_number_has_a_range(parse):
    """A NaN that is taken drops a reward; infinite temperature samples noise; float32 makes 1e39 infinite."""
    of_numbers = re.compile(r"\b(int|float)\b")
    for cls in mt.recipe_classes():
        settings, defaults = cls.__new__(cls), {key: default_of(key, (cls,)) for key in cls.__dataclass_fields__}
        for key, kind in known_keys((cls,)).items():
            numeric = of_numbers.search(getattr(kind, "__name__", "") + str(kind))
            by_default = (-1.5,) if "float" in str(kind) else (-2,)
            for value in NUMBERS_OUT_OF_RANGE.get(key, by_default) if numeric and key not in REFUSED else ():
                vars(settings).update({**defaults, key: value})
                with pytest.raises(ValueError, match=rf"^{key}\b.*, expected"):
                    check_values(settings)
    for changes in ({"temperature": 0.0}, {"dataset_size": 0}, {"use_peft": True, "lora_alpha": 0}):  # of each class
        with pytest.raises(ValueError, match=r"=0(\.0)?, expected"):
            parse(**changes)
    with pytest.raises(ValueError, match=r"turn_reward_weights=\[nan\], expected"):
        weights_of([len], [math.nan], "turn")  # as they are given in Python


def test_good_values_are_taken_and_null_unsets_what_the_recipe_says(parse):
    """At the edge of a range, and in each spelling that YAML and people use for a number."""
    edge = {"use_transformers_continuous_batching": True, "max_steps": -1, "top_p": 1.0, "min_p": 0.0, "epsilon": 0.0,
            "turn_reward_weights": [-1, 0.5], "seed": 0, "pad_to_multiple_of": "none", "tool_timeout": 5,
            "lr_scheduler_type": "cosine_with_restarts",
            "lr_scheduler_kwargs": '{"num_cycles": 2}', "learning_rate": "1e-6", "scale_rewards": "none"}  # fmt: skip
    _, args, _ = parse("--max-env-steps", "3", "--beta=0.5", "--output_dir", "out", **edge)
    assert (args.max_steps, args.top_p, args.min_p, args.seed, args.pad_to_multiple_of) == (-1, 1.0, 0.0, 0, None)
    assert args.turn_reward_weights == [-1.0, 0.5] and args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert (args.learning_rate, args.tool_timeout, args.scale_rewards) == (1e-6, 5.0, "none")
    assert (args.max_env_steps, args.beta) == (3, 0.5)
    assert args.output_dir == str(ROOT / "out")  # of the folder where the run starts, whatever a tool changes
    assert mt.MTGRPOConfig("x", use_cpu=True, bf16=False, scale_rewards=False).scale_rewards == "none"
    flags = ["--agent", "null", "--agent_command", "./agent.sh", "--max-turn-tokens=null", "--reward_funcs", "null"]
    script_args, args, _ = parse(*flags, recipe="agent", reward_funcs=["a", "b"])
    assert (script_args.agent, script_args.agent_command, args.max_turn_tokens) == (None, "./agent.sh", None)
    assert script_args.reward_funcs is None
    assert parse(*flags, "--agent", "a.py:b", recipe="agent")[0].agent == "a.py:b"


@pytest.mark.parametrize("flags", [["--num_generation=8"], ["--config", "other.yaml"]])
def test_bad_command_line(flags, build):
    """Not argparse's way, which prints a screen of options and exits with 2."""
    with pytest.raises(ValueError, match="did you mean 'num_generations'|Several recipes are given"):
        build(*flags)


@pytest.mark.parametrize("text", ["beta: 0.0\nseed: 1\nbeta: 0.1\n", "beta: !!python/object/apply:os.getpid []\n"])
def test_bad_recipe(text, tmp_path):
    """A key that is set twice, and code that would run."""
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises((ValueError, yaml.YAMLError), match="'beta' is set twice|could not determine a constructor"):
        mt.parse_arguments(["--config", str(tmp_path / "recipe.yaml")])


def test_what_a_recipe_says_arrives_as_it_is_written(tmp_path, monkeypatch):
    """Not as YAML 1.1 reads it, in which 1:30 would be 90, and 010 would be 8."""
    monkeypatch.setenv("LAST", "before")
    path = tmp_path / "recipe.yaml"
    written = (ROOT / "hf_recipes/tiny/calculator.yaml").read_text()
    written = re.sub(r"^(system_prompt|run_name|env):.*(\n .*)*", "", written, flags=re.M)
    path.write_text(
        f"{written}\nrun_name: 12:30\nsystem_prompt: Größe 1:30\n"
        "env: {TIME: 12:30, MODE: 010, RATE: 1e-3, BIG: 1_000, TEXT: off, MERGED: &one 0x1F, LAST: *one}\n",
        encoding="utf-8",
    )
    script_args, args, _ = mt.parse_arguments(["--config", str(path)])
    assert (args.run_name, script_args.system_prompt) == ("12:30", "Größe 1:30")
    found = {name: os.environ.pop(name) for name in ("TIME", "MODE", "RATE", "BIG", "TEXT", "MERGED", "LAST")}
    assert found == {"TIME": "12:30", "MODE": "010", "RATE": "1e-3", "BIG": "1_000", "TEXT": "off", "MERGED": "0x1F",
                     "LAST": "0x1F"}  # fmt: skip


def test_bad_tools_file(build, tmp_path):
    (tmp_path / "plugin.py").write_text("TOOL_FUNCTIONS = []")
    with pytest.raises(ValueError, match="has nothing in TOOL_FUNCTIONS or ENVIRONMENT"):
        build(tools_script=str(tmp_path / "plugin.py"))
    (tmp_path / "plugin.py").write_text("def f(): pass\nTOOL_FUNCTIONS = OUTCOME_REWARD_FUNCS = f")
    for key, name in (("tools_script", "TOOL_FUNCTIONS"), ("reward_fn", "OUTCOME_REWARD_FUNCS")):
        with pytest.raises(ValueError, match=f"{key}: {name} in .* expected a list"):
            build(**{key: str(tmp_path / "plugin.py")})
    with pytest.raises(ValueError, match="environment: .* expected a class"):
        build(environment=f"{tmp_path / 'plugin.py'}:f")


GAME = """
class Game:
    def reset(self, **row) -> None:
        self.made = 0

    def move(self, to: str) -> str:
        "Move."
        self.made += 1
        return to

    def get_reward(self) -> float:
        return float(self.made)
"""


@pytest.mark.contract("tools file")
@pytest.mark.parametrize("where", ["environment", "tools_script", "both"])
def test_a_recipe_with_an_environment_only(where, random_model, tmp_path):
    """By one key or by the other: both would be two environments."""
    path = tmp_path / "game.py"
    path.write_text(GAME + "\n\nENVIRONMENT = Game\n" * (where != "environment"))
    recipe = on_this_machine(read(ROOT / "hf_recipes/tiny/calculator.yaml"), random_model, tmp_path)
    recipe = {key: value for key, value in recipe.items() if key not in ("tools_script", "reward_fn")}
    keys = {"environment": f"{path}:Game", "tools_script": str(path)}
    recipe |= {key: value for key, value in keys.items() if where in (key, "both")}
    arguments = ["--config", write(tmp_path, recipe)]
    if where == "both":
        with pytest.raises(ValueError, match="environment: '.*:Game' is an environment, and so is"):
            mt.build_trainer(*mt.parse_arguments(arguments))
        return
    trainer = mt.build_trainer(*mt.parse_arguments(arguments))
    assert trainer.reward_func_names == ["Game"] and trainer.reward_weights.tolist() == [1.0]
    assert [cls.__name__ for cls in trainer.env.environments.by_name.values()] == ["Game"]


ROW = '{"question": "1+1?", "answer": "2"}\n'
IMAGE = '{"prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}], "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": " ", "answer": "2"}', "row 0: .* needs a prompt of text"),
        (ROW + '{"question": "1+1?", "answer": NaN}', "row 1: .*nan.* and its answer"),
        (IMAGE * 64, "row 0: a message has an image"),
    ],
)
def test_bad_dataset(content, message, build, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        build(dataset_name=str(path))


def test_data_that_is_good_in_spite_of_its_looks(tmp_path):
    """A byte order mark, blank lines, text parts, and columns that only later rows have."""
    parts = '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}], "level": 3}\n'
    (tmp_path / "data.jsonl").write_bytes(b"\xef\xbb\xbf" + (ROW + "\n" + parts).encode())
    rows = load_rows(str(tmp_path / "data.jsonl"), "train")
    assert rows["prompt"] == [[{"role": "user", "content": "1+1?"}], [{"role": "user", "content": "ab"}]]
    assert (rows["answer"], rows["level"]) == (["2", None], [None, 3])
    arrays = Dataset.from_list([{"question": "q", "answer": [1, 2]}]).with_format("numpy")
    assert with_prompts(arrays, "train_dataset")[0]["answer"].tolist() == [1, 2]


def test_a_history_of_openais_api_is_read(random_model, tmp_path):
    """A message that only calls has null as its content, and its arguments are text."""
    function = {"name": "add", "arguments": '{"a": 1}'}
    tool_calls = [{"id": "1", "type": "function", "function": function}]
    calls = {"role": "assistant", "content": None, "tool_calls": tool_calls}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    prompt = [{"role": "user", "content": "1+1?"}, calls, result, {"role": "user", "content": "And?"}]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": prompt}))
    (row,) = load_rows(str(path), "train")
    assert [message["content"] for message in row["prompt"]] == ["1+1?", "", "2", "And?"]
    env = mt.MultiTurnToolEnv([], None, tokenizer=AutoTokenizer.from_pretrained(random_model))
    table = Dataset.from_list([{"prompt": prompt}])  # as a notebook has it; a table has tool_calls: None elsewhere
    for rows in ([row], table):
        rows = rows if rows is table else Rows(rows)
        check_dataset(rows, "train_dataset", env)
        assert longest_prompt(env, rows) > 20


@pytest.mark.parametrize(
    "name, split, size", [("rows.jsonl", "validation", None), ("arithmetic", "tset", None), ("chain", "train", 10**9)]
)
def test_splits_that_are_not_there(name, split, size):
    """Else all rows would be taken, those of train, or rows without an end."""
    with pytest.raises(ValueError, match=f"has no split '{split}'|chain has 500000 rows at most"):
        load_rows(name, split, size)


def test_a_run_without_a_step_fails(random_model, tmp_path):
    recipe = on_this_machine(read(ROOT / "hf_recipes/tiny/calculator.yaml"), random_model, tmp_path)
    trainer = mt.build_trainer(*mt.parse_arguments(["--config", write(tmp_path, recipe)]))
    trainer.train_dataset = Rows([])
    with pytest.raises(RunError, match="No optimizer step was taken, with 0 prompts"):
        trainer.train()
    with pytest.raises(ValueError, match="The training set has 1 rows. A batch needs"):
        recipe |= {"dataset_size": 1, "gradient_accumulation_steps": 2}
        mt.build_trainer(*mt.parse_arguments(["--config", write(tmp_path, recipe)]))


@pytest.mark.parametrize("fails", [False, True])
def test_a_preflight_closes_the_client_of_its_server(fails, parse, tmp_path, monkeypatch):
    """Before the interpreter ends, when no host's name would be found and an adapter would stay on the server."""
    closed = []
    trainer = SimpleNamespace(close_client=lambda: closed.append(True))
    monkeypatch.setattr(mt, "build_trainer", lambda *args: trainer)
    monkeypatch.setattr(mt, "run_preflight", lambda trainer: int(fails))
    with pytest.raises(SystemExit, match=str(int(fails))):
        mt.main(["--config", str(ROOT / "hf_recipes/tiny/calculator.yaml"), "--preflight"])
    assert closed == [True]


def change_model(folder: Path, model: str, name: str, text: str | None) -> str:
    """A copy of the model with one file of another content, or without it."""
    shutil.copytree(model, folder / "model")
    for path in (folder / "model").glob(name):
        path.unlink()
        if text is not None:
            path.write_text(text)
    return str(folder / "model")


@pytest.fixture
def made(tmp_path):
    """The configuration of a run with a server, with changes."""

    def make(**changes):
        served = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True, "vllm_mode": "server"}
        return mt.MTGRPOConfig(**{"output_dir": str(tmp_path), "per_device_train_batch_size": 8, **served, **changes})

    return make


CUTS = {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
CUTS_OF_SERVERS = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 2, "logit_bias": {"7": 1.0},
                   "bad_words": ["no"], "allowed_token_ids": [1, 2]}  # fmt: skip


@pytest.mark.parametrize("key", [*CUTS, *CUTS_OF_SERVERS])
def test_a_clip_around_the_sampled_logprobs_needs_all_tokens(key, made):
    changes = {key: CUTS[key]} if key in CUTS else {"generation_kwargs": {key: CUTS_OF_SERVERS[key]}}
    with pytest.raises(ValueError, match=rf"^old_logps: sampled: {key}=.* makes the sampled"):
        made(old_logps="sampled", **changes)
    assert text_of_cuts(made(old_logps="policy", **changes)) == f"{key}={(CUTS | CUTS_OF_SERVERS)[key]}"
    assert text_of_cuts(made(generation_kwargs={"min_tokens": 0, "top_p": 1.0, "logit_bias": {}})) == ""
    assert made(old_logps="sampled", top_p=1.0, generation_kwargs={"min_tokens": 0}).old_logps == "sampled"


STALE = {"max_staleness": 3}
# The logprobs that the loss clips around, or why the run is refused. A loss that clips no token takes the policy's.
OLD_LOGPS = [
    ({"max_staleness": 2}, None),
    (STALE, "sampled"),
    (STALE | {"vllm_importance_sampling_mode": "token_mask"}, "sampled"),
    (STALE | {"old_logps": "policy", "top_p": 0.9}, "policy"),
    (STALE | {"loss_type": "sapo"}, "policy"),
    (STALE | {"importance_sampling_level": "sequence"}, "policy"),
    (STALE | {"top_p": 0.9}, "top_p=0.9 makes the sampled .* Set old_logps: policy"),
    (STALE | {"vllm_importance_sampling_clip_max": 2.0}, "clip_max=2.0 has no effect then"),
    ({"old_logps": "sampled", "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 2.0},
     "sampled"),
    ({"old_logps": "sampled", "vllm_importance_sampling_correction": False}, "needs .*correction: true"),
    ({"old_logps": "sampled", "use_vllm": False}, "needs use_vllm: true"),
    # What cannot follow older weights.
    ({"max_staleness": 1, "vllm_importance_sampling_mode": "sequence_mask"}, "=1 needs importance ratios of tokens"),
    ({"max_staleness": 2, "vllm_importance_sampling_correction": False}, "=2 needs importance ratios"),
    ({"max_staleness": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 2}, "a multiple of gradient"),
    ({"max_staleness": 1, "refill_groups": 1}, "Set late_groups: admit"),
]  # fmt: skip


@pytest.mark.parametrize("changes, old_logps", OLD_LOGPS)
def test_what_the_loss_of_stale_rollouts_clips_around(changes, old_logps, made):
    if old_logps in (None, "policy", "sampled"):
        args = made(**changes)
        assert (args.old_logps, args.max_staleness) == (old_logps, changes.get("max_staleness", 0))
        return
    with pytest.raises(ValueError, match=old_logps):
        made(**changes)


@pytest.mark.parametrize("role", ["human", None])
def test_a_prompt_in_which_no_known_speaker_asks(role):
    rows = Dataset.from_list([{"prompt": [{"role": role, "content": "2 + 2?"}]}])
    with pytest.raises(ValueError, match=f"train_dataset, row 0: the prompt has the unknown role {role!r}"):
        check_dataset(rows, "train_dataset", None)


def test_a_best_metric_that_no_evaluation_has_ends_the_run():
    """As a `RunError`, after which the run saves itself."""
    trainer = SimpleNamespace(args=SimpleNamespace(metric_for_best_model="exact_match"))
    with pytest.raises(RunError, match="eval_exact_match is not one of eval_reward"):
        mt.ResumableTrainer._determine_best_metric(trainer, {"eval_reward": 1.0}, None)


def test_a_file_without_splits_is_told_of(tmp_path, caplog):
    (tmp_path / "data.jsonl").write_text(ROW)
    script_args = mt.MTGRPOScriptArguments(dataset_name=str(tmp_path / "data.jsonl"))
    load_splits(script_args, "no")
    assert not caplog.text
    load_splits(script_args, "steps")
    assert "has no splits: evaluations are of rows that are trained on" in caplog.text
