"""What a process that serves keeps while the membership changes around it.

The parameters' memory, the blocks it holds (its own and replicas, see block_store.py), the ledger of what
was applied, and the sums of the last two updates with the gradients that they were made of: enough to
finish what others have finished, and to take over from a server whose replica is here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from manyhands.compute.train_state import TrainState
from manyhands.embeddings.row_placement import RowPlacement
from manyhands.ps.block_store import (
    BlockState,
    BlockStore,
    FlatTensors,
    GradientSums,
    ScheduleClock,
    Span,
    runs_of,
)
from manyhands.ps.blocks import BlockLayout
from manyhands.ps.ledger import Decision, Ledger
from manyhands.ps.model_layout import block_state, pieces_of
from manyhands.ps.placement import Placement
from manyhands.ps.recovery_plan import ServerStatus
from manyhands.ps.rows import RowServerState

SPAN_BYTES = 4 << 20
"""Of neighbouring blocks in one message: small enough to overlap in a large model. A quarter of it was
a fifth slower for the small one that the benchmark has."""


@dataclass
class HeldBlocks:
    """What is held by the word of one view."""

    view: int = 0
    placement: Placement | None = None
    own: BlockStore | None = None
    replicas: dict[str, BlockStore] = field(default_factory=dict)
    """By the server that they are replicas of."""
    versions: dict[str, int] = field(default_factory=dict)
    """Of the replicas."""


class ServerState:
    def __init__(
        self,
        name: str,
        host: str,
        train_state: TrainState,
        params: FlatTensors,
        schedule_clock: ScheduleClock,
        *,
        shared: bool,
        replicas: int,
        rows: RowServerState | None = None,
    ) -> None:
        self.name, self.host = name, host
        self.train_state = train_state
        self.params = params
        self.schedule_clock = schedule_clock
        self.shared = shared
        """Members share memory: gradients of the dead are still there, and sums need not travel."""
        self.replicas = replicas
        self.ledger = Ledger(progress=Fraction(schedule_clock.ticks))
        self.held = HeldBlocks()
        self.coming: HeldBlocks | None = None
        """Ready for a view that has not begun."""
        self.sums = GradientSums([self._memory("manyhands-sums") for _ in range(2)])
        self.ahead: dict[int, Decision] = {}
        """Decisions that a replica has, by version, and the own blocks have not."""
        self.others: dict[str, GradientSums] = {}
        """The sums of servers whose replicas are here: theirs in shared memory, or what they sent."""
        self.gradients: dict[str, Sequence[FlatTensors]] = {}
        """Of each worker, in its slots: its own memory, or what it sent."""
        self.rows = rows
        """Of tables; None where the model has none, or workers change rows themselves."""

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
        ledger = Ledger.from_record(self.ledger.to_record())
        while (decision := self.ahead.get(ledger.version + 1)) is not None:
            ledger.note(decision)  # else a replica would have what nobody knows of
        return ServerStatus(
            server=self.name,
            host=self.host,
            view=held.view,
            prepared=coming.view if coming else 0,
            placement=held.placement.to_record() if held.placement else None,
            homes=self.rows.homes if self.rows else None,
            ledger=ledger.to_record(),
            replicas=reach,
            seen=self.params.mark,
        )

    def block_state(self, number: int) -> BlockState:
        """A block that is held here, in whatever role."""
        for block_store in (self.held.own, *self.held.replicas.values()):
            if block_store is not None and number in block_store:
                return block_store.take(number)
        raise AssertionError(f"{self.name} holds no block {number}")

    def fresh(self, number: int) -> BlockState:
        """A block as the job, or its checkpoint, has it."""
        model, optimizer = self.train_state.model, self.train_state.optimizer
        pieces = pieces_of(model, optimizer)
        states = {name: optimizer.state.get(p, {}) for name, p in pieces.items()}
        state = block_state(self.layout, self.layout.blocks[number], states)
        return BlockState(self.params.block(number), state)

    def prepare(
        self,
        view: int,
        placement: Placement,
        materials: Mapping[tuple[str, int], BlockState],
        *,
        fresh: bool,
        homes: RowPlacement | None = None,
    ) -> None:
        """Build what is held by `placement`, from what came (role, block) and what is here."""

        def find(role: str, numbers: Iterable[int]) -> dict[int, BlockState]:
            return {
                n: materials.get((role, n)) or (self.fresh(n) if fresh else self.block_state(n))
                for n in numbers
            }

        ticks = self.schedule_clock.ticks
        held = HeldBlocks(view, placement)
        own = [block.number for block in placement.blocks_of(self.name)]
        held.own = BlockStore(self.train_state, self.params, find("own", own), ticks=ticks)
        kept = placement.replicas_of(self.name)
        for server in placement.servers:
            numbers = [block.number for block in kept if placement.server_of(block) == server]
            if numbers:
                # Where memory is not shared, the replica is what a worker of this process computes
                # with: its parameters need not travel.
                memory = FlatTensors.private(self.layout) if self.shared else self.params
                block_store = BlockStore(
                    self.train_state, memory, find("replica", numbers), ticks=ticks
                )
                held.replicas[server] = block_store
                held.versions[server] = self.ledger.version
        self.coming = held
        if self.rows is not None and homes is not None:
            self.rows.prepare(homes, materials)

    def begin(self) -> None:
        """The view for which everything is prepared has begun."""
        assert self.coming is not None
        self.held, self.coming = self.coming, None
        self.sums.versions = [0, 0]
        # Workers tell anew where their gradients are; memory of the dead is let go.
        self.others, self.ahead, self.gradients = {}, {}, {}
        if self.rows is not None:
            self.rows.begin(self.ledger.version)
        servers = self.held.placement.servers if self.held.placement is not None else (self.name,)
        me, count = servers.index(self.name), len(servers)
        self.params.set_mark(self.ledger.version, server=me, servers=count)

    def attach_sums(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Find the sums of the servers whose replicas are here: in shared memory, or sent later."""
        for owner in self.held.replicas:
            flats = [FlatTensors.attached(self.layout, each) for each in addresses[owner]]
            self.others[owner] = GradientSums(
                flats or [FlatTensors.private(self.layout) for _ in range(2)]
            )

    @property
    def own(self) -> BlockStore:
        assert self.held.own is not None
        return self.held.own

    def _memory(self, label: str) -> FlatTensors:
        if self.shared and self.replicas:
            return FlatTensors.shared(self.layout, label=label)
        return FlatTensors.private(self.layout)


def spans(layout: BlockLayout, numbers: Iterable[int]) -> list[Span]:
    """Blocks as they travel."""
    return runs_of(layout, numbers, max_bytes=SPAN_BYTES)


def travelling(placement: Placement, server: str) -> tuple[list[Span], list[str | None]]:
    """The blocks of a server as they travel, and who keeps the replica of each run."""
    kept: dict[str | None, list[int]] = defaultdict(list)
    for block in placement.blocks_of(server):
        kept[placement.replica_of(block)].append(block.number)
    runs: list[Span] = []
    keepers: list[str | None] = []
    for keeper, numbers in kept.items():
        cut = spans(placement.layout, numbers)
        runs += cut
        keepers += [keeper] * len(cut)
    return runs, keepers
