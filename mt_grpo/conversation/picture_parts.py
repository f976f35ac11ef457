"""Images in messages: parts of contents, columns of rows, and replies of tools and environments, as marked texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.base.json_types import is_image
from mt_grpo.base.rows import IMAGE_COLUMNS
from mt_grpo.conversation.pictures import (
    PLACE,
    PictureReader,
    mark_of,
    opened,
    reader_of,
    why_none,
    with_marks_of,
)
from mt_grpo.conversation.sampling import check_conversations
from mt_grpo.images.pictures import Picture

OTHER_KINDS = ("video", "videos", "audio", "audios")  # columns of ms-swift that no model here reads


def refuse_images(row: dict[str, Any], where: str, why: str) -> None:
    """Raise `ValueError` for a row with an image, in a column or in a message. An empty column does not count.

    Args:
        row: A row of the data.
        where: The beginning of the error message.
        why: The reason why the model does not see it.
    """
    for key in IMAGE_COLUMNS:
        value = row.get(key)
        if value is not None and not (isinstance(value, (list, str)) and len(value) == 0):
            raise ValueError(
                f"{where}: the column {key!r} is {value!r:.80}. The model would not see it: {why}. Remove the column, "
                "or rename it if a tool or a reward reads it."
            )
    contents = [message.get("content") for message in row.get("prompt") or [] if isinstance(message, dict)]
    if any(is_image_part(part) for content in contents if isinstance(content, list) for part in content):
        raise ValueError(f"{where}: a message has an image. The model would not see it: {why}. Remove it.")


def with_marks(
    prompt: list[dict[str, Any]], row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[dict[str, Any]], list[Picture]]:
    """Read the images of a row's prompt. Returns (messages with text contents and marks, the marked images).

    Raises:
        ValueError: Images and places do not match, an image cannot be read, or the model is text-only.
    """
    messages, shown = with_places(prompt, row, tokenizer, where)
    return placed(messages, of_columns(shown, row), where), shown


def with_places(
    prompt: list[dict[str, Any]], row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[dict[str, Any]], list[Picture]]:
    """Read the images of a row, without placing those of its columns. Returns (messages with text contents, images).

    A part with an image of its own becomes its mark, and one without becomes a `PLACE`. The images are those of the
    row's columns (`of_columns`), followed by those of the parts.

    Raises:
        ValueError: An image cannot be read, or the model is text-only.
    """
    waiting = images_of(row)
    parts = [part for message in prompt if isinstance(message["content"], list) for part in message["content"]]
    if not waiting and not any(is_image_part(part) for part in parts):
        return prompt, []
    if (reader := reader_of(tokenizer)) is None:
        refuse_images({**row, "prompt": prompt}, where, why_none(tokenizer))
    shown: list[Picture] = []

    def read(value: Any) -> Picture:
        shown.append(reader.read(value, f"{where}, image {len(shown)}", paths=True))
        return shown[-1]

    def text_of(part: dict[str, Any]) -> str:
        if not is_image_part(part):
            return part["text"]
        return PLACE if own_image(part) is None else mark_of(read(own_image(part)))

    for value in waiting:
        read(value)
    return [
        {**message, "content": "".join(map(text_of, message["content"]))}
        if isinstance(message["content"], list)
        else message
        for message in prompt
    ], shown


def of_columns(shown: list[Picture], row: dict[str, Any]) -> list[Picture]:
    """The images of the row's columns, among those that `with_places` returns."""
    return shown[: len(images_of(row))]


def placed(messages: list[dict[str, Any]], pictures: list[Picture], where: str) -> list[dict[str, Any]]:
    """Put the images of a row's columns into messages, the next one at each `PLACE`.

    If there is no place, they come before the first text of a user, as in TRL.

    Raises:
        ValueError: The numbers of images and places differ, or there is no message of a user.
    """
    places = sum(message["content"].count(PLACE) for message in messages)
    if not places and not pictures:
        return messages
    if places not in (0, len(pictures)):
        raise ValueError(
            f"{where}: the columns {' and '.join(IMAGE_COLUMNS)} have {len(pictures)} images, and the prompt has "
            f"{places} places for them, parts {{'type': 'image'}} without an image under 'image' or 'image_url'. "
            "Expected one place per image."
        )
    if places:
        following = map(mark_of, pictures)
        return [
            {**message, "content": re.sub(PLACE, lambda _: next(following), message["content"])}
            for message in messages
        ]
    first = next((k for k, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError(
            f"{where}: got {len(pictures)} images, and no message of a user to put them into. Add one, or a part "
            "{'type': 'image'} to another message."
        )
    content = "".join(map(mark_of, pictures)) + messages[first]["content"]
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


def read_pictures(
    prompts: Any, rows: list[dict[str, Any]] | None, tokenizer: Any, env: Any = None, way: str = "place_images"
) -> tuple[list, list[list[Picture]]]:
    """Read the images of prompts. Returns (prompts as texts with marks, the images of each). A group shares them.

    Args:
        prompts: Messages, or strings.
        rows: One row of the data per prompt.
        tokenizer: The model's tokenizer.
        env: The class of conversations. If it has an environment, whose `reset` may change the prompts, places stay
            (`with_places`). Conversations that place images otherwise have functions of their own: `place_images` for
            the prompt of a rollout, and `mark_images` for what the model reads of it.
        way: The name of one of these.

    Raises `ValueError` for invalid prompts (`check_conversations`), and for invalid images (`with_marks`).
    """
    prompts = check_conversations(prompts, "prompts", images=True)
    resets = getattr(env, "environments", None) is not None and not hasattr(env, way)
    place = getattr(env, way, with_places if resets else with_marks)
    reader, found, last = reader_of(tokenizer), [], None
    for number, prompt in enumerate(prompts):
        row = rows[number] if rows else {}
        has_image = any(row.get(key) is not None for key in IMAGE_COLUMNS)
        if isinstance(prompt, str) and reader is not None and has_image:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str) or not (prompt or (resets and has_image)):  # an environment's `reset` brings one
            found.append((prompt, []))
            continue
        if last is None or last[0] is not row or last[1] is not prompts[number]:
            last = row, prompts[number], place(prompt, row, tokenizer, f"prompt {number}")
        found.append(last[2])
    return check_conversations([prompt for prompt, _ in found], "prompts"), [shown for _, shown in found]


def parts_of(value: Any) -> list[dict[str, Any]] | None:
    """Convert a tool's return value to message parts, if it has an image (PIL or OpenAI's form). None otherwise."""
    parts = as_parts(value if isinstance(value, list) else [value])
    if not any(is_image_part(part) and not is_address(own_image(part)) for part in parts):
        return None  # a part that names an address is data, as other JSON
    return parts


def as_parts(values: list[Any]) -> list[Any]:
    """Convert texts and PIL images to message parts. Other values are returned unchanged."""
    parts = [{"type": "image", "image": each} if is_image(each) else each for each in values]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def text_of_parts(
    parts: list[Any], reader: PictureReader, where: str, known: Iterable[Picture] = (), places: bool = False
) -> tuple[str, list[Picture]]:
    """Convert message parts to one text with marks. Returns (text, images). Raises `ValueError`; reads no paths.

    Args:
        parts: Parts with texts and images.
        reader: The image reader of the model.
        where: The beginning of the error message.
        known: Images whose marks stay if a text has them.
        places: Whether a part may be the place of a row's image.
    """
    text, shown = "", []
    for part in parts:
        if is_image_part(part) and own_image(part) is not None:
            shown.append(reader.read(own_image(part), where))
            text += mark_of(shown[-1])
        elif is_image_part(part) and places:
            text += PLACE
        elif is_text_part(part):
            text += with_marks_of(part["text"], known)
        else:
            raise ValueError(
                f"{where} has the part {part!r:.100}. Expected text, or an image under 'image' or 'image_url'."
            )
    return text, shown


class SaidPictures:
    """Reads the contents of an environment's messages, and adds their images to those of the conversation.

    Args:
        tokenizer: The model's tokenizer. Without an image reader, or None: images are rejected.
        pictures: The images of the conversation so far. New ones are appended.
        places: Whether a part may be the place of a row's image.
    """

    def __init__(self, tokenizer: Any = None, pictures: list[Picture] | None = None, places: bool = False):
        self.tokenizer, self.pictures, self.places = tokenizer, [] if pictures is None else pictures, places

    def text(self, content: Any, where: str) -> str:
        """Convert a content, text or parts, to text with marks. Raises `ValueError`.

        Marks of the conversation's own images stay: `rollout.history` has them instead of the images.
        """
        if isinstance(content, str):
            return with_marks_of(content, self.pictures)
        parts = as_parts(content if isinstance(content, list) else [content])
        if not any(is_image_part(part) or is_image(part) for part in parts) or isinstance(content, dict):
            for part in parts:
                if not isinstance(content, list) or not is_text_part(part):
                    raise ValueError(f"{where} has the content {part!r:.100}, expected text, or parts of type text.")
            return "".join(with_marks_of(part["text"], self.pictures) for part in parts)
        if (reader := reader_of(self.tokenizer)) is None:
            raise ValueError(
                f"{where} has an image. The model would not see it: {why_none(self.tokenizer)}. Expected text alone."
            )
        text, shown = text_of_parts(as_parts(parts), reader, where, self.pictures, self.places)
        self.pictures += [picture for picture in shown if picture not in self.pictures]
        return text


def num_pixels(row: dict[str, Any]) -> int:
    """The number of pixels of a row's images. Only their headers are read; an invalid image counts as 0."""
    brought = [
        part
        for message in row.get("prompt") or []
        if isinstance(message["content"], list)
        for part in message["content"]
        if is_image_part(part) and own_image(part) is not None
    ]
    return sum(map(size_of, [*map(own_image, brought), *images_of(row)]))


def size_of(value: Any) -> int:
    """The number of pixels of an image that `PictureReader.read` takes, 0 if it is invalid."""
    try:
        image = opened(value, paths=True)
        return image.width * image.height
    except Exception:  # whatever a decoder raises: the check of the images says it
        return 0


def images_of(row: dict[str, Any]) -> list[Any]:
    """The images of a row's columns, in their order."""
    given = [row[key] for key in IMAGE_COLUMNS if row.get(key) not in (None, "")]
    return [each for value in given for each in (value if isinstance(value, list) else [value])]


def is_image_part(part: Any) -> bool:
    """Whether a part of a content is an image or a place for one, by its type alone."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"


def is_address(value: Any) -> bool:
    """Whether the image of a part is not at hand: it is missing, or an address or a path."""
    value = value.get("url") if isinstance(value, dict) and "bytes" not in value else value
    return value is None or (isinstance(value, str) and not value.startswith("data:"))


def own_image(part: dict[str, Any]) -> Any:
    """The image that a part contains, None if the part is only a place for one."""
    return next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
