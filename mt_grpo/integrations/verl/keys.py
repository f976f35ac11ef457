"""What a recipe says of verl's tools and interactions, with its names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mt_grpo.base.fields import key, keys_that
from mt_grpo.recipe.plugins import OWN, Integration


@dataclass
class VerlKeys:
    """verl's tools, functions and interactions, which take part in a conversation of the trainer's own."""

    tools_config_file: str | None = key(
        None, "verl's YAML of tools: a list of class_name, config, tool_schema", path=True, opens=True, needs=OWN
    )
    function_tool_path: str | None = key(
        None, "verl's Python file of functions under @function_tool", path=True, opens=True, needs=OWN
    )
    interaction_config_file: str | None = key(
        None, "verl's YAML of interactions: a list of name, class_name, config", path=True, opens=True, needs=OWN
    )
    use_inference_chat_template: bool = key(
        False, "verl's: the template renders the whole history before each turn, a record each"
    )


class VerlIntegration(Integration):
    """verl's tools stand in the environment of a conversation of the trainer's own, which may be a recipe's class."""

    keys = VerlKeys
    loads = "mt_grpo.integrations.verl.conversation:load_verl_conversation"

    def runs(self, script_args: Any) -> bool:
        return any(getattr(script_args, name) for name in (*keys_that(VerlKeys, "opens"), "mcp_config_file"))

    def around(self, script_args: Any, args: Any, conversation: type) -> type:
        if not script_args.use_inference_chat_template:
            return conversation
        if not getattr(conversation, "renders_all", True):
            raise ValueError(
                "use_inference_chat_template has no effect if an agent or a scheduler brings its messages. Remove it."
            )
        from mt_grpo.integrations.verl.conversation import RenderedConversation

        return type("RenderedConversation", (RenderedConversation, conversation), {})

    def tools(self, script_args: Any) -> list[Callable]:
        if script_args.function_tool_path is None:
            return []
        from mt_grpo.integrations.verl.config import load_function_tools

        return load_function_tools(script_args.function_tool_path)
