"""The import paths of ms-swift, old and new, for plug-ins where ms-swift is not installed.

Python asks its own finders first. So an installed ms-swift, or another package called `swift`, is found as always.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from mt_grpo.integrations.ms_swift import loss, protocol, rewards, schedulers
from mt_grpo.integrations.plugin_imports import UnusedRegistry, not_offered


def to_device(value: Any, device: Any) -> Any:
    """Tensors in dicts and lists, on a device."""
    if isinstance(value, dict):
        return {key: to_device(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(each, device) for each in value)
    return value.to(device) if hasattr(value, "to") else value


def get_env_args(args_name: str, type_func: Callable[[str], Any], default_value: Any) -> Any:
    """A setting from the environment variable of this name in capitals.

    >>> get_env_args("no_such_variable", int, 7)
    7
    """
    value = os.environ.get(args_name.upper())
    if value is None:
        return default_value
    if type_func is bool:
        return value.lower() in ("1", "true", "yes", "y", "on", "t")
    return type_func(value)


def get_logger(*args: Any, **kwargs: Any) -> logging.Logger:
    """Return the logger of plug-ins, under ms-swift's name for it."""
    return logging.getLogger("swift")


def get_token_backed_response_ids(content: Any) -> list[int] | None:
    """The ids that a message's content is in ms-swift 4.6; here it is always text.

    >>> get_token_backed_response_ids([1, 2]), get_token_backed_response_ids("text")
    ([1, 2], None)
    """
    return list(content) if protocol.is_ids(content) else None


multi_turns: dict[str, type] = {
    "math_tip_trick": schedulers.MathTipsScheduler,
    "math_tip_trick_multi_turn": schedulers.MathTipsMultiTurnScheduler,
    "thinking_tips_scheduler": schedulers.ThinkingModelTipsScheduler,
    "tool_call_scheduler": schedulers.ToolCallScheduler,
}


def public(*modules: types.ModuleType) -> dict[str, Any]:
    """The classes of modules by name."""
    return {name: each for module in modules for name, each in vars(module).items() if isinstance(each, type)}


def absent(*names: str) -> dict[str, Any]:
    """Placeholders for names that are not supported."""
    return {name: not_offered(name, "ms-swift") for name in names}


def unused(*names: str) -> dict[str, Any]:
    """Registries from which nothing is taken."""
    return {name: UnusedRegistry(name, "ms-swift") for name in names}


HOOKS = {"multi_turns": multi_turns, **public(schedulers)}
SCHEDULERS = {**HOOKS, **absent("GYMScheduler", "OpenEnvScheduler"), "Messages": protocol.Messages}
ENVIRONMENTS = {**absent("Env", "SimpleMathEnv"), **unused("envs")}
REWARDS = {"orms": rewards.orms, **public(rewards)}
MODELS = {"rm_plugins": rewards.rm_plugins, **absent("DefaultRMPlugin", "GenRMPlugin")}
PROCESS_REWARDS = {**absent("PRM"), **unused("prms")}
CONTEXTS = {**absent("ContextManager"), **unused("context_managers")}
ENGINES = absent("TransformersEngine", "PtEngine", "VllmEngine", "GRPOVllmEngine", "InferEngine", "InferClient",
                 "SglangEngine", "LmdeployEngine")  # fmt: skip
TYPES = {**public(protocol), "Messages": protocol.Messages}
TEMPLATES = {**absent("Template", "get_template"), "Messages": protocol.Messages}
UTILS = {"get_logger": get_logger, "to_device": to_device, "get_env_args": get_env_args,
         "remove_response": protocol.remove_response}  # fmt: skip
LOSSES = {"LossScale": loss.LossScale, "loss_scale_map": loss.loss_scale_map}
METRICS = absent("Metric", "MeanMetric", "InferStats", "compute_acc", "compute_rouge_bleu", "get_metric")
TUNERS = {**absent("Tuner", "PeftTuner"), **unused("extra_tuners")}
OF_TRAINING = {  # of `swift.plugin`, for other kinds of training
    **METRICS, **TUNERS, **PROCESS_REWARDS, **absent("get_loss_func", "get_loss_scale"),
    **unused("loss_mapping", "LOSS_MAPPING", "metric_mapping", "optimizers_map", "agent_templates", "extra_callbacks"),
}  # fmt: skip
OF_MODELS = absent("TrainArguments", "RLHFArguments", "deep_getattr", "get_model_arch", "get_multimodal_target_regex",
                   "get_model_tokenizer", "load_dataset", "safe_snapshot_download", "ModelType")  # fmt: skip
DATASETS = absent("DatasetMeta", "RowPreprocessor", "MessagesPreprocessor", "ResponsePreprocessor", "SubsetDataset",
                  "register_dataset", "load_dataset")  # fmt: skip
ALL = {**LOSSES, **HOOKS, **ENVIRONMENTS, **REWARDS, **MODELS, **CONTEXTS}
MODULES = {
    "swift": {},
    "swift.plugin": {**OF_TRAINING, **ALL},
    "swift.plugin.multi_turn": SCHEDULERS,
    "swift.loss_scale": LOSSES,
    "swift.loss_scale.base": LOSSES,
    "swift.loss_scale.mapping": LOSSES,
    "swift.plugin.loss_scale": LOSSES,
    "swift.plugin.loss_scale.loss_scale": LOSSES,
    "swift.plugin.env": ENVIRONMENTS,
    "swift.plugin.context_manager": CONTEXTS,
    "swift.plugin.orm": REWARDS,
    "swift.plugin.prm": PROCESS_REWARDS,
    "swift.plugin.metric": METRICS,
    "swift.plugin.tuner": TUNERS,
    "swift.metrics": METRICS,
    "swift.tuner_plugin": TUNERS,
    "swift.tuners": absent("Swift", "LoraConfig"),
    "swift.dataset": DATASETS,
    "swift.plugin.rm_plugin": MODELS,
    "swift.rollout": {**SCHEDULERS, **ENVIRONMENTS},
    "swift.rollout.multi_turn": SCHEDULERS,
    "swift.rollout.gym_env": {**ENVIRONMENTS, **CONTEXTS},
    "swift.rollout.openenv_wrapper": absent("OpenEnvWrapper"),
    "swift.rewards": {**REWARDS, **MODELS, **PROCESS_REWARDS, **HOOKS},
    "swift.rewards.prm": PROCESS_REWARDS,
    "swift.rewards.orm": REWARDS,
    "swift.rewards.rm_plugin": MODELS,
    "swift.infer_engine": {**TYPES, **ENGINES},
    "swift.infer_engine.protocol": TYPES,
    "swift.llm": {**TYPES, **ENGINES, **TEMPLATES, **OF_MODELS, **DATASETS, "to_device": to_device},
    "swift.llm.infer": {**TYPES, **ENGINES},
    "swift.llm.infer.protocol": TYPES,
    "swift.llm.infer.infer_engine": ENGINES,
    "swift.llm.template": {**TYPES, **TEMPLATES},
    "swift.llm.template.template_inputs": TYPES,
    "swift.llm.utils": {**TEMPLATES, "to_device": to_device},
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
        """Fill the module with the names that are offered."""
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
    return protocol
