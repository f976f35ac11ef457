"""verl's `BaseTool`, `BaseInteraction` and `@function_tool`, and conversion of what tools return."""

from __future__ import annotations

import functools
import inspect
import types
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.base.event_loop import run_on_thread
from mt_grpo.conversation.environments import is_number
from mt_grpo.conversation.tools.running import ResultInParts, as_text
from mt_grpo.conversation.tools.signature import as_tool
from mt_grpo.integrations.verl.schemas import OpenAIFunctionToolSchema, ToolResponse
from mt_grpo.rollout import ToolResult


class BaseInteraction:
    """Base class of interactions. One object serves all conversations, each with its own `instance_id`."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation. Returns its id."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(whether the conversation is over, the user's next message, the reward of the turn, information)."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """The outcome reward of a conversation."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """End a conversation."""


class BaseTool:
    """Base class of tools. One object serves all conversations, each with its own `instance_id`."""

    tool_schema: OpenAIFunctionToolSchema | None = None

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no tool_schema. Write one in the YAML.")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the tool's schema, as the model reads it."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a conversation: (its id, what the model reads of that)."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        """Run one call. Returns (result, turn reward, metrics)."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The outcome reward of a conversation, from the state of the tool."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a conversation."""


class FunctionTool(types.SimpleNamespace):
    """A function that a file declared a tool: `name`, `fn` and `tool_schema`, None for that of its signature."""


declared: list[FunctionTool] = []  # by the file that is being imported


def function_tool(name: Any = None, *, schema: Any = None) -> Callable:
    """Declare a function a tool: `@function_tool`, `@function_tool("name")`, `@function_tool("name", schema=...)`.

    A sync function runs in a thread. It returns text, JSON data, a `ToolResponse`, or a tuple of that, the reward of
    the turn, and metrics, of which the last and the last two may be missing.
    """

    def decorate(function: Callable) -> Callable:
        named = name if isinstance(name, str) else function.__name__
        declared.append(FunctionTool(name=named, fn=function, tool_schema=schema))
        return function

    return decorate(name) if callable(name) else decorate


async def on_own_loop(coroutine: Coroutine) -> Any:
    """Run a coroutine of verl's tools on their own event loop. Cancelling the caller cancels it."""
    return await run_on_thread(coroutine, "mt-grpo-verl")


def function_as_tool(tool: FunctionTool) -> Callable:
    """Convert a declared function to a tool of the trainer."""

    @functools.wraps(tool.fn)
    def run(*args: Any, **kwargs: Any) -> ToolResult:
        return read_result(tool.fn(*args, **kwargs))

    @functools.wraps(tool.fn)
    async def run_async(*args: Any, **kwargs: Any) -> ToolResult:
        return read_result(await on_own_loop(tool.fn(*args, **kwargs)))

    made = run_async if inspect.iscoroutinefunction(tool.fn) else run
    made.__name__ = tool.name
    made.__signature__ = inspect.signature(tool.fn).replace(return_annotation=ToolResult)
    if tool.tool_schema is None:
        return made
    schema = tool.tool_schema if isinstance(tool.tool_schema, dict) else schema_dict(tool.tool_schema)
    return as_tool(types.SimpleNamespace(name=tool.name, schema=schema, run=made))


def schema_dict(schema: Any) -> dict[str, Any]:
    """A tool's schema as the chat template reads it."""
    return schema.model_dump(exclude_unset=True, exclude_none=True)


def read_result(returned: Any) -> ToolResult:
    """Convert a tool's return value: its text or `ResultInParts`, and the turn reward.

    >>> read_result(("7", 0.5, {"queries": 1}))
    ToolResult(text='7', error=None, seconds=0.0, reward=0.5)
    >>> read_result({"celsius": 7}).text, read_result((ToolResponse(text="7"),)).reward
    ('{"celsius": 7}', None)
    """
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"the tool returned {len(parts)} values, expected a result, its reward, and metrics")
    reward = parts[1] if len(parts) > 1 else None
    if isinstance(reward, str):  # verl's sandbox tool returns its result again
        tell_once(f"A tool returned the reward {reward!r:.100}, not a finite number: ignored.", "verl reward")
        reward = None
    elif reward is not None and not is_number(reward):
        raise ValueError(f"the tool returned the reward {reward!r}, expected a finite number")
    return ToolResult(response_content(parts[0]), reward=None if reward is None else float(reward))


def response_content(response: Any) -> str | ResultInParts:
    """What the model reads of a `ToolResponse`, verl's own too: its images before its text, as in verl.

    Raises `ValueError` for a video.
    """
    if not all(hasattr(response, key) for key in ("text", "image", "video")):
        return as_text(response)
    if response.video:
        raise ValueError("the tool returned a video, which this trainer cannot show to a model")
    images = [{"type": "image", "image": image} for image in response.image or [] if image is not None]
    return ResultInParts([*images, *filter(None, [response.text])]) if images else response.text or ""


def overridden(tool: Any, method: str) -> bool:
    """Whether a tool's class has a method of its own, and not that of verl's base class."""
    return not getattr(tool, method).__qualname__.startswith(("BaseTool.", "BaseInteraction."))
