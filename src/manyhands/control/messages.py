"""The messages between the coordinator and its workers and servers: one dataclass per message.

    to a member      an Assignment when it starts, then orders
    from a member    Ready, then reports

`parse` and `read_order` check each message in the thread that receives it: no other code sees a message
with missing or wrong fields. Whether it makes sense at this point of the run is for the driver to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from manyhands.errors import ProtocolError
from manyhands.hosts.messages import OF_MEMBERS, read_kind
from manyhands.hosts.view import Seat
from manyhands.ranges import Range
from manyhands.transport.fields import Count, Positive, Seconds, Weight, read, write

T = TypeVar("T")


# To a member --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """What a member is started for."""

    job: str
    """path.py or path.py:Name"""
    settings: Mapping[str, str]
    strategy: str
    """The spec."""
    device: str
    run: str
    """The run folder."""
    shared_cores: Count = 0
    trust_network: bool = False
    debug: bool = False
    schedule: str = ""
    checkpoint: str | None = None
    """Where to load the state from."""
    init_from: str | None = None
    """The checkpoint whose weights a new run starts with."""
    spans_hosts: bool = False
    """If true, members may run on several hosts, now or later."""
    saves: bool = False
    """If true, it writes the checkpoints for as long as it lives."""


@dataclass(slots=True)
class Portion:
    """What one worker computes in one global step. Not frozen, as StepRow."""

    as_list: ClassVar[bool] = True

    step: int
    epoch: int
    total: int
    """Samples of all workers in this step."""
    ranges: tuple[Range, ...]
    """The samples of this worker."""
    part: int = 0
    """Which part of the step this is; in lockstep, this worker's rank."""
    lr_factor: float = 1.0
    """Factor of the learning rate."""
    ticks: int = 1
    """How often the schedule is stepped after the whole step."""

    @property
    def samples(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class TrainOrder:
    portions: list[Portion]


@dataclass(frozen=True)
class RestOrder:
    """Nothing is left to do before the others are done, too."""


@dataclass(frozen=True)
class EvaluateOrder:
    step: Count
    epoch: Count
    part: tuple[float, float, float]
    """(from, to, of how much): the part of the evaluation data."""


@dataclass(frozen=True)
class CheckpointOrder:
    step: Count


@dataclass(frozen=True)
class RehearseOrder:
    """Do everything but train, with one sample."""


@dataclass(frozen=True)
class StopOrder:
    """Finish what is being saved."""


@dataclass(frozen=True)
class LeaveOrder:
    """All have stopped: end."""


Order = (
    TrainOrder
    | RestOrder
    | EvaluateOrder
    | CheckpointOrder
    | RehearseOrder
    | StopOrder
    | LeaveOrder
)
ORDERS: Mapping[str, type[Order]] = {
    "steps": TrainOrder,
    "rest": RestOrder,
    "evaluate": EvaluateOrder,
    "checkpoint": CheckpointOrder,
    "rehearse": RehearseOrder,
    "stop": StopOrder,
    "leave": LeaveOrder,
}


def write_order(order: Order) -> dict[str, Any]:
    return {"kind": "order", "order": ORDER_NAMES[type(order)], **write(order)}


def read_order(head: Mapping[str, Any]) -> Order:
    return read(_kind(ORDERS, head.get("order"), "orders"), head)


# From a member ------------------------------------------------------------------------------------


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
    """The steps and parts that are in the weights."""

    version: Count
    applied: list[tuple[Count, int] | tuple[Count, int, Weight, float]]
    """(step, part), and weight and loss where they are known."""
    pushes: Mapping[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    view: Count
    """Number of the view that it belongs to."""


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


@dataclass(slots=True)
class StepRow:
    """One member's report of one part of one step.

    Not frozen: one is made in each step, and a frozen dataclass takes three times as long to make.
    """

    as_list: ClassVar[bool] = True

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
    """If true, it is not in the weights."""
    measures: Mapping[str, tuple[float, Weight]] = field(default_factory=dict)
    """What the job has logged: name to (sum of value times weight, weight)."""


@dataclass(frozen=True)
class StepsReport(Report):
    rows: list[StepRow]


@dataclass(frozen=True)
class EvaluationReport(Report):
    samples: Count
    sums: Mapping[str, tuple[float, Weight]]
    """Metric to (weighted sum, weight)."""
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
    """Why it could not be saved; then there are no files."""
    not_finite: list[str] = field(default_factory=list)
    """Names of weights that are not finite, if that is why."""


@dataclass(frozen=True)
class Notice(Report):
    """A message for people."""

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
    """A peer sent an invalid message, and its link was closed."""

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
    """Read a member's message; ProtocolError if it is none."""
    match head.get("kind"):
        case "ready":
            return read(Ready, head)
        case "report":
            return read(_kind(REPORTS, head.get("what"), "reports"), head)
    return read_kind(OF_MEMBERS, head)


def write_report(report: Report) -> dict[str, Any]:
    return {"kind": "report", "what": REPORT_NAMES[type(report)], **write(report)}


ORDER_NAMES = {kind: name for name, kind in ORDERS.items()}
REPORT_NAMES = {kind: name for name, kind in REPORTS.items()}


def _kind(kinds: Mapping[str, type[T]], name: object, verb: str) -> type[T]:
    if not isinstance(name, str) or name not in kinds:
        raise ProtocolError(f"it {verb} {str(name)[:80]!r}, which is unknown")
    return kinds[name]
