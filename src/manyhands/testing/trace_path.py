"""Print the path of one gradient: which of our files are entered between backward and the next forward.

    python -m manyhands.testing.trace_path allreduce
    python -m manyhands.testing.trace_path 'ps:sync(transport=tcp)' --workers 2

Trains a small job with real processes and prints, for each of them, the files of the package in the order
in which they were first entered during a step, with the thread and the functions.

A step's window opens when backward begins and closes when the loss of the next step is computed. In a
worker's main thread only the learner's part counts: from the first gradient until `Learner.step` returns, and
the forward, in which a learner may still wait for parameters. What the loop does between two steps (data,
seeds, reports) moves no gradient. In other threads, and in servers, everything inside the window counts.
A file is listed if it was entered in at least half of the windows, so that a heartbeat doesn't show up. Files
that no gradient passes (ASIDE) are marked and not counted.

The job itself installs the profiler in its process, so training that is not traced pays nothing. Threads that
are older than the job (heartbeat, control link) are not traced.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from manyhands.job import Job

PACKAGE = Path(__file__).parent.parent
JOB = f"{Path(__file__)}:TracedJob"
WARM_UP, TRACED = 5, 12
"""Numbers of windows of each worker that are skipped, and then traced."""
ASIDE = {
    "hosts/activity.py": "notes which section of the job's code runs, to explain a hang",
    "transport/fields.py": "derives the JSON of messages",
    "collectives/connections.py": "reads the kernel's count of bytes",
    "transport/counters.py": "notes what workers have done, and wakes them",
    "hosts/me.py": "tells whether a view change is coming",
    "compute/lazy_dynamo.py": "stands in for a module that torch's own optimizers call",
}
MAX_FUNCTIONS = 4


class Tracer:
    """Appends an entry to a file whenever control enters another file of the package."""

    def __init__(self, folder: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(f"{folder}/{os.getpid()}.jsonl", flags, 0o644)
        self._main = threading.get_ident()
        self._in_step = False
        self._last: dict[int, tuple[str, str]] = {}
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def open(self) -> None:
        """Open a window: backward begins, called from the frames of this stack."""
        self._write(mark="open")
        self._in_step = True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _ours(frame) is None:
            frame = frame.f_back
        if frame is not None:
            self._enter(frame)

    def forward(self, *, begins: bool) -> None:
        """Count the forward pass as part of the window, too."""
        self._in_step = begins

    def close(self) -> None:
        self._in_step = False
        self._write(mark="close")

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._enter(frame)
        elif event == "return" and frame.f_back is not None and _ours(frame) is not None:
            self._enter(frame.f_back)

    def _enter(self, frame: FrameType) -> None:
        file = _ours(frame)
        if file is None:
            return
        thread = threading.get_ident()
        if thread == self._main:
            if file.startswith("worker/"):
                self._in_step = False  # the step is over
            if not self._in_step:
                return
        function = frame.f_code.co_qualname
        if self._last.get(thread) != (file, function):
            self._last[thread] = file, function
            name = "main" if thread == self._main else threading.current_thread().name
            self._write(file=file, function=function, thread=name)

    def _write(self, **entry: str) -> None:
        os.write(self._file, json.dumps({"time": time.monotonic(), **entry}).encode() + b"\n")


def _ours(frame: FrameType) -> str | None:
    """Return the file of a frame, relative to the package, unless it is foreign or part of a test."""
    name = frame.f_code.co_filename
    if not name.startswith(f"{PACKAGE}/"):
        return None
    path = name[len(f"{PACKAGE}/") :]
    return None if path.startswith("testing/") else path


@dataclass
class TracedJob(Job):
    """A small regression that traces its process."""

    trace: str = ""
    """A folder for the entries."""
    samples: int = 640
    batch_size: int = 32
    epochs: int = 2

    def __post_init__(self) -> None:
        self._tracer = Tracer(self.trace)

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
        )
        model.register_forward_pre_hook(lambda *_: self._tracer.forward(begins=True))
        model.register_forward_hook(lambda *_: self._tracer.forward(begins=False))
        return model

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.samples, 64, generator=generator)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        self._tracer.close()
        loss = nn.functional.mse_loss(output, batch[1])
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self._tracer.open())
        return loss


@dataclass
class Visit:
    """A file on the path."""

    file: str
    thread: str
    functions: list[str] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        return self.file not in ASIDE


Entry = dict[str, Any]


def trace(spec: str, *, workers: int = 2) -> dict[str, list[Visit]]:
    """Train with this strategy; return each member's files in the order of their first entry."""
    from manyhands.testing import harness

    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        run, traces = Path(folder) / "run", Path(folder) / "traces"
        traces.mkdir()
        done = harness.train(JOB, run, strategy=spec, workers=workers, trace=traces)
        if done.code != 0:
            raise RuntimeError(f"the traced run failed:\n{done.out}\n{done.err}")
        entries = {
            event["member"]: _read(traces / f"{event['pid']}.jsonl")
            for event in done.of("MemberStarted")
        }
    windows = {name: list(_windows(found)) for name, found in entries.items()}
    all_windows = [window for found in windows.values() for window in found]
    return {name: _path(entries[name], windows[name] or all_windows) for name in sorted(entries)}


def _read(path: Path) -> list[Entry]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _windows(entries: list[Entry]) -> Iterator[tuple[float, float]]:
    """Yield begin and end of each window of a worker, without the first ones."""
    marks = [(entry["mark"], entry["time"]) for entry in entries if "mark" in entry]
    pairs = [
        (began, ended)
        for (mark, began), (following, ended) in itertools.pairwise(marks)
        if mark == "open" and following == "close"
    ]
    yield from pairs[WARM_UP : WARM_UP + TRACED]


def _path(entries: list[Entry], windows: list[tuple[float, float]]) -> list[Visit]:
    seen: Counter[str] = Counter()
    for began, ended in windows:
        seen.update({e["file"] for e in entries if "file" in e and began <= e["time"] <= ended})
    usual = {file for file, count in seen.items() if 2 * count >= len(windows)}
    path: dict[str, Visit] = {}
    for began, ended in reversed(windows):
        for entry in entries:
            file = entry.get("file")
            if file not in usual or not began <= entry["time"] <= ended:
                continue
            visit = path.setdefault(file, Visit(file, entry["thread"]))
            function = entry["function"].partition(".<locals>")[0]
            if function not in visit.functions:
                visit.functions.append(function)
    return list(path.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", metavar="SPEC", help="a strategy, such as ps:sync(transport=tcp)")
    parser.add_argument("--workers", type=int, default=2, help="default: 2")
    arguments = parser.parse_args()
    paths = trace(arguments.spec, workers=arguments.workers)
    files = {visit.file for path in paths.values() for visit in path if visit.counts}
    print(f"{arguments.spec}, {arguments.workers} workers: {len(files)} files")
    for member, path in paths.items():
        print(f"\n{member}: {sum(visit.counts for visit in path)} files")
        numbers = itertools.count(1)
        for visit in path:
            number = f"{next(numbers):2}" if visit.counts else " -"
            functions = ", ".join(visit.functions[:MAX_FUNCTIONS])
            more = ", ..." if len(visit.functions) > MAX_FUNCTIONS else ""
            print(f"  {number}  {visit.file:30} {visit.thread:18} {functions}{more}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
