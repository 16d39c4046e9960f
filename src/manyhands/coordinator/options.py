"""How a job is trained, apart from what the job says; of the strategy, what the coordinator must know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.coordinator.bad_steps import MAX_BAD_STEPS
from manyhands.coordinator.batch_scaling import FIXED, Scaling
from manyhands.coordinator.fault_spec import FaultSpec
from manyhands.coordinator.stuck import STUCK_AFTER_S


@dataclass(frozen=True)
class Manner:
    """What the coordinator must know of a strategy, whose code it does not load."""

    lockstep: bool = True
    """Every worker does every step. Otherwise a step is cut into parts for whoever is free."""
    parts: Callable[[int], int] = lambda workers: workers
    """How many parts a step is cut into among so many workers, without lockstep."""
    elastic: bool = False
    """Training goes on in place when a member dies."""
    can_shrink: bool = True
    """A worker can be done without: nothing is at it alone."""
    drops_samples: bool = False
    """Samples of a step may be left out, and come back."""
    servers: int = 0
    """Members beside the workers that only serve."""
    needs_keys: bool = False
    """Members speak with each other over the network: each is given credentials."""


@dataclass(frozen=True)
class RunOptions:
    job: str
    """path.py or path.py:Name"""
    strategy: str
    """The spec."""
    workers: int
    """How many at first."""
    settings: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    threads: int = 1
    """Compute threads of each worker."""
    shared_cores: int = 0
    """Cores that the workers share: with more of them than at first, each has fewer threads. 0: never."""
    checkpoint_every: int = 0
    """Steps between checkpoints besides those after each epoch."""
    keep: int = 3
    """How many of the newest checkpoints are kept, besides the best."""
    min_workers: int = 1
    """With fewer, and nobody to take their place, training does not go on."""
    max_restarts: int = 3
    """How many members that died are replaced; and how often all begin again, where nobody can go on."""
    max_bad_steps: int = MAX_BAD_STEPS
    """After so many steps in a row without a finite loss the run ends as diverged; 0: never."""
    stuck_after_s: float = STUCK_AFTER_S
    """A worker that hangs in the job's code for so long is named, and given up after ten times as long;
    0: never."""
    equal_shares: bool = False
    """Every worker has as much of a batch, also where one computes faster than another."""
    scaling: Scaling = FIXED
    """How the batch and the learning rate follow the number of workers."""
    trust_network: bool = False
    """Authenticate, but don't encrypt bulk data."""
    manner: Manner = field(default_factory=Manner)
    """How the strategy wants to be driven."""
    chaos: FaultSpec | None = None
    """Faults to inject."""
    schedule: str = ""
    """How a resumed run goes on with the schedule of the learning rate: keep, stretch or restart."""
    rehearse: bool = False
    """Do everything but train."""
    debug: bool = False
    """If true, the only worker has the terminal."""

    init_from: Path | None = None
    """The checkpoint whose weights a training begins with that has none of its own."""

    def assignment(self, run: Path, checkpoint: Path | None) -> dict[str, Any]:
        """What each member is told of it."""
        return {
            "job": self.job,
            "settings": dict(self.settings),
            "strategy": self.strategy,
            "device": self.device,
            "shared_cores": self.shared_cores,
            "trust_network": self.trust_network,
            "debug": self.debug,
            "run": str(run.resolve()),
            "schedule": self.schedule,
            "checkpoint": str(checkpoint.resolve()) if checkpoint else None,
            "init_from": str(self.init_from) if self.init_from and not checkpoint else None,
        }

    @property
    def may_do_without(self) -> bool:
        """Whether slow workers may be left out where that is faster: nothing but speed changes by it."""
        manner = self.manner
        shrinks = manner.lockstep and manner.elastic and manner.can_shrink
        return shrinks and not self.equal_shares and not self.scaling.on
