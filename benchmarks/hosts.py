"""Training over a network: steps per second and bytes on the wire, compared with torch DDP under torchrun.

The hosts are those of a lab (network namespaces of this machine, connected by links of a given rate), so
this needs root. All contenders have the same model, batch per worker, synthetic data, optimizer and threads,
with one worker per host unless --workers-per-host says otherwise. Each repeat runs every contender once, in
rotating order; ratios are taken within a repeat.

Bytes are those sent by the hosts' interfaces during the timed part, per step. `least` is 2 (n-1)/n times the
parameters for n hosts: the minimum that each sends if summing is shared equally. A lab's interfaces pass
packets of about 64 KB and count their headers once (0.1 %); a real network with packets of 1,500 bytes adds
about 4 % for all contenders. The timed part begins and ends within a step, and bytes are sent in bursts: with
few steps, this causes an error of about half a percent in either direction.

    python benchmarks/hosts.py                                  about an hour on two cores
    python benchmarks/hosts.py --quick                          a test run, without usable numbers
    python benchmarks/hosts.py --hosts 2,4 --bandwidth 100mbit --models perceptron
    python benchmarks/hosts.py --only "allreduce,allreduce(bucket_mb=1),ps:sync(servers=1)"
    python benchmarks/hosts.py --hosts 2 --workers-per-host 2   both reduce in their host before they send
    python benchmarks/hosts.py --against COMMIT                 compare with another commit

The hosts share the cores of this machine: with more hosts than cores, they take turns computing. On a slow
link, the network still dominates.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import against
import ps_ours
from against import Tree
from ps import describe_machine
from ps_clock import steady
from ps_contenders import split_names
from ps_load import MODELS, Load
from ps_table import aligned, spread
from ps_watch import Failed

from manyhands.errors import LabError
from manyhands.lab.run_all import variables
from manyhands.testing.lab import Lab

HERE = Path(__file__).parent
DDP = "ddp"
CONTENDERS = (DDP, "allreduce", "ps:sync", "ps:sync --trust-network")
STEPS = {"perceptron": 120, "25m": 24}
"""Timed steps."""
WARM_UP = {"perceptron": 20, "25m": 4}
QUICK = {"perceptron": 24, "25m": 6}
LOOK_S = 0.05


@dataclass(frozen=True)
class Measured:
    steps_per_s: float
    step_bytes: float
    """Sent in a step by a host, on average."""


@dataclass
class Row:
    contender: str
    runs: dict[int, Measured] = field(default_factory=dict)
    """By repeat."""
    failed: str = ""

    def over(self, other: Row) -> list[float]:
        both = [repeat for repeat in self.runs if repeat in other.runs]
        return [self.runs[r].steps_per_s / other.runs[r].steps_per_s for r in both]


class Counters:
    """What the hosts' interfaces have sent, looked at again and again. Use as a context manager."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._seen: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="counters")

    def __enter__(self) -> Counters:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, began: float, ended: float) -> float:
        """Bytes of all hosts together."""
        return self._at(ended) - self._at(began)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            before = time.time()
            try:
                sent = sum(host.traffic().sent_bytes for host in self._lab.hosts)
            except LabError:  # what looks is ended with all that runs there, when a run is over
                continue
            self._seen.append(((before + time.time()) / 2, sent))

    def _at(self, moment: float) -> float:
        later = next((n for n, (at, _) in enumerate(self._seen) if at >= moment), None)
        if not later:
            raise Failed("the counters were not looked at in time")
        (a, before), (b, after) = self._seen[later - 1], self._seen[later]
        return before + (after - before) * (moment - a) / (b - a)


def main() -> None:
    given = parse()
    if reason := Lab.unavailable():
        sys.exit(reason)
    machine = describe_machine()
    print(machine["words"])
    print(
        f"links of {given.bandwidth}, {given.repeats} repeat(s), {given.workers_per_host} worker(s) of "
        f"{given.threads} thread(s) a host"
    )
    with against.trees(given.against) as trees:
        measure_labs(given, machine, trees)


def measure_labs(given: argparse.Namespace, machine: dict[str, Any], trees: list[Tree]) -> None:
    results: list[dict[str, Any]] = []
    for num_hosts in given.hosts:
        with Lab(hosts=num_hosts, bandwidth=given.bandwidth) as lab:
            for model in given.models:
                load = make_load(model, num_hosts, given)
                rows = measure_all(lab, load, given, trees)
                print(f"\n{model}: {MODELS[model]}; {num_hosts} hosts, {load.steps} timed steps")
                print(*table(rows, load, num_hosts), sep="\n", flush=True)
                for tree in trees[1:]:
                    others = {name: rows.get(tree.label(name)) for name in given.only}
                    ratios = {name: rows[name].over(row) for name, row in others.items() if row}
                    print(*against.comparison(ratios, tree.commit), sep="\n", flush=True)
                results.append(
                    {
                        "load": json.loads(load.to_json()),
                        "hosts": num_hosts,
                        "least_bytes": least_bytes(load, num_hosts),
                        "rows": {name: record(row, rows[DDP]) for name, row in rows.items()},
                    }
                )
                if given.json:  # after each, so that a run that is cut short leaves what it has
                    told = {"machine": machine, "bandwidth": given.bandwidth, "results": results}
                    given.json.write_text(json.dumps(told, indent=1))


def measure_all(
    lab: Lab, load: Load, given: argparse.Namespace, trees: list[Tree]
) -> dict[str, Row]:
    contenders = [
        (name, tree) for name in given.only for tree in trees if name != DDP or tree is trees[0]
    ]
    rows = {tree.label(name): Row(tree.label(name)) for name, tree in contenders}
    for repeat in range(given.repeats):
        for name, tree in against.in_turn(contenders, repeat):
            row = rows[tree.label(name)]
            if row.failed:
                continue
            try:
                row.runs[repeat] = measure(lab, name, load, given.deadline, tree)
            except Failed as error:
                row.failed = str(error)
                print(f"  {row.contender}: left out: {error}", flush=True)
                continue
            run = row.runs[repeat]
            print(
                f"  {load.model} x{load.workers} {repeat + 1}/{given.repeats} {row.contender}: "
                f"{run.steps_per_s:.2f} steps/s, {run.step_bytes / 1e6:.2f} MB a step and host",
                flush=True,
            )
    return rows


def measure(lab: Lab, name: str, load: Load, deadline_s: float, tree: Tree) -> Measured:
    with tempfile.TemporaryDirectory(prefix="bench-") as text, Counters(lab) as counters:
        folder = Path(text)
        if name == DDP:
            speed = by_torchrun(lab, load, folder, deadline_s)
        else:
            speed = by_manyhands(lab, name, load, folder, deadline_s, tree)
        num_bytes = counters.between(speed["began"], speed["ended"])
    steps_per_s = speed["samples_per_s"] / (load.workers * load.batch)
    steps = steps_per_s * (speed["ended"] - speed["began"])
    return Measured(steps_per_s, num_bytes / steps / len(lab.hosts))


def by_torchrun(lab: Lab, load: Load, folder: Path, deadline_s: float) -> dict[str, Any]:
    commands, per_host = [], load.workers // len(lab.hosts)
    for host in lab.hosts:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(per_host)]
        command += ["--nnodes", str(len(lab.hosts)), "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
        command += ["--rdzv-endpoint", f"{lab.hosts[0].name}:29400", "--local-addr", host.address]
        commands.append([*command, str(HERE / "hosts_ddp.py"), load.to_json(), str(folder)])
    on_all_hosts(lab, commands, {}, load, folder, deadline_s)
    logs = [json.loads((folder / f"times-{rank}").read_text()) for rank in range(load.workers)]
    return steady(logs, samples=load.batch, skip=load.warm_up)


def by_manyhands(
    lab: Lab, name: str, load: Load, folder: Path, deadline_s: float, tree: Tree
) -> dict[str, Any]:
    spec, *flags = name.split()
    command = [
        *(sys.executable, "-m", "manyhands.cli.main", "train"),
        *(str(tree.benchmark(ps_ours.JOB)), "--on", "env"),
        *("--strategy", spec, "--threads", str(load.threads), "--device", "cpu"),
        *("--workers", str(load.workers), "--slots", str(load.workers // len(lab.hosts))),
        *("--set", f"size={load.model}", "--set", f"steps={load.all_steps}"),
        *("--set", f"batch_size={load.workers * load.batch}"),
        *("--run-dir", str(folder / "run"), "--quiet", *flags),
    ]
    env = {"MANYHANDS_KEY": secrets.token_hex(32), **tree.environ()}
    on_all_hosts(lab, [command] * len(lab.hosts), env, load, folder, deadline_s)
    return ps_ours.speed(list(ps_ours.read_events(folder / "run" / "events.jsonl")), load.warm_up)


def on_all_hosts(
    lab: Lab,
    commands: Sequence[Sequence[str]],
    env: dict[str, str],
    load: Load,
    folder: Path,
    deadline_s: float,
) -> None:
    """A command for each host, to the end of all; the first that fails ends them."""
    running = []
    for host, command in zip(lab.hosts, commands, strict=True):
        environ = {**variables(lab, host), **env, "OMP_NUM_THREADS": str(load.threads)}
        with open(folder / f"out-{host.name}", "wb") as out:
            running.append(host.start(command, env=environ, stdout=out, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + deadline_s
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for host, process in zip(lab.hosts, running, strict=True):
            if code := process.poll():
                lines = (folder / f"out-{host.name}").read_text().strip().splitlines()
                raise Failed(f"{host.name} ended with {code}: {' | '.join(lines[-3:])}")
        if any(process.poll() is None for process in running):
            raise Failed(f"no end after {deadline_s:.0f} s")
    finally:
        for host in lab.hosts:
            host.kill_all()


def least_bytes(load: Load, hosts: int) -> float:
    """That a host sends in a step, at least."""
    return 2 * (hosts - 1) / hosts * load.parameter_bytes


def table(rows: dict[str, Row], load: Load, hosts: int) -> list[str]:
    least = least_bytes(load, hosts)
    head = (
        "contender",
        "steps/s  median (min .. max)",
        "/ ddp  median (min .. max)",
        "MB a step and host",
        "/ least",
    )
    lines: list[tuple[str, ...]] = [head]
    for row in rows.values():
        if not row.runs:
            continue
        ratios = row.over(rows[DDP])
        sent = statistics.median(run.step_bytes for run in row.runs.values())
        lines.append(
            (
                row.contender,
                spread([run.steps_per_s for run in row.runs.values()], ".2f"),
                spread(ratios, ".3f") if ratios else "-",
                f"{sent / 1e6:.2f}",
                f"{sent / least:.3f}",
            )
        )
    lost = [f"{row.contender}: not measured: {row.failed}" for row in rows.values() if row.failed]
    return [*aligned(lines), f"least: {least / 1e6:.2f} MB a step and host", *lost]


def record(row: Row, ddp: Row) -> dict[str, Any]:
    return {
        "steps_per_s": [run.steps_per_s for run in row.runs.values()],
        "step_bytes": [run.step_bytes for run in row.runs.values()],
        "over_ddp": row.over(ddp),
        "failed": row.failed,
    }


def make_load(model: str, num_hosts: int, given: argparse.Namespace) -> Load:
    steps, warm_up = STEPS[model], WARM_UP[model]
    if given.quick:
        steps, warm_up = QUICK[model], 3
    return Load(
        model=model,
        workers=num_hosts * given.workers_per_host,
        threads=given.threads,
        batch=given.batch or MODELS[model].batch,
        steps=round(given.scale * steps),
        warm_up=warm_up,
        seconds=given.deadline,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="2,4", help="numbers of hosts (default: 2,4)")
    parser.add_argument(
        "--bandwidth", default="1gbit", help="bandwidth of each link (default: 1gbit)"
    )
    parser.add_argument("--workers-per-host", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--models", default=",".join(STEPS), help=f"of {', '.join(STEPS)}")
    parser.add_argument(
        "--only",
        type=lambda text: [DDP, *(name for name in split_names(text) if name != DDP)],
        default=list(CONTENDERS),
        help="contenders, separated by commas; ddp is always included",
    )
    parser.add_argument("--repeats", type=int, help="default: 5; 1 with --quick, 7 with --against")
    against.add_flag(parser)
    parser.add_argument("--quick", action="store_true", help="a few steps of the smallest model")
    parser.add_argument("--threads", type=int, default=1, help="threads per worker (default: 1)")
    parser.add_argument(
        "--batch", type=int, help="samples per worker and step (default: the model's)"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of steps")
    parser.add_argument(
        "--deadline", type=float, default=600.0, help="time limit of one run, in seconds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers, for other programs")
    given = parser.parse_args()
    given.hosts = [int(word) for word in given.hosts.split(",")]
    given.models = ["perceptron"] if given.quick else given.models.split(",")
    given.repeats = given.repeats or (1 if given.quick else against.PAIRS if given.against else 5)
    if unknown := [name for name in given.models if name not in STEPS]:
        parser.error(f"there is no model {unknown[0]!r}; there are {', '.join(STEPS)}")
    return given


if __name__ == "__main__":
    main()
