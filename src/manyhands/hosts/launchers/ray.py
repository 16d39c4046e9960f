"""Members on a Ray cluster: an actor in each slot that Ray gives is an agent, and starts one member.

The broker (cluster/on_ray) asks Ray for the slots; from then on all is as with other agents: their links tell
of a lost node, members there count as dead, and the run goes on. The broker asks for another actor in that
slot, which Ray makes as soon as it has room, on that node or another, and a member is started there.

Cost: an idle process of Ray a member, and one beside the coordinator.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.errors import ManyhandsError
from manyhands.hosts.launchers.agents import AgentLauncher
from manyhands.hosts.launchers.base import LauncherContext
from manyhands.hosts.launchers.posts import AgentNode
from manyhands.hosts.ray.broker_client import BrokerClient
from manyhands.hosts.ray.resources import RaySlot, describe, in_order, waits
from manyhands.hosts.spec import COORDINATOR, ClusterSpec, Entry
from manyhands.hosts.view import WORKER

HANDED_ON = ("MANYHANDS_DATA",)
"""Variables of the coordinator that members have, too, where a node does not say otherwise."""
ROOM_S = 6.0
"""Where fewer are enough to begin with, and nothing is free for the rest: how long to wait for them."""

MAX_DEATHS = 5
"""Of actors, before training has begun."""


class RayLauncher(AgentLauncher):
    kind = "ray"
    again = "--on ray"
    ask_every_s = 5.0

    def __init__(
        self,
        line: BrokerClient,
        slots: Sequence[RaySlot],
        *,
        key: str,
        job: Path,
        least: int | None = None,
        placement: str = "spread",
        shipped: bool = False,
        shares_memory: bool = False,
    ) -> None:
        """`job`: its file, as members find it. `least`: so many workers are enough to begin with."""
        here = Entry("coordinator", COORDINATOR, 0, host=line.host, slots=0)
        theirs = (
            Entry(f"ray-{slot.rank}", slot.role, slot.rank, devices=(slot.device,))
            for slot in slots
        )
        spec = ClusterSpec((here, *theirs), line.host, None, "Ray", mine=here)
        super().__init__(spec, least=least, shares_memory=shares_memory)
        self._line = line
        first, spare = in_order(slots, least)
        self._slots = [*first, *spare]
        self._num_together = len(first)
        self._free: dict[str, float] = {}
        self._told: set[str] = set()
        self._num_deaths = 0
        self._slots_lock = threading.Lock()
        self._lost = ""
        """Why Ray gives nothing any more."""
        self._surplus = 0
        """How many slots are to be given back."""
        self._next_rank = 1 + max(slot.rank for slot in slots)
        self._mode = {
            "key": key,
            "placement": placement,
            "job": str(job),
            "folder": os.getcwd(),
            "shipped": shipped,
            "variables": {name: os.environ[name] for name in HANDED_ON if name in os.environ},
        }

    def attach(self, ground: LauncherContext) -> None:
        super().attach(ground)
        if self._line.started:
            why = ", as none was found" if self._line.none_found else ""
            ground.tell(
                f"a Ray cluster of this machine alone was started{why}; it ends with the run"
            )
        self._line.listen(self._hear)
        told = {"address": ground.address, "timeouts": ground.timeouts.to_dict()}
        self._line.say(
            "gather",
            slots=[dataclasses.astuple(slot) for slot in self._slots],
            together=self._num_together,
            mode={**self._mode, **told},
        )

    def room(self, workers: int, servers: int) -> bool:
        if super().room(workers, servers):
            return True
        if self._lost:
            raise ManyhandsError(self._lost)
        return False

    def want(self, workers: int) -> None:
        """Ask Ray for more; what is too much is given back when nobody is in it."""
        with self._slots_lock:
            here = [slot for slot in self._slots if slot.role == WORKER]
            self._surplus = max(0, len(here) - workers)
            for number in range(len(here), workers):
                model = here[number % len(here)]  # as devices take turns
                slot = replace(model, rank=self._next_rank)
                self._next_rank += 1
                self._slots.append(slot)
                self._line.say("more", slots=[dataclasses.astuple(slot)])

    def _on_beat(self) -> None:
        with self._slots_lock:
            posts = {post.entry.rank: post for post in self._remote}
            for slot in [slot for slot in reversed(self._slots) if slot.role == WORKER]:
                post = posts.get(slot.rank)
                if self._surplus and (post is None or not post.here):
                    self._surplus -= 1
                    self._slots.remove(slot)
                    if post is not None:
                        post.leaving = True
                    self._line.say("fewer", rank=slot.rank)

    # What the broker says ---------------------------------------------------------------------

    def _hear(self, said: Mapping[str, Any] | None) -> None:
        if self._over.is_set():
            return
        match said:
            case None:
                self._on_ray_lost()
            case {"kind": "free", "free": dict(free)}:
                self._free = free
            case {"kind": "refused", "text": str(text)}:
                if self._complete and text not in self._told:
                    self._told.add(text)
                    self.ground.tell(text)
                self._refused = self._refused or text
            case {"kind": "died", "rank": int(rank), "why": str(why)}:
                self._on_death(rank, why)

    def _on_ray_lost(self) -> None:
        text = f"the Ray cluster at {self._line.address} is lost ({self._line.last_words()})"
        self._lost = f"{text[0].upper()}{text[1:]}."
        self._refused = self._refused or self._lost
        if self._complete:
            self.ground.tell(f"{text}; whoever is lost now is not replaced")

    def _on_death(self, rank: int, why: str) -> None:
        """Ray's word counts: the link of a node that is cut off says nothing."""
        for post in self._remote:
            if post.entry.rank == rank:
                post.link.close()
        if self._complete:
            return
        self.ground.tell(f"the actor of ray-{rank} has ended ({why}); Ray is asked for another")
        self._num_deaths += 1
        if self._num_deaths >= MAX_DEATHS:
            self._refused = self._refused or (
                f"Ray has given slots, and {self._num_deaths} actors in them have ended before they had "
                f"begun: {why} Ray's own logs on the nodes say more (/tmp/ray/session_latest/logs)."
            )

    # Who is there -----------------------------------------------------------------------------

    @property
    def _grace_s(self) -> float:
        cpus = min(slot.cpus for slot in self._slots)
        full = bool(self._free) and self._free["CPU"] < cpus
        return ROOM_S if full else super()._grace_s

    def _waiting(self, missing: Sequence[Entry]) -> str:
        return waits(len(missing), len(self._slots), self._free)

    def _too_late(self, missing: Sequence[Entry]) -> str:
        waited = self.ground.timeouts.gather_s
        return (
            f"Ray has not given {describe(self._slots)} within {waited:.0f} s: "
            f"{self._waiting(missing)}. Ask for fewer, or wait longer with  --wait SECONDS."
        )

    def _on_come(self, post: AgentNode) -> None:
        self._line.say("there", rank=post.entry.rank)
        if self._complete:
            self.ground.tell(f"Ray has given {post.entry.name}, on {post.host}")

    def _on_lost(self, post: AgentNode, why: str) -> None:
        if any(slot.rank == post.entry.rank for slot in self._slots):  # else it was given back
            self.ground.tell(f"{post.entry.name} on {post.host} is lost: its agent {why}")
            self._line.say("lost", rank=post.entry.rank)

    def end(self, code: int) -> None:
        super().end(code)
        self._line.close()
