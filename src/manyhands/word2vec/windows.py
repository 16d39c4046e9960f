"""One window of word2vec, with its rows in vector registers.

Rows are given by their addresses, and a rate of 0 disables a target. Skip-gram: for each pair of contexts
and each six targets, 12 dot products are summed in registers, and 12 sigmoids are computed at once. Then,
for each 16 columns, six targets stay in registers while all contexts are updated, each by the old values of
the other. With more than six targets, the next six see contexts that were already updated by the first six.
CBOW: the same for one vector, the mean of the contexts.

Cost: three multiply-adds per column of each pair of rows, and a load and a store of each row, except for the
contexts, which are loaded again for every six targets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.compiled import inlined, loose
from manyhands.word2vec import simd

TILE = 6
"""Targets in registers at once: a centre and the usual five drawn words."""
MEAN_TILE = 8
"""The same for CBOW, with one vector instead of two."""

Addresses = NDArray[np.int64]
"""Of rows."""


@inlined
def _sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) by Lambert's fraction for tanh(x / 2), to 2e-4; beyond 9.6 as at 9.6."""
    z = simd.multiply(simd.clip(x, np.float32(9.6)), simd.splat(np.float32(0.5)))
    s = simd.multiply(z, z)
    above = simd.add(s, simd.splat(np.float32(378.0)))
    above = simd.fma(above, s, simd.splat(np.float32(17325.0)))
    above = simd.fma(above, s, simd.splat(np.float32(135135.0)))
    below = simd.fma(s, simd.splat(np.float32(28.0)), simd.splat(np.float32(3150.0)))
    below = simd.fma(below, s, simd.splat(np.float32(62370.0)))
    below = simd.fma(below, s, simd.splat(np.float32(135135.0)))
    half = simd.splat(np.float32(0.5))
    return simd.fma(simd.divide(simd.multiply(above, z), below), half, half)


@inlined
def _errors(dots: Any, labels: int, rates: int) -> Any:
    """(label - sigmoid(dot)) * rate in all lanes."""
    minus = simd.splat(np.float32(-1.0))
    return simd.multiply(
        simd.fma(_sigmoid(dots), minus, simd.load(labels, None)), simd.load(rates, None)
    )


@inlined
def _six(rows: NDArray[np.int64], k: int) -> Any:
    return rows[k], rows[k + 1], rows[k + 2], rows[k + 3], rows[k + 4], rows[k + 5]


@inlined
def _pair_step(x: int, y: int, at: int, lanes: Any, six: Any, totals: Any) -> Any:
    """Multiply 16 columns (or the last few) of two contexts with six targets, and add them to 12 totals."""
    a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5 = totals
    u, v = simd.load(x + at, lanes), simd.load(y + at, lanes)
    t = simd.load(six[0] + at, lanes)
    a0, b0 = simd.fma(u, t, a0), simd.fma(v, t, b0)
    t = simd.load(six[1] + at, lanes)
    a1, b1 = simd.fma(u, t, a1), simd.fma(v, t, b1)
    t = simd.load(six[2] + at, lanes)
    a2, b2 = simd.fma(u, t, a2), simd.fma(v, t, b2)
    t = simd.load(six[3] + at, lanes)
    a3, b3 = simd.fma(u, t, a3), simd.fma(v, t, b3)
    t = simd.load(six[4] + at, lanes)
    a4, b4 = simd.fma(u, t, a4), simd.fma(v, t, b4)
    t = simd.load(six[5] + at, lanes)
    a5, b5 = simd.fma(u, t, a5), simd.fma(v, t, b5)
    return a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5


@inlined
def _pair_dots(x: int, y: int, six: Any, whole: int, rest: int) -> Any:
    """Return the dot products of two contexts with six targets: lanes 0 to 5 and 6 to 11."""
    z = simd.splat(np.float32(0.0))
    totals = (z, z, z, z, z, z, z, z, z, z, z, z)
    for at in range(0, whole, simd.BYTES):
        totals = _pair_step(x, y, at, None, six, totals)
    if rest:
        totals = _pair_step(x, y, whole, rest, six, totals)
    return simd.sums(totals)


@inlined
def _learn_step(
    contexts: Any, count: int, six: Any, errors: int, hop: int, at: int, lanes: Any
) -> None:
    """Update 16 columns of six targets and of all contexts, each by the old values of the other."""
    t0, t1 = simd.load(six[0] + at, lanes), simd.load(six[1] + at, lanes)
    t2, t3 = simd.load(six[2] + at, lanes), simd.load(six[3] + at, lanes)
    t4, t5 = simd.load(six[4] + at, lanes), simd.load(six[5] + at, lanes)
    n0, n1, n2, n3, n4, n5 = t0, t1, t2, t3, t4, t5
    for c in range(count):
        row = contexts[c] + at
        # Errors are stored by pairs of contexts: 16 floats, of which six belong to this one.
        own = errors + (c >> 1) * hop + (c & 1) * (4 * TILE)
        x = simd.load(row, lanes)
        e = simd.splat_at(own)
        n0, moved = simd.fma(e, x, n0), simd.fma(e, t0, x)
        e = simd.splat_at(own + 4)
        n1, moved = simd.fma(e, x, n1), simd.fma(e, t1, moved)
        e = simd.splat_at(own + 8)
        n2, moved = simd.fma(e, x, n2), simd.fma(e, t2, moved)
        e = simd.splat_at(own + 12)
        n3, other = simd.fma(e, x, n3), simd.multiply(e, t3)
        e = simd.splat_at(own + 16)
        n4, other = simd.fma(e, x, n4), simd.fma(e, t4, other)
        e = simd.splat_at(own + 20)
        n5, other = simd.fma(e, x, n5), simd.fma(e, t5, other)
        simd.store(row, simd.add(moved, other), lanes)
    simd.store(six[0] + at, n0, lanes)
    simd.store(six[1] + at, n1, lanes)
    simd.store(six[2] + at, n2, lanes)
    simd.store(six[3] + at, n3, lanes)
    simd.store(six[4] + at, n4, lanes)
    simd.store(six[5] + at, n5, lanes)


@loose
def window_of_pairs(
    contexts: Addresses, count: int, targets: Addresses, buffers: Any, whole: int, rest: int
) -> None:
    """Train on one window of skip-gram. An odd number of contexts is padded with a blank row.

    `buffers`: the addresses of labels, rates and errors, with 16 floats for each six targets: those of one
    context, then those of the next.
    """
    labels, rates, errors = buffers[:3]
    tiles = len(targets) // TILE
    hop = tiles * simd.BYTES
    for tile in range(tiles):
        shift, six = tile * simd.BYTES, _six(targets, tile * TILE)
        for pair in range((count + 1) >> 1):
            dots = _pair_dots(contexts[2 * pair], contexts[2 * pair + 1], six, whole, rest)
            found = _errors(dots, labels + shift, rates + shift)
            simd.store(errors + pair * hop + shift, found, None)
    for tile in range(tiles):
        shift, six = tile * simd.BYTES, _six(targets, tile * TILE)
        for at in range(0, whole, simd.BYTES):
            _learn_step(contexts, count, six, errors + shift, hop, at, None)
        if rest:
            _learn_step(contexts, count, six, errors + shift, hop, whole, rest)


@inlined
def cost(error: float, rate: float) -> float:
    """Return the loss of an error times rate: -log(1 - error)."""
    return -np.log(max(1.0 - abs(error) / rate, 1e-5))


@inlined
def _mean_step(
    contexts: Addresses, size: int, share: Any, hidden: int, at: int, lanes: Any
) -> None:
    """Store 16 columns of the mean of the contexts."""
    total = simd.load(contexts[0] + at, lanes)
    for c in range(1, size):
        total = simd.add(total, simd.load(contexts[c] + at, lanes))
    simd.store(hidden + at, simd.multiply(total, share), None)


@loose
def _mean(contexts: Addresses, size: int, hidden: int, whole: int, rest: int) -> None:
    share = simd.splat(np.float32(1.0 / size))
    for at in range(0, whole, simd.BYTES):
        _mean_step(contexts, size, share, hidden, at, None)
    if rest:
        _mean_step(contexts, size, share, hidden, whole, rest)


@inlined
def _row_step(x: int, at: int, lanes: Any, rows: NDArray[np.int64], k: int, totals: Any) -> Any:
    """Multiply 16 columns (or the last few) of one vector with eight targets."""
    a0, a1, a2, a3, a4, a5, a6, a7 = totals
    u = simd.load(x + at, lanes)
    a0 = simd.fma(u, simd.load(rows[k] + at, lanes), a0)
    a1 = simd.fma(u, simd.load(rows[k + 1] + at, lanes), a1)
    a2 = simd.fma(u, simd.load(rows[k + 2] + at, lanes), a2)
    a3 = simd.fma(u, simd.load(rows[k + 3] + at, lanes), a3)
    a4 = simd.fma(u, simd.load(rows[k + 4] + at, lanes), a4)
    a5 = simd.fma(u, simd.load(rows[k + 5] + at, lanes), a5)
    a6 = simd.fma(u, simd.load(rows[k + 6] + at, lanes), a6)
    a7 = simd.fma(u, simd.load(rows[k + 7] + at, lanes), a7)
    return a0, a1, a2, a3, a4, a5, a6, a7


@inlined
def _row_learn(
    hidden: int, back: int, at: int, lanes: Any, rows: Any, count: int, errors: int
) -> None:
    """Update 16 columns of the targets; the update of the contexts goes to `back`."""
    x = simd.load(hidden + at, lanes)
    even = odd = simd.splat(np.float32(0.0))
    for k in range(0, count, 2):
        e = simd.splat_at(errors + 4 * k)
        t = simd.load(rows[k] + at, lanes)
        even = simd.fma(e, t, even)
        simd.store(rows[k] + at, simd.fma(e, x, t), lanes)
        e = simd.splat_at(errors + 4 * k + 4)
        t = simd.load(rows[k + 1] + at, lanes)
        odd = simd.fma(e, t, odd)
        simd.store(rows[k + 1] + at, simd.fma(e, x, t), lanes)
    simd.store(back + at, simd.add(even, odd), None)


@inlined
def _add_step(row: int, moved: int, at: int, lanes: Any) -> None:
    now = simd.add(simd.load(row + at, lanes), simd.load(moved + at, lanes))
    simd.store(row + at, now, lanes)


@loose
def window_of_mean(
    contexts: Addresses, size: int, targets: Addresses, buffers: Any, whole: int, rest: int
) -> None:
    """Train on one window of CBOW.

    `buffers`: the addresses of labels, rates and errors, one float per target, and of two rows.
    """
    labels, rates, errors, hidden, back = buffers
    _mean(contexts, size, hidden, whole, rest)
    z = simd.splat(np.float32(0.0))
    for k in range(0, len(targets), MEAN_TILE):
        totals = (z, z, z, z, z, z, z, z)
        for at in range(0, whole, simd.BYTES):
            totals = _row_step(hidden, at, None, targets, k, totals)
        if rest:
            totals = _row_step(hidden, whole, rest, targets, k, totals)
        found = _errors(simd.sums(totals), labels + 4 * k, rates + 4 * k)
        # The next tile overwrites the lanes beyond this one.
        simd.store(errors + 4 * k, found, None)
    for at in range(0, whole, simd.BYTES):
        _row_learn(hidden, back, at, None, targets, len(targets), errors)
    if rest:
        _row_learn(hidden, back, whole, rest, targets, len(targets), errors)
    for c in range(size):
        for at in range(0, whole, simd.BYTES):
            _add_step(contexts[c], back, at, None)
        if rest:
            _add_step(contexts[c], back, whole, rest)
