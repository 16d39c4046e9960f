"""Servers without processes or links: states that recover, apply updates, fall behind, die and join.

A reference, one store of the whole model, gets every update. After each change of membership, every server
and every replica must equal it bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from manyhands.compute.train_state import TrainState
from manyhands.ps.block_store import (
    BlockState,
    BlockStore,
    FlatTensors,
    GradientSums,
    ScheduleClock,
    Span,
    add_up,
)
from manyhands.ps.blocks import BlockLayout, FlatParameter
from manyhands.ps.model_layout import layout_of, pieces_of
from manyhands.ps.placement import Placement
from manyhands.ps.policies import Contribution, Decision
from manyhands.ps.recovery_plan import RecoveryPlan, make_plan
from manyhands.ps.server_state import ServerState, SharedServerState
from manyhands.ps.staleness import MomentumRule
from manyhands.ps.tensor_messages import TensorMessages, pack
from manyhands.ps.updates import apply, apply_replica, catch_up, make_sum

Make = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(
        [{"params": p[::2], "weight_decay": 0.1}, {"params": p[1::2], "lr": 0.02}], lr=0.01
    ),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
"""Three elementwise optimizers, the last with two groups, and one that works on whole tensors."""
EVERY_KIND: dict[str, Make] = {
    **OPTIMIZERS,
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "named": lambda p: torch.optim.SGD(
        [
            {"params": [("a", p[0]), ("b", p[1])], "lr": 0.2},
            {"params": list(zip("cdef", p[2:], strict=True))},
        ],
        lr=0.1,
        momentum=0.9,
    ),
}
"""Optimizers with different kinds of state: none, scalars, per element, and all of these."""


def schedule(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def make_train_state(name: str = "sgd", *, scheduled: bool = True, seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 11), nn.Linear(11, 7), nn.Linear(7, 3))
    optimizer = EVERY_KIND[name](list(model.parameters()))
    optimizer._opt_called = True  # type: ignore[attr-defined]  # as learners and servers do
    make = schedule if scheduled else lambda optimizer: None
    return TrainState(
        model,
        optimizer,
        loss=lambda model, batch: model(batch).sum(),
        scheduler=make(optimizer),
        schedule_of=lambda optimizer, num_steps: make(optimizer),
    )


def layout_for(train_state: TrainState, *, block_bytes: int = 128) -> BlockLayout:
    """The job's layout, cut finer than it would be."""
    rough = layout_of(train_state.model, train_state.optimizer)
    pieces: tuple[FlatParameter, ...] = rough.pieces
    return BlockLayout.of(pieces, block_bytes=block_bytes, whole_tensors=rough.whole_tensors)


def filled(flat: FlatTensors, train_state: TrainState) -> FlatTensors:
    """Copy the job's parameters into `flat`."""
    for name, parameter in pieces_of(train_state.model, train_state.optimizer).items():
        flat.piece(name).copy_(parameter.detach().reshape(-1))
    return flat


def noise(layout: BlockLayout, generator: torch.Generator) -> FlatTensors:
    """A gradient: random, and zero in the padding, as a backward leaves it."""
    flat = FlatTensors.private(layout)
    for piece in layout.pieces:
        flat.piece(piece.name).copy_(torch.randn(piece.numel, generator=generator))
    return flat


def whole_store(
    train_state: TrainState, flat: FlatTensors, *, momentum_rule: MomentumRule = "none"
) -> BlockStore:
    """A store of all blocks, as the job has them."""
    states = {b.number: BlockState(flat.block(b.number), {}) for b in flat.layout.blocks}
    return BlockStore(train_state, flat, states, ticks=0, momentum_rule=momentum_rule)


def assert_same(mine: BlockState, theirs: BlockState, what: str) -> None:
    assert torch.equal(mine.params.reshape(-1), theirs.params.reshape(-1)), f"{what}: parameters"
    assert mine.state.keys() == theirs.state.keys(), what
    for key, value in mine.state.items():
        other = theirs.state[key]
        same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
        assert same, f"{what}: {key}"


class ServerGroup:
    """Server states on one host (`shared`: with common memory) or on several, and the reference."""

    def __init__(self, name: str, *, shared: bool, chance: random.Random, block_bytes: int) -> None:
        self.name, self.shared, self.chance = name, shared, chance
        self.reference_trainee = make_train_state(name)
        self.layout = layout_for(self.reference_trainee, block_bytes=block_bytes)
        self.reference = whole_store(
            self.reference_trainee,
            filled(FlatTensors.private(self.layout), self.reference_trainee),
            momentum_rule="ahead",
        )
        self.generator = torch.Generator().manual_seed(chance.randrange(2**31))
        self.server_states: list[ServerState] = []
        self.flats: list[FlatTensors] = []
        self.view = self.count = self.version = 0
        self.progress = Fraction()
        self.workers = ["w0", "w1", "w2"]
        self.slots: dict[str, list[FlatTensors]] = {
            w: [FlatTensors.private(self.layout) for _ in range(2)] for w in self.workers
        }

    # Members.

    def join(self) -> ServerState:
        train_state = make_train_state(self.name)
        if not self.shared:
            params = filled(FlatTensors.private(self.layout), train_state)
        elif self.server_states:
            segment = self.server_states[0].params.segment
            assert segment is not None
            params = FlatTensors.attached(self.layout, segment.address)
        else:
            params = filled(FlatTensors.shared(self.layout, label="test"), train_state)
        server_state = (SharedServerState if self.shared else ServerState)(
            f"s{self.count}",
            "host" if self.shared else f"host{self.count}",
            train_state,
            params,
            ScheduleClock(train_state.scheduler),
            replicas=1,
            momentum_rule="ahead",
        )
        self.count += 1
        self.flats += [params, *server_state.sums.flats]
        self.server_states.append(server_state)
        return server_state

    def begin(self) -> None:
        """The view that was settled begins, and the workers enter it."""
        for server_state in self.server_states:
            server_state.begin()
            for worker in self.workers:
                self.enter(server_state, worker)

    def enter(self, server_state: ServerState, worker: str) -> None:
        """Inside a host all read the same memory; otherwise each has the runs that were sent to it."""
        if self.shared:
            server_state.gradients[worker] = self.slots[worker]
        else:
            server_state.gradients[worker] = [_unknown(self.layout) for _ in range(2)]

    def lose(self, number: int) -> None:
        self.server_states.pop(number)

    def close(self) -> None:
        for flat in self.flats:
            flat.close()

    # A view begins, as in view_change.py.

    def settle(self) -> RecoveryPlan:
        self.view += 1
        statuses = [server_state.status() for server_state in self.server_states]
        plan = make_plan(statuses, self.layout, replicas=1)
        placement = Placement.from_record(plan.placement, layout=self.layout)
        for server_state in self.server_states:
            catch_up(server_state, plan)
            assert server_state.ledger.version == plan.ledger.version
        arriving = {server_state.name: TensorMessages() for server_state in self.server_states}
        by_name = {server_state.name: server_state for server_state in self.server_states}
        for move in plan.moves:
            for block in self.layout.blocks_in(move.shard):
                block_state = by_name[move.source].block_state(block.number)
                for head, payload in pack(block.number, block_state, role=move.role):
                    copied = memoryview(bytearray(payload)) if payload is not None else None
                    arriving[move.target].add(head, copied)
        for server_state in self.server_states:
            complete = arriving[server_state.name].complete
            server_state.prepare(self.view, placement, complete, fresh=not plan.standing)
        return plan

    def go(self) -> None:
        self.begin()
        for server_state in self.server_states:
            for owner in self.server_states:
                if owner.name in server_state.held.replicas:
                    server_state.others[owner.name] = self.sums_of(owner)

    def sums_of(self, owner: ServerState) -> GradientSums:
        if not self.shared:
            return GradientSums([FlatTensors.private(self.layout) for _ in range(2)])
        theirs = []
        for flat in owner.sums.flats:
            assert flat.segment is not None
            theirs.append(FlatTensors.attached(self.layout, flat.segment.address))
        self.flats += theirs
        return GradientSums(theirs)

    # Updates, as in updates.py.

    def decide(self, *, factor: float = 1.0, for_all: bool = False) -> Decision:
        """Decide on some workers' gradients (`for_all`: on the plain sum of all workers' gradients), put them
        where the servers find them, and apply the decision to the reference."""
        self.version += 1
        given, sources = [], []
        some = self.chance.sample(self.workers, self.chance.randint(1, len(self.workers)))
        if for_all:
            some = list(self.workers)
        for worker in some:
            samples = self.chance.randint(1, 8)
            whole = 8
            if for_all:
                samples, whole = 8, 8 * len(self.workers)
            share, slot = (samples, whole), self.version % 2
            gradient = noise(self.layout, self.generator)
            self.slots[worker][slot].copy_(gradient)
            if not self.shared:
                for server_state in self.server_states:
                    assert server_state.held.own is not None
                    for span in server_state.held.own.spans:
                        span.of(server_state.gradients[worker][slot]).copy_(span.of(gradient))
            sources.append(gradient)
            self.progress += Fraction(*share)
            given.append(
                Contribution(
                    worker, self.version, slot, self.version, 0, float(samples), float(whole), share
                )
            )
        decision = Decision(
            self.version,
            tuple(given),
            lr_scale=self.chance.choice([1.0, 0.5]),
            progress=(self.progress.numerator, self.progress.denominator),
            factor=factor,
        )
        sums = FlatTensors.private(self.layout)
        add_up(sums, self.reference.spans, sources, decision.coefficients())
        _scale(sums, self.reference.spans, factor)
        self.reference.apply(
            sums, lr_scale=decision.lr_scale, part=decision.part, ticks=decision.ticks
        )
        return decision

    def sum_up(self, server_state: ServerState, decision: Decision) -> None:
        """Its sum is made."""
        assert server_state.held.own is not None
        sums = server_state.sums.of(decision.version)
        make_sum(server_state, decision, sums, server_state.held.own.spans)
        server_state.sums.note(decision.version)

    def hand_over(self, owner: ServerState, holder: ServerState, decision: Decision) -> None:
        """A holder has the sum of another server."""
        theirs, version = holder.others[owner.name], decision.version
        if not self.shared:
            for span in holder.held.replicas[owner.name].spans:
                span.of(theirs.of(version)).copy_(span.of(owner.sums.of(version)))
        theirs.note(version)

    def holders_of(self, owner: ServerState) -> list[ServerState]:
        return [e for e in self.server_states if owner.name in e.held.replicas]

    def finish(self, decision: Decision) -> None:
        """Everybody does all of it."""
        for server_state in self.server_states:
            self.sum_up(server_state, decision)
            for holder in self.holders_of(server_state):
                self.hand_over(server_state, holder, decision)
        for server_state in self.server_states:
            apply(server_state, decision)
            for owner in server_state.held.replicas:
                apply_replica(server_state, owner, decision)

    # What must hold.

    def check(self) -> None:
        """After `settle`: all that is ready for the next view is as it should be."""
        for server_state in self.server_states:
            assert server_state.ledger.version == self.version
            assert server_state.ledger.progress == self.progress
            coming = server_state.coming
            assert coming is not None
            assert coming.own is not None
            block_stores = {"own": coming.own, **coming.replicas}
            for whose, block_store in block_stores.items():
                for number in block_store.numbers:
                    what = f"block {number} of {whose} at {server_state.name}"
                    assert_same(block_store.take(number), self.reference.take(number), what)
        held = [n for e in self.server_states for n in _numbers(e)]
        assert sorted(held) == [block.number for block in self.layout.blocks]


def _numbers(server_state: ServerState) -> list[int]:
    assert server_state.coming is not None
    assert server_state.coming.own is not None
    return server_state.coming.own.numbers


def _unknown(layout: BlockLayout) -> FlatTensors:
    """What was never sent must never be read."""
    flat = FlatTensors.private(layout)
    for buffer in flat.buffers:
        buffer.fill_(float("nan"))
    return flat


def _scale(sums: FlatTensors, spans: list[Span], factor: float) -> None:
    if factor != 1.0:
        for span in spans:
            span.of(sums).mul_(factor)
