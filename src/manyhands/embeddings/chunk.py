"""Rows of a table on their way: to a file, to another server, to a process of another size."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.spec import Table

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class RowWeights:
    """The rows of a table without its optimizer's numbers: what a state dict has of it."""

    ids: Ids
    """Ascending."""
    rows: Floats
    """[n, dim]"""
    shared: Floats
    """The row that new ids share when the table is full: [1, dim], or [0, dim]."""
    salt: int
    """What the initial row of an id is made from, besides the id. 64 bits."""


@dataclass(frozen=True)
class RowChunk:
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

    def without_optimizer(self, salt: int) -> RowWeights:
        dim = self.rows.shape[1]
        return RowWeights(self.ids, self.rows, self.shared[:, :dim], salt)


def fitted(chunk: RowChunk, spec: Table) -> RowChunk:
    """The chunk for a table with another optimizer: what that remembers begins anew."""
    fresh = untrained(chunk.without_optimizer(0), spec, now=0)
    if fresh.state.shape == chunk.state.shape:
        return chunk
    return replace(chunk, state=fresh.state, shared=fresh.shared)


def untrained(weights: RowWeights, spec: Table, *, now: int) -> RowChunk:
    """Rows whose optimizer remembers nothing yet. They count as admitted, and as used now."""
    optimizer = spec.row_optimizer
    width = spec.dim * optimizer.slots + optimizer.scalar
    count, none = len(weights.ids), np.empty(0, np.int64)
    least = max(spec.admit_after, spec.evict_below or 1)

    def state(num_rows: int) -> Floats:
        return np.full((num_rows, width), optimizer.first, np.float32)

    return RowChunk(
        ids=weights.ids,
        rows=weights.rows,
        state=state(count),
        counts=np.full(count, least, np.int64),
        last_used=np.full(count, now, np.int64),
        waiting_ids=none,
        waiting_counts=none,
        shared=np.concatenate([weights.shared, state(len(weights.shared))], axis=1),
    )
