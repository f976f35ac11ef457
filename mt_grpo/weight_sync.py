"""Pushes changed weights to the server, checks that they arrived, and pushes again after a restart."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from accelerate.utils import gather_object

from mt_grpo.ranks import on_main_process
from mt_grpo.server_errors import ServerError, ServerLost
from mt_grpo.weights import GatherFailed, PolicyWeights

logger = logging.getLogger(__name__)


class WeightSync:
    """Keeps the server's weights equal to the policy's. Every method is collective: all ranks call it together.

    Args:
        client: The client of the server.
        model: The policy as the trainer trains it (wrapped, sharded or with adapters).
        weights: The iterator over the policy's parameters.
        accelerator: The trainer's accelerator.
        probe_ids: Token ids whose logprobs are compared, (T,).
        check_every: Compare logprobs at every n-th push. 0: only at the first push and after a restart.
    """

    MAX_ATTEMPTS = 3  # of one push, if the server is lost meanwhile

    def __init__(
        self, client: Any, model: Any, weights: PolicyWeights, accelerator: Any, probe_ids: list[int], check_every: int
    ):
        self.client, self.model, self.weights, self.accelerator = client, model, weights, accelerator
        self.check_every, self._probe_ids = check_every, probe_ids
        self.pushed: str | None = None  # the version that the server holds
        self.num_syncs = 0  # pushes so far
        self._settings: dict[str, Any] | None = None  # of the server at the last push

    def sync(
        self, version: str, stop_requested: Callable[[], Any], stop_if_requested: Callable[[], None]
    ) -> dict[str, float]:
        """Push the weights under the name `version`, and check at every `check_every`-th push that they arrived.

        Only rank 0 calls the server. Its result or error is broadcast to all ranks. The broadcast is also a barrier:
        no rank samples before the push is over.

        Args:
            version: The name of the current weights.
            stop_requested: Returns whether this rank got a signal.
            stop_if_requested: Raises on all ranks if any rank got a signal.

        Returns:
            Metrics: seconds by phase, and the difference of logprobs if it was compared.

        Raises:
            ServerError: The push failed, the weights did not arrive, or the server came back with other settings.
        """
        started, held, self.pushed = time.perf_counter(), self.pushed, None
        for attempt in range(1, self.MAX_ATTEMPTS + 1):
            try:
                new_server = held is None or on_main_process(self.client.weight_version) != held
                if new_server:  # a restarted server is not in the NCCL group
                    on_main_process(self.client.transfer.leave_nccl)
                seconds, gap = self._push_and_check(version, new_server)
                break
            except ServerLost as error:  # on all ranks
                if attempt == self.MAX_ATTEMPTS:
                    raise
                logger.warning(f"{error}. Waiting for the server, then pushing again.")
                held = None
                on_main_process(lambda: self.client.wait_until_healthy(unless=stop_requested))
                stop_if_requested()
        self.num_syncs += 1
        self.pushed = version
        metrics = {"sync/seconds": time.perf_counter() - started}
        metrics |= {f"sync/{phase}_seconds": value for phase, value in seconds.items()}
        return metrics if gap is None else {**metrics, "sync/logprob_difference": gap}

    def _push_and_check(self, version: str, new_server: bool) -> tuple[dict[str, float], float | None]:
        """(seconds by phase, the difference of logprobs). The difference is None if this push is not checked."""
        if new_server:
            self._check_settings()
        if self.num_syncs == 0:
            self._check_that_pushes_arrive(version)
        seconds, every = self._push(version), self.check_every
        if not new_server and (not every or self.num_syncs % every):
            return seconds, None
        pushed = time.perf_counter()
        try:
            gap = self._check_logprobs()
        except ServerLost:
            raise
        except ServerError:
            if on_main_process(self.client.weight_version) != version:
                raise ServerLost(f"{self.client.base_url} restarted between the push and the check of it") from None
            raise
        return {**seconds, "check": time.perf_counter() - pushed}, gap

    def _check_settings(self) -> None:
        """Raise `ServerError` if the server came back with other settings, as no other check would notice them."""
        settings = on_main_process(self.client.settings)
        before, self._settings = self._settings or settings, settings
        if changed := [f"{k}={v!r}, before {before[k]!r}" for k, v in settings.items() if v != before[k]]:
            raise ServerError(
                f"The vLLM server at {self.client.base_url} came back with {'; '.join(changed)}. Start it as before."
            )

    def _push(self, version: str, norm_scale: float = 1.0) -> dict[str, float]:
        weights = self.weights.named_weights(norm_scale)

        def push() -> dict[str, float]:
            device = self.accelerator.device
            return self.client.update_weights(weights, version, self.weights.expected, device)

        if not self.accelerator.is_main_process and self.weights.sharded:
            with suppress(GatherFailed):  # rank 0 has the same error, and raises it on all ranks
                for _ in weights:  # gathering is collective
                    pass
        return on_main_process(push)

    def _check_that_pushes_arrive(self, version: str) -> None:
        """Push once with a scaled final norm. Raise unless the server's logprobs change as the trainer's do.

        A comparison with unchanged weights proves nothing: a server that ignores every push would pass it.
        """
        scale = 1.5
        norm_name = self.weights.final_norm
        if norm_name is None or "Gemma" in type(self.model.get_submodule(norm_name)).__name__:
            logger.warning("The first weight sync is checked without a changed weight: no final norm w * x was found.")
            return
        true, scaled = self._probe_logprobs(), self._probe_logprobs(scale)
        self._push(f"{version}-probe", scale)
        expected = (scaled - true).abs().mean().item()
        missed = self._distance_to_server(scaled)
        expected = on_main_process(lambda: expected)
        if missed > max(0.2 * expected, self._logprob_tolerance()):
            if on_main_process(self.client.weight_version) != f"{version}-probe":
                raise ServerLost(f"{self.client.base_url} restarted between the first push and the check of it")
            raise ServerError(
                f"A changed weight did not arrive at {self.client.base_url}: the trainer's logprobs moved by "
                f"{expected:.2e} on average, the server's miss theirs by {missed:.2e}. See the server's log."
            )

    def _check_logprobs(self) -> float:
        """Mean absolute difference of the trainer's and the server's logprobs. `ServerError` if it is too large."""
        gap = self._distance_to_server(self._probe_logprobs())
        if not gap <= self._logprob_tolerance():
            raise ServerError(
                f"After the weight sync the trainer and the server at {self.client.base_url} disagree: mean "
                f"difference of logprobs {gap:.2e}, allowed {self._logprob_tolerance():g}. Is the server running "
                "another model, dtype or adapter?"
            )
        return gap

    def _distance_to_server(self, ours: torch.Tensor) -> float:
        """Mean absolute difference of logprobs. It is the maximum over ranks, so that all ranks decide alike."""
        theirs = torch.tensor(on_main_process(lambda: self.client.score(self._probe_ids)))
        distances = gather_object([(ours - theirs).abs().mean().item()])
        return max(distances) if all(map(math.isfinite, distances)) else math.inf

    def _logprob_tolerance(self) -> float:
        return 1e-3 if self.model.dtype == torch.float32 and self._server_dtype == "float32" else 0.1

    @functools.cached_property
    def _server_dtype(self) -> str:
        dtype = on_main_process(lambda: str(self.client.server_info()["model_config"]["dtype"]))
        return dtype.removeprefix("torch.")

    @torch.no_grad()
    def _probe_logprobs(self, norm_scale: float = 1.0) -> torch.Tensor:
        """The trainer's logprobs of the probe ids, (T-1,), at temperature 1. Collective where the model is sharded."""
        training, handle = self.model.training, None
        if norm_scale != 1.0:
            norm_module = self.model.get_submodule(self.weights.final_norm)
            handle = norm_module.register_forward_hook(lambda module, inputs, output: output * norm_scale)
        try:
            self.model.eval()  # LoRA's dropout
            ids = torch.tensor([self._probe_ids], device=self.accelerator.device)
            with self.accelerator.autocast():
                logits = self.model(input_ids=ids).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1)
            return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu()
        finally:
            self.model.train(training)
            if handle is not None:
                handle.remove()
