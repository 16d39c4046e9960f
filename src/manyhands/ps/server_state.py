"""State that a server process keeps across views.

It consists of the memory of the parameters, the blocks that the server holds (its own and replicas, see
block_store.py), the ledger of applied decisions, and the sums of the last two updates with the gradients that
they were made of. This is enough to complete any update that another server has completed, and to take over
from a server whose replica is here. The functions that change it are in updates.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar

from manyhands.compute.train_state import TrainState
from manyhands.embeddings.row_placement import RowPlacement
from manyhands.ps.block_store import (
    BlockState,
    BlockStore,
    FlatTensors,
    GradientSums,
    ScheduleClock,
)
from manyhands.ps.blocks import BlockLayout
from manyhands.ps.model_layout import block_state, pieces_of
from manyhands.ps.placement import Placement
from manyhands.ps.policies import Decision, Ledger
from manyhands.ps.recovery_plan import ServerStatus
from manyhands.ps.rows import RowServerState
from manyhands.ps.staleness import MomentumRule


@dataclass
class HeldBlocks:
    """Blocks that a server holds in one view."""

    view: int = 0
    placement: Placement | None = None
    own: BlockStore | None = None
    replicas: dict[str, BlockStore] = field(default_factory=dict)
    """By the server that owns the blocks."""
    versions: dict[str, int] = field(default_factory=dict)
    """Version of the replicas, by the server that owns the blocks."""


class ServerState:
    shared: ClassVar[bool] = False
    """If true, members share memory: gradients of dead workers remain readable, and sums are not sent."""

    def __init__(
        self,
        name: str,
        host: str,
        train_state: TrainState,
        params: FlatTensors,
        schedule_clock: ScheduleClock,
        *,
        replicas: int,
        momentum_rule: MomentumRule = "none",
        rows: RowServerState | None = None,
    ) -> None:
        self.name, self.host = name, host
        self.train_state = train_state
        self.params = params
        self.schedule_clock = schedule_clock
        self.replicas = replicas
        self._momentum_rule = momentum_rule
        self.ledger = Ledger(progress=Fraction(schedule_clock.ticks))
        self.held = HeldBlocks()
        self.coming: HeldBlocks | None = None
        """Blocks prepared for a view that has not begun."""
        self.sums = GradientSums([self._allocate_sum() for _ in range(2)])
        self.ahead: dict[int, Decision] = {}
        """Decisions, by version, that are applied to a replica here but not yet to the own blocks."""
        self.others: dict[str, GradientSums] = {}
        """Sums of the servers whose replicas are here: in their shared memory, or received from them."""
        self.gradients: dict[str, Sequence[FlatTensors]] = {}
        """Gradient slots of each worker: its shared memory, or received from it."""
        self.rows = rows
        """Table rows; None if the model has no tables, or workers change rows themselves."""

    @property
    def layout(self) -> BlockLayout:
        return self.params.layout

    def status(self) -> ServerStatus:
        held, coming = self.held, self.coming
        reach = dict(held.versions)
        for name, version in held.versions.items():
            others = self.others.get(name)
            if others is not None and others.has(version + 1):
                reach[name] = version + 1
        ledger = self.ledger.copy()
        while (decision := self.ahead.get(ledger.version + 1)) is not None:
            ledger.note(decision)  # otherwise a replica could be ahead of every ledger
        return ServerStatus(
            server=self.name,
            host=self.host,
            view=held.view,
            prepared=coming.view if coming else 0,
            placement=held.placement.to_record() if held.placement else None,
            row_placement=self.rows.placement if self.rows else None,
            ledger=ledger,
            replicas=reach,
            seen=self.params.mark,
        )

    def block_state(self, number: int) -> BlockState:
        """Return the state of a block that is held here, own or replica."""
        for block_store in (self.held.own, *self.held.replicas.values()):
            if block_store is not None and number in block_store:
                return block_store.take(number)
        raise AssertionError(f"{self.name} holds no block {number}")

    def fresh(self, number: int) -> BlockState:
        """Return the initial state of a block, from the job or its checkpoint."""
        model, optimizer = self.train_state.model, self.train_state.optimizer
        pieces = pieces_of(model, optimizer)
        states = {name: optimizer.state.get(p, {}) for name, p in pieces.items()}
        state = block_state(self.layout, self.layout.blocks[number], states)
        return BlockState(self.params.block(number), state)

    def prepare(
        self,
        view: int,
        placement: Placement,
        received: Mapping[tuple[str, int], BlockState],
        *,
        fresh: bool,
        row_placement: RowPlacement | None = None,
    ) -> None:
        """Build the blocks of `placement` from the blocks in `received`, by (role, block), and those held
        here. If `fresh` is true, missing blocks get their initial state."""

        def find(role: str, numbers: Iterable[int]) -> dict[int, BlockState]:
            return {
                n: received.get((role, n)) or (self.fresh(n) if fresh else self.block_state(n))
                for n in numbers
            }

        ticks = self.schedule_clock.ticks
        held = HeldBlocks(view, placement)
        own = [block.number for block in placement.blocks_of(self.name)]
        rule = self._momentum_rule
        held.own = BlockStore(
            self.train_state, self.params, find("own", own), ticks=ticks, momentum_rule=rule
        )
        kept = placement.replicas_of(self.name)
        for server in placement.servers:
            numbers = [block.number for block in kept if placement.server_of(block) == server]
            if numbers:
                held.replicas[server] = BlockStore(
                    self.train_state,
                    self._replica_memory(),
                    find("replica", numbers),
                    ticks=ticks,
                    momentum_rule=rule,
                )
                held.versions[server] = self.ledger.version
        self.coming = held
        if self.rows is not None and row_placement is not None:
            self.rows.prepare(row_placement, received)

    def begin(self) -> None:
        """Begin the prepared view."""
        assert self.coming is not None
        self.held, self.coming = self.coming, None
        self.sums.versions = [0, 0]
        # Workers send the addresses of their gradients again; the memory of dead workers is freed.
        self.others, self.ahead, self.gradients = {}, {}, {}
        if self.rows is not None:
            self.rows.begin(self.ledger.version)
        servers = self.placement.servers
        me = servers.index(self.name)
        self.params.set_mark(self.ledger.version, server=me, servers=len(servers))

    def attach_sums(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Attach the sums of the servers whose replicas are here, or allocate memory to receive them."""
        for owner in self.held.replicas:
            flats = [FlatTensors.attached(self.layout, each) for each in addresses[owner]]
            self.others[owner] = GradientSums(
                flats or [FlatTensors.private(self.layout) for _ in range(2)]
            )

    @property
    def placement(self) -> Placement:
        assert self.held.placement is not None
        return self.held.placement

    @property
    def own(self) -> BlockStore:
        assert self.held.own is not None
        return self.held.own

    def _allocate_sum(self) -> FlatTensors:
        return FlatTensors.private(self.layout)

    def _replica_memory(self) -> FlatTensors:
        # A worker of this process computes with the replica, so that its parameters are not sent.
        return self.params


class SharedServerState(ServerState):
    """State of a server that shares the parameters with all members, and its sums with replica holders."""

    shared = True

    def _allocate_sum(self) -> FlatTensors:
        if self.replicas:
            return FlatTensors.shared(self.layout, label="manyhands-sums")
        return super()._allocate_sum()

    def _replica_memory(self) -> FlatTensors:
        return FlatTensors.private(self.layout)
