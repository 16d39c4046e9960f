"""The threads of a member do not grow with the number of its connections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.testing import harness

JOB = """
import json, os, threading
from dataclasses import dataclass
from manyhands.testing.jobs import Regression

@dataclass
class Counting(Regression):
    folder: str = ""

    def loss(self, output, batch):
        names = sorted(thread.name for thread in threading.enumerate())
        with open(f"{self.folder}/{os.getpid()}", "w") as file:
            json.dump(names, file)
        return super().loss(output, batch)
"""
MAX_THREADS = 20


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [(), ("--trust-network",)],
    ids=["tls", "secret"],
)
def test_a_worker_that_is_also_a_server_has_few_threads(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    job, folder = tmp_path / "counting.py", tmp_path / "threads"
    job.write_text(JOB)
    folder.mkdir()
    done = harness.train(
        job,
        tmp_path / "run",
        *flags,
        strategy="ps:sync(transport=tcp)",
        workers=8,
        epochs=2,
        folder=str(folder),
    )
    assert done.code == 0, f"{done.out}\n{done.err}"
    threads = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert len(threads) == 8
    for names in threads:
        assert len(names) < MAX_THREADS, names
