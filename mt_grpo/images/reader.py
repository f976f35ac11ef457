"""Which models read images, and the reader of one. Text-only models have none, and load no processor."""

from __future__ import annotations

from typing import Any

from mt_grpo.base.errors import error_line

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # `positions_of` supports their positions


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
