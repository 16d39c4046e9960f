"""Three hosts of a lab, of which one loses its power, a cable is pulled, or the network falls apart.

Whatever happens, there is one history: the losses are those of a run that nothing happened to, every sample
is used once an epoch, and who was given up is in no step after that.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
from in_lab import Cast
from together import until

from manyhands.testing.harness import Finished, train, train_arguments
from manyhands.testing.lab import Lab

EPOCHS = 40
LATER_STEP = 20


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = tmp_path_factory.mktemp("alone") / "run"
    return train("Regression", run, epochs=EPOCHS, anneal=False)


def training(lab: Lab, folder: Path, strategy: str, *, epochs: int = EPOCHS) -> Cast:
    """A run of seven steps an epoch, in the midst of them."""
    run = folder / "run"
    fields = {"pause_s": 0.1, "epochs": epochs, "anneal": False}
    given = train_arguments("Regression", run, strategy=strategy, workers=3, **fields)
    cast = Cast(lab, folder, [*given, "--on", "env"], run)
    cast.wait_for_step(LATER_STEP)
    return cast


def check_one_history(done: Finished, alone: Finished) -> None:
    """By the journal of the run: who did which step, and what came of it."""
    num_steps = len(done.losses)
    assert [step["step"] for step in done.steps] == list(range(1, num_steps + 1))
    assert done.losses == pytest.approx(alone.losses[:num_steps], abs=1e-5)
    for used in done.uses_by_epoch().values():
        assert sorted(used) == list(range(98))
    assert len(done.of("RunStarted")) == len(done.of("RunFinished")) == 1
    views = [event["view"] for event in done.of("ViewChanged")]
    assert views == sorted(set(views))
    for lost in done.of("MemberLost"):
        check_fenced(done, lost["member"])


def check_fenced(done: Finished, member: str) -> None:
    """Once the others did a step without it, no other step counts that it had a part in."""
    took_part = [member in step["shares"] for step in done.steps if step["samples"] == 16]
    assert any(took_part)
    first = took_part.index(True)
    assert False in took_part[first:]
    last = first + took_part[first:].index(False)
    assert not any(took_part[last:])


def members_on(done: Finished, host: str) -> list[str]:
    return [event["member"] for event in done.of("MemberStarted") if event["host"] == host]


def test_a_host_loses_its_power(tmp_path: Path, lab: Lab, alone: Finished) -> None:
    cast = training(lab, tmp_path, "allreduce", epochs=8)
    cast.kill(lab.host("host-1"))
    done = cast.finish()
    check_one_history(done, alone)
    assert [lost["member"] for lost in done.of("MemberLost")] == ["worker-1"]
    assert "host-1 is lost: its agent closed its link" in done.out


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync"])
def test_a_host_loses_its_power_and_comes_back(
    tmp_path: Path, lab: Lab, alone: Finished, strategy: str
) -> None:
    cast = training(lab, tmp_path, strategy)
    host = lab.host("host-1")
    cast.kill(host)
    cast.wait_for("Recovered", view=2)
    cast.start(host)
    cast.wait_for("ViewChanged", view=3)
    done = cast.finish()
    check_one_history(done, alone)
    assert members_on(done, "host-1") == ["worker-1", "worker-3"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync"])
def test_a_cable_is_out_for_five_seconds(
    tmp_path: Path, lab: Lab, alone: Finished, strategy: str
) -> None:
    cast = training(lab, tmp_path, strategy)
    lab.cut("host-1")
    time.sleep(5)
    lab.heal()
    done = cast.finish()
    check_one_history(done, alone)
    assert not done.of("MemberLost"), "that is no reason to give anybody up"
    times = [step["time"] for step in done.steps]
    assert max(later - sooner for sooner, later in pairwise(times)) > 4, "all stood still meanwhile"


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync"])
def test_two_hosts_do_not_reach_each_other(
    tmp_path: Path, lab: Lab, alone: Finished, strategy: str
) -> None:
    """Both reach the coordinator, so nobody is lost; but they can't go on together."""
    cast = training(lab, tmp_path, strategy)
    lab.cut("host-1", "host-2")
    done = cast.finish()
    check_one_history(done, alone)
    (lost,) = done.of("MemberLost")
    assert lost["member"] in ("worker-1", "worker-2")
    assert "do not reach each other" in lost["reason"]
    assert len(done.of("ViewChanged")[-1]["members"]) == 2, "another there would not either"


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync"])
def test_a_host_is_cut_off_and_comes_back(
    tmp_path: Path, lab: Lab, alone: Finished, strategy: str
) -> None:
    cast = training(lab, tmp_path, strategy)
    lab.cut("host-1")
    cast.wait_for("Recovered", view=2)
    lab.heal()
    cast.wait_for("ViewChanged", view=3)
    done = cast.finish()
    check_one_history(done, alone)
    assert "host-1 is lost: its agent sent nothing for 15 s" in done.out
    assert "killed its members, reconnecting" in cast.out("host-1")
    assert done.of("ViewChanged")[-1]["members"] == ["worker-0", "worker-2", "worker-3"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "ps:sync"])
def test_the_coordinators_host_is_cut_off_from_the_others(
    tmp_path: Path, lab: Lab, alone: Finished, strategy: str
) -> None:
    """The larger side reaches each other, and has no coordinator: it stops, and comes back."""
    cast = training(lab, tmp_path, strategy)
    lab.cut("host-0")
    sides = ("host-1", "host-2")
    for name in sides:
        until(lambda name=name: "got no message from the coordinator" in cast.out(name))
        until(lambda name=name: len(lab.host(name).processes()) == 1)
    cast.wait_for("Recovered")
    lab.heal()
    done = cast.finish()
    check_one_history(done, alone)
    assert {lost["member"] for lost in done.of("MemberLost")} == {"worker-1", "worker-2"}
    for name in sides:
        assert "killed its members, reconnecting" in cast.out(name)
        assert len(members_on(done, name)) == 2, "one before, and one after it came back"
    assert len(done.of("ViewChanged")[-1]["members"]) == 3
