"""vLLM as an engine: `vllm serve` with its development endpoints. Another engine overrides the methods of `VLLM`.

Each method asks one server through its client (`ServerConnection`), whose `request` raises `ServerError` and
`ServerLost`. Requests for samples are written as vLLM's `/v1/completions` has them; another engine translates them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from packaging.version import Version

from mt_grpo.base.errors import ServerError
from mt_grpo.generation.samples import BadAnswer, ask_for_prompt, ask_for_sample
from mt_grpo.generation.weights import room_for

FLAGS = "--enable-lora --max-loras {slots} --max-lora-rank {rank}, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
# Before, a load could move adapters of requests in flight to each other's places (vLLM's issue 47724).
LEAST_VLLM = Version("0.31")


class VLLM:
    """The requests to a vLLM server that training needs."""

    name, title = "vllm", "vLLM"  # in recipes (`rollout_engine`), and in messages
    CONTEXT = "--max-model-len"  # its flag
    NEEDED = (
        " Training needs a server with VLLM_SERVER_DEV_MODE=1, for images started with --enable-scale-out (vLLM 0.30 "
        "or later), and for adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
    )
    WEIGHTS = "/weight_info"  # the address that reports which weights it holds
    in_files = None  # converts a weight to its form in a checkpoint's files, if a push has to have that

    def advice(self, status: int) -> str:
        """What to do after an answer of this status, which is an error or not one of this engine's."""
        if status in (401, 403):
            return " Set VLLM_API_KEY to the key that the server was started with (--api-key, or --admin-api-key)."
        if status not in (200, 404):
            return ""
        keys = "vllm_server_host, vllm_server_port, vllm_server_base_url and rollout_engine"
        return f" Expected an answer of {self.title}: check {keys}.{self.NEEDED}"

    def check_health(self, server: Any, timeout: float) -> None:
        """Raise `ServerError` unless it answers now, also while it is paused."""
        server.request("GET", "/health", timeout=timeout)

    def card(self, server: Any) -> dict[str, Any]:
        """The served model: `id` (its name in requests) and `max_model_len`."""
        kinds = {"id": str, "max_model_len": int}
        read = lambda answer: {key: kind(answer["data"][0][key]) for key, kind in kinds.items()}  # noqa: E731
        return server.request("GET", "/v1/models", read=read)

    def version(self, server: Any) -> str:
        """The engine's version."""
        return server.request("GET", "/version", read=lambda answer: str(answer["version"]))

    def info(self, server: Any) -> dict[str, Any]:
        """The arguments that the server was started with, by the engine's names."""
        params = {"config_format": "json"}
        return server.request("GET", "/server_info", params=params, read=lambda answer: answer["vllm_config"])

    def settings(self, server: Any) -> dict[str, Any]:
        """The settings that determine samples and their length, the same for all servers of a run."""
        config = server.server_info()["model_config"]
        return {k: config.get(k) for k in ("model", "tokenizer", "dtype", "max_model_len", "logprobs_mode")}

    def ranks(self, server: Any) -> list[int | None]:
        """The data-parallel ranks, `[None]` if there is one. Raises `ServerError` if a push would miss some."""
        config = server.server_info().get("parallel_config") or {}
        if config.get("data_parallel_external_lb") or config.get("data_parallel_hybrid_lb"):
            flags = "--data-parallel-external-lb and --data-parallel-hybrid-lb are not supported"
            raise ServerError(f"{server.base_url}: {flags}. Start several servers and list them all.")
        if (count := config.get("data_parallel_size", 1)) > 1 and self.release(server) < Version("0.32"):
            raise ServerError(f"{server.base_url}: before vLLM 0.32 its engines sample alike. Start several servers.")
        return list(range(count)) if count > 1 else [None]

    def release(self, server: Any) -> Version:
        """Its version's numbers, such as 0.32.1; 0 for a build that names none."""
        return Version(re.match(r"[\d.]*\d|", self.version(server))[0] or "0")

    def tokens(self, server: Any, text: str) -> list[int]:
        """The ids of a text without special tokens."""
        payload = {"model": server.model_card["id"], "prompt": text, "add_special_tokens": False}
        return server.request("POST", "/tokenize", json=payload, read=lambda answer: answer["tokens"])

    def why_biased(self, server: Any, cuts: dict[str, Any]) -> str | None:
        """Why its logprobs are not of the sampled distribution, with `cuts` such as top_p. None if they are."""
        if (mode := server.server_info()["model_config"]["logprobs_mode"]) == "processed_logprobs":
            return None
        return (
            f"runs with --logprobs-mode {mode}: its logprobs are not those of the sampled distribution, which biases "
            "the importance-sampling correction. Start it with --logprobs-mode processed_logprobs"
        )

    def why_merges(self, server: Any, rank: int, slots: int) -> str | None:
        """Why it cannot hold `slots` LoRA adapters of this rank next to its weights. None if it can."""
        flags, where = FLAGS.format(rank=room_for(rank), slots=slots), server.base_url
        info = server.server_info()
        if self.release(server) < LEAST_VLLM:
            return f"{where} runs vLLM {self.version(server)}, and loading adapters needs {LEAST_VLLM} or later"
        if (info.get("parallel_config") or {}).get("data_parallel_size", 1) > 1:
            return f"{where} runs several engines (data parallel)"
        if not (config := info.get("lora_config") or {}):
            return f"{where} was started without {flags}"
        if config["max_lora_rank"] < rank or config["max_loras"] < slots:
            return f"{where} has no room for {slots} adapters of rank {rank}: start it with {flags}"
        if (held := server.weight_version()) != "default":
            return f"{where} holds the weights {held!r} of another run: restart it"
        return None

    ask_for_sample, ask_for_prompt = staticmethod(ask_for_sample), staticmethod(ask_for_prompt)

    def name_weights(self, server: Any, name: str, timeout: float = 60.0) -> None:
        """Set the name that it reports for its weights. A restarted server has lost it."""
        server.request("POST", "/update_weight_version", timeout=timeout, json={"new_version": name})

    def pause(self, server: Any, timeout: float) -> None:
        """Stop sampling. Requests wait and keep their sampled tokens, but not the keys and values of these."""
        server.request("POST", "/pause", timeout=timeout, params={"mode": "keep"})

    def go_on(self, server: Any) -> None:
        """Resume sampling after `pause`."""
        server.request("POST", "/resume")

    def load(self, server: Any, folder: Path) -> None:
        """Load the safetensors files of a folder, while it is paused."""
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        server.request("POST", "/collective_rpc", timeout=600.0, json=load)

    def forget(self, server: Any) -> None:
        """Drop the prefix cache, which old weights computed, unless `load` does. Raises `ServerError` if it fails."""

        def read(answer: dict[str, Any]) -> None:
            if answer.get("success") is False:  # its status is 200 even then
                raise BadAnswer("the prefix cache was not reset, so it would reuse old weights' keys")

        server.request("POST", "/reset_prefix_cache", read=read)

    def forget_images(self, server: Any) -> None:
        """Drop the cached image embeddings. INVARIANT: it follows each load, before another request has an image."""
        # The load empties the cache of vLLM's worker alone, and the engine ends ("Encoder cache miss", 0.31 and 0.32).
        if server.unsampled:  # the model reads images
            server.request("POST", "/reset_encoder_cache", read=None)

    def transport(self, server: Any, setting: str, on_gpu: bool) -> str:
        """`nccl` if the server was started for it and this process has a GPU, otherwise `disk`."""
        config = server.server_info().get("weight_transfer_config") or {}
        fits = config.get("backend") == "nccl" and not server.sends_credentials
        if setting == "nccl" and not fits:
            raise ServerError(
                'weight_sync=nccl needs a vLLM server started with --weight-transfer-config \'{"backend": "nccl"}\', '
                "and without an API key or a password, which TRL's client does not send. Use disk."
            )
        return "nccl" if setting == "nccl" or setting == "auto" and on_gpu and fits else "disk"
