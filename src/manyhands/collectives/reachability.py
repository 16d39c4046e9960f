"""Checks between the workers of a view, through their store, before torch connects them.

Each worker posts a text and waits for those of all others (`exchange`). If connections were lost recently
though no worker died, all first check that they can connect to each other (`check_connections`): gloo would
wait half a minute, could not be interrupted, and would not name the worker that it can't reach.
"""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from manyhands.collectives.store_gather import gather
from manyhands.errors import ViewChanging

if TYPE_CHECKING:
    import torch.distributed as dist

    from manyhands.hosts.me import Me
    from manyhands.hosts.view import View

WAY_S = 3.0
"""Time to connect; after it the peer counts as unreachable."""
AT_ONCE = 16


class Unreachable(RuntimeError):
    """Another worker of the view is alive but can't be reached."""


def exchange(store: dist.Store, me: Me, view: View, what: str, text: str) -> list[str]:
    """Post a text, and return the texts of all workers in rank order. Raises ViewChanging if a newer view
    comes first."""
    try:
        return gather(
            store,
            what,
            text,
            rank=me.rank,
            size=view.world,
            timeout_s=me.timeouts.view_s,
            check=lambda: check_view(me),
        )
    except TimeoutError as error:
        raise me.lost_a_peer(error) from error


def check_view(me: Me) -> None:
    """Raise ViewChanging if a newer view is coming."""
    if me.view_changing:
        raise ViewChanging(f"view {me.newest_view} is coming")


def check_connections(store: dist.Store, me: Me, view: View) -> None:
    """Check that every worker can connect to every other. A worker that can't reach another raises
    Unreachable; the others wait for the view that follows, and raise ViewChanging."""
    with socket.create_server((me.address, 0), backlog=view.world) as listener:
        port = listener.getsockname()[1]
        endpoints = exchange(store, me, view, "endpoint", f"{me.address} {port}")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            reached = list(pool.map(_reached, endpoints))
        closed = [rank for rank, fine in enumerate(reached) if not fine]
        told = exchange(store, me, view, "closed", json.dumps(closed))
    if closed:
        raise Unreachable(f"connection timed out: {endpoints[closed[0]]}")
    if any(json.loads(text) for text in told):
        error = Unreachable("two other workers can't reach each other")
        me.wait_for_a_view(error, grace_s=me.timeouts.view_s)
        raise ViewChanging(str(error))


def _reached(endpoint: str) -> bool:
    address, port = endpoint.split()
    try:
        socket.create_connection((address, int(port)), timeout=WAY_S).close()
    except OSError:
        return False
    return True
