"""A table's memory: a stretch of address space that is filled as it is needed, or refused in words.

Writing where the kernel has no memory left ends a process (SIGBUS, or the kernel picks a victim). So
memory is asked for before it is written: first whether the host can spare it, then of the kernel.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.parsing import show_bytes
from manyhands.errors import JobError
from manyhands.hosts.cgroup import memory_limit
from manyhands.transport.shm import Segment

SPARE_PART = 50
"""One part in 50 of the host's memory is left to others."""


def total_bytes() -> int:
    """Memory that this process could have at most: the host's, or its container's."""
    limit = memory_limit()
    total = _meminfo()["MemTotal"]
    return total if limit is None else min(total, limit.limit_bytes)


def available_bytes() -> int:
    """Memory that can still be had without taking from others."""
    said = _meminfo()
    free = said["MemAvailable"]
    # Where the kernel promises only what it has, promises run out before memory does.
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        free = min(free, said["CommitLimit"] - said["Committed_AS"])
    limit = memory_limit()
    if limit is not None:
        free = min(free, limit.limit_bytes - limit.used_bytes)
    return max(0, free - total_bytes() // SPARE_PART)


class Memory:
    """A segment, and what of it has really been taken."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        # The address names the descriptor; a second one is ours as long as we need it.
        number = segment.address.split(":")[2]
        self._descriptor: int | None = os.open(f"/proc/self/fd/{number}", os.O_RDWR | os.O_CLOEXEC)

    @property
    def address(self) -> str:
        return self.segment.address

    def array(self, dtype: Any, offset: int, count: int) -> NDArray[Any]:
        """A flat array in the memory itself. It keeps the memory alive, also after close()."""
        return np.frombuffer(self.segment.memory, dtype=dtype, offset=offset, count=count)

    def take(
        self, table: str, ranges: list[tuple[int, int]], *, advice: str, brief: bool = False
    ) -> None:
        """Have memory for these (offset, bytes); a JobError if the host can't spare it.

        `brief`: it is given back soon, so it may come from what is otherwise left to others.
        """
        wanted = sum(size for _, size in ranges)
        spare = available_bytes() + (total_bytes() // SPARE_PART if brief else 0)
        if wanted > spare:
            raise JobError(
                f"The table {table!r} has {show_bytes(self.used)} and needs {show_bytes(wanted)} more; "
                f"this host can spare {show_bytes(spare)}. {advice}"
            )
        for offset, size in ranges:
            try:
                if size:
                    os.posix_fallocate(self._file, offset, size)
            except OSError as error:
                raise JobError(
                    f"The table {table!r} has {show_bytes(self.used)}; the kernel refuses "
                    f"{show_bytes(wanted)} more ({error.strerror}). {advice}"
                ) from error

    def forget(self, offset: int, size: int) -> None:
        """Give whole pages back; they read as zeros from now on."""
        whole = self.segment.memory.obj
        assert isinstance(whole, mmap.mmap)
        if size:
            whole.madvise(mmap.MADV_REMOVE, offset, size)

    def extents(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        """The (offset, bytes) in this range that are taken: to read elsewhere would take memory too."""
        at, end = offset, offset + size
        while at < end:
            try:
                begin = os.lseek(self._file, at, os.SEEK_DATA)
            except OSError:  # nothing but holes from here on
                return
            if begin >= end:
                return
            at = min(os.lseek(self._file, begin, os.SEEK_HOLE), end)
            yield begin, at - begin

    @property
    def used(self) -> int:
        """Bytes really taken, by whichever process."""
        return os.fstat(self._file).st_blocks * 512

    def close(self) -> None:
        self.segment.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def _file(self) -> int:
        if self._descriptor is None:
            raise JobError("This table was closed here; open it again with Store.attach.")
        return self._descriptor


def _meminfo() -> dict[str, int]:
    text = Path("/proc/meminfo").read_text()
    return {name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}
