"""Conversations over several servers: which server answers, what moves when one is lost, and what is proven."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from mt_grpo.event_loop import gather_all
from mt_grpo.rollout import Generation
from mt_grpo.server_errors import NoServerLeft, ServerError, ServerLost
from mt_grpo.versions import continues


class Group:
    """The open conversations of one prompt. They are at one server, which computes their prompt once."""

    def __init__(self, pool: Any, number: int, size: int):
        self.pool, self.number, self.size = pool, number, size
        self.server: int | None = None

    def choose(self) -> int:
        """The group's server; where that is lost, another one: the one with the fewest open conversations.

        Raises `NoServerLeft` where none holds the weights.
        """
        pool, joined = self.pool, self.pool.joined
        if self.server not in joined:
            if not joined:
                raise NoServerLeft(f"None of the vLLM servers at {pool.base_url} is left.")
            # Equal loads are dealt out by the group's number, so that ranks do not all begin at the first server.
            place = {n: (n - self.number) % len(pool.servers) for n in joined}
            chosen = min(joined, key=lambda n: (pool.load[n], place[n]))
            if self.server is not None:
                pool.load[self.server] -= self.size
            pool.load[chosen] += self.size
            self.server = chosen
        return self.server

    def end_conversation(self) -> None:
        """One conversation less."""
        self.size -= 1
        if self.server is not None:
            self.pool.load[self.server] -= 1


class Route:
    """The backend of one conversation: its group's server, and another one where that is lost.

    Args:
        pool: The servers (`ServerPool`).
        group: The conversation's group.

    Attributes:
        sampled: (server, its lineage when it was asked) -> when its last answer came. All of them must be proven.
    """

    def __init__(self, pool: Any, group: Group):
        self.pool, self.group = pool, group
        self.sampled: dict[tuple[int, int], float] = {}
        self.tokenizer, self.max_model_len = pool.tokenizer, pool.max_model_len

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, sampling_params: dict[str, Any] | None = None, index: int = 0
    ) -> Generation:
        """As `VLLMServerClient.generate`. What a lost server leaves unanswered is asked of another one.

        Raises `ServerError` if no server is left.
        """
        pool, cancelled_before = self.pool, asyncio.current_task().cancelling()
        while True:
            number = self.group.choose()
            asked = number, pool.servers[number].lineage
            request = asyncio.ensure_future(
                pool.servers[number].generate(prompt_ids, max_tokens, sampling_params, index)
            )
            pool.requests[number].add(request)
            try:
                generation = await request
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling() > cancelled_before or number in pool.joined:
                    raise  # the conversation itself is cancelled
            except ServerError as error:
                is_last = pool.joined in ([], [number])
                if is_last and not (isinstance(error, ServerLost) and await pool.another_answers()):
                    raise
                pool.leave(number, error)
            else:
                self.sampled[asked] = time.monotonic()
                return generation
            finally:
                pool.requests[number].discard(request)
            pool.moved += 1


async def gather_proven(pool: Any, version: str, routes: list[Route], conversations: list[Awaitable]) -> list:
    """The results that are proven to come from the weights `version` and those pushed since; None for all others.

    A restarted server has its first weights and no version. So a result is proven if each server that sampled for it
    reports, after its last answer, a version that `continues` this one. A server that reports another is lost, and
    so is one that does not answer `pool.LOST_AFTER` times in a row while another one does. A conversation whose last
    server is lost goes on with another one, unless something that it sampled is unproven: then it is cancelled. Where
    no server is left, all open conversations are. While weights are pushed no answer is waited for: a server that
    loads has none.

    Raises the first error of a conversation, and `ServerLost` if the last server does not report a version within its
    `timeout` after the last result.
    """
    results: dict[int, Any] = {}
    confirmed: dict[tuple[int, int], float] = {}  # (server, lineage) -> when it was asked, and held right weights
    misses = dict.fromkeys(range(len(pool.servers)), 0)
    tasks = [asyncio.ensure_future(conversation) for conversation in conversations]
    for task, route in zip(tasks, routes):  # also of a task that is cancelled before it begins
        task.add_done_callback(lambda _, group=route.group: group.end_conversation())
    given_up: set[int] = set()

    async def finish(index: int) -> None:
        try:
            results[index] = await tasks[index]
        except NoServerLeft:  # also where one has joined again by now
            given_up.add(index)
        except (Exception, asyncio.CancelledError):  # one that is given up may fail as it is cancelled
            if index not in given_up:
                raise

    def unproven(index: int) -> set[tuple[int, int]]:
        """The servers whose last answer to this conversation is not proven yet, each with its lineage."""
        return {n for n, when in routes[index].sampled.items() if confirmed.get(n, float("-inf")) < when}

    running = asyncio.ensure_future(gather_all([finish(i) for i in range(len(tasks))]))
    give_up = None
    try:
        while True:
            await asyncio.wait({running}, timeout=pool.WATCH_SECONDS)
            if running.done() and pool.joined:
                running.result()
            asked, done = time.monotonic(), len(results.keys() | given_up) == len(tasks)
            numbers, lineages = list(pool.joined), [server.lineage for server in pool.servers]
            held = await asyncio.gather(*(pool.servers[n].held_version() for n in numbers))
            for n, answer in zip(numbers, held):
                misses[n] = 0 if answer is not None or pool.pushing else misses[n] + 1
                holds = continues(answer, version, lineages[n])
                if lineages[n] != pool.servers[n].lineage:  # a push found out meanwhile
                    continue
                if holds:
                    confirmed[n, lineages[n]] = asked
                elif holds is False:
                    pool.leave(n, f"it restarted, and holds the weights {answer!r} instead of {version!r}.")
                elif misses[n] >= pool.LOST_AFTER and (pool.joined != [n] or await pool.another_answers()):
                    pool.leave(n, f"it did not answer {misses[n]} times in a row.")
            kept = {(n, pool.servers[n].lineage) for n in pool.joined}
            for index in range(len(tasks)):
                if index not in results and index not in given_up and unproven(index) - kept:
                    given_up.add(index)
                    tasks[index].cancel()
            if not pool.joined:
                break
            if done:
                if not any(unproven(index) & kept for index in results):
                    break
                give_up = None if pool.pushing else give_up or asked + pool.servers[0].timeout
                if give_up is not None and asked > give_up:
                    raise ServerLost(f"{pool.base_url}: a server does not say which weights it holds: see its log.")
                await asyncio.sleep(pool.WATCH_SECONDS)
    finally:
        running.cancel()
        for task in tasks:
            task.cancel()
    return [None if i not in results or unproven(i) else results[i] for i in range(len(tasks))]
