"""Labs for tests: real namespaces, so these need root, and skip with the reason where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manyhands.testing.lab import Lab


@pytest.fixture(autouse=True, scope="session")
def _labs_can_be_made() -> None:
    if reason := Lab.unavailable():
        pytest.skip(reason)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=3) as made:
        yield made
