"""Finds the network interface and address at which other hosts reach this one, from the kernel (Linux)."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass

from manyhands.errors import UsageError

SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40
"""Size of one entry of that call with 8-byte pointers: 16 bytes of name, then the address."""
GLOO = "GLOO_SOCKET_IFNAME"
NOWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the kernel's route to it is the default route."""


@dataclass(frozen=True)
class Endpoint:
    """An interface of this host, and its address there."""

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.interface} ({self.address})"


def addresses() -> dict[str, str]:
    """Return the addresses of this host, mapped to their interfaces."""
    found = {}
    room = array.array("B", bytes(IFREQ_BYTES * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("iL", len(room), room.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(sock, SIOCGIFCONF, asked))[0]
    for at in range(0, used, IFREQ_BYTES):
        entry = room[at : at + IFREQ_BYTES].tobytes()
        name = entry[:16].split(b"\0", 1)[0].decode().partition(":")[0]
        found[socket.inet_ntoa(entry[20:24])] = name
    try:
        with open("/proc/net/if_inet6") as file:
            for line in file:
                digits, *_, name = line.split()
                found[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    except FileNotFoundError:
        pass  # a kernel without IPv6
    return found


def reach(address: str) -> Endpoint:
    """Return where others reach this host: at `address`, which has reached another host, or on gloo's
    interface."""
    known = addresses()
    if chosen := os.environ.get(GLOO, "").partition(",")[0].strip():
        own = [where for where, name in known.items() if name == chosen]
        if not own:
            raise UsageError(
                f"{GLOO} is {chosen}, and this host ({socket.gethostname()}) has no address on such an "
                f"interface. It has {', '.join(sorted(set(known.values())))}."
            )
        return Endpoint(chosen, address if address in own else own[0])
    return Endpoint(known.get(address, "lo"), address)


def way_out() -> str:
    """Return the address of this host on its default route; loopback if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((NOWHERE, 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return whether a name or address always means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_any(host: str) -> bool:
    """Return whether it means all addresses of a host."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def own_address(host: str) -> str | None:
    """Return the address of this machine behind a name, if others could reach it."""
    known = addresses()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        address = str(entry[4][0])
        # /etc/hosts may map a machine's own name to 127.0.1.1, which no other host reaches.
        if address in known and (is_loopback(host) or not is_loopback(address)):
            return address
    return None
