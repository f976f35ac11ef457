"""The scripts: evaluation of a random tiny model, and train.sh with stand-ins for the server and the trainer."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import evaluate as ev
import pytest
import train_plan
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import mt_grpo_trainer as mt

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """Path of a Qwen3 of two layers with random weights and a byte tokenizer."""
    import torch

    path = str(tmp_path_factory.mktemp("model"))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], additional_special_tokens=special
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id, dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def recipe(random_model, tmp_path_factory):
    """Path of a recipe for the random model; it trains beside a server with two processes."""
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "random.yaml"
    path.write_text(
        f"""
model_name_or_path: {random_model}
dataset_name: arithmetic
dataset_size: 16
tools_script: {ROOT}/tools/calculator.py
reward_fn: {ROOT}/rewards/calculator_reward.py
system_prompt: Use the calculator, then answer.
max_env_steps: 2
max_completion_length: 96
max_turn_tokens: 24
output_dir: {folder}/run
num_generations: 4
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
use_vllm: true
vllm_mode: server
use_cpu: true
bf16: false
gradient_checkpointing: false
report_to: none
"""
    )
    return str(path)


# --- evaluate.py -----------------------------------------------------------------------------------------------------


def test_a_random_model_is_evaluated(random_model, recipe):
    result = ev.evaluate(random_model, recipe, num_problems=6, k=2, progress=False)
    assert (result["num_problems"], result["k"]) == (6, 2)
    assert set(result["rewards"]["turn"]) == {"tool_execution_reward_func", "result_found_reward_func"}
    assert set(result["rewards"]["outcome"]) == {"exact_match_reward_func", "answer_given_reward_func"}
    assert result["exact_match"] == result["tool_executed"] == result["result_found"] == 0.0  # noise answers nothing
    assert result["mean_turns"] >= 1
    assert sum(result["stop_reasons"].values()) == pytest.approx(1)
    assert "exact match (pass@2)" in ev.table(result)
    json.dumps(result)


def test_a_seed_gives_the_same_rollouts_again(random_model, recipe):
    parsed = ev.load_recipe(recipe)
    _, args, model_args = parsed
    model = ev.load_model(random_model, args, model_args)
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    env = mt.build_env(parsed[0], args, mt.load_tools(parsed[0].tools_script), tokenizer)
    prompts = ["What is 2 + 2?", "What is 12 * 12 - 3?"] * 2

    def sample(seed, batch_size=4):
        backend = ev.in_process_backend(model, tokenizer, args, [])
        bar = ev.tqdm(disable=True)
        rollouts = ev.roll_out(backend, env, prompts, ev.sampling_params(args), seed, batch_size, bar)
        return [r.completion_ids for r in rollouts]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert [len(ids) <= args.max_completion_length for ids in sample(3, batch_size=3)] == [True] * 4


def scripted_client(monkeypatch, texts):
    """A server client that answers every conversation with the same turns."""
    client = mt.VLLMServerClient()
    client.__dict__["model_card"] = {"id": "scripted", "max_model_len": 900}

    async def generate(prompt_ids, max_tokens, sampling_params=None, index=0):
        assert "seed" not in sampling_params  # it ends the engine of vLLM 0.31 on a CPU
        turn = client.tokenizer.decode(prompt_ids).count("<result>")
        ids = client.tokenizer(texts[turn], add_special_tokens=False)["input_ids"]
        return mt.Generation(ids, [0.0] * len(ids), "stop")

    monkeypatch.setattr(client, "generate", generate)
    return client


def test_a_server_is_evaluated_and_good_turns_are_counted(monkeypatch, random_model, recipe):
    call = '<tool>{"name": "calculator", "args": {"expression": "99 - 55 * 7"}}</tool>'
    client = scripted_client(monkeypatch, [call, "<answer>-286</answer>"])
    client.tokenizer = AutoTokenizer.from_pretrained(random_model)
    parsed = ev.load_recipe(recipe, ["--max_completion_length", "200", "--max_turn_tokens", "100"])
    result = ev.evaluate(client, parsed, num_problems=1, split="train", k=3, tokenizer=client.tokenizer,
                         progress=False)  # fmt: skip
    assert (result["backend"], result["model"]) == ("vllm server", "scripted")
    assert (result["exact_match"], result["pass_at_k"]) == (1.0, 1.0)
    assert (result["tool_executed"], result["result_found"], result["mean_turns"]) == (1.0, 1.0, 2.0)
    assert result["stop_reasons"] == {"answered": 1.0}


def test_recipes_for_gpus_and_many_processes_are_read(tmp_path, recipe):
    text = Path(recipe).read_text().replace("use_cpu: true", "").replace("bf16: false", "bf16: true")
    (tmp_path / "gpu.yaml").write_text(text + "eval_strategy: steps\neval_steps: 10\n")
    _, args, _ = ev.load_recipe(str(tmp_path / "gpu.yaml"), ["--temperature", "0.5"])
    assert (args.num_generations, args.temperature) == (4, 0.5)


@pytest.mark.parametrize("arguments, message", [
    (["--config", "missing.yaml"], "cannot be read"),
    (["--config", "RECIPE", "--num_problems", "0"], "1 or more"),
    (["--config", "RECIPE", "--temprature", "1"], "temperature"),
    (["--config", "RECIPE", "--model", "/nowhere/at-all"], "/nowhere/at-all"),
])  # fmt: skip
def test_wrong_arguments_are_explained(arguments, message, recipe):
    with pytest.raises(SystemExit, match=message):
        ev.main([recipe if a == "RECIPE" else a for a in arguments])


# --- shell scripts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(script):
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)


def test_setup_refuses_unknown_options():
    done = subprocess.run(["bash", "scripts/setup.sh", "--tset"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "unknown option '--tset'" in done.stderr


def test_the_plan_of_a_server_recipe(recipe, monkeypatch):
    monkeypatch.delenv("NUM_PROCESSES", raising=False)
    plan = train_plan.make_plan(recipe, [])
    assert plan["starts_server"] and plan["num_processes"] == 2
    assert (plan["dtype"], plan["trainer_gpus"], plan["server_gpus"]) == ("float32", "", "")
    assert 96 < plan["max_model_len"] < 1024
    with train_plan.socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        plan = train_plan.make_plan(recipe, ["--vllm_server_port", str(port)])
        assert plan["wanted_port"] == port != plan["port"]


def test_a_run_outlives_its_output_and_a_tool_that_changes_the_folder(random_model, recipe, tmp_path):
    """As with `| head`: the reader of standard output leaves, then that of standard error."""
    tools = (ROOT / "tools/calculator.py").read_text() + "\nimport os\nos.chdir('/')\n"
    (tmp_path / "tools.py").write_text(tools)
    (tmp_path / "data.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    shutil.copytree(random_model, tmp_path / "model")
    flags = {
        "model_name_or_path": "model", "dataset_name": "data.jsonl", "tools_script": "tools.py", "output_dir": "out",
        "use_vllm": "false", "per_device_train_batch_size": "4", "max_steps": "12", "logging_steps": "1",
        "save_strategy": "no",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, mt.__file__, f"--config={recipe}", *(f"--{key}={value}" for key, value in flags.items())],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        first = process.stdout.read(100)
        process.stdout.close()
        said = []
        for line in process.stderr:
            said.append(line)
            if b"standard output cannot be written to any more" in line:
                break
        process.stderr.close()
        assert process.wait(timeout=300) == 0, b"".join(said)[-3000:]
    finally:
        process.kill()
        process.wait()
    assert b"loss" in first and b"training goes on" in said[-1]
    assert json.loads((tmp_path / "out/trainer_state.json").read_text())["global_step"] == 12
    assert {"model.safetensors", "rollouts.rank0.jsonl"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_a_server_elsewhere_or_none_is_not_started(recipe):
    assert not train_plan.make_plan(recipe, ["--vllm_server_host", "10.1.2.3"])["starts_server"]
    plan = train_plan.make_plan(recipe, ["--use_vllm", "false", "--per_device_train_batch_size", "4"])
    assert (plan["uses_server"], plan["num_processes"]) == (0, 1)


@pytest.mark.parametrize("arguments, message", [
    (["--max_stepz", "2"], "Did you mean 'max_steps'"),
    (["--per_device_train_batch_size", "3"], r"3 per device x 2 processes"),
    (["--max_completion_length", "4000"], "more than the model's context"),
    (["--tools_script", "tools/nothing.py"], "is not a file"),
    (["--turn_reward_weights", "1"], "expected 2"),
    (["--dataset_size", "1", "--per_device_train_batch_size", "4"], "has 1 prompts, but one batch .* needs 2 "),
    (["--vllm_request_timeout", "800"], "ddp_timeout=1800 s. Set ddp_timeout above it"),
])  # fmt: skip
def test_the_plan_refuses_what_cannot_train(recipe, arguments, message, monkeypatch):
    monkeypatch.delenv("NUM_PROCESSES", raising=False)
    with pytest.raises(ValueError, match=message):
        train_plan.make_plan(recipe, arguments)


def test_a_copy_of_the_trainer_takes_its_place(recipe, tmp_path):
    """Its own methods are known to the plan, and it is what is launched; the caller's folder counts."""
    copy = tmp_path / "my_idea.py"
    text = (ROOT / "mt_grpo_trainer.py").read_text()
    copy.write_text(text.replace('"credit_assignment": ("outcome",', '"credit_assignment": ("best_turn", "outcome",'))
    command = [sys.executable, ROOT / "scripts/train_plan.py", "--config", recipe, "--credit_assignment", "best_turn"]
    done = {
        name: subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        for name, environment in {"copy": {"TRAINER": str(copy)}, "original": {}}.items()
    }
    assert done["copy"].returncode == 0 and "starts_server=1" in done["copy"].stdout, done["copy"].stderr[-2000:]
    assert done["original"].returncode and "credit_assignment='best_turn'" in done["original"].stderr
    launch = Launch(tmp_path, recipe, TRAINER=os.path.relpath(copy, "/"), STAND_IN_TRAINER="0")
    assert launch.end()[0] == 0
    (launched,) = [line for line in launch.calls.read_text().splitlines() if line.startswith("accelerate")]
    assert f" {copy} --config {recipe}" in launched
    assert Launch(tmp_path, recipe, TRAINER="nowhere.py").end() == (
        2,
        "train: error: TRAINER='nowhere.py' is not a file\n",
    )


def test_a_server_needs_a_gpu_of_its_own():
    with pytest.raises(ValueError, match="colocate"):
        train_plan.share_gpus(["0"], starts_server=True)


STAND_IN = f"""#!{sys.executable}
import os, subprocess, sys, time
kind = "plan" if "train_plan" in sys.argv[1] else "health" if sys.argv[1] == "-c" else sys.argv[2].split(".")[0]
with open(os.environ["STAND_IN_LOG"], "a") as log:
    print(kind, *sys.argv[1:], file=log)
if kind == "health":
    sys.exit("up" not in os.listdir(os.environ["STAND_IN_OUT"]))
elif kind == "plan":
    print("starts_server=1 uses_server=1 output_dir=" + os.environ["STAND_IN_OUT"], "num_processes=2 trainer_gpus=''")
    print("server_gpus='' deepspeed=0 model=m revision=main trust_remote_code=0 wanted_port=1 port=2 max_model_len=99")
    print("dtype=float32 weight_sync=auto weight_sync_dir='' float32_for_ddp=0")
elif kind == "vllm":
    print("the server speaks", flush=True)
    if os.environ.get("STAND_IN_SERVER") == "dies":
        sys.exit("no memory left")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # an engine
    first = not os.path.exists(os.environ["STAND_IN_OUT"] + "/up")
    open(os.environ["STAND_IN_OUT"] + "/up", "w").close()
    time.sleep(1 if first and os.environ.get("STAND_IN_SERVER") == "dies once" else 600)
elif kind == "accelerate":
    if "STAND_IN_TRAINER" in os.environ:
        sys.exit(int(os.environ["STAND_IN_TRAINER"]))
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)  # a worker
    print("training", flush=True)
    time.sleep(600)
"""


class Launch:
    """scripts/train.sh with stand-ins that sleep for the plan, the server and the trainer."""

    def __init__(self, folder, recipe, **environment):
        stand_in = folder / "python"
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
        self.calls, self.mark = folder / "calls.log", f"mt-grpo-test-{folder}"
        environment = {"PYTHON": str(stand_in), "STAND_IN_LOG": str(self.calls), "STAND_IN_OUT": str(folder),
                       "STAND_IN_MARK": self.mark, **environment}  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", str(ROOT / "scripts/train.sh"), recipe, "--max_steps", "2"], cwd="/", text=True,
            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell that starts the tests in the background has them ignore SIGINT, and nohup SIGHUP, which bash then
            # cannot trap.
            preexec_fn=lambda: [signal.signal(s, signal.SIG_DFL) for s in (signal.SIGINT, signal.SIGHUP)],
        )  # fmt: skip

    def wait_for(self, text):
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"train.sh ended without saying {text!r}")

    def living(self):
        """Processes that this launch left: all inherit a mark in their environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    if "State:\tZ" not in (folder / "status").read_text():
                        found.append((folder / "cmdline").read_bytes())
            except OSError:
                continue
        return found

    def end(self):
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, output


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux")
@pytest.mark.parametrize("sent, status", [
    (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)
])  # fmt: skip
def test_a_signal_leaves_no_process(tmp_path, recipe, sent, status):
    launch = Launch(tmp_path, recipe)
    launch.wait_for("training\n")
    assert len(launch.living()) >= 5  # the script, server, engine, trainer, worker
    launch.process.send_signal(sent)
    assert launch.end()[0] == status
    deadline = time.monotonic() + 20
    while launch.living() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert launch.living() == []


@pytest.mark.parametrize("status", [0, 7])
def test_the_exit_code_is_the_trainers(tmp_path, recipe, status):
    launch = Launch(tmp_path, recipe, STAND_IN_TRAINER=str(status))
    code, output = launch.end()
    assert code == status, output
    assert launch.living() == []
    calls = [c for c in launch.calls.read_text().splitlines() if c.startswith(("plan", "vllm", "accelerate"))]
    assert [call.split()[0] for call in calls] == ["plan", "vllm", "accelerate"]
    assert "--logprobs-mode processed_logprobs" in calls[1] and "--port 2 " in calls[1]
    arguments, sync_dir = calls[-1].rsplit(" --weight_sync_dir ", 1)
    assert arguments.endswith("--max_steps 2 --vllm_server_port 2") and not Path(sync_dir).exists()
    assert (tmp_path / "vllm_server.log").read_text() == "the server speaks\n"


def test_a_server_that_dies_is_reported_with_its_log(tmp_path, recipe):
    launch = Launch(tmp_path, recipe, STAND_IN_SERVER="dies")
    code, output = launch.end()
    assert code == 1 and "no memory left" in output
    assert "accelerate" not in launch.calls.read_text() and launch.living() == []


def test_a_server_that_dies_during_training_is_started_again(tmp_path, recipe):
    """On the same port, with what it left behind gone; its log goes on."""
    launch = Launch(tmp_path, recipe, STAND_IN_SERVER="dies once")
    launch.wait_for("the vLLM server ended; starting it again (1 of 3)")
    deadline = time.monotonic() + 20
    while launch.calls.read_text().count("vllm -m") < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    ports = [
        line.split("--port ")[1].split()[0] for line in launch.calls.read_text().splitlines() if line[:4] == "vllm"
    ]
    assert len(ports) == 2 and ports[0] == ports[1]
    engines = [line for line in launch.living() if b"time.sleep(600)" in line]
    assert len(engines) == 2  # that of the second server, and the worker of the trainer
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end()[0] == 143 and launch.living() == []
    assert (tmp_path / "vllm_server.log").read_text() == "the server speaks\n" * 2


def test_two_launches_take_two_ports(tmp_path, recipe):
    """Both are told by their plans that port 2 is free."""
    launches = []
    for name in "ab":
        (tmp_path / name).mkdir()
        launches.append(Launch(tmp_path / name, recipe))
    for launch in launches:
        launch.wait_for("training\n")
    ports = [launch.calls.read_text().split("--port ")[1].split()[0] for launch in launches]
    for launch in launches:
        launch.process.send_signal(signal.SIGTERM)
        assert launch.end()[0] == 143
    assert len(set(ports)) == 2


@pytest.mark.parametrize("arguments, message", [
    ([], "no recipe"),
    (["hf_recipes/nothing.yaml"], "is not a file"),
    (["RECIPE", "--max_stepz", "2"], "Did you mean 'max_steps'"),
])  # fmt: skip
def test_bad_input_is_reported_before_a_server_starts(arguments, message, recipe):
    done = subprocess.run(
        ["bash", "scripts/train.sh", *(recipe if a == "RECIPE" else a for a in arguments)], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode != 0 and message in done.stderr
    assert "starting" not in done.stdout
    assert not (Path(recipe).parent / "run" / "vllm_server.log").exists()
