"""Signals while a lab is there: none may leave parts of it behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""They end a process without a word, unless it listens. Ctrl-C is an exception anyway."""


class LastWords:
    """Does something before SIGTERM or SIGHUP ends this process, as they would have without.

    Where the program has a handler of its own, that one decides: it may raise and so leave the
    lab, or not end at all. Only the main thread may listen to signals; elsewhere nothing is done.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        if not _in_main_thread():
            return
        for number in ENDING:
            before = signal.getsignal(number)
            if before is signal.SIG_DFL or isinstance(before, LastWords):
                self._before[number] = before
                signal.signal(number, self)

    def stop(self) -> None:
        self._act = None  # where a later one has us as what was before
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
            if isinstance(before, LastWords):
                before(number, frame)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that would end this process, or interrupt it, come after the block."""
    if not _in_main_thread():
        yield
        return
    heard: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    # What Python does not know the handler of (None), it could not put back.
    before = {n: h for n, h in handlers.items() if h not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(heard):
            signal.raise_signal(late)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
