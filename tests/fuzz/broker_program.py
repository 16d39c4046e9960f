"""A broker that prints the lines of a file, for test_ray_broker.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.stdin.readline()
    sys.stdout.write(Path(os.environ["FUZZ_LINES"]).read_text())
    sys.stdout.flush()
    sys.stdin.read()
