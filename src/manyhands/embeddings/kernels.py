"""Kernels on rows: make, gather, update, merge. Compiled, single-threaded, without the GIL.

Kernels take the arrays of a table: records [capacity, width] (the row, then the state of its optimizer),
scalars [capacity] (one more number per row, if the optimizer has one) and marks (four uint32 per slot:
[2] is the lookup count of the id, [3] the step of its last use).

Initial rows are computed with integers and a single rounding per number, so all machines make the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from manyhands.embeddings.atomics import prefetch
from manyhands.embeddings.compiled import exact, fast
from manyhands.embeddings.shards import FIRST, SECOND, STEP
from manyhands.embeddings.spec import INITS, Table

UNIFORM, NORMAL, ZEROS = range(3)
"""In the order of INITS."""
AHEAD = 16
"""Prefetch distance in rows."""
LINE = 16
"""float32 numbers in a cache line."""

_STEP, _FIRST, _SECOND = np.uint64(STEP), np.uint64(FIRST), np.uint64(SECOND)
_30, _27, _31, _16, _32, _40, _48 = (np.uint64(n) for n in (30, 27, 31, 16, 32, 40, 48))
_LOW16 = np.uint64(0xFFFF)


class RowInit(NamedTuple):
    """Parameters of a new row's initialization."""

    dim: int
    salt: np.uint64
    kind: int
    """ZEROS, UNIFORM or NORMAL."""
    scale: float
    state: np.float32
    """Initial value of all state numbers of the optimizer."""


def row_init(spec: Table, salt: np.uint64) -> RowInit:
    kind, scale = spec.initial_scale()
    first = np.float32(spec.row_optimizer.first)
    return RowInit(spec.dim, salt, INITS.index(kind), scale, first)


@exact
def mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


@exact
def hash_id(number):  # type: ignore[no-untyped-def]
    """Like shards.hash_ids."""
    return mix(np.uint64(number) + _STEP)


@exact
def make_row(out, number, init):  # type: ignore[no-untyped-def]
    """Write the initial row of an id to out[:dim]. A normal number is the sum of twelve uniform ones."""
    key = mix(hash_id(number) ^ init.salt)
    if init.kind == UNIFORM:
        unit = np.float32(init.scale / 8388608.0)
        for j in range(init.dim):
            x = mix(key + np.uint64(j + 1) * _STEP)
            out[j] = np.float32(np.int64(x >> _40) - np.int64(8388608)) * unit
    elif init.kind == NORMAL:
        unit = np.float32(init.scale / 65536.0)
        for j in range(init.dim):
            total = np.int64(-393210)
            for k in range(3):
                x = mix(key + np.uint64(3 * j + k + 1) * _STEP)
                low = (x & _LOW16) + ((x >> _16) & _LOW16)
                total += np.int64(low + ((x >> _32) & _LOW16) + (x >> _48))
            out[j] = np.float32(total) * unit
    else:
        out[: init.dim] = np.float32(0.0)


@exact
def make_record(records, scalars, slot, number, init):  # type: ignore[no-untyped-def]
    """Write a slot as it is before its first update."""
    record = records[slot]
    make_row(record, number, init)
    record[init.dim :] = init.state
    if scalars.size:
        scalars[slot] = init.state


@fast
def _prefetch_row(flat, width, slots, i, numbers):  # type: ignore[no-untyped-def]
    """Prefetch the first numbers of a later record."""
    if i < slots.size and slots[i] >= 0:
        for j in range(0, numbers, LINE):
            prefetch(flat, slots[i] * width + j)


@exact
def gather(records, flat, slots, ids, out, init):  # type: ignore[no-untyped-def]
    width = records.shape[1]
    for i in range(min(AHEAD, slots.size)):
        _prefetch_row(flat, width, slots, i, init.dim)
    for i in range(slots.size):
        _prefetch_row(flat, width, slots, i + AHEAD, init.dim)
        if slots[i] < 0:
            make_row(out[i], ids[i], init)
        else:
            source, target = records[slots[i]], out[i]
            for j in range(init.dim):
                target[j] = source[j]


@fast
def _touch(marks, slot, now):  # type: ignore[no-untyped-def]
    if marks[4 * slot + 3] < now:
        marks[4 * slot + 3] = now


@fast
def update_sgd(records, flat, dim, marks, slots, grads, lr, keep, now):  # type: ignore[no-untyped-def]
    for i in range(slots.size):
        _prefetch_row(flat, records.shape[1], slots, i + AHEAD, dim)
        if slots[i] < 0:
            continue
        row, grad = records[slots[i]], grads[i]
        for j in range(dim):
            row[j] = keep * row[j] - lr * grad[j]
        _touch(marks, slots[i], now)


@fast
def add_differences(records, flat, dim, marks, slots, given, versions, modulo, now):  # type: ignore[no-untyped-def]
    """Add the differences that a worker made to rows. The last column of `given` is the version of the row
    when it was read; the more updates it has had since, the less is added."""
    for i in range(slots.size):
        slot = slots[i]
        _prefetch_row(flat, records.shape[1], slots, i + AHEAD, dim)
        if slot < 0:
            continue
        row, difference = records[slot], given[i]
        behind = (versions[slot] - difference[dim]) % modulo
        part = np.float32(1.0) / (np.float32(1.0) + behind)
        for j in range(dim):
            row[j] += part * difference[j]
        versions[slot] = (versions[slot] + np.float32(1.0)) % modulo
        _touch(marks, slot, now)


@exact
def changes(ids, before, after, out_ids, out):  # type: ignore[no-untyped-def]
    """Write ids and differences of changed rows, with the further columns of `before`. Returns how many."""
    dim, found = after.shape[1], 0
    for i in range(ids.size):
        old, new, target = before[i], after[i], out[found]
        changed = False
        for j in range(dim):
            difference = new[j] - old[j]
            target[j] = difference
            changed |= difference != np.float32(0.0)
        if changed:
            target[dim:] = old[dim:]
            out_ids[found] = ids[i]
            found += 1
    return found


@fast
def update_momentum(records, flat, dim, marks, slots, grads, lr, keep, now, beta):  # type: ignore[no-untyped-def]
    for i in range(slots.size):
        _prefetch_row(flat, records.shape[1], slots, i + AHEAD, 2 * dim)
        if slots[i] < 0:
            continue
        row, speed, grad = records[slots[i], :dim], records[slots[i], dim:], grads[i]
        for j in range(dim):
            speed[j] = beta * speed[j] + grad[j]
            row[j] = keep * row[j] - lr * speed[j]
        _touch(marks, slots[i], now)


@fast
def update_adagrad(records, flat, dim, marks, slots, grads, lr, keep, now, eps):  # type: ignore[no-untyped-def]
    for i in range(slots.size):
        _prefetch_row(flat, records.shape[1], slots, i + AHEAD, 2 * dim)
        if slots[i] < 0:
            continue
        row, square, grad = records[slots[i], :dim], records[slots[i], dim:], grads[i]
        for j in range(dim):
            square[j] += grad[j] * grad[j]
            row[j] = keep * row[j] - lr * grad[j] / (np.sqrt(square[j]) + eps)
        _touch(marks, slots[i], now)


@fast
def update_rowwise(records, flat, dim, marks, slots, grads, lr, keep, now, eps, scalars):  # type: ignore[no-untyped-def]
    for i in range(slots.size):
        _prefetch_row(flat, records.shape[1], slots, i + AHEAD, dim)
        if slots[i] < 0:
            continue
        row, grad = records[slots[i]], grads[i]
        total = np.float32(0.0)
        for j in range(dim):
            total += grad[j] * grad[j]
        scalars[slots[i]] += total / np.float32(dim)
        rate = lr / (np.sqrt(scalars[slots[i]]) + eps)
        for j in range(dim):
            row[j] = keep * row[j] - rate * grad[j]
        _touch(marks, slots[i], now)


@fast
def update_adam(  # type: ignore[no-untyped-def]
    records, flat, dim, marks, slots, grads, lr, keep, now, eps, scalars, betas, known
):
    """scalars: number of updates of each row. known[t]: the two bias corrections of update t."""
    first, second = np.float32(betas[0]), np.float32(betas[1])
    first_new, second_new = np.float32(1.0 - betas[0]), np.float32(1.0 - betas[1])
    for i in range(slots.size):
        _prefetch_row(flat, records.shape[1], slots, i + AHEAD, 3 * dim)
        if slots[i] < 0:
            continue
        record = records[slots[i]]
        row, mean, square = record[:dim], record[dim : 2 * dim], record[2 * dim : 3 * dim]
        grad = grads[i]
        times = np.int64(scalars[slots[i]]) + 1
        scalars[slots[i]] = np.float32(times)
        if times < known.shape[0]:
            rate, root = lr * known[times, 0], known[times, 1]
        else:
            rate = lr * np.float32(1.0 / (1.0 - math.pow(betas[0], times)))
            root = np.float32(1.0 / math.sqrt(1.0 - math.pow(betas[1], times)))
        for j in range(dim):
            mean[j] = first * mean[j] + first_new * grad[j]
            square[j] = second * square[j] + second_new * grad[j] * grad[j]
            row[j] = keep * row[j] - rate * mean[j] / (np.sqrt(square[j]) * root + eps)
        _touch(marks, slots[i], now)


def adam_corrections(betas: tuple[float, float]) -> np.ndarray:
    """Return a table of 1 / (1 - beta1**t), 1 / sqrt(1 - beta2**t): cheaper than powers in each update."""
    times = np.arange(4096, dtype=np.float64)
    times[0] = 1.0  # no row has its 0th update
    return np.stack(
        [1.0 / (1.0 - betas[0] ** times), 1.0 / np.sqrt(1.0 - betas[1] ** times)], axis=1
    ).astype(np.float32)


@exact
def unique(ids, fresh, inverse):  # type: ignore[no-untyped-def]
    """Write each id once to `fresh`, in the order of first occurrence; ids[i] is fresh[inverse[i]]. Returns
    how many there are."""
    size = np.int64(16)
    while size < 2 * ids.size:
        size *= 2
    places = np.zeros(size, dtype=np.int32)
    last = np.uint64(size - 1)
    found = 0
    for i in range(ids.size):
        at = hash_id(ids[i]) & last
        while True:
            place = places[at]
            if place == 0:
                fresh[found] = ids[i]
                found += 1
                places[at] = found
                inverse[i] = found - 1
                break
            if fresh[place - 1] == ids[i]:
                inverse[i] = place - 1
                break
            at = (at + np.uint64(1)) & last
    return found


@exact
def add_rows(inverse, grads, sums, found):  # type: ignore[no-untyped-def]
    """Do sums[inverse[i]] += grads[i], in order. The first of each is copied, not added to zero."""
    begun = np.zeros(found, dtype=np.bool_)
    for i in range(inverse.size):
        total, grad = sums[inverse[i]], grads[i]
        if begun[inverse[i]]:
            for j in range(grad.size):
                total[j] += grad[j]
        else:
            begun[inverse[i]] = True
            for j in range(grad.size):
                total[j] = grad[j]
