"""Decides, by a policy, which pushes make up the next update of the whole model. Pure.

All servers must put the same pushes into the same updates, even if slow workers are left behind or a worker
dies in the middle of a push. So a push counts once every server has it (where gradients travel; inside a host
all servers can read them), and one server, the lead, decides for all. If an update is everybody's gradients,
every server runs a Decider and all come to the same decisions.

    had(server, push)    a server has a push; it counts when all servers have it
    decisions()          what is to be applied now, in order
    late()               pushes that were left out since the last call
    word(worker)         which step a worker may begin: sent along with updates
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from manyhands.ps.ledger import Contribution, Decision, Ledger, lr_factor, progress_after
from manyhands.ps.policies import Policy, PolicyUpdate, Verdict
from manyhands.ps.staleness import Rule, lr_scale

MAX_UNDER_WAY = 64
"""Limit of pushes of one worker that do not count yet; a correct worker has at most two."""


@dataclass(frozen=True, slots=True)
class StartPermit:
    """Which step a worker may begin."""

    at: int
    """Its number, where the policy counts rounds."""
    until: int | None
    """The last one that may begin now; None: any."""


class Decider:
    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        *,
        servers: Iterable[str],
        lr_rule: Rule = "none",
        by_part: bool = False,
    ) -> None:
        """`by_part`: if true, an update is one part of a batch, and moves the weights by that part."""
        self.policy = policy
        policy.version = ledger.version
        self._ranks = {worker: rank for rank, worker in enumerate(policy.workers)}
        self._progress = Fraction(ledger.progress)
        self._servers = set(servers)
        self._lr_rule = lr_rule
        self._by_part = by_part
        self._had: dict[tuple[str, int], set[str]] = {}
        self._complete: dict[str, dict[int, tuple[Contribution, int]]] = {}
        self._last: dict[str, int] = {}
        self._late: list[Contribution] = []
        self.resting: set[str] = set()
        self._stragglers: set[str] = set()
        self._ending: set[str] = set()

    def had(self, server: str, push: Contribution, *, began: int, after: int) -> None:
        """Note that a server has all of a push, which its worker made after the one numbered `after`.

        It counts when every server has it, and in its worker's order: two pushes may overtake each other
        on different connections. Raises ValueError if the worker should not have made it.
        """
        if push.seq <= self._last.get(push.worker, 0):
            return  # sent again after it has counted
        if sum(worker == push.worker for worker, _ in self._had) >= MAX_UNDER_WAY:
            raise ValueError(f"{MAX_UNDER_WAY} pushes of {push.worker} wait for one before them")
        had = self._had.setdefault((push.worker, push.seq), set())
        had.add(server)
        if had < self._servers:
            return
        complete = self._complete.setdefault(push.worker, {})
        complete[after] = (push, began)
        last = self._last.setdefault(push.worker, 0)
        while (ready := complete.pop(last, None)) is not None:
            push, began = ready
            self._had.pop((push.worker, push.seq), None)
            self.count(push, began=began)
            self._last[push.worker] = last = push.seq

    def count(self, push: Contribution, *, began: int) -> bool:
        """Count a push that every server has; False if it was resolved before or is too late."""
        due = self.policy.resume_at(push.worker)
        if push.seq > due and push.worker in self.policy.workers:
            raise ValueError(f"{push.worker} pushed step {push.seq} where step {due} is due")
        self._ending.discard(push.worker)
        self.policy.started(push.worker, push.seq, version=began)
        verdict = self.policy.push(push)
        if verdict is Verdict.ACCEPTED:
            until = self.policy.furthest(push.worker)
            if not self._by_part and until is not None and push.seq < until:
                self._stragglers.add(push.worker)
            return True
        if verdict is Verdict.LATE:
            self._late += self.policy.dropped()
        return False

    def decisions(self) -> list[Decision]:
        made = []
        while (update := self._take()) is not None:
            contributions = update.contributions
            self._progress = progress_after(self._progress, contributions)
            rate = lr_factor(contributions)
            if self._by_part:
                # The mean over the part, moving the weights by that part of a step: an optimizer that depends
                # on the size of a gradient sees that of a batch.
                (only,) = contributions
                part, whole = only.share
                rate *= part / whole * lr_scale(self._lr_rule, only.staleness)
                contributions = (replace(only, scale=only.scale * whole / part if part else 0.0),)
            made.append(
                Decision(
                    update.version,
                    contributions,
                    lr_scale=rate,
                    progress=(self._progress.numerator, self._progress.denominator),
                )
            )
        self._late += self.policy.dropped()
        return made

    def _take(self) -> PolicyUpdate | None:
        update = self.policy.take()
        if update is None and self._ending.issuperset(self.policy.workers):
            return self.policy.flush()
        return update

    def late(self) -> list[Contribution]:
        """Drain the pushes that were left out of the weights."""
        late, self._late = self._late, []
        return late

    def stragglers(self) -> list[str]:
        """Drain the workers whose push was too late for its round and waits for the next: they may go on."""
        told, self._stragglers = sorted(self._stragglers), set()
        return told

    def ends(self, worker: str) -> None:
        """The worker pushes no more until its pushes are resolved."""
        self._ending.add(worker)

    def rest(self, worker: str) -> None:
        """Don't wait for this worker until it wakes. All its pushes are resolved."""
        if worker not in self.resting:
            self.resting.add(worker)
            self.policy.leave(worker)

    def wake(self, worker: str) -> None:
        if worker in self.resting:
            self.resting.discard(worker)
            mine = self._ranks[worker]
            rank = sum(self._ranks[other] < mine for other in self.policy.workers)
            self.policy.join(worker, rank=rank)

    def word(self, worker: str) -> StartPermit:
        return StartPermit(self.policy.resume_at(worker), self.policy.furthest(worker))

    def waiting_for(self, worker: str, seq: int) -> tuple[str, ...]:
        return self.policy.waiting_for(worker, seq)
