"""The kernels compute what word2vec's formulas say, touch nothing else, and learn."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.word2vec import copies, kernels, sampling, simd, windows

MODELS = {"skip-gram": kernels.skip_gram, "cbow": kernels.cbow}


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def only(word: int) -> NDArray[np.uint64]:
    """A noise table that always gives this word: never the place itself, always its alias."""
    return np.array([word], np.uint64)


def matrices(rows: int, dim: int, seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return tuple(random.normal(0, 0.5, (rows, dim)).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


def call(model: str, tokens: list[int], inputs: Any, outputs: Any, **other: Any) -> Any:
    size = other.pop("size", len(inputs))
    rows = np.arange(size)
    arguments = {
        "in_rows": rows,
        "out_rows": rows,
        "keep": np.ones(size, np.float32),
        "noise": only(0),
        "window": 1,
        "negative": 1,
        "lr": 0.1,
        "seed": 7,
        "own": copies.allocate(0, inputs.shape[1]),
    } | other
    return MODELS[model](np.array(tokens, np.int32), inputs, outputs, *arguments.values())


def by_hand(model: str, tokens: list[int], inputs: Any, outputs: Any, lr: float) -> None:
    """Windows of one word to each side against word 0, in float64 and in the order of the text."""
    for i, centre in enumerate(tokens):
        if centre < 0:
            continue
        around = [tokens[j] for j in (i - 1, i + 1) if 0 <= j < len(tokens) and tokens[j] >= 0]
        targets = [(centre, 1.0), (0, 0.0)] if centre else [(centre, 1.0)]
        bags = [around] if model == "cbow" and around else [[word] for word in around]
        hidden = [inputs[bag].mean(axis=0) for bag in bags]
        moves_in, moves_out = [np.zeros_like(h) for h in hidden], {}
        for word, label in targets:
            moves_out[word] = np.zeros(inputs.shape[1])
            for h, move in zip(hidden, moves_in, strict=True):
                guess = sigmoid(h @ outputs[word])
                move += lr * (label - guess) * outputs[word]
                moves_out[word] += lr * (label - guess) * h
        for bag, move in zip(bags, moves_in, strict=True):
            for word in bag:
                inputs[word] += move
        for word, move in moves_out.items():
            outputs[word] += move


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dim", [1, 7, 16, 33, 100])
def test_kernels_match_a_plain_implementation(model: str, dim: int) -> None:
    tokens = [3, 1, 4, 2, 0, -1, 2, 3, -1, 4, 3, 0, 1]
    inputs, outputs = matrices(5, dim)
    expected_in, expected_out = inputs.astype(np.float64), outputs.astype(np.float64)
    by_hand(model, tokens, expected_in, expected_out, 0.1)
    _, pairs, words = call(model, tokens, inputs, outputs)
    assert inputs == pytest.approx(expected_in, abs=1e-4)
    assert outputs == pytest.approx(expected_out, abs=1e-4)
    assert words == 11
    assert pairs == (16 if model == "skip-gram" else 11)


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_is_that_of_every_16th_window_scaled_up(model: str) -> None:
    """16 is a multiple of 4, so it is always word 1 that is looked at."""
    inputs, outputs = matrices(5, 20)
    loss, _, _ = call(model, [1, 2, 3, 4] * 500, inputs, outputs, lr=1e-7)
    assert loss == pytest.approx(2_000 * loss_of_word(model, inputs, outputs), rel=0.01)


def loss_of_word(model: str, inputs: Any, outputs: Any) -> float:
    """Of word 1 between 4 and 2, against word 0."""
    vectors = [inputs[4], inputs[2]] if model == "skip-gram" else [(inputs[4] + inputs[2]) / 2]
    return float(sum(-np.log(sigmoid(v @ outputs[1]) * sigmoid(-v @ outputs[0])) for v in vectors))


@pytest.mark.parametrize("num_targets", [2, 6, 7, 12, 26])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("dim", [5, 32, 100])
def test_one_window_with_many_targets(num_targets: int, size: int, dim: int) -> None:
    x, t = matrices(max(num_targets, size), dim)
    x, t = x[:size].copy(), t[:num_targets].copy()
    labels = np.zeros(num_targets)
    labels[0] = 1
    errors = 0.01 * (labels - sigmoid(x.astype(np.float64) @ t.T))
    expected_x, expected_t = x + errors @ t, t + errors.T @ x
    run_window(x, t, 0.01)
    # Beyond six targets the contexts have already moved a little: within the rate squared.
    assert x == pytest.approx(expected_x, abs=1e-4)
    assert t == pytest.approx(expected_t, abs=1e-4 if num_targets <= 6 else 4e-3)


def run_window(x: Any, t: Any, rate: float) -> None:
    tiles = -(-len(t) // windows.TILE)
    void = np.zeros(x.shape[1] + 16, np.float32)
    contexts = np.array([*(row.ctypes.data for row in x), void.ctypes.data])
    targets = np.full(tiles * windows.TILE, void.ctypes.data)
    targets[: len(t)] = [row.ctypes.data for row in t]
    labels, rates = np.zeros((2, tiles, 16), np.float32)
    errors = np.zeros((len(x) + 1) * tiles * 16, np.float32)
    for k in range(len(t)):
        for lane in (k % windows.TILE, k % windows.TILE + windows.TILE):
            rates[k // windows.TILE, lane] = rate
            labels[k // windows.TILE, lane] = k == 0
    windows.window_of_pairs(
        *(contexts, len(x), targets),
        (labels.ctypes.data, rates.ctypes.data, errors.ctypes.data),
        *(x.shape[1] // 16 * 64, x.shape[1] % 16),
    )
    assert not void.any()


@pytest.mark.parametrize("num_targets", [2, 8, 9, 26])
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("dim", [5, 32, 100])
def test_one_window_of_a_mean(num_targets: int, size: int, dim: int) -> None:
    x, t = matrices(max(num_targets, size), dim)
    x, t = x[:size].copy(), t[:num_targets].copy()
    labels = np.zeros(num_targets)
    labels[0] = 1
    mean = x.mean(axis=0, dtype=np.float64)
    errors = 0.1 * (labels - sigmoid(t @ mean))
    expected_x, expected_t = x + errors @ t, t + np.outer(errors, mean)
    run_mean(x, t, 0.1)
    assert x == pytest.approx(expected_x, abs=1e-3)
    assert t == pytest.approx(expected_t, abs=1e-3)


def run_mean(x: Any, t: Any, rate: float) -> None:
    room = -(-len(t) // windows.MEAN_TILE) * windows.MEAN_TILE
    void, hidden, back = np.zeros((3, x.shape[1] + 16), np.float32)
    contexts = np.array([row.ctypes.data for row in x])
    targets = np.full(room, void.ctypes.data)
    targets[: len(t)] = [row.ctypes.data for row in t]
    labels, rates, errors = np.zeros((3, room + 16), np.float32)
    labels[0] = 1
    rates[: len(t)] = rate
    windows.window_of_mean(
        *(contexts, len(x), targets),
        tuple(array.ctypes.data for array in (labels, rates, errors, hidden, back)),
        *(x.shape[1] // 16 * 64, x.shape[1] % 16),
    )
    assert not void.any()


@pytest.mark.parametrize("model", MODELS)
def test_only_rows_of_words_in_the_text_change(model: str) -> None:
    """Rows anywhere in a wider matrix: neither the other rows nor the columns beside them move."""
    wide_in, wide_out = matrices(40, 30)
    before_in, before_out = wide_in.copy(), wide_out.copy()
    in_rows, out_rows = np.array([30, 3, 17]), np.array([5, 8, 39])
    tokens = [1, 2, 1, 2, -1, 2]
    call(
        *(model, tokens, wide_in[:, :21], wide_out[:, :21]),
        size=3,
        in_rows=in_rows,
        out_rows=out_rows,
    )
    changed_in = {int(row) for row in np.flatnonzero((wide_in != before_in).any(axis=1))}
    changed_out = {int(row) for row in np.flatnonzero((wide_out != before_out).any(axis=1))}
    assert changed_in == {3, 17}
    assert changed_out == {5, 8, 39}
    assert np.array_equal(wide_in[:, 21:], before_in[:, 21:])
    assert np.array_equal(wide_out[:, 21:], before_out[:, 21:])


@pytest.mark.parametrize("model", MODELS)
def test_the_same_seed_gives_the_same_result(model: str) -> None:
    tokens = np.random.default_rng(1).integers(0, 50, 400).tolist()
    noise = np.arange(50, dtype=np.uint64)

    def trained(seed: int) -> Any:
        inputs, outputs = matrices(50, 24)
        keep = np.full(50, 0.6, np.float32)
        call(
            *(model, tokens, inputs, outputs),
            keep=keep,
            noise=noise,
            window=4,
            negative=5,
            seed=seed,
        )
        return inputs

    assert np.array_equal(trained(3), trained(3))
    assert not np.array_equal(trained(3), trained(4))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("copied", [1, 13, 50])
@pytest.mark.parametrize("dim", [16, 37])
def test_copies_change_nothing_for_a_single_writer(model: str, copied: int, dim: int) -> None:
    """At the end all changes of the copies are in the rows."""
    tokens = np.random.default_rng(1).integers(0, 50, 3_000).tolist()
    rows = np.random.default_rng(2).permutation(60)[:50]

    def trained(words: int) -> Any:
        wide_in, wide_out = matrices(60, dim + 3)
        call(
            *(model, tokens, wide_in[:, :dim], wide_out[:, :dim]),
            in_rows=rows,
            out_rows=rows[::-1].copy(),
            keep=np.full(50, 0.7, np.float32),
            noise=np.arange(50, dtype=np.uint64),
            window=3,
            negative=5,
            own=copies.allocate(words, dim),
        )
        return wide_in, wide_out

    for with_copies, without in zip(trained(copied), trained(0), strict=True):
        assert with_copies == pytest.approx(without, abs=1e-4)


def test_merging_a_copy_exchanges_changes() -> None:
    from numba import njit

    shared, _ = matrices(6, 20)
    before, rows, own = shared.copy(), np.array([4, 2, 0]), copies.allocate(3, 20)

    @njit
    def take(shared: Any, own: Any, rows: Any) -> None:
        copies.load_all(rows, copies.where(shared, own, 1), 64, 4)

    @njit
    def merge(word: int, shared: Any, own: Any, rows: Any) -> None:
        where = copies.where(shared, own, 1)
        copies.merge(copies.address(word, rows, where), rows, where, 64, 4)

    take(shared, own, rows)
    own[1, 0, :, :20] += 1.0
    shared[2] += 10.0  # by others
    merge(1, shared, own, rows)
    expected = before.copy()
    expected[2] += 11.0
    assert shared == pytest.approx(expected)
    assert own[1, 0, 1, :20] == pytest.approx(expected[2])
    assert own[1, 0, 0, :20] == pytest.approx(before[4] + 1.0), "the others keep what they have"
    merge(1, shared, own, rows)
    assert shared == pytest.approx(expected), "nothing is given twice"


@pytest.mark.parametrize("model", MODELS)
def test_texts_without_pairs_change_nothing(model: str) -> None:
    for tokens in ([], [-1, -1], [2], [-1, 2, -1, 3, -1]):
        inputs, outputs = matrices(5, 16)
        before = inputs.copy(), outputs.copy()
        loss, pairs, words = call(model, tokens, inputs, outputs)
        assert (loss, pairs, words) == (0, 0, sum(token >= 0 for token in tokens))
        assert np.array_equal(inputs, before[0])
        assert np.array_equal(outputs, before[1])


def test_subsampling_keeps_the_given_fraction() -> None:
    tokens = np.tile(np.array([0, 1, 2, -1], np.int32), 20_000)
    kept = np.empty_like(tokens)
    keep = np.array([1.0, 0.3, 0.0], np.float32)
    count, words = sampling.subsample(tokens, keep, np.array([5], np.uint64), kept)
    found = np.bincount(kept[:count] + 1, minlength=4)
    assert words == 60_000
    assert found.tolist()[:2] == [20_000, 20_000]
    assert found[2] == pytest.approx(6_000, abs=350)  # five deviations
    assert found[3] == 0


def test_sums_of_sixteen_vectors() -> None:
    from numba import njit

    rows = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    result = np.empty(16, np.float32)

    @njit
    def add_up(rows: Any, result: Any) -> None:
        at = simd.address_of(rows)
        a, b, c = simd.load(at, None), simd.load(at + 64, None), simd.load(at + 128, None)
        total = simd.sums((a, b, c, simd.load(at + 192, None), simd.load(at + 256, 9)))
        simd.store(simd.address_of(result), total, None)

    add_up(rows, result)
    expected = [*rows[:4].sum(axis=1), rows[4, :9].sum(), *[0] * 11]
    assert result == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("copied", [0, 40])
@pytest.mark.parametrize("model", MODELS)
def test_words_of_the_same_contexts_become_similar(model: str, copied: int) -> None:
    """Sixty words in two groups that never meet; two threads train the same matrices."""
    random = np.random.default_rng(0)
    circles = random.integers(0, 2, 6_000)
    text = np.concatenate([[*random.integers(0, 30, 8) + 30 * circle, -1] for circle in circles])
    inputs, outputs = (0.1 * matrix for matrix in matrices(60, 16))
    noise = np.arange(60, dtype=np.uint64)

    def learn(part: Any, seed: int, lr: float = 0.05) -> float:
        loss, pairs, own = 0.0, 0.0, copies.allocate(copied, 16)
        for start in range(0, len(part), 900):
            one = call(
                *(model, part[start : start + 900], inputs, outputs),
                noise=noise,
                window=4,
                negative=5,
                lr=lr,
                seed=seed + start,
                own=own,
            )
            loss, pairs = loss + one[0], pairs + one[1]
        return loss / pairs

    before = learn(text, 0, lr=1e-9)
    halves = np.array_split(text, 2)
    threads = [
        threading.Thread(target=learn, args=(half, i << 32)) for i, half in enumerate(halves)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    # What all have in common says nothing: half of the words drawn are of the right circle.
    apart = inputs - inputs.mean(axis=0)
    unit = apart / np.linalg.norm(apart, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -1)
    assert np.array_equal(cosines.argmax(axis=1) // 30, np.arange(60) // 30)
    assert cosines[:30, :30].mean() > cosines[:30, 30:].mean() + 1.0
    assert before == pytest.approx(6 * np.log(2), rel=0.02)  # six guesses, not knowing anything
    assert learn(text, 0, lr=1e-9) < 0.6 * before
