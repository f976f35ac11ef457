"""The client of the vLLM server where there is none, or another service: a proxy answers in its place."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
from bench.common import free_port
from fault_proxy import Fault, FaultProxy
from project import ROOT
from safetensors.torch import load_file
from transformers import AutoTokenizer

from mt_grpo.base.errors import ServerError, ServerLost
from mt_grpo.base.event_loop import run_async
from mt_grpo.generation.server_pool import ServerPool
from mt_grpo_trainer import VLLMServerClient, main


@pytest.fixture
def proxy():
    with FaultProxy("http://127.0.0.1:9") as proxy:
        yield proxy


@pytest.fixture
def client(proxy):
    client = VLLMServerClient("127.0.0.1", proxy.port, timeout=2.0)
    yield client
    client.close()


def test_a_server_is_waited_for_and_an_answer_that_trickles_is_none(proxy, client):
    """A time limit bounds the whole call: at this pace the answer would be whole after 20 s."""
    proxy.faults = lambda request: Fault("up" if len(proxy.requests) == 2 else "down",
                                         status=200 if len(proxy.requests) == 2 else 503, body=b"")  # fmt: skip
    client.wait_until_healthy()
    assert proxy.counts == {"down": 1, "up": 1}
    proxy.faults = lambda request: Fault("drip", drip=0.5, status=200, body=b" " * 40)
    with pytest.raises(ServerLost, match="GET .*/weight_info: no complete answer within 1 s"):
        client.request("GET", "/weight_info", timeout=1.0)
    with pytest.raises(ServerError, match="No vLLM server answers at .* after 2 s.*no complete answer within"):
        client.wait_until_healthy()


def test_a_run_without_its_server_says_so_and_keeps_the_password(tmp_path, monkeypatch, capfd, caplog):
    """What is waited for while it waits, one line at the end, the password nowhere."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    address = f"127.0.0.1:{free_port()}"
    flags = ["--config", "hf_recipes/tiny/calculator-vllm.yaml", "--vllm_server_base_url", f"http://ann:hunter2@{address}",
             "--vllm_server_timeout", "1", "--output_dir", str(tmp_path)]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert str(ended.value).startswith(f"error: No vLLM server answers at http://{address}")
    assert any(message.startswith("Waiting up to 1 more s") for message in caplog.messages)
    assert "hunter2" not in "".join([*capfd.readouterr(), caplog.text, str(ended.value)])


@pytest.mark.parametrize("url", ["http://gpu1:99999", "ftp://gpu1", "gpu1:8000", "http://ann:hun/ter2@gpu1:8000"])
def test_an_address_that_can_never_work_is_refused(url):
    with pytest.raises(ServerError, match="is not a server address") as raised:
        VLLMServerClient(base_url=url)
    assert "ter2" not in str(raised.value)
    with pytest.raises(ServerError, match="vllm_server_host='http://gpu1': expected a name"):
        VLLMServerClient("http://gpu1", 8000)
    for host, found in (("0.0.0.0", "127.0.0.1"), ("gpu1", "gpu1"), ("::1", "[::1]"), ("[::1]", "[::1]")):
        assert VLLMServerClient(host).base_url == f"http://{found}:8000"


OLLAMA = b'{"object": "list", "data": [{"id": "llama3", "object": "model", "owned_by": "library"}]}'
NO_VLLM = "Expected an answer of vLLM: check vllm_server_host, vllm_server_port, vllm_server_base_url"


@pytest.mark.parametrize("ask, status, body, message", [
    (lambda client: client.model_card, 200, OLLAMA, f"GET .*/v1/models: 200 .*llama3.*. {NO_VLLM}"),
    (lambda client: client.model_card, 401, b'{"error": "Unauthorized"}', "401 .*VLLM_API_KEY"),
    (VLLMServerClient.server_info, 404, b'{"detail": "Not Found"}', "404 .*VLLM_SERVER_DEV_MODE"),
    (VLLMServerClient.weight_version, 200, b"<html>" + b"x" * 100_000, f"/weight_info: 200 '<html>x*'. {NO_VLLM}"),
])  # fmt: skip
def test_another_service_is_told_as_such(proxy, client, ask, status, body, message):
    """At once, with the status and the beginning of what came."""
    proxy.faults = lambda request: Fault("other", status=status, body=body)
    with pytest.raises(ServerError, match=message) as raised:
        ask(client)
    assert not isinstance(raised.value, ServerLost) and proxy.counts["other"] == 1
    assert len(str(raised.value)) < 1000


def test_a_password_is_sent_and_not_shown(proxy, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    client = VLLMServerClient(base_url=f"http://ann:s%20t@127.0.0.1:{proxy.port}/", timeout=1.0)
    assert client.base_url == f"http://127.0.0.1:{proxy.port}"
    proxy.faults = lambda request: Fault("no", status=400)
    for ask in (client.server_info, lambda: run_async(client.generate([5, 6], 8))):
        client.__dict__["model_card"] = {"id": "model"}
        with pytest.raises(ServerError):
            ask()
    # python3 -c 'import base64; print(base64.b64encode(b"ann:s t"))'
    assert [request.headers.get("Authorization") for request in proxy.requests] == ["Basic YW5uOnMgdA=="] * 2
    monkeypatch.setenv("VLLM_API_KEY", "key")
    VLLMServerClient("127.0.0.1", proxy.port).healthy()
    assert proxy.requests[-1].headers["Authorization"] == "Bearer key"


SAMPLE = {
    "choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1},
}


@pytest.mark.contract("VLLMServerClient.chat", "VLLMServerClient.generate")
def test_ids_are_continued_and_messages_are_answered(proxy, client):
    client.__dict__["model_card"] = {"id": "model", "max_model_len": 64}
    client.tokenizer = AutoTokenizer.from_pretrained(ROOT / "hf_recipes/tiny/calculator-model")
    end = client.tokenizer.eos_token_id

    def rule(request):
        usage = {"prompt_tokens": len(request.payload["prompt"])}
        said = {**SAMPLE["choices"][0], "token_ids": [7, end], "logprobs": {"token_logprobs": [-1.0, -0.5]}}
        return Fault("answer", status=200, body=json.dumps({"choices": [said], "usage": usage}).encode())

    proxy.faults = rule
    sample = run_async(client.generate([5, 6], 11, {"temperature": 0.5}))
    assert (sample.token_ids, sample.logprobs, sample.finish_reason) == ([7, end], [-1.0, -0.5], "stop")
    conversations = [[{"role": "user", "content": text}] for text in ("hello", "goodbye")]
    prompts = [
        client.tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in conversations
    ]
    sampled = {"token_ids": [7, end], "logprobs": [-1.0, -0.5], "finish_reason": "stop"}
    answer = {"text": client.tokenizer.decode([7]), **sampled}
    answers = client.chat(conversations, {"max_tokens": 12, "top_p": 0.5, "chat_template_kwargs": None})
    assert answers == [{**answer, "prompt_ids": ids} for ids in prompts]
    ids, *chats = (request.payload for request in proxy.requests)
    assert (ids["prompt"], ids["max_tokens"], ids["temperature"]) == ([5, 6], 11, 0.5)
    assert sorted(chat["prompt"] for chat in chats) == sorted(prompts)
    assert [(chat["max_tokens"], chat["top_p"], chat["stop"]) for chat in chats] == [(12, 0.5, [])] * 2
    client.tokenizer = None
    with pytest.raises(ServerError, match="tokenizer"):
        client.chat(conversations)


@pytest.mark.contract("VLLMServerClient.update_weights")
def test_a_push_is_loaded_while_the_server_is_paused_and_gets_its_name_then(proxy, tmp_path):
    weights = {"head": torch.tensor([[1.0, 2.0]]), "norm": torch.tensor([3.0], dtype=torch.bfloat16)}
    info = {"vllm_config": {"model_config": {"model": "m", "dtype": "float32", "logprobs_mode": "raw"}}}
    info |= {"weight_version": "default"}
    loaded = []

    def rule(request):
        if request.path == "/collective_rpc":
            loaded.append(load_file(Path(request.payload["kwargs"]["weights_path"]) / "model-00001.safetensors"))
        return Fault("done", status=200, body=json.dumps(info).encode())

    proxy.faults = rule
    client = VLLMServerClient("127.0.0.1", proxy.port, timeout=2.0, sync_dir=str(tmp_path))
    client.update_weights(iter(weights.items()), "v-1")
    client.close()
    (found,) = loaded
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    posts = [request for request in proxy.requests if request.method == "POST"]
    asked = [(request.payload or {}).get("new_version") or request.path for request in posts]
    expected = ["/pause", "loading-v-1", "/collective_rpc", "/reset_prefix_cache", "v-1", "/resume"]
    assert asked == expected
    assert not list(tmp_path.iterdir())


def answered(request, held, **how):
    """A sample, or which weights the server holds."""
    answer = SAMPLE if request.path == "/v1/completions" else {"weight_version": held}
    return Fault(held, status=200, body=json.dumps(answer).encode(), **how)


def questions(proxy):
    """How often the server was asked which weights it holds."""
    return sum(request.path == "/weight_info" for request in proxy.requests)


def proven(client, version, *conversations, every=0.2):
    """The results of conversations, each of which gets its backend. The server is asked `every` so many seconds."""
    client.__dict__["model_card"] = {"id": "model", "max_model_len": 64}
    pool = ServerPool([client])
    pool.WATCH_SECONDS = every
    routes = pool.routes(list(range(len(conversations))))
    running = [conversation(route) for conversation, route in zip(conversations, routes)]
    return pool.start_conversations(running, version, routes).result(20)


async def sample(backend):
    return (await backend.generate([1], 8)).token_ids


@pytest.mark.parametrize(
    "held, expected", [("v-1", [7]), ("v-10", [7]), *((held, None) for held in ("default", "v-0", "V-1", ""))]
)
def test_only_this_version_and_later_ones_count(proxy, client, held, expected):
    proxy.faults = lambda request: answered(request, held)
    assert proven(client, "v-1", sample) == [expected]


@pytest.mark.parametrize("held, expected", [("loading-v-2", [7]), ("v-1+1", None)])
def test_a_push_under_way_is_waited_for(proxy, client, held, expected):
    """Nothing is known meanwhile. A restart that the push found out makes what is unproven worthless."""

    def rule(request):
        if questions(proxy) < 3:
            return answered(request, held)
        client.lineage = int("+" in held)  # what a rank hears of at the end of the push
        return answered(request, held.removeprefix("loading-"))

    proxy.faults = rule
    assert proven(client, "v-1", sample) == [expected]
    assert questions(proxy) >= 3


def test_an_answer_is_shared_by_who_asked_before_it_was_sent(proxy, client):
    """One question is under way at a time. Who comes while it is shares the next one, which proves what was before."""
    go = threading.Event()

    def rule(request):
        answer = answered(request, f"v-{questions(proxy)}")
        assert go.wait(20)
        return answer

    async def story():
        early = [asyncio.ensure_future(client.held_version()) for _ in range(3)]
        while not questions(proxy):
            await asyncio.sleep(0.01)
        late = [asyncio.ensure_future(client.held_version()) for _ in range(2)]
        await asyncio.sleep(0)  # they have asked
        early[0].cancel()  # the others get their answer
        go.set()
        return await asyncio.gather(*early[1:], *late)

    proxy.faults = rule
    assert run_async(story()) == ["v-1", "v-1", "v-2", "v-2"] and questions(proxy) == 2


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("of_server", [None, "nccl"])
@pytest.mark.parametrize("transport", ["auto", "disk", "nccl"])
def test_the_way_of_weights_depends_on_device_server_and_key(transport, of_server, device, key, monkeypatch):
    """NCCL where this process has CUDA, the server was started for it, and no key is needed; else the disk."""
    client = VLLMServerClient("127.0.0.1", 8000, transport=transport, api_key=key)
    config = {"weight_transfer_config": of_server and {"backend": of_server}}
    monkeypatch.setattr(client, "server_info", lambda: config)
    if transport == "nccl" and (of_server != "nccl" or key):
        with pytest.raises(ServerError, match="weight_sync=nccl"):
            client.transfer.resolve(torch.device(device))
        return
    nccl = transport == "nccl" or (transport == "auto" and of_server == "nccl" and device == "cuda" and not key)
    assert client.transfer.resolve(torch.device(device)) == ("nccl" if nccl else "disk")
