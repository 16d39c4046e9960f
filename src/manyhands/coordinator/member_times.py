"""What each member has done in the last second: steps, times, whom it waited for. Pure.

A worker's numbers come from the reports of committed steps, a dedicated server's from its beats:

                steps              compute_s                  wait_s            waited_for
    worker      parts of steps     computing                  for members       see below
    server      updates applied    CPU time of its process    the other time    None

In lockstep all wait for the worker that comes last in a step. What the others wait longer than that one is
its time; what even the last one waits is the time of the server that it reports, if there are any. Without
lockstep a worker waits for servers alone.

A line has all members if they are few, and otherwise those that stand out: with the most computing, waiting
or staleness, the fewest samples, those that others wait for, and those that do something else than most. The
other members are in `others`, as (least, mean, most).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

from manyhands.coordinator.progress import CommittedStep, MemberPart
from manyhands.events.events import MEMBER_COLUMNS, MemberRow, MembersSummary, MemberTimes
from manyhands.hosts.messages import Beat
from manyhands.hosts.view import SERVER, WORKER

EVERY_S = 1.0
"""Least time between two events."""
MAX_LISTED = 28
"""With more members than this, not all are listed."""
EXTREMES = 16
"""Number of members that are listed then."""
TOP = 4
"""Number of phases, and of members that others wait for, that are counted in `others`."""
MAX_PHASE = 32
"""Characters of a phase."""

_STEP = re.compile(r" (from|of) step \d+$")
_NUMBERS = ("steps", "samples", "compute_s", "wait_s", "bytes_sent", "staleness")


@dataclass
class MemberTally:
    """What one member has done since the last event."""

    role: str
    phase: str
    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0
    compute_s: float | None = None
    """None: nothing was reported."""
    wait_s: float | None = None
    waited: dict[str, float] = field(default_factory=dict)
    """Seconds, by the member that it waited for."""
    staleness: list[int] = field(default_factory=list)
    """Of each part."""

    @property
    def is_empty(self) -> bool:
        return not self.steps and self.compute_s is None and self.wait_s is None

    def add_times(self, compute_s: float | None, wait_s: float | None) -> None:
        if compute_s is not None:
            self.compute_s = (self.compute_s or 0.0) + compute_s
        if wait_s is not None:
            self.wait_s = (self.wait_s or 0.0) + wait_s

    def wait_for(self, member: str, seconds: float) -> None:
        self.waited[member] = self.waited.get(member, 0.0) + seconds

    @property
    def waited_for(self) -> str | None:
        """The member that it waited for longest."""
        return max(self.waited, key=lambda name: self.waited[name], default=None)

    @property
    def mean_staleness(self) -> float | None:
        return sum(self.staleness) / len(self.staleness) if self.staleness else None

    def row(self) -> MemberRow:
        """Return the columns of MEMBER_COLUMNS."""
        worker, staleness = self.role == WORKER, self.mean_staleness
        return (
            self.steps,
            self.samples if worker else None,
            None if self.compute_s is None else round(self.compute_s, 4),
            None if self.wait_s is None else round(self.wait_s, 4),
            self.waited_for,
            self.bytes_sent if worker else None,
            None if staleness is None else round(staleness, 2),
            self.phase,
        )


@dataclass
class _LastBeat:
    at: float
    updates: int


class MemberTimesMeter:
    def __init__(self, *, lockstep: bool) -> None:
        self._lockstep = lockstep
        self._roles: Mapping[str, str] = {}
        self._tallies: dict[str, MemberTally] = {}
        self._beats: dict[str, _LastBeat] = {}
        """The last beat of each server."""
        self._since = 0.0
        """Time of the last event."""
        self._changed = False

    def enter_view(self, roles: Mapping[str, str], now: float) -> None:
        """These are the members from now on, by name. What others have done is in the next event."""
        if not self._roles:
            self._since = now
        self._roles = dict(roles)
        for name, role in roles.items():
            self._tallies.setdefault(name, MemberTally(role, "joining its peers"))
        for name in self._beats.keys() - roles.keys():
            del self._beats[name]

    def on_beat(self, member: str, beat: Beat, now: float) -> None:
        if (tally := self._tallies.get(member)) is None:
            return
        phase = _STEP.sub("", beat.phase)[:MAX_PHASE]
        self._changed |= phase != tally.phase
        tally.phase = phase
        if tally.role == SERVER:
            before = self._beats.get(member)
            self._beats[member] = _LastBeat(now, beat.updates)
            if before is not None and beat.updates >= before.updates:
                tally.steps += beat.updates - before.updates
                tally.add_times(beat.cpu_s, max(0.0, now - before.at - beat.cpu_s))
                self._changed |= beat.updates > before.updates

    def committed(self, step: CommittedStep) -> None:
        """Take in a step that is in the weights."""
        self._changed = True
        for part in step.parts:
            tally = self._tallies.get(part.member)
            if tally is None:  # it has died, and its part is in the weights
                tally = self._tallies[part.member] = MemberTally(WORKER, "")
            if part.applied:
                tally.steps += 1
                tally.samples += part.samples
            if (row := part.row) is not None:
                tally.bytes_sent += row.bytes_sent
                tally.add_times(row.compute_s, row.wait_s)
                if not self._lockstep and part.applied:
                    tally.staleness.append(row.staleness)
        self._attribute(step.parts)

    def take(self, now: float, *, step: int, last: bool = False) -> MemberTimes | None:
        """Return the event that is due, if any; the `last` one in any case, unless nothing has changed."""
        if not self._changed or not (last or now - self._since >= EVERY_S):
            return None
        event = _event(self._tallies, step=step, seconds=now - self._since)
        self._since, self._changed = now, False
        self._tallies = {
            name: MemberTally(role, self._tallies[name].phase) for name, role in self._roles.items()
        }
        return event

    def _attribute(self, parts: Sequence[MemberPart]) -> None:
        """Note for whom the workers waited in a step."""
        rows = [(part.member, part.row) for part in parts if part.row is not None]
        last, common_s = "", 0.0
        if self._lockstep and all(row.wait_s is not None for _, row in rows) and len(rows) > 1:
            last, row = max(rows, key=lambda pair: pair[1].step_s - (pair[1].wait_s or 0.0))
            common_s = row.wait_s or 0.0
        for name, row in rows:
            tally, wait_s = self._tallies[name], row.wait_s or 0.0
            if last not in ("", name) and wait_s > common_s:
                tally.wait_for(last, wait_s - common_s)
                wait_s = common_s
            if wait_s and row.waited_for in self._tallies:
                tally.wait_for(row.waited_for, wait_s)


def _event(tallies: Mapping[str, MemberTally], *, step: int, seconds: float) -> MemberTimes:
    seen = {name: t for name, t in tallies.items() if t.phase or not t.is_empty}
    listed = set(seen) if len(seen) <= MAX_LISTED else _extremes(seen, EXTREMES)
    others = {}
    for role, title in ((WORKER, "workers"), (SERVER, "servers")):
        rest = [t.row() for name, t in seen.items() if t.role == role and name not in listed]
        if rest:
            others[title] = _summary(rest)
    rows = {name: seen[name].row() for name in seen if name in listed}
    return MemberTimes(step=step, seconds=round(seconds, 3), members=rows, others=others)


def _extremes(tallies: Mapping[str, MemberTally], number: int) -> set[str]:
    """Return the members that stand out: the first of each criterion in turn, until there are enough."""
    awaited = Counter(t.waited_for for t in tallies.values())
    phases = Counter(t.phase for t in tallies.values())
    ((usual, _),) = phases.most_common(1)
    most_samples = max(t.samples for t in tallies.values())

    def ranked(key: Callable[[str, MemberTally], float | None]) -> list[str]:
        """Return the members whose key is not 0 or None, the highest first."""
        keys = {name: found for name, t in tallies.items() if (found := key(name, t))}
        return sorted(keys, key=lambda name: -keys[name])

    rankings = (
        ranked(lambda name, t: t.compute_s),
        ranked(lambda name, t: t.wait_s),
        ranked(lambda name, t: awaited[name]),
        ranked(lambda name, t: most_samples - t.samples if t.role == WORKER else None),
        ranked(lambda name, t: len(tallies) - phases[t.phase] if t.phase != usual else None),
        ranked(lambda name, t: t.mean_staleness),
    )
    in_turn = chain(chain.from_iterable(zip_longest(*rankings)), tallies)
    return set(islice(dict.fromkeys(name for name in in_turn if name is not None), number))


def _summary(rows: Sequence[MemberRow]) -> MembersSummary:
    columns = dict(zip(MEMBER_COLUMNS, zip(*rows, strict=True), strict=True))
    summary: dict[str, int | tuple[float, float, float] | Mapping[str, int] | None] = {
        "members": len(rows)
    }
    for name in _NUMBERS:
        known = [value for value in columns[name] if isinstance(value, int | float)]
        mean = round(sum(known) / len(known), 4) if known else 0.0
        summary[name] = (min(known), mean, max(known)) if known else None
    summary["waited_for"] = _most_frequent(columns["waited_for"])
    summary["phase"] = _most_frequent(columns["phase"])
    return summary


def _most_frequent(values: Iterable[object]) -> dict[str, int]:
    return dict(Counter(v for v in values if isinstance(v, str)).most_common(TOP))
