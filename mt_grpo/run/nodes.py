"""Runs on several nodes: one output directory or one for each, one checkpoint to resume, the same settings."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from mt_grpo.base.files import read_json
from mt_grpo.base.ranks import RunError
from mt_grpo.run.checkpoints import RUN_RECORD, changed_settings, checkpoint_to_resume, sha256

# gloo's errors if the process at the other end is gone, or does not answer for `ddp_timeout` seconds.
LOST_PEER = re.compile(r"gloo.*(Connection (closed|reset) by peer|Broken pipe|Timed out waiting)", re.S)
MAY_DIFFER = ("model_name_or_path",)  # a path on each node; the weights are those of rank 0


def has_several_nodes() -> bool:
    """Whether the ranks of this run are on several nodes, according to torchrun's environment variables."""
    local, world = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return local < world and torch.distributed.is_initialized()


def on_this_rank() -> str:
    return f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}"


def raise_for_all(error: str | None, kind: type[Exception] = ValueError) -> None:
    """Raise `kind` on all ranks if any rank has an error. Collective."""
    errors = gather_object([f"{on_this_rank()}: {error}" if error else None])
    if found := list(filter(None, errors)):
        raise kind(found[0] + (f" (and {len(found) - 1} more ranks)" if found[1:] else ""))


def checkpoint_of_all_ranks(wanted: str | bool | None, output_dir: str) -> str | None:
    """Find the checkpoint to resume. Collective on several nodes, where all ranks must find the same one.

    Raises `ValueError` on all ranks if one of them finds none, or another one than rank 0.
    """
    if not wanted or not has_several_nodes():
        return checkpoint_to_resume(wanted, output_dir)
    error, found, state = None, None, None
    try:
        found = checkpoint_to_resume(wanted, output_dir)
        saved, record = (read_json(Path(found) / name) or {} for name in ("trainer_state.json", RUN_RECORD))
        # Two runs that sampled otherwise have seen another number of tokens. The rest of the state differs by rank.
        counts = [f"{name}={saved.get(name)}" for name in ("global_step", "num_input_tokens_seen")]
        state = f"{', '.join(counts)}, settings {sha256(json.dumps(record, sort_keys=True))}"
    except ValueError as raised:
        error = (
            f"{raised} Every node needs the checkpoint. Resume with an output_dir that all nodes share, or, after a "
            "run with save_on_each_node: true, with each node's own output_dir."
        )
    raise_for_all(error)
    first = gather_object([(state, found)])[0]
    if state != first[0]:
        error = (
            f"resume_from_checkpoint={str(wanted)!r} is {found} ({state}), but {first[1]} ({first[0]}) on rank 0. "
            "Set it to a checkpoint that all nodes have."
        )
    raise_for_all(error)
    return found


def check_output_on_nodes(output_dir: str, save_on_each_node: bool | None) -> None:
    """Raise `ValueError` unless the nodes share `output_dir`, or each saves in a directory of its own. Collective.

    A checkpoint needs the files of all ranks. Nodes that save in the same directory would write the same files.
    `save_on_each_node` is None if nothing is saved.
    """
    if not has_several_nodes() or save_on_each_node is None:
        return
    sharded = [
        name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"
    ]
    if save_on_each_node and sharded:
        raise ValueError(
            f"save_on_each_node: true is not supported with {sharded[0]}, where only rank 0 gets complete weights. "
            "Put output_dir on a file system that all nodes share, and remove save_on_each_node."
        )
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # of its node
    name, error = f".node-{secrets.token_hex(6)}" if is_first else "", None
    try:
        if name:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            (Path(output_dir) / name).touch()
    except OSError as raised:
        error = f"output_dir={output_dir!r} cannot be written to: {raised}."
    names = list(filter(None, gather_object([name])))
    # Each name is new, so that no network file system has cached that it is missing.
    seen = sum((Path(output_dir) / other).exists() for other in names)
    gather_object([seen])  # nobody removes a file that another rank still looks for
    if name:
        (Path(output_dir) / name).unlink(missing_ok=True)
    if error is None and save_on_each_node and seen > 1:
        error = (
            f"save_on_each_node: true, but {seen} of {len(names)} nodes share output_dir={output_dir!r} and would "
            "write the same files at the same time. Remove save_on_each_node, or set output_dir to a local disk of "
            "each node."
        )
    elif error is None and not save_on_each_node and seen < len(names):
        error = (
            f"output_dir={output_dir!r} is shared with {seen - 1} of {len(names) - 1} other nodes, and a checkpoint "
            "needs the files of all ranks. Put output_dir on a file system that all nodes share, or set "
            "save_on_each_node: true, so that each node keeps complete checkpoints."
        )
    raise_for_all(error)


def save_weights_on_each_node(model: Any, args: Any) -> None:
    """Let `save_pretrained` write on each node with `save_on_each_node`. transformers 5.17 writes on rank 0 only."""
    if args.save_on_each_node:
        model.should_save_on_this_rank = lambda is_main_process: is_main_process


def check_same_on_nodes(record: Callable[[], dict[str, Any]]) -> None:
    """Raise `RunError` if a rank on another node would train with other settings, data, rewards or tools.

    Collective. `record` returns what determines the results of a run, and is called on several nodes only.
    """
    if not has_several_nodes():
        return
    own = {key: value for key, value in record().items() if key not in MAY_DIFFER}
    changed = changed_settings(gather_object([own])[0], own)
    lines = "\n  ".join(line.partition(" (")[0] for line in changed)
    raise_for_all(
        f"this node differs from the node of rank 0:\n  {lines}\nStart all nodes with the same files and arguments."
        if changed
        else None,
        RunError,
    )


def apply_ddp_timeout(seconds: float) -> None:
    """Limit the wait of collective calls on a CPU to `seconds`. `TrainingArguments` sets this on GPUs only.

    Otherwise a rank would wait 30 minutes for a node that is gone without closing its connections.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is a collective call that failed because a process on another node is gone or hangs.

    >>> is_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:30411"))
    True
    >>> is_lost_peer(RuntimeError("CUDA out of memory"))
    False
    """
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and LOST_PEER.search(str(error)) is not None
