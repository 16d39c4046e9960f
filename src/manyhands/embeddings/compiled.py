"""Decorators that compile kernels: without the GIL, cached on disk, recompiled when any source changed.

numba compares only the file of a kernel itself, and would reuse one that was compiled with older constants
and functions of another file. So the cache key covers all files of this package that kernels use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from numba import njit

_SOURCES = ("atomics", "compiled", "index", "kernels", "layout", "shards", "spec")


def fast(function: Callable[..., Any]) -> Any:
    """Compile with sums in any order. NaN and infinity keep their meaning."""
    return _compiled(function, {"contract", "reassoc", "nsz"})


def exact(function: Callable[..., Any]) -> Any:
    """Compile to the same bits on every machine."""
    return _compiled(function, ())


def _compiled(function: Callable[..., Any], fastmath: Iterable[str]) -> Any:
    made: Any = njit(cache=True, nogil=True, error_model="numpy", fastmath=set(fastmath) or False)(
        function
    )
    kept = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if kept is not None:
        kept._source_stamp = _STAMP
    return made


def _stamp() -> str:
    digest = hashlib.blake2b()
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


_STAMP = _stamp()
