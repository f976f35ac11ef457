"""Requests in one form, whichever endpoint of OpenAI's or Anthropic's API they came to, and the APIs' errors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.base.rows import is_nested
from mt_grpo.conversation.tools.signature import check_schema
from mt_grpo.images.messages import mark_of, marks_replaced
from mt_grpo.images.pictures import Picture
from mt_grpo.rollout import Message

POLICY, FROZEN = "policy", "policy-frozen"  # names of the model: turns that are trained on, and that are not
MOST_ANSWERS = 128  # of one request, as OpenAI's API has it
PARTS_OF_TEXT = ("text", "input_text", "output_text", "refusal")
PARTS_OF_IMAGES = ("image_url", "input_image")  # of /v1/chat/completions, of /v1/responses
DEEPEST = 200  # of lists and objects in a request, and in a call's arguments: what reads them is recursive
NAMES_OF_KINDS = {str: "text", list: "a list", dict: "an object", int: "a whole number", bool: "true or false"}
# Fields that change the prompt, or that an answer would have to show.
NOT_SERVED = (
    "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "audio", "functions", "function_call",
    "web_search_options", "chat_template", "documents", "continue_final_message", "echo", "truncate_prompt_tokens",
    "add_special_tokens", "mm_processor_kwargs", "background", "conversation", "prompt", "mcp_servers", "container",
    "thread", "compaction",
)  # fmt: skip
# Fields that change nothing, with the value for which nothing is logged. Sampling parameters are ignored silently.
NOT_ENFORCED = {
    "response_format": None, "text": None, "parallel_tool_calls": True, "truncation": "disabled", "thinking": None,
    "reasoning_effort": None, "reasoning": None, "output_config": None, "output_format": None,
}  # fmt: skip


class ApiError(Exception):
    """The error answer to a request: an HTTP status, and the error object of OpenAI's API with `code` and `param`.

    The message has the value that was received, and the expected one.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message if len(message) <= 4000 else f"{message[:4000]} [cut]")
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The error object of OpenAI's API, as the JSON body of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refuse(param: str, message: str, code: str | None = None) -> ApiError:
    """The error 400 of one parameter."""
    return ApiError(400, f"{param}: {message}", code, param)


def expect(value: Any, kind: type, param: str) -> Any:
    """Return the value if it is of this kind, else raise `ApiError`."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise refuse(param, f"got {value!r:.100}, expected {NAMES_OF_KINDS[kind]}.")
    return value


@dataclass
class ModelRequest:
    """One request for a completion.

    Messages have `role` (system, developer, user, assistant, tool) and `content` (text), and may have a `name`. Those
    of the assistant may have `tool_calls` (as in /v1/chat/completions), `reasoning_content`, and the `signature` of
    the answer that they are. Those of a tool have `tool_call_id`, and `failed` if the program says so. In a content
    an image is its mark; the session keeps the images.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # as in /v1/chat/completions
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    may_call: bool = True  # False: tool_choice is none
    n: int = 1  # answers
    trained: bool = True

    @property
    def reads_calls(self) -> bool:
        """Whether calls are parsed, which needs offered tools. Otherwise text that looks like a call stays text."""
        return self.may_call and bool(self.tools)


@dataclass
class Answer:
    """The answer to a request: a completion as text, with its thinking and its calls separately."""

    number: int  # of the request in its rollout
    content: str
    tool_calls: list[dict[str, Any]]  # as in /v1/chat/completions
    reasoning: str
    finish_reason: str  # stop, length or tool_calls
    prompt_tokens: int
    completion_tokens: int
    created: int
    stop: str | None = None  # the request's stop text that ended the turn
    conversation: str = ""  # a name of the rollout, which is no secret

    @property
    def signature(self) -> str:
        """Says in a history which answer a message is."""
        return f"policy-{self.conversation}-{self.number}"

    @property
    def message(self) -> Message:
        """The answer as a message of a `ModelRequest`."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **calls}


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as /v1/chat/completions has it; its arguments are text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Contents:
    """Reads contents of messages as text, in which an image is its mark.

    Args:
        joint: What stands between two parts of text. Next to an image there is nothing, as in Qwen's templates.
        reader: What reads images for the policy; None: it reads text alone.
        why: Why it reads text alone.

    Attributes:
        pictures: All that were read, by hashes of their URIs: a program sends them again with each request. They are
            kept as long as this is.
    """

    def __init__(self, joint: str = "\n", reader: Any = None, why: str = "it reads text alone"):
        self.joint, self.reader, self.why = joint, reader, why
        self.pictures: dict[bytes, Picture] = {}

    def text(self, content: Any, param: str, joint: str | None = None) -> str:
        """Return content as text: null is empty, parts are joined by `joint`. Raises `ApiError`."""
        if content is None or isinstance(content, str):
            return marks_replaced(content or "")
        text, after_text = "", False
        for part in expect(content, list, param):
            kind = expect(part, dict, param).get("type")
            if kind in PARTS_OF_TEXT:
                part_text = expect(part.get("refusal" if kind == "refusal" else "text"), str, f"{param}.text")
                text += (self.joint if joint is None else joint) * after_text + marks_replaced(part_text)
            elif kind in PARTS_OF_IMAGES and self.reader is not None:
                text += self.mark(part, param)
            else:
                reads = "text and images" if self.reader else f"text only ({self.why})"
                message = f"a part has type {kind!r:.100}, and the policy reads {reads}."
                raise refuse(param, message, "unsupported_content")
            after_text = kind in PARTS_OF_TEXT
        return text

    def mark(self, part: dict[str, Any], param: str) -> str:
        """The mark of a part's image. Its `detail` changes nothing. Raises `ApiError`."""
        image = part.get("image_url")
        uri = image.get("url") if isinstance(image, dict) else image
        if not isinstance(uri, str) or not uri[:5].lower() == "data:":
            message = (
                f"got the image {uri or part!r:.100}, expected a data URI, as data:image/png;base64,... : no "
                "address is fetched, no file is kept, and no path is read."
            )
            raise refuse(param, message, "invalid_image")
        sent = hashlib.sha256(uri.encode(errors="replace")).digest()
        if sent not in self.pictures:
            try:
                self.pictures[sent] = self.reader.read(f"data:{uri[5:]}", param)
            except ValueError as error:
                raise refuse(param, str(error).removeprefix(f"{param}: "), "invalid_image") from None
        return mark_of(self.pictures[sent])


TEXT = Contents()


def check_fields(body: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Raise `ApiError` for fields that are not served, and warn once of each that is not enforced.

    `arguments` are the recipe's `chat_template_kwargs`, with which everything is rendered.
    """
    for key in NOT_SERVED:
        if body.get(key):
            raise refuse(key, "not supported. Remove it.", "unsupported_parameter")
    sent = body.get("chat_template_kwargs") or {}
    if {**arguments, **expect(sent, dict, "chat_template_kwargs")} != arguments:
        message = f"got {sent!r:.200}, and the recipe has {arguments!r:.200}. Set chat_template_kwargs in the recipe."
        raise refuse("chat_template_kwargs", message)
    for key, default in NOT_ENFORCED.items():
        if body.get(key) not in (None, default):
            tell_once(
                f"An agent sent {key}. It is accepted and has no effect: the recipe says how the policy samples, and "
                "its chat_template_kwargs what the chat template reads."
            )


def read_limit(value: Any, param: str, most: float = float("inf")) -> int | None:
    """Return a positive number, None for no limit. Raises `ApiError`."""
    if value is not None and not 1 <= expect(value, int, param) <= most:
        raise refuse(param, f"got {value}, expected a number from 1 to {most}.")
    return value


def read_stops(value: Any, param: str) -> tuple[str, ...]:
    """Return the texts that end an answer, which are a list or one text. Raises `ApiError`."""
    stops = [value] if isinstance(value, str) and value else expect(value or [], list, param)
    if not all(isinstance(text, str) and text == text.encode(errors="replace").decode() != "" for text in stops):
        raise refuse(param, f"got {value!r:.100}, expected texts that are not empty.")
    return tuple(stops)


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Return tools in the form of /v1/chat/completions; those of /v1/responses are flat. Raises `ApiError`."""
    tools_read = []
    for tool in expect(tools or [], list, "tools"):
        if expect(tool, dict, "tools").get("type") != "function":
            raise refuse(
                "tools", f"got type {tool.get('type')!r:.100}, expected 'function': the agent runs its tools."
            )
        if "function" not in tool:
            tool = {"type": "function", "function": {key: v for key, v in tool.items() if key != "type"}}
        expect(expect(tool["function"], dict, "tools").get("name"), str, "tools")
        try:
            check_schema(tool["function"].get("parameters"))
        except ValueError as error:
            raise refuse("tools", f"{error}.") from None
        tools_read.append(tool)
    names = [tool["function"]["name"] for tool in tools_read]
    if len(set(names)) < len(names):  # the model would be shown one of them, and a program would run another
        raise refuse("tools", f"got a name twice in {names!r:.200}, expected names that differ.")
    return tools_read


def read_tool_choice(choice: Any) -> bool:
    """Whether the policy may call tools. It is never forced to, since that would not be its own sample."""
    name = choice if isinstance(choice, str) else expect(choice or {}, dict, "tool_choice").get("type")
    if name not in (None, "auto", "none"):
        tell_once(
            f"An agent sent tool_choice={name!r:.100}. It is accepted and has no effect: the policy chooses its calls."
        )
    return name != "none"


def same_json(text: str) -> str:
    """A text of JSON in one way of writing it; another text as it is.

    >>> same_json('{"b": 1.0, "a": "x"}') == same_json('{"a":"x","b":1}'), same_json("{broken ")
    (True, '{broken')
    """
    try:
        value = json.loads(text, parse_float=lambda x: int(y) if (y := float(x)).is_integer() else y)  # 1.0 is 1
    except (ValueError, RecursionError):
        return text.strip()
    return text.strip() if is_nested(value, DEEPEST) else json.dumps(value, sort_keys=True)
