"""Transfers weights to servers: by files in a shared directory, or over an NCCL group with each server."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mt_grpo.base.errors import ServerError, ServerLost, sentence
from mt_grpo.base.event_loop import at_once
from mt_grpo.generation.samples import tagged
from mt_grpo.generation.weights import ADAPTER_FILE, NamedWeights

SHARD_BYTES = 2**30  # of one file, and of the weights that are in memory a second time; or one tensor, if it is larger


def write_weights(
    folder: Path, named_weights: NamedWeights, file: str = "", shard_bytes: float = SHARD_BYTES
) -> tuple[set[str], float]:
    """Write weights into a folder, as one safetensors `file` or one per `shard_bytes`. Returns names, and seconds."""
    names: set[str] = set()
    shard: dict[str, torch.Tensor] = {}
    seconds = 0.0

    def write() -> None:
        nonlocal seconds
        began = time.perf_counter()
        path = folder / (file or f"model-{len(list(folder.iterdir())) + 1:05d}.safetensors")
        save_file(shard, path, metadata={"format": "pt"})
        shard.clear()
        seconds += time.perf_counter() - began

    for name, tensor in named_weights:
        if name in names:
            raise ValueError(f"the weight {name} was yielded twice")
        if not file and shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > shard_bytes:
            write()
        names.add(name)
        # A copy: tied weights come twice, and a tensor may change once the next one is requested.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        del tensor
    write()
    return names, seconds


def check_whole(names: Iterable[str], expected: dict[str, int] | None) -> None:
    """Raise `ServerError` if a weight is missing from a push."""
    if missing := sorted(set(expected or ()) - set(names)):
        raise ServerError(f"{len(missing)} weights are missing from the push, such as {missing[0]}: nothing sent.")


class NCCLGroup:
    """An NCCL group with one server, whose workers join at `port` of this process.

    A worker that is gone leaves the sender waiting in a call that no signal interrupts. So calls run in a thread. If
    the server is not healthy, or after its `request_timeout`, the group is aborted: `ServerLost`.
    """

    LOST_AFTER = 3  # health checks without an answer, in a row
    WATCH_SECONDS = 5.0  # between two health checks

    def __init__(self, server: Any, port: int, device: torch.device):
        self.server, self.port, self.device = server, port, device
        self._client: Any = None  # TRL's, which holds the communicator
        with socket.socket() as probe:  # where another program listens, the workers would wait for it for minutes
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended run may just have had it
            try:
                probe.bind(("", port))
            except OSError as error:
                raise ServerError(f"vllm_group_port: port {port}: {error.strerror}. Set it to a free one.") from error
        self._within_limits(self._join, f"did not join the NCCL group on port {port} (vllm_group_port)")

    def _join(self) -> None:
        from trl.generation.vllm_client import VLLMClient  # this import needs vLLM, the disk transport does not

        client = VLLMClient(self.server.base_url, group_port=self.port, connection_timeout=self.server.timeout)
        limits = 10.0, self.server.request_timeout  # TRL's client waits for answers without an end
        client.session.request = functools.partial(client.session.request, timeout=limits)
        self._client = client
        client.init_communicator(device=self.device)

    def send(self, tensors: dict[str, torch.Tensor]) -> None:
        """Send weights, while the server is paused. Those on the CPU are on the GPU only while they are sent."""
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
        limit, misses = time.monotonic() + self.server.request_timeout, 0
        try:
            while not ended.wait(self.WATCH_SECONDS) and not errors:
                misses = 0 if self.server.healthy() else misses + 1
                if misses == self.LOST_AFTER:
                    errors.append(f"it did not answer {misses} health checks in a row")
                elif time.monotonic() > limit:
                    errors.append(f"more than vllm_request_timeout={self.server.request_timeout:g} s")
            if errors:
                raise ServerLost(f"{self.server.base_url} {what}: {errors[0]}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort the group: what waits in it ends, on both sides."""
        client, self._client = self._client, None
        if client is not None:
            atexit.unregister(client.close_communicator)  # else it keeps the group and its port
            if client.communicator is not None:
                client.communicator.destroy()  # ncclCommAbort; TRL's own close frees the port only
            client.close_communicator()


class WeightTransfer:
    """Pushes one copy of the weights to one or several servers. A server samples nothing while it loads.

    `VLLMServerClient` documents the arguments. If `adapter` is set, it alone is pushed, through files.
    """

    def __init__(self, server: Any, transport: str, sync_dir: str | None, group_port: int):
        self.server, self.transport, self.sync_dir, self.group_port = server, transport, sync_dir, group_port
        self.held: str | None = None  # the version that the last complete push set; None: not known
        self.adapter: Any = None  # the configuration of the policy's LoRA, where it is pushed as an adapter
        self.num_adapters = 2  # kept there, the newest: a request that was sent before a push names an older one
        self.in_use: set[str | None] = set()  # adapters that requests of any rank named as this push began
        self._loaded: dict[str, Path] = {}  # adapters that this client has loaded there, the oldest first
        self._resolved: str | None = None
        self._nccl: NCCLGroup | None = None
        self._folder: Path | None = None  # this client's own folder in `sync_dir`

    def resolve(self, device: torch.device) -> str:
        """The transport, `disk` or `nccl`. Raises `ServerError` if the server does not support the setting."""
        if self._resolved is None:  # asked once: a server that restarts with another setting is refused
            self._resolved = self.server.engine.transport(self.server, self.transport, device.type == "cuda")
        return self._resolved

    def push(
        self,
        named_weights: NamedWeights,
        version: str,
        expected: dict[str, int] | None,
        device: torch.device,
        transfers: list[WeightTransfer],
    ) -> tuple[dict[str, float], list[ServerError | None]]:
        """Push one copy to these servers (see `update_weights`). Returns seconds by phase, and each one's error."""
        try:
            if not transfers:
                raise ServerLost(f"No {self.server.engine.title} server is left to push weights to.")
            began = time.perf_counter()
            if self.adapter is None and self.resolve(device) == "nccl":  # all have the same settings
                weights, write = self._collect(named_weights, expected, device), {}
            else:
                weights, write = self._write(named_weights, version, expected)
            loads = time.perf_counter()
            by_turns = map if isinstance(weights, dict) else at_once
            limit = self.server.request_timeout if len(transfers) == 1 else 60.0  # none holds up the others
            errors = list(by_turns(lambda transfer: transfer._load(version, weights, device, limit), transfers))
            gather = loads - began - sum(write.values())
            return {"gather": gather, **write, "load": time.perf_counter() - loads}, errors
        finally:
            # INVARIANT: an engine may read an adapter's files again while a request names it.
            kept = set().union(*(transfer._loaded.values() for transfer in transfers))
            for folder in self._folder.glob("*/") if self._folder else ():
                if folder not in kept:
                    shutil.rmtree(folder, ignore_errors=True)
            for _ in named_weights:  # where weights are sharded the other ranks walk to the end too
                pass

    def _write(self, weights: NamedWeights, version: str, expected: dict[str, int] | None) -> tuple[Path, dict]:
        """Write all weights, or the adapter, into a folder. Returns it, and the seconds as `write`."""
        folder = None
        try:
            folder = self._own_folder(sum((expected or {}).values())) / version
            shutil.rmtree(folder, ignore_errors=True)  # of a push of the same version that was lost
            folder.mkdir()
            names, seconds = write_weights(folder, weights, "" if self.adapter is None else ADAPTER_FILE)
            check_whole(names, expected)
            if self.adapter is not None:
                self.adapter.save_pretrained(str(folder))
            for path in folder.iterdir():
                path.chmod(0o644)  # others than this user may read it where the folder lets them
        except (OSError, SafetensorError) as error:
            raise ServerError(
                f"The weight push to {self.server.base_url} through {folder or self.sync_dir} failed: {error}. Set "
                "weight_sync_dir to a writable directory with enough space that the server sees too."
            ) from error
        return folder, {"write": seconds}

    def _own_folder(self, size: int) -> Path:
        """This client's folder, on a disk with room for `size` bytes if there is one. Removes those of killed runs."""
        if self._folder is not None and (self._folder / "lock").exists():
            return self._folder  # otherwise the system has cleaned its temporary directory
        roots = [Path(self.sync_dir or "/dev/shm"), Path(self.sync_dir or tempfile.gettempdir())]
        roots = [root for root in roots if self.sync_dir or os.access(root, os.W_OK)]
        for folder in (folder for root in roots for folder in root.glob("mt-grpo-weights-*")):
            with suppress(OSError):
                if folder.lstat().st_uid == os.geteuid():
                    with open(folder / "lock", "r+") as lock:  # free if its client is gone
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(folder)  # which follows no link
        root = next((root for root in roots if shutil.disk_usage(root).free > 1.05 * size), roots[-1])
        folder = Path(tempfile.mkdtemp(prefix=".mt-grpo-weights-", dir=root))
        self._folder_lock = open(folder / "lock", "w")
        fcntl.flock(self._folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before other runs can find the folder
        if not root.stat().st_mode & stat.S_ISVTX:  # in a directory such as /tmp other users must not read it
            folder.chmod(0o755)
        self._folder = folder.rename(root / folder.name[1:])
        return self._folder

    @staticmethod
    def _collect(weights: NamedWeights, expected: dict[str, int] | None, device: torch.device) -> dict:
        """Collect all weights for NCCL, which needs their names and shapes before the first is sent."""
        tensors = {  # what the model does not hold itself is on the CPU: a GPU has no room for a second copy
            name: t if isinstance(t, torch.nn.Parameter) else t.detach().to("cpu", copy=True) for name, t in weights
        }
        check_whole(tensors.keys(), expected)
        if device.type == "cuda":  # vLLM packs on streams of its own, which do not wait for the last optimizer step
            torch.cuda.current_stream(device).synchronize()
        return tensors

    def _load(self, version: str, weights: Path | dict, device: torch.device, limit: float) -> ServerError | None:
        """Let the server load a folder or tensors over NCCL. `limit` is that of a pause. Returns its error."""
        server, through = self.server, f" through {weights}" if isinstance(weights, Path) else ""
        version, held, self.held = tagged(version, server.lineage), self.held, None
        try:
            if self.adapter is not None:
                self._load_adapter(version, weights, held)
            elif isinstance(weights, Path):
                self._load_paused(version, held, limit, lambda: server.engine.load(server, weights))
            else:  # a group is created at the first push, and after one that failed
                self._nccl = self._nccl or NCCLGroup(server, self.group_port, device)
                self._load_paused(version, held, limit, lambda: self._nccl.send(weights))
        except ServerError as error:
            self.forget_restarted()
            hint = " Does the server see this folder? Else set weight_sync_dir to one that both see." * bool(through)
            hint += " If it has no adapters for this model, set weight_sync: disk." * (self.adapter is not None)
            return type(error)(f"The weight push to {server.base_url}{through} failed: {sentence(error)}{hint}")
        self.held = version
        return None

    def _load_paused(self, version: str, held: str | None, limit: float, load: Callable[[], Any]) -> None:
        server, engine = self.server, self.server.engine
        try:
            engine.pause(server, limit)
            # INVARIANT: from here on nothing is sampled, so that what was sampled until now is proven.
            self._check_it_holds(held)
            # A load that fails half-way leaves a version that nobody expects, so that nobody samples from it.
            half_loaded = server.weight_version().startswith("loading-")
            engine.name_weights(server, f"loading-{version}")
            if half_loaded:  # vLLM would mix that load of a layer with the next one: end it, over NCCL or by files
                for end in (lambda: server.request("POST", "/finish_weight_update", read=None), load):
                    with suppress(ServerError):
                        end()
            load()
            engine.forget(server)
            engine.name_weights(server, version)
        finally:
            try:
                engine.forget_images(server)
            finally:
                engine.go_on(server)

    def _load_adapter(self, name: str, folder: Path, held: str | None) -> None:
        """Let the server load an adapter next to its weights. Nothing is paused: a request names its adapter."""
        self._check_it_holds(held)
        self._unload(name)  # of a push of the same version that was lost
        self._loaded[name] = folder  # also where the answer is lost
        load = {"lora_name": name, "lora_path": str(folder)}
        self.server.request("POST", "/v1/load_lora_adapter", timeout=600.0, json=load, read=None)
        self.server.engine.name_weights(self.server, name)
        for old in list(self._loaded)[: -self.num_adapters]:
            if old not in self.in_use:
                self._unload(old)
        self.server.loaded = name

    def _check_it_holds(self, held: str | None) -> None:
        """Raise `ServerLost` unless the server still has the version of the last push. None: it is not known."""
        if held is not None and self.server.weight_version() != held:
            raise ServerLost(f"{self.server.base_url} restarted before the push: it no longer holds {held!r}")

    def _unload(self, name: str, timeout: float = 60.0) -> None:
        """Let the server forget an adapter, if it has it: a restarted one has none."""
        if name in self._loaded:
            try:
                body = {"lora_name": name}
                self.server.request("POST", "/v1/unload_lora_adapter", timeout=timeout, json=body, read=None)
            except ServerLost:
                raise
            except ServerError:
                pass
            del self._loaded[name]

    def forget_restarted(self) -> None:
        """Forget what a new process does not have: the version of the last push, and its place in the NCCL group."""
        self.held = None
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None

    def close(self) -> None:
        """Let the server report its own weights again and forget this client's adapters, and remove the folder."""
        try:
            if self._loaded:
                self.held = self.server.adapter = self.server.loaded = None
                with suppress(ServerError, RuntimeError):  # the server, or the interpreter's threads, may be gone
                    self.server.engine.name_weights(self.server, "default", timeout=5.0)
                    for name in list(self._loaded):
                        self._unload(name, timeout=5.0)
        finally:
            self.forget_restarted()  # closes the NCCL group, which keeps its port
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder_lock.close()
                self._folder = None
