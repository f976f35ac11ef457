"""Checks before weights are loaded: of what would train something else in silence, lose work, or wait for ever."""

from __future__ import annotations

import heapq
import importlib.metadata
import logging
import os
import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from datasets import Dataset
from packaging.requirements import Requirement
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, ProcessorMixin, Trainer
from transformers.integrations import get_available_reporting_integrations
from trl import GRPOConfig

from mt_grpo.base.errors import ServerError
from mt_grpo.base.ranks import on_main_process
from mt_grpo.conversation.conversations import check_conversations, limits_of
from mt_grpo.images.pictures import OTHER_KINDS, TOWER, images_of, reader_of, with_pictures
from mt_grpo.images.reader import image_reader, read_row
from mt_grpo.recipe.data import empty_prompts, with_prompts
from mt_grpo.recipe.parse import default_of
from mt_grpo.rollout import ROLES, Origin
from mt_grpo.training.further_credit import CREDIT_ASSIGNMENTS
from mt_grpo.training.policy_scores import asked_of
from mt_grpo.training.rewards import REWARD_COLUMNS

logger = logging.getLogger(__name__)

# What changes the distribution that is sampled beside the temperature, and the value that does not.
CUTS = {
    "top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None),
    "presence_penalty": (0.0, None), "frequency_penalty": (0.0, None), "min_tokens": (0, None),
    "logit_bias": ({}, None), "bad_words": ([], None), "allowed_token_ids": (None,),
}  # fmt: skip
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # losses with PPO's clipped ratio
DATA_URL = re.compile("data:[^'\"]*")  # of an image


def backend_of(args: GRPOConfig) -> str:
    """The backend that samples the tokens: `server`, `colocate` or `transformers`."""
    return args.vllm_mode if args.use_vllm else "transformers"


def cuts_of(args: GRPOConfig) -> dict[str, Any]:
    """The settings that make the distribution that is sampled from another one than the policy's."""
    given = {key: getattr(args, key, None) for key in CUTS} | (args.generation_kwargs or {})
    return {key: given[key] for key, same in CUTS.items() if given[key] not in same}


def text_of_cuts(args: GRPOConfig) -> str:
    """The sampling settings that change the distribution, such as `top_p=0.9`, as text."""
    return ", ".join(f"{key}={value}" for key, value in cuts_of(args).items())


def check_config(args: GRPOConfig) -> None:
    """Raise `ValueError` for settings that would train something else than they say. Set `old_logps` if it is None."""
    estimator, chosen = CREDIT_ASSIGNMENTS[args.credit_assignment], f"credit_assignment={args.credit_assignment!r}"
    for key in ("turn_advantage_coef", "turn_discount", "outcome_in_return", "state_baseline"):
        if (value := getattr(args, key)) != default_of(key, (type(args),)) and key not in estimator.reads:
            readers = " or ".join(name for name, other in CREDIT_ASSIGNMENTS.items() if key in other.reads)
            raise ValueError(f"{key}={value} has no effect with {chosen}. Remove it, or use {readers}.")
    if estimator.per_turn and (args.off_policy_mask_threshold is not None or args.loss_type == "vespo"):
        raise ValueError(f"off_policy_mask_threshold and vespo have one advantage per sequence, not {chosen}.")
    cap, backend = args.epsilon if args.epsilon_high is None else args.epsilon_high, backend_of(args)
    if args.loss_type == "cispo" and cap < 1:
        raise ValueError(f"epsilon_high: loss_type: cispo multiplies gradients by a cap of {cap}, below 1. Set 5.")
    if (args.loss_type, backend) == ("vespo", "server") and not args.vllm_importance_sampling_mode.startswith("token"):
        raise ValueError("loss_type: vespo weighs ratios of tokens. Set vllm_importance_sampling_mode: token_mask.")
    if args.use_transformers_continuous_batching and (args.bf16 or args.fp16):
        raise ValueError("use_transformers_continuous_batching casts the trained weights to bf16. Set bf16: false.")
    if backend == "colocate" and args.vllm_tensor_parallel_size > 1:
        raise ValueError("vllm_tensor_parallel_size of a colocated engine: ranks would wait for each other. Set 1.")
    if args.accelerator_config.split_batches:
        raise ValueError("accelerator_config: with split_batches some prompts would never be trained. Remove it.")
    if args.metric_for_best_model in ("loss", "eval_loss"):  # what transformers takes by default
        raise ValueError("metric_for_best_model: loss does not fall as the policy gets better. Set it to reward.")
    if args.eval_strategy == "no" and (args.save_strategy == "best" or args.do_eval):
        raise ValueError("eval_strategy: no: nothing is evaluated, nor saved as the best. Set eval_strategy: steps.")
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):  # in transformers both wait for a loss to fall
        mode = "max" if args.greater_is_better else "min"
        args.lr_scheduler_kwargs = {"mode": mode, **(args.lr_scheduler_kwargs or {})}
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.endswith("layerwise") or optimizer in ("lomo", "adalomo"):
        raise ValueError(f"optim={optimizer!r} steps inside each backward pass, of which a step here has several.")
    if optimizer.startswith("schedule_free") and args.use_vllm and args.eval_strategy != "no":
        raise ValueError(f"optim={optimizer!r}: rollouts after an evaluation have its averages. Do not evaluate.")
    installed = {"azure_ml", "flyte", *get_available_reporting_integrations()}  # two may be installed and not in it
    if missing := ", ".join(sorted(set(args.report_to) - installed)):
        raise ValueError(f"report_to: {missing}: not installed here, or not known. pip install it, or set none.")
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise ValueError(f"optim={optimizer!r}: {error}") from None
    except ValueError:
        pass  # it asks for the model, and is asked again with it
    check_generation_kwargs(args, backend)
    if args.max_staleness:
        where, mode = f"max_staleness={args.max_staleness}", args.vllm_importance_sampling_mode
        if backend != "server":
            raise ValueError(f"{where} has no effect without a server. Set use_vllm: true and vllm_mode: server.")
        if args.refill_groups and args.late_groups != "admit":
            raise ValueError(f"{where} with refill_groups takes prompts of later batches. Set late_groups: admit.")
        if not args.vllm_importance_sampling_correction or mode.startswith("sequence"):
            raise ValueError(
                f"{where} needs importance ratios of tokens. Set vllm_importance_sampling_correction: true and "
                "vllm_importance_sampling_mode: token_truncate or token_mask."
            )
        if args.steps_per_generation * args.num_iterations % args.gradient_accumulation_steps:
            raise ValueError(f"{where} needs steps_per_generation to be a multiple of gradient_accumulation_steps.")
    if args.old_logps is None and args.max_staleness > 2:
        clips = args.loss_type in CLIPPED_LOSSES and args.importance_sampling_level == "token"
        args.old_logps = "sampled" if clips else "policy"
    if args.old_logps == "sampled" and (reason := why_not_sampled(args)):
        raise ValueError(f"old_logps: sampled: {reason}. Set old_logps: policy, or change this.")


def why_not_sampled(args: GRPOConfig) -> str | None:
    """Why the loss cannot clip around the sampled logprobs (`old_logps: sampled`); None if it can."""
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return "it needs use_vllm: true and vllm_importance_sampling_correction: true"
    # The trainer's logprobs are of the whole vocabulary, and those of a distribution that was cut are larger.
    if text := text_of_cuts(args):
        return f"{text} makes the sampled logprobs other than those of the policy"
    for key in ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"):
        value, truncates = getattr(args, key), args.vllm_importance_sampling_mode.endswith("truncate")
        if truncates and value != default_of(key, (type(args),)):
            return f"{key}={value} has no effect then: use a _mask mode, or bound the loss by epsilon and delta"
    return None


def check_generation_kwargs(args: GRPOConfig, backend: str) -> None:
    """Raise `ValueError` for keys that the backend ignores, or of which the loss does not know."""
    for key, value in (args.generation_kwargs or {}).items():  # transformers fills None with a cut of its own
        if key not in CUTS or value is None or (backend == "transformers" and not hasattr(GenerationConfig(), key)):
            raise ValueError(
                f"generation_kwargs: {key!r} is set by another key, is not known to the {backend} backend, or would "
                "sample from another distribution than the policy's. Remove it."
            )


def check_groups(funcs: list[Callable], args: GRPOConfig, dataset: Any) -> None:
    """Raise `ValueError` if a function has the parameter `groups`, and a rank would have incomplete groups."""
    train, test = args.per_device_train_batch_size * args.steps_per_generation, args.per_device_eval_batch_size
    rest = test % (args.num_generations_eval or args.num_generations) if args.eval_strategy != "no" else 0
    if (train % args.num_generations or rest) and "groups" in asked_of(funcs) - set(dataset.column_names):
        raise ValueError(
            "A reward function has the parameter groups. Set per_device_train_batch_size * steps_per_generation and "
            "per_device_eval_batch_size to multiples of num_generations."
        )


def warn_of_untested(versions: dict[str, str] | None = None) -> None:
    """Warn of versions, such as `{"vllm": "0.1.0"}`, that were not tested. None: of those that are installed here."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}) if path.is_file() else {}
    if project.get("name") != "mt-grpo":  # somebody else's, where a copy of the script stands
        return
    servers = project["optional-dependencies"]
    for tested in map(Requirement, [*project["dependencies"], *servers["vllm"], *servers["sglang"]]):
        with suppress(KeyError, importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(tested.name) if versions is None else versions[tested.name]
            if not tested.specifier.contains(version, prereleases=True):
                logger.warning(
                    f"{tested.name} {version} was not tested with this trainer, but {tested.specifier}. If something "
                    "fails, install tested versions: bash scripts/setup.sh (servers: --gpu, without a GPU --test)."
                )


def check_processes(args: GRPOConfig) -> None:
    """Raise `ValueError` if accelerate would train otherwise than the processes were launched, without a word."""
    launched, asked = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked in ("bf16", "fp16") and not (args.bf16 or args.fp16):
        raise ValueError(f"bf16: false, and accelerate was launched with {asked}, which it takes. Set bf16: true.")
    if launched != args.world_size:  # each would take itself for the only one
        raise ValueError(f"{launched} processes were launched, and accelerate counts {args.world_size}. Set use_cpu.")
    if args.n_gpu > 1:  # DataParallel: batches n_gpu times as large, of prompts that repeat
        raise ValueError(f"One process sees {args.n_gpu} GPUs. Start one for each, or set CUDA_VISIBLE_DEVICES=0.")


def check_dataset(dataset: Any, name: str, env: Any = None) -> None:
    """Raise `ValueError` unless each row has messages as its prompt, or an environment that may bring them."""
    if taken := sorted({*dataset.column_names} & {*REWARD_COLUMNS}):
        raise ValueError(f"{name} has a column {taken[0]!r}, which rewards get from the trainer. Rename it.")
    environments = getattr(env, "environments", None)
    template = str(getattr(getattr(env, "tokenizer", None), "chat_template", ""))
    if environments is not None:
        environments.check_rows(dataset)
    if environments is None or "prompt" in dataset.column_names:
        column = dataset["prompt"] if isinstance(dataset, Dataset) else (row.get("prompt") for row in dataset)
        for i, prompt in enumerate(column):
            prompts = [prompt] if prompt or environments is None else []
            check_conversations(prompts, f"{name}, row {i}", images=True)
            roles = {message["role"] for prompt in prompts if not isinstance(prompt, str) for message in prompt}
            unknown = [each for each in roles - ROLES if f"'{each}'" not in template and f'"{each}"' not in template]
            if unknown:  # which most templates write as it is
                raise ValueError(f"{name}, row {i}: the prompt has the unknown role {unknown[0]!r}.")


def check_images(dataset: Any, name: str, env: Any) -> None:
    """Raise `ValueError` for a row with an image that the model would not see, or that cannot be read."""
    further = "messages" if hasattr(env, "place_images") else "prompt"  # a scheduler's rows may have them instead
    for i, row in enumerate(dataset if getattr(env, "reads_rows", True) else ()):
        if others := [key for key in OTHER_KINDS if row.get(key) and reader_of(env.tokenizer) is not None]:
            raise ValueError(f"{name}, row {i}: the column {others[0]!r} is not read: only images are. Remove it.")
        read_row(row.get("prompt") or row.get(further) or [], row, env.tokenizer, env, f"{name}, row {i}")


def why_text(args: GRPOConfig) -> str | None:
    """Why a run reads text alone, whatever its model reads; None: it may read images."""
    if backend_of(args) == "colocate" or args.use_transformers_continuous_batching:
        return "images are read by the model itself (use_vllm: false) or by a server (vllm_mode: server)"
    fsdp = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if fsdp or args.deepspeed_plugin is not None:
        return "images are not read by a model that FSDP2 or ZeRO-3 shards. Launch with DDP"
    return None


def prompt_ids_of(env: Any, row: dict[str, Any]) -> list[int]:
    """The ids of a row's prompt, as far as it is known before an environment's `reset`."""
    tools = None if env.environments is None else {**env.tools, **env.environments.tools_of_class(row)}
    prompt = row.get("prompt") or empty_prompts(1)[0]["prompt"]
    # `shown` keeps its pictures while the prompt is tokenised.
    further = []
    (prompt,) = check_conversations([prompt], "prompts", images=True)
    prompt, shown = read_row(prompt, row, env.tokenizer, env, "prompt", "mark_images")
    if shown and env.environments is not None and not hasattr(env, "mark_images"):
        from mt_grpo.images.messages import placed

        of_columns = shown[: len(images_of(row))]
        try:
            prompt = placed(prompt, of_columns, "the prompt")
        except ValueError:  # `reset` may bring further places
            further = [token for each in of_columns for token in each.ids]
    messages = env.format_of(env.tokenizer).clean(prompt, Origin.DATA)
    return env.prompt_ids(env.with_system_prompt(messages, tools), env.tokenizer, tools) + further


def longest_prompt(env: Any, dataset: Any) -> int:
    """Tokens of the longest prompt. Only those with the most characters or pixels are tokenised."""
    longest = heapq.nlargest(32, dataset, key=lambda row: len(DATA_URL.sub("", str(row.get("prompt")))))
    if (reader := reader_of(env.tokenizer)) is not None:
        from mt_grpo.images.messages import num_pixels

        longest += heapq.nlargest(32, dataset, key=lambda row: num_pixels(row, reader))
    return max(len(prompt_ids_of(env, row)) for row in longest)


def share_limits(args: GRPOConfig, env: Any) -> None:
    """Give each limit that only the configuration or only the environment was given to the other one."""
    for key in (*limits_of(args), "max_completion_length", "tool_format"):
        value, of_env, default = getattr(args, key), getattr(env, key), default_of(key, (type(args),))
        own = getattr(type(env), key, default)  # of an environment that was given none
        if value == default:
            setattr(args, key, of_env)
        elif of_env == own and key != "tool_format":  # its system prompt is made
            setattr(env, key, value)
        elif value != of_env:
            raise ValueError(f"{key}: {value} in the configuration, {of_env} in the environment. Give both the same.")
    if env.environments is not None:
        env.environments.timeout = env.environment_timeout


def check_tied_lora(model: Any) -> None:
    """Raise `ValueError` for a LoRA that changes the embedding or the head of a model in which both are one tensor."""
    configs = getattr(model, "peft_config", {}).values()
    of_model = model.config, model.config.get_text_config()  # what reads images says it on top
    tied = next((c.tie_word_embeddings for c in of_model if hasattr(c, "tie_word_embeddings")), False)
    kept_alike = all(getattr(config, "ensure_weight_tying", False) for config in configs)
    for name, module in (("embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
        if tied and not kept_alike and any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                f"The LoRA trains the model's {name} (tie_word_embeddings: true), and merged weights have one tensor "
                "for both. Take it out of the LoRA's modules, or set LoraConfig's ensure_weight_tying."
            )


def limit_context(env: Any, context: int | None, limit: str) -> None:
    """Make a context the environment's, if it is shorter than what it has. `limit` says what to raise then."""
    if context is not None and context < (env.max_model_len or float("inf")):
        env.max_model_len, env.context_limit = context, limit


def warn_without_state_keys(args: GRPOConfig, env: Any) -> None:
    """Warn that an estimator reads state keys, and without them a state is the whole conversation so far."""
    classes = env.environments.by_name.values() if env.environments is not None else []
    has_keys = env.state_key is not None or any(hasattr(cls, "state_key") for cls in classes)
    if "state" in CREDIT_ASSIGNMENTS[args.credit_assignment].reads and not has_keys:
        logger.warning(
            f"credit_assignment: {args.credit_assignment} without state keys credits turn 0 as turn_return does, and "
            "a later turn, unless histories are equal, by the outcome alone. Define STATE_KEY = FUNCTION in the tools."
        )


def prepare_data(env: Any, args: GRPOConfig, train_dataset: Any, eval_dataset: Any = None) -> tuple[Any, Any]:
    """The data sets of a trainer, with prompts. Without training rows: empty prompts for one batch, as in TRL."""
    needed = args.generation_batch_size // args.num_generations
    if train_dataset is None and (env.environments is None or args.max_steps <= 0):
        raise ValueError("train_dataset is None. Expected rows, or an environment that brings prompts and max_steps.")
    if train_dataset is None:
        train_dataset = empty_prompts(needed)
    if len(train_dataset) < needed:
        raise ValueError(f"The training set has {len(train_dataset)} rows. A batch needs {needed}, one per group.")
    named = (train_dataset, "train_dataset"), (eval_dataset, "eval_dataset")
    return tuple(with_prompts(data, name, env.environments is None) for data, name in named)


def prepare_env(
    env: Any, args: GRPOConfig, rewards: Any, model: Any, train: Any, test: Any, tokenizer: Any, peft_config: Any
) -> tuple[Any, Any, Any, Any]:
    """Fit settings, environment, data and model to each other. Returns rows, test rows, tokenizer and model config."""
    check_processes(args)
    warn_of_untested()
    warn_without_state_keys(args, env)
    train, test = prepare_data(env, args, train, test)
    check_groups(rewards.functions, args, train)
    name = model if isinstance(model, str) else model.config._name_or_path
    of_images = getattr(tokenizer, "image_processor", None)  # with its settings, such as max_pixels
    tokenizer = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(name)
    share_limits(args, env)
    if env.tokenizer and env.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError("env has the tokenizer of another model, such as a trainer before. Make one per trainer.")
    env.tokenizer = env.tokenizer or tokenizer
    if env.chat_template_kwargs and args.chat_template_kwargs not in (None, env.chat_template_kwargs):
        raise ValueError("chat_template_kwargs: the configuration and the environment have others. Give it to one.")
    env.chat_template_kwargs = env.chat_template_kwargs or args.chat_template_kwargs or {}
    revision = (args.model_init_kwargs or {}).get("revision")
    how = {"revision": revision or "main", "trust_remote_code": args.trust_remote_code}
    model_config = AutoConfig.from_pretrained(name, **how) if isinstance(model, str) else model.config
    reader = why_text(args) or image_reader(name, model_config, env.tokenizer, revision, of_images)
    for each in (env.tokenizer, tokenizer):
        with_pictures(each, reader)
    if not isinstance(reader, str):
        if args.freeze_vision_tower is not False and getattr(peft_config, "exclude_modules", "") is None:
            peft_config.exclude_modules = rf".*{TOWER.pattern}.*"  # a LoRA leaves out what reads images
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = True  # a pass of one rank has a picture, and that of another has none
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    splits = test.values() if isinstance(test, dict) else [] if test is None else [test]
    for split, where in ((train, "train_dataset"), *((each, "eval_dataset") for each in splits)):
        check_dataset(split, where, env)
        check_images(split, where, env)
        longest = longest_prompt(env, split)  # raises for a chat template that cannot write it, or has no tools
        if context is not None and longest >= context:
            raise ValueError(f"{where}: the longest prompt has {longest} tokens, and the model reads {context}.")
    limit_context(env, context, "the context by a model with a longer one (max_position_embeddings)")
    if backend_of(args) == "colocate":
        limit_context(env, args.vllm_max_model_length, "vllm_max_model_length")
    return train, test, tokenizer, model_config


def check_server(client: Any, env: Any, model_config: Any, args: GRPOConfig) -> None:
    """Raise `ServerError` if a server does not fit the recipe, or servers not each other. Nothing changes on them."""
    if hasattr(client, "servers"):
        for server in client.servers:
            check_server(server, env, model_config, args)
        return client.check_settings()
    client.wait_until_healthy()
    engine, where = client.engine, f"The {client.engine.title} server at {client.base_url}"
    warn_of_untested({engine.name: engine.version(client)})
    if args.vllm_importance_sampling_correction and (reason := engine.why_biased(client, cuts_of(args))):
        raise ServerError(f"{where} {reason}, or set vllm_importance_sampling_correction: false.")
    client.vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    check_tokenizer(client, env.tokenizer, where)
    limit_context(env, client.model_card["max_model_len"], f"{engine.CONTEXT} of the server at {client.base_url}")
    if reader_of(env.tokenizer) is not None:
        on_main_process(lambda: check_it_reads_images(client, env))
    client.transfer.resolve(args.device)  # raises if the server was not started for the setting


def check_tokenizer(client: Any, tokenizer: Any, where: str) -> None:
    """Raise `ServerError` if a server has another vocabulary than this tokenizer, whose ids it is going to read."""
    text = '<tool>{"name": "x"}</tool> Ünï 123'
    if client.engine.tokens(client, text) != tokenizer(text, add_special_tokens=False)["input_ids"]:
        raise ServerError(f"{where} tokenises {text!r} differently: it was started with another tokenizer.")


def check_it_reads_images(client: Any, env: Any) -> None:
    """Raise `ServerError` unless a server reads images as the trainer does."""
    # Of ids that no tokenizer would write, too: one that reads them as text reads others.
    spelled = [token for letter in "answer" for token in env.tokenizer(letter, add_special_tokens=False)["input_ids"]]
    client.score(env.tokenizer.drawn_ids() + spelled)  # raises where images are off, or are read otherwise
