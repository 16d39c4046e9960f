"""From a decision to an update: add up, clip, replicate, apply. One decision at a time, in their order.

    add up      the gradients of the decision into one of two sums (a replica may still read the other)
    clip        by the norm of the whole gradient, of which each server has a part (norm)
    replicate   the sum is with the keepers of this server's replicas (replica, held or taken)
    apply       the optimizer's step

Inside a host a decision is final: all can read all gradients and sums, so any survivor can finish it,
and keepers follow at leisure (taken: they have used a sum, its place is free). Between hosts it is final
when the lead has heard that each sum is with its keepers (held), so no death of one member can leave an
update half made. The lead then says `commit`, and keepers apply it too: the parameters of what they keep
need not travel to them.

Used by the server's thread alone.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from manyhands.errors import LinkError
from manyhands.ps.compensation import Compensation
from manyhands.ps.council import Peer
from manyhands.ps.estate import Estate, Sums, spans
from manyhands.ps.holding import Holding, Run, squared_norm
from manyhands.ps.ledger import Decision
from manyhands.ps.memory import Flat, bytes_of
from manyhands.ps.placement import Placement
from manyhands.ps.terms import Terms

KINDS = ("decide", "norm", "replica", "held", "taken", "commit")


@dataclass
class Work:
    """The decision that is being carried out."""

    decision: Decision
    summed: bool = False


class Updates:
    def __init__(
        self,
        estate: Estate,
        terms: Terms,
        placement: Placement,
        peers: Mapping[str, Peer],
        *,
        lead: str,
        applied: Callable[[Decision], None],
        followed: Callable[[], None] = lambda: None,
    ) -> None:
        """`applied` is told of each decision that is in the weights; `followed`, when a replica is newer."""
        self.frozen = False
        self.compensation = Compensation(terms.compensate) if terms.compensate else None
        self._estate = estate
        self._terms = terms
        self._name = estate.name
        self._lead = lead
        self._peers = peers
        self._applied = applied
        self._followed = followed
        self._two_phase = not estate.shared and bool(estate.replicas) and bool(peers)
        self._queue: deque[Decision] = deque()
        self._work: Work | None = None
        self._norms: dict[int, dict[str, float]] = defaultdict(dict)
        self._taken: dict[str, int] = {}
        self._held: dict[int, set[tuple[str, str]]] = defaultdict(set)
        self._to_hold = _to_hold(placement)
        """(owner, keeper): what the lead must hear of before an update is final."""
        self._uncommitted: dict[int, dict[str, Decision]] = defaultdict(dict)
        self._arrived: dict[tuple[str, int], int] = defaultdict(int)
        self._keepers: dict[str, list[Run]] = {}
        """Who keeps replicas of this server's blocks, and which runs of them."""
        self._kept: dict[str, list[Run]] = {}
        """Whose replicas are kept here, likewise."""
        layout = estate.layout
        for server, peer in peers.items():
            given = [b for b in placement.replicas_of(server) if self._owns(placement, b.number)]
            if given:
                self._keepers[server] = spans(layout, [block.number for block in given])
                self._taken[server] = estate.ledger.version
            kept = [
                b for b in placement.replicas_of(self._name) if placement.server_of(b) == server
            ]
            if kept:
                self._kept[server] = spans(layout, [block.number for block in kept])
                theirs = [Flat.attached(layout, address) for address in peer.sums or ()]
                estate.others[server] = Sums(theirs or [Flat.private(layout) for _ in range(2)])

    def handle(self, kind: str, who: str, head: Mapping[str, Any]) -> None:
        """A message of another server."""
        match kind:
            case "decide":
                self.carry_out(Decision.from_dict(head["decision"]))
            case "norm":
                self._norms[int(head["v"])][who] = float(head["value"])
                self._clip()
            case "replica":
                self._on_replica(who, head)
            case "taken":
                self._taken[who] = int(head["v"])
                self._advance()
            case "held":
                self._on_held(str(head["owner"]), who, int(head["v"]))
            case "commit":
                self._on_commit(int(head["v"]))

    def carry_out(self, decision: Decision) -> None:
        self._queue.append(decision)
        self._advance()

    def room(self, who: str, version: int, i: int) -> memoryview:
        """Where a run of another server's sum goes."""
        return bytes_of(self._kept[who][i].of(self._estate.others[who].of(version)))

    @property
    def own(self) -> Holding:
        return self._estate.own

    # This server's own blocks ------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin with the next decision, once the place for its sum is free."""
        if self._work is not None or not self._queue:
            return
        version = self._queue[0].version
        if any(taken < version - 2 for taken in self._taken.values()):
            return
        decision = self._queue.popleft()
        self._work = Work(decision)
        sums = self._estate.sums.of(version)
        self._estate.add_up(decision, sums, self.own.runs)
        if self.compensation is not None:
            self.compensation.correct(decision.given[0].worker, sums, self.own)
        if self._terms.clip_norm is None:
            self._summed()
            return
        value = squared_norm(sums, self.own.runs)
        self._norms[version][self._name] = value
        self._tell_all({"k": "norm", "v": version, "value": value})
        self._clip()

    def _clip(self) -> None:
        """As torch clips: by the norm of the whole gradient."""
        work, limit = self._work, self._terms.clip_norm
        if work is None or work.summed or limit is None:
            return
        version = work.decision.version
        norms = self._norms[version]
        if len(norms) <= len(self._peers):
            return
        del self._norms[version]
        # In the order of names: every server computes the same factor from the same numbers.
        norm = math.sqrt(math.fsum(norms[name] for name in sorted(norms)))
        factor = min(1.0, limit / (norm + 1e-6))
        work.decision = replace(work.decision, factor=factor)
        if factor != 1.0:
            for run in self.own.runs:
                run.of(self._estate.sums.of(version)).mul_(factor)
        self._summed()

    def _summed(self) -> None:
        """The sum is made: let the keepers of replicas have it, then apply it."""
        work = self._work
        assert work is not None
        work.summed = True
        version = work.decision.version
        sums = self._estate.sums.of(version)
        self._estate.sums.note(version)
        for keeper, runs in self._keepers.items():
            head = {"k": "replica", "v": version, "decision": work.decision.to_dict()}
            if self._estate.shared:
                self._tell(keeper, head)
                continue
            for i, run in enumerate(runs):
                self._tell(keeper, {**head, "i": i}, bytes_of(run.of(sums)))
                head.pop("decision", None)  # once is enough
        if not self._two_phase:
            self._apply()
        elif not self._keepers:
            self._say_held(self._name, version)

    def _say_held(self, owner: str, version: int) -> None:
        if self._name == self._lead:
            self._on_held(owner, self._name, version)
        else:
            self._tell(self._lead, {"k": "held", "v": version, "owner": owner})

    def _on_held(self, owner: str, keeper: str, version: int) -> None:
        """At the lead: when all are, there is no way back."""
        self._held[version].add((owner, keeper))
        if self._held[version] >= self._to_hold and not self.frozen:
            del self._held[version]
            self._tell_all({"k": "commit", "v": version})
            self._on_commit(version)

    def _on_commit(self, version: int) -> None:
        for owner, decision in self._uncommitted.pop(version, {}).items():
            self._follow(owner, decision)
        self._apply()

    def _apply(self) -> None:
        work = self._work
        assert work is not None
        self._work = None
        self._estate.apply(work.decision)
        self._applied(work.decision)
        self._advance()

    # Replicas of others' blocks ----------------------------------------------------------------

    def _on_replica(self, owner: str, head: Mapping[str, Any]) -> None:
        version = int(head["v"])
        if "decision" in head:
            self._uncommitted[version][owner] = Decision.from_dict(head["decision"])
        if "i" in head:
            self._arrived[owner, version] += 1
            if self._arrived[owner, version] < len(self._kept[owner]):
                return
            del self._arrived[owner, version]
        self._estate.others[owner].note(version)
        if self._two_phase:
            self._say_held(owner, version)
            return
        waiting = self._uncommitted[version]
        self._follow(owner, waiting.pop(owner))
        if not waiting:
            del self._uncommitted[version]

    def _follow(self, owner: str, decision: Decision) -> None:
        self._estate.apply_replica(owner, decision)
        self._followed()
        if not self.frozen:
            self._tell(owner, {"k": "taken", "v": decision.version})

    def _owns(self, placement: Placement, number: int) -> bool:
        return placement.server_of(self._estate.layout.blocks[number]) == self._name

    def _tell_all(self, head: Mapping[str, Any]) -> None:
        for name in self._peers:
            self._tell(name, head)

    def _tell(self, who: str, head: Mapping[str, Any], payload: memoryview | None = None) -> None:
        try:
            self._peers[who].link.send(head, payload)
        except LinkError:
            # It is dead, and a view without it comes. Until then others must not be left with half of
            # an update: what was begun is finished here.
            pass


def _to_hold(placement: Placement) -> set[tuple[str, str]]:
    """Each server with those who keep its blocks; one that nobody keeps answers for itself."""
    kept = {
        (placement.server_of(block), server)
        for server in placement.servers
        for block in placement.replicas_of(server)
    }
    owners = {owner for owner, _ in kept}
    return kept | {(server, server) for server in placement.servers if server not in owners}
