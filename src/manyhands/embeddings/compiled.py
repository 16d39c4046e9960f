"""How kernels are compiled: without the GIL, kept on disk, and anew when any of their sources changed.

numba looks at a kernel's own file only, and would go on using one that was compiled from another
file's older constants and functions. So all files of this package are in what it compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from numba import njit

_SOURCES = ("atomics", "compiled", "index", "kernels", "layout", "shards", "spec")


def fast(function: Callable[..., Any]) -> Any:
    """Sums may be taken in any order; NaN and infinity keep their meaning."""
    return _compiled(function, {"contract", "reassoc", "nsz"})


def exact(function: Callable[..., Any]) -> Any:
    """The same bits on every machine."""
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
