"""Rows of a table on their way: to a file, to another server, to a process of another size."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Chunk:
    """Some rows of a table with all that belongs to them, by ascending id: equal tables, equal chunks."""

    ids: Ids
    rows: Floats
    """[n, dim]"""
    state: Floats
    """What the optimizer remembers, [n, m]: m is dim for each of its slots, and 1 for its scalar."""
    counts: Ids
    """How often each was seen."""
    last_used: Ids
    """The step at which each was last touched."""
    waiting_ids: Ids
    """Ids that were seen and have no row yet (admit_after), ascending."""
    waiting_counts: Ids
    shared: Floats
    """The row that new ids share when the table is full, and its optimizer's: [1, dim + m], or [0, ...]."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, one.name).nbytes for one in fields(self))
