"""The HTTP connection of `VLLMServerClient`: retries, time limits, and the version of the weights."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import os
import random
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp
import orjson
from yarl import URL

from mt_grpo.base.errors import ServerError, ServerLost, error_line, tell_once
from mt_grpo.base.event_loop import CONTROL_THREAD, allow_many_open_files, gather_all, run_async, run_on_thread
from mt_grpo.conversation.conversations import CHAT_KEYS, check_conversations, check_sampling_params, sampling_defaults
from mt_grpo.generation.samples import BadAnswer, HalfLoaded, number_of_version
from mt_grpo.generation.vllm_engine import VLLM
from mt_grpo.generation.weight_transfer import WeightTransfer
from mt_grpo.images.pictures import pictures_in, reader_of
from mt_grpo.rollout import Generation

logger = logging.getLogger(__name__)
INT_KEYS = orjson.OPT_NON_STR_KEYS  # of `logit_bias`


def hide_password(url: str) -> str:
    """`url` with user and password replaced, for messages."""
    return re.sub(r"//.*@", "//...@", url)


def split_server_url(url: str) -> tuple[str, str | None]:
    """(`url` without user and password, the header `Authorization` made from them or None)."""
    with suppress(ValueError):  # such as a port that is no number
        parts = URL(url)
        if parts.scheme in ("http", "https") and parts.host and parts.port and not re.search(r"[\s?#]", url):
            login = parts.user or "", parts.password or ""
            header = aiohttp.encode_basic_auth(*login, encoding="utf-8") if any(login) else None
            return str(parts.with_user(None)).rstrip("/"), header
    raise ServerError(
        f"{hide_password(url)!r} is not a server address. Expected http://HOST:PORT or https://HOST:PORT. Correct "
        "vllm_server_base_url, or vllm_server_host and vllm_server_port."
    )


def engine_of(name: str) -> VLLM:
    """The engine with this name (`vllm` or `sglang`). SGLang's module is imported only if it is named."""
    if name == "sglang":
        from mt_grpo.generation.sglang_engine import SGLang

        return SGLang()
    return {"vllm": VLLM}[name]()


class ServerConnection:
    """Connections to one server: control calls, retries, logprobs. `VLLMServerClient` documents the arguments."""

    tokenizer: Any = None  # of the model, which says what reads its images
    vocab_size: int | None = None  # of the model that is trained; ids beyond it are no answer
    BAD_ANSWERS = 3  # in a row, after which a request fails
    NOTICE_SECONDS = 10.0  # between two log lines during a wait for the server
    VERSION_SECONDS = 10.0  # that the server may take to say which weights it holds

    def __init__(
        self, base_url: str, api_key: str | None, timeout: float, request_timeout: float, engine: str, *transfer: Any
    ):
        self.engine = engine_of(engine)
        self.base_url, credentials = split_server_url(base_url)
        self.timeout, self.request_timeout = timeout, request_timeout
        self.retries = 0  # requests that were sent again, since a reader last set it to 0
        self.lineage = 0  # restarts that pushes found out; the same on all ranks after a push
        self.policy_version = 0  # weight changes before the weights of the last push
        self.newest_version, self.pushing = 0, False  # of the last push that was begun; whether one is under way
        self.pushed: str | None = None  # the name of the last whole push, the same on all ranks; None before the first
        self.adapter: str | None = None  # the adapter that requests name, the same on all ranks; None: the model
        self.loaded: str | None = None  # the adapter of the last push, before it is proven; of rank 0's client
        self._open: dict[int, dict[str, Any]] = {}  # requests in flight; a retry may change the model that one names
        if api_key := api_key or os.environ.get("VLLM_API_KEY"):
            credentials = f"Bearer {api_key}"
        self.sends_credentials = bool(credentials)
        self._headers = {"Authorization": credentials} if credentials else {}
        self._session: aiohttp.ClientSession | None = None  # of the background loop
        self._unsent: asyncio.Task | None = None  # the next question of `held_version`
        self._asking = asyncio.Lock()
        self.transfer = WeightTransfer(self, *transfer)
        allow_many_open_files()

    @property
    def unsampled(self) -> list[int]:
        """The token ids that every request forbids; empty for a text-only model."""
        return getattr(reader_of(self.tokenizer), "unsampled", [])

    def request(
        self, method: str, path: str, timeout: float = 60.0, read: Callable[[Any], Any] | None = lambda x: x, **kwargs
    ) -> Any:
        """Send one control request. Returns `read` of the JSON answer; None: the answer may be any text.

        Raises `ServerError`, or `ServerLost` if the server may come back: no answer within `timeout` s, 429, 5xx.
        """
        url = f"{self.base_url}{path}"
        try:
            status, body = run_async(self._call(method, url, timeout, kwargs), thread=CONTROL_THREAD)
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = error_line(error) if str(error) else f"no complete answer within {timeout:g} s"
            raise ServerLost(f"{method} {url}: {problem}. Is the {self.engine.title} server running?") from error
        text = body.decode("utf-8", "replace")
        if not 200 <= status < 300:
            kind = ServerLost if status == 429 or status >= 500 else ServerError
            raise kind(f"{method} {url}: {status} {text[:2000]}.{self.engine.advice(status)}")
        try:
            return read and read(json.loads(text or "{}"))
        except (ValueError, LookupError, TypeError) as error:
            problem = f"{status} {text[:300]!r}.{self.engine.advice(200)}"
            raise ServerError(f"{method} {url}: {error if isinstance(error, BadAnswer) else problem}") from None

    async def _call(self, method: str, url: str, timeout: float, kwargs: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body. `timeout` limits the whole call: a server may send a byte every second for ever."""
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=10.0)
        async with aiohttp.ClientSession(headers=self._headers, timeout=limits) as session:
            async with session.request(method, url, **kwargs) as response:
                return response.status, await response.read()

    def healthy(self, timeout: float = 10.0) -> bool:
        """Whether the server answers its health check now."""
        with suppress(ServerError):
            self.engine.check_health(self, timeout)
            return True
        return False

    def wait_until_healthy(self, unless: Callable[[], Any] = lambda: False) -> None:
        """Wait for a healthy server, up to `self.timeout` seconds or until `unless` returns true, and log the wait."""
        began, last_notice = time.monotonic(), float("-inf")
        while not unless():
            left = began + self.timeout - time.monotonic()
            try:
                return self.engine.check_health(self, min(10.0, max(left, 1.0)))
            except ServerLost as error:
                if left <= 0:
                    raise ServerError(
                        f"No {self.engine.title} server answers at {self.base_url} after {self.timeout:g} s. Start "
                        "one with `bash scripts/train.sh RECIPE`, or set vllm_server_host, vllm_server_port, "
                        f"vllm_server_timeout. The last error: {str(error)[:500]}"
                    ) from None
                if time.monotonic() - last_notice >= self.NOTICE_SECONDS:
                    last_notice = time.monotonic()
                    logger.warning(f"Waiting up to {left:.0f} more s for a server: {str(error)[:500]}")
            time.sleep(1.0)

    @functools.cached_property
    def model_card(self) -> dict[str, Any]:
        return self.engine.card(self)

    @property
    def max_model_len(self) -> int:
        return self.model_card["max_model_len"]

    def server_info(self) -> dict[str, Any]:
        return self.engine.info(self)

    def weight_version(self) -> str:
        """The weight version that the last push set on the server. A restarted server has lost it."""
        return self.request("GET", self.engine.WEIGHTS, timeout=30.0, read=lambda answer: answer["weight_version"])

    def score(self, token_ids: list[int], rank: int | None = None, timeout: float = 60.0) -> list[float]:
        """The logprobs of `token_ids[1:]` at temperature 1, full vocabulary, of one engine (`rank`) or of any."""
        payload = {**sampling_defaults(), "model": self.model_card["id"], "prompt": token_ids, "max_tokens": 1}
        path, body, read, headers = self.engine.ask_for_prompt(payload, self.vocab_size, rank)
        return self.request("POST", path, timeout=timeout, json=body, headers=headers, read=read)

    def sample_behind(self, token_ids: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """Sample after these ids at temperature 1, with the adapter of the last push. Returns (ids, logprobs)."""
        payload = {**sampling_defaults(), "model": self.loaded or self.model_card["id"], "prompt": token_ids}
        payload |= {"max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True, "return_token_ids": True}
        path, body, read, _ = self.engine.ask_for_sample(payload, self.vocab_size, self.unsampled)
        generation = self.request("POST", path, timeout=self.request_timeout, json=body, read=read)
        return generation.token_ids, generation.logprobs

    @property
    def named_adapters(self) -> set[str | None]:
        """The models that requests in flight name: their adapters stay on the server."""
        return {body.get("model") for body in list(self._open.values())}

    async def sample(self, payload: dict[str, Any], vocab_size: int | None) -> Generation:
        """Sample for a payload of `/v1/completions`, and report which versions of the weights may have sampled."""
        for picture in pictures_in(payload["prompt"]):
            if "data_uri" not in vars(picture):  # a large one takes long: other conversations go on meanwhile
                await asyncio.to_thread(getattr, picture, "data_uri")
        path, body, read, _ = self.engine.ask_for_sample(payload, vocab_size, self.unsampled)
        asked = self.policy_version
        self._open[id(body)] = body
        try:
            generation = await run_on_thread(self._post(path, body, read))
        finally:
            del self._open[id(body)]
        if generation.policy_versions is not None:  # the engine says of each token which weights sampled it
            return generation
        versions = asked, self.newest_version
        if self.adapter is not None and body["model"] != self.model_card["id"]:
            versions = (number_of_version(body["model"]),) * 2
        return dataclasses.replace(generation, policy_versions=versions)

    def salt(self) -> dict[str, str]:
        """The cache salt of a request: the name of the last push, and a random one while a push is under way.

        So no prefix of old weights is reused, even if the server did not drop it. Those of adapters are apart anyway.
        """
        if self.pushed is None or self.adapter is not None:
            return {}
        return {"cache_salt": secrets.token_hex(8) if self.pushing else self.pushed}

    def _http(self) -> aiohttp.ClientSession:
        """The session of the background loop, on which requests of conversations run. To be called there."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # vLLM closes connections that were idle for 5 s. A request that is sent at that moment would be lost.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                headers={**self._headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=self.request_timeout, sock_connect=10),
            )
        return self._session

    async def _post(self, path: str, payload: dict[str, Any], read: Callable[[dict[str, Any]], Any]) -> Any:
        """POST a request, on the background loop. Returns `read` of the JSON answer.

        It is sent again, with backoff, until `self.timeout` seconds after its first failure (no connection, 429, 5xx,
        a timeout), or until `BAD_ANSWERS` in a row are no JSON, or none for `read`.
        """
        url, give_up, wait, bad_answers = f"{self.base_url}{path}", None, 0.05, 0
        while True:
            try:
                # A request has its whole history as ids, and its answer repeats them.
                async with self._http().post(url, data=orjson.dumps(payload, option=INT_KEYS)) as response:
                    if response.status == 200:
                        return read(orjson.loads(await response.read()))
                    problem, bad_answers = f"{response.status} {(await response.text(errors='replace'))[:2000]}", 0
                    if response.status == 404 and self.adapter and "does not exist" in problem:
                        # The server restarted, which `gather_proven` finds out; or a newer adapter took its place.
                        payload["model"] = self.adapter
                    elif response.status not in (429, 500, 502, 503, 504):
                        raise ServerError(f"POST {url}: {problem}.{self.engine.advice(response.status)}")
            except aiohttp.ClientError as error:
                problem = error_line(error)
            except TimeoutError:
                problem = f"no answer within vllm_request_timeout={self.request_timeout:g} s"
                tell_once(
                    f"POST {url}: {problem}. The request is sent again, and its sampled tokens are lost. Long turns "
                    "time out first, which biases training towards short turns. Raise vllm_request_timeout, or lower "
                    "max_turn_tokens.",
                    "vllm_request_timeout",
                )
            except ValueError as error:
                problem, bad_answers = error_line(error), bad_answers + (not isinstance(error, HalfLoaded))
                if bad_answers == self.BAD_ANSWERS:
                    raise ServerError(f"POST {url}: {bad_answers} invalid answers in a row: {problem}") from None
            give_up = give_up or time.monotonic() + self.timeout
            left = give_up - time.monotonic()
            if left <= 0:
                raise ServerLost(f"POST {url}: {problem}; gave up after vllm_server_timeout={self.timeout:g} s.")
            self.retries += 1
            await asyncio.sleep(min(wait * random.uniform(0.5, 1.0), left))  # the last try is at the time limit
            wait = min(2 * wait, 10.0)

    def chat(
        self, messages_list: list[list[dict[str, str]]], sampling_params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Render conversations and answer them, all at the same time. Raises `ValueError` for one with an image."""
        messages_list = check_conversations(messages_list, "messages_list", texts=False)
        check_sampling_params(sampling_params, CHAT_KEYS)
        if self.tokenizer is None:
            raise ServerError("chat needs the model's tokenizer: VLLMServerClient(..., tokenizer=tokenizer).")
        params = {"stop": [], **(sampling_params or {})}
        limit = params.pop("max_tokens", None)
        limit = params.pop("max_completion_tokens", None) or limit
        rendering = {"add_generation_prompt": True, "return_dict": False}
        rendering |= params.pop("chat_template_kwargs", None) or {}
        if "reasoning_effort" in params:
            rendering["reasoning_effort"] = params.pop("reasoning_effort")
        prompts = [self.tokenizer.apply_chat_template(messages, **rendering) for messages in messages_list]
        asked = [self.generate(ids, limit or self.max_model_len - len(ids), params) for ids in prompts]
        return [
            {
                "text": self.tokenizer.decode(generation.token_ids, skip_special_tokens=True),
                "token_ids": generation.token_ids,
                "logprobs": generation.logprobs,
                "prompt_ids": prompt_ids,
                "finish_reason": generation.finish_reason,
            }
            for prompt_ids, generation in zip(prompts, run_async(gather_all(asked)))
        ]

    async def held_version(self) -> str | None:
        """The version of the weights that the server holds; None if it does not answer. On the background loop.

        All callers share a request that is sent after their calls. One at a time is under way.
        """
        self._unsent = self._unsent or asyncio.create_task(self._ask_version())
        return await asyncio.shield(self._unsent)

    async def _ask_version(self) -> str | None:
        url, timeout = f"{self.base_url}{self.engine.WEIGHTS}", aiohttp.ClientTimeout(total=self.VERSION_SECONDS)
        async with self._asking:
            self._unsent = None  # who comes from here on asks anew
            try:
                async with self._http().get(url, timeout=timeout) as response:
                    return (await response.json())["weight_version"] if response.status == 200 else None
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
                return None

    def close(self) -> None:
        """Close the connections. A later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(TimeoutError):  # a tool or reward may block the loop for ever
                run_async(session.close(), timeout=5.0)
