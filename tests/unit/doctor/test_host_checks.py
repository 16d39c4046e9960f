"""What is said of hosts by what was measured between them; and a probe that measures itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhands.doctor.hosts import find_problems, format_table
from manyhands.doctor.hosts.findings import rate
from manyhands.hosts.host_facts import HostFacts, PairFacts
from manyhands.hosts.probe import Probe

VERSIONS = {"manyhands": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"}
NAMES = ("a", "b", "c", "d")
HOSTS = [
    HostFacts(name, 8, 7.5, 64 * 10**9, 60 * 10**9, VERSIONS, "10.0.0.1", "eth0", (n,))
    for n, name in enumerate(NAMES)
]
GOOD = PairFacts("", "", round_trip_s=1e-4, there_bytes_per_s=1.2e8, back_bytes_per_s=1.2e8)


def pairs(**bad: PairFacts) -> list[PairFacts]:
    """Of all hosts; `ab=` is the one between a and b."""
    return [
        replace(bad.get(one + other, GOOD), one=one, other=other)
        for at, one in enumerate(NAMES)
        for other in NAMES[at + 1 :]
    ]


def hosts(**other: object) -> list[HostFacts]:
    """The second one differs."""
    return [HOSTS[0], replace(HOSTS[1], **other), *HOSTS[2:]]


def test_no_findings_if_all_is_well() -> None:
    assert find_problems(HOSTS, pairs()) == []
    assert find_problems(HOSTS[:1], []) == []


@pytest.mark.parametrize(
    ("there", "ok", "says"),
    [
        (hosts(versions={**VERSIONS, "torch": "2.12.1"}), False, "it has torch 2.12.1"),
        (hosts(versions={**VERSIONS, "python": "3.12.1"}), None, "it has Python 3.12.1"),
        (hosts(versions={**VERSIONS, "torch": "2.13.1", "python": "3.11.9"}), True, ""),
        (hosts(versions={}), False, "it has manyhands none"),
        (hosts(free_bytes=10**8), False, "100.0 MB of memory free"),
        (hosts(idle_cores=1.0), None, "1.0 of 8 cores idle"),
    ],
)
def test_findings_about_a_host(there: list[HostFacts], ok: bool | None, says: str) -> None:
    found = find_problems(there, pairs())
    if ok:
        assert not found
        return
    (finding,) = found
    assert (finding.name, finding.ok) == ("b", ok)
    assert says in finding.detail
    assert finding.remedy or ok is None


def test_an_unreachable_direction_is_reported_for_its_host() -> None:
    one_way = pairs(bc=replace(GOOD, trouble_back="timed out"))
    (finding,) = find_problems(HOSTS, one_way)
    assert (finding.name, finding.ok) == ("c", False)
    assert "does not reach b (10.0.0.1, eth0): timed out" in finding.detail
    closed = PairFacts("", "", trouble="timed out", trouble_back="No route to host")
    assert [finding.name for finding in find_problems(HOSTS, pairs(bc=closed))] == ["b", "c"]
    assert "b - c    none" in format_table(HOSTS, pairs(bc=closed))


def test_a_slow_host_is_reported_and_its_peers_are_not() -> None:
    slow = replace(GOOD, back_bytes_per_s=1e7)
    (finding,) = find_problems(HOSTS, pairs(ac=slow, bc=slow, cd=slow))
    assert (finding.name, finding.ok) == ("c", False)
    assert "80 Mbit/s at best over eth0, and the median here is 960 Mbit/s" in finding.detail


def test_a_busy_host_that_seems_slow_is_no_fault_of_its_network() -> None:
    slow = replace(GOOD, back_bytes_per_s=1e7)
    findings = find_problems(hosts(idle_cores=0.5), pairs(ab=slow, bc=slow, bd=slow))
    assert [(finding.name, finding.ok) for finding in findings] == [("b", None), ("b", None)]
    assert "80 Mbit/s at best" in findings[0].detail
    assert "0.5 of 8 cores idle" in findings[1].detail


def test_a_far_host_and_a_wrong_clock() -> None:
    (finding,) = find_problems(HOSTS, pairs(bd=replace(GOOD, round_trip_s=0.04)))
    assert (finding.name, finding.ok) == ("b", None)
    assert "40 ms round trip to d" in finding.detail
    (finding,) = find_problems(HOSTS, pairs(ad=replace(GOOD, clock_s=-90.0)))
    assert (finding.name, finding.ok) == ("d", None)
    assert "1 m 30 s behind that of a" in finding.detail
    (finding,) = find_problems(HOSTS, pairs(ad=replace(GOOD, clock_s=86_000.0)))
    assert finding.ok is False


def test_of_many_pairs_the_slowest_are_shown() -> None:
    many = [replace(GOOD, one=f"h{n}", other="x", there_bytes_per_s=1e6 * n) for n in range(40)]
    text = format_table(HOSTS, many)
    assert "h0 - x" in text
    assert "h39 - x" not in text
    assert "and 12 faster ones: --json has them all" in text


@pytest.mark.parametrize(
    ("bytes_per_s", "text"), [(1.175e8, "940 Mbit/s"), (1.25e8, "1.0 Gbit/s"), (0.0, "0 Mbit/s")]
)
def test_rates(bytes_per_s: float, text: str) -> None:
    assert rate(bytes_per_s) == text


def test_two_probes_measure_each_other_and_refuse_others() -> None:
    with (
        Probe("one", "127.0.0.1", "a secret of theirs") as one,
        Probe("other", "127.0.0.1", "a secret of theirs") as other,
        Probe("third", "127.0.0.1", "another secret") as third,
    ):
        pair = one.measure("other", other.address, 0.02)
        assert (pair.one, pair.other, pair.trouble) == ("one", "other", "")
        assert pair.round_trip_s > 0
        assert pair.slower_bytes_per_s > 0
        assert other.measure("one", one.address, 0.0) == PairFacts("other", "one")
        assert "secrets differ" in third.measure("one", one.address, 0.0).trouble
        assert "secrets differ" in third.measure("one", one.address, 0.02).trouble
