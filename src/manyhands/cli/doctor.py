"""Checks what this machine has, whether everything that manyhands needs works here, and what to fix.

Everything is really tried: links make a round trip, and new processes form a process group and all-reduce.
Takes some seconds and changes nothing. Exit code 0 if there is nothing to fix, else 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from manyhands.api.options import Resolved
from manyhands.api.where import ResolvedCluster, run_authority
from manyhands.doctor import Check, Finding, checks, wants_colour
from manyhands.doctor.hosts import ClusterProbe, agent_timeouts, find_problems, format_table
from manyhands.errors import Interrupted
from manyhands.events.units import clean
from manyhands.hosts.discovery import describe, detect
from manyhands.hosts.host_facts import PairFacts
from manyhands.hosts.spec import ClusterSpec

HELP = "check this machine, or the hosts of a cluster, and list what to fix"
EXAMPLES = """\
examples:
  manyhands doctor
  manyhands doctor /scratch/runs      where run folders go, if not to runs/
  manyhands doctor --json             for programs: name, ok (true, false, null), detail, remedy
  manyhands doctor --cluster cluster.toml --as gpu-a --show      only print the processes of the cluster
  srun manyhands doctor --cluster env --key-file run.key         on all hosts: every pair is tested
  manyhands lab run --hosts 3 -- manyhands doctor --cluster env --key-file run.key
"""

MARKS = {True: "ok", False: "fix", None: "note"}
COLOURS = {True: "32", False: "1;31", None: "33"}
MARK_CELLS = 6
WAIT_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("runs"),
        help="where run folders go (default: runs)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the findings as a JSON list, at the end"
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE|env",
        help="print the processes of the cluster, from a cluster file or the environment (torchrun, srun, "
        "Kubernetes, TF_CONFIG, or RANK and WORLD_SIZE), and test every pair of hosts; run it on all of "
        "them, as for training; exit code 2 if the description of the cluster is wrong",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="with --cluster: only print the processes, and test nothing",
    )
    parser.add_argument(
        "--as",
        dest="entry",
        metavar="NAME",
        help="with --cluster FILE: this host's entry in the file",
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="with --cluster: a file with the run's key (default: the variable MANYHANDS_KEY)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help=f"with --cluster: how long to wait for the others (default: {WAIT_S:.0f})",
    )
    parser.add_argument(
        "--control",
        metavar="ADDRESS",
        help="with --cluster: the address at which rank 0 listens, tcp://HOST:PORT",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.cluster or arguments.entry:
        return _check_cluster(arguments)
    to_run = checks(arguments.folder)
    if arguments.json:
        findings = [check.run() for check in to_run]
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        findings = list(_run_all(to_run, sys.stdout))
        print(_verdict(findings))
    return int(any(finding.ok is False for finding in findings))


def _check_cluster(arguments: argparse.Namespace) -> int:
    """Print the cluster as it was read; then, with all other processes, test the network between hosts."""
    file = None if arguments.cluster in (None, "env") else Path(arguments.cluster)
    spec = detect(cluster=file, name=arguments.entry)
    if arguments.show or spec.mine is None:
        print(json.dumps(dataclasses.asdict(spec), indent=2) if arguments.json else describe(spec))
        return 0
    resolved = Resolved(vars(arguments))
    control = resolved.get("control", None)
    wait_s = resolved.get("wait", WAIT_S, float)
    key_file = resolved.get("key_file", None, Path)
    command = f"doctor --cluster {arguments.cluster}"
    authority = run_authority(spec, control, key_file, command=command)
    process = ResolvedCluster(spec, authority, control, agent_timeouts(wait_s))
    if not process.is_coordinator:
        return process.serve(doctor=True)
    address = process.listening_address()
    if not arguments.json:
        print(describe(spec), end="\n\n", flush=True)
    out = sys.stderr if arguments.json else sys.stdout
    with ClusterProbe(
        spec,
        address,
        authority=authority,
        wait_s=wait_s,
        notify=lambda text: print(f"note: {text}", file=out, flush=True),
    ) as cluster:
        return _probe(cluster, spec, as_json=arguments.json)


def _probe(cluster: ClusterProbe, spec: ClusterSpec, *, as_json: bool) -> int:
    pairs: list[PairFacts] = []
    before = signal.signal(signal.SIGTERM, _stop)
    stopped = 0
    try:
        cluster.gather()
        pairs = cluster.measure()
    except Interrupted as interrupt:
        stopped = interrupt.exit_code  # the results so far are printed
    finally:
        # A scheduler that ends all processes when one has ended must not cut off the output now.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hosts = cluster.hosts
    findings = [*cluster.findings, *find_problems(hosts, pairs)]
    if as_json:
        results: dict[str, list[Any]] = {"hosts": hosts, "pairs": pairs, "findings": findings}
        shown = {name: [dataclasses.asdict(each) for each in r] for name, r in results.items()}
        print(json.dumps({"cluster": dataclasses.asdict(spec), **shown}, indent=2))
    else:
        print(format_table(hosts, pairs), end="\n\n")
        cells = max((len(finding.name) for finding in findings), default=0)
        for finding in findings:
            print("\n".join(_lines(finding, cells, wants_colour(sys.stdout))))
        print("Stopped before the end." if stopped else _verdict(findings), flush=True)
    code = stopped or int(any(finding.ok is False for finding in findings))
    cluster.end(code)
    signal.signal(signal.SIGTERM, before)
    return code


def _stop(number: int, _frame: object) -> None:
    raise Interrupted("stopped by SIGTERM", exit_code=128 + number)


def _run_all(to_run: list[Check], out: TextIO) -> Iterator[Finding]:
    """Run the checks, and print each finding as soon as it is there."""
    name_cells = max(len(check.name) for check in to_run)
    colour, live = wants_colour(out), out.isatty()
    for check in to_run:
        waiting = f"{'...':{MARK_CELLS}}{check.name}"
        if live:
            out.write(waiting)
            out.flush()
        finding = check.run()
        if live:
            out.write("\r" + " " * len(waiting) + "\r")
        print("\n".join(_lines(finding, name_cells, colour)), file=out, flush=True)
        yield finding


def _lines(finding: Finding, name_cells: int, colour: bool) -> Iterator[str]:
    mark = f"{MARKS[finding.ok]:{MARK_CELLS}}"
    if colour:
        mark = f"\x1b[{COLOURS[finding.ok]}m{mark}\x1b[0m"
    detail = " ".join(clean(finding.detail).split())
    yield f"{mark}{finding.name:{name_cells}}  {detail}"
    if finding.remedy:
        yield f"{'':{MARK_CELLS + name_cells}}  -> {finding.remedy}"


def _verdict(findings: list[Finding]) -> str:
    to_fix = dict.fromkeys(finding.name for finding in findings if finding.ok is False)
    return f"To fix: {', '.join(to_fix)}." if to_fix else "Nothing to fix."
