"""Groups of this process and the workers of a server, over which weights are sent, within a time limit."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from mt_grpo.base.errors import ServerError, ServerLost
from mt_grpo.generation.samples import BadAnswer

Metadata = list[tuple[str, str, list[int]]]  # (name, dtype, shape) of each weight


class WorkerGroup(Protocol):
    """How an engine's workers and this process send weights to each other. Each method may wait without an end."""

    def join(self) -> None:
        """Make the group, together with the workers."""

    def send(self, metadata: Metadata, tensors: dict[str, torch.Tensor]) -> None:
        """Send weights by name, while the server is paused."""

    def abort(self) -> None:
        """End what waits in it, on both sides. Called from another thread."""

    def end(self) -> None:
        """Leave it as a run ends, also behind `abort`; the server goes on."""


class NCCLGroup:
    """A group with one server, whose calls have an end.

    NCCL has no time limit: a worker that is gone leaves the sender waiting in a call that no signal interrupts. So
    a group's calls run in a thread of their own. It is given up, and the group aborted, where the server is not
    healthy any more, or after the server's `request_timeout`.

    Args:
        server: The client of the server.
        port: Where this process listens for the workers.
        device: This process's GPU.

    Raises:
        ServerLost: The group cannot be made.
    """

    LOST_AFTER = 3  # health checks without an answer, in a row
    WATCH_SECONDS = 5.0  # between two health checks

    def __init__(self, server: Any, port: int, device: torch.device):
        self.server, self.device = server, device
        self.closed, self._group = False, server.engine.group(server, port, device)
        self._within_limits(self._group.join, f"forms no NCCL group on port {port} (vllm_group_port)")

    def send(self, metadata: Metadata, tensors: dict[str, torch.Tensor]) -> None:
        """Send weights, while the server is paused. Raises `ServerLost`, after which the group is closed.

        Args:
            metadata: (name, dtype, shape) of each.
            tensors: By name, the model's own or on the CPU. The latter are on the GPU only while they are sent.
        """
        if self.closed:
            raise ServerLost(f"{self.server.base_url}: its NCCL group is closed.")
        self._within_limits(lambda: self._group.send(metadata, tensors), "did not take the weights")

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
        if not self.closed:
            self.closed = True
            self._group.abort()

    def end(self) -> None:
        """Leave the group as a run ends, also one that was aborted: it may hold its port."""
        self.closed = True
        self._group.end()


def check_group_port(server: Any, port: int) -> None:
    """Raise `ServerError` if this process cannot listen on the port for the workers of the server.

    Else the first push would find it, after weights are loaded. Another program may still take the port until then.
    """
    if any(own == port for _, own in SGLangGroup.stores):  # of a trainer that this process had before
        return
    try:
        with listening(port):
            pass
    except OSError as error:
        raise ServerError(
            f"vllm_group_port: the weights would go to {server.base_url} by port {port} of this machine, which cannot "
            f"be listened on: {error.strerror}. Set vllm_group_port to a free one; each further server has the next."
        ) from error


def listening(port: int, address: str = "") -> socket.socket:
    """A socket that listens on a port, also where an ended run just did. Raises `OSError`."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def beside(function: Callable[[], Any]) -> Future[Any]:
    """What a function returns or raises, in a thread that does not hold up the end of the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="mt-grpo-group", daemon=True).start()
    return future


class TRLGroup:
    """With vLLM's workers, by TRL's client."""

    CONNECT_SECONDS = 10.0  # for the connection of a request of TRL's client

    def __init__(self, server: Any, port: int, device: torch.device):
        self.server, self.port, self.device = server, port, device
        self._client: Any = None  # TRL's, which holds the communicator

    def join(self) -> None:
        from trl.generation.vllm_client import VLLMClient  # this import needs vLLM, the disk transport does not

        client = VLLMClient(self.server.base_url, group_port=self.port, connection_timeout=self.server.timeout)
        # TRL's client waits for answers without an end, and sends a request again that the server failed at.
        limits = self.CONNECT_SECONDS, self.server.request_timeout
        client.session.request = functools.partial(client.session.request, timeout=limits)
        self._client = client
        client.init_communicator(device=self.device)

    def send(self, metadata: Metadata, tensors: dict[str, torch.Tensor]) -> None:
        self._client.update_named_params(metadata, ((n, t.detach().to(self.device)) for n, t in tensors.items()))

    def abort(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        atexit.unregister(client.close_communicator)  # else it keeps the group and its port
        if client.communicator is not None:
            client.communicator.destroy()  # ncclCommAbort; TRL's own close frees the port only
        client.close_communicator()

    def end(self) -> None:
        """TRL's client does it as the process ends."""


class SGLangGroup:
    """With SGLang's workers, as a process group of torch: by NCCL, or by gloo where this process has no GPU.

    The group has one process more than the server has workers. It is no group of this process's own training.
    """

    BUCKET_BYTES = 512 * 2**20  # of the weights in one request, for which the server takes memory at once
    stores: ClassVar[dict[tuple[str, int], Any]] = {}  # by address and port
    WATCHDOG = timedelta(minutes=30)
    ADDRESS = "SGLANG_HOST_IP"  # the variable with this machine's address, where the one found is the wrong one

    def __init__(self, server: Any, port: int, device: torch.device):
        self.server, self.port, self.device = server, port, device
        # A server keeps the groups of ended runs, by their names.
        self.name = f"mt-grpo-{server.instance}-{time.monotonic_ns():x}"
        self._group: Any = None
        self._given_up = False  # INVARIANT: then nothing more is asked of the server, which others use

    def join(self) -> None:
        server = urlsplit(self.server.base_url)
        port = server.port or (443 if server.scheme == "https" else 80)
        with socket.create_connection((server.hostname, port), timeout=10.0) as connection:
            own = connection.getsockname()[0]  # the address of this machine that the server can reach
        named, size = os.environ.get(self.ADDRESS), 1 + int(self.server.server_info()["tp_size"])
        limit = timedelta(seconds=self.server.request_timeout)
        store = self._store_of(named or own, "" if named else own, size, limit)
        keys = store.num_keys()
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        asked = self._ask(
            "/init_weights_update_group",
            master_address=named or own,
            master_port=self.port,
            rank_offset=1,
            world_size=size,
            group_name=self.name,
            backend=backend,
        )
        while not asked.done() and store.num_keys() == keys:  # gloo would wait, and hold the port, for nobody
            time.sleep(0.01)
        if asked.done():
            asked.result()
        made = beside(lambda: self._make(store, backend, size, limit))
        wait([asked, made], return_when=FIRST_EXCEPTION)
        if asked.done():
            asked.result()
        self._group = made.result()
        asked.result()
        if self._given_up:
            self.abort()

    def _store_of(self, address: str, listens: str, size: int, limit: timedelta) -> Any:
        """Where the processes of a group find each other: one for all groups by this port, while the run goes on.

        It is free again only when nothing of a lost group is left, and such a group may still wait for its end.
        """
        if (key := (address, self.port)) not in self.stores:
            listener = listening(self.port, listens)
            self.stores[key] = dist.TCPStore(
                address,
                self.port,
                size,
                is_master=True,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return self.stores[key]

    def _make(self, store: Any, backend: str, size: int, limit: timedelta) -> Any:
        # INVARIANT: the keys are those of SGLang's `init_custom_process_group`, which asks torch for a named group.
        for prefix in (self.name, f"{self.name}/", f"{self.device.type}/"):
            store = dist.PrefixStore(prefix, store)
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, 0, size, limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit + self.WATCHDOG  # else torch ends this process before the push is given up
        return dist.ProcessGroupNCCL(store, 0, size, options)

    def send(self, metadata: Metadata, tensors: dict[str, torch.Tensor]) -> None:
        begin = functools.partial(self.server.request, "POST", "/begin_weight_update", json={})
        try:
            begin(read=self._succeeded)
        except ServerLost:
            raise
        except ServerError:  # a session is open, of a push that did not end
            self.server.request("POST", "/end_weight_update", json={})
            begin(read=self._succeeded)
        try:
            buckets = list(self._buckets(metadata))
            for i, bucket in enumerate(buckets):
                self._send_bucket(bucket, tensors, last=i == len(buckets) - 1)
        except BaseException:
            if not self._given_up:
                with suppress(ServerError):  # the next push ends what is still open
                    self.server.request("POST", "/end_weight_update", timeout=5.0, json={})
            raise
        self.server.request("POST", "/end_weight_update", json={}, read=self._succeeded)

    def _buckets(self, metadata: Metadata) -> Iterator[Metadata]:
        """The weights in order, in runs of at most `BUCKET_BYTES`, or of one block that is larger.

        A block is what lies beside each other, as the projections of an attention: some models of SGLang put several
        of them together, and drop those that come in different requests.
        """
        bucket, size = [], 0
        for _, block in itertools.groupby(metadata, key=lambda item: item[0].rsplit(".", 2)[0]):
            block = list(block)
            count = sum(torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, dtype, shape in block)
            if bucket and size + count > self.BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket += block
            size += count
        yield bucket

    def _send_bucket(self, bucket: Metadata, tensors: dict[str, torch.Tensor], last: bool) -> None:
        names, dtypes, shapes = (list(column) for column in zip(*bucket))
        # A stream of its own: what hangs in it is waited for by this thread alone, which has a time limit.
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with torch.cuda.stream(stream) if stream else nullcontext():
            # INVARIANT: what is sent is there before the server is asked, whose workers then wait for it; and it lives
            # until the server has answered.
            sent = [tensors[name].detach().to(self.device).contiguous() for name in names]
            if (group := self._group) is None or self._given_up:
                raise ServerLost(f"{self.server.base_url}: its group is closed.")
            asked = self._ask(
                "/update_weights_from_distributed",
                names=names,
                dtypes=dtypes,
                shapes=shapes,
                group_name=self.name,
                flush_cache=last,
                abort_all_requests=False,
            )
            sending = [group.broadcast([tensor], options) for tensor in sent]
            # Nothing is waited for before the answer: where the server refuses, nobody receives, and gloo would wait
            # for its whole time limit.
            asked.result()
            for work in sending:
                work.wait()
        if stream:
            stream.synchronize()

    def _ask(self, path: str, **body: Any) -> Future[None]:
        """A request beside what this thread does next. One that fails aborts the group, in which this thread waits."""

        def ask() -> None:
            try:
                limit = self.server.request_timeout
                self.server.request("POST", path, timeout=limit, json=body, read=self._succeeded)
            except BaseException:
                self._abort_group()
                raise

        return beside(ask)

    @staticmethod
    def _succeeded(answer: dict[str, Any]) -> None:
        if answer["success"] is not True:
            raise BadAnswer(str(answer)[:500])

    def _abort_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def abort(self) -> None:
        """Both sides leave it. A server whose worker waits in it for ever does not answer: it is not waited for."""
        self._given_up = True
        self._abort_group()
        with suppress(ServerError):
            body = {"group_name": self.name}
            self.server.request("POST", "/destroy_weights_update_group", timeout=5.0, json=body, read=None)

    def end(self) -> None:
        if not self._given_up:
            self.abort()
        for key in [key for key in self.stores if key[1] == self.port]:
            del self.stores[key]
