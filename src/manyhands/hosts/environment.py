"""`MANYHANDS_<OPTION>` stands for a flag that was not given: flag > environment > default.

What launchers such as torchrun say of who this process is, the readers in `specs/` read.
"""

from __future__ import annotations

import os

PREFIX = "MANYHANDS_"


def option(name: str) -> str | None:
    """Return the environment's value for a flag: `run_dir` is MANYHANDS_RUN_DIR."""
    return os.environ.get(PREFIX + name.upper()) or None
