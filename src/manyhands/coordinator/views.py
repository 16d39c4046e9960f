"""View changes: the coordinator forms a view, and it is active once each of its members has joined it.

Until then a member may die, and the next view is formed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from manyhands.control.messages import ViewJoined
from manyhands.coordinator.context import RunContext
from manyhands.coordinator.progress import PartKey, Sums
from manyhands.coordinator.roster import Roster
from manyhands.errors import ProtocolError
from manyhands.events import events
from manyhands.hosts.view import View


class Views:
    def __init__(self, context: RunContext, roster: Roster) -> None:
        self.joining = False
        """If true, the newest view is not active yet."""
        self.catching_up: set[str] = set()
        """Workers that have joined and do not have the weights yet: they get no samples."""
        self.formed_at = 0.0
        self._joined: dict[str, ViewJoined] = {}
        self._coordinator = context.coordinator
        self._roster = roster
        self._stream = context.stream

    @property
    def current(self) -> View:
        assert self._coordinator.view is not None
        return self._coordinator.view

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(seat.name for seat in self.current.workers)

    @property
    def missing(self) -> list[str]:
        """Before the first view, members that are not ready; then those that have not joined the newest."""
        if not self.formed_at:
            return [name for name in self._roster.names if name not in self._roster.ready]
        names = self.current.names if self.joining else ()
        return [name for name in names if name not in self._joined]

    @property
    def all_joined(self) -> bool:
        return self.joining and not self.missing

    @property
    def changes_soon(self) -> bool:
        """If true, a member is being started or catches up: in a moment other workers get samples."""
        return bool(self._roster.new or self.catching_up)

    def form(self, names: Iterable[str]) -> None:
        """Form the next view of these members and send it to them."""
        self._joined = {}
        self.joining, self.formed_at = True, time.monotonic()
        # Workers first, and of these one that sees the run folder: the first one saves. The sort is stable.
        is_worker = self._roster.is_worker
        ordered = sorted(names, key=lambda name: (not is_worker(name), not self._may_save(name)))
        self._coordinator.form_view(self._roster.ready[name].seat for name in ordered)

    def join(self, member: str, report: ViewJoined) -> None:
        if report.view != self.current.number:
            return  # there is a newer view already
        if member not in self.current.names:
            raise ProtocolError(f"it joins view {report.view}, and is not a member of it")
        self._joined[member] = report
        if report.built is not None:
            self._roster.add_built(member, report.built)
        (self.catching_up.add if report.catching_up else self.catching_up.discard)(member)

    def activate(self) -> int:
        """Make the view the active one: all have joined. Returns how many of them are new."""
        self.joining = False
        view = self.current
        arrived = self._roster.new & set(view.names)
        self._roster.new -= arrived
        placements = (self._joined[name].placement for name in view.names)
        self._stream.emit(
            events.ViewChanged(
                view=view.number,
                members=view.names,
                transport=self._joined[view.names[0]].transport,
                placement=next(filter(None, placements), ""),
                servers=len(view.seats) - view.world,
            )
        )
        return len(arrived)

    def applied(self) -> dict[PartKey, Sums | None]:
        """Return the parts that are in the weights, as reported by the members that have joined, with the
        weight and loss of each where they are known."""
        found: dict[PartKey, Sums | None] = {}
        for report in self._joined.values():
            for each in report.applied.parts if report.applied else ():
                if each.sums or (each.step, each.part) not in found:
                    found[each.step, each.part] = each.sums
        return found

    @property
    def whole_steps(self) -> bool:
        """If true, the learners want steps that are not cut into parts."""
        return any(report.whole_steps for report in self._joined.values())

    @property
    def needs_other_writer(self) -> bool:
        """If true, the first worker, which saves, does not see the run folder, and another one does."""
        return not self._may_save(self.workers[0]) and any(map(self._may_save, self.workers))

    def have_weights(self, names: Iterable[str], *, servers: bool) -> bool:
        """Return whether one of these members has the weights: a server if there are any, else a worker."""
        holders = {name for name in names if self._roster.is_worker(name) is not servers}
        return bool(holders - self.catching_up - self._roster.new)

    def _may_save(self, member: str) -> bool:
        return self._roster.may_save(member) and member not in self.catching_up
