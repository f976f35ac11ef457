"""What fits where: the shapes of an environment, a tool format and a backend. A class needs no import to have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mt_grpo.rollout import Generation, Message, Parsed, Reply, Rollout, ToolCall, ToolResult, Turn


class Environment(Protocol):
    """The other side of one conversation. Every method may be async; all but `reset` are optional.

    Its tools are its public methods with type hints and docstrings, as in TRL's `environment_factory`, or the list
    `tools`.
    """

    def reset(self, **row: Any) -> str | list | None:
        """Begin anew with a dataset row. Text is joined to the last message; messages replace the prompt."""

    def respond(self, rollout: Rollout, turn: Turn) -> Reply | None:
        """What follows a turn, whose calls have run. None: the results are appended, or, without a call, the end."""

    def get_reward(self) -> float:
        """The outcome reward, asked for once, after the conversation."""

    def close(self) -> None:
        """Called after the rewards, whatever happened."""


class ToolFormat(Protocol):
    """How a model writes calls and answers, and how it reads results: one object per tokenizer."""

    call_format: str  # an example of a call, for a policy that wrote it wrong
    stops: tuple[str, ...]  # texts that may end a turn
    ends: frozenset[int]  # every id that may end a turn

    def prompt(self, messages: list[Message], tools: dict[str, Callable]) -> dict[str, Any]:
        """Arguments of `apply_chat_template` for messages that the model answers next."""

    def next_stops(self, ids: list[int], prompt_ids: list[int]) -> tuple[str, ...]:
        """The texts at which the next request of a turn stops, of which `ids` have been sampled so far."""

    def stopped_early(self, ids: list[int], prompt_ids: list[int]) -> bool:
        """Whether a request that stopped did so inside thinking, or at its close, so that the turn goes on."""

    def cut(self, ids: list[int], prompt_ids: list[int]) -> tuple[int, bool]:
        """How many of the sampled ids make the turn, and whether something in them ends it."""

    def parse(self, ids: list[int], prompt_ids: list[int], tools: dict[str, Callable] | None = None) -> Parsed:
        """The text, the calls and the answer of a whole turn. `tools` tell numbers from text, if a format must."""

    def results(self, calls: list[ToolCall], results: list[ToolResult]) -> list[Message]:
        """The messages with the results of a turn's calls."""

    def fit(
        self, turn: Turn, further: list[Message], most: float, limit: int
    ) -> tuple[list[ToolResult], list[Message], list[int]] | None:
        """(results, messages, ids) behind a turn in at most `most` tokens, None if they do not fit."""

    def suffix_ids(self, calls: list[ToolCall], messages: list[Message], sampled: list[int]) -> list[int]:
        """Ids from the end of a sampled turn, over the messages behind it, to the next generation prompt."""

    def text_ids(self, suffix: str) -> list[int]:
        """Ids of a text that stands behind other text."""


class Backend(Protocol):
    """Token ids in, sampled ids out."""

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, sampling_params: dict[str, Any] | None, index: int
    ) -> Generation:
        """Sample one continuation."""
