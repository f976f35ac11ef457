"""Requests for samples, validation of their answers, and the names of the weights that sampled them.

vLLM samples after ids at `/v1/completions`, and after ids with images at `GENERATE`, which also reports what it read.
There an image has one placeholder, which vLLM replaces with as many as the image has tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mt_grpo.images.pictures import has_pictures, is_picture, pictures_in, runs_of, with_placeholders
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


@contextmanager
def reading(answer: dict[str, Any], lacks: str = "no token ids") -> Iterator[None]:
    """Context manager in which an answer without the expected fields raises `BadAnswer`."""
    try:
        yield
    except BadAnswer:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
        raise BadAnswer(f"{lacks}: {str(answer)[:500]}") from None


class Question(NamedTuple):
    """A request, and a function that reads its answer. `read` raises `BadAnswer` for an invalid answer."""

    path: str
    body: dict[str, Any]
    read: Callable[[dict[str, Any]], Any]
    headers: dict[str, str] = {}


def not_an_id(value: Any, vocab_size: int | None) -> bool:
    """Whether a server's value cannot be a token id: no integer, or not in the vocabulary of the model."""
    return type(value) is not int or not 0 <= value < (2**31 if vocab_size is None else vocab_size)


def read_completion(
    answer: dict[str, Any], num_prompt_tokens: int, max_tokens: int, vocab_size: int | None = None
) -> Generation:
    """Read the sample in an answer of `/v1/completions`. Raises `BadAnswer` for one that cannot be trained on."""
    with reading(answer):
        choice = answer["choices"][0]
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        num_read, finish_reason = answer["usage"]["prompt_tokens"], choice["finish_reason"]
        prompt_ids = choice.get("prompt_token_ids")
        saw = None if prompt_ids is None else hash_of_ids(prompt_ids)
    if not (
        type(token_ids) is type(logprobs) is list
        and 0 < len(token_ids) == len(logprobs) <= max_tokens
        and not any(not_an_id(token, vocab_size) for token in token_ids)
        and all(isinstance(value, int | float) and -9000 < value < 1e-3 for value in logprobs)  # vLLM: -9999 is NaN
        and num_read == num_prompt_tokens  # else the prompt was changed
        and (finish_reason == "stop" or finish_reason == "length" and len(token_ids) == max_tokens)  # else `abort`
    ):
        raise BadAnswer(
            f"ids {str(token_ids)[:200]} with logprobs {str(logprobs)[:200]} after {num_read} prompt tokens, "
            f"finish_reason={finish_reason!r}; expected 1 to {max_tokens} ids below {vocab_size} with a logprob each "
            f"after {num_prompt_tokens} prompt tokens, and 'stop' or 'length'"
        )
    return Generation(token_ids, logprobs, finish_reason, saw)


def ask_for_sample(payload: dict[str, Any], vocab_size: int | None, unsampled: list[int] = ()) -> Question:
    """Build the request for a payload of `/v1/completions`, whose prompt may have image ids."""
    # INVARIANT: every request of a model that reads images forbids the ids `unsampled`, as `forbid` does in passes.
    prompt, limit = payload["prompt"], payload["max_tokens"]
    payload = forbidding(payload, unsampled)
    if not has_pictures(prompt):
        return Question(COMPLETIONS, payload, lambda answer: read_completion(answer, len(prompt), limit, vocab_size))
    return Question(GENERATE, generate_body(payload), lambda answer: read_generated(answer, prompt, limit, vocab_size))


def forbidding(payload: dict[str, Any], unsampled: list[int]) -> dict[str, Any]:
    """A payload in which these ids are forbidden."""
    own = {int(token): bias for token, bias in (payload.get("logit_bias") or {}).items()}
    return {**payload, "logit_bias": own | dict.fromkeys(unsampled, FORBIDDEN_BIAS)} if unsampled else payload


def ask_for_prompt(payload: dict[str, Any], vocab_size: int | None, rank: int | None = None) -> Question:
    """Build the request for the logprobs of `prompt[1:]`, to one engine (`rank`) or to any."""
    prompt, payload = payload["prompt"], {**payload, "prompt_logprobs": 0}
    has_images = has_pictures(prompt)
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}

    def read(answer: dict[str, Any]) -> list[float]:
        if has_images:
            check_what_it_read(answer, prompt)
        entries = (answer if has_images else answer["choices"][0])["prompt_logprobs"]
        ids = with_placeholders(prompt)
        return [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)]

    if not has_images:
        return Question(COMPLETIONS, payload, read, headers)
    return Question(GENERATE, generate_body({**payload, "return_token_ids": True}), read, headers)


def once_per_image(prompt: list[int]) -> list[int]:
    """The ids of a prompt with one placeholder per image."""
    return with_placeholders([token for run in runs_of(prompt) for token in (run[:1] if is_picture(run[0]) else run)])


def generate_body(payload: dict[str, Any]) -> dict[str, Any]:
    """The body of `GENERATE` for a payload of `/v1/completions` whose prompt has images."""
    if unknown := sorted(payload.keys() - {*OF_REQUEST, *OF_SAMPLING, "prompt"}):
        where = "for a prompt with images"
        raise ValueError(f"generation_kwargs: a vLLM server does not support {unknown[0]!r} {where}. Remove it.")
    images = [{"type": "image_url", "url": picture.data_uri} for picture in pictures_in(payload["prompt"])]
    request, sampling = ({key: payload[key] for key in keys if key in payload} for keys in (OF_REQUEST, OF_SAMPLING))
    return {
        **request,
        "token_ids": once_per_image(payload["prompt"]),
        "content_parts": images,
        "sampling_params": {**sampling, "output_kind": 2},  # all tokens in one answer
    }


def read_generated(
    answer: dict[str, Any], prompt: list[int], max_tokens: int, vocab_size: int | None = None
) -> Generation:
    """Read the sample in an answer of `GENERATE`. Arguments and errors are those of `read_completion`."""
    check_what_it_read(answer, prompt)
    with reading(answer):
        choice = answer["choices"][0]
        entries = choice["logprobs"]["content"]
        sampled, logprobs = [entry["token_id"] for entry in entries], [entry["logprob"] for entry in entries]
    if sampled != choice.get("token_ids"):
        raise BadAnswer(f"logprobs belong to the ids {sampled[:5]}..., expected {str(choice.get('token_ids'))[:50]}")
    choice = {**choice, "logprobs": {"token_logprobs": logprobs}, "prompt_token_ids": prompt}
    usage = {"prompt_tokens": len(answer["prompt_token_ids"])}
    return read_completion({"choices": [choice], "usage": usage}, len(prompt), max_tokens, vocab_size)


def check_what_it_read(answer: dict[str, Any], prompt: list[int]) -> None:
    """Raise `BadAnswer` unless an answer of `GENERATE` says that these ids, with these images, were read."""
    expected, start = [], 0
    for run in runs_of(prompt):
        if is_picture(run[0]):
            expected.append({"offset": start, "length": len(run)})
        start += len(run)
    with reading(answer, "the answer does not say what the server read"):
        ids, places = answer["prompt_token_ids"], answer["mm_placeholders"]["image"]
    if places != expected:
        how = "Start it with the model's own tokenizer and image settings, without --mm-processor-kwargs"
        raise BadAnswer(f"the server reads images at {places}, expected {expected}. {how}")
    if ids != with_placeholders(prompt):
        raise BadAnswer("the server read ids that are not the prompt's")


def tagged(version: str, lineage: int) -> str:
    """The name of a weight version on one server, such as `3f2a-7+2`, with how often this server restarted before."""
    return f"{version}+{lineage}" if lineage else version


def number_of_version(name: str) -> int | None:
    """The number in the name of a weight version, such as 7 of `3f2a-7+2`; None if it has none."""
    number = name.partition("+")[0].rpartition("-")[2]
    return int(number) if "-" in name and number.isdecimal() else None


def continues(held: str | None, version: str, lineage: int) -> bool | None:
    """Whether a server that reports `held` had only weights of this run since `version`; None: it cannot be told yet.

    >>> continues("3f2a-7", "3f2a-7", 0), continues("3f2a-9", "3f2a-7", 0), continues("3f2a-6", "3f2a-7", 0)
    (True, True, False)
    >>> continues("default", "3f2a-7", 0), continues("77c1-9", "3f2a-7", 0), continues("3f2a-8", "3f2a-7", 1)
    (False, False, False)
    >>> continues("loading-3f2a-8", "3f2a-7", 0), continues("3f2a-8+1", "3f2a-7", 0), continues(None, "3f2a-7", 0)
    (None, None, None)
    """
    if held is None:
        return None
    name, _, restarts = held.removeprefix("loading-").partition("+")
    same_run = name.rpartition("-")[0] == version.rpartition("-")[0]
    number, own_number = number_of_version(name), number_of_version(version)
    later = same_run and number is not None and own_number is not None and number >= own_number
    if not (name == version or later):
        return False
    known = int(restarts) if restarts.isdecimal() else 0
    return None if held.startswith("loading-") or known > lineage else known == lineage


def versions_of(turn: Any) -> list[int] | None:
    """The oldest and the newest weight version that may have sampled a turn. None if nothing is pushed meanwhile."""
    if not turn.generations or turn.generations[0].policy_versions is None:
        return None
    return [turn.generations[0].policy_versions[0], turn.generations[-1].policy_versions[1]]
