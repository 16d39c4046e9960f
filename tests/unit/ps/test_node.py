"""Which workers serve by default, and what happens if the owner of shared memory has died."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.compute.train_state import TrainState
from manyhands.embeddings.local_tables import LocalTables
from manyhands.errors import LinkError, ViewChanging
from manyhands.hosts.me import Me
from manyhands.hosts.view import Seat, View
from manyhands.ps.block_store import FlatTensors
from manyhands.ps.config import ParameterServer
from manyhands.ps.model_layout import layout_of
from manyhands.ps.node import PsNode
from manyhands.ps.transports import NetworkTransport, SharedMemoryTransport
from manyhands.strategies.registry import make_strategy

NAMES = [f"worker-{n}" for n in range(5)]


def servers(spec: str, model: nn.Module, *, shared: bool) -> list[str]:
    train_state = TrainState(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).sum(),
        tables=LocalTables.of(model, seed=1),
    )
    config = make_strategy(spec)
    assert isinstance(config, ParameterServer)
    node = PsNode(config, train_state, cast(Me, None))  # not used yet
    node.transport = SharedMemoryTransport(node) if shared else NetworkTransport(node)
    return node.servers_in(View(1, tuple(Seat(name, "here") for name in NAMES)))


def small() -> nn.Module:
    return nn.Linear(3, 2)


def large() -> nn.Module:
    return nn.Linear(600, 600)


def with_table() -> nn.Module:
    return nn.Sequential(mh.SparseEmbedding(100, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["ps:sync", "ps:async"])
def test_inside_a_host_only_workers_with_a_block_serve(name: str) -> None:
    assert servers(name, small(), shared=True) == NAMES[:2], "the block, and its replica"
    assert servers(f"{name}(replicas=0)", small(), shared=True) == NAMES[:1]
    assert servers(name, large(), shared=True) == NAMES
    assert servers(f"{name}(servers=4)", small(), shared=True) == NAMES[:4], "as given"


def test_all_workers_serve_if_they_hold_rows_or_memory_is_not_shared() -> None:
    assert servers("ps:async", small(), shared=False) == NAMES
    assert servers("ps:sync", with_table(), shared=True) == NAMES
    assert servers("ps:async", with_table(), shared=True) == NAMES[:2], "workers change the rows"
    assert servers("ps:async", with_table(), shared=False) == NAMES


class FilledBoard:
    """A board with the facts that a member posted before it died; records messages."""

    def __init__(self, posted: dict[str, str]) -> None:
        self.posted = posted
        self.sent: list[object] = []

    def post(self, key: str, value: str) -> None:
        self.posted[key] = value

    def fetch(self, key: str, *, timeout_s: float) -> str:
        return self.posted[key]

    def send(self, message: object) -> None:
        self.sent.append(message)


def memory_of_a_dead_process() -> str:
    """Return the address of shared memory whose process has ended."""
    code = "from manyhands.transport.shm import Segment; print(Segment.create(1 << 20).address)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("what", ["rounds", "params", "tables"])
def test_attaching_memory_of_a_dead_member_waits_for_the_next_view(
    what: str, tmp_path: Path
) -> None:
    """The leader has posted the address of its memory, and is killed before worker-1 attaches it."""
    model, gone = with_table(), memory_of_a_dead_process()
    train_state = TrainState(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).sum(),
        tables=LocalTables.of(model, seed=1),
    )
    leader = FlatTensors.shared(
        layout_of(train_state.model, train_state.optimizer), label="test-parameters"
    )
    assert leader.segment is not None
    posted = {
        "params": gone if what == "params" else leader.segment.address,
        "tables": json.dumps(dict.fromkeys(train_state.tables.specs, gone)),
        "rounds": gone,
    }
    view = View(2, tuple(Seat(name, "here") for name in NAMES[:3]))
    board = FilledBoard({f"ps/2/{key}": value for key, value in posted.items()})
    me = Me(NAMES[1], "here", "cpu", tmp_path, view, board=board, newest_view=2)
    config = make_strategy("ps:sync")
    assert isinstance(config, ParameterServer)
    node = PsNode(config, train_state, me)
    assert isinstance(node.transport, SharedMemoryTransport)
    node.transport._has_tables = what == "rounds"

    def form_a_view() -> None:
        me.newest_view = 3

    coming = threading.Timer(0.05, form_a_view)
    coming.start()
    with pytest.raises(ViewChanging, match="gone"), me.view_change_on_lost_peer():
        node.enter(view)
    coming.join()
    leader.close()
    assert not board.sent, "no new view was requested"


def test_tables_are_kept_until_the_new_ones_are_attached() -> None:
    """Otherwise the rows would be lost if the other process dies first."""
    tables = LocalTables.of(nn.ModuleDict({"users": mh.SparseEmbedding(100, 4)}), seed=1)
    (name,) = tables.specs
    before = tables.stores.store(name)
    with pytest.raises(LinkError, match="gone"):
        tables.stores.attach({name: memory_of_a_dead_process()})
    assert tables.stores.store(name) is before
    tables.stores.close()
