"""The options that all parameter-server strategies share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from manyhands.contract import Context, DedicatedServer, Learner, Strategy, Traits
from manyhands.costs import CostFacts, MemoryUse, Transfer
from manyhands.errors import SpecError
from manyhands.hosts.view import SERVER
from manyhands.pairs import HOSTS, OWN_LOOP, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from manyhands.hosts.view import View
    from manyhands.ps.mode import PsMode

DEDICATED = 2
"""Number of dedicated servers by default: two, because a replica needs a second one."""


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Options shared by the four strategies."""

    variants = ({"transport": "shm"}, {"replicas": 0})

    servers: int | Literal["auto"] = "auto"
    """Number of servers; auto: every worker that would have a block to serve, or two dedicated ones."""
    placement: Literal["colocated", "dedicated"] = "colocated"
    """Colocated: workers are servers too. Dedicated: servers are processes of their own."""
    transport: Literal["auto", "shm", "tcp"] = "auto"
    """Transport of gradients and parameters. Auto: shared memory inside a host, the network otherwise."""
    replicas: int = 1
    """Copies of each block on another server, kept up to date: 1 or 0."""
    row_bits: int = 32
    """Bits of each number of a table's row on the wire: 32, or 16 (bfloat16)."""

    @property
    def traits(self) -> Traits:
        return Traits(
            elastic=True,
            can_shrink=self.replicas > 0 or self.placement == "dedicated",
            shares_memory=self.transport != "tcp",
            dedicated_servers=True,
        )

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        meets = "its members find each other through the coordinator of `manyhands train`"
        found = [*super().unsupported, Unsupported(OWN_LOOP, meets, instead="allreduce")]
        if self.transport == "shm":
            found.append(Unsupported(HOSTS, "transport=shm shares the memory of one host"))
        return tuple(found)

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.replicas not in (0, 1):
            raise SpecError(f"{self.name}: replicas={self.replicas}; a block has 0 or 1 replicas.")
        if self.row_bits not in (16, 32):
            raise SpecError(f"{self.name}: row_bits={self.row_bits}; a number has 32 or 16 bits.")
        if self.servers == "auto":
            return
        most = workers if self.placement == "colocated" else 64
        if not 1 <= self.servers <= most:
            why = (
                f"there are {workers} workers, each of which can serve"
                if self.placement == "colocated"
                else "more servers than that only wait for each other"
            )
            raise SpecError(
                f"{self.name}: servers={self.servers}, and {why}. Use servers=1 to {most}, or auto."
            )

    def servers_for(self, workers: int) -> int:
        if self.placement == "colocated":
            return 0
        return DEDICATED if self.servers == "auto" else self.servers

    def needs_keys(self, workers: int) -> bool:
        return self.transport == "tcp"

    def servers_in(self, view: View, *, most: int | None) -> list[str]:
        """Return the members of a view that serve; none if all dedicated servers are gone. `most`: workers
        that serve by default; None: all."""
        if self.placement == "dedicated":
            return [seat.name for seat in view.seats if seat.role == SERVER]
        workers = [seat.name for seat in view.workers]
        return workers[: most if self.servers == "auto" else self.servers]

    def servers_for_shards(self, num_shards: int) -> int:
        """Return the number of workers that serve by default inside a host. More servers would hold no block,
        and only forward messages about every update."""
        return max(1 + self.replicas, num_shards)

    def traffic(self, facts: CostFacts, view: View) -> Sequence[Transfer]:
        from manyhands.ps.costs import PsCosts

        return list(PsCosts(self, facts).traffic(view))

    def memory(self, facts: CostFacts) -> Sequence[MemoryUse]:
        from manyhands.ps.costs import PsCosts

        return list(PsCosts(self, facts).memory())

    def build(self, context: Context) -> Learner:
        from manyhands.ps.learner import PsLearner

        return PsLearner(self, context)

    def build_server(self, context: Context) -> DedicatedServer:
        from manyhands.ps.node import DedicatedPsServer

        return DedicatedPsServer(self, context)

    @abstractmethod
    def mode(self, clip_norm: float | None) -> PsMode:
        """Return the mode of servers and workers; needs torch."""
