"""Layout of a model's parameters: pieces in flat buffers, and buffers cut into blocks. Pure.

Parameters (*pieces*) of one optimizer group and dtype are stored one after the other in a flat buffer, each
at a multiple of ALIGN elements. Views then stay aligned for vector instructions, and the padding stays zero
under an elementwise optimizer. A buffer is cut into blocks of nearly equal size, none above `block_bytes`:
equal blocks leave no tiny tail and make even loads easy. An optimizer that is not elementwise must see whole
tensors: a block is then exactly one tensor.

Blocks belong to virtual shards, the unit that moves between servers. With at most MAX_SHARDS blocks, a shard
is one block, which gives the finest balance. With more, a shard is a run of neighbouring blocks with about
1/MAX_SHARDS of the bytes. This bounds the size of a placement and the work to plan it, and still leaves 16
shards for each of 64 servers. Both cuts depend only on the model, never on the servers.

Cost: less than ALIGN elements of padding per piece; one pass over pieces and blocks; at most one message per
block, and fewer where neighbours go to the same server.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise

from manyhands.errors import UsageError

ALIGN = 16
"""Pieces and blocks start at multiples of this many elements: 64 bytes of float32, a cache line."""
BLOCK_BYTES = 4 << 20
MIN_BLOCK_BYTES = 64 << 10
"""Minimum size to which `min_blocks` shrinks blocks: below it, a message costs more than its bytes."""
BLOCKS_PER_SERVER = 16
"""If `min_blocks` is this many times the number of servers, each server is within about 1/16 of its share,
provided that the model has 1 MiB (16 of the smallest blocks) per server."""
MIN_BLOCKS = 8 * BLOCKS_PER_SERVER
"""Enough for eight servers. Fixed, because a layout must not depend on the servers of a view."""
MAX_SHARDS = 1024


@dataclass(frozen=True)
class FlatParameter:
    """Properties of a parameter that the layout depends on."""

    name: str
    numel: int
    itemsize: int
    """Bytes per element."""
    group: int = 0
    """Index of the optimizer's parameter group."""
    dtype: str = ""
    """Needed only to tell apart dtypes of the same size, such as float16 and bfloat16."""
    shape: tuple[int, ...] | None = None
    """Needed only if the optimizer works on whole tensors."""


@dataclass(frozen=True)
class BufferSpec:
    number: int
    group: int
    itemsize: int
    dtype: str
    numel: int


@dataclass(frozen=True)
class BufferSlot:
    """Location of a piece: elements [start, stop) of a buffer."""

    buffer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """Elements [start, stop) of a buffer: the unit of placement."""

    number: int
    buffer: int
    start: int
    stop: int
    itemsize: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class BlockLayout:
    """All pieces, buffers, blocks and shards of a model. Created by `BlockLayout.of`."""

    pieces: tuple[FlatParameter, ...]
    """In the optimizer's order."""
    buffers: tuple[BufferSpec, ...]
    slots: Mapping[str, BufferSlot]
    """By the piece's name."""
    blocks: tuple[Block, ...]
    """By number: buffer by buffer, in order of position."""
    shards: tuple[tuple[int, int], ...]
    """The range [first, last) of each shard's block numbers."""
    whole_tensors: bool
    """If true, each block is one whole tensor."""

    @classmethod
    def of(
        cls,
        pieces: Iterable[FlatParameter],
        *,
        block_bytes: int = BLOCK_BYTES,
        whole_tensors: bool = False,
        min_blocks: int = 1,
    ) -> BlockLayout:
        """Lay out `pieces`, given in the optimizer's order.

        Blocks are larger than half of `block_bytes` and at most `block_bytes` (rounded to ALIGN elements; a
        smaller buffer is one block). To reach `min_blocks`, blocks shrink down to 64 KiB.
        """
        pieces = tuple(pieces)
        if block_bytes < 1 or min_blocks < 1:
            raise UsageError(
                f"block_bytes={block_bytes}, min_blocks={min_blocks} is invalid: both must be integers of "
                f"at least 1. Omit block_bytes for the default, {BLOCK_BYTES}."
            )
        buffers, slots = _line_up(pieces)
        if whole_tensors:
            spans = [(s.buffer, s.start, s.stop) for s in slots.values() if s.stop > s.start]
            # In the optimizer's order, pieces of different buffers may alternate.
            spans.sort()
        else:
            total = max(sum(b.numel * b.itemsize for b in buffers), 1)
            spans = [
                (b.number, start, stop)
                for b in buffers
                for start, stop in _cut(
                    b, -(-b.numel * b.itemsize * min_blocks // total), block_bytes
                )
            ]
        blocks = tuple(
            Block(number, buffer, start, stop, buffers[buffer].itemsize)
            for number, (buffer, start, stop) in enumerate(spans)
        )
        return cls(pieces, buffers, slots, blocks, _shards(blocks), whole_tensors)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all blocks, including padding."""
        return sum(block.num_bytes for block in self.blocks)

    @cached_property
    def shard_bytes(self) -> tuple[int, ...]:
        return tuple(
            sum(block.num_bytes for block in self.blocks[first:last]) for first, last in self.shards
        )

    @cached_property
    def digest(self) -> str:
        """Hash that is equal for two layouts only if every parameter and block has the same location."""
        said = [
            [asdict(piece) for piece in self.pieces],
            [asdict(block) for block in self.blocks],
            self.shards,
        ]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def shard_of(self, block: Block) -> int:
        return bisect_right(self._shard_starts, block.number) - 1

    def blocks_in(self, shard: int) -> tuple[Block, ...]:
        first, last = self.shards[shard]
        return self.blocks[first:last]

    def pieces_in(self, block: Block) -> tuple[FlatParameter, ...]:
        """Return the pieces that are at least partly in the block, in order of position."""
        starts, pieces = self._lines[block.buffer]
        first = max(bisect_right(starts, block.start) - 1, 0)
        last = bisect_left(starts, block.stop)
        return tuple(
            piece for piece in pieces[first:last] if self.slots[piece.name].stop > block.start
        )

    def shape_of(self, block: Block) -> tuple[int, ...]:
        """Return the shape in which an optimizer sees a block: its tensor's, if blocks are whole tensors."""
        if not self.whole_tensors:
            return (block.numel,)
        (piece,) = self.pieces_in(block)
        return (piece.numel,) if piece.shape is None else piece.shape

    def blocks_with(self, name: str) -> tuple[Block, ...]:
        """Return the blocks that contain part of the piece; none for an empty piece."""
        slot = self.slots[name]
        if slot.start == slot.stop:
            return ()
        where = self._block_starts
        first = bisect_right(where, (slot.buffer, slot.start)) - 1
        return self.blocks[first : bisect_left(where, (slot.buffer, slot.stop))]

    @cached_property
    def _shard_starts(self) -> list[int]:
        return [first for first, _ in self.shards]

    @cached_property
    def _block_starts(self) -> list[tuple[int, int]]:
        return [(block.buffer, block.start) for block in self.blocks]

    @cached_property
    def _lines(self) -> list[tuple[list[int], list[FlatParameter]]]:
        """For each buffer, the starts of its non-empty pieces, and the pieces."""
        lines: list[tuple[list[int], list[FlatParameter]]] = [([], []) for _ in self.buffers]
        for piece in self.pieces:
            if piece.numel:
                slot = self.slots[piece.name]
                lines[slot.buffer][0].append(slot.start)
                lines[slot.buffer][1].append(piece)
        return lines


def order_needed(layout: BlockLayout, names: Sequence[str] | None = None) -> list[Block]:
    """Return the blocks in the order in which the next forward needs them, to prioritize messages.

    `names` are the parameters in the order in which the model registers them, which is the order of most
    forwards. The default is the optimizer's order, which differs if the optimizer has several groups.
    """
    if names is None:
        names = [piece.name for piece in layout.pieces]
    rank = {name: number for number, name in enumerate(names)}

    def first_needed(block: Block) -> tuple[int, int]:
        ranks = [rank.get(piece.name, len(rank)) for piece in layout.pieces_in(block)]
        return min(ranks, default=len(rank)), block.number

    return sorted(layout.blocks, key=first_needed)


def _line_up(
    pieces: Sequence[FlatParameter],
) -> tuple[tuple[BufferSpec, ...], dict[str, BufferSlot]]:
    numbers: dict[tuple[int, int, str], int] = {}
    ends: list[int] = []
    slots: dict[str, BufferSlot] = {}
    for piece in pieces:
        assert piece.numel >= 0, f"{piece} has a negative size"
        assert piece.itemsize > 0, f"{piece} has elements of 0 bytes"
        assert piece.name not in slots, f"two pieces have the name {piece.name!r}"
        number = numbers.setdefault((piece.group, piece.itemsize, piece.dtype), len(numbers))
        if number == len(ends):
            ends.append(0)
        start = _units(ends[number]) * ALIGN
        ends[number] = start + piece.numel
        slots[piece.name] = BufferSlot(number, start, start + piece.numel)
    buffers = tuple(
        BufferSpec(number, group, itemsize, dtype, ends[number])
        for (group, itemsize, dtype), number in numbers.items()
    )
    return buffers, slots


def _cut(buffer: BufferSpec, wanted: int, block_bytes: int) -> list[tuple[int, int]]:
    """Cut into `wanted` or more spans of nearly equal size, none above `block_bytes` or needlessly small."""
    unit_bytes = ALIGN * buffer.itemsize
    units = _units(buffer.numel)
    if not units:
        return []
    least = max(_units(min(MIN_BLOCK_BYTES, block_bytes // 2), unit_bytes), 1)
    count = max(wanted, -(-units // max(block_bytes // unit_bytes, 1)))
    count = min(count, max(units // least, 1))
    edges = [units * i // count * ALIGN for i in range(count)] + [buffer.numel]
    return list(pairwise(edges))


def _units(size: int, unit: int = ALIGN) -> int:
    """Return the number of units, of ALIGN elements or `unit` bytes, that `size` takes, rounded up."""
    return -(-size // unit)


def _shards(blocks: Sequence[Block]) -> tuple[tuple[int, int], ...]:
    if len(blocks) <= MAX_SHARDS:
        return tuple((number, number + 1) for number in range(len(blocks)))
    total = sum(block.num_bytes for block in blocks)
    firsts: list[int] = []
    latest, before = -1, 0
    for block in blocks:
        # Assigned by the block's middle, so that no shard exceeds total / MAX_SHARDS plus one block.
        wanted = (2 * before + block.num_bytes) * MAX_SHARDS // (2 * total)
        if wanted != latest:
            firsts.append(block.number)
        latest, before = wanted, before + block.num_bytes
    return tuple(zip(firsts, [*firsts[1:], len(blocks)], strict=True))
