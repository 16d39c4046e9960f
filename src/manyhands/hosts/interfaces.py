"""Which network interface and address of this host others can reach. Linux, by what the kernel says."""

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
"""Of one entry of that call, where pointers have 8 bytes: 16 of the name, then the address."""
GLOO = "GLOO_SOCKET_IFNAME"
NOWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737): asked for the way there, the kernel tells the way out."""


@dataclass(frozen=True)
class Endpoint:
    """Where others find this host."""

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.interface} ({self.address})"


def addresses() -> dict[str, str]:
    """The addresses of this host, each with its interface."""
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
    """Where others find this host: at `address`, which somebody reaches; or where gloo is told to be."""
    known = addresses()
    if wish := os.environ.get(GLOO, "").partition(",")[0].strip():
        own = [where for where, name in known.items() if name == wish]
        if not own:
            raise UsageError(
                f"{GLOO} is {wish}, and this host ({socket.gethostname()}) has no address on such an "
                f"interface. It has {', '.join(sorted(set(known.values())))}."
            )
        return Endpoint(wish, address if address in own else own[0])
    return Endpoint(known.get(address, "lo"), address)


def way_out() -> str:
    """The address that this host has on its way to the rest of the world; loopback if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((NOWHERE, 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether a name or address always means the own machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_any(host: str) -> bool:
    """Whether it means all addresses of a host."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def own_address(host: str) -> str | None:
    """The address of this machine that a name has, if it is one that others could reach."""
    known = addresses()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        address = str(entry[4][0])
        # A machine may have its own name beside 127.0.1.1 in /etc/hosts: nobody else gets there.
        if address in known and (is_loopback(host) or not is_loopback(address)):
            return address
    return None
