"""Names, addresses and bandwidths of a lab, and whether it can be made."""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
import sys
from pathlib import Path

import pytest

from manyhands.errors import LabError, UsageError
from manyhands.lab.layout import (
    MAX_HOSTS,
    MAX_LABS,
    NOWHERE,
    LabLayout,
    bandwidth_text,
    check_hosts,
    parse_bandwidth,
    shaping,
)
from manyhands.testing.lab import Lab


def test_no_two_hosts_of_any_two_labs_share_a_name_or_an_address() -> None:
    layouts = [LabLayout(number, MAX_HOSTS) for number in (0, 1, 11, MAX_LABS - 1)]
    hosts = list(itertools.product(layouts, range(MAX_HOSTS)))
    assert len({layout.namespaces[index] for layout, index in hosts}) == len(hosts)
    assert len({layout.hardware_address(i) for layout, i in hosts} | {NOWHERE}) == len(hosts) + 1
    addresses = {ipaddress.ip_address(layout.address(index)) for layout, index in hosts}
    assert len(addresses) == len(hosts)
    assert addresses <= set(ipaddress.ip_network("198.18.0.0/15"))


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 100_000_000),
        ("1gbit", 1_000_000_000),
        ("2.5Gbit/s", 2_500_000_000),
        ("0.1 mbit", 100_000),
        ("64kbit", 64_000),
    ],
)
def test_a_bandwidth_is_read_and_written(text: str, bits: int) -> None:
    assert parse_bandwidth(text) == bits
    assert parse_bandwidth(bandwidth_text(bits)) == bits


@pytest.mark.parametrize("text", ["100", "100mbps", "100MB", "fast", "-1mbit", "1mbit 2mbit", ""])
def test_an_invalid_bandwidth_gets_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"kbit, mbit or gbit.*such as 100mbit") as told:
        Lab(bandwidth=text)
    assert repr(text) in str(told.value)


@pytest.mark.parametrize("text", ["1kbit", "1000gbit", "0mbit"])
def test_a_bandwidth_that_cant_be_kept_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="between 10kbit and 100gbit"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["10kbit", "80mbit", "100gbit"])
def test_a_whole_frame_always_fits_the_bucket_and_the_queue(text: str) -> None:
    found = re.fullmatch(
        r"tbf rate (\d+)bit burst (\d+)b limit (\d+)b", shaping(parse_bandwidth(text))
    )
    assert found
    rate, burst, limit = (int(number) for number in found.groups())
    assert rate == parse_bandwidth(text)
    assert 1_514 < burst < limit < 2**32


def test_an_unknown_host_gets_the_closest_name() -> None:
    assert LabLayout(0, 3).index("host-2") == 2
    with pytest.raises(UsageError, match=r"'hots-1'; did you mean 'host-1'\? .*host-0 to host-2"):
        LabLayout(0, 3).index("hots-1")


@pytest.mark.parametrize("hosts", [0, -1, MAX_HOSTS + 1])
def test_a_lab_has_hosts(hosts: int) -> None:
    with pytest.raises(UsageError, match=f"1 to {MAX_HOSTS}"):
        check_hosts(hosts)


def test_the_error_without_labs_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in str(Lab.unavailable())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert re.search(r"A lab needs .*nsenter.*: install .*util-linux", str(Lab.unavailable()))
    with pytest.raises(LabError, match="util-linux"):
        Lab(hosts=1).up()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "only Linux" in str(Lab.unavailable())
