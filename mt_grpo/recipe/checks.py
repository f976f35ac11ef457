"""Checks that need the tools, the data, the model's configuration or the server, but no weights."""

from __future__ import annotations

import heapq
import inspect
import logging
import os
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, ProcessorMixin
from trl import GRPOConfig

from mt_grpo.base.errors import ServerError, ServerLost, tell_once
from mt_grpo.base.ranks import on_main_process
from mt_grpo.base.rows import IMAGE_COLUMNS
from mt_grpo.base.tested_versions import INSTALL, installed, outside
from mt_grpo.conversation.conversations import limits_of
from mt_grpo.conversation.formats.control_tokens import Origin, forbidden_in, neutralise
from mt_grpo.conversation.picture_parts import (
    OTHER_KINDS,
    num_pixels,
    of_columns,
    placed,
    read_pictures,
    refuse_images,
    with_marks,
    with_places,
)
from mt_grpo.conversation.pictures import (
    FAMILIES,
    TOWER,
    PictureReader,
    drawn_ids,
    drawn_image,
    reader_of,
    why_none,
    with_pictures,
)
from mt_grpo.conversation.sampling import sampling_params
from mt_grpo.conversation.tools.results import error_text
from mt_grpo.generation.adapters import slots_of, why_config_merges
from mt_grpo.generation.nccl_groups import check_group_port
from mt_grpo.generation.weight_transfer import check_shared_directory
from mt_grpo.images.pictures import MOST_PICTURES
from mt_grpo.recipe.data import check_prompt, empty_prompts, not_here, with_prompts
from mt_grpo.recipe.keys import default_of
from mt_grpo.recipe.refusals import backend_of, check_ddp_timeout, check_sharding, cuts_of
from mt_grpo.rollout import ROLES
from mt_grpo.training.policy_scores import ASKED_COLUMNS, NO_REFERENCE, asked_of
from mt_grpo.training.reward_calls import REWARD_COLUMNS

logger = logging.getLogger(__name__)

TO_INSTALL = f"If something fails, install tested versions: {INSTALL}."


def check_reward_columns(funcs: list[Callable], columns: typing.Iterable[str], where: str) -> None:
    """Raise `ValueError` if a reward function needs a column that the data lacks, or a column's name is reserved."""
    columns = [column for column in columns if column != "prompt"]
    if taken := [column for column in columns if column in REWARD_COLUMNS]:
        raise ValueError(f"{where} has a column {taken[0]!r}, which rewards get from the trainer. Rename the column.")
    given = (*REWARD_COLUMNS, *ASKED_COLUMNS)
    for func in funcs:
        for name, parameter in inspect.signature(func).parameters.items():
            by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if by_name and parameter.default is parameter.empty and name not in (*columns, *given):
                raise ValueError(
                    f"Reward {func.__name__} needs {name!r}, but {where} has no such column. It has: "
                    f"{', '.join(columns) or 'none'}; the trainer gives: {', '.join(given)}."
                )


def check_dataset(dataset: Any, name: str, env: Any = None) -> None:
    """Raise `ValueError` unless a dataset has rows, and a list of messages as the prompt of each row.

    With environments a row needs no prompt. Where there are several, its column `environment` must name one.
    """
    columns = getattr(dataset, "column_names", None)
    environments = getattr(env, "environments", None)
    if environments is not None and columns is not None:
        environments.check_rows(dataset)
        if "prompt" not in columns and len(dataset):
            return
    if columns is None or "prompt" not in columns:
        raise ValueError(f"{name} has columns {columns}, expected at least 'prompt' (a list of messages).")
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty.")
    for i, row in enumerate(dataset.select_columns(["prompt"])):
        if row.get("prompt") or environments is None:
            check_prompt(row.get("prompt"), f"{name}, row {i}")
            check_speakers(row["prompt"], f"{name}, row {i}", env)


def check_images(dataset: Any, name: str, env: Any) -> None:
    """Raise `ValueError` for a row with an image that the model would not see, or that cannot be read."""
    reader, known = reader_of(env.tokenizer), ("prompt", *IMAGE_COLUMNS)
    place = getattr(env, "place_images", with_marks)
    known += () if place is with_marks else ("messages",)  # a scheduler's, in place of a prompt
    known += () if reader is None else OTHER_KINDS
    columns = [key for key in known if key in dataset.column_names]
    for i, row in enumerate(dataset.select_columns(columns) if columns else []):
        if reader is None:
            refuse_images(row, f"{name}, row {i}", why_none(env.tokenizer))
            continue
        if not getattr(env, "reads_rows", True):
            continue
        if found := [key for key in OTHER_KINDS if row.get(key)]:
            raise ValueError(
                f"{name}, row {i}: the column {found[0]!r} is not read: only images are. Remove or rename it."
            )
        prompt = row.get("prompt") or row.get("messages") or []
        if env.environments is not None and not hasattr(env, "place_images"):  # whose `reset` may bring the places
            with_places(prompt, row, env.tokenizer, f"{name}, row {i}")
            continue
        if not prompt:
            refuse_images(row, f"{name}, row {i}", "the row has no prompt to put it into")
        place(prompt, row, env.tokenizer, f"{name}, row {i}")


def why_text(args: GRPOConfig) -> str | None:
    """Why a run reads text alone, whatever its model reads; None: it may read images."""
    if backend_of(args) == "colocate":
        return "images are read by the model itself (use_vllm: false) or by a server (vllm_mode: server)"
    if args.use_transformers_continuous_batching:
        return "use_transformers_continuous_batching reads no images. Remove it"
    if (
        os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        or args.fsdp
        or args.deepspeed_plugin is not None
    ):
        return "images are not read by a model that FSDP2 or ZeRO-3 shards. Launch with DDP"
    return None


def check_speakers(prompt: list[dict[str, Any]], where: str, env: Any) -> None:
    """Raise `ValueError` for a role that no chat template knows, and for a prompt in which nobody asks anything.

    Most templates write any role as it is. The model has never read one of its name.
    """
    roles = {message["role"] for message in prompt}
    template = str(getattr(getattr(env, "tokenizer", None), "chat_template", ""))
    if unknown := [
        role for role in sorted(roles - ROLES) if not re.search(f"""['"]{re.escape(role)}['"]""", template)
    ]:
        raise ValueError(
            f"{where}: a message has the role {unknown[0]!r:.100}. Expected one of {', '.join(sorted(ROLES))}, or one "
            "that the model's chat template names."
        )
    if roles <= {"system", "developer"} and getattr(env, "environments", None) is None:
        raise ValueError(f"{where}: the prompt only has a system message. Expected a user message after it.")


def prepare_data(env: Any, args: GRPOConfig, train_dataset: Any, eval_dataset: Any = None) -> tuple[Any, Any]:
    """The data sets of a trainer, with prompts. Without training rows: empty prompts for one batch, as in TRL.

    Raises `ValueError` if there are no rows and no environment brings the prompts, or no `max_steps` ends the run.
    """
    if train_dataset is None and env.environments is None:
        raise ValueError("train_dataset is None, and there is no environment whose reset brings the prompts.")
    if train_dataset is None and args.max_steps <= 0:
        raise ValueError(f"max_steps={args.max_steps}, expected at least 1: without a dataset it sets the end.")
    if train_dataset is None:
        train_dataset = empty_prompts(args.generation_batch_size // args.num_generations)
    named = (train_dataset, "train_dataset"), (eval_dataset, "eval_dataset")
    return tuple(with_prompts(data, name, env.environments is None) for data, name in named)


def check_num_prompts(num_prompts: int, args: GRPOConfig) -> None:
    """Raise `ValueError` if the prompts do not fill one batch of rollouts: TRL's sampler would drop them all."""
    needed = args.generation_batch_size // args.num_generations
    if num_prompts < needed:
        raise ValueError(
            f"The training data has {num_prompts} prompts, but one batch of rollouts needs {needed} "
            f"({args.generation_batch_size} rollouts / num_generations={args.num_generations}), so that no step would "
            f"be taken. Take {needed} rows or more (dataset_size, if it is set, leaves the rest out), or lower "
            "per_device_train_batch_size or gradient_accumulation_steps."
        )


def prompt_ids_of(env: Any, row: dict[str, Any]) -> list[int]:
    """The ids of a row's prompt, as far as it is known before an environment's `reset`."""
    tools = None if env.environments is None else {**env.tools, **env.environments.tools_of_class(row)}
    prompt = row.get("prompt") or empty_prompts(1)[0]["prompt"]
    # `shown` keeps its pictures while the prompt is tokenised.
    further: list[int] = []
    (prompt,), (shown,) = read_pictures([prompt], [row], env.tokenizer, env, "mark_images")
    if env.environments is not None and not hasattr(env, "mark_images"):
        try:
            prompt = placed(prompt, of_columns(shown, row), "the prompt")
        except ValueError:  # `reset` may bring further places
            further = [token for each in of_columns(shown, row) for token in each.num_tokens * [each.id]]
    messages = env.format_of(env.tokenizer).clean(prompt, Origin.DATA)
    return env.prompt_ids(env.with_system_prompt(messages, tools), env.tokenizer, tools) + further


def num_characters(row: dict[str, Any]) -> int:
    """Total number of characters in the text parts of a row's prompt."""
    contents = [message["content"] or "" for message in row["prompt"]]
    texts = [[each] if isinstance(each, str) else [part.get("text") or "" for part in each] for each in contents]
    return sum(len(text) for parts in texts for text in parts)


def longest_prompt(env: Any, dataset: Any) -> int:
    """The length of the longest prompt in tokens.

    Only the 32 prompts with the most characters, and the 32 whose images have the most pixels, are tokenised.

    Raises `ValueError` if the chat template refuses one of them.
    """
    columns = [c for c in ("prompt", "environment", *IMAGE_COLUMNS) if c in dataset.column_names]
    rows = dataset.select_columns(columns) if columns else [{}]  # without columns there would be no rows
    chosen = []
    for size in (num_characters,) if reader_of(env.tokenizer) is None else (num_characters, num_pixels):
        whole = ({**row, "prompt": row.get("prompt") or []} for row in rows)  # one at a time: there may be many
        chosen += heapq.nlargest(32, whole, key=size)
    rows = chosen
    try:
        return max(len(prompt_ids_of(env, row)) for row in rows)
    except jinja2.TemplateError as error:
        roles = sorted({message["role"] for row in rows for message in row["prompt"]})
        raise ValueError(f"The model's chat template rejects a prompt ({error}). The roles are: {roles}.") from error


def num_example_tokens(env: Any) -> int:
    """Tokens of the prompt that are of `prompt_examples`."""
    if not env.prompt_examples:
        return 0
    asked = [{"role": "user", "content": "A question."}]
    examples = env.examples_of(env.tokenizer)
    with_them, without = (env.prompt_ids(messages, env.tokenizer, {}) for messages in ([*examples, *asked], asked))
    return len(with_them) - len(without)


def warn_of_control_tokens(env: Any, dataset: Any, name: str) -> None:
    """Warn once of prompts that hold tokens of the chat template as text. The model reads them with a space inside."""
    forbidden = forbidden_in(Origin.DATA, "user", env.tokenizer, env.format_of(env.tokenizer).ends)
    found = {}  # row -> its first control token
    for row, columns in enumerate(dataset.select_columns(["prompt"]) if "prompt" in dataset.column_names else []):
        contents = [m["content"] for m in columns.get("prompt") or [] if isinstance(m["content"], str)]
        if token := next(filter(None, map(forbidden.search, contents)), None):
            found[row] = token[0]
    if found:
        row, token = next(iter(found.items()))
        logger.warning(
            f"{name}, row {row}{f' (and {len(found) - 1} more)' if found.keys() - {row} else ''}: the prompt holds "
            f"the control token {token!r} as text, and it begins or ends a message. The model "
            f"reads {neutralise(token, env.tokenizer)!r} instead. What has to stay one belongs into system_prompt."
        )


def model_error(name: str, error: Exception) -> str:
    """The message for a model that does not exist or cannot be loaded."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not os.path.exists(name):
        return (
            f"model_name_or_path: {name!r} is not a folder (the current folder is {os.getcwd()}). Expected the folder "
            "of a model, or the name of a model on the Hub, which has one slash."
        )
    reason = " ".join(error_text(error).split())
    return f"model_name_or_path: {name!r} cannot be loaded: {reason}{not_here(name)}"


def share_limits(args: GRPOConfig, env: Any) -> None:
    """Give each limit that only the configuration or only the environment was given to the other one.

    Raises `ValueError` for a limit that both were given, with different values.
    """
    for key in (*limits_of(args), "max_completion_length", "tool_format"):
        value, of_env, default = getattr(args, key), getattr(env, key), default_of(key, (type(args),))
        own = getattr(type(env), key, default)  # of an environment that was given none
        if value == default:
            setattr(args, key, of_env)
        elif of_env == own and key != "tool_format":  # its system prompt is made
            setattr(env, key, value)
        elif value != of_env:
            name = "max_steps" if key == "max_env_steps" else key
            raise ValueError(
                f"{key}: {value} in the configuration, and {name}={of_env} in the environment. Give it to one of them."
            )
    if (limit := args.max_tool_response_tokens) is not None and limit > env.result_limit:
        args.max_tool_response_tokens = env.result_limit
        tell_once(
            f"max_tool_response_tokens={limit}: a result would take more than half of max_completion_length="
            f"{args.max_completion_length}. It is lowered to {env.result_limit}."
        )
    if env.environments is not None:
        env.environments.timeout = env.environment_timeout
    if args.isolate_tools and not any(hasattr(tool, "prepare") for tool in env.tools.values()):
        raise ValueError(
            "isolate_tools: none of the environment's tools runs in a process. Expected functions without async, "
            "which run there, from load_tools(path, isolate=True)."
        )


def check_tower(args: GRPOConfig, model_config: Any, peft_config: Any, reader: Any) -> None:
    """Leave what reads images out of a LoRA, unless `freeze_vision_tower` is false or the LoRA leaves out others.

    Raises `ValueError` where the key is set and the model reads no images.
    """
    if isinstance(reader, str):
        if args.freeze_vision_tower is not None and model_config.model_type not in FAMILIES:
            raise ValueError(
                f"freeze_vision_tower={args.freeze_vision_tower}: the model only reads text. Remove this key."
            )
        return
    if args.freeze_vision_tower is not False and getattr(peft_config, "exclude_modules", "") is None:
        peft_config.exclude_modules = rf".*{TOWER.pattern}.*"


def check_tied_lora(model: Any) -> None:
    """Raise `ValueError` for a LoRA that changes the embedding or the head of a model in which both are one tensor."""
    configs = getattr(model, "peft_config", {}).values()
    configs_of_model = model.config, model.config.get_text_config()  # what reads images says it on top
    tied = next((c.tie_word_embeddings for c in configs_of_model if hasattr(c, "tie_word_embeddings")), False)
    if not tied or all(getattr(config, "ensure_weight_tying", False) for config in configs):
        return
    for name, module in (("embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                f"The LoRA trains the model's {name} (tie_word_embeddings: true), but merged weights have one "
                "tensor for both. Take it out of the LoRA's modules, or set LoraConfig's ensure_weight_tying."
            )


def load_model_config(name: str, args: GRPOConfig) -> Any:
    """The configuration of the model that the trainer is going to load. Raises `ValueError` if it cannot be loaded."""
    revision = (args.model_init_kwargs or {}).get("revision") or "main"
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(model_error(name, error)) from error


def check_context(env: Any, model_config: Any, dataset: Any, args: GRPOConfig) -> int | None:
    """The model's context in tokens; None if it is not known.

    Raises `ValueError` if the longest prompt and `max_completion_length` do not fit into it.
    """
    max_completion_length = args.max_completion_length
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if backend_of(args) == "colocate" and args.vllm_max_model_length is not None:
        context = min(args.vllm_max_model_length, context or args.vllm_max_model_length)
    prompt = longest_prompt(env, dataset)
    if context is not None and prompt + max_completion_length > context:
        examples = num_example_tokens(env)
        shown = f" {examples} of the prompt's tokens are of prompt_examples." if examples else ""
        if prompt >= context:
            raise ValueError(
                f"The longest prompt has {prompt} tokens, and the model's context {context}: there is no room for a "
                "turn. Shorten the prompts; what the model reads of its tools is in them (a list `tools` in "
                f"an entry of mcp_config_file chooses among a server's).{shown}"
            )
        raise ValueError(
            f"The longest prompt has {prompt} tokens; with max_completion_length={max_completion_length} that is "
            f"{prompt + max_completion_length}, more than the model's context of {context}. Shorten the prompts or "
            f"set max_completion_length to at most {context - prompt}.{shown}"
        )
    return context


def limit_context(env: Any, context: int | None, limit: str) -> None:
    """Make a context the environment's, if it is shorter than what it has. `limit` says what to raise then."""
    if context is not None and context < (env.max_model_len or float("inf")):
        env.max_model_len, env.context_limit = context, limit


def check_server(
    client: Any,
    env: Any,
    model_config: Any,
    args: GRPOConfig,
    dataset: Any,
    peft_config: Any = None,
    funcs: typing.Sequence[Callable] = (),
) -> None:
    """Raise `ServerError` if a server does not fit the recipe, or servers not each other. Nothing changes on them.

    A server's context becomes an upper limit of `env.max_model_len`.
    """
    if hasattr(client, "servers"):
        for server in client.servers:
            check_server(server, env, model_config, args, dataset, peft_config, funcs)
        return client.check_settings()
    client.wait_until_healthy()
    card, engine = client.model_card, client.engine
    where, served = f"The {engine.title} server at {client.base_url}", engine.settings(client)
    if untested := outside({engine.name: client.engine_version} if client.engine_version else {}):
        logger.warning(f"{where} was not tested with this trainer: {untested[0]}. {TO_INSTALL}")
    if args.vllm_importance_sampling_correction and (reason := engine.why_biased(client, cuts_of(args))):
        raise ServerError(f"{where} {reason}, or set vllm_importance_sampling_correction: false.")
    if "policy" in asked_of(funcs) - set(dataset.column_names) and (reason := engine.why_no_scores(client)):
        raise ServerError(f"A reward function asks the policy. {where} {reason}.")
    engine.ask_for_sample({**sampling_params(args), "prompt": [0], "max_tokens": 1}, None)  # raises for a setting
    ours = model_config.get_text_config()
    try:
        theirs = AutoConfig.from_pretrained(served["model"]).get_text_config()
    except (OSError, ValueError):  # a path on the server's machine; a wrong model then fails at the first push
        logger.warning(f"{where} serves {served['model']!r}, whose configuration cannot be read and compared here.")
        theirs = ours
    for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(ours, key, None) != getattr(theirs, key, None):
            raise ServerError(
                f"{where} serves {served['model']!r} with {key}={getattr(theirs, key, None)}, but the model to train "
                f"has {getattr(ours, key, None)}. Start the server with the recipe's model_name_or_path."
            )
    client.vocab_size = getattr(ours, "vocab_size", None)
    check_tokenizer(client, env.tokenizer, where)
    needed = longest_prompt(env, dataset) + args.max_completion_length
    if card["max_model_len"] < needed:
        raise ServerError(
            f"{where} has a context of {card['max_model_len']} tokens; the longest prompt and max_completion_length="
            f"{args.max_completion_length} need {needed}. Start it with {engine.CONTEXT} {needed} or more."
        )
    limit_context(env, card["max_model_len"], f"{engine.CONTEXT} of the server at {client.base_url}")
    engine.ranks(client)  # raises if a push would not reach all engines
    client.weight_version()  # raises if the addresses for training are off
    if client.reads_images:  # by one rank: while another one probes the directory below, no image may be asked for
        try:
            on_main_process(lambda: check_it_reads_images(client, env, where))
        except ServerError as error:  # the same on all ranks
            if isinstance(error, ServerLost) or has_images(dataset):
                raise
            logger.warning(f"{error} No row has an image, so the run continues with text only.")
            for tokenizer in (env.tokenizer, client.tokenizer):
                with_pictures(tokenizer, f"the server takes no images: {error}".removesuffix("."))
    if args.weight_sync == "adapter":
        reason = "the recipe has no LoRA (use_peft: true)" if peft_config is None else why_config_merges(peft_config)
        if reason or (reason := client.engine.why_merges(client, peft_config.r, slots_of(args.max_staleness))):
            raise ServerError(f"weight_sync=adapter: {reason}. With weight_sync: auto all weights are pushed instead.")
    if client.transfer.resolve(args.device) == "disk":
        on_main_process(lambda: check_shared_directory(client, args.weight_sync_dir))
    else:
        on_main_process(lambda: check_group_port(client, client.transfer.group_port))


def check_tokenizer(client: Any, tokenizer: Any, where: str) -> None:
    """Raise `ServerError` if a server has another vocabulary than this tokenizer, whose ids it is going to read."""
    text = '<tool>{"name": "x"}</tool> Ünï 123'
    if client.engine.tokens(client, text) != tokenizer(text, add_special_tokens=False)["input_ids"]:
        raise ServerError(f"{where} tokenises {text!r} differently: it was started with another tokenizer.")


def has_images(dataset: Any) -> bool:
    """Whether a row of the data has an image, in a column or in its prompt."""
    columns = [key for key in ("prompt", *IMAGE_COLUMNS) if key in dataset.column_names]
    rows = dataset.select_columns(columns) if columns else []
    return any(num_pixels({**row, "prompt": row.get("prompt") or []}) for row in rows)


def check_it_reads_images(client: Any, env: Any, where: str) -> None:
    """Raise `ServerError` unless a server reads images as the trainer does, and as many as a conversation may hold."""
    smallest = reader_of(env.tokenizer).read(drawn_image(1), where).num_tokens
    if reason := client.engine.why_no_images(client, min(MOST_PICTURES, client.max_model_len // smallest)):
        raise ServerError(f"{where} {reason}")
    # Of ids that no tokenizer would write, too: one that reads them as text reads others.
    spelled = [token for letter in "answer" for token in env.tokenizer(letter, add_special_tokens=False)["input_ids"]]
    client.score(drawn_ids(env.tokenizer) + spelled)  # raises where images are off, or are read otherwise


def prepare_env(
    env: Any,
    args: GRPOConfig,
    model: Any,
    train_dataset: Any,
    eval_dataset: Any,
    tokenizer: Any,
    funcs: list[Callable],
    peft_config: Any = None,
) -> tuple[Any, Any]:
    """Check settings, environment and data against each other and against the model, and set the environment's limits.

    Returns:
        The tokenizer (the model's own if none was given) and the model's configuration.

    Raises:
        ValueError: Two of them do not fit each other.
    """
    if not hasattr(args, "credit_assignment"):
        raise ValueError(f"args is {type(args).__name__}. Expected MTGRPOConfig, which takes GRPOConfig's settings.")
    check_ddp_timeout(args, args.world_size)
    check_sharding(args)
    if untested := outside(installed("vllm" if backend_of(args) == "colocate" else None)):
        logger.warning(f"These versions were not tested: {'; '.join(untested)}. {TO_INSTALL}")
    name = model if isinstance(model, str) else model.config._name_or_path
    # A processor holds the tokenizer, and what reads images, which is read anew.
    tokenizer = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(name)
    splits = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
    splits = [split for split in splits if split is not None]
    best = (args.metric_for_best_model or "").removeprefix("eval_")
    if isinstance(eval_dataset, dict) and best and not best.startswith(tuple(f"{each}_" for each in eval_dataset)):
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} with the evaluation datasets "
            f"{', '.join(eval_dataset)}: each has metrics of its own. Expected one of them, such as "
            f"{next(iter(eval_dataset), 'NAME')}_reward."
        )
    named = [(train_dataset, "train_dataset"), *((split, "eval_dataset") for split in splits)]
    for split, where in named:
        check_dataset(split, where, env)
        check_reward_columns(funcs, split.column_names, where)
    for asked in asked_of(funcs):
        if len({asked in split.column_names for split, _ in named}) > 1:
            raise ValueError(
                f"a reward function names {asked!r}, which is a column of some of {', '.join(w for _, w in named)}. "
                "Expected it in all of them, or in none: then it is what the trainer gives."
            )
    has_adapter = peft_config is not None or (not isinstance(model, str) and is_peft_model(model))
    if "reference" in asked_of(funcs) - set(train_dataset.column_names) and args.beta == 0 and not has_adapter:
        raise ValueError(NO_REFERENCE)
    if "policy" in asked_of(funcs) - set(train_dataset.column_names) and args.weight_sync == "adapter":
        raise ValueError(
            "weight_sync=adapter: a reward function asks the policy, and a server scores without adapters. With "
            "weight_sync: auto all weights are pushed instead."
        )
    check_num_prompts(len(train_dataset), args)
    share_limits(args, env)
    env.tokenizer = env.tokenizer or tokenizer
    model_config = load_model_config(name, args) if isinstance(model, str) else model.config
    revision = (args.model_init_kwargs or {}).get("revision")
    reader = why_text(args) or PictureReader.of(name, model_config, env.tokenizer, revision)
    for each in (env.tokenizer, tokenizer):
        with_pictures(each, reader)
    check_tower(args, model_config, peft_config, reader)
    if isinstance(reader, str) and model_config.model_type in FAMILIES:
        logger.warning(f"The model can read images, but this run gives it none: {reader}.")
    if reader_of(tokenizer) is not None and args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = True  # a pass of one rank has a picture, and that of another has none
    env.chat_template_kwargs = env.chat_template_kwargs or args.chat_template_kwargs or {}
    for split, where in named:
        check_images(split, where, env)
        context = check_context(env, model_config, split, args)
        own = getattr(args, "vllm_max_model_length", None) if backend_of(args) == "colocate" else None
        model = "the context by a model with a longer one (max_position_embeddings)"
        limit_context(env, context, "vllm_max_model_length" if own is not None and own == context else model)
        warn_of_control_tokens(env, split, where)
    return tokenizer, model_config


def load_tokenizer(model_args: Any, trust_remote_code: bool) -> Any:
    """The tokenizer of a recipe's model. Raises `ValueError` with the recipe key if it cannot be loaded."""
    name = model_args.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=model_args.model_revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(model_error(name, error)) from error
    if not tokenizer("1", add_special_tokens=False)["input_ids"]:  # transformers makes an empty one without files
        raise ValueError(f"model_name_or_path: {name!r} has no tokenizer that reads text.")
    return tokenizer


@contextmanager
def model_errors(name: str, push_to_hub: bool) -> Iterator[None]:
    """Turn the errors of missing, damaged or mismatched weights, and of the Hub, into `ValueError` with the key."""
    try:
        yield
    except Exception as error:
        if push_to_hub and type(error).__module__.startswith(("httpx", "huggingface_hub")):
            raise ValueError(f"push_to_hub: the Hub cannot be reached or rejects the request: {error}") from error
        keys = "ignore_mismatched_sizes|unexpected keyword argument"
        of_weights = not isinstance(error, ValueError) and re.search(keys, str(error))  # ours says whose fault it is
        if not isinstance(error, (OSError, ImportError, SafetensorError)) and not of_weights:
            raise
        raise ValueError(model_error(name, error)) from error


def warn_without_state_keys(credit_assignment: str, env: Any) -> None:
    """Warn that without `STATE_KEY` a state is the whole conversation so far."""
    classes = env.environments.by_name.values() if env.environments is not None else []
    if env.state_key is not None or any(hasattr(cls, "state_key") for cls in classes):
        return
    logger.warning(
        f"credit_assignment: {credit_assignment} without state keys: a state is then the whole conversation so far, "
        "so turn 0 is credited as by turn_return, and a later turn by the outcome alone unless another rollout has "
        "the very same tokens before it. Define STATE_KEY = function_of_the_turns in tools_script, or use turn_return."
    )
