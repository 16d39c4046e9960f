"""The pause in training after a worker's death: manyhands, compared with a restart by torchrun.

Both have the same perceptron, data, batch, workers and threads, save equally often, and run alternately on
the same machine. Random workers get SIGKILL, several per run, each time some steps after all workers were
present again. Measured from the kill:

    new     to the next step that had not been done before the kill
    first   to the next step of any kind: after a restart, the steps since the last save are done again
    whole   to as many workers as before

Our steps count when they are committed: the line is in events.jsonl, up to 0.1 s after the computation,
because workers report several steps at once. A step of torchrun counts when rank 0 has made its update. Of
our steps, only those dispatched after the death count, although others may have been completed before it was
noticed; they are always new.

Times are wall-clock times, which all processes of a machine share and both records use; if the wall clock
was adjusted during a measurement, the measurement is discarded.

    python benchmarks/recovery.py [--kills 5] [--repeats 2] [--only allreduce,torchrun] [--json FILE]
    python benchmarks/recovery.py --only allreduce --against COMMIT
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import against
from against import Tree
from ps import describe_machine
from ps_contenders import split_names
from recovery_model import BATCH, SAVE_EVERY
from recovery_trainings import Ours, Stuck, Torchrun, Training

from manyhands.errors import SpecError
from manyhands.hosts.launchers.local import cores
from manyhands.strategies.registry import make_strategy

TORCHRUN = "torchrun"
CONTENDERS = ("allreduce", "ps:sync", "ps:async", TORCHRUN)
STEPS_BETWEEN = 10
"""At least so many between two kills, after all workers are there again."""
PAUSE_S = 1.0
"""And up to so long, at random: a kill may fall anywhere between two saves."""
CLOCK_SET_S = 0.005

ASPECTS = {
    "new": "to the next new step",
    "first": "to the next step of any kind",
    "whole": "to as many workers as before",
    "seen": "to the death seen",
    "agreed": "to the weights agreed on",
}


@dataclass(frozen=True)
class Kill:
    contender: str
    repeat: int
    victim: str
    pid: int
    step_s: float
    """Of an undisturbed step, since all were there after the last kill, or since the beginning."""
    seconds: dict[str, float]
    """From the kill to what came after it: seen, agreed, first, new, whole."""


def main() -> None:
    given = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    machine = describe_machine()
    print(
        f"{machine['words']}\n{given.workers} workers of {threads(given)} thread(s), perceptron 784-256-10, "
        f"{BATCH} samples a step, saved every {SAVE_EVERY} steps; {given.repeats} run(s) of {given.kills} "
        "kills each, alternating\n"
    )
    with against.trees(given.against) as trees:
        measure_all(given, machine, trees)


def measure_all(given: argparse.Namespace, machine: dict[str, Any], trees: list[Tree]) -> None:
    kills: list[Kill] = []
    stuck: list[str] = []
    contenders = [
        (name, tree)
        for name in given.only
        for tree in trees
        if name != TORCHRUN or tree is trees[0]
    ]
    for repeat in range(given.repeats):
        for name, tree in against.in_turn(contenders, repeat):
            try:
                suffer(name, tree, repeat, given, kills)
            except Stuck as error:
                stuck.append(f"{tree.label(name)}, run {repeat + 1}: {error}")
                print(stuck[-1], flush=True)
            if given.json:  # after each, so that a run that is cut short leaves what it has
                told = {"machine": machine, "workers": given.workers, "stuck": stuck}
                told["kills"] = [asdict(kill) for kill in kills]
                given.json.write_text(json.dumps(told, indent=1))
    print_tables([tree.label(name) for name, tree in contenders], kills)
    for tree in trees[1:]:
        ratios = {
            f"{name}, {aspect}": ratios_of(kills, tree.label(name), name, aspect)
            for name in given.only
            for aspect in ("new", "whole")
        }
        print("", *against.comparison(ratios, tree.commit), sep="\n")


def suffer(
    name: str, tree: Tree, repeat: int, given: argparse.Namespace, kills: list[Kill]
) -> None:
    """Train with several kills, and add them to the list."""
    contender = tree.label(name)
    rng = random.Random(f"{given.seed} {repeat} {name}")
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        training = start(name, tree, Path(folder), given)
        try:
            for _ in range(given.kills):
                if (kill := kill_one(training, contender, repeat, rng)) is None:
                    continue
                kills.append(kill)
                told = ", ".join(f"{key} {kill.seconds[key]:.2f} s" for key in ("new", "whole"))
                print(
                    f"  {repeat + 1}/{given.repeats} {contender}, {kill.victim}: {told}", flush=True
                )
        finally:
            training.stop()


def start(name: str, tree: Tree, folder: Path, given: argparse.Namespace) -> Training:
    if name == TORCHRUN:
        return Torchrun(folder, workers=given.workers, threads=threads(given))
    return Ours(name, folder, workers=given.workers, threads=threads(given), tree=tree)


def kill_one(training: Training, contender: str, repeat: int, rng: random.Random) -> Kill | None:
    """Kill a worker some steps from now; return what came of it, unless the clock was set meanwhile."""
    whole = len(training.records)
    enough = training.num_steps + STEPS_BETWEEN
    training.wait(lambda: training.num_steps >= enough, "steps")
    time.sleep(rng.uniform(0.0, PAUSE_S))
    training.look()
    undisturbed_s = step_s(training, whole)
    victim, pid = rng.choice(sorted(training.pids().items()))
    since = len(training.records)
    offset, killed = time.time() - time.monotonic(), time.time()
    os.kill(pid, signal.SIGKILL)
    training.wait(
        lambda: training.after_kill(victim, since) is not None, f"a new step after {victim} died"
    )
    moments = training.after_kill(victim, since)
    assert moments is not None
    if abs(time.time() - time.monotonic() - offset) > CLOCK_SET_S:
        print(f"{contender}: the clock was set; this one does not count", flush=True)
        return None
    seconds = {key: at - killed for key, at in moments.items()}
    return Kill(contender, repeat, victim, pid, undisturbed_s, seconds)


def step_s(training: Training, since: int) -> float:
    """The mean of the steps from that record on."""
    times = [record["time"] for record in training.records[since:] if training.is_step(record)]
    return (times[-1] - times[0]) / (len(times) - 1)


def threads(given: argparse.Namespace) -> int:
    return max(1, cores() // given.workers)


def print_tables(only: list[str], kills: list[Kill]) -> None:
    print("\nmedian of an undisturbed step")
    for contender in only:
        if mine := [kill.step_s for kill in kills if kill.contender == contender]:
            print(f"  {contender:36} {1000 * median(mine):5.0f} ms")
    for aspect, title in ASPECTS.items():
        rows = {c: [k for k in kills if k.contender == c and aspect in k.seconds] for c in only}
        if not any(rows.values()):
            continue
        print(f"\n{'seconds ' + title:38} kills  median    95 %  longest  of torchrun's")
        for contender, mine in rows.items():
            if not mine:
                continue
            ordered = sorted(kill.seconds[aspect] for kill in mine)
            most = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
            print(
                f"  {contender:36} {len(ordered):5} {median(ordered):7.2f} {most:7.2f} "
                f"{ordered[-1]:8.2f}  {compared(mine, rows.get(TORCHRUN, []), aspect)}"
            )


def compared(mine: list[Kill], theirs: list[Kill], aspect: str) -> str:
    """Return the ratio of the medians, and that of each pair of runs."""
    if not theirs or mine[0].contender == TORCHRUN:
        return ""
    ratios = ratios_of([*mine, *theirs], mine[0].contender, TORCHRUN, aspect)
    spread = f" ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""
    return f"{middle(mine, aspect) / middle(theirs, aspect):.3f}{spread}"


def middle(kills: list[Kill], aspect: str) -> float:
    return median(kill.seconds[aspect] for kill in kills)


def ratios_of(kills: list[Kill], above: str, below: str, aspect: str) -> list[float]:
    """Return the ratio of the medians of each pair of runs."""
    runs: dict[tuple[str, int], list[Kill]] = {}
    for kill in kills:
        if aspect in kill.seconds:
            runs.setdefault((kill.contender, kill.repeat), []).append(kill)
    return [
        middle(found, aspect) / middle(runs[below, repeat], aspect)
        for (contender, repeat), found in runs.items()
        if contender == above and (below, repeat) in runs
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="kills per run (default: 5)")
    parser.add_argument(
        "--repeats", type=int, help="runs per contender (default: 2; 7 with --against)"
    )
    against.add_flag(parser)
    parser.add_argument(
        "--only", default=",".join(CONTENDERS), help="contenders, separated by commas"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the choice of victims and times"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers, for other programs")
    given = parser.parse_args()
    given.only = split_names(given.only)
    given.repeats = given.repeats or (against.PAIRS if given.against else 2)
    if given.workers < 2:
        parser.error("with fewer than 2 workers nobody is left to go on")
    try:
        for name in given.only:
            if name != TORCHRUN and not make_strategy(name).traits.elastic:
                parser.error(f"{name} ends when its worker dies")
    except SpecError as error:
        parser.error(str(error))
    return given


if __name__ == "__main__":
    main()
