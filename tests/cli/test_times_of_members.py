"""What each member did, in events of real runs: it adds up to the steps, and names the one to wait for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from manyhands.events.events import MEMBER_COLUMNS
from manyhands.testing import harness


def rows_of(done: harness.Finished) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, dict(zip(MEMBER_COLUMNS, row, strict=True)))
        for event in done.of("MemberTimes")
        for name, row in event["members"].items()
    ]


def total(done: harness.Finished, column: str) -> float:
    return sum(row[column] or 0 for _, row in rows_of(done))


@pytest.mark.parametrize(
    ("strategy", "workers"), [("single", 1), ("allreduce", 3), ("ps:async(transport=tcp)", 2)]
)
def test_what_members_did_adds_up_to_the_steps(strategy: str, workers: int, tmp_path: Path) -> None:
    fields = {"strategy": strategy, "workers": workers, "pause_s": 0.05, "epochs": 6}
    done = harness.train("Regression", tmp_path / "run", **fields)
    assert done.code == 0, f"{done.out}\n{done.err}"
    events, steps = done.of("MemberTimes"), done.steps
    assert len(events) >= 2
    assert all(event["seconds"] > 0.99 for event in events[:-1])
    assert total(done, "samples") == sum(step["samples"] for step in steps)
    assert total(done, "bytes_sent") == sum(step["bytes_sent"] for step in steps)
    assert events[-1]["step"] == steps[-1]["step"]
    names = {f"worker-{n}" for n in range(workers)}
    assert all(set(event["members"]) == names and not event["others"] for event in events)
    assert all(row["phase"] for _, row in rows_of(done))  # whatever it was at its last heartbeat
    waited_for = {row["waited_for"] for _, row in rows_of(done)} - {None}
    assert waited_for <= names
    stale = {row["staleness"] for _, row in rows_of(done)}
    assert (stale == {None}) == (strategy in ("single", "allreduce"))


def test_the_others_wait_for_the_slow_one(tmp_path: Path) -> None:
    fields = {"strategy": "allreduce", "workers": 3, "pause_s": 0.01, "slow_by": 20}
    diary = tmp_path / "diary"
    flags = ("--equal-shares", "--max-steps", "20")
    done = harness.train("Straggling", tmp_path / "run", *flags, **fields, diary=diary)
    assert done.code == 0, f"{done.out}\n{done.err}"
    waited = Counter(row["waited_for"] for _, row in rows_of(done) if row["waited_for"])
    ((slow, _),) = waited.most_common(1)
    assert {name for name, row in rows_of(done) if row["waited_for"] == slow} == {
        f"worker-{n}" for n in range(3)
    } - {slow}
    computed = {name: 0.0 for name, _ in rows_of(done)}
    for name, row in rows_of(done):
        computed[name] += row["compute_s"] or 0.0
    assert max(computed, key=lambda name: computed[name]) == slow


def test_dedicated_servers_have_rows(tmp_path: Path) -> None:
    strategy = "ps:async(placement=dedicated,servers=2,transport=tcp)"
    fields = {"strategy": strategy, "workers": 2, "pause_s": 0.05, "epochs": 9, "width": 20_000}
    done = harness.train("Regression", tmp_path / "run", **fields)
    assert done.code == 0, f"{done.out}\n{done.err}"
    servers = {name: row for name, row in rows_of(done) if name.startswith("server-")}
    assert set(servers) == {"server-0", "server-1"}
    assert {row["phase"] for row in servers.values()} == {"serving"}
    updates: Counter[str] = Counter()
    for name, row in rows_of(done):
        if name in servers:
            updates[name] += row["steps"]
            assert (row["samples"], row["bytes_sent"], row["waited_for"]) == (None, None, None)
    parts = sum(row["steps"] for name, row in rows_of(done) if name not in servers)
    # The last beat of a server may be a second old at the end.
    assert all(0.5 * parts < number <= parts for number in updates.values()), (updates, parts)
    assert {row["waited_for"] for name, row in rows_of(done) if name not in servers} <= {
        None,
        *servers,
    }
