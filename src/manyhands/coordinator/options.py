"""The options of a run: everything that the coordinator is told apart from the job itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.contract import Strategy
from manyhands.coordinator.bad_steps import MAX_BAD_STEPS
from manyhands.coordinator.batch_scaling import FIXED, Scaling
from manyhands.coordinator.fault_spec import FaultSpec
from manyhands.coordinator.stuck import STUCK_AFTER_S


@dataclass(frozen=True)
class RunOptions:
    job: str
    """path.py or path.py:Name"""
    strategy: str
    """The spec."""
    workers: int
    """Number of workers at the start."""
    config: Strategy
    """The config that the spec makes."""
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
    def servers(self) -> int:
        """Number of members that only serve."""
        return self.config.servers_for(self.workers)

    @property
    def needs_keys(self) -> bool:
        """If true, each member gets credentials, also where the control link needs none."""
        return self.config.needs_keys(self.workers) and not self.trust_network

    @property
    def may_do_without(self) -> bool:
        """Whether slow workers may be left out where that is faster: nothing but speed changes by it."""
        config = self.config
        shrinks = config.lockstep and config.elastic and config.can_shrink
        return shrinks and not self.equal_shares and not self.scaling.on
