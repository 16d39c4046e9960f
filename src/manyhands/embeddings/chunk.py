"""Copies of rows: for a file, another server, or another table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.spec import Table

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class RowWeights:
    """The rows of a table without the state of its optimizer, as in a state dict."""

    ids: Ids
    """Ascending."""
    rows: Floats
    """[n, dim]"""
    shared: Floats
    """The row that new ids share when the table is full: [1, dim], or [0, dim]."""
    salt: int
    """Salt of initial rows, which are made from it and the id. 64 bits."""

    @classmethod
    def none(cls, dim: int, salt: int) -> RowWeights:
        no_rows = np.empty((0, dim), np.float32)
        return cls(np.empty(0, np.int64), no_rows, no_rows, salt)


@dataclass(frozen=True)
class RowChunk:
    """Rows of a table with their state and counts, by ascending id. Equal tables give equal chunks."""

    ids: Ids
    rows: Floats
    """[n, dim]"""
    state: Floats
    """State of the optimizer, [n, m]: m is dim for each of its slots, plus 1 for its scalar."""
    counts: Ids
    """Number of lookups of each id."""
    last_used: Ids
    """The step at which each was last used."""
    waiting_ids: Ids
    """Ids that were looked up and have no row yet (admit_after), ascending."""
    waiting_counts: Ids
    shared: Floats
    """The row that new ids share when the table is full, and its state: [1, dim + m], or [0, ...]."""

    def without_optimizer(self, salt: int) -> RowWeights:
        dim = self.rows.shape[1]
        return RowWeights(self.ids, self.rows, self.shared[:, :dim], salt)


def fitted(chunk: RowChunk, spec: Table) -> RowChunk:
    """Fit a chunk to a table with another optimizer, whose state is initialized."""
    fresh = untrained(chunk.without_optimizer(0), spec, now=0)
    if fresh.state.shape == chunk.state.shape:
        return chunk
    return replace(chunk, state=fresh.state, shared=fresh.shared)


def untrained(weights: RowWeights, spec: Table, *, now: int) -> RowChunk:
    """Make a chunk with initial optimizer state. Its rows count as admitted, and as used now."""
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
