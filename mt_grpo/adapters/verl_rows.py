"""What verl's tools get of a row and of the conversation, and which of it a function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.rollout import Rollout

STEPS = ("create", "execute", "calc_reward", "release")


@dataclass
class AgentData:
    """What verl's tools read of their conversation, and `extra_fields`, where they may keep what they like."""

    request_id: str
    tools_kwargs: dict[str, Any]
    interaction_kwargs: dict[str, Any]
    metrics: dict[str, list] = field(default_factory=dict)  # by tool: what each call gave as its third value
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    image_data: Any = None
    video_data: Any = None
    rollout: Rollout | None = None  # None until the first turn

    @property
    def messages(self) -> list:
        """All messages so far, the turn with the calls included."""
        return messages_of(self.rollout) if self.rollout else []

    @property
    def prompt_ids(self) -> list[int]:
        """The ids of the prompt and all behind it, as in verl."""
        return self.rollout.history_ids if self.rollout else []

    @property
    def response_mask(self) -> list[int]:
        """1 for sampled ids behind the prompt, 0 for others."""
        return self.rollout.loss_mask if self.rollout else []

    @property
    def response_ids(self) -> list[int]:
        """The ids of the last turn."""
        return self.rollout.turns[-1].token_ids if self.rollout and self.rollout.turns else []

    @property
    def response_logprobs(self) -> list[float] | None:
        """The logprobs behind the prompt, 0.0 for ids that were not sampled."""
        return self.rollout.logprobs if self.rollout else []

    @property
    def tool_calls(self) -> list:
        """The calls of the last turn."""
        return self.rollout.turns[-1].calls if self.rollout and self.rollout.turns else []

    @property
    def assistant_turns(self) -> int:
        """How many turns the model has taken."""
        return len(self.rollout.turns) if self.rollout else 0

    @property
    def user_turns(self) -> int:
        """How many of them were answered."""
        return sum(bool(turn.messages) for turn in self.rollout.turns) if self.rollout else 0


def messages_of(rollout: Rollout) -> list[dict[str, Any]]:
    """What was said so far, as it is in verl: a tool's result is a message of role `tool` in every format."""
    pairs = [pair for turn in rollout.turns for pair in zip(turn.messages, turn.results)]
    results = {id(message): result.text for message, result in pairs if message["role"] == "user"}
    return [
        {"role": "tool", "content": results[id(message)]} if id(message) in results else message
        for message in rollout.history
    ]


def row_kwargs(row: dict[str, Any]) -> tuple[dict[str, dict], dict[str, Any], list[str] | None]:
    """(tools_kwargs, interaction_kwargs, tool_selection) of a row, as columns or in its column `extra_info`.

    A tool whose arguments are None has none.

    >>> row_kwargs({"extra_info": {"tools_kwargs": {"a": {"create_kwargs": {"x": 1, "y": None}}, "b": None}}})
    ({'a': {'create_kwargs': {'x': 1, 'y': None}}, 'b': {}}, {}, None)
    """
    rows = (row, row.get("extra_info") or {})
    if not isinstance(rows[1], dict):
        raise ValueError(f"extra_info is {type(rows[1]).__name__}, expected a dict.")
    tools, interaction, selection = (
        next((each[key] for each in rows if each.get(key) is not None), None)
        for key in ("tools_kwargs", "interaction_kwargs", "tool_selection")
    )
    for name, value, kind in (
        ("tools_kwargs", tools, dict), ("interaction_kwargs", interaction, dict), ("tool_selection", selection, list)
    ):  # fmt: skip
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} is {type(value).__name__}, expected a {kind.__name__}.")
    tools = {name: {} if given is None else given for name, given in (tools or {}).items()}
    return tools, interaction or {}, selection


def with_columns(given: dict[str, Any], columns: dict[str, str], row: dict[str, Any], where: str) -> dict[str, Any]:
    """Keyword arguments from a row's columns, as `{argument: column}` says. Those that are given go before.

    Of a column that is written `answer####` it is the number behind the last `####`, where GSM8K's solutions have it.
    Raises `ValueError` for a column that the row lacks.

    >>> with_columns({"level": 2}, {"ground_truth": "answer"}, {"answer": "7"}, "create_kwargs_from of 'check'")
    {'ground_truth': '7', 'level': 2}
    >>> with_columns({}, {"ground_truth": "answer####"}, {"answer": "It is 3 and 4.\\n#### 1,007"}, "")
    {'ground_truth': '1007'}
    """
    taken = {}
    for name, column in columns.items():
        source = column.removesuffix("####")
        if name not in given and row.get(source) is None:
            raise ValueError(f"{where} names the column {source!r}, which the row lacks. It has {sorted(row)}.")
        taken[name] = row.get(source)
        if source != column and isinstance(taken[name], str):
            taken[name] = taken[name].rpartition("####")[2].strip().replace(",", "")
    return {**taken, **given}


def takes(function: Callable, name: str, by_name: bool = False) -> bool:
    """Whether a function takes an argument of this name; `by_name`: also not by **kwargs."""
    parameters = inspect.signature(function).parameters
    return name in parameters or (not by_name and any(p.kind is p.VAR_KEYWORD for p in parameters.values()))


def with_given(function: Callable, given: dict[str, Any], offered: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call: all of the row's, and of those that are offered what the function takes."""
    return {**given, **{name: value for name, value in offered.items() if takes(function, name)}}


def overridden(tool: Any, method: str) -> bool:
    """Whether a tool's class has a method of its own, and not that of verl's base class."""
    owner = next((each for each in type(tool).__mro__ if method in vars(each)), None)
    return owner is not None and owner.__name__ not in ("BaseTool", "BaseInteraction")
