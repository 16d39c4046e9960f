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
from numpy.typing import NDArray

from manyhands.embeddings.compiled import inlined, loose
from manyhands.word2vec import copies, sampling, simd, windows
from manyhands.word2vec.windows import MEAN_TILE, TILE

SHARE = 6
"""Contexts that share the drawn words. Accuracy on analogies after five epochs, 12 million words, two
threads: 35.3 % (four seeds, 34.7 to 35.7), and 34.2 % (33.4 to 34.6) with one draw for a whole window,
which is about a twentieth faster. Groups of two to five were no better: 34.3 to 35.4 %."""
LOSS_EVERY = 16
"""One in this many windows is used for the loss: logarithms are expensive."""


def _kernel(bag: bool) -> Any:
    """Compile a kernel: CBOW if `bag` is true, otherwise skip-gram."""

    @loose
    def train(
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
        state = np.full(1, np.uint64(seed), np.uint64)
        kept = np.empty(len(tokens), np.int32)
        count, words = sampling.subsample(tokens, keep, state, kept)
        tile = MEAN_TILE if bag else TILE
        targets = np.empty((negative + tile) // tile * tile, np.int64)
        # `_train` takes addresses in these two, so they have to outlive the call.
        lanes = np.zeros((2 + SHARE) * len(targets) // tile * simd.LANES, np.float32)
        blank = np.zeros(3 * (inputs.shape[1] + simd.LANES) + simd.LANES, np.float32)
        matrices = inputs, outputs, in_rows, out_rows, own
        drawing = noise, negative, state
        loss, pairs = _train(
            bag, kept[:count], matrices, drawing, window, np.float32(lr), targets, lanes, blank
        )
        return loss, pairs, words

    return train


skip_gram = _kernel(bag=False)
"""Train on a piece of text. Returns (estimated sum of the losses of pairs, pairs, words before sampling).

`tokens` are word ids, -1 at the end of a sentence. `in_rows` and `out_rows` map words to rows. `keep` is the
probability that a word stays. `noise` is an alias table to draw words from (or simply word ids as uint64,
with equal probability). All randomness comes from the seed. The loss is estimated from every 16th window.

`own` is memory for copies of the rows of the first, most frequent words: see copies.py. If no other thread or
process changes the matrices, it is empty: copies.allocate(0, dim).
"""
cbow = _kernel(bag=True)
"""Like `skip_gram`, with one vector per window, the mean of its contexts: a window is one pair."""


@inlined
def _lane(bag: bool, c: int, k: int, hop: int) -> Any:
    """Return the index at which windows.py has the numbers of context c and target k."""
    return k if bag else (c >> 1) * hop + k // TILE * simd.LANES + (c & 1) * TILE + k % TILE


@loose
def _train(bag, kept, matrices, drawing, window, lr, targets, lanes, blank):  # type: ignore[no-untyped-def]
    """Train on all windows."""
    inputs, outputs, in_rows, out_rows, own = matrices
    noise, negative, state = drawing
    if inputs.shape[1] != outputs.shape[1] or inputs.strides[1] != 4 or outputs.strides[1] != 4:
        raise ValueError("inputs and outputs need the same number of contiguous float32 columns")
    ins, outs = copies.where(inputs, own, 0), copies.where(outputs, own, 1)
    whole = inputs.shape[1] // simd.LANES * simd.BYTES
    rest = inputs.shape[1] % simd.LANES
    lines = (inputs.shape[1] * 4 + 126) // 64
    hop = len(lanes) // (2 + SHARE)
    labels, rates, errors = lanes[:hop], lanes[hop : 2 * hop], lanes[2 * hop :]
    labels[0] = 1.0
    if not bag:
        labels[TILE] = 1.0
    void = -(-simd.address_of(blank) // simd.BYTES) * simd.BYTES  # in cache lines of its own
    hidden = void + whole + simd.BYTES
    back = hidden + whole + simd.BYTES
    label, rate, error = simd.address_of(labels), simd.address_of(rates), simd.address_of(errors)
    buffers = label, rate, error, hidden, back
    targets[:] = void
    ahead = targets.copy()
    contexts = np.empty(2 * window + 2, np.int64)
    copies.load_all(in_rows, ins, whole, rest)
    copies.load_all(out_rows, outs, whole, rest)
    count, pairs, seen, looked, loss = len(kept), 0, 0, 0, 0.0
    i = sampling.next_word(kept, count, 0)
    if i < count:
        sampling.draw(kept[i], negative, noise, out_rows, outs, lines, void, state, ahead)
    while i < count:
        targets[: negative + 1] = ahead[: negative + 1]
        later = sampling.next_word(kept, count, i + 1)
        if own.shape[2]:
            for k in range(seen % copies.OUT_EVERY, negative + 1, copies.OUT_EVERY):
                copies.merge(targets[k], out_rows, outs, whole, rest)
            if seen % copies.IN_EVERY == 0:
                copies.merge(copies.address(kept[i], in_rows, ins), in_rows, ins, whole, rest)
        if later < count:
            word = kept[later]
            sampling.draw(word, negative, noise, out_rows, outs, lines, void, state, ahead)
            if own.shape[2]:
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
                sampling.draw(kept[i], negative, noise, out_rows, outs, lines, void, state, targets)
            for k in range(negative + 1):
                lane = _lane(bag, 0, k, hop)
                strength = lr if targets[k] != void else np.float32(0.0)
                rates[lane] = strength
                if not bag:
                    rates[lane + TILE] = strength
            if bag:
                vectors = 1
                windows.window_of_mean(contexts, size, targets, buffers, whole, rest)
            else:
                vectors = min(SHARE, size - start)
                windows.window_of_pairs(contexts[start:], vectors, targets, buffers, whole, rest)
            pairs += vectors
            if seen % LOSS_EVERY == 0 and lr > 0:
                looked += vectors
                for c in range(vectors):
                    for k in range(negative + 1):
                        loss += windows.cost(errors[_lane(bag, c, k, hop)], lr)
        seen += 1
        i = later
    copies.merge_all(in_rows, ins, whole, rest)
    copies.merge_all(out_rows, outs, whole, rest)
    return loss * pairs / max(looked, 1), pairs
