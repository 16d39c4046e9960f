"""Where everything of a table lies in its memory. Pure.

One stretch of address space holds header, counters, index and records for as many rows as there can ever
be; memory is taken only where it is used, so a table grows without moving anything.

The index is a row of levels, each twice the last. An id has one window of 8 entries (a cache line) in
each level. It lives in the first of its windows that had room when it came, and entries never go away,
so a window with an empty entry ends every search: the index grows by itself, and nobody ever waits for
somebody who is growing it. An entry is 8 bytes: half the hash, and the row's slot. A level comes
into use when those before it are about three quarters full; so the index takes 11 to 22 bytes a row.

Cost of a search: a cache line a level, the levels of the common ids being small and in the cache.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import cached_property

from manyhands.embeddings.spec import MAX_ROWS, META_BYTES, Table

WINDOW = 8
"""Entries: one cache line."""
BASE_BITS = 7
"""Of the number of windows in level 0."""
BASE = WINDOW << BASE_BITS
"""Entries in level 0; level k has BASE << k."""
EXTENDED_AT = 0.75
"""How full the levels may be in all before memory is taken for the next."""
SPILLED_AT = 0.6
"""Below this the next level is as good as untouched: what a bound on bytes must reckon with."""
WAITING_SHARE = 8
"""One part in 8 of a table's bytes is for ids that wait for admission."""
WAITING_BYTES = 12
"""Of an entry: id and count."""

GROW_PART = 32
"""Memory for rows is taken ahead, one part in 32 of what there is."""
GROW_LEAST = 512
GROW_MOST_BYTES = 64 << 20

# Words of the header. Those that many processes write stand in cache lines of their own.
MAGIC_WORD, DIGEST, CAPACITY, SALT, WAITING_MOST = range(5)
GENERATION = 8
"""Which of the two indexes is the one in use."""
LEVELS = 9
"""Levels of the index that have their memory."""
WAITING_LEVELS = 10
FULL = 11
"""Not 0 when an id was refused a row for want of room."""
READY = 16
"""Slots below have their memory."""
NEXT = 24
"""Slots below have been given out at least once."""
FREE = 32
"""The free list: a version in the upper half, the first slot + 1 in the lower."""
HEADER_BYTES = 4096
MAGIC = 0x6D68_7461_626C_6531


def entries_in(levels: int) -> int:
    """Entries in the first so many levels."""
    return BASE * ((1 << levels) - 1)


def levels_for(rows: int, *, filled: float) -> int:
    """Levels in use with so many rows, when one is added as soon as those before are `filled`."""
    levels = 1
    while rows > filled * entries_in(levels):
        levels += 1
    return levels


@dataclass(frozen=True)
class TableLayout:
    """All offsets are bytes and multiples of a page."""

    spec: Table
    capacity: int
    """Slots. A table of any ids has one more than rows: slot 0 is the row that new ids share when full."""
    waiting_levels: int
    """Levels of the waiting room at most; 0: every id is admitted at once."""
    spread: bool = False
    """A part of a table of numbered rows: found by hash all the same."""

    @classmethod
    def within(cls, spec: Table, limit: int, *, spread: bool = False) -> TableLayout:
        """The layout of most rows that fits into so many bytes."""
        if spec.rows is not None and not spread:
            return cls(spec, spec.rows, 0)
        waiting = 0
        if spec.admit_after > 1:
            waiting = 1
            while WAITING_BYTES * entries_in(waiting + 1) <= limit // WAITING_SHARE:
                waiting += 1
        low, high = 0, MAX_ROWS if spec.rows is None else spec.rows + 1
        while low < high:
            middle = (low + high + 1) // 2
            if cls(spec, middle, waiting, spread).most_bytes <= limit:
                low = middle
            else:
                high = middle - 1
        return cls(spec, low, waiting, spread)

    @property
    def hashed(self) -> bool:
        return self.spec.rows is None or self.spread

    @property
    def slot_bytes(self) -> int:
        """Of a slot without its index."""
        return 4 * self.spec.width + 4 * self.spec.row_optimizer.scalar + META_BYTES

    @cached_property
    def levels(self) -> int:
        """So many that an id without a place is as good as impossible."""
        return levels_for(self.capacity, filled=SPILLED_AT) + 2 if self.hashed else 0

    @property
    def most_bytes(self) -> int:
        """What a full table takes."""
        index = 8 * entries_in(levels_for(self.capacity, filled=SPILLED_AT)) if self.hashed else 0
        waiting = WAITING_BYTES * entries_in(self.waiting_levels)
        ragged = 10 * mmap.PAGESIZE  # where regions begin and end, and the first that spill over
        return HEADER_BYTES + self.capacity * self.slot_bytes + index + waiting + ragged

    def bytes_ready(self, slots: int) -> int:
        """What is taken when so many slots have their memory, the waiting room aside."""
        index = 8 * entries_in(levels_for(slots, filled=EXTENDED_AT)) if self.hashed else 0
        return HEADER_BYTES + slots * self.slot_bytes + index

    def ready_after(self, slots: int) -> int:
        """How many slots get their memory next."""
        most = max(GROW_MOST_BYTES // self.slot_bytes, 1)
        return min(self.capacity, slots + min(max(slots // GROW_PART, GROW_LEAST), most))

    def slot_ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The (offset, bytes) of what belongs to slots [begin, end)."""
        wide = 4 * self.spec.width
        ranges = [
            (self.metas + META_BYTES * begin, META_BYTES * (end - begin)),
            (self.records + wide * begin, wide * (end - begin)),
        ]
        if self.spec.row_optimizer.scalar:
            ranges.append((self.scalars + 4 * begin, 4 * (end - begin)))
        return ranges

    def level_ranges(self, generation: int, begin: int, end: int) -> list[tuple[int, int]]:
        """The (offset, bytes) of levels [begin, end) of an index."""
        start = self.index(generation)
        return [(start + 8 * entries_in(k), 8 * BASE << k) for k in range(begin, end)]

    def waiting_ranges(self, level: int) -> list[tuple[int, int]]:
        """The (offset, bytes) of a level of the waiting room."""
        begin, size = entries_in(level), BASE << level
        return [
            (self.waiting_ids + 8 * begin, 8 * size),
            (self.waiting_counts + 4 * begin, 4 * size),
        ]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        index = 8 * entries_in(self.levels)
        waiting = entries_in(self.waiting_levels)
        sizes = (
            *(HEADER_BYTES, META_BYTES * self.capacity),
            *(4 * self.capacity * self.spec.row_optimizer.scalar, index, index),
            *(8 * waiting, 4 * waiting, 4 * self.spec.width * self.capacity),
        )
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + _whole_pages(size))
        return tuple(ends)

    @property
    def metas(self) -> int:
        return self._ends[1]

    @property
    def scalars(self) -> int:
        return self._ends[2]

    def index(self, generation: int) -> int:
        return self._ends[3 + generation]

    @property
    def waiting_ids(self) -> int:
        return self._ends[5]

    @property
    def waiting_counts(self) -> int:
        return self._ends[6]

    @property
    def records(self) -> int:
        return self._ends[7]

    @property
    def nbytes(self) -> int:
        """Of address space."""
        return self._ends[8]


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
