"""Strategy configs for tests of the coordinator: only their traits matter, nothing is built from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyhands.contract import Context, Learner, Strategy, Traits


@dataclass(frozen=True)
class Lockstep(Strategy):
    name: ClassVar[str] = "lockstep"

    servers: int = 0
    holds_state: bool = False
    per_replica: int = 1
    uniform: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(elastic=True, holds_state=self.holds_state, uniform=self.uniform)

    def replica_size(self, workers: int) -> int:
        return self.per_replica

    def servers_for(self, workers: int) -> int:
        return self.servers

    def build(self, context: Context) -> Learner:
        raise NotImplementedError


@dataclass(frozen=True)
class Rounds(Lockstep):
    name: ClassVar[str] = "rounds"

    round_steps: int = 3

    @property
    def traits(self) -> Traits:
        return Traits(elastic=True, holds_state=self.holds_state, round_steps=self.round_steps)


@dataclass(frozen=True)
class WorkQueue(Lockstep):
    name: ClassVar[str] = "queue"

    @property
    def traits(self) -> Traits:
        return Traits(elastic=True, lockstep=False, holds_state=self.holds_state)


@dataclass(frozen=True)
class ManyParts(WorkQueue):
    name: ClassVar[str] = "many-parts"

    def parts(self, workers: int) -> int:
        return 2 * workers + 1
