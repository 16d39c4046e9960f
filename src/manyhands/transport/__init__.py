"""Bytes between members: frames, links that carry them, and the TLS around the links."""

from manyhands.transport.address import Address, parse_address
from manyhands.transport.frames import Limits, Message
from manyhands.transport.link import Link, connect
from manyhands.transport.listener import Listener
from manyhands.transport.tls import Authority, Credentials

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
