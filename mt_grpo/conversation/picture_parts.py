"""Images in messages: parts of contents, columns of rows, and what tools and environments say, as texts with marks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.base.pictures import Picture, is_image
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

OTHER_KINDS = ("video", "videos", "audio", "audios")  # columns of ms-swift that no model here reads


def refuse_images(row: dict[str, Any], where: str, why: str) -> None:
    """Raise `ValueError` for a row with an image, in a column or in a message. An empty column is none.

    Args:
        row: Of the data.
        where: What the error begins with.
        why: The model does not see it.
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
    """(messages whose contents are text, the pictures of their marks) of a row's prompt.

    Raises:
        ValueError: pictures and their places do not match, one cannot be read, or the model reads text alone.
    """
    messages, shown = with_places(prompt, row, tokenizer, where)
    return placed(messages, of_columns(shown, row), where), shown


def with_places(
    prompt: list[dict[str, Any]], row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[dict[str, Any]], list[Picture]]:
    """(messages whose contents are text, pictures) of a row's prompt, before those of its columns are put into it.

    A part with a picture of its own becomes the picture's mark, and one without becomes a `PLACE`. The pictures are
    those of the row's columns (`of_columns`), and behind them those of the parts.

    Raises:
        ValueError: a picture cannot be read, or the model reads text alone.
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
    """Of the pictures that `with_places` gives, those of the row's columns."""
    return shown[: len(images_of(row))]


def placed(messages: list[dict[str, Any]], pictures: list[Picture], where: str) -> list[dict[str, Any]]:
    """Messages with the pictures of a row's columns, the next one at each `PLACE`.

    Where there is no place, they stand before the first text of a user, as TRL puts them.

    Raises:
        ValueError: there are more pictures than places, or fewer, or no message of a user.
    """
    places = sum(message["content"].count(PLACE) for message in messages)
    if not places and not pictures:
        return messages
    if places not in (0, len(pictures)):
        raise ValueError(
            f"{where}: the columns {' and '.join(IMAGE_COLUMNS)} have {len(pictures)} images, and the prompt has "
            f"{places} places for them, parts {{'type': 'image'}} without an image under 'image' or 'image_url'. "
            "Expected as many."
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
            f"{where}: {len(pictures)} images, and no message of a user to put them into. Add one, or a part "
            "{'type': 'image'} to another message."
        )
    content = "".join(map(mark_of, pictures)) + messages[first]["content"]
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


def read_pictures(
    prompts: Any, rows: list[dict[str, Any]] | None, tokenizer: Any, env: Any = None, way: str = "place_images"
) -> tuple[list, list[list[Picture]]]:
    """(prompts of texts, with marks; the pictures of each). The rollouts of a group share them.

    Args:
        prompts: Messages, or strings.
        rows: Of the data, one for each.
        tokenizer: Of the model.
        env: Of the conversations. Where it has an environment, whose `reset` may change the prompts, their places stay
            (`with_places`). Conversations that place images otherwise have functions of their own: `place_images` for
            the prompt of a rollout, and `mark_images` for what the model reads of it.
        way: The name of one of these.

    Raises `ValueError` for what is no prompt (`check_conversations`), and for pictures (`with_marks`).
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
    """What a tool returned as parts of a message, if there is an image among them: of PIL, or in OpenAI's form."""
    parts = as_parts(value if isinstance(value, list) else [value])
    if not any(is_image_part(part) and not is_address(own_image(part)) for part in parts):
        return None  # a part that names an address is data, as other JSON
    return parts


def as_parts(values: list[Any]) -> list[Any]:
    """Texts and images of PIL as parts of a message; others as they are."""
    parts = [{"type": "image", "image": each} if is_image(each) else each for each in values]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def text_of_parts(
    parts: list[Any], reader: PictureReader, where: str, known: Iterable[Picture] = (), places: bool = False
) -> tuple[str, list[Picture]]:
    """(the text of parts with marks, their pictures). Raises `ValueError`; no path is read.

    Args:
        parts: Of texts and images.
        reader: Of the model.
        where: What the error begins with.
        known: Pictures whose marks stay, where they stand in a text.
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
    """Reads what an environment says in a conversation, and keeps its pictures beside the conversation's own.

    Args:
        tokenizer: Of the model. One without a reader of pictures, or None: an image is refused.
        pictures: Of the conversation so far. Those that are read are put behind them.
        places: Whether a part may be the place of a row's image.
    """

    def __init__(self, tokenizer: Any = None, pictures: list[Picture] | None = None, places: bool = False):
        self.tokenizer, self.pictures, self.places = tokenizer, [] if pictures is None else pictures, places

    def text(self, content: Any, where: str) -> str:
        """A content, text or parts, as text with marks. Raises `ValueError`.

        A mark of the conversation's own pictures stays: it is what `rollout.history` has in the place of one.
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
    """The pixels of a row's images, of which no more than the headers are read; an image that is none has none."""
    brought = [
        part
        for message in row.get("prompt") or []
        if isinstance(message["content"], list)
        for part in message["content"]
        if is_image_part(part) and own_image(part) is not None
    ]
    return sum(map(size_of, [*map(own_image, brought), *images_of(row)]))


def size_of(value: Any) -> int:
    """The pixels of what `PictureReader.read` takes; 0 where that raises."""
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
    """Whether a part of a content is a picture, or a place for one: its type says so, and no other key of a dict."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"


def is_address(value: Any) -> bool:
    """Whether a part names an image that nobody has fetched: none, or an address or a path."""
    value = value.get("url") if isinstance(value, dict) and "bytes" not in value else value
    return value is None or (isinstance(value, str) and not value.startswith("data:"))


def own_image(part: dict[str, Any]) -> Any:
    """The picture that a part brings; None: it is a place for one."""
    return next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
