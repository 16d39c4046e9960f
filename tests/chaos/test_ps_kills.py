"""Kills of workers and servers in runs that go on: several in a run, each mode and transport.

Every run finishes by itself with every sample once an epoch and every push in the weights once; see
manyhands.testing.chaos, which `make chaos` runs at length.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from manyhands.testing import harness
from manyhands.testing.chaos import audit, case_of, suffer
from manyhands.testing.conformance import Case, assert_once_an_epoch, assert_same_bits

EPOCHS = 12


@pytest.mark.parametrize(
    ("mode", "transport", "placement"),
    [
        ("ps:sync", "shm", "colocated"),
        ("ps:async", "tcp", "colocated"),
        ("ps:ssp", "shm", "dedicated"),
        ("ps:backup", "tcp", "dedicated"),
    ],
)
def test_training_goes_on(mode: str, transport: str, placement: str, tmp_path: Path) -> None:
    case = case_of(mode, transport, placement)
    ordeal = suffer(case, tmp_path / "run", seed=7, kills=2, epochs=EPOCHS)
    assert ordeal.victims, "the run was to last longer"
    audit(ordeal, epochs=EPOCHS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> harness.Finished:
    """Where the servers are and what carries the numbers changes no bit of them."""
    case = case_of("ps:sync", "shm", "dedicated")
    return case.train("Dropout", tmp_path_factory.mktemp("whole") / "run", epochs=EPOCHS, pause_s=0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_dedicated_server_dies_and_no_bit_changes(
    transport: str, undisturbed: harness.Finished, tmp_path: Path
) -> None:
    case = case_of("ps:sync", transport, "dedicated")
    ordeal = suffer(
        case, tmp_path / "run", seed=3, kills=2, epochs=EPOCHS, role="server", job="Dropout"
    )
    assert ordeal.victims, "the run was to last longer"
    audit(ordeal, epochs=EPOCHS)
    assert ordeal.done is not None
    assert_same_bits(ordeal.done.state(), undisturbed.state())


@pytest.mark.parametrize("strategy", ["ps:sync", "ps:async"])
def test_links_that_break_while_both_ends_live(strategy: str, tmp_path: Path) -> None:
    """The kernel cuts connections of a run, several times: it sends again, and counts once."""
    case = Case(f"{strategy}(transport=tcp)", workers=2, fields={"width": 20_000, "lr": 1e-4})
    run, rng, num_cut = tmp_path / "run", random.Random(5), 0
    with harness.command(*case.arguments("Regression", run, pause_s=0.02), run=run) as running:
        running.wait_for_step(2)
        while running.process.poll() is None and num_cut < 6:
            num_cut += cut_one(list(running.pids().values()), rng)
            time.sleep(rng.uniform(0.0, 0.1))
        done = running.wait()
        assert done.code == 0, f"{done.out}\n{done.err}\n{running.logs()}"
    assert num_cut >= 3
    assert not done.of("MemberLost"), "nobody died"
    assert_once_an_epoch(done)
    pushes = json.loads((run / "summary.json").read_text())["pushes"]
    assert pushes["applied"] == pushes["committed"] > 0
    if strategy == "ps:sync":
        whole = case.train("Regression", tmp_path / "whole")
        assert done.losses == whole.losses
        assert_same_bits(done.state(), whole.state())


def cut_one(pids: list[int], rng: random.Random) -> int:
    """Have the kernel reset one of the TCP connections between these processes; how many it was."""
    if shutil.which("ss") is None:
        pytest.skip("connections are cut with ss, of the package iproute2")
    owners = {f"pid={pid}," for pid in pids}
    listed = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True, check=True).stdout
    ends = [line.split() for line in listed.splitlines() if any(o in line for o in owners)]
    ports = {(end[3].rpartition(":")[2], end[4].rpartition(":")[2]) for end in ends}
    if not ports:
        return 0
    source, target = rng.choice(sorted(ports))
    query = ["sport", "=", f":{source}", "and", "dport", "=", f":{target}"]
    cut = subprocess.run(["ss", "-K", "-tnH", *query], capture_output=True, text=True, check=False)
    if cut.returncode != 0 or not (cut.stdout or not ports):
        pytest.skip(f"connections can't be cut here: {cut.stderr}")
    return 1
