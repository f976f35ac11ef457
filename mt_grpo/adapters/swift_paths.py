"""The import paths of ms-swift, old and new, for plug-ins where ms-swift is not installed.

Python asks its own finders first. So an installed ms-swift, or another package called `swift`, is found as always.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from typing import Any

import mt_grpo.adapters.swift_gym as swift_gym
import mt_grpo.adapters.swift_loss as swift_loss
import mt_grpo.adapters.swift_openenv as swift_openenv
import mt_grpo.adapters.swift_protocol as swift_protocol
import mt_grpo.adapters.swift_react as swift_react
import mt_grpo.adapters.swift_rewards as swift_rewards
import mt_grpo.adapters.swift_schedulers as swift_schedulers
import mt_grpo.adapters.swift_tips as swift_tips


def not_offered(name: str) -> type:
    """A class that plug-ins may import and inherit from. Raises `NotImplementedError` where it is called."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(f"{name} of ms-swift is not offered here, and ms-swift is not installed.")

    return type(name, (), {"__init__": __init__})


def to_device(value: Any, device: Any) -> Any:
    """Tensors in dicts and lists, on a device."""
    if isinstance(value, dict):
        return {key: to_device(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(each, device) for each in value)
    return value.to(device) if hasattr(value, "to") else value


def get_logger(*args: Any, **kwargs: Any) -> logging.Logger:
    """The logger of plug-ins."""
    return logging.getLogger("swift")


def get_token_backed_response_ids(content: Any) -> list[int] | None:
    """The ids that a message's content is in ms-swift 4.6; here it is always text.

    >>> get_token_backed_response_ids([1, 2]), get_token_backed_response_ids("text")
    ([1, 2], None)
    """
    return list(content) if swift_protocol.is_ids(content) else None


multi_turns: dict[str, type] = {
    "math_tip_trick": swift_tips.MathTipsScheduler,
    "math_tip_trick_multi_turn": swift_tips.MathTipsMultiTurnScheduler,
    "thinking_tips_scheduler": swift_tips.ThinkingModelTipsScheduler,
    "tool_call_scheduler": swift_react.ToolCallScheduler,
    "gym_scheduler": swift_gym.GYMScheduler,
    "openenv_scheduler": swift_openenv.OpenEnvScheduler,
}


def public(*modules: types.ModuleType) -> dict[str, Any]:
    """The classes of modules by name."""
    return {name: each for module in modules for name, each in vars(module).items() if isinstance(each, type)}


SCHEDULERS = {"multi_turns": multi_turns, **public(swift_schedulers, swift_tips, swift_gym, swift_openenv)}
ENVIRONMENTS = {"Env": swift_gym.Env, "SimpleMathEnv": swift_gym.SimpleMathEnv, "envs": swift_gym.envs}
REWARDS = {"orms": swift_rewards.orms, **public(swift_rewards)}
MODELS = {"rm_plugins": swift_rewards.rm_plugins, "DefaultRMPlugin": not_offered("DefaultRMPlugin")}
CONTEXTS = {"ContextManager": swift_gym.ContextManager, "context_managers": swift_gym.context_managers}
ENGINES = {name: not_offered(name) for name in ("TransformersEngine", "PtEngine", "VllmEngine", "GRPOVllmEngine")}
TYPES = {**public(swift_protocol), "Messages": swift_protocol.Messages}
TEMPLATES = {"Template": not_offered("Template"), "Messages": swift_protocol.Messages}
UTILS = {"get_logger": get_logger, "to_device": to_device, "remove_response": swift_protocol.remove_response}
LOSSES = {"LossScale": swift_loss.LossScale, "loss_scale_map": swift_loss.loss_scale_map}
ALL = {**LOSSES, **SCHEDULERS, **ENVIRONMENTS, **REWARDS, **MODELS, **CONTEXTS}
MODULES = {
    "swift": {},
    "swift.plugin": ALL,
    "swift.plugin.multi_turn": SCHEDULERS,
    "swift.loss_scale": LOSSES,
    "swift.loss_scale.base": LOSSES,
    "swift.loss_scale.mapping": LOSSES,
    "swift.plugin.loss_scale": LOSSES,
    "swift.plugin.loss_scale.loss_scale": LOSSES,
    "swift.plugin.env": ENVIRONMENTS,
    "swift.plugin.context_manager": CONTEXTS,
    "swift.plugin.orm": REWARDS,
    "swift.plugin.rm_plugin": MODELS,
    "swift.rollout": {**SCHEDULERS, **ENVIRONMENTS},
    "swift.rollout.multi_turn": SCHEDULERS,
    "swift.rollout.gym_env": {**ENVIRONMENTS, **CONTEXTS},
    "swift.rollout.openenv_wrapper": {"OpenEnvWrapper": swift_openenv.OpenEnvWrapper},
    "swift.rewards": {**REWARDS, **MODELS},
    "swift.rewards.orm": REWARDS,
    "swift.rewards.rm_plugin": MODELS,
    "swift.infer_engine": {**TYPES, **ENGINES},
    "swift.infer_engine.protocol": TYPES,
    "swift.llm": {**TYPES, **ENGINES, **TEMPLATES},
    "swift.llm.infer": {**TYPES, **ENGINES},
    "swift.llm.infer.protocol": TYPES,
    "swift.llm.infer.infer_engine": ENGINES,
    "swift.llm.template": {**TYPES, **TEMPLATES},
    "swift.llm.template.template_inputs": TYPES,
    "swift.llm.utils": TEMPLATES,
    "swift.template": TEMPLATES,
    "swift.template.utils": {**TEMPLATES, "get_token_backed_response_ids": get_token_backed_response_ids},
    "swift.utils": UTILS,
}


class SwiftPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of `MODULES`, as the last of all finders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """For a module of ms-swift that nobody else has found."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in MODULES else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill it."""
        vars(module).update(MODULES[module.__name__])


def install() -> None:
    """Have `import swift...` find these modules where there are no others."""
    if not any(isinstance(finder, SwiftPaths) for finder in sys.meta_path):
        sys.meta_path.append(SwiftPaths())


def registry(name: str) -> dict[str, Any]:
    """All that plug-ins have put into a registry, be it ms-swift's own or the one here."""
    found: dict[str, Any] = {}
    for module in MODULES:
        found |= getattr(sys.modules.get(module), name, None) or {}
    return {**ALL.get(name, {}), **found}


def protocol_module() -> types.ModuleType:
    """The module of ms-swift's types: an installed one's, whose schedulers may check for its own classes."""
    for name in ("swift.infer_engine.protocol", "swift.llm.infer.protocol"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return swift_protocol
