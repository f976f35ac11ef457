"""The conversation of a recipe with verl's tools, interactions or functions, and the one that is rendered anew."""

from __future__ import annotations

from typing import Any

from mt_grpo.integrations.verl.config import load_interactions, load_tools_config
from mt_grpo.integrations.verl.environment import VerlEnvironment, environment_class
from mt_grpo.recipe.plugins import load_environment
from mt_grpo.rollout import Context, Message, Rollout, Turn


class VerlConversation:
    """A conversation that shows its rollout to the tools. Stands before `MultiTurnToolEnv`, or a subclass of it."""

    async def open(self, rollout: Rollout, llm: Any) -> None:
        """Begin, and show the rollout to the tools."""
        await super().open(rollout, llm)
        if isinstance(rollout.environment, VerlEnvironment):
            rollout.environment.agent_data.rollout = rollout


class RenderedConversation:
    """`use_inference_chat_template`: before each turn the chat template renders the whole history anew, as in verl.

    So the model reads in training what an inference server shows it that renders each request: without earlier
    thinking, if the template leaves that out. What it wrote is decoded and encoded again for that. Each turn is a
    record of its own, in the context in which it was sampled. Stands before `MultiTurnToolEnv`, or a subclass of it.
    """

    def append(self, rollout: Rollout, turn: Turn, further: list[Message], llm: Any) -> None:
        """Append as ever, for the limits; then let the model read what the template makes of all messages."""
        super().append(rollout, turn, further, llm)
        if rollout.stop_reason is not None:
            return
        history, num_read = rollout.history, len(turn.observation_ids)
        turn.observation_ids = []  # read in the next record, where max_completion_length counts them
        rollout.edited = Context(history, self.prompt_ids(history, self._tokenizer(llm), rollout.tools), num_read)


def load_verl_conversation(script_args: Any, args: Any, base: type) -> tuple[type, Any]:
    """(class of conversations, class of environments) of a recipe. Raises `ValueError` for one that cannot work."""
    tools_file, interactions_file = script_args.tools_config_file, script_args.interaction_config_file
    conversation, declared = load_environment(script_args.environment, script_args.tools_script, base)
    if declared is not None and tools_file is None and interactions_file is None:
        return conversation, declared  # functions and MCP servers alone bring no environment
    if declared is not None:
        raise ValueError(
            "tools_config_file and interaction_config_file bring an environment of their own, but the recipe sets "
            "another one (environment, or ENVIRONMENT in tools_script). Remove one of them."
        )
    tools = load_tools_config(tools_file) if tools_file else {}
    interactions = load_interactions(interactions_file) if interactions_file else {}
    return type("VerlConversation", (VerlConversation, conversation), {}), environment_class(tools, interactions)
