"""Bytes between members: frames, links that carry them, and the TLS around the links."""

from manyhands.wire.address import Address, parse_address
from manyhands.wire.frames import Limits, Message
from manyhands.wire.link import Link, connect
from manyhands.wire.listener import Listener
from manyhands.wire.tls import Authority, Credentials

__all__ = [
    "Address",
    "Authority",
    "Credentials",
    "Limits",
    "Link",
    "Listener",
    "Message",
    "connect",
    "parse_address",
]
