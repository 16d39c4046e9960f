"""Waits for a store or for connections can be interrupted, and end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from manyhands.collectives.store_gather import gather, interruptible

LONG_S = 30.0


class Interrupted(Exception):
    pass


def never() -> None:
    return


@contextmanager
def silent() -> Iterator[threading.Event]:
    """Yield something that blocks until the test is over, as a store does whose host is gone."""
    over = threading.Event()
    yield over
    over.set()


def test_results_and_errors_are_handed_on() -> None:
    assert interruptible(lambda: 7, timeout_s=LONG_S, check=never) == 7
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0, timeout_s=LONG_S, check=never)


def test_a_call_that_never_returns_has_a_deadline() -> None:
    with silent() as store, pytest.raises(TimeoutError, match="longer than 0 s"):
        interruptible(lambda: store.wait(LONG_S), timeout_s=0.05, check=never)


def test_a_call_that_never_returns_can_be_interrupted() -> None:
    def check() -> None:
        raise Interrupted

    with silent() as store, pytest.raises(Interrupted):
        interruptible(lambda: store.wait(LONG_S), timeout_s=LONG_S, check=check)


def test_all_texts_are_gathered_in_rank_order() -> None:
    store = dist.HashStore()
    store.set("what/1", "second")
    texts = gather(store, "what", "first", rank=0, size=2, timeout_s=LONG_S, check=never)
    assert texts == ["first", "second"]


def test_waiting_for_a_missing_text_ends() -> None:
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match="not all workers joined within 0 s"):
        gather(store, "what", "first", rank=0, size=2, timeout_s=0.05, check=never)
