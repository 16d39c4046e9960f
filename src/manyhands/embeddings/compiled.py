"""Decorators that compile kernels: without the GIL, cached on disk, recompiled when any source changed.

numba compares only the file of a kernel itself, and would reuse one that was compiled with older constants
and functions of another file. So the cache key covers all files that kernels use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

_SOURCES = {
    "embeddings": ("atomics", "compiled", "index", "kernels", "layout", "shards", "spec"),
    "word2vec": ("copies", "kernels", "sampling", "simd", "windows"),
}
_TEXTS = [
    (Path(__file__).parents[1] / package / f"{name}.py").read_bytes()
    for package, names in _SOURCES.items()
    for name in names
]
_STAMP = hashlib.blake2b(b"".join(_TEXTS)).hexdigest()


def fast(function: Callable[..., Any]) -> Any:
    """Compile with sums in any order. NaN and infinity keep their meaning."""
    return _compiled(function, fastmath={"contract", "reassoc", "nsz"})


def exact(function: Callable[..., Any]) -> Any:
    """Compile to the same bits on every machine."""
    return _compiled(function)


def loose(function: Callable[..., Any]) -> Any:
    """Compile with every liberty of `fastmath`: the numbers must be finite."""
    return _compiled(function, fastmath=True)


def inlined(function: Callable[..., Any]) -> Any:
    """Like `loose`, as a part of each kernel that calls the function."""
    return _compiled(function, fastmath=True, inline="always")


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    made: Any = njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    kept = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if kept is not None:
        kept._source_stamp = _STAMP
    return made
