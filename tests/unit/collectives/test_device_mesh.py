"""Meshes for torch's own pieces: made from a group, cut and closed with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from manyhands.collectives.lone_worker import LoneWorker
from manyhands.testing.thread_group import ThreadWorld

PROGRAM = Path(__file__).with_name("mesh_program.py")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("mesh") / "store"
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        answers = [process.stdout.readline() for process in started]  # type: ignore[union-attr]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert all(answers), answers
    return [json.loads(answer) for answer in answers]


def test_a_dimension_has_the_workers_that_differ_in_it_alone(four: list[dict[str, Any]]) -> None:
    assert [found["place"] for found in four] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [found["dp"] for found in four] == [101, 1010, 101, 1010]
    assert [found["tp"] for found in four] == [11, 11, 1100, 1100]
    assert {found["whole"] for found in four} == {1111}


def test_bytes_that_torch_sends_are_counted(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert found["sent"] == pytest.approx(400_000, rel=0.1)


def test_a_cut_wakes_whoever_waits_in_a_mesh(four: list[dict[str, Any]]) -> None:
    for found in four[:3]:
        assert found["lost"], found["error"]
        assert found["waited_s"] < 5.0


def test_a_closed_group_leaves_room_for_the_next(four: list[dict[str, Any]]) -> None:
    for found in four[:3]:
        assert found["left"]
        assert found["again"] == 3


def test_one_group_of_a_process_has_meshes(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert "this process has one already" in found["second"]


def test_a_lone_worker_has_a_mesh_too() -> None:
    group = LoneWorker()
    assert group.device_mesh([1, 1], ["dp", "tp"]).shape == (1, 1)
    group.close()
    assert not dist.is_initialized()


@pytest.mark.parametrize(("sizes", "names"), [([2], ["dp"]), ([1, 1], ["dp"]), ([1], [])])
def test_sizes_that_do_not_fit(sizes: list[int], names: list[str]) -> None:
    with pytest.raises(ValueError, match="needs a name for each size"):
        LoneWorker().device_mesh(sizes, names)


def test_threads_have_no_meshes() -> None:
    (group,) = ThreadWorld(1).groups()
    with pytest.raises(RuntimeError, match="does not send through torch"):
        group.device_mesh([1], ["dp"])
