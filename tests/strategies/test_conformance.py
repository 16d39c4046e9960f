"""Every strategy keeps what the conformance suite asks, with real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.testing.conformance import CHECKS, Case

CASES = [
    Case("single", workers=1),
    Case("allreduce", workers=2),
    Case("allreduce", workers=4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(case: Case, check: Callable[[Case, Path], None], tmp_path: Path) -> None:
    check(case, tmp_path)
