"""A lab for tests: real namespaces, so it needs root, and skips with the reason where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manyhands.testing.lab import Lab


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Three hosts; a parameter is the bandwidth of each."""
    if reason := Lab.unavailable():
        pytest.skip(reason)
    with Lab(hosts=3, bandwidth=getattr(request, "param", None)) as made:
        yield made
