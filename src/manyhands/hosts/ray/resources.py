"""The resources requested from a Ray cluster, and whether it could ever provide them. Pure.

Each member has a slot, in Ray's terms a bundle of CPUs and perhaps a GPU, with an actor in it. Bundles of one
placement group are reserved together, on as many nodes as possible (spread) or as few (pack).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.errors import UsageError
from manyhands.events.units import plural
from manyhands.hosts.spec import Entry
from manyhands.hosts.view import SERVER, WORKER

PLACEMENTS = ("spread", "pack")
LOCAL = "local"
"""The address that stands for a cluster that is started for the run."""
CLIENT = "ray://"


def parse_place(text: str) -> str | None:
    """Return the address in `ray` or `ray=ADDRESS`, empty if it has none; None if this is not about Ray."""
    if text == "ray":
        return ""
    address = text.removeprefix("ray=")
    if address.startswith(CLIENT):
        raise UsageError(f"--on {text}: {no_clients(address)}")
    if address == text:
        return None
    match = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[^\[\]:/\s]+):([0-9]{1,5})", address)
    if address not in (LOCAL, "auto") and not (match and 0 < int(match[1]) < 65536):
        raise UsageError(
            f"--on {text}: write  ray  for the cluster of this machine, ray=HOST:PORT for one by its "
            "address (as  ray status  knows it, port 6379 by default), or ray=local for one that is "
            "started for this run."
        )
    return address


def no_clients(address: str) -> str:
    """Explain that an address is one of Ray's client server, and what to type instead."""
    host = address.removeprefix(CLIENT).rpartition(":")[0] or "HEAD"
    return (
        f"{address} is an address for Ray clients, and training runs inside the cluster. Submit a job:\n"
        f"    ray job submit --address http://{host}:8265 --working-dir . -- "
        "manyhands train ... --on ray\n"
        "or log in to a node of the cluster and type  manyhands train ... --on ray."
    )


@dataclass(frozen=True)
class RaySlot:
    """Resources for one member."""

    rank: int
    """1, 2, ...: its number among the agents of the run."""
    role: str
    cpus: int
    gpu: bool = False

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)} | ({"GPU": 1.0} if self.gpu else {})

    @property
    def entry(self) -> Entry:
        """The entry of the agent in this slot."""
        device = "cuda" if self.gpu else "cpu"
        return Entry(f"ray-{self.rank}", self.role, self.rank, devices=(device,))

    def __str__(self) -> str:
        return amounts(self.cpus, int(self.gpu))


@dataclass(frozen=True)
class RayNode:
    """A node of a Ray cluster with its total resources."""

    host: str
    address: str
    cpus: float
    gpus: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RayNode:
        """Convert an entry of `ray.nodes()`."""
        has = record["Resources"]
        return cls(
            record["NodeManagerHostname"],
            record["NodeManagerAddress"],
            float(has.get("CPU", 0)),
            float(has.get("GPU", 0)),
        )

    def __str__(self) -> str:
        return f"{self.host} ({self.address}): {amounts(self.cpus, self.gpus)}"


def slots_for(
    *, workers: int, servers: int, threads: int, device: str, gpus: float, first: int = 1
) -> list[RaySlot]:
    """Return a slot for each member. `device`: the value of `--device`; `gpus`: total GPUs of the cluster."""
    devices = [part.strip() for part in device.split(",")]
    for each in devices:
        if each not in ("auto", "cpu", "cuda"):
            raise UsageError(
                f"--device {device}: on Ray it is auto, cpu or cuda, or several of them, one a worker: "
                "cuda,cpu. Which GPU it is, Ray decides."
            )
    chosen = [devices[number % len(devices)] for number in range(workers)]
    left = gpus - chosen.count("cuda")
    # All or none: workers with the same setting should be alike.
    auto = 0 < chosen.count("auto") <= left
    slots = [
        RaySlot(first + number, WORKER, threads, each == "cuda" or (each == "auto" and auto))
        for number, each in enumerate(chosen)
    ]
    return slots + [RaySlot(first + workers + number, SERVER, threads) for number in range(servers)]


def in_order(slots: Sequence[RaySlot], least: int | None) -> tuple[list[RaySlot], list[RaySlot]]:
    """Split into required and spare slots. `least`: so many workers are enough; None: all."""
    workers = [slot for slot in slots if slot.role == WORKER]
    spare = [] if least is None else workers[least:]
    return [slot for slot in slots if slot not in spare], spare


def fitting(slots: Sequence[RaySlot], nodes: Sequence[RayNode]) -> int:
    """Return the number of these slots that fit on the nodes, if nothing else used them."""
    room = [[node.cpus, node.gpus] for node in nodes]
    number = 0
    # Those with a GPU first, the large before the small, and CPU slots where no GPU is wasted.
    for slot in sorted(slots, key=lambda slot: (not slot.gpu, -slot.cpus)):
        fits = [r for r in room if r[0] >= slot.cpus and r[1] >= slot.gpu]
        if fits:
            place = min(fits, key=lambda r: (r[1], r[0]))
            place[0] -= slot.cpus
            place[1] -= slot.gpu
            number += 1
    return number


def check_possible(slots: Sequence[RaySlot], nodes: Sequence[RayNode]) -> None:
    """Refuse what these nodes could never give."""
    number = fitting(slots, nodes)
    if number == len(slots):
        return
    there = "\n    ".join(str(node) for node in nodes) or "no node at all"
    fewer = (
        f"Ask for {number}, which {'fits' if number == 1 else 'fit'}, or for fewer --threads"
        if number
        else "Ask for fewer --threads, or another --device"
    )
    raise UsageError(
        f"The Ray cluster can never give {describe(slots)}. It has\n    {there}\n{fewer}; or add nodes. If "
        "an autoscaler adds them, say how long to wait: --wait 600."
    )


def describe(slots: Sequence[RaySlot]) -> str:
    """`3 workers with 1 CPU and 1 GPU each and 1 server with 1 CPU`"""
    kinds: dict[tuple[str, int, bool], int] = {}
    for slot in slots:
        kind = (slot.role, slot.cpus, slot.gpu)
        kinds[kind] = kinds.get(kind, 0) + 1
    return " and ".join(
        f"{plural(number, role)} with {amounts(cpus, int(gpu))}{' each' * (number > 1)}"
        for (role, cpus, gpu), number in kinds.items()
    )


def waits(missing: int, total: int, free: Mapping[str, float]) -> str:
    """`waits for 2 of 4 slots: the cluster has 3 free CPUs`"""
    if not free:
        return f"waits for {missing} of {plural(total, 'slot')}"
    kinds = ", ".join(f"{value:g} free {kind}{'s' * (value != 1)}" for kind, value in free.items())
    return f"waits for {missing} of {plural(total, 'slot')}: the cluster has {kinds}"


def amounts(cpus: float, gpus: float) -> str:
    """`4 CPUs and 1 GPU`"""
    told = f"{cpus:g} CPU{'s' * (cpus != 1)}"
    return told + (f" and {gpus:g} GPU{'s' * (gpus != 1)}" if gpus else "")
