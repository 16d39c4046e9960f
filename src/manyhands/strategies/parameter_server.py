"""Parameter servers: workers push gradients to servers, which hold the parameters and the optimizer.

The parameters are cut into blocks, spread over servers by bytes, each with a replica on another server. Every
worker is also a server of its part (colocated, the decentralized form), or servers are processes of their
own (dedicated). Inside a host, parameters and gradients are in shared memory, and a push carries only numbers
about them. (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".)

    ps:sync      an update is everybody's gradients: the same mathematics as one worker
    ps:backup    an update is the first n-k gradients; no worker waits for the k slowest
    ps:async     each gradient is an update of its own, on arrival; no worker waits
    ps:ssp       like async, but no worker runs more than s steps ahead of the slowest

Cost per worker and step: inside a host no messages in ps:sync, otherwise one message to the leader server and
one back from each; over the network the gradients out and the parameters in, M bytes each, as much as a ring
all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from manyhands.contract import Traits
from manyhands.errors import SpecError
from manyhands.pairs import ROW_MODEL, SCALING, Unsupported
from manyhands.ps.config import ParameterServer

if TYPE_CHECKING:
    from manyhands.ps.mode import PsMode


ADDS_UP = Unsupported(
    ROW_MODEL, "its servers add up gradients, and there are none", instead="ps:async"
)


@dataclass(frozen=True)
class PsSync(ParameterServer):
    name: ClassVar[str] = "ps:sync"

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        return (*super().unsupported, ADDS_UP)

    def mode(self, clip_norm: float | None) -> PsMode:
        from manyhands.ps.mode import PsMode
        from manyhands.ps.policies import SyncPolicy

        return PsMode(
            make_policy=SyncPolicy, rounds=True, slots=1, for_all=True, clip_norm=clip_norm
        )


@dataclass(frozen=True)
class PsAsync(ParameterServer):
    name: ClassVar[str] = "ps:async"

    lr_rule: Literal["sqrt", "inverse"] | None = "sqrt"
    """Divide the learning rate by 1 + staleness in batches, or by its square root; none: leave it."""
    momentum_rule: Literal["ahead"] | None = "ahead"
    """Ahead: momentum decays by the part of a batch that a push is, and gradients are computed where momentum
    will have moved the weights. None: each push is a step of the optimizer as it is."""
    compensate: float = 0.0
    """Strength of delay compensation (DC-ASGD), such as 0.04; 0: none."""
    row_age: int = 0
    """Steps for which a worker may reuse a table's row before it fetches it again."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, lockstep=False, equals_single=False)

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        why = (
            "each push is an update of its own, so more workers make more updates, not larger ones "
            "(--set batch_size=N sets the size of a push, for all workers together)"
        )
        return (*super().unsupported, Unsupported(SCALING, why, instead="ps:sync"))

    def check(self, workers: int) -> None:
        super().check(workers)
        if not 0 <= self.compensate < float("inf"):
            raise SpecError(
                f"{self.name}: compensate={self.compensate}; a number from 0 (none) up, such as 0.04."
            )
        if self.row_age < 0:
            raise SpecError(f"{self.name}: row_age={self.row_age}; 0 or more steps.")

    def mode(self, clip_norm: float | None) -> PsMode:
        from manyhands.ps.mode import PsMode
        from manyhands.ps.policies import AsyncPolicy

        return PsMode(
            make_policy=AsyncPolicy,
            rounds=False,
            slots=2,
            lr_rule=self.lr_rule or "none",
            momentum_rule=self.momentum_rule or "none",
            compensate=self.compensate,
            row_age=self.row_age,
            push_clip_norm=clip_norm,
        )


@dataclass(frozen=True)
class PsSsp(PsAsync):
    name: ClassVar[str] = "ps:ssp"

    staleness: int = 4
    """How many steps the fastest worker may be ahead of the slowest; 0: none."""

    def check(self, workers: int) -> None:
        super().check(workers)
        self.mode(None).make_policy(())

    def mode(self, clip_norm: float | None) -> PsMode:
        from manyhands.ps.policies import SspPolicy

        make_policy = partial(SspPolicy, staleness=self.staleness)
        return replace(super().mode(clip_norm), make_policy=make_policy)


@dataclass(frozen=True)
class PsBackup(ParameterServer):
    name: ClassVar[str] = "ps:backup"

    spares: int = 1
    """How many workers a step does not wait for."""
    late: Literal["drop", "decay"] = "drop"
    """What to do with a late gradient: drop it and compute it again, or add it to the next step, decayed."""
    decay: float = 0.5
    """Factor on a late gradient for each step that it missed."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, lockstep=False, equals_single=False)

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        return (*super().unsupported, ADDS_UP)

    def check(self, workers: int) -> None:
        super().check(workers)
        self.mode(None).make_policy(())
        if self.spares >= workers:
            raise SpecError(
                f"{self.name}: spares={self.spares} of {workers} workers leaves nobody to wait for. "
                f"Use spares={max(workers - 1, 0)} or fewer."
            )

    def parts(self, workers: int) -> int:
        return max(1, workers - self.spares)

    def mode(self, clip_norm: float | None) -> PsMode:
        from manyhands.ps.mode import PsMode
        from manyhands.ps.policies import BackupPolicy

        make_policy = partial(BackupPolicy, spares=self.spares, late=self.late, decay=self.decay)
        return PsMode(make_policy=make_policy, rounds=True, slots=2, clip_norm=clip_norm)
