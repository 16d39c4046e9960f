"""Loader processes of a worker: they load batches ahead of time. Each builds its own data set.

    worker                                          loader process
    ------                                          --------------
    thread: (epoch, indices)  -- socket pair -->    gather
            batch             <-- socket pair --    pickle; tensors in an anonymous file (memfd)

Each process belongs to a thread of the worker, which starts it, requests one batch at a time and, if the
process is killed, starts another one and loads the batch again. Nothing has a name (no semaphore, no socket
file, no temporary folder), so nothing is left behind, however the worker ends.

Cost: one copy of each batch, in the loader process; the worker maps it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import _RemoteTraceback  # known to code that prints tracebacks
from contextlib import suppress
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import LoaderLost

MAX_TRIES = 3
"""Attempts to load a batch before it counts as the cause of the kills."""
END_S = 1.0
"""Grace period for a process to end."""
ALIGN = 64
BATCH, FAILED = "batch", "failed"
_SIZES = struct.Struct("!QQ")


class Loaders:
    """The loader processes of a worker."""

    def __init__(
        self,
        reference: str,
        settings: Mapping[str, str],
        processes: int,
        *,
        notice: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`notice` is called, from another thread, with messages for the user."""
        self.ahead = 2 * processes
        self._job = (reference, dict(settings))
        self._notice = notice
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="loader")
        self._processes: dict[int, LoaderProcess] = {}
        """By thread."""
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Processes that were started so far."""
        return [process.pid for process in list(self._processes.values())]

    def submit(self, epoch: int, indices: Tensor) -> Future[Any]:
        return self._threads.submit(self._load, epoch, indices.tolist())

    def write_stacks(self) -> None:
        """Write the stacks of every loader process to the worker's log."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)

    def close(self) -> None:
        self._closed = True
        for process in list(self._processes.values()):
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes.values():
            process.end()

    def _load(self, epoch: int, indices: Sequence[int]) -> Any:
        """Load a batch with the process of this thread. Raises what the job raised."""
        thread = threading.get_ident()
        for left in reversed(range(MAX_TRIES)):
            process = self._processes.get(thread)
            if process is None:
                process = self._processes[thread] = LoaderProcess(*self._job)
            if self._closed:  # after close() has killed the processes that it knew
                process.kill()
            try:
                kind, value, trace = process.ask(epoch, indices)
            except (OSError, EOFError):
                del self._processes[thread]
                how = process.end()
                if self._closed:
                    raise
                if left:
                    self._notice(f"a loader process {how}; another one loads its batch again")
                continue
            if kind == FAILED:
                value.__cause__ = _RemoteTraceback(trace)  # type: ignore[arg-type]
                raise value
            return value
        raise LoaderLost(
            f"A loader process {how}, {MAX_TRIES} times in a row with the same batch. When memory runs out, "
            "the kernel kills processes: use fewer of them (--set loader_processes=N), smaller batches, or a "
            "data set that needs less memory."
        )


class LoaderProcess:
    """The worker's end of one process."""

    def __init__(self, reference: str, settings: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "manyhands.compute.loader_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self.pid = self._process.pid
        with suppress(OSError):  # it has ended: ask() will fail
            send(ours, (reference, dict(settings), os.getpid(), sys.path))

    def ask(self, epoch: int, indices: Sequence[int]) -> tuple[str, Any, str]:
        """Return BATCH and a batch; or FAILED, the exception that the job raised, and its traceback. Raises
        OSError or EOFError if the process is gone."""
        send(self._socket, (epoch, list(indices)))
        answer: tuple[str, Any, str] = receive(self._socket)
        return answer

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> str:
        """End the process; return how it ended, in words."""
        with suppress(OSError):
            self._socket.close()
        try:
            code = self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return (
            f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )


# Messages between worker and loader process -----------------------------------------------------


class _Pickler(pickle.Pickler):
    """A pickler that leaves out the bytes of tensors, which are sent separately."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return NotImplemented
        # Dense tensors keep their strides, such as those of channels_last.
        order = sorted(range(obj.dim()), key=lambda d: obj.stride(d), reverse=True)
        laid_out = obj.permute(order).contiguous()
        raw: Any = laid_out.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw), obj.dtype, tuple(laid_out.shape), order)


def _is_plain(tensor: Tensor) -> bool:
    usual = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.numel() > 0
    special = tensor.is_complex() or tensor.is_quantized or tensor.is_neg() or vars(tensor)
    return usual and not special and not tensor.requires_grad


def _tensor(raw: Any, dtype: torch.dtype, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    back = [order.index(dimension) for dimension in range(len(order))]
    return torch.frombuffer(raw, dtype=dtype).reshape(shape).permute(back)


def send(to: socket.socket, value: Any) -> None:
    stream, buffers = BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    pieces, places, end = [buffer.raw() for buffer in buffers], [], 0
    for piece in pieces:
        places.append((end, piece.nbytes))
        end += -(-piece.nbytes // ALIGN) * ALIGN
    head = pickle.dumps((places, stream.getvalue()))
    sizes = _SIZES.pack(len(head), end)
    if not end:
        to.sendall(sizes + head)
        return
    file = os.memfd_create("manyhands-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, end)
        for piece, (start, size) in zip(pieces, places, strict=True):
            # Faster than a mapping, which would fault on every page first.
            while size:
                written = os.pwrite(file, piece, start)
                piece, start, size = piece[written:], start + written, size - written
        socket.send_fds(to, [sizes], [file])
    finally:
        os.close(file)
    to.sendall(head)


def receive(link: socket.socket) -> Any:
    first, files, *_ = socket.recv_fds(link, _SIZES.size, 1)
    try:
        length, nbytes = _SIZES.unpack(first + _read(link, _SIZES.size - len(first)))
        places, data = pickle.loads(_read(link, length))
        # Fault all pages in now, in this thread, and not later in the one that trains.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        whole = memoryview(mmap.mmap(files[0], nbytes, flags) if nbytes else b"")
    finally:
        for file in files:
            os.close(file)
    return pickle.loads(data, buffers=[whole[start : start + size] for start, size in places])


def _read(link: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        if not (got := link.recv_into(view)):
            raise EOFError("the other side is gone")
        view = view[got:]
    return bytes(data)
