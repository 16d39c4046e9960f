"""Limits on classes: sizes that one can keep in mind, and names that mean one thing."""

from __future__ import annotations

from pathlib import Path

import manyhands
from class_limits import over_limits, repeated_names

PACKAGE = Path(manyhands.__file__).parent

EXCEPTIONS: dict[str, str] = {}
"""Class to the reason why it is larger."""


def test_classes_are_small() -> None:
    found = over_limits(PACKAGE)
    assert set(found) == set(EXCEPTIONS), "\n".join(
        f"{name}: {excess}" for name, excess in found.items() if name not in EXCEPTIONS
    )


def test_no_class_name_occurs_twice() -> None:
    assert not repeated_names(PACKAGE)
