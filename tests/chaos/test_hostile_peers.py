"""Members that say to their peers, in good form, what makes no sense now: each is named and ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.ps.policies import Contribution
from manyhands.testing import harness
from manyhands.testing.conformance import assert_once_an_epoch
from manyhands.transport.fields import write

HOSTILE = """
import gc, json
from dataclasses import dataclass
from manyhands.hosts.member import Member
from manyhands.ps.client import Client
from manyhands.ps.server import Server
from manyhands.testing.jobs import Regression

@dataclass
class Hostile(Regression):
    pause_s: float = 0.02
    words: str = "{}"

    def __post_init__(self):
        self._calls = 0

    def loss(self, output, batch):
        self._calls += 1
        gc.unfreeze()  # or gc.get_objects() lacks what the worker has frozen
        member = next(each for each in gc.get_objects() if isinstance(each, Member))
        when, to, head = json.loads(self.words).get(member.name, (0, "", {}))
        if self._calls == when:
            for link in self._links(to):
                link.send(head)
        return super().loss(output, batch)

    def _links(self, to):
        if to == "servers as a worker":
            clients = [c for c in gc.get_objects() if isinstance(c, Client) and c._leader._link]
            return [each._link for each in clients[-1]._connections.values()]
        servers = [s for s in gc.get_objects() if isinstance(s, Server) and not s._frozen]
        if to == "servers":
            return [peer.link for peer in servers[-1]._view_change.peers.values()]
        sessions = servers[-1]._service.sessions.by_name.items()
        return [session.link for name, session in sessions if name != servers[-1].name]
"""
PUSH = write(Contribution("worker-1", 600, 0, 5, 1, 8.0, 16.0, (8, 16), loss=0.5))
"""Of a step that nobody has begun."""


def hostile(tmp_path: Path, words: dict[str, Any], strategy: str, *flags: str) -> dict[str, str]:
    """Why each member was lost, in a run that finished all the same."""
    job = tmp_path / "hostile.py"
    job.write_text(HOSTILE)
    done = harness.train(
        job,
        tmp_path / "run",
        *("--max-restarts", "20", *flags),
        strategy=strategy,
        workers=4,
        words=json.dumps(words),
        epochs=4,
    )
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert_once_an_epoch(done, samples=98, epochs=4)
    return {event["member"]: event["reason"] for event in done.of("MemberLost")}


def test_inside_a_host(tmp_path: Path) -> None:
    words = {
        "worker-1": (3, "servers as a worker", {"kind": "Rest", "until": 9}),
        "worker-2": (9, "servers", {"kind": "Go"}),
        "worker-3": (15, "workers", {"kind": "NewVersion"}),
    }
    lost = hostile(tmp_path, words, "ps:sync(servers=4)")
    assert lost.keys() == words.keys(), lost
    assert "'Rest' has unknown fields: until" in lost["worker-1"]
    assert "'Go' at the wrong time" in lost["worker-2"]
    assert "version is missing" in lost["worker-3"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "head", "why"),
    [
        (
            "servers as a worker",
            {"kind": "PushMessage", "push": PUSH, "began": 0, "after": 599},
            "push",
        ),
        ("servers", {"kind": "Commit", "version": 700}, "commit"),
        ("servers", {"kind": "SumTaken", "version": 1 << 40}, "taken"),
        ("servers", {"kind": "PartialNorm", "version": 3, "value": 1e30}, "norm"),
        ("servers", {"kind": "SumHeld", "version": 2, "owner": "worker-9"}, "held"),
        ("servers", {"kind": "ReplicaSum", "version": 1}, "sum"),
        ("servers", {"kind": "RecoveryPlan", "plan": {}}, "plan"),
        ("servers", {"kind": "ServerStatus"}, "status"),
        ("workers", {"kind": "NewVersion", "version": "many"}, "version is 'many'"),
        ("workers", {"kind": "ParameterSpan", "version": 1, "span": 10**9}, ""),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else str(value),
)
def test_over_the_network(to: str, head: dict[str, Any], why: str, tmp_path: Path) -> None:
    words = {"worker-1": (4, to, head)}
    lost = hostile(tmp_path, words, "ps:sync(transport=tcp)", "--trust-network")
    assert lost.keys() == {"worker-1"}
    assert why in lost["worker-1"].lower(), lost
