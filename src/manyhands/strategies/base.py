"""The contract of a strategy: how the members agree on the weights. In two halves.

The **config** is a frozen dataclass made from a spec such as `allreduce(bucket_mb=10)`: pure data that
the command line checks, the planner and the simulator read, and the run folder keeps. Its fields are
the spec's options.

The **learner** is what the config builds inside each worker. Its life:

    prepare(trainee, me)            once: keep what is trained
    load_state_dict(state)          when resuming
    repeat:
        on_view(view)               the membership is this now: find your peers
        step(share) -> StepReport   many times; every member of the view does the same steps
        eval_model()                the model to evaluate: what would be served
        state_dict()                what a checkpoint must hold besides model and optimizer
    close()                         leave the peers

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

    from manyhands.cluster.view import Me, View
    from manyhands.train.feed import Share
    from manyhands.train.step import StepReport
    from manyhands.train.trainee import Trainee


@dataclass(frozen=True)
class Strategy(ABC):
    """The config half. A field is an option of the spec; its docstring is its help."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line: how the members agree."""
    default_workers: ClassVar[int] = 2
    needs_coordinator: ClassVar[bool] = False
    """Its members find each other by way of the coordinator: not for `mh.join()`."""

    def check(self, workers: int) -> None:
        """Refuse what can't work with so many workers, and say what would."""
        if workers < 1:
            raise SpecError(f"--workers {workers}: at least 1 worker is needed.")

    @abstractmethod
    def build(self) -> Learner:
        """The run-time half, inside a worker."""


class Learner(ABC):
    """The run-time half. Inside a worker, after torch is loaded."""

    trainee: Trainee
    me: Me

    def prepare(self, trainee: Trainee, me: Me) -> None:
        self.trainee = trainee
        self.me = me

    @abstractmethod
    def on_view(self, view: View) -> None: ...

    @abstractmethod
    def step(self, share: Share) -> StepReport: ...

    def eval_model(self) -> nn.Module:
        return self.trainee.model

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
