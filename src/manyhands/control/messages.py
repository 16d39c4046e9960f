"""What members say to the coordinator of their training: one dataclass a message.

`parse` reads them at the edge, in the thread that hears a member: nothing inside sees a message whose fields
are missing or of another type. Whether it makes sense at this point of the run only the conductor knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import ProtocolError
from manyhands.hosts.messages import OF_MEMBERS, read_kind
from manyhands.hosts.view import Seat
from manyhands.transport.fields import Count, Positive, Seconds, Weight, read


@dataclass(frozen=True)
class JobFields:
    """The fields of a job that the coordinator uses."""

    batch_size: Positive
    epochs: Positive
    eval_every: Positive
    monitor: str
    patience: int | None
    plateau: str | None = None


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker found out about the job when it built it."""

    job: str
    fields: JobFields
    all_fields: Mapping[str, Any]
    """All fields of the job, as JSON."""
    metrics: list[str]
    device: str
    torch: str
    parameters: Count
    train_samples: Count
    eval_samples: Count
    unit: tuple[str, Weight]
    tables: Mapping[str, str]
    optimizer: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ready:
    seat: Seat
    facts: WorkerFacts | None = None
    """Workers have them, servers do not."""


@dataclass(frozen=True)
class AppliedSteps:
    """What is in the weights."""

    version: Count
    applied: list[tuple[Count, int] | tuple[Count, int, Weight, float]]
    """(step, part), and weight and loss where they are known."""
    pushes: Mapping[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    view: Count
    """The view that it is of."""


@dataclass(frozen=True)
class Joined(Report):
    transport: str
    settled: AppliedSteps | None = None
    placement: str = ""
    catching_up: bool = False
    whole_steps: bool = False


@dataclass(frozen=True)
class CaughtUp(Report):
    pass


@dataclass(frozen=True)
class StepRow:
    """One member's report of one part of one step, as it travels."""

    step: Count
    weight: Weight
    loss_sum: float
    lr: float
    step_s: Seconds
    compute_s: Seconds | None
    wait_s: Seconds | None
    bytes_sent: Count
    part: Count = 0
    staleness: Count = 0
    dropped: bool = False
    """Left out of the weights."""
    measures: Mapping[str, tuple[float, Weight]] = field(default_factory=dict)
    """What the job has logged: name to [sum of value times weight, weight]."""


@dataclass(frozen=True)
class StepsReport(Report):
    rows: list[StepRow]


@dataclass(frozen=True)
class EvaluationReport(Report):
    samples: Count
    sums: Mapping[str, tuple[float, Weight]]
    """Of each metric, its weighted sum and the weight."""
    seconds: Seconds


@dataclass(frozen=True)
class Saving(Report):
    step: Count


@dataclass(frozen=True)
class FileFacts:
    bytes: Count
    crc32: str


@dataclass(frozen=True)
class Saved(Report):
    step: Count
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    bytes: Count = 0
    stall_s: Seconds = 0.0
    write_s: Seconds = 0.0
    error: str = ""
    """Why it could not be; then there are no files."""
    not_finite: list[str] = field(default_factory=list)
    """If that is why: the weights that are not."""


@dataclass(frozen=True)
class Notice(Report):
    """Something a person should know."""

    message: str


@dataclass(frozen=True)
class Rehearsed(Report):
    pass


@dataclass(frozen=True)
class Stopped(Report):
    pass


@dataclass(frozen=True)
class Left(Report):
    settled: AppliedSteps | None = None


@dataclass(frozen=True)
class LinkBroken(Report):
    peer: str


@dataclass(frozen=True)
class PeerRefused(Report):
    """A peer has said what makes no sense, and its link was closed."""

    peer: str
    why: str


REPORTS: Mapping[str, type[Report]] = {
    "joined": Joined,
    "caught_up": CaughtUp,
    "steps": StepsReport,
    "evaluated": EvaluationReport,
    "saving": Saving,
    "saved": Saved,
    "noticed": Notice,
    "rehearsed": Rehearsed,
    "stopped": Stopped,
    "left": Left,
    "torn": LinkBroken,
    "refused": PeerRefused,
}


def parse(head: Mapping[str, Any]) -> Any:
    """A member's message as its dataclass; ProtocolError if it is none."""
    match head.get("kind"):
        case "ready":
            return read(Ready, head)
        case "report":
            what = head.get("what")
            if not isinstance(what, str) or what not in REPORTS:
                raise ProtocolError(f"it reports {str(what)[:80]!r}, which nobody knows")
            return read(REPORTS[what], head)
    return read_kind(OF_MEMBERS, head)
