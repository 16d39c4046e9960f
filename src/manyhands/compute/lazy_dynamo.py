"""Loads torch's compiler only when something compiles.

Every torch optimizer imports `torch._dynamo` when it is created, only to tell it what not to compile. That
takes a second, a third of the time in which a worker starts, and most jobs compile nothing. So a module
stands in for it that answers those few calls itself, and loads the real one at any other.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"


def compile_late() -> None:
    """Put the stand-in where `import torch._dynamo` finds it, unless the real one is there."""
    if NAME not in sys.modules:
        sys.modules[NAME] = _StandIn(NAME)


class _StandIn(ModuleType):
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
    """Called when a process group starts: there is nothing to clear yet."""

    @staticmethod
    def graph_break() -> None:
        """Does something only while the compiler runs."""

    @staticmethod
    def disable(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        """Exclude a function from compilation, once there is a compiler."""

        @functools.wraps(fn)
        def called(*fn_args: Any, **fn_options: Any) -> Any:
            if isinstance(sys.modules.get(NAME), _StandIn):
                return fn(*fn_args, **fn_options)
            return disabled()(*fn_args, **fn_options)

        @functools.cache
        def disabled() -> Callable[..., Any]:
            real: Callable[..., Any] = _real().disable(fn, *args, **options)
            return real

        return called

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # something inspects all modules
            raise AttributeError(name)
        return getattr(_real(), name)


def _real() -> ModuleType:
    if isinstance(sys.modules.get(NAME), _StandIn):
        del sys.modules[NAME]
    return importlib.import_module(NAME)
