"""How many bytes processes really sent, by the kernel's count (Linux, from 4.19)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest


def tcp_bytes_sent(pids: Sequence[int]) -> int:
    """Payload bytes sent over the TCP connections that these processes hold now."""
    if shutil.which("ss") is None:
        pytest.skip("the kernel's count of bytes is read with ss, of the package iproute2")
    text = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    total = 0
    for entry in re.split(r"\n(?=\S)", text):
        owners = {int(pid) for pid in re.findall(r"pid=(\d+)", entry)}
        if owners & set(pids) and (sent := re.search(r"bytes_sent:(\d+)", entry)):
            total += int(sent.group(1))
    return total
