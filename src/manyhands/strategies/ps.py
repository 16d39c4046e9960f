"""Parameter servers: workers push gradients to servers, which hold the parameters and the optimizer.

The parameters lie in blocks, spread over servers by bytes; every worker is also a server of its part
(colocated). Inside a host, parameters and gradients lie in shared memory: a push is a few words.
(Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014.)

Cost per worker and step: one message to each server and one back; over the network the gradients
out and the parameters in, M bytes each, as much as a ring all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from manyhands.errors import LinkError, SpecError
from manyhands.strategies.base import Learner, Strategy

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from manyhands.cluster.view import Me, View
    from manyhands.ps.blocks import Layout
    from manyhands.ps.client import Client
    from manyhands.ps.memory import Flat
    from manyhands.ps.server import Server
    from manyhands.train.feed import Share
    from manyhands.train.step import StepReport
    from manyhands.train.trainee import Trainee


@dataclass(frozen=True)
class PsSync(Strategy):
    name: ClassVar[str] = "ps:sync"
    summary: ClassVar[str] = "parameter servers, each step waits for all workers"
    needs_coordinator: ClassVar[bool] = True

    servers: int | Literal["auto"] = "auto"
    """How many of the workers serve; auto: all."""
    transport: Literal["auto", "shm"] = "auto"
    """How numbers travel: auto takes shared memory, inside a host."""

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.servers != "auto" and not 1 <= self.servers <= workers:
            raise SpecError(
                f"{self.name}: servers={self.servers}, and there are {workers} workers, each of which "
                f"can serve. Use servers=1 to {workers}, or auto."
            )

    def build(self) -> Learner:
        return PsLearner(self)


class PsLearner(Learner):
    def __init__(self, config: PsSync) -> None:
        self._config = config
        self._server: Server | None = None
        self._client: Client | None = None
        self._params: Flat | None = None
        self._grads: Flat | None = None
        self._seq = 0
        self._shared = False
        self._sent = 0

    def prepare(self, trainee: Trainee, me: Me) -> None:
        super().prepare(trainee, me)
        if trainee.device != "cpu":
            raise SpecError(
                f"{self._config.name} computes on CPUs so far, and this worker has {trainee.device}. "
                "Use  --device cpu  or  --strategy allreduce."
            )
        # The scheduler here only tells the rate: the servers' optimizers do the steps.
        trainee.optimizer._opt_called = True  # type: ignore[attr-defined]

    def on_view(self, view: View) -> None:
        from manyhands.ps.memory import Flat, layout_of
        from manyhands.ps.optimizer import is_elementwise
        from manyhands.ps.placement import place

        self.close()
        trainee, me = self.trainee, self.me
        names = [seat.name for seat in view.workers]
        count = len(names) if self._config.servers == "auto" else self._config.servers
        servers = names[:count]
        layout = layout_of(
            trainee.model,
            trainee.optimizer,
            whole_tensors=not is_elementwise(trainee.optimizer),
            min_blocks=count,
        )
        placement = place(layout, servers)
        self._shared = view.one_host
        self._params = self._place_parameters(layout, view)
        self._grads = (
            Flat.shared(layout, label="manyhands-gradients")
            if self._shared
            else Flat.private(layout)
        )
        self._point_model_at(self._params, self._grads)
        blocks = {name: [block.number for block in placement.blocks_of(name)] for name in servers}
        if me.name in servers:
            self._serve(layout, blocks[me.name], [n for n in servers if n != me.name], names)
        self._connect(view, blocks)
        self._seq = 0
        self._sent = 0

    def step(self, share: Share) -> StepReport:
        from manyhands.train.step import StepReport, gradients

        assert self._client is not None
        assert self._grads is not None
        trainee, started = self.trainee, time.perf_counter()
        lr = trainee.lr
        self._grads.zero_()
        weight, loss = gradients(trainee, share, total=_not_known)
        pushed = time.perf_counter()
        self._seq += 1
        with self._naming_the_servers():
            if trainee.weight is None:
                self._client.push(self._seq, samples=share.samples, total=share.total)
            else:
                # Scaled by its own weight: the servers know everybody's, and scale by their sum.
                self._client.push(self._seq, samples=float(weight), total=1.0)
            self._client.wait(self._seq, timeout_s=self.me.timeouts.collective_s)
        if trainee.scheduler is not None:
            trainee.scheduler.step()
        ended = time.perf_counter()
        return StepReport(
            share.step,
            share.samples,
            weight,
            loss,
            lr,
            compute_s=pushed - started,
            wait_s=ended - pushed,
            bytes_sent=self._bytes_since(),
        )

    def transport(self) -> str:
        return "shared memory" if self._shared else "tcp"

    def collect(self) -> None:
        """Put what the servers' optimizers remember into this worker's, for a checkpoint."""
        from manyhands.ps.memory import piece_state

        assert self._client is not None
        assert self._grads is not None
        trainee, layout = self.trainee, self._grads.layout
        with self._naming_the_servers():
            states = self._client.state(timeout_s=self.me.timeouts.collective_s)
        for name, parameter in self._parameters().items():
            state = piece_state(layout, name, parameter.shape, states)
            if state:
                trainee.optimizer.state[parameter] = state

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def _place_parameters(self, layout: Layout, view: View) -> Flat:
        """The parameters: once a host where memory is shared, once a worker where not."""
        from manyhands.ps.memory import Flat

        me, key = self.me, f"params/{view.number}"
        if not self._shared:
            params = Flat.private(layout)
        elif me.rank == 0:
            params = Flat.shared(layout, label="manyhands-parameters")
        else:
            assert me.board is not None
            return Flat.attached(layout, me.board.fetch(key, timeout_s=me.timeouts.view_s))
        for name, parameter in self._parameters().items():
            params.piece(name).copy_(parameter.detach().reshape(-1))
        if params.segment is not None:
            assert me.board is not None
            me.board.post(key, params.segment.address)
        return params

    def _point_model_at(self, params: Flat, grads: Flat) -> None:
        """From now on the model computes with the flat memory itself."""
        for name, parameter in self._parameters().items():
            parameter.data = params.piece(name).view_as(parameter)
            parameter.grad = grads.piece(name).view_as(parameter)

    def _serve(
        self, layout: Layout, blocks: list[int], others: list[str], workers: list[str]
    ) -> None:
        from manyhands.ps.memory import Flat, block_state
        from manyhands.ps.optimizer import BlockOptimizer
        from manyhands.ps.policies import Sync
        from manyhands.ps.server import Server

        trainee, me = self.trainee, self.me
        assert self._params is not None
        held = {
            n: (layout.buffers[layout.blocks[n].buffer].group, self._params.block(n))
            for n in blocks
        }
        optimizer = BlockOptimizer(trainee.optimizer, held)
        states = {
            name: trainee.optimizer.state.get(p, {}) for name, p in self._parameters().items()
        }
        for number in blocks:
            if state := block_state(layout, layout.blocks[number], states):
                optimizer.load_state(number, state)
        self._server = Server(
            me.name,
            blocks=blocks,
            params=self._params,
            optimizer=optimizer,
            policy=Sync(workers),
            address=f"unix:{me.scratch}/ps-{me.name}-{me.view.number}",
            attach=lambda address: Flat.attached(layout, address),
            scheduler=trainee.schedule_for(optimizer.optimizer),
            clip_norm=trainee.clip_norm,
            peers=others,
        )

    def _connect(self, view: View, blocks: dict[str, list[int]]) -> None:
        """Find every server by the board, and enter."""
        from manyhands.ps.client import Client

        me = self.me
        assert me.board is not None
        assert self._params is not None
        assert self._grads is not None
        if self._server is not None:
            me.board.post(f"ps/{view.number}/{me.name}", self._server.address)
        limit = me.timeouts.view_s
        addresses = {n: me.board.fetch(f"ps/{view.number}/{n}", timeout_s=limit) for n in blocks}
        self._client = Client(
            me.name,
            addresses=addresses,
            blocks=blocks,
            params=self._params,
            grads=self._grads,
            timeout_s=limit,
        )
        if self._server is not None:
            self._server.meet(addresses, timeout_s=limit)

    def _parameters(self) -> dict[str, Parameter]:
        from manyhands.ps.memory import pieces_of

        return pieces_of(self.trainee.model, self.trainee.optimizer)

    def _bytes_since(self) -> int:
        """Over the network since the last report, by this worker and its server."""
        assert self._client is not None
        total = self._client.bytes_sent + (self._server.bytes_sent if self._server else 0)
        since, self._sent = total - self._sent, total
        return since

    @contextmanager
    def _naming_the_servers(self) -> Iterator[None]:
        try:
            yield
        except LinkError as error:
            if self._server is not None and self._server.error is not None:
                raise self._server.error from error
            raise self.me.lost_a_peer(error) from error


def _not_known(mine: float | Tensor) -> float:
    """The weight of all workers is for the servers to add up."""
    return 1.0
