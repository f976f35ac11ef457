"""Images of ms-swift's conversations: tags `<image>` in texts, and the list `images` of a request.

A tag is the place of the next image. In what the model reads it becomes the mark of its picture, so that a request
whose image was replaced says something else. In messages of the assistant a tag is text: the policy may write one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.base.pictures import Picture
from mt_grpo.conversation.picture_parts import images_of, is_image_part, own_image, refuse_images
from mt_grpo.conversation.pictures import PictureReader, mark_of, marks_replaced, reader_of, why_none
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure
from mt_grpo.rollout import Message

TAG = "<image>"


def num_tags(message: Message) -> int:
    """How many images a message of text shows."""
    return 0 if message["role"] == "assistant" else message["content"].count(TAG)


def with_tags(text: str) -> str:
    """A text in which pictures are tags again, as schedulers and rewards know it."""
    return marks_replaced(text, TAG)


def tagged(prompt: list[Message], row: dict[str, Any], where: str) -> tuple[list[Message], list[Any]]:
    """(messages of text with tags, the images of the tags in their order) of a row.

    A tag, or a part `{"type": "image"}` without an image of its own, takes the next image of the row's columns. Those
    that are left stand in front of the first message that is not the system's, where ms-swift's templates put them.

    Args:
        prompt: The row's messages. Contents are texts, or parts.
        row: Of the data.
        where: What the error begins with.

    Raises:
        ValueError: there are more tags than images, or no message for those that are left.

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
    """Read the images of a row into tags: (messages as a scheduler gets them, the images of their tags).

    Raises `ValueError`.
    """
    if (reader := reader_of(tokenizer)) is None:
        refuse_images({**row, "prompt": prompt}, where, why_none(tokenizer))
        return prompt, []
    try:
        messages, images = tagged(prompt, row, where)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where}: messages is {prompt!r:.100}, expected dicts with a role and a content, text or parts."
        ) from error
    return messages, [reader.read(image, f"{where}, image {k}", paths=True) for k, image in enumerate(images)]


def mark_tags(
    prompt: list[Message], row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[Message], list[Picture]]:
    """Read the images of a row like `place_tags`, with image marks instead of the tags."""
    messages, shown = place_tags(prompt, row, tokenizer, where)
    return with_pictures_of(messages, shown) if shown else messages, shown


def with_pictures_of(messages: list[Message], shown: list[Picture]) -> list[Message]:
    """Messages in which each tag is the mark of the next picture.

    Raises `SchedulerFailure` unless there are as many.
    """
    messages = without_quoted_tags(messages, sum(map(num_tags, messages)) - len(shown))
    if (places := sum(map(num_tags, messages))) != len(shown):
        raise SchedulerFailure(
            f"The request has {len(shown)} images, and its messages have {places} tags {TAG}. Expected as many: each "
            "tag is the place of the next of infer_request.images. Add or remove both together."
        )
    following = iter(shown)
    return [
        {**message, "content": re.sub(TAG, lambda _: mark_of(next(following)), message["content"])}
        if num_tags(message)
        else message
        for message in messages
    ]


def without_quoted_tags(messages: list[Message], surplus: int) -> list[Message]:
    """Messages with so many tags less, where the policy wrote one and a scheduler may have quoted it behind that.

    INVARIANT: a policy cannot end its rollout by writing a tag. Such a rollout would not be trained on.

    >>> said = [{"role": "assistant", "content": "a<image>"}, {"role": "user", "content": "a<image>? See <image>"}]
    >>> without_quoted_tags(said, 1)[1]["content"]
    'a< image>? See <image>'
    """
    first = next((k for k, m in enumerate(messages) if m["role"] == "assistant" and TAG in m["content"]), None)
    if surplus <= 0 or first is None:
        return messages
    found = list(messages[: first + 1])
    for message in messages[first + 1 :]:
        quoted = min(surplus, num_tags(message))
        content = message["content"].replace(TAG, f"< {TAG[1:]}", quoted) if quoted else message["content"]
        found.append({**message, "content": content})
        surplus -= quoted
    return found


def parts_as_tags(messages: list[Any]) -> tuple[list[Any], list[Any]]:
    """(a request's messages in which parts with an image are tags, these images)."""
    found: list[Any] = []
    return [
        {**message, "content": [tag_of(part, found) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ], found


def tag_of(part: Any, found: list[Any]) -> Any:
    """A part of text in place of one with an image, which is put behind those that were found."""
    if not is_image_part(part):
        return part
    found += [] if own_image(part) is None else [own_image(part)]
    return {"type": "text", "text": TAG}


class RequestImages:
    """Reads the images of one conversation's requests, and keeps their pictures.

    Args:
        tokenizer: Of the policy.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.reader: PictureReader | None = reader_of(tokenizer)
        self.why = why_none(tokenizer)
        self.pictures: dict[str, Picture] = {}  # by name
        self._known: dict[str, Picture] = {}  # by what a request says: it says the same again in each turn

    async def of(self, request: Any) -> list[Picture] | None:
        """The pictures of a request, None where the model reads text alone. They are read in a thread.

        Raises:
            SchedulerFailure: one cannot be read, or none may be there.
        """
        own, images = parts_as_tags(request.messages or [])[1], getattr(request, "images", None)
        if own and images:
            raise SchedulerFailure(
                "The request has images, and parts of its messages bring others. Expected one of both."
            )
        images = own or ([images] if isinstance(images, str) and images else images or [])
        if self.reader is None and images:
            raise SchedulerFailure(f"The request has images. Expected text alone: {self.why}.")
        if not isinstance(images, (list, tuple)):
            raise SchedulerFailure(f"The request's images is {images!r:.100}, expected a list.")
        if self.reader is None or not images:
            return None if self.reader is None else []
        return await asyncio.to_thread(lambda: [self._read(image, k) for k, image in enumerate(images)])

    def _read(self, image: Any, number: int) -> Picture:
        if isinstance(image, str) and image in self._known:
            return self._known[image]
        try:
            given = decoded(image) if isinstance(image, str) and not image.startswith("data:") else image
            picture = self.reader.read(given, f"The request's image {number}")
        except ValueError as error:
            raise SchedulerFailure(str(error)) from error
        self.pictures[picture.name] = picture
        if isinstance(image, str):
            self._known[image] = picture
        return picture


def decoded(text: str) -> bytes | str:
    """The bytes of base64; another text as it is, which no reader takes: a path that a policy wrote is not read."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text
