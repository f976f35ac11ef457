"""The limits of a conversation: keys of a recipe, and attributes of the class of conversations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mt_grpo.base.fields import key


@dataclass(eq=False, repr=False)
class Limits:
    """The limits of a conversation, set by a recipe. TRL's `max_completion_length` bounds it as well."""

    max_env_steps: int = key(
        8, "Observations per conversation, error messages included; then one last turn", within="[0, inf)"
    )
    max_turn_tokens: int | None = key(None, "Tokens of one turn. None: what remains", within="[1, inf)")
    max_tool_response_tokens: int | None = key(
        None, "Tokens of one result. None: a quarter of the budget; at most half", within="[10, inf)", of_tools=True
    )
    max_parallel_calls: int = key(8, "Calls of one turn that run; others are errors", within="[1, inf)", of_tools=True)
    max_concurrent_tools: int = key(
        256, "Tool calls at the same time, per rank", within="[1, inf)", of_tools=True, trained=False
    )
    tool_timeout: float = key(30.0, "Seconds that one tool call may take", within="(0, inf)", of_tools=True)
    environment_timeout: float = key(
        120.0, "Seconds that one call of an environment's reset, respond, ... may take", within="(0, inf)"
    )

    @property
    def longest_turn(self) -> int:
        """The maximum number of tokens of one turn."""
        return self.max_turn_tokens or self.max_completion_length


def limits_of(settings: Limits) -> dict[str, Any]:
    """The limits among some settings, name -> value.

    >>> limits_of(Limits(max_env_steps=3))["max_env_steps"]
    3
    """
    return {each.name: getattr(settings, each.name) for each in dataclasses.fields(Limits)}
