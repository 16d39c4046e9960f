"""Spans: neighbouring blocks, handled as one tensor and sent in one message. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.ps.blocks import Block, BlockLayout
from manyhands.ps.placement import Placement

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.ps.block_store import FlatTensors

SPAN_BYTES = 4 << 20
"""Maximum bytes of neighbouring blocks in one message: small enough to overlap in a large model. With a
quarter of it, the small model of the benchmark was a fifth slower."""


@dataclass(frozen=True)
class Span:
    """Neighbouring blocks: elements [start, stop) of a buffer."""

    buffer: int
    start: int
    stop: int
    blocks: tuple[Block, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, flat: FlatTensors) -> Tensor:
        return flat.buffers[self.buffer][self.start : self.stop]


def spans_of(
    layout: BlockLayout, numbers: Iterable[int], *, max_bytes: int | None = None
) -> list[Span]:
    """Merge neighbouring blocks into spans, in order. Only a single block may exceed `max_bytes`."""
    spans: list[list[Block]] = []
    for number in sorted(numbers):
        block = layout.blocks[number]
        last = spans[-1][-1] if spans else None
        fits = (
            last is not None
            and not layout.whole_tensors
            and (last.buffer, last.stop) == (block.buffer, block.start)
            and (
                max_bytes is None
                or sum(b.num_bytes for b in spans[-1]) + block.num_bytes <= max_bytes
            )
        )
        if fits:
            spans[-1].append(block)
        else:
            spans.append([block])
    return [Span(span[0].buffer, span[0].start, span[-1].stop, tuple(span)) for span in spans]


def message_spans(layout: BlockLayout, numbers: Iterable[int]) -> list[Span]:
    """Merge blocks into spans for messages."""
    return spans_of(layout, numbers, max_bytes=SPAN_BYTES)


def travelling(placement: Placement, server: str) -> tuple[list[Span], list[str | None]]:
    """Return the spans in which a server's blocks are sent, and the replica holder of each span."""
    kept: dict[str | None, list[int]] = defaultdict(list)
    for block in placement.blocks_of(server):
        kept[placement.replica_of(block)].append(block.number)
    spans: list[Span] = []
    holders: list[str | None] = []
    for holder, numbers in kept.items():
        cut = message_spans(placement.layout, numbers)
        spans += cut
        holders += [holder] * len(cut)
    return spans, holders
