"""Connections between members: links that carry messages, TLS, authentication, and typed messages."""

from manyhands.transport.address import Address, parse_address
from manyhands.transport.connect import connect
from manyhands.transport.link import Limits, Link, Received
from manyhands.transport.listener import Listener
from manyhands.transport.tls import Authority, Credentials

__all__ = [
    "Address",
    "Authority",
    "Credentials",
    "Limits",
    "Link",
    "Listener",
    "Received",
    "connect",
    "parse_address",
]
