"""How members of a view connect to each other: by unix socket, TLS or the run's secret."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from manyhands.errors import LinkError
from manyhands.hosts.me import Me
from manyhands.hosts.view import Seat, View
from manyhands.transport import Authority, Limits
from manyhands.transport.tls import TlsStream

VIEW = View(1, (Seat("worker-0", "here"), Seat("worker-1", "here")))
LIMITS = Limits(head_bytes=1 << 16, payload_bytes=1 << 16)
LONG_S = 30.0


def members(scratch: Path, *, keys: bool, trust_network: bool = False) -> list[Me]:
    authority = Authority.create("run")
    return [
        Me(
            seat.name,
            "here",
            "cpu",
            scratch,
            VIEW,
            credentials=authority.issue(seat.name) if keys else None,
            secret="s" * 32,
            trust_network=trust_network,
        )
        for seat in VIEW.seats
    ]


@pytest.mark.parametrize(
    ("on_host", "keys", "trust_network", "encrypted"),
    [
        (True, True, False, False),
        (True, False, False, False),
        (False, True, False, True),
        (False, True, True, False),
        (False, False, False, False),
    ],
)
def test_members_connect(
    tmp_path: Path, on_host: bool, keys: bool, trust_network: bool, encrypted: bool
) -> None:
    first, second = members(tmp_path, keys=keys, trust_network=trust_network)
    with first.listen("ps", VIEW, limits=LIMITS, on_host=on_host) as listener:
        assert listener.address.startswith("unix:" if on_host else "tcp://127.0.0.1:")
        with (
            second.dial(
                listener.address, timeout_s=LONG_S, limits=LIMITS, peer="worker-0"
            ) as there,
            listener.accept(LONG_S) as here,
        ):
            assert isinstance(there._stream, TlsStream) == encrypted
            sender = threading.Thread(target=lambda: there.send({"x": 1}))
            sender.start()
            assert here.recv(timeout_s=LONG_S).message == {"x": 1}
            sender.join()
            assert on_host or here.peer == "worker-1"


def test_a_member_with_another_name_is_refused(tmp_path: Path) -> None:
    first, second = members(tmp_path, keys=True)
    with (
        first.listen("ps", VIEW, limits=LIMITS, on_host=False) as listener,
        pytest.raises(LinkError, match="worker-0 answered instead of worker-7"),
    ):
        second.dial(listener.address, timeout_s=LONG_S, limits=LIMITS, peer="worker-7")


def test_another_secret_is_refused(tmp_path: Path) -> None:
    first, second = members(tmp_path, keys=False)
    second.secret = "t" * 32
    with (
        first.listen("ps", VIEW, limits=LIMITS, on_host=False) as listener,
        pytest.raises(LinkError, match="secrets differ"),
    ):
        second.dial(listener.address, timeout_s=LONG_S, limits=LIMITS)
