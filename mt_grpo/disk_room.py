"""Whether the disk has room for what a run saves."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers.training_args import OptimizerNames

logger = logging.getLogger(__name__)


def bytes_to_save(model: Any, optim: OptimizerNames, sharded: bool) -> tuple[int, int]:
    """(bytes of the trained model, bytes of one checkpoint), computed from the parameters.

    With LoRA only the adapter is saved. A sharded checkpoint (FSDP, DeepSpeed) holds the weights twice, and the
    optimizer's state in float32.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    saved = trained if is_peft_model(model) else model.parameters()
    weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in saved)
    numbers = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
    size = 4 if sharded else 1 if "8bit" in optim.value else max((p.element_size() for p in trained), default=0)
    moments = 2 if "adam" in optim.value else 0  # others keep less state, which is not counted
    return weights, weights * (2 if sharded else 1) + numbers * (moments + sharded) * size


def check_room(folder: str, least: int, planned: int, what: str, key: str) -> None:
    """Raise `ValueError` if a directory has no room for `least` bytes and 5 % more; warn if it has none for `planned`.

    A directory that cannot be written raises `ValueError` too. For the message: `what` is saved there, and `key` is
    the setting that names the directory.
    """
    gib = 2.0**30
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            usage = shutil.disk_usage(folder)
    except OSError as error:
        raise ValueError(f"{key}={folder!r} cannot be written: {error}. Set {key} to a writable directory.") from None
    found = f"{key}={folder!r} has {usage.free / gib:.3f} GiB free"
    if usage.total and usage.free < 1.05 * least:  # some network file systems report a size of 0
        raise ValueError(f"{found}; {what} needs {1.05 * least / gib:.3f} GiB. Make room there, or set another {key}.")
    if usage.total and usage.free < 1.05 * planned:
        logger.warning(
            f"{found}; all that the run may save needs {1.05 * planned / gib:.3f} GiB. Make room there, or set "
            "save_total_limit."
        )
