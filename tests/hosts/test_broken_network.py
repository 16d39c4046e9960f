"""Hosts of a lab whose network is cut: they are given up, and come back when it heals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from together import KEY, LONG_S, until

from manyhands.testing.harness import Finished, train_arguments
from manyhands.testing.lab import Lab
from manyhands.watch.jsonl import read_events

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True, scope="session")
def _labs_can_be_made() -> None:
    if reason := Lab.unavailable():
        pytest.skip(reason)


def saw(run: Path, kind: str, **wanted: object) -> bool:
    path = run / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return any(
        e["event"] == kind and all(e[name] == value for name, value in wanted.items())
        for e in events
    )


@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync"])
def test_a_host_is_cut_off_and_comes_back(tmp_path: Path, strategy: str) -> None:
    run = tmp_path / "run"
    given = train_arguments(
        "Regression", run, "--on", "env", strategy=strategy, workers=3, pause_s=0.1, epochs=60
    )
    environ = {"WORLD_SIZE": "3", "MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}
    environ |= {"MANYHANDS_KEY": KEY, "NO_COLOR": "1"}
    with Lab(hosts=3) as lab:
        command = [sys.executable, "-m", "manyhands.cli.main", *given]
        started = []
        for rank, host in enumerate(lab.hosts):
            with open(tmp_path / f"out-{rank}", "wb") as out:
                mine = {**environ, "RANK": str(rank)}
                started.append(host.start(command, env=mine, stdout=out, stderr=subprocess.STDOUT))
        until(lambda: saw(run, "StepCommitted", step=20), 3 * LONG_S)
        lab.cut("host-1")
        until(lambda: saw(run, "Recovered", view=2))
        assert lab.host("host-1").processes(), "its agent lives, and dials"
        lab.heal()
        until(lambda: saw(run, "ViewChanged", view=3), 2 * LONG_S)
        codes = [one.wait(4 * LONG_S) for one in started]
    out = (tmp_path / "out-0").read_text()
    assert codes == [0, 0, 0], out
    done = Finished(0, out, "", 0.0, run)
    for used in done.uses_by_epoch().values():
        assert sorted(used) == list(range(98))
    assert "said nothing for 15 s" in out
    assert "its members are ended, and it dials again" in (tmp_path / "out-1").read_text()
    assert done.of("ViewChanged")[-1]["members"] == ["worker-0", "worker-2", "worker-3"]
