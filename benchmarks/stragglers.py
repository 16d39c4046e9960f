"""The cost of one slow worker: samples per second with it, relative to those without it.

Four workers that sleep in each step, longer than they compute; one of them sleeps ten times longer. Runs
without and with it alternate. If one of four workers does a tenth of the work, 77.5 % of the throughput is
left without waiting, and 10 % if all wait for it.

    python benchmarks/stragglers.py [--repeats 3] [--slow-by 10]
    python benchmarks/stragglers.py --shares     two workers, one half as fast, by the size of its share

With `--shares` the time is proportional to the samples, so that a smaller share helps: equal shares keep at
most 50 % of the throughput, shares by speed 75 %. Measured over the second half of a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from manyhands.testing import harness

WORKERS = 4
PAUSE_S = 0.02
STEPS = {"ps:sync": 60, "ps:ssp(staleness=4)": 60, "ps:backup(spares=1)": 400, "ps:async": 400}
"""More where it does not get slow, so that the end, when all wait for the last part, counts less."""


def samples_per_s(strategy: str, slow_by: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        done = harness.train(
            "Straggling",
            run,
            strategy=strategy,
            workers=WORKERS,
            diary=Path(folder) / "diary",
            samples=16 * STEPS[strategy],
            pause_s=PAUSE_S,
            slow_by=slow_by,
            lr=0.001,
        )
        assert done.code == 0, done.err
        return float(json.loads((run / "summary.json").read_text())["samples_per_s"])


def with_shares(strategy: str, slow_by: float, *, equal: bool, workers: int = 2) -> float:
    """Samples a second of the workers in the second half of a run, without what was left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = ("--equal-shares",) if equal else ()
        done = harness.train(
            *("Straggling", run, *flags),
            strategy=strategy,
            workers=workers,
            diary=Path(folder) / "diary",
            samples=16 * workers * 300,
            batch_size=16 * workers,
            pause_s=0.0,
            sample_s=0.002,
            slow_by=slow_by,
            lr=0.001,
        )
        assert done.code == 0, done.err
        late = done.steps[len(done.steps) // 2 :]
        return sum(s["samples"] for s in late[1:]) / (late[-1]["time"] - late[0]["time"])


def show_shares(asked: argparse.Namespace) -> None:
    slow_by = 2.0 if asked.slow_by == 10.0 else asked.slow_by
    print(f"2 workers, 2 ms a sample, one {slow_by:g} times slower; share of the throughput kept\n")
    print(f"{'':22}{'equal shares':30}shares by speed")
    for strategy in ("allreduce", "ps:sync"):
        kept: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(asked.repeats):
            for equal, found in kept.items():
                alone = with_shares(strategy, 1.0, equal=equal)
                found.append(with_shares(strategy, slow_by, equal=equal) / alone)
        equal, by_speed = (spread(kept[way], percent=True) for way in (True, False))
        print(f"{strategy:22}{equal:30}{by_speed}", flush=True)


def spread(values: list[float], *, percent: bool = False) -> str:
    unit, form = (100, "{:.1f} %") if percent else (1, "{:.0f}")
    middle, least, most = (
        form.format(unit * value) for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({least} to {most})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow-by", type=float, default=10.0)
    parser.add_argument("--strategies", nargs="+", default=list(STEPS))
    parser.add_argument(
        "--shares",
        action="store_true",
        help="measure the effect of shares, with two synchronous workers",
    )
    asked = parser.parse_args()
    if asked.shares:
        show_shares(asked)
        return
    print(
        f"{WORKERS} workers, {PAUSE_S * 1000:.0f} ms a step, one {asked.slow_by:g} times slower; samples/s, "
        f"medians of {asked.repeats} (least to greatest)\n"
    )
    print(f"{'':22}{'undisturbed':22}{'with a slow one':22}kept")
    for strategy in asked.strategies:
        pairs = [
            (samples_per_s(strategy, 1.0), samples_per_s(strategy, asked.slow_by))
            for _ in range(asked.repeats)
        ]
        without, slowed = [a for a, _ in pairs], [b for _, b in pairs]
        kept = spread([b / a for a, b in pairs], percent=True)
        print(f"{strategy:22}{spread(without):22}{spread(slowed):22}{kept}", flush=True)


if __name__ == "__main__":
    main()
