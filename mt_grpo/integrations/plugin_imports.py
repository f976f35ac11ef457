"""What a plug-in imports of a framework that is not installed: all of it is checked when its file is loaded.

A name is offered, or a placeholder that raises where it is used, or unknown. An import inside a function runs in the
middle of a rollout, so it is read from the source: an unknown name is refused at once, a placeholder is told.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class PlaceholderType(type):
    """Metaclass of placeholders that can be imported and subclassed, and nothing else."""

    def __repr__(cls) -> str:
        return f"<{cls.__name__}, which is not supported here>"


def not_offered(name: str, framework: str) -> type:
    """Create a placeholder for a class or a function of a framework.

    It raises `NotImplementedError` when it is called.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(f"{name} of {framework} is not supported here, and {framework} is not installed.")

    return PlaceholderType(name, (), {"__init__": __init__})


class UnusedRegistry(dict):
    """A registry of a framework that is not used here. A plug-in that registers something gets a warning."""

    def __init__(self, name: str, framework: str):
        self.name, self.framework = name, framework

    def __setitem__(self, key: Any, value: Any) -> None:
        logger.warning(f"{self.name}[{key!r}] of {self.framework} has no effect here: {self.name} is not used.")
        super().__setitem__(key, value)


class Import(NamedTuple):
    """One name that a plug-in file imports, with its line."""

    line: int
    module: str
    name: str | None  # None: `import module`

    def __str__(self) -> str:
        return f"line {self.line}: {self.module}{'' if self.name is None else f'.{self.name}'}"


def imports_of(tree: ast.AST, package: str) -> Iterator[Import]:
    """Yield all imports of a package, also those in functions, except those in a `try` that may catch the error."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Try) and any(may_catch(handler.type) for handler in node.handlers):
            parts = [*node.handlers, *node.orelse, *node.finalbody]
            yield from imports_of(ast.Module(parts, []), package)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == package:
            yield from (Import(node.lineno, node.module, each.name) for each in node.names if each.name != "*")
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names if each.name.split(".")[0] == package]
            yield from (Import(node.lineno, name, None) for name in names)
        else:
            yield from imports_of(node, package)


def may_catch(kind: ast.expr | None) -> bool:
    """Whether an `except` of this kind catches an import that fails."""
    caught = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
    return kind is None or any(isinstance(each, ast.Name) and each.id in caught for each in ast.walk(kind))


def check_plugin_imports(path: str, key: str, framework: str, finder: type, modules: dict[str, dict]) -> None:
    """Warn of imports that are not supported. Raises `ValueError` for names that do not exist at all.

    If the framework itself is installed, its own modules are imported, and nothing is checked.

    Args:
        path: The file, which was imported.
        key: The recipe's key that names it.
        framework: The framework's name for messages.
        finder: The class of the loader that creates `modules`.
        modules: The supported names: module -> name -> value.
    """
    package = next(iter(modules)).split(".")[0]
    spec = importlib.util.find_spec(package) if package not in sys.modules else sys.modules[package].__spec__
    if spec is None or not isinstance(spec.loader, finder):
        return
    unknown, placeholders = [], []
    for each in imports_of(ast.parse(Path(path).read_text(encoding="utf-8")), package):
        offered = {} if each.module not in modules else modules[each.module]
        is_module = (each.module if each.name is None else f"{each.module}.{each.name}") in modules
        if each.name in offered and isinstance(offered[each.name], (PlaceholderType, UnusedRegistry)):
            placeholders.append(each)
        elif not is_module and each.name not in offered and not is_found(each):
            unknown.append(each)
    if unknown:
        raise ValueError(
            f"{key}: {path!r} imports names that do not exist: {', '.join(map(str, unknown))}. {framework} is not "
            "installed, and only its parts for schedulers, tools, environments and rewards are built in. Remove "
            f"the import, or install {framework}."
        )
    if placeholders:
        logger.warning(
            f"{path}: {', '.join(map(str, placeholders))} of {framework}: not supported here. It can be imported, but "
            "raises when it is used."
        )


def is_found(each: Import) -> bool:
    """Whether an import works in another way, such as that of a file next to a YAML."""
    module = sys.modules.get(each.module)
    if module is not None and each.name is not None:
        return hasattr(module, each.name)
    try:
        return each.name is None and importlib.util.find_spec(each.module) is not None
    except ImportError:
        return False
