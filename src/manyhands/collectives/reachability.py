"""What the workers of a view exchange through their store before torch connects them.

Each tells all others something and hears what they tell (`tell_all`). If peers were lost lately though
nobody had died, they first try whether each reaches each (`try_ways`): gloo would wait for half a minute,
deaf, and then not say who it was that was not there.
"""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from manyhands.errors import ViewChanging

if TYPE_CHECKING:
    import torch.distributed as dist

    from manyhands.hosts.me import Me
    from manyhands.hosts.view import View

WAY_S = 3.0
"""Time to connect; after it the peer counts as unreachable."""
AT_ONCE = 16


class Unreachable(RuntimeError):
    """Another worker of the view is alive and can't be reached."""


def tell_all(store: dist.Store, me: Me, view: View, what: str, text: str) -> list[str]:
    """Return what all workers announced, in rank order, once all have; or raise ViewChanging."""
    store.set(f"{what}/{me.rank}", text)
    everybody = [f"{what}/{rank}" for rank in range(view.world)]
    deadline = time.monotonic() + me.timeouts.view_s
    while not store.check(everybody):
        if me.view_changing:
            raise ViewChanging(f"view {me.newest_view} is coming")
        if time.monotonic() > deadline:
            raise me.lost_a_peer(TimeoutError(f"not all came within {me.timeouts.view_s:.0f} s"))
        time.sleep(0.003)
    return [store.get(key).decode() for key in everybody]


def try_ways(store: dist.Store, me: Me, view: View) -> None:
    """Returns if each reaches each. One who does not reach another gets Unreachable; the rest wait for the
    view that will come of it."""
    with socket.create_server((me.address, 0), backlog=view.world) as door:
        port = door.getsockname()[1]
        doors = tell_all(store, me, view, "door", f"{me.address} {port}")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            reached = list(pool.map(_reached, doors))
        closed = [rank for rank, fine in enumerate(reached) if not fine]
        told = tell_all(store, me, view, "closed", json.dumps(closed))
    if closed:
        raise Unreachable(f"connection timed out: {doors[closed[0]]}")
    if any(json.loads(text) for text in told):
        error = Unreachable("two others do not reach each other")
        me.wait_for_a_view(error, torn_s=me.timeouts.view_s)
        raise ViewChanging(str(error))


def _reached(door: str) -> bool:
    address, port = door.split()
    try:
        socket.create_connection((address, int(port)), timeout=WAY_S).close()
    except OSError:
        return False
    return True
