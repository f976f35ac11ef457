"""What a recipe says of an agent."""

from __future__ import annotations

from dataclasses import dataclass

from mt_grpo.base.fields import key
from mt_grpo.recipe.plugins import Integration

AGENT = "the line environment: openai_agent"


@dataclass
class AgentKeys:
    """A program that speaks OpenAI's or Anthropic's API, with `environment: openai_agent`."""

    agent: str | None = key(None, "path.py:function of (row, client), with environment: openai_agent", needs=AGENT)
    agent_command: str | None = key(
        None,
        "A program instead of agent: a row on standard input, OpenAI's or Anthropic's API by address",
        needs=AGENT,
    )
    agent_timeout: float = key(
        600.0, "Seconds per row, not counting waits for the policy; after them the outcome is 0",
        within="(0, inf)", needs=AGENT,
    )  # fmt: skip
    max_model_calls: int = key(
        32, "Completions that an agent or a scheduler may ask for, per rollout", within="[1, inf)",
        needs=f"{AGENT} or the key multi_turn_scheduler",
    )  # fmt: skip


class AgentIntegration(Integration):
    """An agent runs the conversation by its requests."""

    keys = AgentKeys
    line = "environment: openai_agent"
    loads = "mt_grpo.integrations.agents.conversation:load_agent_conversation"
