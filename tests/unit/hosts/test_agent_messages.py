"""Messages of agents, probes and the Ray broker survive JSON, and a field of a wrong type is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from manyhands.errors import ProtocolError
from manyhands.hosts import agent_messages as agents
from manyhands.hosts import probe
from manyhands.hosts.host_facts import HostFacts, PairFacts
from manyhands.hosts.invitation import Invitation
from manyhands.hosts.machine import Machine
from manyhands.hosts.ray import messages as broker
from manyhands.hosts.ray.resources import RayNode, RaySlot
from manyhands.hosts.spec import Entry
from manyhands.hosts.timeouts import Timeouts
from manyhands.transport import Credentials
from manyhands.transport.fields import encode

MACHINE = Machine("h", "i", 2, 0, {"torch": "2"})
FACTS = HostFacts("h", 2, 1.5, 10, 5, {"torch": "2"}, "10.0.0.1", "eth0", (1, 2))
PAIR = PairFacts("a", "b", round_trip_s=0.5, clock_s=-3.0, there_bytes_per_s=1e6)
KEYS = Credentials("authority", "certificate", "key")
INVITATION = Invitation("worker-0", "unix:/a", "/tmp", {"a": [1]}, Timeouts(), KEYS, secret="s")
SLOT = RaySlot(3, "worker", 2, gpu=True)
TASK = broker.AgentTask("tcp://h:1", "key", "job.py", "/home", False, {"A": "b"}, Timeouts())

SETS = {
    "from agents": (
        agents.FROM_AGENT,
        [
            agents.AgentHello(MACHINE, Entry("rank-1", "worker", 1, devices=("cpu",)), "p", True),
            agents.AgentReady(True, agents.ProbeInfo(FACTS, "tcp://h:1")),
            agents.Started("worker-0", 7),
            agents.StartFailed("worker-0", "no memory"),
            agents.MemberEnded("worker-0", -9),
            agents.MemberOutput("worker-0"),
            agents.Leaving("SIGTERM"),
            agents.LinkBeat(),
            agents.Measured(PAIR),
        ],
    ),
    "to agents": (
        agents.TO_AGENT,
        [
            agents.AgentAdmitted("h", "c", None, "t", "/m", 1.0, 15.0, "s"),
            agents.AgentRefused("another version"),
            agents.RankTaken("h"),
            agents.StartMember("worker-0", "module", 2, INVITATION),
            agents.TerminateMember("worker-0"),
            agents.KillMember("worker-0"),
            agents.LinkBeat(),
            agents.EndAgent(75),
            agents.MeasureHost("b", "tcp://b:1", 0.4),
        ],
    ),
    "probes": (
        probe.PROBE,
        [
            probe.Ping(),
            probe.Pong(1e9),
            probe.Upload(),
            probe.Uploaded(1e8),
            probe.Download(0.4),
            probe.Chunk(),
            probe.ChunksEnd(),
        ],
    ),
    "to the broker": (
        broker.TO_BROKER,
        [
            broker.ConnectRay("auto", 2, None),
            broker.ReserveSlots((SLOT,), 1, "spread", TASK),
            broker.ReleaseSlot(3),
            broker.AgentJoined(3),
            broker.AgentLost(3),
            broker.EndBroker(),
        ],
    ),
    "from the broker": (
        broker.FROM_BROKER,
        [
            broker.RayConnected("h:1", "h", True, False, (RayNode("h", "10.0.0.1", 2.0, 0.0),)),
            broker.RayFailed("no cluster"),
            broker.FreeResources({"CPU": 1.5}),
            broker.ActorRefused(3, "no manyhands"),
            broker.ActorDied(3, "killed"),
        ],
    ),
}


def through_json(message: Any) -> dict[str, Any]:
    return json.loads(encode(message))


@pytest.mark.parametrize("name", SETS)
def test_every_message_survives_json(name: str) -> None:
    kinds, messages = SETS[name]
    assert {type(message) for message in messages} == set(kinds.kinds.values())
    for message in messages:
        assert kinds.read(through_json(message)) == message


class Odd:
    """Not JSON: of no type that a field may have."""


@pytest.mark.parametrize("name", SETS)
def test_a_field_that_is_missing_or_of_another_type_is_refused(name: str) -> None:
    kinds, messages = SETS[name]
    for message in messages:
        head = through_json(message)
        for field in dataclasses.fields(message):
            with pytest.raises(ProtocolError, match=field.name):
                kinds.read({**head, field.name: Odd()})
            required = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            if required:
                with pytest.raises(ProtocolError, match=f"{field.name} is missing"):
                    kinds.read({key: value for key, value in head.items() if key != field.name})


def test_secrets_of_an_invitation_are_not_in_its_repr() -> None:
    shown = repr(dataclasses.replace(INVITATION, secret="a secret of the run"))
    assert "a secret of the run" not in shown
    assert "key=" not in shown
