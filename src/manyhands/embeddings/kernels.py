"""What is done to rows: make, gather, update, merge. Compiled, one core each, without the GIL.

A kernel gets the table's arrays themselves: records [capacity, width] (row, then its optimizer's
numbers), scalars [capacity] (one number more for a row, where the optimizer has one) and marks (four
uint32 a slot, of which [2] is how often the id was seen and [3] the step of its last use).

Initial rows use integers and a single rounding a number, so that all machines make the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from manyhands.embeddings.atomics import prefetch
from manyhands.embeddings.compiled import exact, fast
from manyhands.embeddings.shards import FIRST, SECOND, STEP
from manyhands.embeddings.spec import Table

ZEROS, UNIFORM, NORMAL = range(3)
AHEAD = 16
"""Rows between asking for one and using it."""
LINE = 16
"""float32 numbers in a cache line."""

_STEP, _FIRST, _SECOND = np.uint64(STEP), np.uint64(FIRST), np.uint64(SECOND)
_30, _27, _31, _16, _32, _40, _48 = (np.uint64(n) for n in (30, 27, 31, 16, 32, 40, 48))
_LOW16 = np.uint64(0xFFFF)


class RowInit(NamedTuple):
    """What a new row is made of."""

    dim: int
    salt: np.uint64
    kind: int
    """ZEROS, UNIFORM or NORMAL."""
    scale: float
    state: np.float32
    """What its optimizer's numbers begin with."""
    scalar: np.float32


def birth_of(spec: Table, salt: np.uint64) -> RowInit:
    kind, scale = spec.initial_scale()
    kinds = {"zeros": ZEROS, "uniform": UNIFORM, "normal": NORMAL}
    optimizer = spec.row_optimizer
    first = np.float32(optimizer.first)
    return RowInit(spec.dim, salt, kinds[kind], scale, state=first, scalar=first)


@exact
def mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


@exact
def hash_id(number):  # type: ignore[no-untyped-def]
    """As shards.hash_ids."""
    return mix(np.uint64(number) + _STEP)


@exact
def make_row(out, number, birth):  # type: ignore[no-untyped-def]
    """out[:dim] = the initial row of an id. A normal number is a sum of twelve uniform ones."""
    key = mix(hash_id(number) ^ birth.salt)
    if birth.kind == UNIFORM:
        unit = np.float32(birth.scale / 8388608.0)
        for j in range(birth.dim):
            x = mix(key + np.uint64(j + 1) * _STEP)
            out[j] = np.float32(np.int64(x >> _40) - np.int64(8388608)) * unit
    elif birth.kind == NORMAL:
        unit = np.float32(birth.scale / 65536.0)
        for j in range(birth.dim):
            total = np.int64(-393210)
            for k in range(3):
                x = mix(key + np.uint64(3 * j + k + 1) * _STEP)
                low = (x & _LOW16) + ((x >> _16) & _LOW16)
                total += np.int64(low + ((x >> _32) & _LOW16) + (x >> _48))
            out[j] = np.float32(total) * unit
    else:
        out[: birth.dim] = np.float32(0.0)


@exact
def make_record(records, scalars, slot, number, birth):  # type: ignore[no-untyped-def]
    """A slot as it is before its first update."""
    record = records[slot]
    make_row(record, number, birth)
    record[birth.dim :] = birth.state
    if scalars.size:
        scalars[slot] = birth.scalar


@exact
def make_rows(out, ids, birth):  # type: ignore[no-untyped-def]
    for i in range(ids.size):
        make_row(out[i], ids[i], birth)


@fast
def _ask(flat, width, slots, i, numbers):  # type: ignore[no-untyped-def]
    """Have the first numbers of a record to come fetched."""
    if i < slots.size and slots[i] >= 0:
        for j in range(0, numbers, LINE):
            prefetch(flat, slots[i] * width + j)


@exact
def gather(records, flat, slots, ids, out, birth):  # type: ignore[no-untyped-def]
    width = records.shape[1]
    for i in range(min(AHEAD, slots.size)):
        _ask(flat, width, slots, i, birth.dim)
    for i in range(slots.size):
        _ask(flat, width, slots, i + AHEAD, birth.dim)
        if slots[i] < 0:
            make_row(out[i], ids[i], birth)
        else:
            source, target = records[slots[i]], out[i]
            for j in range(birth.dim):
                target[j] = source[j]


@fast
def _touch(marks, slot, now):  # type: ignore[no-untyped-def]
    if marks[4 * slot + 3] < now:
        marks[4 * slot + 3] = now


@fast
def update_sgd(records, flat, dim, marks, slots, grads, lr, keep, now):  # type: ignore[no-untyped-def]
    for i in range(slots.size):
        _ask(flat, records.shape[1], slots, i + AHEAD, dim)
        if slots[i] < 0:
            continue
        row, grad = records[slots[i]], grads[i]
        for j in range(dim):
            row[j] = keep * row[j] - lr * grad[j]
        _touch(marks, slots[i], now)


@fast
def move(records, flat, dim, marks, slots, given, turns, modulo, now):  # type: ignore[no-untyped-def]
    """Add what a worker has made of rows, and how often each had been changed when it was read: as much
    less as others have changed it since."""
    for i in range(slots.size):
        slot = slots[i]
        _ask(flat, records.shape[1], slots, i + AHEAD, dim)
        if slot < 0:
            continue
        row, difference = records[slot], given[i]
        behind = (turns[slot] - difference[dim]) % modulo
        part = np.float32(1.0) / (np.float32(1.0) + behind)
        for j in range(dim):
            row[j] += part * difference[j]
        turns[slot] = (turns[slot] + np.float32(1.0)) % modulo
        _touch(marks, slot, now)


@exact
def changes(ids, before, after, out_ids, out):  # type: ignore[no-untyped-def]
    """Of rows that were changed the ids and the differences, and what else `before` has of them; how many."""
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
        _ask(flat, records.shape[1], slots, i + AHEAD, 2 * dim)
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
        _ask(flat, records.shape[1], slots, i + AHEAD, 2 * dim)
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
        _ask(flat, records.shape[1], slots, i + AHEAD, dim)
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
    """scalars: the row's number of updates. known[t]: the two corrections of bias at its t-th."""
    first, second = np.float32(betas[0]), np.float32(betas[1])
    first_new, second_new = np.float32(1.0 - betas[0]), np.float32(1.0 - betas[1])
    for i in range(slots.size):
        _ask(flat, records.shape[1], slots, i + AHEAD, 3 * dim)
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
    """[t] = 1 / (1 - beta1**t), 1 / sqrt(1 - beta2**t): a power a row and update would cost more."""
    times = np.arange(4096, dtype=np.float64)
    times[0] = 1.0  # no row has its 0th update
    return np.stack(
        [1.0 / (1.0 - betas[0] ** times), 1.0 / np.sqrt(1.0 - betas[1] ** times)], axis=1
    ).astype(np.float32)


@exact
def unique(ids, fresh, inverse):  # type: ignore[no-untyped-def]
    """fresh = each id once, in the order of first sight; ids[i] is fresh[inverse[i]]. How many."""
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
    """sums[inverse[i]] += grads[i], in order; the first of each is copied, not added to zero."""
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
