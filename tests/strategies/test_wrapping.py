"""A strategy that lays the model out over the workers of a view, before optimizer and metrics exist."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import manyhands
from manyhands.errors import SpecError
from manyhands.testing import harness
from manyhands.testing.conformance import EQUAL, assert_once_an_epoch
from manyhands.testing.harness import Finished

pytestmark = pytest.mark.usefixtures("extra_strategies")


def train(members: ModuleType, job: str, run: Path, *flags: str, **fields: Any) -> Finished:
    strategy = {"strategy": "sharded-by-hand", "workers": 2}
    return members.train(job, run, EQUAL, *flags, **strategy, **fields)


def test_an_optimizer_of_shards_trains_as_one_worker(members: ModuleType, tmp_path: Path) -> None:
    done = train(members, "Regression", tmp_path / "run")
    assert done.code == 0, f"{done.out}\n{done.err}\n{harness.logs_of(tmp_path / 'run')}"
    alone = members.train("Regression", tmp_path / "alone")
    assert_once_an_epoch(done)
    assert done.losses == pytest.approx(alone.losses, rel=1e-5)
    for ours, theirs in zip(done.of("Evaluated"), alone.of("Evaluated"), strict=True):
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4)
    shard = -(-done.of("MemberReady")[0]["parameters"] // 2)
    (view,) = done.of("ViewChanged")
    assert view["placement"] == f"{shard} numbers each"
    assert len(done.state()["optimizer"]["state"]["shard"]["momentum_buffer"]) == shard


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"monitor": "f1"}, "monitor is 'f1', and the evaluation gives loss, worst"),
        ({"optim": "nonesuch"}, "KeyError: 'nonesuch'"),
    ],
)
def test_what_is_built_in_a_view_is_checked_before_training(
    settings: dict[str, str], says: str, members: ModuleType, tmp_path: Path
) -> None:
    done = train(members, "Regression", tmp_path / "run", **settings)
    assert done.code in (1, 2)
    assert says in done.err


def test_the_check_shows_what_was_built_in_the_view(members: ModuleType, tmp_path: Path) -> None:
    done = train(members, "Regression", tmp_path / "run", "--check")
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert "SGD" in done.out


def test_members_that_start_again_load_their_weights_again(
    members: ModuleType, tmp_path: Path
) -> None:
    """A worker is killed, and every member starts again from the checkpoint. It holds one shard, which all
    load, as this strategy saves no other: what counts is that it is loaded after the model is laid out."""
    run = tmp_path / "run"
    flags = ("--checkpoint-every", "2")
    arguments = harness.train_arguments(
        *("Regression", run, EQUAL, *flags),
        strategy="sharded-by-hand",
        workers=2,
        pause_s=members.SLOW_S,
    )
    with members.command(*arguments, run=run) as running:
        running.wait_for_step(5)
        running.kill("worker-1")
        done = running.wait(code=0)
    (resumed,) = done.of("Resumed")
    assert resumed["step"] >= 2
    assert_once_an_epoch(done)


def test_own_loops_refuse_it() -> None:
    with (
        pytest.raises(SpecError, match="it lays the model out before the optimizer is built"),
        manyhands.join("sharded-by-hand", device="cpu"),
    ):
        pass
