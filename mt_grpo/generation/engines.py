"""What training needs of a server that generates, and the engines that have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from mt_grpo.generation.samples import Question
from mt_grpo.generation.vllm_engine import VLLM


class Engine(Protocol):
    """An engine as training sees it. The pool, routes, proofs, restarts and logs know no more of it than this.

    Each method asks one server, by its client (`ServerConnection`), whose `request` raises `ServerError` and
    `ServerLost`. Requests for samples are written as vLLM's `/v1/completions` has them; an engine translates.

    Attributes:
        name: In recipes (`rollout_engine`), and the package whose versions were tested.
        title, article: In messages.
        CONTEXT: Its flag for the length of the context.
        WEIGHTS: The address that says which weights it holds.
        NAMES_OF_FILES: Whether a push has the names of a checkpoint's files, and not those of the model's modules.
        NO_ANSWER: What to do where something else answers.
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
        """What determines its samples and their length, and how weights get there: the same for all servers of a run.

        `model`, `tokenizer`, `dtype` and `max_model_len` are of all engines.
        """

    def ranks(self, server: Any) -> list[int | None]:
        """The data-parallel ranks behind the address; `[None]` where there is one. `ServerError` for others."""

    def tokens(self, server: Any, text: str) -> list[int]:
        """The ids of a text without special tokens."""

    def why_biased(self, server: Any, cuts: dict[str, Any]) -> str | None:
        """Why its logprobs are not of the distribution that is sampled; None: they are.

        `cuts` are the sampling settings that make that distribution another one than the policy's.
        """

    def why_no_images(self, server: Any, most: int) -> str | None:
        """Why it does not read `most` images of a conversation as the trainer does; None: it may."""

    def why_merges(self, server: Any, rank: int, slots: int) -> str | None:
        """Why it cannot have so many LoRA adapters of this rank beside its weights; None: it can."""

    def why_no_scores(self, server: Any) -> str | None:
        """Why it must not be asked for the logprobs of many texts at a time; None: it may."""

    def advice(self, server: Any, status: int, path: str) -> str:
        """What to do after an answer of this status, for the end of an error message."""

    # -- samples --

    def ask_for_sample(self, payload: dict[str, Any], vocab_size: int | None, unsampled: list[int] = ()) -> Question:
        """The question for one sample, whose answer is read as a `Generation` (`samples.ask_for_sample`)."""

    def ask_for_prompt(self, payload: dict[str, Any], vocab_size: int | None, rank: int | None = None) -> Question:
        """The question for the logprobs of `prompt[1:]`, at temperature 1, of one rank or of any."""

    def ask_for_chat(self, server: Any, payload: dict[str, Any]) -> Question:
        """The question for an answer to `messages`, which is read as `ServerConnection.chat` returns it."""

    # -- weights --

    def held(self, answer: dict[str, Any]) -> str:
        """The name of the weights in an answer of `WEIGHTS`."""

    def name_weights(self, server: Any, name: str, timeout: float = 60.0) -> None:
        """Let it report a name for its weights. A restarted server has lost it."""

    def pause(self, server: Any, timeout: float) -> None:
        """Stop sampling. Requests wait; what they have sampled stays, what was computed of it does not."""

    def go_on(self, server: Any) -> None:
        """Sample again."""

    def load(self, server: Any, folder: Path) -> None:
        """Load `model.safetensors` of a folder, while it is paused."""

    def probe(self, server: Any, folder: Path) -> str | None:
        """Let it open a folder's file without any tensor, which changes no weight.

        Returns why it cannot; None: it can.
        """

    def forget(self, server: Any) -> None:
        """Drop what old weights computed of prompts. Raises `ServerError` where that fails."""

    def forget_images(self, server: Any) -> None:
        """Drop what old weights saw in images."""

    def checksums(self, server: Any) -> dict[str, str]:
        """Of each weight that it holds, by a name of its own for it. Empty: it cannot say them."""

    def transport(self, server: Any, setting: str, on_gpu: bool) -> str:
        """`disk` or `nccl`, for the setting `weight_sync`. Raises `ServerError` for what it cannot."""


def engine_of(name: str) -> Engine:
    """The engine of `rollout_engine`. SGLang is loaded where it is named."""
    if name == "sglang":
        from mt_grpo.generation.sglang_engine import SGLang

        return SGLang()
    return {"vllm": VLLM()}[name]
