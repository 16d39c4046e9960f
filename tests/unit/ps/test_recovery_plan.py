"""Changes of membership: whoever dies or joins, whenever, every shard ends where it should, or is lost
and that is said."""

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
    """What a server holds by the word of one view."""

    view: int = 0
    placement: Placement | None = None
    replicas: dict[str, int] = field(default_factory=dict)


@dataclass
class Site:
    """A server, as far as settling is concerned: which versions of what it holds."""

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
        """In whatever role, and as it should be."""
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
        for keeper, owner in plan.stale:
            if keeper == self.name:
                self.held.replicas.pop(owner, None)
        assert all(version <= target for version in self.held.replicas.values())
        assert self.version <= target
        self.version = target
        self.held.replicas = dict.fromkeys(self.held.replicas, target)


class Town:
    """Servers that come and go, one plan after the other."""

    def __init__(self, layout: BlockLayout, *, replicas: int, chance: random.Random) -> None:
        self.layout, self.replicas, self.chance = layout, replicas, chance
        self.sites: list[Site] = []
        self.view = self.count = 0

    def join(self) -> None:
        self.sites.append(Site(f"s{self.count}", f"host{self.count % 3}"))
        self.count += 1

    def lose(self) -> Site:
        return self.sites.pop(self.chance.randrange(len(self.sites)))

    def is_lost(self) -> bool:
        """Some shard is with nobody."""
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
        """A view: plan, catch up, move, be ready. Who is ready has heard nothing of go."""
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
        """What stands is the newest view that anybody left has heard go of, and the newest version."""
        assert plan.standing == max(site.held.view for site in self.sites)
        if plan.standing:
            there = [s for s in statuses if plan.standing in (s.view, s.prepared)]
            assert plan.ledger.version == max(s.ledger.version for s in there)
            assert len({s.placement for s in there if s.view == plan.standing}) == 1
        assert plan.placement.servers == tuple(site.name for site in self.sites)

    def check_moves(self, plan: RecoveryPlan) -> None:
        sites = {site.name: site for site in self.sites}
        moves: dict[tuple[int, str], BlockMove] = {(m.shard, m.role): m for m in plan.moves}
        assert len(moves) == len(plan.moves), "nobody gets a shard twice"
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
        assert not moves, "nothing travels for nothing"

    def go(self, count: int | None = None) -> None:
        """So many of them hear it, in the order of the view; all."""
        for site in self.sites[:count]:
            assert site.coming is not None
            site.held, site.coming = site.coming, None

    def work(self) -> None:
        """Updates, of which not everybody has got as far as the others when it ends."""
        newest = self.sites[0].version + self.chance.randrange(5)
        for site in self.sites:
            site.version = max(site.version, newest - self.chance.randrange(3))
        versions = {site.name: site.version for site in self.sites}
        for site in self.sites:
            for owner, before in site.held.replicas.items():
                version = max(before, versions[owner] - self.chance.randrange(3))
                site.held.replicas[owner] = version

    def live(self) -> None:
        """One change of membership after the other, some of them interrupted by the next."""
        for _ in range(self.chance.randint(1, 8)):
            if len(self.sites) < 6 and self.chance.random() < 0.4:
                self.join()
            self.settle()
            match self.chance.choice(("works", "works", "dies before", "dies while saying")):
                case "works":
                    self.go()
                    self.work()
                case "dies while saying":
                    # The lead tells the others first: some have heard it, and it has not.
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
    """There is nothing to go on with."""


layouts = st.builds(
    lambda sizes: BlockLayout.of(
        [FlatParameter(f"p{i}", n, 4) for i, n in enumerate(sizes)], block_bytes=256
    ),
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
)


@settings(max_examples=150)
@given(layouts, st.integers(1, 5), st.sampled_from([1, 1, 1, 0]), st.integers(0, 2**32))
def test_every_shard_ends_with_its_server_and_its_replica_or_its_loss_is_said(
    layout: BlockLayout, servers: int, replicas: int, seed: int
) -> None:
    town = Town(layout, replicas=replicas, chance=random.Random(seed))
    for _ in range(servers):
        town.join()
    try:
        town.live()
    except _Lost:
        return


# One by one -------------------------------------------------------------------------------------


@pytest.fixture
def town() -> Town:
    """Three servers that have begun their first view."""
    layout = BlockLayout.of([FlatParameter("p", 900, 4)], block_bytes=256)
    town = Town(layout, replicas=1, chance=random.Random(0))
    for _ in range(3):
        town.join()
    town.settle()
    town.go()
    return town


def plan_of(town: Town) -> RecoveryPlan:
    return make_plan([site.status() for site in town.sites], town.layout, replicas=1)


def test_nothing_moves_when_nothing_changes(town: Town) -> None:
    plan = plan_of(town)
    assert (plan.standing, plan.moves, plan.stale) == (1, (), ())
    assert plan.placement == town.sites[0].status().placement


def test_of_a_dead_server_only_what_must_travel_does(town: Town) -> None:
    dead = town.sites.pop(1)
    plan = plan_of(town)
    assert dead.name not in plan.placement.servers
    assert all(move.source != dead.name for move in plan.moves)
    assert all(move.role == "replica" for move in plan.moves), (
        "replicas were promoted where they were"
    )


def test_two_deaths_at_once_are_a_loss_that_names_them(town: Town) -> None:
    del town.sites[:2]
    with pytest.raises(ManyhandsError, match=r"was on s\d and its replica on s\d, and is lost"):
        plan_of(town)


def test_a_death_without_replicas_is_a_loss() -> None:
    town = Town(BlockLayout.of([FlatParameter("p", 900, 4)]), replicas=0, chance=random.Random(0))
    town.join()
    town.settle()
    town.go()
    town.join()
    town.sites.pop(0)
    town.sites[0].version = 3  # it has seen the parameters of the dead, if not held them
    with pytest.raises(ManyhandsError, match="gone: the weights are lost"):
        plan_of(town)


def test_who_has_just_come_begins_afresh_if_nobody_has_learnt_anything() -> None:
    town = Town(BlockLayout.of([FlatParameter("p", 900, 4)]), replicas=1, chance=random.Random(0))
    town.join()
    town.join()
    town.settle()  # and nobody hears go
    plan = plan_of(town)
    assert (plan.standing, plan.moves) == (0, ())


def test_a_replica_behind_its_living_server_is_sent_anew(town: Town) -> None:
    keeper, owner = next((s, o) for s in town.sites for o in s.held.replicas)
    for site in town.sites:
        site.version = 5
        site.held.replicas = dict.fromkeys(site.held.replicas, 5)
    keeper.held.replicas[owner] = 4
    plan = plan_of(town)
    assert plan.stale == ((keeper.name, owner),)
    assert plan.moves
    assert {(m.source, m.target, m.role) for m in plan.moves} == {(owner, keeper.name, "replica")}


def test_a_replica_that_was_given_up_in_a_view_that_never_began_is_not_counted_on(
    town: Town,
) -> None:
    keeper, owner = next((s, o) for s in town.sites for o in s.held.replicas)
    for site in town.sites:
        site.version = 5
        site.held.replicas = dict.fromkeys(site.held.replicas, 5)
    keeper.held.replicas[owner] = 4
    town.settle()  # the keeper gives the stale replica up, and nobody hears go
    assert owner not in keeper.held.replicas
    plan = plan_of(town)
    moved = {(m.source, m.target, m.role) for m in plan.moves}
    assert (owner, keeper.name, "replica") in moved, "it is sent anew"
    town.sites = [site for site in town.sites if site.name != owner]
    with pytest.raises(ManyhandsError, match=f"was on {owner}"):
        plan_of(town)


def test_what_one_has_heard_go_of_stands_for_all(town: Town) -> None:
    town.join()
    town.settle()
    lead, heard, *others = town.sites
    heard.held, heard.coming = heard.coming or Held(), None
    town.sites.remove(lead)
    assert [site.held.view for site in town.sites] == [2, 1, 0]
    assert plan_of(town).standing == 2
    town.settle()
    assert all(site.held.view == 2 for site in others), "they took what they were prepared for"


def test_a_plan_nobody_has_heard_go_of_is_void(town: Town) -> None:
    before = plan_of(town).placement
    town.join()
    town.settle()
    town.sites.pop(0)
    plan = plan_of(town)
    assert plan.standing == 1
    assert {site.status().placement for site in town.sites} == {before, None}


def test_a_move_is_of_blocks_that_its_source_holds(town: Town) -> None:
    town.join()
    plan = plan_of(town)
    newcomer = town.sites[-1].name
    assert all(isinstance(move, BlockMove) and move.target != move.source for move in plan.moves)
    assert {move.target for move in plan.moves if move.role == "own"} == {newcomer}
