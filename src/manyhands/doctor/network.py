"""Checks that this host can be reached by its own name, and that links work, by trying.

Each link check is a round trip over manyhands.transport, both ends in this process, with the same
handshake that members go through.
"""

from __future__ import annotations

import queue
import socket
import time

from manyhands.doctor.finding import Finding, fix, good
from manyhands.errors import ManyhandsError
from manyhands.hosts.probe import PROBE, Ping
from manyhands.hosts.scratch import Scratch
from manyhands.threads import start_thread
from manyhands.transport import Authority, Credentials, Listener, connect

RESOLVE_S = 10.0
"""Time limit for a name server; the check for a name does not wait longer."""
LINK_S = 10.0
"""Time limit for one step of a round trip."""


def check_hostname(name: str | None = None, *, timeout_s: float = RESOLVE_S) -> Finding:
    """Check the host's own name: gloo and other libraries resolve it and listen at that address."""
    name = name or socket.gethostname()
    remedy = f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts"
    try:
        addresses = _resolve(name, timeout_s)
    except TimeoutError:
        return fix(f"{name} is not resolved within {timeout_s:g} s", remedy)
    except (OSError, UnicodeError) as error:
        return fix(f"{name} does not resolve: {getattr(error, 'strerror', error)}", remedy)
    own = [address for address in addresses if _is_own(address)]
    if not own:
        found = ", ".join(addresses)
        return fix(f"{name} is {found}, which is not an address of this host", remedy)
    return good(f"{name} is {', '.join(own)}")


def check_unix_sockets() -> Finding:
    try:
        with Scratch() as folder:
            took_s = _round_trip(f"unix:{folder}/s")
    except (ManyhandsError, OSError) as error:
        remedy = "Members meet in the temporary folder; choose another:  export TMPDIR=/tmp"
        return fix(str(error), remedy)
    return good(f"a round trip in {took_s * 1e3:.1f} ms")


def check_tls_links() -> Finding:
    try:
        authority = Authority.create("manyhands doctor")
        near, far = authority.issue("near"), authority.issue("far")
    except ImportError as error:
        return fix(
            f"no certificates without cryptography: {error}", 'pip install "cryptography>=42"'
        )
    try:
        took_s = _round_trip("tcp://127.0.0.1:0", near, far)
    except (ManyhandsError, OSError) as error:
        remedy = "Is loopback up?  sudo ip link set lo up   And does a firewall let it through?"
        return fix(str(error), remedy)
    return good(f"a round trip in {took_s * 1e3:.1f} ms, on 127.0.0.1")


def _round_trip(
    address: str, near: Credentials | None = None, far: Credentials | None = None
) -> float:
    """Measure the round trip of a message over an established link, in seconds."""
    payload = bytes(range(256)) * 16
    with (
        Listener(address, credentials=far) as listener,
        connect(listener.address, credentials=near, timeout_s=LINK_S) as client,
        listener.accept(LINK_S) as answering,
    ):
        began = time.monotonic()
        client.send(Ping(), payload)
        asked = answering.recv(PROBE, timeout_s=LINK_S)
        answering.send(asked.message, asked.payload)
        answer = client.recv(PROBE, timeout_s=LINK_S)
        took_s = time.monotonic() - began
    if answer.payload != payload:
        raise ManyhandsError(f"What came back over {address} is not what was sent.")
    return took_s


def _resolve(name: str, timeout_s: float) -> list[str]:
    """Resolve a name. A name server that does not answer blocks far longer than the timeout here."""
    answers: queue.SimpleQueue[list[str] | BaseException] = queue.SimpleQueue()

    def ask() -> None:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        answers.put(list(dict.fromkeys(str(entry[4][0]) for entry in found)))

    # It raises OSError, or UnicodeError for a name longer than names may be.
    start_thread(ask, name="resolve", on_error=answers.put)
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _is_own(address: str) -> bool:
    """Return whether a process of this host can listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True
