"""An image whose digits are too small to read, and a tool that enlarges one of its corners.

`ENVIRONMENT` is an environment class as in TRL: `reset` gets the columns of a row, and the method `zoom` is the tool.
A row has the image in its column `image`, which the model reads with the question. Environment variables:

| variable | meaning | default |
|---|---|---|
| `ZOOM_SIDE` | side length in pixels of the returned image | 56 |
| `ZOOM_SHUFFLED` | 1: the tool shows one of the other three corners, as a control experiment | 0 |

Needs: Pillow (`pip install -e '.[vision]'`).

Protects against: an unknown corner (the model reads an error), a row without an image, a small or oblong one.
Does not protect against: files that a row names, which are opened as they are.

>>> page = Image.new("L", (56, 56), 9)
>>> page.putpixel((55, 0), 200)  # the corner has 2 x 2 pixels
>>> crop(page, "top right", 4).tobytes().hex(" ", 4)
'0909c8c8 0909c8c8 09090909 09090909'
"""

import base64
import io
import os
import random
import zlib
from typing import Any, Literal

from PIL import Image, ImageOps

Corner = Literal["top left", "top right", "bottom left", "bottom right"]
CORNERS = ("top left", "top right", "bottom left", "bottom right")
PARTS = 28  # a corner's side is the image's side divided by this


def crop(image: Image.Image, corner: str, side: int) -> Image.Image:
    """Crop a corner of an image and enlarge it to `side` pixels, without smoothing."""
    size, first = image.width // PARTS, image.width - image.width // PARTS
    left, top = first * corner.endswith("right"), first * corner.startswith("bottom")
    return image.crop((left, top, left + size, top + size)).resize((side, side), Image.Resampling.NEAREST)


def opened(image: Any) -> Image.Image:
    """Open the image of a row: a PIL image, bytes, a data URI, a path, or a dict with one of them, as in datasets."""
    if isinstance(image, dict):
        image = next((image[key] for key in ("bytes", "url", "path") if image.get(key) is not None), None)
    if isinstance(image, str) and image.startswith("data:"):
        image = base64.b64decode(image.partition(",")[2], validate=True)
    if isinstance(image, (bytes, str)):
        image = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image)
    if not isinstance(image, Image.Image):
        raise ValueError(f"the column 'image' is {image!r:.80}, expected a PIL image, bytes, a data URI or a path")
    if image.width != image.height or image.width < PARTS:
        raise ValueError(f"the image is {image.width} x {image.height}, expected a square of at least {PARTS}")
    return ImageOps.exif_transpose(image).convert("RGB")  # upright, as the model sees it


def another(corner: str, image: Image.Image) -> str:
    """Return another corner, always the same one for an image and one of its corners."""
    return random.Random(f"{zlib.crc32(image.tobytes())} {corner}").choice([c for c in CORNERS if c != corner])


class Zoom:
    """The environment of one conversation about an image."""

    def reset(self, image: Any = None, **row: Any) -> None:
        """Load the row's image. The prompt stays as it is."""
        self.image = opened(image)

    def zoom(self, corner: Corner) -> Image.Image:
        """Enlarge a corner of the picture.

        Args:
            corner: Which one.

        Returns:
            The corner as a picture.
        """
        if os.environ.get("ZOOM_SHUFFLED", "0") == "1":
            corner = another(corner, self.image)
        return crop(self.image, corner, int(os.environ.get("ZOOM_SIDE", "56")))


ENVIRONMENT = Zoom
