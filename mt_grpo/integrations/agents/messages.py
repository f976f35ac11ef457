"""Requests in one form, whichever endpoint of OpenAI's or Anthropic's API they came to, and the APIs' errors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from mt_grpo.base.errors import tell_once
from mt_grpo.base.json_types import is_nested
from mt_grpo.base.pictures import Picture
from mt_grpo.conversation.pictures import PictureReader, mark_of, marks_replaced
from mt_grpo.conversation.tools.signature import check_schema
from mt_grpo.rollout import Message

POLICY, FROZEN = "policy", "policy-frozen"  # names of the model: turns that are trained on, and that are not
MOST_ANSWERS = 128  # of one request, as OpenAI's API has it
PARTS_OF_TEXT = ("text", "input_text", "output_text", "refusal")
PARTS_OF_IMAGES = ("image_url", "input_image")  # of /v1/chat/completions, of /v1/responses
# A line of Claude Code with a hash of the request in it. Were it read, no request would go on from an earlier one.
BILLING = "x-anthropic-billing-header"
DEEPEST = 200  # of lists and objects in a request, and in a call's arguments: what reads them is recursive


class ApiError(Exception):
    """The error answer to a request: an HTTP status, and the error object of OpenAI's API.

    Args:
        status: The HTTP status.
        message: What was got, and what was expected.
        code, param: The fields of OpenAI's error object.
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


def tell_of_parallel_calls(body: dict[str, Any]) -> None:
    """Tell of a request of OpenAI's API that wants one call at a time."""
    if body.get("parallel_tool_calls") is False:
        tell_once(
            "An agent sent parallel_tool_calls: false. It is accepted but not enforced: answers may have more calls."
        )


@dataclass
class ModelRequest:
    """One request for a completion.

    Messages have `role` (system, developer, user, assistant, tool) and `content` (text), and may have a `name`. Those
    of the assistant may have `tool_calls` (as in /v1/chat/completions), `reasoning_content`, and the `signature` of
    the answer that they are. Those of a tool have `tool_call_id`, and `failed` where the program says so. In a content
    a picture is its mark; the session keeps the pictures.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # as in /v1/chat/completions
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    trained: bool = True
    may_call: bool = True  # False: tool_choice is none
    stream: bool = False
    n: int = 1  # answers
    fixed: str | None = None  # what is answered in the policy's place, and never sampled
    effort: str | None = None  # of its reasoning, which vLLM shows to the chat template; NO_THINKING: disabled

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


def expect(value: Any, kind: type | tuple, param: str, expected: str) -> Any:
    """The value, if it is of this kind. Raises `ApiError`."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise refuse(param, f"got {value!r:.100}, expected {expected}.")
    return value


class Contents:
    """Reads contents of messages as text, in which a picture is its mark.

    Args:
        joint: What stands between two parts of text. Beside a picture there is nothing, as in Qwen's templates.
        reader: What reads pictures for the policy; None: it reads text alone.
        why: Why it does.

    Attributes:
        pictures: All that were read, by hashes of their URIs: a program sends them again with each request. They are
            kept as long as this is.
    """

    def __init__(self, joint: str = "\n", reader: PictureReader | None = None, why: str = "it reads text alone"):
        self.joint, self.reader, self.why = joint, reader, why
        self.pictures: dict[bytes, Picture] = {}

    def text(self, content: Any, param: str, joint: str | None = None) -> str:
        """Content as text: null is empty, parts are joined.

        Args:
            content: Text, parts, or None.
            param: What the error names.
            joint: What stands between two parts of text; None: as everywhere.

        Raises:
            ApiError: a part is neither text nor an image that can be read.
        """
        if content is None or isinstance(content, str):
            return marks_replaced(content or "")
        text, behind_text = "", False
        for part in expect(content, list, param, "text, or a list of parts"):
            kind = expect(part, dict, param, "parts with a type").get("type")
            if kind in PARTS_OF_TEXT:
                key = "refusal" if kind == "refusal" else "text"
                said = marks_replaced(expect(part.get(key), str, param, f"a part with {key}"))
                text += (self.joint if joint is None else joint) * behind_text + said
            elif self.reader is None:
                raise refuse(
                    param,
                    f"a part has type {kind!r}, and the policy reads text only ({self.why}).",
                    "unsupported_content",
                )
            elif kind in PARTS_OF_IMAGES:
                text += self.mark(part, param)
            else:
                raise refuse(
                    param,
                    f"a part has type {kind!r}, and the policy reads text and images only.",
                    "unsupported_content",
                )
            behind_text = kind in PARTS_OF_TEXT
        return text

    def mark(self, part: dict[str, Any], param: str) -> str:
        """The mark of a part's picture. Its `detail` changes nothing: the model's processor says how large it is.

        Raises `ApiError`.
        """
        given = part.get("image_url")
        uri = given.get("url") if isinstance(given, dict) else given
        if not isinstance(uri, str) or not uri[:5].lower() == "data:":
            raise refuse(
                param,
                f"got the image {uri or part!r:.100}, expected a data URI, as data:image/png;base64,... : no "
                "address is fetched, no file is kept, and no path is read. Send the image itself.",
                "invalid_image",
            )
        if part.get("detail", given.get("detail") if isinstance(given, dict) else None) not in (None, "auto"):
            tell_once("An agent sent an image with detail. It is accepted and ignored: the model's processor decides.")
        sent = hashlib.sha256(uri.encode(errors="replace")).digest()
        if sent not in self.pictures:
            try:
                self.pictures[sent] = self.reader.read(f"data:{uri[5:]}", param)
            except ValueError as error:
                raise refuse(param, str(error).removeprefix(f"{param}: "), "invalid_image") from None
        return mark_of(self.pictures[sent])


TEXT = Contents()
NO_THINKING = "disabled"  # of /v1/messages, for which vLLM chooses an effort that the chat template knows
FORCED = ("required", "function", "custom", "allowed_tools")  # of tool_choice


def read_model(name: Any) -> bool:
    """Whether the turns of a request with this model are trained on. Raises `ApiError` for another model."""
    if name not in (POLICY, FROZEN):
        raise ApiError(
            404,
            f"The model {name!r:.100} does not exist. Expected {POLICY!r}, or {FROZEN!r} for what is not to be "
            "trained on.",
            "model_not_found",
            "model",
        )
    return name == POLICY


def without_bill(content: Any) -> Any:
    """A system's content without the line that Claude Code writes of its bill, as vLLM reads it.

    >>> without_bill("x-anthropic-billing-header: 1\\nBe brief."), without_bill([{"type": "text", "text": BILLING}])
    ('Be brief.', [])
    """
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(BILLING) else content
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    cut = [without_bill(text) if isinstance(text, str) else text for text in texts]
    parts = [part if new == old else {**part, "text": new} for part, old, new in zip(content, texts, cut)]
    return [part for part, old, new in zip(parts, texts, cut) if new or new == old]


def read_effort(value: Any, param: str) -> str | None:
    """How much a request's answer is to reason."""
    return None if value is None else expect(value, str, param, "a word such as low, or none")


def read_limit(value: Any, param: str) -> int | None:
    """A number of tokens, None for no limit."""
    if value is not None and expect(value, int, param, "a positive number") < 1:
        raise refuse(param, f"got {value}, expected a positive number.")
    return value


def read_stops(value: Any, param: str) -> tuple[str, ...]:
    """Texts that end an answer: a list, or one of them."""
    stops = (
        [value] if isinstance(value, str) and value else expect(value or [], list, param, "text or a list of texts")
    )
    if not all(isinstance(text, str) and text == text.encode(errors="replace").decode() != "" for text in stops):
        raise refuse(param, f"got {value!r:.100}, expected texts that are not empty.")
    return tuple(stops)


def read_number(value: Any) -> int:
    """How many answers a request asks for."""
    if value is not None and not 1 <= expect(value, int, "n", f"a number from 1 to {MOST_ANSWERS}") <= MOST_ANSWERS:
        raise refuse("n", f"got {value}, expected a number from 1 to {MOST_ANSWERS}.")
    return value or 1


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools in the form of /v1/chat/completions; those of /v1/responses are flat."""
    read = []
    for tool in expect(tools or [], list, "tools", "a list"):
        expect(tool, dict, "tools", "objects")
        if tool.get("type") != "function":
            raise refuse("tools", f"got type {tool.get('type')!r}, expected 'function': the agent runs its tools.")
        if "function" not in tool:
            tool = {"type": "function", "function": {key: v for key, v in tool.items() if key != "type"}}
        function = expect(tool["function"], dict, "tools", "an object `function`")
        expect(function.get("name"), str, "tools", "a name of each function")
        parameters = expect(function.get("parameters") or {}, dict, "tools", "parameters that are a JSON schema")
        properties = expect(parameters.get("properties") or {}, dict, "tools", "properties that are an object")
        if not all(isinstance(schema, dict) for schema in properties.values()):
            raise refuse("tools", f"got properties {properties!r:.100}, expected a schema of each.")
        try:
            check_schema(parameters)
        except ValueError as error:
            raise refuse("tools", f"{error}.") from None
        read.append(tool)
    names = [tool["function"]["name"] for tool in read]
    if len(set(names)) < len(names):  # the model would be shown one of them, and a program would run another
        twice = next(name for k, name in enumerate(names) if name in names[:k])
        raise refuse("tools", f"got the name {twice!r:.100} twice, expected names that differ.")
    return read


def read_tool_choice(choice: Any) -> bool:
    """Whether the policy may call tools. It is never forced to, since that would not be its own sample."""
    name = (
        choice if isinstance(choice, str) else expect(choice or {}, dict, "tool_choice", "text or object").get("type")
    )
    if name not in (None, "auto", "none", *FORCED):
        raise refuse("tool_choice", f"got {choice!r:.100}, expected auto, none, required or a function.")
    if name in FORCED:
        tell_once(
            f"An agent sent tool_choice={name!r}. It is accepted and not enforced: the policy chooses its calls."
        )
    return name != "none"


def same_json(text: str) -> str:
    """A text of JSON in one way of writing it; another text as it is.

    >>> same_json('{"b": 1.0, "a": "x"}') == same_json('{"a":"x","b":1}'), same_json("{broken ")
    (True, '{broken')
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()
    return text.strip() if is_nested(value, DEEPEST) else json.dumps(whole_numbers(value), sort_keys=True)


def whole_numbers(value: Any) -> Any:
    """A JSON value in which 1.0 is 1."""
    if isinstance(value, list):
        return [whole_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: whole_numbers(each) for key, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
