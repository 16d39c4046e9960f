"""Local SGD: what it refuses and costs, and that an average that is interrupted leaves nothing half done."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.collectives import join
from manyhands.collectives.group import Group
from manyhands.compute.feed import Share
from manyhands.compute.train_state import TrainState
from manyhands.contract import WHOLE, AppliedPart, Context
from manyhands.costs import CostFacts, ModelSize, ParameterSize, known_bytes
from manyhands.errors import SpecError, ViewChanging
from manyhands.hosts.me import Me
from manyhands.hosts.view import Seat, View
from manyhands.pairs import OWN_LOOP, TABLES
from manyhands.strategies import local
from manyhands.strategies.local import Local, LocalLearner
from manyhands.strategies.pairs import check_pairs
from manyhands.strategies.registry import make_strategy
from manyhands.testing import in_process
from manyhands.testing.conformance import Case
from manyhands.testing.counting import COUNTING, Counting, check_round_counts
from manyhands.testing.thread_group import ThreadWorld
from manyhands.testing.thread_members import COMPUTE, Death
from manyhands.threads import start_thread

# What it refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("local(every=0)", r"at least 1, and is 0\. Use  --strategy 'local\(every=8\)'"),
        ("local(every=-3)", "at least 1, and is -3"),
        ("local(moments=halve)", "moments must be keep or average or reset, and is 'halve'"),
        ("local(H=3)", "local has no option 'H'. Its options: every, moments"),
        ("localsgd", "it is called 'local' here. Type  --strategy local"),
    ],
)
def test_bad_options_are_refused_with_what_to_type(spec: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make_strategy(spec).check(2)


def test_a_round_longer_than_the_training_is_refused() -> None:
    Local(every=21).check_length(21)
    with pytest.raises(SpecError, match=r"training has 21 steps.* 'local\(every=2\)'"):
        Local(every=22).check_length(21)


def test_tables_and_own_loops_are_refused_with_the_nearest_strategy() -> None:
    with pytest.raises(SpecError, match="rows of tables are not among them"):
        check_pairs(Local(), {TABLES: "a model with sparse tables (users)"}, workers=2)
    with pytest.raises(SpecError, match=r"weights differ.* mh.join\(\"allreduce\"\)"):
        check_pairs(Local(), {OWN_LOOP: "mh.join()"}, workers=2)


# What it costs ------------------------------------------------------------------------------------


def test_a_round_costs_as_much_as_a_step_of_allreduce() -> None:
    weight = ParameterSize("weight", (1000, 1000), "float32", 4, state_bytes=4_000_000)
    model = ModelSize((weight,), buffers={"float32": 800, "int64": 80})
    view = View(1, tuple(Seat(f"worker-{n}", "here") for n in range(4)))
    facts = CostFacts(model, workers=4)
    step = known_bytes(make_strategy("allreduce").traffic(facts, view) or ())
    rounds = {
        spec: known_bytes(make_strategy(spec).traffic(facts, view) or ())
        for spec in ("local(every=1)", "local(every=10)", "local(every=10,moments=average)")
    }
    assert rounds["local(every=1)"] == pytest.approx(step, rel=0.01)
    assert rounds["local(every=10)"] == pytest.approx(step / 10, rel=0.01)
    assert rounds["local(every=10,moments=average)"] == pytest.approx(step / 5, rel=0.01)


# Averages that are interrupted --------------------------------------------------------------------


class Workers:
    """Learners in threads, each with weights that count what it has trained on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
        self._folder = folder
        self._groups: dict[str, Group] = {}
        self._number = 0
        monkeypatch.setattr(join, "join_group", lambda me, view, transport: self._groups[me.name])
        self.learners = {name: self._learner(name) for name in names}
        self.views(names)

    def _learner(self, name: str) -> LocalLearner:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        state = TrainState(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            loss=lambda model, batch: (model(batch) * -1.0).mean(),
        )
        seats = (Seat(name, "here"),)
        me = Me(name, "here", "cpu", self._folder, View(1, seats), board=_NoBoard())
        return LocalLearner(Local(every=4), Context(state, me))

    def views(self, names: list[str], *, breaks: str = "", after: int = 0) -> dict[str, Any]:
        """Bring these workers into a view. `breaks`: a worker whose operation number `after` fails."""
        self._number += 1
        view = View(self._number, tuple(Seat(name, "here") for name in names))
        world = ThreadWorld(len(names))
        for name, group in zip(names, world.groups(), strict=True):
            self._groups[name] = _Breaking(group, after) if name == breaks else group

        def enter(name: str) -> Any:
            learner = self.learners[name]
            learner.me.view = view
            learner.me.newest_view = view.number + bool(breaks)
            return learner.on_view(view)

        return self.together(names, enter, world)

    def together(
        self, names: list[str], act: Any, world: ThreadWorld | None = None
    ) -> dict[str, Any]:
        """Let these workers act at the same time. Those that a break stops have no result."""
        found: dict[str, Any] = {}

        def run(name: str) -> None:
            try:
                found[name] = act(name)
            except ViewChanging:
                if world is not None:
                    world.cut()

        threads = [start_thread(run, n, name=n, on_error=lambda e: None) for n in names]
        for thread in threads:
            thread.join()
        return found

    def step(self, name: str, step: int, samples: int, *, part: int) -> None:
        """Move the weight of this worker by 1."""
        batch = torch.ones(max(samples, 1), 1)
        share = Share(step, 0, samples, 12, [(batch, samples)], part)
        self.learners[name].step(share)

    def weight(self, name: str) -> float:
        return float(next(self.learners[name].train_state.model.parameters()).detach())

    def applied(self, name: str) -> set[tuple[int, int]]:
        return keys(self.learners[name]._applied)


def keys(parts: Iterable[AppliedPart]) -> set[tuple[int, int]]:
    return {(step, each.part) for each in parts for step in each.steps}


class _NoBoard:
    """A coordinator whose next view is always there."""

    def post(self, key: str, value: str) -> None: ...
    def fetch(self, key: str, *, timeout_s: float) -> str:
        raise AssertionError

    def send(self, message: object) -> None: ...


class _Breaking(Group):
    """A group that fails one worker in its operation number `after`, when the others are through."""

    def __init__(self, group: Group, after: int) -> None:
        super().__init__(rank=group.rank, size=group.size)
        self._group, self._left = group, after

    def __getattribute__(self, name: str) -> Any:
        if name in ("all_reduce", "all_gather", "broadcast"):
            operation = getattr(object.__getattribute__(self, "_group"), name)

            def call(*args: Any, **kwargs: Any) -> Any:
                self._left -= 1
                kept = [tensor.clone() for tensor in args if isinstance(tensor, Tensor)]
                result = operation(*args, **kwargs)
                if self._left < 0:
                    for tensor, before in zip(args, kept, strict=False):
                        tensor.copy_(before)
                    raise ViewChanging("it is over")
                return result

            return call
        return super().__getattribute__(name)

    def describe(self) -> str:
        return "broken"

    def cut(self) -> None: ...
    def close(self) -> None: ...
    def _all_reduce(self, tensor: Any, op: Any) -> Any: ...
    def _reduce_scatter(self, tensor: Any, into: Any, op: Any) -> Any: ...
    def _all_gather(self, tensor: Any, into: Any) -> Any: ...
    def _all_to_all(self, tensor: Any, into: Any, sent: Any, received: Any) -> Any: ...
    def _broadcast(self, tensor: Any, source: int) -> Any: ...
    def _send(self, tensor: Any, to: int, tag: int) -> Any: ...
    def _recv(self, tensor: Any, source: int, tag: int) -> Any: ...
    def _split(self, ranks: list[int]) -> Any: ...


NAMES = ["a", "b", "c"]


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(tmp_path, monkeypatch, NAMES)


def test_survivors_average_what_they_have(workers: Workers) -> None:
    for step in (1, 2):
        workers.step("a", step, 6, part=0)
    workers.step("b", 1, 4, part=1)
    workers.step("c", 1, 2, part=2)
    joined = workers.views(["a", "b"])
    # a has moved by 2 with 12 samples, b by 1 with 4.
    assert workers.weight("a") == workers.weight("b") == pytest.approx((2 * 12 + 1 * 4) / 16)
    for name in ("a", "b"):
        assert keys(joined[name].applied.parts) == {(1, 0), (2, 0), (1, 1)}
        assert joined[name].applied.version == 2


def test_an_empty_share_does_not_count(workers: Workers) -> None:
    def step(name: str) -> None:
        for number in range(1, 5):
            workers.step(name, number, 0 if name == "c" else 6, part=NAMES.index(name))

    workers.together(NAMES, step)
    assert [workers.weight(name) for name in NAMES] == [4.0, 4.0, 4.0]
    assert workers.applied("c") == {(number, WHOLE) for number in range(1, 5)}


@pytest.mark.parametrize("after", range(5))
def test_one_that_misses_an_average_takes_the_weights_of_the_others(
    workers: Workers, after: int
) -> None:
    """The view is interrupted for c, wherever that is, and then a dies: b knows what a had done."""
    for name, steps in (("a", 2), ("b", 1), ("c", 1)):
        for step in range(1, steps + 1):
            workers.step(name, step, 4, part=NAMES.index(name))
    joined = workers.views(NAMES, breaks="c", after=after)
    through = "b" in joined
    assert "c" not in joined
    workers.views(["b", "c"])
    assert workers.weight("b") == workers.weight("c")
    if through:  # the average of all three: what a had done is in it
        assert workers.weight("c") == pytest.approx((2 * 8 + 4 + 4) / 16)
        assert workers.applied("b") == workers.applied("c") == {(1, 0), (2, 0), (1, 1), (1, 2)}
    else:
        assert workers.weight("c") == 1.0
        assert workers.applied("b") == workers.applied("c") == {(1, 1), (1, 2)}
    assert {workers.learners[name]._version for name in "bc"} == {2 if through else 1}


def test_a_new_worker_gets_the_weights_and_does_not_count(workers: Workers) -> None:
    for name in NAMES:
        workers.step(name, 1, 4, part=NAMES.index(name))
    workers.learners["d"] = workers._learner("d")
    nn.init.constant_(workers.learners["d"].train_state.model.weight, 100.0)  # type: ignore[arg-type]
    workers.views([*NAMES, "d"])
    assert {workers.weight(name) for name in "abcd"} == {1.0}
    assert workers.applied("d") == workers.applied("a")


def moments(learner: LocalLearner) -> list[Any]:
    return [dict(state) for state in learner.train_state.optimizer.state.values()]


def test_moments_of_one_that_leaves_do_not_replace_those_of_one_that_stays(
    workers: Workers,
) -> None:
    for number, name in enumerate(NAMES):
        optimizer = workers.learners[name].train_state.optimizer
        (parameter,) = optimizer.param_groups[0]["params"]
        optimizer.state[parameter]["momentum_buffer"] = torch.full((1, 1), float(number))
    sent = workers.learners["c"].snapshot()
    workers.learners["b"].restore([sent])
    assert moments(workers.learners["b"]) == [{"momentum_buffer": torch.ones(1, 1)}]
    resumed = workers._learner("d")  # it has not been in a view
    resumed.restore([sent])
    assert moments(resumed) == [{"momentum_buffer": torch.full((1, 1), 2.0)}]


def test_losses_of_a_whole_round_are_known_to_all(workers: Workers) -> None:
    threads = threading.active_count()

    def step(name: str) -> None:
        for number in range(1, 5):
            workers.step(name, number, 4, part=NAMES.index(name))

    workers.together(NAMES, step)
    last = workers.learners["b"]._applied[-1]
    assert last == AppliedPart(4, WHOLE, (12.0, -36.0)), "each loss is -3, of 12 samples in all"
    assert threading.active_count() <= threads


# What is in the weights ---------------------------------------------------------------------------


def test_all_parts_of_an_interrupted_round_are_told(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a round has steps, and in few entries."""
    monkeypatch.setattr(local, "LATEST", 0)
    workers.learners |= {name: workers._learner(name) for name in "def"}
    workers.views([*"abcdef"])
    for name in "abcdef":
        for step in (1, 2, 3):
            workers.step(name, step, 4, part="abcdef".index(name))
    joined = workers.views([*"abcde"])
    told = joined["a"].applied.parts
    assert keys(told) == {(step, part) for step in (1, 2, 3) for part in range(5)}
    assert len(told) == 5


def test_parts_of_old_steps_are_forgotten(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those of two rounds and the latest steps."""
    monkeypatch.setattr(local, "LATEST", 2)
    for name in NAMES:
        workers.step(name, 1, 4, part=NAMES.index(name))
    workers.views(NAMES)
    assert workers.applied("a") == {(1, part) for part in range(3)}

    def step(name: str) -> None:
        for number in range(2, 17):
            workers.step(name, number, 4, part=NAMES.index(name))

    workers.together(NAMES, step)
    assert workers.applied("a") == {(number, WHOLE) for number in range(16 - 2 - 2 * 4 + 1, 17)}


def test_no_sample_comes_again_that_is_in_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The survivors of a death late in a round have more parts in the weights than two rounds have steps."""
    monkeypatch.setattr(local, "LATEST", 0)
    every, fields = 20, {"batch_size": 4, "tables": False}
    death = Death("worker-3", step=18, moment=COMPUTE)
    case = Case(f"local(every={every})", workers=4, in_process=True)
    with in_process.folder_in_memory() as folder:
        done = case.train(COUNTING, folder / "run", deaths=[death], **fields)
        assert len(done.of("MemberLost")) == 1
        job = Counting(**fields)
        check_round_counts(done.state(), done.events, round_steps=every, job=job)
