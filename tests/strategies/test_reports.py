"""What a whole run reports about its steps, with every strategy."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manyhands.testing.harness import Finished

CASES = [
    ("single", 1),
    ("allreduce", 2),
    ("ps:sync", 2),
    ("ps:sync(transport=tcp)", 2),
    ("ps:async", 2),
    ("ps:ssp(staleness=1)", 2),
    ("ps:backup(spares=1)", 3),
]


@pytest.mark.parametrize(("strategy", "workers"), CASES)
def test_reports_of_a_run(strategy: str, workers: int, members: ModuleType, tmp_path: Path) -> None:
    done = members.train("Logging", tmp_path / "run", strategy=strategy, workers=workers)
    assert done.code == 0, f"{done.out}\n{done.err}"
    measures_follow_their_rules(done)
    tensorboard_has_all_measures(done)


def measures_follow_their_rules(done: Finished) -> None:
    ready = done.of("MemberReady")[0]
    assert ready["measures"]["counted"] == {
        "unit": "samples",
        "rule": "sum",
        "help": "all that were used",
    }
    for record in done.steps:
        sizes = [sum(stop - start for start, stop in held) for held in record["shares"].values()]
        found = record["measures"]
        assert found["counted"] == record["samples"] == sum(sizes)
        assert 0 < found["newest"] <= found["largest"] <= max(sizes)
        assert found["usual"] <= found["largest"]
    for record in done.of("Evaluated"):
        assert record["metrics"]["counted"] == record["samples"]


def tensorboard_has_all_measures(done: Finished) -> None:
    board = EventAccumulator(str(done.run / "tb"))
    board.Reload()
    shown = {point.step: point.value for point in board.Scalars("train/counted")}
    assert shown == {record["step"]: record["samples"] for record in done.steps}
    description = board.SummaryMetadata("train/counted").summary_description
    assert description == "sum, in samples: all that were used"
    progress = [line for line in done.out.splitlines() if "samples/s" in line and "eta" in line]
    assert not any("counted" in line.partition("eval")[0] for line in progress)
