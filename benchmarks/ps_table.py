"""Medians with their spread, ratios, and the tables that show them.

A ratio is taken between the two contenders' runs of the same repeat, which are close in time, so that other
load on the machine affects both; the result is the median over the repeats.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ps_contenders import Measured
from ps_watch import Sample

RATIOS = (
    ("ps:sync", "limit", "the parameter server against workers that do not communicate"),
    ("ps:sync", "threads", "against one process with as many threads"),
    ("ps:sync", "ddp", "against torch DDP over gloo"),
    ("ps:sync(transport=tcp)", "ddp", "the same by TCP with TLS"),
    ("ps:sync(transport=tcp) --trust-network", "ddp", "the same by TCP without encryption"),
    ("allreduce", "ddp", "manyhands' all-reduce against torch DDP"),
    ("ps:sync", "ray:sync", "against Ray"),
    ("ps:async", "ray:async", ""),
    ("ps:sync", "rpc:sync", "against torch RPC"),
    ("ps:async", "rpc:async", ""),
    ("ps:async", "tf:async", "against TensorFlow"),
    ("allreduce", "horovod", "against Horovod"),
    ("ps:async", "ps:async@1", "pushes per second of all workers against one worker's"),
)
MIB = 1 << 20


@dataclass
class Row:
    """One contender's results with one model and number of workers."""

    contender: str
    runs: dict[int, Measured] = field(default_factory=dict)
    """By repeat."""
    failed: str | None = None
    base_bytes: int | None = None
    expected_bytes: int | None = None

    @property
    def speeds(self) -> list[float]:
        return [run.samples_per_s for run in self.runs.values()]

    @property
    def memory(self) -> Sample | None:
        return next((run.memory for run in self.runs.values() if run.memory), None)

    def over(self, other: Row) -> list[float]:
        """This one's speed over the other's, in each repeat that both have."""
        return [
            self.runs[repeat].samples_per_s / other.runs[repeat].samples_per_s
            for repeat in self.runs
            if repeat in other.runs
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "contender": self.contender,
            "failed": self.failed,
            "samples_per_s": self.speeds,
            "median": statistics.median(self.speeds) if self.runs else None,
            "window_s": [run.window_s for run in self.runs.values()],
            "memory": asdict(self.memory) if self.memory else None,
            "base_bytes": self.base_bytes,
            "expected_bytes": self.expected_bytes,
        }


def speed_table(rows: Mapping[str, Row]) -> list[str]:
    lines: list[tuple[str, ...]] = [
        ("contender", "samples/s  median (min .. max)", "/ limit", "/ ddp")
    ]
    for row in rows.values():
        if row.runs:
            beside = [ratio(row, rows.get(name)) for name in ("limit", "ddp")]
            lines.append((row.contender, spread(row.speeds, ",.0f"), *beside))
    return [*aligned(lines), *_failures(rows)]


def ratio_table(rows: Mapping[str, Row]) -> list[str]:
    lines = [
        (f"{above} / {below}", ratio(rows[above], rows[below], full=True), words)
        for above, below, words in RATIOS
        if above in rows and below in rows and rows[above].over(rows[below])
    ]
    return aligned([("ratio", "median (min .. max)", ""), *lines]) if lines else []


def memory_table(rows: Mapping[str, Row]) -> list[str]:
    head = ("contender", "Pss MiB", "over base MiB", "expected MiB", "over / expected")
    lines: list[tuple[str, ...]] = [head]
    for row in rows.values():
        if (memory := row.memory) is None:
            continue
        over = None if row.base_bytes is None else memory.total_bytes - row.base_bytes
        share = over / row.expected_bytes if over is not None and row.expected_bytes else None
        lines.append(
            (
                row.contender,
                f"{memory.total_bytes / MIB:,.0f}",
                "-" if over is None else f"{over / MIB:,.0f}",
                "-" if row.expected_bytes is None else f"{row.expected_bytes / MIB:,.0f}",
                "-" if share is None else f"{share:.2f}",
            )
        )
    return aligned(lines) if len(lines) > 1 else []


def ratios(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """As ratio_table, for the JSON file."""
    return [
        {"above": above, "below": below, "median": statistics.median(values), "values": values}
        for above, below, _ in RATIOS
        if above in rows and below in rows and (values := rows[above].over(rows[below]))
    ]


def ratio(above: Row, below: Row | None, *, full: bool = False) -> str:
    values = above.over(below) if below else []
    if not values:
        return "-"
    return spread(values, ".3f") if full else f"{statistics.median(values):.3f}"


def spread(values: Sequence[float], style: str) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:{style}} ({low:{style}} .. {high:{style}})"


def aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _failures(rows: Mapping[str, Row]) -> list[str]:
    return [f"{row.contender}: not measured: {row.failed}" for row in rows.values() if row.failed]
