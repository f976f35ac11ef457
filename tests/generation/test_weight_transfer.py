"""Weights on their way to servers, over real HTTP. For NCCL: TRL's own client, and a stand-in for NCCL itself."""

import fcntl
import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fault_proxy import Fault, FaultProxy
from peft import LoraConfig
from safetensors.torch import load_file

from mt_grpo.base.errors import ServerError, ServerLost
from mt_grpo.generation.server_pool import ServerPool
from mt_grpo.generation.weight_transfer import NCCLGroup, write_weights
from mt_grpo_trainer import VLLMServerClient

pytest.importorskip("vllm", reason="TRL's client imports vLLM")
from trl.generation import vllm_client

WEIGHTS = {"w": torch.tensor([1.0, 2.0]), "head": torch.tensor([[3.0]], dtype=torch.bfloat16)}
SIZES = {"w": 8, "head": 2}
INFO = {"vllm_config": {"model_config": {"model": "m", "dtype": "torch.float32", "logprobs_mode": "raw"},
                        "weight_transfer_config": {"backend": "nccl"}}}  # fmt: skip
ANSWERS = {"/v1/models": {"data": [{"id": "m"}]}, "/server_info": INFO, "/get_world_size": {"world_size": 1}}


class Endpoints(FaultProxy):
    """The addresses of a vLLM server that a push uses. `asked` has them in order, each with its body."""

    def __init__(self):
        self.version, self.hangs, self.loads = "default", False, None  # a barrier, at which `/collective_rpc` waits
        super().__init__("http://127.0.0.1:9", self.answer)

    def answer(self, request):
        if request.path == "/collective_rpc" and self.loads:
            self.loads.wait(10)
        if request.path == "/update_weight_version":
            self.version = request.payload["new_version"]
        answer = {"/weight_info": {"weight_version": self.version}, **ANSWERS}.get(request.path, {})
        delay = 20 * (self.hangs and request.path == "/update_weights")
        return Fault("answer", delay, 200, json.dumps(answer).encode())

    @property
    def asked(self):
        return [(request.path, request.payload or {}) for request in self.requests]

    def paths(self):
        """What changes something."""
        return [path for path, _ in self.asked if path not in ("/health", "/server_info", "/v1/models")]


class Communicator:
    """In place of NCCL's. `broadcasts` has (group port, tensor). With `stuck` it waits until it is destroyed."""

    def __init__(self, port):
        self.port, self.destroyed, self.stuck, self.broadcasts = port, threading.Event(), False, []
        self.group = SimpleNamespace(store=1, socket=1)

    def broadcast(self, tensor):
        self.broadcasts.append(tensor.tolist())
        if self.stuck:
            self.destroyed.wait(20)
            raise RuntimeError("NCCL error: aborted")

    def destroy(self):
        self.destroyed.set()


@pytest.fixture
def nccl(monkeypatch):
    """The communicators that were made, in order."""
    made = []

    def open_endpoint(init_info):
        assert {k: init_info[k] for k in ("rank_offset", "world_size", "packed")} == {
            "rank_offset": 1, "world_size": 2, "packed": True}  # fmt: skip
        if init_info["master_port"] == 25501:
            raise OSError("Address already in use")
        made.append(Communicator(init_info["master_port"]))
        return made[-1]

    def producer(iterator, group, src, post_iter_func):
        for item in iterator:
            group.broadcast(post_iter_func(item))

    def join(self):  # TRL's client wants a GPU; the weights are to stay on the CPU
        self.device = torch.device("cuda")
        original(self)
        self.device = torch.device("cpu")

    original = NCCLGroup._join
    monkeypatch.setattr(NCCLGroup, "_join", join)
    monkeypatch.setattr(NCCLGroup, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(vllm_client, "open_trainer_endpoint", open_endpoint)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", producer)
    return made


@pytest.fixture
def servers():
    with Endpoints() as one, Endpoints() as two, Endpoints() as three:
        yield [one, two, three]


def client_of(server, port=25500, **limits):
    limits = {"timeout": 5.0, "request_timeout": 5.0, **limits}
    return VLLMServerClient(base_url=server.url, transport="nccl", group_port=port, **limits)


def push(client, version="v-1"):
    return client.update_weights(iter(WEIGHTS.items()), version, SIZES, torch.device("cpu"))


def test_a_port_that_is_taken_is_told_at_once(nccl, servers):
    """The workers would connect to whoever listens there, and the push would wait for minutes."""
    with socket.create_server(("", 0)) as taken, pytest.raises(ServerError, match="vllm_group_port: port .* in use"):
        push(client_of(servers[0], taken.getsockname()[1]))
    assert servers[0].paths() == []


def test_the_order_of_a_push_and_what_is_sent(nccl, servers):
    """Nothing is sampled between the pause and the end, and no key of the old weights stays."""
    client = client_of(servers[0])
    assert set(push(client)) == {"gather", "load"}
    one_push = ["/pause", "/weight_info", "/update_weight_version", "/start_weight_update", "/update_weights",
                "/finish_weight_update", "/reset_prefix_cache", "/update_weight_version", "/resume"]  # fmt: skip
    assert servers[0].paths() == ["/get_world_size", "/init_weight_transfer_engine", *one_push]
    bodies = dict(servers[0].asked)
    assert bodies["/update_weights"] == {
        "update_info": {"names": ["w", "head"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2], [1, 1]]}
    }
    assert bodies["/init_weight_transfer_engine"]["init_info"]["master_port"] == 25500
    assert nccl[0].broadcasts == [[1.0, 2.0], [[3.0]]] and servers[0].version == "v-1"
    servers[0].requests.clear()
    push(client, "v-2")  # by the same group, once the server says that it did not restart
    assert servers[0].paths() == ["/pause", "/weight_info", *one_push[1:]]
    assert len(nccl) == 1 and not nccl[0].destroyed.is_set()
    client.close()


def test_a_load_that_failed_half_way_is_completed_first(nccl, servers):
    """vLLM would mix its parts with those of the next load. So that one is sent twice, outside of an open session."""
    servers[0].version = "loading-v-0"
    client = client_of(servers[0])
    push(client)
    assert nccl[0].broadcasts == 2 * [[1.0, 2.0], [[3.0]]] and servers[0].version == "v-1"
    assert servers[0].paths().index("/finish_weight_update") < servers[0].paths().index("/start_weight_update")
    client.close()


def test_only_what_the_model_does_not_hold_is_copied(nccl, servers, monkeypatch):
    """A parameter is sent from where it is. What was gathered or merged is gone when the next one is asked for."""
    sent = []
    monkeypatch.setattr(NCCLGroup, "send", lambda self, tensors: sent.append(tensors))
    own, passing = torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.zeros(1, 1, dtype=torch.bfloat16)

    def weights():
        yield "w", own
        passing.fill_(3.0)
        yield "head", passing
        passing.fill_(4.0)

    client = client_of(servers[0])
    client.update_weights(weights(), "v-1", SIZES, torch.device("cpu"))
    assert sent[0]["w"] is own and sent[0]["head"].tolist() == [[3.0]]
    client.close()


def test_each_server_has_its_own_group(nccl, servers, caplog):
    clients = [client_of(server, 25500 + n) for n, server in enumerate(servers)]
    pool = ServerPool(clients)
    with pytest.raises(ServerLost, match="NCCL group on port 25501"):
        push_to_all(pool)
    pool.complete = True
    push_to_all(pool)
    assert pool.joined == [0, 2] and [made.port for made in nccl] == [25500, 25502]
    assert [made.broadcasts for made in nccl] == [[[1.0, 2.0], [[3.0]]] * 2] * 2
    pool.close()


def push_to_all(pool):
    pool.update_weights(iter(WEIGHTS.items()), "v-1", SIZES, torch.device("cpu"))


def test_a_group_is_closed_when_its_server_joins_again(nccl, servers):
    """A restarted server is not in it, and its port is free for the next one. Other servers keep theirs."""
    pool = ServerPool([client_of(server, 25500 + 2 * n) for n, server in enumerate(servers[:2])])
    pool.complete = True
    push_to_all(pool)
    servers[1].version = "default"
    assert pool.find_restarted("v-1") and pool.find_restarted("v-1") and pool.joining == [1]
    assert [made.destroyed.is_set() for made in nccl] == [False, True]
    assert nccl[1].group.store is None and nccl[0].group.store == 1  # TRL's own close, which frees the port
    push_to_all(pool)
    assert [made.port for made in nccl] == [25500, 25502, 25502]
    pool.close()


@pytest.mark.parametrize("limit, healthy, reason", [(5.0, False, "health"), (1.0, True, "vllm_request_timeout=1 s")])
def test_a_worker_that_takes_no_weights_does_not_hold_the_run(nccl, servers, limit, healthy, reason):
    """Its sender waits in NCCL for ever, and so does the request that nobody answers."""
    client = client_of(servers[0], request_timeout=limit)
    push(client)
    nccl[0].stuck = servers[0].hangs = True
    if not healthy:
        client.healthy = lambda: False
    began = time.monotonic()
    with pytest.raises(ServerLost, match=f"did not take the weights: .*{reason}"):
        push(client, "v-2")
    assert nccl[0].destroyed.is_set() and time.monotonic() - began < 15  # it hangs for 20 s
    servers[0].hangs = False
    vars(client).pop("healthy", None)
    push(client, "v-3")
    assert len(nccl) == 2 and servers[0].version == "v-3"


def test_an_error_of_trls_client_is_a_lost_server(nccl, servers, monkeypatch):
    client = client_of(servers[0])
    push(client)
    monkeypatch.setattr(nccl[0], "broadcast", lambda tensor: 1 / 0)
    with pytest.raises(ServerLost, match="did not take the weights: division by zero"):
        push(client, "v-2")
    assert servers[0].version == "loading-v-2"  # which nobody takes for right weights


def test_a_server_of_another_user_may_read_the_files(servers, tmp_path):
    """And a folder that the system has cleaned is made again."""
    transfer = VLLMServerClient(base_url=servers[0].url, sync_dir=str(tmp_path)).transfer
    for _ in range(2):
        folder, _ = transfer._write(iter([("a", torch.zeros(2))]), "v-1", None)
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
        assert folder.parent.stat().st_mode & 0o777 == 0o755
        shutil.rmtree(folder.parent)


def test_what_others_put_beside_the_weights_is_left_alone(tmp_path):
    """No link is followed, and no other user's folder is removed; a dead run's own folder is."""
    open_to_all, victim = tmp_path / "open", tmp_path / "victim"
    open_to_all.mkdir()
    open_to_all.chmod(0o1777)  # as /dev/shm
    names = {"dead", "alive", "no-lock", *(["another-users"] if os.geteuid() == 0 else [])}
    folders = {name: open_to_all / f"mt-grpo-weights-{name}" for name in names}
    for name, folder in {**folders, "victim": victim}.items():
        folder.mkdir()
        if name != "no-lock":
            (folder / "lock").write_text("precious")
    (link := open_to_all / "mt-grpo-weights-link").symlink_to(victim)
    if "another-users" in names:
        os.chown(folders["another-users"], 12345, 12345)
    with open(folders["alive"] / "lock") as held:  # by a run that lives
        fcntl.flock(held, fcntl.LOCK_EX)
        client = VLLMServerClient("127.0.0.1", 9, sync_dir=str(open_to_all))
        own = client.transfer._own_folder(1)
    assert own.stat().st_mode & 0o777 == 0o700  # where everybody may write, only this user may read
    assert set(open_to_all.iterdir()) == {own, link, *folders.values()} - {folders["dead"]}
    assert (victim / "lock").read_text() == "precious"
    client.close()
    assert not own.exists()


def test_all_servers_load_the_same_file_at_the_same_time(servers, tmp_path, monkeypatch):
    """It is written once. The barrier lets nobody through before all of them load. No push needs the first server."""
    barrier = threading.Barrier(3)
    for server in servers:
        server.loads = barrier
    clients = [VLLMServerClient(base_url=s.url, transport="disk", sync_dir=str(tmp_path)) for s in servers]
    pool = ServerPool(clients)
    push_to_all(pool)
    folders = {body["kwargs"]["weights_path"] for s in servers for path, body in s.asked if path == "/collective_rpc"}
    assert len(folders) == 1 and pool.joined == [0, 1, 2] and [s.version for s in servers] == ["v-1"] * 3
    pool.complete = True
    monkeypatch.setitem(ANSWERS, "/server_info", {})
    push_to_all(pool)
    servers[0].close()
    servers[1].loads = servers[2].loads = None
    push_to_all(pool)
    assert pool.joined == [1, 2]
    pool.close()


@pytest.mark.contract("LoRA adapter")
def test_an_adapter_is_written_once_and_the_older_ones_go(servers, tmp_path):
    """Nothing is paused. What a request still names stays, with its files."""
    clients = [VLLMServerClient(base_url=s.url, sync_dir=str(tmp_path)) for s in servers[:2]]
    pool = ServerPool(clients)
    for client in clients:
        client.transfer.adapter = LoraConfig(r=4)

    def push(version):
        pool.update_weights(iter(WEIGHTS.items()), version, SIZES, torch.device("cpu"))

    push("v-1")
    load = "/v1/load_lora_adapter"
    assert [server.paths() for server in servers[:2]] == [[load, "/update_weight_version"]] * 2
    bodies = [dict(server.asked)[load] for server in servers[:2]]
    folder = Path(bodies[0]["lora_path"])
    assert bodies == [{"lora_name": "v-1", "lora_path": str(folder)}] * 2
    written = load_file(folder / "adapter_model.safetensors")
    assert {name: tensor.tolist() for name, tensor in written.items()} == {"w": [1.0, 2.0], "head": [[3.0]]}
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    push("v-2")
    clients[1].transfer.num_adapters = 3
    for server in servers:
        server.requests.clear()
    push("v-3")
    unload = ["/v1/unload_lora_adapter"]
    assert [server.paths() for server in servers[:2]] == [
        ["/weight_info", load, "/update_weight_version", *unload], ["/weight_info", load, "/update_weight_version"]
    ]  # fmt: skip
    assert dict(servers[0].asked)[unload[0]] == {"lora_name": "v-1"}
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == ["v-1", "v-2", "v-3"]
    clients[1].transfer.num_adapters = 2
    push("v-4")
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == ["v-3", "v-4"]
    assert [client.loaded for client in clients] == ["v-4"] * 2
    clients[0].transfer.in_use = {"v-3"}  # by a request, longer than `num_adapters` pushes
    push("v-5")
    push("v-6")
    assert [list(client.transfer._loaded) for client in clients] == [["v-3", "v-5", "v-6"], ["v-5", "v-6"]]
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == ["v-3", "v-5", "v-6"]
    servers[0].version = "default"  # it restarted: nothing is loaded before a push to all that joined knows it
    servers[0].requests.clear()
    with pytest.raises(ServerLost, match="restarted before the push: it no longer holds 'v-6'"):
        clients[0].update_weights(iter(WEIGHTS.items()), "v-7", SIZES, torch.device("cpu"))
    assert servers[0].paths() == ["/weight_info"]
    pool.close()


def test_an_adapter_stays_until_its_server_answers_and_no_weight_comes_twice(tmp_path):
    """A server that is lost may still have it; one that refuses has none. A name has one weight."""
    client = VLLMServerClient("127.0.0.1", 9, sync_dir=str(tmp_path))
    client.transfer._loaded["v-1"] = tmp_path
    client.request = Mock(side_effect=[ServerLost("no answer"), ServerError("404")])
    with pytest.raises(ServerLost, match="no answer"):
        client.transfer._unload("v-1")
    assert "v-1" in client.transfer._loaded
    client.transfer._unload("v-1")
    assert not client.transfer._loaded
    with pytest.raises(ValueError, match="the weight w was yielded twice"):
        write_weights(tmp_path, iter([("w", torch.ones(2)), ("w", torch.ones(2))]))


@pytest.mark.parametrize("shard_bytes, sizes", [(2**30, [7]), (64, [1, 2, 4])], ids=["one file", "shards"])
def test_files_hold_what_was_yielded(tmp_path, shard_bytes, sizes):
    """Bit for bit, also tied, transposed and large tensors, and memory that is filled anew for the next one."""
    buffer, tied, large = torch.empty(5), torch.tensor([1.0, -2.0], dtype=torch.bfloat16), torch.arange(30.0)
    views = {
        "large": large,
        "a": tied,
        "b": torch.arange(12.0).reshape(3, 4).T,
        "c": torch.tensor([7], dtype=torch.int8),
    }

    def weights():
        yield "large", views["large"]
        for k in range(2):
            yield f"buffer.{k}", buffer.fill_(k)
        buffer.fill_(-1.0)
        yield from [("b", views["b"]), ("a", tied), ("tied", tied), ("c", views["c"])]

    names, seconds = write_weights(tmp_path, weights(), shard_bytes=shard_bytes)
    files = [load_file(path) for path in sorted(tmp_path.iterdir())]
    assert [len(file) for file in files] == sizes and seconds > 0
    found = {name: tensor for file in files for name, tensor in file.items()}
    expected = {**views, "tied": tied, "buffer.0": torch.zeros(5), "buffer.1": torch.ones(5)}
    assert names == found.keys() == expected.keys()
    assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in expected.items())
