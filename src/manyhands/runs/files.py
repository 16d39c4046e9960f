"""Atomic writes: to a temporary file, flushed to the disk, then renamed."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

AT_FDCWD = -100
RENAME_EXCHANGE = 2
"""Flag of renameat2 (Linux 3.15, glibc 2.28), which Python does not wrap."""


def dump_json(value: Any) -> str:
    """Return indented JSON, with null for NaN and infinities."""
    return json.dumps(jsonable(value), indent=2, allow_nan=False)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON atomically: a reader sees the old file or the new one, never half of one."""
    text = dump_json(value) + "\n"
    beside = path.with_name(f".{path.name}.new")
    with open(beside, "w", opener=opened_here) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def opened_here(path: str, flags: int) -> int:
    """Opener that follows no symlink: the folder of another user may have one to a file of yours."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def exchange(first: Path, second: Path) -> None:
    """Swap two paths: atomically if the file system can, otherwise by three renames."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = os.fsencode(first), os.fsencode(second)
        if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(first))
    between = second.with_name(f".{second.name}.between")
    os.rename(second, between)
    os.rename(first, second)
    os.rename(between, first)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or an empty string if it can't be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def sync_folder(path: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def jsonable(value: Any) -> Any:
    """Convert a value to JSON types: NaN and infinities to None, other objects to their repr."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return repr(value)
