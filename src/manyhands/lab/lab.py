"""The Python interface of a lab and its hosts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn

from manyhands.errors import LabError, UsageError
from manyhands.lab import network, processes, tools
from manyhands.lab.layout import check_hosts, parse_bandwidth
from manyhands.lab.network import Traffic
from manyhands.lab.records import Owner, Record, claim, locked, records
from manyhands.lab.signals import CleanupOnSignal, signals_deferred

RUN_WITHIN_S = 60.0


class Lab:
    """Several hosts on this machine.

        with Lab(hosts=3, bandwidth="100mbit") as lab:
            server = lab.hosts[0].start(["python", "server.py"])
            lab.cut("host-0", "host-2")

    Leaving the block removes everything, also after an exception, Ctrl-C or SIGTERM. After SIGKILL, the next
    lab that is made removes the rest. `up()` and `down()` are for a lab that outlives the program.
    """

    def __init__(self, hosts: int = 2, *, bandwidth: str | None = None) -> None:
        self._num_hosts = check_hosts(hosts)
        self._bits = parse_bandwidth(bandwidth) if bandwidth is not None else None
        self._record: Record | None = None
        self._hosts: tuple[LabHost, ...] = ()
        self._starter: ThreadPoolExecutor | None = None
        self._cleanup: CleanupOnSignal | None = None

    @staticmethod
    def unavailable() -> str | None:
        """Return why labs can't be made here, in a sentence; None if they can."""
        return tools.unavailable()

    @classmethod
    def open(cls, number: int | None = None) -> Lab:
        """Open an existing lab by its number, or the only one."""
        if reason := tools.unavailable():
            raise LabError(reason)
        there = {record.number: record for record in records() if not record.dead}
        if not there:
            raise UsageError("There is no lab. Make one:  manyhands lab up --hosts 3")
        known = ", ".join(f"lab {n} ({record.owner_text})" for n, record in there.items())
        if number is None and len(there) > 1:
            raise UsageError(f"There are {known}. Choose one:  --lab {max(there)}")
        chosen = there.get(min(there) if number is None else number)
        if chosen is None:
            raise UsageError(f"There is no lab {number}. There is {known}.")
        lab = cls(chosen.hosts)
        lab._bits = chosen.bits
        lab._use(chosen)
        return lab

    def __enter__(self) -> Lab:
        return self._create(Owner.of(os.getpid()))

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> Lab:
        """Make it, and keep it until `down()`."""
        return self._create(None)

    def down(self) -> None:
        """Remove its processes, namespaces and files. Does nothing if it was not made."""
        try:
            with signals_deferred():
                for host in self._hosts:
                    host._kill_started()
                if self._record is not None:
                    _take_down(self._record)
                for host in self._hosts:
                    host._close_pipes()
                self._record, self._hosts = None, ()
        finally:
            if self._starter is not None:
                self._starter.shutdown()
                self._starter = None
            if self._cleanup is not None:
                self._cleanup.stop()
                self._cleanup = None

    @property
    def record(self) -> Record:
        if self._record is None:
            raise LabError("This lab does not exist: use it inside  with Lab(...) as lab:")
        return self._record

    @property
    def number(self) -> int:
        """Its number on this machine."""
        return self.record.number

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        _ = self.record  # raises if there is none
        return self._hosts

    def host(self, name: str) -> LabHost:
        return self.hosts[self.record.layout.index(name)]

    def cut(self, first: LabHost | str, second: LabHost | str | None = None) -> None:
        """Drop packets silently: all of one host, or those between two."""
        if second is None:
            network.unplug(self.record.layout, self._index(first))
        else:
            network.set_link(self.record.layout, *self._pair(first, second), cut=True)

    def heal(self, first: LabHost | str | None = None, second: LabHost | str | None = None) -> None:
        """Undo that cut; without arguments, all cuts."""
        if first is None:
            if second is not None:
                raise UsageError("To heal the link between two hosts, name both.")
            for cut in self.cuts():
                self.heal(*cut)
        elif second is None:
            network.plug(self.record.layout, self._index(first))
        else:
            network.set_link(self.record.layout, *self._pair(first, second), cut=False)

    def cuts(self) -> list[tuple[str, ...]]:
        """Return the current cuts: ("host-1",) or ("host-0", "host-2")."""
        layout = self.record.layout
        alone = [(layout.names[index],) for index in sorted(network.unplugged(layout))]
        pairs = sorted(network.divided(layout))
        return [*alone, *((layout.names[a], layout.names[b]) for a, b in pairs)]

    def _index(self, host: LabHost | str) -> int:
        return self.record.layout.index(host if isinstance(host, str) else host.name)

    def _pair(self, first: LabHost | str, second: LabHost | str) -> tuple[int, int]:
        here, there = self._index(first), self._index(second)
        if here == there:
            raise UsageError(
                f"{self.record.layout.names[here]} twice: name two different hosts, or one host to cut "
                "it off from all others."
            )
        return here, there

    def _create(self, owner: Owner | None) -> Lab:
        """Make the lab, which ends with its owner."""
        if self._record is not None:
            raise LabError(f"This lab already exists: it is lab {self.number}.")
        if owner is not None:
            self._cleanup = CleanupOnSignal(self._remove_quietly)
            self._cleanup.listen()
        try:
            with signals_deferred():
                self._make(owner)
                if owner is not None:
                    self._start_thread()
        except BaseException:
            self.down()
            raise
        return self

    def _make(self, owner: Owner | None) -> None:
        if reason := tools.unavailable():
            raise LabError(reason)
        with locked():
            with suppress(LabError):  # then its number stays taken
                remove_dead()
            record = claim(self._num_hosts, bits=self._bits, owner=owner)
        self._use(record)
        network.build(record)

    def _use(self, record: Record) -> None:
        self._record = record
        self._hosts = tuple(LabHost(self, index) for index in range(record.hosts))

    def _remove_quietly(self) -> None:
        """Remove the lab without taking locks: the code that the signal interrupted may hold them."""
        if self._record is not None:
            remove(self._record)

    def _start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        starter = self._starter or self._start_thread()
        return starter.submit(lambda: subprocess.Popen(command, **options)).result()

    def _start_thread(self) -> ThreadPoolExecutor:
        """Start the thread that starts processes. It must live as long as the lab: the kernel kills a child
        when the thread that started it ends."""
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="lab")
        self._starter.submit(int).result()
        return self._starter


class LabHost:
    """One host of a lab, with its own network, host name and processes."""

    def __init__(self, lab: Lab, index: int) -> None:
        layout = lab.record.layout
        self.name = layout.names[index]
        self.address = layout.address(index)
        self.index = index
        self._lab = lab
        self._started: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}>"

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on this host. `env` is added to the environment; options are those of Popen.

        It dies with this program. It has its own process group, so Ctrl-C does not reach it.
        """
        environ = {**self._environ(), **(env or {})}
        words = self._enter(command, environ, dies_with_parent=True)
        process = self._lab._start(words, env=environ, **{"process_group": 0, **options})
        self._started.append(process)
        return process

    def become(self, command: Sequence[str]) -> NoReturn:
        """Replace this process by a command on this host, which inherits its terminal."""
        environ = self._environ()
        words = self._enter(command, environ, dies_with_parent=False)
        os.execve(words[0], words, environ)

    def _enter(
        self, command: Sequence[str], environ: Mapping[str, str], *, dies_with_parent: bool
    ) -> list[str]:
        """Return the words that run a command on this host.

        Refuses a wrong command early: the errors of nsenter and ip would be hard to understand.
        """
        if isinstance(command, str) or not command:
            raise UsageError(
                f"A command is a list of words, such as ['python', 'a.py']: {command!r}."
            )
        if shutil.which(command[0], path=environ.get("PATH")) is None and "/" not in command[0]:
            raise UsageError(f"There is no program {command[0]!r} to run on a lab's host.")
        inside = processes.enter_command(
            self._lab.record, self.index, dies_with_parent=dies_with_parent
        )
        return [*inside, *command]

    def _environ(self) -> dict[str, str]:
        """Return the environment of this program, with a number of threads. Hosts share the machine's cores,
        so each gets its part: with more threads than cores, waiting threads spin and slow down the others."""
        threads = str(max(1, len(os.sched_getaffinity(0)) // len(self._lab.hosts)))
        return {"OMP_NUM_THREADS": threads, "MANYHANDS_THREADS": threads, **os.environ}

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        timeout_s: float = RUN_WITHIN_S,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, and return its output as text.

        A failure raises CalledProcessError unless `check` is false. A command that takes too long is killed
        and raises TimeoutExpired.
        """
        pipe = subprocess.PIPE
        with self.start(
            command,
            env=env,
            stdin=pipe if input is not None else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        ) as process:
            try:
                out, err = process.communicate(input, timeout=timeout_s)
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        self._started.remove(process)
        done = subprocess.CompletedProcess(list(command), process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def traffic(self) -> Traffic:
        """Return the bytes on its interface since the lab was made."""
        return network.traffic(self._lab.record.layout, self.index)

    def processes(self) -> list[int]:
        """Return the ids of all processes on this host."""
        return processes.inside([self._namespace])

    def kill_all(self) -> None:
        """Kill every process on this host, as a power cut would; the network stays."""
        self._kill_started()
        processes.kill_inside([self._namespace])

    @property
    def _namespace(self) -> str:
        return self._lab.record.layout.namespaces[self.index]

    def _kill_started(self) -> None:
        """Kill the processes that we started: one that is still entering the namespace is not found there."""
        for process in self._started:
            process.kill()
            process.wait()

    def _close_pipes(self) -> None:
        """Close the pipes, once all processes are dead: until then another thread may still be reading."""
        for process in self._started:
            for pipe in (process.stdin, process.stdout, process.stderr):
                with suppress(OSError):
                    if pipe is not None:
                        pipe.close()


def remove(record: Record) -> None:
    """Remove a lab's processes, then its network, then its record."""
    processes.kill_inside([*record.layout.namespaces, record.layout.switch])
    network.remove(record)


def _take_down(record: Record) -> None:
    """Remove a lab that several processes may remove: only once, since its number may be reused."""
    if record.owner is not None:
        remove(record)
        return
    with locked():
        if record in records():
            remove(record)


def remove_dead() -> list[Record]:
    """Remove what dead owners left behind. Call it while `locked()`."""
    dead = [record for record in records() if record.dead]
    for record in dead:
        remove(record)
    return dead


def remove_all() -> tuple[list[Record], list[Record]]:
    """Remove every lab without a living owner; return those removed and those kept."""
    with locked():
        removed = remove_dead()
        for record in records():
            if record.owner is None:
                remove(record)
                removed.append(record)
        return removed, records()
