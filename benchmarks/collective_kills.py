"""The pause in training after a worker's death inside a collective of a group or one of its splits.

Four workers train with tests/strategies/extra/every_collective.py, whose steps use every operation of a group
in the group of all, in pairs, in a split of three, and in a split of that split, so that a worker is nearly
always inside one of them. Random workers get SIGKILL at random moments, each some steps after all four were
present again. Measured as in recovery.py: from the kill to the next committed step that had not been done
before. The worker's own file tells where it was.

    python benchmarks/collective_kills.py                           10 kills in one run
    python benchmarks/collective_kills.py --kills 25 --repeats 2    50 kills
    python benchmarks/collective_kills.py --seed 3 --json FILE      adds 10 others to those in the file
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from against import ROOT, THIS
from ps import describe_machine
from recovery import Kill, kill_one
from recovery_trainings import Ours, Stuck

EXTRA = ROOT / "tests" / "strategies" / "extra"
STRATEGY = "every-collective(round_trips=5)"
"""So that computing is a small part of a step."""
WORKERS = 4
GOAL_MEDIAN_S, GOAL_LONGEST_S = 1.0, 3.0
PARTS = {
    "detection_s": "from the last step until the death was noticed",
    "view_s": "until all had joined the next view",
    "redo_s": "until the first new step was committed",
}


@dataclass(frozen=True)
class Hit:
    """A kill, and where it hit."""

    where: str
    kill: Kill
    parts: dict[str, float]
    """Of the event Recovered."""


def main() -> None:
    given = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(
        f"{describe_machine()['words']}\n{WORKERS} workers, {STRATEGY}; {given.repeats} run(s) of "
        f"{given.kills} kills each\n"
    )
    hits: list[Hit] = []
    for repeat in range(given.repeats):
        try:
            hits += measure(repeat, given)
        except Stuck as error:
            print(f"run {repeat + 1} is stuck: {error}", flush=True)
            sys.exit(1)
    found = [*read(given.json), *(summary(hit) for hit in hits)]
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    print_table(found)


def measure(repeat: int, given: argparse.Namespace) -> list[Hit]:
    """Train with several kills."""
    rng = random.Random(f"{given.seed} {repeat}")
    hits = []
    with tempfile.TemporaryDirectory(prefix="collective-kills-") as name:
        folder = Path(name)
        paths = [str(EXTRA), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= {"EVERY_COLLECTIVE": name, "PYTHONPATH": os.pathsep.join(paths)}
        training = Ours(STRATEGY, folder, workers=WORKERS, threads=1, tree=THIS)
        try:
            for number in range(given.kills):
                if (kill := kill_one(training, STRATEGY, repeat, rng)) is None:
                    continue
                where = (folder / str(kill.pid)).read_text().split()
                parts = [r for r in training.records if r["event"] == "Recovered"][-1]
                hit = Hit(where[-1], kill, {part: parts[part] for part in PARTS})
                hits.append(hit)
                print(
                    f"  {repeat + 1}.{number + 1:<3} {kill.victim:10} in {hit.where:24} new step after "
                    f"{kill.seconds['new']:.2f} s",
                    flush=True,
                )
        finally:
            training.stop()
    return hits


def summary(hit: Hit) -> dict[str, Any]:
    return {"where": hit.where, "parts": hit.parts, **asdict(hit.kill)}


def read(path: Path | None) -> list[dict[str, Any]]:
    """Return what earlier pieces have found."""
    return json.loads(path.read_text()) if path and path.exists() else []


def print_table(found: list[dict[str, Any]]) -> None:
    new = sorted(each["seconds"]["new"] for each in found)
    steps = median(each["step_s"] for each in found)
    print(f"\nmedian of an undisturbed step {1000 * steps:.0f} ms; {len(found)} kills")
    print(f"seconds to the next new step: median {median(new):.2f}, longest {new[-1]:.2f}")
    for part, words in PARTS.items():
        seconds = sorted(each["parts"][part] for each in found if each["parts"][part] is not None)
        print(f"  {words:48} median {median(seconds):.2f}, longest {seconds[-1]:.2f}")
    longest: dict[str, float] = {}
    for each in found:
        longest[each["where"]] = max(longest.get(each["where"], 0.0), each["seconds"]["new"])
    for where, count in Counter(each["where"] for each in found).most_common():
        print(f"  {where:28} {count:3} kills, longest {longest[where]:.2f}")
    met = median(new) <= GOAL_MEDIAN_S and new[-1] <= GOAL_LONGEST_S
    print(
        f"goal: median {GOAL_MEDIAN_S:g} s, each {GOAL_LONGEST_S:g} s: {'' if met else 'not '}met"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="kills per run (default: 10)")
    parser.add_argument("--repeats", type=int, default=1, help="runs (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of victims and moments")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all kills, added to the file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
