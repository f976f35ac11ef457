"""What a recipe says with ms-swift's keys: plug-ins, a scheduler, rewards. All is checked before a model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mt_grpo.base.errors import error_line
from mt_grpo.base.rows import image_or_str
from mt_grpo.images.pictures import images_of
from mt_grpo.integrations.acting import accepted
from mt_grpo.integrations.checks import check_settings_of
from mt_grpo.integrations.ms_swift.conversation import ScheduledConversation, SchedulerConversation, has_own_run
from mt_grpo.integrations.ms_swift.loss import read_loss_scale
from mt_grpo.integrations.ms_swift.paths import install, registry
from mt_grpo.recipe.plugins import import_file
from mt_grpo.training.rewards import waits

OURS = ("prompts", "completions", "completion_ids", "rollout_turns", "environments", "environment_rewards",
        "log_extra", "log_metric")  # fmt: skip
OF_THE_ROLLOUT = ("messages", "images", "request_id", "trajectory_inputs")  # whatever columns the data has


def load_scheduler_conversation(script_args: Any, args: Any, base: type) -> tuple[type, type]:
    """(class of conversations, class of environments) of a recipe. Raises `ValueError` for one that cannot work."""
    check_settings_of("scheduler", "multi_turn_scheduler", script_args, args)
    if script_args.environment is not None:
        raise ValueError("environment has no effect with multi_turn_scheduler, which is the environment. Remove it.")
    install()
    for path in script_args.external_plugins or []:
        import_file(path, "external_plugins")  # which may import files that stand beside it
    name = script_args.multi_turn_scheduler
    cls = registered("multi_turns", name, "multi_turn_scheduler")
    check_scheduler(cls, name)
    settings = {
        "scheduler_class": cls,
        "scheduler_kwargs": {} if script_args.max_turns is None else {"max_turns": script_args.max_turns},
        "loss": read_loss_scale(script_args.loss_scale, registry("loss_scale_map")),
        "length_scope": script_args.completion_length_limit_scope,
        "max_model_calls": script_args.max_model_calls,
        "passes_dataset": script_args.vllm_server_pass_dataset,
    }
    rewards = [as_reward(each, script_args, args) for each in script_args.reward_funcs or []]
    environment = type(name, (ScheduledConversation,), {"outcome_reward_funcs": rewards})
    return type("SchedulerConversation", (SchedulerConversation, base), settings), environment


def registered(kind: str, name: str, key: str) -> Any:
    """The class or function that plug-ins have registered under a name. Raises `ValueError`."""
    found = registry(kind)
    if name not in found:
        raise ValueError(
            f"{key}: {name!r} is not in {kind}. Expected one of: {', '.join(sorted(found)) or '(none registered)'}. A "
            f"plug-in in external_plugins registers it with `{kind}[{name!r}] = MyClass`."
        )
    return found[name]


def check_scheduler(cls: Any, name: str) -> None:
    """Raise `ValueError` for a class that cannot run conversations, or would not run as it does in ms-swift."""
    where = f"multi_turn_scheduler: {name!r}: {cls!r}"
    if not isinstance(cls, type) or not (has_own_run(cls) or has_own_run(cls, "step")):
        raise ValueError(f"{where} has neither step nor run. Expected a class with one of them.")
    if has_own_run(cls, "async_infer"):
        raise ValueError(
            f"{where} has an async_infer of its own, which in ms-swift gets the requests of a whole batch. It is not "
            "supported: here each rollout is a separate conversation. Move its code into `run`, or remove it."
        )


def as_reward(name: str, script_args: Any, args: Any) -> Callable:
    """A reward of `orms`, a class or a function, as an outcome reward of the trainer. Raises `ValueError`."""
    reward = registered("orms", name, "reward_funcs")
    try:
        if isinstance(reward, type):
            reward = reward(**accepted(reward, args=SimpleNamespace(**vars(args) | vars(script_args))))
    except Exception as error:
        raise ValueError(f"reward_funcs: {name!r} raised {error_line(error)}.") from error

    def run(environments: list, **kwargs: Any) -> Any:
        own, rest = columns_of(environments), {key: value for key, value in kwargs.items() if key not in OURS}
        columns = {**own, **rest, **{key: own[key] for key in OF_THE_ROLLOUT if key in own}}
        return reward(completions_of(environments), **columns)

    async def run_awaited(environments: list, **kwargs: Any) -> list:
        return await run(environments, **kwargs)

    function = run_awaited if waits(reward) else run
    function.__name__ = name
    return function


def completions_of(environments: list[ScheduledConversation]) -> list[str]:
    """The text of the assistant's last message of each conversation."""
    return [each.outputs[-1]["messages"][-1]["content"] for each in environments]


def columns_of(environments: list[ScheduledConversation]) -> dict[str, list | dict]:
    """What ms-swift's rewards get beside the dataset's columns, one value per conversation: its last output's.

    `trajectory_inputs` has all outputs of a conversation by its `request_id`, as rows with the dataset's columns.
    """
    last = [each.outputs[-1] for each in environments]
    columns: dict[str, Any] = {key: [row[key] for row in last] for key in last[0] if key != "images"}
    if any("images" in row for row in last):  # a scheduler's own, in place of the row's
        columns["images"] = [row.get("images", each.row.get("images")) for row, each in zip(last, environments)]
    columns["request_id"] = [each.request_id for each in environments]
    columns["prompt_id"] = [prompt_id(each) for each in environments]
    columns["trajectory_inputs"] = {
        each.request_id: [
            {**each.row, **output, "request_id": each.request_id, "prompt_id": prompt_id(each)}
            for output in each.outputs
        ]
        for each in environments
    }
    return columns


def prompt_id(conversation: ScheduledConversation) -> str:
    """An id that all conversations of a prompt share. It covers the prompt's images."""
    row = conversation.row
    text = json.dumps([row.get("prompt") or row.get("messages") or row, images_of(row)], default=image_or_str)
    return hashlib.sha256(text.encode()).hexdigest()
