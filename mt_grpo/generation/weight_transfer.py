"""Transfers weights to servers: by files in a shared directory, or over a group of processes for each."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mt_grpo.base.errors import ServerError, ServerLost, sentence
from mt_grpo.base.event_loop import at_once
from mt_grpo.generation.adapters import ADAPTER_FILE
from mt_grpo.generation.connection import ServerConnection
from mt_grpo.generation.nccl_groups import NCCLGroup
from mt_grpo.generation.versions import tagged
from mt_grpo.generation.weight_file import write_weights

logger = logging.getLogger(__name__)

# Whether the server sees the directory through which it gets weights, found out before weights are loaded.


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


Pushed = tuple[dict[str, float], list[ServerError | None]]  # seconds by phase, and per server its error or None


class WeightTransfer:
    """Pushes one copy of the weights to one or several servers. A server samples nothing while it loads.

    Args:
        server: The client of the server. Its `instance` distinguishes its pushes from those of other runs.
        transport: `disk`, `nccl` or `auto`: `nccl` if this process has CUDA and the server was started for NCCL.
            `adapter`, or `auto` if `adapter` is set: the adapter alone, through files in the shared directory.
        sync_dir: Shared directory of the disk transport. None: /dev/shm, else the temporary directory.
        group_port: Port of the NCCL group.
    """

    SEVERAL_PAUSE_SECONDS = 60.0  # for the pause of one of several servers
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

    def resolve_or_error(self, device: torch.device) -> str | ServerError:
        """The transport, or the error that `resolve` raises."""
        try:
            return self.resolve(device)
        except ServerError as error:
            return error

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
        for transfer in transfers:
            several = len(transfers) > 1  # one that hangs must not hold up the others
            transfer.pause_timeout = self.SEVERAL_PAUSE_SECONDS if several else transfer.server.request_timeout
        try:
            if self.adapter is not None:
                return self.push_adapter(named_weights, version, expected, transfers)
            kinds = at_once(lambda transfer: transfer.resolve_or_error(device), transfers)
            able = [transfer for transfer, kind in zip(transfers, kinds) if isinstance(kind, str)]
            if not able:
                raise next(
                    iter(kinds),
                    ServerLost(f"No {self.server.engine.title} server is left to push weights to."),
                )
            if {kind for kind in kinds if isinstance(kind, str)} == {"nccl"}:
                seconds, errors = self.push_nccl(named_weights, version, expected, device, able)
            else:
                seconds, errors = self.push_disk(named_weights, version, expected, able)
            by_server = dict(zip(able, errors))
            return seconds, [by_server.get(transfer, kind) for transfer, kind in zip(transfers, kinds)]
        finally:
            for _ in named_weights:  # where weights are sharded the other ranks walk to the end too
                pass

    def push_disk(
        self,
        named_weights: Iterator[tuple[str, torch.Tensor]],
        version: str,
        expected: dict[str, int] | None,
        transfers: list[WeightTransfer],
    ) -> Pushed:
        """Write all weights into one file, and let all servers load it at the same time.

        The seconds are `gather` (to the CPU), `write` (the file), `load` (pause to resume, of the slowest). Raises
        `ServerError` if a weight is missing, or if the file cannot be written.
        """
        with self._written(named_weights, version, expected) as (folder, seconds):
            began = time.perf_counter()
            try:
                errors = at_once(lambda transfer: transfer._load_file(version, folder), transfers)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        return {**seconds, "load": time.perf_counter() - began}, errors

    def push_adapter(
        self,
        named_weights: Iterator[tuple[str, torch.Tensor]],
        version: str,
        expected: dict[str, int] | None,
        transfers: list[WeightTransfer],
    ) -> Pushed:
        """Write an adapter, and let all servers load it next to those that they have. Returns as `push_disk`.

        Nothing is paused: a request names its adapter. The files stay while a server may read them again.
        """
        with self._written(named_weights, version, expected) as (folder, seconds):
            began = time.perf_counter()
            errors = at_once(lambda transfer: transfer._load_adapter(version, folder), transfers)
            # INVARIANT: an engine may read an adapter's files again while a request names it.
            kept = {folder, *(path for transfer in transfers for path in transfer._loaded.values())}
            for old in folder.parent.iterdir():
                if old.is_dir() and old not in kept:
                    shutil.rmtree(old, ignore_errors=True)
        return {**seconds, "load": time.perf_counter() - began}, errors

    @contextmanager
    def _written(
        self,
        named_weights: Iterator[tuple[str, torch.Tensor]],
        version: str,
        expected: dict[str, int] | None,
    ) -> Iterator[tuple[Path, dict[str, float]]]:
        """A folder with a version's name, and the seconds that it took. It is whole, or it is not there.

        Raises `ServerError` where a weight is missing, or where it cannot be written.
        """
        folder = None
        if expected is None:  # what comes is not known before it is there
            tensors = {name: t.detach().to("cpu", copy=True) for name, t in named_weights}
            expected = {name: t.nbytes for name, t in tensors.items()}
            named_weights = ((name, tensors.pop(name)) for name in list(tensors))
        try:
            folder = self._versions_folder(sum(expected.values())) / version
            partial = folder.with_name(f"partial-{version}")
            try:
                partial.mkdir()
                file = partial / ("model.safetensors" if self.adapter is None else ADAPTER_FILE)
                names, seconds = write_weights(file, named_weights, expected)
                self._check_names(names, expected)
                if self.adapter is not None:
                    self.adapter.save_pretrained(str(partial))
                for path in partial.iterdir():
                    path.chmod(0o644)  # others than this user may read it where the folder lets them
                shutil.rmtree(folder, ignore_errors=True)  # of a push of the same version that was lost
                partial.rename(folder)  # INVARIANT: a folder with a version's name is complete
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            yield folder, seconds
        except OSError as error:
            advice = " Set weight_sync_dir to a writable directory with enough space that the server sees too."
            raise ServerError(
                f"The weight push to {self.server.base_url} through {folder or self.sync_dir or 'no folder'} failed: "
                f"{error}.{advice}"
            ) from error

    def _load_file(self, version: str, folder: Path) -> ServerError | None:
        """Let the server load a version's file. Returns its error, if it has one."""
        try:
            self._while_paused(version, lambda: self.server.engine.load(self.server, folder))
        except ServerError as error:
            kind = ServerLost if isinstance(error, ServerLost) else ServerError
            return kind(f"The weight push to {self.server.base_url} through {folder} failed: {sentence(error)}")
        return None

    def _load_adapter(self, version: str, folder: Path) -> ServerError | None:
        """Let the server load an adapter under the version's name. Returns its error, if it has one."""
        name, held, self.held = tagged(version, self.server.lineage), self.held, None
        load = {"lora_name": name, "lora_path": str(folder)}
        try:
            self._check_it_holds(held)
            self._unload(name)  # of a push of the same version that was lost
            self._loaded[name] = folder  # also where the answer is lost
            self.server.request("POST", "/v1/load_lora_adapter", timeout=600.0, json=load, read=None)
            self.server.engine.name_weights(self.server, name)
            for old in list(self._loaded)[: -self.KEPT_ADAPTERS]:
                if old not in self.in_use:
                    self._unload(old)
        except ServerError as error:
            kind = ServerLost if isinstance(error, ServerLost) else ServerError
            return kind(f"The adapter push to {self.server.base_url} through {folder} failed: {sentence(error)}")
        self.held = self.server.loaded = name
        return None

    def drop_adapters(self) -> None:
        """Unload all adapters that the server was sent, because all weights are pushed from now on.

        Without it the end of the run would call these weights the server's own.
        """
        for name in list(self._loaded):
            with suppress(ServerError):
                self._unload(name)
        self._loaded = {}

    def _unload(self, name: str) -> None:
        """Let the server forget an adapter, if it has it: a restarted one has none."""
        if self._loaded.pop(name, None) is not None:
            try:
                self.server.request("POST", "/v1/unload_lora_adapter", json={"lora_name": name}, read=None)
            except ServerLost:
                raise
            except ServerError:
                logger.debug("%s has no adapter %s to unload", self.server.base_url, name)

    def _versions_folder(self, size: int) -> Path:
        """This client's own folder, which has room for a version of `size` bytes. Raises `OSError` without room.

        Folders of killed runs are removed. A folder whose lock is free belongs to no running client.
        """
        if self._folder is not None and not self._holds_its_folder():
            self._leave_folder()
        if self._folder is None:
            shared = [Path(d) for d in ([self.sync_dir] if self.sync_dir else ["/dev/shm", tempfile.gettempdir()])]
            shared = [d for d in shared if self.sync_dir or os.access(d, os.W_OK)]
            for root in shared:
                for folder in root.glob("mt-grpo-weights-*"):
                    self._remove_if_dead(folder)
            free = {root: shutil.disk_usage(root).free for root in shared}
            root = next((root for root in shared if free[root] > 1.05 * size), None)
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

    def push_nccl(
        self,
        named_weights: Iterator[tuple[str, torch.Tensor]],
        version: str,
        expected: dict[str, int] | None,
        device: torch.device,
        transfers: list[WeightTransfer],
    ) -> Pushed:
        """Send all weights over NCCL, to one server after the other. The first push creates a group with each server.

        The seconds are `gather` (to the CPU, except what the model holds itself) and `load` (pause to resume, of
        all). A server's error is `ServerLost` if the group cannot be created, or if the server does not take the
        weights.
        """
        start = time.perf_counter()
        # All weights are collected first: NCCL needs their names and shapes before the first is sent. What the model
        # does not hold itself is collected on the CPU: a GPU has no room for a second copy.
        tensors = {
            name: t if isinstance(t, torch.nn.Parameter) else t.detach().to("cpu", copy=True)
            for name, t in named_weights
        }
        self._check_names(tensors.keys(), expected)
        metadata = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
        if device.type == "cuda":  # vLLM packs on streams of its own, which do not wait for the last optimizer step
            torch.cuda.current_stream(device).synchronize()
        gathered = time.perf_counter()
        errors = [transfer._send(metadata, tensors, version, device) for transfer in transfers]
        return {"gather": gathered - start, "load": time.perf_counter() - gathered}, errors

    def _send(
        self, metadata: list[tuple], tensors: dict[str, torch.Tensor], version: str, device: torch.device
    ) -> ServerError | None:
        """Send weights to the server over NCCL. Returns its error, if it has one."""
        try:
            self._nccl = self._nccl or NCCLGroup(self.server, self.group_port, device)
            self._while_paused(version, lambda: self._nccl.send(metadata, tensors))
        except ServerError as error:
            return error
        return None

    def leave_nccl(self) -> None:
        """Close the NCCL group, which a restarted server cannot rejoin. The next push creates a new group."""
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None

    @staticmethod
    def _check_names(names: typing.Iterable[str], expected: dict[str, int] | None) -> None:
        if missing := sorted(set(expected or ()) - set(names)):
            raise ServerError(f"{len(missing)} weights are missing from the push, such as {missing[0]}: nothing sent.")

    def _check_it_holds(self, held: str | None) -> None:
        """Raise `ServerLost` unless the server still has the version of the last push. None: it is not known."""
        if held is not None and self.server.weight_version() != held:
            raise ServerLost(f"{self.server.base_url} restarted before the push: it no longer holds {held!r}")

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

    @staticmethod
    def _remove_if_dead(folder: Path) -> None:
        """Remove a folder of weights, unless another user owns it or a running client holds its lock."""
        with suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                with open(folder / "lock", "r+") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)

    def _holds_its_folder(self) -> bool:
        """Whether the folder is still the one that this client created: the system may clean temporary directories."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._folder_lock.fileno()), (self._folder / "lock").lstat())
        return False

    def _leave_folder(self) -> None:
        if self._holds_its_folder():
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder_lock.close()
        self._folder = None

    def close(self) -> None:
        """Let the server forget this client's adapters, and remove the folder of the weights."""
        try:
            if self._loaded:
                self._forget_adapters()
        finally:
            if self._folder is not None:
                self._leave_folder()

    def _forget_adapters(self) -> None:
        """Let the server report its own weights again and unload adapters. Short time limits: it may be gone."""
        names, self._loaded = list(self._loaded), {}
        self.held = self.server.loaded = self.server.adapter = None
        try:
            self.server.engine.name_weights(self.server, "default", timeout=5.0)
            for name in names:
                body = {"lora_name": name}
                self.server.request("POST", "/v1/unload_lora_adapter", timeout=5.0, json=body, read=None)
        except (ServerError, RuntimeError) as error:  # as an interpreter ends, no name can be looked up any more
            logger.debug("%s could not unload the adapters of this run: %s", self.server.base_url, error)
