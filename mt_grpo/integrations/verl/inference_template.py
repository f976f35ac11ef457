"""`use_inference_chat_template`: before each turn the chat template renders the whole history anew, as verl has it.

So the model reads in training what an inference server shows it that renders each request: without earlier thinking,
where the template leaves that out. What it wrote is decoded and encoded again for that, and each turn is a record of
its own, in the context in which it was sampled.
"""

from __future__ import annotations

from typing import Any

from mt_grpo.rollout import Context, Message, Rollout, Turn


class RenderedConversation:
    """Stands before `MultiTurnToolEnv`, or a subclass of it."""

    def append(self, rollout: Rollout, turn: Turn, further: list[Message], llm: Any) -> None:
        """Append as ever, for the limits; then have the model read what the template makes of all messages."""
        super().append(rollout, turn, further, llm)
        if rollout.stop_reason is not None:
            return
        history, read = rollout.history, len(turn.observation_ids)
        turn.observation_ids = []  # read in the next record, where max_completion_length counts them
        rollout.edited = Context(history, self.prompt_ids(history, self._tokenizer(llm), rollout.tools), read)
