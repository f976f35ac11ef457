"""vLLM as an engine: `vllm serve` with its development endpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mt_grpo.base.errors import ServerError, ServerLost
from mt_grpo.base.tested_versions import outside
from mt_grpo.generation.adapters import why_server_merges
from mt_grpo.generation.engines import Engine
from mt_grpo.generation.samples import GENERATE, Question, ask_for_prompt, ask_for_sample


class VLLM(Engine):
    """The engine vLLM. `engines.Engine` documents the methods and their arguments."""

    name, title, article = "vllm", "vLLM", "a"
    CONTEXT, IMAGE_SIZES, MOST_IMAGES = "--max-model-len", "--mm-processor-kwargs", "--limit-mm-per-prompt"
    WEIGHTS, NAMES_OF_FILES = "/weight_info", False

    # -- who it is --

    def check_health(self, server: Any, timeout: float) -> None:
        server.request("GET", "/health", timeout=timeout)

    def card(self, server: Any) -> dict[str, Any]:
        def read(answer: dict[str, Any]) -> dict[str, Any]:
            card = answer["data"][0]
            return {**card, "id": str(card["id"]), "max_model_len": int(card["max_model_len"])}

        return server.request("GET", "/v1/models", read=read)

    def version(self, server: Any) -> str:
        return server.request("GET", "/version", read=lambda answer: str(answer["version"]))

    def info(self, server: Any) -> dict[str, Any]:
        """The server's vLLM configuration as nested dicts. It needs the development endpoints."""

        def read(answer: dict[str, Any]) -> dict[str, Any]:
            _ = [answer["vllm_config"]["model_config"][key] for key in ("model", "dtype", "logprobs_mode")]
            return answer["vllm_config"]

        return server.request("GET", "/server_info", params={"config_format": "json"}, read=read)

    def settings(self, server: Any) -> dict[str, Any]:
        info, keys = server.server_info(), ("model", "tokenizer", "dtype", "max_model_len", "logprobs_mode")
        backend = (info.get("weight_transfer_config") or {}).get("backend")
        lora = (info.get("lora_config") or {}).get("max_lora_rank")
        return {**{key: info["model_config"].get(key) for key in keys}, "weight_transfer": backend, "lora_rank": lora}

    def ranks(self, server: Any) -> list[int | None]:
        """The data-parallel ranks. Raises `ServerError` if engines have addresses of their own: a push misses some."""
        config = server.server_info().get("parallel_config") or {}
        if config.get("data_parallel_external_lb") or config.get("data_parallel_hybrid_lb"):
            raise ServerError(
                f"{server.base_url}: --data-parallel-external-lb and --data-parallel-hybrid-lb are not supported. "
                "Start vLLM without them, or start several servers and list them all in vllm_server_base_url."
            )
        count = config.get("data_parallel_size", 1)
        return list(range(count)) if count > 1 else [None]

    def why_biased(self, server: Any, cuts: dict[str, Any]) -> str | None:
        if (mode := server.server_info()["model_config"]["logprobs_mode"]) == "processed_logprobs":
            return None
        return (
            f"runs with --logprobs-mode {mode}: its logprobs are not those of the sampled distribution, which biases "
            "the importance-sampling correction. Start it with --logprobs-mode processed_logprobs"
        )

    def image_settings(self, server: Any) -> tuple[Any, int | None]:
        config = server.server_info()["model_config"].get("multimodal_config") or {}
        return config.get("mm_processor_kwargs"), ((config.get("limit_per_prompt") or {}).get("image") or {}).get(
            "count"
        )

    def why_merges(self, server: Any, rank: int, slots: int) -> str | None:
        return why_server_merges(server, rank, slots)

    def why_no_scores(self, server: Any) -> str | None:
        """Why scoring would crash it: vLLM 0.32's LoRA layers on a CPU have one row per request, not per id."""
        info = server.server_info()
        if info.get("lora_config") and str((info.get("device_config") or {}).get("device")) == "cpu":
            return (
                "has adapters enabled on a CPU, where vLLM crashes if it scores prompts next to other requests. Start "
                "it without --enable-lora"
            )
        return None

    def advice(self, server: Any, status: int, path: str) -> str:
        if status in (401, 403):
            return ". Set VLLM_API_KEY to the key that the server was started with (--api-key)."
        if status == 404 and path == GENERATE:
            return ". Images need a vLLM server started with --enable-scale-out (0.30 or later)."
        if status == 404 and path.startswith(("/v1/", "/health", "/tokenize")):
            return f". {self.no_answer}"
        if status != 404:
            return ""
        version = vars(server).get("engine_version")  # if it was asked
        other = outside({"vllm": version}) if version else []
        return ". Start the vLLM server with VLLM_SERVER_DEV_MODE=1" + (f"; it runs {other[0]}." if other else ".")

    # -- samples --

    def ask_for_sample(self, payload: dict[str, Any], vocab_size: int | None, unsampled: list[int] = ()) -> Question:
        return ask_for_sample(payload, vocab_size, unsampled)

    def ask_for_prompt(self, payload: dict[str, Any], vocab_size: int | None, rank: int | None = None) -> Question:
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        return ask_for_prompt(payload)._replace(headers=headers)

    def ask_for_chat(self, server: Any, payload: dict[str, Any]) -> Question:
        def read(answer: dict[str, Any]) -> dict[str, Any]:
            choice = answer["choices"][0]
            return {
                "text": choice["message"]["content"],
                "token_ids": choice["token_ids"],
                "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
                "prompt_ids": answer["prompt_token_ids"],
                "finish_reason": choice["finish_reason"],
            }

        further = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "skip_special_tokens": False}
        return Question("/v1/chat/completions", {**payload, **further}, read)

    # -- weights --

    def name_weights(self, server: Any, name: str, timeout: float = 60.0) -> None:
        server.request("POST", "/update_weight_version", timeout=timeout, json={"new_version": name})

    def pause(self, server: Any, timeout: float) -> None:
        # `keep`: requests wait, lose the keys and values of the old weights, and go on with the new ones.
        server.request("POST", "/pause", timeout=timeout, params={"mode": "keep"})

    def go_on(self, server: Any) -> None:
        server.request("POST", "/resume")

    def load(self, server: Any, folder: Path) -> None:
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        server.request("POST", "/collective_rpc", timeout=600.0, json=load)

    def probe(self, server: Any, folder: Path) -> str | None:
        """Let vLLM open the file. With `is_checkpoint_format=False` it does so before it touches the model.

        By default it would first move all weights away, and a file that it cannot open would leave it without weights.
        """
        load = {"weights_path": str(folder), "is_checkpoint_format": False}
        if server.reads_images:
            self.pause(server, 60.0)
        try:
            server.request("POST", "/collective_rpc", timeout=60.0, json={"method": "reload_weights", "kwargs": load})
        except ServerLost as error:
            if "Call to collective_rpc method failed" not in str(error):
                raise
            return str(error)  # with the error of the worker
        finally:
            if server.reads_images:
                try:
                    self.forget_images(server)
                finally:
                    self.go_on(server)
        return None

    def forget(self, server: Any) -> None:
        answer = server.request("POST", "/reset_prefix_cache")
        if answer.get("success") is False:  # its status is 200 even then
            raise ServerError(f"{server.base_url} could not reset its prefix cache. It would reuse old weights' keys.")

    def forget_images(self, server: Any) -> None:
        """Drop the encoder cache. INVARIANT: it follows each load, before another request has an image.

        The load empties the cache of vLLM's worker alone: its scheduler goes on counting on it, and the engine ends
        ("Encoder cache miss", vLLM 0.31 and 0.32). A pause of vLLM 0.32 empties both by itself.
        """
        if server.reads_images:
            server.request("POST", "/reset_encoder_cache", read=None)

    def transport(self, server: Any, setting: str, on_gpu: bool) -> str:
        """`nccl` if the server was started for it and this process has a GPU, otherwise `disk`."""
        config = (server.server_info().get("weight_transfer_config") or {}).get("backend")
        if setting == "nccl" and config != "nccl":
            raise ServerError(
                'weight_sync=nccl needs a vLLM server started with --weight-transfer-config \'{"backend": "nccl"}\'.'
            )
        if setting == "nccl" and server.sends_credentials:
            raise ServerError("weight_sync=nccl cannot send an API key or a password (TRL's client). Use disk.")
        if setting != "auto":
            return "disk" if setting == "adapter" else setting
        return "nccl" if on_gpu and config == "nccl" and not server.sends_credentials else "disk"
