"""What a vLLM server keeps of images, which a load of weights has to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def forget_images(server: Any) -> None:
    """Drop what a server's weights saw in images.

    INVARIANT: it follows each load, before another request has an image. The load empties the cache of vLLM's worker
    alone: its scheduler goes on counting on it, and the engine ends ("Encoder cache miss", vLLM 0.31 and 0.32). A
    pause of vLLM 0.32 empties both by itself.
    """
    if server.reads_images:
        server.request("POST", "/reset_encoder_cache", read=None)


@contextmanager
def images_forgotten(server: Any) -> Iterator[None]:
    """A load that changes nothing, while a server that reads images is paused: another run may use it."""
    if not server.reads_images:
        yield
        return
    server.request("POST", "/pause", timeout=60.0, params={"mode": "keep"})
    try:
        yield
    finally:
        try:
            forget_images(server)
        finally:
            server.request("POST", "/resume")
