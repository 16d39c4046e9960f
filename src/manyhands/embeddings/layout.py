"""The memory layout of a table. Pure.

One range of address space holds header, counters, index and records for the maximum number of rows. Memory
is allocated only where it is used, so a table grows without moving anything.

The index is a sequence of levels, each twice as large as the one before. An id has one window of 8 entries
(a cache line) in each level. Its entry is in the first of its windows that had space when it was inserted,
and entries are never removed, so a window with an empty entry ends every search. The index grows without
any process waiting for another. An entry is 8 bytes: half of the hash, and the slot of the row. A level
comes into use when those before it are about three quarters full, so the index takes 11 to 22 bytes a row.

Cost of a search: one cache line per level; the levels of frequent ids are small and in the cache.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from manyhands.embeddings.spec import MAX_ROWS, META_BYTES, Table

WINDOW = 8
"""Entries: one cache line."""
BASE_BITS = 7
"""log2 of the number of windows in level 0."""
BASE = WINDOW << BASE_BITS
"""Entries in level 0; level k has BASE << k."""
EXTENDED_AT = 0.75
"""Fraction of entries in use at which memory for the next level is allocated."""
SPILLED_AT = 0.6
"""Fraction below which the next level is practically unused; the limit on bytes is computed with it."""
WAITING_SHARE = 8
"""1/8 of the bytes of a table is for ids that wait for admission."""
WAITING_BYTES = 12
"""Bytes of an entry: id and count."""

GROW_PART = 32
"""Memory for rows is allocated ahead: 1/32 of what there is."""
GROW_LEAST = 512
GROW_MOST_BYTES = 64 << 20

# Words of the header. Those that many processes write are in cache lines of their own.
MAGIC_WORD, DIGEST, CAPACITY, SALT, WAITING_MOST = range(5)
GENERATION = 8
"""Which of the two indexes is in use."""
LEVELS = 9
"""Levels of the index that have memory."""
WAITING_LEVELS = 10
FULL = 11
"""Not 0 if an id was refused a row because the table was full."""
READY = 16
"""Slots below this one have memory."""
NEXT = 24
"""Slots below this one were allocated at least once."""
FREE = 32
"""The free list: a version in the upper half, the first slot + 1 in the lower."""
HEADER_BYTES = 4096
MAGIC = 0x6D68_7461_626C_6531


def entries_in(levels: int) -> int:
    """Return the number of entries in the first levels."""
    return BASE * ((1 << levels) - 1)


def levels_for(rows: int, *, filled: float) -> int:
    """Return the number of levels for some rows, if one is added when those before are `filled`."""
    levels = 1
    while rows > filled * entries_in(levels):
        levels += 1
    return levels


class Regions(NamedTuple):
    """Offsets in bytes, multiples of a page."""

    header: int
    metas: int
    scalars: int
    first_index: int
    second_index: int
    waiting_ids: int
    waiting_counts: int
    records: int
    end: int


@dataclass(frozen=True)
class TableLayout:
    spec: Table
    capacity: int
    """Number of slots. A hashed table has one more than rows: slot 0 is the row that new ids share when
    full."""
    waiting_levels: int
    """Maximum number of levels for waiting ids; 0: every id is admitted at once."""
    spread: bool = False
    """If true, this is a part of a table with numbered rows, which are found by hash all the same."""

    @classmethod
    def within(cls, spec: Table, limit: int, *, spread: bool = False) -> TableLayout:
        """Return the layout with the most rows that fits into `limit` bytes."""
        if spec.rows is not None and not spread:
            return cls(spec, spec.rows, 0)
        waiting = 0
        if spec.admit_after > 1:
            waiting = 1
            while WAITING_BYTES * entries_in(waiting + 1) <= limit // WAITING_SHARE:
                waiting += 1

        def most_bytes(slots: int) -> int:
            return cls(spec, slots, waiting, spread).most_bytes

        most = MAX_ROWS if spec.rows is None else spec.rows + 1
        slots = bisect_right(range(1, most + 1), limit, key=most_bytes)
        return cls(spec, slots, waiting, spread)

    @property
    def hashed(self) -> bool:
        return self.spec.rows is None or self.spread

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, without the index."""
        return 4 * self.spec.width + 4 * self.spec.row_optimizer.scalar + META_BYTES

    @cached_property
    def levels(self) -> int:
        """Number of levels; enough that an id without a place is practically impossible."""
        return levels_for(self.capacity, filled=SPILLED_AT) + 2 if self.hashed else 0

    @property
    def most_bytes(self) -> int:
        """Bytes of a full table."""
        index = 8 * entries_in(levels_for(self.capacity, filled=SPILLED_AT)) if self.hashed else 0
        waiting = WAITING_BYTES * entries_in(self.waiting_levels)
        # Partial pages of the regions, and the first entries of the next level.
        ragged = 10 * mmap.PAGESIZE
        return HEADER_BYTES + self.capacity * self.slot_bytes + index + waiting + ragged

    def ready_after(self, slots: int) -> int:
        """Return how many slots have memory after growing."""
        most = max(GROW_MOST_BYTES // self.slot_bytes, 1)
        return min(self.capacity, slots + min(max(slots // GROW_PART, GROW_LEAST), most))

    def slot_ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the (offset, bytes) ranges of slots [begin, end)."""
        wide = 4 * self.spec.width
        ranges = [
            (self.at.metas + META_BYTES * begin, META_BYTES * (end - begin)),
            (self.at.records + wide * begin, wide * (end - begin)),
        ]
        if self.spec.row_optimizer.scalar:
            ranges.append((self.at.scalars + 4 * begin, 4 * (end - begin)))
        return ranges

    def level_ranges(self, generation: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the (offset, bytes) ranges of levels [begin, end) of an index."""
        start = self.index(generation)
        return [(start + 8 * entries_in(k), 8 * BASE << k) for k in range(begin, end)]

    def waiting_ranges(self, level: int) -> list[tuple[int, int]]:
        """Return the (offset, bytes) ranges of a level of waiting ids."""
        begin, size = entries_in(level), BASE << level
        ids, counts = self.at.waiting_ids, self.at.waiting_counts
        return [(ids + 8 * begin, 8 * size), (counts + 4 * begin, 4 * size)]

    def index(self, generation: int) -> int:
        """Return where one of the two indexes begins."""
        return (self.at.first_index, self.at.second_index)[generation]

    @cached_property
    def at(self) -> Regions:
        """Return where each region begins."""
        index = 8 * entries_in(self.levels)
        waiting = entries_in(self.waiting_levels)
        sizes = [
            HEADER_BYTES,
            META_BYTES * self.capacity,
            4 * self.capacity * self.spec.row_optimizer.scalar,
            index,
            index,
            8 * waiting,
            4 * waiting,
            4 * self.spec.width * self.capacity,
        ]
        pages = (-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)
        return Regions(*accumulate(pages, initial=0))
