"""The interface of a generation server that training needs, and the engines that implement it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from mt_grpo.generation.samples import Question
from mt_grpo.generation.vllm_engine import VLLM


class Engine(Protocol):
    """The interface of an engine. The pool, routes, proofs, restarts and logs use nothing else of it.

    Each method asks one server through its client (`ServerConnection`), whose `request` raises `ServerError` and
    `ServerLost`. Requests for samples are written as vLLM's `/v1/completions` has them; an engine translates.

    Attributes:
        name: Its name in recipes (`rollout_engine`), and the package whose versions were tested.
        title, article: Its name in messages, and the article before it.
        CONTEXT: Its flag for the length of the context.
        WEIGHTS: The address that reports which weights it holds.
        NAMES_OF_FILES: Whether a push has the names of a checkpoint's files, and not those of the model's modules.
        NO_ANSWER: What to do if something else answers.
    """

    name: str
    title: str
    article: str
    CONTEXT: str
    WEIGHTS: str
    NAMES_OF_FILES: bool
    NO_ANSWER: str

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

    def ranks(self, server: Any) -> list[int | None]:
        """The data-parallel ranks at the address, `[None]` if there is one. Raises `ServerError` for other setups."""

    def tokens(self, server: Any, text: str) -> list[int]:
        """The ids of a text without special tokens."""

    def why_biased(self, server: Any, cuts: dict[str, Any]) -> str | None:
        """Why its logprobs are not those of the sampled distribution. None if they are.

        `cuts` are the sampling settings that make that distribution another one than the policy's.
        """

    def why_no_images(self, server: Any, most: int) -> str | None:
        """Why it does not read `most` images of a conversation as the trainer does. None if it may."""

    def why_merges(self, server: Any, rank: int, slots: int) -> str | None:
        """Why it cannot hold `slots` LoRA adapters of this rank next to its weights. None if it can."""

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

    def held(self, answer: dict[str, Any]) -> str:
        """The name of the weights in an answer from `WEIGHTS`."""

    def name_weights(self, server: Any, name: str, timeout: float = 60.0) -> None:
        """Set the name that it reports for its weights. A restarted server has lost it."""

    def pause(self, server: Any, timeout: float) -> None:
        """Stop sampling. Requests wait and keep their sampled tokens, but not the keys and values of these."""

    def go_on(self, server: Any) -> None:
        """Resume sampling after `pause`."""

    def load(self, server: Any, folder: Path) -> None:
        """Load `model.safetensors` of a folder, while it is paused."""

    def probe(self, server: Any, folder: Path) -> str | None:
        """Let it open a folder's file that has no tensor, which changes no weight.

        Returns why it cannot, None if it can.
        """

    def forget(self, server: Any) -> None:
        """Drop the prefix cache, which old weights computed. Raises `ServerError` if that fails."""

    def forget_images(self, server: Any) -> None:
        """Drop the cached image embeddings, which old weights computed."""

    def transport(self, server: Any, setting: str, on_gpu: bool) -> str:
        """`disk` or `nccl`, for the setting `weight_sync`. Raises `ServerError` if the server does not support it."""


def engine_of(name: str) -> Engine:
    """The engine with this name (`vllm` or `sglang`). SGLang's module is imported only if it is named."""
    if name == "sglang":
        from mt_grpo.generation.sglang_engine import SGLang

        return SGLang()
    return {"vllm": VLLM()}[name]
