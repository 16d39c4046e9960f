"""Who takes part in a training: the first members, those that are lost, those that take their place.

    start       workers, and servers beside them where the strategy wants any
    form        the first view, once each is ready
    lose        a member has died: the next view is formed at once from those that are left, and
                another one is started in its place, under a name of its own
    resize      more workers are wanted, or fewer
    spare       some are done without, until they are recalled
    admit       nothing is open: the next view has the new ones that are ready, and lacks one that is not
                wanted any more

A view counts once each of its members has joined it. Until then a member may die, and yet another
view is formed. A new one that dies or fails before it has joined a view is no loss, only an attempt.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from manyhands.control.messages import Joined
from manyhands.coordinator.coordinator import Coordinator
from manyhands.coordinator.job_checks import Facts
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.progress import PartKey, Sums
from manyhands.errors import ManyhandsError, ProtocolError
from manyhands.events import events
from manyhands.events.sinks import Stream
from manyhands.hosts.view import SERVER, WORKER, Seat, View

APART_VIEWS = 2
"""In so many views in a row two did not find each other: they will not in the next."""


class Membership:
    def __init__(
        self,
        coordinator: Coordinator,
        options: RunOptions,
        stream: Stream,
        *,
        entries: Mapping[str, str],
        assignment: Mapping[str, Any],
        before: Membership | None = None,
    ) -> None:
        """`before`: those of whom nobody was left that had the weights."""
        self.ready: dict[str, Facts] = {}
        """What each member said when it was ready, also of those that are gone."""
        self.joined: dict[str, Joined] = {}
        """The reports of those that have joined the newest view."""
        self.listening: set[str] = set()
        """Workers that take part, and have not got the weights of the others yet."""
        self.num_lost = 0
        self.num_replaced = 0
        self._coordinator = coordinator
        self._options = options
        self._stream = stream
        self._entries = dict(entries)
        self._assignment = dict(assignment)
        self._roles: dict[str, str] = {}
        self._places: dict[str, int] = {}
        """Each member's local rank: who takes its place takes its device."""
        self._numbers: Counter[str] = Counter()
        self._new: set[str] = set()
        """Started to take another's place, and in no view yet that they have joined."""
        self._owed: list[tuple[str, int]] = []
        """Role and place of those that are to be started as soon as a host has a free slot."""
        self.wanted = options.workers
        self._restarts = self._resized = 0
        self._joining = False
        self._formed = 0.0
        self._death_seen: float | None = None
        self._reasons: dict[str, str] = {}
        """Why a member ends that has not ended yet."""
        self._cut_off: dict[str, float] = {}
        """Members whose link is lost, since when."""
        self._apart: list[tuple[str, str]] = []
        """Who did not find whom, one a view, since a view counted or somebody died."""
        self._left_out: set[str] = set()
        self._accusers: set[str] = set()
        """Who has had another one ended in this view."""
        self._sparing: set[str] = set()
        """Workers that are to leave for a while."""
        self._spared: list[int] = []
        """The places of those that have."""
        self.num_again = 0
        """How often all have begun again."""
        if before is not None:
            self.num_lost, self.num_replaced = before.num_lost, before.num_replaced
            self.num_again = before.num_again + 1
            self._numbers, self._death_seen = before._numbers, before._death_seen

    @property
    def view(self) -> View:
        assert self._coordinator.view is not None
        return self._coordinator.view

    @property
    def facts(self) -> Facts:
        """A worker's: all know the same of the job."""
        return next(facts for name, facts in self.ready.items() if self._roles[name] == WORKER)

    @property
    def num_started(self) -> int:
        return len(self._roles)

    @property
    def joining(self) -> bool:
        """A view was formed that does not count yet."""
        return self._joining

    @property
    def all_joined(self) -> bool:
        return self._joining and all(name in self.joined for name in self.view.names)

    @property
    def absent(self) -> list[str]:
        """Who is not ready yet, at first; later, who has not joined the newest view."""
        if not self._formed:
            return [name for name in self._roles if name not in self.ready]
        return [n for n in self.view.names if n not in self.joined] if self._joining else []

    def role(self, member: str) -> str:
        return self._roles[member]

    def is_worker(self, member: str) -> bool:
        return self._roles[member] == WORKER

    def is_new(self, member: str) -> bool:
        return member in self._new

    # The first ones ---------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """The hosts have free slots for as many as are needed to begin with."""
        options, servers = self._options, self._options.servers
        fewer = options.config.elastic and not servers
        workers = options.min_workers if fewer else options.workers
        return self._coordinator.launcher.room(workers, servers)

    def start(self) -> None:
        launcher = self._coordinator.launcher
        self._assignment["spans_hosts"] = launcher.spans_hosts
        wanted = {WORKER: self._options.workers, SERVER: self._options.servers}
        for role, number in wanted.items():
            for place in range(number):
                if launcher.slots(role):
                    saves = role == WORKER and place == 0  # as long as it lives
                    self._start(role, place, {**self._assignment, "saves": saves})
                else:
                    self._owed.append((role, place))

    def form(self) -> None:
        """The first view."""
        self._form(self._roles)

    def join(self, member: str, report: Joined) -> None:
        if report.view == self.view.number:  # else there is a newer one already
            if member not in self.view.names:
                raise ProtocolError(f"it joins view {report.view}, which is without it")
            self.joined[member] = report
            (self.listening.add if report.catching_up else self.listening.discard)(member)

    def count_view(self) -> float | None:
        """All have joined: from now on the view counts. Seconds since a death, if that was why."""
        self._joining = False
        self._apart.clear()
        arrived = self._new & set(self.view.names)
        self._new -= arrived
        self.num_replaced += len(arrived)
        seen, self._death_seen = self._death_seen, None
        self._stream.emit(
            events.ViewChanged(
                view=self.view.number,
                members=self.view.names,
                transport=self.joined[self.view.names[0]].transport,
                placement=self._placement(),
                servers=len(self.view.seats) - self.view.world,
            )
        )
        return None if seen is None else time.monotonic() - seen

    def applied(self) -> dict[PartKey, Sums | None]:
        """The parts that are in the weights, by what those say who have joined the view; and weight and loss
        of each, where they know them."""
        told = [report.settled for report in self.joined.values() if report.settled is not None]
        found: dict[PartKey, Sums | None] = {}
        for step, part, *sums in (each for settled in told for each in settled.applied):
            if sums or (step, part) not in found:
                found[step, part] = (sums[0], sums[1]) if sums else None
        return found

    @property
    def whole_steps(self) -> bool:
        """Those who have joined the view want no parts of steps."""
        return any(report.whole_steps for report in self.joined.values())

    # Those that are lost ----------------------------------------------------------------------

    def suspect(self, member: str, reason: str) -> None:
        """It is about to end, or should be; why."""
        self._reasons.setdefault(member, reason)

    def cut_off(self, member: str) -> None:
        """Its link is lost. It ends itself, or is ended in a moment."""
        self._cut_off.setdefault(member, time.monotonic())

    def suspected(self, member: str) -> bool:
        return member in self._reasons

    def reason(self, member: str, otherwise: str) -> str:
        """Why it ended, if anything is known but how its process did."""
        why = self._coordinator.members[member].handle.why
        return self._reasons.get(member, why or otherwise)

    def lose(self, member: str, reason: str) -> bool:
        """A member has died: form the next view at once. False if no worker is left to go on."""
        left = [name for name in self.view.names if name != member and self._lives(name)]
        workers = [name for name in left if self.is_worker(name)]
        enough = len(workers) >= self._options.min_workers or self._may_replace
        if not workers or not enough or not self._know(left):
            return False
        self._mourn(member, reason, len(workers))
        self._apart.clear()
        self._form(left)
        if member in self._left_out:
            message = (
                f"nobody takes the place of {member}: it would not be reached either. When the way is mended "
                f"(manyhands doctor --cluster shows it), manyhands scale RUN --workers {self.wanted}"
            )
            self._stream.emit(events.Noticed(message=message))
        else:
            self._replace(member)
        return True

    def lose_all(self, member: str, reason: str) -> None:
        """With it the weights are lost, or a part of them. The others can be ended."""
        if self._lives(member):
            self._stream.emit(events.Noticed(message=f"{member}: {reason}"))
        else:
            self._mourn(member, reason, 0)

    def _mourn(self, member: str, reason: str, workers: int) -> None:
        """`workers`: so many are left."""
        self._death_seen = self._death_seen or time.monotonic()
        self.num_lost += 1
        view = self._coordinator.view.number if self._coordinator.view else 0
        self._stream.emit(
            events.MemberLost(member=member, reason=reason, view=view, workers=workers)
        )

    def meet_again(self, member: str, peer: str) -> None:
        """Two have lost each other, and both live: all of the view find each other anew. If they can't, one
        of the two is left out."""
        if any(map(self.suspected, self.view.names)):
            return  # its end is near, and another view with it
        if self._joining and not self.view.one_host:
            self._apart.append((member, peer))
        if len(self._apart) >= APART_VIEWS:
            self._leave_out()
            return
        self._stream.emit(
            events.Noticed(message=f"{member} lost its link to {peer}; all connect again")
        )
        self._form(self.view.names)

    def expel(self, member: str, *, by: str, why: str) -> None:
        """End a member whose messages to a peer made no sense: the others would wait for it. Each may ask for
        that once a view: whoever accuses all others must not be left alone."""
        if by in self._accusers or member == by or member not in self.view.names:
            return
        self._accusers.add(by)
        self.end(member, f"refused by {by}: {why[:300]}")

    def _leave_out(self) -> None:
        """Of those who do not find each other the one with most to do with it, and a worker if possible."""
        names = self.view.names
        counts = Counter(name for pair in self._apart for name in pair if name in names)
        chosen = max(counts, key=lambda n: (counts[n], self.is_worker(n), names.index(n)))
        others = sorted({n for pair in self._apart if chosen in pair for n in pair} - {chosen})
        self._left_out.add(chosen)
        self.end(chosen, f"it and {' and '.join(others)} live, and do not reach each other")

    def give_up(self, member: str, reason: str) -> None:
        """A new one came to nothing before it had joined."""
        if member not in self._new:
            return
        self._new.discard(member)
        self._coordinator.members[member].handle.kill()
        self._stream.emit(
            events.Noticed(message=f"{member}, to take another's place, came to nothing: {reason}")
        )
        if self._joining and member in self.view.names:
            self._form([name for name in self.view.names if name != member])
        self._replace(member)

    def enforce(self) -> None:
        """End those that are silent, cut off, or don't join: their exit is then their death."""
        now, timeouts = time.monotonic(), self._coordinator.timeouts
        if (overdue := self._coordinator.overdue()) is not None:
            self.end(overdue[0].name, overdue[1])
        for member, since in self._cut_off.items():
            if now - since > timeouts.settle_s:
                self.end(member, "lost its link")
        if self._joining and now - self._formed > timeouts.view_s:
            for name in self.view.names:
                if name not in self.joined:
                    self.end(name, f"did not join its peers within {timeouts.view_s:.0f} s")

    # Those that take their place --------------------------------------------------------------

    def resize(self, workers: int) -> None:
        """So many are wanted from now on."""
        self.wanted, self._resized = workers, self._resized + 1
        self._sparing.clear()
        self._spared.clear()
        self._coordinator.launcher.want(workers)
        self._owed = [owed for owed in self._owed if owed[0] != WORKER]
        here = [name for name in self.view.names if self.is_worker(name) and self._lives(name)]
        coming = [name for name in self._roles if name in self._new and self.is_worker(name)]
        for name in coming[max(0, workers - len(here)) :]:
            self._new.discard(name)
            self._coordinator.members[name].handle.kill()
        places = {self._places[name] for name in (*here, *coming)}
        free = (place for place in itertools.count() if place not in places)
        missing = max(0, workers - len(here) - len(coming))
        self._add(WORKER, *itertools.islice(free, missing))

    @property
    def surplus(self) -> str | None:
        """A worker that is not wanted any more. One at a time: what it serves is in one other place."""
        workers = self.seated
        if spared := [name for name in workers if name in self._sparing]:
            return spared[-1]
        return workers[-1] if len(workers) > self.wanted - len(self._spared) else None

    @property
    def newcomers(self) -> list[str]:
        """New ones that are ready, and wait to be in a view."""
        return [
            name
            for name in self._roles
            if name in self._new and name in self.ready and name not in self.view.names
        ]

    @property
    def misplaced(self) -> bool:
        """The first worker, which saves, does not see the run folder, and another does."""
        workers = self.seated
        return not self._may_save(workers[0]) and any(map(self._may_save, workers))

    @property
    def changes_soon(self) -> bool:
        """Somebody is started, or listens: who gets samples will be others in a moment."""
        return bool(self._new or self.listening)

    @property
    def expects_somebody(self) -> bool:
        """Somebody is on the way who is to take another's place."""
        return bool(self._new or self._owed)

    # Those that are done without for a while (see straggler_trial.py) ----------------------------------

    @property
    def seated(self) -> tuple[str, ...]:
        """The workers of the view."""
        return tuple(seat.name for seat in self.view.workers)

    @property
    def occasion(self) -> tuple[int, int]:
        """Another one whenever there are other workers than before, for other reasons than these."""
        return self.num_lost, self._resized

    def device(self, worker: str) -> str:
        return str(self.ready[worker]["seat"]["device"]).partition(":")[0]

    def may_spare(self, number: int) -> bool:
        return len(self.seated) - number >= max(1, self._options.min_workers)

    def spare(self, workers: Iterable[str]) -> None:
        """These leave, one a view."""
        self._sparing = set(workers)

    def recall(self) -> None:
        """Others in the places of those that were spared."""
        self._sparing.clear()
        places, self._spared = self._spared, []
        self._add(WORKER, *places)

    # ------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Start those that had to wait for a free slot."""
        owed, self._owed = self._owed, []
        for role, place in owed:
            self._add(role, place, waited=True)

    def admit(self) -> None:
        released = self.surplus
        if released is not None:  # nothing is open, and what it holds another has, too
            if released in self._sparing:
                self._sparing.discard(released)
                self._spared.append(self._places[released])
            self._coordinator.members[released].left = True
            self._coordinator.members[released].handle.kill()
        stay = [name for name in self.view.names if name != released]
        self._form([*stay, *self.newcomers])

    def dismiss(self) -> None:
        """Nobody is needed any more who is not here yet."""
        for name in self._new:
            self._coordinator.members[name].handle.kill()

    # ------------------------------------------------------------------------------------------

    def _start(self, role: str, place: int, assignment: Mapping[str, Any]) -> str:
        name = f"{role}-{self._numbers[role]}"
        self._numbers[role] += 1
        self._roles[name], self._places[name] = role, place
        member = self._coordinator.start(
            name,
            entry=self._entries[role],
            local_rank=place,
            threads=self._options.threads,
            assignment=assignment,
            role=role,
        )
        self._stream.emit(
            events.MemberStarted(
                member=name, host=member.handle.host, pid=member.handle.pid, log=str(member.log)
            )
        )
        return name

    @property
    def may_begin_again(self) -> bool:
        return self.num_again < self._options.max_restarts

    @property
    def _may_replace(self) -> bool:
        return self._restarts < self._options.max_restarts

    def _replace(self, member: str) -> None:
        if not self._may_replace or (self.is_worker(member) and self._enough):
            return
        self._restarts += 1
        self._add(self._roles[member], self._places[member])

    def _know(self, names: Collection[str]) -> bool:
        """Somebody of these has the weights, and is not new: a server, if there are any, or a worker."""
        serve = bool(self._options.servers)
        keepers = {name for name in names if self.is_worker(name) is not serve}
        return bool(keepers - self.listening - self._new)

    @property
    def _enough(self) -> bool:
        """As many workers as are wanted are here, or on their way."""
        names = {*self.view.names, *self._new}
        owed = sum(role == WORKER for role, _ in self._owed) + len(self._spared)
        return owed + sum(self.is_worker(n) and self._lives(n) for n in names) >= self.wanted

    def _add(self, role: str, *places: int, waited: bool = False) -> None:
        """Start others in these places, or later where there is no slot."""
        owed = []
        for place in places:
            if not self._coordinator.launcher.slots(role):
                owed.append((role, place))
                continue
            # Not from the checkpoint of the start, which may be deleted by now: its peers know better.
            assignment = {**self._assignment, "checkpoint": None, "init_from": None}
            try:
                self._new.add(self._start(role, place, assignment))
            except ManyhandsError as error:
                self._stream.emit(events.Noticed(message=f"No other {role} is started: {error}"))
        self._owed += owed
        if owed and not waited:
            who = f"another {role} is" if len(owed) == 1 else f"{len(owed)} {role}s are"
            message = f"{who} started as soon as there are free slots"
            self._stream.emit(events.Noticed(message=message))

    def _form(self, names: Iterable[str]) -> None:
        self.joined = {}
        self._accusers.clear()
        self._joining, self._formed = True, time.monotonic()
        # Workers first, and of these one that sees the run folder: the first one saves. Else as they are.
        ordered = sorted(
            names, key=lambda name: (not self.is_worker(name), not self._may_save(name))
        )
        self._coordinator.form_view(Seat(**self.ready[name]["seat"]) for name in ordered)

    def _may_save(self, name: str) -> bool:
        """It sees the run folder, and has the weights."""
        sees_run = self._coordinator.members[name].handle.sees_run
        return sees_run and name not in self.listening | self._new

    def _lives(self, name: str) -> bool:
        return self._coordinator.members[name].alive

    def end(self, name: str, reason: str) -> None:
        """Kill a member: its exit is then its death, for this reason."""
        member = self._coordinator.members[name]
        if member.alive and not member.left:
            self.suspect(name, reason)
            member.handle.kill()

    def _placement(self) -> str:
        told = (self.joined[name].placement for name in self.view.names)
        return next((placement for placement in told if placement), "")
