"""What a worker's part of a step wants changed in tables: distinct ids and the gradients of their rows.

A basket travels as plain bytes: for each table, in the order of their names, the number of ids, the
ids, the gradients. Inside a host it lies in memory that all servers can read: a stretch of address
space that is larger than any batch needs, and takes only the memory that was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.spec import Table
from manyhands.errors import JobError
from manyhands.transport.shm import Segment

RESERVED_BYTES = 4 << 30
"""Of address space for the sparse gradients of one part."""


@dataclass(frozen=True)
class SparseGrads:
    """Gradients of some rows of a table; each id once."""

    ids: NDArray[np.int64]
    grads: NDArray[np.float32]

    @classmethod
    def none(cls, dim: int) -> SparseGrads:
        return cls(np.empty(0, np.int64), np.empty((0, dim), np.float32))

    def part(self, chosen: NDArray[np.bool_]) -> SparseGrads:
        if chosen.all():
            return self
        return SparseGrads(self.ids[chosen], self.grads[chosen])


TableGrads = Mapping[str, SparseGrads]
"""By table; one that is not touched may be missing."""
Merge = Callable[
    [NDArray[np.int64], NDArray[np.float32]], tuple[NDArray[np.int64], NDArray[np.float32]]
]
"""Ids and gradients to each id once, its gradients added in the order given."""


def travelling(tables: Mapping[str, Table], *, adds: bool) -> dict[str, Table]:
    """Tables as their rows travel. Where differences are pushed (`adds`) one number more goes along: how
    often the row had been changed when it was read."""
    return {name: replace(t, dim=t.dim + 1) if adds else t for name, t in tables.items()}


def narrow(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """As 16 bits: bfloat16, rounded to the nearest. It has float32's range, so no gradient is too small."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)


def widen(numbers: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_wire(rows: NDArray[np.float32], bits: int) -> memoryview:
    """Rows as the bytes that travel."""
    return (
        (narrow(rows) if bits == 16 else np.ascontiguousarray(rows)).reshape(-1).view(np.uint8).data
    )


def from_wire(payload: memoryview | NDArray[np.uint8], dim: int, bits: int) -> NDArray[np.float32]:
    if bits == 16:
        return widen(np.frombuffer(payload, np.uint16)).reshape(-1, dim)
    return np.frombuffer(payload, np.float32).reshape(-1, dim)


def num_bytes(basket: TableGrads, tables: Mapping[str, Table], *, bits: int = 32) -> int:
    return sum(
        8 + _padded(len(basket[name].ids), table.dim, bits) if name in basket else 8
        for name, table in tables.items()
    )


def pack_into(
    memory: memoryview, basket: TableGrads, tables: Mapping[str, Table], *, bits: int = 32
) -> int:
    """Write a basket; the number of bytes. `bits`: of a number."""
    raw = np.frombuffer(memory, np.uint8)
    at = 0
    for name, table in sorted(tables.items()):
        sparse = basket.get(name) or SparseGrads.none(table.dim)
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
    """The basket that lies there; its arrays are views. ValueError if none does."""
    raw = np.frombuffer(memory, np.uint8)
    basket, at = {}, 0
    for name, table in sorted(tables.items()):
        if len(raw) < at + 8:
            raise ValueError(f"the basket ends before {name}")
        count = int(raw[at : at + 8].view(np.int64)[0])
        at += 8
        if not 0 <= count <= (len(raw) - at) // (8 + bits // 8 * table.dim):
            raise ValueError(f"{count} rows of {name} do not fit into {len(raw) - at} bytes")
        ids = raw[at : at + 8 * count].view(np.int64)
        grads = raw[at + 8 * count : at + 8 * count + bits // 8 * count * table.dim]
        basket[name] = SparseGrads(ids, from_wire(grads, table.dim, bits))
        at += _padded(count, table.dim, bits)
    return basket


def _padded(count: int, dim: int, bits: int) -> int:
    """Bytes of so many ids and rows, up to the next multiple of 8."""
    return -(-count * (8 + bits // 8 * dim) // 8) * 8


class SharedGrads:
    """A place for one basket in shared memory."""

    def __init__(self, segment: Segment, tables: Mapping[str, Table]) -> None:
        self._segment = segment
        self._tables = tables

    @classmethod
    def create(cls, tables: Mapping[str, Table]) -> SharedGrads:
        return cls(Segment.create(RESERVED_BYTES, label="manyhands-sparse"), tables)

    @classmethod
    def attach(cls, address: str, tables: Mapping[str, Table]) -> SharedGrads:
        return cls(Segment.attach(address), tables)

    @property
    def address(self) -> str:
        return self._segment.address

    def put(self, basket: TableGrads) -> None:
        needed = num_bytes(basket, self._tables)
        if needed > self._segment.nbytes:
            raise JobError(
                f"The gradients of table rows of one part take {needed:,} bytes, and at most "
                f"{self._segment.nbytes:,} can be given. Use a smaller batch, or more workers."
            )
        pack_into(self._segment.memory, basket, self._tables)

    def get(self) -> TableGrads:
        return unpack(self._segment.memory, self._tables)


def weighted_sum(
    baskets: Sequence[TableGrads], coefficients: Sequence[float], names: Iterable[str], merge: Merge
) -> dict[str, SparseGrads]:
    """Add gradients, each times its coefficient, in their order: the same bits on every process."""
    summed = {}
    for name in names:
        parts = [
            (basket[name], np.float32(coefficient))
            for basket, coefficient in zip(baskets, coefficients, strict=True)
            if name in basket and len(basket[name].ids)
        ]
        if not parts:
            continue
        if len(parts) == 1:
            (only, coefficient) = parts[0]
            grads = only.grads if coefficient == 1.0 else only.grads * coefficient
            summed[name] = SparseGrads(only.ids, grads)
            continue
        ids = np.concatenate([sparse.ids for sparse, _ in parts])
        grads = np.concatenate([sparse.grads * factor for sparse, factor in parts])
        summed[name] = SparseGrads(*merge(ids, grads))
    return summed
