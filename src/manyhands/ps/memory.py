"""A model's numbers as flat buffers: parameters once a host, gradients once a worker.

A Flat lies in private memory or in a shared segment. Parameters and gradients of a model become views
into one, so that a backward writes where the server reads, and a push inside a host copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.ps.blocks import MIN_BLOCKS, Block, BlockLayout, FlatParameter
from manyhands.ps.optimizer import is_elementwise, join_state
from manyhands.transport.shm import Segment, aligned

MARKS = 128
"""Numbers beside shared memory: a version for each server, and behind them how many there are."""


class FlatTensors:
    """The buffers of a layout, with views of blocks and of pieces (parameters)."""

    def __init__(
        self, layout: BlockLayout, buffers: Sequence[Tensor], segment: Segment | None = None
    ) -> None:
        self.layout = layout
        self.buffers = list(buffers)
        self.segment = segment
        marks = (
            torch.zeros(MARKS, dtype=torch.int64)
            if segment is None
            else segment.tensor(torch.int64, offset_bytes=segment.nbytes - 8 * MARKS, numel=MARKS)
        )
        self._marks = marks.numpy()  # read and written at every update, a number at a time

    @classmethod
    def private(cls, layout: BlockLayout, *, device: str = "cpu") -> FlatTensors:
        """Memory of this process, all zero."""
        return cls(
            layout,
            [torch.zeros(b.numel, dtype=_dtype(b.dtype), device=device) for b in layout.buffers],
        )

    @classmethod
    def shared(cls, layout: BlockLayout, *, label: str) -> FlatTensors:
        """Memory that other processes of this host can attach, all zero."""
        return cls._in(layout, Segment.create(_offsets(layout)[-1] + 8 * MARKS, label=label))

    @classmethod
    def attached(cls, layout: BlockLayout, address: str) -> FlatTensors:
        return cls._in(layout, Segment.attach(address))

    @classmethod
    def _in(cls, layout: BlockLayout, segment: Segment) -> FlatTensors:
        buffers = [
            segment.tensor(_dtype(buffer.dtype), offset_bytes=offset, numel=buffer.numel)
            for buffer, offset in zip(layout.buffers, _offsets(layout), strict=False)
        ]
        return cls(layout, buffers, segment)

    @property
    def mark(self) -> int:
        """A number beside the memory: the version that all of it has reached at least."""
        return int(self._marks[: int(self._marks[-1]) or 1].min())

    def set_mark(self, version: int, *, server: int = 0, servers: int = 1) -> None:
        """By one of the servers, for its part."""
        self._marks[server] = version
        self._marks[-1] = servers

    def block(self, number: int) -> Tensor:
        block = self.layout.blocks[number]
        return self.buffers[block.buffer][block.start : block.stop]

    def piece(self, name: str) -> Tensor:
        """One parameter's numbers, flat."""
        slot = self.layout.slots[name]
        return self.buffers[slot.buffer][slot.start : slot.stop]

    def copy_(self, other: FlatTensors, *, non_blocking: bool = False) -> None:
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.copy_(theirs, non_blocking=non_blocking)

    def norm(self) -> float:
        """The Euclidean norm of all numbers; padding is zero."""
        # In float32 at least: the norm of many half-precision numbers is none itself.
        norms = [
            torch.linalg.vector_norm(b, dtype=torch.promote_types(b.dtype, torch.float32))
            for b in self.buffers
        ]
        return float(torch.stack([norm.double() for norm in norms]).norm())

    def zero_(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's memory itself."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def pieces_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in the optimizer's order. Not those that are frozen: a
    server would let weight decay change them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    return {names[id(p)]: p for p in listed if p.requires_grad}


def layout_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> BlockLayout:
    """The same in every process, whoever serves: it depends on the model and its optimizer alone."""
    group_of = {id(p): index for index, g in enumerate(optimizer.param_groups) for p in g["params"]}
    pieces = [
        FlatParameter(
            name,
            p.numel(),
            p.element_size(),
            group_of[id(p)],
            str(p.dtype).removeprefix("torch."),
            tuple(p.shape),
        )
        for name, p in pieces_of(model, optimizer).items()
    ]
    whole = not is_elementwise(optimizer)
    return BlockLayout.of(pieces, whole_tensors=whole, min_blocks=MIN_BLOCKS)


def block_state(
    layout: BlockLayout, block: Block, states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What an optimizer remembers of a block, from what it remembers of each parameter."""
    whole: dict[str, Any] = {}
    if layout.whole_tensors:
        (only,) = layout.pieces_in(block)
        return {
            k: v.cpu() if isinstance(v, Tensor) else v for k, v in states.get(only.name, {}).items()
        }
    for piece in layout.pieces_in(block):
        slot = layout.slots[piece.name]
        low, high = max(slot.start, block.start), min(slot.stop, block.stop)
        for key, value in states.get(piece.name, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() != piece.numel:
                whole.setdefault(key, value.cpu() if isinstance(value, Tensor) else value)
                continue
            target = whole.setdefault(key, torch.zeros(block.numel, dtype=value.dtype))
            target[low - block.start : high - block.start] = value.reshape(-1)[
                low - slot.start : high - slot.start
            ].cpu()
    return whole


def piece_state(
    layout: BlockLayout, name: str, shape: Sequence[int], states: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """What an optimizer remembers of a parameter, from what it remembers of its blocks."""
    if layout.whole_tensors:
        return {
            k: v
            for block in layout.blocks_with(name)
            for k, v in states.get(block.number, {}).items()
        }
    slot = layout.slots[name]
    parts = []
    for block in layout.blocks_with(name):
        low, high = max(slot.start, block.start), min(slot.stop, block.stop)
        parts.append(
            {
                key: value.reshape(-1)[low - block.start : high - block.start]
                if isinstance(value, Tensor) and value.dim() > 0
                else value
                for key, value in states.get(block.number, {}).items()
            }
        )
    return join_state(parts, shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _offsets(layout: BlockLayout) -> list[int]:
    """Where each buffer begins in a segment, in bytes, and behind the last the segment's size."""
    offsets = [0]
    for buffer in layout.buffers:
        offsets.append(aligned(offsets[-1] + buffer.numel * buffer.itemsize))
    return offsets
