"""Random choices of word2vec: subsampling, window sizes, negative samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.embeddings.compiled import inlined, loose
from manyhands.embeddings.kernels import mix
from manyhands.embeddings.shards import STEP
from manyhands.word2vec import copies, simd

_STEP, _LOW = np.uint64(STEP), np.uint64(0xFFFFFFFF)
_32, _40 = np.uint64(32), np.uint64(40)
_UNIT = np.float32(2.0**-24)


@inlined
def random_bits(state: NDArray[np.uint64]) -> Any:
    """Return 64 random bits: a mixed counter (SplitMix64, Steele et al., 2014)."""
    state[0] += _STEP
    return mix(state[0])


@loose
def subsample(
    tokens: NDArray[np.int32],
    keep: NDArray[np.float32],
    state: NDArray[np.uint64],
    kept: NDArray[np.int32],
) -> tuple[int, int]:
    """Fill `kept` with the words that stay and the sentence ends. Returns their number, and the words
    before."""
    count, words = 0, 0
    for token in tokens:
        if token >= 0:
            words += 1
            chance = np.float32(random_bits(state) >> _40) * _UNIT
            if chance >= keep[token]:
                continue
        kept[count] = token
        count += 1
    return count, words


@loose
def draw(
    centre: int,
    negative: int,
    noise: NDArray[np.uint64],
    out_rows: NDArray[np.int64],
    where: Any,
    lines: int,
    blank: int,
    state: NDArray[np.uint64],
    targets: NDArray[np.int64],
) -> None:
    """Write the addresses of the rows of the centre and of drawn words to `targets`, and prefetch them. A
    draw of the centre itself becomes the blank row."""
    targets[0] = copies.address(centre, out_rows, where)
    size = np.uint64(len(noise))
    for k in range(1, negative + 1):
        bits = random_bits(state)
        place = ((bits >> _32) * size) >> _32
        entry = noise[place]
        # The index itself, or its alias: see `alias_table` in manyhands.data.text_scan.
        drawn = place if (bits & _LOW) < (entry >> _32) else entry & _LOW
        word = np.int64(drawn)
        targets[k] = blank if word == centre else copies.address(word, out_rows, where)
    for k in range(negative + 1):
        row = targets[k]
        for line in range(lines):
            simd.prefetch(row + line * 64)


@inlined
def window_of(kept: NDArray[np.int32], count: int, i: int, window: int, state: Any) -> Any:
    """Return the window of word i, [first, last]: of random width, within its sentence."""
    size = 1 + np.int64(((random_bits(state) >> _32) * np.uint64(window)) >> _32)
    first = last = i
    while first > 0 and i - first < size and kept[first - 1] >= 0:
        first -= 1
    while last + 1 < count and last - i < size and kept[last + 1] >= 0:
        last += 1
    return first, last


@inlined
def next_word(kept: NDArray[np.int32], count: int, i: int) -> Any:
    """Return the index of the next word from i on, or `count`."""
    while i < count and kept[i] < 0:
        i += 1
    return i
