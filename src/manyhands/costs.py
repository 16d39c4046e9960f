"""Costs of a strategy: the bytes that a step sends from member to member, and the memory of members. Pure.

A strategy computes both from facts alone, without torch and before anything is trained:

    Strategy.traffic(facts, view) -> Transfers of one step, which is one global batch
    Strategy.memory(facts)        -> MemoryUses of a worker, a server, a host, and the writer of checkpoints

`manyhands train --check` and the documentation print them, and tests compare them with the kernel's count and
with measured memory. Values that can't be known beforehand are None: activations, or rows of tables whose
number depends on the data.

Facts come from a model that was built (compute/model_size.py), or can be made up for one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import ClassVar, Literal

Through = Literal["network", "memory"]
"""Network: sockets, also those inside a host. Memory: one member reads what another has written."""
Holder = Literal["worker", "server", "host", "writer"]
DeviceKind = Literal["device", "host"]

TRANSIENT = "activations and temporaries"
"""Depends on the job's code: None in every strategy."""
CHECKPOINTS = "checkpoints"
"""There from the first checkpoint on."""


# Facts --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterSize:
    """A parameter of a model."""

    as_list: ClassVar[bool] = True

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    """Bytes per element."""
    group: int = 0
    """Index of its group in the optimizer; -1: it is not trained."""
    place: int = 0
    """Position among all parameters of the optimizer; -1: it is not trained."""
    state_bytes: int | None = 0
    """Of the optimizer for it; None: unknown."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def trained(self) -> bool:
        return self.group >= 0


@dataclass(frozen=True)
class TableSize:
    """A sparse table."""

    name: str
    dim: int
    """float32 numbers of a row."""
    bytes_per_row: int
    """In memory, at most: with the optimizer's state, counters and index."""
    rows: int | None = None
    """None: any number, which depends on the data."""
    rows_per_sample: float | None = None
    """Distinct rows that one sample looks up; None: unknown."""

    def rows_in(self, samples: float) -> float | None:
        """Return the distinct rows that so many samples look up, at most; None: unknown."""
        return None if self.rows_per_sample is None else samples * self.rows_per_sample


@dataclass(frozen=True)
class ModelSize:
    """Facts about a job and its model."""

    parameters: tuple[ParameterSize, ...]
    """In the order in which the model registers them: a backward finishes the last one first."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """Bytes of buffers, such as BatchNorm's statistics, by dtype."""
    tables: tuple[TableSize, ...] = ()
    elementwise: bool = True
    """If true, the optimizer updates each element by itself, so tensors may be cut."""
    clips: bool = False
    """If true, the gradient is clipped by its norm."""
    weighted: bool = False
    """If true, samples have weights of their own."""
    changes_rows: bool = False
    """If true, the model changes rows of tables itself."""

    @property
    def trained(self) -> tuple[ParameterSize, ...]:
        return tuple(p for p in self.parameters if p.trained)

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(p.num_bytes for p in self.parameters)

    @cached_property
    def gradient_bytes(self) -> int:
        return sum(p.num_bytes for p in self.trained)

    @cached_property
    def state_bytes(self) -> int | None:
        """Bytes of the optimizer's state for the whole model."""
        return add(p.state_bytes for p in self.trained)

    @cached_property
    def buffer_bytes(self) -> int:
        return sum(self.buffers.values())

    @cached_property
    def complete_after(self) -> Mapping[str, float]:
        """By parameter: the part of a backward after which its gradient is complete. The time of a backward
        is taken to be proportional to the gradients' bytes."""
        done, total = 0, max(self.gradient_bytes, 1)
        found = {}
        for parameter in reversed(self.trained):
            done += parameter.num_bytes
            found[parameter.name] = done / total
        return found


@dataclass(frozen=True)
class CostFacts:
    """Facts about a run that its costs depend on, besides the strategy and the members of a view."""

    model: ModelSize
    workers: int = 1
    servers: int = 0
    """Members that only serve."""
    hosts: int = 1
    batch_size: int = 1
    """Samples of a step, over all workers."""
    gpu: bool = False
    """If true, each worker computes on a GPU."""
    spans_hosts: bool = False
    """If true, members may run on several hosts later, so servers share no memory."""
    encrypted: bool = True
    """If true, links over the network use TLS."""
    late_parts: float = 0.0
    """Parts of a step that are computed and come too late to be used, on average."""

    @property
    def one_host(self) -> bool:
        return self.hosts == 1 and not self.spans_hosts


# Costs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """Bytes that one step takes from one member to another."""

    source: str
    to: str
    num_bytes: int | None
    """None: it depends on the data."""
    what: str
    """Gradients, parameters, and the like."""
    after: float = 1.0
    """Part of the backward after which the first bytes can leave: 0 at its start, 1 at its end. What follows
    from other transfers of the step, such as new parameters, has 1."""
    through: Through = "network"


@dataclass(frozen=True)
class MemoryUse:
    """Memory for one purpose."""

    of: Holder
    """The owner: each worker, each server (also one in a worker's process), each host (shared by its
    members), or the worker that writes checkpoints."""
    purpose: str
    num_bytes: int | None
    """None: unknown."""
    on: DeviceKind = "device"
    """The device's memory, which is the host's if there is no GPU; or always the host's."""


def add(numbers: Iterable[int | None]) -> int | None:
    """Add numbers; None if one of them is unknown."""
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def known_bytes(costs: Iterable[Transfer | MemoryUse]) -> int:
    """Add up what is known."""
    return sum(cost.num_bytes or 0 for cost in costs)


def scaled(num_bytes: int, times: float | None) -> int | None:
    """Multiply; None if one is unknown."""
    return None if times is None else round(num_bytes * times)


def ring(
    members: Sequence[str], num_bytes: int, what: str, *, after: float = 1.0
) -> Iterator[Transfer]:
    """Yield the transfers of a ring all-reduce: each member sends 2 (n-1)/n of the bytes to the next."""
    n = len(members)
    for i, source in enumerate(members):
        if n > 1:
            each = round(2 * (n - 1) * num_bytes / n)
            yield Transfer(source, members[(i + 1) % n], each, what, after)


def all_to_all(
    members: Sequence[str], num_bytes: int, what: str, *, after: float = 1.0
) -> Iterator[Transfer]:
    """Yield the transfers of an all-to-all: each member sends a part of so many bytes to each other one."""
    for source in members:
        for to in members:
            if to != source:
                yield Transfer(source, to, num_bytes, what, after)


def all_gather(members: Sequence[str], num_bytes: int | None, what: str) -> Iterator[Transfer]:
    """Yield the transfers of an all-gather around a ring: each member sends n-1 times its bytes."""
    n = len(members)
    for i, source in enumerate(members):
        if n > 1:
            yield Transfer(source, members[(i + 1) % n], scaled(n - 1, num_bytes), what)


def replicated_model(facts: CostFacts, *, tables_of: Holder = "worker") -> list[MemoryUse]:
    """Return the memory of a strategy in which each worker has the whole model, gradients and optimizer."""
    model = facts.model
    return [
        MemoryUse("worker", "parameters", model.parameter_bytes),
        MemoryUse("worker", "gradients", model.gradient_bytes),
        MemoryUse("worker", "optimizer", model.state_bytes),
        *model_extras(facts, tables_of=tables_of),
        checkpoint_copy(facts),
    ]


def model_extras(
    facts: CostFacts, *, tables_of: Holder, table_copies: float = 1.0
) -> Iterator[MemoryUse]:
    """Yield a worker's memory besides parameters, gradients and optimizer, which is the same in all
    strategies. `table_copies`: the part of all rows that a holder has."""
    model = facts.model
    if model.buffers:
        yield MemoryUse("worker", "buffers", model.buffer_bytes)
    for table in model.tables:
        rows = None if table.rows is None else table.rows * table_copies
        yield MemoryUse(tables_of, "tables", scaled(table.bytes_per_row, rows), "host")
    yield MemoryUse("worker", TRANSIENT, None)


def checkpoint_copy(facts: CostFacts, *, extra: int | None = 0) -> MemoryUse:
    """Return the memory of the worker that writes checkpoints, from the first one on: a copy of the state."""
    model = facts.model
    copied = add([model.parameter_bytes, model.buffer_bytes, model.state_bytes, extra])
    return MemoryUse("writer", CHECKPOINTS, copied, "host")


def sent_by(transfers: Iterable[Transfer], through: Through = "network") -> dict[str, int]:
    """Return the known bytes that each member sends, by its name."""
    found: dict[str, int] = {}
    for transfer in transfers:
        if transfer.through == through:
            found[transfer.source] = found.get(transfer.source, 0) + (transfer.num_bytes or 0)
    return found


def between_hosts(transfers: Iterable[Transfer], host_of: Callable[[str], str]) -> list[Transfer]:
    """Return the transfers whose members are on different hosts."""
    return [t for t in transfers if host_of(t.source) != host_of(t.to)]
