"""What a recipe says of verl's tools and interactions, with its names."""

from __future__ import annotations

from dataclasses import dataclass

from mt_grpo.base.fields import key


@dataclass
class VerlKeys:
    """verl's tools, functions and interactions, which take part in a conversation of the trainer's own."""

    tools_config_file: str | None = key(
        None, "verl's YAML of tools: a list of class_name, config, tool_schema", path=True, opens=True
    )
    tool_config_path: str | None = key(None, "Another name of tools_config_file", path=True, opens=True)
    tool_lifecycle: str = key(
        "trajectory", "When verl's tools are created and released: once per trajectory, or per call"
    )
    function_tool_path: str | None = key(
        None, "verl's Python file of functions under @function_tool", path=True, opens=True
    )
    interaction_config_file: str | None = key(
        None, "verl's YAML of interactions: a list of name, class_name, config", path=True, opens=True
    )
    interaction_config_path: str | None = key(None, "Another name of interaction_config_file", path=True, opens=True)
    use_inference_chat_template: bool = key(
        False, "verl's: the template renders the whole history before each turn, a record each"
    )
    max_tool_response_length: int | None = key(
        None, "Characters of one result of verl's tools. None: tokens alone bound it", within="[1, inf)"
    )
    tool_response_truncate_side: str = key(
        "middle", "Where a result that is too long loses characters: left, middle or right"
    )
