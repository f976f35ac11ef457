"""Which models read images, and the way to what reads and computes them. Text-only models need no more than this."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.images.pictures import FIRST_ID, Picture, SaidPictures, image_parts, images_of, readable, with_marks_of
from mt_grpo.rollout import Message, Rollout, ToolResult

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # `positions_of` supports their positions


def image_reader(name: str, config: Any, tokenizer: Any, revision: str | None = None, own: Any = None) -> Any:
    """Create the `PictureReader` of a model, or return why there is none: the model is then text-only.

    `own` is a processor of images that is used in place of the model's.
    """
    if getattr(config, "image_token_id", None) is None or config is config.get_text_config():
        return "it is a text-only model"
    if config.model_type not in FAMILIES:
        return f"images are supported for models of type {', '.join(FAMILIES)}, got {config.model_type}"
    try:
        from mt_grpo.images.processor import PictureReader

        return PictureReader(name, config, tokenizer, revision, own)
    except ImportError:
        return "a package is missing. Run `pip install -e '.[vision]'`"
    except Exception as error:  # of its processor or chat template: a model of text may have no use for them
        return f"its processor of images cannot be used: {error_line(error)}"


def said_text(said: SaidPictures, content: Any, where: str) -> str:
    """Convert a content of a message to a text with marks. Raises `ValueError`, beginning with `where`."""
    if isinstance(content, str):
        return with_marks_of(content, said.pictures)
    from mt_grpo.images.messages import text_of_parts

    return text_of_parts(said, content, where)


def inputs_of_rows(input_ids: Any) -> tuple[Any, dict[str, Any]]:
    """(ids with placeholders, further inputs of a forward pass) of padded rows (M, L), for TRL's method."""
    if not (input_ids >= FIRST_ID).any():
        return input_ids, {}
    from mt_grpo.images.forward import features_of_rows

    return features_of_rows(input_ids)


def read_row(
    prompt: list[Message], row: dict[str, Any], tokenizer: Any, env: Any, where: str, way: str = "place_images"
) -> tuple[list[Message], list[Picture]]:
    """Read the images of a row's prompt. Returns (messages with text contents, images). Raises `ValueError`.

    Places stay if an environment's `reset` may change the prompt. A class of conversations may have functions of its
    own: `place_images` for a rollout, `mark_images` for what the model reads.
    """
    if hasattr(env, way):
        return getattr(env, way)(prompt, row, tokenizer, where)
    if not images_of(row) and not image_parts(prompt):
        return prompt, []
    from mt_grpo.images.messages import placed, with_places

    messages, shown = with_places(prompt, row, tokenizer, where)
    if env.environments is None:
        messages = placed(messages, shown[: len(images_of(row))], where)
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


def own_results(rollout: Rollout, results: list[ToolResult]) -> list[ToolResult]:
    """Add the images of results to their conversation, and remove marks of other images from their texts."""
    for result in results:
        rollout.pictures += [picture for picture in result.pictures if picture not in rollout.pictures]
    return [replace(each, text=with_marks_of(each.text, rollout.pictures)) for each in results]


def readable_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages for rewards, logs and display: those with an image are copied with `readable` contents."""
    return [{**m, "content": readable(m["content"])} if "\ufdd0" in (m.get("content") or "") else m for m in messages]
