"""Reward functions: how they are called, in the main thread and within their time, and the numbers that they give."""

import asyncio
import functools
import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.testing import assert_close
from trl.trainer.utils import get_callable_name

import mt_grpo_trainer as mt
from mt_grpo.base.errors import RunError, RunStopped
from mt_grpo.base.event_loop import run_async
from mt_grpo.conversation.tools.running import ToolsUnavailable
from mt_grpo.rollout import Rollout, StopReason, ToolCall, ToolResult, Turn
from mt_grpo.run.trainer import ResumableTrainer
from mt_grpo.training.batch import Batch
from mt_grpo.training.further_credit import check_advantages
from mt_grpo.training.rewards import (
    RewardFunctions,
    Scores,
    check_reward_values,
    check_rewards,
    environment_rewards,
    named,
    reward_tensors,
    run_rewards,
    waits,
)

CPU = torch.device("cpu")
COLUMNS = {"prompts": [[], []], "environments": [object(), object()]}
FOREVER = threading.Event()  # nobody sets it


def scored(*funcs, timeout=60.0, **columns):
    return run_rewards(list(funcs), COLUMNS | columns, timeout)


def test_a_tool_that_sets_a_signal_is_named(monkeypatch, caplog):
    """Its error is nothing that the policy did: as an observation it would teach not to call the tool."""

    def query() -> str:
        """Look it up."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def catches() -> str:
        """Look it up."""
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except ValueError as error:
            return str(error)

    env = mt.MultiTurnToolEnv([query, catches], system_prompt=None)
    with pytest.raises(ToolsUnavailable, match="^query sets a signal handler"):
        run_async(env.call_tool(ToolCall("query", {})))
    monkeypatch.setattr("mt_grpo.base.errors._told", set())
    assert run_async(env.call_tool(ToolCall("catches", {}))).error is None
    assert "catches sets a signal handler" in caplog.text


def test_a_connection_of_another_call_is_named():
    with closing(sqlite3.connect(":memory:")) as connection:

        def query() -> str:
            """Look it up."""
            return str(connection.execute("SELECT 1").fetchall())

        env = mt.MultiTurnToolEnv([query], system_prompt=None)
        with pytest.raises(ToolsUnavailable, match="^query has an SQLite connection of another call"):
            run_async(env.call_tool(ToolCall("query", {})))


def test_a_reward_limits_its_own_time_by_sigalrm():
    """As math-verify does."""
    before, (left, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)  # pytest's own limit

    class Slow(Exception):
        pass

    def stop(signum, frame):
        raise Slow

    def reward(**kwargs):
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            FOREVER.wait()
        except Slow:
            return [0.25, 0.25]

    try:
        assert scored(reward) == [[0.25, 0.25]]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left)


def catches_exceptions(**kwargs):
    """As a reward that is 0 for whatever fails."""
    while True:
        try:
            time.sleep(3600)
        except Exception:
            return [0.0, 0.0]


def catches_everything(prompts, **kwargs):
    """A bare `except` around each rollout: the interruption of one becomes its reward, and the next ones go on."""
    rewards = []
    for _ in prompts:
        try:
            FOREVER.wait() if not rewards else None
            rewards.append(1.0)
        except:  # noqa: E722
            rewards.append(0.0)
    return rewards


def hidden(**kwargs):
    """A decorator hides that it is async."""

    async def never():
        await asyncio.sleep(3600)

    return never()


async def blocks(**kwargs):
    time.sleep(0.7)
    return [1.0, 1.0]


def asks_again(**kwargs):
    while True:
        try:
            time.sleep(0.3)
        except BaseException:
            time.sleep(0.2)


@pytest.mark.parametrize("reward", [catches_exceptions, catches_everything, hidden, blocks, asks_again])
def test_a_reward_that_hangs_ends_in_its_time_by_its_name(reward):
    with pytest.raises(RuntimeError, match=f"Reward {reward.__name__} took longer"):
        scored(reward, timeout=0.2)
    assert scored(lambda **kwargs: [1.0, 1.0]) == [[1.0, 1.0]]  # a late signal ends no later reward


@contextmanager
def stoppable():
    """The trainer's handling of signals, as during the rewards of a step."""
    trainer = SimpleNamespace(_stop_signal=None, _interruptible=False, llm=None, state=SimpleNamespace(global_step=3))
    with ResumableTrainer.stop_on_signals(trainer):
        yield trainer


def test_a_signal_to_a_child_that_a_tool_forked_is_not_the_runs():
    ready, tell = os.pipe()
    with stoppable() as trainer:
        while not (child := os.fork()):
            os.write(tell, b".")
            FOREVER.wait()
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
        assert trainer._stop_signal is None


@pytest.mark.parametrize("catches", [Exception, BaseException])
def test_a_stop_during_a_reward_stops_the_run_whatever_the_reward_catches(catches):
    def reward(**kwargs):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            FOREVER.wait(60)
        except catches:
            pass
        return [0.0, 0.0]

    with stoppable() as trainer, pytest.raises(RunStopped, match="SIGTERM at step 3"):
        ResumableTrainer._on_all_ranks(trainer, lambda: scored(reward) and None, "Rewards")


def test_the_first_error_is_raised_also_of_async_ones_and_system_exit_ends_no_run():
    async def broken(**kwargs):
        raise KeyError("gold")

    def leaves(**kwargs):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="Reward broken raised KeyError: 'gold'"):
        scored(lambda **kwargs: [0.0, 0.0], broken)

    def cancelled(**kwargs):
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="Reward leaves raised RuntimeError: SystemExit: 3"):
        scored(leaves, broken)
    with pytest.raises(RuntimeError, match="Reward cancelled raised RuntimeError: CancelledError"):
        scored(cancelled)


def test_what_ends_a_process_ends_with_its_reward(monkeypatch):
    calls = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *a, **k: calls.append((a, k)))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    scored(lambda **kwargs: calls.append("called") or [1.0, 1.0], timeout=5.0)
    assert calls == [((35.0,), {"exit": True, "file": 2}), "called", "cancelled"]


def test_async_ones_wait_beside_the_others_and_values_keep_their_places():
    begun, local_begun = threading.Event(), threading.Event()

    async def asks(prompts, **kwargs):
        begun.set()
        assert await asyncio.to_thread(local_begun.wait, 60)  # one after another, the other would not have begun
        return [3.0, 3.0]

    def local(**kwargs):
        local_begun.set()
        assert begun.wait(60)
        return [1.0, 2.0]

    def hidden(**kwargs):  # a decorator hides that it is async
        return asks(**kwargs)

    assert scored(local, asks, hidden) == [[1.0, 2.0], [3.0, 3.0], [3.0, 3.0]]


def length(completions, target, **kwargs):
    return [-abs(len(text) - target) for text in completions]


class Length:
    def __init__(self, target):
        self.target = target

    def __call__(self, completions, **kwargs):
        return length(completions, self.target)


class Judge:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [0.5] * len(completions)


async def judged(completions, score, **kwargs):
    return [score] * len(completions)


def test_partials_and_objects_are_rewards_by_the_names_that_trl_gives_them():
    funcs = [functools.partial(length, target=2), Length(3), Judge(), functools.partial(judged, score=0.25)]
    check_rewards([], funcs)
    (found,) = named(funcs)
    assert [func.__name__ for func in found] == ["length", "Length", "Judge", "judged"]
    assert [func.__name__ for func in found] == [get_callable_name(func) for func in funcs]
    assert list(map(waits, found)) == [False, False, True, True] and named(found)[0] == found  # once is enough
    assert scored(*found, completions=["a", "abc"]) == [[-1, -1], [-2, 0], [0.5, 0.5], [0.25, 0.25]]


def test_rewards_of_one_name_are_apart_and_the_main_one_counts_most():
    """Each has its own weight, next to an environment of that name, whose weight is 1."""

    class Game:
        def reset(self, **row):
            pass

        def get_reward(self):
            return 0.125

    funcs, weights = [length, functools.partial(length, target=1), judged], [1.0, 2.0, 4.0]
    found = RewardFunctions.of([judged], funcs, mt.MultiTurnToolEnv([], None, environment=Game), [0.5], weights)
    assert found.names == ["judged", "length", "length_2", "judged_2", "Game"]
    assert list(found.weights) == [0.5, *weights, 1.0] and waits(found.functions[3])
    assert RewardFunctions([length, length, judged], [5.0, 0.5, -2.0], 1).main_outcome == "judged"


@pytest.mark.parametrize("number", [torch.ones(2), "1", 10**400, float("inf"), [1.0]])
def test_what_is_no_number_is_told_by_the_rewards_name(number):
    rollouts = [Rollout([], [])]
    with pytest.raises(ValueError, match="^Reward judged returned"):
        check_reward_values([number], "judged", rollouts, per_turn=True)
    check_reward_values([torch.tensor(1.0)], "judged", rollouts, per_turn=True)


@pytest.mark.parametrize(
    "draw, seed, state_of",
    [
        (lambda: torch.rand(1).item(), torch.manual_seed, lambda: torch.get_rng_state().tolist()),
        (random.random, random.seed, random.getstate),
        (numpy.random.rand, numpy.random.seed, lambda: [each.tolist() for each in numpy.random.get_state()[1:2]]),
    ],
    ids=["torch", "random", "numpy"],
)
def test_a_reward_that_seeds_changes_nothing_of_the_run(draw, seed, state_of):
    """It gets numbers of its own, which differ from step to step and are the same where the run is resumed."""

    def draws(prompts, **kwargs):
        drawn = draw()
        seed(0)
        return [drawn] * len(prompts)

    rewards = RewardFunctions([draws], [1.0], 0)
    batch = Batch([{"prompt": []}], 1, rollouts=[Rollout([], [])])

    def values(step):
        columns = {"trainer_state": SimpleNamespace(global_step=step), "log_extra": print, "log_metric": print}
        return rewards.score(batch, columns, 60.0, CPU)

    for set_seed in (torch.manual_seed, seed):
        set_seed(42)
    before = str(state_of())
    first, second = values(0), values(1)
    assert str(state_of()) == before and torch.initial_seed() == 42
    assert first == values(0) != second
    batch.num_rounds = 1
    assert values(0) != first  # a round of its step has its own


def test_a_turn_is_paid_for_all_its_results_and_for_none_where_none_pays():
    def look(text: str) -> ToolResult:
        """Look.

        Args:
            text: Where.
        """

    (tool,), outcome = environment_rewards(None, {"look": look})
    given = [[0.5, None, 0.25], [None], [], [0.0]]
    turns = [SimpleNamespace(results=[ToolResult("", reward=reward) for reward in rewards]) for rewards in given]
    assert tool(rollout_turns=[turns]) == [[0.75, None, None, 0.0]] and outcome == []


def test_a_reward_of_a_result_that_nothing_counts_is_told(caplog, monkeypatch):
    """No annotation says that `pay` may give one. Where one does, the run counts it, and says nothing."""
    monkeypatch.setattr("mt_grpo.base.errors._told", set())
    turn = Turn([5], [-0.5], "", "stop", [ToolCall("pay", {})], [ToolResult("paid", reward=0.5)])
    batch = Batch([{"prompt": []}], 1)
    batch.rollouts = [Rollout([], [4], 0, [turn], StopReason.ANSWERED)]

    def pay():
        """Pay."""

    def announced() -> ToolResult:
        """Pay."""

    def match(completions, **kwargs):
        return [1.0] * len(completions)

    for tool, names, expected, told in (
        (announced, ["tool", "match"], [[[0.5]], [1.0]], 0), (pay, ["match"], [[1.0]], 1)
    ):  # fmt: skip
        functions = RewardFunctions.of([], [match], SimpleNamespace(environments=None, tools={"pay": tool}))
        assert functions.names == names
        assert functions.score(batch, {}, 5.0, CPU) == expected
        assert sum("The tool pay returned the reward 0.5" in record.message for record in caplog.records) == told


def rollout(*observations):
    """A turn per observation, all of the same token."""
    return Rollout([], [1], turns=[Turn([5], None, "", "stop", observation_ids=ids) for ids in observations])


@pytest.mark.parametrize("value", [[1.0], [1.0] * 3])
def test_a_list_has_one_value_per_turn(value):
    check_reward_values([[1.0, None]], "paid", [rollout([7], [])], per_turn=True)
    with pytest.raises(ValueError, match=f"paid returned {len(value)} values for rollout 1"):
        check_reward_values([0.5, value], "paid", [rollout([7]), rollout([7], [])], per_turn=True)


def test_a_function_may_give_lists_numbers_and_nothing():
    whole, per_turn = reward_tensors([[[0.5, None], 2.0, None, []]], 2, 1)
    assert_close(whole, torch.tensor([[torch.nan], [2.0], [torch.nan], [torch.nan]]), equal_nan=True)
    assert_close(per_turn[:, :, 0], torch.tensor([[0.5, torch.nan], *[[torch.nan, torch.nan]] * 3]), equal_nan=True)
    table = Scores(torch.tensor([[torch.nan]]), torch.tensor([[[0.5]]])).weighted(torch.tensor([2.0]))
    assert (table["outcome"].tolist(), table["turn"].tolist()) == ([0.0], [[1.0]])


@pytest.mark.parametrize(
    "turn, rollout_turn, says",
    [([0.6e18, 0.6e18], torch.nan, "add up to 1.2e"), ([torch.nan, torch.nan], 2e18, "add up to 2e")],
)
def test_a_small_coefficient_makes_no_sum_small(turn, rollout_turn, says):
    """Other estimators add rewards up before they are weighed."""
    flags, states = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.long)
    table = mt.RewardTable(torch.zeros(1), torch.tensor([rollout_turn]), torch.tensor([turn]), flags, flags, states)
    with pytest.raises(RunError, match=says):
        check_advantages(table, torch.zeros(1, 2), 3, 0.01)
