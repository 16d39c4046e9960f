"""Sums buffers over all workers in encoded form, with every hop encoded.

    exchange.begin(flat)      as soon as a buffer is complete, in the same order on all workers
    exchange.finish()         all buffers hold the sums

A buffer is cut into one part per worker:

1. each worker encodes its numbers and sends part r to rank r (all-to-all), while backward goes on;
2. rank r decodes what it got, adds it up in float32 in rank order, and encodes the sum;
3. all workers get the encoded sums of all parts (all-gather), and decode them.

All workers decode the same bytes, so they have the same bits, and as sums have one order, so have two runs.
The own numbers of a worker are encoded as all others are. Each number is rounded twice: before the sum and
after it.

Cost per worker: 2 (n-1)/n of the encoded bytes, in 2 (n-1) messages per buffer. Only the first half can be
hidden by the backward. Until the end of the step, twice the encoded bytes in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.codecs.codec import Codec
from manyhands.collectives.buckets import part_of
from manyhands.collectives.group import Group, Work


@dataclass
class _Pending:
    """A buffer on its way."""

    flat: Tensor
    sent: Tensor
    """Encoded, kept until it has been sent; what is received next."""
    received: Tensor
    """Encoded, one row per worker."""
    work: Work


class CompressedExchange:
    """Sums buffers over the workers of a group, encoded by a codec."""

    def __init__(self, group: Group, codec: Codec) -> None:
        self._group = group
        self._codec = codec
        self._pending: list[_Pending] = []

    def begin(self, flat: Tensor) -> None:
        if not flat.numel():
            return
        # What an error feedback would add to the next step's numbers is lost here.
        sent = self._codec.encode(self._parts(flat))
        received = torch.empty_like(sent)
        work = self._group.all_to_all(sent, into=received, async_op=True)
        self._pending.append(_Pending(flat, sent, received, work))

    def finish(self) -> None:
        pending, self._pending = self._pending, []
        for each in pending:
            each.work.wait()
            each.sent = self._codec.encode(self._sum(each))
            each.received = torch.empty_like(each.received)
            each.work = self._group.all_gather(each.sent, into=each.received, async_op=True)
        for each in pending:
            each.work.wait()
            numbers = self._codec.decode(each.received, self._part(each.flat))
            each.flat.copy_(numbers.reshape(-1)[: each.flat.numel()])

    def _sum(self, arrived: _Pending) -> Tensor:
        """Return the sum of this worker's part, as one row."""
        rows = self._codec.decode(arrived.received, self._part(arrived.flat))
        total = rows[:1]
        for rank in range(1, len(rows)):
            total = total + rows[rank]
        return total

    def _parts(self, flat: Tensor) -> Tensor:
        """Return a float32 copy with one row per worker; the last one is filled up with zeros."""
        part, size = self._part(flat), self._group.size
        rows = torch.zeros(size * part, dtype=torch.float32, device=flat.device)
        rows[: flat.numel()] = flat
        return rows.view(size, part)

    def _part(self, flat: Tensor) -> int:
        return part_of(flat.numel(), workers=self._group.size)
