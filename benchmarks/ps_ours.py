"""manyhands as a contender: a real `manyhands train`, with its speed read from the run's events.

Workers report several steps at once, ten times a second: the time of a report is known, the times of its
steps are not. So the speed is measured from the end of the first report after the warm-up to the end of the
last one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from against import THIS, Tree
from ps_load import Load
from ps_watch import Failed, Ran, run

from manyhands.errors import ManyhandsError
from manyhands.events.jsonl import read_events
from manyhands.strategies.registry import make_strategy

JOB = "ps_job.py"
BUNCH_S = 0.01
"""Commits closer than this belong to one bunch."""


def check(spec: str, load: Load) -> None:
    """Raises Failed when the spec is refused."""
    try:
        make_strategy(spec).check(load.workers)
    except ManyhandsError as error:
        raise Failed(f"refused: {error}") from error


def measure(
    spec: str,
    flags: Sequence[str],
    load: Load,
    *,
    env: Mapping[str, str],
    deadline_s: float,
    sample: bool,
    tree: Tree = THIS,
) -> tuple[dict[str, Any], Ran]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "run"
        ran = run(
            [
                *(sys.executable, "-m", "manyhands.cli.main", "train"),
                str(tree.benchmark(JOB)),
                *("--strategy", spec, "--workers", str(load.workers)),
                *("--threads", str(load.threads), "--device", "cpu"),
                *("--set", f"size={load.model}", "--set", f"steps={load.all_steps}"),
                *("--set", f"batch_size={load.workers * load.batch}"),
                *("--run-dir", str(path), "--quiet", *flags),
            ],
            env={**env, **tree.environ()},
            deadline_s=deadline_s,
            sample=sample,
        )
        events = list(read_events(path / "events.jsonl"))
    return speed(events, load.warm_up), ran


def speed(events: Iterable[Mapping[str, Any]], warm_up: int) -> dict[str, Any]:
    """Samples per second between two ends of bunches."""
    steps = [e for e in events if e["event"] == "StepCommitted"]
    ends: list[tuple[float, int]] = []  # time of a bunch's last step, samples until then
    samples = 0
    for number, step in enumerate(steps):
        samples += step["samples"]
        last = number + 1 == len(steps) or steps[number + 1]["time"] - step["time"] > BUNCH_S
        if last and number + 1 >= warm_up:
            ends.append((step["time"], samples))
    if len(ends) < 2:
        raise Failed(f"{len(steps)} steps came in too few bunches to tell a speed: use more steps")
    (began, before), (ended, after) = ends[0], ends[-1]
    return {"samples_per_s": (after - before) / (ended - began), "began": began, "ended": ended}
