"""Interfaces and addresses of this very host."""

from __future__ import annotations

import socket

import pytest

from manyhands.errors import UsageError
from manyhands.hosts.interfaces import (
    addresses,
    is_any,
    is_loopback,
    own_address,
    reach,
    way_out,
)


def test_every_address_can_be_listened_at_and_has_an_interface() -> None:
    known = addresses()
    assert known["127.0.0.1"] == "lo"
    names = {name for _, name in socket.if_nameindex()}
    for address, interface in known.items():
        assert interface in names
        if ":" not in address:
            with socket.create_server((address, 0)):
                pass


def test_reach_follows_the_address_or_the_interface_set_for_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert str(reach("127.0.0.1")) == "lo (127.0.0.1)"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert reach("203.0.113.9").address == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    with pytest.raises(UsageError, match=r"nonesuch0.*It has.*lo"):
        reach("127.0.0.1")


def test_names_of_this_machine() -> None:
    assert own_address("localhost") == "127.0.0.1"
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("203.0.113.9") is None
    assert own_address("no.such.host.invalid") is None
    assert way_out() in addresses()


@pytest.mark.parametrize(
    ("host", "loopback", "any_host"),
    [
        ("localhost", True, False),
        ("127.3.0.1", True, False),
        ("::1", True, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("host-0", False, False),
        ("10.0.0.1", False, False),
    ],
)
def test_what_an_address_means(host: str, loopback: bool, any_host: bool) -> None:
    assert (is_loopback(host), is_any(host)) == (loopback, any_host)
