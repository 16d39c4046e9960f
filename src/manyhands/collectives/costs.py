"""What an all-reduce of a group costs, in a network and inside a host. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from manyhands.costs import CostFacts, MemoryUse, Transfer, ring
from manyhands.hosts.view import View, reduces_in_hosts

Transport = Literal["auto", "tcp"]
"""`auto`: workers of one host on CPUs reduce in shared memory. `tcp`: never."""

NUM_SLOTS = 16
"""All-reduces in shared memory that may be open at once."""
SLOT_BYTES = 256 << 10
"""Bytes of a tensor that pass through a slot at once."""
PAGE = 4096
SMALL_BYTES = 32 << 10
"""Size up to which each worker reduces the whole tensor by itself."""


def all_reduce(
    view: View, num_bytes: int, what: str, *, transport: Transport, after: float = 1.0
) -> Iterator[Transfer]:
    """Yield the transfers of an all-reduce of all workers."""
    if transport == "tcp" or not reduces_in_hosts(view):
        yield from ring([seat.name for seat in view.workers], num_bytes, what, after=after)
        return
    hosts: dict[str, list[str]] = {}
    for seat in view.workers:
        hosts.setdefault(seat.host, []).append(seat.name)
    leaders = [names[0] for names in hosts.values()]
    for names in hosts.values():
        # A span of the tensor for each worker: it reads those of the others, and they read its sums.
        each = num_bytes if num_bytes <= SMALL_BYTES else round(2 * num_bytes / len(names))
        for source in names:
            for to in names:
                # Of small ones only the leader adds up what travels on.
                direct = (
                    len(hosts) > 1 and num_bytes <= SMALL_BYTES and names[0] not in (source, to)
                )
                if to != source and not direct:
                    yield Transfer(source, to, each, what, after, "memory")
    yield from ring(leaders, num_bytes, what, after=after)


def sharing(
    facts: CostFacts, largest: int, *, allocated: int, transport: Transport
) -> Iterator[MemoryUse]:
    """Yield the memory through which workers of one host reduce, besides their tensors.

    Args:
        largest: Bytes of the largest tensor that passes through slots.
        allocated: Bytes of a worker's memory from `Group.allocate`.
    """
    if facts.workers <= facts.hosts or facts.gpu or transport == "tcp":
        return
    pages = -(-min(largest, SLOT_BYTES) // PAGE)
    yield MemoryUse("worker", "exchange", NUM_SLOTS * PAGE * pages)
    if facts.hosts > 1:
        yield MemoryUse("host", "sums of a host", allocated + NUM_SLOTS * PAGE * pages)
