"""The ranges of versions that were tested, as pyproject.toml has them, and a warning of other versions."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import tomllib
from contextlib import suppress
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

logger = logging.getLogger(__name__)


@functools.cache
def known_ranges() -> dict[str, SpecifierSet]:
    """Package -> the range that was tested. Without the clone's pyproject.toml none is known.

    >>> "0.32.0" in known_ranges()["vllm"], "0.1.0" in known_ranges()["vllm"], "torch" in known_ranges()
    (True, False, True)
    """
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}) if path.is_file() else {}
    if project.get("name") != "mt-grpo":  # somebody else's, where a copy of the script stands
        return {}
    servers = project["optional-dependencies"]
    requirements = map(Requirement, [*project["dependencies"], *servers["vllm"], *servers["sglang"]])
    return {each.name: each.specifier for each in requirements}


def warn_of_untested(versions: dict[str, str] | None = None) -> None:
    """Warn of versions, such as `{"vllm": "0.1.0"}`, that were not tested. None: of those that are installed here."""
    for name, tested in known_ranges().items():
        with suppress(KeyError, importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name) if versions is None else versions[name]
            if not tested.contains(version, prereleases=True):
                logger.warning(
                    f"{name} {version} was not tested with this trainer, but {tested}. If something fails, install "
                    "tested versions: bash scripts/setup.sh (with a server: --gpu, without a GPU --test)."
                )
