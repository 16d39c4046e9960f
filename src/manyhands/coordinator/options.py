"""The options of a run, and how its members are started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.contract import Strategy
from manyhands.control.messages import Assignment
from manyhands.coordinator.bad_steps import MAX_BAD_STEPS
from manyhands.coordinator.batch_scaling import FIXED, Scaling
from manyhands.coordinator.fault_spec import FaultSpec
from manyhands.coordinator.stuck import STUCK_AFTER_S
from manyhands.hosts.launchers.base import Launcher
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import SERVER, WORKER
from manyhands.transport import Authority

PROGRAMS = {WORKER: "manyhands.worker.main", SERVER: "manyhands.worker.server"}


@dataclass(frozen=True)
class LaunchPlan:
    """The coordinator's address and its launcher."""

    control: str
    """The address that the coordinator listens on."""
    launcher: Launcher
    authority: Authority | None = None
    """The authority of the run's key, if it has one."""
    timeouts: Timeouts | None = None


@dataclass(frozen=True)
class RunOptions:
    job: str
    """path.py or path.py:Name"""
    strategy: str
    """The spec, as given."""
    workers: int
    """Number of workers at the start."""
    config: Strategy
    """The config that the spec makes."""
    settings: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    threads: int = 1
    """Compute threads of each worker."""
    shared_cores: int = 0
    """Cores that the workers share: more workers than at the start get fewer threads each. 0: never."""
    checkpoint_every: int = 0
    """Steps between checkpoints besides those after each epoch; 0: none."""
    keep: int = 3
    """Number of newest checkpoints to keep, besides the best."""
    min_workers: int = 1
    """Minimum number of workers: with fewer and no replacements left, the run ends."""
    max_restarts: int = 3
    """Number of dead members that are replaced, and of restarts of all if the weights are lost."""
    max_bad_steps: int = MAX_BAD_STEPS
    """Number of steps in a row without a finite loss after which the run ends as diverged; 0: never."""
    stuck_after_s: float = STUCK_AFTER_S
    """A worker that hangs in the job's code this long is reported, and ended after ten times as long;
    0: never."""
    max_steps: int | None = None
    """Steps of this start after which it stops."""
    max_time_s: float | None = None
    """Seconds since this start after which it stops."""
    target: str = ""
    """Value of a metric at which this start stops, as typed; empty: none."""
    equal_shares: bool = False
    """If true, all workers get equal shares of a batch, regardless of their speed."""
    scaling: Scaling = FIXED
    """Rule by which the batch and the learning rate follow the number of workers."""
    trust_network: bool = False
    """If true, bulk data is authenticated and not encrypted."""
    chaos: FaultSpec | None = None
    """Faults to inject."""
    schedule: str = ""
    """Way in which a resumed run continues the learning-rate schedule: keep, stretch or restart."""
    rehearse: bool = False
    """If true, do everything except training."""
    debug: bool = False
    """If true, the only worker has the terminal."""
    resumed: bool = False
    """If true, the run folder has been trained in before."""
    programs: Mapping[str, str] = field(default_factory=lambda: PROGRAMS)
    """The Python module that a member runs, by role."""

    init_from: Path | None = None
    """The checkpoint whose weights a new run starts with."""
    origin: str = ""
    """Where the user wrote a job that was saved in the run folder: "Digits of train.py"; empty: `job`."""

    def assignment(self, run: Path, checkpoint: Path | None) -> Assignment:
        """Return the assignment of each member."""
        return Assignment(
            job=self.job,
            settings=dict(self.settings),
            strategy=self.strategy,
            device=self.device,
            shared_cores=self.shared_cores,
            trust_network=self.trust_network,
            debug=self.debug,
            run=str(run.resolve()),
            schedule=self.schedule,
            checkpoint=str(checkpoint.resolve()) if checkpoint else None,
            init_from=str(self.init_from) if self.init_from and not checkpoint else None,
        )

    @property
    def servers(self) -> int:
        """Number of members that only serve."""
        return self.config.servers_for(self.workers)

    @property
    def needs_keys(self) -> bool:
        """If true, each member gets credentials, also where the control link needs none."""
        return self.config.needs_keys(self.workers) and not self.trust_network

    @property
    def may_leave_out(self) -> bool:
        """If true, slow workers may be left out if that is faster: nothing but the speed changes."""
        traits = self.config.traits
        shrinks = traits.lockstep and traits.elastic and traits.can_shrink
        in_rounds = traits.round_steps is not None  # the weights would change, too
        alone = self.config.replica_size(self.workers) == 1
        may_leave = shrinks and alone and not in_rounds
        return may_leave and not self.equal_shares and not self.scaling.on
