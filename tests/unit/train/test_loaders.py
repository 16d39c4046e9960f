"""Loader processes: the same batches in the same order as without, and none outlives its worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from manyhands.job import load_job
from manyhands.testing.harness import alive, gone
from manyhands.train.feed import Feed, Loaders, Portion

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
from manyhands.train.feed import Feed, Loaders, Portion
from manyhands.job import load_job

if __name__ == "__main__":
    loaders = Loaders(sys.argv[1], {}, 2)
    job = load_job(sys.argv[1])
    feed = Feed(job, job.data(), device="cpu", loaders=loaders)
    portions = [Portion(i, 0, 4, ((4 * i, 4 * i + 4),)) for i in range(4)]
    feed.expect(portions)
    feed.share(portions[0])
    print(*loaders._pool._processes, flush=True)
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


def test_loaders_die_with_their_worker(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    with subprocess.Popen(
        [sys.executable, str(script), job_file(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            assert worker.stdout is not None
            loaders = [int(pid) for pid in worker.stdout.readline().split()]
            assert len(loaders) == 2
            assert all(alive(pid) for pid in loaders)
        finally:
            worker.send_signal(signal.SIGKILL)
            worker.wait(timeout=30)
    try:
        assert gone(loaders)
    finally:
        for pid in loaders:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_what_was_expected_and_forgotten_does_not_come(tmp_path: Path) -> None:
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
