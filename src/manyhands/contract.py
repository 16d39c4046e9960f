"""The contract of a strategy: how the members agree on the weights. It has two halves.

The **config** is a frozen dataclass made from a spec such as `allreduce(bucket_mb=10)`. It is pure data: the
command line checks it, the planner reads it, and the run folder keeps it. Its fields are the spec's options.

The **learner** is what the config builds inside each worker. Its life:

    prepare(train_state, me)        once: keep the model and its optimizer
    load_state_dict(state)          when resuming
    repeat:
        on_view(view)               the members have changed: connect to the peers
        settled(), placement()      which steps are in the weights, and where the weights are, after on_view
        step(share) -> StepReport   many times; in lockstep every worker does the same steps,
                                    otherwise each does its own parts of them
        drain()                     wait until every step so far is known to be in the weights or not;
                                    before the following calls
        eval_model()                return the model to evaluate
        state_dict()                return the learner's own state, for a checkpoint
        rest()                      there is no more work until the others are done
        interrupt()                 from another thread: the next view is coming
    close()                         disconnect from the peers

While `me.view_changing` is true, a learner of an `elastic` strategy raises ViewChanging from every wait,
including on_view: there is a newer view than the one that it is in or is joining. interrupt() wakes it up.
After on_view, steps that are not known to be in the weights are discarded and done again.

A strategy never starts processes (hosts/) and never lays out bytes (transport/). To add one:

1. Write `strategies/NAME.py` with the config and the learner.
2. Add the config to `STRATEGIES` in `strategies/registry.py`; delete its name from `PLANNED`, if listed.
3. Add a case to `CASES` in `tests/strategies/test_conformance.py`.
4. Write a page in `docs/strategies/`. Its README has a complete example.
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
    from manyhands.hosts.me import Me
    from manyhands.hosts.view import View

WHOLE = -1
"""As a part: all parts of a step."""


@dataclass(frozen=True)
class Strategy(ABC):
    """The config half. Each field is an option of the spec, and its docstring is the option's help."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line: how the members agree."""
    default_workers: ClassVar[int] = 2
    needs_coordinator: ClassVar[bool] = False
    """If true, members find each other through the coordinator, so `mh.join()` refuses the strategy."""
    lockstep: ClassVar[bool] = True
    """If true, every worker does every step. Otherwise steps are cut into parts, and free workers take
    them."""
    elastic: ClassVar[bool] = False
    """If true, the survivors of a death keep their processes and weights, and training continues."""

    updates_whole_batches: ClassVar[bool] = True
    """If true, an update is made of a whole global batch, so a larger batch means fewer updates."""

    @property
    def shares_memory(self) -> bool:
        """If true, members share the memory of one host, and a run that starts inside a host stays there."""
        return False

    @property
    def can_shrink(self) -> bool:
        """If true, the job can shrink: no worker is the only holder of any state."""
        return True

    def parts(self, workers: int) -> int:
        """Return how many parts a step is cut into, without lockstep."""
        return workers

    def servers_for(self, workers: int) -> int:
        """Return the number of dedicated servers."""
        return 0

    def needs_keys(self, workers: int) -> bool:
        """If true, members connect to each other over the network and need credentials."""
        return False

    def check(self, workers: int) -> None:
        """Raise SpecError, with a remedy, if the strategy can't work with this number of workers."""
        if workers < 1:
            raise SpecError(f"--workers {workers}: at least 1 worker is needed.")

    @abstractmethod
    def build(self) -> Learner:
        """Create the run-time half, inside a worker."""


class Learner(ABC):
    """The run-time half, inside a worker, after torch is loaded."""

    train_state: TrainState
    me: Me

    def prepare(self, train_state: TrainState, me: Me) -> None:
        self.train_state = train_state
        self.me = me

    @abstractmethod
    def on_view(self, view: View) -> None:
        """Disconnect from the peers of the last view, if any, and connect to those of this one.

        On return, this worker can do the next step with its peers: it has the same weights as they, unless
        `catching_up` is true, and `settled` and `rescued` report whether an interrupted step is in them.

        Raises ViewChanging if a newer view is coming (`elastic` only): on_view is called again with that one.
        Raises PeerLost if a peer is gone and no view follows, and WeightsLost if no member has all of the
        weights: the run then restarts from a checkpoint.
        """

    @abstractmethod
    def step(self, share: Share) -> StepReport:
        """Compute the gradients of the share, agree with the peers, and update the weights.

        On return in lockstep, the weights that the next step reads contain this step. Without lockstep, the
        report has `resolved=False` until it is known whether the part is in the weights.

        Raises ViewChanging (`elastic` only) or PeerLost if a peer is gone; a LinkError counts as a lost peer,
        too. The step may then be in the weights of some workers: the next on_view finds out.
        """

    def settled(self) -> dict[str, Any] | None:
        """Return what is in the weights, after on_view and at the end: `{"version": int, "applied": [[step,
        part, weight, loss], ...], "pushes": {worker: number since the start}}`.

        `applied` has recent parts, newest last, with weight and loss where they are known; those of a whole
        step have the part WHOLE. None if another member reports it, or nothing was lost.
        """
        return None

    @property
    def looks_ahead(self) -> bool:
        """If true, `ahead` is called with the share after the next one."""
        return False

    def ahead(self, share: Share) -> None:
        """Prepare for a share that will be trained on after the next one."""
        return

    def rescued(self) -> StepReport | None:
        """Return, after on_view, the report of a step that was interrupted and is in the weights all the
        same."""
        return None

    @property
    def catching_up(self) -> bool:
        """If true, this worker takes part without samples: its weights are not those of the others yet."""
        return False

    @property
    def whole_steps(self) -> bool:
        """If true, after on_view and without lockstep, a worker gets whole steps instead of parts."""
        return False

    def placement(self) -> str:
        """Return one line about which member holds which weights; may be empty."""
        return ""

    def drain(self) -> None:
        """Wait until every step so far is known to be in the weights or not."""
        return

    def rest(self) -> None:
        """Called when all parts of this worker are done and no more come for a while."""
        return

    def interrupt(self) -> None:
        """Make any wait raise ViewChanging: the next view is coming. Called from another thread."""
        return

    def eval_model(self) -> nn.Module:
        return self.train_state.model

    def add_up(self, value: float | Tensor) -> Tensor:
        """Return the sum of a number, or of each number of a tensor, over the workers of the view.

        Override it if there can be more than one worker: the default is the sum over this worker alone.
        """
        import torch

        return torch.as_tensor(value, dtype=torch.float64)

    def collect(self) -> None:
        """Fetch the optimizer's state before a checkpoint. Called on the worker that writes it."""
        return

    def transport(self) -> str:
        """Return the transport of the gradients, as shown on the console."""
        return "none"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"{type(self).__name__} keeps no state and got {list(state)}"

    def close(self) -> None:
        return None
