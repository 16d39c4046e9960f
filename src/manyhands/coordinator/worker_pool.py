"""Keeps the target number of workers: replaces members that died, resizes the run, leaves stragglers out.

New members are started while the others train. Once one is ready, no more work is handed out; when
nothing is open, the next view includes it, or lacks a worker that is not wanted any more, once that one has
handed over what it alone holds (handover.py). A new member that fails before it has joined a view is not a
loss, only a failed attempt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from manyhands.coordinator.context import RunContext
from manyhands.coordinator.handover import Handover
from manyhands.coordinator.roster import Roster
from manyhands.coordinator.views import Views
from manyhands.errors import ManyhandsError
from manyhands.hosts.view import SERVER, WORKER


class WorkerPool:
    def __init__(self, context: RunContext, roster: Roster, views: Views) -> None:
        self.target = context.options.workers
        """Target number of workers."""
        self.num_changes = 0
        """Number of losses and resizes. Leaving out stragglers does not count."""
        self._coordinator = context.coordinator
        self._options = context.options
        self._roster = roster
        self._views = views
        self._stream = context.stream
        self._num_replacements = 0
        """Members started in place of others. Limited by `max_restarts`."""
        self._waiting: list[tuple[str, int]] = []
        """Role and place of members to start as soon as a host has a free slot."""
        self.handover = Handover(
            context.coordinator.send, needed=context.options.config.traits.holds_state
        )
        """What workers hand over that leave on purpose."""
        self._leaving: set[str] = set()
        """Stragglers that are to leave, one a view."""
        self._left_out: list[int] = []
        """The places of stragglers that have left."""

    # The first members ------------------------------------------------------------------------

    @property
    def has_slots(self) -> bool:
        """If true, the hosts have enough free slots to start."""
        options, servers = self._options, self._options.servers
        fewer = options.config.traits.elastic and not servers
        workers = options.workers
        if fewer:
            number = range(options.min_workers, options.workers)
            workers = next((n for n in number if options.config.refit(n) == n), options.workers)
        return self._coordinator.launcher.has_room(workers, servers)

    def start_first(self) -> None:
        launcher, holds_state = self._coordinator.launcher, self._options.config.traits.holds_state
        for role, number in ((WORKER, self._options.workers), (SERVER, self._options.servers)):
            num_now = min(number, launcher.slots(role))
            for place in range(number):
                if place < num_now:
                    saves = role == WORKER and (place == 0 or holds_state)
                    self._roster.start(role, place, saves=saves, takes=(place, num_now))
                else:
                    self._waiting.append((role, place))

    # Replacing and resizing -------------------------------------------------------------------

    @property
    def may_replace(self) -> bool:
        return self._num_replacements < self._options.max_restarts

    @property
    def expects_members(self) -> bool:
        """If true, a member is being started, or will be once there is a slot."""
        return bool(self._roster.new or self._waiting)

    def replace(self, member: str) -> None:
        """Start another member in its place, unless there are enough, or too many were replaced already."""
        if not self.may_replace or (self._roster.is_worker(member) and self._enough_workers):
            return
        self._num_replacements += 1
        self._add(self._roster.role(member), self._roster.place(member))

    def resize(self, workers: int) -> None:
        self.target = workers
        self.num_changes += 1
        self._leaving.clear()
        self._left_out.clear()
        self._coordinator.launcher.want(workers)
        self._waiting = [(role, place) for role, place in self._waiting if role != WORKER]
        roster = self._roster
        present = [name for name in self._views.workers if roster.is_alive(name)]
        waiting = roster.new | roster.standby
        coming = [name for name in roster.names if name in waiting and roster.is_worker(name)]
        for name in coming[max(0, workers - len(present)) :]:
            roster.new.discard(name)
            roster.standby.discard(name)
            roster.kill(name)
        used = {roster.place(name) for name in (*present, *coming)}
        free = (place for place in itertools.count() if place not in used)
        missing = max(0, workers - len(present) - len(coming))
        self._add(WORKER, *itertools.islice(free, missing))

    def start_waiting(self) -> None:
        """Start members that wait for a free slot."""
        waiting, self._waiting = self._waiting, []
        for role, place in waiting:
            self._add(role, place, notify=False)

    @property
    def view_change_due(self) -> bool:
        """If true, the next view should be formed as soon as nothing is open."""
        return bool(self._ready or self._surplus or self._views.needs_other_writer)

    def change_view(self) -> None:
        """Form the next view, once those that leave have handed over their state: nothing is open, so that a
        worker may leave, and new members may enter."""
        surplus = self._surplus
        if not self.handover.done(surplus, self._views.workers):
            return
        for released in surplus:  # what it holds another member has, too
            if released in self._leaving:
                self._leaving.discard(released)
                self._left_out.append(self._roster.place(released))
            self._coordinator.members[released].left = True
            self._roster.kill(released)
        stay = [name for name in self._views.current.names if name not in surplus]
        self._views.form([*stay, *self._ready])

    def dismiss_new(self) -> None:
        """End the members that have not joined yet: the run is over."""
        for name in self._roster.new | self._roster.standby:
            self._roster.kill(name)

    # Stragglers (see straggler_trial.py) ------------------------------------------------------

    @property
    def workers(self) -> tuple[str, ...]:
        return self._views.workers

    @property
    def changes_soon(self) -> bool:
        return self._views.changes_soon

    def device_type(self, worker: str) -> str:
        return self._roster.ready[worker].seat.device.partition(":")[0]

    def can_leave_out(self, number: int) -> bool:
        return len(self._views.workers) - number >= max(1, self._options.min_workers)

    def leave_out(self, workers: Sequence[str]) -> None:
        """Let these workers leave, one a view."""
        self._leaving = set(workers)

    def take_back(self) -> None:
        """Start others in the places of the stragglers that were left out."""
        self._leaving.clear()
        places, self._left_out = self._left_out, []
        self._add(WORKER, *places)

    # ------------------------------------------------------------------------------------------

    @property
    def _ready(self) -> list[str]:
        """New members that are ready, and workers that stand by, if a view with them has more members."""
        roster, view = self._roster, self._views.current
        waiting = (roster.new & roster.ready.keys() | roster.standby) - set(view.names)
        # Those that stand by come first: they were started earlier.
        ready = [name for name in roster.names if name in waiting]
        num_workers = view.world + sum(map(roster.is_worker, ready))
        more = self._options.config.refit(num_workers) > view.world
        return [name for name in ready if more or not roster.is_worker(name)]

    @property
    def _surplus(self) -> Sequence[str]:
        """Workers that should leave. One replica at a time: what a worker serves may have only one copy."""
        workers, view = self._views.workers, self._views.current
        if leaving := [name for name in workers if name in self._leaving]:
            return leaving[-1:]
        too_many = len(workers) > self.target - len(self._left_out)
        return workers[-view.replica_size :] if too_many else ()

    @property
    def _enough_workers(self) -> bool:
        """If true, enough workers are present or being started."""
        roster = self._roster
        names = {*self._views.members, *roster.new}
        waiting = sum(role == WORKER for role, _ in self._waiting) + len(self._left_out)
        alive = sum(roster.is_worker(name) and roster.is_alive(name) for name in names)
        return waiting + alive >= self.target

    def _add(self, role: str, *places: int, notify: bool = True) -> None:
        """Start new members in these places, or later where there is no slot."""
        waiting = []
        for place in places:
            if not self._coordinator.launcher.slots(role):
                waiting.append((role, place))
                continue
            try:
                self._roster.start_new(role, place)
            except ManyhandsError as error:
                self._stream.notice(f"no new {role} was started: {error}")
        self._waiting += waiting
        if waiting and notify:
            members = f"another {role}" if len(waiting) == 1 else f"{len(waiting)} {role}s"
            self._stream.notice(f"{members} will start as soon as there are free slots")
