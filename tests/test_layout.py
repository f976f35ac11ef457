"""The project: what stands where, and that imports point downwards."""

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from project import ROOT
from trl import GRPOTrainer

SCRIPT = ROOT / "mt_grpo_trainer.py"
PACKAGE = ROOT / "mt_grpo"
FILES = {str(path.relative_to(PACKAGE).with_suffix("")): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = [name for name in FILES if not name.endswith("__init__")]
FOLDERS = [path.parent for path in FILES.values() if path.name == "__init__.py"]


def listed(folder: Path) -> list[str]:
    """What the docstring of a folder's `__init__` lists, in its order: modules, and folders without their slash."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()), clean=False)
    return re.findall(r"^ {0,4}(\w+)/?  ", text, re.M)


WINGS = listed(PACKAGE)


def imported(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def ours(name: str) -> dict[str, str]:
    """The modules of the package that a module of it imports: their names to what the import says."""
    found = {}
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mt_grpo":
            path = "/".join(node.module.split(".")[1:])
            for alias in node.names:  # `from mt_grpo.base import ranks` names a module, too
                found[f"{path}/{alias.name}".strip("/") if path not in FILES else path] = ast.unparse(node)
        elif isinstance(node, ast.Import):
            found |= {"/".join(a.name.split(".")[1:]): a.name for a in node.names if a.name.startswith("mt_grpo.")}
    return found


def defined(path: Path) -> list[str]:
    """The names that a module's own statements bind at its top level, imports apart."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            names.append(node.target.id)
    return [name for name in names if name != "logger"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_lists_what_is_in_it(folder):
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert sorted(listed(folder)) == sorted(modules | folders) and len(WINGS) <= 10 and WINGS[0] == "rollout"
    text = (folder / "__init__.py").read_text()
    assert len(text) > 100, f"{folder} does not say why it stands where it stands"


@pytest.mark.contract("script classes")
def test_the_script_has_its_three_classes():
    """They are written in the file that a user copies, and not imported into it."""
    written = {node.name: node for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.ClassDef)}
    methods = {
        "MultiTurnToolEnv": {"__init__", "start"},
        "MTGRPOEnvTrainer": {"__init__", "_generate_and_score_completions"},
        "VLLMServerClient": {"__init__", "generate", "update_weights"},
    }
    for name, own in methods.items():
        assert own <= {node.name for node in written[name].body if hasattr(node, "name")}, name
    assert issubclass(importlib.import_module("mt_grpo_trainer").MTGRPOEnvTrainer, GRPOTrainer)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name):
    """A module imports from its own wing and from those above it in the list, and never the script."""
    assert not any(other.startswith((".", "mt_grpo_trainer")) for other in imported(FILES[name]))
    allowed = WINGS[: WINGS.index(name.split("/")[0]) + 1]
    for other, statement in ours(name).items():
        assert other.split("/")[0] in allowed, f"{name}: `{statement}` points upwards"
        assert other in FILES, f"{name}: `{statement}` names no module"


def test_integrations_and_modules_are_apart():
    """The core imports none: its table has their names."""
    for name in MODULES:
        wing, _, rest = name.partition("/")
        if wing == "integrations" and "/" in rest:
            others_of = {other.split("/")[1] for other in ours(name) if re.fullmatch(r"integrations/\w+/\w+", other)}
            assert others_of <= {rest.split("/")[0]}, name
    below = {name: set(ours(name)) for name in MODULES}
    while free := [name for name, others in below.items() if not others & below.keys()]:
        for name in free:
            del below[name]
    assert not below


def test_documented_imports_go_on_working():
    import mt_grpo
    import mt_grpo.rollout

    names = [name for name in vars(mt_grpo) if name[0].isupper()]
    assert len(names) >= 10 and all(getattr(mt_grpo, name) is getattr(mt_grpo.rollout, name) for name in names)
    code = "import sys, mt_grpo; assert not {'torch', 'transformers', 'trl'} & set(sys.modules), 'a plug-in waits'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert all(getattr(mt_grpo, name).__doc__ for name in mt_grpo._MODULES)


@pytest.mark.parametrize("folder", ["rewards", "tools", "tools/agents", "tools/ms_swift", "tools/verl"])
def test_plug_ins_stand_alone(folder):
    """A reward or tool file is copied alone: it imports nothing of the project."""
    files = list((ROOT / folder).glob("*.py"))
    assert files
    for path in files:
        assert not any(name.split(".")[0] in ("mt_grpo", "mt_grpo_trainer") for name in imported(path)), path


IN_ONE_FILE = [FILES[name] for name in MODULES if not name.startswith("integrations/")]


def test_names_are_unique_over_the_project():
    """So that one file can hold all of it (scripts/one_file.py)."""
    names = [name for path in [*IN_ONE_FILE, SCRIPT] for name in defined(path)]
    assert sorted(names) == sorted(set(names)) and len(names) > 100


@pytest.mark.contract("one_file")
def test_one_file_defines_all_of_it(tmp_path):
    source = runpy.run_path(str(ROOT / "scripts/one_file.py"))["one_file"]()
    path = tmp_path / "my_idea.py"
    path.write_text(source)
    left = [name for name in imported(path) if name.split(".")[0] in ("mt_grpo", "mt_grpo_trainer")]
    inside = {".".join(p.relative_to(ROOT).with_suffix("").parts) for p in IN_ONE_FILE}
    assert all(name in inside for name in left)  # loaded by name, in functions
    expected = [name for p in [*IN_ONE_FILE, SCRIPT] for name in defined(p)]
    assert set(expected) <= set(defined(path))
    # It reads a recipe as the project does, from a folder with nobody's pyproject.toml above it.
    program = (
        "import sys; import my_idea as mt\n"
        f"args = mt.parse_arguments(['--config', {str(ROOT / 'hf_recipes/tiny/calculator.yaml')!r}])[1]\n"
        "print(args.credit_assignment, mt.warn_of_untested({'vllm': '0.1'}), mt.ADAPTER_FILE)\n"
        f"try: mt.parse_arguments(['--config', {str(ROOT / 'hf_recipes/tiny/blackjack.yaml')!r}])\n"
        "except ValueError as error: sys.exit(str(error))"
    )
    ran = subprocess.run(
        [warm_python.executable(), "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 1 and "'gym_env'" in ran.stderr, ran.stderr  # it has no integrations
    assert ran.stdout.split()[-3:] == ["mt_grpo", "None", "adapter_model.safetensors"]
