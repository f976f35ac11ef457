"""Transfers weights to servers: by files in a shared directory, or over an NCCL group with each server."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mt_grpo.base.errors import ServerError, ServerLost, sentence
from mt_grpo.base.event_loop import at_once
from mt_grpo.generation.adapters import ADAPTER_FILE
from mt_grpo.generation.connection import ServerConnection
from mt_grpo.generation.nccl_groups import NCCLGroup
from mt_grpo.generation.versions import tagged

logger = logging.getLogger(__name__)

SHARD_BYTES = 2**30  # of one file, and of the weights that are in memory a second time; or one tensor, if it is larger
Pushed = tuple[dict[str, float], list[ServerError | None]]  # seconds by phase, and per server its error or None


def check_shared_directory(client: Any, directory: str | None) -> None:
    """Raise `ServerError` unless the server reads what this process writes into the directory of the disk transport.

    The server is asked to open a file without any tensor, which changes none of its weights.

    Args:
        client: The client of the server (`ServerConnection`).
        directory: The setting `weight_sync_dir`. None: /dev/shm, else the temporary directory.
    """
    default = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    root, folder = Path(directory or default), None
    setting = f"weight_sync_dir={str(root)!r}" + ("" if directory else " (the default)")
    try:
        folder = Path(tempfile.mkdtemp(prefix=".mt-grpo-probe-", dir=root))  # its name is new: nobody has cached it
        folder.chmod(0o755)
        save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        problem = client.engine.probe(client, folder)
    except OSError as error:
        raise ServerError(f"{setting}: {error}. Expected a writable directory that the server sees too.") from error
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    if problem:
        raise ServerError(
            f"The {client.engine.title} server at {client.base_url} cannot read what the trainer writes. {setting}: "
            f"the trainer wrote {folder / 'model.safetensors'}, and the server cannot open it: {problem} Set "
            "weight_sync_dir to a directory that both see under the same path, such as one of a shared file system."
        )


def why_not_shared(client: Any, directory: str | None) -> str | None:
    """The problem that `check_shared_directory` finds with a server. None if it sees the directory."""
    try:
        check_shared_directory(client, directory)
    except ServerLost:
        raise
    except ServerError as error:
        return str(error)
    return None


def write_weights(
    folder: Path, named_weights: Iterable[tuple[str, torch.Tensor]], file: str = "", shard_bytes: float = SHARD_BYTES
) -> tuple[set[str], dict[str, float]]:
    """Write weights as safetensors files into a folder. A tensor may change once the next one is requested.

    Args:
        folder: An existing folder.
        named_weights: (name, tensor on any device).
        file: The name of the only file. Empty: one file per `shard_bytes`.
        shard_bytes: The size of a file, which is in memory until it is written.

    Returns:
        The names that were written, and seconds: `gather` (the iterator, and to the CPU) and `write`.
    """
    names: set[str] = set()
    shard: dict[str, torch.Tensor] = {}
    seconds, count, began = dict.fromkeys(("gather", "write"), 0.0), 0, time.perf_counter()

    def write() -> None:
        nonlocal count, began
        got, count = time.perf_counter(), count + 1
        save_file(shard, folder / (file or f"model-{count:05d}.safetensors"), metadata={"format": "pt"})
        shard.clear()
        seconds["gather"] += got - began
        began = time.perf_counter()
        seconds["write"] += began - got

    for name, tensor in named_weights:
        if name in names:
            raise ValueError(f"the weight {name} was yielded twice")
        if not file and shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > shard_bytes:
            write()
        names.add(name)
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()  # tied weights come twice, and are copied
        del tensor  # before the next one is requested
    write()
    return names, seconds


class WeightTransfer:
    """Pushes one copy of the weights to one or several servers. A server samples nothing while it loads.

    Args:
        server: The client of the server. Its `instance` distinguishes its pushes from those of other runs.
        transport: `disk`, `nccl` or `auto`: `nccl` if this process has CUDA and the server was started for NCCL.
            `adapter`, or `auto` if `adapter` is set: the adapter alone, through files in the shared directory.
        sync_dir: Shared directory of the disk transport. None: /dev/shm, else the temporary directory.
        group_port: Port of the NCCL group.
    """

    SEVERAL_PAUSE_SECONDS = 60.0  # for the pause of one of several servers, of which none may hold up the others
    KEPT_ADAPTERS = 2  # a request that was sent just before a push names the adapter before it

    def __init__(self, server: ServerConnection, transport: str, sync_dir: str | None, group_port: int):
        self.server, self.transport, self.sync_dir, self.group_port = server, transport, sync_dir, group_port
        self.pause_timeout = server.request_timeout  # seconds that a pause may take
        self.held: str | None = None  # the version that the last complete push set; None: not known
        self.adapter: Any = None  # the configuration of the policy's LoRA, where it is pushed as an adapter
        self.in_use: set[str] = set()  # adapters that requests of any rank named as this push began
        self._loaded: dict[str, Path] = {}  # adapters that this client has loaded there, the oldest first
        self._nccl: NCCLGroup | None = None
        self._folder: Path | None = None  # this client's own folder in `sync_dir`

    def resolve(self, device: torch.device) -> str:
        """The transport, `disk` or `nccl`. Raises `ServerError` if the server does not support the setting."""
        return self.server.engine.transport(self.server, self.transport, device.type == "cuda")

    def push(
        self,
        named_weights: Iterator[tuple[str, torch.Tensor]],
        version: str,
        expected: dict[str, int] | None,
        device: torch.device,
        transfers: list[WeightTransfer],
    ) -> Pushed:
        """Push one copy of the weights to the servers of `transfers`. Other arguments as in `update_weights`.

        Returns seconds by phase, and per server its error or None. Raises what concerns all of them.
        """
        try:
            if not transfers:
                raise ServerLost(f"No {self.server.engine.title} server is left to push weights to.")
            for transfer in transfers:
                alone = len(transfers) == 1
                transfer.pause_timeout = transfer.server.request_timeout if alone else self.SEVERAL_PAUSE_SECONDS
            if self.adapter is None and transfers[0].resolve(device) == "nccl":  # all have the same settings
                return self._push_nccl(named_weights, version, expected, device, transfers)
            return self._push_files(named_weights, version, expected, transfers)
        finally:
            for _ in named_weights:  # where weights are sharded the other ranks walk to the end too
                pass

    def _push_files(
        self,
        named_weights: Iterator[tuple[str, torch.Tensor]],
        version: str,
        expected: dict[str, int] | None,
        transfers: list[WeightTransfer],
    ) -> Pushed:
        """Write all weights, or the adapter, once, and let all servers load them at the same time.

        The seconds are `gather` (to the CPU), `write` (the files), `load` (of the slowest server). Raises
        `ServerError` if a weight is missing, or if a file cannot be written.
        """
        folder = None
        try:
            folder = self._versions_folder(sum((expected or {}).values())) / version
            shutil.rmtree(folder, ignore_errors=True)  # of a push of the same version that was lost
            folder.mkdir()
            file = "" if self.adapter is None else ADAPTER_FILE
            names, seconds = write_weights(folder, named_weights, file)
            check_whole(names, expected)
            if self.adapter is not None:
                self.adapter.save_pretrained(str(folder))
            for path in folder.iterdir():
                path.chmod(0o644)  # others than this user may read it where the folder lets them
        except BaseException as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, (OSError, SafetensorError)):
                raise
            raise ServerError(
                f"The weight push to {self.server.base_url} through {folder or self.sync_dir or 'no folder'} failed: "
                f"{error}. Set weight_sync_dir to a writable directory with enough space that the server sees too."
            ) from error
        began = time.perf_counter()
        try:
            errors = at_once(lambda transfer: transfer._load(version, folder, self.adapter is not None), transfers)
        finally:
            # INVARIANT: an engine may read an adapter's files again while a request names it.
            kept = set().union(*(transfer._loaded.values() for transfer in transfers))
            for old in folder.parent.iterdir():
                if old.is_dir() and old not in kept:
                    shutil.rmtree(old, ignore_errors=True)
        return {**seconds, "load": time.perf_counter() - began}, errors

    def _push_nccl(
        self,
        named_weights: Iterator[tuple[str, torch.Tensor]],
        version: str,
        expected: dict[str, int] | None,
        device: torch.device,
        transfers: list[WeightTransfer],
    ) -> Pushed:
        """Send all weights over NCCL, to one server after the other. The first push creates a group with each server.

        The seconds are `gather` (to the CPU, except what the model holds itself) and `load` (of all servers).
        """
        start = time.perf_counter()
        # All weights are collected first: NCCL needs their names and shapes before the first is sent. What the model
        # does not hold itself is collected on the CPU: a GPU has no room for a second copy.
        tensors = {
            name: t if isinstance(t, torch.nn.Parameter) else t.detach().to("cpu", copy=True)
            for name, t in named_weights
        }
        check_whole(tensors.keys(), expected)
        if device.type == "cuda":  # vLLM packs on streams of its own, which do not wait for the last optimizer step
            torch.cuda.current_stream(device).synchronize()
        gathered = time.perf_counter()
        errors = [transfer._send(tensors, version, device) for transfer in transfers]
        return {"gather": gathered - start, "load": time.perf_counter() - gathered}, errors

    # -- one server's part of a push --

    def _load(self, version: str, folder: Path, adapter: bool) -> ServerError | None:
        """Let the server load a version's files. Returns its error, if it has one."""
        try:
            if adapter:
                self._load_adapter(tagged(version, self.server.lineage), folder)
            else:
                self._while_paused(version, lambda: self.server.engine.load(self.server, folder))
        except ServerError as error:
            kind = ServerLost if isinstance(error, ServerLost) else ServerError
            return kind(f"The weight push to {self.server.base_url} through {folder} failed: {sentence(error)}")
        return None

    def _send(self, tensors: dict[str, torch.Tensor], version: str, device: torch.device) -> ServerError | None:
        """Send weights to the server over NCCL. Returns its error, if it has one."""
        try:
            self._nccl = self._nccl or NCCLGroup(self.server, self.group_port, device)
            self._while_paused(version, lambda: self._nccl.send(tensors))
        except ServerError as error:
            return error
        return None

    def _while_paused(self, version: str, load: Callable[[], Any]) -> None:
        version, held, self.held = tagged(version, self.server.lineage), self.held, None
        server, engine = self.server, self.server.engine
        try:
            engine.pause(server, self.pause_timeout)
            # INVARIANT: from here on nothing is sampled, so that what was sampled until now is proven.
            self._check_it_holds(held)
            # A load that fails half-way leaves a version that nobody expects, so that nobody samples from it.
            engine.name_weights(server, f"loading-{version}")
            load()
            engine.forget(server)
            engine.name_weights(server, version)
            self.held = version
        finally:
            try:
                engine.forget_images(server)
            finally:
                engine.go_on(server)

    def _load_adapter(self, name: str, folder: Path) -> None:
        """Let the server load an adapter next to its weights. Nothing is paused: a request names its adapter."""
        held, self.held = self.held, None
        self._check_it_holds(held)
        self._unload(name)  # of a push of the same version that was lost
        self._loaded[name] = folder  # also where the answer is lost
        load = {"lora_name": name, "lora_path": str(folder)}
        self.server.request("POST", "/v1/load_lora_adapter", timeout=600.0, json=load, read=None)
        self.server.engine.name_weights(self.server, name)
        for old in list(self._loaded)[: -self.KEPT_ADAPTERS]:
            if old not in self.in_use:
                self._unload(old)
        self.held = self.server.loaded = name

    def _check_it_holds(self, held: str | None) -> None:
        """Raise `ServerLost` unless the server still has the version of the last push. None: it is not known."""
        if held is not None and self.server.weight_version() != held:
            raise ServerLost(f"{self.server.base_url} restarted before the push: it no longer holds {held!r}")

    def _unload(self, name: str, timeout: float = 60.0) -> None:
        """Let the server forget an adapter, if it has it: a restarted one has none."""
        if self._loaded.pop(name, None) is not None:
            try:
                body = {"lora_name": name}
                self.server.request("POST", "/v1/unload_lora_adapter", timeout=timeout, json=body, read=None)
            except ServerLost:
                raise
            except ServerError:
                logger.debug("%s has no adapter %s to unload", self.server.base_url, name)

    def drop_adapters(self, timeout: float = 60.0) -> None:
        """Unload all adapters that the server was sent, such as before all weights are pushed instead."""
        self.server.loaded = None
        for name in list(self._loaded):
            with suppress(ServerError):
                self._unload(name, timeout)

    def leave_nccl(self) -> None:
        """Close the NCCL group, which a restarted server cannot rejoin. The next push creates a new group."""
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None

    # -- the folder --

    def _versions_folder(self, size: int) -> Path:
        """This client's own folder, which has room for a version of `size` bytes. Raises `OSError` without room.

        Folders of killed runs are removed. A folder whose lock is free belongs to no running client.
        """
        if self._folder is not None and (self._folder / "lock").exists():
            return self._folder  # otherwise the system has cleaned its temporary directory
        roots = [self.sync_dir] if self.sync_dir else ["/dev/shm", tempfile.gettempdir()]
        roots = [Path(root) for root in roots if self.sync_dir or os.access(root, os.W_OK)]
        for folder in (folder for root in roots for folder in root.glob("mt-grpo-weights-*")):
            with suppress(OSError):
                if folder.lstat().st_uid == os.geteuid():
                    with open(folder / "lock", "r+") as lock:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(folder)  # which follows no link
        free = {root: shutil.disk_usage(root).free for root in roots}
        root = next((root for root in roots if free[root] > 1.05 * size), None)
        if root is None:
            raise OSError(
                f"the weights need {size / 2**30:.2f} GiB of disk space, and there are free: "
                + ", ".join(f"{room / 2**30:.2f} GiB in {root}" for root, room in free.items())
            )
        folder = Path(tempfile.mkdtemp(prefix=".mt-grpo-", dir=root))
        self._folder_lock = open(folder / "lock", "w")
        fcntl.flock(self._folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before other runs can find the folder
        if not root.stat().st_mode & stat.S_ISVTX:  # in a directory such as /tmp other users must not read it
            folder.chmod(0o755)
        self._folder = folder.rename(root / f"mt-grpo-weights-{self.server.instance}")
        return self._folder

    def close(self) -> None:
        """Let the server report its own weights again and forget this client's adapters, and remove the folder."""
        try:
            if self._loaded:
                self.held = self.server.adapter = None
                with suppress(ServerError, RuntimeError):  # the server, or the interpreter's threads, may be gone
                    self.server.engine.name_weights(self.server, "default", timeout=5.0)
                    self.drop_adapters(timeout=5.0)
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder_lock.close()
                self._folder = None


def check_whole(names: Iterable[str], expected: dict[str, int] | None) -> None:
    """Raise `ServerError` if a weight is missing from a push."""
    if missing := sorted(set(expected or ()) - set(names)):
        raise ServerError(f"{len(missing)} weights are missing from the push, such as {missing[0]}: nothing sent.")
