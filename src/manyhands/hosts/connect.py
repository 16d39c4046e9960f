"""Connects a process to the coordinator. The two may start in any order."""

from __future__ import annotations

import errno
import os
import ssl
import time
from contextlib import ExitStack, suppress

from manyhands.errors import CoordinatorLost, LinkError, LinkTimeout, ManyhandsError, UsageError
from manyhands.hosts.interfaces import own_address
from manyhands.hosts.log_stream import CHUNK_BYTES
from manyhands.hosts.rendezvous import StoreReader, connect_address
from manyhands.hosts.spec import ClusterSpec
from manyhands.transport import Authority, Credentials, Limits, Link, connect

LIMITS = Limits(head_bytes=16 << 20, payload_bytes=CHUNK_BYTES)
ATTEMPT_S = 5.0
"""Time limit for one attempt; between attempts the process prints that it waits."""
PRINT_EVERY_S = 10.0
RIVAL_S = 3.0
"""Time to look for another process that is rank 0."""
GONE_S = 4.0
"""Time after which a port that was open and is closed means that the coordinator has ended."""


class Connector:
    def __init__(
        self, spec: ClusterSpec, address: str | None, *, host: str, credentials: Credentials | None
    ) -> None:
        """`address`: of the coordinator; None: it is in the spec's store. `host`: the name of this host."""
        self._spec = spec
        self._address = address
        self._host = host
        self._credentials = credentials

    def connect(self, limit_s: float, *, again: bool = False) -> tuple[str, Link]:
        """Return the coordinator's address and a link to it. If `again` is true, it was there before."""
        began = printed = time.monotonic()
        closed_since: float | None = None
        with ExitStack() as stack:
            reader = None
            if self._address is None:
                assert self._spec.store is not None
                reader = stack.enter_context(StoreReader(self._spec.store))
            address, trouble = self._address, "its address is not known yet"
            while True:
                if reader is not None:
                    address = reader.wait(ATTEMPT_S if address is None else 0)
                if address is not None:
                    try:
                        left_s = began + limit_s - time.monotonic()
                        return address, self._attempt(address, max(0.1, min(ATTEMPT_S, left_s)))
                    except LinkTimeout as error:
                        cause = error.__cause__
                        trouble = str(getattr(cause, "strerror", None) or cause or error)
                        if not _is_closed(cause):
                            closed_since = None
                        elif closed_since is None:
                            closed_since = time.monotonic()
                now = time.monotonic()
                where = address or f"the address that it leaves at {self._spec.store}"
                if again and closed_since is not None and now - closed_since > GONE_S:
                    raise CoordinatorLost(
                        f"The coordinator at {where} has ended; {self._host} ends."
                    )
                if now - began > limit_s:
                    raise ManyhandsError(
                        f"{self._host} found no coordinator at {where} within {limit_s:.0f} s: "
                        f"{trouble}. Was the first process (rank 0) started? Can this host reach it? Give "
                        "all processes another address with  --control tcp://HOST:PORT."
                    )
                if now - printed > PRINT_EVERY_S:
                    printed = now
                    self.print_line(f"waits for the coordinator at {where} ({trouble})")

    def print_line(self, text: str) -> None:
        """Print a line. One write, safe in a signal handler: lines of several processes on one terminal stay
        whole."""
        with suppress(OSError):
            os.write(1, f"{self._host} {text}\n".encode())

    def _attempt(self, address: str, timeout_s: float) -> Link:
        try:
            return connect(
                address,
                credentials=self._credentials,
                timeout_s=timeout_s,
                peer="the coordinator",
                limits=LIMITS,
            )
        except LinkTimeout:
            raise
        except LinkError as error:
            if not isinstance(error.__cause__, ssl.SSLError):
                raise
            raise UsageError(
                f"{self._host} and the coordinator at {address} do not have the same key. Give the "
                "same MANYHANDS_KEY, or the same --key-file, to all processes."
            ) from None


def check_only_coordinator(spec: ClusterSpec, *, authority: Authority, host: str) -> None:
    """Refuse to be the coordinator if another process is one, at the address that all were given.

    Needed only if that address is not known to be this host's; otherwise listening there fails.
    """
    if spec.store is not None or own_address(spec.host) is not None:
        return
    address = connect_address(spec, None, keyed=True)
    connector = Connector(spec, address, host=host, credentials=authority.issue("coordinator"))
    try:
        _, link = connector.connect(RIVAL_S)
    except UsageError:
        raise
    except ManyhandsError:
        return  # nothing answers: this host may be reached by that name all the same
    link.close()
    raise UsageError(
        f"{host} is rank 0 by {spec.source}, and so is another process, the coordinator at {address}. Give "
        "each process a rank of its own: RANK=0, 1, 2, ..."
    )


def _is_closed(error: BaseException | None) -> bool:
    """Return whether that host itself has answered that nothing listens there."""
    return isinstance(error, OSError) and error.errno in (errno.ECONNREFUSED, errno.ENOENT)
