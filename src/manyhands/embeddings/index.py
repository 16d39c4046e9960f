"""Finds the slot of an id or gives it a new one: the levels of layout.py, without locks.

A new row is written completely before its entry is swapped (compare-and-swap from 0) into the first empty
place of its window. If two processes insert the same id, both try that place: one wins, and the other takes
the winner's slot. A process killed before the swap leaks a slot, which the next evict finds; killed after
it, it leaves a complete row. No process ever waits for another.

Ids are handled in blocks: prefetch the windows of all, look for candidates and prefetch their counters,
then compare. So the cache misses of many ids overlap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from manyhands.embeddings.atomics import add, lowest, match, prefetch, swap
from manyhands.embeddings.compiled import exact
from manyhands.embeddings.kernels import hash_id, make_record
from manyhands.embeddings.layout import (
    BASE,
    BASE_BITS,
    FREE,
    FULL,
    LEVELS,
    NEXT,
    READY,
    WAITING_LEVELS,
    WINDOW,
)

LOOK, SEE, PUT = range(3)
"""Modes: find only; count the lookup and make a row if admitted; make a row in any case, count nothing."""
DONE, NO_ROOM, NO_WAITING_ROOM = range(3)

HIDDEN = np.uint64(0xA5A5_1D3C_96E7_4B0F)
"""A waiting id is stored XOR this, because 0 is an empty place. (The id that becomes 0 is admitted at
once.)"""

_BLOCK = 64
_AHEAD = 16
_CACHED = 5
"""Levels that are not prefetched: the first ones are in the cache anyway."""
_NEXT_LEVEL = np.uint64(0xD6E8_FEB8_6659_FD93)
_SPREAD = np.uint64(BASE_BITS)
_64, _32, _1, _0 = (np.uint64(n) for n in (64, 32, 1, 0))
_LOW32 = np.uint64(0xFFFF_FFFF)
_SLOT = np.int64(0xFFFF_FFFF)


class IndexArrays(NamedTuple):
    """The arrays of a table, for kernels. All are flat except the records."""

    head: Any
    """int64 words, see layout."""
    index: Any
    """uint64 entries of the current generation: half of the hash in the upper bits, slot + 1 below; 0:
    empty."""
    levels: int
    """Number of levels of the index."""
    metas: Any
    """Two int64 per slot: the id, and the word that `marks` shows."""
    marks: Any
    """The same memory as four uint32 per slot: [2] lookup count, [3] step of the last use."""
    records: Any
    """[capacity, width] float32."""
    scalars: Any
    """[capacity] float32, or empty."""
    waiting: Any
    """uint64: ids that wait for admission."""
    counts: Any
    """uint32: how often each was looked up."""


@exact
def _window(spread, level):  # type: ignore[no-untyped-def]
    """Return where the window of a hash begins in a level. `spread`: the hash times one factor per level."""
    place = spread >> (_64 - _SPREAD - np.uint64(level))
    return np.int64(BASE) * ((np.int64(1) << level) - 1) + np.int64(place) * WINDOW


@exact
def _half(code):  # type: ignore[no-untyped-def]
    """Return the part of a hash that an entry holds. Never 0, which marks an empty entry."""
    return (code & _LOW32) | _1


@exact
def _candidate(index, code, levels):  # type: ignore[no-untyped-def]
    """Return the slot of the first entry with this half hash, or -1. It may belong to another id."""
    half = _half(code)
    spread = code
    for level in range(levels):
        spread *= _NEXT_LEVEL
        at = _window(spread, level)
        found = match(index, at, half)
        if found:
            return np.int64(index[at + lowest(found)] & _LOW32) - 1
        if index[at + WINDOW - 1] == _0:
            return np.int64(-1)
    return np.int64(-1)


@exact
def locate(index, levels, metas, code, number):  # type: ignore[no-untyped-def]
    """Return the slot of an id, or -1."""
    half = _half(code)
    spread = code
    for level in range(levels):
        spread *= _NEXT_LEVEL
        at = _window(spread, level)
        found = match(index, at, half)
        while found:
            slot = np.int64(index[at + lowest(found)] & _LOW32) - 1
            if metas[2 * slot] == number:
                return slot
            found &= found - 1
        if index[at + WINDOW - 1] == _0:
            return np.int64(-1)
    return np.int64(-1)


@exact
def enter(index, levels, metas, code, number, slot):  # type: ignore[no-untyped-def]
    """Publish a slot under its id. Returns it, or the slot that another process published, or -1 (no
    place)."""
    half = _half(code)
    fresh = (half << _32) | np.uint64(slot + 1)
    spread = code
    for level in range(levels):
        spread *= _NEXT_LEVEL
        at = _window(spread, level)
        for place in range(at, at + WINDOW):
            entry = index[place]
            if entry == _0:
                entry = swap(index, place, _0, fresh)
                if entry == _0:
                    return np.int64(slot)
            other = np.int64(entry & _LOW32) - 1
            if (entry >> _32) == half and metas[2 * other] == number:
                return other
    return np.int64(-1)


@exact
def take_slot(head, metas):  # type: ignore[no-untyped-def]
    """Allocate a slot, or return -1. The version in the free list prevents the ABA problem."""
    while True:
        free = head[FREE]
        if free & _SLOT == 0:
            break
        slot = (free & _SLOT) - 1
        after = metas[2 * slot] & _SLOT
        if swap(head, FREE, free, (((free >> 32) + 1) << 32) | after) == free:
            return slot
    while True:
        fresh = head[NEXT]
        if fresh >= head[READY]:
            return np.int64(-1)
        if swap(head, NEXT, fresh, fresh + 1) == fresh:
            return fresh


@exact
def give_slot(head, metas, marks, slot):  # type: ignore[no-untyped-def]
    marks[4 * slot + 2] = 0
    while True:
        free = head[FREE]
        metas[2 * slot] = free & _SLOT
        if swap(head, FREE, free, (((free >> 32) + 1) << 32) | (slot + 1)) == free:
            return


@exact
def give_slots(head, metas, marks, slots):  # type: ignore[no-untyped-def]
    for i in range(slots.size):
        give_slot(head, metas, marks, slots[i])


@exact
def raise_word(head, word, value):  # type: ignore[no-untyped-def]
    """Set head[word] to the larger of its value and this one."""
    while True:
        old = head[word]
        if old >= value or swap(head, word, old, value) == old:
            return


@exact
def see_waiting(head, waiting, counts, code, number, times, waits):  # type: ignore[no-untyped-def]
    """Count lookups of an id without a row. Returns the new count, or -1 if another level is needed.

    If there is no further level (`waits` is false), the id replaces another one, whose count restarts:
    frequent ids come back, ids that came once make space.
    """
    key = np.uint64(number) ^ HIDDEN
    if key == _0:
        return np.int64(1) << 40
    spread = code
    place = np.int64(0)
    for level in range(head[WAITING_LEVELS]):
        spread *= _NEXT_LEVEL
        at = _window(spread, level)
        for place in range(at, at + WINDOW):
            there = waiting[place]
            if there == _0:
                if times == 0:
                    return np.int64(0)
                there = swap(waiting, place, _0, key)
            if there in (_0, key):
                return np.int64(add(counts, place, times)) + times
    if times == 0:
        return np.int64(0)
    if waits or head[WAITING_LEVELS] == 0:
        return np.int64(-1)
    place -= np.int64(code & np.uint64(WINDOW - 1))
    there = waiting[place]
    if swap(waiting, place, there, key) == there:
        counts[place] = times
    return np.int64(times)


@exact
def put_waiting(t, ids, times, begin, waits):  # type: ignore[no-untyped-def]
    """Raise the counts of ids. Returns the index at which it stopped because another level is needed."""
    for i in range(begin, ids.size):
        code = hash_id(ids[i])
        seen = see_waiting(t.head, t.waiting, t.counts, code, ids[i], 0, waits)
        more = times[i] - seen
        if more > 0:
            seen = see_waiting(t.head, t.waiting, t.counts, code, ids[i], more, waits)
        if seen < 0:
            return i
    return ids.size


@exact
def _mark_used(marks, slot, now):  # type: ignore[no-untyped-def]
    add(marks, 4 * slot + 2, 1)
    if marks[4 * slot + 3] < now:
        marks[4 * slot + 3] = now


@exact
def _insert(t, code, number, count, now, spare, init):  # type: ignore[no-untyped-def]
    """Make a row in the spare slot and publish it. Returns the slot of the id, or -1 if the index is full."""
    t.metas[2 * spare] = number
    t.marks[4 * spare + 2] = count
    t.marks[4 * spare + 3] = now
    make_record(t.records, t.scalars, spare, number, init)
    return enter(t.index, t.levels, t.metas, code, number, spare)


@exact
def _missing(t, code, number, mode, now, admit_after, waits, spare, init):  # type: ignore[no-untyped-def]
    """Handle an id without a slot. Returns (slot, spare slot that is left, reason to stop)."""
    none = np.int64(-1)
    head = t.head
    seen = np.int64(0)
    if admit_after > 1 and mode != PUT:
        seen = see_waiting(head, t.waiting, t.counts, code, number, 0, waits)
    if mode == LOOK:
        known = head[FULL] != 0 and (admit_after <= 1 or seen >= admit_after)
        return (np.int64(0) if known else none), spare, DONE
    # Allocate first: an id that stops here is tried again, and must not be counted twice.
    if spare < 0 and (mode == PUT or seen + 1 >= admit_after):
        spare = take_slot(head, t.metas)
        if spare < 0 and head[FULL] == 0:
            return none, spare, NO_ROOM
    count = seen + 1
    if admit_after > 1 and mode == SEE:
        count = see_waiting(head, t.waiting, t.counts, code, number, 1, waits)
        if count < 0:
            return none, spare, NO_WAITING_ROOM
        if count < admit_after:
            return none, spare, DONE
    if spare < 0:  # other processes count too, so the id may be admitted sooner than expected
        spare = take_slot(head, t.metas)
        if spare < 0 and head[FULL] == 0:
            return none, spare, DONE
    slot = none
    if spare >= 0:
        # Not `count`: each process that races for it adds its own.
        first = 0 if mode == PUT else admit_after
        slot = _insert(t, code, number, first, now, spare, init)
        if slot == spare:
            return slot, none, DONE
        if slot < 0:
            head[FULL] = 1
    if mode == SEE:
        slot = max(slot, np.int64(0))
        _mark_used(t.marks, slot, now)
    return slot, spare, DONE


@exact
def find(t, ids, begin, out, mode, now, admit_after, waits, init):  # type: ignore[no-untyped-def]
    """Set out[i] to the slot of ids[i], from `begin` on. Returns where it stopped, and why.

    NO_ROOM: it needs memory for more slots (or the word FULL set). NO_WAITING_ROOM: it needs another level
    for waiting ids (or `waits` false, if there may be no more).
    """
    codes = np.empty(_BLOCK, dtype=np.uint64)
    guesses = np.empty(_BLOCK, dtype=np.int64)
    spare = np.int64(-1)
    at, reason = begin, DONE
    while at < ids.size and reason == DONE:
        num = min(_BLOCK, ids.size - at)
        present = t.head[LEVELS]
        for i in range(num):
            code = hash_id(ids[at + i])
            codes[i] = code
            for level in range(present):
                code *= _NEXT_LEVEL
                if level >= _CACHED:
                    prefetch(t.index, _window(code, level))
        for i in range(num):
            guesses[i] = _candidate(t.index, codes[i], t.levels)
            if guesses[i] >= 0:
                prefetch(t.metas, 2 * guesses[i])
        for i in range(num):
            number, slot = ids[at], guesses[i]
            if slot < 0 or t.metas[2 * slot] != number:
                slot = locate(t.index, t.levels, t.metas, codes[i], number)
            if slot >= 0:
                if mode == SEE:
                    _mark_used(t.marks, slot, now)
            else:
                slot, spare, reason = _missing(
                    t, codes[i], number, mode, now, admit_after, waits, spare, init
                )
                if reason != DONE:
                    break
            out[at] = slot
            at += 1
    if spare >= 0:
        give_slot(t.head, t.metas, t.marks, spare)
    return at, reason


@exact
def find_fixed(t, ids, out, mode, now, admit_after, init):  # type: ignore[no-untyped-def]
    """Like find, for tables in which the slot is the id. The id's word tells whether the row was made.

    Two processes that make the same row write the same numbers. An update between their writes may be
    lost, like any update that races with another one of the same row.
    """
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            prefetch(t.metas, 2 * ids[i + _AHEAD])
        slot = ids[i]
        made = t.metas[2 * slot] != 0
        if mode != LOOK and not made:
            count = np.int64(add(t.marks, 4 * slot + 2, 1)) + 1 if mode == SEE else admit_after
            if count >= admit_after:
                make_record(t.records, t.scalars, slot, slot, init)
                swap(t.metas, 2 * slot, 0, 1)
                made = True
                t.marks[4 * slot + 3] = max(np.int64(t.marks[4 * slot + 3]), now)
        elif mode == SEE:
            _mark_used(t.marks, slot, now)
        out[i] = slot if made else np.int64(-1)


@exact
def slots_in(index, begin, end, out, found):  # type: ignore[no-untyped-def]
    """Append the slots in a range of the index to `out`. Returns how many there are now."""
    for place in range(begin, end):
        if index[place] != _0:
            if found == out.size:
                return found
            out[found] = np.int64(index[place] & _LOW32) - 1
            found += 1
    return found


@exact
def enter_all(t, index, slots):  # type: ignore[no-untyped-def]
    """Insert live slots into an empty index. Returns whether all found a place."""
    for i in range(slots.size):
        number = t.metas[2 * slots[i]]
        if enter(index, t.levels, t.metas, hash_id(number), number, slots[i]) < 0:
            return False
    return True
