"""Fault injection (`--chaos`): kills and pauses members, and cuts their links, when the clauses say so.

The driver calls `tick` whenever something has happened, and ten times a second. A fault that is due waits for
its moment: no member is killed, and no link cut, before the run has recovered from the last such fault, and a
kill leaves two workers. The coordinator itself and the links to it are never touched.

The run has recovered from a fault once a step is committed that was not dispatched when it happened.
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
    AFTER_STEP,
    CUT,
    EVERY,
    KILL,
    ONCE,
    PAUSE,
    FaultClause,
    FaultSpec,
    possible_targets,
)
from manyhands.coordinator.membership import Membership
from manyhands.coordinator.plan import TrainingPlan
from manyhands.events import events
from manyhands.events.sinks import Stream
from manyhands.hosts.faults import cut_a_link
from manyhands.hosts.launchers.local import LocalHandle

ONCE_WITHIN_S = 60.0
"""`once` is a moment of the first minute."""
CUT_EVERY_S = 0.1
"""Interval between cuts while links of a member are to stay cut."""


@dataclass
class InjectedFault:
    """One fault, and its effect."""

    fault: str
    member: str
    at: float
    until: float
    dispatched_step: int
    """The last step that was dispatched."""
    pause_s: float | None = None
    """The longest time without a committed step, from the fault until the recovery."""
    lasts: bool = False
    recovered: bool = False


class ActiveClause:
    """A clause of the spec, when its next fault is due, and its random numbers."""

    def __init__(self, clause: FaultClause, rng: random.Random) -> None:
        self.clause = clause
        self.rng = rng
        self.reported = False
        """If true, it was reported that the fault can't happen now."""
        self.over = False
        timing = clause.timing
        self._due = rng.uniform(0.0, ONCE_WITHIN_S) if timing.kind == ONCE else timing.value

    def due(self, elapsed_s: float, step: int) -> bool:
        by_step = self.clause.timing.kind == AFTER_STEP
        return not self.over and (step if by_step else elapsed_s) >= self._due

    def done(self, elapsed_s: float) -> None:
        """Set when the clause is due next, after its fault. Skipped faults are not repeated."""
        self.over = self.clause.timing.kind != EVERY
        self._due = elapsed_s + self.clause.timing.value


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
        self.faults: list[InjectedFault] = []
        self._coordinator = coordinator
        self._membership = membership
        self._stream = stream
        self._clock = clock
        self._clauses = [
            ActiveClause(clause, random.Random(f"{seed} {number}"))
            for number, clause in enumerate(chaos.clauses)
        ]
        self._rng = random.Random(seed)
        self._began: float | None = None
        self._samples = 0
        self._last_commit = 0.0
        self._last_cut = 0.0

    def follow(self, membership: Membership) -> None:
        """Continue with these members: all have started again."""
        self._membership, self._samples = membership, 0
        for fault in self.faults:
            fault.lasts = False

    def tick(self, plan: TrainingPlan, *, samples: int, ending: bool) -> None:
        """`samples`: how many were committed in this start."""
        now = self._clock()
        if self._began is None:
            self._began = now
            self._notice(str(self.chaos))
        self._follow(now, plan.committed_step, samples)
        self._continue_lasting(now, ending=ending)
        if ending:
            return
        for active in self._clauses:
            elapsed_s = now - self._began
            if not active.due(elapsed_s, plan.committed_step):
                continue
            member = self._inject(active)
            if member is not None:
                active.done(elapsed_s)
                self._note(active.clause, member, now, plan.step)

    def summary(self, *, finished: bool) -> dict[str, Any]:
        """Return the number of faults from which the run recovered, and the median pause."""
        pauses = [fault.pause_s for fault in self.faults if fault.pause_s is not None]
        return {
            # If the run finished, it recovered also from a fault that came too late for another step.
            "recovered": sum(finished or fault.recovered for fault in self.faults),
            "median_pause_s": round(median(pauses), 3) if pauses else None,
        }

    # One fault --------------------------------------------------------------------------------

    def _inject(self, active: ActiveClause) -> str | None:
        """Inject the fault, if that is possible now. Returns the member."""
        clause = active.clause
        if clause.fault != PAUSE and not self._calm:
            return None
        candidates = [name for name in self._candidates(clause) if self._is_reachable(name)]
        if not candidates:
            self._explain(active)
            return None
        if clause.fault == CUT:
            return self._cut_one_of(candidates, active)
        member = active.rng.choice(candidates)
        self._signal(member, signal.SIGKILL if clause.fault == KILL else signal.SIGSTOP)
        return member

    def _cut_one_of(self, candidates: list[str], active: ActiveClause) -> str | None:
        active.rng.shuffle(candidates)
        try:
            for member in candidates:
                if self._cut(member, active.rng):
                    return member
        except OSError as error:
            active.over = True
            self._notice(f"links can't be cut here ({error}); {active.clause} is skipped")
            return None
        self._report_once(active, f"{active.clause} waits: there is no TCP connection to cut")
        return None

    @property
    def _calm(self) -> bool:
        """If true, the run has recovered from all faults that could lose members."""
        severe = [fault for fault in self.faults if fault.fault != PAUSE]
        return not self._membership.views.joining and all(fault.recovered for fault in severe)

    def _candidates(self, clause: FaultClause) -> list[str]:
        members, is_worker = self._coordinator.members, self._membership.roster.is_worker
        alive = [name for name in self._membership.views.current.names if members[name].alive]
        workers = [name for name in alive if is_worker(name)]
        servers = [name for name in alive if not is_worker(name)]
        return possible_targets(clause, workers, servers)

    def _is_reachable(self, name: str) -> bool:
        """Return whether a member runs on this machine and has no fault in progress."""
        member = self._coordinator.members[name]
        lasting = any(fault.member == name for fault in self.faults if fault.lasts)
        return isinstance(member.handle, LocalHandle) and not lasting

    def _explain(self, active: ActiveClause) -> None:
        """Report once why the fault has to wait, unless a member is coming that makes it possible."""
        if not self._membership.pool.expects_members:
            why = "a kill leaves two workers, and a server if there are any; see --max-restarts"
            more = f" ({why})" if active.clause.fault == KILL else ""
            self._report_once(active, f"{active.clause} waits: no member is left for it{more}")

    # Recovery ---------------------------------------------------------------------------------

    def _note(self, clause: FaultClause, member: str, now: float, dispatched_step: int) -> None:
        until, lasts = now + clause.length_s, clause.length_s > 0
        self.faults.append(
            InjectedFault(
                clause.fault, member, now, until, dispatched_step=dispatched_step, lasts=lasts
            )
        )
        self._stream.emit(
            events.Injected(fault=clause.fault, member=member, seconds=clause.length_s)
        )

    def _follow(self, now: float, committed_step: int, samples: int) -> None:
        """Update which faults the run has recovered from, and how long nothing was committed."""
        open_faults = [fault for fault in self.faults if not fault.recovered]
        if samples > self._samples:
            for fault in open_faults:
                waited_s = now - max(fault.at, self._last_commit)
                fault.pause_s = max(waited_s, fault.pause_s or 0.0)
            self._samples, self._last_commit = samples, now
        for fault in open_faults:
            fault.recovered = committed_step > fault.dispatched_step and self._is_over(fault)

    def _is_over(self, fault: InjectedFault) -> bool:
        if fault.fault == KILL and fault.member in self._membership.views.current.names:
            return False  # its death is not noticed yet
        return not fault.lasts and not self._membership.views.joining

    def _continue_lasting(self, now: float, *, ending: bool) -> None:
        """Continue faults that last, until their time is over or the run ends."""
        again = now - self._last_cut >= CUT_EVERY_S
        for fault in self.faults:
            if not fault.lasts:
                continue
            fault.lasts = now < fault.until and not ending
            if fault.fault == PAUSE and not fault.lasts:
                self._signal(fault.member, signal.SIGCONT)
            elif fault.fault == CUT and fault.lasts and again:
                self._last_cut = now
                with suppress(OSError):  # it is just ending
                    self._cut(fault.member, self._rng)

    def _cut(self, member: str, rng: random.Random) -> bool:
        port = self._coordinator.port
        return cut_a_link(self._coordinator.members[member].handle.pid, rng, but_port=port)

    def _signal(self, member: str, number: signal.Signals) -> None:
        handle = self._coordinator.members[member].handle
        assert isinstance(handle, LocalHandle)
        handle.signal(number)

    def _report_once(self, clause: ActiveClause, message: str) -> None:
        if not clause.reported:
            clause.reported = True
            self._notice(message)

    def _notice(self, message: str) -> None:
        self._stream.notice(f"chaos: {message}")
