"""Limits on classes: small sizes and unique names."""

from __future__ import annotations

from pathlib import Path

import manyhands
from class_limits import over_limits, repeated_names

PACKAGE = Path(manyhands.__file__).parent

EXCEPTIONS: dict[str, str] = {}
"""Exceptions: class to reason."""


def test_classes_are_small() -> None:
    found = over_limits(PACKAGE)
    assert set(found) == set(EXCEPTIONS), "\n".join(
        f"{name}: {excess}" for name, excess in found.items() if name not in EXCEPTIONS
    )


def test_no_class_name_occurs_twice() -> None:
    assert not repeated_names(PACKAGE)
