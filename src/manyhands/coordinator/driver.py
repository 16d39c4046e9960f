"""The driver: one start of a run, from the first process to the last, in the thread that decides.

start the members               wait until each is ready
form the view                   wait until each has joined
repeat:                         take the next event from the coordinator's inbox
    reports   -> events, commits, checkpoints that count (training.py)
    orders    -> enough ahead that no worker waits, not so far that stopping takes long (dispatch.py)
    deaths    -> if the strategy is elastic, the next view, and what is not in the weights by then is
                 dispatched again (membership.py); else the error that ends it (failure_handler.py)
stop                            wait until each has left
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from manyhands.control import messages
from manyhands.coordinator import inbox, job_checks
from manyhands.coordinator.checkpoint_tracker import CheckpointTracker
from manyhands.coordinator.context import RunContext
from manyhands.coordinator.failure_handler import FailureHandler
from manyhands.coordinator.fault_injector import FaultInjector
from manyhands.coordinator.membership import Membership
from manyhands.coordinator.plan import TARGET, TrainingPlan
from manyhands.coordinator.run_stats import RunStats
from manyhands.coordinator.target import target_of
from manyhands.coordinator.training import Training
from manyhands.errors import (
    CheckpointError,
    Diverged,
    Interrupted,
    ManyhandsError,
    MemberError,
    ProtocolError,
    UsageError,
)
from manyhands.events import events
from manyhands.events.units import plural
from manyhands.hosts.messages import Beat, Bye, Failed
from manyhands.runs.checkpoints import Manifest
from manyhands.strategies.pairs import check_pairs
from manyhands.threads import describe

POLL_S = 0.1
"""Time for which the loop waits for an event before it checks timeouts."""
COPY_S = 2.0
"""Time for which a failure waits for an ordered checkpoint to be copied."""


class Driver:
    def __init__(
        self,
        context: RunContext,
        *,
        checkpoint: Manifest | None = None,
        before: Driver | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        """`before`: the start in which the weights were lost. All members start again from the checkpoint.
        `on_poll`: called after each event, and every POLL_S without one."""
        self.context = context
        self.coordinator = coordinator = context.coordinator
        self.options = options = context.options
        self.stream = stream = context.stream
        self._checkpoint = checkpoint
        self.run_stats: RunStats = RunStats(
            options, saved=self._saved_plan, before=before.run_stats if before else None
        )
        self.checkpoint_tracker = CheckpointTracker(
            context.run, stream, options, newest=checkpoint, stats=self.run_stats.state
        )
        self.membership: Membership = Membership(
            context,
            options.assignment(context.run.path, checkpoint.path if checkpoint else None),
            before=before.membership if before else None,
        )
        self.failures = FailureHandler(
            context, self.membership, self.checkpoint_tracker, self.run_stats
        )
        self.injector: FaultInjector | None = before.injector if before else None
        if self.injector is not None:
            self.injector.follow(self.membership)
        elif options.chaos is not None and not options.rehearse:
            self.injector = FaultInjector(options.chaos, coordinator, self.membership, stream)
        self.training: Training | None = None
        """Set once all members are ready."""
        self._before = before
        self._on_ready = on_ready
        self._on_poll = on_poll
        self._last_progress = time.monotonic()

    @property
    def plan(self) -> TrainingPlan | None:
        return self.training.plan if self.training else None

    # From start to end ------------------------------------------------------------------------

    def drive(self) -> str:
        """Train. Returns the outcome; raises what ended the run otherwise."""
        membership, roster, views = self.membership, self.membership.roster, self.membership.views
        self._until(self.coordinator.launcher.complete, "ready_s", "waiting for the hosts")
        self._until(lambda: membership.pool.has_slots, "gather_s", "waiting for free slots")
        membership.pool.start_first()
        self._until(lambda: roster.all_ready, "ready_s", "getting ready")
        self.training = training = self._prepare()
        views.form(roster.names)
        # Workers that build in the view load their weights while they join it.
        limit = "ready_s" if roster.facts.built is None else "view_s"
        self._until(lambda: views.all_joined, limit, "joining peers")
        self._check_built(training.plan)
        self._on_ready()
        facts = roster.facts
        self.context.run.note_fields(facts.all_fields, self.options.settings, facts.job)
        self._begin(training)
        if self.options.rehearse:
            training.dispatcher.send_workers(messages.RehearseOrder())
            self._until(lambda: training.rehearsed, "step_s", "rehearsing")
            training.dispatcher.finish("checked")
        self._until(self._all_left, "step_s", "training", wake=self._advance)
        outcome = training.dispatcher.finishing
        assert outcome is not None
        if outcome not in ("interrupted", "preempted"):
            self._check_finite()
        if self.checkpoint_tracker.error:
            raise CheckpointError(self.checkpoint_tracker.error)
        return outcome

    def _prepare(self) -> Training:
        """Decide what to train and how to dispatch it, once all members are ready."""
        facts = self.membership.roster.worker_facts
        first = self.membership.roster.facts
        for other in facts.values():
            job_checks.check_same(first, other)
        self._check_job(first)
        saved = self._saved_plan
        config = job_checks.plan_config_of(first, self.options, saved)
        if self._before is not None and self._before.plan is not None:
            config = replace(config, max_step=self._before.plan.config.max_step)
        for name, each in facts.items():
            self.stream.emit(job_checks.ready_event(name, each, config))
        self.run_stats.unit = first.unit
        plan = TrainingPlan(config, saved)
        watch = self.run_stats.target_watch
        if watch.target is None and self.options.target:
            watch.target = target_of(self.options.target, first, monitor=config.monitor)
        if watch.reached is not None:
            plan.stop(TARGET)
        return Training(
            plan,
            self.context,
            self.membership,
            self.checkpoint_tracker,
            self.run_stats,
            self.failures,
        )

    def _check_built(self, plan: TrainingPlan) -> None:
        """Check the facts that some workers only find out when they join the first view, and show their
        notes."""
        facts = self.membership.roster.facts
        self._check_job(facts)
        notes = facts.built.notes if facts.built is not None else []
        monitor_note = job_checks.monitor_note(plan.config.monitor, facts)
        for note in filter(None, [monitor_note, *notes]):
            self.stream.notice(note)

    def _check_job(self, facts: messages.WorkerFacts) -> None:
        roster = self.membership.roster
        features = job_checks.features_of(
            facts,
            seats=[r.seat for r in roster.ready.values() if r.facts] if roster.all_ready else (),
            spans_hosts=self.coordinator.launcher.spans_hosts,
        )
        check_pairs(self.options.config, features, workers=self.options.workers)
        job_checks.check_job(
            facts,
            workers=self.options.workers,
            replica_size=self.options.config.replica_size(self.options.workers),
            scaling=self.options.scaling,
            saved=self._saved_plan,
            target=self.options.target if self._before is None else "",
        )
        length = job_checks.plan_config_of(facts, self.options, self._saved_plan)
        self.options.config.check_length(length.num_steps)

    @property
    def _saved_plan(self) -> Mapping[str, Any] | None:
        return self._checkpoint.training_plan if self._checkpoint else None

    def _begin(self, training: Training) -> None:
        """Begin training, once all members have joined the first view."""
        if self.options.resumed or self._before:
            # Also without a checkpoint: what was committed before, and never saved, is void.
            self.stream.emit(
                events.Resumed(
                    step=training.plan.step,
                    epoch=training.plan.epoch,
                    checkpoint=self.checkpoint_tracker.newest,
                    workers=self.membership.views.current.world,
                )
            )
        plan_before = self._before.plan if self._before else None
        training.enter_view(steps_before=plan_before.committed_step if plan_before else None)
        self.run_stats.training()

    def _advance(self) -> None:
        """Do what is due, after each event."""
        training, views = self.training, self.membership.views
        assert training is not None
        leaving = self.membership.leaving
        if self.injector is not None:
            # Also while a view is joined: a paused member continues when its time is over.
            self.injector.tick(
                training.plan, samples=self.run_stats.samples, ending=leaving or training.ending
            )
        if leaving or (views.joining and not views.all_joined):
            return
        if views.joining:
            training.enter_view()
        self._take_request()
        training.advance()

    def _take_request(self) -> None:
        """Handle a request for another number of workers (`manyhands scale`)."""
        if (request := self.context.run.take_request()) is None:
            return
        workers, membership = request.workers, self.membership
        why = job_checks.why_not(
            workers,
            membership.views.current.world,
            self.options,
            membership.roster.facts,
            spans_hosts=self.coordinator.launcher.spans_hosts,
        )
        message = f"asked for {plural(workers, 'worker')}" + (
            f", and refused: {why}" if why else ""
        )
        self.stream.emit(events.ScaleAnswered(workers=workers, accepted=not why, message=message))
        if not why:
            membership.pool.resize(workers)

    def _check_finite(self) -> None:
        """Raise if the run has ended without finite weights."""
        bad_steps = self.run_stats.bad_steps
        if bad_steps.too_many:
            raise Diverged(f"The run has diverged: {bad_steps}.")
        if (step := self.checkpoint_tracker.not_finite) is not None:
            detail = f": {bad_steps}" if bad_steps.count else ""
            raise Diverged(
                f"The run has diverged: the weights of step {step} are not finite{detail}."
            )

    def _all_left(self) -> bool:
        assert self.training is not None
        members = [self.coordinator.members[name] for name in self.training.dispatcher.members]
        # If the run survives deaths, a member that died after all were told to leave has left, too.
        survives = self.failures.recovers
        return self.membership.leaving and all(
            (m.left or survives) and not m.alive for m in members
        )

    # Messages, exits, signals -----------------------------------------------------------------

    def _until(
        self,
        done: Callable[[], bool],
        timeout: str,
        phase: str,
        *,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Handle what happens until `done`. After the named timeout without progress, raise an error that
        names the members that are late."""
        self._last_progress = time.monotonic()
        limit_s = getattr(self.coordinator.timeouts, timeout)
        wake()
        while not done():
            event = self.coordinator.next(POLL_S)
            if event is not None:
                self._handle(event)
            if (failure := self.failures.check()) is not None:
                error = self.failures.error_of(failure)
                if not isinstance(error, Interrupted):
                    self._finish_saving()
                raise error
            wake()
            self._on_poll()
            if time.monotonic() - self._last_progress > limit_s:
                raise MemberError(self._late(limit_s, phase))

    def _handle(self, event: inbox.InboxEvent) -> None:
        match event:
            case inbox.MemberMessage(member, message):
                try:
                    self._on_message(member, message)
                except ProtocolError as error:
                    self.failures.on_invalid_message(member, str(error))
            case inbox.Garbage(member, reason):
                self.failures.on_invalid_message(member, reason)
            case inbox.LinkLost(member, reason) if not self.coordinator.members[member].left:
                self.failures.on_link_lost(member, reason)
            case inbox.Exited(member, code):
                self.failures.on_exit(member, code)
            case inbox.Signalled(number):
                self._on_signal(number)
            case inbox.HostNotice(message):
                self.stream.notice(message)
            case inbox.ThreadFailed(error):
                raise ManyhandsError(
                    f"A thread of the coordinator failed: {describe(error)}"
                ) from error

    def _on_message(self, member: str, message: object) -> None:
        match message:
            case messages.Ready():
                self._last_progress = time.monotonic()
                self._on_member_ready(member, message)
            case messages.Report():
                self._last_progress = time.monotonic()
                self._on_report(member, message)
            case Beat():
                self.failures.on_beat(member, message)
                if self.training is not None:
                    self.training.on_beat(member, message)
                ticked = self.coordinator.members[member].ticked
                self._last_progress = max(self._last_progress, ticked)
                if self.plan is not None and self.plan.awaiting:
                    self.membership.recovery_clock.active(ticked)
            case Failed():
                self.failures.on_failed(member, message)
            case Bye() if not self.membership.leaving:
                self.coordinator.members[member].left = False  # its death counts
                raise ProtocolError("it leaves before the run has ended")

    def _on_member_ready(self, member: str, ready: messages.Ready) -> None:
        roster, seat, facts = self.membership.roster, ready.seat, ready.facts
        if (seat.name, seat.role) != (member, roster.role(member)):
            raise ProtocolError(f"it takes the seat of {seat.name[:80]!r}, a {seat.role[:80]!r}")
        if roster.is_worker(member):
            if facts is None:
                raise ProtocolError("it is ready without facts about its job")
            if member in roster.new:
                assert self.plan is not None
                try:
                    job_checks.check_same(roster.facts, facts)
                except UsageError as error:
                    self.membership.give_up(member, str(error))
                    return
                self.stream.emit(job_checks.ready_event(member, facts, self.plan.config))
            else:
                # At the first one: the others may take their time.
                self._check_job(facts)
        roster.ready[member] = ready

    def _on_report(self, member: str, report: messages.Report) -> None:
        if self.coordinator.view is None or self.training is None:
            raise ProtocolError(f"it reports {type(report).__name__!r} before there is a view")
        self.training.on_report(member, report)

    def _on_signal(self, number: int) -> None:
        outcome = self.failures.stop_signal.receive(
            number,
            can_save=self.run_stats.trains and not self.options.debug,
            restarted=self._before is not None,
        )
        if outcome is not None:
            assert self.plan is not None
            self.plan.stop(outcome)
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self.stream.emit(events.Stopping(reason=name))

    def _finish_saving(self) -> None:
        """Wait for checkpoints that are copied, or will be in a moment, before this start ends."""
        began, told = time.monotonic(), False
        while (waited_s := time.monotonic() - began) < self.coordinator.timeouts.stop_s:
            alive = [name for name, member in self.coordinator.members.items() if member.alive]
            steps = self.checkpoint_tracker.under_way(alive, unstarted=waited_s < COPY_S)
            if not steps:
                return
            if waited_s > 1 and not told:
                told = True
                self.stream.notice(f"finishing the checkpoint of step {steps[-1]} first")
            match self.coordinator.next(POLL_S):
                case inbox.MemberMessage(
                    member, messages.StepsReport() | messages.Saving() | messages.Saved() as report
                ):
                    with suppress(ProtocolError):  # the member ends anyway
                        self._on_report(member, report)
                case inbox.Exited(member, code):
                    self.stream.emit(events.MemberExited(member=member, exit_code=code))
                case inbox.Signalled():
                    return  # the user is in a hurry
            self._on_poll()

    def _late(self, limit_s: float, phase: str) -> str:
        """Describe which members are late, in which phase, and for how long."""
        members, late = self.coordinator.members, self.membership.views.missing
        if not late and self.training is not None:
            step = self.training.dispatcher.progress.first
            late = step.missing if step is not None else []
        awaited = [members[name] for name in late or members if members[name].alive]
        phases = (f"{each.name} ({each.phase} for {each.phase_since_s:.0f} s)" for each in awaited)
        waited = f"; waiting for {', '.join(phases)}" if awaited else ""
        return f"No progress for {limit_s:.0f} s while {phase}{waited}."
