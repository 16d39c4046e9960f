"""Ports that tests name before anything listens on them."""

from __future__ import annotations

import socket
import subprocess
import sys

from manyhands.testing.ports import RANGE, reserve_port

MANY = """
import sys
from manyhands.testing.ports import reserve_port
print(*(reserve_port() for _ in range(200)), flush=True)
sys.stdin.read()
"""


def test_no_port_is_reserved_twice() -> None:
    """Neither by several processes at once, nor by the kernel for port 0."""
    others = [
        subprocess.Popen(
            [sys.executable, "-c", MANY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    ports = [reserve_port() for _ in range(200)]
    for other in others:
        assert other.stdout is not None
        ports += map(int, other.stdout.readline().split())
    for other in others:
        other.communicate(timeout=30)
    assert len(ports) == len(set(ports)) == 600
    low, high = map(int, RANGE.read_text().split())
    assert not [port for port in ports if low <= port <= high]
    with socket.create_server(("127.0.0.1", ports[0])):
        pass
