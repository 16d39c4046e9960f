"""Workers that hang inside the job: they are named, and do not block the end of a run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from manyhands.testing.harness import command, train_arguments

pytestmark = pytest.mark.slow

JOB = '''
import os, time
from dataclasses import dataclass
from pathlib import Path
from torch.utils.data import Dataset
from manyhands.testing.jobs import Regression

class Slow(Dataset):
    """A job in which the first process that reaches a given number of samples hangs."""
    def __init__(self, data, mark, number):
        self.data, self.mark, self.left = data, Path(mark), number
    def __len__(self): return len(self.data)
    def __getitem__(self, index):
        self.left -= 1
        if self.left == 0:
            try:
                self.mark.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                self.mark.write_text(str(os.getpid()))
                never_comes_back()
        return self.data[index]

def never_comes_back():
    time.sleep(3600)

@dataclass
class Hanging(Regression):
    mark: str = ""
    hangs_at: int = 200
    epochs: int = 30

    def data(self):
        return Slow(super().data(), self.mark, self.hangs_at)
'''


def hangs(events: list[dict[str, Any]]) -> list[str]:
    return [
        e["message"]
        for e in events
        if e["event"] == "Noticed" and "has been in step" in e["message"]
    ]


def arguments(tmp_path: Path, *flags: str, **options: Any) -> list[str]:
    job = tmp_path / "hanging.py"
    job.write_text(JOB)
    mark = str(tmp_path / "mark")
    return train_arguments(job, tmp_path / "run", *flags, mark=mark, **options)


def test_a_hanging_worker_is_reported_and_ctrl_c_saves_without_it(tmp_path: Path) -> None:
    given = arguments(tmp_path, "--stuck-after", "2", strategy="allreduce", workers=2)
    with command(*given, run=tmp_path / "run") as running:
        running.wait_for(lambda events: bool(hangs(events)))
        pid = int((tmp_path / "mark").read_text())
        (worker,) = (name for name, each in running.pids().items() if each == pid)
        log = tmp_path / "run" / "logs" / f"{worker}.log"
        running.wait_for(lambda _: "never_comes_back" in log.read_text())
        running.signal(signal.SIGINT)
        done = running.wait()
    (words,) = hangs(done.events)
    assert words.startswith(f"{worker} has been in step ")
    assert words.endswith(f"(loading data). Its stacks are in {log}")
    assert done.code == 130, done.err
    summary = done.of("RunFinished")[0]["summary"]
    assert summary["checkpoint"] == f"checkpoints/step-{summary['steps']}"
    (lost,) = done.of("MemberLost")
    assert lost["member"] == worker
    assert "(loading data)" in lost["reason"]


def test_ctrl_c_reports_the_last_checkpoint_if_only_a_hanging_worker_has_the_weights(
    tmp_path: Path,
) -> None:
    given = arguments(tmp_path, "--stuck-after", "2", "--checkpoint-every", "4")
    with command(*given, run=tmp_path / "run") as running:
        running.wait_for(lambda events: bool(hangs(events)))
        running.signal(signal.SIGINT)
        done = running.wait()
    assert done.code == 130, done.err
    summary = done.of("RunFinished")[0]["summary"]
    assert f"nothing could be saved since {summary['checkpoint']}" in done.out
    assert summary["outcome"] == "interrupted"


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "workers"), [("allreduce", 2), ("ps:async", 2), ("single", 1)]
)
def test_a_worker_that_hangs_for_long_is_killed(
    strategy: str, workers: int, tmp_path: Path
) -> None:
    given = arguments(
        tmp_path, "--stuck-after", "1.5", strategy=strategy, workers=workers, epochs=6
    )
    with command(*given, run=tmp_path / "run") as running:
        done = running.wait()
    assert done.code == 0, done.err
    assert len(hangs(done.events)) == 1
    (lost,) = done.of("MemberLost")
    assert lost["reason"].endswith("(loading data)")
    assert {n for uses in done.uses_by_epoch().values() for n in (len(uses), len(set(uses)))} == {
        98
    }
