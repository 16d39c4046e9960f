"""Shared by the readers of cluster descriptions: numbers, addresses, and errors about wrong ones. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from manyhands.errors import ClusterError
from manyhands.hosts.spec import COORDINATOR, WORKER, Entry

MAX_PORT = 65535
MAX_ENTRIES = 100_000
"""Upper bound on the size of a cluster: a wrong number is an error, not a list that fills memory."""
_HOST = re.compile(r"[^\s\[\]/,:]+")


def first_set(environ: Mapping[str, str], *names: str) -> str | None:
    """Return the first of these variables that is set."""
    return next((name for name in names if name in environ), None)


def number(
    environ: Mapping[str, str],
    name: str,
    *,
    least: int = 0,
    most: int | None = None,
    default: int | None = None,
) -> int:
    """Read a variable that has to be a whole number. `default`: its value if it is not set."""
    if default is not None and name not in environ:
        return default
    text = environ[name].strip()
    allowed = f"{least} or more" if most is None else f"from {least} to {most}"
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ClusterError(f"{name} is {environ[name]!r}: it must be a whole number, {allowed}.")
    value = int(text)
    if value < least or (most is not None and value > most):
        raise ClusterError(f"{name} is {value}: it must be {allowed}.")
    return value


def check_below(name: str, value: int, total_name: str, total: int, noun: str) -> None:
    if value >= total:
        raise ClusterError(
            f"{name} is {value} and {total_name} is {total}: {noun} go from 0 to {total - 1}."
        )


def host(environ: Mapping[str, str], name: str) -> str:
    """Read a variable that has to be the name or address of a host."""
    text = environ[name].strip()
    if not is_host(text):
        raise ClusterError(
            f"{name} is {environ[name]!r}: it must be the name or the address of a host, without a port."
        )
    return text.strip("[]")


def is_host(text: str) -> bool:
    """Return whether this can be a name or an address: IPv6 with or without brackets."""
    if text.startswith("["):
        return bool(re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]", text))
    return bool(_HOST.fullmatch(text)) or bool(
        re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%\w]*:\S*", text)
    )


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse equal keys: json.loads would silently take the last one."""
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise ValueError(f"{key!r} is there {times} times in one object")
    return dict(pairs)


def split_address(text: str) -> tuple[str, int]:
    """Split `host:port` or `[host]:port`; a ValueError explains what is wrong."""
    match = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^\[\]:/\s]+))(?::([^:/]*))?", text)
    if match is None:
        raise ValueError("it must be HOST:PORT, with an IPv6 host in brackets: [fd00::1]:2222")
    where, digits = match[1] or match[2], match[3]
    if digits is None:
        raise ValueError(f"it has no port: write {text}:2222, or another port that is free there")
    if not re.fullmatch(r"[0-9]+", digits):
        raise ValueError(f"its port {digits!r} is not a number")
    if not 1 <= int(digits) <= MAX_PORT:
        raise ValueError(f"its port is {digits}, and ports go from 1 to {MAX_PORT}")
    return where, int(digits)


def ranked_entries(
    prefix: str, places: Iterable[tuple[str, int | None]], *, slots: int = 1
) -> tuple[Entry, ...]:
    """Make an entry for each host and local rank: the first is the coordinator, the others are workers."""
    entries = (
        Entry(f"{prefix}-{rank}", WORKER, rank, host, local_rank=local_rank, slots=slots)
        for rank, (host, local_rank) in enumerate(places)
    )
    return replace(next(entries), role=COORDINATOR), *entries
