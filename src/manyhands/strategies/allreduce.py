"""Synchronous all-reduce: every worker has the whole model, and gradients are summed over all workers.

Each worker computes the gradients of its share of the batch. They are summed while backward still runs
(collectives/reducer.py): on CPUs inside a host in shared memory, so that of each host only one sum travels;
otherwise over NCCL or gloo. Every worker makes the same update. The result is that of one worker with the
whole batch. (Ring all-reduce: Patarasuk and Yuan, 2009.)

When a worker dies, the others keep their process and their weights. In the next view they compare their last
steps: a worker that missed an update, or is new, gets the state from one that has it
(collectives/state_sync.py). The interrupted step is done again.

Cost per worker and step: 2 (n-1)/n times the bytes of the gradients, through memory or in 2 (n-1) messages
per bucket. With several workers on each of h hosts: 2 (h-1)/h times, sent by one worker of each host.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from manyhands.codecs.codec import PLAIN, Codec
from manyhands.collectives.buckets import NOTES, in_buckets, part_of
from manyhands.collectives.costs import SMALL_BYTES, Transport, all_reduce, sharing
from manyhands.contract import (
    WHOLE,
    AppliedPart,
    AppliedSteps,
    Context,
    Joined,
    Learner,
    StepReport,
    Strategy,
    Traits,
)
from manyhands.costs import (
    CostFacts,
    MemoryUse,
    Transfer,
    all_gather,
    all_to_all,
    replicated_model,
    scaled,
)
from manyhands.errors import ManyhandsError, PeerLost, SpecError, ViewChanging
from manyhands.hosts.me import LINK_GRACE_S
from manyhands.pairs import GPUS, HOSTS, OWN_LOOP, ROW_MODEL, TABLES, TRUST, WORKERS, Unsupported
from manyhands.threads import describe

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from manyhands.collectives.group import Group
    from manyhands.collectives.reducer import Reducer
    from manyhands.collectives.state_transfer import StateReceiver, StateSender
    from manyhands.collectives.table_sync import TableSync
    from manyhands.compute.feed import Share
    from manyhands.compute.gradients import WeightsFirst
    from manyhands.hosts.view import View

LATEST = 2_000
"""Number of past steps whose losses are kept: more than there are between two reports."""


@dataclass(frozen=True)
class AllReduce(Strategy):
    name: ClassVar[str] = "allreduce"
    variants = ({"tables": "shared"}, {"tls": True})

    bucket_mb: int = 25
    """Size of a gradient bucket in MiB; between hosts, at most an eighth of the model, so that sending
    begins early."""
    tables: Literal["replicated", "shared"] = "replicated"
    """Where the rows of sparse tables are. `replicated`: every worker has a copy and makes the same updates.
    `shared`: the workers of a host share one copy, which each changes without waiting."""

    transport: Literal["auto", "tcp"] = "auto"
    """`auto`: the workers of a host reduce in shared memory, on CPUs. `tcp`: always over the network."""
    tls: bool = False
    """If true, gradients between workers are encrypted; torch's gloo must be built with TLS."""
    codec: Codec = field(default=PLAIN, kw_only=True)
    """What gradients look like on the wire; not an option, but what follows it in a spec."""

    @property
    def traits(self) -> Traits:
        shared = self.tables == "shared"
        exact = not shared and self.codec.exact
        return Traits(elastic=True, equals_single=exact, shares_memory=shared)

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        found = [*super().unsupported]
        if self.tables == "shared":
            why = "tables=shared keeps the rows in the memory of one host"
            found.append(Unsupported(TABLES, why, along_with=HOSTS))
            found.append(Unsupported(ROW_MODEL, why, along_with=HOSTS))
        else:
            why = "it adds up gradients, and there are none"
            found.append(Unsupported(ROW_MODEL, why, instead="ps:async", along_with=WORKERS))
        if self.tls:
            why = "tls needs the certificates that `manyhands train` gives its workers"
            found.append(Unsupported(OWN_LOOP, why))
            found.append(Unsupported(TRUST, why))
            found.append(
                Unsupported(GPUS, "NCCL has no TLS", instead="ps:sync", along_with=WORKERS)
            )
        return tuple(found)

    def needs_keys(self, workers: int) -> bool:
        return self.tls

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.bucket_mb < 1:
            raise SpecError(f"allreduce: bucket_mb must be at least 1, and is {self.bucket_mb}.")

    def bucket_bytes(self, gradient_bytes: int, *, one_host: bool) -> int:
        """Return the size at which a bucket is full."""
        wanted = self.bucket_mb << 20
        return wanted if one_host else min(wanted, max(gradient_bytes // 8, 1 << 20))

    def traffic(self, facts: CostFacts, view: View) -> Sequence[Transfer]:
        workers, model = [seat.name for seat in view.workers], facts.model
        transport = self.reduces_over
        found: list[Transfer] = []
        if model.weighted:
            found += all_reduce(view, 8, "weights", transport=transport, after=0.0)
        for dtype_bytes in model.buffers.values():  # each worker but the first receives them once
            found += (Transfer(workers[0], to, dtype_bytes, "buffers", 0.0) for to in workers[1:])
        sizes = [(p.dtype, p.num_bytes) for p in model.trained]
        limit = self.bucket_bytes(model.gradient_bytes, one_host=view.one_host)
        for bucket in in_buckets(sizes, bucket_bytes=limit):
            parameters = [model.trained[number] for number in bucket]
            after = model.complete_after[parameters[-1].name]
            if self.codec.sums_on_wire:
                num_bytes = sum(p.num_bytes for p in parameters)
                found += all_reduce(view, num_bytes, "gradients", transport=transport, after=after)
            else:
                numel = sum(p.numel for p in parameters)
                part_bytes = self.codec.wire_bytes(part_of(numel, workers=len(workers)))
                found += all_to_all(workers, part_bytes, "gradients", after=after)
                found += all_gather(workers, part_bytes, "sums of gradients")
        found += all_reduce(view, 8 * (NOTES + len(sizes)), "notes", transport=transport)
        if self.tables == "replicated":
            for table in model.tables:
                rows = table.rows_in(facts.batch_size / len(workers))
                row_bytes = 8 + 4 * table.dim
                found += all_gather(workers, scaled(row_bytes, rows), "rows")
        return found

    def memory(self, facts: CostFacts) -> Sequence[MemoryUse]:
        uses = replicated_model(facts, tables_of="host" if self.tables == "shared" else "worker")
        if not self.codec.sums_on_wire and facts.workers > 1:
            numel = sum(p.numel for p in facts.model.trained)
            uses.append(MemoryUse("worker", "encoded gradients", 2 * self.codec.wire_bytes(numel)))
        notes, gradients = 8 * (NOTES + len(facts.model.trained)), facts.model.gradient_bytes
        largest = max(notes, gradients) if gradients <= SMALL_BYTES else notes
        uses += sharing(facts, largest, allocated=gradients, transport=self.reduces_over)
        return uses

    @property
    def reduces_over(self) -> Transport:
        """The transport of sums. What a codec makes smaller is sent, also inside a host."""
        return self.transport if self.codec.sums_on_wire else "tcp"

    def build(self, context: Context) -> Learner:
        return AllReduceLearner(self, context)


class AllReduceLearner(Learner):
    def __init__(self, config: AllReduce, context: Context) -> None:
        super().__init__(context)
        self._config = config
        self._buffers = Buffers(self.train_state.model)
        self._group: Group | None = None
        self._reducer: Reducer | None = None
        self._table_sync: TableSync | None = None
        self._state_receiver: StateReceiver | None = None
        """Set while this worker is new and does not have the weights of the others yet."""
        self._state_sender: StateSender | None = None
        """Set on the worker that sends the state to new ones, while they catch up."""
        self._weights_first: WeightsFirst | None = None
        self._version = 0
        """The last step that is in the weights."""
        self._agreed = False
        """If true, the weights are those of a view, not the initial ones of this worker."""
        self._applied: deque[tuple[int, Tensor | None]] = deque(maxlen=LATEST)
        """Steps in the weights, with weight and loss summed over all workers, because the reports of dead
        workers are lost."""
        self._in_flight: StepReport | None = None
        """The report of the step that is being computed, or that a view change interrupted."""
        self._sent_before = 0
        """Bytes sent in the group before the step."""
        if config.tls:
            from manyhands.collectives.gloo_tls import use_tls

            assert self.me.credentials is not None, "tls needs the coordinator, and no trust"
            use_tls(self.me.credentials)

    # Views --------------------------------------------------------------------------------------

    def on_view(self, view: View) -> Joined:
        self.close()
        with self._view_change_on_lost_peer():
            rescued = self._join_view(view)
        catching_up = self._state_receiver is not None
        self._agreed = not catching_up
        return Joined(
            transport=self._group.describe() if self._group is not None else "none",
            group=self._group,
            applied=self._applied_steps(),
            rescued=rescued,
            catching_up=catching_up,
        )

    def _join_view(self, view: View) -> StepReport | None:
        """Connect to the workers of the view, agree on the weights, and set up the reducer. Returns the
        report of an interrupted step that is in the weights: another worker had made the update."""
        shared = self._config.tables == "shared"
        # Each worker looks up other ids. A row is made when all workers have its id, so replicas stay equal.
        self.train_state.tables.makes_on_pull = shared or view.world == 1
        if view.world == 1:
            return self._set_version(self._version)
        from manyhands.collectives.join import join_group
        from manyhands.collectives.reducer import Reducer
        from manyhands.collectives.state_sync import agree
        from manyhands.compute.gradients import WeightsFirst

        self._group = join_group(self.me, view, transport=self._config.reduces_over)
        known = agree(
            self._group,
            *(self.train_state, self._with_shared_state),
            version=self._version,
            agreed=self._agreed,
            tables=not shared,
            may_wait=self.me.board is not None and not self.train_state.tables.specs,
        )
        rescued = self._set_version(known.version)
        self._buffers.source = next(rank for rank in range(view.world) if rank not in known.new)
        if known.new:
            self._start_state_transfer(known.new, known.source, view)
        self._parameters = [p for p in self.train_state.model.parameters() if p.requires_grad]
        whole = sum(p.numel() * p.element_size() for p in self._parameters)
        bucket_bytes = self._config.bucket_bytes(whole, one_host=view.one_host)
        self._reducer = Reducer(
            self._group, self._parameters, bucket_bytes=bucket_bytes, codec=self._config.codec
        )
        self._weights_first = WeightsFirst(self.train_state.model, memory=self._reducer.lend)
        if self.train_state.tables.specs:
            from manyhands.collectives.table_sync import ReplicatedTables, SharedTables

            sync_type = SharedTables if shared else ReplicatedTables
            self._table_sync = sync_type(self.train_state, view, self._group)
        self._sent_before = self._group.bytes_sent
        return rescued

    def _start_state_transfer(self, new: Collection[int], source: int, view: View) -> None:
        """Start the transfer of the state to new workers, which catch up while the others train."""
        from manyhands.collectives.state_transfer import StateReceiver, StateSender
        from manyhands.runs.saver import gather_state

        if self.me.rank == source:
            learner = self._with_shared_state
            state = gather_state(self.train_state, learner.snapshot() if learner else {})
            self._state_sender = StateSender(self.me, view, state, num_new=len(new))
        elif self.me.rank in new:
            self._state_receiver = StateReceiver(
                *(self.me, view, self.train_state, self._with_shared_state)
            )

    @property
    def _with_shared_state(self) -> Learner | None:
        """This learner, unless each worker holds a state of its own, which it keeps."""
        return None if self._config.traits.holds_state else self

    def _catch_up(self, *, wait_s: float = 0.0) -> bool:
        """Switch to the weights of the others, if the state has arrived. Returns whether it has."""
        assert self._state_receiver is not None
        try:
            done = self._state_receiver.caught_up(self._parameters, wait_s=wait_s)
        except (ManyhandsError, OSError) as error:
            self.me.wait_for_a_view(error, grace_s=LINK_GRACE_S)
            raise ViewChanging(f"the state did not arrive: {error}") from error
        except Exception as error:
            # Not a link failure: it would happen again in the next view, but maybe not to a replacement.
            raise PeerLost(
                f"{self.me.name} could not take over the state of its peers: {describe(error)}"
            ) from error
        if done:
            self._state_receiver, self._agreed = None, True
        return done

    def drain(self) -> None:
        while self._state_receiver is not None:
            if not self._catch_up(wait_s=0.1) and self.me.view_changing:
                raise ViewChanging("the state did not arrive in time")
        # What is evaluated and saved next are the newest statistics, whoever has them.
        if self._group is not None:
            with self._view_change_on_lost_peer():
                self._buffers.broadcast(self._group)

    def _set_version(self, version: int) -> StepReport | None:
        """Set the last step that is in the weights, which may be one that this worker had not finished:
        returns its report. Gradients of an interrupted step are dropped."""
        in_flight, self._in_flight = self._in_flight, None
        rescued = None
        if version > self._version:
            self._applied.append((version, None))
            if in_flight is not None and in_flight.step == version:
                rescued = in_flight
        self._version = version
        self.train_state.optimizer.zero_grad(set_to_none=True)
        self.train_state.tables.forget()
        return rescued

    def _applied_steps(self) -> AppliedSteps:
        import torch

        parts = [AppliedPart(step, 0) for step, _ in self._applied]
        steps = [step for step, sums in self._applied if sums is not None]
        if steps:
            # One read from the device.
            rows = torch.stack([sums for _, sums in self._applied if sums is not None]).tolist()
            parts += [
                AppliedPart(step, WHOLE, (weight, loss))
                for step, (weight, loss) in zip(steps, rows, strict=True)
            ]
        return AppliedSteps(self._version, parts)

    def interrupt(self) -> None:
        group = self._group
        if group is not None:
            group.cut()

    def close(self) -> None:
        for part in (self._state_sender, self._state_receiver, self._reducer):
            if part is not None:
                part.close()
        self._table_sync = self._state_sender = self._state_receiver = self._reducer = None
        if self._weights_first is not None:
            self._weights_first.remove()
            self._weights_first = None
        group, self._group = self._group, None
        if group is not None:
            if self.me.view_changing or self._in_flight is not None:
                group.cut()  # otherwise it would wait for data that no worker sends any more
            group.close()

    # Steps --------------------------------------------------------------------------------------

    def step(self, share: Share) -> StepReport:
        from manyhands.compute.gradients import DeviceTime, gradients

        started = time.perf_counter()
        lr, reducer = self.train_state.lr, self._reducer
        report = StepReport(share.step, share.samples, 0.0, 0.0, lr)
        if self.train_state.device != "cpu":
            report.compute_s = DeviceTime()
        self._in_flight = report
        with self._view_change_on_lost_peer():
            if reducer is None or self._group is None:
                report.weight, report.loss = gradients(self.train_state, share)
                computed = _now(report)
                self.train_state.tables.step(lr, self.train_state.base_lr, share.step)
            else:
                self._buffers.broadcast(self._group)
                computed = self._share_gradients(share, report, reducer)
                if self._table_sync is not None:
                    self._table_sync.step(lr, share.step)
        summed = time.perf_counter()
        if self._state_receiver is None:
            self.train_state.update()
        else:
            self._state_receiver.keep(self._parameters)
            self.train_state.optimizer.zero_grad(set_to_none=True)
            report.caught_up = self._catch_up()
        self._version = share.step
        self._buffers.source = share.first * self.me.view.replica_size
        self._applied.append((share.step, None if reducer is None else reducer.sums.clone()))
        self._in_flight = None
        if self.train_state.device == "cpu":
            report.wait_s = summed - computed
            report.compute_s = time.perf_counter() - started - report.wait_s
        if self._group is not None:
            total = self._group.bytes_sent
            report.bytes_sent, self._sent_before = total - self._sent_before, total
        return report

    def _share_gradients(self, share: Share, report: StepReport, reducer: Reducer) -> float:
        """Sum every gradient over all workers. Returns the time at which this worker had computed its own."""
        from manyhands.compute.gradients import gradients

        reducer.begin()
        if self._state_receiver is None:
            report.weight, report.loss = gradients(
                self.train_state, share, total=self._sum, local=reducer.alone, ahead=reducer.note
            )
        elif self.train_state.weight is not None:  # the others sum the weights of their samples
            self._sum(0.0)
        computed = _now(report)
        reducer.finish()
        return computed

    def _sum(self, value: float | Tensor) -> Tensor:
        import torch

        total = torch.as_tensor(value, dtype=torch.float64, device=self.train_state.device).clone()
        if self._group is not None:
            with self._view_change_on_lost_peer():
                self._group.all_reduce(total)
        return total

    def _view_change_on_lost_peer(self) -> AbstractContextManager[None]:
        from manyhands.collectives.group import view_change_on_lost_peer

        return view_change_on_lost_peer(self.me)


class Buffers:
    """A model's buffers, such as BatchNorm's statistics. All workers have those of one worker when a step
    begins, and after `drain`."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self.source = 0
        """The rank that the buffers come from: the first worker that had samples in the last step. A worker
        without any has gathered no statistics, and may never have any, if it is slow. At the beginning of a
        view, the first worker that is not new."""

    def broadcast(self, group: Group) -> None:
        import torch

        for dtype in dict.fromkeys(buffer.dtype for buffer in self._buffers):
            alike = [buffer for buffer in self._buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in alike])
            group.broadcast(flat, source=self.source)
            if group.rank != self.source:
                for buffer, part in zip(alike, flat.split([b.numel() for b in alike]), strict=True):
                    buffer.copy_(part.view(buffer.shape))


def _now(report: StepReport) -> float:
    """Return the time at which this worker has computed its own part; on a GPU, record the moment."""
    if report.compute_s is not None:
        report.compute_s.stop()  # type: ignore[union-attr]
    return time.perf_counter()
