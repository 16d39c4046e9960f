"""Shared memory between processes of one host, which never leaks.

A segment is an anonymous file (memfd): it has no name in any folder, so the kernel frees it when the last
process that maps it is gone, however it ended. Another process of the same user attaches by an address that
names the creator's descriptor; the creator must be alive then, but not later.

Cost: none per step. Creating touches no page; a page costs when it is first written.
"""

from __future__ import annotations

import mmap
import os
import re
from typing import TYPE_CHECKING

from manyhands.errors import LinkError

if TYPE_CHECKING:
    import torch

ALIGN = 64
"""Bytes. Tensors begin on a cache line, so two writers never share one."""

_ADDRESS = re.compile(r"shm:(\d+):(\d+):(\d+)")


class Segment:
    """A stretch of shared memory. Freed when the last process that has it closes it or ends."""

    def __init__(self, descriptor: int, nbytes: int, address: str) -> None:
        self.nbytes = nbytes
        self.address = address
        """Address with which other processes attach it."""
        self._descriptor: int | None = descriptor
        self._map = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)

    def __del__(self) -> None:
        self.close()

    @classmethod
    def create(cls, nbytes: int, *, label: str = "manyhands") -> Segment:
        """Create zeroed memory. `label` is shown in /proc."""
        assert nbytes > 0, "a segment is not empty"
        descriptor = os.memfd_create(label, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
        except OSError as error:
            os.close(descriptor)
            raise LinkError(f"can't allocate {nbytes:,} bytes of shared memory: {error}") from error
        return cls(descriptor, nbytes, f"shm:{os.getpid()}:{descriptor}:{nbytes}")

    @classmethod
    def attach(cls, address: str) -> Segment:
        """Attach to a segment of another process of this user on this host."""
        parts = _ADDRESS.fullmatch(address)
        if parts is None:
            raise LinkError(f"{address!r} is not an address of shared memory.")
        pid, number, nbytes = (int(part) for part in parts.groups())
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LinkError(f"The shared memory {address} is gone: {error.strerror}.") from error
        # The number may belong to another file by now, if its process has gone on without us.
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:") or (
            os.fstat(descriptor).st_size != nbytes
        ):
            os.close(descriptor)
            raise LinkError(f"{address} is not the shared memory that it was.")
        # This process's own address from now on: the creator may die, and others still attach.
        return cls(descriptor, nbytes, f"shm:{os.getpid()}:{descriptor}:{nbytes}")

    def tensor(self, dtype: torch.dtype, *, offset_bytes: int = 0, numel: int) -> torch.Tensor:
        """Return a flat tensor in the memory itself. It keeps the mapping alive, also after close()."""
        import torch

        assert offset_bytes % dtype.itemsize == 0, "a tensor begins at a multiple of its items"
        return torch.frombuffer(self._map, dtype=dtype, offset=offset_bytes, count=numel)

    @property
    def memory(self) -> memoryview:
        """All of it, as bytes."""
        return memoryview(self._map)

    def close(self) -> None:
        """Let no further process attach through this one; existing tensors stay valid."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def aligned(nbytes: int) -> int:
    """Return the next multiple of a cache line."""
    return -(-nbytes // ALIGN) * ALIGN
