"""Copies the state to a new worker while the others keep training.

The new worker takes part in every step from the start, without samples: it receives the summed gradients
like all others, and keeps them. Meanwhile `StateSender`, on a worker that has the state, sends a copy of it
to `StateReceiver` on the new worker. When the copy has arrived, the new worker applies the kept updates, in
order. It then has the weights of the others bit for bit, because they come from the same state and the same
sums, and gets samples from then on.

Cost: one copy of the state in the sender's memory, as for a checkpoint; on the new worker, the gradients of
all steps made during the transfer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from manyhands.collectives.state_sync import batches, pour
from manyhands.compute.train_state import TrainState
from manyhands.contract import Learner
from manyhands.errors import LinkError, LinkTimeout, ProtocolError
from manyhands.hosts.me import Me
from manyhands.hosts.view import View
from manyhands.runs.encoding import empty_tensors, flatten, unflatten
from manyhands.runs.saver import put_state
from manyhands.threads import start_thread
from manyhands.transport import Limits, Link, Received
from manyhands.transport.fields import MessageSet, check

logger = logging.getLogger("manyhands.strategies")

STALLED_S = 30.0
"""If no byte of the state arrives for this long, it is requested again, in another view."""
RETRY_S = 0.5
"""Timeout of one attempt to connect to the sender."""
LIMITS = Limits(head_bytes=64 << 20, payload_bytes=1 << 40)
"""Each side accepts only the messages that it expects."""
NOTHING = Limits(head_bytes=0, payload_bytes=0)
MOST_COPIES = 256
SPARE_BYTES = 64 << 20
"""A state may have this many times the bytes of the parameters, plus SPARE_BYTES: L-BFGS keeps 200 copies."""


@dataclass(frozen=True)
class StateText:
    """The encoded state, without its tensors (runs/encoding.py)."""

    text: Annotated[Any, check(lambda value: isinstance(value, str), "is not text")]
    """Longer than other texts; LIMITS bounds it."""


@dataclass(frozen=True)
class StateNumbers:
    """Its payload is the next batch of tensors."""


STATE = MessageSet(StateText, StateNumbers)


class StateSender:
    """Sends a state to new workers, in threads beside the training."""

    def __init__(self, me: Me, view: View, state: dict[str, Any], *, num_new: int) -> None:
        assert me.board is not None
        self._text, self._tensors = flatten(state)
        self._num_new = num_new
        self._served: set[str] = set()
        self._listener = me.listen(f"state-{me.name}", view, limits=LIMITS, on_host=view.one_host)
        self._links: list[Link] = []
        self._closed = False
        me.board.post(_key(view), self._listener.address)
        self._listener.hand_over(self._send, name="state-sender", on_error=self._on_error)

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        for link in list(self._links):
            link.close()
        self._tensors = []

    def _on_error(self, error: BaseException) -> None:
        """Log it. The new worker notices by itself: its link is closed, or it can't connect."""
        logger.error("the state could not be sent to a new worker", exc_info=error)

    def _send(self, link: Link) -> None:
        self._links.append(link)
        link.expect(NOTHING)
        if self._closed:
            link.close()
            return
        with suppress(LinkError):  # the receiver is gone, or the view is over
            link.send(StateText(self._text))
            for batch in batches(self._tensors):
                flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in batch])
                link.send(StateNumbers(), flat.numpy().data)
            with suppress(LinkError):
                link.recv()  # it closes the link when it has read everything
            self._served.add(link.peer)
            if len(self._served) >= self._num_new:
                self.close()


@dataclass(frozen=True)
class KeptUpdate:
    """The summed gradients of a step, and the learning rate that the order of the step gave."""

    gradients: list[Tensor | None]
    lr_factor: float
    ticks: int


class StateReceiver:
    """Fetches the state of the others in a thread, and keeps the updates that they make meanwhile."""

    def __init__(
        self, me: Me, view: View, train_state: TrainState, learner: Learner | None
    ) -> None:
        """`learner`: None, if each worker holds a state of its own: a new one has none."""
        self._me, self._view = me, view
        self._train_state, self._learner = train_state, learner
        self._kept: list[KeptUpdate] = []
        self._link: Link | None = None
        self._closed = False
        self._over = threading.Event()
        self._error: BaseException | None = None
        start_thread(self._fetch, name="catching-up", on_error=self._fail)

    def keep(self, parameters: Sequence[Tensor]) -> None:
        """Keep the gradients of a step, which are summed over all workers."""
        gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
        self._kept.append(
            KeptUpdate(gradients, self._train_state.lr_factor, self._train_state.ticks)
        )

    def caught_up(self, parameters: Sequence[Tensor], *, wait_s: float = 0.0) -> bool:
        """Apply the kept updates if the state has arrived, and return whether it has. Raises the error of
        the transfer."""
        if not self._over.wait(wait_s):
            return False
        if self._error is not None:
            raise self._error
        for update in self._kept:
            for parameter, gradient in zip(parameters, update.gradients, strict=True):
                parameter.grad = gradient
            self._train_state.lr_factor, self._train_state.ticks = update.lr_factor, update.ticks
            self._train_state.update()
        self._kept = []
        return True

    def close(self) -> None:
        self._closed = True
        if self._link is not None:
            self._link.close()
        self._over.wait()  # otherwise the thread might still change the weights

    def _fetch(self) -> None:
        state = self._receive()
        if not self._closed:
            # No other thread uses the weights of a worker that is catching up.
            put_state(state, self._train_state, self._learner, tables=False)
        self._over.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._over.set()

    def _receive(self) -> Any:
        with self._find() as link:
            first = _moving(link).message
            if not isinstance(first, StateText):
                raise ProtocolError(f"{link.peer} did not begin with a text")
            text = str(first.text)
            parameters = self._train_state.model.state_dict().values()
            whole = sum(t.numel() * t.element_size() for t in parameters if isinstance(t, Tensor))
            tensors = empty_tensors(text, max_bytes=MOST_COPIES * whole + SPARE_BYTES)
            for batch in batches(tensors):
                size = sum(tensor.numel() * tensor.element_size() for tensor in batch)
                flat = torch.empty(size, dtype=torch.uint8)
                room = flat.numpy().data
                _moving(link, room)
                pour(flat, batch)
        return unflatten(text, tensors)

    def _find(self) -> Link:
        """Connect to the sender. Tries again until it answers or the view is over."""
        me = self._me
        assert me.board is not None
        deadline = time.monotonic() + me.timeouts.view_s
        while True:
            try:
                address = me.board.fetch(_key(self._view), timeout_s=RETRY_S)
                self._link = me.dial(address, timeout_s=RETRY_S, limits=LIMITS)
                if not self._closed:
                    return self._link
            except LinkError:
                if time.monotonic() > deadline:
                    raise
            if self._closed or me.view_changing:
                raise LinkError("The view is over.")


def _moving(link: Link, room: memoryview | None = None) -> Received:
    """Return the next message, however long it takes. Raises LinkTimeout if no byte arrives for a while:
    training continues, and the kept gradients would pile up."""

    def place(_message: object, nbytes: int) -> memoryview:
        if room is None or nbytes != room.nbytes:
            expected = "none" if room is None else f"one of {room.nbytes}"
            raise ProtocolError(f"{link.peer} sent a payload of {nbytes} bytes, not {expected}")
        return room

    while True:
        before = link.bytes_received
        try:
            return link.recv(STATE, timeout_s=STALLED_S, place=place)
        except LinkTimeout:
            if link.bytes_received == before:
                raise


def _key(view: View) -> str:
    return f"state/{view.number}"
