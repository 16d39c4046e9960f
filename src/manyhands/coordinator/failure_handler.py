"""Failures of members: which of them the run survives, and the error that ends it otherwise.

A strategy that is elastic recovers from a death: the membership forms the next view. Otherwise the
first failure ends the run, or starts all members again from the last checkpoint.
"""

from __future__ import annotations

import time

from manyhands.coordinator.checkpoint_tracker import CheckpointTracker
from manyhands.coordinator.context import RunContext
from manyhands.coordinator.coordinator import exit_status, signal_name
from manyhands.coordinator.failures import FirstFailure, Grade, MemberFailure
from manyhands.coordinator.membership import Membership
from manyhands.coordinator.run_stats import RunStats
from manyhands.coordinator.stop_signal import StopSignal
from manyhands.coordinator.stuck import StuckWatch
from manyhands.errors import Interrupted, ManyhandsError, MemberError, UsageError, WeightsLost
from manyhands.events import events
from manyhands.hosts.messages import Beat, Failed, WriteStacks


class FailureHandler:
    def __init__(
        self,
        context: RunContext,
        membership: Membership,
        checkpoint_tracker: CheckpointTracker,
        run_stats: RunStats,
    ) -> None:
        self.would_repeat = False
        """If true, the job's own code ended the run, and would do so again."""
        self.stop_signal = StopSignal(context.coordinator.timeouts.stop_s)
        self._coordinator = context.coordinator
        self._options = context.options
        self._membership = membership
        self._checkpoint_tracker = checkpoint_tracker
        self._run_stats = run_stats
        self._stream = context.stream
        self._failures = FirstFailure(context.coordinator.timeouts.settle_s)
        self._stuck = StuckWatch(context.options.stuck_after_s)
        self._ended: set[str] = set()
        """Members that were ended because they were stuck for too long."""

    @property
    def recovers(self) -> bool:
        """If true, the others train on when a member dies."""
        options = self._options
        return options.config.traits.elastic and self._run_stats.trains and not options.rehearse

    def on_beat(self, member: str, beat: Beat) -> None:
        if (news := self._stuck.on_beat(member, beat, time.monotonic())) is not None:
            self._stream.notice(f"{member} {news}")

    def on_invalid_message(self, member: str, why: str) -> None:
        """End a member that sent an invalid message, and ignore its other messages."""
        self._coordinator.hang_up(member)
        reason = f"sent an invalid message: {why}"
        if not self.recovers:
            self._add(MemberFailure(member, reason, transient=True))
        elif member in self._membership.roster.new and not self._membership.leaving:
            self._membership.give_up(member, reason)
        else:
            self._membership.end(member, reason)

    def on_failed(self, member: str, failed: Failed) -> None:
        """Handle a member's report of why it ends."""
        if self.recovers and member in self._membership.roster.new:
            if not self._membership.leaving:
                self._membership.give_up(member, failed.reason)
            return
        if self.recovers and failed.consequence:
            self._membership.note_ending(member, failed.reason)
            return
        self._add(
            MemberFailure(
                member,
                failed.reason,
                failed.traceback,
                grade=Grade.CONSEQUENCE if failed.consequence else Grade.CAUSE,
                usage=failed.usage,
                exit_code=failed.exit_code & 0xFF or 1,  # an early exit is never a success
                transient=failed.weights_lost,
            )
        )

    def on_link_lost(self, member: str, reason: str) -> None:
        if self.recovers:
            self._membership.disconnected(member)
        else:
            self._add(MemberFailure(member, reason, grade=Grade.SUSPICION))

    def on_exit(self, member: str, code: int) -> None:
        """Handle the end of a process."""
        self._stuck.forget(member)
        self._stream.emit(events.MemberExited(member=member, exit_code=code))
        if not self._coordinator.members[member].left:
            self._on_death(member, code)

    def check(self) -> MemberFailure | None:
        """Look for what ends the run: the first failure, a silent member, a stop that takes too long."""
        now = time.monotonic()
        failure = self._failures.verdict(now)
        if self.recovers:
            self._membership.enforce_timeouts()
        elif failure is None and (overdue := self._coordinator.overdue()) is not None:
            member, reason = overdue
            failure = MemberFailure(member.name, reason, transient=True)
        if failure is None:
            if self._run_stats.trains and not self._membership.leaving:
                self._check_stuck(now)
            self.stop_signal.check_deadline()
        return failure

    def error_of(self, failure: MemberFailure) -> ManyhandsError:
        """Report the failure. Returns the error to raise: WeightsLost if all may start again."""
        if failure.usage:
            return UsageError(failure.reason)
        text = f"{failure.member} {failure.reason}"
        number = self.stop_signal.number
        if number is not None and failure.member in self._ended:
            newest = self._checkpoint_tracker.newest
            message = f"{text}: nothing could be saved{f' since {newest}' if newest else ''}"
            self._stream.notice(message)
            return Interrupted(f"{message}.", exit_code=128 + number)
        membership = self._membership
        has_trained = self._run_stats.trains or membership.num_full_restarts > 0
        restartable = has_trained and not self._options.rehearse and membership.may_restart
        if failure.transient and restartable and number is None:
            membership.lose_all(failure.member, failure.reason)
            return WeightsLost(text, exit_code=failure.exit_code)
        self.would_repeat = not failure.transient
        log = str(self._coordinator.members[failure.member].log)
        self._stream.emit(
            events.MemberFailed(
                member=failure.member,
                reason=failure.reason,
                traceback=failure.traceback,
                log=log,
            )
        )
        error = MemberError(text, exit_code=failure.exit_code)
        for note in filter(None, (failure.traceback.rstrip(), f"log: {log}")):
            error.add_note(note)  # shown where Python prints it; the console has the event
        return error

    def _on_death(self, member: str, code: int) -> None:
        """Handle the end of a process that had not left."""
        membership = self._membership
        reason = membership.reason(member, signal_name(code))
        by_itself = code == 0 and not membership.is_ending(member)
        failure = MemberFailure(
            member, reason, exit_code=exit_status(code) or 1, transient=not by_itself
        )
        if not self.recovers:
            self._add(failure)
        elif membership.leaving:
            return  # it had nothing left to do
        elif member in membership.roster.new:
            membership.give_up(member, reason)
        elif member in membership.views.members and (
            by_itself or not membership.lose(member, reason)
        ):
            self._add(failure)

    def _check_stuck(self, now: float) -> None:
        """Report members that hang in the job's code. End them after a while, or when the run is to stop."""
        for name, text in self._stuck.newly_stuck(now).items():
            self._stream.notice(
                f"{name} {text}. Its stacks are in {self._coordinator.members[name].log}"
            )
            self._coordinator.send(name, WriteStacks())
        for name, text in self._stuck.hopeless(now, ending=self.stop_signal.received).items():
            self._ended.add(name)
            self._membership.end(name, text)

    def _add(self, failure: MemberFailure) -> None:
        self._failures.add(failure, time.monotonic())
