"""verl's YAML files of tools and interactions, and Python files of functions: read, imported and checked."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import types
from pathlib import Path
from typing import Any

import yaml

from mt_grpo.base.errors import error_line
from mt_grpo.base.files import RecipeLoader
from mt_grpo.base.json_types import fits_type
from mt_grpo.integrations.plugin_imports import PlaceholderType, check_plugin_imports
from mt_grpo.integrations.verl.base import FunctionTool, declared, schema_dict
from mt_grpo.integrations.verl.mcp import load_mcp_entry
from mt_grpo.integrations.verl.paths import MODULES, VerlPaths, install, tool_schema_class, use_built_in
from mt_grpo.recipe.plugins import find_modules_next_to, import_file, load_class

logger = logging.getLogger(__name__)
MCP_BASE = "verl.tools.mcp_base_tool"
OF_MCP_TOOLS = ("fastmcp", "verl.tools.utils.mcp_clients")  # what it imports; verl's wheels lack the second
OF_TOOLS = ("create", "execute", "calc_reward", "release")
OF_INTERACTIONS = ("start_interaction", "generate_response", "finalize_interaction")


def load_tools_config(path: str) -> dict[str, Any]:
    """The tools of a YAML by their names: `tools: [{class_name, config, tool_schema}]`. Raises `ValueError`."""
    key, tools = "tools_config_file", {}
    for entry in read_entries(path, key, "tools"):
        where = f"{key}: {entry['class_name']!r} of {path!r}"
        cls = find_class(entry["class_name"], path, key)
        check_methods(cls, OF_TOOLS, where)
        if "mcp" in entry or (entry.get("config") or {}).get("type") == "mcp":
            made = load_mcp_entry(entry, cls, path, key)
        else:
            made = [make_tool(entry, cls, where)]
            made[0].create_kwargs_from = columns_of(entry, "create_kwargs_from", where)
        for tool in made:
            name = getattr(getattr(getattr(tool, "tool_schema", None), "function", None), "name", None)
            if not isinstance(name, str):
                raise ValueError(
                    f"{where}: {cls.__name__} has no tool_schema with a function name. Call "
                    "`super().__init__(config, tool_schema)` in its __init__."
                )
            if name in tools:
                raise ValueError(f"{where}: two tools are called {name!r}. Rename one in its tool_schema.")
            tools[name] = tool
    return tools


def make_tool(entry: dict[str, Any], cls: type, where: str) -> Any:
    """The object of an entry, with `json_schema`. Raises `ValueError`."""
    schema = entry.get("tool_schema")
    try:
        tool = cls(config=entry.get("config") or {}, tool_schema=schema and tool_schema_class()(**schema))
        # What the file says: an installed verl drops what its classes do not list.
        tool.json_schema = schema if schema else schema_dict(tool.tool_schema)
    except Exception as error:
        raise ValueError(f"{where} cannot be created: {error_line(error)}") from error
    return tool


def load_interactions(path: str) -> dict[str, Any]:
    """The interactions of a YAML by their names: `interaction: [{name, class_name, config}]`. Raises `ValueError`."""
    key, interactions = "interaction_config_file", {}
    for entry in read_entries(path, key, "interaction"):
        where = f"{key}: {entry['class_name']!r} of {path!r}"
        cls = find_class(entry["class_name"], path, key)
        check_methods(cls, OF_INTERACTIONS, where)
        if cls.generate_response.__qualname__ == "BaseInteraction.generate_response":
            raise ValueError(f"{where}: {cls.__name__} has no generate_response of its own. Write one.")
        name = entry.get("name") or default_name(cls)
        if name in interactions:
            raise ValueError(f"{where}: two interactions are called {name!r}. Rename one.")
        try:
            interactions[name] = cls({**(entry.get("config") or {}), "name": name})
        except Exception as error:
            raise ValueError(f"{where} cannot be created: {error_line(error)}") from error
        interactions[name].interaction_kwargs_from = columns_of(entry, "interaction_kwargs_from", where)
    return interactions


def columns_of(entry: dict[str, Any], key: str, where: str) -> dict[str, str]:
    """`{argument: column}` of an entry, which verl's own files do not have. Raises `ValueError`."""
    found = entry.get(key) or {}
    if not fits_type(found, dict[str, str]):
        raise ValueError(f"{where}: {key} is {found!r:.100}, expected a mapping of argument names to column names.")
    return found


def default_name(cls: type) -> str:
    """The name of an interaction that the YAML gives none.

    >>> default_name(type("Gsm8kInteraction", (), {}))
    'gsm8k'
    """
    return cls.__name__.removesuffix("Interaction").lower() or cls.__name__.lower()


def load_function_tools(path: str) -> list[FunctionTool]:
    """Load the tools that a Python file declares with `@function_tool`. Raises `ValueError`."""
    install()
    try:
        function_tool = importlib.import_module("verl.tools.function_tool")
    except ImportError as error:
        raise ValueError(f"function_tool_path: the installed verl has no function tools ({error}).") from None
    if function_tool.FunctionTool is not FunctionTool:  # an installed verl
        return list(function_tool.load_function_tools_from_path(path))
    declared.clear()
    try:
        import_file(path, "function_tool_path")
        check_plugin_imports(path, "function_tool_path", "verl", VerlPaths, MODULES)
        if not declared:
            raise ValueError(f"function_tool_path: {path!r} declares no tool. Add @function_tool to a function.")
        return list(declared)
    finally:
        declared.clear()


KEYS_OF_ENTRIES = {
    "tools": ("class_name", "config", "tool_schema", "mcp", "create_kwargs_from"),
    "interaction": ("class_name", "config", "name", "interaction_kwargs_from"),
}  # the last of either is not verl's


def read_entries(path: str, key: str, name: str) -> list[dict[str, Any]]:
    """The list `name` of a YAML, of mappings with `class_name`. Raises `ValueError`."""
    if not Path(path).is_file():
        raise ValueError(f"{key}: {path!r} is not a file. Expected YAML with a list `{name}:`.")
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = yaml.load(text, Loader)
        found = interpolated(text) if "${" in text else found
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {path!r} is not UTF-8 text ({error}). Save it as UTF-8.") from None
    except Exception as error:  # omegaconf has errors of its own
        raise ValueError(f"{key}: {path!r} cannot be read: {' '.join(str(error).split())}") from None
    entries = found.get(name) if isinstance(found, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{key}: {path!r} has no list `{name}:`. Expected `{name}: [{{class_name: ...}}]`.")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ValueError(f"{key}: {path!r} has the entry {entry!r:.100}, expected a mapping with class_name.")
        if unknown := sorted(map(str, entry.keys() - KEYS_OF_ENTRIES[name])):
            raise ValueError(
                f"{key}: {entry['class_name']!r} in {path!r} has the unknown key {unknown[0]!r}. Known "
                f"keys: {', '.join(KEYS_OF_ENTRIES[name])}. Put settings of the class itself into config."
            )
        for part in ("config", "tool_schema"):
            if not isinstance(entry.get(part) or {}, dict):
                raise ValueError(f"{key}: {part} of {entry['class_name']!r} in {path!r} is not a mapping.")
    return entries


class Loader(RecipeLoader):
    """A loader that refuses a key that is set twice. It reads as OmegaConf does: `1e-4` is a number, a date text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def interpolated(text: str) -> Any:
    """YAML with OmegaConf's interpolations, such as `${oc.env:HOST}`. Raises `ValueError` without omegaconf."""
    try:
        import omegaconf
    except ImportError:
        raise ValueError("it has interpolations (${...}), which need `pip install omegaconf`") from None
    return omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.create(text), resolve=True)


def find_class(reference: str, path: str, key: str) -> type:
    """The class of a dotted path, or of `path.py:Class`. Raises `ValueError`.

    A module is also looked for beside the YAML; one of verl's own, such as `verl.tools.my_tool`, as `my_tool.py`.
    """
    folder = str(Path(path).resolve().parent)
    module, _, name = reference.rpartition(".")
    install(module, folder)
    if ".py:" in reference:
        reference = reference if Path(reference.rpartition(":")[0]).is_file() else f"{folder}/{reference}"
        found = load_class(reference, key)
        check_plugin_imports(reference.rpartition(":")[0], key, "verl", VerlPaths, MODULES)
        return found
    find_modules_next_to(path)
    try:
        imported = import_module(module, path) if module else None
        found = getattr(imported, name, None)
    except Exception as error:
        raise ValueError(
            f"{key}: class_name {reference!r} of {path!r} cannot be imported: {error_line(error)}. "
            "Expected a dotted path on sys.path or next to the YAML, or path.py:Class."
        ) from error
    if getattr(imported, "__file__", None):
        check_plugin_imports(imported.__file__, key, "verl", VerlPaths, MODULES)
    if isinstance(found, PlaceholderType):
        raise ValueError(f"{key}: class_name {reference!r} of {path!r}: {name} of verl is not supported here.")
    if not isinstance(found, type):
        raise ValueError(f"{key}: class_name {reference!r} of {path!r} names {found!r}, expected a class.")
    return found


def import_module(name: str, path: str) -> types.ModuleType:
    """A module that a YAML names. What is built in stands for verl's MCP tools where what those import is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(OF_MCP_TOOLS):
            raise
        use_built_in(MCP_BASE)
        module = importlib.import_module(name)
        logger.warning(
            f"{path!r}: {MCP_BASE} needs {error.name}, which is not installed. The built-in version is used instead."
        )
        return module


def check_methods(cls: type, names: tuple[str, ...], where: str) -> None:
    """Raise `ValueError` unless a class has these methods, all of them async."""
    for name in names:
        method = inspect.unwrap(getattr(cls, name, lambda: None))
        if getattr(cls, name, None) is None or not inspect.iscoroutinefunction(method):
            raise ValueError(f"{where}: {cls.__name__} has no `async def {name}`. It needs {', '.join(names)}.")
