"""Where the command begins. Imports almost nothing, so that Ctrl-C is answered while the rest is imported."""

from __future__ import annotations

import os
import signal


def main() -> int:
    """`manyhands`, as it was typed; the exit code."""
    # Not where SIGINT is ignored, as in a background job of a script: that stays so.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    from manyhands.cli.main import main

    code = main()
    # While Python shuts down its handlers are gone: a late Ctrl-C would kill a command that is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def stop(number: int, frame: object) -> None:
    """End at once. Nothing was begun, and an exception would be shown with its traceback."""
    os.write(2, b"stopped by Ctrl-C\n")
    os._exit(130)
