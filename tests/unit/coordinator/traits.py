"""Strategy configs for tests of the coordinator: only their traits matter, nothing is built from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyhands.contract import Learner, Strategy


@dataclass(frozen=True)
class Lockstep(Strategy):
    name: ClassVar[str] = "lockstep"
    summary: ClassVar[str] = "every worker does every step"
    elastic: ClassVar[bool] = True

    servers: int = 0

    def servers_for(self, workers: int) -> int:
        return self.servers

    def build(self) -> Learner:
        raise NotImplementedError


@dataclass(frozen=True)
class WorkQueue(Lockstep):
    name: ClassVar[str] = "queue"
    summary: ClassVar[str] = "each part of a step goes to a free worker"
    lockstep: ClassVar[bool] = False


@dataclass(frozen=True)
class ManyParts(WorkQueue):
    name: ClassVar[str] = "many-parts"

    def parts(self, workers: int) -> int:
        return 2 * workers + 1
