"""What an all-reduce of a group costs, in a network and inside a host. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from manyhands.costs import CostFacts, MemoryUse, Transfer, ring
from manyhands.hosts.view import View, shares_memory

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
    workers = [seat.name for seat in view.workers]
    if transport == "tcp" or not shares_memory(view):
        yield from ring(workers, num_bytes, what, after=after)
        return
    # A span of the tensor for each worker: it reads those of the others, and writes their sums.
    each = num_bytes if num_bytes <= SMALL_BYTES else round(2 * num_bytes / len(workers))
    for source in workers:
        for to in workers:
            if to != source:
                yield Transfer(source, to, each, what, after, "memory")


def slots(facts: CostFacts, largest: int, *, transport: Transport) -> Iterator[MemoryUse]:
    """Yield the memory through which tensors of at most so many bytes pass inside a host."""
    if facts.hosts == 1 and facts.workers > 1 and not facts.gpu and transport == "auto":
        pages = -(-min(largest, SLOT_BYTES) // PAGE)
        yield MemoryUse("worker", "exchange", NUM_SLOTS * PAGE * pages)
