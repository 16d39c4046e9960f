"""The parameter server, compared with the limit of the machine, torch DDP and other parameter servers.

All contenders have the same model, batch per worker, synthetic data, optimizer, workers and threads. Each
repeat runs every contender once, in rotating order, so that other load on the machine affects all; ratios
are taken within a repeat. Speed is samples per second after a warm-up. Memory is the summed proportional set
size of a run's processes, its maximum between warm-up and end, in the first repeat; `base` is that of the
same number of processes with torch and the data, but no model.

    python benchmarks/ps.py                                   about an hour and a half on two cores
    python benchmarks/ps.py --quick                           a test run, without usable numbers
    python benchmarks/ps.py --workers 2,4 --models 25m --only limit,ddp,ps:sync
    python benchmarks/ps.py --only "limit,ps:sync(transport=tcp),ps:sync(transport=tcp) --trust-network"
    python benchmarks/ps.py --only ps:sync --against COMMIT   compare with another commit

Peers are installed into benchmarks/.venvs at the first run; a peer that can't be installed or run is listed
with the reason. Without peers, only torch is needed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

import against
import ps_table
from against import Tree
from ps_contenders import DEFAULT, Contender, base_memory, split_names
from ps_load import MODELS, Load
from ps_peers import PEERS, VENVS
from ps_table import Row
from ps_watch import Failed, become_reaper

from manyhands.hosts.launchers.local import cores

QUICK = {"perceptron": 40, "25m": 6, "100m": 4}
"""Timed steps of --quick."""


def main() -> None:
    given = parse()
    become_reaper()
    # Ended as by Ctrl-C: what runs is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    machine = describe_machine()
    print(machine["words"])
    print(
        f"{given.repeats} repeat(s), workers of {given.threads} thread(s); SGD with momentum, fused; "
        "a peer's server is one process with as many threads as a worker"
    )
    with against.trees(given.against) as trees:
        measure_loads(given, machine, trees)


def measure_loads(given: argparse.Namespace, machine: dict[str, Any], trees: list[Tree]) -> None:
    results: list[dict[str, Any]] = []
    for workers in given.workers:
        for model in given.models:
            load = make_load(model, workers, given)
            rows = measure_all(load, given, trees)
            print(f"\n{model}: {MODELS[model]}; {workers} workers, {load.steps} timed steps")
            for table in (ps_table.speed_table, ps_table.ratio_table, ps_table.memory_table):
                if lines := table(rows):
                    print("", *lines, sep="\n")
            for tree in trees[1:]:
                ratios = {
                    name: rows[name].over(rows[tree.label(name)])
                    for name in given.only
                    if tree.label(name) in rows
                }
                print("", *against.comparison(ratios, tree.commit), sep="\n", flush=True)
            results.append(
                {
                    "load": json.loads(load.to_json()),
                    "rows": [row.to_dict() for row in rows.values()],
                    "ratios": ps_table.ratios(rows),
                }
            )
            if given.json:  # after each, so that a run that is cut short leaves what it has
                given.json.write_text(
                    json.dumps({"machine": machine, "results": results}, indent=1)
                )


def measure_all(load: Load, given: argparse.Namespace, trees: list[Tree]) -> dict[str, Row]:
    contenders = [
        contender
        for name in given.only
        for tree in trees
        if (contender := Contender(name, tree)).is_ours or tree is trees[0]
    ]
    rows = {contender.title: Row(contender.title) for contender in contenders}
    for contender in contenders:
        try:
            contender.prepare(load, reinstall=given.reinstall)
        except Failed as error:
            give_up(rows[contender.title], error)
    given.reinstall = False  # once is enough
    for repeat in range(given.repeats):
        for contender in against.in_turn(contenders, repeat):
            row = rows[contender.title]
            if row.failed:
                continue
            try:
                measured = contender.measure(
                    load, deadline_s=given.deadline, sample=given.memory and repeat == 0
                )
            except Failed as error:
                give_up(row, error)
                continue
            row.runs[repeat] = measured
            print(
                f"  {load.model} x{load.workers} {repeat + 1}/{given.repeats} "
                f"{contender.title}: {measured.samples_per_s:,.0f} samples/s "
                f"over {measured.window_s:.1f} s",
                flush=True,
            )
    if given.memory:
        note_memory(contenders, rows, load, given)
    return rows


def note_memory(
    contenders: list[Contender], rows: dict[str, Row], load: Load, given: argparse.Namespace
) -> None:
    """What memory to expect, and what the processes would take without a model."""
    bases: dict[int, int] = {}
    for contender in contenders:
        row = rows[contender.title]
        if row.memory is None or contender.name in PEERS:
            continue
        processes = row.memory.processes
        if processes not in bases:
            alone = Load(**{**json.loads(load.to_json()), "workers": processes})
            if (base := base_memory(alone, deadline_s=given.deadline)) is not None:
                bases[processes] = base.total_bytes
        row.base_bytes = bases.get(processes)
        row.expected_bytes = contender.expected_bytes(load)


def give_up(row: Row, error: Failed) -> None:
    row.failed = str(error)
    print(f"  {row.contender}: left out: {error}", flush=True)


def make_load(name: str, workers: int, given: argparse.Namespace) -> Load:
    model = MODELS[name]
    steps, warm_up = model.steps, model.warm_up
    if given.quick:
        steps, warm_up = QUICK[name], 2
    # Workers that share cores are as much slower.
    steps = max(4, round(given.scale * steps * min(1.0, cores() / (workers * given.threads))))
    return Load(
        model=name,
        workers=workers,
        threads=given.threads,
        batch=given.batch or model.batch,
        steps=steps,
        warm_up=warm_up,
        seconds=given.seconds,
    )


def describe_machine() -> dict[str, Any]:
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    versions = {"python": platform.python_version()}
    for package in ("manyhands", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "from source"
    for folder in sorted(VENVS.glob("*/lib/python*/site-packages/*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        if name in ("ray", "tensorflow_cpu", "horovod"):
            versions[name] = version
    load = os.getloadavg()[0]
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {
        "words": f"{cpu}, {cores()} cores, {memory_gib:.0f} GiB, load before {load:.1f}; {told}",
        "cpu": cpu,
        "cores": cores(),
        "memory_gib": memory_gib,
        "load_before": load,
        "versions": versions,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"contenders by default: {', '.join(DEFAULT)}",
    )
    parser.add_argument("--workers", default="2", help="numbers of workers, as 2,4,8 (default: 2)")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--only", default=",".join(DEFAULT), help="contenders, separated by commas")
    parser.add_argument("--repeats", type=int, help="default: 5; 1 with --quick, 7 with --against")
    against.add_flag(parser)
    parser.add_argument("--quick", action="store_true", help="a few steps of the smallest model")
    parser.add_argument("--threads", type=int, default=1, help="threads per worker (default: 1)")
    parser.add_argument(
        "--batch", type=int, help="samples per worker and step (default: the model's)"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of steps")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of a slow peer")
    parser.add_argument(
        "--deadline", type=float, default=600.0, help="time limit of one run, in seconds"
    )
    parser.add_argument(
        "--no-memory", dest="memory", action="store_false", help="do not measure memory"
    )
    parser.add_argument("--reinstall", action="store_true", help="install the peers anew")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers, for other programs")
    given = parser.parse_args()
    given.workers = [int(word) for word in given.workers.split(",")]
    given.models = ["perceptron"] if given.quick else given.models.split(",")
    given.only = split_names(given.only)
    given.repeats = given.repeats or (1 if given.quick else against.PAIRS if given.against else 5)
    if unknown := [name for name in given.models if name not in MODELS]:
        parser.error(f"there is no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    return given


if __name__ == "__main__":
    main()
