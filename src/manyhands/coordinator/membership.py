"""Losing members: which members are ending and why, and which view follows.

    lose        a member has died: the next view is formed at once from those that are left, and a
                replacement is started under a new name (worker_pool.py)
    reconnect   two members lost their link and both live: all members of the view connect again
    expel       a member refused a peer's messages: the peer is ended
    give_up     a new member failed before it had joined a view

A member is ended by killing it. Its exit then counts as its death, for the reason given.
"""

from __future__ import annotations

import time

from manyhands.control.messages import Assignment
from manyhands.coordinator.context import RunContext
from manyhands.coordinator.recovery_clock import RecoveryClock
from manyhands.coordinator.roster import Roster
from manyhands.coordinator.unreached import UnreachedPeers
from manyhands.coordinator.views import Views
from manyhands.coordinator.worker_pool import WorkerPool
from manyhands.events import events


class Membership:
    def __init__(
        self, context: RunContext, assignment: Assignment, *, before: Membership | None = None
    ) -> None:
        """`before`: the members of the previous start, in which the weights were lost."""
        self.roster = Roster(context, assignment)
        self.views = Views(context, self.roster)
        self.pool = WorkerPool(context, self.roster, self.views)
        self.leaving = False
        """If true, all members were ordered to leave: the run is over."""
        self.num_lost: int = before.num_lost if before else 0
        self.num_replaced: int = before.num_replaced if before else 0
        self.num_full_restarts: int = before.num_full_restarts + 1 if before else 0
        """Number of restarts of all members from a checkpoint. Limited by `max_restarts`."""
        self._coordinator = context.coordinator
        self._options = context.options
        self._stream = context.stream
        self.recovery_clock: RecoveryClock = before.recovery_clock if before else RecoveryClock()
        self._reasons: dict[str, str] = {}
        """Reasons why members are about to end."""
        self._disconnected: dict[str, float] = {}
        """Members whose link to the coordinator is lost, since when."""
        self._unreached = UnreachedPeers()
        self._accusers: set[tuple[int, str]] = set()
        """(view, member) that had a peer ended."""

    @property
    def may_restart(self) -> bool:
        """If true, all members may start again from a checkpoint."""
        return self.num_full_restarts < self._options.max_restarts

    def finish_view_change(self) -> None:
        """Activate the view: all have joined."""
        self.num_replaced += self.views.activate()
        self.pool.handover.cancel()
        self._unreached.clear()

    def dismiss(self) -> None:
        """Note that all members leave."""
        self.leaving = True
        self.pool.dismiss_new()

    def note_ending(self, member: str, reason: str) -> None:
        """Record why a member is about to end. The first reason is kept."""
        self._reasons.setdefault(member, reason)

    def is_ending(self, member: str) -> bool:
        return member in self._reasons

    def disconnected(self, member: str) -> None:
        """Note a lost link. The member ends itself, or is ended in a moment."""
        self._disconnected.setdefault(member, time.monotonic())

    def reason(self, member: str, default: str) -> str:
        """Return why it ended, if anything is known besides its exit code."""
        return self._reasons.get(member, self._coordinator.members[member].handle.why or default)

    def end(self, name: str, reason: str) -> None:
        """Kill a member."""
        member = self._coordinator.members[name]
        if member.alive and not member.left:
            self.note_ending(name, reason)
            member.handle.kill()

    def lose(self, member: str, reason: str) -> bool:
        """Form the next view after a death, at once. Returns False if the members that are left can't
        recover."""
        roster, views, pool = self.roster, self.views, self.pool
        names, stood_by = views.members, member in roster.standby
        roster.standby.discard(member)
        left = [name for name in names if name != member and roster.is_alive(name)]
        workers = [name for name in left if roster.is_worker(name)]
        fit = self._options.config.refit(len(workers))
        enough = fit >= self._options.min_workers or pool.may_replace
        servers = bool(self._options.servers)
        if not fit or not enough or not views.have_weights(left, servers=servers):
            return False
        self._count_loss(member, reason, num_workers=len(workers))
        self._unreached.clear()
        if not stood_by:
            views.form(left)
        if member in self._unreached.left_out:
            self._stream.notice(
                f"{member} will not be replaced: a replacement on that host would be unreachable too. Once "
                "the network is repaired (manyhands doctor --cluster tests it), run  manyhands scale RUN "
                f"--workers {pool.target}"
            )
        else:
            pool.replace(member)
        return True

    def lose_all(self, member: str, reason: str) -> None:
        """Note the loss of a member with which weights are lost."""
        if self.roster.is_alive(member):
            self._stream.notice(f"{member}: {reason}")
        else:
            self._count_loss(member, reason, num_workers=0)

    def give_up(self, member: str, reason: str) -> None:
        """Replace a new member that failed before it joined a view."""
        if member not in self.roster.new:
            return
        self.roster.new.discard(member)
        self.roster.kill(member)
        self._stream.notice(f"replacement {member} failed to start: {reason}")
        names = self.views.current.names
        if self.views.joining and member in names:
            self.views.form([name for name in names if name != member])
        self.pool.replace(member)

    def reconnect(self, member: str, peer: str) -> None:
        """Have all members of the view reconnect: two living members have lost their link. If that fails
        repeatedly, leave one of the two out."""
        view = self.views.current
        if any(map(self.is_ending, view.names)):
            return  # a member is about to end, and the next view comes with that
        if self.views.joining and not view.one_host:
            self._unreached.add(member, peer)
        if self._unreached.too_often:
            member, peers = self._unreached.leave_out(view.names, self.roster.is_worker)
            others = " and ".join(peers)
            self.end(member, f"it and {others} do not reach each other, though both are alive")
            return
        self._stream.notice(f"{member} lost its link to {peer}; all members reconnect")
        self.views.form(view.names)

    def expel(self, member: str, *, accuser: str, reason: str) -> None:
        """End a member whose messages a peer refused, because the others would wait for it. Each member can
        do this once a view, so that one that accuses all others is not left alone."""
        view = self.views.current
        accusation = view.number, accuser
        if accusation in self._accusers or member == accuser or member not in view.names:
            return
        self._accusers.add(accusation)
        self.end(member, f"refused by {accuser}: {reason[:300]}")

    def enforce_timeouts(self) -> None:
        """End members that are silent, have lost their link or don't join."""
        now, timeouts = time.monotonic(), self._coordinator.timeouts
        if (overdue := self._coordinator.overdue()) is not None:
            self.end(overdue[0].name, overdue[1])
        for member, since in self._disconnected.items():
            if now - since > timeouts.settle_s:
                self.end(member, "lost its link to the coordinator")
        if self.views.joining and now - self.views.formed_at > timeouts.view_s:
            for name in self.views.missing:
                self.end(name, f"did not join its peers within {timeouts.view_s:.0f} s")

    def _count_loss(self, member: str, reason: str, *, num_workers: int) -> None:
        """`num_workers`: how many are left."""
        self.recovery_clock.lost(time.monotonic())
        self.num_lost += 1
        self.pool.num_changes += 1
        view = self._coordinator.view.number if self._coordinator.view else 0
        self._stream.emit(
            events.MemberLost(member=member, reason=reason, view=view, workers=num_workers)
        )
