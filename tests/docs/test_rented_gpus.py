"""docs/rented_gpus.md: its memory is what the formulas give, and its commands run as far as they can without GPUs."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from test_docs import PAGES, block, block_commands, section
from test_recipes import header, num_processes
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3Config

from mt_grpo.run.checkpoints import bytes_to_save

ROOT = Path(__file__).resolve().parents[2]
PAGE = PAGES["docs/rented_gpus.md"]
WORDS = " ".join(PAGE.split())
GIB = 2**30


def qwen3(hidden_size, intermediate_size, num_attention_heads=16, num_hidden_layers=28):
    return Qwen3Config(
        vocab_size=151936, hidden_size=hidden_size, intermediate_size=intermediate_size, head_dim=128,
        num_hidden_layers=num_hidden_layers, num_attention_heads=num_attention_heads, num_key_value_heads=8,
        tie_word_embeddings=True,
    )  # fmt: skip


CONFIGS = {  # as in the models' config.json
    "Qwen3-0.6B": AutoConfig.from_pretrained(ROOT / "scripts/bench/Qwen3-0.6B"), "Qwen3-1.7B": qwen3(2048, 6144),
    "Qwen3-4B": qwen3(2560, 9728, num_attention_heads=32, num_hidden_layers=36),
    "Qwen2.5-7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, head_dim=128, tie_word_embeddings=False,
    ),
}  # fmt: skip


def num_parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(CONFIGS[name]).parameters())


def recipe_rows() -> str:
    rows = []
    for name in ("Qwen3-0.6B--mt-grpo", "Qwen3-1.7B--gsm8k", "Qwen3-1.7B--mt-grpo", "Qwen3-1.7B--single-gpu",
                 "Qwen3-4B--mt-grpo", "Qwen2.5-7B--paper"):  # fmt: skip
        path = ROOT / f"hf_recipes/Qwen/{name}.yaml"
        recipe, training = yaml.safe_load(path.read_text()), num_processes(path)
        model = recipe["model_name_or_path"].split("/")[1]
        number, kept = num_parameters(model), recipe["beta"] > 0
        split = (18 if kept else 16) * number / training / GIB
        logits = 4 * recipe["per_device_train_batch_size"] * recipe["max_completion_length"]
        card = re.search(r"of (\d+) GB", header(path))[1]
        server = "1" if recipe["vllm_mode"] == "server" else "the same one"
        rows.append(
            f"| `{name}` | {training} + {server} | {f'{split:.1f}' if training > 1 else '-'} | "
            f"{(20 if kept else 16) * number / GIB:.1f} | {logits * CONFIGS[model].vocab_size / GIB:.1f} | {card} |"
        )
    return "\n".join(rows) + "\n"


def model_rows() -> str:
    rows = []
    for name, config in CONFIGS.items():
        number = num_parameters(name)
        tokens = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        rows.append(f"| {name} | {number / 1e9:.2f} billion | {2 * number / GIB:.1f} | {tokens / 1024:.0f} |")
    return "\n".join(rows) + "\n"


def test_the_tables_are_what_the_formulas_give():
    assert recipe_rows() in PAGE
    assert model_rows() in PAGE


def test_the_examples_are_what_the_formulas_give():
    number, config = num_parameters("Qwen3-4B"), CONFIGS["Qwen3-4B"]
    room = 0.92 * 40e9 - 2 * number
    tokens = room / (4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim)
    assert f"= {room / 1e9:.0f} GB for keys and values, which are {round(tokens, -3):,.0f} tokens" in WORDS
    assert f"or {tokens // 4096:.0f} conversations of 4,096 tokens" in WORDS
    total = (3 * 16 + 2) * num_parameters("Qwen3-1.7B") / 1e9
    assert f"3 x 16 P + 2 P = {total:.0f} GB" in WORDS


def test_the_server_takes_the_share_that_the_page_says():
    config = pytest.importorskip("vllm.config.cache").CacheConfig
    (field,) = [field for field in dataclasses.fields(config) if field.name == "gpu_memory_utilization"]
    assert f"takes {field.default.default:.0%} of its GPU" in WORDS


@pytest.mark.parametrize("dtype, sharded, of_model, of_checkpoint", [(torch.bfloat16, True, 2, 16),
                                                                     (torch.float32, False, 4, 12)])  # fmt: skip
def test_a_checkpoint_has_the_bytes_of_the_table(dtype, sharded, of_model, of_checkpoint):
    with torch.device("meta"):
        model = torch.nn.Linear(100, 10, bias=False, dtype=dtype)
    optim = type("Optim", (), {"value": "adamw_torch"})
    assert bytes_to_save(model, optim, sharded) == (1000 * of_model, 1000 * of_checkpoint)
    rows = {
        line.split("|")[1].strip(): line.split("|")[3] for line in section(PAGE, "Disks").splitlines() if "|" in line
    }
    whole = next(name for name in rows if name.startswith("a checkpoint, " + ("split" if sharded else "whole")))
    assert rows[whole].split() == [str(of_checkpoint), "P"]
    assert f"{of_model} P" in rows["the trained model"]


@pytest.fixture
def clone(tmp_path):
    """A folder in which `scripts/train.sh` prints its arguments, and waits for a signal where it is asked to."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.sh").write_text(
        'trap "echo saved; exit 143" TERM\necho "train.sh $* $STOP_TIMEOUT"\n'
        'if [ -n "${WAIT:-}" ]; then while :; do sleep 0.1; done; fi\n'
    )
    return tmp_path


def test_the_batch_job_starts_and_resumes(clone):
    """As Slurm starts it, with a stand-in for the training."""
    (clone / "train.slurm").write_text(block(PAGE, "sh", "#SBATCH"))

    submitted = ["bash", str(clone / "train.slurm")]
    recipe, output = "hf_recipes/Qwen/Qwen3-1.7B--gsm8k.yaml", "runs/Qwen3-1.7B--gsm8k"
    assert (ROOT / recipe).is_file()

    def printed(**environment):
        command = {"cwd": "/", "env": {**os.environ, "SLURM_SUBMIT_DIR": str(clone), **environment}}
        return subprocess.run(submitted, capture_output=True, text=True, check=True, **command).stdout

    assert printed() == f"train.sh {recipe} --output_dir {output} 500\n"
    (clone / output / "checkpoint-100").mkdir(parents=True)
    assert "--resume" not in printed()  # a checkpoint that is not whole
    (clone / output / "checkpoint-100/trainer_state.json").touch()
    assert printed() == f"train.sh {recipe} --output_dir {output} --resume_from_checkpoint last 500\n"

    environment = {**os.environ, "SLURM_SUBMIT_DIR": str(clone), "WAIT": "1"}
    running = subprocess.Popen(submitted, cwd="/", stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert running.stdout.readline().startswith("train.sh")
        running.send_signal(signal.SIGTERM)  # to the script alone, as `B:` says
        assert running.stdout.read() == "saved\n" and running.wait(10) == 143
    finally:
        running.kill()


def test_a_run_in_the_background_is_stopped_by_its_number(clone):
    """The block that starts it and the line that stops it, with a stand-in for the training."""
    start = block(PAGE, "bash", "nohup")
    stop = next(line for line in block(PAGE, "bash", "kill -TERM").splitlines() if line.startswith("kill"))
    environment = {**os.environ, "WAIT": "1"}
    subprocess.run(["bash", "-c", start], cwd=clone, env=environment, check=True, timeout=20)
    try:
        log = clone / "runs/train.log"
        wait_for(lambda: log.is_file() and "train.sh" in log.read_text())
        subprocess.run(["bash", "-c", stop], cwd=clone, check=True, timeout=20)
        wait_for(lambda: "saved" in log.read_text())
    finally:
        subprocess.run(["bash", "-c", 'kill -KILL "$(cat runs/train.pid)" 2>/dev/null || true'], cwd=clone)


def wait_for(condition, seconds: float = 20.0) -> None:
    """Until a condition holds, or an AssertionError."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_tmux_takes_its_arguments(tmp_path):
    (command,) = [words for words in block_commands(PAGE) if words[0] == "tmux"]
    socket = ["tmux", "-S", str(tmp_path / "socket")]
    try:  # detached: a test has no terminal
        subprocess.run([*socket, *command[1:], "-d", "sleep 60"], check=True, timeout=20)
        names = subprocess.run([*socket, "ls", "-F", "#{session_name}"], capture_output=True, text=True).stdout
        assert names == f"{command[-1]}\n"
    finally:
        subprocess.run([*socket, "kill-server"], capture_output=True)
