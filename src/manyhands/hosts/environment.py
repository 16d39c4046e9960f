"""`MANYHANDS_<OPTION>` stands for a flag that was not given: flag > environment > default.

Variables in which torchrun and other launchers describe the cluster are read in `discovery/`.
"""

from __future__ import annotations

import os

PREFIX = "MANYHANDS_"


def option(name: str) -> str | None:
    """Return the environment's value for a flag: `run_dir` is MANYHANDS_RUN_DIR."""
    return os.environ.get(PREFIX + name.upper()) or None
