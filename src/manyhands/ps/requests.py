"""A worker's requests to servers besides its steps: the optimizer's state, table rows, statistics.

A request without an answer is sent again when a connection is made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from manyhands.embeddings.row_placement import RowPlacement
from manyhands.ps.blocks import BlockLayout
from manyhands.ps.protocol import (
    RowsAnswer,
    RowsRequest,
    StateRequest,
    Statistics,
    TableStateRequest,
    TensorMessage,
)
from manyhands.ps.tensor_messages import TensorMessages, max_state_bytes

if TYPE_CHECKING:
    from manyhands.ps.client import ServerConnection, ServerWaiter

MAX_STATISTICS = 4
"""Statistics that are kept until they are needed: the first worker is at most one exchange ahead."""


class ServerRequests:
    def __init__(
        self,
        connections: Mapping[str, ServerConnection],
        leader: ServerConnection,
        waiter: ServerWaiter,
        *,
        layout: BlockLayout,
    ) -> None:
        self.row_placement: RowPlacement | None = None
        """Placement of table rows, if rows are served."""
        self._connections = connections
        self._leader = leader
        self._waiter = waiter
        self._layout = layout
        self._states = TensorMessages()
        self._rows: dict[tuple[str, int], memoryview] = {}
        """By server and tag."""
        self._statistics: dict[int, memoryview] = {}
        """By tag."""

    def states(self) -> TensorMessages:
        """Fetch the state of the servers' optimizers."""
        return self._fetch(StateRequest(), "the optimizer's state")

    def table_states(self, since: int | None = None) -> TensorMessages:
        """Fetch all rows of all tables, or those touched after a step."""
        return self._fetch(TableStateRequest(0 if since is None else since + 1), "the tables")

    def _fetch(self, request: StateRequest | TableStateRequest, what: str) -> TensorMessages:
        # Rows of tables can be any number.
        most = max_state_bytes(self._layout) if isinstance(request, StateRequest) else None
        self._states = TensorMessages(max_bytes=most)
        for connection in self._connections.values():
            connection.request(request)
        self._wait(what, type(request), list(self._connections))
        return self._states

    def rows(self, table: str, tag: int, ids: Mapping[str, memoryview]) -> None:
        """Request the rows of these ids, by server; `wait_for_rows` returns them."""
        for name, payload in ids.items():
            self._connections[name].request(
                RowsRequest(tag, table, payload.nbytes), payload, key=tag
            )

    def wait_for_rows(self, tag: int, servers: Sequence[str]) -> list[memoryview]:
        self._wait("rows of tables", tag, servers)
        return [self._rows.pop((name, tag)) for name in servers]

    def send_statistics(self, tag: int, payload: memoryview) -> None:
        """Send statistics to all other workers; `tag` tells one exchange from another."""
        self._leader.request(Statistics(tag), payload)

    def receive_statistics(self, tag: int) -> memoryview:
        self._waiter.wait(
            "the first worker's statistics",
            lambda: [] if tag in self._statistics else [self._leader.name],
        )
        received = self._statistics.pop(tag)
        self._statistics.clear()
        return received

    def handle(self, server: str, message: object, payload: memoryview | None) -> None:
        """Handle an answer. Called with the client's lock held."""
        match message:
            case TensorMessage():
                connection = self._connections[server]
                if connection.awaits(StateRequest) or connection.awaits(TableStateRequest):
                    self._states.add(message, payload)
            case Statistics(tag) if payload is not None:
                self._statistics[tag] = payload
                if len(self._statistics) > MAX_STATISTICS:
                    del self._statistics[next(iter(self._statistics))]
            case RowsAnswer(tag) if payload is not None:
                self._rows[server, tag] = payload

    def _wait(self, what: str, key: object, servers: Sequence[str]) -> None:
        self._waiter.wait(
            what, lambda: [name for name in servers if self._connections[name].awaits(key)]
        )
