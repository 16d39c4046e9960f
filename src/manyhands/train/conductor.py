"""The coordinator's side of a training: hands out orders, gathers reports, keeps the run folder.

start the members               wait until each is ready
form the view                   wait until each has joined
repeat:                         what happens next comes from the coordinator's inbox
    reports   -> events, commits, checkpoints that count
    orders    -> enough ahead that no worker waits, not so far that stopping takes long
    deaths    -> the first failure, named
stop                            wait until each has left; write the summary
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from manyhands.cluster.coordinator import (
    Coordinator,
    Exited,
    Happening,
    LinkLost,
    Said,
    Signalled,
    exit_status,
    signal_name,
)
from manyhands.cluster.launchers import cores
from manyhands.cluster.view import Seat
from manyhands.errors import CheckpointError, Interrupted, JobError, MemberFailed, UsageError
from manyhands.state.checkpoints import Manifest
from manyhands.state.runs import Run
from manyhands.train.course import Checkpoint, Course, Evaluate, Order, Steps, Stop, Syllabus
from manyhands.train.failures import Failure, FirstFailure, Grade
from manyhands.train.options import Options
from manyhands.train.reports import Gathering, Row, combine
from manyhands.train.shelf import Shelf
from manyhands.train.tally import Tally
from manyhands.watch import events
from manyhands.watch.sinks import Stream

AHEAD_S = 0.4
"""How much work is handed out ahead: no worker ever waits for an order, and a stop takes this long."""
TICK_S = 0.1
MAX_LEASE = 256


class Conductor:
    def __init__(
        self,
        coordinator: Coordinator,
        options: Options,
        run: Run,
        stream: Stream,
        *,
        entry: str,
        checkpoint: Manifest | None = None,
        resumed: bool = False,
        on_ready: Callable[[], None] = lambda: None,
        tick: Callable[[], None] = lambda: None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.options = options
        self.run = run
        self.stream = stream
        self.course: Course | None = None
        self.ready: dict[str, dict[str, Any]] = {}
        self._entry = entry
        self._versions = dict(versions or {})
        self._resumed = resumed
        self._on_ready = on_ready
        self._resumed_from = checkpoint
        self.shelf = Shelf(run, stream, options, newest=checkpoint)
        self._tick = tick
        self._joined: dict[str, str] = {}
        self._gathering = Gathering()
        self._evaluation: dict[str, Mapping[str, Any]] = {}
        self._rehearsed: set[str] = set()
        self._stopped: set[str] = set()
        self._ticks: dict[str, int] = {}
        self._failures = FirstFailure(coordinator.timeouts.settle_s)
        self._signal: int | None = None
        self._stop_by: float | None = None
        self._finishing: str | None = None
        self._progress = time.monotonic()
        self._step_s = 0.0
        self.tally = Tally()

    # The story, top to bottom -----------------------------------------------------------------

    def conduct(self) -> str:
        """Train. Returns the outcome; raises what ended it otherwise."""
        self._start_members()
        self._until(lambda: len(self.ready) == self.options.workers, "ready_s", "getting ready")
        self.course = self._make_course()
        self._on_ready()
        self.run.note_fields(next(iter(self.ready.values()))["fields"], self.options.settings)
        self._form_view()
        self._until(
            lambda: len(self._joined) == self.options.workers, "view_s", "joining its peers"
        )
        self._announce_view()
        if self.options.rehearse:
            self._tell_all(order="rehearse")
            self._until(
                lambda: len(self._rehearsed) == self.options.workers, "step_s", "rehearsing"
            )
            self._finish("checked")
        else:
            self._hand_out()
        self._until(self._all_left, "step_s", "training", wake=self._hand_out)
        if self.shelf.error:
            raise CheckpointError(self.shelf.error)
        assert self._finishing is not None
        return self._finishing

    def _start_members(self) -> None:
        options = self.options
        self.stream.emit(
            events.RunStarted(
                run=str(self.run.path),
                job=options.job,
                strategy=options.strategy,
                workers=options.workers,
                versions=self._versions,
            )
        )
        if options.workers > cores():
            self.stream.emit(
                events.Noticed(
                    message=f"{options.workers} workers share {cores()} cores; "
                    "more workers than cores are slower than as many"
                )
            )
        assignment = {
            "job": options.job,
            "settings": dict(options.settings),
            "strategy": options.strategy,
            "device": options.device,
            "run": str(self.run.path.resolve()),
            "checkpoint": str(self._resumed_from.path.resolve()) if self._resumed_from else None,
        }
        for rank in range(options.workers):
            member = self.coordinator.start(
                f"worker-{rank}",
                entry=self._entry,
                local_rank=rank,
                threads=options.threads,
                assignment=assignment,
            )
            self.stream.emit(
                events.MemberStarted(
                    member=member.name,
                    host=member.handle.host,
                    pid=member.handle.pid,
                    log=str(member.log),
                )
            )

    def _make_course(self) -> Course:
        first, *others = self.ready.values()
        for other in others:
            for key in ("train_samples", "eval_samples", "parameters", "fields"):
                if other[key] != first[key]:
                    raise JobError(
                        f"The workers disagree on the job's {key}: {first[key]} and {other[key]}. "
                        "model() and data() must give the same in every process."
                    )
        fields, samples = first["fields"], first["train_samples"]
        syllabus = Syllabus(
            num_samples=samples,
            batch_size=fields["batch_size"],
            epochs=fields["epochs"],
            eval_every=fields["eval_every"],
            has_eval=first["eval_samples"] > 0,
            checkpoint_every=self.options.checkpoint_every,
            monitor=fields["monitor"],
            patience=fields["patience"],
        )
        for name, facts in self.ready.items():
            self.stream.emit(
                events.MemberReady(
                    member=name,
                    device=facts["device"],
                    parameters=facts["parameters"],
                    train_samples=samples,
                    eval_samples=first["eval_samples"],
                    batch_size=syllabus.batch_size,
                    epochs=syllabus.epochs,
                    steps=syllabus.num_steps,
                )
            )
        return Course(syllabus, self._resumed_from.course if self._resumed_from else None)

    def _check_job(self, facts: Mapping[str, Any]) -> None:
        """What only shows when the job is loaded."""
        fields, samples = facts["fields"], facts["train_samples"]
        batch, monitor, metrics = fields["batch_size"], fields["monitor"], facts["metrics"]
        if batch > samples:
            raise JobError(
                f"The data set has {samples} samples, and the global batch_size is {batch}. "
                f"Use  --set batch_size={samples}  or fewer."
            )
        if self.options.workers > batch:
            raise UsageError(
                f"{self.options.workers} workers share a global batch of {batch}: every worker needs "
                "at least one sample. Use fewer workers, or a larger batch: "
                f"--set batch_size={self.options.workers}"
            )
        if metrics and monitor not in metrics:
            raise JobError(
                f"monitor is {monitor!r}, and the evaluation gives {', '.join(metrics)}. "
                "Set monitor to one of these, or return it from metrics()."
            )
        if not metrics and fields["patience"] is not None:
            raise JobError("patience needs something to watch: eval_data() must return a data set.")

    def _form_view(self) -> None:
        names = sorted(self.ready, key=lambda name: int(name.rpartition("-")[2]))
        self.coordinator.form_view(Seat(**self.ready[name]["seat"]) for name in names)

    def _announce_view(self) -> None:
        view, course = self.coordinator.view, self.course
        assert view is not None
        assert course is not None
        if self._resumed:
            # Also from nothing: what was committed before, and never saved, is void.
            self.stream.emit(
                events.Resumed(
                    step=course.step,
                    epoch=course.epoch,
                    checkpoint=self.shelf.newest,
                    workers=view.world,
                )
            )
        transport = next(iter(self._joined.values()))
        self.stream.emit(
            events.ViewChanged(view=view.number, members=view.names, transport=transport)
        )
        self.tally.training()

    # What happens -----------------------------------------------------------------------------

    def _until(
        self,
        done: Callable[[], bool],
        timeout: str,
        phase: str,
        *,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Handle what happens until `done`; without progress for the named timeout, say who is late."""
        self._progress = time.monotonic()
        limit = getattr(self.coordinator.timeouts, timeout)
        while not done():
            happening = self.coordinator.next(TICK_S)
            if happening is not None:
                self._handle(happening)
            self._judge()
            wake()
            self._tick()
            if time.monotonic() - self._progress > limit:
                raise MemberFailed(self._late(limit, phase))

    def _handle(self, happening: Happening) -> None:
        now = time.monotonic()
        match happening:
            case Said(member, {"kind": "ready"} as facts):
                self._check_job(facts)  # at the first: others may take their time
                self.ready[member] = facts
                self._progress = now
            case Said(member, {"kind": "report"} as report):
                self._progress = now
                self._on_report(member, report)
            case Said(member, {"kind": "beat", "ticks": int(ticks)}):
                if ticks != self._ticks.get(member, 0):
                    self._ticks[member] = ticks
                    self._progress = now
            case Said(member, {"kind": "failed"} as said):
                self._failures.add(
                    Failure(
                        member,
                        said["reason"],
                        said["traceback"],
                        grade=Grade.CONSEQUENCE if said["consequence"] else Grade.CAUSE,
                        usage=said["usage"],
                        exit_code=said["exit_code"] or 1,  # leaving early is no success
                    ),
                    now,
                )
            case LinkLost(member, reason):
                if not self.coordinator.members[member].left:
                    self._failures.add(Failure(member, reason, grade=Grade.SUSPICION), now)
            case Exited(member, code):
                self.stream.emit(events.MemberExited(member=member, exit_code=code))
                if not self.coordinator.members[member].left:
                    failure = Failure(member, signal_name(code), exit_code=exit_status(code) or 1)
                    self._failures.add(failure, now)
            case Signalled(number):
                self._on_signal(number)

    def _on_report(self, member: str, report: Mapping[str, Any]) -> None:
        match report:
            case {"what": "joined", "transport": str(transport)}:
                self._joined[member] = transport
            case {"what": "rehearsed"}:
                self._rehearsed.add(member)
            case {"what": "stopped"}:
                self._stopped.add(member)
                if len(self._stopped) == self.options.workers:
                    self._tell_all(order="leave")
            case {"what": "steps", "rows": list(rows)}:
                for row in rows:
                    self._gathering.add(member, Row(*row))
                self._commit_steps()
            case {"what": "evaluated"}:
                self._evaluation[member] = report
                self._on_evaluation()
            case {"what": "saved", "step": int(step)}:
                assert self.course is not None
                self.shelf.written(step, report)
                self.shelf.settle(self.course)

    def _commit_steps(self) -> None:
        assert self.course is not None
        for step in self._gathering.committed():
            self.course.commit(step.plan.step)
            self._step_s = (
                step.step_s if not self._step_s else 0.9 * self._step_s + 0.1 * step.step_s
            )
            if self.tally.add(step):
                self.stream.emit(
                    events.Noticed(
                        message=f"The loss of step {step.plan.step} is {step.loss}. A lower learning "
                        "rate, warm-up or clip_norm may help; training goes on"
                    )
                )
            self.stream.emit(
                events.StepCommitted(
                    step=step.plan.step,
                    epoch=step.plan.epoch,
                    samples=step.plan.samples,
                    shares=step.shares,
                    loss=step.loss,
                    lr=step.lr,
                    step_s=step.step_s,
                    compute_s=step.compute_s,
                    wait_s=step.wait_s,
                    bytes_sent=step.bytes_sent,
                )
            )
        self.shelf.settle(self.course)

    def _on_evaluation(self) -> None:
        assert self.course is not None
        assert self.coordinator.view is not None
        if len(self._evaluation) < self.coordinator.view.world:
            return
        parts = [self._evaluation[name] for name in self.coordinator.view.names]
        self._evaluation = {}
        samples, metrics = combine(parts)
        if not self.course.awaiting:
            return  # a stop was asked meanwhile; a resumed run evaluates again
        step, epoch = self.course.step, self.course.epoch
        best = self.course.evaluated(metrics)
        self.stream.emit(
            events.Evaluated(
                step=step,
                epoch=epoch,
                samples=samples,
                metrics=metrics,
                best=best,
                seconds=max(part["seconds"] for part in parts),
            )
        )

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._signal is not None or not self.tally.trains:
            code = 130 if number == signal.SIGINT else 128 + number
            raise Interrupted(f"Stopped at once by {name}.", exit_code=code)
        self._signal = number
        self._stop_by = time.monotonic() + self.coordinator.timeouts.stop_s
        assert self.course is not None
        self.course.stop("interrupted" if number == signal.SIGINT else "preempted")
        what = "Ctrl-C" if number == signal.SIGINT else name
        self.stream.emit(events.Stopping(reason=what))

    # What is told -----------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give out orders until enough is ahead."""
        assert self.course is not None
        while self._finishing is None:
            ahead = len(self._gathering)
            if ahead >= 2 and ahead * self._step_s >= AHEAD_S:
                return
            room = int(AHEAD_S / self._step_s) if self._step_s else 1
            order = self.course.next(max(1, min(room, MAX_LEASE)))
            if order is None:
                return
            self._give(order)
            if isinstance(order, Steps) and not self._step_s and ahead:
                return

    def _give(self, order: Order) -> None:
        view = self.coordinator.view
        assert view is not None
        names = [seat.name for seat in view.workers]
        match order:
            case Steps(plans):
                portions: dict[str, list[Any]] = {name: [] for name in names}
                for plan in plans:
                    shares = dict(zip(names, plan.share_out([1.0] * len(names)), strict=True))
                    self._gathering.expect(plan, shares)
                    for name, ranges in shares.items():
                        portions[name].append([plan.step, plan.epoch, plan.samples, ranges])
                for name in names:
                    self.coordinator.say(name, "order", order="steps", portions=portions[name])
            case Evaluate(step, epoch):
                self._tell_all(order="evaluate", step=step, epoch=epoch)
            case Checkpoint(step):
                self.shelf.expect(order)
                self._tell_all(order="checkpoint", step=step)
            case Stop(reason):
                self._finish(reason)

    def _finish(self, reason: str) -> None:
        self._finishing = reason
        self._tell_all(order="stop")

    def _tell_all(self, **order: Any) -> None:
        assert self.coordinator.view is not None
        for name in self.coordinator.view.names:
            self.coordinator.say(name, "order", **order)

    # What goes wrong --------------------------------------------------------------------------

    def _judge(self) -> None:
        """Raise for the first failure, a silent member, or a stop that takes too long."""
        now = time.monotonic()
        failure = self._failures.verdict(now)
        if failure is None and (overdue := self.coordinator.overdue()) is not None:
            member, reason = overdue
            failure = Failure(member.name, reason)
        if failure is not None:
            self._raise(failure)
        if self._stop_by is not None and now > self._stop_by:
            assert self._signal is not None
            raise Interrupted(
                f"The checkpoint took more than {self.coordinator.timeouts.stop_s:.0f} s; stopped.",
                exit_code=128 + self._signal,
            )

    def _raise(self, failure: Failure) -> None:
        if failure.usage:
            raise UsageError(failure.reason)
        self.stream.emit(
            events.MemberFailed(
                member=failure.member,
                reason=failure.reason,
                traceback=failure.traceback,
                log=str(self.coordinator.members[failure.member].log),
            )
        )
        raise MemberFailed(f"{failure.member} {failure.reason}", exit_code=failure.exit_code)

    def _late(self, limit_s: float, phase: str) -> str:
        """Who has been waited for, in what phase, for how long."""
        members = self.coordinator.members
        late = [name for name in members if name not in self.ready] or [
            name for name in members if name not in self._joined
        ]
        if (first := self._gathering.first) is not None:
            late = first.missing
        told = ", ".join(
            f"{name} ({members[name].phase} for {members[name].phase_since_s:.0f} s)"
            for name in late or members
        )
        return f"Nothing has moved for {limit_s:.0f} s while {phase}; waited for {told}."

    def _all_left(self) -> bool:
        members = self.coordinator.members.values()
        return self._finishing is not None and all(m.left and not m.alive for m in members)
