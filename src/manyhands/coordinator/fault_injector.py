"""Faults on purpose, in the coordinator: does to members what the clauses of `--chaos` say, when it is time.

The conductor calls `tick` whenever something has happened, and ten times a second. A fault that is due
waits for its moment: nobody is killed, and no link cut, before the last such fault is recovered from, and
a kill leaves two workers. The coordinator itself and the links to it are left alone.

A fault is recovered from once a step is committed that had not been given out when it happened.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from manyhands.coordinator.coordinator import Coordinator
from manyhands.coordinator.fault_spec import (
    CUT,
    KILL,
    PAUSE,
    FaultClause,
    FaultSpec,
    FaultTimer,
    befallen,
)
from manyhands.coordinator.membership import Membership
from manyhands.coordinator.plan import TrainingPlan
from manyhands.events import events
from manyhands.events.sinks import Stream
from manyhands.hosts.faults import cut_a_link
from manyhands.hosts.launchers import LocalHandle

CUT_EVERY_S = 0.1
"""How often, while links of a member are to stay cut."""


@dataclass
class InjectedFault:
    """One fault, and what became of it."""

    fault: str
    member: str
    at: float
    until: float
    given_step: int
    """The last step that had been given out."""
    pause_s: float | None = None
    """The longest time without a committed step, from the fault until it was recovered from."""
    lasts: bool = False
    recovered: bool = False


class ActiveClause:
    """A clause in a run."""

    def __init__(self, clause: FaultClause, rng: random.Random) -> None:
        self.clause = clause
        self.rng = rng
        self.timer = FaultTimer(clause.timing, rng)
        self.told = False
        """That it can't be done now."""
        self.over = False


class FaultInjector:
    def __init__(
        self,
        chaos: FaultSpec,
        coordinator: Coordinator,
        membership: Membership,
        stream: Stream,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        seed = random.randrange(100_000) if chaos.seed is None else chaos.seed
        self.chaos = replace(chaos, seed=seed)
        self.injuries: list[InjectedFault] = []
        self._coordinator = coordinator
        self._membership = membership
        self._stream = stream
        self._clock = clock
        self._drills = [
            ActiveClause(clause, random.Random(f"{seed} {number}"))
            for number, clause in enumerate(chaos.clauses)
        ]
        self._rng = random.Random(seed)
        self._began: float | None = None
        self._samples = 0
        self._last_commit = 0.0
        self._last_cut = 0.0

    def follow(self, membership: Membership) -> None:
        """All have begun again: it goes on with these."""
        self._membership, self._samples = membership, 0
        for injury in self.injuries:
            injury.lasts = False

    def tick(self, training_plan: TrainingPlan, *, samples: int, ending: bool) -> None:
        """`samples`: committed in this start, to see that anything was."""
        now = self._clock()
        if self._began is None:
            self._began = now
            self._notice(str(self.chaos))
        self._follow(now, training_plan.committed_step, samples)
        self._carry_on(now, ending=ending)
        if ending:
            return
        for drill in self._drills:
            elapsed_s = now - self._began
            if drill.over or not drill.timer.due(elapsed_s, training_plan.committed_step):
                continue
            member = self._inject(drill)
            if member is not None:
                drill.timer.done(elapsed_s)
                self._note(drill.clause, member, now, training_plan.step)

    def summary(self, *, finished: bool) -> dict[str, Any]:
        """How many faults were recovered from, and how long training stood still for them."""
        pauses = [injury.pause_s for injury in self.injuries if injury.pause_s is not None]
        return {
            # What came too late for another step is recovered from if the run is finished.
            "recovered": sum(finished or injury.recovered for injury in self.injuries),
            "median_pause_s": round(median(pauses), 3) if pauses else None,
        }

    # One fault --------------------------------------------------------------------------------

    def _inject(self, drill: ActiveClause) -> str | None:
        """Do it to somebody, if it can be done now; to whom."""
        clause = drill.clause
        if clause.fault != PAUSE and not self._calm:
            return None
        candidates = [name for name in self._candidates(clause) if self._within_reach(name)]
        if not candidates:
            self._explain(drill)
            return None
        if clause.fault == CUT:
            return self._cut_one_of(candidates, drill)
        member = drill.rng.choice(candidates)
        self._signal(member, signal.SIGKILL if clause.fault == KILL else signal.SIGSTOP)
        return member

    def _cut_one_of(self, candidates: list[str], drill: ActiveClause) -> str | None:
        drill.rng.shuffle(candidates)
        try:
            for member in candidates:
                if self._cut(member, drill.rng):
                    return member
        except OSError as error:
            drill.over = True
            self._notice(f"links can't be cut here ({error}); {drill.clause} is left out")
            return None
        self._tell_once(drill, f"{drill.clause} waits: there is no TCP connection to be cut")
        return None

    @property
    def _calm(self) -> bool:
        """Nobody recovers from anything that the members could be lost by."""
        grave = [injury for injury in self.injuries if injury.fault != PAUSE]
        return not self._membership.joining and all(injury.recovered for injury in grave)

    def _candidates(self, clause: FaultClause) -> list[str]:
        members, is_worker = self._coordinator.members, self._membership.is_worker
        alive = [name for name in self._membership.view.names if members[name].alive]
        workers = [name for name in alive if is_worker(name)]
        servers = [name for name in alive if not is_worker(name)]
        return befallen(clause, workers, servers)

    def _within_reach(self, name: str) -> bool:
        """A process of this machine, to which nothing is being done."""
        member = self._coordinator.members[name]
        lasting = any(injury.member == name for injury in self.injuries if injury.lasts)
        return isinstance(member.handle, LocalHandle) and not lasting

    def _explain(self, drill: ActiveClause) -> None:
        """Once, and not while somebody is on the way who makes it possible again."""
        if not self._membership.expects_somebody:
            why = "a kill leaves two workers, and a server where there are any; see --max-restarts"
            more = f" ({why})" if drill.clause.fault == KILL else ""
            self._tell_once(drill, f"{drill.clause} waits: nobody is there for it{more}")

    # What becomes of it -----------------------------------------------------------------------

    def _note(self, clause: FaultClause, member: str, now: float, given_step: int) -> None:
        until, lasts = now + clause.length_s, clause.length_s > 0
        self.injuries.append(
            InjectedFault(clause.fault, member, now, until, given_step=given_step, lasts=lasts)
        )
        self._stream.emit(
            events.Injected(fault=clause.fault, member=member, seconds=clause.length_s)
        )

    def _follow(self, now: float, committed_step: int, samples: int) -> None:
        """Which faults are recovered from by now, and how long nothing was committed."""
        hurt = [injury for injury in self.injuries if not injury.recovered]
        if samples > self._samples:
            for injury in hurt:
                waited_s = now - max(injury.at, self._last_commit)
                injury.pause_s = max(waited_s, injury.pause_s or 0.0)
            self._samples, self._last_commit = samples, now
        for injury in hurt:
            injury.recovered = committed_step > injury.given_step and self._is_over(injury)

    def _is_over(self, injury: InjectedFault) -> bool:
        if injury.fault == KILL and injury.member in self._membership.view.names:
            return False  # its death is not even noticed
        return not injury.lasts and not self._membership.joining

    def _carry_on(self, now: float, *, ending: bool) -> None:
        """What lasts: end it when its time is over, or the run's."""
        again = now - self._last_cut >= CUT_EVERY_S
        for injury in self.injuries:
            if not injury.lasts:
                continue
            injury.lasts = now < injury.until and not ending
            if injury.fault == PAUSE and not injury.lasts:
                self._signal(injury.member, signal.SIGCONT)
            elif injury.fault == CUT and injury.lasts and again:
                self._last_cut = now
                with suppress(OSError):  # it is just ending
                    self._cut(injury.member, self._rng)

    def _cut(self, member: str, rng: random.Random) -> bool:
        port = self._coordinator.port
        return cut_a_link(self._coordinator.members[member].handle.pid, rng, but_port=port)

    def _signal(self, member: str, number: signal.Signals) -> None:
        handle = self._coordinator.members[member].handle
        assert isinstance(handle, LocalHandle)
        handle.signal(number)

    def _tell_once(self, drill: ActiveClause, message: str) -> None:
        if not drill.told:
            drill.told = True
            self._notice(message)

    def _notice(self, message: str) -> None:
        self._stream.emit(events.Noticed(message=f"chaos: {message}"))
