"""What asynchronous training learns: samples to reach an accuracy on MNIST, by the rule for stale gradients.

The workers are virtual: one process computes real gradients in the order in which workers of given speeds
would, each on the weights that it had when it began, and applies them with what a server of `ps:async` runs:
the same Decider, UpdatePipeline and BlockStore. So rules can be compared in seconds, and repeatably.
The samples that a run needs are divided by those of `single` with the same seed.

    python benchmarks/async_learning.py                       the table of docs/strategies/ps.md
    python benchmarks/async_learning.py --rules ahead,dana --workers 4 --seeds 0 --optimizer adam
    python benchmarks/async_learning.py --real --workers 4    real processes instead, with ps:async

Rules that the product does not have are written down here, next to each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import heapq
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.optim import Optimizer

from manyhands.compute.feed import Feed
from manyhands.compute.gradients import gradients
from manyhands.compute.train_state import TrainState
from manyhands.control.messages import Portion
from manyhands.data import Arrays, mnist
from manyhands.job import Job
from manyhands.ps.block_store import FlatTensors, ScheduleClock
from manyhands.ps.compensation import Compensation
from manyhands.ps.gradient_buffer import GradientBuffer, WorkerMemory
from manyhands.ps.mode import PsMode
from manyhands.ps.model_layout import layout_of, pieces_of
from manyhands.ps.partial_steps import Steps
from manyhands.ps.placement import place
from manyhands.ps.policies import AsyncPolicy, Contribution, Decider, Decision
from manyhands.ps.server_state import ServerState
from manyhands.ps.staleness import Rule, lr_scale
from manyhands.ps.updates import MessageExchange, UpdatePipeline
from manyhands.ranges import shares
from manyhands.testing import harness

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from mnist import Mnist  # noqa: E402

TARGET = 0.97
EVAL_EVERY = 16
"""Steps between evaluations."""
SPREAD, JITTER = 0.15, 0.2
"""Workers differ in speed by up to SPREAD; the steps of each by JITTER, the standard deviation."""


class AdamMnist(Mnist):
    def optimizer(self, params):
        return torch.optim.Adam(params, lr=self.lr)


JOBS = {"sgd": lambda seed: Mnist(seed=seed), "adam": lambda seed: AdamMnist(seed=seed, lr=1e-3)}


@functools.cache
def data() -> tuple[Arrays, Arrays]:
    return mnist("train"), mnist("test")


# Rules that are compared ----------------------------------------------------------------------------


class WorkerSteps(Steps):
    """Steps that know whose push they apply."""

    def __init__(self, optimizer: Optimizer, simulation: Simulation) -> None:
        super().__init__(optimizer)
        self.simulation = simulation
        simulation.pulled = self.pulled

    def pulled(self, worker: int) -> None:
        """Called when a worker reads the weights."""

    @property
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (p for group in self.optimizer.param_groups for p in group["params"])


class Dana(WorkerSteps):
    """DANA-Slim (Hakimi et al. 2019): a momentum for each worker, and a look-ahead by all of them."""

    nesterov = True

    def __init__(self, optimizer: Optimizer, simulation: Simulation) -> None:
        super().__init__(optimizer, simulation)
        self._states = [dict[torch.Tensor, dict]() for _ in range(simulation.num_workers)]

    def step(self, *, lr_scale: float, part: float) -> None:
        state = self._states[self.simulation.pushing]
        for parameter in self.parameters:
            self.optimizer.state[parameter] = state.setdefault(parameter, {})
        for group in self.optimizer.param_groups:
            if "nesterov" in group:
                group["nesterov"] = self.nesterov
        super().step(lr_scale=lr_scale, part=part)


class MomentumOfWorkers(Dana):
    """A momentum for each worker, without a look-ahead."""

    nesterov = False


class GapAware(MomentumOfWorkers):
    """Gap-aware (Barkai et al. 2020): divide each element of a gradient by how far it has moved meanwhile, in
    average steps, plus one; with a momentum for each worker."""

    def __init__(self, optimizer: Optimizer, simulation: Simulation) -> None:
        super().__init__(optimizer, simulation)
        self._then: list[list[list[torch.Tensor]]] = [[] for _ in range(simulation.num_workers)]
        self._average: float | None = None

    def pulled(self, worker: int) -> None:
        self._then[worker].append([p.detach().clone() for p in self.parameters])

    def step(self, *, lr_scale: float, part: float) -> None:
        parameters = list(self.parameters)
        then = self._then[self.simulation.pushing].pop(0)
        before = [p.detach().clone() for p in parameters]
        kept = [p.grad for p in parameters]
        if self._average:
            for parameter, old in zip(parameters, then, strict=True):
                gap = (parameter.detach() - old).abs_().div_(self._average).add_(1)
                parameter.grad = parameter.grad / gap
        super().step(lr_scale=lr_scale, part=part)
        moved = torch.cat([(p.detach() - b).abs() for p, b in zip(parameters, before, strict=True)])
        mean = float(moved.mean()) / part  # of a whole batch
        self._average = mean if self._average is None else 0.99 * self._average + 0.01 * mean
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad


class Begotten(WorkerSteps):
    """Momentum corrected for asynchrony (Mitliagkas et al. 2016): n workers act like a momentum of 1 - 1/n,
    so the optimizer's own is that much smaller."""

    def step(self, *, lr_scale: float, part: float) -> None:
        implicit = 1 - 1 / self.simulation.num_workers
        group = self.optimizer.param_groups[0]
        key = "momentum" if "momentum" in group else "betas"
        before = group[key]
        if key == "momentum":
            group[key] = max(0.0, before - implicit)
        else:
            group[key] = (max(0.0, before[0] - implicit), before[1])
        super().step(lr_scale=lr_scale, part=part)
        group[key] = before


class PartsOnly(Steps):
    """The product's rule without its look-ahead: momentum decays by parts of a batch."""

    def __init__(self, optimizer: Optimizer, simulation: Simulation) -> None:
        super().__init__(optimizer)
        (self._group,) = optimizer.param_groups

    def step(self, *, lr_scale: float, part: float) -> None:
        b = self._group["momentum"]
        self._group.update(momentum=b**part, dampening=1 - (1 - b**part) / (1 - b))
        super().step(lr_scale=lr_scale, part=part)
        self._group.update(momentum=b, dampening=0)


class ByPushes(Decider):
    """Scales the learning rate by staleness in pushes, not in batches."""

    def _scaled(self, decision: Decision) -> Decision:
        (only,) = decision.contributions
        part, whole = only.share
        scaled = super()._scaled(decision)
        factor = lr_scale(self._lr_rule, only.staleness)
        factor /= lr_scale(self._lr_rule, only.staleness * part / whole)
        return dataclasses.replace(scaled, lr_scale=scaled.lr_scale * factor)


@dataclasses.dataclass(frozen=True)
class Compared:
    """A rule: the server's options, and what replaces its steps if the product does not have it."""

    lr_rule: Rule = "none"
    momentum_rule: str = "none"
    compensate: float = 0.0
    by_pushes: bool = False
    """If true, staleness counts pushes instead of batches."""
    steps: Callable[[Optimizer, Simulation], Steps] | None = None


RULES = {
    "none": Compared(),
    "sqrt, by pushes": Compared("sqrt", by_pushes=True),
    "inverse, by pushes": Compared("inverse", by_pushes=True),
    "inverse": Compared("inverse"),
    "mitliagkas": Compared(steps=Begotten),
    "dana": Compared(steps=Dana),
    "dana, inverse": Compared("inverse", steps=Dana),
    "gap-aware": Compared(steps=GapAware),
    "compensate": Compared(compensate=0.04),
    "compensate, ahead, sqrt": Compared("sqrt", "ahead", compensate=0.04),
    "parts, inverse": Compared("inverse", steps=PartsOnly),
    "ahead": Compared(momentum_rule="ahead"),
    "ahead, sqrt": Compared("sqrt", "ahead"),
    "ahead, inverse": Compared("inverse", "ahead"),
}


# The simulation -------------------------------------------------------------------------------------


class Simulation:
    """One run: a server's state, and workers whose steps take virtual time."""

    def __init__(
        self, job: Job, num_workers: int, rule: Compared, *, delay: float, slow: float
    ) -> None:
        """`delay`: time from a push to its update, in steps of a worker. `slow`: how many times longer the
        steps of the first worker take."""
        self.num_workers, self._job, self._delay = num_workers, job, delay
        self.pulled: Callable[[int], None] = lambda worker: None
        self.pushing = 0
        self.staleness: list[int] = []
        draw = self._draw = np.random.default_rng(job.seed)
        self._time_of = draw.uniform(1 - SPREAD, 1 + SPREAD, num_workers)
        self._time_of[0] *= slow
        train, test = data()
        self._num_samples = len(train)
        self._steps = math.ceil(len(train) / job.batch_size)
        state = self.train_state = TrainState.of(
            job, device="cpu", num_steps=self._steps * job.epochs
        )
        state.optimizer._opt_called = True
        self._feed = Feed(job, train, device="cpu")
        self._test = test.gather(torch.arange(len(test)))
        layout = layout_of(state.model, state.optimizer)
        parameters = pieces_of(state.model, state.optimizer)
        flat = FlatTensors.private(layout)
        for name, parameter in parameters.items():
            flat.piece(name).copy_(parameter.detach().reshape(-1))
        self._slots = [FlatTensors.private(layout) for _ in range(3 * num_workers)]
        self._memory = WorkerMemory(
            GradientBuffer(state.model, parameters),
            flat,
            parameters,
            slots=self._slots,
            device="cpu",
            copies_params=False,
        )
        clock = ScheduleClock(state.scheduler)
        self._server = server = ServerState(
            "server", "host", state, flat, clock, replicas=0, momentum_rule=rule.momentum_rule
        )
        server.prepare(1, place(layout, ["server"], replicas=0), {}, fresh=True)
        server.begin()
        if rule.steps is not None:
            optimizer = server.own._optimizer
            optimizer._steps = rule.steps(optimizer.optimizer, self)
        names = [f"worker-{i}" for i in range(num_workers)]
        for i, name in enumerate(names):
            server.gradients[name] = self._slots[3 * i : 3 * i + 3]
        mode = PsMode(AsyncPolicy, rounds=False, slots=3)
        self._compensation = Compensation(rule.compensate) if rule.compensate else None
        self._pipeline = UpdatePipeline(
            server,
            mode,
            MessageExchange(server, mode, server.placement, {}),
            compensation=self._compensation,
        )
        decider = ByPushes if rule.by_pushes else Decider
        self._decider = decider(
            AsyncPolicy(names),
            server.ledger,
            servers=["server"],
            lr_rule=rule.lr_rule,
            by_part=True,
        )

    def samples_to(self, target: float, *, epochs: float) -> int | None:
        """Return the samples that were in the weights when the target was reached; None if it was not."""
        samples = 0
        due = every = EVAL_EVERY * self._job.batch_size
        for push in self._pushes():
            samples += push.share[0]
            if samples >= due:
                accuracy = self.accuracy()
                if accuracy >= target:
                    return samples
                far = 1 - accuracy > 1.5 * (1 - target)
                due += (4 if far else 1) * every
            if samples >= epochs * self._num_samples:
                return None
        return None

    def accuracy(self) -> float:
        with torch.no_grad():
            output = self.train_state.model(self._job.inputs(self._test))
        return float(self._job.metrics(output, self._test)["accuracy"])

    def _pushes(self) -> Iterator[Contribution]:
        """Yield each push when it is in the weights."""
        order, events = itertools.count(), list[tuple]()
        portions = self._portions()
        seqs = [0] * self.num_workers

        def at(when: float, what: str, worker: int, *rest: object) -> None:
            heapq.heappush(events, (when, next(order), what, worker, *rest))

        for worker in range(self.num_workers):
            at(self._draw.uniform(0, 1), "begin", worker)
        while events:
            now, _, what, worker, *rest = heapq.heappop(events)
            if what == "begin":
                portion = next(portions, None)
                if portion is None:
                    continue
                seqs[worker] += 1
                push = self._compute(worker, seqs[worker], portion)
                began = self._server.ledger.version
                seconds = self._time_of[worker] * self._draw.gamma(1 / JITTER**2, JITTER**2)
                at(now + seconds, "push", worker, push, began)
            elif what == "push":
                if (
                    self._delay and self.num_workers > 1
                ):  # the next step begins before the update is made
                    at(now, "begin", worker)
                    at(now + self._delay, "arrive", worker, *rest)
                else:
                    at(now, "arrive", worker, *rest)
                    at(now, "begin", worker)
            else:
                push, began = rest
                self.pushing = worker
                self._decider.received("server", push, began=began, after=push.seq - 1)
                for decision in self._decider.decisions():
                    self.staleness.append(decision.contributions[0].staleness)
                    self._pipeline.enqueue(decision)
                    self._server.schedule_clock.advance(decision.ticks)
                yield push

    def _portions(self) -> Iterator[Portion]:
        """Yield the parts of steps in the order in which they are handed out."""
        job, step = self._job, 0
        for epoch in range(job.epochs):
            for first in range(0, self._num_samples, job.batch_size):
                total = min(job.batch_size, self._num_samples - first)
                step += 1
                start = first
                for part, count in enumerate(shares(total, [1.0] * self.num_workers)):
                    yield Portion(step, epoch, total, ((start, start + count),), part=part)
                    start += count

    def _compute(self, worker: int, seq: int, portion: Portion) -> Contribution:
        share = self._feed.share(portion)
        slot = seq % 3
        self.pulled(worker)
        name = f"worker-{worker}"
        if self._compensation is not None:
            self._compensation.remember(name, self._server.own)
        self._memory.begin(3 * worker + slot)
        _, loss = gradients(self.train_state, share)
        self._memory.finish(3 * worker + slot)
        return Contribution(
            name,
            seq,
            slot,
            portion.step,
            portion.part,
            float(portion.samples),
            float(portion.total),
            share=(portion.samples, portion.total),
            loss=float(loss),
        )


# The table ------------------------------------------------------------------------------------------


def simulated(args: argparse.Namespace, rule: Compared, workers: int, seed: int) -> int | None:
    job = JOBS[args.optimizer](seed)
    simulation = Simulation(job, workers, rule, delay=args.delay, slow=args.slow)
    samples = simulation.samples_to(TARGET, epochs=args.epochs)
    del simulation
    gc.collect()  # it has cycles, and tens of copies of the model
    return samples


def real(args: argparse.Namespace, strategy: str, workers: int, seed: int) -> int | None:
    """Train with processes, and return the samples after which the target was reached."""
    with tempfile.TemporaryDirectory() as folder:
        run, fields = Path(folder) / "run", {"seed": seed, "eval_every": f"{EVAL_EVERY} steps"}
        flags = ["--threads", "1", "--target", f"accuracy={TARGET}"]
        arguments = harness.train_arguments(
            ROOT / "examples/mnist.py", run, *flags, strategy=strategy, workers=workers, **fields
        )
        with harness.command(*arguments, run=run) as running:
            done = running.wait(timeout_s=args.timeout)
        if done.code != 0:
            raise RuntimeError(
                f"{strategy} with {workers} workers, seed {seed}: {done.err[-2000:]}"
            )
        for event in done.of("Evaluated"):
            if event["metrics"]["accuracy"] >= TARGET:
                return event["step"] * Mnist.batch_size
    return None


def show(found: list[float | None]) -> str:
    """Return the median over seeds; a run that does not get there is infinite."""
    median = statistics.median(math.inf if each is None else each for each in found)
    return "-" if median == math.inf else f"{median:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", default=";".join(RULES), help="names, separated by ;")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--optimizer", choices=JOBS, default="sgd")
    parser.add_argument("--delay", type=float, default=0.5, help="from push to update, in steps")
    parser.add_argument("--slow", type=float, default=1.0, help="time of the first worker's step")
    parser.add_argument("--epochs", type=float, default=2.5, help="after which a run is given up")
    parser.add_argument("--real", nargs="*", metavar="SPEC", help="train with processes instead")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a real run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.real is not None:
        single = {seed: real(args, "single", 1, seed) for seed in args.seeds}
        rules = args.real or ["ps:async"]
    else:
        single = {seed: simulated(args, Compared(), 1, seed) for seed in args.seeds}
        rules = [rule for rule in args.rules.split(";") if rule]
    print(
        f"{args.optimizer}; samples of single: {', '.join(map(str, single.values()))}", flush=True
    )
    print(f"{'':26}{''.join(f'{n:>10}' for n in args.workers)}", flush=True)
    for rule in rules:
        began, cells, all_found = time.monotonic(), [], {}
        for workers in args.workers:
            found = []
            for seed in args.seeds:
                if args.real is not None:
                    samples = real(args, rule, workers, seed)
                else:
                    samples = simulated(args, RULES[rule], workers, seed)
                found.append(samples and samples / single[seed])
            cells.append(show(found))
            all_found[workers] = [each and round(each, 2) for each in found]
        row = f"{rule:26}{''.join(f'{cell:>10}' for cell in cells)}"
        print(f"{row}   {json.dumps(all_found)} {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
