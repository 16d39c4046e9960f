"""Synchronous all-reduce by torch's DistributedDataParallel, over NCCL or gloo.

Every worker computes the gradient of its share of the global batch; the gradients are added up by a
ring all-reduce that overlaps the backward pass, bucket by bucket, and every worker takes the same
optimizer step. Each share is weighted by its samples, so unequal shares give the right mean.
(Li et al., PyTorch Distributed, VLDB 2020; ring all-reduce: Patarasuk and Yuan, 2009.)

Cost per worker and step: 2 (n-1)/n times the bytes of the gradients, in 2 (n-1) messages a bucket.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from manyhands.errors import SpecError
from manyhands.strategies.base import Learner, Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor, nn

    from manyhands.cluster.view import View
    from manyhands.strategies.allreduce_tables import TablesTogether
    from manyhands.train.feed import Share
    from manyhands.train.step import StepReport


@dataclass(frozen=True)
class AllReduce(Strategy):
    name: ClassVar[str] = "allreduce"
    summary: ClassVar[str] = "synchronous all-reduce of the gradients (torch DDP)"

    bucket_mb: int = 25
    """Gradients are sent in buckets of about this many MiB."""
    unused_parameters: bool = False
    """Some parameters get no gradient in some steps; costs a walk through the graph each step."""
    tables: str = "replicated"
    """Rows of sparse tables: `replicated`, a copy in each worker, all of which make the same updates; or
    `shared`, once in the memory of the host, where each worker changes them without waiting."""

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.bucket_mb < 1:
            raise SpecError(f"allreduce: bucket_mb must be at least 1, and is {self.bucket_mb}.")
        if self.tables not in ("replicated", "shared"):
            raise SpecError(
                f"allreduce: tables is {self.tables!r}, and may be replicated or shared."
            )

    def build(self) -> Learner:
        return AllReduceLearner(self)


class AllReduceLearner(Learner):
    def __init__(self, config: AllReduce) -> None:
        self._config = config
        self._ddp: Any = None
        self._settled = True
        self._bytes_per_step = 0
        self._last_gradient_at = 0.0
        self._rows: TablesTogether | None = None

    def on_view(self, view: View) -> None:
        from torch.nn.parallel import DistributedDataParallel

        from manyhands.cluster.group import join_group

        self.close()
        if view.world == 1:
            return
        with self._naming_the_peers():
            join_group(self.me, view)
            model = self.trainee.model
            on_gpu = self.trainee.device.startswith("cuda")
            self._ddp = DistributedDataParallel(
                model,
                device_ids=[self.trainee.device] if on_gpu else None,
                bucket_cap_mb=self._config.bucket_mb,
                find_unused_parameters=self._config.unused_parameters,
                gradient_as_bucket_view=True,
            )
            if self.trainee.tables is not None:
                from manyhands.strategies.allreduce_tables import TablesTogether

                self._rows = TablesTogether(
                    self.trainee, view, shared=self._config.tables == "shared"
                )
        size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self._bytes_per_step = 2 * (view.world - 1) * size // view.world
        # With two workers a + b is b + a, whatever the buckets.
        self._settled = view.world <= 2
        self._watch_last_gradient()

    def step(self, share: Share) -> StepReport:
        from manyhands.train.step import StepReport, gradients

        world = self.me.world
        if not self._settled:
            self._settle_buckets(share)
        started = time.perf_counter()
        lr = self.trainee.lr
        with self._naming_the_peers():
            if self._ddp is None:
                weight, loss = gradients(self.trainee, share)
            else:
                # DDP divides the sum by the number of workers: the scale takes that back.
                weight, loss = gradients(
                    self.trainee,
                    share,
                    model=self._ddp,
                    scale=float(world),
                    total=self.add_up,
                    local=self._ddp.no_sync,
                )
            sent = self._bytes_per_step
            if self._rows is not None:
                sent += self._rows.step(lr, share.step)
            elif self.trainee.tables is not None:
                self.trainee.tables.step(lr, self.trainee.base_lr, share.step)
        reduced = time.perf_counter()
        self.trainee.update()
        compute_s = wait_s = None
        if self.trainee.device == "cpu":
            # What is left of the backward after the last gradient was ready is waiting for peers.
            wait_s = reduced - self._last_gradient_at if self._last_gradient_at > started else 0.0
            compute_s = time.perf_counter() - started - wait_s
        return StepReport(
            share.step,
            share.samples,
            weight,
            loss,
            lr,
            compute_s=compute_s,
            wait_s=wait_s,
            bytes_sent=sent,
        )

    def eval_model(self) -> nn.Module:
        """The model with the buffers of rank 0 (BatchNorm's statistics), as a checkpoint has them."""
        import torch.distributed as dist

        model = self.trainee.model
        if self._ddp is not None:
            with self._naming_the_peers():
                for buffer in model.buffers():
                    # gloo takes a tensor's memory as it lies, whatever its strides say.
                    whole = buffer.contiguous()
                    dist.broadcast(whole, src=0)
                    buffer.copy_(whole)
        return model

    def transport(self) -> str:
        from manyhands.cluster.group import describe_transport

        return describe_transport() if self._ddp is not None else "none"

    def close(self) -> None:
        from manyhands.cluster.group import leave_group

        # In this order: a DDP that outlives its process group can deadlock in its destructor.
        self._rows = None
        if self._ddp is not None:
            self._ddp = None
            gc.collect()
            leave_group()

    def add_up(self, value: float | Tensor) -> Tensor:
        import torch
        import torch.distributed as dist

        total = torch.as_tensor(value, dtype=torch.float64, device=self.trainee.device).clone()
        if self._ddp is not None:
            with self._naming_the_peers():
                dist.all_reduce(total)
        return total

    def _settle_buckets(self, share: Share) -> None:
        """Make DDP lay out its buckets for good before the first step that counts.

        DDP sorts its buckets anew after the first backward, and the order in which a ring adds up
        more than two numbers depends on where in a bucket they lie. A resumed run would add up its
        first step in another order than the run it continues.
        """
        import torch

        from manyhands.train.trainee import frozen_statistics

        trainee = self.trainee
        # What the model draws here must not change what it draws in the step.
        with self._naming_the_peers(), frozen_statistics(trainee.model), torch.random.fork_rng():
            for _ in range(2):  # DDP sorts at the second forward
                (trainee.loss(self._ddp, share.batches[0][0]) * 0.0).backward()
        trainee.optimizer.zero_grad(set_to_none=True)
        if trainee.tables is not None:
            trainee.tables.forget()
        self._settled = True

    def _watch_last_gradient(self) -> None:
        """Note the time when the first layer's gradient is there: the last one of a backward."""
        first = next(p for p in self.trainee.model.parameters() if p.requires_grad)

        def note(_: torch.Tensor) -> None:
            self._last_gradient_at = time.perf_counter()

        if not hasattr(first, "_manyhands_watched"):
            first.register_post_accumulate_grad_hook(note)
            first._manyhands_watched = True  # type: ignore[attr-defined]

    @contextmanager
    def _naming_the_peers(self) -> Iterator[None]:
        """Errors of a broken collective become PeerLost, and mistakes of the model get a remedy."""
        from manyhands.cluster.group import peer_lost

        try:
            yield
        except RuntimeError as error:
            if "find_unused_parameters" in str(error):
                raise SpecError(
                    "Some parameters of the model got no gradient in this step. Use  "
                    "--strategy 'allreduce(unused_parameters=true)'  or leave them out of the model."
                ) from error
            if peer_lost(error):
                raise self.me.lost_a_peer(error) from error
            raise
