"""What reads images for a model: its image processor, and its tokenizer with marks. Text-only runs do not load it."""

from __future__ import annotations

import base64
import io
import re
import secrets
from typing import Any

from PIL import Image

# Not from the top of transformers, which asks for torchvision whatever the backend.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import is_torchvision_available

from mt_grpo.base.errors import error_line
from mt_grpo.base.rows import digest_of_image
from mt_grpo.images.messages import as_rgb, mark_of, marks_replaced, pictures_of
from mt_grpo.images.pictures import KNOWN, Picture, id_of_digest, is_picture, picture_of, runs_of, with_placeholders

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others start programs, as EPS does


class PictureReader:
    """Reads images as a model's processor does, which returns `pixel_values` and `image_grid_thw`, like Qwen's.

    `unsampled` are the ids for images, videos and sounds, which a policy must not write.
    """

    def __init__(self, name: str, config: Any, tokenizer: Any, revision: str | None = None, own: Any = None):
        backend = "torchvision" if is_torchvision_available() else "pil"  # they differ where they resize
        self.processor = own or AutoImageProcessor.from_pretrained(name, backend=backend, revision=revision or "main")
        self.placeholder = config.image_token_id
        ids = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
        self.unsampled = [token for token in ids if token is not None]
        self.settings = f"{self.placeholder} {self.processor.to_json_string()}"
        self.token = tokenizer.convert_ids_to_tokens(self.placeholder)
        self.written = written_around(tokenizer, self.token)

    def join(self, tokenizer: Any) -> Any:
        """Make a tokenizer write images with this reader. Returns the tokenizer itself."""
        if not isinstance(tokenizer, PictureTokens):
            cls = type(tokenizer)
            tokenizer.__class__ = type(cls.__name__, (PictureTokens, cls), {})
        tokenizer.pictures = self
        return tokenizer

    def read(self, value: Any, where: str, paths: bool = False) -> Picture:
        """Read a PIL image, bytes, a data URI, or a dict with one. Raises `ValueError`, beginning with `where`.

        With `paths` a text may be the path of a file, which must not be for texts of a model or an agent.

        INVARIANT: an image is resized once, here, by PIL. A server gets it in that size, and so does not resize it:
        processors on torchvision and on PIL resize to other pixels, and agree where they do not resize.
        """
        if isinstance(value, Picture):
            return value
        try:
            given = opened(value, paths)
            if getattr(given, "n_frames", 1) > 1 and given.format != "MPO":  # a photograph, and a smaller one of it
                raise ValueError(f"it is animated ({given.n_frames} frames). Use one of its frames")
            image = as_rgb(given)
            digest = digest_of_image(image, self.settings)
            if (known := KNOWN.get(id_of_digest(digest))) is not None:
                return known
            if min(image.size) < 5:  # a processor would take 3 rows, or 1, for colours
                image = image.resize((8 * image.width, 8 * image.height), Image.Resampling.NEAREST)
            whole, size, sizes = image, None, set()
            while size != image.size:  # once, except for very long ones, which a processor makes shorter each time
                if size in sizes:
                    raise ValueError("the processor's smallest and largest number of pixels are too close")
                sizes.add(size)
                image = image if size is None else whole.resize(size, self.processor.resample)
                found = self.processor(images=[image], return_tensors="pt")
                _, height, width = found["image_grid_thw"][0].tolist()
                size = width * self.processor.patch_size, height * self.processor.patch_size
        except Exception as error:  # whatever a decoder or a processor raises
            said = str(error) if type(error) is ValueError else error_line(error)
            raise ValueError(f"{where}: the image cannot be read: {said.removesuffix('.')}.") from error
        side = self.processor.patch_size * self.processor.merge_size  # pixels of a token's
        return Picture.of(image, self.placeholder, (size[1] // side, size[0] // side), dict(found), digest)

    def num_pixels(self, value: Any) -> int:
        """The number of pixels of an image that `read` takes, 0 if it is invalid. Only its header is read."""
        try:
            image = opened(value, paths=True)
            return image.width * image.height
        except Exception:  # whatever a decoder raises: the check of the images says it
            return 0


def opened(value: Any, paths: bool) -> Any:
    """Open an image with PIL, which reads only its header. Takes and raises the same as `PictureReader.read`."""
    given = value
    if isinstance(given, dict):  # of datasets' Image, or of OpenAI's API
        given = next((given[key] for key in ("bytes", "url", "path") if given.get(key) is not None), None)
    if isinstance(given, str) and given.startswith("data:"):
        given = base64.b64decode(given.partition(",")[2], validate=True)
    elif isinstance(given, str) and re.match(r"\w+://", given):
        raise ValueError(f"URLs are not fetched, got {given!r:.80}. Download the image, and write its path")
    if isinstance(given, (bytes, bytearray)):
        given = Image.open(io.BytesIO(given), formats=FORMATS)
    elif isinstance(given, str) and paths:
        given = Image.open(given, formats=FORMATS)
    if not isinstance(given, Image.Image):
        raise ValueError(f"got {value!r:.80}, expected a PIL image, bytes{', a path' * paths} or a data URI")
    return given


def written_around(tokenizer: Any, token: str) -> str:
    """The text that the chat template writes for an image, placeholder included. Raises `ValueError` without one."""
    text = secrets.token_hex(8)

    def before(*parts: dict[str, str]) -> str:
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        return tokenizer.apply_chat_template(messages, tokenize=False).partition(text)[0]

    without, found = before(), before({"type": "image"})
    written = found.removeprefix(without)
    if not found.startswith(without) or written.count(token) != 1:
        raise ValueError(f"The chat template writes {written!r} for an image, expected one {token!r} in it.")
    return written


class PictureTokens:
    """Mixin for a tokenizer's class that converts between image marks and ids."""

    pictures: PictureReader | None

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Tokenise as the tokenizer does; marks in a single text become the ids of their images."""
        if not isinstance(text, str) or self.pictures is None:
            return super().__call__(text, *args, **kwargs)
        encoded = super().__call__(marks_replaced(text, self.pictures.written), *args, **kwargs)
        shown, placeholder = pictures_of(text), self.pictures.placeholder
        if encoded["input_ids"].count(placeholder) > len(shown):
            token = self.pictures.token
            raise ValueError(f"A text contains the image placeholder {token!r} without an image. Remove it.")
        if not shown:
            return encoded
        runs = [shown.pop(0).ids if token == placeholder else [token] for token in encoded["input_ids"]]
        for key, values in encoded.items():
            encoded[key] = [value for value, run in zip(values, runs) for _ in run]
        encoded["input_ids"] = [token for run in runs for token in run]
        return encoded

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Decode as the tokenizer does; the ids of an image become its mark, and parts of an image are left out."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        if ids and not isinstance(ids[0], int):
            return [self.decode(each, *args, **kwargs) for each in ids]
        if not any(map(is_picture, ids)):
            return super().decode(ids, *args, **kwargs)
        opening, _, closing = self.pictures.written.partition(self.pictures.token)
        text, after_image = "", False
        for run in runs_of(ids, partial=True):
            if is_picture(run[0]):  # what opens a part of one would be read as a token of the template
                whole = len(run) == picture_of(run[0]).num_tokens
                text = text.removesuffix(opening) + (mark_of(picture_of(run[0])) if whole else "")
            else:
                said = super().decode(run, *args, **kwargs)
                text += said.removeprefix(closing) if after_image else said
            after_image = is_picture(run[0])
        return text

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the tokenizer and the model's image processor, without which the folder could not read images."""
        if self.pictures is not None:
            self.pictures.processor.save_pretrained(save_directory)
        return super().save_pretrained(save_directory, *args, **kwargs)

    def convert_ids_to_tokens(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert ids to tokens as the tokenizer does; the ids of an image become the placeholder."""
        known = with_placeholders([ids])[0] if isinstance(ids, int) else with_placeholders(ids)
        return super().convert_ids_to_tokens(known, *args, **kwargs)

    def drawn_ids(self, side: int = 64) -> list[int]:
        """The ids of an image for checks, whose pixels differ, with those that the chat template writes around it."""
        gradient = Image.linear_gradient("L")
        image = Image.merge("RGB", (gradient, gradient.rotate(90), gradient.rotate(45))).resize((side, side))
        picture = self.pictures.read(image, "a drawn image")  # held until its ids are
        return self(mark_of(picture), add_special_tokens=False)["input_ids"]
