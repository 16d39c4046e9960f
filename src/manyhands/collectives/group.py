"""A group of workers that exchange tensors.

    group.all_reduce(tensor)                            every worker has the sum of all, in place
    group.reduce_scatter(all_parts, into=mine)          part r of the sum, on rank r
    group.all_gather(mine, into=all_parts)              the parts of all, in rank order
    group.all_to_all(sent, into=received)               part r goes to rank r
    group.broadcast(tensor, source=0)
    group.send(tensor, to=1), group.recv(tensor, source=0)

    work = group.all_reduce(bucket, async_op=True)      returns at once
    work.wait()

    pair = group.split([0, 1])                          a group of some of the workers
    mesh = group.device_mesh([2, 4], ["dp", "tp"])      for torch's own: fully_shard, DTensor, pipelining
    group.cut()                                         from any thread: every wait in it and its splits fails
    group.close()

As with torch, all workers of a group call the same operations in the same order, each with tensors of the
same shape and dtype, and from one thread at a time. With gloo, a worker whose tensor has another size ends
the process, so sizes that depend on what a user wrote are compared first (`gather_numbers`, state_sync.py).
What one worker can see alone is checked in every call: tensors that are written to must be contiguous (gloo
would write to the wrong places, without an error), and their sizes and dtypes must fit.

Inside a host, workers on CPUs reduce through shared memory (`all_reduce`; shared_sums.py) and do everything
else over gloo. `group.allocate(num_bytes)` returns memory in which that takes no copy. Between hosts, only
the sums of each host travel: the first worker of each exchanges them with those of the others, over gloo.

`group.bytes_sent` is what this worker has sent in it. With gloo on Linux the kernel counts it, so it includes
all of gloo's own messages and TLS. NCCL does not tell; there it is computed from the operations. What passes
through shared memory is not sent.

After an error, or after `cut`, a group can only be closed. An operation on a group whose peer is gone raises
a RuntimeError for which `peer_lost` is true.

Implementations: `TorchGroup` over gloo or NCCL; `LoneWorker` (lone_worker.py), a group of one; `ThreadGroup`
(manyhands/testing/thread_group.py), whose workers are threads of one process.

When a worker dies, gloo raises only in those that are receiving from it; the others keep waiting for each
other. So a group can be cut from another thread: its connections are shut down, and every wait in it, here
and at the other end, fails at once. A split has connections of its own, which are cut with those of the group
that it was made from.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.collectives import gloo_tls
from manyhands.collectives.between_hosts import Hosts, SumsBetweenHosts
from manyhands.collectives.connections import Connections, open_sockets
from manyhands.collectives.shared_sums import SharedSums, SharedTable
from manyhands.collectives.store_gather import gather, interruptible
from manyhands.collectives.sums import Reduction
from manyhands.errors import LinkError, ViewChanging
from manyhands.hosts.me import LINK_GRACE_S
from manyhands.transport.keepalive import look_after

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from manyhands.collectives.default_group import DefaultGroup
    from manyhands.hosts.me import Me

CONNECT_S = 5.0
"""Timeout of connecting. All workers of a view connect at the same moment, so it usually takes much less;
after a timeout they try again."""

COLLECTIVE_S = 1800.0
"""Timeout of a collective, unless the run has another."""

MEMORY = "memory"
"""Key in the store: the address of the shared memory."""

_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "wait timeout",
    "operation timed out",
    "connection timed out",
    "no route to host",
    "connectfullmesh failed",
    "nccl communicator was aborted",
    "remote process exited",
    "client socket has timed out",
    "the group was cut",
)


class Work(Protocol):
    """An operation that was started."""

    def wait(self) -> Any:
        """Wait until its tensors may be read and written again. Raises the error of the operation."""


class GroupCut(RuntimeError):
    """The group was cut while this worker waited in it, or before."""

    def __init__(self) -> None:
        super().__init__("the group was cut")


class Group(ABC):
    """Workers that exchange tensors. An operation returns when it is complete, or with `async_op` at once;
    then its tensors must not be touched before `wait()` of the returned work."""

    def __init__(self, *, rank: int, size: int, device: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.device = device
        """Device for small tensors of the group's users: every backend can send from it."""
        self._computed_bytes = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent in this group and its splits so far."""
        return self._computed_bytes

    # Operations ---------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: Reduction = "sum", async_op: bool = False) -> Work:
        """Replace the tensor by the sum, minimum or maximum over all workers."""
        _check_writable("all_reduce", tensor)
        if not self._reduces_in_memory(tensor):
            # As in a ring, here and below.
            self._computed_bytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        return _finish(self._all_reduce(tensor, op), async_op)

    def reduce_scatter(
        self, tensor: Tensor, *, into: Tensor, op: Reduction = "sum", async_op: bool = False
    ) -> Work:
        """Reduce the tensor over all workers, and put part `rank` of the result into `into`."""
        _check_writable("reduce_scatter", into)
        _check_alike("reduce_scatter", tensor, into)
        _check_sizes("reduce_scatter", tensor, whole=tensor, part=into, parts=self.size)
        self._computed_bytes += (self.size - 1) * into.nbytes
        return _finish(self._reduce_scatter(tensor.contiguous(), into, op), async_op)

    def all_gather(self, tensor: Tensor, *, into: Tensor, async_op: bool = False) -> Work:
        """Put the tensors of all workers into `into`, in rank order."""
        _check_writable("all_gather", into)
        _check_alike("all_gather", tensor, into)
        _check_sizes("all_gather", into, whole=into, part=tensor, parts=self.size)
        self._computed_bytes += (self.size - 1) * tensor.nbytes
        return _finish(self._all_gather(tensor.contiguous(), into), async_op)

    def all_to_all(
        self,
        tensor: Tensor,
        *,
        into: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """Send part r of the tensor to rank r, and put the parts that arrive into `into`, in rank order.

        Parts are equal, or have the numbers of elements in `send` and `receive`. What this worker sends to
        another must be what that one receives; exchange the numbers first if it does not know them.
        """
        _check_writable("all_to_all", into)
        _check_alike("all_to_all", tensor, into)
        sent = self._parts("all_to_all", "send", tensor, send)
        received = self._parts("all_to_all", "receive", into, receive)
        if sent[self.rank] != received[self.rank]:
            raise ValueError(
                f"all_to_all: rank {self.rank} sends {sent[self.rank]} elements to itself and "
                f"receives {received[self.rank]}"
            )
        self._computed_bytes += (sum(sent) - sent[self.rank]) * tensor.element_size()
        return _finish(self._all_to_all(tensor.contiguous(), into, sent, received), async_op)

    def broadcast(self, tensor: Tensor, *, source: int, async_op: bool = False) -> Work:
        """Copy the tensor of rank `source` into that of every other worker."""
        self._check_rank("broadcast", "source", source)
        _check_writable("broadcast", tensor)
        self._computed_bytes += (self.size - 1) * tensor.nbytes * (self.rank == source)
        return _finish(self._broadcast(tensor, source), async_op)

    def send(self, tensor: Tensor, *, to: int, tag: int = 0, async_op: bool = False) -> Work:
        """Send the tensor to one worker, which calls `recv` with the same tag."""
        self._check_peer("send", "to", to)
        self._computed_bytes += tensor.nbytes
        return _finish(self._send(tensor.contiguous(), to, tag), async_op)

    def recv(self, tensor: Tensor, *, source: int, tag: int = 0, async_op: bool = False) -> Work:
        """Receive a tensor from one worker."""
        self._check_peer("recv", "source", source)
        _check_writable("recv", tensor)
        return _finish(self._recv(tensor, source, tag), async_op)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes on the group's device, in which tensors are reduced fastest. All workers call
        it, with the same number. They belong to the group: others write to them until it is closed."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def release(self, tensor: Tensor) -> None:  # noqa: B027
        """Give memory from `allocate` back before the group is closed; then no tensor may be in it. All
        workers call it, at the same point."""

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self.all_reduce(torch.zeros(1, device=self.device))
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the numbers of all workers, in rank order. All give equally many."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        gathered = mine.new_empty(self.size * len(mine))
        self.all_gather(mine, into=gathered)
        return [tuple(row) for row in gathered.view(self.size, len(mine)).tolist()]

    def gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        """Return the flat tensors of all workers, in rank order. They may differ in length.

        Each worker sends as much as the one with the longest.
        """
        counts = [count for (count,) in self.gather_numbers([len(tensor)])]
        longest = max(counts)
        if not longest:
            return [tensor] * self.size
        padded = tensor.new_zeros(longest)
        padded[: len(tensor)] = tensor
        gathered = tensor.new_empty(self.size * longest)
        self.all_gather(padded, into=gathered)
        rows = gathered.view(self.size, longest)
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    # Life ---------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int]) -> Group:
        """Form a group of some workers, in this order. Those workers call it, with the same ranks; the
        others need not.

        It is cut and closed with this group, if not before.
        """
        ranks = list(ranks)
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ValueError(f"split({ranks}): different ranks of 0 to {self.size - 1} are allowed")
        if self.rank not in ranks:
            raise ValueError(f"split({ranks}): rank {self.rank}, which called it, is not in it")
        return self._split(ranks)

    def device_mesh(
        self, sizes: Sequence[int], names: Sequence[str], *, device: str = "cpu"
    ) -> DeviceMesh:
        """Return a mesh of all workers of the group, in rank order, for torch's own pieces (fully_shard,
        DTensor, pipelining). All workers call it.

        What these send does not pass this group, but torch's default group, which is made for it: only one
        group of a process can have meshes (default_group.py). It is cut and closed with this group.

        Args:
            sizes: Number of workers in each dimension; their product is the size of the group.
            device: This worker's device.
        """
        if math.prod(sizes) != self.size or len(sizes) != len(names):
            raise ValueError(
                f"device_mesh({list(sizes)}, {list(names)}): needs a name for each size, and sizes whose "
                f"product is {self.size}"
            )
        return self._default_group(device).mesh(sizes, names, device=device)

    @abstractmethod
    def describe(self) -> str:
        """Return the transport, as shown on the console."""

    @abstractmethod
    def cut(self) -> None:
        """Make every wait in this group and its splits fail. May be called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group and its splits. Waits for operations that have begun, unless it was cut."""

    # Implementation -----------------------------------------------------------------------------

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, tensor: Tensor, into: Tensor, op: Reduction) -> Work: ...

    @abstractmethod
    def _all_gather(self, tensor: Tensor, into: Tensor) -> Work: ...

    @abstractmethod
    def _all_to_all(
        self, tensor: Tensor, into: Tensor, sent: list[int], received: list[int]
    ) -> Work: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> Work: ...

    @abstractmethod
    def _send(self, tensor: Tensor, to: int, tag: int) -> Work: ...

    @abstractmethod
    def _recv(self, tensor: Tensor, source: int, tag: int) -> Work: ...

    @abstractmethod
    def _split(self, ranks: list[int]) -> Group: ...

    def _reduces_in_memory(self, tensor: Tensor) -> bool:
        """Return whether an all-reduce of this tensor sends nothing."""
        return False

    def _default_group(self, device: str) -> DefaultGroup:
        """Return torch's default group of these workers; the first time, make it."""
        raise RuntimeError(
            f"a {type(self).__name__} has no device mesh: it does not send through torch"
        )

    # Checks -------------------------------------------------------------------------------------

    def _check_rank(self, what: str, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{what}({name}={rank}): the ranks are 0 to {self.size - 1}")

    def _check_peer(self, what: str, name: str, rank: int) -> None:
        self._check_rank(what, name, rank)
        if rank == self.rank:
            raise ValueError(f"{what}({name}={rank}): that is this worker itself")

    def _parts(
        self, what: str, name: str, tensor: Tensor, sizes: Sequence[int] | None
    ) -> list[int]:
        """Return the number of elements of each worker's part."""
        if sizes is None:
            _check_sizes(what, tensor, whole=tensor, part=None, parts=self.size)
            return [tensor.numel() // self.size] * self.size
        sizes = list(sizes)
        if len(sizes) != self.size or min(sizes) < 0 or sum(sizes) != tensor.numel():
            raise ValueError(
                f"{what}({name}={sizes}): needs {self.size} numbers whose sum is {tensor.numel()}"
            )
        return sizes


@dataclass(frozen=True)
class GroupLimits:
    """How long each phase of a group may take."""

    gather_s: float
    """All workers have come to the store."""
    connect_s: float = CONNECT_S
    collective_s: float = COLLECTIVE_S


@dataclass(frozen=True)
class HostMemory:
    """The host of each worker: those of one host reduce in its memory."""

    folder: Path
    """A folder of this host for sockets."""
    hosts: tuple[str, ...]
    """By rank."""

    @property
    def several_hosts(self) -> bool:
        return len(set(self.hosts)) > 1

    def neighbours(self, rank: int) -> list[int]:
        """Return the workers on this worker's host."""
        return [other for other, host in enumerate(self.hosts) if host == self.hosts[rank]]

    def leaders(self) -> list[int]:
        """Return the first worker of each host."""
        return [self.hosts.index(host) for host in dict.fromkeys(self.hosts)]

    def for_ranks(self, ranks: Sequence[int]) -> HostMemory | None:
        """Return that of some of the workers; None if no two of them are on one host."""
        hosts = tuple(self.hosts[rank] for rank in ranks)
        return HostMemory(self.folder, hosts) if len(set(hosts)) < len(hosts) else None


class TorchGroup(Group):
    """A group over gloo, with all-reduce in shared memory where possible, or over NCCL."""

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        backend: str = "gloo",
        device: str = "cpu",
        limits: GroupLimits,
        check: Callable[[], None] = lambda: None,
        memory: HostMemory | None = None,
    ) -> None:
        """Connect to the other workers, which all do the same, with stores that lead to the same data.

        Args:
            device: The GPU of this worker, with NCCL.
            check: Called while this waits for others; may raise, to end the wait.
            memory: Workers of one host reduce in shared memory, if all of them can attach to it. Given on
                all workers, or on none.
        """
        super().__init__(rank=rank, size=size, device=device if backend == "nccl" else "cpu")
        self.backend = backend
        self._store = store
        self._limits = limits
        self._check = check
        self._lock = threading.Lock()
        self._cut = self._closed = False
        self._splits: list[TorchGroup] = []
        self._bytes_of_closed = 0
        """What was sent in splits that are closed."""
        self._num_splits: dict[tuple[int, ...], int] = {}
        self._made_default: DefaultGroup | None = None
        self._memory = memory
        before = open_sockets() if backend == "gloo" else None
        connect_s = limits.gather_s + limits.connect_s
        try:
            connected = interruptible(self._connect, timeout_s=connect_s, check=check)
        except TimeoutError as error:
            raise RuntimeError(f"timed out waiting for connections: {error}") from error
        self._backend: Any = connected[0]
        self._connections = Connections(before)
        self._sums = self._share(connected[1])
        if memory is not None and memory.several_hosts:
            try:
                self._sums = self._share_in_hosts(memory)
            except BaseException:
                self.cut()
                self.close()
                raise

    @property
    def bytes_sent(self) -> int:
        counted = self._connections.bytes_sent()
        splits = sum(split.bytes_sent for split in list(self._splits))
        mine = self._computed_bytes if counted is None else counted
        default = self._made_default
        of_meshes = default.bytes_sent if default is not None else 0
        return mine + splits + of_meshes + self._bytes_of_closed

    def watch(self) -> None:
        """Break connections, also those of splits, to peers that are alive and unreachable: gloo would wait
        forever."""
        if self._connections:
            look_after(self._all_connections, until=lambda: self._closed)

    def describe(self) -> str:
        name = self.backend
        if name == "gloo":
            if gloo_tls.in_use():
                name += " with TLS"
            if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
                name += f" on {interface}"
        return name if self._sums is None else self._sums.describe(name)

    def cut(self) -> None:
        with self._lock:
            self._cut = True
            splits, default, sums = list(self._splits), self._made_default, self._sums
        for split in splits:
            split.cut()
        if default is not None:
            default.cut()
        made = self._backend
        if self.backend == "nccl" and made is not None:
            with suppress(RuntimeError):
                made.abort()
        self._connections.shut_down()
        if sums is not None:  # not that of self, which may be closed meanwhile
            sums.wake_up()

    def allocate(self, num_bytes: int) -> Tensor:
        if self._sums is None:
            return super().allocate(num_bytes)
        try:
            return self._sums.allocate(num_bytes)
        except LinkError as error:
            raise RuntimeError(f"connection closed by peer: {error}") from error

    def release(self, tensor: Tensor) -> None:
        if self._sums is not None:
            self._sums.release(tensor)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            splits, self._splits = self._splits, []
            default, self._made_default = self._made_default, None
            sums, self._sums = self._sums, None
        if sums is not None:
            sums.close()
        for split in splits:
            split.close()
            self._bytes_of_closed += split.bytes_sent
        if default is not None:
            self._bytes_of_closed += default.bytes_sent
            default.close()
        self._connections.bytes_sent()  # while it can be counted
        # The last reference: its threads end here, without holding the interpreter's lock.
        self._backend = None

    # Operations ---------------------------------------------------------------------------------

    def _reduces_in_memory(self, tensor: Tensor) -> bool:
        return self._sums is not None and tensor.device.type == "cpu"

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        if self._sums is not None and self._reduces_in_memory(tensor):
            return self._sums.all_reduce(tensor, op)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._begin("allreduce", [tensor], options)

    def _reduce_scatter(self, tensor: Tensor, into: Tensor, op: Reduction) -> Work:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        return self._begin("_reduce_scatter_base", into.view(-1), tensor.view(-1), options)

    def _all_gather(self, tensor: Tensor, into: Tensor) -> Work:
        return self._begin("_allgather_base", _as_bytes(into), _as_bytes(tensor))

    def _all_to_all(
        self, tensor: Tensor, into: Tensor, sent: list[int], received: list[int]
    ) -> Work:
        width = tensor.element_size()
        return self._begin(
            "alltoall_base",
            _as_bytes(into),
            _as_bytes(tensor),
            [width * count for count in received],
            [width * count for count in sent],
        )

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._begin("broadcast", [_as_bytes(tensor)], options)

    def _send(self, tensor: Tensor, to: int, tag: int) -> Work:
        return self._timed(self._begin("send", [_as_bytes(tensor)], to, tag))

    def _recv(self, tensor: Tensor, source: int, tag: int) -> Work:
        return self._timed(self._begin("recv", [_as_bytes(tensor)], source, tag))

    def _begin(self, name: str, *arguments: object) -> Work:
        self._check_cut()
        work: Work = getattr(self._backend, name)(*arguments)
        return work

    def _timed(self, work: Any) -> Work:
        """Give a message from one worker to another the timeout of a collective: gloo's is that of
        connecting."""
        return work if self.backend == "nccl" else _Timed(work, self._limits.collective_s)

    # Forming ------------------------------------------------------------------------------------

    def _split(self, ranks: list[int]) -> Group:
        key = tuple(ranks)
        number = self._num_splits[key] = self._num_splits.get(key, 0) + 1
        store = dist.PrefixStore(f"split-{'-'.join(map(str, ranks))}-{number}", self._store)
        self._gather_at(store, "here", "", rank=ranks.index(self.rank), size=len(ranks))
        memory = self._memory
        return self._form(
            store,
            ranks,
            memory.for_ranks(ranks) if self._sums is not None and memory is not None else None,
        )

    def _form(
        self, store: dist.Store, ranks: list[int], memory: HostMemory | None = None
    ) -> TorchGroup:
        """Connect some of the workers once more: a group that is cut and closed with this one."""
        made = TorchGroup(
            store,
            rank=ranks.index(self.rank),
            size=len(ranks),
            backend=self.backend,
            device=self.device,
            limits=self._limits,
            check=self._alive,
            memory=memory,
        )
        with self._lock:
            closed = [each for each in self._splits if each._closed]
            self._bytes_of_closed += sum(each.bytes_sent for each in closed)
            self._splits = [each for each in self._splits if each not in closed]
            self._splits.append(made)
            cut = self._cut
        if cut:  # while it was formed
            made.cut()
        return made

    def _share_in_hosts(self, memory: HostMemory) -> SharedSums | None:
        """Return the sums of this worker's host, which travel on from there; None if any worker of the group
        could not attach to the memory of its host."""
        ranks, leaders = memory.neighbours(self.rank), memory.leaders()
        index = leaders.index(ranks[0])
        store = dist.PrefixStore(f"host-{index}", self._store)
        alike = HostMemory(memory.folder, (memory.hosts[self.rank],) * len(ranks))
        host = self._form(store, ranks, alike)
        of_host, host._sums = host._sums, None  # only for its memory
        if of_host is not None:
            of_host.close()
        told = self._gather_at(
            self._store, "shares", str(int(of_host is not None)), rank=self.rank, size=self.size
        )
        if of_host is None or "0" in told:
            return None
        among = None
        if self.rank in leaders:
            among = self._form(dist.PrefixStore("leaders", self._store), leaders)
        return SumsBetweenHosts(
            of_host.table,
            host._connections,
            rank=host.rank,
            size=host.size,
            check=self._check_cut,
            timeout_s=self._limits.collective_s,
            hosts=Hosts(index, len(leaders), ranks, among),
        )

    def _default_group(self, device: str) -> DefaultGroup:
        if self._made_default is None:
            from manyhands.collectives.default_group import DefaultGroup

            store = dist.PrefixStore("default", self._store)
            self._gather_at(store, "here", "", rank=self.rank, size=self.size)
            made = DefaultGroup(
                store,
                rank=self.rank,
                size=self.size,
                backend=self.backend,
                connect_s=self._limits.connect_s,
                collective_s=self._limits.collective_s,
                check=self._alive,
            )
            with self._lock:
                self._made_default, cut = made, self._cut
            if cut:  # before a cut reached it
                made.cut()
            try:
                made.form()
            except BaseException:
                with self._lock:
                    self._made_default = None
                raise
        return self._made_default

    def _gather_at(
        self, store: dist.Store, what: str, text: str, *, rank: int, size: int
    ) -> list[str]:
        """Wait until all workers of a group to be are here; return their texts."""
        limits = self._limits
        try:
            return gather(
                *(store, what, text),
                rank=rank,
                size=size,
                timeout_s=limits.gather_s,
                check=self._alive,
            )
        except TimeoutError as error:
            raise RuntimeError(f"timed out waiting: {error}") from error

    def _alive(self) -> None:
        """Raise if this worker need not wait any longer for others to join a split, or the default group."""
        self._check()
        self._check_cut()

    def _connect(self) -> tuple[Any, SharedTable | None]:
        """Return torch's group, and the shared memory, if all workers have attached to it."""
        limits, store = self._limits, self._store
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=limits.collective_s)
            return dist.ProcessGroupNCCL(store, self.rank, self.size, options), None
        table = self._offer_memory() if self.rank == 0 else None
        first = timedelta(seconds=min(limits.connect_s, limits.collective_s))
        made: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=first)
        if self.rank > 0:  # rank 0 had made its offer before it connected
            table = self._find_memory()
        if table is not None:
            table.here[self.rank] = 1
        # One that is connected and leaves at once would break the connections of those that are not, yet.
        made.barrier().wait()
        made._set_default_timeout(timedelta(seconds=limits.collective_s))
        if table is not None:
            table.close()
        return made, table if table is not None and table.reached(table.here, 1) else None

    def _offer_memory(self) -> SharedTable | None:
        if self._memory is None or self._memory.several_hosts:
            return None
        table = None
        with suppress(LinkError, OSError):
            table = SharedTable.create(self._memory.folder, size=self.size)
        self._store.set(MEMORY, table.address if table is not None else "")
        return table

    def _find_memory(self) -> SharedTable | None:
        if self._memory is None or self._memory.several_hosts:
            return None
        with suppress(LinkError, OSError):
            if address := self._store.get(MEMORY).decode():
                return SharedTable.attach(address, size=self.size)
        return None

    def _share(self, table: SharedTable | None) -> SharedSums | None:
        if table is None:
            return None
        return SharedSums(
            table,
            self._connections,
            rank=self.rank,
            size=self.size,
            check=self._check_cut,
            timeout_s=self._limits.collective_s,
        )

    def _check_cut(self) -> None:
        if self._cut:
            raise GroupCut

    def _all_connections(self) -> Iterator[socket.socket]:
        yield from self._connections
        if (default := self._made_default) is not None:
            yield from default.connections()
        for split in list(self._splits):
            yield from split._all_connections()


_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class _Timed:
    def __init__(self, work: Any, timeout_s: float) -> None:
        self._work = work
        self._timeout = timedelta(seconds=timeout_s)

    def wait(self) -> None:
        self._work.wait(self._timeout)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of the tensor's bytes: moving data does not require its dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def peer_lost(error: BaseException) -> bool:
    """Return true if an error of a collective means that another member is gone or frozen. Maybe that member
    kept the store, which has errors of its own."""
    if isinstance(error, dist.DistNetworkError):
        return True
    text = str(error).lower()
    return any(phrase in text for phrase in _LOST)


@contextmanager
def lost_peer_as_consequence(me: Me) -> Iterator[None]:
    """Turn the error of a collective into PeerLost, where no view follows a death: the coordinator then looks
    for its cause."""
    try:
        yield
    except RuntimeError as error:
        if not peer_lost(error):
            raise
        raise me.lost_a_peer(error) from error


@contextmanager
def view_change_on_lost_peer(me: Me) -> Iterator[None]:
    """Turn the error of a collective into ViewChanging: another worker died, and the next view follows.

    If none follows, only a connection was lost, which is reported to the coordinator. Without a coordinator
    the error is final.
    """
    try:
        yield
    except RuntimeError as error:
        if not me.view_changing and not peer_lost(error):
            raise
        if me.board is None:
            raise me.lost_a_peer(error) from error
        me.wait_for_a_view(error, grace_s=LINK_GRACE_S)
        raise ViewChanging(f"a collective broke: {error}") from error


def _finish(work: Work, async_op: bool) -> Work:
    if not async_op:
        work.wait()
    return work


def _check_writable(what: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        described = (
            f"strides {tensor.stride()}" if tensor.layout == torch.strided else tensor.layout
        )
        raise ValueError(
            f"{what}: the tensor to write to has shape {tuple(tensor.shape)} and {described}; it must be "
            "contiguous: use a contiguous one and copy from it"
        )


def _check_alike(what: str, first: Tensor, second: Tensor) -> None:
    if first.dtype != second.dtype or first.device != second.device:
        raise ValueError(
            f"{what}: both tensors must have the same dtype and device, not {first.dtype} on "
            f"{first.device} and {second.dtype} on {second.device}"
        )


def _check_sizes(
    what: str, tensor: Tensor, *, whole: Tensor, part: Tensor | None, parts: int
) -> None:
    """Check that `whole` has `parts` equal parts, each of the size of `part`."""
    if part is not None and whole.numel() != parts * part.numel():
        raise ValueError(
            f"{what}: {parts} workers with {part.numel()} elements each make "
            f"{parts * part.numel()}, and the other tensor has {whole.numel()}"
        )
    if part is None and whole.numel() % parts:
        raise ValueError(
            f"{what}: {tensor.numel()} elements can't be cut into {parts} equal parts; give the sizes"
        )
