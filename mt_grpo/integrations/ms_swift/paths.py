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
from contextlib import suppress
from typing import Any

from accelerate.utils import send_to_device

from mt_grpo.integrations.ms_swift import loss, protocol, rewards, schedulers


def not_offered(name: str) -> type:
    """A class that can be imported and subclassed, and raises `NotImplementedError` when it is called."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(f"{name} of ms-swift is not supported here, and ms-swift is not installed.")

    return type(name, (), {"__init__": __init__})


def get_logger(*args: Any, **kwargs: Any) -> logging.Logger:
    """Return the logger of plug-ins, under ms-swift's name for it."""
    return logging.getLogger("swift")


def get_token_backed_response_ids(content: Any) -> None:
    """The ids of a message in ms-swift 4.6. Here a message is always text."""


REGISTRIES: dict[str, dict[str, Any]] = {
    "multi_turns": {
        "math_tip_trick": schedulers.MathTipsScheduler,
        "math_tip_trick_multi_turn": schedulers.MathTipsMultiTurnScheduler,
        "thinking_tips_scheduler": schedulers.ThinkingModelTipsScheduler,
    },
    "orms": rewards.orms,
    "loss_scale_map": loss.loss_scale_map,
    "rm_plugins": {},  # nothing is taken from these three: their recipe keys do not exist
    "envs": {},
    "context_managers": {},
}
MISSING = (  # classes that official files import: each raises where it is used
    "Env", "ContextManager", "GYMScheduler", "OpenEnvScheduler", "Template", "DefaultRMPlugin", "PtEngine",
    "TransformersEngine", "VllmEngine", "GRPOVllmEngine", "InferEngine",
)  # fmt: skip
# Every module offers all names.
NAMES: dict[str, Any] = {name: not_offered(name) for name in MISSING}
for _source in (protocol, rewards, schedulers, loss):
    _own = [name for name, each in vars(_source).items() if getattr(each, "__module__", "") == _source.__name__]
    NAMES |= {name: getattr(_source, name) for name in _own}
NAMES |= {function.__name__: function for function in (get_logger, get_token_backed_response_ids)}
NAMES |= {**REGISTRIES, "Messages": protocol.Messages, "to_device": send_to_device}
MODULES = (
    "swift", "swift.plugin", "swift.plugin.multi_turn", "swift.plugin.env", "swift.plugin.context_manager",
    "swift.plugin.orm", "swift.plugin.rm_plugin", "swift.plugin.loss_scale", "swift.plugin.loss_scale.loss_scale",
    "swift.loss_scale", "swift.loss_scale.base", "swift.loss_scale.mapping", "swift.rollout",
    "swift.rollout.multi_turn", "swift.rollout.gym_env", "swift.rewards", "swift.rewards.orm",
    "swift.rewards.rm_plugin", "swift.infer_engine", "swift.infer_engine.protocol", "swift.llm", "swift.llm.infer",
    "swift.llm.infer.protocol", "swift.llm.infer.infer_engine", "swift.llm.template",
    "swift.llm.template.template_inputs", "swift.llm.utils", "swift.template", "swift.template.utils", "swift.utils",
)  # fmt: skip


class SwiftPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of `MODULES`, as the last of all finders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find a module of ms-swift that no other finder has found."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in MODULES else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill the module with the names that are offered."""
        vars(module).update(NAMES)


def install() -> None:
    """Have `import swift...` find these modules where there are no others."""
    if not any(isinstance(finder, SwiftPaths) for finder in sys.meta_path):
        sys.meta_path.append(SwiftPaths())


def registry(name: str) -> dict[str, Any]:
    """All that plug-ins have put into a registry, be it ms-swift's own or the one here."""
    found = dict(REGISTRIES[name])
    for module in MODULES:
        found |= getattr(sys.modules.get(module), name, None) or {}
    return found


def protocol_module() -> types.ModuleType:
    """The module of ms-swift's types: an installed one's, whose schedulers may check for its own classes."""
    for name in ("swift.infer_engine.protocol", "swift.llm.infer.protocol"):
        with suppress(ImportError):
            return importlib.import_module(name)
    return protocol
