"""A strategy for tests of going on: the weights lie in a file that everybody changes, under a lock.

The file is replaced whole, so that it is sound whoever is killed, and holds which parts are in the
weights. `ledger` is not in lockstep: each part is added by itself, in a thread of its own, unless it
is too stale. `ledger-sync` is: the last worker to come adds up all their gradients. A view voids what
workers of an older one still want to add. `python -m ledger` is the program of a member.
"""

from __future__ import annotations

import fcntl
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from traits import Lockstep, WorkQueue

from manyhands.compute.feed import Share
from manyhands.compute.gradients import gradients
from manyhands.contract import (
    AppliedPart,
    AppliedSteps,
    Context,
    Joined,
    Learner,
    State,
    StepReport,
    Strategy,
)
from manyhands.control.messages import (
    TO_MEMBER,
    LeaveOrder,
    Ready,
    StopOrder,
    Stopped,
    ViewJoined,
)
from manyhands.errors import ViewChanging
from manyhands.hosts.member import Member
from manyhands.hosts.messages import ViewFormed
from manyhands.hosts.view import SERVER, Seat, View
from manyhands.worker.loop import Worker

MAX_STALENESS = 2


class Ledger:
    """The file: weights, version, view, what is in the weights, and gradients that wait for others."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ledger"
        self._lock = folder / "ledger.lock"

    @contextmanager
    def open(self, first: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The state, to be changed; what is raised changes nothing."""
        with open(self._lock, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = torch.load(self._path) if self._path.exists() else first()
            yield state
            torch.save(state, f"{self._path}.new")
            os.replace(f"{self._path}.new", self._path)


class LedgerLearner(Learner):
    def __init__(self, config: Strategy, context: Context) -> None:
        super().__init__(context)
        self._lockstep = config.traits.lockstep
        self._pushes: queue.Queue[tuple[StepReport, Tensor, int, int]] = queue.Queue()
        self._ledger = Ledger(self.me.scratch)
        threading.Thread(target=self._push_all, daemon=True).start()

    def on_view(self, view: View) -> Joined:
        self._wait_for_pushes()
        with self._state() as state:
            state["view"] = max(state["view"], view.number)
            state["gradients"] = {}
            self._load(state)
            parts = [AppliedPart(*key) for key in state["applied"][-50:]]
            applied = AppliedSteps(state["version"], parts)
        return Joined("file", placement="in one file", applied=applied)

    def step(self, share: Share) -> StepReport:
        lr, number = self.train_state.lr, self.me.view.number
        with self._state() as state:
            self._load(state)
            version = state["version"]
        weight, loss = gradients(self.train_state, share)
        parameters = [p for p in self.train_state.model.parameters() if p.grad is not None]
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        self.train_state.optimizer.zero_grad(set_to_none=True)
        report = StepReport(share.step, share.samples, float(weight), float(loss), lr)
        if self._lockstep:
            self._together(share, flat, lr)
        else:
            report.part, report.resolved = share.part, False
            self._pushes.put((report, flat, version, number))
        return report

    def drain(self) -> None:
        self._wait_for_pushes()
        self._heed()

    @contextmanager
    def eval_model(self) -> Iterator[nn.Module]:
        self.snapshot()
        yield self.train_state.model

    def snapshot(self) -> State:
        with self._state() as state:
            self._load(state)
        return {}

    def _together(self, share: Share, flat: Tensor, lr: float) -> None:
        with self._state() as state:
            self._check(state, self.me.view.number)
            waiting = state["gradients"].setdefault(share.step, {})
            waiting[share.part] = flat
            if len(waiting) == self.me.world:
                for part in sorted(waiting):
                    state["weights"] -= lr * waiting[part]
                del state["gradients"][share.step]
                state["version"] += 1
                state["applied"] += [(share.step, part) for part in sorted(waiting)]
        while True:
            with self._state() as state:
                if (share.step, share.part) in state["applied"]:
                    return
            self._heed()
            time.sleep(0.002)

    def _push_all(self) -> None:
        while True:
            report, flat, read, number = self._pushes.get()
            try:
                with self._state() as state:
                    self._check(state, number)
                    stale = state["version"] - read
                    dropped = stale > MAX_STALENESS
                    if not dropped:
                        state["weights"] -= report.lr * flat
                        state["version"] += 1
                        state["applied"].append((report.step, report.part))
                report.staleness, report.dropped, report.resolved = stale, dropped, True
            except ViewChanging:
                pass  # never resolved
            finally:
                self._pushes.task_done()

    def _wait_for_pushes(self) -> None:
        self._pushes.join()

    def _heed(self) -> None:
        if self.me.view_changing:
            raise ViewChanging("another view is coming")

    def _check(self, state: dict[str, Any], number: int) -> None:
        if state["view"] > number:
            raise ViewChanging("the others are in another view")

    def _state(self) -> Any:
        return self._ledger.open(self._first)

    def _first(self) -> dict[str, Any]:
        flat = nn.utils.parameters_to_vector(self.train_state.model.parameters()).detach()
        return {"weights": flat, "version": 0, "view": 0, "applied": [], "gradients": {}}

    def _load(self, state: dict[str, Any]) -> None:
        nn.utils.vector_to_parameters(state["weights"].clone(), self.train_state.model.parameters())


class InLedger(Lockstep):
    def build(self, context: Context) -> Learner:
        return LedgerLearner(self, context)


class InLedgerByParts(WorkQueue):
    def build(self, context: Context) -> Learner:
        return LedgerLearner(self, context)


def serve(member: Member) -> None:
    """A member that only serves, and has nothing to serve."""
    member.send(Ready(Seat(member.name, member.host, role=SERVER)))
    while True:
        match member.next_message():
            case ViewFormed(view):
                number = view.number
                member.send(ViewJoined(number, transport="file"))
            case StopOrder():
                member.send(Stopped(number))
            case LeaveOrder():
                return


def main() -> int:
    member = Member.from_launcher(TO_MEMBER)
    torch.set_num_threads(1)
    try:
        if member.name.startswith(SERVER):
            serve(member)
        else:
            lockstep = member.assignment["strategy"] == "ledger-sync"
            Worker(member, InLedger() if lockstep else InLedgerByParts()).run()
    except BaseException as error:
        return member.fail(error)
    member.leave()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
