"""Pictures in messages: read from what a row or a tool gives, and written as ids by the tokenizer.

In a message a picture is a mark inside the text, at the place where the chat template would write its placeholder. So
a message stays text wherever it is joined, cut, compared, copied or logged. The tokenizer (`PictureTokens`) writes a
mark as the ids of its picture, and ids of a picture as its mark.
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
from mt_grpo.base.pictures import (
    ID_DIGITS,
    Picture,
    digest_of_image,
    id_of_digest,
    is_image,
    is_picture,
    known_picture,
    picture_of,
    runs_of,
)
from mt_grpo.base.rows import IMAGE_COLUMNS
from mt_grpo.conversation.formats.control_tokens import message_pattern
from mt_grpo.conversation.sampling import check_conversations

# Two characters that no text has (Unicode keeps them for inner use), and what no tool can guess between them.
SECRET = secrets.token_hex(4)
MARK = re.compile(f"\ufdd0{SECRET}([0-9a-f]{{{ID_DIGITS}}})\ufdd1")
PART_OF_A_MARK = re.compile(f"\ufdd0[0-9a-f]{{0,{len(SECRET) + ID_DIGITS}}}|\ufdd1")
PLACE = f"\ufdd0{SECRET}\ufdd1"  # of the next image of a row, in a text that the model does not read as it is
LARGEST_FILE = 20 * 2**20
MOST_PIXELS = 2**25
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # whose positions `positions_of` gives
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others start programs, as EPS does
TOWER = re.compile(r"\bvisual\.")  # in the names of their modules
FORBIDDEN = -1e4  # of a logit: its probability is 0 in half precision, too
OTHER_KINDS = ("video", "videos", "audio", "audios")  # columns of ms-swift that no model here reads


def secret_of_marks() -> str:
    """What no text from outside knows of this process's marks."""
    return SECRET


def share_marks(secret: str) -> None:
    """Have marks the secret of another rank: a text with marks may be read on all, as by a reward of groups."""
    global SECRET, MARK
    SECRET = secret
    MARK = re.compile(f"\ufdd0{SECRET}([0-9a-f]{{{ID_DIGITS}}})\ufdd1")


def mark_of(picture: Picture) -> str:
    """What stands for a picture in a text."""
    return f"\ufdd0{SECRET}{picture.name}\ufdd1"


def readable(text: str) -> str:
    """A text for people, in which a picture is named by its digest.

    >>> readable("no picture")
    'no picture'
    """
    return MARK.sub(lambda found: f"<image {found[1]}>", text.replace(PLACE, "<image>"))


def readable_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for people, rewards and logs: those with a picture are copies in which `readable` names it."""
    return [
        {**message, "content": readable(message["content"])}
        if isinstance(message.get("content"), str) and "\ufdd0" in message["content"]
        else message
        for message in messages
    ]


def pictures_of(text: str) -> list[Picture]:
    """The pictures of the marks in a text, in their order."""
    return [picture_of(id_of_digest(digits)) for digits in MARK.findall(text)]


def with_marks_of(text: str, pictures: Iterable[Picture]) -> str:
    """A text from outside: the marks of these pictures stay, and nothing else in it looks like a mark."""
    if "\ufdd0" not in text and "\ufdd1" not in text:
        return text
    names = {picture.name for picture in pictures}
    pieces = MARK.split(text)  # texts, and between them what names a picture
    kept = [f"\ufdd0{SECRET}{name}\ufdd1" if name in names else "" for name in pieces[1::2]]
    texts = [PART_OF_A_MARK.sub("", piece) for piece in pieces[::2]]
    return "".join(text + mark for text, mark in zip(texts, [*kept, ""]))


class PictureReader:
    """Reads pictures as a model's processor does.

    Args:
        processor: The model's image processor, which gives `pixel_values` and `image_grid_thw`, as Qwen's models have.
        tokenizer: Whose chat template says what stands around a picture.
        placeholder: The id that the model reads for each token of a picture.
        unsampled: Ids that stand for pictures, videos or sounds, which a policy must not write.
    """

    def __init__(self, processor: Any, tokenizer: PreTrainedTokenizerBase, placeholder: int, unsampled: list[int]):
        self.processor, self.placeholder, self.unsampled = processor, placeholder, unsampled
        self.settings = f"{placeholder} {processor.to_json_string()}"
        self.token = tokenizer.convert_ids_to_tokens(placeholder)
        self.written = written_around(tokenizer, self.token)

    @classmethod
    def of(
        cls, name: str, config: Any, tokenizer: PreTrainedTokenizerBase, revision: str | None = None
    ) -> PictureReader | str:  # fmt: skip
        """The reader of a model, or why there is none: then it is a model of text, and only a row with an image fails.

        Args:
            name: The model's path or name.
            config: Its configuration.
            tokenizer: Its tokenizer.
            revision: Of its repository on the Hub.
        """
        placeholder = getattr(config, "image_token_id", None)
        if placeholder is None or config is config.get_text_config():
            return "it reads text alone"
        if config.model_type not in FAMILIES:
            return f"images are read by models of the families {', '.join(FAMILIES)}, got {config.model_type}"
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
        """(what the model's forward pass reads of an RGB image, the width and height in which it sees it)."""
        found = self.processor(images=[image], return_tensors="pt")
        _, height, width = found["image_grid_thw"][0].tolist()
        return found, (width * self.processor.patch_size, height * self.processor.patch_size)

    def read(self, value: Any, where: str, paths: bool = False) -> Picture:
        """A picture, in the size in which the model sees it.

        INVARIANT: an image is resized once, here, by PIL. A server gets it in that size, and so does not resize it:
        processors on torchvision and on PIL resize to other pixels, and agree where they do not resize.

        Args:
            value: An image of PIL, bytes, a data URI, or a dict with one of them under `bytes` or `url`; with `paths`
                also a path, or a dict with one under `path`. A picture is given back.
            where: What the error begins with.
            paths: Whether a text may be the path of a file. Never of what a model or an agent says.

        Raises:
            ValueError: it is no image, it is too large, or the model's processor refuses it.
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
                raise ValueError(f"it is animated ({given.n_frames} pictures). Give one of them")
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
    resets = getattr(env, "environments", None) is not None
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
        parts = content if isinstance(content, list) else as_parts([content])
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
        part for message in row.get("prompt") or [] if isinstance(message["content"], list)
        for part in message["content"] if is_image_part(part) and own_image(part) is not None
    ]  # fmt: skip
    return sum(map(size_of, [*map(own_image, brought), *images_of(row)]))


def size_of(value: Any) -> int:
    """The pixels of what `PictureReader.read` takes; 0 where that raises."""
    try:
        image = opened(value, paths=True)
        return image.width * image.height
    except Exception:  # whatever a decoder raises: the check of the images says it
        return 0


def opened(value: Any, paths: bool) -> Any:
    """An image of PIL, of which no more than its header was read. Arguments and errors as in `PictureReader.read`."""
    from PIL import Image

    given = value
    if isinstance(given, dict):  # of datasets' Image, or of OpenAI's API
        given = next((given[key] for key in ("bytes", "url", "path") if given.get(key) is not None), None)
    if isinstance(given, str) and given.startswith("data:"):
        given = base64.b64decode(given.partition(",")[2], validate=True)
    elif isinstance(given, str) and re.match(r"\w+://", given):
        raise ValueError(f"addresses are not fetched, got {given!r:.80}. Download it, and write its path")
    elif isinstance(given, str) and paths:
        if Path(given).stat().st_size > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE >> 20} MiB. Make it smaller")
        given = Path(given).read_bytes()
    if isinstance(given, (bytes, bytearray)):
        if len(given) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE >> 20} MiB. Make it smaller")
        given = Image.open(io.BytesIO(given), formats=FORMATS)
    if not isinstance(given, Image.Image):
        raise ValueError(f"got {value!r:.80}, expected an image of PIL, bytes{' or a path' * paths}, or a data URI")
    return given


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


def written_around(tokenizer: PreTrainedTokenizerBase, token: str) -> str:
    """What the chat template writes for a picture, its placeholder included. Raises `ValueError` if it shows none."""
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
    """What a tokenizer becomes that writes pictures: a class before its own one (`with_pictures`)."""

    pictures: PictureReader

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As before; marks in a single text become the ids of their pictures.

        Raises:
            ValueError: a placeholder stands in the text by itself, where no picture belongs to it.
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
                    f"{self.pictures.token!r} stands in a text, where no picture belongs to it. Remove it."
                )
            ids += [token] if picture is None else [picture.id] * picture.num_tokens
            repeats.append(1 if picture is None else picture.num_tokens)
        for key, values in encoded.items():
            encoded[key] = [value for value, times in zip(values, repeats) for _ in range(times)]
        encoded["input_ids"] = ids
        return encoded

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """As before; the ids of a picture become its mark. A part of a picture is left out."""
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
        """As before, and the model's image processor beside it: a folder without it reads no images."""
        if self.pictures is not None:
            self.pictures.processor.save_pretrained(save_directory)
        return super().save_pretrained(save_directory, *args, **kwargs)

    def convert_ids_to_tokens(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        """As before; that of a picture is the placeholder."""
        if isinstance(ids, int):
            return super().convert_ids_to_tokens(
                self.pictures.placeholder if is_picture(ids) else ids, *args, **kwargs
            )
        return [self.convert_ids_to_tokens(int(each), *args, **kwargs) for each in ids]


def with_pictures(tokenizer: PreTrainedTokenizerBase, reader: PictureReader | str) -> PreTrainedTokenizerBase:
    """The tokenizer itself, which writes pictures from now on, or says why there is no reader of them."""
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
    """What reads pictures for a tokenizer's model; None: it reads text alone."""
    return getattr(tokenizer, "pictures", None)


def why_none(tokenizer: Any) -> str:
    """Why there is no reader."""
    return getattr(tokenizer, "no_pictures", "it reads text alone")


def freeze_tower(model: Any) -> None:
    """Leave what reads images, its projection to the language model included, as it is."""
    for name, parameter in model.named_parameters():
        if TOWER.search(name):
            parameter.requires_grad_(False)


def drawn_image(side: int) -> Any:
    """An image of PIL for checks, of which no two pixels are alike."""
    from PIL import Image

    gradient = Image.linear_gradient("L")
    return Image.merge("RGB", (gradient, gradient.rotate(90), gradient.rotate(45))).resize((side, side))


def drawn_ids(tokenizer: PreTrainedTokenizerBase, side: int = 64) -> list[int]:
    """The ids of a drawn image, and of what the chat template writes around it."""
    picture = reader_of(tokenizer).read(drawn_image(side), "a drawn image")
    return tokenizer(mark_of(picture), add_special_tokens=False)["input_ids"]


def forbid(reader: PictureReader | None, *models: Any) -> None:
    """Take what a policy must not write out of the distribution of models: of their sampling, logprobs and entropy.

    A sampled placeholder would be a picture that nobody gave. What forbids it is a bias of the head, which is neither
    trained nor saved.

    INVARIANT: what samples leaves the same ids out as what computes logprobs.
    """
    for model in filter(None, models if reader is not None else ()):
        heads = [module for module in model.get_output_embeddings().modules() if isinstance(module, torch.nn.Linear)]
        for head in heads:  # several where adapters wrap it; those of LoRA are as wide as its rank
            if "bias" in head._buffers or len(head.weight) <= max(reader.unsampled):
                continue  # a second trainer may get the same model
            bias = torch.zeros(len(head.weight), dtype=head.weight.dtype, device=head.weight.device)
            if head.bias is not None:
                raise ValueError(f"The head of {type(model).__name__} has a bias of its own. Expected none.")
            bias[reader.unsampled] = FORBIDDEN
            del head._parameters["bias"]
            head.register_buffer("bias", bias, persistent=False)


@contextmanager
def forbidding_nothing(model: Any) -> Iterator[None]:
    """Meanwhile a model's distribution is of the whole vocabulary, as that of a server's logprobs of a prompt is."""
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
