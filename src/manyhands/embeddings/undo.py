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
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.memory import ReservedMemory
from manyhands.errors import JobError
from manyhands.transport.shm import Segment

if TYPE_CHECKING:
    from manyhands.embeddings.store import TableStore

_HEADER = 64


class UndoLog(ReservedMemory):
    label = "manyhands-undo"

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self._raw = np.frombuffer(segment.memory, np.uint8)
        self._numbers = self._raw[:_HEADER].view(np.int64)

    @property
    def begun(self) -> int:
        return int(self._numbers[0])

    @property
    def done(self) -> int:
        return int(self._numbers[1])

    def reset(self, version: int) -> None:
        """Empty the log, since all rows have this version."""
        self._numbers[:3] = version, version, 0

    def begin(
        self, version: int, rows: Mapping[str, NDArray[np.int64]], stores: Mapping[str, TableStore]
    ) -> None:
        """Save rows (table to slots) before they are changed."""
        at = _HEADER
        for name, slots in sorted(rows.items()):
            arrays = stores[name].arrays
            self._count_at(at)[0] = len(slots)
            kept, records, scalars, at = self._rows_at(at, name, arrays)
            kept[:] = slots
            np.take(arrays.records, slots, axis=0, out=records)
            if len(arrays.scalars):
                np.take(arrays.scalars, slots, out=scalars)
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
            slots, records, scalars, at = self._rows_at(at, name, arrays)
            arrays.records[slots] = records
            if len(arrays.scalars):
                arrays.scalars[slots] = scalars
        before = self.begun - 1
        self._numbers[:3] = before, before, 0

    def _count_at(self, at: int) -> NDArray[np.int64]:
        """Return the number of rows of the table whose part of the log begins here."""
        return self._raw[at : at + 8].view(np.int64)

    def _rows_at(self, at: int, name: str, arrays: Any) -> tuple[Any, Any, Any, int]:
        """Return the memory of their slots, records and scalars, and where the next table begins."""
        count, width = int(self._count_at(at)[0]), arrays.records.shape[1]
        sizes = (8 * count, 4 * count * width, 4 * count if len(arrays.scalars) else 0)
        slots, records, scalars, end = accumulate(sizes, initial=at + 8)
        if end + 16 > len(self._raw):  # with space for the next count
            raise JobError(
                f"One step changes {count:,} rows of {name}, more than the undo log can hold. Use a smaller "
                "batch."
            )
        return (
            self._raw[slots:records].view(np.int64),
            self._raw[records:scalars].view(np.float32).reshape(-1, width),
            self._raw[scalars:end].view(np.float32),
            -(-end // 8) * 8,
        )
