"""Images in messages: parts of contents, columns of rows, replies of tools and environments, as texts with marks."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
from contextlib import suppress
from typing import Any

from mt_grpo.base.rows import IMAGE_COLUMNS, is_image
from mt_grpo.images.pictures import (
    MARKS,
    PLACE,
    Picture,
    SaidPictures,
    id_of_digest,
    image_parts,
    images_of,
    is_image_part,
    picture_of,
    png_uri,
    reader_of,
    why_none,
    with_marks_of,
)
from mt_grpo.rollout import Message, Reply


def mark_of(picture: Picture) -> str:
    """The mark that stands for an image in a text."""
    return f"\ufdd0{MARKS.secret}{picture.name}\ufdd1"


def pictures_of(text: str) -> list[Picture]:
    """The images of the marks in a text, in their order."""
    return [picture_of(id_of_digest(name)) for name in MARKS.pattern.findall(text) if name]


def marks_replaced(text: str, by: str = "") -> str:
    """Replace each mark in a text, and remove parts of marks."""
    return MARKS.pattern.sub(lambda found: by if found[1] else "", text)


def uri_or_str(value: Any) -> str:
    """JSON `default` for a row that is sent to a program: an image becomes a data URI, other values become text."""
    try:
        from PIL import Image

        if isinstance(value, Image.Image):
            return png_uri(as_rgb(value))
        kind = Image.MIME.get(Image.open(io.BytesIO(value)).format, "image")
    except Exception:  # no bytes, or those of no image; or Pillow is not installed
        return str(value)
    return f"data:{kind};base64,{base64.b64encode(value).decode()}"


def as_rgb(image: Any) -> Any:
    """A PIL image as the model sees it: turned as its EXIF says, and on white where it is transparent.

    vLLM shows the model the same. Without white, dark signs on a transparent ground would be black on black.

    Raises `ValueError` for samples of more than 8 bits, which PIL cuts off at white.
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its mode is {image.mode}, expected samples of 8 bits. Scale and convert it to RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def own_image(part: dict[str, Any]) -> Any:
    """The image that a part contains, None if the part is only a place for one."""
    return next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)


def as_parts(content: Any) -> list[Any]:
    """Convert a content to parts: texts and PIL images become parts, other values are unchanged."""
    values = content if isinstance(content, list) else [content]
    parts = [{"type": "image", "image": each} if is_image(each) else each for each in values]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def text_of_parts(said: SaidPictures, content: Any, where: str) -> str:
    """`said_text` of a text or of parts. Raises `ValueError`, beginning with `where`."""
    if isinstance(content, dict) and not is_image_part(content):
        raise ValueError(f"{where} has the content {content!r:.100}, expected text, or parts of type text.")
    return "".join(text_of_part(said, part, where) for part in as_parts(content))


def text_of_part(said: SaidPictures, part: Any, where: str) -> str:
    """The text of one part, with a mark or a place for its image."""
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return with_marks_of(part["text"], said.pictures)
    image = own_image(part) if is_image_part(part) else None
    if image is None and not (is_image_part(part) and said.places):
        raise ValueError(f"{where} has the content {part!r:.100}, expected text, or parts of type text.")
    if said.reader is None:
        raise ValueError(f"{where} has an image. The model would not see it: {said.why}. Expected text alone.")
    if image is None:
        return PLACE
    picture = said.reader.read(image, where, said.paths)
    said.pictures += [picture] if picture not in said.pictures else []
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
    return text_of_parts(said, parts, "the tool's result"), said.pictures


def read_ahead(said: Any, reader: Any) -> Any:
    """Read the images in an environment's return value, in its thread: the event loop reads parts with a `Picture`."""
    if (image := said if is_image(said) else own_image(said) if is_image_part(said) else None) is not None:
        with suppress(ValueError):  # it is raised where the message is read
            return {"type": "image", "image": reader.read(image, "")}
        return said
    if isinstance(said, Reply):
        return dataclasses.replace(said, **{k: read_ahead(getattr(said, k), reader) for k in ("messages", "history")})
    if isinstance(said, dict):
        return {**said, **{k: read_ahead(said[k], reader) for k in said.keys() & {"content", "messages", "history"}}}
    return [read_ahead(each, reader) for each in said] if isinstance(said, list) else said


def num_pixels(row: dict[str, Any], reader: Any) -> int:
    """The number of pixels of a row's images. Only their headers are read; an invalid image counts as 0."""
    return sum(map(reader.num_pixels, [*map(own_image, image_parts(row.get("prompt"))), *images_of(row)]))


def refuse_images(row: dict[str, Any], where: str, why: str) -> None:
    """Raise `ValueError` for a row with an image, in a column or in a message. `why` the model does not see it."""
    words = f"The model would not see it: {why}. Remove it, or rename a column that a tool or a reward reads."
    for key in IMAGE_COLUMNS:
        if images_of({key: row.get(key)}):
            raise ValueError(f"{where}: the column {key!r} is {row[key]!r:.80}. {words}")
    if image_parts(row.get("prompt")):
        raise ValueError(f"{where}: a message has an image. {words}")


def with_places(
    prompt: list[Message], row: dict[str, Any], tokenizer: Any, where: str
) -> tuple[list[Message], list[Picture]]:
    """Read a row's images, as `read_row`: those of its columns, which have a `PLACE` each, then those of messages."""
    if (reader := reader_of(tokenizer)) is None:
        refuse_images({**row, "prompt": prompt}, where, why_none(tokenizer))
    shown = [reader.read(image, f"{where}, image {k}", paths=True) for k, image in enumerate(images_of(row))]
    said = SaidPictures(tokenizer, shown, places=True, paths=True)
    return [{**message, "content": text_of_parts(said, message["content"], where)} for message in prompt], shown


def placed(messages: list[Message], pictures: list[Picture], where: str) -> list[Message]:
    """Put the images of a row's columns into messages.

    At each `PLACE`; without one at each `<image>`, as verl; without either before a user's first text, as TRL.
    """
    texts = [message["content"] for message in messages]
    place = PLACE if not pictures or any(PLACE in text for text in texts) else "<image>"
    places = sum(text.count(place) for text in texts)
    if places not in (0, len(pictures)):
        words = f"{places} places for them, `<image>` or parts of this type without an image. Expected one per image."
        raise ValueError(f"{where}: the row's columns have {len(pictures)} images, and the prompt has {words}")
    if not pictures:
        return messages
    first = next((k for k, message in enumerate(messages) if message["role"] == "user"), None)
    if not places and first is None:
        words = "no message of a user to put them into. Add one, or a part {'type': 'image'} to another message."
        raise ValueError(f"{where}: got {len(pictures)} images, and {words}")
    if not places:
        texts[first] = len(pictures) * place + texts[first]
    following = map(mark_of, pictures)
    texts = [re.sub(place, lambda _: next(following), text) for text in texts]
    return [{**message, "content": text} for message, text in zip(messages, texts)]
