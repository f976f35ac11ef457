"""Tools of /v1/responses as functions, and calls of these functions as items.

INVARIANT: the model is shown the functions that vLLM's /v1/responses makes of the same tools, so that a policy is
trained on the prompts that it is deployed with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.base.json_types import json_text
from mt_grpo.integrations.agents.messages import expect, read_tools, refuse

# Of tools that OpenAI's servers run, or that only its models were trained on. Others that serve open models leave
# them out: the model is not told of them, and the program goes on with those that are left.
OF_OPENAI = re.compile(
    r"(web_search|web_search_preview|file_search|code_interpreter|image_generation|computer|computer_use_preview|mcp"
    r"|local_shell|shell|apply_patch|tool_search|programmatic_tool_calling)(_\d{4}_\d\d_\d\d)?"
)
INPUT = "input"  # the only parameter of the function that a tool of type custom is shown as


def read_response_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools in the form of /v1/chat/completions: functions, those of namespaces, and custom tools.

    Raises:
        ApiError: a tool that is none, or whose type is not known.

    >>> tool = {"type": "function", "name": "say"}
    >>> spaces = [{"type": "namespace", "name": "team", "tools": [tool]}, {"type": "file_search"}]
    >>> [each["function"]["name"] for each in read_response_tools([tool, *spaces])]
    ['say', 'team__say']
    """
    functions = []
    for k, tool in enumerate(expect(tools or [], list, "tools", "a list")):
        kind = kind_of_tool(tool, f"tools[{k}]")
        if kind == "function":
            functions.append(tool)
        elif kind == "custom":
            functions.append(custom_as_function(tool, f"tools[{k}]"))
        elif kind == "namespace":
            functions += functions_of_namespace(tool, f"tools[{k}]")
        elif OF_OPENAI.fullmatch(kind):
            tell_once(
                f"An agent offered the tool {kind!r}, which only OpenAI's servers have. The policy does not see it, "
                "and reads the other tools. Disable it in the agent to silence this warning."
            )
        else:
            raise refuse(
                f"tools[{k}]",
                f"got type {kind!r:.100}, which is not known here. Switch this tool off in the agent. "
                "Expected function, custom or namespace; tools of OpenAI's servers, such as web_search, are left out.",
            )
    return read_tools(functions)


def kind_of_tool(tool: Any, param: str) -> str:
    """The type of a tool. Raises `ApiError`."""
    return expect(expect(tool, dict, param, "an object with a type").get("type"), str, f"{param}.type", "text")


def custom_as_function(tool: dict[str, Any], param: str) -> dict[str, Any]:
    """A tool that takes free text, as a function of one text. Raises `ApiError`."""
    name = expect(tool.get("name"), str, f"{param}.name", "text")
    if expect(tool.get("format") or {}, dict, f"{param}.format", "an object").get("type", "text") != "text":
        raise refuse(
            f"{param}.format",
            f"the tool {name!r:.100} wants its text by a grammar, and the policy writes what it "
            "writes. Switch this tool off in the agent, or let it take free text.",
        )
    shown = {"type": "string", "description": "The freeform text payload for this tool."}
    schema = {"type": "object", "properties": {INPUT: shown}, "required": [INPUT], "additionalProperties": False}
    return {"type": "function", "name": name, "description": tool.get("description"), "parameters": schema}


def functions_of_namespace(tool: dict[str, Any], param: str) -> Iterator[dict[str, Any]]:
    """The functions of a namespace, whose name stands before theirs. Raises `ApiError`."""
    space = expect(tool.get("name"), str, f"{param}.name", "the namespace's name")
    for k, each in enumerate(expect(tool.get("tools"), list, f"{param}.tools", "the namespace's tools")):
        where = f"{param}.tools[{k}]"
        kind = kind_of_tool(each, where)
        if kind == "function":
            name = expect(each.get("name"), str, f"{where}.name", "a name of each function")
            yield {**each, "name": joined_name(space, name)}
        elif kind == "custom" or OF_OPENAI.fullmatch(kind):
            tell_once(
                f"An agent offered a tool of type {kind!r} in the namespace {space!r:.100}. The policy is not told of "
                "it: of a namespace it reads the functions alone, as from vLLM."
            )
        else:
            raise refuse(where, f"got type {kind!r:.100}, expected function. Switch this tool off in the agent.")


def joined_name(space: str | None, name: str) -> str:
    """The name by which a model calls a function of a namespace, None: of none."""
    return name if space is None else f"{space}__{name}"


class CallItems:
    """Writes calls as items.

    Args:
        tools: Of the request, as they came and were read.
    """

    def __init__(self, tools: list[dict[str, Any]]):
        self._custom = {tool["name"] for tool in tools if tool["type"] == "custom"}
        self._spaces = {
            joined_name(tool["name"], each["name"]): (tool["name"], each["name"])
            for tool in tools
            if tool["type"] == "namespace"
            for each in tool["tools"]
            if each["type"] == "function"
        }

    def item(self, call: dict[str, Any], ending: str) -> dict[str, Any]:
        """A call as an item.

        Args:
            call: As in /v1/chat/completions.
            ending: Of the item's id.
        """
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name in self._custom:
            about = {"type": "custom_tool_call", "id": f"ctc_{ending}", "call_id": call["id"], "name": name}
            return {**about, "input": input_of(arguments), "status": "completed"}
        space, name = self._spaces.get(name, (None, name))
        item = {"type": "function_call", "id": f"fc_{ending}", "call_id": call["id"], "name": name}
        item |= {} if space is None else {"namespace": space}
        return {**item, "arguments": arguments, "status": "completed"}


def input_of(arguments: str) -> str:
    """The text for a custom tool. Arguments that are something else are that text, as from vLLM.

    >>> input_of('{"input": "ls"}'), input_of('{"command": "ls"}')
    ('ls', '{"command": "ls"}')
    """
    text = json.loads(arguments).get(INPUT)
    return text if isinstance(text, str) else arguments


def arguments_of(text: str) -> str:
    """The arguments of a call whose item has this text for a custom tool."""
    return json_text({INPUT: text}, ensure_ascii=False)
