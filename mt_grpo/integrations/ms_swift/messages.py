"""An ms-swift request's messages, as text and as the chat template takes them, and the images of their tags.

A tag `<image>` is the place of the next image of the request. In what the model reads it becomes the mark of this
image, so that a request whose image was replaced says something else. In messages of the assistant a tag is text: the
policy may write one.
"""

from __future__ import annotations

import asyncio
import base64
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.conversation.formats.choose import call_id, plain_name
from mt_grpo.conversation.formats.control_tokens import AUTHORS, neutralise_messages
from mt_grpo.images.messages import mark_of, marks_replaced, own_image, refuse_images
from mt_grpo.images.pictures import Picture, images_of, is_image_part, reader_of, why_none
from mt_grpo.integrations.acting import behind_thinking
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure
from mt_grpo.rollout import Message, Origin, ToolCall

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "tool_response": "tool"}
OTHER_MEDIA = ("audios", "videos")
TAG = "<image>"


def answer(text: str) -> Message:
    """A message of the assistant."""
    return {"role": "assistant", "content": text}


def keys_of(messages: list[Message]) -> list[tuple[str, str]]:
    """A comparison key per message: its role and contents."""
    return [(message["role"], message["content"]) for message in messages]


def prefill_of(messages: list[Message]) -> str:
    """The text of a last message of the assistant, in which the policy goes on. Empty without one."""
    return messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""


def read_messages(request: Any, keeps_thinking: bool, shown: list[Picture] | None) -> list[Message]:
    """The messages of a request, each with a role and a text, in which an image is its mark.

    `keeps_thinking`: whether messages of the assistant before the last one of others keep it. `shown`: the images of
    the tags; None: the model reads text alone. Raises `SchedulerFailure`.
    """
    for kind in OTHER_MEDIA:
        if getattr(request, kind, None):
            raise SchedulerFailure(f"The request has {kind}. Expected text and images: others are not supported.")
    messages = [read_message(message) for message in request.messages]
    if messages[-1] == answer(""):
        messages.pop()  # ms-swift 3.6 to 4.1 let plug-ins add it, for a message that goes on
    last = max((k for k, message in enumerate(messages) if message["role"] != "assistant"), default=0)
    for message in [] if keeps_thinking else messages[:last]:
        if message["role"] == "assistant":
            message["content"] = behind_thinking(message["content"]).strip()
    return messages if shown is None else with_images(messages, shown)


def read_message(message: dict[str, Any]) -> Message:
    """One message of a request. Raises `SchedulerFailure`."""
    role, content = message["role"], message["content"] or ""
    if role not in ROLES or not isinstance(content, str) or (message.get("tool_calls") and not content):
        raise SchedulerFailure(f"A message is {message!r:.200}, expected a role of {', '.join(ROLES)}, and a text.")
    return {"role": ROLES[role], "content": content, **({"name": message["name"]} if message.get("name") else {})}


def rendered(
    messages: list[Message], calls: list[ToolCall], tokenizer: PreTrainedTokenizerBase, prompt: list[Message]
) -> list[Message]:
    """Messages as the chat template takes them. Control tokens are broken in what environments and data say.

    Results among them belong to `calls`. `prompt` is the row's, which may show tags of formats.
    """
    written, results, of_row = [], 0, keys_of(prompt)
    for message in messages:
        by_author = message["role"] in AUTHORS  # the plug-in's own words, and the policy's
        by_row = (message["role"], with_tags(message["content"])) in of_row
        origin = Origin.AGENT if by_author else Origin.DATA if by_row else Origin.OUTSIDE
        (message,) = neutralise_messages([message], tokenizer, origin)
        if message["role"] == "tool":
            call = calls[results] if results < len(calls) else ToolCall(message.get("name"), {})
            message = {**message, "name": plain_name(call), "tool_call_id": call_id(results)}
            results += 1
        written.append(message)
    return written


# Images.


def num_tags(message: Message) -> int:
    """How many images a message of text shows."""
    return 0 if message["role"] == "assistant" else message["content"].count(TAG)


def with_tags(text: str) -> str:
    """A text in which images are tags again, as schedulers and rewards know it."""
    return marks_replaced(text, TAG)


def with_images(messages: list[Message], shown: list[Picture]) -> list[Message]:
    """Messages in which each tag is the mark of the next image. Raises `SchedulerFailure` unless there are as many."""
    # INVARIANT: a policy cannot end its rollout by writing a tag that a scheduler quotes. So surplus tags after a
    # message of the assistant with a tag are text.
    surplus = sum(map(num_tags, messages)) - len(shown)
    found, quotes = [], False
    for message in messages:
        quoted = min(surplus, num_tags(message)) if quotes and surplus > 0 else 0
        surplus -= quoted
        quotes = quotes or (message["role"] == "assistant" and TAG in message["content"])
        found.append({**message, "content": message["content"].replace(TAG, "< image>", quoted)})
    if surplus:
        raise SchedulerFailure(
            f"The request has {len(shown)} images, and its messages have {len(shown) + surplus} tags {TAG}. Expected "
            "as many: each tag is the place of the next of infer_request.images. Add or remove both together."
        )
    following = iter(shown)
    for message in found:
        if num_tags(message):
            message["content"] = re.sub(TAG, lambda _: mark_of(next(following)), message["content"])
    return found


def tagged(prompt: list[Message], row: dict[str, Any], where: str) -> tuple[list[Message], list[Any]]:
    """(messages of text with tags, the images of the tags in their order) of a row.

    A tag, or a part `{"type": "image"}` without an image of its own, takes the next image of the row's columns. Those
    that remain stand in front of the first message that is not the system's, where ms-swift's templates put them.

    >>> tagged([{"role": "user", "content": "a<image>b"}], {"images": ["x", "y"]}, "row 0")
    ([{'role': 'user', 'content': '<image>a<image>b'}], ['x', 'y'])
    """
    waiting, messages, shown = images_of(row), [], []
    for message in prompt:
        content, parts = "", message["content"]
        for part in parts if isinstance(parts, list) else [{"text": parts}]:
            own = own_image(part) if is_image_part(part) else None
            text = TAG if is_image_part(part) else part["text"]
            content += text
            shown += [own] if own is not None else [None] * num_tags({**message, "content": text})
        messages.append({**message, "content": content})
    places, first = shown.count(None), next((k for k, m in enumerate(messages) if m["role"] != "system"), None)
    left = len(waiting) - places
    if left < 0 or (left and first is None):
        raise ValueError(
            f"{where}: the columns image and images have {len(waiting)} images, and the prompt has {places} tags "
            f"{TAG}, or parts for them. Expected as many, or fewer tags and a message of a user."
        )
    if left:
        before = sum(map(num_tags, messages[:first]))
        messages[first] = {**messages[first], "content": TAG * left + messages[first]["content"]}
        shown[before:before] = [None] * left
    following = iter(waiting)
    return messages, [next(following) if own is None else own for own in shown]


def place_tags(
    prompt: list[Message], row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[Message], list[Picture]]:
    """(a row's messages as a scheduler gets them, the images of their tags). Raises `ValueError`."""
    if (reader := reader_of(tokenizer)) is None:
        refuse_images({**row, "prompt": prompt}, where, why_none(tokenizer))
        return prompt, []
    messages, images = tagged(prompt, row, where)
    return messages, [reader.read(image, f"{where}, image {k}", paths=True) for k, image in enumerate(images)]


def mark_tags(prompt: list[Message], row: dict, tokenizer: Any, where: str) -> tuple[list[Message], list[Picture]]:
    """Read the images of a row like `place_tags`, with image marks instead of the tags."""
    messages, shown = place_tags(prompt, row, tokenizer, where)
    return with_images(messages, shown) if shown else messages, shown


class RequestImages:
    """Reads the images of one conversation's requests. Those that are text are read once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.reader, self.why = reader_of(tokenizer), why_none(tokenizer)
        self._known: dict[str, Picture] = {}

    async def of(self, request: Any) -> list[Picture] | None:
        """The images of a request, None if the model reads text alone. Raises `SchedulerFailure`."""
        images = getattr(request, "images", None) or []
        if self.reader is None and images:
            raise SchedulerFailure(f"The request has images. Expected text alone: {self.why}.")
        if not images:
            return None if self.reader is None else []
        return await asyncio.to_thread(lambda: [self._read(image, k) for k, image in enumerate(images)])

    def _read(self, image: Any, number: int) -> Picture:
        if isinstance(image, str) and image in self._known:
            return self._known[image]
        where = f"The request's image {number}"
        try:  # a text is base64 or a data URI: a path that a policy wrote is not read
            is_base64 = isinstance(image, str) and not image.startswith("data:")
            picture = self.reader.read(base64.b64decode(image, validate=True) if is_base64 else image, where)
        except ValueError as error:
            raise SchedulerFailure(f"{where} is {image!r:.50}, expected base64, a data URI or PIL: {error}") from error
        if isinstance(image, str):
            self._known[image] = picture
        return picture
