"""Choose the coordinator's address, so that processes of a scheduler find it, in any order of their starts.

    --control tcp://HOST:PORT   this address
    no key, all on one host     a unix socket in a folder of this user, named after the port
    a torch store (torchrun)    any free port; the coordinator writes its address to the store
    otherwise                   the host and port in the cluster description

The store speaks torch's own protocol, so a separate process that loads torch accesses it (store_note.py). Its
contents need not be secret: a changed address only sends agents to a process without the key, which they
refuse.
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
    """Return whether all processes are known to be on one machine."""
    if spec.size == 1 or is_loopback(spec.host):
        return True
    hosts = {entry.host for entry in spec.entries[: spec.size]}
    return len(hosts) == 1 and "" not in hosts and spec.me.host in hosts


def listening_address(spec: ClusterSpec, control: str | None, *, keyed: bool) -> str:
    """Return the address at which the coordinator listens."""
    if control is not None:
        return control
    if not keyed:
        return _unix_address(spec)
    # If the name is not an address of this machine, others reach it through some forwarding.
    host = own_address(spec.host) or "0.0.0.0"
    return str(Address(host=host, port=0 if spec.store else spec.port or DEFAULT_PORT))


def connect_address(spec: ClusterSpec, control: str | None, *, keyed: bool) -> str | None:
    """Return the address to which agents connect; None if it is in the store."""
    if control is not None:
        return control
    if not keyed:
        return _unix_address(spec)
    if spec.store is not None:
        return None
    return str(Address(host=spec.host, port=spec.port or DEFAULT_PORT))


def _unix_address(spec: ClusterSpec) -> str:
    """Return an address that is the same for all processes of this user with the same cluster. Other users
    have no access."""
    folder = Path(tempfile.gettempdir()) / f"manyhands-of-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    there = folder.stat(follow_symlinks=False)
    if there.st_uid != os.getuid() or there.st_mode & 0o077:
        raise UsageError(
            f"{folder} is not a folder that only this user can read. Remove it, or choose another folder "
            "for temporary files with TMPDIR, or give a key: see  manyhands key --help."
        )
    endpoint = spec.store or f"{spec.host}:{spec.port or DEFAULT_PORT}"
    return f"unix:{folder}/{endpoint.rpartition(':')[2]}"


def publish(store: str, address: str, notify: Callable[[str], None]) -> None:
    """Write the coordinator's address to a torch store, in a thread."""
    where = parse_address(address)
    if is_any(where.host):
        address = str(replace(where, host=way_out()))  # nobody can connect to "all addresses"

    def report(trouble: str) -> None:
        notify(
            f"can't write the coordinator's address to the store at {store} ({trouble}); give it to every "
            "process:  --control tcp://HOST:PORT"
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
            report(trouble)

    start_thread(put, name="publish", on_error=lambda error: report(describe(error)))


class StoreReader:
    """Reads the coordinator's address from a store, also when it changes. Use as a context manager."""

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

    def wait(self, timeout_s: float) -> str | None:
        """Return the newest address, or None if there is none in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self.address is not None, timeout_s
            )
            if self._error is not None:
                raise self._error
            return self.address

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._process.returncode is None:  # else it was closed
                self._error = error
            self._changed.notify_all()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(UsageError), self._changed:  # not written by a coordinator
                self.address = str(parse_address(line.strip()))
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
