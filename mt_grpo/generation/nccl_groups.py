"""NCCL groups of this process and the workers of a vLLM server, over which weights are sent within a time limit."""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from mt_grpo.base.errors import ServerLost


class NCCLGroup:
    """An NCCL group with one server, whose calls have a time limit.

    NCCL has no time limit: a worker that is gone leaves the sender waiting in a call that no signal interrupts. So
    a group's calls run in a thread of their own. It is abandoned, and the group aborted, if the server is no longer
    healthy, or after the server's `request_timeout`.

    Args:
        server: The client of the server.
        port: Where this process listens for the workers.
        device: This process's GPU.

    Raises:
        ServerLost: The group cannot be made.
    """

    LOST_AFTER = 3  # health checks without an answer, in a row
    WATCH_SECONDS = 5.0  # between two health checks
    CONNECT_SECONDS = 10.0  # for the connection of a request of TRL's client

    def __init__(self, server: Any, port: int, device: torch.device):
        self.server, self.port, self.device = server, port, device
        self.closed = False
        self._client: Any = None  # TRL's, which holds the communicator
        self._within_limits(self._join, f"did not join the NCCL group on port {port} (vllm_group_port)")

    def _join(self) -> None:
        from trl.generation.vllm_client import VLLMClient  # this import needs vLLM, the disk transport does not

        client = VLLMClient(self.server.base_url, group_port=self.port, connection_timeout=self.server.timeout)
        # TRL's client waits for answers without an end, and sends a request again that the server failed at.
        limits = self.CONNECT_SECONDS, self.server.request_timeout
        client.session.request = functools.partial(client.session.request, timeout=limits)
        self._client = client
        client.init_communicator(device=self.device)

    def send(self, tensors: dict[str, torch.Tensor]) -> None:
        """Send weights, while the server is paused. Raises `ServerLost`, after which the group is closed.

        Args:
            tensors: Name -> tensor, the model's own or on the CPU. The latter are on the GPU only while they are sent.
        """
        if self.closed:
            raise ServerLost(f"{self.server.base_url}: its NCCL group is closed.")
        metadata = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
        weights = ((name, tensor.detach().to(self.device)) for name, tensor in tensors.items())
        self._within_limits(lambda: self._client.update_named_params(metadata, weights), "did not take the weights")

    def _within_limits(self, function: Callable[[], None], what: str) -> None:
        """Run `function` in a thread. Raises `ServerLost`, and closes the group, if it fails or does not end."""
        ended, errors = threading.Event(), []

        def run() -> None:
            try:
                if self.device.index is not None:  # which device is the current one is a thread's own
                    torch.cuda.set_device(self.device)
                function()
            except Exception as error:  # TRL's client raises whatever its requests do
                errors.append(error)
            ended.set()

        threading.Thread(target=run, name="mt-grpo-nccl", daemon=True).start()
        began, misses, problem = time.monotonic(), 0, None
        try:
            while not ended.wait(self.WATCH_SECONDS):
                misses = 0 if self.server.healthy() else misses + 1
                if misses == self.LOST_AFTER:
                    problem = f"it did not answer {misses} health checks in a row"
                    break
                if time.monotonic() - began > self.server.request_timeout:
                    problem = f"it took more than vllm_request_timeout={self.server.request_timeout:g} s"
                    break
        except BaseException:
            self.close()
            raise
        if errors or problem:
            self.close()
            cause = errors[0] if errors else None
            raise ServerLost(f"{self.server.base_url} {what}: {problem or cause}") from cause

    def close(self) -> None:
        """Abort the group: what waits in it ends, on both sides."""
        self.closed = True
        client, self._client = self._client, None
        if client is None:
            return
        atexit.unregister(client.close_communicator)  # else it keeps the group and its port
        if client.communicator is not None:
            client.communicator.destroy()  # ncclCommAbort; TRL's own close frees the port only
        client.close_communicator()
