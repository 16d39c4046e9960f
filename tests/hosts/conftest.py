"""A lab for tests: real namespaces, so it needs root, and skips with the reason where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manyhands.testing.lab import Lab


@pytest.fixture
def lab() -> Iterator[Lab]:
    if reason := Lab.unavailable():
        pytest.skip(reason)
    with Lab(hosts=3) as made:
        yield made
