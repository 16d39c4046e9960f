"""Loader processes: the same batches in the same order as without, none outlives its worker, and one that is
killed is replaced."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from manyhands.compute.feed import Feed
from manyhands.compute.loaders import Loaders, receive, send
from manyhands.control.messages import Portion
from manyhands.errors import LoaderLost
from manyhands.job import load_job
from manyhands.testing.harness import alive, gone

JOB = '''
"""A job whose samples take unequal time, so that processes overtake each other."""
import random, time
from dataclasses import dataclass
import numpy as np, torch
from torch import nn
import manyhands as mh


class Noisy:
    def __len__(self):
        return 17

    def __getitem__(self, index):
        time.sleep(0.01 * (index % 3))
        noise = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
        return noise, index * self.factor


@dataclass
class Slow(mh.Job):
    factor: int = 1

    def model(self): return nn.Linear(3, 1)
    def optimizer(self, params): return torch.optim.SGD(params, lr=0.1)
    def loss(self, output, batch): return output.mean()
    def data(self):
        data = Noisy()
        data.factor = self.factor
        return data
'''

WORKER = """
import sys, time
from manyhands.compute.feed import Feed
from manyhands.control.messages import Portion
from manyhands.compute.loaders import Loaders
from manyhands.job import load_job

if __name__ == "__main__":
    loaders = Loaders(sys.argv[1], {}, 2)
    job = load_job(sys.argv[1])
    feed = Feed(job, job.data(), device="cpu", loaders=loaders)
    portions = [Portion(i, 0, 4, ((4 * i, 4 * i + 4),)) for i in range(4)]
    feed.expect(portions)
    feed.share(portions[0])
    feed.share(portions[1])
    print(*loaders.pids, flush=True)
    time.sleep(60)
"""


def job_file(folder: Path) -> str:
    path = folder / "slow_loading.py"
    path.write_text(JOB)
    return str(path)


def test_the_same_batches_in_the_same_order(tmp_path: Path) -> None:
    reference, settings = job_file(tmp_path), {"factor": "3", "accumulate": "2"}
    job = load_job(reference, settings)
    portions = [
        Portion(4 * epoch + i, epoch, 5, ((5 * i, min(17, 5 * i + 5)),) if i < 3 else ())
        for epoch in range(2)
        for i in range(4)
    ]
    alone = Feed(job, job.data(), device="cpu")
    loaders = Loaders(reference, settings, 2)
    try:
        helped = Feed(job, job.data(), device="cpu", loaders=loaders)
        helped.expect(portions[:3])
        for number, portion in enumerate(portions):
            ours, theirs = alone.share(portion), helped.share(portion)
            assert [n for _, n in ours.batches] == [n for _, n in theirs.batches]
            for (one, _), (other, _) in zip(ours.batches, theirs.batches, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            helped.expect(portions[3 + number : 4 + number])
        assert (one[1] % 3 == 0).all()
    finally:
        loaders.close()


def test_loaders_die_with_their_worker_and_leave_nothing(tmp_path: Path) -> None:
    script, temporary = tmp_path / "worker.py", tmp_path / "temporary"
    temporary.mkdir()
    script.write_text(textwrap.dedent(WORKER))
    with subprocess.Popen(
        [sys.executable, str(script), job_file(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    ) as worker:
        try:
            assert worker.stdout is not None
            loaders = [int(pid) for pid in worker.stdout.readline().split()]
            assert len(loaders) == 2
            assert all(alive(pid) for pid in loaders)
            maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (worker.pid, *loaders)]
            assert not any("/sem." in text for text in maps), "a semaphore with a name"
        finally:
            worker.send_signal(signal.SIGKILL)
            worker.wait(timeout=30)
    try:
        assert gone(loaders)
        assert not list(temporary.iterdir())
    finally:
        for pid in loaders:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_forgotten_portions_are_not_returned(tmp_path: Path) -> None:
    reference = job_file(tmp_path)
    job = load_job(reference, {})
    portions = [Portion(i, 0, 4, ((4 * i, 4 * i + 4),)) for i in range(4)]
    wanted = Feed(job, job.data(), device="cpu").share(portions[3])
    loaders = Loaders(reference, {}, 1)
    try:
        feed = Feed(job, job.data(), device="cpu", loaders=loaders)
        feed.expect(portions[:3])
        feed.forget()
        feed.expect(portions[3:])
        share = feed.share(portions[3])
    finally:
        loaders.close()
    (one, _), (other, _) = wanted.batches[0], share.batches[0]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


ODD_JOB = """
import os, signal
from pathlib import Path
from dataclasses import dataclass
import torch
from torch import nn
import manyhands as mh

HERE = Path(__file__).parent

class Odd:
    def __init__(self, what): self.what = what
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 5:
            if self.what == "always" or (self.what == "once" and not (HERE / "killed").exists()):
                (HERE / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "raises":
                raise FileNotFoundError("sample-5.png")
            if self.what == "unpicklable":
                return lambda: None
        return torch.full((2,), float(index))

@dataclass
class Oddly(mh.Job):
    what: str = ""
    def model(self): return nn.Linear(2, 1)
    def optimizer(self, params): return torch.optim.SGD(params, lr=0.1)
    def loss(self, output, batch): return output.mean()
    def data(self): return Odd(self.what)
    def collate(self, samples): return samples
"""


@pytest.fixture
def odd(tmp_path: Path) -> str:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOB)
    return str(path)


@contextmanager
def loaded(reference: str, what: str, notes: list[str]) -> Iterator[Loaders]:
    loaders = Loaders(reference, {"what": what}, 1, notice=notes.append)
    try:
        yield loaders
    finally:
        loaders.close()


def test_a_killed_loader_is_replaced_and_its_batch_loaded_again(odd: str) -> None:
    notes: list[str] = []
    with loaded(odd, "once", notes) as loaders:
        futures = [loaders.submit(0, torch.tensor([i])) for i in range(8)]
        batches = [future.result(timeout=60) for future in futures]
    assert [float(batch[0][0]) for batch in batches] == list(range(8))
    assert notes == ["a loader process was killed by SIGKILL; another one loads its batch again"]


def test_a_batch_that_always_kills_its_loader_is_an_error_that_mentions_memory(odd: str) -> None:
    notes: list[str] = []
    with loaded(odd, "always", notes) as loaders:
        with pytest.raises(
            LoaderLost, match=r"SIGKILL, 3 times in a row.*memory.*loader_processes"
        ):
            loaders.submit(0, torch.tensor([5])).result(timeout=60)
        assert loaders.submit(0, torch.tensor([4])).result(timeout=60)
    assert len(notes) == 2


def test_exceptions_of_the_dataset_are_raised_with_their_traceback(odd: str) -> None:
    with loaded(odd, "raises", []) as loaders:
        with pytest.raises(FileNotFoundError, match=r"sample-5\.png") as caught:
            loaders.submit(0, torch.tensor([5])).result(timeout=60)
        assert "odd.py" in str(caught.value.__cause__)
    with loaded(odd, "unpicklable", []) as loaders:
        with pytest.raises(Exception, match="lambda"):
            loaders.submit(0, torch.tensor([5])).result(timeout=60)
        assert loaders.submit(0, torch.tensor([4])).result(timeout=60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_batches_are_unchanged_by_sending(dtype: torch.dtype) -> None:
    whole = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(dtype)
    parameter = torch.nn.Parameter(torch.ones(2))
    sent = {
        "plain": whole,
        "channels last": whole.to(memory_format=torch.channels_last),
        "a part": whole[:, 1:2, ::2],
        "a number": whole[0, 0, 0, 1],
        "nothing": whole[:0],
        "complex": torch.ones(2, dtype=torch.complex64),
        "a parameter": parameter,
        "numpy": np.arange(6.0).reshape(2, 3),
        "others": ["text", (1, None)],
    }
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, sent)
        got = receive(theirs)
        send(ours, ("small", 1))
        assert receive(theirs) == ("small", 1)
    for name, value in sent.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[name], value), name
            assert type(got[name]) is type(value)
            assert got[name].dtype == value.dtype
        else:
            assert pickle.dumps(got[name]) == pickle.dumps(value)
    assert got["channels last"].stride() == sent["channels last"].stride()
    got["plain"].zero_()  # it is the worker's own
