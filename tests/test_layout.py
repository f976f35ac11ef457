"""The house: what stands where, how large it may be, and that imports point downwards."""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "mt_grpo_trainer.py"
PACKAGE = ROOT / "mt_grpo"
ROOMS = re.findall(
    r"^    (\w+)  ", ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text()), clean=False), re.M
)
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imported(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def defined(path: Path) -> list[str]:
    """The names that a module's own statements bind at its top level, imports apart."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            names.append(node.target.id)
    return [name for name in names if name != "logger"]


def test_every_room_is_on_the_map():
    assert sorted(ROOMS) == MODULES and len(MODULES) > 15


def test_the_script_is_read_in_an_evening():
    assert len(SCRIPT.read_text().splitlines()) <= 1600


@pytest.mark.parametrize("room", MODULES)
def test_rooms_are_small_and_import_only_downwards(room):
    path = PACKAGE / f"{room}.py"
    assert len(path.read_text().splitlines()) <= 600
    names = imported(path)
    ours = {name for name in names if name.split(".")[0] == "mt_grpo"}
    if room == "adapter_keys":  # adapters are imported where a recipe names them
        at_top = {node.module for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)}
        ours -= {name for name in ours - at_top if name.startswith("mt_grpo.adapters.")}
    assert not any(name.startswith((".", "mt_grpo_trainer")) for name in names)
    below = {f"mt_grpo.{name}" for name in ROOMS[: ROOMS.index(room)]}
    assert ours <= below, f"{room} imports {sorted(ours - below)}, which stand above it"


ADAPTERS = re.findall(
    r"^    (\w+)  ", ast.get_docstring(ast.parse((PACKAGE / "adapters/__init__.py").read_text()), clean=False), re.M
)


def test_every_adapter_is_on_its_map():
    assert sorted(ADAPTERS) == sorted(p.stem for p in (PACKAGE / "adapters").glob("*.py") if p.stem != "__init__")


@pytest.mark.parametrize("module", ADAPTERS)
def test_adapters_are_small_and_import_only_downwards(module):
    path = PACKAGE / f"adapters/{module}.py"
    assert len(path.read_text().splitlines()) <= 600
    names = imported(path)
    assert not any(name.startswith((".", "mt_grpo_trainer")) for name in names)
    others = {name for name in names if name.startswith("mt_grpo.adapters")}
    assert others <= {f"mt_grpo.adapters.{name}" for name in ADAPTERS[: ADAPTERS.index(module)]}


@pytest.mark.parametrize("folder", ["rewards", "tools", "agent_programs", "swift_plugins", "verl_tools"])
def test_plug_ins_stand_alone(folder):
    """A reward or tool file is copied alone: it imports nothing of the project."""
    files = list((ROOT / folder).glob("*.py"))
    assert files
    for path in files:
        assert not any(name.split(".")[0] in ("mt_grpo", "mt_grpo_trainer") for name in imported(path)), path


def test_names_are_unique_over_the_house():
    """So that one file can hold all of it (scripts/one_file.py)."""
    names = [name for path in [*(PACKAGE / f"{room}.py" for room in ROOMS), SCRIPT] for name in defined(path)]
    assert sorted(names) == sorted(set(names)) and len(names) > 100
    assert not set(names) & set(ROOMS)


def test_one_file_defines_all_of_it(tmp_path):
    source = runpy.run_path(str(ROOT / "scripts/one_file.py"))["one_file"]()
    path = tmp_path / "my_idea.py"
    path.write_text(source)
    ours = [name for name in imported(path) if name.split(".")[0] in ("mt_grpo", "mt_grpo_trainer")]
    assert all(name.startswith("mt_grpo.adapters.") for name in ours)  # those of the clone, where a recipe names them
    expected = [name for p in [*(PACKAGE / f"{room}.py" for room in ROOMS), SCRIPT] for name in defined(p)]
    assert set(expected) <= set(defined(path))
