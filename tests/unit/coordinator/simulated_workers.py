"""Simulates the workers of a run at random, against the real dispatcher, plan and checkpoint tracker.

The weights are the list of parts that were put into them. In lockstep a step is in them once every
worker of the view has computed its share, the same for all workers of a replica; otherwise each part by
itself, some left out. Deaths lose the reports that were on their way, and whatever the members had been
ordered to do.

In rounds, each worker computes by itself, and all wait for each other at the end of a round. Then they know,
one after the other, that everything is in the weights. If one dies meanwhile, those who know tell the others;
otherwise the survivors put what they have into the weights, which may again end half way.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from dataclasses import dataclass, field
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


Parts = dict[PartKey, list[Sample]]


@dataclass
class SimulatedRound:
    """What a worker knows of the weights, in rounds."""

    agreed: Parts = field(default_factory=dict)
    own: Parts = field(default_factory=dict)
    """Its parts since the last round."""
    rows: list[StepRow] = field(default_factory=list)
    """Their reports."""

    def take(self, agreed: Parts) -> list[StepRow]:
        """These are in the weights now. Returns the reports of its own parts."""
        rows, self.rows = self.rows, []
        self.agreed, self.own = dict(agreed), {}
        return rows


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
        self.round_steps = config.traits.round_steps
        self._rounds: dict[str, SimulatedRound] = {}
        self._waiting: set[str] = set()
        """Workers that wait at the end of a round."""
        self._ended: Parts = {}
        """The result of the last round, for those that do not know it yet."""
        self._uninformed: set[str] = set()
        self._num_computed: Counter[str] = Counter()
        self._standby: list[str] = []
        self.view(self.newcomers(workers))

    def newcomers(self, number: int) -> list[str]:
        self._names += number
        return [f"worker-{n}" for n in range(self._names - number, self._names)]

    def view(self, names: list[str]) -> None:
        """These are the members now; all have settled what is in the weights, and joined."""
        if self.round_steps is not None:
            names = self._settle_round(names)
        for name in self._rows:
            # What is resolved is told before joining; of the rest it is not known, or they are dead.
            knows = self.round_steps is not None and name in names
            kept = self._rows[name] if knows or self.chance.random() < 0.5 else []
            for row in kept:
                self.dispatcher.add(name, row)
        known = self.weights if self.round_steps is not None else self.weights[-40:]
        self.dispatcher.mark_applied(dict.fromkeys(key for key, _ in known))
        self._commit()
        self._number += 1
        fit = self.config.refit(len(names))
        names, self._standby = names[:fit], names[fit:]
        seats = tuple(Seat(name, "here") for name in names)
        for gone in self.writing.keys() - set(names):
            del self.writing[gone]
        self._agendas = {name: deque() for name in names}
        self._rows = {name: [] for name in names}
        self._pushed, self._evaluated = {}, set()
        self._waiting, self._uninformed = set(), set()
        self._num_computed.clear()
        self.redone += self.dispatcher.redispatch(
            View(self._number, seats, self.config.replica_size(fit))
        )

    def play(self, *, deaths: int = 0, arrivals: int = 0, stop_at: int | None = None) -> None:
        arriving = False
        for moment in range(100_000):
            if moment == stop_at:
                self.training_plan.stop("interrupted")
            self.dispatcher.dispatch_ahead(pause=arriving)
            if arriving and self.dispatcher.idle:
                assert not any(isinstance(o, TrainOrder) for a in self._agendas.values() for o in a)
                self.view([*self._agendas, *self._standby, *self.newcomers(1)])
                arriving = False
                continue
            if self._all_stopped():
                return
            roll = self.chance.random()
            left = len(self._agendas) + len(self._standby) - 1
            if deaths and roll < 0.03 and self.config.refit(left):
                deaths -= 1
                victim = self.chance.choice(list(self._agendas))
                here = [*self._agendas, *self._standby]
                self.view([name for name in here if name != victim])
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
        unsaid = self._rows[name] or (name in self._rounds and self._rounds[name].rows)
        if unsaid and (not agenda or self.chance.random() < 0.3):
            self._flush(name)
        if not agenda or isinstance(agenda[0], StopOrder):
            return
        order = agenda[0]
        if isinstance(order, TrainOrder):
            if self._compute(name, order.portions[0]):
                agenda.popleft()
            return
        if self.round_steps is not None and not self._end_round(name):
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
        if self.round_steps is not None:
            mine, key = self._rounds[name], (step, part)
            if key not in mine.own and name not in self._uninformed:
                mine.own[key] = _samples(portion)
                mine.rows.append(row(step, part, 0.2))
                self._num_computed[name] += 1
            return step % self.round_steps != 0 or self._end_round(name)
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
                for one in {portion.part: portion for portion in pushed.values()}.values():
                    self._apply(one)
        if len(pushed) < len(self._agendas):
            return False
        self._rows[name].append(row(step, part, 0.2))
        return True

    def _settle_round(self, names: list[str]) -> list[str]:
        """Bring the members to the same weights, as learners do when they join. Returns who is left."""
        new = set(names) - set(self._rounds)
        self._rounds |= {name: SimulatedRound() for name in new}
        while True:
            newest = max((self._rounds[name].agreed for name in names), key=len)
            agreed = dict(newest)
            for name in names:
                if len(self._rounds[name].agreed) == len(newest):
                    agreed |= self._rounds[name].own
            if len(set(names) - new) < 2 or self.chance.random() < 0.8:
                break
            # Some come through. They report it, but the view fails, and one more is gone.
            for name in self.chance.sample(names, self.chance.randrange(1, len(names) + 1)):
                for row in self._rounds[name].take(agreed):
                    self.dispatcher.add(name, row)
            victim = self.chance.choice(names)
            names = [name for name in names if name != victim]
        for name in names:
            self._rows.setdefault(name, []).extend(self._rounds[name].take(agreed))
        self._rounds = {name: self._rounds[name] for name in names}
        self.weights = list(agreed.items())
        return names

    def _end_round(self, name: str) -> bool:
        """Whether the worker knows that all it has computed is in the weights."""
        mine = self._rounds[name]
        if name in self._uninformed:
            self._uninformed.discard(name)
            self._waiting.discard(name)
            self._rows[name] += mine.take(self._ended)
            self.weights = list(self._ended.items())
            return True
        if not mine.rows:
            return True
        self._waiting.add(name)
        if self._waiting == set(self._agendas):
            self._ended = dict(mine.agreed)
            for each in self._rounds.values():
                self._ended |= each.own
            self._uninformed, self._waiting = set(self._agendas), set()
        return False

    def _apply(self, portion: Portion) -> None:
        self.weights.append(((portion.step, portion.part), _samples(portion)))

    def _flush(self, name: str) -> None:
        rows, self._rows[name] = self._rows[name], []
        if self.round_steps is not None:
            self.dispatcher.note_computed(name, *[self._num_computed[name]] * 2)
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


def _samples(portion: Portion) -> list[Sample]:
    return [(portion.epoch, i) for lo, hi in portion.ranges for i in range(lo, hi)]


def row(step: int, part: int, seconds: float, *, dropped: bool = False) -> StepRow:
    return StepRow(step, 1.0, 1.0, 0.1, seconds, None, None, 0, part=part, dropped=dropped)
