"""Undo logs in shared memory: rows as they were before a server changed them.

A server that dies in the middle of an update leaves some of its rows changed and others not. The server that
takes over restores them and applies the update again, so each update is in the rows once. Each server has
one log. It holds the last update, in memory that outlives its writer:

    begun, done    versions; begun > done while rows are being changed
    bytes          of what follows: for each table the number of rows, their slots, their records, and the
                   scalars of the optimizer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import JobError
from manyhands.transport.shm import Segment

if TYPE_CHECKING:
    from manyhands.embeddings.store import TableStore

RESERVED_BYTES = 4 << 30
"""Size of the address range; only written pages take memory."""
_HEADER = 64


class UndoLog:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._raw = np.frombuffer(segment.memory, np.uint8)
        self._numbers = self._raw[:_HEADER].view(np.int64)

    @classmethod
    def create(cls) -> UndoLog:
        return cls(Segment.create(RESERVED_BYTES, label="manyhands-undo"))

    @classmethod
    def attach(cls, address: str) -> UndoLog:
        return cls(Segment.attach(address))

    @property
    def address(self) -> str:
        return self._segment.address

    @property
    def begun(self) -> int:
        return int(self._numbers[0])

    @property
    def done(self) -> int:
        return int(self._numbers[1])

    def reset(self, version: int) -> None:
        """Empty the log: all rows have this version."""
        self._numbers[:3] = version, version, 0

    def begin(
        self, version: int, rows: Mapping[str, NDArray[np.int64]], stores: Mapping[str, TableStore]
    ) -> None:
        """Save rows (table to slots) before they are changed."""
        at = _HEADER
        for name, slots in sorted(rows.items()):
            arrays = stores[name].arrays
            where = _Place.at(at, len(slots), arrays)
            if where.end > len(self._raw):
                raise JobError(
                    f"One step changes {len(slots):,} rows of {name}, more than the undo log can "
                    "hold. Use a smaller batch."
                )
            self._raw[at : at + 8].view(np.int64)[0] = len(slots)
            self._raw[where.slots].view(np.int64)[:] = slots
            width = arrays.records.shape[1]
            kept = self._raw[where.records].view(np.float32).reshape(-1, width)
            np.take(arrays.records, slots, axis=0, out=kept)
            if len(arrays.scalars):
                np.take(arrays.scalars, slots, out=self._raw[where.scalars].view(np.float32))
            at = where.end
        self._numbers[2] = at
        self._numbers[0] = version

    def end(self) -> None:
        self._numbers[1] = self._numbers[0]

    def restore(self, stores: Mapping[str, TableStore]) -> None:
        """Restore the rows of the last update."""
        at, stop = _HEADER, int(self._numbers[2])
        for name in sorted(stores):
            if at >= stop:
                break
            arrays = stores[name].arrays
            count = int(self._raw[at : at + 8].view(np.int64)[0])
            where = _Place.at(at, count, arrays)
            slots = self._raw[where.slots].view(np.int64)
            width = arrays.records.shape[1]
            arrays.records[slots] = self._raw[where.records].view(np.float32).reshape(-1, width)
            if len(arrays.scalars):
                arrays.scalars[slots] = self._raw[where.scalars].view(np.float32)
            at = where.end
        before = self.begun - 1
        self._numbers[:3] = before, before, 0


@dataclass(frozen=True)
class _Place:
    """Byte ranges of the rows of one table."""

    slots: slice
    records: slice
    scalars: slice
    end: int

    @classmethod
    def at(cls, start: int, count: int, arrays: Any) -> _Place:
        slots = start + 8
        records = slots + 8 * count
        scalars = records + 4 * count * arrays.records.shape[1]
        stop = scalars + (4 * count if len(arrays.scalars) else 0)
        return cls(
            slice(slots, records), slice(records, scalars), slice(scalars, stop), -(-stop // 8) * 8
        )
