"""The coordinator's side of a training: hands out orders, gathers reports, keeps the run folder.

start the members               wait until each is ready
form the view                   wait until each has joined
repeat:                         what happens next comes from the coordinator's inbox
    reports   -> events, commits, checkpoints that count
    orders    -> enough ahead that no worker waits, not so far that stopping takes long (dispatch.py)
    deaths    -> the first failure, named; or, where the strategy goes on in place, the next view, and
                 what is not in the weights by then is given out again (membership.py)
stop                            wait until each has left; write the summary
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from manyhands.control.messages import (
    AppliedSteps,
    CaughtUp,
    EvaluationReport,
    Joined,
    Left,
    LinkBroken,
    Notice,
    PeerRefused,
    Ready,
    Rehearsed,
    Report,
    Saved,
    Saving,
    StepsReport,
    Stopped,
    parse,
)
from manyhands.coordinator.bad_steps import BadSteps
from manyhands.coordinator.checkpoint_tracker import CheckpointTracker
from manyhands.coordinator.coordinator import (
    Coordinator,
    Exited,
    Garbage,
    Happening,
    HostNotice,
    LinkLost,
    MemberMessage,
    Signalled,
    ThreadFailed,
    exit_status,
    signal_name,
)
from manyhands.coordinator.dispatch import Dispatcher, make_dispatcher
from manyhands.coordinator.failures import FirstFailure, Grade, MemberFailure
from manyhands.coordinator.fault_injector import FaultInjector
from manyhands.coordinator.job_checks import (
    Facts,
    check_job,
    check_same,
    committed_event,
    evaluated_event,
    monitor_note,
    rate_event,
    ready_event,
    syllabus_of,
    why_not,
)
from manyhands.coordinator.membership import Membership
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.plan import TrainingPlan
from manyhands.coordinator.run_stats import RunStats
from manyhands.coordinator.straggler_trial import StragglerTrial
from manyhands.coordinator.stuck import StuckWatch
from manyhands.errors import (
    CheckpointError,
    Diverged,
    Interrupted,
    ManyhandsError,
    MemberError,
    ProtocolError,
    RecordError,
    UsageError,
    WeightsLost,
)
from manyhands.events import events
from manyhands.events.sinks import Stream
from manyhands.hosts.launchers import cores
from manyhands.hosts.messages import Beat, Failed
from manyhands.runs.checkpoints import Manifest
from manyhands.runs.folder import RunFolder
from manyhands.threads import describe

TICK_S = 0.1
LOOK_S = 1.0
"""How often to look whether the run folder is still there."""
MAX_NOTE = 500
"""Characters of what a member says to people."""
COPY_S = 2.0
"""How long a failure waits for a checkpoint that was ordered, and of which there is no copy yet."""


class Driver:
    def __init__(
        self,
        coordinator: Coordinator,
        options: RunOptions,
        run: RunFolder,
        stream: Stream,
        *,
        entries: Mapping[str, str],
        checkpoint: Manifest | None = None,
        resumed: bool = False,
        before: Driver | None = None,
        on_ready: Callable[[], None] = lambda: None,
        tick: Callable[[], None] = lambda: None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """`before`: in whose training the weights were lost; all begin again from the checkpoint."""
        self.coordinator = coordinator
        coordinator.parse = parse
        self.options = options
        self.run = run
        self.stream = stream
        self.checkpoint_tracker = CheckpointTracker(run, stream, options, newest=checkpoint)
        self.run_stats: RunStats = RunStats(
            lockstep=options.config.lockstep, before=before.run_stats if before else None
        )
        self.membership: Membership = Membership(
            coordinator,
            options,
            stream,
            entries=entries,
            assignment=options.assignment(run.path, checkpoint.path if checkpoint else None),
            before=before.membership if before else None,
        )
        self.injector: FaultInjector | None = before.injector if before else None
        if self.injector is not None:
            self.injector.follow(self.membership)
        elif options.chaos is not None and not options.rehearse:
            self.injector = FaultInjector(options.chaos, coordinator, self.membership, stream)
        self.training_plan: TrainingPlan | None = None
        self.bad_steps = BadSteps(options.max_bad_steps)
        self.would_repeat = False
        """It was ended by the job's own code, which would do the same again."""
        self._straggler_trial: StragglerTrial | None = None
        self._dispatcher: Dispatcher | None = None
        self._versions = dict(versions or {})
        self._before = before
        self._resumed = resumed
        self._resumed_from = checkpoint
        self._on_ready = on_ready
        self._tick = tick
        self._evaluation: dict[str, EvaluationReport] = {}
        self._rehearsed: set[str] = set()
        self._stopped: set[str] = set()
        self._leaving = False
        self._view = 0
        """The number of the view that counts: reports of older ones are void."""
        self._ticks: dict[str, int] = {}
        self._stuck = StuckWatch(options.stuck_after_s)
        self._given_up: set[str] = set()
        """Members that were stuck for too long."""
        self._failures = FirstFailure(coordinator.timeouts.settle_s)
        self._signal: int | None = None
        self._stop_by: float | None = None
        self._progress = self._looked = time.monotonic()

    # The story, top to bottom -----------------------------------------------------------------

    def conduct(self) -> str:
        """Train. Returns the outcome; raises what ended it otherwise."""
        membership, options = self.membership, self.options
        if self._before is None:
            self._announce_start()
        self._until(self.coordinator.launcher.complete, "ready_s", "waiting for the hosts")
        self._until(lambda: membership.has_room, "gather_s", "waiting for free slots")
        membership.start()
        self._until(
            lambda: len(membership.ready) == membership.num_started, "ready_s", "getting ready"
        )
        dispatcher = self._prepare()
        self._on_ready()
        self.run.note_fields(membership.facts["fields"], options.settings, membership.facts["job"])
        membership.form()
        self._until(lambda: membership.all_joined, "view_s", "joining its peers")
        self._begin()
        if options.rehearse:
            dispatcher.tell_workers(order="rehearse")
            everybody = set(dispatcher.workers)
            self._until(lambda: self._rehearsed == everybody, "step_s", "rehearsing")
            dispatcher.finish("checked")
        self._until(self._all_left, "step_s", "training", wake=self._go_on)
        assert dispatcher.finishing is not None
        if dispatcher.finishing not in ("interrupted", "preempted"):
            self._check_finite()
        if self.checkpoint_tracker.error:
            raise CheckpointError(self.checkpoint_tracker.error)
        return dispatcher.finishing

    def _check_finite(self) -> None:
        """All is trained, or it was no use to go on: raise if no finite weights came of it."""
        if self.bad_steps.too_many:
            raise Diverged(f"The run has diverged: {self.bad_steps}.")
        if (step := self.checkpoint_tracker.not_finite) is not None:
            row = f": {self.bad_steps}" if self.bad_steps.count else ""
            raise Diverged(f"The run has diverged: the weights of step {step} are not finite{row}.")

    def _announce_start(self) -> None:
        options = self.options
        self.stream.emit(
            events.RunStarted(
                run=str(self.run.path),
                job=options.job,
                strategy=options.strategy,
                workers=options.workers,
                versions=self._versions,
                init_from=str(options.init_from)
                if options.init_from is not None and self._resumed_from is None
                else None,
            )
        )
        if options.workers > cores() and self.coordinator.launcher.shares_cores:
            self._notice(
                f"{options.workers} workers share {cores()} cores; "
                "more workers than cores are slower than as many"
            )

    def _prepare(self) -> Dispatcher:
        """All are ready: what to train, and how to hand it out."""
        facts = {name: facts for name, facts in self.membership.ready.items() if "fields" in facts}
        first = self.membership.facts
        for other in facts.values():
            check_same(first, other)
        options = self.options
        saved = self._resumed_from.training_plan if self._resumed_from else None
        plan_config = syllabus_of(first, options, saved)
        for name, told in facts.items():
            self.stream.emit(ready_event(name, told, plan_config))
            self.run_stats.unit = tuple(told["unit"])
        for note in filter(
            None, [monitor_note(plan_config.monitor, first), *first.get("notes", [])]
        ):
            self._notice(note)
        self.training_plan = TrainingPlan(plan_config, saved)
        self._dispatcher = make_dispatcher(
            *(options.config, self.training_plan, self.checkpoint_tracker, self._tell),
            equal=options.equal_shares,
        )
        if options.may_do_without:
            self._straggler_trial = StragglerTrial(
                self.membership, self._dispatcher.meter, self._notice
            )
        return self._dispatcher

    def _begin(self) -> None:
        """All have joined the first view."""
        assert self.training_plan is not None
        if self._resumed:
            # Also from nothing: what was committed before, and never saved, is void.
            self.stream.emit(
                events.Resumed(
                    step=self.training_plan.step,
                    epoch=self.training_plan.epoch,
                    checkpoint=self.checkpoint_tracker.newest,
                    workers=self.membership.view.world,
                )
            )
        self._count_view()
        self.run_stats.training()

    def _go_on(self) -> None:
        """After whatever happened: the next thing to do, if it is time for it."""
        membership, dispatcher = self.membership, self.dispatcher
        self._inject()
        if self._leaving:
            return
        if membership.joining:
            if not membership.all_joined:
                return
            self._count_view()
        if (wanted := self.run.take_request()) is not None:
            why = why_not(wanted, membership.view.world, self.options, membership.facts)
            workers = f"{wanted} {'worker' if wanted == 1 else 'workers'}"
            self._notice(f"asked for {workers}" + (f", and refused: {why}" if why else ""))
            if not why:
                membership.resize(wanted)
        if self._straggler_trial is not None:
            self._straggler_trial.tick(dispatcher.throughput)
        # Newcomers wait until nothing is open; when it ends anyway, nobody waits for them.
        ending = dispatcher.finishing is not None or self._signal is not None
        waited_for = (
            bool(membership.newcomers or membership.surplus or membership.misplaced) and not ending
        )
        if not ending:
            membership.fill()
        dispatcher.more(hold=waited_for, brief=membership.changes_soon)
        for change in dispatcher.training_plan.take_changes():
            self.stream.emit(rate_event(change, dispatcher.training_plan))
        if waited_for and dispatcher.quiet:
            membership.admit()

    def _inject(self) -> None:
        """Faults that are due, also while a view is joined: who is paused goes on when its time is over."""
        if self.injector is not None:
            stopping = self._leaving or self._signal is not None
            ending = stopping or self.dispatcher.finishing is not None
            self.injector.tick(
                self.dispatcher.training_plan, samples=self.run_stats.samples, ending=ending
            )

    def _count_view(self) -> None:
        """All have joined: what is in the weights counts, and what was open besides is open again."""
        membership, dispatcher = self.membership, self.dispatcher
        dispatcher.settle(membership.applied())
        self._commit_steps()
        redone = dispatcher.restart(membership.view)
        if self._before is not None and not self._view and self._before.training_plan is not None:
            redone = (
                self._before.training_plan.committed_step - dispatcher.training_plan.committed_step
            )
        dispatcher.listening, dispatcher.whole_steps = membership.listening, membership.whole_steps
        self._view = membership.view.number
        self._evaluation, self._stopped = {}, set()
        self._progress = time.monotonic()
        seconds = membership.count_view()
        if seconds is not None:
            self.stream.emit(
                events.Recovered(view=self._view, seconds=seconds, redone_steps=redone)
            )

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
        wake()
        while not done():
            happening = self.coordinator.next(TICK_S)
            if happening is not None:
                self._handle(happening)
            self._judge()
            self._look_after_folder()
            wake()
            self._tick()
            if time.monotonic() - self._progress > limit:
                raise MemberError(self._late(limit, phase))

    def _look_after_folder(self) -> None:
        """Now and then: without its folder a run can save nothing, and nobody would find it."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if self.run.is_gone:
            step = self.training_plan.committed_step if self.training_plan is not None else 0
            raise RecordError(
                f"The run folder {self.run.path} was deleted or moved: nothing can be saved any more. The "
                f"run was stopped after step {step}."
            )

    def _handle(self, happening: Happening) -> None:
        now = time.monotonic()
        match happening:
            case MemberMessage(member, message):
                try:
                    self._on_said(member, message)
                except ProtocolError as error:
                    self._distrust(member, str(error))
            case Garbage(member, reason):
                self._distrust(member, reason)
            case LinkLost(member, reason) if not self.coordinator.members[member].left:
                if self._goes_on:
                    self.membership.cut_off(member)
                else:
                    self._failures.add(MemberFailure(member, reason, grade=Grade.SUSPICION), now)
            case Exited(member, code):
                self._stuck.forget(member)
                self.stream.emit(events.MemberExited(member=member, exit_code=code))
                if not self.coordinator.members[member].left:
                    self._on_death(member, code)
            case Signalled(number):
                self._on_signal(number)
            case HostNotice(message):
                self._notice(message)
            case ThreadFailed(error):
                raise ManyhandsError(
                    f"A thread of the coordinator failed: {describe(error)}"
                ) from error

    def _on_said(self, member: str, message: Any) -> None:
        match message:
            case Ready():
                self._progress = time.monotonic()
                self._on_member_ready(member, message)
            case Report():
                self._progress = time.monotonic()
                self._on_report(member, message)
            case Beat():
                self._on_beat(member, message)
            case Failed():
                self._on_failed(member, message)

    def _on_beat(self, member: str, beat: Beat) -> None:
        now = time.monotonic()
        moves = self._stuck.hear(
            member, step=beat.step, doing=beat.doing, ticks=beat.ticks, now=now, busy=beat.busy
        )
        if moves is not None:
            self._notice(f"{member} {moves}")
        if beat.ticks != self._ticks.get(member, 0):
            self._ticks[member] = beat.ticks
            self._progress = now

    def _on_member_ready(self, member: str, ready: Ready) -> None:
        membership, seat = self.membership, ready.seat
        if (seat.name, seat.role) != (member, membership.role(member)):
            raise ProtocolError(f"it takes the seat of {seat.name[:80]!r}, a {seat.role[:80]!r}")
        if membership.is_worker(member) and ready.facts is None:
            raise ProtocolError("it is ready, and says nothing of its job")
        facts: Facts = ready.facts or {"seat": vars(seat)}
        if membership.is_worker(member) and not membership.is_new(member):
            # At the first: others may take their time.
            check_job(
                facts,
                workers=self.options.workers,
                scaling=self.options.scaling,
                saved=self._resumed_from.training_plan if self._resumed_from else None,
            )
        elif membership.is_worker(member):
            assert self.training_plan is not None
            try:
                check_same(membership.facts, facts)
            except UsageError as error:
                membership.give_up(member, str(error))
                return
            self.stream.emit(ready_event(member, facts, self.training_plan.plan_config))
        membership.ready[member] = facts

    def _on_report(self, member: str, report: Report) -> None:
        if self.coordinator.view is None or self._dispatcher is None:
            raise ProtocolError(f"it reports {type(report).__name__!r} before there is a view")
        # Of a view that is being joined nothing but that is told; of older ones only what was done.
        current = report.view == self._view
        match report:
            case Joined():
                self.membership.join(member, report)
            case CaughtUp() if current:
                self.membership.listening.discard(member)
            case Notice(message=message):
                self._notice(f"{member}: {message[:MAX_NOTE]}")
            case Rehearsed():
                self._rehearsed.add(member)
            case StepsReport() if current:
                for row in report.rows:
                    self.dispatcher.add(member, row)
                self._commit_steps()
            case EvaluationReport() if current and not self.membership.joining:
                self._evaluation[member] = report
                self._on_evaluation()
            case Stopped() if current and not self.membership.joining:
                self._stopped.add(member)
                if self._stopped.issuperset(self.dispatcher.members):
                    self._leaving = True
                    self.membership.dismiss()
                    self.dispatcher.tell_all(order="leave")
            case LinkBroken():
                if (
                    self._goes_on
                    and not self._leaving
                    and report.view == self.membership.view.number
                ):
                    self.membership.meet_again(member, report.peer)
            case PeerRefused():
                if (
                    self._goes_on
                    and not self._leaving
                    and report.view == self.membership.view.number
                ):
                    self.membership.expel(report.peer, by=member, why=report.why)
            case Left(settled=AppliedSteps(pushes=pushes)) if pushes:
                self.run_stats.pushes = dict(pushes)
            case Saving():
                self.dispatcher.saving(member, report.step)
            case Saved():
                self.checkpoint_tracker.written(member, report.step, report)
                self.checkpoint_tracker.settle(self.dispatcher.training_plan)

    def _commit_steps(self) -> None:
        assert self.training_plan is not None
        for step in self.dispatcher.committed():
            if not self.run_stats.samples:
                self.run.forget_summary()
            self.bad_steps.add(step.plan.step, step.loss, weight=step.weight)
            if self.run_stats.add(step):
                limit = self.options.max_bad_steps
                until = f" until {limit} steps in a row have no finite loss" if limit else ""
                self._notice(
                    f"The loss of step {step.plan.step} is {step.loss}. A lower learning "
                    f"rate, warm-up or clip_norm may help; training goes on{until}"
                )
            self.stream.emit(committed_event(step, lockstep=self.options.config.lockstep))
        if self.bad_steps.too_many:
            self.training_plan.stop("diverged", save=False)
        self.checkpoint_tracker.settle(self.training_plan)
        for worker, times in self.dispatcher.throughput.news(self.dispatcher.workers):
            self._notice(f"{worker} computes {times:.1f} times slower than the median")

    def _on_evaluation(self) -> None:
        assert self.training_plan is not None
        if not self._evaluation.keys() >= set(self.dispatcher.workers):
            return
        parts = [self._evaluation[name] for name in self.dispatcher.workers]
        self._evaluation = {}
        if (
            self.training_plan.awaiting
        ):  # else a stop was asked meanwhile; a resumed run evaluates again
            self.stream.emit(evaluated_event(parts, self.training_plan))
        self.dispatcher.evaluated()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._signal == signal.SIGUSR1 and number == signal.SIGTERM:
            return  # as schedulers do: first a warning, later the order; the warning is being heeded
        if self._signal is not None or not self.run_stats.trains or self.options.debug:
            code = 130 if number == signal.SIGINT else 128 + number
            if self._signal is None and self._before is not None and number != signal.SIGINT:
                code = 75  # all begin again: what can be saved is saved already
            raise Interrupted(f"Stopped at once by {name}.", exit_code=code)
        self._signal = number
        self._stop_by = time.monotonic() + self.coordinator.timeouts.stop_s
        assert self.training_plan is not None
        self.training_plan.stop("interrupted" if number == signal.SIGINT else "preempted")
        what = "Ctrl-C" if number == signal.SIGINT else name
        self.stream.emit(events.Stopping(reason=what))

    # What goes wrong --------------------------------------------------------------------------

    @property
    def _goes_on(self) -> bool:
        """A death is not the end of the run."""
        return self.options.config.elastic and self.run_stats.trains and not self.options.rehearse

    def _distrust(self, member: str, why: str) -> None:
        """A member has sent what makes no sense: it is not listened to any more, and ended."""
        self.coordinator.hang_up(member)
        reason = f"sent a report that makes no sense: {why}"
        if not self._goes_on:
            self._failures.add(MemberFailure(member, reason, by_chance=True), time.monotonic())
        elif self.membership.is_new(member) and not self._leaving:
            self.membership.give_up(member, reason)
        else:
            self.membership.end(member, reason)

    def _on_failed(self, member: str, said: Failed) -> None:
        """A member says why it ends."""
        if self._goes_on and self.membership.is_new(member):
            if not self._leaving:
                self.membership.give_up(member, said.reason)
            return
        if self._goes_on and said.consequence:
            self.membership.suspect(member, said.reason)
            return
        self._failures.add(
            MemberFailure(
                member,
                said.reason,
                said.traceback,
                grade=Grade.CONSEQUENCE if said.consequence else Grade.CAUSE,
                usage=said.usage,
                exit_code=said.exit_code & 0xFF or 1,  # leaving early is no success
                by_chance=said.weights_lost,
            ),
            time.monotonic(),
        )

    def _on_death(self, member: str, code: int) -> None:
        """A process has ended without a goodbye."""
        membership, reason = self.membership, self.membership.reason(member, signal_name(code))
        by_itself = code == 0 and not membership.suspected(member)
        failure = MemberFailure(
            member, reason, exit_code=exit_status(code) or 1, by_chance=not by_itself
        )
        if not self._goes_on:
            self._failures.add(failure, time.monotonic())
        elif self._leaving:
            return  # all that it had to do is done
        elif membership.is_new(member):
            membership.give_up(member, reason)
        elif member in membership.view.names and (by_itself or not membership.lose(member, reason)):
            self._failures.add(failure, time.monotonic())

    def _judge(self) -> None:
        """Raise for the first failure, a silent member, or a stop that takes too long."""
        now = time.monotonic()
        failure = self._failures.verdict(now)
        if self._goes_on:
            self.membership.enforce()
        elif failure is None and (overdue := self.coordinator.overdue()) is not None:
            member, reason = overdue
            failure = MemberFailure(member.name, reason, by_chance=True)
        if failure is not None:
            self._raise(failure)
        if self.run_stats.trains and not self._leaving:
            self._mind_the_stuck(now)
        if self._stop_by is not None and now > self._stop_by:
            assert self._signal is not None
            raise Interrupted(
                f"The checkpoint took more than {self.coordinator.timeouts.stop_s:.0f} s; stopped.",
                exit_code=128 + self._signal,
            )

    def _mind_the_stuck(self, now: float) -> None:
        """Name members that hang in the job's code. Give them up after a while, or if the run is to end."""
        members = self.coordinator.members
        for name, words in self._stuck.newly_stuck(now).items():
            self._notice(f"{name} {words}. Its stacks are in {members[name].log}")
            self.coordinator.say(name, "stacks")
        for name, words in self._stuck.hopeless(now, ending=self._signal is not None).items():
            self._given_up.add(name)
            self.membership.end(name, words)

    def _finish_saving(self) -> None:
        """The run ends, or begins again: wait for checkpoints whose state is copied, or will be at once."""
        began, told = time.monotonic(), False
        while (waited_s := time.monotonic() - began) < self.coordinator.timeouts.stop_s:
            alive = [name for name, member in self.coordinator.members.items() if member.alive]
            if not (steps := self.checkpoint_tracker.under_way(alive, unstarted=waited_s < COPY_S)):
                return
            if waited_s > 1 and not told:
                told = True
                self._notice(f"finishing the checkpoint of step {steps[-1]} first")
            match self.coordinator.next(TICK_S):
                case MemberMessage(member, StepsReport() | Saving() | Saved() as report):
                    with suppress(ProtocolError):  # it ends anyway
                        self._on_report(member, report)
                case Exited(member, code):
                    self.stream.emit(events.MemberExited(member=member, exit_code=code))
                case Signalled():
                    return  # somebody is in a hurry
            self._tick()

    def _raise(self, failure: MemberFailure) -> None:
        if failure.usage:
            self._finish_saving()
            raise UsageError(failure.reason)
        words = f"{failure.member} {failure.reason}"
        if self._signal is not None and failure.member in self._given_up:
            since = (
                f" since {self.checkpoint_tracker.newest}" if self.checkpoint_tracker.newest else ""
            )
            message = f"{words}: nothing could be saved{since}"
            self._notice(message)
            raise Interrupted(f"{message}.", exit_code=128 + self._signal)
        begun = (self.run_stats.trains or self._before is not None) and not self.options.rehearse
        if failure.by_chance and begun and self._signal is None and self.membership.may_begin_again:
            self.membership.lose_all(failure.member, failure.reason)
            self._finish_saving()
            raise WeightsLost(words, exit_code=failure.exit_code)
        self.would_repeat = not failure.by_chance
        self.stream.emit(
            events.MemberFailed(
                member=failure.member,
                reason=failure.reason,
                traceback=failure.traceback,
                log=str(self.coordinator.members[failure.member].log),
            )
        )
        self._finish_saving()
        raise MemberError(words, exit_code=failure.exit_code)

    def _late(self, limit_s: float, phase: str) -> str:
        """Who has been waited for, in what phase, for how long."""
        members, late = self.coordinator.members, self.membership.absent
        if (
            not late
            and self._dispatcher is not None
            and self._dispatcher.progress.first is not None
        ):
            late = self._dispatcher.progress.first.missing
        awaited = [members[name] for name in late or members if members[name].alive]
        phases = (f"{each.name} ({each.phase} for {each.phase_since_s:.0f} s)" for each in awaited)
        told = f"; waited for {', '.join(phases)}" if awaited else ""
        return f"Nothing has moved for {limit_s:.0f} s while {phase}{told}."

    def _all_left(self) -> bool:
        members = [self.coordinator.members[name] for name in self.dispatcher.members]
        # Who died after all were told to leave has left, too, where a death is not the end.
        return self._leaving and all((m.left or self._goes_on) and not m.alive for m in members)

    # ------------------------------------------------------------------------------------------

    @property
    def dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None, "not before all are ready"
        return self._dispatcher

    def _tell(self, name: str, order: Mapping[str, Any]) -> None:
        self.coordinator.say(name, "order", **order)

    def _notice(self, message: str) -> None:
        self.stream.emit(events.Noticed(message=message))
