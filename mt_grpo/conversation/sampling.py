"""The sampling parameters that a request may contain, and its remaining token budget."""

from __future__ import annotations

import collections.abc
import difflib
import typing
from typing import Any

from mt_grpo.rollout import StopReason


def plain_content(content: Any, where: str) -> Any:
    """Join a message's list of text parts to one text. A list with an image stays (`read_row` reads it).

    Raises `ValueError` for other parts, such as videos.
    """
    if not isinstance(content, list):
        return content
    kinds = [part.get("type", "text") if isinstance(part, dict) else None for part in content]
    for part, kind in zip(content, kinds):
        if kind not in ("image", "image_url") and (kind != "text" or not isinstance(part.get("text"), str)):
            raise ValueError(f"{where}: a message has the part {part!r:.100}. Expected parts of text or images.")
    return "".join(part["text"] for part in content) if set(kinds) <= {"text"} else content


def content_of(message: dict[str, Any], where: str) -> Any:
    """A message's content, with text parts joined. As in OpenAI's API, null next to calls means an empty text.

    >>> content_of({"role": "assistant", "content": None, "tool_calls": [{}]}, "")
    ''
    """
    content = plain_content(message.get("content"), where)
    return "" if content is None and message.get("tool_calls") else content


def sampling_defaults() -> dict[str, Any]:
    """Neutral values of the sampling fields. A server reads fields that are not sent from generation_config.json."""
    return {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_params(args: Any) -> dict[str, Any]:
    """The sampling parameters of a recipe: TRL's settings, overridden by `generation_kwargs`."""
    params = {name: getattr(args, name) for name in sampling_defaults()}
    return {**params, "min_p": args.min_p or 0.0, **(args.generation_kwargs or {})}


SAMPLING_KEYS = {  # keys that a request may contain besides the prompt; a server silently ignores unknown keys
    *sampling_defaults(), "presence_penalty", "frequency_penalty", "min_tokens", "bad_words", "logit_bias",
    "allowed_token_ids", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed", "priority",
    "structured_outputs", "response_format", "thinking_token_budget", "spaces_between_special_tokens", "vllm_xargs",
    "cache_salt", "user",
}  # fmt: skip
CHAT_KEYS = {*SAMPLING_KEYS, "max_tokens", "max_completion_tokens", "chat_template_kwargs", "reasoning_effort"}


def check_sampling_params(sampling_params: dict[str, Any] | None, known: set[str] = SAMPLING_KEYS) -> None:
    """Raise `ValueError` for a key that the server would ignore, or that the conversation sets itself."""
    for key in (sampling_params or {}).keys() - known:
        if key in ("max_tokens", "max_completion_tokens"):
            raise ValueError(f"sampling_params: {key!r} is set per turn. Set max_turn_tokens of the environment.")
        if key == "stop":
            raise ValueError("sampling_params: 'stop' is set per turn by the tool format. Remove it.")
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(known))}."
        raise ValueError(f"sampling_params: unknown key {key!r}.{hint}")


def check_conversations(prompts: Any, name: str, texts: bool = True, images: bool = False) -> list:
    """Return conversations as a list. Raises `ValueError` unless each is a list of messages, or a string if `texts`.

    With `texts`, content that is a list of text parts becomes text, and other content raises `ValueError`, unless
    there is an image in it and `images` may stay.
    """
    expected = f"a list of conversations, each one a list of messages{' or a string' if texts else ''}"
    if isinstance(prompts, (str, dict)) or not isinstance(prompts, collections.abc.Iterable):
        raise ValueError(f"{name} is {prompts!r:.80}, expected {expected}. Put a single one into a list.")
    prompts = list(prompts)
    for k, prompt in enumerate(prompts):
        if isinstance(prompt, dict):
            raise ValueError(f"{name} is a single conversation, expected {expected}. Put it into a list.")
        messages = [] if texts and isinstance(prompt, str) else prompt
        if not isinstance(messages, (list, tuple)) or not all(
            isinstance(m, collections.abc.Mapping) and {"role", "content"} <= m.keys() for m in messages
        ):
            raise ValueError(f"{name} contains {prompt!r:.80}, expected {expected}, with role and content.")
        if texts and not all(isinstance(message["content"], str) for message in messages):
            prompts[k] = [{**message, "content": message_text(message, name, images)} for message in messages]
    return prompts


def message_text(message: dict[str, Any], name: str, images: bool = False) -> Any:
    """The content of a message as text. Raises `ValueError` if it is neither text nor text parts."""
    content = content_of(message, name)
    if not isinstance(content, (str, list) if images else str):
        raise ValueError(f"{name} has a message with the content {content!r:.80}, expected text.")
    return content


class Room(typing.NamedTuple):
    """The remaining token budget of a conversation."""

    completion: float  # remaining tokens of max_completion_length
    context: float  # remaining tokens of the model's context

    @property
    def tokens(self) -> float:
        """The smaller of the two remaining budgets, in tokens."""
        return min(self)

    @property
    def reason(self) -> StopReason:
        """The stop reason of a conversation that runs out of this budget."""
        return StopReason.CONTEXT_LENGTH if self.context < self.completion else StopReason.MAX_TOKENS
