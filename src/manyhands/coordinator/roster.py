"""The roster: every member that was started, with its role, its place and what it found in the job."""

from __future__ import annotations

from dataclasses import replace

from manyhands.control.messages import Assignment, BuiltFacts, Ready, WorkerFacts
from manyhands.coordinator.context import RunContext
from manyhands.events import events
from manyhands.hosts.view import WORKER
from manyhands.transport.fields import write


class Roster:
    def __init__(self, context: RunContext, assignment: Assignment) -> None:
        self.names: list[str] = []
        """All members of this start, in the order in which they were started."""
        self.ready: dict[str, Ready] = {}
        """The `Ready` message of each member. Members that are gone stay in it."""
        self.new: set[str] = set()
        """Members started later than the first ones that have not joined a view yet."""
        self.standby: set[str] = set()
        """Workers that were in a view, or could have been in the first, and are left over: the strategy needs
        whole replicas. The others have changed the weights since."""
        self._coordinator = context.coordinator
        self._options = context.options
        self._stream = context.stream
        self._assignment = assignment

    @property
    def all_ready(self) -> bool:
        return len(self.ready) == len(self.names)

    @property
    def facts(self) -> WorkerFacts:
        """The facts about the job, which are the same for all workers."""
        return next(iter(self.worker_facts.values()))

    @property
    def worker_facts(self) -> dict[str, WorkerFacts]:
        return {name: ready.facts for name, ready in self.ready.items() if ready.facts is not None}

    def add_built(self, member: str, built: BuiltFacts) -> None:
        """Complete the facts of a worker that builds in its first view."""
        ready = self.ready[member]
        if ready.facts is not None:
            self.ready[member] = replace(ready, facts=replace(ready.facts, built=built))

    def role(self, member: str) -> str:
        return self._coordinator.members[member].role

    def is_worker(self, member: str) -> bool:
        return self.role(member) == WORKER

    def place(self, member: str) -> int:
        """Return its local rank. A replacement takes the place of the member that it replaces, and its
        device."""
        return self._coordinator.members[member].place

    def is_alive(self, member: str) -> bool:
        return self._coordinator.members[member].alive

    def may_save(self, member: str) -> bool:
        """Return whether it sees the run folder and has weights to save: those of a new member, or one that
        stands by, are not the others'."""
        has_weights = member not in self.new and member not in self.standby
        return self._coordinator.members[member].handle.sees_run and has_weights

    def start(self, role: str, place: int, *, saves: bool, takes: tuple[int, int]) -> None:
        """Start one of the first members. `saves`, `takes`: as in its assignment."""
        self._start(role, place, replace(self._assignment, saves=saves, takes=takes))

    def start_new(self, role: str, place: int) -> None:
        """Start a member while the others train."""
        # Not from the checkpoint of the start, which may be deleted by now: its peers send it the state.
        self.new.add(
            self._start(role, place, replace(self._assignment, checkpoint=None, init_from=None))
        )

    def kill(self, member: str) -> None:
        self._coordinator.members[member].handle.kill()

    def _start(self, role: str, place: int, assignment: Assignment) -> str:
        # No name is used twice, not even that of an earlier start or of a member that failed to start.
        used = {*self._coordinator.members, *self.names}
        name = f"{role}-{sum(each.startswith(f'{role}-') for each in used)}"
        self.names.append(name)
        spans_hosts = self._coordinator.launcher.spans_hosts
        member = self._coordinator.start(
            name,
            entry=self._options.programs[role],
            local_rank=place,
            threads=self._options.threads,
            assignment=write(replace(assignment, spans_hosts=spans_hosts)),
            role=role,
        )
        handle = member.handle
        self._stream.emit(
            events.MemberStarted(member=name, host=handle.host, pid=handle.pid, log=str(member.log))
        )
        return name
