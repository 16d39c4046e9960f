"""Blocks of a model in memory, and the optimizer that updates them.

    FlatTensors       flat buffers of a model's parameters or gradients, in private or shared memory
    BlockOptimizer    the job's own torch optimizer, over spans instead of parameters
    BlockStore        a set of blocks with their optimizer: a server's own, or replicas of another's

The parameters and gradients of a model are views into FlatTensors, so a backward writes to the memory that a
server reads, and a push inside a host copies nothing. There is one copy of the parameters per host, and one
of the gradients per worker.

An elementwise optimizer (SGD, Adam and the like) treats each element independently of its tensor. So cutting
tensors into blocks only changes the speed: one fused pass over a few large spans instead of many small
tensors. Other optimizers get whole tensors, in their own shape. The optimizer is built from the class and
hyperparameters of the job's optimizer; nothing is pickled. A single block can move to another store with its
optimizer state, although neighbouring blocks are handled as one span.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.collectives.sums import add_in_order
from manyhands.compute.param_groups import like, settings_in
from manyhands.compute.schedule import position
from manyhands.compute.train_state import TrainState
from manyhands.ps.blocks import BlockLayout
from manyhands.ps.partial_steps import steps_of
from manyhands.ps.spans import Span, spans_of
from manyhands.ps.staleness import MomentumRule
from manyhands.transport.shm import Segment, aligned

FUSED: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
)
MARKS = 128
"""Number of integers after the buffers of shared memory: a version for each server, and in the last place the
number of servers."""


class FlatTensors:
    """Buffers of a layout, with views of blocks and of pieces (parameters)."""

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
        self.marks = marks.numpy()
        """Version that each server's blocks have reached; the last place is the number of servers. In the
        same shared memory as the buffers, if any. Each update writes one number."""

    @classmethod
    def private(cls, layout: BlockLayout, *, device: str = "cpu") -> FlatTensors:
        """Allocate memory of this process, filled with zeros."""
        return cls(layout, [_zeros(b.numel, _dtype(b.dtype), device) for b in layout.buffers])

    @classmethod
    def shared(cls, layout: BlockLayout, *, label: str) -> FlatTensors:
        """Allocate memory that other processes of this host can attach, filled with zeros."""
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
        """Version that all blocks have reached."""
        return int(self.marks[: int(self.marks[-1]) or 1].min())

    def set_mark(self, version: int, *, server: int = 0, servers: int = 1) -> None:
        """Set the version of one server's blocks."""
        self.marks[server] = version
        self.marks[-1] = servers

    def block(self, number: int) -> Tensor:
        block = self.layout.blocks[number]
        return self.buffers[block.buffer][block.start : block.stop]

    def piece(self, name: str) -> Tensor:
        """Return the elements of one parameter as a flat view."""
        slot = self.layout.slots[name]
        return self.buffers[slot.buffer][slot.start : slot.stop]

    def copy_(self, other: FlatTensors, *, non_blocking: bool = False) -> None:
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.copy_(theirs, non_blocking=non_blocking)

    def norm(self) -> float:
        """Return the Euclidean norm of all elements; padding is zero."""
        # At least float32: the norm of many half-precision numbers may exceed half precision's range.
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


@dataclass
class GradientSums:
    """Summed gradients of the last two versions."""

    flats: Sequence[FlatTensors]
    versions: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def attached(self) -> bool:
        """If true, the sums are in shared memory; those of another server are in its memory then."""
        return self.flats[0].segment is not None

    def of(self, version: int) -> FlatTensors:
        return self.flats[version % len(self.flats)]

    def has(self, version: int) -> bool:
        return self.versions[version % 2] == version

    def begin(self, version: int) -> None:
        """Note that the sum of this version is incomplete, and the older one in its place is gone."""
        self.versions[version % 2] = 0

    def note(self, version: int) -> None:
        self.versions[version % 2] = version


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


@dataclass
class BlockState:
    """Parameters and optimizer state of a block, to build a store from."""

    params: Tensor
    state: dict[str, Any]


class BlockOptimizer:
    """Optimizer with the class and hyperparameters of `template`, over the spans of one store."""

    def __init__(
        self,
        template: Optimizer,
        blocks: Mapping[int, tuple[int, Tensor]],
        *,
        momentum_rule: MomentumRule = "none",
    ) -> None:
        """Create the optimizer. `blocks` maps a number to (parameter group, tensor to update in place)."""
        self._parameters = {
            number: torch.nn.Parameter(tensor, requires_grad=True)
            for number, (_, tensor) in blocks.items()
        }
        self._group_of = {number: group for number, (group, _) in blocks.items()}
        groups = [
            {
                **settings_in(group),
                "params": [self._parameters[n] for n, (g, _) in blocks.items() if g == index],
            }
            for index, group in enumerate(template.param_groups)
        ]
        self.optimizer = _like(template, groups)
        self._steps = steps_of(self.optimizer, momentum_rule)

    def step(
        self, gradients: Mapping[int, Tensor], *, lr_scale: float = 1.0, part: float = 1.0
    ) -> None:
        """Update only the blocks that have a gradient, which is the mean over a part of a batch."""
        for number, gradient in gradients.items():
            self._parameters[number].grad = gradient
        try:
            self._steps.step(lr_scale=lr_scale, part=part)
        finally:
            for number in gradients:
                self._parameters[number].grad = None

    def state(
        self, number: int, part: Callable[[Tensor], Tensor] = lambda value: value
    ) -> dict[str, Any]:
        """Return the optimizer state of a block: tensors of its size, and scalars. `part` cuts what is wanted
        of the tensors."""
        parameter = self._parameters[number]
        state = self.optimizer.state.get(parameter, {})
        cut = {k: part(v) if _of_elements(v, parameter.numel()) else v for k, v in state.items()}
        return self._steps.exported(cut, self._group(number))

    def load_state(self, number: int, state: Mapping[str, Any]) -> None:
        copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        parameter = self._parameters[number]
        self.optimizer.state[parameter] = self._steps.imported(copied, self._group(number))

    def _group(self, number: int) -> dict[str, Any]:
        return self.optimizer.param_groups[self._group_of[number]]


class ScheduleClock:
    """Learning rate schedule, and its number of steps since training began."""

    def __init__(self, scheduler: LRScheduler | None, ticks: int | None = None) -> None:
        self.ticks = position(scheduler) if ticks is None else ticks
        self._scheduler = scheduler

    def advance(self, ticks: int) -> None:
        if self._scheduler is not None:
            for _ in range(self.ticks, ticks):
                self._scheduler.step()
        self.ticks = max(self.ticks, ticks)


class BlockStore:
    """Set of blocks of a model, and their optimizer. `flat` contains their parameters."""

    def __init__(
        self,
        train_state: TrainState,
        flat: FlatTensors,
        states: Mapping[int, BlockState],
        *,
        ticks: int,
        momentum_rule: MomentumRule = "none",
    ) -> None:
        """Build a store from the state of its blocks. `ticks`: number of steps of the job's own scheduler."""
        layout = self.layout = flat.layout
        self.flat = flat
        self.numbers = sorted(states)
        self.spans = spans_of(layout, states)
        self._span_of = {
            block.number: i for i, span in enumerate(self.spans) for block in span.blocks
        }
        for number, block_state in states.items():
            mine = flat.block(number)
            if mine.data_ptr() != block_state.params.data_ptr():
                mine.copy_(block_state.params.reshape(-1))
        held = {
            i: (layout.buffers[span.buffer].group, self._shaped(span))
            for i, span in enumerate(self.spans)
        }
        self._optimizer = BlockOptimizer(train_state.optimizer, held, momentum_rule=momentum_rule)
        for i, span in enumerate(self.spans):
            if state := _join([states[b.number].state for b in span.blocks], span):
                self._optimizer.load_state(i, state)
        scheduler = train_state.schedule_for(self._optimizer.optimizer)
        self._schedule_clock = ScheduleClock(scheduler, ticks)
        # A store without blocks never steps its optimizer; torch would warn about its scheduler.
        self._optimizer.optimizer._opt_called = True  # type: ignore[attr-defined]

    def __contains__(self, number: int) -> bool:
        return number in self._span_of

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._optimizer.optimizer.param_groups[0]["lr"])

    def apply(self, sums: FlatTensors, *, lr_scale: float, ticks: int, part: float = 1.0) -> None:
        """Do one optimizer step with these gradients, of a part of a batch, and advance the schedule to
        `ticks`."""
        gradients = {i: self._like(span, span.of(sums)) for i, span in enumerate(self.spans)}
        if gradients:
            self._optimizer.step(gradients, lr_scale=lr_scale, part=part)
        self._schedule_clock.advance(ticks)

    def take(self, number: int) -> BlockState:
        """Return the current state of a block. Its tensors may be views of this store's memory."""
        span = self.spans[self._span_of[number]]
        block = self.layout.blocks[number]
        if self.layout.whole_tensors:
            return BlockState(self.flat.block(number), self._optimizer.state(self._span_of[number]))
        low, high = block.start - span.start, block.stop - span.start
        state = self._optimizer.state(
            self._span_of[number], lambda value: value.reshape(-1)[low:high]
        )
        return BlockState(self.flat.block(number), state)

    def _shaped(self, span: Span) -> Tensor:
        return self._like(span, span.of(self.flat))

    def _like(self, span: Span, flat: Tensor) -> Tensor:
        """View in the tensor's own shape, if the optimizer needs whole tensors."""
        return (
            flat.view(self.layout.shape_of(span.blocks[0])) if self.layout.whole_tensors else flat
        )


def add_up(
    sums: FlatTensors,
    spans: Sequence[Span],
    sources: Sequence[FlatTensors],
    coefficients: Sequence[float],
) -> None:
    """Set `sums` to the sum of the sources, each times its coefficient, added in order."""
    for span in spans:
        parts = [span.of(source) for source in sources]
        add_in_order(parts, coefficients, into=span.of(sums))


def scale(sums: FlatTensors, spans: Sequence[Span], factor: float) -> None:
    if factor != 1.0:
        for span in spans:
            span.of(sums).mul_(factor)


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that clips a gradient of this norm, as `torch.nn.utils.clip_grad_norm_` does."""
    return min(1.0, limit / (norm + 1e-6))


def squared_norm(sums: FlatTensors, spans: Sequence[Span]) -> float:
    return sum(float(span.of(sums).double().pow(2).sum()) for span in spans)


def _join(states: Sequence[Mapping[str, Any]], span: Span) -> dict[str, Any]:
    """Join the optimizer states of blocks into the state of their span.

    A block without state, because it has had no gradient yet, counts as zeros.
    """
    known = next((i for i, state in enumerate(states) if state), None)
    if known is None or not states[1:]:
        return dict(states[0])
    joined: dict[str, Any] = {}
    for key, value in states[known].items():
        if _of_elements(value, span.blocks[known].numel):
            parts = [
                state[key].reshape(-1) if key in state else torch.zeros(b.numel, dtype=value.dtype)
                for state, b in zip(states, span.blocks, strict=True)
            ]
            joined[key] = torch.cat(parts)
        else:
            joined[key] = value
    return joined


def _zeros(numel: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros. On the host they take memory page by page, as they are written: a server uses only the
    places of its own blocks."""
    if device != "cpu" or not numel:
        return torch.zeros(numel, dtype=dtype, device=device)
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)


def _of_elements(value: Any, numel: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel


def _like(template: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Create an optimizer of the template's class with these groups."""
    unset = template.defaults.get("foreach") is None and template.defaults.get("fused") is None
    if type(template) not in FUSED or not unset or template.defaults.get("differentiable"):
        return like(template, groups)
    for group in groups:
        group["fused"] = True
    return like(template, groups, fused=True)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _offsets(layout: BlockLayout) -> list[int]:
    """Return the byte offset of each buffer in a segment, followed by the total size of the buffers."""
    offsets = [0]
    for buffer in layout.buffers:
        offsets.append(aligned(offsets[-1] + buffer.numel * buffer.itemsize))
    return offsets
