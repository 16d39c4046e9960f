"""Signals while a lab exists: none may leave parts of it behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""By default they end a process at once. Ctrl-C raises an exception anyway."""


class CleanupOnSignal:
    """Cleans up when SIGTERM or SIGHUP arrives, then lets the signal end this process as usual.

    If the program has its own handler, that one decides: it may raise and so leave the lab, or not end
    at all. Only the main thread can handle signals; in other threads this does nothing.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        if not _in_main_thread():
            return
        for number in ENDING:
            before = signal.getsignal(number)
            if before is signal.SIG_DFL or isinstance(before, CleanupOnSignal):
                self._before[number] = before
                signal.signal(number, self)

    def stop(self) -> None:
        self._act = None  # a later instance may still have this one as its predecessor
        if _in_main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) is self:
                    signal.signal(number, before)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        try:
            if self._act is not None:
                self._act()
        finally:
            before = self._before[number]
            if isinstance(before, CleanupOnSignal):
                before(number, frame)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer signals that would end or interrupt this process until after the block."""
    if not _in_main_thread():
        yield
        return
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    # A handler that Python does not know (None) could not be restored.
    before = {n: h for n, h in handlers.items() if h not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(received):
            signal.raise_signal(late)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
