"""verl's `BaseInteraction`: the other side of a conversation, by YAML."""

from __future__ import annotations

import uuid
from typing import Any


class BaseInteraction:
    """One object for all conversations. What belongs to one of them stands under its `instance_id`."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation. Returns its id."""
        return str(uuid.uuid4()) if instance_id is None else instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether the conversation is over, the user's next message, the reward of the turn, information).

        These are verl's, for a subclass that asks `super()`. An interaction without one of its own is refused.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """The outcome reward of a conversation."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """End a conversation."""
