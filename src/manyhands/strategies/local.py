"""Local SGD: each worker trains by itself, and every few steps all take the average of their weights.

    in each step      gradients of this worker's share alone, and a step of its own optimizer
    every H steps     a round ends: weights = sum of the workers' weights, each times its part of the samples
                      that were used in the round

(McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data"; Stich
2019, "Local SGD Converges Fast and Communicates Little".) A round also ends early, in `drain`: before an
evaluation, at the end of an epoch, when the members change. With every=1 and plain SGD it is the same as
`allreduce`.

When a worker dies, the others average what they have, and what it had done since the last round is lost: its
samples are used again. An average may be interrupted when some workers have it and others don't. So it goes
into memory of its own, and the weights change only when it is complete. A worker that has it knows more steps
in its weights (`_version`); in the next view the others take its weights, which contain theirs.

Cost per worker: 2 (n-1)/n times the bytes of the weights in each round, so 1/H of `allreduce`; a second copy
of the weights.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from manyhands.collectives.costs import SMALL_BYTES, all_reduce, sharing
from manyhands.contract import (
    WHOLE,
    AppliedPart,
    AppliedSteps,
    Context,
    Joined,
    Learner,
    State,
    StepReport,
    Strategy,
    Traits,
)
from manyhands.costs import CHECKPOINTS, CostFacts, MemoryUse, Transfer, replicated_model
from manyhands.errors import SpecError
from manyhands.pairs import OWN_LOOP, ROW_MODEL, TABLES, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor

    from manyhands.collectives.group import Group
    from manyhands.compute.feed import Share
    from manyhands.hosts.view import View

LATEST = 2_000
"""Number of past steps, besides two rounds, whose losses are kept: more than between two reports."""


@dataclass(frozen=True)
class Local(Strategy):
    name: ClassVar[str] = "local"
    variants = ({"moments": "average"}, {"moments": "reset"})

    every: int = 8
    """Steps of a round: the weights are averaged after so many."""
    moments: Literal["keep", "average", "reset"] = "keep"
    """What an average does to the state of the optimizers, such as momentum. `keep`: each worker keeps its
    own. `average`: it is averaged, too. `reset`: it begins anew."""
    transport: Literal["auto", "tcp"] = "auto"
    """`auto`: the workers of a host average in shared memory, on CPUs. `tcp`: always over the network."""

    @property
    def traits(self) -> Traits:
        return Traits(
            elastic=True,
            equals_single=False,
            holds_state=self.moments == "keep",
            round_steps=self.every,
        )

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        rows = "it averages weights, and rows of tables are not among them"
        loop = "between two averages the workers' weights differ, and only `manyhands train` averages them"
        return (
            *super().unsupported,
            Unsupported(TABLES, rows),
            Unsupported(ROW_MODEL, rows),
            Unsupported(OWN_LOOP, f"{loop} before it evaluates, saves or ends"),
        )

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.every < 1:
            raise SpecError(
                f"local: every is the number of steps between two averages, at least 1, and is {self.every}. "
                "Use  --strategy 'local(every=8)'."
            )

    def check_length(self, steps: int) -> None:
        if self.every > steps:
            raise SpecError(
                f"local(every={self.every}): the training has {steps} steps, so the weights would never be "
                f"averaged on the way. every can be 1 to {steps}: for ten averages use  --strategy "
                f"'local(every={max(1, steps // 10)})'."
            )

    def traffic(self, facts: CostFacts, view: View) -> Sequence[Transfer]:
        workers, model = [seat.name for seat in view.workers], facts.model
        averaged = model.gradient_bytes + sum(n for d, n in model.buffers.items() if _floats(d))
        if self.moments == "average" and model.state_bytes is not None:
            averaged += model.state_bytes
        found = [
            *all_reduce(view, averaged // self.every, "weights", transport=self.transport),
            *all_reduce(view, 16, "notes", transport=self.transport),
        ]
        for dtype, num_bytes in model.buffers.items():
            if not _floats(dtype):
                each = num_bytes // self.every
                found += (Transfer(workers[0], to, each, "buffers") for to in workers[1:])
        return found

    def memory(self, facts: CostFacts) -> Sequence[MemoryUse]:
        model, uses = facts.model, replicated_model(facts)
        averaged, moments = model.gradient_bytes + model.buffer_bytes, model.state_bytes
        if self.moments == "average":
            averaged = averaged if moments is None else averaged + moments
        elif self.moments == "keep":
            uses.append(MemoryUse("worker", CHECKPOINTS, moments, "host"))
        notes = 16 * self.every
        largest = max(notes, averaged) if averaged <= SMALL_BYTES else notes
        exchange = sharing(facts, largest, allocated=averaged, transport=self.transport)
        return [*uses, MemoryUse("worker", "average", averaged), *exchange]

    def build(self, context: Context) -> Learner:
        return LocalLearner(self, context)


def _floats(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


class Standing(NamedTuple):
    """What a worker tells the others when they form a group."""

    agreed: int
    """1 if its weights are those of an earlier view; 0 if it is new, or all are."""
    version: int
    """The last step that is in the weights of all."""
    first: int
    """The first step of its open round."""
    computed: int
    """The last step that it has computed."""
    part: int
    """Its part in the steps of the open round."""

    @property
    def basis(self) -> tuple[int, int]:
        """The larger, the more is in the weights."""
        return self.agreed, self.version


class LocalLearner(Learner):
    def __init__(self, config: Local, context: Context) -> None:
        super().__init__(context)
        self._config = config
        self._group: Group | None = None
        self._agreed = False
        self._version = 0
        """The last step that is in the weights of all workers."""
        self._round: list[StepReport] = []
        """Reports of the steps that this worker has computed since then."""
        self._unreported: StepReport | None = None
        """The last of them, while the average after it is not complete."""
        self._averaging = False
        self._applied: deque[AppliedPart] = deque()
        """What is in the weights, because the reports of dead workers are lost."""
        self._flats: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        """Memory of the averages, by the dtype and device of what is averaged."""
        self._sent_before = 0
        """Bytes sent in the group before this round."""

    # Steps --------------------------------------------------------------------------------------

    def step(self, share: Share) -> StepReport:
        from manyhands.compute.gradients import DeviceTime, gradients

        started, state = time.perf_counter(), self.train_state
        report = StepReport(
            share.step, share.samples, 0.0, 0.0, state.lr, part=share.part, resolved=False
        )
        if state.device != "cpu":
            report.compute_s = device_time = DeviceTime()
        report.weight, report.loss = gradients(state, share, mean_of="share")
        if report.weight != 0:
            state.update()
        else:  # an empty share
            state.skip_update()
        if state.device == "cpu":
            report.compute_s, report.wait_s = time.perf_counter() - started, 0.0
        else:
            device_time.stop()
        self._round.append(report)
        if share.step % self._config.every == 0:
            self._unreported = report
            self.drain()
            self._unreported = None
        return report

    def drain(self) -> None:
        """End the round: average the weights."""
        if not self._round:
            return
        import torch

        group, began, last = self._group, time.perf_counter(), self._round[-1]
        assert group is not None, "on_view comes first"
        with self._collective():
            notes = self._notes().to(group.device)
            own = float(notes[:, 0].sum())
            group.all_reduce(notes)
            total = float(notes[:, 0].sum())
            coefficient = own / total if total > 0 else 1 / group.size
            average = self._average(group, coefficient, source=0)
        with torch.no_grad():
            put(average)
        for report, (weight, loss) in zip(self._round, notes.tolist(), strict=True):
            self._applied.append(AppliedPart(report.step, WHOLE, (weight, loss)))
        if last.wait_s is not None:
            last.wait_s = time.perf_counter() - began
        last.bytes_sent, self._sent_before = group.bytes_sent - self._sent_before, group.bytes_sent
        self._end_round(last.step)

    def _notes(self) -> Tensor:
        """Return the weight and the loss of each step of the round."""
        import torch

        device = self.train_state.device
        rows = [
            torch.as_tensor(number, dtype=torch.float64, device=device)
            for report in self._round
            for number in (report.weight, report.loss)
        ]
        return torch.stack(rows).view(-1, 2)

    def _average(
        self, group: Group, coefficient: float, *, source: int, frozen: bool = False
    ) -> list[tuple[list[Tensor], Tensor]]:
        """Return what is averaged, by dtype, and the flat result. Nothing changes yet. `coefficient`: the
        part of this worker; `source`: the rank whose integers count; `frozen`: also what is not trained."""
        import torch

        model = self.train_state.model
        tensors: list[Tensor] = [p for p in model.parameters() if frozen or p.requires_grad]
        tensors += model.buffers()
        if self._config.moments == "average":
            tensors += self._moments(group)
        found = []
        for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
            alike = [t for t in tensors if (t.dtype, t.device) == kind]
            where = kind[1] if group.device == "cpu" else torch.device(group.device)
            flat = self._flat_of(alike, group, device=where)
            if flat.is_floating_point() or flat.is_complex():
                if coefficient:
                    flat *= coefficient
                else:
                    flat.zero_()  # its weights may not be finite
                group.all_reduce(flat)
            else:
                group.broadcast(flat, source=source)
            found.append((alike, flat))
        return found

    def _flat_of(self, tensors: Sequence[Tensor], group: Group, *, device: torch.device) -> Tensor:
        """Return one flat copy of the tensors, in memory that is used for every average of a view."""
        import torch

        count, kind = sum(t.numel() for t in tensors), (tensors[0].dtype, tensors[0].device)
        if kind in self._flats and self._flats[kind].numel() != count:
            group.release(self._flats.pop(kind))
        if kind not in self._flats:
            if device.type == "cpu":
                flat = group.allocate(count * kind[0].itemsize).view(kind[0])
            else:
                flat = torch.empty(count, dtype=kind[0], device=device)
            self._flats[kind] = flat
        flat = self._flats[kind]
        for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
            part.copy_(tensor.detach().reshape(-1))
        return flat

    def _moments(self, group: Group) -> list[Tensor]:
        """Return the tensors of the optimizer's state: the same on all workers. One that this worker has not
        made yet, because it had no gradient for it, is zero."""
        import torch

        optimizer = self.train_state.optimizer
        parameters = [p for each in optimizer.param_groups for p in each["params"]]
        texts = []
        for number, parameter in enumerate(parameters):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
                    texts.append(f"{number}\t{key}\t{dtype}\t{','.join(map(str, shape))}")
        text = "\n".join(sorted(texts))
        if len(set(group.gather_numbers([zlib.crc32(text.encode())]))) > 1:
            mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=group.device)
            all_texts = [bytes(each.tolist()).decode() for each in group.gather_uneven(mine)]
            text = "\n".join(sorted({line for each in all_texts for line in each.splitlines()}))
        found: list[Tensor] = []
        for line in text.splitlines():
            number_text, key, dtype, sizes = line.split("\t")
            parameter = parameters[int(number_text)]
            state = optimizer.state[parameter]
            if key not in state:
                shape = [int(size) for size in sizes.split(",") if size]
                device = parameter.device if shape else "cpu"
                state[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            found.append(state[key])
        return found

    def _end_round(self, version: int) -> None:
        """Note that all steps up to this one are in the weights of all workers."""
        if self._config.moments == "reset":
            self.train_state.optimizer.state.clear()
        self._version = version
        for report in self._round:
            report.resolved = True
        self._round = []
        # By their steps, not by their number: an interrupted round has parts of all who had computed.
        while (
            self._applied
            and version - self._applied[0].steps[-1] >= LATEST + 2 * self._config.every
        ):
            self._applied.popleft()

    # Views --------------------------------------------------------------------------------------

    def on_view(self, view: View) -> Joined:
        from manyhands.collectives.join import join_group

        self.close()
        with self._collective():
            group = self._group = join_group(self.me, view, transport=self._config.transport)
            self._agree(group)
        self._agreed, self._sent_before = True, group.bytes_sent
        rescued, self._unreported = self._unreported, None
        return Joined(
            transport=group.describe(),
            group=group,
            applied=AppliedSteps(self._version, list(self._applied)),
            rescued=rescued,
        )

    def _agree(self, group: Group) -> None:
        """Bring all workers to the same weights: the average of those that have the newest weights, and what
        each has computed since. New workers get them."""
        import torch

        from manyhands.collectives.state_sync import send_state

        standings = [Standing(*each) for each in group.gather_numbers(self._standing())]
        basis = max(each.basis for each in standings)
        holders = [rank for rank, each in enumerate(standings) if each.basis == basis]
        source = max(holders, key=lambda rank: (standings[rank].computed, -rank))
        version = standings[source].computed
        holds = group.rank in holders
        own = float(self._notes()[:, 0].sum()) if holds and self._round else 0.0
        total = torch.tensor([own], dtype=torch.float64, device=group.device)
        group.all_reduce(total)
        # Without anything since the last average, the holders are equal.
        coefficient = own / float(total) if float(total) > 0 else float(group.rank == source)
        average = self._average(group, coefficient, source=source, frozen=True)
        lacks = [
            rank
            for rank, each in enumerate(standings)
            if rank not in holders or each.computed < version
        ]
        state: State = {}
        if lacks:
            new = any(standings[rank].agreed < basis[0] for rank in lacks)
            state = self._schedule_state(optimizer=new) if group.rank == source else {}
            state = send_state(state, group, source)
        # From here on nothing can fail half way.
        with torch.no_grad():
            put(average)
        if group.rank in lacks:
            self._put_schedule_state(state, optimizer=standings[group.rank].agreed < basis[0])
        for rank in holders:
            each = standings[rank]
            if num_steps := each.computed + 1 - each.first:
                self._applied.append(AppliedPart(each.first, each.part, num_steps=num_steps))
        self._end_round(version)

    def _standing(self) -> Standing:
        steps = [report.step for report in self._round] or [self._version + 1, self._version]
        part = self._round[0].part if self._round else 0
        return Standing(int(self._agreed), self._version, steps[0], steps[-1], part)

    def _schedule_state(self, *, optimizer: bool) -> State:
        """Return what a worker lacks that is behind, besides the weights; with the optimizer, one that is
        new."""
        from manyhands.compute.schedule import settings_of
        from manyhands.runs.saver import gather_state, optimizer_state

        state = self.train_state
        sends = optimizer and self._config.moments == "keep"
        own = {
            "applied": [
                [each.step, each.part, each.num_steps, *(each.sums or ())] for each in self._applied
            ],
            "scheduler": state.scheduler.state_dict() if state.scheduler is not None else {},
            "settings": settings_of(state.optimizer),
            "optimizer": optimizer_state(state.model, state.optimizer) if sends else {},
        }
        return gather_state(None, own)["learner"]

    def _put_schedule_state(self, sent: State, *, optimizer: bool) -> None:
        from manyhands.compute.schedule import put_settings
        from manyhands.runs.saver import load_optimizer_state

        state = self.train_state
        if optimizer and sent["optimizer"]:
            load_optimizer_state(state.model, state.optimizer, sent["optimizer"])
        if state.scheduler is not None:
            state.scheduler.load_state_dict(sent["scheduler"])
        put_settings(state.optimizer, sent["settings"])
        self._applied.clear()
        for step, part, num_steps, *sums in sent["applied"]:
            known = (sums[0], sums[1]) if sums else None
            self._applied.append(AppliedPart(step, part, known, num_steps))

    def interrupt(self) -> None:
        group = self._group
        if group is not None:
            group.cut()

    def close(self) -> None:
        group, self._group = self._group, None
        self._flats.clear()  # the group's memory
        if group is not None:
            if self.me.view_changing or self._averaging:
                group.cut()  # otherwise it would wait for data that no worker sends any more
            group.close()
        self._averaging = False

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Return a context in which the workers exchange tensors."""
        from manyhands.collectives.group import view_change_on_lost_peer

        self._averaging = True
        with view_change_on_lost_peer(self.me):
            yield
        self._averaging = False

    # Checkpoints --------------------------------------------------------------------------------

    def snapshot(self) -> State:
        """Return the state of this worker's optimizer, if it has one of its own."""
        from manyhands.runs.saver import optimizer_state

        if self._config.moments != "keep":
            return {}
        state, rank = self.train_state, self.me.rank
        # That of the first worker is saved with the weights.
        own = optimizer_state(state.model, state.optimizer) if rank else {}
        return {"rank": rank, "optimizer": own}

    def restore(self, states: Sequence[State]) -> None:
        """Take over the state of a saved worker's optimizer. That of a worker that leaves a live run is left:
        this worker has moments of its own, for its own samples."""
        from manyhands.compute.schedule import put_settings, settings_of
        from manyhands.runs.saver import load_optimizer_state

        own, state = states[0]["optimizer"], self.train_state
        if own and not self._agreed:
            settings = settings_of(state.optimizer)  # of the resumed run: they may have changed
            load_optimizer_state(state.model, state.optimizer, own)
            put_settings(state.optimizer, settings)


def put(average: Sequence[tuple[Sequence[Tensor], Tensor]]) -> None:
    """Copy flat results into the tensors that they are for."""
    for tensors, flat in average:
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
