"""Private copies of the rows of frequent words, which avoid contention between workers.

A row that several cores write moves between their caches at every access, and a few hundred words make up
much of any text. So each call of a kernel works on its own copies of the rows of the most frequent words.
After a few accesses the changes of a copy are added to the shared row, and the changes of others come back:
shared += copy - before. This is counted in accesses, not in time, so that all copies stay equally close to
their rows. At the end of a call all changes are merged. (Ji et al., 2016, do the same between machines.)

Cost: two copies of each such row, a pass over them at the start of a call and one at its end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.compiled import inlined, loose
from manyhands.word2vec import simd

OUT_EVERY = 6
"""One in this many targets of a window is merged, in turn."""
IN_EVERY = 2
"""One in this many words merges its input row. A quarter as often, for both, was no faster, and the
vectors were worse: 0.62 on WordSim-353 instead of 0.70 (eight threads on two cores, 12 million words)."""


def allocate(words: int, dim: int) -> NDArray[np.float32]:
    """Allocate copies for `words` words: [inputs or outputs, current or before, word, column]."""
    width = -(-dim // simd.LANES) * simd.LANES
    memory = np.empty(4 * words * width + simd.LANES, np.float32)
    # Each row in cache lines of its own.
    start = -(memory.ctypes.data // 4) % simd.LANES
    return memory[start : start + 4 * words * width].reshape(2, 2, words, width)


@inlined
def where(matrix: NDArray[np.float32], own: NDArray[np.float32], side: int) -> Any:
    """Describe one of the two matrices: address and stride of its rows; the same of the copies, and their
    number; and the distance from a copy to the row as it was."""
    copy = simd.address_of(own) + side * own.strides[0]
    base, stride = simd.address_of(matrix), matrix.strides[0]
    return base, stride, copy, own.strides[2], own.shape[2], own.strides[1]


@inlined
def address(word: Any, rows: NDArray[np.int64], where: Any) -> Any:
    """Return the address of a word's row: of its copy, if it has one."""
    base, stride, own, own_stride, count, _ = where
    shared = base + rows[word] * stride
    copy = own + word * own_stride
    return copy if word < count else shared


@inlined
def origin(row: int, rows: NDArray[np.int64], where: Any) -> Any:
    """Return the shared row of a copy; 0 if this is not a copy."""
    base, stride, own, own_stride, count, _ = where
    offset = row - own
    if offset < 0 or offset >= count * own_stride:
        return 0
    return base + rows[offset // own_stride] * stride


@inlined
def _merge(row: int, before: int, shared: int, at: int, lanes: Any) -> None:
    moved = simd.subtract(simd.load(row + at, lanes), simd.load(before + at, lanes))
    now = simd.add(simd.load(shared + at, lanes), moved)
    simd.store(shared + at, now, lanes)
    simd.store(row + at, now, lanes)
    simd.store(before + at, now, lanes)


@loose
def merge(row: int, rows: NDArray[np.int64], where: Any, whole: int, rest: int) -> None:
    """If a row is a copy, add its changes to the shared row, and take over the changes of others."""
    shared = origin(row, rows, where)
    if shared:
        before = row + where[5]
        for at in range(0, whole, simd.BYTES):
            _merge(row, before, shared, at, None)
        if rest:
            _merge(row, before, shared, whole, rest)


@inlined
def prefetch(row: int, rows: NDArray[np.int64], where: Any, lines: int) -> None:
    """If a row is a copy that is merged next, prefetch its shared row."""
    shared = origin(row, rows, where)
    if shared:
        for line in range(lines):
            simd.prefetch(shared + line * 64)


@inlined
def _load(row: int, before: int, shared: int, at: int, lanes: Any) -> None:
    now = simd.load(shared + at, lanes)
    simd.store(row + at, now, lanes)
    simd.store(before + at, now, lanes)


@loose
def load_all(rows: NDArray[np.int64], where: Any, whole: int, rest: int) -> None:
    """Make all copies."""
    base, stride, own, own_stride, count, back = where
    for word in range(count):
        shared, row = base + rows[word] * stride, own + word * own_stride
        for at in range(0, whole, simd.BYTES):
            _load(row, row + back, shared, at, None)
        if rest:
            _load(row, row + back, shared, whole, rest)


@loose
def merge_all(rows: NDArray[np.int64], where: Any, whole: int, rest: int) -> None:
    """Merge all copies."""
    for word in range(where[4]):
        merge(where[2] + word * where[3], rows, where, whole, rest)
