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
    try:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] != "mt-grpo":  # somebody else's, where a copy of the script stands
            return {}
        extras = project["optional-dependencies"]
        texts = [*project["dependencies"], *(text for name in SERVERS for text in extras[name])]
        return {each.name: each.specifier for each in map(Requirement, texts)}
    except (OSError, LookupError, ValueError):  # the script and the package without the clone
        return {}


def outside(versions: dict[str, str]) -> list[str]:
    """Format the packages whose versions were not tested, as text.

    >>> [text.split(" (")[0] for text in outside({"vllm": "0.1.0", "torch": "2.13.0+cpu", "trl": "dev", "mine": "1"})]
    ['trl dev', 'vllm 0.1.0']
    """
    found = []
    for name in versions.keys() & known_ranges().keys():
        tested = known_ranges()[name]
        try:
            fits = tested.contains(versions[name], prereleases=True)
        except InvalidVersion:  # of a build of one's own
            fits = False
        found += [] if fits else [f"{name} {versions[name]} (tested: {tested})"]
    return sorted(found)


@functools.cache
def installed(engine: str | None = None) -> dict[str, str]:
    """The versions of the package's dependencies in this environment, and of an engine that runs in this process."""
    found = {}
    own = [name for name in known_ranges() if name not in SERVERS or name == engine]
    for name in own or ["torch", "trl", "transformers", "accelerate"]:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
