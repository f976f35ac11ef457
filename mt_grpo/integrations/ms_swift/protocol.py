"""What ms-swift's schedulers read and write: requests, choices, outputs, under its names and with its fields.

Interfaces: ms-swift 3.6 to 4.6, `swift.infer_engine.protocol`.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, field_validator

from mt_grpo.conversation.tools.signature import check_schema
from mt_grpo.images.messages import uri_or_str

Messages = list[dict[str, Any]]
MEDIA = ("images", "audios", "videos")


@dataclass
class InferRequest:
    """A conversation that the model goes on with."""

    messages: Messages
    images: list = field(default_factory=list)
    audios: list = field(default_factory=list)
    videos: list = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        for kind in MEDIA:
            if isinstance(getattr(self, kind), str):
                setattr(self, kind, [getattr(self, kind)])


@dataclass
class RolloutInferRequest(InferRequest):
    """A request with the row's columns (`data_dict`) and an id of the conversation (`uuid`)."""

    data_dict: dict[str, Any] = field(default_factory=dict)
    uuid: str | None = None


@dataclass
class RequestConfig:
    """How to sample. Only `stop` and `max_tokens` of a request count: the policy's sampling settings hold."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    stop: list[str] | None = field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float = 1.0
    return_details: bool = False


@dataclass
class Function:
    """The function of a tool call. `arguments` is JSON text."""

    name: str
    arguments: Any

    def __post_init__(self):
        if not isinstance(self.arguments, str):
            self.arguments = json.dumps(self.arguments, ensure_ascii=False)


@dataclass
class ChatCompletionMessageToolCall:
    """A tool call in a message of the model."""

    function: Function
    type: str = "function"
    id: str = field(default_factory=lambda: f"toolcall-{uuid.uuid4().hex}")


@dataclass
class ChatMessage:
    """The model's message in a response."""

    role: str
    content: str
    tool_calls: list[ChatCompletionMessageToolCall] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """One sampled continuation. `token_ids` are the sampled ones; `logprobs` is `{"content": [{"logprob": x}]}`."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    token_ids: list[int] | None = None
    messages: Messages | None = None
    images: list | None = None
    multi_turn_infos: dict[str, Any] | None = None
    routed_experts: Any = None


RolloutResponseChoice = GymRolloutResponseChoice = ChatCompletionResponseChoice  # its names in 3.6 and 3.7


@dataclass
class UsageInfo:
    """The numbers of prompt and completion tokens of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass
class ChatCompletionResponse:
    """The answer to a request. `id` is the request's `uuid`."""

    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4()}")
    object: str = "chat.completion"
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_token_ids: list[int] | None = None


def as_base64(value: Any, paths: bool = False) -> Any:
    """An image as ms-swift's requests have it, base64. A text stays as it is, unless it may be the path of a file."""
    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "url", "path") if value.get(key) is not None), None)
    if paths and isinstance(value, str) and not value.startswith("data:"):
        value = Path(value).read_bytes()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return uri_or_str(value).partition(",")[2] if hasattr(value, "getbands") else value


class RolloutOutput(BaseModel, arbitrary_types_allowed=True):
    """The result of a conversation: ids and masks have one list per message of the assistant, up to the last one."""

    response: Any  # the last one
    messages: list | None = None  # a text is the assistant's: schedulers of 3.8 to 4.6 write such
    response_token_ids: list[list[int]] = []
    response_loss_mask: list[list[int]] = []
    rollout_infos: dict[str, Any] = {}
    rollout_logprobs: list[list[float]] = []  # not read: ids have those of their sampling
    prompt_logprobs: list | None = None

    @field_validator("rollout_infos")
    @classmethod
    def _written(cls, infos: dict[str, Any]) -> dict[str, Any]:
        """Images as a list of base64. Rewards and the log get them."""
        images = infos.get("images")
        if images is None:
            return infos
        images = images if isinstance(images, (list, tuple)) else [images]
        return {**infos, "images": [as_base64(image) for image in images]}

    @field_validator("response_token_ids", "response_loss_mask", "rollout_logprobs", mode="before")
    @classmethod
    def _nested(cls, value: Any) -> Any:
        """A flat list is that of one message."""
        return [value] if isinstance(value, list) and value and isinstance(value[0], (int, float)) else value


def listed_tools(tools: Any) -> list[dict[str, Any]]:
    """The tools of a row or a request: a list, or JSON text, which is ms-swift's documented form.

    >>> listed_tools('[{"type": "function", "function": {"name": "f"}}]')
    [{'type': 'function', 'function': {'name': 'f'}}]
    """
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools or []
    tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
    for tool in tools:
        check_schema((tool.get("function") or tool).get("parameters"))
    return tools


def remove_response(messages: Messages) -> str | None:
    """Take away a last message of the assistant; return what it said."""
    return messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
