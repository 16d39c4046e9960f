"""Write scalars for TensorBoard with TensorBoard's own event writer; torch is not needed.

Tags: train/loss, train/lr, train/samples_per_s, time/step_s, time/compute_s, time/wait_s,
comm/bytes_sent, eval/<metric>, checkpoint/stall_s, and a text "run" with the start banner; without
lockstep also train/staleness, and at the end a text "staleness" with its histogram; train/<name> for what
the job logs and the strategy measures; train/lr_factor and train/batch_size at the steps at which they
change; members/<computing|waiting>_<min|mean|max>, once a second: the fraction of the time that workers
computed and waited. The description of a tag has its unit, and how it is combined over workers.

Each start of a run writes its own file into the folder; TensorBoard reads them as one. A `Resumed` event
is written as a SessionLog START at the next step, which makes TensorBoard discard everything from that
step on, so no step shows twice. A step costs about 200 bytes and, with its checksum, 100 microseconds; the
first event costs the import of tensorboard (0.2 s). The writer has its own thread and flushes every few
seconds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from manyhands.events import events
from manyhands.events.sinks import Sink
from manyhands.measure import STEP_MEASURES, Measure

log = logging.getLogger("manyhands.events")

FLUSH_EVERY_S = 5
MAX_PENDING = 1_000
"""How many records the writer's thread may lag behind before `handle` waits for it."""
TAGS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "step_s": "time/step_s",
    "compute_s": "time/compute_s",
    "wait_s": "time/wait_s",
    "bytes_sent": "comm/bytes_sent",
    "staleness": "train/staleness",
    "samples_per_s": "train/samples_per_s",
    "lr_factor": "train/lr_factor",
    "batch_size": "train/batch_size",
}
"""The tags of the measures that a step has in fields of its own. Others are train/NAME."""

SAMPLES = events.MEMBER_COLUMNS.index("samples")
"""The column of MemberTimes that only workers have."""


class TensorBoardSink(Sink):
    """Writes into `folder`. If tensorboard is not installed, it logs that once and does nothing."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self._writer: Any = None
        self._off = False
        self._started: events.RunStarted | None = None
        self._descriptions = {tag: STEP_MEASURES[name].describe() for name, tag in TAGS.items()}
        """By tag; each is written with the tag's first value."""

    def handle(self, event: events.Event) -> None:
        if self._off or (self._writer is None and not self._open()):
            return
        match event:
            case events.RunStarted():
                # Kept until it is known at which step this start begins.
                self._started = event
            case events.MemberReady(measures=measures):
                for name, facts in measures.items():
                    self._descriptions.setdefault(f"train/{name}", describe(name, facts))
            case events.Resumed():
                self._forget_steps_after(event)
                self._write_start(step=event.step)
            case events.ViewChanged():
                self._write_start(step=0)
            case events.StepCommitted():
                self._write(event, event.step, step_scalars(event))
            case events.MemberTimes():
                self._write(event, event.step, member_scalars(event))
            case events.Evaluated():
                metrics = {f"eval/{name}": value for name, value in event.metrics.items()}
                self._write(event, event.step, metrics)
            case events.RateChanged():
                scaled = {
                    TAGS["lr_factor"]: event.factor,
                    TAGS["batch_size"]: float(event.batch_size),
                }
                self._write(event, event.step, scaled)
            case events.CheckpointSaved():
                self._write(event, event.step, {"checkpoint/stall_s": event.stall_s})
            case events.RunFinished() if event.summary.get("staleness"):
                text = staleness_text(event.summary["staleness"])
                self._write_text(event, "staleness", text, step=event.summary.get("steps") or 0)

    def close(self) -> None:
        self._off = True
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _open(self) -> bool:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            self._off = True
            log.warning(
                "no TensorBoard files are written: %s. To get them: pip install tensorboard", error
            )
            return False
        self._writer = EventFileWriter(
            self.folder, max_queue_size=MAX_PENDING, flush_secs=FLUSH_EVERY_S
        )
        return True

    def _write(self, event: events.Event, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        for value in values if self._descriptions else ():
            if (description := self._descriptions.pop(value.tag, None)) is not None:
                value.metadata.summary_description = description
                value.metadata.plugin_data.plugin_name = "scalars"
        self._add(event, step, summary=Summary(value=values))

    def _write_start(self, *, step: int) -> None:
        if self._started is not None:
            event, self._started = self._started, None
            self._write_text(event, "run", start_text(event), step=step)

    def _write_text(self, event: events.Event, tag: str, text: str, *, step: int) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

        value = summary_pb2.Summary.Value(
            tag=tag,
            metadata=summary_pb2.SummaryMetadata(
                plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
            ),
            tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()]),
        )
        self._add(event, step, summary=summary_pb2.Summary(value=[value]))

    def _forget_steps_after(self, event: events.Resumed) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(event, event.step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, event: events.Event, step: int, **content: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        self._writer.add_event(event_pb2.Event(wall_time=event.time, step=step, **content))


def step_scalars(event: events.StepCommitted) -> dict[str, float]:
    """Return the scalars of one step, by tag."""
    columns: dict[str, float | None] = {
        "loss": event.loss,
        "lr": event.lr,
        "step_s": event.step_s,
        "compute_s": event.compute_s,
        "wait_s": event.wait_s,
        "bytes_sent": float(event.bytes_sent),
        "staleness": event.staleness,
        "samples_per_s": event.samples / event.step_s if event.step_s > 0 else None,
    }
    scalars = {TAGS[name]: value for name, value in columns.items() if value is not None}
    return scalars | {f"train/{name}": value for name, value in event.measures.items()}


def member_scalars(event: events.MemberTimes) -> dict[str, float]:
    """Return by tag which fraction of the time workers computed and waited: the mean, and the extremes."""
    scalars: dict[str, float] = {}
    summary = event.others.get("workers", {})
    for column, tag in (("compute_s", "computing"), ("wait_s", "waiting")):
        at = events.MEMBER_COLUMNS.index(column)
        rows = [row for row in event.members.values() if row[SAMPLES] is not None]
        values = [value for row in rows if isinstance(value := row[at], int | float)]
        least, most, total, number = [*values], [*values], sum(values), len(values)
        if isinstance(rest := summary.get(column), tuple):
            members = summary["members"]
            assert isinstance(members, int)
            least.append(rest[0])
            most.append(rest[2])
            total, number = total + rest[1] * members, number + members
        if number and event.seconds > 0:
            found = {"min": min(least), "mean": total / number, "max": max(most)}
            scalars |= {f"members/{tag}_{name}": v / event.seconds for name, v in found.items()}
    return scalars


def describe(name: str, facts: Mapping[str, str]) -> str:
    """Describe a measure of MemberReady in one line."""
    rule: Any = facts["rule"]
    return Measure(name, facts["unit"], rule, facts["help"]).describe()


def staleness_text(staleness: Mapping[str, Any]) -> str:
    """Format the histogram of staleness over parts of steps as a Markdown table."""
    lines = [f"| {label} | {number:,} |" for label, number in staleness["histogram"].items()]
    return "\n".join(["| staleness | parts |", "| --- | --- |", *lines])


def start_text(event: events.RunStarted) -> str:
    """Format the start of a run as a Markdown table, which TensorBoard's text page renders."""
    rows = {
        "run": event.run,
        "job": event.job,
        "strategy": event.strategy,
        "workers": str(event.workers),
        **event.versions,
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines])
