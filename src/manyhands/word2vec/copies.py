"""Copies of the commonest words' rows, so that workers do not fight over them.

A row that several cores write travels between their caches at every touch, and a few hundred words make
up much of any text. So each call of a kernel works on copies of its own of the commonest words' rows.
After a few touches what was made of a copy goes to the shared row, and what others have made of that comes
back: shared += mine - as it was. That goes by touches and not by time, so that no row is further from its
copies than another. At the end of a call all has gone there. (Ji et al., 2016, have the like between
machines.)

Costs: two copies of each such row, a pass over them when a call begins and one when it ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from manyhands.word2vec import simd

OUT_EVERY = 6
"""One target of a window in so many is merged, each in its turn."""
IN_EVERY = 2
"""One word in so many merges its row among the inputs. A quarter as often, for both, was no faster, and
vectors were worse: 0.62 on WordSim-353 instead of 0.70 (eight threads on two cores, 12 million words)."""

_fast = njit(cache=True, nogil=True, fastmath=True, error_model="numpy")
_inline = njit(cache=True, nogil=True, fastmath=True, error_model="numpy", inline="always")


def room(words: int, dim: int) -> NDArray[np.float32]:
    """For the copies of so many words: (inputs, outputs), (now, as it was), word, column."""
    width = -(-dim // simd.LANES) * simd.LANES
    memory = np.empty(4 * words * width + simd.LANES, np.float32)
    # Each row in cache lines of its own.
    start = -(memory.ctypes.data // 4) % simd.LANES
    return memory[start : start + 4 * words * width].reshape(2, 2, words, width)


@_inline
def where(matrix: NDArray[np.float32], own: NDArray[np.float32], side: int) -> Any:
    """Of one of the two matrices: the address and the stride of its rows; the same of the copies, and
    how many there are; and how far from a copy the row as it was lies."""
    mine = simd.address_of(own) + side * own.strides[0]
    base, stride = simd.address_of(matrix), matrix.strides[0]
    return base, stride, mine, own.strides[2], own.shape[2], own.strides[1]


@_inline
def address(word: Any, rows: NDArray[np.int64], where: Any) -> Any:
    """Where the row of a word is: its copy, if it has one."""
    base, stride, own, own_stride, count, _ = where
    shared = base + rows[word] * stride
    mine = own + word * own_stride
    return mine if word < count else shared


@_inline
def origin(row: int, rows: NDArray[np.int64], where: Any) -> Any:
    """The row that this one is a copy of; 0 if it is none."""
    base, stride, own, own_stride, count, _ = where
    offset = row - own
    if offset < 0 or offset >= count * own_stride:
        return 0
    return base + rows[offset // own_stride] * stride


@_inline
def _merge(row: int, was: int, shared: int, at: int, lanes: Any) -> None:
    moved = simd.subtract(simd.load(row + at, lanes), simd.load(was + at, lanes))
    now = simd.add(simd.load(shared + at, lanes), moved)
    simd.store(shared + at, now, lanes)
    simd.store(row + at, now, lanes)
    simd.store(was + at, now, lanes)


@_fast
def merge(row: int, rows: NDArray[np.int64], where: Any, whole: int, rest: int) -> None:
    """If a row is a copy: give away what was made of it, and take what others have made."""
    shared = origin(row, rows, where)
    if shared:
        was = row + where[5]
        for at in range(0, whole, simd.BYTES):
            _merge(row, was, shared, at, None)
        if rest:
            _merge(row, was, shared, whole, rest)


@_inline
def ask(row: int, rows: NDArray[np.int64], where: Any, lines: int) -> None:
    """If a row is a copy that is about to be merged: ask for what it is merged with."""
    shared = origin(row, rows, where)
    if shared:
        for line in range(lines):
            simd.prefetch(shared + line * 64)


@_fast
def take(rows: NDArray[np.int64], where: Any, whole: int, rest: int) -> None:
    """Make all copies."""
    base, stride, own, own_stride, count, back = where
    for word in range(count):
        shared, row = base + rows[word] * stride, own + word * own_stride
        for at in range(0, whole, simd.BYTES):
            now = simd.load(shared + at, None)
            simd.store(row + at, now, None)
            simd.store(row + back + at, now, None)
        if rest:
            now = simd.load(shared + whole, rest)
            simd.store(row + whole, now, rest)
            simd.store(row + back + whole, now, rest)


@_fast
def give(rows: NDArray[np.int64], where: Any, whole: int, rest: int) -> None:
    """Merge all copies."""
    for word in range(where[4]):
        merge(where[2] + word * where[3], rows, where, whole, rest)
