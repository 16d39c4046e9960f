"""Parameters in buckets, whose gradients are sent together, and buckets in parts. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

NOTES = 2
"""Numbers about a step that go beside the gradients in float64: its weight and its loss. After them is one
for each parameter: on how many workers it has a gradient."""


def in_buckets(parameters: Sequence[tuple[Hashable, int]], *, bucket_bytes: int) -> list[list[int]]:
    """Return the indices of the parameters in each bucket, in the order in which a backward finishes them:
    the last one first. A bucket has one dtype, and is closed once it is full.

    `parameters`: (dtype, bytes) of each.
    """
    buckets: list[list[int]] = []
    size, last = 0, None
    for number in reversed(range(len(parameters))):
        dtype, num_bytes = parameters[number]
        if not buckets or dtype != last or size >= bucket_bytes:
            buckets.append([])
            size, last = 0, dtype
        buckets[-1].append(number)
        size += num_bytes
    return buckets


def part_of(numel: int, *, workers: int) -> int:
    """Return the size of the parts into which a buffer is cut, one for each worker. The last ones may not be
    filled."""
    return -(-numel // workers)
