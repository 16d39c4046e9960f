"""Members on a real Ray cluster of two nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import Nodes, need_ray, ray_nodes

import manyhands as mh
from manyhands.testing.conformance import assert_once_an_epoch
from manyhands.testing.harness import (
    Finished,
    RunningCommand,
    command,
    gone,
    resume,
    train,
    train_arguments,
)
from manyhands.testing.jobs import Regression
from manyhands.testing.ports import reserve_port

WIDE = 20_000
"""Several blocks, so that parameter servers have something to share out."""


def on_ray(nodes: Nodes, run: Path, *flags: str, workers: int | str = 2, **fields: Any) -> Finished:
    with started(nodes, run, *flags, workers=workers, **fields) as running:
        return running.wait()


def started(nodes: Nodes, run: Path, *flags: str, workers: int | str = 2, **fields: Any) -> Any:
    place = ("--on", f"ray={nodes.address}")
    arguments = train_arguments("Regression", run, *place, *flags, strategy="allreduce", **fields)
    at = arguments.index("--workers") + 1
    return command(*arguments[:at], str(workers), *arguments[at + 1 :], run=run)


def notices(running: RunningCommand | Finished) -> list[str]:
    events = running.events if isinstance(running, Finished) else running.events()
    return [event["message"] for event in events if event["event"] == "Noticed"]


def views(events: list[dict[str, Any]]) -> list[list[str]]:
    return [event["members"] for event in events if event["event"] == "ViewChanged"]


def check_same(nodes: Nodes, tmp_path: Path, strategy: str) -> Finished:
    here = train("Regression", tmp_path / "here", strategy=strategy, workers=2)
    there = on_ray(nodes, tmp_path / "there", "--strategy", strategy)
    assert there.code == 0, there.err
    assert there.losses == pytest.approx(here.losses, abs=1e-5)
    return there


def test_the_same_losses_as_on_one_machine_and_nothing_left(nodes: Nodes, tmp_path: Path) -> None:
    run = check_same(nodes, tmp_path, "allreduce")
    assert nodes.left() == ""
    assert gone([event["pid"] for event in run.of("MemberStarted")])
    assert "Traceback" not in run.err + run.out
    config = (run.run / "config.json").read_text()
    assert f"ray={nodes.address}" in config


def test_a_lost_node_is_replaced(nodes: Nodes, tmp_path: Path) -> None:
    """Two of three workers are on the node that loses its power."""
    with started(nodes, tmp_path / "run", workers=3, epochs=500, pause_s=0.02) as running:
        running.wait_for_step(3)
        nodes.do("remove")
        running.wait_for(lambda events: len(views(events)[-1]) == 1)
        (left,) = views(running.events())[-1]
        last = max(event.get("step", 0) for event in running.events())
        running.wait_for_step(last + 3)
        nodes.do("add 2")
        running.wait_for(lambda events: len(views(events)[-1]) == 3)
        assert left in views(running.events())[-1], "who was not lost goes on in its place"
        assert any(text.startswith("Ray has given ray-") for text in notices(running))
        running.signal(signal.SIGINT)
        done = running.wait()
    assert done.code == 130, done.err
    assert nodes.left() == ""
    assert gone([event["pid"] for event in done.of("MemberStarted")])


def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    need_ray()
    port = reserve_port()
    done = train("Regression", tmp_path / "run", "--on", f"ray=127.0.0.1:{port}")
    assert done.code == 2
    assert (
        f"There is no Ray cluster at 127.0.0.1:{port} to connect to (Connection refused)"
        in done.err
    )
    assert "ray start --head" in done.err
    assert not done.run.exists()


def test_more_than_the_cluster_has_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    done = on_ray(nodes, tmp_path / "run", "--threads", "2", workers=3)
    assert done.code == 2
    assert "can never give 3 workers with 2 CPUs each. It has" in done.err
    assert done.err.count(f"({nodes.address.rpartition(':')[0]}): ") == 2
    assert "Ask for 1, which fits, or for fewer --threads" in done.err
    done = on_ray(nodes, tmp_path / "run", "--device", "cuda,cpu")
    assert "1 worker with 1 CPU and 1 GPU and 1 worker with 1 CPU" in done.err
    assert nodes.left() == ""


# Those that take longer ---------------------------------------------------------------------------


@pytest.mark.long
def test_ps_sync_has_the_same_losses(nodes: Nodes, tmp_path: Path) -> None:
    check_same(nodes, tmp_path, "ps:sync")


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["ps:async", "ps:sync(placement=dedicated,servers=1)", "ps:ssp(transport=tcp)"]
)
def test_other_strategies_finish(nodes: Nodes, tmp_path: Path, strategy: str) -> None:
    run = on_ray(nodes, tmp_path / "run", "--strategy", strategy, width=WIDE)
    assert run.code == 0, run.err
    assert len(run.steps) == 21
    assert nodes.left() == ""


@pytest.mark.long
@pytest.mark.parametrize(("placement", "wanted"), [("spread", 2), ("pack", 1)])
def test_as_many_nodes_as_possible_or_as_few(
    nodes: Nodes, tmp_path: Path, placement: str, wanted: int
) -> None:
    slow = {"epochs": 5000, "pause_s": 0.02}
    with started(nodes, tmp_path / "run", "--ray-placement", placement, **slow) as running:
        running.wait_for_step(1)
        assert nodes.used() == wanted
        running.signal(signal.SIGINT)
        assert running.wait().code == 130
    assert nodes.left() == ""


@pytest.mark.long
def test_it_waits_for_slots_that_are_in_use(nodes: Nodes, tmp_path: Path) -> None:
    """And a range begins with what there is, and takes what comes."""
    slow = {"epochs": 5000, "pause_s": 0.02}
    with started(nodes, tmp_path / "first", workers=2, **slow) as first:
        first.wait_for_step(1)
        with started(nodes, tmp_path / "range", workers="1:3", **slow) as some:
            some.wait_for(lambda events: bool(views(events)))
            assert len(views(some.events())[0]) == 1
            with started(nodes, tmp_path / "all", workers=3) as whole:
                wanted = "waits for 3 of 3 slots: the cluster has 0 free CPUs"
                whole.wait_for(lambda _: wanted in notices(whole))
                whole.signal(signal.SIGINT)
                assert whole.wait().code == 130
            first.signal(signal.SIGINT)
            assert first.wait().code == 130
            some.wait_for(lambda events: len(views(events)[-1]) == 3)
            some.signal(signal.SIGINT)
            assert some.wait().code == 130
    assert nodes.left() == ""


@pytest.mark.long
def test_all_members_die_and_restart(nodes: Nodes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(nodes, run, "--checkpoint-every", "3", pause_s=0.05) as running:
        running.wait_for_step(8)
        for pid in running.pids().values():
            os.kill(pid, signal.SIGKILL)
        done = running.wait()
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert len(done.of("Resumed")) == 1
    assert_once_an_epoch(done)


@pytest.mark.long
def test_scaling_during_a_run(nodes: Nodes, tmp_path: Path) -> None:
    with started(nodes, tmp_path / "run", workers=1, epochs=5000, pause_s=0.02) as running:
        for number in (3, 1):
            running.wait_for_step(3)
            with command(
                "scale", str(running.run), "--workers", str(number), run=running.run
            ) as scale:
                assert scale.wait().code == 0
        # What is not wanted any more is free for others.
        other = on_ray(nodes, tmp_path / "other", workers=2)
        assert other.code == 0, other.err
        running.signal(signal.SIGTERM)
        assert running.wait().code == 75
    assert nodes.left() == ""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_is_left_after_any_end(
    nodes: Nodes, tmp_path: Path, number: signal.Signals
) -> None:
    with started(nodes, tmp_path / "run", epochs=5000, pause_s=0.02) as running:
        running.wait_for_step(1)
        running.signal(number)
        code = running.wait().code
    assert code == {signal.SIGKILL: -9, signal.SIGTERM: 75, signal.SIGINT: 130}[number]
    assert gone(list(running.pids().values()))
    assert nodes.left() == ""


@pytest.mark.long
def test_a_failed_member_ends_the_run_and_nothing_is_left(nodes: Nodes, tmp_path: Path) -> None:
    done = on_ray(nodes, tmp_path / "run", lr="no number")
    assert done.code == 2
    job = tmp_path / "job.py"
    job.write_text("raise RuntimeError('as it must')\n")
    place = ("--on", f"ray={nodes.address}")
    done = train(job, tmp_path / "second", *place, strategy="allreduce", workers=2)
    assert done.code == 2
    assert "as it must" in done.err
    assert nodes.left() == ""


@pytest.mark.long
def test_a_cluster_of_its_own(tmp_path: Path) -> None:
    """More workers than cores, too: the CPUs are as many as are asked for."""
    need_ray()
    before = set(Path("/tmp").glob("mh-ray-*"))
    workers = 1 + len(os.sched_getaffinity(0))
    done = train(
        "Regression", tmp_path / "run", "--on", "ray=local", strategy="allreduce", workers=workers
    )
    assert done.code == 0, done.err
    assert any("of this machine alone was started" in text for text in notices(done))
    assert any(f"{workers} workers share {workers - 1} cores" in text for text in notices(done))
    assert set(Path("/tmp").glob("mh-ray-*")) == before


@pytest.mark.long
def test_from_python(tmp_path: Path) -> None:
    need_ray()
    job = Regression(epochs=2)
    result = mh.train(job, workers=2, on="ray=local", device="cpu", run_dir=tmp_path / "run")
    assert (result.outcome, len(result.steps["loss"])) == ("finished", 14)


@pytest.mark.long
def test_the_head_is_lost(tmp_path: Path) -> None:
    """Then Ray ends on all nodes, and so does the run; it can be resumed elsewhere."""
    with ray_nodes(2) as nodes:
        slow = {"epochs": 5000, "pause_s": 0.02}
        with started(nodes, tmp_path / "run", "--checkpoint-every", "5", **slow) as running:
            running.wait_for_step(10)
            nodes.do("behead")
            done = running.wait()
        assert done.code not in (0, 2)
        assert {text.partition(" on ")[0] for text in notices(done)} >= {"ray-1", "ray-2"}
        assert gone([event["pid"] for event in done.of("MemberStarted")])
        more = resume(running.run, "--set", "epochs=1", "--max-restarts", "0")
        assert more.code == 0, more.err


@pytest.mark.long
def test_a_run_resumes_on_another_cluster(nodes: Nodes, tmp_path: Path) -> None:
    """Begun on Ray and ended here, and the other way round."""
    whole = train("Regression", tmp_path / "whole", strategy="allreduce", workers=2)
    with started(nodes, tmp_path / "run", pause_s=0.2) as running:
        running.wait_for_step(9)
        running.signal(signal.SIGTERM)
        assert running.wait().code == 75
    place = ("--on", f"ray={nodes.address}")
    with command("resume", str(running.run), *place, "--set", "pause_s=0", run=running.run) as more:
        done = more.wait()
    assert done.code == 0, done.err
    assert done.losses == pytest.approx(whole.losses, abs=1e-5)
