"""LoRA pushed as an adapter, against a real vLLM server on the CPU: what it samples from, and what is refused."""

import asyncio
import os
import re
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import requests
import torch
from peft import LoraConfig, get_peft_model
from processes import on_two_ranks
from project import ROOT, steps_of
from server_run import FLAGS, MODEL as TINY, make_trainer as make_any_trainer
from test_images_by_server import logprobs_of
from transformers import AutoModelForCausalLM
from warm_vllm import WarmVLLMServer

from mt_grpo.base.errors import ServerError
from mt_grpo.generation.vllm_engine import VLLM
from mt_grpo.generation.weights import why_config_merges, why_model_merges
from mt_grpo.reports.rollout_log import read_rollouts
from mt_grpo_trainer import VLLMServerClient

pytest.importorskip("vllm")
LORA = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True}


@contextmanager
def serving(*flags):
    """A server that takes adapters while it runs."""
    flags = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", *flags)
    with ExitStack() as stack:
        with mock.patch.dict(os.environ, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1"):  # read as it starts
            server = stack.enter_context(WarmVLLMServer(TINY, *FLAGS, *flags))
        yield server


@pytest.fixture(scope="module")
def server_with_adapters():
    with serving() as server:
        yield server


@pytest.fixture
def adapters(server_with_adapters):
    """It has its own weights, and no adapter; so it is again behind the test."""
    yield server_with_adapters
    for client in (CLIENTS.pop() for _ in list(CLIENTS)):
        client.close()


CLIENTS = []  # of this test's trainers


def make_trainer(*args, **changes):
    """As server_run.py's. What its servers got is gone behind the test."""
    trainer = make_any_trainer(*args, **changes)
    CLIENTS.append(trainer.client)
    return trainer


def versions(server, trainer):
    """The versions of a trainer's adapters that a server has."""
    cards = requests.get(f"{server.url}/v1/models", timeout=10).json()["data"]
    names = [card["id"].rpartition("-") for card in cards]
    return [int(number.partition("+")[0]) for instance, _, number in names if instance == trainer.client.instance]


def put(server, factor, version):
    """Give a server the bundled weights times `factor`, under this version."""
    state = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).state_dict()
    client = VLLMServerClient("127.0.0.1", server.port)
    client.update_weights(iter({name: tensor * factor for name, tensor in state.items()}.items()), version)
    client.close()


def folders(client):
    """The versions whose files a client keeps."""
    return sorted(int(path.name.rpartition("-")[2]) for path in client.transfer._folder.iterdir() if path.is_dir())


def merged(trainer):
    """A model of its own with the policy's weights of now. (A copy would go on calling the policy's own `forward`.)"""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.load_state_dict({name: tensor.clone() for name, tensor in trainer.vllm_generation.named_weights()})
    return model.eval()


def change_adapter(trainer):
    """As a step does: `lora_B` begins at 0, where an adapter changes nothing."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter += 0.02


@pytest.mark.contract_server("LoRA adapter")
def test_a_run_pushes_its_adapter_and_samples_from_it(adapters, tmp_path, caplog):
    """Each step's samples are the policy's to 1e-4, merged or not; the server's own weights stay what they were."""
    ids = [(7 * i * i) % 300 + 20 for i in range(60)]
    ask = VLLMServerClient("127.0.0.1", adapters.port)
    before = ask.score(ids)
    trainer = make_trainer(adapters.port, tmp_path, max_steps=4, peft_config=LoraConfig(**LORA),
                           learning_rate=2e-2, log_rollouts=16, log_rollout_tokens=True)  # fmt: skip
    trainer.train()
    assert "LoRA of rank 4" in caplog.text
    rows = [row for row in trainer.state.log_history if "sync/seconds" in row]
    assert len(rows) == 4 and all(row["sync/logprob_difference"] < 1e-4 for row in rows)
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    instance, version = trainer.client.instance, trainer._weight_counter.version
    # The last push was before the last step. Of the adapters the newest two are left.
    assert versions(adapters, trainer) == [version - 3, version - 2]
    assert trainer.client.servers[0].adapter == f"{instance}-{version - 2}"
    logged = [row for row in read_rollouts(tmp_path) if row["mode"] == "train"]
    found = {tuple(turn["policy_versions"]) for row in logged for turn in row["turns"]}
    assert found == {(k, k) for k in (1, 2, 3, 4)}
    trainer.weight_sync.sync(f"{instance}-{version}", lambda: None, lambda: None)
    policy = merged(trainer)
    (client,) = trainer.client.servers
    sampled, logprobs = client.sample_behind(ids, 200)
    assert client.loaded == f"{instance}-{version}" and len(sampled) == 200
    assert logprobs == pytest.approx(logprobs_of(policy, ids + sampled)[-200:], abs=1e-4)
    assert (logprobs_of(policy, ids) - torch.tensor(before)).abs().mean() > 0.01  # it learned something
    assert ask.score(ids) == before
    size = sum(t.nbytes for t in trainer.model.state_dict().values())
    assert size > 10 * sum(p.nbytes for n, p in trainer.model.named_parameters() if "lora" in n)


def test_turns_in_flight_end_with_the_adapter_that_they_began_with(adapters, tmp_path):
    """Three pushes pass one by while the engine is paused. What it names stays, and its files are read again."""
    trainer = make_trainer(adapters.port, tmp_path, peft_config=LoraConfig(**LORA), learning_rate=2e-2,
                           vllm_server_timeout=20, check_every=10)  # fmt: skip
    (client,), sync = trainer.client.servers, trainer.weight_sync
    prompt = trainer.processing_class("What is 12 * 34?").input_ids

    def push(number):
        change_adapter(trainer)
        trainer._weight_counter.version = number
        sync.sync(f"{trainer.client.instance}-{number}", lambda: None, lambda: None)

    def wait_until_it_samples():
        metric = r"^vllm:num_requests_running\{.*\} 1\.0$"
        while not re.search(metric, requests.get(f"{adapters.url}/metrics", timeout=10).text, re.M):
            time.sleep(0.01)

    push(1)
    first = merged(trainer)

    async def turn():
        request = asyncio.ensure_future(client.generate(prompt, 600, {"stop": [], "ignore_eos": True}))
        await asyncio.to_thread(wait_until_it_samples)
        await asyncio.to_thread(client.request, "POST", "/pause", params={"mode": "keep"})
        for number in (2, 3, 4):
            await asyncio.to_thread(push, number)
        assert not request.done() and versions(adapters, trainer) == folders(client) == [1, 3, 4]
        await asyncio.to_thread(client.request, "POST", "/resume")
        return await request

    generation = asyncio.run(turn())
    assert generation.policy_versions == (1, 1) and len(generation.token_ids) == 600
    expected = logprobs_of(first, prompt + generation.token_ids)[len(prompt) - 1 :]
    assert generation.logprobs == pytest.approx(expected, abs=1e-3)
    push(5)
    assert versions(adapters, trainer) == folders(client) == [4, 5]
    trainer.client.close()
    assert versions(adapters, trainer) == [] and client.weight_version() == "default"
    assert client.adapter is None


def test_two_ranks_push_one_adapter(adapters, tmp_path):
    """Rank 0 sends it, and both sample from it: turns of the second rank are the policy's, too."""

    def served():
        return {card["id"] for card in requests.get(f"{adapters.url}/v1/models", timeout=60).json()["data"]}

    before = served()
    words = [
        "--config", "hf_recipes/tiny/calculator-vllm.yaml", "--vllm_server_port", adapters.port, "--max_steps", 3,
        "--use_peft", "true", "--lora_r", 4, "--lora_alpha", 32, "--lora_target_modules", "all-linear",
        "--lora_dropout", 0.0, "--learning_rate", 2e-2, "--lr_scheduler_type", "constant",
        "--output_dir", tmp_path / "out", "--log_rollouts", 1000, "--log_rollout_tokens", "true",
        "--save_strategy", "steps", "--save_steps", 3, "--disable_tqdm", "true",
    ]  # fmt: skip
    code, said = on_two_ranks(ROOT / "tests/sharded_worker.py", "train", *words)  # each push is checked
    assert code == 0 and said.count("LoRA of rank 4") == 1, said[-3000:]
    rows = steps_of(tmp_path / "out/checkpoint-3")
    assert len(rows) == 3 and all(row["sync/logprob_difference"] < 1e-4 for row in rows)
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in rows)
    turns = [turn for row in read_rollouts(tmp_path / "out") if row["mode"] == "train" for turn in row["turns"]]
    assert (tmp_path / "out/rollouts.rank1.jsonl").stat().st_size > 0
    assert {tuple(turn["policy_versions"]) for turn in turns} == {(1, 1), (2, 2), (3, 3)}
    assert served() == before  # the run took its adapters with it


@pytest.mark.slow
def test_adapters_in_bf16(tmp_path, caplog):
    """The base is bf16 on both sides, the adapter float32 here and bf16 on the server."""
    with serving("--dtype", "bfloat16") as server:
        trainer = make_trainer(server.port, tmp_path, max_steps=4, peft_config=LoraConfig(**LORA),
                               learning_rate=1e-2, model_init_kwargs={"dtype": "bfloat16"}, bf16=True)  # fmt: skip
        trainer.train()
        assert "LoRA of rank 4" in caplog.text
        rows = [row for row in trainer.state.log_history if "sync/seconds" in row]
        assert len(rows) == 4 and all(row["sync/logprob_difference"] < 0.1 for row in rows)
        assert all(row["sampling/sampling_logp_difference/mean"] < 0.05 for row in rows)
        trainer.client.close()


@pytest.mark.parametrize("changes, reason", [
    ({"use_dora": True}, "its configuration has use_dora=True"),
    ({"modules_to_save": ["norm"]}, "its configuration has modules_to_save="),
    ({"r": 16}, "has no room for 2 adapters of rank 16: start it with --enable-lora --max-loras 2 --max-lora-rank 16"),
])  # fmt: skip
def test_what_is_no_adapter_for_the_server_is_merged(adapters, tmp_path, caplog, changes, reason):
    """And the log says why. The samples are right either way."""
    config = LoraConfig(**{**LORA, **changes})
    trainer = make_trainer(adapters.port, tmp_path, max_steps=1, peft_config=config)
    trainer.train()
    assert f"merged weights, since {reason}" in caplog.text.replace(f"{adapters.url} ", "")
    (row,) = [row for row in trainer.state.log_history if "sync/seconds" in row]
    assert row["sync/logprob_difference"] < 1e-4 and versions(adapters, trainer) == []
    put(adapters, 1.0, "default")


def test_an_adapter_on_other_weights_is_merged_or_refused(adapters, tmp_path, caplog):
    """Its server holds another run's weights, by the version or, where that says nothing, by the logprobs."""
    put(adapters, 1.1, "of-another-7")
    trainer = make_trainer(adapters.port, tmp_path / "a", max_steps=1, peft_config=LoraConfig(**LORA))
    trainer.train()
    assert "holds the weights 'of-another-7' of another run" in caplog.text
    (row,) = [row for row in trainer.state.log_history if "sync/seconds" in row]
    assert row["sync/logprob_difference"] < 1e-4
    put(adapters, 1.1, "default")
    with pytest.raises(ServerError, match="A changed weight did not arrive"):
        make_trainer(adapters.port, tmp_path / "b", max_steps=1, peft_config=LoraConfig(**LORA)).train()
    put(adapters, 1.0, "default")


def test_where_a_reward_asks_the_policy_an_adapter_is_merged(adapters, tmp_path, caplog):
    """A server scores without adapters: what it says is the policy's only with merged weights."""

    def asks(rollout_turns, policy, **kwargs):
        return [0.0] * len(rollout_turns)

    trainer = make_trainer(adapters.port, tmp_path, peft_config=LoraConfig(**LORA), reward=asks)
    change_adapter(trainer)
    ids = [(7 * i * i) % 300 + 20 for i in range(60)]
    try:
        trainer._sync_weights()
        assert "since a reward function asks the policy, and a server scores without adapters" in caplog.text
        assert versions(adapters, trainer) == []
        assert trainer.client.servers[0].score(ids) == pytest.approx(logprobs_of(merged(trainer), ids), abs=1e-4)
    finally:
        put(adapters, 1.0, "default")


@pytest.mark.parametrize("version, fits", [("0.31.0", True), ("0.32.0+cpu", True), ("0.30.2", False),
                                           ("dev", False)])  # fmt: skip
def test_an_older_engine_gets_merged_weights(version, fits):
    """Before 0.31 a load could move the adapters of requests in flight."""
    server, engine = SimpleNamespace(base_url="http://a", weight_version=lambda: "default"), VLLM()
    server.server_info = lambda: {"lora_config": {"max_lora_rank": 16, "max_loras": 2}}
    engine.version = lambda _: version
    reason = engine.why_merges(server, 8, 2)
    assert (reason is None) == fits and (fits or f"runs vLLM {version}, and" in reason)
    if fits:
        assert "has no room for 3 adapters of rank 8" in engine.why_merges(server, 8, 3)


@pytest.mark.parametrize("config, reason", [
    (LoraConfig(r=8), None),
    (LoraConfig(init_lora_weights="pissa"), "init_lora_weights='pissa' changes the model's own weights"),
    (LoraConfig(target_parameters={"up", "down"}), "its configuration has target_parameters=['down', 'up']"),
    (LoraConfig(r=1024), "its rank is 1024, and vLLM accepts at most 512"),
])  # fmt: skip
def test_which_configurations_are_merged(config, reason):
    assert why_config_merges(config) == reason


def test_further_trained_parameters_and_a_second_adapter_are_seen(random_model):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(random_model), LoraConfig(**LORA))
    assert why_model_merges(model, False) is None
    assert why_model_merges(model, True) == "the model is sharded, or managed by DeepSpeed"
    name, norm = next((n, p) for n, p in model.named_parameters() if "norm" in n)
    norm.requires_grad_(True)
    assert why_model_merges(model, False) == f"{name} is trained in addition to it"
    norm.requires_grad_(False)
    model.add_adapter("other", LoraConfig(**LORA))
    assert why_model_merges(model, False) == "it has the adapters default, other"
