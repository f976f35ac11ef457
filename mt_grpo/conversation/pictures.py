"""Images in messages: read from a row or a tool's result, and written as ids by the tokenizer.

In a message an image is a mark inside the text, at the place where the chat template would write its placeholder. So
a message stays text wherever it is joined, truncated, compared, copied or logged. The tokenizer (`PictureTokens`)
converts a mark to the ids of its image, and these ids to the mark.
"""

from __future__ import annotations

import base64
import io
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import is_torchvision_available

from mt_grpo.base.errors import error_line
from mt_grpo.base.json_types import digest_of_image
from mt_grpo.conversation.formats.control_tokens import message_pattern
from mt_grpo.images.pictures import ID_DIGITS, Picture, id_of_digest, is_picture, known_picture, picture_of, runs_of

# Two characters that no text has (Unicode keeps them for inner use), and what no tool can guess between them.
SECRET = secrets.token_hex(4)
MARK = re.compile(f"\ufdd0{SECRET}([0-9a-f]{{{ID_DIGITS}}})\ufdd1")
PART_OF_A_MARK = re.compile(f"\ufdd0[0-9a-f]{{0,{len(SECRET) + ID_DIGITS}}}|\ufdd1")
PLACE = "\ufdd0\ufdd1"  # the place of the next image of a row, in a text that is not yet what the model reads
LARGEST_FILE = 20 * 2**20
MOST_PIXELS = 2**25
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # `positions_of` supports their positions
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others start programs, as EPS does
TOWER = re.compile(r"\bvisual\.")  # in the names of their modules
FORBIDDEN = -1e4  # a logit whose probability is 0 in half precision, too


def secret_of_marks() -> str:
    """The secret in this process's marks, which no text from outside can guess."""
    return SECRET


def share_marks(secret: str) -> None:
    """Use the secret of another rank in marks, so that all ranks can read texts with marks (rewards of groups)."""
    global SECRET, MARK
    SECRET = secret
    MARK = re.compile(f"\ufdd0{SECRET}([0-9a-f]{{{ID_DIGITS}}})\ufdd1")


def mark_of(picture: Picture) -> str:
    """The mark that stands for an image in a text."""
    return f"\ufdd0{SECRET}{picture.name}\ufdd1"


def marks_replaced(text: str, by: str = "") -> str:
    """Replace each image mark in a text."""
    return MARK.sub(lambda _: by, text)


def readable(text: str) -> str:
    """Convert a text for display: image marks become `<image DIGEST>`.

    >>> readable("no picture")
    'no picture'
    """
    return MARK.sub(lambda found: f"<image {found[1]}>", text.replace(PLACE, "<image>"))


def readable_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages for rewards, logs and display: those with an image are copied with `readable` contents."""
    return [
        {**message, "content": readable(message["content"])}
        if isinstance(message.get("content"), str) and "\ufdd0" in message["content"]
        else message
        for message in messages
    ]


def pictures_of(text: str) -> list[Picture]:
    """The images of the marks in a text, in their order."""
    return [picture_of(id_of_digest(digits)) for digits in MARK.findall(text)]


def with_marks_of(text: str, pictures: Iterable[Picture]) -> str:
    """Remove all marks from a text from outside, except those of these images."""
    if "\ufdd0" not in text and "\ufdd1" not in text:
        return text
    names = {picture.name for picture in pictures}
    pieces = MARK.split(text)  # texts, and between them what names a picture
    kept = [f"\ufdd0{SECRET}{name}\ufdd1" if name in names else "" for name in pieces[1::2]]
    texts = [PART_OF_A_MARK.sub("", piece) for piece in pieces[::2]]
    return "".join(text + mark for text, mark in zip(texts, [*kept, ""]))


class PictureReader:
    """Reads images as a model's processor does.

    Args:
        processor: The model's image processor, which returns `pixel_values` and `image_grid_thw`, like Qwen's.
        tokenizer: The tokenizer, whose chat template defines what is written around an image.
        placeholder: The id that the model reads for each token of an image.
        unsampled: Ids that stand for images, videos or sounds, which a policy must not write.
    """

    def __init__(self, processor: Any, tokenizer: PreTrainedTokenizerBase, placeholder: int, unsampled: list[int]):
        self.processor, self.placeholder, self.unsampled = processor, placeholder, unsampled
        self.settings = f"{placeholder} {processor.to_json_string()}"
        self.token = tokenizer.convert_ids_to_tokens(placeholder)
        self.written = written_around(tokenizer, self.token)

    @classmethod
    def of(
        cls, name: str, config: Any, tokenizer: PreTrainedTokenizerBase, revision: str | None = None
    ) -> PictureReader | str:
        """Create the reader of a model, or return why there is none. The model is then text-only.

        Args:
            name: The model's path or name.
            config: The model's configuration.
            tokenizer: The model's tokenizer.
            revision: The revision of its repository on the Hub.
        """
        placeholder = getattr(config, "image_token_id", None)
        if placeholder is None or config is config.get_text_config():
            return "it is a text-only model"
        if config.model_type not in FAMILIES:
            return f"images are supported for models of type {', '.join(FAMILIES)}, got {config.model_type}"
        # Not from the top of transformers, which asks for torchvision whatever the backend.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        try:
            backend = "torchvision" if is_torchvision_available() else "pil"  # they differ where they resize
            processor = AutoImageProcessor.from_pretrained(name, backend=backend, revision=revision or "main")
        except ImportError:
            return "a package is missing. Run `pip install -e '.[vision]'`"
        except Exception as error:  # of a file that is none, too: a model of text may have no use for it
            return f"the image processor of {name!r} cannot be loaded: {error_line(error)}"
        names = ("image_token_id", "video_token_id", "audio_token_id")
        ids = [getattr(config, each, None) for each in names]
        try:
            return cls(processor, tokenizer, placeholder, [each for each in ids if each is not None])
        except ValueError as error:  # of the chat template
            return str(error).removesuffix(".")

    def process(self, image: Any) -> tuple[dict[str, Any], tuple[int, int]]:
        """Process an RGB image. Returns (inputs of the model's forward pass, (width, height) that the model sees)."""
        found = self.processor(images=[image], return_tensors="pt")
        _, height, width = found["image_grid_thw"][0].tolist()
        return found, (width * self.processor.patch_size, height * self.processor.patch_size)

    def read(self, value: Any, where: str, paths: bool = False) -> Picture:
        """Read an image, in the size in which the model sees it.

        INVARIANT: an image is resized once, here, by PIL. A server gets it in that size, and so does not resize it:
        processors on torchvision and on PIL resize to other pixels, and agree where they do not resize.

        Args:
            value: A PIL image, bytes, a data URI, or a dict with one of them under `bytes` or `url`; with `paths`
                also a path, or a dict with one under `path`. A `Picture` is returned unchanged.
            where: The beginning of the error message.
            paths: Whether a text may be the path of a file. Must be false for texts of a model or an agent.

        Raises:
            ValueError: It is not an image, it is too large, or the model's processor rejects it.
        """
        from PIL import Image, ImageOps

        if isinstance(value, Picture):
            return value
        try:
            given = opened(value, paths)
            if given.width * given.height > MOST_PIXELS:
                raise ValueError(
                    f"it has {given.width} x {given.height} pixels, expected at most {MOST_PIXELS}. Make it smaller"
                )
            if getattr(given, "n_frames", 1) > 1 and given.format != "MPO":  # a photograph, and a smaller one of it
                raise ValueError(f"it is animated ({given.n_frames} frames). Use one of its frames")
            image = ImageOps.exif_transpose(given).convert("RGB")  # as transformers and datasets turn it
            digest = digest_of_image(image, self.settings)
            if (known := known_picture(digest)) is not None:
                return known
            if min(image.size) < 5:  # a processor would take 3 rows, or 1, for colours
                image = image.resize((8 * image.width, 8 * image.height), Image.Resampling.NEAREST)
            whole = image
            found, size = self.process(image)
            while size != image.size:  # once, but for very long ones, which a processor makes shorter each time
                image = whole.resize(size, self.processor.resample)
                found, size = self.process(image)
            (time, height, width), merge = found["image_grid_thw"][0].tolist(), self.processor.merge_size
        except Exception as error:  # whatever a decoder or a processor raises
            said = str(error) if type(error) is ValueError else error_line(error)
            raise ValueError(f"{where}: the image cannot be read: {said.removesuffix('.')}.") from error
        return Picture.of(image, self.placeholder, (time * height // merge, width // merge), dict(found), digest)


def opened(value: Any, paths: bool) -> Any:
    """Open an image with PIL, which reads only its header. Takes and raises the same as `PictureReader.read`."""
    from PIL import Image

    given = value
    if isinstance(given, dict):  # of datasets' Image, or of OpenAI's API
        given = next((given[key] for key in ("bytes", "url", "path") if given.get(key) is not None), None)
    if isinstance(given, str) and given.startswith("data:"):
        given = base64.b64decode(given.partition(",")[2], validate=True)
    elif isinstance(given, str) and re.match(r"\w+://", given):
        raise ValueError(f"URLs are not fetched, got {given!r:.80}. Download the image, and write its path")
    elif isinstance(given, str) and paths:
        if Path(given).stat().st_size > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE >> 20} MiB. Make it smaller")
        given = Image.open(given, formats=FORMATS)
    if isinstance(given, (bytes, bytearray)):
        if len(given) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE >> 20} MiB. Make it smaller")
        given = Image.open(io.BytesIO(given), formats=FORMATS)
    if not isinstance(given, Image.Image):
        raise ValueError(f"got {value!r:.80}, expected a PIL image, bytes{', a path' * paths} or a data URI")
    return given


def written_around(tokenizer: PreTrainedTokenizerBase, token: str) -> str:
    """The text that the chat template writes for an image, placeholder included. Raises `ValueError` without one."""
    text = secrets.token_hex(8)

    def before(*parts: dict[str, str]) -> str:
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        return tokenizer.apply_chat_template(messages, tokenize=False).partition(text)[0]

    try:
        without, found = before(), before({"type": "image"})
    except Exception as error:  # whatever a template raises
        raise ValueError(f"The chat template cannot render a message with an image: {error_line(error)}.") from error
    written = found.removeprefix(without)
    if not found.startswith(without) or written.count(token) != 1:
        raise ValueError(f"The chat template writes {written!r} for an image, expected one {token!r} in it.")
    return written


class PictureTokens:
    """Mixin for a tokenizer that converts between image marks and ids. `with_pictures` adds it to the class."""

    pictures: PictureReader

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Tokenise as the tokenizer does; marks in a single text become the ids of their images.

        Raises:
            ValueError: The text contains an image placeholder without an image.
        """
        if not isinstance(text, str):
            return super().__call__(text, *args, **kwargs)
        shown = pictures_of(text)
        if not shown:
            return super().__call__(PART_OF_A_MARK.sub("", text), *args, **kwargs)
        whole = PART_OF_A_MARK.sub("", MARK.sub(lambda _: self.pictures.written, text))
        encoded = super().__call__(whole, *args, **kwargs)
        ids, repeats, following = [], [], iter(shown)
        for token in encoded["input_ids"]:
            picture = next(following, None) if token == self.pictures.placeholder else None
            if picture is None and token == self.pictures.placeholder:
                raise ValueError(
                    f"A text contains the image placeholder {self.pictures.token!r} without an image. Remove it."
                )
            ids += [token] if picture is None else [picture.id] * picture.num_tokens
            repeats.append(1 if picture is None else picture.num_tokens)
        for key, values in encoded.items():
            encoded[key] = [value for value, times in zip(values, repeats) for _ in range(times)]
        encoded["input_ids"] = ids
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
        text = ""
        for run in runs_of(ids, partial=True):
            picture = picture_of(run[0]) if is_picture(run[0]) else None
            if picture is None:
                text += super().decode(run, *args, **kwargs)
            elif len(run) == picture.num_tokens:
                text += mark_of(picture)
            else:  # what opens it would be read as a token of the template
                text = text.removesuffix(opening)
        return re.sub(f"(?:{re.escape(opening)})?({MARK.pattern})(?:{re.escape(closing)})?", r"\1", text)

    def batch_decode(self, sequences: Any, *args: Any, **kwargs: Any) -> list[str]:
        return [self.decode(each, *args, **kwargs) for each in sequences]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the tokenizer and the model's image processor, without which the folder could not read images."""
        if self.pictures is not None:
            self.pictures.processor.save_pretrained(save_directory)
        return super().save_pretrained(save_directory, *args, **kwargs)

    def convert_ids_to_tokens(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert ids to tokens as the tokenizer does; the ids of an image become the placeholder."""
        if isinstance(ids, int):
            return super().convert_ids_to_tokens(
                self.pictures.placeholder if is_picture(ids) else ids, *args, **kwargs
            )
        return [self.convert_ids_to_tokens(int(each), *args, **kwargs) for each in ids]


def with_pictures(tokenizer: PreTrainedTokenizerBase, reader: PictureReader | str) -> PreTrainedTokenizerBase:
    """Make a tokenizer write images with this reader, or record why there is none. Returns the tokenizer itself."""
    if isinstance(reader, str):
        tokenizer.no_pictures = reader
        if isinstance(tokenizer, PictureTokens):  # of an earlier run
            tokenizer.pictures = None
        return tokenizer
    if not isinstance(tokenizer, PictureTokens):
        cls = type(tokenizer)
        tokenizer.__class__ = type(cls.__name__, (PictureTokens, cls), {})
    tokenizer.pictures = reader
    message_pattern.cache_clear()  # what a message may not hold is more now
    return tokenizer


def reader_of(tokenizer: Any) -> PictureReader | None:
    """The image reader of a tokenizer's model, None if the model is text-only."""
    return getattr(tokenizer, "pictures", None)


def why_none(tokenizer: Any) -> str:
    """Why a tokenizer's model has no image reader, for error messages."""
    return getattr(tokenizer, "no_pictures", "it is a text-only model")


def freeze_tower(model: Any) -> None:
    """Exclude the vision tower, its projection to the language model included, from training."""
    for name, parameter in model.named_parameters():
        if TOWER.search(name):
            parameter.requires_grad_(False)


def drawn_image(side: int) -> Any:
    """A PIL image for checks, whose pixels all differ."""
    from PIL import Image

    gradient = Image.linear_gradient("L")
    return Image.merge("RGB", (gradient, gradient.rotate(90), gradient.rotate(45))).resize((side, side))


def drawn_ids(tokenizer: PreTrainedTokenizerBase, side: int = 64) -> list[int]:
    """The ids of a generated image, with those that the chat template writes around it."""
    picture = reader_of(tokenizer).read(drawn_image(side), "a drawn image")
    return tokenizer(mark_of(picture), add_special_tokens=False)["input_ids"]


def forbid(reader: PictureReader | None, *models: Any) -> None:
    """Exclude ids that a policy must not write from the distribution of models: sampling, logprobs and entropy.

    A sampled placeholder would stand for an image that does not exist. A bias of the head, which is neither trained
    nor saved, excludes it.

    INVARIANT: sampling excludes the same ids as the computation of logprobs.
    """
    for model in filter(None, models if reader is not None else ()):
        heads = [module for module in model.get_output_embeddings().modules() if isinstance(module, torch.nn.Linear)]
        for head in heads:  # several where adapters wrap it; those of LoRA are as wide as its rank
            if "bias" in head._buffers or len(head.weight) <= max(reader.unsampled):
                continue  # a second trainer may get the same model
            bias = torch.zeros(len(head.weight), dtype=head.weight.dtype, device=head.weight.device)
            if head.bias is not None:
                raise ValueError(f"The head of {type(model).__name__} has a bias, which is not supported with images.")
            bias[reader.unsampled] = FORBIDDEN
            del head._parameters["bias"]
            head.register_buffer("bias", bias, persistent=False)


@contextmanager
def forbidding_nothing(model: Any) -> Iterator[None]:
    """Context manager without the bias of `forbid`: a server's logprobs of a prompt cover the whole vocabulary."""
    heads = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    biases = [head._buffers["bias"] for head in heads if head._buffers.get("bias") is not None]
    kept = [bias.clone() for bias in biases]
    try:
        for bias in biases:
            bias.zero_()
        yield
    finally:
        for bias, before in zip(biases, kept):
            bias.copy_(before)
