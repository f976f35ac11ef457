"""verl's YAML files of tools and interactions, and Python files of functions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.base.errors import error_line
from mt_grpo.base.files import RecipeLoader
from mt_grpo.integrations.verl.base import declared, function_as_tool, overridden, schema_dict
from mt_grpo.integrations.verl.paths import install
from mt_grpo.recipe.plugins import find_modules_next_to, import_file, load_class

TOOLS, INTERACTIONS = "tools_config_file", "interaction_config_file"


@contextmanager
def named(what: str, expected: str = "") -> Iterator[None]:
    """Context manager that puts what a recipe names in front of any error, as a `ValueError`."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {error_line(error).removeprefix('ValueError: ')}.{expected}") from error


def load_tools_config(path: str) -> dict[str, Any]:
    """The tools of a YAML by their names: `tools: [{class_name, config, tool_schema}]`. Raises `ValueError`."""
    tools: dict[str, Any] = {}
    for entry in read_entries(path, "tools", TOOLS):
        with named(f"{TOOLS}: {entry['class_name']!r} of {path!r}"):
            tool = tool_of_entry(path, **entry)
            name = tool.tool_schema.function.name
            if name in tools:
                raise ValueError(f"two tools are called {name!r}. Rename one in its tool_schema")
            tools[name] = tool
    return tools


def tool_of_entry(
    path: str,
    class_name: str,
    config: dict[str, Any] | None = None,
    tool_schema: dict[str, Any] | None = None,
    mcp: dict[str, Any] | None = None,
    create_kwargs_from: dict[str, str] | None = None,
) -> Any:
    """The tool of one entry, with its `json_schema`.

    `create_kwargs_from`, which verl does not have, names columns of the row for arguments of `create`.
    """
    if mcp is not None:
        raise ValueError("tools of MCP servers have a key of their own. Set mcp_config_file to the servers' file")
    config, cls = config or {}, find_class(class_name, path, TOOLS)
    schema_class = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema  # an installed verl's own
    tool = cls(config=config, tool_schema=tool_schema and schema_class(**tool_schema))
    # What the file says: an installed verl drops what its classes do not list.
    tool.json_schema = tool_schema or schema_dict(tool.tool_schema)
    tool.create_kwargs_from = dict(create_kwargs_from or {})
    for method in ("create", "execute", "calc_reward", "release"):
        if not inspect.iscoroutinefunction(inspect.unwrap(getattr(tool, method))):
            raise ValueError(f"{method} is not async. Define it with `async def {method}`, as in verl")
    return tool


def load_interactions(path: str) -> dict[str, Any]:
    """The interactions of a YAML by their names: `interaction: [{name, class_name, config}]`. Raises `ValueError`."""
    interactions: dict[str, Any] = {}

    def add(class_name: str, name: str | None = None, config: dict[str, Any] | None = None) -> None:
        cls = find_class(class_name, path, INTERACTIONS)
        name = name or (cls.__name__.removesuffix("Interaction") or cls.__name__).lower()
        if name in interactions:
            raise ValueError(f"two interactions are called {name!r}. Rename one")
        interactions[name] = cls({**(config or {}), "name": name})
        if not overridden(interactions[name], "generate_response"):
            raise ValueError("it has no generate_response of its own: the one of verl's base class is an example")

    for entry in read_entries(path, "interaction", INTERACTIONS):
        with named(f"{INTERACTIONS}: {entry['class_name']!r} of {path!r}"):
            add(**entry)
    return interactions


def load_function_tools(path: str) -> list[Callable]:
    """The tools that a Python file declares with `@function_tool`. Raises `ValueError`."""
    install()
    declared.clear()
    import_file(path, "function_tool_path")
    if not declared:
        raise ValueError(f"function_tool_path: {path!r} declares no tool. Add @function_tool to a function.")
    return [function_as_tool(tool) for tool in declared]


def read_entries(path: str, name: str, key: str) -> list[dict[str, Any]]:
    """The list `name` of a YAML, whose entries have `class_name`. Raises `ValueError`."""
    with named(f"{key}: {path!r} cannot be read", f" Expected YAML with `{name}: [{{class_name: ...}}]`."):
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.load(text, RecipeLoader)
        if "${" in text:  # interpolations, such as ${oc.env:HOST}
            from omegaconf import OmegaConf

            content = OmegaConf.to_container(OmegaConf.create(content), resolve=True)
        entries = content[name]
        if not entries or not all(entry["class_name"] for entry in entries):
            raise ValueError("an entry has no class_name, or there is no entry")
        return entries


def find_class(reference: str, path: str, key: str) -> Callable:
    """The class of a dotted path, or of `path.py:Class`.

    A module is also looked for next to the YAML; one of verl's own, such as `verl.tools.my_tool`, as `my_tool.py`.
    """
    folder = str(Path(path).resolve().parent)
    module, _, name = reference.rpartition(".")
    install(module, folder)
    if ".py:" in reference:
        next_to_it = not Path(reference.rpartition(":")[0]).is_file()
        return load_class(f"{folder}/{reference}" if next_to_it else reference, key)
    find_modules_next_to(path)
    return getattr(importlib.import_module(module), name)
