"""The events of a run. Their order is the life of a run:

    RunStarted
        MemberStarted*                      one a process
        MemberReady*                        job loaded, model and data built
        Resumed?                            from which checkpoint; steps after it are void
        ViewChanged                         who takes part, from now on
        repeat:
            StepCommitted*                  which samples, by whom, the loss
            Evaluated?                      on all workers, after an epoch
            RateChanged?                    the learning rate has another factor, the batch another size
            CheckpointSaved?
            Noticed*                        anything a person should know but need not act on
            Injected*                       with --chaos: a fault on purpose
            MemberLost+ ViewChanged Recovered       a member died, and the others went on
            MemberStarted MemberReady ViewChanged   another one took its place
        Stopping?                           Ctrl-C, SIGTERM, early stop
        MemberFailed? MemberExited*
    RunFinished                             outcome and summary

Every event becomes one line of `events.jsonl`: {"time": seconds, "event": "StepCommitted", ...}.
That file is the truth; every other view of a run can be made from it again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Range = tuple[int, int]
"""Positions [start, stop) in the epoch's permutation."""


@dataclass(frozen=True, kw_only=True)
class Event:
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """All that the start banner shows."""

    run: str
    """Path of the run folder."""
    job: str
    """The job as it was given: path.py or path.py:Name."""
    strategy: str
    workers: int
    versions: Mapping[str, str]
    """Of manyhands, python, torch."""
    init_from: str | None = None
    """The checkpoint of another run whose weights it begins with."""


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
    """As torch says it, with the device's name: "cuda:0 (NVIDIA H200)", "cpu (1 thread)"."""
    parameters: int
    """Elements of the model's parameters."""
    train_samples: int
    eval_samples: int
    batch_size: int
    epochs: int
    steps: int
    """Global steps of the whole training."""
    unit: str = "samples"
    """What speed is told in, and how many of them a sample has."""
    units_per_sample: float = 1.0
    tables: Mapping[str, str] = field(default_factory=dict)
    """The model's sparse tables, each described in words."""
    monitor: str = ""
    """The metric that decides which model is best, and its direction: "min loss"; empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class ViewChanged(Event):
    view: int
    members: tuple[str, ...]
    """In rank order; those that only serve come last."""
    transport: str
    """What carries the gradients: "none", "gloo on lo", "nccl"."""
    placement: str = ""
    """Where the weights lie, in words."""
    servers: int = 0
    """How many of the members only serve."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """From here on, the steps after `step` that stand above in the file are void."""

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
    """Which positions of the epoch's permutation each member used."""
    loss: float
    """Mean over all samples of the step."""
    lr: float
    step_s: float
    """Slowest member's time for the step."""
    compute_s: float | None
    """Mean over members; None where the host's clock can't tell (on a GPU)."""
    wait_s: float | None
    """Mean over members of the time waited for others; None likewise."""
    bytes_sent: int
    """By all members."""
    staleness: float | None = None
    """Mean over its parts of the updates between reading the weights and changing them; None in lockstep."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """What the job has logged by self.log(), means over all samples of the step."""


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    step: int
    epoch: int
    samples: int
    metrics: Mapping[str, float]
    """"loss" and what the job's metrics() gives, means over all evaluation samples."""
    best: bool
    """Better than every evaluation before, by the job's `monitor`."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RateChanged(Event):
    """What the learning rate of all workers is multiplied by, besides its schedule, is another now."""

    step: int
    """The first one that it holds for."""
    factor: float
    """In the end; the schedule's learning rate is multiplied by it."""
    over: int
    """Steps until then, in equal parts; 0: at once."""
    batch_size: int
    """The global batch from that step on."""
    steps: int
    """Global steps of the whole training, if nothing changes any more."""
    reason: str
    """"4 workers", or what the plateau rule has seen."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    step: int
    path: str
    """Relative to the run folder."""
    bytes: int
    stall_s: float
    """How long training stood still for it."""
    write_s: float
    """How long the writing took, beside the training."""


@dataclass(frozen=True, kw_only=True)
class Noticed(Event):
    """Something a person should know: a warning with a remedy, never a failure."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Stopping(Event):
    reason: str


@dataclass(frozen=True, kw_only=True)
class MemberFailed(Event):
    """The FIRST failing member of a run, and why."""

    member: str
    reason: str
    """"killed by SIGKILL", "ValueError: ...", "said nothing for 60 s in phase ..."."""
    traceback: str
    log: str
    """Path of the member's log."""


@dataclass(frozen=True, kw_only=True)
class Injected(Event):
    """A fault was done to a member on purpose."""

    fault: str
    """"kill", "pause", "cut link"."""
    member: str
    seconds: float = 0.0
    """How long it lasts, if it does."""


@dataclass(frozen=True, kw_only=True)
class MemberLost(Event):
    """A member died, and the training goes on without it."""

    member: str
    reason: str
    """"killed by SIGKILL", "said nothing for 60 s ..."."""
    view: int
    """The one that it was in."""
    workers: int
    """How many are left."""


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """The members that are left have agreed on what is in the weights, and train."""

    view: int
    seconds: float
    """Since the first of the deaths was noticed."""
    redone_steps: int
    """Steps of which something has to be computed again."""


@dataclass(frozen=True, kw_only=True)
class MemberExited(Event):
    member: str
    exit_code: int
    """Negative: the signal that ended it."""


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    outcome: str
    """"finished", "early-stopped", "interrupted", "preempted", "diverged", "failed"."""
    summary: Mapping[str, Any]
    """As in summary.json."""
    resume_command: str | None
    """What to type to go on, or None if there is nothing left to do."""
    advice: str = ""
    """What to do before, if it would only end in the same way again."""


EVENT_TYPES: dict[str, type[Event]] = {
    cls.__name__: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, Event)
}


def to_record(event: Event) -> dict[str, Any]:
    """The event as a JSON-ready dict, with "time" and "event" first."""
    values = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    return {"time": values.pop("time"), "event": type(event).__name__, **values}


def from_record(record: Mapping[str, Any]) -> Event:
    """The event of a record; fields this version does not know are left out."""
    cls = EVENT_TYPES[record["event"]]
    known = {f.name for f in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in record.items() if key in known})
