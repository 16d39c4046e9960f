"""Dispatch: deaths and arrivals leave every sample in the weights once, and every checkpoint whole."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import due
from simulated_workers import SimulatedWorkers, row
from traits import Lockstep, ManyParts, Rounds, WorkQueue

from manyhands.contract import Strategy
from manyhands.control.messages import EvaluateOrder, Portion, Saved, Saving, TrainOrder
from manyhands.coordinator.batch_scaling import FIXED, Scaling
from manyhands.coordinator.checkpoint_tracker import CheckpointTracker
from manyhands.coordinator.dispatch import Dispatcher, make_dispatcher
from manyhands.coordinator.options import RunOptions
from manyhands.coordinator.plan import PlanConfig, TrainingPlan
from manyhands.coordinator.plateau import Plateau
from manyhands.errors import ProtocolError
from manyhands.events.sinks import Stream
from manyhands.hosts.view import SERVER, Seat, View
from manyhands.runs import checkpoints
from manyhands.runs.folder import RunFolder

IN_STEP = Lockstep()
IN_PARTS = WorkQueue()
IN_MANY_PARTS = ManyParts()
IN_ROUNDS = Rounds()
HOLDING = Lockstep(holds_state=True)
IN_PAIRS = Lockstep(per_replica=2)
HOLDING_IN_PARTS = WorkQueue(holds_state=True)

plan_configs = st.builds(
    PlanConfig,
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 15),
    epochs=st.integers(1, 3),
    steps=st.none() | st.integers(1, 20),
    eval_every=st.integers(1, 2),
    eval_steps=st.integers(0, 5),
    has_eval=st.booleans(),
    checkpoint_every=st.integers(0, 4),
)


@settings(max_examples=120, deadline=None)
@given(
    plan_config=plan_configs,
    config=st.sampled_from(
        [IN_STEP, IN_PARTS, IN_MANY_PARTS, HOLDING, HOLDING_IN_PARTS, IN_PAIRS, IN_PAIRS]
    ),
    workers=st.integers(1, 5),
    deaths=st.integers(0, 3),
    arrivals=st.integers(0, 2),
    stop_at=st.one_of(st.none(), st.integers(0, 200)),
    seed=st.integers(0, 2**32),
)
def test_deaths_and_arrivals_use_every_sample_once(
    plan_config: PlanConfig,
    config: Strategy,
    workers: int,
    deaths: int,
    arrivals: int,
    stop_at: int | None,
    seed: int,
) -> None:
    workers = max(workers, config.replica_size(workers))
    play(plan_config, config, workers, random.Random(seed), deaths, arrivals, stop_at)


@settings(max_examples=250, deadline=None)
@given(
    plan_config=plan_configs,
    round_steps=st.integers(1, 7),
    holds_state=st.booleans(),
    workers=st.integers(1, 4),
    deaths=st.integers(0, 3),
    arrivals=st.integers(0, 2),
    stop_at=st.one_of(st.none(), st.integers(0, 200)),
    seed=st.integers(0, 2**32),
)
def test_so_do_rounds_that_lose_what_a_dead_worker_had_done(
    plan_config: PlanConfig,
    round_steps: int,
    holds_state: bool,
    workers: int,
    deaths: int,
    arrivals: int,
    stop_at: int | None,
    seed: int,
) -> None:
    config = Rounds(round_steps=round_steps, holds_state=holds_state)
    play(plan_config, config, workers, random.Random(seed), deaths, arrivals, stop_at)


def test_nothing_is_left_of_a_checkpoint_that_was_ordered_twice() -> None:
    """A worker has written it in one view, and has not begun in the next when another dies."""
    plan_config = PlanConfig(num_samples=2, batch_size=1, epochs=2, eval_steps=3, has_eval=True)
    config = Rounds(round_steps=3, holds_state=True)
    play(plan_config, config, 4, random.Random(1155183), 2, 2, None)


@settings(max_examples=40, deadline=None)
@given(
    plan_config=st.builds(
        PlanConfig,
        num_samples=st.integers(1, 30),
        batch_size=st.integers(2, 9),
        epochs=st.integers(1, 2),
        has_eval=st.booleans(),
        checkpoint_every=st.sampled_from([0, 3]),
        scaling=st.sampled_from([FIXED, Scaling("linear", 2, 3), Scaling("sqrt", 3, 0)]),
        plateau=st.builds(
            Plateau, patience=st.just(1), watch=st.just("train_loss"), every=st.integers(0, 4)
        ),
    ),
    config=st.sampled_from([IN_STEP, IN_PARTS, IN_MANY_PARTS, IN_ROUNDS]),
    deaths=st.integers(0, 2),
    arrivals=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_the_same_with_a_scaled_batch_and_a_plateau_rule(
    plan_config: PlanConfig, config: Strategy, deaths: int, arrivals: int, seed: int
) -> None:
    play(plan_config, config, 3, random.Random(seed), deaths, arrivals, None)


def play(
    plan_config: PlanConfig,
    config: Strategy,
    workers: int,
    chance: random.Random,
    deaths: int,
    arrivals: int,
    stop_at: int | None,
) -> None:
    plan_config = replace(plan_config, round_steps=config.traits.round_steps)
    with tempfile.TemporaryDirectory() as folder:
        simulation = SimulatedWorkers(Path(folder), plan_config, config, workers, chance)
        simulation.play(deaths=deaths, arrivals=arrivals, stop_at=stop_at)
        training_plan = simulation.training_plan
        steps = sorted(c.step for c in simulation.committed)
        assert steps == list(range(1, len(steps) + 1)), "each step is committed once"
        assert training_plan.committed_step == len(steps)
        used = simulation.used()
        assert training_plan.samples_used == used.total()
        assert set(used.values()) <= {1}
        said = Counter(
            (c.epoch, i)
            for c in simulation.committed
            for ranges in c.shares.values()
            for low, high in ranges
            for i in range(low, high)
        )
        assert said == used, "the record is the truth"
        if simulation.dispatcher.finishing == "finished":
            if plan_config.steps is None:
                assert used.total() == plan_config.num_samples * plan_config.epochs
            else:
                assert len(steps) == plan_config.steps
            # Samples that are lost in rounds come again: epochs may take more steps.
            same_epochs = config.traits.round_steps is None or plan_config.eval_steps
            if not plan_config.by_samples and same_epochs:
                assert simulation.evaluations == due(plan_config)
        # Only the writers' last words are still on their way.
        simulation.checkpoint_tracker.commit_written(training_plan)
        for name in list(simulation.writing):
            simulation.written(name)
        if steps:
            saved = checkpoints.newest(simulation.run.path)[0]
            assert saved is not None
            assert saved.step == len(steps)
            assert saved.states == (saved.workers if config.traits.holds_state else 0)
        left = (simulation.run.path / "checkpoints").glob(".step-*.partial")
        assert not list(left), "nothing is left of checkpoints that were void"


class Stage:
    """A hand-out, and what it told whom."""

    def __init__(self, tmp_path: Path, config: Strategy, workers: int, **plan_config: Any) -> None:
        self.told: list[tuple[str, Any]] = []
        self.training_plan = TrainingPlan(
            PlanConfig(**{"batch_size": 4, "epochs": 1, **plan_config})
        )
        self.run = run = RunFolder.create("stage", path=tmp_path / "run")
        options = RunOptions("job.py", "any", workers, config)
        self.checkpoint_tracker = CheckpointTracker(run, Stream(), options, newest=None)
        self.dispatcher: Dispatcher = make_dispatcher(
            config,
            self.training_plan,
            self.checkpoint_tracker,
            lambda name, order: self.told.append((name, order)),
        )
        self.view = 0
        self.seat(*[f"worker-{n}" for n in range(workers)])

    def seat(self, *names: str, servers: int = 0) -> int:
        self.view += 1
        seats = [Seat(name, "here") for name in names]
        seats += [Seat(f"server-{n}", "here", role=SERVER) for n in range(servers)]
        return self.dispatcher.redispatch(View(self.view, tuple(seats)))

    def dispatch_ahead(self, *, pause: bool = False) -> list[tuple[str, Any]]:
        """What is told now: the order's name, or the (step, part) of each portion."""
        self.told.clear()
        self.dispatcher.dispatch_ahead(pause=pause)
        return [
            (
                name,
                [(p.step, p.part) for p in order.portions]
                if isinstance(order, TrainOrder)
                else type(order).__name__.removesuffix("Order").lower(),
            )
            for name, order in self.told
        ]

    def saving(self, name: str, step: int) -> None:
        self.dispatcher.saving(name, Saving(self.view, step))

    def done(self, name: str, step: int, part: int, seconds: float = 1.0, **how: Any) -> None:
        self.dispatcher.add(name, row(step, part, seconds, **how))
        for _ in self.dispatcher.committed():
            pass


def test_in_lockstep_every_worker_has_a_share_of_every_step(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_STEP, 2, num_samples=40)
    assert stage.dispatch_ahead() == [
        *(("worker-0", [(1, 0)]), ("worker-1", [(1, 1)])),
        *(("worker-0", [(2, 0)]), ("worker-1", [(2, 1)])),
    ]


def test_in_lockstep_a_death_redistributes_the_same_samples(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_STEP, 2, num_samples=40)
    stage.dispatch_ahead()
    stage.done("worker-0", 1, 0)
    stage.done("worker-1", 1, 1)
    stage.dispatcher.mark_applied(dict.fromkeys([(1, 0), (1, 1)]))
    assert list(stage.dispatcher.committed()) == []
    assert stage.seat("worker-0") == 1
    assert stage.dispatch_ahead() == [("worker-0", [(2, 0)]), ("worker-0", [(3, 0)])]
    (_, order), _ = stage.told
    assert order.portions == [Portion(2, 0, 4, ((4, 8),), 0)]


def test_parts_go_to_free_workers(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_PARTS, 2, num_samples=40)
    assert stage.dispatch_ahead() == [("worker-0", [(1, 0)]), ("worker-1", [(1, 1)])]
    assert stage.dispatch_ahead() == []
    stage.done("worker-0", 1, 0)
    assert stage.dispatch_ahead() == [("worker-0", [(2, 0)])]
    stage.done("worker-0", 2, 0)
    assert stage.dispatch_ahead() == [("worker-0", [(2, 1)])]
    stage.done("worker-0", 2, 1)
    assert stage.training_plan.samples_used == 4, "step 2 is in the weights, step 1 is not"
    assert stage.training_plan.committed_step == 0


def test_whole_steps_are_one_part(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_PARTS, 2, num_samples=40)
    stage.dispatcher.whole_steps = True
    assert stage.dispatch_ahead() == [("worker-0", [(1, 0)]), ("worker-1", [(2, 0)])]
    (_, order), _ = stage.told
    assert order.portions == [Portion(1, 0, 4, ((0, 4),), 0)]
    stage.done("worker-1", 2, 0)
    assert stage.dispatch_ahead() == [("worker-1", [(3, 0)])]
    assert stage.training_plan.samples_used == 4


def test_a_dropped_part_is_dispatched_next(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_PARTS, 2, num_samples=40)
    stage.dispatch_ahead()
    stage.done("worker-1", 1, 1, dropped=True)
    assert stage.dispatch_ahead() == [("worker-1", [(1, 1)])]
    stage.done("worker-0", 1, 1)
    assert stage.dispatcher.progress.is_open((1, 1)), "it is in the hands of another"


def test_an_evaluation_waits_for_all_and_all_rest_meanwhile(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_PARTS, 2, num_samples=4)
    stage.dispatch_ahead()
    stage.done("worker-0", 1, 0)
    assert stage.dispatch_ahead() == [("worker-0", "rest"), ("worker-1", "rest")]
    assert stage.dispatch_ahead() == [], "once"
    stage.done("worker-1", 1, 1, dropped=True)
    assert stage.dispatch_ahead() in (
        [("worker-0", [(1, 1)]), ("worker-0", "rest")],
        [("worker-1", [(1, 1)]), ("worker-1", "rest")],
    )
    stage.done(stage.told[0][0], 1, 1)
    assert stage.dispatch_ahead() == [("worker-0", "evaluate"), ("worker-1", "evaluate")]
    assert not stage.dispatcher.idle


def test_no_work_between_a_checkpoint_order_and_its_copy(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_PARTS, 2, num_samples=8, checkpoint_every=1)
    stage.dispatch_ahead()
    stage.done("worker-0", 1, 0)
    stage.done("worker-1", 1, 1)
    orders = [what for _, what in stage.dispatch_ahead()]
    assert orders == ["rest", "rest", "checkpoint", "checkpoint"]
    assert stage.dispatch_ahead() == []
    stage.saving("worker-0", 1)
    assert stage.dispatch_ahead() == [("worker-0", [(2, 0)]), ("worker-1", [(2, 1)])]


@pytest.mark.parametrize("config", [IN_STEP, IN_PARTS])
def test_an_evaluation_interrupted_by_a_death_is_ordered_again(
    tmp_path: Path, config: Strategy
) -> None:
    stage = Stage(tmp_path, config, 2, num_samples=4)
    stage.dispatch_ahead()
    stage.done("worker-0", 1, 0)
    stage.done("worker-1", 1, 1)
    stage.dispatch_ahead()
    assert stage.training_plan.awaiting
    assert stage.seat("worker-1") == 0
    assert ("worker-1", "evaluate") in stage.dispatch_ahead()


@pytest.mark.parametrize("config", [IN_STEP, IN_PARTS])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("victim", ["worker-0", "worker-1"])
def test_a_checkpoint_whose_writer_died_is_ordered_again(
    tmp_path: Path, config: Strategy, started: bool, victim: str
) -> None:
    stage = Stage(tmp_path, config, 2, num_samples=8, checkpoint_every=1)
    stage.dispatch_ahead()
    stage.done("worker-0", 1, 0)
    stage.done("worker-1", 1, 1)
    stage.dispatch_ahead()
    if started:
        stage.saving("worker-0", 1)
        stage.dispatch_ahead()
    left = "worker-1" if victim == "worker-0" else "worker-0"
    stage.seat(left)
    again = (left, "checkpoint") in stage.dispatch_ahead()
    if config is IN_PARTS and started:
        # The steps behind it are under way already: the next one is at their end.
        assert not again
        saved = victim != "worker-0"
        assert stage.checkpoint_tracker.void([left]) == []
        for _ in range(2):
            for name, step, part in [(left, 2, 0), (left, 2, 1)]:
                stage.done(name, step, part)
                stage.dispatch_ahead()
        assert stage.checkpoint_tracker.unstarted or saved
    else:
        assert again == (not started or victim == "worker-0")


@pytest.mark.parametrize("config", [IN_STEP, IN_PARTS])
def test_the_last_checkpoint_is_repeated_even_after_the_stop_order(
    tmp_path: Path, config: Strategy
) -> None:
    """Whoever was writing it died when all had been told to stop."""
    stage = Stage(tmp_path, config, 2, num_samples=4, has_eval=False)
    stage.dispatch_ahead()
    stage.done("worker-0", 1, 0)
    stage.done("worker-1", 1, 1)
    stage.dispatch_ahead()
    stage.saving("worker-0", 1)
    stage.dispatch_ahead()
    assert stage.dispatcher.finishing == "finished"
    stage.seat("worker-1")
    assert ("worker-1", "checkpoint") in stage.dispatch_ahead()
    stage.saving("worker-1", 1)
    stage.dispatch_ahead()
    assert stage.dispatcher.finishing == "finished"


def test_servers_get_no_work_but_a_stop_order(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_STEP, 1, num_samples=4, has_eval=False)
    stage.seat("worker-0", servers=2)
    told = stage.dispatch_ahead()
    assert [name for name, what in told if what != "stop"] == ["worker-0"] * (len(told) - 3)
    assert [name for name, what in told if what == "stop"] == ["worker-0", "server-0", "server-1"]


def test_settled_parts_are_not_dispatched_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_MANY_PARTS, 2, num_samples=40, batch_size=10)
    assert stage.dispatch_ahead() == [("worker-0", [(1, 0)]), ("worker-1", [(1, 1)])]
    stage.dispatcher.mark_applied({(1, 1): None})
    assert stage.seat("worker-1") == 1
    assert stage.dispatch_ahead() == [("worker-1", [(1, 0)])]
    stage.done("worker-1", 1, 0)
    assert stage.dispatch_ahead() == [("worker-1", [(1, 2)])]


def test_no_new_work_while_a_view_change_is_due(tmp_path: Path) -> None:
    for config in (IN_STEP, IN_PARTS):
        stage = Stage(tmp_path / str(config.traits.lockstep), config, 1, num_samples=40)
        stage.dispatch_ahead()
        assert not stage.dispatcher.idle
        steps = [step.plan.step for step in stage.dispatcher.progress.steps]
        for step in steps:
            stage.done("worker-0", step, 0)
            assert all(what == "rest" for _, what in stage.dispatch_ahead(pause=True))
        assert stage.dispatcher.idle
        stage.seat("worker-0", "worker-1")
        given = {name for name, what in stage.dispatch_ahead() if isinstance(what, list)}
        assert given == {"worker-0", "worker-1"}


def test_a_stop_cancels_an_evaluation(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_PARTS, 2, num_samples=4)
    stage.dispatch_ahead()
    stage.done("worker-0", 1, 0)
    stage.dispatch_ahead()
    assert stage.training_plan.awaiting
    stage.training_plan.stop("interrupted")
    stage.done("worker-1", 1, 1)
    assert [what for _, what in stage.dispatch_ahead()] == ["checkpoint", "checkpoint"]


def test_rest_orders_are_sent_in_every_view(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_PARTS, 2, num_samples=4)
    stage.dispatch_ahead()
    stage.done("worker-0", 1, 0)
    assert [what for _, what in stage.dispatch_ahead()] == ["rest", "rest"]
    stage.seat("worker-0")
    assert stage.dispatch_ahead() == [("worker-0", [(1, 1)]), ("worker-0", "rest")]


def test_in_lockstep_evaluations_and_copies_are_unfinished_work(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_STEP, 1, num_samples=4)
    stage.dispatch_ahead()
    stage.done("worker-0", 1, 0)
    assert stage.training_plan.awaiting
    assert not stage.dispatcher.idle
    stage.training_plan.evaluated({"loss": 1.0})
    stage.dispatcher.evaluated()
    assert stage.dispatcher.idle
    stage.dispatch_ahead()
    assert not stage.dispatcher.idle
    stage.saving("worker-0", 1)
    assert stage.dispatcher.idle


def test_a_portion_has_the_factor_of_the_learning_rate(tmp_path: Path) -> None:
    scaling = Scaling("linear", reference=1, warmup=0)
    stage = Stage(tmp_path, IN_STEP, 1, num_samples=40, scaling=scaling)
    stage.dispatch_ahead()
    assert stage.told[0][1].portions == [Portion(1, 0, 4, ((0, 4),), 0)], (
        "nothing is: nothing is sent"
    )
    stage.seat("worker-0", "worker-1")
    stage.dispatch_ahead()
    (_, first), (_, second), *_ = stage.told
    assert first.portions == [Portion(1, 0, 8, ((0, 4),), 0, 2.0, 2)]
    assert second.portions == [Portion(1, 0, 8, ((4, 8),), 1, 2.0, 2)]


@pytest.mark.parametrize("config", [IN_STEP, IN_PARTS])
def test_no_work_before_the_losses_that_decide_are_known(tmp_path: Path, config: Strategy) -> None:
    rule = Plateau(factor=0.5, patience=1, watch="train_loss", every=1)
    stage = Stage(tmp_path, config, 2, num_samples=40, plateau=rule)
    for step, factor in enumerate([1.0, 1.0, 0.5, 0.25], start=1):
        stage.dispatch_ahead()
        given = [(n, order.portions) for n, order in stage.told if isinstance(order, TrainOrder)]
        assert [(name, [p.step for p in portions]) for name, portions in given] == [
            ("worker-0", [step]),
            ("worker-1", [step]),
        ]
        assert [p.lr_factor for _, portions in given for p in portions] == [factor] * 2
        stage.done("worker-0", step, 0)
        assert not any(isinstance(order, TrainOrder) for _, order in stage.told[2:])
        assert all(what == "rest" for _, what in stage.dispatch_ahead())
        stage.done("worker-1", step, 1)


def test_a_worker_that_catches_up_does_not_count_for_the_batch(tmp_path: Path) -> None:
    scaling = Scaling("linear", reference=1, warmup=0)
    stage = Stage(tmp_path, IN_STEP, 1, num_samples=40, scaling=scaling)
    stage.seat("worker-0", "worker-1")
    stage.dispatcher.catching_up = {"worker-1"}
    stage.dispatch_ahead()
    (_, first), (_, second), *_ = stage.told
    assert first.portions == [Portion(1, 0, 4, ((0, 4),), 0)]
    assert second.portions == [Portion(1, 0, 4, (), 1)]
    for step in (1, 2):
        stage.done("worker-0", step, 0)
        stage.done("worker-1", step, 1)
    stage.dispatcher.catching_up.clear()
    stage.dispatch_ahead()
    (_, first), (_, second), *_ = stage.told
    assert first.portions == [Portion(3, 0, 8, ((8, 12),), 0, 2.0, 2)]
    assert second.portions == [Portion(3, 0, 8, ((12, 16),), 1, 2.0, 2)]


def test_a_portion_names_the_first_worker_that_has_samples(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_STEP, 3, num_samples=40)
    stage.dispatcher.catching_up = {"worker-0"}
    stage.dispatch_ahead()
    portions = [order.portions[0] for _, order in stage.told[:3]]
    assert [portion.samples for portion in portions] == [0, 2, 2]
    assert [portion.first for portion in portions] == [1, 1, 1]


@pytest.mark.parametrize("step_s", [0.002, 0.05, 0.3])
def test_no_worker_waits_for_orders_within_a_round(tmp_path: Path, step_s: float) -> None:
    """With a clock of its own: workers report every 0.1 s, and what they report is not in the weights."""
    every, latency_s, report_s = 64, 0.002, 0.1
    plan_config = {"num_samples": 100_000, "round_steps": every, "has_eval": False}
    stage = Stage(tmp_path, Rounds(round_steps=every), 2, **plan_config)
    agenda = dict.fromkeys(stage.dispatcher.workers, 0)
    computed, rows, reported_at = dict(agenda), dict(agenda), dict.fromkeys(agenda, 0.0)
    free_at = dict.fromkeys(agenda, 0.0)
    waited_s, now = 0.0, 0.0
    messages = [(0.0, "worker-0", 0, 0)]
    """(when, from whom, how much it has computed, rows of how many steps)"""
    while min(computed.values()) < 3 * every:
        next_free = (
            min(free_at[name] for name in agenda if agenda[name])
            if any(agenda.values())
            else float("inf")
        )
        if messages and messages[0][0] <= next_free:
            now, name, done, resolved = messages.pop(0)
            stage.dispatcher.note_computed(name, done, done * step_s)
            for number in range(rows[name] + 1, resolved + 1):
                stage.done(name, number, int(name[-1]), step_s)
            rows[name] = max(rows[name], resolved)
            stage.dispatch_ahead()
            for to, order in stage.told:
                if isinstance(order, TrainOrder):
                    if not agenda[to]:
                        idle_s = now + latency_s - free_at[to]
                        waited_s += max(0.0, idle_s) if computed[to] > 2 else 0.0
                        free_at[to] = max(free_at[to], now + latency_s)
                    agenda[to] += len(order.portions)
            continue
        name = min((n for n in agenda if agenda[n]), key=lambda n: free_at[n])
        now = free_at[name] = free_at[name] + step_s
        agenda[name] -= 1
        computed[name] += 1
        if now - reported_at[name] >= report_s or not agenda[name]:
            reported_at[name] = now
            resolved = min(computed.values()) // every * every
            messages.append((now + latency_s, name, computed[name], resolved))
            messages.sort()
    assert waited_s == 0.0
    assert stage.training_plan.step - 3 * every <= max(3, 1.6 * 0.4 / step_s), "not too far ahead"
    assert stage.training_plan.committed_step == 2 * every


def test_more_steps_than_were_dispatched_cannot_be_computed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_STEP, 1, num_samples=40)
    stage.dispatch_ahead()
    stage.dispatcher.note_computed("worker-0", 2, 1.0)
    with pytest.raises(ProtocolError, match="it has computed 3 steps of 2"):
        stage.dispatcher.note_computed("worker-0", 3, 1.0)


def test_a_view_change_ends_the_round(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_ROUNDS, 2, num_samples=40, round_steps=3)
    stage.dispatch_ahead()
    assert stage.dispatch_ahead(pause=True) == [("worker-0", "rest"), ("worker-1", "rest")]
    assert stage.dispatch_ahead(pause=True) == [], "once"
    for step in (1, 2):
        for part in (0, 1):
            stage.done(f"worker-{part}", step, part)
    assert stage.dispatcher.idle
    stage.seat("worker-0", "worker-1", "worker-2")
    assert stage.dispatch_ahead(pause=True) == [], "no round is open"


def test_what_a_dead_worker_had_not_averaged_is_dispatched_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IN_ROUNDS, 2, num_samples=40, round_steps=3)
    stage.dispatch_ahead()
    stage.dispatcher.add("worker-0", row(1, 0, 1.0))
    stage.dispatcher.add("worker-1", row(1, 1, 1.0))  # it knew of the average, and no other did
    stage.dispatcher.mark_applied({(1, 0): None})
    (step,) = stage.dispatcher.committed()
    assert (step.event.samples, step.event.shares) == (2, {"worker-0": ((0, 2),)})
    assert step.lost == ((2, 4),)
    assert stage.seat("worker-0") == 1
    stage.dispatch_ahead()
    (_, order), *_ = stage.told
    assert order.portions == [Portion(2, 0, 4, ((2, 6),), 0, 1.0, 0)]


def test_a_checkpoint_with_lost_samples_is_void(tmp_path: Path) -> None:
    """Its writer had averaged the weights, had written them, and died before any other had averaged."""
    stage = Stage(tmp_path, IN_ROUNDS, 2, num_samples=40, round_steps=2, checkpoint_every=2)
    stage.dispatch_ahead()
    stage.dispatcher.note_computed("worker-0", 2, 2.0)
    stage.dispatcher.note_computed("worker-1", 2, 2.0)
    assert ("worker-0", "checkpoint") in stage.dispatch_ahead()
    stage.saving("worker-0", 2)
    stage.checkpoint_tracker.written("worker-0", Saved(stage.view, 2, {}))
    stage.dispatcher.mark_applied({(1, 1): None, (2, 1): None})
    for _ in stage.dispatcher.committed():
        stage.checkpoint_tracker.commit_written(stage.training_plan)
    stage.seat("worker-1")
    assert ("worker-1", "checkpoint") in stage.dispatch_ahead()
    assert not checkpoints.steps(stage.run.path)


@pytest.mark.parametrize("uniform", [False, True])
def test_parts_of_an_evaluation_are_equal_if_forwards_must_be(
    tmp_path: Path, uniform: bool
) -> None:
    config = Lockstep(uniform=uniform)
    stage = Stage(tmp_path, config, 2, num_samples=8, batch_size=8, has_eval=True)
    for worker, samples in (("worker-0", 300), ("worker-1", 100)):
        stage.dispatcher.throughput.note(worker, samples, 2.0)
    stage.dispatch_ahead()
    told = list(stage.told)
    samples = {n: o.portions[0].samples for n, o in stage.told if isinstance(o, TrainOrder)}
    assert samples == {"worker-0": 6, "worker-1": 2}, "shares of a step follow the speed"
    stage.done("worker-0", 1, 0)
    stage.done("worker-1", 1, 1)
    stage.dispatch_ahead()
    orders = [o for _, o in told + stage.told if isinstance(o, EvaluateOrder)]
    parts = [tuple(end / order.part[2] for end in order.part[:2]) for order in orders]
    half = 0.5 if uniform else pytest.approx(0.75, abs=1e-3)
    assert parts == [(0, half), (half, 1)]
