"""Sparse gradients of a worker: for each table, distinct ids and the gradients of their rows.

They are sent as plain bytes: for each table, in the order of names, the number of ids, the ids, the
gradients. Inside a host they are in shared memory that all servers read: a range of address space larger than
any batch needs, in which only written pages take memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.memory import ReservedMemory
from manyhands.embeddings.spec import Table
from manyhands.errors import JobError
from manyhands.transport.shm import Segment


@dataclass(frozen=True)
class SparseGrads:
    """Gradients of some rows of a table. Each id occurs once."""

    ids: NDArray[np.int64]
    grads: NDArray[np.float32]

    @classmethod
    def none(cls, dim: int) -> SparseGrads:
        return cls(np.empty(0, np.int64), np.empty((0, dim), np.float32))

    def times(self, factor: float) -> SparseGrads:
        return self if factor == 1.0 else SparseGrads(self.ids, self.grads * np.float32(factor))

    def part(self, chosen: NDArray[np.bool_]) -> SparseGrads:
        if chosen.all():
            return self
        return SparseGrads(self.ids[chosen], self.grads[chosen])


TableGrads = Mapping[str, SparseGrads]
"""By table. A table without gradients may be missing."""


def wire_specs(tables: Mapping[str, Table], *, adds: bool) -> dict[str, Table]:
    """Return the tables as their rows are sent. If differences are pushed (`adds`), each row has one more
    number: its version when it was read."""
    return {name: replace(t, dim=t.dim + 1) if adds else t for name, t in tables.items()}


def to_bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, to the nearest. It has the range of float32, so no gradient underflows."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(numbers: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_wire(rows: NDArray[np.float32], bits: int) -> memoryview:
    """Encode rows as bytes."""
    numbers = to_bfloat16(rows) if bits == 16 else np.ascontiguousarray(rows)
    return numbers.reshape(-1).view(np.uint8).data


def from_wire(payload: memoryview | NDArray[np.uint8], dim: int, bits: int) -> NDArray[np.float32]:
    if bits == 16:
        return from_bfloat16(np.frombuffer(payload, np.uint16)).reshape(-1, dim)
    return np.frombuffer(payload, np.float32).reshape(-1, dim)


def num_bytes(grads: TableGrads, tables: Mapping[str, Table], *, bits: int = 32) -> int:
    return sum(
        8 + _padded(len(grads[name].ids), table.dim, bits) if name in grads else 8
        for name, table in tables.items()
    )


def pack_into(
    memory: memoryview, grads: TableGrads, tables: Mapping[str, Table], *, bits: int = 32
) -> int:
    """Write gradients to memory. Returns the number of bytes. `bits`: of each number."""
    raw = np.frombuffer(memory, np.uint8)
    at = 0
    for name, table in sorted(tables.items()):
        sparse = grads.get(name) or SparseGrads.none(table.dim)
        count = len(sparse.ids)
        raw[at : at + 8].view(np.int64)[0] = count
        at += 8
        raw[at : at + 8 * count].view(np.int64)[:] = sparse.ids
        stop = at + 8 * count + bits // 8 * count * table.dim
        raw[at + 8 * count : stop] = np.frombuffer(to_wire(sparse.grads, bits), np.uint8)
        at += _padded(count, table.dim, bits)
    return at


def unpack(
    memory: memoryview | bytes, tables: Mapping[str, Table], *, bits: int = 32
) -> dict[str, SparseGrads]:
    """Read gradients from memory, as views. Raises ValueError if they are malformed."""
    raw = np.frombuffer(memory, np.uint8)
    grads, at = {}, 0
    for name, table in sorted(tables.items()):
        if len(raw) < at + 8:
            raise ValueError(f"the gradients end before {name}")
        count = int(raw[at : at + 8].view(np.int64)[0])
        at += 8
        if not 0 <= count <= (len(raw) - at) // (8 + bits // 8 * table.dim):
            raise ValueError(f"{count} rows of {name} do not fit into {len(raw) - at} bytes")
        ids = raw[at : at + 8 * count].view(np.int64)
        values = raw[at + 8 * count : at + 8 * count + bits // 8 * count * table.dim]
        grads[name] = SparseGrads(ids, from_wire(values, table.dim, bits))
        at += _padded(count, table.dim, bits)
    return grads


def _padded(count: int, dim: int, bits: int) -> int:
    """Return the bytes of ids and rows, rounded up to a multiple of 8."""
    return -(-count * (8 + bits // 8 * dim) // 8) * 8


class SharedGrads(ReservedMemory):
    """Shared memory for the gradients of one part of a batch."""

    label = "manyhands-sparse"

    def __init__(self, segment: Segment, tables: Mapping[str, Table]) -> None:
        super().__init__(segment)
        self._tables = tables

    def put(self, grads: TableGrads) -> None:
        needed = num_bytes(grads, self._tables)
        if needed > self._segment.nbytes:
            raise JobError(
                f"The gradients of table rows of one part take {needed:,} bytes, and at most "
                f"{self._segment.nbytes:,} fit. Use a smaller batch, or more workers."
            )
        pack_into(self._segment.memory, grads, self._tables)

    def get(self) -> TableGrads:
        return unpack(self._segment.memory, self._tables)


def merged(parts: Sequence[SparseGrads]) -> SparseGrads:
    """Add gradients in their order, so that each id occurs once."""
    if len(parts) == 1:
        return parts[0]
    from manyhands.embeddings.store import merge  # loads numba

    ids = np.concatenate([part.ids for part in parts])
    return SparseGrads(*merge(ids, np.concatenate([part.grads for part in parts])))


def weighted_sum(
    parts: Sequence[TableGrads], coefficients: Sequence[float], names: Iterable[str]
) -> dict[str, SparseGrads]:
    """Add gradients, each times its coefficient, in their order: the same bits on every process."""
    terms: dict[str, list[SparseGrads]] = {name: [] for name in names}
    for part, coefficient in zip(parts, coefficients, strict=True):
        for name, sparse in part.items():
            if len(sparse.ids):
                terms[name].append(sparse.times(coefficient))
    return {name: merged(found) for name, found in terms.items() if found}
