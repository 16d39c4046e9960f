"""Kills of workers and servers in runs that go on: several in a run, each mode and transport.

Every run finishes by itself with every sample once an epoch and every push in the weights once; see
manyhands.testing.chaos, which `make chaos` runs at length.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from manyhands.hosts.faults import cut_a_link
from manyhands.testing import harness
from manyhands.testing.chaos import audit, case_of, train_with_kills
from manyhands.testing.conformance import assert_once_an_epoch, assert_same_bits

EPOCHS = 12
SHORT = 8
"""Epochs of runs that are held against an undisturbed one."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> harness.Finished:
    fields = {**case_of("allreduce", "", "").fields, "pause_s": 0}
    run = tmp_path_factory.mktemp("alone") / "run"
    return harness.train("Regression", run, epochs=EPOCHS, **fields)


@pytest.mark.parametrize(
    ("mode", "transport", "placement"),
    [
        ("allreduce", "", ""),
        ("ps:sync", "shm", "colocated"),
        pytest.param("ps:async", "tcp", "colocated", marks=pytest.mark.long),
        pytest.param("ps:ssp", "shm", "dedicated", marks=pytest.mark.long),
        pytest.param("ps:backup", "tcp", "dedicated", marks=pytest.mark.long),
    ],
)
def test_training_goes_on(
    mode: str, transport: str, placement: str, alone: harness.Finished, tmp_path: Path
) -> None:
    case = case_of(mode, transport, placement)
    coordinator = mode == "ps:sync"  # the others as `make chaos` runs them
    outcome = train_with_kills(
        case, tmp_path / "run", seed=7, kills=2, epochs=EPOCHS, coordinator=coordinator
    )
    assert outcome.killed, "the run was to last longer"
    audit(outcome, epochs=EPOCHS, alone=alone.losses)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> harness.Finished:
    """Where the servers are and what carries the numbers changes no bit of them."""
    case = case_of("ps:sync", "shm", "dedicated")
    return case.train("Dropout", tmp_path_factory.mktemp("whole") / "run", epochs=SHORT, pause_s=0)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_dedicated_server_dies_and_no_bit_changes(
    transport: str, undisturbed: harness.Finished, tmp_path: Path
) -> None:
    case = case_of("ps:sync", transport, "dedicated")
    outcome = train_with_kills(
        case, tmp_path / "run", seed=3, kills=1, epochs=SHORT, role="server", job="Dropout"
    )
    assert outcome.killed, "the run was to last longer"
    audit(outcome, epochs=SHORT)
    assert outcome.done is not None
    assert_same_bits(outcome.done.state(), undisturbed.state())


@pytest.mark.parametrize(
    ("mode", "placement"),
    [("ps:sync", "dedicated"), ("ps:backup", "colocated")],
)
@pytest.mark.long
def test_links_that_break_while_both_ends_live(
    mode: str, placement: str, undisturbed: harness.Finished, tmp_path: Path
) -> None:
    """Connections of a run are reset, between workers and servers and among servers: nobody is lost,
    and what was on the way is sent again and counts once."""
    case = case_of(mode, "tcp", placement)
    run, rng, num_cut = tmp_path / "run", random.Random(5), 0
    with harness.command(*case.arguments("Dropout", run, epochs=SHORT), run=run) as running:
        running.wait_for_step(2)
        while running.process.poll() is None and num_cut < 8:
            try:
                num_cut += cut_a_link(rng.choice(list(running.pids().values())), rng)
            except PermissionError:
                pytest.skip("connections can't be cut here: pidfd_getfd is not permitted")
            time.sleep(rng.uniform(0.0, 0.3))
        done = running.wait()
        assert done.code == 0, f"{done.out}\n{done.err}\n{running.logs()}"
    assert num_cut >= 4
    assert not done.of("MemberLost"), "nobody died"
    assert_once_an_epoch(done, epochs=SHORT)
    pushes = json.loads((run / "summary.json").read_text())["pushes"]
    assert pushes["applied"] == pushes["committed"] > 0
    if mode == "ps:sync":
        assert done.losses == undisturbed.losses
        assert_same_bits(done.state(), undisturbed.state())
