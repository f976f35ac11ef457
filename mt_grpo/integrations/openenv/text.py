"""What a policy reads of an OpenEnv server, and how its text becomes an action. Subclass `OpenEnvText` for a game."""

from __future__ import annotations

import json
import re
from typing import Any

from mt_grpo.conversation.tools.results import ResultInParts, as_text
from mt_grpo.integrations.acting import tagged

IMAGE = re.compile(r"data:image/[\w.+-]+;base64,[A-Za-z0-9+/]+={0,2}")
NOT_SHOWN = "[image: not shown]"


class OpenEnvText:
    """How observations read, and which action a turn asks for.

    Args:
        action: The JSON schema of the server's actions.
        images: Whether the model reads images of observations.

    Attributes:
        field: The one field of an action that is the turn's text; None: the turn writes an action as JSON.
    """

    def __init__(self, action: dict[str, Any], images: bool = False):
        self.schema, self.images, self.field = own_fields(action), images, text_field(action)

    def rules(self) -> str:
        """Return the text before the first observation, such as the rules. An empty text adds nothing."""
        if self.field is not None:
            return ""
        return f"Answer with an action as <action>...</action>: JSON of {json.dumps(self.schema)}.\n"

    def observation(self, observation: dict[str, Any]) -> str | list[Any]:
        """An observation as text, or as parts of text and images.

        One with a single text in it is that text; another one is JSON without the keys that are null.
        """
        given = {key: value for key, value in observation.items() if value is not None}
        if not given:
            return ""
        (value, *others) = given.values()
        return self.shown(value if not others and isinstance(value, str) else as_text(given))

    def action(self, text: str) -> dict[str, Any]:
        """The action that a turn's text, without its thinking, asks for.

        Raises `ValueError` where it asks for none. The policy reads its message.
        """
        if self.field is not None:
            return {self.field: text}
        try:
            action = json.loads(tagged(text))
        except (ValueError, RecursionError):
            action = None
        names = list(self.schema["properties"])
        if len(names) == 1 and action is not None and not (isinstance(action, dict) and names[0] in action):
            action = {names[0]: action}  # the value alone says all that there is to say
        if not isinstance(action, dict):
            expected = json.dumps(self.schema)
            raise ValueError(f"expected an action as <action>...</action>: JSON of {expected}. Got {text[:60]!r}.")
        return action

    def shown(self, text: str) -> str | list[Any]:
        """A text whose data URIs of images are images, or are named where the model does not read them."""
        if not IMAGE.search(text):
            return text
        if not self.images:
            return IMAGE.sub(NOT_SHOWN, text)
        texts, images = IMAGE.split(text), IMAGE.findall(text)
        parts = [{"type": "text", "text": texts[0]}]
        for image, each in zip(images, texts[1:]):
            parts += [{"type": "image", "image": image}, {"type": "text", "text": each}]
        return [part for part in parts if part.get("text") != ""]

    def result(self, observation: dict[str, Any]) -> str | ResultInParts:
        """Convert the result of a server's tool to text for the model. Raises `CallFailed` for an error."""
        if error := observation.get("error"):
            raise CallFailed(str(error.get("message") if isinstance(error, dict) else error))
        if "result" not in observation:
            return in_parts(self.observation(observation))
        result = observation["result"]
        content = result.get("content") if isinstance(result, dict) else None
        if not isinstance(content, list) or not all(isinstance(each, dict) and "type" in each for each in content):
            return in_parts(self.shown(as_text(result)))
        structured = result.get("structured_content", result.get("structuredContent"))
        text = as_text(structured) if not content and structured is not None else "\n".join(map(content_text, content))
        if result.get("is_error") or result.get("isError"):
            raise CallFailed(text)
        return in_parts(self.shown(text))


class CallFailed(RuntimeError):
    """A tool of a server failed. The policy reads why."""


def in_parts(shown: str | list[Any]) -> str | ResultInParts:
    """Convert the text or parts of `OpenEnvText` to a tool's return value."""
    if isinstance(shown, str):
        return shown
    return ResultInParts([part["text"] if part["type"] == "text" else part for part in shown])


def content_text(part: dict[str, Any]) -> str:
    """A part of the content of a result of MCP: its text, or the data URI of an image.

    >>> content_text({"type": "text", "text": "7"}), content_text({"type": "audio", "data": "eA=="})
    ('7', '[audio: not shown]')
    """
    if part["type"] == "text":
        return str(part.get("text", ""))
    if part["type"] == "image" and isinstance(part.get("data"), str):
        kind = part.get("mimeType") or part.get("mime_type") or "image/png"
        return f"data:{kind};base64,{part['data']}"
    return f"[{part['type']}: not shown]"


def own_fields(action: dict[str, Any]) -> dict[str, Any]:
    """The schema of an action without what every action has, and without titles.

    >>> own_fields({"title": "Act", "type": "object", "properties": {"metadata": {}, "n": {"type": "integer",
    ...     "title": "N"}}, "required": ["n"]})
    {'type': 'object', 'properties': {'n': {'type': 'integer'}}, 'required': ['n']}
    """
    properties = action.get("properties") if isinstance(action.get("properties"), dict) else {}
    own = {
        name: {key: value for key, value in each.items() if key != "title"} if isinstance(each, dict) else each
        for name, each in properties.items()
        if name != "metadata"
    }
    kept = {key: action[key] for key in ("required", "$defs") if action.get(key)}
    return {"type": "object", "properties": own, **kept}


def text_field(action: dict[str, Any]) -> str | None:
    """The field of an action that takes a text, where nothing else need be said; None without one.

    >>> text_field({"properties": {"metadata": {}, "message": {"type": "string"}}, "required": ["message"]})
    'message'
    >>> text_field({"properties": {"column": {"type": "integer"}}}) is None
    True
    """
    own = own_fields(action)
    names = list(own["properties"])
    needed = names if len(names) == 1 else [name for name in own.get("required", []) if name in names]
    if len(needed) != 1:
        return None
    each = own["properties"][needed[0]]
    free = isinstance(each, dict) and each.get("type") == "string" and not {"enum", "const"} & each.keys()
    return needed[0] if free else None


def takes_calls(action: dict[str, Any]) -> bool:
    """Whether a server's actions may be calls of tools that it lists, as OpenEnv's `CallToolAction`.

    One whose actions have no fields of their own (`Action`) takes them as well.

    >>> takes_calls({"properties": {"type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}}})
    True
    >>> takes_calls({"properties": {"metadata": {}}}), takes_calls({"properties": {"message": {"type": "string"}}})
    (True, False)
    """
    properties = own_fields(action)["properties"]
    return not properties or {"tool_name", "arguments"} <= properties.keys()
