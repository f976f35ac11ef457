"""A function as a tool: what the model reads of it, and whether a call fits its signature."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

from mt_grpo.formats import CALL_FORMAT
from mt_grpo.json_types import TYPES_THAT_WORK, misfit, takes_json, type_name
from mt_grpo.rollout import ToolCall
from mt_grpo.tool_results import ADDRESS, error_text


def check_tool(tool: Callable) -> None:
    """Raise `ValueError` unless the tool is a named, typed function with a docstring: the model reads all three."""
    name = getattr(tool, "__name__", None)
    if not callable(tool) or not name or name == "<lambda>":
        raise ValueError(f"A tool must be a named function, got {tool!r}.")
    if not inspect.getdoc(tool):
        raise ValueError(f"Tool {name} has no docstring. Write one: it is what the model reads to use the tool.")
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise ValueError(f"Tool {name} is a generator function. Expected `return` with all of it, not `yield`.")
    try:
        hints = typing.get_type_hints(tool)
    except Exception as error:
        raise ValueError(f"Tool {name} has type hints that cannot be read: {error_text(error)}.") from error
    for parameter in inspect.signature(tool).parameters.values():
        check_parameter(name, parameter, hints)


def check_parameter(tool: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> None:
    """Raise `ValueError` for a parameter that no call could ever give: calls are JSON objects of named arguments."""
    name = parameter.name
    if name not in hints:
        raise ValueError(f"Tool {tool} has no type hint for {name!r}. Write `{name}: str` or the like.")
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
        kind = f"*{name}" if parameter.kind is parameter.VAR_POSITIONAL else f"the positional-only {name!r}"
        raise ValueError(f"Tool {tool} has {kind}. Calls name their arguments: write `{name}: ...` without * and /.")
    if not takes_json(hints[name]):
        raise ValueError(
            f"Tool {tool}: parameter {name!r} is {type_name(hints[name])}, which no argument from JSON can be. "
            f"Types that work: {TYPES_THAT_WORK}."
        )
    if re.search(ADDRESS, repr(parameter.default)):
        raise ValueError(
            f"Tool {tool}: the default of {name!r} is {parameter.default!r}, whose address the model would read, "
            "another one in every process. Write None, and make the object inside the tool."
        )


def describe_tools(tools: dict[str, Callable]) -> str:
    """Signatures and docstrings, as the model reads them in the system prompt."""
    return "\n\n".join(f"{name}{inspect.signature(tool)}\n{inspect.getdoc(tool)}" for name, tool in tools.items())


def fill_in_tools(system_prompt: str, tools: dict[str, Callable]) -> str:
    """The system prompt with the tools in place of `{tool_descriptions}`. Raises `ValueError` for other braces."""
    try:
        return system_prompt.format(tool_descriptions=describe_tools(tools))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"system_prompt has a placeholder or brace that is not {{tool_descriptions}} ({error!r}). "
            "Write literal braces twice: {{ and }}."
        ) from None


@functools.cache
def signature_of(tool: Callable) -> tuple[inspect.Signature, dict[str, Any]]:
    """A tool's signature and type hints."""
    return inspect.signature(tool), typing.get_type_hints(tool)


def check_call(call: ToolCall, tools: dict[str, Callable], call_format: str = CALL_FORMAT) -> str | None:
    """Why this call cannot be run (the policy's mistake), or None. `call_format` is the tool format's example."""
    if call.error:
        return f"{call.error}. Expected: {call_format}"
    if call.name not in tools:
        return f"unknown tool {call.name!r}. Known tools: {', '.join(tools)}"
    signature, hints = signature_of(tools[call.name])
    try:
        signature.bind(**call.arguments)
    except TypeError as error:
        return f"{error}. Usage: {call.name}{signature}"
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)  # of **rest
    for name, value in call.arguments.items():
        expected = hints.get(name if name in signature.parameters else rest, Any)
        if wrong := misfit(value, expected):
            part, where = wrong
            got = repr(part)[:80] if "Literal[" in str(expected) else type(part).__name__
            return (
                f"argument {name!r} must be {type_name(expected)}, got {got}{where and f' at {name}{where}'}. "
                f"Usage: {call.name}{signature}"
            )
    return None
