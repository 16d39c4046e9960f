"""The contract of a strategy: how the members agree on the weights. It has two halves.

The **config** (`Strategy`) is a frozen dataclass made from a spec such as `allreduce(bucket_mb=10)`. It is
pure data: the command line checks it, the planner reads it, and the run folder keeps it. Its fields are the
spec's options; `traits` has the facts about it that others need.

The **learner** (`Learner`) is what the config builds inside each worker. Its life:

    build(context)              once: the model, and what this member knows about itself
    wrap(model)                 lay the model out; its optimizer and schedule are built after this
    restore(states)             when resuming, and when a worker that leaves hands its state over
    repeat:
        on_view(view) -> Joined     the members have changed: connect to the peers
        step(share) -> StepReport   many times; in lockstep every worker does the same steps,
                                    otherwise each does its own parts of them
        drain()                     wait until every step so far is known to be in the weights or not;
                                    before the following calls
        eval_model()                a context with the model to evaluate
        snapshot() -> State         the learner's own state, for a checkpoint or a worker that stays
        rest()                      there is no more work until the others are done
        interrupt()                 from another thread: the next view is coming
    close()                     disconnect from the peers

While `me.view_changing` is true, a learner of an `elastic` strategy raises ViewChanging from every wait,
including on_view: there is a newer view than the one that it is in or is joining. interrupt() wakes it up.
After on_view, steps that are not known to be in the weights are discarded and done again.

A strategy never starts processes (hosts/) and never lays out bytes (transport/). To add one:

1. Write `strategies/NAME.py` with the config and the learner.
2. Add the config to `STRATEGIES` in `strategies/registry.py`; delete its name from `PLANNED`, if listed.
3. Add a case to `CASES` in `tests/strategies/test_conformance.py`.
4. Write a page in `docs/strategies/`. Its README explains an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from manyhands.costs import CostFacts, MemoryUse, Transfer
from manyhands.errors import SpecError
from manyhands.pairs import (
    ELASTIC,
    OWN_LOOP,
    ROW_MODEL,
    SERVERS,
    SHRINKING,
    TABLES,
    Unsupported,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from manyhands.collectives.group import Group
    from manyhands.compute.feed import Share
    from manyhands.compute.gradients import DeviceTime
    from manyhands.compute.measures import Logged
    from manyhands.compute.train_state import TrainState
    from manyhands.hosts.me import Me
    from manyhands.hosts.view import View

WHOLE = -1
"""Part number that stands for all parts of a step."""

State = Mapping[str, Any]
"""Tensors and plain values by name, nested as needed: what a checkpoint can hold (runs/safe_reader.py)."""


@dataclass(frozen=True)
class Traits:
    """Facts about a strategy with its options. Each is declared once, in the config's `traits`."""

    default_workers: int = 2
    """Number of workers, unless the user says otherwise."""
    lockstep: bool = True
    """If true, every worker does every step. Otherwise steps are cut into parts, and free workers take
    them."""
    round_steps: int | None = None
    """Steps of a round, in lockstep: each worker trains weights of its own, and a round makes them one. It
    ends after each step whose number is a multiple of this, and in `drain`. Only then are its steps in the
    weights; those of a dead worker are not. None: each step is in the weights of all workers at its end."""
    elastic: bool = False
    """If true, the survivors of a death keep their processes and weights, and training continues."""
    can_shrink: bool = True
    """If true, the job can shrink: no worker is the only holder of any weights."""
    holds_state: bool = False
    """If true, each worker holds state that no other has. Every worker writes its own to a checkpoint, and a
    worker that leaves a live run (`manyhands scale`) sends its own to another one, if the learner returns
    `Joined.group`. That of a worker that dies is lost; one that joins has none."""
    equals_single: bool = True
    """If true, the weights are those of one worker with the same batches, up to the order of sums."""
    shares_memory: bool = False
    """If true, members share the memory of one host, and a run that starts inside a host stays there."""
    wraps: bool = False
    """If true, `Learner.wrap` lays the model out over the workers of a view, in each view, always with a new
    model. Otherwise everything is built before the first view, and `wrap` does nothing."""
    uniform: bool = False
    """If true, all workers make equally many forwards: equal numbers of micro-batches in a step, and of
    batches in an evaluation. What a worker lacks are samples of weight 0."""
    dedicated_servers: bool = False
    """If true, the options `placement=dedicated, servers=N` add members that only serve."""


@dataclass(frozen=True)
class Strategy(ABC):
    """The config half. Each field is an option of the spec, and its docstring is the option's help."""

    name: ClassVar[str]
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Options that change what the strategy works with: the table of pairs shows what differs from the
    defaults."""

    @property
    def traits(self) -> Traits:
        """The facts about this strategy with these options."""
        return Traits()

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        """Features that don't work with these options, with reasons. These follow from the traits; a subclass
        adds its own."""
        traits = self.traits
        found = []
        if not traits.elastic:
            why = "its workers restart from the last checkpoint if one dies"
            found += [Unsupported(ELASTIC, why), Unsupported(SHRINKING, why)]
        elif not traits.can_shrink:
            found.append(Unsupported(SHRINKING, "each worker holds state that no other has"))
        if not traits.dedicated_servers:
            found.append(Unsupported(SERVERS, "it has no servers", instead="ps:async"))
        if traits.wraps:
            why = "it lays the model out before the optimizer is built, and prepare() gets both"
            found.append(Unsupported(OWN_LOOP, why))
        if traits.uniform:
            why = "samples of weight 0, which make its shares equal, would look up rows"
            found += [Unsupported(TABLES, why), Unsupported(ROW_MODEL, why)]
        return tuple(found)

    def check(self, workers: int) -> None:
        """Raise SpecError, with a remedy, if the strategy can't work with this number of workers."""
        if workers < 1:
            raise SpecError(f"--workers {workers}: at least 1 worker is needed.")
        if (fit := self.refit(workers)) != workers:
            size = self.replica_size(workers)
            raise SpecError(
                f"--workers {workers}: {self.name} trains with whole replicas of {size} workers. Use a "
                f"multiple:  --workers {fit or size}"
            )

    def check_length(self, steps: int) -> None:
        """Raise SpecError, with a remedy, if the strategy can't work with so few steps of training."""
        return

    def parts(self, workers: int) -> int:
        """Return how many parts a step is cut into, without lockstep."""
        return workers

    def replica_size(self, workers: int) -> int:
        """Return how many workers hold one copy of the model together (`View.replicas`), if there are this
        many. In lockstep only: all workers of a replica get the same samples and random seed in each step,
        and the same part of an evaluation."""
        return 1

    def servers_for(self, workers: int) -> int:
        """Return the number of dedicated servers."""
        return 0

    def needs_keys(self, workers: int) -> bool:
        """If true, members connect to each other over the network and need credentials."""
        return False

    def refit(self, workers: int) -> int:
        """Return the largest number of workers that a view can have, out of this many; 0 if it needs more.
        The others stand by: alive, without samples, the first to be used when a worker dies."""
        return workers - workers % self.replica_size(workers)

    def traffic(self, facts: CostFacts, view: View) -> Sequence[Transfer] | None:
        """Return what one step sends from member to member; None if the strategy does not compute it. Pure,
        without torch. The members of the view may be made up."""
        return None

    def memory(self, facts: CostFacts) -> Sequence[MemoryUse] | None:
        """Return the memory of members by purpose, without that of a process that has no model; None if the
        strategy does not compute it. Pure, without torch."""
        return None

    @abstractmethod
    def build(self, context: Context) -> Learner:
        """Create the run-time half, inside a worker."""

    def build_server(self, context: Context) -> DedicatedServer:
        """Create a dedicated server, in a process of its own, if `servers_for` asks for any."""
        raise AssertionError(f"{self.name} has no dedicated servers")


@dataclass(frozen=True)
class Context:
    """What a learner or a dedicated server is built from."""

    train_state: TrainState
    """The model and its loss. The optimizer is built after `Learner.wrap`, and before the first `on_view`."""
    me: Me
    """This member: its view, its peers, and how it reaches them."""


@dataclass(frozen=True)
class AppliedPart:
    """A part of a step, or of several steps in a row, that is in the weights."""

    as_list: ClassVar[bool] = True

    step: int
    part: int
    """WHOLE stands for all parts of the step."""
    sums: tuple[float, float] | None = None
    """Its weight and its weighted loss, where they are known."""
    num_steps: int = 1
    """Number of steps in a row of which it is this part, `step` included."""

    @property
    def steps(self) -> range:
        return range(self.step, self.step + self.num_steps)

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"step {self.step} is negative")
        if self.num_steps < 1 or (self.num_steps > 1 and self.sums is not None):
            raise ValueError(f"it is a part of {self.num_steps} steps, with the sums {self.sums}")
        if self.sums is not None and not 0 <= self.sums[0] <= 1e300:
            raise ValueError(f"{self.sums[0]} is not a weight")


@dataclass(frozen=True)
class AppliedSteps:
    """What is in the weights, as one member knows it."""

    version: int
    """The newest version of the weights."""
    parts: list[AppliedPart] = field(default_factory=list)
    """Recent parts, newest last. In a training in rounds, only these are in the weights, of all steps that
    are not committed."""
    pushes: Mapping[str, int] = field(default_factory=dict)
    """Number of updates that each worker has sent since the start, where workers send their own."""

    def __post_init__(self) -> None:
        if self.version < 0 or any(number < 0 for number in self.pushes.values()):
            raise ValueError("a count is negative")


@dataclass(frozen=True)
class Joined:
    """What a member found when it joined a view."""

    transport: str = "none"
    """Transport of the gradients, as shown on the console."""
    placement: str = ""
    """One line about which member holds which weights."""
    applied: AppliedSteps | None = None
    """What is in the weights; None if another member reports it, or nothing was lost."""
    rescued: StepReport | None = None
    """This worker's report of a step that was interrupted, if the step is in the weights after all."""
    catching_up: bool = False
    """If true, this worker takes part without samples: its weights are not those of the others yet. It has
    them after the step whose report says `caught_up`, or after `drain`."""
    whole_steps: bool = False
    """If true, and without lockstep, a worker gets whole steps instead of parts."""
    prefetches: bool = False
    """If true, `prefetch` is called with the share after the next one."""
    group: Group | None = None
    """The group of the view's workers, if they form one. `Hands.mean` of `mh.join()` uses it, and a worker
    that leaves sends its state through it (`Traits.holds_state`); without a group that state is lost."""


@dataclass(slots=True)
class StepReport:
    """A learner's report of one step."""

    step: int
    samples: int
    weight: float | Tensor
    """Weight of this worker's part in the mean of the step. In a replica of several workers, the weight, loss
    and logged measures of the first one count."""
    loss: float | Tensor
    """Weighted sum of the losses of this worker's part. May be on a device: reading it waits."""
    lr: float
    step_s: float = 0.0
    """Time since the end of the previous step, including data if the loop loads it."""
    compute_s: float | DeviceTime | None = None
    wait_s: float | None = None
    """Time waited for other members; None on a GPU, where the host's clock can't tell."""
    waited_for: str = ""
    """The server that it waited for longest, where a wait has a server; in lockstep, the worker that all
    waited for follows from the times."""
    bytes_sent: int = 0
    """Bytes that this worker sent over the network since its report before."""
    part: int = 0
    """Index of the part; in lockstep, that of this worker's replica."""
    staleness: int = 0
    """Updates of others between reading the weights and changing them."""
    dropped: bool = False
    """If true, the part is not in the weights and is computed again."""
    caught_up: bool = False
    """If true, this worker has the weights of the others from this step on."""
    logged: Logged = field(default_factory=list)
    """Measures that the job logged."""
    measures: dict[str, float | Tensor] = field(default_factory=dict)
    """Values of registered measures, by name, that the learner adds. They may be on a device."""
    resolved: bool = True
    """False until it is known whether the part is in the weights; a learner may set it from any thread,
    as the last thing it sets."""

    @property
    def mean_loss(self) -> float:
        """Mean loss of this worker's part; 0 if it was empty."""
        return float(self.loss) / float(self.weight) if self.weight else 0.0


class Learner(ABC):
    """The run-time half, inside a worker, after torch is loaded."""

    def __init__(self, context: Context) -> None:
        self.train_state = context.train_state
        self.me = context.me

    def wrap(self, model: nn.Module) -> nn.Module:
        """Lay the model out over the workers of `me.view`, which is about to be joined. Returns the model to
        build the optimizer for.

        Called only if `Traits.wraps` is true. The optimizer, the schedule and, in the first view, the weights
        of a checkpoint follow; then on_view. In a later view model and optimizer are new: on_view brings the
        weights, or raises WeightsLost.

        Torch's own layouts (fully_shard, DTensor) take the mesh of the view's group (`Group.device_mesh`).
        Their tensors are saved whole, under the model's own names, and loaded in any layout: all workers take
        part in saving, and the first one writes.
        """
        return model

    @abstractmethod
    def on_view(self, view: View) -> Joined:
        """Disconnect from the peers of the last view, if any, and connect to those of this one.

        On return, this worker can do the next step with its peers: it has the same weights as they, unless
        `catching_up` is true, and `applied` and `rescued` tell whether an interrupted step is in them.

        Raises ViewChanging if a newer view is coming (`elastic` only): on_view is called again with that one.
        Raises PeerLost if a peer is gone and no view follows, and WeightsLost if no member has all of the
        weights: the run then restarts from a checkpoint.
        """

    @abstractmethod
    def step(self, share: Share) -> StepReport:
        """Compute the gradients of the share, agree with the peers, and update the weights.

        On return in lockstep, the weights that the next step reads contain this step. Without lockstep, and
        in a training in rounds, the report has `resolved=False` until it is known whether the part is in the
        weights of all workers.

        Raises ViewChanging (`elastic` only) or PeerLost if a peer is gone; a LinkError counts as a lost peer,
        too. The step may then be in the weights of some workers: the next on_view finds out.
        """

    def prefetch(self, share: Share) -> None:
        """Prepare for a share that will be trained on after the next one."""
        return

    def drain(self) -> None:
        """Wait until every step so far is known to be in the weights or not, and this worker has the weights
        of the others. Ends a round that has begun: in lockstep, all workers call it after the same step."""
        return

    def rest(self) -> None:
        """Called when all parts of this worker are done and no more come for a while."""
        return

    def interrupt(self) -> None:
        """Make any wait raise ViewChanging: the next view is coming. Called from another thread."""
        return

    @contextmanager
    def eval_model(self) -> Iterator[nn.Module]:
        """Return a context with the model to evaluate. After it, the model has the weights that it trains,
        also if the evaluation is interrupted: give them back in a `finally`."""
        yield self.train_state.model

    def snapshot(self) -> State:
        """Bring model and optimizer up to date for a checkpoint, and return the state that the learner keeps
        besides them.

        Called on the first worker, which writes the weights. With `Traits.holds_state` it is called on every
        worker, and also on a single one that is about to leave, so it must not wait for peers.
        """
        return {}

    def restore(self, states: Sequence[State]) -> None:
        """Take over what `snapshot` returned on one or more workers. Not called if there is nothing to take
        over.

        All workers get the state of the first one. With `Traits.holds_state` each state goes to one worker
        instead: when resuming on fewer workers some get several, on more some get none. Later, a worker gets
        that of one that has left, just before `on_view` with the first view without it, and has a state of
        its own by then: it adds up, merges or appends.
        """
        names = [name for state in states for name in state]
        raise AssertionError(f"{type(self).__name__} keeps no state and got {names}")

    def close(self) -> AppliedSteps | None:
        """Disconnect from the peers. Returns what is in the weights at the end, if this member knows.

        Also called when this worker is to stand by: on_view follows if it is needed again, and the weights of
        the others have changed by then.
        """
        return None


class DedicatedServer(ABC):
    """The run-time half of a member that only serves."""

    @abstractmethod
    def on_view(self, view: View) -> Joined:
        """Serve the members of this view instead of those of the last; raises as `Learner.on_view`."""

    @property
    def num_updates(self) -> int:
        """Number of updates that it has applied."""
        return 0

    @abstractmethod
    def check(self) -> None:
        """Raise the error of a thread that serves, if one has failed. Called a few times a second."""

    @abstractmethod
    def close(self) -> AppliedSteps | None:
        """Stop serving. Returns what is in the weights at the end, if this member knows."""
