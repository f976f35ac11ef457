"""Runs on several nodes: one output directory or one for each, one checkpoint to resume, the same settings."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.trainer import TRAINER_STATE_NAME

from mt_grpo.base.files import read_json
from mt_grpo.base.ranks import RunError
from mt_grpo.run.checkpoints import changed_settings, checkpoint_to_resume


def has_several_nodes() -> bool:
    """Whether the ranks of this run are on several nodes, according to torchrun's environment variables."""
    local, world = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return local < world and torch.distributed.is_initialized()


def raise_for_all(error: str | None, kind: type[Exception] = ValueError) -> None:
    """Raise `kind` on all ranks if any rank has an error. Collective."""
    where = f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}"
    if errors := [text for text in gather_object([error and f"{where}: {error}"]) if text]:
        raise kind(errors[0])


def checkpoint_of_all_ranks(wanted: str | bool | None, output_dir: str) -> str | None:
    """The checkpoint to resume. Collective on several nodes: `ValueError` unless all ranks find the one of rank 0."""
    if not wanted or not has_several_nodes():
        return checkpoint_to_resume(wanted, output_dir)
    error, found, name = None, None, None
    try:
        found = checkpoint_to_resume(wanted, output_dir)
        # Two runs that sampled otherwise have seen another number of tokens.
        tokens = (read_json(Path(found, TRAINER_STATE_NAME)) or {}).get("num_input_tokens_seen")
        name = f"{Path(found).name} after {tokens} tokens"
    except ValueError as raised:
        error = (
            f"{raised} Every node needs the checkpoint, in an output_dir that all share or (save_on_each_node) each."
        )
    raise_for_all(error)
    if name != (first := gather_object([name])[0]):
        error = f"resume_from_checkpoint={str(wanted)!r} is {name}, but {first} on rank 0. Set it to one of all nodes."
    raise_for_all(error)
    return found


def check_output_on_nodes(output_dir: str, save_on_each_node: bool | None) -> None:
    """Raise `ValueError` unless the nodes share `output_dir`, or each saves in a directory of its own. Collective.

    A checkpoint needs the files of all ranks. `save_on_each_node` is None if nothing is saved.
    """
    if not has_several_nodes() or save_on_each_node is None:
        return
    sharded = any(os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true" for name in ("FSDP", "DEEPSPEED"))
    if save_on_each_node and sharded:
        raise ValueError(
            "save_on_each_node: true is not supported with FSDP or DeepSpeed, where only rank 0 gets complete weights."
            " Put output_dir on a file system that all nodes share, and remove save_on_each_node."
        )
    # Each name is new, so that no network file system has cached that it is missing.
    name = f".node-{secrets.token_hex(6)}" if os.environ.get("LOCAL_RANK", "0") == "0" else None
    if name:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        Path(output_dir, name).touch()
    names, error = [each for each in gather_object([name]) if each], None
    seen = sum(Path(output_dir, each).exists() for each in names)
    gather_object([seen])  # nobody removes a file that another rank still looks for
    if name:
        Path(output_dir, name).unlink()
    if save_on_each_node and seen > 1:
        error = (
            f"save_on_each_node: true, but {seen} of {len(names)} nodes share output_dir={output_dir!r} and would "
            "write the same files. Remove save_on_each_node, or set output_dir to a local disk of each node."
        )
    elif not save_on_each_node and seen < len(names):
        error = (
            f"output_dir={output_dir!r} is shared with {seen - 1} of {len(names) - 1} other nodes, and a checkpoint "
            "needs the files of all ranks. Put output_dir on a file system that all nodes share, or set "
            "save_on_each_node: true, so that each node keeps complete checkpoints."
        )
    raise_for_all(error)


def check_same_on_nodes(record: Callable[[], dict[str, Any]]) -> None:
    """Raise `RunError` if a rank on another node would train with other settings or data. Collective."""
    if has_several_nodes():
        own = record() | {"model_name_or_path": None}  # a path on each node; the weights are those of rank 0
        changed = [line.partition(" (")[0] for line in changed_settings(gather_object([own])[0], own)]
        text = "\n  ".join(["this node differs from the node of rank 0:", *changed])
        raise_for_all(f"{text}\nStart all nodes with the same files and arguments." if changed else None, RunError)
