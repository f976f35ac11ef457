"""The interface of a generation server that training needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mt_grpo.generation.samples import Question


class Engine:
    """The interface of an engine. The pool, routes, proofs, restarts and logs use nothing else of it.

    Each method asks one server through its client (`ServerConnection`), whose `request` raises `ServerError` and
    `ServerLost`. Requests for samples are written as vLLM's `/v1/completions` has them; an engine translates.

    Attributes:
        name: Its name in recipes (`rollout_engine`), and the package whose versions were tested.
        title: Its name in messages, with its article.
        CONTEXT, IMAGE_SIZES, MOST_IMAGES: Its flags for the context's length, and for the sizes and number of images.
        WEIGHTS: The address that reports which weights it holds.
        NAMES_OF_FILES: Whether a push has the names of a checkpoint's files, and not those of the model's modules.
    """

    name: str
    title: str
    article: str
    CONTEXT: str
    IMAGE_SIZES: str
    MOST_IMAGES: str
    WEIGHTS: str
    NAMES_OF_FILES: bool

    @property
    def no_answer(self) -> str:
        """What to do if something else answers."""
        return (
            f"This answer is not from {self.article} {self.title} server. Check vllm_server_host, vllm_server_port, "
            "vllm_server_base_url and rollout_engine."
        )

    # -- who it is --

    def check_health(self, server: Any, timeout: float) -> None:
        """Raise `ServerError` unless it answers now, also while it is paused."""

    def card(self, server: Any) -> dict[str, Any]:
        """The served model: `id` (its name in requests), `root` (what was loaded), `max_model_len`."""

    def version(self, server: Any) -> str:
        """The engine's version."""

    def info(self, server: Any) -> dict[str, Any]:
        """Return the arguments that the server was started with, by the engine's names."""

    def settings(self, server: Any) -> dict[str, Any]:
        """The settings that determine samples, their length and weight syncs, the same for all servers of a run.

        All engines report `model`, `tokenizer`, `dtype` and `max_model_len`.
        """

    def image_settings(self, server: Any) -> tuple[Any, int | None]:
        """What it was started with for the sizes of images, and for their number; None: no limit."""

    def ranks(self, server: Any) -> list[int | None]:
        """The data-parallel ranks at the address, `[None]` if there is one. Raises `ServerError` for other setups."""

    def tokens(self, server: Any, text: str) -> list[int]:
        """The ids of a text without special tokens."""
        payload = {"model": server.model_card["id"], "prompt": text, "add_special_tokens": False}
        return server.request("POST", "/tokenize", json=payload, read=lambda answer: answer["tokens"])

    def why_biased(self, server: Any, cuts: dict[str, Any]) -> str | None:
        """Why its logprobs are not those of the sampled distribution. None if they are.

        `cuts` are the sampling settings that make that distribution another one than the policy's.
        """

    def why_no_images(self, server: Any, most: int) -> str | None:
        """Why it does not read `most` images of a conversation as the trainer does. None if it may."""
        sizes, limit = self.image_settings(server)
        if sizes:
            return (
                f"was started with {self.IMAGE_SIZES} {sizes}, and reads images in other sizes than the trainer. "
                "Remove it, and write the sizes into the model's preprocessor_config.json."
            )
        if limit is not None and limit < most:
            return (
                f"reads at most {limit} images per conversation, and its context has room for {most}. Start it "
                f"without a limit of images ({self.MOST_IMAGES})."
            )
        return None

    def why_merges(self, server: Any, rank: int, slots: int) -> str | None:
        """Why it cannot hold `slots` LoRA adapters of this rank next to its weights. None if it can."""
        return f"{server.base_url} runs {self.title}, to which adapters cannot be pushed alone"

    def why_no_scores(self, server: Any) -> str | None:
        """Why it must not be asked for the logprobs of many texts at the same time. None if it may."""

    def advice(self, server: Any, status: int, path: str) -> str:
        """What to do after an answer of this status, for the end of an error message."""

    # -- samples --

    def ask_for_sample(self, payload: dict[str, Any], vocab_size: int | None, unsampled: list[int] = ()) -> Question:
        """Build the request for one sample, whose answer is read as a `Generation` (`samples.ask_for_sample`)."""

    def ask_for_prompt(self, payload: dict[str, Any], vocab_size: int | None, rank: int | None = None) -> Question:
        """Build the request for the logprobs of `prompt[1:]` at temperature 1, to one rank or to any."""

    def ask_for_chat(self, server: Any, payload: dict[str, Any]) -> Question:
        """Build the request for an answer to `messages`, which is read as `ServerConnection.chat` returns it."""

    # -- weights --

    def name_weights(self, server: Any, name: str, timeout: float = 60.0) -> None:
        """Set the name that it reports for its weights. A restarted server has lost it."""

    def pause(self, server: Any, timeout: float) -> None:
        """Stop sampling. Requests wait and keep their sampled tokens, but not the keys and values of these."""

    def go_on(self, server: Any) -> None:
        """Resume sampling after `pause`."""

    def load(self, server: Any, folder: Path) -> None:
        """Load the safetensors files of a folder, while it is paused."""

    def probe(self, server: Any, folder: Path) -> str | None:
        """Let it open a folder's file that has no tensor, which changes no weight.

        Returns why it cannot, None if it can.
        """

    def forget(self, server: Any) -> None:
        """Drop the prefix cache, which old weights computed, unless `load` does. Raises `ServerError` if it fails."""

    def forget_images(self, server: Any) -> None:
        """Drop the cached image embeddings, which old weights computed, if the server has any."""

    def transport(self, server: Any, setting: str, on_gpu: bool) -> str:
        """`disk` or `nccl`, for the setting `weight_sync`. Raises `ServerError` if the server does not support it."""
