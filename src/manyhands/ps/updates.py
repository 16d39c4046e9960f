"""From a decision to an update: add up, clip, replicate, apply. One decision at a time, in their order.

    add up      the gradients of the decision into one of two sums (a replica may still read the other)
    clip        by the norm of the whole gradient, of which each server has a part (norm)
    replicate   the sum is with the keepers of this server's replicas (replica, held or taken); between
                hosts this may be begun before there is a decision (partial_sums.py)
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
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from manyhands.errors import LinkError
from manyhands.ps.block_store import BlockStore, Span, add_up, scale, squared_norm
from manyhands.ps.channels import BackgroundChannel, SendGate
from manyhands.ps.compensation import Compensation
from manyhands.ps.ledger import Decision
from manyhands.ps.memory import FlatTensors, bytes_of
from manyhands.ps.mode import PsMode
from manyhands.ps.partial_sums import PartialSums
from manyhands.ps.placement import Placement
from manyhands.ps.protocol import Nonsense, made_of
from manyhands.ps.server_state import GradientSums, ServerState, spans, travelling
from manyhands.ps.view_change import Peer

MOST_BEHIND = 1024
"""More decisions than ever wait to be carried out."""
KINDS = ("decide", "norm", "replica", "held", "taken", "commit")


@dataclass
class PendingUpdate:
    """The decision that is being carried out."""

    decision: Decision
    made: Set[int]
    """Runs of its sum that were made, and sent to their keepers, early."""
    anew: bool = False
    """What was sent early is void."""
    summed: bool = False


class UpdatePipeline:
    def __init__(
        self,
        server_state: ServerState,
        mode: PsMode,
        placement: Placement,
        peers: Mapping[str, Peer],
        *,
        lead: str,
        workers: Sequence[str],
        applied: Callable[[Decision], None],
        followed: Callable[[], None] = lambda: None,
        send_gate: SendGate | None = None,
    ) -> None:
        """`applied` is told of each decision that is in the weights; `followed`, when a replica is newer.
        `uplink`: what of this process goes before sums."""
        self.frozen = False
        self.compensation = Compensation(mode.compensate) if mode.compensate else None
        self._server_state = server_state
        self._mode = mode
        self._name = server_state.name
        self._lead = lead
        self._peers = peers
        self._applied = applied
        self._followed = followed
        self._two_phase = not server_state.shared and bool(server_state.replicas) and bool(peers)
        self._queue: deque[Decision] = deque()
        self._work: PendingUpdate | None = None
        self._decided = server_state.ledger.version
        """The last version that there is a decision on."""
        self._norms: dict[int, dict[str, float]] = defaultdict(dict)
        self._taken: dict[str, int] = {}
        self._held: dict[int, set[tuple[str, str]]] = defaultdict(set)
        self._to_hold = _to_hold(placement)
        """(owner, keeper): what the lead must hear of before an update is final."""
        self._uncommitted: dict[int, dict[str, Decision]] = defaultdict(dict)
        self._arrived: dict[tuple[str, int], int] = defaultdict(int)
        whole_needed = mode.clip_norm is not None or server_state.train_state.weight is not None
        may_be_early = self._two_phase and mode.for_all and not whole_needed
        self._partial_sums = PartialSums(workers) if may_be_early else None
        self._made: set[tuple[int, int]] = set()
        """(round, run) that were added up, and sent, before a decision."""
        self._trailers: dict[str, BackgroundChannel] = {}
        """To keepers on other hosts, for sums: gradients go before."""
        self.runs, keepers = travelling(placement, self._name)
        """This server's blocks, as they travel."""
        self._keepers = [(k, keepers[:i].count(k)) for i, k in enumerate(keepers)]
        """Of each run: who keeps its replica, and the how manieth it is there."""
        self._kept: dict[str, list[Span]] = {}
        """Whose replicas are kept here, likewise."""
        # Without rounds a worker pushes on and on: there would be no time for sums.
        behind = send_gate if send_gate is not None and mode.for_all else SendGate()
        layout = server_state.layout
        for server, peer in peers.items():
            if server in keepers:
                self._taken[server] = server_state.ledger.version
                if not server_state.shared:
                    name = f"{self._name}-sums-{server}"
                    self._trailers[server] = BackgroundChannel(peer.link, behind, name=name)
            kept = [
                b for b in placement.replicas_of(self._name) if placement.server_of(b) == server
            ]
            if kept:
                self._kept[server] = spans(layout, [block.number for block in kept])
                theirs = [FlatTensors.attached(layout, address) for address in peer.sums or ()]
                server_state.others[server] = GradientSums(
                    theirs or [FlatTensors.private(layout) for _ in range(2)]
                )

    def handle(self, kind: str, who: str, head: Mapping[str, Any]) -> None:
        """A message of another server. Nonsense where the update that is under way has no use for it."""
        version = int(head["v"]) if "v" in head else 0
        match kind:
            case "decide":
                if who != self._lead or self._mode.for_all:
                    raise Nonsense("a decision, which is not its to make")
                self.carry_out(self._decision_of(head, next_is=self._decided + 1))
            case "norm":
                self._check_version(kind, version, self._server_state.ledger.version)
                if self._mode.clip_norm is None or who in self._norms[version]:
                    raise Nonsense(f"a norm for version {version} that nobody waits for")
                self._norms[version][who] = float(head["value"])
                self._clip()
            case "replica":
                self._on_replica(who, head)
            case "taken":
                if who not in self._taken:
                    raise Nonsense("it has taken a sum, and keeps nothing of this server")
                self._check_version(kind, version, self._taken[who])
                self._taken[who] = version
                self._advance()
            case "held":
                self._check_version(kind, version, self._server_state.ledger.version)
                if self._name != self._lead or (head["owner"], who) not in self._to_hold:
                    raise Nonsense("it holds a sum that is not for it, or tells who need not know")
                self._on_held(str(head["owner"]), who, version)
            case "commit":
                work = self._work
                if who != self._lead or work is None or not work.summed or not self._two_phase:
                    raise Nonsense("a commit where nothing waits for one, or not its to say")
                if version != work.decision.version:
                    raise Nonsense(f"a commit of {version} instead of {work.decision.version}")
                self._on_commit(version)

    def _decision_of(self, head: Mapping[str, Any], *, next_is: int) -> Decision:
        decision = made_of("a decision", lambda: Decision.from_dict(head["decision"]))
        if decision.version != next_is:
            raise Nonsense(f"a decision on version {decision.version}, where {next_is} is next")
        for given in decision.contributions:
            slots = self._server_state.gradients.get(given.worker, ())
            if not 0 <= given.slot < len(slots) or given.share[1] <= 0:
                raise Nonsense(f"a decision on a gradient that there is not: {given}"[:200])
        ticks = decision.ticks if decision.progress[1] > 0 else math.inf
        most = sum(given.ticks for given in decision.contributions) * MOST_BEHIND
        if (
            not decision.contributions
            or ticks > self._server_state.ledger.ticks + most + MOST_BEHIND
        ):
            raise Nonsense(
                f"a decision on {len(decision.contributions)} gradients and {ticks} ticks"
            )
        return decision

    def _check_version(self, kind: str, version: int, last: int) -> None:
        """Servers and replicas are at most two updates apart."""
        if not last < version <= max(last, self._server_state.ledger.version) + 2:
            raise Nonsense(f"{kind!r} of version {version}, where {last} is the last")

    def freeze(self) -> None:
        """The view is over."""
        self.frozen = True
        for trailer in self._trailers.values():
            trailer.close()

    def flush(self) -> None:
        """Until all sums that are made have left."""
        for trailer in self._trailers.values():
            trailer.flush()

    def carry_out(self, decision: Decision) -> None:
        self._decided = decision.version
        self._queue.append(decision)
        self._advance()

    def keeper(self, run: int) -> str | None:
        return self._keepers[run][0]

    def room(self, who: str, version: int, i: int) -> memoryview:
        """Where a run of another server's sum goes."""
        runs = self._kept.get(who, ())
        if self._server_state.shared or not 0 <= i < len(runs):
            raise Nonsense(f"run {i} of a sum that is not kept here")
        return bytes_of(self._kept[who][i].of(self._server_state.others[who].of(version)))

    @property
    def own(self) -> BlockStore:
        return self._server_state.own

    # This server's own blocks ------------------------------------------------------------------

    def arrived(self, worker: str, seq: int, slot: int, run: int | None) -> None:
        """A run of a gradient is here, or all of it."""
        if self._partial_sums is not None:
            runs = range(len(self.runs)) if run is None else (run,)
            for complete in self._partial_sums.arrived(worker, seq, slot, runs):
                self._make_early(seq, complete)

    def _make_early(self, seq: int, i: int) -> None:
        assert self._partial_sums is not None
        server_state, version = self._server_state, self._server_state.ledger.version + 1
        if self._work is not None or self._queue or self.frozen or not self._is_free(version):
            return  # when it is decided on
        sums, run = server_state.sums.of(version), self.runs[i]
        server_state.sums.begin(version)
        sources = [
            server_state.gradients[worker][slot] for worker, slot in self._partial_sums.sources(seq)
        ]
        add_up(sums, [run], sources, [1.0] * len(sources))
        self._made.add((seq, i))
        self._send_sum(i, sums, {"k": "replica", "v": version})

    def _send_sum(self, i: int, sums: FlatTensors, head: Mapping[str, Any]) -> None:
        keeper, number = self._keepers[i]
        if keeper is not None:
            self._trailers[keeper].put({**head, "i": number}, bytes_of(self.runs[i].of(sums)))

    def _is_free(self, version: int) -> bool:
        """The place for a sum: keepers have used what was there."""
        return all(taken >= version - 2 for taken in self._taken.values())

    def _advance(self) -> None:
        """Begin with the next decision, once the place for its sum is free."""
        if self._work is not None or not self._queue or not self._is_free(self._queue[0].version):
            return
        decision = self._queue.popleft()
        version = decision.version
        seq = self._partial_sums.decided(decision) if self._partial_sums is not None else None
        made = {i for of, i in self._made if of == seq}
        self._work = PendingUpdate(decision, made, anew=len(made) < len(self._made))
        self._made = set()
        sums = self._server_state.sums.of(version)
        rest = [run for i, run in enumerate(self.runs) if i not in made]
        self._server_state.add_up(decision, sums, rest if made else self.own.runs)
        if self.compensation is not None:
            self.compensation.correct(decision.contributions[0].worker, sums, self.own)
        if self._mode.clip_norm is None:
            self._summed()
            return
        value = squared_norm(sums, self.own.runs)
        self._norms[version][self._name] = value
        self._tell_all({"k": "norm", "v": version, "value": value})
        self._clip()

    def _clip(self) -> None:
        """As torch clips: by the norm of the whole gradient."""
        work, limit = self._work, self._mode.clip_norm
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
        scale(self._server_state.sums.of(version), self.own.runs, factor)
        self._summed()

    def _summed(self) -> None:
        """The sum is made: let the keepers of replicas have it, then apply it."""
        work = self._work
        assert work is not None
        work.summed = True
        version = work.decision.version
        sums = self._server_state.sums.of(version)
        self._server_state.sums.note(version)
        plain = {"k": "replica", "v": version}
        first = {**plain, "decision": work.decision.to_dict(), "anew": work.anew}
        heads = dict.fromkeys(self._taken, first)  # to each keeper once
        if not self._server_state.shared:
            for i, (keeper, _) in enumerate(self._keepers):
                if i not in work.made:
                    self._send_sum(i, sums, heads.pop(keeper, plain) if keeper else plain)
        for keeper, head in heads.items():
            if keeper in self._trailers:
                self._trailers[keeper].put(head)
            else:
                self._tell(keeper, head)
        if not self._two_phase:
            self._apply()
        elif not self._taken:
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
        self._server_state.apply(work.decision)
        self._applied(work.decision)
        self._advance()

    # Replicas of others' blocks ----------------------------------------------------------------

    def _on_replica(self, owner: str, head: Mapping[str, Any]) -> None:
        version, shared = int(head["v"]), self._server_state.shared
        has = head.keys() & {"i", "decision"}
        if owner not in self._kept or (has != {"decision"} if shared else not has):
            raise Nonsense("a sum that is not kept here")
        self._check_version("replica", version, self._server_state.held.versions[owner])
        if "decision" in head:
            self._uncommitted[version][owner] = self._decision_of(head, next_is=version)
            if head.get("anew"):
                self._arrived[owner, version] = 0
        if not self._server_state.shared:
            self._arrived[owner, version] += "i" in head
            complete = self._arrived[owner, version] == len(self._kept[owner])
            if not complete or owner not in self._uncommitted.get(version, ()):
                return
            del self._arrived[owner, version]
        self._server_state.others[owner].note(version)
        if self._two_phase:
            self._say_held(owner, version)
            return
        waiting = self._uncommitted[version]
        self._follow(owner, waiting.pop(owner))
        if not waiting:
            del self._uncommitted[version]

    def _follow(self, owner: str, decision: Decision) -> None:
        self._server_state.apply_replica(owner, decision)
        self._followed()
        if not self.frozen:
            self._tell(owner, {"k": "taken", "v": decision.version})

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
