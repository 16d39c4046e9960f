"""word2vec over plain matrices: skip-gram and CBOW with negative sampling (Mikolov et al., 2013).

A window of skip-gram is a small matrix product: the rows of its contexts times the rows of its centre and of
a few drawn words, which up to six contexts share (Ji et al., 2016). So a row is loaded and stored once per
window, not once per pair, and one load serves many sums: see windows.py. The words of the next window are
drawn, and their rows prefetched, while this one is computed.

CBOW has one vector per window, the mean of its contexts, against its centre and the drawn words. The error
goes to every context undivided, as in the original word2vec.

The matrices are changed in place without locks, by several threads or processes at once (Hogwild, Niu et al.,
2011). Each has copies of the rows that all would write constantly: see copies.py. A call reads and writes
about (negative + 1 + contexts) rows per kept word. Rows may have any stride.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from manyhands.word2vec import copies, sampling, simd, windows
from manyhands.word2vec.windows import MEAN_TILE, TILE

SHARE = 6
"""Contexts that share the drawn words. Accuracy on analogies after five epochs, 12 million words, two
threads: 35.3 % (four seeds, 34.7 to 35.7), and 34.2 % (33.4 to 34.6) with one draw for a whole window,
which is about a twentieth faster. Groups of two to five were no better: 34.3 to 35.4 %."""
LOSS_EVERY = 16
"""One in this many windows is used for the loss: logarithms are expensive."""

_fast = njit(cache=True, nogil=True, fastmath=True, error_model="numpy")


@_fast
def skip_gram(
    tokens: NDArray[np.int32],
    inputs: NDArray[np.float32],
    outputs: NDArray[np.float32],
    in_rows: NDArray[np.int64],
    out_rows: NDArray[np.int64],
    keep: NDArray[np.float32],
    noise: NDArray[np.uint64],
    window: int,
    negative: int,
    lr: float,
    seed: int,
    own: NDArray[np.float32],
) -> tuple[float, int, int]:
    """Train on a piece of text. Returns (estimated sum of the losses of pairs, pairs, words before sampling).

    `tokens` are word ids, -1 at the end of a sentence. `in_rows` and `out_rows` map words to rows. `keep` is
    the probability that a word stays. `noise` is an alias table to draw words from (or simply word ids as
    uint64, with equal probability). All randomness comes from the seed. The loss is estimated from every 16th
    window.

    `own` is memory for copies of the rows of the first, most frequent words: see copies.py. If nobody else
    changes the matrices it is empty, copies.allocate(0, dim).
    """
    state = np.full(1, np.uint64(seed), np.uint64)
    kept = np.empty(len(tokens), np.int32)
    count, words = sampling.subsample(tokens, keep, state, kept)
    tiles = (negative + TILE) // TILE
    size, lanes = tiles * TILE, tiles * simd.LANES
    loss, pairs = _train(
        False,
        kept[:count],
        inputs,
        outputs,
        in_rows,
        out_rows,
        noise,
        window,
        negative,
        np.float32(lr),
        state,
        np.empty(2 * window + 2, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.zeros(lanes, np.float32),
        np.zeros(lanes, np.float32),
        np.zeros(SHARE * lanes, np.float32),
        np.zeros(3 * (inputs.shape[1] + simd.LANES), np.float32),
        own,
    )
    return loss, pairs, words


@_fast
def cbow(
    tokens: NDArray[np.int32],
    inputs: NDArray[np.float32],
    outputs: NDArray[np.float32],
    in_rows: NDArray[np.int64],
    out_rows: NDArray[np.int64],
    keep: NDArray[np.float32],
    noise: NDArray[np.uint64],
    window: int,
    negative: int,
    lr: float,
    seed: int,
    own: NDArray[np.float32],
) -> tuple[float, int, int]:
    """Like `skip_gram`, with the mean of the contexts of a window in place of each: a window is one pair."""
    state = np.full(1, np.uint64(seed), np.uint64)
    kept = np.empty(len(tokens), np.int32)
    count, words = sampling.subsample(tokens, keep, state, kept)
    size = (negative + MEAN_TILE) // MEAN_TILE * MEAN_TILE
    lanes = size + simd.LANES
    loss, pairs = _train(
        True,
        kept[:count],
        inputs,
        outputs,
        in_rows,
        out_rows,
        noise,
        window,
        negative,
        np.float32(lr),
        state,
        np.empty(2 * window + 2, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.zeros(lanes, np.float32),
        np.zeros(lanes, np.float32),
        np.zeros(lanes, np.float32),
        np.zeros(3 * (inputs.shape[1] + simd.LANES), np.float32),
        own,
    )
    return loss, pairs, words


@_fast
def _train(
    bag: bool,
    kept: NDArray[np.int32],
    inputs: NDArray[np.float32],
    outputs: NDArray[np.float32],
    in_rows: NDArray[np.int64],
    out_rows: NDArray[np.int64],
    noise: NDArray[np.uint64],
    window: int,
    negative: int,
    lr: Any,
    state: NDArray[np.uint64],
    contexts: NDArray[np.int64],
    targets: NDArray[np.int64],
    ahead: NDArray[np.int64],
    labels: NDArray[np.float32],
    rates: NDArray[np.float32],
    errors: NDArray[np.float32],
    spare: NDArray[np.float32],
    own: NDArray[np.float32],
) -> tuple[float, int]:
    """Train on all windows. The caller keeps every array alive whose address is taken here."""
    if inputs.shape[1] != outputs.shape[1] or inputs.strides[1] != 4 or outputs.strides[1] != 4:
        raise ValueError("inputs and outputs need the same number of contiguous float32 columns")
    copied = own.shape[2]
    ins, outs = copies.where(inputs, own, 0), copies.where(outputs, own, 1)
    whole = inputs.shape[1] // simd.LANES * simd.BYTES
    rest = inputs.shape[1] % simd.LANES
    lines = (inputs.shape[1] * 4 + 126) // 64
    label, rate, error = simd.address_of(labels), simd.address_of(rates), simd.address_of(errors)
    void = simd.address_of(spare)
    hidden = void + whole + simd.BYTES
    back = hidden + whole + simd.BYTES
    hop = len(labels)
    tiles = len(targets) // TILE
    labels[0] = 1.0
    if not bag:
        labels[TILE] = 1.0
    targets[:] = void
    ahead[:] = void
    count = len(kept)
    copies.load_all(in_rows, ins, whole, rest)
    copies.load_all(out_rows, outs, whole, rest)
    pairs = seen = looked = 0
    loss = 0.0
    i = sampling.next_word(kept, count, 0)
    if i < count:
        sampling.draw(kept[i], negative, noise, out_rows, outs, lines, void, state, ahead)
    while i < count:
        targets[: negative + 1] = ahead[: negative + 1]
        later = sampling.next_word(kept, count, i + 1)
        if copied:
            for k in range(seen % copies.OUT_EVERY, negative + 1, copies.OUT_EVERY):
                copies.merge(targets[k], out_rows, outs, whole, rest)
            if seen % copies.IN_EVERY == 0:
                copies.merge(copies.address(kept[i], in_rows, ins), in_rows, ins, whole, rest)
        if later < count:
            word = kept[later]
            sampling.draw(word, negative, noise, out_rows, outs, lines, void, state, ahead)
            if copied:
                for k in range((seen + 1) % copies.OUT_EVERY, negative + 1, copies.OUT_EVERY):
                    copies.prefetch(ahead[k], out_rows, outs, lines)
                if (seen + 1) % copies.IN_EVERY == 0:
                    copies.prefetch(copies.address(word, in_rows, ins), in_rows, ins, lines)
        first, last = sampling.window_of(kept, count, i, window, state)
        size = 0
        for j in range(first, last + 1):
            if j != i:
                contexts[size] = copies.address(kept[j], in_rows, ins)
                size += 1
        contexts[size] = void
        for start in range(0, size, max(size, 1) if bag else SHARE):
            if start > 0:
                word = kept[i]
                sampling.draw(
                    word,
                    negative,
                    noise,
                    out_rows,
                    outs,
                    lines,
                    void,
                    state,
                    targets,
                )
            for k in range(negative + 1):
                strength = lr if targets[k] != void else np.float32(0.0)
                lane = k if bag else k // TILE * simd.LANES + k % TILE
                rates[lane] = strength
                if not bag:
                    rates[lane + TILE] = strength
            if bag:
                vectors = 1
                windows.window_of_mean(
                    contexts, size, targets, label, rate, error, hidden, back, whole, rest
                )
            else:
                vectors = min(SHARE, size - start)
                windows.window_of_pairs(
                    contexts[start:], vectors, targets, tiles, label, rate, error, whole, rest
                )
            pairs += vectors
            if seen % LOSS_EVERY == 0 and lr > 0:
                looked += vectors
                for c in range(vectors):
                    for k in range(negative + 1):
                        lane = (c >> 1) * hop + k // TILE * simd.LANES + (c & 1) * TILE + k % TILE
                        loss += windows.cost(errors[k if bag else lane], lr)
        seen += 1
        i = later
    copies.merge_all(in_rows, ins, whole, rest)
    copies.merge_all(out_rows, outs, whole, rest)
    return loss * pairs / max(looked, 1), pairs
