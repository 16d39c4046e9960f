"""Threads that compute in turn, each with random numbers of its own."""

from __future__ import annotations

import time

import torch

from manyhands.testing.thread_members import Baton
from manyhands.threads import fail_process, start_thread

ROUNDS = 20


def draw(baton: Baton, seed: int, found: dict[int, list[float]]) -> None:
    """Draw numbers, and give others the baton in between."""
    with baton.held():
        torch.manual_seed(seed)
        for _ in range(ROUNDS):
            found.setdefault(seed, []).append(float(torch.rand(())))
            with baton.released():
                time.sleep(0.001)
    for _ in range(ROUNDS):
        with baton.held():
            found[seed].append(float(torch.rand(())))


def test_threads_do_not_share_random_numbers() -> None:
    seeds, expected, found = range(4), {}, {}
    before = torch.get_rng_state()
    try:
        for seed in seeds:
            draw(Baton(), seed, expected)
        baton = Baton()
        threads = [
            start_thread(draw, baton, seed, found, name=f"draw-{seed}", on_error=fail_process)
            for seed in seeds
        ]
        for thread in threads:
            thread.join()
    finally:
        torch.set_rng_state(before)
    assert found == expected


def test_a_thread_that_has_the_baton_may_ask_for_it_again() -> None:
    baton = Baton()
    with baton.held(), baton.held(), baton.released():
        with baton.released():  # it has given it away already
            pass
        with baton.held():
            pass
