"""A GPU alone, and with workers on the CPU beside it: samples per second.

    python benchmarks/mixed.py [--cpus 1,2,4] [--repeats 3]

The model is recurrent and small (mixed_job.py): what a GPU gains by its width it loses by many small kernels.
Whether a CPU helps depends on whether the GPU takes less time for fewer samples. Contenders in turns, ratios
inside a repeat; measured over the second half of a run, when shares have adapted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from manyhands.testing import harness

JOB = Path(__file__).parent / "mixed_job.py"


def samples_per_s(strategy: str, devices: list[str], asked: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        arguments = harness.train_arguments(
            JOB, run, "--threads", "1", strategy=strategy, workers=len(devices), **asked.fields
        )
        arguments[arguments.index("--device") + 1] = ",".join(devices)
        with harness.command(*arguments, run=run) as running:
            done = running.wait(timeout_s=300)
        assert done.code == 0, f"{done.out}\n{done.err}"
        late = done.steps[len(done.steps) // 2 :]
        if asked.verbose:
            shares = {k: sum(b - a for a, b in v) for k, v in late[-2]["shares"].items()}
            print(f"    {strategy} on {','.join(devices)}: shares {shares}")
        return sum(s["samples"] for s in late[1:]) / (late[-1]["time"] - late[0]["time"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpus", default="1,4", help="workers on the CPU beside the GPU")
    parser.add_argument("--gpu", default="cuda:0", help="what takes the place of the GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--verbose", action="store_true", help="show shares")
    asked = parser.parse_args()
    asked.fields = {"samples": asked.samples, "batch_size": asked.batch}
    contenders = [("single", [asked.gpu])]
    for count in (int(part) for part in asked.cpus.split(",")):
        contenders += [(s, [asked.gpu, *["cpu"] * count]) for s in ("allreduce", "ps:async")]
    found: list[list[float]] = [[] for _ in contenders]
    for repeat in range(asked.repeats):
        for number in range(len(contenders)):
            which = (number + repeat) % len(contenders)
            found[which].append(samples_per_s(*contenders[which], asked))
    for (strategy, devices), speeds in zip(contenders, found, strict=True):
        ratios = [speed / alone for speed, alone in zip(speeds, found[0], strict=True)]
        middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
        print(
            f"{strategy:12}{asked.gpu} + {len(devices) - 1} x cpu{statistics.median(speeds):12,.0f} samples/s"
            f"   {middle:.2f} of the GPU alone ({least:.2f} to {most:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
