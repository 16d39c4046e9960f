"""The contract of a strategy: how the members agree on the weights. In two halves.

The **config** is a frozen dataclass made from a spec such as `allreduce(bucket_mb=10)`: pure data that
the command line checks, the planner and the simulator read, and the run folder keeps. Its fields are
the spec's options.

The **learner** is what the config builds inside each worker. Its life:

    prepare(trainee, me)            once: keep what is trained
    load_state_dict(state)          when resuming
    repeat:
        on_view(view)               the membership is this now: find your peers
        settled(), placement()      what is in the weights, and where they lie, as on_view found it
        step(share) -> StepReport   many times; in lockstep every worker does the same steps,
                                    otherwise each does its own parts of them
        drain()                     before what follows: until every step so far is resolved
        eval_model()                the model to evaluate: what would be served
        state_dict()                what a checkpoint must hold besides model and optimizer
        rest()                      nothing is left to do before the others are done too
        interrupt()                 from another thread: the next view is coming
    close()                         leave the peers

A learner whose strategy goes on in place (`elastic`) raises ViewChanging out of whatever it waits for,
on_view too, while `me.view_changing`: a newer view has come than the one that it is in, or joins.
interrupt() is there to wake it up. What was not resolved by the end of on_view is forgotten.

A strategy never starts processes (cluster/) and never lays out bytes (wire/). A new one is one file,
one line in `strategies/registry.py` and one in the conformance suite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from manyhands.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from manyhands.compute.feed import Share
    from manyhands.compute.gradients import StepReport
    from manyhands.compute.train_state import TrainState
    from manyhands.hosts.view import Me, View

WHOLE = -1
"""In place of a part of a step: all of them."""


@dataclass(frozen=True)
class Strategy(ABC):
    """The config half. A field is an option of the spec; its docstring is its help."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line: how the members agree."""
    default_workers: ClassVar[int] = 2
    needs_coordinator: ClassVar[bool] = False
    """Its members find each other by way of the coordinator: not for `mh.join()`."""
    lockstep: ClassVar[bool] = True
    """Every worker does every step. Otherwise a step is cut into parts for whoever is free."""
    elastic: ClassVar[bool] = False
    """Training goes on in place when a member dies."""

    updates_whole_batches: ClassVar[bool] = True
    """An update is a whole global batch, so that a larger one makes fewer of them."""

    @property
    def shares_memory(self) -> bool:
        """Where it begins inside one host, it stays there: its members share that host's memory."""
        return False

    @property
    def can_shrink(self) -> bool:
        """A worker can be done without: nothing is at it alone."""
        return True

    def parts(self, workers: int) -> int:
        """How many parts a step is cut into, without lockstep."""
        return workers

    def servers_for(self, workers: int) -> int:
        """How many members are started beside the workers that only serve."""
        return 0

    def needs_keys(self, workers: int) -> bool:
        """Whether its members speak with each other over the network, and so need credentials."""
        return False

    def check(self, workers: int) -> None:
        """Refuse what can't work with so many workers, and say what would."""
        if workers < 1:
            raise SpecError(f"--workers {workers}: at least 1 worker is needed.")

    @abstractmethod
    def build(self) -> Learner:
        """The run-time half, inside a worker."""


class Learner(ABC):
    """The run-time half. Inside a worker, after torch is loaded."""

    train_state: TrainState
    me: Me

    def prepare(self, train_state: TrainState, me: Me) -> None:
        self.train_state = train_state
        self.me = me

    @abstractmethod
    def on_view(self, view: View) -> None: ...

    @abstractmethod
    def step(self, share: Share) -> StepReport: ...

    def settled(self) -> dict[str, Any] | None:
        """After on_view, and at the end: what is in the weights. `{"version": int, "applied": [[step,
        part, weight, loss], ...], "pushes": {worker: number since the start}}`.

        Recent parts, newest last, weight and loss where they are known; those of a whole step have the part
        WHOLE. None where another member says it, or nothing was lost.
        """
        return None

    @property
    def looks_ahead(self) -> bool:
        """Whether it makes use of the data of the step after the next."""
        return False

    def ahead(self, share: Share) -> None:
        """This share will be trained on after the next one."""
        return

    def rescued(self) -> StepReport | None:
        """After on_view: the report of a step that a view interrupted, and that is in the weights."""
        return None

    @property
    def catching_up(self) -> bool:
        """It takes part, and its weights are not those of the others yet: it can be given no samples."""
        return False

    @property
    def whole_steps(self) -> bool:
        """After on_view, without lockstep: cutting a step into parts for all workers is to no purpose."""
        return False

    def placement(self) -> str:
        """One line for people: where the weights lie. Empty where there is nothing to say."""
        return ""

    def drain(self) -> None:
        """Wait until every step so far is resolved."""
        return

    def rest(self) -> None:
        """All parts given to this worker are done, and no more come for a while."""
        return

    def interrupt(self) -> None:
        """From another thread: the next view is coming, so raise ViewChanging out of any wait."""
        return

    def eval_model(self) -> nn.Module:
        return self.train_state.model

    def add_up(self, value: float | Tensor) -> Tensor:
        """A number, or several, added up over the workers of the view."""
        import torch

        return torch.as_tensor(value, dtype=torch.float64)

    def collect(self) -> None:
        """Before a checkpoint, on the worker that writes it: bring the optimizer's state here."""
        return

    def transport(self) -> str:
        """What carries the gradients, for people."""
        return "none"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"{type(self).__name__} keeps no state and got {list(state)}"

    def close(self) -> None:
        return None
