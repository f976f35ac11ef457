"""One conversation with verl's tools and interaction: their state, their calls, their rewards.

All of their methods run on an event loop of their own. So a tool that blocks (`requests` inside `async def`) delays
the other tools, and no conversation between its `reset` and its end: time limits hold.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.base.pictures import pictures_in
from mt_grpo.conversation.environments import METHODS, is_number
from mt_grpo.conversation.pictures import readable_messages
from mt_grpo.conversation.tools.results import ResultInParts
from mt_grpo.conversation.tools.signature import as_method
from mt_grpo.integrations.checks import cut_result
from mt_grpo.integrations.verl.base import on_own_loop, read_result, response_content
from mt_grpo.rollout import Reply, Rollout, ToolResult, Turn

logger = logging.getLogger(__name__)


# What verl's tools get of a row and of the conversation, and which of it a function takes.


STEPS = ("create", "execute", "calc_reward", "release")


@dataclass
class AgentData:
    """The conversation as verl's tools see it, with `extra_fields` for data of their own."""

    request_id: str
    tools_kwargs: dict[str, Any]
    interaction_kwargs: dict[str, Any]
    metrics: dict[str, list] = field(default_factory=dict)  # by tool: what each call gave as its third value
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    video_data: Any = None
    rollout: Rollout | None = None  # None until the first turn

    @property
    def messages(self) -> list:
        """All messages so far, the turn with the calls included."""
        return messages_of(self.rollout) if self.rollout else []

    @property
    def image_data(self) -> list | None:
        """The images that the model was shown so far, of PIL; None without any."""
        return [picture.image.copy() for picture in pictures_in(self.prompt_ids)] or None  # a tool may draw on one

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
    """What was said so far, as it is in verl: a tool's result is a message of role `tool` in every format.

    An image is named in the text.
    """
    pairs = [pair for turn in rollout.turns for pair in zip(turn.messages, turn.results)]
    results = {id(message): result.text for message, result in pairs if message["role"] == "user"}
    return readable_messages(
        [
            {"role": "tool", "content": results[id(message)]} if id(message) in results else message
            for message in rollout.history
        ]
    )


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
        ("tools_kwargs", tools, dict),
        ("interaction_kwargs", interaction, dict),
        ("tool_selection", selection, list),
    ):
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


PER_TRAJECTORY, PER_CALL = "trajectory", "call"


class VerlEnvironment:
    """The state of one conversation. `environment_class` makes the class of a recipe, whose methods are the tools.

    Attributes:
        agent_data: What tools read of the conversation.
        outcome_rewards: What `calc_reward` of each tool and `calculate_score` of the interaction gave at the end.
    """

    verl_tools: dict[str, Any] = {}
    interactions: dict[str, Any] = {}
    lifecycle = PER_TRAJECTORY
    most_characters: int | None = None
    truncate_side = "middle"
    keyword_columns = ("tools_kwargs", "interaction_kwargs", "extra_info")

    def __init__(self):
        self.agent_data = AgentData("", {}, {})
        self.tool_selection: list[str] | None = None  # None: all
        self.outcome_rewards: dict[str, float] = {}
        self._ids: dict[str, str] = {}  # by tool: of what `create` made
        self._interaction: Any = None
        self._interaction_id: str | None = None

    @classmethod
    def check_row(cls, row: dict[str, Any]) -> list[str] | None:
        """The tools that a row names. Raises `ValueError` for one that asks for what is not there."""
        tools_kwargs, _, selection = row_kwargs(row)
        for name, given in tools_kwargs.items():
            if not isinstance(given, dict):
                raise ValueError(f"tools_kwargs of {name!r} is {type(given).__name__}, expected a dict.")
            unknown = set(given) - {f"{step}_kwargs" for step in STEPS}
            if unknown:
                expected = ", ".join(f"{step}_kwargs" for step in STEPS)
                raise ValueError(f"tools_kwargs of {name!r} has {sorted(unknown)}, expected some of {expected}.")
        _, interaction_kwargs, _ = cls.kwargs_of(row)
        if cls.interactions:
            cls.interaction_of(interaction_kwargs)
        return [*(selection or []), *tools_kwargs]

    @classmethod
    def kwargs_of(cls, row: dict[str, Any]) -> tuple[dict[str, dict], dict[str, Any], list[str] | None]:
        """`row_kwargs`, with what the YAML takes from the row's columns. Raises `ValueError` for a missing one."""
        tools_kwargs, interaction_kwargs, selection = row_kwargs(row)
        for name, tool in cls.verl_tools.items():
            columns, own = getattr(tool, "create_kwargs_from", None), tools_kwargs.get(name, {})
            if columns and (selection is None or name in selection):
                given = with_columns(own.get("create_kwargs") or {}, columns, row, f"create_kwargs_from of {name!r}")
                tools_kwargs[name] = {**own, "create_kwargs": given}
        only = next(iter(cls.interactions)) if len(cls.interactions) == 1 else None
        name = interaction_kwargs.get("name") or only
        if columns := getattr(cls.interactions.get(name), "interaction_kwargs_from", None):
            interaction_kwargs = with_columns(interaction_kwargs, columns, row, f"interaction_kwargs_from of {name!r}")
        return tools_kwargs, interaction_kwargs, selection

    @classmethod
    def interaction_of(cls, kwargs: dict[str, Any]) -> str | None:
        """The name of a row's interaction; None for a row that has none. Raises `ValueError`."""
        if not kwargs:
            return None
        name = kwargs.get("name") or (next(iter(cls.interactions)) if len(cls.interactions) == 1 else None)
        if name not in cls.interactions:
            raise ValueError(
                f"interaction_kwargs has name={kwargs.get('name')!r}, expected one of {', '.join(cls.interactions)}."
            )
        return name

    async def reset(self, **row: Any) -> str | list | None:
        """Begin: every tool's `create`, and the interaction's `start_interaction`.

        What a `create` says is put behind the prompt.
        """
        tools_kwargs, interaction_kwargs, self.tool_selection = self.kwargs_of(row)
        self.agent_data = AgentData(uuid.uuid4().hex, tools_kwargs, interaction_kwargs)
        self.outcome_rewards = {}
        said = await on_own_loop(self._begin(interaction_kwargs))
        parts = [part for each in said for part in ("\n", *([each] if isinstance(each, str) else each.parts))]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else parts

    async def _begin(self, interaction_kwargs: dict[str, Any]) -> list[str | ResultInParts]:
        said = []
        for name in self.verl_tools if self.lifecycle == PER_TRAJECTORY else ():
            if self.tool_selection is None or name in self.tool_selection:
                self._ids[name] = uuid.uuid4().hex  # released, too, where `create` is given up
                try:
                    self._ids[name], text = await self._create(name, self._ids[name])
                except Exception:
                    del self._ids[name]
                    raise
                said += [text] if text else []
        name = self.interaction_of(interaction_kwargs) if self.interactions else None
        if name is not None:
            interaction, own_id = self.interactions[name], self.agent_data.request_id
            given = await interaction.start_interaction(
                own_id, **with_given(interaction.start_interaction, interaction_kwargs, {})
            )
            self._interaction, self._interaction_id = interaction, given or own_id
        return said

    async def _create(self, tool: str, own_id: str) -> tuple[str, str | ResultInParts]:
        """(the id of what a tool's `create` made, what it says). Up to verl 0.5 it returns the id alone."""
        create = self.verl_tools[tool].create
        kwargs = self._kwargs(tool, "create")
        named = kwargs
        if takes(create, "create_kwargs", by_name=True):  # what is in it need not be named as well
            named = {name: value for name, value in kwargs.items() if takes(create, name)}
        made = await create(own_id, **with_given(create, named, {"create_kwargs": kwargs}))
        given, response = made if isinstance(made, tuple) else (made, None)
        return given or own_id, "" if response is None else response_content(response)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """One call of the model's."""
        execute, own_id = self.verl_tools[tool].execute, self._ids.get(tool)
        created = own_id is None
        own_id = own_id or uuid.uuid4().hex
        try:
            if created:
                try:
                    own_id, _ = await self._create(tool, own_id)
                except Exception:
                    created = False
                    raise
            offered = {"agent_data": self.agent_data}
            returned = await execute(own_id, arguments, **with_given(execute, self._kwargs(tool, "execute"), offered))
        finally:
            if created:
                await self._release(tool, own_id)
        result = read_result(returned)
        if result.reward is not None:
            self.agent_data.tool_rewards.append(result.reward)
        if isinstance(returned, tuple) and len(returned) == 3:
            self.agent_data.metrics.setdefault(tool, []).append(returned[2])
        return ToolResult(cut_result(result.text, self.most_characters, self.truncate_side), reward=result.reward)

    async def _release(self, tool: str, own_id: str) -> None:
        release = self.verl_tools[tool].release
        await release(own_id, **with_given(release, self._kwargs(tool, "release"), {}))

    def _kwargs(self, tool: str, step: str) -> dict[str, Any]:
        return self.agent_data.tools_kwargs.get(tool, {}).get(f"{step}_kwargs") or {}

    async def _finish(self) -> None:
        for tool, own_id in self._ids.items():
            calc = self.verl_tools[tool].calc_reward
            if overridden(self.verl_tools[tool], "calc_reward"):
                self._keep(tool, await calc(own_id, **with_given(calc, self._kwargs(tool, "calc_reward"), {})))
        if self._interaction is not None and overridden(self._interaction, "calculate_score"):
            calc = self._interaction.calculate_score
            given = (self._interaction_id,) if inspect.signature(calc).parameters else ()
            self._keep(self.interaction_of(self.agent_data.interaction_kwargs), await calc(*given))

    def _keep(self, name: str, value: Any) -> None:
        """Keep an outcome reward. verl's search tools give a list of texts there, which is none."""
        if is_number(value):
            self.outcome_rewards[name] = float(value)
        elif value is not None and name not in warned_of:
            warned_of.add(name)
            logger.warning(f"calc_reward of {name} returned {value!r:.100}, not a finite number: ignored.")

    async def close(self) -> None:
        """Every tool's `release` and the interaction's `finalize_interaction`, whatever one of them raises.

        They run to their end where nobody waits for them any more, as behind a tool that blocks.
        """
        await asyncio.shield(on_own_loop(self._end()))

    async def _end(self) -> None:
        ids, interaction = self._ids, self._interaction
        self._ids, self._interaction = {}, None
        steps = [self._release(tool, own_id) for tool, own_id in ids.items()]
        if interaction is not None:
            finalize = interaction.finalize_interaction
            steps.append(finalize(*(self._interaction_id,) if inspect.signature(finalize).parameters else ()))
        results = await asyncio.gather(*steps, return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        if errors:
            raise RuntimeError("; ".join(error_line(error) for error in errors))


class AnsweringEnvironment(VerlEnvironment):
    """A verl environment with interactions, which answer the model's messages."""

    async def respond(self, rollout: Rollout, turn: Turn) -> Reply | None:
        """A turn with calls is answered by their results, another one by the interaction, if the row has one."""
        if turn.calls or self._interaction is None:
            return None
        kwargs = self.agent_data.interaction_kwargs
        respond, messages = self._interaction.generate_response, copy.deepcopy(self.agent_data.messages)
        answer = await on_own_loop(respond(self._interaction_id, messages, **with_given(respond, kwargs, {})))
        if not isinstance(answer, tuple) or len(answer) != 4:
            raise TypeError(
                f"generate_response gave {answer!r:.100}, expected (whether it is over, text, score, dict)"
            )
        over, text, score, info = answer
        if score is not None:
            self.agent_data.turn_scores.append(score)
        messages = [] if over else [{"role": "user", "content": text}]
        return Reply(messages=messages, stop=bool(over), reward=score, info={"said": text, **(info or {})})


class ScoredEnvironment(VerlEnvironment):
    """A verl environment whose tools or interactions return an outcome reward."""

    async def get_reward(self) -> float | None:
        """The sum of what the tools' `calc_reward` and the interaction's `calculate_score` give; None without them."""
        await on_own_loop(self._finish())
        return sum(self.outcome_rewards.values()) if self.outcome_rewards else None


warned_of: set[str] = set()


def environment_class(name: str, tools: dict[str, Any], interactions: dict[str, Any], **settings: Any) -> type:
    """The class of a recipe's conversations. Raises `ValueError` for a tool's name that the trainer needs itself."""
    methods = {}
    for tool in tools:
        if tool in interactions:
            raise ValueError(f"A tool and an interaction are both called {tool!r}. Give one another name.")
        if hasattr(VerlEnvironment(), tool) or tool in METHODS or tool.startswith("_"):
            raise ValueError(f"A tool is called {tool!r}, which is a name of the trainer's. Give it another one.")
        methods[tool] = method_of(tool, tools[tool].json_schema)
    scored = [overridden(tool, "calc_reward") for tool in tools.values()]
    scored += [overridden(each, "calculate_score") for each in interactions.values()]
    # A method that can give nothing would stand for a reward that is missing.
    bases = [*([AnsweringEnvironment] if interactions else []), *([ScoredEnvironment] if any(scored) else [])]
    return type(
        name,
        tuple(bases) or (VerlEnvironment,),
        {**methods, "verl_tools": tools, "interactions": interactions, **settings},
    )


def method_of(name: str, schema: dict[str, Any]) -> Callable:
    """A tool as a method of the environment."""

    async def run(environment: VerlEnvironment, tool: str, arguments: dict[str, Any]) -> ToolResult:
        return await on_own_loop(environment._call(tool, arguments))

    return as_method(name, schema, run)  # a tool of verl reads its arguments itself
