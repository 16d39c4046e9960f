"""Limits that a container or batch system sets for this process, from the kernel's control groups.

A limit may be set at any level above the process: the strictest counts. Version 2 has one tree, version 1 one
per controller. Inside a container, the process's own level may not be visible, but then its top level is the
root of the mount.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT_BYTES = 1 << 60
"""Version 1 expresses "no limit" by a number near the largest possible one."""


@dataclass(frozen=True)
class MemoryLimit:
    limit_bytes: int
    used_bytes: int
    """Without the page cache, which the kernel would drop first."""


def memory_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> MemoryLimit | None:
    """Return the limit that leaves the least memory, or None if there is none."""
    limits = []
    for folder in _levels("memory", root, membership):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= NO_LIMIT_BYTES:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        limits.append(MemoryLimit(limit, max(0, used - _reclaimable(folder))))
    return min(limits, key=lambda m: m.limit_bytes - m.used_bytes, default=None)


def cpu_quota(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Return the CPU time that this process may use, in cores; None: no limit."""
    quotas = []
    for folder in _levels("cpu", root, membership):
        quota, period, *_ = [*_text(folder / "cpu.max").split(), "", ""]
        quota = quota or _text(folder / "cpu.cfs_quota_us")
        period = period or _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _levels(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Return the folders of this process's control groups, innermost first."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        place = top / path.strip("/")
        yield place
        if place != top:
            yield from (folder for folder in place.parents if folder.is_relative_to(top))


def _reclaimable(folder: Path) -> int:
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
