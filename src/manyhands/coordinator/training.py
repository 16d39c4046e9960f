"""Training, once all members are ready: handles their reports and dispatches the next orders."""

from __future__ import annotations

import time
from dataclasses import asdict

from manyhands.contract import AppliedSteps
from manyhands.control import messages
from manyhands.coordinator.checkpoint_tracker import CheckpointTracker
from manyhands.coordinator.context import RunContext
from manyhands.coordinator.dispatch import Dispatcher, make_dispatcher
from manyhands.coordinator.failure_handler import FailureHandler
from manyhands.coordinator.member_times import MemberTimesMeter
from manyhands.coordinator.membership import Membership
from manyhands.coordinator.plan import LIMIT, TrainingPlan
from manyhands.coordinator.progress import evaluation_of
from manyhands.coordinator.recovery_clock import RecoveryTimes
from manyhands.coordinator.run_stats import RunStats
from manyhands.coordinator.straggler_trial import StragglerTrial
from manyhands.costs import ModelSize
from manyhands.errors import JobError
from manyhands.events import events
from manyhands.events.units import show_time
from manyhands.hosts.messages import Beat, LinkBroken, PeerRefused

MAX_NOTE_CHARS = 500
"""Maximum length of a member's notice; the rest is cut off."""


class Training:
    def __init__(
        self,
        plan: TrainingPlan,
        context: RunContext,
        membership: Membership,
        checkpoint_tracker: CheckpointTracker,
        run_stats: RunStats,
        failures: FailureHandler,
    ) -> None:
        self.plan = plan
        self.dispatcher: Dispatcher = make_dispatcher(
            context.options.config,
            plan,
            checkpoint_tracker,
            context.coordinator.send,
            equal=context.options.equal_shares,
        )
        self.dispatcher.progress.measures = {
            measure.name: measure for measure in membership.roster.facts.measures
        }
        self._options = context.options
        self._run = context.run
        self._membership = membership
        self._checkpoint_tracker = checkpoint_tracker
        self._run_stats = run_stats
        self._failures = failures
        self._stream = context.stream
        self._straggler_trial: StragglerTrial | None = None
        if context.options.may_leave_out:
            self._straggler_trial = StragglerTrial(
                membership.pool, self.dispatcher.meter, self._stream.notice
            )
        self._evaluation: dict[str, messages.EvaluationReport] = {}
        self._rehearsed: dict[str, ModelSize | None] = {}
        self._stopped: set[str] = set()
        self._member_times = MemberTimesMeter(lockstep=context.options.config.traits.lockstep)
        self._view = 0
        """Number of the active view: reports of older ones are discarded."""

    @property
    def rehearsed(self) -> bool:
        return self._rehearsed.keys() >= set(self.dispatcher.workers)

    @property
    def model_size(self) -> ModelSize | None:
        """Sizes in the model, once a worker has rehearsed."""
        return next(iter(self._rehearsed.values()), None)

    @property
    def ending(self) -> bool:
        """If true, the run is stopping, or was requested to."""
        return self.dispatcher.finishing is not None or self._failures.stop_signal.received

    def enter_view(self, *, steps_before: int | None = None) -> None:
        """All have joined the view: commit what is in the weights, and dispatch the rest again.

        `steps_before`: the steps that were committed before all members started again from a checkpoint.
        """
        membership, dispatcher, views = self._membership, self.dispatcher, self._membership.views
        dispatcher.mark_applied(views.applied())
        self._commit_steps()
        redone = dispatcher.redispatch(views.current)
        if steps_before is not None:
            redone = steps_before - self.plan.committed_step
        dispatcher.catching_up, dispatcher.whole_steps = views.catching_up, views.whole_steps
        self._view = views.current.number
        self._evaluation, self._stopped = {}, set()
        membership.finish_view_change()
        clock, now = membership.recovery_clock, time.monotonic()
        self._member_times.enter_view({seat.name: seat.role for seat in views.current.seats}, now)
        clock.joined(now, redone_steps=redone, steps_before=steps_before or 0)
        clock.active(now)

    def advance(self) -> None:
        """Dispatch the next orders, or change the view if that is due and nothing is open."""
        self._stop_in_time()
        dispatcher, pool = self.dispatcher, self._membership.pool
        if self._straggler_trial is not None:
            self._straggler_trial.tick(dispatcher.throughput)
        # A view change waits until nothing is open; a run that ends does not wait for new members.
        change_view = pool.view_change_due and not self.ending
        if not self.ending:
            pool.start_waiting()
        dispatcher.dispatch_ahead(pause=change_view, short=self._membership.views.changes_soon)
        for change in self.plan.take_changes():
            self._stream.emit(
                events.RateChanged(
                    step=change.step,
                    factor=change.factor,
                    over=change.over,
                    batch_size=self.plan.batch_size,
                    steps=self.plan.num_steps,
                    reason=change.reason,
                )
            )
        if change_view and dispatcher.idle:
            pool.change_view()
        else:
            pool.handover.cancel()
        self._emit_member_times()

    def on_beat(self, member: str, beat: Beat) -> None:
        self._member_times.on_beat(member, beat, time.monotonic())

    def on_report(self, member: str, report: messages.Report) -> None:
        # Before a view is active, only `ViewJoined` is handled; of older views, only what was done.
        membership, views = self._membership, self._membership.views
        current = report.view == self._view
        recovers = self._failures.recovers and not membership.leaving
        match report:
            case messages.ViewJoined():
                views.join(member, report)
            case messages.CaughtUp() if current:
                views.catching_up.discard(member)
            case messages.Notice(message=message):
                self._stream.notice(f"{member}: {message[:MAX_NOTE_CHARS]}")
            case messages.Rehearsed(model=model):
                self._rehearsed[member] = model
            case messages.StepsReport(computed=computed, computed_s=seconds) if current:
                self.dispatcher.note_computed(member, computed, seconds)
                for row in report.rows:
                    self.dispatcher.add(member, row)
                # In rounds, members that join a view report what they have, and only together they know.
                if not views.joining or self.plan.config.round_steps is None:
                    self._commit_steps()
            case messages.EvaluationReport() if current and not views.joining:
                self._evaluation[member] = report
                self._on_evaluation()
            case messages.HandedOver(number=number) if current:
                membership.pool.handover.note(member, number)
            case messages.Stopped() if current and not views.joining:
                self._stopped.add(member)
                if self._stopped.issuperset(self.dispatcher.members):
                    self._report_recovery(membership.recovery_clock.ended(), at=time.time())
                    self._emit_member_times(last=True)
                    membership.dismiss()
                    self.dispatcher.send_all(messages.LeaveOrder())
            case LinkBroken(peer=peer) if recovers and report.view == views.current.number:
                membership.reconnect(member, peer)
            case PeerRefused() if recovers and report.view == views.current.number:
                membership.expel(report.peer, accuser=member, reason=report.why)
            case messages.Left(applied=AppliedSteps(pushes=pushes)) if pushes:
                self._run_stats.pushes = dict(pushes)
            case messages.Saving():
                self.dispatcher.saving(member, report)
            case messages.Saved():
                self._checkpoint_tracker.written(member, report)
                self._checkpoint_tracker.commit_written(self.plan)

    def _stop_in_time(self) -> None:
        limit_s = self._options.max_time_s
        if limit_s is None or self._run_stats.wall_s < limit_s or self.plan.stopping:
            return
        self.plan.stop(LIMIT)
        self._stream.emit(events.Stopping(reason=f"--max-time {show_time(limit_s)}"))

    def _commit_steps(self) -> None:
        for step in self.dispatcher.committed():
            if not self._run_stats.samples:
                self._run.forget_summary()
            if self._run_stats.add(step):
                limit = self._run_stats.bad_steps.limit
                until = f" until {limit} steps in a row have no finite loss" if limit else ""
                self._stream.notice(
                    f"The loss of step {step.event.step} is {step.event.loss}. A lower learning "
                    f"rate, warm-up or clip_norm may help; training continues{until}"
                )
            self._note_progress(step.event)
            self._stream.emit(step.event)
            self._member_times.committed(step)
        if self._run_stats.bad_steps.too_many:
            self.plan.stop("diverged", save=False)
        self._checkpoint_tracker.commit_written(self.plan)
        for worker, times in self.dispatcher.throughput.news(self.dispatcher.workers):
            self._stream.notice(f"{worker} computes {times:.1f} times slower than the median")

    def _emit_member_times(self, *, last: bool = False) -> None:
        step = self.plan.committed_step
        event = self._member_times.take(time.monotonic(), step=step, last=last)
        if event is not None:
            self._stream.emit(event)

    def _note_progress(self, event: events.StepCommitted | events.Evaluated) -> None:
        times = self._membership.recovery_clock.progress(time.monotonic(), event.step)
        self._report_recovery(times, at=event.time)

    def _report_recovery(self, times: RecoveryTimes | None, *, at: float) -> None:
        if times is not None:
            split = asdict(times)
            self._stream.emit(
                events.Recovered(time=at, view=self._view, seconds=times.seconds, **split)
            )

    def _on_evaluation(self) -> None:
        dispatcher, reports = self.dispatcher, self._evaluation
        if not reports.keys() >= set(dispatcher.workers):
            return
        self._evaluation = {}
        plan = self.plan
        if plan.awaiting:  # else a stop was requested meanwhile, and a resumed run evaluates again
            parts = [reports[replica[0]] for replica in dispatcher.replicas]
            samples, metrics = evaluation_of(parts, dispatcher.progress.measures)
            step, epoch, watch = plan.step, plan.epoch, self._run_stats.target_watch
            for option, metric in (("monitor", plan.config.monitor), ("--target", watch.metric)):
                if metric is not None and metric.name not in metrics:
                    gave = ", ".join(metrics) or "none"
                    raise JobError(f"{option} is {metric.name!r}, and the evaluation gave {gave}.")
            event = events.Evaluated(
                step=step,
                epoch=epoch,
                samples=samples,
                metrics=metrics,
                best=plan.evaluated(metrics, on_target=watch.is_met(metrics)),
                seconds=max(reports[name].seconds for name in dispatcher.workers),
            )
            reached = self._run_stats.evaluated(event, samples=plan.samples_used)
            self._note_progress(event)
            self._stream.emit(event)
            if reached is not None:
                self._stream.emit(reached)
        dispatcher.evaluated()
