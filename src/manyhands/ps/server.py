"""A parameter server: holds blocks, adds up what workers push, runs the optimizer, tells the news.

One thread owns everything; readers, one a connection, only put what arrived into its inbox. So no
block has two writers and no lock is held while numbers are added. The messages, by their "k":

    worker  enter  worker, grads: address of its gradients in shared memory, or none
            push   seq, samples, total [, block + payload a frame, unless the memory is shared]
            state  asks for what the optimizer remembers
    server  new    version [, block + payload a frame, unless the memory is shared]
            state  block, name + payload a frame, then done
    peers   norm   version, value: this server's part of the gradient's squared norm, for clipping

Cost a step and worker: one push and one new a server; over the network the gradients out and the
parameters back, once each.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import LinkError
from manyhands.ps.memory import Flat
from manyhands.ps.optimizer import BlockOptimizer
from manyhands.ps.policies import Policy, Update, Verdict
from manyhands.wire import Credentials, Link, Listener, connect

HELLO_S = 10.0
"""A new connection says who it is within this time, or is dropped."""


@dataclass
class Guest:
    """A worker as the server sees it."""

    name: str
    link: Link
    grads: Flat | None
    """In shared memory, or None: then what arrives is kept in `arrived`."""
    arrived: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """seq to block to gradient."""


@dataclass(frozen=True)
class Push:
    worker: str
    seq: int
    samples: float
    total: float


@dataclass(frozen=True)
class Happened:
    """Something for the server's thread: what, from whom."""

    kind: str
    who: str
    head: Mapping[str, Any]
    link: Link | None = None


class Server:
    """The blocks of one server, and the thread that serves them."""

    def __init__(
        self,
        name: str,
        *,
        blocks: Sequence[int],
        params: Flat,
        optimizer: BlockOptimizer,
        policy: Policy,
        address: str,
        attach: Callable[[str], Flat],
        scheduler: Any = None,
        clip_norm: float | None = None,
        peers: Sequence[str] = (),
        credentials: Credentials | None = None,
    ) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.bytes_sent = 0
        self._blocks = list(blocks)
        self._params = params
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._policy = policy
        self._attach = attach
        self._clip_norm = clip_norm
        self._peers = list(peers)
        self._peer_links: dict[str, Link] = {}
        self._norms: dict[int, dict[str, float]] = {}
        self._guests: dict[str, Guest] = {}
        self._pushes: dict[tuple[str, int], Push] = {}
        self._sums = {number: torch.zeros_like(params.block(number)) for number in self._blocks}
        self._pending: Update | None = None
        self._inbox: queue.SimpleQueue[Happened | None] = queue.SimpleQueue()
        self._listener = Listener(address, credentials=credentials)
        self._credentials = credentials
        self.address = self._listener.address
        threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True).start()
        self._thread = threading.Thread(target=self._serve, name=f"{name}-serve", daemon=True)
        self._thread.start()

    def meet(self, addresses: Mapping[str, str], *, timeout_s: float) -> None:
        """Connect to the other servers, for what only all of them together know."""
        for peer in self._peers:
            link = connect(
                addresses[peer], credentials=self._credentials, timeout_s=timeout_s, peer=peer
            )
            link.send({"k": "peer", "server": self.name})
            self._peer_links[peer] = link

    def close(self) -> None:
        self._listener.close()
        self._inbox.put(None)
        self._thread.join(timeout=5.0)
        for link in [g.link for g in self._guests.values()] + list(self._peer_links.values()):
            link.close()

    # What arrives, each in its own thread ------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                link = self._listener.accept()
            except LinkError:
                return
            threading.Thread(
                target=self._read, args=(link,), name=f"{self.name}-read", daemon=True
            ).start()

    def _read(self, link: Link) -> None:
        try:
            hello = link.recv(timeout_s=HELLO_S).head
        except LinkError:
            link.close()
            return
        who = str(hello.get("worker") or hello.get("server"))
        self._inbox.put(Happened(str(hello.get("k")), who, hello, link))
        try:
            while True:
                message = link.recv()
                head = dict(message.head)
                if message.payload is not None:
                    head["payload"] = message.payload
                self._inbox.put(Happened(str(head.get("k")), who, head))
        except LinkError:
            self._inbox.put(Happened("left", who, {}))

    # What is done, in one thread ---------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while (happened := self._inbox.get()) is not None:
                self._handle(happened)
        except BaseException as error:
            self.error = error
            # Whoever waits for this server must not wait any longer.
            for guest in self._guests.values():
                guest.link.close()

    def _handle(self, happened: Happened) -> None:
        head = happened.head
        match happened.kind:
            case "enter":
                assert happened.link is not None
                grads = self._attach(head["grads"]) if head.get("grads") else None
                self._guests[happened.who] = Guest(happened.who, happened.link, grads)
            case "push":
                self._on_push(happened.who, head)
            case "norm":
                self._norms.setdefault(int(head["version"]), {})[happened.who] = float(
                    head["value"]
                )
                self._finish()
            case "state":
                self._tell_state(self._guests[happened.who])
            case "left":
                self._guests.pop(happened.who, None)

    def _on_push(self, worker: str, head: Mapping[str, Any]) -> None:
        guest, seq = self._guests[worker], int(head["seq"])
        if guest.grads is None:
            arrived = guest.arrived.setdefault(seq, {})
            number = int(head["block"])
            block = self._params.block(number)
            arrived[number] = torch.frombuffer(head["payload"], dtype=block.dtype)
            if len(arrived) < len(self._blocks):
                return
        if self._policy.push(worker, seq) is not Verdict.ACCEPTED:
            guest.arrived.pop(seq, None)
            return
        self._pushes[worker, seq] = Push(worker, seq, float(head["samples"]), float(head["total"]))
        self._advance()

    def _advance(self) -> None:
        """Begin the next update, if the policy has one."""
        if self._pending is not None or (update := self._policy.take()) is None:
            return
        pushes = [self._pushes.pop((c.worker, c.seq)) for c in update.contributions]
        self._add_up(pushes)
        self._pending = update
        if self._clip_norm is not None:
            value = math.fsum(float(s.double().pow(2).sum()) for s in self._sums.values())
            self._norms.setdefault(update.version, {})[self.name] = value
            for peer in self._peers:
                self._peer_links[peer].send(
                    {"k": "norm", "version": update.version, "value": value}
                )
        self._finish()

    def _add_up(self, pushes: Sequence[Push]) -> None:
        """The sum over workers in rank order, so that two runs are bit-equal.

        Each worker has scaled its gradient by its share of the planned samples already; what is left
        is to make up for shares that are missing.
        """
        scale = pushes[0].total / math.fsum(push.samples for push in pushes)
        for number, total in self._sums.items():
            parts = [self._gradient(push, number) for push in pushes]
            if len(parts) == 1:
                total.copy_(parts[0])
            else:
                torch.add(parts[0], parts[1], out=total)
                for part in parts[2:]:
                    total.add_(part)
            if scale != 1.0:
                total.mul_(scale)
        for push in pushes:
            self._guests[push.worker].arrived.pop(push.seq, None)

    def _gradient(self, push: Push, number: int) -> Tensor:
        guest = self._guests[push.worker]
        return guest.grads.block(number) if guest.grads else guest.arrived[push.seq][number]

    def _finish(self) -> None:
        """Apply the update in hand, once all that it needs is there."""
        update = self._pending
        if update is None:
            return
        if self._clip_norm is not None:
            norms = self._norms.get(update.version, {})
            if len(norms) <= len(self._peers):
                return
            del self._norms[update.version]
            # In the order of names: every server computes the same scale from the same numbers.
            norm = math.sqrt(math.fsum(norms[name] for name in sorted(norms)))
            factor = min(1.0, self._clip_norm / (norm + 1e-6))
            for total in self._sums.values():
                total.mul_(factor)
        self._optimizer.step(self._sums)
        if self._scheduler is not None:
            self._scheduler.step()
        self._pending = None
        self._tell_news(update.version)
        self._advance()

    def _tell_news(self, version: int) -> None:
        for guest in list(self._guests.values()):
            try:
                if guest.grads is not None:
                    guest.link.send({"k": "new", "version": version})
                    continue
                for number in self._blocks:
                    head = {"k": "new", "version": version, "block": number}
                    guest.link.send(head, _bytes(self._params.block(number)))
            except LinkError:
                continue  # its reader tells that it left
        self.bytes_sent = sum(g.link.bytes_sent for g in self._guests.values() if not g.grads)

    def _tell_state(self, guest: Guest) -> None:
        for number in self._blocks:
            for name, value in self._optimizer.state(number).items():
                tensor = torch.as_tensor(value).detach().contiguous()
                head = {
                    "k": "state",
                    "block": number,
                    "name": name,
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                }
                guest.link.send(head, _bytes(tensor))
        guest.link.send({"k": "state", "done": True})


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]
