"""A process among parameter servers: finds the other servers, and runs its own server if it is one.

Workers and dedicated servers have one node each. It lives as long as the process; servers and clients are
created anew for each view.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property

from torch import nn

from manyhands.compute.train_state import TrainState
from manyhands.contract import AppliedPart, AppliedSteps, Context, DedicatedServer, Joined
from manyhands.embeddings.modules import RowModel
from manyhands.errors import LinkError, LinkTimeout, ViewChanging, WeightsLost
from manyhands.hosts.me import Board, Me
from manyhands.hosts.messages import LinkBroken, PeerRefused
from manyhands.hosts.view import View
from manyhands.ps.block_store import FlatTensors, ScheduleClock
from manyhands.ps.blocks import BlockLayout
from manyhands.ps.config import ParameterServer
from manyhands.ps.model_layout import layout_of, pieces_of
from manyhands.ps.protocol import SPARSE_BYTES
from manyhands.ps.rounds import RoundTable
from manyhands.ps.rows import RowServerState
from manyhands.ps.server import Server, ServerEvents, ServerView
from manyhands.ps.server_state import ServerState
from manyhands.ps.transports import PsTransport, choose_transport
from manyhands.transport import Limits, Link
from manyhands.transport.counters import Doorbell

logger = logging.getLogger("manyhands.ps")

DIAL_S = 0.5
"""Timeout of one attempt to connect. At a posted address there is a listener, or its process is dead and a
new view comes."""
POLL_S = 0.1
APART_S = 5.0
"""Time without an answer after which a living server counts as unreachable from here."""

FAILED_S = 2.0
"""Grace period before a failed server ends its member, in case a view comes."""


class PsNode:
    def __init__(self, config: ParameterServer, train_state: TrainState, me: Me) -> None:
        self.config = config
        self.train_state = train_state
        self.me = me
        self.mode = config.mode(train_state.clip_norm)
        self.server: Server | None = None
        self.rounds: tuple[RoundTable, Doorbell] | None = None
        """Shared memory in which rounds are agreed on without messages, inside a host."""
        self.server_state: ServerState | None = None
        self._tables = train_state.tables.stores
        """The model's, or its server's if rows are sent."""

    # All of these are made in the first view: the optimizer is built after this object.

    @cached_property
    def layout(self) -> BlockLayout:
        return layout_of(self.train_state.model, self.train_state.optimizer)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return pieces_of(self.train_state.model, self.train_state.optimizer)

    @cached_property
    def schedule_clock(self) -> ScheduleClock:
        # The scheduler here only computes the rate: the optimizers of the blocks do the steps.
        self.train_state.optimizer._opt_called = True  # type: ignore[attr-defined]
        return ScheduleClock(self.train_state.scheduler)

    @cached_property
    def transport(self) -> PsTransport:
        return choose_transport(self, self.me.view)

    @cached_property
    def _limits(self) -> Limits:
        biggest = max((block.num_bytes for block in self.layout.blocks), default=0)
        if self.train_state.tables.specs:
            biggest = max(biggest, SPARSE_BYTES)
        return Limits(head_bytes=8 << 20, payload_bytes=max(8 << 20, 2 * biggest))

    def check(self) -> None:
        """Raise if waiting has become pointless: a new view comes, or the server here has failed."""
        if self.me.view_changing:
            raise ViewChanging(f"view {self.me.newest_view} is coming")
        if self.server is not None and self.server.error is not None:
            raise self.server.error

    def servers_in(self, view: View) -> list[str]:
        servers = self.config.servers_in(view, most=self.transport.max_servers)
        if not servers:
            raise WeightsLost("No server is left, and the parameters are lost with them.")
        return servers

    def leave(self, view: View | None = None) -> None:
        """End the server of the last view; messages that dead members have sent are still handled."""
        if self.server is not None:
            server, self.server = self.server, None
            server.freeze(view.names if view is not None else self.me.view.names)

    def enter(self, view: View, local: Mapping[str, Sequence[FlatTensors]] | None = None) -> None:
        """Find the memory and, if this member is a server, the other servers. Does not wait for them."""
        params = self.transport.find_params(view)
        self._forget_rounds()
        self.rounds = self.transport.enter(view)
        servers = self.servers_in(view)
        if self.me.name not in servers:
            return
        if self.server_state is None:
            self.server_state = self.transport.server_state_type(
                self.me.name,
                self.me.host,
                self.train_state,
                params,
                self.schedule_clock,
                replicas=self.config.replicas,
                momentum_rule=self.mode.momentum_rule,
                rows=self._rows(),
            )
        self.server = Server(
            self.server_state,
            self.mode,
            self.me.listen(
                f"ps-{self.me.name}", view, limits=self._limits, on_host=self.transport.on_host
            ),
            ServerView(
                view.number,
                servers,
                [seat.name for seat in view.workers],
                local=local or {},
                rounds=self.rounds,
            ),
            events=ServerEvents(self._ask_for_a_view, self.refused, self._on_server_error),
        )
        self.board.post(f"ps/{view.number}/{self.me.name}", self.server.address)
        try:
            self.server.meet(self.dial)
        except LinkError as error:
            logger.info("%s: %s", self.me.name, error)  # one of them just died: a new view comes

    def _rows(self) -> RowServerState | None:
        if not self.serves_rows:
            return None
        self._tables.spread = not self.transport.on_host
        return self.transport.row_state_type(
            self.me.name,
            self._tables,
            adds=isinstance(self.train_state.model, RowModel),
            bits=self.config.row_bits,
            by_part=not self.mode.rounds,
        )

    @property
    def serves_rows(self) -> bool:
        """If true, there are tables, and servers change their rows."""
        return bool(self._tables.specs) and self.transport.serves_rows

    def wait_until_begun(self) -> None:
        """If this member is a server, wait until all servers have begun the view."""
        deadline = time.monotonic() + self.me.timeouts.view_s
        while self.server is not None and not self.server.begun.wait(POLL_S):
            self.check()
            if time.monotonic() > deadline:
                raise LinkTimeout(
                    f"{self.me.name} waited {self.me.timeouts.view_s:.0f} s for the other servers."
                )
        self.check()

    def is_leader(self, view: View) -> bool:
        return self.servers_in(view)[0] == self.me.name

    def applied_steps(self) -> AppliedSteps | None:
        """Return what is in the weights, on the leader; None on others."""
        if self.server is None or not self.is_leader(self.me.view):
            return None
        assert self.server_state is not None
        ledger = self.server_state.ledger
        parts = [
            AppliedPart(step, part, (weight, loss)) for step, part, weight, loss in ledger.parts
        ]
        return AppliedSteps(ledger.version, parts, dict(ledger.counts))

    def close(self) -> AppliedSteps | None:
        """End the server of this view. Returns what is in the weights, on the leader."""
        applied = self.applied_steps()
        self.leave()
        self._forget_rounds()
        return applied

    def _forget_rounds(self) -> None:
        for each in self.rounds or ():
            each.close()
        self.rounds = None

    def dial(self, server: str) -> Link:
        """Connect to a server of this view; retries until it answers or a new view comes."""
        view = self.me.view.number
        address = self.fetch(f"ps/{view}/{server}")
        began, asked = time.monotonic(), False
        while True:
            try:
                return self.me.dial(address, timeout_s=DIAL_S, limits=self._limits, peer=server)
            except LinkError:
                self.check()
                if self.me.view.number > view:
                    raise ViewChanging(f"view {view} ended while dialing {server}") from None
                waited = time.monotonic() - began
                if waited > self.me.timeouts.view_s:
                    raise
                if waited > APART_S and not asked:
                    asked = True
                    self._ask_for_a_view(server)

    def fetch(self, key: str) -> str:
        """Wait for a value on the board."""
        deadline = time.monotonic() + self.me.timeouts.view_s
        while True:
            try:
                return self.board.fetch(key, timeout_s=POLL_S)
            except LinkTimeout:
                self.check()
                if time.monotonic() > deadline:
                    raise

    def _ask_for_a_view(self, peer: str) -> None:
        """Ask for a new view, in which all servers reconnect: a living one is unreachable."""
        with suppress(LinkError):
            self.board.send(LinkBroken(self.me.view.number, peer))

    def _on_server_error(self, error: BaseException) -> None:
        """End this member after a failure of its server, unless a new view replaces the server anyway. A
        worker that waits for the server raises its error by itself; one that waits for orders does
        not, and the other workers would wait for this server."""
        grace_s = 0.0 if isinstance(error, WeightsLost) else FAILED_S  # no view brings them back
        view, deadline = self.me.view.number, time.monotonic() + grace_s
        while time.monotonic() < deadline:
            if self.me.newest_view > view:
                return
            time.sleep(POLL_S)
        self.board.fail_and_end(error)

    def refused(self, peer: str, why: str) -> None:
        """Report a peer that broke the protocol, so that it is ended and nobody waits for it."""
        with suppress(LinkError):
            self.board.send(PeerRefused(self.me.view.number, peer, why[:1000]))

    @property
    def board(self) -> Board:
        assert self.me.board is not None, "parameter servers need a coordinator"
        return self.me.board


class DedicatedPsServer(DedicatedServer):
    """A member that serves and computes no gradients."""

    def __init__(self, config: ParameterServer, context: Context) -> None:
        self._node = PsNode(config, context.train_state, context.me)
        self._first_version: int | None = None
        """Version of the weights when it began to serve."""

    def on_view(self, view: View) -> Joined:
        self._node.leave(view)
        self._node.enter(view)
        self._node.wait_until_begun()
        if self._first_version is None:
            self._first_version = self._version
        return Joined(applied=self._node.applied_steps())

    @property
    def num_updates(self) -> int:
        first = self._first_version
        return 0 if first is None else max(0, self._version - first)

    @property
    def _version(self) -> int:
        state = self._node.server_state
        return state.ledger.version if state is not None else 0

    def check(self) -> None:
        server = self._node.server
        if server is not None and server.error is not None:
            raise server.error

    def close(self) -> AppliedSteps | None:
        return self._node.close()
