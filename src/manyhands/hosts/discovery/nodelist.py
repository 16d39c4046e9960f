"""Slurm's compact lists of hosts: `node[01-04,07],gpu1`. Pure.

list  = item ("," item)*           commas inside brackets belong to the brackets
item  = text and brackets, in any order: rack[1-2]node[01-04]-ib
inside brackets = number or low-high, with commas between; the zeros of `low` are kept: 08-10 is 08, 09, 10
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable

from manyhands.errors import ClusterError
from manyhands.hosts.discovery.values import MAX_ENTRIES

Wrong = Callable[[str], ClusterError]

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_PLAIN = re.compile(r"[^\[\],\s]+")


def expand_nodelist(text: str, *, name: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Expand a list of hosts, in order; `name` is the variable, for messages."""

    def wrong(what: str) -> ClusterError:
        return ClusterError(
            f"{name} is {text!r}: {what}. Slurm writes it like  node[01-04,07],gpu1."
        )

    hosts: list[str] = []
    for item in _split(text.strip(), wrong):
        pieces = [_expand(piece, wrong) for piece in re.split(r"(\[[^\]]*\])", item) if piece]
        if len(hosts) + math.prod(len(piece) for piece in pieces) > MAX_ENTRIES:
            raise wrong(f"these are more than {MAX_ENTRIES} hosts")
        hosts += ["".join(parts) for parts in itertools.product(*pieces)]
    twice = [host for host, times in Counter(hosts).items() if times > 1]
    if twice:
        raise wrong(f"{twice[0]} is there twice")
    return hosts


def _split(text: str, wrong: Wrong) -> list[str]:
    """Split at commas outside of brackets."""
    items, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise wrong("a bracket inside a bracket" if depth > 1 else "a ']' without its '['")
        if letter == "," and depth == 0:
            items.append("")
        else:
            items[-1] += letter
    if depth:
        raise wrong("a '[' without its ']'")
    if not all(items):
        raise wrong("there is nothing between two commas" if len(items) > 1 else "there is no host")
    return items


def _expand(piece: str, wrong: Wrong) -> list[str]:
    """Expand a bracket to its numbers; return anything else unchanged."""
    if not piece.startswith("["):
        if not _PLAIN.fullmatch(piece):
            raise wrong(f"{piece!r} can't be part of a host's name")
        return [piece]
    numbers: list[str] = []
    for part in piece[1:-1].split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise wrong(f"{part!r} in brackets is not a number or LOW-HIGH")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise wrong(f"{part} goes down")
        if int(high) - int(low) >= MAX_ENTRIES:
            raise wrong(f"these are more than {MAX_ENTRIES} hosts")
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return numbers
