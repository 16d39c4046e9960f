"""The overhead of manyhands: steps per second of `allreduce`, compared with a hand-written torch DDP loop.

Both have the same model, data, batch, workers and threads, and run alternately on the same machine, so that
other load affects both. Start-up time is measured from the command to the end of the first step, and
compared with that of a torchrun script.

    python benchmarks/overhead.py [--repeats 5] [--models Perceptron]
    python benchmarks/overhead.py --against COMMIT     compare with another commit instead
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import against
from against import THIS, Tree
from overhead_models import WORKERS

from manyhands.events.jsonl import read_events
from manyhands.hosts.launchers.local import cores

HERE = Path(__file__).parent
STEPS = {"Perceptron": 600, "Transformer": 250}
WARM_UP = 50


def ours(model: str, steps: int, *, tree: Tree = THIS) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        began = time.time()
        subprocess.run(
            [
                *(sys.executable, "-m", "manyhands.cli.main", "train"),
                f"{tree.benchmark('overhead_job.py')}:{model}",
                *("--strategy", "allreduce", "--workers", str(WORKERS), "--threads", threads()),
                *("--device", "cpu", "--set", f"steps={steps}", "--run-dir", str(run), "--quiet"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | tree.environ(),
        )
        committed = [e for e in read_events(run / "events.jsonl") if e["event"] == "StepCommitted"]
    # Reports come in bunches: the time of a bunch's last step is the time of the bunch.
    last_of = {}
    for event in committed:
        last_of[round(event["time"], 2)] = event
    bunches = list(last_of.values())
    first = next(e for e in bunches if e["step"] >= WARM_UP)
    seconds = bunches[-1]["time"] - first["time"]
    return {
        "first_s": committed[0]["time"] - began,
        "steps_per_s": (bunches[-1]["step"] - first["step"]) / seconds,
    }


def bare(model: str, steps: int) -> dict[str, float]:
    began = time.time()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(WORKERS), str(HERE / "overhead_ddp.py")),
            *(model, str(steps), str(WARM_UP)),
        ],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": threads(), "GLOO_SOCKET_IFNAME": "lo"},
    )
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return {"first_s": said["first"] - began, "steps_per_s": said["steps_per_s"]}


def compare(arguments: argparse.Namespace, trees: list[Tree]) -> None:
    this, other = trees
    for model in arguments.models:
        found: dict[Tree, list[dict[str, float]]] = {this: [], other: []}
        for repeat in range(arguments.repeats):
            for tree in against.in_turn(trees, repeat):
                found[tree].append(ours(model, STEPS[model], tree=tree))
            print(".", end="", flush=True)
        pairs = list(zip(found[this], found[other], strict=True))
        ratios = {
            f"{model}, steps/s": [a["steps_per_s"] / b["steps_per_s"] for a, b in pairs],
            f"{model}, start-up": [b["first_s"] / a["first_s"] for a, b in pairs],
        }
        print("", *against.comparison(ratios, arguments.against), sep="\n", flush=True)


def threads() -> str:
    return str(max(1, cores() // WORKERS))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeats", type=int, help=f"default: 5, or {against.PAIRS} with --against"
    )
    against.add_flag(parser)
    parser.add_argument("--models", nargs="+", default=list(STEPS))
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (against.PAIRS if arguments.against else 5)
    print(
        f"{platform.machine()}, {cores()} cores, {WORKERS} workers of {threads()} thread(s), "
        f"Python {platform.python_version()}; medians of {arguments.repeats} alternating pairs "
        "(least to greatest)"
    )
    if arguments.against:
        with against.trees(arguments.against) as trees:
            compare(arguments, trees)
        return
    for model in arguments.models:
        pairs = []
        for _ in range(arguments.repeats):
            pairs.append((ours(model, STEPS[model]), bare(model, STEPS[model])))
            print(".", end="", flush=True)
        print(f"\n{model}")
        for key, label in (("steps_per_s", "steps/s"), ("first_s", "first step after, s")):
            print(f"  {label:20} manyhands  {spread([a[key] for a, _ in pairs])}")
            print(f"  {'':20} DDP loop   {spread([b[key] for _, b in pairs])}")
            print(f"  {'':20} ratio      {spread([a[key] / b[key] for a, b in pairs])}")


if __name__ == "__main__":
    main()
