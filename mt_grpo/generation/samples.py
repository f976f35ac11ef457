"""Requests for samples, and validation of their answers.

vLLM samples after ids at `/v1/completions`. After ids with images it does so at another address, which also reports
what it read. There an image has one placeholder, which vLLM replaces with as many as the image has tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from mt_grpo.images.pictures import is_picture, pictures_in, runs_of, with_placeholders
from mt_grpo.rollout import Generation, hash_of_ids

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"  # vLLM 0.30 and later have it if they were started with --enable-scale-out
FORBIDDEN_BIAS = -100.0  # of a logit, the lowest that vLLM accepts: e^-100 vanishes in float32 next to 1
# What belongs to a request, and not to its sampling parameters. vLLM silently ignores a sampling parameter that it
# does not know, so the others are listed, too.
OF_REQUEST = ("model", "cache_salt", "priority", "return_token_ids")
OF_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "max_tokens", "bad_words", "logit_bias", "allowed_token_ids", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "seed", "structured_outputs", "thinking_token_budget",
    "skip_special_tokens", "spaces_between_special_tokens", "n", "logprobs", "prompt_logprobs",
)  # fmt: skip


class BadAnswer(ValueError):
    """An answer that is not a valid sample: invalid ids, ids and logprobs that do not match, a logprob of NaN."""


class HalfLoaded(BadAnswer):
    """A sample of weights that are only partly loaded. The next answer may be valid."""


def is_logprob(value: Any) -> bool:
    """Whether a server's value can be the logprob of a sampled token: a finite number, at most 0 up to rounding.

    >>> [is_logprob(value) for value in (-0.5, 0, float("nan"), float("-inf"), 1.0, None)]
    [True, True, False, False, False, False]
    """
    return isinstance(value, (int, float)) and -1e9 < value < 1e-3


def not_an_id(value: Any, vocab_size: int | None) -> bool:
    """Whether a server's value cannot be a token id: no integer, or not in the vocabulary of the model.

    >>> [not_an_id(value, 400) for value in (0, 399, 400, -1, True, 1.0, "1")]
    [False, False, True, True, True, True, True]
    """
    return type(value) is not int or not 0 <= value < (2**31 if vocab_size is None else vocab_size)


def read_completion(
    answer: dict[str, Any], num_prompt_tokens: int, max_tokens: int, vocab_size: int | None = None
) -> Generation:
    """Read the sample in an answer of `/v1/completions`. Raises `BadAnswer` for one that cannot be trained on.

    Args:
        answer: The server's answer.
        num_prompt_tokens: The number of prompt tokens that were sent.
        max_tokens: The limit that was requested.
        vocab_size: The rows of the model's embedding. None: any id that fits 31 bits.
    """
    try:
        choice = answer["choices"][0]
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        seen, finish_reason = answer["usage"]["prompt_tokens"], choice["finish_reason"]
        counts = len(token_ids), len(logprobs)
    except (KeyError, IndexError, TypeError):
        raise BadAnswer(f"no token ids: {str(answer)[:500]}") from None
    if type(token_ids) is not list or type(logprobs) is not list:
        raise BadAnswer(f"token_ids and logprobs are {type(token_ids)} and {type(logprobs)}, expected lists")
    if wrong := [value for value in token_ids if not_an_id(value, vocab_size)]:
        among = "" if vocab_size is None else f", expected integers from 0 to {vocab_size - 1}"
        raise BadAnswer(f"{len(wrong)} of {counts[0]} token ids are invalid: {str(wrong[:5])[:100]}{among}")
    if not 0 < counts[0] == counts[1] or not all(map(is_logprob, logprobs)):
        raise BadAnswer(f"{counts[0]} ids do not match {counts[1]} logprobs {logprobs[:5]}...")
    if seen != num_prompt_tokens:
        raise BadAnswer(f"the server read {seen} prompt tokens, expected {num_prompt_tokens}: the prompt was changed")
    if counts[0] > max_tokens or finish_reason not in ("stop", "length"):  # `abort`: a pause or a shutdown
        raise BadAnswer(f"got {counts[0]} ids, expected at most {max_tokens}, with finish_reason={finish_reason!r}")
    read = choice.get("prompt_token_ids")
    try:
        saw = None if read is None else hash_of_ids(read)
    except (TypeError, OverflowError, ValueError):
        raise BadAnswer(f"prompt_token_ids are not token ids: {str(read)[:100]}") from None
    return Generation(token_ids, logprobs, finish_reason, saw)


class Question(NamedTuple):
    """A request, and a function that reads its answer. `read` raises `BadAnswer` for an invalid answer."""

    path: str
    body: dict[str, Any]
    read: Callable[[dict[str, Any]], Any]
    headers: dict[str, str] = {}


def ask_for_sample(payload: dict[str, Any], vocab_size: int | None, unsampled: list[int] = ()) -> Question:
    """Build the request to `/v1/completions`, or to `GENERATE` with images. Its answer is read as a `Generation`.

    Args:
        payload: The body for `/v1/completions`; its `prompt` may have image ids.
        vocab_size: The rows of the model's embedding. None: any id that fits 31 bits.
        unsampled: Ids that no policy may write. INVARIANT: every request of a model that reads images forbids them, as
            `forbid` does when logprobs are computed.

    Raises:
        ValueError: A sampling parameter is not supported with images.
    """
    prompt, limit = payload["prompt"], payload["max_tokens"]
    if unsampled:
        payload = {**payload, "logit_bias": forbidding(payload, unsampled)}
    if not any(map(is_picture, prompt)):
        return Question(COMPLETIONS, payload, lambda answer: read_completion(answer, len(prompt), limit, vocab_size))
    return Question(GENERATE, generate_body(payload), lambda answer: read_generated(answer, prompt, limit, vocab_size))


def forbidding(payload: dict[str, Any], unsampled: list[int]) -> dict[int, float]:
    """The `logit_bias` of a request, with these ids forbidden.

    >>> forbidding({"logit_bias": {"7": 1.0, "8": 2.0}}, [8])
    {7: 1.0, 8: -100.0}
    """
    own = {int(token): bias for token, bias in (payload.get("logit_bias") or {}).items()}
    return own | dict.fromkeys(unsampled, FORBIDDEN_BIAS)


def ask_for_prompt(payload: dict[str, Any]) -> Question:
    """Build the request for a prompt's logprobs. Its answer is read as one logprob per id of `prompt[1:]`."""
    prompt = payload["prompt"]
    shown = any(map(is_picture, prompt))

    def read(answer: dict[str, Any]) -> list[float]:
        if shown:
            check_what_it_read(answer, prompt)
        entries = (answer if shown else answer["choices"][0])["prompt_logprobs"]
        ids = with_placeholders(prompt)
        return [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)]

    payload = {**payload, "prompt_logprobs": 0}
    if not shown:
        return Question(COMPLETIONS, payload, read)
    return Question(GENERATE, generate_body({**payload, "return_token_ids": True}), read)


def generate_body(payload: dict[str, Any]) -> dict[str, Any]:
    """The body of `GENERATE` for a payload of `/v1/completions` whose prompt has images."""
    prompt = payload["prompt"]
    if unknown := sorted(payload.keys() - {*OF_REQUEST, *OF_SAMPLING, "prompt"}):
        raise ValueError(
            f"generation_kwargs: a vLLM server does not support {unknown[0]!r} for a prompt with images. Remove it."
        )
    sampling = {key: payload[key] for key in OF_SAMPLING if key in payload}
    once = [token for run in runs_of(prompt) for token in (run[:1] if is_picture(run[0]) else run)]
    return {
        **{key: payload[key] for key in OF_REQUEST if key in payload},
        "token_ids": with_placeholders(once),
        "content_parts": [{"type": "image_url", "url": picture.data_uri} for picture in pictures_in(prompt)],
        "sampling_params": {**sampling, "output_kind": 2},  # all tokens in one answer
    }


def read_generated(
    answer: dict[str, Any], prompt: list[int], max_tokens: int, vocab_size: int | None = None
) -> Generation:
    """Read the sample in an answer of `GENERATE`. Arguments and errors are those of `read_completion`.

    Raises `BadAnswer` also if the server has read other tokens than the prompt's, or images at other places.
    """
    check_what_it_read(answer, prompt)
    try:
        choice = answer["choices"][0]
        entries = choice["logprobs"]["content"]
        sampled, logprobs = [entry["token_id"] for entry in entries], [entry["logprob"] for entry in entries]
        if sampled != choice["token_ids"]:
            raise BadAnswer(f"logprobs belong to the ids {sampled[:5]}..., expected {choice['token_ids'][:5]}...")
        usage = {"prompt_tokens": len(answer["prompt_token_ids"])}
    except (KeyError, IndexError, TypeError):
        raise BadAnswer(f"no token ids: {str(answer)[:500]}") from None
    choice = {**choice, "logprobs": {"token_logprobs": logprobs}, "prompt_token_ids": None}
    found = read_completion({"choices": [choice], "usage": usage}, len(prompt), max_tokens, vocab_size)
    return dataclasses.replace(found, saw=hash_of_ids(prompt))


def check_what_it_read(answer: dict[str, Any], prompt: list[int]) -> None:
    """Raise `BadAnswer` unless an answer of `GENERATE` says that these ids, with these images, were read."""
    places, start = [], 0
    for run in runs_of(prompt):
        if is_picture(run[0]):
            places.append({"offset": start, "length": len(run)})
        start += len(run)
    try:
        seen, found = answer["prompt_token_ids"], answer["mm_placeholders"]["image"]
    except (KeyError, TypeError):
        raise BadAnswer(f"the answer does not say what the server read: {str(answer)[:500]}") from None
    if found != places:
        raise BadAnswer(
            f"the server reads images at {found}, expected {places}. If the lengths differ, so do the settings "
            "(such as max_pixels): start the server with the model's own, without --mm-processor-kwargs. If only the "
            "offsets differ, the server has another tokenizer"
        )
    if seen != with_placeholders(prompt):
        raise BadAnswer("the server read ids that are not the prompt's")
