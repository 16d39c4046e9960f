"""Changes of membership: after any deaths and joins, every shard is on its servers, or is reported lost."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import ManyhandsError
from manyhands.ps.blocks import BlockLayout, FlatParameter
from manyhands.ps.placement import Placement
from manyhands.ps.policies import Contribution, Decision, Ledger
from manyhands.ps.recovery_plan import BlockMove, RecoveryPlan, ServerStatus, make_plan
from manyhands.transport.fields import read, write


def ledger_at(version: int) -> Ledger:
    ledger = Ledger()
    for number in range(1, version + 1):
        ledger.note(Decision(number, (Contribution("w", number, 0, number, 0, 1.0, 1.0, (1, 1)),)))
    return ledger


@dataclass
class Held:
    """Blocks that a server holds in one view."""

    view: int = 0
    placement: Placement | None = None
    replicas: dict[str, int] = field(default_factory=dict)


@dataclass
class SimulatedServer:
    """Simulated server: the blocks that it holds, and their versions."""

    name: str
    host: str
    version: int = 0
    held: Held = field(default_factory=Held)
    coming: Held | None = None

    def status(self) -> ServerStatus:
        known = max([self.version, *self.held.replicas.values()])
        told = ServerStatus(
            server=self.name,
            host=self.host,
            view=self.held.view,
            prepared=self.coming.view if self.coming else 0,
            placement=self.held.placement.to_record() if self.held.placement else None,
            ledger=ledger_at(known),
            replicas=dict(self.held.replicas),
            seen=known,
        )
        return read(ServerStatus, json.loads(json.dumps(write(told))))

    def holds(self, shard: int) -> bool:
        """Return whether an up-to-date copy of the shard is here, own or replica."""
        if self.held.placement is None:
            return False
        owner, *second = self.held.placement.holders(shard)
        return self.name == owner or (self.name in second and owner in self.held.replicas)

    def catch_up(self, plan: RecoveryPlan) -> None:
        if self.coming is not None and self.coming.view == plan.standing:
            self.held = self.coming
        self.coming = None
        target = plan.ledger.version
        if self.held.view != plan.standing:
            self.held = Held()
        for holder, owner in plan.stale:
            if holder == self.name:
                self.held.replicas.pop(owner, None)
        assert all(version <= target for version in self.held.replicas.values())
        assert self.version <= target
        self.version = target
        self.held.replicas = dict.fromkeys(self.held.replicas, target)


class SimulatedGroup:
    """Simulated servers that join and die, one plan after the other."""

    def __init__(self, layout: BlockLayout, *, replicas: int, chance: random.Random) -> None:
        self.layout, self.replicas, self.chance = layout, replicas, chance
        self.sites: list[SimulatedServer] = []
        self.view = self.count = 0

    def join(self) -> None:
        self.sites.append(SimulatedServer(f"s{self.count}", f"host{self.count % 3}"))
        self.count += 1

    def lose(self) -> SimulatedServer:
        return self.sites.pop(self.chance.randrange(len(self.sites)))

    def is_lost(self) -> bool:
        """Return whether some shard has no holder."""
        heard = [site for site in self.sites if site.held.view]
        if not heard:
            return any(site.version for site in self.sites)
        standing = max(site.held.view for site in heard)
        now = []
        for site in self.sites:
            if site.coming is not None and site.coming.view == standing:
                now.append(replace(site, held=site.coming))
            elif site.held.view == standing:
                now.append(site)
        return any(not any(s.holds(x) for s in now) for x in range(len(self.layout.shards)))

    def settle(self) -> None:
        """Prepare a view: plan, catch up, move. No server has received Go yet."""
        self.view += 1
        statuses = [site.status() for site in self.sites]
        if self.is_lost():
            with pytest.raises(ManyhandsError, match="lost"):
                make_plan(statuses, self.layout, replicas=self.replicas)
            raise _Lost
        plan = make_plan(statuses, self.layout, replicas=self.replicas)
        plan = read(RecoveryPlan, json.loads(json.dumps(write(plan))))
        placement = Placement.from_record(plan.placement, layout=self.layout)
        self.check(plan, statuses)
        for site in self.sites:
            site.catch_up(plan)
        self.check_moves(plan)
        for site in self.sites:
            owners = {
                owner
                for shard in range(len(self.layout.shards))
                for owner, *second in [placement.holders(shard)]
                if site.name in second
            }
            replicas = dict.fromkeys(owners, site.version)
            site.coming = Held(self.view, placement, replicas)

    def check(self, plan: RecoveryPlan, statuses: Sequence[ServerStatus]) -> None:
        """Check that the plan uses the newest view with a Go at any survivor, and the newest version."""
        assert plan.standing == max(site.held.view for site in self.sites)
        if plan.standing:
            there = [s for s in statuses if plan.standing in (s.view, s.prepared)]
            assert plan.ledger.version == max(s.ledger.version for s in there)
            assert len({s.placement for s in there if s.view == plan.standing}) == 1
        assert plan.placement.servers == tuple(site.name for site in self.sites)

    def check_moves(self, plan: RecoveryPlan) -> None:
        sites = {site.name: site for site in self.sites}
        moves: dict[tuple[int, str], BlockMove] = {(m.shard, m.role): m for m in plan.moves}
        assert len(moves) == len(plan.moves), "no server gets a shard twice"
        placement = Placement.from_record(plan.placement, layout=self.layout)
        for shard in range(len(self.layout.shards)):
            holders = placement.holders(shard)
            assert len(holders) == (2 if self.replicas and len(self.sites) > 1 else 1)
            assert len(set(holders)) == len(holders)
            for name, role in zip(holders, ("own", "replica"), strict=False):
                move = moves.pop((shard, role), None)
                if move is not None:
                    assert sites[move.source].holds(shard), "a good source"
                    assert move.target == name != move.source
                else:
                    assert not plan.standing or sites[name].holds(shard)
        assert not moves, "no unnecessary moves"

    def go(self, count: int | None = None) -> None:
        """Deliver Go to the first `count` servers of the view; by default to all."""
        for site in self.sites[:count]:
            assert site.coming is not None
            site.held, site.coming = site.coming, None

    def work(self) -> None:
        """Apply some updates; servers end up at different versions."""
        newest = self.sites[0].version + self.chance.randrange(5)
        for site in self.sites:
            site.version = max(site.version, newest - self.chance.randrange(3))
        versions = {site.name: site.version for site in self.sites}
        for site in self.sites:
            for owner, before in site.held.replicas.items():
                version = max(before, versions[owner] - self.chance.randrange(3))
                site.held.replicas[owner] = version

    def live(self) -> None:
        """Change the membership several times; some changes are interrupted by the next."""
        for _ in range(self.chance.randint(1, 8)):
            if len(self.sites) < 6 and self.chance.random() < 0.4:
                self.join()
            self.settle()
            match self.chance.choice(("works", "works", "dies before", "dies while sending")):
                case "works":
                    self.go()
                    self.work()
                case "dies while sending":
                    # The leader sends Go before it begins the view itself: it dies when some have it.
                    told = self.chance.sample(
                        self.sites[1:], self.chance.randrange(len(self.sites))
                    )
                    for site in told:
                        site.held, site.coming = site.coming or Held(), None
                    self.sites.pop(0)
                    self.refill()
                    continue
            if self.chance.random() < 0.7:
                self.lose()
            self.refill()
        self.settle()

    def refill(self) -> None:
        while not self.sites:
            self.join()


class _Lost(Exception):
    """Shards are lost: the simulation ends."""


layouts = st.builds(
    lambda sizes: BlockLayout.of(
        [FlatParameter(f"p{i}", n, 4) for i, n in enumerate(sizes)], block_bytes=256
    ),
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
)


@settings(max_examples=150)
@given(layouts, st.integers(1, 5), st.sampled_from([1, 1, 1, 0]), st.integers(0, 2**32))
def test_every_shard_reaches_its_server_and_replica_or_is_reported_lost(
    layout: BlockLayout, servers: int, replicas: int, seed: int
) -> None:
    group = SimulatedGroup(layout, replicas=replicas, chance=random.Random(seed))
    for _ in range(servers):
        group.join()
    try:
        group.live()
    except _Lost:
        return


# One by one -------------------------------------------------------------------------------------


@pytest.fixture
def group() -> SimulatedGroup:
    """Three servers that have begun their first view."""
    layout = BlockLayout.of([FlatParameter("p", 900, 4)], block_bytes=256)
    group = SimulatedGroup(layout, replicas=1, chance=random.Random(0))
    for _ in range(3):
        group.join()
    group.settle()
    group.go()
    return group


def plan_of(group: SimulatedGroup) -> RecoveryPlan:
    return make_plan([site.status() for site in group.sites], group.layout, replicas=1)


def test_nothing_moves_when_nothing_changes(group: SimulatedGroup) -> None:
    plan = plan_of(group)
    assert (plan.standing, plan.moves, plan.stale) == (1, (), ())
    assert plan.placement == group.sites[0].status().placement


def test_after_a_death_only_the_necessary_shards_move(group: SimulatedGroup) -> None:
    dead = group.sites.pop(1)
    plan = plan_of(group)
    assert dead.name not in plan.placement.servers
    assert all(move.source != dead.name for move in plan.moves)
    assert all(move.role == "replica" for move in plan.moves), (
        "replicas were promoted where they were"
    )


def test_the_loss_of_both_holders_names_them(group: SimulatedGroup) -> None:
    del group.sites[:2]
    with pytest.raises(ManyhandsError, match=r"is lost: it was on s\d and its replica on s\d\."):
        plan_of(group)


def test_a_death_without_replicas_loses_the_weights() -> None:
    group = SimulatedGroup(
        BlockLayout.of([FlatParameter("p", 900, 4)]), replicas=0, chance=random.Random(0)
    )
    group.join()
    group.settle()
    group.go()
    group.join()
    group.sites.pop(0)
    group.sites[0].version = 3  # it has seen the dead server's parameters, but did not hold them
    with pytest.raises(ManyhandsError, match="gone: the weights are lost"):
        plan_of(group)


def test_new_servers_start_fresh_if_nothing_was_trained() -> None:
    group = SimulatedGroup(
        BlockLayout.of([FlatParameter("p", 900, 4)]), replicas=1, chance=random.Random(0)
    )
    group.join()
    group.join()
    group.settle()  # no server receives Go
    plan = plan_of(group)
    assert (plan.standing, plan.moves) == (0, ())


def test_a_replica_behind_its_living_server_is_sent_again(group: SimulatedGroup) -> None:
    holder, owner = next((s, o) for s in group.sites for o in s.held.replicas)
    for site in group.sites:
        site.version = 5
        site.held.replicas = dict.fromkeys(site.held.replicas, 5)
    holder.held.replicas[owner] = 4
    plan = plan_of(group)
    assert plan.stale == ((holder.name, owner),)
    assert plan.moves
    assert {(m.source, m.target, m.role) for m in plan.moves} == {(owner, holder.name, "replica")}


def test_a_replica_discarded_for_a_view_that_never_began_is_not_used(
    group: SimulatedGroup,
) -> None:
    holder, owner = next((s, o) for s in group.sites for o in s.held.replicas)
    for site in group.sites:
        site.version = 5
        site.held.replicas = dict.fromkeys(site.held.replicas, 5)
    holder.held.replicas[owner] = 4
    group.settle()  # the holder discards the stale replica; no server receives Go
    assert owner not in holder.held.replicas
    plan = plan_of(group)
    moved = {(m.source, m.target, m.role) for m in plan.moves}
    assert (owner, holder.name, "replica") in moved, "it is sent anew"
    group.sites = [site for site in group.sites if site.name != owner]
    with pytest.raises(ManyhandsError, match=f"was on {owner}"):
        plan_of(group)


def test_a_view_is_valid_if_any_server_has_received_go(group: SimulatedGroup) -> None:
    group.join()
    group.settle()
    leader, heard, *others = group.sites
    heard.held, heard.coming = heard.coming or Held(), None
    group.sites.remove(leader)
    assert [site.held.view for site in group.sites] == [2, 1, 0]
    assert plan_of(group).standing == 2
    group.settle()
    assert all(site.held.view == 2 for site in others), "they took what they were prepared for"


def test_a_plan_without_go_is_discarded(group: SimulatedGroup) -> None:
    before = plan_of(group).placement
    group.join()
    group.settle()
    group.sites.pop(0)
    plan = plan_of(group)
    assert plan.standing == 1
    assert {site.status().placement for site in group.sites} == {before, None}


def test_the_source_of_a_move_holds_its_blocks(group: SimulatedGroup) -> None:
    group.join()
    plan = plan_of(group)
    newcomer = group.sites[-1].name
    assert all(isinstance(move, BlockMove) and move.target != move.source for move in plan.moves)
    assert {move.target for move in plan.moves if move.role == "own"} == {newcomer}
