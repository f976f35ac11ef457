"""Which of several servers hold the weights: those that are lost are left out, and join again with a push."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from mt_grpo.event_loop import at_once
from mt_grpo.server_errors import ServerError, ServerLost
from mt_grpo.versions import tagged

logger = logging.getLogger(__name__)


class ServerMembers:
    """Servers with the same model. One that is lost is left out; it joins again with the next push of weights.

    The background loop reads `joined` and leaves servers while the main thread pushes. So the two lists are replaced
    under a lock, and never changed in place: what was read stays as it was.

    Args:
        servers: One `VLLMServerClient` per server.

    Attributes:
        joined: The numbers of the servers that hold the weights. The same on all ranks after a push; a rank that
            loses one meanwhile leaves it out. Conversations go to these alone.
        joining: Those that get the weights with the push that is under way, on rank 0. INVARIANT: no conversation is
            at one of them, since they hold the weights of a new process until the push is over.
        complete: Whether all servers held the first weights. Before that no server may be missing.
        requests: By server the requests in flight, as tasks.
    """

    RETRY_SECONDS = 30.0  # before a server that was left out is asked again; twice as long each time in a row
    MOST_RETRY_SECONDS = 1800.0
    NOTICE_SECONDS = 10.0  # between two log lines during a wait for any server

    def __init__(self, servers: list[Any]):
        self.servers = list(servers)
        self.joined = list(range(len(servers)))
        self.joining: list[int] = []
        self.complete = False
        self.requests: list[set] = [set() for _ in servers]
        self._not_before: dict[int, float] = {}  # of servers that were left out
        self._losses = [0] * len(servers)  # in a row
        self._lock = threading.Lock()

    @property
    def base_url(self) -> str:
        """The addresses, for messages."""
        return ", ".join(server.base_url for server in self.servers)

    @property
    def members(self) -> list[int]:
        """The servers that get pushes: those that hold the weights, and those that join."""
        return sorted({*self.joined, *self.joining})

    @property
    def pushing(self) -> bool:
        """Whether a push is under way. A server that loads does not say which weights it holds."""
        return any(server.pushing for server in self.servers)

    @pushing.setter
    def pushing(self, value: bool) -> None:
        for server in self.servers:
            server.pushing = value

    def leave(self, number: int, why: Any, joining: bool = False) -> None:
        """Leave a server out. Its open requests are cancelled, and so asked of another one.

        Args:
            number: The server's.
            why: For the log.
            joining: Also if it is joining. A conversation's watch must not say this of a server that it met before.
        """
        with self._lock:
            if number not in (self.members if joining else self.joined):
                return
            self._move([number])
            wait = min(self.RETRY_SECONDS * 2 ** self._losses[number], self.MOST_RETRY_SECONDS)
            self._not_before[number] = time.monotonic() + wait
            self._losses[number] += 1
            left = len(self.members)
        if len(self.servers) > 1:
            rest = f"goes on with {left} of {len(self.servers)} servers" if left else "waits for one"
            logger.warning(
                f"The vLLM server at {self.servers[number].base_url} is left out. The run {rest}, and asks this one "
                f"again in {wait:g} s. The reason: {str(why)[:500]}"
            )

    def _move(self, numbers: list[int], joining: bool = False) -> None:
        """Take servers out of both lists, or into `joining`. Their open requests are cancelled. Under the lock."""
        self.joined = [n for n in self.joined if n not in numbers]
        self.joining = sorted({n for n in self.joining if n not in numbers} | set(numbers if joining else []))
        for number in numbers:
            for request in list(self.requests[number]):
                request.get_loop().call_soon_threadsafe(request.cancel)

    def admit(self) -> list[int]:
        """What joins has the weights now, and gets conversations. Returns who holds the weights. On rank 0."""
        with self._lock:
            self.joined, self.joining = self.members, []
            return self.joined

    async def another_answers(self) -> bool:
        """Whether a server that was left out says which weights it holds."""
        others = [server for number, server in enumerate(self.servers) if number not in self.joined]
        return any(v is not None for v in await asyncio.gather(*(server.held_version() for server in others)))

    def ask(self, question: Callable[[Any], Any]) -> dict[int, Any]:
        """The answers of all members, which are asked at the same time. One that fails is left out.

        Raises the error of a server if none answers, or if not all of them held the first weights yet.
        """

        def answer(number: int) -> Any:
            try:
                return question(self.servers[number])
            except ServerError as error:
                return error

        numbers = self.members
        if not numbers:
            raise ServerLost(f"None of the vLLM servers at {self.base_url} answers.")
        return self.without_errors(dict(zip(numbers, at_once(answer, numbers))))

    def without_errors(self, answers: dict[int, Any]) -> dict[int, Any]:
        """The answers that are no errors. Servers with an error are left out, but for the last ones: it is raised."""
        errors = {number: answer for number, answer in answers.items() if isinstance(answer, ServerError)}
        if errors and (len(errors) == len(answers) or not self.complete):
            raise next(iter(errors.values()))
        for number, error in errors.items():
            self.leave(number, error, joining=True)
        return {number: answer for number, answer in answers.items() if number not in errors}

    def find_restarted(self, held: str | None) -> bool:
        """Whether any server holds other weights than `held`: it restarted, or is back.

        Those join with this push, and begin a new lineage: what they sampled and nobody proved yet is lost. On rank 0.
        `ServerLost` if no server answers.
        """
        new = self._find_back()
        with self._lock:
            self._move(new, joining=True)
        versions = self.ask(lambda server: server.weight_version())
        new += [n for n in versions if held is None or versions[n] != tagged(held, self.servers[n].lineage)]
        new = sorted(set(new) & set(versions))
        with self._lock:  # the lineage is new before a conversation may go there, and after none does
            self._move(new, joining=True)
            for number in new:
                self.servers[number].transfer.held = None
                self.servers[number].lineage += int(self.complete)  # before that nothing was sampled
        return bool(new)

    def _find_back(self) -> list[int]:
        """The servers that were left out, and answer."""
        now, members = time.monotonic(), self.members
        for number in members:
            self._losses[number] = 0
        away = [n for n in range(len(self.servers)) if n not in members and self._not_before.get(n, 0.0) <= now]
        healthy = dict(zip(away, at_once(lambda n: self.servers[n].healthy(), away)))
        for number in away:
            if healthy[number]:
                logger.warning(f"The vLLM server at {self.servers[number].base_url} is back.")
            else:
                self._not_before[number] = time.monotonic() + self.RETRY_SECONDS
        return [number for number in away if healthy[number]]

    def wait_until_healthy(self, unless: Callable[[], Any] = lambda: False) -> None:
        """Wait for all servers before they held the first weights, then for any. As `ServerConnection` does."""
        if not self.complete or len(self.servers) == 1:
            for server in self.servers:
                server.wait_until_healthy(unless)
            return
        began, said, timeout = time.monotonic(), float("-inf"), self.servers[0].timeout
        self._not_before.clear()
        while not unless() and not any(at_once(lambda server: server.healthy(), self.servers)):
            now = time.monotonic()
            if now - began > timeout:
                raise ServerError(f"None of the vLLM servers at {self.base_url} answers after {timeout:g} s.")
            if now - said >= self.NOTICE_SECONDS:
                said = now
                logger.warning(f"Waiting up to {began + timeout - now:.0f} s more for one of {self.base_url}.")
            time.sleep(1.0)
