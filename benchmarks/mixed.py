"""A GPU alone, and together with workers on the CPU: samples per second.

    python benchmarks/mixed.py [--models Trees,Wide] [--cpus 1,4] [--repeats 3]

A GPU computes `Trees` sample by sample, so CPUs should help. A large GPU computes a whole batch of `Wide` at
once, so CPUs can't help, and should not slow it down either (mixed_job.py). Contenders take turns, and
ratios are taken within a repeat. Only the last third of each run counts: by then shares have adapted, and
the run has tried whether the CPUs help.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from pathlib import Path

from manyhands.testing import harness

JOBS = Path(__file__).parent / "mixed_job.py"


def samples_per_s(
    strategy: str, devices: list[str], model: str, asked: argparse.Namespace
) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        arguments = harness.train_arguments(
            f"{JOBS}:{model}",
            run,
            *("--threads", "1"),
            strategy=strategy,
            workers=len(devices),
            batch_size=asked.batch,
            epochs=10_000,
        )
        arguments[arguments.index("--device") + 1] = ",".join(devices)
        with harness.command(*arguments, run=run) as running:
            running.wait_for_step(1)
            time.sleep(asked.seconds)
            running.signal(signal.SIGINT)
            done = running.wait(timeout_s=60)
        steps = done.steps
        late = [s for s in steps if s["time"] > steps[-1]["time"] - asked.seconds / 3]
        if asked.verbose:
            shares = {k: sum(b - a for a, b in v) for k, v in late[-2]["shares"].items()}
            print(f"    {strategy} on {','.join(devices)}: shares {shares}")
            for note in done.of("Noticed"):
                print(f"        {note['message']}")
        return sum(s["samples"] for s in late[1:]) / (late[-1]["time"] - late[0]["time"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="Trees,Wide")
    parser.add_argument("--strategies", default="allreduce")
    parser.add_argument("--cpus", default="1,4", help="numbers of workers on the CPU")
    parser.add_argument("--gpu", default="cuda:0", help="the device to use as GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of each run")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--verbose", action="store_true", help="show shares and notes")
    asked = parser.parse_args()
    contenders = [("single", [asked.gpu])]
    for count in (int(part) for part in asked.cpus.split(",")):
        contenders += [(s, [asked.gpu, *["cpu"] * count]) for s in asked.strategies.split(",")]
    for model in asked.models.split(","):
        found: list[list[float]] = [[] for _ in contenders]
        for repeat in range(asked.repeats):
            for number in range(len(contenders)):
                which = (number + repeat) % len(contenders)
                found[which].append(samples_per_s(*contenders[which], model, asked))
        for (strategy, devices), speeds in zip(contenders, found, strict=True):
            ratios = [speed / alone for speed, alone in zip(speeds, found[0], strict=True)]
            middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
            print(
                f"{model:8}{strategy:12}{asked.gpu} + {len(devices) - 1} x cpu"
                f"{statistics.median(speeds):12,.0f} samples/s"
                f"   {middle:.2f} of the GPU alone ({least:.2f} to {most:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
