"""Turn decisions into updates: add up, clip, replicate, apply. One decision at a time, in order.

    add up      sum the gradients of the decision into one of two buffers (a replica may still read the other)
    clip        scale by the norm of the whole gradient, of which each server has a part
    replicate   pass the sum to the servers that hold this server's replicas
    apply       run the optimizer's step; table rows are updated before it, and evicted after it

`UpdatePipeline` does this for all modes. The exception is clipping without rounds: in `ps:async` and `ps:ssp`
each worker clips its own push (learner.py), and `clip` is skipped here. The servers of a view exchange norms
and sums through an `UpdateExchange`, chosen when the view begins:

    RoundServer        (rounds.py) through a table in shared memory, without messages
    MessageExchange    by message; sums are in shared memory, or have no replicas
    NetworkExchange    by message; sums are sent to the replicas, with a two-phase commit. Spans that have
                       come from every worker are added up and sent before the decision (PartialSums)

Inside a host a decision is final at once: every server can read all gradients and sums, so any survivor can
complete it, and replicas are updated later. Between hosts it is final when the leader knows that every sum
has reached its replica holder (`SumHeld`), so that the death of one member never leaves half an update. The
leader then sends `Commit`, and replica holders apply the sum too, so that no parameters have to be sent to
them.

Used by one thread at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from manyhands.errors import LinkError, ProtocolError
from manyhands.ps.block_store import (
    BlockStore,
    FlatTensors,
    GradientSums,
    add_up,
    bytes_of,
    clip_factor,
    scale,
    squared_norm,
)
from manyhands.ps.compensation import Compensation
from manyhands.ps.mode import PsMode
from manyhands.ps.placement import Placement
from manyhands.ps.policies import MAX_TICKS, Decision
from manyhands.ps.protocol import (
    Commit,
    PartialNorm,
    ReplicaSum,
    SumHeld,
    SumTaken,
)
from manyhands.ps.server_state import HeldBlocks, ServerState
from manyhands.ps.spans import Span, message_spans, travelling
from manyhands.transport.event_loop import PriorityChannel
from manyhands.transport.fields import kind_of

if TYPE_CHECKING:
    from manyhands.ps.recovery_plan import RecoveryPlan
    from manyhands.ps.sessions import Peer

MAX_BEHIND = 1024
"""Upper bound on the number of decisions that wait to be applied, used to check messages."""

Message = PartialNorm | ReplicaSum | SumHeld | SumTaken | Commit
"""Messages of an UpdateExchange."""


class UpdateExchange(ABC):
    """Exchange of norms and sums among the servers of a view."""

    may_evict: bool = False
    """If true, this server may evict rows of tables after an update."""

    @abstractmethod
    def is_free(self, version: int) -> bool:
        """Return whether the buffer for this version's sum is free: no replica still reads its old sum."""

    @abstractmethod
    def share_norm(self, version: int, squared: float) -> None:
        """Send this server's part of the squared norm to the other servers."""

    @abstractmethod
    def norms(self, version: int) -> Sequence[float] | None:
        """Return all servers' parts, in the same order on every server; None while some are missing."""

    def spans_to_add(self, decision: Decision, own: BlockStore) -> Sequence[Span]:
        """Return the spans of the decision's sum that are still to be added up."""
        return own.spans

    @abstractmethod
    def replicate(self, decision: Decision) -> None:
        """Pass the complete sum to the servers with replicas."""

    def is_final(self, decision: Decision) -> bool:
        """Return whether the update may be applied now."""
        return True

    def applied(self, decision: Decision) -> None:
        """Called when the update is applied on this server."""
        return


@dataclass
class PendingUpdate:
    """Decision that is being carried out, and the stages that are done."""

    decision: Decision
    clipped: bool = False
    """If true, the sum is complete, and is not scaled again however often the update is retried."""
    replicated: bool = False


class UpdatePipeline:
    def __init__(
        self,
        server_state: ServerState,
        mode: PsMode,
        exchange: UpdateExchange,
        *,
        applied: Callable[[Decision, float], None] = lambda decision, lr: None,
        compensation: Compensation | None = None,
    ) -> None:
        """Create the pipeline of a view. `applied` is called after each update, with its decision and the
        schedule's learning rate."""
        self.decided = server_state.ledger.version
        """Last version for which there is a decision."""
        self._server_state = server_state
        self._own = server_state.own
        self._clip_norm = mode.clip_norm
        self._exchange = exchange
        self._applied, self._compensation = applied, compensation
        self._queue: deque[Decision] = deque()
        self._pending: PendingUpdate | None = None

    def enqueue(self, decision: Decision) -> None:
        self.decided = decision.version
        self._queue.append(decision)
        self.advance()

    def advance(self) -> None:
        """Carry out decisions as far as possible. Called whenever the state of the exchange may have
        changed."""
        exchange = self._exchange
        while (update := self._pending or self._begin()) is not None:
            if not update.clipped and not self._clip(update):
                return
            if not update.replicated:
                update.replicated = True
                self._server_state.sums.note(update.decision.version)
                exchange.replicate(update.decision)
            if not exchange.is_final(update.decision):
                return
            self._apply(update.decision)

    def _begin(self) -> PendingUpdate | None:
        """Add up the gradients of the next decision, once the buffer for their sum is free."""
        if not self._queue or not self._exchange.is_free(self._queue[0].version):
            return None
        decision, state, own = self._queue.popleft(), self._server_state, self._own
        sums = state.sums.of(decision.version)
        _add_up(state, decision, sums, self._exchange.spans_to_add(decision, own))
        if self._compensation is not None:
            self._compensation.correct(decision.contributions[0].worker, sums, own)
        if self._clip_norm is not None:
            self._exchange.share_norm(decision.version, squared_norm(sums, own.spans))
        self._pending = PendingUpdate(decision)
        return self._pending

    def _clip(self, update: PendingUpdate) -> bool:
        """Clip as torch does, by the norm of the whole gradient. Returns False while parts of it are
        missing."""
        if self._clip_norm is not None:
            norms = self._exchange.norms(update.decision.version)
            if norms is None:
                return False
            # Every server computes the same factor, from the same numbers in the same order.
            factor = clip_factor(math.sqrt(math.fsum(norms)), self._clip_norm)
            update.decision = replace(update.decision, factor=factor)
            scale(self._server_state.sums.of(update.decision.version), self._own.spans, factor)
        update.clipped = True
        return True

    def _apply(self, decision: Decision) -> None:
        rows = self._server_state.rows
        self._pending = None
        lr = apply(self._server_state, decision)
        if rows is not None and self._exchange.may_evict and rows.evicts(decision):
            rows.tables.evict(decision.step)
        self._exchange.applied(decision)
        self._applied(decision, lr)


# Updates of one server's state, in and between views --------------------------------------------


def _add_up(
    state: ServerState, decision: Decision, sums: FlatTensors, spans: Sequence[Span]
) -> None:
    sources = [state.gradients[each.worker][each.slot] for each in decision.contributions]
    add_up(sums, spans, sources, decision.coefficients())


def make_sum(
    state: ServerState, decision: Decision, sums: FlatTensors, spans: Sequence[Span]
) -> None:
    """Compute the sum of a decision, clipped by the decision's factor."""
    _add_up(state, decision, sums, spans)
    scale(sums, spans, decision.factor)


def apply(state: ServerState, decision: Decision) -> float:
    """Apply the sum of a decision to the server's own blocks. Returns the schedule's learning rate."""
    placement, own = state.held.placement, state.held.own
    assert placement is not None
    assert own is not None
    lr = own.lr
    if state.rows is not None:  # before the blocks, whose update advances the learning rate
        state.rows.apply(decision, placement.servers, lr=lr, base_lr=state.train_state.base_lr)
    sums = state.sums.of(decision.version)
    own.apply(sums, lr_scale=decision.lr_scale, part=decision.part, ticks=decision.ticks)
    state.ledger.note(decision)
    state.params.marks[placement.servers.index(state.name)] = decision.version
    state.ahead.pop(decision.version, None)
    return lr


def apply_replica(state: ServerState, owner: str, decision: Decision) -> None:
    """Apply another server's sum to the replicas of its blocks."""
    sums = state.others[owner].of(decision.version)
    state.held.replicas[owner].apply(
        sums, lr_scale=decision.lr_scale, part=decision.part, ticks=decision.ticks
    )
    state.held.versions[owner] = decision.version
    if decision.version > state.ledger.version:
        state.ahead[decision.version] = decision


def catch_up(state: ServerState, plan: RecoveryPlan) -> None:
    """Complete all updates of the plan's ledger, on the own blocks and replicas that are held here."""
    if state.coming is not None and state.coming.view == plan.standing:
        state.held = state.coming
        if state.rows is not None:
            state.rows.take_over()
    state.coming = None
    state.schedule_clock.advance(plan.ledger.ticks)
    if state.held.view != plan.standing:
        state.held = HeldBlocks()  # missed a view: its blocks have moved to other servers
        state.ledger = plan.ledger.copy()
        return
    for holder, owner in plan.stale:
        if holder == state.name:  # the blocks that it needs are sent again
            state.held.replicas.pop(owner, None)
            state.held.versions.pop(owner, None)
    for owner, replica in state.held.replicas.items():
        for decision in plan.ledger.after(state.held.versions[owner]):
            others = state.others.get(owner)
            if others is None or not others.has(decision.version):
                if others is None or others.attached:  # never write to the owner's memory
                    others = GradientSums([FlatTensors.private(state.layout)] * 2)
                    state.others[owner] = others
                make_sum(state, decision, others.of(decision.version), replica.spans)
            apply_replica(state, owner, decision)
    for decision in plan.ledger.after(state.ledger.version):
        if not state.sums.has(decision.version):
            make_sum(state, decision, state.sums.of(decision.version), state.own.spans)
        apply(state, decision)


def check_decision(state: ServerState, decision: Decision, *, next_is: int) -> None:
    """Check a decision from another server's message."""
    if decision.version != next_is:
        raise ProtocolError(f"a decision on version {decision.version}; expected {next_is}")
    for each in decision.contributions:
        slots = state.gradients.get(each.worker, ())
        if each.slot >= len(slots):
            raise ProtocolError(f"a decision on a gradient that does not exist: {each}"[:200])
    ticks = decision.ticks
    most = sum(each.ticks for each in decision.contributions) * MAX_BEHIND
    if not decision.contributions or ticks > state.ledger.ticks + most + MAX_BEHIND:
        raise ProtocolError(
            f"a decision on {len(decision.contributions)} gradients and {ticks} ticks"
        )
    check_ticks(state, ticks)


def check_ticks(state: ServerState, ticks: int) -> None:
    """Check a schedule position from another server's message: advancing to it takes time for each step."""
    most = 2 * state.train_state.plan.of + MAX_TICKS
    if state.train_state.scheduler is not None and ticks > most:
        raise ProtocolError(f"{ticks} steps of a schedule with at most {most}")


# Exchanges by message ---------------------------------------------------------------------------


class MessageExchange(UpdateExchange):
    """Exchange of norms by message. Sums are in memory that the replica holders can read."""

    def __init__(
        self,
        server_state: ServerState,
        mode: PsMode,
        placement: Placement,
        peers: Mapping[str, Peer],
    ) -> None:
        self.may_evict = not server_state.shared
        self._server_state = server_state
        self._clips = mode.clip_norm is not None
        self._peers = peers
        self._closed = False
        self._norms: dict[int, dict[str, float]] = defaultdict(dict)
        holders = {placement.replica_of(b) for b in placement.blocks_of(server_state.name)}
        self._taken = {name: server_state.ledger.version for name in peers if name in holders}
        """Last version whose sum each holder of this server's replicas has applied."""

    def handle(self, sender: str, message: Message) -> None:
        """Handle a message of another server; ProtocolError if it belongs to no update in progress."""
        match message:
            case PartialNorm(version, value):
                self._check_version(message, self._server_state.ledger.version)
                if not self._clips or sender in self._norms[version]:
                    raise ProtocolError(f"an unexpected norm for version {version}")
                self._norms[version][sender] = value
            case SumTaken(version):
                if sender not in self._taken:
                    raise ProtocolError("'SumTaken' from a server without a replica of this one")
                self._check_version(message, self._taken[sender])
                self._taken[sender] = version
            case ReplicaSum():
                if sender not in self._server_state.others:
                    raise ProtocolError("a sum of a server whose replica is not here")
                self._check_version(message, self._server_state.held.versions[sender])
                self._on_replica(sender, message)
            case _:
                raise ProtocolError(f"{kind_of(message)!r} where updates need no commit")

    def buffer_for(self, owner: str, message: ReplicaSum) -> memoryview:
        """Return the memory for a span of another server's sum."""
        raise ProtocolError(f"span {message.span} of a sum whose replica is not here")

    def gradient_arrived(self, worker: str, seq: int, slot: int, span: int | None = None) -> None:
        """Called for each span of a gradient that has arrived; None: all of it is here."""
        return

    def close(self) -> None:
        """End the view: nothing more is committed, and no `SumTaken` is sent."""
        self._closed = True

    def is_free(self, version: int) -> bool:
        return all(taken >= version - 2 for taken in self._taken.values())

    def share_norm(self, version: int, squared: float) -> None:
        self._norms[version][self._server_state.name] = squared
        self._send_all(PartialNorm(version, squared))

    def norms(self, version: int) -> Sequence[float] | None:
        if len(self._norms[version]) <= len(self._peers):
            return None
        return [norm for _, norm in sorted(self._norms.pop(version).items())]

    def replicate(self, decision: Decision) -> None:
        for holder in self._taken:
            self._send(holder, ReplicaSum(decision.version, decision=decision))

    def _on_replica(self, owner: str, message: ReplicaSum) -> None:
        if message.decision is None or message.span is not None:
            raise ProtocolError("a span of a sum that is in shared memory")
        check_decision(self._server_state, message.decision, next_is=message.version)
        self._server_state.others[owner].note(message.version)
        self._follow(owner, message.decision)

    def _follow(self, owner: str, decision: Decision) -> None:
        apply_replica(self._server_state, owner, decision)
        if not self._closed:
            self._send(owner, SumTaken(decision.version))

    def _check_version(self, message: Message, last: int) -> None:
        """Check the version of a message: servers and replicas are at most two updates apart."""
        version = message.version
        if not last < version <= max(last, self._server_state.ledger.version) + 2:
            kind = kind_of(message)
            raise ProtocolError(f"{kind!r} of version {version}; the last version was {last}")

    def _send_all(self, message: Message) -> None:
        for name in self._peers:
            self._send(name, message)

    def _send(self, server: str, message: Message) -> None:
        try:
            self._peers[server].link.send(message)
        except LinkError:
            # The server is dead, and a view without it follows. Until then this server completes the
            # update that it has begun, so that the others are not left with half of it.
            pass


@dataclass
class PartialRound:
    """Spans of one round's gradients that have arrived."""

    slots: dict[str, int] = field(default_factory=dict)
    """Slot of each worker's gradient."""
    senders: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By span: the workers from which it has arrived."""
    sent: set[int] = field(default_factory=set)
    """Spans whose sums were sent to the replica holders."""


class PartialSums:
    """Tracks which spans have arrived from every worker, so that their sums can be sent before the decision.

    The network is then busy while some workers still compute. This needs updates that consist of all
    workers' gradients, and a sum that does not depend on the whole gradient: no clipping, and no sample
    weights of the job. It gives 1 to 2 % between two hosts at 1 Gbit/s (docs/decisions.md).
    """

    def __init__(self, workers: Sequence[str]) -> None:
        """`workers` in the order in which their gradients are added up."""
        self._workers = list(workers)
        self._rounds: dict[int, PartialRound] = {}
        self._decided = 0
        """Last round for which there is a decision."""

    def arrived(self, worker: str, seq: int, slot: int, spans: Iterable[int]) -> list[int]:
        """Note spans of a gradient. Returns those that have now arrived from every worker."""
        if seq <= self._decided:
            return []  # sent again
        partial = self._rounds.setdefault(seq, PartialRound())
        partial.slots[worker] = slot
        complete = []
        for span in spans:
            senders = partial.senders[span]
            if worker not in senders:
                senders.add(worker)
                if len(senders) == len(self._workers):
                    complete.append(span)
        return complete

    def mark_sent(self, seq: int, span: int) -> list[tuple[str, int]]:
        """Note that a sum is sent. Returns (worker, slot) of the gradients that it consists of, in order."""
        partial = self._rounds[seq]
        partial.sent.add(span)
        return [(worker, partial.slots[worker]) for worker in self._workers]

    def decided(self, decision: Decision) -> tuple[set[int], bool]:
        """Forget the rounds up to a decision. Returns the spans whose sums were sent and are right, and
        whether wrong sums were sent: then none counts, and all are sent again."""
        last = max(each.seq for each in decision.contributions)
        sent = {seq: partial.sent for seq, partial in self._rounds.items() if partial.sent}
        slots = self._rounds[last].slots if last in self._rounds else {}
        self._decided = max(self._decided, last)
        self._rounds = {seq: r for seq, r in self._rounds.items() if seq > self._decided}
        for partial in self._rounds.values():
            partial.sent = set()  # they were sent for the version of this decision
        expected = [(worker, slots.get(worker), last) for worker in self._workers]
        plain = all(factor == 1.0 for factor in decision.coefficients())
        same = expected == [(each.worker, each.slot, each.seq) for each in decision.contributions]
        right = sent.pop(last, set()) if plain and same else set()
        if sent:
            return set(), True  # the holder can't tell right sums from wrong ones
        return right, False


class NetworkExchange(MessageExchange):
    """Exchange that sends sums to the replica holders, and commits an update when all sums have arrived."""

    def __init__(
        self,
        server_state: ServerState,
        mode: PsMode,
        placement: Placement,
        peers: Mapping[str, Peer],
        *,
        workers: Sequence[str],
        followed: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the exchange of a view. `followed` is called after each update of a replica here."""
        super().__init__(server_state, mode, placement, peers)
        self._leader = placement.servers[0]
        self._followed = followed
        self._to_hold = _to_hold(placement)
        """(owner, holder) of all sums; the leader waits for these before it commits."""
        self._held: dict[int, set[tuple[str, str]]] = defaultdict(set)
        self._uncommitted: dict[int, dict[str, Decision]] = defaultdict(dict)
        self._arrived: dict[tuple[str, int], int] = defaultdict(int)
        self._pending = self._committed = server_state.ledger.version
        """Last version whose sum is complete here, and last version that is committed."""
        whole_needed = mode.clip_norm is not None or server_state.train_state.weight is not None
        self._partial_sums = PartialSums(workers) if mode.for_all and not whole_needed else None
        self._sent: set[int] = set()
        """Spans of the pending decision's sum that were sent before it."""
        self._resend_all = False
        self._spans, holders = travelling(placement, server_state.name)
        self._holders = [(name, holders[:i].count(name)) for i, name in enumerate(holders)]
        """The replica holder of each span of this server's sums, and the span's index there."""
        self._channels = {name: PriorityChannel([peers[name].link]) for name in self._taken}
        kept = [
            (placement.server_of(b), b.number) for b in placement.replicas_of(server_state.name)
        ]
        self._kept = {
            owner: message_spans(
                server_state.layout, [number for of, number in kept if of == owner]
            )
            for owner in server_state.others
        }
        """Spans of the replicas here, by their owner."""

    def handle(self, sender: str, message: Message) -> None:
        state = self._server_state
        match message:
            case SumHeld(version, owner):
                self._check_version(message, state.ledger.version)
                if state.name != self._leader or (owner, sender) not in self._to_hold:
                    raise ProtocolError(
                        "'SumHeld' for a sum that its sender does not hold, or not sent to the leader"
                    )
                self._on_held(owner, sender, version)
            case Commit(version):
                if sender != self._leader or self._pending == state.ledger.version:
                    raise ProtocolError("an unexpected commit, or one not from the leader")
                if version != self._pending:
                    raise ProtocolError(f"a commit of version {version}; expected {self._pending}")
                self._on_commit(version)
            case _:
                super().handle(sender, message)

    def buffer_for(self, owner: str, message: ReplicaSum) -> memoryview:
        span, kept = message.span, self._kept.get(owner, ())
        if span is None or span >= len(kept):
            return super().buffer_for(owner, message)
        return bytes_of(kept[span].of(self._server_state.others[owner].of(message.version)))

    # Sums of this server's own blocks -----------------------------------------------------------

    def gradient_arrived(self, worker: str, seq: int, slot: int, span: int | None = None) -> None:
        if self._partial_sums is None:
            return
        spans = range(len(self._spans)) if span is None else (span,)
        complete = self._partial_sums.arrived(worker, seq, slot, spans)
        version = self._server_state.ledger.version + 1
        if self._closed or self._pending == version or not self.is_free(version):
            return  # added up after the decision
        for i in complete:
            self._send_partial_sum(self._partial_sums.mark_sent(seq, i), version, i)

    def _send_partial_sum(self, sources: Sequence[tuple[str, int]], version: int, i: int) -> None:
        state = self._server_state
        sums = state.sums.of(version)
        state.sums.begin(version)
        gradients = [state.gradients[worker][slot] for worker, slot in sources]
        add_up(sums, [self._spans[i]], gradients, [1.0] * len(gradients))
        self._send_span(i, sums, ReplicaSum(version))

    def spans_to_add(self, decision: Decision, own: BlockStore) -> Sequence[Span]:
        if self._partial_sums is not None:
            self._sent, self._resend_all = self._partial_sums.decided(decision)
        if not self._sent:
            return own.spans
        return [span for i, span in enumerate(self._spans) if i not in self._sent]

    def replicate(self, decision: Decision) -> None:
        version = self._pending = decision.version
        sums = self._server_state.sums.of(version)
        first = ReplicaSum(version, decision=decision, resend_all=self._resend_all)
        messages = dict.fromkeys(self._taken, first)  # the decision goes to each holder once
        for i, (holder, _) in enumerate(self._holders):
            if i not in self._sent:
                self._send_span(i, sums, messages.pop(holder or "", ReplicaSum(version)))
        for holder, message in messages.items():
            self._channels[holder].put(0, message)
        if not self._taken:
            self._send_held(self._server_state.name, version)

    def _send_span(self, i: int, sums: FlatTensors, message: ReplicaSum) -> None:
        holder, index = self._holders[i]
        if holder is not None:
            span = bytes_of(self._spans[i].of(sums))
            self._channels[holder].put(0, replace(message, span=index), span)

    def is_final(self, decision: Decision) -> bool:
        return decision.version <= self._committed

    # Commit -------------------------------------------------------------------------------------

    def _send_held(self, owner: str, version: int) -> None:
        if self._server_state.name == self._leader:
            self._on_held(owner, self._leader, version)
        else:
            self._send(self._leader, SumHeld(version, owner))

    def _on_held(self, owner: str, holder: str, version: int) -> None:
        """Note a held sum, on the leader. Once every sum is held, commit the update."""
        self._held[version].add((owner, holder))
        if self._held[version] >= self._to_hold and not self._closed:
            del self._held[version]
            self._send_all(Commit(version))
            self._on_commit(version)

    def _on_commit(self, version: int) -> None:
        for owner, decision in self._uncommitted.pop(version, {}).items():
            self._follow(owner, decision)
        self._committed = version

    # Replicas of others' blocks -----------------------------------------------------------------

    def _on_replica(self, owner: str, message: ReplicaSum) -> None:
        version = message.version
        if message.span is None and message.decision is None:
            raise ProtocolError("neither a sum nor a decision")
        if message.decision is not None:
            check_decision(self._server_state, message.decision, next_is=version)
            self._uncommitted[version][owner] = message.decision
            if message.resend_all:
                self._arrived[owner, version] = 0
        self._arrived[owner, version] += message.span is not None
        complete = self._arrived[owner, version] == len(self._kept[owner])
        if complete and owner in self._uncommitted.get(version, ()):
            del self._arrived[owner, version]
            self._server_state.others[owner].note(version)
            self._send_held(owner, version)

    def _follow(self, owner: str, decision: Decision) -> None:
        super()._follow(owner, decision)
        self._followed()


def _to_hold(placement: Placement) -> set[tuple[str, str]]:
    """Return (owner, holder) of all replicas; a server without a replica is its own holder."""
    kept = {
        (placement.server_of(block), server)
        for server in placement.servers
        for block in placement.replicas_of(server)
    }
    owners = {owner for owner, _ in kept}
    return kept | {(server, server) for server in placement.servers if server not in owners}
