"""The messages between the coordinator and its members: one dataclass per message.

    to a member      an Assignment when it starts, then TO_MEMBER: views and orders
    from a member    FROM_MEMBER: Hello, Ready, then reports

Messages are parsed in the thread that receives them: no other code sees a message with missing or wrong
fields. Whether a message makes sense at this point of the run is for the driver to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, get_args

from manyhands.contract import AppliedSteps
from manyhands.costs import ModelSize
from manyhands.hosts.messages import (
    Beat,
    BoardPost,
    Bye,
    Failed,
    Hello,
    Posted,
    Report,
    ViewFormed,
    WriteStacks,
)
from manyhands.hosts.view import Seat
from manyhands.job_length import is_interval
from manyhands.measure import Measure
from manyhands.ranges import Range
from manyhands.transport.fields import Count, MessageSet, Positive, Seconds, Weight, check

# To a member --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """Task of a member."""

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
    """Checkpoint from which to load the state."""
    init_from: str | None = None
    """The checkpoint whose weights a new run starts with."""
    spans_hosts: bool = False
    """If true, members may run on several hosts, now or later."""
    saves: bool = False
    """If true, this worker writes to the first checkpoint, so it loads the code for that at its start."""
    takes: tuple[Count, Positive] = (0, 1)
    """(first, stride): ranks of the saved workers whose states in the checkpoint this worker takes over."""


@dataclass(slots=True)
class Portion:
    """Work of one worker, or of all workers of a replica, in one global step. Not frozen, as StepRow."""

    as_list: ClassVar[bool] = True

    step: int
    epoch: int
    total: int
    """Samples of all workers in this step."""
    ranges: tuple[Range, ...]
    """The samples of this worker's replica."""
    part: int = 0
    """Number of the part within the step; in lockstep, the index of this worker's replica."""
    lr_factor: float = 1.0
    """Factor of the learning rate."""
    ticks: int = 1
    """Number of times that the schedule is stepped after the whole step."""
    first: int = 0
    """In lockstep, the index of the first replica that has samples in this step."""

    @property
    def samples(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class TrainOrder:
    portions: list[Portion]


@dataclass(frozen=True)
class RestOrder:
    """Order to rest: there is nothing to do before the others are done too."""


def _is_part(value: tuple[float, float, float]) -> bool:
    start, stop, whole = value
    return 0 <= start <= stop <= 1.01 * whole and 0 < whole < 1e300


@dataclass(frozen=True)
class EvaluateOrder:
    step: Count
    epoch: Count
    part: Annotated[tuple[float, float, float], check(_is_part, "is not a part")]
    """(start, stop, total): the part of the evaluation data."""


@dataclass(frozen=True)
class CheckpointOrder:
    step: Count


@dataclass(frozen=True)
class HandOverOrder:
    """Workers are about to leave: send the state that each holds alone to another one."""

    number: Count
    receivers: Mapping[str, str]
    """For each worker that leaves, the one that gets its state."""


@dataclass(frozen=True)
class RehearseOrder:
    """Do everything but train, with one sample."""


@dataclass(frozen=True)
class StopOrder:
    """Finish what is being saved."""


@dataclass(frozen=True)
class LeaveOrder:
    """Order to exit: all have stopped."""


Order = (
    TrainOrder
    | RestOrder
    | EvaluateOrder
    | CheckpointOrder
    | HandOverOrder
    | RehearseOrder
    | StopOrder
    | LeaveOrder
)
TO_MEMBER = MessageSet(ViewFormed, Posted, WriteStacks, *get_args(Order))


# From a member ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobFields:
    """The fields of a job that the coordinator uses."""

    batch_size: Positive
    epochs: Positive | None
    eval_every: Annotated[int | str, check(is_interval, "is not a number of epochs or steps")]
    monitor: str
    patience: int | None
    plateau: str | None = None
    steps: Positive | None = None
    """Instead of epochs."""
    eval_samples: Positive | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("it needs either steps or epochs")


@dataclass(frozen=True)
class BuiltFacts:
    """Facts that a worker finds out when it builds what trains the model."""

    metrics: list[str]
    """Names of the metrics of an evaluation."""
    optimizer: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes for people."""


@dataclass(frozen=True)
class WorkerFacts:
    """Facts about the job, which a worker finds out when it loads it."""

    job: str
    fields: JobFields
    all_fields: Mapping[str, Any]
    """All fields of the job, as JSON."""
    device: str
    torch: str
    parameters: Count
    train_samples: Count
    eval_samples: Count
    unit: tuple[str, Weight]
    tables: Mapping[str, str]
    measures: list[Measure] = field(default_factory=list)
    """The registered measures, and those of the job."""
    row_model: str = ""
    """Name of the model, if it changes rows itself."""
    built: BuiltFacts | None = None
    """None if the worker builds in its first view: `ViewJoined` has them then."""

    @property
    def metrics(self) -> list[str] | None:
        """Names of the metrics of an evaluation; None if they are not known yet."""
        if not self.eval_samples:
            return []
        return None if self.built is None else self.built.metrics


@dataclass(frozen=True)
class Ready:
    seat: Seat
    facts: WorkerFacts | None = None
    """From workers only."""


@dataclass(frozen=True)
class ViewJoined(Report):
    """The sender has joined the view; the fields are those of the contract's `Joined`."""

    transport: str
    applied: AppliedSteps | None = None
    placement: str = ""
    catching_up: bool = False
    whole_steps: bool = False
    built: BuiltFacts | None = None
    """From a worker that builds in each view."""


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
    """Name to (number, weight): what the job has logged and the learner has added; see measure.py."""
    waited_for: str = ""
    """The server that it waited for longest, if it knows."""


@dataclass(frozen=True)
class StepsReport(Report):
    rows: list[StepRow]
    """Of steps that are known to be in the weights or not."""
    computed: Count = 0
    """Number of portions that the worker has computed in this view, also those whose rows follow later."""
    computed_s: Seconds = 0.0
    """Time that they took."""


@dataclass(frozen=True)
class EvaluationReport(Report):
    samples: Count
    sums: Mapping[str, tuple[float, Weight]]
    """Metric to (number, weight); see measure.py."""
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
    """Reason why it could not be saved; then there are no files."""
    not_finite: list[str] = field(default_factory=list)
    """Names of weights that are not finite, if that is why."""


@dataclass(frozen=True)
class HandedOver(Report):
    number: Count
    """That of the order."""


@dataclass(frozen=True)
class Notice(Report):
    """A message for people."""

    message: str


@dataclass(frozen=True)
class Rehearsed(Report):
    model: ModelSize | None = None
    """What its costs are computed from."""


@dataclass(frozen=True)
class Stopped(Report):
    pass


@dataclass(frozen=True)
class Left(Report):
    applied: AppliedSteps | None = None


FROM_MEMBER = MessageSet(Hello, Ready, Beat, BoardPost, Failed, Bye, *Report.__subclasses__())
