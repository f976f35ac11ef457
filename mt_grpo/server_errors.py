"""The errors of a server, and the checks of its address and its answers."""

from __future__ import annotations

import base64
import re
import urllib.parse
from typing import Any

from mt_grpo.id_hashes import hash_of_ids
from mt_grpo.rollout import Generation


class ServerError(RuntimeError):
    """The generation server failed. The message holds the URL, the status and what to do."""


class ServerLost(ServerError):
    """The server does not answer, answers with 5xx, or lost the pushed weights. It may come back."""


class NoServerLeft(ServerLost):
    """None of several servers holds the weights now. A push may bring some back."""


class BadAnswer(ValueError):
    """An answer that cannot be a sample: ids that are none, ids and logprobs that do not match, a logprob of NaN."""


def is_logprob(value: Any) -> bool:
    """Whether a server's value can be the logprob of a sampled token: a finite number, at most 0 up to rounding."""
    return isinstance(value, (int, float)) and -1e9 < value < 1e-3


def not_an_id(value: Any, vocab_size: int | None) -> bool:
    """Whether a server's value cannot be a token id: no integer, or not in the vocabulary of the model.

    >>> [not_an_id(value, 400) for value in (0, 399, 400, -1, True, 1.0, "1")]
    [False, False, True, True, True, True, True]
    """
    return type(value) is not int or not 0 <= value < (2**31 if vocab_size is None else vocab_size)


def hide_password(url: str) -> str:
    """`url` with user and password replaced, for messages.

    >>> hide_password("http://ann:secret@gpu1:8000"), hide_password("http://gpu1:8000")
    ('http://...@gpu1:8000', 'http://gpu1:8000')
    """
    return re.sub(r"//.*@", "//...@", url)


def split_server_url(url: str) -> tuple[str, str | None]:
    """(`url` without user and password, the header `Authorization` made from them or None).

    Raises `ServerError` for an address that can never work.

    >>> split_server_url("http://ann:secret@gpu1:8000/")
    ('http://gpu1:8000', 'Basic YW5uOnNlY3JldA==')
    """
    try:
        parts = urllib.parse.urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        fits = fits and not re.search(r"[\s?#]", url)
    except ValueError:  # a port that is no number or above 65535, brackets that do not match
        fits = False
    if not fits:
        raise ServerError(
            f"{hide_password(url)!r} is no server's address. Expected http://HOST:PORT or https://HOST:PORT, with a "
            "port from 1 to 65535: correct vllm_server_base_url, or vllm_server_host and vllm_server_port."
        )
    user, found, host = parts.netloc.rpartition("@")
    header = "Basic " + base64.b64encode(urllib.parse.unquote(user).encode()).decode() if found else None
    return parts._replace(netloc=host).geturl().rstrip("/"), header


def server_urls(value: str | list[str] | None) -> list[str]:
    """The addresses in `vllm_server_base_url`: a list, or text with commas between them.

    Raises `ValueError` for something else, and `ServerError` for no address or one that is named twice.

    >>> server_urls("http://a:1, http://b:2"), server_urls(["http://a:1"]), server_urls(None)
    (['http://a:1', 'http://b:2'], ['http://a:1'], [])
    """
    if not value:
        return []
    urls = value.split(",") if isinstance(value, str) else list(value)
    if not all(isinstance(url, str) for url in urls):
        raise ValueError(f"vllm_server_base_url={value!r}, expected an address or a list of addresses.")
    urls = [url.strip() for url in urls]
    plain = [split_server_url(url)[0] for url in urls]  # raises for text that is no address
    if twice := [url for url in plain if plain.count(url) > 1]:
        raise ServerError(f"vllm_server_base_url names {twice[0]} twice. Name each server once.")
    return urls


def read_completion(
    answer: dict[str, Any], num_prompt_tokens: int, max_tokens: int, vocab_size: int | None = None
) -> Generation:
    """The sample in an answer of `/v1/completions`. Raises `BadAnswer` for one that cannot be trained on.

    Args:
        answer: The server's.
        num_prompt_tokens: That were sent.
        max_tokens: That were asked for.
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
        raise BadAnswer(f"token_ids and logprobs are {type(token_ids).__name__} and {type(logprobs).__name__}")
    if wrong := [i for i in token_ids if not_an_id(i, vocab_size)]:
        among = "" if vocab_size is None else f", expected integers from 0 to {vocab_size - 1}"
        raise BadAnswer(f"{len(wrong)} of {counts[0]} token ids are none: {str(wrong[:5])[:100]}{among}")
    if not 0 < counts[0] == counts[1] or not all(map(is_logprob, logprobs)):
        raise BadAnswer(f"{counts[0]} ids and {counts[1]} logprobs {logprobs[:5]}...: no match")
    if seen != num_prompt_tokens:
        raise BadAnswer(f"the server saw {seen} prompt tokens of {num_prompt_tokens}: the prompt was changed")
    if counts[0] > max_tokens or finish_reason not in ("stop", "length"):  # `abort`: a pause or a shutdown
        raise BadAnswer(f"{counts[0]} ids of at most {max_tokens}, finish_reason={finish_reason!r}")
    read = choice.get("prompt_token_ids")
    try:
        saw = None if read is None else hash_of_ids(read)
    except (TypeError, OverflowError, ValueError):
        raise BadAnswer(f"prompt_token_ids are no token ids: {str(read)[:100]}") from None
    return Generation(token_ids, logprobs, finish_reason, saw)
