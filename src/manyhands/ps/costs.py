"""The bytes that the parameter-server strategies send in a step, and the memory that they need. Pure.

Everything follows from the placement of blocks, which is computed here as the servers compute it. Inside a
host no number goes through a socket: a transfer is what a member reads of memory that another has written.
Between members without common memory, it is the bytes of a link: payload, headers, and TLS records. Messages
without a payload are counted there, too; the datagrams and messages inside a host are not.

A part of a step that comes too late for `ps:backup` costs its gradients for nothing. How many are late
depends on the workers' speeds: `CostFacts.late_parts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from manyhands.costs import (
    CostFacts,
    MemoryUse,
    Transfer,
    add,
    checkpoint_copy,
    model_extras,
    scaled,
)
from manyhands.ps.blocks import MIN_BLOCKS, BlockLayout, FlatParameter
from manyhands.ps.placement import Placement, place
from manyhands.ps.spans import Span, travelling
from manyhands.transport.link import pack
from manyhands.transport.tls import RECORD_BYTES

if TYPE_CHECKING:
    from manyhands.hosts.view import View
    from manyhands.ps.config import ParameterServer

TLS_BYTES = 22
"""Header, content type and tag of a TLS 1.3 record."""


class PsCosts:
    def __init__(self, config: ParameterServer, facts: CostFacts) -> None:
        self._config, self._facts = config, facts
        self._model = facts.model
        self._mode = config.mode(1.0 if facts.model.clips else None)
        workers = facts.workers
        lockstep = config.traits.lockstep
        parts = workers if lockstep else config.parts(workers)
        self._num_pushes = (parts + facts.late_parts) / workers
        """Of each worker in a step, on average."""
        self._num_updates = 1 if self._mode.rounds else parts

    @cached_property
    def _layout(self) -> BlockLayout:
        pieces = [
            FlatParameter(p.name, p.numel, p.itemsize, p.group, p.dtype, p.shape)
            for p in sorted(self._model.trained, key=lambda p: p.place)
        ]
        whole = not self._model.elementwise
        return BlockLayout.of(pieces, whole_tensors=whole, min_blocks=MIN_BLOCKS)

    def _shares_memory(self, *, one_host: bool) -> bool:
        return self._config.transport != "tcp" and one_host and not self._facts.spans_hosts

    def _max_servers(self, *, shared: bool) -> int | None:
        """Return the number of workers that serve by default; None: all."""
        if not shared or (self._model.tables and self._mode.rounds):
            return None
        return self._config.servers_for_shards(len(self._layout.shards))

    # Traffic ------------------------------------------------------------------------------------

    def traffic(self, view: View) -> Iterator[Transfer]:
        shared = self._shares_memory(one_host=view.one_host)
        servers = self._config.servers_in(view, most=self._max_servers(shared=shared))
        hosts = {seat.name: seat.host for seat in view.seats}
        placement = place(self._layout, servers, replicas=self._config.replicas, hosts=hosts)
        workers = [seat.name for seat in view.workers]
        if shared:
            yield from self._inside_a_host(placement, workers)
        else:
            yield from self._over_network(placement, workers)

    def _inside_a_host(self, placement: Placement, workers: Sequence[str]) -> Iterator[Transfer]:
        for server in placement.servers:
            held = placement.bytes_of(server)
            for worker in workers:
                if worker != server and held:
                    pushed = round(held * self._num_pushes)
                    yield Transfer(worker, server, pushed, "gradients", 1.0, "memory")
                    yield Transfer(server, worker, held, "parameters", 1.0, "memory")
            for holder, num_bytes in _by_holder(placement, server).items():
                summed = num_bytes * self._num_updates
                yield Transfer(server, holder, summed, "sums", 1.0, "memory")

    def _over_network(self, placement: Placement, workers: Sequence[str]) -> Iterator[Transfer]:
        # On a GPU and without rounds, the model computes with a copy: all is sent after the backward.
        lockstep, pushes = self._config.traits.lockstep, self._num_pushes
        early = lockstep and not self._facts.gpu
        per_update = self._num_pushes * len(workers) if self._mode.rounds else 1
        sizes = MessageSizes(round(per_update), encrypted=self._facts.encrypted)
        for server in placement.servers:
            spans, holders = travelling(placement, server)
            span_bytes = [span.numel * span.blocks[0].itemsize for span in spans]
            for worker in (name for name in workers if name != server):
                for span, num_bytes in zip(spans, span_bytes, strict=True):
                    sent = round(sizes.span("gradients", num_bytes) * pushes)
                    after = self._complete_after(span) if early else 1.0
                    yield Transfer(worker, server, sent, "gradients", after)
                for num_bytes, holder in zip(span_bytes, holders, strict=True):
                    if holder != worker:  # otherwise it computes with the replica
                        back = sizes.span("parameters", num_bytes)
                        yield Transfer(server, worker, back, "parameters")
                yield Transfer(worker, server, round(sizes.push * pushes), "messages")
                yield Transfer(server, worker, sizes.answer, "messages")
            for num_bytes, holder in zip(span_bytes, holders, strict=True):
                if holder is not None:
                    summed = sizes.span("sums", num_bytes) * self._num_updates
                    yield Transfer(server, holder, summed, "sums")
        yield from self._agreement(placement, sizes)
        yield from self._rows(placement.servers, workers)

    def _agreement(self, placement: Placement, sizes: MessageSizes) -> Iterator[Transfer]:
        """Yield the messages of servers about updates, besides the sums themselves."""
        leader, updates = placement.servers[0], self._num_updates
        small = sizes.small * updates
        for server in placement.servers:
            others = [name for name in placement.servers if name != server]
            for holder in _by_holder(placement, server):
                yield Transfer(server, holder, sizes.decision * updates, "messages")
                yield Transfer(holder, server, small, "messages")  # the sum is taken
                if holder != leader:  # and before that held
                    yield Transfer(holder, leader, small, "messages")
            for other in others:
                if self._mode.clip_norm is not None:
                    yield Transfer(server, other, sizes.small, "messages")
            if server != leader:
                if placement.seconds is not None:
                    yield Transfer(leader, server, small, "messages")  # commit
                if not self._mode.for_all:
                    received = round(sizes.push * self._num_pushes * self._facts.workers)
                    yield Transfer(server, leader, received, "messages")
                    yield Transfer(leader, server, sizes.decision * updates, "messages")

    def _complete_after(self, span: Span) -> float:
        names = {piece.name for block in span.blocks for piece in self._layout.pieces_in(block)}
        return max((self._model.complete_after[name] for name in names), default=1.0)

    def _rows(self, servers: Sequence[str], workers: Sequence[str]) -> Iterator[Transfer]:
        """Yield what rows of tables cost: ids and rows when they are looked up, ids and gradients for each
        server that holds them. Rows are spread over the servers by a hash of their ids."""
        bits, s = self._config.row_bits, len(servers)
        copies = min(1 + self._config.replicas, s)
        for table in self._model.tables:
            rows = table.rows_in(self._facts.batch_size / len(workers))
            row_bytes = bits // 8 * (table.dim + self._model.changes_rows)
            for worker in workers:
                remote = [server for server in servers if server != worker]
                # A worker reads from its own server what that holds, and pushes to the other holder alone.
                read = 1 - copies / s if len(remote) < s else 1.0
                for server in remote:
                    share = None if rows is None else rows * read / len(remote)
                    yield Transfer(worker, server, scaled(8, share), "rows", 0.0)
                    yield Transfer(server, worker, scaled(row_bytes, share), "rows", 0.0)
                    pushed = None if rows is None else rows * copies / s
                    yield Transfer(worker, server, scaled(8 + row_bytes, pushed), "rows")

    # Memory -------------------------------------------------------------------------------------

    def memory(self) -> Iterator[MemoryUse]:
        facts, model, slots = self._facts, self._model, self._mode.slots
        shared = self._shares_memory(one_host=facts.hosts == 1)
        dedicated = self._config.placement == "dedicated"
        trained, frozen = model.gradient_bytes, model.parameter_bytes - model.gradient_bytes
        servers = facts.servers if dedicated else self._num_colocated(shared=shared)
        replicas = self._config.replicas if servers > 1 else 0
        share, state = trained // servers, _part(model.state_bytes, servers)
        if shared:
            yield MemoryUse("host", "parameters", trained, "host")
        else:
            yield MemoryUse("worker", "parameters", trained, "host")
        if facts.gpu or (not shared and not self._config.traits.lockstep):
            # They arrive while the model computes.
            yield MemoryUse("worker", "copy of the parameters", trained)
        if facts.gpu:
            yield MemoryUse("worker", "gradients", trained)
        yield MemoryUse("worker", "gradients to send", slots * trained, "host")
        if frozen:
            yield MemoryUse("worker", "frozen parameters", frozen)
        if dedicated and not shared:
            yield MemoryUse("server", "parameters", trained, "host")
        if dedicated:  # it builds the model to know its parameters and the first weights
            yield MemoryUse("server", "model as built", model.parameter_bytes, "host")
        if not shared:
            remote = facts.workers if dedicated else facts.workers - 1
            yield MemoryUse("server", "received gradients", slots * remote * share, "host")
        yield MemoryUse("server", "sums of gradients", 2 * share, "host")
        yield MemoryUse("server", "optimizer", state, "host")
        if replicas:
            # Inside a host replicas have parameters of their own, and read the sums where they are.
            # Otherwise a worker computes with the parameters, and sums are received.
            of_replicas = add([share if shared else 0, state])
            yield MemoryUse("server", "replicas", of_replicas, "host")
            if not shared:
                yield MemoryUse("server", "sums for replicas", 2 * share, "host")
        if self._mode.compensate:
            yield MemoryUse("server", "compensation", facts.workers * share, "host")
        yield from model_extras(
            facts,
            tables_of="host" if shared else "server",
            table_copies=1.0 if shared else (1 + replicas) / servers,
        )
        # The servers' states of the optimizer are collected, then copied with the rest.
        yield checkpoint_copy(facts, extra=model.state_bytes)

    def _num_colocated(self, *, shared: bool) -> int:
        if self._config.servers != "auto":
            return self._config.servers
        most = self._max_servers(shared=shared)
        return self._facts.workers if most is None else min(most, self._facts.workers)


class MessageSizes:
    """Bytes of messages on a link between members that do not share memory, from messages like those of a
    run."""

    def __init__(self, num_contributions: int, *, encrypted: bool) -> None:
        """`num_contributions`: gradients in one update."""
        from manyhands.ps import protocol
        from manyhands.ps.policies import Contribution, Decision

        self._encrypted = encrypted
        contribution = Contribution(
            *("worker-10", 1000, 0, 1000, 10, 16.0, 64.0, (16, 64)), loss=0.123456789012345678
        )
        decision = Decision.of(1000, (contribution,) * num_contributions, before=Fraction(999))
        applied = protocol.AppliedPush(1000, 0, 0.0123456789)
        new_version = protocol.NewVersion(1000, 1000, (applied,), 1_000_000)
        self.push = self._sent(protocol.PushMessage(contribution, 999, 999))
        self.answer = self._sent(new_version)
        self.decision = self._sent(protocol.Decide(decision))
        self.small = self._sent(protocol.SumHeld(1000, "worker-10"))
        self._heads = {
            "gradients": _head(protocol.GradientSpan(1000, 0, 10)),
            "parameters": _head(protocol.ParameterSpan(1000, 10)),
            "sums": _head(protocol.ReplicaSum(1000, 10)),
        }

    def span(self, what: str, num_bytes: int) -> int:
        """Return the bytes of a span of gradients, parameters or sums, as it is sent."""
        return self._on_wire(self._heads[what] + num_bytes)

    def _sent(self, message: object) -> int:
        return self._on_wire(_head(message))

    def _on_wire(self, num_bytes: int) -> int:
        return num_bytes + self._encrypted * TLS_BYTES * -(-num_bytes // RECORD_BYTES)


def _head(message: object) -> int:
    return sum(part.nbytes for part in pack(message))


def _by_holder(placement: Placement, server: str) -> dict[str, int]:
    """Return the bytes of a server's blocks by the server that holds their replicas."""
    found: dict[str, int] = {}
    for block in placement.blocks_of(server):
        if (holder := placement.replica_of(block)) is not None:
            found[holder] = found.get(holder, 0) + block.num_bytes
    return found


def _part(num_bytes: int | None, of: int) -> int | None:
    return None if num_bytes is None else num_bytes // of
