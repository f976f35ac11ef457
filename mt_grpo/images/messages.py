"""Images in messages: parts of contents, columns of rows, replies of tools and environments, as texts with marks."""

from __future__ import annotations

import re
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.base.json_types import is_image
from mt_grpo.base.rows import IMAGE_COLUMNS
from mt_grpo.images.pictures import PLACE, Picture, mark_of, with_marks_of

Messages = list[dict[str, Any]]
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # `positions_of` supports their positions
OTHER_KINDS = ("video", "videos", "audio", "audios")  # columns of ms-swift that no model here reads


def image_reader(name: str, config: Any, tokenizer: Any, revision: str | None = None) -> Any:
    """Create the `PictureReader` of a model, or return why there is none: the model is then text-only."""
    if getattr(config, "image_token_id", None) is None or config is config.get_text_config():
        return "it is a text-only model"
    if config.model_type not in FAMILIES:
        return f"images are supported for models of type {', '.join(FAMILIES)}, got {config.model_type}"
    try:
        from mt_grpo.images.processor import PictureReader

        return PictureReader(name, config, tokenizer, revision)
    except ImportError:
        return "a package is missing. Run `pip install -e '.[vision]'`"
    except Exception as error:  # of its processor or chat template: a model of text may have no use for them
        return f"its processor of images cannot be used: {error_line(error)}"


def with_pictures(tokenizer: Any, reader: Any) -> Any:
    """Make a tokenizer write images with this reader, or record why there is none. Returns the tokenizer itself."""
    if not isinstance(reader, str):
        return reader.join(tokenizer)
    tokenizer.no_pictures, tokenizer.pictures = reader, None
    return tokenizer


def reader_of(tokenizer: Any) -> Any:
    """The image reader of a tokenizer's model, None if the model is text-only."""
    return getattr(tokenizer, "pictures", None)


def why_none(tokenizer: Any) -> str:
    """Why a tokenizer's model has no image reader, for error messages."""
    return getattr(tokenizer, "no_pictures", "it is a text-only model")


def is_image_part(part: Any) -> bool:
    """Whether a part of a content is an image or a place for one, by its type alone."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def own_image(part: dict[str, Any]) -> Any:
    """The image that a part contains, None if the part is only a place for one."""
    return next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)


def as_parts(content: Any) -> list[Any]:
    """Convert a content to parts: texts and PIL images become parts, other values are unchanged."""
    values = content if isinstance(content, list) else [content]
    parts = [{"type": "image", "image": each} if is_image(each) else each for each in values]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


class SaidPictures:
    """Converts contents of messages, texts or parts, to texts with marks, and appends their images to `pictures`.

    Marks of `pictures` stay in texts. With `places` a part may be the place of a row's image, and with `paths` its
    image may be the path of a file. Without a tokenizer that reads images they are rejected.
    """

    def __init__(
        self, tokenizer: Any = None, pictures: list[Picture] | None = None, places: bool = False, paths: bool = False
    ):
        self.reader, self.why = reader_of(tokenizer), why_none(tokenizer)
        self.pictures = [] if pictures is None else pictures
        self.places, self.paths = places, paths

    def text(self, content: Any, where: str) -> str:
        """Convert a content. Raises `ValueError`, beginning with `where`."""
        if isinstance(content, dict):
            raise ValueError(f"{where} has the content {content!r:.100}, expected text, or parts of type text.")
        return "".join(self._text(part, where) for part in as_parts(content))

    def _text(self, part: Any, where: str) -> str:
        if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
            return with_marks_of(part["text"], self.pictures)
        image = own_image(part) if is_image_part(part) else None
        if image is None and not (is_image_part(part) and self.places):
            raise ValueError(f"{where} has the content {part!r:.100}, expected text, or parts of type text.")
        if self.reader is None:
            raise ValueError(f"{where} has an image. The model would not see it: {self.why}. Expected text alone.")
        if image is None:
            return PLACE
        picture = self.reader.read(image, where, self.paths)
        if picture not in self.pictures:
            self.pictures.append(picture)
        return mark_of(picture)


def read_result(value: Any, reader: Any) -> tuple[str, list[Picture]] | None:
    """Convert a tool's return value to (text with marks, images). None without images: an address or path is data."""
    parts = as_parts(value)
    images = [own_image(part) for part in parts if is_image_part(part)]
    urls = [image.get("url") if isinstance(image, dict) and "bytes" not in image else image for image in images]
    if all(url is None or (isinstance(url, str) and not url.startswith("data:")) for url in urls):
        return None
    said = SaidPictures()
    said.reader = reader
    return said.text(parts, "the tool's result"), said.pictures


def images_of(row: dict[str, Any]) -> list[Any]:
    """The images of a row's columns, in their order."""
    given = [row[key] for key in IMAGE_COLUMNS if row.get(key) not in (None, "")]
    return [each for value in given for each in (value if isinstance(value, list) else [value])]


def image_parts(messages: Any) -> list[dict[str, Any]]:
    """The parts of messages that are images or places for one."""
    contents = [message.get("content") for message in messages or [] if isinstance(message, dict)]
    return [part for content in contents if isinstance(content, list) for part in content if is_image_part(part)]


def num_pixels(row: dict[str, Any], reader: Any) -> int:
    """The number of pixels of a row's images. Only their headers are read; an invalid image counts as 0."""
    return sum(map(reader.num_pixels, [*map(own_image, image_parts(row.get("prompt"))), *images_of(row)]))


def refuse_images(row: dict[str, Any], where: str, why: str) -> None:
    """Raise `ValueError` for a row with an image, in a column or in a message. `why` the model does not see it."""
    for key in IMAGE_COLUMNS:
        if images_of({key: row.get(key)}):
            raise ValueError(
                f"{where}: the column {key!r} is {row[key]!r:.80}. The model would not see it: {why}. Remove the "
                "column, or rename it if a tool or a reward reads it."
            )
    if image_parts(row.get("prompt")):
        raise ValueError(f"{where}: a message has an image. The model would not see it: {why}. Remove it.")


def with_places(prompt: Messages, row: dict[str, Any], tokenizer: Any, where: str) -> tuple[Messages, list[Picture]]:
    """Read the images of a row as `read_row`, but leave a `PLACE` for those of its columns.

    The images are those of the row's columns (`of_columns`), followed by those of the parts.
    """
    if not images_of(row) and not image_parts(prompt):
        return prompt, []
    if (reader := reader_of(tokenizer)) is None:
        refuse_images({**row, "prompt": prompt}, where, why_none(tokenizer))
    shown = [reader.read(image, f"{where}, image {k}", paths=True) for k, image in enumerate(images_of(row))]
    said = SaidPictures(tokenizer, shown, places=True, paths=True)
    return [{**message, "content": said.text(message["content"], where)} for message in prompt], shown


def of_columns(shown: list[Picture], row: dict[str, Any]) -> list[Picture]:
    """The images of the row's columns, among those that `with_places` returns."""
    return shown[: len(images_of(row))]


def placed(messages: Messages, pictures: list[Picture], where: str) -> Messages:
    """Put the images of a row's columns into messages, at each `PLACE`, or before the first text of a user, as in TRL.

    Raises `ValueError` if the numbers of images and places differ, or if there is no message of a user.
    """
    places = sum(message["content"].count(PLACE) for message in messages)
    if places not in (0, len(pictures)):
        raise ValueError(
            f"{where}: the columns {' and '.join(IMAGE_COLUMNS)} have {len(pictures)} images, and the prompt has "
            f"{places} places for them, parts {{'type': 'image'}} without an image under 'image' or 'image_url'. "
            "Expected one place per image."
        )
    if not pictures:
        return messages
    texts = [message["content"] for message in messages]
    if not places:
        first = next((k for k, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise ValueError(
                f"{where}: got {len(pictures)} images, and no message of a user to put them into. Add one, or a part "
                "{'type': 'image'} to another message."
            )
        texts[first] = len(pictures) * PLACE + texts[first]
    following = map(mark_of, pictures)
    texts = [re.sub(PLACE, lambda _: next(following), text) for text in texts]
    return [{**message, "content": text} for message, text in zip(messages, texts)]


def read_row(
    prompt: Messages, row: dict[str, Any], tokenizer: Any, env: Any, where: str, way: str = "place_images"
) -> tuple[Messages, list[Picture]]:
    """Read the images of a row's prompt. Returns (messages with text contents, images). Raises `ValueError`.

    If conversations have an environment, whose `reset` may change the prompt, places stay (`with_places`). A class of
    conversations may have functions of its own: `place_images` for a rollout, `mark_images` for what the model reads.
    """
    if hasattr(env, way):
        return getattr(env, way)(prompt, row, tokenizer, where)
    messages, shown = with_places(prompt, row, tokenizer, where)
    if env.environments is None:
        messages = placed(messages, of_columns(shown, row), where)
    return messages, shown


def read_pictures(
    prompts: list, rows: list[dict[str, Any]] | None, tokenizer: Any, env: Any
) -> tuple[list, list[list[Picture]]]:
    """Read the images of prompts, messages or texts, those of a group once. Returns (prompts, the images of each)."""
    found: list[tuple] = []
    for k, prompt in enumerate(prompts):
        row = rows[k] if rows else {}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and images_of(row) else prompt
        if found and rows and row is rows[k - 1] and prompt is prompts[k - 1]:
            found.append(found[-1])
        elif isinstance(messages, str) or (not messages and hasattr(env, "place_images")):
            found.append((messages, []))
        else:
            found.append(read_row(messages, row, tokenizer, env, f"prompt {k}"))
    return [messages for messages, _ in found], [shown for _, shown in found]
