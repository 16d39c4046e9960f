"""A deadline for the workers of a synchronous step: what is not computed by then is left out.

    deadline.begin()
    deadline.passed(index)          before each micro-batch but the first: leave out the rest?
    deadline.end(share)             this worker has computed what it computes
    deadline.exchange(weight)       who left out how much, and what counts in the mean

It is a multiple of the time that the median worker has needed of late for its share, so it needs no
knowledge of the model or the machine. All workers know all times, and so the same deadline, each by its own
clock from the moment at which it begins the step. A micro-batch is never broken off, and the first is
always computed, so a step is never without anything. (DropCompute: Giladi et al., 2023.)

Cost per step: one small all-reduce, two numbers a worker.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from manyhands.compute.feed import Share

PIECES = 8
"""Micro-batches of a share, at least: what is in one is left out together."""
KNOWN_AFTER = 5
"""Steps before the usual time is believed."""
MEMORY = 0.9
"""How much of the usual time so far stays in it after a step."""


class Deadline:
    def __init__(self, factor: float, *, rank: int, world: int, device: str) -> None:
        self._factor = factor
        self._rank, self._world, self._device = rank, world, device
        self._usual_s = 0.0
        self._known = 0
        self._began = 0.0
        self._stopped_at: int | None = None
        self._left_out = 0
        self._whole_s = 0.0

    def begin(self) -> None:
        self._began, self._stopped_at = time.perf_counter(), None

    def passed(self, index: int) -> bool:
        if self._known < KNOWN_AFTER:
            return False
        if self._now() - self._began <= self._factor * self._usual_s:
            return False
        self._stopped_at = index
        return True

    @property
    def stopped(self) -> bool:
        """This worker has left something out."""
        return self._stopped_at is not None

    def end(self, share: Share) -> None:
        first = len(share.batches) if self._stopped_at is None else self._stopped_at
        self._left_out = sum(samples for _, samples in share.batches[first:])
        done, spent_s = share.samples - self._left_out, self._now() - self._began
        # What the whole would have taken: else the usual time would shrink with what is left out.
        self._whole_s = spent_s * share.samples / done if done else 0.0

    def exchange(self, weight: float | torch.Tensor) -> tuple[list[int], float]:
        """The samples that each worker left out, and the weight of what all computed."""
        told = torch.zeros(2 * self._world + 1, dtype=torch.float64)
        told[self._rank] = self._left_out
        told[self._world + self._rank] = self._whole_s
        told[-1] = weight
        there = told.to(self._device)
        dist.all_reduce(there)
        *told_s, arrived = there.tolist()
        if times := [seconds for seconds in told_s[self._world :] if seconds > 0.0]:
            usual, before = median(times), self._usual_s
            self._usual_s = MEMORY * before + (1.0 - MEMORY) * usual if self._known else usual
            self._known += 1
        return [int(count) for count in told_s[: self._world]], arrived

    def _now(self) -> float:
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
