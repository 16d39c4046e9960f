"""How fast a live run follows `manyhands scale`: from the command to the throughput of the new number of
workers.

Two workers, then four, then two again, in one run. Each sample takes 2 ms of sleep, so that four workers can
be twice as fast on two cores. Measured from the start of the command `manyhands scale`:

    view      to the first step committed in a view with the new number of workers
    follows   to the end of the first second in which the throughput is at least 90 % of the new level
              (at most 110 %, with fewer workers)

    python benchmarks/scaling.py [--repeats 3] [--strategies allreduce ps:sync]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from manyhands.testing import harness

SAMPLE_S = 0.002
BATCH = 64
STEADY_S = 6.0
"""So long each number of workers trains."""
WINDOW_S, STRIDE_S = 1.0, 0.05
"""Reports come every 0.1 s: shorter windows jump by a tenth."""


def measure(strategy: str) -> dict[str, tuple[float, float]]:
    """(view, follows) in seconds, for up and for down."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        arguments = harness.train_arguments(
            *("Straggling", run),
            strategy=strategy,
            workers=2,
            diary=Path(folder) / "diary",
            samples=BATCH * 10_000,
            batch_size=BATCH,
            pause_s=0.0,
            sample_s=SAMPLE_S,
            slow_by=1.0,
            lr=0.001,
        )
        with harness.command(*arguments, run=run) as running:
            running.wait_for_step(50)
            asked = {}
            for way, workers in (("up", 4), ("down", 2)):
                time.sleep(STEADY_S)
                asked[way] = time.time()
                scale = [sys.executable, "-m", "manyhands.cli.main", "scale", str(run)]
                subprocess.run([*scale, "--workers", str(workers)], check=True, capture_output=True)
            time.sleep(STEADY_S)
            events = running.events()
            running.process.terminate()
            done = running.wait()
        assert [e["step"] for e in done.steps] == list(range(1, len(done.steps) + 1))
        ends = {"up": asked["down"], "down": events[-1]["time"]}
        return {way: follows(events, asked[way], ends[way], way) for way in asked}


def follows(
    events: list[dict[str, Any]], asked: float, end: float, way: str
) -> tuple[float, float]:
    count = 4 if way == "up" else 2
    views = [e for e in events if e["event"] == "ViewChanged" and e["time"] > asked]
    formed = next(e["time"] for e in views if len(e["members"]) == count)
    steps = [e for e in events if e["event"] == "StepCommitted"]
    view = next(step["time"] for step in steps if step["time"] > formed)
    level = speed(steps, end - STEADY_S / 3, end)
    moments = [asked + WINDOW_S + STRIDE_S * k for k in range(int((end - asked) / STRIDE_S))]
    speeds = ((t, speed(steps, t - WINDOW_S, t)) for t in moments)
    there = (t for t, s in speeds if (s >= 0.9 * level if way == "up" else s <= 1.1 * level))
    return view - asked, next(there, end) - asked


def speed(steps: list[dict[str, Any]], began: float, ended: float) -> float:
    return sum(s["samples"] for s in steps if began < s["time"] <= ended) / (ended - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", default=["allreduce", "ps:sync", "ps:async"])
    asked = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores; {asked.repeats} repeats; seconds\n")
    print(f"{'':12}{'2 to 4: view':24}{'follows':24}{'4 to 2: view':24}follows")
    for strategy in asked.strategies:
        found = [measure(strategy) for _ in range(asked.repeats)]
        columns = [[each[way][i] for each in found] for way in ("up", "down") for i in (0, 1)]
        told = (f"{statistics.median(c):.1f} ({min(c):.1f} to {max(c):.1f})" for c in columns)
        print(f"{strategy:12}" + "".join(f"{text:24}" for text in told), flush=True)


if __name__ == "__main__":
    main()
