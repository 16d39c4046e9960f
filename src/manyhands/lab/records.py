"""The labs of this machine and their owners.

    /run/manyhands/lab-3.json     the lab's size and owner
    /run/manyhands/lab-3/host-0   keeps the host's name alive (its UTS namespace)

A record is written before the first part of its lab is made and removed after the last part is gone, so
everything that a killed owner leaves behind is on record. An owner is identified by its process id, its start
time and the boot id of the machine: process ids are reused, the combination is not.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from manyhands.errors import LabError
from manyhands.lab.layout import MAX_LABS, LabLayout
from manyhands.transport.fields import read

FOLDER = Path("/run/manyhands")


@dataclass(frozen=True)
class Owner:
    """The process that a lab belongs to and ends with."""

    pid: int
    started: int
    """Ticks of the kernel since boot."""

    @classmethod
    def of(cls, pid: int) -> Owner:
        started = _started(pid)
        assert started is not None
        return cls(pid, started)

    @property
    def lives(self) -> bool:
        return _started(self.pid) == self.started


@dataclass(frozen=True)
class Record:
    number: int
    """The lab's number on this machine."""
    hosts: int
    bits: int | None
    """Bandwidth of each link, in bits per second; None: unlimited."""
    owner: Owner | None
    """None: the lab is kept until it is taken down."""
    made: float
    boot: str

    @property
    def layout(self) -> LabLayout:
        return LabLayout(self.number, self.hosts)

    @property
    def dead(self) -> bool:
        """If true, the owner has ended, or the machine was rebooted."""
        return self.boot != _boot() or (self.owner is not None and not self.owner.lives)

    @property
    def owner_text(self) -> str:
        return f"of process {self.owner.pid}" if self.owner else "kept until taken down"

    def name_file(self, index: int) -> Path:
        return self.folder / self.layout.names[index]

    @property
    def folder(self) -> Path:
        return FOLDER / f"lab-{self.number}"

    @property
    def path(self) -> Path:
        return FOLDER / f"lab-{self.number}.json"

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.path.unlink(missing_ok=True)


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock for making labs and for removing those of others."""
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def claim(num_hosts: int, *, bits: int | None, owner: Owner | None) -> Record:
    """Record a new lab under the first free number. Call it while `locked()`."""
    taken = {record.number for record in records()}
    number = next((n for n in range(MAX_LABS) if n not in taken), None)
    if number is None:
        raise LabError(
            f"There are already {MAX_LABS} labs on this machine, the maximum. Remove those that are not "
            "needed:  manyhands lab down --all"
        )
    record = Record(number, num_hosts, bits, owner, time.time(), _boot())
    record.folder.mkdir(exist_ok=True)
    temporary = record.path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(record)) + "\n")
    os.replace(temporary, record.path)
    return record


def records() -> list[Record]:
    """Return the records of all labs, by number."""
    found = []
    for path in FOLDER.glob("lab-*.json"):
        match = re.fullmatch(r"lab-([0-9]+)\.json", path.name)
        if match:
            try:
                found.append(
                    read(Record, {**json.loads(path.read_text()), "number": int(match[1])})
                )
            except FileNotFoundError:
                continue  # taken down just now
    return sorted(found, key=lambda record: record.number)


def _started(pid: int) -> int | None:
    """Return when a process started; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
