"""Messages between the coordinator, its broker and the actors: one dataclass each.

Coordinator and broker exchange one JSON object a line, by `kind`. An actor gets an ActorTask as the argument
of Ray's call, and returns an ActorEnd.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.hosts.ray.resources import RayNode, RaySlot
from manyhands.hosts.timeouts import Timeouts
from manyhands.transport.fields import Count, Finite, MessageSet

# To the broker ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConnectRay:
    """Connect to a cluster, or start one."""

    address: str
    cpus: Count
    """CPUs of a cluster that has to be started."""
    ship: str | None = None
    """A folder that Ray copies to all nodes."""


@dataclass(frozen=True)
class AgentTask:
    """Argument of every actor."""

    address: str
    """Of the coordinator."""
    key: str
    """The run's key."""
    job: str
    """The job's file, as the nodes see it."""
    folder: str
    """The coordinator's working directory."""
    shipped: bool
    """If true, the actor starts in a copy of the folder that Ray has made."""
    variables: dict[str, str]
    """Environment variables for members, where a node does not set them."""
    timeouts: Timeouts


@dataclass(frozen=True)
class ReserveSlots:
    """Reserve slots: the first `num_together` in one placement group, all or none; the others one by one."""

    slots: tuple[RaySlot, ...]
    num_together: Count
    placement: str
    task: AgentTask


@dataclass(frozen=True)
class ReleaseSlot:
    rank: Count


@dataclass(frozen=True)
class AgentJoined:
    """The agent of a slot has connected to the coordinator."""

    rank: Count


@dataclass(frozen=True)
class AgentLost:
    """The agent's link is closed: start another actor in that slot."""

    rank: Count


@dataclass(frozen=True)
class EndBroker:
    """The run has ended: release everything."""


TO_BROKER = MessageSet(ConnectRay, ReserveSlots, ReleaseSlot, AgentJoined, AgentLost, EndBroker)


# From the broker ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayConnected:
    address: str
    """Of the cluster."""
    host: str
    """This machine's address in the cluster."""
    started: bool
    """If true, the cluster was started for this run alone."""
    none_found: bool
    """If true, it was started because none was found."""
    nodes: tuple[RayNode, ...]


@dataclass(frozen=True)
class RayFailed:
    text: str


@dataclass(frozen=True)
class FreeResources:
    """The cluster's free resources, sent while slots are missing."""

    amounts: dict[str, Finite]


@dataclass(frozen=True)
class ActorRefused:
    """An agent can't take part."""

    rank: Count
    text: str


@dataclass(frozen=True)
class ActorDied:
    rank: Count
    why: str


FROM_BROKER = MessageSet(RayConnected, RayFailed, FreeResources, ActorRefused, ActorDied)


# Actors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActorTask:
    slot: RaySlot
    task: AgentTask


@dataclass(frozen=True)
class ActorEnd:
    """End of an actor's agent: its exit code, or the reason why it has none."""

    code: int | None = None
    refused: str = ""
    """Reason why the agent can't take part."""
    ended: str = ""
    """Any other reason why it ended."""
