"""The events of a run, in this order:

    RunStarted
        MemberStarted*                      one per process
        MemberReady*                        job loaded, model and data built
        Resumed?                            from which checkpoint; later steps are void
        ViewChanged                         the members from now on
        repeat:
            StepCommitted*                  samples per member, loss
            MemberTimes?                    once a second: what each member did since the last one
            Evaluated?                      on all workers, after an epoch or a number of steps
            TargetReached?                  with --target: that evaluation reached it
            RateChanged?                    new factor of the learning rate, new batch size
            CheckpointSaved?
            Noticed*                        a note for the user; no action needed
            ScaleAnswered?                  a request for another number of workers
            Injected*                       with --chaos: an injected fault
            MemberLost+ ViewChanged Recovered StepCommitted     a member died, the others continue
            MemberStarted MemberReady ViewChanged   a replacement joined
        Stopping?                           Ctrl-C, SIGTERM, --max-time
        MemberFailed? MemberExited*
    RunFinished                             outcome and summary

Every event becomes one line of `events.jsonl`: {"time": seconds, "event": "StepCommitted", ...}.
That file is the source of truth; everything else about a run can be derived from it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MEMBER_COLUMNS = (
    "steps",
    "samples",
    "compute_s",
    "wait_s",
    "waited_for",
    "bytes_sent",
    "staleness",
    "phase",
)
"""What a row of MemberTimes has, in this order."""
MemberRow = tuple[
    int, int | None, float | None, float | None, str | None, int | None, float | None, str
]
MembersSummary = Mapping[str, int | tuple[float, float, float] | Mapping[str, int] | None]
Range = tuple[int, int]
"""Positions [start, stop) in the epoch's permutation."""


@dataclass(frozen=True, kw_only=True)
class Event:
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The contents of the start banner."""

    run: str
    """Path of the run folder."""
    job: str
    """The job as typed: path.py or path.py:Name."""
    strategy: str
    workers: int
    versions: Mapping[str, str]
    """Of manyhands, python, torch."""
    init_from: str | None = None
    """The checkpoint of another run whose weights it starts with."""


@dataclass(frozen=True, kw_only=True)
class MemberStarted(Event):
    member: str
    host: str
    pid: int
    log: str


@dataclass(frozen=True, kw_only=True)
class MemberReady(Event):
    member: str
    device: str
    """torch's name with the device's own: "cuda:0 (NVIDIA H200)", "cpu (1 thread)"."""
    parameters: int
    """Number of elements of the model's parameters."""
    train_samples: int
    eval_samples: int
    """Samples of an evaluation."""
    batch_size: int
    epochs: int | None
    """None if the job trains for a number of steps."""
    steps: int
    """Global steps of the whole training."""
    unit: str = "samples"
    """Unit of the speed; `units_per_sample` of them make a sample."""
    units_per_sample: float = 1.0
    tables: Mapping[str, str] = field(default_factory=dict)
    """The model's sparse tables, name to description."""
    monitor: str = ""
    """The metric that selects the best model, with its direction: "min loss"; empty if there is none."""
    measures: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Measures of the job and the strategy by name: unit, rule ("sum", "mean", "max", "last"), help."""


@dataclass(frozen=True, kw_only=True)
class ViewChanged(Event):
    view: int
    members: tuple[str, ...]
    """In rank order; dedicated servers come last."""
    transport: str
    """What carries the gradients: "none", "gloo on lo", "nccl"."""
    placement: str = ""
    """Description of where the weights are stored."""
    servers: int = 0
    """Number of dedicated servers."""
    replica_size: int = 1
    """Number of workers in each replica: neighbours in rank, which compute the same samples."""
    standby: tuple[str, ...] = ()
    """Workers that stand by: alive and in no view, because the strategy needs whole replicas."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """Voids earlier lines of the file about steps after `step`."""

    step: int
    epoch: int
    checkpoint: str | None
    workers: int


@dataclass(frozen=True, kw_only=True)
class StepCommitted(Event):
    step: int
    """Counted from 1 over the whole training."""
    epoch: int
    """Counted from 0."""
    samples: int
    shares: Mapping[str, tuple[Range, ...]]
    """Positions of the epoch's permutation that each member used. With several workers in a replica, the
    replica's, under the name of its first worker."""
    loss: float
    """Mean over all samples of the step."""
    lr: float
    step_s: float
    """The slowest member's time for the step."""
    compute_s: float | None
    """Mean over members; None if the host's clock can't measure it (on a GPU)."""
    wait_s: float | None
    """Mean over members of the time spent waiting for others; None likewise."""
    bytes_sent: int
    """By all members."""
    staleness: float | None = None
    """Updates between reading the weights and changing them, mean over its parts; None in lockstep."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """What the job logged with self.log() and what the strategy measured, by name. MemberReady has units
    and rules; a measure that is not listed there is a mean over all samples of the step."""


@dataclass(frozen=True, kw_only=True)
class MemberTimes(Event):
    """What each member has done since the last event of this kind: at most once a second, and once at the
    end. In a run without failures, the samples of all of them add up to those of the steps."""

    step: int
    """Up to this one, all steps are committed."""
    seconds: float
    """Time since the last event of this kind, or since training began."""
    members: Mapping[str, MemberRow]
    """By name: the values of MEMBER_COLUMNS; None where one is not known, or the member has none. All
    members if they are few, otherwise those that stand out."""
    others: Mapping[str, MembersSummary]
    """Of the other "workers" and "servers": how many `members`; the least, the mean and the most of each
    column of numbers; of `waited_for` and `phase`, the most frequent values with their counts."""


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    step: int
    epoch: int
    samples: int
    metrics: Mapping[str, float]
    """"loss" and the results of the job's metrics(), means over all evaluation samples."""
    best: bool
    """If true, it is better than every earlier evaluation, by the job's `monitor`."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TargetReached(Event):
    """An evaluation reached the target of this start, which ends with it.

    All counts and times are those of the whole run, earlier starts included. The times are None if the run
    was started by a version that did not save them."""

    step: int
    epoch: int
    samples: int
    """Samples trained on so far."""
    metric: str
    value: float
    """Of the evaluation."""
    target: float
    time_to_target_s: float | None
    """Time spent training, without start-up and evaluations."""
    startup_s: float | None
    evaluation_s: float | None


@dataclass(frozen=True, kw_only=True)
class RateChanged(Event):
    """The factor on the scheduled learning rate, or the batch size, has changed."""

    step: int
    """The first step that it applies to."""
    factor: float
    """Final factor on the schedule's learning rate."""
    over: int
    """Number of equal steps until it is reached; 0: at once."""
    batch_size: int
    """The global batch from that step on."""
    steps: int
    """Global steps of the whole training, unless it changes again."""
    reason: str
    """"4 workers", or what triggered the plateau rule."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    step: int
    path: str
    """Relative to the run folder."""
    bytes: int
    stall_s: float
    """How long training paused for it."""
    write_s: float
    """How long writing took, in parallel with training."""


@dataclass(frozen=True, kw_only=True)
class Noticed(Event):
    """A note for the user, such as a warning with a remedy; never a failure."""

    message: str


@dataclass(frozen=True, kw_only=True)
class ScaleAnswered(Event):
    """The answer to a request of `manyhands scale`."""

    workers: int
    """The number that was requested."""
    accepted: bool
    message: str
    """The answer, for the user."""


@dataclass(frozen=True, kw_only=True)
class Stopping(Event):
    reason: str


@dataclass(frozen=True, kw_only=True)
class MemberFailed(Event):
    """The FIRST failing member of a run, and why."""

    member: str
    reason: str
    """"killed by SIGKILL", "ValueError: ...", "sent nothing for 60 s (last phase: ...)"."""
    traceback: str
    log: str
    """Path of the member's log."""


@dataclass(frozen=True, kw_only=True)
class Injected(Event):
    """A fault was injected into a member."""

    fault: str
    """"kill", "pause", "cut link"."""
    member: str
    seconds: float = 0.0
    """Its duration, if it has one."""


@dataclass(frozen=True, kw_only=True)
class MemberLost(Event):
    """A member died, and training continues without it."""

    member: str
    reason: str
    """"killed by SIGKILL", "sent nothing for 60 s ..."."""
    view: int
    """The view that it was in."""
    workers: int
    """How many workers are left."""


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """The run has recovered from a death: the first new step is committed or evaluated, and its event
    follows; or nothing was left to do."""

    view: int
    seconds: float
    """How long nothing new was committed: the sum of the three times below. In runs without them, only from
    the detection until all had joined."""
    redone_steps: int
    """Number of steps that were dispatched again, at least in part."""
    detection_s: float | None = None
    """From the last step or evaluation before the death until the first death was noticed."""
    view_s: float | None = None
    """From then until all members had joined the next view."""
    redo_s: float | None = None
    """From then until the first new step was committed. After a restart from a checkpoint, new steps are
    those after the last one committed before."""


@dataclass(frozen=True, kw_only=True)
class MemberExited(Event):
    member: str
    exit_code: int
    """Negative: the signal that ended it."""


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    outcome: str
    """"finished", "early-stopped", "limit", "target", "interrupted", "preempted", "diverged", "failed"."""
    summary: Mapping[str, Any]
    """As in summary.json."""
    resume_command: str | None
    """The command to continue, or None if there is nothing left to do."""
    advice: str = ""
    """What to change before that, if it would otherwise end in the same way."""


def to_record(event: Event) -> dict[str, Any]:
    """Convert the event to a JSON-ready dict, with "time" and "event" first."""
    values = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    return {"time": values.pop("time"), "event": type(event).__name__, **values}
