"""Reports of steps: when they are sent, and that what is computed is reported before it is in the weights."""

from __future__ import annotations

from typing import Any

from manyhands.contract import StepReport
from manyhands.control.messages import StepsReport
from manyhands.worker.reporter import Reporter


class Sent:
    """The link of a member, as far as the reporter uses it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: object) -> None:
        self.messages.append(message)

    def take(self) -> list[tuple[list[int], int, float]]:
        """Return the steps of each report, and how much it says is computed."""
        taken, self.messages = self.messages, []
        assert all(isinstance(message, StepsReport) for message in taken)
        return [([row.step for row in m.rows], m.computed, m.computed_s) for m in taken]


def report(step: int, *, resolved: bool) -> StepReport:
    return StepReport(step, 4, 4.0, 2.0, 0.1, step_s=0.5, resolved=resolved)


def test_what_is_computed_is_reported_before_it_is_in_the_weights() -> None:
    sent = Sent()
    reporter = Reporter(sent)  # type: ignore[arg-type]
    reporter.join(1)
    open_steps = [report(step, resolved=False) for step in (1, 2, 3)]
    for each in open_steps[:2]:
        reporter.add(each)
    reporter.flush()
    reporter.flush()
    assert sent.take() == [([], 2, 1.0)], "once"
    reporter.add(open_steps[2])
    for each in open_steps:
        each.resolved = True
    reporter.flush()
    assert sent.take() == [([1, 2, 3], 3, 1.5)]
    reporter.flush()
    assert sent.take() == []


def test_a_view_counts_from_the_start() -> None:
    sent = Sent()
    reporter = Reporter(sent)  # type: ignore[arg-type]
    reporter.join(1)
    reporter.add(report(1, resolved=True))
    reporter.add(report(2, resolved=False))
    reporter.join(2)
    assert sent.take() == [([1], 2, 1.0)], "before it joins; what is unresolved never will be"
    reporter.add(report(2, resolved=True))
    reporter.flush()
    assert sent.take() == [([2], 1, 0.5)]
