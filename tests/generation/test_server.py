"""Against a real vLLM server on the CPU: what it samples, what weights it holds, and what a wrong one is told."""

import asyncio
import functools
import json
import re
import shutil

import evaluate
import pytest
import requests
import torch
from bench.common import VLLMServer
from fault_proxy import Fault, FaultProxy
from peft import LoraConfig
from processes import on_two_ranks
from project import ROOT, steps_of, trained
from server_run import FLAGS, MODEL, calculator, make_trainer
from test_first_batch import recipe_file
from test_rewards import load
from test_sharded import FSDP2, WORKER, launch
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_vllm import WarmVLLMServer

from mt_grpo.base.errors import ServerError
from mt_grpo.base.event_loop import run_async
from mt_grpo.generation import weight_transfer
from mt_grpo.recipe.checks import check_server
from mt_grpo.rollout import StopReason, ToolCall, ToolResult, Turn
from mt_grpo.training.policy_scores import scores_of_model, scores_of_servers
from mt_grpo_trainer import MTGRPOConfig, MultiTurnToolEnv, VLLMServerClient, main

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    """A copy of the bundled model whose generation_config asks for greedy decoding, to show that we override it."""
    path = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(MODEL, path)
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**config, "top_k": 1}))
    return path


@pytest.fixture(scope="module")
def port(served_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with VLLMServer(served_model, *FLAGS, "--trust-request-chat-template", log=log) as server:
        yield server.port


@pytest.fixture
def client(port, served_model):
    """A client; afterwards the server holds the bundled weights again."""
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    client = VLLMServerClient("127.0.0.1", port, tokenizer)
    yield client
    model = AutoModelForCausalLM.from_pretrained(served_model, dtype=torch.float32)
    client.update_weights(iter(model.state_dict().items()), "bundled")
    client.close()


@pytest.mark.contract_server("information gain")
def test_information_gain_by_a_server_is_that_of_transformers(client, served_model):
    """Within 1e-5, of conversations with two searches each."""
    model = AutoModelForCausalLM.from_pretrained(served_model, dtype=torch.float32)
    env = MultiTurnToolEnv([lookup], "Search.", tokenizer=client.tokenizer)
    written, turns, contexts = env.format_of(client.tokenizer), [], []
    for question, found in (("6 * 7", "42 is what it gives."), ("3 + 8", "Nothing is known.")):
        read = env.prompt_ids([{"role": "user", "content": question}], client.tokenizer)
        turns.append([])
        contexts.append([])
        for text in (found, f"{found} And {question}."):
            turn = Turn(client.tokenizer("Let me see.")["input_ids"], None, "", "stop", [ToolCall("lookup", {})],
                        [ToolResult(text)])  # fmt: skip
            turn.results, turn.messages, turn.observation_ids = written.fit(turn, [], 200, 100)
            turns[-1].append(turn)
            contexts[-1].append(read + turn.token_ids)
            read = contexts[-1][-1] + turn.observation_ids
    given = {"turn_contexts": contexts, "answer": [["42", "forty two"], ["11"]]}
    gain = load("information_gain").information_gain_reward_func
    by_server = gain(turns, policy=scores_of_servers(client, written), **given)
    expected = gain(turns, policy=scores_of_model(model, written, torch.no_grad), **given)
    assert by_server == [pytest.approx(row, abs=1e-5) for row in expected]
    assert max(abs(value) for row in expected for value in row if value is not None) > 0.01


def lookup() -> str:
    """Look it up."""
    return ""


@pytest.mark.contract_server("vLLM server")
def test_logprobs_agree_at_every_step(port, client, served_model, tmp_path, monkeypatch):
    """Four optimizer steps in float32: the server samples from the weights that are trained, tied head included.

    They come in several files, as those of a large model.
    """
    in_shards = functools.partial(weight_transfer.write_weights, shard_bytes=2**18)
    monkeypatch.setattr(weight_transfer, "write_weights", in_shards)
    trainer = make_trainer(port, tmp_path, model=served_model, max_steps=4)
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    rows = [row for row in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in row]
    assert len(rows) == 4
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 1e-4
    assert max(row["sync/logprob_difference"] for row in rows) < 1e-4
    assert (trainer.model.lm_head.weight - before).abs().max() > 1e-3  # the weights did change
    assert max(row["sampling/frac_tokens_ratio_zero_or_clipped"] for row in rows) == 0


def test_a_log_is_trained_again_and_another_checkpoint_is_refused(port, client, served_model, tmp_path, capsys):
    """The same steps without the server, which then holds what the first run has trained."""
    recipe = str(ROOT / "hf_recipes/tiny/calculator-vllm.yaml")
    words = f"--model_name_or_path {served_model} --max_steps 2 --per_device_train_batch_size 16 --log_rollouts 16"
    words = [*words.split(), "--log_rollout_tokens", "true", "--vllm_server_port"]
    first = trained(recipe, tmp_path / "first", *words, port)
    again = trained(recipe, tmp_path / "again", *words, "9", "--train_from_rollouts", tmp_path / "first")
    for name in ("loss", "grad_norm", "reward", "sampling/importance_sampling_ratio/mean"):
        assert [row[name] for row in again] == pytest.approx([row[name] for row in first], rel=1e-5, abs=1e-7), name
    asked = ["--config", recipe, "--server", client.base_url, "--model", str(served_model), "--num_problems", "4"]
    with pytest.raises(SystemExit, match="holds other weights than .*: the mean difference of logprobs is"):
        evaluate.main(asked)
    model = AutoModelForCausalLM.from_pretrained(served_model, dtype=torch.float32)
    client.update_weights(iter(model.state_dict().items()), "bundled")
    evaluate.main(asked)
    assert f"weights   those of {served_model} (mean difference of logprobs" in capsys.readouterr().out


@pytest.mark.contract_server("proof of weights")
def test_without_the_tied_head_the_proof_refuses(port, client, served_model, tmp_path, monkeypatch):
    """The trap that the proof exists for: without `lm_head.weight` in the push the server keeps its old head."""
    trainer = make_trainer(port, tmp_path, model=served_model, max_steps=3, learning_rate=1e-2)
    trainer.vllm_generation._tied = {}
    monkeypatch.setattr(weight_transfer, "check_whole", lambda *_: None)  # which finds it before
    with pytest.raises(ServerError, match="^Step 0: A changed weight did not arrive"):
        trainer.train()


@pytest.mark.contract_server("VLLMServerClient.update_weights", "LoRA merged")
def test_lora_with_b_not_zero_arrives(port, client, served_model, tmp_path):
    trainer = make_trainer(port, tmp_path, model=served_model, max_steps=3,
                           peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))  # fmt: skip
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    trainer.train()
    rows = [row for row in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in row]
    assert len(rows) == 3 and max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 1e-4
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before)


@pytest.mark.parametrize("fault", ["iterator", "missing name"])
def test_a_push_that_fails_changes_nothing(client, served_model, fault):
    ids = client.tokenizer("What is 3 * 4? It is 12.")["input_ids"]
    before = client.score(ids)
    model = AutoModelForCausalLM.from_pretrained(served_model, dtype=torch.float32)
    closed = []

    def weights():
        try:
            for i, (name, tensor) in enumerate(model.state_dict().items()):
                if fault == "iterator" and i == 5:
                    raise RuntimeError("gathering failed")
                yield name, tensor * 1.1
        finally:
            closed.append(True)

    expected = {**dict.fromkeys(model.state_dict(), 1), "one.more": 1} if fault == "missing name" else None
    with pytest.raises((ServerError, RuntimeError)):
        client.update_weights(weights(), "v-failed", expected)
    assert closed
    assert client.score(ids) == pytest.approx(before, abs=1e-6)
    assert client.weight_version() != "v-failed"
    assert not requests.get(f"{client.base_url}/is_paused").json()["is_paused"]


def test_unset_sampling_fields_do_not_take_the_models_own(client):
    """The served generation_config says top_k: 1; a neutral request must sample all the same."""
    prompt = client.tokenizer("<|im_start|>user\nWhat is 31 * 27?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]

    async def many(params):
        return await asyncio.gather(*(client.generate(prompt, 24, params) for _ in range(12)))

    sampled = run_async(many({"temperature": 1.5}))
    assert len({tuple(g.token_ids) for g in sampled}) > 3
    greedy = run_async(many({"temperature": 0.0}))
    assert len({tuple(g.token_ids) for g in greedy}) == 1
    for generation in sampled:
        assert len(generation.logprobs) == len(generation.token_ids) <= 24


@pytest.mark.contract_server("VLLMServerClient.generate", "vLLM server")
def test_records_are_what_the_server_saw_and_sampled(client):
    """For every rollout: each request's prompt is the history as sampled, and the ids are the server's own."""
    calls = []
    original = client._post

    async def recorded(path, payload, read):
        return await original(path, payload, lambda answer: calls.append((payload["prompt"], answer)) or read(answer))

    client._post = recorded
    env = MultiTurnToolEnv([calculator], "Use the calculator, then answer.", max_completion_length=120,
                           max_turn_tokens=48, max_model_len=640)  # fmt: skip
    result = env.generate([f"What is {a} * 37?" for a in range(20, 52)], client, {"temperature": 1.0})
    assert len(result["ids"]) == 32 and max(len(r.turns) for r in result["rollouts"]) >= 2
    by_prompt = {}
    for prompt, answer in calls:
        choice = answer["choices"][0]
        assert choice["prompt_token_ids"] == prompt
        by_prompt.setdefault(tuple(prompt), []).append(choice)
    for i, rollout in enumerate(result["rollouts"]):
        whole = rollout.prompt_ids + rollout.completion_ids
        position = len(rollout.prompt_ids)
        for turn in rollout.turns:
            choices = by_prompt[tuple(whole[:position])]
            match = [c for c in choices if c["token_ids"][: len(turn.token_ids)] == turn.token_ids]
            assert match, "a turn that the server did not sample"
            assert any(c["logprobs"]["token_logprobs"][: len(turn.token_ids)] == turn.logprobs for c in match)
            position += len(turn.token_ids) + len(turn.observation_ids)
        assert position == len(whole) and sum(result["mask"][i]) == sum(len(t.token_ids) for t in rollout.turns)
        assert rollout.stop_reason in set(StopReason)


@pytest.fixture
def setting(served_model):
    """What `check_server` needs beside the client."""
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    model = AutoModelForCausalLM.from_pretrained(served_model)
    env = MultiTurnToolEnv([calculator], "Use the calculator, then answer.", tokenizer=tokenizer)
    args = MTGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, use_vllm=True, vllm_mode="server",
                        report_to="none", max_completion_length=120)  # fmt: skip
    return env, model.config, args


def test_which_servers_fit(client, setting, random_model):
    env, config, _ = setting
    check_server(client, *setting)
    assert env.max_model_len == 640 and client.vocab_size == config.vocab_size  # ids beyond it are no answer
    env.tokenizer = AutoTokenizer.from_pretrained(random_model)
    with pytest.raises(ServerError, match="tokenise"):
        check_server(client, *setting)


def test_raw_logprobs_are_refused(client, setting, monkeypatch):
    raw = client.server_info()
    raw["model_config"]["logprobs_mode"] = "raw_logprobs"
    monkeypatch.setattr(client, "server_info", lambda: raw)
    with pytest.raises(ServerError, match="logprobs-mode raw_logprobs"):
        check_server(client, *setting)


@pytest.mark.contract_server("vLLM server")
def test_two_ranks_on_one_server(port, client, served_model, tmp_path):
    """Each rank sends its own prompts; neither sends one between the start and the end of rank 0's push."""
    with FaultProxy(f"http://127.0.0.1:{port}") as proxy:
        # A rank that does not wait for the push has sent its prompts by the time that the server is paused.
        proxy.faults = lambda request: Fault("late", delay=2.0) if request.path == "/pause" else None
        code, said = on_two_ranks(
            "mt_grpo_trainer.py", "--config", "hf_recipes/tiny/calculator-vllm.yaml", "--model_name_or_path",
            served_model, "--output_dir", tmp_path, "--max_steps", 2, "--vllm_server_port", proxy.port,
            "--per_device_train_batch_size", 8,
        )  # fmt: skip
        assert code == 0, said[-3000:]
        seen = [r for r in proxy.requests if r.path in ("/pause", "/resume", "/v1/completions")]
    pushing, sampled = False, []
    for request in seen:
        pushing = {"/pause": True, "/resume": False}.get(request.path, pushing)
        if request.path == "/v1/completions" and "prompt_logprobs" not in request.payload:
            assert not pushing
            sampled.append(tuple(request.payload["prompt"]))
    assert [r.path for r in seen].count("/pause") == 3  # the probe, and a push for each step
    firsts = {prompt for prompt in sampled if not any(prompt[: len(p)] == p != prompt for p in sampled)}
    assert len(firsts) == 4 and all(sampled.count(prompt) == 8 for prompt in firsts)  # a prompt per rank and step
    rows = steps_of(tmp_path)
    assert len(rows) == 2
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    firsts = [json.loads(next(open(tmp_path / f"rollouts.rank{rank}.jsonl"))) for rank in range(2)]
    assert [row["index"] for row in firsts] == [0, 8]


def test_a_preflight_with_a_server(port, client, served_model, tmp_path, capsys):
    """It samples from the server, and leaves nothing behind."""
    # 8 groups: the server samples without a seed, and of two groups both may hold equal rewards.
    flags = ["--config", "hf_recipes/tiny/calculator-vllm.yaml", "--preflight", "--output_dir", str(tmp_path / "out"),
             "--per_device_train_batch_size", "64", "--vllm_server_port"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([*flags, str(port), "--model_name_or_path", str(served_model)])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.endswith("No problem was found.\n"), text
    with pytest.raises(SystemExit) as ended:
        main([*flags, str(port), "--model_name_or_path", str(served_model), "--top_p", "0.8"])
    text = capsys.readouterr().out
    ratio = re.search(r"cut sampling: top_p=0.8: .* importance ratio of a token: (0\.\d+)", text)
    assert ended.value.code == 0 and ratio and 0.7 < float(ratio[1]) < 0.99, text
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def agent_port(tmp_path_factory):
    """A server with the model of the agents' recipes."""
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with WarmVLLMServer(ROOT / "hf_recipes/tiny/calculator-agent-model", *FLAGS, log=log) as server:
        yield server.port


@pytest.mark.parametrize("recipe", ["agent.yaml", "scheduler.yaml"])
def test_programs_of_other_houses_train_through_the_server(recipe, agent_port, tmp_path):
    """What it sampled has the logprobs that the trainer computes for the same ids: the records are what was read."""
    steps = trained(
        f"hf_recipes/tiny/{recipe}", tmp_path, "--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_port",
        agent_port, "--vllm_importance_sampling_mode", "token_truncate", "--max_steps", 2,
        "--per_device_train_batch_size", 16,
    )  # fmt: skip
    assert len(steps) == 2 and all(row["turns/mean"] > 1.0 and row["records/mean"] == 1.0 for row in steps)
    assert all(row["stop/environment_error"] == row["stop/agent_error"] == 0.0 for row in steps)
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in steps)


SHARDED_LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.0}


def sharded_recipe(tmp_path, port, **changes):
    """Three steps of 16 rollouts."""
    changes = {
        "per_device_train_batch_size": 8, "max_steps": 3, "output_dir": str(tmp_path / "out"), "learning_rate": 1e-3,
        "vllm_server_port": port, "save_strategy": "no", "max_completion_length": 120,
        **changes,
    }  # fmt: skip
    return recipe_file(tmp_path, ROOT / "hf_recipes/tiny/calculator-vllm.yaml", **changes)


def assert_trained_from_what_the_server_held(out, steps):
    rows = steps_of(out)
    assert len(rows) == steps and all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    assert all(row["sync/logprob_difference"] < 1e-4 for row in rows)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["all weights", "LoRA"])
def test_weights_that_fsdp2_shards_reach_the_server(lora, port, tmp_path, monkeypatch):
    """Two processes, of which none has a whole weight. The second step's push fails half-way, and is repeated."""
    monkeypatch.setenv("FAULT", "server lost")
    text = launch(FSDP2, [WORKER, "train"], "--config", sharded_recipe(tmp_path, port, **SHARDED_LORA if lora else {}))
    assert "lost after 5 weights. The run waits for the server, then pushes the weights again." in text
    assert_trained_from_what_the_server_held(tmp_path / "out", 3)
