"""Images of conversations: the ids and marks that stand for them, the forward pass, and images in messages and rows.

A model reads as many placeholders as an image has tokens. Here each of them is an id of the image's own, beyond any
vocabulary, made from a digest of its pixels. So a prompt with another image is another prompt wherever ids are
compared, hashed, shared or sent. In a text an image is a mark, so that a message stays text wherever it is edited.
"""

from __future__ import annotations

import base64
import functools
import io
import operator
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from mt_grpo.base.rows import IMAGE_COLUMNS, is_image
from mt_grpo.rollout import Rollout, ToolResult

FIRST_ID = 2**32  # no vocabulary is as large
MOST_PICTURES = 999  # of one context: as many as vLLM reads unless it is told otherwise
ID_DIGITS = 12  # of the digest, so that an id fits into a tensor of 64 bits
PLACE = "\ufdd0\ufdd1"  # the place of the next image of a row, in a text that is not yet what the model reads
SECRET = secrets.token_hex(4)  # of marks: what no tool can guess, next to two characters that no text has
TOWER = re.compile(r"\bvisual\.")  # in the names of modules that read images
FORBIDDEN = -1e4  # a logit whose probability is 0 in half precision, too


@dataclass(eq=False, repr=False)
class Picture:
    """An image as a model reads it. `Picture.of` makes one, once for each digest."""

    image: Any  # of PIL, RGB, in the size in which the model sees it
    placeholder: int  # the id that the forward pass reads for each of its tokens
    grid: tuple[int, int]  # (height, width) in tokens
    features: dict[str, Any]  # tensors that it reads: `pixel_values` (patches, ...) and `image_grid_thw` (1, 3)
    digest: str  # of size, pixels and the reader's settings

    @staticmethod
    def of(*values: Any) -> Picture:
        """Return the picture of these fields: the one that somebody holds, or a new one."""
        # INVARIANT: there is one for an id, also if it comes from another rank, or if two tools read it at a time. The
        # table forgets an id with its picture: of two equal ones the second would be lost with the first.
        picture = Picture(*values)
        with MAKES_ONE:
            return KNOWN.setdefault(id_of_digest(picture.digest), picture)

    @property
    def name(self) -> str:
        """The name of the image in logs and marks: the beginning of its digest."""
        return self.digest[:ID_DIGITS]

    @property
    def id(self) -> PictureId:
        """The id of each of its tokens in lists of ids. It holds the image; in tensors it is a plain number."""
        token = PictureId(id_of_digest(self.digest))
        token.picture = self
        return token

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def ids(self) -> list[PictureId]:
        return self.num_tokens * [self.id]

    @functools.cached_property
    def data_uri(self) -> str:
        """The image for a request, without loss."""
        return png_uri(self.image, compress_level=1)

    def __deepcopy__(self, memo: dict) -> Picture:
        return self  # it never changes

    def __reduce__(self) -> tuple:
        return Picture.of, (self.image, self.placeholder, self.grid, self.features, self.digest)


class PictureId(int):
    """An id that keeps its picture: as long as a list holds it, `picture_of` finds it, also by a plain number."""

    picture: Picture

    def __reduce__(self) -> tuple:
        return operator.attrgetter("id"), (self.picture,)


# By id. INVARIANT: what a digest names never changes. It covers the reader's settings: one table serves all models.
MAKES_ONE = threading.Lock()
KNOWN: weakref.WeakValueDictionary[int, Picture] = weakref.WeakValueDictionary()


def id_of_digest(digest: str) -> int:
    """The id of an image, by its digest or by its name."""
    return FIRST_ID + int(digest[:ID_DIGITS], 16)


def is_picture(token: int) -> bool:
    return token >= FIRST_ID


def picture_of(token: int) -> Picture:
    """The picture of an id. Raises `KeyError` if nothing holds it any more."""
    return KNOWN[int(token)]


def runs_of(ids: Iterable[int], partial: bool = False) -> list[list[int]]:
    """Split ids into runs of text, or of one image. Raises `ValueError` for a part of an image, unless `partial`."""
    found: list[list[int]] = []
    for key, group in groupby(ids, lambda token: int(token) if is_picture(token) else None):
        run = list(group)
        size = len(run) if key is None else picture_of(key).num_tokens
        if size and len(run) % size and not partial:
            raise ValueError(f"An image of {size} tokens has {len(run)} tokens here: a part of it is missing.")
        found += [run[start : start + size] for start in range(0, len(run), size)]
    return found


def pictures_in(ids: list[int]) -> list[Picture]:
    """The images that stand in ids, in their order."""
    if not any(map(is_picture, ids)):
        return []
    return [picture_of(run[0]) for run in runs_of(ids) if is_picture(run[0])]


def has_too_many(ids: list[int]) -> bool:
    """Whether ids contain more than `MOST_PICTURES` images, which counts as a full context."""
    return len(ids) > MOST_PICTURES < sum(map(is_picture, ids)) and len(pictures_in(ids)) > MOST_PICTURES


def with_placeholders(ids: list[int]) -> list[int]:
    """The ids as a model's forward pass reads them."""
    return [picture_of(token).placeholder if is_picture(token) else token for token in ids]


def held_by(tensors: Iterable[Any]) -> list[Picture]:
    """The images whose ids stand in tensors. Tensors do not hold them: whoever keeps the list does."""
    found = {int(token) for tensor in tensors for token in tensor[tensor >= FIRST_ID].unique().tolist()}
    return [picture_of(token) for token in sorted(found)]


def share_marks(on_main_process: Callable) -> None:
    """Use the main process's secret, so that all ranks read each other's texts (rewards of groups). Collective."""
    global SECRET, MARK
    SECRET = on_main_process(lambda: SECRET)
    mark, part = f"{SECRET}([0-9a-f]{{{ID_DIGITS}}})\ufdd1", f"[0-9a-f]{{0,{len(SECRET) + ID_DIGITS}}}"
    MARK = re.compile(f"\ufdd0(?:{mark}|{part})|\ufdd1")  # group 1 is the image's name, None for a part of a mark


share_marks(lambda own: own())


def mark_of(picture: Picture) -> str:
    """The mark that stands for an image in a text."""
    return f"\ufdd0{SECRET}{picture.name}\ufdd1"


def pictures_of(text: str) -> list[Picture]:
    """The images of the marks in a text, in their order."""
    return [picture_of(id_of_digest(name)) for name in MARK.findall(text) if name]


def marks_replaced(text: str, by: str = "") -> str:
    """Replace each mark in a text, and remove parts of marks."""
    return MARK.sub(lambda found: by if found[1] else "", text)


def with_marks_of(text: str, pictures: Iterable[Picture]) -> str:
    """Remove all marks from a text from outside, and parts of them, except those of these images."""
    names = {picture.name for picture in pictures}
    return MARK.sub(lambda found: found[0] if found[1] in names else "", text)


def own_results(rollout: Rollout, results: list[ToolResult]) -> list[ToolResult]:
    """Add the images of results to their conversation, and remove marks of other images from their texts."""
    for result in results:
        rollout.pictures += [picture for picture in result.pictures if picture not in rollout.pictures]
    return [replace(each, text=with_marks_of(each.text, rollout.pictures)) for each in results]


def readable(text: str) -> str:
    """Convert a text for display: image marks become `<image DIGEST>`."""
    return MARK.sub(lambda found: f"<image {found[1]}>" if found[1] else found[0], text.replace(PLACE, "<image>"))


def readable_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages for rewards, logs and display: those with an image are copied with `readable` contents."""
    return [{**m, "content": readable(m["content"])} if "\ufdd0" in (m.get("content") or "") else m for m in messages]


def png_uri(image: Any, **options: Any) -> str:
    """A PIL image as a data URI."""
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def uri_or_str(value: Any) -> str:
    """JSON `default` for a row that is sent to a program: an image becomes a data URI, other values become text."""
    try:
        from PIL import Image, ImageOps

        if isinstance(value, Image.Image):  # rotated as it is read
            return png_uri(ImageOps.exif_transpose(value).convert("RGB"))
        kind = Image.MIME.get(Image.open(io.BytesIO(value)).format, "image")
    except Exception:  # no bytes, or those of no image; or Pillow is not installed
        return str(value)
    return f"data:{kind};base64,{base64.b64encode(value).decode()}"


def features_of(pictures: list[Picture]) -> dict[str, Any]:
    """The inputs of a forward pass for several images in order: `pixel_values`, and `image_grid_thw` (images, 3)."""
    import torch

    names = dict.fromkeys(name for picture in pictures for name in picture.features)
    return {name: torch.cat([picture.features[name] for picture in pictures]) for name in names}


def inputs_of_requests(prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
    """(ids with placeholders, further inputs of `generate`) of prompts. They are padded later."""
    if not (pictures := [picture for ids in prompts for picture in pictures_in(ids)]):
        return prompts, {}
    kinds = [[int(is_picture(token)) for token in ids] for ids in prompts]
    return [with_placeholders(ids) for ids in prompts], {**features_of(pictures), "mm_token_type_ids": kinds}


def inputs_of_rows(input_ids: Any) -> tuple[Any, dict[str, Any]]:
    """(ids with placeholders, further inputs of a forward pass) of padded rows (M, L), for TRL's method."""
    if not (shown := input_ids >= FIRST_ID).any():
        return input_ids, {}
    rows = [pictures_in(row) for row in input_ids.tolist()]
    pictures = [picture for row in rows for picture in row]
    features = {name: values.to(input_ids.device) for name, values in features_of(pictures).items()}
    features |= {"num_images": [len(row) for row in rows], "mm_token_type_ids": shown.int()}
    return input_ids.masked_fill(shown, pictures[0].placeholder), features


def forbid(reader: Any, *models: Any) -> None:
    """Exclude a reader's `unsampled` ids from models' sampling, logprobs and entropy, by a bias that is not saved."""
    import torch

    # INVARIANT: what is not sampled has no logprob either. A sampled placeholder would stand for no image.
    for model in filter(None, models if reader is not None else ()):
        for head in model.get_output_embeddings().modules():  # several if adapters wrap it, as narrow as their rank
            is_head = isinstance(head, torch.nn.Linear) and len(head.weight) > max(reader.unsampled)
            if not is_head or "bias" in head._buffers:  # a second trainer may get the same model
                continue
            if head._parameters.pop("bias") is not None:
                raise ValueError(f"The head of {type(model).__name__} has a bias, which is not supported with images.")
            head.register_buffer("bias", head.weight.new_zeros(len(head.weight)), persistent=False)
            head.bias[reader.unsampled] = FORBIDDEN


@contextmanager
def forbidding_nothing(model: Any) -> Iterator[None]:
    """Context manager without the bias of `forbid`: a server's logprobs of a prompt cover the whole vocabulary."""
    import torch

    heads = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and "bias" in module._buffers]
    biases = [head.bias for head in heads]
    try:
        for head in heads:
            head.bias = torch.zeros_like(head.bias)
        yield
    finally:
        for head, bias in zip(heads, biases):
            head.bias = bias


# Images in messages: parts of contents, columns of rows, replies of tools and environments, as texts with marks.

Messages = list[dict[str, Any]]
OTHER_KINDS = ("video", "videos", "audio", "audios")  # columns of ms-swift that no model here reads


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
        if isinstance(content, dict) and not is_image_part(content):
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
        self.pictures += [picture] if picture not in self.pictures else []
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
    words = f"The model would not see it: {why}. Remove it, or rename a column that a tool or a reward reads."
    for key in IMAGE_COLUMNS:
        if images_of({key: row.get(key)}):
            raise ValueError(f"{where}: the column {key!r} is {row[key]!r:.80}. {words}")
    if image_parts(row.get("prompt")):
        raise ValueError(f"{where}: a message has an image. {words}")


def with_places(prompt: Messages, row: dict[str, Any], tokenizer: Any, where: str) -> tuple[Messages, list[Picture]]:
    """Read a row's images, those of its columns first, for which a `PLACE` is left, as `read_row`."""
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
    """Put the images of a row's columns into messages, at each `PLACE`, or before a user's first text, as in TRL."""
    places = sum(message["content"].count(PLACE) for message in messages)
    if places not in (0, len(pictures)):
        words = f"{places} places for them, parts {{'type': 'image'}} without an image. Expected one place per image."
        raise ValueError(f"{where}: the row's columns have {len(pictures)} images, and the prompt has {words}")
    if not pictures:
        return messages
    first = next((k for k, message in enumerate(messages) if message["role"] == "user"), None)
    if not places and first is None:
        words = "no message of a user to put them into. Add one, or a part {'type': 'image'} to another message."
        raise ValueError(f"{where}: got {len(pictures)} images, and {words}")
    texts = [message["content"] for message in messages]
    if not places:
        texts[first] = len(pictures) * PLACE + texts[first]
    following = map(mark_of, pictures)
    texts = [re.sub(PLACE, lambda _: next(following), text) for text in texts]
    return [{**message, "content": text} for message, text in zip(messages, texts)]


def read_row(
    prompt: Messages, row: dict[str, Any], tokenizer: Any, env: Any, where: str, way: str = "place_images"
) -> tuple[Messages, list[Picture]]:
    """Read the images of a row's prompt. Returns (messages with text contents, images). Raises `ValueError`.

    Places stay if an environment's `reset` may change the prompt. A class of conversations may have functions of its
    own: `place_images` for a rollout, `mark_images` for what the model reads.
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
