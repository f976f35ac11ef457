"""math-verify's own time limits, set aside where they cannot work.

They are signals, which only the main thread may install. In another thread `parse` and `verify` raise, or, as their
default is, take every answer for wrong without a word. Tools, environments, schedulers and async rewards run in other
threads. Their own time limits, such as `tool_timeout`, hold there.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

UTILS, USERS = "math_verify.utils", ("math_verify.parser", "math_verify.grader")


def limit_in_main_thread(timeout: Callable) -> Callable:
    """math-verify's decorator with a time limit, which in other threads sets none."""

    @functools.wraps(timeout)
    def limited(timeout_seconds: int | None = 10) -> Callable:
        with_limit = timeout(timeout_seconds)

        def decorate(function: Callable) -> Callable:
            in_time = with_limit(function)

            def run(*args: Any, **kwargs: Any) -> Any:
                here = in_time if threading.current_thread() is threading.main_thread() else function
                return here(*args, **kwargs)

            return run

        return decorate

    limited.of_main_thread = True
    return limited


class MathLimits(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes `math_verify.utils` when it is imported, whoever imports it, and before math-verify's modules use it."""

    def __init__(self):
        self.loader: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """That of the other finders, with a loader that changes the module."""
        if name != UTILS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        """As always."""
        return self.loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """Import it, and change it."""
        self.loader.exec_module(module)
        change(module)


def change(module: types.ModuleType) -> None:
    """Replace the decorator in a module that has it."""
    timeout = getattr(module, "timeout", None)
    if timeout is not None and not hasattr(timeout, "of_main_thread"):
        module.timeout = limit_in_main_thread(timeout)


def set_math_limits_aside() -> None:
    """Have math-verify work in all threads of this process, whether it is imported by now or later."""
    if not any(isinstance(finder, MathLimits) for finder in sys.meta_path):
        sys.meta_path.insert(0, MathLimits())
    for name in (UTILS, *USERS):
        if name in sys.modules:
            change(sys.modules[name])
