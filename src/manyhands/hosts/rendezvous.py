"""How processes that somebody else has started find the coordinator, whoever of them comes first.

    --control tcp://HOST:PORT   there, where it is given
    no key, all on one host     a unix socket in a folder of this user, named after the port
    a store of torch (torchrun) any free port; the coordinator leaves its address in that store
    otherwise                   the host and port that the cluster's description names

The store's protocol is torch's own, so a short-lived process that loads torch talks to it (store_note.py).
What it holds is no secret, and whoever puts another address there sends agents to somebody without the key.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from manyhands.errors import UsageError
from manyhands.hosts.interfaces import is_any, is_loopback, own_address, way_out
from manyhands.hosts.spec import DEFAULT_PORT, ClusterSpec
from manyhands.threads import describe, start_thread
from manyhands.transport import Address, parse_address

NOTE = "manyhands.hosts.store_note"
PUBLISH_S = 120.0


def one_host(spec: ClusterSpec) -> bool:
    """Whether all processes are known to be on one machine."""
    if spec.size == 1 or is_loopback(spec.host):
        return True
    hosts = {entry.host for entry in spec.entries[: spec.size]}
    return len(hosts) == 1 and "" not in hosts and spec.me.host in hosts


def listening_address(spec: ClusterSpec, control: str | None, *, keyed: bool) -> str:
    """Where the coordinator listens."""
    if control is not None:
        return control
    if not keyed:
        return _unix_address(spec)
    # Where this machine does not know itself by that name, it is to be reached there somehow.
    host = own_address(spec.host) or "0.0.0.0"
    return str(Address(host=host, port=0 if spec.store else spec.port or DEFAULT_PORT))


def dialled_address(spec: ClusterSpec, control: str | None, *, keyed: bool) -> str | None:
    """Where agents find it; None: the store knows."""
    if control is not None:
        return control
    if not keyed:
        return _unix_address(spec)
    if spec.store is not None:
        return None
    return str(Address(host=spec.host, port=spec.port or DEFAULT_PORT))


def _unix_address(spec: ClusterSpec) -> str:
    """The same for all processes of this user that were told the same; others can't look into the folder."""
    folder = Path(tempfile.gettempdir()) / f"manyhands-of-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    there = folder.stat(follow_symlinks=False)
    if there.st_uid != os.getuid() or there.st_mode & 0o077:
        raise UsageError(
            f"{folder} is not a folder that only this user can read. Remove it, or choose another place "
            "for temporary files with TMPDIR, or give a key: see  manyhands key --help."
        )
    meeting = spec.store or f"{spec.host}:{spec.port or DEFAULT_PORT}"
    return f"unix:{folder}/{meeting.rpartition(':')[2]}"


def publish(store: str, address: str, tell: Callable[[str], None]) -> None:
    """Leave the coordinator's address in a store of torch. Returns at once."""
    where = parse_address(address)
    if is_any(where.host):
        address = str(replace(where, host=way_out()))  # others can't dial "all addresses"

    def tell_trouble(trouble: str) -> None:
        tell(
            f"the store at {store} can't be told where the coordinator is ({trouble}); give every "
            "process the address, as  --control tcp://HOST:PORT"
        )

    def put() -> None:
        try:
            done = subprocess.run(
                [sys.executable, "-m", NOTE, "put", store],
                input=address,
                capture_output=True,
                text=True,
                timeout=PUBLISH_S,
            )
            trouble = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
        except subprocess.TimeoutExpired:
            trouble = f"no answer within {PUBLISH_S:.0f} s"
        if trouble:
            tell_trouble(trouble)

    start_thread(put, name="publish", on_error=lambda error: tell_trouble(describe(error)))


class StoreReader:
    """The newest address that the coordinator has left in a store. Use as a context manager."""

    def __init__(self, store: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", NOTE, "get", store],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address: str | None = None
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        start_thread(self._read, name="store", on_error=self._fail)

    def wait(self, timeout_s: float, *, other_than: str | None) -> str | None:
        """An address other than this one, if one comes in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self.address not in (None, other_than), timeout_s
            )
            if self._error is not None:
                raise self._error
            return self.address if self.address != other_than else None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._process.returncode is None:  # else it was closed
                self._error = error
            self._changed.notify_all()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.address = line.strip()
                self._changed.notify_all()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
