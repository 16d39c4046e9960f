"""Parses options of tables: `name(option=value,...)` and "2GiB". Errors show what to type. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from manyhands.errors import JobError, closest

_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(\s*(.*?)\s*\)\s*)?")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?\s*")
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def split_call(what: str, text: Any, example: str) -> tuple[str, str]:
    """Split "adam(eps=1e-8)" into ("adam", "eps=1e-8")."""
    parts = _CALL.fullmatch(text) if isinstance(text, str) else None
    if parts is None:
        raise JobError(f"The {what} {text!r} of a table does not parse. Write  {example}.")
    return parts.group(1), parts.group(2) or ""


def options_of(what: str, inside: str, allowed: Sequence[str], example: str) -> dict[str, str]:
    """Parse "a=1,b=2" to a dict. Only allowed keys, each once."""
    options: dict[str, str] = {}
    for option in inside.split(",") if inside else []:
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or not value:
            raise JobError(
                f"The {what} of a table: {option.strip()!r} is not key=value. Write  {example}."
            )
        if key not in allowed:
            raise JobError(
                f"The {what} of a table has no option {key!r}{closest(key, allowed)} "
                f"Allowed: {', '.join(allowed)}."
            )
        if key in options:
            raise JobError(f"The {what} of a table: {key} was given twice; give it once.")
        options[key] = value
    return options


def number_in(what: str, value: Any, low: float, high: float, *, below: bool = False) -> float:
    """Return the value if it is a number from low to high. `below`: high itself is not allowed."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high or (below and value == high):
        upto = f"to below {high:g}" if below else f"to {high:g}"
        raise JobError(f"The {what} can't be {value!r}: it is a number from {low:g} {upto}.")
    return float(value)


def parse_bytes(what: str, value: Any) -> int:
    """Parse a number of bytes, or text such as "2GiB" (powers of 1024) and "2GB" (of 1000)."""
    number = value
    if isinstance(value, str) and (parts := _SIZE.fullmatch(value)):
        base = 1024 if parts.group(3) else 1000
        number = int(float(parts.group(1)) * base ** _POWER[parts.group(2)])
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise JobError(f"{what} can't be {value!r}: give bytes as 2000000000, '2GB' or '1.5GiB'.")
    return number


def show_bytes(num_bytes: float) -> str:
    """Format bytes: 1536 as "1.5 KiB"."""
    power = 0
    while abs(num_bytes) >= 1023.95 and power < 4:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
