"""Files: the output directory of a run, JSON, paths; and YAML without a key twice."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

logger = logging.getLogger(__name__)


def absolute(path: str | None) -> str | None:
    """The absolute path: it names the same file after a tool or a reward has changed the working directory."""
    return path and os.path.abspath(os.path.expanduser(path))


def read_json(path: Path) -> dict | None:
    """The object in a JSON file; None if the file is missing, is not valid JSON, or holds no object."""
    with suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else None
    return None


@contextmanager
def output_lock(path: str) -> Iterator[None]:
    """Lock the output directory, on rank 0. Raises `ValueError` if another run holds it."""
    if int(os.environ.get("RANK", 0)):
        yield
        return
    Path(path).mkdir(parents=True, exist_ok=True)
    with open(Path(path) / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(f"output_dir={path!r} is in use by another run{file.read()}. Set another one.") from None
        except OSError as error:  # a file system without locks
            logger.warning(f"output_dir={path!r} cannot be locked ({error}). Do not start another run in it.")
        file.truncate(0)
        print(f" (process {os.getpid()})", end="", file=file, flush=True)
        yield


# Of YAML 1.2: 1e-6 is a number, and 1:30 and 010, which are 90 and 8 in YAML 1.1, and dates are text.
NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)$"),
    "tag:yaml.org,2002:float": re.compile(r"[-+]?((\d[\d_]*\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+)$"),
}


class RecipeLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that raises `YAMLError` for a key that is set twice; the original uses the last one."""

    yaml_implicit_resolvers = {
        first: [(tag, NUMBERS.get(tag, pattern)) for tag, pattern in rows if not tag.endswith(":timestamp")]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        nodes = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in nodes]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                line = nodes[number].start_mark.line + 1
                raise yaml.YAMLError(f"{key!r} is set twice, again on line {line}. Remove one of them.")
        return super().construct_mapping(node, deep)
