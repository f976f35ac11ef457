"""What bounds a conversation: keys of a recipe, and attributes of the class of conversations that keeps to them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mt_grpo.base.fields import key


@dataclass(eq=False, repr=False)
class Limits:
    """Every bound of a conversation. A recipe's key of the same name sets it.

    Raises `ValueError` where a cut result would have no room for its marker.
    """

    max_env_steps: int = key(
        2, "Observations per conversation, error messages included; then one last turn", within="[0, inf)"
    )
    # For recipes TRL's field goes first, with its default of 512.
    max_completion_length: int = key(1024, "Tokens of the whole completion, tool results included")
    max_turn_tokens: int | None = key(None, "Tokens of one turn. None: what remains", within="[1, inf)")
    max_tool_response_tokens: int = key(
        512, "Tokens of one tool result; a longer one is cut with a visible marker", within="[10, inf)", of_tools=True
    )
    max_parallel_calls: int = key(8, "Calls of one turn that run; others are errors", within="[1, inf)", of_tools=True)
    max_concurrent_tools: int = key(
        256, "Tool calls at the same time, per rank", within="[1, inf)", of_tools=True, trained=False
    )
    tool_timeout: float = key(30.0, "Seconds that one tool call may take", within="(0, inf)", of_tools=True)
    environment_timeout: float = key(
        120.0, "Seconds that one call of an environment's reset, respond, ... may take", within="(0, inf)"
    )

    def __post_init__(self):
        if (most := self.max_tool_response_tokens) < 10:
            raise ValueError(f"max_tool_response_tokens={most}, expected at least 10: a cut needs a marker.")

    @property
    def longest_turn(self) -> int:
        """Tokens that one turn has at most."""
        return self.max_turn_tokens or self.max_completion_length


def limits_of(settings: Limits) -> dict[str, Any]:
    """The limits by their names, of what has others beside them.

    >>> sorted(limits_of(Limits(max_env_steps=3)).items())[1:4:2]
    [('max_completion_length', 1024), ('max_env_steps', 3)]
    """
    return {each.name: getattr(settings, each.name) for each in dataclasses.fields(Limits)}
