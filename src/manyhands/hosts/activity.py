"""Tracks what a member does inside the job's code, so that a hang is attributed to the right member.

Every section that runs the job's code, or that may block on a disk, names itself. Everything else counts
as waiting: for orders, or for other members. Costs a few attribute assignments per section.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LOADING = "loading data"
COMPUTING = "forward and backward"
EVALUATING = "evaluating"
SAVING = "saving a checkpoint"
WAITING = ""


@dataclass
class Activity:
    """Written by the training thread, read by the thread that sends beats."""

    step: int = 0
    """0 outside of steps."""
    doing: str = WAITING
    ticks: int = 0
    """Counts progress: steps, micro-batches, batches of an evaluation."""
    updates: int = 0
    """Updates that a dedicated server has applied."""

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = before

    @contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        self.step = step
        try:
            yield
        finally:
            self.step = 0
