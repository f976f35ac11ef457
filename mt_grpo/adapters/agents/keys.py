"""What a recipe says of an agent."""

from __future__ import annotations

from dataclasses import dataclass

from mt_grpo.base.fields import key

OPENAI_AGENT = "openai_agent"  # a value of `environment`


@dataclass
class AgentKeys:
    """A program that speaks OpenAI's API, with `environment: openai_agent`."""

    agent: str | None = key(
        None, "path.py:function of (row, client), with environment: openai_agent",
        needs="the line environment: openai_agent",
    )  # fmt: skip
    agent_command: str | None = key(
        None, "A program in place of agent: a row on standard input, OpenAI's API by address",
        needs="the line environment: openai_agent",
    )  # fmt: skip
    agent_timeout: float = key(
        600.0, "Seconds of the agent's own for one row, without its waits for the policy", within="(0, inf)"
    )
    max_model_calls: int = key(
        32, "Completions that an agent or a scheduler may ask for, per rollout", within="[1, inf)"
    )
