"""Compare what strategies say that they cost with real runs.

    python -m manyhands.testing.cost_trial                 all cases, as a table; several minutes
    python -m manyhands.testing.cost_trial --only allreduce

Traffic: the workers of a run stop at two gates (gates.py), some steps apart. Each time, the kernel's count of
the bytes that the members have sent over TCP is noted, once it stands still. The difference, divided by the
number of steps between, is compared with `Strategy.traffic()`. It contains everything: headers, TLS, messages
without payload.

Memory: the workers stop in the backward of a late step, when gradients, optimizer and all buffers are there.
The memory of all members, what they share counted once (PSS), is compared with that of the same run with a
quarter of the model, so that Python, torch, its threads and their scratch memory do not count. The
difference is compared with the difference of what `Strategy.memory()` says about both models. Activations of
these models are negligible. Temporaries, which malloc may keep for later, are not measured (RETURNS).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.compute.model_size import model_size
from manyhands.compute.train_state import TrainState
from manyhands.costs import CHECKPOINTS, CostFacts, ModelSize, known_bytes
from manyhands.embeddings.local_tables import LocalTables
from manyhands.hosts.view import SERVER, Seat, View
from manyhands.strategies.registry import make_strategy
from manyhands.testing import harness, jobs
from manyhands.testing.conformance import EQUAL
from manyhands.testing.gates import Gates

FIRST, LAST = 5, 35
"""Numbers of the micro-batches at which the workers stop."""
BATCH = 16
WIDE, NARROWER = 6000, 3000
"""Widths of the network: its square layer has 144 or 36 MB."""
RETURNS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}
"""Makes malloc give freed memory back to the kernel at once, so that only what is in use is measured."""
NARROW = 700
"""For traffic: 2 MB."""


@dataclass(frozen=True)
class CostCase:
    """A strategy whose costs are measured, with the run to measure them in."""

    strategy: str
    workers: int
    flags: tuple[str, ...] = ()
    job: str = "Gated"
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        fields = [f"{name}={value}" for name, value in self.fields.items()]
        more = [*self.flags, *([self.job] if self.job != "Gated" else []), *fields]
        return " ".join([self.strategy, f"x{self.workers}", *more])

    @property
    def servers(self) -> int:
        """Number of dedicated servers."""
        return make_strategy(self.strategy).servers_for(self.workers)

    @property
    def view(self) -> View:
        """Members like those of the run."""
        seats = [Seat(f"worker-{n}", "host") for n in range(self.workers)]
        seats += [Seat(f"server-{n}", "host", role=SERVER) for n in range(self.servers)]
        return View(1, tuple(seats))

    def facts(self, width: int, *, late_parts: float = 0.0) -> CostFacts:
        """Return what the costs are computed from, for a network of this width."""
        return CostFacts(
            self.model_size(width),
            workers=self.workers,
            servers=self.servers,
            batch_size=BATCH,
            encrypted="--trust-network" not in self.flags,
            late_parts=late_parts,
        )

    def model_size(self, width: int) -> ModelSize:
        """Return the facts about the model, as a worker finds them."""
        kind: type[jobs.Gated] = getattr(jobs, self.job)
        job = kind(width=width, depth=1, **self.fields)
        model = job.model()
        optimizer = job.optimizer(model.parameters(), model)
        tables = LocalTables.of(model, seed=0)
        state = TrainState(
            model=model, optimizer=optimizer, loss=_no_loss, device="cpu", tables=tables
        )
        rows = dict.fromkeys(tables.specs, float(getattr(job, "lookups", 0)))
        return model_size(state, rows)


@dataclass(frozen=True)
class CostResult:
    """Bytes as the strategy computes them, and as they were measured."""

    forecast: float
    measured: float

    @property
    def ratio(self) -> float:
        """The forecast, relative to what was measured."""
        return self.forecast / self.measured


TRUSTED = ("--trust-network",)
DEDICATED = "placement=dedicated,transport=tcp"
TRAFFIC = (
    CostCase("allreduce(transport=tcp)", 2),
    CostCase("allreduce(transport=tcp)", 4),
    CostCase("allreduce+int8", 2),
    CostCase("allreduce+int8", 4),
    CostCase("local(every=10,transport=tcp)", 3),
    CostCase("ps:sync(transport=tcp)", 2),
    CostCase("ps:sync(transport=tcp)", 4, TRUSTED),
    CostCase("ps:sync(transport=tcp,replicas=0)", 3),
    CostCase(f"ps:sync({DEDICATED})", 2),
    CostCase("ps:async(transport=tcp)", 3),
    CostCase(f"ps:async({DEDICATED})", 2, TRUSTED),
    CostCase("ps:ssp(transport=tcp)", 3),
    CostCase("ps:backup(transport=tcp)", 3),
    CostCase("allreduce(transport=tcp)", 3, job="GatedRows"),
    CostCase("ps:sync(transport=tcp)", 3, job="GatedRows"),
    CostCase("ps:async(transport=tcp,replicas=0)", 2, job="GatedRows"),
    CostCase(f"ps:sync({DEDICATED})", 2, job="GatedRows"),
)
THROUGH_MEMORY = (
    CostCase("allreduce", 2),
    CostCase("local(every=10)", 3),
    CostCase("ps:sync", 2),
)
"""Those that send nothing inside a host, which is to be seen, too."""
MEMORY = (
    CostCase("single", 1),
    CostCase("single", 1, fields={"optim": "adam"}),
    CostCase("allreduce", 2),
    CostCase("allreduce(transport=tcp)", 2),
    CostCase("allreduce+int8", 2),
    CostCase("local(every=2)", 2),
    CostCase("local(every=2,moments=average)", 2, fields={"optim": "adam"}),
    CostCase("ps:sync", 2),
    CostCase("ps:sync(transport=tcp)", 2),
    CostCase("ps:sync(transport=tcp,replicas=0)", 3),
    CostCase("ps:sync(placement=dedicated)", 2),
    CostCase(f"ps:sync({DEDICATED})", 2),
    CostCase("ps:async", 2),
    CostCase("ps:async(transport=tcp)", 2),
    CostCase("ps:async(transport=tcp,compensate=0.04)", 2),
    CostCase(f"ps:async({DEDICATED})", 2),
    CostCase("ps:ssp", 2),
    CostCase("ps:ssp(transport=tcp)", 2),
    CostCase("ps:backup", 2),
    CostCase("ps:backup(transport=tcp)", 2),
)


def traffic(case: CostCase, folder: Path) -> CostResult:
    """Bytes of one step, sent by all members."""
    config = make_strategy(case.strategy)
    lockstep = config.traits.lockstep
    parts = case.workers if lockstep else config.parts(case.workers)
    sent, computed = [], []
    with _at_gates(case, folder, NARROW, gates=f"{FIRST},{LAST}") as (there, running):
        for gate in (FIRST, LAST):
            there.wait(gate, least=None if lockstep else 1)
            sent.append(there.bytes_sent())
            computed.append(there.computed() - there.num_at(gate))
            there.open(gate)
        num_steps = len(running.wait(code=0).steps)
    # Without lockstep a step is some parts of a batch, taken by any worker. One that came too late to be used
    # is computed again.
    late = there.computed() / num_steps - parts
    steps = (computed[1] - computed[0]) / (parts + late)
    transfers = config.traffic(case.facts(NARROW, late_parts=late), case.view)
    assert transfers is not None
    forecast = known_bytes(t for t in transfers if t.through == "network")
    return CostResult(forecast, (sent[1] - sent[0]) / steps)


def memory(case: CostCase, folder: Path) -> CostResult:
    """Bytes of all members, more than with a tiny model."""
    found = []
    for width in (WIDE, NARROWER):
        run = folder / str(width)
        run.mkdir()
        with _at_gates(case, run, width, gates=str(FIRST), in_backward=True) as (there, _):
            there.wait(FIRST)
            there.bytes_sent()  # servers have done what they do meanwhile
            found.append(there.memory())
    forecast = _memory_of_all(case, WIDE) - _memory_of_all(case, NARROWER)
    return CostResult(forecast, found[0] - found[1])


def _memory_of_all(case: CostCase, width: int) -> int:
    uses = make_strategy(case.strategy).memory(case.facts(width))
    assert uses is not None
    servers = case.servers or case.workers
    number = {"worker": case.workers, "server": servers, "host": 1}
    there = [use for use in uses if use.purpose != CHECKPOINTS]  # none is written by then
    return sum(number[use.of] * (use.num_bytes or 0) for use in there)


@contextmanager
def _at_gates(
    case: CostCase, folder: Path, width: int, **fields: Any
) -> Iterator[tuple[Gates, harness.RunningCommand]]:
    gate = folder / "gate"
    gate.mkdir()
    arguments = harness.train_arguments(
        case.job,
        folder / "run",
        *(EQUAL, "--checkpoint-every", "0", *case.flags),
        strategy=case.strategy,
        workers=case.workers,
        gate=gate,
        width=width,
        depth=1,
        lr=1e-6,
        batch_size=BATCH,
        epochs=1,
        **case.fields,
        **fields,
    )
    with harness.command(*arguments, run=folder / "run", environ=RETURNS) as running:
        yield Gates(gate, running, workers=case.workers), running


def _no_loss(model: Any, batch: Any) -> Any:
    raise AssertionError("nothing is trained here")


def table(results: Iterable[tuple[CostCase, CostResult]]) -> Iterator[str]:
    """Yield the lines of a table for the documentation."""
    yield "| | workers | forecast | measured | ratio |"
    yield "| --- | --- | --- | --- | --- |"
    for case, result in results:
        notes = [*case.flags, *(f"{name}={value}" for name, value in case.fields.items())]
        notes += ["a sparse table"] * (case.job == "GatedRows")
        name = ", ".join([f"`{case.strategy}`", *notes])
        yield (
            f"| {name} | {case.workers} | {result.forecast / 1e6:,.2f} MB | "
            f"{result.measured / 1e6:,.2f} MB | {result.ratio:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--what", choices=["traffic", "memory"], help="default: both")
    given = parser.parse_args()
    for what, trial, cases in (("traffic", traffic, TRAFFIC), ("memory", memory, MEMORY)):
        if given.what not in (None, what):
            continue
        print(f"\n{what}\n", flush=True)
        results = []
        for case in cases:
            if given.only in str(case):
                with tempfile.TemporaryDirectory(prefix="costs-") as folder:
                    results.append((case, trial(case, Path(folder))))
                print(str(case), *results[-1][1:], flush=True)
        print("\n".join(table(results)), flush=True)


if __name__ == "__main__":
    main()
