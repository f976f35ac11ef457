"""The ranges of versions that were tested, as pyproject.toml has them, and what is outside of them."""

from __future__ import annotations

import functools
import importlib.metadata
import tomllib
from contextlib import suppress
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

INSTALL = "bash scripts/setup.sh (with a server: --gpu, without a GPU --test)"  # what installs tested versions
SERVERS = ("vllm", "sglang")  # engines, which run elsewhere


@functools.cache
def known_ranges() -> dict[str, SpecifierSet]:
    """Package -> the range that was tested; `SERVERS` are servers'. Without the clone's pyproject.toml none is known.

    >>> "0.32.0" in known_ranges()["vllm"], "0.1.0" in known_ranges()["vllm"], "torch" in known_ranges()
    (True, False, True)
    """
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}) if path.is_file() else {}
    if project.get("name") != "mt-grpo":  # somebody else's, where a copy of the script stands
        return {}
    of_servers = [text for name in SERVERS for text in project["optional-dependencies"][name]]
    return {each.name: each.specifier for each in map(Requirement, [*project["dependencies"], *of_servers])}


def outside(versions: dict[str, str]) -> list[str]:
    """Format the packages whose versions were not tested, as text.

    >>> [text.split(" (")[0] for text in outside({"vllm": "0.1.0", "torch": "2.13.0+cpu", "trl": "dev", "mine": "1"})]
    ['trl dev', 'vllm 0.1.0']
    """

    def fits(name: str) -> bool:
        with suppress(InvalidVersion):  # of a build of one's own
            return known_ranges()[name].contains(versions[name], prereleases=True)
        return False

    other = [name for name in sorted(versions.keys() & known_ranges().keys()) if not fits(name)]
    return [f"{name} {versions[name]} (tested: {known_ranges()[name]})" for name in other]


@functools.cache
def installed(engine: str | None = None) -> dict[str, str]:
    """The versions of the package's dependencies in this environment, and of an engine that runs in this process."""
    found, own = {}, [name for name in known_ranges() if name not in SERVERS or name == engine]
    for name in own or ["torch", "trl", "transformers", "accelerate"]:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
