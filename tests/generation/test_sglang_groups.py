"""Weights to SGLang's workers by a process group of torch. The worker here makes its group as SGLang does, by gloo."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import torch.distributed as dist
from bench.common import free_port
from test_sglang import answer_json
from torch.distributed import distributed_c10d as c10d

from mt_grpo.base.errors import ServerError, ServerLost
from mt_grpo.generation.nccl_groups import NCCLGroup, SGLangGroup
from mt_grpo_trainer import VLLMServerClient

INFO = {
    "model_path": "m", "served_model_name": "m", "tokenizer_path": "m", "dtype": "float32", "dp_size": 1, "tp_size": 1,
    "pp_size": 1, "device": "cpu", "version": "0.5.23", "max_req_input_len": 100,
}  # fmt: skip
CPU = torch.device("cpu")
SIZES = {"w": 8, "head": 4, "norm": 8}


def weights(plus=0.0):
    yield "w", torch.nn.Parameter(torch.tensor([1.0, 2.0]) + plus)
    yield "head", torch.tensor([[3.0], [4.0]], dtype=torch.bfloat16) + plus
    yield "norm", torch.tensor([[5.0, 6.0], [7.0, 8.0]], dtype=torch.bfloat16).T  # rows that lie apart in memory


class Worker(ThreadingHTTPServer):
    """SGLang's addresses, and one worker. `refuse` maps an address to its message; `asked` has what was asked."""

    daemon_threads = True

    def __init__(self):
        self.asked, self.refuse, self.version, self.held = [], {}, "default", {}
        self.status = 400  # of what is refused
        self.groups, self.open, self.receives = {}, False, threading.Event()
        self.receives.set()
        super().__init__(("127.0.0.1", 0), WorkerHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path, body):
        if path in self.refuse:
            return self.status, {"success": False, "message": self.refuse[path]}
        if path == "/server_info":
            return 200, INFO
        if path == "/model_info":
            return 200, {"weight_version": self.version}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/begin_weight_update" and self.open:
            return 400, {"success": False, "message": "a weight-update session is already open"}
        if path in ("/begin_weight_update", "/end_weight_update"):
            self.open = path == "/begin_weight_update"
        if path == "/init_weights_update_group":
            self.join(body)
        if path == "/update_weights_from_distributed":
            self.receives.wait(30)
            try:
                self.receive(body)
            except RuntimeError as error:
                return 400, {"success": False, "message": f"Failed to receive weights: {error}"}
        if path == "/destroy_weights_update_group":
            if (group := self.groups.pop(body["group_name"], None)) is None:
                return 400, {"success": False, "message": "The group to be destroyed does not exist."}
            dist.destroy_process_group(group)
        return 200, {"success": True, "message": "Success"}

    def join(self, body):
        """As its `init_custom_process_group`: torch's own function names the keys in the store."""
        place, name = f"tcp://{body['master_address']}:{body['master_port']}", body["group_name"]
        store, rank, size = next(dist.rendezvous(place, body["rank_offset"], body["world_size"]))
        group, _ = c10d._new_process_group_helper(
            size, rank, [], c10d.Backend(body["backend"]), dist.PrefixStore(name, store), group_name=name,
            timeout=c10d.default_pg_timeout,
        )  # fmt: skip
        c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        self.groups[name] = group

    def receive(self, body):
        group, found = self.groups[body["group_name"]], {}
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"]):
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(found[name], src=0, group=group)
        self.held.update(found)

    def paths(self):
        return [path for path, _ in self.asked]


class WorkerHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.path not in ("/server_info", "/model_info"):
            self.server.asked.append((self.path, body))
        status, answer = self.server.answer(self.path, body)
        answer_json(self, status, answer)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def worker():
    with Worker() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.receives.set()
        server.shutdown()


@pytest.fixture
def client(worker, monkeypatch):
    monkeypatch.setattr(NCCLGroup, "WATCH_SECONDS", 0.05)
    client = VLLMServerClient(
        base_url=worker.url,
        engine="sglang",
        transport="nccl",
        group_port=free_port(),
        timeout=5.0,
        request_timeout=30.0,
    )
    yield client
    client.close()


def push(client, version="v-1", plus=0.0):
    return client.update_weights(weights(plus), version, SIZES, CPU)


def held(worker):
    return {name: (str(tensor.dtype), tensor.tolist()) for name, tensor in worker.held.items()}


THREE = {
    "w": ("torch.float32", [1.0, 2.0]), "head": ("torch.bfloat16", [[3.0], [4.0]]),
    "norm": ("torch.bfloat16", [[5.0, 7.0], [6.0, 8.0]]),
}  # fmt: skip


def test_what_is_sent_is_what_arrives_and_in_which_order(worker, client, monkeypatch):
    """In requests of at most so many bytes; the last one drops what old weights computed."""
    monkeypatch.setattr(SGLangGroup, "BUCKET_BYTES", 12)
    assert set(push(client)) == {"gather", "load"}
    assert held(worker) == THREE and worker.version == "v-1"
    one_push = ["/pause_generation", "/update_weight_version", "/begin_weight_update",
                *["/update_weights_from_distributed"] * 2, "/end_weight_update", "/update_weight_version",
                "/continue_generation"]  # fmt: skip
    assert worker.paths() == ["/init_weights_update_group", *one_push]
    first, second = (body for path, body in worker.asked if path == "/update_weights_from_distributed")
    (name,) = worker.groups
    shared = {"group_name": name, "abort_all_requests": False}
    assert first == {"names": ["w", "head"], "dtypes": ["float32", "bfloat16"], "shapes": [[2], [2, 1]],
                     "flush_cache": False, **shared}  # fmt: skip
    assert second == {"names": ["norm"], "dtypes": ["bfloat16"], "shapes": [[2, 2]], "flush_cache": True, **shared}
    init = worker.asked[0][1]
    assert init == {"master_address": "127.0.0.1", "master_port": client.transfer.group_port, "rank_offset": 1,
                    "world_size": 2, "group_name": name, "backend": "gloo"}  # fmt: skip
    worker.asked.clear()
    push(client, "v-2", plus=1.0)  # by the same group
    assert worker.paths() == one_push and list(worker.groups) == [name]
    assert worker.held["w"].tolist() == [2.0, 3.0] and worker.version == "v-2"
    client.close()
    assert worker.groups == {} and worker.paths()[-1] == "/destroy_weights_update_group"


def test_a_push_that_was_lost_left_its_session_open(worker, client):
    worker.open = True
    push(client)
    begin, end = "/begin_weight_update", "/end_weight_update"
    assert [path for path in worker.paths() if path in (begin, end)] == [begin, end, begin, end]
    assert held(worker) == THREE and not worker.open


def test_a_group_that_the_server_refuses_is_not_waited_for(worker, client):
    worker.refuse["/init_weights_update_group"] = "no group today"
    with pytest.raises(ServerLost, match=r"forms no NCCL group on port \d+ \(vllm_group_port\): .*no group today"):
        push(client)
    del worker.refuse["/init_weights_update_group"]
    client.transfer.leave_nccl()
    push(client)  # by the same port
    assert held(worker) == THREE


@pytest.mark.parametrize("path", ["/update_weights_from_distributed", "/begin_weight_update", "/end_weight_update"])
def test_a_request_that_is_refused_ends_the_push(worker, client, path):
    """Nobody receives what is being sent. The weights that the server holds then have a name that nobody samples."""
    push(client)
    worker.refuse[path] = "not now"
    with pytest.raises(ServerLost, match="did not take the weights: .*not now"):
        push(client, "v-2", plus=1.0)
    assert worker.version == "loading-v-2" and worker.paths()[-1] == "/continue_generation"
    worker.refuse.clear()
    with pytest.raises(ServerLost, match="its NCCL group is closed"):
        push(client, "v-3")
    client.transfer.leave_nccl()  # as a pool does before it pushes again
    push(client, "v-3", plus=2.0)
    assert worker.held["w"].tolist() == [3.0, 4.0] and worker.version == "v-3" and len(worker.groups) == 1


def test_an_answer_without_success_is_an_error(worker, client):
    """Its status may be 200, as that of a load from disk may be."""
    worker.status, worker.refuse = 200, {"/end_weight_update": "half of it"}
    with pytest.raises(ServerLost, match="did not take the weights: .*half of it"):
        push(client)


def test_a_worker_that_does_not_receive_is_given_up(worker, client, monkeypatch):
    """And what sent to it asks nothing more: the server may have been given to the next push."""
    push(client)
    monkeypatch.setattr(SGLangGroup, "BUCKET_BYTES", 1)
    worker.receives.clear()
    with monkeypatch.context() as patches:  # the last push is to a server that answers, however long it takes
        patches.setattr(client, "healthy", lambda: False)
        with pytest.raises(ServerLost, match="did not take the weights: it did not answer 3 health checks in a row"):
            push(client, "v-2")
    (sender,) = (thread for thread in threading.enumerate() if thread.name == "mt-grpo-nccl")
    worker.asked.clear()
    worker.receives.set()
    sender.join(60)
    assert not sender.is_alive()
    assert not {"/update_weights_from_distributed", "/end_weight_update"} & set(worker.paths())
    client.transfer.leave_nccl()
    push(client, "v-3", plus=2.0)
    assert worker.held["w"].tolist() == [3.0, 4.0]


def test_what_lies_beside_each_other_goes_in_one_request(client, monkeypatch):
    """By hand: blocks of 8, 4 + 4, and 8 bytes, at most 12 in a request but for a larger block."""
    group = SGLangGroup(client, 0, CPU)
    names = {"a.q.weight": 2, "b.q.weight": 1, "b.k.weight": 1, "c.q.weight": 2}
    metadata = [(name, "float32", [count]) for name, count in names.items()]
    for most, expected in ((12, ["a", "bb", "c"]), (16, ["abb", "c"]), (1, ["a", "bb", "c"]), (99, ["abbc"])):
        monkeypatch.setattr(SGLangGroup, "BUCKET_BYTES", most)
        found = ["".join(name[0] for name, _, _ in bucket) for bucket in group._buckets(metadata)]
        assert found == expected, most


@pytest.mark.parametrize(
    ("changes", "on_gpu", "message"),
    [
        ({"dp_size": 2}, False, "has dp_size=2, and SGLang's workers form a group .* by tensor parallelism alone"),
        ({"pp_size": 4}, False, "has pp_size=4"),
        ({"device": "cuda"}, False, "computes on cuda, and the trainer has no GPU. Set weight_sync: disk"),
        ({}, True, "computes on cpu, and the trainer on a GPU"),
    ],
)
def test_what_has_no_group_is_refused(worker, client, monkeypatch, changes, on_gpu, message):
    monkeypatch.setattr(client, "server_info", lambda: {**INFO, **changes})
    with pytest.raises(ServerError, match=f"weight_sync=nccl: {worker.url} .*{message}"):
        client.engine.transport(client, "nccl", on_gpu)
    assert client.engine.transport(client, "auto", on_gpu) == client.engine.transport(client, "disk", on_gpu) == "disk"
    monkeypatch.setattr(client, "server_info", lambda: {**INFO, "tp_size": 4})
    assert client.engine.transport(client, "nccl", False) == "nccl"
