"""Images of conversations: the ids and marks that stand for them.

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
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mt_grpo.base.rows import IMAGE_COLUMNS

FIRST_ID = 2**32  # no vocabulary is as large
MOST_PICTURES = 999  # of one context: as many as vLLM reads unless it is told otherwise
ID_DIGITS = 12  # of the digest, so that an id fits into a tensor of 64 bits
PLACE = "\ufdd0\ufdd1"  # the place of the next image of a row, in a text that is not yet what the model reads
# The secret is what no tool can guess. Group 1 of what the pattern finds is an image's name; None: a part of a mark.
MARKS = types.SimpleNamespace(secret=secrets.token_hex(4), pattern=None)
TOWER = re.compile(r"\bvisual\.")  # in the names of modules that read images


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


def png_uri(image: Any, **options: Any) -> str:
    """A PIL image as a data URI."""
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def id_of_digest(digest: str) -> int:
    """The id of an image, by its digest or by its name."""
    return FIRST_ID + int(digest[:ID_DIGITS], 16)


def is_picture(token: int) -> bool:
    return token >= FIRST_ID


def has_pictures(ids: list[int]) -> bool:
    """Whether an image stands in ids. Each request asks it of its whole history, so it may call nothing per id."""
    return max(ids, default=0) >= FIRST_ID


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
    if not has_pictures(ids):
        return []
    return [picture_of(run[0]) for run in runs_of(ids) if is_picture(run[0])]


def has_too_many(ids: list[int]) -> bool:
    """Whether ids contain more than `MOST_PICTURES` images, which counts as a full context."""
    return len(ids) > MOST_PICTURES and len(pictures_in(ids)) > MOST_PICTURES


def with_placeholders(ids: list[int]) -> list[int]:
    """The ids as a model's forward pass reads them."""
    return [picture_of(token).placeholder if is_picture(token) else token for token in ids]


def held_by(tensors: Iterable[Any]) -> list[Picture]:
    """The images whose ids stand in tensors. Tensors do not hold them: whoever keeps the list does."""
    found = {token for tensor in tensors for token in tensor[tensor >= FIRST_ID].unique().tolist()}
    return [picture_of(token) for token in sorted(found)]


def share_marks(on_main_process: Callable) -> None:
    """Use the main process's secret, so that all ranks read each other's texts (rewards of groups). Collective."""
    secret = MARKS.secret = on_main_process(lambda: MARKS.secret)
    mark, part = f"{secret}([0-9a-f]{{{ID_DIGITS}}})\ufdd1", f"[0-9a-f]{{0,{len(secret) + ID_DIGITS}}}"
    MARKS.pattern = re.compile(f"\ufdd0(?:{mark}|{part})|\ufdd1")


share_marks(lambda own: own())


def with_marks_of(text: str, pictures: Iterable[Picture]) -> str:
    """Remove all marks from a text from outside, and parts of them, except those of these images."""
    names = {picture.name for picture in pictures}
    return MARKS.pattern.sub(lambda found: found[0] if found[1] in names else "", text)


def readable(text: str) -> str:
    """Convert a text for display: image marks become `<image DIGEST>`."""
    return MARKS.pattern.sub(lambda m: f"<image {m[1]}>" if m[1] else m[0], text.replace(PLACE, "<image>"))


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


def images_of(row: dict[str, Any]) -> list[Any]:
    """The images of a row's columns, in their order."""
    given = [row[key] for key in IMAGE_COLUMNS if row.get(key) not in (None, "")]
    return [each for value in given for each in (value if isinstance(value, list) else [value])]


def image_parts(messages: Any) -> list[dict[str, Any]]:
    """The parts of messages that are images or places for one."""
    contents = [message.get("content") for message in messages or [] if isinstance(message, dict)]
    return [part for content in contents if isinstance(content, list) for part in content if is_image_part(part)]


class SaidPictures:
    """The images of contents that `said_text` converts. Marks of `pictures`, to which it appends, stay in texts.

    `places`: a part may be the place of a row's image; `paths`: its image may be the path of a file.
    """

    def __init__(
        self, tokenizer: Any = None, pictures: list[Picture] | None = None, places: bool = False, paths: bool = False
    ):
        self.reader, self.why = reader_of(tokenizer), why_none(tokenizer)
        self.pictures = [] if pictures is None else pictures
        self.places, self.paths = places, paths
