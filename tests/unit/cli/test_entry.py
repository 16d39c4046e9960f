"""Signals at the very start and end of a command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def test_ctrl_c_after_the_end_is_ignored() -> None:
    """Standard output is a pipe, flushed by Python at shutdown: its line shows that the command is done."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    codes = []
    for delay_ms in (0, 1, 2, 5, 10):
        with subprocess.Popen(
            [sys.executable, "-m", "manyhands", "key"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            time.sleep(delay_ms / 1000)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == (b"", b"")
            codes.append(process.returncode)
    assert codes == [0] * 5
