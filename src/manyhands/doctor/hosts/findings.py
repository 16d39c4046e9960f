"""Problems between hosts, with the host's name and a remedy. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from manyhands.doctor.finding import Finding
from manyhands.doctor.machine import LEAST_MEMORY_BYTES
from manyhands.events.units import duration, size
from manyhands.hosts.host_facts import HostFacts, PairFacts
from manyhands.hosts.machine import unfit

CLOCK_NOTE_S = 1.0
CLOCK_WRONG_S = 3600.0
"""Certificates tolerate a day's difference; a clock that is off by more than an hour was never set."""
SLOW = 0.5
"""A host whose best connection is slower than this fraction of the median has a problem."""
FAR = 5.0
FAR_S = 0.002
"""A round trip is reported if it is this many times the median, and at least this long."""


def find_problems(hosts: Sequence[HostFacts], pairs: Sequence[PairFacts]) -> list[Finding]:
    """Compare all hosts; versions are compared with those of the first, the coordinator's."""
    return [
        *_versions(hosts),
        *_reach(hosts, pairs),
        *_clocks(hosts, pairs),
        *_bandwidth(hosts, pairs),
        *_latency(pairs),
        *_resources(hosts),
    ]


def _versions(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    expected = hosts[0].versions
    for host in hosts[1:]:
        if problem := unfit(expected, host.versions):
            yield Finding(host.host, False, f"{problem} ({hosts[0].host})", _install(expected))
        elif _minor(expected) != _minor(host.versions):
            yield Finding(
                host.host,
                None,
                f"it has Python {host.versions.get('python')}, and {hosts[0].host} "
                f"{expected['python']}",
                "A job that works with one may not with the other; the same on all is safer.",
            )


def _install(versions: dict[str, str]) -> str:
    torch = versions["torch"].partition("+")[0]
    return f'pip install "manyhands=={versions["manyhands"]}" "torch=={torch}"  on that host'


def _minor(versions: dict[str, str]) -> list[str]:
    return str(versions.get("python", "")).split(".")[:2]


def _reach(hosts: Sequence[HostFacts], pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    where = {host.host: f"{host.address}, {host.interface}" for host in hosts}
    for pair in pairs:
        directions = [
            (pair.one, pair.other, pair.trouble),
            (pair.other, pair.one, pair.trouble_back),
        ]
        for one, other, trouble in directions:
            if trouble:
                yield Finding(
                    one,
                    False,
                    f"does not reach {other} ({where[other]}): {trouble}",
                    f"Let TCP through between them on all ports above 1024, or choose another interface on "
                    f"{other}:  export GLOO_SOCKET_IFNAME=...",
                )


def _clocks(hosts: Sequence[HostFacts], pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    first = hosts[0].host
    for pair in pairs:
        off_s = abs(pair.clock_s)
        if first != pair.one or off_s < max(CLOCK_NOTE_S, pair.round_trip_s):
            continue
        direction = "ahead of" if pair.clock_s > 0 else "behind"
        yield Finding(
            pair.other,
            False if off_s > CLOCK_WRONG_S else None,
            f"its clock is {duration(off_s)} {direction} that of {first}",
            "Synchronize it with a time server:  timedatectl set-ntp true",
        )


def _bandwidth(hosts: Sequence[HostFacts], pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    """Compare hosts by their best connection: a slow host makes all of its pairs slow. On a host whose cores
    are busy, the measurement may show the cores and not the network: only a note."""
    best: dict[str, float] = {}
    for pair in pairs:
        for name in (pair.one, pair.other):
            if not pair.trouble:
                best[name] = max(best.get(name, 0.0), pair.slower_bytes_per_s)
    if len(best) < 3:
        return  # between two hosts, either one may be the slow one
    median = statistics.median(best.values())
    by_name = {host.host: host for host in hosts}
    for name, bytes_per_s in best.items():
        if bytes_per_s < SLOW * median:
            interface = by_name[name].interface
            yield Finding(
                name,
                None if _busy(by_name[name]) else False,
                f"{rate(bytes_per_s)} at best over {interface}, and the median here is {rate(median)}; the "
                "slowest host sets the pace",
                f"ethtool {interface}  shows the speed of its link; another interface: "
                "export GLOO_SOCKET_IFNAME=...",
            )


def _latency(pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    delays = [pair.round_trip_s for pair in pairs if not pair.trouble]
    if len(delays) < 3:
        return
    limit_s = max(FAR_S, FAR * statistics.median(delays))
    for pair in pairs:
        if not pair.trouble and pair.round_trip_s > limit_s:
            detail = (
                f"{milliseconds(pair.round_trip_s)} round trip to {pair.other}; others are faster"
            )
            yield Finding(pair.one, None, detail)


def _resources(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        if host.free_bytes < LEAST_MEMORY_BYTES:
            yield Finding(
                host.host,
                False,
                f"{size(host.free_bytes)} of memory free; two workers need {size(LEAST_MEMORY_BYTES)} for "
                "Python and torch alone",
                "Stop other programs there, or start fewer members:  --slots 1",
            )
        if _busy(host):
            yield Finding(
                host.host,
                None,
                f"{host.idle_cores:.1f} of {host.cores} cores idle: other programs compute there, too",
            )


def _busy(host: HostFacts) -> bool:
    return host.idle_cores < host.cores / 2


def rate(bytes_per_s: float) -> str:
    """Format a bandwidth in bits: 117500000 is "940 Mbit/s"."""
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 0.9995e9 else f"{bits / 1e6:.0f} Mbit/s"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if abs(seconds) < 0.01 else f"{seconds * 1e3:.0f} ms"
