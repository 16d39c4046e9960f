"""Deaths on purpose: SIGKILL of random members of real runs at random moments, and an audit of the outcome.

    python -m manyhands.testing.chaos --kills 4 --seeds 1
    python -m manyhands.testing.chaos --only allreduce --kills 100 --epochs 1500     a hundred in a row

An ordeal is one run with several kills, now and then a member that stands still for a moment (SIGSTOP,
SIGCONT), and in the middle, if asked, a death of all members at once, after which all begin again from the
last checkpoint, and one of the coordinator, after which the run is resumed. A single member
may die whenever the others hold all that it held: not before the last death is recovered from, for a block
is in two places and no more. It may well die while another one takes somebody's place. Everything is seeded
but the clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from manyhands.testing import harness
from manyhands.testing.conformance import EQUAL, Case, assert_once_an_epoch

MODES = ("ps:sync", "ps:async", "ps:ssp", "ps:backup")
TRANSPORTS = ("shm", "tcp")
PLACEMENTS = ("colocated", "dedicated")
KINDS = [("allreduce", "", ""), *itertools.product(MODES, TRANSPORTS, PLACEMENTS)]
SPARE_HANDLES = 6
"""So many more files or threads than at first may be open at a moment: a connection that is being made."""
RECOVERED_WITHIN_S, DONE_WITHIN_S = 60.0, 600.0
"""Limits for hangs, no promises."""
PAUSES = 0.3
"""How often a kill has a pause before it."""
EVERY = ("--checkpoint-every", "20")
"""Something to resume from."""
LIKE_ALONE, NEAR_ALONE = 1e-4, 0.25
"""How far a loss may be from that of one worker alone; where workers don't wait, the mean of the last."""


def case_of(mode: str, transport: str, placement: str) -> Case:
    dedicated = placement == "dedicated"
    spec = mode
    if transport:
        spec += f"(transport={transport}{',placement=dedicated' if dedicated else ''})"
    return Case(
        spec,
        workers=2 if dedicated else 3,
        equals_single=mode in ("allreduce", "ps:sync"),
        flags=("--max-restarts", "1000", EQUAL),
        # Steps of unequal workers must stay small: what is computed on old weights may not blow up.
        fields={"width": 20_000, "lr": 1e-4, "pause_s": 0.03},
    )


@dataclass
class Ordeal:
    """A run in which members were killed."""

    case: Case
    run: Path
    victims: list[str] = field(default_factory=list)
    num_paused: int = 0
    """Members that stood still for a moment."""
    num_resumed: int = 0
    """Deaths of the coordinator."""
    num_again: int = 0
    """Deaths of all members at once."""
    num_before: int = 0
    """Victims before the last of these: a resumed run begins with the same names."""
    pauses_s: list[float] = field(default_factory=list)
    """From each kill to the next committed step."""
    pids: set[int] = field(default_factory=set)
    handles: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Of each process, before each kill: open files, and threads."""
    done: harness.Finished | None = None
    left_over: list[str] = field(default_factory=list)


def suffer(
    case: Case,
    run: Path,
    *,
    seed: int,
    kills: int,
    epochs: int,
    role: str = "",
    job: str = "Regression",
    everybody: bool = False,
    coordinator: bool = False,
) -> Ordeal:
    """Train with so many kills, of members of that role or of any, and of all of them at once and of the
    coordinator if asked."""
    rng = random.Random(f"{seed} {case.strategy}")
    ordeal = Ordeal(case, run)
    with temporary_folder() as scratch:
        arguments = case.arguments(job, run, *EVERY, epochs=epochs)
        environ = {"TMPDIR": str(scratch)}
        with ExitStack() as stack:
            running = stack.enter_context(harness.command(*arguments, run=run, environ=environ))
            running.wait_for_step(2)
            for number in range(kills):
                time.sleep(rng.uniform(0.0, 1.5))
                if rng.random() < PAUSES:
                    _pause(running, ordeal, rng)
                if not _kill(running, ordeal, rng, role):
                    break
                if everybody and number == kills // 4 and not _kill_everybody(running, ordeal):
                    break
                if coordinator and number == kills // 2:
                    _kill_coordinator(running, ordeal)
                    again = harness.command("resume", str(run), run=run, environ=environ)
                    running = stack.enter_context(again)
                    running.wait_for(
                        lambda events: _goes_on(events, ordeal.num_resumed + ordeal.num_again)
                    )
            ordeal.done = running.wait(timeout_s=DONE_WITHIN_S)
            ordeal.pids |= {*running.pids().values(), running.process.pid}
        if not harness.gone(list(ordeal.pids)):
            ordeal.left_over.append("processes")
        ordeal.left_over += [str(path) for path in scratch.glob("manyhands-*")]
    ordeal.left_over += _shared_memory_of(ordeal.pids)
    return ordeal


def audit(ordeal: Ordeal, *, epochs: int, alone: Sequence[float] = ()) -> None:
    """It finished by itself, every sample counts once, and so does every push; nothing is left over; and
    the losses are those of one worker `alone`, or near them where the strategy is not synchronous."""
    done, logs = ordeal.done, _logs(ordeal.run)
    assert done is not None
    assert done.code == 0, f"{done.out}\n{done.err}\n{logs}"
    assert_once_an_epoch(done, epochs=epochs)
    lost = [e["member"] for e in done.of("MemberLost")]
    assert lost == ordeal.victims, f"{ordeal.victims} were killed, {lost} are said to be lost"
    summary = json.loads((ordeal.run / "summary.json").read_text())
    pushes = summary["pushes"]
    if not ordeal.num_resumed:  # else both count from there
        assert summary["lost"] == len(ordeal.victims)
    if pushes is not None and not ordeal.num_resumed and not ordeal.num_again:
        assert pushes["applied"] == pushes["committed"] > 0, f"{pushes}\n{logs}"
    for pid, readings in ordeal.handles.items():
        for first, last in zip(readings[0], readings[-1], strict=True):
            assert last <= first + SPARE_HANDLES, f"process {pid} leaks: files, threads {readings}"
    assert not ordeal.left_over, f"left over: {ordeal.left_over}"
    if alone and ordeal.case.equals_single:
        far = [abs(ours / theirs - 1) for ours, theirs in zip(done.losses, alone, strict=True)]
        assert max(far) < LIKE_ALONE, f"step {far.index(max(far)) + 1} differs by {max(far):.2g}"
    elif alone:
        late = len(alone) // 4
        ours, theirs = (sum(losses[-late:]) / late for losses in (done.losses, alone))
        assert abs(ours / theirs - 1) < NEAR_ALONE, f"the loss ends at {ours:.3g}, not {theirs:.3g}"


def _pause(running: harness.Command, ordeal: Ordeal, rng: random.Random) -> None:
    """Somebody stands still for a moment: too short to be taken for dead."""
    member = rng.choice(list(_view(running)["members"]))
    with suppress(ProcessLookupError):
        running.kill(member, signal.SIGSTOP)
        time.sleep(rng.uniform(0.1, 1.0))
        running.kill(member, signal.SIGCONT)
        ordeal.num_paused += 1


def _kill_coordinator(running: harness.Command, ordeal: Ordeal) -> None:
    """And with it all members, by themselves."""
    ordeal.pids |= {*running.pids().values(), running.process.pid}
    running.process.kill()
    running.process.wait()
    assert harness.gone(list(ordeal.pids)), "members have outlived their coordinator"
    ordeal.num_resumed += 1
    ordeal.num_before = len(ordeal.victims)


def _kill_everybody(running: harness.Command, ordeal: Ordeal) -> bool:
    """All members at once; False if the run was over before."""
    killed, pids = time.time(), running.pids()
    ordeal.pids |= set(pids.values())
    for name in _view(running)["members"]:
        with suppress(ProcessLookupError):
            running.kill(name)
    ordeal.num_again += 1
    times = ordeal.num_resumed + ordeal.num_again
    deadline = time.monotonic() + RECOVERED_WITHIN_S
    while not _goes_on(running.events(), times) and running.process.poll() is None:
        assert time.monotonic() < deadline, f"nobody has begun again:\n{running.logs()}"
        time.sleep(0.05)
    lost = [e for e in running.events() if e["event"] == "MemberLost" and e["time"] >= killed]
    ordeal.victims += [event["member"] for event in lost]
    return running.process.poll() is None


def _kill(running: harness.Command, ordeal: Ordeal, rng: random.Random, role: str) -> bool:
    """One kill and the recovery from it; False if the run was over before."""
    victim = _choose(running, ordeal, rng, role)
    if victim is None or running.process.poll() is not None:
        return False
    pids = running.pids()
    for pid in (running.process.pid, *(pids[name] for name in _view(running)["members"])):
        with suppress(OSError):
            ordeal.handles.setdefault(pid, []).append(_handles_of(pid))
    killed = time.time()
    try:
        running.kill(victim)
    except ProcessLookupError:
        return False
    deadline = time.monotonic() + RECOVERED_WITHIN_S
    while time.monotonic() < deadline and running.process.poll() is None:
        events = running.events()
        lost = _first(events, "MemberLost", after=killed, member=victim)
        recovered = _first(events, "Recovered", after=lost["time"]) if lost else None
        step = _first(events, "StepCommitted", after=recovered["time"]) if recovered else None
        if step is not None:
            ordeal.victims.append(victim)
            ordeal.pauses_s.append(step["time"] - killed)
            return True
        time.sleep(0.05)
    if running.process.poll() is None:
        running.process.kill()
        raise AssertionError(
            f"no step for {RECOVERED_WITHIN_S:.0f} s after the death of {victim}:\n{running.logs()}"
        )
    if _first(running.events(), "MemberLost", after=killed, member=victim):
        ordeal.victims.append(victim)  # and nothing was left to be done after it
    return False


def _choose(running: harness.Command, ordeal: Ordeal, rng: random.Random, role: str) -> str | None:
    """A member that the others can do without; waits until there is one."""
    while running.process.poll() is None:
        view = _view(running)
        members, num_servers = list(view["members"]), int(view["servers"])
        workers, servers = (
            members[: len(members) - num_servers],
            members[len(members) - num_servers :],
        )
        if not ordeal.case.strategy.startswith("ps"):
            workers = _with_weights(running.events(), workers)
        spare = [group for group in (workers, servers) if len(group) > 1]
        candidates = [
            name
            for group in spare
            for name in group
            if name.startswith(role)
            if name not in ordeal.victims[ordeal.num_before :]
        ]
        if candidates:
            ordeal.pids |= set(running.pids().values())
            return rng.choice(candidates)
        time.sleep(0.05)
    return None


def _with_weights(events: Sequence[Mapping[str, Any]], workers: Sequence[str]) -> list[str]:
    """Those who have got samples in the last view: one that has just come has not got the weights yet, and
    what nobody but it and a victim could know would be lost."""
    began = max(n for n, e in enumerate(events) if e["event"] == "ViewChanged")
    steps = [e["shares"] for e in events[began:] if e["event"] == "StepCommitted"]
    return [name for name in workers if any(shares.get(name) for shares in steps)]


def _goes_on(events: Sequence[Mapping[str, Any]], times: int) -> bool:
    """It was resumed so many times, and has made a step since."""
    resumed = [n for n, e in enumerate(events) if e["event"] == "Resumed"]
    return len(resumed) == times and any(
        e["event"] == "StepCommitted" for e in events[resumed[-1] :]
    )


def _view(running: harness.Command) -> Mapping[str, Any]:
    """The last one."""
    return [e for e in running.events() if e["event"] == "ViewChanged"][-1]


def _first(
    events: Sequence[Mapping[str, Any]], kind: str, *, after: float, **fields: Any
) -> Mapping[str, Any] | None:
    return next(
        (
            e
            for e in events
            if e["event"] == kind and e["time"] >= after and fields.items() <= e.items()
        ),
        None,
    )


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """For sockets, whose paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _handles_of(pid: int) -> tuple[int, int]:
    """Open files and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def _shared_memory_of(pids: set[int]) -> list[str]:
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return [f"/dev/shm/{name}" for name in names if {*name.split("_")} & {str(pid) for pid in pids}]


def _logs(run: Path) -> str:
    return "\n".join(f"{p.name}: {p.read_text()[-4000:]}" for p in sorted((run / "logs").glob("*")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=4, help="in each run (default: 4)")
    parser.add_argument("--epochs", type=int, default=40, help="of each run (default: 40)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind (default: 1)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", default="", help="strategies that begin so")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pauses: dict[str, list[float]] = {}
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    kinds = [kind for kind in KINDS if kind[0].startswith(asked.only)]
    num_bad = 0
    with tempfile.TemporaryDirectory(prefix="chaos-run-") as folder:
        fields = {**case_of("allreduce", "", "").fields, "pause_s": 0}
        run = Path(folder) / "run"
        arguments = harness.train_arguments("Regression", run, epochs=asked.epochs, **fields)
        with harness.command(*arguments, run=run) as undisturbed:
            alone = undisturbed.wait(timeout_s=DONE_WITHIN_S).losses
    for seed, (mode, transport, placement) in itertools.product(seeds, kinds):
        case = case_of(mode, transport, placement)
        with tempfile.TemporaryDirectory(prefix="chaos-run-") as folder:
            try:
                ordeal = suffer(
                    *(case, Path(folder) / "run"),
                    seed=seed,
                    kills=asked.kills,
                    epochs=asked.epochs,
                    everybody=True,
                    coordinator=True,
                )
                audit(ordeal, epochs=asked.epochs, alone=alone)
            except AssertionError as error:
                num_bad += 1
                print(f"{case.strategy}, seed {seed}: FAILED\n{error}", flush=True)
                continue
        kind = f"{mode} {transport} {placement}".strip()
        pauses.setdefault(kind, []).extend(ordeal.pauses_s)
        told = f"killed {', '.join(ordeal.victims)}; next step after "
        told += ", ".join(f"{pause:.2f}" for pause in ordeal.pauses_s)
        told += f" s; {ordeal.num_paused} stood still, all died {ordeal.num_again} times, "
        print(f"{case.strategy}, seed {seed}: {told}{ordeal.num_resumed} resumed", flush=True)
    print_pauses(pauses)
    return 1 if num_bad else 0


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
