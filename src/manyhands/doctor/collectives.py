"""Checks that processes of this host can form a process group and all-reduce: the core of training.

The launcher of members starts fresh Python processes, with the same environment. They meet through a file in
a temporary folder, and each contributes to a sum and checks it (adder.py). The first failure or the deadline
ends all of them, and none is ever left. After a failure the folder with their logs stays, and the finding
names it.

Cost: seconds to start Python and import torch in each process; a few bytes on the wire.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from manyhands.doctor.adder import AddTask
from manyhands.doctor.finding import Finding, fix, good, note
from manyhands.events.units import clean, plural
from manyhands.hosts.invitation import Invitation
from manyhands.hosts.launchers.base import Handle, StartRequest
from manyhands.hosts.launchers.local import LocalLauncher
from manyhands.hosts.timeouts import Timeouts
from manyhands.threads import start_thread
from manyhands.transport.fields import write

GROUP_S = 60.0
"""Time limit for starting the processes, forming the group and one all-reduce."""
SETTLE_S = 0.5
"""Time for the other processes to end by themselves after the first failure."""
ADDER = "manyhands.doctor.adder"


def check_gloo(*, deadline_s: float = GROUP_S) -> Finding:
    """Test two processes over gloo, on loopback unless GLOO_SOCKET_IFNAME says otherwise."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    where = interface or "the hostname's address"  # an empty variable leaves it to gloo
    remedy = gloo_remedy(interface, [name for _, name in socket.if_nameindex()])
    return check_group("gloo", 2, where=where, remedy=remedy, deadline_s=deadline_s)


def gloo_remedy(interface: str, there: Iterable[str]) -> str:
    """Return what to do if gloo fails on the interface, or comma-separated interfaces, that was set for
    it."""
    there = list(there)
    absent = [name for name in interface.split(",") if name and name not in there]
    if absent:
        return (
            f"unset GLOO_SOCKET_IFNAME   or set it to an interface that is there: "
            f"{', '.join(there)}; {', '.join(absent)} is not"
        )
    if not interface:
        return "unset GLOO_SOCKET_IFNAME   or set it to lo: it is set to nothing"
    if interface != "lo":
        return (
            f"ip addr show {interface}   tells whether it is up and has an address; within one "
            "host loopback is enough:  unset GLOO_SOCKET_IFNAME"
        )
    return "sudo ip link set lo up   and let no firewall stop connections from 127.0.0.1 to itself"


def check_nccl() -> Finding:
    """Test one process per GPU, over NCCL."""
    import torch
    import torch.distributed as dist

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return note("not tried: no GPU")
    if not (dist.is_available() and dist.is_nccl_available()):
        return note("not tried: this torch has no NCCL")
    return check_group(
        "nccl",
        num_gpus,
        where=plural(num_gpus, "GPU"),
        remedy="NCCL_DEBUG=INFO manyhands doctor   writes NCCL's reasons to such logs",
    )


def check_group(
    backend: str, world: int, *, where: str, remedy: str, deadline_s: float = GROUP_S
) -> Finding:
    """Form a group of `world` new processes and all-reduce once."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="manyhands-doctor-"))
    try:
        error = _run_group(folder, backend, world, deadline_s)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if error:
        return fix(f"on {where}: {error} (logs: {folder})", remedy)
    shutil.rmtree(folder, ignore_errors=True)
    took_s = time.monotonic() - began
    processes = "1 process" if world == 1 else f"{world} processes"
    return good(f"{processes} all-reduced on {where}, in {took_s:.1f} s from their start")


def _run_group(folder: Path, backend: str, world: int, deadline_s: float) -> str:
    """Run the group; return the error, or an empty string. No process is left, whatever happens."""
    limit = time.monotonic() + deadline_s
    ended: queue.SimpleQueue[tuple[str, int] | BaseException] = queue.SimpleQueue()
    codes: dict[str, int] = {}
    launcher = LocalLauncher()
    watchers: list[threading.Thread] = []
    try:
        for rank in range(world):
            task = AddTask(backend, rank, world, str(folder / "store"), deadline_s)
            name, log = f"rank {rank}", folder / f"rank-{rank}.log"
            invitation = Invitation(name, "", str(folder), write(task), Timeouts())
            with _uninterrupted():
                handle = launcher.start(StartRequest(name, ADDER, invitation, log, threads=1))
                watchers.append(
                    start_thread(_watch, handle, ended, name=f"watch {rank}", on_error=ended.put)
                )
        while len(codes) < world and (left_s := limit - time.monotonic()) > 0:
            try:
                outcome = ended.get(timeout=left_s)
            except queue.Empty:
                break
            if isinstance(outcome, BaseException):
                raise outcome
            name, code = outcome
            codes[name] = code
            if code:
                limit = min(limit, time.monotonic() + SETTLE_S)
    finally:
        launcher.close()
        for watcher in watchers:
            watcher.join()
    return _explain(folder, codes, world, deadline_s)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C: a process that was started but is not registered yet would not be ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(handle: Handle, ended: queue.SimpleQueue[tuple[str, int] | BaseException]) -> None:
    ended.put((handle.name, handle.wait()))


def _explain(folder: Path, codes: dict[str, int], world: int, deadline_s: float) -> str:
    """Describe the first failure, or else which process was late at which step; empty if all succeeded."""
    for name, code in codes.items():
        if code > 0:
            return f"{name}: {_last_line(folder, name) or f'ended with exit code {code}'}"
        if code < 0:
            return f"{name} was killed by {signal.Signals(-code).name}"
    late = [name for name in (f"rank {rank}" for rank in range(world)) if name not in codes]
    if late:
        step = _last_line(folder, late[0]) or "starting Python"
        return f"{' and '.join(late)} not done after {deadline_s:g} s, the last step: {step}"
    return ""


def _last_line(folder: Path, name: str) -> str:
    """Return the last line of a log: the step that it had begun, or why it failed."""
    try:
        text = (folder / f"{name.replace(' ', '-')}.log").read_text(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in clean(text).splitlines() if line.strip()]
    return lines[-1] if lines else ""
