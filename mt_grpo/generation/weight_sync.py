"""Pushes changed weights to the server, checks that they arrived, and pushes again after a restart."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel

from mt_grpo.base.errors import ServerError, ServerLost, sentence
from mt_grpo.base.ranks import on_main_process
from mt_grpo.generation.samples import tagged
from mt_grpo.generation.server_pool import ServerPool
from mt_grpo.generation.weights import ADAPTER, PolicyWeights, adapter_weights, off_by_rounding, why_model_merges
from mt_grpo.images.reader import inputs_of_rows

logger = logging.getLogger(__name__)


class WeightSync:
    """Keeps the servers' weights equal to the policy's. `sync` is collective: all ranks call it.

    `probe_ids` are token ids whose logprobs are compared, (T,). `num_adapters` is how many adapters conversations in
    flight may name. `scores` says whether reward functions ask the servers, which score without an adapter.
    """

    MAX_ATTEMPTS = 3  # of one push, if the server is lost meanwhile
    CHECK_EVERY = 10  # logprobs are compared at every n-th push, at the first one and after a restart
    NUM_SAMPLED = 16  # tokens whose logprobs are compared if an adapter was pushed

    def __init__(
        self,
        servers: ServerPool,
        model: Any,
        weights: PolicyWeights,
        accelerator: Any,
        probe_ids: list[int],
        num_adapters: int = 2,
        scores: bool = False,
    ):
        self.servers, self.model, self.weights, self.accelerator = servers, model, weights, accelerator
        self._probe_ids, self.num_adapters, self.scores = probe_ids, num_adapters, scores
        self.pushed: str | None = None  # the version that the servers hold
        self.doubted = False  # a server was lost: before the next rollouts it is asked whether it holds this version
        self.num_syncs = 0  # pushes so far
        self.adapter: Any = None  # the policy's LoraConfig if the adapter alone is pushed; known at the first push

    def sync(
        self, version: str, stop_requested: Callable[[], Any], stop_if_requested: Callable[[], None]
    ) -> dict[str, float]:
        """Push the weights under the name `version`, and check at every `CHECK_EVERY`-th push that they arrived.

        Conversations may run meanwhile: their requests wait, and go on with the new weights. Those that name an
        adapter end with it. Only rank 0 calls the servers, and its result or error is broadcast, which is a barrier.
        While servers are away, `stop_requested` says whether this rank got a signal, and `stop_if_requested` raises if
        any rank did. Returns metrics. Raises `ServerError` if the push failed or the weights did not arrive.
        """
        started, number, clients = time.perf_counter(), int(version.rpartition("-")[2]), self.servers.servers
        for client in clients:  # before ranks meet: from here on an answer may be of the new weights
            client.newest_version, client.pushing = number, True
        try:
            seconds, gap = self._push_until_it_arrives(version, stop_requested, stop_if_requested)
            self.servers.complete = True
            joined, lineages = on_main_process(lambda: (self.servers.admit(), [client.lineage for client in clients]))
            for client, lineage in zip(clients, lineages):
                client.lineage, client.policy_version, client.pushed = lineage, number, version
                client.adapter = tagged(version, lineage) if self.adapter is not None else None
            self.servers.joined = joined  # INVARIANT: set after the lineages, with which requests are marked
        finally:
            for client in clients:
                client.pushing = False
        self.num_syncs += 1
        self.pushed, self.doubted = version, False
        metrics = {"sync/seconds": time.perf_counter() - started, "sync/servers": len(joined)}
        metrics |= {f"sync/{phase}_seconds": value for phase, value in seconds.items()}
        return metrics if gap is None else {**metrics, "sync/logprob_difference": gap}

    def _choose_what_is_pushed(self) -> None:
        """Push the adapter alone if the policy is a model with one and all servers can have it; else all weights."""
        if not isinstance(self.weights.model, PeftModel) or ADAPTER not in self.weights.model.peft_config:
            return
        config = self.weights.model.peft_config[ADAPTER]
        setting = self.servers.transfer.transport
        if setting in ("disk", "nccl"):
            reason = f"weight_sync is set to {setting}"
        elif self.scores:
            reason = "a reward function asks the policy, and a server scores without adapters"
        else:
            reason = why_model_merges(self.weights.model, self.weights.sharded)

        def why_servers_merge() -> str | None:
            reasons = self.servers.ask(lambda server: server.engine.why_merges(server, config.r, self.num_adapters))
            return next(filter(None, reasons.values()), None)

        reason = reason or on_main_process(why_servers_merge)
        if reason and setting == "adapter":
            raise ServerError(f"weight_sync=adapter: {reason}. Set weight_sync: auto to merge the adapter instead.")
        self.adapter, text = config, f" of rank {config.r}. Weight syncs send only the adapter."
        if reason:
            self.adapter, text = None, f". Weight syncs send merged weights, since {sentence(reason)}"
        for client in self.servers.servers:
            client.transfer.adapter, client.transfer.num_adapters = self.adapter, self.num_adapters
        if self.accelerator.is_main_process:
            logger.warning(f"The policy has a LoRA{text}")

    def _push_until_it_arrives(
        self, version: str, stop_requested: Callable[[], Any], stop_if_requested: Callable[[], None]
    ) -> tuple[dict[str, float], float | None]:
        """Run `_push_and_check`, again if the servers are lost meanwhile."""
        held, self.pushed = self.pushed, None
        joined = [set(numbers) for numbers in gather_object([list(self.servers.joined)])]
        if self.adapter is not None:
            asked = [client.named_adapters for client in self.servers.servers]
            for client, named in zip(self.servers.servers, zip(*gather_object([asked]))):
                client.transfer.in_use = set.union(*named)
        for lost in set.union(*joined) - set.intersection(*joined):
            self.servers.leave(lost, "a rank lost its connection.")
        for attempt in range(1, self.MAX_ATTEMPTS + 1):
            try:
                return self._push_and_check(version, held)
            except ServerLost as error:  # on all ranks
                if attempt == self.MAX_ATTEMPTS:
                    raise
                logger.warning(f"{sentence(error)} The run waits for the server, then pushes the weights again.")
                held = None
                on_main_process(lambda: self.servers.wait_until_healthy(unless=stop_requested))
                stop_if_requested()

    def _push_and_check(self, version: str, held: str | None) -> tuple[dict[str, float], float | None]:
        """Returns seconds by phase, and the difference of logprobs, or None if this push is not checked."""
        if new_server := on_main_process(lambda: self.servers.find_restarted(held)):
            on_main_process(self.servers.check_settings)
        if self.num_syncs == 0:
            self._choose_what_is_pushed()
            self._check_that_pushes_arrive(version)
        seconds = self._push(version)
        if not new_server and self.num_syncs % self.CHECK_EVERY:
            return seconds, None
        began = time.perf_counter()
        try:
            gap = self._check_logprobs()
        except ServerError:
            self._check_that_servers_hold(version)
            raise
        return {**seconds, "check": time.perf_counter() - began}, gap

    def _check_that_servers_hold(self, version: str) -> None:
        """Raise `ServerLost` if a server restarted after the push of `version`."""
        if on_main_process(self.servers.weight_version) != version:
            raise ServerLost(f"{self.servers.base_url} restarted between the push and its check.")

    def _push(self, version: str) -> dict[str, float]:
        if self.adapter is None:
            weights, expected = self.weights.named_weights(), self.weights.expected
        else:
            weights, expected = adapter_weights(self.weights.model), self.weights.of_adapter
        if self.weights.sharded and self.accelerator.num_processes > 1:
            weights = self._or_end(weights)
            if not self.accelerator.is_main_process:
                for _ in weights:  # gathering is collective
                    pass
        device = self.accelerator.device
        return on_main_process(lambda: self.servers.update_weights(weights, version, expected, device))

    @staticmethod
    def _or_end(weights: Iterator) -> Iterator:
        """Yield from `weights`. An error ends the process, and so the run: the other ranks wait in the next gather."""
        try:
            yield from weights
        except Exception:
            logger.exception("Sharded weights could not be gathered. The run ends without saving itself.")
            os._exit(1)

    def _check_that_pushes_arrive(self, version: str) -> None:
        """Push once with noise on every tensor. Raise unless the servers' logprobs are the trainer's with this noise.

        With unchanged weights a server that ignores pushes, or a tensor whose name it does not know, would pass.
        """
        # Without shards rank 0 alone has the noise: it pushes, and the originals need memory.
        computes = self.accelerator.is_main_process or self.weights.sharded
        alone = (lambda function: function()) if self.weights.sharded else on_main_process
        exact = self._logprob_tolerance() < 0.1

        def expect() -> tuple[torch.Tensor, float]:
            noisy = self._probe_logprobs()
            return noisy, self._largest_rounding(noisy, exact)

        with ExitStack() as stack:
            alone(lambda: stack.enter_context(self.weights.noise(self.adapter is not None)))
            noisy, allowed = alone(expect)
            self._push(f"{version}-probe")
            distances = self._distances(noisy) if self.adapter is None else self._distances_of_samples(computes)
        allowed = on_main_process(lambda: allowed)
        number, missed = max(distances.items(), key=lambda item: item[1])
        if missed > allowed:
            self._check_that_servers_hold(f"{version}-probe")
            raise ServerError(
                f"A changed weight did not arrive at {self.servers.servers[number].base_url}, or the server computes "
                f"something else: with noise on every pushed tensor the mean difference of logprobs is {missed:.2e}, "
                f"expected at most {allowed:.2g}. See the server's log."
            )

    def _largest_rounding(self, logprobs: torch.Tensor, exact: bool) -> float:
        """The mean difference from these logprobs (T-1,) that rounding may explain. Collective if sharded."""
        with (
            off_by_rounding(self.accelerator.unwrap_model(self.model), 2**-20 if exact else 2**-8),
            torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=not exact),
        ):
            rounded = self._probe_logprobs()
        factor = 3 if self.adapter is None else 6  # of an adapter `NUM_SAMPLED` tokens alone are compared
        return max(1e-3 if exact else 0.02, factor * (rounded - logprobs).abs().mean().item())

    def _check_logprobs(self) -> float:
        """The largest mean difference of logprobs within the tolerance. Other servers are left out."""
        tolerance = self._logprob_tolerance()
        gaps = self._distances(self._probe_logprobs()) if self.adapter is None else self._distances_of_samples()
        problems = {
            number: ServerError(
                f"After the weight sync the trainer and the server at {self.servers.servers[number].base_url} "
                f"disagree: the mean difference of logprobs is {gap:.2e}, expected at most {tolerance:g}."
            )
            for number, gap in gaps.items()
            if not gap <= tolerance
        }
        if problems:
            on_main_process(lambda: self.servers.without_errors({**dict.fromkeys(gaps), **problems}))
        return max(gap for number, gap in gaps.items() if number not in problems)

    def _distances(self, ours: torch.Tensor) -> dict[int, float]:
        """Per server the mean difference from logprobs of the probe ids, (T-1,): the largest of its engines."""
        theirs = on_main_process(lambda: self.servers.scores(self._probe_ids))
        gaps = {number: ours - torch.tensor(scores) for number, scores in theirs.items()}
        return self._largest_of_ranks({number: gap.abs().mean(1).max().item() for number, gap in gaps.items()})

    def _largest_of_ranks(self, distances: dict[int, float]) -> dict[int, float]:
        """Per server the largest distance of all ranks, infinite if one is not a number."""
        largest: dict[int, float] = {}
        for rank in gather_object([distances]):
            for number, distance in rank.items():
                largest[number] = max(largest.get(number, 0.0), distance if math.isfinite(distance) else math.inf)
        return largest

    def _distances_of_samples(self, computes: bool = True) -> dict[int, float]:
        """Compute `_distances` of what each server samples after the probe ids, on ranks where `computes` is true."""
        # vLLM 0.31 on a CPU ends if it scores a prompt with an adapter while conversations run.
        ids = self._probe_ids
        num_sampled = min(self.NUM_SAMPLED, self.servers.max_model_len - len(ids))
        samples = on_main_process(lambda: self.servers.ask(lambda server: server.sample_behind(ids, num_sampled)))
        gaps = {}
        for number, (sampled, theirs) in samples.items() if computes else ():
            ours = self._probe_logprobs(ids=[*ids, *sampled], sampled=True)[-len(sampled) :]
            gaps[number] = (ours - torch.tensor(theirs)).abs().mean().item()
        return self._largest_of_ranks(gaps)

    def _logprob_tolerance(self) -> float:
        # Measured (docs/speed.md): right weights 1.3e-6 in float32, 0.026 (0.084 with large logits) in bf16; a head or
        # a layer that is 20 steps of 3e-4 old, 0.12 and more. Above it a run ends.
        exact = self.model.dtype == torch.float32 and self.servers.settings["dtype"].endswith("float32")
        return 1e-3 if exact else 0.1

    @torch.no_grad()
    def _probe_logprobs(self, ids: list[int] | None = None, sampled: bool = False) -> torch.Tensor:
        """The trainer's logprobs of ids, (T-1,). Those of `sampled` ones are without what may not be sampled."""
        from mt_grpo.images.forward import forbidding_nothing

        with ExitStack() as stack:
            stack.callback(self.model.train, self.model.training)
            if not sampled:
                stack.enter_context(forbidding_nothing(self.model))
            self.model.eval()  # LoRA's dropout
            row, images = inputs_of_rows(torch.tensor([ids or self._probe_ids], device=self.accelerator.device))
            images.pop("num_images", None)
            with self.accelerator.autocast():
                logits = self.model(input_ids=row, **images).logits[0, :-1]
            return logits.float().log_softmax(-1).gather(1, row[0, 1:, None])[:, 0].cpu()
