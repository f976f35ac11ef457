"""One conversation with verl's tools and interaction: their state, their calls, their rewards.

All of their methods run on an event loop of their own. So a tool that blocks (`requests` inside `async def`) delays
the other tools, and no conversation between its `reset` and its end: time limits hold.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import uuid
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.base.errors import error_line, tell_once
from mt_grpo.conversation.environments import METHODS, is_number
from mt_grpo.conversation.tools.running import ResultInParts
from mt_grpo.images.pictures import pictures_in
from mt_grpo.images.reader import readable_messages
from mt_grpo.integrations.acting import accepted, as_method
from mt_grpo.integrations.verl.base import on_own_loop, overridden, read_result, response_content
from mt_grpo.integrations.verl.schemas import ToolResponse
from mt_grpo.rollout import Reply, Rollout, ToolResult, Turn

STEPS = {"create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"}


@dataclass
class AgentData:
    """The conversation as verl's tools see it, with `extra_fields` for data of their own."""

    request_id: str
    tools_kwargs: dict[str, Any]
    interaction_kwargs: dict[str, Any]
    metrics: dict[str, list] = field(default_factory=dict)  # by tool: the third value that each call returned
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    rollout: Rollout | None = None  # None until the first turn

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages so far, with results in the role `tool` in every tool format. Images are named in the text."""
        if self.rollout is None:
            return []
        pairs = [pair for turn in self.rollout.turns for pair in zip(turn.messages, turn.results)]
        # By identity: two messages may be equal, and `history` holds those of the turns themselves.
        texts = {id(said): result.text for said, result in pairs if said["role"] == "user"}
        named = ({"role": "tool", "content": texts[id(m)]} if id(m) in texts else m for m in self.rollout.history)
        return readable_messages(list(named))

    @property
    def image_data(self) -> list | None:
        """The images that the model was shown so far, of PIL; None without any."""
        shown = pictures_in(self.rollout.history_ids) if self.rollout else []
        return [picture.image.copy() for picture in shown] or None  # a tool may draw on one


def row_kwargs(row: dict[str, Any]) -> tuple[dict[str, dict], dict[str, Any], list[str] | None]:
    """(tools_kwargs, interaction_kwargs, tool_selection) of a row, as columns or in its column `extra_info`.

    >>> row_kwargs({"extra_info": {"tools_kwargs": {"a": {"create_kwargs": {"x": 1, "y": None}}, "b": None}}})
    ({'a': {'create_kwargs': {'x': 1, 'y': None}}, 'b': {}}, {}, None)
    """
    extra = row.get("extra_info")
    sources = [row, extra] if isinstance(extra, dict) else [row]
    tools, interaction, selection = (
        next((source[key] for source in sources if source.get(key) is not None), None)
        for key in ("tools_kwargs", "interaction_kwargs", "tool_selection")
    )
    return {name: kwargs or {} for name, kwargs in (tools or {}).items()}, interaction or {}, selection


def with_columns(kwargs: dict[str, Any], columns: dict[str, str], row: dict[str, Any]) -> dict[str, Any]:
    """Add keyword arguments from a row's columns, as `{argument: column}` says, to those that the row has itself.

    Of a column that is written `answer####` it is the number after the last `####`, where GSM8K's solutions have it.
    Raises `ValueError` for a column that the row lacks.

    >>> with_columns({"level": 2}, {"ground_truth": "answer"}, {"answer": "7"})
    {'ground_truth': '7', 'level': 2}
    >>> with_columns({}, {"ground_truth": "answer####"}, {"answer": "It is 3 and 4.\\n#### 1,007"})
    {'ground_truth': '1007'}
    """
    values = {}
    for name, column in columns.items():
        source = column.removesuffix("####")
        if name not in kwargs and row.get(source) is None:
            raise ValueError(f"create_kwargs_from names the column {source!r}, which the row lacks: {sorted(row)}.")
        values[name] = row.get(source)
        if source != column and isinstance(values[name], str):
            values[name] = values[name].rpartition("####")[2].strip().replace(",", "")
    return {**values, **kwargs}


class VerlEnvironment:
    """The state of one conversation. `environment_class` makes the class of a recipe, whose methods are the tools.

    Its `verl_tools` and `interactions` are the recipe's by name. `keyword_columns` are a row's that hold arguments.
    """

    verl_tools: dict[str, Any] = {}
    interactions: dict[str, Any] = {}
    keyword_columns = ("tools_kwargs", "interaction_kwargs", "extra_info")

    def __init__(self):
        self.agent_data = AgentData("", {}, {})  # what tools read of the conversation
        self.tool_selection: list[str] | None = None  # None: all
        self.outcome_rewards: dict[str, float] = {}  # by tool or interaction, at the end
        self._ids: dict[str, str] = {}  # by tool: of what `create` made
        self._interaction: Any = None
        self._interaction_id = ""

    @classmethod
    def check_row(cls, row: dict[str, Any]) -> list[str]:
        """The tools that a row names. Raises `ValueError` for a row that needs what is not there."""
        tools_kwargs, interaction_kwargs, selection = row_kwargs(row)
        for name, kwargs in tools_kwargs.items():
            if unknown := sorted(set(kwargs) - STEPS):
                raise ValueError(f"tools_kwargs of {name!r} has {unknown}, expected some of {sorted(STEPS)}.")
        for name in cls.verl_tools if selection is None else selection:
            cls.create_kwargs(name, tools_kwargs, row)
        cls.interaction_of(interaction_kwargs)
        return [*(selection or []), *tools_kwargs]

    @classmethod
    def create_kwargs(cls, tool: str, tools_kwargs: dict[str, dict], row: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a tool's `create`, with those that the YAML takes from the row's columns."""
        columns = getattr(cls.verl_tools.get(tool), "create_kwargs_from", {})
        return with_columns(tools_kwargs.get(tool, {}).get("create_kwargs") or {}, columns, row)

    @classmethod
    def interaction_of(cls, kwargs: dict[str, Any]) -> str | None:
        """The name of a row's interaction; None if the row or the recipe has none. Raises `ValueError`."""
        if not kwargs or not cls.interactions:
            return None
        name = kwargs.get("name") or (next(iter(cls.interactions)) if len(cls.interactions) == 1 else None)
        if name not in cls.interactions:
            raise ValueError(f"interaction_kwargs has name={name!r}, expected one of {', '.join(cls.interactions)}.")
        return name

    async def reset(self, **row: Any) -> str | list | None:
        """Begin: every tool's `create`, whose response stands after the prompt, and `start_interaction`."""
        tools_kwargs, interaction_kwargs, self.tool_selection = row_kwargs(row)
        names = [name for name in self.verl_tools if self.tool_selection is None or name in self.tool_selection]
        for name in names:
            kwargs = self.create_kwargs(name, tools_kwargs, row)
            tools_kwargs[name] = {**tools_kwargs.get(name, {}), "create_kwargs": kwargs}
        self.agent_data = AgentData(uuid.uuid4().hex, tools_kwargs, interaction_kwargs)
        contents = await on_own_loop(self._begin(names, interaction_kwargs))
        parts = [part for each in contents for part in ("\n", *([each] if isinstance(each, str) else each.parts))]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else parts

    async def _begin(self, names: list[str], interaction_kwargs: dict[str, Any]) -> list[str | ResultInParts]:
        contents = []
        for name in names:
            self._ids[name] = uuid.uuid4().hex  # released, too, if `create` is cancelled
            try:
                contents += filter(None, [await self._create(name)])
            except Exception:
                del self._ids[name]
                raise
        name = self.interaction_of(interaction_kwargs)
        if name is not None:
            interaction, own_id = self.interactions[name], self.agent_data.request_id
            started = await interaction.start_interaction(own_id, **interaction_kwargs)
            self._interaction, self._interaction_id = interaction, started or own_id
        return contents

    async def _create(self, name: str) -> str | ResultInParts:
        """Create a tool's state. Returns its response. Up to verl 0.5 `create` returns the id alone."""
        create, kwargs = self.verl_tools[name].create, self._kwargs(name, "create")
        parameters = inspect.signature(create).parameters
        # verl 0.6 and later pass `create_kwargs=`, earlier ones each by its name.
        splatted = {k: v for k, v in kwargs.items() if k in parameters or "create_kwargs" not in parameters}
        made = await create(self._ids[name], **{**splatted, **accepted(create, create_kwargs=kwargs)})
        own_id, response = made if isinstance(made, tuple) else (made, None)
        self._ids[name] = own_id or self._ids[name]
        return "" if response is None else response_content(response)

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return await on_own_loop(self._execute(name, arguments))

    async def _execute(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        execute = self.verl_tools[name].execute
        kwargs = {**self._kwargs(name, "execute"), **accepted(execute, agent_data=self.agent_data)}
        returned = await execute(self._ids[name], arguments, **kwargs)
        first, *rest = returned if isinstance(returned, tuple) else (returned,)
        if isinstance(first, dict) and first and first.keys() <= {"image", "video", "text"}:  # as in verl 0.5
            first = ToolResponse(**first)
        result = read_result((first, *rest))
        if result.reward is not None:
            self.agent_data.tool_rewards.append(result.reward)
        if isinstance(returned, tuple) and len(returned) == 3:
            self.agent_data.metrics.setdefault(name, []).append(returned[2])
        return result

    def _kwargs(self, name: str, step: str) -> dict[str, Any]:
        return self.agent_data.tools_kwargs.get(name, {}).get(f"{step}_kwargs") or {}

    async def _score(self) -> None:
        """Ask all tools and the interaction for their outcome rewards."""
        values = {}
        for name, own_id in self._ids.items():
            if overridden(tool := self.verl_tools[name], "calc_reward"):
                values[name] = await tool.calc_reward(own_id, **self._kwargs(name, "calc_reward"))
        if self._interaction is not None and overridden(self._interaction, "calculate_score"):
            calculate = self._interaction.calculate_score
            name = self.interaction_of(self.agent_data.interaction_kwargs)
            values[name] = await calculate(**accepted(calculate, instance_id=self._interaction_id))
        for name, value in values.items():
            if is_number(value):
                self.outcome_rewards[name] = float(value)
            elif value is not None:  # verl's search tools return a list of texts, which is no reward
                tell_once(f"{name} returned the reward {value!r:.100}, not a finite number: ignored.", f"verl {name}")

    async def close(self) -> None:
        """Every tool's `release` and the interaction's `finalize_interaction`, whatever one of them raises.

        They run to their end even if the caller is cancelled, as after a tool that blocks.
        """
        await asyncio.shield(on_own_loop(self._end()))

    async def _end(self) -> None:
        ids, interaction = self._ids, self._interaction
        self._ids, self._interaction = {}, None

        async def release(name: str, own_id: str) -> None:
            await self.verl_tools[name].release(own_id, **self._kwargs(name, "release"))

        async def finalize() -> None:
            function = interaction.finalize_interaction
            await function(**accepted(function, instance_id=self._interaction_id))

        steps = [release(name, own_id) for name, own_id in ids.items()] + ([finalize()] if interaction else [])
        results = await asyncio.gather(*steps, return_exceptions=True)
        if errors := [error_line(error) for error in results if isinstance(error, BaseException)]:
            raise RuntimeError("; ".join(errors))


async def respond(self: VerlEnvironment, rollout: Rollout, turn: Turn) -> Reply | None:
    """A turn with calls is answered by their results, another one by the interaction, if the row has one."""
    if turn.calls or self._interaction is None:
        return None
    messages, kwargs = copy.deepcopy(self.agent_data.messages), self.agent_data.interaction_kwargs
    answer = await on_own_loop(self._interaction.generate_response(self._interaction_id, messages, **kwargs))
    over, text, score, info = answer
    if score is not None:
        self.agent_data.turn_scores.append(score)
    messages = [] if over else [{"role": "user", "content": text}]
    return Reply(messages=messages, stop=bool(over), reward=score, info={"said": text, **(info or {})})


async def get_reward(self: VerlEnvironment) -> float | None:
    """The sum of what the tools' `calc_reward` and the interaction's `calculate_score` return; None without them."""
    await on_own_loop(self._score())
    return sum(self.outcome_rewards.values()) if self.outcome_rewards else None


def environment_class(tools: dict[str, Any], interactions: dict[str, Any]) -> type:
    """The class of a recipe's environments. Raises `ValueError` for a name that the trainer needs itself.

    INVARIANT: it has `respond` and `get_reward` only if they can return something. A reward that is always None would
    stand for one that is missing.
    """
    members: dict[str, Any] = {"verl_tools": tools, "interactions": interactions}
    for name, tool in tools.items():
        if name in interactions or hasattr(VerlEnvironment(), name) or name in METHODS or name.startswith("_"):
            raise ValueError(f"A tool is called {name!r}, as an interaction or a name of the trainer's. Rename it.")
        members[name] = as_method(name, tool.json_schema, VerlEnvironment._call)
    if interactions:
        members["respond"] = respond
    scored = [overridden(tool, "calc_reward") for tool in tools.values()]
    if any(scored) or any(overridden(each, "calculate_score") for each in interactions.values()):
        members["get_reward"] = get_reward
    names = [*tools, *interactions]
    return type(names[0] if len(names) == 1 else "tools", (VerlEnvironment,), members)
