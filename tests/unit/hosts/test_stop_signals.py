"""Which signals are heard."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from manyhands.hosts.stop_signals import STOP_SIGNALS, on_stop_signals, signals_restored


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_signals_ignored_by_nohup_stay_ignored() -> None:
    """It does nothing but ignore SIGHUP before the command begins."""
    heard: list[int] = []
    for before in (signal.SIG_IGN, signal.SIG_DFL):
        heard.clear()
        signal.signal(signal.SIGHUP, before)
        on_stop_signals(lambda number, _: heard.append(number))
        for number in STOP_SIGNALS:
            signal.raise_signal(number)
        ignored = [signal.SIGHUP] if before == signal.SIG_IGN else []
        assert heard == [number for number in STOP_SIGNALS if number not in ignored]


@pytest.mark.usefixtures("handlers")
def test_handlers_are_restored_after_a_training() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with signals_restored():
        on_stop_signals(lambda number, _: None)
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


@pytest.mark.usefixtures("handlers")
def test_another_thread_changes_no_handler() -> None:
    """Python allows it in the main thread alone."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    during: list[object] = []

    def train() -> None:
        with signals_restored():
            on_stop_signals(lambda number, _: None)
            during.append({number: signal.getsignal(number) for number in STOP_SIGNALS})

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(10)
    assert during == [before]
