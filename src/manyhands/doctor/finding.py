"""The result of a check: one line of output, or one record of JSON."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TextIO


@dataclass(frozen=True)
class Finding:
    name: str
    """Name of the check; a Check adds it."""
    ok: bool | None
    """False: training will fail or suffer until it is fixed. None: worth knowing, nothing to fix."""
    detail: str
    """The result, in words."""
    remedy: str = ""
    """Remedy: what to type, or at least what to do. Never empty if `ok` is False."""


def good(detail: str) -> Finding:
    return Finding("", True, detail)


def note(detail: str, remedy: str = "") -> Finding:
    return Finding("", None, detail, remedy)


def fix(detail: str, remedy: str) -> Finding:
    return Finding("", False, detail, remedy)


@dataclass(frozen=True)
class Check:
    name: str
    find: Callable[[], Finding]
    without_torch: str = ""
    """The result if torch can't be imported; empty: the check does not need it."""

    def run(self) -> Finding:
        """Run the check. An exception is a finding, too, so that the other checks still run."""
        if self.without_torch:
            try:
                import torch  # noqa: F401
            except Exception:  # ImportError, or OSError for a library that does not load
                return Finding(self.name, None, self.without_torch)
        try:
            return replace(self.find(), name=self.name)
        except Exception as error:
            return Finding(
                self.name,
                False,
                f"the check itself failed: {type(error).__name__}: {error}",
                "This is a fault of manyhands or a very unusual machine: report it with this line.",
            )


def wants_colour(stream: TextIO) -> bool:
    """Return whether to print colours: to a terminal that supports them, unless disabled (no-color.org)."""
    dumb = os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")
