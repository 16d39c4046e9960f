"""Two deaths within 0.3 s: the second hits while the others still find each other after the first.

A view that is being joined fails with it, and a member that was about to attach memory of the second victim
must take that for a change of view. For more:

    python -m manyhands.testing.chaos --kills 0 --doubles 10
"""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.testing import harness
from manyhands.testing.chaos import audit, train_with_kills
from manyhands.testing.conformance import Case

EPOCHS = 14
FIELDS = {"width": 20_000, "lr": 1e-4}
FLAGS = ("--max-restarts", "1000")


def case(strategy: str, *flags: str, workers: int = 4) -> Case:
    return Case(
        strategy,
        workers=workers,
        flags=(*FLAGS, *flags),
        fields={**FIELDS, "pause_s": 0.02},
    )


CASES = {
    "shm": ("Regression", case("ps:sync")),
    "dedicated": ("Regression", case("ps:sync(placement=dedicated,servers=3)", workers=2)),
    "tcp": ("Regression", case("ps:sync(transport=tcp)", "--trust-network")),
    "allreduce": ("Regression", case("allreduce")),
    "tables": ("Sparse", case("ps:sync")),
    # Each worker changes rows as soon as it can.
    "tables-shared": ("Sparse", case("allreduce(tables=shared)", workers=3)),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", CASES)
def test_two_deaths_at_almost_the_same_time_end_no_run(kind: str, tmp_path: Path) -> None:
    job, disturbed = CASES[kind]
    outcome = train_with_kills(
        disturbed, tmp_path / "run", seed=1, kills=0, doubles=3, epochs=EPOCHS, job=job
    )
    assert outcome.killed, "the run was to last longer"
    alone = harness.train(job, tmp_path / "alone", **FIELDS, epochs=EPOCHS).losses
    audit(outcome, epochs=EPOCHS, alone=alone if disturbed.traits.equals_single else ())
