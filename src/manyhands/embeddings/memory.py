"""The memory of a table: a range of address space that is allocated as needed, or refused with an error.

A write where the kernel has no memory left kills a process (SIGBUS, or the OOM killer). So memory is
allocated before it is written: first check what the host has available, then ask the kernel.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.parsing import show_bytes
from manyhands.errors import JobError
from manyhands.hosts.cgroup import memory_limit
from manyhands.transport.shm import Segment

RESERVED_BYTES = 4 << 30
"""Address space of a ReservedMemory."""
SPARE_PART = 50
"""1/50 of the host's memory is left to other programs."""


def total_bytes() -> int:
    """Return the memory of the host, or of the container."""
    limit = memory_limit()
    total = _meminfo()["MemTotal"]
    return total if limit is None else min(total, limit.limit_bytes)


def available_bytes() -> int:
    """Return the memory that can still be allocated without harming other programs."""
    info = _meminfo()
    free = info["MemAvailable"]
    # Without overcommit, the commit limit is reached before memory runs out.
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        free = min(free, info["CommitLimit"] - info["Committed_AS"])
    limit = memory_limit()
    if limit is not None:
        free = min(free, limit.limit_bytes - limit.used_bytes)
    return max(0, free - total_bytes() // SPARE_PART)


class ReservedMemory:
    """Shared memory that is larger than ever needed: only written pages take memory."""

    label: ClassVar[str]

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @classmethod
    def create(cls, *args: Any) -> Self:
        return cls(Segment.create(RESERVED_BYTES, label=cls.label), *args)

    @classmethod
    def attach(cls, address: str, *args: Any) -> Self:
        return cls(Segment.attach(address), *args)

    @property
    def address(self) -> str:
        return self._segment.address


class Memory:
    """A segment whose pages are allocated on demand."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        # The address names a descriptor of the segment; this one stays open as long as we need it.
        number = segment.address.split(":")[2]
        self._descriptor: int | None = os.open(f"/proc/self/fd/{number}", os.O_RDWR | os.O_CLOEXEC)

    def array(self, dtype: Any, offset: int, count: int) -> NDArray[Any]:
        """Return a flat array in this memory. It keeps the memory alive, also after close()."""
        return np.frombuffer(self.segment.memory, dtype=dtype, offset=offset, count=count)

    def allocate(
        self, table: str, ranges: list[tuple[int, int]], *, advice: str, brief: bool = False
    ) -> None:
        """Allocate memory for (offset, bytes) ranges. Raises a JobError if the host can't spare it.

        `brief`: it is freed soon, so it may use what is otherwise left to other programs.
        """
        needed = sum(size for _, size in ranges)
        spare = available_bytes() + (total_bytes() // SPARE_PART if brief else 0)
        if needed > spare:
            raise JobError(
                f"The table {table!r} has {show_bytes(self.used)} and needs {show_bytes(needed)} more; "
                f"this host can spare {show_bytes(spare)}. {advice}"
            )
        for offset, size in ranges:
            try:
                if size:
                    os.posix_fallocate(self._file, offset, size)
            except OSError as error:
                raise JobError(
                    f"The table {table!r} has {show_bytes(self.used)}; the kernel refuses "
                    f"{show_bytes(needed)} more ({error.strerror}). {advice}"
                ) from error

    def free_pages(self, offset: int, size: int) -> None:
        """Free whole pages. They read as zeros from now on."""
        whole = self.segment.memory.obj
        assert isinstance(whole, mmap.mmap)
        if size:
            whole.madvise(mmap.MADV_REMOVE, offset, size)

    def extents(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield the (offset, bytes) in this range that are allocated. Reading elsewhere would allocate
        memory."""
        at, end = offset, offset + size
        while at < end:
            try:
                begin = os.lseek(self._file, at, os.SEEK_DATA)
            except OSError:  # only holes from here on
                return
            if begin >= end:
                return
            at = min(os.lseek(self._file, begin, os.SEEK_HOLE), end)
            yield begin, at - begin

    @property
    def used(self) -> int:
        """Bytes allocated, by all processes."""
        return os.fstat(self._file).st_blocks * 512

    def close(self) -> None:
        self.segment.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def _file(self) -> int:
        if self._descriptor is None:
            raise JobError("This table was closed here; open it again with TableStore.attach.")
        return self._descriptor


def _meminfo() -> dict[str, int]:
    text = Path("/proc/meminfo").read_text()
    return {name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}
