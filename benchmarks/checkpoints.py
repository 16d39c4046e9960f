"""The cost of checkpoints: steps per second with one every N steps, relative to none.

    python benchmarks/checkpoints.py [--repeats 5] [--every 10] [--workers 2]

The model has 25 million parameters and SGD with momentum; runs with and without checkpoints alternate.
Training waits while a checkpoint is copied (the stall, as reported in the run's events); a thread then
writes it in the background, on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path

import torch

from manyhands.testing import harness

JOB = Path(__file__).with_name("ps_job.py")
STEPS = 120


def measure(strategy: str, workers: int, every: int) -> tuple[float, list[float]]:
    """Steps per second from the first third on, and the stalls."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = ("--checkpoint-every", str(every), "--keep", "1") if every else ()
        arguments = harness.train_arguments(
            f"{JOB}:Bench",
            run,
            *flags,
            strategy=strategy,
            workers=workers,
            size="25m",
            steps=STEPS,
        )
        with harness.command(*arguments, run=run) as running:
            done = running.wait(timeout_s=600)
        assert done.code == 0, done.err
        late = done.steps[STEPS // 3 :]
        speed = (len(late) - 1) / (late[-1]["time"] - late[0]["time"])
        return speed, [e["stall_s"] for e in done.of("CheckpointSaved")][:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=["allreduce", "ps:sync"])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; "
        f"{asked.workers} workers, a checkpoint every {asked.every} of {STEPS} steps\n"
    )
    print(f"{'':14}{'steps/s without':18}{'with':10}{'kept':28}stall, median")
    found = {}
    for strategy in asked.strategies:
        pairs = [
            (measure(strategy, asked.workers, 0), measure(strategy, asked.workers, asked.every))
            for _ in range(asked.repeats)
        ]
        kept = [with_[0] / without[0] for without, with_ in pairs]
        stalls = [stall for _, with_ in pairs for stall in with_[1]]
        found[strategy] = {"kept": kept, "stall_s": stalls}
        middle = statistics.median
        print(
            f"{strategy:14}{middle(w[0] for w, _ in pairs):<18.2f}{middle(w[0] for _, w in pairs):<10.2f}"
            f"{f'{middle(kept):.3f} ({min(kept):.3f} to {max(kept):.3f})':28}"
            f"{1000 * middle(stalls):.0f} ms",
            flush=True,
        )
    if asked.json:
        asked.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
