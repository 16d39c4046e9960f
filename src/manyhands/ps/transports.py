"""Transports of parameters, gradients and table rows between the members of a run.

    SharedMemoryTransport    inside a host: one copy of the parameters and tables, which all members attach;
                             servers read gradients where workers write them
    NetworkTransport         between hosts: each process has its own copy, and messages carry the rest

Chosen once, by `choose_transport`. A transport makes what members need at the beginning of a view; no step
passes through it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from manyhands.embeddings.modules import RowModel, bind
from manyhands.ps.block_store import FlatTensors
from manyhands.ps.remote_tables import RemoteTables
from manyhands.ps.rounds import RoundTable
from manyhands.ps.row_pushes import OwnRows, RemoteRows, RowPushes, SharedRows
from manyhands.ps.rows import RowServerState, SharedRowState
from manyhands.ps.server_state import ServerState, SharedServerState
from manyhands.transport.counters import Doorbell

if TYPE_CHECKING:
    from manyhands.hosts.view import View
    from manyhands.ps.node import PsNode


class PsTransport(ABC):
    on_host: ClassVar[bool]
    """If true, servers listen for members of this host only."""
    server_state_type: ClassVar[type[ServerState]]
    row_state_type: ClassVar[type[RowServerState]]

    def __init__(self, node: PsNode, *, serves_rows: bool, copies_params: bool) -> None:
        self.serves_rows = serves_rows
        """If true, servers change the rows of tables; otherwise workers do."""
        self.copies_params = copies_params
        """If true, parameters arrive while a model computes, so it computes with a copy."""
        self._node = node
        self._params: FlatTensors | None = None

    @abstractmethod
    def describe(self) -> str:
        """Describe the transport, for logs."""

    @property
    @abstractmethod
    def max_servers(self) -> int | None:
        """Number of workers that serve by default; None: all."""

    @abstractmethod
    def find_params(self, view: View) -> FlatTensors:
        """Find the parameters that this process computes with, or create them in the first view."""

    @abstractmethod
    def allocate(self, label: str) -> FlatTensors:
        """Create flat tensors that the servers can read, if memory is shared."""

    @abstractmethod
    def enter(self, view: View) -> tuple[RoundTable, Doorbell] | None:
        """Find what members share in a view. Returns the memory in which rounds are agreed on, if any."""

    @abstractmethod
    def row_pushes(self) -> RowPushes:
        """Choose how a worker's gradients of rows reach the rows. The model has tables."""

    @abstractmethod
    def evict_rows(self) -> None:
        """Evict rows of tables that no server evicts. All other members are at rest."""

    def _new_params(self) -> FlatTensors:
        params = self.allocate("manyhands-parameters")
        for name, parameter in self._node.parameters.items():
            params.piece(name).copy_(parameter.detach().reshape(-1))
        return params


class SharedMemoryTransport(PsTransport):
    """The leader has had the memory from the beginning, or has survived with it: it posts the address."""

    on_host = True
    server_state_type = SharedServerState
    row_state_type = SharedRowState

    def __init__(self, node: PsNode) -> None:
        # In rounds, servers apply the gradients of all workers; otherwise each worker applies its own.
        super().__init__(node, serves_rows=node.mode.rounds, copies_params=False)
        self._has_tables = False

    def describe(self) -> str:
        return "shared memory"

    @property
    def max_servers(self) -> int | None:
        node = self._node
        if node.serves_rows:
            return None
        return node.config.servers_for_shards(len(node.layout.shards))

    def find_params(self, view: View) -> FlatTensors:
        node, key = self._node, f"ps/{view.number}/params"
        is_leader = node.is_leader(view)
        if self._params is None:
            self._params = (
                self._new_params()
                if is_leader
                else FlatTensors.attached(node.layout, node.fetch(key))
            )
        if is_leader:
            assert self._params.segment is not None
            node.board.post(key, self._params.segment.address)
        return self._params

    def allocate(self, label: str) -> FlatTensors:
        return FlatTensors.shared(self._node.layout, label=label)

    def enter(self, view: View) -> tuple[RoundTable, Doorbell] | None:
        self._find_tables(view)
        return self._find_rounds(view) if self._node.mode.for_all else None

    def _find_tables(self, view: View) -> None:
        """Find the tables: the leader shares them, others attach. Once: they outlive their creator."""
        node, tables = self._node, self._node.train_state.tables
        if not tables.specs:
            return
        key = f"ps/{view.number}/tables"
        if node.is_leader(view):
            where = tables.stores.addresses() if self._has_tables else tables.stores.share()
            node.board.post(key, json.dumps(where))
        elif not self._has_tables:
            tables.stores.attach(json.loads(node.fetch(key)))
        self._has_tables = True
        tables.writers = view.world

    def _find_rounds(self, view: View) -> tuple[RoundTable, Doorbell]:
        """Find the table and the doorbells of this view."""
        node, key = self._node, f"ps/{view.number}/rounds"
        workers, servers = [seat.name for seat in view.workers], node.servers_in(view)
        if node.is_leader(view):
            table = RoundTable.create(workers, servers)
            node.board.post(key, table.address)
        else:
            table = RoundTable.attach(node.fetch(key), workers, servers)
        return table, Doorbell(node.me.view_folder(view), node.me.name)

    def row_pushes(self) -> RowPushes:
        node = self._node
        if node.serves_rows:
            return SharedRows(node.train_state, node.mode.slots)
        return OwnRows(node.train_state)

    def evict_rows(self) -> None:
        if self._node.rounds is None:  # in rounds, the first server evicts
            tables = self._node.train_state.tables
            tables.stores.evict(tables.now)


class NetworkTransport(PsTransport):
    on_host = False
    server_state_type = ServerState
    row_state_type = RowServerState

    def __init__(self, node: PsNode) -> None:
        super().__init__(node, serves_rows=True, copies_params=not node.config.traits.lockstep)

    def describe(self) -> str:
        return "tcp, authenticated only" if self._node.me.trust_network else "tcp with TLS"

    @property
    def max_servers(self) -> int | None:
        return None

    def find_params(self, view: View) -> FlatTensors:
        if self._params is None:
            self._params = self._new_params()
        return self._params

    def allocate(self, label: str) -> FlatTensors:
        return FlatTensors.private(self._node.layout)

    def enter(self, view: View) -> tuple[RoundTable, Doorbell] | None:
        return None

    def row_pushes(self) -> RowPushes:
        """Replace the model's tables by remote ones, too."""
        node, state = self._node, self._node.train_state
        state.tables = RemoteTables(
            state.tables,
            adds=isinstance(state.model, RowModel),
            bits=node.config.row_bits,
            age=node.mode.row_age,
        )
        bind(state.model, state.tables)
        return RemoteRows(state, node.me.name)

    def evict_rows(self) -> None:
        return  # servers evict their own


def choose_transport(node: PsNode, view: View) -> PsTransport:
    transport, me = node.config.transport, node.me
    assert transport != "shm" or not me.spans_hosts, "memory is shared inside one host"
    if transport != "tcp" and view.one_host and not me.spans_hosts:
        return SharedMemoryTransport(node)
    return NetworkTransport(node)
