"""View changes: the coordinator forms a view, and it is active once each of its members has joined it.

Until then a member may die, and the next view is formed. A view has whole replicas (`Strategy.refit`): the
workers that are left over stand by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

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
        self._config = context.options.config
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
    def members(self) -> list[str]:
        """The members of the current view, then the workers that stand by."""
        standby = self._roster.standby
        return [*self.current.names, *(name for name in self._roster.names if name in standby)]

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
        """Form the next view of these members, or of as many as fit, and send it to them."""
        self._joined = {}
        self.joining, self.formed_at = True, time.monotonic()
        roster, before, members = self._roster, self._coordinator.view, list(names)
        workers = [name for name in members if roster.is_worker(name)]
        fit = self._config.refit(len(workers))
        size = self._config.replica_size(fit)
        replicas = [[s.name for s in replica] for replica in before.replicas] if before else []
        ordered = in_replicas(workers, size=size, before=replicas, may_save=self._may_save)
        left_over = {*ordered[fit:]} - roster.new
        told = left_over - roster.standby
        roster.standby = (roster.standby | left_over) - {*ordered[:fit]}
        seated = ordered[:fit] + [name for name in members if not roster.is_worker(name)]
        self._coordinator.form_view(
            (roster.ready[name].seat for name in seated), replica_size=size, standby=sorted(told)
        )
        if told:
            these = ", ".join(sorted(told))
            verb = "stands" if len(told) == 1 else "stand"
            self._stream.notice(
                f"{these} {verb} by: a replica has {size} workers, and {len(workers)} are left"
            )

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
                replica_size=view.replica_size,
                standby=tuple(self.members[len(view.names) :]),
            )
        )
        return len(arrived)

    def applied(self) -> dict[PartKey, Sums | None]:
        """Return the parts that are in the weights, as reported by the members that have joined, with the
        weight and loss of each where they are known."""
        found: dict[PartKey, Sums | None] = {}
        for report in self._joined.values():
            for each in report.applied.parts if report.applied else ():
                for step in each.steps:
                    if each.sums or (step, each.part) not in found:
                        found[step, each.part] = each.sums
        return found

    @property
    def whole_steps(self) -> bool:
        """If true, the learners want steps that are not cut into parts."""
        return any(report.whole_steps for report in self._joined.values())

    @property
    def needs_other_writer(self) -> bool:
        """If true, the first worker, which saves, does not see the run folder, and another one that could be
        the first does."""
        firsts = [replica[0].name for replica in self.current.replicas]
        return not self._may_save(firsts[0]) and any(map(self._may_save, firsts))

    def have_weights(self, names: Iterable[str], *, servers: bool) -> bool:
        """Return whether one of these members has the weights: a server if there are any, else a worker."""
        holders = {name for name in names if self._roster.is_worker(name) is not servers}
        return bool(holders - self.catching_up - self._roster.new - self._roster.standby)

    def _may_save(self, member: str) -> bool:
        return self._roster.may_save(member) and member not in self.catching_up


def in_replicas(
    workers: Sequence[str],
    *,
    size: int,
    before: Sequence[Collection[str]],
    may_save: Callable[[str], bool],
) -> list[str]:
    """Return workers in the order of ranks: replicas of the last view that are whole stay together and come
    first, and of all replicas one whose first worker may save, because that one writes checkpoints. Pure."""
    left = set(workers)
    whole = {name for replica in before if left.issuperset(replica) for name in replica}
    ordered = sorted(workers, key=lambda name: name not in whole)  # stable
    blocks = [ordered[first : first + size] for first in range(0, len(ordered), size)]
    blocks.sort(key=lambda block: (len(block) < size, not may_save(block[0])))
    return [name for block in blocks for name in block]
