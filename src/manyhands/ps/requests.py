"""What a worker asks servers for, beside its steps: the optimizer's state, rows of tables, statistics.

The part of a Client that waits for answers. What was asked and is not answered is asked again when a
connection is made again.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from manyhands.ps.server_connection import ServerConnection
from manyhands.ps.tensor_messages import TensorMessages

Wait = Callable[[Callable[[], Sequence[str]]], None]
"""Waits until nobody is missing."""


class ServerRequests(ABC):
    def __init__(self, lead: str) -> None:
        self.answers: dict[tuple[str, int], memoryview] = {}
        """By server and tag: rows that were asked for."""
        self._lead = lead
        self._news = threading.Condition()
        self._hosts: dict[str, ServerConnection] = {}
        self._tensor_messages = TensorMessages()
        self._states_from: set[str] = set()
        self._buffers: dict[int, memoryview] = {}

    @abstractmethod
    def _waiting(self, what: str, *, asks: int | None = None) -> AbstractContextManager[Wait]: ...

    @abstractmethod
    def _send(
        self, name: str, head: Mapping[str, Any], payload: memoryview | None = None
    ) -> None: ...

    def states(self) -> TensorMessages:
        """What the servers' optimizers remember."""
        return self._ask_all({"k": "state"}, "the optimizer's state")

    def table_states(self, since: int | None = None) -> TensorMessages:
        """All rows of all tables, or those touched after a step."""
        after = 0 if since is None else since + 1
        return self._ask_all({"k": "table_state", "tag": 0, "since": after}, "the tables")

    def _ask_all(self, head: Mapping[str, Any], what: str) -> TensorMessages:
        with self._news:
            self._tensor_messages, self._states_from = TensorMessages(), set()
        for name in self._hosts:
            self._ask(name, head)
        with self._waiting(what) as wait:
            wait(lambda: [name for name in self._hosts if name not in self._states_from])
        return self._tensor_messages

    def rows(self, asked: Mapping[str, tuple[Mapping[str, Any], memoryview]]) -> None:
        """Ask servers for rows (see protocol.py); what they answer will be in `answers`."""
        for name, (head, payload) in asked.items():
            self._ask(name, head, payload, key=f"rows {head['tag']}")

    def wait_for_rows(self, tag: int, servers: Sequence[str]) -> list[memoryview]:
        with self._waiting("rows of tables") as wait:
            wait(lambda: [name for name in servers if (name, tag) not in self.answers])
            return [self.answers.pop((name, tag)) for name in servers]

    def tell_buffers(self, tag: int, payload: memoryview) -> None:
        """Something that every worker should have; `tag` tells one time from another."""
        self._ask(self._lead, {"k": "buffers", "tag": tag}, payload)

    def hear_buffers(self, tag: int) -> memoryview:
        with self._waiting("the first worker's statistics") as wait:
            wait(lambda: [] if tag in self._buffers else [self._lead])
            heard = self._buffers.pop(tag)
            self._buffers.clear()
        return heard

    def _ask(
        self,
        name: str,
        head: Mapping[str, Any],
        payload: memoryview | None = None,
        *,
        key: str = "",
    ) -> None:
        """Say something that is said again if the connection breaks before it is answered."""
        with self._news:
            self._hosts[name].asked[key or str(head["k"])] = (head, payload)
        self._send(name, head, payload)

    def _hear_answer(
        self, host: ServerConnection, kind: str, head: Mapping[str, Any], payload: memoryview | None
    ) -> None:
        match kind:
            case "buffers":
                assert payload is not None
                self._buffers[int(head["tag"])] = payload
            case "state" | "table_state" if "done" in head:
                self._states_from.add(host.name)
                host.asked.pop(kind, None)
            case "state" | "table_state":
                self._tensor_messages.add(head, payload)
            case "rows":
                assert payload is not None
                self.answers[host.name, int(head["tag"])] = payload
                host.asked.pop(f"rows {head['tag']}", None)
