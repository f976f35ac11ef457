"""One or several servers as one backend: routing of conversations, and requests to all servers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from mt_grpo.base.errors import NoServerLeft, ServerError, ServerLost
from mt_grpo.base.event_loop import at_once, gather_all, start_in_background
from mt_grpo.generation.samples import continues, tagged
from mt_grpo.rollout import Generation

logger = logging.getLogger(__name__)


class Group:
    """The open conversations of one prompt. All are routed to one server, which computes their prompt once."""

    def __init__(self, pool: ServerPool, number: int, size: int):
        self.pool, self.number, self.size = pool, number, size
        self.server: int | None = None

    def choose(self) -> int:
        """The number of the group's server. If it is lost, the one with the fewest open conversations replaces it."""
        pool, joined = self.pool, self.pool.joined
        if self.server not in joined:
            if not joined:
                raise NoServerLeft(f"None of the {pool.title} servers at {pool.base_url} is left in the run.")
            # Equal loads are dealt out by the group's number, so that ranks do not all begin at the first server.
            chosen = min(joined, key=lambda n: (pool.load[n], (n - self.number) % len(pool.servers)))
            if self.server is not None:
                pool.load[self.server] -= self.size
            pool.load[chosen] += self.size
            self.server = chosen
        return self.server

    def end_conversation(self) -> None:
        self.size -= 1
        if self.server is not None:
            self.pool.load[self.server] -= 1


class Route:
    """The backend of one conversation: its group's server, or another one if that is lost."""

    def __init__(self, pool: ServerPool, group: Group):
        self.pool, self.group = pool, group
        # (server, its lineage when it was asked) -> when its last answer came. All of them must be proven.
        self.sampled: dict[tuple[int, int], float] = {}
        self.tokenizer, self.max_model_len = pool.tokenizer, pool.max_model_len

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, sampling_params: dict[str, Any] | None = None, index: int = 0
    ) -> Generation:
        """Sample one continuation (see `VLLMServerClient.generate`). If the server is lost, another one is asked."""
        pool, cancelled_before = self.pool, asyncio.current_task().cancelling()
        while True:
            lineages = [server.lineage for server in pool.servers]  # before the choice: an old one proves nothing
            number = self.group.choose()
            server = pool.servers[number]
            request = asyncio.ensure_future(server.generate(prompt_ids, max_tokens, sampling_params, index))
            pool.requests[number].add(request)
            try:
                generation = await request
                self.sampled[number, lineages[number]] = time.monotonic()
                return generation
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling() > cancelled_before or number in pool.joined:
                    raise  # the conversation itself is cancelled
            except ServerError as error:
                if pool.joined == [number]:
                    raise
                pool.leave(number, error)
            finally:
                pool.requests[number].discard(request)
            server.retries += bool(pool.joined)


async def gather_proven(pool: ServerPool, version: str, routes: list[Route], conversations: list[Awaitable]) -> list:
    """Return the results that provably come from the weights `version` or later ones, and None for all others.

    A result is proven if each server that sampled for it reports, after its last answer, a version that `continues`
    this one: a restarted server has none. A server that reports another is lost, and so is one that is silent
    `pool.LOST_AFTER` times in a row, if there is another one. A conversation of a lost server goes on at another one,
    unless something that it sampled is unproven: then it is cancelled.

    Raises the first error of a conversation, and `ServerLost` if no version comes within `timeout` after all results.
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

    def unproven(index: int) -> set[tuple[int, int]]:  # servers with their lineages
        return {n for n, when in routes[index].sampled.items() if confirmed.get(n, float("-inf")) < when}

    running = asyncio.ensure_future(gather_all([finish(i) for i in range(len(tasks))]))
    give_up = None
    try:
        while True:
            # At full seconds, so that all batches that are in flight share one question to each server.
            await asyncio.wait({running}, timeout=pool.WATCH_SECONDS - time.monotonic() % pool.WATCH_SECONDS)
            if running.done() and pool.joined:
                running.result()
            asked, done = time.monotonic(), len(results.keys() | given_up) == len(tasks)
            numbers, lineages = list(pool.joined), [server.lineage for server in pool.servers]
            answers = await asyncio.gather(*(pool.servers[n].held_version() for n in numbers))
            pushing = pool.servers[0].pushing  # a server that loads weights does not report which ones it holds
            for n, answer in zip(numbers, answers):
                misses[n] = 0 if answer is not None or pushing else misses[n] + 1
                holds = continues(answer, version, lineages[n])
                if lineages[n] != pool.servers[n].lineage:  # a push found out meanwhile
                    continue
                if holds:
                    confirmed[n, lineages[n]] = asked
                elif holds is False:
                    pool.leave(n, f"it restarted and holds the weights {answer!r} instead of {version!r}.")
                elif misses[n] >= pool.LOST_AFTER and pool.joined != [n]:
                    pool.leave(n, f"it did not answer {misses[n]} times in a row.")
            kept = {(n, pool.servers[n].lineage) for n in pool.joined}
            for index in range(len(tasks)):
                if index not in results and index not in given_up and unproven(index) - kept:
                    given_up.add(index)
                    tasks[index].cancel()
            if not pool.joined or done and not any(unproven(index) & kept for index in results):
                break
            if done:
                give_up = None if pushing else give_up or asked + pool.servers[0].timeout
                if give_up is not None and asked > give_up:
                    raise ServerLost(f"A server of {pool.base_url} does not say which weights it holds. See its log.")
                await asyncio.sleep(pool.WATCH_SECONDS)
    finally:
        running.cancel()
        for task in tasks:
            task.cancel()
    return [None if i not in results or unproven(i) else results[i] for i in range(len(tasks))]


class ServerPool:
    """One or several servers with the same model as one backend. A lost one joins again with the next push."""

    BACK_SECONDS = 2.0  # of a push, in which a server that was left out may say that it is back
    RETRY_SECONDS = 600.0  # before one that failed while it joined is asked again: each push would wait for it
    LOST_AFTER = 3  # unanswered questions in a row, after which a server is left while there is another one
    WATCH_SECONDS = 1.0  # between two reads of the servers' versions; no server restarts within this time

    def __init__(self, servers: list[Any]):
        self.servers, self.instance = list(servers), secrets.token_hex(4)  # the latter is in the names of pushes
        self.base_url = ", ".join(server.base_url for server in servers)  # for messages, as is the title
        self.title = servers[0].engine.title
        self.tokenizer = servers[0].tokenizer
        # The servers that hold the weights, the same on all ranks after a push. Conversations go to these alone. The
        # background loop leaves some while the main thread pushes: the lists are replaced under a lock, as a whole.
        self.joined = list(range(len(servers)))
        # Those that get the weights with the push that is under way, on rank 0. INVARIANT: no conversation is routed
        # to them: until the push is over they hold a new process's weights.
        self.joining: list[int] = []
        self.complete = False  # whether all servers held the first weights; before that no server may be missing
        self.requests: list[set] = [set() for _ in servers]  # in flight, as tasks
        self.load = [0] * len(servers)  # this process's open conversations
        self._not_before: dict[int, float] = {}  # of servers that failed while they joined
        self._lock = threading.Lock()
        self.settings: dict[str, Any] | None = None  # of all servers when they were first compared

    @property
    def transfer(self) -> Any:  # of the first server, which writes the weights once for all servers
        return self.servers[0].transfer

    @property
    def max_model_len(self) -> int:
        """The shortest context of all servers, in tokens."""
        return min(server.max_model_len for server in self.servers)

    @property
    def retries(self) -> int:
        """The number of requests that were sent again or moved, since a reader last set it to 0."""
        return sum(server.retries for server in self.servers)

    @retries.setter
    def retries(self, value: int) -> None:
        for server in self.servers:
            server.retries = value

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def routes(self, numbers: list[int]) -> list[Route]:
        """One backend per conversation, given the number of its group. A group shares a server."""
        groups = {number: Group(self, number, numbers.count(number)) for number in dict.fromkeys(numbers)}
        for group in groups.values():
            with suppress(NoServerLeft):  # in this order, so that ranks that share a group mostly choose alike
                group.choose()
        return [Route(self, groups[number]) for number in numbers]

    def start_conversations(
        self, conversations: list[Coroutine], version: str, routes: list[Route]
    ) -> concurrent.futures.Future:
        """Run conversations in the background, each proven to come from the weights `version` (`gather_proven`)."""
        return start_in_background(gather_proven(self, version, routes, conversations))

    @property
    def members(self) -> list[int]:
        """The servers that get pushes: those that hold the weights, and those that join. A single one always does."""
        return [0] if len(self.servers) == 1 else sorted({*self.joined, *self.joining})

    def leave(self, number: int, why: Any, joining: bool = False) -> None:
        """Leave a server out, or one that is joining if `joining` is set. Its open requests go to another one."""
        with self._lock:
            if number not in (self.members if joining else self.joined):
                return
            if number in self.joining:
                self._not_before[number] = time.monotonic() + self.RETRY_SECONDS
            self._move({number})
            left = len(self.members)
        if len(self.servers) > 1:
            logger.warning(
                f"The {self.title} server at {self.servers[number].base_url} is left out until a push finds it again. "
                f"The run has {left} of {len(self.servers)} servers. Reason: {str(why)[:500]}"
            )

    def _move(self, numbers: set[int], joining: bool = False) -> None:
        """Take servers out of both lists, or into `joining`. Their open requests are cancelled. Under the lock."""
        self.joined = [n for n in self.joined if n not in numbers]
        self.joining = sorted({*self.joining} - numbers | (numbers if joining else set()))
        for request in [request for number in numbers for request in list(self.requests[number])]:
            request.get_loop().call_soon_threadsafe(request.cancel)

    def admit(self) -> list[int]:
        """Admit the joining servers, which have the weights now. Returns all that hold the weights. On rank 0."""
        with self._lock:
            self.joined, self.joining = self.members, []
            return self.joined

    def ask(self, question: Callable[[Any], Any], numbers: list[int] | None = None) -> dict[int, Any]:
        """Call `question` for these servers, or all members, at the same time. Returns number -> answer.

        Servers with an error are left out. Raises it if no server remains, or before all have held the first weights.
        """

        def answer(number: int) -> Any:
            try:
                return question(self.servers[number])
            except ServerError as error:
                return error

        numbers = self.members if numbers is None else numbers
        if not numbers:
            raise ServerLost(f"None of the {self.title} servers at {self.base_url} answers. See their logs.")
        return self.without_errors(dict(zip(numbers, at_once(answer, numbers))))

    def without_errors(self, answers: dict[int, Any]) -> dict[int, Any]:
        """The answers that are not errors. Servers with an error are left out, as in `ask`."""
        errors = {number: answer for number, answer in answers.items() if isinstance(answer, ServerError)}
        if errors and (len(errors) == len(answers) or not self.complete):
            raise next(iter(errors.values()))
        for number, error in errors.items():
            self.leave(number, error, joining=True)
        return {number: answer for number, answer in answers.items() if number not in errors}

    def find_restarted(self, held: str | None) -> bool:
        """Whether any server holds other weights than `held`: it restarted, or is back. It joins with this push.

        It begins a new lineage: its unproven samples are lost. For rank 0.
        """
        members, now = self.members, time.monotonic()
        away = [n for n in range(len(self.servers)) if n not in members]
        away = [n for n in away if not members or self._not_before.get(n, 0.0) <= now]
        healthy = at_once(lambda n: self.servers[n].healthy(self.BACK_SECONDS if members else 10.0), away)
        back = {n for n, is_healthy in zip(away, healthy) if is_healthy}
        for number in back:
            logger.warning(f"The {self.title} server at {self.servers[number].base_url} is back.")
        with self._lock:
            self._move(back, joining=True)
        versions = self.ask(lambda server: server.weight_version())
        new = {n for n in versions if held is None or versions[n] != tagged(held, self.servers[n].lineage)}
        new |= back & versions.keys()
        with self._lock:  # the lineage is new before a conversation may go there, and after none does
            self._move(new, joining=True)
            for number in new:
                self.servers[number].lineage += int(self.complete)  # before that nothing was sampled
        for number in new:
            self.servers[number].transfer.forget_restarted()
        return bool(new)

    def wait_until_healthy(self, unless: Callable[[], Any] = lambda: False) -> None:
        """Wait until all servers are healthy; once all have held the first weights, until any of them is."""
        healthy: list[Any] = []

        def wait(server: Any) -> None:
            server.wait_until_healthy(lambda: unless() or (self.complete and healthy))
            healthy.append(server)

        self.ask(wait, list(range(len(self.servers))))

    def weight_version(self) -> str:
        """The versions that all servers hold, each without its server's lineage: one, if they hold the same."""
        versions = self.ask(lambda server: server.weight_version().removesuffix(tagged("", server.lineage)))
        return "; ".join(sorted(set(versions.values())))

    def check_settings(self) -> None:
        """Compare the servers' settings with each other and with those from before a restart."""
        answers = self.ask(lambda server: server.engine.settings(server))
        self.settings = self.settings or next(iter(answers.values()))
        for number, settings in answers.items():
            if other := [f"{k}={settings[k]!r}, expected {v!r}" for k, v in self.settings.items() if settings[k] != v]:
                where = f"The {self.title} server at {self.servers[number].base_url}"
                answers[number] = ServerError(f"{where} has {'; '.join(other)}. Start all servers alike.")
        self.without_errors(answers)

    def update_weights(self, *push: Any) -> dict[str, float]:
        """Push weights to all members, written once. `push`: arguments of `VLLMServerClient.update_weights`."""
        numbers = self.members  # once: the background loop may leave one meanwhile
        seconds, errors = self.transfer.push(*push, [self.servers[number].transfer for number in numbers])
        self.without_errors(dict(zip(numbers, errors)))
        return seconds

    def scores(self, token_ids: list[int]) -> dict[int, list[list[float]]]:
        """Server number -> the logprobs of `token_ids[1:]` from each of its engines (`ServerConnection.score`)."""
        return self.ask(lambda server: [server.score(token_ids, rank) for rank in server.engine.ranks(server)])
