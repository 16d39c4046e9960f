"""Addresses of links, and which of them need credentials.

An address is `unix:/path/to/socket` or `tcp://host:port`. A unix socket trusts processes of the same user,
which the kernel reports; TCP needs credentials, the run's secret, or insecure=True in a private
network.

Cost: one system call per unix connection.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
from dataclasses import dataclass

from manyhands.errors import UsageError
from manyhands.transport.tls import Credentials

MAX_UNIX_PATH = 107
"""The kernel has 108 bytes for the path of a unix socket, including the final zero."""


@dataclass(frozen=True)
class Address:
    path: str = ""
    """Of a unix socket; empty for TCP."""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the parts of `unix:/path/to/socket` or `tcp://host:port` (port 0: any free one)."""
    if match := re.fullmatch(r"unix:(/[^\0]+)", text):
        path = match[1]
        if len(os.fsencode(path)) > MAX_UNIX_PATH:
            raise UsageError(
                f"The path of the unix socket {path} has {len(os.fsencode(path))} bytes, and the "
                f"kernel allows {MAX_UNIX_PATH}: choose a shorter folder, such as one in /tmp."
            )
        return Address(path=path)
    match = re.fullmatch(r"tcp://(?:\[([^\[\]]+)\]|([^\[\]:/\s]+)):([0-9]{1,5})", text)
    if match and int(match[3]) <= 65535:
        return Address(host=match[1] or match[2], port=int(match[3]))
    raise UsageError(
        f"{text!r} is not an address. Write unix:/path/to/socket (an absolute path) or "
        "tcp://host:port, with an IPv6 host in brackets: tcp://[::1]:5000; ports end at 65535."
    )


def check_trust(
    where: Address, *, credentials: Credentials | None, secret: str | None, insecure: bool
) -> None:
    if credentials is not None and secret is not None:
        raise ValueError("Give credentials= (TLS) or secret= (a proof without TLS), not both.")
    if secret == "":
        # Not the same as None: a link that should be authenticated would be open.
        raise ValueError("The secret is empty. Give one such as secrets.token_hex(32), or None.")
    if not (where.path or credentials or secret or insecure):
        raise UsageError(
            f"{where} without credentials would be open to anyone in the network. Give "
            "credentials=authority.issue(name), or secret= where encryption is not needed, or "
            "insecure=True in a network that is private, or use unix:/path/to/socket within one "
            "host."
        )


def check_owner(sock: socket.socket) -> int:
    """Return the process at the other end of a unix socket, which must belong to the same user."""
    kind = struct.Struct("3i")
    pid, uid, _ = kind.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, kind.size))
    if uid != os.getuid():
        raise PermissionError(errno.EPERM, f"process {pid} is of user {uid}, not of {os.getuid()}")
    return int(pid)
