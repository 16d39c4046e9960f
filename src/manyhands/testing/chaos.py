"""Train with faults, and check the outcome.

    python -m manyhands.testing.chaos                                  about 200 kills in runs of every kind
    python -m manyhands.testing.chaos --only allreduce --kills 100 --doubles 0 --epochs 1500

One kind has two hosts of two workers each: two processes with temporary folders of their own count as two
hosts. There, this program does the single kills, too, since `--chaos` reaches only one of the hosts; and the
coordinator is left alone.

Single kills and pauses are injected with `--chaos`, which kills only members that the run can do without,
spread over the steps of the run. Other kills come from this program, in random order: two members up to 0.3 s
apart, all members at once, and the coordinator, after which the run is resumed. After each of these, the run
must commit a step before the next kill. Everything is seeded except the clock.

If the two killed members were the only holders of a block, all members restart from the last checkpoint.

The runs train the counting job (counting.py), whose final weights show whether any sample was lost or counted
twice. A second, shorter run of each kind compares the losses of a job with momentum, a schedule and clipping
with those of a single worker.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from manyhands.testing import harness
from manyhands.testing.conformance import EQUAL, Case, assert_once_an_epoch, counting_case
from manyhands.testing.counting import COUNTING, Counting, check_counts, check_round_counts
from manyhands.testing.ports import reserve_port

MODES = ("ps:sync", "ps:async", "ps:ssp", "ps:backup")
TRANSPORTS = ("shm", "tcp")
PLACEMENTS = ("colocated", "dedicated")
TWO_HOSTS = "two hosts"
KINDS = [
    ("allreduce", "", ""),
    ("allreduce", "", TWO_HOSTS),
    ("local(every=8)", "", ""),
    *itertools.product(MODES, TRANSPORTS, PLACEMENTS),
]
SPARE_HANDLES = 6
"""Tolerated number of additional files or threads: a connection may be in progress."""
SPARE_OF_FIRST = 40
"""The same between hosts: who becomes the first worker keeps the store of the view, and leads its host."""
LEAST_READINGS = 4
"""Minimum number of readings in each half of a member's life, to detect a leak."""
RECOVERED_WITHIN_S, DONE_WITHIN_S = 60.0, 600.0
"""Limits to detect hangs."""
PAUSE = "pause member 700ms every 5s"
"""Too short for a member to count as dead."""
STEPS_PER_EPOCH = 6
"""Minimum number of steps per epoch of these jobs."""
LAST_KILL = 0.8
"""Position of the last single kill in a run, as a fraction: the run must recover before it ends."""
EVERY = ("--checkpoint-every", "20")
"""Checkpoints to resume from."""
APART_S = 0.3
"""Maximum time between the deaths of two members."""
LIKE_ALONE, NEAR_ALONE = 1e-4, 0.25
"""Maximum relative difference from one worker's losses; for asynchronous strategies, of the final mean."""


def case_of(mode: str, transport: str, placement: str) -> Case:
    dedicated = placement == "dedicated"
    spec = mode
    if transport:
        spec += f"(transport={transport}{',placement=dedicated' if dedicated else ''})"
    hosts = ("--on", "env", "--slots", "2") if placement == TWO_HOSTS else ()
    return Case(
        spec,
        workers=4 if hosts else 3,
        flags=("--max-restarts", "1000", EQUAL, *hosts),
        # A small learning rate: gradients computed on old weights must not diverge.
        fields={"width": 20_000, "lr": 1e-4, "pause_s": 0.03},
    )


@dataclass
class ChaosRun:
    """A run in which members were killed."""

    case: Case
    run: Path
    killed: list[str] = field(default_factory=list)
    num_paused: int = 0
    pauses_s: list[float] = field(default_factory=list)
    """Time from each single kill to the next committed step."""
    pids: set[int] = field(default_factory=set)
    handles: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Readings of the numbers of open files and threads, by process."""
    done: harness.Finished = field(init=False)
    left_over: list[str] = field(default_factory=list)


def train_with_kills(
    case: Case,
    run: Path,
    *,
    seed: int,
    kills: int,
    epochs: int,
    doubles: int = 0,
    role: str = "member",
    job: str = "Regression",
    everybody: bool = False,
    coordinator: bool = False,
) -> ChaosRun:
    """Train with this many kills of one member (of a role) and of two members; optionally kill all members
    once, and the coordinator once."""
    rng = random.Random(f"{seed} {case.strategy}")
    outcome = ChaosRun(case, run)
    several_hosts = "--on" in case.flags
    kills_outside = ["two"] * doubles + ["all"] * everybody + ["coordinator"] * coordinator
    if several_hosts:
        kills, kills_outside = 0, [*kills_outside, *["one"] * kills]
    rng.shuffle(kills_outside)
    chaos = ("--chaos", _chaos(kills, role, epochs, seed))
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        arguments = case.arguments(job, run, *EVERY, *chaos, epochs=epochs)
        environ, *others = _environments(Path(scratch), hosts=2 if several_hosts else 1)
        with ExitStack() as stack:
            running = stack.enter_context(harness.command(*arguments, run=run, environ=environ))
            agents = [
                stack.enter_context(harness.command(*arguments, run=run, environ=other))
                for other in others
            ]
            running.wait_for_step(2)
            wanted = len(_view(running)["members"])
            for kind in kills_outside:
                _watch(running, outcome, rng.uniform(0.0, 1.5))
                while running.process.poll() is None and len(_view(running)["members"]) < wanted:
                    _watch(running, outcome, 0.1)
                if running.process.poll() is not None:
                    break
                if kind == "coordinator":
                    _kill_coordinator(running, outcome)
                    known = len(running.events())
                    again = harness.command("resume", str(run), *chaos, run=run, environ=environ)
                    running = stack.enter_context(again)
                    running.wait_for(partial(_makes_steps, known))
                else:
                    _kill_members(running, outcome, rng, kind)
            _watch(running, outcome, DONE_WITHIN_S)
            outcome.done = running.wait(timeout_s=DONE_WITHIN_S)
            for agent in agents:
                assert agent.wait(timeout_s=RECOVERED_WITHIN_S).code == 0
            _note(running, outcome)
        if not harness.gone(list(outcome.pids)):
            outcome.left_over.append("processes")
        for each in (environ, *others):
            outcome.left_over += os.listdir(each["TMPDIR"])
    outcome.left_over += _shared_memory_of(outcome.pids)
    _count_injected(outcome)
    return outcome


def _environments(scratch: Path, *, hosts: int) -> list[dict[str, str]]:
    """Return the variables of a process for each host: the first is the coordinator's."""
    if hosts == 1:
        return [{"TMPDIR": str(scratch)}]
    place = {
        "WORLD_SIZE": str(hosts),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserve_port()),
        "MANYHANDS_KEY": secrets.token_hex(16),
    }
    found = []
    for rank in range(hosts):
        (folder := scratch / f"host-{rank}").mkdir()
        found.append({**place, "RANK": str(rank), "TMPDIR": str(folder)})
    return found


def _chaos(kills: int, role: str, epochs: int, seed: int) -> str:
    if not kills:
        return f"{PAUSE}; seed {seed}"
    last = int(LAST_KILL * STEPS_PER_EPOCH * epochs)
    steps = [last * (number + 1) // (kills + 1) for number in range(kills)]
    return "; ".join([*(f"kill {role} after step {step}" for step in steps), PAUSE, f"seed {seed}"])


def _count_injected(outcome: ChaosRun) -> None:
    events = outcome.done.events
    for event in events:
        if event["event"] == "Injected" and event["fault"] == "kill":
            outcome.killed.append(event["member"])
            step = _recovered(events, [event["member"]], event["time"])
            if step is not None:
                outcome.pauses_s.append(step["time"] - event["time"])
        elif event["event"] == "Injected":
            outcome.num_paused += 1


def audit(
    outcome: ChaosRun, *, epochs: int, alone: Sequence[float] = (), samples: int = 98
) -> None:
    """Assert that the run finished, that every sample and every push counts once, that nothing is left over,
    and that the losses are those of one worker `alone` (for asynchronous strategies: near them)."""
    done, logs = outcome.done, harness.logs_of(outcome.run)
    assert done.code == 0, f"{done.out}\n{done.err}\n{logs}"
    assert_once_an_epoch(done, epochs=epochs, samples=samples)
    lost = [e["member"] for e in done.of("MemberLost")]
    assert set(lost) <= set(outcome.killed), f"killed {outcome.killed}, reported as lost {lost}"
    assert not done.of("MemberFailed"), done.of("MemberFailed")
    summary = json.loads((outcome.run / "summary.json").read_text())
    pushes = summary["pushes"]
    if pushes is not None and not done.of("Resumed"):  # else both count from there
        assert pushes["applied"] == pushes["committed"] > 0, f"{pushes}\n{logs}"
    spare = SPARE_OF_FIRST if "--on" in outcome.case.flags else SPARE_HANDLES
    for pid, readings in outcome.handles.items():
        # The numbers rise while members join and fall while some are missing. It is a leak if all later
        # readings are above all earlier ones.
        half = len(readings) // 2
        if half < LEAST_READINGS:
            continue
        for each in range(2):  # files, threads
            most = max(reading[each] for reading in readings[:half]) + spare
            least = min(reading[each] for reading in readings[half:])
            assert least <= most, f"process {pid} leaks: files, threads {readings}"
    assert not outcome.left_over, f"left over: {outcome.left_over}"
    if alone and outcome.case.traits.equals_single:
        far = [abs(ours / theirs - 1) for ours, theirs in zip(done.losses, alone, strict=True)]
        assert max(far) < LIKE_ALONE, f"step {far.index(max(far)) + 1} differs by {max(far):.2g}"
    elif alone:
        late = len(alone) // 4
        ours, theirs = (sum(losses[-late:]) / late for losses in (done.losses, alone))
        assert abs(ours / theirs - 1) < NEAR_ALONE, f"the loss ends at {ours:.3g}, not {theirs:.3g}"


def audit_counts(outcome: ChaosRun, *, epochs: int) -> None:
    """Assert that the weights of the counting job count every sample once per epoch."""
    audit(outcome, epochs=epochs, samples=Counting.samples)
    if (every := outcome.case.traits.round_steps) is None:
        check_counts(outcome.done.state(), epochs=epochs, rows=outcome.case.counts_rows)
    else:
        check_round_counts(outcome.done.state(), outcome.done.events, round_steps=every)


def _kill_coordinator(running: harness.RunningCommand, outcome: ChaosRun) -> None:
    """Kill the coordinator; its members end by themselves."""
    _note(running, outcome)
    running.process.kill()
    running.process.wait()
    assert harness.gone(list(outcome.pids)), "members have outlived their coordinator"


def _watch(running: harness.RunningCommand, outcome: ChaosRun, seconds: float) -> None:
    """Wait, at most until the end of the run, and note the open files and threads of its processes."""
    deadline = time.monotonic() + seconds
    while running.process.poll() is None and time.monotonic() < deadline:
        _note(running, outcome)
        time.sleep(min(0.5, seconds))


def _note(running: harness.RunningCommand, outcome: ChaosRun) -> None:
    pids = running.pids()
    outcome.pids |= {*pids.values(), running.process.pid}
    # Only members of the view: the numbers grow while a member starts.
    for pid in (running.process.pid, *(pids[name] for name in _view(running)["members"])):
        with suppress(OSError):
            reading = _handles_of(pid)
            outcome.handles.setdefault(pid, []).append(reading)


def _kill_members(
    running: harness.RunningCommand, outcome: ChaosRun, rng: random.Random, kind: str
) -> None:
    """Kill one member, two, or all, and wait until the run has recovered or is over."""
    members, pids = list(_view(running)["members"]), running.pids()
    victims = members
    if kind != "all":
        victims = _pair(members, rng)[: 1 + (kind == "two")]
    killed = time.time()
    for victim in victims:
        if kind == "two" and victim != victims[0]:
            time.sleep(rng.choice([rng.uniform(0.0, APART_S / 5), rng.uniform(0.0, APART_S)]))
        with suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
    outcome.killed += victims
    deadline = time.monotonic() + RECOVERED_WITHIN_S
    while not (step := _recovered(running.events(), victims, killed)):
        if running.process.poll() is not None:
            return
        if time.monotonic() > deadline:
            running.process.kill()
            raise AssertionError(
                f"no step for {RECOVERED_WITHIN_S:.0f} s after {', '.join(victims)} died:\n{running.logs()}"
            )
        time.sleep(0.05)
    if kind == "one":
        outcome.pauses_s.append(step["time"] - killed)


def _pair(members: Sequence[str], rng: random.Random) -> list[str]:
    """Choose two members; often the second is the first survivor, which decides in the next view."""
    first = rng.choice(members)
    others = [name for name in members if name != first]
    return [first, others[0] if rng.random() < 0.5 else rng.choice(others)]


def _recovered(
    events: Sequence[Mapping[str, Any]], victims: Sequence[str], killed: float
) -> Mapping[str, Any] | None:
    """Return the first step in a view without the victims."""
    for number, event in enumerate(events):
        if event["event"] != "ViewChanged" or event["time"] < killed:
            continue
        if not set(victims) & set(event["members"]):
            return next((e for e in events[number:] if e["event"] == "StepCommitted"), None)
    return None


def _makes_steps(known: int, events: Sequence[Mapping[str, Any]]) -> bool:
    """Return true if there is a step after the first `known` events."""
    return any(e["event"] == "StepCommitted" for e in events[known:])


def _view(running: harness.RunningCommand) -> Mapping[str, Any]:
    """Return the last view."""
    return [e for e in running.events() if e["event"] == "ViewChanged"][-1]


def _handles_of(pid: int) -> tuple[int, int]:
    """Return the numbers of open files and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def _shared_memory_of(pids: set[int]) -> list[str]:
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return [f"/dev/shm/{name}" for name in names if {*name.split("_")} & {str(pid) for pid in pids}]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="single kills per run (default: 5)")
    parser.add_argument("--doubles", type=int, default=2, help="double kills per run (default: 2)")
    parser.add_argument("--epochs", type=int, default=120, help="epochs per run (default: 120)")
    parser.add_argument(
        "--seeds", type=int, default=1, help="number of runs of each kind (default: 1)"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only strategies with this prefix")
    parser.add_argument("--no-losses", action="store_true", help="don't compare losses")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pauses: dict[str, list[float]] = {}
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    kinds = [kind for kind in KINDS if kind[0].startswith(arguments.only)]
    num_bad = num_killed = 0
    began = time.monotonic()
    alone = [] if arguments.no_losses else _losses_alone()
    for seed, (mode, transport, placement) in itertools.product(seeds, kinds):
        case = case_of(mode, transport, placement)
        kind = f"{mode} {transport} {placement}".strip()
        with tempfile.TemporaryDirectory(prefix="chaos-run-") as folder:
            try:
                outcome = train_with_kills(
                    *(counting_case(case), Path(folder) / "counts"),
                    job=COUNTING,
                    seed=seed,
                    kills=arguments.kills,
                    doubles=arguments.doubles,
                    epochs=arguments.epochs,
                    everybody=True,
                    coordinator=placement != TWO_HOSTS,
                )
                audit_counts(outcome, epochs=arguments.epochs)
                told = [_describe(outcome)]
                if alone:
                    second = train_with_kills(
                        case, Path(folder) / "losses", seed=seed, kills=2, epochs=20
                    )
                    audit(second, epochs=20, alone=alone)
                    told.append(_describe(second))
                    num_killed += len(second.killed)
            except AssertionError as error:
                num_bad += 1
                print(f"{kind}, seed {seed}: FAILED\n{error}", flush=True)
                continue
        num_killed += len(outcome.killed)
        pauses.setdefault(kind, []).extend(outcome.pauses_s)
        print(f"{kind}, seed {seed}: {'; then '.join(told)}", flush=True)
    print_pauses(pauses)
    print(f"\n{num_killed} members killed, {num_bad} runs wrong, {time.monotonic() - began:.0f} s")
    return 1 if num_bad else 0


def _losses_alone() -> list[float]:
    """Return the losses of an undisturbed run of one worker."""
    with tempfile.TemporaryDirectory(prefix="chaos-run-") as folder:
        fields = {**case_of("allreduce", "", "").fields, "pause_s": 0}
        done = harness.train("Regression", Path(folder) / "run", epochs=20, **fields)
        assert done.code == 0, done.err
        return done.losses


def _describe(outcome: ChaosRun) -> str:
    pauses = ", ".join(f"{pause:.2f}" for pause in outcome.pauses_s)
    restarts = len(outcome.done.of("Resumed"))
    return (
        f"killed {', '.join(outcome.killed)}; next step after {pauses} s; {outcome.num_paused} paused, "
        f"{restarts} restarts from a checkpoint"
    )


def print_pauses(pauses: Mapping[str, Sequence[float]]) -> None:
    rows = {**pauses, "all": [pause for each in pauses.values() for pause in each]}
    print(f"\n{'from the kill to the next committed step':42} kills  median     95 %      max")
    for name, values in rows.items():
        if values:
            ordered = sorted(values)
            most = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
            print(
                f"{name:42} {len(ordered):5} {median(ordered):6.2f} s {most:6.2f} s {ordered[-1]:6.2f} s"
            )


if __name__ == "__main__":
    sys.exit(main())
