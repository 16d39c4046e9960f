"""Sends the reports of a worker.

Step reports are gathered and sent a few times a second, and losses are read from the device only then, so
that a step costs no message and no synchronisation of its own. A report whose step may still be dropped, or
is in the weights only when a round has ended, is kept until the learner knows. That the step is computed is
reported at once: the coordinator dispatches orders ahead of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from manyhands.compute.gradients import DeviceTime
from manyhands.compute.measures import add_up
from manyhands.contract import StepReport
from manyhands.control.messages import Notice, Report, StepRow, StepsReport
from manyhands.errors import LinkError
from manyhands.hosts.member import Member
from manyhands.measure import Pair, registered

REPORT_EVERY_S = 0.1
_NOTHING: dict[str, Pair] = {}
"""The measures of a step that has none."""


class Reporter:
    def __init__(self, member: Member) -> None:
        self.view = 0
        """Number of the view that the worker has joined, and that it reports of."""
        self._member = member
        self._waiting: list[StepReport] = []
        self._flushed = time.monotonic()
        self._computed, self._computed_s = 0, 0.0
        """Portions computed in this view, and the time that they took."""
        self._computed_sent = 0

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
        """Take in a step that is computed."""
        self._waiting.append(report)
        self._computed += 1
        self._computed_s += report.step_s

    def flush_in_time(self) -> None:
        """Flush, if the last time was a while ago."""
        if time.monotonic() - self._flushed > REPORT_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Send the step reports that are resolved, and how much is computed."""
        self._flushed = time.monotonic()
        # Looked at once each: another thread may resolve one at any moment.
        flags = [report.resolved for report in self._waiting]
        reports = [r for r, resolved in zip(self._waiting, flags, strict=True) if resolved]
        if not reports and self._computed == self._computed_sent:
            return
        self._waiting = [r for r, done in zip(self._waiting, flags, strict=True) if not done]
        self._computed_sent = self._computed
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
                measures=measures,
                waited_for=r.waited_for,
            )
            for r, weight, loss, measures in zip(
                reports, weights, losses, _read_measures(reports), strict=True
            )
        ]
        self.send(StepsReport, rows=rows, computed=self._computed, computed_s=self._computed_s)

    def join(self, view: int) -> None:
        """Begin a view, and forget unresolved steps: they will never be resolved."""
        self.flush()  # still of the view before: what is in the weights counts there
        self._waiting.clear()
        self._computed, self._computed_s, self._computed_sent = 0, 0.0, 0
        self.view = view


def _seconds(report: StepReport) -> float | None:
    spent = report.compute_s
    return spent.seconds() if isinstance(spent, DeviceTime) else spent


def _read_measures(reports: Sequence[StepReport]) -> list[dict[str, Pair]]:
    """Return the measures of each step: what the job has logged and the learner has added, read from their
    device at once."""
    found: list[dict[str, Pair]] = [_NOTHING] * len(reports)
    some = [i for i, report in enumerate(reports) if report.logged or report.measures]
    if some:
        known = registered()
        logged = [
            [
                *reports[i].logged,
                *((known[name], value, 1.0) for name, value in reports[i].measures.items()),
            ]
            for i in some
        ]
        values = iter(read_all([value for step in logged for _, value, _ in step]))
        weights = iter(read_all([weight for step in logged for _, _, weight in step]))
        for i, step in zip(some, logged, strict=True):
            found[i] = add_up((measure, next(values), next(weights)) for measure, _, _ in step)
    return found


def read_all(values: Sequence[float | torch.Tensor]) -> list[float]:
    """Read numbers, some of which are on a device, at once."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(numbers) if isinstance(value, torch.Tensor) else value for value in values]
