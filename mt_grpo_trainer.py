"""MT-GRPO: train a language model to use tools over several turns, and give every turn its own credit.

GRPO samples G answers to a prompt and gives every token of an answer the same advantage. A conversation with tools
has several turns, and a good search followed by a bad answer is not one thing. MT-GRPO (arXiv 2505.11821) adds:

1. Rollouts are conversations: the model writes a turn, a tool answers, the model writes again.
2. The tool's tokens are attended to and never trained on.
3. A turn that called a tool gets the outcome's advantage plus `turn_advantage_coef` times its own.

                     turn 0: tool call        tool result         turn 1: answer
    tokens           <tool>{...}</tool>       <result>..</result>  <answer>1889</answer>
    attended         1 1 1 1 1 1 1            1 1 1 1              1 1 1 1
    trained          1 1 1 1 1 1 1            0 0 0 0              1 1 1 1
    advantage        outcome + coef * turn    -                    outcome

TRL's `GRPOTrainer` optimises and vLLM (or the model itself) generates; this file is what lies between: the
conversation, its tokens, its credit. Left out on purpose: images, several tool calls in one turn, and any
re-rendering of the history, which would train on tokens that the policy never sampled.

    python mt_grpo_trainer.py --config hf_recipes/tiny/calculator.yaml                              # CPU, 1 minute
    accelerate launch mt_grpo_trainer.py --config hf_recipes/Qwen/Qwen3-1.7B--mt-grpo.yaml          # GPUs

Notation: `B` rollouts on this rank, `N` in the whole batch, `G` per prompt, `P` prompt tokens, `C` completion tokens
(everything after the prompt, tool results included), `K` model turns. `completion_mask` = real token (attention),
`loss_mask` = sampled by the policy (loss), `turn_ids` = which turn owns a token (credit, -1 for the environment's).
"""

import array
import asyncio
import atexit
import base64
import bisect
import collections.abc
import concurrent.futures
import copy
import dataclasses
import difflib
import enum
import fcntl
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import logging
import math
import os
import queue
import random
import re
import resource
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import types
import typing
import urllib.parse
import zipfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import jinja2
import numpy
import torch
import yaml
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from datasets import Dataset, load_dataset
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.utils.data import Sampler
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer_callback import TrainerState
from transformers.training_args import OptimizerNames
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import RepeatSampler

logger = logging.getLogger(__name__)

# =====================================================================================================================
# Configuration
# =====================================================================================================================

DEFAULT_SYSTEM_PROMPT = """\
Answer the question. You may use tools, one call per message, and you see each result before you go on.

To call a tool, think first and then write the call as JSON:
<reasoning>why this call helps</reasoning>
<tool>{{"name": "tool name", "args": {{"argument": "value"}}}}</tool>

The result comes back in <result>...</result>. When you know the answer, write:
<reasoning>how the answer follows</reasoning>
<answer>the answer, as short as possible</answer>

Tools:
{tool_descriptions}"""


@dataclass
class MTGRPOScriptArguments(ScriptArguments):
    """What to train on. Adds to TRL's `ScriptArguments` (`dataset_name`, `dataset_config`, `dataset_*_split`)."""

    tools_script: str | None = field(default=None, metadata={"help": "Python file with TOOL_FUNCTIONS = [...]"})
    reward_fn: str | None = field(
        default=None, metadata={"help": "Python file with TURN_REWARD_FUNCS and OUTCOME_REWARD_FUNCS"}
    )
    system_prompt: str | None = field(
        default=None,
        metadata={"help": "Text of the system message; {tool_descriptions} is filled in. None: the built-in one"},
    )
    dataset_size: int | None = field(default=None, metadata={"help": "Use the first n training rows. None: all"})
    eval_dataset_size: int | None = field(default=None, metadata={"help": "Use the first n test rows. None: all"})


@dataclass
class MTGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` plus what a conversation needs. Raises `ValueError` for combinations that cannot train."""

    credit_assignment: str = field(
        default="mt_grpo",
        metadata={"help": "outcome (GRPO-OR), merged (GRPO-MR), mt_grpo, turn_return, gigpo or turn_credit"},
    )
    turn_advantage_coef: float = field(
        default=1.0, metadata={"help": "Weight of a turn's own advantage beside the outcome's; 0 amounts to outcome"}
    )
    turn_discount: float = field(
        default=1.0, metadata={"help": "Of the returns to go of turn_return and gigpo, per turn, from 0 to 1"}
    )
    turn_reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight per turn reward function. None: 1 each"}
    )
    outcome_reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight per outcome reward function. None: 1 each"}
    )
    max_env_steps: int = field(
        default=2, metadata={"help": "Observations per conversation, error messages included; then one last turn"}
    )
    max_turn_tokens: int | None = field(
        default=None, metadata={"help": "Tokens of one model turn. None: what remains of max_completion_length"}
    )
    max_tool_response_tokens: int = field(
        default=512, metadata={"help": "Tokens of one tool result; a longer one is cut with a visible marker"}
    )
    tool_timeout: float = field(default=30.0, metadata={"help": "Seconds that one tool call may take"})
    max_concurrent_tools: int = field(default=256, metadata={"help": "Tool calls at the same time, per rank"})
    isolate_tools: bool = field(
        default=False,
        metadata={"help": "Run tools without async in processes, which are killed at tool_timeout, not in threads"},
    )
    reward_timeout: float = field(
        default=600.0, metadata={"help": "Seconds that one reward function may take for a rank's batch"}
    )
    weight_sync: str = field(
        default="auto", metadata={"help": "To the vLLM server by nccl (GPUs), disk (shared directory) or auto"}
    )
    weight_sync_dir: str | None = field(
        default=None, metadata={"help": "Shared directory of the disk transport. None: /dev/shm, else the temp dir"}
    )
    weight_check_every: int = field(
        default=10,
        metadata={"help": "Compare logprobs at the first sync, after a restart and every n-th; 0: not at every n-th"},
    )
    vllm_request_timeout: float = field(
        default=600.0, metadata={"help": "Seconds that one generation request to the vLLM server may take"}
    )
    overlap_rollouts: bool = field(
        default=False,
        metadata={"help": "Roll out the next batch while this one is optimised: one step off-policy; server only"},
    )
    log_rollouts: int = field(
        default=16, metadata={"help": "Rollouts per rank and batch that go to output_dir/rollouts.*.jsonl; 0: none"}
    )

    def __post_init__(self):
        check_ranges(self)
        check_mappings(self)
        if self.output_dir == "":
            raise ValueError("output_dir is empty. Expected the path of a folder, which may be new.")
        check_batch_arithmetic(self)
        super().__post_init__()
        check_config(self)
        self.output_dir, self.weight_sync_dir = absolute(self.output_dir), absolute(self.weight_sync_dir)
        self.resume_from_checkpoint = checkpoint_to_resume(self.resume_from_checkpoint, self.output_dir)


CHOICES = {
    "credit_assignment": ("outcome", "merged", "mt_grpo", "turn_return", "gigpo", "turn_credit"),
    "weight_sync": ("auto", "nccl", "disk"),
    "scale_rewards": ("group", "batch", "none"),
    "loss_type": ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_mode": ("server", "colocate"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}

# The values that each number may have, as an interval: `[` includes the bound, `(` does not, and infinity is never
# included. NaN is in no interval. A default is always allowed: `max_steps: -1` means whole epochs, -5 means nothing.
RANGES = {
    key: interval
    for interval, keys in {
        "(-inf, inf)": ("turn_reward_weights", "outcome_reward_weights", "presence_penalty", "frequency_penalty"),
        "[0, inf)": (
            "learning_rate", "weight_decay", "beta", "max_grad_norm", "warmup_steps", "turn_advantage_coef", "top_k",
            "min_tokens", "max_env_steps", "weight_check_every", "log_rollouts", "dataloader_num_workers",
            "num_completions_to_print", "eval_delay", "neftune_noise_alpha", "router_aux_loss_coef", "epsilon",
            "epsilon_high", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "entropy_coef",
            "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
            "vllm_importance_sampling_clip_min", "off_policy_mask_threshold",
        ),
        "(0, inf)": (
            "temperature", "repetition_penalty", "tool_timeout", "reward_timeout", "vllm_server_timeout",
            "vllm_request_timeout", "num_train_epochs", "logging_steps", "save_steps", "eval_steps", "adam_epsilon",
            "delta", "sapo_temperature_neg", "sapo_temperature_pos", "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_cap",
        ),
        "[1, inf)": (
            "max_steps", "num_iterations", "per_device_train_batch_size", "per_device_eval_batch_size",
            "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation", "num_generations_eval",
            "max_completion_length", "max_turn_tokens", "max_concurrent_tools", "dataset_size", "eval_dataset_size",
            "pad_to_multiple_of", "torch_empty_cache_steps", "eval_accumulation_steps", "save_total_limit",
            "dataloader_prefetch_factor", "ddp_bucket_cap_mb", "ddp_timeout", "ref_model_sync_steps", "lora_r",
            "lora_alpha", "vllm_max_model_length", "vllm_tensor_parallel_size",
        ),
        "[2, inf)": ("num_generations",),
        "[10, inf)": ("max_tool_response_tokens",),
        "[0, 1]": ("min_p", "turn_discount", "ref_model_mixup_alpha", "top_entropy_quantile"),
        "(0, 1]": ("top_p", "vllm_gpu_memory_utilization"),
        "[0, 1)": ("adam_beta1", "adam_beta2", "lora_dropout"),
        "[1, 65535]": ("vllm_server_port", "vllm_group_port"),
        "[0, 4294967295]": ("seed",),
    }.items()
    for key in keys
}  # fmt: skip

# TRL settings that have no effect, or another meaning, in a multi-turn rollout: refused, so that no recipe holds a
# line that nothing reads. Key -> (why, what to do).
REFUSED_KEYS = {
    "reward_weights": "turn and outcome rewards are weighted apart: use turn_ and outcome_reward_weights",
    "max_tool_calling_iterations": "this trainer runs its own conversations: use max_env_steps",
    "multi_objective_aggregation": "credit_assignment says how rewards become advantages: remove this key",
    "vllm_structured_outputs_regex": "one pattern cannot fit tool turns and answer turns alike: remove this key",
    "log_multimodal": "rollouts are text only: remove this key",
    "dataset_streaming": "prompts are checked before training starts, which needs them at hand: use dataset_size",
    "ignore_bias_buffers": "TRL keeps it as a debug switch that GRPOTrainer does not read: remove this key",
    **dict.fromkeys(
        ("label_smoothing_factor", "label_names", "average_tokens_across_devices", "prediction_loss_only",
         "eval_do_concat_batches", "include_for_metrics", "batch_eval_metrics"),
        "rewards take the place of labels here, and nothing reads it: remove this key",
    ),
    **dict.fromkeys(
        ("train_sampling_strategy", "length_column_name", "data_seed"),
        "TRL's own sampler keeps the rollouts of a prompt together and reads only `seed`: remove this key",
    ),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict", "local_rank"),
        "nothing reads it, training always runs and eval_strategy says when to evaluate: remove this key",
    ),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
        "quantised policies are not supported either: remove this key",
    ),
    "enable_jit_checkpoint": "SIGTERM saves the run by itself, between two optimizer steps: remove this key",
    "load_in_8bit": "the weights of a quantised policy cannot be pushed to a server: train a LoRA on bf16 weights",
    "load_in_4bit": "the weights of a quantised policy cannot be pushed to a server: train a LoRA on bf16 weights",
}  # fmt: skip
SET_BY_TRANSFORMERS = ("do_eval", "local_rank")  # so that only a recipe's own line can be refused
# Settings of one backend that another does not read; refused there for the same reason.
COLOCATE_KEYS = (
    "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length", "vllm_enable_sleep_mode",
    "vllm_model_impl",
)  # fmt: skip
SERVER_KEYS = (
    "weight_sync", "weight_sync_dir", "weight_check_every", "vllm_server_base_url", "vllm_server_host",
    "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "vllm_request_timeout", "overlap_rollouts",
)  # fmt: skip
VLLM_KEYS = (
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)  # fmt: skip
TRANSFORMERS_KEYS = (
    "cache_implementation", "use_transformers_continuous_batching", "transformers_continuous_batching_config",
)  # fmt: skip


def backend_of(args: GRPOConfig) -> str:
    """`server`, `colocate` or `transformers`: who samples the tokens."""
    return args.vllm_mode if args.use_vllm else "transformers"


def field_of(key: str) -> dataclasses.Field:
    """Where a recipe key is declared, whichever dataclass does it."""
    return next(
        cls.__dataclass_fields__[key]
        for cls in (MTGRPOConfig, MTGRPOScriptArguments, ModelConfig)
        if key in cls.__dataclass_fields__
    )


def default_of(key: str) -> Any:
    f = field_of(key)
    return f.default_factory() if f.default is dataclasses.MISSING else f.default


def choices_of(key: str) -> list:
    """What TRL and transformers let the command line choose from; nothing holds a recipe to it."""
    return field_of(key).metadata.get("choices") or []


def absolute(path: str | None) -> str | None:
    """The same file for the whole run, whatever a tool or a reward does to the working directory."""
    return path and os.path.abspath(os.path.expanduser(path))


def in_range(value: Any, interval: str) -> bool:
    """Whether a number, or text that means one, is in an interval of `RANGES`.

    >>> in_range(1, "(0, 1]"), in_range(0, "(0, 1]"), in_range("1e-6", "[0, inf)"), in_range(math.nan, "(-inf, inf)")
    (True, False, True, False)
    """
    low, high = map(float, interval[1:-1].split(", "))
    number = float(value)
    at_a_bound = (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    return low < number < high or at_a_bound


def range_text(interval: str) -> str:
    """An interval of `RANGES` in words.

    >>> range_text("[0, inf)"), range_text("(0, 1]"), range_text("(-inf, inf)")
    ('a finite number of at least 0', 'a finite number above 0, at most 1', 'a finite number')
    """
    low, high = interval[1:-1].split(", ")
    words = [] if low == "-inf" else [f"{'of at least' if interval[0] == '[' else 'above'} {low}"]
    words += [] if high == "inf" else [f"{'at most' if interval[-1] == ']' else 'below'} {high}"]
    return " ".join(["a finite number", ", ".join(words)]).strip()


def check_ranges(config: Any) -> None:
    """Raise `ValueError` for a number of a dataclass of settings that is not in its interval of `RANGES`."""
    for key in RANGES.keys() & vars(config).keys():
        value = getattr(config, key)
        if value is None or value == default_of(key):
            continue
        if not fits_type(value, known_keys()[key], from_yaml=True):
            raise ValueError(f"{key}={value!r} is {type(value).__name__}, expected {range_text(RANGES[key])}.")
        if key == "pad_to_multiple_of" and isinstance(value, str) and not value.isdigit():
            if value.lower() in ("none", "null"):
                continue
            raise ValueError(f"pad_to_multiple_of={value!r}, expected auto, none or {range_text(RANGES[key])}.")
        for number in value if isinstance(value, list) else [value]:
            if not in_range(number, RANGES[key]):
                raise ValueError(f"{key}={value!r}, expected {range_text(RANGES[key])}.")


def check_mappings(args: GRPOConfig) -> None:
    """Raise `ValueError` with the key's name for a mapping that is neither one, nor JSON, nor a file of it."""
    for key in args._VALID_DICT_FIELDS:
        value = getattr(args, key)
        if not isinstance(value, str):
            continue
        by_path = key in ("accelerator_config", "fsdp_config", "deepspeed") and not value.startswith("{")
        if by_path and not os.path.isfile(value):
            raise ValueError(f"{key}={value!r} is not a file. Expected a JSON file or a mapping.")
        try:
            mapping = json.loads(Path(value).read_bytes() if by_path else value)
        except ValueError as error:
            raise ValueError(f"{key}={value!r} is not JSON ({error}). Expected a mapping.") from None
        if not isinstance(mapping, dict):
            raise ValueError(f"{key}={value!r} is {type(mapping).__name__}, expected a mapping.")


def check_report_to(names: list[str]) -> None:
    """Raise `ValueError` for a logger that transformers does not know, or whose package is not installed."""
    available = get_available_reporting_integrations()
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ValueError(f"report_to: {name!r} is not known. Expected none, or some of: {known}.")
        if name not in (*available, "azure_ml", "flyte"):  # transformers lists these two nowhere or not always
            raise ValueError(
                f"report_to: the package of {name!r} is not installed. Run `pip install {name}`, or remove it."
            )


def check_num_prompts(num_prompts: int, args: GRPOConfig) -> None:
    """Raise `ValueError` where the prompts do not fill one batch of rollouts: TRL's sampler would drop them all."""
    needed = args.generation_batch_size // args.num_generations
    if num_prompts < needed:
        raise ValueError(
            f"The training data has {num_prompts} prompts, but one batch of rollouts needs {needed} "
            f"({args.generation_batch_size} rollouts / num_generations={args.num_generations}), so that no step would "
            f"be taken. Set dataset_size to {needed} or more, or lower per_device_train_batch_size or "
            "gradient_accumulation_steps."
        )


def check_batch_arithmetic(args: GRPOConfig) -> None:
    """Raise `ValueError` with the nearest valid values where `num_generations` does not divide the batch."""
    if args.num_generations is None:
        raise ValueError("num_generations is None. Expected the number of rollouts per prompt, such as 8.")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    per_step = args.per_device_train_batch_size * world_size
    steps = args.steps_per_generation or args.gradient_accumulation_steps
    batch = args.generation_batch_size or per_step * steps
    if batch % args.num_generations:
        divisors = [g for g in range(2, batch + 1) if batch % g == 0]
        nearest = sorted(divisors, key=lambda g: abs(g - args.num_generations))[:2]
        sizes = [s for s in range(1, 10_000) if s * world_size * steps % args.num_generations == 0]
        size = min(sizes, key=lambda s: abs(s - args.per_device_train_batch_size), default=None)
        raise ValueError(
            f"num_generations={args.num_generations} does not divide the {batch} rollouts of a batch "
            f"({args.per_device_train_batch_size} per device x {world_size} processes x {steps} steps). "
            f"Expected whole groups. Set num_generations to {' or '.join(map(str, nearest)) or 'a divisor'}"
            + (f", or per_device_train_batch_size to {size}." if size and not args.generation_batch_size else ".")
        )


def check_config(args: MTGRPOConfig) -> None:
    """Raise `ValueError` (got, expected, what to do) for settings that cannot work together."""
    for key, allowed in CHOICES.items():
        if getattr(args, key) not in allowed:
            raise ValueError(f"{key}={getattr(args, key)!r} is not known. Expected one of: {', '.join(allowed)}.")
    for key, reason in REFUSED_KEYS.items():
        if hasattr(args, key) and key not in SET_BY_TRANSFORMERS and getattr(args, key) != default_of(key):
            raise ValueError(f"{key}={getattr(args, key)!r} is not supported: {reason}.")
    backend = backend_of(args)
    inert = {
        "server": COLOCATE_KEYS + TRANSFORMERS_KEYS,
        "colocate": SERVER_KEYS + TRANSFORMERS_KEYS,
        "transformers": SERVER_KEYS + COLOCATE_KEYS + VLLM_KEYS,
    }[backend]
    for key in inert:
        if getattr(args, key) != default_of(key):
            raise ValueError(
                f"{key}={hide_password(repr(getattr(args, key)))} has no effect with the {backend} backend "
                f"(use_vllm={args.use_vllm}, vllm_mode={args.vllm_mode}). Remove it, or choose the backend that reads "
                "it."
            )
    if backend == "colocate" and args.vllm_tensor_parallel_size > 1:
        raise ValueError(
            f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}: a colocated engine over several GPUs needs "
            "the same number of prompts on each, which conversations of unequal length do not have. Use a vLLM server."
        )
    check_generation_kwargs(args, backend)
    check_report_to(args.report_to)
    check_save_points(args)
    if args.max_completion_length is None:
        raise ValueError("max_completion_length is None. Expected the token budget of a conversation, such as 1024.")
    if args.overlap_rollouts:
        check_overlap(args)
    if args.turn_discount != 1.0 and args.credit_assignment not in ("turn_return", "gigpo"):
        raise ValueError(
            f"turn_discount={args.turn_discount} has no effect with credit_assignment={args.credit_assignment!r}: "
            "only turn_return and gigpo sum what comes after a turn. Remove it, or use one of them."
        )
    if args.turn_advantage_coef != 1.0 and args.credit_assignment in ("outcome", "merged"):
        raise ValueError(
            f"turn_advantage_coef={args.turn_advantage_coef} has no effect with "
            f"credit_assignment={args.credit_assignment!r}, which has no turn's own term. Set it to 1.0 or remove it."
        )
    if args.credit_assignment not in ("outcome", "merged"):
        # Both decide per sequence from one advantage; with an advantage per token they would decide per token.
        if args.off_policy_mask_threshold is not None:
            raise ValueError(
                f"off_policy_mask_threshold masks whole sequences by the sign of their advantage, which "
                f"credit_assignment={args.credit_assignment!r} gives per turn. Remove it, or use outcome or merged."
            )
        if args.loss_type == "vespo":
            raise ValueError(
                f"loss_type='vespo' weighs whole sequences by the sign of their advantage, which "
                f"credit_assignment={args.credit_assignment!r} gives per turn. Use another loss, or outcome or merged."
            )


def check_overlap(args: MTGRPOConfig) -> None:
    """Raise `ValueError` where rollouts one step behind the weights would be trained as if they were not."""
    if not args.vllm_importance_sampling_correction:
        raise ValueError(
            "overlap_rollouts trains on rollouts of the weights before the last step, which needs their importance "
            "ratio. Set vllm_importance_sampling_correction: true, or remove overlap_rollouts."
        )
    if args.steps_per_generation * args.num_iterations % args.gradient_accumulation_steps:
        raise ValueError(
            f"overlap_rollouts with several batches of rollouts in one optimizer step "
            f"(steps_per_generation={args.steps_per_generation} x num_iterations={args.num_iterations}, "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}) has nothing to overlap with. Set "
            f"steps_per_generation to a multiple of gradient_accumulation_steps."
        )


def check_ddp_timeout(args: MTGRPOConfig, num_processes: int) -> None:
    """Raise `ValueError` where the other ranks would give up one that waits no longer than it may."""
    # For one answer: none in time, sent again until just before it is given up, none.
    answer = 2 * args.vllm_request_timeout + args.vllm_server_timeout
    waits = {"reward_timeout": args.reward_timeout}
    waits |= {"2 * vllm_request_timeout + vllm_server_timeout": answer} if backend_of(args) == "server" else {}
    for what, seconds in waits.items():
        if num_processes > 1 and seconds >= args.ddp_timeout:
            raise ValueError(
                f"{what} = {seconds:g} s: a rank that waits so long would be given up by the others after "
                f"ddp_timeout={args.ddp_timeout} s. Set ddp_timeout above it."
            )


def checkpoint_to_resume(wanted: str | bool | None, output_dir: str) -> str | None:
    """The folder that `resume_from_checkpoint` names; `last` or `true` is the newest whole one of `output_dir`."""
    if not wanted:
        return None
    # Written last, so a checkpoint without it was cut off. The newest, not the last by number: that may be of an older
    # run that went on for longer in the same folder.
    whole = [path.parent for path in Path(output_dir).glob("checkpoint-*/trainer_state.json")]
    whole = [folder for folder in whole if re.fullmatch(r"checkpoint-\d+", folder.name)]
    whole.sort(key=lambda folder: -int(folder.name.rpartition("-")[2]))
    newest = max(whole, key=lambda folder: (folder / "trainer_state.json").stat().st_mtime, default=None)
    if whole and newest != whole[0]:
        logger.warning(f"{newest} is the newest checkpoint, written after {whole[0]}.")
    found = newest if str(wanted).lower() in ("last", "true") else Path(absolute(str(wanted)))
    if found is None or not (found / "trainer_state.json").is_file():
        raise ValueError(
            f"resume_from_checkpoint={wanted!r} is no whole checkpoint: it has no trainer_state.json. "
            + (f"Expected one such as {newest}." if newest else f"There is none in output_dir={output_dir!r}.")
        )
    if not any(path for name in STATE_FILES for path in found.glob(name)):
        raise ValueError(
            f"resume_from_checkpoint={str(found)!r} has a model only (save_only_model). To start from its weights, "
            f"set model_name_or_path: {found} instead."
        )
    if damage := checkpoint_damage(found):
        others = [folder for folder in whole if folder.resolve() != found.resolve() and not checkpoint_damage(folder)]
        before = max(others, key=lambda folder: (folder / "trainer_state.json").stat().st_mtime, default=None)
        raise ValueError(
            f"resume_from_checkpoint={str(wanted)!r}: {found / damage}. Expected a whole checkpoint. "
            + (f"Set resume_from_checkpoint: {before}" if before else f"There is none in output_dir={output_dir!r}")
            + ", or put the file back."
        )
    return str(found)


# What a checkpoint has besides the model: of Trainer, of FSDP, of DeepSpeed. With `save_only_model` it has none of it.
STATE_FILES = ("optimizer*", "scheduler.pt", "rng_state*.pth", "latest")
MODEL_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin*", "adapter_model.*",
               "pytorch_model_fsdp*", "*/adapter_model.*")  # fmt: skip
RUN_RECORD = "mt_grpo_run.json"  # beside trainer_state.json: the settings that the checkpoint was trained with


def checkpoint_damage(folder: Path) -> str | None:
    """The part of a checkpoint that is missing or torn, and what is wrong with it; None for a whole one.

    Reads the heads of the files only. Knows the forms of `Trainer`, LoRA, FSDP (folders of `.distcp` files, or
    `.bin`) and DeepSpeed (a folder that `latest` names, with the model, the optimizer and its scheduler).
    """
    record = read_json(folder / RUN_RECORD) or {}
    if not isinstance((read_json(folder / "trainer_state.json") or {}).get("global_step"), int):
        return "trainer_state.json cannot be read"
    deepspeed = (folder / "latest").is_file()
    expected = [] if deepspeed else ["scheduler.pt"]
    if deepspeed:
        states = (folder / "latest").read_text().strip()
        if not states or not any(folder.glob(f"{states}/*_states.pt")):
            return f"{states or 'latest'} has no states of the model and the optimizer"
    else:
        if not any(path for name in MODEL_FILES for path in folder.glob(name)):
            is_lora = (folder / "adapter_config.json").is_file()
            expected.append("adapter_model.safetensors" if is_lora else "model.safetensors")
        in_fsdp_form = any(path.is_dir() or path.suffix == ".bin" for path in folder.glob("optimizer*"))
        if in_fsdp_form and not any(folder.glob("pytorch_model_fsdp*")):
            return "pytorch_model_fsdp* is missing"
        expected += [] if in_fsdp_form else ["optimizer.pt"]
    for index in folder.glob("*.index.json"):
        if not (shards := (read_json(index) or {}).get("weight_map")):
            return f"{index.name} cannot be read"
        expected += sorted(set(shards.values()))
    numbers = [int(path.stem.rpartition("_")[2]) for path in folder.glob("rng_state_*.pth")]
    world_size = record.get("world_size") or max(numbers, default=0) + 1
    if not record.get("save_on_each_node"):  # else the other nodes have theirs
        alone = world_size == 1 and not numbers
        expected += ["rng_state.pth"] if alone else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    expected += ["entropy_ctrl_state.json"] if record.get("use_adaptive_entropy") else []
    for name in expected:
        if not (folder / name).is_file():
            return f"{name} is missing"
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".distcp" and not (path.parent / ".metadata").is_file():
            return f"{path.parent.relative_to(folder)}/.metadata is missing"
        if path.is_file() and (wrong := file_damage(path)):
            return f"{path.relative_to(folder)} {wrong}"
    return None


def read_json(path: Path) -> dict | None:
    """The object in a JSON file; None for a file that is missing, torn, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def file_damage(path: Path) -> str | None:
    """What is wrong with a file of weights or states, as far as its head and its length tell; else None."""
    fsdp = path.name == ".metadata" or path.suffix == ".distcp"
    if path.name == "training_args.bin" or not (fsdp or path.suffix in (".safetensors", ".bin", ".pt", ".pth")):
        return None
    size = path.stat().st_size
    if size == 0:
        return "is empty"
    if path.suffix == ".safetensors":
        try:
            with open(path, "rb") as file:
                header = file.read(min(int.from_bytes(file.read(8), "little"), size))
            ends = [entry["data_offsets"][1] for n, entry in json.loads(header).items() if n != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "has no readable header"
        whole = 8 + len(header) + max(ends, default=0)
        return None if size == whole else f"has {size} bytes, expected {whole}"
    if fsdp:
        return None
    with open(path, "rb") as file:
        is_pickle = file.read(1) == b"\x80"  # as torch wrote it before it wrote zip files
    try:
        if not is_pickle:
            zipfile.ZipFile(path).close()
    except zipfile.BadZipFile:
        return f"is cut off or damaged ({size} bytes)"
    return None


# Settings that change nothing in what is trained: keys that begin so are left out of a checkpoint's record.
NOT_TRAINED = (
    "output_dir", "resume_from_checkpoint", "logging_", "log_", "save_", "hub_", "push_", "report_to", "run_name",
    "project", "trackio_", "eval_", "per_device_eval_", "num_generations_eval", "include_", "disable_tqdm",
    "num_completions_to_print", "ddp_", "skip_memory_metrics", "debug", "vllm_server_", "vllm_group_port",
    "vllm_request_timeout", "vllm_gpu_memory_utilization", "weight_sync", "weight_check_every", "load_best_model",
    "metric_for_best_model", "greater_is_better", "restore_callback", "max_concurrent_tools", "reward_timeout",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent", "dataloader_prefetch",
)  # fmt: skip
# Settings that decide which prompts a step trains on, and those that a checkpoint's optimizer state holds itself.
ORDER_KEYS = (
    "world_size", "dataset_rows", "dataset_sha256", "per_device_train_batch_size", "gradient_accumulation_steps",
    "steps_per_generation", "generation_batch_size", "num_iterations", "num_generations", "seed", "shuffle_dataset",
    "ignore_data_skip", "dataloader_drop_last",
)  # fmt: skip
LORA_KEYS = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora")
OPTIMIZER_KEYS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:12]


def source_sha256(function: Callable) -> str | None:
    """Of the file that defines a function; None where there is no such file."""
    try:
        return sha256(Path(inspect.getsourcefile(inspect.unwrap(function))).read_bytes())
    except (TypeError, OSError):  # a built-in one, a callable object, a notebook
        return None


def dataset_sha256(dataset: Any) -> str:
    """Of all rows, whatever file they came from and in whatever order the columns are."""
    columns = {name: sha256(json.dumps(list(dataset[name]), default=str)) for name in sorted(dataset.column_names)}
    return sha256(json.dumps(columns))


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line per setting that a resumed run has otherwise than its checkpoint's record.

    >>> changed_settings({"seed": 1, "beta": 0.0, "gone": 1}, {"seed": 2, "beta": 0.0, "new": 1})
    ['seed: 1 -> 2 (the order of the prompts is another one: some are trained on twice, others not at all)']
    """
    notes = dict.fromkeys(
        ORDER_KEYS, " (the order of the prompts is another one: some are trained on twice, others not at all)"
    ) | dict.fromkeys(OPTIMIZER_KEYS, " (without effect: the optimizer's saved state keeps the first)")
    return [
        f"{key}: {before[key]!r} -> {now[key]!r}{notes.get(key, '')}"
        for key in now
        if key in before and before[key] != now[key]
    ]


def check_save_points(args: MTGRPOConfig) -> None:
    """Raise `ValueError` where a checkpoint would fall between two updates from the same rollouts.

    A resumed run rolls out anew, so only from a checkpoint between two batches of rollouts does it go on exactly.
    Evaluations are such places too: a run that is interrupted there saves itself, and `save_strategy: best` saves.
    """
    per_batch = args.steps_per_generation * args.num_iterations  # forward passes that one batch of rollouts serves
    every = per_batch // math.gcd(per_batch, args.gradient_accumulation_steps)
    for key, strategy in (("save_steps", args.save_strategy), ("eval_steps", args.eval_strategy)):
        given = getattr(args, key)
        if strategy != "steps" or not given or every == 1:
            continue
        if given < 1 and args.max_steps <= 0:
            raise ValueError(
                f"{key}={given}, a share of all steps, needs max_steps. Set {key} to a multiple of {every}."
            )
        steps = given if given >= 1 else math.ceil(args.max_steps * given)
        if steps % every:
            below = int(steps // every * every)
            what = "save" if key == "save_steps" else "evaluate, and save where it is interrupted,"
            raise ValueError(
                f"{key}={given} would {what} in the middle of a batch of rollouts, from where a run cannot "
                f"be resumed exactly: a batch lasts {every} optimizer steps "
                f"(steps_per_generation={args.steps_per_generation} x num_iterations={args.num_iterations} / "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}). "
                f"Set {key} to {f'{below} or ' if below else ''}{below + every}"
                + (" (without it, logging_steps counts)." if key == "eval_steps" else ".")
            )


def check_generation_kwargs(args: GRPOConfig, backend: str) -> None:
    """Raise `ValueError` for what the backend does not know, or what the conversation itself decides."""
    ours = {"n", "max_tokens", "max_new_tokens", "num_return_sequences", "stop", "prompt", "model", "logprobs",
            "stream", "seed", "stop_token_ids", "eos_token_id", "return_token_ids",
            "include_stop_str_in_output"}  # fmt: skip
    known = {"presence_penalty", "frequency_penalty", "min_tokens", "bad_words", "logit_bias", "allowed_token_ids",
             "temperature", "top_p", "top_k", "min_p", "repetition_penalty"}  # fmt: skip
    for key in args.chat_template_kwargs or {}:
        if not isinstance(key, str) or key in ("conversation", "tokenize", "add_generation_prompt", "return_dict"):
            raise ValueError(f"chat_template_kwargs: {key!r} is set by the conversation, or no text. Remove it.")
    for key, value in (args.generation_kwargs or {}).items():
        if key in ours:
            raise ValueError(f"generation_kwargs: {key!r} is set per turn by the conversation. Remove it.")
        if key not in known if backend != "transformers" else not hasattr(GenerationConfig(), key):
            raise ValueError(f"generation_kwargs: {key!r} is not known to the {backend} backend. Remove it.")
        if key in RANGES and not (fits_type(value, float) and in_range(value, RANGES[key])):
            raise ValueError(f"generation_kwargs: {key}={value!r}, expected {range_text(RANGES[key])}.")


def fits_type(value: Any, expected: Any, from_yaml: bool = False) -> bool:
    """Whether a value is of an annotated type. `1e-6`, a string to YAML, counts there as a float.

    >>> fits_type(7.5, int), fits_type(7, float), fits_type("1e-6", float, from_yaml=True), fits_type(None, int | None)
    (False, True, True, True)
    """
    origin = typing.get_origin(expected)
    if expected is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits_type(value, option, from_yaml) for option in typing.get_args(expected))
    if origin is list:
        options = typing.get_args(expected)
        return isinstance(value, list) and all(fits_type(v, options[0], from_yaml) for v in value if options)
    if origin is dict or expected is dict:
        return isinstance(value, dict)
    if origin is typing.Literal:
        return value in typing.get_args(expected)
    if expected is float and from_yaml and isinstance(value, str):
        return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value) is not None
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(expected, type) and issubclass(expected, Enum):
        return isinstance(value, (str, expected))
    if isinstance(expected, type) and expected in (str, bool, list, tuple, type(None)):
        return isinstance(value, expected)
    return True  # classes of settings: the dataclass itself converts and refuses them


class RecipeLoader(yaml.SafeLoader):
    """YAML's safe loader, which takes the last of two equal keys without a word; this one refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, collections.abc.Hashable) and lines.setdefault(key, line) != line:
                raise yaml.YAMLError(
                    f"{key!r} is set on line {lines[key]} and again on line {line}. Remove one of them."
                )
        return super().construct_mapping(node, deep)


def check_variables(variables: Any, path: str) -> None:
    """Raise `ValueError` unless the `env` of a recipe can be set as environment variables."""
    if not isinstance(variables, dict):
        raise ValueError(
            f"env: {variables!r} in {path} is {type(variables).__name__}, expected lines of `NAME: value`."
        )
    for name, value in variables.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^=\0]+", name):
            raise ValueError(
                f"env: {name!r} in {path} is no name of an environment variable. Expected text without =."
            )
        if not isinstance(value, (str, int, float)) or "\0" in str(value):
            raise ValueError(f'env: {name}: {value!r} in {path}, expected text or a number (quote what is empty: "").')


class RecipeParser(TrlParser):
    """`TrlParser` that raises `ValueError` where `argparse` would print its help and exit."""

    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(f"{message[:1].upper()}{message[1:].rstrip('.')}.")


def read_recipe(path: str) -> dict[str, Any]:
    """The YAML mapping of a recipe file, every key known and every value of its type. Raises `ValueError`."""
    try:
        recipe = yaml.load(Path(path).read_text(encoding="utf-8"), RecipeLoader)
    except OSError as error:
        raise ValueError(
            f"The recipe {path!r} cannot be read: {error.strerror}. See hf_recipes/ for examples."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"The recipe {path!r} is not UTF-8 text ({error}). Expected lines of `key: value`.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"The recipe {path!r} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path!r} holds {type(recipe).__name__}, expected lines of `key: value`.")
    known = known_keys()
    for key, value in recipe.items():
        if key == "env":
            check_variables(value, path)
            continue
        if key not in known:
            raise ValueError(unknown_key(key, f"in {path}", known))
        if not fits_type(value, known[key], from_yaml=True):
            name = getattr(known[key], "__name__", None) if isinstance(known[key], type) else str(known[key])
            hint = " YAML reads no, off, yes and on as such: quote them." if isinstance(value, bool) else ""
            raise ValueError(f"{key}: {value!r} in {path} is {type(value).__name__}, expected {name}.{hint}")
        choices = CHOICES.get(key) or choices_of(key)
        if choices and value not in (*choices, default_of(key)):
            raise ValueError(f"{key}: {value!r} in {path} is not known. Expected one of: {', '.join(choices)}.")
        if key in REFUSED_KEYS and value != default_of(key):
            raise ValueError(f"{key}: {value!r} in {path} is not supported: {REFUSED_KEYS[key]}.")
    return recipe


@functools.cache
def known_keys() -> dict[str, Any]:
    """Every recipe key with its annotated type."""
    classes = (ModelConfig, MTGRPOScriptArguments, MTGRPOConfig)
    return {k: v for cls in classes for k, v in typing.get_type_hints(cls).items() if k in cls.__dataclass_fields__}


def unknown_key(key: str, where: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=1)
    return f"Unknown key {key!r} {where}." + (
        f" Did you mean {near[0]!r}?" if near else " See docs/recipes.md for the keys."
    )


def parse_arguments(argv: list[str] | None = None) -> tuple[MTGRPOScriptArguments, MTGRPOConfig, ModelConfig]:
    """Recipe (`--config x.yaml`) and command line (`--max_steps 5`, which wins) to checked dataclasses.

    Raises `ValueError` before anything is loaded: unknown keys (with the nearest known one), types, choices, batches.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    argv = join(a.split("=", 1) if a.startswith("--config=") else [a] for a in argv)
    if "--config" in argv:
        position = argv.index("--config") + 1
        if argv.count("--config") > 1:
            raise ValueError("--config is given twice. Expected one recipe: put the keys of both into it.")
        if position == len(argv) or argv[position].startswith("--") or not argv[position]:
            raise ValueError("--config needs a recipe, such as --config hf_recipes/tiny/calculator.yaml.")
        read_recipe(argv[position])
    given = [a[2:].split("=")[0].replace("-", "_") for a in argv if a.startswith("--")]
    for key in given:
        if key not in ("config", "help") and key.removeprefix("no_") not in known_keys():
            raise ValueError(unknown_key(key, "on the command line", known_keys()))
    for key, count in collections.Counter(key.removeprefix("no_") for key in given).items():
        if count > 1:
            logger.warning(f"--{key} is given {count} times on the command line: the last one counts.")
    if re.search(r"--vllm[_-]mode[ =]colocate", " ".join(argv)):  # a recipe's server is then of no use
        address = {"vllm_server_host", "vllm_server_port"} - set(given)
        argv += [f"--{key}={default_of(key)}" for key in address]
    parser = RecipeParser((MTGRPOScriptArguments, MTGRPOConfig, ModelConfig))
    try:
        script_args, args, model_args, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    except (TypeError, AttributeError, LookupError, OSError, ImportError, NotImplementedError) as error:
        raise ValueError(f"The settings cannot be used: {type(error).__name__}: {error}") from error
    if rest:
        raise ValueError(f"Unknown arguments {rest}. Expected `--key value`, and the recipe behind --config.")
    check_ranges(script_args)
    check_ranges(model_args)
    for key, reason in REFUSED_KEYS.items():
        for parsed in (script_args, model_args):
            if getattr(parsed, key, default_of(key)) != default_of(key):
                raise ValueError(f"{key}={getattr(parsed, key)!r} is not supported: {reason}.")
    for key in (
        f.name for f in dataclasses.fields(ModelConfig) if f.name.startswith(("lora_", "use_rslora", "use_dora"))
    ):
        if not model_args.use_peft and getattr(model_args, key) != default_of(key):
            raise ValueError(f"{key}={getattr(model_args, key)!r} has no effect without use_peft: true.")
    for key, value in (
        ("dataset_name", script_args.dataset_name), ("tools_script", script_args.tools_script),
        ("reward_fn", script_args.reward_fn), ("model_name_or_path", model_args.model_name_or_path),
    ):  # fmt: skip
        if not value:
            raise ValueError(f"{key} is not set. Add a line `{key}: ...` to the recipe; hf_recipes/ has examples.")
    make_paths_absolute(script_args, model_args)
    return script_args, args, model_args


def make_paths_absolute(script_args: MTGRPOScriptArguments, model_args: ModelConfig) -> None:
    """Those that a recipe gives from the folder where the run starts; `MTGRPOConfig` does its own."""
    for config, key in ((script_args, "tools_script"), (script_args, "reward_fn")):
        setattr(config, key, absolute(getattr(config, key)))
    for config, key in ((script_args, "dataset_name"), (model_args, "model_name_or_path")):  # names on the Hub, too
        if getattr(config, key) not in GENERATED_DATASETS and os.path.exists(os.path.expanduser(getattr(config, key))):
            setattr(config, key, absolute(getattr(config, key)))
    if folder := os.environ.get("TENSORBOARD_LOGGING_DIR"):
        os.environ["TENSORBOARD_LOGGING_DIR"] = absolute(folder)


# =====================================================================================================================
# Data types
# =====================================================================================================================


class StopReason(StrEnum):
    """Why a conversation ended; logged as `stop/<reason>`."""

    ANSWERED = "answered"  # the model closed an <answer>
    NO_TOOL_CALL = "no_tool_call"  # the model ended its turn with neither a call nor an answer
    MAX_TURNS = "max_turns"  # a further call after max_env_steps observations
    MAX_TOKENS = "max_tokens"  # max_completion_length, or max_turn_tokens outside a call, is spent
    CONTEXT_LENGTH = "context_length"  # the model's context is full


@dataclass(frozen=True)
class ToolCall:
    """What the model asked for. `error` says why it cannot be run: the policy's mistake, which it gets to read."""

    name: str | None
    arguments: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class Generation:
    """One sampled continuation: ids as sampled, their logprobs under the sampling distribution (None: not known)."""

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str  # "stop" (end-of-turn token or stop text) or "length"


@dataclass
class Turn:
    """One model turn and what the environment answered."""

    token_ids: list[int]  # as sampled, cut after the token that completes the turn
    logprobs: list[float] | None
    text: str
    finish_reason: str
    tool_call: ToolCall | None = None
    observation: str | None = None  # what the model gets to read, without the tags
    observation_ids: list[int] = field(default_factory=list)  # end of turn, message, generation prompt
    error: str | None = None  # "call" (the policy's mistake), "tool" (it raised), "timeout"
    state_key: Any = None  # names the state in which the turn began (`gigpo`); None: the whole conversation so far
    seconds: float = 0.0  # of generation
    tool_seconds: float = 0.0


def join(parts: typing.Iterable[list]) -> list:
    """One list of them all."""
    return list(itertools.chain.from_iterable(parts))


@dataclass
class Rollout:
    """One conversation. All ids and masks are derived from the turns, so they cannot disagree.

    >>> r = Rollout([], [1, 2, 3], turns=[Turn([10, 11], [-.1, -.2], "", "stop", observation_ids=[20]),
    ...                                   Turn([30], [-.3], "", "stop")])
    >>> r.completion_ids, r.loss_mask, r.turn_ids, r.logprobs
    ([10, 11, 20, 30], [1, 1, 0, 1], [0, 0, -1, 1], [-0.1, -0.2, 0.0, -0.3])
    """

    prompt_messages: list[dict[str, str]]
    prompt_ids: list[int]
    index: int = 0  # position in the whole batch: rank * B + i
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason | None = None  # None: still open
    policy_version: int = 0  # weight changes (optimizer steps, loads) before the weights that sampled all its turns

    # Parts are joined in C: every step runs these over every token of the batch.

    @property
    def completion_ids(self) -> list[int]:
        return join(part for t in self.turns for part in (t.token_ids, t.observation_ids))

    @property
    def loss_mask(self) -> list[int]:
        return join(part for t in self.turns for part in ([1] * len(t.token_ids), [0] * len(t.observation_ids)))

    @property
    def turn_ids(self) -> list[int]:
        return join(
            part for k, t in enumerate(self.turns) for part in ([k] * len(t.token_ids), [-1] * len(t.observation_ids))
        )

    @property
    def logprobs(self) -> list[float] | None:
        if any(turn.logprobs is None for turn in self.turns):
            return None
        return join(part for t in self.turns for part in (t.logprobs, [0.0] * len(t.observation_ids)))

    @property
    def messages(self) -> list[dict[str, str]]:
        """The completion as messages: assistant turns, and observations as the user messages that the model saw."""
        messages = []
        for turn in self.turns:
            messages.append({"role": "assistant", "content": turn.text})
            if turn.observation is not None:
                messages.append({"role": "user", "content": result_message(turn.observation)})
        return messages


def pad_rows(rows: list[list], width: int, filler: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of unequal length as one tensor, (B, width).

    >>> pad_rows([[1, 2], [3]], 3, -1, torch.long)
    tensor([[ 1,  2, -1],
            [ 3, -1, -1]])
    """
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows], dtype=dtype)


def pad_turn_ids(rollouts: list[Rollout], width: int) -> torch.Tensor:
    """The `turn_ids` of all rollouts, (B, width), -1 where there is padding.

    >>> rollout = Rollout([], [], turns=[Turn([5, 6], None, "", "stop", observation_ids=[7]), Turn([8], None, "", "")])
    >>> pad_turn_ids([rollout], 6)
    tensor([[ 0,  0, -1,  1, -1, -1]])
    """
    owners, lengths = [], []
    for rollout in rollouts:
        start = len(lengths)
        for k, turn in enumerate(rollout.turns):
            owners += (k, -1)
            lengths += (len(turn.token_ids), len(turn.observation_ids))
        owners.append(-1)
        lengths.append(width - sum(lengths[start:]))
    return torch.tensor(owners).repeat_interleave(torch.tensor(lengths)).view(len(rollouts), width)


# =====================================================================================================================
# Credit assignment
#
# Pure functions on the whole batch, groups of G consecutive rollouts. NaN means "has no value" and is left out of
# every statistic. With R^O the weighted outcome rewards, r_k those of turn k, R^T their sum over turns, c the coef,
# gamma the turn_discount, and the return to go G_k = sum_{l >= k} gamma^(l-k) r_l:
#
#   outcome      norm(R^O)                           GRPO, outcome rewards only (GRPO-OR in arXiv 2505.11821)
#   merged       norm(R^O + R^T)                     one advantage from the sum of everything (GRPO-MR)
#   mt_grpo      norm(R^O) + c * norm(r_k)           turns that got an observation (eq. 5 of the paper)
#                norm(R^O)                           the other turns of such a rollout
#                norm(R^O + c * R^T)                 rollouts without any observation
#   turn_return  norm(R^O) + c * norm(G_k)           over the rollouts of the group that sampled turn k
#   gigpo        norm(R^O) + c * norm(G_k)           over the turns of the group in the same state (arXiv 2505.10978)
#   turn_credit  norm(R^O) + c * (r_k - mean_l r_l)  shaping inside a rollout; turns without a reward: norm(R^O)
#
# A turn reward that is one number per rollout (the paper's form) is compared over the whole group, and its term goes
# to the turns up to and including the first that got an observation; a rollout without any has it on all its turns.
#
# INVARIANT: a baseline of turn k may depend on what happened before turn k's own decision, never on how the rollout
# ended: G_k first, then its mean over everyone who stood at k. Normalising r_k per turn index and then accumulating
# subtracts more from a rollout the longer it goes on, and so teaches when to stop whatever the rewards say. mt_grpo
# compares callers with callers, as in the paper, and so keeps this only where turn rewards do not depend on calling.
# Scaling sets the exchange rate between the two terms: with `group` or `batch` an outcome that varies much and a turn
# reward that varies little weigh the same. Only with `none` is the sum of rewards what is maximised.
# INVARIANT: rewards are gathered over all ranks before any of this, because a group may straddle ranks.
# FORK: change credit here; add a function to CREDIT_ASSIGNMENTS and its name to CHOICES.
# =====================================================================================================================

NAN = float("nan")


def nanstd(x: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Unbiased standard deviation over `dim` (kept), without NaN entries; NaN where fewer than two values are left."""
    count = (~x.isnan()).sum(dim, keepdim=True)
    deviation = x - x.nanmean(dim, keepdim=True)
    return (deviation.square().nansum(dim, keepdim=True) / (count - 1).clamp(min=0)).sqrt()


def norm(x: torch.Tensor, group_size: int, scale_rewards: str = "group") -> torch.Tensor:
    """The group-relative value `(x - mean_G x) / (std_G x + 1e-4)` of GRPO (arXiv 2402.03300, TRL's constant).

    Args:
        x: (N,) or (N, K), NaN where a rollout has no value; with K columns each is a set of its own.
        group_size: G; rows [iG, (i+1)G) are one prompt's.
        scale_rewards: divide by the standard deviation of the `group`, of all centred values in the `batch`, or by 1
            (`none`). The group's own standard deviation biases choices between rewards of equal mean and unequal
            variance: where stopping pays Bernoulli(0.3) and going on always 0.3, stopping gets 0.28 less.

    Returns:
        Same shape; 0 where x is NaN, where a set has fewer than two values, and where its values are all equal.

    >>> norm(torch.tensor([1., 0., 1., 0.]), 4, "none")
    tensor([ 0.5000, -0.5000,  0.5000, -0.5000])
    >>> norm(torch.tensor([1., 0., NAN, 5., 5., NAN]), 3)  # the second group has no spread
    tensor([ 0.7070, -0.7070,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    groups = x.view(-1, group_size, *x.shape[1:])  # (N/G, G, ...)
    centred = groups - groups.nanmean(1, keepdim=True)
    low = groups.nan_to_num(float("inf")).amin(1, keepdim=True)
    high = groups.nan_to_num(float("-inf")).amax(1, keepdim=True)
    if scale_rewards == "group":
        centred = centred / (nanstd(groups, 1) + 1e-4)
    elif scale_rewards == "batch":
        compared = centred.where((~groups.isnan()).sum(1, keepdim=True) > 1, NAN)  # a value alone is no spread
        centred = centred / (nanstd(compared, tuple(range(centred.dim()))) + 1e-4)
    # Equal values must give exactly 0, not a rounding error divided by 1e-4.
    return torch.where(high > low, centred, 0.0).nan_to_num(0.0).view(x.shape)


def norm_by_state(x: torch.Tensor, state: torch.Tensor, group_size: int, scale_rewards: str) -> torch.Tensor:
    """`norm` of x (N, K) over the turns of a group whose `state` (N, K) is the same number. Memory: some N G K^2.

    >>> norm_by_state(torch.tensor([[1., 5.], [3., 9.]]), torch.tensor([[7, 8], [7, 7]]), 2, "none")
    tensor([[-3.3333,  0.0000],
            [-1.3333,  4.6667]])
    """
    size = group_size * x.shape[1]
    flat, keys = x.reshape(-1, size), state.reshape(-1, size)  # (N/G, GK)
    # Which of the group's turns was the first in this one's state; each first turn names a column of its own.
    first = (keys[:, :, None] == keys[:, None, :]).int().argmax(2, keepdim=True)  # (N/G, GK, 1)
    sets = torch.where(first == torch.arange(size, device=x.device), flat[:, :, None], NAN)
    return norm(sets.view(-1, size), size, scale_rewards).view(sets.shape).gather(2, first).view(x.shape)


def nansum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` without NaN entries; NaN where there is nothing but NaN.

    >>> nansum(torch.tensor([[1., NAN], [NAN, NAN]]), 1)
    tensor([1., nan])
    """
    return torch.where(x.isnan().all(dim), NAN, x.nansum(dim))


@dataclass
class RewardTable:
    """The weighted rewards of a whole batch, NaN for None."""

    outcome: torch.Tensor  # (N,) R^O
    rollout_turn: torch.Tensor  # (N,) turn rewards given as one number per rollout
    turn: torch.Tensor  # (N, K) turn rewards given per turn
    observed: torch.Tensor  # (N, K) bool: the turn got an observation
    sampled: torch.Tensor  # (N, K) bool: the rollout has this turn
    state: torch.Tensor  # (N, K) int64: equal where two turns of a group began in the same state

    @property
    def turn_total(self) -> torch.Tensor:
        """R^T, (N,): 0 where a rollout has no turn reward."""
        return self.rollout_turn.nan_to_num(0.0) + self.turn.nansum(1)

    def returns_to_go(self, discount: float) -> torch.Tensor:
        """G_k = r_k + discount * G_{k+1}, (N, K): None counts as 0; NaN where there is no turn k."""
        rewards, to_go = self.turn.nan_to_num(0.0), torch.zeros_like(self.turn)
        for k in reversed(range(to_go.shape[1])):
            to_go[:, k] = rewards[:, k] + (discount * to_go[:, k + 1] if k + 1 < to_go.shape[1] else 0.0)
        return to_go.where(self.sampled, NAN)

    def rollout_turn_advantages(self, group_size: int, scale_rewards: str) -> torch.Tensor:
        """(N, K): `norm` of the per-rollout turn rewards, on the turns with no observation before them."""
        up_to_first = self.observed.int().cumsum(1) - self.observed.int() == 0
        return norm(self.rollout_turn, group_size, scale_rewards)[:, None] * up_to_first


# Every estimator: (rewards, group_size, coef, scale_rewards, discount) -> (N, K).


def example() -> RewardTable:
    """The batch of the doctests: rollout A calls twice (0.2, 0.6) and answers right; B calls once (0.4), and wrong.

    Both begin in state 0; after their first calls they stand in the same state 1, A after its second in state 2.
    """
    return RewardTable(
        outcome=torch.tensor([1.0, 0.0]),
        rollout_turn=torch.full((2,), NAN),
        turn=torch.tensor([[0.2, 0.6, NAN], [0.4, NAN, NAN]]),
        observed=torch.tensor([[True, True, False], [True, False, False]]),
        sampled=torch.tensor([[True, True, True], [True, True, False]]),
        state=torch.tensor([[0, 1, 2], [0, 1, -1]]),
    )


def outcome_advantages(
    rewards: RewardTable, group_size: int, coef: float, scale_rewards: str, discount: float
) -> torch.Tensor:
    """GRPO-OR: every turn gets `norm(R^O)`. Blind to turn rewards, and silent where all outcomes of a group are equal.

    >>> outcome_advantages(example(), 2, 1.0, "none", 1.0)
    tensor([[ 0.5000,  0.5000,  0.5000],
            [-0.5000, -0.5000, -0.5000]])
    """
    return norm(rewards.outcome, group_size, scale_rewards)[:, None].expand(rewards.turn.shape)


def merged_advantages(
    rewards: RewardTable, group_size: int, coef: float, scale_rewards: str, discount: float
) -> torch.Tensor:
    """GRPO-MR: every turn gets `norm(R^O + R^T)`: 1.8 against 0.4. Pays for each further turn that has a reward.

    >>> merged_advantages(example(), 2, 1.0, "none", 1.0)
    tensor([[ 0.7000,  0.7000,  0.7000],
            [-0.7000, -0.7000, -0.7000]])
    """
    total = rewards.outcome + rewards.turn_total
    return norm(total, group_size, scale_rewards)[:, None].expand(rewards.turn.shape)


def mt_grpo_advantages(
    rewards: RewardTable, group_size: int, coef: float, scale_rewards: str, discount: float
) -> torch.Tensor:
    """MT-GRPO (arXiv 2505.11821): the outcome's advantage, plus a turn's own where it got an observation.

    A turn's own reward is compared with the same turn of the rollouts that got an observation there too, and with
    nothing later: it says which call is better, not whether to call again. A rollout that never called a tool gets
    `norm(R^O + c R^T)`, as in the paper's code at c = 1. So a call's own worth is credited times the share of the
    group that calls: half of it in world 3 of tests/test_stopping_bias.py, little where calls are rare. Turn 0: 0.2
    against 0.4; turn 1: A's call is alone.

    >>> mt_grpo_advantages(example(), 2, 1.0, "none", 1.0)
    tensor([[ 0.4000,  0.5000,  0.5000],
            [-0.4000, -0.5000, -0.5000]])
    """
    outcome = norm(rewards.outcome, group_size, scale_rewards)[:, None]  # (N, 1)
    per_turn = norm(rewards.turn.where(rewards.observed, NAN), group_size, scale_rewards)  # (N, K)
    per_rollout = rewards.rollout_turn_advantages(group_size, scale_rewards)
    silent = norm(rewards.outcome + coef * rewards.turn_total, group_size, scale_rewards)[:, None]
    called = rewards.observed.any(1, keepdim=True)
    return torch.where(called, outcome + coef * (per_turn + per_rollout), silent)


def turn_return_advantages(
    rewards: RewardTable, group_size: int, coef: float, scale_rewards: str, discount: float
) -> torch.Tensor:
    """Return to go (REINFORCE's, Sutton and Barto, section 13.3), then a baseline over all who sampled turn k.

    Those that ended at turn k are among them with what they got there, so to go on is credited with what comes of it:
    with `scale_rewards: group` and a reward for every call it learned to call for ever, not with `none`
    (docs/credit.md). Turn 0: 0.8 against 0.4; turn 1: 0.6 against 0; turn 2: A is alone.

    >>> turn_return_advantages(example(), 2, 1.0, "none", 1.0)
    tensor([[ 0.7000,  0.8000,  0.5000],
            [-0.7000, -0.8000, -0.5000]])
    """
    outcome = norm(rewards.outcome, group_size, scale_rewards)[:, None]
    own = norm(rewards.returns_to_go(discount), group_size, scale_rewards)
    return outcome + coef * (own + rewards.rollout_turn_advantages(group_size, scale_rewards))


def gigpo_advantages(
    rewards: RewardTable, group_size: int, coef: float, scale_rewards: str, discount: float
) -> torch.Tensor:
    """GiGPO's grouping by state (arXiv 2505.10978): the return to go compared with turns that began in the same one.

    The paper's return also has the final reward in it, and its episode term all rewards; here, as everywhere in this
    table, the outcome is the first term and turn rewards are the second. Without turn rewards it is `outcome`.

    Without state keys from the environment a state is the whole conversation so far: turn 0 is compared with turn 0 of
    the group, and a later turn only with those that have the very same tokens before them, in practice with none.

    Where a state comes back within a rollout, a later visit is in the baseline of an earlier one, which is biased:
    with one state for all turns, stopping gets 0.012 less where it is worth nothing (world 2 of
    tests/test_stopping_bias.py, scale none; 0.047 more in world 1, scale group). Here state 1 is where A calls again
    (0.6) and B answers (0).

    >>> gigpo_advantages(example(), 2, 1.0, "none", 1.0)
    tensor([[ 0.7000,  0.8000,  0.5000],
            [-0.7000, -0.8000, -0.5000]])
    """
    outcome = norm(rewards.outcome, group_size, scale_rewards)[:, None]
    own = norm_by_state(rewards.returns_to_go(discount), rewards.state, group_size, scale_rewards)
    return outcome + coef * (own + rewards.rollout_turn_advantages(group_size, scale_rewards))


def turn_credit_advantages(
    rewards: RewardTable, group_size: int, coef: float, scale_rewards: str, discount: float
) -> torch.Tensor:
    """The outcome's advantage, shifted from a rollout's poorer turns to its better ones: the shifts sum to zero.

    It teaches where all rollouts of a group had the same outcome, but it is biased: a turn's baseline holds the turns
    after it. Where a reward is paid at a rollout's last turn whatever it does, stopping gets 0.12 (turn 0) and 0.25
    (turn 1) too much (world 1 of tests/test_stopping_bias.py). `scale_rewards` does not apply to the shift; a
    per-rollout turn reward has no place inside a rollout and shifts nothing. A: 0.2 and 0.6 around 0.4; B has one.

    >>> turn_credit_advantages(example(), 2, 1.0, "none", 1.0)
    tensor([[ 0.3000,  0.7000,  0.5000],
            [-0.5000, -0.5000, -0.5000]])
    """
    outcome = norm(rewards.outcome, group_size, scale_rewards)[:, None]
    shift = rewards.turn - rewards.turn.nanmean(1, keepdim=True)
    return outcome + coef * shift.nan_to_num(0.0)


CREDIT_ASSIGNMENTS = {
    "outcome": outcome_advantages,
    "merged": merged_advantages,
    "mt_grpo": mt_grpo_advantages,
    "turn_return": turn_return_advantages,
    "gigpo": gigpo_advantages,
    "turn_credit": turn_credit_advantages,
}


def turn_advantages(
    rewards: RewardTable,
    credit_assignment: str,
    group_size: int,
    coef: float,
    scale_rewards: str,
    discount: float = 1.0,
) -> torch.Tensor:
    """Advantage of every turn, (N, K). A rollout whose outcome rewards are all None gets 0 on every turn."""
    missing = rewards.outcome.isnan()[:, None]  # (N, 1): not trained on, so in nobody's baseline
    rewards = dataclasses.replace(
        rewards,
        rollout_turn=rewards.rollout_turn.where(~missing[:, 0], NAN),
        turn=rewards.turn.where(~missing, NAN),
        sampled=rewards.sampled & ~missing,
    )
    advantages = CREDIT_ASSIGNMENTS[credit_assignment](rewards, group_size, coef, scale_rewards, discount)
    return torch.where(missing, 0.0, advantages)


def token_advantages(advantages: torch.Tensor, turn_ids: torch.Tensor) -> torch.Tensor:
    """Spread turn advantages (B, K) over tokens: (B, C), 0 where `turn_ids` (B, C) is -1 (environment, padding).

    >>> token_advantages(torch.tensor([[5., 7.]]), torch.tensor([[0, 0, -1, 1, -1]]))
    tensor([[5., 5., 0., 7., 0.]])
    """
    return torch.where(turn_ids >= 0, advantages.gather(1, turn_ids.clamp(min=0)), 0.0)


# =====================================================================================================================
# Tool calls: what the model wrote, and what it gets to read
# =====================================================================================================================

CLOSING_TAGS = ("</tool>", "</answer>")
CALL_FORMAT = '<tool>{"name": "tool name", "args": {"argument": "value"}}</tool>'


def end_of_turn(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> int:
    """How many of the sampled ids make the turn: up to the token that completes the first `</tool>` or `</answer>`.

    Decided on decoded ids and the same way for every backend: a server's `stop` cuts its text and not its ids. A
    prefix of a sample is still on-policy.
    """

    def closed(length: int) -> bool:
        text = tokenizer.decode(token_ids[:length])
        return any(tag in text for tag in CLOSING_TAGS)

    if not closed(len(token_ids)) or not closed(len(token_ids) - 1):  # the second where a server's `stop` ended it
        return len(token_ids)
    return 1 + bisect.bisect_left(range(1, len(token_ids) + 1), True, key=closed)


def parse_turn(text: str) -> tuple[ToolCall | None, bool]:
    """(tool call or None, answered) of one turn's text. The tag that closes first counts.

    >>> parse_turn('<tool>{"name": "calculator", "args": {"expression": "6*7"}}</tool>')
    (ToolCall(name='calculator', arguments={'expression': '6*7'}, error=None), False)
    >>> parse_turn("<reasoning>easy</reasoning><answer>42</answer>")
    (None, True)
    >>> parse_turn('<tool>{"name": "calculator", <answer>42</answer>')[0].error  # an answer inside a call is no answer
    'the call is not closed by </tool>'
    """
    end = min((text.find(tag) for tag in CLOSING_TAGS if tag in text), default=len(text))
    # Tags that the model only mentions while it thinks open nothing.
    start = max(
        (text.rfind(tag, 0, end) + len(tag) for tag in ("</think>", "</reasoning>") if tag in text[:end]), default=0
    )
    body, closing = text[start:end], text[end:]
    opened, answer = body.find("<tool>"), body.find("<answer>")
    if closing.startswith("</answer>") and answer >= 0 and not 0 <= opened < answer:
        return None, True
    if closing.startswith("</tool>"):
        if opened < 0:
            return ToolCall(None, {}, "</tool> without <tool> before it"), False
        return parse_call(body[opened + len("<tool>") :]), False
    return (ToolCall(None, {}, "the call is not closed by </tool>") if opened >= 0 else None), False


def parse_call(body: str) -> ToolCall:
    """The JSON between the tool tags. The error texts are read by the policy: short, and they say how to mend it."""
    try:
        call = json.loads(body)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and body[error.pos :].lstrip().startswith("{"):
            return ToolCall(None, {}, "several calls in one turn; write one call, read its result, then the next")
        return ToolCall(None, {}, f"the call is not valid JSON ({error.msg} at character {error.pos})")
    except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of brackets
        return ToolCall(None, {}, "the call holds a number that is too long, or is nested too deeply")
    if isinstance(call, list):
        return ToolCall(None, {}, "several calls in one turn; write one call, read its result, then the next")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(None, {}, 'the call must be a JSON object with "name" (a string) and "args" (an object)')
    arguments = call.get("args", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, f'"args" must be a JSON object, got {type(arguments).__name__}')
    if unknown := set(call) - {"name", "args"}:
        return ToolCall(call["name"], {}, f'unknown key "{sorted(unknown)[0]}" in the call; use "name" and "args"')
    return ToolCall(call["name"], arguments)


LISTS = (list, *(getattr(collections.abc, name) for name in ("Sequence", "MutableSequence", "Collection", "Iterable")))
DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
TYPES_THAT_WORK = "str, int, float, bool, list[...], dict[str, ...], Literal[...], unions of these with |, and Any"


def without_name(expected: Any) -> Any:
    """The type that a `NewType` is of."""
    while hasattr(expected, "__supertype__"):
        expected = expected.__supertype__
    return expected


def type_name(expected: Any) -> str:
    """A type as one writes it: `int`, `list[int]`, `Literal['a', 'b']`, `str | None`."""
    if isinstance(expected, type) and typing.get_origin(expected) is None:
        return expected.__name__
    return str(expected).replace("typing.", "")


def takes_json(expected: Any) -> bool:
    """Whether a value that was read from JSON can ever be of this annotated type.

    >>> [takes_json(t) for t in (int, list[dict[str, float]], str | None, Path | str)]
    [True, True, True, True]
    >>> [takes_json(t) for t in (Path | None, tuple, dict[int, str])]
    [False, False, False]
    """
    expected = without_name(expected)
    origin, options = typing.get_origin(expected) or expected, typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(takes_json(option) for option in options if option is not type(None))
    if origin is typing.Literal:
        return all(type(option) in (str, int, bool, type(None)) for option in options)
    if origin in DICTS:
        return not options or (options[0] in (str, Any) and takes_json(options[1]))
    if origin in LISTS:
        return all(takes_json(option) for option in options)
    return expected in (str, int, float, bool, type(None), Any, object)


def misfit(value: Any, expected: Any, where: str = "") -> tuple[Any, str] | None:
    """The part of an argument that is not of its type, and where it stands; None if all of it is.

    >>> misfit([1, "2"], list[int]), misfit({"a": {"b": 1}}, dict[str, dict[str, str]]), misfit([1], list[int] | None)
    (('2', '[1]'), (1, "['a']['b']"), None)
    """
    expected = without_name(expected)
    origin, options = typing.get_origin(expected) or expected, typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        misfits = [misfit(value, option, where) for option in options]
        # The option that fits best is the one that is wrong only further inside.
        return None if None in misfits else max(misfits, key=lambda wrong: len(wrong[1]))
    if origin in LISTS and isinstance(value, list):
        parts = enumerate(value) if options else ()
        return next(filter(None, (misfit(part, options[0], f"{where}[{i}]") for i, part in parts)), None)
    if origin in DICTS and isinstance(value, dict):
        parts = value.items() if options else ()
        return next(filter(None, (misfit(part, options[1], f"{where}[{key!r}]") for key, part in parts)), None)
    if origin is typing.Literal:
        fits = any(type(value) is type(option) and value == option for option in options)
    elif origin in (*LISTS, *DICTS):
        fits = False
    else:
        fits = takes_json(expected) and (expected is object or fits_type(value, expected))
    return None if fits else (value, where)


@functools.cache
def signature_of(tool: Callable) -> tuple[inspect.Signature, dict[str, Any]]:
    """A tool's signature and type hints."""
    return inspect.signature(tool), typing.get_type_hints(tool)


def check_call(call: ToolCall, tools: dict[str, Callable]) -> str | None:
    """Why this call cannot be run (the policy's mistake), or None."""
    if call.error:
        return f"{call.error}. Expected: {CALL_FORMAT}"
    if call.name not in tools:
        return f"unknown tool {call.name!r}. Known tools: {', '.join(tools)}"
    signature, hints = signature_of(tools[call.name])
    try:
        signature.bind(**call.arguments)
    except TypeError as error:
        return f"{error}. Usage: {call.name}{signature}"
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)  # of **rest
    for name, value in call.arguments.items():
        expected = hints.get(name if name in signature.parameters else rest, Any)
        if wrong := misfit(value, expected):
            part, where = wrong
            got = repr(part)[:80] if "Literal[" in str(expected) else type(part).__name__
            return (
                f"argument {name!r} must be {type_name(expected)}, got {got}{where and f' at {name}{where}'}. "
                f"Usage: {call.name}{signature}"
            )
    return None


def describe_tools(tools: dict[str, Callable]) -> str:
    """Signatures and docstrings, as the model reads them in the system prompt."""
    return "\n\n".join(f"{name}{inspect.signature(tool)}\n{inspect.getdoc(tool)}" for name, tool in tools.items())


def result_message(observation: str) -> str:
    """The environment's message: role `user`, as in the paper."""
    return f"<result>\n{observation}\n</result>"


TURN_TAGS = ("think", "reasoning", "tool", "result", "answer")  # as tokens of their own they are control tokens


AUTHORS = ("system", "developer", "assistant")  # roles whose messages are left as they are written


def is_control(token: str, special: bool, template: str) -> bool:
    """Whether an added token opens or closes something in a conversation.

    Not every added token does: some tokenizers have runs of blanks, rulers or HTML as tokens, and those are text.

    >>> [is_control(t, False, "{{ '<call>' }}") for t in ("<|sep|>", "</call>", "<think>", "<table>", "    ")]
    [True, True, True, False, False]
    """
    if special or re.fullmatch(r"<[|｜].*[|｜]>", token, re.DOTALL):
        return not token.isspace()
    tag = re.fullmatch(r"([<\[])/?(.+)([>\]])", token, re.DOTALL)
    return tag is not None and (
        tag[2] in TURN_TAGS or any(f"{tag[1]}{slash}{tag[2]}{tag[3]}" in template for slash in ("", "/"))
    )


@functools.lru_cache(maxsize=8)
def control_pattern(tokenizer: PreTrainedTokenizerBase, size: int, template: str) -> re.Pattern:
    """What `neutralise` breaks. `size` and `template` are the tokenizer's, so that a changed one is read again."""
    tokens = {str(t): t.special for t in tokenizer.added_tokens_decoder.values()}
    tokens |= dict.fromkeys(tokenizer.all_special_tokens, True)
    control = {"</result>", *(t for t, special in tokens.items() if is_control(t, special, template))}
    # Sorted, so that the result is the same in every process: longest first, then by the alphabet.
    return re.compile("|".join(re.escape(t) for t in sorted(control, key=lambda t: (-len(t), t))))


def find_control(text: str, tokenizer: PreTrainedTokenizerBase) -> re.Match | None:
    """The first control token that stands in a text, or `</result>`."""
    return control_pattern(tokenizer, len(tokenizer), str(tokenizer.chat_template)).search(text)


def neutralise(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text that can neither open or close a turn nor close its own result: a space breaks control tokens.

    INVARIANT: the tokenizer finds no control token in what comes out, and text without any comes out as it is.
    """

    def broken(match: re.Match) -> str:
        token = match[0].lstrip()
        return f"{token[0]} {token[1:]}" if len(token) > 1 else " "

    text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates, which no tokenizer takes
    while (found := find_control(text, tokenizer)) is not None:  # again, since one can begin inside another
        text = found.re.sub(broken, text)
    return text


def neutralise_prompt(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """A prompt whose user and tool messages are neutralised. What the author writes is not: system and assistant."""
    return [
        {**m, "content": neutralise(m["content"], tokenizer)}
        if isinstance(m["content"], str) and m["role"] not in AUTHORS else m
        for m in messages
    ]  # fmt: skip


# =====================================================================================================================
# Generation backends: `await generate(prompt_ids, max_tokens, sampling_params, index) -> Generation`
# =====================================================================================================================


LOOP_THREAD, CONTROL_THREAD = "mt-grpo-rollouts", "mt-grpo-control"


@functools.cache
def background_loop(thread: str = LOOP_THREAD) -> asyncio.AbstractEventLoop:
    """One event loop in a daemon thread, so that synchronous calls also work in a notebook's running loop."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            try:
                return loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a task that an async tool has started: it gets it as well
                pass

    threading.Thread(target=run, name=thread, daemon=True).start()
    return loop


def run_async(coroutine: Coroutine, timeout: float | None = None) -> Any:
    """Run a coroutine on the background loop and wait for its result; cancels it when the wait is interrupted.

    Raises `concurrent.futures.TimeoutError` after `timeout` seconds, also where the loop itself is blocked.
    """
    if threading.current_thread().name == LOOP_THREAD:
        coroutine.close()
        raise RuntimeError(
            "generate, step and chat wait for this very loop: from an async tool await converse instead."
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, background_loop())
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise


async def gather_all(coroutines: list[Awaitable]) -> list:
    """Like `asyncio.gather`, but the first error cancels the rest instead of leaving them running."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class ServerError(RuntimeError):
    """The generation server failed: the message holds URL, status, and what to do."""


class ServerLost(ServerError):
    """It does not answer, or only with 5xx, or no longer holds what was pushed: it may come back."""


class BadAnswer(ValueError):
    """An answer that cannot be a sample: ids and logprobs that do not match, or NaN."""


def is_logprob(value: Any) -> bool:
    """Whether a server's number can be the logprob of a sampled token: finite, and not above 0 but for rounding."""
    return isinstance(value, (int, float)) and -1e9 < value < 1e-3


def sampling_defaults() -> dict[str, Any]:
    """Every sampling field: an unset one would take the model's own generation_config.json on the server."""
    return {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


SAMPLING_KEYS = {  # what a request may say beside the prompt; a server ignores what it does not know
    *sampling_defaults(), "presence_penalty", "frequency_penalty", "min_tokens", "bad_words", "logit_bias",
    "allowed_token_ids", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed", "priority",
    "structured_outputs", "response_format", "thinking_token_budget", "spaces_between_special_tokens", "vllm_xargs",
    "cache_salt", "user",
}  # fmt: skip
CHAT_KEYS = {*SAMPLING_KEYS, "max_tokens", "max_completion_tokens", "chat_template_kwargs", "reasoning_effort"}


def check_sampling_params(sampling_params: dict[str, Any] | None, known: set[str] = SAMPLING_KEYS) -> None:
    """Raise `ValueError` for a key that would change nothing, or that the conversation sets itself."""
    for key in sampling_params or {}:
        if key not in known and key in ("max_tokens", "max_completion_tokens"):
            raise ValueError(f"sampling_params: {key!r} is set per turn. Use the environment's max_turn_tokens.")
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(known))}."
            raise ValueError(f"sampling_params: unknown key {key!r}.{hint}")


def check_conversations(prompts: Any, name: str, texts: bool = True) -> list:
    """The conversations as a list. Raises `ValueError` unless each is a list of messages, or a string if `texts`."""
    expected = f"a list of conversations, each one a list of messages{' or a string' if texts else ''}"
    if isinstance(prompts, (str, dict)) or not isinstance(prompts, collections.abc.Iterable):
        raise ValueError(f"{name} is {prompts!r:.80}, expected {expected}. For one, write [...] around it.")
    prompts = list(prompts)
    for prompt in prompts:
        if isinstance(prompt, dict):
            raise ValueError(f"{name} is one conversation's messages, expected {expected}: write [...] around it.")
        messages = [] if texts and isinstance(prompt, str) else prompt
        if not isinstance(messages, (list, tuple)) or not all(
            isinstance(m, collections.abc.Mapping) and {"role", "content"} <= m.keys() for m in messages
        ):
            raise ValueError(f"{name} holds {prompt!r:.80}, expected {expected}, with role and content.")
    return prompts


def allow_many_open_files(wanted: int = 65_535) -> None:
    """Raise this process's soft limit, often 1,024: a conversation has a connection, a tool's process two pipes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # as far as the machine lets us
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_lock(path: Path, flags: int = os.O_RDWR) -> typing.TextIO:
    """A lock file in a place where others may write: no link is followed, and nothing is waited for.

    Raises `OSError` for all that is no ordinary file of this user, or of the folder's owner.
    """
    # A FIFO that is opened without O_NONBLOCK waits for its other end.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), path.parent.lstat().st_uid):
        os.close(descriptor)
        raise OSError(f"{path} is no ordinary file of this user. Remove it.")
    return open(descriptor, "r+" if flags & os.O_RDWR else "r")


def hide_password(url: str) -> str:
    """`url` as it may be printed.

    >>> hide_password("http://ann:secret@gpu1:8000"), hide_password("http://gpu1:8000")
    ('http://...@gpu1:8000', 'http://gpu1:8000')
    """
    return re.sub(r"//.*@", "//...@", url)


def split_server_url(url: str) -> tuple[str, str | None]:
    """`url` without user and password, and the header `Authorization` that says them.

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


class VLLMServerClient:
    """Talks to `vllm serve` (dev mode): token ids in, token ids and logprobs as sampled out; weights; health.

    Args:
        host, port: Where the server listens. 0.0.0.0, TRL's default, is reached as 127.0.0.1.
        tokenizer: Needed by `chat` and by `MultiTurnToolEnv`, not by `generate`.
        base_url: In place of host and port, for example behind TLS. A user and password in it are sent, never shown.
        api_key: The server's `--api-key`, if it has one; default: the environment's VLLM_API_KEY.
        timeout: Seconds to wait for the server to come up, or to come back, before `ServerError`.
        request_timeout: Seconds that one request may take; then it is sent again, if `timeout` leaves room.
        transport: `disk`, `nccl` or `auto` (nccl where this process and the server have CUDA).
        sync_dir: Shared directory of the disk transport. None: /dev/shm, else the temporary directory.
        group_port: Port of the NCCL weight group.

    Raises `ServerError` for an address that can never work.
    """

    BAD_ANSWERS = 3  # in a row, until a server is taken to be broken
    NOTICE_SECONDS = 10.0  # between two lines that say that a server is waited for
    NO_VLLM = "That is no answer of a vLLM server: check vllm_server_host, vllm_server_port, vllm_server_base_url."
    WATCH_SECONDS = 1.0  # between two looks at the server's version; no server restarts in so short a time

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 240.0,
        request_timeout: float = 600.0,
        transport: str = "auto",
        sync_dir: str | None = None,
        group_port: int = 51216,
    ):
        host = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if host.count(":") > 1 and "[" not in host else host
        if not base_url and "/" in host:  # a URL, whose scheme would be taken for the name
            raise ServerError(f"vllm_server_host={hide_password(host)!r}: expected a name. Use vllm_server_base_url.")
        self.base_url, credentials = split_server_url(base_url or f"http://{host}:{port}")
        self.tokenizer = tokenizer
        self.timeout = timeout
        self.request_timeout = request_timeout
        self.transport = transport
        self.sync_dir = sync_dir
        self.group_port = group_port
        self.instance = secrets.token_hex(4)  # tells this client's pushes from another run's
        self.retries = 0  # requests that were sent again, since the last who asked set it to 0
        self._reached = False  # whether the server has ever answered
        api_key = api_key or os.environ.get("VLLM_API_KEY")
        if api_key and credentials:
            raise ServerError(
                f"{self.base_url}: got a password in vllm_server_base_url, and VLLM_API_KEY. A request has room for "
                "one of them: remove the other."
            )
        authorization = f"Bearer {api_key}" if api_key else credentials
        self._headers = {"Authorization": authorization} if authorization else {}
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._nccl = None  # TRL's client, which holds the NCCL group
        self._folder: Path | None = None  # of the disk transport, this client's own
        allow_many_open_files()
        atexit.register(self.close)

    # -- control calls (synchronous) --

    def request(
        self, method: str, path: str, timeout: float = 60.0, read: Callable[[Any], Any] = lambda answer: answer,
        **kwargs,
    ) -> Any:  # fmt: skip
        """One control call; returns what `read` makes of the JSON answer. Raises `ServerError` with URL, status, body.

        `ServerLost` where it may come back: no connection, no whole answer within `timeout` seconds, 429, 5xx.
        """
        url = f"{self.base_url}{path}"
        call = self._call(method, url, timeout, kwargs)
        future = asyncio.run_coroutine_threadsafe(call, background_loop(CONTROL_THREAD))
        try:
            status, body = future.result()
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}" if str(error) else f"no whole answer within {timeout:g} s"
            never = aiohttp.ClientConnectorDNSError, aiohttp.ClientSSLError, aiohttp.InvalidURL
            if isinstance(error, never) and not self._reached:  # a name server may also fail in the middle of a run
                raise ServerError(f"{method} {url}: {problem}. No server can be reached by this address.") from error
            raise ServerLost(f"{method} {url}: {problem}. Is the vLLM server running?") from error
        except BaseException:
            future.cancel()
            raise
        self._reached = True
        text = body.decode("utf-8", "replace")
        if not 200 <= status < 300:
            kind = ServerLost if status == 429 or status >= 500 else ServerError
            raise kind(f"{method} {url}: {status} {text[:2000]}{self._advice(status, path)}")
        try:
            return read(json.loads(body) if body else {})
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{method} {url}: {status} {text[:300]!r}. {self.NO_VLLM}") from None

    def _advice(self, status: int, path: str) -> str:
        """What to do about the status of an answer."""
        if status in (401, 403):
            return ". Set VLLM_API_KEY to the key that the server was started with (--api-key)."
        if status == 404 and path.startswith(("/v1/", "/health", "/tokenize")):
            return f". {self.NO_VLLM}"
        return ". Start the vLLM server with VLLM_SERVER_DEV_MODE=1." if status == 404 else ""

    async def _call(self, method: str, url: str, timeout: float, kwargs: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body. `timeout` bounds the whole call: a server may send a byte every second for ever."""
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=10.0)
        async with aiohttp.ClientSession(headers=self._headers, timeout=limits) as session:
            async with session.request(method, url, **kwargs) as response:
                return response.status, await response.read()

    def healthy(self) -> bool:
        """Whether the server answers its health check now."""
        try:
            self.request("GET", "/health", timeout=10.0)
        except ServerError:
            return False
        return True

    def wait_until_healthy(self, unless: Callable[[], Any] = lambda: False) -> None:
        """Wait up to `timeout` seconds, or until `unless` is true, and say what for. Raises `ServerError`.

        At once where waiting cannot help: another service answers, or the address cannot work.
        """
        began, said = time.monotonic(), float("-inf")
        while not unless():
            left = began + self.timeout - time.monotonic()
            try:
                self.request("GET", "/health", timeout=min(10.0, max(left, 1.0)))
                return
            except ServerLost as error:
                if left <= 0:
                    raise ServerError(
                        f"No vLLM server answers at {self.base_url} after {self.timeout:g} s. Start one with "
                        "`bash scripts/train.sh RECIPE`, or set vllm_server_host, vllm_server_port, "
                        f"vllm_server_timeout. The last try: {str(error)[:500]}"
                    ) from None
                if time.monotonic() - said >= self.NOTICE_SECONDS:
                    said = time.monotonic()
                    logger.warning(f"Waiting up to {left:.0f} s more for a vLLM server: {str(error)[:500]}")
            time.sleep(1.0)

    @functools.cached_property
    def model_card(self) -> dict[str, Any]:
        """The served model: `id` (its name in requests), `root` (what was loaded), `max_model_len`."""

        def read(answer: dict[str, Any]) -> dict[str, Any]:
            card = answer["data"][0]
            return {**card, "id": str(card["id"]), "max_model_len": int(card["max_model_len"])}

        return self.request("GET", "/v1/models", read=read)

    @property
    def max_model_len(self) -> int | None:
        """The served model's context in tokens, if the server says it."""
        return self.model_card.get("max_model_len")

    def server_info(self) -> dict[str, Any]:
        """vLLM's own configuration as a tree; needs the development endpoints."""

        def read(answer: dict[str, Any]) -> dict[str, Any]:
            _ = [answer["vllm_config"]["model_config"][key] for key in ("model", "dtype", "logprobs_mode")]
            return answer["vllm_config"]

        return self.request("GET", "/server_info", params={"config_format": "json"}, read=read)

    def settings(self) -> dict[str, Any]:
        """What decides what the server samples, and how much fits, beside the weights."""
        config = self.server_info()["model_config"]
        return {key: config.get(key) for key in ("model", "tokenizer", "dtype", "max_model_len", "logprobs_mode")}

    def weight_version(self) -> str:
        """The version that the last push set. A restarted server no longer knows it."""
        return self.request("GET", "/weight_info", read=lambda answer: answer["weight_version"])

    # -- generation --

    async def _session(self) -> aiohttp.ClientSession:
        """This event loop's connections."""
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            ended = [self._sessions.pop(known) for known in list(self._sessions) if known.is_closed()]
            self._sessions[loop] = aiohttp.ClientSession(
                # vLLM closes connections that were idle for 5 s: a request on one that is about to be closed is lost.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0), headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self.request_timeout, sock_connect=10),
            )  # fmt: skip
            for session in ended:
                await session.close()
        return self._sessions[loop]

    async def _post(
        self, path: str, payload: dict[str, Any], read: Callable[[dict[str, Any]], Any] = lambda answer: answer
    ) -> Any:
        """POST, and what `read` makes of the JSON answer.

        Sent again with backoff, for `timeout` seconds from the first failure: connection errors (one that closes in
        mid-answer too), 429 and 5xx, and requests without an answer. An answer that is no JSON, or that `read`
        refuses with `BadAnswer`, is asked for `BAD_ANSWERS` times. Raises `ServerError`.
        """
        url, give_up, wait, bad_answers = f"{self.base_url}{path}", None, 0.05, 0
        while True:
            try:
                async with (await self._session()).post(url, json=payload) as response:
                    if response.status == 200:
                        return read(json.loads(await response.read()))
                    problem, bad_answers = f"{response.status} {(await response.text(errors='replace'))[:2000]}", 0
                    if response.status not in (429, 500, 502, 503, 504):
                        raise ServerError(f"POST {url}: {problem}{self._advice(response.status, path)}")
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            except TimeoutError:
                problem = f"no answer within vllm_request_timeout={self.request_timeout:g} s"
            except ValueError as error:
                problem, bad_answers = f"{type(error).__name__}: {error}", bad_answers + 1
                if bad_answers == self.BAD_ANSWERS:
                    raise ServerError(f"POST {url}: {bad_answers} answers in a row are no sample: {problem}") from None
            give_up = give_up or time.monotonic() + self.timeout
            left = give_up - time.monotonic()
            if left <= 0:
                raise ServerLost(f"POST {url}: {problem}; gave up after vllm_server_timeout={self.timeout:g} s")
            self.retries += 1
            logger.debug("POST %s: %s; sending it again", url, problem)
            await asyncio.sleep(min(wait * random.uniform(0.5, 1.0), left))  # the last one when the time is up
            wait = min(2 * wait, 10.0)

    async def _held_version(self) -> str | None:
        """The version of the weights that the server holds; None while it does not say."""
        try:
            timeout = aiohttp.ClientTimeout(total=10.0)
            async with self._session().get(f"{self.base_url}/weight_info", timeout=timeout) as response:
                return (await response.json())["weight_version"] if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return None

    async def gather_from(self, version: str, coroutines: list[Awaitable]) -> list:
        """Results of `coroutines` that are proven to come from the weights `version`; None for each other one.

        A server that restarts holds its first weights, and no version. So whatever was finished before a question
        was asked to which the server answered `version` was sampled from it; and once it answers anything else the
        rest is cancelled, not sampled from weights that nobody trains. Raises the first error of a coroutine, and
        `ServerLost` where the server says nothing for `timeout` seconds after the last of them.
        """
        finished: dict[int, tuple[float, Any]] = {}  # index -> (when, result)

        async def finish(index: int, coroutine: Awaitable) -> None:
            result = await coroutine
            finished[index] = time.monotonic(), result

        running = asyncio.ensure_future(gather_all([finish(i, c) for i, c in enumerate(coroutines)]))
        confirmed, give_up = float("-inf"), None
        try:
            while True:
                await asyncio.wait({running}, timeout=self.WATCH_SECONDS)
                asked, done = time.monotonic(), running.done()
                if done:
                    running.result()
                held = await self._held_version()
                if held == version:
                    confirmed = asked
                    if done:
                        break
                elif held is not None:
                    break
                elif done:
                    give_up = give_up or asked + self.timeout
                    if asked > give_up:
                        raise ServerLost(f"{self.base_url} does not say which weights it holds: see its log.")
                    await asyncio.sleep(self.WATCH_SECONDS)
        finally:
            running.cancel()
        unproven = float("inf"), None
        return [
            result if ended <= confirmed else None
            for ended, result in (finished.get(i, unproven) for i in range(len(coroutines)))
        ]

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, sampling_params: dict[str, Any] | None = None, index: int = 0
    ) -> Generation:
        """Sample one continuation of `prompt_ids`. Logprobs are of the distribution that was sampled from.

        Raises:
            ServerError: no answer within the time limits, or one whose ids and logprobs do not match.
            ValueError: an unknown sampling parameter.
        """
        check_sampling_params(sampling_params)
        payload = {
            **sampling_defaults(), "stop": list(CLOSING_TAGS), "include_stop_str_in_output": True,
            **(sampling_params or {}), "model": self.model_card["id"], "prompt": prompt_ids, "max_tokens": max_tokens,
            "n": 1, "logprobs": 0, "return_token_ids": True, "skip_special_tokens": False,
        }  # fmt: skip

        def read(answer: dict[str, Any]) -> Generation:
            try:
                choice = answer["choices"][0]
                token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
                seen, finish_reason = answer["usage"]["prompt_tokens"], choice["finish_reason"]
                counts = len(token_ids), len(logprobs)
            except (KeyError, IndexError, TypeError):
                raise BadAnswer(f"no token ids: {str(answer)[:500]}") from None
            if not 0 < counts[0] == counts[1] or not all(map(is_logprob, logprobs)):
                raise BadAnswer(f"{counts[0]} ids and {counts[1]} logprobs {logprobs[:5]}...: no match")
            if seen != len(prompt_ids):
                raise BadAnswer(f"the server saw {seen} prompt tokens of {len(prompt_ids)}: the prompt was changed")
            if counts[0] > max_tokens or finish_reason not in ("stop", "length"):  # `abort`: by a pause or a shutdown
                raise BadAnswer(f"{counts[0]} ids of at most {max_tokens}, finish_reason={finish_reason!r}")
            return Generation(token_ids, logprobs, finish_reason)

        return await self._post("/v1/completions", payload, read)

    def chat(
        self, messages_list: list[list[dict[str, str]]], sampling_params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Answer conversations over `/v1/chat/completions`, all at once, for people.

        Returns:
            Per conversation: `text`, `token_ids`, `logprobs` (as sampled), `prompt_ids`, `finish_reason`.
        """
        messages_list = check_conversations(messages_list, "messages_list", texts=False)
        check_sampling_params(sampling_params, CHAT_KEYS)

        async def one(messages):
            payload = {
                **sampling_defaults(), **(sampling_params or {}), "model": self.model_card["id"], "messages": messages,
                "logprobs": True, "top_logprobs": 0, "return_token_ids": True, "skip_special_tokens": False,
            }  # fmt: skip
            answer = await self._post("/v1/chat/completions", payload)
            choice = answer["choices"][0]
            return {
                "text": choice["message"]["content"], "token_ids": choice["token_ids"],
                "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
                "prompt_ids": answer["prompt_token_ids"], "finish_reason": choice["finish_reason"],
            }  # fmt: skip

        async def all_of_them():
            return await gather_all([one(messages) for messages in messages_list])

        return run_async(all_of_them())

    def score(self, token_ids: list[int]) -> list[float]:
        """The server's logprobs of `token_ids[1:]` given what precedes each, at temperature 1, full vocabulary."""
        payload = {
            **sampling_defaults(), "model": self.model_card["id"], "prompt": token_ids, "max_tokens": 1,
            "prompt_logprobs": 0,
        }  # fmt: skip

        def read(answer: dict[str, Any]) -> list[float]:
            entries = answer["choices"][0]["prompt_logprobs"]
            return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], entries[1:], strict=True)]

        return self.request("POST", "/v1/completions", json=payload, read=read)

    # -- weights --

    def resolve_transport(self, device: torch.device) -> str:
        """`auto` made concrete. Raises `ServerError` for NCCL with a server that was not started for it."""
        config = (self.server_info().get("weight_transfer_config") or {}).get("backend")
        if self.transport == "nccl" and config != "nccl":
            raise ServerError(
                'weight_sync=nccl needs a server started with --weight-transfer-config \'{"backend": "nccl"}\'.'
            )
        if self.transport == "nccl" and self._headers:
            raise ServerError("weight_sync=nccl: TRL's client for it sends no API key and no password. Use disk.")
        if self.transport == "auto":
            return "nccl" if device.type == "cuda" and config == "nccl" and not self._headers else "disk"
        return self.transport

    def update_weights(
        self, named_weights: Iterator[tuple[str, torch.Tensor]], version: str, expected: set[str] | None = None,
        device: torch.device | str = "cpu",
    ) -> dict[str, float]:  # fmt: skip
        """Push all weights, drop the prefix cache, record `version`. The server samples nothing meanwhile.

        Args:
            named_weights: (name, tensor) under the names of a checkpoint, tied copies included. Always exhausted, so
                that what the iterator changed in the model (a merged adapter) is undone.
            version: Comes back from `weight_version()`; proves later that the server did not restart.
            expected: The names that must be among them. Missing ones are an error before the server is touched.
            device: This process's accelerator, for NCCL.

        Returns:
            Seconds by phase: `gather` (to the CPU), with disk `write` (the file), `load` (pause to resume).

        Raises:
            ServerError: before the load, the server's weights are as they were; in the load, its version is
                `loading-` and this one, which nobody expects.
            ServerLost: the server went away meanwhile; it can be pushed to again once it is back.
        """
        try:
            if self.resolve_transport(torch.device(device)) == "nccl":
                return self._push_nccl(named_weights, version, expected, torch.device(device))
            return self._push_disk(named_weights, version, expected)
        finally:
            for _ in named_weights:  # where weights are sharded the other ranks walk to the end too
                pass

    def _push_disk(self, named_weights, version, expected) -> dict[str, float]:
        start = time.perf_counter()
        # Each tensor is copied before the next is asked for: the iterator may change it in place.
        tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in named_weights}
        self._check_names(tensors.keys(), expected)
        gathered = time.perf_counter()
        folder = None
        try:
            folder = self._versions_folder(sum(t.nbytes for t in tensors.values())) / version
            partial = folder.with_name(f"partial-{version}")
            try:
                partial.mkdir()
                save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
                del tensors
                (partial / "model.safetensors").chmod(0o644)
                partial.rename(folder)  # INVARIANT: what has a version's name is complete
                written = time.perf_counter()
                load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._while_paused(version, lambda: self.request("POST", "/collective_rpc", timeout=600.0, json=load))
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, SafetensorError, ServerError) as error:
            kind = ServerLost if isinstance(error, ServerLost) else ServerError
            advice = " Set weight_sync_dir to a writable directory with room that the server sees too."
            raise kind(
                f"Weight push to {self.base_url} through {folder or self.sync_dir or 'no folder'} failed: {error}."
                + ("" if isinstance(error, ServerError) else advice)
            ) from error
        return {"gather": gathered - start, "write": written - gathered, "load": time.perf_counter() - written}

    def _versions_folder(self, size: int) -> Path:
        """This client's own folder, where the next version of `size` bytes has room. Raises `OSError`.

        What runs that were killed left behind is removed: a folder belongs to nobody once its lock is free.
        """
        if self._folder is not None and not self._holds_its_folder():
            self._leave_folder()
        if self._folder is None:
            shared = [Path(d) for d in ([self.sync_dir] if self.sync_dir else ["/dev/shm", tempfile.gettempdir()])]
            shared = [d for d in shared if self.sync_dir or os.access(d, os.W_OK)]
            for root in shared:
                for folder in root.glob("mt-grpo-weights-*"):
                    self._remove_if_dead(folder)
            free = {root: shutil.disk_usage(root).free for root in shared}
            root = next((root for root in shared if free[root] > 1.05 * size), None)
            if root is None:
                raise OSError(
                    f"the weights need {size / 2**30:.2f} GiB, and there are "
                    + ", ".join(f"{room / 2**30:.2f} in {root}" for root, room in free.items())
                )
            folder = Path(tempfile.mkdtemp(prefix=".mt-grpo-", dir=root))
            self._folder_lock = open_lock(folder / "lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before others know the folder by its name
            if not root.stat().st_mode & stat.S_ISVTX:  # where everybody may write, not everybody is to read
                folder.chmod(0o755)
            self._folder = folder.rename(root / f"mt-grpo-weights-{self.instance}")
        return self._folder

    @staticmethod
    def _remove_if_dead(folder: Path) -> None:
        """Remove a folder of weights, unless it is another user's or a run that lives has its lock."""
        with suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                with open_lock(folder / "lock") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)

    def _holds_its_folder(self) -> bool:
        """Whether the folder is still the one that this client made: temporary directories are cleaned away."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._folder_lock.fileno()), (self._folder / "lock").lstat())
        return False

    def _leave_folder(self) -> None:
        if self._holds_its_folder():
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder_lock.close()
        self._folder = None

    def _push_nccl(self, named_weights, version, expected, device) -> dict[str, float]:
        from trl.generation.vllm_client import VLLMClient  # needs vLLM in this environment; not so for disk

        start = time.perf_counter()
        if self._nccl is None:
            self._nccl = VLLMClient(self.base_url, group_port=self.group_port, connection_timeout=self.timeout)
            self._nccl.init_communicator(device=device)
        # Announced before the first is sent, and kept on the CPU, where they fit.
        tensors = {name: t.detach().to("cpu", copy=True) for name, t in named_weights}
        self._check_names(tensors.keys(), expected)
        metadata = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
        to_device = ((name, t.to(device)) for name, t in tensors.items())
        gathered = time.perf_counter()

        def load() -> None:
            try:
                self._nccl.update_named_params(metadata, to_device)
            except Exception as error:  # TRL's client raises whatever its requests do
                raise ServerLost(f"{self.base_url} did not take the weights: {error}") from error

        self._while_paused(version, load)
        return {"gather": gathered - start, "load": time.perf_counter() - gathered}

    def leave_nccl(self) -> None:
        """Close the NCCL group, of which a server that restarts is no member; the next push makes another."""
        if self._nccl is not None:
            atexit.unregister(self._nccl.close_communicator)  # which would hold the group, and its port
            self._nccl.close_communicator()
            self._nccl = None

    @staticmethod
    def _check_names(names: typing.Iterable[str], expected: set[str] | None) -> None:
        if missing := sorted((expected or set()) - set(names)):
            raise ServerError(f"{len(missing)} weights are missing from the push, such as {missing[0]}: nothing sent.")

    def _while_paused(self, version: str, load: Callable[[], Any]) -> None:
        try:
            self.request("POST", "/pause", timeout=self.request_timeout, params={"mode": "wait"})
            # A load that fails half-way leaves a version that nobody expects, so that nobody samples from it.
            self.request("POST", "/update_weight_version", json={"new_version": f"loading-{version}"})
            load()
            answer = self.request("POST", "/reset_prefix_cache")
            if answer.get("success") is False:  # answered with status 200 all the same
                raise ServerError(
                    f"{self.base_url} could not reset its prefix cache: old weights' keys would be reused"
                )
            self.request("POST", "/update_weight_version", json={"new_version": version})
        finally:
            self.request("POST", "/resume")

    async def _close_sessions(self) -> None:
        if session := self._sessions.pop(asyncio.get_running_loop(), None):
            await session.close()

    def close(self) -> None:
        """Close the connections and remove the folder of the weights; a later call makes new ones."""
        atexit.unregister(self.close)
        with suppress(concurrent.futures.TimeoutError):  # a tool or reward may block the loop for ever
            run_async(self._close_sessions(), timeout=5.0)
        for loop in list(self._sessions):  # of a caller's own loops, which may have ended
            session = self._sessions.pop(loop)
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(session.close(), loop)
            elif loop.is_closed():
                run_async(session.close(), timeout=5.0)
            else:  # in a thread, since this one may run another loop
                thread = threading.Thread(target=loop.run_until_complete, args=(session.close(),), daemon=True)
                thread.start()
                thread.join(5.0)
        if self._folder is not None:
            self._leave_folder()


class ServeSession:
    """The requests of one `InProcessBackend.serve`: a batch is due when every open conversation waits."""

    def __init__(self, num_conversations: int):
        self.open = num_conversations
        self.waiting: list[tuple] = []  # (rollout index, prompt ids, max_tokens, future)
        self.batches: queue.Queue = queue.Queue()

    def flush(self) -> None:
        if self.waiting and len(self.waiting) == self.open:
            self.batches.put(sorted(self.waiting, key=lambda request: request[0]))
            self.waiting = []

    async def converse(self, conversation: Coroutine) -> Any:
        try:
            return await conversation
        finally:
            self.open -= 1
            self.flush()


class InProcessBackend:
    """TRL's own generation (transformers, continuous batching, colocated vLLM) behind the same protocol.

    Requests that wait at the moment form one batch: as soon as every open conversation waits, the batch goes out in
    rollout order, so that samples do not depend on how long a tool took. `serve` runs the batches in the calling
    thread, where collectives are allowed.

    Args:
        generate_batch: `(prompt_ids, max_tokens) -> (token_ids, logprobs or None)`, lists per request.
        is_end: Whether a token id ends a turn.
        any_rank: Whether a flag is set on any rank. Given where generation is a collective call (ZeRO-3, FSDP, tensor
            parallel): then every rank calls in every round, with a dummy prompt once it has none.
    """

    def __init__(
        self,
        generate_batch: Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float]] | None]],
        is_end: Callable[[int], bool],
        any_rank: Callable[[bool], bool] | None = None,
    ):
        self._generate_batch = generate_batch
        self._is_end = is_end
        self._any_rank = any_rank
        self._session: ServeSession | None = None

    async def generate(
        self, prompt_ids: list[int], max_tokens: int, sampling_params: dict[str, Any] | None = None, index: int = 0
    ) -> Generation:
        """One request; `sampling_params` are the trainer's for all of them and already known to the backend."""
        future = asyncio.get_running_loop().create_future()
        self._session.waiting.append((index, prompt_ids, max_tokens, future))
        self._session.flush()
        return await future

    def serve(self, conversations: list[Coroutine]) -> list:
        """Run the conversations to their ends; returns their results in order. Raises the first error."""
        loop = background_loop()
        session = self._session = ServeSession(len(conversations))
        running = asyncio.run_coroutine_threadsafe(gather_all([session.converse(c) for c in conversations]), loop)
        running.add_done_callback(lambda _: session.batches.put(None))
        batch: list[tuple] | None = []
        try:
            while True:
                batch = session.batches.get() if batch is not None else None
                if not (self._any_rank(batch is not None) if self._any_rank else batch is not None):
                    return running.result()
                generations = self._run(batch or [(0, [0], 1, None)])  # a dummy: others of a collective still generate
                if batch:
                    loop.call_soon_threadsafe(self._deliver, batch, generations)
        finally:
            running.cancel()

    def _run(self, batch: list[tuple]) -> list[Generation]:
        # TRL's backends take one length for a batch: the largest budget, and each sample is cut to its own.
        token_ids, logprobs = self._generate_batch([request[1] for request in batch], max(r[2] for r in batch))
        generations = []
        for i, (_, _, max_tokens, _) in enumerate(batch):
            ids = list(token_ids[i][:max_tokens])
            finish_reason = "stop" if ids and self._is_end(ids[-1]) else "length"
            generations.append(Generation(ids, logprobs and list(logprobs[i][:max_tokens]), finish_reason))
        return generations

    @staticmethod
    def _deliver(batch: list[tuple], generations: list[Generation]) -> None:
        for (_, _, _, future), generation in zip(batch, generations, strict=True):
            if not future.done():
                future.set_result(generation)


# =====================================================================================================================
# The environment: one coroutine per conversation
# =====================================================================================================================


HUNG = "hung-tool-"  # how the threads of abandoned calls are called


class ToolThreads:
    """Daemon threads for synchronous tools: as many as there are calls at the same time, used again afterwards.

    Not a thread per call: starting one waits until it runs, which holds up the event loop, and with it every
    conversation, for milliseconds where cores are busy. Not asyncio's or `concurrent.futures`' pool: those are of a
    fixed size and joined at exit, so that hung tools would starve the others and hang the end of the process.
    """

    IDLE_SECONDS = 60.0  # until a thread without work ends
    WAIT_SECONDS = 60.0  # for a free thread, where the machine refuses a new one

    def __init__(self):
        self._idle: list[queue.SimpleQueue] = []  # the inboxes of threads that wait; the last in is the first out,
        self._lock = threading.Lock()  # so that those which are too many stay idle, and end

    def submit(self, work: Callable[[], None]) -> None:
        """Have `work`, which must not raise, run in a thread at once."""
        with self._lock:
            waiting = self._idle.pop() if self._idle else None
        inbox = waiting or queue.SimpleQueue()
        inbox.put(work)
        if waiting is None:
            threading.Thread(target=self._run, args=(inbox,), name="tool-idle", daemon=True).start()

    async def submit_or_wait(self, work: Callable[[], None]) -> None:
        """`submit`; where no thread can be started, as soon as one is free. Raises `ToolsUnavailable`."""
        give_up = time.monotonic() + self.WAIT_SECONDS
        while True:
            try:
                return self.submit(work)
            except RuntimeError as error:  # can't start new thread
                if time.monotonic() > give_up:
                    raise ToolsUnavailable(
                        f"no thread for a tool within {self.WAIT_SECONDS:g} s: {error}. Check the limit of processes "
                        "(ulimit -u) and the memory, or lower max_concurrent_tools."
                    ) from error
            await asyncio.sleep(0.05)

    def _run(self, inbox: queue.SimpleQueue) -> None:
        while True:
            try:
                inbox.get(timeout=self.IDLE_SECONDS)()
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue  # work is on its way
            with self._lock:
                self._idle.append(inbox)


TOOL_THREADS = ToolThreads()


ADDRESS = r" at 0x[0-9a-fA-F]+"


def json_form(value: Any) -> Any:
    """What JSON knows, of a value that it does not know. Raises `TypeError` where its text would be an address."""
    nodata = (type, collections.abc.Iterator, collections.abc.AsyncIterator, collections.abc.Awaitable)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, nodata):
        pass
    elif dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "model_dump"):  # pydantic
        return value.model_dump(mode="json")
    elif hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    elif hasattr(value, "isoformat"):  # date, time
        return value.isoformat()
    elif isinstance(value, collections.abc.Mapping):
        return dict(value)
    elif isinstance(value, collections.abc.Set):  # in one order, whatever the hashes are
        dump = functools.partial(json.dumps, default=json_form, sort_keys=True)
        return sorted(value, key=lambda x: (0, x, "") if isinstance(x, (int, float)) else (1, 0, dump(x)))
    elif isinstance(value, (collections.deque, collections.UserList, collections.abc.ValuesView)):
        return list(value)
    elif not callable(value) and not re.search(ADDRESS, text := str(value)):  # Decimal, Path, UUID
        return text
    raise TypeError(f"the tool returned {type(value).__name__}, which is no data: expected text, bytes or JSON data")


def as_text(result: Any) -> str:
    """A tool's result as the model reads it: text as it is, bytes as UTF-8, anything else as JSON."""
    while result is not None and not isinstance(result, (str, int, float, list, tuple, dict)):
        result = json_form(result)
    return result if isinstance(result, str) else json.dumps(result, default=json_form, ensure_ascii=False)


async def run_tool(
    tool: Callable, arguments: dict[str, Any], timeout: float, finish: Callable[[Any], Any] = lambda result: result
) -> Any:
    """Run one tool: an async one as a task, a synchronous one in a daemon thread, or in a process (`ToolProcesses`).

    `finish` is what to make of the result, in that thread: a large one takes its time, and the loop is everybody's.

    Whatever it raises, `SystemExit` included, comes out as an ordinary exception. A call that takes longer than
    `timeout` seconds raises `ToolTimeout` and is abandoned, with its thread or as a cancelled task. Where there is
    neither a thread nor a process for it, it waits for one, outside its time; `ToolsUnavailable` if none comes.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future = loop.create_future()  # of (result, error): a future refuses StopIteration as exception

    def deliver(result, error):
        if not done.done():
            done.set_result((result, error))

    thread = None

    def work():
        nonlocal thread
        thread = threading.current_thread()
        thread.name = f"tool-{tool.__name__}"
        try:
            result = tool(**arguments)
            outcome = result if inspect.isawaitable(result) else finish(result), None
        except BaseException as error:
            outcome = None, error
        thread.name = "tool-idle"
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(deliver, *outcome)

    async def wait_for(awaitable):
        try:
            deliver(finish(await awaitable), None)
        except BaseException as error:  # a SystemExit here would end the loop that all conversations share
            deliver(None, error)

    call = await tool.prepare() if hasattr(tool, "prepare") else tool  # a process starts before its call's time does
    task, deadline = None, loop.time() + timeout
    try:
        if inspect.iscoroutinefunction(call):
            task = loop.create_task(wait_for(call(**arguments)))
        else:
            await TOOL_THREADS.submit_or_wait(work)
            deadline = loop.time() + timeout
        await asyncio.wait({done}, timeout=timeout)
        if done.done() and inspect.isawaitable(done.result()[0]):  # an async function behind a plain decorator
            awaitable, done = done.result()[0], loop.create_future()
            task = loop.create_task(wait_for(awaitable))
            await asyncio.wait({done}, timeout=deadline - loop.time())
    finally:
        if task is not None:
            task.cancel()
    if not done.done():
        if thread is not None:
            thread.name = f"{HUNG}{tool.__name__}"
        raise ToolTimeout(f"{tool.__name__} took longer than {timeout:g} s")
    result, error = done.result()
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
    return result


# INVARIANT: these two run in a tool's process as well, and use only what is imported here.
RESULT_SOURCE = f"""
import collections.abc, dataclasses, enum, functools, json, re
from typing import Any
ADDRESS = {ADDRESS!r}
{inspect.getsource(json_form)}
{inspect.getsource(as_text)}
"""


class ToolsUnavailable(RuntimeError):
    """No tool can be run here, whatever the policy calls: the trainer's fault, which the policy must not read."""


# What a tool's process runs. Not this module, whose imports take seconds: a killed process is replaced by a new one.
TOOL_PROCESS = """
import asyncio, ctypes, importlib.util, inspect, json, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: no hanging call outlives the trainer
calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)  # what a tool prints is no answer
path, sys.path[:] = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("tools_script", path)
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
async def awaited(result):
    return await result
answers.write(b"ready\\n")
answers.flush()
for call in calls:
    try:
        index, arguments = json.loads(call)
        result = module.TOOL_FUNCTIONS[index](**arguments)
        if inspect.isawaitable(result):  # an async function behind a plain decorator
            result = asyncio.run(awaited(result))
        answer = json.dumps({"result": as_text(result)})
    except BaseException as error:
        name = type(error).__name__
        text = str(error) if isinstance(error, Exception) else f"{name}: {error}"
        answer = json.dumps({"error": name, "text": text})
    if len(answer) > 1 << 24:  # it is read by the loop that all conversations share
        answer = json.dumps({"error": "ValueError", "text": "the result is longer than 16 MiB"})
    answers.write(b"%d\\n%s" % (len(answer), answer.encode()))
    answers.flush()
"""


class ToolProcesses:
    """A file's synchronous tools in processes: as many as there are calls at the same time, used again afterwards.

    For what a thread does not survive: `os._exit`, a crash, and C code that hangs and holds Python's interpreter lock
    (a regular expression can), which stops every thread. A process whose call runs out of time is killed. Each one
    imports the file anew, so what a tool keeps in global variables is not shared between calls.
    """

    START_SECONDS = 600.0  # to import the tools file, which is not the call's time
    IDLE_SECONDS = 60.0  # until a process without work ends
    START_ATTEMPTS = 10  # where the machine refuses a process, and no other one could take the call

    def __init__(self, path: str):
        folders = [str(folder) for folder in sys.path]
        self._command = [sys.executable, "-c", RESULT_SOURCE + TOOL_PROCESS, json.dumps([path, folders])]
        # Those that wait, each with what will end it; the last in is the first out, so that too many stay idle.
        self._idle: dict[asyncio.AbstractEventLoop, list[tuple]] = collections.defaultdict(list)
        # Those that start or work, which may become idle, and the calls that wait for one of them.
        self._busy: dict[asyncio.AbstractEventLoop, int] = collections.Counter()
        self._waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future]] = collections.defaultdict(list)
        self._path = path

    async def try_one(self) -> None:
        """Raise where a process cannot import the file: it may lock what this process, too, has imported."""
        process = await self._start()
        self._end(process)
        await process.wait()

    @staticmethod
    def _end(process: asyncio.subprocess.Process) -> None:
        """With the process goes what it started, which is of its group even where the process is dead."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def isolated(self, index: int, tool: Callable) -> Callable:
        """`tool`, the file's `TOOL_FUNCTIONS[index]`, as an async function that runs it in one of the processes."""

        async def prepare() -> Callable:
            process = await self._process()

            async def call(**arguments):
                return await self._call(process, index, arguments)

            return call

        @functools.wraps(tool)
        async def prepare_and_call(**arguments):
            return await (await prepare())(**arguments)

        prepare_and_call.prepare = prepare
        return tool if inspect.iscoroutinefunction(tool) else prepare_and_call

    async def _process(self) -> asyncio.subprocess.Process:
        """One that waits for a call, else a new one, else the next one that is done with its call.

        Raises:
            ToolsUnavailable: none can be started, and there is none to wait for.
        """
        loop = asyncio.get_running_loop()
        idle, waiting, attempts = self._idle[loop], self._waiting[loop], 0
        while True:
            while idle:
                process, end = idle.pop()
                end.cancel()
                if process.returncode is None:
                    self._busy[loop] += 1
                    return process
            self._busy[loop] += 1
            try:
                return await self._start()
            except BaseException as error:
                self._one_less(loop)
                if not isinstance(error, (OSError, RuntimeError)):
                    raise
                problem, attempts = error, attempts + 1
            if idle:  # meanwhile one is done
                continue
            if self._busy[loop]:
                waiting.append(free := loop.create_future())
                try:
                    await free
                except asyncio.CancelledError:
                    self._wake_one(loop)  # it may have been this one's turn
                    raise
            elif isinstance(problem, OSError) and attempts < self.START_ATTEMPTS:
                await asyncio.sleep(0.1)
            else:
                raise ToolsUnavailable(
                    f"no process for the tools of {self._path!r} can be started: {error_text(problem)}. See above; "
                    "check the limits of open files and processes (ulimit -n, -u), the memory, and that the file "
                    "still imports."
                ) from problem

    def _one_less(self, loop: asyncio.AbstractEventLoop) -> None:
        """A process is no longer busy: one of those that wait may look again."""
        self._busy[loop] -= 1
        self._wake_one(loop)

    def _wake_one(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting[loop]:
            free = self._waiting[loop].pop(0)
            if not free.done():
                free.set_result(None)
                return

    async def _start(self) -> asyncio.subprocess.Process:
        """A new process that has imported the file."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(  # in a session of its own: Ctrl-C is the trainer's to handle
            *self._command, stdin=pipe, stdout=pipe, start_new_session=True
        )
        async with self._killed_on_error(process), asyncio.timeout(self.START_SECONDS):
            await process.stdout.readuntil(b"ready\n")
        return process

    async def _call(self, process: asyncio.subprocess.Process, index: int, arguments: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        waits = self._idle[loop]

        def end() -> None:
            waits.remove((process, timer))
            self._end(process)

        try:
            async with self._killed_on_error(process):
                process.stdin.write(json.dumps([index, arguments]).encode() + b"\n")
                size = await process.stdout.readuntil(b"\n")
                answer = json.loads(await process.stdout.readexactly(int(size)))
            timer = loop.call_later(self.IDLE_SECONDS, end)
            waits.append((process, timer))
        finally:
            self._one_less(loop)
        if "error" in answer:
            raise type(answer["error"], (Exception,), {})(answer["text"])
        return answer["result"]

    @asynccontextmanager
    async def _killed_on_error(self, process: asyncio.subprocess.Process) -> AsyncIterator[None]:
        """Above all where the call is cancelled since it ran out of time: with the process goes what it started."""
        try:
            yield
        except BaseException as error:
            ended = isinstance(error, asyncio.IncompleteReadError)
            try:
                with suppress(TimeoutError):
                    if ended:  # first its own exit code
                        await asyncio.wait_for(process.wait(), 1.0)
            finally:
                self._end(process)
                with suppress(TimeoutError):  # until its pipes are free again
                    await asyncio.wait_for(process.wait(), 5.0)
            if ended:
                raise RuntimeError(f"the tool's process ended with exit code {await process.wait()}") from None
            raise


class ToolTimeout(Exception):
    """A tool call took longer than it may. Not `TimeoutError`, which a tool may raise for reasons of its own."""


def error_text(error: BaseException) -> str:
    """What the model reads about a failed tool."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # an exception whose own __str__ fails
        return type(error).__name__


class MultiTurnToolEnv:
    """The conversation between a model and its tools.

    Args:
        tools: Typed functions with docstrings, synchronous or async.
        system_prompt: `{tool_descriptions}` is filled in. None: no system message is added.
        max_steps: Observations per conversation, error messages included; the model then gets one last turn.
        tokenizer: Whose chat template renders the prompt. None: the backend's `tokenizer`.
        max_completion_length: Tokens of the whole completion, tool results included.
        max_turn_tokens: Tokens of one model turn. None: what remains of the completion.
        max_tool_response_tokens: Tokens of one tool result; a longer one is cut with a visible marker.
        max_model_len: The model's context in tokens. None: the backend's `max_model_len`, if it has one.
        tool_timeout: Seconds that one call may take.
        max_concurrent_tools: Calls at the same time.
        chat_template_kwargs: For every rendering, such as `{"enable_thinking": False}`.
        state_key: From the turns so far to a string, number or tuple of them that names the state in which the next
            turn begins, for `credit_assignment: gigpo`. It runs between a conversation's requests, so it must be
            quick. None: each conversation so far is a state of its own.

    Raises:
        ValueError: a tool without name, type hints or docstring.
    """

    MIN_ANSWER_TOKENS = 16  # a tool result is cut so that at least this much room is left to answer

    def __init__(
        self,
        tools: list[Callable],
        system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
        max_steps: int = 2,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_completion_length: int = 1024,
        max_turn_tokens: int | None = None,
        max_tool_response_tokens: int = 512,
        max_model_len: int | None = None,
        tool_timeout: float = 30.0,
        max_concurrent_tools: int = 256,
        chat_template_kwargs: dict[str, Any] | None = None,
        state_key: Callable[[list[Turn]], Any] | None = None,
    ):
        self.tools: dict[str, Callable] = {}
        for tool in tools:
            check_tool(tool)
            if tool.__name__ in self.tools:
                raise ValueError(f"Two tools are called {tool.__name__!r}: the model could not tell them apart.")
            self.tools[tool.__name__] = tool
        if max_tool_response_tokens < 10:
            raise ValueError(
                f"max_tool_response_tokens={max_tool_response_tokens}, expected at least 10: a cut needs a marker."
            )
        self.system_prompt = system_prompt and self._fill_in(system_prompt)
        self.max_steps = max_steps
        self.tokenizer = tokenizer
        self.max_completion_length = max_completion_length
        self.max_turn_tokens = max_turn_tokens
        self.max_tool_response_tokens = max_tool_response_tokens
        self.max_model_len = max_model_len
        self.tool_timeout = tool_timeout
        self.max_concurrent_tools = max_concurrent_tools
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.state_key = state_key
        self._sentinel = f"assistant-{secrets.token_hex(8)}"  # unguessable, so that no tool can echo it
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def _fill_in(self, system_prompt: str) -> str:
        try:
            return system_prompt.format(tool_descriptions=describe_tools(self.tools))
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"system_prompt has a placeholder or brace that is not {{tool_descriptions}} ({error!r}). "
                "Write literal braces twice: {{ and }}."
            ) from None

    # -- for people: runs in a background loop, so a notebook's own running loop is no obstacle --

    def generate(
        self, prompts: list[list[dict[str, str]]], llm: Any, sampling_params: dict[str, Any] | None = None
    ) -> dict[str, list]:
        """Run all conversations to their ends.

        Args:
            prompts: Messages, or strings (one user message).
            llm: A backend with `async generate(prompt_ids, max_tokens, sampling_params, index)`.
            sampling_params: temperature, top_p, ...; unset ones are neutral.

        Returns:
            Lists per conversation: `ids` (completion), `messages` (the whole conversation), `mask` (1 = sampled by
            the model), `prompt_ids`, `logprobs`, `turn_ids`, `stop_reasons` and the `rollouts` themselves.
        """
        sampling_params = self._with_stops(sampling_params, llm)
        states = self.start(prompts, llm)
        run_async(gather_all([self.converse(state, llm, sampling_params) for state in states]))
        return {
            "ids": [s.completion_ids for s in states], "messages": [s.prompt_messages + s.messages for s in states],
            "mask": [s.loss_mask for s in states], "prompt_ids": [s.prompt_ids for s in states],
            "logprobs": [s.logprobs for s in states], "turn_ids": [s.turn_ids for s in states],
            "stop_reasons": [s.stop_reason for s in states], "rollouts": states,
        }  # fmt: skip

    def start(self, prompts: list, llm: Any = None) -> list[Rollout]:
        """Open conversations, for `step`."""
        prompts = check_conversations(prompts, "prompts")
        tokenizer = self._tokenizer(llm)
        states, previous, ids = [], None, []
        for index, prompt in enumerate(prompts):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if messages != previous:  # the rollouts of a group have the same prompt
                previous, messages = messages, self.with_system_prompt(neutralise_prompt(messages, tokenizer))
                ids = self.prompt_ids(messages, tokenizer)
            else:
                messages = list(states[-1].prompt_messages)
            states.append(Rollout(messages, list(ids), index))
        return states

    def step(self, states: list[Rollout], llm: Any, sampling_params: dict[str, Any] | None = None) -> list[Rollout]:
        """One model turn, and its observation, of every open conversation; returns the same states."""
        sampling_params = self._with_stops(sampling_params, llm)
        still_open = [state for state in states if state.stop_reason is None]
        run_async(gather_all([self.take_turn(state, llm, sampling_params) for state in still_open]))
        return states

    def _with_stops(self, sampling_params: dict[str, Any] | None, llm: Any) -> dict[str, Any]:
        """A base model's own end token need not be the one that ends a turn in its chat template."""
        check_sampling_params(sampling_params)
        return {"stop_token_ids": self.end_of_turn_ids(self._tokenizer(llm)), **(sampling_params or {})}

    def _tokenizer(self, llm: Any) -> PreTrainedTokenizerBase:
        tokenizer = self.tokenizer or getattr(llm, "tokenizer", None)
        if tokenizer is None:
            raise ValueError("No tokenizer. Pass MultiTurnToolEnv(..., tokenizer=...) or a backend that has one.")
        return tokenizer

    # -- the conversation --

    def end_of_turn_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The token that ends a turn in the chat template, if it is a special one; sampling must stop there."""
        return [i for i in self.message_ids("", tokenizer, [])[:1] if i in tokenizer.all_special_ids]

    def with_system_prompt(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """The messages with the system prompt in front, unless they bring their own."""
        if self.system_prompt and (not messages or messages[0]["role"] != "system"):
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def prompt_ids(self, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids of a prompt, generation prompt included. The only time that messages are rendered as a whole."""
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **self.chat_template_kwargs
        )

    async def converse(self, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None = None) -> Rollout:
        """Turn after turn until the conversation has a stop reason."""
        while rollout.stop_reason is None:
            await self.take_turn(rollout, llm, sampling_params)
        return rollout

    async def take_turn(self, rollout: Rollout, llm: Any, sampling_params: dict[str, Any] | None = None) -> None:
        """Generate, parse, run the tool, append. Every id that was sampled is kept as it was sampled."""
        tokenizer = self._tokenizer(llm)
        history = rollout.prompt_ids + rollout.completion_ids
        completion_left, context_left = self._room(rollout, len(history), llm)
        budget = min(completion_left, context_left, self.max_turn_tokens or completion_left)
        if budget <= 0:
            rollout.stop_reason = StopReason.MAX_TOKENS if completion_left <= 0 else StopReason.CONTEXT_LENGTH
            return
        started = time.perf_counter()
        generation = await llm.generate(history, budget, sampling_params, rollout.index)
        turn = self._as_turn(generation, tokenizer)
        turn.seconds = time.perf_counter() - started
        turn.state_key = self._state_key(rollout.turns)
        rollout.turns.append(turn)
        turn.tool_call, answered = parse_turn(turn.text)
        if answered:
            rollout.stop_reason = StopReason.ANSWERED
        elif turn.tool_call is None and turn.finish_reason == "length":
            full = len(history) + len(turn.token_ids) >= self._context(llm)
            rollout.stop_reason = StopReason.CONTEXT_LENGTH if full else StopReason.MAX_TOKENS
        elif turn.tool_call is None:
            rollout.stop_reason = StopReason.NO_TOOL_CALL
        elif sum(t.observation is not None for t in rollout.turns) >= self.max_steps:
            rollout.stop_reason = StopReason.MAX_TURNS
        else:
            text, turn.error, turn.tool_seconds = await self.call_tool(turn.tool_call)
            self._observe(rollout, turn, text, llm)

    def _state_key(self, turns: list[Turn]) -> Any:
        if self.state_key is None:
            return None
        try:
            return self.state_key(turns)
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"The state key raised {type(error).__name__}: {error_text(error)}") from error

    def _context(self, llm: Any) -> float:
        """The model's context in tokens."""
        return self.max_model_len or getattr(llm, "max_model_len", None) or float("inf")

    def _room(self, rollout: Rollout, used: int, llm: Any) -> tuple[float, float]:
        """Tokens left of the completion and of the model's context."""
        completion = self.max_completion_length - (used - len(rollout.prompt_ids))
        return completion, self._context(llm) - used

    def _as_turn(self, generation: Generation, tokenizer: PreTrainedTokenizerBase) -> Turn:
        length = end_of_turn(tokenizer, generation.token_ids)
        ids = generation.token_ids[:length]
        reason = "stop" if length < len(generation.token_ids) else generation.finish_reason
        ended = bool(ids) and ids[-1] in tokenizer.all_special_ids and tokenizer.decode(ids[-1:]) not in CLOSING_TAGS
        text = tokenizer.decode(ids[:-1] if ended else ids)
        return Turn(ids, generation.logprobs and generation.logprobs[:length], text, reason)

    async def call_tool(self, call: ToolCall) -> tuple[str, str | None, float]:
        """(observation, error kind or None, seconds). Mistakes and a tool's failures become text.

        Raises:
            ToolsUnavailable: the machine cannot run tools.
        """
        if mistake := check_call(call, self.tools):
            return f"Error: {mistake}", "call", 0.0
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self.max_concurrent_tools))
        async with slots:
            started, error = time.perf_counter(), None  # a call's time limit starts when it runs, not when it queues
            try:
                text = await run_tool(self.tools[call.name], call.arguments, self.tool_timeout, as_text)
            except ToolsUnavailable:  # the trainer's fault, and not for the policy to read
                raise
            except ToolTimeout as raised:
                text, error = f"Error: {raised}", "timeout"
            except Exception as raised:  # any failure of a tool is an observation, never the end of a run
                text, error = f"Error: {error_text(raised)}", "tool"
            return text, error, time.perf_counter() - started

    def _observe(self, rollout: Rollout, turn: Turn, text: str, llm: Any) -> None:
        """Append the observation, cut so that an answer still fits; without room for any, the conversation ends."""
        tokenizer = self._tokenizer(llm)
        used = len(rollout.prompt_ids) + len(rollout.completion_ids)
        completion_left, context_left = self._room(rollout, used, llm)
        room = min(completion_left, context_left) - self.MIN_ANSWER_TOKENS
        limit = self.max_tool_response_tokens
        # One character more than `cut_to_tokens` reads at most, so that it sees what is cut off here.
        text = neutralise(text[: 64 * limit + 1], tokenizer)
        while (cut := cut_to_tokens(text, limit, tokenizer)) is not None:
            ids = self.message_ids(cut, tokenizer, turn.token_ids)
            if len(ids) <= room:
                turn.observation, turn.observation_ids = cut, ids
                return
            limit = min(limit - 1, limit - (len(ids) - room), len(ids))
        full = context_left < completion_left
        rollout.stop_reason = StopReason.CONTEXT_LENGTH if full else StopReason.MAX_TOKENS

    def message_ids(self, observation: str, tokenizer: PreTrainedTokenizerBase, sampled: list[int]) -> list[int]:
        """Ids from the end of the model's turn to the next generation prompt.

        A short conversation is rendered with a sentinel as the assistant's content, and what follows it is tokenised.
        Never the difference of two renders: Qwen3's template drops the thinking of a turn that is no longer last.
        """
        conversation = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": self._sentinel},
            {"role": "user", "content": result_message(observation)},
        ]
        rendered = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False, **self.chat_template_kwargs
        )
        suffix = rendered[rendered.rindex(self._sentinel) + len(self._sentinel) :]
        ids = tokenizer(suffix, add_special_tokens=False)["input_ids"]
        # The end of turn is there already if the model sampled it.
        return ids[1:] if sampled and ids[0] == sampled[-1] and ids[0] in tokenizer.all_special_ids else ids


def cut_to_tokens(text: str, limit: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """`text` in at most `limit` tokens, a visible marker at the end if it was cut; None if nothing fits."""
    if limit <= 0:
        return None
    shortened = text[: 64 * limit]  # keep the tokenizer away from megabytes that are cut off anyway
    ids = tokenizer(shortened, add_special_tokens=False)["input_ids"]
    if len(ids) <= limit and shortened == text:
        return text
    marker = "... [cut]"
    room = limit - len(tokenizer(marker, add_special_tokens=False)["input_ids"])
    while room > 0:
        cut = tokenizer.decode(ids[:room]).rstrip("\ufffd") + marker  # not half a character
        if len(tokenizer(cut, add_special_tokens=False)["input_ids"]) <= limit:
            return cut
        room -= 1
    return None


def check_tool(tool: Callable) -> None:
    """Raise `ValueError` unless the tool is a named, typed function with a docstring: the model reads all three."""
    name = getattr(tool, "__name__", None)
    if not callable(tool) or not name or name == "<lambda>":
        raise ValueError(f"A tool must be a named function, got {tool!r}.")
    if not inspect.getdoc(tool):
        raise ValueError(f"Tool {name} has no docstring. Write one: it is what the model reads to use the tool.")
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise ValueError(f"Tool {name} is a generator function. Expected `return` with all of it, not `yield`.")
    try:
        hints = typing.get_type_hints(tool)
    except Exception as error:
        raise ValueError(f"Tool {name} has type hints that cannot be read: {error_text(error)}.") from error
    for parameter in inspect.signature(tool).parameters.values():
        check_parameter(name, parameter, hints)


def check_parameter(tool: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> None:
    """Raise `ValueError` for a parameter that no call could ever give: calls are JSON objects of named arguments."""
    name = parameter.name
    if name not in hints:
        raise ValueError(f"Tool {tool} has no type hint for {name!r}. Write `{name}: str` or the like.")
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
        kind = f"*{name}" if parameter.kind is parameter.VAR_POSITIONAL else f"the positional-only {name!r}"
        raise ValueError(f"Tool {tool} has {kind}. Calls name their arguments: write `{name}: ...` without * and /.")
    if not takes_json(hints[name]):
        raise ValueError(
            f"Tool {tool}: parameter {name!r} is {type_name(hints[name])}, which no argument from JSON can be. "
            f"Types that work: {TYPES_THAT_WORK}."
        )
    if re.search(ADDRESS, repr(parameter.default)):
        raise ValueError(
            f"Tool {tool}: the default of {name!r} is {parameter.default!r}, whose address the model would read, "
            "another one in every process. Write None, and make the object inside the tool."
        )


# =====================================================================================================================
# Weights: the policy's parameters under the names of a checkpoint
# =====================================================================================================================


class PolicyWeights(VLLMGeneration):
    """TRL's walk over the parameters (FSDP 1 and 2, ZeRO-3, PEFT) without its vLLM client, made exact and complete.

    Exact: with an unsharded PEFT model each layer is merged, read and put back bit for bit. TRL merges and unmerges
    the whole model, which in bf16 moves the frozen weights a little at every sync.
    Complete: tied parameters are yielded under every name. `named_parameters()` has them once, and vLLM on CPU packs
    `lm_head` when it loads and does not refresh it from the embedding, so that it would sample from stale weights.
    """

    def _init_vllm(self) -> None:
        """No client: `VLLMServerClient` sends what `named_weights` yields."""
        model = self.model
        self.sharded = self._dist.is_fsdp or getattr(self.accelerator.state, "deepspeed_plugin", None) is not None
        by_parameter: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not self._is_adapter(name):
                by_parameter.setdefault(id(parameter), []).append(self._server_name(name))
        self.expected = {name for names in by_parameter.values() for name in names}
        self._tied = {name: set(names) - {name} for names in by_parameter.values() for name in names}
        norms = [
            n for n, m in model.named_modules() if "Norm" in type(m).__name__ and not re.search(r"\.\d+(\.|$)", n)
        ]
        self.final_norm = norms[-1] if norms else None

    def _is_adapter(self, name: str) -> bool:
        return is_peft_model(self.model) and (self.model.prefix in name or "original_module" in name)

    def _server_name(self, name: str) -> str:
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        return self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."])

    def named_weights(self, norm_scale: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor), adapters merged. Each is valid only until the next is asked for.

        Gathering shards is collective: every rank iterates to the end. Closing the generator early finishes the walk,
        so that no rank waits for ever and no adapter stays merged. `norm_scale` multiplies the final norm.
        """
        exact = is_peft_model(self.model) and not self.sharded
        source = self._merged_layer_by_layer() if exact else self._iter_named_params()
        scaled = self.final_norm and self._server_name(self.final_norm + ".weight").rpartition(".")[0]
        sent: set[str] = set()
        try:
            for name, tensor in source:
                if norm_scale != 1.0 and name.rpartition(".")[0] == scaled:
                    tensor = tensor * norm_scale
                for alias in (name, *sorted(self._tied.get(name, ()))):
                    if alias not in sent:
                        sent.add(alias)
                        yield alias, tensor
        finally:
            for _ in source:
                pass
            if is_peft_model(self.model):
                for module in self._adapted_layers().values():
                    if module.merged:
                        module.unmerge()

    def _adapted_layers(self) -> dict[str, Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return {name: module for name, module in self.model.named_modules() if isinstance(module, BaseTunerLayer)}

    def _merged_layer_by_layer(self) -> Iterator[tuple[str, torch.Tensor]]:
        layers = self._adapted_layers()
        for name, parameter in self.model.named_parameters():
            if self._is_adapter(name):
                continue
            layer = layers.get(name.partition(".base_layer")[0]) if ".base_layer" in name else None
            with merged_layer(layer):
                yield self._server_name(name), parameter.data


@contextmanager
def merged_layer(layer: Any) -> Iterator[None]:
    """Merge one adapted layer, and afterwards restore its base weights bit for bit."""
    if layer is None:
        yield
        return
    base = layer.get_base_layer()
    saved = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    try:
        layer.merge()
        yield
    finally:
        layer.unmerge()
        for name, parameter in base.named_parameters():
            parameter.data.copy_(saved[name])


class WeightCounter(TrainerCallback):
    """Counts weight changes. Not `global_step`: a checkpoint that is loaded changes the weights at the same step."""

    def __init__(self):
        self.version = 0
        self.loads = 0

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.version += 1

    def on_train_begin(self, args, state, control, **kwargs):  # after resume_from_checkpoint has loaded
        self.version += 1
        self.loads += 1

    def on_train_end(self, args, state, control, **kwargs):  # after load_best_model_at_end has loaded
        self.version += 1
        self.loads += 1


# =====================================================================================================================
# The trainer
# =====================================================================================================================


def get_rng_state() -> tuple:
    """The state of every generator that sampling may draw from on this rank."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda


def set_rng_state(state: tuple) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3])


class BetweenSteps(TrainerCallback):
    """Keeps what a checkpoint must hold, of the last moment from which a run can be resumed: between two steps.

    The state at the end of a step, not at the beginning of the next: a new epoch's first batch draws a random number
    before it, and draws it again when the run is resumed there.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self.num_tokens, self.rng = state.num_input_tokens_seen, get_rng_state()
        self.best = state.best_metric, state.best_global_step, state.best_model_checkpoint

    on_step_end = on_train_begin

    def restore(self, state: Any) -> None:
        set_rng_state(self.rng)
        state.num_input_tokens_seen = self.num_tokens

    def forget_best(self, state: Any) -> None:
        """Of this step, whose checkpoint could not be saved: the best one is that of an earlier step again."""
        state.best_metric, state.best_global_step, state.best_model_checkpoint = self.best


class EpochOrder(Sampler):
    """TRL's order of the prompts, a different one in each epoch, which depends on nothing but the epoch's number.

    TRL's own depends on how many epochs came before in this process, so that a run resumed in the second epoch would
    go through the first one's order again.
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]):
        self.sampler, self.epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + self.epoch())
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


class RunError(RuntimeError):
    """What ends a run from outside the model: raised by all ranks together, between two optimizer steps."""


class SaveError(RunError):
    """What some rank could not write: raised by all ranks together."""


class RunStopped(RunError):
    """A signal asked the run to stop; `signum` says which."""

    def __init__(self, signum: int, where: str = ""):
        super().__init__(f"stopped by {signal.Signals(signum).name}{where}")
        self.signum = signum


class Flight:
    """This rank's conversations on their way, all from the same weights.

    `land` waits for them and returns them in order, None in place of each that cannot be proven to come from those
    weights since the server restarted.
    """

    def __init__(self, rollouts: list[Rollout], conversations: list[Coroutine], llm: Any, version: str | None):
        self.prompts: list | None = None  # that it was started with, ahead of their time
        self._rollouts, self._conversations, self._llm = rollouts, conversations, llm
        self._began, self.seconds, self._future = time.perf_counter(), 0.0, None
        if not isinstance(llm, InProcessBackend):
            watched = isinstance(llm, VLLMServerClient)
            results = llm.gather_from(version, conversations) if watched else gather_all(conversations)
            self._future = asyncio.run_coroutine_threadsafe(self._timed(results), background_loop())

    async def _timed(self, results: Awaitable) -> list[Rollout | None]:
        try:
            return await results
        finally:
            self.seconds = time.perf_counter() - self._began

    def land(self) -> list[Rollout | None]:
        """In the thread that may start collectives. Raises what a conversation raised."""
        if self._future is None:
            landed = self._llm.serve(self._conversations)
            self.seconds = time.perf_counter() - self._began
            return landed
        try:
            return self._future.result()
        except BaseException:
            self.cancel()
            raise

    def wait(self) -> None:
        """Until no conversation is open, whatever became of them: `land` tells."""
        if self._future is not None:
            concurrent.futures.wait([self._future])

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()


class LookAhead:
    """An epoch's batches for `Trainer`, of which the ones to come can be seen before they are handed out.

    >>> epoch = LookAhead(iter("aabbcc"), every=2)  # a batch of rollouts lasts two forward passes
    >>> next(epoch), epoch.next_rollouts(), next(epoch), next(epoch), epoch.next_rollouts(), next(epoch)
    ('a', 'b', 'a', 'b', 'c', 'b')
    >>> epoch.next_rollouts() is None, list(epoch)
    (True, ['c', 'c'])
    """

    def __init__(self, batches: Iterator, every: int):
        self.source, self._every = batches, every
        self._ahead: collections.deque = collections.deque()
        self._taken = self._rollouts = 0

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        batch = self._ahead.popleft() if self._ahead else next(self.source)
        self._taken += 1
        return batch

    def next_rollouts(self) -> Any | None:
        """To be called once per batch of rollouts: the inputs of the next one, None at the epoch's end."""
        self._rollouts += 1
        place = self._rollouts * self._every - self._taken
        while len(self._ahead) <= place:
            try:
                self._ahead.append(next(self.source))
            except StopIteration:
                return None
        return self._ahead[place]


class MTGRPOEnvTrainer(GRPOTrainer):
    """`GRPOTrainer` whose completions are conversations and whose advantages are per turn.

    Args:
        model: Name, path, or model.
        env: The conversations. `max_completion_length` is set from `args`; its other limits are its own.
        turn_reward_funcs, outcome_reward_funcs: TRL reward functions. They get `prompts`, `completions` (messages),
            `completion_ids`, `rollout_turns` (list of `Turn` per rollout), the dataset's columns, `trainer_state`,
            `log_extra` and `log_metric`. A turn function returns per rollout a number, None, or a list with a number
            or None per turn; an outcome function a number or None. Both may be async; `reward_timeout` bounds both.
        turn_reward_weights, outcome_reward_weights: One per function. None: those of `args`, else 1 each.
        turn_advantage_coef: Weight of a turn's own advantage. None: that of `args`.
        vllm_server_host, vllm_server_port: In place of those of `args`.

    The rest is as in `GRPOTrainer`. Raises `ValueError` or `ServerError` before weights are loaded.
    """

    _tag_names = ["trl", "grpo", "mt-grpo"]
    MAX_RESTARTS = 3  # of the server, in one batch of rollouts or one push
    SAVE_ATTEMPTS, SAVE_PAUSE = 30, 60.0  # how often the trained model is tried to be saved, and the seconds between

    def __init__(
        self,
        model: Any,
        env: MultiTurnToolEnv,
        turn_reward_funcs: list[Callable] | None = None,
        outcome_reward_funcs: list[Callable] | None = None,
        turn_reward_weights: list[float] | None = None,
        outcome_reward_weights: list[float] | None = None,
        turn_advantage_coef: float | None = None,
        vllm_server_host: str | None = None,
        vllm_server_port: int | None = None,
        args: MTGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple = (None, None),
        peft_config: Any = None,
    ):
        args = args or MTGRPOConfig("mt-grpo-output")
        if not isinstance(args, MTGRPOConfig):
            raise ValueError(
                f"args is {type(args).__name__}. Expected MTGRPOConfig, which takes GRPOConfig's settings."
            )
        check_ddp_timeout(args, args.world_size)
        name = model if isinstance(model, str) else model.config._name_or_path
        tokenizer = processing_class or AutoTokenizer.from_pretrained(name)
        turn_funcs, outcome_funcs = list(turn_reward_funcs or []), list(outcome_reward_funcs or [])
        check_rewards(turn_funcs, outcome_funcs)
        turn_weights = reward_weights(turn_reward_weights or args.turn_reward_weights, turn_funcs, "turn")
        outcome_weights = reward_weights(
            outcome_reward_weights or args.outcome_reward_weights, outcome_funcs, "outcome"
        )
        check_dataset(train_dataset, "train_dataset")
        for split in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
            if split is not None:
                check_dataset(split, "eval_dataset")
        check_num_prompts(len(train_dataset), args)
        for split in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
            if split is not None:
                check_reward_columns(turn_funcs + outcome_funcs, split.column_names, "eval_dataset")
        check_reward_columns(turn_funcs + outcome_funcs, train_dataset.column_names, "train_dataset")
        check_env(args, env)
        env.tokenizer = env.tokenizer or tokenizer
        env.chat_template_kwargs = env.chat_template_kwargs or args.chat_template_kwargs or {}
        env.max_completion_length = args.max_completion_length
        model_config = model.config if not isinstance(model, str) else load_model_config(name, args)
        splits = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        for split in (train_dataset, *(s for s in splits if s is not None)):
            env.max_model_len = check_context(env, model_config, split, args)
            warn_of_control_tokens(env, split, "train_dataset" if split is train_dataset else "eval_dataset")

        self.env = env
        if args.credit_assignment == "gigpo" and env.state_key is None:
            logger.warning(
                "credit_assignment: gigpo without state keys: a state is then the whole conversation so far, so turn "
                "0 is credited as by turn_return, and a later turn by the outcome alone unless another rollout has "
                "the very same tokens before it. Define STATE_KEY = function_of_the_turns in tools_script, or use "
                "turn_return."
            )
        self.backend = backend_of(args)
        self.num_turn_funcs = len(turn_funcs)
        self.turn_advantage_coef = args.turn_advantage_coef if turn_advantage_coef is None else turn_advantage_coef
        self._rollouts: list[Rollout] = []  # of the batch being scored
        self._reward_table: RewardTable | None = None  # of the same batch, all ranks
        self._logged_rewards: torch.Tensor | None = None  # (N, F), of the same batch
        self._weight_counter, self._between_steps = WeightCounter(), BetweenSteps()
        self._saved: dict[int, Path] = {}  # by step: the checkpoints that this run wrote, and the one it began from
        self._save_errors: list[str] = []  # of this rank, since ranks met last
        self._model_name, self._peft_config = name, peft_config
        self._pushed: str | None = None  # the version that the server holds
        self._num_syncs, self._settings = 0, None  # pushes so far, and the settings of the server at the last
        self._last_loads = 0  # checkpoint loads that the colocated engine has seen
        self._wrote_rollouts = False
        self._flight: Flight | None = None  # the next batch's conversations, with overlap_rollouts
        self._epoch: LookAhead | None = None
        self._next_prompts: list | None = None
        self._stop_signal: int | None = None
        self._interruptible = False
        if self.backend == "server":
            self.client = VLLMServerClient(
                vllm_server_host or args.vllm_server_host, vllm_server_port or args.vllm_server_port, tokenizer,
                base_url=None if vllm_server_host or vllm_server_port else args.vllm_server_base_url,
                timeout=args.vllm_server_timeout, request_timeout=args.vllm_request_timeout,
                transport=args.weight_sync, sync_dir=args.weight_sync_dir,
                group_port=args.vllm_group_port,
            )  # fmt: skip
            if args.vllm_server_base_url:  # `args` are logged and saved with the model; a password must not be
                args.vllm_server_base_url = self.client.base_url
            check_server(self.client, env, model_config, args, train_dataset)

        # TRL would connect its own client and its own NCCL group; the server is ours (see `_sync_weights`).
        args.use_vllm = self.backend == "colocate"
        super().__init__(
            model=model, reward_funcs=turn_funcs + outcome_funcs, args=args, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=tokenizer, optimizers=optimizers, peft_config=peft_config,
            callbacks=[self._weight_counter, self._between_steps, *(callbacks or [])],
        )  # fmt: skip
        args.use_vllm = self.use_vllm = self.backend != "transformers"
        self.reward_weights = torch.tensor(turn_weights + outcome_weights, dtype=torch.float32)
        # TRL judges truncation by the last id, and a turn that ends with </answer> has no end-of-turn token.
        self.mask_truncated_completions = False
        # A base model's own end token need not be the one that ends a turn in its chat template.
        self.eos_token_ids = sorted({*self.eos_token_ids, *env.end_of_turn_ids(tokenizer)})
        self._sampling_params = {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty, "stop_token_ids": list(self.eos_token_ids),
            **(args.generation_kwargs or {}),
        }  # fmt: skip
        if self.backend == "server":
            self.llm = self.client
            self.client.instance = self._on_main(lambda: self.client.instance)  # all ranks expect the same version
            self.vllm_generation = PolicyWeights(self.model, self.accelerator, self.processing_class, mode="none")
        else:
            if self.backend == "colocate":
                stops = {"stop": list(CLOSING_TAGS), "stop_token_ids": self.eos_token_ids}
                stops |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
                self.vllm_generation.generation_kwargs = {**(args.generation_kwargs or {}), **stops}
            else:
                self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = self.eos_token_ids
            self.llm = InProcessBackend(self._generate_batch, lambda i: i in self.eos_token_ids, self._any_rank())

    # -- 1. roll out --

    def _generate(self, prompts: list) -> tuple:
        """TRL's generation step: conversations in place of single completions. Lists per rollout of this rank."""
        mode = "train" if self.model.training else "eval"
        self._rollouts = rollouts = self._roll_out(prompts)
        self._log_rollouts(rollouts, mode)
        loss_masks = [rollout.loss_mask for rollout in rollouts]
        if self.args.mask_truncated_completions:
            truncated = (StopReason.MAX_TOKENS, StopReason.CONTEXT_LENGTH)
            loss_masks = [[0] * len(m) if r.stop_reason in truncated else m for r, m in zip(rollouts, loss_masks)]
        logprobs = [rollout.logprobs for rollout in rollouts]
        return (
            [rollout.prompt_ids for rollout in rollouts], [rollout.completion_ids for rollout in rollouts], loss_masks,
            [rollout.messages for rollout in rollouts], None if None in logprobs else logprobs, {}, None, [],
        )  # fmt: skip

    def _roll_out(self, prompts: list) -> list[Rollout]:
        """All conversations of this rank, each one from weights that the server is known to have held throughout.

        Ranks meet once, after their conversations: whatever failed on one raises the same message on all, and where
        a server restarted (it then holds its first weights) all push again, and what is missing is rolled out again.
        """
        mode = "train" if self.model.training else "eval"
        rollouts: list[Rollout | None] = [None] * len(prompts)
        started_over, retries, waited = 0, 0, 0.0
        flight = self._take_flight(prompts) if mode == "train" else None
        for _ in range(self.MAX_RESTARTS):
            if flight is None:
                self._stop_if_asked()  # not only after a push to a server that may be gone as well
                self._sync_weights()
            error, stopped, began = None, None, time.perf_counter()
            try:
                with self._interruptions():
                    flight = flight or self._set_off(prompts, [i for i, r in enumerate(rollouts) if r is None])
                    for rollout in flight.land():
                        if rollout is not None:
                            rollouts[rollout.index - self.accelerator.process_index * len(prompts)] = rollout
            except RunStopped as raised:
                stopped = raised.signum
            except Exception as raised:  # told to the other ranks, which would wait for this one for ever
                error = raised
            if flight is not None and (stopped or error):
                flight.cancel()
            waited += time.perf_counter() - began
            again = getattr(self.llm, "retries", 0)
            if again:
                self.llm.retries = 0
            missing, again = self._meet(error, stopped, (rollouts.count(None), again))
            retries += again
            if not missing:
                break
            logger.warning(
                f"Step {self.state.global_step}: the vLLM server restarted during rollouts. Pushing the weights "
                f"again; {missing} unfinished conversations start over."
            )
            started_over += missing
            self._pushed, flight = None, None
        else:
            raise RunError(f"The vLLM server restarted {self.MAX_RESTARTS} times during one batch. See its log.")
        staleness = sum(self._weight_counter.version - r.policy_version for r in rollouts) / len(rollouts)
        for name, value in (
            ("restarted", started_over), ("retries", retries), ("seconds", flight.seconds), ("wait_seconds", waited),
            ("staleness", staleness),
        ):  # fmt: skip
            self._metrics[mode][f"rollout/{name}"].append(value)
        if mode == "train" and self._next_prompts is not None:
            self._set_off_ahead(self._next_prompts)
        return rollouts

    def _set_off_ahead(self, prompts: list) -> None:
        """Push the weights, and start the next batch's conversations. Raises `RunError` on all ranks."""
        self._sync_weights()
        error, self._next_prompts = None, None
        try:
            self._flight = self._set_off(prompts, list(range(len(prompts))))
            self._flight.prompts = prompts
        except Exception as raised:  # told to the other ranks
            error = raised
        self._meet(error)

    def _take_flight(self, prompts: list) -> Flight | None:
        """The conversations that were started ahead of this batch, if there are any."""
        flight, self._flight = self._flight, None
        if flight is not None and flight.prompts != prompts:
            raise RuntimeError("The rollouts in flight are of other prompts: the order of the data has changed.")
        return flight

    def _meet(
        self, error: Exception | None, stopped: int | None = None, counts: tuple[int, ...] = (), what: str = "Rollouts"
    ) -> list[int]:
        """Where ranks meet after what can fail on any of them; returns their counts added up.

        Raises `RunStopped` or `RunError` on all of them, with what happened on any.
        """
        text = error and f"rank {self.accelerator.process_index}: {type(error).__name__}: {error}"
        verdicts = gather_object([(text, stopped, counts)])
        if signals := [signum for _, signum, _ in verdicts if signum]:
            raise RunStopped(signals[0], f" at step {self.state.global_step}")
        if errors := [e for e, _, _ in verdicts if e]:
            raise RunError(f"{what} failed at step {self.state.global_step}: {'; '.join(errors)}") from error
        return [sum(column) for column in zip(*(counts for _, _, counts in verdicts))]

    def _set_off(self, prompts: list, which: list[int]) -> Flight:
        """Start the conversations of these prompts of this rank. Raises `ValueError` for a prompt without room."""
        rollouts = []
        try:
            started = self.env.start([prompts[i] for i in which])
            for rollout in started:
                if len(rollout.prompt_ids) >= (self.env.max_model_len or float("inf")):
                    raise ValueError(f"A prompt has {len(rollout.prompt_ids)} tokens, which fills the context.")
            rollouts = started
        finally:
            if not rollouts and isinstance(self.llm, InProcessBackend):
                self.llm.serve([])  # other ranks may be in a collective generate
        for i, rollout in zip(which, rollouts):
            rollout.index = self.accelerator.process_index * len(prompts) + i
            rollout.policy_version = self._weight_counter.version
        conversations = [self.env.converse(rollout, self.llm, self._sampling_params) for rollout in rollouts]
        return Flight(rollouts, conversations, self.llm, self._pushed)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """`Trainer`'s; with `overlap_rollouts` the prompts after these can be seen already."""
        if self.state.global_step >= self.state.max_steps:  # resumed at its end: `Trainer` looks only after a step
            return [], None
        if self.args.overlap_rollouts:
            if self._epoch is None or self._epoch.source is not epoch_iterator:
                every = self.args.steps_per_generation * self.num_iterations
                self._epoch = LookAhead(epoch_iterator, every)
            epoch_iterator = self._epoch
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _look_ahead(self) -> None:
        """Note the prompts of the next batch of rollouts, unless this is the run's or the epoch's last."""
        inputs = self._epoch.next_rollouts()
        per_batch = self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps
        last = self.state.global_step + per_batch >= self.state.max_steps
        self._next_prompts = None if last or inputs is None else [row["prompt"] for row in inputs]

    # -- stopping --

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """While training: SIGTERM and Ctrl-C end the run by `RunStopped`, from which it can be saved and resumed.

        Rollouts are interrupted; an optimizer step is finished first. A Ctrl-C more than a second later ends at once.
        """
        asked = 0.0

        def handle(signum, frame):
            nonlocal asked
            if self._stop_signal is None:
                asked, self._stop_signal = time.monotonic(), signum
                logger.warning(f"{signal.Signals(signum).name}: stopping before the next optimizer step.")
                if self._interruptible:
                    raise RunStopped(signum)
            elif signum == signal.SIGINT and time.monotonic() > asked + 1:  # launchers send the first one twice
                raise KeyboardInterrupt

        previous = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    @contextmanager
    def _interruptions(self) -> Iterator[None]:
        """Where a signal may raise `RunStopped`; not in a generation that other ranks take part in."""
        self._interruptible = not (isinstance(self.llm, InProcessBackend) and self._any_rank())
        try:
            if self._interruptible and self._stop_signal is not None:
                raise RunStopped(self._stop_signal)
            yield
        finally:
            self._interruptible = False

    def _stop_if_asked(self) -> None:
        """Collective: raises `RunStopped` on all ranks if a signal came to any."""
        if signals := [signum for signum in gather_object([self._stop_signal]) if signum]:
            raise RunStopped(signals[0], f" at step {self.state.global_step}")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> Any:
        """`Trainer.train`; whatever ends it, no conversation stays open behind it."""
        resume_from_checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)
        self._saved, step = {}, 0
        self._check_room()
        if resume_from_checkpoint:
            path = Path(resume_from_checkpoint)
            step = TrainerState.load_from_json(path / "trainer_state.json").global_step
            self._saved[step] = path
            self._warn_of_changes(path)
            if self.args.sync_ref_model:
                logger.warning(
                    "sync_ref_model: no checkpoint holds the reference model, which starts anew from the base."
                )
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if self._flight is not None:
                self._flight.cancel()
                self._flight = None
        if step and step == self.state.global_step:
            self._warn(
                f"Nothing was trained: {resume_from_checkpoint} is of step {step}, and the run ends at step "
                f"{self.state.max_steps}. To train on, set max_steps or num_train_epochs above it."
            )
        if self.state.global_step == 0:
            raise RunError(
                f"No optimizer step was taken, with {len(self.train_dataset)} prompts: the model is what it was. "
                f"Expected at least {self.args.generation_batch_size // self.args.num_generations} prompts."
            )
        return result

    def _run_record(self) -> dict[str, Any]:
        """What decides the numbers of a run: the settings, and the contents of what they name."""
        settings = {k: v for k, v in self.args.to_dict().items() if not k.startswith(NOT_TRAINED)}
        lora = self._peft_config
        columns = {
            "model_name_or_path": self._model_name,
            "lora": lora and {k: getattr(lora, k, None) for k in LORA_KEYS},
            "world_size": self.args.world_size, "save_on_each_node": self.args.save_on_each_node,
            "turn_advantage_coef": self.turn_advantage_coef,
            "reward_weights": [round(weight, 6) for weight in self.reward_weights.tolist()],
            "rewards_sha256": {n: source_sha256(f) for n, f in zip(self.reward_func_names, self.reward_funcs)},
            "tools_sha256": {name: source_sha256(tool) for name, tool in self.env.tools.items()},
            "system_prompt_sha256": sha256(str(self.env.system_prompt)),
            "chat_template_sha256": sha256(str(self.processing_class.chat_template)),
            "dataset_rows": len(self.train_dataset), "dataset_sha256": self._dataset_sha256,
        }  # fmt: skip
        plain = json.dumps(settings | columns, default=lambda value: sorted(value) if isinstance(value, set) else "?")
        return json.loads(plain)

    @functools.cached_property
    def _dataset_sha256(self) -> str:
        return dataset_sha256(self.train_dataset)

    def _warn_of_changes(self, checkpoint: Path) -> None:
        """One warning with all settings that are others than those of the checkpoint."""
        if not self.accelerator.is_main_process:
            return
        record = read_json(checkpoint / RUN_RECORD)
        if record is None:
            self._warn(f"{checkpoint} has no {RUN_RECORD}: whether it was trained with these settings is unknown.")
        elif changed := changed_settings(record, self._run_record()):
            self._warn(
                f"{checkpoint} was trained with other settings. The run goes on with these:\n  " + "\n  ".join(changed)
            )

    def _check_room(self) -> None:
        """Raises `SaveError` on all ranks where the first checkpoint, or a push of the weights, has no room."""
        args, error = self.args, None
        model, checkpoint = bytes_to_save(self.model, args.optim, self._is_sharded)
        saves = args.save_strategy != "no"
        weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.model.parameters())
        pushes = self.backend == "server" and args.weight_sync_dir and args.weight_sync != "nccl"
        try:
            if args.should_save:
                one = model if args.save_only_model else checkpoint
                by_steps = args.save_strategy == "steps" and args.save_steps >= 1 and args.max_steps > 0
                count = math.ceil(args.max_steps / args.save_steps) if by_steps else 1
                count = min(count, (args.save_total_limit or count) + 1)
                what = "a checkpoint and the trained model" if saves else "the trained model"
                least = model + (one if saves else 0)
                check_room(args.output_dir, least, model + max(checkpoint, one * count), what, "output_dir")
            if pushes and self.accelerator.is_main_process:
                check_room(args.weight_sync_dir, weights, weights, "a push of the weights", "weight_sync_dir")
        except ValueError as raised:
            error = str(raised)
        if errors := gather_object([error] if error else []):
            raise SaveError(errors[0])

    @property
    def _is_sharded(self) -> bool:
        return self._dist.is_fsdp or self.is_deepspeed_enabled

    def _generate_batch(self, prompt_ids: list[list[int]], max_tokens: int) -> tuple[list, list | None]:
        """One batch by TRL's own generation, for `InProcessBackend`."""
        if self.backend == "colocate":
            self.vllm_generation.max_completion_length = max_tokens
            if self._last_loads != self._weight_counter.loads:  # a checkpoint was loaded at the same global_step
                self._last_loads, self._last_loaded_step = self._weight_counter.loads, -1
        else:
            self.generation_config.max_new_tokens = self.generation_kwargs["max_new_tokens"] = max_tokens
        training = self.model.training
        try:
            return self._generate_single_turn(prompt_ids, None, {}, 1)
        finally:
            self.model.train(training)  # TRL's continuous batching leaves the model in training mode

    def _any_rank(self) -> Callable[[bool], bool] | None:
        """A reduce over ranks where TRL's generation is collective, else None."""
        if not self._is_sharded:
            return None
        device = self.accelerator.device
        return lambda flag: bool(self.accelerator.reduce(torch.tensor(int(flag), device=device)).item())

    def save_where_it_stopped(self) -> str:
        """Save a checkpoint after a `RunError` or `ServerError`, which find the model between two optimizer steps.

        Collective. Returns what to tell the user.
        """
        step = self.state.global_step
        if step == 0:
            return "No step was finished, so there is nothing to save."
        if step not in self._saved:  # a folder of this step may be there all the same: another run's, or torn
            self._between_steps.restore(self.state)  # the batch that failed is sampled again, and the same way
            self.args.save_only_model = False  # of which nothing could be continued
            try:
                self._save_somewhere(lambda: self._write_checkpoint(self.model, trial=None))
            except SaveError as error:
                return f"Step {step} could not be saved: {error}. {self._last_saved()}"
        self.accelerator.wait_for_everyone()  # a launcher ends all ranks soon after the first of them
        return f"The run is saved up to step {step}. Continue with --resume_from_checkpoint {self._saved[step]}"

    def save_trained_model(self) -> None:
        """Save the model and `trainer_state.json` into `output_dir`. Collective.

        Without room there the model goes into the temporary directory; without room in both this waits for some.
        Raises `SaveError` where the model is not in `output_dir`, with the place where it is.
        """
        for attempt in range(self.SAVE_ATTEMPTS):
            try:
                folder, error = self._save_somewhere(self._write_trained_model)
            except SaveError as raised:
                error = raised
            else:
                if error is None:
                    return
                raise SaveError(
                    f"The trained model could not be saved in output_dir: {error}. It is in {folder}: move it from "
                    "there, before the temporary directory is cleaned."
                )
            if attempt + 1 == self.SAVE_ATTEMPTS or self._is_stopped_within(self.SAVE_PAUSE):
                break
            self._warn(
                f"The trained model could not be saved: {error}. Make room in {self.args.output_dir} or "
                f"{tempfile.gettempdir()}: trying again, {attempt + 2} of {self.SAVE_ATTEMPTS}."
            )
        raise SaveError(f"The trained model could not be saved: {error}. {self._last_saved()}")

    def _is_stopped_within(self, seconds: float) -> bool:
        """Collective: wait, and tell whether a signal came to any rank."""
        for begun in range(math.ceil(seconds)):
            if any(gather_object([self._stop_signal is not None])):
                return True
            time.sleep(min(1.0, seconds - begun))
        return False

    def _save_somewhere(self, save: Callable[[], None]) -> tuple[str, SaveError | None]:
        """Call `save`, which writes into `args.output_dir`; if that fails, again for a new folder among the temporary.

        Collective. Returns the folder that took it, and the first error. Raises `SaveError` if both failed.
        """
        asked, failed = self.args.output_dir, None
        name = f"mt-grpo-{Path(asked).name}-{secrets.token_hex(4)}"
        other = gather_object([str(Path(tempfile.gettempdir()) / name)])[0]
        for folder in (asked, other):
            self.args.output_dir = folder
            try:
                save()
                return folder, failed
            except SaveError as error:
                failed = SaveError(f"{failed}; {error}") if failed else error
            finally:
                self.args.output_dir = asked
        if self.args.should_save:
            shutil.rmtree(other, ignore_errors=True)
        raise failed

    def _write_trained_model(self) -> None:
        folder = self.args.output_dir
        try:
            self.save_model(folder)
            with self._writing(folder):
                self.save_state()
            self._raise_save_errors()
        except SaveError:
            if self.args.should_save:  # an older model's shards beside new ones: not to be taken for a model
                for index in Path(folder).glob("*.index.json"):
                    index.unlink(missing_ok=True)
            raise

    def _warn(self, text: str) -> None:
        """Once, of what all ranks know."""
        if self.accelerator.is_main_process:
            logger.warning(text)

    def _last_saved(self) -> str:
        """Where the run can go on from, to be told to the user."""
        whole = [path for _, path in sorted(self._saved.items()) if (path / "trainer_state.json").is_file()]
        return f"Continue with --resume_from_checkpoint {whole[-1]}" if whole else "There is no earlier checkpoint."

    @contextmanager
    def _writing(self, where: str | Path) -> Iterator[None]:
        """Around what a rank writes by itself: it keeps an error for the place where the ranks meet next.

        INVARIANT: no rank leaves the others in a collective call because its disk is full.
        """
        try:
            yield
        except RunError:
            raise
        except Exception as error:  # tokenizers raises Exception, torch RuntimeError for a full disk
            logger.info(f"could not write to {where}", exc_info=error)
            self._save_errors.append(f"{where}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _raise_save_errors(self) -> None:
        """Collective: raises `SaveError` on all ranks with what any of them could not write."""
        errors, self._save_errors = gather_object(self._save_errors), []
        if errors:
            raise SaveError("; ".join(errors))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that cannot be saved costs nothing but itself: training goes on, and the next is tried."""
        try:
            self._write_checkpoint(model, trial)
        except SaveError as error:
            self._between_steps.forget_best(self.state)
            self._warn(
                f"No checkpoint of step {self.state.global_step}: {error}. Make room there. Training goes on, and "
                f"the next checkpoint is tried again. {self._last_saved()}"
            )

    def _write_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a whole checkpoint, or remove what there is of it and raise `SaveError` on all ranks."""
        path = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        whole = False
        try:
            with self._writing(path):
                if self.args.should_save:  # an older run's: it says that all of it is there
                    (path / "trainer_state.json").unlink(missing_ok=True)
                    if self._is_sharded:  # in the middle of which no rank can leave
                        needed = bytes_to_save(self.model, self.args.optim, True)[1]
                        check_room(self.args.output_dir, needed, needed, "a checkpoint", "output_dir")
            if self._is_sharded:
                self._raise_save_errors()
            with nullcontext() if self._is_sharded else self._writing(path):
                super()._save_checkpoint(model, trial)
            whole = True  # unless trainer_state.json is torn
            self._raise_save_errors()
        except SaveError as error:
            only_model = self.args.save_only_model
            whole = whole and self.args.should_save and bool(read_json(path / "trainer_state.json"))
            whole = whole and (only_model or not checkpoint_damage(path))
            if not any(gather_object([whole])):
                if self.args.should_save:
                    with suppress(OSError):
                        (path / "trainer_state.json").unlink(missing_ok=True)
                    shutil.rmtree(path, ignore_errors=True)
                raise
            self._warn(f"{path} is whole, but after it: {error}.")  # older ones removed, a push to the Hub
        if not self.args.save_only_model:
            self._saved[self.state.global_step] = path

    def create_model_card(self, *args, **kwargs) -> None:
        """TRL's, written before each checkpoint into `output_dir`, where it is nothing to lose a checkpoint for."""
        try:
            super().create_model_card(*args, **kwargs)
        except OSError as error:
            self._warn(f"No model card in {self.args.output_dir}: {error}.")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        self._raise_save_errors()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with self._writing(output_dir or self.args.output_dir):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with nullcontext() if self._is_sharded else self._writing(output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with self._writing(output_dir):
            super()._save_rng_state(output_dir)
            if self.args.should_save:
                (Path(output_dir) / RUN_RECORD).write_text(json.dumps(self._run_record(), indent=1), encoding="utf-8")
        self._raise_save_errors()  # INVARIANT: ranks meet; trainer_state.json, written next, is the last file of all

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochOrder(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """`Trainer.evaluate`, which changes nothing in training: its samples draw no random numbers from it."""
        before = get_rng_state()
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            set_rng_state(before)

    # -- 2. weights to the server --

    def _sync_weights(self) -> None:
        """Push the weights if they changed since the last push, and check now and again that they arrived.

        All ranks enter together; rank 0's verdict is broadcast, which is also the barrier: no rank sends a request
        before it, and every rank raises the same error.
        """
        version = (
            f"{getattr(self.client, 'instance', '')}-{self._weight_counter.version}"
            if self.backend == "server"
            else None
        )
        if self.backend != "server" or self._pushed == version:
            return
        if self._flight is not None:  # INVARIANT: no conversation is open on any rank while weights change
            stopped = None
            try:
                with self._interruptions():
                    self._flight.wait()
            except RunStopped as raised:
                stopped = raised.signum
            self._meet(None, stopped)
        started, held, self._pushed = time.perf_counter(), self._pushed, None
        for attempt in range(1, self.MAX_RESTARTS + 1):
            try:
                if new_server := held is None or self._on_main(self.client.weight_version) != held:
                    self.client.leave_nccl()  # of whose group a server that restarted is no member
                seconds, gap = self._push_and_check(version, new_server)
                break
            except ServerLost as error:  # on all ranks
                if attempt == self.MAX_RESTARTS:
                    raise
                logger.warning(f"{error}. Waiting for the server, then pushing again.")
                held = None
                self._on_main(lambda: self.client.wait_until_healthy(unless=lambda: self._stop_signal))
                self._stop_if_asked()
        self._num_syncs += 1
        self._pushed = version
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["sync/seconds"].append(time.perf_counter() - started)
        for phase, value in seconds.items():
            self._metrics[mode][f"sync/{phase}_seconds"].append(value)
        if gap is not None:
            self._metrics[mode]["sync/logprob_difference"].append(gap)

    def _push_and_check(self, version: str, new_server: bool) -> tuple[dict[str, float], float | None]:
        """Seconds by phase, and the difference in logprobs where it was time to compare, as on a new server."""
        if new_server:
            self._check_settings()
        if self._num_syncs == 0:
            self._check_that_pushes_arrive(version)
        seconds, every = self._push(version), self.args.weight_check_every
        if not new_server and (not every or self._num_syncs % every):
            return seconds, None
        pushed = time.perf_counter()
        try:
            gap = self._check_logprobs()
        except ServerLost:
            raise
        except ServerError:
            if self._on_main(self.client.weight_version) != version:
                raise ServerLost(f"{self.client.base_url} restarted between the push and the check of it") from None
            raise
        return {**seconds, "check": time.perf_counter() - pushed}, gap

    def _check_settings(self) -> None:
        """A server that comes back must sample as before: logprobs of another kind would show in nothing else."""
        settings = self._on_main(self.client.settings)
        before, self._settings = self._settings or settings, settings
        if changed := [f"{k}={v!r}, before {before[k]!r}" for k, v in settings.items() if v != before[k]]:
            raise ServerError(
                f"The vLLM server at {self.client.base_url} came back with {'; '.join(changed)}. Start it as before."
            )

    def _push(self, version: str, norm_scale: float = 1.0) -> dict[str, float]:
        weights = self.vllm_generation.named_weights(norm_scale)

        def push() -> dict[str, float]:
            device = self.accelerator.device
            return self.client.update_weights(weights, version, self.vllm_generation.expected, device)

        if not self.accelerator.is_main_process and self.vllm_generation.sharded:
            for _ in weights:  # gathering is collective
                pass
        return self._on_main(push)

    def _on_main(self, function: Callable[[], Any]) -> Any:
        """Run on rank 0; every rank returns its result or raises its error."""
        verdict = [None, None, ServerError]
        if self.accelerator.is_main_process:
            try:
                verdict[0] = function()
            except Exception as error:  # every rank raises it below
                kind = ServerLost if isinstance(error, ServerLost) else ServerError
                verdict[1:] = f"{type(error).__name__}: {error}", kind
        broadcast_object_list(verdict, from_process=0)
        if verdict[1]:
            raise verdict[2](f"Step {self.state.global_step}: {verdict[1]}")
        return verdict[0]

    def _check_that_pushes_arrive(self, version: str) -> None:
        """Push once with the final norm scaled, and see the server's logprobs move as the trainer's do.

        In bf16 one comparison of unchanged weights proves nothing: a server that ignores every push would pass it.
        """
        scale = 1.5
        norm_name = self.vllm_generation.final_norm
        if norm_name is None or "Gemma" in type(self.model.get_submodule(norm_name)).__name__:
            logger.warning("The first weight sync is checked without a changed weight: no final norm w * x was found.")
            return
        true, scaled = self._probe_logprobs(), self._probe_logprobs(scale)
        self._push(f"{version}-probe", scale)
        expected = (scaled - true).abs().mean().item()
        missed = self._distance_to_server(scaled)
        expected = self._on_main(lambda: expected)
        if missed > max(0.2 * expected, self._logprob_tolerance()):
            if self._on_main(self.client.weight_version) != f"{version}-probe":
                raise ServerLost(f"{self.client.base_url} restarted between the first push and the check of it")
            raise ServerError(
                f"A changed weight did not arrive at {self.client.base_url}: the trainer's logprobs moved by "
                f"{expected:.2e} on average, the server's miss theirs by {missed:.2e}. See the server's log."
            )

    def _check_logprobs(self) -> float:
        """Mean absolute difference between the trainer's and the server's logprobs of the same ids. Raises."""
        gap = self._distance_to_server(self._probe_logprobs())
        if not gap <= self._logprob_tolerance():
            raise ServerError(
                f"After the weight sync the trainer and the server at {self.client.base_url} disagree: mean "
                f"difference of logprobs {gap:.2e}, allowed {self._logprob_tolerance():g}. Is the server running "
                "another model, dtype or adapter?"
            )
        return gap

    def _distance_to_server(self, ours: torch.Tensor) -> float:
        """Mean absolute difference of logprobs; the same number on all ranks, which decide by it: the largest."""
        theirs = torch.tensor(self._on_main(lambda: self.client.score(self._probe_ids)))
        distances = gather_object([(ours - theirs).abs().mean().item()])
        return max(distances) if all(map(math.isfinite, distances)) else math.inf

    def _logprob_tolerance(self) -> float:
        return 1e-3 if self.model.dtype == torch.float32 and self._server_dtype == "float32" else 0.1

    @functools.cached_property
    def _server_dtype(self) -> str:
        dtype = self._on_main(lambda: str(self.client.server_info()["model_config"]["dtype"]))
        return dtype.removeprefix("torch.")

    @functools.cached_property
    def _probe_ids(self) -> list[int]:
        messages = self.env.with_system_prompt(self.train_dataset[0]["prompt"])
        return self.env.prompt_ids(messages, self.env.tokenizer)[:256]

    @torch.no_grad()
    def _probe_logprobs(self, norm_scale: float = 1.0) -> torch.Tensor:
        """The trainer's logprobs of the probe ids, (T-1,), at temperature 1. Collective where the model is sharded."""
        training, handle = self.model.training, None
        if norm_scale != 1.0:
            norm_module = self.model.get_submodule(self.vllm_generation.final_norm)
            handle = norm_module.register_forward_hook(lambda module, inputs, output: output * norm_scale)
        try:
            self.model.eval()  # LoRA's dropout
            ids = torch.tensor([self._probe_ids], device=self.accelerator.device)
            with self.accelerator.autocast():
                logits = self.model(input_ids=ids).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1)
            return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu()
        finally:
            self.model.train(training)
            if handle is not None:
                handle.remove()

    # -- 3. rewards --

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> torch.Tensor:
        """Run each reward function once; keep the turn rewards for the credit; return (N, F) for TRL's logs."""
        device, num_turns = self.accelerator.device, max(len(r.turns) for r in self._rollouts)
        columns = {key: [row[key] for row in inputs] for key in inputs[0] if key != "prompt"}
        columns |= {
            "prompts": prompts, "completions": completions, "completion_ids": completion_ids_list,
            "rollout_turns": [rollout.turns for rollout in self._rollouts], "trainer_state": self.state,
            "log_extra": self._log_completion_extra, "log_metric": self._log_metric,
        }  # fmt: skip
        # INVARIANT: K is the same on all ranks before anything of shape (B, K) is gathered.
        num_turns = int(self.accelerator.gather(torch.tensor([num_turns], device=device)).max())
        whole = torch.full((len(prompts), len(self.reward_funcs)), NAN)  # one number per rollout
        per_turn = torch.full((len(prompts), num_turns, self.num_turn_funcs), NAN)
        has_observation = [[turn.observation is not None for turn in rollout.turns] for rollout in self._rollouts]
        observed = pad_rows(has_observation, num_turns, False, torch.bool)
        sampled = pad_rows([[True] * len(row) for row in has_observation], num_turns, False, torch.bool)
        state = torch.full(observed.shape, -1, dtype=torch.long)
        error = stopped = None
        try:
            if self.args.credit_assignment == "gigpo":
                state = pad_rows([state_numbers(rollout) for rollout in self._rollouts], num_turns, -1, torch.long)
            with self._interruptions():
                outputs = run_rewards(self.reward_funcs, columns, self.args.reward_timeout, device)
            for f, (values, name) in enumerate(zip(outputs, self.reward_func_names, strict=True)):
                check_reward_values(values, name, self._rollouts, per_turn=f < self.num_turn_funcs)
                rows = [value if isinstance(value, (list, tuple)) else [] for value in values]
                if any(rows):
                    numbers = [[NAN if v is None else float(v) for v in row] for row in rows]
                    per_turn[:, :, f] = pad_rows(numbers, num_turns, NAN)
                missing = (list, tuple, type(None))
                whole[:, f] = torch.tensor([NAN if isinstance(v, missing) else float(v) for v in values])
        except RunStopped as raised:
            stopped = raised.signum
        except Exception as raised:  # told to the other ranks, which would wait in the gather below
            error = raised
        self._meet(error, stopped, what="Rewards")
        whole, per_turn, observed, sampled, state = (
            self.accelerator.gather(t.to(device).contiguous()) for t in (whole, per_turn, observed, sampled, state)
        )
        weights = self.reward_weights.to(device)
        turn_weights, outcome_weights = weights[: self.num_turn_funcs], weights[self.num_turn_funcs :]
        self._reward_table = RewardTable(
            # Without outcome functions R^O is 0; NaN would mean that every one of them gave None.
            outcome=nansum(whole[:, self.num_turn_funcs :] * outcome_weights, 1)
            if len(outcome_weights)
            else torch.zeros(len(whole), device=device),
            rollout_turn=nansum(whole[:, : self.num_turn_funcs] * turn_weights, 1),
            turn=nansum(per_turn * turn_weights, 2),
            observed=observed,
            sampled=sampled,
            state=state,
        )
        sums = nansum(per_turn, 1)  # (N, F_turn), of functions that gave a list
        logged = whole.clone()
        logged[:, : self.num_turn_funcs] = torch.where(sums.isnan(), whole[:, : self.num_turn_funcs], sums)
        self._logged_rewards = logged
        return logged

    # -- 4. credit --

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's step (which calls the methods above), with its advantages replaced by one per token."""
        if self.args.overlap_rollouts and self.model.training:
            self._look_ahead()
        output = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        advantages = turn_advantages(  # (N, K)
            self._reward_table, self.args.credit_assignment, group_size, self.turn_advantage_coef, self.scale_rewards,
            self.args.turn_discount,
        )  # fmt: skip
        first = self.accelerator.process_index * len(inputs)
        local = advantages[first : first + len(inputs)]  # (B, K)
        turn_ids = pad_turn_ids(self._rollouts, output["completion_ids"].shape[1])  # (B, C), C as TRL padded it
        output["advantages"] = token_advantages(local, turn_ids.to(local.device))  # (B, C)
        self._log_credit(output, advantages, group_size, mode)
        self._write_rollouts(inputs, local, mode)
        loss_mask = output["completion_mask"] * output["tool_mask"]
        mean_advantages = (output["advantages"] * loss_mask).sum(1) / loss_mask.sum(1).clamp(min=1)  # (B,)
        logged = self._logs["advantages"]  # TRL's table of completions: what is trained on, not TRL's own advantage
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(self.accelerator.gather(mean_advantages).tolist())
        return output

    # -- logging --

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's; a log that cannot be written does not end the run."""
        try:
            super().log(logs, start_time)
        except OSError as error:
            logger.warning(f"Step {self.state.global_step}: a log could not be written: {error}. Training goes on.")
            self._metrics["train" if self.model.training else "eval"].clear()  # as TRL does behind what failed

    def _log_rollouts(self, rollouts: list[Rollout], mode: str) -> None:
        """Everything about the batch's conversations: one gather, so that no metric's name can differ by rank."""
        reasons = list(StopReason)
        columns = torch.tensor(
            [
                [
                    len(r.prompt_ids), sum(len(t.token_ids) for t in r.turns),
                    sum(len(t.token_ids) + len(t.observation_ids) for t in r.turns), len(r.turns),
                    reasons.index(r.stop_reason),
                    sum(t.tool_call is not None for t in r.turns), sum(t.error is not None for t in r.turns),
                    sum(t.error == "timeout" for t in r.turns), sum(t.error == "call" for t in r.turns),
                    sum(t.tool_seconds for t in r.turns),
                ]
                for r in rollouts
            ],
            device=self.accelerator.device, dtype=torch.float32,
        )  # fmt: skip
        columns = self.accelerator.gather(columns)  # (N, 10)
        prompt, trained, total, num_turns, stop, calls, failed, timeouts, malformed, seconds = columns.T
        metrics = self._metrics[mode]
        if mode == "train":
            self.state.num_input_tokens_seen += int(prompt.sum() + trained.sum())
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        truncated = (stop == reasons.index(StopReason.MAX_TOKENS)) | (stop == reasons.index(StopReason.CONTEXT_LENGTH))
        ended = trained[~truncated] if (~truncated).any() else torch.zeros(1)
        for suffix, values in (("", trained), ("terminated_", ended)):
            metrics[f"completions/mean_{suffix}length"].append(values.mean().item())
            metrics[f"completions/min_{suffix}length"].append(values.min().item())
            metrics[f"completions/max_{suffix}length"].append(values.max().item())
        metrics["completions/clipped_ratio"].append(truncated.float().mean().item())
        metrics["completions/mean_total_length"].append(total.mean().item())
        metrics["turns/mean"].append(num_turns.mean().item())
        metrics["turns/max"].append(num_turns.max().item())
        metrics["tools/call_frequency"].append(calls.mean().item())
        attempted = calls.sum().clamp(min=1)
        metrics["tools/failure_frequency"].append((failed.sum() / attempted).item())
        metrics["tools/malformed_frequency"].append((malformed.sum() / attempted).item())
        metrics["tools/timeout_frequency"].append((timeouts.sum() / attempted).item())
        metrics["tools/mean_seconds"].append((seconds.sum() / attempted).item())
        metrics["tools/hung_threads"].append(sum(t.name.startswith(HUNG) for t in threading.enumerate()))
        for i, reason in enumerate(reasons):
            metrics[f"stop/{reason}"].append((stop == i).float().mean().item())

    def _log_credit(self, output: dict[str, Any], advantages: torch.Tensor, group_size: int, mode: str) -> None:
        metrics = self._metrics[mode]
        silent = (advantages.view(-1, group_size * advantages.shape[1]).abs() < 1e-8).all(1)
        metrics["credit/frac_groups_without_signal"].append(silent.float().mean().item())
        loss_mask = output["completion_mask"] * output["tool_mask"]
        sums = [(output["advantages"].abs() * loss_mask).sum(), loss_mask.sum()]
        if "importance_sampling_ratio" in output:
            ratio = output["importance_sampling_ratio"].expand(loss_mask.shape)
            limit = self.vllm_importance_sampling_clip_max or float("inf")
            sums.append((((ratio == 0) | (ratio >= limit)) * loss_mask).sum())
        sums = self.accelerator.reduce(torch.stack([s.float() for s in sums]), reduction="sum").tolist()
        metrics["credit/mean_abs_advantage"].append(sums[0] / max(sums[1], 1))
        if len(sums) > 2:
            metrics["sampling/frac_tokens_ratio_zero_or_clipped"].append(sums[2] / max(sums[1], 1))

    def _write_rollouts(self, inputs: list[dict[str, Any]], advantages: torch.Tensor, mode: str) -> None:
        """Add whole conversations with their rewards and advantages to `rollouts.rank<r>.jsonl`."""
        count = min(self.args.log_rollouts, len(self._rollouts))
        if not count:
            return
        rank, names = self.accelerator.process_index, self.reward_func_names
        first = rank * len(self._rollouts)
        rewards = self._logged_rewards[first : first + count].tolist()
        turn_rewards = self._reward_table.turn[first : first + count].tolist()  # weighted, given per turn
        turn_advantages = advantages[:count].tolist()
        path = Path(self.args.output_dir) / f"rollouts.rank{rank}.jsonl"
        fresh = not self._wrote_rollouts and self.state.global_step == 0  # not a resumed run, whose log goes on
        self._wrote_rollouts = True
        rows = [
            {
                "step": self.state.global_step, "mode": mode, "index": rollout.index,
                "messages": rollout.prompt_messages + rollout.messages, "stop_reason": rollout.stop_reason,
                "rewards": {n: None if r != r else r for n, r in zip(names, rewards[i], strict=True)},
                "turn_rewards": [None if r != r else r for r in turn_rewards[i][: len(rollout.turns)]],
                "turn_advantages": turn_advantages[i][: len(rollout.turns)],
                "answer": inputs[i].get("answer"),
            }
            for i, rollout in enumerate(self._rollouts[:count])
        ]  # fmt: skip
        try:
            write_rows(path, rows, fresh)
        except OSError as error:
            logger.warning(f"Step {self.state.global_step}: rollouts are not in {path}: {error}. Training goes on.")


def write_rows(path: Path, rows: list[dict[str, Any]], fresh: bool = False) -> None:
    """Add lines of JSON to a file, or begin it anew. Raises `OSError`, and then leaves no half of a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.is_file() and not fresh else 0
    try:
        with open(path, "w" if fresh else "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


# =====================================================================================================================
# Checks that need the tools, the data, the model's configuration or the server, but no weights
# =====================================================================================================================


REWARD_COLUMNS = (  # what a reward function gets beside the data's columns
    "prompts", "completions", "completion_ids", "rollout_turns", "trainer_state", "log_extra", "log_metric",
)  # fmt: skip


def check_rewards(turn_funcs: list[Callable], outcome_funcs: list[Callable]) -> None:
    if not turn_funcs + outcome_funcs:
        raise ValueError(
            "No reward functions. Expected TURN_REWARD_FUNCS or OUTCOME_REWARD_FUNCS to hold at least one."
        )
    for func in turn_funcs + outcome_funcs:
        if not callable(func) or not hasattr(func, "__name__"):
            raise ValueError(f"A reward must be a function, got {func!r}.")
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(func).parameters.values()):
            raise ValueError(
                f"Reward {func.__name__} takes no **kwargs. Add it: every dataset column is passed by name."
            )


def own_copy(value: Any) -> Any:
    """A copy of plain data (lists, dicts, tuples, turns and calls); any other object, as an environment, is itself."""
    kind = type(value)
    if kind in (list, tuple):
        return kind([own_copy(v) if type(v) in COPIED else v for v in value])  # of a list of ids, the list alone
    if kind is dict:
        return {k: own_copy(v) for k, v in value.items()}
    if kind in (Turn, ToolCall):
        copied = copy.copy(value)
        vars(copied).update(own_copy(vars(value)))
        return copied
    return value


COPIED = {list, tuple, dict, Turn, ToolCall}


def check_reward_columns(funcs: list[Callable], columns: typing.Iterable[str], where: str) -> None:
    """Raise `ValueError` where a reward function must get a column that the data does not have, or a name is taken."""
    columns = [column for column in columns if column != "prompt"]
    if taken := [column for column in columns if column in REWARD_COLUMNS]:
        raise ValueError(f"{where} has a column {taken[0]!r}, which rewards get from the trainer. Rename the column.")
    for func in funcs:
        for name, parameter in inspect.signature(func).parameters.items():
            by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if by_name and parameter.default is parameter.empty and name not in (*columns, *REWARD_COLUMNS):
                raise ValueError(
                    f"Reward {func.__name__} needs {name!r}, but {where} has no such column. It has: "
                    f"{', '.join(columns) or 'none'}; the trainer gives: {', '.join(REWARD_COLUMNS)}."
                )


def run_rewards(funcs: list[Callable], columns: dict[str, Any], timeout: float, device: torch.device) -> list:
    """What each function returns for the batch: async ones at the same time, the others one after another.

    INVARIANT: each function gets a copy of its own, so that what it changes there changes nothing for anybody else.

    Raises `RuntimeError` (the first failure, with the function's name) for one that raises or takes too long; a thread
    that hangs is abandoned. Functions without `async` run in a thread for that reason.
    """

    async def run(func: Callable) -> Any:
        def on_device(**kwargs):  # the current GPU is a thread's own
            if device.type == "cuda":
                torch.cuda.set_device(device)
            return func(**own_copy(kwargs))  # here: a large copy would hold up the loop

        on_device.__name__ = func.__name__
        try:
            if inspect.iscoroutinefunction(func):
                return await run_tool(func, own_copy(columns), timeout)
            return await run_tool(on_device, columns, timeout)
        except ToolTimeout:
            raise RuntimeError(
                f"Reward {func.__name__} took longer than reward_timeout={timeout:g} s for {len(columns['prompts'])} "
                "rollouts. Expected an answer in that time: is its server up? Raise reward_timeout if it needs longer."
            ) from None
        except Exception as error:
            text = error_text(error)
            hint = " (functions without async run in a thread, for the time limit)" if "thread" in text else ""
            if isinstance(error, KeyError) and error.args and error.args[0] not in columns:
                hint = f": there is no such column in {', '.join(columns)}"
            raise RuntimeError(f"Reward {func.__name__} raised {type(error).__name__}: {text}{hint}") from error

    values: list = [None] * len(funcs)

    async def run_in_turn(indices: list[int]) -> None:
        for i in indices:
            values[i] = await run(funcs[i])

    in_turn = [i for i, func in enumerate(funcs) if not inspect.iscoroutinefunction(func)]
    at_once = [[i] for i in range(len(funcs)) if i not in in_turn]
    longest = timeout * max(1, len(in_turn)) + 30
    try:
        run_async(gather_all([run_in_turn(indices) for indices in (in_turn, *at_once)]), longest)
    except concurrent.futures.TimeoutError:
        raise RuntimeError(
            f"Rewards took longer than {longest:g} s: an async function blocks the event loop, where no time limit "
            "can reach it. Await inside it (aiohttp, asyncio.sleep), or remove `async` and it runs in a thread."
        ) from None
    return values


def is_plain(key: Any) -> bool:
    """Whether `repr` of a key is the same in every process: no sets, no objects with an address."""
    if isinstance(key, (tuple, list)):
        return all(is_plain(part) for part in key)
    return key is None or isinstance(key, (str, int, float))


def state_numbers(rollout: Rollout) -> list[int]:
    """A number for the state in which each turn began: that of its key, or of the tokens so far if it has none.

    The same on every rank and in every process, which Python's own `hash` of a text is not.
    """
    numbers, history = [], hashlib.blake2b(digest_size=8)  # of the tokens so far, in 8 bytes each
    for turn in rollout.turns:
        state = history
        if turn.state_key is not None:
            if not is_plain(turn.state_key):
                raise ValueError(f"A state key is {turn.state_key!r}, expected a string, a number or a tuple of them.")
            state = hashlib.blake2b(repr(turn.state_key).encode(), digest_size=8)
        numbers.append(int.from_bytes(state.digest(), "big") >> 1)  # -1 stays free for "no turn"
        history.update(array.array("q", turn.token_ids + turn.observation_ids))
    return numbers


def reward_weights(weights: list[float] | None, funcs: list[Callable], kind: str) -> list[float]:
    if weights is not None and len(weights) != len(funcs):
        names = ", ".join(f.__name__ for f in funcs)
        raise ValueError(f"{kind}_reward_weights has {len(weights)} values, expected {len(funcs)}: {names or 'none'}.")
    if not all(in_range(weight, RANGES[f"{kind}_reward_weights"]) for weight in weights or []):
        raise ValueError(f"{kind}_reward_weights={weights!r}, expected finite numbers.")
    return [1.0] * len(funcs) if weights is None else [float(w) for w in weights]


def check_reward_values(values: Any, name: str, rollouts: list[Rollout], per_turn: bool) -> None:
    """Raise `ValueError` unless a reward function gave one value per rollout, or a list of one per turn."""
    if not isinstance(values, (list, tuple)) or len(values) != len(rollouts):
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"Reward {name} returned {got}, expected a list of {len(rollouts)}, one per rollout.")
    for value, rollout in zip(values, rollouts, strict=True):
        if isinstance(value, (list, tuple)) and not per_turn:
            raise ValueError(f"Reward {name} gives a list per rollout: move it from OUTCOME_ to TURN_REWARD_FUNCS.")
        if isinstance(value, (list, tuple)) and len(value) != len(rollout.turns):
            raise ValueError(f"Reward {name} gave {len(value)} values for a rollout of {len(rollout.turns)} turns.")
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if number is not None and not abs(float(number)) <= torch.finfo(torch.float32).max:  # nor NaN
                raise ValueError(
                    f"Reward {name} gave {number!r}, expected a finite number, or None for 'does not apply'."
                )


def check_dataset(dataset: Any, name: str) -> None:
    columns = getattr(dataset, "column_names", None)
    if columns is None or "prompt" not in columns:
        raise ValueError(f"{name} has columns {columns}, expected at least 'prompt' (a list of messages).")
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty.")
    for i, prompt in enumerate(dataset["prompt"]):
        check_prompt(prompt, f"{name}, row {i}")


def check_prompt(prompt: Any, where: str) -> None:
    """Raise `ValueError` unless a prompt is a list of messages whose roles and contents are text."""
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) for m in prompt):
        raise ValueError(f"{where}: a prompt must be a list of messages with role and content, got {prompt!r:.200}.")
    for message in prompt:
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"{where}: a prompt must be a list of messages with role and content, which are text, got "
                    f"{key}: {message.get(key)!r:.100} in {message!r:.200}."
                )


def longest_prompt(env: MultiTurnToolEnv, dataset: Any) -> int:
    """Tokens of the longest prompt, looked for among the 32 with the most characters."""
    prompts = sorted(dataset["prompt"], key=lambda messages: -sum(len(m["content"]) for m in messages))[:32]
    prompts = [env.with_system_prompt(neutralise_prompt(messages, env.tokenizer)) for messages in prompts]
    try:
        return max(len(env.prompt_ids(messages, env.tokenizer)) for messages in prompts)
    except jinja2.TemplateError as error:
        roles = sorted({message["role"] for messages in prompts for message in messages})
        raise ValueError(f"The model's chat template refuses a prompt ({error}). The roles are: {roles}.") from error


def warn_of_control_tokens(env: MultiTurnToolEnv, dataset: Any, name: str) -> None:
    """Say once which prompts of a dataset hold control tokens as text, and so do not reach the model as they are."""
    found = {}  # row -> its first control token
    for row, prompt in enumerate(dataset["prompt"]):
        contents = [m["content"] for m in prompt if m["role"] not in AUTHORS and isinstance(m["content"], str)]
        if token := next(filter(None, (find_control(text, env.tokenizer) for text in contents)), None):
            found[row] = token[0]
    if found:
        row, token = next(iter(found.items()))
        logger.warning(
            f"{name}, row {row}{f' (and {len(found) - 1} more)' if found.keys() - {row} else ''}: the prompt holds "
            f"the control token {token!r} as text. The model reads {neutralise(token, env.tokenizer)!r} instead. What "
            "has to stay a control token belongs into system_prompt."
        )


def check_env(args: MTGRPOConfig, env: MultiTurnToolEnv) -> None:
    """Raise `ValueError` where the settings say one thing and the environment, made apart from them, another."""
    for key, attribute in (("max_env_steps", "max_steps"), *((k, k) for k in (
        "max_turn_tokens", "max_tool_response_tokens", "tool_timeout", "max_concurrent_tools"))):  # fmt: skip
        if getattr(args, key) not in (default_of(key), getattr(env, attribute)):
            raise ValueError(
                f"args.{key}={getattr(args, key)}, but the environment has {attribute}={getattr(env, attribute)}. "
                f"Pass {attribute}={getattr(args, key)} to MultiTurnToolEnv, or use build_env."
            )
    if args.isolate_tools and not any(hasattr(tool, "prepare") for tool in env.tools.values()):
        raise ValueError(
            "isolate_tools: none of the environment's tools runs in a process. Expected functions without async, "
            "which run there, from load_tools(path, isolate=True)."
        )


def load_model_config(name: str, args: MTGRPOConfig) -> Any:
    """The configuration of the model that the trainer is going to load."""
    revision = (args.model_init_kwargs or {}).get("revision") or "main"
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(model_error(name, error)) from error


def model_error(name: str, error: Exception) -> str:
    """What to say of a model that is not there, or not whole."""
    if name.startswith((".", "/", "~")) and not os.path.exists(name):
        return f"model_name_or_path: {name!r} is no folder. Expected a model's folder or its name on the Hub."
    return f"model_name_or_path: {name!r} cannot be loaded: {' '.join(error_text(error).split())}"


def check_context(env: MultiTurnToolEnv, model_config: Any, dataset: Any, args: MTGRPOConfig) -> int | None:
    """The model's context in tokens. Raises `ValueError` where the longest prompt and its completion do not fit."""
    max_completion_length = args.max_completion_length
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if backend_of(args) == "colocate" and args.vllm_max_model_length is not None:
        context = min(args.vllm_max_model_length, context or args.vllm_max_model_length)
    prompt = longest_prompt(env, dataset)
    if context is not None and prompt + max_completion_length > context:
        raise ValueError(
            f"The longest prompt has {prompt} tokens; with max_completion_length={max_completion_length} that is "
            f"{prompt + max_completion_length}, more than the model's context of {context}. Shorten the prompts or "
            f"set max_completion_length to at most {max(context - prompt, 0)}."
        )
    return context


def bytes_to_save(model: Any, optim: OptimizerNames, sharded: bool) -> tuple[int, int]:
    """(the trained model, a whole checkpoint) in bytes, from the parameters. Of a LoRA only the adapter is saved.

    Sharded checkpoints (FSDP, DeepSpeed) hold the weights twice, and the optimizer's state in float32.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    saved = trained if is_peft_model(model) else model.parameters()
    weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in saved)
    numbers = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
    size = 4 if sharded else 1 if "8bit" in optim.value else max((p.element_size() for p in trained), default=0)
    moments = 2 if "adam" in optim.value else 0  # of the others, which keep less, nothing is counted
    return weights, weights * (2 if sharded else 1) + numbers * (moments + sharded) * size


def check_room(folder: str, least: int, planned: int, what: str, key: str) -> None:
    """Raise `ValueError` where `least` bytes have no room in a directory; warn where `planned` have none."""
    gib = 2.0**30
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            usage = shutil.disk_usage(folder)
    except OSError as error:
        raise ValueError(f"{key}={folder!r} cannot be written: {error}. Set {key} to a writable directory.") from None
    found = f"{key}={folder!r} has {usage.free / gib:.3f} GiB free"
    if usage.total and usage.free < 1.05 * least:  # some network file systems say 0 of 0
        raise ValueError(f"{found}; {what} needs {1.05 * least / gib:.3f} GiB. Make room there, or set another {key}.")
    if usage.total and usage.free < 1.05 * planned:
        logger.warning(
            f"{found}; all that the run may save needs {1.05 * planned / gib:.3f} GiB. Make room there, or set "
            "save_total_limit."
        )


def check_server(
    client: VLLMServerClient, env: MultiTurnToolEnv, model_config: Any, args: MTGRPOConfig, dataset: Any
) -> None:
    """Raise `ServerError` for a server that does not fit the recipe. Reads, changes nothing."""
    client.wait_until_healthy()
    card, info = client.model_card, client.server_info()
    where = f"The vLLM server at {client.base_url}"
    served = info["model_config"]
    if args.vllm_importance_sampling_correction and served["logprobs_mode"] != "processed_logprobs":
        raise ServerError(
            f"{where} runs with --logprobs-mode {served['logprobs_mode']}: its logprobs are not those of the sampled "
            "distribution, which biases the importance-sampling correction. Start it with --logprobs-mode "
            "processed_logprobs, or set vllm_importance_sampling_correction: false."
        )
    ours = model_config.get_text_config()
    try:
        theirs = AutoConfig.from_pretrained(served["model"]).get_text_config()
    except (OSError, ValueError):  # a path of the server's own machine; a wrong model then fails at the first push
        logger.warning(f"{where} serves {served['model']!r}, whose configuration cannot be read here to compare it.")
        theirs = ours
    for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(ours, key, None) != getattr(theirs, key, None):
            raise ServerError(
                f"{where} serves {served['model']!r} with {key}={getattr(theirs, key, None)}, but the model to train "
                f"has {getattr(ours, key, None)}. Start the server with the recipe's model_name_or_path."
            )
    text = '<tool>{"name": "x"}</tool> Ünï 123'
    payload = {"model": card["id"], "prompt": text, "add_special_tokens": False}
    tokens = client.request("POST", "/tokenize", json=payload, read=lambda answer: answer["tokens"])
    if tokens != env.tokenizer(text, add_special_tokens=False)["input_ids"]:
        raise ServerError(f"{where} tokenises {text!r} differently: it was started with another tokenizer.")
    needed = longest_prompt(env, dataset) + args.max_completion_length
    if card["max_model_len"] < needed:
        raise ServerError(
            f"{where} has a context of {card['max_model_len']} tokens; the longest prompt and max_completion_length="
            f"{args.max_completion_length} need {needed}. Start it with --max-model-len {needed} or more."
        )
    env.max_model_len = min(card["max_model_len"], env.max_model_len or card["max_model_len"])
    client.weight_version()  # 404 without the development endpoints


# =====================================================================================================================
# Tools and rewards from files, data
# =====================================================================================================================


def load_lists(path: str, key: str, names: list[str]) -> list[list]:
    """Import a file by path and return the lists with these names (missing ones empty, all missing an error)."""
    if not Path(path).is_file():
        raise ValueError(f"{key}: {path!r} is not a file. Expected a Python file that defines {' or '.join(names)}.")
    if not path.endswith(".py"):
        raise ValueError(f"{key}: {path!r} is no Python file. Expected one that ends in .py.")
    spec = importlib.util.spec_from_file_location(module_name(path, key), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, which would end the run without a word
        raise ValueError(f"{key}: {path!r} fails to import: {type(error).__name__}: {error_text(error)}") from error
    if not any(hasattr(module, name) for name in names):
        raise ValueError(f"{key}: {path!r} defines no list. Add the line `{names[0]} = [my_function]`.")
    lists = [getattr(module, name, []) for name in names]
    for name, value in zip(names, lists, strict=True):
        if not isinstance(value, list):
            raise ValueError(f"{key}: {name} of {path!r} is {type(value).__name__}, expected a list.")
    return lists


def module_name(path: str, key: str) -> str:
    """Under which a recipe's file is imported: its own, so that two files of one name do not meet."""
    return f"mt_grpo_{key}_{Path(path).stem}_{zlib.crc32(str(Path(path).resolve()).encode()):08x}"


def load_state_key(path: str) -> Callable[[list[Turn]], Any] | None:
    """`STATE_KEY` of a tools file, if it has one: from the turns so far to what names the state (`gigpo`)."""
    if module_name(path, "tools_script") not in sys.modules:
        load_tools(path)
    state_key = getattr(sys.modules[module_name(path, "tools_script")], "STATE_KEY", None)
    if state_key is not None and (not callable(state_key) or inspect.iscoroutinefunction(state_key)):
        raise ValueError(f"tools_script: STATE_KEY of {path!r} is {state_key!r}, expected a function of the turns.")
    return state_key


def load_tools(path: str, isolate: bool = False) -> list[Callable]:
    """The `TOOL_FUNCTIONS` of a file, each checked; with `isolate` they run in processes. Raises `ValueError`.

    A file may define `CHECK_TOOLS`, a function that raises where its tools cannot work: no data, no server.
    """
    path = absolute(path)  # processes import it too, later
    (tools,) = load_lists(path, "tools_script", ["TOOL_FUNCTIONS"])
    if not tools:
        raise ValueError(f"tools_script: TOOL_FUNCTIONS of {path!r} is empty.")
    for tool in tools:
        check_tool(tool)
    check = getattr(sys.modules[module_name(path, "tools_script")], "CHECK_TOOLS", lambda: None)
    if inspect.iscoroutinefunction(check):
        raise ValueError(f"tools_script: CHECK_TOOLS of {path!r} is async. Expected an ordinary function.")
    try:
        check()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, which would end the run without a word
        text = error_text(error) if isinstance(error, Exception) else f"{type(error).__name__}: {error_text(error)}"
        raise ValueError(f"tools_script: the tools of {path!r} do not work: {text}") from error
    if isolate:
        processes = ToolProcesses(path)
        try:
            run_async(processes.try_one())
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"tools_script: {path!r} can be imported here, but not in a process beside this one (isolate_tools): "
                f"{error_text(error)}. See above, or set isolate_tools: false."
            ) from error
        tools = [processes.isolated(index, tool) for index, tool in enumerate(tools)]
    return tools


def load_rewards(path: str) -> tuple[list[Callable], list[Callable]]:
    """(`TURN_REWARD_FUNCS`, `OUTCOME_REWARD_FUNCS`) of a file. Raises `ValueError`."""
    turn_funcs, outcome_funcs = load_lists(path, "reward_fn", ["OUTCOME_REWARD_FUNCS", "TURN_REWARD_FUNCS"])[::-1]
    check_rewards(turn_funcs, outcome_funcs)
    return turn_funcs, outcome_funcs


def make_arithmetic(num_rows: int, seed: int, split: str = "train") -> list[dict[str, str]]:
    """Sums, differences and products of two or three numbers from 2 to 99, without repeats.

    An expression belongs to `test` if its CRC-32 is divisible by 10, so that no test problem is ever trained on.

    >>> make_arithmetic(1, 0)
    [{'question': 'What is 99 - 55 * 7?', 'answer': '-286'}]
    """
    rng = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < num_rows:
        numbers = [rng.randint(2, 99) for _ in range(rng.choice((2, 3)))]
        signs = [rng.choice("+-*") for _ in numbers[1:]]
        expression = str(numbers[0]) + "".join(f" {s} {n}" for s, n in zip(signs, numbers[1:], strict=True))
        if (zlib.crc32(expression.encode()) % 10 == 0) == (split == "test"):
            total, term = 0, numbers[0]  # products first
            for sign, number in zip(signs, numbers[1:], strict=True):
                total, term = (
                    (total, term * number) if sign == "*" else (total + term, {"+": 1, "-": -1}[sign] * number)
                )
            rows[expression] = {"question": f"What is {expression}?", "answer": str(total + term)}
    return list(rows.values())


def make_chain(num_rows: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
    """Chains of three or four operations on one number, each value from 0 to 999, without repeats; split as above.

    >>> make_chain(1, 16)
    [{'question': 'Start with 9, then + 6, then - 7, then * 4.', 'steps': ['15', '8', '32'], 'answer': '32'}]
    """
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < num_rows:
        value = rng.randint(2, 20)
        question, steps = f"Start with {value}", []
        for _ in range(rng.choice((3, 4))):
            sign, number = rng.choice("+-*"), rng.randint(2, 9)
            value = {"+": value + number, "-": value - number, "*": value * number}[sign]
            question += f", then {sign} {number}"
            steps.append(str(value))
        held_out = zlib.crc32(question.encode()) % 10 == 0
        if held_out == (split == "test") and all(0 <= int(step) <= 999 for step in steps):
            rows[question] = {"question": f"{question}.", "steps": steps, "answer": steps[-1]}
    return list(rows.values())


def to_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    """One training row from TriviaQA's schema, GSM8K's, a plain question and answer, or ready messages.

    >>> to_row({"question": "2+2?", "answer": "It is 2 and 2.\\n#### 4"}, "")["answer"]
    '4'
    >>> to_row({"question": "Who?", "answer": {"value": "Ada", "aliases": ["Ada", "Lovelace"]}}, "")["answer"]
    ['Ada', 'Lovelace']
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {row!r:.100}, expected an object with 'question' and 'answer', or 'prompt'.")
    if "prompt" in row:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}] if prompt.strip() else None
        if isinstance(prompt, list):
            prompt = [
                {**m, "content": plain_content(m.get("content"), where)} if isinstance(m, dict) else m for m in prompt
            ]
        check_prompt(prompt, where)
        return {**row, "prompt": prompt}
    if "question" not in row or "answer" not in row:
        raise ValueError(f"{where} has columns {sorted(row)}, expected 'question' and 'answer', or 'prompt'.")
    answer = row["answer"]
    if isinstance(answer, dict):  # TriviaQA
        if "value" not in answer:
            raise ValueError(f"{where}: answer has {sorted(answer)}, expected 'value' and 'aliases'.")
        aliases = answer.get("aliases") or []
        if not fits_type(aliases, list[str]) or not isinstance(answer["value"], str):
            raise ValueError(
                f"{where}: answer is {answer!r:.100}, expected text as 'value', a list of it as 'aliases'."
            )
        answer = list(dict.fromkeys([answer["value"], *aliases]))
    elif isinstance(answer, str) and "####" in answer:  # GSM8K
        answer = answer.rpartition("####")[2].strip().replace(",", "")
    question = row["question"]
    if not isinstance(question, str) or not question.strip() or answer is None:
        key, value = ("answer", answer) if answer is None else ("question", question)
        raise ValueError(f"{where}: {key} is {value!r:.100}, expected {'one' if key == 'answer' else 'text'}.")
    return {**row, "prompt": [{"role": "user", "content": question}], "question": question, "answer": answer}


def plain_content(content: Any, where: str) -> Any:
    """A message's content as text where it is a list of text parts. Raises `ValueError` for an image or the like."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type", "text") != "text":
            raise ValueError(
                f"{where}: a message has the part {part!r:.100}. Rollouts are text only: expected text parts."
            )
    return "".join(part["text"] for part in content)


MOST_GENERATED = 1_000_000  # rows: there are not many more without repeats
GENERATED_DATASETS = {"arithmetic": make_arithmetic, "chain": make_chain}
HUB_DATASETS = {  # short name -> (Hub name, configuration, name of the test split)
    "trivia_qa": ("mandarjoshi/trivia_qa", "rc.wikipedia", "validation"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
}


def load_rows(name: str, split: str, size: int | None = None, config: str | None = None) -> Dataset:
    """Training or test rows with `prompt` (messages), `question` and `answer`.

    Args:
        name: `arithmetic` or `chain` (generated), `trivia_qa` or `gsm8k` (Hub), any Hub name, a `.jsonl` file, or a
            folder with `<split>.jsonl`.
        split: `train`, `test`, or what the dataset calls it.
        size: The first so many rows. None: all (4,096 generated ones).
        config: The Hub dataset's configuration; None: the one of the table above.

    Raises:
        ValueError: no such file, a line that is not JSON, missing columns.
    """
    hub = False
    if name in GENERATED_DATASETS:
        if split not in ("train", "test") or (size or 0) > MOST_GENERATED:
            raise ValueError(
                f"{name}: split {split!r}, size {size}. Expected train or test, at most {MOST_GENERATED} rows."
            )
        rows = GENERATED_DATASETS[name](size or 4096, seed=0 if split == "train" else 1, split=split)
    elif name.endswith((".jsonl", ".json")) or Path(name).is_dir():
        path = Path(name) / f"{split}.jsonl" if Path(name).is_dir() else Path(name)
        rows = read_jsonl(path, size)
    elif Path(name).is_file() or Path(name).suffix in (".csv", ".tsv", ".parquet", ".txt") or name[0] in "/.~":
        raise ValueError(
            f"dataset_name: {name!r} {'cannot be read' if Path(name).is_file() else 'does not exist'}. Expected JSON "
            f"lines (.jsonl, .json), a folder of them, {', '.join(GENERATED_DATASETS)}, or a Hub name."
        )
    else:
        hub, rows = True, load_from_hub(name, split, size, config)
    if config and not hub:
        raise ValueError(f"dataset_config={config!r} has no effect with dataset_name: {name!r}. Remove it.")
    if not len(rows):
        raise ValueError(f"dataset_name: {name!r}, split {split!r}, is empty. Expected at least one row.")
    return to_dataset([to_row(row, f"dataset {name!r}, row {i}") for i, row in enumerate(rows)], name)


def load_from_hub(name: str, split: str, size: int | None, config: str | None) -> Dataset:
    """Rows of a dataset of the Hub. Raises `ValueError` with the dataset's name for whatever goes wrong."""
    hub_name, hub_config, test_split = HUB_DATASETS.get(name, (name, None, "test"))
    split = test_split if split == "test" else split
    try:
        rows = load_dataset(hub_name, config or hub_config, split=split)
    except Exception as error:  # the network's, the Hub's and the files' errors have no common class
        known = [] if name in HUB_DATASETS else [*GENERATED_DATASETS, *HUB_DATASETS]
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(
            f"dataset_name: {name!r} ({config or hub_config or 'no configuration'}, split {split!r}) cannot be "
            f"loaded from the Hub: {type(error).__name__}: {' '.join(str(error).split())}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        ) from error
    if name in HUB_DATASETS:  # without TriviaQA's articles, which are most of its size
        rows = rows.select_columns(["question", "answer"])
    return rows.select(range(min(size, len(rows)))) if size else rows


def to_dataset(rows: list[dict[str, Any]], name: str) -> Dataset:
    """The rows as a dataset, None where a row lacks a column of another. Raises `ValueError` for mixed types."""
    columns = list(dict.fromkeys(key for row in rows for key in row))  # `from_list` takes those of the first row
    try:
        return Dataset.from_list([{key: row.get(key) for key in columns} for row in rows])
    except (ValueError, TypeError, OverflowError) as error:
        for key in columns:
            first: dict[str, int] = {}
            for i, row in enumerate(rows):
                if row.get(key) is not None:
                    first.setdefault(type(row[key]).__name__, i)
            if len(first) > 1:
                found = ", ".join(f"{kind} in row {i}" for kind, i in first.items())
                raise ValueError(f"dataset {name!r}: {key!r} is {found}. Expected one type in all rows.") from error
        raise ValueError(f"dataset {name!r} cannot be made a table: {error}") from error


def read_jsonl(path: Path, size: int | None) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"dataset_name: {str(path)!r} is not a file. Expected JSON lines with question and answer.")
    rows, number = [], 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if size is not None and len(rows) >= size:
                    break
                if text := line.decode("utf-8-sig").strip():  # with or without a byte order mark
                    rows.append(json.loads(text))
                    if not isinstance(rows[-1], dict):
                        raise ValueError(f"{path}, line {number} is {text:.80}, expected an object on each line.")
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error.msg}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number} is not UTF-8 text: {error}. Save the file as UTF-8.") from None
    except (OSError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} cannot be read: {error}.") from error
    return rows


# =====================================================================================================================
# main
# =====================================================================================================================


class LastingOutput(io.FileIO):
    """Standard output or error for the whole run: where its reader has gone, what is written goes to /dev/null.

    Without it the first line after `| head` has ended, or after a terminal was closed, would end the run.
    """

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # for threads and processes too
            os.close(null)
            name, other = ("standard output", 2) if self.fileno() == 1 else ("standard error", 1)
            with suppress(OSError):  # past the other one's buffer: it may be what is being written
                os.write(other, f"{name} cannot be written to any more ({error}): training goes on.\n".encode())
            return super().write(data)


def keep_output_open() -> None:
    """Have no closed pipe end the run. Streams that are not the process's own, as in a notebook, stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the start
            setattr(sys, name, open(os.devnull, "w"))
        elif stream is getattr(sys, f"__{name}__") and not isinstance(stream.buffer, LastingOutput):
            with suppress(OSError):
                stream.flush()
            raw = LastingOutput(stream.fileno(), "w", closefd=False)
            lasting = io.TextIOWrapper(
                raw if stream.write_through else io.BufferedWriter(raw), encoding=stream.encoding,
                errors=stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through,
            )  # fmt: skip
            setattr(sys, name, lasting)


@contextmanager
def output_lock(path: str) -> Iterator[None]:
    """Hold the output directory for this run. Raises `ValueError` where another run writes there; rank 0 decides."""
    if int(os.environ.get("RANK", 0)):
        yield
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        lock = open_lock(Path(path) / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        what = f"{error.strerror} ({error.filename})" if error.strerror else error
        raise ValueError(
            f"output_dir={path!r} cannot be written to: {what}. Expected a folder, which may be new."
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"output_dir={path!r} is in use by another run{file.read()}. Set another output_dir, or wait for it."
            ) from None
        except OSError as error:  # a file system without locks
            logger.warning(f"output_dir={path!r} cannot be locked ({error}): keep other runs out of it.")
        file.truncate(0)
        file.write(f" (process {os.getpid()})")
        file.flush()
        yield


def build_trainer(script_args: MTGRPOScriptArguments, args: MTGRPOConfig, model_args: ModelConfig) -> MTGRPOEnvTrainer:
    """Everything a recipe says, put together. Raises before weights are loaded if something is wrong."""
    tools = load_tools(script_args.tools_script, args.isolate_tools)
    turn_funcs, outcome_funcs = load_rewards(script_args.reward_fn)
    config = script_args.dataset_config
    train_split, test_split = script_args.dataset_train_split, script_args.dataset_test_split
    train_dataset = load_rows(script_args.dataset_name, train_split, script_args.dataset_size, config)
    eval_dataset = None
    if args.eval_strategy == "no" and script_args.eval_dataset_size is not None:
        raise ValueError("eval_dataset_size has no effect with eval_strategy: no. Remove it, or set eval_strategy.")
    if args.eval_strategy != "no":
        eval_dataset = load_rows(script_args.dataset_name, test_split, script_args.eval_dataset_size, config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_args.model_name_or_path, revision=model_args.model_revision, trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(model_error(model_args.model_name_or_path, error)) from error
    if not tokenizer("1", add_special_tokens=False)["input_ids"]:  # transformers makes one without its files
        raise ValueError(f"model_name_or_path: {model_args.model_name_or_path!r} has no tokenizer that reads text.")
    env = build_env(script_args, args, tools, tokenizer)
    args.model_init_kwargs = {
        "revision": model_args.model_revision, "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation, **(args.model_init_kwargs or {}),
    }  # fmt: skip
    try:
        return MTGRPOEnvTrainer(
            model=model_args.model_name_or_path, env=env, turn_reward_funcs=turn_funcs, args=args,
            outcome_reward_funcs=outcome_funcs, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=tokenizer, peft_config=get_peft_config(model_args),
        )  # fmt: skip
    except Exception as error:  # weights that are not there, not whole or of another shape, keys that nothing takes
        loading = isinstance(error, (OSError, ImportError, SafetensorError)) or re.search(
            "ignore_mismatched_sizes|unexpected keyword argument", str(error)
        )
        if args.push_to_hub and type(error).__module__.startswith(("httpx", "huggingface_hub")):
            raise ValueError(f"push_to_hub: the Hub cannot be reached or refuses: {error}") from error
        if not loading:
            raise
        raise ValueError(model_error(model_args.model_name_or_path, error)) from error


def build_env(
    script_args: MTGRPOScriptArguments, args: MTGRPOConfig, tools: list[Callable], tokenizer: PreTrainedTokenizerBase
) -> MultiTurnToolEnv:
    """The environment that a recipe describes."""
    return MultiTurnToolEnv(
        tools,
        DEFAULT_SYSTEM_PROMPT if script_args.system_prompt is None else script_args.system_prompt,
        args.max_env_steps,
        tokenizer=tokenizer,
        max_completion_length=args.max_completion_length,
        max_turn_tokens=args.max_turn_tokens,
        max_tool_response_tokens=args.max_tool_response_tokens,
        tool_timeout=args.tool_timeout,
        max_concurrent_tools=args.max_concurrent_tools,
        chat_template_kwargs=args.chat_template_kwargs,
        state_key=load_state_key(script_args.tools_script) if args.credit_assignment == "gigpo" else None,
    )


def main(argv: list[str] | None = None) -> None:
    """Train as the recipe says; write the model, `trainer_state.json` and the rollouts into `output_dir`."""
    keep_output_open()
    with ExitStack() as stack:
        try:
            script_args, args, model_args = parse_arguments(argv)
            stack.enter_context(output_lock(args.output_dir))
            trainer = build_trainer(script_args, args, model_args)
        except (ValueError, ServerError) as error:
            sys.exit(f"error: {error}")
        run(trainer, script_args)


def run(trainer: MTGRPOEnvTrainer, script_args: MTGRPOScriptArguments) -> None:
    """Train to the end, or save what there is and exit: 1 after a failure, 128 + its number after a signal."""
    args = trainer.args
    with trainer.stop_on_signals():
        try:
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        except RunStopped as stopped:
            print(f"{stopped}. {trainer.save_where_it_stopped()}", file=sys.stderr, flush=True)
            sys.exit(128 + stopped.signum)
        except (RunError, ServerError) as error:
            logger.error("training stopped", exc_info=error if error.__cause__ else None)
            sys.exit(f"error: {error}\n{trainer.save_where_it_stopped()}")
        try:
            trainer.save_trained_model()  # a signal that comes now changes nothing
        except SaveError as error:
            sys.exit(f"error: {error}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    main()
