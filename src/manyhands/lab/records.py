"""Which labs there are on this machine, and whose they are.

    /run/manyhands/lab-3.json     the lab's size, and who owns it
    /run/manyhands/lab-3/host-0   holds the host's own name (its UTS namespace)

A record is written before the first part of its lab is made and removed after the last one is gone,
so whatever a killed owner leaves over is on record. An owner is known by its process id and the
moment at which it started, and the machine by its boot: ids are used again, the pair is not.
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
from dataclasses import dataclass
from pathlib import Path

from manyhands.errors import LabError
from manyhands.lab.layout import MAX_LABS, LabLayout

FOLDER = Path("/run/manyhands")


@dataclass(frozen=True)
class Owner:
    """The process that a lab ends with."""

    pid: int
    started: int
    """In the kernel's ticks since boot."""

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
    layout: LabLayout
    bits: int | None
    """A second, of each link; None if nothing holds it back."""
    owner: Owner | None
    """None: the lab is kept until somebody takes it down."""
    made: float
    boot: str

    @property
    def dead(self) -> bool:
        """Provably: the owner, or the kernel that the lab was in, is no more."""
        return self.boot != _boot() or (self.owner is not None and not self.owner.lives)

    @property
    def whose(self) -> str:
        return f"of process {self.owner.pid}" if self.owner else "kept until taken down"

    def name_file(self, index: int) -> Path:
        return self.folder / self.layout.names[index]

    @property
    def folder(self) -> Path:
        return FOLDER / f"lab-{self.layout.number}"

    @property
    def path(self) -> Path:
        return FOLDER / f"lab-{self.layout.number}.json"

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.path.unlink(missing_ok=True)


@contextmanager
def locked() -> Iterator[None]:
    """Nobody else makes labs or takes down those of others meanwhile."""
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def claim(num_hosts: int, *, bits: int | None, owner: Owner | None) -> Record:
    """The first number that is free, put on record. Only while `locked()`."""
    taken = {record.layout.number for record in records()}
    number = next((n for n in range(MAX_LABS) if n not in taken), None)
    if number is None:
        raise LabError(
            f"There are {MAX_LABS} labs on this machine, and no number for another one. "
            "Take down those that are not needed:  manyhands lab down --all"
        )
    record = Record(LabLayout(number, num_hosts), bits, owner, time.time(), _boot())
    record.folder.mkdir(exist_ok=True)
    beside = record.path.with_suffix(".new")
    beside.write_text(json.dumps(_plain(record)) + "\n")
    os.replace(beside, record.path)
    return record


def records() -> list[Record]:
    """Of all labs, by number."""
    found = []
    for path in FOLDER.glob("lab-*.json"):
        match = re.fullmatch(r"lab-([0-9]+)\.json", path.name)
        if match:
            try:
                found.append(_record(int(match[1]), path.read_text()))
            except FileNotFoundError:
                continue  # taken down just now
    return sorted(found, key=lambda record: record.layout.number)


def _plain(record: Record) -> dict[str, object]:
    owner = record.owner
    return {
        "hosts": record.layout.num_hosts,
        "bits": record.bits,
        "owner": {"pid": owner.pid, "started": owner.started} if owner else None,
        "made": record.made,
        "boot": record.boot,
    }


def _record(number: int, text: str) -> Record:
    read = json.loads(text)
    owner = Owner(**read["owner"]) if read["owner"] else None
    layout = LabLayout(number, read["hosts"])
    return Record(layout, read["bits"], owner, read["made"], read["boot"])


def _started(pid: int) -> int | None:
    """When a process started; None if there is none, or only what its parent has not yet reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
