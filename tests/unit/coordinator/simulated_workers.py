"""Simulates the workers of a run at random, against the real dispatcher, plan and checkpoint tracker.

The weights are the list of parts that were put into them. In lockstep a step is in them once every
worker of the view has computed its share; otherwise each part by itself, some left out. Deaths lose
the reports that were on their way, and whatever the members had been ordered to do.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from pathlib import Path

from manyhands.contract import Strategy
from manyhands.control.messages import (
    TO_MEMBER,
    CheckpointOrder,
    EvaluateOrder,
    FileFacts,
    Order,
    Portion,
    RestOrder,
    Saved,
    Saving,
    StepRow,
    StopOrder,
    TrainOrder,
)
from manyhands.coordinator.checkpoint_tracker import CheckpointTracker
from manyhands.coordinator.dispatch import make_dispatcher
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.plan import PlanConfig, TrainingPlan
from manyhands.coordinator.progress import PartKey
from manyhands.events.events import StepCommitted
from manyhands.events.sinks import Stream
from manyhands.hosts.view import Seat, View
from manyhands.runs.checkpoints import partial
from manyhands.runs.folder import RunFolder
from manyhands.transport.fields import encode

Sample = tuple[int, int]
"""(epoch, position)"""


class SimulatedWorkers:
    def __init__(
        self,
        folder: Path,
        plan_config: PlanConfig,
        config: Strategy,
        workers: int,
        chance: random.Random,
    ) -> None:
        self.chance = chance
        self.config = config
        self.training_plan = TrainingPlan(plan_config)
        run = RunFolder.create("played", path=folder / "run")
        options = RunOptions("job.py", "played", workers, config)
        self.checkpoint_tracker = CheckpointTracker(run, Stream(), options, newest=None)
        self.run = run
        self.dispatcher = make_dispatcher(
            config, self.training_plan, self.checkpoint_tracker, self._hear
        )
        self.weights: list[tuple[PartKey, list[Sample]]] = []
        self.committed: list[StepCommitted] = []
        self.evaluations: list[int] = []
        """The steps of those that came to a result."""
        self.rests = 0
        self.redone = 0
        self._agendas: dict[str, deque[Order]] = {}
        self._rows: dict[str, list[StepRow]] = {}
        self._pushed: dict[int, dict[str, Portion]] = {}
        self._evaluated: set[str] = set()
        self.writing: dict[str, tuple[int, int]] = {}
        """By worker: the step and view of the checkpoint that it writes."""
        self._number = 0
        self._names = 0
        self.view(self.newcomers(workers))

    def newcomers(self, number: int) -> list[str]:
        self._names += number
        return [f"worker-{n}" for n in range(self._names - number, self._names)]

    def view(self, names: list[str]) -> None:
        """These are the members now; all have settled what is in the weights, and joined."""
        for name in self._rows:
            # What is resolved is told before joining; of the rest it is not known, or they are dead.
            kept = self._rows[name] if self.chance.random() < 0.5 else []
            for row in kept:
                self.dispatcher.add(name, row)
        self.dispatcher.mark_applied(dict.fromkeys(key for key, _ in self.weights[-40:]))
        self._commit()
        self._number += 1
        seats = tuple(Seat(name, "here") for name in names)
        for gone in self.writing.keys() - set(names):
            del self.writing[gone]
        self._agendas = {name: deque() for name in names}
        self._rows = {name: [] for name in names}
        self._pushed, self._evaluated = {}, set()
        self.redone += self.dispatcher.redispatch(View(self._number, seats))

    def play(self, *, deaths: int = 0, arrivals: int = 0, stop_at: int | None = None) -> None:
        arriving = False
        for moment in range(100_000):
            if moment == stop_at:
                self.training_plan.stop("interrupted")
            self.dispatcher.dispatch_ahead(pause=arriving)
            if arriving and self.dispatcher.idle:
                assert not any(isinstance(o, TrainOrder) for a in self._agendas.values() for o in a)
                self.view([*self._agendas, *self.newcomers(1)])
                arriving = False
                continue
            if self._all_stopped():
                return
            roll = self.chance.random()
            if deaths and roll < 0.03 and len(self._agendas) > 1:
                deaths -= 1
                victim = self.chance.choice(list(self._agendas))
                self.view([name for name in self._agendas if name != victim])
                arriving = False
            elif arrivals and roll < 0.06 and self.dispatcher.finishing is None:
                arrivals -= 1
                arriving = True
            elif self.writing and roll < 0.3:
                self.written(self.chance.choice(list(self.writing)))
            else:
                self._act(self.chance.choice(list(self._agendas)))
        raise AssertionError("no end")

    def used(self) -> Counter[Sample]:
        return Counter(sample for _, samples in self.weights for sample in samples)

    def _hear(self, name: str, order: Order) -> None:
        assert TO_MEMBER.read(json.loads(encode(order))) == order
        if isinstance(order, TrainOrder):
            self._agendas[name].extend(TrainOrder([portion]) for portion in order.portions)
        else:
            self._agendas[name].append(order)

    def _all_stopped(self) -> bool:
        return self.dispatcher.finishing is not None and all(
            agenda and isinstance(agenda[0], StopOrder) for agenda in self._agendas.values()
        )

    def _act(self, name: str) -> None:
        """One thing that a worker does, if it has anything to do."""
        agenda = self._agendas[name]
        if self._rows[name] and (not agenda or self.chance.random() < 0.3):
            self._flush(name)
        if not agenda or isinstance(agenda[0], StopOrder):
            return
        order = agenda[0]
        if isinstance(order, TrainOrder):
            if self._compute(name, order.portions[0]):
                agenda.popleft()
            return
        self._flush(name)
        writes = name == self.dispatcher.workers[0] or self.config.traits.holds_state
        if isinstance(order, CheckpointOrder) and writes:
            if name in self.writing:
                return
            self._copy(name, order.step)
        elif isinstance(order, EvaluateOrder):
            self._evaluate(name, order.step)
        elif isinstance(order, RestOrder):
            self.rests += 1
        agenda.popleft()

    def _compute(self, name: str, portion: Portion) -> bool:
        """Whether the worker is through with it; in lockstep it waits for all the others."""
        step, part = portion.step, portion.part
        if not self.config.traits.lockstep:
            dropped = self.chance.random() < 0.15
            if not dropped:
                self._apply(portion)
            seconds = self.chance.choice([0.05, 0.2, 0.5])
            self._rows[name].append(row(step, part, seconds, dropped=dropped))
            return True
        pushed = self._pushed.setdefault(step, {})
        if name not in pushed:
            pushed[name] = portion
            if len(pushed) == len(self._agendas):
                for one in pushed.values():
                    self._apply(one)
        if len(pushed) < len(self._agendas):
            return False
        self._rows[name].append(row(step, part, 0.2))
        return True

    def _apply(self, portion: Portion) -> None:
        samples = [(portion.epoch, i) for lo, hi in portion.ranges for i in range(lo, hi)]
        self.weights.append(((portion.step, portion.part), samples))

    def _flush(self, name: str) -> None:
        rows, self._rows[name] = self._rows[name], []
        for one in rows:
            self.dispatcher.add(name, one)
        self._commit()

    def _commit(self) -> None:
        for step in self.dispatcher.committed():
            self.committed.append(step.event)
        self.checkpoint_tracker.commit_written(self.training_plan)

    def _evaluate(self, name: str, step: int) -> None:
        """The weights are those of its step, exactly."""
        assert {key[0] for key, _ in self.weights} == set(range(1, step + 1))
        self._evaluated.add(name)
        if self._evaluated == set(self.dispatcher.workers):
            self._evaluated = set()
            if self.training_plan.awaiting:
                self.evaluations.append(step)
                self.training_plan.evaluated({"loss": 1.0 / (1 + self.training_plan.epoch)})
            self.dispatcher.evaluated()

    def _copy(self, name: str, step: int) -> None:
        """The state of a checkpoint is that of its step, exactly."""
        assert {key[0] for key, _ in self.weights} == set(range(1, step + 1))
        assert set(self.used().values()) <= {1}
        samples = {event.step: event.samples for event in self.committed}
        samples |= {open_.plan.step: open_.plan.samples for open_ in self.dispatcher.progress.steps}
        wanted = sum(samples[number] for number in samples if number <= step)
        assert sum(self.used().values()) == wanted
        self.writing[name] = (step, self._number)
        folder = partial(self.run.path, step, name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        self.dispatcher.saving(name, Saving(self._number, step))

    def written(self, name: str) -> None:
        step, view = self.writing.pop(name)
        files = {name: FileFacts(0, "0" * 8)}
        self.checkpoint_tracker.written(name, Saved(view, step, files))
        self.checkpoint_tracker.commit_written(self.training_plan)


def row(step: int, part: int, seconds: float, *, dropped: bool = False) -> StepRow:
    return StepRow(step, 1.0, 1.0, 0.1, seconds, None, None, 0, part=part, dropped=dropped)
