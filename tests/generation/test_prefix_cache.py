"""Shares of prompts that were computed before: servers' own counters, and records, counted by hand."""

import http.server
import threading
from types import SimpleNamespace

import pytest

from mt_grpo.generation.connection import ServerConnection
from mt_grpo.generation.engines import ENGINES
from mt_grpo.generation.prefix_cache import HIT_RATE, PrefixCacheCounts, read_counters
from mt_grpo.reports.metrics import conversation_columns, conversation_metrics
from mt_grpo.rollout import Context, Rollout, StopReason, Turn

PAGE = """# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {looked_up:.1f}
vllm:prefix_cache_queries_created{{engine="0",model_name="m"}} 1.79e+09
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits:.1f}
vllm:external_prefix_cache_queries_total{{engine="0",model_name="m"}} 7.0
"""
OTHER = 'vllm:num_requests_running{{engine="0"}} 1.0\n'  # a server that does not cache prompts


@pytest.fixture
def served():
    """Servers whose pages a test sets, by number; None is an error, and OTHER a page without the counters."""
    pages, running = {}, []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            page = pages[self.server.server_address[1]]
            assert self.path == "/metrics"
            self.send_response(200 if page else 404)
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *args):
            pass

    def start(looked_up, hits):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        port = server.server_address[1]

        def say(looked_up, hits):
            page = OTHER if looked_up is OTHER else PAGE
            pages[port] = None if looked_up is None else page.format(looked_up=looked_up, hits=hits)

        say(looked_up, hits)
        return ServerConnection(f"http://127.0.0.1:{port}", None, 10.0, 10.0), say, server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_the_share_since_the_last_time_of_all_servers(served):
    one, say_one, _ = served(1000, 900)  # of runs before this one
    other, say_other, _ = served(0, 0)
    counts, llm = PrefixCacheCounts(), SimpleNamespace(servers=[one, other])
    assert counts.metrics(llm) == {}
    say_one(1100, 950), say_other(300, 150)
    assert counts.metrics(llm) == {HIT_RATE: (50 + 150) / (100 + 300)}
    assert counts.metrics(llm) == {}  # nothing was asked
    say_one(40, 10)  # it restarted
    assert counts.metrics(llm) == {HIT_RATE: 10 / 40}


@pytest.mark.parametrize("nothing", [None, OTHER], ids=["an error", "other counters"])
def test_a_server_that_does_not_count_is_left_out(served, nothing):
    one, say, _ = served(10, 0)
    other, say_other, _ = served(nothing, None)
    counts, llm = PrefixCacheCounts(), SimpleNamespace(servers=[one, other])
    assert counts.metrics(llm) == {}
    say(20, 5), say_other(1000, 1000)
    assert counts.metrics(llm) == {HIT_RATE: 0.5}
    say_other(1010, 1005), say(20, 5)
    assert counts.metrics(llm) == {HIT_RATE: 0.5}


def test_the_counters_of_sglang():
    """Its page, before the first hit and behind it: each source of hits has a line."""
    line = 'sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="m"} 78.0\n'
    hits = "".join(
        f'sglang:cached_tokens_total{{cache_source="{source}",engine_type="unified",model_name="m"}} {count}\n'
        for source, count in (("device", 55.0), ("host", 2.0))
    )
    names = ENGINES["sglang"].PREFIX_COUNTERS
    assert [read_counters(page, names) for page in ("", line, line + hits)] == [None, (78.0, 0), (78.0, 57.0)]


def test_a_server_that_is_gone_is_left_out(served):
    one, say, running = served(10, 0)
    counts, llm = PrefixCacheCounts(), SimpleNamespace(servers=[one])
    counts.metrics(llm)
    running.shutdown(), running.server_close()
    assert counts.metrics(llm) == {}


def test_a_backend_without_servers_has_no_share():
    assert PrefixCacheCounts().metrics(SimpleNamespace()) == {}


def test_tokens_that_were_read_again_by_hand():
    """Of 38 tokens 14. The third record begins as the second one does. What is sampled anew is not read again."""

    def turn(*ids, observed=(), context=None):
        made = Turn(list(ids), None, "", "stop", observation_ids=list(observed))
        made.context = context and Context([], context)
        return made

    first = Rollout([], [1, 2, 3], turns=[
        turn(10, 11, observed=[20, 21]),  # 1 2 3 10 11 20 21
        turn(12, context=[1, 2, 3, 10, 11, 9, 9]),  # 5 again
        turn(13, 14, context=[1, 2, 3, 10, 11, 9, 8]),  # 6 again, 5 of them of the first record
        turn(10, 5, context=[1, 2, 3]),  # 3 again
    ])  # fmt: skip
    second = Rollout([], [1, 2, 3, 4], turns=[turn(10, 11, observed=[20, 21]), turn(12)])  # one record of 9
    first.stop_reason = second.stop_reason = StopReason.ANSWERED
    accelerator = SimpleNamespace(device="cpu")
    metrics, _ = conversation_metrics(conversation_columns([first, second], accelerator, uneven=True))
    assert metrics["records/tokens_read_again"] == pytest.approx(14 / 38)
    assert metrics["records/mean"] == 2.5
