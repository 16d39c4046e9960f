"""Every strategy keeps what the conformance suite asks, with threads for processes: seconds for all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.testing.conformance import Case, Check, checks_for

CASES = [
    Case(strategy, workers=workers, in_process=True)
    for strategy, workers in [
        ("single", 1),
        ("allreduce", 2),
        ("allreduce", 4),
        ("allreduce + int8", 3),
        ("ps:sync", 2),
        ("ps:sync(transport=tcp)", 3),
        ("ps:sync(placement=dedicated)", 2),
        ("ps:async(transport=shm)", 3),
        ("ps:async(transport=tcp)", 3),
        ("ps:ssp", 3),
        ("ps:backup", 3),
    ]
]


@pytest.mark.parametrize(
    ("case", "check"),
    [
        pytest.param(case, check, id=f"{check.__name__}-{case}")
        for case in CASES
        for check in checks_for(case)
    ],
)
def test_conformance(case: Case, check: Check, tmp_path: Path) -> None:
    check(case, tmp_path)
