"""Which stragglers are left out, when, and when they come back, on scripted speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from manyhands.coordinator.straggler_trial import WINDOW_STEPS, Meter, StragglerTrial, TrialPhase
from manyhands.coordinator.throughput import Throughput


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Script:
    """A run whose workers are as fast as they are said to be, and who does what it is told."""

    devices: dict[str, str]
    speeds: dict[str, float]
    together: float
    """Samples a second, of all."""
    without: float
    least: int = 1
    num_changes: int = 0
    workers: tuple[str, ...] = ()
    changes_soon: bool = False
    spared: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers = tuple(self.devices)
        self.clock = Clock()
        self.meter = Meter(self.clock)
        self.meter.busy(True)
        self.throughput = Throughput()
        self.straggler_trial = StragglerTrial(self, self.meter, self.notes.append)

    def device_type(self, worker: str) -> str:
        return self.devices[worker]

    def can_leave_out(self, number: int) -> bool:
        return len(self.workers) - number >= self.least

    def leave_out(self, workers: Sequence[str]) -> None:
        self.spared = list(workers)
        self.workers = tuple(name for name in self.workers if name not in self.spared)

    def take_back(self) -> None:
        self.workers = (*self.workers, *self.spared)
        self.spared = []

    def run(self, seconds: float) -> list[TrialPhase]:
        phases = []
        for _ in range(round(seconds * 10)):
            self.clock.now += 0.1
            for name in self.workers:
                self.throughput.note(name, round(self.speeds[name]), 0.1)
            rate = self.without if self.spared else self.together
            self.meter.note(round(rate * 0.1))
            self.straggler_trial.tick(self.throughput)
            phases.append(self.straggler_trial.phase)
        return list(dict.fromkeys(phases))


def gpu_and_cpus(together: float, without: float, **more: int) -> Script:
    devices = {"worker-0": "cuda", "worker-1": "cpu", "worker-2": "cpu"}
    speeds = {"worker-0": 300.0, "worker-1": 100.0, "worker-2": 100.0}
    return Script(devices, speeds, together, without, **more)


def test_cpus_that_slow_the_run_down_stay_out() -> None:
    run = gpu_and_cpus(700.0, 1000.0)
    assert run.run(30) == [
        TrialPhase.TOGETHER,
        TrialPhase.LEAVING,
        TrialPhase.WITHOUT,
        TrialPhase.APART,
    ]
    assert run.spared == ["worker-1", "worker-2"]
    (note,) = run.notes
    assert note == (
        "1,000 samples/s without worker-1, worker-2 (cpu), 700 with: left out "
        "(--workers 3:3 keeps all)"
    )


@pytest.mark.parametrize("without", [500.0, 700.0, 720.0])
def test_workers_that_help_or_cost_nothing_come_back(without: float) -> None:
    run = gpu_and_cpus(700.0, without)
    phases = [TrialPhase.TOGETHER, TrialPhase.LEAVING, TrialPhase.WITHOUT, TrialPhase.SETTLED]
    assert run.run(60) == phases
    assert not run.spared
    assert "started again" in run.notes[-1]
    assert run.run(60) == [TrialPhase.SETTLED], "and it is not tried again and again"


def test_a_trial_that_is_clearly_slower_is_short() -> None:
    run = gpu_and_cpus(700.0, 400.0)
    while run.straggler_trial.phase != TrialPhase.WITHOUT:
        run.run(0.1)
    assert run.run(1.2)[-1] == TrialPhase.SETTLED
    assert run.notes == ["400 samples/s without worker-1, worker-2 (cpu), 700 with: started again"]


def test_similar_workers_are_not_tried() -> None:
    devices = dict.fromkeys(["worker-0", "worker-1"], "cpu")
    run = Script(devices, {"worker-0": 300.0, "worker-1": 100.0}, 100.0, 1000.0)
    assert run.run(30) == [TrialPhase.TOGETHER, TrialPhase.SETTLED]
    much = Script(devices, {"worker-0": 300.0, "worker-1": 70.0}, 100.0, 1000.0)
    much.run(30)
    assert much.spared == ["worker-1"]


def test_never_fewer_than_min_workers() -> None:
    run = gpu_and_cpus(700.0, 1000.0, least=3)
    assert run.run(30) == [TrialPhase.TOGETHER, TrialPhase.SETTLED]
    assert not run.notes


def test_a_run_that_became_slower_takes_them_back() -> None:
    run = gpu_and_cpus(700.0, 1000.0)
    run.run(30)
    run.without = 600.0
    assert run.run(10) == [TrialPhase.APART, TrialPhase.SETTLED]
    assert not run.spared
    assert run.notes[-1].startswith("600 samples/s without")


def test_a_death_brings_all_back_and_three_trials_are_enough() -> None:
    run = gpu_and_cpus(700.0, 1000.0)
    for deaths in range(1, 3):
        run.run(30)
        assert run.spared
        run.num_changes = deaths
        run.run(0.1)
        assert not run.spared
    run.run(30)
    assert run.spared
    run.num_changes = 9
    assert run.run(60) == [TrialPhase.TOGETHER, TrialPhase.SETTLED]


def test_nothing_is_measured_while_shares_change() -> None:
    run = gpu_and_cpus(700.0, 1000.0)
    for number in range(20):
        run.throughput.parts = {"worker-0": 1.0, "worker-1": 0.1 + number / 100}
        assert run.run(2) == [TrialPhase.TOGETHER]


def test_a_meter_counts_only_time_with_work() -> None:
    clock = Clock()
    meter = Meter(clock)
    clock.now = 5.0
    meter.busy(True)
    for _ in range(WINDOW_STEPS):
        clock.now += 0.4
        meter.note(20)
    meter.busy(False)
    clock.now = 100.0
    assert meter.full
    assert meter.take() == pytest.approx(50.0)
    assert not meter.full
    assert meter.seconds == 0.0
