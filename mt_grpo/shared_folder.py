"""Whether the server sees the directory through which it gets weights, found out before weights are loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from mt_grpo.server_errors import ServerError, ServerLost

FAILED_CALL = re.compile(r'Call to collective_rpc method failed: ((?:[^"\\]|\\.)*)', re.S)  # inside a JSON string
OF_SEVERAL_WORKERS = re.compile(r"Worker failed with error '(.*)', please check", re.S)


def error_of_worker(answer: str) -> str | None:
    """What a worker raised, by vLLM's answer to a failed `/collective_rpc`. None: the answer says something else.

    An engine with several workers quotes the error. An engine with one worker (one GPU) does not.

    >>> error_of_worker('500 {"error":{"message":"Call to collective_rpc method failed: No \\\\"x\\\\".","code":500}}')
    'No "x".'
    """
    if not (found := FAILED_CALL.search(answer)):
        return None
    said = found[1]
    with suppress(ValueError):  # of an answer that was cut off
        said = json.loads(f'"{said}"')
    quoted = OF_SEVERAL_WORKERS.search(said)
    return quoted[1] if quoted else said


def check_shared_directory(client: Any, directory: str | None) -> None:
    """Raise `ServerError` unless the server reads what this process writes into the directory of the disk transport.

    The server is asked to load a file without any tensor, which changes none of its weights. With
    `is_checkpoint_format=False` vLLM opens the file before it touches the model. (By default it would first move all
    weights away, and a file that it cannot open would leave it without weights.)

    Args:
        client: The client of the server (`ServerConnection`).
        directory: The setting `weight_sync_dir`. None: /dev/shm, else the temporary directory.
    """
    default = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    root, folder = Path(directory or default), None
    said = f"weight_sync_dir={str(root)!r}" + ("" if directory else " (the default)")
    try:
        folder = Path(tempfile.mkdtemp(prefix=".mt-grpo-probe-", dir=root))  # its name is new: nobody has cached it
        folder.chmod(0o755)
        save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        load = {"weights_path": str(folder), "is_checkpoint_format": False}
        client.request("POST", "/collective_rpc", timeout=60.0, json={"method": "reload_weights", "kwargs": load})
    except OSError as error:
        raise ServerError(f"{said}: {error}. Expected a writable directory that the vLLM server sees too.") from error
    except ServerLost as error:
        if (said_there := error_of_worker(str(error))) is None:
            raise
        if "unexpected keyword argument" in said_there:  # an older vLLM cannot be asked: the first push shows it
            return
        raise ServerError(
            f"The vLLM server at {client.base_url} cannot read what the trainer writes. {said}: the trainer wrote "
            f"{folder / 'model.safetensors'}, and the server cannot open it: {said_there} Set weight_sync_dir to a "
            "directory that both see under the same path, such as one of a shared file system, or, on GPUs, "
            "weight_sync: nccl."
        ) from error
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
