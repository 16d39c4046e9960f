"""The worker's half of the parameter-server strategies: computes on what the servers hold.

begin     wait for leave to begin (sync: the round before is over), and for a free gradient buffer
compute   forward and backward; gradients are written where the servers read, or travel while the
          backward goes on
push      tell the servers
finish    in rounds: until the update is made. Otherwise not at all: the next step begins at once,
          on the other gradient buffer, and the report of this one is resolved when the news come
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyhands.compute.gradients import StepReport, gradients, row_seed
from manyhands.contract import Learner
from manyhands.embeddings.modules import RowModel, bind
from manyhands.embeddings.remote import RemoteTables
from manyhands.embeddings.sparse_grads import SharedGrads
from manyhands.errors import JobError, SpecError
from manyhands.ps.block_store import FlatTensors, bytes_of, clip_factor
from manyhands.ps.client import Client
from manyhands.ps.config import ParameterServer
from manyhands.ps.gradient_buffer import GradientBuffer
from manyhands.ps.ledger import Contribution
from manyhands.ps.model_layout import piece_state
from manyhands.ps.node import PsNode
from manyhands.ps.overlap import Overlap
from manyhands.ps.rounds import RoundWorker
from manyhands.ps.server_connection import PushOutcome

if TYPE_CHECKING:
    from manyhands.compute.feed import Share
    from manyhands.compute.train_state import TrainState
    from manyhands.hosts.view import Me, View


class PsLearner(Learner):
    def __init__(self, config: ParameterServer) -> None:
        self._config = config
        self._client: Client | None = None
        self._slots: list[FlatTensors] = []
        self._computed: FlatTensors | None = None
        """The parameters that the model computes with, where they are not those of the servers."""
        self._gradient: FlatTensors | None = None
        """Where the backward writes, where it is not a slot: on a GPU."""
        self._reports: dict[int, StepReport] = {}
        self._in_step: tuple[int, int] | None = None
        self._in_flight: StepReport | None = None
        """Of the step whose push the servers may have; until `step` returns it."""
        self._before: list[Tensor] = []
        self._sent = 0
        self._exchanges = 0
        self._turns: RoundWorker | None = None
        self._baskets: list[SharedGrads] = []
        """For gradients of table rows, one a slot, where servers change the rows."""
        self._packed: dict[str, memoryview] | None = None
        """Gradients of table rows that travel with the next push."""
        self._seen = 0
        """The newest version of the parameters that this worker has computed with."""

    def prepare(self, train_state: TrainState, me: Me) -> None:
        super().prepare(train_state, me)
        # The scheduler here only tells the rate: the servers' optimizers do the steps.
        train_state.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._node = PsNode(self._config, train_state, me)
        self._rounds = self._node.mode.rounds
        self._gradient_buffer = GradientBuffer(train_state.model, self._node.parameters)
        self._overlap = Overlap(train_state.model, self._node.parameters, self._gradient_buffer)

    # The view -----------------------------------------------------------------------------------

    def interrupt(self) -> None:
        if (rounds := self._node.rounds) is not None:
            rounds[1].ring([self.me.name])
        if self._client is not None:
            self._client.wake_up()

    def on_view(self, view: View) -> None:
        node, me = self._node, self.me
        if self._client is not None:
            self._seen = max(self._seen, self._client.version)
        self._drop_client()
        node.leave(view)
        self._reports.clear()
        node.check()
        if not self._slots:
            node.find_memory(view)
            self._lay_out()
        self._find_baskets()
        node.enter(view, local={me.name: self._slots})
        assert node.params is not None
        self._sent, self._exchanges = 0, 0
        self._client = Client(
            me.name,
            view=view.number,
            servers=node.servers_in(view),
            dial=node.dial,
            params=node.params,
            slots=self._slots,
            check=node.check,
            timeout_s=me.timeouts.collective_s,
            resolved=self._resolve,
            refused=node.refused,
            seen=self._seen,
            baskets=[basket.address for basket in self._baskets],
            replica=node.replica_version if node.server is not None else None,
            send_gate=node.send_gate,
            activity=self.train_state.activity,
        )
        if node.server is not None:
            node.server.followed = self._client.wake_up
        node.wait_until_begun()
        if isinstance(self.train_state.tables, RemoteTables):
            near = node.server.near if node.server is not None else None
            self.train_state.tables.connect(self._client, near)
        self._take_turns()
        if self._in_step is not None and self._in_step not in self._client.last_parts:
            for buffer, before in zip(model_buffers(self.train_state), self._before, strict=True):
                buffer.copy_(before)  # the step will be done again, and must find them as it did
            self._in_flight = None
        self._in_step = None
        self._client.wait_for_runs()
        node.schedule_clock.advance(self._client.ticks)
        self._refresh()
        self._overlap.follow(self._client, enabled=self._rounds and self._computed is None)

    def _take_turns(self) -> None:
        """Where rounds are agreed on in shared memory: this worker's half of it."""
        node, self._turns = self._node, None
        if node.rounds is not None:
            table, bell = node.rounds
            self._turns = RoundWorker(
                self.me.name,
                table,
                bell,
                server=node.server.rounds if node.server is not None else None,
                check=node.check,
                timeout_s=self.me.timeouts.collective_s,
            )

    def rescued(self) -> StepReport | None:
        report, self._in_flight = self._in_flight, None
        if report is not None:
            report.resolved = True
        return report

    def settled(self) -> dict[str, Any] | None:
        return self._node.settled()

    def placement(self) -> str:
        if self._client is None or self._client.placement is None:
            return ""
        return f"{self._client.placement.describe()}; {self._config.placement}"

    def transport(self) -> str:
        if self._node.shared:
            return "shared memory"
        return "tcp, authenticated only" if self.me.trust_network else "tcp with TLS"

    def close(self) -> None:
        self._drop_client()
        self._node.leave()

    def _drop_client(self) -> None:
        if self._client is not None:
            self._overlap.stop()
            self._client.close()
            self._client = None

    def _lay_out(self) -> None:
        """Let the model compute with the flat memory itself, or with flat copies of it."""
        node, train_state = self._node, self.train_state
        assert node.params is not None
        layout, count = node.layout, node.mode.slots
        on_host = train_state.device == "cpu"
        if node.shared:
            self._slots = [
                FlatTensors.shared(layout, label="manyhands-gradients") for _ in range(count)
            ]
        else:
            self._slots = [FlatTensors.private(layout) for _ in range(count)]
        if not on_host:
            self._computed = FlatTensors.private(layout, device=train_state.device)
            self._gradient = FlatTensors.private(layout, device=train_state.device)
        elif not node.shared and not self._config.lockstep:
            # News arrive while the model computes.
            self._computed = FlatTensors.private(layout)
        params = self._computed or node.params
        if self._computed is not None:
            self._computed.copy_(node.params)
        for name, parameter in node.parameters.items():
            parameter.data = params.piece(name).view_as(parameter)

    def _find_baskets(self) -> None:
        """Where an update is made of several workers' gradients, servers change the rows of tables too;
        otherwise each worker does."""
        tables, model = self.train_state.tables, self.train_state.model
        if not tables.specs or self._baskets or isinstance(tables, RemoteTables):
            return
        if not self._node.shared:
            self.train_state.tables = RemoteTables(
                tables,
                adds=isinstance(model, RowModel),
                bits=self._config.row_bits,
                age=self._node.mode.row_age,
            )
            bind(model, self.train_state.tables)
        if not self._rounds:
            return
        if isinstance(model, RowModel):
            raise SpecError(
                f"{self._config.name} adds up gradients, and {type(model).__name__} changes rows itself. "
                "Use  --strategy ps:async  or  --strategy ps:ssp."
            )
        if self._node.shared:
            self._baskets = [SharedGrads.create(tables.specs) for _ in self._slots]

    def _give_rows(self, share: Share, slot: int, weight: float | Tensor, lr: float) -> None:
        """The gradients of table rows: to the servers, or straight into the rows."""
        tables = self.train_state.tables
        basket = tables.take()
        if isinstance(tables, RemoteTables):
            self._packed = tables.give(self.me.name, slot, basket)
        elif self._baskets:
            self._baskets[slot].put(basket)
        elif basket and share.samples:
            # The part is an update of its own: the mean over it, moving the rows by its part of a step.
            part = share.samples / share.total
            mean = 1 / part if self.train_state.weight is None else 1 / float(weight)
            tables.stores.apply(
                [basket], [mean], lr=lr * part, base_lr=self.train_state.base_lr, now=share.step
            )

    def _refresh(self) -> None:
        if self._computed is not None:
            assert self._node.params is not None
            self._computed.copy_(self._node.params)

    # A step -------------------------------------------------------------------------------------

    def step(self, share: Share) -> StepReport:
        client, train_state, started = self._joined(), self.train_state, time.perf_counter()
        turns = self._turns
        seq, slot = (0, 0) if turns else client.begin(rounds=self._rounds)
        began, version = time.perf_counter(), client.version
        self._in_step = (share.step, share.part)
        self._before = [buffer.clone() for buffer in model_buffers(train_state)]
        self._node.schedule_clock.advance(turns.ticks if turns else client.ticks)
        if self._rounds and self._computed is not None:
            client.wait_for_runs()
        self._refresh()
        lr = train_state.lr
        self._gradient_buffer.begin(self._gradient or self._slots[slot])
        self._overlap.begin(seq, slot)
        weight, loss = gradients(
            train_state, share, total=_not_known, local=self._overlap.accumulating
        )
        self._gradient_buffer.finish()
        self._give_rows(share, slot, weight, lr)
        if self._gradient is not None:
            self._slots[slot].copy_(self._gradient)
        self._overlap.finish()
        report = StepReport(share.step, share.samples, weight, loss, lr, part=share.part)
        computed = time.perf_counter()
        report.compute_s, report.wait_s = computed - began, began - started
        self._in_flight = report
        self._push(client, share, seq, slot, weight, version, report)
        if turns is not None:
            turns.finish()
        elif self._rounds:
            client.finish(seq)
        ended = time.perf_counter()
        self._in_step, self._in_flight = None, None
        report.wait_s = (began - started) + (ended - computed)
        report.bytes_sent = self._bytes_since()
        return report

    def _push(
        self,
        client: Client,
        share: Share,
        seq: int,
        slot: int,
        weight: float | Tensor,
        version: int,
        report: StepReport,
    ) -> None:
        samples, total = float(share.samples), float(share.total)
        if self.train_state.weight is not None:
            # Scaled by its own weight: the servers know everybody's, and divide by their sum.
            samples, total = float(weight), 1.0
            if not 0 <= samples < math.inf:
                raise JobError(
                    f"weight() of the samples of step {share.step} is {samples}; it must be a number, "
                    "0 or more."
                )
        parts, loss = (share.samples, share.total), float(report.loss)
        loss = loss if math.isfinite(loss) else 0.0  # it comes with the report
        if self._turns is not None:
            self._turns.push(
                Contribution(
                    *(self.me.name, self._turns.seq + 1, 0, share.step, share.part, samples, total),
                    share=parts,
                    lr_factor=self.train_state.lr_factor,
                    ticks=self.train_state.ticks,
                    loss=loss,
                )
            )
            return
        scale = 1.0
        if not self._rounds and self.train_state.clip_norm is not None and samples:
            norm = self._slots[slot].norm() * total / samples
            scale = clip_factor(norm, self.train_state.clip_norm)
        if not self._rounds or not self._config.lockstep:
            report.resolved = False
            self._reports[seq] = report
        push = Contribution(
            self.me.name,
            seq,
            slot,
            share.step,
            share.part,
            samples,
            total,
            parts,
            scale=scale,
            lr_factor=self.train_state.lr_factor,
            ticks=self.train_state.ticks,
            loss=loss,
        )
        client.push(push, began=version, baskets=self._packed)

    def _resolve(self, seq: int, fate: PushOutcome) -> None:
        """What became of a push; in a thread of the client's."""
        if (report := self._reports.pop(seq, None)) is not None:
            report.staleness, report.dropped = fate.staleness, fate.left_out
            if fate.lr is not None:
                report.lr = fate.lr
            report.resolved = True

    @property
    def whole_steps(self) -> bool:
        """A model that changes shared rows itself is done with a part when it has computed it: the mean
        over a step is nobody's, and the larger a part the fewer messages."""
        return self._node.shared and isinstance(self.train_state.model, RowModel)

    @property
    def looks_ahead(self) -> bool:
        return (
            isinstance(self.train_state.tables, RemoteTables) and self.train_state.tables.foresees
        )

    def ahead(self, share: Share) -> None:
        tables, model = self.train_state.tables, self.train_state.model
        assert isinstance(tables, RemoteTables)
        for index, (batch, samples) in enumerate(share.batches):
            if samples and isinstance(model, RowModel):
                tables.ahead(model, batch, row_seed(self.train_state, share, index))
            elif samples:
                tables.expect(batch, share.step)

    def drain(self) -> None:
        client = self._joined()
        client.drain()
        if self._config.lockstep:
            client.wait_for_runs()
        else:
            client.pull()
        self._node.schedule_clock.advance(self._turns.ticks if self._turns else client.ticks)
        self._refresh()

    def rest(self) -> None:
        self._joined().rest()

    def eval_model(self) -> torch.nn.Module:
        """With the statistics of the first worker, which are those that are saved."""
        self.drain()
        buffers = model_buffers(self.train_state)
        if buffers and self.me.world > 1:
            self._exchanges += 1
            client = self._joined()
            whole = torch.cat([buffer.detach().reshape(-1).double().cpu() for buffer in buffers])
            if self.me.rank == 0:
                client.tell_buffers(self._exchanges, bytes_of(whole))
            else:
                heard = client.hear_buffers(self._exchanges)
                whole = torch.frombuffer(heard, dtype=torch.float64)
                for buffer, part in zip(
                    buffers, whole.split([buffer.numel() for buffer in buffers]), strict=True
                ):
                    buffer.copy_(part.view_as(buffer))
        return self.train_state.model

    def collect(self) -> None:
        """Put what the servers' optimizers remember into this worker's, for a checkpoint."""
        train_state, layout = self.train_state, self._node.layout
        self.drain()
        tensor_messages = self._joined().states()
        states = {
            number: block_state.state
            for (_, number), block_state in tensor_messages.complete.items()
        }
        for name, parameter in self._node.parameters.items():
            state = piece_state(layout, name, parameter.shape, states)
            if state:
                train_state.optimizer.state[parameter] = state
        if self._node.shared and not self._config.lockstep:
            train_state.tables.stores.evict(train_state.tables.now)  # all others are at rest

    def _joined(self) -> Client:
        assert self._client is not None, "a view comes before the first step"
        return self._client

    def _bytes_since(self) -> int:
        """Over the network since the last report: by this worker, and by servers that told it."""
        if self._node.shared:
            return 0
        client = self._joined()
        total = client.bytes_sent + client.bytes_of_servers
        since, self._sent = total - self._sent, total
        return since


def model_buffers(train_state: TrainState) -> list[Tensor]:
    """Running statistics and other state of the model that no gradient changes."""
    return list(train_state.model.buffers())


def _not_known(mine: float | Tensor) -> float:
    """The weight of all workers is for the servers to add up."""
    return 1.0
