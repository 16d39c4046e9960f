"""What a worker requests from servers, beside its steps: the optimizer's state, table rows, statistics.

The part of a Client that waits for answers. A request without an answer is sent again when a connection is
made again.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from manyhands.errors import ProtocolError
from manyhands.ps.protocol import (
    RowsAnswer,
    RowsRequest,
    StateEnd,
    StateRequest,
    Statistics,
    TableStateRequest,
    TensorMessage,
)
from manyhands.ps.server_connection import ServerConnection
from manyhands.ps.tensor_messages import TensorMessages

Wait = Callable[[Callable[[], Sequence[str]]], None]
"""Waits until no server is missing."""


class ServerRequests(ABC):
    def __init__(self, lead: str) -> None:
        self.answers: dict[tuple[str, int], memoryview] = {}
        """Requested rows, by server and tag."""
        self._lead = lead
        self._news = threading.Condition()
        self._hosts: dict[str, ServerConnection] = {}
        self._tensor_messages = TensorMessages()
        self._states_from: set[str] = set()
        self._buffers: dict[int, memoryview] = {}

    @abstractmethod
    def _waiting(self, what: str, *, asks: int | None = None) -> AbstractContextManager[Wait]: ...

    @abstractmethod
    def _send(self, name: str, message: Any, payload: memoryview | None = None) -> None: ...

    def states(self) -> TensorMessages:
        """Fetch the state of the servers' optimizers."""
        return self._ask_all(StateRequest(), "the optimizer's state")

    def table_states(self, since: int | None = None) -> TensorMessages:
        """Fetch all rows of all tables, or those touched after a step."""
        after = 0 if since is None else since + 1
        return self._ask_all(TableStateRequest(after), "the tables")

    def _ask_all(self, request: StateRequest | TableStateRequest, what: str) -> TensorMessages:
        with self._news:
            self._tensor_messages, self._states_from = TensorMessages(), set()
        for name in self._hosts:
            self._ask(name, request)
        with self._waiting(what) as wait:
            wait(lambda: [name for name in self._hosts if name not in self._states_from])
        return self._tensor_messages

    def rows(self, table: str, tag: int, ids: Mapping[str, memoryview]) -> None:
        """Ask servers for the rows of these ids; their answers will be in `answers`."""
        for name, payload in ids.items():
            self._ask(name, RowsRequest(tag, table, payload.nbytes), payload, key=tag)

    def wait_for_rows(self, tag: int, servers: Sequence[str]) -> list[memoryview]:
        with self._waiting("rows of tables") as wait:
            wait(lambda: [name for name in servers if (name, tag) not in self.answers])
            return [self.answers.pop((name, tag)) for name in servers]

    def tell_buffers(self, tag: int, payload: memoryview) -> None:
        """Send statistics to all other workers; `tag` tells one exchange from another."""
        self._ask(self._lead, Statistics(tag), payload)

    def hear_buffers(self, tag: int) -> memoryview:
        with self._waiting("the first worker's statistics") as wait:
            wait(lambda: [] if tag in self._buffers else [self._lead])
            heard = self._buffers.pop(tag)
            self._buffers.clear()
        return heard

    def _ask(
        self,
        name: str,
        message: Any,
        payload: memoryview | None = None,
        *,
        key: object = None,
    ) -> None:
        """Send a message, and again if the connection breaks before it is answered."""
        with self._news:
            self._hosts[name].requests[key or type(message)] = (message, payload)
        self._send(name, message, payload)

    def _hear_answer(
        self, host: ServerConnection, message: object, payload: memoryview | None
    ) -> None:
        match message:
            case Statistics(tag):
                self._buffers[tag] = _needed(payload)
            case StateEnd(of):
                self._states_from.add(host.name)
                request = StateRequest if of == "state" else TableStateRequest
                host.requests.pop(request, None)
            case TensorMessage():
                self._tensor_messages.add(message, payload)
            case RowsAnswer(tag):
                self.answers[host.name, tag] = _needed(payload)
                host.requests.pop(tag, None)


def _needed(payload: memoryview | None) -> memoryview:
    if payload is None:
        raise ProtocolError("an answer without a payload")
    return payload
