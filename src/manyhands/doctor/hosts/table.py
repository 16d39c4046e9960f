"""Hosts and their connections as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.doctor.hosts.findings import milliseconds, rate
from manyhands.events.units import size
from manyhands.hosts.discovery.table import aligned
from manyhands.hosts.host_facts import HostFacts, PairFacts

MAX_PAIRS = 28
"""All pairs of eight hosts; of more, the slowest are shown."""
HOST_COLUMNS = (
    "host",
    "ranks",
    "address",
    "cores (idle)",
    "memory free",
    "manyhands, torch, Python",
)
PAIR_COLUMNS = ("between", "round trip", "there", "back", "clock ahead")


def format_table(hosts: Sequence[HostFacts], pairs: Sequence[PairFacts]) -> str:
    shown = list(pairs)
    if len(pairs) > MAX_PAIRS:
        shown = sorted(pairs, key=lambda pair: pair.slower_bytes_per_s)[:MAX_PAIRS]
    lines = [*aligned([HOST_COLUMNS, *map(_host_row, hosts)])]
    if shown:
        lines += ["", *aligned([PAIR_COLUMNS, *map(_pair_row, shown)])]
    if len(shown) < len(pairs):
        lines.append(f"... and {len(pairs) - len(shown)} faster ones: --json has them all")
    return "\n".join(lines)


def _host_row(host: HostFacts) -> tuple[str, ...]:
    versions = (str(host.versions.get(name, "?")) for name in ("manyhands", "torch", "python"))
    return (
        host.host,
        " ".join(map(str, host.ranks)),
        f"{host.address} ({host.interface})",
        f"{host.cores} ({host.idle_cores:.1f})",
        f"{size(host.free_bytes)} of {size(host.memory_bytes)}",
        ", ".join(versions),
    )


def _pair_row(pair: PairFacts) -> tuple[str, ...]:
    names = f"{pair.one} - {pair.other}"
    if pair.trouble:
        return (names, "none", "", "", "")
    return (
        names,
        milliseconds(pair.round_trip_s),
        rate(pair.there_bytes_per_s),
        "none" if pair.trouble_back else rate(pair.back_bytes_per_s),
        milliseconds(pair.clock_s),
    )
