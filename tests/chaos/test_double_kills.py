"""Two deaths within 0.3 s: the second hits while the others still find each other after the first.

A view that is being joined fails with it, and whoever was about to attach memory of the second victim must
take that for a change of view. For more:

    python tests/chaos/test_double_kills.py RUNS shm,tables FIRST_SEED
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from manyhands.testing import harness
from manyhands.testing.chaos import temporary_folder
from manyhands.testing.conformance import Case, assert_once_an_epoch

EPOCHS = 14
CASES = {
    "shm": Case("ps:sync", workers=4),
    "dedicated": Case("ps:sync(placement=dedicated,servers=3)", workers=2),
    "tcp": Case("ps:sync(transport=tcp)", workers=4, flags=("--trust-network",)),
    "allreduce": Case("allreduce", workers=4),
    "tables": Case("ps:sync", workers=4),
    "tables-shared": Case("allreduce(tables=shared)", workers=3),
}
FLAGS = ("--max-restarts", "1000", "--checkpoint-every", "20")
RECOVERED_WITHIN_S = 60.0


@dataclass
class Pairs:
    """What was killed, and what came of it."""

    victims: list[tuple[str, str, int]] = field(default_factory=list)
    """Who, who next, and how many ms later."""
    num_again: int = 0
    """Both who held a part of the weights were among them: all began again from a checkpoint."""


def suffer_pairs(
    kind: str, run: Path, *, seed: int, pairs: int, epochs: int = EPOCHS
) -> tuple[Pairs, harness.Finished]:
    case, rng, suffered = CASES[kind], random.Random(f"{seed} {kind}"), Pairs()
    job = "Sparse" if kind.startswith("tables") else "Regression"
    fields = {"width": 20_000, "lr": 1e-4, "pause_s": 0.02, "epochs": epochs}
    arguments = case.arguments(job, run, *FLAGS, **fields)
    with temporary_folder() as scratch:
        environ = {"TMPDIR": str(scratch)}
        with harness.command(*arguments, run=run, environ=environ) as running:
            running.wait_for_step(2)
            for _ in range(pairs):
                if not _kill_two(running, suffered, rng, wanted=len(_view(running)["members"])):
                    break
            done = running.wait(timeout_s=300.0)
    suffered.num_again = len(done.of("Resumed"))
    return suffered, done


def _kill_two(
    running: harness.RunningCommand, suffered: Pairs, rng: random.Random, *, wanted: int
) -> bool:
    """Kill two and wait until all are here again; False if the run was over before."""
    time.sleep(rng.uniform(0.0, 0.3))
    members = list(_view(running)["members"])
    first = rng.choice(members)
    left = [name for name in members if name != first]
    # Mostly the one that will lead, and tell the others where everything is.
    second = left[0] if rng.random() < 0.7 else rng.choice(left)
    pause_s = rng.choice([rng.uniform(0.0, 0.06), rng.uniform(0.0, 0.3)])
    killed = time.time()
    with suppress(ProcessLookupError):
        running.kill(first)
        time.sleep(pause_s)
        running.kill(second)
    suffered.victims.append((first, second, round(pause_s * 1000)))
    deadline = time.monotonic() + RECOVERED_WITHIN_S
    while running.process.poll() is None:
        assert time.monotonic() < deadline, f"{suffered.victims[-1]}: no step\n{running.logs()}"
        events = [e for e in running.events() if e["time"] > killed]
        views = [e for e in events if e["event"] == "ViewChanged"]
        whole = views and len(views[-1]["members"]) == wanted
        gone = whole and not {first, second} & set(views[-1]["members"])
        if gone and any(
            e["event"] == "StepCommitted" and e["time"] > views[-1]["time"] for e in events
        ):
            return True
        time.sleep(0.05)
    return False


def _view(running: harness.RunningCommand) -> Mapping[str, Any]:
    return [e for e in running.events() if e["event"] == "ViewChanged"][-1]


def audit_pairs(
    suffered: Pairs, done: harness.Finished, alone: Sequence[float], *, epochs: int
) -> None:
    logs = "\n".join(p.read_text()[-3000:] for p in sorted((done.run / "logs").glob("*")))
    assert done.code == 0, f"{suffered}\n{done.out}\n{done.err}\n{logs}"
    assert_once_an_epoch(done, epochs=epochs)
    assert suffered.victims
    killed = {name for first, second, _ in suffered.victims for name in (first, second)}
    lost = {event["member"]: event["reason"] for event in done.of("MemberLost")}
    assert lost.keys() <= killed, f"{suffered}: lost besides: {lost}\n{logs}"
    if alone:
        far = [abs(ours / theirs - 1) for ours, theirs in zip(done.losses, alone, strict=True)]
        assert max(far) < 1e-4, f"{suffered}: step {far.index(max(far)) + 1} is off {max(far):.2g}"


def alone_for(kind: str, folder: Path, epochs: int) -> list[float]:
    if kind == "tables-shared":
        return []  # each worker changes rows as soon as it can
    job = "Sparse" if kind == "tables" else "Regression"
    run = folder / f"alone-{job}"
    fields = {"width": 20_000, "lr": 1e-4, "epochs": epochs}
    return harness.train(job, run, **fields).losses


@pytest.mark.long
@pytest.mark.parametrize("kind", CASES)
def test_two_deaths_at_almost_the_same_time_end_no_run(kind: str, tmp_path: Path) -> None:
    suffered, done = suffer_pairs(kind, tmp_path / "run", seed=1, pairs=3)
    audit_pairs(suffered, done, alone_for(kind, tmp_path, EPOCHS), epochs=EPOCHS)


def main(runs: int, kinds: Sequence[str], first: int) -> int:
    num_bad = num_pairs = num_again = 0
    epochs, pairs = 40, 10
    with tempfile.TemporaryDirectory(prefix="pairs-") as folder:
        alone = {kind: alone_for(kind, Path(folder) / kind, epochs) for kind in kinds}
        for seed in range(first, first + runs):
            for kind in kinds:
                run = Path(folder) / f"{kind}-{seed}"
                try:
                    suffered, done = suffer_pairs(kind, run, seed=seed, pairs=pairs, epochs=epochs)
                    num_pairs += len(suffered.victims)
                    num_again += suffered.num_again
                    audit_pairs(suffered, done, alone[kind], epochs=epochs)
                    told = f"{len(suffered.victims)} pairs, {suffered.num_again} began again"
                except AssertionError as error:
                    num_bad += 1
                    told = f"FAILED\n{str(error)[:6000]}"
                print(f"{kind} {seed}: {told}", flush=True)
    print(f"{num_pairs} pairs, {num_again} times all began again, {num_bad} bad runs")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])))
