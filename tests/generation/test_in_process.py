"""The backend that generates in the process of the trainer."""

import re
import threading

import pytest
from processes import on_two_threads
from scripted import ANSWER, CHATML_TOKENIZER, END, call, ids, make_env, within

from mt_grpo.generation.in_process import InProcessBackend
from mt_grpo.rollout import Generation, StopReason


def in_process(generate_batch, any_rank=None) -> InProcessBackend:
    return InProcessBackend(generate_batch, lambda token: token == END, any_rank)


async def ask(backend: InProcessBackend, index: int, rounds: int = 1, max_tokens: int = 5) -> list[Generation]:
    return [await backend.generate([index, k], max_tokens, None, index) for k in range(rounds)]


@pytest.mark.contract("in process")
def test_batches_are_by_turn_and_in_rollout_order_whatever_the_latencies():
    batches = []

    def generate_batch(prompts, max_tokens):
        texts = [CHATML_TOKENIZER.decode(p) for p in prompts]
        numbers = [int(re.search(r"user\n(\d)", text)[1]) for text in texts]
        batches.append([(n, text.count("<result>")) for n, text in zip(numbers, texts, strict=True)])
        say = []
        for n, text in zip(numbers, texts, strict=True):
            turns = n % 3  # 0: answers at once; 1, 2: calls first; the first rollouts have the slowest tools
            slow = call("slow_echo", text="x", seconds=round(0.12 - 0.02 * n, 2))
            say.append(ids(slow if text.count("<result>") < turns else ANSWER))
        return say, [[-0.5] * len(s) for s in say]

    env, backend = make_env(), in_process(generate_batch)
    rollouts = env.start([str(i) for i in range(6)])
    done = within(lambda: backend.serve([env.converse(r, backend) for r in rollouts]))
    assert done == rollouts  # in order
    assert batches == [
        [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0)],
        [(1, 1), (2, 1), (4, 1), (5, 1)],
        [(2, 2), (5, 2)],
    ]
    assert [len(r.turns) for r in rollouts] == [1, 2, 3, 1, 2, 3]
    assert all(r.stop_reason == StopReason.ANSWERED for r in rollouts)
    assert rollouts[0].logprobs == [-0.5] * 18


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_each_sample_is_cut_to_its_own_budget(with_logprobs):
    asked = []

    def generate_batch(prompts, max_tokens):
        asked.append((prompts, max_tokens))
        samples = [[1, 2, 3, 4, 5, 6, 7], [1, 2, END], [1, 2, END], []]
        return samples, [[-j / 8 for j in range(len(s))] for s in samples] if with_logprobs else None

    backend = in_process(generate_batch)
    budgets = [4, 7, 2, 3]
    conversations = [backend.generate([10 + i], budget, None, i) for i, budget in enumerate(budgets)]
    generations = within(lambda: backend.serve(conversations))
    assert asked == [([[10], [11], [12], [13]], 7)]
    assert [g.token_ids for g in generations] == [[1, 2, 3, 4], [1, 2, END], [1, 2], []]
    assert [g.finish_reason for g in generations][:3] == ["length", "stop", "length"]
    expected = [[0.0, -0.125, -0.25, -0.375], [0.0, -0.125, -0.25], [0.0, -0.125], []]
    assert [g.logprobs for g in generations] == (expected if with_logprobs else [None] * 4)


def test_batches_run_in_the_calling_thread():
    threads = []

    def generate_batch(prompts, max_tokens):
        threads.append(threading.current_thread())
        return [[END]] * len(prompts), None

    def serve():
        backend.serve([ask(backend, i, rounds=3) for i in range(4)])
        return threading.current_thread()

    backend = in_process(generate_batch)
    caller = within(serve)
    assert threads == [caller] * 3


async def explode(message: str):
    raise ValueError(message)


@pytest.mark.parametrize("where", ["batch", "conversation", "later"])
def test_an_error_surfaces_and_the_backend_works_again(where):
    """What is left of the failed conversations must not be counted among the next ones."""
    sizes, broken = [], [True]

    def generate_batch(prompts, max_tokens):
        sizes.append(len(prompts))
        if broken[0] and where == "batch":
            raise ValueError("boom")
        return [[END]] * len(prompts), None

    async def later():
        await backend.generate([20], 5, None, 20)
        await explode("boom")

    backend = in_process(generate_batch)

    def fail_and_serve():
        broken[0] = True
        failing = [ask(backend, i) for i in range(20)]
        if where != "batch":
            failing.append(later() if where == "later" else explode("boom"))
        working = [ask(backend, i, rounds=2) for i in range(20)]
        with pytest.raises(ValueError, match="boom"):
            backend.serve(failing)
        broken[0] = False
        sizes.clear()
        return backend.serve(working)

    for _ in range(30):
        results = within(fail_and_serve)
        assert len(results) == 20 and sizes == [20, 20]


@pytest.mark.parametrize("rounds", [(3, 1), (1, 4), (2, 2), (0, 2)])
def test_every_rank_calls_in_every_round(rounds):
    batches = {0: [], 1: []}

    def serve(rank, gather):
        def generate_batch(prompts, max_tokens):
            batches[rank].append((prompts, max_tokens))
            return [[65, END]] * len(prompts), None

        backend = in_process(generate_batch, lambda flag: any(gather(flag)))
        conversations = [ask(backend, i, rounds[rank]) for i in range(2)] if rounds[rank] else []
        return backend.serve(conversations)

    results = on_two_threads(serve)
    assert [len(batches[rank]) for rank in (0, 1)] == [max(rounds)] * 2
    for rank in (0, 1):
        assert batches[rank][: rounds[rank]] == [([[0, k], [1, k]], 5) for k in range(rounds[rank])]
        assert all(len(prompts) == 1 and limit == 1 for prompts, limit in batches[rank][rounds[rank] :])  # dummies
        assert [len(generations) for generations in results[rank]] == [rounds[rank]] * (2 if rounds[rank] else 0)


def test_a_rank_whose_conversation_fails_goes_on_with_dummies_until_the_others_are_done():
    counts = [0, 0]

    def serve(rank, gather):
        def generate_batch(prompts, max_tokens):
            counts[rank] += 1
            return [[END]] * len(prompts), None

        backend = in_process(generate_batch, lambda flag: any(gather(flag)))
        try:
            backend.serve([explode("boom")] if rank == 0 else [ask(backend, i, 3) for i in range(2)])
            return "done"
        except ValueError as error:
            return str(error)

    assert on_two_threads(serve) == ["boom", "done"]
    assert counts == [3, 3]
