"""Pictures in a conversation, and the ids that stand for them.

A chat template writes one placeholder for a picture, and a model reads as many of them as the picture has tokens. Here
each of these is an id of the picture's own, far beyond any vocabulary, which is made from a digest of its pixels. So a
prompt with another picture is another prompt wherever ids are compared, hashed, shared, sorted or sent to other ranks,
and no list of pictures has to travel beside the ids. Only what leaves the house has plain placeholders
(`with_placeholders`): requests, a model's forward pass, and text for people.
"""

from __future__ import annotations

import base64
import functools
import io
import threading
import weakref
from collections.abc import Iterable
from itertools import groupby
from typing import Any

FIRST_ID = 2**32  # no vocabulary is as large
MOST_PICTURES = 999  # of one context: as many as vLLM reads unless it is told otherwise
ID_DIGITS = 12  # of the digest, so that an id fits into a tensor of 64 bits


class Picture:
    """A picture as a model reads it. `Picture.of` makes one, once for each digest.

    Attributes:
        image: Of PIL, RGB.
        placeholder: The id that a model's forward pass reads for each of its tokens.
        grid: (height, width) in tokens.
        features: What the forward pass reads, as tensors of this picture alone: `pixel_values` (patches, numbers of a
            patch) and `image_grid_thw` (1, 3).
        digest: 64 hexadecimal digits (`digest_of_image`).
    """

    def __init__(self, image: Any, placeholder: int, grid: tuple[int, int], features: dict[str, Any], digest: str):
        self.image, self.placeholder, self.grid = image, placeholder, grid
        self.features, self.digest = features, digest

    @staticmethod
    def of(image: Any, placeholder: int, grid: tuple[int, int], features: dict[str, Any], digest: str) -> Picture:
        """The picture of a digest: the one that somebody holds, or a new one.

        INVARIANT: there is one for an id. The table forgets an id with its picture: of two equal ones the second would
        be lost with the first, also where it came from another rank, or where two tools read an image at a time.
        """
        with MAKES_ONE:
            known = KNOWN.get(id_of_digest(digest))
            if known is None:
                known = KNOWN[id_of_digest(digest)] = Picture(image, placeholder, grid, features, digest)
            return known

    @property
    def name(self) -> str:
        """How logs name it: the beginning of its digest."""
        return self.digest[:ID_DIGITS]

    @property
    def id(self) -> PictureId:
        """The id of each of its tokens in lists of ids. It holds the image; in tensors it is a plain number."""
        found = PictureId(id_of_digest(self.digest))
        found.picture = self
        return found

    @functools.cached_property
    def data_uri(self) -> str:
        """The picture for a request, without loss."""
        file = io.BytesIO()
        self.image.save(file, "PNG", compress_level=1)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    def __deepcopy__(self, memo: dict) -> Picture:
        return self  # nobody changes it

    def __reduce__(self) -> tuple:
        return Picture.of, (self.image, self.placeholder, self.grid, self.features, self.digest)


class PictureId(int):
    """An id that keeps its picture: as long as a list holds it, `picture_of` finds it, also by a plain number."""

    picture: Picture

    def __deepcopy__(self, memo: dict) -> PictureId:
        return self

    def __reduce__(self) -> tuple:
        return _id_of, (self.picture,)


# By id. INVARIANT: what a digest names never changes. It is of the reader, too, so that one table serves all models.
MAKES_ONE = threading.Lock()
KNOWN: weakref.WeakValueDictionary[int, Picture] = weakref.WeakValueDictionary()


def id_of_digest(digest: str) -> int:
    """The id of a picture, by its digest or by the beginning of it that a mark has."""
    return FIRST_ID + int(digest[:ID_DIGITS], 16)


def known_picture(digest: str) -> Picture | None:
    """The picture of a digest, if somebody holds it: an image is kept once, however many rows show it."""
    return KNOWN.get(id_of_digest(digest))


def _id_of(picture: Picture) -> PictureId:
    return picture.id


def is_picture(token: int) -> bool:
    return token >= FIRST_ID


def picture_of(token: int) -> Picture:
    """The picture of an id. Raises `KeyError` where nobody holds it any more."""
    return KNOWN[int(token)]


def runs_of(ids: Iterable[int], partial: bool = False) -> list[list[int]]:
    """Ids in runs: those of text that follow each other, or those of one picture.

    Args:
        ids: Of a record, or of a part of one.
        partial: Whether a part of a picture may stand at the end of its run.

    Raises:
        ValueError: a part of a picture's ids is missing. A picture stands in a record whole or not at all.
    """
    found: list[list[int]] = []
    for key, group in groupby(ids, lambda token: int(token) if is_picture(token) else None):
        run = list(group)
        size = len(run) if key is None else picture_of(key).num_tokens
        if size and len(run) % size and not partial:
            raise ValueError(f"An image of {size} tokens has {len(run)} tokens here: a part of it is missing.")
        found += [run[start : start + size] for start in range(0, len(run), size)]
    return found


def pictures_in(ids: list[int]) -> list[Picture]:
    """The pictures that stand in ids, in their order."""
    if not any(map(is_picture, ids)):
        return []
    return [picture_of(run[0]) for run in runs_of(ids) if is_picture(run[0])]


def has_too_many(ids: list[int]) -> bool:
    """Whether ids contain more than `MOST_PICTURES` images, which counts as a full context."""
    return len(ids) > MOST_PICTURES < sum(map(is_picture, ids)) and len(pictures_in(ids)) > MOST_PICTURES


def with_placeholders(ids: list[int]) -> list[int]:
    """The ids as a model's forward pass reads them."""
    return [picture_of(token).placeholder if is_picture(token) else token for token in ids]


def features_of(pictures: list[Picture]) -> dict[str, Any]:
    """The image inputs of a model's forward pass, for several images in order.

    `pixel_values` (patches of all, numbers of a patch) and `image_grid_thw` (pictures, 3).
    """
    import torch

    names = dict.fromkeys(name for picture in pictures for name in picture.features)
    return {name: torch.cat([picture.features[name] for picture in pictures]) for name in names}


def inputs_of_requests(prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
    """(ids with placeholders, what else `generate` reads) of prompts.

    Beside `features_of` that is `mm_token_type_ids`: a list for each prompt, 1 where a picture is. It is padded later,
    as the ids are.
    """
    if not (pictures := [picture for ids in prompts for picture in pictures_in(ids)]):
        return prompts, {}
    kinds = [[int(is_picture(token)) for token in ids] for ids in prompts]
    return [with_placeholders(ids) for ids in prompts], {**features_of(pictures), "mm_token_type_ids": kinds}


def inputs_of_rows(input_ids: Any) -> tuple[Any, dict[str, Any]]:
    """(ids with placeholders, what else a forward pass of these rows reads) for TRL's method.

    Beside `features_of` that is `num_images`, a number for each row, and `mm_token_type_ids` (M, L), 1 where a picture
    is.

    Args:
        input_ids: (M, L), padded.
    """
    import torch

    if not (shown := input_ids >= FIRST_ID).any():
        return input_ids, {}
    rows = [pictures_in(row) for row in input_ids.tolist()]
    ids = input_ids.clone()
    ids[shown] = torch.tensor(
        [picture_of(token).placeholder for token in input_ids[shown].tolist()], device=ids.device
    )
    features = {name: values.to(ids.device) for name, values in features_of(sum(rows, [])).items()}
    return ids, {**features, "num_images": [len(row) for row in rows], "mm_token_type_ids": shown.int()}


def held_by(tensors: Iterable[Any]) -> list[Picture]:
    """The pictures whose ids stand in tensors of ids: who keeps the list keeps them."""
    found = {int(token) for tensor in tensors for token in tensor[tensor >= FIRST_ID].unique().tolist()}
    return [picture_of(token) for token in sorted(found)]


def uri_or_str(value: Any) -> str:
    """JSON `default` for a row that is sent to a program: an image becomes a data URI, other values become text.

    A PIL image is rotated by its EXIF data first, so that the URI is read as the image is.
    """
    try:
        from PIL import Image, ImageOps

        if isinstance(value, Image.Image):
            file = io.BytesIO()
            ImageOps.exif_transpose(value).convert("RGB").save(file, "PNG")
            kind, content = "PNG", file.getvalue()
        else:
            kind, content = Image.open(io.BytesIO(value)).format, bytes(value)
    except Exception:  # no bytes, or those of no image; or Pillow is not installed
        return str(value)
    return f"data:{Image.MIME.get(kind, 'image')};base64,{base64.b64encode(content).decode()}"
