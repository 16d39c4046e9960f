"""One Ray cluster for all tests of a file: starting one takes as long as a short run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_nodes import Nodes, ray_nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Three CPUs on two nodes."""
    with ray_nodes(1, 2) as cluster:
        yield cluster
