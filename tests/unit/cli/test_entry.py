"""Ctrl-C before anything has begun: one line and 130, no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = "print('importing', flush=True)\nimport time\ntime.sleep(60)\n"


@pytest.mark.parametrize("module", ["argparse", "fcntl"])
@pytest.mark.parametrize("program", ["manyhands", "manyhands.cli.entry"])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, module: str, program: str) -> None:
    """One that the command line imports at once, and one that only its verb imports."""
    (tmp_path / f"{module}.py").write_text(SLOW)  # found first, for it is in the working folder
    command = [sys.executable, "-m", program, "list"]
    if program == "manyhands.cli.entry":  # as the installed script calls it
        command[1:3] = ["-c", "import sys; from manyhands.cli.entry import main; sys.exit(main())"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "stopped by Ctrl-C\n")
