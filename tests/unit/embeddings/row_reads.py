"""Reads rows of a table for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from manyhands.embeddings import kernels
from manyhands.embeddings.chunk import Floats
from manyhands.embeddings.store import TableStore


def read(store: TableStore, ids: ArrayLike) -> Floats:
    """Return the row of each id; its initial row if it has none."""
    numbers = np.asarray(ids, dtype=np.int64)
    out = np.empty((numbers.size, store.spec.dim), dtype=np.float32)
    return store.gather(store.find(numbers, create=False), out, numbers)


def initial(store: TableStore, ids: ArrayLike) -> Floats:
    """Return the initial row of each id."""
    numbers = np.asarray(ids, dtype=np.int64)
    out = np.empty((numbers.size, store.spec.dim), dtype=np.float32)
    for row, number in zip(out, numbers, strict=True):
        kernels.make_row(row, number, store.init)
    return out
