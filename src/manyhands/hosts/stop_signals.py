"""The signals that ask a command to stop: Ctrl-C, a scheduler's SIGTERM or SIGUSR1, a hang-up.

Python allows handlers in the main thread alone: in any other thread, these functions do nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def on_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call `handler` for each of them; but an ignored SIGHUP stays ignored, which is all that nohup does."""
    if not _in_main_thread():
        return
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def signals_restored() -> Iterator[None]:
    """Restore the handlers of these signals at the end of the block: they belong to the program around a
    training."""
    if not _in_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it was not installed from Python, and can't be restored
                signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
