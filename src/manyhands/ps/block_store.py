"""Blocks in somebody's keeping: their parameters, and the optimizer that works on them.

A server has one holding of its own blocks and one for each server whose replica it keeps. Neighbouring
blocks are handled as one *run* (one add, one optimizer tensor) where the optimizer is elementwise; a
block can be taken out and put in somewhere else all the same, with what the optimizer remembers of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.compute.train_state import TrainState
from manyhands.ps.blocks import Block, BlockLayout
from manyhands.ps.memory import FlatTensors
from manyhands.ps.optimizer import BlockOptimizer


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


@dataclass
class BlockState:
    """A block, ready to be put into a holding."""

    params: Tensor
    state: dict[str, Any]


def runs_of(
    layout: BlockLayout, numbers: Iterable[int], *, max_bytes: int | None = None
) -> list[Span]:
    """Blocks as runs, in order; none above `max_bytes` unless a single block is."""
    runs: list[list[Block]] = []
    for number in sorted(numbers):
        block = layout.blocks[number]
        last = runs[-1][-1] if runs else None
        fits = (
            last is not None
            and not layout.whole_tensors
            and (last.buffer, last.stop) == (block.buffer, block.start)
            and (
                max_bytes is None
                or sum(b.num_bytes for b in runs[-1]) + block.num_bytes <= max_bytes
            )
        )
        if fits:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [Span(run[0].buffer, run[0].start, run[-1].stop, tuple(run)) for run in runs]


class BlockStore:
    """Some blocks of a model, and their optimizer. `flat` is where their parameters lie."""

    def __init__(
        self,
        train_state: TrainState,
        flat: FlatTensors,
        materials: Mapping[int, BlockState],
        *,
        ticks: int,
    ) -> None:
        """`ticks`: how many steps of the schedule the trainee's own scheduler has done."""
        layout = self.layout = flat.layout
        self.flat = flat
        self.numbers = sorted(materials)
        self.runs = runs_of(layout, materials)
        self._ticks = ticks
        self._run_of = {block.number: i for i, run in enumerate(self.runs) for block in run.blocks}
        for number, block_state in materials.items():
            mine = flat.block(number)
            if mine.data_ptr() != block_state.params.data_ptr():
                mine.copy_(block_state.params.reshape(-1))
        held = {
            i: (layout.buffers[run.buffer].group, self._shaped(run))
            for i, run in enumerate(self.runs)
        }
        self._optimizer = BlockOptimizer(train_state.optimizer, held)
        for i, run in enumerate(self.runs):
            if state := _join([materials[b.number].state for b in run.blocks], run):
                self._optimizer.load_state(i, state)
        self._scheduler = train_state.schedule_for(self._optimizer.optimizer)
        # A holding of no blocks has nothing to step, and torch would wonder about its schedule.
        self._optimizer.optimizer._opt_called = True  # type: ignore[attr-defined]

    def __contains__(self, number: int) -> bool:
        return number in self._run_of

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._optimizer.optimizer.param_groups[0]["lr"])

    def apply(self, sums: FlatTensors, *, lr_scale: float, ticks: int) -> None:
        """One step of the optimizer with these gradients, and the schedule brought up to `ticks`."""
        gradients = {i: self._like(run, run.of(sums)) for i, run in enumerate(self.runs)}
        if gradients:
            self._optimizer.step(gradients, lr_scale=lr_scale)
        while self._ticks < ticks:
            self._ticks += 1
            if self._scheduler is not None:
                self._scheduler.step()

    def take(self, number: int) -> BlockState:
        """A block, as it is. The tensors are this holding's own."""
        run = self.runs[self._run_of[number]]
        block = self.layout.blocks[number]
        if self.layout.whole_tensors:
            return BlockState(self.flat.block(number), self._optimizer.state(self._run_of[number]))
        low, high = block.start - run.start, block.stop - run.start
        state = {
            key: value.reshape(-1)[low:high] if _of_elements(value, run.numel) else value
            for key, value in self._optimizer.state(self._run_of[number]).items()
        }
        return BlockState(self.flat.block(number), state)

    def _shaped(self, run: Span) -> Tensor:
        return self._like(run, run.of(self.flat))

    def _like(self, run: Span, flat: Tensor) -> Tensor:
        """An optimizer that looks at whole tensors gets them in their shape."""
        return flat.view(self.layout.shape_of(run.blocks[0])) if self.layout.whole_tensors else flat


def add_up(
    sums: FlatTensors,
    runs: Sequence[Span],
    sources: Sequence[FlatTensors],
    coefficients: Sequence[float],
) -> None:
    """sums = the sources, each times its coefficient, added in their order."""
    for run in runs:
        total = run.of(sums)
        parts = [run.of(source) for source in sources]
        if len(parts) > 1 and coefficients[0] == coefficients[1] == 1.0:
            torch.add(parts[0], parts[1], out=total)
            done = 2
        elif coefficients[0] == 1.0:
            total.copy_(parts[0])
            done = 1
        else:
            torch.mul(parts[0], coefficients[0], out=total)
            done = 1
        for part, coefficient in zip(parts[done:], coefficients[done:], strict=True):
            total.add_(part, alpha=coefficient)


def scale(sums: FlatTensors, runs: Sequence[Span], factor: float) -> None:
    if factor != 1.0:
        for run in runs:
            run.of(sums).mul_(factor)


def squared_norm(sums: FlatTensors, runs: Sequence[Span]) -> float:
    return sum(float(run.of(sums).double().pow(2).sum()) for run in runs)


def _join(states: Sequence[Mapping[str, Any]], run: Span) -> dict[str, Any]:
    """What an optimizer remembers of a run, from what it remembers of its blocks.

    Of some it may remember nothing: parameters that no gradient has reached yet. Then zeros stand in.
    """
    known = next((i for i, state in enumerate(states) if state), None)
    if known is None or not states[1:]:
        return dict(states[0])
    joined: dict[str, Any] = {}
    for key, value in states[known].items():
        if _of_elements(value, run.blocks[known].numel):
            parts = [
                state[key].reshape(-1) if key in state else torch.zeros(b.numel, dtype=value.dtype)
                for state, b in zip(states, run.blocks, strict=True)
            ]
            joined[key] = torch.cat(parts)
        else:
            joined[key] = value
    return joined


def _of_elements(value: Any, numel: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel
