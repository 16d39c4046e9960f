"""Names and addresses of the parts of a lab. Pure.

All are derived from the lab's number and its number of hosts, so they can be found again after the owner
is gone.

Addresses are 198.18.LAB.HOST, a range reserved for network tests, which no real network uses. Labs can't
reach each other anyway; different addresses make clear in a log which lab was meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from manyhands.errors import UsageError, closest

MAX_LABS = 256
MAX_HOSTS = 250
INTERFACE = "eth0"
"""The interface of every host, connected to the switch."""
SWITCH = "switch"
"""The bridge, and the namespace that it is in."""
NOWHERE = "02:00:00:00:00:00"
"""An unused Ethernet address: the switch drops what is sent there."""

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
FRAME_BYTES = 1_514
MIN_BITS, MAX_BITS = 10**4, 10**11
BURST_S = 0.004
"""Burst that may pass after a pause, so that the kernel's timer need not fire for every frame."""
QUEUE_S = 0.05
"""Data that a link queues before it drops packets."""


@dataclass(frozen=True)
class LabLayout:
    number: int
    """The lab's number on this machine."""
    num_hosts: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"host-{index}" for index in range(self.num_hosts))

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The hosts' namespaces, as `ip netns` lists them."""
        return tuple(f"{self._prefix}{name}" for name in self.names)

    @property
    def switch(self) -> str:
        """The namespace of the switch."""
        return f"{self._prefix}{SWITCH}"

    @property
    def _prefix(self) -> str:
        return f"manyhands-{self.number}-"

    def address(self, index: int) -> str:
        return f"198.18.{self.number}.{index + 1}"

    def hardware_address(self, index: int) -> str:
        return f"02:00:00:00:{self.number:02x}:{index + 1:02x}"

    def port(self, index: int) -> str:
        """Return the switch's end of a host's link."""
        return f"port-{index}"

    def index(self, name: str) -> int:
        if name not in self.names:
            there = f"host-0 to {self.names[-1]}" if self.num_hosts > 1 else "host-0"
            raise UsageError(
                f"Lab {self.number} has no host {name!r}{closest(name, self.names)} "
                f"There is {there}."
            )
        return self.names.index(name)

    def hosts_file(self) -> str:
        """Return the contents of /etc/hosts on each host."""
        lines = ["127.0.0.1 localhost"]
        for index, name in enumerate(self.names):
            lines.append(f"{self.address(index)} {name}")
            # The same host as an IPv6 socket sees it, for reverse lookups, which torch does.
            lines.append(f"::ffff:{self.address(index)} {name}.lab")
        return "\n".join(lines) + "\n"


def check_hosts(hosts: int) -> int:
    if not 1 <= hosts <= MAX_HOSTS:
        raise UsageError(f"A lab of {hosts} hosts is not possible: it can have 1 to {MAX_HOSTS}.")
    return hosts


def parse_bandwidth(text: str) -> int:
    """Parse `100mbit` into bits per second."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmg]bit)(?:/s)?", text.strip().lower())
    if match is None:
        raise UsageError(
            f"Bandwidth {text!r} can't be read: write a number and kbit, mbit or gbit (bits per "
            "second), such as 100mbit or 1.5gbit."
        )
    bits = int(Fraction(match[1]) * UNITS[match[2]])
    if not MIN_BITS <= bits <= MAX_BITS:
        raise UsageError(f"Bandwidth {text!r}: a lab's links carry between 10kbit and 100gbit.")
    return bits


def bandwidth_text(bits: int | None) -> str:
    """100000000 is "100mbit"."""
    if bits is None:
        return "unlimited bandwidth"
    unit = max((unit for unit in UNITS if bits >= UNITS[unit]), key=UNITS.__getitem__)
    return f"{bits / UNITS[unit]:.10g}{unit}"


def shaping(bits: int) -> str:
    """Return the arguments of `tc` for a link of that bandwidth: a token bucket filter."""
    burst = max(int(bits / 8 * BURST_S), 3 * FRAME_BYTES)
    limit = burst + max(int(bits / 8 * QUEUE_S), 50 * FRAME_BYTES)
    return f"tbf rate {bits}bit burst {burst}b limit {limit}b"
