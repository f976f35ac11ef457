"""SGLang as an engine, through its native API. `/generate` takes ids, and reports which weights sampled each token.

docs/scaling.md has what differs from vLLM.
"""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from mt_grpo.base.errors import ServerError
from mt_grpo.generation.samples import (
    BadAnswer,
    HalfLoaded,
    Question,
    forbidding,
    not_an_id,
    number_of_version,
    once_per_image,
    read_completion,
    reading,
)
from mt_grpo.generation.vllm_engine import VLLM
from mt_grpo.images.pictures import is_picture, pictures_in, with_placeholders
from mt_grpo.rollout import Generation

# Sampling parameters that SGLang has, those that it calls otherwise, and what it does not need.
OF_BOTH = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
    "stop_token_ids", "ignore_eos", "logit_bias", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
UNUSED = "n", "logprobs", "return_token_ids", "include_stop_str_in_output", "prompt", "model", "user", "cache_salt"
CUT_BEHIND_LOGPROBS = "top_p", "top_k", "min_p"  # they change what is sampled, and not the logprobs


def sampling_of(payload: dict[str, Any]) -> dict[str, Any]:
    """SGLang's sampling parameters for a payload of vLLM's `/v1/completions`. A `seed` is not honoured there."""
    if unknown := sorted(payload.keys() - {*OF_BOTH, *RENAMED, *UNUSED}):
        raise ValueError(f"generation_kwargs: an SGLang server does not support {unknown[0]!r}. Remove it.")
    params = {RENAMED.get(key, key): value for key, value in payload.items() if key not in UNUSED}
    if params.get("top_k") == 0:  # all ids
        params["top_k"] = -1
    if "logit_bias" in params:
        params["logit_bias"] = {str(token): bias for token, bias in (params["logit_bias"] or {}).items()}
    return {**params, "no_stop_trim": True}


def versions_of_answer(meta: dict[str, Any]) -> tuple[int, int] | None:
    """The oldest and the newest weight version that sampled a token of an answer. None: no push named them."""
    names = [span["version"] for span in meta["weight_versions"] if span["end"] > span["start"]]
    if any(name.startswith("loading-") for name in names):
        raise HalfLoaded("the server sampled while it loaded weights, from a push that failed or of another run")
    numbers = [number_of_version(name) for name in names]
    return None if not numbers or None in numbers else (min(numbers), max(numbers))


def check_what_was_read(seen: Any, prompt: list[int]) -> None:
    """Raise `BadAnswer` unless the server read the ids that were sent, and for each image as many as it has."""
    if seen != (ids := with_placeholders(prompt)):
        raise BadAnswer(
            f"the server read the ids {str(seen)[:200]}, expected {str(ids)[:200]}. The prompt has "
            f"{len(pictures_in(prompt))} images: with images start the server with SGLANG_MM_AVOID_RETOKENIZE=1, and "
            "without image settings of its own"
        )


def read_sample(answer: dict[str, Any], prompt: list[int], max_tokens: int, vocab_size: int | None) -> Generation:
    """Read the sample in an answer of `/generate`. Raises `BadAnswer` for one that cannot be trained on."""
    with reading(answer):
        meta, ids, seen = answer["meta_info"], answer["output_ids"], answer["prompt_token_ids"]
        entries = meta["output_token_logprobs"]
        logprobs, named = [entry[0] for entry in entries], [entry[1] for entry in entries]
        finish, read, versions = meta["finish_reason"]["type"], meta["prompt_tokens"], versions_of_answer(meta)
    if ids != named:
        raise BadAnswer(f"logprobs belong to the ids {named[:5]}..., expected {str(ids)[:50]}...")
    check_what_was_read(seen, prompt)
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": finish}
    sample = {"choices": [{**choice, "prompt_token_ids": prompt}], "usage": {"prompt_tokens": read}}
    return replace(read_completion(sample, len(prompt), max_tokens, vocab_size), policy_versions=versions)


def in_files(model: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Convert a weight to the form in a checkpoint's files: name -> tensor, several for experts."""
    try:
        parts = revert_weight_conversion(model, {name: tensor})
    except (ValueError, LookupError, RuntimeError, TypeError):  # of what is not the whole of what it converts
        parts = {}
    if sum(part.numel() for part in parts.values()) != tensor.numel():
        raise ServerError(f"Files hold the weight {name} together with others: set rollout_engine: vllm.")
    return parts


class SGLang(VLLM):
    """The requests to an SGLang server that training needs. `VLLM` documents the methods and their arguments."""

    name, title, NEEDED = "sglang", "SGLang", ""
    CONTEXT, WEIGHTS = "--context-length", "/model_info"
    in_files = staticmethod(in_files)

    def check_health(self, server: Any, timeout: float) -> None:
        server.request("GET", self.WEIGHTS, timeout=timeout, read=lambda answer: answer["weight_version"])

    def card(self, server: Any) -> dict[str, Any]:
        """The served model, as the server was started: a push changes the name and path in `/v1/models`."""
        info = server.server_info()
        context = server.request("GET", "/v1/models", read=lambda answer: int(answer["data"][0]["max_model_len"]))
        # It rejects a prompt of `max_req_input_len` tokens, which is six less than its context, or less if its
        # memory holds less; and it silently truncates `max_new_tokens` beyond a few more.
        context = min(context, int(info["max_req_input_len"]))
        return {"id": info["served_model_name"], "max_model_len": context}

    def version(self, server: Any) -> str:
        return str(server.server_info()["version"])

    def info(self, server: Any) -> dict[str, Any]:
        return server.request("GET", "/server_info", read=dict)

    def settings(self, server: Any) -> dict[str, Any]:
        info = server.server_info()
        if draft := info.get("speculative_draft_model_path"):
            raise ServerError(
                f"{server.base_url} was started with a draft model ({draft}), which would get the policy's weights."
            )
        keys = "model_path", "tokenizer_path", "dtype", "quantization"
        return {**{key: info.get(key) for key in keys}, "max_model_len": server.model_card["max_model_len"]}

    def ranks(self, server: Any) -> list[int | None]:
        if server.server_info()["dp_size"] > 1:  # with one seed each
            raise ServerError(f"{server.base_url}: SGLang's engines (dp-size) sample alike. Start several servers.")
        return [None]

    def why_biased(self, server: Any, cuts: dict[str, Any]) -> str | None:
        if not (given := [f"{key}={cuts[key]}" for key in CUT_BEHIND_LOGPROBS if key in cuts]):
            return None
        return f"returns logprobs from before {', '.join(given)}, which biases the importance ratio. Remove it"

    def why_merges(self, server: Any, rank: int, slots: int) -> str | None:
        return f"{server.base_url} runs SGLang, to which adapters cannot be pushed alone"

    def ask_for_sample(self, payload: dict[str, Any], vocab_size: int | None, unsampled: list[int] = ()) -> Question:
        prompt, limit = payload["prompt"], payload["max_tokens"]
        body = self._body(forbidding(payload, unsampled), vocab_size)
        # A server in deterministic mode gives all requests without a seed the same one, and so all rollouts of a group
        # the same tokens.
        body["sampling_params"]["sampling_seed"] = secrets.randbelow(2**31)
        return Question("/generate", body, lambda answer: read_sample(answer, prompt, limit, vocab_size))

    def ask_for_prompt(self, payload: dict[str, Any], vocab_size: int | None, rank: int | None = None) -> Question:
        prompt = payload["prompt"]
        body = {**self._body({**payload, "max_tokens": 0}, vocab_size), "logprob_start_len": 0}
        ids = with_placeholders(prompt)
        if pictures := pictures_in(prompt):  # their tokens are called by other ids in the answer
            body["token_ids_logprob"] = [pictures[0].placeholder]

        def read(answer: dict[str, Any]) -> list[float]:
            meta = answer["meta_info"]
            check_what_was_read(answer["prompt_token_ids"], prompt)
            logprobs = []
            for i, entry in enumerate(meta["input_token_logprobs"][1:], 1):
                entry = meta["input_token_ids_logprobs"][i][0] if is_picture(prompt[i]) else entry
                last = vocab_size is not None and ids[i] == vocab_size - 1  # which it calls 0
                if entry[1] != ids[i] and not (last and entry[1] == 0):
                    raise BadAnswer(f"a logprob belongs to the id {entry[1]}, expected the prompt's id {ids[i]}")
                logprobs.append(entry[0])
            if len(logprobs) != len(prompt) - 1:
                raise BadAnswer(f"got {len(logprobs)} logprobs for {len(prompt)} ids, expected one less than ids")
            if not all(math.isfinite(logprob) for logprob in logprobs):
                raise BadAnswer(f"logprobs of a prompt are {logprobs[:5]}..., expected finite numbers")
            return logprobs

        return Question("/generate", body, read)

    def _body(self, payload: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
        prompt = payload["prompt"]
        # INVARIANT: no id outside the vocabulary is sent: it would end the server.
        if wrong := [token for token in prompt if not is_picture(token) and not_an_id(token, vocab_size)]:
            raise ServerError(
                f"A prompt has the token id {wrong[0]}, and the model has {vocab_size} token ids. Such an id would "
                "crash an SGLang server. Does the tokenizer belong to another model?"
            )
        body = {"return_logprob": True, "return_prompt_token_ids": True}
        if "cache_salt" in payload:
            body["extra_key"] = payload["cache_salt"]
        if images := [picture.data_uri for picture in pictures_in(prompt)]:
            body["image_data"] = images
        return {**body, "input_ids": once_per_image(prompt), "sampling_params": sampling_of(payload)}

    def name_weights(self, server: Any, name: str, timeout: float = 60.0) -> None:
        body = {"new_version": name, "abort_all_requests": False}  # by default all requests end
        server.request("POST", "/update_weight_version", timeout=timeout, json=body)

    def pause(self, server: Any, timeout: float) -> None:
        # `retract`: requests wait, lose the keys and values of the old weights, and go on with the new ones.
        server.request("POST", "/pause_generation", timeout=timeout, json={"mode": "retract"})

    def go_on(self, server: Any) -> None:
        server.request("POST", "/continue_generation", json={})

    def load(self, server: Any, folder: Path) -> None:
        def read(answer: dict[str, Any]) -> None:
            if answer["success"] is not True:
                raise BadAnswer(json.dumps(answer)[:500])

        body = {"model_path": str(folder), "flush_cache": True, "abort_all_requests": False}
        server.request("POST", "/update_weights_from_disk", timeout=600.0, json=body, read=read)

    def forget(self, server: Any) -> None:
        """The load drops the prefix cache."""

    def forget_images(self, server: Any) -> None:
        """A server of images is started without a cache of their embeddings (SGLANG_VLM_CACHE_SIZE_MB=0)."""

    def transport(self, server: Any, setting: str, on_gpu: bool) -> str:
        """`disk`, also for `auto`. Raises `ServerError` for `nccl`."""
        if setting == "nccl":
            raise ServerError(f"weight_sync=nccl is not supported by SGLang ({server.base_url}). Set it to disk.")
        return "disk"
