"""Formats a ClusterSpec as a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

from manyhands.events.units import plural
from manyhands.hosts.spec import EVALUATOR, ClusterSpec, Entry, join_address

COLUMNS = ("rank", "name", "role", "host", "port", "local rank", "slots", "devices", "")


def describe(spec: ClusterSpec) -> str:
    return "\n".join([*_facts(spec), "", *_table(spec)])


def _facts(spec: ClusterSpec) -> Iterator[str]:
    yield f"read from    {spec.source}"
    if spec.store is not None:
        where = f"{spec.host} (torch's store is at {spec.store})"
    else:
        where = spec.host if spec.port is None else join_address(spec.host, spec.port)
    yield f"coordinator  {where}"
    room = plural(spec.num_workers, "worker")
    if spec.num_servers:
        room += f", {plural(spec.num_servers, 'parameter server')}"
    yield f"room for     {room}"
    yield f"this is      {spec.mine.name if spec.mine else 'none of them: say which with --as NAME'}"


def _table(spec: ClusterSpec) -> Iterator[str]:
    rows = [_row(entry, mine=entry == spec.mine) for entry in spec.entries]
    used = [any(column) for column in zip(*rows, strict=True)]
    return aligned([tuple(compress(row, used)) for row in (COLUMNS, *rows)])


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


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
