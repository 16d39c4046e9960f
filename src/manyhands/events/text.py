"""The texts of the console, as plain strings: sentences and rows. Pure.

`RunStatus` folds the events into what is known so far; the functions below turn it into text.
Every console draws the same strings, so a terminal, a pipe and a log file show the same.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manyhands.events import events
from manyhands.events.units import clean, count, duration, figure, plural, short, size

Rows = list[tuple[str, str]]
"""Label and value."""

TRACEBACK_LINES = (12, 18)
"""How many lines of its beginning and its end are shown."""
HOSTS_WITHIN_S = 1.0
"""On one machine members start sooner than this."""
SMOOTHING_STEPS = 50
"""Window of the average speed: that of single steps varies too much to read."""

# status


@dataclass
class RunStatus:
    """The state of a run so far."""

    started: events.RunStarted | None = None
    num_started: int = 0
    """Members started; 0 while waiting for hosts."""
    ready: dict[str, events.MemberReady] = field(default_factory=dict)
    view: events.ViewChanged | None = None
    lost: events.MemberLost | None = None
    """The last lost member since the last recovery."""
    step: int = 0
    epoch: int = 0
    loss: float | None = None
    evaluation: events.Evaluated | None = None
    rate: events.RateChanged | None = None
    """The last change: the current batch size and learning rate factor."""
    scaled: bool = False
    """If true, the batch size is or was not the job's own."""
    saved_step: int | None = None
    failure: events.MemberFailed | None = None
    """The first failure."""
    recent: deque[events.StepCommitted] = field(
        default_factory=lambda: deque(maxlen=SMOOTHING_STEPS)
    )

    def fold(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self.started = event
            case events.MemberStarted():
                self.num_started += 1
            case events.MemberReady():
                self.ready[event.member] = event
            case events.ViewChanged():
                self.view = event
                self.recent.clear()
            case events.MemberLost():
                self.lost = event
            case events.Recovered():
                self.lost = None
            case events.Resumed():
                self.lost = None
                self.step, self.epoch = event.step, event.epoch
                self.saved_step = event.step if event.checkpoint else None
                if self.evaluation is not None and self.evaluation.step > event.step:
                    self.evaluation = None
                self.recent.clear()
            case events.StepCommitted():
                # Without lockstep, steps arrive in any order.
                self.step, self.epoch = max(self.step, event.step), max(self.epoch, event.epoch)
                self.loss = event.loss
                self.recent.append(event)
            case events.Evaluated():
                self.evaluation = event
            case events.RateChanged():
                self.rate = event
                self.scaled |= self.plan is not None and self.plan.batch_size != event.batch_size
            case events.CheckpointSaved():
                self.saved_step = event.step
            case events.MemberFailed():
                self.failure = self.failure or event

    @property
    def plan(self) -> events.MemberReady | None:
        """Any ready member: all have the same numbers of steps and epochs."""
        return next(iter(self.ready.values()), None)

    @property
    def num_steps(self) -> int:
        if self.rate is not None:
            return self.rate.steps
        return self.plan.steps if self.plan else 0

    @property
    def done(self) -> float:
        """Fraction of the training that is done, 0 to 1."""
        return min(1.0, self.step / self.num_steps) if self.num_steps else 0.0


# start


def title(event: events.RunStarted) -> str:
    rest = ", ".join(f"{name} {v}" for name, v in event.versions.items() if name != "manyhands")
    head = f"manyhands {event.versions.get('manyhands', '')}".rstrip()
    return clean(f"{head} ({rest})" if rest else head)


def start_rows(event: events.RunStarted) -> Rows:
    strategy = f"{event.strategy}, {plural(event.workers, 'worker')}"
    rows = [("job", clean(event.job)), ("strategy", clean(strategy)), ("run", clean(event.run))]
    return rows + ([("starts from", clean(event.init_from))] if event.init_from else [])


def starting_line(status: RunStatus, elapsed_s: float) -> str:
    num_workers = status.started.workers if status.started else len(status.ready)
    if not (status.num_started or status.ready) and elapsed_s > HOSTS_WITHIN_S:
        hosts = f"waiting for hosts for {plural(num_workers, 'worker')}"
        return f"{hosts} ...  {duration(elapsed_s)}"
    ready = f"{len(status.ready)} of {num_workers} ready"
    return f"starting {plural(num_workers, 'worker')} ... {ready}  {duration(elapsed_s)}"


def ready_rows(status: RunStatus) -> Rows:
    """Return what the members reported once model and data were built."""
    plan, view = status.plan, status.view
    rows: Rows = []
    if plan is not None:
        data = f"{plural(plan.train_samples, 'sample')} for training"
        if plan.eval_samples:
            data += f", {count(plan.eval_samples)} for evaluation"
        noun = "parameter" if plan.parameters == 1 else "parameters"
        rows.append(("model", f"{short(plan.parameters)} {noun}"))
        for name, summary in plan.tables.items():
            rows.append(("table", clean(f"{name}: {summary}")))
        rows.append(("data", data))
        rows.append(("training", _length(plan)))
        if plan.monitor:
            rows.append(("best", clean(direction(plan.monitor))))
    if status.ready:
        transport = f", {view.transport}" if view and view.transport != "none" else ""
        rows.append(("devices", clean(_devices(status.ready.values()) + transport)))
    return rows + placement_rows(view)


def _length(plan: events.MemberReady) -> str:
    """Describe how long the training is."""
    steps = f"{plural(plan.steps, 'step')} of {plural(plan.batch_size, 'sample')}"
    if plan.epochs is not None:
        return f"{plural(plan.epochs, 'epoch')}, {steps}"
    whole = math.ceil(plan.train_samples / plan.batch_size)
    return f"{steps} ({_epochs(plan.steps / whole)})"


def direction(monitor: str) -> str:
    """Describe the criterion for the best model: "min loss" is the lowest loss."""
    mode, _, name = monitor.partition(" ")
    return f"{'lowest' if mode == 'min' else 'highest'} {name}"


def placement_rows(view: events.ViewChanged | None) -> Rows:
    """Return where the weights are stored, if the view has a placement."""
    return [("weights", clean(view.placement))] if view and view.placement else []


def _devices(ready: Iterable[events.MemberReady]) -> str:
    names = [member.device for member in ready]
    if len(names) == 1:
        return names[0]
    # "cuda:0 (NVIDIA H200)" and "cuda:1 (NVIDIA H200)" are two of a kind.
    kinds = Counter(re.sub(r":\d+", "", name, count=1) for name in names)
    return ", ".join(f"{number} x {kind}" for kind, number in kinds.items())


def view_line(event: events.ViewChanged) -> str:
    names = ", ".join(event.members)
    transport = "" if event.transport == "none" else f"; {event.transport}"
    members = plural(len(event.members) - event.servers, "worker")
    if event.servers:
        members += f" and {plural(event.servers, 'server')}"
    return clean(f"continuing with {members}: {names}{transport}")


def injected_line(event: events.Injected) -> str:
    target = f"of {event.member}" if event.fault == "cut link" else event.member
    length = f" for {duration(event.seconds)}" if event.seconds else ""
    return clean(f"chaos: {event.fault} {target}{length}")


def lost_line(event: events.MemberLost) -> str:
    if not event.workers:
        return clean(f"{event.member} was lost ({event.reason}); the run can't continue without it")
    left = plural(event.workers, "worker")
    return clean(f"{event.member} was lost ({event.reason}); continuing with {left}")


def recovered_line(event: events.Recovered) -> str:
    again = plural(event.redone_steps, "step")
    if event.detection_s is None:
        redo = f", {again} to redo" if event.redone_steps else ""
        return f"recovered in {event.seconds:.2f} s{redo}"
    redone = f"; {again} dispatched again" if event.redone_steps else ""
    return (
        f"recovered in {event.seconds:.2f} s: {event.detection_s:.2f} s to notice, "
        f"{event.view_s:.2f} s to reconnect, {event.redo_s:.2f} s to the next step{redone}"
    )


def resumed(event: events.Resumed) -> str:
    source = f"from {event.checkpoint}" if event.checkpoint else "from the beginning"
    return clean(f"at step {count(event.step)}, epoch {event.epoch + 1}, {source}")


# progress


@dataclass(frozen=True)
class Progress:
    epoch: str
    steps: str
    done: float
    figures: tuple[str, ...]
    """The most important first: a narrow terminal drops the last ones."""


def progress(status: RunStatus) -> Progress:
    plan, recent = status.plan, status.recent
    total = f"/{count(status.num_steps)}" if plan else ""
    figures = [] if status.loss is None else [f"loss {figure(status.loss)}"]
    seconds = sum(step.step_s for step in recent)
    if seconds > 0:
        unit, each = (plan.unit, plan.units_per_sample) if plan else ("samples", 1.0)
        figures.append(f"{count(each * sum(step.samples for step in recent) / seconds)} {unit}/s")
        remaining = max(0, status.num_steps - status.step)
        figures.append(f"eta {duration(remaining * seconds / len(recent))}")
        waits = [step.wait_s for step in recent if step.wait_s is not None]
        if waits and (status.view is None or len(status.view.members) > 1):
            figures.append(f"wait {min(1.0, sum(waits) / seconds):.0%}")
    if status.evaluation is not None:
        figures.append(f"eval {clean(_figures(status.evaluation.metrics))}")
    if status.saved_step:
        figures.append(f"saved {count(status.saved_step)}")
    return Progress(
        epoch=_epoch(status.epoch, plan),
        steps=f"{count(status.step)}{total}",
        done=status.done,
        figures=tuple(figures),
    )


def progress_line(status: RunStatus) -> str:
    now = progress(status)
    return "  ".join([now.epoch, f"step {now.steps}", f"{now.done:.0%}", *now.figures])


def evaluation_line(event: events.Evaluated, status: RunStatus) -> str:
    head = f"{_epoch(event.epoch, status.plan)}  step {count(event.step)}  eval "
    return clean(f"{head}{_figures(event.metrics)}")


def target_line(event: events.TargetReached) -> str:
    found = (
        f"{event.metric} {figure(event.value)} reaches {event.target:g} at step {count(event.step)}"
    )
    if event.time_to_target_s is None or event.startup_s is None or event.evaluation_s is None:
        return clean(found)
    besides = f"start-up {_precise(event.startup_s)}, evaluation {_precise(event.evaluation_s)}"
    return clean(f"{found}, after {_precise(event.time_to_target_s)} of training ({besides})")


def _precise(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else duration(seconds)


def _epoch(epoch: int, plan: events.MemberReady | None) -> str:
    total = f"/{plan.epochs}" if plan and plan.epochs is not None else ""
    return f"epoch {epoch + 1}{total}"


def rate_line(event: events.RateChanged, status: RunStatus) -> str:
    over = f" over {plural(event.over, 'step')}" if event.over else ""
    batch = f", batches of {plural(event.batch_size, 'sample')}" if status.scaled else ""
    head = f"step {count(event.step)}: learning rate x {event.factor:.4g}{over}{batch}"
    return clean(f"{head} ({event.reason})")


# end

_ON_SIGNAL = {
    "Ctrl-C": "Ctrl-C; saving a checkpoint (press again to stop at once)",
    "SIGTERM": "SIGTERM; saving a checkpoint (a second one stops at once)",
}


def stopping(reason: str) -> str:
    saves = "; saving a checkpoint" if reason.startswith("--") else ""
    return clean(_ON_SIGNAL.get(reason, f"{reason}{saves}"))


def failure(event: events.MemberFailed) -> tuple[str, list[str], str]:
    """Return what failed and why, its traceback and its log."""
    lines = clean(event.traceback).rstrip().splitlines()
    if len(lines) > sum(TRACEBACK_LINES):
        # It starts at the user's own line and ends with the error; the middle is in the log.
        first, last = TRACEBACK_LINES
        left_out = f"  ... {plural(len(lines) - first - last, 'more line')}, in the log"
        lines = [*lines[:first], left_out, *lines[-last:]]
    head = f"{event.member} failed: {event.reason}"
    log = f"{event.log} (full traceback)" if lines and event.log else event.log
    return clean(head), lines, clean(log)


_OUTCOMES = {"finished": "finished in", "early-stopped": "stopped early after"}


def outcome(event: events.RunFinished) -> str:
    wall_s, limit = event.summary.get("wall_s"), event.summary.get("limit")
    words = _OUTCOMES.get(event.outcome, f"{event.outcome} after")
    if limit is not None:
        words = clean(f"stopped by {limit} after")
    return words.rsplit(" ", 1)[0] if wall_s is None else f"{words} {duration(wall_s)}"


def summary_rows(event: events.RunFinished, run: str | None) -> Rows:
    """Return the summary of the whole run, without what is unknown."""
    known = {name: value for name, value in event.summary.items() if value is not None}
    rows: Rows = []
    if "steps" in known:
        parts = [_epochs(known["epochs"])] if "epochs" in known else []
        parts += [plural(known["samples"], "sample")] if "samples" in known else []
        rows.append(("steps", count(known["steps"]) + (f" ({', '.join(parts)})" if parts else "")))
    if "samples_per_s" in known:
        rows.append(("speed", f"{count(known['samples_per_s'])} samples/s"))
    if "units_per_s" in known:
        speed = f"{count(known['units_per_s'])} {clean(str(known['unit']))}/s"
        rows[-1] = ("speed", f"{speed}, {rows[-1][1]}")
    if known.get("bytes_sent"):
        rows.append(("sent", size(known["bytes_sent"])))
    if known.get("lost"):
        members = f"{count(known['lost'])} lost, {count(known.get('replaced', 0))} replaced"
        again = known.get("begun_again", 0)
        if again:
            members += f", all restarted {'once' if again == 1 else f'{again} times'}"
        rows.append(("members", members))
    if known.get("chaos"):
        rows.append(("chaos", _chaos(known.get("injected", 0), known["chaos"])))
    if known.get("staleness"):
        rows.append(("staleness", _staleness(known["staleness"])))
    if known.get("final_metrics"):
        rows.append(("final", clean(_figures(known["final_metrics"]))))
    if known.get("best_metrics"):
        best = dict(known["best_metrics"])
        step = best.pop("step", None)
        where = [] if step is None else [f"step {count(step)}"]
        where += [direction(known["monitor"])] if known.get("monitor") else []
        note = f"  ({', '.join(where)})" if where else ""
        rows.append(("best", clean(_figures(best) + note)))
    if known.get("target"):
        rows.append(("target", clean(_target(known))))
    if known.get("checkpoint"):
        rows.append(("checkpoint", clean(_in_run(run, known["checkpoint"]))))
    if run:
        rows.append(("run", clean(run)))
        folder = shlex.quote(os.path.join(run, "tb"))
        rows.append(("view", clean(f"tensorboard --logdir {folder}")))
    return rows


def summary_tail(event: events.RunFinished, run: str | None) -> str:
    """Return what follows the outcome in the one line of a quiet run."""
    parts = [""]
    if event.summary.get("steps") is not None:
        parts.append(plural(event.summary["steps"], "step"))
    if event.summary.get("final_metrics"):
        parts.append(clean(_figures(event.summary["final_metrics"])))
    if run:
        parts.append(clean(run))
    if event.advice:
        parts.append(clean(event.advice).rstrip("."))
    if event.resume_command is not None:
        parts.append(f"continue with:  {clean(event.resume_command)}")
    return "; ".join(parts)


def _in_run(run: str | None, path: str) -> str:
    """Return a path that works from the current folder, also for one relative to the run folder."""
    if run is None or os.path.isabs(path) or path.startswith(run.rstrip("/") + "/"):
        return path
    return os.path.join(run, path)


def _epochs(number: float) -> str:
    """Format a number of epochs; a stopped run has a fraction."""
    return f"{round(number, 2):g} epoch" + ("" if number == 1 else "s")


def _target(summary: Mapping[str, Any]) -> str:
    """Describe what it took to reach the target."""
    if "steps_to_target" not in summary:
        return f"{summary['target']} was not reached"
    took = [
        plural(summary["steps_to_target"], "step"),
        plural(summary["samples_to_target"], "sample"),
    ]
    if "time_to_target_s" in summary:
        took.insert(0, f"{_precise(summary['time_to_target_s'])} of training")
    return f"{summary['target']} took {', '.join(took)}"


def _chaos(num_faults: int, chaos: Mapping[str, Any]) -> str:
    words = f"{plural(num_faults, 'fault')}, {count(chaos['recovered'])} recovered"
    pause_s = chaos["median_pause_s"]
    return words if pause_s is None else f"{words}, median pause {pause_s:.2f} s"


def _staleness(staleness: Mapping[str, Any]) -> str:
    mean = round(staleness["mean"], 1)
    return f"mean {mean:g}, p95 {count(staleness['p95'])}, max {count(staleness['max'])}"


def _figures(metrics: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {figure(value)}" for name, value in metrics.items())
