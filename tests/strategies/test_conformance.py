"""Every strategy keeps what the conformance suite asks, with real processes.

All checks on all strategies are in test_in_process.py, with threads. Here is what only processes show: deaths
in the middle of anything, bytes on the wire; and one or two cases of the rest for each strategy.

Parameter servers can be arranged in many ways. Each way of a switch (where servers are, how many, what
carries the numbers, replicas, the optimizer) is in some case here, each case in the checks that it has
most to do with: a selection that covers all of them, not all of their pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.testing import harness
from manyhands.testing.conformance import (
    CHECKS,
    Case,
    begins_again,
    counts_every_sample_once,
    ends_and_evaluates_in_steps,
    equals_single,
    equals_single_with_accumulation,
    equals_single_with_own_weights,
    learns,
    repeats_and_resumes_bit_equal,
    reports_the_bytes_it_sends,
    resumes_as,
    survives_a_kill,
)

Check = Callable[[Case, Path], None]

OVER_TCP: list[tuple[Case, tuple[Check, ...]]] = [
    (
        Case("allreduce(transport=tcp)", workers=2),
        (repeats_and_resumes_bit_equal, survives_a_kill, reports_the_bytes_it_sends),
    ),
    (
        Case("allreduce(transport=tcp)", workers=4),
        (equals_single, survives_a_kill, counts_every_sample_once),
    ),
    (
        Case("local(every=3,transport=tcp)", workers=2),
        (survives_a_kill, reports_the_bytes_it_sends),
    ),
]
"""What workers of one host exchange in memory, unless they are told to use the network."""
LIKE_IN_MEMORY = [case for case, _ in OVER_TCP]
CASES = [
    Case("single", workers=1),
    Case("allreduce", workers=2),
    Case("allreduce", workers=4),
    Case("local(every=3)", workers=2),
]

WIDE = {"width": 20_000}
"""Enough parameters for every server to have some."""
TRUSTED = ("--trust-network",)
SHOWN_BY_THREADS = (
    equals_single_with_accumulation,
    equals_single_with_own_weights,
    ends_and_evaluates_in_steps,
)
"""Checks that processes pass if threads do: nothing is measured, and other checks have the same deaths."""
COUNTED = "ps:sync(transport=shm)"
"""Whose samples are counted in `make test`; those of the others in `make long`."""


def plain() -> dict[str, Any]:
    """Neither momentum nor a schedule nor clipping."""
    return {**WIDE, "optim": "sgd", "anneal": False, "clip_norm": "none", "lr": 1e-4}


SERVED: list[tuple[Case, tuple[Check, ...]]] = [
    (
        Case("ps:sync", workers=2),  # one block in all: one of two servers has nothing
        (equals_single_with_accumulation, equals_single_with_own_weights),
    ),
    (
        Case("ps:sync(transport=shm)", workers=2, fields=WIDE),
        (
            repeats_and_resumes_bit_equal,
            counts_every_sample_once,
            ends_and_evaluates_in_steps,
        ),
    ),
    (Case("ps:sync(servers=3)", workers=4, fields=WIDE), (equals_single, survives_a_kill)),
    (
        Case("ps:async(transport=shm)", workers=3, fields=WIDE),
        (begins_again, counts_every_sample_once),
    ),
    (
        Case("ps:sync(servers=1,replicas=0)", workers=2, fields=plain()),
        (equals_single,),
    ),
    (
        Case(
            "ps:sync(transport=tcp)",
            workers=3,
            fields={**WIDE, "optim": "adamw", "lr": 1e-5, "grouped": True},
        ),
        (equals_single, survives_a_kill, counts_every_sample_once),
    ),
    (
        Case("ps:sync(transport=tcp)", workers=2, fields=WIDE, flags=TRUSTED),
        (reports_the_bytes_it_sends,),
    ),
    (
        Case(
            "ps:sync(placement=dedicated,servers=4,replicas=0)",
            workers=2,
            fields={**WIDE, "optim": "adam", "lr": 1e-5, "grouped": True},
        ),
        (equals_single,),
    ),
    (
        Case("ps:sync(placement=dedicated,transport=tcp)", workers=2, fields=WIDE),
        (repeats_and_resumes_bit_equal, begins_again, reports_the_bytes_it_sends),
    ),
    (
        Case("ps:sync(placement=dedicated,transport=tcp)", workers=2, fields=WIDE, flags=TRUSTED),
        (survives_a_kill, counts_every_sample_once),
    ),
    (
        Case("ps:sync(placement=dedicated)", workers=2, fields=WIDE),
        (counts_every_sample_once,),
    ),
    (
        Case("ps:async(transport=tcp)", workers=3, fields=WIDE),
        (counts_every_sample_once, ends_and_evaluates_in_steps),
    ),
    (
        Case(
            "ps:ssp(transport=tcp,placement=dedicated)",
            workers=2,
            fields=WIDE,
        ),
        (counts_every_sample_once,),
    ),
    (
        Case("ps:ssp(transport=shm)", workers=3, fields=WIDE),
        (counts_every_sample_once, ends_and_evaluates_in_steps),
    ),
    (
        Case("ps:backup(transport=tcp)", workers=3, fields=WIDE),
        (counts_every_sample_once, ends_and_evaluates_in_steps),
    ),
]


LEARNING: list[tuple[Case, tuple[Check, ...]]] = [
    (Case("ps:async", workers=2), (learns,)),
    (Case("ps:backup(transport=tcp)", workers=3), (learns,)),
]
"""Strategies that do not equal one worker."""
CODED: list[tuple[Case, tuple[Check, ...]]] = [
    (
        Case("allreduce + int8", workers=2, fields=WIDE),
        (repeats_and_resumes_bit_equal, survives_a_kill, reports_the_bytes_it_sends),
    ),
]
"""Codecs. A test with threads has the other checks."""


@pytest.mark.parametrize(
    ("case", "check"),
    [
        pytest.param(
            case,
            check,
            id=f"{check.__name__}-{case}",
            # What test_in_process.py shows, four workers have in common with two, or one has not to agree on
            # with anybody.
            marks=[pytest.mark.long]
            * (
                check in SHOWN_BY_THREADS
                or case.workers == 4
                or (case.workers == 1 and check not in (equals_single, survives_a_kill))
                or (case.strategy.startswith("local") and check is not survives_a_kill)
                or check is counts_every_sample_once  # of ps:sync in `make test`
            ),
        )
        for check in CHECKS
        for case in CASES
    ],
)
def test_conformance(case: Case, check: Check, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize(
    ("case", "check"),
    [
        pytest.param(
            case,
            check,
            id=f"{check.__name__}-{case}",
            # The slowest, of whose parts the others have something.
            marks=[pytest.mark.long]
            * (
                check in SHOWN_BY_THREADS
                or "dedicated" in case.strategy
                or case.workers == 4
                or (case.workers == 3 and check in (survives_a_kill, begins_again))
                or check is repeats_and_resumes_bit_equal
                or (check is counts_every_sample_once and case.strategy != COUNTED)
                or "servers=1" in case.strategy
                or (case in LIKE_IN_MEMORY and check is not reports_the_bytes_it_sends)
                or case.strategy.startswith("local")
            ),
        )
        for case, checks in (*SERVED, *LEARNING, *CODED, *OVER_TCP)
        for check in checks
    ],
)
def test_conformance_in_selected_checks(case: Case, check: Check, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "other"),
    [
        (
            Case("ps:sync(placement=dedicated,servers=1)", workers=2, fields=WIDE),
            Case("allreduce", workers=3),
        ),
        (Case("allreduce", workers=3, fields=WIDE), Case("ps:sync(transport=tcp)", workers=2)),
    ],
    ids=["from servers", "to servers"],
)
def test_a_run_goes_on_as_another_strategy_on_other_workers(
    case: Case, other: Case, tmp_path: Path
) -> None:
    resumes_as(case, other, tmp_path)


@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync"])
def test_batch_norm_is_evaluated_with_one_set_of_statistics(strategy: str, tmp_path: Path) -> None:
    """Each worker gathers its own running statistics; those of rank 0 are what is evaluated and saved."""
    job = tmp_path / "job.py"
    job.write_text(
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from manyhands.testing.jobs import Regression\n"
        "@dataclass\n"
        "class Norm(Regression):\n"
        "    def model(self):\n"
        "        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))\n"
        "    def eval_data(self):\n"
        "        return self.data()\n"
    )
    fields = {"strategy": strategy, "batch_size": 14, "samples": 98}
    done = harness.train(job, tmp_path / "run", workers=2, **fields)
    assert done.code == 0, done.err
    import torch

    from manyhands.testing.jobs import Regression

    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    ).eval()
    model.load_state_dict(done.state()["model"])
    inputs, targets = Regression().data().tensors
    expected = torch.nn.functional.mse_loss(model(inputs), targets).item()
    assert done.of("Evaluated")[-1]["metrics"]["loss"] == pytest.approx(expected, rel=1e-5)
