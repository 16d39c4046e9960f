"""The worker's half of the parameter-server strategies: computes on what the servers hold.

begin     wait until the step may begin (sync: the previous round is over), and for a free gradient buffer
compute   forward and backward; gradients are written where the servers read, or sent while backward runs
push      tell the servers
finish    in rounds, wait until the update is made. Otherwise the next step begins at once, on the other
          gradient buffer, and the report of this one is resolved when the servers answer

How a push reaches the servers is chosen once per view: `RoundWorker` (rounds.py) through a table in shared
memory, `MessagePushes` by messages, `UnorderedPushes` by messages without lockstep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from manyhands.compute.gradients import gradients, row_seed
from manyhands.contract import AppliedSteps, Context, Joined, Learner, State, StepReport
from manyhands.embeddings.modules import RowModel
from manyhands.errors import JobError
from manyhands.ps.block_store import bytes_of, clip_factor
from manyhands.ps.client import Client, PushOutcome, ServerWaiter
from manyhands.ps.config import ParameterServer
from manyhands.ps.gradient_buffer import GradientBuffer, Overlap, WorkerMemory
from manyhands.ps.model_layout import piece_state
from manyhands.ps.node import PsNode
from manyhands.ps.policies import Contribution
from manyhands.ps.protocol import EnterView
from manyhands.ps.remote_tables import RemoteTables
from manyhands.ps.rounds import RoundWorker
from manyhands.ps.row_pushes import OwnRows, RowPushes, row_pushes

if TYPE_CHECKING:
    from manyhands.compute.feed import Share
    from manyhands.compute.train_state import TrainState
    from manyhands.hosts.view import View


class Pushes(Protocol):
    """How this worker's gradients reach the servers, and how it learns that an update is made."""

    @property
    def ticks(self) -> int:
        """Steps of the schedule that the servers have done."""

    def begin(self) -> tuple[int, int]:
        """Wait until the next step may begin; returns its number and a free slot for its gradient."""

    def accumulating(self) -> AbstractContextManager[None]:
        """A context for backwards whose gradients are not complete."""

    def push(
        self, push: Contribution, report: StepReport, row_grads: Mapping[str, memoryview] | None
    ) -> None:
        """The gradient is complete. `row_grads`, by server, are sent with it."""

    def finish(self) -> None:
        """Wait until the next step would find its update, where updates are made in rounds."""

    def drain(self) -> None:
        """Wait until every push is resolved and the newest parameters are here."""

    def take_bytes_sent(self) -> int:
        """Bytes sent over the network since the last call, by this worker and for it by servers."""


class MessagePushes:
    """Pushes by message; gradients are in shared memory, or are sent."""

    def __init__(
        self, client: Client, overlap: Overlap, *, rounds: bool, waits_for_params: bool
    ) -> None:
        """`waits_for_params`: if true, a step begins when all parameters are here, not only the first."""
        self._client = client
        self._overlap = overlap
        self._rounds = rounds
        self._waits_for_params = waits_for_params
        self._reports: dict[int, StepReport] = {}
        """Reports of pushes with an unknown outcome; none in lockstep, where reports are complete."""
        self._last = self._began = self._sent = 0
        client.pushes.resolved = self._resolve

    @property
    def ticks(self) -> int:
        return self._client.ticks

    def begin(self) -> tuple[int, int]:
        self._last, slot = self._client.begin(rounds=self._rounds)
        self._began = self._client.version
        if self._waits_for_params:
            self._client.wait_for_params()
        self._overlap.begin(self._last, slot)
        return self._last, slot

    def accumulating(self) -> AbstractContextManager[None]:
        return self._overlap.accumulating()

    def push(
        self, push: Contribution, report: StepReport, row_grads: Mapping[str, memoryview] | None
    ) -> None:
        self._overlap.finish()
        self._client.push(push, began=self._began, row_grads=row_grads)

    def finish(self) -> None:
        if self._rounds:
            self._client.finish(self._last)

    def drain(self) -> None:
        self._client.drain()
        self._client.wait_for_params()

    def _resolve(self, seq: int, outcome: PushOutcome) -> None:
        """Complete the report of a push. Called in the thread that handles messages."""
        if (report := self._reports.pop(seq, None)) is not None:
            report.staleness, report.dropped = outcome.staleness, outcome.left_out
            report.lr = report.lr if outcome.lr is None else outcome.lr
            report.resolved = True

    def take_bytes_sent(self) -> int:
        total = self._client.bytes_sent + self._client.bytes_of_servers
        since, self._sent = total - self._sent, total
        return since


class UnorderedPushes(MessagePushes):
    """The same without lockstep: the outcome of a push is known later, and completes its report."""

    def push(
        self, push: Contribution, report: StepReport, row_grads: Mapping[str, memoryview] | None
    ) -> None:
        report.resolved = False
        self._reports[push.seq] = report
        super().push(push, report, row_grads)

    def drain(self) -> None:
        self._client.drain()
        self._client.pull()


class PsLearner(Learner):
    def __init__(self, config: ParameterServer, context: Context) -> None:
        super().__init__(context)
        self._config = config
        self._node = PsNode(config, self.train_state, self.me)
        self._client: Client | None = None
        self._memory: WorkerMemory | None = None
        self._pushes: Pushes | None = None
        self._overlap: Overlap | None = None
        self._rows: RowPushes | None = None
        """The way of gradients of table rows, if the model has tables."""
        self._in_step: tuple[int, int] | None = None
        self._in_flight: StepReport | None = None
        """Report of the step whose push the servers may have, until `step` returns it."""
        self._before: list[Tensor] = []
        """The model's buffers before the step."""
        self._exchanges = 0
        self._seen = 0
        """The newest version of the parameters that this worker has computed with."""

    # The view -----------------------------------------------------------------------------------

    @cached_property
    def _buffer(self) -> GradientBuffer:
        """Made in the first view: the optimizer is built after this object."""
        return GradientBuffer(self.train_state.model, self._node.parameters)

    def interrupt(self) -> None:
        if (rounds := self._node.rounds) is not None:
            rounds[1].ring([self.me.name])
        if self._client is not None:
            self._client.wake_up()

    def on_view(self, view: View) -> Joined:
        node, me = self._node, self.me
        if self._client is not None:
            self._seen = max(self._seen, self._client.version)
        self._drop_client()
        node.leave(view)
        node.check()
        if self._memory is None:
            self._memory = self._lay_out(view)
            self._rows = row_pushes(node)
        memory = self._memory
        node.enter(view, local={me.name: memory.slots})
        self._exchanges = 0
        client = self._client = self._connect(view, memory)
        node.wait_until_begun()
        if isinstance(self.train_state.tables, RemoteTables):
            near = node.server.near if node.server is not None else None
            self.train_state.tables.connect(client.requests, near)
        if self._in_step is not None and self._in_step not in client.last_parts:
            for buffer, before in zip(model_buffers(self.train_state), self._before, strict=True):
                buffer.copy_(before)  # the step will be done again, and must find them as it did
            self._in_flight = None
        self._in_step = None
        client.wait_for_params()
        node.schedule_clock.advance(client.ticks)
        memory.refresh()
        if node.rounds is not None:
            self._pushes = RoundWorker(
                me.name,
                *node.rounds,
                server=node.server.rounds if node.server is not None else None,
                check=self._check,
                timeout_s=me.timeouts.collective_s,
                activity=self.train_state.activity,
            )
        else:
            rounds, model = node.mode.rounds, self.train_state.model
            early = rounds and not memory.has_copy
            self._overlap = Overlap(model, node.parameters, self._buffer, client, enabled=early)
            by_message = MessagePushes if self._config.traits.lockstep else UnorderedPushes
            waits = rounds and memory.has_copy
            self._pushes = by_message(client, self._overlap, rounds=rounds, waits_for_params=waits)
        rescued, self._in_flight = self._in_flight, None
        if rescued is not None:
            rescued.resolved = True
        return Joined(
            transport=node.transport.describe(),
            placement=f"{client.placement.describe()}; {self._config.placement}",
            applied=node.applied_steps(),
            rescued=rescued,
            whole_steps=self._wants_whole_steps,
            prefetches=isinstance(self.train_state.tables, RemoteTables)
            and self.train_state.tables.foresees,
        )

    def _connect(self, view: View, memory: WorkerMemory) -> Client:
        node, me = self._node, self.me
        addresses = [slot.segment.address for slot in memory.slots if slot.segment is not None]
        row_grads = self._rows.addresses if self._rows is not None else []
        client = Client(
            EnterView(me.name, view.number, addresses, row_grads, self._seen),
            node.servers_in(view),
            node=node,
            params=memory.params,
            slots=memory.slots,
            waiter=ServerWaiter(
                me.name,
                check=self._check,
                timeout_s=me.timeouts.collective_s,
                activity=self.train_state.activity,
            ),
        )
        if node.server is not None:
            node.server.followed = client.wake_up
        return client

    def _check(self) -> None:
        """Raise if there is nothing left to wait for. Cheap: called while a step waits."""
        server = self._node.server
        if self.me.view_changing or (server is not None and server.error is not None):
            self._node.check()

    def _lay_out(self, view: View) -> WorkerMemory:
        node = self._node
        return WorkerMemory(
            self._buffer,
            node.transport.find_params(view),
            node.parameters,
            slots=[node.transport.allocate("manyhands-gradients") for _ in range(node.mode.slots)],
            device=self.train_state.device,
            copies_params=node.transport.copies_params,
        )

    def close(self) -> AppliedSteps | None:
        self._drop_client()
        return self._node.close()

    def _drop_client(self) -> None:
        if self._overlap is not None:
            self._overlap.stop()
        if self._client is not None:
            self._client.close()
        self._client = self._pushes = self._overlap = None

    # A step -------------------------------------------------------------------------------------

    def step(self, share: Share) -> StepReport:
        pushes, memory, train_state = self._pushes, self._memory, self.train_state
        assert pushes is not None
        assert memory is not None
        started = time.perf_counter()
        seq, slot = pushes.begin()
        began = time.perf_counter()
        self._in_step = (share.step, share.part)
        self._before = [buffer.clone() for buffer in model_buffers(train_state)]
        self._node.schedule_clock.advance(pushes.ticks)
        memory.refresh()
        lr = train_state.lr
        memory.begin(slot)
        weight, loss = gradients(train_state, share, total=_not_known, local=pushes.accumulating)
        memory.finish(slot)
        row_grads = None
        if self._rows is not None:
            row_grads = self._rows.push(share, slot, weight, lr)
        report = StepReport(share.step, share.samples, weight, loss, lr, part=share.part)
        push = self._contribution(share, seq, slot, weight, float(loss))
        computed = time.perf_counter()
        report.compute_s, report.wait_s = computed - began, began - started
        self._in_flight = report
        pushes.push(push, report, row_grads)
        pushes.finish()
        ended = time.perf_counter()
        self._in_step, self._in_flight = None, None
        report.wait_s = (began - started) + (ended - computed)
        report.bytes_sent = pushes.take_bytes_sent()
        report.waited_for = self._connected().waiter.take_longest()
        return report

    def _contribution(
        self, share: Share, seq: int, slot: int, weight: float | Tensor, loss: float
    ) -> Contribution:
        """Describe a push: its part of the step, and the weights that the servers multiply it by."""
        state = self.train_state
        samples, total = float(share.samples), float(share.total)
        if state.weight is not None:
            # Scaled by its own weight: the servers know all workers' weights, and divide by their sum.
            samples, total = float(weight), 1.0
            if not 0 <= samples < math.inf:
                raise JobError(
                    f"weight() of the samples of step {share.step} is {samples}; it must be a number, "
                    "0 or more."
                )
        return Contribution(
            self.me.name,
            seq,
            slot,
            share.step,
            share.part,
            samples,
            total,
            share=(share.samples, share.total),
            scale=self._clip_own_gradient(slot, samples, total),
            lr_factor=state.lr_factor,
            ticks=state.ticks,
            loss=loss if math.isfinite(loss) else 0.0,  # the report has it
        )

    def _clip_own_gradient(self, slot: int, samples: float, total: float) -> float:
        """Return the factor that clips this worker's gradient, in modes without rounds.

        The gradient is a part of the mean over `total`; the clipped norm is that of the mean over `samples`.
        In rounds the servers clip the whole gradient instead (updates.py), and the factor is 1.
        """
        limit = self._node.mode.push_clip_norm
        if limit is None or not samples:
            return 1.0
        assert self._memory is not None
        return clip_factor(self._memory.slots[slot].norm() * total / samples, limit)

    @property
    def _wants_whole_steps(self) -> bool:
        """A model that changes shared rows itself has finished a part once it is computed: there is no mean
        over a step, and larger parts need fewer messages."""
        return isinstance(self._rows, OwnRows) and isinstance(self.train_state.model, RowModel)

    def prefetch(self, share: Share) -> None:
        tables, model = self.train_state.tables, self.train_state.model
        assert isinstance(tables, RemoteTables)
        for index, (batch, samples) in enumerate(share.batches):
            if samples and isinstance(model, RowModel):
                tables.ahead(model, batch, row_seed(self.train_state, share, index))
            elif samples:
                tables.expect(batch, share.step)

    def drain(self) -> None:
        assert self._pushes is not None
        assert self._memory is not None
        self._pushes.drain()
        self._node.schedule_clock.advance(self._pushes.ticks)
        self._memory.refresh()

    def rest(self) -> None:
        self._connected().rest()

    @contextmanager
    def eval_model(self) -> Iterator[torch.nn.Module]:
        """Return a context with the model and the statistics of the first worker, which are those that are
        saved."""
        self.drain()
        buffers = model_buffers(self.train_state)
        if buffers and self.me.world > 1:
            self._exchanges += 1
            requests = self._connected().requests
            whole = torch.cat([buffer.detach().reshape(-1).double().cpu() for buffer in buffers])
            if self.me.rank == 0:
                requests.send_statistics(self._exchanges, bytes_of(whole))
            else:
                received = requests.receive_statistics(self._exchanges)
                whole = torch.frombuffer(received, dtype=torch.float64)
                for buffer, part in zip(
                    buffers, whole.split([buffer.numel() for buffer in buffers]), strict=True
                ):
                    buffer.copy_(part.view_as(buffer))
        yield self.train_state.model

    def snapshot(self) -> State:
        """Copy the state of the servers' optimizers into this worker's."""
        train_state, layout = self.train_state, self._node.layout
        self.drain()
        tensor_messages = self._connected().requests.states()
        states = {
            number: block_state.state
            for (_, number), block_state in tensor_messages.complete.items()
        }
        for name, parameter in self._node.parameters.items():
            state = piece_state(layout, name, parameter.shape, states)
            if state:
                train_state.optimizer.state[parameter] = state
        self._node.transport.evict_rows()
        return {}

    def _connected(self) -> Client:
        assert self._client is not None, "a view comes before the first step"
        return self._client


def model_buffers(train_state: TrainState) -> list[Tensor]:
    """Running statistics and other state of the model that no gradient changes."""
    return list(train_state.model.buffers())


def _not_known(mine: float | Tensor) -> float:
    """Stands for the weight of all workers, which the servers add up."""
    return 1.0
