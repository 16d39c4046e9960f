"""A worker's connection to a server: what it counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from manyhands.ps.server_connection import ServerConnection


def link(bytes_sent: int) -> Any:
    return cast(Any, SimpleNamespace(bytes_sent=bytes_sent))


def test_bytes_sent_do_not_fall_while_a_lost_link_is_replaced() -> None:
    """The coordinator refuses a report of a negative number, and ends the worker that sent it."""
    server = ServerConnection("server-0", link(100))
    counts = [server.bytes_sent]
    server.sent_before = server.bytes_sent
    server.returning = True
    counts.append(server.bytes_sent)
    server.link, server.returning = link(0), False
    counts.append(server.bytes_sent)
    server.link.bytes_sent = 7
    counts.append(server.bytes_sent)
    assert counts == [100, 100, 100, 107]
