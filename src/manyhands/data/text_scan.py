"""Scans the words of a text byte by byte into a hash table of plain arrays. Compiled by numba.

The table identifies a word by its bytes: `slots` (open addressing, a power of two) point to entries, and an
entry has a hash, an offset in `letters`, a length and a count. Counting and encoding are one scan each, at
some hundred megabytes a second; each distinct word is decoded once.

Spaces are those of str.split(), in UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

_PRIME = np.uint64(0x100000001B3)
_SEED = np.uint64(0xCBF29CE484222325)
_FOLD = np.uint64(32)

_fast = njit(cache=True, nogil=True)
_inline = njit(cache=True, nogil=True, inline="always")


class Entries(NamedTuple):
    """The arrays of a word table, in a form that numba takes as one argument."""

    slots: NDArray[np.int32]
    hashes: NDArray[np.uint64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    letters: NDArray[np.uint8]
    used: NDArray[np.int64]
    """Number of entries, in an array of one."""


class WordTable:
    """Words and their counts, in the order of first occurrence."""

    def __init__(self) -> None:
        self.entries = Entries(
            slots=np.full(1 << 12, -1, np.int32),
            hashes=np.empty(1 << 11, np.uint64),
            starts=np.zeros((1 << 11) + 1, np.int64),
            counts=np.zeros(1 << 11, np.int64),
            letters=np.empty(1 << 16, np.uint8),
            used=np.zeros(1, np.int64),
        )

    @classmethod
    def of(cls, words: Iterable[str]) -> WordTable:
        """Make a table in which word i is entry i."""
        table = cls()
        text = "\n".join(words).encode() + b"\n"
        table.count(np.frombuffer(text, np.uint8), 0, len(text), ended=True)
        return table

    def count(self, text: NDArray[np.uint8], start: int, limit: int, *, ended: bool) -> int:
        """Count the words that begin in [start, limit). Returns the position at the end.

        If `ended` is false, the text continues: a word at its very end is not counted, and its position is
        returned.
        """
        while True:
            start, full = _count(text, start, limit, ended, self.entries)
            if not full:
                return int(start)
            self._grow(len(text))

    def words(self) -> list[bytes]:
        letters, edges = self.entries.letters.tobytes(), self.entries.starts.tolist()
        return [letters[edges[i] : edges[i + 1]] for i in range(int(self.entries.used[0]))]

    def _grow(self, more: int) -> None:
        _, hashes, starts, counts, letters, used = self.entries
        size = 2 * len(hashes)
        self.entries = Entries(
            slots=np.full(2 * size, -1, np.int32),
            hashes=np.resize(hashes, size),
            starts=np.resize(starts, size + 1),
            counts=np.resize(counts, size),
            letters=np.resize(letters, max(2 * len(letters), len(letters) + more)),
            used=used,
        )
        _fill_slots(self.entries)


@_fast
def space_at(text: NDArray[np.uint8], at: int) -> int:
    """Return the number of bytes of the space at this position; 0 if there is none."""
    byte = text[at]
    if byte <= 32:
        return 1 if byte == 32 or 9 <= byte <= 13 or 28 <= byte <= 31 else 0
    if byte < 0xC2 or byte > 0xE3:
        return 0
    if byte == 0xC2:
        return 2 if at + 1 < len(text) and (text[at + 1] == 0x85 or text[at + 1] == 0xA0) else 0
    if at + 2 >= len(text) or byte == 0xE0:
        return 0
    second, third = text[at + 1], text[at + 2]
    if byte == 0xE2:
        general = second == 0x80 and (
            third <= 0x8A or third == 0xA8 or third == 0xA9 or third == 0xAF
        )
        return 3 if general or (second == 0x81 and third == 0x9F) else 0
    if byte == 0xE1:
        return 3 if second == 0x9A and third == 0x80 else 0
    return 3 if byte == 0xE3 and second == 0x80 and third == 0x80 else 0


@_fast
def between_words(text: NDArray[np.uint8], at: int) -> int:
    """Return the first position from here on that is not inside a word, or the length of the text."""
    for back in range(1, min(at, 3) + 1):
        size = space_at(text, at - back)
        if size >= back:
            return at - back + size
    while at < len(text) and space_at(text, at) == 0:
        at += 1
    return at


@_inline
def _word_at(text: NDArray[np.uint8], at: int) -> Any:
    """Return the end of the word (or text) that begins here, and its hash."""
    key = _SEED
    while at < len(text):
        byte = text[at]
        # Letters and digits of plain ASCII are most of all text.
        if (byte <= 32 or byte >= 0xC2) and space_at(text, at) > 0:
            break
        key = (key ^ np.uint64(byte)) * _PRIME
        at += 1
    return at, key ^ (key >> _FOLD)


@_inline
def _next_word(text: NDArray[np.uint8], at: int) -> Any:
    """Return the start of the next word (or the end of the text), and whether a newline precedes it."""
    newline = False
    while at < len(text):
        size = space_at(text, at)
        if size == 0:
            break
        newline = newline or text[at] == 10
        at += size
    return at, newline


@_inline
def _find(text: Any, begin: int, end: int, key: Any, table: Any) -> Any:
    """Return the slot of a word: its own, or the empty one for it."""
    slots, hashes, starts, _, letters, _ = table
    mask = len(slots) - 1
    slot = np.int64(key) & mask
    while slots[slot] >= 0:
        entry = slots[slot]
        low = starts[entry]
        if hashes[entry] == key and starts[entry + 1] - low == end - begin:
            same = 0
            while same < end - begin and letters[low + same] == text[begin + same]:
                same += 1
            if same == end - begin:
                break
        slot = (slot + 1) & mask
    return slot


@_fast
def _fill_slots(table: Entries) -> None:
    slots = table.slots
    mask = len(slots) - 1
    for entry in range(table.used[0]):
        slot = np.int64(table.hashes[entry]) & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = entry


@_fast
def _count(
    text: NDArray[np.uint8], at: int, limit: int, ended: bool, table: Entries
) -> tuple[int, bool]:
    """Count words. Returns the position at the end, and whether it stopped because the table is full."""
    slots, hashes, starts, counts, letters, used = table
    while True:
        at, _ = _next_word(text, at)
        if at >= limit:
            return at, False
        end, key = _word_at(text, at)
        if end == len(text) and not ended:
            return at, False
        slot = _find(text, at, end, key, table)
        entry = np.int64(slots[slot])
        if entry < 0:
            entry = used[0]
            low = starts[entry]
            if entry == len(hashes) or low + end - at > len(letters):
                return at, True
            for i in range(end - at):
                letters[low + i] = text[at + i]
            slots[slot] = entry
            hashes[entry] = key
            starts[entry + 1] = low + end - at
            counts[entry] = 0
            used[0] += 1
        counts[entry] += 1
        at = end


@_fast
def encode_block(
    text: NDArray[np.uint8],
    at: int,
    ended: bool,
    table: Entries,
    ids: NDArray[np.int32],
    line: NDArray[np.int64],
) -> tuple[int, int]:
    """Fill `ids` with the entries of known words. Returns the position in the text, and the number of ids.

    `line` keeps state between calls: whether there was a newline since the last word, and whether any word
    was written before it. So a sentence end (-1) is written only between two words.
    """
    count = 0
    while True:
        at, newline = _next_word(text, at)
        if newline:
            line[0] = 1
        if at == len(text):
            break
        end, key = _word_at(text, at)
        if end == len(text) and not ended:
            break
        entry = table.slots[_find(text, at, end, key, table)]
        if entry >= 0:
            if line[0] and line[1]:
                ids[count] = -1
                count += 1
            line[0] = 0
            line[1] = 1
            ids[count] = entry
            count += 1
        at = end
    return at, count


@_fast
def alias_table(weights: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Make a table for draws in proportion to weights in constant time (Walker, 1977; Vose, 1991).

    Draw an index and 32 more random bits: if these are below the upper 32 bits of the entry, the result is
    the index itself, else the lower 32 bits of the entry, the alias.
    """
    size = len(weights)
    share = weights * (size / weights.sum())
    small, large = np.empty(size, np.int64), np.empty(size, np.int64)
    num_small = num_large = 0
    for i in range(size):
        if share[i] < 1.0:
            small[num_small] = i
            num_small += 1
        else:
            large[num_large] = i
            num_large += 1
    table = np.empty(size, np.uint64)
    for i in range(size):
        table[i] = (np.uint64(0xFFFFFFFF) << _FOLD) | np.uint64(i)
    while num_small > 0 and num_large > 0:
        num_small -= 1
        poor, rich = small[num_small], large[num_large - 1]
        table[poor] = (np.uint64(share[poor] * 4294967295.0) << _FOLD) | np.uint64(rich)
        share[rich] -= 1.0 - share[poor]
        if share[rich] < 1.0:
            num_large -= 1
            small[num_small] = rich
            num_small += 1
    return table
