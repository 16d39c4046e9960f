"""Shared memory: seen by others at once, freed by the kernel however everybody ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from manyhands.errors import LinkError
from manyhands.transport.shm import Segment, aligned

OTHER = """
import sys
import torch
from manyhands.transport.shm import Segment
numbers = Segment.attach(sys.argv[1]).tensor(torch.float32, offset_bytes=64, numel=5)
print(numbers.tolist(), flush=True)
numbers.mul_(2)
print("doubled", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that attach; they do not outlive the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def start(address: str, started: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    started.append(process)
    return process


def test_one_process_reads_what_another_writes(other: list[subprocess.Popen[str]]) -> None:
    segment = Segment.create(1024)
    numbers = segment.tensor(torch.float32, offset_bytes=64, numel=5)
    numbers.copy_(torch.arange(5.0))
    process = start(segment.address, other)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0.0, 1.0, 2.0, 3.0, 4.0]\n"
    assert process.stdout.readline() == "doubled\n"
    assert numbers.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert numbers.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0], "a death takes nothing from the others"
    segment.close()


def test_tensors_outlive_the_segment_and_its_creator() -> None:
    creator = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, torch\n"
            "from manyhands.transport.shm import Segment\n"
            "segment = Segment.create(64)\n"
            "segment.tensor(torch.int64, numel=8).fill_(7)\n"
            "print(segment.address, flush=True)\n"
            "sys.stdin.read()\n",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert creator.stdout is not None
        address = creator.stdout.readline().strip()
        attached = Segment.attach(address)
    finally:
        creator.kill()
        creator.communicate(timeout=10)
    numbers = attached.tensor(torch.int64, numel=8)
    attached.close()
    assert numbers.tolist() == [7] * 8
    with pytest.raises(LinkError, match="is gone"):
        Segment.attach(address)


def names_in_memory() -> set[str]:
    """Return the files in shared memory, without the runs of tests in other processes."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("manyhands-test-")}


def test_nothing_is_left_in_any_folder() -> None:
    before = names_in_memory()
    segment = Segment.create(1 << 20)
    assert names_in_memory() == before
    segment.close()


def test_descriptors_are_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        segment = Segment.create(4096)
        twin = Segment.attach(segment.address)
        segment.close()
        twin.close()
        twin.close()
        del segment, twin
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_address_that_means_something_else_now_is_refused(tmp_path: object) -> None:
    segment = Segment.create(4096)
    with pytest.raises(LinkError, match="not an address of shared memory"):
        Segment.attach("tcp://127.0.0.1:1")
    wrong_size = segment.address.rsplit(":", 1)[0] + ":8192"
    with pytest.raises(LinkError, match="not the shared memory"):
        Segment.attach(wrong_size)
    with open(os.devnull) as file, pytest.raises(LinkError, match=r"not the shared memory|is gone"):
        Segment.attach(f"shm:{os.getpid()}:{file.fileno()}:4096")
    segment.close()


def test_sizes_are_rounded_to_cache_lines() -> None:
    assert [aligned(n) for n in (1, 63, 64, 65)] == [64, 64, 64, 128]


def test_a_segment_that_nobody_has_any_more_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        segment = Segment.create(4096)
        attached = Segment.attach(segment.address)
        tensor = attached.tensor(torch.float32, numel=4)
        del segment, attached
        assert tensor.sum() == 0, "what is mapped stays"
    del tensor
    assert len(os.listdir("/proc/self/fd")) == before
