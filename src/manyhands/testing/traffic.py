"""How many bytes processes really sent, by the kernel's count (Linux, from 4.19)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence


def tcp_bytes_sent(pids: Sequence[int]) -> int:
    """Payload bytes sent over the TCP connections that these processes hold now."""
    text = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    total = 0
    for entry in re.split(r"\n(?=\S)", text):
        owners = {int(pid) for pid in re.findall(r"pid=(\d+)", entry)}
        if owners & set(pids) and (sent := re.search(r"bytes_sent:(\d+)", entry)):
            total += int(sent.group(1))
    return total
