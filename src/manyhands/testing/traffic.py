"""The number of bytes that processes have sent, as counted by the kernel (Linux 4.1 or later)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest


def tcp_bytes_sent(pids: Sequence[int]) -> int:
    """Return the payload bytes written to the open TCP connections of these processes: acknowledged, or still
    queued. What TCP sends again counts once."""
    if shutil.which("ss") is None:
        pytest.skip("ss, of the package iproute2, is needed to read the kernel's count of bytes")
    text = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    total = 0
    for entry in re.split(r"\n(?=\S)", text):
        owners = {int(pid) for pid in re.findall(r"pid=(\d+)", entry)}
        if owners & set(pids):
            _state, _to_read, queued, *_ = entry.split()
            acknowledged = re.search(r"bytes_acked:(\d+)", entry)
            total += int(queued) + (int(acknowledged.group(1)) if acknowledged else 0)
    return total
