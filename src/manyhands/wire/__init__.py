"""Bytes between members: frames, links that carry them, and the TLS around the links."""

from manyhands.wire.frames import Limits, Message
from manyhands.wire.link import Address, Link, Listener, connect, parse_address
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
