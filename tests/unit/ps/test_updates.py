"""From decisions to updates: servers on real links, with messages in any order and deaths."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from server_states import ServerGroup

from manyhands.errors import LinkError, LinkTimeout
from manyhands.ps.mode import PsMode
from manyhands.ps.policies import Decision, SyncPolicy
from manyhands.ps.protocol import BETWEEN_SERVERS
from manyhands.ps.server_state import ServerState
from manyhands.ps.sessions import Peer
from manyhands.ps.spans import travelling
from manyhands.ps.updates import MessageExchange, NetworkExchange, UpdatePipeline
from manyhands.transport import Link, Listener, connect

LONG_S = 20.0


class Servers:
    """The pipelines of a group of servers, each linked with each; messages are delivered by hand."""

    def __init__(
        self,
        group: ServerGroup,
        folder: Path,
        *,
        clip_norm: float | None = None,
        for_all: bool = False,
    ) -> None:
        self.group = group
        self.stack = contextlib.ExitStack()
        group.settle()
        group.begin()
        mode = PsMode(
            make_policy=SyncPolicy, rounds=True, slots=1, clip_norm=clip_norm, for_all=for_all
        )
        names = [server_state.name for server_state in group.server_states]
        links = self._links(names, folder)
        self.far = {(a, b): links[b, a] for a, b in links}
        """Where `b` hears `a`."""
        self.updates: dict[str, UpdatePipeline] = {}
        self.exchanges: dict[str, MessageExchange] = {}
        self.applied: dict[str, list[Decision]] = {name: [] for name in names}
        self.links = links
        for server_state in group.server_states:
            placement = server_state.held.placement
            assert placement is not None
            peers = {
                other.name: Peer(
                    other.name, links[server_state.name, other.name], _addresses(other)
                )
                for other in group.server_states
                if other is not server_state
            }
            server_state.attach_sums({name: peer.sums or () for name, peer in peers.items()})
            exchange = (
                MessageExchange(server_state, mode, placement, peers)
                if group.shared
                else NetworkExchange(server_state, mode, placement, peers, workers=group.workers)
            )
            self.exchanges[server_state.name] = exchange
            self.updates[server_state.name] = UpdatePipeline(
                server_state, mode, exchange, applied=self._note(server_state.name)
            )
            for sums in server_state.others.values():
                group.flats += sums.flats

    def _note(self, name: str) -> Callable[[Decision, float], None]:
        return lambda decision, lr: self.applied[name].append(decision)

    def _links(self, names: list[str], folder: Path) -> dict[tuple[str, str], Link]:
        links: dict[tuple[str, str], Link] = {}
        listener = self.stack.enter_context(Listener(f"unix:{folder}/s"))
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                links[a, b] = self.stack.enter_context(
                    connect(listener.address, timeout_s=LONG_S, peer=b)
                )
                links[b, a] = self.stack.enter_context(listener.accept(LONG_S))
        return links

    def num_spans(self, name: str) -> int:
        (state,) = [each for each in self.group.server_states if each.name == name]
        assert state.held.placement is not None
        return len(travelling(state.held.placement, name)[0])

    def sent_partial_sums(self) -> list[bool]:
        """For each server that has blocks: whether sums were sent before a decision."""
        return [
            isinstance(exchange, NetworkExchange)
            and exchange._partial_sums is not None
            and any(partial.sent for partial in exchange._partial_sums._rounds.values())
            for name, exchange in self.exchanges.items()
            if self.num_spans(name)
        ]

    def decide(self, decision: Decision) -> None:
        for updates in self.updates.values():
            updates.enqueue(decision)

    def deliver(self, chance: random.Random) -> None:
        """All that is under way, and what follows from it: any link first, each in its order."""
        silent: set[tuple[str, str]] = set()
        while left := [pair for pair in self.far if pair not in silent and pair[1] in self.updates]:
            pair = chance.choice(left)
            if self.hear(*pair):
                silent.clear()
            else:
                silent.add(pair)

    def hear(self, a: str, b: str) -> bool:
        """One message of `a` to `b`, if there is one."""
        exchange = self.exchanges[b]
        if a in self.updates:
            wait_until_sent(self.exchanges[a])

        def place(head: Mapping[str, Any], nbytes: int) -> memoryview | None:
            return exchange.buffer_for(a, BETWEEN_SERVERS.read(head))

        try:
            message = self.far[a, b].recv(timeout_s=0.0, place=place)
        except (LinkTimeout, LinkError):
            return False
        exchange.handle(a, BETWEEN_SERVERS.read(message.message))
        self.updates[b].advance()
        return True

    def kill(self, name: str) -> ServerState:
        """Its links break at once; what it has sent is heard to its end."""
        for pair, link in self.links.items():
            if pair[0] == name:
                link.close()
        self.exchanges[name].close()
        del self.updates[name], self.exchanges[name]
        server_state = next(e for e in self.group.server_states if e.name == name)
        self.group.server_states.remove(server_state)
        return server_state

    def survive(self, dead: str, chance: random.Random) -> int:
        """Kill a server and settle the others. Returns the version that all of them have then."""
        self.kill(dead)
        self.deliver(chance)
        for exchange in self.exchanges.values():
            exchange.close()
        newest = max(int(e.status().ledger.version) for e in self.group.server_states)
        self.group.settle()
        assert {each.ledger.version for each in self.group.server_states} == {newest}
        return newest


def wait_until_sent(exchange: MessageExchange) -> None:
    """Until all sums have left."""
    for channel in exchange._channels.values() if isinstance(exchange, NetworkExchange) else ():
        while channel._queue:
            time.sleep(0.0001)
        for writer in channel._writers:  # what it has taken is sent when its loop runs this
            sent = threading.Event()
            writer._loop.call(sent.set)
            assert sent.wait(LONG_S)


def _addresses(server_state: ServerState) -> list[str]:
    return [flat.segment.address for flat in server_state.sums.flats if flat.segment is not None]


@pytest.fixture(params=[True, False], ids=["one host", "several hosts"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@contextlib.contextmanager
def three(
    shared: bool, folder: Path, *, clip_norm: float | None = None, for_all: bool = False
) -> Iterator[Servers]:
    group = ServerGroup("adam", shared=shared, chance=random.Random(3), block_bytes=128)
    for _ in range(3):
        group.join()
    servers = Servers(group, folder, clip_norm=clip_norm, for_all=for_all)
    with servers.stack:
        yield servers
    for exchange in servers.exchanges.values():
        exchange.close()
    group.close()


def test_all_servers_apply_every_decision_in_any_order_of_messages(
    shared: bool, tmp_path: Path
) -> None:
    with three(shared, tmp_path) as servers:
        for seed in range(6):
            servers.decide(servers.group.decide())
            servers.deliver(random.Random(seed))
        for told in servers.applied.values():
            assert [decision.version for decision in told] == [1, 2, 3, 4, 5, 6]
        servers.group.settle()
        servers.group.check()


def test_a_sum_is_not_overwritten_before_its_replica_has_used_it(
    shared: bool, tmp_path: Path
) -> None:
    """Decided ahead: a server waits for who keeps its replicas after two updates."""
    with three(shared, tmp_path) as servers:
        group = servers.group
        group.workers = ["w0"]
        decision = group.decide()
        servers.decide(decision)
        assert {len(told) for told in servers.applied.values()} == {1 if shared else 0}
        for version in (2, 3, 4):
            again = Decision(version, decision.contributions, decision.lr_scale, decision.progress)
            servers.decide(again)
        assert {len(told) for told in servers.applied.values()} == {2 if shared else 0}
        servers.deliver(random.Random(0))
        assert {len(told) for told in servers.applied.values()} == {4}
        for server_state in group.server_states:
            assert set(server_state.held.versions.values()) == {4}


def test_clipping_uses_the_norm_of_the_whole_gradient(shared: bool, tmp_path: Path) -> None:
    with three(shared, tmp_path, clip_norm=0.5) as servers:
        group = servers.group
        decision = group.decide()
        gradients = [group.slots[g.worker][g.slot] for g in decision.contributions]
        whole = sum(
            c * torch.cat(flat.buffers)
            for c, flat in zip(decision.coefficients(), gradients, strict=True)
        )
        assert isinstance(whole, torch.Tensor)
        servers.decide(decision)
        servers.deliver(random.Random(1))
        (factor,) = {told[0].factor for told in servers.applied.values()}
        norm = float(whole.double().norm())
        assert factor == pytest.approx(0.5 / (norm + 1e-6))
        applied = torch.cat(
            [
                span.of(server_state.sums.of(1))
                for server_state in group.server_states
                if server_state.held.own is not None
                for span in server_state.held.own.spans
            ]
        )
        assert float(applied.double().norm()) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_a_death_at_any_moment_leaves_no_partial_update(
    shared: bool, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    with three(shared, tmp_path) as servers:
        group = servers.group
        servers.decide(group.decide())
        servers.deliver(chance)
        leader, *others = [server_state.name for server_state in group.server_states]
        dead = chance.choice([leader, *others])
        decision = group.decide()
        # The leader tells the others, one after the other, before it begins; if it dies, not all hear it.
        told = [*others, leader]
        for name in told if dead != leader else told[: chance.randrange(len(told))]:
            servers.updates[name].enqueue(decision)
        for _ in range(chance.randrange(12)):
            servers.hear(*chance.choice(list(servers.far)))
        newest = servers.survive(dead, chance)
        if newest == 2:
            group.check()


def test_one_host_a_server_completes_a_replicated_update_after_the_leader_died(
    tmp_path: Path,
) -> None:
    """Otherwise the replica on its holder would be ahead of it."""
    with three(True, tmp_path) as servers:
        group = servers.group
        leader, heard, other = group.server_states
        assert group.holders_of(heard) == [other]
        decision = group.decide()
        servers.kill(leader.name)  # after it has sent the decision to one of them
        servers.updates[heard.name].enqueue(decision)
        servers.deliver(random.Random(0))
        assert heard.ledger.version == other.held.versions[heard.name] == 1
        group.settle()
        group.check()


def test_several_hosts_a_commit_is_applied_after_the_leader_died(tmp_path: Path) -> None:
    """The dead leader can't receive `SumTaken` for its replica, which must not matter."""
    with three(False, tmp_path) as servers:
        group = servers.group
        leader, heard, other = group.server_states
        servers.decide(group.decide())
        # The sums go to their holders, the leader learns that all have arrived, and commits.
        inward = [pair for pair in servers.far if pair != (leader.name, heard.name)]
        for _ in range(9):
            for pair in inward:
                servers.hear(*pair)
            if not servers.applied[leader.name]:
                servers.hear(leader.name, heard.name)
        assert servers.applied[leader.name]
        assert not servers.applied[heard.name]
        servers.kill(leader.name)
        while servers.hear(leader.name, heard.name):
            pass
        assert len(servers.applied[heard.name]) == 1
        assert set(heard.held.versions.values()) == {1}
        assert {heard.name, other.name} == servers.updates.keys()
        group.settle()
        group.check()


def gradients_arrive(
    servers: Servers, decision: Decision, chance: random.Random, *, part: float
) -> None:
    """Gradients arrive span by span in any order; of each server's, only a part if it is below 1."""
    arrivals = [
        (name, given, span)
        for name in servers.exchanges
        for given in decision.contributions
        for span in range(servers.num_spans(name))
        if chance.random() <= part
    ]
    chance.shuffle(arrivals)
    for name, given, span in arrivals:
        servers.exchanges[name].gradient_arrived(given.worker, given.seq, given.slot, span)
        if chance.random() < 0.3:
            servers.hear(*chance.choice(list(servers.far)))


@pytest.mark.parametrize("part", [1.0, 0.8])
def test_partial_sums_give_the_same_updates(part: float, shared: bool, tmp_path: Path) -> None:
    with three(shared, tmp_path, for_all=True) as servers:
        for seed in range(6):
            chance = random.Random(seed)
            decision = servers.group.decide(for_all=True)
            gradients_arrive(servers, decision, chance, part=part)
            assert any(servers.sent_partial_sums()) != shared
            servers.decide(decision)
            servers.deliver(chance)
            gradients_arrive(servers, decision, chance, part=part)  # sent again, after the decision
            assert not any(servers.sent_partial_sums())
        for told in servers.applied.values():
            assert [decision.version for decision in told] == [1, 2, 3, 4, 5, 6]
        servers.group.settle()
        servers.group.check()


def test_partial_sums_of_other_gradients_are_sent_again(tmp_path: Path) -> None:
    with three(False, tmp_path, for_all=True) as servers:
        group, chance = servers.group, random.Random(0)
        for version in (1, 2):
            decision = group.decide(for_all=True)
            others = [replace(given, slot=1 - given.slot) for given in decision.contributions]
            of_others = replace(decision, contributions=tuple(others))
            gradients_arrive(servers, of_others, chance, part=1.0)
            assert all(servers.sent_partial_sums())
            servers.decide(decision)
            servers.deliver(chance)
            assert {len(told) for told in servers.applied.values()} == {version}
        group.settle()
        group.check()


def test_partial_sums_of_a_later_round_are_sent_again(tmp_path: Path) -> None:
    """They were sent for the version of the round before, and must not count in their own."""
    with three(False, tmp_path, for_all=True) as servers:
        group, chance = servers.group, random.Random(0)
        first, second = group.decide(for_all=True), group.decide(for_all=True)
        gradients_arrive(servers, first, chance, part=0.5)
        gradients_arrive(servers, second, chance, part=1.0)
        assert all(servers.sent_partial_sums())
        for decision in (first, second):
            servers.decide(decision)
            assert not any(servers.sent_partial_sums())
            servers.deliver(chance)
        group.settle()
        group.check()


@pytest.mark.parametrize("seed", range(8))
def test_a_death_after_partial_sums_leaves_no_partial_update(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    with three(False, tmp_path, for_all=True) as servers:
        group = servers.group
        servers.decide(group.decide(for_all=True))
        servers.deliver(chance)
        before = group.version
        decision = group.decide(for_all=True)
        gradients_arrive(servers, decision, chance, part=chance.choice([0.5, 1.0]))
        decided = chance.random() < 0.5
        dead = chance.choice(group.server_states).name
        for name, updates in servers.updates.items():
            if decided and name != dead:
                updates.enqueue(decision)
        newest = servers.survive(dead, chance)
        assert newest == before, "the dead server had not agreed"
