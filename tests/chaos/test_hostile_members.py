"""Members that send what makes no sense: each is named and ended, and the run goes on without it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from manyhands.testing import harness
from manyhands.testing.conformance import assert_once_an_epoch

HOSTILE = """
import gc, json
from dataclasses import dataclass
from manyhands.hosts.member import Member
from manyhands.testing.jobs import Regression

@dataclass
class Hostile(Regression):
    pause_s: float = 0.02
    words: str = "{}"
    when: int = 4

    def __post_init__(self):
        self._calls = 0

    def model(self):
        self._say(0)
        return super().model()

    def loss(self, output, batch):
        self._calls += 1
        self._say(self._calls)
        return super().loss(output, batch)

    def _say(self, calls):
        if calls == self.when:
            gc.unfreeze()  # or gc.get_objects() lacks what the worker has frozen
            member = next(each for each in gc.get_objects() if isinstance(each, Member))
            if (head := json.loads(self.words).get(member.name)) is not None:
                member._link.send(head)
"""
ROW = [3, 8.0, 4.5, 0.1, 0.01, 0.009, None, 120, 0, 0, False]


def hostile(tmp_path: Path, words: dict[str, Any], *flags: str, **options: Any) -> harness.Finished:
    job = tmp_path / "hostile.py"
    job.write_text(HOSTILE)
    return harness.train(job, tmp_path / "run", *flags, words=json.dumps(words), **options)


def test_each_member_that_sends_nonsense_is_named_and_lost(tmp_path: Path) -> None:
    words = {
        "worker-1": {"kind": "StepsReport", "view": 1, "rows": [[1, 2]]},
        "worker-2": {"kind": "Failed"},
        "worker-3": {"kind": "Ready", "seat": {"name": "worker-0", "host": "x"}},
    }
    done = hostile(tmp_path, words, "--max-restarts", "20", strategy="allreduce", workers=4)
    assert done.code == 0, done.err
    lost = {event["member"]: event["reason"] for event in done.of("MemberLost")}
    nonsense = "sent an invalid message"
    assert lost == {
        "worker-1": f"{nonsense}: 'StepsReport': rows[0] has 2 fields of 8 to 13",
        "worker-2": f"{nonsense}: 'Failed': reason is missing",
        "worker-3": f"{nonsense}: it takes the seat of 'worker-0', a 'worker'",
    }
    assert "Traceback" not in done.err
    assert f"worker-1 was lost ({nonsense}" in done.out
    assert_once_an_epoch(done, samples=98, epochs=3)


def test_nonsense_before_there_is_anything_to_go_on_with_ends_the_run_with_its_name(
    tmp_path: Path,
) -> None:
    words = {"worker-0": {"kind": "StepsReport", "view": 0, "rows": [ROW]}}
    done = hostile(tmp_path, words, strategy="allreduce", workers=2, when=0)
    assert done.code == 1
    assert "worker-0 failed: sent an invalid message" in done.err
    assert "before there is a view" in done.err
    assert "Traceback" not in done.err


@pytest.mark.long
def test_where_one_worker_is_all_it_begins_again(tmp_path: Path) -> None:
    words = {"worker-0": {"kind": "Saved", "view": 1, "step": "x"}}
    done = hostile(tmp_path, words, "--max-restarts", "3", strategy="single")
    assert done.code == 0, done.err
    assert "sent an invalid message: 'Saved': step is 'x'" in done.out


FRAGILE = """
import gc
from dataclasses import dataclass
from torch import nn
from manyhands.hosts.member import Member
from manyhands.testing.jobs import Regression

class Fragile(nn.Linear):
    def _load_from_state_dict(self, *args, **options):
        gc.unfreeze()  # or gc.get_objects() lacks what the worker has frozen
        if any(each.name == "worker-2" for each in gc.get_objects() if isinstance(each, Member)):
            raise MemoryError("no room for the state")
        super()._load_from_state_dict(*args, **options)

@dataclass
class OfFragile(Regression):
    pause_s: float = 0.05
    epochs: int = 1000

    def model(self):
        return nn.Sequential(Fragile(6, 24), nn.Tanh(), nn.Linear(24, 2))
"""


@pytest.mark.long
def test_a_new_worker_that_cannot_take_over_the_state_never_trains(tmp_path: Path) -> None:
    job = tmp_path / "fragile.py"
    job.write_text(FRAGILE)
    run = tmp_path / "run"
    arguments = harness.train_arguments(
        job, run, "--max-restarts", "5", strategy="allreduce", workers=2
    )
    with harness.command(*arguments, run=run) as running:
        running.wait_for_step(3)
        running.kill("worker-1")
        running.wait_for(
            lambda events: (
                any("worker-3" in e.get("members", ()) for e in events)
                and any(e["event"] == "MemberLost" and e["member"] == "worker-2" for e in events)
            )
        )
        running.signal(signal.SIGINT)
        done = running.wait()
    assert done.code == 130, done.err
    (lost,) = [event for event in done.of("MemberLost") if event["member"] == "worker-2"]
    assert "worker-2 could not take over the state of its peers: MemoryError" in lost["reason"]
    assert not any("worker-2" in _who_trained(step) for step in done.steps)


def _who_trained(step: dict[str, Any]) -> set[str]:
    return {name for name, ranges in step["shares"].items() if ranges}
