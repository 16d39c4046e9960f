"""Sends the reports of a worker.

Step reports are gathered and sent a few times a second, and losses are read from the device only then, so
that a step costs no message and no synchronisation of its own. A report whose step may still be dropped is
kept until the learner knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from manyhands.compute.gradients import DeviceTime, StepReport
from manyhands.compute.measures import Sums, add_up
from manyhands.control.messages import Notice, Report, StepRow, StepsReport
from manyhands.errors import LinkError
from manyhands.hosts.member import Member

REPORT_EVERY_S = 0.1


class Reporter:
    def __init__(self, member: Member) -> None:
        self.view = 0
        """Number of the view that the worker has joined, and that it reports of."""
        self._member = member
        self._waiting: list[StepReport] = []
        self._flushed = time.monotonic()

    def send(self, kind: Callable[..., Report], **fields: Any) -> None:
        self._member.send(kind(self.view, **fields))

    def notice(self, message: str) -> None:
        """Send a message for people, from any thread."""
        with suppress(LinkError):
            self.send(Notice, message=message)

    @property
    def waiting(self) -> bool:
        """If true, step reports are still to be sent."""
        return bool(self._waiting)

    def add(self, report: StepReport) -> None:
        self._waiting.append(report)

    def flush_in_time(self) -> None:
        """Flush, if the last time was a while ago."""
        if time.monotonic() - self._flushed > REPORT_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Send the step reports that are resolved."""
        self._flushed = time.monotonic()
        # Looked at once each: another thread may resolve one at any moment.
        flags = [report.resolved for report in self._waiting]
        reports = [r for r, resolved in zip(self._waiting, flags, strict=True) if resolved]
        if not reports:
            return
        self._waiting = [r for r, done in zip(self._waiting, flags, strict=True) if not done]
        losses = read_all([report.loss for report in reports])
        weights = read_all([report.weight for report in reports])
        rows = [
            StepRow(
                step=r.step,
                weight=weight,
                loss_sum=loss,
                lr=r.lr,
                step_s=r.step_s,
                compute_s=_seconds(r),
                wait_s=r.wait_s,
                bytes_sent=r.bytes_sent,
                part=r.part,
                staleness=r.staleness,
                dropped=r.dropped,
                measures={name: (total, each) for name, (total, each) in measures.items()},
            )
            for r, weight, loss, measures in zip(
                reports, weights, losses, _read_measures(reports), strict=True
            )
        ]
        self.send(StepsReport, rows=rows)

    def join(self, view: int) -> None:
        """The worker has joined a view: what is not resolved by now never will be."""
        self.flush()  # still of the view before: what is in the weights counts there
        self._waiting.clear()
        self.view = view


def _seconds(report: StepReport) -> float | None:
    spent = report.compute_s
    return spent.seconds() if isinstance(spent, DeviceTime) else spent


def _read_measures(reports: Sequence[StepReport]) -> list[Sums]:
    """What the job has logged in each step, read from its device at once."""
    logged = [each for report in reports for each in report.logged]
    values = iter(read_all([value for _, value, _ in logged]))
    weights = iter(read_all([weight for _, _, weight in logged]))
    return [
        add_up((name, next(values), next(weights)) for name, _, _ in report.logged)
        for report in reports
    ]


def read_all(values: Sequence[float | torch.Tensor]) -> list[float]:
    """Read numbers, some of which are on a device, at once."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(numbers) if isinstance(value, torch.Tensor) else value for value in values]
