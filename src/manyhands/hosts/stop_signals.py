"""The signals that ask a command to stop: Ctrl-C, a scheduler's SIGTERM or SIGUSR1, a hang-up."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def on_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call `handler` for each of them; but an ignored SIGHUP stays ignored, which is all that nohup does."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
