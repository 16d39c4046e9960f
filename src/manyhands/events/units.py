"""Format numbers for people: 3,412 samples, 1.2 M parameters, 12.3 MB, 1 m 12 s; parse times. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any


def count(number: float) -> str:
    return f"{round(number):,}"


def short(number: float) -> str:
    """1234567 is "1.2 M"."""
    return _scaled(number, ("", "k", "M", "B", "T"))


def size(num_bytes: float) -> str:
    """12300000 is "12.3 MB"."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def duration(seconds: float) -> str:
    """72 is "1 m 12 s"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} m {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60:02} m"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600:02} h"


_TIME_UNITS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
"""In milliseconds."""
_TIME = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[dhms]))+")
_TIME_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[dhms])")


def parse_time(text: str) -> float:
    """Parse a time with its unit into seconds: 500ms, 90s, 10m, 1h30m. Raises ValueError for others."""
    text = text.strip().lower()
    parts = _TIME_PART.findall(text) if _TIME.fullmatch(text) else []
    seconds = round(sum(float(number) * _TIME_UNITS[unit] for number, unit in parts)) / 1_000
    if not 0 < seconds < 1e9:
        raise ValueError(text)
    return seconds


def show_time(seconds: float) -> str:
    """Format a time as `parse_time` reads it: 500ms, 90s, 10m, 1h30m."""
    ms, shown = round(seconds * 1_000), ""
    for unit, unit_ms in _TIME_UNITS.items():
        number, ms = divmod(ms, unit_ms)
        shown += f"{number}{unit}" if number else ""
    return shown or "0s"


def figure(value: Any) -> str:
    """Format a loss or a metric with four decimals, so that a changing figure keeps its width."""
    if not isinstance(value, int | float):
        return "unknown" if value is None else clean(str(value))
    if not math.isfinite(value) or value == 0:
        return str(value)
    if abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 1_000 else f"{value:,.1f}"


def plural(number: float, noun: str) -> str:
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def clean(text: str) -> str:
    """Remove escapes and control characters: a member's output must not move the cursor."""
    text = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-_]?)", "", text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


def _scaled(number: float, units: Sequence[str]) -> str:
    if abs(number) < 1_000:
        return f"{round(number)} {units[0]}".rstrip()
    power = 0
    # 999,950 would round to "1000.0 k".
    while abs(number) >= 999.95 and power < len(units) - 1:
        number /= 1_000
        power += 1
    return f"{number:.1f} {units[power]}"
