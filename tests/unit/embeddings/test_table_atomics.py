"""Atomic operations on shared memory."""

from __future__ import annotations

import threading

import numpy as np
from numba import njit

from manyhands.embeddings.atomics import add, lowest, match, swap

TIMES = 400_000


@njit(nogil=True)
def adds(numbers: np.ndarray, times: int) -> None:
    for _ in range(times):
        add(numbers, 3, 2)


@njit(nogil=True)
def swaps(numbers: np.ndarray, times: int) -> None:
    for _ in range(times):
        while True:
            old = numbers[3]
            if swap(numbers, 3, old, old + 1) == old:
                break


def test_concurrent_add_and_swap_lose_nothing() -> None:
    for work, each in ((adds, 2), (swaps, 1)):
        for kind in (np.int64, np.uint32):
            numbers = np.zeros(8, dtype=kind)
            work(numbers, 0)
            membership = [threading.Thread(target=work, args=(numbers, TIMES)) for _ in range(4)]
            for one in membership:
                one.start()
            for one in membership:
                one.join()
            assert numbers.tolist() == [0, 0, 0, 4 * TIMES * each, 0, 0, 0, 0]


@njit
def swapped(numbers: np.ndarray, index: int, old: int, new: int) -> int:
    return swap(numbers, index, old, new)  # type: ignore[no-any-return]


@njit
def matched(entries: np.ndarray, index: int, half: int) -> tuple[int, int]:
    found = match(entries, index, half)
    return found, lowest(found) if found else -1


def test_swap_returns_the_old_value_and_compares_it() -> None:
    numbers = np.array([5, 6, 7], dtype=np.int64)
    assert swapped(numbers, 1, 6, -9) == 6
    assert swapped(numbers, 1, 6, 1) == -9
    assert numbers.tolist() == [5, -9, 7]


def test_match_finds_equal_upper_halves() -> None:
    halves = np.array([9, 1, 2, 0xFFFF_FFFF, 2, 5, 2, 0, 8, 2], dtype=np.uint64)
    entries = (halves << np.uint64(32)) | np.arange(10, dtype=np.uint64)
    assert matched(entries, 1, 2) == (0b101010, 1)
    assert matched(entries, 0, 0xFFFF_FFFF) == (0b1000, 3)
    assert matched(entries, 1, 77) == (0, -1)
