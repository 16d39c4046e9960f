"""Context of one member: its view, its peers, and how it reaches them."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from manyhands.errors import LinkError, LinkTimeout, PeerLost, UsageError, ViewChanging
from manyhands.hosts.messages import LinkBroken
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import View
from manyhands.transport import Address, Credentials, Limits, Link, Listener, connect

LINK_GRACE_S = 1.0
"""Time to wait for the next view after a link or collective broke. If none arrives, the peer is taken to be
alive and the network to have failed."""


class Board(Protocol):
    """Small facts that members of a view exchange through the coordinator."""

    def post(self, key: str, value: str) -> None: ...

    def fetch(self, key: str, *, timeout_s: float) -> str: ...

    def send(self, message: object) -> None: ...

    def fail_and_end(self, error: BaseException) -> None: ...


@dataclass
class Me:
    """Context of a member; passed down, so that nothing reads globals."""

    name: str
    host: str
    device: str
    scratch: Path
    """The run's folder on this host, which only this user can read; deleted after the run."""
    view: View
    board: Board | None = None
    rendezvous: str | None = None
    """host:port of a store that another process keeps (torchrun)."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    credentials: Credentials | None = None
    """For TLS between members, if the strategy asked for certificates."""
    secret: str = ""
    """The run's secret, the same in every member."""
    trust_network: bool = False
    """If true, bulk data is authenticated but not encrypted."""
    address: str = "127.0.0.1"
    """Address at which members on other hosts reach this one."""
    spans_hosts: bool = False
    """If true, members may run on other hosts, now or later: nothing that outlives a view may depend on
    shared memory."""
    newest_view: int = 0
    """The number of the newest view that has arrived, before this member has joined it: results of views with
    a lower number are discarded."""
    addresses: dict[str, list[str]] = field(default_factory=dict)
    """Address to the members there, as far as known: errors of torch name addresses."""
    make_group: Callable[[View], Any] | None = None
    """Makes the Group of a view's workers, if they do not connect through torch: threads of one process."""
    in_doubt: bool = False
    """If true, peers were lost though no member died: check that all can be reached before the next group
    forms."""

    def view_folder(self, view: View) -> Path:
        """Return the folder for the sockets and files of a view on this host."""
        folder = self.scratch / f"view-{view.number}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def forget_views(self) -> None:
        """Delete the folders of earlier views, including those of dead members, once all members have joined
        this view."""
        for folder in self.scratch.glob("view-*"):
            if int(folder.name.removeprefix("view-")) < self.view.number:
                shutil.rmtree(folder, ignore_errors=True)

    def listen(self, name: str, view: View, *, limits: Limits, on_host: bool) -> Listener:
        """Listen for members of the view; post the listener's address on the board for `dial`.

        `on_host`: only members of this host connect, over a unix socket called `name`, which trusts
        their user id. Otherwise over TCP: TLS with certificates of the run, or, where the run trusts the
        network or its strategy asked for no certificates, the run's secret and no encryption.
        """
        if on_host:
            return Listener(f"unix:{self.view_folder(view)}/{name}", limits=limits)
        address = str(Address(host=self.address if self.spans_hosts else "127.0.0.1"))
        secret = None if self._tls else self.secret
        return Listener(address, credentials=self._tls, secret=secret, limits=limits)

    def dial(self, address: str, *, timeout_s: float, limits: Limits, peer: str = "") -> Link:
        """Connect to a member that listens with `listen`. With TLS, its certificate must name `peer`,
        where it is given."""
        try:
            return self._dial(address, timeout_s=timeout_s, limits=limits, peer=peer)
        except (UsageError, ValueError) as error:  # posted by a member, not given by the user
            raise LinkError(f"{address[:80]!r} is not an address of {peer or 'a peer'}") from error

    def _dial(self, address: str, *, timeout_s: float, limits: Limits, peer: str) -> Link:
        tls = None if address.startswith("unix:") else self._tls
        link = connect(
            address,
            credentials=tls,
            secret=None if tls or address.startswith("unix:") else self.secret,
            name=self.name,
            timeout_s=timeout_s,
            peer=peer,
            limits=limits,
        )
        if tls and peer and link.peer != peer:
            link.close()
            raise LinkError(f"{link.peer} answered instead of {peer}.")
        return link

    @property
    def _tls(self) -> Credentials | None:
        """For links over TCP; None: the run's secret, without encryption."""
        return None if self.trust_network else self.credentials

    @property
    def view_changing(self) -> bool:
        """If true, there is a newer view than the one that this member is in or joins."""
        return self.newest_view > self.view.number

    @property
    def rank(self) -> int:
        return self.view.rank(self.name)

    @property
    def world(self) -> int:
        return self.view.world

    @property
    def replica(self) -> int:
        """The index of this worker's replica."""
        return self.view.replica(self.name)

    @contextmanager
    def view_change_on_lost_peer(self) -> Iterator[None]:
        """Raise ViewChanging in place of the error when a peer is lost: a broken link, or memory that can't
        be attached, is then not a failure of this member."""
        try:
            yield
        except LinkTimeout:
            raise  # it names the peer and the time
        except LinkError as error:
            self.wait_for_a_view(error, grace_s=LINK_GRACE_S)
            raise ViewChanging(f"a peer is gone: {error}") from error

    def wait_for_a_view(self, error: BaseException, *, grace_s: float) -> None:
        """Wait for the view without the peer that died. If none arrives within `grace_s`, no peer has died:
        ask the coordinator for a view in which all connect again."""
        assert self.board is not None, "views come from a coordinator"
        began, asked = time.monotonic(), False
        while not self.view_changing:
            waited = time.monotonic() - began
            if waited > grace_s and not asked:
                asked = self.in_doubt = True
                peers = self._named_in(error)
                peer = peers[0] if len(peers) == 1 else "one of " + ", ".join(peers)
                self.board.send(LinkBroken(self.view.number, peer))
            if waited > grace_s + self.timeouts.view_s:
                raise self.lost_a_peer(error) from error
            time.sleep(0.005)

    def _named_in(self, error: BaseException) -> list[str]:
        """Return the members that an error is about: those at an address in it, otherwise all others."""
        others = [name for name in self.view.names if name != self.name]
        found = set(re.findall(r"\d+\.\d+\.\d+\.\d+", str(error)))
        named = {name for address in found for name in self.addresses.get(address, ())}
        return [name for name in others if name in named] or others

    def lost_a_peer(self, error: BaseException) -> PeerLost:
        """Return the error for a failed collective: the peers, and torch's message."""
        others = [seat.name for seat in self.view.workers if seat.name != self.name]
        first_line = str(error).strip().splitlines()[0]
        return PeerLost(f"{self.name} lost one of {', '.join(others)}: {first_line}")
