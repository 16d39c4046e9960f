"""Formats a ClusterSpec as a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from manyhands.hosts.spec import EVALUATOR, ClusterSpec, Entry, join_address

HEADS = ("rank", "name", "role", "host", "port", "local rank", "slots", "devices", "")


def describe(spec: ClusterSpec) -> str:
    return "\n".join([*_facts(spec), "", *_table(spec)])


def _facts(spec: ClusterSpec) -> Iterator[str]:
    yield f"read from    {spec.source}"
    if spec.store is not None:
        where = f"{spec.host} (torch's store is at {spec.store})"
    else:
        where = spec.host if spec.port is None else join_address(spec.host, spec.port)
    yield f"coordinator  {where}"
    room = f"{spec.num_workers} worker{'s' * (spec.num_workers != 1)}"
    if spec.num_servers:
        room += f", {spec.num_servers} parameter server{'s' * (spec.num_servers != 1)}"
    yield f"room for     {room}"
    yield f"this is      {spec.mine.name if spec.mine else 'none of them: say which with --as NAME'}"


def _table(spec: ClusterSpec) -> Iterator[str]:
    rows = [HEADS, *(_row(entry, mine=entry == spec.mine) for entry in spec.entries)]
    used = [at for at in range(len(HEADS)) if any(row[at] for row in rows[1:])]
    widths = {at: max(len(row[at]) for row in rows) for at in used}
    for row in rows:
        yield "  ".join(row[at].ljust(widths[at]) for at in used).rstrip()


def _row(entry: Entry, *, mine: bool) -> tuple[str, ...]:
    counted = entry.role != EVALUATOR
    return (
        str(entry.rank) if counted else "-",
        entry.name,
        entry.role,
        entry.host or "?",
        "" if entry.port is None else str(entry.port),
        ("?" if entry.local_rank is None else str(entry.local_rank)) if counted else "-",
        str(entry.slots) if counted else "-",
        " ".join(entry.devices),
        "<- this process" if mine else "",
    )
