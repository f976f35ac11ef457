"""One or several vLLM servers as one backend: which of them hold the weights, and what is asked of all of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import torch

from mt_grpo.event_loop import at_once, start_in_background
from mt_grpo.rollout import Generation
from mt_grpo.routes import Group, Route, gather_proven
from mt_grpo.server_errors import ServerError, ServerLost
from mt_grpo.versions import tagged

logger = logging.getLogger(__name__)


def engine_ranks(server: Any) -> list[int | None]:
    """The data-parallel ranks behind a server's address; `[None]` where there is one engine.

    Raises `ServerError` if vLLM shares its engines out among addresses: a push would not reach all of them.
    """
    config = server.server_info().get("parallel_config") or {}
    if config.get("data_parallel_external_lb") or config.get("data_parallel_hybrid_lb"):
        raise ServerError(
            f"{server.base_url}: --data-parallel-external-lb and --data-parallel-hybrid-lb are not supported. Start "
            "vLLM without them, or several servers, and name them all in vllm_server_base_url."
        )
    count = config.get("data_parallel_size", 1)
    return list(range(count)) if count > 1 else [None]


class ServerPool:
    """Servers with the same model. One that is lost is left out; it joins again with the next push of weights.

    Args:
        servers: One `VLLMServerClient` per server.

    Attributes:
        joined: The numbers of the servers that hold the weights. The same on all ranks after a push; a rank that
            loses one meanwhile leaves it out. Conversations go to these alone.
        complete: Whether all servers held the first weights. Before that no server may be missing.
        load: Open conversations by server, of this process.
        moved: Requests asked of another server, since a reader last set it to 0.
    """

    LOST_AFTER = 3  # unanswered questions in a row, after which a server is left while there is another one
    RETRY_SECONDS = 30.0  # before a server that was left out is asked again; twice as long each time in a row
    MOST_RETRY_SECONDS = 1800.0
    NOTICE_SECONDS = 10.0  # between two log lines during a wait for any server
    WATCH_SECONDS = 1.0  # between two reads of the servers' versions; no server restarts within this time

    def __init__(self, servers: list[Any]):
        self.servers = list(servers)
        self.joined = list(range(len(servers)))
        self.complete = False
        self.load = [0] * len(servers)
        self.requests: list[set] = [set() for _ in servers]  # in flight, as tasks
        self.moved = 0
        self._settings: dict[str, Any] | None = None
        self._not_before: dict[int, float] = {}  # of servers that were left out
        self._losses = [0] * len(servers)  # in a row

    # -- what a single client has, too --

    @property
    def base_url(self) -> str:
        """The addresses, for messages."""
        return ", ".join(server.base_url for server in self.servers)

    @property
    def tokenizer(self) -> Any:
        return self.servers[0].tokenizer

    @property
    def max_model_len(self) -> int | None:
        """The shortest context of all servers, in tokens."""
        return min((s.max_model_len for s in self.servers if s.max_model_len is not None), default=None)

    @property
    def transfer(self) -> Any:
        """What writes the weights, once for all servers."""
        return self.servers[0].transfer

    @property
    def instance(self) -> str:
        """As a client's: tells this run's pushes from another run's."""
        return self.servers[0].instance

    @instance.setter
    def instance(self, value: str) -> None:
        for server in self.servers:
            server.instance = value

    @property
    def retries(self) -> int:
        """As a client's."""
        return self.moved + sum(server.retries for server in self.servers)

    @retries.setter
    def retries(self, value: int) -> None:
        self.moved = value
        for server in self.servers:
            server.retries = value

    def close(self) -> None:
        for server in self.servers:
            server.close()

    # -- conversations --

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, sampling_params: dict[str, Any] | None = None, index: int = 0
    ) -> Generation:
        """As `VLLMServerClient.generate`, by the server whose turn it is. Nothing is proven of its weights."""
        route = Route(self, Group(self, index, 1))
        try:
            return await route.generate(prompt_ids, max_tokens, sampling_params, index)
        finally:
            route.group.end_conversation()

    def routes(self, numbers: list[int]) -> list[Route]:
        """A backend for each conversation, of the groups with these numbers."""
        groups = {number: Group(self, number, numbers.count(number)) for number in dict.fromkeys(numbers)}
        for group in groups.values():
            if self.joined:  # in this order, so that ranks that share a group mostly choose alike
                group.choose()
        return [Route(self, groups[number]) for number in numbers]

    def start_conversations(
        self, conversations: list[Coroutine], version: str, routes: list[Route]
    ) -> concurrent.futures.Future:
        """Run conversations in the background, each proven to come from the weights `version` (`gather_proven`)."""
        return start_in_background(gather_proven(self, version, routes, conversations))

    # -- who belongs to it --

    def leave(self, number: int, why: Any) -> None:
        """Leave a server out. Its open requests are cancelled, and so asked of another one."""
        if number not in self.joined:
            return
        self.joined.remove(number)
        wait = min(self.RETRY_SECONDS * 2 ** self._losses[number], self.MOST_RETRY_SECONDS)
        self._not_before[number] = time.monotonic() + wait
        self._losses[number] += 1
        for request in list(self.requests[number]):
            request.get_loop().call_soon_threadsafe(request.cancel)
        if len(self.servers) > 1:
            count = f"{len(self.joined)} of {len(self.servers)} servers"
            rest = f"goes on with {count}" if self.joined else "waits for one"
            logger.warning(
                f"The vLLM server at {self.servers[number].base_url} is left out. The run {rest}, and asks this one "
                f"again in {wait:g} s. The reason: {str(why)[:500]}"
            )

    async def another_answers(self) -> bool:
        """Whether a server that was left out says which weights it holds."""
        others = [server for number, server in enumerate(self.servers) if number not in self.joined]
        return any(v is not None for v in await asyncio.gather(*(server.held_version() for server in others)))

    def _ask(self, question: Callable[[Any], Any], numbers: list[int]) -> dict[int, Any]:
        """The answers of these servers, which are asked at the same time. One that fails is left out.

        Raises the error of a server if none answers, or if not all of them held the first weights yet.
        """

        def ask(number: int) -> Any:
            try:
                return question(self.servers[number])
            except ServerError as error:
                return error

        if not numbers:
            raise ServerLost(f"None of the vLLM servers at {self.base_url} answers.")
        return self._without_errors(dict(zip(numbers, at_once(ask, numbers))))

    def _without_errors(self, answers: dict[int, Any]) -> dict[int, Any]:
        """The answers that are no errors. Servers with an error are left out, but for the last ones: it is raised."""
        errors = {number: answer for number, answer in answers.items() if isinstance(answer, ServerError)}
        if errors and (len(errors) == len(answers) or not self.complete):
            raise next(iter(errors.values()))
        for number, error in errors.items():
            self.leave(number, error)
        return {number: answer for number, answer in answers.items() if number not in errors}

    def _rejoin(self) -> list[int]:
        """Take in again what answers, and return its numbers."""
        for number in self.joined:
            self._losses[number] = 0
        now = time.monotonic()
        away = [n for n in range(len(self.servers)) if n not in self.joined and self._not_before.get(n, 0.0) <= now]
        healthy = dict(zip(away, at_once(lambda n: self.servers[n].healthy(), away)))
        back = [number for number, answers in healthy.items() if answers]
        for number in away:
            if number in back:
                logger.warning(f"The vLLM server at {self.servers[number].base_url} is back.")
            else:
                self._not_before[number] = time.monotonic() + self.RETRY_SECONDS
        self.joined = sorted({*self.joined, *back})
        return back

    # -- what a push of weights needs; called on rank 0 --

    def weight_version(self) -> str:
        """The version of the weights, where all that answer hold the same; else a text with all versions.

        Each is without its server's lineage. Raises `ServerLost` if none answers.
        """
        versions = self._ask(lambda s: s.weight_version().removesuffix(tagged("", s.lineage)), list(self.joined))
        if len(set(versions.values())) == 1:
            return next(iter(versions.values()))
        return "; ".join(f"{self.servers[n].base_url}: {version}" for n, version in versions.items())

    def find_restarted(self, held: str | None) -> bool:
        """Whether any server holds other weights than `held`: it restarted, or is back and joins here.

        Those begin a new lineage: what they sampled and nobody proved yet is lost. `ServerLost` if none answers.
        """
        new = self._rejoin()
        versions = self._ask(lambda server: server.weight_version(), list(self.joined))
        new += [n for n in versions if held is None or versions[n] != tagged(held, self.servers[n].lineage)]
        for number in set(new) & set(versions):
            self.servers[number].transfer.held = None
            self.servers[number].lineage += int(self.complete)  # before that nothing was sampled
        return bool(new)

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

    def check_settings(self) -> None:
        """Compare the servers' settings with each other and with those of before.

        Raises `ServerError` for another setting; where other servers are left, theirs is left out instead.
        """
        found = self._ask(lambda server: server.settings(), list(self.joined))
        before = self._settings
        expected = before or next(iter(found.values()))
        problems, first = {}, self.servers[0].base_url
        for number, settings in found.items():
            url, others = self.servers[number].base_url, [k for k in settings if settings[k] != expected[k]]
            if others and before:
                changed = "; ".join(f"{k}={settings[k]!r}, before {expected[k]!r}" for k in others)
                problems[number] = ServerError(
                    f"The vLLM server at {url} came back with {changed}. Start it as before."
                )
            elif others:
                key = others[0]
                problems[number] = ServerError(
                    f"The vLLM servers differ: {key}={settings[key]!r} at {url}, {expected[key]!r} at {first}. Start "
                    "them with the same --model, --dtype, --max-model-len, --logprobs-mode, --weight-transfer-config."
                )
        self._without_errors({**found, **problems})
        self._settings = expected

    def dtype(self) -> str:
        """The type in which the servers compute, such as `torch.bfloat16`."""
        return next(iter(self._ask(lambda server: server.settings()["dtype"], list(self.joined)).values()))

    def update_weights(
        self, named_weights: Iterator[tuple[str, torch.Tensor]], version: str, expected: set[str] | None,
        device: torch.device,
    ) -> dict[str, float]:  # fmt: skip
        """As `VLLMServerClient.update_weights`: the weights are written once, and all servers load them at once.

        A server that is lost meanwhile is left out. Raises the error of one if none is left. Always exhausts the
        weights, as other ranks gather them too.
        """
        transfers = [self.servers[number].transfer for number in self.joined]
        seconds, failed = self.transfer.push(named_weights, version, expected, device, transfers)
        self._without_errors(dict(zip(self.joined, failed)))
        return seconds

    def scores(self, token_ids: list[int]) -> dict[int, list[list[float]]]:
        """By a server's number the logprobs of `token_ids[1:]` of each of its engines (`ServerConnection.score`)."""
        return self._ask(
            lambda server: [server.score(token_ids, rank) for rank in engine_ranks(server)], list(self.joined)
        )

    def refuse(self, problems: dict[int, ServerError]) -> None:
        """Leave servers out whose weights are wrong. Raises a problem where no other server is left, or at first."""
        self._without_errors({**dict.fromkeys(self.joined), **problems})
