"""Starts members on a Ray cluster: the actor in each slot is an agent, and starts one member.

The broker (hosts/ray) reserves the slots. Everything else works as with other agents: a lost node is detected
by its link, its members count as dead, and the run continues. The broker then starts another actor in that
slot. Ray places it on any node as soon as there is room, and a member is started there.

Cost: one idle process of Ray for each member, and one beside the coordinator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.errors import ManyhandsError
from manyhands.hosts.launchers.agents import AgentLauncher
from manyhands.hosts.launchers.base import LauncherContext
from manyhands.hosts.launchers.nodes import AgentNode
from manyhands.hosts.ray.broker_client import BrokerClient
from manyhands.hosts.ray.messages import (
    ActorDied,
    ActorRefused,
    AgentJoined,
    AgentLost,
    AgentTask,
    FreeResources,
    ReleaseSlot,
    ReserveSlots,
)
from manyhands.hosts.ray.resources import RaySlot, describe, in_order, waits
from manyhands.hosts.spec import COORDINATOR, ClusterSpec, Entry
from manyhands.hosts.timeouts import Timeouts
from manyhands.hosts.view import WORKER

PASSED_ON = ("MANYHANDS_DATA",)
"""Variables of the coordinator that members get, unless their node sets them."""
ROOM_S = 6.0
"""Time to wait for the remaining slots if enough are there and the cluster has no free resources."""

MAX_DEATHS = 5
"""Deaths of actors before training begins that end the run."""


class RayLauncher(AgentLauncher):
    kind = "ray"
    again = "--on ray"
    ask_every_s = 5.0

    def __init__(
        self,
        broker: BrokerClient,
        slots: Sequence[RaySlot],
        *,
        key: str,
        job: Path,
        least: int | None = None,
        placement: str = "spread",
        shipped: bool = False,
        shares_memory: bool = False,
    ) -> None:
        """`job`: its file, as members find it. `least`: the number of workers that is enough to begin."""
        host = broker.cluster.host
        own = Entry("coordinator", COORDINATOR, 0, host=host, slots=0)
        spec = ClusterSpec((own, *(slot.entry for slot in slots)), host, None, "Ray", mine=own)
        super().__init__(spec, least=least, shares_memory=shares_memory)
        self._broker = broker
        first, spare = in_order(slots, least)
        self._request = ReserveSlots(
            (*first, *spare),
            len(first),
            placement,
            AgentTask(
                address="",  # known when there is a coordinator, and so are its timeouts
                key=key,
                job=str(job),
                folder=os.getcwd(),
                shipped=shipped,
                variables={name: os.environ[name] for name in PASSED_ON if name in os.environ},
                timeouts=Timeouts(),
            ),
        )
        self._slots = list(self._request.slots)
        self._slots_lock = threading.Lock()
        self._free: dict[str, float] = {}
        self._printed: set[str] = set()
        self._num_deaths = 0
        self._lost = ""
        """Reason why Ray provides no more slots."""
        self._surplus = 0
        """Number of slots to release."""
        self._next_rank = 1 + max(slot.rank for slot in slots)

    def attach(self, context: LauncherContext) -> None:
        super().attach(context)
        cluster = self._broker.cluster
        if cluster.started:
            why = ", as none was found" if cluster.none_found else ""
            context.notify(
                f"a Ray cluster of this machine alone was started{why}; it ends with the run"
            )
        self._broker.listen(self._handle)
        task = replace(self._request.task, address=context.address, timeouts=context.timeouts)
        self._request = replace(self._request, task=task)
        self._broker.send(self._request)

    def has_room(self, workers: int, servers: int) -> bool:
        if super().has_room(workers, servers):
            return True
        if self._lost:
            raise ManyhandsError(self._lost)
        return False

    def want(self, workers: int) -> None:
        """Request more slots from Ray, or release surplus slots as soon as no member is in them."""
        with self._slots_lock:
            present = [slot for slot in self._slots if slot.role == WORKER]
            self._surplus = max(0, len(present) - workers)
            for number in range(len(present), workers):
                model = present[number % len(present)]  # as devices take turns
                slot = replace(model, rank=self._next_rank)
                self._next_rank += 1
                self._slots.append(slot)
                self._broker.send(replace(self._request, slots=(slot,), num_together=0))

    def on_beat(self) -> None:
        with self._slots_lock:
            nodes = {node.entry.rank: node for node in self.roster.agents}
            for slot in [slot for slot in reversed(self._slots) if slot.role == WORKER]:
                node = nodes.get(slot.rank)
                if self._surplus and (node is None or not node.running):
                    self._surplus -= 1
                    self._slots.remove(slot)
                    if node is not None:
                        node.leaving = True
                    self._broker.send(ReleaseSlot(slot.rank))

    # Messages of the broker -------------------------------------------------------------------

    def _handle(self, message: Any) -> None:
        if self.roster.ended.is_set():
            return
        match message:
            case None:
                self._on_ray_lost()
            case FreeResources(amounts):
                self._free = amounts
            case ActorRefused(_, text):
                if self.gathered and text not in self._printed:
                    self._printed.add(text)
                    self.context.notify(text)
                self._refused = self._refused or text
            case ActorDied(rank, why):
                self._on_death(rank, why)

    def _on_ray_lost(self) -> None:
        text = (
            f"the Ray cluster at {self._broker.cluster.address} is lost "
            f"({self._broker.last_words()})"
        )
        self._lost = f"{text[0].upper()}{text[1:]}."
        self._refused = self._refused or self._lost
        if self.gathered:
            self.context.notify(f"{text}; members that are lost from now on are not replaced")

    def _on_death(self, rank: int, why: str) -> None:
        """Close the link of a dead actor's agent: without a network, the link itself shows nothing."""
        for node in self.roster.agents:
            if node.entry.rank == rank:
                node.link.close()
        if self.gathered:
            return
        self.context.notify(f"the actor of ray-{rank} has ended ({why}); requesting another")
        self._num_deaths += 1
        if self._num_deaths >= MAX_DEATHS:
            self._refused = self._refused or (
                f"Ray has given slots, and {self._num_deaths} actors in them ended before training "
                f"began: {why} See Ray's logs on the nodes: /tmp/ray/session_latest/logs."
            )

    # Gathering --------------------------------------------------------------------------------

    @property
    def _grace_s(self) -> float:
        cpus = min(slot.cpus for slot in self._slots)
        full = bool(self._free) and self._free["CPU"] < cpus
        return ROOM_S if full else super()._grace_s

    def _waiting(self, missing: Sequence[Entry]) -> str:
        return waits(len(missing), len(self._slots), self._free)

    def _too_late(self, missing: Sequence[Entry]) -> str:
        waited = self.context.timeouts.gather_s
        return (
            f"Ray has not given {describe(self._slots)} within {waited:.0f} s: "
            f"{self._waiting(missing)}. Ask for fewer, or wait longer with  --wait SECONDS."
        )

    def _on_joined(self, node: AgentNode) -> None:
        self._broker.send(AgentJoined(node.entry.rank))
        if self.gathered:
            self.context.notify(f"Ray has given {node.entry.name}, on {node.host}")

    def on_lost(self, node: AgentNode, why: str) -> None:
        if any(slot.rank == node.entry.rank for slot in self._slots):  # else it was released
            self.context.notify(f"{node.entry.name} on {node.host} is lost: its agent {why}")
            self._broker.send(AgentLost(node.entry.rank))

    def end(self, code: int) -> None:
        super().end(code)
        self._broker.close()
