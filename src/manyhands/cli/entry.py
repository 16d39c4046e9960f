"""The entry point. It imports almost nothing, so that Ctrl-C works while the rest is imported."""

from __future__ import annotations

import os
import signal


def main() -> int:
    """Run the command line, and return its exit code."""
    # Where SIGINT is ignored, as in a background job of a script, it stays ignored.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    from manyhands.cli.main import main

    code = main()
    # Python removes its handlers while it shuts down: a late Ctrl-C would kill a command that has finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def stop(number: int, frame: object) -> None:
    """Exit at once. Nothing has started yet, and an exception would print a traceback."""
    os.write(2, b"stopped by Ctrl-C\n")
    os._exit(130)
