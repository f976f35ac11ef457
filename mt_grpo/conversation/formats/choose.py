"""The list of tool formats, and the choice of one by its name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.hermes import HermesFormat
from mt_grpo.conversation.formats.native import NativeFormat
from mt_grpo.conversation.formats.xml import XmlFormat

# The choices of `tool_format`: a fork adds its own.
TOOL_FORMATS: dict[str, type[ChatFormat]] = {"xml": XmlFormat, "hermes": HermesFormat, "native": NativeFormat}


def make_format(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None = None,
    extra_ends: Iterable[int] = (),
) -> ChatFormat:
    """Create the tool format with this name for a tokenizer (see `ChatFormat`). Raises `ValueError` if it cannot."""
    if name not in TOOL_FORMATS:
        raise ValueError(f"tool_format={name!r}, expected one of {', '.join(TOOL_FORMATS)}.")
    return TOOL_FORMATS[name](tokenizer, chat_template_kwargs, extra_ends)
