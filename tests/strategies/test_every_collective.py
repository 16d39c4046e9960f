"""Workers die inside every operation of a group and of its splits: the others go on, and every sample counts
once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from manyhands.testing import harness
from manyhands.testing.counting import COUNTING, Counting
from manyhands.testing.harness import Finished

GROUPS = ("everyone", "pair", "trio", "inner")
OPERATIONS = (
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_and_recv"),
)
ALL = [
    *(f"{group}/{what} {place % 2}" for place, what in enumerate(OPERATIONS) for group in GROUPS),
    "inner/split 1",
]

pytestmark = pytest.mark.usefixtures("extra_strategies")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which workers find the plan."""
    found = tmp_path / "places"
    found.mkdir()
    monkeypatch.setenv("EVERY_COLLECTIVE", str(found))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [ALL[n::5] for n in range(5)],
    ids=lambda plan: plan[0].replace(" ", "-"),
)
def test_a_death_inside_any_operation_of_any_split(
    plan: list[str], tmp_path: Path, folder: Path
) -> None:
    (folder / "plan").write_text("\n".join(plan))
    run = tmp_path / "run"
    arguments = harness.train_arguments(
        *(COUNTING, run, "--max-restarts", "1000"),
        strategy="every-collective",
        workers=4,
        epochs=100_000,
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for(lambda events: recovered_from(len(plan), events))
        pids = running.pids()
        running.signal(signal.SIGTERM)
        done = running.wait(code=75)
    places = {line.split()[0].replace("/", "-") for line in plan}
    assert places <= {path.name for path in folder.iterdir()}
    assert len(done.of("MemberLost")) == len(plan)
    assert not done.of("MemberFailed")
    assert not done.of("Resumed"), "nobody starts again from a checkpoint"
    every_sample_counts_once(done)
    assert harness.gone([*pids.values(), running.process.pid])


def recovered_from(deaths: int, events: list[dict[str, Any]]) -> bool:
    """Two who die at once are one recovery."""
    kinds = [event["event"] for event in events]
    lost = [place for place, kind in enumerate(kinds) if kind == "MemberLost"]
    return len(lost) >= deaths and "Recovered" in kinds[lost[-1] :]


def every_sample_counts_once(done: Finished) -> None:
    """In the events, and in the weights."""
    uses = done.uses_by_epoch()
    last = max(uses)
    assert last > 0
    for epoch, positions in uses.items():
        wanted = sorted(set(positions)) if epoch == last else list(range(Counting.samples))
        assert sorted(positions) == wanted, f"epoch {epoch}"
    state = done.state()
    # The weights are those of samples; positions are theirs in the shuffled order of an epoch.
    totals = (-state["model"]["dense"]).unique(dim=1)
    rows = -state["tables"]["sparse"]["rows"].unique(dim=1)
    assert totals.shape[1] == rows.shape[1] == 1
    assert sorted(set(totals.view(-1).tolist())) in ([last, last + 1], [last + 1])
    assert totals.sum() == rows.sum() == sum(map(len, uses.values()))
