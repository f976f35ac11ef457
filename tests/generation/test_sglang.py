"""SGLang: requests and answers, by recorded ones; and a real server, where it is installed (`setup.sh --sglang`)."""

import asyncio
import copy
import json
import math
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vision_model
from accelerate import Accelerator
from fault_proxy import Fault, FaultProxy
from peft import LoraConfig, get_peft_model
from project import ROOT
from safetensors.torch import load_file
from sglang_server import SGLangServer
from test_images_by_server import logprobs_of, model_of, prompt_of
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from mt_grpo.base.errors import ServerError
from mt_grpo.base.event_loop import gather_all, run_async
from mt_grpo.generation.samples import BadAnswer, HalfLoaded
from mt_grpo.generation.server_pool import ServerPool
from mt_grpo.generation.sglang_engine import SGLang, in_files, read_sample, sampling_of
from mt_grpo.generation.weights import PolicyWeights
from mt_grpo.images.pictures import pictures_in
from mt_grpo.recipe.checks import check_server
from mt_grpo.rollout import hash_of_ids
from mt_grpo_trainer import MTGRPOConfig, MultiTurnToolEnv, VLLMServerClient, build_trainer, parse_arguments

TINY = ROOT / "hf_recipes/tiny/calculator-model"
ANSWERS = json.loads(Path(__file__).with_name("sglang_answers.json").read_text(encoding="utf-8"))  # of SGLang 0.5.23
PYTHON = os.environ.get("SGLANG_PYTHON") or str(ROOT / ".venv-sglang/bin/python")


def ask(prompt, **payload):
    return SGLang().ask_for_sample({"prompt": prompt, "max_tokens": 8, **payload}, 400)


def test_what_a_request_says():
    """By hand: vLLM's names, and SGLang's."""
    question = ask(
        [3, 5], model="m", temperature=0.7, top_p=0.9, top_k=0, min_p=0.0, repetition_penalty=1.1, min_tokens=2, n=1,
        stop=["</tool>"], stop_token_ids=[2], include_stop_str_in_output=True, skip_special_tokens=False, logprobs=0,
        return_token_ids=True, logit_bias={7: 1.5}, cache_salt="3f2a-7", ignore_eos=True,
    )  # fmt: skip
    assert question.path == "/generate" and question.headers == {}
    seeds = {ask([3]).body["sampling_params"]["sampling_seed"] for _ in range(20)}
    assert len(seeds) == 20 and 0 <= question.body["sampling_params"].pop("sampling_seed") < 2**31
    assert question.body == {
        "input_ids": [3, 5], "extra_key": "3f2a-7", "return_logprob": True,
        "return_prompt_token_ids": True,
        "sampling_params": {
            "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.1,
            "min_new_tokens": 2, "max_new_tokens": 8, "stop": ["</tool>"], "stop_token_ids": [2], "ignore_eos": True,
            "skip_special_tokens": False, "logit_bias": {"7": 1.5}, "no_stop_trim": True,
        },
    }  # fmt: skip
    assert sampling_of({"top_k": 20})["top_k"] == 20
    for key in ("seed", "bad_words"):
        with pytest.raises(ValueError, match=f"SGLang server does not support '{key}'"):
            ask([3], **{key: 1})
    forbidden = SGLang().ask_for_sample({"prompt": [3], "max_tokens": 8, "logit_bias": {"7": 1.5}}, 400, [8, 9]).body
    assert forbidden["sampling_params"]["logit_bias"] == {"7": 1.5, "8": -100.0, "9": -100.0}
    score = SGLang().ask_for_prompt({"prompt": [3, 5], "max_tokens": 1, "temperature": 1.0}, 400).body
    assert score["logprob_start_len"] == score["sampling_params"]["max_new_tokens"] == 0
    assert "token_ids_logprob" not in score
    with pytest.raises(ServerError, match="sample alike"):
        SGLang().ranks(SimpleNamespace(base_url="http://a", server_info=lambda: {"dp_size": 2}))


@pytest.mark.parametrize("wrong", [400, -1, 2**31])
def test_an_id_that_would_end_the_server_is_not_sent(wrong):
    for question in (SGLang().ask_for_sample, SGLang().ask_for_prompt):
        with pytest.raises(ServerError, match=f"token id {wrong}, and the model has 400 token ids"):
            question({"prompt": [3, wrong], "max_tokens": 8}, 400)
    assert ask([399]).body["input_ids"] == [399]


PROMPT = ANSWERS["sample"]["sent"]["input_ids"]


@pytest.fixture
def answer():
    """A copy of the recorded one."""
    return copy.deepcopy(ANSWERS["sample"]["body"])


@pytest.mark.contract("SGLang by disk")
def test_a_recorded_sample_is_read(answer):
    found = ask(PROMPT).read(answer)
    assert found.token_ids == [30, 265, 32, 19, 27, 23, 266, 265] and found.finish_reason == "length"
    assert found.logprobs[:2] == [-0.024213658645749092, -2.481313705444336] and len(found.logprobs) == 8
    assert found.saw == hash_of_ids(PROMPT) and found.policy_versions == (7, 7)
    for limit, vocabulary in ((7, 400), (8, 266)):
        with pytest.raises(BadAnswer):
            read_sample(answer, PROMPT, limit, vocabulary)
    assert read_sample(answer, PROMPT, 8, 267).token_ids[-2] == 266


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer, meta: answer.pop("output_ids"), "no token ids"),
        (lambda answer, meta: answer.update(prompt_token_ids=None), "read the ids None, expected"),
        (lambda answer, meta: answer["prompt_token_ids"].__setitem__(3, 9), "the server read the ids"),
        (lambda answer, meta: answer["prompt_token_ids"].append(9), "the server read the ids"),
        (lambda answer, meta: answer["output_ids"].__setitem__(0, 9), "logprobs belong to the ids .30, 265"),
        (
            lambda answer, meta: meta["output_token_logprobs"][2].__setitem__(0, math.nan),
            "expected 1 to 8 ids below 400",
        ),
        (lambda answer, meta: meta.update(prompt_tokens=11), "after 11 prompt tokens"),
        (lambda answer, meta: meta["finish_reason"].update(type="abort"), "finish_reason='abort'"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_none(change, message, answer):
    change(answer, answer["meta_info"])
    with pytest.raises(BadAnswer, match=message):
        ask(PROMPT).read(answer)


def test_which_weights_sampled_a_turn_is_read_per_token(answer):
    for spans, expected in (
        ([("3f2a-7", 0, 3), ("3f2a-9+2", 3, 8)], (7, 9)),
        ([("3f2a-7", 0, 0), ("3f2a-8", 0, 8)], (8, 8)),  # it waited for a push before its first token
        ([("3f2a-7", 0, 8), ("loading-3f2a-8", 8, 8)], (7, 7)),
        ([("default", 0, 8)], None),
        ([("3f2a-7", 0, 3), ("default", 3, 8)], None),  # of no push: the watch of versions finds the restart
        ([], None),
    ):
        answer["meta_info"]["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
        assert ask(PROMPT).read(answer).policy_versions == expected, spans
    answer["meta_info"]["weight_versions"] = [{"version": "loading-3f2a-8", "start": 0, "end": 8}]
    with pytest.raises(BadAnswer, match="while it loaded weights"):
        ask(PROMPT).read(answer)


def test_recorded_logprobs_of_a_prompt_are_read():
    recorded = ANSWERS["prompt"]
    question = SGLang().ask_for_prompt({"prompt": [1, 2, 3, 4, 5], "max_tokens": 1}, 400)
    assert question.read(recorded["body"]) == [
        -5.3985114097595215, -6.980464458465576, -7.577999114990234, -6.925881385803223,
    ]  # fmt: skip
    last = copy.deepcopy(recorded["body"])
    last["meta_info"]["input_token_logprobs"][4][1] = 0  # so it calls the last id of a vocabulary
    assert SGLang().ask_for_prompt({"prompt": [1, 2, 3, 4, 5], "max_tokens": 1}, 6).read(last)[3] == -6.925881385803223
    with pytest.raises(BadAnswer):
        question.read(last)
    for change in (
        lambda meta: meta["input_token_logprobs"][2].__setitem__(1, 9),
        lambda meta: meta["input_token_logprobs"].pop(),
        lambda meta: meta["input_token_logprobs"][2].__setitem__(0, float("-inf")),
    ):
        answer = copy.deepcopy(recorded["body"])
        change(answer["meta_info"])
        with pytest.raises(BadAnswer):
            question.read(answer)


def test_images_are_sent_once_and_what_their_tokens_score_is_looked_up(tmp_path):
    tokenizer = vision_model.reading(vision_model.save(tmp_path))
    picture, other = (tokenizer.pictures.read(vision_model.picture(k), "") for k in range(2))
    pad, n = tokenizer.pictures.placeholder, picture.num_tokens
    prompt = [9, *n * [picture.id], *n * [other.id], 8]
    body = ask(prompt).body
    assert body["input_ids"] == [9, pad, pad, 8] and body["image_data"] == [picture.data_uri, other.data_uri]
    question = SGLang().ask_for_prompt({"prompt": prompt, "max_tokens": 1}, 400)
    assert question.body["token_ids_logprob"] == [pad]
    read = [9, *2 * n * [pad], 8]
    meta = {  # what it calls the tokens of an image is no id of the model's
        "input_token_logprobs": [[None, 9, None], *[[-50.0, 0, None]] * (2 * n), [-0.5, 8, None]],
        "input_token_ids_logprobs": [None, *[[[-k / 4, pad, None]] for k in range(2 * n)], [[-9.0, pad, None]]],
    }
    assert question.read({"meta_info": meta, "prompt_token_ids": read}) == [*[-k / 4 for k in range(2 * n)], -0.5]
    with pytest.raises(BadAnswer, match="The prompt has 2 images: .*SGLANG_MM_AVOID_RETOKENIZE=1"):
        question.read({"meta_info": meta, "prompt_token_ids": read[:-1]})


class Recorded(FaultProxy):
    """Answers as SGLang did. `changed` maps a path to another (status, body)."""

    def __init__(self, model):
        text = json.dumps({name: each["body"] for name, each in ANSWERS.items()}).replace("/models/tiny", str(model))
        bodies, self.changed = json.loads(text), {}
        self.bodies = {name.removeprefix("GET "): (200, body) for name, body in bodies.items() if name[:3] == "GET"}
        self.bodies["/tokenize"] = 200, bodies["tokenize"]
        for name in ("pause", "name", "go on"):
            self.bodies[ANSWERS[name]["path"]] = 200, bodies[name]
        self.bodies["/update_weights_from_disk"] = 200, {"success": True, "message": "", "num_paused_requests": 0}
        super().__init__("http://127.0.0.1:9", self.answer)

    def answer(self, request):
        status, body = {**self.bodies, **self.changed}.get(request.path, (404, {"detail": "Not Found"}))
        return Fault("recorded", status=status, body=json.dumps(body).encode())

    @property
    def sent(self):
        return [(request.path, request.payload) for request in self.requests if request.payload]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """(environment, model's configuration, settings) as the trainer checks them before it loads a model."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY)
    args = MTGRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("out")), use_vllm=True, vllm_mode="server", rollout_engine="sglang",
        max_completion_length=64, num_generations=2, per_device_train_batch_size=2, report_to="none", bf16=False,
        use_cpu=True,
    )  # fmt: skip
    env = MultiTurnToolEnv(tokenizer=tokenizer, max_completion_length=64)
    return env, model.config, args


@pytest.fixture
def recorded():
    with Recorded(TINY) as server:
        yield server


def check(server, setting, engine="sglang", **changes):
    env, config, args = setting
    args = copy.copy(args)
    for key, value in changes.items():
        setattr(args, key, value)
    client = VLLMServerClient(base_url=server.url, tokenizer=env.tokenizer, timeout=1.0, engine=engine)
    check_server(ServerPool([client]), env, config, args)


def test_a_server_as_recorded_fits(recorded, setting):
    check(recorded, setting)
    assert "/update_weights_from_disk" not in dict(recorded.sent)


@pytest.mark.contract("SGLang by disk")
def test_a_load_drops_what_old_weights_computed(recorded, tmp_path):
    """And one that failed is none: its status may be 200."""
    client = VLLMServerClient(base_url=recorded.url, engine="sglang")
    client.engine.load(client, tmp_path)
    client.engine.name_weights(client, "3f2a-7")
    assert [body for _, body in recorded.sent] == [
        {"model_path": str(tmp_path), "flush_cache": True, "abort_all_requests": False},
        {"new_version": "3f2a-7", "abort_all_requests": False},  # it ends no request
    ]
    recorded.changed["/update_weights_from_disk"] = 200, {"success": False, "message": "no room"}
    with pytest.raises(ServerError, match="no room"):
        client.engine.load(client, tmp_path)


def test_half_loaded_weights_are_waited_for(recorded):
    """A push that failed goes on by another try: its requests are no bad answers of the server."""
    client = VLLMServerClient(base_url=recorded.url, engine="sglang")
    recorded.changed["/generate"] = 200, {}
    errors = [HalfLoaded("not yet")] * 5 + [BadAnswer("no sample")] * 2

    def read(answer):
        if errors:
            raise errors.pop(0)
        return "a sample"

    assert run_async(client._post("/generate", {}, read)) == "a sample"
    errors += [BadAnswer("no sample")] * 3
    with pytest.raises(ServerError, match="3 invalid answers in a row: .*no sample"):
        run_async(client._post("/generate", {}, read))


@pytest.mark.parametrize("path, changes, message", [
    ("/tokenize", {"tokens": [1, 2]}, "SGLang server .* tokenises .* differently"),
    ("/server_info", {"speculative_draft_model_path": "/a/draft"}, r"with a draft model \(/a/draft\)"),
])  # fmt: skip
def test_a_server_that_does_not_fit_is_refused_before_a_model_is_loaded(recorded, setting, path, changes, message):
    recorded.changed[path] = 200, {**recorded.bodies[path][1], **changes}
    with pytest.raises(ServerError, match=message):
        check(recorded, setting)


def test_what_it_cannot_do_for_a_recipe_is_said_at_the_start(recorded, setting, caplog):
    for changes, message in (
        ({"top_p": 0.9}, "logprobs from before top_p=0.9, .*vllm_importance_sampling_correction: false"),
        ({"top_k": 40, "min_p": 0.1}, "from before top_k=40, min_p=0.1"),
    ):
        with pytest.raises(ServerError, match=message):
            check(recorded, setting, **changes)
    check(recorded, setting, top_p=0.9, vllm_importance_sampling_correction=False)
    assert not caplog.records


@pytest.fixture(scope="module")
def folder_of_experts(tmp_path_factory):
    """A small model with experts, which transformers holds in one tensor, and files in one for each."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=400, norm_topk_prob=True,
        max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model, folder = Qwen3MoeForCausalLM(config), tmp_path_factory.mktemp("experts")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1 if "embed" not in name else 0.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def test_a_weight_that_files_hold_with_others_is_refused(monkeypatch, folder_of_experts):
    model = AutoModelForCausalLM.from_pretrained(folder_of_experts)
    gate_up = model.get_parameter(name := "model.layers.0.mlp.experts.gate_up_proj")
    for converted in (lambda model, state: {}, lambda model, state: {name: gate_up[:1]}):
        with monkeypatch.context() as patched:
            patched.setattr("mt_grpo.generation.sglang_engine.revert_weight_conversion", converted)
            with pytest.raises(ServerError, match=f"{name} together with others.*rollout_engine: vllm"):
                in_files(model, name, gate_up)
    parts = in_files(model, name, gate_up)
    assert torch.equal(parts["model.layers.0.mlp.experts.2.up_proj.weight"], gate_up[2, 32:])
    assert torch.equal(parts["model.layers.0.mlp.experts.3.gate_proj.weight"], gate_up[3, :32]) and len(parts) == 8


def test_weights_have_the_names_of_a_checkpoints_files(tmp_path_factory, folder_of_experts):
    """Of a model whose modules transformers has renamed, of one of text, with a LoRA or without, and of experts."""
    folder = vision_model.save(tmp_path_factory.mktemp("vision"))
    for path, lora in ((folder, False), (folder, True), (TINY, False), (folder_of_experts, False)):
        model = model_of(path) if path == folder else AutoModelForCausalLM.from_pretrained(path)
        tied = {"lm_head.weight"} if path != folder_of_experts else set()
        if lora:
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
        weights = PolicyWeights(model, Accelerator(cpu=True), None, mode="none")
        weights.in_files = in_files
        kept = load_file(Path(path) / "model.safetensors")
        sent = dict(weights.named_weights())
        assert sent.keys() - tied == kept.keys() - tied
        assert {name: tensor.nbytes for name, tensor in sent.items()} == weights.expected
        assert all(torch.equal(sent[name].detach(), tensor) for name, tensor in kept.items())


def each_real(test):
    needs = pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="needs SGLang: bash scripts/setup.sh --sglang")
    return pytest.mark.slow(needs(test))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with SGLangServer(TINY, python=PYTHON, log=tmp_path_factory.mktemp("log") / "sglang.log") as server:
        yield server


@pytest.fixture
def client(server):
    """A client; afterwards the server holds the bundled weights again."""
    client = VLLMServerClient(base_url=server.url, tokenizer=AutoTokenizer.from_pretrained(TINY), engine="sglang")
    client.vocab_size = 400
    yield client
    client.update_weights(iter(load_file(TINY / "model.safetensors").items()), "bundled")
    client.engine.name_weights(client, "default")
    client.close()


@each_real
def test_pushes_beside_requests(client):
    """Requests wait, go on with the new weights, and say of each token which sampled it."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    client.update_weights(iter(model.state_dict().items()), "aa-1")
    endless = {"ignore_eos": True, "stop": []}

    async def ask_and_push():
        running = asyncio.ensure_future(client.generate([5, 6, 7], 500, endless))
        while not await asyncio.to_thread(started, client):
            await asyncio.sleep(0.01)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.3)
        await asyncio.to_thread(client.update_weights, iter(model.state_dict().items()), "aa-2")
        return await running

    found = run_async(ask_and_push())
    assert len(found.token_ids) == 500 and found.policy_versions == (1, 2)
    again = run_async(client.generate([5, 6, 7], 30, endless))
    expected = logprobs_of(model, [5, 6, 7] + again.token_ids)[-30:]
    assert (torch.tensor(again.logprobs) - expected).abs().max() < 1e-5 and again.policy_versions == (2, 2)
    tail = logprobs_of(model, [5, 6, 7] + found.token_ids)[-5:]  # read anew by the new weights
    assert (torch.tensor(found.logprobs[-5:]) - tail).abs().max() < 1e-5


def started(client):
    """Whether the engine works on a request."""
    states = client.server_info()["internal_states"]
    return any(state.get("last_gen_throughput", 0) or state.get("#running-req", 1) for state in states)


def train(server_url, folder, *options):
    args = [
        "--config", str(ROOT / "hf_recipes/tiny/calculator-sglang.yaml"), "--max_steps", "3",
        "--vllm_server_base_url", server_url, "--output_dir", str(folder),
        "--use_vllm", "true", "--vllm_mode", "server", "--rollout_engine", "sglang", "--use_cpu", "true", "--bf16",
        "false", "--report_to", "none", *options,
    ]  # fmt: skip
    trainer = build_trainer(*parse_arguments(args))
    trainer.train()
    return [log for log in trainer.state.log_history if "sync/seconds" in log]


@pytest.mark.contract_slow("SGLang by disk")
@each_real
@pytest.mark.parametrize(
    "options", [(), ("--max_staleness", "1", "--old_logps", "sampled")], ids=["in time", "with staleness"]
)
def test_a_run_trains_what_it_sampled(client, server, tmp_path, options):
    """A trainer that is one step ahead computes the rollouts of the weights before: only the first step compares."""
    ahead = "--max_staleness" in options
    logs = train(server.url, tmp_path, "--per_device_train_batch_size", "16", *options)
    assert len(logs) == 3 and logs[0]["sync/logprob_difference"] < 1e-5 and "sync/write_seconds" in logs[0]
    for log in logs[:1] if ahead else logs:
        assert log["sampling/sampling_logp_difference/mean"] < 1e-6, log
        assert log["sampling/sampling_logp_difference/max"] < 2e-4, log
    if ahead:
        assert any(log.get("rollout/staleness_max", 0) >= 1 for log in logs)


@pytest.fixture(scope="module")
def server_of_images(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    with SGLangServer(folder, python=PYTHON, context=1024, images=True, log=log) as server:
        yield server


def of_files(model):
    """(name, tensor) of all weights, under the names of a checkpoint's files."""
    return list(revert_weight_conversion(model, dict(model.state_dict())).items())


@each_real
def test_what_it_samples_behind_images(server_of_images, folder):
    """Logprobs as by a forward pass of each row; also of ids that no tokenizer would write."""
    tokenizer, rng = vision_model.reading(folder), random.Random(0)
    client = VLLMServerClient(base_url=server_of_images.url, tokenizer=tokenizer, engine="sglang")
    plain, model = model_of(folder), model_of(folder, tokenizer)
    client.vocab_size = model.config.get_text_config().vocab_size
    prompts = [
        prompt_of(tokenizer, "Q", vision_model.picture(k, rng.choice([(56, 56), (84, 60), (20, 90)])), "Which digit?")
        + [token for letter in "answer" for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]
        for k in range(4)
    ]
    prompts.append(prompt_of(tokenizer, *(vision_model.picture(k) for k in range(3)), "all?"))

    async def all_of_them():
        return await gather_all([client.generate(prompt, 20) for prompt in prompts])

    for prompt, found in zip(prompts, run_async(all_of_them())):
        expected = logprobs_of(model, prompt + found.token_ids)[-len(found.token_ids) :]
        assert (torch.tensor(found.logprobs) - expected).abs().max() < 2e-5 and found.saw == hash_of_ids(prompt)
        assert (torch.tensor(client.score(prompt)) - logprobs_of(plain, prompt)).abs().max() < 2e-5
        assert pictures_in(prompt)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    client.update_weights(iter(of_files(model)), "new-1", None, torch.device("cpu"))
    found = run_async(client.generate(prompts[0], 20))  # what the old tower saw is forgotten
    expected = logprobs_of(model, prompts[0] + found.token_ids)[-len(found.token_ids) :]
    assert (torch.tensor(found.logprobs) - expected).abs().max() < 2e-5
    client.update_weights(iter(of_files(plain)), "old-1", None, torch.device("cpu"))
    client.engine.name_weights(client, "default")
    client.close()
