"""What a check found: one line for a person, one record for a program."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Finding:
    name: str
    """Of what was looked at."""
    ok: bool | None
    """False: training will fail or suffer until it is fixed. None: worth knowing, nothing to fix."""
    detail: str
    """What was found."""
    remedy: str = ""
    """What to type, or at least to do; always there where `ok` is False."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Check:
    name: str
    find: Callable[[], Finding]

    def run(self) -> Finding:
        """What it found. A check that fails is a finding too: the others must still be told."""
        try:
            return self.find()
        except Exception as error:
            return Finding(
                self.name,
                False,
                f"the check itself failed: {type(error).__name__}: {error}",
                "This is a fault of manyhands or a very unusual machine: report it with this line.",
            )


def wants_colour(stream: TextIO) -> bool:
    """Whether colours are for a person who can see them and has not refused them (no-color.org)."""
    dumb = os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")
