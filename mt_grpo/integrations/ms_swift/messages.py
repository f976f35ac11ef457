"""An ms-swift request's messages as text, and as the chat template takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.base.pictures import Picture
from mt_grpo.conversation.formats.base import behind_thinking
from mt_grpo.conversation.formats.control_tokens import AUTHORS, Origin, neutralise_messages
from mt_grpo.conversation.formats.hermes import call_id, plain_name
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure
from mt_grpo.integrations.ms_swift.pictures import parts_as_tags, with_pictures_of, with_tags
from mt_grpo.integrations.ms_swift.protocol import is_ids
from mt_grpo.rollout import Message, ToolCall

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "tool_response": "tool"}
OTHER_MEDIA = ("audios", "videos")
Key = tuple[str, str]


def keys_of(messages: list[Message]) -> list[Key]:
    """A comparison key per message: its role and contents."""
    return [(message["role"], message["content"]) for message in messages]


def said_before(messages: list[Message]) -> str:
    """What the assistant's message says that the messages end with; empty where they end with another one."""
    return messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""


def read_messages(
    request: Any, text_of: Callable[[list[int]], str], keeps_thinking: bool, shown: list[Picture] | None
) -> list[Message]:
    """The messages of a request, each with a role and a text, in which a picture is its mark.

    Args:
        request: A `RolloutInferRequest`.
        text_of: The text of ids: ms-swift 4.6 lets the content of a message be ids.
        keeps_thinking: Whether messages of the assistant before the last one of others keep their thinking.
        shown: The pictures of its tags; None: the model reads text alone.

    Raises:
        SchedulerFailure: for pictures that do not fit their tags, other media, unknown roles, and no messages at all.
    """
    for kind in OTHER_MEDIA:
        if getattr(request, kind, None):
            raise SchedulerFailure(f"The request has {kind}. Expected text and images: others are not supported.")
    messages = [read_message(message, text_of) for message in parts_as_tags(request.messages)[0]]
    if messages and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # ms-swift 3.6 to 4.1 let plug-ins add it, for a message that goes on
    if not messages:
        raise SchedulerFailure("A request has no messages.")
    last = max((k for k, message in enumerate(messages) if message["role"] != "assistant"), default=0)
    for message in [] if keeps_thinking else messages[:last]:
        if message["role"] == "assistant":
            message["content"] = behind_thinking(message["content"]).strip()
    return messages if shown is None else with_pictures_of(messages, shown)


def read_message(message: Any, text_of: Callable[[list[int]], str]) -> Message:
    """Validate one message of a request. Raises `SchedulerFailure`."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if is_ids(content) and min(content) < 0:
        raise SchedulerFailure(f"A message's content has the id {min(content)}, expected ids of the tokenizer.")
    if is_ids(content):
        content = text_of(content)
    if isinstance(content, list) and all(isinstance(each, dict) and each.get("type") == "text" for each in content):
        texts = [each.get("text") for each in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
    if not isinstance(role, str) or role not in ROLES or not (isinstance(content, str) or content is None):
        raise SchedulerFailure(
            f"A message is {message!r:.200}, expected a dict with a role of {', '.join(ROLES)}, and a text as content."
        )
    name = {"name": message["name"]} if message.get("name") else {}
    return {"role": ROLES[role], "content": content or "", **name}


def rendered(
    messages: list[Message], calls: list[ToolCall], tokenizer: PreTrainedTokenizerBase, prompt: list[Message] = ()
) -> list[Message]:
    """Messages as the chat template takes them. Control tokens are broken in what environments and data say.

    Args:
        messages: What is rendered.
        calls: To which results among them belong.
        tokenizer: Whose control tokens.
        prompt: Of the data set's row, which may show tags of formats, and has tags of images.
    """
    written, results, given = [], 0, keys_of(prompt)
    for message in messages:
        kept = message["role"] in AUTHORS  # the plug-in's own words, and the policy's
        is_given = (message["role"], with_tags(message["content"])) in given
        origin = Origin.AGENT if kept else Origin.DATA if is_given else Origin.OUTSIDE
        (message,) = neutralise_messages([message], tokenizer, origin)
        if message["role"] == "tool":
            call = calls[results] if results < len(calls) else ToolCall(message.get("name"), {})
            message = {**message, "name": plain_name(call), "tool_call_id": call_id(results)}
            results += 1
        written.append(message)
    return written
