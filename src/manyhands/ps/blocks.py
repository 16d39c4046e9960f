"""How a model's parameters lie on parameter servers: pieces in flat buffers, buffers cut into blocks. Pure.

Parameters of one optimizer group and one type lie one behind the other in one flat buffer, each at a
multiple of ALIGN elements (views stay aligned for vector instructions; the padding stays zero under
an elementwise optimizer). A buffer is cut into blocks of nearly equal size, none above `block_bytes`:
k equal blocks leave no tiny tail, and equal blocks are what makes even loads easy. An optimizer that
is not elementwise must see whole tensors: then a block is exactly one tensor.

Blocks belong to virtual shards, the unit that moves between servers. A shard is one block while there
are at most MAX_SHARDS blocks, so that balance is as fine as it can be; beyond that a shard is a run of
neighbouring blocks of about 1/MAX_SHARDS of the bytes, which bounds what a placement has to plan and
to say, and still leaves 16 shards for each of 64 servers. Both cuts depend on the model alone, never on
the servers.

Costs: under ALIGN elements of padding a piece; one pass over pieces and blocks; a message a block at
most, fewer where neighbours go to the same server.
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
"""Pieces and blocks begin at multiples of this many elements: 64 bytes of float32, a cache line."""
BLOCK_BYTES = 4 << 20
MIN_BLOCK_BYTES = 64 << 10
"""Lower bound for `min_blocks`: below it a message costs more than its bytes."""
BLOCKS_PER_SERVER = 16
"""With `min_blocks` this many times the servers, no server is over about a 16th off its share, as long
as the model has 1 MiB (16 of the smallest blocks) for each."""
MIN_BLOCKS = 8 * BLOCKS_PER_SERVER
"""Enough for eight servers; fixed, because a layout must not depend on the servers of a view."""
MAX_SHARDS = 1024


@dataclass(frozen=True)
class FlatParameter:
    """What the layout needs to know of a parameter."""

    name: str
    numel: int
    itemsize: int
    """Bytes per element."""
    group: int = 0
    """Index of the optimizer's parameter group."""
    dtype: str = ""
    """Needed only where two types of one size meet, as float16 and bfloat16."""
    shape: tuple[int, ...] | None = None
    """Needed only where an optimizer looks at whole tensors."""


@dataclass(frozen=True)
class BufferSpec:
    number: int
    group: int
    itemsize: int
    dtype: str
    numel: int


@dataclass(frozen=True)
class BufferSlot:
    """The place of a piece: elements [start, stop) of a buffer."""

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
    """All pieces, buffers, blocks and shards of a model. Made by `BlockLayout.of`."""

    pieces: tuple[FlatParameter, ...]
    """In the optimizer's order."""
    buffers: tuple[BufferSpec, ...]
    slots: Mapping[str, BufferSlot]
    """By the piece's name."""
    blocks: tuple[Block, ...]
    """By number: buffer after buffer, from front to back."""
    shards: tuple[tuple[int, int], ...]
    """The numbers [first, last) of each shard's blocks."""
    whole_tensors: bool

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

        Blocks are above half of `block_bytes` and not above it (rounded to ALIGN elements; a buffer
        smaller than that is one block). To give `min_blocks` the blocks shrink, down to 64 KiB.
        """
        pieces = tuple(pieces)
        if block_bytes < 1 or min_blocks < 1:
            raise UsageError(
                f"A layout of block_bytes={block_bytes} and min_blocks={min_blocks} can't be: both "
                f"are whole numbers of at least 1; leave block_bytes out for {BLOCK_BYTES}."
            )
        buffers, slots = _line_up(pieces)
        if whole_tensors:
            spans = [(s.buffer, s.start, s.stop) for s in slots.values() if s.stop > s.start]
            # Pieces of several buffers may take turns in the optimizer's order.
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
        """Of all blocks, padding included."""
        return sum(block.num_bytes for block in self.blocks)

    @cached_property
    def shard_bytes(self) -> tuple[int, ...]:
        return tuple(
            sum(block.num_bytes for block in self.blocks[first:last]) for first, last in self.shards
        )

    @cached_property
    def digest(self) -> str:
        """Equal for two layouts only if every parameter and every block is at the same place."""
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
        """The pieces of which the block holds a part, from front to back."""
        starts, pieces = self._lines[block.buffer]
        first = max(bisect_right(starts, block.start) - 1, 0)
        last = bisect_left(starts, block.stop)
        return tuple(
            piece for piece in pieces[first:last] if self.slots[piece.name].stop > block.start
        )

    def shape_of(self, block: Block) -> tuple[int, ...]:
        """The shape that an optimizer should see a block in: its tensor's, if it is a whole one."""
        if not self.whole_tensors:
            return (block.numel,)
        (piece,) = self.pieces_in(block)
        return (piece.numel,) if piece.shape is None else piece.shape

    def blocks_with(self, name: str) -> tuple[Block, ...]:
        """The blocks that hold a part of the piece; none for an empty piece."""
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
        """Of each buffer: where its non-empty pieces start, and the pieces."""
        lines: list[tuple[list[int], list[FlatParameter]]] = [([], []) for _ in self.buffers]
        for piece in self.pieces:
            if piece.numel:
                slot = self.slots[piece.name]
                lines[slot.buffer][0].append(slot.start)
                lines[slot.buffer][1].append(piece)
        return lines


def order_needed(layout: BlockLayout, names: Sequence[str] | None = None) -> list[Block]:
    """The blocks in the order in which the next forward needs them, for priorities on the wire.

    `names` are the parameters as the model registers them, which is the order of most forwards; without
    it the optimizer's order stands in, and that differs where the optimizer has several groups.
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
        assert piece.itemsize > 0, f"{piece} has elements without bytes"
        assert piece.name not in slots, f"two pieces are called {piece.name!r}"
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
    """Spans of nearly equal size: `wanted` or more, none above `block_bytes` nor needlessly small."""
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
    """How many units of ALIGN elements (or of `unit` bytes) it takes."""
    return -(-size // unit)


def _shards(blocks: Sequence[Block]) -> tuple[tuple[int, int], ...]:
    if len(blocks) <= MAX_SHARDS:
        return tuple((number, number + 1) for number in range(len(blocks)))
    total = sum(block.num_bytes for block in blocks)
    firsts: list[int] = []
    latest, before = -1, 0
    for block in blocks:
        # By its middle: a shard is then never over total / MAX_SHARDS plus one block.
        wanted = (2 * before + block.num_bytes) * MAX_SHARDS // (2 * total)
        if wanted != latest:
            firsts.append(block.number)
        latest, before = wanted, before + block.num_bytes
    return tuple(zip(firsts, [*firsts[1:], len(blocks)], strict=True))
