"""Several servers: which one gets a group, what moves when one is lost, what is proven, and who joins again."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch
import warm_python
from bench.common import VLLMServer
from fault_proxy import FaultProxy
from server_run import (
    FLAGS,
    MODEL,
    Watched,
    assert_from_the_weights_of_its_version,
    assert_whole,
    make_trainer,
    needs_vllm,
    paused,
    slow_calculator,
)
from warm_vllm import WarmVLLMServer

from mt_grpo.base.errors import ServerError, ServerLost
from mt_grpo.base.event_loop import run_async
from mt_grpo.generation import weight_sync
from mt_grpo.generation.connection import ServerConnection, engine_of
from mt_grpo.generation.samples import tagged
from mt_grpo.generation.server_pool import ServerPool
from mt_grpo.generation.weight_sync import WeightSync
from mt_grpo.rollout import Generation
from mt_grpo.run.trainer import pool_of
from mt_grpo_trainer import MTGRPOConfig, VLLMServerClient


class Stub:
    """A server that samples its own number, and holds the weights `version`."""

    engine = engine_of("vllm")

    timeout, tokenizer, max_model_len, retries, lineage, pushing, NOTICE_SECONDS = 1.0, None, 640, 0, 0, False, 10.0

    def __init__(self, number, log, version="v"):
        self.number, self.log, self.version = number, log, version
        self.seconds, self.asked = 0.0, 0
        self.error = None

    base_url = property(lambda self: f"http://server{self.number}")

    async def generate(self, prompt_ids, max_tokens, sampling_params, index):
        if self.error:
            raise self.error
        await asyncio.sleep(self.seconds)
        self.log.append((self.number, index))
        return Generation([self.number], [-1.0], "stop")

    async def held_version(self):
        self.asked += 1
        return self.version


def make_pool(count, **values):
    log = []
    pool = ServerPool([Stub(n, log) for n in range(count)])
    pool.WATCH_SECONDS, pool.complete, pool.log = 0.05, True, log
    for key, value in values.items():
        setattr(pool, key, value)
    return pool


def run(pool, groups, converse):
    """The results of one conversation per entry of `groups`, which is its group's number."""
    routes = pool.routes(groups)
    conversations = [converse(route, index) for index, route in enumerate(routes)]
    return pool.start_conversations(conversations, "v", routes).result(20)


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def proven(*servers):
    """Wait until what these have sampled is proven: by their answers to questions that were asked from now on."""
    enough = [server.asked + 3 for server in servers]  # one may be under way, and one is not read yet
    while any(server.asked < n for server, n in zip(servers, enough)):
        await asyncio.sleep(0.01)


async def two_turns(route, index):
    return [(await route.generate([1], 8, None, index)).token_ids[0] for _ in range(2)]


@pytest.mark.contract("several servers")
def test_a_group_goes_to_one_server_and_groups_to_the_least_loaded():
    """Six groups of two over three servers: two groups each, dealt out by the groups' numbers."""
    pool = make_pool(3)
    groups = [g for g in range(6) for _ in range(2)]
    assert run(pool, groups, two_turns) == [[g % 3] * 2 for g in groups]
    assert pool.load == [0, 0, 0]
    # On another rank the numbers go on, so that its first group is not at the first server too.
    assert run(pool, [7, 7, 8, 8], two_turns) == [[1, 1], [1, 1], [2, 2], [2, 2]]
    pool.load = [5, 0, 3]  # conversations of an earlier batch are still open
    assert run(pool, [0, 0, 1, 1, 2, 2], two_turns) == [[1, 1]] * 4 + [[2, 2]] * 2


@pytest.mark.contract("a server dies")
def test_the_conversations_of_a_lost_server_go_on_elsewhere():
    """Server 1 is silent from the start. Its group had no answer yet, so nothing of it is lost."""
    pool = make_pool(2)
    pool.servers[1].seconds, pool.servers[1].version = 60.0, None
    assert run(pool, [0, 0, 1, 1], two_turns) == [[0, 0]] * 4
    assert pool.joined == [0] and pool.load == [0, 0] and pool.retries == 2 and pool.requests == [set(), set()]
    assert Counter(pool.log) == {(0, index): 2 for index in range(4)}


@pytest.mark.contract("a server dies")
def test_what_a_lost_server_sampled_without_proof_starts_over():
    """Server 1 answers a first turn, and is another process when it is asked for its version.

    A conversation whose cleanup fails as it is ended ends no run.
    """
    pool = make_pool(2)

    async def converse(route, index):
        turns = [(await route.generate([1], 8, None, index)).token_ids[0]]
        pool.servers[1].version = "default"
        try:
            while 1 in pool.joined:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            if index == 1:
                raise RuntimeError("its cleanup failed") from None
            raise
        return turns + await two_turns(route, index)

    assert run(pool, [0, 1, 1], converse) == [[0, 0, 0], None, None]
    assert pool.joined == [0] and pool.load == [0, 0]
    assert Counter(pool.log) == {(0, 0): 3, (1, 1): 1, (1, 2): 1}  # they were ended, and sampled no more


def test_what_was_proven_before_a_server_was_lost_goes_on():
    """Between the two turns server 1 says its version, and then it is gone: the first turn stays."""
    pool = make_pool(2)

    async def converse(route, index):
        first = (await route.generate([1], 8, None, index)).token_ids[0]
        await proven(pool.servers[1])
        pool.servers[1].version, pool.servers[1].seconds = None, 60.0
        return [first, (await route.generate([1], 8, None, index)).token_ids[0]]

    assert run(pool, [0, 1], converse) == [[0, 0], [1, 0]]
    assert pool.joined == [0]


def test_an_answer_of_a_version_proves_only_what_was_sampled_before_the_question():
    """Server 1 is asked, samples, restarts, and its answer to the question comes late."""
    pool = make_pool(2)
    asked, sampled = threading.Event(), threading.Event()

    async def late():
        asked.set()
        while not sampled.is_set():
            await asyncio.sleep(0.01)
        pool.servers[1].held_version = another
        return "v"

    async def another():
        return "default"

    pool.servers[1].held_version = late

    async def converse(route, index):
        while not asked.is_set():
            await asyncio.sleep(0.01)
        result = await route.generate([1], 8, None, index)
        if index == 1:
            sampled.set()
        return result.token_ids[0]

    assert run(pool, [0, 1], converse) == [0, None]


def test_an_answer_that_was_begun_before_a_restart_is_not_proven():
    """The server restarts and gets its weights while it samples: it reports the right version, of a new lineage."""
    pool = make_pool(1)
    (server,) = pool.servers
    sample = server.generate

    async def restarted_meanwhile(*args):
        generation = await sample(*args)
        server.lineage += 1
        server.version = tagged("v", server.lineage)
        return generation

    async def one_turn(route, index):
        return (await route.generate([1], 8, None, index)).token_ids[0]

    server.generate = restarted_meanwhile
    assert run(pool, [0], one_turn) == [None]
    server.generate = sample
    assert run(pool, [0], one_turn) == [0]  # begun with the weights that were pushed since


def test_a_server_that_refuses_is_left_unless_all_refuse():
    pool = make_pool(3)
    pool.servers[1].error = error = ServerError("400: no")
    assert run(pool, [0, 1, 2], two_turns) == [[0, 0], [2, 2], [2, 2]]
    assert pool.joined == [0, 2]
    for server in pool.servers:
        server.error = error
    with pytest.raises(ServerError, match="400: no"):
        run(pool, [0, 1, 2], two_turns)


def test_a_batch_that_is_cancelled_at_once_leaves_no_load():
    pool = make_pool(2)
    for _ in range(50):
        routes = pool.routes([0, 0, 1])
        pool.start_conversations([two_turns(route, 0) for route in routes], "v", routes).cancel()
    wait_until(lambda: pool.load == [0, 0])


def test_an_error_of_a_conversation_ends_all_of_them():
    pool = make_pool(2)
    ended = []

    async def converse(route, index):
        if index == 1:
            raise RuntimeError("broken tool")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(index)
            raise

    with pytest.raises(RuntimeError, match="broken tool"):
        run(pool, [0, 0, 1], converse)
    assert ended == [0, 2] and pool.load == [0, 0]


class Settled(Stub):
    """A server's side of a push."""

    def __init__(self, number, **values):
        super().__init__(number, [])
        self.up, self.values = True, {"model": "m", "dtype": "torch.float32", "max_model_len": 640, **values}
        self.engines, self.restarts = 1, 0
        self.transfer = SimpleNamespace(forget_restarted=self.forget)

    def forget(self):
        self.restarts += 1

    def _if_up(self, value):
        self.asked += 1
        if not self.up:
            raise ServerLost(f"GET {self.base_url}: refused")
        return value

    def healthy(self, timeout):
        self.asked += 1
        return self.up

    def wait_until_healthy(self, unless):
        deadline = time.monotonic() + self.timeout
        while not (self.up or unless()):
            if time.monotonic() > deadline:
                raise ServerError(f"No vLLM server answers at {self.base_url}")
            time.sleep(0.01)

    def weight_version(self):
        return self._if_up(self.version)

    def server_info(self):
        return self._if_up({"model_config": self.values, "parallel_config": {"data_parallel_size": self.engines}})

    def score(self, ids, rank):
        return self._if_up([-1.0 - (rank or 0)] * (len(ids) - 1))


def settled_pool(*servers, complete=True):
    pool = ServerPool(list(servers))
    pool.complete = complete
    return pool


@pytest.mark.parametrize("config, version, reason", [
    ({"data_parallel_external_lb": True}, "0.32.0", "--data-parallel-external-lb and .* are not supported"),
    ({"data_parallel_hybrid_lb": True}, "0.32.0", "--data-parallel-external-lb and .* are not supported"),
    ({"data_parallel_size": 2}, "0.31.2+cpu", "before vLLM 0.32 its engines sample alike"),
    ({"data_parallel_size": 2}, "0.32.0rc1", None),
])  # fmt: skip
def test_which_engines_behind_an_address_are_refused(config, version, reason):
    server = Settled(0)
    server.server_info = lambda: {"parallel_config": config}
    server.request = lambda *args, read: read({"version": version})
    with pytest.raises(ServerError, match=f"http://server0: {reason}") if reason else contextlib.nullcontext():
        assert server.engine.ranks(server) == [0, 1]


def test_servers_that_differ_are_refused_and_one_that_comes_back_otherwise_is_left_out(caplog):
    servers = Settled(0), Settled(1, dtype="torch.bfloat16")
    pool = settled_pool(*servers, complete=False)
    with pytest.raises(ServerError, match="http://server1 has dtype='torch.bfloat16', expected 'torch.float32'"):
        pool.check_settings()
    pool.complete, servers[1].values["dtype"] = True, "torch.float32"
    pool.check_settings()
    servers[1].values["dtype"] = "torch.bfloat16"
    pool.check_settings()
    assert pool.joined == [0]
    assert "has dtype='torch.bfloat16', expected 'torch.float32'" in caplog.text
    assert "The run has 1 of 2 servers" in caplog.text
    servers[0].values["dtype"] = "torch.bfloat16"
    with pytest.raises(ServerError, match="http://server0 has dtype"):  # none is left
        pool.check_settings()


def test_at_first_no_server_may_be_missing():
    servers = Settled(0), Settled(1)
    pool = settled_pool(*servers, complete=False)
    servers[1].up = False
    for ask in (lambda: pool.find_restarted("v"), pool.check_settings, lambda: pool.scores([1, 2])):
        with pytest.raises(ServerLost, match="http://server1: refused"):
            ask()
    assert pool.joined == [0, 1]


@pytest.mark.contract("a server dies")
def test_a_lost_server_joins_again_when_it_answers():
    servers = Settled(0), Settled(1)
    pool = settled_pool(*servers)
    servers[1].up = False
    assert not pool.find_restarted("v") and pool.joined == [0]
    assert pool.scores([1, 2, 3]) == {0: [[-1.0, -1.0]]}
    servers[1].up, servers[1].version = True, "default"
    assert pool.find_restarted("v")  # so all get the weights
    assert [s.lineage for s in servers] == [0, 1] and [s.restarts for s in servers] == [0, 1]
    servers[1].version = "v+1"
    assert pool.weight_version() == "v" and not pool.find_restarted("v")
    servers[1].version = "v"  # what it was called before it restarted
    assert pool.find_restarted("v") and [s.lineage for s in servers] == [0, 2]
    assert pool.joined == [0] and pool.joining == [1] and set(pool.scores([1, 2])) == {0, 1}
    assert pool.admit() == pool.joined == [0, 1] and pool.joining == []
    servers[0].up = servers[1].up = False
    with pytest.raises(ServerLost):
        pool.find_restarted("v")


class Pushed(Settled):
    """A server that takes pushes, and whose logprobs are the trainer's, -1, or off by `wrong`."""

    def __init__(self, number, **values):
        super().__init__(number, **values)
        self.version, self.wrong, self.pushes = "default", 0.0, []
        self.transfer.server, self.transfer.push = self, self.push
        self.pushed = self.adapter = None
        self.named_adapters = set()

    def score(self, ids, rank):
        return self._if_up([-1.0 - self.wrong] * (len(ids) - 1))

    def push(self, weights, version, expected, device, transfers):
        errors = []
        for server in (transfer.server for transfer in transfers):
            server.pushes.append(version)
            errors.append(None if server.up else ServerLost(f"{server.base_url}: refused"))
            server.version = version if server.up else server.version
        return {"load": 0.0}, errors


@pytest.fixture
def pushing():
    """(push of a version to three servers, the pool)."""
    pool = ServerPool([Pushed(0), Pushed(1), Pushed(2)])
    weights = SimpleNamespace(model=None, named_weights=lambda: iter([]), expected=set(), sharded=False)
    weights.noise = lambda adapter: contextlib.nullcontext()
    accelerator = SimpleNamespace(device="cpu", is_main_process=True)
    sync = WeightSync(pool, SimpleNamespace(dtype=torch.float32), weights, accelerator, [1, 2, 3])
    sync._probe_logprobs = lambda ids=None: torch.tensor([-1.0, -1.0])
    sync._largest_rounding = lambda logprobs, exact: 1e-3
    yield lambda version: sync.sync(version, lambda: None, lambda: None), pool, sync


def test_wrong_weights_are_checked_again_when_their_server_joins_again(pushing):
    """It has the version's name, so nothing but the check tells."""
    push, pool, _ = pushing
    for step in range(10):
        push(f"v-{step}")
    pool.servers[1].wrong = 0.5
    metrics = push("v-10")  # the tenth is checked
    assert pool.joined == [0, 2] and metrics["sync/servers"] == 2 and metrics["sync/logprob_difference"] == 0
    for step in range(11, 14):
        metrics = push(f"v-{step}")
        assert pool.joined == [0, 2] and metrics.get("sync/logprob_difference") == (0 if step == 11 else None)
    assert pool.servers[1].pushes[-1] == "v-11"  # a server that failed while it joined is left alone for a while
    pool.servers[1].wrong = 0.0
    pool._not_before.clear()
    assert push("v-14")["sync/servers"] == 3 and pool.joined == [0, 1, 2]


def test_a_single_server_that_was_lost_gets_the_next_push(pushing, caplog):
    """At once, as there is no other one that could do without it. Nothing is said of several servers."""
    push, pool, sync = pushing
    pool = sync.servers = ServerPool([Pushed(0)])
    push("v-0")
    caplog.clear()
    pool.WATCH_SECONDS, (server,) = 0.05, pool.servers

    async def converse(route, index):
        first = (await route.generate([1], 8, None, index)).token_ids
        server.version = "default"
        await asyncio.sleep(60)
        return first

    routes = pool.routes([0])
    assert pool.start_conversations([converse(routes[0], 0)], "v-0", routes).result(20) == [None]
    assert pool.joined == [] and pool.retries == 0
    assert push("v-1")["sync/servers"] == 1 and pool.joined == [0] and server.version == "v-1"
    assert server.lineage == 1 and not caplog.text


@pytest.mark.contract("proof of weights")
@pytest.mark.parametrize("deaf", [0, 1, 2])
def test_one_of_several_servers_that_ignores_pushes_is_found_at_the_first(pushing, deaf):
    """The trainer's logprobs move by 1 with the noise; one server's stay where they were."""
    push, pool, sync = pushing
    sync._probe_logprobs = lambda ids=None: torch.full((2,), -2.0)
    for number, server in enumerate(pool.servers):
        if number != deaf:
            server.score = lambda ids, rank, server=server: [-1.0 - server.version.endswith("-probe")] * (len(ids) - 1)
    with pytest.raises(ServerError, match=f"A changed weight did not arrive at http://server{deaf}, .* is 1.00e"):
        push("v-0")


@pytest.mark.parametrize("check, pushes", [(1, ["v-0-probe"]), (2, ["v-0-probe", "v-0"])])
def test_a_server_that_restarts_before_a_check_gets_the_weights_again(pushing, check, pushes):
    """Its own weights disagree with the trainer's, and no setting is to blame."""
    push, pool, _ = pushing
    server, score, checks = pool.servers[1], pool.servers[1].score, itertools.count(1)

    def restart(ids, rank):
        if next(checks) == check:
            server.version = "default"
            return [-5.0] * (len(ids) - 1)
        return score(ids, rank)

    server.score = restart
    assert push("v-0")["sync/servers"] == 3 and server.version == "v-0"
    assert server.pushes == [*pushes, "v-0-probe", "v-0"]


def test_one_stale_engine_behind_an_address_is_found(pushing):
    """Its distance counts, and not the mean over the engines."""
    push, pool, sync = pushing
    for step in range(10):
        push(f"v-{step}")
    pool.servers[2].engines, pool.servers[2].request = 4, lambda *args, read: "0.32.0"
    # One engine of four is off by 2e-3, above the tolerance of 1e-3; the mean over the engines is 5e-4.
    pool.servers[2].score = lambda ids, rank: [-1.0 - 2e-3 * (rank == 3)] * (len(ids) - 1)
    push("v-10")
    assert pool.joined == [0, 1]


def test_a_push_while_no_server_answers_waits_for_any(pushing):
    push, pool, sync = pushing
    push("v-0")
    for number in (0, 1, 2):
        pool.leave(number, "lost")
        pool.servers[number].up = False
    threading.Timer(0.5, lambda: setattr(pool.servers[2], "up", True)).start()
    sync.pushed = None
    assert push("v-0")["sync/servers"] == 1 and pool.joined == [2]
    pool.servers[2].up = False
    with pytest.raises(ServerError, match="No vLLM server answers at http://server0"):
        push("v-1")


def test_what_another_rank_lost_joins_anew(pushing, monkeypatch):
    """What one rank cannot prove counts for no other rank either."""
    push, pool, _ = pushing
    push("v-0")
    gather = weight_sync.gather_object
    monkeypatch.setattr(weight_sync, "gather_object", lambda rows: gather(rows) + [[0, 2]] * (rows == [[0, 1, 2]]))
    assert push("v-1")["sync/servers"] == 3 and [server.lineage for server in pool.servers] == [0, 1, 0]


def test_adapters_that_any_rank_names_stay_and_all_ranks_name_the_new_one(pushing, monkeypatch):
    """Rank 0 alone loads and unloads. The name of a restarted server's adapter says so."""
    push, pool, sync = pushing
    push("v-0")
    sync.adapter, sync.weights.of_adapter = SimpleNamespace(r=4), {}
    for number, server in enumerate(pool.servers):
        server.lineage, server.version = number, tagged("v-0", number)
        server.named_adapters = {f"own-{number}"}
    gather = weight_sync.gather_object

    def of_two_ranks(rows):
        return gather(rows) + ([[{"other"}, set(), {"own-2"}]] if isinstance(rows[0][0], set) else [])

    monkeypatch.setattr(weight_sync, "gather_object", of_two_ranks)
    push("v-1")
    assert [server.transfer.in_use for server in pool.servers] == [{"own-0", "other"}, {"own-1"}, {"own-2"}]
    assert [server.adapter for server in pool.servers] == ["v-1", "v-1+1", "v-1+2"]


def test_a_restart_that_one_rank_found_is_known_to_all(pushing, monkeypatch):
    """Rank 0 counts a server's restarts. The others prove their rollouts by the same count."""
    push, pool, _ = pushing
    push("v-0")
    ask = weight_sync.on_main_process

    def answer_of_rank_0(function):
        answer = ask(function)
        return (answer[0], [0, 3, 0]) if isinstance(answer, tuple) and isinstance(answer[1], list) else answer

    monkeypatch.setattr(weight_sync, "on_main_process", answer_of_rank_0)
    push("v-1")
    assert [(server.lineage, server.policy_version) for server in pool.servers] == [(0, 1), (3, 1), (0, 1)]


def test_what_comes_during_a_push_may_be_of_its_weights(pushing):
    """A server goes on before this process knows that the push is whole. So a turn's versions are an interval."""
    push, pool, _ = pushing
    push("v-4")
    original, seen = pool.update_weights, []

    def update_weights(*args):
        seen.append([(server.policy_version, server.newest_version) for server in pool.servers])
        return original(*args)

    pool.update_weights = update_weights
    push("v-5")
    assert seen == [[(4, 5)] * 3]
    assert [(server.policy_version, server.newest_version) for server in pool.servers] == [(5, 5)] * 3


def test_prefixes_are_shared_within_a_push_and_never_during_one(pushing):
    """By the salt of a request: a prefix of old weights is none for new ones, even where the server kept it."""
    push, pool, _ = pushing
    salts, original = [], pool.update_weights

    def salt():
        return [ServerConnection.salt(server) for server in pool.servers]

    def update_weights(*args):
        salts.append([each["cache_salt"] for each in salt() + salt() if each])
        return original(*args)

    assert salt() == [{}] * 3  # before the first push: what a server has is what everybody reads
    push("v-4")
    assert salt() == [{"cache_salt": "v-4"}] * 3
    pool.update_weights = update_weights
    push("v-5")
    assert len(set(salts[0])) == 6 and not {"v-4", "v-5"} & set(salts[0])
    assert salt() == [{"cache_salt": "v-5"}] * 3


class Versioned(Pushed):
    """A server whose answers say which weights they are of. `meanwhile` is called in the middle of a push."""

    unseen = None  # the version that it says where nobody has seen its restart

    async def generate(self, prompt_ids, max_tokens, sampling_params, index):
        version = self.version
        await asyncio.sleep(0.01)
        return Generation([self.number, version], [-1.0], "stop")

    async def held_version(self):
        self.asked += 1
        return self.unseen or self.version

    def meanwhile(self):
        pass

    def push(self, weights, version, expected, device, transfers):
        self.meanwhile()
        for server in (transfer.server for transfer in transfers):
            server.version, server.unseen = tagged(version, server.lineage), None
        return {"load": 0.0}, [None] * len(transfers)


@pytest.fixture
def in_flight(pushing):
    """Three conversations that read who answers with which weights; the second waits after one turn for `goes_on`."""
    push, pool, _ = pushing
    pool.servers[:], pool.WATCH_SECONDS = [Versioned(n) for n in range(3)], 0.02
    push("v-0")
    goes_on, over, routes, read = threading.Event(), threading.Event(), pool.routes([0, 1, 2]), [[], [], []]

    async def converse(route, index):
        while not over.is_set():
            if index != 1 or not read[1] or goes_on.is_set():
                read[index].append(tuple((await route.generate([1], 8, None, index)).token_ids))
            await asyncio.sleep(0.01)
        return read[index]

    conversations = [converse(route, index) for index, route in enumerate(routes)]
    running = pool.start_conversations(conversations, "v-0", routes)
    wait_until(lambda: all(read))
    yield SimpleNamespace(push=push, pool=pool, running=running, read=read, goes_on=goes_on, over=over)
    over.set()


def test_a_server_joins_again_while_conversations_run(in_flight):
    """Until the push is over it holds the weights of a new process. No watch leaves it out again for that."""
    pool, read = in_flight.pool, in_flight.read
    in_flight.goes_on.set()
    pool.servers[0].meanwhile = lambda: run_async(proven(pool.servers[0]))
    pool.servers[1].version = "default"
    wait_until(lambda: pool.joined == [0, 2])
    assert in_flight.push("v-1")["sync/servers"] == 3
    run_async(proven(*pool.servers))
    wait_until(lambda: read[0][-1] == (0, "v-1") and read[2][-1] == (2, "v-1"))
    assert pool.joined == [0, 1, 2]
    in_flight.over.set()
    ended = [versions for versions in in_flight.running.result(20) if versions is not None]
    assert len(ended) >= 2 and {version for versions in ended for _, version in versions} == {"v-0", "v-1"}


def test_a_server_that_restarted_gets_no_conversation_before_its_weights(in_flight):
    """The push finds the restart. A conversation whose turns there are proven goes on meanwhile, at another server."""
    pool, read = in_flight.pool, in_flight.read
    run_async(proven(*pool.servers))  # the first turn of the second conversation; it is in a slow tool
    pool.servers[1].version, pool.servers[1].unseen = "default", "v-0"

    def meanwhile():
        in_flight.goes_on.set()
        wait_until(lambda: len(read[1]) > 2)

    pool.servers[0].meanwhile = meanwhile
    assert in_flight.push("v-1")["sync/servers"] == 3 and pool.joined == [0, 1, 2] and pool.servers[1].lineage == 1
    wait_until(lambda: {version for _, version in read[0] + read[1]} == {"v-0", "v-1"})
    in_flight.over.set()
    assert in_flight.running.result(20) == read
    assert read[1][0] == (1, "v-0") and {number for number, _ in read[1][1:]} <= {0, 2}


def test_an_error_of_a_push_is_of_the_server_that_has_it(pushing):
    """The background loop leaves server 0 while the weights are on their way to both."""
    push, pool, _ = pushing
    push("v-0")

    def push_and_lose(weights, version, expected, device, transfers):
        pool.leave(0, "it did not answer 3 times in a row")
        return {}, [ServerLost("http://server0: refused"), None, None]

    def push_and_fail(weights, version, expected, device, transfers):
        return {}, [None, ServerLost("http://server2: refused")]

    pool.transfer.push = push_and_lose
    pool.update_weights(iter([]), "v-1", {}, torch.device("cpu"))
    assert pool.joined == [1, 2]
    pool.transfer.push = push_and_fail
    pool.update_weights(iter([]), "v-1", {}, torch.device("cpu"))
    assert pool.joined == [1]


def test_a_push_without_servers_says_so_and_walks_to_the_end():
    """Other ranks gather the weights too."""
    client, weights = VLLMServerClient(base_url="http://127.0.0.1:9"), iter({"w": torch.ones(2)}.items())
    with pytest.raises(ServerLost, match="No vLLM server is left to push weights to"):
        client.transfer.push(weights, "v-1", {"w": 4}, torch.device("cpu"), [])
    assert list(weights) == []


def test_a_server_that_loads_weights_is_not_lost():
    """It says nothing meanwhile, for longer than its time limit. Afterwards silence counts again."""
    pool = make_pool(2)
    for server in pool.servers:
        server.version, server.timeout = None, 0.2
    pool.servers[0].pushing = True
    routes = pool.routes([0, 1])
    running = pool.start_conversations([two_turns(r, i) for i, r in enumerate(routes)], "v", routes)
    time.sleep(1.0)
    assert pool.joined == [0, 1] and not running.done()
    for server in pool.servers:
        server.version = "v"
    assert running.result(20) == [[0, 0], [1, 1]]
    for server in pool.servers:
        server.version = None
    pool.servers[0].pushing = False
    with pytest.raises(ServerLost, match="does not say which weights it holds"):
        run(pool, [0, 1], two_turns)
    assert len(pool.joined) == 1  # which has its own time limit, as there is no other one


@pytest.mark.parametrize("urls", [["http://a:1", "http://a:1/"], "http://a:1,,http://b:1", ","])
def test_addresses_that_cannot_work(urls, tmp_path):
    """A server that is listed twice would sample while the other client's push is under way."""
    args = MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    args.vllm_server_base_url = urls
    with pytest.raises(ServerError, match="an empty address, or one that is listed twice"):
        pool_of(args, VLLMServerClient, None)


@pytest.fixture(scope="module")
def servers():
    pair = [WarmVLLMServer(MODEL, *FLAGS).start() for _ in range(2)]
    try:
        yield [server.wait() for server in pair]
    finally:
        for server in pair:
            server.stop()


@pytest.mark.contract_server("several servers", "a server dies")
@needs_vllm
def test_two_servers_train_as_one_and_one_dies_and_comes_back(servers, tmp_path, caplog):
    """A group's requests are all at one server, both get work, and the weights are written once.

    One is killed amid rollouts of step 2: the other takes over what it had, step 4 has both again, nothing is lost.
    """
    killed = threading.Event()

    def seconds(expression):
        if trainer.state.global_step == 2 and not killed.is_set():
            killed.set()
            servers[1].kill()
        return float(trainer.state.global_step == 2)

    class Waits(Watched):
        def _sync_weights(self):
            if self.state.global_step == 4 and not servers[1].healthy():
                servers[1].start().wait()
            super()._sync_weights()

    addresses = [server.url for server in servers]
    trainer = make_trainer(None, tmp_path, slow_calculator(seconds), trainer_class=Waits, max_steps=6,
                           vllm_server_base_url=addresses, num_generations=4)  # fmt: skip
    asked = defaultdict(set)  # step and begin of a prompt -> servers
    for number, client in enumerate(trainer.client.servers):
        post = client._post

        async def recorded(path, payload, read, number=number, post=post):
            asked[trainer.state.global_step, tuple(payload["prompt"][:300])].add(number)
            return await post(path, payload, read)

        client._post = recorded
    written, transfer = [], trainer.client.transfer
    folder = transfer._own_folder
    transfer._own_folder = lambda size: written.append(trainer.state.global_step) or folder(size)
    assert [client.transfer.group_port for client in trainer.client.servers] == [51216, 51217]
    trainer.train()
    assert trainer.state.global_step == 6 and [len(batch) for batch in trainer.batches] == [16] * 6
    prompts = {tuple(r.prompt_ids) for batch in trainer.batches for r in batch}
    by_group = defaultdict(set)
    for (step, ids), numbers in asked.items():
        for prompt in prompts:
            if step < 2 and ids[: len(prompt)] == prompt:
                by_group[step, prompt] |= numbers
    assert len(by_group) == 8 and all(len(numbers) == 1 for numbers in by_group.values())
    assert Counter(next(iter(numbers)) for numbers in by_group.values()) == {0: 4, 1: 4}
    assert [step for step in written if step < 2] == [0, 0, 1]  # two steps, and the probe of the first
    assert trainer.rows("sync/servers") == [2, 2, 2, 1, 2, 2]
    restarted = trainer.rows("rollout/restarted")
    assert restarted[:2] + restarted[3:] == [0] * 5 and restarted[2] <= 8  # of its own groups at most
    assert trainer.weight_sync.num_syncs == 6  # what starts over needs no push: the other server holds the weights
    for batch in trainer.batches:
        assert [r.index for r in batch] == list(range(16))
        assert_whole(batch)
    assert max(trainer.rows("sync/logprob_difference")) < 1e-4
    assert max(trainer.rows("sampling/sampling_logp_difference/mean")) < 1e-4
    assert_from_the_weights_of_its_version(trainer)
    assert f"{servers[1].url} is left out" in caplog.text and f"{servers[1].url} is back" in caplog.text
    for client, server in zip(trainer.client.servers, servers):
        assert client.weight_version() == tagged(trainer.weight_sync.pushed, client.lineage) and not paused(server)
    trainer.client.close()


@needs_vllm
@pytest.mark.slow
def test_two_engines_behind_one_address(tmp_path):
    """vLLM's own data parallelism: both engines get every push, and both are probed."""
    flags = (*FLAGS, "--data-parallel-size", "2")
    with VLLMServer(MODEL, *flags, python=warm_python.executable()) as server, FaultProxy(server.url) as proxy:
        trainer = make_trainer(proxy.port, tmp_path, max_steps=4)
        trainer.train()
        assert max(trainer.rows("sync/logprob_difference")) < 1e-4
        assert max(trainer.rows("sampling/sampling_logp_difference/mean")) < 1e-4
        probes = [r.headers.get("X-data-parallel-rank") for r in proxy.requests
                  if r.path == "/v1/completions" and "prompt_logprobs" in r.payload]  # fmt: skip
        assert probes == ["0", "1"] * 5  # four steps, and the first one's changed norm
        assert_from_the_weights_of_its_version(trainer)
