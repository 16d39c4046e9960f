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

from manyhands.compute.schedule import position
from manyhands.compute.train_state import TrainState
from manyhands.embeddings.row_placement import RowPlacement
from manyhands.ps.block_store import BlockState, BlockStore, Span, add_up, runs_of, scale
from manyhands.ps.blocks import BlockLayout
from manyhands.ps.ledger import Decision, Ledger
from manyhands.ps.memory import FlatTensors, block_state, pieces_of
from manyhands.ps.placement import Placement
from manyhands.ps.recovery_plan import RecoveryPlan, ServerStatus
from manyhands.ps.rows import RowServerState

SPAN_BYTES = 4 << 20
"""Of neighbouring blocks in one message: small enough to overlap in a large model. A quarter of it was
a fifth slower for the small one that the benchmark has."""


class ScheduleClock:
    """The trainee's schedule, and how many steps it has done since training began."""

    def __init__(self, train_state: TrainState) -> None:
        self._train_state = train_state
        self.ticks = position(train_state.scheduler)

    def advance(self, ticks: int) -> None:
        while self.ticks < ticks:
            self.ticks += 1
            if self._train_state.scheduler is not None:
                self._train_state.scheduler.step()


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


@dataclass
class GradientSums:
    """The aggregated gradients of the last two versions."""

    flats: Sequence[FlatTensors]
    versions: list[int] = field(default_factory=lambda: [0, 0])

    def of(self, version: int) -> FlatTensors:
        return self.flats[version % len(self.flats)]

    def has(self, version: int) -> bool:
        return self.versions[version % 2] == version

    def begin(self, version: int) -> None:
        """What was there is overwritten."""
        self.versions[version % 2] = 0

    def note(self, version: int) -> None:
        self.versions[version % 2] = version


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
        self.lr = 0.0
        """The schedule's learning rate at the last update."""
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
        ledger = Ledger.from_dict(self.ledger.to_dict())
        while (decision := self.ahead.get(ledger.version + 1)) is not None:
            ledger.note(decision)  # else a replica would have what nobody knows of
        return ServerStatus(
            server=self.name,
            host=self.host,
            view=held.view,
            prepared=coming.view if coming else 0,
            placement=held.placement.to_dict() if held.placement else None,
            homes=self.rows.homes.to_dict() if self.rows and self.rows.homes else None,
            ledger=ledger.to_dict(),
            replicas=reach,
            seen=self.params.mark,
        )

    def catch_up(self, plan: RecoveryPlan) -> None:
        """Finish what another server has finished, with everything that is held here."""
        if self.coming is not None and self.coming.view == plan.standing:
            self.held = self.coming
            if self.rows is not None:
                self.rows.take_over()
        self.coming = None
        self.schedule_clock.advance(plan.ledger.ticks)
        if self.held.view != plan.standing:
            self.held = HeldBlocks()  # what it held was given up in a view that it missed
            self.ledger = plan.ledger
            return
        for keeper, owner in plan.stale:
            if keeper == self.name:  # what is needed of it will be sent anew
                self.held.replicas.pop(owner, None)
                self.held.versions.pop(owner, None)
        for owner, block_store in self.held.replicas.items():
            for decision in plan.ledger.after(self.held.versions[owner]):
                self._catch_up_replica(owner, block_store, decision)
        for decision in plan.ledger.after(self.ledger.version):
            if not self.sums.has(decision.version):
                self.add_up(decision, self.sums.of(decision.version), self.own.runs)
                scale(self.sums.of(decision.version), self.own.runs, decision.factor)
            self.apply(decision)

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
        self._set_mark()

    # Updates ------------------------------------------------------------------------------------

    @property
    def own(self) -> BlockStore:
        assert self.held.own is not None
        return self.held.own

    def add_up(self, decision: Decision, sums: FlatTensors, runs: Sequence[Span]) -> None:
        sources = [self.gradients[g.worker][g.slot] for g in decision.contributions]
        add_up(sums, runs, sources, decision.coefficients())

    def apply(self, decision: Decision) -> None:
        """The sums of a decision go into the own blocks."""
        self._apply_rows(decision)
        self.lr = self.own.lr
        self.own.apply(
            self.sums.of(decision.version), lr_scale=decision.lr_scale, ticks=decision.ticks
        )
        self.ledger.note(decision)
        self._set_mark()
        self.ahead.pop(decision.version, None)

    def _apply_rows(self, decision: Decision) -> None:
        """Before the blocks, which move the learning rate on."""
        if self.rows is not None:
            assert self.held.placement is not None
            servers, base_lr = self.held.placement.servers, self.train_state.base_lr
            self.rows.apply(decision, servers, lr=self.own.lr, base_lr=base_lr)

    def _set_mark(self) -> None:
        placement = self.held.placement
        if placement is not None:
            me, count = placement.servers.index(self.name), len(placement.servers)
            self.params.set_mark(self.ledger.version, server=me, servers=count)

    def apply_replica(self, owner: str, decision: Decision) -> None:
        block_store = self.held.replicas[owner]
        sums = self.others[owner].of(decision.version)
        block_store.apply(sums, lr_scale=decision.lr_scale, ticks=decision.ticks)
        self.held.versions[owner] = decision.version
        if decision.version > self.ledger.version:
            self.ahead[decision.version] = decision

    def _catch_up_replica(self, owner: str, block_store: BlockStore, decision: Decision) -> None:
        others = self.others.get(owner)
        if others is None or not others.has(decision.version):
            if others is None or self.shared:  # never into the memory of its owner
                others = self.others[owner] = GradientSums([FlatTensors.private(self.layout)] * 2)
            self.add_up(decision, others.of(decision.version), block_store.runs)
            scale(others.of(decision.version), block_store.runs, decision.factor)
        self.apply_replica(owner, decision)

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
