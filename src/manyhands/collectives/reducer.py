"""Sums the gradients of all workers, bucket by bucket, while backward runs.

    reducer.begin()
    with reducer.alone(): ...       backward of all micro-batches but the last
    reducer.note(weight, loss)      summed in float64, beside the gradients
    ...                             backward of the last one: a bucket is sent as soon as it is complete
    reducer.finish()                every gradient is the sum over all workers

Gradients are in flat buckets, in the order in which backward computes them: the last parameters first. A
bucket is sent when it has all of its gradients and the previous bucket was sent. So all workers send the same
buckets in the same order, and sums are computed in the same order in every step and every run. A missing
gradient counts as zero; a parameter that has no gradient on any worker has none afterwards, as with one
worker.

Beside the gradients go notes in float64: weight and loss of the step, and for each parameter the number of
workers with a gradient. They are sent right after the last bucket, without waiting for it.

A codec changes what a bucket is on the wire (compressed.py); without one it is an all-reduce.

Requires only that all workers have the same parameters. Cost: one copy of each gradient, unless its layer
computes it in the bucket (`lend`), a few microseconds of Python per parameter, and the notes: one small
all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from manyhands.codecs.codec import PLAIN, Codec
from manyhands.collectives.buckets import NOTES, in_buckets
from manyhands.collectives.compressed import CompressedExchange
from manyhands.collectives.group import Group, Work
from manyhands.transport.shm import aligned


@dataclass
class Bucket:
    flat: Tensor
    members: list[int] = field(default_factory=list)
    """Indices of its parameters."""
    missing: set[int] = field(default_factory=set)


class Exchange(Protocol):
    """How buffers are summed over all workers."""

    def begin(self, flat: Tensor) -> None:
        """Start with a buffer, which must not be touched before `finish`."""

    def finish(self) -> None:
        """Wait until all buffers hold the sums."""


class PlainExchange:
    """One all-reduce for each buffer."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._works: list[Work] = []

    def begin(self, flat: Tensor) -> None:
        self._works.append(self._group.all_reduce(flat, async_op=True))

    def finish(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()


class Reducer:
    def __init__(
        self,
        group: Group,
        parameters: Sequence[nn.Parameter],
        *,
        bucket_bytes: int,
        codec: Codec = PLAIN,
    ) -> None:
        self._group = group
        self._codec = codec
        self._exchange: Exchange = (
            PlainExchange(group) if codec.sums_on_wire else CompressedExchange(group, codec)
        )
        self._parameters = list(parameters)
        self._numbers = {id(p): number for number, p in enumerate(self._parameters)}
        self._views: dict[int, Tensor] = {}
        self._bucket_of: dict[int, Bucket] = {}
        self.buckets = self._lay_out(bucket_bytes)
        device = self._parameters[0].device if self._parameters else group.device
        self._notes = torch.zeros(NOTES + len(self._parameters), dtype=torch.float64, device=device)
        self._notes_work: Work | None = None
        self._used = self._notes[NOTES:]
        """Number of workers with a gradient, by parameter."""
        self._sent = 0
        self._sharing = True
        self._lent: set[int] = set()
        """Parameters whose gradient a layer computes directly in the bucket."""
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._arrived, number))
            for number, p in enumerate(self._parameters)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Start a step: no gradient has arrived."""
        self._sent, self._notes_work = 0, None
        self._lent.clear()
        self.sums.zero_()
        for bucket in self.buckets:
            bucket.missing = set(bucket.members)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Accumulate gradients inside this context without sending them."""
        self._sharing = False
        try:
            yield
        finally:
            self._sharing = True

    @property
    def sums(self) -> Tensor:
        """Weight and loss of the step; after `finish`, summed over all workers."""
        return self._notes[:NOTES]

    def note(self, weight: float | Tensor, loss: float | Tensor) -> None:
        self._notes[0], self._notes[1] = weight, loss

    def lend(self, weight: Tensor) -> Tensor | None:
        """Return the place of a weight's gradient in its bucket, to compute it there (WeightsFirst)."""
        number = self._numbers.get(id(weight))
        # Once only: autograd adds up the gradients of several uses, and of several micro-batches.
        if number is None or number in self._lent or weight.grad is not None:
            return None
        self._lent.add(number)
        return self._views[number].detach()  # with no other reference, autograd keeps it as it is

    def finish(self) -> None:
        unused = [number for number, p in enumerate(self._parameters) if p.grad is None]
        for number in unused:
            self._views[number].zero_()
        while self._sent < len(self.buckets):
            self._send(unused)
        if not self.buckets:
            self._send_notes(())
        self._exchange.finish()
        assert self._notes_work is not None
        self._notes_work.wait()
        if unused:  # only then, because reading waits for the GPU
            counts = self._used.tolist()
            for number in unused:
                self._parameters[number].grad = self._views[number] if counts[number] else None

    def _arrived(self, number: int, parameter: Tensor) -> None:
        view, grad = self._views[number], parameter.grad
        assert grad is not None
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
            parameter.grad = view
        if not self._sharing:
            return
        self._bucket_of[number].missing.discard(number)
        while self._sent < len(self.buckets) and not self.buckets[self._sent].missing:
            self._send(())

    def _send(self, unused: Sequence[int]) -> None:
        bucket = self.buckets[self._sent]
        self._sent += 1
        self._exchange.begin(bucket.flat)
        if bucket is self.buckets[-1]:
            self._send_notes(unused)

    def _send_notes(self, unused: Sequence[int]) -> None:
        self._used.fill_(1.0)
        if unused:
            self._used[list(unused)] = 0.0
        self._notes_work = self._group.all_reduce(self._notes, async_op=True)

    def _lay_out(self, bucket_bytes: int) -> list[Bucket]:
        sizes = [(p.dtype, p.numel() * p.element_size()) for p in self._parameters]
        members_of = in_buckets(sizes, bucket_bytes=bucket_bytes)
        bytes_of = [sum(sizes[number][1] for number in members) for members in members_of]
        memory = self._allocate(sum(aligned(num_bytes) for num_bytes in bytes_of))
        buckets, used = [], 0
        for members, num_bytes in zip(members_of, bytes_of, strict=True):
            flat = memory[used : used + num_bytes].view(self._parameters[members[0]].dtype)
            used += aligned(num_bytes)
            bucket = Bucket(flat, members)
            start = 0
            for number in members:
                p = self._parameters[number]
                # Strides of the parameter: optimizers are faster where both have the same layout.
                self._views[number] = bucket.flat.as_strided(
                    p.shape, _strides(p), bucket.flat.storage_offset() + start
                )
                self._bucket_of[number] = bucket
                start += p.numel()
            buckets.append(bucket)
        return buckets

    def _allocate(self, num_bytes: int) -> Tensor:
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        if device.type == "cpu" and self._codec.sums_on_wire:
            return self._group.allocate(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides if it is dense, in any order of dimensions; else contiguous ones."""
    return tuple(torch.empty_like(parameter, device="meta").stride())
