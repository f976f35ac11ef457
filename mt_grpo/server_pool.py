"""One or several vLLM servers as one backend: their conversations, and what is asked of all of them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any

import torch

from mt_grpo.event_loop import start_in_background
from mt_grpo.rollout import Generation
from mt_grpo.routes import Group, Route, gather_proven
from mt_grpo.server_errors import NoServerLeft, ServerError
from mt_grpo.server_members import ServerMembers
from mt_grpo.versions import tagged


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


class ServerPool(ServerMembers):
    """Servers with the same model as one backend. Each conversation is at one of those that hold the weights.

    Args:
        servers: One `VLLMServerClient` per server.

    Attributes:
        load: Open conversations by server, of this process.
        moved: Requests asked of another server, since a reader last set it to 0.
    """

    LOST_AFTER = 3  # unanswered questions in a row, after which a server is left while there is another one
    WATCH_SECONDS = 1.0  # between two reads of the servers' versions; no server restarts within this time

    def __init__(self, servers: list[Any]):
        super().__init__(servers)
        self.load = [0] * len(servers)
        self.moved = 0
        self._settings: dict[str, Any] | None = None

    # -- what a single client has, too --

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
            with suppress(NoServerLeft):  # in this order, so that ranks that share a group mostly choose alike
                group.choose()
        return [Route(self, groups[number]) for number in numbers]

    def start_conversations(
        self, conversations: list[Coroutine], version: str, routes: list[Route]
    ) -> concurrent.futures.Future:
        """Run conversations in the background, each proven to come from the weights `version` (`gather_proven`)."""
        return start_in_background(gather_proven(self, version, routes, conversations))

    # -- what a push of weights needs; called on rank 0 --

    def weight_version(self) -> str:
        """The version of the weights, where all that answer hold the same; else a text with all versions.

        Each is without its server's lineage. Raises `ServerLost` if none answers.
        """
        versions = self.ask(lambda s: s.weight_version().removesuffix(tagged("", s.lineage)))
        if len(set(versions.values())) == 1:
            return next(iter(versions.values()))
        return "; ".join(f"{self.servers[n].base_url}: {version}" for n, version in versions.items())

    def check_settings(self) -> None:
        """Compare the servers' settings with each other and with those of before.

        Raises `ServerError` for another setting; where other servers are left, theirs is left out instead.
        """
        found = self.ask(lambda server: server.settings())
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
        self.without_errors({**found, **problems})
        self._settings = expected

    def dtype(self) -> str:
        """The type in which the servers compute, such as `torch.bfloat16`."""
        return next(iter(self.ask(lambda server: server.settings()["dtype"]).values()))

    def leave_nccl_groups(self) -> None:
        """Close the NCCL groups of the servers that join: a restarted one is in none. The push makes new ones."""
        for number in self.joining:
            self.servers[number].transfer.leave_nccl()

    def update_weights(
        self, named_weights: Iterator[tuple[str, torch.Tensor]], version: str, expected: set[str] | None,
        device: torch.device,
    ) -> dict[str, float]:  # fmt: skip
        """As `VLLMServerClient.update_weights`: the weights are written once, and all servers load them at once.

        A server that is lost meanwhile is left out. Raises the error of one if none is left. Always exhausts the
        weights, as other ranks gather them too.
        """
        numbers = self.members  # once: the background loop may leave one meanwhile
        transfers = [self.servers[number].transfer for number in numbers]
        seconds, failed = self.transfer.push(named_weights, version, expected, device, transfers)
        self.without_errors(dict(zip(numbers, failed)))
        return seconds

    def scores(self, token_ids: list[int]) -> dict[int, list[list[float]]]:
        """By a server's number the logprobs of `token_ids[1:]` of each of its engines (`ServerConnection.score`)."""
        return self.ask(lambda server: [server.score(token_ids, rank) for rank in engine_ranks(server)])

    def refuse(self, problems: dict[int, ServerError]) -> None:
        """Leave servers out whose weights are wrong. Raises a problem where no other server is left, or at first."""
        self.without_errors({**dict.fromkeys(self.members), **problems})
