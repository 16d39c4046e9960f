"""A worker of half the speed gets a smaller share, and the mathematics does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.testing import harness


@pytest.mark.parametrize("strategy", ["allreduce", pytest.param("ps:sync", marks=pytest.mark.long)])
def test_a_slow_worker_gets_less(strategy: str, tmp_path: Path) -> None:
    def train(name: str, *flags: str, **fields: object) -> harness.Finished:
        done = harness.train(
            *("Straggling", tmp_path / name, *flags),
            diary=tmp_path / f"{name}.diary",
            samples=1600,
            batch_size=32,
            lr=0.01,
            pause_s=0.0,
            **fields,  # type: ignore[arg-type]
        )
        assert done.code == 0, f"{done.out}\n{done.err}"
        return done

    slowed = train("slowed", strategy=strategy, workers=2, sample_s=0.003, slow_by=4.0)
    sizes = [
        sorted(sum(stop - start for start, stop in held) for held in step["shares"].values())
        for step in slowed.steps
    ]
    assert sizes[0] == [16, 16]
    assert sizes[-1][0] < 12, "the slow one has less in the end"
    assert "times slower than the median" in slowed.out
    alone = train("alone", slow_by=1.0)
    assert slowed.losses == pytest.approx(alone.losses, rel=1e-5)
    equal = train("equal", "--equal-shares", strategy=strategy, workers=2, slow_by=1.0)
    assert all(len(set(size)) == 1 for size in _sizes(equal))


def _sizes(done: harness.Finished) -> list[list[int]]:
    return [
        [sum(stop - start for start, stop in held) for held in step["shares"].values()]
        for step in done.steps
    ]


@pytest.mark.long
def test_a_worker_that_is_only_a_brake_is_left_out(tmp_path: Path) -> None:
    """Its steps take long however small its share is."""
    done = harness.train(
        *("Straggling", tmp_path / "run"),
        strategy="allreduce",
        workers=2,
        diary=tmp_path / "diary",
        samples=32 * 1200,
        batch_size=32,
        lr=0.001,
        pause_s=0.01,
        slow_by=5.0,
    )
    assert done.code == 0, f"{done.out}\n{done.err}"
    (slow,) = {name for name in done.steps[0]["shares"] if name not in done.steps[-1]["shares"]}
    assert f"without {slow} (cpu)" in done.out
    assert "left out (--workers 2:2 keeps all)" in done.out
    (used,) = done.uses_by_epoch().values()
    assert sorted(used) == list(range(32 * 1200))
    assert not done.of("MemberLost")


@pytest.mark.long
def test_a_slow_worker_that_helps_comes_back(tmp_path: Path) -> None:
    done = harness.train(
        *("Straggling", tmp_path / "run"),
        strategy="ps:sync",
        workers=2,
        diary=tmp_path / "diary",
        samples=32 * 1200,
        batch_size=32,
        lr=0.001,
        pause_s=0.0,
        sample_s=0.001,
        slow_by=5.0,
    )
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert ": started again" in done.out
    assert "worker-2" in done.steps[-1]["shares"]
    assert sum(step["samples"] for step in done.steps) == 32 * 1200
