"""Groups whose workers are threads of one process: the same interface as over a network, for fast tests.

    sums = run_workers(3, lambda group: train(group))     one thread per worker, the results in rank order

Sums are computed in rank order, so they are the same in every run. An operation is carried out by the worker
that comes last, so its tensors must not be touched before it is waited for, as over a network. Mistakes that
would end a process or block forever over gloo are errors here, which say what each worker did: another
operation, another size or dtype, a message that nobody receives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.collectives.group import Group, GroupCut, Reduction, Work
from manyhands.threads import start_thread

TIMEOUT_S = 30.0
CHECK_S = 0.05
"""Interval at which a worker that waits checks whether there is still something to wait for."""
Check = Callable[[], None]
"""Called while a worker waits for others; may raise, to end the wait."""


_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Mismatch(RuntimeError):
    """The workers of a group called operations that do not belong together."""


@dataclass
class _Call:
    """Arguments of one worker to an operation."""

    what: str
    """The operation and all that must be equal on all workers."""
    tensor: Tensor
    into: Tensor
    sent: Sequence[int] = ()
    received: Sequence[int] = ()


@dataclass
class _Collective:
    """One operation of the whole group."""

    carry_out: Callable[[list[_Call]], None]
    calls: dict[int, _Call] = field(default_factory=dict)
    done: bool = False
    error: BaseException | None = None


@dataclass
class _Transfer:
    """One end of a message from one worker to another."""

    tensor: Tensor
    done: bool = False
    error: BaseException | None = None


@dataclass
class _Mailbox:
    """Messages from one worker to another with the same tag, in the order of their sending."""

    sent: list[_Transfer] = field(default_factory=list)
    expected: list[_Transfer] = field(default_factory=list)

    def deliver(self) -> None:
        while self.sent and self.expected:
            transfer, place = self.sent.pop(0), self.expected.pop(0)
            if _described(transfer.tensor) == _described(place.tensor):
                _copy(transfer.tensor, place.tensor)
            else:
                place.error = Mismatch(
                    f"{_described(transfer.tensor)} were sent, and {_described(place.tensor)} expected"
                )
            transfer.done = place.done = True


class ThreadWorld:
    """State that the workers of a group share."""

    def __init__(self, size: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.is_cut = False
        self._collectives: dict[int, _Collective] = {}
        self._mailboxes: dict[tuple[int, int, int], _Mailbox] = {}
        self._splits: dict[tuple[tuple[int, ...], int], ThreadWorld] = {}

    def groups(self) -> list[Group]:
        return [ThreadGroup(self, rank) for rank in range(self.size)]

    def cut(self) -> None:
        with self.changed:
            self.is_cut = True
            splits = list(self._splits.values())
            self.changed.notify_all()
        for split in splits:
            split.cut()

    def split(self, ranks: Sequence[int], number: int) -> ThreadWorld:
        """Return the state that the workers of a split share; `number` counts the splits of these ranks."""
        with self.changed:
            if self.is_cut:
                raise GroupCut
            found = self._splits.get((tuple(ranks), number))
            if found is None:
                found = ThreadWorld(len(ranks), timeout_s=self.timeout_s)
                self._splits[tuple(ranks), number] = found
            return found

    def enter(
        self, number: int, rank: int, call: _Call, carry_out: Callable[[list[_Call]], None]
    ) -> _Collective:
        """Add a worker's call to the operation with this number, and carry it out if it is the last one."""
        with self.changed:
            if self.is_cut:
                raise GroupCut
            collective = self._collectives.setdefault(number, _Collective(carry_out))
            collective.calls[rank] = call
            if len(collective.calls) == self.size:
                del self._collectives[number]
                calls = [collective.calls[each] for each in range(self.size)]
                if len({each.what for each in calls}) > 1:
                    texts = [f"rank {each}: {call.what}" for each, call in enumerate(calls)]
                    collective.error = Mismatch("\n".join(["calls differ", *texts]))
                else:
                    try:
                        collective.carry_out(calls)
                    except Exception as error:
                        collective.error = error
                collective.done = True
                self.changed.notify_all()
            return collective

    def wait_for(self, collective: _Collective, check: Check) -> None:
        with self.changed:
            self._wait(lambda: collective.done, lambda: self._missing(collective), check)
        if collective.error is not None:
            raise collective.error

    def post(self, route: tuple[int, int, int], tensor: Tensor, *, send: bool) -> _Transfer:
        """Send or receive a message; `route` is its source, destination and tag."""
        with self.changed:
            if self.is_cut:
                raise GroupCut
            mailbox = self._mailboxes.setdefault(route, _Mailbox())
            transfer = _Transfer(tensor)
            (mailbox.sent if send else mailbox.expected).append(transfer)
            mailbox.deliver()
            self.changed.notify_all()
            return transfer

    def wait_for_transfer(self, transfer: _Transfer, peer: int, check: Check) -> None:
        with self.changed:
            what = f"rank {peer} to send or receive a message"
            self._wait(lambda: transfer.done, lambda: what, check)
        if transfer.error is not None:
            raise transfer.error

    def _wait(self, over: Callable[[], bool], missing: Callable[[], str], check: Check) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not self.changed.wait_for(lambda: self.is_cut or over(), CHECK_S):
            check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out waiting for {missing()} ({self.timeout_s:g} s)")
        if not over():
            raise GroupCut

    def _missing(self, collective: _Collective) -> str:
        what = next(iter(collective.calls.values())).what
        absent = [rank for rank in range(self.size) if rank not in collective.calls]
        return f"ranks {absent} in {what}"


class ThreadGroup(Group):
    """One worker's end of a group of threads."""

    def __init__(
        self,
        world: ThreadWorld,
        rank: int,
        *,
        check: Check = lambda: None,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`waiting`: returns a context for the time in which this worker waits for others."""
        super().__init__(rank=rank, size=world.size)
        self._world = world
        self._check = check
        self._waiting = waiting
        self._number = 0
        self._num_splits: dict[tuple[int, ...], int] = {}

    def describe(self) -> str:
        return "threads"

    def cut(self) -> None:
        self._world.cut()

    def close(self) -> None:
        return

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        def carry_out(calls: list[_Call]) -> None:
            total = _reduced(calls, op)
            for call in calls:
                _copy(total, call.into)

        return self._enter(f"all_reduce({op}) of {_described(tensor)}", carry_out, tensor)

    def _reduce_scatter(self, tensor: Tensor, into: Tensor, op: Reduction) -> Work:
        def carry_out(calls: list[_Call]) -> None:
            parts = _reduced(calls, op).view(-1).chunk(len(calls))
            for call, part in zip(calls, parts, strict=True):
                _copy(part, call.into)

        return self._enter(f"reduce_scatter({op}) of {_described(tensor)}", carry_out, tensor, into)

    def _all_gather(self, tensor: Tensor, into: Tensor) -> Work:
        def carry_out(calls: list[_Call]) -> None:
            whole = torch.cat([call.tensor.reshape(-1) for call in calls])
            for call in calls:
                _copy(whole, call.into)

        return self._enter(f"all_gather of {_described(tensor)}", carry_out, tensor, into)

    def _all_to_all(
        self, tensor: Tensor, into: Tensor, sent: list[int], received: list[int]
    ) -> Work:
        def carry_out(calls: list[_Call]) -> None:
            parts = [call.tensor.reshape(-1).split(list(call.sent)) for call in calls]
            for rank, call in enumerate(calls):
                mine = [each[rank] for each in parts]
                if [len(part) for part in mine] != list(call.received):
                    raise Mismatch(
                        f"all_to_all: rank {rank} expects {list(call.received)} elements, and "
                        f"{[len(part) for part in mine]} are sent to it"
                    )
            for rank, call in enumerate(calls):
                _copy(torch.cat([each[rank] for each in parts]), call.into)

        what = f"all_to_all of {tensor.dtype}"
        return self._enter(what, carry_out, tensor, into, sent, received)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        def carry_out(calls: list[_Call]) -> None:
            for rank, call in enumerate(calls):
                if rank != source:
                    _copy(calls[source].tensor, call.into)

        return self._enter(f"broadcast(source={source}) of {_described(tensor)}", carry_out, tensor)

    def _send(self, tensor: Tensor, to: int, tag: int) -> Work:
        world = self._world
        transfer = world.post((self.rank, to, tag), tensor, send=True)
        return self._pending(lambda: world.wait_for_transfer(transfer, to, self._check))

    def _recv(self, tensor: Tensor, source: int, tag: int) -> Work:
        world = self._world
        transfer = world.post((source, self.rank, tag), tensor, send=False)
        return self._pending(lambda: world.wait_for_transfer(transfer, source, self._check))

    def _split(self, ranks: list[int]) -> Group:
        key = tuple(ranks)
        number = self._num_splits[key] = self._num_splits.get(key, 0) + 1
        world = self._world.split(ranks, number)
        rank = ranks.index(self.rank)
        return ThreadGroup(world, rank, check=self._check, waiting=self._waiting)

    def _enter(
        self,
        what: str,
        carry_out: Callable[[list[_Call]], None],
        tensor: Tensor,
        into: Tensor | None = None,
        sent: Sequence[int] = (),
        received: Sequence[int] = (),
    ) -> Work:
        world = self._world
        self._number += 1
        call = _Call(what, tensor, tensor if into is None else into, sent, received)
        collective = world.enter(self._number, self.rank, call, carry_out)
        return self._pending(lambda: world.wait_for(collective, self._check))

    def _pending(self, wait: Callable[[], None]) -> Work:
        def wait_for_others() -> None:
            with self._waiting():
                wait()

        return _PendingWork(wait_for_others)


class _PendingWork:
    """Work that is waited for once."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait

    def wait(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


def run_workers(
    size: int, work: Callable[[Group], Any], *, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Run `work(group)` in one thread per worker, and return the results in rank order.

    If one raises, the group is cut, and the first error is raised here when all threads have ended.
    """
    world = ThreadWorld(size, timeout_s=timeout_s)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(rank: int, group: Group) -> None:
        results[rank] = work(group)

    def fail(error: BaseException) -> None:
        errors.append(error)
        world.cut()

    threads = [
        start_thread(run, rank, group, name=f"rank {rank}", on_error=fail)
        for rank, group in enumerate(world.groups())
    ]
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def _reduced(calls: Sequence[_Call], op: Reduction) -> Tensor:
    """Combine the tensors in rank order."""
    total = calls[0].tensor.detach().clone()
    for call in calls[1:]:
        total = _COMBINE[op](total, call.tensor.detach())
    return total


def _copy(tensor: Tensor, into: Tensor) -> None:
    into.detach().view(-1).copy_(tensor.detach().reshape(-1))


def _described(tensor: Tensor) -> str:
    return f"{tensor.numel()} {tensor.dtype}"
