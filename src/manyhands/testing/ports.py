"""Ports for tests that must name one before anything listens on it.

Use port 0 if the listener itself can choose. A port that was free a moment ago is not safe: the kernel may
assign it to the next socket of any process, also to an outgoing connection. (Of sets of five ports found free
one after another, one in a thousand had a port twice.) So these ports are outside the range that the kernel
assigns from. Among the test processes of a machine, a port is reserved by an abstract unix socket with its
number in the name: such names belong to a network namespace, as ports do, and the kernel frees them when the
process ends.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

LOWEST = 20_000
"""Below are the ports of services, and those that Ray assigns to its workers."""
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def reserve_port() -> int:
    """Return a free TCP port of this machine that no other test process gets while this one lives."""
    low, high = (int(number) for number in RANGE.read_text().split())
    ports = [*range(LOWEST, low), *range(high + 1, 1 << 16)]
    for port in random.sample(ports, len(ports)):
        if _reserved(port) and _is_free(port):
            return port
    raise OSError(errno.EADDRINUSE, f"no free port outside of {low} to {high}, see {RANGE}")


def _reserved(port: int) -> bool:
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0manyhands-test-port-{port}")
    except OSError:
        name.close()
        return False
    name.detach()  # stays open until the process ends
    return True


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False
