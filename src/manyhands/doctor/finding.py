"""The result of a check: one line of output, or one record of JSON."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Finding:
    name: str
    """What was checked."""
    ok: bool | None
    """False: training will fail or suffer until it is fixed. None: worth knowing, nothing to fix."""
    detail: str
    """The result, in words."""
    remedy: str = ""
    """What to type, or at least what to do; never empty if `ok` is False."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Check:
    name: str
    find: Callable[[], Finding]

    def run(self) -> Finding:
        """Run the check. An exception is a finding, too, so that the other checks still run."""
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
    """Whether to print colours: to a terminal that supports them, unless disabled (no-color.org)."""
    dumb = os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")
